//! librdmacm's calls for datagrams (`RDMA_PS_UDP`): asking for a queue pair and naming one. Both sides are in this process, on the default devices.
#![cfg(feature = "verbs")]
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says, or checked for refusing what is not
#![allow(clippy::cast_possible_wrap)]

use crate::cm;

use std::ffi::{c_int, c_void};
use std::net::{SocketAddr, UdpSocket};
use std::ptr::{null, null_mut};

use crate::cm::{
    Channel, Event, Id, Param, failed, loopback, padded, qp_attr, refused, sockaddr, worked,
};
use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::cm::*;
use weft_abi::verbs::types::*;
use weft_abi::verbs::{ibv_destroy_qp, ibv_detach_mcast, ibv_query_qp};

/// InfiniBand's reasons (12.8.2).
const UNSUPPORTED: c_int = 1;
const REJECT: c_int = 2;
const NO_QP: c_int = 3;

fn listen(channel: &Channel, addr: &str) -> Id {
    let id = channel.create_id_in(RDMA_PS_UDP);
    id.bind(addr).unwrap();
    assert_eq!(unsafe { rdma_listen(id.0, 4) }, 0);
    id
}

fn routed(channel: &Channel, addr: SocketAddr) -> Id {
    let id = channel.create_id_in(RDMA_PS_UDP);
    id.resolve(&addr.to_string());
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    id.route();
    channel.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).ack();
    id
}

fn asking(channel: &Channel, listener: &Id, data: &[u8]) -> Id {
    let id = routed(channel, loopback(listener.port()));
    id.connect(&Param::new(data)).unwrap();
    id
}

fn create_qp(id: &Id) {
    let mut attr = qp_attr(null_mut());
    attr.qp_type = IBV_QPT_UD;
    worked(unsafe { rdma_create_qp(id.0, null_mut(), &raw mut attr) });
}

fn qp_num(id: &Id) -> u32 {
    unsafe { (*(*id.0).qp).qp_num }
}

fn attributes(id: &Id) -> ibv_qp_attr {
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    let mut init = qp_attr(null_mut());
    let mask = (IBV_QP_STATE | IBV_QP_QKEY) as c_int;
    let result = unsafe { ibv_query_qp((*id.0).qp, &raw mut attr, mask, &raw mut init) };
    assert_eq!(result, 0);
    attr
}

fn ud(event: &Event) -> rdma_ud_param {
    unsafe { (*event.0).param.ud }
}

fn v4_mapped(last: u8) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, last]
}

#[test]
fn a_queue_pair_is_asked_for_and_named() {
    let (server, client) = (Channel::new(), Channel::new());
    // On any address: the answer comes from the address that was asked.
    let listener = listen(&server, "0.0.0.0:0");
    let to = SocketAddr::from(([127, 0, 0, 3], listener.port()));
    let id = routed(&client, to);
    create_qp(&id);
    let attr = attributes(&id);
    assert_eq!((attr.qp_state, attr.qkey), (IBV_QPS_RTS, RDMA_UDP_QKEY));
    assert_eq!(unsafe { (*id.0).qp_type }, IBV_QPT_UD);
    id.connect(&Param::new(b"hello")).unwrap();
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), padded(b"hello", 180));
    assert_eq!(event.listen_id(), listener.0);
    let asked = event.id();
    assert_eq!(asked.peer(), id.local());
    assert_eq!(asked.local(), Some(to));
    assert_eq!(asked.context(), listener.context());
    event.ack();
    create_qp(&asked);
    asked.accept(&Param::new(b"welcome")).unwrap();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(event.private_data(), padded(b"welcome", 136));
    let found = ud(&event);
    assert_eq!((found.qp_num, found.qkey), (qp_num(&asked), RDMA_UDP_QKEY));
    assert_eq!((found.ah_attr.is_global, found.ah_attr.port_num), (1, 1));
    assert_eq!(unsafe { found.ah_attr.grh.dgid.raw }, v4_mapped(3));
    event.ack();
    // The responder gets no event: no connection is established.
    assert!(!server.readable());
    assert_eq!(asked.accept(&Param::new(b"")), Err(libc::EINVAL));
    assert_eq!(id.connect(&Param::new(b"")), Err(libc::EINVAL));
    for id in [id, asked] {
        id.disconnect().unwrap();
        assert_eq!(attributes(&id).qp_state, IBV_QPS_ERR);
        id.end();
    }
    assert!(!server.readable() && !client.readable());
    listener.destroy();
}

/// The program brings its own queue pair, and passes its number.
#[test]
fn a_queue_pair_of_the_program_is_named() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = listen(&server, "127.0.0.1:0");
    let id = asking(&client, &listener, b"");
    let asked = server.request();
    refused(unsafe { rdma_accept(asked.0, null_mut()) });
    let mut param = Param::new(b"");
    param.qp_num = 0x1234;
    asked.accept(&param).unwrap();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(ud(&event).qp_num, 0x1234);
    event.ack();
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = state;
        let mut mask = 0;
        worked(unsafe { rdma_init_qp_attr(id.0, &raw mut attr, &raw mut mask) });
        assert_eq!(mask as u32 & IBV_QP_QKEY != 0, state == IBV_QPS_INIT);
    }
    for id in [id, asked, listener] {
        id.destroy();
    }
}

#[test]
fn refusals_are_unreachable_queue_pairs() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = listen(&server, "127.0.0.1:0");
    let id = asking(&client, &listener, b"?");
    let asked = server.request();
    assert_eq!(unsafe { rdma_reject(asked.0, b"no".as_ptr().cast(), 2) }, 0);
    let event = client.expect_status(RDMA_CM_EVENT_UNREACHABLE, REJECT);
    assert_eq!(event.private_data(), padded(b"no", 136));
    event.ack();
    asked.destroy();
    id.destroy();
    // A request that is destroyed unanswered, and one that the program never fetches.
    let id = asking(&client, &listener, b"?");
    let asked = server.request();
    asked.destroy();
    client.expect_status(RDMA_CM_EVENT_UNREACHABLE, NO_QP).ack();
    id.destroy();
    let port = listener.port();
    let id = asking(&client, &listener, b"?");
    server.wait();
    listener.destroy();
    client.expect_status(RDMA_CM_EVENT_UNREACHABLE, NO_QP).ack();
    assert_eq!(id.disconnect(), Err(libc::EINVAL));
    id.destroy();
    // No listener.
    let id = routed(&client, loopback(port));
    id.connect(&Param::new(b"?")).unwrap();
    let gone = client.expect_status(RDMA_CM_EVENT_UNREACHABLE, UNSUPPORTED);
    assert_eq!(gone.private_data(), b"");
    gone.ack();
    id.destroy();
}

#[test]
fn private_data_is_as_long_as_infiniband_s() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = listen(&server, "127.0.0.1:0");
    let id = routed(&client, loopback(listener.port()));
    assert_eq!(id.connect(&Param::new(&[7; 181])), Err(libc::EINVAL));
    id.connect(&Param::new(&[7; 180])).unwrap();
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), [7; 180]);
    let asked = event.id();
    event.ack();
    assert_eq!(asked.accept(&Param::new(&[8; 137])), Err(libc::EINVAL));
    refused(unsafe { rdma_reject(asked.0, [0_u8; 137].as_ptr().cast(), 137) });
    asked.accept(&Param::new(&[8; 136])).unwrap();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(event.private_data(), [8; 136]);
    event.ack();
    for id in [id, asked, listener] {
        id.destroy();
    }
}

#[test]
fn a_listener_outlives_hostile_datagrams() {
    let (server, client) = (Channel::new(), Channel::new());
    let listener = listen(&server, "127.0.0.1:0");
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    for junk in [&b""[..], b"WSR1", &[0; 28], &[0xff; 9000]] {
        stranger.send_to(junk, loopback(listener.port())).unwrap();
    }
    let id = asking(&client, &listener, b"it is me");
    let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(event.private_data(), padded(b"it is me", 180));
    let asked = event.id();
    event.ack();
    for id in [id, asked, listener] {
        id.destroy();
    }
}

/// No peer answers, and the identifier is destroyed meanwhile.
#[test]
fn identifiers_that_ask_can_go_at_any_time() {
    let client = Channel::new();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    for _ in 0..20 {
        let id = routed(&client, silent.local_addr().unwrap());
        id.connect(&Param::new(b"?")).unwrap();
        id.destroy();
    }
    assert!(!client.readable());
}

#[test]
fn end_points_block_until_they_are_answered() {
    let end_point = |port, flags| cm::end_point(RDMA_PS_UDP, port, flags);
    let listener = end_point(0, RAI_PASSIVE);
    assert_eq!(unsafe { rdma_listen(listener.0, 0) }, 0);
    let port = listener.port();
    let server = std::thread::spawn(move || {
        let listener: Id = listener;
        let mut numbers = Vec::new();
        for accepts in [true, false] {
            let mut id = null_mut();
            assert_eq!(unsafe { rdma_get_request(listener.0, &raw mut id) }, 0);
            let id = Id(id);
            numbers.push(qp_num(&id));
            if accepts {
                assert_eq!(unsafe { rdma_accept(id.0, null_mut()) }, 0);
            } else {
                assert_eq!(unsafe { rdma_reject(id.0, null(), 0) }, 0);
            }
            unsafe { rdma_destroy_ep(id.0) };
        }
        unsafe { rdma_destroy_ep(listener.0) };
        numbers[0]
    });
    let id = end_point(port, 0);
    assert_eq!(unsafe { rdma_connect(id.0, null_mut()) }, 0);
    let num = unsafe { (*(*id.0).event).param.ud.qp_num };
    unsafe { rdma_destroy_ep(id.0) };
    let id = end_point(port, 0);
    failed(
        unsafe { rdma_connect(id.0, null_mut()) },
        libc::ECONNREFUSED,
    );
    unsafe { rdma_destroy_ep(id.0) };
    assert_eq!(server.join().unwrap(), num);
}

/// An address in the form that `getaddrinfo(3)` returns with `AI_V4MAPPED`.
#[test]
fn a_mapped_address_is_one_of_ipv4() {
    if UdpSocket::bind("[::]:0").is_err() {
        return; // This host has no IPv6.
    }
    let (server, client) = (Channel::new(), Channel::new());
    let listener = listen(&server, "127.0.0.1:0");
    let to = format!("[::ffff:127.0.0.1]:{}", listener.port());
    let id = routed(&client, to.parse().unwrap());
    id.connect(&Param::new(b"")).unwrap();
    let asked = server.request();
    create_qp(&asked);
    asked.accept(&Param::new(b"")).unwrap();
    let event = client.expect(RDMA_CM_EVENT_ESTABLISHED);
    let found = ud(&event);
    assert_eq!(found.qp_num, qp_num(&asked));
    assert_eq!(unsafe { found.ah_attr.grh.dgid.raw }, v4_mapped(1));
    event.ack();
    asked.destroy_qp();
    for id in [id, asked, listener] {
        id.destroy();
    }
    let id = client.create_id_in(RDMA_PS_UDP);
    id.bind("[::ffff:127.0.0.1]:0").unwrap();
    create_qp(&id);
    let mut group = sockaddr("239.87.4.4:0");
    worked(unsafe { rdma_join_multicast(id.0, group.ptr(), null_mut()) });
    client.expect(RDMA_CM_EVENT_MULTICAST_JOIN).ack();
    let qp = unsafe { (*id.0).qp };
    assert_eq!(unsafe { ibv_destroy_qp(qp) }, libc::EBUSY, "attached");
    id.end();
}

fn joined(channel: &Channel, group: &str, context: usize) -> Id {
    let id = channel.create_id_in(RDMA_PS_UDP);
    id.bind("127.0.0.1:0").unwrap();
    id.resolve(group);
    channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
    create_qp(&id);
    let mut addr = sockaddr(group);
    worked(unsafe { rdma_join_multicast(id.0, addr.ptr(), context as *mut c_void) });
    id
}

fn leave(id: &Id, group: &str) -> c_int {
    unsafe { rdma_leave_multicast(id.0, sockaddr(group).ptr()) }
}

#[test]
fn a_group_is_joined_and_left() {
    const GROUP: &str = "239.87.4.1:0";
    let channel = Channel::new();
    let id = joined(&channel, GROUP, 0x1234);
    let event = channel.expect(RDMA_CM_EVENT_MULTICAST_JOIN);
    let way = ud(&event);
    assert_eq!((way.qp_num, way.qkey), (0x00ff_ffff, RDMA_UDP_QKEY));
    assert_eq!(
        (way.private_data as usize, way.private_data_len),
        (0x1234, 0)
    );
    let gid = ibv_gid {
        raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 87, 4, 1],
    };
    assert_eq!(unsafe { way.ah_attr.grh.dgid.raw }, unsafe { gid.raw });
    assert_eq!((way.ah_attr.is_global, way.ah_attr.port_num), (1, 1));
    event.ack();
    let qp = unsafe { (*id.0).qp };
    // It is attached: a queue pair in a group cannot be destroyed.
    assert_eq!(unsafe { ibv_destroy_qp(qp) }, libc::EBUSY);
    failed(leave(&id, "239.87.4.2:0"), libc::EADDRNOTAVAIL);
    assert_eq!(leave(&id, GROUP), 0);
    failed(leave(&id, GROUP), libc::EADDRNOTAVAIL);
    assert_eq!(
        unsafe { ibv_detach_mcast(qp, &raw const gid, 0) },
        libc::EINVAL
    );
    // Left before the program has fetched the event of joining.
    let mut addr = sockaddr(GROUP);
    worked(unsafe { rdma_join_multicast(id.0, addr.ptr(), null_mut()) });
    assert_eq!(leave(&id, GROUP), 0);
    channel.expect(RDMA_CM_EVENT_MULTICAST_JOIN).ack();
    assert_eq!(
        unsafe { ibv_detach_mcast(qp, &raw const gid, 0) },
        libc::EINVAL
    );
    id.end();
    // The membership ends with the queue pair, in either order.
    let id = joined(&channel, GROUP, 0);
    channel.expect(RDMA_CM_EVENT_MULTICAST_JOIN).ack();
    id.destroy_qp();
    assert_eq!(leave(&id, GROUP), 0);
    id.destroy();
    let id = joined(&channel, GROUP, 0);
    id.end();
    assert!(!channel.readable());
}

fn join_ex(id: &Id, comp_mask: u32, join_flags: u32, addr: *mut libc::sockaddr) -> c_int {
    let mut attr = rdma_cm_join_mc_attr_ex {
        comp_mask,
        join_flags,
        addr,
    };
    unsafe { rdma_join_multicast_ex(id.0, &raw mut attr, null_mut()) }
}

#[test]
fn a_group_is_joined_to_send_only() {
    const BOTH: u32 = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
    let channel = Channel::new();
    let id = channel.create_id_in(RDMA_PS_UDP);
    let mut addr = sockaddr("239.87.4.3:0");
    let group = addr.ptr();
    // Not bound to a device yet.
    refused(join_ex(&id, BOTH, 0, group));
    id.bind("127.0.0.1:0").unwrap();
    create_qp(&id);
    failed(join_ex(&id, 4, 0, group), libc::EOPNOTSUPP);
    failed(join_ex(&id, BOTH, 2, group), libc::EOPNOTSUPP);
    refused(join_ex(&id, 2, 0, group));
    refused(join_ex(&id, BOTH, 0, null_mut()));
    // Addresses that are not groups, and one of the other family.
    for wrong in ["0.0.0.0:0", "10.0.0.1:0", "[::1]:0", "[ff02::1]:0"] {
        refused(join_ex(&id, BOTH, 0, sockaddr(wrong).ptr()));
    }
    refused(unsafe { rdma_join_multicast_ex(id.0, null_mut(), null_mut()) });
    assert_eq!(
        join_ex(&id, BOTH, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, group),
        0
    );
    channel.expect(RDMA_CM_EVENT_MULTICAST_JOIN).ack();
    // It receives nothing, so it can be destroyed.
    assert_eq!(unsafe { ibv_destroy_qp((*id.0).qp) }, 0);
    unsafe { (*id.0).qp = null_mut() };
    assert_eq!(unsafe { rdma_leave_multicast(id.0, group) }, 0);
    id.destroy();
    // Identifiers for connections have no groups.
    let id = channel.create_id();
    id.bind("127.0.0.1:0").unwrap();
    refused(join_ex(&id, BOTH, 0, group));
    id.destroy();
}
