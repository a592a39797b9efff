//! `weft man`.

use std::path::PathBuf;

use crate::failure::{Exit, Failure};

/// Options of `weft man`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write weft.1 and a page for every subcommand into this directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
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
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .map_err(|e| Failure::failed(format!("cannot make the manual page: {e}")))?;
        super::print(&page);
    }
    Ok(Exit::Ok)
}
