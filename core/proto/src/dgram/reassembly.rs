//! Putting the segments of messages together, wherever their bytes lie.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use thiserror::Error;
use weft_wire::dgram::Segment;

/// Finished messages of a source that are remembered, by number: segments of older ones are late.
const WINDOW: u32 = 256;

/// Limits of a [`Reassembler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How long a message may go without a new segment before it is dropped.
    pub timeout: Duration,
    /// Sources that are remembered. One that was not heard for the longest is forgotten for a new one.
    pub max_sources: usize,
    /// Messages of which some segments are there and some are not. The one that was not heard of for the longest is given up for a new one.
    pub max_open: usize,
    /// The same for one host (an IPv4 address, an IPv6 network of 64 bits): for a further one, one of its own is given up.
    pub max_open_per_host: usize,
    /// Separate ranges of one message: a segment that makes more is dropped.
    pub max_ranges: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            timeout: Duration::from_millis(100),
            max_sources: 16_384,
            max_open: 256,
            max_open_per_host: 128,
            max_ranges: 1024,
        }
    }
}

/// The sender of a sequence of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Address and UDP port.
    pub addr: SocketAddr,
    /// Its queue pair.
    pub qp_num: u32,
    /// Which of the queue pairs that have had this number.
    pub incarnation: u32,
}

/// Byte ranges of a message, in order, with a gap between any two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(SmallVec<[(u32, u32); 2]>);

impl Ranges {
    /// One range, from 0 to `len`.
    pub fn up_to(len: u32) -> Ranges {
        let mut ranges = SmallVec::new();
        if len > 0 {
            ranges.push((0, len));
        }
        Ranges(ranges)
    }

    /// Start and end of each.
    pub fn as_slice(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// Bytes in all of them.
    pub fn bytes(&self) -> u32 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Whether it is one range, from 0 to `len`.
    pub fn covers(&self, len: u32) -> bool {
        len == 0 || self.as_slice() == [(0, len)]
    }

    /// The position at which a range would be inserted, and whether it touches its neighbours.
    fn place(&self, start: u32, end: u32, max: usize) -> Result<(usize, bool, bool), Refusal> {
        let at = self.0.partition_point(|&(_, e)| e <= start);
        if let Some(&(s, e)) = self.0.get(at)
            && s < end
        {
            let inside = s <= start && end <= e;
            return Err(if inside {
                Refusal::Duplicate
            } else {
                Refusal::Overlap
            });
        }
        let before = at.checked_sub(1).is_some_and(|i| self.0[i].1 == start);
        let behind = self.0.get(at).is_some_and(|&(s, _)| s == end);
        if !before && !behind && self.0.len() >= max {
            return Err(Refusal::Fragmented);
        }
        Ok((at, before, behind))
    }

    fn insert(&mut self, start: u32, end: u32) {
        match self.place(start, end, usize::MAX) {
            Ok((at, true, true)) => {
                self.0[at - 1].1 = self.0[at].1;
                self.0.remove(at);
            }
            Ok((at, true, false)) => self.0[at - 1].1 = end,
            Ok((at, false, true)) => self.0[at].0 = start,
            Ok((at, false, false)) if start < end => self.0.insert(at, (start, end)),
            _ => {}
        }
    }
}

/// Why a segment is dropped. None of it touches the queue pair, or another message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum Refusal {
    /// Its message has ended: it is complete, dropped, or older than the window.
    #[error("late")]
    Late,
    /// Its bytes are there.
    #[error("a duplicate")]
    Duplicate,
    /// Some of its bytes are there, and some are not: no sender cuts a message in two ways.
    #[error("a segment that overlaps another one")]
    Overlap,
    /// It says something else of its message than the segments before.
    #[error("a segment that contradicts another one")]
    Contradiction,
    /// Its message is in too many pieces.
    #[error("a message in too many pieces")]
    Fragmented,
}

/// A segment that was admitted. Give it back with [`Reassembler::placed`], or drop it, and nothing has happened.
#[derive(Debug)]
#[must_use]
pub struct Ticket {
    source: usize,
    header: Segment,
    payload: u32,
    opens: bool,
}

impl Ticket {
    /// It is the first segment of its message that has come: the buffer has to be found.
    pub fn opens(&self) -> bool {
        self.opens
    }
}

/// A segment that is all of its message, and was admitted. Give it back with [`Reassembler::came`], or drop it, and nothing has happened.
#[derive(Debug)]
#[must_use]
pub struct Whole {
    source: usize,
    msn: u32,
}

/// A message that is over.
#[derive(Debug, PartialEq, Eq)]
pub struct Finished<B> {
    /// The sender.
    pub source: Source,
    /// The header of its segments, with offset 0.
    pub header: Segment,
    /// The bytes that arrived.
    pub valid: Ranges,
    /// The place of its bytes.
    pub buffer: B,
}

impl<B> Finished<B> {
    /// Whether it is complete.
    pub fn is_complete(&self) -> bool {
        self.valid.covers(self.header.len)
    }
}

struct Known {
    source: Source,
    /// The highest message number that has begun; 0 precedes all.
    highest: u32,
    /// Whether the message of a number has ended, for the `WINDOW` numbers up to the highest: bit `n % WINDOW`.
    over: [u64; WINDOW as usize / 64],
    begun: bool,
    heard: bool,
    open: u32,
}

impl Known {
    fn new(source: Source) -> Known {
        Known {
            source,
            highest: 0,
            over: [0; _],
            begun: false,
            heard: true,
            open: 0,
        }
    }

    fn is_over(&self, msn: u32) -> bool {
        let behind = self.highest.wrapping_sub(msn);
        if !self.begun || behind > u32::MAX / 2 {
            return false;
        }
        behind >= WINDOW || self.over[(msn % WINDOW / 64) as usize] >> (msn % 64) & 1 != 0
    }

    fn advance(&mut self, msn: u32) {
        let ahead = msn.wrapping_sub(self.highest);
        if !self.begun {
            self.begun = true;
            self.highest = msn;
            self.over = [0; _];
        } else if ahead != 0 && ahead <= u32::MAX / 2 {
            if ahead >= WINDOW {
                self.over = [0; _];
            } else {
                for n in 1..=ahead {
                    let n = self.highest.wrapping_add(n) % WINDOW;
                    self.over[n as usize / 64] &= !(1 << (n % 64));
                }
            }
            self.highest = msn;
        }
    }

    fn finish(&mut self, msn: u32) {
        self.advance(msn);
        self.over[(msn % WINDOW / 64) as usize] |= 1 << (msn % 64);
    }
}

struct Open<B> {
    header: Segment,
    valid: Ranges,
    heard: Instant,
    buffer: B,
}

/// Puts messages together that come in segments: in any order, doubled, with gaps. `B` says where a message's bytes go, and is the caller's.
pub struct Reassembler<B> {
    config: Config,
    known: Vec<Known>,
    index: HashMap<Source, usize>,
    /// The one that was heard last: mostly the next one, too.
    last: usize,
    /// The next candidate when a source has to be forgotten.
    hand: usize,
    open: HashMap<(usize, u32), Open<B>>,
    /// When the open messages were heard of, at the latest at that time: those that were heard of since are put in again.
    order: VecDeque<(Instant, (usize, u32))>,
}

impl<B> Reassembler<B> {
    /// Nothing has come yet.
    pub fn new(config: Config) -> Reassembler<B> {
        Reassembler {
            config: Config {
                max_open: config.max_open.max(1),
                // One with an open message is not forgotten.
                max_sources: config.max_sources.max(config.max_open + 1),
                ..config
            },
            known: Vec::new(),
            index: HashMap::new(),
            last: 0,
            hand: 0,
            open: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Decides whether the payload of a segment, `payload` bytes, has to be placed. [`weft_wire::dgram::read`] has found the segment to be
    /// within its message.
    ///
    /// # Errors
    /// [`Refusal`]: drop it.
    pub fn admit(
        &mut self,
        source: &Source,
        segment: &Segment,
        payload: usize,
    ) -> Result<Ticket, Refusal> {
        let payload = u32::try_from(payload).map_err(|_| Refusal::Contradiction)?;
        let end = segment.offset.checked_add(payload);
        let end = end.filter(|&end| end <= segment.len && (payload > 0 || segment.len == 0));
        let end = end.ok_or(Refusal::Contradiction)?;
        let known = self.know(source);
        if self.known[known].is_over(segment.msn) {
            return Err(Refusal::Late);
        }
        let open = if self.known[known].open > 0 {
            self.open.get(&(known, segment.msn))
        } else {
            None
        };
        let opens = match open {
            Some(open) => {
                let offset = segment.offset;
                if (Segment {
                    offset,
                    ..open.header
                }) != *segment
                {
                    return Err(Refusal::Contradiction);
                }
                let max = self.config.max_ranges;
                open.valid.place(offset, end, max)?;
                false
            }
            None => true,
        };
        Ok(Ticket {
            source: known,
            header: *segment,
            payload,
            opens,
        })
    }

    /// As [`Reassembler::admit`], for a segment that is its whole message, which needs less work. `None`: call that.
    #[inline]
    pub fn admit_whole(
        &mut self,
        source: &Source,
        segment: &Segment,
        payload: usize,
    ) -> Option<Whole> {
        if segment.offset != 0 || u32::try_from(payload) != Ok(segment.len) {
            return None;
        }
        let at = self.know(source);
        let known = &self.known[at];
        // Of an open message something has come already.
        (known.open == 0 && !known.is_over(segment.msn)).then_some(Whole {
            source: at,
            msn: segment.msn,
        })
    }

    /// It was placed, or is not wanted: its message is over. Nothing else was asked of the machine in between.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "it is for one use")]
    pub fn came(&mut self, whole: Whole) {
        self.known[whole.source].finish(whole.msn);
    }

    /// The place of the message of this segment, if it does not [open](Ticket::opens) one.
    pub fn buffer(&self, ticket: &Ticket) -> Option<&B> {
        let open = self.open.get(&(ticket.source, ticket.header.msn));
        open.map(|open| &open.buffer)
    }

    /// The payload of an admitted segment was placed; nothing else was asked of the machine in between. `buffer`: for one that
    /// [opens](Ticket::opens) its message. Says which messages are over now: this one if it is complete, and one that had to make way for it.
    #[expect(clippy::needless_pass_by_value, reason = "a ticket is for one use")]
    pub fn placed(
        &mut self,
        now: Instant,
        ticket: Ticket,
        buffer: impl FnOnce() -> B,
    ) -> (Option<Finished<B>>, Option<Finished<B>>) {
        let Ticket {
            source,
            header,
            payload,
            ..
        } = ticket;
        let key = (source, header.msn);
        let (start, end) = (header.offset, header.offset + payload);
        if self.known[source].open > 0
            && let Some(open) = self.open.get_mut(&key)
        {
            open.valid.insert(start, end);
            open.heard = now;
            if open.valid.covers(open.header.len) {
                return (self.close(key), None);
            }
            return (None, None);
        }
        let mut valid = Ranges::default();
        valid.insert(start, end);
        let header = Segment {
            offset: 0,
            ..header
        };
        if payload == header.len {
            self.known[source].finish(header.msn);
            let whole = Finished {
                source: self.known[source].source,
                header,
                valid,
                buffer: buffer(),
            };
            return (Some(whole), None);
        }
        let evicted = self.make_room(source);
        self.known[source].advance(header.msn);
        self.known[source].open += 1;
        let open = Open {
            header,
            valid,
            heard: now,
            buffer: buffer(),
        };
        self.open.insert(key, open);
        if self.order.len() > 2 * self.config.max_open + 64 {
            let open = &self.open;
            self.order.retain(|(_, key)| open.contains_key(key));
        }
        self.order.push_back((now, key));
        (None, evicted)
    }

    /// An admitted segment could not be placed, and its message is dropped: later segments of it are late. Returns the received part.
    pub fn abandon(&mut self, ticket: &Ticket) -> Option<Finished<B>> {
        self.known[ticket.source].finish(ticket.header.msn);
        self.close((ticket.source, ticket.header.msn))
    }

    /// Give up the message that was not heard of for the longest among those that suit.
    pub fn evict(&mut self, suits: impl Fn(&B) -> bool) -> Option<Finished<B>> {
        let open = self.open.iter().filter(|(_, open)| suits(&open.buffer));
        let oldest = open.min_by_key(|(_, open)| open.heard);
        let key = *oldest?.0;
        self.close(key)
    }

    /// A message whose time is up at `now`. Call it again until it gives none.
    pub fn expire(&mut self, now: Instant) -> Option<Finished<B>> {
        while let Some(&(at, key)) = self.order.front() {
            if at + self.config.timeout > now {
                return None;
            }
            self.order.pop_front();
            let Some(open) = self.open.get(&key) else {
                continue;
            };
            if open.heard + self.config.timeout <= now {
                return self.close(key);
            }
            let heard = open.heard;
            let later = self.order.iter().rposition(|&(at, _)| at <= heard);
            self.order.insert(later.map_or(0, |i| i + 1), (heard, key));
        }
        None
    }

    /// When to call [`Reassembler::expire`], at the latest. It may be early.
    pub fn next_timeout(&self) -> Option<Instant> {
        if self.open.is_empty() {
            return None;
        }
        let (at, _) = self.order.front()?;
        Some(*at + self.config.timeout)
    }

    /// Messages of which some segments are there and some are not.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Sources that are remembered.
    pub fn sources(&self) -> usize {
        self.known.len()
    }

    /// Give up all open messages.
    pub fn clear(&mut self) -> Vec<Finished<B>> {
        let keys: Vec<_> = self.open.keys().copied().collect();
        keys.into_iter().filter_map(|key| self.close(key)).collect()
    }

    /// For one more open message of a source: says which one had to make way for it.
    fn make_room(&mut self, source: usize) -> Option<Finished<B>> {
        let host = host(self.known[source].source.addr.ip());
        let of_host = |key: &(usize, u32)| self::host(self.known[key.0].source.addr.ip()) == host;
        let crowded = self.open.len() >= self.config.max_open_per_host
            && self.open.keys().filter(|key| of_host(key)).count() >= self.config.max_open_per_host;
        if !crowded {
            return if self.open.len() >= self.config.max_open {
                self.evict(|_| true)
            } else {
                None
            };
        }
        let open = self.open.iter().filter(|(key, _)| of_host(key));
        let oldest = *open.min_by_key(|(_, open)| open.heard)?.0;
        self.close(oldest)
    }

    fn close(&mut self, key: (usize, u32)) -> Option<Finished<B>> {
        let open = self.open.remove(&key)?;
        let known = &mut self.known[key.0];
        known.finish(key.1);
        known.open -= 1;
        Some(Finished {
            source: known.source,
            header: open.header,
            valid: open.valid,
            buffer: open.buffer,
        })
    }

    /// The place of a source, which may be another one's until now.
    fn know(&mut self, source: &Source) -> usize {
        let last = self.known.get(self.last);
        if last.is_some_and(|known| known.source == *source) {
            self.known[self.last].heard = true;
            return self.last;
        }
        if let Some(&known) = self.index.get(source) {
            self.known[known].heard = true;
            self.last = known;
            return known;
        }
        let place = if self.known.len() < self.config.max_sources {
            self.known.push(Known::new(*source));
            self.known.len() - 1
        } else {
            // Second chance: a source that was active since the hand's last pass stays. There are more sources than open messages.
            let place = loop {
                let at = self.hand;
                self.hand = (at + 1) % self.known.len();
                let known = &mut self.known[at];
                if known.open == 0 && !std::mem::take(&mut known.heard) {
                    break at;
                }
            };
            self.index.remove(&self.known[place].source);
            self.known[place] = Known::new(*source);
            place
        };
        self.index.insert(*source, place);
        place
    }
}

/// The address that counts as one host.
pub(super) fn host(ip: IpAddr) -> u64 {
    match ip.to_canonical() {
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => (ip.to_bits() >> 64) as u64 | 1 << 63,
    }
}
