//! The control connection of blast: plain TCP, separate from the measured connection.
//!
//! Each message is a length of four bytes, big endian, followed by that many bytes of JSON, at most [`LONGEST`]. The first
//! message in each direction is [`Hello`].

use crate::error::{BenchError, Result};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::plan::Plan;
use super::run::Received;

/// The longest message.
const LONGEST: u32 = 64 << 10;
const MAGIC: &str = "weft-blast";
const VERSION: u32 = 1;
/// The time within which a new peer must send its hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// Round trips for the measurement of the round-trip time.
const PINGS: u32 = 5;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Hello {
    magic: String,
    version: u32,
}

/// The client's messages.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Answer at once.
    Ping,
    /// Listen for a run like this.
    Run(Plan),
}

/// The server's messages.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Pong,
    /// Connect to this port.
    Listening {
        port: u16,
    },
    /// The receives are outstanding.
    Armed,
    /// Everything has arrived.
    Received(Received),
    /// The run was refused or has failed.
    Failed {
        why: String,
    },
}

pub(super) struct Control {
    stream: TcpStream,
    half_trip: Duration,
}

fn gone(error: &io::Error) -> BenchError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            BenchError::PeerGone("it said nothing for too long".to_owned())
        }
        io::ErrorKind::UnexpectedEof => BenchError::PeerGone("it closed the connection".to_owned()),
        _ => BenchError::PeerGone(error.to_string()),
    }
}

impl Control {
    /// The client's end.
    pub(super) fn connect(addr: SocketAddr, patience: Duration) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, patience)
            .map_err(|error| BenchError::Unreachable(addr, error))?;
        let mut control = Self::new(stream)?;
        control.greet()?;
        control.set_patience(Some(patience))?;
        let mut least = Duration::MAX;
        for _ in 0..PINGS {
            let start = Instant::now();
            match control.ask(&Ask::Ping)? {
                Answer::Pong => least = least.min(start.elapsed()),
                other => return Err(unexpected(&other)),
            }
        }
        control.half_trip = least / 2;
        Ok(control)
    }

    /// The server's end.
    pub(super) fn accept(stream: TcpStream, patience: Option<Duration>) -> Result<Self> {
        let mut control = Self::new(stream)?;
        control.greet()?;
        control.set_patience(patience)?;
        Ok(control)
    }

    fn new(stream: TcpStream) -> Result<Self> {
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(HELLO_PATIENCE)))
            .and_then(|()| stream.set_write_timeout(Some(HELLO_PATIENCE)))
            .map_err(BenchError::system("set a socket's options"))?;
        Ok(Self {
            stream,
            half_trip: Duration::ZERO,
        })
    }

    pub(super) fn set_patience(&self, patience: Option<Duration>) -> Result<()> {
        let set = self.stream.set_read_timeout(patience);
        set.map_err(BenchError::system("set a socket's options"))
    }

    fn greet(&mut self) -> Result<()> {
        let ours = Hello {
            magic: MAGIC.to_owned(),
            version: VERSION,
        };
        self.say(&ours)?;
        let stranger = || BenchError::Stranger("it is not a blast of this program".to_owned());
        let theirs: Hello = self.hear().map_err(|error| match error {
            BenchError::Stranger(_) => stranger(),
            other => other,
        })?;
        if theirs.magic != MAGIC {
            return Err(stranger());
        }
        if theirs.version != VERSION {
            return Err(BenchError::Stranger(format!(
                "it speaks version {} of the control protocol, we speak {VERSION}",
                theirs.version
            )));
        }
        Ok(())
    }

    /// Half of the shortest round trip: the travel time of the server's last message.
    pub(super) fn half_trip(&self) -> Duration {
        self.half_trip
    }

    pub(super) fn local_addr(&self) -> Result<SocketAddr> {
        let addr = self.stream.local_addr();
        addr.map_err(BenchError::system("read a socket's address"))
    }

    pub(super) fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let text =
            serde_json::to_vec(message).map_err(|error| BenchError::Stranger(error.to_string()))?;
        let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
        if len > LONGEST {
            return Err(BenchError::Stranger(
                "a control message is too long".to_owned(),
            ));
        }
        // One segment, one wake-up.
        let frame = [&len.to_be_bytes(), &text[..]].concat();
        self.stream.write_all(&frame).map_err(|error| gone(&error))
    }

    pub(super) fn hear<T: for<'a> Deserialize<'a>>(&mut self) -> Result<T> {
        let mut len = [0; 4];
        self.stream
            .read_exact(&mut len)
            .map_err(|error| gone(&error))?;
        let len = u32::from_be_bytes(len);
        if len > LONGEST {
            return Err(BenchError::Stranger(format!(
                "it sent a control message of {len} bytes"
            )));
        }
        let mut text = vec![0; len as usize];
        self.stream
            .read_exact(&mut text)
            .map_err(|error| gone(&error))?;
        serde_json::from_slice(&text)
            .map_err(|error| BenchError::Stranger(format!("it sent nonsense: {error}")))
    }

    /// Sends a request to the server and waits for its answer.
    pub(super) fn ask(&mut self, ask: &Ask) -> Result<Answer> {
        self.say(ask)?;
        self.answer()
    }

    pub(super) fn answer(&mut self) -> Result<Answer> {
        match self.hear()? {
            Answer::Failed { why } => Err(BenchError::Peer(why)),
            other => Ok(other),
        }
    }
}

pub(super) fn unexpected(answer: &Answer) -> BenchError {
    BenchError::Stranger(format!("it answered {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    /// Lets `peer` speak to a control end, and returns how that end took it.
    fn against(peer: impl FnOnce(TcpStream) + Send + 'static) -> BenchError {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let peer = std::thread::spawn(move || peer(TcpStream::connect(addr).unwrap()));
        let (stream, _) = listener.accept().unwrap();
        let error = Control::accept(stream, None).err().unwrap();
        peer.join().unwrap();
        error
    }

    #[test]
    fn strangers_are_told_apart() {
        let cases: [(&[u8], &str); 4] = [
            (b"GET / HTTP/1.0\r\n\r\n", "not a blast"),
            (b"\0\0\0\x02{}", "not a blast"),
            (
                b"\0\0\0\x24{\"magic\":\"weft-blast\",\"version\":999}  ",
                "version 999",
            ),
            (b"\0\0", "closed"),
        ];
        for (bytes, expected) in cases {
            let error = against(move |mut stream| {
                stream.write_all(bytes).unwrap();
                // The peer may have closed already.
                let _ = stream.shutdown(std::net::Shutdown::Write);
                // The other end's greeting, until it hangs up.
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let text = error.to_string();
            assert!(text.contains(expected), "{text} for {bytes:?}");
        }
    }

    #[test]
    fn two_of_us_understand_each_other() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut control = Control::accept(stream, None).unwrap();
            while let Ok(ask) = control.hear::<Ask>() {
                let answer = match ask {
                    Ask::Ping => Answer::Pong,
                    Ask::Run(_) => Answer::Failed {
                        why: "not today".to_owned(),
                    },
                };
                control.say(&answer).unwrap();
            }
        });
        let mut control = Control::connect(addr, HELLO_PATIENCE).unwrap();
        assert!(control.half_trip() > Duration::ZERO);
        let refused = control.ask(&Ask::Run(Plan::default())).unwrap_err();
        assert!(refused.to_string().contains("not today"));
        drop(control);
        server.join().unwrap();
    }
}
