//! Blocking calls.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::{Socket, refused};
use crate::bell::deadline;
use crate::driver::{Conn, Slot, Target};
use crate::event::{Event, EventKind};
use crate::plain::Plain;
use crate::queue::Member;
use crate::{Kind, Memory, Ready, RecvFlags};

impl Socket {
    /// Connect, and wait for the result.
    ///
    /// # Errors
    /// As `connect(2)`: `ECONNREFUSED`, `ETIMEDOUT`, `EHOSTUNREACH`, …; `EPROTO` when the peer is no EXS socket, `EPROTOTYPE` when it is one of
    /// another type; `EINTR` when a signal handler ran: the connect continues.
    pub fn connect_wait(&self, addr: SocketAddr) -> Result<(), Errno> {
        let slot = Arc::new(Slot::default());
        self.connect_to(addr, Target::Slot(Arc::clone(&slot)), 0)?;
        slot.sleep(None)?;
        slot.take()
            .map_or(Err(Errno::IO), |event| event.result.map(drop))
    }

    /// Accept the next connection, and wait for it.
    ///
    /// # Errors
    /// `EAGAIN` when the time is up; `EINTR` when a signal handler ran; `EINVAL` when the socket does not listen, `EBADF` when it is closed, also meanwhile.
    pub fn accept_wait(&self, timeout: Option<Duration>) -> Result<Socket, Errno> {
        let listener = self.listener()?;
        let slot = Arc::new(Slot::default());
        let token = Arc::as_ptr(&slot).addr() as u64;
        listener.accept(Target::Slot(Arc::clone(&slot)), token);
        let waited = slot.sleep(deadline(timeout));
        if waited.is_err() && !listener.withdraw(&slot) {
            // A connection is being handed to this call right now.
            while slot.sleep(None).is_err() {}
        }
        match slot.take() {
            Some(Event {
                accepted: Some(socket),
                ..
            }) => Ok(socket),
            Some(event) => Err(event.result.err().unwrap_or(Errno::IO)),
            None => Err(waited.err().unwrap_or(Errno::IO)),
        }
    }

    /// Send, and wait until the memory belongs to the program again.
    ///
    /// # Errors
    /// As [`Socket::send`]; `EAGAIN` or `EINTR` when the time limit for sends expired or a signal handler ran before anything was sent.
    pub fn send_wait(&self, memory: Memory) -> Result<usize, Errno> {
        let plain = self.plain()?;
        if plain.is_none()
            && let Some(sent) = self.conn()?.send_and_done(&memory)
        {
            return sent.map(|()| memory.len());
        }
        let slot = Arc::new(Slot::default());
        let target = Target::Slot(Arc::clone(&slot));
        if let Some(plain) = plain {
            let token = Arc::as_ptr(&slot).addr() as u64;
            let limit = self.limits().0;
            plain.send(self.plain_op(
                EventKind::Send,
                memory,
                RecvFlags::empty(),
                limit,
                (target, token),
            ));
            return plain_result(plain, &slot, token);
        }
        let conn = self.conn()?;
        let id = conn.send(memory, target, 0, None).map_err(refused)?;
        finish_wait(conn, &slot, id, self.limits().0).map(|end| end.0)
    }

    /// Receive, and wait for the data. 0 means the end of the stream. The memory must be a region's or [`Memory::Raw`], or a list of these.
    ///
    /// # Errors
    /// As [`Socket::recv`]; `EAGAIN` or `EINTR` when the time limit for receives expired or a signal handler ran before any data came;
    /// `EINVAL` for owned memory, which could not be returned.
    pub fn recv_wait(&self, memory: &Memory, flags: RecvFlags) -> Result<usize, Errno> {
        if memory.owns() {
            return Err(Errno::INVAL);
        }
        let slot = Arc::new(Slot::default());
        let flags = flags - RecvFlags::IN_PLACE;
        if let Some(plain) = self.plain()? {
            let target = Target::Slot(Arc::clone(&slot));
            let token = Arc::as_ptr(&slot).addr() as u64;
            if flags.contains(RecvFlags::DONTWAIT) {
                self.plain_recv_now(plain, EventKind::Recv, memory.clone(), (target, token))?;
                return plain_result(plain, &slot, token);
            }
            let limit = self.limits().1;
            plain.recv(self.plain_op(
                EventKind::Recv,
                memory.clone(),
                flags,
                limit,
                (target, token),
            ));
            return plain_result(plain, &slot, token);
        }
        let limit = self.limits().1;
        self.recv_on_conn(memory, flags, &slot, limit)
            .map(|end| end.0)
    }

    /// A blocking receive over verbs: the bytes, and true if the message was longer.
    fn recv_on_conn(
        &self,
        memory: &Memory,
        flags: RecvFlags,
        slot: &Arc<Slot>,
        limit: Option<Duration>,
    ) -> Result<(usize, bool), Errno> {
        let conn = self.conn()?;
        conn.settle();
        let target = Target::Slot(Arc::clone(slot));
        let started = conn.recv(memory.clone(), flags, target, 0, None);
        finish_wait(conn, slot, started.map_err(refused)?, limit)
    }

    /// Like [`Socket::recv_wait`], for a message: returns also whether it was longer than the memory.
    ///
    /// # Errors
    /// As [`Socket::recv_wait`]; `EOPNOTSUPP` on a stream socket.
    pub fn recv_message_wait(
        &self,
        memory: &Memory,
        flags: RecvFlags,
    ) -> Result<(usize, bool), Errno> {
        if self.0.kind == Kind::Stream {
            return Err(Errno::OPNOTSUPP);
        }
        if memory.owns() {
            return Err(Errno::INVAL);
        }
        let limit = if flags.contains(RecvFlags::DONTWAIT) {
            Some(Duration::ZERO)
        } else {
            self.limits().1
        };
        let flags = flags - RecvFlags::IN_PLACE;
        self.recv_on_conn(memory, flags, &Arc::default(), limit)
    }

    /// Wait until the socket is ready for one of the conditions `wanted`, or has failed. Empty when the time is up.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`; `EINTR` when a signal handler ran first; `ECANCELED` when the socket is closed meanwhile; the error of a listener whose device
    /// is gone.
    pub fn poll_wait(&self, wanted: Ready, timeout: Option<Duration>) -> Result<Ready, Errno> {
        let slot = Arc::new(Slot::default());
        let target = Target::Slot(Arc::clone(&slot));
        let deadline = deadline(timeout);
        let waited;
        if let Ok(listener) = self.listener() {
            listener.poll(wanted, target, 0);
            waited = slot.sleep(deadline);
            if waited.is_err() {
                listener.withdraw(&slot);
            }
        } else if let Some(plain) = self.plain()? {
            let later = Arc::clone(&slot);
            let token = Arc::as_ptr(&slot).addr() as u64;
            let done = move |ready: Result<Ready, Errno>| {
                let mut event = Event::new(EventKind::Poll, 0, -1, ready.map(|_| 0));
                event.ready = ready.unwrap_or_default();
                later.fill(event);
            };
            plain.poll(wanted, token, Box::new(done));
            waited = slot.sleep(deadline);
            if waited.is_err() {
                plain.cancel(Some(token));
            }
        } else {
            let conn = self.conn()?;
            conn.poll(wanted, target, 0);
            waited = conn.wait_for(&slot, deadline);
            if waited.is_err() {
                conn.withdraw(&slot);
            }
        }
        match (slot.take(), waited) {
            (Some(event), Ok(())) => event.result.map(|_| event.ready),
            (Some(event), Err(_)) if !event.ready.is_empty() => Ok(event.ready),
            (_, Err(Errno::INTR)) => Err(Errno::INTR),
            _ => Ok(Ready::empty()),
        }
    }
}

/// The result of a blocking call on an ordinary connection.
fn plain_result(plain: &Plain, slot: &Slot, token: u64) -> Result<usize, Errno> {
    let waited = slot.sleep(None);
    if waited.is_err() {
        plain.cancel(Some(token));
        while slot.sleep(None).is_err() {}
    }
    let event = slot.take().ok_or(Errno::IO)?;
    match event.result {
        Err(Errno::TIMEDOUT | Errno::CANCELED) if event.bytes > 0 => Ok(event.bytes),
        Err(Errno::TIMEDOUT) => Err(Errno::AGAIN),
        Err(Errno::CANCELED) => Err(waited.err().unwrap_or(Errno::CANCELED)),
        result => result,
    }
}

/// The result of a blocking call: the bytes, and true if the message was longer.
fn finish_wait(
    conn: &Conn,
    slot: &Arc<Slot>,
    id: crate::machine::OpId,
    limit: Option<Duration>,
) -> Result<(usize, bool), Errno> {
    let waited = conn.wait_for(slot, deadline(limit));
    if let Err(why) = waited {
        // The memory does not belong to the program until the operation has ended.
        conn.give_up(slot, id, why);
    }
    let event = slot.take().ok_or(Errno::IO)?;
    let bytes = match event.result {
        Err(Errno::CANCELED | Errno::TIMEDOUT) if event.bytes > 0 => Ok(event.bytes),
        Err(errno @ (Errno::CANCELED | Errno::TIMEDOUT)) => Err(waited.err().unwrap_or(errno)),
        result => result,
    };
    Ok((bytes?, event.truncated))
}
