//! `weft doctor`.

use crate::doctor;
use crate::failure::{Exit, Failure};

/// Options of `weft doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Prints what the machine allows; fails only when something essential is missing.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let checks = doctor::all();
    if args.json {
        for check in &checks {
            super::say(check.json());
        }
    } else {
        super::say(doctor::table(&checks));
    }
    let missing = checks.iter().any(|c| c.verdict == doctor::Verdict::Missing);
    Ok(if missing { Exit::Failed } else { Exit::Ok })
}
