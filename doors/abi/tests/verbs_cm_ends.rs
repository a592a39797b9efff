//! The event by which a program of librdmacm learns that its peer has closed, over TCP: also after messages for which it has posted no receive. Both sides are
//! in this process.
#![cfg(feature = "verbs")]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says
#![allow(clippy::cast_possible_wrap)]

mod cm;

use std::ptr::null_mut;
use std::sync::Once;
use std::time::Duration;

use cm::{Channel, Id, LONG, Pair, Param, completion, loopback, post_recv, post_send};
use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::types::*;
use weft_abi::verbs::{ibv_dereg_mr, ibv_reg_mr};

fn channels() -> (Channel, Channel) {
    static ONCE: Once = Once::new();
    // SAFETY: every test begins here, and nothing in this process reads the variable before.
    ONCE.call_once(|| unsafe { std::env::set_var("WEFT_LOCAL", "off") });
    (Channel::new(), Channel::new())
}

/// A connection whose responder lets messages wait for their receives.
fn patient(server: &Channel, listener: &Id, client: &Channel) -> Pair {
    let says = Param::new(b"");
    assert_eq!(says.rnr_retry, 7);
    cm::connected_with(server, loopback(listener.port()), client, &says)
}

fn send(pair: &Pair, number: u64) {
    let (qp, cq) = unsafe { ((*pair.id.0).qp, (*pair.id.0).send_cq) };
    assert_eq!(post_send(&pair.id, qp, number), 0);
    let sent = completion(&pair.id, cq, LONG).expect("TCP takes it");
    assert_eq!((sent.wr_id, sent.status), (number, IBV_WC_SUCCESS));
}

#[test]
fn a_close_is_heard_behind_messages_that_no_receive_is_posted_for() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let pair = patient(&server, &listener, &client);
    for number in 0..3 {
        send(&pair, number);
    }
    pair.id.disconnect().unwrap();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    // Messages from before the end can still be received.
    let (qp, cq) = unsafe { ((*pair.accepted.0).qp, (*pair.accepted.0).recv_cq) };
    post_recv(&pair.accepted, qp, 17);
    let got = completion(&pair.accepted, cq, LONG).expect("the first message");
    assert_eq!((got.wr_id, got.status), (17, IBV_WC_SUCCESS));
    // A program that does not receive them disconnects.
    pair.accepted.disconnect().unwrap();
    let (more, few) = (!server.readable(), Duration::from_millis(50));
    std::thread::sleep(few);
    assert!(more && !server.readable(), "one end is told of once");
    pair.destroy();
    listener.destroy();
}

#[test]
fn messages_that_waited_through_the_close_are_followed_by_the_flush() {
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let pair = patient(&server, &listener, &client);
    send(&pair, 1);
    pair.id.disconnect().unwrap();
    server.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
    let (qp, cq) = unsafe { ((*pair.accepted.0).qp, (*pair.accepted.0).recv_cq) };
    post_recv(&pair.accepted, qp, 1);
    post_recv(&pair.accepted, qp, 2);
    for (number, status) in [(1, IBV_WC_SUCCESS), (2, IBV_WC_WR_FLUSH_ERR)] {
        let got = completion(&pair.accepted, cq, LONG).expect("each receive ends");
        assert_eq!((got.wr_id, got.status), (number, status));
    }
    pair.destroy();
    listener.destroy();
}

/// A little more than a queue pair keeps in addition to the transport (64 MiB, with the overhead of each segment). The last message has two segments: the
/// first is read and finds no room to be kept, so the few bytes of the second, and the end after them, stay in the socket. More bytes could fill the socket's
/// window where memory for TCP is short, and then TCP itself does not deliver the end.
#[test]
fn a_close_is_heard_behind_what_is_not_even_read() {
    const LENGTH: usize = 64 << 10;
    const COUNT: u64 = 1022;
    const LAST: usize = (32 << 10) + 512;
    let (server, client) = channels();
    let listener = server.listen("127.0.0.1:0");
    let pair = patient(&server, &listener, &client);
    let (qp, cq) = unsafe { ((*pair.id.0).qp, (*pair.id.0).send_cq) };
    let mut bytes = vec![7_u8; LENGTH];
    let addr = bytes.as_mut_ptr();
    let mr = unsafe { ibv_reg_mr((*pair.id.0).pd, addr.cast(), LENGTH, 0) };
    assert!(!mr.is_null());
    let post = cm::ops(&pair.id).post_send.unwrap();
    for number in 0..COUNT {
        let mut element: ibv_sge = unsafe { std::mem::zeroed() };
        let length = if number + 1 < COUNT { LENGTH } else { LAST };
        (element.addr, element.length) = (addr as u64, length as u32);
        element.lkey = unsafe { (*mr).lkey };
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        (wr.wr_id, wr.opcode, wr.send_flags) = (number, IBV_WR_SEND, IBV_SEND_SIGNALED);
        (wr.sg_list, wr.num_sge) = (&raw mut element, 1);
        assert_eq!(unsafe { post(qp, &raw mut wr, &mut null_mut()) }, 0);
        let sent = completion(&pair.id, cq, LONG).expect("TCP takes it");
        assert_eq!((sent.wr_id, sent.status), (number, IBV_WC_SUCCESS));
    }
    pair.id.disconnect().unwrap();
    server.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
    pair.accepted.disconnect().unwrap();
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    pair.destroy();
    listener.destroy();
}
