//! The system call filters that container engines install: peers in shared memory work without the forbidden calls.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use weft_dropin::{Weft, free_port, have, say};

use super::carriers;

/// The status with which the helper reports that the machine does not allow the test.
const ELSEWHERE: i32 = 77;
/// podman's and buildah's.
const CONTAINERS: &str = "/usr/share/containers/seccomp.json";

/// Docker's profile, which has no separate package: `./x test` extracts it from the package of Docker's sources.
fn docker() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let there = test.ancestors().nth(3).unwrap().join("docker/seccomp.json");
    let named = std::env::var_os("WEFT_DOCKER_SECCOMP").map(PathBuf::from);
    named.or_else(|| there.exists().then_some(there))
}

/// True if one of a rule's conditions (`includes` or `excludes`) names this.
fn names(rule: &Value, conditions: &str, what: &str, any: &[&str]) -> Option<bool> {
    let list = rule[conditions][what].as_array()?;
    let has = |name: &Value| any.contains(&name.as_str().unwrap_or_default());
    Some(list.iter().any(has))
}

/// True if a rule applies to a container without further capabilities, on this machine. (All kernels are new enough.)
fn holds(rule: &Value) -> bool {
    let machine: &[&str] = match std::env::consts::ARCH {
        "x86_64" => &["amd64", "x86_64"],
        "aarch64" => &["arm64", "aarch64"],
        other => &[other],
    };
    names(rule, "includes", "caps", &[]).is_none()
        && names(rule, "includes", "arches", machine) != Some(false)
        && names(rule, "excludes", "arches", machine) != Some(true)
}

/// The rule for one of its calls, in the macros of `c/forbid.c`.
fn line(rule: &Value, call: &str) -> String {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let what = match rule["action"].as_str() {
        Some("SCMP_ACT_ALLOW") => "SECCOMP_RET_ALLOW".to_owned(),
        Some("SCMP_ACT_ERRNO") => {
            let error = rule["errnoRet"].as_u64().unwrap_or(1);
            format!("SECCOMP_RET_ERRNO | {error}")
        }
        other => panic!("{other:?} is new"),
    };
    let conditions = rule["args"].as_array().map_or(&[][..], Vec::as_slice);
    if conditions.is_empty() {
        return format!("RULE({call}, {what})");
    }
    let mut text = format!("CALL({call}, {})", 3 * conditions.len() + 2);
    for (at, condition) in conditions.iter().enumerate() {
        // Three instructions for each condition, and one for the action.
        let out = 3 * (conditions.len() - 1 - at) + 1;
        let (index, value) = (number(&condition["index"]), number(&condition["value"]));
        let _ = match condition["op"].as_str() {
            Some("SCMP_CMP_EQ") => write!(text, " ARGUMENT({index}, ~0U, {value}U, 0, {out})"),
            Some("SCMP_CMP_NE") => write!(text, " ARGUMENT({index}, ~0U, {value}U, {out}, 0)"),
            Some("SCMP_CMP_MASKED_EQ") => {
                let masked = number(&condition["valueTwo"]);
                write!(text, " ARGUMENT({index}, {value}U, {masked}U, 0, {out})")
            }
            other => panic!("{other:?} is new"),
        };
    }
    format!("{text} THEN({what})")
}

/// A profile as the header for `c/forbid.c`.
fn header(profile: &Path) -> String {
    let text = std::fs::read_to_string(profile).expect("a profile");
    let profile: Value = serde_json::from_str(&text).expect("a profile in JSON");
    let mut rules = String::new();
    let mut cma = false;
    let all = profile["syscalls"].as_array().expect("rules");
    for rule in all.iter().filter(|rule| holds(rule)) {
        for name in rule["names"].as_array().expect("names") {
            let name = name.as_str().expect("a name");
            cma |= name == "process_vm_readv";
            let call = format!("SYS_{name}");
            let _ = writeln!(rules, "#ifdef {call}\n{}\n#endif", line(rule, &call));
        }
    }
    let others = profile["defaultErrnoRet"].as_u64().unwrap_or(1);
    let _ = writeln!(rules, "#define OTHERS {others}");
    if !cma {
        rules.push_str("#define FORBIDS_CMA\n");
    }
    rules
}

/// The helper, compiled; static, so that it runs in any root.
pub(super) fn forbid(dir: &Path, profile: Option<&Path>) -> PathBuf {
    let program = dir.join("forbid");
    let mut cc = Command::new("cc");
    cc.args(["-static", "-Wall", "-Werror", "-o"]).arg(&program);
    if let Some(profile) = profile {
        let list = dir.join("profile.h");
        std::fs::write(&list, header(profile)).unwrap();
        cc.arg(format!("-DPROFILE=\"{}\"", list.display()));
    }
    cc.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/c/forbid.c"));
    assert!(cc.status().unwrap().success());
    program
}

/// The installed profiles; prints the missing ones.
pub(super) fn profiles() -> Vec<PathBuf> {
    let containers = PathBuf::from(CONTAINERS);
    let containers = have(&[(CONTAINERS, "golang-github-containers-common")]).then_some(containers);
    let docker = docker();
    if docker.is_none() {
        say("Docker's seccomp profile: skipped, there is none (./x test fetches it)");
    }
    docker.into_iter().chain(containers).collect()
}

fn under(profile: Option<&Path>) {
    let needed = [
        ("cc", "gcc"),
        ("rping", "rdmacm-utils"),
        ("ib_write_bw", "perftest"),
    ];
    if !have(&needed) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let forbid = forbid(dir.path(), profile);
    let forbid = forbid.display();
    let done = Weft::bare().run(&format!("{forbid} true"));
    if done.code() == ELSEWHERE {
        say(&format!("skipped: {}", done.show()));
        return;
    }
    done.good();
    // The filtered calls move large messages; small ones use them towards a sleeping peer.
    let runs = [
        ("weft0", "ib_write_bw -R -d weft0 -n 100 -s 262144"),
        ("weft_ib0", "ib_write_bw -d weft_ib0 -n 100 -s 262144"),
        ("weft_ib0", "ib_read_bw -d weft_ib0 -n 100 -s 262144"),
        ("weft_ib0", "ib_send_lat -e -d weft_ib0 -n 100 -s 64"),
    ];
    for (device, line) in runs {
        // Shared memory is required: with neither or one side under the filter TCP would hide a failure.
        let weft = Weft::on(device).env("WEFT_LOCAL", "require");
        let port = free_port();
        let line = format!("{forbid} {line} -F -p {port}");
        let (_, client) = weft_dropin::pair(&weft, port, &line, &format!("{line} 127.0.0.1"));
        assert_eq!(client.table().len(), 1, "{}", client.show());
    }
    // The programs check the bytes.
    for weft in carriers("weft0") {
        let port = free_port();
        let common = format!("-a 127.0.0.1 -v -V -S 60000 -C 20 -p {port}");
        let (server, client) = weft_dropin::pair(
            &weft,
            port,
            &format!("{forbid} rping -s {common}"),
            &format!("{forbid} rping -c {common}"),
        );
        client.says("ping data: rdma-ping-19: ");
        server.never_says("verify failed");
    }
}

/// `process_vm_readv(2)` and its like fail with `EPERM`.
#[test]
fn a_filter_forbids_to_reach_into_other_processes() {
    under(None);
}

/// The engines' own profiles, for a container without capabilities.
#[test]
fn the_default_profiles_of_container_engines() {
    for profile in profiles() {
        under(Some(&profile));
    }
}
