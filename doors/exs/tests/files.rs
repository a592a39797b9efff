//! File sends that are cancelled or exceed their time limit, and the operations behind them.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::{
    alone, context, events, file_of, next_event, pair, pair_of, send_limit, whole,
};

use weft_exs::{Errno, Kind, Memory, Mode, Queue, RecvFlags, Region, Sink, Socket};
use weft_verbs::LocalMode;

/// A thread that receives until the end of the stream.
fn drain(from: Socket) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let to = Region::alloc(&context(LocalMode::Off), 1 << 16).unwrap();
        while matches!(from.recv_wait(&to.whole(), RecvFlags::empty()), Ok(1..)) {}
    })
}

/// Wait this long, precise to the microsecond.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {}
}

#[test]
fn a_cancelled_file_send_has_sent_a_beginning_of_the_file() {
    // Each word contains its own index.
    let bytes: Vec<u8> = (0..3_u32 << 20).flat_map(u32::to_le_bytes).collect();
    let file = file_of(&bytes);
    let indirect = |o: &mut weft_exs::Options| o.mode = Mode::Indirect;
    for round in 0..60_u64 {
        let (context, a, b) = pair_of(LocalMode::Off, Kind::Stream, indirect, indirect);
        let queue = Queue::new(&context, 8).unwrap();
        let reader = std::thread::spawn(move || {
            let to = Region::alloc(&context, 16 << 20).unwrap();
            let n = b.recv_wait(&to.whole(), RecvFlags::WAITALL).unwrap();
            let mut got = vec![0; n];
            to.read(0, &mut got).unwrap();
            got
        });
        a.send_file(whole(&file), queue.sink(1)).unwrap();
        // While its next part is read.
        std::thread::sleep(Duration::from_micros(1000 + 97 * round));
        a.cancel(Some(1));
        let end = next_event(&queue);
        a.close(Sink::Nobody).unwrap();
        let got = reader.join().unwrap();
        assert!(bytes.starts_with(&got), "round {round}: {end:?}");
        assert_eq!(got.len(), end.bytes, "round {round}");
    }
}

#[test]
fn a_cancel_of_one_file_leaves_the_next_alone() {
    let (context, a, b) = pair(LocalMode::Off);
    let drain = drain(b);
    let queue = Queue::new(&context, 8).unwrap();
    let (small, large) = (file_of(&[7; 100]), file_of(&vec![7; 3 << 20]));
    for round in 0..600_u64 {
        a.send_file(whole(&small), queue.sink(1)).unwrap();
        a.send_file(whole(&large), queue.sink(2)).unwrap();
        // Until about the end of the first send.
        spin(Duration::from_nanos(round * 7919 % 60_000));
        a.cancel(Some(1));
        let ends = events(&queue, 2);
        let second = ends.iter().find(|e| e.token == 2).unwrap();
        assert_eq!(second.result, Ok(3 << 20), "round {round}");
    }
    a.close(Sink::Nobody).unwrap();
    drain.join().unwrap();
}

#[test]
fn a_cancelled_file_send_behind_a_stuck_send_ends() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.send(Memory::from(vec![1; 8 << 20]), Sink::Nobody)
        .unwrap();
    a.send_file(whole(&file_of(&[7; 1000])), queue.sink(1))
        .unwrap();
    // A later send gets its turn, although it then gets stuck as well.
    a.send(Memory::from(vec![2; 8]), queue.sink(2)).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(a.cancel(Some(1)), 1);
    let end = next_event(&queue);
    assert_eq!((end.token, end.result), (1, Err(Errno::CANCELED)));
    let to = Region::alloc(&context, (8 << 20) + 8).unwrap();
    let got = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
    assert_eq!(got, Ok((8 << 20) + 8));
    let end = next_event(&queue);
    assert_eq!((end.token, end.result), (2, Ok(8)));
}

#[test]
fn a_time_limit_of_a_file_send_behind_a_stuck_send_ends_it() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.send(Memory::from(vec![1; 8 << 20]), Sink::Nobody)
        .unwrap();
    send_limit(&a, 200);
    a.send_file(whole(&file_of(&[7; 1000])), queue.sink(1))
        .unwrap();
    assert_eq!(next_event(&queue).result, Err(Errno::TIMEDOUT));
    drop(b);
}

#[test]
fn time_limits_hold_behind_a_file() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.send_file(whole(&file_of(&vec![7; 8 << 20])), Sink::Nobody)
        .unwrap();
    // The later ones have less time; the last one does not reach its limit.
    for (token, limit) in [(1, 300), (2, 200), (3, 100), (4, 60_000)] {
        send_limit(&a, limit);
        let sink = queue.sink(token);
        if token == 2 {
            a.send_file(whole(&file_of(&[8; 100])), sink).unwrap();
        } else {
            a.send(Memory::from(vec![9; 8]), sink).unwrap();
        }
    }
    for token in [3, 2, 1] {
        let end = next_event(&queue);
        assert_eq!((end.token, end.result), (token, Err(Errno::TIMEDOUT)));
        let memory = end.memory.map(|memory| memory.len());
        assert_eq!(memory, (token != 2).then_some(8));
    }
    let to = Region::alloc(&context, (8 << 20) + 8).unwrap();
    let got = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
    assert_eq!(got, Ok((8 << 20) + 8));
    let end = next_event(&queue);
    assert_eq!((end.token, end.result), (4, Ok(8)));
}

#[test]
fn a_time_limit_that_began_behind_a_file_goes_on_after_it() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    a.send_file(whole(&file_of(&[7; 1000])), Sink::Nobody)
        .unwrap();
    send_limit(&a, 200);
    a.send(Memory::from(vec![9; 8 << 20]), queue.sink(1))
        .unwrap();
    assert_eq!(next_event(&queue).result, Err(Errno::TIMEDOUT));
    drop(b);
}

#[test]
fn a_file_send_that_is_cancelled_too_late_is_not_cancelled() {
    let (context, a, b) = pair(LocalMode::Off);
    let queue = Queue::new(&context, 8).unwrap();
    let file = file_of(&[7; 1000]);
    let to = Region::alloc(&context, 1000).unwrap();
    for round in 0..1500_u64 {
        a.send_file(whole(&file), queue.sink(round)).unwrap();
        spin(Duration::from_micros(round % 80));
        a.cancel(Some(round));
        let end = next_event(&queue);
        match end.result {
            Ok(n) => assert_eq!((n, end.bytes), (1000, 1000)),
            Err(e) => assert_eq!((e, end.bytes), (Errno::CANCELED, 0), "round {round}"),
        }
        if end.bytes > 0 {
            let got = b.recv_wait(&to.whole(), RecvFlags::WAITALL);
            assert_eq!(got, Ok(1000));
        }
    }
}

/// The resident memory of this process, in KiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_long_time_limit_of_files_keeps_nothing() {
    if !alone("files::a_long_time_limit_of_files_keeps_nothing") {
        return;
    }
    let (context, a, b) = pair(LocalMode::Off);
    let drain = drain(b);
    let queue = Queue::new(&context, 8).unwrap();
    let file = file_of(&[7; 100]);
    let run = |n: usize| {
        for i in 0..n {
            let limit = [3600, 1800][i % 2];
            a.set_options(|o| o.send_timeout = Some(Duration::from_secs(limit)))
                .unwrap();
            a.send_file(whole(&file), queue.sink(1)).unwrap();
            assert_eq!(next_event(&queue).result, Ok(100));
        }
    };
    run(5_000);
    let before = resident();
    run(15_000);
    let more = resident().saturating_sub(before);
    a.close(Sink::Nobody).unwrap();
    drain.join().unwrap();
    assert!(more < 500, "{more} KiB for 15,000 file sends that are over");
}
