//! Options of every subcommand.

use clap::ArgAction;
use tracing::level_filters::LevelFilter;
use weft_verbs::settings::LOG;

use crate::failure::Failure;

/// Help lists these options after those of the subcommand, and before `--help`.
const LAST: usize = 998;

/// Options of every subcommand.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Global {
    /// Log more on stderr; twice: still more. `WEFT_LOG=off|error|warn|info|debug|trace` takes precedence
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = LAST)]
    pub verbose: u8,
    /// Print only errors
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = LAST)]
    pub quiet: bool,
}

impl Global {
    /// Sends log lines to stderr, at the level of `WEFT_LOG` or of the options.
    ///
    /// # Errors
    /// A level that does not exist.
    pub fn start_log(self) -> Result<(), Failure> {
        let asked = LOG.parse()?;
        let level = asked.unwrap_or(match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::ERROR,
            (_, 0) => LevelFilter::WARN,
            (_, 1) => LevelFilter::INFO,
            _ => LevelFilter::DEBUG,
        });
        tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .log_internal_errors(false)
            .with_target(false)
            .init();
        Ok(())
    }
}
