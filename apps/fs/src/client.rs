//! A connection to a server, which is opened again after a loss.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use rustix::io::Errno;
use weft_session::{DialError, Event, MessageChannel, Via};
use weft_verbs::any::Mr;
use weft_verbs::cm::ConnectError;
use weft_verbs::tls::{PublicKey, Tls};
use weft_verbs::{Access, Device, RemoteAddr, SendWr};

use crate::error::Error;
use crate::lock;
use crate::name::{Endpoint, Name};
use crate::wire::{Attr, Entry, Flags, Op, PROTOCOL, Reply, Request, Status, key_name};

/// Bytes that one RDMA operation moves at most, and the length of a connection's staging memory.
pub(crate) const CHUNK: usize = 1 << 20;
/// Work requests outstanding at most.
const OUTSTANDING: usize = 40;
/// Entries that a folder of a server has at most: files of its folder, and buffers.
const MAX_LISTED: usize = (1 << 20) + 65_536;

/// The client's own key, and the servers that it accepts.
pub trait Keys: Send + Sync {
    /// Settings for a connection to this server.
    ///
    /// # Errors
    /// [`Error::Local`] when they cannot be had.
    fn tls(&self, endpoint: &Endpoint) -> Result<Tls, Error>;
}

/// The parameters of a connection.
#[derive(Clone)]
pub struct Settings {
    pub keys: Arc<dyn Keys>,
    /// The time limit for a silent server.
    pub patience: Duration,
    /// The soft RNIC to use; `None`: one of its own.
    pub device: Option<Device>,
    /// The device of the connection, and whether it is encrypted.
    pub via: Via,
}

impl Settings {
    pub fn new(keys: Arc<dyn Keys>) -> Self {
        Self {
            keys,
            patience: Duration::from_secs(30),
            device: None,
            via: Via::default(),
        }
    }
}

/// A server. Clones are handles of the same connection.
#[derive(Clone)]
pub struct Client(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    endpoint: Endpoint,
    settings: Settings,
    pub(crate) slot: Mutex<Slot>,
    /// Open files, with the number of their buffer: those of one buffer see each other's writes.
    pub(crate) files: Mutex<Vec<(u64, Weak<dyn Settle>)>>,
}

/// What an operation changes for other files of the same buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Nothing,
    Contents,
    Generation,
}

/// An open file, for operations of others.
pub(crate) trait Settle: Send + Sync {
    /// Sends what the file has gathered, and forgets what is about to change.
    fn settle(&self, slot: &Mutex<Slot>, change: Change);
}

/// The place of the connection, if there is one.
pub(crate) struct Slot {
    pub(crate) conn: Option<Conn>,
    device: Option<Device>,
    epochs: u64,
}

/// An open connection.
pub(crate) struct Conn {
    // Dropped first, because the connection uses the memory.
    pub(crate) link: MessageChannel,
    /// Counts connections: handles are of one of them.
    pub(crate) epoch: u64,
    keeps: bool,
    /// Whether the device can append.
    has_atomics: bool,
    transport: &'static str,
    patience: Duration,
    next: u64,
    under_way: usize,
    done: HashSet<u64>,
    /// For small reads, and words.
    pub(crate) staging: Mr,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// Any [`Error`] but of [`Error::Errno`]. [`ConnectError::Tls`] has the key of a server that is not taken.
    pub fn connect(endpoint: &Endpoint, settings: Settings) -> Result<Self, Error> {
        let client = Self(Arc::new(Inner {
            endpoint: endpoint.clone(),
            slot: Mutex::new(Slot {
                conn: None,
                device: settings.device.clone(),
                epochs: 0,
            }),
            files: Mutex::default(),
            settings,
        }));
        client.0.connected(&mut lock(&client.0.slot))?;
        Ok(client)
    }

    /// Settles some files, which are given with the number of their buffer.
    pub(crate) fn settle(&self, which: impl Fn(u64, &Weak<dyn Settle>) -> bool, change: Change) {
        let files: Vec<_> = lock(&self.0.files)
            .iter()
            .filter(|(ino, of)| which(*ino, of))
            .filter_map(|(_, of)| of.upgrade())
            .collect();
        // Each locks its own state only: two files may settle each other at once.
        for file in files {
            file.settle(&self.0.slot, change);
        }
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Whether the server keeps buffers that no client has open.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn server_keeps(&self) -> Result<bool, Error> {
        Ok(self.0.connected(&mut lock(&self.0.slot))?.keeps)
    }

    /// The transport of the connection: `local`, `tls`, `tcp`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn transport(&self) -> Result<&'static str, Error> {
        Ok(self.0.connected(&mut lock(&self.0.slot))?.transport)
    }

    /// The attributes of a name.
    ///
    /// # Errors
    /// `ENOENT`, and those of the connection; this and the following.
    pub fn stat(&self, name: &Name) -> Result<Attr, Error> {
        self.settle(|_, _| true, Change::Nothing);
        Ok(self.ask(&Request::named(Op::Stat, name), true)?.attr)
    }

    /// Removes a buffer's name; programs that have it open can continue to use it.
    ///
    /// # Errors
    /// As `unlink(2)`; `EROFS` for a file of the server's folder.
    pub fn unlink(&self, name: &Name) -> Result<(), Error> {
        self.ask(&Request::named(Op::Unlink, name), false).map(drop)
    }

    /// Gives a buffer or folder another name.
    ///
    /// # Errors
    /// As `rename(2)`.
    pub fn rename(&self, from: &Name, to: &Name) -> Result<(), Error> {
        let request = Request {
            other: to.clone(),
            ..Request::named(Op::Rename, from)
        };
        self.ask(&request, false).map(drop)
    }

    /// Gives a buffer these rights: nine bits as of `chmod(2)`, for its owner, for the keys of [`Client::share`], and for others. Programs that have it open
    /// keep what they have. Folders, and files of the server's folder, have none to change.
    ///
    /// # Errors
    /// `EPERM` for a client that does not own it.
    pub fn chmod(&self, name: &Name, mode: u32) -> Result<(), Error> {
        let request = Request {
            size: mode.into(),
            ..Request::named(Op::Chmod, name)
        };
        self.ask(&request, true).map(drop)
    }

    /// Adds a key to those that a buffer names, or takes it out.
    ///
    /// # Errors
    /// As [`Client::chmod`]; `ENOSPC` for the 65th key.
    pub fn share(&self, name: &Name, key: &PublicKey, adds: bool) -> Result<(), Error> {
        let request = Request {
            other: key_name(key),
            size: adds.into(),
            ..Request::named(Op::Share, name)
        };
        self.ask(&request, true).map(drop)
    }

    /// Makes a folder.
    ///
    /// # Errors
    /// As `mkdir(2)`.
    pub fn mkdir(&self, name: &Name) -> Result<(), Error> {
        self.ask(&Request::named(Op::Mkdir, name), false).map(drop)
    }

    /// Removes an empty folder.
    ///
    /// # Errors
    /// As `rmdir(2)`.
    pub fn rmdir(&self, name: &Name) -> Result<(), Error> {
        self.ask(&Request::named(Op::Rmdir, name), false).map(drop)
    }

    /// The entries of a folder, in byte order, at most about a million, as a server has.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`.
    pub fn list(&self, name: &Name) -> Result<Vec<Entry>, Error> {
        self.settle(|_, _| true, Change::Nothing);
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = match all.last() {
                Some(entry) => Name::new(&entry.name)?,
                None => Name::default(),
            };
            let request = Request {
                other: after.clone(),
                ..Request::named(Op::List, name)
            };
            let entries = self.ask(&request, true)?.entries;
            if entries.is_empty() {
                return Ok(all);
            }
            // A server that repeats names would cause an endless loop.
            let mut last = after.as_bytes();
            for entry in &entries {
                if entry.name.as_slice() <= last {
                    return Err(Error::Foreign("entries out of order"));
                }
                last = &entry.name;
            }
            all.extend(entries);
            if all.len() > MAX_LISTED {
                return Err(Error::Foreign("more entries than a folder can have"));
            }
        }
    }

    /// The server's quota, and its used part, in bytes.
    ///
    /// # Errors
    /// The errors of the connection.
    pub fn usage(&self) -> Result<(u64, u64), Error> {
        let reply = self.ask(&Request::new(Op::Usage), true)?;
        Ok((reply.attr.size, reply.region.len))
    }

    /// Asks, and once more over a new connection if `again` says that it does no harm.
    fn ask(&self, request: &Request, again: bool) -> Result<Reply, Error> {
        let mut slot = lock(&self.0.slot);
        let fresh = slot.conn.is_none();
        let first = self.0.connected(&mut slot)?.call(request);
        match first {
            Err(e) if e.is_of_connection() => {
                slot.conn = None;
                if !again || fresh {
                    return Err(e);
                }
                let answer = self.0.connected(&mut slot)?.call(request);
                if answer.as_ref().is_err_and(Error::is_of_connection) {
                    slot.conn = None;
                }
                answer
            }
            answer => answer,
        }
    }
}

impl Error {
    /// Whether the connection is unusable.
    pub(crate) fn is_of_connection(&self) -> bool {
        !matches!(self, Self::Errno(_))
    }
}

impl Inner {
    /// The connection; a new one if there is none.
    pub(crate) fn connected<'a>(&self, slot: &'a mut Slot) -> Result<&'a mut Conn, Error> {
        if slot.conn.as_ref().is_some_and(|conn| !conn.link.is_alive()) {
            slot.conn = None;
        }
        if slot.conn.is_none() {
            slot.epochs += 1;
            let epoch = slot.epochs;
            let conn = self.dial(&mut slot.device, epoch)?;
            return Ok(slot.conn.insert(conn));
        }
        slot.conn
            .as_mut()
            .ok_or(Error::Gone("there is no connection"))
    }

    fn dial(&self, device: &mut Option<Device>, epoch: u64) -> Result<Conn, Error> {
        let addrs = self.endpoint.resolve().map_err(Error::Resolve)?;
        let mut last = None;
        for addr in addrs {
            match self.dial_one(device, addr, epoch) {
                // Another address of the same host may do.
                Err(Error::Connect(e @ (ConnectError::Io(_) | ConnectError::TimedOut))) => {
                    last = Some(e);
                }
                other => return other,
            }
        }
        Err(match last {
            Some(e) => Error::Connect(e),
            None => Error::Resolve(std::io::ErrorKind::NotFound.into()),
        })
    }

    fn dial_one(
        &self,
        device: &mut Option<Device>,
        addr: SocketAddr,
        epoch: u64,
    ) -> Result<Conn, Error> {
        let via = &self.settings.via;
        let soft = || match device {
            Some(device) => Ok(device.clone()),
            None => Ok(device.insert(Device::open()?).clone()),
        };
        let device = via.device(|choice| choice.rnic_to(addr), soft);
        let device = device.map_err(Error::Device)?;
        let tls = if via.plain {
            None
        } else {
            Some(self.settings.keys.tls(&self.endpoint)?)
        };
        let hello = PROTOCOL.hello(Status::Ok, 0);
        let param = PROTOCOL.param(tls, hello);
        let (link, private_data) = match MessageChannel::dial(&device, PROTOCOL, addr, &param) {
            Ok(connected) => connected,
            Err(DialError::Connect(ConnectError::Rejected { private_data })) => {
                let theirs = PROTOCOL
                    .read_hello(&private_data)
                    .map_err(|e| Error::Foreign(e.0))?;
                return Err(Error::Rejected(theirs.status));
            }
            Err(e) => return Err(e.into()),
        };
        let theirs = PROTOCOL
            .read_hello(&private_data)
            .map_err(|e| Error::Foreign(e.0))?;
        if theirs.version != PROTOCOL.version {
            return Err(Error::Rejected(Status::Version));
        }
        if theirs.status != Status::Ok {
            return Err(Error::Rejected(theirs.status));
        }
        let transport = link.qp.path().map_or("tcp", |path| path.transport);
        let staging = link.pd().alloc_mr(CHUNK, Access::LOCAL_WRITE);
        let staging = staging.map_err(|e| Error::Local(e.to_string()))?;
        Ok(Conn {
            link,
            epoch,
            keeps: theirs.value != 0,
            has_atomics: device.attr().atomics,
            transport,
            patience: self.settings.patience,
            next: 0,
            under_way: 0,
            done: HashSet::new(),
            staging,
        })
    }
}

impl Conn {
    /// Sends a request and waits for its reply, which also says that all Writes before it have been placed.
    pub(crate) fn call(&mut self, request: &Request) -> Result<Reply, Error> {
        self.next = (self.next + 1) & (u64::MAX >> 2);
        let id = self.next as u32 | 1 << 31;
        let request = Request {
            id,
            ..request.clone()
        };
        self.link.send(&request.encode())?;
        loop {
            if let Some(bytes) = self.event()? {
                let reply = Reply::decode(&bytes).map_err(|e| Error::Foreign(e.0))?;
                // The answer of a server to a peer that it could not refuse earlier.
                if reply.id == 0 && reply.error == Some(Errno::ACCESS) {
                    return Err(Error::Rejected(Status::UnknownPeer));
                }
                if reply.id != id {
                    return Err(Error::Foreign("a reply to another request"));
                }
                return match reply.error {
                    None => Ok(reply),
                    Some(errno) => Err(errno.into()),
                };
            }
        }
    }

    /// Waits for something to happen: a message, or a work request that is done, which is noted.
    fn event(&mut self) -> Result<Option<Vec<u8>>, Error> {
        match self.link.next(self.patience, None)? {
            Some(Event::Message(bytes)) => Ok(Some(bytes)),
            Some(Event::Done(id)) => {
                self.under_way = self.under_way.saturating_sub(1);
                self.done.insert(id);
                Ok(None)
            }
            None => Err(Error::Gone("the server is silent")),
        }
    }

    /// Posts a work request; its number is what [`Conn::wait`] takes, which has to be called for each.
    pub(crate) fn post(&mut self, mut wr: SendWr) -> Result<u64, Error> {
        while self.under_way >= OUTSTANDING {
            if self.event()?.is_some() {
                return Err(Error::Foreign("a message that nobody asked for"));
            }
        }
        self.next = (self.next + 1) & (u64::MAX >> 2);
        wr.id = self.next;
        self.link.post(wr)?;
        self.under_way += 1;
        Ok(self.next)
    }

    /// Waits until a work request is done.
    pub(crate) fn wait(&mut self, id: u64) -> Result<(), Error> {
        while !self.done.remove(&id) {
            if self.event()?.is_some() {
                return Err(Error::Foreign("a message that nobody asked for"));
            }
        }
        Ok(())
    }

    /// Adds to a word of the server, and returns the old value.
    pub(crate) fn fetch_add(&mut self, word: RemoteAddr, add: u64) -> Result<u64, Error> {
        let local = |e: weft_verbs::MemError| Error::Local(e.to_string());
        let id = self.post(SendWr::fetch_add(0, word, add).sge(self.staging.sge(0, 8)))?;
        self.wait(id)?;
        self.staging.load_u64(0).map_err(local)
    }

    pub(crate) fn open(&mut self, name: &Name, flags: Flags, size: u64) -> Result<Reply, Error> {
        if flags.has(Flags::APPEND) && !self.has_atomics {
            return Err(Errno::OPNOTSUPP.into());
        }
        let reply = self.call(&Request {
            flags,
            size,
            ..Request::named(Op::Open, name)
        })?;
        if reply.attr.dir {
            return Err(Errno::ISDIR.into());
        }
        Ok(reply)
    }
}
