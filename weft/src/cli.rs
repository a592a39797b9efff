//! The command line.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use weft_cli::args;
use weft_cli::failure::{EXIT_CODES, Failure};
use weft_cli::global::Global;
use weft_cli::program::read;
use weft_cli::{say, terminal};

use crate::cmd;
use crate::cmd::dispatch::{BENCH, CC, FS, JOIN, MEDIA};

const ENVIRONMENT: &str = "\
Environment (these variables apply to every program that uses the weft
libraries; a value that is not accepted is an error):
  WEFT_LOCAL      Shared memory between processes of this host and user:
                  `off`, never; `auto` (the default), if both support it;
                  `require`, or the connection fails
  WEFT_LOCAL_DIR  A directory that is mounted into several containers, in which
                  they find each other across network namespaces
  WEFT_TLS        `on`: use TLS and refuse connections without it;
                  `off` (the default)
  WEFT_TLS_KEY    A file with our private key (PKCS #8 PEM, Ed25519); default: a
                  key for this process only
  WEFT_TLS_PEERS  A file with the public keys or fingerprints of accepted peers,
                  one a line; default: any peer
  WEFT_STAT       `off`: hide this process from `weft stat`
  WEFT_LOG        Log level on stderr: `off`, `error`, `warn`, `info`, `debug`,
                  `trace`. Takes precedence over -v and -q. Default: `warn` for
                  the subcommands, `off` for the drop-in libraries alone";

fn after() -> String {
    format!("{ENVIRONMENT}\n\n{EXIT_CODES}")
}

/// RDMA on any machine: no RNIC, no kernel module, no root.
#[derive(Debug, Parser)]
#[command(name = "weft", version, propagate_version = true, after_long_help = after())]
pub struct Cli {
    /// Options of every subcommand.
    #[command(flatten)]
    pub global: Global,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Copy files to another machine with RDMA Writes, receive or fetch them
    #[command(long_about = cmd::cp::LONG)]
    Cp(cmd::cp::Args),
    /// Serve movies and live streams by RDMA Reads, and watch them
    #[command(long_about = args::media::LONG)]
    Media(Box<args::media::Args>),
    /// Use the memory of other machines as files, or offer this machine's memory
    #[command(long_about = args::fs::LONG)]
    Fs(args::fs::Args),
    /// Run SQL joins on a ring of workers
    #[command(long_about = JOIN.long)]
    Join(cmd::dispatch::Args),
    /// Compile C and C++ on other machines, or for them
    #[command(long_about = args::cc::LONG)]
    Cc(args::cc::Args),
    /// The daemon of `weft cc` with the connections to the workers (started automatically)
    Ccd(args::cc::DaemonArgs),
    /// Make the key pair by which peers recognise this user, and manage known peers
    #[command(long_about = cmd::key::LONG)]
    Key(cmd::key::Args),
    /// The first RDMA program: write to a peer's memory and read it back
    #[command(long_about = cmd::hello::LONG)]
    Hello(cmd::hello::Args),
    /// Measure RDMA operations, unmodified programs and remote files compared with plain TCP
    #[command(long_about = BENCH.long)]
    Bench(cmd::dispatch::Args),
    /// Show the connections of this host's weft processes
    #[command(long_about = cmd::stat::LONG)]
    Stat(cmd::stat::Args),
    /// Run an unmodified program that uses libibverbs and librdmacm
    #[command(long_about = cmd::verbs::LONG)]
    Verbs(cmd::verbs::Args),
    /// Run an MPI job on weft (Open MPI or MPICH)
    #[command(long_about = cmd::mpi::LONG)]
    Mpi(cmd::mpi::Args),
    /// Run an unmodified TCP or UDP program, with shared memory to its peers on this host
    #[command(long_about = cmd::run::LONG)]
    Run(cmd::run::Args),
    /// Carry connections of `weft run --hosts` to other hosts
    #[command(long_about = cmd::broker::LONG)]
    Broker(cmd::broker::Args),
    /// Measure this machine, watch a program's socket calls, and advise which part of weft fits it
    #[command(long_about = cmd::advise::LONG)]
    Advise(cmd::advise::Args),
    /// Check what weft needs from this machine, and name a remedy for what is missing
    Doctor(cmd::doctor::Args),
    /// Move a file by RDMA and by plain TCP, measure both, and write a report
    Demo(cmd::demo::Args),
    /// Print a dissector of weft's own formats for Wireshark and tshark
    #[command(long_about = cmd::dissector::LONG)]
    Dissector(cmd::dissector::Args),
    /// Print the manual page, or write a page for every subcommand
    Man(cmd::man::Args),
    /// Print the completion script of a shell
    #[command(alias = "completions")]
    Completion(cmd::completion::Args),
    /// The same as --version
    #[command(hide = true)]
    Version,
}

/// The subcommands as the help shows them; those that others start come last.
const GROUPS: [(&str, &[&str]); 6] = [
    (
        "Run programs that you have",
        &["run", "verbs", "mpi", "advise"],
    ),
    ("Applications", &["cp", "fs", "cc", "media", "join"]),
    ("Keys and connections", &["key", "stat", "doctor"]),
    ("Try and measure", &["hello", "demo", "bench"]),
    (
        "Help for tools",
        &["man", "completion", "dissector", "help"],
    ),
    ("Started by other subcommands", &["broker", "ccd"]),
];
/// Columns of the help.
const WIDTH: usize = 80;
/// Columns of a subcommand's name.
const NAME: usize = 14;

/// The command line with its subcommands in groups in the help.
fn grouped(mut command: clap::Command) -> clap::Command {
    command.build();
    let mut list = String::new();
    for (heading, names) in GROUPS {
        list.push_str(heading);
        list.push_str(":\n");
        for name in names {
            let about = command
                .find_subcommand(name)
                .and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let line = format!("  {name:<width$}{about}", width = NAME - 2);
            list.push_str(&terminal::wrapped(WIDTH, NAME, &line));
            list.push('\n');
        }
        list.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
    ))
}

impl Cli {
    /// Reads the command line; ends the program where it cannot be used.
    #[must_use]
    pub fn of_program() -> Self {
        let matches = read(grouped(Self::command()));
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// Runs the subcommand.
    pub fn run(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Cp(args) => cmd::cp::run(&args, self.global).map(Into::into),
            Command::Media(_) => MEDIA.missing(),
            Command::Fs(_) => FS.missing(),
            Command::Join(args) => JOIN.run(&args),
            Command::Cc(_) | Command::Ccd(_) => CC.missing(),
            Command::Key(args) => cmd::key::run(&args, self.global).map(Into::into),
            Command::Hello(args) => cmd::hello::run(&args).map(Into::into),
            Command::Bench(args) => BENCH.run(&args),
            Command::Demo(args) => cmd::demo::run(&args).map(Into::into),
            Command::Stat(args) => cmd::stat::run(&args).map(Into::into),
            Command::Verbs(args) => cmd::verbs::run(&args),
            Command::Mpi(args) => cmd::mpi::run(&args),
            Command::Run(args) => cmd::run::run(&args),
            Command::Broker(args) => cmd::broker::run(&args, self.global),
            Command::Advise(args) => cmd::advise::run(&args),
            Command::Doctor(args) => cmd::doctor::run(&args).map(Into::into),
            Command::Dissector(args) => cmd::dissector::run(&args).map(Into::into),
            Command::Man(args) => cmd::man::run(&args, Cli::command()).map(Into::into),
            Command::Completion(args) => {
                cmd::completion::run(&args, &mut Cli::command()).map(Into::into)
            }
            Command::Version => {
                say(Cli::command().render_version().trim_end());
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_has_each_subcommand_in_one_group() {
        let mut command = Cli::command();
        command.build();
        let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let mut shown: Vec<_> = shown.map(clap::Command::get_name).collect();
        let mut listed: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).collect();
        shown.sort_unstable();
        listed.sort_unstable();
        assert!(listed.into_iter().eq(&shown), "{shown:?}");
        let help = grouped(Cli::command()).render_help().to_string();
        assert!(
            help.contains("Applications:\n  cp          Copy files"),
            "{help}"
        );
        assert!(
            help.lines().all(|line| line.chars().count() <= WIDTH),
            "{help}"
        );
    }

    /// clap would break lines with a fixed layout (indented lines and usages) at any place.
    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        fn check(command: &mut clap::Command) {
            let texts = [
                command.get_long_about(),
                command.get_before_long_help(),
                command.get_after_help(),
                command.get_after_long_help(),
            ];
            for line in texts.into_iter().flatten().flat_map(|text| {
                let lines: Vec<_> = text.to_string().lines().map(str::to_owned).collect();
                lines
            }) {
                assert!(
                    !line.starts_with("  ") || line.chars().count() <= 80,
                    "{}: {line}",
                    command.get_name()
                );
            }
            let usage = command.render_usage().to_string();
            for line in usage.lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
            // Those that the benchmarks start themselves are not shown.
            let shown = |command: &&mut clap::Command| !command.is_hide_set();
            command.get_subcommands_mut().filter(shown).for_each(check);
        }
        let mut command = Cli::command();
        command.build();
        check(&mut command);
    }
}
