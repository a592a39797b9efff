//! A program on the RoCE v2 of `weft-verbs`. Whoever connects is told six places (`weft_hostile::target::Told`); a message of up to 64 bytes that
//! begins with `E` comes back, others are dropped.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_hostile::roce::own_address;
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, RecvWr, RoceConn, RoceConnect, RoceEvent, RoceInit, RoceListening,
    RocePort, RoceQp, RoceRequest, SendWr, Wc, WcOpcode, WcStatus,
};

use super::{Victim, canaries, changed, changed_bytes, fill};

const PAGE: usize = 4096;
const RECEIVES: usize = 8;
/// A receive has 64 bytes, and 64 of canary behind it.
const SLOT: usize = 128;
const ORDER: usize = 64;
/// Connections that it serves at once.
const PEERS: usize = 400;
const SERVICE: u16 = 7174;

struct Conn {
    qp: Arc<RoceQp>,
    made: Mutex<Option<RoceConn>>,
    /// Three pages, of which the middle one is open.
    around: Mr,
    open: Mr,
    whole: Mr,
    receives: Mr,
    answers: Mr,
}

impl Conn {
    fn broken(&self) -> Option<String> {
        let slots: Vec<_> = (0..RECEIVES)
            .map(|n| (n * SLOT, n * SLOT + ORDER))
            .collect();
        changed("around the open region", &self.around, &[(PAGE, 2 * PAGE)])
            .or_else(|| changed("between receives", &self.receives, &slots))
            .or_else(|| changed("between answers", &self.answers, &slots))
    }

    fn post_recv(&self, slot: usize) {
        let wr = RecvWr::new(slot as u64).sge(self.receives.sge(slot * SLOT, ORDER));
        // A full queue is a queue that is ending.
        let _ = self.qp.post_recv(&[wr]);
    }
}

/// What happens to a connection, for the thread that keeps them.
enum News {
    Asked(RoceRequest),
    Over(u32),
}

struct Roce {
    pd: Pd,
    cq: Cq,
    port: RocePort,
    read_only: Mr,
    closed: Mr,
    foreign: Mr,
    stale: u32,
    heap: Vec<u8>,
    conns: Mutex<HashMap<u32, Arc<Conn>>>,
    broken: Mutex<Vec<String>>,
    tell: Sender<News>,
    _listening: RoceListening,
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
    let ip: Ipv4Addr = own_address(61);
    let port = device.bind_roce(ip.into(), 0).expect("the port");
    let (tell, news) = channel();
    let asked = tell.clone();
    let listening = port.listen(SERVICE, 64, move |mut request| {
        request.seen();
        let _ = asked.send(News::Asked(request));
    });
    let victim = Arc::new(Roce {
        cq: device.create_cq(60_000, None).expect("a queue"),
        read_only: region(&pd, Access::LOCAL_WRITE | Access::REMOTE_READ),
        closed: region(&pd, Access::LOCAL_WRITE),
        foreign: region(&other, all()),
        stale,
        heap: canaries(0, 16 * PAGE),
        pd,
        port,
        conns: Mutex::default(),
        broken: Mutex::default(),
        tell,
        _listening: listening.expect("a listener"),
    });
    let keeps = victim.clone();
    std::thread::spawn(move || {
        for news in news {
            match news {
                News::Asked(request) => keeps.accept(request),
                News::Over(num) => keeps.forget(num),
            }
        }
    });
    let serves = victim.clone();
    std::thread::spawn(move || serves.serve());
    victim
}

impl Roce {
    fn conn(&self) -> Result<Arc<Conn>, weft_verbs::Error> {
        let own = |len, access| -> Result<Mr, weft_verbs::Error> {
            let mr = self.pd.alloc_mr(len, access)?;
            fill(&mr);
            Ok(mr)
        };
        let around = own(3 * PAGE, Access::LOCAL_WRITE)?;
        let init = RoceInit {
            max_send_wr: 64,
            max_recv_wr: RECEIVES as u32,
            sq_sig_all: true,
            ..RoceInit::new(&self.cq, &self.cq)
        };
        let conn = Conn {
            qp: Arc::new(self.pd.create_roce_qp(&init)?),
            made: Mutex::default(),
            open: self.pd.reg_part(&around, PAGE, PAGE, all())?,
            around,
            whole: own(PAGE, all())?,
            receives: own(RECEIVES * SLOT, Access::LOCAL_WRITE)?,
            answers: own(RECEIVES * SLOT, Access::LOCAL_WRITE)?,
        };
        for slot in 0..RECEIVES {
            conn.post_recv(slot);
        }
        Ok(Arc::new(conn))
    }

    fn told(&self, conn: &Conn) -> Vec<u8> {
        let mut out = Vec::new();
        for (stag, addr, len) in [
            (conn.open.rkey(), conn.open.addr(), PAGE),
            (conn.whole.rkey(), conn.whole.addr(), PAGE),
            (self.read_only.rkey(), self.read_only.addr(), 2 * PAGE),
            (self.closed.rkey(), self.closed.addr(), 2 * PAGE),
            (self.foreign.rkey(), self.foreign.addr(), 2 * PAGE),
            (self.stale, 0, 2 * PAGE),
        ] {
            out.extend(addr.to_be_bytes());
            out.extend(stag.to_be_bytes());
            out.extend((len as u32).to_be_bytes());
        }
        out
    }

    fn accept(&self, request: RoceRequest) {
        if self.conns.lock().expect("no panic under it").len() >= PEERS {
            return request.reject(b"full");
        }
        let conn = self.conn().expect("objects");
        let param = RoceConnect {
            private_data: self.told(&conn),
            ird: 8,
            ord: 8,
            ..RoceConnect::default()
        };
        let num = conn.qp.num();
        self.conns
            .lock()
            .expect("no panic under it")
            .insert(num, conn.clone());
        let tell = self.tell.clone();
        let made = request.accept(&conn.qp, &param, move |event| {
            if !matches!(event, RoceEvent::Established { .. }) {
                let _ = tell.send(News::Over(num));
            }
        });
        match made {
            Ok(made) => *conn.made.lock().expect("no panic under it") = Some(made),
            Err(_) => self.forget(num),
        }
    }

    fn forget(&self, num: u32) {
        let conn = self.conns.lock().expect("no panic under it").remove(&num);
        let Some(conn) = conn else {
            return;
        };
        if let Some(made) = conn.made.lock().expect("no panic under it").take() {
            made.forget();
        }
        if let Some(broken) = conn.broken() {
            self.broken.lock().expect("no panic under it").push(broken);
        }
    }

    fn serve(&self) {
        let mut wcs = vec![Wc::default(); 64];
        loop {
            let n = self.cq.wait(&mut wcs, None).expect("no overrun");
            for wc in &wcs[..n] {
                let conns = self.conns.lock().expect("no panic under it");
                let Some(conn) = conns.get(&wc.qp_num).cloned() else {
                    continue;
                };
                drop(conns);
                if wc.status == WcStatus::Success {
                    obey(&conn, wc);
                } else {
                    let _ = self.tell.send(News::Over(wc.qp_num));
                }
            }
        }
    }
}

/// A completion of a connection's.
fn obey(conn: &Conn, wc: &Wc) {
    let slot = wc.wr_id as usize % RECEIVES;
    let mut order = [0; ORDER];
    let len = (wc.byte_len as usize).min(ORDER);
    conn.receives
        .read(slot * SLOT, &mut order)
        .expect("in bounds");
    if wc.opcode != WcOpcode::Recv || len == 0 || order[0] != b'E' {
        return conn.post_recv(slot);
    }
    conn.answers
        .write(slot * SLOT, &order[..len])
        .expect("in bounds");
    let wr = SendWr::send(slot as u64).sge(conn.answers.sge(slot * SLOT, len));
    let _ = conn.qp.post_send(wr);
}

impl Victim for Roce {
    fn addr(&self) -> SocketAddr {
        SocketAddr::new(self.port.local_addr().ip(), SERVICE)
    }

    fn broken(&self) -> Vec<String> {
        let mut broken = self.broken.lock().expect("no panic under it").clone();
        for (name, mr) in [
            ("a region for reading", &self.read_only),
            ("a closed region", &self.closed),
            ("a region of another domain", &self.foreign),
        ] {
            broken.extend(changed(name, mr, &[]));
        }
        broken.extend(changed_bytes("the heap", &self.heap, &[]));
        let conns = self.conns.lock().expect("no panic under it");
        let conns: Vec<_> = conns.values().cloned().collect();
        broken.extend(conns.iter().filter_map(|conn| conn.broken()));
        broken
    }

    fn dial(&self, _addr: SocketAddr) -> String {
        "a victim of RoCE does not dial".into()
    }

    fn leave(&self, _ports: &[u16]) -> Duration {
        // Peers have no port of their own.
        Duration::ZERO
    }
}
