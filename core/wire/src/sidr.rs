//! Service ID resolution: a request to the program that listens on a UDP port for a datagram queue pair, answered by its number and key
//! (after the SIDR_REQ and SIDR_REP messages of InfiniBand's connection manager, 12.8): docs/spec/dgram.md.
//!
//! ```
//! use weft_wire::sidr::{Body, Message};
//!
//! let request = Message { transaction: 7, body: Body::Request, private_data: b"hello" };
//! assert_eq!(Message::parse(&request.emit().unwrap()), Some(request));
//! ```

use crate::crc::crc32c;

/// The longest private data of a request, in bytes.
pub const MAX_REQUEST: usize = 180;
/// The longest private data of a reply, in bytes.
pub const MAX_REPLY: usize = 136;
/// The longest message.
pub const MAX_LEN: usize = HEADER + MAX_REQUEST + CRC;

const MAGIC: [u8; 4] = *b"WSR1";
const HEADER: usize = 24;
const CRC: usize = 4;
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

/// The status of a reply (InfiniBand 12.8.2); other numbers are failures of other kinds.
pub mod status {
    /// Here is the queue pair.
    pub const SUCCESS: u8 = 0;
    /// No program listens there.
    pub const UNSUPPORTED: u8 = 1;
    /// The listening program refuses.
    pub const REJECT: u8 = 2;
    /// The program has no queue pair for that.
    pub const NO_QP: u8 = 3;
}

/// Which message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A queue pair is asked for.
    Request,
    /// The answer.
    Reply {
        /// One of [`status`].
        status: u8,
        /// The queue pair; 0 without success.
        qp_num: u32,
        /// Its Q_Key.
        qkey: u32,
    },
}

/// One message: one UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// The requester's identifier of the request, repeated in the reply.
    pub transaction: u64,
    /// The contents.
    pub body: Body,
    /// The private data of the programs.
    pub private_data: &'a [u8],
}

impl<'a> Message<'a> {
    /// The datagram; `None` when the private data is too long.
    pub fn emit(&self) -> Option<Vec<u8>> {
        let (kind, status, qp_num, qkey, most) = match self.body {
            Body::Request => (REQUEST, 0, 0, 0, MAX_REQUEST),
            Body::Reply {
                status,
                qp_num,
                qkey,
            } => (REPLY, status, qp_num, qkey, MAX_REPLY),
        };
        let len = u8::try_from(self.private_data.len()).ok()?;
        if usize::from(len) > most {
            return None;
        }
        let mut out = Vec::with_capacity(HEADER + usize::from(len) + CRC);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[kind, status, 0, len]);
        out.extend_from_slice(&self.transaction.to_be_bytes());
        out.extend_from_slice(&qp_num.to_be_bytes());
        out.extend_from_slice(&qkey.to_be_bytes());
        out.extend_from_slice(self.private_data);
        out.extend_from_slice(&crc32c(&out).to_le_bytes());
        Some(out)
    }

    /// The message in a datagram; `None` for an invalid one.
    pub fn parse(datagram: &'a [u8]) -> Option<Message<'a>> {
        let (covered, crc) = datagram.split_last_chunk::<CRC>()?;
        let (header, private_data) = covered.split_first_chunk::<HEADER>()?;
        if header[..4] != MAGIC
            || header[6] != 0
            || usize::from(header[7]) != private_data.len()
            || crc32c(covered).to_le_bytes() != *crc
        {
            return None;
        }
        let word = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| header[at + i]));
        let (body, most) = match header[4] {
            REQUEST if (header[5], word(16), word(20)) == (0, 0, 0) => (Body::Request, MAX_REQUEST),
            REPLY => {
                let reply = Body::Reply {
                    status: header[5],
                    qp_num: word(16),
                    qkey: word(20),
                };
                (reply, MAX_REPLY)
            }
            _ => return None,
        };
        (private_data.len() <= most).then(|| Message {
            transaction: u64::from(word(8)) << 32 | u64::from(word(12)),
            body,
            private_data,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: Message<'static> = Message {
        transaction: 0x0102_0304_0506_0708,
        body: Body::Reply {
            status: status::SUCCESS,
            qp_num: 0x00ab_cd01,
            qkey: 0x0123_4567,
        },
        private_data: b"hi",
    };

    /// The example of docs/spec/dgram.md.
    #[test]
    fn a_reply_looks_as_the_specification_says() {
        let raw = ANSWER.emit().unwrap();
        let expected = [
            0x57, 0x53, 0x52, 0x31, 2, 0, 0, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0xab, 0xcd, 1, 1, 0x23,
            0x45, 0x67, 0x68, 0x69,
        ];
        assert_eq!(raw[..raw.len() - CRC], expected);
        assert_eq!(raw[raw.len() - CRC..], crc32c(&expected).to_le_bytes());
        assert_eq!(Message::parse(&raw), Some(ANSWER));
    }

    #[test]
    fn whatever_is_damaged_is_no_message() {
        let raw = ANSWER.emit().unwrap();
        for at in 0..raw.len() {
            let mut bad = raw.clone();
            bad[at] ^= 0x20;
            assert_eq!(Message::parse(&bad), None, "byte {at}");
            assert_eq!(Message::parse(&raw[..at]), None, "cut to {at}");
        }
        assert_eq!(Message::parse(&[0; MAX_LEN]), None);
    }

    #[test]
    fn what_is_too_long_is_no_message() {
        for (body, most) in [(Body::Request, MAX_REQUEST), (ANSWER.body, MAX_REPLY)] {
            let of = |private_data| Message {
                body,
                private_data,
                ..ANSWER
            };
            let long = [7; MAX_REQUEST + 1];
            let raw = of(&long[..most]).emit().unwrap();
            assert_eq!(Message::parse(&raw), Some(of(&long[..most])));
            assert_eq!(of(&long[..=most]).emit(), None);
            // As one would say it that does not keep to this.
            let mut raw = raw[..raw.len() - CRC].to_vec();
            raw.push(7);
            raw[7] += 1;
            let crc = crc32c(&raw).to_le_bytes();
            raw.extend_from_slice(&crc);
            assert_eq!(Message::parse(&raw), None);
        }
    }

    #[test]
    fn kinds_and_fields_to_come_are_no_messages() {
        let request = Message {
            body: Body::Request,
            ..ANSWER
        };
        for (message, reserved) in [
            (ANSWER, &[4, 6][..]),
            (request, &[4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 23]),
        ] {
            for &at in reserved {
                let mut raw = message.emit().unwrap();
                raw.truncate(raw.len() - CRC);
                raw[at] = 3;
                let crc = crc32c(&raw).to_le_bytes();
                raw.extend_from_slice(&crc);
                assert_eq!(Message::parse(&raw), None, "byte {at}");
            }
        }
    }
}
