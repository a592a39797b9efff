//! Against the kernel's siw driver and rdma-core's own programs, in a guest. One boot serves all tests; each takes the
//! guest for itself.

mod dropin;
mod elf;
mod nic;
mod rsockets;
mod speed;

use std::net::{SocketAddr, TcpListener};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use weft_interop::guest::{self, GUEST, Guest, HOST, say};
use weft_interop::perftest::{self, Served};
use weft_interop::rping::{self, Error, Options, Report, Session};
use weft_verbs::cm::{self, ConnParam, ConnectError, Connection, LinkOptions, Listener, Request};
use weft_verbs::{
    Access, AsyncEvent, Cq, Device, EndReason, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, SendWr, Wc,
    WcOpcode, WcStatus,
};

/// For one step of the protocol.
const STEP: Duration = Duration::from_mins(1);
/// For a thousand rounds on a busy machine, with the guest emulated.
const LONG: Duration = Duration::from_mins(4);
/// Where the guest's own `rping -s` listens.
const PING_PORT: u16 = 7174;

struct Siw {
    guest: Guest,
    /// The host's port that leads to the guest's `rping -s`.
    forwarded: u16,
    /// Whether that runs.
    serving: bool,
    /// The parameters that the loaded driver has.
    driver: Vec<(&'static str, u8)>,
}

/// The guest, for one test at a time; `None` after saying why there is none.
fn siw() -> Option<MutexGuard<'static, Siw>> {
    static SIW: OnceLock<Result<Mutex<Siw>, String>> = OnceLock::new();
    let siw = SIW.get_or_init(|| {
        let forwarded = {
            let probe = TcpListener::bind("127.0.0.1:0").unwrap();
            probe.local_addr().unwrap().port()
        };
        Ok(Mutex::new(Siw {
            guest: Guest::boot(&[(forwarded, PING_PORT)])?,
            forwarded,
            serving: false,
            driver: Vec::new(),
        }))
    });
    match siw {
        Ok(siw) => Some(siw.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(why) => {
            let test = thread::current().name().unwrap_or("test").to_owned();
            say(&format!("{test} skipped: {why}"));
            None
        }
    }
}

/// Waits in the guest until something listens on the port.
fn listening(port: u16) -> String {
    let line = format!("grep -q ':{port:04X} 00000000:0000 0A' /proc/net/tcp");
    format!(" until {line}; do usleep 10000; done")
}

impl Siw {
    /// Load the driver with these parameters. It has them as constants: they are changed in its file.
    fn driver(&mut self, parameters: &[(&'static str, u8)]) {
        if self.driver == parameters {
            return;
        }
        self.stop_server();
        let module = std::fs::read(guest::folder().join("root/mods/siw.ko")).unwrap();
        let mut line = "cp /mods/siw.ko /tmp/siw.ko".to_owned();
        for (name, value) in parameters {
            let at = elf::offset_of(&module, name).unwrap_or_else(|| panic!("siw has no {name}"));
            let patch = format!("dd of=/tmp/siw.ko bs=1 seek={at} conv=notrunc 2>/dev/null");
            line.extend([" && printf '\\", &format!("{value:o}"), "' | ", &patch]);
        }
        line += " && rdma link del siw0 && rmmod siw && insmod /tmp/siw.ko && \
                 rdma link add siw0 type siw netdev eth0";
        self.guest.must(&line, STEP);
        self.driver = parameters.to_vec();
    }

    /// Start `rping -s` in the guest, unless it runs; where to connect to it.
    fn server(&mut self) -> SocketAddr {
        if !self.serving {
            let size = rping::MAX_SIZE;
            let line = format!(
                "killall ucmatose 2>/dev/null; rping -s -P -a {GUEST} -p {PING_PORT} -S {size} &"
            );
            self.guest.must(&(line + &listening(PING_PORT)), STEP);
            self.serving = true;
        }
        SocketAddr::from(([127, 0, 0, 1], self.forwarded))
    }

    fn stop_server(&mut self) {
        if std::mem::take(&mut self.serving) {
            self.guest.run("killall rping; wait", STEP);
        }
    }

    /// Run `rping -c` in the guest against a server of ours.
    fn ping_us(&mut self, options: &Options) -> (Result<Report, Error>, guest::Output) {
        let args = format!("-C {} -S {} -V", options.count.unwrap(), options.size);
        self.client_against("rping -c -a", &args, &options.param, |pd, request| {
            rping::serve(&pd.device(), request, options)
        })
    }

    /// Run a client in the guest, and `serve` for its connection. `command` ends where the address goes.
    fn client_against<T: Send>(
        &mut self,
        command: &str,
        args: &str,
        param: &ConnParam,
        serve: impl FnOnce(&Pd, Request) -> T + Send,
    ) -> (T, guest::Output) {
        let pd = Device::open().unwrap().alloc_pd().unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = Listener::bind(&pd.device(), any, 4, param).unwrap();
        let port = listener.local_addr().port();
        let line = format!(
            "timeout {} {command} {HOST} -p {port} {args}",
            LONG.as_secs()
        );
        let running = self.guest.start(&line);
        thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let request = listener
                    .next_request(Some(STEP))
                    .expect("a request from the guest");
                serve(&pd, request)
            });
            let output = self.guest.finish(&running, LONG + STEP);
            (serving.join().unwrap(), output)
        })
    }
}

fn link(crc: bool, revision: u8, peer_to_peer: bool) -> LinkOptions {
    LinkOptions {
        crc,
        revision,
        peer_to_peer,
        timeout: STEP,
        ..LinkOptions::default()
    }
}

fn options(size: usize, count: u32, link: LinkOptions) -> Options {
    let base = Options::default();
    Options {
        size,
        count: Some(count),
        verify: true,
        param: ConnParam {
            options: link,
            ..base.param
        },
        ..base
    }
}

/// `rping -c` in the guest pings us, `count` verified rounds.
fn assert_pings_us(siw: &mut Siw, what: &str, options: &Options) {
    let begun = Instant::now();
    let (report, output) = siw.ping_us(options);
    let report = report.unwrap_or_else(|error| panic!("{what}: {error}\n{}", output.text));
    assert_eq!(output.status, 0, "{what}: {}", output.text);
    assert!(!output.text.contains("mismatch"), "{what}: {}", output.text);
    assert_eq!(Some(report.verified), options.count, "{what}");
    let time = begun.elapsed();
    say(&format!(
        "siw rping -c -> weft, {what}, {} B: {report} ({time:.1?})",
        options.size
    ));
}

/// We ping `rping -s` in the guest.
fn assert_pings_siw(siw: &mut Siw, what: &str, options: &Options) {
    let begun = Instant::now();
    let addr = siw.server();
    let report = rping::client(&Device::open().unwrap(), addr, options);
    // Also fetches what the server printed.
    let said = siw.guest.must("true", STEP);
    let report = report.unwrap_or_else(|error| panic!("{what}: {error}\n{said}"));
    assert_eq!(Some(report.verified), options.count, "{what}");
    let time = begun.elapsed();
    say(&format!(
        "weft -> siw rping -s, {what}, {} B: {report} ({time:.1?})",
        options.size
    ));
}

#[test]
fn a_kernel_client_pings_us() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    assert_pings_us(&mut siw, "CRC on", &options(64, 1000, link(true, 2, true)));
    assert_pings_us(
        &mut siw,
        "CRC on",
        &options(4096, 1000, link(true, 2, true)),
    );
    assert_pings_us(
        &mut siw,
        "CRC off",
        &options(1461, 1000, link(false, 2, true)),
    );
    assert_pings_us(
        &mut siw,
        "CRC on",
        &options(rping::MAX_SIZE, 200, link(true, 2, true)),
    );
    assert_pings_us(
        &mut siw,
        "CRC off",
        &options(rping::MAX_SIZE, 200, link(false, 2, true)),
    );
}

#[test]
fn we_ping_a_kernel_server() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    // Revision 1 cannot be tried here: rping takes its read depth from the request, and there is none in revision 1.
    for (what, size, count, link) in [
        (
            "CRC on, revision 2, peer to peer",
            64,
            1000,
            link(true, 2, true),
        ),
        (
            "CRC off, revision 2, peer to peer",
            1461,
            1000,
            link(false, 2, true),
        ),
        ("CRC on, revision 2", 4096, 1000, link(true, 2, false)),
        (
            "CRC on, revision 2, peer to peer",
            rping::MAX_SIZE,
            200,
            link(true, 2, true),
        ),
    ] {
        assert_pings_siw(&mut siw, what, &options(size, count, link));
    }
}

#[test]
fn a_kernel_client_with_other_driver_settings_pings_us() {
    let Some(mut siw) = siw() else { return };
    // The driver asks for CRC where we do not.
    siw.driver(&[("mpa_crc_required", 1)]);
    assert_pings_us(
        &mut siw,
        "CRC at its wish",
        &options(1000, 1000, link(false, 2, true)),
    );
    // It wants us to be able to send first, and sends a ready-to-receive message.
    siw.driver(&[("peer_to_peer", 1)]);
    assert_pings_us(
        &mut siw,
        "peer to peer",
        &options(1000, 1000, link(true, 2, true)),
    );
    // It starts with revision 1, whatever we can.
    siw.driver(&[("mpa_version", 1)]);
    assert_pings_us(
        &mut siw,
        "revision 1",
        &options(1000, 1000, link(true, 2, true)),
    );
    assert_pings_us(
        &mut siw,
        "revision 1 on both sides",
        &options(1000, 100, link(false, 1, false)),
    );
}

#[test]
fn siw_turns_markers_away() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    let markers = LinkOptions {
        recv_markers: true,
        ..link(true, 2, true)
    };
    let refused = rping::client(
        &Device::open().unwrap(),
        siw.server(),
        &options(64, 1, markers),
    );
    assert!(
        matches!(refused, Err(Error::Connect(ConnectError::Rejected { .. }))),
        "{refused:?}"
    );
    say("siw rejects a request for markers, as it says it does");
}

/// Our side of a run of ucmatose: its server sends all its messages and then takes as many, its client the other way
/// round. Each uses one piece of memory for both, so what is on its way out must be there before more comes in.
struct Exchange {
    pd: Pd,
    cq: Cq,
    qp: Qp,
    source: Mr,
    sink: Mr,
    count: usize,
    size: usize,
}

impl Exchange {
    fn new(pd: &Pd, connect: impl FnOnce(Qp) -> Connection, count: usize, size: usize) -> Exchange {
        let cq = pd.device().create_cq(64, None).unwrap();
        let source = pd.reg_mr(counting(size), Access::empty()).unwrap();
        let sink = pd.alloc_mr(count * size, Access::LOCAL_WRITE).unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        for slot in 0..count {
            let recv = RecvWr::new(slot as u64).sge(sink.sge(slot * size, size));
            qp.post_recv(&[recv]).unwrap();
        }
        Exchange {
            pd: pd.clone(),
            cq,
            qp: connect(qp).qp,
            source,
            sink,
            count,
            size,
        }
    }

    fn send(&self) {
        for id in 0..self.count {
            let send = SendWr::send(id as u64).sge(self.source.whole());
            self.qp.post_send_one(send).unwrap();
        }
    }

    fn receive(&self) {
        for slot in 0..self.count {
            let mut wc = [Wc::default()];
            let size = self.size;
            assert_eq!(
                self.cq.wait(&mut wc, Some(STEP)),
                Ok(1),
                "{slot} of {size} B"
            );
            assert_eq!(
                (wc[0].status, wc[0].opcode, wc[0].wr_id, wc[0].byte_len),
                (WcStatus::Success, WcOpcode::Recv, slot as u64, size as u32),
                "{:?}, {:?}",
                wc[0],
                self.pd.device().get_async_event(Some(Duration::ZERO))
            );
        }
    }

    /// Disconnect; returns what was received.
    fn end(self) -> Vec<u8> {
        let (ended, end) = mpsc::channel();
        self.qp.on_end(move |reason| _ = ended.send(reason));
        self.qp.disconnect();
        assert_eq!(end.recv_timeout(STEP), Ok(EndReason::Disconnected));
        self.sink.to_vec(0, self.sink.len()).unwrap()
    }
}

#[test]
fn sends_of_many_sizes_come_back_from_a_kernel_client() {
    let Some(mut siw) = siw() else { return };
    // Its peer sends first, which the client has to allow with a ready-to-receive message.
    siw.driver(&[("peer_to_peer", 1)]);
    for (size, count) in [
        (1, 16),
        (64, 16),
        (1442, 16),
        (5000, 8),
        (70_000, 8),
        (1 << 20, 4),
    ] {
        let param = ConnParam {
            options: link(size % 2 == 0, 2, true),
            ..ConnParam::default()
        };
        let args = format!("-C {count} -S {size}");
        let (echo, output) = siw.client_against("ucmatose -s", &args, &param, |pd, request| {
            let connect = |qp| request.accept(qp, &param).unwrap();
            let exchange = Exchange::new(pd, connect, count, size);
            exchange.send();
            exchange.receive();
            exchange.end()
        });
        assert_eq!(output.status, 0, "{}", output.text);
        // It sends from the memory that it received into.
        let sent = counting(size);
        assert!(echo.chunks(size).all(|message| message == sent), "{size} B");
        say(&format!(
            "weft <-> siw ucmatose -s, {count} Sends of {size} B each way"
        ));
    }
}

#[test]
fn sends_of_many_sizes_to_a_kernel_server_with_revision_1() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    siw.stop_server();
    for (size, count) in [(1, 16), (5000, 8), (1 << 20, 4)] {
        let line = format!("timeout 100 ucmatose -b {GUEST} -p {PING_PORT} -C {count} -S {size} &");
        siw.guest.must(&(line + &listening(PING_PORT)), STEP);
        let addr = SocketAddr::from(([127, 0, 0, 1], siw.forwarded));
        let param = ConnParam {
            options: link(size % 2 == 0, 1, false),
            ..ConnParam::default()
        };
        let pd = Device::open().unwrap().alloc_pd().unwrap();
        let connect = |qp| cm::connect_qp(addr, qp, &pd.device(), &param).unwrap();
        let exchange = Exchange::new(&pd, connect, count, size);
        exchange.receive();
        exchange.send();
        exchange.end();
        let output = siw.guest.run("wait", STEP);
        assert!(output.text.contains("return status 0"), "{}", output.text);
        say(&format!(
            "weft <-> siw ucmatose, {count} Sends of {size} B each way, revision 1"
        ));
    }
}

/// A session with rping, and how it ends.
struct Watched {
    session: Session,
    device: Device,
    end: mpsc::Receiver<EndReason>,
}

impl Watched {
    fn new(session: Session, device: Device) -> Self {
        let (ended, end) = mpsc::channel();
        // The receiver may be gone when all is seen.
        session.qp.on_end(move |reason| _ = ended.send(reason));
        Watched {
            session,
            device,
            end,
        }
    }

    fn post(&self, wr: SendWr) {
        self.session.qp.post_send_one(wr.signaled()).unwrap();
    }

    /// How it ends. Maybe siw overlooked the last message: see [`Session::nudge`].
    fn ended(&mut self) -> EndReason {
        let begun = Instant::now();
        loop {
            match self.end.recv_timeout(Duration::from_secs(1)) {
                Ok(reason) => return reason,
                Err(error) => assert!(begun.elapsed() < STEP, "no end: {error}"),
            }
            self.session.nudge().unwrap();
        }
    }

    /// The peer ends it with this code: the queue pair and the device say so. `false` when it closed without a word: siw
    /// gives its Terminate up when it is busy sending.
    fn peer_terminates(&mut self, what: &str, code: u32) -> bool {
        let reason = self.ended();
        if reason == EndReason::Disconnected {
            say(&format!("siw closes without a Terminate: {what}"));
            return false;
        }
        assert_eq!(reason, EndReason::PeerTerminated(code), "{what}");
        let event = self.device.get_async_event(Some(STEP));
        let qp_num = self.session.qp.num();
        let wanted = AsyncEvent::QpFatal {
            qp_num,
            reason: code,
        };
        assert_eq!(event, Some(wanted), "{what}");
        say(&format!("siw ends with Terminate {code:#06x}: {what}"));
        true
    }

    /// We end it with this code.
    fn we_terminate(&mut self, what: &str, code: u32) {
        assert_eq!(self.ended(), EndReason::Terminated(code), "{what}");
        let event = self.device.get_async_event(Some(STEP));
        let qp_num = self.session.qp.num();
        let wanted = AsyncEvent::QpAccessErr {
            qp_num,
            reason: code,
        };
        assert_eq!(event, Some(wanted), "{what}");
        say(&format!("weft ends with Terminate {code:#06x}: {what}"));
    }

    /// The completion of the only signaled request.
    fn failure(&mut self, opcode: WcOpcode) -> Wc {
        let mut wc = [Wc::default()];
        loop {
            assert_eq!(self.session.cq.wait(&mut wc, Some(STEP)), Ok(1));
            if wc[0].opcode == opcode && wc[0].wr_id == 77 {
                return wc[0];
            }
        }
    }
}

/// An `STag` that nobody has.
const NO_STAG: u32 = 0x0bad_5700;

/// Connect to `rping -s`.
fn to_server(siw: &mut Siw) -> (Pd, Watched) {
    let addr = siw.server();
    let pd = Device::open().unwrap().alloc_pd().unwrap();
    let param = options(64, 1, link(true, 2, false)).param;
    let session = Session::connect(&pd, addr, &param).unwrap();
    let device = pd.device();
    (pd, Watched::new(session, device))
}

#[test]
fn what_siw_terminates_is_reported_with_its_code() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    let nowhere = RemoteAddr {
        addr: 0x1000,
        rkey: NO_STAG,
    };
    until_it_says_why(|| {
        let (pd, mut peer) = to_server(&mut siw);
        let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
        peer.post(SendWr::write(77, nowhere).sge(mr.sge(0, 100)));
        peer.peer_terminates("a write to an invalid STag", 0x1100)
    });
    until_it_says_why(|| {
        let (pd, mut peer) = to_server(&mut siw);
        let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
        peer.post(SendWr::read(77, nowhere).sge(mr.sge(0, 100)));
        let said = peer.peer_terminates("a read from an invalid STag", 0x0100);
        let wc = peer.failure(WcOpcode::Read);
        let code = if said { 0x0100 } else { 0 };
        assert_eq!((wc.status, wc.vendor_err), (WcStatus::WrFlushErr, code));
        said
    });
    until_it_says_why(|| {
        let (_pd, mut peer) = to_server(&mut siw);
        let message = peer.session.message();
        peer.post(SendWr::send_invalidate(77, NO_STAG).sge(message));
        peer.peer_terminates("an invalidation of an invalid STag", 0x0209)
    });
}

/// siw does not always say why it ends a connection; it has to within some tries.
fn until_it_says_why(mut case: impl FnMut() -> bool) {
    assert!((0..5).any(|_| case()), "siw never said why");
}

#[test]
fn bounds_and_invalidation_of_a_kernel_clients_memory() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    let base = options(4096, 1, link(true, 2, true));
    for (what, code) in [
        ("a write past the end", 0x1101),
        ("a read past the end", 0x0101),
        ("a read of memory that our Send invalidated", 0x0100),
    ] {
        until_it_says_why(|| {
            let ((said, device), output) =
                siw.client_against("rping -c -a", "-C 1 -S 4096", &base.param, |pd, request| {
                    let session = Session::accept(pd, request, &base.param).unwrap();
                    let mut peer = Watched::new(session, pd.device());
                    let mr = pd.alloc_mr(8192, Access::LOCAL_WRITE).unwrap();
                    let (source, len) = peer.session.receive().unwrap().expect("an advertisement");
                    assert_eq!(len, 4096);
                    peer.post(SendWr::read(1, source).sge(mr.sge(0, len)));
                    peer.session
                        .next(WcOpcode::Read)
                        .unwrap()
                        .expect("the data");
                    assert_eq!(mr.to_vec(0, len).unwrap(), rping::pattern(0, len));
                    match code {
                        0x1101 => peer.post(SendWr::write(77, source).sge(mr.sge(0, len + 1))),
                        0x0101 => peer.post(SendWr::read(77, source).sge(mr.sge(0, len + 1))),
                        _ => {
                            let message = peer.session.message();
                            let invalidate = SendWr::send_invalidate(2, source.rkey);
                            peer.session
                                .qp
                                .post_send_one(invalidate.sge(message))
                                .unwrap();
                            // It goes on as after any go-ahead.
                            let (sink, _) = peer.session.receive().unwrap().expect("the sink");
                            assert_ne!(sink.rkey, source.rkey);
                            peer.post(SendWr::read(77, source).sge(mr.sge(0, 1)));
                        }
                    }
                    (peer.peer_terminates(what, code), peer.device)
                });
            drop(device);
            let text = &output.text;
            assert!(
                text.contains("DISCONNECT") || text.contains("failed"),
                "{what}: {text}"
            );
            said
        });
    }
}

#[test]
fn a_kernel_server_that_uses_memory_it_may_not_is_terminated() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let nowhere = RemoteAddr {
        addr: 0,
        rkey: NO_STAG,
    };
    for (what, code) in [
        ("it reads from an invalid STag", 0x0100),
        ("it reads past the end", 0x0101),
        ("it reads memory that is not for reading", 0x0102),
        ("it writes to an invalid STag", 0x1100),
        ("it writes past the end", 0x1101),
        ("it writes memory that is not for writing", 0x0102),
    ] {
        let (pd, mut peer) = to_server(&mut siw);
        let good = pd.reg_mr(rping::pattern(0, 64), all).unwrap();
        let short = pd.alloc_mr(63, all).unwrap();
        let shut = pd.alloc_mr(64, Access::LOCAL_WRITE).unwrap();
        let bad = match what {
            _ if what.contains("STag") => nowhere,
            _ if what.contains("past") => short.remote(0),
            _ => shut.remote(0),
        };
        if what.contains("reads") {
            peer.session.advertise(bad, 64).unwrap();
        } else {
            peer.session.advertise(good.remote(0), 64).unwrap();
            peer.session.receive().unwrap().expect("a go-ahead");
            peer.session.advertise(bad, 64).unwrap();
        }
        peer.we_terminate(what, code);
        assert!(shut.to_vec(0, 64).unwrap().iter().all(|&byte| byte == 0));
    }
    // Its own program saw them all fail, and others can still ping it.
    assert_pings_siw(
        &mut siw,
        "after six errors",
        &options(64, 10, link(true, 2, true)),
    );
}

/// Run one of perftest's programs in the guest against our server.
fn perftest(siw: &mut Siw, program: &str, size: usize, count: u32) -> Served {
    let device = Device::open().unwrap();
    let param = ConnParam {
        options: link(true, 2, true),
        ..ConnParam::default()
    };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listener = Listener::bind(&device, any, 4, &param).unwrap();
    let port = listener.local_addr().port();
    let line = format!("timeout 100 {program} -R -F -s {size} -n {count} -p {port} {HOST}");
    let running = siw.guest.start(&line);
    let memory = counting(size + 8192);
    let (served, text) = thread::scope(|scope| {
        let serving = scope.spawn(|| perftest::serve(&device, &listener, &param, size, memory));
        let output = siw.guest.finish(&running, LONG);
        (serving.join().unwrap(), output.text)
    });
    let served = served.unwrap_or_else(|error| panic!("{program}: {error}\n{text}"));
    let result = text.lines().find(|line| {
        let mut words = line.split_whitespace().map(str::parse);
        words.next() == Some(Ok(size)) && words.next() == Some(Ok(count as usize))
    });
    // On a busy machine it cannot tell the speed of its clock, and says that it makes no report.
    assert!(
        result.is_some() || text.contains("produce a report"),
        "{text}"
    );
    let result = result.unwrap_or("no report").trim();
    say(&format!("siw {program} -R -> weft: {result}"));
    served
}

fn counting(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 253) as u8).collect()
}

#[test]
fn perftest_measures_against_us() {
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    for (size, count) in [(64, 500), (1 << 20, 20)] {
        let all = u64::from(count) * size as u64;
        let served = perftest(&mut siw, "ib_send_bw", size, count);
        assert_eq!((served.messages, served.bytes), (count, all));

        let served = perftest(&mut siw, "ib_write_bw", size, count);
        let placed = served.counters.rx_direct + served.counters.rx_copied;
        assert!(placed >= all, "{placed} of {all} bytes written");
        let before = counting(served.memory.len());
        assert_ne!(served.memory[..size], before[..size]);
        // It goes round in a page or two where its messages are short.
        let end = size.max(8192);
        assert_eq!(served.memory[end..], before[end..]);

        let served = perftest(&mut siw, "ib_read_bw", size, count);
        let sent = served.counters.tx_direct + served.counters.tx_copied;
        assert!(sent >= all, "{sent} of {all} bytes read");
        assert_eq!(served.memory, before);
    }
}

#[test]
fn a_command_that_does_not_end_is_told_of_and_killed() {
    let Some(mut siw) = siw() else { return };
    let run = std::panic::AssertUnwindSafe(|| siw.guest.run("sleep 1000", Duration::from_secs(2)));
    let told = std::panic::catch_unwind(run).expect_err("it does not end");
    let told = told.downcast::<String>().unwrap();
    assert!(told.contains("sleep, S (sleeping)"), "{told}");
    assert!(told.contains("nanosleep"), "{told}");
    siw.guest.must("true", STEP);
}
