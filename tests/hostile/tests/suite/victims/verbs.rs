//! A program on `weft-verbs`. Whoever connects is told six places (`weft_hostile::target::Told`) and may send orders of up to 64 bytes:
//! `E...` comes back, `R stag addr len` has it read from the peer, `W stag addr len` write there, `D` take its region `Whole` away and say how
//! long that took. Whatever else comes is dropped.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_verbs::cm::{ConnParam, Incoming, Listening};
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, RawMemory, RecvWr, RemoteAddr, SendWr, Wc, WcOpcode,
    WcStatus,
};

use super::{PATIENCE, Victim, canaries, changed, changed_bytes, fill};

const PAGE: usize = 4096;
const RECEIVES: usize = 8;
/// A receive has 64 bytes, and 64 of canary behind it.
const SLOT: usize = 128;
const ORDER: usize = 64;
/// Connections that it serves at once.
const PEERS: usize = 400;

struct Conn {
    qp: Qp,
    /// Three pages, of which the middle one is open.
    around: Mr,
    open: Mr,
    /// Gone after a `D`.
    whole: Mutex<Option<Mr>>,
    receives: Mr,
    answers: Mr,
    /// Three pages, of which the middle one is what `R` reads into and `W` writes from.
    own: Mr,
}

impl Conn {
    fn broken(&self) -> Option<String> {
        let slots: Vec<_> = (0..RECEIVES)
            .map(|n| (n * SLOT, n * SLOT + ORDER))
            .collect();
        let middle = [(PAGE, 2 * PAGE)];
        changed("around the open region", &self.around, &middle)
            .or_else(|| changed("between receives", &self.receives, &slots))
            .or_else(|| changed("between answers", &self.answers, &slots))
            .or_else(|| changed("around what it reads into", &self.own, &middle))
    }

    fn post_recv(&self, slot: usize) {
        let wr = RecvWr::new(slot as u64).sge(self.receives.sge(slot * SLOT, ORDER));
        // A full queue is a queue that is ending.
        let _ = self.qp.post_recv(&[wr]);
    }
}

struct Canaries {
    read_only: Mr,
    closed: Mr,
    buffer: Mr,
    foreign: Mr,
    raw: Mr,
    heap: Vec<u8>,
    memory: RawMemory,
}

struct Verbs {
    device: Device,
    pd: Pd,
    cq: Cq,
    addr: SocketAddr,
    _listening: Listening,
    canaries: Canaries,
    stale: u32,
    conns: Mutex<HashMap<u32, Arc<Conn>>>,
    broken: Mutex<Vec<String>>,
}

fn all() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

pub(super) fn start() -> Arc<dyn Victim> {
    let device = Device::builder().open().expect("a device");
    let pd = device.alloc_pd().expect("a domain");
    let other = device.alloc_pd().expect("another");
    let region = |pd: &Pd, access| {
        let mr = pd.alloc_mr(2 * PAGE, access).expect("memory");
        fill(&mr);
        mr
    };
    let gone = region(&pd, all());
    let stale = gone.rkey();
    drop(gone);
    let memory = RawMemory::leak(canaries(0, 2 * PAGE));
    let canaries = Canaries {
        read_only: region(&pd, Access::LOCAL_WRITE | Access::REMOTE_READ),
        closed: region(&pd, Access::LOCAL_WRITE),
        buffer: pd
            .reg_mr(canaries(0, 2 * PAGE), Access::LOCAL_WRITE)
            .expect("memory"),
        foreign: region(&other, all()),
        raw: pd.reg_raw(&memory, Access::LOCAL_WRITE).expect("memory"),
        heap: canaries(0, 16 * PAGE),
        memory,
    };
    let loopback = "127.0.0.1:0".parse().expect("an address");
    let (tell, incoming) = std::sync::mpsc::channel();
    let listening = device
        .listen(loopback, 64, &ConnParam::default(), move |request| {
            let _ = tell.send(request);
        })
        .expect("an address");
    let victim = Arc::new(Verbs {
        cq: device.create_cq(60_000, None).expect("a queue"),
        device,
        pd,
        addr: listening.local_addr(),
        _listening: listening,
        canaries,
        stale,
        conns: Mutex::default(),
        broken: Mutex::default(),
    });
    let accepts = victim.clone();
    std::thread::spawn(move || {
        for request in incoming {
            accepts.accept(request);
        }
    });
    let serves = victim.clone();
    std::thread::spawn(move || serves.serve());
    victim
}

impl Verbs {
    fn conn(&self) -> Result<Arc<Conn>, weft_verbs::Error> {
        let own = |len, access| -> Result<Mr, weft_verbs::Error> {
            let mr = self.pd.alloc_mr(len, access)?;
            fill(&mr);
            Ok(mr)
        };
        let around = own(3 * PAGE, Access::LOCAL_WRITE)?;
        let init = QpInit {
            max_send_wr: 64,
            max_recv_wr: RECEIVES as u32,
            sq_sig_all: true,
            ..QpInit::new(&self.cq, &self.cq)
        };
        let conn = Conn {
            qp: self.pd.create_qp(&init)?,
            open: self.pd.reg_part(&around, PAGE, PAGE, all())?,
            around,
            whole: Mutex::new(Some(own(PAGE, all())?)),
            receives: own(RECEIVES * SLOT, Access::LOCAL_WRITE)?,
            answers: own(RECEIVES * SLOT, Access::LOCAL_WRITE)?,
            own: own(3 * PAGE, Access::LOCAL_WRITE)?,
        };
        for slot in 0..RECEIVES {
            conn.post_recv(slot);
        }
        Ok(Arc::new(conn))
    }

    fn told(&self, conn: &Conn) -> Vec<u8> {
        let c = &self.canaries;
        let whole = conn.whole.lock().expect("no panic under it");
        let whole = whole.as_ref().expect("a fresh connection");
        let mut out = Vec::new();
        for (stag, addr, len) in [
            (conn.open.rkey(), conn.open.addr(), PAGE),
            (whole.rkey(), whole.addr(), PAGE),
            (c.read_only.rkey(), c.read_only.addr(), 2 * PAGE),
            (c.closed.rkey(), c.closed.addr(), 2 * PAGE),
            (c.foreign.rkey(), c.foreign.addr(), 2 * PAGE),
            (self.stale, 0, 2 * PAGE),
        ] {
            out.extend(addr.to_be_bytes());
            out.extend(stag.to_be_bytes());
            out.extend((len as u32).to_be_bytes());
        }
        out
    }

    fn accept(&self, request: Incoming) {
        if self.conns.lock().expect("no panic under it").len() >= PEERS {
            let _ = request.reject(b"full");
            return;
        }
        let conn = self.conn().expect("objects");
        let param = ConnParam {
            private_data: self.told(&conn),
            ird: 8,
            ord: 8,
            ..ConnParam::default()
        };
        let num = conn.qp.num();
        self.conns
            .lock()
            .expect("no panic under it")
            .insert(num, conn.clone());
        if request.accept(&conn.qp, &param).is_err() {
            self.forget(num);
        }
    }

    fn forget(&self, num: u32) {
        let conn = self.conns.lock().expect("no panic under it").remove(&num);
        if let Some(broken) = conn.and_then(|conn| conn.broken()) {
            self.broken.lock().expect("no panic under it").push(broken);
        }
    }

    fn serve(&self) {
        let mut wcs = vec![Wc::default(); 64];
        loop {
            let n = self.cq.wait(&mut wcs, None).expect("no overrun");
            for wc in &wcs[..n] {
                let conn = self
                    .conns
                    .lock()
                    .expect("no panic under it")
                    .get(&wc.qp_num)
                    .cloned();
                let Some(conn) = conn else { continue };
                if wc.status == WcStatus::Success {
                    obey(&conn, wc);
                } else {
                    self.forget(wc.qp_num);
                }
            }
        }
    }
}

/// A completion of a connection's.
fn obey(conn: &Arc<Conn>, wc: &Wc) {
    let slot = wc.wr_id as usize % RECEIVES;
    match wc.opcode {
        WcOpcode::Recv => {}
        WcOpcode::RecvWithImm | WcOpcode::Send => return conn.post_recv(slot),
        WcOpcode::Read | WcOpcode::Write => {
            answer(conn, slot, b"done");
            return;
        }
        _ => return,
    }
    let mut order = [0; ORDER];
    conn.receives
        .read(slot * SLOT, &mut order)
        .expect("in bounds");
    let len = (wc.byte_len as usize).min(ORDER);
    let at = || {
        let rkey = u32::from_be_bytes(order[1..5].try_into().expect("four"));
        let addr = u64::from_be_bytes(order[5..13].try_into().expect("eight"));
        let len = u32::from_be_bytes(order[13..17].try_into().expect("four"));
        (RemoteAddr { addr, rkey }, (len as usize).min(PAGE))
    };
    let wr = match order[0] {
        b'E' if len > 0 => return answer(conn, slot, &order[..len]),
        b'R' if len == 17 => SendWr::read(slot as u64, at().0),
        b'W' if len == 17 => SendWr::write(slot as u64, at().0),
        b'D' if len == 1 => {
            let conn = conn.clone();
            std::thread::spawn(move || {
                let whole = conn.whole.lock().expect("no panic under it").take();
                let start = Instant::now();
                drop(whole);
                let took = format!("D{}", start.elapsed().as_millis());
                answer(&conn, slot, took.as_bytes());
            });
            return;
        }
        _ => return conn.post_recv(slot),
    };
    let sge = conn.own.sge(PAGE, at().1);
    if conn.qp.post_send(&[wr.sge(sge)]).is_err() {
        conn.post_recv(slot);
    }
}

/// Sends this, and posts the receive anew when it has gone.
fn answer(conn: &Conn, slot: usize, bytes: &[u8]) {
    conn.answers.write(slot * SLOT, bytes).expect("in bounds");
    let wr = SendWr::send(slot as u64).sge(conn.answers.sge(slot * SLOT, bytes.len()));
    let _ = conn.qp.post_send(&[wr]);
}

impl Victim for Verbs {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn broken(&self) -> Vec<String> {
        let mut broken = self.broken.lock().expect("no panic under it").clone();
        let c = &self.canaries;
        for (name, mr) in [
            ("a region for reading", &c.read_only),
            ("a closed region", &c.closed),
            ("a closed buffer", &c.buffer),
            ("a region of another domain", &c.foreign),
            ("a closed region of raw memory", &c.raw),
        ] {
            broken.extend(changed(name, mr, &[]));
        }
        broken.extend(changed_bytes("the heap", &c.heap, &[]));
        broken.extend(changed_bytes("raw memory", &c.memory.to_vec(), &[]));
        let conns: Vec<_> = self
            .conns
            .lock()
            .expect("no panic under it")
            .values()
            .cloned()
            .collect();
        broken.extend(conns.iter().filter_map(|conn| conn.broken()));
        broken
    }

    fn dial(&self, addr: SocketAddr) -> String {
        let conn = match self.conn() {
            Ok(conn) => conn,
            Err(e) => return format!("objects: {e}"),
        };
        let num = conn.qp.num();
        self.conns
            .lock()
            .expect("no panic under it")
            .insert(num, conn.clone());
        let (tell, told) = std::sync::mpsc::channel();
        let param = ConnParam {
            ird: 8,
            ord: 8,
            ..ConnParam::default()
        };
        self.device.dial(addr, None, &conn.qp, &param, move |how| {
            let _ = tell.send(how);
        });
        match told.recv_timeout(PATIENCE) {
            Ok(Ok(_)) => "connected".into(),
            Ok(Err(e)) => {
                self.forget(num);
                format!("{e:?}").replace('\n', " ")
            }
            Err(_) => "hangs".into(),
        }
    }

    fn leave(&self, ports: &[u16]) -> Duration {
        let mut conns = Vec::new();
        self.conns
            .lock()
            .expect("no panic under it")
            .retain(|_, c| {
                let port = c.qp.peer_addr().map(|addr| addr.port());
                let stays = !port.is_some_and(|port| ports.contains(&port));
                if !stays {
                    conns.push(c.clone());
                }
                stays
            });
        let longest = conns.into_iter().map(|conn| {
            std::thread::spawn(move || {
                let start = Instant::now();
                // Alone, while the connection lives; then all that is left.
                drop(conn.whole.lock().expect("no panic under it").take());
                drop(conn);
                start.elapsed()
            })
        });
        let longest: Vec<_> = longest.collect();
        let each = longest.into_iter().map(|t| t.join().expect("no panic"));
        each.max().unwrap_or_default()
    }
}
