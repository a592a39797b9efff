//! Reading a ring that has marks of sources in it: the source of a mark is fetched from the peer's process, straight into the
//! program's buffer.
//!
//! # Safety
//!
//! The program's buffers are as its call says. The peer's addresses are only numbers for the kernel, which reads in the one process that has
//! met us; each fetch reads the proof of that process too, so a process that has taken its number, or another program in it, is found out.

use libc::{c_int, c_void, iovec};
use std::sync::atomic::Ordering::Relaxed;

use weft_ring::source::{Fetch, SOURCES, Terms};
use weft_run::connection::Carrier;
use weft_run::ledger::Word;
use weft_sys::process::vm_readv;

use crate::chan::Chan;
use crate::conn::Conn;
use crate::iov::{copy_pieces, each_piece};
use crate::lend::{UNDER_WAY, memory};
use crate::{bell, kernel};

/// Result of a look at the ring.
pub(crate) enum Took {
    Bytes(usize),
    /// Nothing yet: the peer is moving the next source.
    Busy,
    /// The program's buffer cannot be written to.
    Fault,
    /// The peer broke the rules of the ring.
    Broken,
    /// The source that the peer has offered cannot be read.
    Lost,
}

/// Pauses for a peer that is moving a source, before a process loses the right to read it.
const PATIENCE: u32 = 400;
/// Such a pause, in nanoseconds.
const PAUSE: i64 = 50_000;
/// Pieces of the program's vector that are read at once.
const PIECES: usize = 64;

/// Says whether we can read the peer's memory, once it has offered a proof.
#[inline]
pub(crate) fn answer(chan: &Chan) {
    if !chan.answered.load(Relaxed) && chan.carrier == Carrier::Here {
        try_answer(chan);
    }
}

#[cold]
fn try_answer(chan: &Chan) {
    let Some((at, value)) = chan.stream.proof(chan.peer()) else {
        return;
    };
    chan.answered.store(true, Relaxed);
    let mut bytes = [0; 8];
    let is_ready = chan.peer_process != 0
        && weft_sys::process::read_memory(chan.peer_process, at, &mut bytes).is_ok()
        && u64::from_ne_bytes(bytes) == value;
    chan.stream.set_terms(chan.peer(), is_ready);
}

fn remote(at: u64, len: usize) -> iovec {
    iovec {
        iov_base: std::ptr::without_provenance_mut(at as usize),
        iov_len: len,
    }
}

/// This process is about to lose the right to read the peer's memory: has the peer lend no more, and reads what it lends now.
pub(crate) fn keep(chan: &Chan) {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    if stream.terms(peer) != Terms::Ready {
        return;
    }
    let _rx = side.rx_lock.lock();
    stream.set_terms(peer, false);
    let mut left = UNDER_WAY;
    let (first, head) = (side.sources.load(Relaxed), side.head.load(Relaxed));
    let mut patience = PATIENCE;
    for number in first..first + SOURCES {
        if !matches!(stream.next_source(peer, number, head), Ok(Some(_))) {
            return;
        }
        let fetch = loop {
            match stream.begin_fetch(peer, number) {
                Ok(Some(fetch)) => break fetch,
                Ok(None) if patience > 0 => {
                    patience -= 1;
                    kernel::nap(PAUSE);
                }
                _ => return,
            }
        };
        let mut bytes = Vec::new();
        // No honest peer lends more.
        let is_bounded = fetch.left <= left && bytes.try_reserve(fetch.left as usize).is_ok();
        let is_read = is_bounded && {
            bytes.resize(fetch.left as usize, 0);
            let to = [iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            }];
            // SAFETY: our buffer.
            unsafe { read(chan, &fetch, &to, 0, bytes.len()) }.is_ok()
        };
        if stream.end_fetch(peer, &fetch, 0).is_err() || !is_read {
            return;
        }
        left -= fetch.left;
        chan.kept.add(number, bytes);
    }
}

enum Bad {
    Local,
    Remote,
}

/// Reads up to `n` bytes of a source into the vector behind its first `skip`.
unsafe fn read(
    chan: &Chan,
    fetch: &Fetch,
    iov: &[iovec],
    skip: usize,
    n: usize,
) -> Result<usize, Bad> {
    let Some((at, value)) = chan.stream.proof(chan.peer()) else {
        return Err(Bad::Remote);
    };
    // No allocation: the source is locked, and the allocator could wait for memory that this peer has to fetch.
    let mut local = [remote(0, 0); PIECES + 1];
    let (mut pieces, mut total) = (0, 0);
    each_piece(iov, skip, n, |to, len, _| {
        if pieces < PIECES {
            local[pieces] = iovec {
                iov_base: to.cast::<c_void>(),
                iov_len: len,
            };
            pieces += 1;
            total += len;
        }
        len
    });
    let mut proof = [0_u8; 8];
    local[pieces] = iovec {
        iov_base: proof.as_mut_ptr().cast(),
        iov_len: proof.len(),
    };
    let local = &local[..=pieces];
    let from = [remote(fetch.address, total), remote(at, proof.len())];
    // SAFETY: the caller's buffers, and ours.
    let got = unsafe { vm_readv(chan.peer_process, local, &from) };
    if got.as_ref().is_ok_and(|&got| got == total + proof.len()) {
        return if u64::from_ne_bytes(proof) == value {
            Ok(total)
        } else {
            Err(Bad::Remote)
        };
    }
    // Which side it was: the byte that did not come is read into memory of ours.
    let came = got.unwrap_or(0).min(total.saturating_sub(1));
    let mut byte = [0_u8; 9];
    let to = [iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: byte.len(),
    }];
    let from = [
        remote(fetch.address + came as u64, 1),
        remote(at, proof.len()),
    ];
    // SAFETY: ours.
    let got = unsafe { vm_readv(chan.peer_process, &to, &from) };
    if got.is_ok_and(|got| got == 9) && byte[1..] == value.to_ne_bytes() {
        return Err(Bad::Local);
    }
    Err(Bad::Remote)
}

/// Copies `n` bytes of the ring into the vector behind its first `skip`. Returns whether the program's memory is there.
///
/// # Safety
/// As `recvmsg(2)`.
#[inline]
unsafe fn copy_out(chan: &Chan, head: u64, iov: &[iovec], skip: usize, n: usize) -> bool {
    let copied = copy_pieces(iov, skip, n, |to, len, done| {
        let position = head.wrapping_add(done as u64);
        // SAFETY: the caller's buffers.
        unsafe { chan.stream.get(chan.peer(), position, to, len) }
    });
    copied == n
}

/// Copies the available bytes, of `ready` ring bytes, into the vector behind its first `got` bytes, up to `want` in all (under the receiver's lock).
///
/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn take(
    conn: &Conn,
    chan: &Chan,
    iov: &[iovec],
    (got, want): (usize, usize),
    ready: usize,
    flags: c_int,
) -> Took {
    let (stream, peer, side) = (&chan.stream, chan.peer(), chan.side());
    let is_peek = flags & libc::MSG_PEEK != 0;
    let is_discard = flags & libc::MSG_TRUNC != 0;
    let (mut head, mut number) = (side.head.load(Relaxed), side.sources.load(Relaxed));
    let end = head.wrapping_add(ready as u64);
    let (mut ring, mut fetched, mut tries) = (0, 0, 0);
    let mut bad = None;
    while head != end && got + ring + fetched < want {
        let (skip, room) = (got + ring + fetched, want - got - ring - fetched);
        let left = end.wrapping_sub(head);
        let ahead = match stream.next_source(peer, number, head) {
            Err(_) => {
                bad = Some(Took::Broken);
                break;
            }
            Ok(ahead) => ahead.map_or(left, |ahead| ahead.min(left)),
        };
        if ahead > 0 {
            let n = room.min(ahead as usize);
            // SAFETY: the caller's buffers.
            let copied = is_discard || unsafe { copy_out(chan, head, iov, skip, n) };
            // As the kernel: of bytes that do not all go into the buffer, none are taken.
            if !copied {
                bad = Some(Took::Fault);
                break;
            }
            head = head.wrapping_add(n as u64);
            ring += n;
            continue;
        }
        let fetch = match stream.begin_fetch(peer, number) {
            Err(_) => {
                bad = Some(Took::Broken);
                break;
            }
            // A call that has to return all available bytes waits for the move, which is one copy.
            Ok(None) if chan.patience().nap(PAUSE) => continue,
            Ok(None) => {
                bad = Some(Took::Busy);
                break;
            }
            Ok(Some(fetch)) => fetch,
        };
        let n = room.min(fetch.left as usize);
        let read = if is_discard {
            Ok(n)
        } else {
            // SAFETY: the caller's buffers.
            unsafe {
                match chan.kept.get(&fetch, iov, skip, n) {
                    Some(0) => Err(Bad::Local),
                    Some(n) => Ok(n),
                    None => read(chan, &fetch, iov, skip, n),
                }
            }
        };
        let n = *read.as_ref().unwrap_or(&0);
        let kept = if is_peek { 0 } else { n as u64 };
        if stream.end_fetch(peer, &fetch, kept).is_err() {
            bad = Some(Took::Broken);
            break;
        }
        match read {
            Ok(_) => {}
            Err(Bad::Local) if tries == 0 => {
                // Memory of ours may be protected, for what we send from it.
                tries = 1;
                memory::settle_all(iov);
                continue;
            }
            Err(Bad::Local) => {
                bad = Some(Took::Fault);
                break;
            }
            Err(Bad::Remote) => {
                bad = Some(Took::Lost);
                break;
            }
        }
        fetched += n;
        if n as u64 == fetch.left {
            if !is_peek && stream.complete_source(peer, number) {
                kernel::wake(stream.completion_word(peer), c_int::MAX);
            }
            head = head.wrapping_add(1);
            number += 1;
        } else if is_peek {
            // The vector is full, or has more pieces than are read at once.
            break;
        }
    }
    if !is_peek && (head != side.head.load(Relaxed) || fetched > 0) {
        side.head.store(head, Relaxed);
        side.sources.store(number, Relaxed);
        let left = end.wrapping_sub(head) as usize;
        if stream.consumed(peer, head) && stream.capacity() - left >= stream.capacity() / 2 {
            bell::make_room(chan);
        }
        conn.row.count(Word::RxRing, ring as u64);
        if fetched > 0 {
            conn.row.count(Word::RxSource, fetched as u64);
        }
    }
    match bad {
        Some(bad) if ring + fetched == 0 => bad,
        _ => Took::Bytes(ring + fetched),
    }
}
