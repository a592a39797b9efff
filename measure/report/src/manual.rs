//! Manual pages of a command line.

use std::io;
use std::path::Path;

/// The page of a command. All pages say which program's they are.
pub fn page(command: clap::Command) -> clap_mangen::Man {
    clap_mangen::Man::new(command).source(concat!("weft ", env!("CARGO_PKG_VERSION")))
}

/// Writes the page of a command and those of its subcommands into a folder.
pub fn write(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for below in command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
    {
        write(below, dir)?;
    }
    page(command.clone()).generate_to(dir).map(drop)
}
