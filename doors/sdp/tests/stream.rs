//! Streams as their programs use them, on TCP and in shared memory, in every mode.

mod common;

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use common::{
    LONG, MODES, exactly, leak, listener, pair, pair_with, pattern, recv, send, send_raw,
};
use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sdp::{Mode, Options, RecvFlags, Shutdown, Sink, Stream};
use weft_verbs::{Device, LocalMode};

const ALL: [Mode; 4] = [Mode::Bsdp, Mode::Zsdp, Mode::AzBlock, Mode::AzCopy];

#[test]
fn bytes_go_both_ways_and_the_end_is_seen() {
    for local in MODES {
        let (client, server) = pair(local);
        assert_eq!(send(&client, b"question"), Ok(8));
        assert_eq!(exactly(&server, 8), b"question");
        assert_eq!(send(&server, b"answer"), Ok(6));
        assert_eq!(exactly(&client, 6), b"answer");
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(recv(&server, 1, RecvFlags::empty()), Ok(vec![]));
        assert_eq!(send(&client, b"x"), Err(Errno::PIPE));
        // The other direction is open.
        assert_eq!(send(&server, b"more"), Ok(4));
        assert_eq!(exactly(&client, 4), b"more");
        server.close();
        assert_eq!(recv(&client, 1, RecvFlags::empty()), Ok(vec![]));
        assert_eq!(recv(&server, 1, RecvFlags::empty()), Err(Errno::BADF));
    }
}

#[test]
fn every_size_arrives_in_every_mode() {
    const SIZES: [usize; 9] = [
        1, 240, 241, 4096, 32768, 100_000, 262_144, 1_048_577, 3_000_000,
    ];
    for local in MODES {
        for mode in ALL {
            let (client, server) = pair_with(
                local,
                Options {
                    mode,
                    ..Options::default()
                },
            );
            let sender = thread::spawn(move || {
                for (seed, len) in SIZES.into_iter().enumerate() {
                    let memory = leak(&pattern(len, seed as u64));
                    assert_eq!(send_raw(&client, &memory), Ok(len));
                }
                client
            });
            for (seed, len) in SIZES.into_iter().enumerate() {
                let want = pattern(len, seed as u64);
                let got = if seed % 2 == 0 {
                    exactly(&server, len)
                } else {
                    let memory = leak(&vec![0; len]);
                    let n = server.recv(&mut [Sink::Raw(&memory)], RecvFlags::WAITALL);
                    assert_eq!(n, Ok(len));
                    memory.to_vec()
                };
                assert!(got == want, "{local:?} {mode:?} {len}");
            }
            let client = sender.join().unwrap();
            let (sent, received) = (client.send_stats(), server.send_stats());
            let large: u64 = SIZES
                .iter()
                .filter(|len| **len >= 32768)
                .map(|l| *l as u64)
                .sum();
            let zero_copy = sent.sync_bytes + sent.async_bytes;
            match mode {
                Mode::Bsdp => assert_eq!(zero_copy, 0),
                Mode::Zsdp => assert_eq!(sent.sync_bytes, large),
                _ => {
                    assert!(sent.async_bytes > large / 2, "{sent:?}");
                    assert!(received.fetched_bytes + received.sunk_bytes >= zero_copy / 2);
                }
            }
            let all: u64 = SIZES.iter().map(|len| *len as u64).sum();
            assert_eq!(sent.buffered_bytes + zero_copy, all);
            assert_eq!(received.received_bytes, all);
        }
    }
}

#[test]
fn a_partial_read_leaves_the_rest_of_a_source() {
    for local in MODES {
        let (client, server) = pair_with(
            local,
            Options {
                mode: Mode::AzCopy,
                ..Options::default()
            },
        );
        let want = pattern(500_000, 1);
        let memory = leak(&want);
        assert_eq!(send_raw(&client, &memory), Ok(want.len()));
        let mut got = Vec::new();
        for step in [1, 4095, 70_000, 333_333] {
            got.extend(exactly(&server, step));
        }
        // Overwritten in between: the rest comes from a copy.
        memory.write(0, &vec![0xee; want.len()]).unwrap();
        assert_eq!(
            recv(&server, 10, RecvFlags::PEEK).unwrap(),
            &want[got.len()..got.len() + 10]
        );
        got.extend(exactly(&server, want.len() - got.len()));
        assert!(got == want, "{local:?}");
    }
}

#[test]
fn small_sends_share_messages_when_credits_are_short() {
    for local in MODES {
        let options = Options {
            receives: 8,
            payload: 4096,
            ..Options::default()
        };
        let (client, server) = pair_with(local, options);
        let mut want = Vec::new();
        for seed in 0..200 {
            let bytes = pattern(64, seed);
            assert_eq!(send(&client, &bytes), Ok(64));
            want.extend(bytes);
        }
        assert!(exactly(&server, want.len()) == want);
        let send_stats = client.send_stats();
        assert!(
            send_stats.data_messages < 200 && send_stats.coalesced > 0,
            "{send_stats:?}"
        );
        assert_eq!(
            (send_stats.buffered_bytes, send_stats.buffered_sends),
            (200 * 64, 200)
        );
    }
}

#[test]
fn both_ends_may_send_before_they_read() {
    for local in MODES {
        for mode in ALL {
            let (client, server) = pair_with(
                local,
                Options {
                    mode,
                    ..Options::default()
                },
            );
            let run = |stream: Stream, seed: u64| {
                thread::spawn(move || {
                    let memory = leak(&pattern(100_000, seed));
                    assert_eq!(send_raw(&stream, &memory), Ok(100_000));
                    memory.write(0, &vec![0; 100_000]).unwrap();
                    assert!(exactly(&stream, 100_000) == pattern(100_000, 1 - seed));
                    stream
                })
            };
            let (one, two) = (run(client, 0), run(server, 1));
            one.join().unwrap();
            two.join().unwrap();
        }
    }
}

#[test]
fn calls_that_do_not_wait() {
    for local in MODES {
        let (client, server) = pair(local);
        assert_eq!(recv(&server, 1, RecvFlags::DONTWAIT), Err(Errno::AGAIN));
        assert!(!server.ready().contains(PollFlags::IN));
        client.set_nonblocking(true);
        let bytes = vec![7; 100_000];
        let mut sent = 0;
        loop {
            match send(&client, &bytes) {
                Ok(n) => sent += n,
                Err(Errno::AGAIN) => break,
                other => panic!("{other:?}"),
            }
        }
        assert!(sent >= 256 << 10 && !client.ready().contains(PollFlags::OUT));
        assert_eq!(
            server.wait_ready(PollFlags::IN, Some(LONG)).unwrap() & PollFlags::IN,
            PollFlags::IN
        );
        assert_eq!(exactly(&server, sent).len(), sent);
        let ready = client.wait_ready(PollFlags::OUT, Some(LONG)).unwrap();
        assert!(ready.contains(PollFlags::OUT));
        server.set_recv_timeout(Some(Duration::from_millis(20)));
        assert_eq!(recv(&server, 1, RecvFlags::empty()), Err(Errno::AGAIN));
    }
}

#[test]
fn a_send_with_a_limit_of_time_gives_the_memory_back() {
    for local in MODES {
        let options = Options {
            mode: Mode::Zsdp,
            patience: None,
            ..Options::default()
        };
        let (client, server) = pair_with(local, options);
        client.set_send_timeout(Some(Duration::from_millis(30)));
        let want = pattern(200_000, 3);
        let memory = leak(&want);
        assert_eq!(send_raw(&client, &memory), Ok(want.len()));
        memory.write(0, &vec![0; want.len()]).unwrap();
        assert!(exactly(&server, want.len()) == want);
        assert_eq!(client.send_stats().copies, 1);
    }
}

#[test]
fn an_urgent_byte_overtakes_and_leaves_a_mark() {
    for local in MODES {
        let (client, server) = pair(local);
        assert_eq!(server.recv_urgent(false), Err(Errno::INVAL));
        send(&client, b"before").unwrap();
        client.send_urgent(b'!', false).unwrap();
        send(&client, b"after").unwrap();
        assert!(
            server
                .wait_ready(PollFlags::PRI, Some(LONG))
                .unwrap()
                .contains(PollFlags::PRI)
        );
        assert_eq!(server.recv_urgent(true), Ok(b'!'));
        assert_eq!(server.recv_urgent(false), Ok(b'!'));
        // A read stops at the mark.
        assert_eq!(recv(&server, 100, RecvFlags::empty()).unwrap(), b"before");
        assert!(server.at_mark());
        assert_eq!(exactly(&server, 5), b"after");
        assert!(!server.at_mark());
        server.set_oob_inline(true);
        client.send_urgent(b'?', false).unwrap();
        assert_eq!(exactly(&server, 1), b"?");
    }
}

#[test]
fn a_waiting_receiver_opens_its_memory() {
    for local in MODES {
        for mode in [Mode::Zsdp, Mode::AzCopy] {
            let (client, server) = pair_with(
                local,
                Options {
                    mode,
                    ..Options::default()
                },
            );
            let want = pattern(200_000, 5);
            let reader = thread::spawn({
                let len = want.len();
                move || {
                    let memory = leak(&vec![0; len]);
                    let n = server.recv(&mut [Sink::Raw(&memory)], RecvFlags::WAITALL);
                    assert_eq!(n, Ok(len));
                    (server, memory.to_vec())
                }
            });
            // Whether the sink is there in time is for the scheduler: either way the bytes arrive.
            thread::sleep(Duration::from_millis(20));
            assert_eq!(send_raw(&client, &leak(&want)), Ok(want.len()));
            let (server, got) = reader.join().unwrap();
            assert!(got == want, "{local:?} {mode:?}");
            let send_stats = server.send_stats();
            let placed = send_stats.sunk_bytes + send_stats.fetched_bytes;
            assert!(placed > 100_000, "{send_stats:?}");
        }
    }
}

#[test]
fn the_mode_may_change_at_any_time() {
    for local in MODES {
        let (client, server) = pair(local);
        let sender = thread::spawn(move || {
            for turn in 0..60_u64 {
                client.set_mode(ALL[turn as usize % 4]);
                let len = 20_000 + 9_999 * turn as usize % 300_000;
                assert_eq!(send_raw(&client, &leak(&pattern(len, turn))), Ok(len));
            }
            client
        });
        for turn in 0..60_u64 {
            let len = 20_000 + 9_999 * turn as usize % 300_000;
            assert!(
                exactly(&server, len) == pattern(len, turn),
                "{local:?} {turn}"
            );
        }
        sender.join().unwrap();
    }
}

#[test]
fn what_was_sent_arrives_after_the_close() {
    for local in MODES {
        for mode in ALL {
            let (client, server) = pair_with(
                local,
                Options {
                    mode,
                    ..Options::default()
                },
            );
            client.set_linger(Some(Duration::from_millis(50)));
            let want = pattern(300_000, 9);
            let memory = leak(&want);
            let n = if mode == Mode::Bsdp {
                100_000
            } else {
                want.len()
            };
            assert_eq!(send_raw(&client, &memory.slice(0, n).unwrap()), Ok(n));
            client.close();
            drop(client);
            memory.write(0, &vec![0; want.len()]).unwrap();
            assert!(exactly(&server, n) == want[..n], "{local:?} {mode:?}");
            assert_eq!(recv(&server, 1, RecvFlags::empty()), Ok(vec![]));
        }
    }
}

#[test]
fn a_reset_is_told() {
    for local in MODES {
        let (client, server) = pair(local);
        client.set_linger(Some(Duration::ZERO));
        drop(client);
        assert_eq!(recv(&server, 1, RecvFlags::empty()), Err(Errno::CONNRESET));
        assert_eq!(server.take_error(), Some(Errno::CONNRESET));
        assert_eq!(server.take_error(), None);
        assert_eq!(send(&server, b"x"), Err(Errno::CONNRESET));
    }
}

#[test]
fn nobody_is_there_or_it_is_somebody_else() {
    let device = Device::open().unwrap();
    let gone = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let refused = Stream::connect(&device, gone, &Options::default(), Some(LONG));
    assert_eq!(refused.err(), Some(Errno::CONNREFUSED));
    let server = listener(&device, Options::default());
    assert_eq!(
        server.accept(Some(Duration::ZERO)).err(),
        Some(Errno::AGAIN)
    );
    // A program of verbs that knows no SDP is rejected.
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(8, None).unwrap();
    let init = weft_verbs::QpInit::new(&cq, &cq);
    let param = weft_verbs::cm::ConnParam::default();
    let verbs = weft_verbs::cm::connect(server.local_addr(), &pd, &init, &param);
    assert!(verbs.is_err());
    assert_eq!(
        server.accept(Some(Duration::from_millis(20))).err(),
        Some(Errno::AGAIN)
    );
}

#[test]
fn a_device_that_requires_shared_memory_gets_it() {
    let (client, server) = pair(LocalMode::Require);
    assert_eq!(client.path().unwrap().transport, "local");
    assert_eq!(server.peer_addr(), client.local_addr());
}
