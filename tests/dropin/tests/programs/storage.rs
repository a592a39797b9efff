//! Storage: fio's RDMA engine, and tools that need a kernel driver and report that there is none.

use weft_dropin::{Weft, free_port, have};

use super::carriers;

/// The client, which is the side with `rw=write`, moves 16 MiB by this verb; the server plays its part and ends with the client.
fn fio(weft: &Weft, verb: &str) {
    let port = free_port();
    let dir = tempfile::tempdir().unwrap();
    let weft = weft.clone().dir(dir.path());
    let common = format!("--ioengine=rdma --port={port} --bs=64k --size=16m --iodepth=16");
    let server = weft.start(&format!("fio --name=server --rw=read {common}"));
    // It listens on a port of rdma_cm's before it prints that.
    let server = server.listens(port);
    let to = format!("--hostname=127.0.0.1 --verb={verb}");
    let client = weft.run(&format!("fio --name=client --rw=write {common} {to}"));
    client.good().says("err= 0").says("io=16.0MiB");
    server.end().good().says("err= 0");
}

#[test]
fn fio_writes_and_reads() {
    for verb in ["write", "read"] {
        for device in ["weft0", "weft_ib0"] {
            each(device, verb);
        }
    }
}

/// On `weft0` it asks for no retries (`rnr_retry_count` 0) and sends before there is a receive, which ends the connection, as with RNICs.
#[test]
fn fio_sends() {
    each("weft_ib0", "send");
}

fn each(device: &str, verb: &str) {
    if have(&[("fio", "fio")]) {
        for weft in carriers(device) {
            fio(&weft, verb);
        }
    }
}

/// `NVMe` over RDMA and iSER are drivers of the kernel, which look for RNICs of the kernel.
#[test]
fn what_needs_a_driver_of_the_kernel_says_so() {
    let weft = Weft::on("weft0,weft_ib0");
    if have(&[("/usr/sbin/nvme", "nvme-cli")]) {
        let line = "/usr/sbin/nvme connect -t rdma -a 127.0.0.1 -s 4420 -n nqn.2014-08.org.nvmexpress:weft";
        let done = weft.run(line);
        assert!(matches!(done.code(), 1..128), "{}", done.show());
        // It has read nothing from the driver.
        done.says("Failed").works();
    }
    if have(&[("/usr/sbin/iscsiadm", "open-iscsi")]) {
        let done = weft.run("/usr/sbin/iscsiadm -m discovery -t st -p 127.0.0.1 -I iser");
        assert!(matches!(done.code(), 1..128), "{}", done.show());
        done.says("Could not load transport iser").works();
    }
}
