//! The calls of librdmacm with conveniences, for tests.
#![allow(dead_code, unreachable_pub)] // each test program uses its part
#![allow(clippy::undocumented_unsafe_blocks)] // every call here is as its manual page says
#![allow(clippy::cast_possible_wrap)]

use std::ffi::{c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use weft_abi::verbs::cm::types::*;
use weft_abi::verbs::cm::*;
use weft_abi::verbs::types::*;
use weft_abi::verbs::{
    ibv_create_cq, ibv_create_qp, ibv_destroy_cq, ibv_destroy_qp, ibv_modify_qp, ibv_query_qp,
};

pub fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[track_caller]
pub fn failed(result: c_int, wanted: c_int) {
    assert_eq!(result, -1);
    assert_eq!(errno(), wanted);
}

#[track_caller]
pub fn refused(result: c_int) {
    failed(result, libc::EINVAL);
}

#[track_caller]
pub fn worked(result: c_int) {
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn result(result: c_int) -> Result<(), c_int> {
    if result == 0 { Ok(()) } else { Err(errno()) }
}

/// A port without a listener.
pub fn closed_port() -> u16 {
    let gone = TcpListener::bind(loopback(0)).unwrap();
    gone.local_addr().unwrap().port()
}

/// InfiniBand's messages have a fixed length: pads the data with zeros.
pub fn padded(said: &[u8], len: usize) -> Vec<u8> {
    let mut data = said.to_vec();
    data.resize(len, 0);
    data
}

pub fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// An address in C's form.
pub struct Addr(libc::sockaddr_storage);

impl Addr {
    pub fn ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

pub fn sockaddr(addr: &str) -> Addr {
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    unsafe { weft_abi::address::write(addr.parse().unwrap(), (&raw mut storage).cast(), 128) };
    Addr(storage)
}

fn address(storage: libc::sockaddr_storage) -> Option<SocketAddr> {
    unsafe { weft_abi::address::read((&raw const storage).cast(), 128) }.ok()
}

pub fn hints(flags: c_int) -> rdma_addrinfo {
    let mut hints: rdma_addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_flags = flags;
    hints
}

/// A reliable queue pair with 8 requests of each kind, completing to `cq`.
pub fn qp_attr(cq: *mut ibv_cq) -> ibv_qp_init_attr {
    let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
    attr.send_cq = cq;
    attr.recv_cq = cq;
    attr.cap.max_send_wr = 8;
    attr.cap.max_recv_wr = 8;
    attr.cap.max_send_sge = 1;
    attr.cap.max_recv_sge = 1;
    attr.qp_type = IBV_QPT_RC;
    attr
}

pub struct Param {
    data: Vec<u8>,
    depths: (u8, u8),
    pub qp_num: u32,
    pub retry: u8,
    pub rnr_retry: u8,
}

impl Param {
    pub fn new(data: &[u8]) -> Param {
        Param {
            data: data.to_vec(),
            depths: (1, 1),
            qp_num: 0,
            retry: 7,
            rnr_retry: 7,
        }
    }

    /// The numbers of Reads to accept, and to have outstanding.
    pub fn depths(mut self, responder_resources: u8, initiator_depth: u8) -> Param {
        self.depths = (responder_resources, initiator_depth);
        self
    }

    pub fn raw(&self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: self.data.as_ptr().cast(),
            private_data_len: self.data.len() as u8,
            responder_resources: self.depths.0,
            initiator_depth: self.depths.1,
            flow_control: 0,
            retry_count: self.retry,
            rnr_retry_count: self.rnr_retry,
            srq: 0,
            qp_num: self.qp_num,
        }
    }
}

pub struct Channel(pub *mut rdma_event_channel);

impl Channel {
    pub fn new() -> Channel {
        let channel = unsafe { rdma_create_event_channel() };
        assert!(!channel.is_null());
        Channel(channel)
    }

    pub fn fd(&self) -> c_int {
        unsafe { (*self.0).fd }
    }

    pub fn nonblocking(&self) {
        unsafe { libc::fcntl(self.fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    }

    fn poll(&self, timeout: c_int) -> bool {
        let mut fd = libc::pollfd {
            fd: self.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        unsafe { libc::poll(&raw mut fd, 1, timeout) == 1 }
    }

    pub fn readable(&self) -> bool {
        self.poll(0)
    }

    /// Waits until there is an event.
    #[track_caller]
    pub fn wait(&self) {
        assert!(self.poll(30_000), "an event");
    }

    #[track_caller]
    pub fn get(&self) -> Event {
        self.wait();
        let mut event = null_mut();
        assert_eq!(unsafe { rdma_get_cm_event(self.0, &raw mut event) }, 0);
        Event(event)
    }

    #[track_caller]
    pub fn expect(&self, kind: rdma_cm_event_type) -> Event {
        self.expect_status(kind, 0)
    }

    #[track_caller]
    pub fn expect_status(&self, kind: rdma_cm_event_type, status: c_int) -> Event {
        let event = self.get();
        assert_eq!((event.kind(), event.status()), (kind, status));
        event
    }

    pub fn create_id(&self) -> Id {
        self.create_id_in(RDMA_PS_TCP)
    }

    pub fn create_id_in(&self, ps: rdma_port_space) -> Id {
        create_id(self.0, ps)
    }

    pub fn listen(&self, addr: &str) -> Id {
        let id = self.create_id();
        id.bind(addr).unwrap();
        assert_eq!(unsafe { rdma_listen(id.0, 0) }, 0);
        id
    }

    /// An identifier that is ready to connect to a port of this host.
    pub fn routed(&self, port: u16) -> Id {
        self.routed_to(loopback(port))
    }

    /// An identifier with a queue pair that is connecting.
    #[track_caller]
    pub fn connecting(&self, port: u16, data: &[u8]) -> Id {
        let id = self.routed(port);
        id.create_qp();
        id.connect(&Param::new(data)).unwrap();
        id
    }

    /// The identifier of the next request.
    #[track_caller]
    pub fn request(&self) -> Id {
        let event = self.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        let id = event.id();
        event.ack();
        id
    }

    pub fn routed_to(&self, addr: SocketAddr) -> Id {
        let id = self.create_id();
        id.resolve(&addr.to_string());
        self.expect(RDMA_CM_EVENT_ADDR_RESOLVED).ack();
        id.route();
        self.expect(RDMA_CM_EVENT_ROUTE_RESOLVED).ack();
        id
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

fn create_id(channel: *mut rdma_event_channel, ps: rdma_port_space) -> Id {
    let mut id = null_mut();
    let context = (ps as usize + 1000) as *mut c_void;
    assert_eq!(
        unsafe { rdma_create_id(channel, &raw mut id, context, ps) },
        0
    );
    Id(id)
}

/// An identifier whose calls block.
pub fn sync_id() -> Id {
    create_id(null_mut(), RDMA_PS_TCP)
}

/// As [`Channel::routed`], with calls that block.
pub fn sync_routed(port: u16) -> Id {
    let id = sync_id();
    id.resolve(&loopback(port).to_string());
    id.route();
    id
}

/// An event that must be acknowledged.
pub struct Event(pub *mut rdma_cm_event);

/// An end point of this host: one that listens (`RAI_PASSIVE`), or one that connects to a port.
#[track_caller]
pub fn end_point(ps: rdma_port_space, port: u16, flags: c_int) -> Id {
    let service = std::ffi::CString::new(port.to_string()).unwrap();
    let mut hints = hints(flags);
    hints.ai_port_space = ps as c_int;
    let (mut found, mut id) = (null_mut(), null_mut());
    let mut attr = qp_attr(null_mut());
    let (node, service) = (c"127.0.0.1".as_ptr(), service.as_ptr());
    unsafe {
        let result = rdma_getaddrinfo(node, service, &raw const hints, &raw mut found);
        assert_eq!(result, 0);
        let kind = if ps == RDMA_PS_UDP {
            IBV_QPT_UD
        } else {
            IBV_QPT_RC
        };
        assert_eq!((*found).ai_qp_type, kind as c_int);
        worked(rdma_create_ep(
            &raw mut id,
            found,
            null_mut(),
            &raw mut attr,
        ));
        rdma_freeaddrinfo(found);
        // The queues that the program did not pass.
        if flags & RAI_PASSIVE == 0 {
            assert!(!(*id).send_cq.is_null() && !(*id).recv_cq_channel.is_null());
            assert_eq!(attr.send_cq, (*id).send_cq);
        }
    }
    Id(id)
}

impl Event {
    pub fn kind(&self) -> rdma_cm_event_type {
        unsafe { (*self.0).event }
    }

    pub fn status(&self) -> c_int {
        unsafe { (*self.0).status }
    }

    pub fn id_ptr(&self) -> *mut rdma_cm_id {
        unsafe { (*self.0).id }
    }

    pub fn id(&self) -> Id {
        Id(self.id_ptr())
    }

    pub fn listen_id(&self) -> *mut rdma_cm_id {
        unsafe { (*self.0).listen_id }
    }

    fn conn(&self) -> rdma_conn_param {
        unsafe { (*self.0).param.conn }
    }

    pub fn qp_num(&self) -> u32 {
        self.conn().qp_num
    }

    pub fn private_data(&self) -> &[u8] {
        let conn = self.conn();
        if conn.private_data.is_null() {
            assert_eq!(conn.private_data_len, 0);
            return &[];
        }
        unsafe {
            std::slice::from_raw_parts(conn.private_data.cast(), usize::from(conn.private_data_len))
        }
    }

    pub fn depths(&self) -> (u8, u8) {
        let conn = self.conn();
        (conn.responder_resources, conn.initiator_depth)
    }

    /// Without an answer, and without a receive.
    pub fn retries(&self) -> (u8, u8) {
        let conn = self.conn();
        (conn.retry_count, conn.rnr_retry_count)
    }

    pub fn ack(self) {
        assert_eq!(unsafe { rdma_ack_cm_event(self.0) }, 0);
    }
}

pub struct Id(pub *mut rdma_cm_id);

// SAFETY: the library accepts calls from any thread.
unsafe impl Send for Id {}

impl Id {
    pub fn bind(&self, addr: &str) -> Result<(), c_int> {
        result(unsafe { rdma_bind_addr(self.0, sockaddr(addr).ptr()) })
    }

    #[track_caller]
    pub fn resolve(&self, addr: &str) {
        let result = unsafe { rdma_resolve_addr(self.0, null_mut(), sockaddr(addr).ptr(), 2000) };
        assert_eq!(result, 0);
    }

    #[track_caller]
    pub fn route(&self) {
        assert_eq!(unsafe { rdma_resolve_route(self.0, 2000) }, 0);
    }

    #[track_caller]
    pub fn create_qp(&self) {
        let mut attr = qp_attr(null_mut());
        worked(unsafe { rdma_create_qp(self.0, null_mut(), &raw mut attr) });
    }

    pub fn destroy_qp(&self) {
        unsafe { rdma_destroy_qp(self.0) };
    }

    pub fn connect(&self, param: &Param) -> Result<(), c_int> {
        result(unsafe { rdma_connect(self.0, &mut param.raw()) })
    }

    pub fn accept(&self, param: &Param) -> Result<(), c_int> {
        result(unsafe { rdma_accept(self.0, &mut param.raw()) })
    }

    #[track_caller]
    pub fn accept_with_qp(&self) {
        self.create_qp();
        self.accept(&Param::new(b"")).unwrap();
    }

    pub fn disconnect(&self) -> Result<(), c_int> {
        result(unsafe { rdma_disconnect(self.0) })
    }

    pub fn set_int(&self, option: u32, mut value: c_int) -> Result<(), c_int> {
        result(unsafe {
            rdma_set_option(
                self.0,
                RDMA_OPTION_ID as c_int,
                option as c_int,
                (&raw mut value).cast(),
                size_of::<c_int>(),
            )
        })
    }

    pub fn src_port(&self) -> u16 {
        u16::from_be(unsafe { rdma_get_src_port(self.0) })
    }

    pub fn port(&self) -> u16 {
        self.src_port()
    }

    pub fn dst_port(&self) -> u16 {
        u16::from_be(unsafe { rdma_get_dst_port(self.0) })
    }

    pub fn context(&self) -> *mut c_void {
        unsafe { (*self.0).context }
    }

    pub fn local(&self) -> Option<SocketAddr> {
        address(unsafe { (*self.0).route.addr.src.src_storage })
    }

    pub fn peer(&self) -> Option<SocketAddr> {
        address(unsafe { (*self.0).route.addr.dst.dst_storage })
    }

    /// With its queue pair.
    #[track_caller]
    pub fn end(self) {
        self.destroy_qp();
        self.destroy();
    }

    #[track_caller]
    pub fn destroy(self) {
        assert_eq!(unsafe { rdma_destroy_id(self.0) }, 0);
    }
}

pub fn ops(id: &Id) -> ibv_context_ops {
    unsafe { (*(*id.0).verbs).ops }
}

/// The next completion of a queue, or none in a while.
pub fn completion(id: &Id, cq: *mut ibv_cq, patience: Duration) -> Option<ibv_wc> {
    let poll = ops(id).poll_cq.unwrap();
    let until = Instant::now() + patience;
    let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
    loop {
        match unsafe { poll(cq, 1, &raw mut wc) } {
            0 if Instant::now() >= until => return None,
            0 => std::thread::yield_now(),
            n => {
                assert_eq!(n, 1);
                return Some(wc);
            }
        }
    }
}

pub const LONG: Duration = Duration::from_secs(20);

pub fn post_recv(id: &Id, qp: *mut ibv_qp, number: u64) {
    let mut wr: ibv_recv_wr = unsafe { std::mem::zeroed() };
    wr.wr_id = number;
    let post = ops(id).post_recv.unwrap();
    assert_eq!(unsafe { post(qp, &raw mut wr, &mut null_mut()) }, 0);
}

pub fn post_send(id: &Id, qp: *mut ibv_qp, number: u64) -> c_int {
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.wr_id = number;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    let post = ops(id).post_send.unwrap();
    unsafe { post(qp, &raw mut wr, &mut null_mut()) }
}

#[track_caller]
pub fn both_hear(channels: [&Channel; 2], kind: rdma_cm_event_type) {
    for channel in channels {
        channel.expect(kind).ack();
    }
}

/// Two ends of a connection.
pub struct Pair {
    pub id: Id,
    pub accepted: Id,
}

impl Pair {
    pub fn destroy(self) {
        for id in [self.id, self.accepted] {
            id.end();
        }
    }
}

pub fn connected(server: &Channel, listener: &Id, client: &Channel) -> Pair {
    connected_to(server, loopback(listener.port()), client)
}

/// As [`connected`], skipping requests of initiators that may be gone.
pub fn connected_after(server: &Channel, listener: &Id, client: &Channel, gone: usize) -> Pair {
    let id = client.connecting(listener.port(), b"it is me");
    for _ in 0..=gone {
        let event = server.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
        let asked = event.id();
        let ours = event.private_data() == b"it is me";
        event.ack();
        if !ours {
            asked.destroy();
            continue;
        }
        asked.accept_with_qp();
        server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
        return Pair {
            id,
            accepted: asked,
        };
    }
    panic!("no request of ours");
}

pub fn connected_to(server: &Channel, to: SocketAddr, client: &Channel) -> Pair {
    connected_with(server, to, client, &Param::new(b""))
}

/// As [`connected_to`], with this private data of the responder.
pub fn connected_with(server: &Channel, to: SocketAddr, client: &Channel, says: &Param) -> Pair {
    let id = client.routed_to(to);
    id.create_qp();
    id.connect(&Param::new(b"")).unwrap();
    let accepted = server.request();
    accepted.create_qp();
    accepted.accept(says).unwrap();
    server.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    client.expect(RDMA_CM_EVENT_ESTABLISHED).ack();
    Pair { id, accepted }
}

/// All attributes of a queue pair.
pub fn query(qp: *mut ibv_qp) -> ibv_qp_attr {
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    let mut init = qp_attr(null_mut());
    let mask = IBV_QP_STATE as c_int;
    let found = unsafe { ibv_query_qp(qp, &raw mut attr, mask, &raw mut init) };
    assert_eq!(found, 0);
    attr
}

/// A queue pair that the program makes and moves itself.
pub struct Own {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
}

impl Own {
    pub fn new(id: &Id) -> Own {
        unsafe {
            let cq = ibv_create_cq((*id.0).verbs, 16, null_mut(), null_mut(), 0);
            assert!(!cq.is_null());
            let qp = ibv_create_qp((*id.0).pd, &mut qp_attr(cq));
            assert!(!qp.is_null());
            let own = Own { cq, qp };
            own.to(id, IBV_QPS_INIT);
            own
        }
    }

    pub fn num(&self) -> u32 {
        unsafe { (*self.qp).qp_num }
    }

    #[track_caller]
    pub fn to(&self, id: &Id, state: ibv_qp_state) {
        // The former content of the attributes does not matter.
        let mut attr: ibv_qp_attr =
            unsafe { std::mem::transmute([0xa5_u8; size_of::<ibv_qp_attr>()]) };
        attr.qp_state = state;
        let mut mask = 0;
        unsafe {
            assert_eq!(
                rdma_init_qp_attr(id.0, &raw mut attr, &raw mut mask),
                0,
                "attributes for state {state}"
            );
            assert_eq!(ibv_modify_qp(self.qp, &raw mut attr, mask), 0);
        }
    }

    pub fn state(&self) -> ibv_qp_state {
        query(self.qp).qp_state
    }

    pub fn param(&self, data: &[u8]) -> Param {
        let mut param = Param::new(data);
        param.qp_num = self.num();
        param
    }

    pub fn destroy(self) {
        unsafe {
            assert_eq!(ibv_destroy_qp(self.qp), 0);
            assert_eq!(ibv_destroy_cq(self.cq), 0);
        }
    }
}
