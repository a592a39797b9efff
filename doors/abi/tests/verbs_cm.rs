//! librdmacm's calls, as a C program makes them: cases that the programs of rdmacm-utils do not try. Both sides are in this process.
#![cfg(feature = "verbs")]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says, or checked for refusing what is not
#![allow(clippy::cast_possible_wrap)]

use crate::cm;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::cm::{
    Channel, Event, Id, LONG, Own, Param, completion, errno, failed, loopback, post_recv,
    post_send, qp_attr, refused, sockaddr, worked,
};
use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::cm::*;
use weft_abi::verbs::types::*;

#[test]
fn private_data_and_depths_travel_both_ways() {
    let server = Channel::new();
    let listener = server.listen("127.0.0.1:0");
    let client = Channel::new();
    let id = client.routed(listener.port());
    assert_ne!(id.src_port(), 0);
    assert_eq!(id.dst_port(), listener.port());
    id.create_qp();
    id.connect(&Param::new(b"from the initiator").depths(3, 5))
        .unwrap();

    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.listen_id(), listener.0);
    assert_eq!(event.private_data(), b"from the initiator");
    // The peer's outstanding number is the number that we are to accept, and the reverse.
    assert_eq!(event.depths(), (5, 3));
    let accepted = event.id();
    event.ack();
    assert_eq!(accepted.src_port(), listener.port());
    assert_eq!(accepted.dst_port(), id.src_port());
    assert_eq!(accepted.context(), listener.context());
    accepted.create_qp();
    accepted
        .accept(&Param::new(b"from the responder").depths(5, 2))
        .unwrap();
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(event.private_data(), b"from the responder");
    // The negotiated depths: the responder accepts as many as we have.
    assert_eq!(event.depths(), (3, 5));
    event.ack();

    id.disconnect().unwrap();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    // The program disconnects after the peer's end, or twice.
    accepted.disconnect().unwrap();
    id.disconnect().unwrap();
    for id in [id, accepted] {
        id.end();
    }
    listener.destroy();
}

#[test]
fn no_private_data_is_none() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    id.create_qp();
    // NULL parameters are valid, too.
    assert_eq!(unsafe { rdma_connect(id.0, null_mut()) }, 0);
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert!(event.private_data().is_empty());
    let accepted = event.id();
    event.ack();
    accepted.create_qp();
    assert_eq!(unsafe { rdma_accept(accepted.0, null_mut()) }, 0);
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert!(event.private_data().is_empty());
    event.ack();
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    // A destroyed queue pair ends its connection, and the identifiers get the event.
    id.destroy_qp();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    accepted.destroy_qp();
    for id in [id, accepted, listener] {
        id.destroy();
    }
}

#[test]
fn a_rejection_says_why() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    let id = client.connecting(listener.port(), b"?");
    let asked = server.request();
    let why = b"not today";
    worked(unsafe { rdma_reject(asked.0, why.as_ptr().cast(), why.len() as u8) });
    let event = client.get();
    assert_eq!(event.kind(), RDMA_CM_EVENT_REJECTED);
    assert_eq!(event.status(), -libc::ECONNREFUSED);
    assert_eq!(event.private_data(), why);
    event.ack();
    // It has been answered.
    refused(unsafe { rdma_reject(asked.0, null(), 0) });
    refused(unsafe { rdma_accept(asked.0, null_mut()) });
    asked.destroy();
    // Destroying is an answer too.
    let second = client.connecting(listener.port(), b"?");
    let asked = server.request();
    asked.destroy();
    let event = client.get();
    assert_eq!(
        (event.kind(), event.status()),
        (RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED)
    );
    event.ack();
    for id in [id, second] {
        id.end();
    }
    listener.destroy();
}

/// `rdma_accept` sets the peer's retries. Without them a message that finds no receive ends the connection, as on RNICs.
#[test]
fn messages_wait_for_their_receive_as_often_as_the_receiver_says() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    for (retry, wait) in [(0, 0), (1, 2 * 655_360)] {
        let mut says = Param::new(b"");
        says.rnr_retry = retry;
        let to = loopback(listener.port());
        let pair = cm::connected_with(&server, to, &client, &says);
        let of = |id: &Id| unsafe { ((*id.0).qp, (*id.0).recv_cq) };
        let (near, far) = (of(&pair.id), of(&pair.accepted));
        let start = Instant::now();
        if retry > 0 {
            assert_eq!(post_send(&pair.id, near.0, 1), 0);
            std::thread::sleep(Duration::from_millis(100));
            post_recv(&pair.accepted, far.0, 2);
            let got = completion(&pair.accepted, far.1, LONG).unwrap();
            assert_eq!((got.wr_id, got.status), (2, IBV_WC_SUCCESS));
        }
        assert_eq!(post_send(&pair.id, near.0, 3), 0);
        cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
        assert!(start.elapsed() >= Duration::from_micros(wait));
        pair.destroy();
    }
    listener.destroy();
}

#[test]
fn queue_pairs_are_found_by_number() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    let id = client.routed(listener.port());
    let near = Own::new(&id);
    assert_eq!(id.connect(&Param::new(b"")), Err(libc::EINVAL), "number 0");
    id.connect(&near.param(b"by number")).unwrap();
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), b"by number");
    let accepted = event.id();
    event.ack();
    let far = Own::new(&accepted);
    accepted.accept(&far.param(b"")).unwrap();
    // The connection manager moves them: there is no response to establish.
    for channel in [&server, &client] {
        channel.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    }
    refused(unsafe { rdma_establish(id.0) });
    for own in [&near, &far] {
        assert_eq!(own.state(), IBV_QPS_RTS);
    }
    far.destroy();
    cm::both_hear([&client, &server], RDMA_CM_EVENT_DISCONNECTED);
    near.destroy();
    for id in [id, accepted, listener] {
        id.destroy();
    }
}

#[test]
fn channels_that_do_not_block_say_so_and_wake_epoll_for_each_event() {
    let channel = Channel::new();
    assert!(!channel.readable());
    channel.nonblocking();
    let mut event = null_mut();
    failed(
        unsafe { rdma_get_cm_event(channel.0, &raw mut event) },
        libc::EAGAIN,
    );
    let epoll = unsafe { libc::epoll_create1(0) };
    let mut interest = libc::epoll_event {
        events: (libc::EPOLLIN | libc::EPOLLET) as u32,
        u64: 0,
    };
    unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, channel.fd(), &raw mut interest) };
    let edges = || {
        let mut got = [libc::epoll_event { events: 0, u64: 0 }; 4];
        unsafe { libc::epoll_wait(epoll, got.as_mut_ptr(), 4, 0) }
    };
    assert_eq!(edges(), 0);
    let ids: Vec<Id> = (0..3)
        .map(|_| {
            let id = channel.create_id();
            id.resolve("127.0.0.1:7471");
            assert_eq!(edges(), 1, "an edge for each event");
            id
        })
        .collect();
    assert_eq!(edges(), 0);
    assert!(channel.readable());
    for id in &ids {
        let event = channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        assert_eq!(event.id_ptr(), id.0);
        event.ack();
    }
    assert!(!channel.readable());
    failed(
        unsafe { rdma_get_cm_event(channel.0, &raw mut event) },
        libc::EAGAIN,
    );
    // Unfetched events are dropped with their identifier.
    ids[0].route();
    assert!(channel.readable());
    for id in ids {
        id.destroy();
    }
    assert!(!channel.readable());
    unsafe { libc::close(epoll) };
}

/// Only a wait can show that a call on another thread has not returned.
const A_WHILE: Duration = Duration::from_millis(100);

#[test]
fn destroying_waits_for_acknowledgements() {
    let channel = Channel::new();
    let id = channel.create_id();
    id.resolve("127.0.0.1:7471");
    let event = channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    let (done, gone) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        id.destroy();
        done.send(()).unwrap();
    });
    assert!(gone.recv_timeout(A_WHILE).is_err(), "it waits");
    let ptr = event.0;
    event.ack();
    gone.recv_timeout(Duration::from_secs(10)).unwrap();
    thread.join().unwrap();
    refused(unsafe { rdma_ack_cm_event(ptr) });
}

#[test]
fn migrating_takes_unseen_events_along_and_waits_for_seen_ones() {
    let (one, two) = (Channel::new(), Channel::new());
    let id = one.create_id();
    id.resolve("127.0.0.1:7471");
    assert!(one.readable());
    assert_eq!(unsafe { rdma_migrate_id(id.0, two.0) }, 0);
    assert!(!one.readable());
    assert_eq!(unsafe { (*id.0).channel }, two.0);
    let event = two.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    let (done, moved) = mpsc::channel();
    let (id, to) = (id.0 as usize, one.0 as usize);
    let thread = std::thread::spawn(move || {
        let result = unsafe { rdma_migrate_id(id as *mut _, to as *mut _) };
        done.send(result).unwrap();
    });
    assert!(moved.recv_timeout(A_WHILE).is_err(), "it waits");
    event.ack();
    assert_eq!(moved.recv_timeout(Duration::from_secs(10)), Ok(0));
    thread.join().unwrap();
    let id = Id(id as *mut _);
    id.route();
    one.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).ack();
    // To calls that block, and back.
    assert_eq!(unsafe { rdma_migrate_id(id.0, null_mut()) }, 0);
    assert_ne!(unsafe { (*id.0).channel }, one.0);
    assert_eq!(unsafe { rdma_migrate_id(id.0, one.0) }, 0);
    assert_eq!(unsafe { (*id.0).channel }, one.0);
    id.destroy();
}

#[test]
fn requests_that_nobody_fetches_end_with_their_listener() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    let ids: Vec<Id> = (0..3)
        .map(|_| client.connecting(listener.port(), b"knock"))
        .collect();
    // All three have arrived, one is fetched.
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    let mut asked = vec![event.id()];
    event.ack();
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    asked.push(event.id());
    event.ack();
    server.wait();
    listener.destroy();
    assert!(!server.readable());
    let event = client.expect_status(RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED);
    event.ack();
    // Fetched requests outlive their listener.
    for asked in &asked {
        asked.accept_with_qp();
        server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    }
    for id in ids.into_iter().chain(asked) {
        id.end();
    }
}

#[test]
fn calls_in_the_wrong_state_are_refused() {
    let channel = Channel::new();
    let id = channel.create_id();
    let mut param = Param::new(b"").raw();
    let mut attr = qp_attr(null_mut());
    unsafe {
        refused(rdma_resolve_route(id.0, 1000));
        refused(rdma_connect(id.0, &raw mut param));
        refused(rdma_accept(id.0, &raw mut param));
        refused(rdma_reject(id.0, null(), 0));
        refused(rdma_disconnect(id.0));
        refused(rdma_establish(id.0));
        refused(rdma_notify(id.0, IBV_EVENT_COMM_EST));
        refused(rdma_create_qp(id.0, null_mut(), &raw mut attr));
        refused(rdma_get_request(id.0, &mut null_mut()));
        rdma_destroy_qp(id.0);
        rdma_destroy_srq(id.0);
    }
    id.resolve("127.0.0.1:7471");
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    unsafe {
        refused(rdma_listen(id.0, 1));
        refused(rdma_connect(id.0, &raw mut param));
        refused(rdma_create_qp(id.0, null_mut(), null_mut()));
    }
    assert_eq!(id.bind("127.0.0.1:0"), Err(libc::EINVAL));
    id.create_qp();
    unsafe { refused(rdma_create_qp(id.0, null_mut(), &raw mut attr)) };
    id.route();
    channel.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).ack();
    unsafe { refused(rdma_resolve_route(id.0, 1000)) };
    // Depths beyond the device's limits.
    param.initiator_depth = 200;
    unsafe { refused(rdma_connect(id.0, &raw mut param)) };
    param.initiator_depth = 1;
    param.private_data = null();
    param.private_data_len = 3;
    unsafe { refused(rdma_connect(id.0, &raw mut param)) };
    id.end();
}

#[test]
fn what_is_no_identifier_is_refused() {
    let channel = Channel::new();
    let id = channel.create_id();
    let freed = id.0;
    id.destroy();
    let mut other = [0_u64; 64];
    for bad in [
        null_mut(),
        freed,
        other.as_mut_ptr().cast(),
        channel.0.cast(),
    ] {
        let mut param = Param::new(b"").raw();
        let mut addr = sockaddr("127.0.0.1:1");
        let mut attr = qp_attr(null_mut());
        unsafe {
            refused(rdma_destroy_id(bad));
            refused(rdma_bind_addr(bad, addr.ptr()));
            refused(rdma_resolve_addr(bad, null_mut(), addr.ptr(), 1));
            refused(rdma_resolve_route(bad, 1));
            refused(rdma_connect(bad, &raw mut param));
            refused(rdma_accept(bad, &raw mut param));
            refused(rdma_reject(bad, null(), 0));
            refused(rdma_reject_ece(bad, null(), 0));
            refused(rdma_listen(bad, 1));
            refused(rdma_disconnect(bad));
            refused(rdma_establish(bad));
            refused(rdma_notify(bad, IBV_EVENT_COMM_EST));
            refused(rdma_migrate_id(bad, channel.0));
            refused(rdma_create_qp(bad, null_mut(), &raw mut attr));
            refused(rdma_get_request(bad, &mut null_mut()));
            refused(rdma_join_multicast(bad, addr.ptr(), null_mut()));
            refused(rdma_leave_multicast(bad, addr.ptr()));
            refused(rdma_set_option(bad, 0, 0, null_mut(), 0));
            assert_eq!(rdma_get_src_port(bad), 0);
            assert_eq!(rdma_get_dst_port(bad), 0);
            rdma_destroy_qp(bad);
            rdma_destroy_srq(bad);
            rdma_destroy_ep(bad);
            refused(rdma_ack_cm_event(bad.cast()));
            rdma_freeaddrinfo(bad.cast());
            if bad != channel.0.cast() {
                refused(rdma_get_cm_event(bad.cast(), &mut null_mut()));
                rdma_destroy_event_channel(bad.cast());
                // Without a channel calls block.
                if !bad.is_null() {
                    let mut made = null_mut();
                    refused(rdma_create_id(
                        bad.cast(),
                        &raw mut made,
                        null_mut(),
                        RDMA_PS_TCP,
                    ));
                }
            }
        }
    }
    unsafe {
        failed(
            rdma_create_id(channel.0, &mut null_mut(), null_mut(), 77),
            libc::EPROTONOSUPPORT,
        );
        refused(rdma_get_cm_event(channel.0, null_mut()));
    }
}

#[test]
fn a_destroyed_channel_gives_no_events_and_takes_none() {
    let channel = Channel::new();
    let id = channel.create_id();
    let (fd, ptr) = (channel.fd(), channel.0);
    drop(channel);
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, -1);
    let begun = Instant::now();
    refused(unsafe { rdma_get_cm_event(ptr, &mut null_mut()) });
    // Late enough for a program that is about to exit.
    assert!(begun.elapsed() >= Duration::from_millis(300));
    id.resolve("127.0.0.1:7471");
    id.destroy();
}

#[test]
fn end_points_block_until_they_are_connected() {
    let listener = cm::end_point(RDMA_PS_TCP, 0, RAI_PASSIVE);
    assert_eq!(unsafe { rdma_listen(listener.0, 0) }, 0);
    let port = listener.port();
    let client = std::thread::spawn(move || {
        let id = cm::end_point(RDMA_PS_TCP, port, 0);
        id.connect(&Param::new(b"sync")).unwrap();
        assert_eq!(unsafe { (*(*id.0).event).event }, RDMA_CM_EVENT_ESTABLISHED);
        id.disconnect().unwrap();
        assert_eq!(
            unsafe { (*(*id.0).event).event },
            RDMA_CM_EVENT_DISCONNECTED
        );
        unsafe { rdma_destroy_ep(id.0) };
        // The second is rejected.
        let refused = cm::sync_routed(port);
        refused.create_qp();
        assert_eq!(refused.connect(&Param::new(b"")), Err(libc::ECONNREFUSED));
        refused.end();
    });
    let mut id = null_mut();
    assert_eq!(unsafe { rdma_get_request(listener.0, &raw mut id) }, 0);
    let id = Id(id);
    assert!(
        unsafe { !(*id.0).qp.is_null() },
        "made of the end point's attributes"
    );
    let event = Event(unsafe { (*id.0).event });
    assert_eq!(event.private_data(), b"sync");
    id.accept(&Param::new(b"")).unwrap();
    // The peer has disconnected or will; this identifier gets that event.
    id.disconnect().unwrap();
    assert_eq!(
        unsafe { (*(*id.0).event).event },
        RDMA_CM_EVENT_DISCONNECTED
    );
    unsafe { rdma_destroy_ep(id.0) };
    let mut second = null_mut();
    assert_eq!(unsafe { rdma_get_request(listener.0, &raw mut second) }, 0);
    assert_eq!(unsafe { rdma_reject(second, null(), 0) }, 0);
    unsafe { rdma_destroy_ep(second) };
    client.join().unwrap();
    unsafe { rdma_destroy_ep(listener.0) };
}

#[test]
fn options_are_checked() {
    let channel = Channel::new();
    let id = channel.create_id();
    id.set_int(RDMA_OPTION_ID_AFONLY, 1).unwrap();
    let mut byte = 0x20_u8;
    let at = (&raw mut byte).cast::<c_void>();
    let (tos, ack) = (
        RDMA_OPTION_ID_TOS as c_int,
        RDMA_OPTION_ID_ACK_TIMEOUT as c_int,
    );
    unsafe {
        assert_eq!(rdma_set_option(id.0, 0, tos, at, 1), 0);
        refused(rdma_set_option(id.0, 0, tos, at, 4));
        refused(rdma_set_option(id.0, 0, tos, null_mut(), 1));
        refused(rdma_set_option(id.0, 0, ack, at, 1));
        at.cast::<u8>().write(14);
        assert_eq!(rdma_set_option(id.0, 0, ack, at, 1), 0);
        failed(rdma_set_option(id.0, 0, 99, at, 1), libc::ENOSYS);
        failed(rdma_set_option(id.0, 1, 1, at, 1), libc::ENOSYS);
    }
    id.destroy();
}

#[test]
fn devices_are_open_and_stay_so() {
    let mut count = 0;
    let list = unsafe { rdma_get_devices(&raw mut count) };
    assert!(!list.is_null() && count > 0);
    let first = unsafe { *list };
    assert!(unsafe { (*list.add(count as usize)).is_null() });
    unsafe { rdma_free_devices(list) };
    let channel = Channel::new();
    let id = channel.create_id();
    assert!(unsafe { (*id.0).verbs.is_null() });
    id.resolve("127.0.0.1:7471");
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    unsafe {
        assert_eq!((*id.0).verbs, first);
        assert_eq!((*id.0).port_num, 1);
        assert!(!(*id.0).pd.is_null());
    }
    id.destroy();
}

#[test]
fn identifiers_can_go_at_any_time() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    // While it connects.
    let id = client.connecting(listener.port(), b"soon gone");
    id.end();
    // Connected, with the queue pair still there.
    let pair = cm::connected_after(&server, &listener, &client, 1);
    let qp = unsafe { (*pair.id.0).qp };
    pair.id.destroy();
    server.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
    assert_eq!(unsafe { weft_abi::verbs::ibv_destroy_qp(qp) }, 0);
    pair.accepted.end();
    listener.destroy();
    assert!(!client.readable());
}

#[test]
fn a_hundred_at_once() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = server.listen("127.0.0.1:0");
    let start = Instant::now();
    let ids: Vec<Id> = (0..100).map(|_| client.routed(listener.port())).collect();
    for id in &ids {
        id.create_qp();
        id.connect(&Param::new(&unsafe {
            (*id.0).route.addr.src.src_sin.sin_port.to_ne_bytes()
        }))
        .unwrap();
    }
    let mut accepted = Vec::new();
    let mut established = 0;
    while established < ids.len() {
        let event = server.get();
        match event.kind() {
            RDMA_CM_EVENT_CONNECT_REQUEST => {
                let id = event.id();
                let port = id.dst_port().to_be_bytes();
                assert_eq!(event.private_data(), port, "its own request");
                id.accept_with_qp();
                accepted.push(id);
            }
            RDMA_CM_EVENT_ESTABLISHED => established += 1,
            other => panic!("event {other}"),
        }
        event.ack();
    }
    for _ in &ids {
        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    }
    println!("{:?} for a hundred connections", start.elapsed());
    for id in ids.into_iter().chain(accepted) {
        id.end();
    }
    listener.destroy();
}

#[test]
fn threads_connect_at_the_same_time() {
    let server = Channel::new();
    let listener = server.listen("127.0.0.1:0");
    let port = listener.port();
    // Each has its own channel, and identifiers that block: ends of both kinds go while others come.
    let clients: Vec<_> = (0..4)
        .map(|n| {
            std::thread::spawn(move || {
                let client = Channel::new();
                for _ in 0..10 {
                    let id = if n % 2 == 0 {
                        let id = client.connecting(port, b"");
                        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
                        id
                    } else {
                        let id = cm::sync_routed(port);
                        id.create_qp();
                        id.connect(&Param::new(b"")).unwrap();
                        id
                    };
                    if n < 2 {
                        id.disconnect().unwrap();
                        if n == 0 {
                            client.expect(RDMA_CM_EVENT_DISCONNECTED).ack();
                        }
                    }
                    id.end();
                }
            })
        })
        .collect();
    let mut left = 40;
    while left > 0 {
        let event = server.get();
        let (kind, id) = (event.kind(), event.id());
        event.ack();
        match kind {
            RDMA_CM_EVENT_CONNECT_REQUEST => {
                id.accept_with_qp();
            }
            RDMA_CM_EVENT_ESTABLISHED => {}
            RDMA_CM_EVENT_DISCONNECTED => {
                id.end();
                left -= 1;
            }
            other => panic!("event {other}"),
        }
    }
    for client in clients {
        client.join().unwrap();
    }
    listener.destroy();
}

#[test]
fn a_forked_child_starts_afresh() {
    let channel = Channel::new();
    // A child cannot finish what another thread of the parent was doing for the first and only time, so these calls are made here.
    let first = channel.create_id();
    first.resolve("127.0.0.1:7471");
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    first.destroy();
    let id = channel.create_id();
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The parent's are not the child's; its own work.
        let fine = unsafe {
            let mut afresh = null_mut();
            rdma_destroy_id(id.0) == -1
                && errno() == libc::EINVAL
                && rdma_get_cm_event(channel.0, &mut null_mut()) == -1
                && rdma_create_id(null_mut(), &raw mut afresh, null_mut(), RDMA_PS_TCP) == 0
                && rdma_resolve_addr(afresh, null_mut(), sockaddr("127.0.0.1:1").ptr(), 1000) == 0
                && rdma_destroy_id(afresh) == 0
        };
        unsafe { libc::_exit(c_int::from(!fine)) };
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    id.resolve("127.0.0.1:7471");
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    id.destroy();
}
