//! `weft man`.

use std::io;
use std::path::{Path, PathBuf};

use crate::failure::{Exit, Failure};

/// Options of `weft man`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write weft.1 and a page for every subcommand into this directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The page of this subcommand, as in `weft man fs serve`
    #[arg(value_name = "SUBCOMMAND", conflicts_with = "dir")]
    of: Vec<String>,
}

/// Prints or writes manual pages of this command line.
pub fn run(args: &Args, command: clap::Command) -> Result<Exit, Failure> {
    if let Some(dir) = &args.dir {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        write(&command, dir).map_err(|e| {
            Failure::failed(format!(
                "cannot write manual pages to {}: {e}",
                dir.display()
            ))
            .hint("name a directory that exists and that you can write to")
        })?;
    } else {
        let mut command = command;
        let mut page = Vec::new();
        command.build();
        for of in &args.of {
            let above = command.get_bin_name().unwrap_or("weft").to_owned();
            let found = command.find_subcommand(of).cloned();
            command = found.ok_or_else(|| {
                Failure::usage(format!("there is no subcommand `{of}` of `{above}`"))
                    .hint(format!("`{above} --help` lists them"))
            })?;
        }
        page_of(command)
            .render(&mut page)
            .map_err(|e| Failure::failed(format!("cannot make the manual page: {e}")))?;
        super::print(&page);
    }
    Ok(Exit::Ok)
}

/// All pages say which program's they are.
fn page_of(command: clap::Command) -> clap_mangen::Man {
    clap_mangen::Man::new(command).source(concat!("weft ", env!("CARGO_PKG_VERSION")))
}

/// Writes the page of a command and those of its subcommands.
fn write(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for below in command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
    {
        write(below, dir)?;
    }
    page_of(command.clone()).generate_to(dir).map(drop)
}
