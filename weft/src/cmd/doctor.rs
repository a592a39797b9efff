//! `weft doctor`.

use std::net::SocketAddr;

use crate::cp;
use crate::doctor::{self, same_host};
use weft_cli::failure::{Exit, Failure};

/// Options of `weft doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Report on the machine's RNICs: versions, devices, and a test of every operation over loopback on each
    #[arg(long, conflicts_with = "json")]
    report: bool,
    /// Be the second process of the check of the same-host transport
    #[arg(long, value_name = "ADDR:PORT", hide = true, exclusive = true)]
    peer: Option<SocketAddr>,
}

/// Prints what the machine supports; fails only when something essential is missing.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    if let Some(addr) = args.peer {
        let probe = same_host::probe(addr).map_err(|e| Failure::failed(e.to_string()))?;
        weft_cli::say(probe);
        return Ok(Exit::Ok);
    }
    if args.report {
        let good = doctor::rnic::report(&mut |line| weft_cli::say(line));
        return Ok(if good { Exit::Ok } else { Exit::Failed });
    }
    let program = std::env::current_exe().map_err(|e| {
        Failure::failed(format!("cannot find this program's file: {e}")).hint("mount /proc")
    })?;
    let checks = doctor::all(
        same_host::Peer::Program(&program),
        &[
            ("cp port", cp::DEFAULT_PORT),
            ("hello port", super::hello::DEFAULT_PORT),
        ],
    );
    if args.json {
        for check in &checks {
            weft_cli::say(check.json());
        }
    } else {
        weft_cli::say(doctor::table(&checks));
    }
    let missing = checks.iter().any(|c| c.verdict == doctor::Verdict::Missing);
    Ok(if missing { Exit::Failed } else { Exit::Ok })
}
