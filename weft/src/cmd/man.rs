//! `weft man`.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use weft_report::manual::{page, write};

use weft_cli::failure::{Exit, Failure};

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
        let mut text = Vec::new();
        command.build();
        for of in &args.of {
            let above = command.get_bin_name().unwrap_or("weft").to_owned();
            let found = command.find_subcommand(of).cloned();
            command = found.ok_or_else(|| {
                Failure::usage(format!("there is no subcommand `{of}` of `{above}`"))
                    .hint(format!("`{above} --help` lists them"))
            })?;
        }
        let plain = command.clone().term_width(80).render_long_help();
        page(command)
            .render(&mut text)
            .map_err(|e| Failure::failed(format!("cannot make the manual page: {e}")))?;
        if !io::stdout().is_terminal() {
            weft_cli::print(&text);
        } else if !FORMATTERS.iter().any(|words| show(words, &text)) {
            // Without a program that formats pages, the help has the same texts.
            weft_cli::print(plain.to_string().as_bytes());
        }
    }
    Ok(Exit::Ok)
}

/// Programs that show a page on the terminal.
const FORMATTERS: [&[&str]; 2] = [&["man", "-l", "-"], &["mandoc", "-a"]];

/// Shows a page by a program; whether it could.
fn show(words: &[&str], page: &[u8]) -> bool {
    let spawned = Command::new(words[0])
        .args(&words[1..])
        .stdin(Stdio::piped())
        .spawn();
    let Ok(mut child) = spawned else {
        return false;
    };
    // A reader may leave before the end.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(page));
    child.wait().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_goes_to_the_first_program_that_takes_it() {
        let page = b"text";
        assert!(!show(&["no-such-program"], page));
        assert!(!show(&["false"], page));
        assert!(show(&["grep", "-q", "text"], page));
    }
}
