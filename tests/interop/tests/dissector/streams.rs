//! Greetings and messages of EXS and SDP, inside iWARP over TCP.

use std::thread;

use weft_exs::{Context, Design, Kind, Memory, Mode, RecvFlags, Region, Socket};
use weft_sdp::{Listener, Options, RecvFlags as SdpFlags, Sink, Source, Stream};
use weft_verbs::{Device, LocalMode, RawMemory};

use super::LONG;
use super::capture::{Capture, Heard, Relay, Side, have_tshark};

/// What is captured is what goes over TCP.
fn over_tcp() -> Device {
    let device = Device::builder().local(LocalMode::Off).open();
    device.expect("a device")
}

/// The packets of weft's streams, as tshark shows them: these fields, and the column of information in front.
fn shown(heard: &[(Side, Vec<u8>)], fields: &[&str]) -> Vec<String> {
    let mut capture = Capture::new();
    capture.tcp(heard);
    let mut all = vec!["_ws.col.Protocol", "_ws.col.Info"];
    all.extend_from_slice(fields);
    let rows = capture.rows(&all);
    let ours = rows.iter().filter_map(|row| {
        let (protocol, rest) = row.split_once(';')?;
        protocol.starts_with("weft ").then(|| rest.to_owned())
    });
    ours.collect()
}

#[track_caller]
fn has(rows: &[String], wanted: &str) {
    let found = rows.iter().any(|row| row.contains(wanted));
    assert!(found, "{wanted}: {rows:#?}");
}

/// A connection of which all is heard, from one that has greeted to one that was closed.
fn exs(
    kind: Kind,
    options: impl Fn(&mut weft_exs::Options),
    talk: impl FnOnce(&Socket, &Socket, &Context),
) -> Heard {
    let context = Context::new(over_tcp()).expect("a context");
    let socket = || {
        let socket = Socket::new(&context, false, kind).expect("a socket");
        socket.set_options(|o| options(o)).expect("set");
        socket
    };
    let (listener, near) = (socket(), socket());
    let any = "127.0.0.1:0".parse().expect("an address");
    listener.bind(any).expect("bound");
    listener.listen(1).expect("it listens");
    let relay = Relay::to(listener.local_addr().expect("an address"));
    near.connect_wait(relay.addr).expect("connected");
    let far = listener.accept_wait(Some(LONG)).expect("accepted");
    talk(&near, &far, &context);
    drop((near, far, listener));
    relay.finish()
}

#[test]
fn tshark_reads_exs() {
    if !have_tshark() {
        return;
    }
    // No receive is there: what is sent is small, and goes in its message.
    let heard = exs(
        Kind::Stream,
        |_| {},
        |near, far, context| {
            near.send_wait(Memory::from(b"hello".to_vec()))
                .expect("sent");
            let place = Region::alloc(context, 5).expect("memory").whole();
            assert_eq!(far.recv_wait(&place, RecvFlags::WAITALL), Ok(5));
        },
    );
    let fields = ["weft_exs.version", "weft_exs.type", "weft_exs.immediate"];
    let rows = shown(&heard, &fields);
    assert_eq!(rows[..2], ["greeting;1;1;1", "greeting;1;1;1"], "{rows:#?}");
    let fields = ["weft_exs.kind", "weft_exs.len", "weft_exs.payload"];
    let rows = shown(&heard, &fields);
    has(&rows, "Small, 5 bytes;3;5;68656c6c6f");
    // Only straight into memory of a receive, which an advert names.
    let heard = exs(
        Kind::Stream,
        |o| o.mode = Mode::Direct,
        |near, far, context| {
            let place = Region::alloc(context, 50_000).expect("memory").whole();
            thread::scope(|s| {
                let waiting = s.spawn(|| far.recv_wait(&place, RecvFlags::WAITALL));
                near.send_wait(Memory::from(vec![7; 50_000])).expect("sent");
                assert_eq!(waiting.join().expect("no panic"), Ok(50_000));
            });
        },
    );
    let fields = ["weft_exs.waitall", "weft_exs.seq", "weft_exs.phase"];
    let rows = shown(&heard, &fields);
    has(&rows, "Advert, 50000 bytes;1;0;0");
    has(&rows, "Written, direct, 50000 bytes");
    has(&rows, "Fin, 0 bytes");
    // Messages of which the sender says where they are.
    let heard = exs(
        Kind::SeqPacket,
        |o| {
            o.design = Design::Source;
            o.small_packet_max = 0;
        },
        |near, far, context| {
            let place = Region::alloc(context, 50_000).expect("memory").whole();
            thread::scope(|s| {
                let waiting = s.spawn(|| far.recv_wait(&place, RecvFlags::empty()));
                near.send_wait(Memory::from(vec![7; 40_000])).expect("sent");
                assert_eq!(waiting.join().expect("no panic"), Ok(40_000));
            });
        },
    );
    let rows = shown(&heard, &["weft_exs.kind", "weft_exs.index"]);
    has(&rows, "Source, 40000 bytes;10;0");
    has(&rows, "SourceDone, 40000 bytes;11;0");
    assert!(
        !rows.iter().any(|row| row.contains("malformed")),
        "{rows:#?}"
    );
}

#[test]
fn tshark_reads_sdp() {
    if !have_tshark() {
        return;
    }
    let device = over_tcp();
    let options = Options {
        mode: weft_sdp::Mode::Zsdp,
        zero_copy: 16 << 10,
        ..Options::default()
    };
    let any = "127.0.0.1:0".parse().expect("an address");
    let listener = Listener::bind(&device, any, 1, &options).expect("it listens");
    let relay = Relay::to(listener.local_addr());
    let near = Stream::connect(&device, relay.addr, &options, Some(LONG)).expect("connected");
    let far = listener.accept(Some(LONG)).expect("accepted");
    assert_eq!(near.send(&[Source::Bytes(b"hello")], false), Ok(5));
    near.send_urgent(b'!', false).expect("sent");
    let large = RawMemory::leak(vec![7; 100_000]);
    let mut got = vec![0; 100_005];
    thread::scope(|s| {
        let waiting = s.spawn(|| {
            let mut done = 0;
            while done < got.len() {
                let to = &mut [Sink::Bytes(&mut got[done..])];
                done += far.recv(to, SdpFlags::empty()).expect("it came");
            }
        });
        assert_eq!(near.send(&[Source::Raw(&large)], false), Ok(100_000));
        waiting.join().expect("no panic");
    });
    drop((near, far, listener));
    let heard = relay.finish();
    let rows = shown(
        &heard,
        &["weft_sdp.version", "weft_sdp.atomics", "weft_sdp.receives"],
    );
    assert_eq!(
        rows[..2],
        ["greeting;1;1;32", "greeting;1;1;32"],
        "{rows:#?}"
    );
    let rows = shown(
        &heard,
        &["weft_sdp.payload", "weft_sdp.oob_pres", "weft_sdp.bytes"],
    );
    let all = rows.join("\n");
    for wanted in [
        "Data, mseq 1",
        "Data, mseq 2",
        "68656c6c6f",
        "SrcAvail, mseq 3",
        "100000",
        "RdmaRdCompl",
        "DisConn",
    ] {
        assert!(all.contains(wanted), "{wanted}: {all}");
    }
    assert!(!all.contains("malformed"), "{all}");
}
