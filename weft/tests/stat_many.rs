//! A process of many connections, asked by many clients.

mod common;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use common::{Output, weft};
use rustix::net::{self, AddressFamily, RecvFlags, SocketAddrUnix, SocketType};

/// A client of this process's one device that reads what it is told to, and when.
struct Client(OwnedFd);

impl Client {
    fn new() -> Self {
        let table = std::fs::read_to_string("/proc/net/unix").unwrap();
        let ours = format!("@weft-stat/1/{}/", std::process::id());
        // Accepted connections have its name too.
        let mut listening = table.lines().filter(|line| line.contains(" 00010000 "));
        let name = listening
            .find_map(|line| line.split_ascii_whitespace().find(|w| w.starts_with(&ours)))
            .unwrap();
        let socket = net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let addr = SocketAddrUnix::new_abstract_name(&name.as_bytes()[1..]).unwrap();
        net::connect(&socket, &addr).unwrap();
        Self(socket)
    }

    fn read(&self) -> String {
        let mut buf = [0; 4096];
        let (n, _) = net::recv(&self.0, &mut buf, RecvFlags::empty()).unwrap();
        String::from_utf8(buf[..n].to_vec()).unwrap()
    }

    /// Packets to the end.
    fn rest(&self) -> Vec<String> {
        let packets = std::iter::repeat_with(|| self.read());
        packets.take_while(|packet| !packet.is_empty()).collect()
    }
}

#[test]
fn many_connections_come_one_by_one_and_nobody_waits_for_a_slow_reader() {
    use weft_verbs::cm::{self, ConnParam};
    use weft_verbs::{Device, LocalMode, QpInit};
    const MANY: usize = 300;
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    let (pd, cq) = (
        device.alloc_pd().unwrap(),
        device.create_cq(16, None).unwrap(),
    );
    let param = ConnParam::default();
    let listener = cm::Listener::bind(&device, "127.0.0.1:0".parse().unwrap(), 64, &param).unwrap();
    let init = QpInit::new(&cq, &cq);
    let mut connections = Vec::new();
    std::thread::scope(|scope| {
        let connect = || {
            let accepting = scope.spawn(|| {
                let request = listener
                    .next_request(Some(Duration::from_secs(20)))
                    .unwrap();
                request
                    .accept(pd.create_qp(&init).unwrap(), &param)
                    .unwrap()
            });
            let connection = cm::connect(listener.local_addr(), &pd, &init, &param).unwrap();
            [connection, accepting.join().unwrap()]
        };
        connections.extend((0..MANY).flat_map(|_| connect()));
        let port = format!(":{}", listener.local_addr().port());
        let stat = || {
            let pid = std::process::id().to_string();
            let out = Output::of(weft().args(["stat", "--json", &pid]));
            out.ok();
            out.stdout
                .lines()
                .filter(|line| line.contains(&port))
                .count()
        };
        assert_eq!(stat(), 2 * MANY);

        // More than a socket's buffer holds: these do not read, and hold up neither connections nor other clients.
        let slow: Vec<_> = (0..4).map(|_| Client::new()).collect();
        connections.extend(connect());
        assert_eq!(stat(), 2 * MANY + 2);
        for client in slow {
            let told = client.rest();
            assert_eq!(told[0], "device 0");
            assert_eq!(told.last().unwrap(), "end");
            // The connection that came later may be in it or not.
            let ours = told.len() - 2;
            assert!((2 * MANY..=2 * MANY + 2).contains(&ours), "{ours}");
        }

        // Past the eighth at a time nobody is told anything. When they go there is room again.
        let crowd: Vec<_> = (0..12).map(|_| Client::new()).collect();
        let refused = crowd.iter().filter(|client| client.read().is_empty());
        assert!(refused.count() >= 4);
        drop(crowd);
        let began = Instant::now();
        while stat() != 2 * MANY + 2 {
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "the crowd has left"
            );
        }
    });
}
