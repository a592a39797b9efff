//! A link between two namespaces. It needs root or a user namespace; without, the tests say so and check that the error does.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use weft_link::{FAR, Link, LinkError, NEAR, Network, Shape, host_address};

const DELAY: Duration = Duration::from_millis(10);

/// A link, unless this machine does not let us.
fn link(shape: Shape) -> Option<Link> {
    match Link::new(shape, 1500) {
        Ok(link) => Some(link),
        Err(error @ (LinkError::Privilege | LinkError::NoTun(_) | LinkError::Ip { .. })) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A connection from near to far.
fn connection(link: &Link) -> (TcpStream, TcpStream) {
    let listener = link.far().enter(|| TcpListener::bind((FAR, 7000)).unwrap());
    let listener = listener.unwrap();
    let near = link
        .near()
        .enter(|| TcpStream::connect((FAR, 7000)).unwrap());
    let near = near.unwrap();
    near.set_nodelay(true).unwrap();
    let (far, from) = listener.accept().unwrap();
    far.set_nodelay(true).unwrap();
    assert_eq!(from.ip(), NEAR);
    (near, far)
}

#[test]
fn a_round_trip_takes_twice_the_delay_and_bytes_arrive_whole() {
    let shape = Shape {
        delay: DELAY,
        ..Shape::default()
    };
    let Some(link) = link(shape) else { return };
    let (mut near, mut far) = connection(&link);
    let echo = std::thread::spawn(move || {
        let mut byte = [0];
        for _ in 0..3 {
            far.read_exact(&mut byte).unwrap();
            far.write_all(&byte).unwrap();
        }
        let mut all = Vec::new();
        far.read_to_end(&mut all).unwrap();
        all
    });
    for _ in 0..3 {
        let start = Instant::now();
        near.write_all(b"x").unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert!(start.elapsed() >= 2 * DELAY);
    }
    let sent: Vec<u8> = (0..8_000_000u32).map(|n| (n % 251) as u8).collect();
    near.write_all(&sent).unwrap();
    drop(near);
    assert!(echo.join().unwrap() == sent);
    let [out, back] = link.traffic();
    assert!(out.bytes > 8_000_000, "{out:?}");
    assert!(back.packets > 0 && back.bytes < out.bytes, "{back:?}");
    assert_eq!(out.dropped, 0);
}

#[test]
fn a_rate_is_kept() {
    let shape = Shape {
        delay: Duration::from_millis(1),
        jitter: Duration::from_millis(1),
        rate: Some(80_000_000),
        queue: 4 << 20,
        ..Shape::default()
    };
    let Some(link) = link(shape) else { return };
    let (mut near, mut far) = connection(&link);
    let start = Instant::now();
    let sink = std::thread::spawn(move || std::io::copy(&mut far, &mut std::io::sink()).unwrap());
    near.write_all(&vec![7; 2_000_000]).unwrap();
    drop(near);
    assert_eq!(sink.join().unwrap(), 2_000_000);
    // Two million bytes at ten million a second.
    assert!(start.elapsed() >= Duration::from_millis(195));
}

#[test]
fn what_is_full_drops_and_tcp_recovers() {
    let shape = Shape {
        delay: Duration::from_millis(1),
        rate: Some(400_000_000),
        queue: 128 << 10,
        ..Shape::default()
    };
    let Some(link) = link(shape) else { return };
    let (mut near, mut far) = connection(&link);
    let sink = std::thread::spawn(move || std::io::copy(&mut far, &mut std::io::sink()).unwrap());
    near.write_all(&vec![7; 8_000_000]).unwrap();
    drop(near);
    assert_eq!(sink.join().unwrap(), 8_000_000);
    assert!(link.traffic()[0].dropped > 0);
}

#[test]
fn hosts_on_a_switch_reach_each_other_and_nobody_else() {
    let shape = Shape {
        delay: DELAY,
        ..Shape::default()
    };
    let network = match Network::new(shape, 1500, 3) {
        Ok(network) => network,
        Err(error @ (LinkError::Privilege | LinkError::NoTun(_) | LinkError::Ip { .. })) => {
            eprintln!("skipped: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let [first, second, third] = [0, 1, 2].map(|host| &network.hosts()[host]);
    let at = (host_address(2), 7000);
    let listener = third.enter(|| TcpListener::bind(at).unwrap()).unwrap();
    for (namespace, address) in [(first, host_address(0)), (second, host_address(1))] {
        let start = Instant::now();
        let mut near = namespace.enter(|| TcpStream::connect(at).unwrap()).unwrap();
        // There and back, a line each way.
        assert!(start.elapsed() >= 2 * DELAY);
        let (mut far, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), address);
        near.write_all(b"to the third").unwrap();
        drop(near);
        let mut text = String::new();
        far.read_to_string(&mut text).unwrap();
        assert_eq!(text, "to the third");
    }
    let wrong = (host_address(7), 7000).into();
    let limit = Duration::from_millis(200);
    let lost = first.enter(|| TcpStream::connect_timeout(&wrong, limit).is_err());
    assert!(lost.unwrap());
    let traffic = network.traffic();
    assert!(
        traffic
            .iter()
            .all(|from| from.packets > 0 && from.dropped == 0),
        "{traffic:?}"
    );
}
