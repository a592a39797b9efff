//! The terminal that somebody looks at: its width, tables that fit it, and its keys.

use std::fmt::Display;
use std::io::{IsTerminal, Stdin, Write, stderr, stdin, stdout};
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use weft_report::terminal::in_locale;

/// Columns of standard output; `None` for a file or a pipe, whose lines may have any length.
pub fn width() -> Option<u16> {
    weft_report::terminal::width(&stdout())
}

/// A line on standard error. That nobody takes it is no reason to end.
pub fn tell(line: impl Display) {
    let _ = writeln!(stderr(), "{line}");
}

/// The lines of a text that is drawn again and again, as many as the terminal has: the first ones would scroll away.
pub fn first_screen(text: &str) -> String {
    let rows = tcgetwinsize(stdout()).map_or(0, |size| usize::from(size.ws_row));
    cut_to(text, rows)
}

fn cut_to(text: &str, rows: usize) -> String {
    let lines = text.lines().count();
    // The cursor stands below the last line.
    let Some(shown) = rows.checked_sub(2).filter(|_| lines >= rows) else {
        return text.to_owned();
    };
    let screen: String = text.split_inclusive('\n').take(shown).collect();
    format!("{screen}... {} lines more\n", lines - shown)
}

/// Column titles or values, two that share a column where the terminal is narrow.
pub type Pairs<const N: usize> = [[String; 2]; N];

/// A table of pairs: a line for each row where that fits, else the second of each pair below the first.
/// From the column pair `numbers` on, cells are aligned to the right.
pub fn table<const N: usize>(
    header: &Pairs<N>,
    rows: &[Pairs<N>],
    numbers: usize,
    width: Option<u16>,
) -> String {
    let wide = laid_out(
        &header.concat(),
        rows.iter().map(|row| row.concat()),
        2 * numbers,
        None,
    );
    let longest = wide.lines().map(|line| line.chars().count()).max();
    if width.is_none_or(|width| longest.unwrap_or(0) <= usize::from(width)) {
        return wide;
    }
    let stacked = |pairs: &Pairs<N>| pairs.clone().map(|pair| pair.join("\n"));
    laid_out(&stacked(header), rows.iter().map(stacked), numbers, width)
}

fn laid_out<Row: AsRef<[String]>>(
    header: &[String],
    rows: impl Iterator<Item = Row>,
    numbers: usize,
    width: Option<u16>,
) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    if let Some(width) = width {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width);
    }
    for row in rows {
        table.add_row(row.as_ref());
    }
    for column in table.column_iter_mut().skip(numbers) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    in_locale(&table.to_string()).into_owned()
}

/// Keys one by one, while it lives: without Enter, not shown.
pub struct Keys {
    before: Termios,
    input: Stdin,
}

impl Keys {
    /// `None` without a terminal to read from and one to write to.
    pub fn new() -> Option<Self> {
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return None;
        }
        let before = tcgetattr(stdin()).ok()?;
        let mut now = before.clone();
        // Signals of the keyboard come as keys too, so that the terminal is always put back.
        now.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        now.special_codes[SpecialCodeIndex::VMIN] = 1;
        now.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(stdin(), OptionalActions::Now, &now).ok()?;
        Some(Self {
            before,
            input: stdin(),
        })
    }

    /// Wait so long; `true` as soon as `q`, Ctrl-C or Ctrl-D is pressed or the terminal is gone.
    pub fn quits_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).unwrap_or_default();
            let mut fds = [PollFd::new(&self.input, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return true,
                Ok(_) => {
                    let mut key = [0; 1];
                    match rustix::io::read(&self.input, &mut key) {
                        Ok(1) if !matches!(key[0], b'q' | b'Q' | 3 | 4) => {}
                        _ => return true,
                    }
                }
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = tcsetattr(&self.input, OptionalActions::Now, &self.before);
    }
}

/// A text in lines of `columns`; all but the first are indented.
pub fn wrapped(columns: usize, indent: usize, text: &str) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split_inclusive(' ') {
        let len = word.trim_end().chars().count();
        if column > indent && column + len > columns {
            out.truncate(out.trim_end().len());
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        }
        out.push_str(word);
        column += word.chars().count();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_drawn_again_fits_the_screen() {
        let text = "1\n2\n3\n4\n5\n";
        assert_eq!(cut_to(text, 5), "1\n2\n3\n... 2 lines more\n");
        assert_eq!(cut_to(text, 6), text);
        // The size is not known.
        assert_eq!(cut_to(text, 0), text);
    }

    #[test]
    fn a_narrow_terminal_has_two_lines_a_row() {
        let pair = |a: &str, b: &str| [a.to_owned(), b.to_owned()];
        let header = [pair("process", "connection"), pair("sent", "received")];
        let row = [
            pair("redis 17", "[2001:db8::1]:40000 → [2001:db8::2]:6379"),
            pair("1 MiB", "2 MiB"),
        ];
        let rows = [row];
        let wide = table(&header, &rows, 1, None);
        assert!(
            wide.lines()
                .any(|l| l.contains("redis 17") && l.contains("2 MiB")),
            "{wide}"
        );
        assert_eq!(table(&header, &rows, 1, Some(120)), wide);
        for width in [40, 60] {
            let narrow = table(&header, &rows, 1, Some(width));
            assert!(
                narrow
                    .lines()
                    .all(|l| l.chars().count() <= usize::from(width)),
                "{narrow}"
            );
            assert!(narrow.contains("2 MiB"), "{narrow}");
        }
    }
}
