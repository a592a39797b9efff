//! The outputs of a suite: tables on standard output, results as lines of JSON, and a page with all of
//! it.

use crate::error::{BenchError, Result};
use crate::report::Report;
use crate::terminal;
use clap::Args;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The source of results of earlier runs.
pub const KEPT: &str =
    "Results of earlier runs, which are kept as JSON; each number's runs are counted there.";

/// The JSON results of earlier runs.
pub fn read<T: DeserializeOwned>(files: &[PathBuf]) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for file in files {
        let unreadable =
            |why: &dyn Display| BenchError::Usage(format!("{}: {why}", file.display()));
        let text = fs::read_to_string(file).map_err(|error| unreadable(&error))?;
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            all.push(serde_json::from_str(line).map_err(|error| unreadable(&error))?);
        }
    }
    Ok(all)
}

/// Options of every suite that has both.
#[derive(Args, Clone, Debug)]
pub struct OutputArgs {
    /// Writes the results as JSON, one object a line
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Writes tables and plots as one self-contained page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

impl OutputArgs {
    /// Opens the files, so that an unwritable file fails before the measurements.
    pub fn open(&self) -> Result<Output> {
        Ok(Output {
            json: self.json.as_deref().map(Out::create).transpose()?,
            html: self.html.as_deref().map(Out::create).transpose()?,
            failures: 0,
        })
    }
}

/// A file that is written.
struct Out(PathBuf, BufWriter<File>);

impl Out {
    fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(|source| cannot_write(path, source))?;
        Ok(Self(path.to_owned(), BufWriter::new(file)))
    }

    fn write(&mut self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
        write(&mut self.1)
            .and_then(|()| self.1.flush())
            .map_err(|source| cannot_write(&self.0, source))
    }
}

/// The error of a file that cannot be written.
pub fn cannot_write(path: &Path, source: io::Error) -> BenchError {
    BenchError::Output {
        path: path.display().to_string(),
        source,
    }
}

/// A suite's results while it runs.
pub struct Output {
    json: Option<Out>,
    html: Option<Out>,
    failures: u32,
}

impl Output {
    /// Writes results as JSON, one object a line.
    pub fn lines<T: Serialize>(&mut self, lines: impl IntoIterator<Item = T>) -> Result<()> {
        let Some(json) = &mut self.json else {
            return Ok(());
        };
        json.write(|file| {
            for line in lines {
                serde_json::to_writer(&mut *file, &line)?;
                file.write_all(b"\n")?;
            }
            Ok(())
        })
    }

    /// Reports that a point could not be measured. It is left out of the results, and the exit status
    /// reports a failure.
    pub fn failed(&mut self, what: &str, why: &dyn Display) {
        self.failures += 1;
        eprintln!("{what}: {why}");
    }

    /// The results of a point, written; none where it has failed.
    pub fn keep<T: Serialize>(&mut self, what: &str, measured: Result<Vec<T>>) -> Result<Vec<T>> {
        match measured {
            Ok(results) => {
                self.lines(&results)?;
                Ok(results)
            }
            Err(error) => {
                self.failed(what, &error);
                Ok(Vec::new())
            }
        }
    }

    /// Prints the report and writes the page.
    pub fn finish(mut self, report: &Report) -> Result<ExitCode> {
        print(report)?;
        if let Some(html) = &mut self.html {
            let written = html.write(|file| file.write_all(report.to_html().as_bytes()));
            if written.is_err() {
                // Half a page is of no use.
                let _ = std::fs::remove_file(&html.0);
            }
            written?;
        }
        if self.failures == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("{} of the points failed", self.failures);
        Ok(ExitCode::FAILURE)
    }
}

/// Prints on standard output; a closed reader is not an error.
fn print(report: &Report) -> Result<()> {
    let text = report.to_text(Some(terminal::reading_width(&io::stdout())));
    match writeln!(io::stdout(), "{}", terminal::in_locale(&text)) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(BenchError::system("print")(error))
        }
        _ => Ok(()),
    }
}
