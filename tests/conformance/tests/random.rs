//! Seeded random peers: valid traffic, mutated. Thousands of connections against one device whose memory is watched.
//!
//! `WEFT_HOSTILE_SEED` and `WEFT_HOSTILE_CONNECTIONS` set the seed and the number of connections.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use weft_conformance::bed::{ALL, PATIENCE, Rng, assert_bytes, pattern, take, until};
use weft_conformance::gauge::{descriptors, resident};
use weft_conformance::local::Local;
use weft_conformance::raw::{
    Raw, atomic_request, atomic_response, read_request, send, send_invalidate, start_frame, tagged,
    untagged, write,
};
use weft_conformance::victim::{Bystander, Wire};
use weft_conformance::waits::alone;
use weft_verbs::cm::{ConnParam, Listener};
use weft_verbs::{
    Access, Cq, Device, LinkOptions, Mr, Pd, QpInit, RecvWr, RemoteAddr, SendWr, Wc, WcStatus,
};
use weft_wire::mpa::FrameKind;
use weft_wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest, TermError, Terminate,
};

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// Bytes of each region; only the middle third of the windowed one may change.
const REGION: usize = 12_288;
const THIRD: usize = REGION / 3;
const DEPTH: u16 = 4;

/// The raw side's knowledge of a victim.
struct Target {
    window: u32,
    region: u32,
    guarded: u32,
    foreign: u32,
}

/// Memory that no peer may change, and some that it may.
struct Memory {
    /// No remote rights; windows are bound to its middle third.
    guarded: Mr,
    /// Every right: a peer may write anything here.
    open: Mr,
    /// Every right, in another protection domain.
    foreign: Mr,
    /// Receives and the sinks of reads.
    private: Mr,
}

impl Memory {
    fn new(pd: &Pd, other: &Pd) -> Memory {
        let mr = |pd: &Pd, seed, access| {
            let bytes = pattern(seed, REGION);
            pd.reg_mr(bytes, access).expect("a region")
        };
        Memory {
            guarded: mr(pd, 1, Access::LOCAL_WRITE | Access::MW_BIND),
            open: mr(pd, 2, ALL),
            foreign: mr(other, 3, ALL),
            private: mr(pd, 4, Access::LOCAL_WRITE),
        }
    }

    fn assert_guards(&self) {
        let want = pattern(1, REGION);
        assert_bytes(&self.guarded, 0, &want[..THIRD], "before the window");
        let after = 2 * THIRD;
        assert_bytes(&self.guarded, after, &want[after..], "after the window");
        assert_bytes(&self.foreign, 0, &pattern(3, REGION), "another PD");
        // Receives and sinks use the first half; peers place nothing beyond them.
        let half = REGION / 2;
        let want = pattern(4, REGION);
        assert_bytes(&self.private, half, &want[half..], "the private half");
    }
}

/// Valid traffic, in order: the input of a mutation.
struct Traffic<'a> {
    rng: &'a mut Rng,
    target: &'a Target,
    send_msn: u32,
    request_msn: u32,
}

impl Traffic<'_> {
    fn place(&mut self) -> (u32, u64) {
        let len = THIRD - 1024;
        let off = self.rng.below(len / 8) as u64 * 8;
        if self.rng.chance(2) {
            (self.target.window, THIRD as u64 + off)
        } else {
            (self.target.region, off)
        }
    }

    fn message(&mut self) -> Vec<Vec<u8>> {
        let len = self.rng.pick(&[0, 1, 7, 8, 63, 64, 300, 1000]);
        let payload = self.rng.bytes(len);
        let (stag, to) = self.place();
        match self.rng.below(8) {
            0 | 1 => vec![write(stag, to, &payload)],
            2 => {
                let cut = self.rng.below(len + 1);
                vec![
                    tagged(Opcode::Write, false, stag, to, &payload[..cut]),
                    tagged(Opcode::Write, true, stag, to + cut as u64, &payload[cut..]),
                ]
            }
            3 => {
                let msn = self.send_msn;
                self.send_msn += 1;
                vec![send(msn, &payload[..len.min(64)])]
            }
            4 => {
                let msn = self.send_msn;
                self.send_msn += 1;
                let (cut, len) = (len.min(64) / 2, len.min(64));
                vec![
                    untagged(Opcode::SendSe, false, msn, 0, &payload[..cut]),
                    untagged(Opcode::SendSe, true, msn, cut as u32, &payload[cut..len]),
                ]
            }
            5 => {
                let msn = self.send_msn;
                self.send_msn += 1;
                vec![untagged(Opcode::Immediate, true, msn, 0, &[5; 8])]
            }
            6 => {
                let msn = self.request_msn;
                self.request_msn += 1;
                let request = ReadRequest {
                    sink_stag: 1,
                    sink_to: 0,
                    size: len as u32,
                    src_stag: stag,
                    src_to: to,
                };
                vec![read_request(msn, &request)]
            }
            _ => {
                let msn = self.request_msn;
                self.request_msn += 1;
                let op =
                    self.rng
                        .pick(&[AtomicOp::FetchAdd, AtomicOp::Swap, AtomicOp::CompareSwap]);
                let request = AtomicRequest {
                    op,
                    request_id: msn,
                    stag,
                    to,
                    add_or_swap: self.rng.number(),
                    add_or_swap_mask: u64::MAX,
                    compare: 0,
                    compare_mask: u64::MAX,
                };
                vec![atomic_request(msn, &request)]
            }
        }
    }

    /// A well-formed but invalid ULPDU.
    fn odd(&mut self) -> Vec<u8> {
        let stag = self.rng.pick(&[
            self.target.guarded,
            self.target.foreign,
            self.target.window,
            self.target.region,
            self.target.window ^ 0xff,
        ]);
        let edge = self.rng.pick(&[
            0,
            THIRD as u64 - 1,
            2 * THIRD as u64 - 3,
            REGION as u64 - 1,
            REGION as u64,
            u64::MAX,
            u64::MAX - 7,
        ]);
        let len = self.rng.pick(&[0, 1, 4, 8, 5000, 60_000]);
        let msn = self.rng.pick(&[0, 1, self.send_msn, u32::MAX]);
        match self.rng.below(8) {
            0 => write(stag, edge, &self.rng.bytes(len)),
            1 => tagged(
                Opcode::ReadResponse,
                self.rng.chance(2),
                stag,
                edge,
                &self.rng.bytes(len),
            ),
            2 => send_invalidate(msn, stag, &[]),
            3 => read_request(
                msn,
                &ReadRequest {
                    sink_stag: stag,
                    sink_to: edge,
                    size: len as u32,
                    src_stag: stag,
                    src_to: edge,
                },
            ),
            4 => atomic_response(
                msn,
                &AtomicResponse {
                    request_id: msn,
                    original: edge,
                },
            ),
            5 => {
                let mut body = [0; Terminate::MAX_LEN];
                let error = TermError::from_parts(
                    self.rng.below(16) as u8,
                    self.rng.below(16) as u8,
                    self.rng.below(256) as u8,
                );
                let n = Terminate::bare(error).emit(&mut body);
                untagged(
                    Opcode::Terminate,
                    true,
                    self.rng.pick(&[1, msn]),
                    0,
                    &body[..n],
                )
            }
            6 => send(msn, &self.rng.bytes(len)),
            _ => {
                let len = self.rng.below(200);
                self.rng.bytes(len)
            }
        }
    }
}

/// The bytes of one connection after start-up.
fn attack(rng: &mut Rng, target: &Target, raw: &Raw) -> Vec<u8> {
    let mut traffic = Traffic {
        rng,
        target,
        send_msn: 1,
        request_msn: 1,
    };
    let mut ulpdus: Vec<Vec<u8>> = Vec::new();
    for _ in 0..=traffic.rng.below(12) {
        ulpdus.extend(traffic.message());
    }
    // Mutations of whole segments, each with a good CRC.
    for _ in 0..traffic.rng.below(3) {
        let at = traffic.rng.below(ulpdus.len());
        match traffic.rng.below(7) {
            0 => {
                let bit = traffic.rng.below(ulpdus[at].len() * 8);
                if let Some(byte) = ulpdus[at].get_mut(bit / 8) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            1 => {
                let len = traffic.rng.below(ulpdus[at].len() + 1);
                ulpdus[at].truncate(len);
            }
            2 => {
                let more = traffic.rng.below(3000);
                let more = traffic.rng.bytes(more);
                ulpdus[at].extend(more);
            }
            3 => {
                let again = ulpdus[at].clone();
                ulpdus.insert(at, again);
            }
            4 => {
                let other = traffic.rng.below(ulpdus.len());
                ulpdus.swap(at, other);
            }
            5 => {
                let odd = traffic.odd();
                ulpdus.insert(at, odd);
            }
            _ => {
                ulpdus.remove(at);
                if ulpdus.is_empty() {
                    ulpdus.push(traffic.odd());
                }
            }
        }
    }
    let mut bytes: Vec<u8> = ulpdus.iter().flat_map(|ulpdu| raw.framed(ulpdu)).collect();
    // Mutations of the stream: the CRC, where there is one, must find them.
    if rng.chance(4) {
        for _ in 0..=rng.below(3) {
            let at = rng.below(bytes.len());
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
        }
    }
    if rng.chance(4) {
        let len = rng.below(bytes.len());
        bytes.truncate(len);
    }
    bytes
}

fn param(crc: bool) -> ConnParam {
    ConnParam {
        ird: DEPTH,
        ord: DEPTH,
        options: LinkOptions {
            crc,
            peer_to_peer: false,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

/// One connection of a hostile peer, from its start-up to its end, with all checks.
fn connection(
    rng: &mut Rng,
    device: &Device,
    listener: &Listener,
    (pd, memory, cq): (&Pd, &Memory, &Cq),
    wire: Wire,
) {
    let crc = wire.crc();
    let mut frame = start_frame(FrameKind::Request, crc, DEPTH).emit();
    let bad_start = rng.chance(16);
    if bad_start {
        let at = rng.below(frame.len());
        frame[at] ^= 1 << rng.below(8);
        if rng.chance(2) {
            frame.truncate(at + 1);
        }
    }
    let mut raw = Raw::connect(listener.local_addr());
    raw.crc = crc;
    if wire == Wire::Local {
        raw.local = Some(Local::knock(&raw.stream).expect("a welcome"));
    }
    raw.send_start(&frame);
    if bad_start {
        // In any case: a request, or a frame that is rejected when we close.
        raw.finish();
    }
    let patience = if bad_start {
        Duration::from_millis(20)
    } else {
        PATIENCE
    };
    let Some(request) = listener.next_request(Some(patience)) else {
        assert!(bad_start, "a good request in time");
        return;
    };
    let mut init = QpInit::new(cq, cq);
    (init.max_send_wr, init.max_recv_wr) = (16, 16);
    let qp = pd.create_qp(&init).expect("a QP");
    let (tx, ended) = mpsc::channel();
    qp.on_end(move |reason| {
        let _ = tx.send(reason);
    });
    for id in 0..16 {
        let sge = memory.private.sge(id as usize * 128, 64);
        qp.post_recv(&[RecvWr::new(id).sge(sge)]).expect("post");
    }
    let qp_num = qp.num();
    let Ok(conn) = request.accept(qp, &param(crc)) else {
        assert!(bad_start, "a good peer is accepted");
        // It was connected and ended at once, or never: all receives are flushed, or none.
        let mut flushed = [Wc::default(); 17];
        let n = cq.poll(&mut flushed).expect("no overrun");
        assert!(n == 0 || n == 16, "{n} completions");
        for (wc, id) in flushed[..n].iter().zip(0..) {
            let what = (wc.wr_id, wc.status, wc.qp_num);
            assert_eq!(what, (id, WcStatus::WrFlushErr, qp_num));
        }
        return;
    };
    if !bad_start {
        assert!(raw.reply());
        raw.send_ulpdus(&[write(0, 0, &[])]);
    }
    let mw = pd.alloc_mw().expect("a window");
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let (bind, window) = mw.bind(100, &memory.guarded, THIRD, THIRD, rights);
    // The victim's own traffic: a read and an atomic, which the peer may answer, or try to.
    let nowhere = RemoteAddr { addr: 0, rkey: 0 };
    conn.qp
        .post_send(&[
            bind.signaled(),
            SendWr::read(101, nowhere)
                .sge(memory.private.sge(4096, 256))
                .signaled(),
            SendWr::send(102).inline(b"hello").signaled(),
            SendWr::fetch_add(103, nowhere, 1)
                .sge(memory.private.sge(4352, 8))
                .signaled(),
        ])
        .expect("post");
    if !bad_start {
        let first = take(cq, 1)[0];
        assert_eq!((first.wr_id, first.status), (100, WcStatus::Success));
        let target = Target {
            window,
            region: memory.open.rkey(),
            guarded: memory.guarded.rkey(),
            foreign: memory.foreign.rkey(),
        };
        let bytes = attack(rng, &target, &raw);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let n = rng.pick(&[1, 7, 100, 5000, usize::MAX]).min(rest.len());
            raw.send(&rest[..n]);
            rest = &rest[n..];
        }
        match rng.below(3) {
            // A reset, if bytes are unread.
            0 => drop(raw),
            // The end of the stream, and the peer does not read.
            1 => raw.finish(),
            // The same, and the peer reads to the end.
            _ => {
                raw.finish();
                raw.read_to_end();
            }
        }
    }
    let reason = ended.recv_timeout(PATIENCE);
    assert!(reason.is_ok(), "a stuck connection: {:?}", conn.qp.state());
    // Every request has exactly one completion: 16 receives, and the sends of which we have seen the first.
    let mut seen = [0; 20];
    for wc in take(cq, if bad_start { 20 } else { 19 }) {
        assert_eq!(wc.qp_num, conn.qp.num());
        seen[if wc.wr_id < 16 {
            wc.wr_id
        } else {
            wc.wr_id - 84
        } as usize] += 1;
    }
    seen[16] = 1;
    assert_eq!(seen, [1; 20], "one completion each");
    assert_eq!(cq.poll(&mut [Wc::default(); 1]), Ok(0));
    memory.assert_guards();
    while device.get_async_event(Some(Duration::ZERO)).is_some() {}
}

/// Prints the connection's parameters when its test fails.
struct Note(u64, Wire, u64);

impl Drop for Note {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("worker {}, {:?}, connection {}", self.0, self.1, self.2);
        }
    }
}

/// Counts a worker's connections as finished, also after a failure.
struct Finished<'a>(&'a AtomicUsize, usize);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::Relaxed);
    }
}

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(value) => value.parse().expect("a number"),
        Err(_) => default,
    }
}

fn mutated_traffic_harms_nobody(wires: &[Wire], connections: u64) {
    const WORKERS: u64 = 4;
    // One at a time, because they measure the process's memory.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = number("WEFT_HOSTILE_SEED", 0x1337);
    let connections = number("WEFT_HOSTILE_CONNECTIONS", connections);
    println!("seed {seed}, {connections} connections");
    let device = wires[0].device();
    let bystander = Bystander::new(&device);
    bystander.ping();
    let done = AtomicUsize::new(0);
    let before = resident();
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (device, done) = (&device, &done);
            scope.spawn(move || {
                // A failed worker must not leave the bystander's thread waiting.
                let _all = Finished(done, (connections / WORKERS) as usize);
                let (pd, other) = (
                    device.alloc_pd().expect("a PD"),
                    device.alloc_pd().expect("a PD"),
                );
                let memory = Memory::new(&pd, &other);
                let cq = device.create_cq(64, None).expect("a CQ");
                let each = connections / WORKERS / wires.len() as u64;
                for wire in wires {
                    let param = param(wire.crc());
                    let listener = Listener::bind(device, ANY, 16, &param).expect("listen");
                    for i in 0..each {
                        // Each connection has its own seed: `WEFT_HOSTILE_SEED` and the number of the connection reproduce it.
                        let number = worker << 40 | u64::from(wire.crc()) << 32 | i;
                        let mut rng = Rng::new(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
                        let _note = Note(worker, *wire, i);
                        connection(&mut rng, device, &listener, (&pd, &memory, &cq), *wire);
                    }
                }
            });
        }
        scope.spawn(|| {
            while done.load(Ordering::Relaxed) < (connections / WORKERS * WORKERS) as usize {
                bystander.ping();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    });
    bystander.ping();
    until("all connections are gone", || descriptors() < 64);
    let grown = resident().saturating_sub(before);
    println!("grown by {grown} bytes");
    assert!(grown < 32 << 20, "{grown} bytes");
}

#[test]
fn over_tcp() {
    if !alone("random::over_tcp") {
        return;
    }
    mutated_traffic_harms_nobody(&[Wire::Tcp { crc: true }, Wire::Tcp { crc: false }], 4000);
}

#[test]
fn in_shared_memory() {
    if !alone("random::in_shared_memory") {
        return;
    }
    mutated_traffic_harms_nobody(&[Wire::Local], 1000);
}
