//! The same over plain TCP, for comparison. It needs no request and no confirmation: a receiver without a free element does not read, and
//! TCP's flow control stops the sender. Goodbyes and failures travel in the other direction of the same socket.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use crate::link::{Failure, In, LOOK, Out, Slot, Trouble};
use crate::wire::{self, HEADER, Header, Kind, SMALL};

/// How long a node that reports a failure waits for the neighbour to close.
const LINGER: Duration = Duration::from_millis(300);

fn gone(error: &io::Error) -> Trouble {
    Trouble::Gone(error.to_string())
}

fn is_time(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Reads all of `out`; false when `stop` says so first.
fn read_all(from: &mut TcpStream, out: &mut [u8], stop: &dyn Fn() -> bool) -> Result<(), Trouble> {
    let mut at = 0;
    while at < out.len() {
        match from.read(&mut out[at..]) {
            Ok(0) => return Err(Trouble::Gone("the connection has ended".into())),
            Ok(n) => at += n,
            Err(e) if is_time(&e) && stop() => return Err(Trouble::Stopped),
            Err(e) if is_time(&e) => {}
            Err(e) => return Err(gone(&e)),
        }
    }
    Ok(())
}

pub(crate) struct TcpLink {
    stream: TcpStream,
    /// The bytes of the next header that have come.
    partial: [u8; HEADER],
    have: usize,
    /// An element's header whose data has not been read.
    next: Option<Header>,
}

impl TcpLink {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))?;
        Ok(Self {
            stream,
            partial: [0; HEADER],
            have: 0,
            next: None,
        })
    }

    /// The next header; `None` when none comes in time.
    fn header(&mut self, wait: Duration) -> Result<Option<Header>, Trouble> {
        let end = Instant::now() + wait;
        self.stream
            .set_read_timeout(Some(wait.max(Duration::from_micros(50))))
            .map_err(|e| gone(&e))?;
        while self.have < HEADER {
            match self.stream.read(&mut self.partial[self.have..]) {
                Ok(0) => return Err(Trouble::Gone("the connection has ended".into())),
                Ok(n) => self.have += n,
                Err(e) if is_time(&e) && Instant::now() >= end => return Ok(None),
                Err(e) if is_time(&e) => {}
                Err(e) => return Err(gone(&e)),
            }
        }
        self.have = 0;
        self.stream
            .set_read_timeout(Some(LOOK))
            .map_err(|e| gone(&e))?;
        let header =
            Header::decode(&self.partial).ok_or(Trouble::Protocol("a message that is none"))?;
        if header.kind == Kind::Fail {
            let mut text = vec![0; (header.len as usize).min(SMALL - HEADER)];
            read_all(&mut self.stream, &mut text, &|| true)?;
            return Err(Trouble::Told(Failure {
                node: header.origin.into(),
                why: wire::failure_text(&text),
            }));
        }
        Ok(Some(header))
    }

    fn write_all(&mut self, mut bytes: &[u8], stop: &dyn Fn() -> bool) -> Result<(), Trouble> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if is_time(&e) && stop() => return Err(Trouble::Stopped),
                Err(e) if is_time(&e) => {}
                Err(e) => return Err(gone(&e)),
            }
        }
        Ok(())
    }

    fn tell(&mut self, failure: &Failure) {
        let bytes = wire::encode_failure(failure.node, &failure.why);
        if self.write_all(&bytes, &|| true).is_ok() {
            self.linger(LINGER);
        }
    }

    fn linger(&mut self, wait: Duration) -> bool {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let end = Instant::now() + wait;
        let mut rest = [0; 4096];
        while Instant::now() < end {
            match self.stream.read(&mut rest) {
                Ok(0) => return true,
                Err(e) if !is_time(&e) => return true,
                _ => {}
            }
        }
        false
    }
}

impl Out for TcpLink {
    fn send(
        &mut self,
        slot: &Slot,
        header: &Header,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let data = &slot.plain.as_bytes()[..header.len as usize];
        let written = self.write_all(&header.encode(), stop);
        match written.and_then(|()| self.write_all(data, stop)) {
            // It may have sent the reason before it closed.
            Err(Trouble::Gone(why)) => match self.header(Duration::ZERO) {
                Err(told @ Trouble::Told(_)) => Err(told),
                _ => Err(Trouble::Gone(why)),
            },
            other => other,
        }
    }

    fn poll(&mut self, wait: Duration) -> Result<bool, Trouble> {
        match self.header(wait)? {
            Some(header) if header.kind == Kind::Bye => Ok(true),
            Some(_) => Err(Trouble::Protocol("a message out of place")),
            None => Ok(false),
        }
    }

    fn tell(&mut self, failure: &Failure) {
        TcpLink::tell(self, failure);
    }

    fn close(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl In for TcpLink {
    fn request(&mut self, wait: Duration) -> Result<bool, Trouble> {
        if self.next.is_none() {
            self.next = self.header(wait)?;
        }
        Ok(self.next.is_some())
    }

    fn hold(&mut self) -> Result<(), Trouble> {
        Ok(())
    }

    fn take(&mut self, slot: &mut Slot, stop: &dyn Fn() -> bool) -> Result<Header, Trouble> {
        let header = self.next.take().ok_or(Trouble::Protocol("no element"))?;
        let data = slot.plain.as_mut_bytes();
        let data = data
            .get_mut(..header.len as usize)
            .ok_or(Trouble::Protocol("a length beyond the element"))?;
        read_all(&mut self.stream, data, stop)?;
        Ok(header)
    }

    fn goodbye(&mut self) -> Result<(), Trouble> {
        self.write_all(&Header::new(Kind::Bye).encode(), &|| false)
    }

    fn closed(&mut self, wait: Duration) -> bool {
        self.linger(wait)
    }

    fn tell(&mut self, failure: &Failure) {
        TcpLink::tell(self, failure);
    }
}
