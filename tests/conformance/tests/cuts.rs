//! Connections that are cut after every possible number of bytes: each request has exactly one completion, both sides end, and no thread hangs.

use std::time::Duration;

use weft_conformance::bed::{Bed, End, Half, PATIENCE, Setup, pattern, take, until};
use weft_verbs::cm::ConnectError;
use weft_verbs::{AsyncEvent, QpState, RecvWr, SendWr, SimFaults, Wc, WcStatus};

/// Bytes of the largest operation: several FPDUs with the short ULPDUs used here.
const LEN: usize = 2000;

/// Connects, or returns the error on a network that cuts.
fn connect(bed: &Bed) -> Result<(End, End), ConnectError> {
    let listener = bed.listener(4);
    let (a, b) = (
        bed.end(&bed.a, &Half::default()),
        bed.end(&bed.b, &Half::default()),
    );
    std::thread::scope(|scope| {
        let dial = scope.spawn(|| bed.dial(listener.local_addr(), a, &bed.param()));
        let mut answered = None;
        while answered.is_none() && !dial.is_finished() {
            answered = listener.next_request(Some(Duration::from_millis(10)));
        }
        let b = match answered {
            Some(request) => b.over(|qp| request.accept(qp, &bed.param())),
            None => Err(ConnectError::Closed),
        };
        let a = dial.join().expect("no panic")?;
        Ok((a, b?))
    })
}

/// Requests of all kinds at once, both ways; returns how many succeeded.
fn traffic(a: &End, b: &End) -> usize {
    let (ma, mb) = (a.mr(4 * LEN), b.mr(4 * LEN));
    for (mr, seed) in [(&ma, 1), (&mb, 2)] {
        mr.write(0, &pattern(seed, LEN)).expect("within");
    }
    let mut wanted = Vec::new();
    for (end, own) in [(a, &ma), (b, &mb)] {
        for id in 0..2 {
            end.post_recv(RecvWr::new(id).sge(own.sge(2 * LEN, LEN)));
        }
    }
    for (end, own, peer) in [(a, &ma, &mb), (b, &mb, &ma)] {
        let wrs = [
            SendWr::write(10, peer.remote(LEN)).sge(own.sge(0, LEN)),
            SendWr::send(11).sge(own.sge(0, LEN)),
            SendWr::read(12, peer.remote(0)).sge(own.sge(3 * LEN, LEN)),
            SendWr::fetch_add(13, peer.remote(LEN), 1).sge(own.sge(0, 8)),
            SendWr::send(14).inline(&[1; 100]).fence(),
        ];
        let wrs = wrs.map(SendWr::signaled);
        // A connection that has ended accepts nothing, or flushes it.
        if end.qp.post_send(&wrs).is_ok() {
            wanted.push((&end.scq, vec![10, 11, 12, 13, 14]));
        }
        wanted.push((&end.rcq, vec![0, 1]));
    }
    let mut good = 0;
    for (cq, ids) in wanted {
        let wcs = take(cq, ids.len());
        let got: Vec<_> = wcs.iter().map(|wc| wc.wr_id).collect();
        assert_eq!(got, ids, "each once, in order: {wcs:?}");
        let mut broken = false;
        for wc in &wcs {
            let success = wc.status == WcStatus::Success;
            assert!(success || wc.status == WcStatus::WrFlushErr, "{wc:?}");
            assert!(!(success && broken), "success after a failure: {wcs:?}");
            broken |= !success;
            good += usize::from(success);
        }
    }
    good
}

fn cut(after: u64, crc: bool, seed: u64) -> Option<usize> {
    let faults = SimFaults {
        max_segment: 900,
        max_delay: 3,
        cut_after: Some(after),
    };
    let setup = Setup::sim(seed, faults).with(|o| {
        o.crc = crc;
        o.max_ulpdu = 700;
        o.timeout = Duration::from_secs(5);
    });
    let bed = Bed::new(setup).expect("the simulated network is everywhere");
    let (a, b) = connect(&bed).ok()?;
    let good = traffic(&a, &b);
    if good == 14 {
        return Some(good);
    }
    for end in [&a, &b] {
        until("both ends", || {
            end.scq.poll(&mut [Wc::default(); 1]).expect("no overrun");
            end.qp.state() == QpState::Error
        });
        let event = end.device.get_async_event(Some(PATIENCE));
        let num = end.qp.num();
        assert!(
            matches!(event, Some(AsyncEvent::QpFatal { qp_num, reason: 0 }) if qp_num == num),
            "cut after {after}: {event:?}"
        );
    }
    Some(good)
}

#[test]
fn cut_anywhere() {
    let mut outcomes = [0; 3];
    for crc in [true, false] {
        for step in 0..140 {
            // Every byte of the start-up and of the first frames, then in growing steps.
            let after = if step < 70 {
                step
            } else {
                70 + (step - 70) * 130
            };
            match cut(after, crc, step) {
                None => outcomes[0] += 1,
                Some(14) => outcomes[2] += 1,
                Some(_) => outcomes[1] += 1,
            }
        }
    }
    println!("{outcomes:?}");
    assert!(
        outcomes.iter().all(|n| *n > 0),
        "cuts of all kinds: {outcomes:?}"
    );
}
