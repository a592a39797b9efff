//! A peer that meets a weft device in shared memory with hand-made messages (docs/spec/local.md), and may then write anything there.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_mem::{Domain, PdId, RecvList, SendList, Table};
use weft_ring::{End, Front, Role, Segment};
use weft_sys::liveness::Liveness;
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds, process, wake};
use weft_wire::local::{ChallengeCell, MAX_LEN, Message, Secret, SideInfo};

use crate::bed::PATIENCE;

/// Bytes of each ring of our segments.
pub const RING: u32 = 64 * 1024;

/// The name of a listener's door.
pub fn door(addr: SocketAddr) -> Vec<u8> {
    format!("weft/1/{}/{}", addr.ip(), addr.port()).into_bytes()
}

/// A liveness page that lives as long as the process.
pub fn liveness() -> BorrowedFd<'static> {
    static LIVENESS: OnceLock<OwnedFd> = OnceLock::new();
    let fd = LIVENESS.get_or_init(|| {
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let liveness = Liveness::start().expect("a liveness page");
            let _ = tell.send(liveness.fd().try_clone_to_owned().expect("a descriptor"));
            loop {
                std::thread::park();
            }
        });
        told.recv().expect("a liveness page")
    });
    fd.as_fd()
}

/// Our description of ourselves.
pub fn party(domain: &Domain) -> SideInfo {
    SideInfo {
        qp: 1,
        trusted: false,
        domain: domain.id(),
    }
}

/// A cell that no process can read.
pub const NOWHERE: ChallengeCell = ChallengeCell {
    addr: 0,
    challenge: [0; 16],
};

/// The victim's secret: readable in the victim's own process, and perhaps not in another one.
fn proof(victims: ChallengeCell) -> Secret {
    let mut secret = [0; 16];
    let _ = process::read_memory(std::process::id(), victims.addr + 16, &mut secret);
    secret
}

/// The first message of an initiator with this TCP address.
pub fn hello(from: SocketAddr) -> Message {
    Message::Hello {
        cell: NOWHERE,
        seal: 0,
        from,
    }
}

/// A domain without any region.
pub fn domain() -> Arc<Domain> {
    Table::new(4).domain(PdId(1)).expect("memory files")
}

/// Sends a message of the rendezvous.
pub fn say(wire: &OwnedFd, message: &Message, fds: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    message.emit(&mut bytes);
    unix::send_signed(wire, &bytes, fds).expect("the victim listens");
}

/// The next message of the rendezvous; `None` when the victim hangs up.
pub fn hear(wire: &OwnedFd) -> Option<(Message, Vec<OwnedFd>)> {
    let mut buf = [0; MAX_LEN];
    let ready = poll_fds(&[(wire.as_fd(), Interest::READ)], Some(PATIENCE)).expect("poll");
    assert_ne!(ready, 0, "an answer in time");
    match unix::recv_with_fds(wire, &mut buf, 8) {
        Ok(Some((n, fds))) => Some((Message::parse(&buf[..n]).expect("weft's messages"), fds)),
        Ok(None) => None,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
        Err(error) => panic!("hearing: {error}"),
    }
}

/// Accepts one connection at our own door.
pub fn open_door(door: &OwnedFd) -> OwnedFd {
    let ready = poll_fds(&[(door.as_fd(), Interest::READ)], Some(PATIENCE)).expect("poll");
    assert_ne!(ready, 0, "a knock in time");
    unix::accept(door).expect("accept").expect("somebody")
}

/// The descriptors of an Attach, or those after the segment in a Join.
pub fn fds(domain: &Domain) -> Vec<BorrowedFd<'_>> {
    let mut fds = vec![liveness()];
    fds.extend(domain.fds(false));
    fds
}

/// A visitor at a door.
pub struct Visit {
    wire: OwnedFd,
    from: SocketAddr,
}

impl Visit {
    /// Connects to a listener's door and claims the TCP connection from this address.
    pub fn claim(listener: SocketAddr, from: SocketAddr) -> Visit {
        Visit {
            wire: unix::connect(Name::Abstract(&door(listener))).expect("a door"),
            from,
        }
    }

    /// Sends Hello and returns the answer.
    pub fn hello(&self) -> Option<Message> {
        say(&self.wire, &hello(self.from), &[]);
        hear(&self.wire).map(|(message, _)| message)
    }

    /// Sends a Join with these descriptors, after a Welcome.
    pub fn join(&self, victims: ChallengeCell, domain: &Domain, fds: &[BorrowedFd<'_>]) {
        let join = Message::Join {
            party: party(domain),
            proof: proof(victims),
        };
        say(&self.wire, &join, fds);
    }
}

/// Sends a visitor a Welcome.
pub fn welcome(wire: &OwnedFd, visitors: ChallengeCell) {
    let welcome = Message::Welcome {
        cell: NOWHERE,
        proof: proof(visitors),
    };
    say(wire, &welcome, &[]);
}

/// One end of a segment, driven by hand.
pub struct Local {
    /// The ring.
    pub end: End,
    /// The file of the segment: any of its bytes can be written.
    pub file: std::fs::File,
    /// Wake-ups.
    pub wire: OwnedFd,
    buf: Vec<u8>,
    domain: Arc<Domain>,
}

impl Local {
    /// Connects to the door of `tcp`'s peer, and sends nothing yet.
    pub fn visit(tcp: &TcpStream) -> Visit {
        let addr = |addr: std::io::Result<_>| addr.expect("connected");
        Visit::claim(addr(tcp.peer_addr()), addr(tcp.local_addr()))
    }

    /// Connects to the door of `tcp`'s peer and joins; `None` if it declines.
    pub fn knock(tcp: &TcpStream) -> Option<Local> {
        let visit = Local::visit(tcp);
        let Some(Message::Welcome { cell, .. }) = visit.hello() else {
            return None;
        };
        let (segment, fd) = Segment::create(RING).expect("a segment");
        let domain = domain();
        let mut all = vec![fd.as_fd()];
        all.extend(fds(&domain));
        visit.join(cell, &domain, &all);
        Some(Local {
            end: End::new(Arc::new(segment), Role::Initiator),
            file: fd.into(),
            wire: visit.wire,
            buf: Vec::new(),
            domain,
        })
    }

    /// True if the victim has accepted: it sends its Attach before its reply.
    pub fn attached(&mut self) -> bool {
        matches!(hear(&self.wire), Some((Message::Attach(_), _)))
    }

    /// Welcomes a victim at our own door, and receives its Join.
    pub fn welcome(door: &OwnedFd) -> Local {
        let wire = open_door(door);
        let Some((Message::Hello { cell, .. }, _)) = hear(&wire) else {
            panic!("no hello");
        };
        welcome(&wire, cell);
        let Some((Message::Join { .. }, mut fds)) = hear(&wire) else {
            panic!("nothing is brought");
        };
        let fd = fds.remove(0);
        let file = fd.try_clone().expect("a descriptor").into();
        let segment = Segment::open(fd).expect("a good segment");
        Local {
            end: End::new(Arc::new(segment), Role::Responder),
            file,
            wire,
            buf: Vec::new(),
            domain: domain(),
        }
    }

    /// Sends the victim our Attach.
    pub fn attach(&self) {
        let message = Message::Attach(party(&self.domain));
        say(&self.wire, &message, &fds(&self.domain));
    }

    /// Our door for a TCP listener.
    pub fn door(listener: &TcpListener) -> OwnedFd {
        let addr = listener.local_addr().expect("an address");
        unix::listen(Name::Abstract(&door(addr)), 16).expect("a door")
    }

    /// The number of descriptors that it holds: the segment, the wire, and a domain (a table, three arenas, and read-only descriptors of two of those).
    pub fn descriptors(&self) -> usize {
        2 + 6
    }

    /// Sends bytes of the stream. A victim that ends meanwhile does not fail the test.
    pub fn send(&self, bytes: &[u8]) {
        let deadline = Instant::now() + PATIENCE;
        let mut list = SendList::new();
        list.push_bytes(bytes);
        let mut done = 0;
        while done < bytes.len() && !self.end.peer_aborted() {
            match self.end.push(&list, done, bytes.len() - done) {
                Ok(n) => done += n,
                Err(error) => panic!("the victim's ring: {error}"),
            }
            self.publish();
            assert!(Instant::now() < deadline, "the victim takes nothing");
            if done < bytes.len() {
                std::thread::yield_now();
            }
        }
    }

    /// Publishes the pushed records and wakes the victim.
    pub fn publish(&self) {
        if self.end.publish() {
            let _ = wake::poke(&self.wire);
        }
    }

    /// Sends the victim a wake-up, even if it does not sleep.
    pub fn poke(&self) {
        let _ = wake::poke(&self.wire);
    }

    /// Finishes our direction.
    pub fn finish(&self) {
        let _ = self.end.finish();
        self.poke();
    }

    /// Up to `n` bytes of the record at the front.
    pub fn take(&self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        let mut list = RecvList::new();
        list.push_buf(&mut bytes);
        let taken = self.end.take(&mut list, 0, n).expect("bytes");
        drop(list);
        bytes.truncate(taken);
        bytes
    }

    /// `n` more bytes of the stream; `None` at its end.
    pub fn read(&mut self, n: usize) -> Option<Vec<u8>> {
        let deadline = Instant::now() + PATIENCE;
        while self.buf.len() < n {
            match self.end.front() {
                Ok(Front::Bytes(there)) => {
                    let bytes = self.take(there);
                    self.buf.extend_from_slice(&bytes);
                }
                Ok(Front::Empty) => {
                    assert!(Instant::now() < deadline, "no answer in time");
                    let quiet = self.end.sleep_on_data();
                    if quiet {
                        let wire = [(self.wire.as_fd(), Interest::READ)];
                        let _ = poll_fds(&wire, Some(Duration::from_millis(20)));
                        self.end.awake();
                        wake::drain(&self.wire);
                    }
                }
                Ok(Front::Ref(r)) => panic!("a reference to a peer that cannot pull: {r:?}"),
                Ok(Front::End | Front::Aborted) | Err(_) => return None,
            }
            if self.end.release(true) {
                self.poke();
            }
        }
        Some(self.buf.drain(..n).collect())
    }

    /// The next ULPDU; `None` at the end of the stream.
    pub fn ulpdu(&mut self) -> Option<Vec<u8>> {
        let length = self.read(4)?;
        let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
        let ulpdu = self.read(length as usize);
        Some(ulpdu.expect("a whole frame"))
    }

    /// Asserts that the end follows and nothing else.
    pub fn expect_end(&mut self) {
        assert!(self.read(1).is_none(), "bytes before the end");
    }
}

/// The frame around a ULPDU.
pub fn frame(ulpdu: &[u8]) -> Vec<u8> {
    let length = u32::try_from(ulpdu.len()).expect("short");
    [&length.to_le_bytes(), ulpdu].concat()
}

/// A frame's header alone: the victim fetches the payload.
pub fn head(ulpdu: &[u8], payload: usize) -> Vec<u8> {
    let mut bytes = frame(ulpdu);
    let len = u32::try_from(ulpdu.len() + payload).expect("short");
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes
}
