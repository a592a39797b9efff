//! Receiving: bytes are copied from the receive buffer to the program's memory.

use rustix::io::Errno;
use weft_sockets::lock::{lock, try_lock};
use weft_sockets::memory::{Sink, room, scatter};
use weft_sockets::stream::Stream as _;
use weft_sockets::wait::Wait;
use weft_verbs::ext::CqExt;

use super::{Conn, Core};
use crate::RecvFlags;

/// Bytes to copy before the peer may be granted room again.
const STEP: usize = 64 << 10;

/// The next bytes to receive.
enum Found {
    /// Offset in the buffer, bytes.
    Run(usize, usize),
    /// No more will come.
    End,
}

impl Conn {
    /// Receive: what there is, at least one byte; 0 at the end of the stream. Whether it waits is not for the flags to say.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `ECONNRESET` and what else ended the connection.
    pub(crate) fn recv(
        &self,
        to: &mut [Sink<'_>],
        flags: RecvFlags,
        wait: Wait,
    ) -> Result<usize, Errno> {
        let want = room(to);
        if want == 0 {
            return Ok(0);
        }
        let peek = flags.contains(RecvFlags::PEEK);
        let _turn = if wait.waits() {
            lock(&self.receiver)
        } else {
            try_lock(&self.receiver).ok_or(Errno::AGAIN)?
        };
        let mut done = 0;
        while done < want {
            let skip = if peek { done } else { 0 };
            let mut found = self.with(|core| find(core, skip));
            let more = done == 0 || flags.contains(RecvFlags::WAITALL);
            if found.is_none() && more && wait.waits() {
                let waited = self.wait_until(wait.deadline(), |core| find(core, skip));
                found = Some(waited.flatten());
            } else if found.is_none() && more {
                found = self.with(|core| {
                    self.drive(core);
                    find(core, skip)
                });
                if found.is_none() {
                    self.cq.make_way();
                }
            }
            match found {
                None if done == 0 => return Err(Errno::AGAIN),
                Some(Err(errno)) if done == 0 => return Err(errno),
                None | Some(Err(_) | Ok(Found::End)) => break,
                Some(Ok(Found::Run(at, len))) => {
                    let n = len.min(want - done).min(STEP);
                    // No other thread reads, and the peer may write there only after a grant.
                    scatter(&self.buffer, at, n, to, done).map_err(|_| Errno::FAULT)?;
                    done += n;
                    if !peek {
                        self.with(|core| {
                            if let Some(machine) = &mut core.machine {
                                machine.consumed(n);
                            }
                            self.grant(core);
                        });
                    }
                }
            }
        }
        Ok(done)
    }
}

/// The bytes to receive after the next `skip`; `None` while more may come.
fn find(core: &mut Core, skip: usize) -> Option<Result<Found, Errno>> {
    let Some(machine) = &core.machine else {
        return Some(Err(core.state.over.unwrap_or(Errno::NOTCONN)));
    };
    if core.state.read_shut {
        return Some(Ok(Found::End));
    }
    let (at, len) = machine.next_run(skip);
    if len > 0 {
        return Some(Ok(Found::Run(at, len)));
    }
    if machine.peer_is_done() {
        return Some(Ok(Found::End));
    }
    core.state.over.map(Err)
}
