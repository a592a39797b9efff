//! The private data of both MPA start-up frames, in a form that every version of a protocol reads. docs/spec/fs.md and docs/spec/cc.md draw it.

use crate::Protocol;

/// Length of a hello in bytes.
pub const HELLO_LEN: usize = 16;

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// A server's answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Status {
    #[error("go on")]
    Ok,
    /// This version is not spoken here.
    #[error("it speaks another version of the protocol")]
    Version,
    /// As many peers are served as may be.
    #[error("it serves as many peers as it may")]
    Busy,
    /// The peer's key is not authorised, and the kernel does not say that it is of the server's user.
    #[error("our key is not authorised there")]
    UnknownPeer,
}

/// The beginning of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The sender's version of the protocol.
    pub version: u16,
    /// The server's verdict; `Ok` in a client's hello.
    pub status: Status,
    /// What the protocol says here of the server; 0 in a client's hello.
    pub value: u16,
}

impl Protocol {
    /// The bytes of our hello.
    pub fn hello(&self, status: Status, value: u16) -> Vec<u8> {
        let numbers = [self.version, status as u16, value, 0].map(u16::to_be_bytes);
        [&self.magic[..], numbers.as_flattened()].concat()
    }

    /// Reads a hello; trailing bytes (padding of a kernel's peer) are ignored.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn read_hello(&self, bytes: &[u8]) -> Result<Hello, Malformed> {
        let bytes: &[u8; HELLO_LEN] = bytes.first_chunk().ok_or(Malformed("short hello"))?;
        if !bytes.starts_with(&self.magic) {
            return Err(Malformed("another protocol"));
        }
        let number = |at| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let (version, value) = (number(8), number(12));
        const ALL: [Status; 4] = [
            Status::Ok,
            Status::Version,
            Status::Busy,
            Status::UnknownPeer,
        ];
        let status = ALL.get(usize::from(number(10))).copied();
        let status = status.ok_or(Malformed("status"))?;
        if version == self.version && number(14) != 0 {
            return Err(Malformed("reserved"));
        }
        Ok(Hello {
            version,
            status,
            value,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hellos_are_read_as_they_were_written() {
        let protocol = Protocol {
            magic: *b"weft-xx\0",
            version: 3,
            longest: 64,
            inline: 0,
            depth: 1,
            is_quiet: false,
        };
        let bytes = protocol.hello(Status::Busy, 14);
        let hello = Hello {
            version: 3,
            status: Status::Busy,
            value: 14,
        };
        assert_eq!(protocol.read_hello(&bytes), Ok(hello));
        assert_eq!(
            protocol.read_hello(&[&bytes[..], &[0; 4]].concat()),
            Ok(hello)
        );
        assert!(protocol.read_hello(&bytes[1..]).is_err());
        for (at, to) in [(0, b'x'), (10, 1), (11, 4), (15, 1)] {
            let mut bytes = bytes.clone();
            bytes[at] = to;
            assert!(protocol.read_hello(&bytes).is_err(), "{at}");
        }
    }
}
