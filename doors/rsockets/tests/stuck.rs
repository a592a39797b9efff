//! Peers in shared memory that stay in memory which was mapped for them, or stop there: it is the program's again in time, and other
//! connections go on meanwhile.

#[allow(unreachable_pub)]
#[path = "../../../tests/conformance/src/marks.rs"]
mod marks;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::process::Pid;
use weft_rsockets::{RecvFlags, Sink, Socket, Source};
use weft_verbs::{Device, LocalMode, RawMemory};

/// Longer than any of the waits, and not for ever.
const BOUND: Duration = Duration::from_secs(10);
/// Segments are told apart by when they appear: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

fn device() -> Device {
    let builder = Device::builder().local(LocalMode::Require);
    builder.open().unwrap()
}

fn listener(device: &Device) -> Socket {
    let listener = Socket::new(device, false).unwrap();
    listener.set_options(|o| o.maps = 8);
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    listener.listen(8).unwrap();
    listener
}

fn connect(listener: &Socket) -> (Socket, Socket) {
    let client = Socket::new(&device(), false).unwrap();
    client.set_options(|o| o.maps = 8);
    client.connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn ping(from: &Socket, to: &Socket) {
    assert_eq!(from.send(&[Source::Bytes(b"ping")], false), Ok(4));
    let mut bytes = [0; 4];
    let got = to.recv(&mut [Sink::Bytes(&mut bytes)], RecvFlags::WAITALL);
    assert_eq!((got, &bytes), (Ok(4), b"ping"));
}

/// How the memory becomes the program's again.
#[derive(Clone, Copy, Debug)]
enum End {
    Unmap,
    Close,
}

/// It does in time, while another connection of the device goes on.
fn in_time(server: Socket, memory: &RawMemory, end: End, bystander: &(Socket, Socket)) {
    let (addr, len) = (memory.as_ptr() as usize, memory.len());
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        match end {
            End::Unmap => server.unmap(addr, len).unwrap(),
            End::Close => server.close(),
        }
        let _ = tell.send(server);
    });
    let rounds = BOUND.as_millis();
    let server = (0..rounds).find_map(|_| {
        ping(&bystander.0, &bystander.1);
        ping(&bystander.1, &bystander.0);
        told.recv_timeout(Duration::from_millis(1)).ok()
    });
    assert!(server.is_some(), "{end:?}: the memory is not back");
    // Nothing is open any more.
    assert_eq!(marks::opened(len), [], "{end:?}");
}

#[test]
fn a_peer_that_never_leaves_does_not_keep_a_map() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (end, len) in [(End::Unmap, 4567), (End::Close, 4568)] {
        let listener = listener(&device());
        let before = marks::segments();
        let (_client, server) = connect(&listener);
        let mut segments = marks::segments().into_iter();
        let segment = segments.rfind(|s| !before.contains(s)).unwrap();
        let bystander = connect(&listener);
        let memory = RawMemory::leak(vec![0; len]);
        server.map(&memory, true, Some(0)).unwrap();
        let [stag] = marks::opened(len)[..] else {
            panic!("it is not open");
        };
        marks::put(segment, stag);
        in_time(server, &memory, end, &bystander);
    }
}

struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the other process"]
fn writer() {
    let Ok(to) = std::env::var("WEFT_WRITES_TO") else {
        return;
    };
    let client = Socket::new(&device(), false).unwrap();
    client.set_options(|o| o.maps = 8);
    client.connect(to.parse().unwrap()).unwrap();
    println!("@connected");
    let bytes = vec![1; 16 << 20];
    while client.write_at(&[Source::Bytes(&bytes)], 0, false).is_ok() {}
}

#[test]
fn a_peer_that_stops_does_not_keep_a_map() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (end, len) in [(End::Unmap, 16 << 20), (End::Close, 15 << 20)] {
        let listener = listener(&device());
        let before = marks::segments();
        let mut other = Command::new(std::env::current_exe().unwrap());
        let other = other
            .args(["--exact", "stuck::writer", "--ignored", "--nocapture", "-q"])
            .env("WEFT_WRITES_TO", listener.local_addr().unwrap().to_string())
            .stdout(Stdio::piped())
            .spawn();
        let mut other = Other(other.unwrap());
        let server = listener.accept().unwrap().0;
        let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("@connected")));
        let mut segments = marks::segments();
        segments.retain(|s| !before.contains(s));
        let bystander = connect(&listener);
        let memory = RawMemory::leak(vec![0; len]);
        server.map(&memory, true, Some(0)).unwrap();
        let [stag] = marks::opened(len)[..] else {
            panic!("it is not open");
        };
        // The peer knows of the map when it has received what is sent after it.
        assert_eq!(server.send(&[Source::Bytes(b"go")], false), Ok(2));
        marks::stop_inside(Pid::from_child(&other.0), &segments, Some(stag));
        in_time(server, &memory, end, &bystander);
    }
}
