//! A connection that both ends have agreed on: bytes between the program's rings and the SDP stream to the peer's host.
//!
//! Each connection has one thread. It waits in the kernel for the program's bell and for the stream; an idle connection costs no time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags as Recv, SendFlags as Send};
use weft_ring::Role;
use weft_ring::stream::{FILL, Published, Stream as Rings, Wish};
use weft_sdp::{RecvFlags, Sink, Source, Stream};
use weft_sys::{Interest, poll_fds};

use crate::wire::{Frame, HEAD, MAX_DATA, WireError};

/// The program made the rings, so it is their initiator.
const PROGRAM: Role = Role::Initiator;
const OURS: Role = Role::Responder;
/// Largest number of bytes that wait for the stream. Above it the program's ring is not read.
const BACKLOG: usize = 128 << 10;
/// Bytes read from the stream at once.
const TAKE: usize = MAX_DATA as usize + 2 * HEAD;

/// How long a peer may be silent after the program has closed its socket.
const LINGER: Duration = Duration::from_mins(5);

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    /// Both ends went back to TCP, or a program closed its socket.
    #[error("both ends are done with it")]
    Done,
    /// The peer's broker, or the way to it, is gone.
    #[error("the peer's host is gone: {0}")]
    Peer(Errno),
    /// The peer's broker broke the protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer's broker sent a frame at the wrong time.
    #[error("the peer's broker says things in a wrong order")]
    Order,
    /// The program wrote values into the rings that no honest program writes.
    #[error("the program broke the rules of the rings")]
    Program,
    /// A system call failed.
    #[error("waiting failed: {0}")]
    System(#[from] io::Error),
}

/// Frames exchanged so far, in each direction.
#[derive(Default)]
struct Said {
    consent: bool,
    switch: bool,
    end: bool,
    stop: bool,
    gone: bool,
}

pub(crate) struct Pump {
    rings: Rings,
    bell: OwnedFd,
    stream: Stream,
    /// By us, to the peer's broker; and by it.
    said: Said,
    heard: Said,
    /// Positions: bytes read from the program's ring, and bytes put into ours.
    head: u64,
    tail: u64,
    /// For the stream.
    out: Vec<u8>,
    sent: usize,
    /// From the stream.
    taken: Vec<u8>,
    at: usize,
    filled: usize,
    /// Bytes of the data frame that has begun.
    data: usize,
    /// The stream has ended.
    over: bool,
    /// The program has closed its socket, or is dead.
    left: bool,
    /// Our ring is full: the bell is filled until the program has read.
    full: bool,
}

impl Pump {
    pub(crate) fn new(rings: Rings, bell: OwnedFd, stream: Stream) -> Pump {
        stream.set_nonblocking(true);
        Pump {
            rings,
            bell,
            stream,
            said: Said::default(),
            heard: Said::default(),
            head: 0,
            tail: 0,
            out: Vec::new(),
            sent: 0,
            taken: vec![0; 2 * TAKE],
            at: 0,
            filled: 0,
            data: 0,
            over: false,
            left: false,
            full: false,
        }
    }

    /// Runs until the connection has ended.
    pub(crate) fn run(mut self) -> End {
        let end = loop {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => {
                    if let Err(end) = self.sleep() {
                        break end;
                    }
                }
                Err(end) => break end,
            }
        };
        // Bytes that were never published go over TCP; a program that finds its own ring open and the bell closed knows that bytes are
        // lost. One exchange decides: the program may publish its first bytes at the same time.
        self.rings.close_unused(PROGRAM);
        // The peer's program never learned that it may switch: all that it sends comes over TCP.
        if !self.said.consent {
            self.rings.close(OURS);
            if self.rings.take_wish(OURS) {
                self.ring();
            }
        }
        end
    }

    /// Looks at everything once. Returns whether there was something to do.
    fn turn(&mut self) -> Result<bool, End> {
        let mut busy = self.hear_program()?;
        busy |= self.take_from_program()?;
        busy |= self.send();
        busy |= self.receive()?;
        busy |= self.give_to_program()?;
        if self.is_done() {
            return Err(End::Done);
        }
        // Bytes that wait for the program to read are still its own.
        if self.over && !busy && (self.data == 0 || self.is_idle()) {
            return Err(End::Peer(Errno::CONNRESET));
        }
        Ok(busy)
    }

    fn is_done(&self) -> bool {
        let flushed = self.sent == self.out.len();
        let ended = self.heard.end && self.rings.is_closed(OURS);
        flushed && self.said.end && (ended || self.left || (self.heard.gone && self.over))
    }

    fn say(&mut self, frame: Frame) {
        self.out.extend(frame.emit());
    }

    /// Carries out the requests of the program's words in the segment.
    fn hear_program(&mut self) -> Result<bool, End> {
        let mut busy = false;
        if !self.left {
            // Counted first, and looked at second: only this thread makes room, so bytes that fill the bell because the ring is full are not among those taken.
            let waiting = self.bells();
            if !self.is_blocked()? {
                busy |= self.take_bells(waiting);
            } else if self.has_hung_up() {
                self.left = true;
                busy = true;
            }
        }
        if !self.said.consent && self.rings.has_consented(OURS) {
            self.said.consent = true;
            self.say(Frame::Consent);
            busy = true;
        }
        if !self.said.stop && self.rings.wants_tcp(OURS) {
            self.said.stop = true;
            self.say(Frame::Stop);
            busy = true;
        }
        if !self.said.switch && !self.said.end && self.rings.has_switched(PROGRAM) {
            self.said.switch = true;
            self.say(Frame::Switch);
            let offset = self.rings.sent_over_tcp(PROGRAM);
            self.out.extend(offset.to_be_bytes());
            busy = true;
        }
        Ok(busy)
    }

    /// Reports whether the program waits for room in its ring and there is none: its bell stays as it is.
    fn is_blocked(&self) -> Result<bool, End> {
        let (ready, _) = self.ready()?;
        Ok(ready > self.rings.capacity() / 2 && self.rings.wants_room(PROGRAM))
    }

    /// Returns true if the other end of the bell is closed, without reading its bytes.
    fn has_hung_up(&self) -> bool {
        let bell = [(self.bell.as_fd(), Interest::empty())];
        matches!(poll_fds(&bell, Some(Duration::ZERO)), Ok(bits) if bits != 0)
    }

    fn ready(&self) -> Result<(usize, bool), End> {
        self.rings
            .ready(PROGRAM, self.head)
            .map_err(|_| End::Program)
    }

    /// Bytes in the bell.
    fn bells(&self) -> usize {
        rustix::io::ioctl_fionread(&self.bell).map_or(0, |n| n as usize)
    }

    /// Reads up to `most` bytes of the bell, and notices its end. Later bytes stay: the program may have filled the bell since, because the ring is full again.
    /// Returns whether there were any bytes, or the end.
    fn take_bells(&mut self, most: usize) -> bool {
        let mut bytes = [0; FILL];
        let mut taken = 0;
        loop {
            let want = (most - taken).min(FILL);
            // Without bytes to take, this only looks for the end.
            let (want, flags) = if want == 0 {
                (1, Recv::DONTWAIT | Recv::PEEK)
            } else {
                (want, Recv::DONTWAIT)
            };
            let got = rustix::net::recv(&self.bell, &mut bytes[..want], flags);
            match got.map(|(n, _)| n) {
                Ok(1..) if taken == most => return true,
                Ok(n @ 1..) => taken += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return taken > 0,
                Ok(0) | Err(_) => {
                    self.left = true;
                    return true;
                }
            }
        }
    }

    fn take_from_program(&mut self) -> Result<bool, End> {
        let mut busy = false;
        while self.out.len() - self.sent < BACKLOG {
            let (ready, closed) = self.ready()?;
            if ready > 0 && !self.said.switch {
                if !self.rings.has_switched(PROGRAM) {
                    return Err(End::Program);
                }
                // It is announced first.
                return Ok(true);
            }
            let n = ready.min(MAX_DATA as usize);
            if n > 0 && self.over && !self.heard.gone {
                // The peer's host is gone: the connection is about to end.
                break;
            }
            if n > 0 {
                if !self.heard.gone {
                    self.say(Frame::Data(n as u32));
                    let from = self.out.len();
                    self.out.resize(from + n, 0);
                    self.rings
                        .get_slice(PROGRAM, self.head, &mut self.out[from..]);
                }
                self.head += n as u64;
                self.make_room(ready - n)?;
                busy = true;
                continue;
            }
            if (closed || self.left) && !self.said.end {
                // Bytes that came between the two looks are seen in the next turn.
                if !closed {
                    self.rings.close(PROGRAM);
                    return Ok(true);
                }
                // A program that switches from now on finds the ring closed, and sends over TCP.
                self.said.end = true;
                self.say(Frame::End);
                busy = true;
            }
            if self.left && self.said.end && !self.said.gone {
                self.said.gone = true;
                self.say(Frame::Gone);
                busy = true;
            }
            break;
        }
        Ok(busy)
    }

    /// Gives the bytes up to the head back to the program, `left` are behind them. Makes its end of the bell writable if it waits and half of the ring is free.
    fn make_room(&mut self, left: usize) -> Result<(), End> {
        // Before the program can see the room, fill the ring again, and fill the bell for that. If it does not wait yet, there are no bytes for that.
        let waiting = if self.rings.wants_room(PROGRAM) {
            self.bells()
        } else {
            0
        };
        if !self.rings.consumed(PROGRAM, self.head) || left > self.rings.capacity() / 2 {
            return Ok(());
        }
        self.rings.room_made(PROGRAM);
        // It may have done so before its request was taken back: then the request stands again.
        let (ready, _) = self.ready()?;
        if ready > self.rings.capacity() / 2 {
            self.rings.want_room(PROGRAM);
        }
        self.take_bells(waiting);
        Ok(())
    }

    fn send(&mut self) -> bool {
        let mut busy = false;
        if self.over {
            // Nothing receives it.
            self.out.clear();
            self.sent = 0;
        }
        while self.sent < self.out.len() {
            match self
                .stream
                .send(&[Source::Bytes(&self.out[self.sent..])], true)
            {
                Ok(n) => {
                    self.sent += n;
                    busy = true;
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    // Earlier frames of the peer are still received.
                    self.out.truncate(self.sent);
                    break;
                }
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        } else if self.sent > BACKLOG {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        busy
    }

    fn receive(&mut self) -> Result<bool, End> {
        // Bytes that the program has no room for hold the peer back.
        if self.over || self.filled - self.at > TAKE {
            return Ok(false);
        }
        self.taken.copy_within(self.at..self.filled, 0);
        self.filled -= self.at;
        self.at = 0;
        let to = &mut self.taken[self.filled..];
        match self
            .stream
            .recv(&mut [Sink::Bytes(to)], RecvFlags::DONTWAIT)
        {
            Ok(0) => self.over = true,
            Ok(n) => self.filled += n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(e) if self.is_idle() => return Err(End::Peer(e)),
            Err(_) => self.over = true,
        }
        Ok(true)
    }

    fn is_idle(&self) -> bool {
        self.at == self.filled
    }

    /// Handles the frames that have come.
    fn give_to_program(&mut self) -> Result<bool, End> {
        let mut busy = false;
        loop {
            if self.data > 0 {
                if !self.give_data()? {
                    return Ok(busy);
                }
                busy = true;
                continue;
            }
            let Some((head, rest)) = self.taken[self.at..self.filled].split_first_chunk::<HEAD>()
            else {
                return Ok(busy);
            };
            let frame = Frame::parse(*head)?;
            let mut used = HEAD;
            match frame {
                Frame::Switch => {
                    let Some((offset, _)) = rest.split_first_chunk::<8>() else {
                        return Ok(busy);
                    };
                    used += 8;
                    let offset = u64::from_be_bytes(*offset);
                    // The word of the segment has 44 bits for it.
                    if self.heard.switch || self.heard.end || offset >= 1 << 44 {
                        return Err(End::Order);
                    }
                    if !self.said.consent {
                        return Err(End::Order);
                    }
                    self.heard.switch = true;
                    self.rings.join(OURS, offset);
                }
                Frame::Data(len) => {
                    if !self.heard.switch || self.heard.end {
                        return Err(End::Order);
                    }
                    self.data = len as usize;
                }
                Frame::Consent => {
                    if self.heard.consent {
                        return Err(End::Order);
                    }
                    self.heard.consent = true;
                    // Counts are the receiver's own affair.
                    self.rings.consent(PROGRAM, 0);
                }
                Frame::End => {
                    if self.heard.end {
                        return Err(End::Order);
                    }
                    self.heard.end = true;
                    self.rings.close(OURS);
                    if self.rings.take_wish(OURS) {
                        self.ring();
                    }
                }
                Frame::Stop | Frame::Gone => {
                    self.heard.stop |= frame == Frame::Stop;
                    self.heard.gone |= frame == Frame::Gone;
                    // The program's next send finds it closed, and goes over TCP.
                    self.rings.close(PROGRAM);
                }
            }
            self.at += used;
            busy = true;
        }
    }

    /// Passes bytes of the stream to the program, once it has read all earlier bytes from TCP. Returns whether any were passed.
    fn give_data(&mut self) -> Result<bool, End> {
        let have = self.data.min(self.filled - self.at);
        let is_next = self.rings.has_switched(OURS)
            || self.rings.seen(OURS) == self.rings.sent_over_tcp(OURS);
        if have > 0 && (self.left || self.rings.is_closed(OURS)) {
            // Nothing reads it, at any position of the stream.
            self.at += have;
            self.data -= have;
            return Ok(true);
        }
        if have == 0 || !is_next {
            return Ok(false);
        }
        let room = self.rings.room(OURS, self.tail).map_err(|_| End::Program)?;
        if room == 0 {
            return Ok(self.wait_for_room());
        }
        self.full = false;
        let n = have.min(room);
        self.rings
            .put_slice(OURS, self.tail, &self.taken[self.at..self.at + n]);
        let to = self.tail + n as u64;
        match self
            .rings
            .publish(OURS, self.tail, to)
            .map_err(|_| End::Program)?
        {
            Published::Ring => self.ring(),
            Published::Quietly | Published::Closed => {}
        }
        self.tail = to;
        self.at += n;
        self.data -= n;
        Ok(true)
    }

    /// Makes the bell unwritable because the ring is full: the program makes it writable again when there is room. Returns whether there is room after all.
    fn wait_for_room(&mut self) -> bool {
        self.rings.want_room(OURS);
        let is_full = |pump: &Pump| pump.rings.room(OURS, pump.tail).is_ok_and(|room| room == 0);
        if !is_full(self) {
            return true;
        }
        for _ in 0..8 {
            if !matches!(
                poll_fds(&[(self.bell.as_fd(), Interest::WRITE)], Some(Duration::ZERO)),
                Ok(bits) if bits != 0
            ) {
                break;
            }
            // Mark first, look second: the program does the reverse.
            self.rings.begin_fill(OURS);
            if !is_full(self) {
                self.rings.end_fill(OURS, 0);
                return true;
            }
            let flags = Send::NOSIGNAL | Send::DONTWAIT;
            // The byte that the program leaves there for unread bytes is of the second message, and does not hold the buffer of the first.
            let sent = rustix::net::send(&self.bell, &[b'!'; FILL], flags);
            let last = rustix::net::send(&self.bell, b"!", flags);
            let n = sent.unwrap_or(0) + last.unwrap_or(0);
            self.rings.end_fill(OURS, n as u64);
            match sent {
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(_) => {
                    // Bytes under way are useless now.
                    self.left = true;
                    return true;
                }
            }
        }
        self.full = true;
        !is_full(self)
    }

    fn ring(&self) {
        // A full bell is readable already.
        let _ = rustix::net::send(&self.bell, b"!", Send::NOSIGNAL | Send::DONTWAIT);
    }

    /// Waits until the bell or the stream has something.
    fn sleep(&mut self) -> Result<(), End> {
        if !self.left {
            self.rings.arm(PROGRAM, self.head, Wish::Once);
        }
        let heard = self.stream.arm();
        let done = self.sleep_armed();
        self.stream.disarm(heard);
        done
    }

    fn sleep_armed(&mut self) -> Result<(), End> {
        // Once more, now that both would ring.
        if self.turn()? {
            return Ok(());
        }
        let mut interest = Interest::empty();
        interest.set(Interest::READ, !self.is_blocked()?);
        interest.set(Interest::WRITE, self.full);
        let mut fds = Vec::with_capacity(2);
        if !self.over {
            fds.push((self.stream.as_fd(), Interest::READ));
        }
        if !self.left {
            // The kernel reports its end with any interest.
            fds.push((self.bell.as_fd(), interest));
        }
        // With nothing to wait for, the next look ends the connection. A peer that reads nothing keeps no thread alive for a program that is gone.
        let limit = if fds.is_empty() {
            Some(Duration::from_millis(100))
        } else {
            self.left.then_some(LINGER)
        };
        match poll_fds(&fds, limit) {
            Ok(0) if self.left && !fds.is_empty() => Err(End::Peer(Errno::TIMEDOUT)),
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}
