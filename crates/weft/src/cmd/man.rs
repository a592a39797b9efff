//! `weft man`.

use std::path::PathBuf;

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
        clap_mangen::generate_to(command, dir).map_err(|e| {
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
        clap_mangen::Man::new(command)
            .render(&mut page)
            .map_err(|e| Failure::failed(format!("cannot make the manual page: {e}")))?;
        super::print(&page);
    }
    Ok(Exit::Ok)
}
