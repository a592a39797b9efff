//! A peer for RDMA programs on RoCE v2: `rping`, both its sides, over the machines of `weft_proto::roce` and a UDP socket.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
use weft_proto::dgram::Now;
use weft_proto::rdmap::{Op, Payload, SendWr};
use weft_proto::roce::cm::{Event, Exchange, Phase};
use weft_proto::roce::{Config, Connection, Received, Rx, State, Status};
use weft_verbs::cm::gid_of;
use weft_wire::roce::cm::{self, IpHeader, Mad, Message, PortSpace, Rep, Req, service_id};
use weft_wire::roce::{
    DEFAULT_PKEY, Deth, Header, ICRC_LEN, Icrc, NakCode, Op as Wire, Opcode, PORT, Route, Service,
};

const QP: u32 = 0x123;
const PSN: u32 = 0xff_fffe;
/// Our region, and the two buffers of a client in it.
const RKEY: u32 = 0x5678;
const VA: u64 = 0x10_0000;
const SINK: u64 = 0x20_0000;
/// Reads and atomics at once.
const DEPTH: u8 = 4;
/// 67 ms: the guest is emulated, and slow on a busy machine.
const ACK_TIMEOUT: u8 = 14;

/// What a session has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Rounds of `rping`.
    pub rounds: u32,
    /// Packets that came.
    pub packets: u64,
    /// Packets of the connection that were thrown away on purpose, on both ways.
    pub dropped: u64,
    /// Packets with an ICRC that no identification explains.
    pub damaged: u64,
}

/// Why a session failed.
#[derive(Debug)]
pub struct Failed(String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed(error.to_string())
    }
}

fn failed<T>(why: impl fmt::Debug) -> Result<T, Failed> {
    Err(Failed(format!("{why:?}")))
}

fn icrc(src: SocketAddr, dst: SocketAddr, packet: &[u8]) -> Icrc {
    let mut icrc = Icrc::new(&Route { src, dst }, 0, packet.len());
    icrc.headers(packet);
    icrc
}

/// The socket.
struct Link {
    socket: UdpSocket,
    local: SocketAddr,
    peer: SocketAddr,
    started: Instant,
    /// One packet of so many is thrown away, by chance; 0: none.
    drop_every: u64,
    random: u64,
    report: Report,
}

impl Link {
    fn new(local: IpAddr, peer: IpAddr, drop_every: u64) -> Result<Link, Failed> {
        let socket = UdpSocket::bind((local, PORT))?;
        // So the kernel sends identification 0, which the ICRC covers.
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).map_err(io::Error::from)?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        Ok(Link {
            local: socket.local_addr()?,
            socket,
            peer: SocketAddr::new(peer, PORT),
            started: Instant::now(),
            drop_every,
            random: 0x9e37_79b9_7f4a_7c15,
            report: Report::default(),
        })
    }

    fn now(&self) -> Now {
        Now::from_secs(1) + self.started.elapsed()
    }

    fn is_dropped(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let dropped = self.drop_every > 0 && self.random.is_multiple_of(self.drop_every);
        self.report.dropped += u64::from(dropped);
        dropped
    }

    fn send(&self, packet: &mut Vec<u8>) -> Result<(), Failed> {
        let trailer = icrc(self.local, self.peer, packet).finish();
        packet.extend_from_slice(&trailer);
        self.socket.send_to(packet, self.peer)?;
        Ok(())
    }

    /// The next packet of the peer, if one comes within a millisecond.
    fn receive<'a>(&mut self, buf: &'a mut [u8]) -> Result<Option<(Header, &'a [u8])>, Failed> {
        let (n, from) = match self.socket.recv_from(buf) {
            Ok(received) => received,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        self.report.packets += 1;
        let Some((packet, trailer)) = buf[..n].split_last_chunk::<ICRC_LEN>() else {
            return failed("a datagram without ICRC");
        };
        if from.ip() != self.peer.ip() || !icrc(from, self.local, packet).is_valid(*trailer) {
            self.report.damaged += 1;
            return Ok(None);
        }
        // What it does not know, a peer passes over.
        Ok(Header::parse(packet).ok())
    }

    fn send_mad(&self, mad: &[u8]) -> Result<(), Failed> {
        let header = Header {
            deth: Some(Deth {
                qkey: cm::QKEY,
                src_qp: cm::QP,
            }),
            ..Header::new(Opcode::ud(Wire::SendOnly), cm::QP, 0)
        };
        let mut packet = Vec::new();
        header.emit(&mut packet);
        packet.extend_from_slice(mad);
        self.send(&mut packet)
    }
}

/// What `rping` sends: where its buffer is.
#[derive(Clone, Copy, Default)]
struct Info {
    va: u64,
    rkey: u32,
    size: u32,
}

impl Info {
    fn parse(raw: &[u8]) -> Option<Info> {
        let (va, rest) = raw.split_first_chunk()?;
        let (rkey, rest) = rest.split_first_chunk()?;
        Some(Info {
            va: u64::from_be_bytes(*va),
            rkey: u32::from_be_bytes(*rkey),
            size: u32::from_be_bytes(*rest.first_chunk()?),
        })
    }

    fn emit(self) -> Vec<u8> {
        let (va, rest) = (self.va.to_be_bytes(), [self.rkey, self.size]);
        [va.to_vec(), rest.map(u32::to_be_bytes).concat()].concat()
    }
}

/// The side of `rping` that this peer is.
enum Role {
    /// Reads the client's buffer, and writes it back into another one.
    Server {
        info: Info,
        data: Vec<u8>,
        /// The client's second buffer is awaited, or has been written.
        written: bool,
    },
    /// Has the server read a buffer and write it back, so many times.
    Client {
        source: Vec<u8>,
        sink: Vec<u8>,
        /// The server has read.
        read: bool,
        rounds: u32,
    },
}

/// A connected queue pair, with the bytes of each request.
struct Session {
    link: Link,
    conn: Connection<Vec<u8>>,
    exchange: Exchange,
    remote_qp: u32,
    receive: Vec<u8>,
    role: Role,
}

impl Session {
    fn post(&mut self, op: Op, bytes: Vec<u8>) {
        let len = bytes.len() as u32;
        let fence = false;
        self.conn.post_with(SendWr { op, len, fence }, bytes);
    }

    fn send(&mut self, bytes: Vec<u8>) {
        let (solicited, invalidate) = (false, None);
        let op = Op::Send {
            solicited,
            invalidate,
        };
        self.post(op, bytes);
    }

    /// Until the peer, or a client that has done its rounds, ends the connection.
    fn run(mut self, limit: Duration) -> Result<Report, Failed> {
        let mut buf = vec![0; 9000];
        while self.link.started.elapsed() < limit {
            let now = self.link.now();
            if let Some((header, payload)) = self.link.receive(&mut buf)? {
                if header.opcode.service == Service::Ud {
                    let event = Mad::parse(payload).and_then(|mad| self.exchange.on(now, &mad));
                    self.send_mads()?;
                    if event == Some(Event::Disconnected) {
                        return Ok(self.link.report);
                    }
                } else if !self.link.is_dropped() {
                    self.exchange.heard();
                    self.on_packet(now, &header, payload)?;
                }
            }
            self.exchange.expired(now);
            self.conn.expired(now);
            self.send_mads()?;
            self.transmit()?;
            if self.conn.state() != State::Open {
                self.conn.flush();
            }
            self.reap()?;
            if self.conn.state() != State::Open {
                return failed("a request was refused");
            }
        }
        failed(("no end in", limit, self.link.report))
    }

    fn send_mads(&mut self) -> Result<(), Failed> {
        while let Some(mad) = self.exchange.take() {
            self.link.send_mad(&mad[..])?;
        }
        Ok(())
    }

    fn transmit(&mut self) -> Result<(), Failed> {
        loop {
            let mut packet = Vec::new();
            let Some(tx) = self.conn.next_tx(self.link.now(), &mut packet) else {
                if self.conn.is_interrupted() {
                    continue;
                }
                return Ok(());
            };
            match tx.payload {
                Payload::None => {}
                Payload::Wr { seq, offset, len } => {
                    let bytes = self.conn.request_mut(seq).expect("a request");
                    packet.extend_from_slice(&bytes[offset as usize..][..len as usize]);
                }
                Payload::Source { to, len, .. } => {
                    let Role::Client { source, .. } = &self.role else {
                        return failed("a Read of a server's memory");
                    };
                    packet.extend_from_slice(&source[(to - VA) as usize..][..len as usize]);
                }
                Payload::Local { .. } => return failed("no such request was posted"),
            }
            packet.extend_from_slice(&[0; 3][..tx.pad.into()]);
            if !self.link.is_dropped() {
                self.link.send(&mut packet)?;
            }
        }
    }

    fn on_packet(&mut self, now: Now, header: &Header, payload: &[u8]) -> Result<(), Failed> {
        match (
            self.conn.rx(now, header, payload.len() as u32),
            &mut self.role,
        ) {
            (Rx::Nothing, _) => {}
            (Rx::PlaceRecv { first, .. }, _) => {
                if first {
                    self.receive.clear();
                }
                self.receive.extend_from_slice(payload);
                if let Some(received) = self.conn.rx_placed() {
                    self.on_message(&received)?;
                }
            }
            (Rx::PlaceRead { offset, len, .. }, Role::Server { data, .. }) => {
                data[offset as usize..][..len as usize].copy_from_slice(payload);
                self.conn.rx_placed();
            }
            (
                Rx::PlaceWrite {
                    rkey: RKEY,
                    va,
                    len,
                    ..
                },
                Role::Client { sink, .. },
            ) => {
                sink[(va - SINK) as usize..][..len as usize].copy_from_slice(payload);
                self.conn.rx_placed();
            }
            (
                Rx::ReadRequested {
                    rkey: RKEY,
                    va,
                    len,
                },
                Role::Client { source, .. },
            ) if va >= VA && va - VA + u64::from(len) <= source.len() as u64 => {
                self.conn.accept_read();
            }
            (other, _) => {
                self.conn.refuse(NakCode::RemoteAccess);
                return failed(other);
            }
        }
        Ok(())
    }

    /// The next step of `rping`.
    fn on_message(&mut self, received: &Received) -> Result<(), Failed> {
        if received.len != 16 {
            return failed(received);
        }
        let told = Info::parse(&self.receive).unwrap_or_default();
        match &mut self.role {
            Role::Server {
                info,
                data,
                written,
            } => {
                *info = told;
                if *written {
                    *data = vec![0; told.size as usize];
                    *written = false;
                    let (src_stag, src_to) = (told.rkey, told.va);
                    let sink = data.clone();
                    self.post(Op::Read { src_stag, src_to }, sink);
                } else {
                    let (stag, to) = (told.rkey, told.va);
                    let data = data.clone();
                    *written = true;
                    self.post(Op::Write { stag, to }, data);
                }
            }
            Role::Client {
                source,
                sink,
                read,
                rounds,
            } => {
                let size = source.len() as u32;
                if !std::mem::replace(read, true) {
                    let rkey = RKEY;
                    self.send(
                        Info {
                            va: SINK,
                            rkey,
                            size,
                        }
                        .emit(),
                    );
                    return Ok(());
                }
                if source != sink {
                    return failed("the server wrote other bytes than it read");
                }
                self.link.report.rounds += 1;
                if self.link.report.rounds == *rounds {
                    let now = self.link.now();
                    self.exchange.disconnect(now, 99, self.remote_qp);
                } else {
                    self.begin_round();
                }
            }
        }
        Ok(())
    }

    /// A client shows the server its buffer.
    fn begin_round(&mut self) {
        if let Role::Client {
            source, sink, read, ..
        } = &mut self.role
        {
            // The server writes a string: up to the first zero.
            let round = self.link.report.rounds as usize;
            for (at, byte) in source.iter_mut().enumerate() {
                *byte = b'A' + ((at * 3 + round) % 58) as u8;
            }
            if let Some(last) = source.last_mut() {
                *last = 0;
            }
            sink.fill(0);
            *read = false;
            let size = source.len() as u32;
            let rkey = RKEY;
            self.send(Info { va: VA, rkey, size }.emit());
        }
    }

    /// A server tells the client when its Read or Write is complete.
    fn reap(&mut self) -> Result<(), Failed> {
        while let Some((done, _)) = self.conn.pop() {
            let Status::Ok { byte_len } = done.status else {
                return failed(done);
            };
            let Role::Server { info, written, .. } = &self.role else {
                continue;
            };
            // Its own messages have 16 bytes; a buffer of `rping` has more.
            if byte_len == info.size {
                self.link.report.rounds += u32::from(*written);
                self.send(vec![0; 16]);
            }
        }
        Ok(())
    }
}

/// Serves one `rping -c`.
///
/// # Errors
/// What went wrong, or that there was no end within `limit`.
pub fn serve(
    local: IpAddr,
    peer: IpAddr,
    drop_every: u64,
    limit: Duration,
) -> Result<Report, Failed> {
    let mut link = Link::new(local, peer, drop_every)?;
    let mut buf = vec![0; 9000];
    while link.started.elapsed() < limit {
        let now = link.now();
        let Some((_, payload)) = link.receive(&mut buf)? else {
            continue;
        };
        let Some(Mad {
            transaction,
            message: Message::Req(req),
        }) = Mad::parse(payload)
        else {
            continue;
        };
        let mut exchange = Exchange::requested(transaction, 0x77, &req);
        let rep = Rep {
            local_id: 0,
            remote_id: 0,
            qp: QP,
            psn: PSN,
            responder_resources: DEPTH,
            initiator_depth: DEPTH,
            ack_delay: ACK_TIMEOUT,
            rnr_retry: 7,
            srq: false,
            ca_guid: 1,
            private_data: b"",
        };
        exchange.accept(now, &rep);
        let conn = Connection::new(config(req.qp, req.psn, PSN, req.mtu));
        let role = Role::Server {
            info: Info::default(),
            data: Vec::new(),
            written: true,
        };
        let session = Session {
            link,
            conn,
            exchange,
            remote_qp: req.qp,
            receive: Vec::new(),
            role,
        };
        return session.run(limit);
    }
    failed("no request came")
}

/// Plays `rping -c` against an `rping -s`: so many rounds with so many bytes.
///
/// # Errors
/// What went wrong, or that there was no end within `limit`.
pub fn client(
    local: IpAddr,
    peer: SocketAddr,
    (rounds, size): (u32, usize),
    drop_every: u64,
    limit: Duration,
) -> Result<Report, Failed> {
    let mut link = Link::new(local, peer.ip(), drop_every)?;
    let mut private_data = IpHeader {
        port: 7,
        src: local,
        dst: peer.ip(),
    }
    .emit()
    .to_vec();
    private_data.resize(92, 0);
    let req = Req {
        local_id: 0x78,
        service_id: service_id(PortSpace::Tcp, peer.port()),
        ca_guid: 1,
        qp: QP,
        responder_resources: DEPTH,
        initiator_depth: DEPTH,
        remote_timeout: 18,
        local_timeout: 18,
        service: 0,
        psn: PSN,
        retry_count: 7,
        rnr_retry: 7,
        pkey: DEFAULT_PKEY,
        mtu: 3,
        max_cm_retries: 15,
        srq: false,
        local_gid: gid_of(local),
        remote_gid: gid_of(peer.ip()),
        ack_timeout: ACK_TIMEOUT,
        private_data: &private_data,
    };
    let mut exchange = Exchange::request(link.now(), 0x1234, &req);
    let mut buf = vec![0; 9000];
    while link.started.elapsed() < limit {
        while let Some(mad) = exchange.take() {
            link.send_mad(&mad[..])?;
        }
        let now = link.now();
        let received = link.receive(&mut buf)?;
        exchange.expired(now);
        let mad = received.and_then(|(_, payload)| Mad::parse(payload));
        let event = mad.and_then(|mad| exchange.on(now, &mad));
        let reply = match event {
            Some(Event::Replied(reply)) => reply,
            Some(other) => return failed(other),
            None if exchange.phase() == Phase::Over => return failed("nobody answers"),
            None => continue,
        };
        exchange.ready(b"");
        let mut session = Session {
            link,
            conn: Connection::new(config(reply.qp, reply.psn, PSN, req.mtu)),
            exchange,
            remote_qp: reply.qp,
            receive: Vec::new(),
            role: Role::Client {
                source: vec![0; size],
                sink: vec![0; size],
                read: false,
                rounds,
            },
        };
        session.begin_round();
        return session.run(limit);
    }
    failed("no answer came")
}

fn config(dest_qp: u32, sq_psn: u32, rq_psn: u32, mtu: u8) -> Config {
    Config {
        service: Service::Rc,
        dest_qp,
        pkey: DEFAULT_PKEY,
        mtu: 128 << mtu.min(5),
        sq_psn,
        rq_psn,
        ord: DEPTH.into(),
        ird: DEPTH.into(),
        timeout: ACK_TIMEOUT,
        retry_count: 7,
        rnr_retry: 7,
        rnr_timer: 12,
        window: 64,
    }
}
