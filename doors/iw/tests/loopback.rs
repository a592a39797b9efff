//! The library over the TCP device on the loopback interface.

use std::thread;
use std::time::{Duration, Instant};

use weft_iw::{
    Access, Context, CqType, Error, Flags, Listener, Rmr, State, Wc, WcOpcode, WcStatus,
};
use weft_verbs::RemoteAddr;

const ALL: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

/// Runs an initiator against a responder whose context has come to `CONN_REQ`.
fn pair<I: Send, R: Send>(
    initiator: impl FnOnce(Context) -> I + Send,
    responder: impl FnOnce(Context) -> R + Send,
) -> (I, R) {
    let listener = Listener::open("[::1]:0")
        .or_else(|_| Listener::open("127.0.0.1:0"))
        .unwrap();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let responder = scope.spawn(move || responder(listener.listen().unwrap()));
        let ctx = Context::alloc(addr).unwrap();
        (initiator(ctx), responder.join().unwrap())
    })
}

#[test]
fn states_follow_the_diagram() {
    pair(
        |mut ctx| {
            assert_eq!(ctx.state(), State::Valid);
            assert!(matches!(
                ctx.accept(),
                Err(Error::State {
                    needs: State::ConnReq,
                    is: State::Valid,
                    ..
                })
            ));
            ctx.connect().unwrap();
            assert_eq!(ctx.state(), State::Connected);
            assert!(matches!(
                ctx.connect(),
                Err(Error::State {
                    needs: State::Valid,
                    ..
                })
            ));
            let bye = ctx.lmr_create(1, Access::LOCAL_WRITE).unwrap();
            ctx.post_send_lmr(&bye, 0, 1, Flags::empty()).unwrap();
            let wait = ctx.await_completions(CqType::Recv, &mut [Wc::default()]);
            assert!(matches!(wait, Err(Error::Ended)), "{wait:?}");
            assert_eq!(ctx.state(), State::Invalid);
            ctx.await_disconnect().unwrap();
        },
        |mut ctx| {
            assert_eq!(ctx.state(), State::ConnReq);
            assert!(matches!(ctx.connect(), Err(Error::State { .. })));
            let bye = ctx.lmr_create(1, Access::LOCAL_WRITE).unwrap();
            ctx.post_recv_lmr(&bye, 0, 1).unwrap();
            ctx.accept().unwrap();
            assert_eq!(ctx.state(), State::Connected);
            ctx.await_completions(CqType::Recv, &mut [Wc::default()])
                .unwrap();
            ctx.disconnect().unwrap();
        },
    );
}

#[test]
fn a_rejected_initiator_learns_why() {
    let (error, ()) = pair(
        |mut ctx| {
            let error = ctx.connect().unwrap_err();
            assert_eq!(ctx.state(), State::Invalid);
            error
        },
        |ctx| ctx.reject(b"not today").unwrap(),
    );
    let Error::Connect(weft_verbs::cm::ConnectError::Rejected { private_data }) = error else {
        panic!("{error}")
    };
    assert_eq!(private_data, b"not today");
}

#[test]
fn nobody_listening_is_refused() {
    let addr = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut ctx = Context::alloc(addr).unwrap();
    assert!(matches!(ctx.connect(), Err(Error::Connect(_))));
    assert!(matches!(
        Context::alloc("nobody.invalid:1"),
        Err(Error::Address { .. })
    ));
}

#[test]
fn advertisements_and_messages_keep_their_kinds_apart() {
    pair(
        |mut ctx| {
            let inbox = ctx.lmr_create(64, Access::LOCAL_WRITE).unwrap();
            ctx.post_recv_adv().unwrap();
            ctx.post_recv_lmr(&inbox, 0, 8).unwrap();
            ctx.post_recv_adv().unwrap();
            let last = ctx.post_recv_lmr(&inbox, 8, 8).unwrap();
            ctx.connect().unwrap();
            // The messages are asked for first, though an advertisement came before them.
            let mut wcs = [Wc::default(); 2];
            ctx.await_completions(CqType::Recv, &mut wcs).unwrap();
            assert_eq!((wcs[0].byte_len, wcs[1].byte_len), (3, 5));
            assert_eq!(wcs[1].wr_id, last);
            assert_eq!(inbox.to_vec(0, 16).unwrap(), b"one\0\0\0\0\0three\0\0\0");
            let (a, b) = (ctx.wait_recv_adv().unwrap(), ctx.wait_recv_adv().unwrap());
            assert_eq!((a.len(), b.len()), (100, 200));
            ctx.await_disconnect().unwrap();
        },
        |mut ctx| {
            let (a, b) = (
                ctx.lmr_create(100, ALL).unwrap(),
                ctx.lmr_create(200, ALL).unwrap(),
            );
            let text = ctx
                .lmr_register(b"onethree".to_vec(), Access::LOCAL_WRITE)
                .unwrap();
            ctx.accept().unwrap();
            ctx.post_send_adv(&a).unwrap();
            ctx.post_send_lmr(&text, 0, 3, Flags::empty()).unwrap();
            ctx.post_send_adv(&b).unwrap();
            ctx.post_send_lmr(&text, 3, 5, Flags::SIGNALED | Flags::SOLICITED)
                .unwrap();
            ctx.await_completions(CqType::Send, &mut [Wc::default()])
                .unwrap();
            ctx.disconnect().unwrap();
        },
    );
}

#[test]
fn ranges_are_gathered_and_scattered() {
    pair(
        |mut ctx| {
            ctx.post_recv_adv().unwrap();
            ctx.connect().unwrap();
            let a = ctx
                .lmr_register(b"..weft..".to_vec(), Access::LOCAL_WRITE)
                .unwrap();
            let b = ctx
                .lmr_register(b"-and-warp-".to_vec(), Access::LOCAL_WRITE)
                .unwrap();
            let rmr = ctx.wait_recv_adv().unwrap();
            let gathered = [
                a.sge(2, 4).unwrap(),
                b.sge(0, 5).unwrap(),
                b.sge(5, 4).unwrap(),
            ];
            ctx.post_write_sgl(&gathered, &rmr, 10, Flags::empty())
                .unwrap();
            let to = ctx.lmr_create(32, Access::LOCAL_WRITE).unwrap();
            let scattered = [to.sge(20, 6).unwrap(), to.sge(0, 7).unwrap()];
            let id = ctx
                .post_read_sgl(&scattered, &rmr, 10, Flags::SIGNALED)
                .unwrap();
            let mut wc = [Wc::default()];
            ctx.await_completions(CqType::Send, &mut wc).unwrap();
            assert_eq!((wc[0].wr_id, wc[0].opcode), (id, WcOpcode::Read));
            assert_eq!(to.to_vec(20, 6).unwrap(), b"weft-a");
            assert_eq!(to.to_vec(0, 7).unwrap(), b"nd-warp");
            ctx.post_send_sgl(&gathered[..2], Flags::SIGNALED | Flags::FENCE)
                .unwrap();
            ctx.await_completions(CqType::Send, &mut wc).unwrap();
            assert_eq!(ctx.poll_completions(CqType::Send, &mut wc).unwrap(), 0);
            assert_eq!(a.deregister().unwrap().unwrap(), b"..weft..");
            ctx.await_disconnect().unwrap();
        },
        |mut ctx| {
            let data = ctx.lmr_create(32, ALL).unwrap();
            let inbox = ctx.lmr_create(32, Access::LOCAL_WRITE).unwrap();
            ctx.post_recv_sgl(&[inbox.sge(16, 2).unwrap(), inbox.sge(0, 16).unwrap()])
                .unwrap();
            ctx.accept().unwrap();
            ctx.post_send_adv(&data).unwrap();
            let mut wc = [Wc::default()];
            ctx.await_completions(CqType::Recv, &mut wc).unwrap();
            assert_eq!(wc[0].byte_len, 9);
            assert_eq!(inbox.to_vec(16, 2).unwrap(), b"we");
            assert_eq!(inbox.to_vec(0, 7).unwrap(), b"ft-and-");
            ctx.disconnect().unwrap();
        },
    );
}

#[test]
fn wrong_ranges_are_refused_here_and_wrong_keys_there() {
    pair(
        |mut ctx| {
            ctx.post_recv_adv().unwrap();
            ctx.connect().unwrap();
            let src = ctx.lmr_create(64, Access::LOCAL_WRITE).unwrap();
            let rmr = ctx.wait_recv_adv().unwrap();
            assert!(matches!(
                ctx.post_write_lmr(&src, 0, &rmr, 1, 64, Flags::empty()),
                Err(Error::Range { .. })
            ));
            assert!(matches!(
                ctx.post_write_lmr(&src, 1, &rmr, 0, 64, Flags::empty()),
                Err(Error::Range { .. })
            ));
            assert!(matches!(src.sge(usize::MAX, 2), Err(Error::Range { .. })));
            for _ in 0..16 {
                ctx.post_recv_adv().unwrap();
            }
            assert!(ctx.post_recv_adv().is_err(), "sixteen at once");

            let invented = Rmr::new(
                RemoteAddr {
                    addr: 0,
                    rkey: 0x1234_5678,
                },
                64,
            );
            ctx.post_read_lmr(&src, 0, &invented, 0, 64, Flags::SIGNALED)
                .unwrap();
            let failed = ctx.await_completions(CqType::Send, &mut [Wc::default()]);
            let Err(Error::Completion(wc)) = failed else {
                panic!("{failed:?}")
            };
            assert_ne!(wc.status, WcStatus::Success);
            assert!(
                matches!(ctx.wait_recv_adv(), Err(Error::Completion(_))),
                "flushed"
            );
        },
        |mut ctx| {
            let data = ctx.lmr_create(64, ALL).unwrap();
            ctx.accept().unwrap();
            ctx.post_send_adv(&data).unwrap();
            ctx.await_disconnect().unwrap();
        },
    );
}

/// The length of an element has 32 bits. The pages of the region are never touched.
#[test]
fn an_element_has_less_than_four_gib() {
    let listener = Listener::open("127.0.0.1:0").unwrap();
    let ctx = Context::alloc(listener.local_addr()).unwrap();
    let lmr = ctx.lmr_create(1 << 32, Access::LOCAL_WRITE).unwrap();
    assert!(matches!(
        lmr.sge(0, 1 << 32),
        Err(Error::Range {
            len: 0x1_0000_0000,
            region: 0xffff_ffff,
            ..
        })
    ));
    assert_eq!(lmr.sge(1, (1 << 32) - 1).unwrap().len, u32::MAX);
}

#[test]
fn a_message_where_an_advertisement_should_be_is_told() {
    pair(
        |mut ctx| {
            ctx.post_recv_adv().unwrap();
            ctx.connect().unwrap();
            assert!(matches!(
                ctx.wait_recv_adv(),
                Err(Error::NotAnAdvertisement(3))
            ));
            ctx.await_disconnect().unwrap();
        },
        |mut ctx| {
            let text = ctx.lmr_create(3, Access::LOCAL_WRITE).unwrap();
            ctx.accept().unwrap();
            ctx.post_send_lmr(&text, 0, 3, Flags::empty()).unwrap();
            ctx.disconnect().unwrap();
        },
    );
}

/// Neither takes what the other waits for, or sleeps while it is there: each round ends at once, not after the time of a wait.
#[test]
fn two_threads_wait_for_messages_and_for_advertisements() {
    const ROUNDS: usize = 16;
    let begun = Instant::now();
    pair(
        |mut ctx| {
            let (text, inbox) = (
                ctx.lmr_create(8, ALL).unwrap(),
                ctx.lmr_create(8, ALL).unwrap(),
            );
            for _ in 0..2 * ROUNDS {
                ctx.post_recv_lmr(&inbox, 0, 8).unwrap();
            }
            ctx.connect().unwrap();
            for round in 0..ROUNDS {
                ctx.post_send_lmr(&text, 0, 1 + round % 8, Flags::empty())
                    .unwrap();
                ctx.await_completions(CqType::Recv, &mut [Wc::default()])
                    .unwrap();
                ctx.post_send_adv(&text).unwrap();
                ctx.await_completions(CqType::Recv, &mut [Wc::default()])
                    .unwrap();
            }
            ctx.disconnect().unwrap();
        },
        |mut ctx| {
            let inbox = ctx.lmr_create(8, ALL).unwrap();
            for _ in 0..ROUNDS {
                ctx.post_recv_lmr(&inbox, 0, 8).unwrap();
                ctx.post_recv_adv().unwrap();
            }
            ctx.accept().unwrap();
            let answer = || ctx.post_send_lmr(&inbox, 0, 1, Flags::empty()).unwrap();
            thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        assert_eq!(ctx.wait_recv_adv().unwrap().len(), 8);
                        answer();
                    }
                    assert!(matches!(ctx.wait_recv_adv(), Err(Error::Ended)));
                });
                let mut wc = [Wc::default()];
                for round in 0..ROUNDS {
                    ctx.await_completions(CqType::Recv, &mut wc).unwrap();
                    assert_eq!(wc[0].byte_len as usize, 1 + round % 8);
                    answer();
                }
                let end = ctx.await_completions(CqType::Recv, &mut wc);
                assert!(matches!(end, Err(Error::Ended)), "{end:?}");
            });
            ctx.await_disconnect().unwrap();
        },
    );
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?}");
}
