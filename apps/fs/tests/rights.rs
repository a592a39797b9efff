//! The rights of buffers: who may read, write and remove them, enforced by the server's regions.

use std::sync::Arc;
use std::time::Duration;

use weft_fs::name::{Endpoint, Name};
use weft_fs::server::{Config, Server};
use weft_fs::wire::{Flags, Op, PROTOCOL, Region, Reply, Request, Status};
use weft_fs::{Client, Errno, Error, OpenOptions, Settings, Via};
use weft_session::{Event, MessageChannel};
use weft_verbs::tls::{Identity, PublicKey, Tls};
use weft_verbs::{Access, Device, LocalMode, RemoteAddr, SendWr};

const PATIENCE: Duration = Duration::from_secs(30);
const BYTES: &[u8] = b"what the owner has written";

/// A client's key.
struct Person {
    tls: Tls,
    key: PublicKey,
}

impl Person {
    fn new() -> Self {
        let identity = Identity::generate().unwrap();
        Person {
            key: identity.public_key().clone(),
            tls: Tls::new(identity).unwrap(),
        }
    }

    fn client(&self, server: &Server) -> Client {
        let endpoint = Endpoint {
            host: "127.0.0.1".into(),
            port: server.local_addr().port(),
        };
        let settings = Settings {
            device: Some(device()),
            ..Settings::new(Arc::new(self.tls.clone()))
        };
        Client::connect(&endpoint, settings).unwrap()
    }
}

fn device() -> Device {
    Device::builder().local(LocalMode::Off).open().unwrap()
}

/// A server that admits these people by their keys, and its own user.
fn serve(people: &[&Person]) -> Server {
    let keys: Vec<PublicKey> = people.iter().map(|person| person.key.clone()).collect();
    let config = Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        dir: None,
        quota: 1 << 20,
        keeps: true,
        max_clients: 16,
        tls: Tls::new(Identity::generate().unwrap()).unwrap(),
        admit: Arc::new(move |key| keys.contains(key)),
        open: false,
        via: Via::default(),
    };
    Server::start(config).unwrap()
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn made(client: &Client, text: &str) {
    let options = OpenOptions::read().with(Flags::WRITE).with(Flags::CREATE);
    let file = client.open(&name(text), options).unwrap();
    file.pwrite(BYTES, 0).unwrap();
    file.close().unwrap();
}

fn contents(client: &Client, text: &str) -> Vec<u8> {
    let file = client.open(&name(text), OpenOptions::read()).unwrap();
    let mut bytes = vec![0; file.stat().unwrap().size as usize];
    assert_eq!(file.pread(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

fn errno<T>(done: Result<T, Error>) -> Option<Errno> {
    done.err().map(|e| e.errno())
}

/// What a client gets that opens the buffer for reading, and for writing.
fn opens(client: &Client, text: &str) -> [Option<Errno>; 2] {
    let write = OpenOptions {
        flags: Flags::WRITE,
        ..OpenOptions::read()
    };
    [OpenOptions::read(), write].map(|how| errno(client.open(&name(text), how)))
}

const NOT: Option<Errno> = Some(Errno::ACCESS);

#[test]
fn a_mode_says_who_reads_and_who_writes() {
    let [owner, friend, other, user] = [(); 4].map(|()| Person::new());
    let server = serve(&[&owner, &friend, &other]);
    // The last one's key is not admitted: it is the server's own user.
    let [mine, theirs, others, host] =
        [&owner, &friend, &other, &user].map(|person| person.client(&server));
    made(&mine, "a");
    assert_eq!(mine.stat(&name("a")).unwrap().mode, 0o666);
    for client in [&mine, &theirs, &others, &host] {
        assert_eq!(opens(client, "a"), [None, None], "as it begins");
    }
    mine.share(&name("a"), &friend.key, true).unwrap();
    for (mode, owns, named, rest) in [
        (0o644, [None, None], [None, NOT], [None, NOT]),
        (0o664, [None, None], [None, None], [None, NOT]),
        (0o660, [None, None], [None, None], [NOT, NOT]),
        (0o602, [None, None], [NOT, NOT], [NOT, None]),
        (0o444, [None, NOT], [None, NOT], [None, NOT]),
        (0, [NOT, NOT], [NOT, NOT], [NOT, NOT]),
    ] {
        mine.chmod(&name("a"), mode).unwrap();
        assert_eq!(u32::from(others.stat(&name("a")).unwrap().mode), mode);
        for (client, expected, who) in [
            (&mine, owns, "owner"),
            (&host, owns, "the server's user"),
            (&theirs, named, "named"),
            (&others, rest, "other"),
        ] {
            assert_eq!(opens(client, "a"), expected, "{mode:o}: {who}");
        }
    }
    // Only the owner, and the server's user, change them.
    assert_eq!(errno(theirs.chmod(&name("a"), 0o666)), Some(Errno::PERM));
    let itself = others.share(&name("a"), &other.key, true);
    assert_eq!(errno(itself), Some(Errno::PERM));
    host.chmod(&name("a"), 0o620).unwrap();
    assert_eq!(opens(&theirs, "a"), [NOT, None]);
    mine.share(&name("a"), &friend.key, false).unwrap();
    assert_eq!(opens(&theirs, "a"), [NOT, NOT]);
    assert_eq!(errno(mine.chmod(&name("none"), 0o600)), Some(Errno::NOENT));
    assert_eq!(contents(&mine, "a"), BYTES);
}

#[test]
fn what_may_not_be_written_keeps_its_name_and_bytes() {
    let [owner, other] = [(); 2].map(|()| Person::new());
    let server = serve(&[&owner, &other]);
    let [mine, theirs] = [&owner, &other].map(|person| person.client(&server));
    mine.mkdir(&name("d")).unwrap();
    made(&mine, "d/a");
    made(&theirs, "b");
    mine.chmod(&name("d/a"), 0o644).unwrap();
    assert_eq!(errno(theirs.unlink(&name("d/a"))), NOT);
    assert_eq!(errno(theirs.rename(&name("d/a"), &name("c"))), NOT);
    assert_eq!(errno(theirs.rename(&name("b"), &name("d/a"))), NOT);
    assert_eq!(errno(theirs.rename(&name("d"), &name("e"))), NOT);
    let cut = OpenOptions::read().with(Flags::TRUNCATE);
    assert_eq!(errno(theirs.open(&name("d/a"), cut)), NOT);
    assert_eq!(contents(&theirs, "d/a"), BYTES);
    mine.rename(&name("d/a"), &name("d/f")).unwrap();
    assert_eq!(opens(&theirs, "d/f"), [None, NOT], "rights follow the name");
    mine.unlink(&name("d/f")).unwrap();
    // Its owner renames, replaces and removes what it may only read.
    for text in ["e", "g"] {
        made(&mine, text);
        mine.chmod(&name(text), 0o444).unwrap();
    }
    mine.rename(&name("e"), &name("g")).unwrap();
    mine.unlink(&name("g")).unwrap();
}

#[test]
fn a_private_buffer_is_its_owners_from_the_beginning() {
    let [owner, other] = [(); 2].map(|()| Person::new());
    let server = serve(&[&owner, &other]);
    let [mine, theirs] = [&owner, &other].map(|person| person.client(&server));
    let options = OpenOptions::read().with(Flags::WRITE).with(Flags::CREATE);
    let file = mine.open(&name("a"), options.with(Flags::PRIVATE)).unwrap();
    assert_eq!(opens(&theirs, "a"), [NOT, NOT]);
    let attr = theirs.stat(&name("a")).unwrap();
    assert_eq!((attr.mode, attr.rights), (0o600, 0));
    // By the handle, whatever the name is.
    mine.rename(&name("a"), &name("b")).unwrap();
    made(&mine, "a");
    file.chmod(0o664).unwrap();
    assert_eq!(opens(&theirs, "b"), [None, NOT]);
    assert_eq!(mine.stat(&name("a")).unwrap().mode, 0o666);
    let attr = theirs.stat(&name("b")).unwrap();
    assert_eq!((attr.mode, attr.rights), (0o664, 4));
}

/// A key that the server has not been given may be one of this run only: its buffers are everybody's who comes without one.
#[test]
fn the_servers_user_is_one_person_with_a_key_or_without() {
    let [key, without, later] = [(); 3].map(|()| Person::new());
    let server = serve(&[&key]);
    let [with_key, without, later] = [&key, &without, &later].map(|person| person.client(&server));
    made(&without, "a");
    without.chmod(&name("a"), 0o600).unwrap();
    for client in [&later, &with_key] {
        assert_eq!(opens(client, "a"), [None, None]);
        client.chmod(&name("a"), 0o600).unwrap();
    }
    made(&with_key, "b");
    with_key.chmod(&name("b"), 0o600).unwrap();
    assert_eq!(opens(&later, "b"), [None, None]);
}

/// A peer with a connection of its own, which checks nothing.
struct Hostile {
    link: MessageChannel,
    id: u32,
}

impl Hostile {
    fn new(server: &Server, person: &Person) -> Self {
        let hello = PROTOCOL.hello(Status::Ok, 0);
        let param = PROTOCOL.param(Some(person.tls.clone()), hello);
        let dialled = MessageChannel::dial(&device().into(), PROTOCOL, server.local_addr(), &param);
        let Ok((link, _)) = dialled else {
            panic!("no connection");
        };
        Hostile { link, id: 0 }
    }

    fn ask(&mut self, request: Request) -> Reply {
        self.id += 1;
        let request = Request {
            id: self.id,
            ..request
        };
        self.link.send(&request.encode()).ok().unwrap();
        match self.link.next(PATIENCE, None) {
            Ok(Some(Event::Message(bytes))) => Reply::decode(&bytes).unwrap(),
            _ => panic!("no reply"),
        }
    }

    fn open(&mut self, text: &str, flags: Flags) -> Reply {
        self.ask(Request {
            flags,
            ..Request::named(Op::Open, &name(text))
        })
    }

    /// Writes to the region, or reads it, without the right. Returns the bytes that came.
    fn takes(mut self, region: Region, writes: bool) -> Vec<u8> {
        let memory = vec![b'X'; BYTES.len()];
        let mr = self.link.pd().reg_mr(memory, Access::LOCAL_WRITE).unwrap();
        let Region { addr, rkey, .. } = region;
        let to = RemoteAddr { addr, rkey };
        let wr = if writes {
            SendWr::write(7, to)
        } else {
            SendWr::read(7, to)
        };
        let posted = self.link.post(wr.sge(mr.sge(0, BYTES.len())));
        assert!(posted.is_ok());
        // The Write itself may be complete when it is sent; the connection ends because of it.
        let mut end = self.link.next(PATIENCE, None);
        while let Ok(Some(_)) = end {
            end = self.link.next(PATIENCE, None);
        }
        assert!(!self.link.is_alive(), "the peer goes on");
        mr.to_vec(0, BYTES.len()).unwrap()
    }
}

/// The library's check is not what protects a buffer: the key that the server gives has no other rights, and the RNIC refuses the rest.
#[test]
fn a_client_that_ignores_its_rights_changes_no_byte() {
    let [owner, other] = [(); 2].map(|()| Person::new());
    let server = serve(&[&owner, &other]);
    let mine = owner.client(&server);
    made(&mine, "a");
    mine.chmod(&name("a"), 0o644).unwrap();

    // No key at all for writing.
    let mut peer = Hostile::new(&server, &other);
    let both = Flags::READ.with(Flags::WRITE);
    for flags in [Flags::WRITE, both, Flags::READ.with(Flags::TRUNCATE)] {
        let refused = peer.open("a", flags);
        assert_eq!((refused.error, refused.region.rkey), (NOT, 0));
    }
    // The one for reading cannot be written to, and neither GROW nor TRUNCATE makes another.
    let opened = peer.open("a", Flags::READ);
    assert_eq!(
        (opened.error, opened.region.len),
        (None, BYTES.len() as u64)
    );
    for op in [Op::Grow, Op::Truncate] {
        let refused = peer.ask(Request {
            handle: opened.handle,
            size: 1,
            ..Request::new(op)
        });
        assert_eq!(refused.error, Some(Errno::BADF));
    }
    peer.takes(opened.region, true);
    assert_eq!(contents(&mine, "a"), BYTES);

    // A key for writing only is none for reading.
    mine.chmod(&name("a"), 0o602).unwrap();
    let mut peer = Hostile::new(&server, &other);
    assert_eq!(peer.open("a", Flags::READ).error, NOT);
    let opened = peer.open("a", Flags::WRITE);
    assert_eq!(opened.error, None);
    assert_eq!(peer.takes(opened.region, false), vec![b'X'; BYTES.len()]);

    // Names that are no keys, and one key too many.
    let mut peer = Hostile::new(&server, &owner);
    for odd in ["", "zz", "0+", "30", &"00".repeat(44)] {
        let refused = peer.ask(Request {
            other: name(odd),
            size: 1,
            ..Request::named(Op::Share, &name("a"))
        });
        assert_eq!(refused.error, Some(Errno::INVAL), "{odd}");
    }
    for _ in 0..64 {
        mine.share(&name("a"), &Person::new().key, true).unwrap();
    }
    let more = mine.share(&name("a"), &other.key, true);
    assert_eq!(errno(more), Some(Errno::NOSPC));
}
