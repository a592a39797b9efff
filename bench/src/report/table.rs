//! Tables, for terminals and for pages.

use comfy_table::{CellAlignment, ContentArrangement, TableComponent, presets};

/// Rows of text under headers. Cells after the first column that start like a number are set to the right.
#[derive(Clone, Debug)]
pub struct Table {
    pub(super) headers: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(headers: &[&str]) -> Self {
        Self {
            headers: headers.iter().map(|&header| header.to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    /// Appends a row.
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
    pub fn to_text(&self, width: Option<u16>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        // Rules between rows would double the length of the longer tables.
        for rule in [
            TableComponent::HorizontalLines,
            TableComponent::MiddleIntersections,
            TableComponent::LeftBorderIntersections,
            TableComponent::RightBorderIntersections,
        ] {
            table.remove_style(rule);
        }
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(width);
        }
        table.set_header(&self.headers);
        for row in &self.rows {
            table.add_row(row);
        }
        for index in 0..self.headers.len() {
            if let Some(column) = table.column_mut(index).filter(|_| self.is_numeric(index)) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt()
    }

    /// Whether a column holds numbers, and so lines up on the right.
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
}
