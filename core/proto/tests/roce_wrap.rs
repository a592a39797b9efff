//! Packet sequence numbers wrap: what was asked for a whole turn ago is not taken for what is asked now.

use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::roce::{Config, Connection, Rx};
use weft_wire::roce::{AtomicEth, DEFAULT_PKEY, Header, Op as Wire, Opcode, Reth, Service};

const NOW: Now = Duration::from_secs(1);
const FIRST: u32 = 100;

/// Everything that goes now; the last packet.
fn drain(conn: &mut Connection) -> Option<Vec<u8>> {
    let (mut last, mut raw) = (None, Vec::new());
    // Long answers are interrupted once in a while.
    for _ in 0..2 {
        while conn.next_tx(NOW, &mut raw).is_some() {
            last = Some(std::mem::take(&mut raw));
        }
    }
    last
}

#[test]
#[cfg_attr(miri, ignore = "sixteen million packets")]
fn a_repeated_atomic_is_not_a_read_of_the_turn_before() {
    let mut conn: Connection = Connection::new(Config {
        service: Service::Rc,
        dest_qp: 9,
        pkey: DEFAULT_PKEY,
        mtu: 256,
        sq_psn: 0,
        rq_psn: FIRST,
        ord: 16,
        ird: 16,
        timeout: 14,
        retry_count: 2,
        rnr_retry: 1,
        rnr_timer: 12,
        window: 64,
    });
    // Four Reads of 2^22 packets use all 2^24 numbers once.
    for turn in 0..4 {
        let read = Header {
            reth: Some(Reth {
                va: 0,
                rkey: 7,
                len: 1 << 30,
            }),
            ..Header::new(Opcode::rc(Wire::ReadRequest), 5, FIRST + (turn << 22))
        };
        assert!(matches!(conn.rx(NOW, &read, 0), Rx::ReadRequested { .. }));
        conn.accept_read();
        while drain(&mut conn).is_some() {}
    }
    let atomic = Header {
        atomic: Some(AtomicEth {
            va: 8,
            rkey: 7,
            swap_add: 1,
            compare: 0,
        }),
        ..Header::new(Opcode::rc(Wire::FetchAdd), 5, FIRST)
    };
    assert!(matches!(
        conn.rx(NOW, &atomic, 0),
        Rx::AtomicRequested { .. }
    ));
    conn.atomic_done(41);
    let first = drain(&mut conn).expect("an answer");
    // The answer was lost, and the request comes again.
    assert!(matches!(conn.rx(NOW, &atomic, 0), Rx::Nothing));
    assert_eq!(drain(&mut conn), Some(first));
}
