//! Reports: sections of text, tables and plots, printed on a terminal or written as one self-contained HTML page.
//!
//! The page needs no network and no JavaScript, and follows the reader's light or dark background. Beside them: [`size`]s as users write
//! them, [`stats`] of runs, results that are kept as a [`record`], what the user's [`terminal`] can show, [`manual`] pages, and where the other
//! [`programs`] of the tree are.
#![forbid(unsafe_code)]

mod bars;
mod html;
pub mod manual;
pub mod named;
mod plot;
pub mod record;
pub mod size;
pub mod stats;
mod table;
pub mod terminal;

pub use bars::{Bars, Mark};
pub use plot::{Axis, Plot, Series, Stroke};
pub use table::{Column, Table};
pub use weft_service::programs;

/// A piece of a [`Section`].
#[derive(Clone, Debug)]
pub enum Block {
    Text(String),
    Table(Table),
    /// A plot; terminals do not show it.
    Plot(Plot),
    /// Ratios as bars; terminals do not show them.
    Bars(Bars),
}

/// A titled part of a [`Report`].
#[derive(Clone, Debug)]
pub struct Section {
    pub title: String,
    /// The content of the section, in order.
    pub blocks: Vec<Block>,
}

impl Section {
    /// An empty section.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            blocks: Vec::new(),
        }
    }

    /// Appends a paragraph.
    #[must_use]
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.blocks.push(Block::Text(text.into()));
        self
    }

    /// Whether any of its tables has a row.
    pub fn has_rows(&self) -> bool {
        let mut blocks = self.blocks.iter();
        blocks.any(|block| matches!(block, Block::Table(table) if !table.is_empty()))
    }

    #[must_use]
    pub fn table(mut self, table: Table) -> Self {
        self.blocks.push(Block::Table(table));
        self
    }

    /// Appends ratios as bars.
    #[must_use]
    pub fn bars(mut self, bars: Bars) -> Self {
        self.blocks.push(Block::Bars(bars));
        self
    }

    /// Appends a plot; one without points is left out.
    #[must_use]
    pub fn plot(mut self, plot: Plot) -> Self {
        if plot.has_points() {
            self.blocks.push(Block::Plot(plot));
        }
        self
    }
}

/// A report: what `--html` writes and, without its plots, what the terminal shows.
#[derive(Clone, Debug)]
pub struct Report {
    /// Heading of the page.
    pub title: String,
    /// The subject, the machine and the method of the measurements; one paragraph each.
    pub intro: Vec<String>,
    pub sections: Vec<Section>,
}

impl Report {
    /// An empty report.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            intro: Vec::new(),
            sections: Vec::new(),
        }
    }

    /// The plots with a file name for each, made from its title.
    pub fn plots(&self) -> Vec<(String, &Plot)> {
        let blocks = self.sections.iter().flat_map(|section| &section.blocks);
        blocks
            .filter_map(|block| match block {
                Block::Plot(plot) => Some((file_name(plot.title()), plot)),
                _ => None,
            })
            .collect()
    }

    pub fn to_html(&self) -> String {
        html::page(self)
    }

    /// The tables and their paragraphs for a terminal `width` columns wide (`None`: as wide as it needs).
    pub fn to_text(&self, width: Option<u16>) -> String {
        let mut out = String::new();
        let mut line = |text: &str| {
            out.push_str(&wrapped(text, width));
            out.push('\n');
        };
        line(&self.title);
        for paragraph in &self.intro {
            line(paragraph);
        }
        let has_table = |section: &&Section| {
            let mut blocks = section.blocks.iter();
            blocks.any(|block| matches!(block, Block::Table(table) if !table.is_empty()))
        };
        for section in self.sections.iter().filter(has_table) {
            line(&format!("\n{}", section.title));
            for block in &section.blocks {
                match block {
                    Block::Text(text) => line(text),
                    Block::Table(table) if !table.is_empty() => line(&table.to_text(width)),
                    Block::Table(_) | Block::Plot(_) | Block::Bars(_) => {}
                }
            }
        }
        out
    }
}

/// A paragraph in lines of `width` columns, cut at spaces; unchanged if it fits or consists of lines already.
fn wrapped(text: &str, width: Option<u16>) -> String {
    let Some(width) = width.map(usize::from) else {
        return text.to_owned();
    };
    let mut out = String::new();
    for (at, line) in text.split('\n').enumerate() {
        out.extend((at > 0).then_some('\n'));
        if line.chars().count() <= width {
            out.push_str(line);
            continue;
        }
        let mut column = 0;
        for word in line.split(' ') {
            let long = word.chars().count();
            if column > 0 && column + 1 + long > width {
                out.push('\n');
                column = 0;
            } else if column > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += long;
        }
    }
    out
}

/// A title in lower case with dashes for everything that is neither letter nor digit.
fn file_name(title: &str) -> String {
    let mut name = String::new();
    for c in title.chars() {
        if c.is_ascii_alphanumeric() {
            name.push(c.to_ascii_lowercase());
        } else if !name.ends_with('-') && !name.is_empty() {
            name.push('-');
        }
    }
    name.trim_end_matches('-').to_owned()
}

/// A number with as many digits as a reader can use: three significant ones, no exponent.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if size >= 1e6 {
        format!("{:.2} M", value / 1e6)
    } else if size >= 1e4 {
        format!("{:.1} k", value / 1e3)
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 0.1 {
        format!("{value:.2}")
    } else if size >= 0.01 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

/// Percent of the last ten seconds in which something waited for a processor, from which on figures are those of a busy machine.
const CROWDED: f64 = 10.0;

/// A notice for measurements that begin now, if other work keeps the processors busy; `None` also where the kernel does not say.
pub fn crowding() -> Option<String> {
    crowding_of(weft_sys::cpu_pressure()?)
}

fn crowding_of(waited: f64) -> Option<String> {
    (waited >= CROWDED).then(|| {
        format!(
            "other work decides the figures: in {waited:.0} % of the last ten seconds something waited for one of the {} processors",
            weft_sys::cpu_count()
        )
    })
}

/// A description of this machine: CPU, number of CPUs, memory, kernel.
pub fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown CPU", |(_, name)| name);
    let cpus = weft_sys::cpu_count();
    let memory = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let kib = text
                .lines()
                .find_map(|line| line.strip_prefix("MemTotal:"))?;
            kib.trim()
                .trim_end_matches(" kB")
                .trim()
                .parse::<u64>()
                .ok()
        })
        .map_or_else(String::new, |kib| {
            format!(", {:.0} GiB of memory", kib as f64 / f64::from(1 << 20))
        });
    let system = rustix::system::uname();
    format!(
        "{model}, {cpus} CPUs{memory}, {} {} ({})",
        system.sysname().to_string_lossy(),
        system.release().to_string_lossy(),
        system.machine().to_string_lossy(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_is_reported_where_it_decides() {
        let notice = crowding_of(49.13).unwrap();
        assert!(notice.contains("in 49 %"), "{notice}");
        assert!(crowding_of(10.0).is_some());
        assert_eq!(crowding_of(9.99), None);
    }

    fn report() -> Report {
        let mut report = Report::new("A <report>");
        report.intro.push("Intro & all".to_owned());
        let plot = Plot::new("Speed", Axis::bytes(), Axis::linear("GB/s"))
            .series(Series::new(
                "weft",
                Stroke::Weft,
                vec![(1.0, 0.5), (4096.0, 3.0)],
            ))
            .series(Series::new(
                "tcp",
                Stroke::Tcp,
                vec![(1.0, 0.4), (4096.0, 2.0)],
            ));
        report.sections.push(
            Section::new("One")
                .text("Some text")
                .table(Table::new(&["size", "GB/s"]).row(["4 KiB", "3.00"]))
                .plot(plot)
                .plot(Plot::new("Nothing", Axis::bytes(), Axis::linear("GB/s"))),
        );
        report
    }

    #[test]
    fn a_page_stands_alone() {
        let page = report().to_html();
        assert!(page.contains("A &lt;report&gt;"));
        assert!(page.contains("Intro &amp; all"));
        assert!(page.contains("<td class=\"n\">3.00</td>"));
        assert_eq!(page.matches("<svg").count(), 1, "an empty plot is left out");
        for foreign in ["<script", "<link", "src=", "@import"] {
            assert!(!page.contains(foreign), "{foreign} in the page");
        }
    }

    #[test]
    fn paragraphs_fit_the_terminal() {
        let text = "Numbers are medians, with the smallest and largest run in brackets.";
        assert_eq!(wrapped(text, None), text);
        assert_eq!(wrapped(text, Some(80)), text);
        let narrow = wrapped(text, Some(20));
        assert!(narrow.lines().all(|line| line.len() <= 20), "{narrow}");
        assert_eq!(narrow.replace('\n', " "), text);
    }

    #[test]
    fn plots_have_file_names() {
        let report = report();
        let names: Vec<String> = report.plots().into_iter().map(|plot| plot.0).collect();
        assert_eq!(names, ["speed"]);
        assert_eq!(
            file_name("RDMA Write: (CRC on), 1.5 "),
            "rdma-write-crc-on-1-5"
        );
    }

    #[test]
    fn text_has_the_tables() {
        let text = report().to_text(Some(80));
        assert!(text.contains("Some text"));
        assert!(text.contains("4 KiB"));
        assert!(!text.contains("<svg"));
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.012_345, "0.012"),
            (0.001_23, "0.0012"),
            (0.5, "0.50"),
            (3.456, "3.46"),
            (34.56, "34.6"),
            (345.6, "346"),
            (1234.0, "1234"),
            (12_345.0, "12.3 k"),
            (1_234_567.0, "1.23 M"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}
