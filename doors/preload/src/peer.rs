//! The channel with a peer on this host.

use libc::c_int;
use std::os::fd::OwnedFd;

use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::meet::Why;
use weft_run::peers::{Guest, User};
use weft_sys::process;

use crate::bell::channel;
use crate::chan::Chan;

/// Bytes that a direction's ring holds.
const RING_BYTES: u32 = 256 << 10;

/// A new segment. One for another user has all of its memory, so that neither side can have it charged to the other later.
pub(crate) fn new_stream(user: User) -> Result<(Stream, OwnedFd), Why> {
    let create = match user {
        // A peer that the kernel does not show is not counted: it gets memory as it uses the ring.
        User::Own | User::Unseen => Stream::create,
        User::Other(_) => Stream::create_filled,
    };
    create(RING_BYTES).map_err(|_| Why::System)
}

/// A peer's segment.
pub(crate) fn open_stream(segment: &OwnedFd, user: User) -> Result<Stream, Why> {
    // A process of our number, in another user namespace, may see us as its own user. Then it has not filled the segment.
    let may_have_holes = user == User::Other(process::uid());
    let open = match user {
        User::Other(_) if !may_have_holes => Stream::open_filled,
        _ => Stream::open,
    };
    let stream = open(segment).map_err(|_| Why::Broken)?;
    if stream.capacity() != RING_BYTES as usize {
        return Err(Why::Broken);
    }
    if may_have_holes {
        stream.fill(segment).map_err(|_| Why::System)?;
    }
    Ok(stream)
}

/// The channel with a peer. `process`: of one of our user, in our network namespace. Of others nothing is looked at but the ring and the bell.
pub(crate) fn made(
    (mut stream, role, bell): (Stream, Role, OwnedFd),
    fd: c_int,
    process: Option<u32>,
    guest: Option<Guest>,
) -> Result<Option<Chan>, Why> {
    if process.is_none() {
        stream.refuse_sources();
    }
    let mut chan = channel(stream, role, bell, fd)?;
    chan.peer_process = process.unwrap_or(0);
    chan.guest = guest;
    Ok(Some(chan))
}
