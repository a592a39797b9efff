//! Helpers shared by the test programs.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

#[path = "../../../../tests/conformance/src/waits.rs"]
mod waits;

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use weft_exs::{Context, Event, FilePiece, Kind, Options, Piece, Queue, Socket};
use weft_verbs::{Device, LocalMode};

pub(crate) use waits::{PATIENCE, alone, aside, asleep, until};

pub(crate) fn context(local: LocalMode) -> Context {
    Context::new(Device::builder().local(local).open().unwrap()).unwrap()
}

pub(crate) fn listener(context: &Context, kind: Kind, set: impl FnMut(&mut Options)) -> Socket {
    let listener = Socket::new(context, false, kind).unwrap();
    listener.set_options(set).unwrap();
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    listener.listen(32).unwrap();
    listener
}

pub(crate) fn pair_of(
    local: LocalMode,
    kind: Kind,
    near: impl FnMut(&mut Options),
    far: impl FnMut(&mut Options),
) -> (Context, Socket, Socket) {
    let context = context(local);
    let listener = listener(&context, kind, far);
    let a = Socket::new(&context, false, kind).unwrap();
    a.set_options(near).unwrap();
    a.connect_wait(listener.local_addr().unwrap()).unwrap();
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    (context, a, b)
}

pub(crate) fn pair(local: LocalMode) -> (Context, Socket, Socket) {
    pair_of(local, Kind::Stream, |_| (), |_| ())
}

/// The next `n` events.
pub(crate) fn events(queue: &Queue, n: usize) -> Vec<Event> {
    let mut out = Vec::new();
    queue.dequeue(&mut out, n, n, Some(PATIENCE)).unwrap();
    assert_eq!(out.len(), n, "{n} events");
    out
}

pub(crate) fn next_event(queue: &Queue) -> Event {
    events(queue, 1).remove(0)
}

/// Sets the time limit of later sends, in milliseconds.
pub(crate) fn send_limit(socket: &Socket, millis: u64) {
    let limit = Some(Duration::from_millis(millis));
    socket.set_options(|o| o.send_timeout = limit).unwrap();
}

/// Sets the time limit of later receives, in milliseconds.
pub(crate) fn recv_limit(socket: &Socket, millis: u64) {
    let limit = Some(Duration::from_millis(millis));
    socket.set_options(|o| o.recv_timeout = limit).unwrap();
}

/// A file that disappears with its last descriptor.
pub(crate) fn file_of(bytes: &[u8]) -> Arc<OwnedFd> {
    static N: AtomicUsize = AtomicUsize::new(0);
    let n = N.fetch_add(1, Ordering::SeqCst);
    let path = std::env::temp_dir().join(format!("weft-exs-{}-{n}", std::process::id()));
    let mut open = File::options();
    open.create_new(true).read(true).write(true);
    let mut file = open.open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.write_all(bytes).unwrap();
    Arc::new(file.into())
}

pub(crate) fn whole(file: &Arc<OwnedFd>) -> Vec<Piece> {
    vec![Piece::File(FilePiece {
        file: Arc::clone(file),
        offset: 0,
        len: None,
    })]
}
