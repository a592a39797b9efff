//! Helpers for the tests of this crate.

use std::net::Ipv4Addr;
use std::sync::mpsc;
use std::time::Duration;

use weft_sys::{Interest, poll_fds};

use crate::{ConnParam, Cq, Device, Pd, Qp, QpInit};

/// Bound of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct End {
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
}

pub(crate) struct Pair {
    /// It has dialled.
    pub(crate) near: End,
    pub(crate) far: End,
}

/// A connection of a device with itself.
pub(crate) fn connected(device: &Device) -> Pair {
    let end = || {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        End { pd, cq, qp }
    };
    let (near, far) = (end(), end());
    let mut param = ConnParam::default();
    // Its first frame would be in the ring, and direct work wait for it.
    param.options.peer_to_peer = false;
    let (tell, told) = mpsc::channel();
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let listening = device.listen(any, 1, &param, move |request| drop(tell.send(request)));
    let listening = listening.unwrap();
    let (tell, dialled) = mpsc::channel();
    device.dial(
        listening.local_addr(),
        None,
        &near.qp,
        &param,
        move |dialled| {
            tell.send(dialled).unwrap();
        },
    );
    let request = told.recv_timeout(PATIENCE).unwrap();
    request.accept(&far.qp, &param).unwrap();
    dialled.recv_timeout(PATIENCE).unwrap().unwrap();
    Pair { near, far }
}

/// Waits until data has arrived for the queue pair, like its polling owner.
pub(crate) fn readable(qp: &Qp) {
    assert!(qp.0.begin_wait());
    let (fd, _) = qp.0.wait_on().unwrap();
    let ready = poll_fds(&[(fd, Interest::READ)], Some(PATIENCE));
    qp.0.end_wait();
    assert_eq!(ready.unwrap(), 1);
}
