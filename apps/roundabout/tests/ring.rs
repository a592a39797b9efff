//! Rings of threads and of processes: everything goes round once, and failures are told with a name.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use weft_roundabout::wire::{Header, Hello, Kind, VERSION};
use weft_roundabout::{Error, Next, Node, Ring, RingListener, Security};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::{Access, LocalMode, QpInit, RecvWr, SendWr};

const ID: [u8; 16] = [7; 16];

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn listeners(count: usize, carrier: &str) -> Vec<RingListener> {
    let open = || match carrier {
        "twin" => RingListener::open_tcp(any()).unwrap(),
        "tcp" => RingListener::open(any(), Security::SameUser, Some(LocalMode::Off)).unwrap(),
        _ => RingListener::open(any(), Security::SameUser, Some(LocalMode::Auto)).unwrap(),
    };
    (0..count).map(|_| open()).collect()
}

fn ring(listeners: &[RingListener], me: usize) -> Ring {
    Ring {
        element: 4096,
        elements: 3,
        patience: Duration::from_mins(1),
        ..Ring::new(
            ID,
            listeners.iter().map(RingListener::local_addr).collect(),
            me,
        )
    }
}

/// Gives `count` elements and returns what came: origin, number, length.
fn turn(mut node: Node, count: u64) -> Result<Vec<(usize, u64, usize)>, Error> {
    let mut given = 0;
    let mut seen = Vec::new();
    let mut scratch = Vec::new();
    loop {
        let element = match node.next(given < count)? {
            Next::End => break,
            Next::Woken => continue,
            Next::Element(element) => element,
            Next::Room(mut room) => {
                let len = 8 * (1 + given as usize % 512);
                let words: Vec<u8> = (0..len as u64 / 8)
                    .flat_map(|i| (given * 1000 + i).to_ne_bytes())
                    .collect();
                room.write(0, &words)?;
                given += 1;
                room.commit(len, 5, [given - 1, 1, 2, 3])?
            }
        };
        let number = element.user()[0];
        assert_eq!((element.flags(), element.user()[3]), (5, 3));
        let words = if let Some(words) = element.in_place() {
            words
        } else {
            scratch.resize(element.len() / 8, 0);
            element.read_words(0, &mut scratch)?;
            &scratch
        };
        assert!((number * 1000..).zip(words).all(|(a, &b)| a == b));
        seen.push((element.origin(), number, element.len()));
    }
    node.finish()?;
    Ok(seen)
}

fn all(listeners: &[RingListener], counts: &[u64], home: bool) -> Vec<Vec<(usize, u64, usize)>> {
    thread::scope(|scope| {
        let nodes: Vec<_> = (0..listeners.len())
            .map(|me| {
                scope.spawn(move || {
                    let ring = Ring {
                        home,
                        ..ring(listeners, me)
                    };
                    turn(listeners[me].join(&ring).unwrap(), counts[me]).unwrap()
                })
            })
            .collect();
        nodes.into_iter().map(|node| node.join().unwrap()).collect()
    })
}

fn goes_round(carrier: &str) {
    for nodes in [1, 2, 3, 6] {
        let listeners = listeners(nodes, carrier);
        let counts: Vec<u64> = (0..nodes as u64).map(|n| n * 7 % 23).collect();
        let mut expected: Vec<(usize, u64, usize)> = Vec::new();
        for (origin, &count) in counts.iter().enumerate() {
            expected.extend((0..count).map(|n| (origin, n, 8 * (1 + n as usize % 512))));
        }
        for (me, mut seen) in all(&listeners, &counts, false).into_iter().enumerate() {
            for (origin, &count) in counts.iter().enumerate() {
                let numbers = seen.iter().filter(|s| s.0 == origin).map(|s| s.1);
                assert!(numbers.eq(0..count), "order at node {me}");
            }
            seen.sort_unstable();
            assert_eq!(seen, expected, "{carrier}, {nodes} nodes, node {me}");
        }
    }
}

#[test]
fn every_element_passes_every_node_once_in_shared_memory() {
    goes_round("local");
}

#[test]
fn every_element_passes_every_node_once_over_tcp() {
    goes_round("tcp");
}

#[test]
fn every_element_passes_every_node_once_on_the_twin() {
    goes_round("twin");
}

#[test]
fn elements_come_home() {
    let listeners = listeners(3, "local");
    for (me, seen) in all(&listeners, &[5, 0, 9], true).into_iter().enumerate() {
        // Ours twice: when they are given, and when they are home.
        let ours = [5, 0, 9][me];
        assert_eq!(seen.len(), 14 + ours);
        assert_eq!(seen.iter().filter(|s| s.0 == me).count(), 2 * ours);
    }
}

#[test]
fn a_full_ring_moves_on() {
    // Two elements a node and far more data than they hold, on every node at once; one node is slow.
    let listeners = listeners(4, "local");
    thread::scope(|scope| {
        for me in 0..4 {
            let listeners = &listeners;
            scope.spawn(move || {
                let ring = Ring {
                    elements: 2,
                    ..ring(listeners, me)
                };
                let mut node = listeners[me].join(&ring).unwrap();
                let (mut given, mut seen) = (0, 0);
                loop {
                    match node.next(given < 50).unwrap() {
                        Next::Room(room) => {
                            given += 1;
                            drop(room.commit(4096, 0, [0; 4]).unwrap());
                        }
                        Next::Element(element) => {
                            if me == 2 {
                                thread::sleep(Duration::from_millis(1));
                            }
                            seen += element.len();
                        }
                        Next::End | Next::Woken => break,
                    }
                }
                assert_eq!(seen, 3 * 50 * 4096);
                let load = node.finish().unwrap();
                assert_eq!((load.received, load.sent), (150, 150));
            });
        }
    });
}

#[test]
fn a_node_that_gives_up_is_named_by_all() {
    for carrier in ["local", "tcp", "twin"] {
        let listeners = listeners(5, carrier);
        let nodes: Vec<_> = thread::scope(|scope| {
            let joining: Vec<_> = (0..5)
                .map(|me| (me, &listeners))
                .map(|(me, listeners)| {
                    scope.spawn(move || listeners[me].join(&ring(listeners, me)).unwrap())
                })
                .collect();
            joining.into_iter().map(|n| n.join().unwrap()).collect()
        });
        let began = Instant::now();
        let failures: Vec<Error> = thread::scope(|scope| {
            let running: Vec<_> = nodes
                .into_iter()
                .enumerate()
                .filter_map(|(me, node)| {
                    if me == 3 {
                        scope.spawn(move || node.give_up("no memory"));
                        return None;
                    }
                    Some(scope.spawn(move || turn(node, u64::MAX).unwrap_err()))
                })
                .collect();
            running.into_iter().map(|n| n.join().unwrap()).collect()
        });
        // Nobody waits for neighbours that know.
        println!("{carrier}: {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_millis(1500), "{carrier}");
        assert_eq!(failures.len(), 4);
        for failure in failures {
            match failure {
                Error::Failed { node: 3, why, .. } => assert!(why.contains("no memory"), "{why}"),
                other => panic!("{carrier}: {other}"),
            }
        }
        // The same listeners form the next ring.
        let seen = all(&listeners, &[1, 2, 3, 4, 5], false);
        assert!(seen.iter().all(|s| s.len() == 15));
    }
}

/// Connections that say nothing, or one byte now and then, hold no listener.
#[test]
fn connections_that_trickle_do_not_keep_neighbours_out() {
    for carrier in ["local", "tcp", "twin"] {
        let listeners = listeners(3, carrier);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for listener in &listeners {
                let (addr, over) = (listener.local_addr(), &over);
                scope.spawn(move || {
                    let mut silent: Vec<_> =
                        (0..10).map(|_| TcpStream::connect(addr).unwrap()).collect();
                    while !over.load(Ordering::SeqCst) {
                        for stream in &mut silent {
                            // Refused ones are what we ask for.
                            let _ = stream.write(b"M");
                        }
                        thread::sleep(Duration::from_millis(500));
                    }
                });
            }
            // They are there before the neighbours are.
            thread::sleep(Duration::from_millis(200));
            let began = Instant::now();
            let seen = all(&listeners, &[3, 2, 1], false);
            let took = began.elapsed();
            over.store(true, Ordering::SeqCst);
            assert!(seen.iter().all(|s| s.len() == 6));
            println!("{carrier}: {took:?}");
            // A limit for each byte instead of the greeting would let the first of them take 32 s.
            assert!(took < Duration::from_secs(20), "{carrier}: {took:?}");
        });
    }
}

#[test]
fn nodes_that_do_not_agree_form_no_ring() {
    let listeners = listeners(2, "local");
    let whys: Vec<String> = thread::scope(|scope| {
        let nodes: Vec<_> = (0..2)
            .map(|me| (me, &listeners))
            .map(|(me, listeners)| {
                scope.spawn(move || {
                    let ring = Ring {
                        agreement: me as u64,
                        ..ring(listeners, me)
                    };
                    listeners[me]
                        .join(&ring)
                        .map(|_| ())
                        .unwrap_err()
                        .to_string()
                })
            })
            .collect();
        nodes.into_iter().map(|n| n.join().unwrap()).collect()
    });
    assert!(
        whys.iter()
            .all(|why| why.contains("do not agree on the plan")),
        "{whys:?}"
    );
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let listeners = listeners(1, "local");
    for wrong in [
        Ring {
            element: 100,
            ..ring(&listeners, 0)
        },
        Ring {
            elements: 1,
            ..ring(&listeners, 0)
        },
        Ring {
            me: 1,
            ..ring(&listeners, 0)
        },
        Ring {
            nodes: Vec::new(),
            ..ring(&listeners, 0)
        },
    ] {
        assert!(matches!(listeners[0].join(&wrong), Err(Error::Invalid(_))));
    }
    let beyond = "0.0.0.0:0".parse().unwrap();
    assert!(matches!(
        RingListener::open(beyond, Security::SameUser, None),
        Err(Error::Invalid(_))
    ));
    assert!(matches!(
        RingListener::open_tcp(beyond),
        Err(Error::Invalid(_))
    ));
}

/// A process of the test's own program, killed at the end.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test of its own: a node as a process of its own, started by the next test.
#[test]
fn child_node() {
    let Ok(addresses) = std::env::var("RING_TEST_NODES") else {
        return;
    };
    let me: usize = std::env::var("RING_TEST_ME").unwrap().parse().unwrap();
    let nodes: Vec<SocketAddr> = addresses.split(',').map(|a| a.parse().unwrap()).collect();
    let listener = RingListener::open(nodes[me], Security::SameUser, None).unwrap();
    println!("\nready");
    let ring = Ring {
        element: 4096,
        elements: 3,
        patience: Duration::from_mins(1),
        ..Ring::new(ID, nodes, me)
    };
    endless(listener.join(&ring).unwrap(), |_| ());
}

/// Gives elements and passes on others', which `saw` gets the origins of, until the turn fails.
fn endless(mut node: Node, mut saw: impl FnMut(usize)) -> Error {
    loop {
        match node.next(true) {
            Ok(Next::Room(room)) => drop(room.commit(64, 0, [0; 4]).unwrap()),
            Ok(Next::Element(element)) => saw(element.origin()),
            Ok(Next::End | Next::Woken) => unreachable!("nobody ends"),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_node_that_is_killed_is_named_by_all() {
    let mut listeners = listeners(4, "local");
    let nodes: Vec<SocketAddr> = listeners.iter().map(RingListener::local_addr).collect();
    // Its listener is another process's from now on.
    drop(listeners.remove(1));
    let list: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ring::child_node", "--nocapture"])
        .env("RING_TEST_NODES", list.join(","))
        .env("RING_TEST_ME", "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Process(child);
    let out = child.0.stdout.take().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(out));
    assert!(lines.any(|line| line.unwrap() == "ready"));
    let (started, running) = std::sync::mpsc::channel();
    let failures: Vec<Error> = thread::scope(|scope| {
        let threads: Vec<_> = [0, 2, 3]
            .into_iter()
            .zip(&listeners)
            .map(|(me, listener)| {
                let (nodes, started) = (nodes.clone(), started.clone());
                scope.spawn(move || {
                    let ring = Ring {
                        element: 4096,
                        elements: 3,
                        patience: Duration::from_mins(1),
                        ..Ring::new(ID, nodes, me)
                    };
                    let mut seen = 0;
                    endless(listener.join(&ring).unwrap(), |origin| {
                        seen += u32::from(origin == 1);
                        if seen == 20 {
                            started.send(()).unwrap();
                        }
                    })
                })
            })
            .collect();
        drop(started);
        // An error: a node has failed early, and the assertion below says so.
        let all_run = (0..3).all(|_| running.recv().is_ok());
        let killed = Instant::now();
        child.0.kill().unwrap();
        let failures = threads.into_iter().map(|t| t.join().unwrap()).collect();
        // A second is the promise; the machine may be slow.
        assert!(all_run && killed.elapsed() < Duration::from_secs(20));
        failures
    });
    for error in &failures {
        assert!(matches!(error, Error::Failed { node: 1, .. }), "{error}");
    }
}

/// Not a test of its own: a listener that accepts whoever comes, started by the next test.
#[test]
fn child_stranger() {
    if std::env::var_os("RING_TEST_STRANGER").is_none() {
        return;
    }
    let device = weft_verbs::Device::open().unwrap();
    let param = ConnParam::default();
    let listener = cm::Listener::bind(&device, any(), 4, &param).unwrap();
    println!("\nlistening {}", listener.local_addr());
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16, None).unwrap();
    let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
    let conn = request
        .accept(pd.create_qp(&QpInit::new(&cq, &cq)).unwrap(), &param)
        .unwrap();
    // Until the parent ends us.
    thread::sleep(Duration::from_mins(1));
    drop(conn);
}

#[test]
fn a_successor_of_another_user_gets_nothing() {
    const NOBODY: u32 = 65_534;
    // Another user can run the test's program only from where everybody may.
    let folder = std::env::temp_dir().join(format!("weft-ring-stranger-{}", std::process::id()));
    let program = folder.join("test");
    std::fs::create_dir(&folder).unwrap();
    crate::copy_of_this_program(&program);
    let child = Command::new(&program)
        .args(["--exact", "ring::child_stranger", "--nocapture"])
        .env("RING_TEST_STRANGER", "1")
        .current_dir("/")
        .uid(NOBODY)
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => Process(child),
        Err(error) => {
            println!("skipped: no process of another user: {error}");
            std::fs::remove_dir_all(&folder).unwrap();
            return;
        }
    };
    let out = child.0.stdout.take().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(out));
    let stranger: SocketAddr = lines
        .find_map(|line| line.unwrap().strip_prefix("listening ").map(str::to_owned))
        .expect("the stranger listens")
        .parse()
        .unwrap();
    let listener = RingListener::open(any(), Security::SameUser, None).unwrap();
    let ring = Ring {
        patience: Duration::from_secs(2),
        ..Ring::new(ID, vec![listener.local_addr(), stranger], 0)
    };
    let Err(Error::Form { node: 1, why, .. }) = listener.join(&ring) else {
        panic!("a ring with a stranger was formed");
    };
    assert!(why.contains("this user"), "{why}");
    drop(child);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Plays node 1 of a ring of two towards node 0, up to the messages that it sends as a predecessor.
fn hostile_neighbour(victim: &RingListener, messages: &[Vec<u8>]) -> Error {
    let device = weft_verbs::Device::open().unwrap();
    let param = ConnParam::default();
    let listener = cm::Listener::bind(&device, any(), 4, &param).unwrap();
    let nodes = vec![victim.local_addr(), listener.local_addr()];
    let ring = Ring {
        element: 4096,
        elements: 3,
        ..Ring::new(ID, nodes, 0)
    };
    let hello = Hello {
        version: VERSION,
        from: 1,
        nodes: 2,
        home: false,
        exchange: 0,
        element: 4096,
        id: ID,
        agreement: 0,
        port: listener.local_addr().port(),
    };
    let pd = device.alloc_pd().unwrap();
    let mr = pd.alloc_mr(8192, Access::LOCAL_WRITE).unwrap();
    let qp = || {
        let cq = device.create_cq(64, None).unwrap();
        let qp = pd
            .create_qp(&QpInit {
                max_inline: 256,
                ..QpInit::new(&cq, &cq)
            })
            .unwrap();
        let receive = |i| RecvWr::new(i).sge(mr.sge(0, 8192));
        qp.post_recv(&[receive(1), receive(2), receive(3)]).unwrap();
        qp
    };
    thread::scope(|scope| {
        let victim = scope.spawn(|| {
            let mut node = victim.join(&ring).unwrap();
            loop {
                match node.next(false) {
                    Ok(Next::End) => panic!("a turn with a hostile node ended well"),
                    Ok(_) => {}
                    Err(error) => return error,
                }
            }
        });
        let accepting = scope.spawn(|| {
            let request = listener.next_request(Some(Duration::from_mins(1))).unwrap();
            request.accept(qp(), &param).unwrap()
        });
        let settings = ConnParam {
            private_data: hello.encode().to_vec(),
            ..ConnParam::default()
        };
        let out = cm::connect_qp(ring.nodes[0], qp(), &device, &settings).unwrap();
        let _from = accepting.join().unwrap();
        for message in messages {
            // It can have closed after the first.
            let _ = out.qp.post_send_one(SendWr::send(9).inline(message));
        }
        victim.join().unwrap()
    })
}

#[test]
fn a_neighbour_that_breaks_the_protocol_is_named() {
    let listener = RingListener::open(any(), Security::SameUser, None).unwrap();
    let header = |kind, change: &dyn Fn(&mut Header)| {
        let mut header = Header {
            hop: 1,
            origin: 1,
            ..Header::new(kind)
        };
        change(&mut header);
        header.encode().to_vec()
    };
    let request = Header::new(Kind::Request).encode().to_vec();
    let after_request = [
        vec![0xab; 64],
        vec![0; 3],
        header(Kind::Payload, &|h| h.hop = 0),
        header(Kind::Payload, &|h| h.hop = 2),
        header(Kind::Payload, &|h| h.origin = 0),
        header(Kind::Payload, &|h| h.origin = 9),
        header(Kind::Payload, &|h| h.len = 4096),
        header(Kind::Payload, &|h| h.len = u32::MAX),
        header(Kind::Payload, &|h| h.seq = 1),
        header(Kind::End, &|h| h.seq = 7),
        header(Kind::Confirm, &|_| ()),
        header(Kind::Bye, &|_| ()),
    ];
    let mut attacks: Vec<Vec<Vec<u8>>> = after_request
        .into_iter()
        .map(|message| vec![request.clone(), message])
        .collect();
    // In place of the request.
    attacks.push(vec![vec![0xab; 64]]);
    attacks.push(vec![vec![]]);
    attacks.push(vec![vec![0; 200]]);
    attacks.push(vec![header(Kind::Confirm, &|_| ())]);
    attacks.push(vec![header(Kind::Request, &|h| h.len = 50)]);
    for attack in attacks {
        match hostile_neighbour(&listener, &attack) {
            Error::Failed { node: 1, why, .. } => {
                assert!(why.contains("broke the protocol"), "{attack:?}: {why}");
            }
            other => panic!("{attack:?}: {other}"),
        }
    }
    // A failure whose text a terminal would obey, and a node that there is not.
    let mut failure = header(Kind::Fail, &|h| (h.origin, h.len) = (77, 6));
    failure.extend_from_slice(b"\x1b[2Jx\n");
    match hostile_neighbour(&listener, &[failure]) {
        Error::Failed { node: 1, why, .. } => assert!(!why.contains(char::is_control), "{why}"),
        other => panic!("{other}"),
    }
    // The listener is as before.
    let listeners = [
        listener,
        RingListener::open(any(), Security::SameUser, None).unwrap(),
    ];
    assert!(all(&listeners, &[3, 4], false).iter().all(|s| s.len() == 7));
}
