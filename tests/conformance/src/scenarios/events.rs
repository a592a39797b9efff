//! Completion channels.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use weft_verbs::{
    AsyncEvent, CompChannel, EventWait, Limits, QpState, RecvWr, SendWr, Wc, WcStatus,
};

use crate::bed::{Bed, End, Half, PATIENCE, take, until};

const NOW: Option<Duration> = Some(Duration::ZERO);

/// A pair whose responder's queues notify a channel.
fn pair(bed: &Bed) -> (End, End, CompChannel) {
    let channel = bed.b.create_comp_channel().unwrap();
    let half = Half {
        channel: Some(channel.clone()),
        max_recv_wr: 256,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&Half::default(), &half);
    (a, b, channel)
}

/// One event for one arming: none before it, one for the next completion, none for later completions.
pub fn arm_and_event(bed: &Bed) {
    let (a, b, channel) = pair(bed);
    for id in 0..3 {
        b.post_recv(RecvWr::new(id));
    }
    a.run(SendWr::send(1));
    take(&b.rcq, 1);
    assert_eq!(channel.get_event(NOW), None, "never armed");
    b.rcq.req_notify(false);
    b.rcq.req_notify(false);
    assert_eq!(channel.get_event(NOW), None, "armed twice, no completion");
    a.run(SendWr::send(1));
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
    a.run(SendWr::send(1));
    take(&b.rcq, 2);
    assert_eq!(channel.get_event(NOW), None, "not armed again");
}

/// A completion from before the arming makes no event; the next one does.
pub fn completion_already_there(bed: &Bed) {
    let (a, b, channel) = pair(bed);
    b.post_recv(RecvWr::new(1));
    b.post_recv(RecvWr::new(2));
    a.run(SendWr::send(1));
    let first = take(&b.rcq, 1)[0];
    assert_eq!(first.wr_id, 1);
    b.rcq.req_notify(false);
    // As every program must: poll once more after arming.
    assert_eq!(b.rcq.poll(&mut [Wc::default(); 1]), Ok(0));
    a.run(SendWr::send(2));
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
    assert_eq!(take(&b.rcq, 1)[0].wr_id, 2);
}

/// The usual loop of an event-driven program loses no completion, although no thread polls in between.
pub fn event_loop(bed: &Bed) {
    const COUNT: usize = 200;
    let (a, b, channel) = pair(bed);
    for id in 0..COUNT {
        b.post_recv(RecvWr::new(id as u64));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..COUNT / 2 {
                a.post(SendWr::send(1));
                a.run(SendWr::send(1));
            }
        });
        let mut seen = 0;
        let mut out = [Wc::default(); 7];
        while seen < COUNT {
            b.rcq.req_notify(false);
            loop {
                let n = b.rcq.poll(&mut out).unwrap();
                if n == 0 {
                    break;
                }
                for (i, wc) in out[..n].iter().enumerate() {
                    assert_eq!(
                        (wc.wr_id, wc.status),
                        ((seen + i) as u64, WcStatus::Success)
                    );
                }
                seen += n;
            }
            if seen < COUNT {
                let event = channel.get_event(Some(PATIENCE));
                assert_eq!(event, Some(b.rcq.num()), "{seen} of {COUNT}");
            }
        }
    });
}

/// Armed for solicited completions, only a solicited receive or an error makes an event.
pub fn solicited_only(bed: &Bed) {
    let (a, b, channel) = pair(bed);
    for id in 0..5 {
        b.post_recv(RecvWr::new(id));
    }
    b.rcq.req_notify(true);
    a.run(SendWr::send(1));
    a.run(SendWr::send(1));
    take(&b.rcq, 2);
    assert_eq!(channel.get_event(NOW), None, "not solicited");
    a.run(SendWr::send(1).solicited());
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
    // Armed for solicited, then for any: any counts.
    take(&b.rcq, 1);
    b.rcq.req_notify(true);
    b.rcq.req_notify(false);
    b.rcq.req_notify(true);
    a.run(SendWr::send(1));
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
    take(&b.rcq, 1);
    // An error counts as solicited.
    b.rcq.req_notify(true);
    if bed.is_roce() {
        // An end is not told to the peer.
        b.qp.to_error();
    } else {
        a.qp.to_error();
    }
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
}

/// Solicited immediate data makes an event too.
pub fn solicited_immediate(bed: &Bed) {
    crate::need!(bed, immediate);
    let (a, b, channel) = pair(bed);
    let mr = b.mr(8);
    b.post_recv(RecvWr::new(1));
    b.post_recv(RecvWr::new(2));
    b.rcq.req_notify(true);
    a.run(SendWr::write_imm(1, mr.remote(0), 7));
    take(&b.rcq, 1);
    assert_eq!(channel.get_event(NOW), None, "not solicited");
    a.run(SendWr::write_imm(1, mr.remote(0), 7).solicited());
    assert_eq!(channel.get_event(Some(PATIENCE)), Some(b.rcq.num()));
}

/// Two queues on one channel: each makes its own events.
pub fn two_queues_on_one_channel(bed: &Bed) {
    let (a, b, channel) = pair(bed);
    b.post_recv(RecvWr::new(1));
    a.run(SendWr::send(1));
    take(&b.rcq, 1);
    b.post_recv(RecvWr::new(1));
    a.post_recv(RecvWr::new(1));
    b.scq.req_notify(false);
    b.rcq.req_notify(false);
    a.run(SendWr::send(1));
    b.post(SendWr::send(2).signaled());
    let mut nums = [(); 2].map(|()| channel.get_event(Some(PATIENCE)).expect("an event"));
    nums.sort_unstable();
    let mut want = [b.scq.num(), b.rcq.num()];
    want.sort_unstable();
    assert_eq!(nums, want);
    assert_eq!(channel.get_event(NOW), None);
}

/// The descriptor is readable exactly while events wait; edge-triggered, each event is an edge.
pub fn in_an_epoll(bed: &Bed) {
    for edge in [false, true] {
        let (a, b, channel) = pair(bed);
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = if edge {
            epoll::EventFlags::IN | epoll::EventFlags::ET
        } else {
            epoll::EventFlags::IN
        };
        epoll::add(
            &poller,
            channel.as_fd(),
            epoll::EventData::new_u64(7),
            flags,
        )
        .unwrap();
        let ready = |time: Duration| {
            let mut events = Vec::with_capacity(4);
            let time = Timespec::try_from(time).unwrap();
            epoll::wait(
                &poller,
                rustix::buffer::spare_capacity(&mut events),
                Some(&time),
            )
            .unwrap();
            !events.is_empty()
        };
        // There may be an edge from the start, without an event.
        let first = ready(Duration::ZERO);
        assert!(edge || !first, "readable without an event");
        for id in 0..10 {
            b.post_recv(RecvWr::new(id));
            b.rcq.req_notify(false);
            a.run(SendWr::send(1));
            assert!(ready(PATIENCE), "round {id}, edge {edge}");
            if !edge {
                assert!(ready(Duration::ZERO), "readable until it is fetched");
            }
            assert_eq!(channel.get_event(NOW), Some(b.rcq.num()));
            assert!(edge || !ready(Duration::ZERO), "fetched");
            take(&b.rcq, 1);
        }
    }
}

/// A thread that drives while it waits for events gets each of them, and so does a thread that sleeps elsewhere in between.
pub fn awaited(bed: &Bed) {
    const ROUNDS: u64 = 60;
    let (a, b, channel) = pair(bed);
    let wait = EventWait::default();
    let cqs = [b.rcq.clone()];
    for id in 0..ROUNDS {
        b.post_recv(RecvWr::new(id));
    }
    b.rcq.req_notify(false);
    std::thread::scope(|scope| {
        let (next, may_send) = std::sync::mpsc::channel();
        let a = &a;
        scope.spawn(move || {
            while may_send.recv().is_ok() {
                a.run(SendWr::send(1));
            }
        });
        for round in 0..ROUNDS {
            next.send(()).unwrap();
            let event = std::cell::Cell::new(None);
            // Every fifth time it sleeps on the channel at once, although it has just driven.
            if round % 5 < 4 {
                wait.try_for(&cqs, || {
                    event.set(channel.get_event(NOW));
                    event.get().is_some()
                });
            }
            let event = event.get().or_else(|| channel.get_event(Some(PATIENCE)));
            assert_eq!(event, Some(b.rcq.num()), "round {round}");
            b.rcq.req_notify(false);
            assert_eq!(take(&b.rcq, 1)[0].wr_id, round);
            // The event may be that of a completion that arrived after the queue was armed again.
            while channel.get_event(NOW).is_some() {
                b.rcq.req_notify(false);
            }
        }
        drop(next);
    });
}

/// Waiting for an event ends when its time is up.
pub fn wait_in_vain(bed: &Bed) {
    let (_a, b, channel) = pair(bed);
    b.rcq.req_notify(false);
    let time = Duration::from_millis(60);
    let start = std::time::Instant::now();
    assert_eq!(channel.get_event(Some(time)), None);
    assert!(start.elapsed() >= time);
}

/// Asynchronous events go to the program's hook instead of the device's queue, including earlier ones.
pub fn asynchronous_hook(bed: &Bed) {
    let device = bed.device(Limits::default());
    let listener = bed.listener(8);
    let cut = || {
        let there = bed.end(&device, &Half::default());
        let here = bed.end(&bed.b, &Half::default());
        let param = bed.param();
        let (there, here) = bed.join(&listener, there, here, (&param, &param));
        let num = there.qp.num();
        if bed.is_roce() {
            // The end of one side is not told to the other: a request is refused.
            let nowhere = here.mr(8).remote(8);
            there.post(SendWr::write(1, nowhere).inline(&[0]));
        } else {
            here.qp.to_error();
        }
        until("the end", || there.qp.state() == QpState::Error);
        num
    };
    let early = cut();
    let (tell, told) = std::sync::mpsc::channel();
    device.on_async_event(move |event| tell.send(event).unwrap());
    let late = cut();
    for num in [early, late] {
        let event = told.recv_timeout(PATIENCE).expect("an event");
        assert!(
            matches!(event, AsyncEvent::QpFatal { qp_num, .. } if qp_num == num),
            "{event:?}"
        );
    }
    assert_eq!(device.get_async_event(Some(Duration::ZERO)), None);
}

/// A queue can call the program instead of raising an event: once for each arming.
pub fn notified_by_a_call(bed: &Bed) {
    let (tell, told) = std::sync::mpsc::channel();
    let notified = bed.b.create_cq_notify(64, move || tell.send(()).unwrap());
    let rcq = notified.unwrap();
    let half = Half {
        cqs: Some((bed.b.create_cq(64, None).unwrap(), rcq.clone())),
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&Half::default(), &half);
    for round in 0..5 {
        b.post_recv(RecvWr::new(1));
        b.post_recv(RecvWr::new(2));
        if round > 0 {
            rcq.req_notify(false);
        }
        a.run(SendWr::send(1));
        a.run(SendWr::send(2));
        if round > 0 {
            told.recv_timeout(PATIENCE).expect("a call");
        }
        take(&rcq, 2);
        assert!(told.try_recv().is_err(), "one call a request");
    }
}
