//! The wire format, byte by byte: see docs/spec/sdp.md. All numbers are big-endian.

/// Bytes of a greeting.
pub const HELLO_LEN: usize = 32;
/// Bytes of the header that every message begins with (BSDH).
pub const HEADER_LEN: usize = 16;
/// Bytes of the longest header with its extension.
pub const LONGEST: usize = HEADER_LEN + 24;
/// Fewest receives that an end posts.
pub const MIN_RECEIVES: u16 = 6;
/// Longest message payload, in bytes.
pub const MAX_PAYLOAD: u32 = 1 << 24;
/// Longest source or sink, in bytes.
pub const MAX_BUFFER: u32 = 1 << 30;
/// Most sources that an end may have outstanding.
pub const MAX_SOURCES: u16 = 1024;

const MAGIC: [u8; 4] = *b"wSDP";
const VERSION: u8 = 1;

/// The private data of the connection's start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Receives that it has posted.
    pub receives: u16,
    /// Bytes of payload that fit one.
    pub payload: u32,
    /// Locks of sources that it has: so many may be outstanding towards it.
    pub locks: u16,
    /// The peer may take the locks by atomics.
    pub atomics: bool,
    /// Address of the first lock.
    pub lock_addr: u64,
    pub lock_key: u32,
}

/// The reason why a greeting is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadHello {
    /// It is cut off, or something else.
    #[error("no SDP greeting of weft")]
    NotSdp,
    /// Another version of the protocol.
    #[error("version {0}, not {VERSION}")]
    Version(u8),
    /// A number out of its range.
    #[error("{0} out of range")]
    Range(&'static str),
}

impl Hello {
    pub fn emit(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = u8::from(self.atomics);
        out[6..8].copy_from_slice(&self.receives.to_be_bytes());
        out[8..12].copy_from_slice(&self.payload.to_be_bytes());
        out[12..14].copy_from_slice(&self.locks.to_be_bytes());
        out[16..24].copy_from_slice(&self.lock_addr.to_be_bytes());
        out[24..28].copy_from_slice(&self.lock_key.to_be_bytes());
        out
    }

    /// Read one. What follows it is ignored: kernels fill up private data with zeros.
    ///
    /// # Errors
    /// [`BadHello`].
    pub fn parse(bytes: &[u8]) -> Result<Hello, BadHello> {
        let mut input = Input(bytes.get(..HELLO_LEN).ok_or(BadHello::NotSdp)?);
        if input.take() != Some(MAGIC) {
            return Err(BadHello::NotSdp);
        }
        let mut read = || {
            let [version, flags] = input.take()?;
            let hello = Hello {
                receives: u16::from_be_bytes(input.take()?),
                payload: u32::from_be_bytes(input.take()?),
                locks: u16::from_be_bytes(input.take()?),
                atomics: flags & 1 != 0,
                lock_addr: {
                    input.take::<2>()?;
                    u64::from_be_bytes(input.take()?)
                },
                lock_key: u32::from_be_bytes(input.take()?),
            };
            Some((version, hello))
        };
        let (version, hello) = read().ok_or(BadHello::NotSdp)?;
        if version != VERSION {
            return Err(BadHello::Version(version));
        }
        if hello.receives < MIN_RECEIVES {
            return Err(BadHello::Range("receives"));
        }
        if hello.payload == 0 || hello.payload > MAX_PAYLOAD {
            return Err(BadHello::Range("payload"));
        }
        if hello.locks == 0 || hello.locks > MAX_SOURCES {
            return Err(BadHello::Range("locks"));
        }
        if !hello.lock_addr.is_multiple_of(8) {
            return Err(BadHello::Range("lock address"));
        }
        Ok(hello)
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }
}

/// Memory of the sender of the message, opened to the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// Its first byte.
    pub addr: u64,
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

/// The contents of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Body {
    /// Bytes of the stream follow the header; without any, it only returns credits. `urgent`: the last one is urgent.
    Data {
        /// Bytes.
        len: u32,
        /// The last one is urgent.
        urgent: bool,
    },
    /// SOURCE AVAIL: the receiver fetches the next bytes of the stream by RDMA Read.
    SrcAvail {
        /// Counts the sources of this direction, from 0.
        index: u32,
        at: Buffer,
    },
    /// UPDATED SOURCE AVAIL: the bytes of a source are elsewhere now, and its lock is free again. Not of SDP's own.
    SrcUpdate {
        /// Which source.
        index: u32,
        /// Where; as long as before.
        at: Buffer,
    },
    /// GET COMPLETE: all bytes of the oldest source have been fetched.
    RdmaRdCompl {
        index: u32,
        /// Its length in bytes.
        len: u32,
    },
    /// SINK AVAIL: the next bytes of the stream may be written here, if the stream is still at `position`.
    SinkAvail {
        /// The number of stream bytes that the receiver knows of.
        position: u64,
        at: Buffer,
    },
    /// Bytes of the stream were written to the start of the sink, which is used up.
    RdmaWrCompl {
        /// Bytes, not 0.
        len: u32,
    },
    /// The receiver gives the sink back.
    SinkAvailCancel,
    /// The sink is no longer in use.
    SinkCancelAck,
    /// No more bytes of this direction (half close).
    DisConn,
}

/// A message: its contents, and the sequence and credit fields that each message has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Urgent bytes wait that have not been sent yet (`OOB_PEND`).
    pub pending: bool,
    /// Receives that are posted (`bufs`), minus those taken by messages after `ack`.
    pub bufs: u16,
    /// The message's number, from 1 (`mseq`).
    pub seq: u32,
    /// Number of the last message that the sender has received (`mseq_ack`).
    pub ack: u32,
    pub body: Body,
}

/// The reason why a message is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// It is shorter or longer than it says.
    #[error("a length that does not fit")]
    Length,
    #[error("message identifier {0:#04x}")]
    Kind(u8),
    /// An unknown flag, or one that does not belong there.
    #[error("flags {0:#04x}")]
    Flags(u8),
    /// A buffer of no bytes, of too many, or one that wraps.
    #[error("a buffer that cannot be")]
    Buffer,
}

const OOB_PRES: u8 = 1;
const OOB_PEND: u8 = 2;

const DISCONN: u8 = 0x02;
const RDMA_WR_COMPL: u8 = 0x05;
const RDMA_RD_COMPL: u8 = 0x06;
const SINK_AVAIL_CANCEL: u8 = 0x09;
const SINK_CANCEL_ACK: u8 = 0x0a;
const SRC_UPDATE: u8 = 0x80;
const SINK_AVAIL: u8 = 0xfd;
const SRC_AVAIL: u8 = 0xfe;
const DATA: u8 = 0xff;

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Body::Data { .. } => DATA,
            Body::SrcAvail { .. } => SRC_AVAIL,
            Body::SrcUpdate { .. } => SRC_UPDATE,
            Body::RdmaRdCompl { .. } => RDMA_RD_COMPL,
            Body::SinkAvail { .. } => SINK_AVAIL,
            Body::RdmaWrCompl { .. } => RDMA_WR_COMPL,
            Body::SinkAvailCancel => SINK_AVAIL_CANCEL,
            Body::SinkCancelAck => SINK_CANCEL_ACK,
            Body::DisConn => DISCONN,
        }
    }
}

/// A message's header and extension.
pub type Emitted = smallvec::SmallVec<[u8; LONGEST]>;

impl Message {
    /// Header and extension; the payload of a [`Body::Data`] follows.
    pub fn emit(&self) -> Emitted {
        let mut out = Emitted::new();
        let mut flags = u8::from(self.pending) * OOB_PEND;
        let mut more: smallvec::SmallVec<[u8; 24]> = smallvec::SmallVec::new();
        let mut payload = 0;
        match self.body {
            Body::Data { len, urgent } => {
                payload = len;
                flags |= u8::from(urgent) * OOB_PRES;
            }
            Body::SrcAvail { index, at } | Body::SrcUpdate { index, at } => {
                more.extend_from_slice(&at.len.to_be_bytes());
                more.extend_from_slice(&at.key.to_be_bytes());
                more.extend_from_slice(&at.addr.to_be_bytes());
                more.extend_from_slice(&index.to_be_bytes());
            }
            Body::RdmaRdCompl { index, len } => {
                more.extend_from_slice(&len.to_be_bytes());
                more.extend_from_slice(&index.to_be_bytes());
            }
            Body::SinkAvail { position, at } => {
                more.extend_from_slice(&at.len.to_be_bytes());
                more.extend_from_slice(&at.key.to_be_bytes());
                more.extend_from_slice(&at.addr.to_be_bytes());
                more.extend_from_slice(&position.to_be_bytes());
            }
            Body::RdmaWrCompl { len } => more.extend_from_slice(&len.to_be_bytes()),
            Body::SinkAvailCancel | Body::SinkCancelAck | Body::DisConn => {}
        }
        let len = (HEADER_LEN + more.len()) as u32 + payload;
        out.extend_from_slice(&[self.body.kind(), flags]);
        out.extend_from_slice(&self.bufs.to_be_bytes());
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&self.seq.to_be_bytes());
        out.extend_from_slice(&self.ack.to_be_bytes());
        out.extend_from_slice(&more);
        out
    }

    /// Read one of `len` bytes in all, of which `bytes` has the beginning: at least [`LONGEST`], or all.
    ///
    /// # Errors
    /// [`BadMessage`].
    pub fn parse(bytes: &[u8], len: u32) -> Result<Message, BadMessage> {
        let mut input = Input(bytes);
        let mut read = || -> Option<_> {
            let [kind, flags] = input.take()?;
            let bufs = u16::from_be_bytes(input.take()?);
            let told = u32::from_be_bytes(input.take()?);
            let seq = u32::from_be_bytes(input.take()?);
            let ack = u32::from_be_bytes(input.take()?);
            Some((kind, flags, bufs, told, seq, ack))
        };
        let (kind, flags, bufs, told, seq, ack) = read().ok_or(BadMessage::Length)?;
        if told != len {
            return Err(BadMessage::Length);
        }
        let rest = len
            .checked_sub(HEADER_LEN as u32)
            .ok_or(BadMessage::Length)?;
        let body = body(kind, flags & OOB_PRES != 0, rest, &mut input)?;
        let oob = matches!(body, Body::Data { .. });
        if flags & !(OOB_PRES | OOB_PEND) != 0 || flags & OOB_PRES != 0 && !oob {
            return Err(BadMessage::Flags(flags));
        }
        Ok(Message {
            pending: flags & OOB_PEND != 0,
            bufs,
            seq,
            ack,
            body,
        })
    }
}

fn body(kind: u8, urgent: bool, rest: u32, input: &mut Input<'_>) -> Result<Body, BadMessage> {
    let expect = |len: u32| {
        if rest == len {
            Ok(())
        } else {
            Err(BadMessage::Length)
        }
    };
    let short = BadMessage::Length;
    Ok(match kind {
        DATA if urgent && rest == 0 => return Err(BadMessage::Flags(OOB_PRES)),
        DATA => Body::Data { len: rest, urgent },
        SRC_AVAIL | SRC_UPDATE => {
            expect(20)?;
            let at = input.buffer().ok_or(short)??;
            let index = u32::from_be_bytes(input.take().ok_or(short)?);
            if kind == SRC_AVAIL {
                Body::SrcAvail { index, at }
            } else {
                Body::SrcUpdate { index, at }
            }
        }
        RDMA_RD_COMPL => {
            expect(8)?;
            let len = u32::from_be_bytes(input.take().ok_or(short)?);
            let index = u32::from_be_bytes(input.take().ok_or(short)?);
            Body::RdmaRdCompl { index, len }
        }
        SINK_AVAIL => {
            expect(24)?;
            let at = input.buffer().ok_or(short)??;
            let position = u64::from_be_bytes(input.take().ok_or(short)?);
            Body::SinkAvail { position, at }
        }
        RDMA_WR_COMPL => {
            expect(4)?;
            match u32::from_be_bytes(input.take().ok_or(short)?) {
                0 => return Err(BadMessage::Buffer),
                len => Body::RdmaWrCompl { len },
            }
        }
        SINK_AVAIL_CANCEL => {
            expect(0)?;
            Body::SinkAvailCancel
        }
        SINK_CANCEL_ACK => {
            expect(0)?;
            Body::SinkCancelAck
        }
        DISCONN => {
            expect(0)?;
            Body::DisConn
        }
        _ => return Err(BadMessage::Kind(kind)),
    })
}

impl Input<'_> {
    fn buffer(&mut self) -> Option<Result<Buffer, BadMessage>> {
        let len = u32::from_be_bytes(self.take()?);
        let key = u32::from_be_bytes(self.take()?);
        let addr = u64::from_be_bytes(self.take()?);
        let whole = (1..=MAX_BUFFER).contains(&len) && addr.checked_add(u64::from(len)).is_some();
        Some(if whole {
            Ok(Buffer { addr, key, len })
        } else {
            Err(BadMessage::Buffer)
        })
    }
}

/// The state of a source's lock: a word of the receiver's memory, in the order of bytes that atomics have (the host's).
pub mod locks {
    /// The lock is free.
    pub const FREE: u64 = 0;
    /// The receiver fetches.
    pub const READER: u64 = 1;
    /// The sender copies.
    pub const WRITER: u64 = 2;

    /// The word of the lock of source `index` in this state. A word of another source, earlier or later, is another one.
    pub fn word(index: u32, state: u64) -> u64 {
        u64::from(index) << 2 | state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        let at = Buffer {
            addr: 0x0102_0304_0506_0708,
            key: 0x1122_3344,
            len: 0x1000,
        };
        let bodies = [
            Body::Data {
                len: 5,
                urgent: true,
            },
            Body::Data {
                len: 0,
                urgent: false,
            },
            Body::SrcAvail { index: 7, at },
            Body::SrcUpdate { index: 8, at },
            Body::RdmaRdCompl { index: 9, len: 4 },
            Body::SinkAvail {
                position: 1 << 40,
                at,
            },
            Body::RdmaWrCompl { len: 3 },
            Body::SinkAvailCancel,
            Body::SinkCancelAck,
            Body::DisConn,
        ];
        let message = |(n, body): (usize, Body)| Message {
            pending: n % 2 == 0,
            bufs: 6,
            seq: n as u32,
            ack: u32::MAX,
            body,
        };
        bodies.into_iter().enumerate().map(message).collect()
    }

    #[test]
    fn messages_come_back_as_they_went() {
        for message in all() {
            let bytes = message.emit();
            let payload = match message.body {
                Body::Data { len, .. } => len,
                _ => 0,
            };
            let len = bytes.len() as u32 + payload;
            assert_eq!(Message::parse(&bytes, len), Ok(message));
            assert_eq!(Message::parse(&bytes, len + 1), Err(BadMessage::Length));
            assert!(Message::parse(&bytes[..15], 15).is_err());
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_page() {
        let bytes = all()[2].emit();
        let expected: Vec<u8> = [
            &[0xfe, 2, 0, 6, 0, 0, 0, 36][..],
            &[0, 0, 0, 2, 0xff, 0xff, 0xff, 0xff],
            &[0, 0, 0x10, 0, 0x11, 0x22, 0x33, 0x44],
            &[1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 7],
        ]
        .concat();
        assert_eq!(&bytes[..], &expected[..]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |change: fn(&mut [u8])| {
            let mut bytes = all()[2].emit().to_vec();
            change(&mut bytes);
            Message::parse(&bytes, bytes.len() as u32)
        };
        assert_eq!(refused(|b| b[0] = 0x77), Err(BadMessage::Kind(0x77)));
        assert_eq!(refused(|b| b[1] = 1), Err(BadMessage::Flags(1)));
        assert_eq!(refused(|b| b[16..20].fill(0)), Err(BadMessage::Buffer));
        assert_eq!(refused(|b| b[16..20].fill(0xff)), Err(BadMessage::Buffer));
        assert_eq!(refused(|b| b[24..32].fill(0xff)), Err(BadMessage::Buffer));
    }

    #[test]
    fn greetings_come_back_and_are_held_to_their_ranges() {
        let hello = Hello {
            receives: 32,
            payload: 16384,
            locks: 16,
            atomics: true,
            lock_addr: 64,
            lock_key: 9,
        };
        let bytes = hello.emit();
        assert_eq!(Hello::parse(&bytes), Ok(hello));
        assert_eq!(Hello::parse(&bytes[..31]), Err(BadHello::NotSdp));
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes;
            bytes[at] = byte;
            Hello::parse(&bytes)
        };
        assert_eq!(with(0, 0), Err(BadHello::NotSdp));
        assert_eq!(with(4, 2), Err(BadHello::Version(2)));
        assert_eq!(with(7, 5), Err(BadHello::Range("receives")));
        assert_eq!(with(8, 2), Err(BadHello::Range("payload")));
        assert_eq!(with(13, 0), Err(BadHello::Range("locks")));
        assert_eq!(with(23, 1), Err(BadHello::Range("lock address")));
    }
}
