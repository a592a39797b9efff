//! EXS over an RNIC of the machine: weft's own drop-in libraries are in the place of the system's.
//!
//! `siw/nic.rs` runs this program in the guest as well, with `WEFT_TEST_RNIC=DEVICE@ADDRESS` for a device of the kernel.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, setrlimit};
use weft_exs::{
    Choice, Context, Design, Errno, EventKind, Kind, Memory, Mode, Options, Queue, RawMemory,
    Ready, RecvFlags, Region, Socket,
};
use weft_verbs::Device;

const PATIENCE: Duration = Duration::from_mins(1);
const RNIC: &str = "an RNIC";

/// The RNIC under test, and an address of it.
fn rnic() -> &'static (String, IpAddr) {
    static RNIC: OnceLock<(String, IpAddr)> = OnceLock::new();
    RNIC.get_or_init(|| {
        if let Ok(set) = std::env::var("WEFT_TEST_RNIC") {
            let (device, address) = set.split_once('@').expect("a device and its address");
            return (device.to_owned(), address.parse().unwrap());
        }
        weft_nic::Libraries::of(Some(weft_dropin::libraries())).unwrap();
        ("weft0".to_owned(), Ipv4Addr::LOCALHOST.into())
    })
}

fn on(device: &str) -> Context {
    let (rnic, _) = rnic();
    let choice = if device == RNIC { rnic } else { device };
    Context::with(Device::open().unwrap(), choice.parse().unwrap()).unwrap()
}

fn any_port() -> SocketAddr {
    (rnic().1, 0).into()
}

/// Two connected sockets: the one that connected, on the first device, and the one that accepted, on the second.
fn pair_of(
    [near, far]: [&str; 2],
    kind: Kind,
    set: impl Fn(&mut Options),
) -> ((Context, Socket), (Context, Socket)) {
    let [near, far] = [near, far].map(on);
    let (a, b) = connected(&near, &far, kind, set);
    ((near, a), (far, b))
}

fn connected(
    near: &Context,
    far: &Context,
    kind: Kind,
    set: impl Fn(&mut Options),
) -> (Socket, Socket) {
    let listener = Socket::new(far, false, kind).unwrap();
    listener.set_options(&set).unwrap();
    listener.bind(any_port()).unwrap();
    listener.listen(4).unwrap();
    let a = Socket::new(near, false, kind).unwrap();
    a.set_options(&set).unwrap();
    a.connect_wait(listener.local_addr().unwrap()).unwrap();
    let b = listener.accept_wait(Some(PATIENCE)).unwrap();
    (a, b)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(next).collect()
}

/// Lengths around those at which the way of the bytes changes, and their sum.
const LENGTHS: [usize; 12] = [
    1, 7, 60, 250, 256, 257, 1000, 1100, 5000, 70_000, 300_000, 3_000_000,
];

/// The bytes as memory of each kind.
fn memory(context: &Context, bytes: &[u8], kind: usize) -> Memory {
    match kind % 4 {
        0 => Memory::from(bytes.to_vec()),
        1 => {
            let region = Region::alloc(context, bytes.len()).unwrap();
            region.write(0, bytes).unwrap();
            region.whole()
        }
        2 => Memory::Raw(RawMemory::leak(bytes.to_vec())),
        // More pieces than an RNIC names in a request.
        _ => {
            let piece = bytes.len().div_ceil(40).max(1);
            let pieces = bytes.chunks(piece).map(|piece| piece.to_vec().into());
            Memory::List(pieces.collect())
        }
    }
}

fn send_all(context: &Context, socket: &Socket) {
    let queue = Queue::new(context, 64).unwrap();
    for (i, len) in LENGTHS.into_iter().enumerate() {
        for kind in 0..4 {
            let bytes = noise(len, i as u64);
            let memory = memory(context, &bytes, kind);
            socket.send(memory, queue.sink(len as u64)).unwrap();
        }
    }
    let mut events = Vec::new();
    let all = 4 * LENGTHS.len();
    queue
        .dequeue(&mut events, all, all, Some(PATIENCE))
        .unwrap();
    assert_eq!(events.len(), all);
    for event in events {
        assert_eq!(event.result, Ok(event.token as usize));
    }
}

fn receive_all(context: &Context, socket: &Socket) {
    for (i, len) in LENGTHS.into_iter().enumerate() {
        for kind in 0..4 {
            let wanted = noise(len, i as u64);
            // Lists are for receives of one piece here: kinds differ from the sender's.
            let memory = match kind {
                0 | 2 => Memory::Raw(RawMemory::leak(vec![0; len])),
                _ => Region::alloc(context, len).unwrap().whole(),
            };
            let got = socket.recv_wait(&memory, RecvFlags::WAITALL).unwrap();
            assert_eq!(got, len);
            assert!(memory.to_vec() == wanted, "{len} bytes, kind {kind}");
        }
    }
}

/// Everything in both directions at once, then the end of the stream.
fn exchange(near: (Context, Socket), far: (Context, Socket)) {
    let side = |(context, socket): (Context, Socket)| {
        thread::spawn(move || {
            let (context, socket) = (Arc::new(context), Arc::new(socket));
            let sender = thread::spawn({
                let (context, socket) = (Arc::clone(&context), Arc::clone(&socket));
                move || send_all(&context, &socket)
            });
            receive_all(&context, &socket);
            sender.join().unwrap();
            socket.shutdown().unwrap();
            let rest = Region::alloc(&context, 64).unwrap().whole();
            assert_eq!(socket.recv_wait(&rest, RecvFlags::empty()), Ok(0));
        })
    };
    let sides = [side(near), side(far)];
    for side in sides {
        side.join().unwrap();
    }
}

#[test]
fn a_stream_carries_every_kind_of_memory_in_each_mode() {
    for mode in [Mode::Dynamic, Mode::Direct, Mode::Indirect] {
        let (near, far) = pair_of([RNIC; 2], Kind::Stream, |o| o.mode = mode);
        let path = near.1.path().unwrap();
        assert_eq!(
            (path.transport, path.reason.as_deref()),
            ("rnic", Some(rnic().0.as_str()))
        );
        assert_eq!(far.1.path().unwrap().transport, "rnic");
        exchange(near, far);
    }
}

#[test]
fn messages_are_carried_in_both_designs() {
    for design in [Design::Advert, Design::Source] {
        let ((near, a), (far, b)) = pair_of([RNIC; 2], Kind::SeqPacket, |o| o.design = design);
        let sender = thread::spawn(move || {
            send_all(&near, &a);
            a
        });
        receive_all(&far, &b);
        sender.join().unwrap();
    }
}

#[test]
fn streams_run_with_the_soft_rnic_on_either_side() {
    for devices in [["soft", RNIC], [RNIC, "soft"]] {
        let (near, far) = pair_of(devices, Kind::Stream, |_| ());
        exchange(near, far);
    }
}

/// MPA lets the initiator speak first, and the responder waits for it.
fn hello_from_the_responder(devices: [&str; 2]) {
    let ((near, a), (_far, b)) = pair_of(devices, Kind::Stream, |_| ());
    b.send_wait(b"hello".to_vec().into()).unwrap();
    let hello = Region::alloc(&near, 5).unwrap().whole();
    let got = a.recv_wait(&hello, RecvFlags::WAITALL);
    assert_eq!(got, Ok(5), "{devices:?}");
    assert_eq!(hello.to_vec(), b"hello");
}

#[test]
fn the_responder_may_speak_first() {
    hello_from_the_responder([RNIC; 2]);
}

#[test]
fn the_responder_may_speak_first_with_the_soft_rnic() {
    hello_from_the_responder([RNIC, "soft"]);
    hello_from_the_responder(["soft", RNIC]);
}

/// All arrives although the sender has closed, and its messages of flow control find a closed connection.
fn closed_with_data_on_its_way(devices: [&str; 2]) {
    const LEN: usize = 20 << 20;
    let ((near, a), (far, b)) = pair_of(devices, Kind::Stream, |_| ());
    let queue = Queue::new(&near, 8).unwrap();
    let bytes = noise(LEN, 1);
    a.send(bytes.clone().into(), queue.sink(1)).unwrap();
    a.close(queue.sink(2)).unwrap();
    drop(a);
    let region = Region::alloc(&far, LEN + 1).unwrap();
    let got = b.recv_wait(&region.whole(), RecvFlags::WAITALL);
    assert_eq!(got, Ok(LEN), "{devices:?}");
    let mut copy = vec![0; LEN];
    region.read(0, &mut copy).unwrap();
    assert!(copy == bytes);
    let mut events = Vec::new();
    queue.dequeue(&mut events, 2, 2, Some(PATIENCE)).unwrap();
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Send, EventKind::Close]);
    assert_eq!(events[1].result, Ok(0));
}

#[test]
fn what_was_sent_before_a_close_arrives() {
    closed_with_data_on_its_way([RNIC; 2]);
}

#[test]
fn what_was_sent_before_a_close_arrives_with_the_soft_rnic() {
    closed_with_data_on_its_way([RNIC, "soft"]);
    closed_with_data_on_its_way(["soft", RNIC]);
}

#[test]
fn more_is_sent_than_the_queue_of_an_rnic_holds() {
    const COUNT: usize = 4000;
    let ((near, a), (far, b)) = pair_of([RNIC; 2], Kind::SeqPacket, |o| o.credits = 2000);
    let queue = Queue::new(&near, COUNT).unwrap();
    for i in 0..COUNT {
        let message = noise(i % 300, i as u64);
        a.send(message.into(), queue.sink(i as u64)).unwrap();
    }
    let memory = Region::alloc(&far, 300).unwrap().whole();
    for i in 0..COUNT {
        let got = b.recv_message_wait(&memory, RecvFlags::empty());
        assert_eq!(got, Ok((i % 300, false)));
        assert!(
            memory.to_vec()[..i % 300] == noise(i % 300, i as u64),
            "{i}"
        );
    }
}

#[test]
fn the_end_of_the_peer_ends_the_operations() {
    let ((near, a), (_far, b)) = pair_of([RNIC; 2], Kind::Stream, |_| ());
    let queue = Queue::new(&near, 8).unwrap();
    let region = Region::alloc(&near, 100_000).unwrap();
    a.recv(region.whole(), RecvFlags::empty(), queue.sink(1))
        .unwrap();
    drop(b);
    let mut events = Vec::new();
    queue.dequeue(&mut events, 1, 1, Some(PATIENCE)).unwrap();
    assert_eq!(events[0].result, Ok(0), "the end of the stream");
    let ready = a.poll_wait(Ready::OUT, Some(PATIENCE)).unwrap();
    assert!(ready.contains(Ready::OUT));
    // The peer is gone; some send finds out.
    let end = std::time::Instant::now() + PATIENCE;
    while a.send_wait(vec![1; 100].into()).is_ok() {
        assert!(std::time::Instant::now() < end);
        a.poll_wait(Ready::HUP, Some(Duration::from_millis(10)))
            .unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    rnic();
    let device = Device::open().unwrap();
    let missing = Context::with(device, Choice::Named("mlx5_9".into()));
    let error = missing.err().expect("an error").to_string();
    assert!(error.contains("there is no RDMA device mlx5_9"), "{error}");

    let context = on(RNIC);
    let listener = Socket::new(&context, false, Kind::SeqPacket).unwrap();
    listener.bind(any_port()).unwrap();
    listener.listen(4).unwrap();
    let addr = listener.local_addr().unwrap();
    let stream = Socket::new(&context, false, Kind::Stream).unwrap();
    assert_eq!(stream.connect_wait(addr), Err(Errno::PROTOTYPE));

    drop(listener);
    let late = Socket::new(&context, false, Kind::Stream).unwrap();
    assert_eq!(late.connect_wait(addr), Err(Errno::CONNREFUSED));
}

/// Runs a test of this program that is ignored, since it takes the device away from all others.
fn alone(test: &str) {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", test, "--ignored", "--nocapture"]);
    let done = program.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the device fails: run by the test below"]
fn failing_device() {
    let context = on(RNIC);
    let listener = Socket::new(&context, false, Kind::Stream).unwrap();
    listener.bind(any_port()).unwrap();
    listener.listen(4).unwrap();
    let queue = Queue::new(&context, 8).unwrap();
    listener.accept(queue.sink(1)).unwrap();
    listener.poll(Ready::IN, queue.sink(2)).unwrap();

    let address = any_port();
    let other = weft_nic::cm::Listener::bind(address).unwrap();
    let waits = thread::spawn(move || other.request(Some(PATIENCE)).map(|came| came.is_some()));
    weft_nic::cm::Listener::bind(address)
        .unwrap()
        .context()
        .unwrap()
        .fail();

    let mut events = Vec::new();
    queue.dequeue(&mut events, 2, 2, Some(PATIENCE)).unwrap();
    assert_eq!(events.len(), 2);
    for event in events {
        assert!(event.result.is_err(), "{:?}", event.result);
    }
    let error = waits.join().unwrap().expect_err("the device has failed");
    assert!(error.to_string().contains("was removed"), "{error}");
    let late = listener.accept_wait(Some(PATIENCE));
    assert!(late.is_err_and(|errno| errno != Errno::AGAIN));
    assert!(listener.poll_wait(Ready::IN, Some(PATIENCE)).is_err());
    assert_eq!(listener.ready(), Ready::IN | Ready::ERR);
}

#[test]
fn listeners_hear_of_a_device_that_fails() {
    alone("failing_device");
}

/// A thread of this process finds no memory for its stack.
#[test]
#[ignore = "takes the memory away: run by the test below"]
fn no_thread() {
    let context = on(RNIC);
    let queue = Queue::new(&context, 1).unwrap();
    let socket = Socket::new(&context, false, Kind::Stream).unwrap();
    let connect = |memory| {
        let limit = Rlimit {
            current: memory,
            maximum: None,
        };
        setrlimit(Resource::As, limit).unwrap();
        socket.connect(any_port(), queue.sink(1))
    };
    // No memory more than what the allocator has.
    assert_eq!(connect(Some(0)), Err(Errno::AGAIN));
    assert_eq!(connect(None), Ok(()), "the queue has room for one");
}

#[test]
fn a_connect_without_a_thread_keeps_no_place_in_the_queue() {
    alone("no_thread");
}

/// In the guest only: nobody removes the devices of this machine.
#[test]
fn a_device_that_is_removed_ends_its_connections_and_may_come_back() {
    if std::env::var_os("WEFT_TEST_RNIC").is_none() {
        return;
    }
    let (device, _) = rnic();
    let link = |args: &[&str]| {
        let mut rdma = Command::new("rdma");
        let status = rdma
            .args(["link", args[0], device])
            .args(&args[1..])
            .status();
        assert!(status.unwrap().success(), "{args:?}");
    };
    let context = on(RNIC);
    let (a, b) = connected(&context, &context, Kind::Stream, |_| ());
    let queue = Queue::new(&context, 8).unwrap();
    let region = Region::alloc(&context, 100_000).unwrap();
    let receive = |socket: &Socket, token| {
        let memory = region.slice(token as usize * 50_000, 50_000).unwrap();
        socket.recv(memory, RecvFlags::WAITALL, queue.sink(token))
    };
    receive(&a, 0).unwrap();
    receive(&b, 1).unwrap();
    link(&["delete"]);
    let mut events = Vec::new();
    queue.dequeue(&mut events, 2, 2, Some(PATIENCE)).unwrap();
    assert_eq!(events.len(), 2);
    for event in events {
        assert!(event.result.is_err(), "{:?}", event.result);
    }
    link(&["add", "type", &device[..3], "netdev", "eth0"]);
    let (a, b) = connected(&context, &context, Kind::Stream, |_| ());
    let sent = thread::spawn(move || a.send_wait(noise(50_000, 1).into()));
    let memory = region.slice(0, 50_000).unwrap();
    assert_eq!(b.recv_wait(&memory, RecvFlags::WAITALL), Ok(50_000));
    assert_eq!(sent.join().unwrap(), Ok(50_000));
    assert!(memory.to_vec() == noise(50_000, 1));
}
