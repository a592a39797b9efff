//! Tables, for terminals and for pages.

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, TableStyle, Width,
};

/// The spaces between two columns.
const PADDING: usize = 3;

/// Horizontal lines only, and none between rows: they would double the length of the longer tables.
const STYLE: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('═').junction('═'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// Numbers with their spread are never longer than this; a longer cell is a sentence that begins with a number.
const WHOLE: usize = 32;

/// A column: its header, and its cell for a row.
pub type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> String);

/// Rows of text under headers. Cells after the first column that start like a number are set to the right.
#[derive(Clone, Debug)]
pub struct Table {
    pub(super) headers: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(headers: &[impl AsRef<str>]) -> Self {
        let headers = headers.iter().map(|header| header.as_ref().to_owned());
        Self {
            headers: headers.collect(),
            rows: Vec::new(),
        }
    }

    /// A table of `rows`: each column has its header, and how its cell is made from a row.
    pub fn of<T>(rows: impl IntoIterator<Item = T>, columns: &[Column<'_, T>]) -> Self {
        let headers: Vec<&str> = columns.iter().map(|(header, _)| *header).collect();
        let mut table = Self::new(&headers);
        for row in rows {
            table.push(columns.iter().map(|(_, cell)| cell(&row)));
        }
        table
    }

    #[must_use]
    pub fn row<T: Into<String>>(mut self, cells: impl IntoIterator<Item = T>) -> Self {
        self.push(cells);
        self
    }

    /// Appends a row in place.
    pub fn push<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The table drawn for a terminal `width` columns wide (`None`: as wide as it needs).
    ///
    /// Where a number would have to be cut, the columns are shown in several parts below each other, each with the
    /// first column.
    pub fn to_text(&self, width: Option<u16>) -> String {
        let Some(width) = width else {
            let all: Vec<_> = (0..self.headers.len()).collect();
            return self.part(&all, None);
        };
        let parts = self.parts(usize::from(width));
        let drawn = parts.iter().map(|part| self.part(part, Some(width)));
        drawn.collect::<Vec<_>>().join("\n")
    }

    /// The columns of each part, so that no part needs more than `width`.
    fn parts(&self, width: usize) -> Vec<Vec<usize>> {
        let least = |column| self.least_width(column) + PADDING;
        let first = least(0);
        let (mut parts, mut used) = (vec![vec![0]], first);
        for column in 1..self.headers.len() {
            let part = parts.last_mut().expect("begins with one");
            if used + least(column) <= width || part.len() == 1 {
                part.push(column);
                used += least(column);
            } else {
                used = first + least(column);
                parts.push(vec![0, column]);
            }
        }
        parts
    }

    /// Columns that a column needs: a number stays in one piece, other text is wrapped between words.
    fn least_width(&self, column: usize) -> usize {
        let longest = |text: &str| text.split(' ').map(|word| word.chars().count()).max();
        let header = self.headers.get(column).and_then(|header| longest(header));
        let whole = column == 0 || self.is_numeric(column);
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let cells = cells.map(|cell| match cell.chars().count() {
            chars if whole && chars <= WHOLE => chars,
            _ => longest(cell).unwrap_or(0),
        });
        cells.chain(header).max().unwrap_or(0)
    }

    fn part(&self, columns: &[usize], width: Option<u16>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(STYLE);
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(width);
        }
        let of = |cells: &[String]| -> Vec<String> {
            let cells = columns.iter().map(|&column| cells.get(column));
            cells
                .map(|cell| cell.cloned().unwrap_or_default())
                .collect()
        };
        table.set_header(of(&self.headers));
        for row in &self.rows {
            table.add_row(of(row));
        }
        for (index, &column) in columns.iter().enumerate() {
            let Some(drawn) = table.column_mut(index) else {
                continue;
            };
            if self.is_numeric(column) {
                drawn.set_cell_alignment(CellAlignment::Right);
            }
            let least = u16::try_from(self.least_width(column) + PADDING).unwrap_or(u16::MAX);
            if width.is_some_and(|width| least < width / 2) {
                drawn.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
            }
        }
        table.trim_fmt()
    }

    /// Whether a column holds numbers, and so is aligned to the right.
    pub(super) fn is_numeric(&self, column: usize) -> bool {
        column > 0
            && self.rows.iter().all(|row| {
                row.get(column).is_none_or(|cell| {
                    cell.is_empty() || cell == "-" || cell.starts_with(|c: char| c.is_ascii_digit())
                })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_with_numbers_on_the_right() {
        let table = Table::new(&["op", "GB/s"])
            .row(["write", "3.10"])
            .row(["read", "12.00"]);
        let text = table.to_text(None);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains('.')).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].trim_end().ends_with("3.10"), "{text}");
        assert_eq!(
            lines[0].trim_end().chars().count(),
            lines[1].trim_end().chars().count(),
            "{text}"
        );
        assert_eq!(text.lines().count(), 6, "{text}");
        assert!(!table.is_numeric(0));
        assert!(table.is_numeric(1));
        assert!(!table.is_empty());
    }

    /// At 80 and 120 columns each line fits, and each number is in one piece.
    #[test]
    fn columns_that_do_not_fit_follow_below() {
        let headers: Vec<String> = (0..9)
            .map(|n| format!("weft CRC CPU s/GB sender + receiver {n}"))
            .collect();
        let headers: Vec<_> = headers.iter().map(String::as_str).collect();
        let cell = |n| format!("{n}.24 ({n}.20..{n}.29)");
        let table = Table::new(&[&["size"], &headers[..]].concat())
            .row(["4 KiB".to_owned()].into_iter().chain((0..9).map(cell)))
            .row(["4 MiB".to_owned()].into_iter().chain((0..9).map(cell)));
        for width in [80, 120] {
            let text = table.to_text(Some(width));
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(longest <= Some(width.into()), "{text}");
            for n in 0..9 {
                assert_eq!(text.matches(&cell(n)).count(), 2, "{text}");
            }
            assert!(text.matches("4 KiB").count() > 1, "{text}");
        }
        let wide = table.to_text(None);
        assert_eq!(wide.matches("4 KiB").count(), 1, "{wide}");
    }
}
