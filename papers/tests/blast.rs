//! Blast, both ends in this process: every way of moving bytes, with every byte compared; and peers that are none.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;
use weft_papers::exs::{Amount, Client, Design, Kind, Lengths, Mode, Plan, Run, Server, Wait};
use weft_papers::{BenchError, Transport};

/// Serves `clients` one after the other, and returns what went wrong with each.
fn server(
    clients: usize,
) -> (
    SocketAddr,
    std::thread::JoinHandle<Vec<Result<(), BenchError>>>,
) {
    let mut server = Server::listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let addr = server.local_addr().unwrap();
    let serve = move || {
        let one = |_| server.serve(Some(Duration::from_secs(10)), |_, _| ());
        (0..clients).map(one).collect()
    };
    (addr, std::thread::spawn(serve))
}

fn verified(transport: Transport) -> Plan {
    Plan {
        transport: Some(transport),
        amount: Amount::Messages(200),
        lengths: Lengths::Exponential {
            mean: 20_000,
            max: 100_000,
            seed: 3,
        },
        buffer: 64 << 10,
        sends: 3,
        receives: 5,
        verify: Some(7),
        ..Plan::default()
    }
}

fn check(plan: &Plan, run: &Run) {
    let Plan { amount, .. } = plan;
    if let Amount::Messages(count) = amount {
        assert_eq!(run.messages, *count, "{plan:?}");
    }
    assert!(
        run.bytes > 0 && run.seconds > 0.0 && run.receives > 0,
        "{run:?}"
    );
    let all = run.client.direct_bytes + run.client.indirect_bytes + run.client.small_bytes;
    assert!(all >= run.bytes, "{plan:?} {run:?}");
    assert_eq!(
        run.path.starts_with("local"),
        plan.transport == Some(Transport::Local),
        "{}",
        run.path
    );
}

#[test]
fn every_way_delivers_what_was_sent() {
    let (addr, serving) = server(1);
    let mut client = Client::connect(addr).unwrap();
    for transport in [Transport::Tcp, Transport::Local] {
        let base = verified(transport);
        let mut plans = Vec::new();
        for mode in [Mode::Dynamic, Mode::Published, Mode::Direct, Mode::Indirect] {
            for registered in [true, false] {
                plans.push(Plan {
                    mode,
                    registered,
                    waitall: !registered,
                    ..base.clone()
                });
            }
        }
        for design in [Design::Advert, Design::Source] {
            plans.push(Plan {
                kind: Kind::Seqpacket,
                design,
                small: 30_000,
                in_place: true,
                ..base.clone()
            });
        }
        plans.push(Plan {
            small: 4096,
            in_place: true,
            lengths: Lengths::Fixed(4000),
            wait: Wait::Adaptive,
            credits: 4,
            ..base.clone()
        });
        plans.push(Plan {
            crc: true,
            warm_up: 300_000,
            amount: Amount::Bytes(500_000),
            ..base.clone()
        });
        plans.push(Plan {
            amount: Amount::Seconds(0.01),
            verify: None,
            ..base
        });
        for plan in plans {
            let mut last = (0, 0);
            let run = client.run(&plan, &mut |messages, bytes, _| {
                assert!(messages >= last.0 && bytes >= last.1);
                last = (messages, bytes);
            });
            let run = run.unwrap_or_else(|error| panic!("{plan:?}: {error}"));
            check(&plan, &run);
            assert_eq!(last, (run.messages, run.bytes), "{plan:?}");
            match plan.mode {
                Mode::Direct => assert_eq!(run.client.indirect, 0, "{run:?}"),
                Mode::Indirect => assert_eq!(run.client.direct, 0, "{run:?}"),
                Mode::Dynamic | Mode::Published => {}
            }
        }
    }
    drop(client);
    assert!(serving.join().unwrap()[0].is_ok());
}

#[test]
fn a_server_outlives_clients_that_are_none() {
    let (addr, serving) = server(3);
    let mut stranger = TcpStream::connect(addr).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Until it hangs up.
    let _ = stranger.read_to_end(&mut Vec::new());
    // One that asks for too much is told so, and can ask again.
    let mut client = Client::connect(addr).unwrap();
    let greedy = Plan {
        receives: 4096,
        lengths: Lengths::Fixed(1 << 30),
        ..Plan::default()
    };
    assert!(matches!(
        client.run(&greedy, &mut |_, _, _| ()),
        Err(BenchError::Usage(_))
    ));
    let plan = verified(Transport::Tcp);
    check(&plan, &client.run(&plan, &mut |_, _, _| ()).unwrap());
    drop(client);
    let mut client = Client::connect(addr).unwrap();
    check(&plan, &client.run(&plan, &mut |_, _, _| ()).unwrap());
    drop(client);
    let served = serving.join().unwrap();
    assert!(
        matches!(served[0], Err(BenchError::Stranger(_))),
        "{:?}",
        served[0]
    );
    assert!(served[1].is_ok() && served[2].is_ok(), "{served:?}");
}

#[test]
fn nobody_there_is_said_so() {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    match Client::connect(addr).err() {
        Some(BenchError::Unreachable(there, _)) => assert_eq!(there, addr),
        other => panic!("{other:?}"),
    }
}
