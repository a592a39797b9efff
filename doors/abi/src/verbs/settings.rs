//! The settings of the environment: checked when the first device is opened.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use tracing_subscriber::filter::LevelFilter;
use weft_verbs::cm::LinkOptions;
use weft_verbs::settings;

use super::faults;
use crate::once::ForkOnce;

/// Starts the log where that is wanted, and refuses unknown settings: a program that is meant to run with faults must not run without them. Errors go to the
/// standard error output, once.
///
/// # Errors
/// `EINVAL`.
pub(crate) fn check() -> Result<(), Errno> {
    static CHECKED: ForkOnce<Vec<String>> = ForkOnce::new();
    static SAID: AtomicBool = AtomicBool::new(false);
    let wrong = CHECKED.get_or_init(|| {
        let level: Option<LevelFilter> = settings::LOG.parse().ok().flatten();
        if let Some(level) = level.filter(|level| *level != LevelFilter::OFF) {
            let log = tracing_subscriber::fmt()
                .with_max_level(level)
                .with_writer(std::io::stderr);
            // Fails only if there is a log already, which then continues.
            let _ = log.try_init();
        }
        let wrong = settings::wrong(&settings::OF_VERBS).into_iter();
        let mut wrong: Vec<_> = wrong.map(|wrong| wrong.to_string()).collect();
        wrong.extend(faults::script().err().map(ToOwned::to_owned));
        wrong
    });
    if wrong.is_empty() {
        return Ok(());
    }
    if !SAID.swap(true, Ordering::Relaxed) {
        for what in wrong {
            eprintln!("weft: {what}");
        }
    }
    Err(Errno::INVAL)
}

/// The options of new connections.
pub(crate) fn link() -> LinkOptions {
    static CRC: ForkOnce<bool> = ForkOnce::new();
    LinkOptions {
        crc: *CRC.get_or_init(|| settings::CRC.is("off") != Ok(true)),
        ..LinkOptions::default()
    }
}

/// True if the end of a connection flushes the queue pairs of `weft_ib0`, as it does those of `weft0`.
pub(crate) fn peer_death_flushes() -> bool {
    static FLUSHES: ForkOnce<bool> = ForkOnce::new();
    *FLUSHES.get_or_init(|| settings::PEER_DEATH.is("flush") == Ok(true))
}
