//! A meeting, step by step, from the initiator's side.

use std::io::{self, ErrorKind};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::frames::Startup;
use crate::peer::{PATIENCE, Peer, request};
use crate::rng::Rng;
use crate::shared::files::Files;
use crate::shared::ring::{Ring, word};
use crate::shared::unix_socket::{Cell, UnixSocket, VERSION, kind, message};
use crate::target::{Session, Target};

/// Bytes of a ring where nothing else is wanted.
pub const RING: u32 = 64 << 10;

/// The name of our protection domain.
pub const DOMAIN: [u8; 16] = *b"hostile's domain";

/// How far it has come.
#[derive(Debug)]
pub struct Meeting {
    /// Who is met.
    pub target: Target,
    /// The TCP connection.
    pub peer: Peer,
    pub socket: UnixSocket,
    pub cell: Cell,
    /// The other side's process.
    pub process: u32,
    /// What we tell as the other side's secret.
    pub proof: [u8; 16],
}

/// What comes of one.
#[derive(Debug)]
pub struct Met {
    /// The connection, wherever it is.
    pub session: Session,
    /// Why it has not moved to shared memory, if it has not.
    pub stayed: Option<String>,
}

impl Meeting {
    /// Connects by TCP, and to the socket.
    pub fn begin(target: Target, rng: &mut Rng) -> io::Result<Meeting> {
        let peer = Peer::connect(target.addr, None)?;
        let socket = UnixSocket::knock(target.addr)?;
        Ok(Meeting {
            target,
            peer,
            process: socket.process()?,
            socket,
            cell: Cell::new(rng),
            proof: [0; 16],
        })
    }

    pub fn hello(&self) -> io::Result<()> {
        let body = self.cell.hello(self.peer.tcp.local_addr()?);
        self.socket.send(&message(VERSION, kind::HELLO, &body), &[])
    }

    /// Hears the Welcome, and finds the other side's secret.
    pub fn welcome(&mut self) -> io::Result<()> {
        let came = self.socket.message(PATIENCE)?;
        if came.kind != kind::WELCOME || came.body.len() < 24 {
            let said = String::from_utf8_lossy(&came.body).into_owned();
            return Err(io::Error::other(format!("kind {}: {said}", came.kind)));
        }
        self.cell.show(&came.body[8..24]);
        // The other side shows our challenge as soon as it has it, which was before it sent this.
        self.proof = self
            .cell
            .secret_of(self.process, &came.body)
            .unwrap_or_default();
        Ok(())
    }

    /// The body of a Join, or of an Attach without the proof.
    pub fn party(qp: u32, private: bool) -> Vec<u8> {
        let mut body = qp.to_le_bytes().to_vec();
        body.extend(u32::from(private).to_le_bytes());
        body.extend(DOMAIN);
        body
    }

    /// Joins, with these descriptors.
    pub fn join(&self, fds: &[BorrowedFd<'_>], private: bool) -> io::Result<()> {
        let mut body = Meeting::party(7, private);
        body.extend(self.proof);
        self.socket.send(&message(VERSION, kind::JOIN, &body), fds)
    }

    /// Asks by TCP, and goes where the other side goes.
    pub fn finish(mut self, files: &mut Files) -> io::Result<Met> {
        let reply = self.peer.start(&request(&self.target.hello()))?;
        self.attach(files, &reply)
    }

    /// The rest of [`Meeting::finish`], from the reply on.
    pub fn attach(self, files: &mut Files, reply: &Startup) -> io::Result<Met> {
        let Meeting {
            target,
            mut peer,
            socket,
            ..
        } = self;
        // It was sent before the reply.
        let stayed = match socket.message(Duration::ZERO) {
            Ok(came) if came.kind == kind::ATTACH => {
                let segment = files.segment.take().ok_or(ErrorKind::InvalidInput)?;
                let len = (segment.metadata()?.len() - 4096) / 2;
                let ring = Ring::new(segment, socket, len as u32, true, came.fds);
                ring.store(word::DOORS, 1)?;
                peer.ring = Some(ring);
                None
            }
            Ok(came) => Some(String::from_utf8_lossy(&came.body).into_owned()),
            Err(e) => Some(e.to_string()),
        };
        Ok(Met {
            session: target.joined(peer, reply)?,
            stayed,
        })
    }
}

/// All of it, as an honest peer does it.
pub fn meet(target: Target, rng: &mut Rng) -> io::Result<(Met, Files)> {
    let mut files = Files::new(RING, &DOMAIN)?;
    let mut meeting = Meeting::begin(target, rng)?;
    meeting.hello()?;
    meeting.welcome()?;
    meeting.join(&files.all(), true)?;
    Ok((meeting.finish(&mut files)?, files))
}

impl Target {
    /// Connects and does all that an honest peer does before its first message of its own. A victim whose backlog is full of others turns it
    /// away: then again, for some seconds.
    pub fn join(&self) -> io::Result<Session> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let session = if self.shared {
                self.meet()
            } else {
                self.dial()
            };
            if session.is_ok() || Instant::now() > deadline {
                return session;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn dial(&self) -> io::Result<Session> {
        let mut peer = Peer::connect(self.addr, None)?;
        let reply = peer.start(&request(&self.hello()))?;
        self.joined(peer, &reply)
    }

    fn meet(&self) -> io::Result<Session> {
        let (met, files) = meet(*self, &mut Rng::new(u64::from(self.addr.port())))?;
        match met.stayed {
            Some(reason) => Err(io::Error::other(format!("stayed on TCP: {reason}"))),
            None => Ok(Session {
                files: Some(files),
                ..met.session
            }),
        }
    }
}
