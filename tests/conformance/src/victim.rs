//! The target of hostile peers: a queue pair with memory of every kind, and another connection that the attack must not affect.

use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use weft_verbs::cm::{ConnParam, Listener, connect_qp};
use weft_verbs::{
    Access, AsyncEvent, Cq, Device, Limits, LinkOptions, LocalMode, Mr, Pd, Qp, QpInit, QpState,
    RecvWr, SendWr, Wc, WcStatus,
};
use weft_wire::ddp::Header;
use weft_wire::rdmap::{Opcode, ReadRequest, TermError, Terminate};

use crate::bed::{ALL, PATIENCE, assert_bytes, pattern, take, until};
use crate::local::Local;
use crate::raw::{Raw, write};

/// The victim's side of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It connected to the hostile peer.
    Initiator,
    /// It listened.
    Responder,
}

/// The transport between the hostile peer and its victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Tcp {
        crc: bool,
    },
    /// Shared memory; the victim's device must allow that.
    Local,
}

impl Wire {
    /// All of them.
    pub const ALL: [Wire; 3] = [
        Wire::Tcp { crc: true },
        Wire::Tcp { crc: false },
        Wire::Local,
    ];

    /// A device for victims on this wire.
    pub fn device(self) -> Device {
        self.device_with(Limits::default())
    }

    /// The same with these limits.
    pub fn device_with(self, limits: Limits) -> Device {
        let mode = match self {
            Wire::Tcp { .. } => LocalMode::Off,
            Wire::Local => LocalMode::Require,
        };
        let builder = Device::builder().local(mode).limits(limits);
        builder.open().expect("a device")
    }

    /// FPDUs have CRCs.
    pub fn crc(self) -> bool {
        self == Wire::Tcp { crc: true }
    }
}

/// The number of inbound reads and atomics that the victim accepts.
pub const DEPTH: u16 = 4;
/// Bytes of each region of the victim.
pub const REGION: usize = 4096;
/// Bytes of each receive.
pub const RECV: usize = 64;
/// The number of the victim's own outstanding read.
pub const READ_ID: u64 = 50;
/// Its length in bytes.
pub const READ_LEN: usize = 100;

/// The queue pair under attack.
pub struct Victim {
    /// Its device, which the bystander shares.
    pub device: Device,
    /// Its protection domain.
    pub pd: Pd,
    /// Completions of sends.
    pub scq: Cq,
    /// Completions of receives.
    pub rcq: Cq,
    /// The queue pair.
    pub qp: Qp,
    /// A region with every right.
    pub target: Mr,
    /// A region that peers may only read.
    pub read_only: Mr,
    /// A region that peers may only write.
    pub write_only: Mr,
    /// A region with every right, of another protection domain.
    pub foreign: Mr,
    /// A region without remote rights; receives are placed in it.
    pub private: Mr,
    /// A key that is no longer valid.
    pub stale: u32,
    /// The key under which the victim's outstanding read expects its answer.
    pub sink: u32,
}

fn param(crc: bool) -> ConnParam {
    ConnParam {
        ird: DEPTH,
        ord: DEPTH,
        options: LinkOptions {
            crc,
            peer_to_peer: false,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

impl Victim {
    /// A victim with this many receives posted and one read outstanding, and its raw peer. The first message has been exchanged.
    pub fn new(device: &Device, role: Role, crc: bool, recvs: u64) -> (Victim, Raw) {
        Self::on(device, role, Wire::Tcp { crc }, recvs)
    }

    /// The same on any wire.
    pub fn on(device: &Device, role: Role, wire: Wire, recvs: u64) -> (Victim, Raw) {
        Self::with(device, role, wire, recvs, &param(wire.crc()))
    }

    /// The same for peers that never close: it waits a second for them.
    pub fn impatient(device: &Device, role: Role, wire: Wire, recvs: u64) -> (Victim, Raw) {
        let mut param = param(wire.crc());
        param.options.linger = Duration::from_secs(1);
        Self::with(device, role, wire, recvs, &param)
    }

    fn with(
        device: &Device,
        role: Role,
        wire: Wire,
        recvs: u64,
        param: &ConnParam,
    ) -> (Victim, Raw) {
        let pd = device.alloc_pd().expect("a PD");
        let other = device.alloc_pd().expect("a PD");
        let scq = device.create_cq(64, None).expect("a CQ");
        let rcq = device.create_cq(64, None).expect("a CQ");
        let qp = pd.create_qp(&QpInit::new(&scq, &rcq)).expect("a QP");
        let mr = |pd: &Pd, seed, access| {
            let bytes = pattern(seed, REGION);
            pd.reg_mr(bytes, access).expect("a region")
        };
        let private = mr(&pd, 5, Access::LOCAL_WRITE);
        for id in 0..recvs {
            let sge = private.sge(id as usize * 2 * RECV, RECV);
            qp.post_recv(&[RecvWr::new(id).sge(sge)]).expect("post");
        }
        let gone = mr(&pd, 9, ALL);
        let stale = gone.rkey();
        drop(gone);
        let (qp, mut raw) = connected_by(device, qp, role, wire, param);
        if role == Role::Responder {
            // The first FPDU must be the initiator's.
            raw.send_ulpdus(&[write(0, 0, &[])]);
        }
        let sink = private.sge(REGION - READ_LEN, READ_LEN);
        let nowhere = weft_verbs::RemoteAddr { addr: 0, rkey: 0 };
        qp.post_send_one(SendWr::read(READ_ID, nowhere).sge(sink))
            .expect("post");
        let Some((Header::Untagged(header), body)) = raw.segment() else {
            panic!("no read request");
        };
        assert_eq!(header.opcode, Opcode::ReadRequest);
        let request = ReadRequest::parse(&body).expect("a whole request");
        let victim = Victim {
            device: device.clone(),
            target: mr(&pd, 1, ALL),
            read_only: mr(&pd, 2, Access::LOCAL_WRITE | Access::REMOTE_READ),
            write_only: mr(&pd, 3, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            foreign: mr(&other, 4, ALL),
            pd,
            scq,
            rcq,
            qp,
            private,
            stale,
            sink: request.sink_stag,
        };
        (victim, raw)
    }

    /// Asserts that no byte of any region has changed, except in the receives before `recvs`.
    pub fn assert_untouched(&self, recvs: usize) {
        for (mr, seed, what) in [
            (&self.target, 1, "target"),
            (&self.read_only, 2, "read-only region"),
            (&self.write_only, 3, "write-only region"),
            (&self.foreign, 4, "region of another PD"),
        ] {
            assert_bytes(mr, 0, &pattern(seed, REGION), what);
        }
        let want = pattern(5, REGION);
        for id in 0..recvs {
            let after = (2 * id + 1) * RECV;
            let gap = after..after + RECV;
            assert_bytes(&self.private, after, &want[gap], "between receives");
        }
        let from = recvs * 2 * RECV;
        assert_bytes(&self.private, from, &want[from..], "private region");
    }

    /// The next `count` completions of receives.
    pub fn received(&self, count: usize) -> Vec<Wc> {
        take(&self.rcq, count)
    }

    /// Asserts that it has sent a Terminate: everything is flushed with that code, and the event is raised.
    pub fn assert_terminated(&self, error: TermError) {
        let (layer, etype, code) = error.parts();
        let reason = u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code);
        until("the victim's end", || self.qp.state() == QpState::Error);
        let wc = take(&self.scq, 1)[0];
        assert_eq!(
            (wc.wr_id, wc.status, wc.vendor_err),
            (READ_ID, WcStatus::WrFlushErr, reason),
            "{wc:?}"
        );
        let access = matches!(error, TermError::Protection(_) | TermError::Tagged(_));
        let qp_num = self.qp.num();
        let want = if access {
            AsyncEvent::QpAccessErr { qp_num, reason }
        } else {
            AsyncEvent::QpFatal { qp_num, reason }
        };
        assert_eq!(self.device.get_async_event(Some(PATIENCE)), Some(want));
    }
}

/// Connects a queue pair with a raw peer.
pub fn connected(device: &Device, qp: Qp, role: Role, wire: Wire) -> (Qp, Raw) {
    connected_by(device, qp, role, wire, &param(wire.crc()))
}

fn connected_by(device: &Device, qp: Qp, role: Role, wire: Wire, param: &ConnParam) -> (Qp, Raw) {
    match role {
        Role::Responder => {
            let any = (Ipv4Addr::LOCALHOST, 0).into();
            let listener = Listener::bind(device, any, 16, param).expect("a listener");
            let addr = listener.local_addr();
            let mut raw = match wire {
                Wire::Tcp { crc } => Raw::request(addr, crc, DEPTH),
                Wire::Local => Raw::local_request(addr, DEPTH),
            };
            let request = listener.next_request(Some(PATIENCE)).expect("a request");
            let conn = request.accept(qp, param).expect("accept");
            assert!(raw.reply());
            (conn.qp, raw)
        }
        Role::Initiator => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
            let addr = listener.local_addr().expect("an address");
            let door = (wire == Wire::Local).then(|| Local::door(&listener));
            std::thread::scope(|scope| {
                let raw = scope.spawn(|| match (wire, &door) {
                    (_, Some(door)) => Raw::accept_local(&listener, door, DEPTH),
                    (_, None) => Raw::accept(&listener, wire.crc(), DEPTH),
                });
                let conn = connect_qp(addr, qp, device, param).expect("connect");
                (conn.qp, raw.join().expect("no panic"))
            })
        }
    }
}

/// Asserts that the Terminate has the right copies of the offending segment.
pub fn assert_copies(terminate: &Terminate, offender: Option<&[u8]>) {
    let Some(ulpdu) = offender else {
        assert_eq!(
            (terminate.ddp_header, terminate.read_request),
            (None, None),
            "{terminate}"
        );
        return;
    };
    let header = Header::parse(ulpdu).expect("copied headers are good ones");
    assert_eq!(terminate.ddp_header, Some(header), "{terminate}");
    assert_eq!(
        terminate.ddp_segment_len.map(usize::from),
        Some(ulpdu.len()),
        "{terminate}"
    );
    let request = (header.opcode() == Opcode::ReadRequest
        && matches!(terminate.error, TermError::Protection(_)))
    .then(|| ReadRequest::parse(&ulpdu[header.len()..]).expect("a whole request"));
    assert_eq!(terminate.read_request, request, "{terminate}");
}

/// A good connection of the same device, which continues during the attack.
pub struct Bystander {
    ends: [(Qp, Cq, Mr); 2],
}

impl Bystander {
    pub fn new(device: &Device) -> Bystander {
        let pd = device.alloc_pd().expect("a PD");
        let make = || {
            let cq = device.create_cq(64, None).expect("a CQ");
            // A queue gets its descriptor at the first sleep; afterwards a ping takes none.
            let slept = cq.wait(&mut [Wc::default()], Some(Duration::from_millis(1)));
            assert_eq!(slept, Ok(0));
            let qp = pd.create_qp(&QpInit::new(&cq, &cq)).expect("a QP");
            (qp, cq, pd.alloc_mr(2048, ALL).expect("a region"))
        };
        let ((near, near_cq, near_mr), (far, far_cq, far_mr)) = (make(), make());
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let param = ConnParam::default();
        let listener = Listener::bind(device, any, 4, &param).expect("a listener");
        let addr = listener.local_addr();
        let (near, far) = std::thread::scope(|scope| {
            let dial = scope.spawn(|| connect_qp(addr, near, device, &param).expect("connect").qp);
            let request = listener.next_request(Some(PATIENCE)).expect("a request");
            let far = request.accept(far, &param).expect("accept").qp;
            (dial.join().expect("no panic"), far)
        });
        Bystander {
            ends: [(near, near_cq, near_mr), (far, far_cq, far_mr)],
        }
    }

    /// A message there and back, and a read.
    pub fn ping(&self) {
        let [(near, near_cq, near_mr), (far, far_cq, far_mr)] = &self.ends;
        for ((qp, cq, mr), (peer, peer_cq, peer_mr)) in [
            ((near, near_cq, near_mr), (far, far_cq, far_mr)),
            ((far, far_cq, far_mr), (near, near_cq, near_mr)),
        ] {
            mr.fill(0, 1000, 7).expect("within");
            let recv = RecvWr::new(1).sge(peer_mr.sge(1000, 1000));
            peer.post_recv(&[recv]).expect("post");
            let send = SendWr::send(2).sge(mr.sge(0, 1000)).signaled();
            qp.post_send_one(send).expect("post");
            assert_eq!(take(cq, 1)[0].status, WcStatus::Success);
            let wc = take(peer_cq, 1)[0];
            assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 1000));
            let read = SendWr::read(3, peer_mr.remote(1000)).sge(mr.sge(1000, 1000));
            qp.post_send_one(read.signaled()).expect("post");
            assert_eq!(take(cq, 1)[0].status, WcStatus::Success);
        }
    }
}
