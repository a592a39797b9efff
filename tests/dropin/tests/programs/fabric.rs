//! libfabric: its provider `verbs`, and weft's own.

use weft_dropin::{Weft, free_port, have, libraries, pair};

use super::carriers;

const PACKAGE: &str = "libfabric-bin";

#[test]
fn fi_info() {
    if !have(&[("fi_info", PACKAGE)]) {
        return;
    }
    let done = Weft::on("weft0").run("fi_info -p verbs -t FI_EP_MSG");
    done.good()
        .says("provider: verbs")
        .says("domain: weft0")
        .says("type: FI_EP_MSG");
    let done = Weft::on("weft_ib0").run("fi_info -p verbs -t FI_EP_MSG");
    done.good().says("domain: weft_ib0");
    // For MPI: reliable datagrams on top.
    let done = Weft::on("weft0").run("fi_info -p verbs;ofi_rxm");
    done.good().says("type: FI_EP_RDM");
}

#[test]
fn fi_pingpong() {
    if !have(&[("fi_pingpong", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let port = free_port();
        let common = "-p verbs -e msg -c -I 50 -S all";
        let (server, client) = pair(
            &weft,
            port,
            &format!("fi_pingpong {common} -B {port}"),
            &format!("fi_pingpong {common} -P {port} 127.0.0.1"),
        );
        for done in [server, client] {
            // bytes #sent #ack total time MB/sec usec/xfer Mxfers/sec
            done.says("usec/xfer").never_says("error");
            let sizes = done.text.lines().filter(|l| l.contains(" =50 "));
            assert!(sizes.count() > 5, "{}", done.show());
        }
    }
}

/// libfabric with the provider in the libraries' folder.
pub(super) fn provider() -> Weft {
    Weft::bare()
        .env("FI_PROVIDER_PATH", libraries())
        .env("WEFT_FI_ADDR", "127.0.0.1")
}

#[test]
fn fi_info_finds_the_provider() {
    if !have(&[("fi_info", PACKAGE)]) {
        return;
    }
    let done = provider().run("fi_info -p weft");
    done.good().says("provider: weft").says("type: FI_EP_RDM");
    // It does not offer unsupported capabilities.
    let done = provider().run("fi_info -p weft -c FI_RMA");
    assert!(!done.is_good(), "{}", done.show());
    let done = provider().run("fi_info -p weft -t FI_EP_MSG");
    assert!(!done.is_good(), "{}", done.show());
}

/// `-c`: both ends check each byte. The sizes exceed the threshold of Write-Record. The second round lowers it, and the third loses packets.
#[test]
fn fi_pingpong_on_the_provider() {
    if !have(&[("fi_pingpong", PACKAGE)]) {
        return;
    }
    let rounds = [
        (provider(), "-I 3 -S all"),
        (
            provider().env("WEFT_FI_RENDEZVOUS", "64"),
            "-I 20 -S 100000",
        ),
        (provider().env("WEFT_FI_DROP", "3"), "-I 20 -S 20000"),
        (provider().env("WEFT_FI_DROP", "3"), "-I 5 -S 4000000"),
    ];
    for (weft, options) in rounds {
        let port = free_port();
        let common = format!("-p weft -e rdm -c {options}");
        let (server, client) = pair(
            &weft,
            port,
            &format!("fi_pingpong {common} -B {port}"),
            &format!("fi_pingpong {common} -P {port} 127.0.0.1"),
        );
        for done in [server, client] {
            done.says("usec/xfer").never_says("error");
            let sizes = done.text.lines().filter(|l| l.contains("s ")).count();
            assert!(sizes > if options.contains("all") { 20 } else { 0 });
        }
    }
}

/// `fabric.c`: sources, counters, receives of many messages, a program that sleeps on a queue's descriptor, and threads that share a queue, also with losses
/// and over connections.
#[test]
fn what_programs_of_libfabric_ask_of_the_provider() {
    if !have(&[("/usr/include/rdma/fi_endpoint.h", "libfabric-dev")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("fabric").display().to_string();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/fabric.c");
    let mut cc = std::process::Command::new("cc");
    let built = cc.args(["-O1", "-o", &program, source, "-lfabric", "-pthread"]);
    assert!(built.status().expect("cc").success());
    let line = format!("{program} weft");
    let datagrams = provider().env("WEFT_LOCAL", "off");
    for weft in [
        provider(),
        datagrams.clone(),
        datagrams.clone().env("WEFT_FI_DROP", "5"),
        datagrams.env("WEFT_FI_RC", "4"),
    ] {
        weft.run(&line).good().says("all as it should be");
    }
}
