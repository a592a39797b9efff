//! A peer that speaks verbs, and is no EXS socket.

use weft_exs::{Mode, Socket};
use weft_verbs::cm::{ConnParam, Connection, connect};
use weft_verbs::{Access, Cq, Mr, Pd, QpInit, RecvWr};
use weft_wire::exs::{Hello, Kind};

/// What a stream socket might say.
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

/// Connects and says `hello`; the memory has 64 receives of 512 bytes each, by their numbers.
pub(crate) fn greet(to: &Socket, pd: &Pd, cq: &Cq, hello: &Hello) -> (Connection, Mr) {
    let param = ConnParam {
        private_data: hello.emit().to_vec(),
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
