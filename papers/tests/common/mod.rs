//! What the tests of the program share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses its own part"
)]

use std::process::{Command, Stdio};

/// The program.
pub fn papers() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft-papers"));
    command.stdin(Stdio::null());
    command
}

/// What a program has done.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn of(command: &mut Command) -> Self {
        let out = command.output().unwrap();
        Self {
            code: out.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub fn ok(&self) {
        assert_eq!(self.code, 0, "{self:?}");
    }
}
