//! What the environment says: `WEFT_LOG`, `WEFT_CRC`, `WEFT_FAULTS`. `WEFT_DEVICES` is read in `device.rs`, `WEFT_LOCAL` by the crates below.

use std::sync::OnceLock;

use rustix::io::Errno;
use tracing_subscriber::filter::LevelFilter;
use weft_verbs::cm::LinkOptions;

use super::faults;

/// Begin to log where that is wanted, and refuse settings that say nothing known: a program that believes it runs with faults must not run
/// without them. What is wrong is said on the standard error output, once.
///
/// # Errors
/// `EINVAL`.
pub(crate) fn check() -> Result<(), Errno> {
    static CHECKED: OnceLock<bool> = OnceLock::new();
    let good = CHECKED.get_or_init(|| {
        let mut good = true;
        let mut complain = |what: &str| {
            eprintln!("weft: {what}");
            good = false;
        };
        match level(std::env::var("WEFT_LOG").ok().as_deref()) {
            Ok(LevelFilter::OFF) => {}
            Ok(level) => {
                let log = tracing_subscriber::fmt()
                    .with_max_level(level)
                    .with_writer(std::io::stderr);
                // Only if there is a log already, which then goes on.
                let _ = log.try_init();
            }
            Err(what) => complain(what),
        }
        if let Err(what) = crc(std::env::var("WEFT_CRC").ok().as_deref()) {
            complain(what);
        }
        if let Err(what) = faults::script() {
            complain(what);
        }
        good
    });
    if *good { Ok(()) } else { Err(Errno::INVAL) }
}

/// How connections are made.
pub(crate) fn link() -> LinkOptions {
    static CRC: OnceLock<bool> = OnceLock::new();
    LinkOptions {
        crc: *CRC.get_or_init(|| crc(std::env::var("WEFT_CRC").ok().as_deref()).unwrap_or(true)),
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
    }
}
