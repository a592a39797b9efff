use super::*;
use crate::{Interest, poll_fds};

fn exchange(one: &str, other: &str, from: &str, to: &str) {
    let bind = |addr: &str| UdpSocket::bind(addr.parse().unwrap(), 1 << 16).unwrap();
    let (a, b) = (bind(one), bind(other));
    let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let ports = [&a, &b].map(|s| s.local_addr().unwrap().port());
    a.send(b"first", (to, ports[1]).into(), Some(from)).unwrap();
    let mut buf = [0; 3];
    poll_fds(&[(b.as_fd(), Interest::READ)], None).unwrap();
    let arrival = b.recv(&mut buf).unwrap();
    assert_eq!(&buf, b"fir");
    assert_eq!(
        arrival.len, 5,
        "its own length, not what there was room for"
    );
    assert_eq!(arrival.from, (from, ports[0]).into());
    assert_eq!((arrival.to, arrival.traffic_class), (Some(to), 0));
    a.send_marked(b"", (to, ports[1]).into(), Some(from), 0x68)
        .unwrap();
    poll_fds(&[(b.as_fd(), Interest::READ)], None).unwrap();
    let marked = b.recv(&mut buf).unwrap();
    assert_eq!((marked.to, marked.traffic_class), (Some(to), 0x68));
    let none = b.recv(&mut buf).unwrap_err();
    assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
    let again = UdpSocket::bind(b.local_addr().unwrap(), 1 << 16);
    assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
}

fn loopback() -> u32 {
    // The first interface of every network namespace.
    1
}

#[test]
fn a_group_is_heard_by_all_who_have_joined() {
    let joined = |group| UdpSocket::join(group, &[loopback(), 77_777], 1 << 16).unwrap();
    // Other runs of this test on the host have others.
    let [.., high, low] = std::process::id().to_be_bytes();
    let [group, another] = [5, 6].map(|net| SocketAddr::from(([239, 80 + net, high, low], 22273)));
    let hearers = [joined(group), joined(group)];
    let other = joined(another);
    let sender = UdpSocket::bind("[::]:0".parse().unwrap(), 1 << 16).unwrap();
    let from: IpAddr = "127.0.0.1".parse().unwrap();
    let send = |bytes: &[u8], to| sender.send(bytes, to, Some(from)).unwrap();
    send(b"to one", group);
    send(b"to the other", another);
    for (socket, expected) in [
        (&hearers[0], &b"to one"[..]),
        (&hearers[1], b"to one"),
        (&other, b"to the other"),
    ] {
        let mut buf = [0; 32];
        poll_fds(&[(socket.as_fd(), Interest::READ)], None).unwrap();
        let arrival = socket.recv(&mut buf).unwrap();
        assert_eq!(&buf[..arrival.len], expected);
        assert_eq!(arrival.from.ip(), from);
        assert!(arrival.to.is_some_and(|to| to.is_multicast()));
        let none = socket.recv(&mut buf).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock, "once only");
    }
    assert!(UdpSocket::join(group, &[77_777], 1 << 16).is_err());
    assert!(UdpSocket::join(group, &[], 1 << 16).is_err());
}

#[test]
fn one_who_asks_where_nobody_is_is_told() {
    let bind = || UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1 << 16).unwrap();
    let (a, b) = (bind(), bind());
    let gone = b.local_addr().unwrap();
    a.connect(gone).unwrap();
    drop(b);
    a.send(b"hello", gone, None).unwrap();
    poll_fds(&[(a.as_fd(), Interest::READ)], None).unwrap();
    let refused = a.recv(&mut [0; 8]).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
}

#[test]
fn datagrams_say_where_they_went() {
    exchange("127.0.0.1:0", "0.0.0.0:0", "127.0.0.1", "127.0.0.2");
    exchange("0.0.0.0:0", "0.0.0.0:0", "127.0.0.3", "127.0.0.2");
    if UdpSocket::bind("[::1]:0".parse().unwrap(), 1 << 16).is_ok() {
        exchange("[::]:0", "[::]:0", "127.0.0.3", "127.0.0.2");
        exchange("[::]:0", "[::]:0", "::1", "::1");
    }
}

/// Equal datagrams, of which the last is shorter: cut by the kernel, or not.
#[test]
fn a_train_arrives_as_the_datagrams_that_it_is_of() {
    let addresses = ["127.0.0.1:0", "[::1]:0"];
    for (addr, gso) in addresses.into_iter().flat_map(|a| [(a, true), (a, false)]) {
        let bind = || UdpSocket::bind(addr.parse().unwrap(), 1 << 18);
        let (Ok(a), Ok(b)) = (bind(), bind()) else {
            println!("skipped: no {addr}");
            continue;
        };
        b.receive_trains();
        if !gso {
            a.gso.store(0, Ordering::Relaxed);
        }
        let bytes: Vec<u8> = (0..2100).map(|i| (i * 7 % 251) as u8).collect();
        let to = b.local_addr().unwrap();
        let taken = a.send_train(&bytes, 500, to, None, 0).unwrap();
        assert_eq!(taken, bytes.len());
        let mut batch = RecvBatch::new(3, 16, 65_536);
        let mut came: Vec<Vec<u8>> = Vec::new();
        while came.len() < 5 {
            poll_fds(&[(b.as_fd(), Interest::READ)], None).unwrap();
            b.recv_batch(&mut batch).unwrap();
            for i in 0..batch.len() {
                let (train, buffer) = batch.get(i).unwrap();
                assert_eq!(train.arrival.from, a.local_addr().unwrap());
                came.extend(buffer[16..].chunks(train.each).map(<[u8]>::to_vec));
            }
        }
        let lengths: Vec<_> = came.iter().map(Vec::len).collect();
        assert_eq!(lengths, [500, 500, 500, 500, 100]);
        assert_eq!(came.concat(), bytes);
        let none = b.recv_batch(&mut batch).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        assert!(batch.is_empty());
    }
    let socket = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1 << 16).unwrap();
    assert!(socket.receive_room().unwrap() > 0);
}

/// Longer than what the interface carries at once: the kernel refuses to cut, and they arrive all the same.
#[test]
fn long_datagrams_go_one_by_one() {
    let bind = || UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1 << 20).unwrap();
    let (a, b) = (bind(), bind());
    let bytes = vec![5; 64_000 * 2];
    let to = b.local_addr().unwrap();
    assert_eq!(
        a.send_train(&bytes, 64_000, to, None, 0).unwrap(),
        bytes.len()
    );
    let mut batch = RecvBatch::new(2, 0, 65_536);
    let mut came = 0;
    while came < bytes.len() {
        poll_fds(&[(b.as_fd(), Interest::READ)], None).unwrap();
        b.recv_batch(&mut batch).unwrap();
        for i in 0..batch.len() {
            let (train, _) = batch.get(i).unwrap();
            assert_eq!((train.arrival.len, train.each), (64_000, 64_000));
            came += 64_000;
        }
    }
}
