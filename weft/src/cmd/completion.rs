//! `weft completion`.

use clap_complete::Shell;

use weft_cli::failure::{Exit, Failure};

const EXAMPLES: &str = "\
Examples:
  weft completion bash > ~/.local/share/bash-completion/completions/weft
  weft completion zsh > ~/.zfunc/_weft
  weft completion fish > ~/.config/fish/completions/weft.fish";

/// Options of `weft completion`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints a completion script of this command line.
pub fn run(args: &Args, command: &mut clap::Command) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "weft", &mut script);
    weft_cli::print(&script);
    Ok(Exit::Ok)
}
