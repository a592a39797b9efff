//! RDMA Write and Read.

use weft_verbs::{Access, RecvWr, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, End, Half, assert_bytes, assert_none, assert_ok, pattern, take, until};
use crate::need;

/// Writes of every length land at their place, change no byte around it, and make no completion at the target.
pub fn write_every_size(bed: &Bed) {
    let (a, b) = bed.pair();
    let room = bed.setup.largest + 32;
    let (src, dst) = (a.mr(room), b.mr(room));
    b.post_recv(RecvWr::new(0));
    for (i, len) in bed.sizes().enumerate() {
        let (id, data) = (i as u64, pattern(i as u64, len));
        src.write(5, &data).unwrap();
        dst.fill(0, room, 0xdd).unwrap();
        a.post(
            SendWr::write(id, dst.remote(7))
                .sge(src.sge(5, len))
                .signaled(),
        );
        assert_ok(&a.sent(), id, WcOpcode::Write, len);
        // A read after the write: when it is answered the write is in place.
        a.run(SendWr::read(1000, dst.remote(0)).sge(src.sge(0, 1)));
        assert_bytes(&dst, 7, &data, "written");
        assert_bytes(&dst, 0, &[0xdd; 7], "before it");
        assert_bytes(&dst, 7 + len, &[0xdd; 25], "after it");
    }
    assert_none(&b.rcq);
    a.run(SendWr::send(1));
    assert_ok(&b.received(), 0, WcOpcode::Recv, 0);
}

/// Reads of every length return the bytes, and make no completion at the target.
pub fn read_every_size(bed: &Bed) {
    let (a, b) = bed.pair();
    let room = bed.setup.largest + 32;
    let (dst, src) = (a.mr(room), b.mr(room));
    for (i, len) in bed.sizes().enumerate() {
        let (id, data) = (i as u64, pattern(77 + i as u64, len));
        src.write(9, &data).unwrap();
        dst.fill(0, room, 0xcc).unwrap();
        let wc = a.run(SendWr::read(id, src.remote(9)).sge(dst.sge(2, len)));
        assert_ok(&wc, id, WcOpcode::Read, len);
        assert_bytes(&dst, 2, &data, "read");
        assert_bytes(&dst, 0, &[0xcc; 2], "before it");
        assert_bytes(&dst, 2 + len, &[0xcc; 30], "after it");
    }
    assert_none(&b.rcq);
    assert_none(&b.scq);
}

/// The responder reads and writes too.
pub fn responder_reads_and_writes(bed: &Bed) {
    let (a, b) = bed.talking_pair();
    let (ma, mb) = (a.mr(300), b.mr(300));
    ma.write(0, &pattern(1, 100)).unwrap();
    mb.write(100, &pattern(2, 100)).unwrap();
    b.run(SendWr::write(1, ma.remote(100)).sge(mb.sge(100, 100)));
    b.run(SendWr::read(2, ma.remote(0)).sge(mb.sge(0, 100)));
    assert_bytes(&mb, 0, &pattern(1, 100), "read");
    assert_bytes(&ma, 100, &pattern(2, 100), "written");
}

/// A read scatters over several elements, a write gathers from several.
pub fn read_and_write_lists(bed: &Bed) {
    let (a, b) = bed.pair();
    let (ma, mb) = (a.mr(100_000), b.mr(100_000));
    let data = pattern(3, 40_000);
    ma.write(0, &data).unwrap();
    let wr = SendWr::write(1, mb.remote(11))
        .sge(ma.sge(0, 1))
        .sge(ma.sge(1, 0))
        .sge(ma.sge(1, 20_000))
        .sge(ma.sge(20_001, 19_999));
    a.run(wr);
    let wr = SendWr::read(2, mb.remote(11))
        .sge(ma.sge(90_000, 3))
        .sge(ma.sge(50_000, 29_997))
        .sge(ma.sge(80_001, 1))
        .sge(ma.sge(40_001, 9_999));
    a.run(wr);
    assert_bytes(&mb, 11, &data, "written");
    assert_bytes(&ma, 90_000, &data[..3], "first part");
    assert_bytes(&ma, 50_000, &data[3..30_000], "second part");
    assert_bytes(&ma, 80_001, &data[30_000..30_001], "third part");
    assert_bytes(&ma, 40_001, &data[30_001..], "fourth part");
}

/// Write with Immediate: the data is in place when the receive completes. The completion has the immediate and the length of the Write, and no byte of the
/// receive is used.
pub fn write_with_immediate(bed: &Bed) {
    need!(bed, immediate);
    let (a, b) = bed.pair();
    let room = bed.setup.largest + 1;
    let (src, dst, other) = (a.mr(room), b.mr(room), b.mr(16));
    other.fill(0, 16, 0xab).unwrap();
    for (i, len) in bed.sizes().enumerate() {
        let (id, data) = (i as u64, pattern(i as u64, len));
        src.write(0, &data).unwrap();
        b.post_recv(RecvWr::new(500 + id).sge(other.whole()));
        let imm = bed.imm(0x0123_4567_89ab_cdef ^ id);
        let wr = SendWr::write_imm(id, dst.remote(1), imm).sge(src.sge(0, len));
        let wc = a.run(if i % 2 == 0 { wr.solicited() } else { wr });
        assert_eq!(wc.opcode, WcOpcode::Write);
        let wc = b.received();
        assert_ok(&wc, 500 + id, WcOpcode::RecvWithImm, len);
        assert_eq!(wc.imm, Some(imm));
        assert_bytes(&dst, 1, &data, "written");
        assert_bytes(&other, 0, &[0xab; 16], "the receive's own bytes");
    }
}

/// A read that follows a write sees what was written; a write after a read may pass it, unless fenced.
pub fn write_then_read(bed: &Bed) {
    let (a, b) = bed.pair();
    let len = 30_000;
    let (ma, mb) = (a.mr(2 * len), b.mr(len));
    for round in 0..20 {
        let data = pattern(round, len);
        ma.write(0, &data).unwrap();
        a.post(SendWr::write(1, mb.remote(0)).sge(ma.sge(0, len)));
        a.run(SendWr::read(2, mb.remote(0)).sge(ma.sge(len, len)));
        assert_bytes(&ma, len, &data, "read back");
    }
}

/// A fenced request waits for the reads before it: the next request can send the read data.
pub fn fence(bed: &Bed) {
    let (a, b) = bed.pair();
    let len = 20_000;
    let (ma, mb) = (a.mr(len), b.mr(2 * len));
    for round in 0..20 {
        let data = pattern(1000 + round, len);
        mb.write(0, &data).unwrap();
        b.post_recv(RecvWr::new(round).sge(mb.sge(len, len)));
        a.qp.post_send(&[
            SendWr::read(1, mb.remote(0)).sge(ma.whole()),
            SendWr::send(2).sge(ma.whole()).fence().signaled(),
        ])
        .unwrap();
        assert_ok(&b.received(), round, WcOpcode::Recv, len);
        assert_bytes(&mb, len, &data, "what was read came back");
        assert_ok(&a.sent(), 2, WcOpcode::Send, len);
    }
}

/// Reads beyond ORD wait: with a depth of 1 many reads still all complete, in order.
pub fn read_depth_of_one(bed: &Bed) {
    let mut half = Half::default();
    half.param.ird = 1;
    half.param.ord = 1;
    let (a, b) = bed.pair_with(&half, &half);
    many_reads(&a, &b);
}

/// With different depths the smaller one applies, and the peer's IRD is never exceeded (that would end the stream).
pub fn read_depths_differ(bed: &Bed) {
    let mut first = Half::default();
    first.param.ord = 64;
    first.param.ird = 1;
    let mut second = Half::default();
    second.param.ird = 3;
    second.param.ord = 64;
    if bed.setup.options.revision == 1 {
        // Without negotiation the programs must agree themselves (RFC 5040 6.2).
        first.param.ord = 3;
        second.param.ord = 1;
    }
    let (a, b) = bed.pair_with(&first, &second);
    many_reads(&a, &b);
    many_reads(&b, &a);
}

fn many_reads(a: &End, b: &End) {
    let (ma, mb) = (a.mr(100 * 64), b.mr(100 * 64));
    let data = pattern(5, 6400);
    mb.write(0, &data).unwrap();
    let wrs: Vec<_> = (0..100usize)
        .map(|i| {
            SendWr::read(i as u64, mb.remote(i * 64))
                .sge(ma.sge(i * 64, 64))
                .signaled()
        })
        .collect();
    a.qp.post_send(&wrs).unwrap();
    for (i, wc) in take(&a.scq, 100).iter().enumerate() {
        assert_ok(wc, i as u64, WcOpcode::Read, 64);
    }
    assert_bytes(&ma, 0, &data, "all reads");
}

/// Requests of several kinds complete in the order posted, reads and writes mixed.
pub fn mixed_order(bed: &Bed) {
    let (a, b) = bed.pair();
    let (ma, mb) = (a.mr(4096), b.mr(4096));
    for i in 0..30u64 {
        b.post_recv(RecvWr::new(i));
    }
    let wrs: Vec<_> = (0..90u64)
        .map(|i| {
            match i % 3 {
                0 => SendWr::send(i),
                1 => SendWr::read(i, mb.remote(0)).sge(ma.sge(0, 100)),
                _ => SendWr::write(i, mb.remote(0)).sge(ma.sge(0, 100)),
            }
            .signaled()
        })
        .collect();
    a.qp.post_send(&wrs).unwrap();
    for (i, wc) in take(&a.scq, 90).iter().enumerate() {
        assert_eq!((wc.wr_id, wc.status), (i as u64, WcStatus::Success));
    }
}

/// One-sided operations proceed while the target's threads do other work.
pub fn target_is_asleep(bed: &Bed) {
    let (a, b) = bed.pair();
    let len = 100_000.min(bed.setup.largest);
    let (ma, mb) = (a.mr(len), b.mr(len));
    // The target polls once (and so takes over its connection), and never again.
    assert_none(&b.rcq);
    for round in 0..10 {
        ma.write(0, &pattern(round, len)).unwrap();
        a.run(SendWr::write(1, mb.remote(0)).sge(ma.whole()));
        ma.fill(0, len, 0).unwrap();
        a.run(SendWr::read(2, mb.remote(0)).sge(ma.whole()));
        assert_bytes(&ma, 0, &pattern(round, len), "read back");
    }
}

/// A target may poll its memory for a write: bytes arrive without any call of the library.
pub fn target_watches_memory(bed: &Bed) {
    let (a, b) = bed.pair();
    let mb = b.mr(8);
    for value in 1..20u64 {
        a.post(SendWr::write(1, mb.remote(0)).inline(&value.to_ne_bytes()));
        until("the write", || mb.load_u64(0).unwrap() == value);
    }
}

/// A forbidden access ends the stream: the request completes with the right status, the target gets an asynchronous event, and no byte changes.
pub fn refused_access(bed: &Bed) {
    #[derive(Clone, Copy)]
    enum Try {
        Write,
        Read,
    }
    let read_only = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let write_only = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    for (access, off, len, what) in [
        (read_only, 0, 8, Try::Write),
        (write_only, 0, 8, Try::Read),
        (write_only, 60, 8, Try::Write),
        (read_only, 60, 8, Try::Read),
        (write_only, 65, 1, Try::Write),
        (read_only, usize::MAX - 3, 8, Try::Read),
    ] {
        let (a, b) = bed.pair();
        let (src, dst) = (a.mr(64), b.pd.alloc_mr(64, access).unwrap());
        src.fill(0, 64, 1).unwrap();
        dst.fill(0, 64, 2).unwrap();
        b.post_recv(RecvWr::new(70));
        let wr = match what {
            Try::Write => SendWr::write(1, dst.remote(off)).sge(src.sge(0, len)),
            Try::Read => SendWr::read(1, dst.remote(off)).sge(src.sge(0, len)),
        };
        a.post(wr.signaled());
        let wc = a.sent();
        match what {
            // A write is complete when its bytes are with the transport; the Terminate may come later.
            Try::Write if !bed.is_roce() => assert!(
                matches!(
                    wc.status,
                    WcStatus::Success | WcStatus::RemAccessErr | WcStatus::WrFlushErr
                ),
                "{wc:?}"
            ),
            Try::Read | Try::Write => {
                assert_eq!(wc.status, WcStatus::RemAccessErr, "{wc:?}");
                assert_eq!(wc.vendor_err != 0, !bed.is_roce(), "{wc:?}");
            }
        }
        let flushed = b.received();
        assert_eq!((flushed.wr_id, flushed.status), (70, WcStatus::WrFlushErr));
        b.tells(|event| {
            matches!(event, weft_verbs::AsyncEvent::QpAccessErr { qp_num, reason }
                if *qp_num == b.qp.num() && *reason != 0)
        });
        a.tells(|event| {
            matches!(event, weft_verbs::AsyncEvent::QpFatal { qp_num, reason }
                if *qp_num == a.qp.num() && (*reason != 0 || bed.is_roce()))
        });
        assert_bytes(&dst, 0, &[2; 64], "the target's memory");
        assert_bytes(&src, 0, &[1; 64], "our memory");
    }
}

/// Zero-length operations touch no memory: no key is checked (RFC 5040 5.1).
pub fn zero_length_needs_no_key(bed: &Bed) {
    let (a, _b) = bed.pair();
    let nowhere = weft_verbs::RemoteAddr {
        addr: 0xdead,
        rkey: 0xbeef_0000,
    };
    a.run(SendWr::write(1, nowhere));
    a.run(SendWr::read(2, nowhere));
}

/// A request of ours with an invalid list fails locally, with a protection error, before a byte is sent.
pub fn bad_local_list(bed: &Bed) {
    for (kind, off, len, stale) in [
        (0, 60, 5, false),
        (0, 0, 4, true),
        (1, 64, 1, false),
        (2, 60, 5, false),
        (2, 0, 4, true),
        (3, 0, 4, false),
    ] {
        let (a, b) = bed.pair();
        let mr = if kind == 3 {
            a.pd.alloc_mr(64, Access::REMOTE_READ).unwrap()
        } else {
            a.mr(64)
        };
        mr.fill(0, 64, 3).unwrap();
        let target = b.mr(64);
        b.post_recv(RecvWr::new(1).sge(target.whole()));
        let mut sge = mr.sge(off, len);
        if stale {
            sge.lkey ^= 1;
        }
        let wr = match kind {
            0 => SendWr::send(1),
            1 => SendWr::write(1, target.remote(0)),
            _ => SendWr::read(1, target.remote(0)),
        };
        a.post(wr.sge(sge));
        let wc = a.sent();
        assert_eq!(
            (wc.wr_id, wc.status),
            (1, WcStatus::LocProtErr),
            "kind {kind}, {len} bytes at {off}: {wc:?}"
        );
        if bed.is_roce() {
            // The peer is not told.
            assert_eq!(b.qp.state(), weft_verbs::QpState::Rts);
        } else {
            assert_eq!(b.received().status, WcStatus::WrFlushErr);
        }
        assert_bytes(&mr, 0, &[3; 64], "our memory");
        assert_bytes(&target, 0, &[0; 64], "the peer's memory");
    }
}
