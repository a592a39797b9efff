//! A peer that uses verbs, and is no EXS socket.
#![allow(dead_code, reason = "each test program uses its part")]

use weft_exs::{Mode, Socket};
use weft_verbs::cm::{ConnParam, Connection, connect};
use weft_verbs::{Access, Cq, LinkOptions, Mr, Pd, Qp, QpInit, RecvWr, SendWr, Wc};
use weft_wire::exs::{Body, HEADER_LEN, Hello, Kind, MAX_LEN, Message};

/// A possible greeting of a stream socket.
pub(crate) fn hello() -> Hello {
    Hello {
        kind: Kind::Stream,
        mode: Mode::Dynamic,
        immediate: true,
        credits: 64,
        small: 256,
        ring: None,
    }
}

/// Connects and sends the greeting `hello`; the memory has 64 receives of 512 bytes each, numbered by their ids.
pub(crate) fn greet(to: &Socket, pd: &Pd, cq: &Cq, hello: &Hello) -> (Connection, Mr) {
    greet_over(LinkOptions::default(), to, pd, cq, hello)
}

/// As [`greet`], over a connection with these settings.
pub(crate) fn greet_over(
    options: LinkOptions,
    to: &Socket,
    pd: &Pd,
    cq: &Cq,
    hello: &Hello,
) -> (Connection, Mr) {
    let param = ConnParam {
        private_data: hello.emit().to_vec(),
        options,
        ..ConnParam::default()
    };
    let addr = to.local_addr().unwrap();
    let conn = connect(addr, pd, &QpInit::new(cq, cq), &param).unwrap();
    let sink = pd.alloc_mr(64 * 512, Access::LOCAL_WRITE).unwrap();
    let recvs: Vec<RecvWr> = (0..64)
        .map(|i| RecvWr::new(i).sge(sink.sge(i as usize * 512, 512)))
        .collect();
    conn.qp.post_recv(&recvs).unwrap();
    (conn, sink)
}

/// Sends a message, with or without credits.
pub(crate) fn say(qp: &Qp, credits: u16, body: Body) {
    let mut bytes = [0; MAX_LEN];
    let n = Message { credits, body }.emit(&mut bytes);
    assert!(n >= HEADER_LEN);
    let message = SendWr::send(0).inline(&bytes[..n]);
    qp.post_send_one(message).unwrap();
}

/// The message that has arrived in one of the receives of [`greet`].
pub(crate) fn heard(sink: &Mr, wc: &Wc) -> Message {
    let bytes = sink.to_vec(wc.wr_id as usize * 512, wc.byte_len as usize);
    let bytes = bytes.unwrap();
    Message::parse_head(&bytes, bytes.len()).unwrap()
}
