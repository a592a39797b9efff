//! The wire format, byte by byte: see docs/spec/rsockets.md.

/// Bytes of a greeting.
pub const GREETING_LEN: usize = 40;
/// Bytes of an entry of the SGL table.
pub const ENTRY_LEN: usize = 16;
/// Bytes of an entry of the iomap table.
pub const MAP_LEN: usize = 24;
/// Bytes of a message that travels as a Send.
pub const MESSAGE_LEN: usize = 4;
/// Longest transfer that one message can announce, in bytes.
pub const MAX_TRANSFER: u32 = (1 << 29) - 1;

const VERSION: u8 = 1;
const FLAG_BIG_ENDIAN: u8 = 1;
const FLAG_IOMAP: u8 = 2;
/// The two bytes by which two of us recognise each other, in a field that others leave 0.
const KIN: [u8; 2] = *b"wf";
const KIN_IMMEDIATE: u8 = 1;

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Its first byte.
    pub addr: u64,
    pub key: u32,
    /// Bytes, or entries where it is a table.
    pub len: u32,
}

/// The order of the bytes in a host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The most significant byte first.
    Big,
    /// The least significant byte first.
    Little,
}

impl Order {
    /// This host's.
    pub const HOST: Order = if cfg!(target_endian = "big") {
        Order::Big
    } else {
        Order::Little
    };

    /// A number as this host writes it into its memory.
    pub fn u32(self, value: u32) -> [u8; 4] {
        match self {
            Order::Big => value.to_be_bytes(),
            Order::Little => value.to_le_bytes(),
        }
    }

    fn u64(self, value: u64) -> [u8; 8] {
        match self {
            Order::Big => value.to_be_bytes(),
            Order::Little => value.to_le_bytes(),
        }
    }

    /// An entry of the SGL table, as the host that owns the table reads it.
    pub fn entry(self, buffer: Buffer) -> [u8; ENTRY_LEN] {
        let mut out = [0; ENTRY_LEN];
        out[..8].copy_from_slice(&self.u64(buffer.addr));
        out[8..12].copy_from_slice(&self.u32(buffer.key));
        out[12..].copy_from_slice(&self.u32(buffer.len));
        out
    }

    /// An entry of the iomap table, as the host that owns the table reads it.
    pub fn map(self, offset: u64, buffer: Buffer) -> [u8; MAP_LEN] {
        let mut out = [0; MAP_LEN];
        out[..8].copy_from_slice(&self.u64(offset));
        out[8..].copy_from_slice(&self.entry(buffer));
        out
    }
}

/// Eight bytes of one of our tables, loaded as a number of this host: a key and a length.
pub fn key_and_len(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
    (half(0), half(4))
}

/// The private data of the connection's start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The order of bytes in its memory.
    pub order: Order,
    /// Data messages that it takes before it has granted more.
    pub credits: u16,
    /// Its SGL table; `len` is the number of entries.
    pub table: Buffer,
    /// The first half of its receive buffer.
    pub data: Buffer,
    /// Entries of its iomap table, which begins where the SGL table ends.
    pub maps: u16,
    /// It is one of us; and whether it takes immediate data.
    pub kin: Option<WeftExtensions>,
}

/// The part that only weft sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeftExtensions {
    /// Data may be announced by the immediate data of its Write.
    pub immediate: bool,
}

/// The reason why a greeting is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadGreeting {
    /// It is cut off.
    #[error("shorter than {GREETING_LEN} bytes")]
    Short,
    /// Another version of the protocol, or another protocol.
    #[error("version {0}, not {VERSION}")]
    Version(u8),
    /// With fewer than two entries, receive buffers cannot be announced in turn.
    #[error("an SGL table of {0} entries")]
    Table(u32),
}

impl Greeting {
    pub fn emit(&self) -> [u8; GREETING_LEN] {
        let mut out = [0; GREETING_LEN];
        out[0] = VERSION;
        out[1] = FLAG_IOMAP;
        if self.order == Order::Big {
            out[1] |= FLAG_BIG_ENDIAN;
        }
        out[2..4].copy_from_slice(&self.credits.to_be_bytes());
        if let Some(kin) = self.kin {
            out[4..6].copy_from_slice(&KIN);
            out[6] = u8::from(kin.immediate) * KIN_IMMEDIATE;
        }
        out[7] = to_scale(self.maps);
        // Here, and only here, everybody uses the order of the network.
        out[8..24].copy_from_slice(&Order::Big.entry(self.table));
        out[24..].copy_from_slice(&Order::Big.entry(self.data));
        out
    }

    /// Read one. What follows it is ignored: kernels fill up private data with zeros.
    ///
    /// # Errors
    /// [`BadGreeting`].
    pub fn parse(bytes: &[u8]) -> Result<Greeting, BadGreeting> {
        let Some((bytes, _)) = bytes.split_first_chunk::<GREETING_LEN>() else {
            return Err(BadGreeting::Short);
        };
        if bytes[0] != VERSION {
            return Err(BadGreeting::Version(bytes[0]));
        }
        let u32_at = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| bytes[at + i]));
        let buffer = |at: usize| Buffer {
            addr: u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4)),
            key: u32_at(at + 8),
            len: u32_at(at + 12),
        };
        let table = buffer(8);
        if table.len < 2 {
            return Err(BadGreeting::Table(table.len));
        }
        let flags = bytes[1];
        Ok(Greeting {
            order: if flags & FLAG_BIG_ENDIAN == 0 {
                Order::Little
            } else {
                Order::Big
            },
            credits: u16::from_be_bytes([bytes[2], bytes[3]]),
            table,
            data: buffer(24),
            maps: if flags & FLAG_IOMAP == 0 {
                0
            } else {
                from_scale(bytes[7])
            },
            kin: (bytes[4..6] == KIN).then_some(WeftExtensions {
                immediate: bytes[6] & KIN_IMMEDIATE != 0,
            }),
        })
    }
}

/// A count in eight bits: exact to 128, then in steps of 256.
pub fn to_scale(count: u16) -> u8 {
    if count <= 128 {
        count as u8
    } else {
        0x80 | (count >> 8) as u8
    }
}

/// The inverse of [`to_scale`].
pub fn from_scale(scaled: u8) -> u16 {
    if scaled <= 128 {
        u16::from(scaled)
    } else {
        u16::from(scaled & 0x7f) << 8
    }
}

const DATA: u32 = 0;
const CREDIT: u32 = 4;
const MAP: u32 = 6;
const CONTROL: u32 = 7;
const DISCONNECT: u32 = 0;
const KEEPALIVE: u32 = 1;
const SHUTDOWN: u32 = 2;

/// A message: three bits of kind, 29 bits of value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// So many bytes have been written to the receive buffer.
    Data(u32),
    /// Data messages up to this one, counted from the first, may be sent; the SGL table may have changed.
    Credit(u16),
    /// This entry of the iomap table has changed.
    Map(u32),
    /// The sender has stopped sending and receiving.
    Disconnect,
    /// The sender sends no more.
    Shutdown,
    /// The sender is alive. (Usually an empty Write, which the peer's program does not see.)
    Keepalive,
}

/// An invalid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an unknown message, {0:#010x}")]
pub struct Unknown(pub u32);

impl Message {
    pub fn encode(self) -> u32 {
        let (kind, value) = match self {
            Message::Data(bytes) => (DATA, bytes),
            Message::Credit(limit) => (CREDIT, u32::from(limit)),
            Message::Map(index) => (MAP, index),
            Message::Disconnect => (CONTROL, DISCONNECT),
            Message::Keepalive => (CONTROL, KEEPALIVE),
            Message::Shutdown => (CONTROL, SHUTDOWN),
        };
        kind << 29 | value & MAX_TRANSFER
    }

    /// Read one.
    ///
    /// # Errors
    /// [`Unknown`] for kinds that are reserved.
    pub fn decode(word: u32) -> Result<Message, Unknown> {
        let value = word & MAX_TRANSFER;
        Ok(match (word >> 29, value) {
            (DATA, bytes) => Message::Data(bytes),
            // Counted modulo 2^16; others send the sum before it is cut.
            (CREDIT, limit) => Message::Credit(limit as u16),
            (MAP, index) => Message::Map(index),
            (CONTROL, DISCONNECT) => Message::Disconnect,
            (CONTROL, KEEPALIVE) => Message::Keepalive,
            (CONTROL, SHUTDOWN) => Message::Shutdown,
            _ => return Err(Unknown(word)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: Greeting = Greeting {
        order: Order::Little,
        credits: 384,
        table: Buffer {
            addr: 0x0102_0304_0506_0708,
            key: 0x1112_1314,
            len: 2,
        },
        data: Buffer {
            addr: 0x2122_2324_2526_2728,
            key: 0x3132_3334,
            len: 65_536,
        },
        maps: 3,
        kin: None,
    };

    /// The bytes of a host with x86's order, put together from the description by hand.
    #[test]
    fn a_greeting_has_these_bytes() {
        #[rustfmt::skip]
        let bytes = [
            1, 2, 1, 0x80, 0, 0, 0, 3,
            1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 2,
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34, 0, 1, 0, 0,
        ];
        assert_eq!(GREETING.emit(), bytes);
        // As a kernel delivers it.
        let mut padded = bytes.to_vec();
        padded.extend([0; 16]);
        assert_eq!(Greeting::parse(&padded), Ok(GREETING));
    }

    #[test]
    fn kin_know_each_other() {
        for immediate in [false, true] {
            let greeting = Greeting {
                kin: Some(WeftExtensions { immediate }),
                order: Order::Big,
                ..GREETING
            };
            assert_eq!(Greeting::parse(&greeting.emit()), Ok(greeting));
        }
    }

    #[test]
    fn what_is_no_greeting_is_refused() {
        let good = GREETING.emit();
        assert_eq!(Greeting::parse(&good[..39]), Err(BadGreeting::Short));
        let mut other = good;
        other[0] = 2;
        assert_eq!(Greeting::parse(&other), Err(BadGreeting::Version(2)));
        let mut small = good;
        small[23] = 1;
        assert_eq!(Greeting::parse(&small), Err(BadGreeting::Table(1)));
        // Without the flag, the count means nothing.
        let mut old = good;
        old[1] = 0;
        assert_eq!(Greeting::parse(&old).unwrap().maps, 0);
    }

    #[test]
    fn counts_are_scaled() {
        for exact in 0..=128 {
            assert_eq!(from_scale(to_scale(exact)), exact);
        }
        assert_eq!(from_scale(to_scale(256)), 256);
        assert_eq!(from_scale(to_scale(300)), 256);
        assert_eq!(from_scale(to_scale(u16::MAX)), 0x7f00);
    }

    #[test]
    fn messages_have_these_numbers() {
        let numbers = [
            (Message::Data(1 << 16), 0x0001_0000),
            (Message::Credit(384), 0x8000_0180),
            (Message::Map(5), 0xc000_0005),
            (Message::Disconnect, 0xe000_0000),
            (Message::Keepalive, 0xe000_0001),
            (Message::Shutdown, 0xe000_0002),
        ];
        for (message, number) in numbers {
            assert_eq!(message.encode(), number);
            assert_eq!(Message::decode(number), Ok(message));
        }
        for reserved in [1_u32, 2, 3, 5] {
            let word = reserved << 29 | 7;
            assert_eq!(Message::decode(word), Err(Unknown(word)));
        }
        assert!(Message::decode(7 << 29 | 3).is_err());
        assert_eq!(
            Message::decode(0x8001_0002),
            Ok(Message::Credit(2)),
            "modulo 2^16"
        );
    }

    #[test]
    fn tables_are_written_in_their_readers_order() {
        let buffer = Buffer {
            addr: 1,
            key: 2,
            len: 3,
        };
        assert_eq!(
            Order::Little.map(4, buffer),
            [
                4, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0
            ]
        );
        assert_eq!(
            Order::Big.entry(buffer),
            [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3]
        );
        let entry = Order::HOST.entry(buffer);
        let word = u64::from_ne_bytes(entry[8..].try_into().unwrap());
        assert_eq!(key_and_len(word), (2, 3));
    }
}
