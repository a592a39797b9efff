//! The settings of the environment: `WEFT_LOG`, `WEFT_CRC`, `WEFT_FAULTS`, `WEFT_PEER_DEATH`. `WEFT_DEVICES` is read in `device.rs`, `WEFT_LOCAL` by the crates
//! below.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use tracing_subscriber::filter::LevelFilter;
use weft_verbs::cm::LinkOptions;

use super::faults;
use crate::made::Made;

/// Starts the log where that is wanted, and refuses unknown settings: a program that is meant to run with faults must not run without them. Errors go to the
/// standard error output, once.
///
/// # Errors
/// `EINVAL`.
pub(crate) fn check() -> Result<(), Errno> {
    static CHECKED: Made<Vec<&str>> = Made::new();
    static SAID: AtomicBool = AtomicBool::new(false);
    let wrong = CHECKED.get_or_make(|| {
        let mut wrong = Vec::new();
        match level(std::env::var("WEFT_LOG").ok().as_deref()) {
            Ok(LevelFilter::OFF) => {}
            Ok(level) => {
                let log = tracing_subscriber::fmt()
                    .with_max_level(level)
                    .with_writer(std::io::stderr);
                // Fails only if there is a log already, which then continues.
                let _ = log.try_init();
            }
            Err(what) => wrong.push(what),
        }
        if let Err(what) = crc(std::env::var("WEFT_CRC").ok().as_deref()) {
            wrong.push(what);
        }
        if let Err(what) = peer_death(std::env::var("WEFT_PEER_DEATH").ok().as_deref()) {
            wrong.push(what);
        }
        if let Err(what) = faults::script() {
            wrong.push(what);
        }
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
    static CRC: Made<bool> = Made::new();
    LinkOptions {
        crc: *CRC.get_or_make(|| crc(std::env::var("WEFT_CRC").ok().as_deref()).unwrap_or(true)),
        ..LinkOptions::default()
    }
}

fn crc(value: Option<&str>) -> Result<bool, &'static str> {
    match value {
        None | Some("" | "on") => Ok(true),
        Some("off") => Ok(false),
        Some(_) => Err("WEFT_CRC has to be on or off"),
    }
}

/// True if the end of a connection flushes the queue pairs of `weft_ib0`, as it does those of `weft0`.
pub(crate) fn peer_death_flushes() -> bool {
    static FLUSHES: Made<bool> = Made::new();
    let read = || peer_death(std::env::var("WEFT_PEER_DEATH").ok().as_deref());
    *FLUSHES.get_or_make(|| read().unwrap_or(false))
}

fn peer_death(value: Option<&str>) -> Result<bool, &'static str> {
    match value {
        None | Some("" | "silent") => Ok(false),
        Some("flush") => Ok(true),
        Some(_) => Err("WEFT_PEER_DEATH has to be silent or flush"),
    }
}

fn level(value: Option<&str>) -> Result<LevelFilter, &'static str> {
    match value {
        None | Some("") => Ok(LevelFilter::OFF),
        Some(text) => text
            .parse()
            .map_err(|_| "WEFT_LOG has to be off, error, warn, info, debug or trace"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read() {
        assert_eq!(level(None), Ok(LevelFilter::OFF));
        assert_eq!(level(Some("debug")), Ok(LevelFilter::DEBUG));
        assert!(level(Some("loud")).is_err());
        assert_eq!(crc(Some("off")), Ok(false));
        assert_eq!(crc(None), Ok(true));
        assert!(crc(Some("no")).is_err());
        assert_eq!(peer_death(Some("flush")), Ok(true));
        assert_eq!(peer_death(None), Ok(false));
        assert!(peer_death(Some("loud")).is_err());
    }
}
