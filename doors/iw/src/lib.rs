//! The small iWARP library of the thesis (section 3.3.3): RDMA in a dozen calls, as thin as possible.
//!
//! A [`Context`] holds everything that belongs to one connection: device, protection domain, queue pair and
//! two completion queues, one for sends and one for receives. Memory is either here, an [`Lmr`], or at the
//! peer, an [`Rmr`]; a peer learns of an [`Lmr`] by an *advertisement* on the connection itself, so that it
//! cannot overtake or be overtaken by data. Data moves by [`Context::post_send_lmr`],
//! [`Context::post_write_lmr`] and [`Context::post_read_lmr`], and [`Context::await_completions`] says when.
//!
//! # A first program
//!
//! The thesis's "Hello iWARP" (fig. 3.17). The responder advertises a buffer; the initiator writes to it,
//! reads it back, compares, and says by a Send that it is done. `examples/hello_iwarp.rs` is the same as a
//! program of two processes.
//!
//! ```
//! use weft_iw::{Access, Context, CqType, Flags, Listener, Wc};
//!
//! # fn main() -> Result<(), weft_iw::Error> {
//! let listener = Listener::open("127.0.0.1:0")?;
//! let addr = listener.local_addr();
//!
//! let responder = std::thread::spawn(move || -> Result<(), weft_iw::Error> {
//!     let mut ctx = listener.listen()?; // a request has come: CONN_REQ
//!     let data = ctx.lmr_create(4096, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
//!     let ctrl = ctx.lmr_create(1, Access::LOCAL_WRITE)?;
//!     ctx.post_recv_lmr(&ctrl, 0, 1)?; // before the initiator can send
//!     ctx.accept()?;
//!     ctx.post_send_adv(&data)?;
//!     ctx.await_completions(CqType::Recv, &mut [Wc::default()])?; // "done"
//!     ctx.disconnect()
//! });
//!
//! let mut ctx = Context::alloc(addr)?; // VALID
//! ctx.post_recv_adv()?;
//! ctx.connect()?; // CONNECTED
//! let src = ctx.lmr_register(b"Hello iWARP!".to_vec(), Access::LOCAL_WRITE)?;
//! let dst = ctx.lmr_create(12, Access::LOCAL_WRITE)?;
//! let rmr = ctx.wait_recv_adv()?;
//! // The Read does not overtake the Write: only the Read has to be waited for.
//! ctx.post_write_lmr(&src, 0, &rmr, 0, 12, Flags::empty())?;
//! ctx.post_read_lmr(&dst, 0, &rmr, 0, 12, Flags::SIGNALED)?;
//! ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
//! assert_eq!(dst.to_vec(0, 12)?, b"Hello iWARP!");
//! ctx.post_send_lmr(&src, 0, 1, Flags::SIGNALED)?;
//! ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
//! ctx.await_disconnect()?;
//! responder.join().unwrap()
//! # }
//! ```
//!
//! Without a connection there is [`DatagramContext`]: messages to and from any number of peers, and RDMA Write-Record.
//!
//! # Rules for callers
//!
//! * A Send takes one receive of the peer, in the order in which they were posted; if no receive is posted, or it is too
//!   short, the connection ends. Post receives before the peer can send: a context takes them from the
//!   moment it is [`State::Valid`].
//! * Memory that the peer writes to or reads from needs [`Access::REMOTE_WRITE`] or
//!   [`Access::REMOTE_READ`].
//! * Requests without [`Flags::SIGNALED`] complete silently. Signal one from time to time, because a send queue has
//!   [`Options::max_send_wr`] places.
//! * The verbs underneath are open to the caller ([`Context::qp`], [`Context::pd`], ...): both can be mixed.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod context;
mod datagram;
mod post;
mod region;

use context::ADVS;
pub use context::{Context, CqType, Listener, Options, State};
pub use datagram::{DatagramAddr, DatagramContext, DatagramOptions};
pub use post::Flags;
pub use region::{ADV_LEN, Lmr, Rmr};
pub use weft_verbs::{Access, EndReason, Sge, ValidityMap, Wc, WcOpcode, WcStatus, WriteRecord};

/// Why a call failed.
///
/// `{:?}` prints the text too, so that a `main` that returns it says what happened:
///
/// ```
/// let error = weft_iw::Listener::open("192.0.2.1:0").err().unwrap(); // TEST-NET-1: not ours
/// assert!(format!("{error:?}").starts_with("Error(cannot use \"192.0.2.1:0\": "), "{error:?}");
/// ```
#[derive(thiserror::Error)]
pub enum Error {
    /// The context's state does not allow the call.
    #[error("{call} needs a context that is {needs}, and it is {is}")]
    State {
        /// The call.
        call: &'static str,
        /// The state that it needs.
        needs: State,
        /// The state that the context is in.
        is: State,
    },
    /// A name that cannot be resolved, or an address that cannot be listened on.
    #[error("cannot use {what}: {source}")]
    Address {
        /// The address as it was given.
        what: String,
        /// Why.
        source: std::io::Error,
    },
    /// The connection was not made.
    #[error(transparent)]
    Connect(#[from] weft_verbs::cm::ConnectError),
    /// An object could not be made.
    #[error(transparent)]
    Verbs(#[from] weft_verbs::Error),
    /// A work request was refused.
    #[error(transparent)]
    Post(#[from] weft_verbs::PostError),
    /// Memory could not be accessed as asked.
    #[error(transparent)]
    Memory(#[from] weft_verbs::MemError),
    /// A work request failed; most often the connection has ended.
    #[error("{}", weft_verbs::WcError(*.0))]
    Completion(Wc),
    /// As many receives for advertisements are posted as there may be.
    #[error("{ADVS} receives for advertisements are posted, and no more can be")]
    Advertisements,
    /// A completion queue had too few places.
    #[error(transparent)]
    Overrun(#[from] weft_verbs::CqOverrun),
    /// The received message is not an advertisement.
    #[error("a message of {0} bytes came where an advertisement was expected")]
    NotAnAdvertisement(u32),
    /// A range that is not in the region.
    #[error("bytes {at} to {at} + {len} are not in a region of {region} bytes")]
    Range {
        /// The beginning of the range.
        at: u64,
        /// Its length.
        len: u64,
        /// Length of the region.
        region: u64,
    },
    /// The connection has ended, and no more data can arrive.
    #[error("the connection has ended")]
    Ended,
}

impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Error({self})")
    }
}
