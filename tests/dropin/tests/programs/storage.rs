//! Storage: fio's RDMA engine, and tools that need a driver of the kernel, which say that there is none.

use weft_dropin::{Weft, free_port, have, pair};

use super::carriers;

/// What fio's client prints of all that it has moved.
const MOVED: &str = "16.0MiB";

/// The client moves 16 MiB; the server takes its part and ends with the client.
fn fio(weft: &Weft, verb: &str, direction: &str) {
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let weft = weft.clone().dir(dir.path());
    let common = format!("--ioengine=rdma --port={port} --bs=64k --size=16m --iodepth=16");
    let server = format!("fio --name=server --rw=read {common}");
    let client = format!(
        "fio --name=client --rw={direction} --hostname=127.0.0.1 --verb={verb} {common}"
    );
    let (server, client) = pair(&weft, port, &server, &client);
    client.says("err= 0").says(MOVED);
    server.says("err= 0");
}

#[test]
fn fio_writes() {
    fio_each("write", "write");
}

#[test]
fn fio_reads() {
    fio_each("read", "read");
}

#[test]
fn fio_sends() {
    fio_each("send", "write");
}

fn fio_each(verb: &str, direction: &str) {
    if !have(&[("fio", "fio")]) {
        return;
    }
    for device in ["weft0", "weft_ib0"] {
        for weft in carriers(device) {
            fio(&weft, verb, direction);
        }
    }
}

/// NVMe over RDMA and iSER are drivers of the kernel, which look for RNICs of the kernel.
#[test]
fn what_needs_a_driver_of_the_kernel_says_so() {
    let weft = Weft::on("weft0,weft_ib0");
    if have(&[("/usr/sbin/nvme", "nvme-cli")]) {
        let line = "/usr/sbin/nvme connect -t rdma -a 127.0.0.1 -s 4420 -n nqn.2014-08.org.nvmexpress:weft";
        let done = weft.run(line);
        assert!(matches!(done.code(), 1..128), "{}", done.show());
        // Of the kernel's NVMe or its fabrics.
        done.says("Failed");
    }
    if have(&[("/usr/sbin/iscsiadm", "open-iscsi")]) {
        let done = weft.run("/usr/sbin/iscsiadm -m discovery -t st -p 127.0.0.1 -I iser");
        assert!(matches!(done.code(), 1..128), "{}", done.show());
        done.says("Could not load transport iser");
    }
}
