//! The machine's own RDMA devices among the checks, and the report on them.

use std::fmt::Write as _;
use std::fs;

use rustix::process::{Resource, getrlimit};
use weft_nic::{Error, Info, Libraries, Port};

use super::selftest::{self, Outcome};
use super::{Check, Verdict};
use crate::rnics::{self, Rnic};
use weft_cli::failure::without_numbers;

const NAME: &str = "RNICs";
const COST: &str = "it cannot be used; the soft RNIC works without it";

/// True if messages can go through a port.
pub(super) fn is_usable(port: &Port) -> bool {
    rnics::hindrance(port).is_none()
}

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
    for name in weft_nic::nameless(&devices) {
        checks.push(Check::warn(
            NAME,
            format!("{name}: libibverbs has no driver for it"),
            COST,
            "install the drivers of rdma-core (ibverbs-providers)",
        ));
    }
    if checks.is_empty() {
        checks.push(Check::ok(NAME, "none but weft's own, in software"));
    }
    checks
}

fn check(rnic: &Rnic) -> Check {
    let mut finding = rnic.lines().join("\n");
    let remedy = match &rnic.info {
        Err(error) => {
            finding = without_numbers(&error.to_string());
            error
                .hint()
                .unwrap_or("`weft doctor --report`, and the kernel's log (dmesg)")
                .to_owned()
        }
        Ok(_) => match rnic.hindrance() {
            None => return Check::ok(NAME, finding),
            Some(remedy) => remedy,
        },
    };
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
            say(&format!("no RNICs: {error}"));
            if let Some(hint) = error.hint() {
                say(&format!("  {hint}"));
            }
            return false;
        }
    };
    let devices: Vec<_> = rnics.iter().map(|rnic| rnic.device.clone()).collect();
    for name in weft_nic::nameless(&devices) {
        say(&format!("{name}: libibverbs has no driver for it"));
    }
    if rnics.is_empty() {
        say("no RNICs");
    }
    let mut good = true;
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
