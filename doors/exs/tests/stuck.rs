//! Peers in shared memory that stay in memory opened to them, or stop there: the operation still ends in time, its memory belongs to the program
//! again, and other connections continue meanwhile.

#[allow(unreachable_pub, dead_code)] // not all of it is needed here
#[path = "../../../tests/conformance/src/marks.rs"]
mod marks;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, context, listener};
use crate::raw::{greet, heard, hello, say};
use rustix::process::Pid;
use weft_exs::{
    Context, Design, Errno, Event, Kind, Memory, Mode, Queue, RawMemory, Ready, RecvFlags, Region,
    Socket,
};
use weft_verbs::cm::Connection;
use weft_verbs::{Access, Cq, Device, LocalMode, Mr, Pd, RemoteAddr, SendWr, Wc, WcStatus};
use weft_wire::exs::{Body, Hello, Transfer};

const KINDS: [(Kind, Design); 3] = [
    (Kind::Stream, Design::Advert),
    (Kind::SeqPacket, Design::Advert),
    (Kind::SeqPacket, Design::Source),
];
const LEN: usize = 100_000;
/// Longer than any of the waits, but finite.
const BOUND: Duration = Duration::from_secs(10);
/// The tests identify segments by the time they appear, so only one test runs at a time.
static TURN: Mutex<()> = Mutex::new(());

/// A peer that speaks verbs.
struct Liar {
    conn: Connection,
    cq: Cq,
    pd: Pd,
    sink: Mr,
    segment: u64,
}

fn liar(to: &Socket, kind: Kind, design: Design) -> Liar {
    let device = Device::builder().local(LocalMode::Require);
    let pd = device.open().unwrap().alloc_pd().unwrap();
    let cq = pd.device().create_cq(4096, None).unwrap();
    let hello = Hello {
        kind: match kind {
            Kind::Stream => weft_wire::exs::Kind::Stream,
            Kind::SeqPacket => weft_wire::exs::Kind::SeqPacket(design),
        },
        immediate: false,
        ..hello()
    };
    let before = marks::segments();
    let (conn, sink) = greet(to, &pd, &cq, &hello);
    let mut segments = marks::segments().into_iter();
    let segment = segments.rfind(|s| !before.contains(s)).unwrap();
    Liar {
        conn,
        cq,
        pd,
        sink,
        segment,
    }
}

impl Liar {
    fn next(&self) -> Wc {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.wait(&mut wc, Some(PATIENCE)).unwrap(), 1);
        assert_eq!(wc[0].status, WcStatus::Success);
        wc[0]
    }

    /// The memory that the victim opens, and its key.
    fn hear(&self) -> (RemoteAddr, u64) {
        loop {
            let wc = self.next();
            let (addr, rkey, index) = match heard(&self.sink, &wc).body {
                Body::Advert(advert) => (advert.memory.addr, advert.memory.rkey, 0),
                Body::PktAdvert(p) | Body::Source(p) => (p.addr, p.rkey, p.index),
                _ => continue,
            };
            return (RemoteAddr { addr, rkey }, index);
        }
    }

    /// End an operation of the victim in order, and stay in its memory: a receive on a socket of this kind, or a send.
    fn stay(&self, receives: Option<Kind>) {
        let (open, index) = self.hear();
        let len = LEN as u32;
        let Some(kind) = receives else {
            marks::put(self.segment, open.rkey);
            return self.say(Body::SourceDone { index, len });
        };
        let data = self.pd.reg_mr(vec![9; LEN], Access::LOCAL_WRITE).unwrap();
        let write = SendWr::write(1 << 20, open).sge(data.whole()).signaled();
        self.conn.qp.post_send_one(write).unwrap();
        while self.next().wr_id != 1 << 20 {}
        marks::put(self.segment, open.rkey);
        let transfer = match kind {
            Kind::Stream => Transfer::Direct,
            Kind::SeqPacket => Transfer::Packet { truncated: false },
        };
        self.say(Body::Wrote { transfer, len });
    }

    fn say(&self, body: Body) {
        say(&self.conn.qp, 0, body);
    }
}

/// An unrelated connection.
struct Bystander(Socket, Socket);

impl Bystander {
    fn new(context: &Context) -> Bystander {
        let listener = listener(context, Kind::Stream, |_| ());
        let near = Socket::new(context, false, Kind::Stream).unwrap();
        near.connect_wait(listener.local_addr().unwrap()).unwrap();
        Bystander(near, listener.accept_wait(Some(PATIENCE)).unwrap())
    }

    fn ping(&self) {
        for (from, to) in [(&self.0, &self.1), (&self.1, &self.0)] {
            assert_eq!(from.send_wait(Memory::from(vec![7; 9])), Ok(9));
            let memory = Memory::Raw(RawMemory::leak(vec![0; 9]));
            assert_eq!(to.recv_wait(&memory, RecvFlags::WAITALL), Ok(9));
        }
    }

    /// The next event, in time, while the connection works.
    fn beside(&self, queue: &Queue) -> Event {
        let start = Instant::now();
        let mut out = Vec::new();
        loop {
            self.ping();
            let _ = queue.dequeue(&mut out, 1, 0, None);
            if let Some(event) = out.pop() {
                return event;
            }
            assert!(start.elapsed() < BOUND, "no event");
        }
    }
}

/// Memory of every kind, each with its region.
fn memories(context: &Context) -> Vec<(&'static str, Memory, Option<Arc<Region>>)> {
    let raw = || RawMemory::leak(vec![0; LEN]);
    let registered = Region::register(context, &raw()).unwrap();
    let lent = Region::alloc(context, LEN).unwrap();
    vec![
        ("raw", Memory::Raw(raw()), None),
        ("registered", registered.whole(), Some(registered)),
        ("lent", lent.whole(), Some(lent)),
        ("owned", Memory::from(vec![0; LEN]), None),
    ]
}

/// Runs `wait` on a separate thread, with a time limit.
fn in_time<T: Send + 'static>(what: &str, wait: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(wait()));
    let out = told.recv_timeout(BOUND);
    out.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// The region can be deregistered.
fn deregister(region: Option<Arc<Region>>) {
    let over = in_time("exs_mderegister", || region.map(Region::deregister));
    assert!(over.is_none_or(|over| over.is_ok()));
}

/// A peer that claims to be still in the memory of an operation that it has ended in order.
#[test]
fn a_peer_that_never_leaves_an_operation_does_not_keep_it() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let context = context(LocalMode::Require);
    let bystander = Bystander::new(&context);
    let mut cases = Vec::new();
    for (kind, design) in KINDS {
        let listener = listener(&context, kind, |o| o.design = design);
        for (what, memory, region) in memories(&context) {
            let what = format!("{kind:?}, {design:?}, {what}");
            let liar = liar(&listener, kind, design);
            let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
            let queue = Queue::new(&context, 8).unwrap();
            let sink = queue.sink(1);
            if design == Design::Source {
                socket.send(memory, sink).unwrap();
                liar.stay(None);
            } else {
                socket.recv(memory, RecvFlags::empty(), sink).unwrap();
                liar.stay(Some(kind));
            }
            cases.push((what, design, liar, socket, queue, region));
        }
    }
    for (what, design, _liar, socket, queue, region) in cases {
        let event = bystander.beside(&queue);
        assert_eq!(event.result, Ok(LEN), "{what}");
        let bytes = event.memory.unwrap().to_vec();
        let byte = if design == Design::Source { 0 } else { 9 };
        assert!(bytes == vec![byte; LEN], "{what}");
        deregister(region);
        // The peer has lost its connection for that.
        let ready = socket.poll_wait(Ready::HUP, Some(BOUND));
        assert!(ready.is_ok_and(|r| r.contains(Ready::HUP)), "{what}");
    }
}

/// A short send is sent at once, but reported after an earlier send whose memory the peer still uses.
#[test]
fn a_short_send_does_not_end_before_one_that_waits_for_its_memory() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // On a busy machine the peer can lose its connection before anything is sent behind the first send.
    assert!(
        (0..10).any(|_| short_sends_end_in_order()),
        "nothing was sent behind it"
    );
}

/// Returns false if nothing was sent behind the first one.
fn short_sends_end_in_order() -> bool {
    let context = context(LocalMode::Require);
    let (kind, design) = (Kind::SeqPacket, Design::Source);
    let listener = listener(&context, kind, |o| o.design = design);
    let liar = liar(&listener, kind, design);
    let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
    let queue = Queue::new(&context, 64).unwrap();
    let send = |len: usize, token| {
        let sink = queue.sink(token);
        socket.send(Memory::from(vec![0; len]), sink)
    };
    send(LEN, 0).unwrap();
    liar.stay(None);
    let mut sent = 1;
    let mut events: Vec<Event> = Vec::new();
    let begun = Instant::now();
    // The peer loses its connection because it stays; after that nothing is sent.
    while events.is_empty() && sent < 60 && begun.elapsed() < BOUND {
        if send(9, sent).is_err() {
            break;
        }
        sent += 1;
        queue
            .dequeue(&mut events, 64, 1, Some(Duration::from_millis(20)))
            .unwrap();
    }
    if sent <= 2 {
        return false;
    }
    while events.len() < sent as usize {
        assert!(begun.elapsed() < 2 * BOUND, "{events:?}");
        queue
            .dequeue(&mut events, 64, 1, Some(Duration::from_millis(20)))
            .unwrap();
    }
    let tokens: Vec<u64> = events.iter().map(|event| event.token).collect();
    assert_eq!(tokens, (0..sent).collect::<Vec<_>>());
    true
}

/// Another process, which sends without end.
struct Sender(Child);

impl Sender {
    fn start(kind: Kind, design: Design, to: &Socket) -> Sender {
        let addr = to.local_addr().unwrap().to_string();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stuck::sender", "--ignored", "--nocapture", "-q"])
            .env("WEFT_SENDS_TO", addr)
            .env("WEFT_SENDS", format!("{kind:?} {design:?}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("@connected")));
        Sender(child)
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the other process"]
fn sender() {
    let Ok(to) = std::env::var("WEFT_SENDS_TO") else {
        return;
    };
    let what = std::env::var("WEFT_SENDS").unwrap();
    let kind = if what.starts_with("Stream") {
        Kind::Stream
    } else {
        Kind::SeqPacket
    };
    let context = context(LocalMode::Require);
    let socket = Socket::new(&context, false, kind).unwrap();
    socket
        .set_options(|o| {
            o.mode = Mode::Direct;
            o.design = Design::Advert;
        })
        .unwrap();
    socket.connect_wait(to.parse().unwrap()).unwrap();
    println!("@connected");
    let region = Region::alloc(&context, 16 << 20).unwrap();
    while socket.send_wait(region.whole()).is_ok() {}
}

/// A peer stops in the middle of a write, and the program closes the socket: the receive ends, and the program owns its memory again.
#[test]
fn a_peer_that_stops_does_not_keep_an_operation() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    const LARGE: usize = 16 << 20;
    for (kind, design) in &KINDS[..2] {
        for registered in [false, true] {
            let context = context(LocalMode::Require);
            let listener = listener(&context, *kind, |o| {
                o.mode = Mode::Direct;
                o.design = *design;
            });
            let before = marks::segments();
            let sender = Sender::start(*kind, *design, &listener);
            let socket = listener.accept_wait(Some(PATIENCE)).unwrap();
            let mut segments = marks::segments();
            segments.retain(|s| !before.contains(s));
            let raw = RawMemory::leak(vec![0; LARGE]);
            let region = registered.then(|| Region::register(&context, &raw).unwrap());
            let memory = || match &region {
                Some(region) => region.whole(),
                None => Memory::Raw(raw.clone()),
            };
            let bystander = Bystander::new(&context);
            let queue = Queue::new(&context, 64).unwrap();
            let recv = |token| {
                let sink = queue.sink(token);
                socket.recv(memory(), RecvFlags::WAITALL, sink).unwrap();
            };
            // Two at a time, so that the peer always has a target.
            (0..2).for_each(recv);
            let (stop, stopped) = mpsc::channel::<()>();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    marks::stop_inside(Pid::from_child(&sender.0), &segments, None);
                    drop(stop);
                });
                for token in 2.. {
                    let mut out = Vec::new();
                    let _ = queue.dequeue(&mut out, 1, 0, Some(Duration::from_millis(1)));
                    if stopped.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                        break;
                    }
                    if !out.is_empty() {
                        recv(token);
                    }
                }
            });
            socket.close(queue.sink(1 << 32)).unwrap();
            // The receives, and then the close.
            let mut ended = Vec::new();
            while !ended.contains(&(1 << 32)) {
                let event = bystander.beside(&queue);
                let fair = matches!(
                    event.result,
                    Ok(_) | Err(Errno::CANCELED | Errno::CONNRESET)
                );
                assert!(fair, "{event:?}");
                ended.push(event.token);
            }
            assert_eq!(queue.outstanding(), 0, "{ended:?}");
            deregister(region);
            bystander.ping();
        }
    }
}
