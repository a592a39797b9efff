//! Our own peers: small programs with ordinary sockets, which do not depend on weft.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::error::{BenchError, Result, failed};

/// Options of `weft bench run-part`.
#[derive(Args, Clone, Copy, Debug)]
pub struct PartArgs {
    #[arg(value_enum)]
    part: Part,
    #[arg(long)]
    port: u16,
    /// Bytes of a message
    #[arg(long, default_value_t = 1024)]
    size: usize,
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Look again and again instead of sleeping
    #[arg(long)]
    spin: bool,
    #[arg(long, default_value_t = 1)]
    connections: u32,
    /// The server's process, whose CPU time and whose children's count too
    #[arg(long, default_value_t = 0)]
    server: u32,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Part {
    /// Answers each message with as many bytes
    Echo,
    /// Sends messages to `echo`, one after another
    Ping,
    /// Connects to `echo`, asks once, closes, again and again
    Once,
    /// Sets and gets values of memcached by so many connections, a thread for each
    Memcached,
    /// Opens connections to an HTTP server, asks a few times by each, says its CPU time of the seconds after that
    Hold,
}

/// A connection of one request may not use more ports than the kernel has.
const MOST_CONNECTIONS: u64 = 5000;
/// After this many messages both ends have met.
const WARM: u32 = 64;

fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> BenchError {
    BenchError::system(what)
}

pub(crate) fn run(args: &PartArgs) -> Result<()> {
    let PartArgs {
        part,
        port,
        size,
        seconds,
        spin,
        connections,
        server,
    } = *args;
    match part {
        Part::Echo => echo(port, size, spin),
        Part::Ping => ping(port, size, seconds, spin),
        Part::Once => once(port, size, seconds),
        Part::Memcached => memcached(port, connections, seconds),
        Part::Hold => hold(port, connections, seconds, server),
    }
}

fn connect(port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port)).map_err(io("connect"))?;
    stream.set_nodelay(true).map_err(io("set TCP_NODELAY"))?;
    Ok(stream)
}

/// Fills the buffer. `false`: the peer has closed.
fn receive(stream: &mut TcpStream, buffer: &mut [u8], spin: bool) -> std::io::Result<bool> {
    let mut got = 0;
    while let Some(rest) = buffer.get_mut(got..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) => return Ok(false),
            Ok(n) => got += n,
            Err(e) if spin && e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

fn send(stream: &mut TcpStream, mut bytes: &[u8], spin: bool) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(e) if spin && e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn echo(port: u16, size: usize, spin: bool) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).map_err(io("listen"))?;
    let mut buffer = vec![0; size];
    loop {
        let (mut stream, _) = listener.accept().map_err(io("accept"))?;
        stream.set_nodelay(true).map_err(io("set TCP_NODELAY"))?;
        stream.set_nonblocking(spin).map_err(io("set O_NONBLOCK"))?;
        // One client at a time; one that breaks off is followed by the next.
        while let Ok(true) = receive(&mut stream, &mut buffer, spin) {
            if send(&mut stream, &buffer, spin).is_err() {
                break;
            }
        }
    }
}

fn ping(port: u16, size: usize, seconds: f64, spin: bool) -> Result<()> {
    let mut stream = connect(port)?;
    stream.set_nonblocking(spin).map_err(io("set O_NONBLOCK"))?;
    let message: Vec<u8> = (0..size).map(|n| n as u8).collect();
    let mut buffer = vec![0; size];
    let mut one = || -> Result<()> {
        send(&mut stream, &message, spin).map_err(io("send"))?;
        if !receive(&mut stream, &mut buffer, spin).map_err(io("receive"))? {
            return Err(failed("receive", "the server has closed"));
        }
        if buffer != message {
            return Err(BenchError::Contents(0));
        }
        Ok(())
    };
    for _ in 0..WARM {
        one()?;
    }
    let (began, mut n) = (Instant::now(), 0_u64);
    loop {
        one()?;
        n += 1;
        // The clock is read only now and then.
        if n.is_multiple_of(16) && began.elapsed().as_secs_f64() >= seconds {
            break;
        }
    }
    println!("rate {}", n as f64 / began.elapsed().as_secs_f64());
    Ok(())
}

fn once(port: u16, size: usize, seconds: f64) -> Result<()> {
    let message = vec![7_u8; size];
    let mut buffer = vec![0; size];
    let (began, mut n) = (Instant::now(), 0_u64);
    while n < MOST_CONNECTIONS && began.elapsed().as_secs_f64() < seconds {
        let mut stream = connect(port)?;
        stream.write_all(&message).map_err(io("send"))?;
        stream.read_exact(&mut buffer).map_err(io("receive"))?;
        n += 1;
    }
    println!("rate {}", n as f64 / began.elapsed().as_secs_f64());
    Ok(())
}

/// Reads until the text ends so.
fn until(stream: &mut TcpStream, end: &[u8], buffer: &mut Vec<u8>) -> Result<()> {
    buffer.clear();
    let mut part = [0; 2048];
    while !buffer.ends_with(end) {
        let n = stream.read(&mut part).map_err(io("receive"))?;
        if n == 0 {
            return Err(failed("receive", "the server has closed"));
        }
        buffer.extend_from_slice(part.get(..n).unwrap_or_default());
    }
    Ok(())
}

/// One set for nine gets of 100 bytes.
fn memcached(port: u16, connections: u32, seconds: f64) -> Result<()> {
    const KEYS: u64 = 64;
    let total = AtomicU64::new(0);
    let one = |number: u32| -> Result<()> {
        let mut stream = connect(port)?;
        let value = "v".repeat(100);
        let mut buffer = Vec::new();
        let set = |key: u64| format!("set k{number}-{key} 0 0 100\r\n{value}\r\n");
        for key in 0..KEYS {
            stream.write_all(set(key).as_bytes()).map_err(io("send"))?;
            until(&mut stream, b"STORED\r\n", &mut buffer)?;
        }
        let (began, mut n) = (Instant::now(), 0_u64);
        while began.elapsed().as_secs_f64() < seconds {
            let key = n % KEYS;
            if n.is_multiple_of(10) {
                stream.write_all(set(key).as_bytes()).map_err(io("send"))?;
                until(&mut stream, b"STORED\r\n", &mut buffer)?;
            } else {
                let get = format!("get k{number}-{key}\r\n");
                stream.write_all(get.as_bytes()).map_err(io("send"))?;
                until(&mut stream, b"END\r\n", &mut buffer)?;
                if buffer.len() < value.len() {
                    return Err(BenchError::Contents(0));
                }
            }
            n += 1;
        }
        total.fetch_add(n, Ordering::Relaxed);
        Ok(())
    };
    let one = &one;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|number| scope.spawn(move || one(number)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            let done = thread.join();
            done.unwrap_or_else(|_| Err(failed("run a thread", "it panicked")))
        })
    })?;
    println!("rate {}", total.load(Ordering::Relaxed) as f64 / seconds);
    Ok(())
}

fn hold(port: u16, connections: u32, seconds: f64, server: u32) -> Result<()> {
    // Each connection on the rings has more than one descriptor; a lower limit shows in what follows.
    weft_sys::limits::raise_nofile();
    let mut streams = Vec::new();
    let mut buffer = Vec::new();
    for _ in 0..connections {
        let mut stream = connect(port)?;
        for _ in 0..6 {
            stream
                .write_all(b"GET /tiny HTTP/1.1\r\nHost: here\r\n\r\n")
                .map_err(io("send"))?;
            until(&mut stream, b"\nthe-end\n", &mut buffer)?;
        }
        streams.push(stream);
    }
    // Messages in flight arrive during this time.
    std::thread::sleep(Duration::from_millis(300));
    let used = || crate::usage::cpu_seconds() + super::world::tree_cpu(server);
    let before = used();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    println!("cpu {}", used() - before);
    drop(streams);
    Ok(())
}
