//! [`Stream`] and its sources beside a peer that writes any word of the control page.

use super::{Input, MARGIN};
use crate::source::{Fetch, MAX_SOURCE, SOURCES};
use crate::stream::{FILL, Published, Stream, Wish};
use crate::{Broken, Role};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

const RING: usize = 16 << 10;
const CONTROL: usize = 4096;

/// One direction, with the positions that its two ends keep for themselves.
#[derive(Default)]
struct Direction {
    tail: u64,
    head: u64,
    /// The bytes under way, as long as no word was scribbled on.
    bytes: VecDeque<u8>,
    over_tcp: u64,
    in_tcp: bool,
    offered: u64,
    completed: u64,
    filled: u64,
    is_broken: bool,
}

struct Pair {
    ends: [Stream; 2],
    directions: [Direction; 2],
    is_wild: bool,
}

impl Pair {
    /// One operation of an honest end in the direction of `sender`.
    fn operate(&mut self, sender: Role, op: u8, input: &mut Input<'_>) {
        let [ours, theirs] = &self.ends;
        let (tx, rx) = match sender {
            Role::Initiator => (ours, theirs),
            Role::Responder => (theirs, ours),
        };
        let way = &mut self.directions[sender as usize];
        if way.is_broken {
            return;
        }
        let done = match op % 8 {
            0 | 1 => send(tx, sender, way, input),
            2 | 3 => receive(rx, sender, way, input, self.is_wild),
            6 => lend(tx, rx, sender, way, input),
            other => {
                match other {
                    4 => bell(tx, rx, sender, way, input),
                    5 => over_tcp(tx, rx, sender, way, input),
                    _ => end(tx, rx, sender, input),
                }
                Ok(())
            }
        };
        if done.is_err() {
            assert!(self.is_wild, "an honest peer broke the rules");
            way.is_broken = true;
        }
    }

    fn scribble(&mut self, input: &mut Input<'_>) {
        self.is_wild = true;
        // Beyond the header, which is read once.
        let at = 128 + 8 * (usize::from(input.u16()) % ((CONTROL - 128) / 8));
        let now = self.ends[0].at(at).load(Relaxed);
        let value = match input.u8() % 6 {
            0 => input.u64(),
            1 => now.wrapping_add(u64::from(input.u16())),
            2 => now.wrapping_sub(u64::from(input.u16())),
            3 => now ^ 1 << (input.u8() % 64),
            4 => u64::MAX - u64::from(input.u8()),
            _ => u64::from(input.u8()),
        };
        self.ends[0].at(at).store(value, Relaxed);
    }
}

fn send(tx: &Stream, role: Role, way: &mut Direction, input: &mut Input<'_>) -> Result<(), Broken> {
    let room = tx.room(role, way.tail)?;
    assert!(room <= RING);
    let bytes = vec![input.u8(); usize::from(input.u16()).min(room)];
    tx.put_slice(role, way.tail, &bytes);
    let to = way.tail + bytes.len() as u64;
    if tx.publish(role, way.tail, to)? != Published::Closed {
        way.tail = to;
        way.bytes.extend(bytes);
    }
    Ok(())
}

fn receive(
    rx: &Stream,
    role: Role,
    way: &mut Direction,
    input: &mut Input<'_>,
    is_wild: bool,
) -> Result<(), Broken> {
    let (ready, _) = rx.ready(role, way.head)?;
    assert!(ready <= RING);
    let n = usize::from(input.u16()).min(ready);
    let mut buffer = vec![0xa5; n + 2 * MARGIN];
    rx.get_slice(role, way.head, &mut buffer[MARGIN..MARGIN + n]);
    let beside = buffer[..MARGIN].iter().chain(&buffer[MARGIN + n..]);
    assert!(beside.copied().all(|b| b == 0xa5));
    if !is_wild {
        assert!(
            way.bytes
                .drain(..n)
                .eq(buffer[MARGIN..MARGIN + n].iter().copied())
        );
    }
    way.head += n as u64;
    rx.consumed(role, way.head);
    Ok(())
}

fn bell(tx: &Stream, rx: &Stream, role: Role, way: &mut Direction, input: &mut Input<'_>) {
    let wish = if input.u8() & 1 == 0 {
        Wish::Once
    } else {
        Wish::Each
    };
    match input.u8() % 8 {
        0 => assert!(rx.arm(role, way.head, wish).0 < 8),
        1 => assert!(rx.take_rung(role) < 8),
        2 => _ = rx.disarm(role),
        3 => rx.ask_once(role),
        4 => tx.want_room(role),
        5 => rx.room_made(role),
        6 => {
            tx.begin_fill(role);
            tx.end_fill(role, FILL as u64);
        }
        _ => {
            let (new, seen, is_filling) = rx.filled(role, way.filled);
            assert!(new < 1 << 48 && seen < 1 << 48);
            // What the word has no room for shows as a fill that does not end.
            way.filled = seen;
            let _ = is_filling;
        }
    }
}

fn over_tcp(tx: &Stream, rx: &Stream, role: Role, way: &mut Direction, input: &mut Input<'_>) {
    match input.u8() % 8 {
        0 => tx.join(role, 0),
        1 if !way.in_tcp => way.in_tcp = tx.begin_tcp(role),
        2 if way.in_tcp => {
            let n = u64::from(input.u16());
            tx.end_tcp(role, n);
            way.over_tcp += n;
            way.in_tcp = false;
        }
        3 => _ = rx.switch(role, u64::from(input.u16())),
        4 => rx.consent(role, u64::from(input.u16())),
        5 => rx.add_seen(role, u64::from(input.u16())),
        6 => _ = tx.switch_over(role),
        _ => {
            let _ = (
                tx.sent_over_tcp(role),
                rx.seen(role),
                rx.may_switch(role, 0),
            );
        }
    }
}

fn end(tx: &Stream, rx: &Stream, role: Role, input: &mut Input<'_>) {
    match input.u8() % 16 {
        0 => rx.close(role),
        1 => rx.hold(role),
        2 => rx.release(role),
        3 => _ = tx.close_unused(role),
        4 => tx.leave(role),
        5 => tx.shut(role),
        _ => _ = (rx.has_left(role), rx.has_finished(role), tx.is_held(role)),
    }
}

fn lend(
    tx: &Stream,
    rx: &Stream,
    role: Role,
    way: &mut Direction,
    input: &mut Input<'_>,
) -> Result<(), Broken> {
    match input.u8() % 4 {
        0 if way.offered - way.completed < SOURCES => {
            let (address, len) = (input.u64() >> 1, 1 + u64::from(input.u16()));
            tx.offer_source(role, way.offered, way.tail, address, len);
            way.offered += 1;
        }
        1 => {
            let number = way.completed + u64::from(input.u8() % 16);
            if number < way.offered
                && matches!(tx.move_source(role, number), crate::source::Move::Mine(_))
            {
                tx.source_moved(role, number, 4096, tx.source_progress(role, number));
            }
        }
        _ => {
            if rx.next_source(role, way.completed, way.head)?.is_none() {
                return Ok(());
            }
            assert!(rx.source_left(role, way.completed) <= MAX_SOURCE);
            let Some(fetch) = rx.begin_fetch(role, way.completed)? else {
                return Ok(());
            };
            let Fetch { address, left, .. } = fetch;
            assert!(left > 0 && left <= MAX_SOURCE && address.checked_add(left).is_some());
            let n = left.min(u64::from(input.u16()));
            rx.end_fetch(role, &fetch, n)?;
            if n == left {
                rx.complete_source(role, way.completed);
                way.completed += 1;
            }
        }
    }
    Ok(())
}

/// Two honest ends of a stream, and a scribbler that writes any control word between their operations: no end panics, accesses memory outside of its buffers
/// or of the ring, or fetches outside of the bounds of a source; and where nothing was scribbled, the bytes are those that were sent.
pub fn stream_scribble(data: &[u8]) {
    let mut input = Input(data);
    let (mine, fd) = Stream::create(RING as u32).expect("a segment");
    let theirs = Stream::open(fd).expect("a good segment");
    let mut pair = Pair {
        ends: [mine, theirs],
        directions: Default::default(),
        is_wild: false,
    };
    while !input.0.is_empty() {
        let op = input.u8();
        if op & 0x70 == 0x70 {
            pair.scribble(&mut input);
        } else {
            let sender = [Role::Initiator, Role::Responder][usize::from(op >> 7)];
            pair.operate(sender, op, &mut input);
        }
    }
}
