//! The machine's own RDMA devices among the checks, and the report on them.

use std::fmt::Write as _;
use std::fs;

use rustix::process::{Resource, getrlimit};
use weft_nic::{Error, Info, Libraries};

use super::selftest::{self, Outcome};
use super::{Check, Verdict};
use crate::rnics::{self, Rnic, with_remedy};
use weft_cli::failure::without_numbers;

const NAME: &str = "RNICs";
const COST: &str = "it cannot be used; the soft RNIC works without it";

/// A check for each device, or one that says that there is none.
pub(super) fn checks() -> Vec<Check> {
    checks_of(rnics::all())
}

fn checks_of(found: Result<Vec<Rnic>, Error>) -> Vec<Check> {
    let rnics = match found {
        Ok(rnics) => rnics,
        Err(error) => {
            let mut finding = format!("none but weft's own, in software; {error}");
            // Without devices nobody needs the library.
            if let (Some(hint), true) = (
                error.hint(),
                fs::exists("/sys/class/infiniband").is_ok_and(|is| is),
            ) {
                let _ = write!(finding, " ({hint})");
            }
            return vec![Check::ok(NAME, finding)];
        }
    };
    let mut checks: Vec<_> = rnics.iter().map(check).collect();
    let devices: Vec<_> = rnics.into_iter().map(|rnic| rnic.device).collect();
    checks.extend(weft_nic::unlisted(&devices).iter().map(check_of));
    if checks.is_empty() {
        checks.push(Check::ok(NAME, "none but weft's own, in software"));
    }
    checks
}

fn check(rnic: &Rnic) -> Check {
    if let Err(error) = &rnic.info {
        return check_of(error);
    }
    let finding = rnic.lines().join("\n");
    match rnic.hindrance() {
        None => Check::ok(NAME, finding),
        Some(remedy) => unusable(finding, remedy),
    }
}

fn check_of(error: &Error) -> Check {
    let remedy = error
        .hint()
        .unwrap_or("look at `weft doctor --report` and at the kernel's log (dmesg)");
    unusable(without_numbers(&error.to_string()), remedy.to_owned())
}

fn unusable(finding: String, remedy: String) -> Check {
    Check {
        name: NAME,
        verdict: Verdict::Warn,
        finding,
        cost: COST,
        remedy: remedy.into(),
    }
}

/// What a user with an RNIC sends: versions, devices and the self-test of each. True if nothing has failed.
pub fn report(say: &mut dyn FnMut(&str)) -> bool {
    say(&system());
    let rnics = match rnics::all() {
        Ok(rnics) => rnics,
        Err(error) => {
            say(&format!("no RNICs: {}", with_remedy(&error)));
            return false;
        }
    };
    let devices: Vec<_> = rnics.iter().map(|rnic| rnic.device.clone()).collect();
    let unlisted = weft_nic::unlisted(&devices);
    for error in &unlisted {
        say(&format!("\n{}", with_remedy(error)));
    }
    if rnics.is_empty() && unlisted.is_empty() {
        say("no RNICs");
    }
    let mut good = unlisted.is_empty();
    for rnic in &rnics {
        say("");
        for line in rnic.lines() {
            say(&line);
        }
        if let Some(why) = rnic.hindrance() {
            say(&format!("  unusable: {why}"));
            good = false;
        }
        let Ok(info) = &rnic.info else { continue };
        say(&properties(rnic, info));
        for (operation, outcome) in selftest::run(&rnic.device, info) {
            say(&format!("  {operation:<26} {outcome}"));
            good &= !matches!(outcome, Outcome::Failed(_));
        }
    }
    good
}

fn system() -> String {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let release = read("/etc/os-release");
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let library = Libraries::get().ok().and_then(|libraries| libraries.path());
    // The file's own name has the version of rdma-core.
    let library = library.map(|path| fs::canonicalize(path).unwrap_or_else(|_| path.into()));
    let memlock = match getrlimit(Resource::Memlock).current {
        None => "no limit".to_owned(),
        Some(bytes) => format!("{} KiB", bytes / 1024),
    };
    format!(
        "weft {}, Linux {}, {}, {}\nlibibverbs: {}\nmemlock limit: {memlock}",
        env!("CARGO_PKG_VERSION"),
        read("/proc/sys/kernel/osrelease").trim(),
        std::env::consts::ARCH,
        name.unwrap_or("an unknown system").trim_matches('"'),
        library.map_or("none".to_owned(), |path| path.display().to_string()),
    )
}

fn properties(rnic: &Rnic, info: &Info) -> String {
    format!(
        "  GUID {:016x}, firmware {:?}, vendor {:#x}, part {:#x}, version {:#x}\n  \
         SGEs {}, of a Read {}; work requests {}; Reads on their way {}; SRQs {}, address handles {}, windows {}, atomics {}",
        rnic.device.guid(),
        info.firmware,
        info.vendor,
        info.part,
        info.revision,
        info.max_sge,
        info.max_sge_rd,
        info.max_qp_wr,
        info.max_rd_atomic,
        info.max_srq,
        info.max_ah,
        info.windows,
        info.atomics,
    )
}
