//! Verbs in safe Rust: protection domains, queue pairs, completion queues, memory regions and windows, work requests,
//! and a connection manager ([`cm`]).
//!
//! The names are those of the RDMA verbs specification. What differs from the C API:
//!
//! * Regions own their memory ([`Pd::alloc_mr`], [`Pd::reg_mr`]); it is reached by copies, because a peer may write to it
//!   at any time. Their addresses start at 0.
//! * A thread that polls or waits makes the progress itself; without one, the device's engine does.
//! * A Send or Write is complete when the transport has taken its bytes and its memory may be used again: a Write with a wrong
//!   key "succeeds", and the connection ends afterwards. [`QpInit::remote_completion`] makes completions wait for the peer, as in
//!   InfiniBand.
//! * Immediate data has eight bytes ([`Wc::imm`]); programs in C see four.
//!
//! ```
//! use weft_verbs::{Access, Device, QpInit, RecvWr, SendWr, Wc, cm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open()?;
//! let pd = device.alloc_pd()?;
//! let listener = cm::Listener::bind(&device, "127.0.0.1:0".parse()?, 16, &cm::ConnParam::default())?;
//! let addr = listener.local_addr();
//!
//! let server = std::thread::spawn({
//!     let (device, pd) = (device.clone(), pd.clone());
//!     move || {
//!         let cq = device.create_cq(16, None).unwrap();
//!         let mr = pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
//!         let request = listener.next_request(None).unwrap();
//!         let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
//!         qp.post_recv_one(RecvWr::new(1).sge(mr.whole())).unwrap();
//!         let _conn = request.accept(qp, &cm::ConnParam::default()).unwrap();
//!         let mut wc = [Wc::default(); 1];
//!         cq.wait(&mut wc, None).unwrap();
//!         let received = wc[0].ok().unwrap().byte_len;
//!         mr.to_vec(0, received as usize).unwrap()
//!     }
//! });
//!
//! let cq = device.create_cq(16, None)?;
//! let conn = cm::connect(addr, &pd, &QpInit::new(&cq, &cq), &cm::ConnParam::default())?;
//! conn.qp.post_send_one(SendWr::send(1).inline(b"hello, iWARP").signaled())?;
//! let mut wc = [Wc::default(); 1];
//! cq.wait(&mut wc, None)?;
//! wc[0].ok()?;
//! assert_eq!(server.join().unwrap(), b"hello, iWARP");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
struct Page;

pub mod any;
pub mod cm;
pub mod faults;

pub use weft_rnic::ext;
pub use weft_rnic::{
    Access, AsyncEvent, CompChannel, CompCounters, ConnCounters, Counter, Cq, CqOverrun, Device,
    DeviceAttr, DeviceBuilder, Doorbell, EndReason, Ender, Error, EventWait, Grh, INLINE_DATA,
    InlineData, LimitReached, Limits, LinkOptions, LocalMode, MemError, Mr, Mw, Path, Pd,
    PendingDereg, PerProcess, PostError, PostReason, Qp, QpInit, QpState, ROCE_PORT,
    ROCE_REJECT_DATA, ROCE_REPLY_DATA, ROCE_REQUEST_DATA, RawMemory, RecvWr, RemoteAddr, Rnr,
    RoceChange, RoceConn, RoceConnect, RoceCounters, RoceEnd, RoceEvent, RoceFault, RoceFaults,
    RoceInit, RoceListening, RoceLookup, RoceLookupRequest, RocePath, RocePort, RoceQp,
    RoceRequest, RoceSend, RoceServing, RoceTerms, RoceUdCounters, RoceUdInit, RoceUdQp, SendOp,
    SendWr, SgList, Sge, Signal, SimFaults, SimNet, Srq, TerminateCode, Transport, UD_GROUP,
    UD_MAX_MESSAGE, UD_MAX_SEGMENT, UD_MTU, UdCounters, UdDest, UdError, UdErrorKind, UdFault,
    UdInit, UdLocalPeer, UdPort, UdPortCounters, UdQp, UdReliable, UdSource, ValidityMap, Wc,
    WcError, WcOpcode, WcStatus, Work, WriteRecord, XrcDomain, protect, roce_mtu, settings, stat,
    tcp_peer_uid, tls,
};
