//! Addresses, ports and names of librdmacm, and missing or faulty peers. Both sides are in this process.
#![cfg(feature = "verbs")]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says, or checked for refusing what is not
#![allow(clippy::cast_possible_wrap)]

use crate::cm;

use std::ffi::c_int;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::ptr::{null, null_mut};

use crate::cm::{Channel, errno, failed, loopback, refused, sockaddr, worked};
use weft_abi::address;
use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::cm::*;
use weft_abi::verbs::types::*;

/// An initiator's event for a peer on this port.
fn outcome(port: u16) -> (rdma_cm_event_type, c_int) {
    let client = Channel::new();
    let id = client.connecting(port, b"hello");
    let event = client.get();
    let outcome = (event.kind(), event.status());
    event.ack();
    id.end();
    outcome
}

#[test]
fn peers_that_are_not_there_or_not_sound() {
    let free = TcpListener::bind(loopback(0)).unwrap();
    let port = free.local_addr().unwrap().port();
    // A silent one: the kernel accepts the connection, and no program answers.
    let silent = std::thread::spawn(move || outcome(port));

    let port = cm::closed_port();
    assert_eq!(outcome(port), (RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED));

    let rude = TcpListener::bind(loopback(0)).unwrap();
    let port = rude.local_addr().unwrap().port();
    let closing = std::thread::spawn(move || {
        let (mut peer, _) = rude.accept().unwrap();
        let _ = peer.read(&mut [0; 256]);
        drop(peer);
        let (mut peer, _) = rude.accept().unwrap();
        let _ = peer.read(&mut [0; 256]);
        let _ = peer.write_all(&[0x5a; 512]);
        let _ = peer.read(&mut [0; 256]);
    });
    assert_eq!(outcome(port), (RDMA_CM_EVENT_REJECTED, -libc::ECONNRESET));
    assert_eq!(outcome(port), (RDMA_CM_EVENT_CONNECT_ERROR, -libc::EPROTO));
    closing.join().unwrap();

    let late = silent.join().unwrap();
    assert_eq!(late, (RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT));
}

#[test]
fn a_request_between_two_listeners_waits_for_the_second() {
    let (server, client) = (Channel::new(), Channel::new());
    let first = server.listen("127.0.0.1:0");
    let port = first.port();
    let unseen = client.connecting(port, b"unseen");
    server.wait();
    first.destroy();
    // The next one closes with this connection in its queue.
    let busy = TcpListener::bind(loopback(port)).unwrap();
    let queued = client.connecting(port, b"queued");
    drop(busy);
    let refused = client.connecting(port, b"refused");
    let dialing = [unseen, queued, refused];
    let listener = server.listen(&loopback(port).to_string());
    let asked = [server.request(), server.request(), server.request()];
    for asked in &asked {
        assert!(dialing.iter().any(|id| id.src_port() == asked.dst_port()));
        asked.accept_with_qp();
        server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    }
    assert!(!server.readable());
    for id in asked.into_iter().chain(dialing) {
        id.end();
    }
    listener.destroy();
}

#[test]
fn a_listener_outlives_hostile_initiators() {
    let server = Channel::new();
    let listener = server.listen("127.0.0.1:0");
    for bytes in [
        &b"GET / HTTP/1.0\r\n\r\n"[..],
        &[0; 600],
        &[0xff; 3],
        b"MPA ID Req Frame",
    ] {
        let mut peer = std::net::TcpStream::connect(loopback(listener.port())).unwrap();
        peer.write_all(bytes).unwrap();
    }
    let client = Channel::new();
    let pair = cm::connected(&server, &listener, &client);
    pair.destroy();
    listener.destroy();
}

#[test]
fn addresses_that_cannot_be_had() {
    let client = Channel::new();
    let id = client.create_id();
    // Documentation's addresses do not exist here (RFC 5737).
    let mut elsewhere = sockaddr("198.51.100.7:0");
    failed(
        unsafe { rdma_bind_addr(id.0, elsewhere.ptr()) },
        libc::EADDRNOTAVAIL,
    );
    let mut link_local = sockaddr("[fe80::1]:0");
    refused(unsafe { rdma_bind_addr(id.0, link_local.ptr()) });
    let mut v6 = sockaddr("[::1]:0");
    let mut v4 = sockaddr("127.0.0.1:7471");
    refused(unsafe { rdma_resolve_addr(id.0, v6.ptr(), v4.ptr(), 1000) });
    refused(unsafe { rdma_resolve_addr(id.0, null_mut(), null_mut(), 1000) });
    // The next hop cannot be an unroutable address; the event has the errno.
    let mut nowhere = sockaddr("[ff0f::1]:7471");
    worked(unsafe { rdma_resolve_addr(id.0, null_mut(), nowhere.ptr(), 1000) });
    let event = client.get();
    if event.kind() == RDMA_CM_EVENT_ADDR_ERROR {
        assert!(event.status() < 0);
    }
    event.ack();
    id.destroy();
    // The unspecified address means this host.
    let id = client.create_id();
    let mut any = sockaddr("0.0.0.0:7471");
    worked(unsafe { rdma_resolve_addr(id.0, null_mut(), any.ptr(), 1000) });
    client.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    assert_eq!(id.peer().unwrap(), "127.0.0.1:7471".parse().unwrap());
    id.destroy();
}

#[test]
fn ports_are_taken_at_once() {
    let channel = Channel::new();
    let (first, second) = (channel.create_id(), channel.create_id());
    first.bind("127.0.0.1:0").unwrap();
    let taken = format!("127.0.0.1:{}", first.src_port());
    assert_eq!(second.bind(&taken), Err(libc::EADDRINUSE));
    assert_eq!(first.bind("127.0.0.1:0"), Err(libc::EINVAL));
    // Two that share the address may, until one listens.
    let (third, fourth) = (channel.create_id(), channel.create_id());
    for id in [&third, &fourth] {
        id.set_int(RDMA_OPTION_ID_REUSEADDR, 1).unwrap();
    }
    third.bind("127.0.0.1:0").unwrap();
    let shared = format!("127.0.0.1:{}", third.src_port());
    fourth.bind(&shared).unwrap();
    assert_eq!(unsafe { rdma_listen(third.0, 0) }, 0);
    failed(unsafe { rdma_listen(fourth.0, 0) }, libc::EADDRINUSE);
    assert_eq!(
        third.set_int(RDMA_OPTION_ID_REUSEADDR, 0),
        Err(libc::EINVAL)
    );
    // Without an address the listener listens on any.
    let fifth = channel.create_id();
    assert_eq!(unsafe { rdma_listen(fifth.0, 3) }, 0);
    assert_ne!(fifth.src_port(), 0);
    // The port is free again.
    let port = first.src_port();
    for id in [first, second, third, fourth, fifth] {
        id.destroy();
    }
    let again = channel.listen(&format!("127.0.0.1:{port}"));
    again.destroy();
}

#[test]
fn wildcards_take_both_families_unless_told() {
    let server = Channel::new();
    let listener = server.listen("[::]:0");
    let client = Channel::new();
    for to in ["127.0.0.1", "::1"] {
        let ip: std::net::IpAddr = to.parse().unwrap();
        let pair = cm::connected_to(&server, (ip, listener.port()).into(), &client);
        assert_eq!(pair.accepted.local().unwrap().ip(), ip);
        assert_eq!(pair.accepted.peer().unwrap().ip(), ip);
        pair.destroy();
    }
    listener.destroy();
    let only = server.create_id();
    only.set_int(RDMA_OPTION_ID_AFONLY, 1).unwrap();
    only.bind("[::]:0").unwrap();
    assert_eq!(unsafe { rdma_listen(only.0, 0) }, 0);
    assert_eq!(
        outcome(only.src_port()),
        (RDMA_CM_EVENT_REJECTED, -libc::ECONNREFUSED)
    );
    only.destroy();
}

#[test]
fn names_are_looked_up_as_asked() {
    let mut found = null_mut();
    unsafe {
        refused(rdma_getaddrinfo(null(), null(), null(), &raw mut found));
        let mut hints = cm::hints(RAI_NUMERICHOST);
        let name = c"localhost";
        assert_eq!(
            rdma_getaddrinfo(name.as_ptr(), null(), &raw const hints, &raw mut found),
            libc::EAI_NONAME
        );
        hints = cm::hints(RAI_PASSIVE);
        let port = c"7174";
        worked(rdma_getaddrinfo(
            null(),
            port.as_ptr(),
            &raw const hints,
            &raw mut found,
        ));
        assert_eq!((*found).ai_dst_len, 0);
        assert_eq!((*found).ai_qp_type, IBV_QPT_RC as c_int);
        assert_eq!((*found).ai_port_space, RDMA_PS_TCP as c_int);
        assert!((*found).ai_src_len > 0 && (*found).ai_next.is_null());
        rdma_freeaddrinfo(found);
        rdma_freeaddrinfo(found);
        // As libfabric asks for the address of a process for all peers. `WEFT_FI_ADDR` is not set.
        worked(rdma_getaddrinfo(
            name.as_ptr(),
            null(),
            &raw const hints,
            &raw mut found,
        ));
        let far = weft_verbs::settings::mpi_address().unwrap();
        let src = address::read((*found).ai_src_addr, (*found).ai_src_len);
        assert_eq!(src.unwrap().ip(), far);
        rdma_freeaddrinfo(found);
        // With a port it is the name that everybody knows.
        worked(rdma_getaddrinfo(
            name.as_ptr(),
            port.as_ptr(),
            &raw const hints,
            &raw mut found,
        ));
        let src = address::read((*found).ai_src_addr, (*found).ai_src_len);
        assert!(src.unwrap().ip().is_loopback());
        rdma_freeaddrinfo(found);
        hints.ai_qp_type = IBV_QPT_UD as c_int;
        hints.ai_port_space = RDMA_PS_TCP as c_int;
        assert_eq!(
            rdma_getaddrinfo(null(), port.as_ptr(), &raw const hints, &raw mut found),
            libc::EAI_SOCKTYPE
        );
    }
}

#[test]
fn an_address_without_a_way_out_is_an_event() {
    let channel = Channel::new();
    let id = channel.create_id();
    id.bind("127.0.0.1:0").unwrap();
    // Documentation's addresses do not exist (RFC 5737), and this host's own addresses have no route there.
    let mut to = sockaddr("198.51.100.7:7471");
    worked(unsafe { rdma_resolve_addr(id.0, null_mut(), to.ptr(), 1000) });
    let event = channel.get();
    assert_eq!(event.kind(), RDMA_CM_EVENT_ADDR_ERROR);
    assert!([-libc::EHOSTUNREACH, -libc::ENETUNREACH].contains(&event.status()));
    event.ack();
    // The identifier keeps its stage, and can try another address.
    id.resolve("127.0.0.1:7471");
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    id.destroy();
    let sync = cm::sync_id();
    sync.bind("127.0.0.1:0").unwrap();
    assert_eq!(
        unsafe { rdma_resolve_addr(sync.0, null_mut(), to.ptr(), 1000) },
        -1
    );
    assert!([libc::EHOSTUNREACH, libc::ENETUNREACH].contains(&errno()));
    sync.destroy();
}
