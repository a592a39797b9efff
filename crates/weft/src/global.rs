//! Options of every subcommand.

use clap::ArgAction;
use tracing::level_filters::LevelFilter;

/// Help lists these options after those of the subcommand, and before `--help`.
const LAST: usize = 998;

/// Options of every subcommand.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Global {
    /// Log more on stderr; twice: everything. `WEFT_LOG=off|error|warn|info|debug|trace` chooses a level
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = LAST)]
    pub verbose: u8,
    /// Print only errors
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = LAST)]
    pub quiet: bool,
}

impl Global {
    /// Sends log lines to stderr, at the level of `WEFT_LOG` or of the options.
    pub fn start_log(self) {
        let named = std::env::var("WEFT_LOG").ok().filter(|v| !v.is_empty());
        let asked = named.as_ref().and_then(|v| v.parse().ok());
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
        if let (Some(name), None) = (named, asked) {
            tracing::warn!(
                "WEFT_LOG={name} is no level: write off, error, warn, info, debug or trace"
            );
        }
    }
}
