//! What Wireshark's dissector makes of RoCE v2: a run of all operations and of the connection manager over the loopback interface of a network namespace
//! of its own, captured there. No packet may be malformed. The dissector does not check the ICRC, so this test does, over the bytes as captured.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use weft_interop::guest::say;
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, RecvWr, RemoteAddr, RoceConnect, RoceEvent, RoceInit, RocePath,
    RocePort, RoceQp, RoceRequest, RoceSend, SendWr, Wc, WcStatus,
};

const LONG: Duration = Duration::from_mins(1);
const MTU: usize = 1024;
const SERVICE: u16 = 7174;
/// Where datagrams go that show that the capture has begun.
const PROBED: &str = "127.0.0.3";

#[test]
fn the_dissector_reads_every_packet() {
    if let Err(error) = Command::new("tshark").arg("-v").output() {
        return say(&format!("skipped: tshark: {error}"));
    }
    let me = std::env::current_exe().expect("this program");
    let done = Command::new("unshare")
        .args(["--net", "--"])
        .arg(me)
        .args(["--exact", "in_a_network_of_its_own", "--ignored"])
        .arg("--nocapture")
        .output();
    let done = match done {
        Ok(done) => done,
        Err(error) => return say(&format!("skipped: cannot run unshare: {error}")),
    };
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    if text.contains("unshare: unshare failed") {
        return say("skipped: no network namespace may be made here");
    }
    assert!(done.status.success(), "{text}");
    for line in text.lines().filter(|line| line.starts_with("interop: ")) {
        say(&line["interop: ".len()..]);
    }
}

fn ip(line: &str) {
    let words = line.split(' ');
    let done = Command::new("ip").args(words).status().expect("ip");
    assert!(done.success(), "ip {line}");
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn in_a_network_of_its_own() {
    // A train of packets is cut before it is captured, as on a link.
    ip("link set lo up mtu 65536 gso_max_segs 1");
    ip("addr add fd00::1/128 dev lo nodad");
    ip("addr add fd00::2/128 dev lo nodad");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("roce.pcap");
    let capture = Capture::start(&file);
    let v4 = |n| IpAddr::from(Ipv4Addr::new(127, 0, 0, n));
    let v6 = |n| IpAddr::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n));
    let mut sent = 0;
    for (a, b) in [(v4(1), v4(2)), (v6(1), v6(2))] {
        sent += reliable(a, b);
        sent += unreliable(a, b);
        managed(a, b);
    }
    capture.stop(sent);
    dissected(&file);
    let checked = icrcs(&std::fs::read(&file).expect("the capture"));
    say(&format!("{checked} packets captured, each with its ICRC"));
    assert!(checked >= sent && sent > 1000, "{checked} of {sent}");
}

/// A running capture.
struct Capture {
    tshark: Child,
    /// A line for each packet.
    shown: Receiver<String>,
}

impl Capture {
    fn start(file: &Path) -> Capture {
        let mut child = Command::new("tshark")
            .args(["-i", "lo", "-f", "udp port 4791", "-F", "pcap", "-P", "-l"])
            .args(["-n", "-T", "fields", "-e", "frame.number", "-w"])
            .arg(file)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("tshark runs");
        // It captures when it shows a packet: those of this socket, until it does.
        let lines = child.stdout.take().expect("a pipe");
        let (tell, shown) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                let _ = tell.send(line);
            }
        });
        let probe = std::net::UdpSocket::bind("127.0.0.3:0").expect("a socket");
        let mut left = 600;
        while shown.recv_timeout(Duration::from_millis(100)).is_err() {
            probe.send_to(b"probe", (PROBED, 4791)).expect("it is sent");
            left -= 1;
            assert!(left > 0, "tshark captures nothing");
        }
        Capture {
            tshark: child,
            shown,
        }
    }

    /// Ends it when it has shown as many packets as were sent.
    fn stop(mut self, packets: usize) {
        for shown in 0..packets {
            let more = self.shown.recv_timeout(LONG);
            assert!(more.is_ok(), "{shown} of {packets} packets were captured");
        }
        let pid = Pid::from_child(&self.tshark);
        kill_process(pid, Signal::INT).expect("it runs");
        self.tshark.wait().expect("it ends");
    }
}

struct End {
    device: Device,
    pd: Pd,
    cq: Cq,
    port: RocePort,
    qp: Arc<RoceQp>,
    mr: Mr,
}

const PSN: u32 = 0xff_fff8;

impl End {
    fn new(ip: IpAddr, unreliable: bool) -> End {
        let device = Device::open().expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(256, None).expect("a queue");
        let init = RoceInit {
            unreliable,
            ..RoceInit::new(&cq, &cq)
        };
        End {
            port: device.bind_roce(ip, 0).expect("the port"),
            qp: Arc::new(pd.create_roce_qp(&init).expect("a queue pair")),
            mr: pd.alloc_mr(1 << 20, Access::all()).expect("memory"),
            pd,
            cq,
            device,
        }
    }

    fn path(&self) -> RocePath {
        RocePath {
            peer: self.port.local_addr().ip(),
            scope: 0,
            dest_qp: self.qp.num(),
            rq_psn: PSN,
            mtu: MTU as u32,
            ird: 4,
            rnr_timer: 1,
            traffic_class: 0,
        }
    }

    fn wait(&self) -> Wc {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.wait(&mut wc, Some(LONG)), Ok(1));
        wc[0]
    }

    fn remote(&self, offset: u64) -> RemoteAddr {
        RemoteAddr {
            addr: offset,
            rkey: self.mr.rkey(),
        }
    }

    fn post(&self, wr: SendWr) {
        self.qp.post_send(wr.signaled()).expect("room");
    }

    fn receive(&self) {
        let wr = RecvWr::new(1).sge(self.mr.sge(0, 1 << 20));
        self.qp.post_recv(&[wr]).expect("room");
    }
}

fn join(a: &End, b: &End) {
    a.qp.receive_from(&a.port, &b.path()).expect("a peer");
    b.qp.receive_from(&b.port, &a.path()).expect("a peer");
    for end in [a, b] {
        let send = RoceSend {
            sq_psn: PSN,
            ord: 4,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
        };
        end.qp.send_with(&send).expect("ready");
    }
}

/// The lengths of messages: with padding and without, in one packet, two, and many.
const LENGTHS: [usize; 8] = [0, 1, 2, 3, MTU, MTU + 1, 2 * MTU + 7, 100_000];

/// All that a reliable connection has. Returns how many packets one side has sent.
fn reliable(a: IpAddr, b: IpAddr) -> usize {
    let (a, b) = (End::new(a, false), End::new(b, false));
    join(&a, &b);
    for len in LENGTHS {
        let sge = || a.mr.sge(0, len);
        let sends = [
            SendWr::send(1).sge(sge()),
            SendWr::send_imm(2, 0x0102_0304).sge(sge()).solicited(),
            SendWr::write_imm(3, b.remote(4), 7).sge(sge()),
        ];
        for send in sends {
            b.receive();
            a.post(send);
            b.wait().ok().expect("received");
            a.wait().ok().expect("sent");
        }
        a.post(SendWr::write(4, b.remote(4)).sge(sge()));
        a.wait().ok().expect("written");
        a.post(SendWr::read(5, b.remote(4)).sge(sge()));
        a.wait().ok().expect("read");
        // With a key that ends.
        let window = b.pd.alloc_mw().expect("a window");
        let (bind, key) = window.bind(6, &b.mr, 0, 64, Access::REMOTE_WRITE);
        b.post(bind);
        b.wait().ok().expect("bound");
        b.receive();
        a.post(SendWr::send_invalidate(7, key).sge(sge()));
        b.wait().ok().expect("received");
        a.wait().ok().expect("sent");
    }
    a.post(SendWr::fetch_add(8, b.remote(8), 1).sge(a.mr.sge(0, 8)));
    a.wait().ok().expect("added");
    a.post(SendWr::compare_swap(9, b.remote(8), 1, 2).sge(a.mr.sge(0, 8)));
    a.wait().ok().expect("swapped");
    // The receiver is not ready at first, and then refuses.
    a.post(SendWr::send(10).sge(a.mr.sge(0, 8)));
    let mut wc = [Wc::default()];
    assert_eq!(a.cq.wait(&mut wc, Some(Duration::from_millis(20))), Ok(0));
    b.receive();
    b.wait().ok().expect("received");
    a.wait().ok().expect("sent");
    a.post(SendWr::write(11, b.remote(1 << 20)).sge(a.mr.sge(0, 8)));
    assert_eq!(a.wait().status, WcStatus::RemAccessErr);
    let event = b.device.get_async_event(Some(LONG));
    assert!(event.is_some(), "the refusal is reported");
    (a.qp.counters().sent + b.qp.counters().sent) as usize
}

fn unreliable(a: IpAddr, b: IpAddr) -> usize {
    let (a, b) = (End::new(a, true), End::new(b, true));
    join(&a, &b);
    for len in LENGTHS {
        let sge = || a.mr.sge(0, len);
        let sends = [
            SendWr::send(1).sge(sge()),
            SendWr::send_imm(2, 0x0102_0304).sge(sge()),
            SendWr::write_imm(3, b.remote(4), 7).sge(sge()),
        ];
        for send in sends {
            b.receive();
            a.post(send);
            b.wait().ok().expect("received");
            a.wait().ok().expect("sent");
        }
        a.post(SendWr::write(4, b.remote(4)).sge(sge()));
        a.wait().ok().expect("written");
    }
    a.qp.counters().sent as usize
}

/// A connection that is refused, one that nobody listens for, and one that is made and ended.
fn managed(a: IpAddr, b: IpAddr) {
    let (a, b) = (End::new(a, false), End::new(b, false));
    let (tell, asked) = channel::<RoceRequest>();
    let on_request = move |request| drop(tell.send(request));
    let _listening = b.port.listen(SERVICE, 4, on_request).expect("a listener");
    let dial = |number| -> (_, Receiver<RoceEvent>) {
        let (tell, told) = channel();
        let to = SocketAddr::new(b.port.local_addr().ip(), number);
        let param = RoceConnect {
            private_data: b"question".to_vec(),
            ..RoceConnect::default()
        };
        let on_event = move |event| drop(tell.send(event));
        let conn = a.port.dial(&a.qp, (to, 0), 4711, &param, on_event);
        (conn.expect("room"), told)
    };
    let refused = |told: &Receiver<RoceEvent>| {
        let event = told.recv_timeout(LONG).expect("an answer");
        assert!(matches!(event, RoceEvent::Rejected { .. }), "{event:?}");
    };
    refused(&dial(SERVICE + 1).1);
    let (_conn, told) = dial(SERVICE);
    asked.recv_timeout(LONG).expect("a request").reject(b"no");
    refused(&told);
    let (conn, told) = dial(SERVICE);
    let request = asked.recv_timeout(LONG).expect("a request");
    let (tell, theirs) = channel();
    let on_event = move |event| drop(tell.send(event));
    let made = request.accept(&b.qp, &RoceConnect::default(), on_event);
    let _made = made.expect("accepted");
    for told in [&told, &theirs] {
        let event = told.recv_timeout(LONG).expect("an answer");
        assert!(matches!(event, RoceEvent::Established { .. }), "{event:?}");
    }
    conn.disconnect();
    for told in [&told, &theirs] {
        let event = told.recv_timeout(LONG).expect("an answer");
        assert_eq!(event, RoceEvent::Disconnected);
    }
}

/// What tshark says of each packet.
fn dissected(file: &Path) {
    let fields = [
        "frame.number",
        "frame.protocols",
        "infiniband.bth.opcode",
        "infiniband.mad.attributeid",
        "_ws.malformed",
        "_ws.expert.message",
        "ip.dst",
    ];
    let mut command = Command::new("tshark");
    command.args(["-n", "-r"]).arg(file);
    // What programs send is theirs: these would take payload for their own.
    for protocol in ["rpcordma", "smb_direct", "iser", "nvme-rdma"] {
        command.args(["--disable-protocol", protocol]);
    }
    command.args(["-T", "fields", "-E", "separator=;"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let done = command.output().expect("tshark runs");
    assert!(done.status.success(), "{done:?}");
    let text = String::from_utf8_lossy(&done.stdout);
    let (mut opcodes, mut attributes) = (BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        let values: Vec<&str> = line.split(';').collect();
        if values[6] == PROBED {
            continue;
        }
        assert!(values[4].is_empty() && values[5].is_empty(), "{line}");
        opcodes.insert(number(values[2]));
        attributes.extend((!values[3].is_empty()).then(|| number(values[3])));
    }
    // Of both services all, but for those that RoCE does not have.
    let reliable = (0x00..=0x14).chain([0x16, 0x17]);
    let unreliable = 0x20..=0x2b;
    let expected: BTreeSet<u64> = reliable.chain(unreliable).chain([0x64]).collect();
    assert_eq!(opcodes, expected);
    // REQ, REJ, REP, RTU, DREQ, DREP.
    let expected = BTreeSet::from([0x10, 0x12, 0x13, 0x14, 0x15, 0x16]);
    assert_eq!(attributes, expected);
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

/// Computes the ICRC (annex A17.3.3) of each packet in a capture anew, over the headers that are in it. Returns how many there were.
fn icrcs(capture: &[u8]) -> usize {
    let word = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().expect("four"));
    assert_eq!((word(0), word(20)), (0xa1b2_c3d4, 1), "Ethernet frames");
    let (mut at, mut count) = (24, 0);
    while at < capture.len() {
        let len = word(at + 8) as usize;
        assert_eq!(len, word(at + 12) as usize, "a packet was cut off");
        let frame = &capture[at + 16..at + 16 + len];
        at += 16 + len;
        let packet = &frame[14..];
        let ip_len = if packet[0] >> 4 == 4 { 20 } else { 40 };
        if packet.len() < ip_len + 8 + 16 {
            continue;
        }
        let (covered, icrc) = packet.split_at(packet.len() - 4);
        let mut covered = [&[0xff; 8], covered].concat();
        // What a router changes: type of service, time to live and checksum; traffic class, flow label and hop limit.
        let masked: &[usize] = match ip_len {
            20 => &[1, 8, 10, 11],
            _ => &[1, 2, 3, 7],
        };
        for at in masked {
            covered[8 + at] = 0xff;
        }
        if ip_len == 40 {
            covered[8] |= 0x0f;
        }
        // The checksum of UDP, and a byte of the BTH.
        for at in [ip_len + 6, ip_len + 7, ip_len + 8 + 4] {
            covered[8 + at] = 0xff;
        }
        let mut crc = !0_u32;
        for byte in covered {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ ((crc & 1) * 0xedb8_8320);
            }
        }
        count += 1;
        assert_eq!((!crc).to_le_bytes(), icrc, "packet {count}: {packet:x?}");
    }
    count
}
