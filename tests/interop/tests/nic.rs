//! What the safe calls refuse, with weft's drop-in libraries as the system's.

use std::time::Duration;

use weft_nic::{
    Access, Cq, Device, Error, Libraries, Mr, Op, Path, Pd, Qp, QpInit, QpKind, SendWr, devices,
};

const PATIENCE: Duration = Duration::from_secs(10);
const EINVAL: i32 = 22;

fn device(name: &str) -> Device {
    Libraries::of(Some(weft_dropin::libraries())).unwrap();
    let device = devices().unwrap().into_iter().find(|d| d.name() == name);
    device.expect("a device of the drop-in libraries")
}

struct Parts {
    pd: Pd,
    cq: Cq,
    mr: Mr,
}

fn parts(name: &str) -> Parts {
    let context = device(name).open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let mr = pd.alloc_mr(4096, Access::all()).unwrap();
    Parts { pd, cq, mr }
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, words: &str) {
    let error = result.err().expect("an error");
    assert_eq!(error.errno(), Some(EINVAL), "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

/// Two queue pairs of `weft_ib0`, connected to each other.
fn pair(parts: &Parts) -> (Qp, Qp) {
    let info = device("weft_ib0").info().unwrap();
    let port = &info.ports[0];
    let init = QpInit {
        max_inline: 32,
        ..QpInit::new(&parts.cq)
    };
    let [a, b] = [(), ()].map(|()| parts.pd.create_qp(&init).unwrap());
    let gid = port.best_gid().expect("a GID");
    let path = Path::new(port, gid, gid.raw, port.lid);
    for (qp, peer) in [(&a, &b), (&b, &a)] {
        qp.init(port, Access::REMOTE_READ).unwrap();
        qp.connect(&path, peer.number()).unwrap();
    }
    (a, b)
}

#[test]
fn objects_of_another_device_are_refused() {
    let (ours, theirs) = (parts("weft_ib0"), parts("weft0"));
    refused(
        ours.pd.create_qp(&QpInit::new(&theirs.cq)),
        "another device",
    );
    let srq = theirs.pd.create_srq(4, 1).unwrap();
    let init = QpInit {
        srq: Some(&srq),
        ..QpInit::new(&ours.cq)
    };
    refused(ours.pd.create_qp(&init), "another device");
    let channel = device("weft0").open().unwrap().create_channel().unwrap();
    let created = ours.pd.context().create_cq(4, Some(&channel));
    refused(created, "another device");
}

#[test]
fn operations_of_another_kind_of_queue_pair_are_refused() {
    let parts = parts("weft_ib0");
    let info = device("weft_ib0").info().unwrap();
    let port = &info.ports[0];
    let gid = port.best_gid().expect("a GID");
    let init = QpInit {
        kind: QpKind::Ud,
        ..QpInit::new(&parts.cq)
    };
    let ud = parts.pd.create_qp(&init).unwrap();
    ud.datagrams(port, 1).unwrap();
    let sges = [parts.mr.sge(0..8)];
    // A driver would take the address for an address handle.
    for op in [
        Op::Send(None),
        Op::Read(parts.mr.remote(0)),
        Op::Write(parts.mr.remote(0), None),
    ] {
        refused(ud.post_send(&SendWr::new(1, op, &sges)), "another kind");
    }
    let (rc, _peer) = pair(&parts);
    let ah = parts
        .pd
        .create_ah(&Path::new(port, gid, gid.raw, 0))
        .unwrap();
    let op = Op::Datagram {
        to: &ah,
        qp: ud.number(),
        qkey: 1,
        imm: None,
    };
    refused(rc.post_send(&SendWr::new(1, op, &sges)), "another kind");
}

#[test]
fn too_many_inline_bytes_are_refused() {
    let parts = parts("weft_ib0");
    let (rc, _peer) = pair(&parts);
    let sges = [parts.mr.sge(0..rc.max_inline() as usize + 1)];
    let mut wr = SendWr::new(1, Op::Send(None), &sges);
    wr.inline = true;
    refused(rc.post_send(&wr), "inline");
}

#[test]
fn the_order_in_which_objects_are_dropped_does_not_matter() {
    let parts = parts("weft_ib0");
    let (rc, peer) = pair(&parts);
    let Parts { pd, cq, mr } = parts;
    drop(pd);
    mr.write(0, b"weft");
    let sges = [mr.sge(8..12)];
    let read = SendWr::new(7, Op::Read(mr.remote(0)), &sges);
    rc.post_send(&read).unwrap();
    let wc = cq.wait(PATIENCE).unwrap().expect("a completion");
    assert!(wc.is_success() && wc.id == 7, "{wc:?}: {}", cq.words(&wc));
    assert_eq!(mr.read(8..12), b"weft");
    drop(cq);
    drop(mr);
    drop((rc, peer));
}

#[test]
#[should_panic(expected = "of 4096 bytes")]
fn bytes_beyond_the_region_are_a_fault_of_the_program() {
    let parts = parts("weft_ib0");
    let _ = parts.mr.sge(4090..4097);
}
