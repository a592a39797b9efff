//! Echo with an event queue: one thread serves all connections.
//!
//! ```text
//! cargo run --example echo                          both ends, in one process
//! cargo run --example echo -- server 0.0.0.0:7000
//! cargo run --example echo -- client 192.0.2.1:7000
//! ```

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use weft_exs::{Context, Errno, Event, EventKind, Kind, Queue, RecvFlags, Region, Sink, Socket};

/// Bytes of a connection's buffer.
const BUFFER: usize = 64 << 10;
/// What the client sends: so many messages, of so many bytes.
const MESSAGES: usize = 2000;
const LEN: usize = 16 << 10;
/// And how many of them are on their way at a time.
const OUTSTANDING: usize = 8;

/// The token of accepts; connections count from 1.
const ACCEPT: u64 = 0;

struct Connection {
    socket: Socket,
    /// Registered once, for all operations.
    buffer: Arc<Region>,
}

/// Serves until `connections` have come and gone.
fn serve(context: &Context, listener: &Socket, mut connections: usize) -> Result<(), Errno> {
    let queue = Queue::new(context, 1024)?;
    let mut open: HashMap<u64, Connection> = HashMap::new();
    let mut last = ACCEPT;
    let mut events: Vec<Event> = Vec::new();
    listener.accept(queue.sink(ACCEPT))?;
    while connections > 0 {
        queue.dequeue(&mut events, 64, 1, None)?;
        for event in events.drain(..) {
            let token = event.token;
            let done = match (event.kind, event.result) {
                (EventKind::Accept, result) => {
                    result?;
                    listener.accept(queue.sink(ACCEPT))?;
                    let Some(socket) = event.accepted else {
                        continue;
                    };
                    last += 1;
                    let buffer = Region::alloc(context, BUFFER)?;
                    let sink = queue.sink(last);
                    socket.recv(buffer.whole(), RecvFlags::empty(), sink)?;
                    open.insert(last, Connection { socket, buffer });
                    false
                }
                // The peer is through. Dropping the socket closes our side, after what is queued.
                (EventKind::Recv, Ok(0)) => true,
                (EventKind::Recv, Ok(n)) => {
                    let connection = &open[&token];
                    let answer = connection.buffer.slice(0, n)?;
                    let sink = queue.sink(token);
                    connection.socket.send(answer, sink).is_err()
                }
                (EventKind::Send, Ok(_)) => {
                    let connection = &open[&token];
                    let memory = connection.buffer.whole();
                    let sink = queue.sink(token);
                    let again = connection.socket.recv(memory, RecvFlags::empty(), sink);
                    again.is_err()
                }
                (kind, result) => {
                    eprintln!("connection {token}: {kind:?}: {result:?}");
                    true
                }
            };
            if done && open.remove(&token).is_some() {
                connections -= 1;
            }
        }
    }
    Ok(())
}

/// Sends messages, several at a time, and compares what comes back.
fn drive(context: &Context, addr: SocketAddr) -> Result<(), Errno> {
    let socket = Socket::new(context, addr.is_ipv6(), Kind::Stream)?;
    socket.connect_wait(addr)?;
    let queue = Queue::new(context, 4 * OUTSTANDING)?;
    let memory = Region::alloc(context, 2 * OUTSTANDING * LEN)?;
    // Slot n of the first half is sent, and comes back to slot n of the second half.
    let begin = |n: usize| -> Result<(), Errno> {
        let slot = n % OUTSTANDING;
        memory.write(slot * LEN, &vec![n as u8; LEN])?;
        let answer = memory.slice((OUTSTANDING + slot) * LEN, LEN)?;
        let sink = |token| queue.sink(token);
        // The receive first: then the answer goes straight to its place.
        socket.recv(answer, RecvFlags::WAITALL, sink(n as u64))?;
        socket.send(memory.slice(slot * LEN, LEN)?, sink(n as u64))
    };
    let start = Instant::now();
    for n in 0..OUTSTANDING {
        begin(n)?;
    }
    let mut events: Vec<Event> = Vec::new();
    let mut got = vec![0; LEN];
    let mut answers = 0;
    while answers < MESSAGES {
        queue.dequeue(&mut events, 64, 1, None)?;
        for event in events.drain(..) {
            let bytes = event.result?;
            if event.kind != EventKind::Recv {
                continue;
            }
            // Receives end in order, and a message that has come back has been sent.
            let n = event.token as usize;
            assert_eq!((n, bytes), (answers, LEN), "the stream ended early");
            memory.read((OUTSTANDING + n % OUTSTANDING) * LEN, &mut got)?;
            assert!(
                got.iter().all(|b| *b == n as u8),
                "message {n} came back changed"
            );
            answers += 1;
            if n + OUTSTANDING < MESSAGES {
                begin(n + OUTSTANDING)?;
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "{MESSAGES} messages of {LEN} bytes there and back: {:.1} ms, {:.2} GB/s each way",
        took * 1e3,
        (MESSAGES * LEN) as f64 / took / 1e9,
    );
    println!("{:?}", socket.stats());
    socket.close(Sink::Nobody)
}

fn listen(context: &Context, addr: SocketAddr) -> Result<Socket, Errno> {
    let listener = Socket::new(context, addr.is_ipv6(), Kind::Stream)?;
    listener.bind(addr)?;
    listener.listen(16)?;
    println!("listening on {}", listener.local_addr()?);
    Ok(listener)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = Context::global()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", addr] => serve(&context, &listen(&context, addr.parse()?)?, usize::MAX)?,
        ["client", addr] => drive(&context, addr.parse()?)?,
        [] => {
            let listener = listen(&context, "127.0.0.1:0".parse()?)?;
            let addr = listener.local_addr()?;
            let server = std::thread::spawn({
                let context = context.clone();
                move || serve(&context, &listener, 1)
            });
            drive(&context, addr)?;
            server.join().map_err(|_| "the server panicked")??;
        }
        _ => return Err("usage: echo [server ADDR | client ADDR]".into()),
    }
    Ok(())
}
