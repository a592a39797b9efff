//! What tshark makes of our conversations: a reader of the wire that we did not write.
//!
//! Every message kind goes over the loopback while dumpcap listens; then tshark dissects the capture. Its iWARP dissector is
//! heuristic: it has to see the start-up frames, and `tcp.try_heuristic_first` keeps others that go by port numbers
//! from taking the connection first.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use weft_interop::guest::say;
use weft_verbs::cm::{self, ConnParam, ConnectError, LinkOptions, Listener};
use weft_verbs::{
    Access, Cq, Device, EndReason, LocalMode, Mr, Pd, Qp, QpInit, RecvWr, SendWr, Wc, WcStatus,
};

const STEP: Duration = Duration::from_mins(1);
/// Comes last in the capture.
const END_MARK: &[u8] = b"the capture ends here";

/// dumpcap on the loopback.
struct Capture {
    dumpcap: Child,
    folder: tempfile::TempDir,
}

impl Capture {
    /// Returns when it captures. `Err` says why it cannot.
    fn start(filter: &str) -> Result<Capture, String> {
        let folder = tempfile::tempdir().unwrap();
        let mut dumpcap = Command::new("dumpcap")
            .args(["-q", "-i", "lo", "-B", "64", "-f", filter, "-w"])
            .arg(folder.path().join("capture"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("dumpcap: {error}"))?;
        let mut said = String::new();
        // It names the file when the interface is open.
        for line in BufReader::new(dumpcap.stderr.take().unwrap()).lines() {
            let line = line.unwrap();
            if line.starts_with("File:") {
                return Ok(Capture { dumpcap, folder });
            }
            let _ = writeln!(said, "{line}");
        }
        let _ = dumpcap.wait();
        Err(format!("dumpcap cannot capture: {}", said.trim()))
    }

    /// Returns the file, with all that went through `listener`'s port before.
    fn finish(&mut self, listener: &std::net::TcpListener) -> std::path::PathBuf {
        let addr = listener.local_addr().unwrap();
        let mut last = TcpStream::connect(addr).unwrap();
        last.write_all(END_MARK).unwrap();
        let file = self.folder.path().join("capture");
        let begun = Instant::now();
        while !holds(&file, END_MARK) {
            assert!(begun.elapsed() < STEP, "the capture does not end");
            thread::sleep(Duration::from_millis(50));
        }
        self.stop();
        file
    }

    fn stop(&mut self) {
        // What it has captured is in the file: it writes each batch of packets as it comes.
        let _ = self.dumpcap.kill();
        let _ = self.dumpcap.wait();
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if matches!(self.dumpcap.try_wait(), Ok(None)) {
            self.stop();
        }
    }
}

/// What is captured is what goes over the loopback interface.
fn over_tcp() -> Device {
    let device = Device::builder().local(LocalMode::Off).open();
    device.expect("a device")
}

fn holds(file: &Path, mark: &[u8]) -> bool {
    let bytes = std::fs::read(file).unwrap_or_default();
    bytes.windows(mark.len()).any(|window| window == mark)
}

fn tshark(file: &Path, args: &[&str]) -> String {
    let output = Command::new("tshark")
        .arg("-r")
        .arg(file)
        .args(["-n", "-o", "tcp.try_heuristic_first:TRUE"])
        // They would take payload of ours for theirs, and find it malformed.
        .args(["--disable-protocol", "rpcordma"])
        .args(["--disable-protocol", "smb_direct"])
        .args(args)
        .output()
        .expect("tshark runs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tshark {args:?}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

struct End {
    pd: Pd,
    cq: Cq,
    qp: Qp,
    /// What the peer may use.
    mr: Mr,
    /// Where receives, reads and atomics land.
    sink: Mr,
}

impl End {
    fn objects(device: &Device) -> (Pd, Cq, Qp, Mr, Mr) {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256, None).unwrap();
        let qp = pd.create_qp(&QpInit::new(&cq, &cq)).unwrap();
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::MW_BIND;
        let mr = pd.alloc_mr(1 << 20, all).unwrap();
        let sink = pd.alloc_mr(1 << 20, Access::LOCAL_WRITE).unwrap();
        for id in 0..32 {
            let recv = RecvWr::new(id).sge(sink.sge(0, 4096));
            qp.post_recv(&[recv]).unwrap();
        }
        (pd, cq, qp, mr, sink)
    }

    fn wait(&self) -> Wc {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.wait(&mut wc, Some(STEP)), Ok(1));
        wc[0]
    }

    /// Post, and wait for its completion.
    fn carry_out(&self, wr: SendWr) {
        self.qp.post_send_one(wr.signaled()).unwrap();
        let wc = self.wait();
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
    }
}

fn connect(listener: &Listener, param: &ConnParam) -> (End, End) {
    let device = over_tcp();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (pd, cq, qp, mr, sink) = End::objects(&device);
            let request = listener.next_request(Some(STEP)).unwrap();
            assert_eq!(request.private_data(), param.private_data);
            let qp = request.accept(qp, param).unwrap().qp;
            End {
                pd,
                cq,
                qp,
                mr,
                sink,
            }
        });
        let (pd, cq, qp, mr, sink) = End::objects(&device);
        let qp = cm::connect_qp(addr, qp, &device, param).unwrap().qp;
        let client = End {
            pd,
            cq,
            qp,
            mr,
            sink,
        };
        (client, server.join().unwrap())
    })
}

/// Messages by the number of their opcode.
type Counts = BTreeMap<u8, u32>;

/// Every kind of message, from the client to the server, and at last one that the server terminates.
///
/// With markers tshark takes each TCP segment for one FPDU: then all messages are short, and a Write with Immediate Data,
/// which is two FPDUs, is left out.
fn conversation(listener: &Listener, param: &ConnParam) -> Counts {
    let (client, server) = connect(listener, param);
    let mut counts = Counts::new();
    let mut count = |opcode: u8, messages: u32| *counts.entry(opcode).or_default() += messages;
    let memory = |off| server.mr.remote(off);
    let data = |len| client.mr.sge(0, len);
    let pattern: Vec<u8> = (0..300_000u32).map(|i| (i / 3) as u8).collect();
    client.mr.write(0, &pattern).unwrap();
    let markers = param.options.recv_markers;
    let longest = if markers { 1300 } else { pattern.len() };
    if param.options.revision == 2 && param.options.peer_to_peer {
        count(0, 1); // the ready-to-receive message, an empty Write
    }
    for len in [1, 20, 1500, 4096].map(|len| longest.min(len)) {
        client.carry_out(SendWr::send(1).sge(data(len)));
        count(3, 1);
        client.carry_out(SendWr::send(2).sge(data(len)).solicited());
        count(5, 1);
    }
    let windows = [false, true].map(|solicited| (solicited, server.pd.alloc_mw().unwrap()));
    for (solicited, window) in &windows {
        let (bind, rkey) = window.bind(3, &server.mr, 0, 4096, Access::REMOTE_READ);
        server.qp.post_send_one(bind).unwrap();
        // The server's own Send tells that the window is there.
        server
            .qp
            .post_send_one(SendWr::send(4).inline(b"bound"))
            .unwrap();
        let wc = client.wait();
        assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 5));
        count(3, 1);
        let mut send = SendWr::send_invalidate(5, rkey).sge(data(8));
        send.solicited = *solicited;
        client.carry_out(send);
        count(if *solicited { 6 } else { 4 }, 1);
    }
    for len in [0, 1, 5000, 300_000].map(|len| longest.min(len)) {
        client.carry_out(SendWr::write(6, memory(0)).sge(data(len)));
        count(0, 1);
        client.carry_out(SendWr::read(7, memory(0)).sge(client.sink.sge(0, len)));
        count(1, 1);
        count(2, 1);
        assert_eq!(client.sink.to_vec(0, len).unwrap(), pattern[..len]);
    }
    if !markers {
        client.carry_out(SendWr::write_imm(8, memory(0), 0x1122).sge(data(100)));
        client.carry_out(
            SendWr::write_imm(9, memory(0), 0x3344)
                .sge(data(100))
                .solicited(),
        );
        count(0, 2);
        count(8, 1);
        count(9, 1);
    }
    let old = || client.sink.sge(0, 8);
    client.carry_out(SendWr::fetch_add(10, memory(0), 1).sge(old()));
    client.carry_out(SendWr::compare_swap(11, memory(0), 1, 2).sge(old()));
    client.carry_out(SendWr::swap(12, memory(0), 3).sge(old()));
    count(10, 3);
    count(11, 3);
    let (ended, end) = std::sync::mpsc::channel();
    client.qp.on_end(move |reason| ended.send(reason).unwrap());
    let past = server.mr.remote(server.mr.len());
    client
        .qp
        .post_send_one(SendWr::write(13, past).sge(data(1)))
        .unwrap();
    count(0, 1);
    assert_eq!(
        end.recv_timeout(STEP),
        Ok(EndReason::PeerTerminated(0x1101))
    );
    count(7, 1);
    counts
}

fn rejection(listener: &Listener, param: &ConnParam) {
    let device = over_tcp();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = listener.next_request(Some(STEP)).unwrap();
            request.reject(b"not today").unwrap();
        });
        let (_pd, _cq, qp, ..) = End::objects(&device);
        let outcome = cm::connect_qp(addr, qp, &device, param).map(|_| ());
        assert!(
            matches!(&outcome, Err(ConnectError::Rejected { private_data }) if private_data == b"not today"),
            "{outcome:?}"
        );
    });
}

/// What tshark shows of one connection.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Messages by opcode: segments with the Last flag.
    messages: Counts,
    fpdus: u32,
    good_crcs: u32,
    bad_crcs: u32,
    malformed: u32,
}

/// The number at the end of `OpCode: Send (0x3)`, if it is hexadecimal.
fn opcode(line: &str) -> Option<u8> {
    let (_, number) = line.trim_end_matches(')').rsplit_once("(0x")?;
    u8::from_str_radix(number, 16).ok()
}

fn dissect(file: &Path, port: u16) -> Seen {
    let filter = format!("tcp.port == {port}");
    let text = tshark(file, &["-Y", &filter, "-V"]);
    let mut seen = Seen::default();
    let mut last = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("ULPDU length:") {
            seen.fpdus += 1;
        } else if line.contains("Good CRC32") {
            seen.good_crcs += 1;
        } else if line.contains("Bad CRC32") {
            seen.bad_crcs += 1;
        } else if line.contains("Malformed Packet") {
            seen.malformed += 1;
        } else if line.contains("= Last flag:") {
            last = line.ends_with("True");
        } else if line.contains("= OpCode:") && last {
            // The field of the same name in atomic requests is not in hexadecimal.
            if let Some(number) = opcode(line) {
                *seen.messages.entry(number).or_default() += 1;
            }
        }
    }
    seen
}

/// `marker crc reject revision` of the start-up frames of a connection.
fn start_up(file: &Path, port: u16) -> Vec<String> {
    let filter = format!("tcp.port == {port} && (iwarp_mpa.req || iwarp_mpa.rep)");
    let fields = ["marker_flag", "crc_flag", "rej_flag", "rev"].map(|f| format!("iwarp_mpa.{f}"));
    let mut args = vec!["-Y", &filter, "-T", "fields", "-E", "separator=/s"];
    for field in &fields {
        args.extend(["-e", field]);
    }
    tshark(file, &args).lines().map(str::to_owned).collect()
}

#[test]
fn every_message_kind_is_what_tshark_takes_it_for() {
    let skipped = |why: &str| say(&format!("tshark test skipped: {why}"));
    if let Err(error) = Command::new("tshark").arg("-v").output() {
        return skipped(&format!("tshark: {error}"));
    }
    let base = LinkOptions::default();
    let short = 1400;
    let cases = [
        ("revision 2, CRC, peer to peer", base),
        (
            "revision 2, CRC, short segments",
            LinkOptions {
                peer_to_peer: false,
                max_ulpdu: short,
                ..base
            },
        ),
        (
            "revision 1, CRC",
            LinkOptions {
                revision: 1,
                ..base
            },
        ),
        (
            "revision 2, CRC, markers",
            LinkOptions {
                recv_markers: true,
                max_ulpdu: short,
                ..base
            },
        ),
        (
            "revision 1, no CRC",
            LinkOptions {
                revision: 1,
                crc: false,
                ..base
            },
        ),
    ];
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let device = over_tcp();
    let cases = cases.map(|(what, options)| {
        let param = ConnParam {
            private_data: b"from tests/interop".to_vec(),
            options,
            ..ConnParam::default()
        };
        (
            what,
            Listener::bind(&device, any, 4, &param).unwrap(),
            param,
        )
    });
    let rejecting = Listener::bind(&device, any, 4, &ConnParam::default()).unwrap();
    let ending = std::net::TcpListener::bind(any).unwrap();

    let ports = cases
        .iter()
        .map(|(_, listener, _)| listener.local_addr().port());
    let ports = ports.chain([
        rejecting.local_addr().port(),
        ending.local_addr().unwrap().port(),
    ]);
    let filter: Vec<String> = ports.map(|port| format!("tcp port {port}")).collect();
    let mut capture = match Capture::start(&filter.join(" or ")) {
        Ok(capture) => capture,
        Err(why) => return skipped(&why),
    };
    let sent: Vec<Counts> = cases
        .iter()
        .map(|(_, listener, param)| conversation(listener, param))
        .collect();
    rejection(&rejecting, &ConnParam::default());
    let file = capture.finish(&ending);

    for ((what, listener, param), sent) in cases.iter().zip(sent) {
        let port = listener.local_addr().port();
        let seen = dissect(&file, port);
        say(&format!("tshark, {what}: {seen:?}"));
        assert_eq!((seen.malformed, seen.bad_crcs), (0, 0), "{what}");
        assert_eq!(seen.messages, sent, "{what}");
        let options = &param.options;
        let checked = if options.crc { seen.fpdus } else { 0 };
        assert_eq!(seen.good_crcs, checked, "{what}: every FPDU's CRC");
        let flags = |reject| {
            let bit = u8::from;
            let (markers, crc) = (bit(options.recv_markers), bit(options.crc));
            format!("{markers} {crc} {reject} {}", options.revision)
        };
        assert_eq!(start_up(&file, port), [flags(0), flags(0)], "{what}");
    }
    let port = rejecting.local_addr().port();
    assert_eq!(
        start_up(&file, port),
        ["0 1 0 2", "0 1 1 2"],
        "the rejection"
    );
}
