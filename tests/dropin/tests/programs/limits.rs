//! Rows of docs/verbs-reference.md's table of limits that Debian's programs can show: the row names the error, and the program meets it.

use weft_dropin::{Weft, have};

/// The row of the table that begins with this.
fn row(begin: &str) -> String {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/verbs-reference.md");
    let page = std::fs::read_to_string(page).unwrap();
    let start = format!("| {begin}");
    let row = page.lines().find(|line| line.starts_with(&start));
    row.unwrap_or_else(|| panic!("no row {start:?}")).to_owned()
}

#[test]
fn what_wants_weft_ib0_says_so_without_it() {
    if !have(&[("udaddy", "rdmacm-utils")]) {
        return;
    }
    for (limit, line) in [
        ("XRC by `rdma_cm`", "rdma_xclient -c x -s 127.0.0.1"),
        ("datagrams through `rdma_cm`", "udaddy -b 127.0.0.1"),
        (
            "multicast without `weft_ib0`",
            "mckey -b 127.0.0.1 -m 239.1.1.1",
        ),
    ] {
        assert!(row(limit).contains("`EOPNOTSUPP`"), "{}", row(limit));
        let done = Weft::on("weft0").run(line);
        assert!(!done.is_good(), "{}", done.show());
        done.says("Operation not supported");
    }
}

#[test]
fn there_is_no_subnet_management() {
    let done = Weft::on("weft0,weft_ib0").run("ls /dev/infiniband");
    done.good().says("uverbs").never_says("umad");
    let done = Weft::on("weft0,weft_ib0").run("ls /sys/class/infiniband_mad");
    assert!(!done.is_good(), "{}", done.show());
}

#[test]
fn device_memory_has_an_end() {
    let pyverbs = "/usr/lib/python3/dist-packages/pyverbs/__init__.py";
    if !have(&[(pyverbs, "python3-pyverbs")]) {
        return;
    }
    let limit = row("device memory (`ibv_alloc_dm`)");
    assert!(
        limit.contains("256 MiB") && limit.contains("`ENOMEM`"),
        "{limit}"
    );
    for device in ["weft0", "weft_ib0"] {
        let script = format!(
            "import errno\n\
             from pyverbs.device import AllocDmAttr, Context, DM\n\
             from pyverbs.pyverbs_error import PyverbsRDMAError\n\
             context = Context(name='{device}')\n\
             most = context.query_device_ex().max_dm_size\n\
             held = DM(context, AllocDmAttr(most))\n\
             try:\n    DM(context, AllocDmAttr(4096))\n    print('more')\n\
             except PyverbsRDMAError as error:\n    print(most >> 20, errno.errorcode[error.error_code])\n"
        );
        let weft = Weft::on(device);
        let done = weft.start_words(&["/usr/bin/python3", "-c", &script]).end();
        done.good().says("256 ENOMEM");
    }
}
