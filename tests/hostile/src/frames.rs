//! Frames as RFC 5040, 5041, 5044, 6581 and 7306 have them, each field at the attacker's choice.

const fn crc_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut n = 0;
    while n < 256 {
        let mut crc = n as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            bit += 1;
        }
        table[n] = crc;
        n += 1;
    }
    table
}

static CRC_TABLE: [u32; 256] = crc_table();

/// CRC-32C.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, b| {
        CRC_TABLE[usize::from(crc as u8 ^ b)] ^ (crc >> 8)
    })
}

/// A start-up frame: request or reply.
#[derive(Clone, Debug)]
pub struct Startup {
    /// The sixteen bytes at its beginning.
    pub key: [u8; 16],
    /// M, C, R, S and reserved bits.
    pub flags: u8,
    /// MPA's revision.
    pub revision: u8,
    /// Length of the private data, as claimed.
    pub claimed: u16,
    /// Private data, as sent.
    pub private: Vec<u8>,
}

/// The key of a request.
pub const REQUEST: [u8; 16] = *b"MPA ID Req Frame";
/// The key of a reply.
pub const REPLY: [u8; 16] = *b"MPA ID Rep Frame";
/// Flag: markers wanted.
pub const MARKERS: u8 = 0x80;
/// Flag: CRC wanted.
pub const CRC: u8 = 0x40;
/// Flag: rejected.
pub const REJECT: u8 = 0x20;
/// Flag: the private data begins with IRD and ORD (RFC 6581).
pub const ENHANCED: u8 = 0x10;

impl Startup {
    /// One that an honest peer of revision 2 could send, with `private` for the program.
    pub fn new(key: [u8; 16], private: &[u8]) -> Startup {
        Startup::with_depths(key, 16, 16, private)
    }

    /// The same with these sixteen-bit words for IRD and ORD, their flags included.
    pub fn with_depths(key: [u8; 16], ird: u16, ord: u16, private: &[u8]) -> Startup {
        let mut data = ird.to_be_bytes().to_vec();
        data.extend(ord.to_be_bytes());
        data.extend(private);
        Startup {
            key,
            flags: CRC | ENHANCED,
            revision: 2,
            claimed: data.len() as u16,
            private: data,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.key.to_vec();
        out.push(self.flags);
        out.push(self.revision);
        out.extend(self.claimed.to_be_bytes());
        out.extend(&self.private);
        out
    }
}

/// An FPDU around these bytes, with pad and CRC.
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    fpdu_with(ulpdu.len() as u16, ulpdu, 0, 0)
}

/// An FPDU with a length, a pad and an error of the CRC of one's choice.
pub fn fpdu_with(length: u16, ulpdu: &[u8], pad: u8, crc_error: u32) -> Vec<u8> {
    let mut out = length.to_be_bytes().to_vec();
    out.extend(ulpdu);
    while !out.len().is_multiple_of(4) {
        out.push(pad);
    }
    let crc = crc32c(&out) ^ crc_error;
    out.extend(crc.to_le_bytes());
    out
}

/// RDMAP's opcodes.
pub mod opcode {
    pub const WRITE: u8 = 0;
    pub const READ_REQUEST: u8 = 1;
    pub const READ_RESPONSE: u8 = 2;
    pub const SEND: u8 = 3;
    pub const SEND_INVALIDATE: u8 = 4;
    pub const SEND_SOLICITED: u8 = 5;
    pub const SEND_SOLICITED_INVALIDATE: u8 = 6;
    pub const TERMINATE: u8 = 7;
    pub const IMMEDIATE: u8 = 8;
    pub const ATOMIC_REQUEST: u8 = 10;
    pub const ATOMIC_RESPONSE: u8 = 11;
}

/// The two control bytes of a DDP segment, as versions 1 of DDP and RDMAP have them.
fn control(tagged: bool, last: bool, opcode: u8) -> [u8; 2] {
    let ddp = u8::from(tagged) << 7 | u8::from(last) << 6 | 1;
    [ddp, 0x40 | opcode]
}

/// A segment into tagged memory.
#[derive(Clone, Debug)]
pub struct Tagged {
    /// RDMAP's opcode.
    pub opcode: u8,
    /// The last of its message.
    pub last: bool,
    pub stag: u32,
    pub to: u64,
    pub payload: Vec<u8>,
}

impl Tagged {
    pub fn write(stag: u32, to: u64, payload: &[u8]) -> Tagged {
        Tagged {
            opcode: opcode::WRITE,
            last: true,
            stag,
            to,
            payload: payload.to_vec(),
        }
    }

    /// The ULPDU.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = control(true, self.last, self.opcode).to_vec();
        out.extend(self.stag.to_be_bytes());
        out.extend(self.to.to_be_bytes());
        out.extend(&self.payload);
        out
    }
}

/// A segment of an untagged message.
#[derive(Clone, Debug)]
pub struct Untagged {
    /// RDMAP's opcode.
    pub opcode: u8,
    /// The last of its message.
    pub last: bool,
    /// What RDMAP has of the header: the STag to invalidate.
    pub word: u32,
    pub queue: u32,
    /// Message sequence number.
    pub msn: u32,
    /// Message offset.
    pub mo: u32,
    pub payload: Vec<u8>,
}

impl Untagged {
    /// A message of one segment.
    pub fn new(opcode: u8, queue: u32, msn: u32, payload: &[u8]) -> Untagged {
        Untagged {
            opcode,
            last: true,
            word: 0,
            queue,
            msn,
            mo: 0,
            payload: payload.to_vec(),
        }
    }

    /// The ULPDU.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = control(false, self.last, self.opcode).to_vec();
        for word in [self.word, self.queue, self.msn, self.mo] {
            out.extend(word.to_be_bytes());
        }
        out.extend(&self.payload);
        out
    }
}

/// The payload of a Read Request.
pub fn read_request(sink: (u32, u64), size: u32, source: (u32, u64)) -> Vec<u8> {
    let mut out = sink.0.to_be_bytes().to_vec();
    out.extend(sink.1.to_be_bytes());
    out.extend(size.to_be_bytes());
    out.extend(source.0.to_be_bytes());
    out.extend(source.1.to_be_bytes());
    out
}

/// The payload of an Atomic Request (RFC 7306 5.2.1).
pub fn atomic_request(code: u32, id: u32, stag: u32, to: u64, values: [u64; 4]) -> Vec<u8> {
    let mut out = code.to_be_bytes().to_vec();
    out.extend(id.to_be_bytes());
    out.extend(stag.to_be_bytes());
    out.extend(to.to_be_bytes());
    for value in values {
        out.extend(value.to_be_bytes());
    }
    out
}

/// What an attacker wants to know of a segment that came.
#[derive(Clone, Debug)]
pub struct Received {
    /// RDMAP's opcode.
    pub opcode: u8,
    /// Tagged: STag and offset.
    pub tagged: Option<(u32, u64)>,
    /// The last of its message.
    pub last: bool,
    /// What it brought.
    pub payload: Vec<u8>,
}

impl Received {
    /// Of a ULPDU; `None` when it is too short to be one.
    pub fn parse(ulpdu: &[u8]) -> Option<Received> {
        let control = *ulpdu.first()?;
        let tagged = control & 0x80 != 0;
        let header = if tagged { 14 } else { 18 };
        let payload = ulpdu.get(header..)?.to_vec();
        let stag = u32::from_be_bytes(ulpdu[2..6].try_into().ok()?);
        let to = u64::from_be_bytes(ulpdu[6..14].try_into().ok()?);
        Some(Received {
            opcode: ulpdu[1] & 15,
            tagged: tagged.then_some((stag, to)),
            last: control & 0x40 != 0,
            payload,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    #[test]
    fn crc_is_that_of_the_rfc() {
        // RFC 3720 B.4
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
