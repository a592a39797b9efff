//! Futures over sockets, for any executor.
//!
//! The library owns the memory of an operation and returns it on completion, so a future may be dropped at any time: **the operation
//! continues without it**, and the library drops its memory afterwards. A dropped receive still takes its bytes from the
//! stream. In a `select!`, keep the future and poll it again, or use [`Transfer::cancel`]. For bytewise reading with
//! `tokio` there are streams with internal buffers (feature `tokio`).
//!
//! Operations start at the call, not at the first poll of the future. Several may be outstanding in each direction; they complete in
//! the order of the calls.
//!
//! ```
//! use weft_exs::{Context, Errno, futures::Stream};
//!
//! async fn shout(context: &Context, addr: std::net::SocketAddr) -> Result<Vec<u8>, Errno> {
//!     let stream = Stream::connect(context, addr).await?;
//!     // The receive is posted first, so that the answer goes straight into its memory.
//!     let answer = stream.recv_exact(vec![0; 5]);
//!     stream.send(b"hello".to_vec()).await.0?;
//!     let (n, memory) = answer.await;
//!     assert_eq!(n?, 5);
//!     stream.close().await?;
//!     Ok(memory.into_vec())
//! }
//! ```

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context as Task, Poll, Waker};

use rustix::io::Errno;
use weft_sockets::lock::lock;

use crate::socket::Inner;
use crate::{Context, Event, Kind, Memory, Piece, RecvFlags, Sink, Socket};

/// Holds the result of one operation for its future.
enum Slot {
    Waiting(Option<Waker>),
    Ended(Box<Event>),
    Taken,
}

/// One operation. Ready with its event, or with the error that refused it.
struct Operation {
    slot: Arc<Mutex<Slot>>,
    refused: Option<Errno>,
}

impl Operation {
    fn start(begin: impl FnOnce(Sink) -> Result<(), Errno>) -> Operation {
        let slot = Arc::new(Mutex::new(Slot::Waiting(None)));
        let told = Arc::clone(&slot);
        let number = number(&slot);
        let call = move |event| {
            let mut slot = lock(&told);
            let before = std::mem::replace(&mut *slot, Slot::Ended(Box::new(event)));
            drop(slot);
            if let Slot::Waiting(Some(waker)) = before {
                waker.wake();
            }
        };
        Operation {
            refused: begin(Sink::Call(Box::new(call), number)).err(),
            slot,
        }
    }
}

/// The number of an operation, unique while its slot lives.
fn number(slot: &Arc<Mutex<Slot>>) -> u64 {
    Arc::as_ptr(slot).addr() as u64
}

impl Future for Operation {
    type Output = Result<Event, Errno>;

    fn poll(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        if let Some(why) = self.refused {
            return Poll::Ready(Err(why));
        }
        // The clone and drop of a waker run the program's code, so not under the lock.
        let waker = cx.waker().clone();
        let mut slot = lock(&self.slot);
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Ended(event) => {
                drop(slot);
                Poll::Ready(Ok(*event))
            }
            Slot::Waiting(before) => {
                *slot = Slot::Waiting(Some(waker));
                drop(slot);
                drop(before);
                Poll::Pending
            }
            Slot::Taken => panic!("a future is polled after its end"),
        }
    }
}

/// The memory to return for a refused operation: registered and promised memory are handles and are returned, owned bytes
/// are lost.
fn handles(memory: &Memory) -> Memory {
    match memory {
        Memory::Owned(_) => Memory::Owned(Vec::new()),
        Memory::List(list) => Memory::List(list.iter().map(handles).collect()),
        handle => handle.clone(),
    }
}

/// A send or receive under way. It yields the bytes moved, or the error, and the memory. After an error the memory may hold some bytes.
/// An operation that was refused at once (`ENOTCONN`, `EBADF`...) has lost the bytes that it owned.
#[must_use = "its end says whether bytes were moved"]
pub struct Transfer {
    operation: Operation,
    left: Option<Memory>,
    /// Weak: the operation does not keep the connection open.
    socket: Weak<Inner>,
}

impl Transfer {
    fn start(
        socket: &Socket,
        memory: Memory,
        begin: impl FnOnce(Memory, Sink) -> Result<(), Errno>,
    ) -> Transfer {
        let left = Some(handles(&memory));
        Transfer {
            operation: Operation::start(|sink| begin(memory, sink)),
            left,
            socket: Arc::downgrade(&socket.0),
        }
    }

    /// Cancel this operation alone, unless it is complete or about to be. It is ready soon, with `ECANCELED` and its memory.
    pub fn cancel(&self) {
        // Held until the number has been used, so that no other operation gets it.
        let slot = &self.operation.slot;
        if let Some(socket) = self.socket.upgrade()
            && matches!(*lock(slot), Slot::Waiting(_))
        {
            Socket(socket).cancel(Some(number(slot)));
        }
    }

    fn poll_event(&mut self, cx: &mut Task<'_>) -> Poll<Received> {
        Pin::new(&mut self.operation).poll(cx).map(|end| {
            let mut left = || self.left.take().unwrap_or(Memory::Owned(Vec::new()));
            match end {
                Ok(event) => Received {
                    result: event.result,
                    truncated: event.truncated,
                    memory: event.memory.unwrap_or_else(&mut left),
                },
                Err(why) => Received {
                    result: Err(why),
                    truncated: false,
                    memory: left(),
                },
            }
        })
    }
}

impl Future for Transfer {
    type Output = (Result<usize, Errno>, Memory);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        self.poll_event(cx).map(|end| (end.result, end.memory))
    }
}

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// Bytes of the message; 0 also at the end of the connection.
    pub result: Result<usize, Errno>,
    /// The receive's memory.
    pub memory: Memory,
    /// The message was longer than the memory: the rest is lost.
    pub truncated: bool,
}

/// A receive of a message, under way.
#[must_use = "it has the message"]
pub struct Message(Transfer);

impl Message {
    /// As [`Transfer::cancel`].
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

impl Future for Message {
    type Output = Received;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        self.0.poll_event(cx)
    }
}

/// A connect, shutdown, close or file send under way. A file send yields its number of bytes.
#[must_use = "its end says whether it was done"]
pub struct End<T = ()> {
    operation: Operation,
    of: fn(usize) -> T,
}

impl End {
    fn start(begin: impl FnOnce(Sink) -> Result<(), Errno>) -> End {
        End {
            operation: Operation::start(begin),
            of: |_| (),
        }
    }
}

impl<T> Future for End<T> {
    type Output = Result<T, Errno>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<Self::Output> {
        let of = self.of;
        Pin::new(&mut self.operation)
            .poll(cx)
            .map(|end| end.and_then(|event| event.result).map(of))
    }
}

mod sealed {
    pub trait Sealed {
        fn from_socket(socket: super::Socket) -> Self;
        const KIND: super::Kind;
    }
}

/// The types of connections: [`Stream`] and [`Packets`].
pub trait Connection: sealed::Sealed {}

macro_rules! connection {
    ($name:ident, $kind:expr) => {
        impl sealed::Sealed for $name {
            fn from_socket(socket: Socket) -> Self {
                $name { socket }
            }
            const KIND: Kind = $kind;
        }

        impl Connection for $name {}

        impl $name {
            /// Connects with the default options.
            ///
            /// # Errors
            /// As [`Self::connect_with`].
            pub async fn connect(context: &Context, addr: SocketAddr) -> Result<Self, Errno> {
                Self::connect_with(Socket::new(context, addr.is_ipv6(), $kind)?, addr).await
            }

            /// Connects this socket, with its options and its address, if bound. Dropping the future drops the
            /// connection.
            ///
            /// # Errors
            /// As `connect(2)`; `EPROTOTYPE` for a socket of another kind.
            pub async fn connect_with(socket: Socket, addr: SocketAddr) -> Result<Self, Errno> {
                if socket.kind() != $kind {
                    return Err(Errno::PROTOTYPE);
                }
                End::start(|sink| socket.connect(addr, sink)).await?;
                Ok(Self { socket })
            }

            /// Listens at this address with the default options.
            ///
            /// # Errors
            /// As `bind(2)` and `listen(2)`.
            pub fn listen(context: &Context, addr: SocketAddr) -> Result<Listener<Self>, Errno> {
                let socket = Socket::new(context, addr.is_ipv6(), $kind)?;
                socket.bind(addr)?;
                Listener::new(socket, 128)
            }

            /// The socket, for its addresses, options and statistics.
            pub fn socket(&self) -> &Socket {
                &self.socket
            }

            /// Cancels all outstanding operations: those that are not complete end with `ECANCELED` and keep the bytes that they
            /// received.
            pub fn cancel(&self) {
                self.socket().cancel(None);
            }

            /// Closes the sending direction after all queued data has been sent.
            pub fn shutdown(&self) -> End {
                End::start(|sink| self.socket().shutdown_with(sink))
            }

            /// Closes the connection after all queued data has been sent. (Dropping it does the same, without
            /// reporting completion.)
            pub fn close(self) -> End {
                End::start(|sink| self.socket().close(sink))
            }
        }
    };
}

/// A connected stream.
pub struct Stream {
    socket: Socket,
}

connection!(Stream, Kind::Stream);

impl Stream {
    /// Wraps a connected socket; also one over ordinary TCP ([`Socket::from_tcp`]), whose peer is a plain program.
    pub fn new(socket: Socket) -> Stream {
        Stream { socket }
    }

    /// Sends all of the memory. Ready when the memory belongs to the program again.
    pub fn send(&self, memory: impl Into<Memory>) -> Transfer {
        send(self.socket(), memory.into())
    }

    /// Receives the next data, at least a byte; 0 at the end of the stream.
    pub fn recv(&self, memory: impl Into<Memory>) -> Transfer {
        recv(self.socket(), memory.into(), RecvFlags::empty())
    }

    /// Receives until the memory is full. Fewer bytes mean the end of the stream or an error.
    pub fn recv_exact(&self, memory: impl Into<Memory>) -> Transfer {
        recv(self.socket(), memory.into(), RecvFlags::WAITALL)
    }

    /// Sends memory and parts of files, in order; later sends follow. A file shorter than requested contributes the bytes that it
    /// has. Ready with the number of bytes sent.
    pub fn send_file(&self, pieces: Vec<Piece>) -> End<usize> {
        send_file(self.socket(), pieces)
    }

    /// The socket itself, for the other interfaces.
    pub fn into_socket(self) -> Socket {
        self.socket
    }

    /// The two directions, for two tasks. The connection closes when both halves are dropped.
    pub fn into_split(self) -> (SendHalf, RecvHalf) {
        let recv = RecvHalf {
            socket: self.socket.clone(),
        };
        (
            SendHalf {
                socket: self.socket,
            },
            recv,
        )
    }
}

impl Packets {
    /// Wraps a connected socket.
    ///
    /// # Errors
    /// `EPROTOTYPE` for a stream.
    pub fn new(socket: Socket) -> Result<Packets, Errno> {
        if socket.kind() != Kind::SeqPacket {
            return Err(Errno::PROTOTYPE);
        }
        Ok(Packets { socket })
    }

    /// Sends the memory as one message. Ready when the memory belongs to the program again.
    pub fn send(&self, memory: impl Into<Memory>) -> Transfer {
        send(self.socket(), memory.into())
    }

    /// Receives one message.
    pub fn recv(&self, memory: impl Into<Memory>) -> Message {
        Message(recv(self.socket(), memory.into(), RecvFlags::empty()))
    }
}

fn send(socket: &Socket, memory: Memory) -> Transfer {
    Transfer::start(socket, memory, |memory, sink| socket.send(memory, sink))
}

fn recv(socket: &Socket, memory: Memory, flags: RecvFlags) -> Transfer {
    Transfer::start(socket, memory, |memory, sink| {
        socket.recv(memory, flags, sink)
    })
}

fn send_file(socket: &Socket, pieces: Vec<Piece>) -> End<usize> {
    End {
        operation: Operation::start(|sink| socket.send_file(pieces, sink)),
        of: |bytes| bytes,
    }
}

/// The sending direction of a stream. Dropping it closes the direction after the queued data has been sent.
pub struct SendHalf {
    socket: Socket,
}

impl SendHalf {
    /// As [`Stream::send`].
    pub fn send(&self, memory: impl Into<Memory>) -> Transfer {
        send(&self.socket, memory.into())
    }

    /// As [`Stream::send_file`].
    pub fn send_file(&self, pieces: Vec<Piece>) -> End<usize> {
        send_file(&self.socket, pieces)
    }

    /// As [`Stream::shutdown`].
    pub fn shutdown(self) -> End {
        End::start(|sink| self.socket.shutdown_with(sink))
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        // A second shutdown is harmless.
        let _ = self.socket.shutdown();
    }
}

/// The receiving direction of a stream.
pub struct RecvHalf {
    socket: Socket,
}

impl RecvHalf {
    /// As [`Stream::recv`].
    pub fn recv(&self, memory: impl Into<Memory>) -> Transfer {
        recv(&self.socket, memory.into(), RecvFlags::empty())
    }

    /// As [`Stream::recv_exact`].
    pub fn recv_exact(&self, memory: impl Into<Memory>) -> Transfer {
        recv(&self.socket, memory.into(), RecvFlags::WAITALL)
    }
}

/// A listening socket. It queues connections until they are accepted.
pub struct Listener<T> {
    inbox: Arc<Mutex<Inbox>>,
    socket: Socket,
    of: PhantomData<fn() -> T>,
}

#[derive(Default)]
struct Inbox {
    ready: VecDeque<Result<Socket, Errno>>,
    /// An accept is outstanding.
    asked: bool,
    wakers: Vec<Waker>,
}

impl<T: Connection> Listener<T> {
    /// Makes a bound socket listen.
    ///
    /// # Errors
    /// As `listen(2)`; `EPROTOTYPE` for a socket of another kind.
    pub fn new(socket: Socket, backlog: u32) -> Result<Listener<T>, Errno> {
        if socket.kind() != T::KIND {
            return Err(Errno::PROTOTYPE);
        }
        socket.listen(backlog)?;
        Ok(Listener {
            inbox: Arc::default(),
            socket,
            of: PhantomData,
        })
    }

    /// The socket, for its address and options.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The next connection. Several tasks may wait; a dropped future loses no connection.
    ///
    /// # Errors
    /// As `accept(2)`.
    pub async fn accept(&self) -> Result<T, Errno> {
        poll_fn(|cx| self.poll_accept(cx)).await.map(T::from_socket)
    }

    fn poll_accept(&self, cx: &mut Task<'_>) -> Poll<Result<Socket, Errno>> {
        loop {
            let mut inbox = lock(&self.inbox);
            if let Some(next) = inbox.ready.pop_front() {
                return Poll::Ready(next);
            }
            if !inbox.wakers.iter().any(|w| w.will_wake(cx.waker())) {
                inbox.wakers.push(cx.waker().clone());
            }
            if inbox.asked {
                return Poll::Pending;
            }
            inbox.asked = true;
            drop(inbox);
            let told = Arc::clone(&self.inbox);
            let sink = Sink::call(move |event| {
                let next = match (event.result, event.accepted) {
                    (Ok(_), Some(socket)) => Ok(socket),
                    (Ok(_), None) => Err(Errno::IO),
                    (Err(why), _) => Err(why),
                };
                Inbox::put(&told, next);
            });
            if let Err(why) = self.socket.accept(sink) {
                Inbox::put(&self.inbox, Err(why));
            }
        }
    }
}

impl Inbox {
    fn put(this: &Mutex<Inbox>, next: Result<Socket, Errno>) {
        let mut inbox = lock(this);
        inbox.asked = false;
        inbox.ready.push_back(next);
        // Wake all of them: a task that was dropped would lose the wake-up.
        let wakers = std::mem::take(&mut inbox.wakers);
        drop(inbox);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A connection that carries messages.
pub struct Packets {
    socket: Socket,
}

connection!(Packets, Kind::SeqPacket);
