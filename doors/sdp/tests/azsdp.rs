//! Memory that is written while it is sent: the bytes that arrive are those of the time of the send.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::{MODES, exactly, leak, pair_with, pattern, send_raw};
use weft_sdp::{Mode, Options, RecvFlags, Sink};
use weft_verbs::protect;

const LEN: usize = 300_000;

fn options(mode: Mode) -> Options {
    Options {
        mode,
        patience: None,
        fault_limit: u32::MAX,
        ..Options::default()
    }
}

#[test]
fn a_buffer_overwritten_in_flight_arrives_as_it_was_sent() {
    for local in MODES {
        let (client, server) = pair_with(local, options(Mode::AzCopy));
        let memory = leak(&vec![0; LEN]);
        for round in 0..12 {
            memory.write(0, &pattern(LEN, round)).unwrap();
            assert_eq!(send_raw(&client, &memory), Ok(LEN));
            // Nobody receives: with copy on write this thread gets on.
            memory.write(0, &vec![0xee; LEN]).unwrap();
        }
        for round in 0..12 {
            assert!(
                exactly(&server, LEN) == pattern(LEN, round),
                "{local:?} {round}"
            );
        }
        let send_stats = client.send_stats();
        assert!(
            send_stats.copies >= 12 && send_stats.faults >= 12,
            "{send_stats:?}"
        );
        assert_eq!(send_stats.async_sends, 12);
    }
}

#[test]
fn block_on_write_waits_for_the_receiver() {
    for local in MODES {
        let (client, server) = pair_with(local, options(Mode::AzBlock));
        let memory = leak(&pattern(LEN, 1));
        assert_eq!(send_raw(&client, &memory), Ok(LEN));
        let received = Arc::new(AtomicBool::new(false));
        let writer = thread::spawn({
            let received = Arc::clone(&received);
            move || {
                memory.write(LEN / 2, &[0xee]).unwrap();
                assert!(received.load(Ordering::SeqCst), "it did not wait");
            }
        });
        // Until it has been seen to wait.
        while client.send_stats().faults == 0 && !writer.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        received.store(true, Ordering::SeqCst);
        assert!(exactly(&server, LEN) == pattern(LEN, 1), "{local:?}");
        writer.join().unwrap();
        assert_eq!(client.send_stats().faults, 1);
        assert_eq!(client.send_stats().copies, 0);
    }
}

#[test]
fn patience_ends_a_block() {
    for local in MODES {
        let options = Options {
            patience: Some(Duration::from_millis(20)),
            ..options(Mode::AzBlock)
        };
        let (client, server) = pair_with(local, options);
        let memory = leak(&pattern(LEN, 2));
        assert_eq!(send_raw(&client, &memory), Ok(LEN));
        memory.write(0, &vec![0; LEN]).unwrap();
        assert!(exactly(&server, LEN) == pattern(LEN, 2), "{local:?}");
        assert_eq!(client.send_stats().copies, 1);
    }
}

#[test]
fn a_buffer_sent_again_untouched_stays_protected() {
    for local in MODES {
        let (client, server) = pair_with(local, options(Mode::AzBlock));
        let memory = leak(&pattern(LEN, 3));
        for _ in 0..40 {
            assert_eq!(send_raw(&client, &memory), Ok(LEN));
            assert!(exactly(&server, LEN) == pattern(LEN, 3));
        }
        let send_stats = client.send_stats();
        assert_eq!(
            (send_stats.async_sends, send_stats.still_protected),
            (40, 39)
        );
        assert_eq!(send_stats.faults, 0);
        let before = protect::counters();
        memory.write(LEN / 2, &[1]).unwrap();
        // Nothing was on its way: only the protection went.
        assert_eq!(client.send_stats().faults, 0);
        assert!(protect::counters().lifts > before.lifts);
    }
}

#[test]
fn many_sources_are_in_flight_and_threads_write_to_all_of_them() {
    for local in MODES {
        let (client, server) = pair_with(local, options(Mode::AzCopy));
        let buffers: Vec<_> = (0..8).map(|seed| leak(&pattern(LEN, seed))).collect();
        for memory in &buffers {
            assert_eq!(send_raw(&client, memory), Ok(LEN));
        }
        let writers: Vec<_> = (0..8)
            .flat_map(|at| [(at, 0), (at, LEN / 2), (at, LEN - 1)])
            .map(|(at, off)| {
                let memory = buffers[at].clone();
                thread::spawn(move || memory.write(off, &[0xee]).unwrap())
            })
            .collect();
        for seed in 0..8 {
            assert!(
                exactly(&server, LEN) == pattern(LEN, seed),
                "{local:?} {seed}"
            );
        }
        for writer in writers {
            writer.join().unwrap();
        }
    }
}

#[test]
fn two_connections_send_the_same_buffer() {
    for local in MODES {
        let (one, to_one) = pair_with(local, options(Mode::AzCopy));
        let (two, to_two) = pair_with(local, options(Mode::AzCopy));
        let memory = leak(&pattern(LEN, 4));
        assert_eq!(send_raw(&one, &memory), Ok(LEN));
        assert_eq!(send_raw(&two, &memory), Ok(LEN));
        memory.write(0, &vec![0; LEN]).unwrap();
        assert!(exactly(&to_one, LEN) == pattern(LEN, 4));
        assert!(exactly(&to_two, LEN) == pattern(LEN, 4));
        assert_eq!((one.send_stats().faults, two.send_stats().faults), (1, 1));
    }
}

#[test]
fn a_program_that_writes_at_once_falls_back_and_comes_again() {
    for local in MODES {
        let options = Options {
            fault_limit: 16,
            ..options(Mode::AzCopy)
        };
        let (client, server) = pair_with(local, options);
        let reader = thread::spawn(move || {
            for round in 0..100 {
                assert!(exactly(&server, LEN) == pattern(LEN, round));
            }
        });
        let memory = leak(&vec![0; LEN]);
        for round in 0..100 {
            memory.write(0, &pattern(LEN, round)).unwrap();
            assert_eq!(send_raw(&client, &memory), Ok(LEN));
        }
        reader.join().unwrap();
        let send_stats = client.send_stats();
        assert_eq!(
            send_stats.async_sends + send_stats.sync_sends,
            100,
            "{send_stats:?}"
        );
        // How many faults meet bytes in flight is for the scheduler; if they were many, it has given up, and for 64 sends.
        assert_eq!(
            send_stats.falls > 0,
            send_stats.sync_sends > 0,
            "{send_stats:?}"
        );
    }
}

#[test]
fn receiving_into_memory_that_is_being_sent() {
    for local in MODES {
        let (client, server) = pair_with(local, options(Mode::AzCopy));
        let memory = leak(&pattern(LEN, 5));
        assert_eq!(send_raw(&client, &memory), Ok(LEN));
        let answer = leak(&pattern(LEN, 6));
        assert_eq!(send_raw(&server, &answer), Ok(LEN));
        let n = client.recv(&mut [Sink::Raw(&memory)], RecvFlags::WAITALL);
        assert_eq!(n, Ok(LEN));
        assert!(memory.to_vec() == pattern(LEN, 6));
        assert!(exactly(&server, LEN) == pattern(LEN, 5));
    }
}

#[test]
fn the_end_of_the_connection_frees_the_memory() {
    for local in MODES {
        for mode in [Mode::AzBlock, Mode::AzCopy] {
            let (client, server) = pair_with(local, options(mode));
            let memory = leak(&pattern(LEN, 7));
            assert_eq!(send_raw(&client, &memory), Ok(LEN));
            let writer = thread::spawn({
                let memory = memory.clone();
                move || memory.write(0, &vec![0; LEN]).unwrap()
            });
            // The peer resets.
            server.set_linger(Some(Duration::ZERO));
            drop(server);
            writer.join().unwrap();
            drop(client);
            protect::settle(memory.as_ptr(), LEN);
            assert!(!protect::is_guarded(memory.as_ptr(), LEN));
        }
    }
}
