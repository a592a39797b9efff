//! RoCE v2: InfiniBand's transport packets in UDP datagrams (InfiniBand Architecture Specification volume 1, chapter 9, and annex A17).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-+-+---+-------+-------------------------------+
//! |    opcode     |S|M|pad| TVer  |             P_Key             |  BTH
//! +-+-+-----------+-+-+---+-------+-------------------------------+
//! |F|B| reserved  |             destination queue pair            |
//! +-+-+-----------+-----------------------------------------------+
//! |A|  reserved   |             packet sequence number            |
//! +---------------+-----------------------------------------------+
//! |  extension headers, as the opcode says                        |
//! |  payload, padded to a multiple of four bytes                  |
//! |  ICRC                                                         |
//! +---------------------------------------------------------------+
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`header`] | the base transport header and its extension headers |
//! | [`icrc`] | the invariant CRC |
//! | [`cm`] | messages of the connection manager, in management datagrams |
//!
//! ```
//! use weft_wire::roce::{Header, Op, Opcode, Reth};
//!
//! let write = Header {
//!     reth: Some(Reth { va: 0x1000, rkey: 7, len: 5 }),
//!     pad: 3,
//!     ..Header::new(Opcode::rc(Op::WriteOnly), 0x11, 9)
//! };
//! let mut packet = Vec::new();
//! write.emit(&mut packet);
//! packet.extend_from_slice(b"hello\0\0\0");
//! assert_eq!(Header::parse(&packet), Ok((write, &b"hello"[..])));
//! ```

pub mod cm;
pub mod header;
pub mod icrc;

pub use header::{
    Aeth, AtomicEth, BTH_LEN, Deth, Header, HeaderError, MAX_HEADER, NakCode, Op, Opcode, Reth,
    Service, Syndrome, rnr_delay,
};
pub use icrc::{ICRC_LEN, Icrc, Route};

/// The UDP port of RoCE v2.
pub const PORT: u16 = 4791;

/// The P_Key of a partition that every port belongs to.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Packet sequence numbers and queue pair numbers have 24 bits.
pub const MASK_24: u32 = 0x00ff_ffff;
