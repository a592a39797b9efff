//! Captures: packets without a link layer, with headers that we make, and what tshark says of them.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

const SCRIPT: &str = include_str!("../../../../weft/src/dissector/weft.lua");
const UDP: u8 = 17;
const TCP: u8 = 6;
const SYN: u8 = 2;
const ACK: u8 = 16;
/// Bytes of a packet at most.
const SEGMENT: usize = 60_000;

pub(crate) fn have_tshark() -> bool {
    let tried = Command::new("tshark").arg("-v").output();
    if let Err(error) = &tried {
        println!("skipped: tshark: {error}");
    }
    tried.is_ok()
}

/// A capture file in the making.
pub(crate) struct Capture {
    packets: Vec<u8>,
    /// Packets so far, which are their times.
    count: u32,
}

impl Capture {
    pub(crate) fn new() -> Capture {
        let mut packets = Vec::new();
        for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 0x0004_0000, 101] {
            packets.extend_from_slice(&word.to_ne_bytes());
        }
        Capture { packets, count: 0 }
    }

    /// An IPv4 packet on the loopback interface.
    fn packet(&mut self, protocol: u8, header: &[u8], payload: &[u8]) {
        self.count += 1;
        let total = (20 + header.len() + payload.len()) as u16;
        for word in [self.count, 0, u32::from(total), u32::from(total)] {
            self.packets.extend_from_slice(&word.to_ne_bytes());
        }
        self.packets.extend_from_slice(&[0x45, 0]);
        self.packets.extend_from_slice(&total.to_be_bytes());
        let rest = [0, 0, 0, 0, 64, protocol, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1];
        self.packets.extend_from_slice(&rest);
        self.packets.extend_from_slice(header);
        self.packets.extend_from_slice(payload);
    }

    pub(crate) fn udp(&mut self, datagram: &[u8]) {
        let mut header = Vec::new();
        for half in [40_000, 40_001, datagram.len() as u16 + 8, 0] {
            header.extend_from_slice(&half.to_be_bytes());
        }
        self.packet(UDP, &header, datagram);
    }

    /// A whole connection, as [`Relay`] has heard it.
    pub(crate) fn tcp(&mut self, heard: &[(Side, Vec<u8>)]) {
        let mut numbers = [1000_u32, 5000];
        let mut segment = |side: Side, flags: u8, payload: &[u8]| {
            let (mine, other) = (side as usize, 1 - side as usize);
            let ports = [41_000_u16, 41_001];
            let mut header = Vec::new();
            header.extend_from_slice(&ports[mine].to_be_bytes());
            header.extend_from_slice(&ports[other].to_be_bytes());
            header.extend_from_slice(&numbers[mine].to_be_bytes());
            let ack = if flags == SYN { 0 } else { numbers[other] };
            header.extend_from_slice(&ack.to_be_bytes());
            header.extend_from_slice(&[0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
            self.packet(TCP, &header, payload);
            numbers[mine] += payload.len() as u32 + u32::from(flags & SYN != 0);
        };
        segment(Side::Dialler, SYN, &[]);
        segment(Side::Listener, SYN | ACK, &[]);
        segment(Side::Dialler, ACK, &[]);
        for (side, bytes) in heard {
            for part in bytes.chunks(SEGMENT) {
                segment(*side, ACK, part);
            }
        }
    }

    /// These fields of each packet, separated by `;`; the values of one that is there several times by `,`.
    pub(crate) fn rows(&self, fields: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().expect("a folder");
        let (script, file) = (folder.path().join("weft.lua"), folder.path().join("c.pcap"));
        std::fs::write(&script, SCRIPT).expect("written");
        let mut out = std::fs::File::create(&file).expect("a file");
        out.write_all(&self.packets).expect("written");
        let mut command = Command::new("tshark");
        command
            .arg("-X")
            .arg(format!("lua_script:{}", script.display()))
            .args(["-o", "tcp.try_heuristic_first:TRUE"])
            // They would take payload of ours for theirs, and find it malformed.
            .args(["--disable-protocol", "rpcordma"])
            .args(["--disable-protocol", "smb_direct", "-n", "-r"])
            .arg(&file)
            .args(["-T", "fields", "-E", "separator=;", "-E", "aggregator=,"]);
        for field in fields {
            command.args(["-e", field]);
        }
        let output = command.output().expect("tshark runs");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{complaint}");
        assert!(!complaint.contains("Lua"), "{complaint}");
        let text = String::from_utf8_lossy(&output.stdout);
        // tshark 4 writes True where tshark 3 wrote 1.
        let same = |text: &str| text.replace("True", "1").replace("False", "0");
        text.lines().map(same).collect()
    }
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Dialler = 0,
    Listener = 1,
}

/// What went over a connection, in order.
pub(crate) type Heard = Vec<(Side, Vec<u8>)>;

/// Stands between two ends of one connection, and keeps what it carries.
pub(crate) struct Relay {
    pub addr: SocketAddr,
    heard: Arc<Mutex<Heard>>,
    carrying: thread::JoinHandle<()>,
}

impl Relay {
    /// To dial in place of `to`.
    pub(crate) fn to(to: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("an address");
        let heard = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&heard);
        let carrying = thread::spawn(move || {
            let (dialler, _) = listener.accept().expect("a connection");
            let server = TcpStream::connect(to).expect("a connection");
            let back = (server.try_clone(), dialler.try_clone());
            let (server_too, dialler_too) = (back.0.expect("a handle"), back.1.expect("a handle"));
            thread::scope(|s| {
                s.spawn(|| carry(dialler, server, Side::Dialler, &kept));
                s.spawn(|| carry(server_too, dialler_too, Side::Listener, &kept));
            });
        });
        Relay {
            addr,
            heard,
            carrying,
        }
    }

    /// What went through, in the order in which it came, when both ends have closed.
    pub(crate) fn finish(self) -> Heard {
        self.carrying.join().expect("it carried");
        std::mem::take(&mut *self.heard.lock().expect("nobody panicked"))
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, side: Side, heard: &Mutex<Heard>) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        // Kept before the other end can answer it.
        let mut heard = heard.lock().expect("nobody panicked");
        heard.push((side, buffer[..n].to_vec()));
        drop(heard);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
