//! Rows as text, batch by batch: no row waits for the last one.

use std::io::{self, Write};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::csv::WriterBuilder;
use datafusion::arrow::error::ArrowError;
use datafusion::arrow::json::LineDelimitedWriter;
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};

/// Rows of a table that determine the widths of its columns.
const LOOKED_AT: usize = 1000;

/// A form of rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Format {
    /// Columns with borders. Their widths are those of the first 1,000 rows; longer cells stand out.
    #[default]
    Table,
    /// Comma-separated values with a header.
    Csv,
    /// One object a line.
    Json,
}

enum Form<W: Write> {
    Table(TableOut<W>),
    /// `true`: the header is still to be printed.
    Csv(W, bool),
    Json(W),
}

/// Prints rows.
pub struct Printer<W: Write>(Form<W>);

fn said(error: ArrowError) -> io::Error {
    match error {
        ArrowError::IoError(_, error) => error,
        other => io::Error::other(other),
    }
}

impl<W: Write> Printer<W> {
    /// To this output.
    pub fn new(format: Format, out: W) -> Self {
        Self(match format {
            Format::Table => Form::Table(TableOut {
                out,
                names: Vec::new(),
                held: Vec::new(),
                widths: Vec::new(),
            }),
            Format::Csv => Form::Csv(out, true),
            Format::Json => Form::Json(out),
        })
    }

    /// Prints a batch, or the first rows of a table a little later.
    ///
    /// # Errors
    /// When the output cannot be written to, or a column has no such form.
    pub fn batch(&mut self, batch: &RecordBatch) -> io::Result<()> {
        match &mut self.0 {
            Form::Table(table) => table.batch(batch),
            // Through memory: these writers convert errors of the output to text.
            Form::Csv(out, header) => {
                let mut text = Vec::new();
                let builder = WriterBuilder::new().with_header(std::mem::take(header));
                builder.build(&mut text).write(batch).map_err(said)?;
                out.write_all(&text)
            }
            Form::Json(out) => {
                let mut writer = LineDelimitedWriter::new(Vec::new());
                writer.write(batch).map_err(said)?;
                writer.finish().map_err(said)?;
                out.write_all(&writer.into_inner())
            }
        }
    }

    /// Prints the rest.
    ///
    /// # Errors
    /// If the output cannot be written to.
    pub fn finish(self) -> io::Result<()> {
        match self.0 {
            Form::Table(table) => table.finish(),
            Form::Csv(mut out, _) | Form::Json(mut out) => out.flush(),
        }
    }
}

struct TableOut<W> {
    out: W,
    names: Vec<String>,
    /// The first rows, until the widths are known.
    held: Vec<Vec<String>>,
    widths: Vec<usize>,
}

/// Lines of a cell, without characters that a terminal would obey.
fn lines(cell: &str) -> impl Iterator<Item = String> {
    cell.split('\n')
        .map(|line| weft_service::text::printable(line.as_bytes()))
}

impl<W: Write> TableOut<W> {
    fn batch(&mut self, batch: &RecordBatch) -> io::Result<()> {
        if self.names.is_empty() {
            let schema = batch.schema();
            self.names = schema.fields().iter().map(|f| f.name().clone()).collect();
        }
        let options = FormatOptions::default();
        let columns: Vec<_> = batch
            .columns()
            .iter()
            .map(|column| ArrayFormatter::try_new(column.as_ref(), &options))
            .collect::<Result<_, _>>()
            .map_err(said)?;
        for row in 0..batch.num_rows() {
            let mut cells = Vec::with_capacity(columns.len());
            for column in &columns {
                cells.push(column.value(row).try_to_string().map_err(said)?);
            }
            if self.widths.is_empty() {
                self.held.push(cells);
            } else {
                self.row(&cells)?;
            }
        }
        if self.widths.is_empty() && self.held.len() >= LOOKED_AT {
            self.settle()?;
        }
        Ok(())
    }

    /// Finds the widths, and prints the held rows.
    fn settle(&mut self) -> io::Result<()> {
        let names = std::mem::take(&mut self.names);
        let held = std::mem::take(&mut self.held);
        self.widths = vec![0; names.len()];
        for row in held.iter().chain([&names]) {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                let longest = lines(cell).map(|line| line.chars().count()).max();
                *width = longest.unwrap_or(0).max(*width);
            }
        }
        self.border()?;
        self.row(&names)?;
        self.border()?;
        held.iter().try_for_each(|row| self.row(row))
    }

    fn border(&mut self) -> io::Result<()> {
        let dashes: Vec<_> = self.widths.iter().map(|&w| "-".repeat(w + 2)).collect();
        writeln!(self.out, "+{}+", dashes.join("+"))
    }

    fn row(&mut self, cells: &[String]) -> io::Result<()> {
        let mut cells: Vec<_> = cells.iter().map(|cell| lines(cell).fuse()).collect();
        let mut line: Vec<_> = cells.iter_mut().map(Iterator::next).collect();
        while line.iter().any(Option::is_some) {
            for (cell, &width) in line.iter().zip(&self.widths) {
                write!(self.out, "| {:<width$} ", cell.as_deref().unwrap_or(""))?;
            }
            writeln!(self.out, "|")?;
            line = cells.iter_mut().map(Iterator::next).collect();
        }
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        if self.widths.is_empty() && self.names.is_empty() {
            writeln!(self.out, "(no rows)")?;
        } else {
            if self.widths.is_empty() {
                self.settle()?;
            }
            self.border()?;
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::arrow::array::{ArrayRef, Int64Array, StringArray};

    use super::*;

    fn printed(format: Format, batches: &[RecordBatch]) -> String {
        let mut out = Vec::new();
        let mut printer = Printer::new(format, &mut out);
        for batch in batches {
            printer.batch(batch).unwrap();
        }
        printer.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    fn rows(numbers: Vec<Option<i64>>, names: Vec<&str>) -> RecordBatch {
        RecordBatch::try_from_iter([
            ("n", Arc::new(Int64Array::from(numbers)) as ArrayRef),
            ("name", Arc::new(StringArray::from(names)) as ArrayRef),
        ])
        .unwrap()
    }

    #[test]
    fn tables_have_borders_and_obey_no_control_characters() {
        let batches = [
            rows(vec![Some(1), None], vec!["a", "two\nlines"]),
            rows(vec![Some(-30)], vec!["\u{1b}[2J"]),
        ];
        let expected = "\
+-----+-----------+
| n   | name      |
+-----+-----------+
| 1   | a         |
|     | two       |
|     | lines     |
| -30 | \\u{1b}[2J |
+-----+-----------+
";
        assert_eq!(printed(Format::Table, &batches), expected);
        assert_eq!(printed(Format::Table, &[]), "(no rows)\n");
    }

    #[test]
    fn long_tables_come_before_their_end() {
        let batch = rows(vec![Some(5); 600], vec!["x"; 600]);
        let mut out = Vec::new();
        let mut printer = Printer::new(Format::Table, &mut out);
        printer.batch(&batch).unwrap();
        printer.batch(&batch).unwrap();
        printer
            .batch(&rows(vec![Some(6)], vec!["much longer"]))
            .unwrap();
        printer.finish().unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 3 + 1201 + 1);
        assert!(text.contains("| 6 | much longer |"));
    }

    #[test]
    fn csv_and_json_have_a_line_for_each_row() {
        let batches = [
            rows(vec![Some(1)], vec!["a,b"]),
            rows(vec![None], vec!["c"]),
        ];
        assert_eq!(printed(Format::Csv, &batches), "n,name\n1,\"a,b\"\n,c\n");
        let json = printed(Format::Json, &batches);
        assert_eq!(json, "{\"n\":1,\"name\":\"a,b\"}\n{\"name\":\"c\"}\n");
    }
}
