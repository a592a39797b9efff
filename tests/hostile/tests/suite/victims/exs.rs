//! An echo server on `weft_exs`. Its receives are in the middle third of a buffer: a registered region for every other connection, raw memory for
//! those between.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_exs::{
    Context, Event, EventKind, Kind, Memory, Queue, RawMemory, RecvFlags, Region, Sink, Socket,
};

use super::{PATIENCE, Pool, Victim, canaries, changed_bytes};

const THIRD: usize = 16 << 10;
const ACCEPT: u64 = 0;

enum Buffer {
    Region(Arc<Region>),
    Raw(RawMemory),
}

impl Buffer {
    fn middle(&self, len: usize) -> Memory {
        match self {
            Buffer::Region(region) => region.slice(THIRD, len).expect("in bounds"),
            Buffer::Raw(memory) => Memory::Raw(memory.slice(THIRD, len).expect("in bounds")),
        }
    }

    fn broken(&self) -> Option<String> {
        let mut now = vec![0; 3 * THIRD];
        match self {
            Buffer::Region(region) => region.read(0, &mut now).expect("in bounds"),
            Buffer::Raw(memory) => now = memory.to_vec(),
        }
        changed_bytes("around a receive", &now, &[(THIRD, 2 * THIRD)])
    }
}

struct Conn {
    socket: Socket,
    port: u16,
    buffer: Buffer,
}

struct Exs {
    kind: Kind,
    context: Context,
    listener: Socket,
    queue: Queue,
    pool: Pool,
    registered: Arc<Region>,
    conns: Mutex<HashMap<u64, Conn>>,
    broken: Mutex<Vec<String>>,
}

pub(super) fn start(kind: Kind) -> Arc<dyn Victim> {
    let context = Context::global().expect("a device");
    let listener = Socket::new(&context, false, kind).expect("a socket");
    listener
        .bind("127.0.0.1:0".parse().expect("an address"))
        .expect("an address");
    listener.listen(64).expect("it listens");
    let registered = Region::alloc(&context, THIRD).expect("memory");
    registered.write(0, &canaries(0, THIRD)).expect("in bounds");
    let victim = Arc::new(Exs {
        kind,
        queue: Queue::new(&context, 4096).expect("a queue"),
        context,
        listener,
        pool: Pool::default(),
        registered,
        conns: Mutex::default(),
        broken: Mutex::default(),
    });
    let serves = victim.clone();
    std::thread::spawn(move || serves.serve());
    victim
}

impl Exs {
    fn serve(&self) {
        let sink = |token| Sink::Queue(self.queue.clone(), token);
        let mut last = ACCEPT;
        let mut events: Vec<Event> = Vec::new();
        self.listener.accept(sink(ACCEPT)).expect("it listens");
        loop {
            self.queue
                .dequeue(&mut events, 64, 1, None)
                .expect("a queue");
            for event in events.drain(..) {
                let token = event.token;
                let goes_on = match (event.kind, event.result) {
                    (EventKind::Accept, _) => {
                        self.listener.accept(sink(ACCEPT)).expect("it listens");
                        let Some(socket) = event.accepted else {
                            continue;
                        };
                        last += 1;
                        self.take(last, socket);
                        true
                    }
                    (EventKind::Recv, Ok(n)) if n > 0 => self.with(token, |conn| {
                        conn.socket.send(conn.buffer.middle(n), sink(token)).is_ok()
                    }),
                    (EventKind::Send, Ok(_)) => self.with(token, |conn| {
                        let memory = conn.buffer.middle(THIRD);
                        conn.socket
                            .recv(memory, RecvFlags::empty(), sink(token))
                            .is_ok()
                    }),
                    _ => false,
                };
                if !goes_on {
                    self.leave(token);
                }
            }
        }
    }

    fn with(&self, token: u64, f: impl FnOnce(&Conn) -> bool) -> bool {
        let conns = self.conns.lock().expect("no panic under it");
        conns.get(&token).is_some_and(f)
    }

    fn take(&self, token: u64, socket: Socket) {
        let buffer = if token.is_multiple_of(2) {
            let region = Region::alloc(&self.context, 3 * THIRD).expect("memory");
            region.write(0, &canaries(0, 3 * THIRD)).expect("in bounds");
            Buffer::Region(region)
        } else {
            Buffer::Raw(self.pool.take(3 * THIRD))
        };
        let memory = buffer.middle(THIRD);
        let sink = Sink::Queue(self.queue.clone(), token);
        let began = socket.recv(memory, RecvFlags::empty(), sink);
        let port = socket.peer_addr().map_or(0, |addr| addr.port());
        let conn = Conn {
            socket,
            port,
            buffer,
        };
        self.conns
            .lock()
            .expect("no panic under it")
            .insert(token, conn);
        if began.is_err() {
            self.leave(token);
        }
    }

    /// A connection has one operation at a time, and that has ended: the memory is ours, and the next connection's.
    fn leave(&self, token: u64) {
        let conn = self.conns.lock().expect("no panic under it").remove(&token);
        let Some(Conn { socket, buffer, .. }) = conn else {
            return;
        };
        if let Some(broken) = buffer.broken() {
            self.broken.lock().expect("no panic under it").push(broken);
        }
        if let Buffer::Raw(memory) = buffer {
            self.pool.give(memory);
        }
        let _ = socket.close(Sink::Nobody);
    }
}

impl Victim for Exs {
    fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("an address")
    }

    fn broken(&self) -> Vec<String> {
        let mut broken = self.broken.lock().expect("no panic under it").clone();
        let mut now = vec![0; THIRD];
        self.registered.read(0, &mut now).expect("in bounds");
        broken.extend(changed_bytes("a registered region", &now, &[]));
        let conns = self.conns.lock().expect("no panic under it");
        broken.extend(conns.values().filter_map(|conn| conn.buffer.broken()));
        broken
    }

    fn dial(&self, addr: SocketAddr) -> String {
        let socket = Socket::new(&self.context, false, self.kind).expect("a socket");
        match socket.connect_wait(addr) {
            Ok(()) => "connected".into(),
            Err(e) => e.to_string(),
        }
    }

    fn leave(&self, ports: &[u16]) -> Duration {
        let start = Instant::now();
        let (tell, told) = channel();
        for conn in self.conns.lock().expect("no panic under it").values() {
            if ports.contains(&conn.port) {
                // The receive's event comes too, to whom it always comes.
                let tell = tell.clone();
                let _ = conn.socket.close(Sink::call(move |_| {
                    let _ = tell.send(());
                }));
            }
        }
        drop(tell);
        while told.recv_timeout(PATIENCE).is_ok() {}
        // And every one of these operations has had its event.
        let there = |port| {
            let conns = self.conns.lock().expect("no panic under it");
            conns.values().any(|c| c.port == port)
        };
        while ports.iter().any(|port| there(*port)) && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }
}
