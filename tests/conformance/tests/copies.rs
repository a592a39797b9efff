//! The number of copies of received payload bytes.

use weft_conformance::bed::{Bed, Half, Setup, take};
use weft_verbs::{RecvWr, SendWr};

const ROUNDS: u64 = 100;

/// Large payloads are placed without an intermediate copy, even if each is followed by a short message that announces it.
#[test]
fn bulk_is_received_in_its_place() {
    for len in [40_000, 64 << 10, 256 << 10] {
        for with_imm in [true, false] {
            let bed = Bed::new(Setup::tcp().with(|options| options.crc = false)).expect("a bed");
            let far = Half {
                recvs: (0..ROUNDS).map(RecvWr::new).collect(),
                ..Half::default()
            };
            let (near, far) = bed.pair_with(&Half::default(), &far);
            let (from, to) = (near.mr(len), far.mr(len));
            let sge = from.sge(0, len);
            for round in 0..ROUNDS {
                if with_imm {
                    near.run(SendWr::write_imm(round, to.remote(0), 7).sge(sge));
                } else {
                    near.post(SendWr::write(round, to.remote(0)).sge(sge));
                    near.run(SendWr::send(round).inline(&[]));
                }
            }
            take(&far.rcq, ROUNDS as usize);
            let counters = far.qp.counters();
            let all = counters.rx_direct + counters.rx_copied;
            assert_eq!(all, ROUNDS * len as u64);
            assert!(
                counters.rx_copied < all / 20,
                "{len} B, with immediate data {with_imm}: {counters:?}"
            );
        }
    }
}
