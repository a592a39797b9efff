//! Clients and a server in one process: over TLS, and in shared memory.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weft_fs::name::{Endpoint, Name};
use weft_fs::server::{Config, Server};
use weft_fs::wire::{Flags, Op, Request};
use weft_fs::{Client, Errno, Error, File, OpenOptions, Settings};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Device, LocalMode};

fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

fn config(quota: u64, keeps: bool) -> Config {
    Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        dir: None,
        quota,
        keeps,
        max_clients: 8,
        tls: tls(),
        admit: Arc::new(|_| false),
        open: false,
        via: weft_fs::Via::default(),
    }
}

fn serve(quota: u64, keeps: bool) -> Server {
    Server::start(config(quota, keeps)).unwrap()
}

fn client_of(port: u16, mode: LocalMode) -> Client {
    let endpoint = Endpoint {
        host: "127.0.0.1".into(),
        port,
    };
    let settings = Settings {
        device: Some(Device::builder().local(mode).open().unwrap()),
        ..Settings::new(Arc::new(tls()))
    };
    Client::connect(&endpoint, settings).unwrap()
}

fn client(server: &Server, mode: LocalMode) -> Client {
    client_of(server.local_addr().port(), mode)
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn new() -> OpenOptions {
    OpenOptions::read().with(Flags::WRITE).with(Flags::CREATE)
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    std::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    })
    .take(len)
    .collect()
}

fn all(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.stat().unwrap().size as usize];
    assert_eq!(file.pread(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

/// Waits until something holds that another thread or process brings about.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn errno<T>(done: Result<T, Error>) -> Errno {
    match done {
        Ok(_) => panic!("it was done"),
        Err(e) => e.errno(),
    }
}

#[test]
fn what_is_written_is_read_over_each_transport() {
    let server = serve(64 << 20, true);
    for (mode, transport) in [(LocalMode::Off, "tls"), (LocalMode::Require, "local")] {
        let client = client(&server, mode);
        assert_eq!(client.transport().unwrap(), transport);
        let bytes = pattern(3_000_001, 7);
        let file = client.open(&name("a"), new()).unwrap();
        // Small writes that follow one another, a large one, and one back into the middle.
        let mut at = 0;
        for part in bytes[..1_500_000].chunks(4096) {
            assert_eq!(file.pwrite(part, at).unwrap(), part.len());
            at += part.len() as u64;
        }
        file.pwrite(&bytes[1_500_000..], at).unwrap();
        file.pwrite(&bytes[5..300], 5).unwrap();
        file.sync().unwrap();
        assert!(all(&file) == bytes, "{transport}: as a whole");
        // In small pieces, read ahead; then at random.
        let mut got: Vec<u8> = Vec::new();
        let mut part = [0; 5000];
        loop {
            let n = file.pread(&mut part, got.len() as u64).unwrap();
            if n == 0 {
                break;
            }
            got.extend(&part[..n]);
        }
        assert!(got == bytes, "{transport}: in pieces");
        for at in [2_999_990, 0, 1_234_567, 77] {
            let n = file.pread(&mut part, at).unwrap();
            assert!(part[..n] == bytes[at as usize..at as usize + n]);
        }
        assert_eq!(file.pread(&mut part, 1 << 40).unwrap(), 0);
        file.close().unwrap();
        let found = client.list(&Name::default()).unwrap();
        assert_eq!((found.len(), found[0].attr.size), (1, 3_000_001));
        client.unlink(&name("a")).unwrap();
        assert_eq!(errno(client.stat(&name("a"))), Errno::NOENT);
    }
    until("the memory is free", || server.used() == 0);
}

#[test]
fn the_last_close_frees_also_when_the_client_is_lost() {
    let server = serve(1 << 20, false);
    let (one, two) = (
        client(&server, LocalMode::Off),
        client(&server, LocalMode::Auto),
    );
    let a = one.open(&name("a"), new()).unwrap();
    assert_eq!(
        server.used(),
        0,
        "nothing is allocated before the first write"
    );
    a.pwrite(b"hello", 0).unwrap();
    a.sync().unwrap();
    let b = two.open(&name("a"), OpenOptions::read()).unwrap();
    a.close().unwrap();
    assert_eq!(all(&b), b"hello");
    // Neither closed nor dropped: its connection goes.
    std::mem::forget(b);
    drop(two);
    let c = one.open(&name("c"), new()).unwrap();
    c.pwrite(b"x", 0).unwrap();
    drop(c);
    // The forgotten file holds its client; the buffer is still there.
    assert_eq!(one.stat(&name("a")).unwrap().size, 5);
    assert_eq!(errno(one.stat(&name("c"))), Errno::NOENT);
}

#[test]
fn appenders_do_not_overwrite_each_other() {
    let server = serve(16 << 20, true);
    let file = client(&server, LocalMode::Auto)
        .open(&name("log"), new())
        .unwrap();
    file.pwrite(b"first\n", 0).unwrap();
    file.sync().unwrap();
    let writers: Vec<_> = (0..4_u8)
        .map(|i| {
            let mode = [LocalMode::Off, LocalMode::Auto][usize::from(i % 2)];
            let client = client(&server, mode);
            std::thread::spawn(move || {
                let log = client
                    .open(&name("log"), new().with(Flags::APPEND))
                    .unwrap();
                for n in 0..50 {
                    let line = format!("{i} {n:03} {}\n", "x".repeat(usize::from(i) * 7));
                    log.append(line.as_bytes()).unwrap();
                    if n % 3 == 0 {
                        log.sync().unwrap();
                    }
                }
                log.close().unwrap();
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    let text = String::from_utf8(all(&file)).unwrap();
    let mut lines: Vec<_> = text.lines().skip(1).collect();
    // Each writer's lines are in its order.
    for i in 0..4 {
        let own = lines
            .iter()
            .filter(|line| line.starts_with(&format!("{i} ")));
        let numbers: Vec<_> = own.map(|line| line[2..5].parse::<u32>().unwrap()).collect();
        assert_eq!(numbers, (0..50).collect::<Vec<_>>());
    }
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), 200);
}

#[test]
fn an_append_comes_after_what_others_have_written_since_the_last_one() {
    let server = serve(16 << 20, true);
    let (a, b) = (
        client(&server, LocalMode::Off),
        client(&server, LocalMode::Off),
    );
    let other = b.open(&name("log"), new()).unwrap();
    let log = a.open(&name("log"), new().with(Flags::APPEND)).unwrap();
    let append = |text: &[u8]| log.append(text).and_then(|_| log.sync()).unwrap();
    append(b"one,");
    other.pwrite(b"others,", 4).unwrap();
    other.sync().unwrap();
    append(b"two");
    other.truncate(16).unwrap();
    append(b"!");
    assert_eq!(all(&other), b"one,others,two\0\0!");
}

#[test]
fn truncation_under_a_reader_and_growth_under_another() {
    let server = serve(16 << 20, true);
    let writer = client(&server, LocalMode::Off);
    let reader = client(&server, LocalMode::Off);
    let w = writer.open(&name("a"), new()).unwrap();
    let old = pattern(500_000, 3);
    w.pwrite(&old, 0).unwrap();
    w.sync().unwrap();
    let r = reader.open(&name("a"), OpenOptions::read()).unwrap();
    let mut part = vec![0; 100_000];
    assert_eq!(r.pread(&mut part, 400_000).unwrap(), 100_000);
    w.truncate(10).unwrap();
    // The reader goes on with the old generation, whole, until it looks.
    assert_eq!(r.pread(&mut part, 100_000).unwrap(), 100_000);
    assert!(part == old[100_000..200_000]);
    assert_eq!(r.stat().unwrap().size, 10);
    assert_eq!(r.pread(&mut part, 0).unwrap(), 10);
    assert!(part[..10] == old[..10]);
    w.pwrite(b"more", 1_000_000).unwrap();
    w.sync().unwrap();
    assert_eq!(r.pread(&mut part, 999_998).unwrap(), 6);
    assert_eq!(&part[..6], b"\0\0more");
}

#[test]
fn the_quota_and_other_limits_hold() {
    let server = serve(1_000_000, true);
    let client = client(&server, LocalMode::Off);
    let a = client.open(&name("a"), new()).unwrap();
    a.pwrite(&vec![1; 600_000], 0).unwrap();
    let b = client.open(&name("b"), new()).unwrap();
    assert_eq!(errno(b.pwrite(&vec![2; 500_000], 0)), Errno::NOSPC);
    assert_eq!(errno(b.grow(u64::MAX >> 1)), Errno::NOSPC);
    assert_eq!(errno(b.pwrite(b"x", i64::MAX as u64)), Errno::FBIG);
    // A small write is gathered; it fails when it goes out.
    b.pwrite(&[3; 1000], 999_000).unwrap();
    assert_eq!(errno(b.sync()), Errno::NOSPC);
    b.pwrite(&[4; 1000], 0).unwrap();
    b.sync().unwrap();
    let hinted = OpenOptions {
        size: 2_000_000,
        ..new()
    };
    assert_eq!(errno(client.open(&name("c"), hinted)), Errno::NOSPC);
    assert_eq!(client.usage().unwrap(), (1_000_000, 601_000));
    let ro = client.open(&name("a"), OpenOptions::read()).unwrap();
    assert_eq!(errno(ro.pwrite(b"x", 0)), Errno::BADF);
    // Handles of one client.
    let mut files = Vec::new();
    let refused = loop {
        match client.open(&name("a"), OpenOptions::read()) {
            Ok(file) => files.push(file),
            Err(e) => break e.errno(),
        }
    };
    assert_eq!((files.len(), refused), (1024 - 3, Errno::MFILE));
    // Another client is not concerned.
    drop(files);
    let hinted = OpenOptions {
        size: 5000,
        ..new()
    };
    let d = client.open(&name("d"), hinted).unwrap();
    assert_eq!(d.stat().unwrap().size, 0, "lazily");
    d.pwrite(b"x", 0).unwrap();
    assert_eq!(d.stat().unwrap().size, 5000);
}

#[test]
fn clients_beyond_the_limit_are_told() {
    let server = Server::start(Config {
        max_clients: 1,
        ..config(1 << 20, true)
    })
    .unwrap();
    let first = client(&server, LocalMode::Off);
    let endpoint = first.endpoint().clone();
    let again = || Client::connect(&endpoint, Settings::new(Arc::new(tls())));
    assert_eq!(errno(again()), Errno::USERS);
    drop(first);
    until("there is room again", || again().is_ok());
}

#[test]
fn a_lost_server_is_an_error_and_a_new_one_is_another() {
    let server = serve(1 << 20, true);
    let port = server.local_addr().port();
    let client = client(&server, LocalMode::Off);
    let a = client.open(&name("a"), new()).unwrap();
    a.pwrite(b"hello", 0).unwrap();
    a.sync().unwrap();
    drop(server);
    let mut part = [0; 5];
    assert_eq!(errno(a.pread(&mut part, 0)), Errno::IO);
    assert_eq!(errno(a.pwrite(b"x", 0)), Errno::IO);
    // One that is being killed still takes connections, and ends them.
    let dying = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let ends = std::thread::spawn(move || drop(dying.accept().unwrap()));
    assert_eq!(errno(a.pread(&mut part, 0)), Errno::IO);
    ends.join().unwrap();
    let server = Server::start(Config {
        bind: ([127, 0, 0, 1], port).into(),
        ..config(1 << 20, true)
    })
    .unwrap();
    assert_eq!(
        errno(a.pread(&mut part, 0)),
        Errno::STALE,
        "it is not there"
    );
    let other = client.open(&name("a"), new()).unwrap();
    other.pwrite(b"other", 0).unwrap();
    other.sync().unwrap();
    assert_eq!(errno(a.pread(&mut part, 0)), Errno::STALE, "it is another");
    assert_eq!(errno(a.sync()), Errno::STALE);
    drop(server);
}

#[test]
fn an_error_of_a_background_sync_stays_for_the_close() {
    let server = serve(1000, true);
    let client = client(&server, LocalMode::Off);
    let file = client.open(&name("a"), new()).unwrap();
    file.pwrite(&[1; 2000], 0).unwrap();
    file.sync_in_background();
    assert_eq!(errno(file.close()), Errno::NOSPC);
}

/// Forwards connections to a port. While `cut` is set, the next bytes of a client end its connection.
fn cutter(to: u16, cut: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (
                client.unwrap(),
                TcpStream::connect(("127.0.0.1", to)).unwrap(),
            );
            let (mut back, mut ahead) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back, &mut ahead));
            let cut = Arc::clone(&cut);
            std::thread::spawn(move || {
                let mut bytes = [0; 16384];
                while let Ok(n @ 1..) = client.read(&mut bytes) {
                    if cut.swap(false, Ordering::SeqCst) || server.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(Shutdown::Both);
                let _ = server.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn writes_that_a_read_lost_with_the_connection_are_an_error_of_the_close() {
    let server = serve(1 << 20, true);
    let cut = Arc::new(AtomicBool::new(false));
    let port = cutter(server.local_addr().port(), Arc::clone(&cut));
    let client = client_of(port, LocalMode::Off);
    let file = client.open(&name("a"), new()).unwrap();
    file.pwrite(b"old", 0).unwrap();
    file.sync().unwrap();
    file.pwrite(b"newer", 0).unwrap();
    cut.store(true, Ordering::SeqCst);
    assert_eq!(file.stat().unwrap().size, 3);
    assert!(!cut.load(Ordering::SeqCst), "the connection was cut");
    assert_eq!(errno(file.close()), Errno::IO);
}

#[test]
fn files_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(2_500_000, 11);
    std::fs::write(dir.path().join("movie"), &bytes).unwrap();
    let server = Server::start(Config {
        dir: Some(dir.path().into()),
        ..config(8 << 20, false)
    })
    .unwrap();
    let port = server.local_addr().port();
    let client = client(&server, LocalMode::Off);
    let file = client.open(&name("movie"), OpenOptions::read()).unwrap();
    assert!(all(&file) == bytes);
    assert_eq!(errno(client.open(&name("movie"), new())), Errno::ROFS);
    // A changed file is another one for those who open it again, also when the connection was lost.
    drop(server);
    let server = Server::start(Config {
        bind: ([127, 0, 0, 1], port).into(),
        dir: Some(dir.path().into()),
        ..config(8 << 20, false)
    })
    .unwrap();
    assert!(all(&file) == bytes, "the same file is opened again");
    drop(file);
    assert_eq!(server.used(), 0);
}

#[test]
fn programs_of_the_host_get_the_memory_itself() {
    let server = serve(1 << 20, false);
    let addr = server.local_addr();
    let open = |flags| {
        let request = Request {
            flags,
            ..Request::named(Op::Open, &name("a"))
        };
        weft_fs::local_server::ask(addr, &request).unwrap().unwrap()
    };
    let rw = Flags::READ.with(Flags::WRITE).with(Flags::CREATE);
    let (_, fd) = open(rw);
    let here = std::fs::File::from(fd.unwrap());
    std::os::unix::fs::FileExt::write_all_at(&here, b"from here", 0).unwrap();
    // A client elsewhere sees it, and what it writes is seen here.
    let client = client(&server, LocalMode::Off);
    let there = client
        .open(&name("a"), OpenOptions::read().with(Flags::WRITE))
        .unwrap();
    assert_eq!(all(&there), b"from here");
    there.pwrite(b"there", 5).unwrap();
    there.sync().unwrap();
    let mut bytes = [0; 10];
    std::os::unix::fs::FileExt::read_exact_at(&here, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"from there");
    assert!(here.set_len(0).is_err(), "it never shrinks");
    drop(there);
    let (reply, _) = weft_fs::local_server::ask(addr, &Request::named(Op::Stat, &name("a")))
        .unwrap()
        .unwrap();
    assert_eq!(reply.attr.size, 10);
    drop(here);
    until("the last close frees", || server.used() == 0);
    let (reply, fd) = open(Flags::READ);
    assert_eq!((reply.error, fd.is_none()), (Some(Errno::NOENT), true));
}
