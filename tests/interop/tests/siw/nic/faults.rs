//! Faults during `weft cp` between two processes of the guest: both end with an error that says what has happened, and nothing keeps the device.

use weft_interop::guest::{GUEST, say};

use super::super::{STEP, Siw, siw};
use super::{LONG, cp_on, in_a_shell, prepared, serving};

/// Seconds in which `rdma link delete` must return, emulated on a busy machine.
const REMOVAL: f64 = 10.0;

/// Runs faults.sh; what it prints.
fn with_fault(siw: &mut Siw, device: &str, fault: &str, undo: &str) -> String {
    let script = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(script.path(), include_str!("faults.sh")).unwrap();
    siw.guest.put(script.path(), "/tmp/faults.sh", LONG);
    let line = format!("sh /tmp/faults.sh {device} {GUEST} '{fault}' '{undo}'");
    let done = siw.guest.run(&line, LONG);
    say(&format!("{device}, {fault}:\n{}", done.text));
    assert_eq!(done.status, 0, "{}", done.text);
    done.text
}

/// Seconds that the fault took.
fn seconds(said: &str) -> f64 {
    let line = said.lines().find_map(|line| line.strip_prefix("fault: "));
    let (begun, ended) = line.and_then(|line| line.split_once(" to ")).expect(said);
    ended.parse::<f64>().unwrap() - begun.parse::<f64>().unwrap()
}

fn words_of<'a>(said: &'a str, side: &str) -> Vec<&'a str> {
    let begin = format!("{side} says: ");
    let lines = said.lines();
    lines.filter_map(|line| line.strip_prefix(&begin)).collect()
}

/// A device is removed while a copy goes over it, and is not made again.
fn removed(siw: &mut Siw, device: &str) {
    let said = with_fault(siw, device, &format!("rdma link delete {device}"), "true");
    assert!(seconds(&said) < REMOVAL, "{said}");
    for side in ["sender", "receiver"] {
        let failed = format!("\n{side}: ");
        let status = said.split(&failed).nth(1).expect(&said);
        assert!(!status.starts_with("0 "), "{said}");
        let words = words_of(&said, side).join("\n");
        assert!(words.contains(device), "{side}: {said}");
    }
    // Nobody uses it any more, so the listener has ended by itself.
    assert!(!said.contains("the listener waits"), "{said}");
    let receiver = words_of(&said, "receiver").join("\n");
    assert!(receiver.contains("the device was removed"), "{said}");
}

#[test]
fn the_removal_of_a_device_ends_a_copy_and_returns() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link delete rxe0", STEP);
    removed(&mut siw, "siw0");
    siw.guest
        .must("rdma link add rxe0 type rxe netdev eth0", STEP);
    removed(&mut siw, "rxe0");
    siw.guest
        .must("rdma link add siw0 type siw netdev eth0", STEP);
}

#[test]
fn a_network_that_goes_down_ends_a_copy() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link delete rxe0", STEP);
    let up = "ip link set eth0 up; ip route add default via 10.0.2.2";
    let down = |siw: &mut Siw, device: &str| {
        let said = with_fault(siw, device, "ip link set eth0 down", up);
        assert!(!said.contains("sender: 0 "), "{said}");
        let words = words_of(&said, "sender").join("\n");
        assert!(words.contains(device), "{said}");
        assert!(said.contains("the listener waits"), "{said}");
        let told = format!("port 1 of {device} is down");
        assert_eq!(said.matches(&told).count(), 2, "{said}");
    };
    down(&mut siw, "siw0");
    siw.guest.must(
        "rdma link delete siw0; rdma link add rxe0 type rxe netdev eth0",
        STEP,
    );
    down(&mut siw, "rxe0");
    let back = "rdma link delete rxe0 && rdma link add siw0 type siw netdev eth0";
    siw.guest.must(back, STEP);
}

#[test]
fn a_network_that_loses_packets_loses_no_bytes() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link delete rxe0", STEP);
    // Between two processes of a host siw's connections go over the loopback interface; rxe's packets never leave the driver.
    siw.guest
        .must("/usr/bin/tc qdisc add dev lo root netem loss 1%", STEP);
    let done = siw.guest.run(&in_a_shell(&cp_on("siw0", 16)), LONG);
    let lost = siw.guest.must(
        "/usr/bin/tc -s qdisc show dev lo; /usr/bin/tc qdisc del dev lo root",
        STEP,
    );
    say(&format!("weft cp with losses:\n{}{lost}", done.text));
    assert_eq!(done.status, 0, "{}", done.text);
    assert!(!lost.contains("dropped 0,"), "{lost}");
}

#[test]
fn what_a_user_may_not_do_is_named_with_its_remedy() {
    let Some(mut siw) = siw() else { return };
    prepared(&mut siw);
    siw.guest.must("rdma link delete rxe0", STEP);
    let joe = "echo joe:x:1000:1000::/:/bin/sh >/etc/passwd; chmod 666 /dev/infiniband/*; \
               mkdir -p /tmp/joe; chmod 777 /tmp/joe";
    siw.guest.must(joe, STEP);
    let listen =
        format!("cp --device siw0 --plain --open --once --listen /tmp/joe --bind {GUEST}:7471");
    let as_joe = |before: &str, args: &str| {
        format!("({before}; WEFT_HOME=/tmp/joe timeout 60 su joe -c '/tmp/weft {args}' 2>&1)")
    };

    // No rights on the files of the devices.
    siw.guest.must("chmod 600 /dev/infiniband/*", STEP);
    for args in [
        listen.as_str(),
        &format!("cp --device siw0 --plain /etc/passwd {GUEST}:"),
        "hello --device siw0",
    ] {
        let done = siw.guest.run(&as_joe("true", args), LONG);
        say(&format!("without rights: weft {args}:\n{}", done.text));
        assert_ne!(done.status, 0, "{}", done.text);
        for words in ["siw0", "Permission denied", "let this user read and write"] {
            assert!(done.text.contains(words), "{args}: {words}: {}", done.text);
        }
    }
    siw.guest.must("chmod 666 /dev/infiniband/*", STEP);

    // 64 KiB of locked memory: each side says so when it registers its own.
    let sender = format!("cp --device siw0 --plain /etc/passwd {GUEST}:");
    let serve = serving(&format!("./weft {listen}"), "receiver");
    siw.guest.must(&serve, STEP);
    let done = siw.guest.run(&as_joe("ulimit -l 64", &sender), LONG);
    say(&format!("with 64 KiB of locked memory:\n{}", done.text));
    assert_ne!(done.status, 0, "{}", done.text);
    assert!(!done.text.contains("ulimit -v"), "{}", done.text);
    for words in ["siw0", "ibv_reg_mr", "Cannot allocate memory", "ulimit -l"] {
        assert!(done.text.contains(words), "{words}: {}", done.text);
    }
    siw.guest.must(
        "killall weft; wait; rdma link add rxe0 type rxe netdev eth0",
        STEP,
    );
    siw.guest.must("rdma link delete rxe0", STEP);
}
