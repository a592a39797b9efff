//! librdmacm's calls when the InfiniBand persona is the first device: its terms, its limits, and queue pairs that programs move themselves.
#![cfg(feature = "verbs")]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says, or checked for refusing what is not
#![allow(clippy::cast_possible_wrap)]

mod cm;

use std::sync::Once;
use std::time::{Duration, Instant};

use cm::{
    Channel, Id, LONG, Own, Param, completion, loopback, padded, post_recv, post_send, refused,
};
use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::cm::*;
use weft_abi::verbs::types::*;

/// Two channels; the persona is the device of this process.
fn channels() -> (Channel, Channel) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| unsafe { std::env::set_var("WEFT_DEVICES", "weft_ib0") });
    (Channel::new(), Channel::new())
}

/// Only a wait can show that something does not arrive.
const A_WHILE: Duration = Duration::from_millis(100);

#[test]
fn rejections_carry_the_reasons_of_infiniband() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let id = client.connecting(listener.port(), b"?");
    let asked = server.request();
    assert_eq!(unsafe { rdma_reject(asked.0, b"no".as_ptr().cast(), 2) }, 0);
    let event = client.expect_status(RDMA_CM_EVENT_REJECTED, 28);
    assert_eq!(event.private_data(), padded(b"no", 148));
    event.ack();
    asked.destroy();
    id.end();
    // No listener.
    let id = client.connecting(cm::closed_port(), b"?");
    let event = client.expect_status(RDMA_CM_EVENT_REJECTED, 8);
    assert_eq!(event.private_data(), [0; 148]);
    event.ack();
    id.end();
    listener.destroy();
}

/// What a queue pair shows of its connection: Reads that it accepts, and has outstanding, and the retries.
fn shown(id: &Id) -> (u8, u8, u8, u8) {
    let attr = cm::query(unsafe { (*id.0).qp });
    let depths = (attr.max_dest_rd_atomic, attr.max_rd_atomic);
    (depths.0, depths.1, attr.retry_cnt, attr.rnr_retry)
}

#[test]
fn depths_and_retries_are_the_programs() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    for (accepts, has) in [(5, 4), (0, 0)] {
        for by_number in [false, true] {
            let mut asks = Param::new(b"asks").depths(accepts, has);
            (asks.retry, asks.rnr_retry) = (6, 3);
            let id = client.routed(listener.port());
            let own = by_number.then(|| Own::new(&id));
            match &own {
                Some(own) => asks.qp_num = own.num(),
                None => id.create_qp(),
            }
            id.connect(&asks).unwrap();
            let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
            assert_eq!((event.depths(), event.retries()), ((has, accepts), (6, 3)));
            assert_eq!(event.private_data(), padded(b"asks", 56));
            let accepted = event.id();
            event.ack();
            if let Some(own) = own {
                accepted.destroy();
                client.expect_status(RDMA_CM_EVENT_REJECTED, 28).ack();
                own.destroy();
                id.destroy();
                continue;
            }
            accepted.create_qp();
            let mut says = Param::new(b"says").depths(has, accepts);
            says.rnr_retry = 2;
            accepted.accept(&says).unwrap();
            server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
            let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
            assert_eq!((event.depths(), event.retries()), ((accepts, has), (0, 2)));
            assert_eq!(event.private_data(), padded(b"says", 196));
            event.ack();
            assert_eq!(shown(&id), (accepts, has, 6, 3));
            assert_eq!(shown(&accepted), (has, accepts, 6, 3));
            cm::Pair { id, accepted }.destroy();
        }
    }
    listener.destroy();
}

/// As the kernel's connection manager: once both sides have disconnected, and later.
#[test]
fn a_connection_leaves_its_time_wait_after_both_sides_disconnected() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let pair = cm::connected(&server, &listener, &client);
    pair.id.disconnect().unwrap();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    client.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT).ack();
    // This side has not disconnected.
    assert!(!server.readable());
    pair.accepted.disconnect().unwrap();
    let event = server.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    assert_eq!(event.id_ptr(), pair.accepted.0);
    event.ack();
    pair.destroy();
    listener.destroy();
}

#[test]
fn private_data_is_as_long_as_infiniband_s() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    id.create_qp();
    assert_eq!(id.connect(&Param::new(&[7; 57])), Err(libc::EINVAL));
    id.connect(&Param::new(&[7; 56])).unwrap();
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), [7; 56]);
    let accepted = event.id();
    event.ack();
    accepted.create_qp();
    assert_eq!(accepted.accept(&Param::new(&[8; 197])), Err(libc::EINVAL));
    refused(unsafe { rdma_reject(accepted.0, [0_u8; 149].as_ptr().cast(), 149) });
    accepted.accept(&Param::new(&[8; 196])).unwrap();
    let event = server.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert!(event.private_data().is_empty());
    event.ack();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(event.private_data(), [8; 196]);
    event.ack();
    cm::Pair { id, accepted }.destroy();
    listener.destroy();
}

#[test]
fn receives_stay_posted_until_the_program_disconnects_too() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let pair = cm::connected(&server, &listener, &client);
    let (qp, cq) = unsafe { ((*pair.accepted.0).qp, (*pair.accepted.0).recv_cq) };
    post_recv(&pair.accepted, qp, 17);
    pair.id.disconnect().unwrap();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    assert!(completion(&pair.accepted, cq, A_WHILE).is_none());
    pair.accepted.disconnect().unwrap();
    let wc = completion(&pair.accepted, cq, LONG).expect("it is flushed");
    assert_eq!((wc.wr_id, wc.status), (17, IBV_WC_WR_FLUSH_ERR));
    pair.destroy();
    listener.destroy();
}

/// `rdma_accept` sets the peer's retries.
#[test]
fn messages_wait_for_their_receive_as_often_as_the_receiver_says() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    for retry in [0, 7] {
        let mut says = Param::new(b"");
        says.rnr_retry = retry;
        let to = loopback(listener.port());
        let pair = cm::connected_with(&server, to, &client, &says);
        let of = |id: &Id| unsafe { ((*id.0).qp, (*id.0).send_cq, (*id.0).recv_cq) };
        let (near, far) = (of(&pair.id), of(&pair.accepted));
        let start = Instant::now();
        assert_eq!(post_send(&pair.id, near.0, 1), 0);
        if retry == 7 {
            let patience = Duration::from_millis(900);
            assert!(completion(&pair.id, near.1, patience).is_none());
            post_recv(&pair.accepted, far.0, 2);
            let got = completion(&pair.accepted, far.2, LONG).unwrap();
            assert_eq!((got.wr_id, got.status), (2, IBV_WC_SUCCESS));
        }
        let sent = completion(&pair.id, near.1, LONG).expect("an end of it");
        let status = if retry == 7 {
            IBV_WC_SUCCESS
        } else {
            IBV_WC_RNR_RETRY_EXC_ERR
        };
        assert_eq!((sent.wr_id, sent.status), (1, status));
        assert!(start.elapsed() >= Duration::from_micros(655_360));
        if retry == 0 {
            cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
        }
        pair.destroy();
    }
    listener.destroy();
}

#[test]
fn programs_move_their_queue_pairs_themselves() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    let path = unsafe { *(*id.0).route.path_rec };
    assert_eq!(unsafe { (*id.0).route.num_paths }, 1);
    assert_eq!(
        unsafe { path.dgid.raw },
        std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets()
    );
    let near = Own::new(&id);
    // There is no transition before the peer is known.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_RTR;
    refused(unsafe { rdma_init_qp_attr(id.0, &raw mut attr, &mut 0) });
    assert_eq!(id.connect(&near.param(&[1; 57])), Err(libc::EINVAL));
    id.connect(&near.param(b"moved by hand")).unwrap();

    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), padded(b"moved by hand", 56));
    assert_eq!(event.qp_num(), near.num());
    let accepted = event.id();
    event.ack();
    let far = Own::new(&accepted);
    post_recv(&accepted, far.qp, 1);
    far.to(&accepted, IBV_QPS_RTR);
    far.to(&accepted, IBV_QPS_RTS);
    accepted.accept(&far.param(b"this one too")).unwrap();

    let event = client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    assert_eq!(event.private_data(), padded(b"this one too", 196));
    assert_eq!(event.qp_num(), far.num());
    event.ack();
    near.to(&id, IBV_QPS_RTR);
    near.to(&id, IBV_QPS_RTS);
    // The responder gets its event when the initiator establishes the connection.
    assert!(!server.readable());
    assert_eq!(unsafe { rdma_establish(id.0) }, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();

    assert_eq!(post_send(&id, near.qp, 2), 0);
    let sent = completion(&id, near.cq, LONG).unwrap();
    assert_eq!((sent.wr_id, sent.status), (2, IBV_WC_SUCCESS));
    let got = completion(&accepted, far.cq, LONG).unwrap();
    assert_eq!((got.wr_id, got.status), (1, IBV_WC_SUCCESS));

    accepted.disconnect().unwrap();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    for (id, own) in [(id, near), (accepted, far)] {
        own.destroy();
        id.destroy();
    }
    listener.destroy();
}

#[test]
fn a_responder_that_knows_by_other_means_says_so() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    let near = Own::new(&id);
    id.connect(&near.param(b"")).unwrap();
    let accepted = server.request();
    let far = Own::new(&accepted);
    accepted.accept(&far.param(b"")).unwrap();
    client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE).ack();
    assert_eq!(unsafe { rdma_notify(accepted.0, IBV_EVENT_COMM_EST) }, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    // The initiator's message is then no new event.
    assert_eq!(unsafe { rdma_establish(id.0) }, 0);
    id.destroy();
    server.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
    accepted.destroy();
    near.destroy();
    far.destroy();
    listener.destroy();
}

#[test]
fn one_side_may_leave_its_queue_pair_to_the_library() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    let near = Own::new(&id);
    post_recv(&id, near.qp, 5);
    id.connect(&near.param(b"")).unwrap();
    let accepted = server.request();
    accepted.accept_with_qp();
    let event = client.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    let qp = unsafe { (*accepted.0).qp };
    assert_eq!(event.qp_num(), unsafe { (*qp).qp_num });
    event.ack();
    near.to(&id, IBV_QPS_RTR);
    near.to(&id, IBV_QPS_RTS);
    assert_eq!(unsafe { rdma_establish(id.0) }, 0);
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    assert_eq!(post_send(&accepted, qp, 6), 0);
    let got = completion(&id, near.cq, LONG).unwrap();
    assert_eq!((got.wr_id, got.status), (5, IBV_WC_SUCCESS));
    near.destroy();
    id.destroy();
    server.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
    accepted.end();

    let id = client.connecting(listener.port(), b"");
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    let peer = event.qp_num();
    let accepted = event.id();
    event.ack();
    let far = Own::new(&accepted);
    if std::env::var_os("WEFT_IB_WIRE").is_some_and(|wire| wire == "roce") {
        // The other direction: every request of RoCE names its queue pair.
        assert_eq!(peer, unsafe { (*(*id.0).qp).qp_num });
        post_recv(&accepted, far.qp, 7);
        far.to(&accepted, IBV_QPS_RTR);
        far.to(&accepted, IBV_QPS_RTS);
        accepted.accept(&far.param(b"")).unwrap();
        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        assert_eq!(post_send(&id, unsafe { (*id.0).qp }, 8), 0);
        let got = completion(&accepted, far.cq, LONG).unwrap();
        assert_eq!((got.wr_id, got.status), (7, IBV_WC_SUCCESS));
        id.disconnect().unwrap();
        cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
        accepted.destroy();
    } else {
        // The request belongs to a queue pair, and no carrier can answer it.
        assert_eq!(peer, 0);
        assert_eq!(accepted.accept(&far.param(b"")), Err(libc::EINVAL));
        accepted.destroy();
        client.expect_status(RDMA_CM_EVENT_REJECTED, 28).ack();
    }
    far.destroy();
    id.end();
    listener.destroy();
}

/// Programs see no difference on the other wires.
#[test]
fn queue_pairs_that_programs_move_take_the_wire_that_is_asked_for() {
    if std::env::var_os("WEFT_IB_WIRE").is_some() {
        return;
    }
    for wire in ["roce", "auto"] {
        for test in [
            "programs_move_their_queue_pairs_themselves",
            "a_responder_that_knows_by_other_means_says_so",
            "one_side_may_leave_its_queue_pair_to_the_library",
        ] {
            let own = std::env::current_exe().unwrap();
            let mut again = std::process::Command::new(own);
            again.args(["--exact", test]).env("WEFT_IB_WIRE", wire);
            let done = again.output().unwrap();
            let text = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success(), "{wire}: {text}");
            assert!(text.contains("1 passed"), "{wire}: {text}");
        }
    }
}
