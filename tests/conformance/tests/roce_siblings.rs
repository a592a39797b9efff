//! Several processes at one address of RoCE: packets and requests come to the right one, and strangers and deaths do no harm.
//!
//! Two devices of one process share an address as those of two processes do; processes of their own are started where one is to die or to be of
//! another user.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use weft_conformance::twin::again;
use weft_sys::unix::{self, Kind, Name};
use weft_verbs::cm::LookupError;
use weft_verbs::{
    Access, Device, Error, Grh, RecvWr, RemoteAddr, RoceConnect, RoceEvent, RoceInit, RocePath,
    RoceUdInit, RoceUdQp, SendWr, UD_GROUP, UdDest, WcStatus,
};

use super::roce::{End, Options, PATIENCE, address, events, join, listening};

/// Processes at the address that are not of this test run elsewhere: it has a number of its own.
const NUMBER: u16 = 7174;
const QKEY: u32 = 0x0123_4567;
/// In the environment of another process: its part, and the address.
const ROLE: &str = "WEFT_SIBLING";
const AT: &str = "WEFT_SIBLING_AT";
/// A user that is not ours.
const STRANGER: u32 = 64_011;

fn ends<const N: usize>(ip: IpAddr) -> [End; N] {
    std::array::from_fn(|_| End::new(ip, |_, _, _| {}))
}

/// Another queue pair of the same device.
fn further(end: &End) -> End {
    let pd = end.device.alloc_pd().unwrap();
    let cq = end.device.create_cq(256, None).unwrap();
    End {
        qp: pd.create_roce_qp(&RoceInit::new(&cq, &cq)).unwrap().into(),
        mr: pd.alloc_mr(1 << 20, Access::all()).unwrap(),
        port: end.port.clone(),
        device: end.device.clone(),
        pd,
        cq,
    }
}

/// A Write and a Send from each side.
fn exercise(a: &End, b: &End, seed: u8) {
    for (a, b, seed) in [(a, b, seed), (b, a, !seed)] {
        let sent = a.fill(100_000, seed);
        b.qp.post_recv(&[RecvWr::new(7).sge(b.mr.sge(500_000, 8))])
            .unwrap();
        let write = SendWr::write(1, b.remote(200_000))
            .sge(a.mr.sge(0, 100_000))
            .signaled();
        let send = SendWr::send(2).sge(a.mr.sge(0, 8)).signaled();
        a.qp.post_sends(&[write, send]).unwrap();
        assert_eq!(b.wait().ok().unwrap().wr_id, 7);
        for id in [1, 2] {
            assert_eq!(a.wait().ok().unwrap().wr_id, id);
        }
        assert_eq!(b.mr.to_vec(200_000, 100_000).unwrap(), sent);
    }
}

fn passed(ends: &[&End]) -> u64 {
    ends.iter().map(|end| end.port.passed()).sum()
}

#[test]
fn three_at_one_address_talk_to_each_other() {
    for steers in [false, true] {
        let [a, b, c] = ends(address());
        if !steers {
            for end in [&a, &b, &c] {
                end.port.stop_steering();
            }
        }
        let (a2, b2, c2) = (further(&a), further(&b), further(&c));
        for (one, other) in [(&a, &b), (&a2, &c), (&b2, &c2)] {
            join(one, other, &Options::default());
        }
        for (one, other) in [(&a, &b), (&a2, &c), (&b2, &c2)] {
            exercise(one, other, 1);
        }
        // All packets of the address have one hash: one of the three got all of them.
        assert_ne!(passed(&[&a, &b, &c]), 0);
    }
}

#[test]
fn two_at_one_address_have_peers_elsewhere() {
    let [a, b] = ends(address());
    let [far] = ends(address());
    let far_2 = further(&far);
    for end in [&a, &b, &far] {
        end.port.stop_steering();
    }
    join(&a, &far, &Options::default());
    join(&b, &far_2, &Options::default());
    std::thread::scope(|scope| {
        scope.spawn(|| (0..20).for_each(|n| exercise(&a, &far, n)));
        scope.spawn(|| (0..20).for_each(|n| exercise(&b, &far_2, n)));
    });
    assert_ne!(passed(&[&a, &b]), 0);
    assert_eq!(passed(&[&far]), 0, "nobody shares its address");
}

#[test]
fn the_kernel_learns_whose_packets_are() {
    let [a, b, c] = ends(address());
    let (b2, c2) = (further(&b), further(&c));
    join(&a, &b, &Options::default());
    join(&b2, &c, &Options::default());
    let settles = |pairs: &[(&End, &End)]| {
        let begun = Instant::now();
        loop {
            let before = passed(&[&a, &b, &c2]);
            for (one, other) in pairs {
                exercise(one, other, 5);
            }
            if passed(&[&a, &b, &c2]) == before {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "packets are passed on for ever");
        }
    };
    settles(&[(&a, &b), (&b2, &c)]);
    // The last socket takes the place of one that is closed.
    let End {
        qp,
        port,
        device,
        pd,
        cq,
        mr,
    } = a;
    drop((qp, port, pd, cq, mr, device));
    let begun = Instant::now();
    loop {
        let before = passed(&[&b, &c2]);
        exercise(&b2, &c, 6);
        if passed(&[&b, &c2]) == before {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "packets are passed on for ever");
    }
}

#[test]
fn who_comes_later_is_found_and_who_is_alone_passes_nothing() {
    let ip = address();
    let [a] = ends(ip);
    let a2 = further(&a);
    join(&a, &a2, &Options::default());
    exercise(&a, &a2, 3);
    assert_eq!(passed(&[&a]), 0);
    let [b] = ends(ip);
    let (a3, b2) = (further(&a), further(&b));
    join(&a3, &b2, &Options::default());
    exercise(&a3, &b2, 4);
    exercise(&a, &a2, 5);
}

fn connect(dialler: &End, to: &End, number: u16) {
    let requests = {
        let (_listening, requests) = listening(to, number);
        let addr = SocketAddr::new(to.port.local_addr().ip(), number);
        let (tell, told) = events();
        let ours = dialler
            .port
            .dial(&dialler.qp, (addr, 0), 4711, &RoceConnect::default(), tell)
            .unwrap();
        let request = requests.recv_timeout(PATIENCE).unwrap();
        let (tell, theirs) = events();
        let accepted = request
            .accept(&to.qp, &RoceConnect::default(), tell)
            .unwrap();
        for told in [&told, &theirs] {
            let made = told.recv_timeout(PATIENCE).unwrap();
            assert!(matches!(made, RoceEvent::Established { .. }), "{made:?}");
        }
        exercise(dialler, to, 9);
        // The end is heard as well.
        ours.disconnect();
        let over = theirs.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(over, RoceEvent::Disconnected), "{over:?}");
        let over = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(over, RoceEvent::Disconnected), "{over:?}");
        drop(accepted);
        requests
    };
    assert!(requests.try_recv().is_err(), "a request comes once");
}

#[test]
fn requests_come_to_the_process_that_listens() {
    let ip = address();
    let [far] = ends(address());
    // Whoever gets the request: each of them listens once.
    for n in 0..3 {
        let all: [End; 3] = ends(ip);
        connect(&further(&far), &all[n], NUMBER);
        // From the same address, another process and the same one.
        connect(&further(&all[0]), &further(&all[n]), NUMBER + 1);
        connect(&further(&all[2]), &further(&all[n]), NUMBER + 1);
    }
}

fn dial(from: &End, to: IpAddr, number: u16) -> RoceEvent {
    let (tell, told) = events();
    let (qp, addr) = (&from.qp, SocketAddr::new(to, number));
    let _conn = from
        .port
        .dial(qp, (addr, 0), 1, &RoceConnect::default(), tell)
        .unwrap();
    told.recv_timeout(PATIENCE).unwrap()
}

#[test]
fn where_no_process_listens_requests_are_refused() {
    let ip = address();
    let [_a, _b, _c] = ends(ip);
    let [far] = ends(address());
    for number in 1..5 {
        match dial(&further(&far), ip, number) {
            RoceEvent::Rejected { reason: 8, .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_listener_may_move_to_another_process() {
    let all: [End; 4] = ends(address());
    let [far] = ends(address());
    // Whoever gets the requests remembers for a while who had the listener.
    for n in [0, 1, 2, 3, 1] {
        let (_listening, requests) = listening(&all[n], NUMBER + 2);
        let addr = SocketAddr::new(all[n].port.local_addr().ip(), NUMBER + 2);
        let (tell, told) = events();
        let from = further(&far);
        let _conn = from
            .port
            .dial(&from.qp, (addr, 0), 1, &RoceConnect::default(), tell)
            .unwrap();
        // A question about the request before may come here late, as a packet that the network had kept.
        let refused = loop {
            requests.recv_timeout(PATIENCE).unwrap().reject(b"");
            if let Ok(refused) = told.recv_timeout(Duration::from_secs(1)) {
                break refused;
            }
        };
        assert!(
            matches!(refused, RoceEvent::Rejected { reason: 28, .. }),
            "{refused:?}"
        );
    }
}

#[test]
fn a_number_has_one_listener_at_an_address() {
    let [a, b] = ends(address());
    let taken = |refused: Result<(), Error>| match refused {
        Err(Error::Os { source, .. }) => assert_eq!(source.kind(), std::io::ErrorKind::AddrInUse),
        other => panic!("{other:?}"),
    };
    let listen = |end: &End| end.port.listen(NUMBER, 1, |_| {});
    let serve = |end: &End| end.port.serve(NUMBER, 1, |_| {});
    let first = listen(&a).unwrap();
    taken(listen(&b).map(drop));
    // Connections and datagrams have numbers of their own.
    let served = serve(&b).unwrap();
    taken(serve(&a).map(drop));
    drop((first, served));
    let _again = (listen(&b).unwrap(), serve(&a).unwrap());
}

fn datagrams(end: &End) -> RoceUdQp {
    let mut init = RoceUdInit::new(&end.cq, &end.cq);
    init.deaf_to_itself = true;
    let qp = end.pd.create_roce_ud_qp(&init).unwrap();
    qp.set_qkey(QKEY);
    qp.hear_at(&end.port).unwrap();
    qp
}

fn to(end: &End, num: u32, from: &End) -> UdDest {
    UdDest {
        addr: end.port.local_addr(),
        qp_num: num,
        qkey: QKEY,
        from: Some(from.port.local_addr().ip()),
        traffic_class: 0,
    }
}

#[test]
fn datagrams_find_their_process() {
    let ip = address();
    let [a, b, c] = ends(ip);
    let [far] = ends(address());
    let all = [&a, &b, &c, &far].map(|end| (end, datagrams(end)));
    for (receiver, qp) in &all {
        for (sender, from) in &all {
            if std::ptr::eq(*sender, *receiver) {
                continue;
            }
            qp.post_recv(&[RecvWr::new(1).sge(receiver.mr.sge(0, 1000))])
                .unwrap();
            sender.fill(100, 8);
            let wr = SendWr::send(2).sge(sender.mr.sge(0, 100)).signaled();
            from.post_send(&wr, &to(receiver, qp.num(), sender), false)
                .unwrap();
            sender.wait().ok().unwrap();
            let wc = receiver.wait().ok().unwrap();
            let source = wc.source.unwrap();
            assert_eq!((wc.wr_id, source.qp_num), (1, from.num()));
            assert_eq!(source.addr, sender.port.local_addr());
            let bytes = receiver.mr.to_vec(Grh::LEN, 100).unwrap();
            assert_eq!(bytes, sender.mr.to_vec(0, 100).unwrap());
        }
    }
    // A service is found, whichever process gets the question.
    for (end, qp) in &all[..3] {
        let (num, number) = (qp.num(), NUMBER + 5);
        let serving = end.port.serve(number, 8, move |request| {
            request.accept(num, QKEY, b"").unwrap();
        });
        let _serving = serving.unwrap();
        for (asker, _) in &all {
            let (tell, told) = channel();
            let addr = SocketAddr::new(ip, number);
            let asked = asker
                .port
                .look_up((addr, 0), 1, b"", move |found| drop(tell.send(found)));
            let _asked = asked.unwrap();
            let found = told.recv_timeout(PATIENCE).unwrap().unwrap();
            assert_eq!((found.qp_num, found.qkey), (num, QKEY));
        }
    }
    let (tell, told) = channel();
    let asked = far
        .port
        .look_up((SocketAddr::new(ip, 9), 0), 1, b"", move |found| {
            drop(tell.send(found));
        });
    let _asked = asked.unwrap();
    let refused = told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(refused.unwrap_err(), LookupError::NoService);
}

#[test]
fn a_group_is_heard_by_each_process_once() {
    let all: [End; 3] = ends(address());
    let group: SocketAddr = ([239, 87, 91, 1], 4791).into();
    let qps = all.each_ref().map(datagrams);
    for (end, qp) in all.iter().zip(&qps) {
        qp.attach(group, &[1]).unwrap();
        let receives: Vec<_> = (0..8)
            .map(|id| RecvWr::new(id).sge(end.mr.sge(0, 1000)))
            .collect();
        qp.post_recv(&receives).unwrap();
    }
    let sender = &all[0];
    for n in 0..4 {
        let wr = SendWr::send(100 + n).sge(sender.mr.sge(0, 10)).signaled();
        let mut dest = to(sender, UD_GROUP, sender);
        dest.addr = group;
        qps[0].post_send(&wr, &dest, false).unwrap();
        sender.wait().ok().unwrap();
        for end in &all[1..] {
            assert_eq!(end.wait().ok().unwrap().wr_id, n);
        }
    }
    // What would come twice had come by now: the others' last message came after it.
    let mut wc = [weft_verbs::Wc::default()];
    for end in &all {
        assert_eq!(end.cq.poll(&mut wc), Ok(0));
    }
}

/// Another process that takes part.
struct Other {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(role: &str, at: IpAddr, change: impl FnOnce(&mut Command)) -> Other {
        let mut command = again(&[], "roce_siblings::other").unwrap();
        command
            .env(ROLE, role)
            .env(AT, at.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        Other {
            lines: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(
                self.lines.read_line(&mut line).unwrap(),
                0,
                "the other process has ended"
            );
            if let Some((_, said)) = line.split_once('@') {
                return said.trim().to_owned();
            }
        }
    }

    fn kill(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::KILL).unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What an end has to know of another one.
fn card(end: &End) -> String {
    format!(
        "{} {} {}",
        end.qp.num(),
        end.mr.rkey(),
        end.port.local_addr().ip()
    )
}

fn read_card(card: &str) -> (RocePath, u32) {
    let mut words = card.split(' ');
    let mut word = || words.next().unwrap();
    let path = RocePath {
        dest_qp: word().parse().unwrap(),
        peer: IpAddr::from([127, 0, 0, 1]),
        scope: 0,
        rq_psn: Options::default().send.sq_psn,
        mtu: 1024,
        ird: 4,
        rnr_timer: 1,
        traffic_class: 0,
    };
    let rkey = word().parse().unwrap();
    let peer = word().parse().unwrap();
    (RocePath { peer, ..path }, rkey)
}

/// The other processes' program.
#[test]
#[ignore = "a process of another test"]
fn other() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let ip = std::env::var(AT).unwrap().parse().unwrap();
    match role.as_str() {
        "writes" => writes(ip),
        "forges" => forges(),
        "squats" => squats(),
        "has no descriptors left" => has_no_descriptors_left(ip),
        "has the port" => {
            let _port =
                weft_sys::udp::UdpSocket::bind_in_group((ip, 4791).into(), 1 << 16).unwrap();
            println!("@bound");
            wait_for_a_line();
        }
        "comes to a full house" => {
            let refused = Device::open()
                .unwrap()
                .bind_roce(ip, 0)
                .map(drop)
                .unwrap_err();
            println!("@{:?}", refused.kind());
        }
        role => panic!("{role}"),
    }
}

fn wait_for_a_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// Writes to a peer without end.
fn writes(ip: IpAddr) {
    let end = End::new(ip, |_, _, _| {});
    println!("@{}", card(&end));
    let (path, rkey) = read_card(&wait_for_a_line());
    end.qp.receive_from(&end.port, &path).unwrap();
    end.qp.send_with(&Options::default().send).unwrap();
    end.fill(60_000, 1);
    println!("@ready");
    wait_for_a_line();
    let mut told = false;
    loop {
        let remote = RemoteAddr { addr: 0, rkey };
        let wr = SendWr::write(1, remote)
            .sge(end.mr.sge(0, 60_000))
            .signaled();
        end.qp.post_send(wr).unwrap();
        end.wait().ok().unwrap();
        if !std::mem::replace(&mut told, true) {
            println!("@wrote");
        }
    }
}

#[test]
fn a_process_that_is_killed_under_traffic_leaves_the_others_working() {
    let ip = address();
    let [a, b] = ends(ip);
    join(&a, &b, &Options::default());
    for round in 0..5 {
        let mut other = Other::start("writes", ip, |_| {});
        let peer = further(&a);
        let (path, _) = read_card(&other.hear());
        peer.qp.receive_from(&peer.port, &path).unwrap();
        peer.qp.send_with(&Options::default().send).unwrap();
        other.say(&card(&peer));
        assert_eq!(other.hear(), "ready");
        other.say("go");
        assert_eq!(other.hear(), "wrote");
        exercise(&a, &b, round);
        other.kill();
        for n in 0..10 {
            exercise(&a, &b, n);
        }
        // Its number is nobody's: what is sent there fails after its tries.
        let wr = SendWr::write(1, RemoteAddr { addr: 0, rkey: 1 })
            .sge(peer.mr.sge(0, 8))
            .signaled();
        peer.qp.post_send(wr).unwrap();
        if round == 0 {
            assert_eq!(peer.wait().status, WcStatus::RetryExcErr);
        }
    }
}

fn as_stranger(command: &mut Command) {
    command.uid(STRANGER).gid(STRANGER);
}

fn is_root() -> bool {
    weft_sys::process::uid() == 0
}

/// Connects to all slots, and says of each what a sibling would say of a packet to the queue pair that is named.
fn forges() {
    let (path, rkey) = read_card(&wait_for_a_line());
    let packet = forged_write(&path, rkey);
    let mut links: Vec<OwnedFd> = Vec::new();
    for slot in 1..=254 {
        let name = format!("weft/roce/1/{slot}");
        let Ok(link) = unix::connect_to_stranger(Name::Abstract(name.as_bytes()), Kind::Packets)
        else {
            continue;
        };
        // It may be closed already.
        let _ = unix::send_pieces(&link, [&[1, 77], &[]]);
        let mut message = vec![2, 0];
        message.extend_from_slice(&0u16.to_ne_bytes());
        message.extend_from_slice(&(packet.len() as u32).to_ne_bytes());
        let IpAddr::V4(ip) = path.peer else {
            panic!("{path:?}");
        };
        for _ in 0..2 {
            message.extend_from_slice(&ip.to_ipv6_mapped().octets());
            message.extend_from_slice(&0u32.to_ne_bytes());
        }
        message.extend_from_slice(&4791u16.to_ne_bytes());
        let _ = unix::send_pieces(&link, [&message, &packet]);
        links.push(link);
    }
    println!("@{}", links.len());
    // All of them are closed by those that they reach.
    for link in &links {
        let begun = Instant::now();
        let mut byte = [0; 8];
        while matches!(unix::recv_bytes(link, &mut byte), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
        {
            assert!(begun.elapsed() < PATIENCE, "a stranger's connection stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    println!("@closed");
}

/// A Write of eight bytes that the queue pair would accept from its peer at the same address.
fn forged_write(path: &RocePath, rkey: u32) -> Vec<u8> {
    use weft_wire::roce::{Header, Icrc, Op, Opcode, Reth, Route};
    let header = Header {
        reth: Some(Reth {
            va: 0,
            rkey,
            len: 8,
        }),
        ..Header::new(Opcode::rc(Op::WriteOnly), path.dest_qp, path.rq_psn)
    };
    let mut packet = Vec::new();
    header.emit(&mut packet);
    packet.extend_from_slice(b"forged!!");
    let at = SocketAddr::new(path.peer, 4791);
    let mut crc = Icrc::new(&Route { src: at, dst: at }, 0, packet.len());
    crc.headers(&packet);
    packet.extend_from_slice(&crc.finish());
    packet
}

#[test]
fn strangers_pass_nothing_on() {
    if !is_root() {
        return;
    }
    let [a, b] = ends(address());
    join(&a, &b, &Options::default());
    // The same bytes from a process of ours are taken: the forgery is right but for its user.
    for (change, is_taken) in [(as_stranger as fn(&mut Command), false), (|_| {}, true)] {
        let mut other = Other::start("forges", a.port.local_addr().ip(), change);
        other.say(&card(&b));
        let reached: usize = other.hear().parse().unwrap();
        assert!(reached >= 2, "{reached}");
        let written = || b.mr.to_vec(0, 8).unwrap() == b"forged!!";
        if is_taken {
            let begun = Instant::now();
            while !written() {
                assert!(
                    begun.elapsed() < PATIENCE,
                    "a sibling's packet is not taken"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        } else {
            assert_eq!(other.hear(), "closed");
            assert!(!written());
        }
    }
}

/// Takes all names that are free, and answers nobody.
fn squats() {
    let names = (1..=254).map(|slot| format!("weft/roce/1/{slot}"));
    let taken = names.filter_map(|name| unix::listen(Name::Abstract(name.as_bytes()), 1).ok());
    let taken: Vec<_> = taken.collect();
    println!("@{}", taken.len());
    wait_for_a_line();
}

#[test]
fn names_that_strangers_took_delay_nothing_and_are_an_error_when_none_is_left() {
    if !is_root() {
        return;
    }
    let mut command = again(
        &["unshare", "--net", "--"],
        "roce_siblings::in_a_full_house",
    )
    .unwrap();
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    if !text.contains("unshare failed") {
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{text}{said}");
        assert!(said.contains("1 passed"), "{said}");
    }
}

#[test]
#[ignore = "in a network namespace, which the other test makes"]
fn in_a_full_house() {
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    assert!(up.unwrap().success());
    let ip = address();
    let [a, b] = ends(ip);
    let mut squatter = Other::start("squats", ip, as_stranger);
    assert_eq!(squatter.hear(), "252");
    join(&a, &b, &Options::default());
    exercise(&a, &b, 1);
    let begun = Instant::now();
    let mut late = Other::start("comes to a full house", ip, |_| {});
    assert_eq!(late.hear(), "AddrInUse");
    assert!(begun.elapsed() < Duration::from_secs(10));
    // Names that are given back can be had.
    squatter.kill();
    let [c] = ends(ip);
    let a2 = further(&a);
    join(&a2, &c, &Options::default());
    exercise(&a2, &c, 2);
}

/// Can accept nobody for a while, and says how busy it was.
fn has_no_descriptors_left(ip: IpAddr) {
    let end = End::new(ip, |_, _, _| {});
    let whole = getrlimit(Resource::Nofile);
    let most = |current| {
        let limit = Rlimit { current, ..whole };
        setrlimit(Resource::Nofile, limit).unwrap();
    };
    most(Some(0));
    println!("@{}", end.qp.num() >> 16);
    wait_for_a_line();
    let busy = || {
        let (user, system) = weft_sys::rusage_self();
        user + system
    };
    let before = busy();
    std::thread::sleep(Duration::from_millis(500));
    println!("@{}", ((busy() - before) * 1000.0) as u64);
    most(whole.current);
    wait_for_a_line();
}

#[test]
fn a_process_without_descriptors_waits_and_takes_connections_later() {
    let mut other = Other::start("has no descriptors left", address(), |_| {});
    let slot = other.hear();
    let name = format!("weft/roce/1/{slot}");
    let link = unix::connect(Name::Abstract(name.as_bytes())).unwrap();
    unix::send_pieces(&link, [&[1, 77], &[]]).unwrap();
    other.say("there is one");
    let busy: u64 = other.hear().parse().unwrap();
    assert!(busy < 250, "{busy} ms of 500");
    let ready = weft_sys::poll_fds(&[(link.as_fd(), weft_sys::Interest::READ)], Some(PATIENCE));
    assert_eq!(ready.unwrap(), 1, "it is not heard");
    let mut answer = [0; 8];
    let len = unix::recv_bytes(&link, &mut answer).unwrap().unwrap();
    assert_eq!(answer[..len], [1, slot.parse().unwrap()]);
}

#[test]
fn another_users_port_is_an_error() {
    if !is_root() {
        return;
    }
    let ip = address();
    let mut other = Other::start("has the port", ip, as_stranger);
    assert_eq!(other.hear(), "bound");
    let device = Device::open().unwrap();
    let refused = device.bind_roce(ip, 0).map(drop).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::AddrInUse);
    other.kill();
    device.bind_roce(ip, 0).unwrap();
}
