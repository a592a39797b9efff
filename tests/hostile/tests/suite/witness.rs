//! Peers that behave, on a victim that others attack: whether they get in, and get their answers, all the time.
//!
//! On its standard input the suite asks one for a `report`, which begins a new account.

use std::io::BufRead;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_hostile::rng::Rng;
use weft_hostile::roce::own_address;
use weft_hostile::target::Told;
use weft_verbs::cm::{ConnParam, connect};
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, RoceConn, RoceConnect, RoceEvent,
    RoceInit, RocePort, RoceQp, SendWr, Wc, WcStatus,
};

use super::victims::say;

/// Longer than any limit of the victim's; a hang all the same.
const PATIENCE: Duration = Duration::from_secs(25);

/// Rounds of one connection.
const ROUNDS: u32 = 40;

/// A connection of an honest peer's.
trait Conn {
    /// Something there and back; an error says what was wrong.
    fn round(&mut self, rng: &mut Rng) -> Result<(), String>;
    /// The last look.
    fn finish(&mut self) -> Result<(), String> {
        Ok(())
    }
}

type Connect = Box<dyn Fn() -> Result<Box<dyn Conn>, String>>;

#[derive(Default)]
struct Account {
    rounds: u64,
    worst_round: Duration,
    connects: u64,
    worst_connect: Duration,
    refused: u64,
    failures: u64,
    last: String,
}

/// One's life.
pub(crate) fn live(kind: &str, addr: SocketAddr) {
    let connect = way(kind, addr);
    let account = Arc::new(Mutex::new(Account::default()));
    let told = account.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if line.is_err() {
                break;
            }
            let a = std::mem::take(&mut *told.lock().expect("no panic under it"));
            say(&format!(
                "report {} {} {} {} {} {} {}",
                a.rounds,
                a.worst_round.as_millis(),
                a.connects,
                a.worst_connect.as_millis(),
                a.refused,
                a.failures,
                a.last
            ));
        }
        std::process::exit(0);
    });
    say("at work");
    let mut rng = Rng::new(u64::from(std::process::id()));
    loop {
        life(&connect, &account, &mut rng);
    }
}

/// One connection, from the first try to its end.
fn life(connect: &Connect, account: &Mutex<Account>, rng: &mut Rng) {
    let start = Instant::now();
    let mut conn = loop {
        match connect() {
            Ok(conn) => break conn,
            Err(e) => {
                let mut account = account.lock().expect("no panic under it");
                account.refused += 1;
                account.last = format!("connect: {e}").replace('\n', " ");
                account.worst_connect = account.worst_connect.max(start.elapsed());
                drop(account);
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    };
    {
        let mut account = account.lock().expect("no panic under it");
        account.connects += 1;
        account.worst_connect = account.worst_connect.max(start.elapsed());
    }
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let done = if round == ROUNDS {
            conn.finish()
        } else {
            conn.round(rng)
        };
        let mut account = account.lock().expect("no panic under it");
        account.rounds += 1;
        account.worst_round = account.worst_round.max(start.elapsed());
        if let Err(e) = done {
            account.failures += 1;
            account.last = format!("round {round}: {e}").replace('\n', " ");
            return;
        }
        drop(account);
        // There are two processors for all of the suite.
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn way(kind: &str, addr: SocketAddr) -> Connect {
    match kind {
        "verbs" => {
            let device = Device::builder().open().expect("a device");
            Box::new(move || Ok(Box::new(Verbs::connect(&device, addr)?)))
        }
        "roce" => {
            let device = Device::builder().open().expect("a device");
            let ip = own_address(66).into();
            let port = device.bind_roce(ip, 0).expect("the port");
            Box::new(move || Ok(Box::new(Roce::connect(&device, &port, addr)?)))
        }
        "exs" => exs(addr, weft_exs::Kind::Stream),
        "packets" => exs(addr, weft_exs::Kind::SeqPacket),
        "rsockets" => {
            let device = Device::builder().open().expect("a device");
            Box::new(move || Ok(Box::new(Rsocket::connect(&device, addr)?)))
        }
        other => panic!("no witness is called {other}"),
    }
}

// ---- verbs ----

struct Verbs {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    open: RemoteAddr,
    /// What we have written there.
    there: Vec<u8>,
    _pd: Pd,
}

const PAGE: usize = 4096;

impl Verbs {
    fn connect(device: &Device, addr: SocketAddr) -> Result<Verbs, String> {
        let text = |e: weft_verbs::Error| e.to_string();
        let pd = device.alloc_pd().map_err(text)?;
        let cq = device.create_cq(256, None).map_err(text)?;
        let mr = pd.alloc_mr(4 * PAGE, Access::LOCAL_WRITE).map_err(text)?;
        let param = ConnParam {
            ird: 4,
            ord: 4,
            ..ConnParam::default()
        };
        let init = QpInit {
            sq_sig_all: true,
            ..QpInit::new(&cq, &cq)
        };
        let connection = connect(addr, &pd, &init, &param).map_err(|e| format!("{e:?}"))?;
        let told = &connection.private_data;
        let from = 16 * Told::Open as usize;
        let place = told.get(from..from + 16).ok_or("a short reply")?;
        let open = RemoteAddr {
            addr: u64::from_be_bytes(place[..8].try_into().expect("eight")),
            rkey: u32::from_be_bytes(place[8..12].try_into().expect("four")),
        };
        let mut conn = Verbs {
            qp: connection.qp,
            cq,
            mr,
            open,
            there: Vec::new(),
            _pd: pd,
        };
        conn.there = conn.fetch()?;
        Ok(conn)
    }

    /// Waits for so many completions.
    fn take(&self, n: usize) -> Result<(), String> {
        let mut wcs = [Wc::default(); 4];
        let mut there = 0;
        while there < n {
            let got = self
                .cq
                .wait(&mut wcs, Some(PATIENCE))
                .map_err(|e| format!("{e:?}"))?;
            if got == 0 {
                return Err(format!("{there} of {n} completions after {PATIENCE:?}"));
            }
            for wc in &wcs[..got] {
                if wc.status != WcStatus::Success {
                    return Err(format!("{wc:?}"));
                }
            }
            there += got;
        }
        Ok(())
    }

    fn post(&self, wr: SendWr) -> Result<(), String> {
        self.qp.post_send(&[wr]).map_err(|e| format!("{e:?}"))
    }

    /// All of the open place.
    fn fetch(&self) -> Result<Vec<u8>, String> {
        let wr = SendWr::read(1, self.open).sge(self.mr.sge(0, PAGE));
        self.post(wr)?;
        self.take(1)?;
        self.mr.to_vec(0, PAGE).map_err(|e| e.to_string())
    }
}

impl Conn for Verbs {
    fn round(&mut self, rng: &mut Rng) -> Result<(), String> {
        let text = |e: weft_verbs::MemError| e.to_string();
        let (off, len) = (rng.below(PAGE - 256), 1 + rng.below(255));
        let bytes = rng.bytes(len);
        self.there[off..off + len].copy_from_slice(&bytes);
        self.mr.write(PAGE, &bytes).map_err(text)?;
        let at = RemoteAddr {
            addr: self.open.addr + off as u64,
            ..self.open
        };
        self.post(SendWr::write(2, at).sge(self.mr.sge(PAGE, len)))?;
        self.take(1)?;
        if self.fetch()? != self.there {
            return Err("what we wrote is not there".into());
        }
        let mut message = rng.bytes(32);
        message[0] = b'E';
        self.mr.write(2 * PAGE, &message).map_err(text)?;
        let wr = RecvWr::new(3).sge(self.mr.sge(3 * PAGE, 64));
        self.qp.post_recv(&[wr]).map_err(|e| format!("{e:?}"))?;
        self.post(SendWr::send(4).sge(self.mr.sge(2 * PAGE, 32)))?;
        self.take(2)?;
        if self.mr.to_vec(3 * PAGE, 32).map_err(text)? != message {
            return Err("another answer".into());
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        if self.fetch()? != self.there {
            return Err("what we wrote is not there any more".into());
        }
        self.qp.disconnect();
        Ok(())
    }
}

// ---- RoCE ----

struct Roce {
    qp: Arc<RoceQp>,
    made: RoceConn,
    cq: Cq,
    mr: Mr,
    open: RemoteAddr,
    there: Vec<u8>,
    _pd: Pd,
}

impl Roce {
    fn connect(device: &Device, port: &RocePort, addr: SocketAddr) -> Result<Roce, String> {
        let text = |e: weft_verbs::Error| e.to_string();
        let pd = device.alloc_pd().map_err(text)?;
        let cq = device.create_cq(256, None).map_err(text)?;
        let mr = pd.alloc_mr(4 * PAGE, Access::LOCAL_WRITE).map_err(text)?;
        let init = RoceInit {
            sq_sig_all: true,
            ..RoceInit::new(&cq, &cq)
        };
        let qp = Arc::new(pd.create_roce_qp(&init).map_err(text)?);
        let (tell, told) = std::sync::mpsc::channel();
        let param = RoceConnect {
            ird: 4,
            ord: 4,
            ..RoceConnect::default()
        };
        let on_event = move |event| drop(tell.send(event));
        let made = port
            .dial(&qp, (addr, 0), 4711, &param, on_event)
            .map_err(text)?;
        let told = match told.recv_timeout(PATIENCE) {
            Ok(RoceEvent::Established { private_data, .. }) => private_data,
            other => {
                made.forget();
                return Err(match other {
                    Ok(RoceEvent::Rejected { reason, .. }) => format!("rejected: {reason}"),
                    other => format!("{other:?}"),
                });
            }
        };
        let from = 16 * Told::Open as usize;
        let place = told.get(from..from + 16).ok_or("a short reply")?;
        let open = RemoteAddr {
            addr: u64::from_be_bytes(place[..8].try_into().expect("eight")),
            rkey: u32::from_be_bytes(place[8..12].try_into().expect("four")),
        };
        let mut conn = Roce {
            qp,
            made,
            cq,
            mr,
            open,
            there: Vec::new(),
            _pd: pd,
        };
        conn.there = conn.fetch()?;
        Ok(conn)
    }

    /// Posts it, and waits for so many completions.
    fn carry_out(&self, wr: SendWr, n: usize) -> Result<(), String> {
        self.qp.post_send(wr).map_err(|e| format!("{e:?}"))?;
        let mut wc = [Wc::default()];
        for done in 0..n {
            let got = self.cq.wait(&mut wc, Some(PATIENCE));
            if got.map_err(|e| format!("{e:?}"))? == 0 {
                return Err(format!("{done} of {n} completions after {PATIENCE:?}"));
            }
            if wc[0].status != WcStatus::Success {
                return Err(format!("{:?}", wc[0]));
            }
        }
        Ok(())
    }

    /// All of the open place.
    fn fetch(&self) -> Result<Vec<u8>, String> {
        let read = SendWr::read(1, self.open).sge(self.mr.sge(0, PAGE));
        self.carry_out(read, 1)?;
        self.mr.to_vec(0, PAGE).map_err(|e| e.to_string())
    }
}

impl Conn for Roce {
    fn round(&mut self, rng: &mut Rng) -> Result<(), String> {
        let text = |e: weft_verbs::MemError| e.to_string();
        let (off, len) = (rng.below(PAGE - 256), 1 + rng.below(255));
        let bytes = rng.bytes(len);
        self.there[off..off + len].copy_from_slice(&bytes);
        self.mr.write(PAGE, &bytes).map_err(text)?;
        let at = RemoteAddr {
            addr: self.open.addr + off as u64,
            ..self.open
        };
        self.carry_out(SendWr::write(2, at).sge(self.mr.sge(PAGE, len)), 1)?;
        if self.fetch()? != self.there {
            return Err("what we wrote is not there".into());
        }
        let mut message = rng.bytes(32);
        message[0] = b'E';
        self.mr.write(2 * PAGE, &message).map_err(text)?;
        let wr = RecvWr::new(3).sge(self.mr.sge(3 * PAGE, 64));
        self.qp.post_recv(&[wr]).map_err(|e| format!("{e:?}"))?;
        self.carry_out(SendWr::send(4).sge(self.mr.sge(2 * PAGE, 32)), 2)?;
        if self.mr.to_vec(3 * PAGE, 32).map_err(text)? != message {
            return Err("another answer".into());
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), String> {
        if self.fetch()? != self.there {
            return Err("what we wrote is not there any more".into());
        }
        self.made.disconnect();
        Ok(())
    }
}

// ---- EXS ----

struct Exs {
    socket: weft_exs::Socket,
    memory: Arc<weft_exs::Region>,
}

const MOST: usize = 30_000;

fn exs(addr: SocketAddr, kind: weft_exs::Kind) -> Connect {
    let context = weft_exs::Context::global().expect("a device");
    let memory = weft_exs::Region::alloc(&context, 2 * MOST).expect("memory");
    Box::new(move || {
        let socket = weft_exs::Socket::new(&context, false, kind).map_err(|e| e.to_string())?;
        socket
            .set_options(|options| {
                options.send_timeout = Some(PATIENCE);
                options.recv_timeout = Some(PATIENCE);
            })
            .map_err(|e| e.to_string())?;
        socket.connect_wait(addr).map_err(|e| e.to_string())?;
        let memory = memory.clone();
        Ok(Box::new(Exs { socket, memory }))
    })
}

impl Conn for Exs {
    fn round(&mut self, rng: &mut Rng) -> Result<(), String> {
        let stream = self.socket.kind() == weft_exs::Kind::Stream;
        // The victim's receive is shorter than the longest: a message must fit it.
        let most = if stream { MOST } else { 16_000 };
        let len = if rng.below(2) == 0 {
            1 + rng.below(300)
        } else {
            1 + rng.below(most)
        };
        let bytes = rng.bytes(len);
        let text = |e: weft_exs::Error| e.to_string();
        self.memory.write(0, &bytes).map_err(text)?;
        let out = self.memory.slice(0, len).map_err(text)?;
        let sent = self
            .socket
            .send_wait(out)
            .map_err(|e| format!("send: {e}"))?;
        let back = self.memory.slice(MOST, len).map_err(text)?;
        let flags = if stream {
            weft_exs::RecvFlags::WAITALL
        } else {
            weft_exs::RecvFlags::empty()
        };
        let got = self
            .socket
            .recv_wait(&back, flags)
            .map_err(|e| format!("recv: {e}"))?;
        if (sent, got) != (len, len) {
            return Err(format!("{sent} sent and {got} back of {len}"));
        }
        if back.to_vec() != bytes {
            return Err("other bytes came back".into());
        }
        Ok(())
    }
}

// ---- rsockets ----

struct Rsocket(weft_rsockets::Socket);

impl Rsocket {
    fn connect(device: &Device, addr: SocketAddr) -> Result<Rsocket, String> {
        let socket = weft_rsockets::Socket::new(device, false).map_err(|e| e.to_string())?;
        socket.set_send_timeout(Some(PATIENCE));
        socket.set_recv_timeout(Some(PATIENCE));
        socket.connect(addr).map_err(|e| e.to_string())?;
        Ok(Rsocket(socket))
    }
}

impl Conn for Rsocket {
    fn round(&mut self, rng: &mut Rng) -> Result<(), String> {
        let len = 1 + rng.below(MOST);
        let bytes = rng.bytes(len);
        let sent = self
            .0
            .send(&[weft_rsockets::Source::Bytes(&bytes)], false)
            .map_err(|e| format!("send: {e}"))?;
        let mut back = vec![0; len];
        let got = self
            .0
            .recv(
                &mut [weft_rsockets::Sink::Bytes(&mut back)],
                weft_rsockets::RecvFlags::WAITALL,
            )
            .map_err(|e| format!("recv: {e}"))?;
        if (sent, got) != (len, len) || back != bytes {
            return Err(format!(
                "{sent} sent and {got} back of {len}, or other bytes"
            ));
        }
        Ok(())
    }
}
