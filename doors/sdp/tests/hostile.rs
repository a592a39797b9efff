//! Peers that speak verbs, and lie: the connection ends, or only their own stream stops.

mod common;

use std::time::Duration;

use common::{LONG, device, listener, recv};
use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sdp::wire::{Body, Buffer, Hello, Message};
use weft_sdp::{Options, RecvFlags, Stream};
use weft_verbs::cm::{ConnParam, Connection, connect};
use weft_verbs::{Access, Cq, LocalMode, Mr, QpInit, RecvWr, SendWr};

/// A peer that is no stream of ours, with 64 receives.
struct Liar {
    conn: Connection,
    theirs: Hello,
    cq: Cq,
    _sink: Mr,
    memory: Mr,
    seq: u32,
}

fn hello() -> Hello {
    Hello {
        receives: 64,
        payload: 4096,
        locks: 16,
        atomics: true,
        lock_addr: 0,
        lock_key: 1,
    }
}

fn pair(hello: &Hello) -> Option<(Stream, Liar)> {
    let listener = listener(&device(LocalMode::Off), Options::default());
    let device = device(LocalMode::Off);
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256, None).unwrap();
    let param = ConnParam {
        private_data: hello.emit().to_vec(),
        ..ConnParam::default()
    };
    let conn = connect(listener.local_addr(), &pd, &QpInit::new(&cq, &cq), &param).ok()?;
    let sink = pd.alloc_mr(64 * 8192, Access::LOCAL_WRITE).unwrap();
    let recvs: Vec<RecvWr> = (0..64)
        .map(|i| RecvWr::new(i).sge(sink.sge(i as usize * 8192, 8192)))
        .collect();
    conn.qp.post_recv(&recvs).unwrap();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let memory = pd.alloc_mr(1 << 16, rights).unwrap();
    let theirs = Hello::parse(&conn.private_data).unwrap();
    let stream = listener.accept(Some(LONG)).unwrap();
    let liar = Liar {
        conn,
        theirs,
        cq,
        _sink: sink,
        memory,
        seq: 0,
    };
    Some((stream, liar))
}

impl Liar {
    fn message(&mut self, body: Body) -> Message {
        self.seq += 1;
        Message {
            pending: false,
            bufs: 64,
            seq: self.seq,
            ack: 0,
            body,
        }
    }

    fn send(&self, bytes: &[u8]) {
        let wr = SendWr::send(0).inline(bytes);
        let _ = self.conn.qp.post_send_one(wr);
    }

    fn say(&mut self, body: Body) {
        let message = self.message(body);
        let mut bytes = message.emit().to_vec();
        if let Body::Data { len, .. } = body {
            bytes.extend(vec![0x42; len as usize]);
        }
        self.send(&bytes);
    }

    fn buffer(&self, len: u32) -> Buffer {
        Buffer {
            addr: self.memory.addr(),
            key: self.memory.rkey(),
            len,
        }
    }
}

fn data(len: u32) -> Body {
    Body::Data { len, urgent: false }
}

/// After this, the victim's receive fails with `EPROTO`, or the end that the peer itself has made.
fn ends(name: &str, lie: impl FnOnce(&mut Liar)) {
    let (stream, mut liar) = pair(&hello()).unwrap();
    liar.say(data(3));
    assert_eq!(recv(&stream, 3, RecvFlags::WAITALL).unwrap(), b"BBB");
    lie(&mut liar);
    stream.set_recv_timeout(Some(LONG));
    let got = loop {
        match recv(&stream, 1 << 16, RecvFlags::empty()) {
            Ok(bytes) if !bytes.is_empty() => {}
            got => break got,
        }
    };
    assert_eq!(got, Err(Errno::PROTO), "{name}");
    assert_eq!(stream.take_error(), Some(Errno::PROTO), "{name}");
}

#[test]
fn lies_end_the_connection() {
    ends("a number that is not the next", |liar| {
        liar.seq += 1;
        liar.say(data(1));
    });
    ends("credits that were never taken", |liar| {
        let mut message = liar.message(data(0));
        message.bufs = 65;
        liar.send(&message.emit());
    });
    ends("an unknown message", |liar| {
        let mut bytes = liar.message(data(0)).emit();
        bytes[0] = 0x33;
        liar.send(&bytes);
    });
    ends("half a header", |liar| liar.send(&[0xff, 0, 0]));
    ends("a length that lies", |liar| {
        let bytes = liar.message(data(5)).emit();
        liar.send(&bytes);
    });
    ends("a source out of order", |liar| {
        let at = liar.buffer(8);
        liar.say(Body::SrcAvail { index: 1, at });
    });
    ends("more sources than locks", |liar| {
        let at = liar.buffer(8);
        for index in 0..17 {
            liar.say(Body::SrcAvail { index, at });
        }
    });
    ends("the end of a source that there is not", |liar| {
        liar.say(Body::RdmaRdCompl { index: 0, len: 1 });
    });
    ends("an update of no source", |liar| {
        let at = liar.buffer(8);
        liar.say(Body::SrcUpdate { index: 0, at });
    });
    ends("a write without a sink", |liar| {
        liar.say(Body::RdmaWrCompl { len: 4 });
    });
    ends("an answer to nothing", |liar| liar.say(Body::SinkCancelAck));
}

#[test]
fn data_after_the_end_ends_it() {
    let (stream, mut liar) = pair(&hello()).unwrap();
    liar.say(Body::DisConn);
    liar.say(data(1));
    // The end itself may be told before.
    let broken = loop {
        let ready = stream.wait_ready(PollFlags::empty(), Some(LONG)).unwrap();
        if ready.contains(PollFlags::ERR) || ready.is_empty() {
            break stream.take_error();
        }
    };
    assert_eq!(broken, Some(Errno::PROTO));
}

#[test]
fn a_source_that_cannot_be_read_ends_it() {
    let (stream, mut liar) = pair(&hello()).unwrap();
    let at = Buffer {
        addr: 0,
        key: 0x7777_7777,
        len: 100,
    };
    liar.say(Body::SrcAvail { index: 0, at });
    let got = recv(&stream, 100, RecvFlags::empty());
    assert!(
        matches!(got, Err(Errno::CONNRESET | Errno::PROTO)),
        "{got:?}"
    );
}

#[test]
fn a_lock_that_is_never_freed_stops_only_that_stream() {
    let (stream, mut liar) = pair(&hello()).unwrap();
    let lock = weft_verbs::RemoteAddr {
        addr: liar.theirs.lock_addr,
        rkey: liar.theirs.lock_key,
    };
    // "The sender is copying", for ever.
    let take = SendWr::compare_swap(1, lock, 0, 2)
        .sge(liar.memory.sge(0, 8))
        .signaled();
    liar.conn.qp.post_send_one(take).unwrap();
    let mut wc = [weft_verbs::Wc::default(); 1];
    loop {
        liar.cq.wait(&mut wc, Some(LONG)).unwrap();
        if wc[0].wr_id == 1 && wc[0].opcode == weft_verbs::WcOpcode::CompareSwap {
            break;
        }
    }
    let at = liar.buffer(100);
    liar.say(Body::SrcAvail { index: 0, at });
    stream.set_recv_timeout(Some(Duration::from_millis(50)));
    assert_eq!(recv(&stream, 100, RecvFlags::empty()), Err(Errno::AGAIN));
    // The other direction goes on.
    assert_eq!(common::send(&stream, b"still here"), Ok(10));
    stream.set_linger(Some(Duration::ZERO));
}

#[test]
fn a_lock_with_nonsense_ends_it() {
    let (stream, mut liar) = pair(&hello()).unwrap();
    let lock = weft_verbs::RemoteAddr {
        addr: liar.theirs.lock_addr,
        rkey: liar.theirs.lock_key,
    };
    let spoil = SendWr::swap(1, lock, 0x1234_5678).sge(liar.memory.sge(0, 8));
    liar.conn.qp.post_send_one(spoil).unwrap();
    let at = liar.buffer(100);
    liar.say(Body::SrcAvail { index: 0, at });
    let got = recv(&stream, 100, RecvFlags::empty());
    assert_eq!(got, Err(Errno::PROTO));
}

#[test]
fn bad_greetings_are_refused() {
    for bad in [
        Hello {
            receives: 2,
            ..hello()
        },
        Hello {
            payload: 0,
            ..hello()
        },
        Hello {
            locks: 0,
            ..hello()
        },
        Hello {
            lock_addr: 3,
            ..hello()
        },
    ] {
        assert!(pair(&bad).is_none(), "{bad:?}");
    }
}
