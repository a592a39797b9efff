//! How tests wait, and how they run in a thread or a process of their own. The tests of other crates include this file too.

use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long a test waits for what must happen.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until this holds: for states that no event announces.
///
/// # Panics
/// If it does not hold in time.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The state of a process, or of a thread (`self/task/TID`): `S` sleeps, `T` is stopped.
pub fn state(task: &str) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{task}/stat")).ok()?;
    stat.rsplit(')').next()?.trim().chars().next()
}

/// Runs a function that may wait for ever on a separate thread. Returns the receiver of its result.
pub fn aside<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let _ = tell.send(f());
    });
    told
}

/// [`aside`], which returns once the thread sleeps in its call.
///
/// # Panics
/// If the thread does not come to sleep in time.
pub fn asleep<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = channel();
    let result = aside(move || {
        let _ = tell.send(rustix::thread::gettid());
        f()
    });
    let thread = told.recv().expect("the thread runs");
    let task = format!("self/task/{}", thread.as_raw_nonzero());
    until("the thread sleeps", || state(&task) == Some('S'));
    result
}

/// Runs this test again in a process of its own, where this returns true: for a test that measures or limits its process. In the first process it returns
/// false, once the other one has ended well.
///
/// # Panics
/// If the test fails there.
pub fn alone(test: &str) -> bool {
    const ALONE: &str = "WEFT_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--exact", test, "--nocapture"]);
    let out = command.env(ALONE, "1").output().expect("a process");
    let said = String::from_utf8_lossy(&out.stdout);
    print!("{said}{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("1 passed"), "{test}");
    false
}
