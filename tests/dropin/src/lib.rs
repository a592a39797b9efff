//! Runs unmodified verbs programs on the drop-in libraries, and checks the success that the programs report.
//!
//! The libraries are built once for each run of the tests (or taken from `WEFT_VERBS_LIB`). A program is started in its own process group under a time limit,
//! and its group is killed when the test is over. A server is ready when a process listens on its port. The absence of an error does not pass a test: each test
//! looks for the line in which the program reports its work.
#![forbid(unsafe_code)]

mod libraries;
mod net;
mod run;
#[cfg(test)]
mod settings;
mod table;

pub use libraries::{built, libraries};
pub use net::{free_port, hearing, listening};
pub use run::{Done, Running, Weft, datagram_pair, pair};

/// True if all these programs (or files, with a slash) are present; prints the missing one and its Debian package.
pub fn have(needed: &[(&str, &str)]) -> bool {
    let there = |name: &str| {
        if name.contains('/') {
            return std::path::Path::new(name).exists();
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
    };
    let missing: Vec<_> = needed.iter().filter(|(name, _)| !there(name)).collect();
    for (name, package) in &missing {
        let test = std::thread::current().name().unwrap_or("test").to_owned();
        say(&format!(
            "{test} skipped: {name} is missing (apt-get install {package})"
        ));
    }
    missing.is_empty()
}

/// Prints past the test harness, which suppresses the output of passing tests.
pub fn say(text: &str) {
    use std::io::Write;
    // One write, because tests run side by side.
    let _ = std::io::stderr().write_all(format!("dropin: {text}\n").as_bytes());
}
