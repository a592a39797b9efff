//! ibverbs-utils: lists of devices.

use weft_dropin::{Weft, have};

const UTILS: &[(&str, &str)] = &[
    ("ibv_devices", "ibverbs-utils"),
    ("ibv_devinfo", "ibverbs-utils"),
];

#[test]
fn ibv_devices() {
    if !have(UTILS) {
        return;
    }
    let names = |devices| {
        let done = Weft::on(devices).run("ibv_devices");
        done.good();
        let rows = done.text.lines().skip(2);
        rows.filter_map(|row| Some(row.split_whitespace().next()?.to_owned()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names("weft0,weft_ib0"), ["weft0", "weft_ib0"]);
    assert_eq!(names("weft_ib0,weft0"), ["weft_ib0", "weft0"]);
    assert_eq!(names("weft_ib0"), ["weft_ib0"]);
}

#[test]
fn ibv_devinfo() {
    if !have(UTILS) {
        return;
    }
    let done = Weft::on("weft0,weft_ib0").run("ibv_devinfo -v");
    done.good();
    // Two devices, in that order.
    let (iwarp, persona) = done.text.split_once("hca_id:\tweft_ib0").expect("weft_ib0");
    for line in [
        "hca_id:\tweft0",
        "transport:\t\t\tiWARP (1)",
        "link_layer:\t\tEthernet",
        "PORT_ACTIVE (4)",
    ] {
        assert!(iwarp.contains(line), "{line}: {iwarp}");
    }
    for line in [
        "transport:\t\t\tInfiniBand (0)",
        "link_layer:\t\tEthernet",
        "PORT_ACTIVE (4)",
        "ATOMIC_HCA (1)",
        // The loopback address, as RoCE v2 has it.
        "::ffff:127.0.0.1, RoCE v2",
    ] {
        assert!(persona.contains(line), "{line}: {persona}");
    }
    let done = Weft::on("weft0").run("ibv_devinfo -d weft_ib0");
    assert!(!done.is_good(), "{}", done.show());
}
