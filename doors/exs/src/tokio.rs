//! Streams for `tokio`: [`IoStream`] is `AsyncRead` and `AsyncWrite` over an EXS stream (feature `tokio`).
//!
//! It reads and writes through internal registered buffers. Several receives are always outstanding, so that the peer's data goes
//! straight into one of them. Written data is copied once and sent from the copy. No `tokio` runtime is needed: any
//! executor works.
//!
//! ```
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use weft_exs::{Context, futures::Stream, tokio::IoStream};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> std::io::Result<()> {
//! let context = Context::global()?;
//! let listener = Stream::listen(&context, "127.0.0.1:0".parse().unwrap())?;
//! let addr = listener.socket().local_addr()?;
//! let server = tokio::spawn(async move {
//!     let (mut reader, mut writer) = tokio::io::split(IoStream::new(listener.accept().await?)?);
//!     tokio::io::copy(&mut reader, &mut writer).await?;
//!     writer.shutdown().await
//! });
//!
//! let mut stream = IoStream::new(Stream::connect(&context, addr).await?)?;
//! stream.write_all(b"hello").await?;
//! stream.shutdown().await?;
//! let mut answer = String::new();
//! stream.read_to_string(&mut answer).await?;
//! assert_eq!(answer, "hello");
//! server.await?
//! # }
//! ```

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context as Task, Poll, Waker, ready};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use rustix::io::Errno;
use weft_sockets::lock::lock;

use crate::futures::Stream;
use crate::{RecvFlags, Region, Sink, Socket};

/// The most outstanding sends; each small write is a separate send.
const SENDS: usize = 256;

/// Sizes of an [`IoStream`]'s buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes of one receive, and the most bytes of one send. Default 64 KiB.
    pub chunk: usize,
    /// Number of outstanding receives. Default 4.
    pub receives: usize,
    /// Bytes that may be in flight before writes wait. Default 256 KiB.
    pub send: usize,
}

impl Default for Buffers {
    fn default() -> Self {
        Buffers {
            chunk: 64 << 10,
            receives: 4,
            send: 256 << 10,
        }
    }
}

/// An EXS stream with buffers, for the traits of `tokio`.
///
/// * A read that is dropped before it is ready has consumed nothing.
/// * A write is ready when its bytes are in the buffer; they are sent at once. A flush waits until the transport has accepted them all.
/// * A write is not subject to the socket's time limit: accepted data is sent.
/// * A shutdown closes the sending direction after all bytes; reading continues.
/// * Dropping the stream closes the connection, after the written data has been sent.
pub struct IoStream {
    socket: Socket,
    /// The memory of the receives, then that of the sends.
    region: Arc<Region>,
    sizes: Buffers,
    reads: Arc<Mutex<Reads>>,
    /// Index of the next receive to read; they are posted in turn.
    next: usize,
    /// Bytes of it that have been read.
    at: usize,
    /// The peer's stream has ended.
    end: bool,
    writes: Arc<Mutex<Writes>>,
    /// Offset of the next write in the memory of the sends.
    head: usize,
    /// The sending direction is being closed.
    shutting: bool,
}

struct Reads {
    /// The results of the receives, by index: the bytes, and the error after them.
    ended: Vec<Option<(usize, Option<Errno>)>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Writes {
    /// The sends that hold memory, in order: bytes, and true if complete.
    sends: VecDeque<(usize, bool)>,
    /// Number of the first of these sends.
    first: u64,
    /// Bytes that these sends hold.
    used: usize,
    failed: Option<Errno>,
    shut: Option<Result<(), Errno>>,
    waker: Option<Waker>,
}

impl Writes {
    fn number(&self) -> u64 {
        self.first + self.sends.len() as u64
    }

    /// A send is complete. Memory is freed in the order of the sends.
    fn complete(&mut self, number: u64, failed: Option<Errno>) {
        self.failed = self.failed.or(failed);
        if let Some(send) = self.sends.get_mut((number - self.first) as usize) {
            send.1 = true;
        }
        while let Some((len, true)) = self.sends.front() {
            self.used -= len;
            self.first += 1;
            self.sends.pop_front();
        }
    }
}

/// Store the task's waker for the next wake-up; the lock is held.
fn wait<T>(waker: &mut Option<Waker>, cx: &mut Task<'_>) -> Poll<T> {
    match waker {
        Some(waker) => waker.clone_from(cx.waker()),
        None => *waker = Some(cx.waker().clone()),
    }
    Poll::Pending
}

impl IoStream {
    /// A stream with the default buffers.
    ///
    /// # Errors
    /// `ENOMEM` when the buffers cannot be allocated; the errors of a receive.
    pub fn new(stream: Stream) -> Result<IoStream, Errno> {
        IoStream::with_buffers(stream, Buffers::default())
    }

    /// A stream with buffers of these sizes.
    ///
    /// # Errors
    /// As [`IoStream::new`]; `EINVAL` when a size is 0 or the sum is too large.
    pub fn with_buffers(stream: Stream, sizes: Buffers) -> Result<IoStream, Errno> {
        let socket = stream.into_socket();
        let total = sizes
            .chunk
            .checked_mul(sizes.receives)
            .and_then(|r| r.checked_add(sizes.send));
        let total = match total {
            Some(total) if sizes.chunk > 0 && sizes.receives > 0 && sizes.send > 0 => total,
            _ => return Err(Errno::INVAL),
        };
        let region = Region::alloc(&socket.0.context, total)?;
        let mut this = IoStream {
            socket,
            region,
            sizes,
            reads: Arc::new(Mutex::new(Reads {
                ended: vec![None; sizes.receives],
                waker: None,
            })),
            next: 0,
            at: 0,
            end: false,
            writes: Arc::default(),
            head: 0,
            shutting: false,
        };
        for _ in 0..sizes.receives {
            this.receive()?;
        }
        Ok(this)
    }

    /// The socket, for its addresses, options and statistics.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Post the current receive, and advance to the next.
    fn receive(&mut self) -> Result<(), Errno> {
        let place = self.next;
        let memory = self
            .region
            .slice(place * self.sizes.chunk, self.sizes.chunk)?;
        lock(&self.reads).ended[place] = None;
        self.next = (place + 1) % self.sizes.receives;
        self.at = 0;
        let reads = Arc::clone(&self.reads);
        let sink = Sink::call(move |event| {
            let mut reads = lock(&reads);
            reads.ended[place] = Some((event.bytes, event.result.err()));
            let waker = reads.waker.take();
            drop(reads);
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        self.socket.recv(memory, RecvFlags::empty(), sink)
    }

    /// Post the current receive again. If that is refused, the next read of it returns the error.
    fn again(&mut self) {
        let place = self.next;
        if let Err(why) = self.receive() {
            lock(&self.reads).ended[place] = Some((0, Some(why)));
        }
    }

    fn write(&mut self, cx: &mut Task<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let mut writes = lock(&self.writes);
        if let Some(why) = writes.failed {
            return Poll::Ready(Err(why.into()));
        }
        let all: usize = bufs.iter().map(|b| b.len()).fold(0, usize::saturating_add);
        if all == 0 {
            return Poll::Ready(Ok(0));
        }
        let room = (self.sizes.send - writes.used).min(self.sizes.send - self.head);
        let len = all.min(room).min(self.sizes.chunk);
        if len == 0 || writes.sends.len() >= SENDS {
            return wait(&mut writes.waker, cx);
        }
        let number = writes.number();
        writes.sends.push_back((len, false));
        writes.used += len;
        drop(writes);

        let start = self.sizes.chunk * self.sizes.receives + self.head;
        let mut filled = 0;
        for buf in bufs {
            let now = buf.len().min(len - filled);
            self.region
                .write(start + filled, &buf[..now])
                .map_err(Errno::from)?;
            filled += now;
        }
        self.head = (self.head + len) % self.sizes.send;
        let memory = self.region.slice(start, len).map_err(Errno::from)?;
        let told = Arc::clone(&self.writes);
        let sink = Sink::call(move |event| {
            let mut writes = lock(&told);
            writes.complete(number, event.result.err());
            let waker = writes.waker.take();
            drop(writes);
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        if let Err(why) = self.socket.send_without_limit(memory, sink) {
            lock(&self.writes).complete(number, Some(why));
            return Poll::Ready(Err(why.into()));
        }
        Poll::Ready(Ok(len))
    }
}

impl AsyncRead for IoStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Task<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 || self.end {
            return Poll::Ready(Ok(()));
        }
        let mut reads = lock(&self.reads);
        let Some((bytes, failed)) = reads.ended[self.next] else {
            return wait(&mut reads.waker, cx);
        };
        drop(reads);
        let n = buf.remaining().min(bytes - self.at);
        if n > 0 {
            let from = self.next * self.sizes.chunk + self.at;
            self.region
                .read(from, buf.initialize_unfilled_to(n))
                .map_err(Errno::from)?;
            buf.advance(n);
            self.at += n;
            if self.at == bytes && failed.is_none() {
                self.again();
            }
            return Poll::Ready(Ok(()));
        }
        if let Some(why) = failed {
            self.again();
            return Poll::Ready(Err(why.into()));
        }
        self.end = true;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for IoStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Task<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Task<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<io::Result<()>> {
        let mut writes = lock(&self.writes);
        if let Some(why) = writes.failed {
            return Poll::Ready(Err(why.into()));
        }
        if writes.sends.is_empty() {
            return Poll::Ready(Ok(()));
        }
        wait(&mut writes.waker, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<io::Result<()>> {
        ready!(self.as_mut().poll_flush(cx))?;
        if !self.shutting {
            let told = Arc::clone(&self.writes);
            self.socket.shutdown_with(Sink::call(move |event| {
                let mut writes = lock(&told);
                writes.shut = Some(event.result.map(drop));
                let waker = writes.waker.take();
                drop(writes);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }))?;
            self.shutting = true;
        }
        let mut writes = lock(&self.writes);
        match writes.shut {
            Some(end) => Poll::Ready(end.map_err(io::Error::from)),
            None => wait(&mut writes.waker, cx),
        }
    }
}
