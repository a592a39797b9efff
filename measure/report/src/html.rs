//! The page.

use super::{Block, Report, Table};
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#8885}\
body{font:16px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;\
background:Canvas;color:CanvasText}\
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid var(--line)}\
.t{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:.8rem 0}\
th,td{padding:.2rem .7rem;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}\
th{white-space:normal;vertical-align:bottom}td.n,th.n{text-align:right}figure{margin:1rem 0}svg{width:100%;max-width:56rem;height:auto}\
svg text{fill:currentColor;font-family:system-ui,sans-serif}";

pub(super) fn page(report: &Report) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n",
        title = escape(&report.title)
    );
    for paragraph in &report.intro {
        let _ = writeln!(out, "<p>{}</p>", escape(paragraph));
    }
    for section in &report.sections {
        let _ = writeln!(out, "<h2>{}</h2>", escape(&section.title));
        for block in &section.blocks {
            match block {
                Block::Text(text) => {
                    let _ = writeln!(out, "<p>{}</p>", escape(text));
                }
                Block::Table(table) => write_table(&mut out, table),
                Block::Plot(plot) => {
                    let _ = writeln!(out, "<figure>{}</figure>", plot.to_inline_svg());
                }
                Block::Bars(bars) => {
                    let _ = writeln!(out, "<figure>{}</figure>", bars.to_inline_svg());
                }
            }
        }
    }
    out.push_str("</body></html>\n");
    out
}

fn write_table(out: &mut String, table: &Table) {
    let class = |column| {
        if table.is_numeric(column) {
            " class=\"n\""
        } else {
            ""
        }
    };
    out.push_str("<div class=\"t\"><table><thead><tr>");
    for (column, header) in table.headers.iter().enumerate() {
        let _ = write!(out, "<th{}>{}</th>", class(column), escape(header));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in &table.rows {
        out.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(column), escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
