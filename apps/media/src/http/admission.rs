//! The connections of browsers and players: who is let in, how many, and how long they may do nothing.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// Connections at the same time.
const CONNECTIONS: usize = 1024;
/// A connection that gets no byte for so long ends: its request does not come, or it does not read the answer. A player that goes on asks again.
const IDLE: Duration = Duration::from_mins(1);

/// Takes connections of this user, unless it is open to all.
pub(super) struct UserFilter {
    listener: TcpListener,
    open: bool,
    places: Arc<Semaphore>,
}

impl UserFilter {
    pub(super) fn new(listener: TcpListener, open: bool) -> Self {
        Self {
            listener,
            open,
            places: Arc::new(Semaphore::new(CONNECTIONS)),
        }
    }
}

impl axum::serve::Listener for UserFilter {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            // Further ones wait in the kernel.
            let place = Arc::clone(&self.places).acquire_owned().await.ok();
            match self.listener.accept().await {
                Ok((stream, peer)) if self.open || is_ours(&stream) => {
                    // Small answers go out at once. Without it they are late, but correct.
                    let _ = stream.set_nodelay(true);
                    return (Connection::new(stream, IDLE, place), peer);
                }
                Ok((_, peer)) => {
                    tracing::info!(
                        "{peer}: turned away: the kernel does not say that it is of this user"
                    );
                }
                Err(e) => {
                    // Without descriptors accept fails at once and again.
                    tracing::warn!("accept: {e}");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

fn is_ours(stream: &TcpStream) -> bool {
    let us = rustix::process::geteuid().as_raw();
    weft_verbs::tcp_peer_uid(stream).is_ok_and(|uid| uid == Some(us))
}

/// A connection that ends when nothing could be written to it for a while.
pub(super) struct Connection {
    stream: TcpStream,
    idle: Duration,
    end: Pin<Box<Sleep>>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Connection {
    fn new(stream: TcpStream, idle: Duration, place: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            stream,
            idle,
            end: Box::pin(sleep(idle)),
            _place: place,
        }
    }

    /// While the stream is not ready.
    fn patience<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        ready!(self.end.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn written(
        &mut self,
        cx: &mut Context<'_>,
        done: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if done.is_pending() {
            return self.patience(cx);
        }
        let end = Instant::now() + self.idle;
        self.end.as_mut().reset(end);
        done
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(cx, into) {
            Poll::Pending => self.patience(cx),
            done @ Poll::Ready(_) => done,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(cx, from);
        self.written(cx, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write_vectored(cx, from);
        self.written(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::io::Write;

    #[test]
    fn a_peer_that_sends_little_or_reads_nothing_loses_its_place() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = listener.local_addr().unwrap();
            let places = Arc::new(Semaphore::new(1));
            for reads in [true, false] {
                let mut peer = std::net::TcpStream::connect(at).unwrap();
                let (stream, _) = listener.accept().await.unwrap();
                let place = Arc::clone(&places).acquire_owned().await.ok();
                let idle = Duration::from_millis(100);
                let mut conn = Connection::new(stream, idle, place);
                let mut bytes = [0; 1 << 14];
                peer.write_all(b"GET /").unwrap();
                let failed = loop {
                    // A header that never ends, or an answer that is not read.
                    let done = if reads {
                        let into = &mut ReadBuf::new(&mut bytes[..1]);
                        poll_fn(|cx| Pin::new(&mut conn).poll_read(cx, into)).await
                    } else {
                        let wrote = poll_fn(|cx| Pin::new(&mut conn).poll_write(cx, &bytes));
                        wrote.await.map(drop)
                    };
                    if let Err(e) = done {
                        break e;
                    }
                };
                assert_eq!(failed.kind(), io::ErrorKind::TimedOut);
                drop(conn);
                assert_eq!(places.available_permits(), 1);
            }
        });
    }
}
