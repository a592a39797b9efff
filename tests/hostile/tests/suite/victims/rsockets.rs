//! An echo server on rsockets, which also opens the middle third of a mapping to each peer.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_rsockets::{RecvFlags, Sink, Socket, Source};
use weft_verbs::{Device, RawMemory};

use super::{PATIENCE, Pool, Victim, canaries, changed_bytes};

const THIRD: usize = 4096;
const PIECE: usize = 16 << 10;

/// A connection that is being served.
struct Live {
    socket: Socket,
    port: u16,
    memory: RawMemory,
}

struct Rsockets {
    device: Device,
    listener: Socket,
    pool: Pool,
    live: Mutex<Vec<Live>>,
    heap: Vec<u8>,
    broken: Mutex<Vec<String>>,
}

pub(super) fn start() -> Arc<dyn Victim> {
    let device = Device::builder().open().expect("a device");
    let listener = Socket::new(&device, false).expect("a socket");
    listener.set_options(|options| options.maps = 4);
    listener
        .bind("127.0.0.1:0".parse().expect("an address"))
        .expect("an address");
    listener.listen(64).expect("it listens");
    let victim = Arc::new(Rsockets {
        device,
        listener,
        pool: Pool::default(),
        live: Mutex::default(),
        heap: canaries(0, 16 * THIRD),
        broken: Mutex::default(),
    });
    let accepts = victim.clone();
    std::thread::spawn(move || {
        loop {
            // One that has gone again is no reason to stop.
            let Ok((socket, _)) = accepts.listener.accept() else {
                continue;
            };
            let victim = accepts.clone();
            std::thread::spawn(move || victim.echo(&socket));
        }
    });
    victim
}

impl Rsockets {
    fn echo(&self, socket: &Socket) {
        let memory = self.pool.take(3 * THIRD);
        self.live.lock().expect("no panic under it").push(Live {
            socket: socket.clone(),
            port: socket.peer_addr().map_or(0, |addr| addr.port()),
            memory: memory.clone(),
        });
        let middle = memory.slice(THIRD, THIRD).expect("in bounds");
        // Fails where the peer has room for no mapping.
        let mapped = socket.map(&middle, true, Some(0)).is_ok();
        let mut piece = vec![0; PIECE];
        while let Ok(n @ 1..) = socket.recv(&mut [Sink::Bytes(&mut piece)], RecvFlags::empty()) {
            if socket.send(&[Source::Bytes(&piece[..n])], false).is_err() {
                break;
            }
        }
        if mapped {
            let _ = socket.unmap(middle.as_ptr() as usize, THIRD);
        }
        socket.close();
        let mut live = self.live.lock().expect("no panic under it");
        live.retain(|live| live.memory.as_ptr() != memory.as_ptr());
        self.broken
            .lock()
            .expect("no panic under it")
            .extend(around(&memory));
        self.pool.give(memory);
    }
}

fn around(memory: &RawMemory) -> Option<String> {
    changed_bytes("around a mapping", &memory.to_vec(), &[(THIRD, 2 * THIRD)])
}

impl Victim for Rsockets {
    fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("an address")
    }

    fn broken(&self) -> Vec<String> {
        let mut broken = self.broken.lock().expect("no panic under it").clone();
        broken.extend(changed_bytes("the heap", &self.heap, &[]));
        let live = self.live.lock().expect("no panic under it");
        broken.extend(live.iter().filter_map(|live| around(&live.memory)));
        broken
    }

    fn dial(&self, addr: SocketAddr) -> String {
        let socket = Socket::new(&self.device, false).expect("a socket");
        // Its end, when this returns, waits for nobody.
        socket.set_linger(Some(Duration::ZERO));
        match socket.connect(addr) {
            Ok(()) => "connected".into(),
            Err(e) => e.to_string(),
        }
    }

    fn leave(&self, ports: &[u16]) -> Duration {
        let start = Instant::now();
        let mut closing = Vec::new();
        for live in &*self.live.lock().expect("no panic under it") {
            if ports.contains(&live.port) {
                let socket = live.socket.clone();
                // What a peer does not take is not waited for: how long a close waits else, nothing documents.
                socket.set_linger(Some(Duration::ZERO));
                closing.push(std::thread::spawn(move || socket.close()));
            }
        }
        for thread in closing {
            thread.join().expect("no panic");
        }
        // Its thread has ended the mapping too.
        let there = |port| {
            let live = self.live.lock().expect("no panic under it");
            live.iter().any(|live| live.port == port)
        };
        while ports.iter().any(|port| there(*port)) && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        start.elapsed()
    }
}
