//! libfabric: the provider `verbs`.

use weft_dropin::{Weft, free_port, have, pair};

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
