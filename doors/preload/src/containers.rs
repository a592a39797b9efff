//! Connections whose peer is in another network namespace of this host: both ends meet through the folder in `WEFT_LOCAL_DIR`.
//!
//! Each look is one step of the meeting of [`weft_run::folder`]; the channel is then as with a peer of this namespace, but no memory is lent.

use libc::c_int;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Once, OnceLock};

use weft_ring::Role;
use weft_run::folder::{self, Acceptor, View};
use weft_run::meet::{Ends, Why};
use weft_run::peers::User;
use weft_sys::settings::LOCAL_DIR;

use crate::bell;
use crate::chan::Chan;
use crate::conn::{self, Big, Conn, Slow};
use crate::hidden::{self, Own};
use crate::kernel::{self, borrowed};
use crate::meeting::{Meeting, SocketFile};
use crate::peer::{made, new_stream, open_stream};

/// The folder; `None`: such connections stay on TCP.
pub(crate) fn folder() -> Option<&'static PathBuf> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(|| LOCAL_DIR.path()).as_ref()
}

/// The process ends: its sockets leave the folder.
pub(crate) fn end() {
    if folder().is_some() && !conn::holds_big() {
        let big = conn::big();
        conn::each(|_, conn| {
            let meeting = conn.slow(&big).meeting.take();
            match meeting {
                Some(meeting) if conn.holders(&conn.enter()) > 1 => meeting.leave(),
                meeting => drop(meeting),
            }
        });
    }
}

/// Takes the next step, under the lock. Returns the channel when that was the last one.
pub(crate) fn look(conn: &Conn, fd: c_int, ends: Ends, big: &Big) -> Result<Option<Chan>, Why> {
    // As `meet::peer` has it.
    if !kernel::is_established(fd) {
        return Ok(None);
    }
    let slow = conn.slow(big);
    let (sent, received) = slow.beginnings.as_deref().cloned().unwrap_or_default();
    let dialled = conn.dialled.load(Relaxed);
    let view = View {
        ends,
        dialled,
        sent: &sent,
        received: &received,
    };
    let path = folder().and_then(|folder| folder::name(folder, &view));
    let Some(path) = path else {
        return Ok(None);
    };
    if dialled {
        dial(fd, &path, &view, slow)
    } else {
        accept(fd, path, &view, slow)
    }
}

fn dial(fd: c_int, path: &Path, view: &View<'_>, slow: &mut Slow) -> Result<Option<Chan>, Why> {
    let Some(Meeting::Dialler(wire, dialled)) = &slow.meeting else {
        if let Some((wire, dialled)) = folder::dial(path, view)? {
            let wire = Own::new(wire).ok_or(Why::Descriptors)?;
            slow.meeting = Some(Meeting::Dialler(wire, dialled));
        }
        return Ok(None);
    };
    let found = match folder::answered(wire, dialled, view) {
        Ok(None) => return Ok(None),
        Ok(Some(found)) => found,
        // Another connection had the name, or the acceptor has too many diallers: the next look dials again.
        Err(_) => {
            slow.meeting = None;
            return Ok(None);
        }
    };
    if found.may_be_another {
        return Err(Why::NotConfirmed);
    }
    let (stream, segment) = new_stream(User::Own)?;
    let (ours, theirs) = bell::pair().ok_or(Why::System)?;
    found.link.offer(wire, segment.as_fd(), theirs.as_fd())?;
    made((stream, Role::Initiator, ours), fd, None, None)
}

fn accept(fd: c_int, path: PathBuf, view: &View<'_>, slow: &mut Slow) -> Result<Option<Chan>, Why> {
    let (Some(listener), Some(Meeting::Acceptor(_, acceptor))) = (slow.listener, &mut slow.meeting)
    else {
        static SWEEP: Once = Once::new();
        SWEEP.call_once(|| path.parent().into_iter().for_each(folder::sweep));
        let listener = folder::listen(&path)?;
        let file = SocketFile(Some(path));
        slow.listener = Some(hidden::hide(listener).ok_or(Why::Descriptors)?);
        slow.meeting = Some(Meeting::Acceptor(file, Acceptor::default()));
        return Ok(None);
    };
    let Some(offer) = acceptor.look(borrowed(listener), view)? else {
        return Ok(None);
    };
    let stream = open_stream(&offer.segment, User::Own)?;
    made((stream, Role::Responder, offer.bell), fd, None, None)
}
