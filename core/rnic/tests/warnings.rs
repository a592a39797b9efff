//! What a listener logs of peers that it turns away. One test, because the log is the whole process's.

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use weft_rnic::{ConnParam, Device, LocalMode};

/// Connections that are turned away.
const FLOOD: u64 = 300;
const PATIENCE: Duration = Duration::from_mins(1);

/// Sends on how many warnings each line stands for.
struct Lines(Mutex<mpsc::Sender<(u64, String)>>);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut line = Line(1, String::new());
        event.record(&mut line);
        let _ = self.0.lock().unwrap().send((line.0, line.1));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Line(u64, String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.1 = format!("{value:?}");
        }
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "count" {
            self.0 = value;
        }
    }
}

#[test]
fn a_flood_is_a_line_a_second() {
    let (tell, lines) = mpsc::channel();
    tracing::subscriber::set_global_default(Lines(Mutex::new(tell))).unwrap();
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let listening = device.listen(any, 4, &ConnParam::default(), drop).unwrap();

    let start = Instant::now();
    for _ in 0..FLOOD {
        let mut peer = TcpStream::connect(listening.local_addr()).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        // A TLS handshake, where TLS is off.
        let mut hello = [0; 64];
        hello[..3].copy_from_slice(&[22, 3, 1]);
        peer.write_all(&hello).unwrap();
        // It is turned away: closed, or reset.
        match peer.read(&mut [0; 1]) {
            Ok(n) => assert_eq!(n, 0),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    let (mut count, mut seen) = (0, 0);
    while count < FLOOD {
        let (n, line) = lines.recv_timeout(PATIENCE).expect("all are told of");
        assert!(line.contains("it speaks TLS"), "{line}");
        count += n;
        seen += 1;
    }
    assert_eq!(count, FLOOD);
    let most = 2 + start.elapsed().as_secs();
    assert!(seen <= most, "{seen} lines, and at most {most} expected");
}
