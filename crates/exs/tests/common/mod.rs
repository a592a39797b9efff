//! What the tests of trouble and of corners have in common.

use std::time::Duration;

use weft_exs::{Context, Event, Kind, Options, Queue, Socket};
use weft_verbs::{Device, LocalMode};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

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

/// The next so many events.
pub(crate) fn events(queue: &Queue, n: usize) -> Vec<Event> {
    let mut out = Vec::new();
    queue.dequeue(&mut out, n, n, Some(PATIENCE)).unwrap();
    assert_eq!(out.len(), n, "{n} events");
    out
}
