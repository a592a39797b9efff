//! Echo with futures: a task per connection.
//!
//! ```text
//! cargo run --example echo_async                          both ends, in one process
//! cargo run --example echo_async -- server 0.0.0.0:7000
//! cargo run --example echo_async -- client 192.0.2.1:7000
//! ```

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use weft_exs::futures::{Listener, Stream, Transfer};
use weft_exs::{Context, Errno, Region};

/// Bytes of a connection's buffer.
const BUFFER: usize = 64 << 10;
/// What the client sends: so many messages, of so many bytes.
const MESSAGES: usize = 2000;
const LEN: usize = 16 << 10;
/// And how many of them are on their way at a time.
const OUTSTANDING: usize = 8;

/// Sends back what comes, until the peer is through. Dropping the stream closes it.
async fn echo(context: Context, stream: Stream) -> Result<(), Errno> {
    let buffer = Region::alloc(&context, BUFFER)?;
    loop {
        let (n, _) = stream.recv(buffer.whole()).await;
        match n? {
            0 => return Ok(()),
            n => stream.send(buffer.slice(0, n)?).await.0?,
        };
    }
}

async fn serve(context: Context, listener: Listener<Stream>) -> Result<(), Errno> {
    loop {
        let stream = listener.accept().await?;
        let context = context.clone();
        tokio::spawn(async move {
            if let Err(error) = echo(context, stream).await {
                eprintln!("a connection failed: {error}");
            }
        });
    }
}

/// Sends messages, several at a time, and compares what comes back.
async fn drive(context: &Context, addr: SocketAddr) -> Result<(), Errno> {
    let stream = Stream::connect(context, addr).await?;
    let memory = Region::alloc(context, 2 * OUTSTANDING * LEN)?;
    // Slot n of the first half is sent, and comes back to slot n of the second half.
    let begin = |n: usize| -> Result<_, Errno> {
        let slot = n % OUTSTANDING;
        memory.write(slot * LEN, &vec![n as u8; LEN])?;
        // Operations begin at the call. The receive first: then the answer goes straight to its place.
        let answer = stream.recv_exact(memory.slice((OUTSTANDING + slot) * LEN, LEN)?);
        let send = stream.send(memory.slice(slot * LEN, LEN)?);
        Ok((send, answer))
    };
    let start = Instant::now();
    let mut outstanding: VecDeque<(Transfer, Transfer)> = VecDeque::new();
    for n in 0..MESSAGES + OUTSTANDING {
        if n >= OUTSTANDING
            && let Some((send, answer)) = outstanding.pop_front()
        {
            send.await.0?;
            let (bytes, answer) = answer.await;
            assert_eq!(bytes?, LEN, "the stream ended early");
            let want = (n - OUTSTANDING) as u8;
            assert!(
                answer.to_vec().iter().all(|b| *b == want),
                "changed on the way"
            );
        }
        if n < MESSAGES {
            outstanding.push_back(begin(n)?);
        }
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "{MESSAGES} messages of {LEN} bytes there and back: {:.1} ms, {:.2} GB/s each way",
        took * 1e3,
        (MESSAGES * LEN) as f64 / took / 1e9,
    );
    stream.close().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = Context::global()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["server", addr] => {
            let listener = Stream::listen(&context, addr.parse()?)?;
            println!("listening on {}", listener.socket().local_addr()?);
            serve(context, listener).await?;
        }
        ["client", addr] => drive(&context, addr.parse()?).await?,
        [] => {
            let listener = Stream::listen(&context, "127.0.0.1:0".parse()?)?;
            let addr = listener.socket().local_addr()?;
            let server = tokio::spawn(serve(context.clone(), listener));
            drive(&context, addr).await?;
            server.abort();
        }
        _ => return Err("usage: echo_async [server ADDR | client ADDR]".into()),
    }
    Ok(())
}
