//! Sends and receives: data, lengths, lists, inline data, order.

use weft_verbs::{PostReason, RecvWr, SendWr, Sge, WcOpcode, WcStatus};

use super::bed::{Bed, Half, Mr, assert_bytes, assert_none, assert_ok, pattern, take, until};
use crate::need;

/// Messages of every length arrive whole, and no byte beyond them changes.
pub fn every_size(bed: &Bed) {
    let (a, b) = bed.pair();
    let room = bed.setup.largest + 16;
    let (src, dst) = (a.mr(room), b.mr(room));
    for (i, len) in bed.sizes().enumerate() {
        let data = pattern(i as u64, len);
        src.write(1, &data).unwrap();
        dst.fill(0, room, 0xee).unwrap();
        b.post_recv(RecvWr::new(i as u64).sge(dst.sge(3, len)));
        let wc = a.run(SendWr::send(100 + i as u64).sge(src.sge(1, len)));
        assert_ok(&wc, 100 + i as u64, WcOpcode::Send, len);
        let wc = b.received();
        assert_ok(&wc, i as u64, WcOpcode::Recv, len);
        assert_eq!(wc.qp_num, b.qp.num());
        assert_eq!((wc.imm, wc.invalidated, wc.vendor_err), (None, None, 0));
        assert_bytes(&dst, 3, &data, "message");
        assert_bytes(&dst, 0, &[0xee; 3], "before it");
        assert_bytes(&dst, 3 + len, &[0xee; 13], "after it");
    }
}

/// The responder may send as well, once the initiator has sent; both directions at once.
pub fn both_ways(bed: &Bed) {
    let half = || Half::default();
    let (a, b) = bed.pair_with(&half(), &half());
    let len = 70_001.min(bed.setup.largest);
    let (ma, mb) = (a.mr(2 * len), b.mr(2 * len));
    ma.write(0, &pattern(1, len)).unwrap();
    mb.write(0, &pattern(2, len)).unwrap();
    for round in 0..8 {
        a.post_recv(RecvWr::new(round).sge(ma.sge(len, len)));
        b.post_recv(RecvWr::new(round).sge(mb.sge(len, len)));
        a.post(SendWr::send(round).sge(ma.sge(0, len)).signaled());
        b.post(SendWr::send(round).sge(mb.sge(0, len)).signaled());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_ok(&a.sent(), round, WcOpcode::Send, len);
                assert_ok(&a.received(), round, WcOpcode::Recv, len);
            });
            assert_ok(&b.sent(), round, WcOpcode::Send, len);
            assert_ok(&b.received(), round, WcOpcode::Recv, len);
        });
        assert_bytes(&ma, len, &pattern(2, len), "from the responder");
        assert_bytes(&mb, len, &pattern(1, len), "from the initiator");
    }
}

/// A message is gathered from several elements and scattered over several others, cut at odd places, empty elements and
/// several regions among them.
pub fn scatter_gather(bed: &Bed) {
    let (a, b) = bed.pair();
    let (s1, s2) = (a.mr(100_000), a.mr(100_000));
    let (d1, d2) = (b.mr(100_000), b.mr(100_000));
    let cuts: &[(&[usize], &[usize])] = &[
        (&[1, 2, 3, 0, 5], &[11]),
        (&[11], &[1, 0, 2, 3, 5]),
        (&[7, 4093, 1], &[4000, 100, 1]),
        (&[20_001, 1, 30_011, 0, 9], &[3, 29_999, 20_020]),
        (&[1; 8], &[1; 8]),
        (&[0, 0, 0], &[0]),
        (&[255, 1, 16_000, 16_001], &[16_384, 16_384]),
    ];
    for (i, (from, to)) in cuts.iter().enumerate() {
        let (id, total) = (i as u64, from.iter().sum());
        let elements = from.len().max(to.len());
        if total > bed.setup.largest || elements > bed.max_sge() as usize {
            continue;
        }
        let data = pattern(id, total);
        for mr in [&d1, &d2] {
            mr.fill(0, mr.len(), 0xaa).unwrap();
        }
        let (mut send, mut recv) = (SendWr::send(id), RecvWr::new(id));
        let mut rest = &data[..];
        for (mr, off, len) in places(from, [&s1, &s2]) {
            let (now, later) = rest.split_at(len);
            mr.write(off, now).unwrap();
            send = send.sge(mr.sge(off, len));
            rest = later;
        }
        for (mr, off, len) in places(to, [&d1, &d2]) {
            recv = recv.sge(mr.sge(off, len));
        }
        b.post_recv(recv);
        a.run(send);
        assert_ok(&b.received(), id, WcOpcode::Recv, total);
        let mut rest = &data[..];
        for (mr, off, len) in places(to, [&d1, &d2]) {
            let (now, later) = rest.split_at(len.min(rest.len()));
            assert_bytes(mr, off, now, "scattered part");
            assert_bytes(mr, off + len, &[0xaa; 13], "after it");
            rest = later;
        }
    }
}

/// The places of a list's elements: alternating between two regions, from their ends downwards, with gaps.
fn places<'a>(lens: &[usize], mrs: [&'a Mr; 2]) -> Vec<(&'a Mr, usize, usize)> {
    let mut tops = mrs.map(Mr::len);
    let place = |(k, len): (usize, &usize)| {
        tops[k % 2] -= len + 13;
        (mrs[k % 2], tops[k % 2], *len)
    };
    lens.iter().enumerate().map(place).collect()
}

/// A receive may be longer than its message: the rest of it stays as it was.
pub fn receive_longer_than_message(bed: &Bed) {
    let (a, b) = bed.pair();
    let dst = b.mr(64);
    dst.fill(0, 64, 0x55).unwrap();
    b.post_recv(RecvWr::new(1).sge(dst.sge(0, 20)).sge(dst.sge(30, 20)));
    a.run(SendWr::send(1).inline(&[7; 23]));
    assert_ok(&b.received(), 1, WcOpcode::Recv, 23);
    assert_bytes(&dst, 0, &[7; 20], "first element");
    assert_bytes(&dst, 20, &[0x55; 10], "between");
    assert_bytes(&dst, 30, &[7; 3], "second element");
    assert_bytes(&dst, 33, &[0x55; 31], "unused");
}

/// Inline data is copied when it is posted: the source may be overwritten at once. It needs no region.
pub fn inline_is_taken_at_once(bed: &Bed) {
    let (a, b) = bed.pair();
    let dst = b.mr(256 * 64);
    let mut data = vec![0; 256];
    let most = a.max_inline(256) as usize;
    let len = |i: usize| (i * 4).min(most);
    for i in 0..64usize {
        b.post_recv(RecvWr::new(i as u64).sge(dst.sge(i * 256, 256)));
        data.fill(i as u8);
        a.post(SendWr::send(i as u64).inline(&data[..len(i)]));
        data.fill(0xff);
    }
    for (i, wc) in take(&b.rcq, 64).iter().enumerate() {
        assert_ok(wc, i as u64, WcOpcode::Recv, len(i));
        assert_bytes(&dst, i * 256, &vec![i as u8; len(i)], "inline data");
    }
    assert_none(&a.scq);
}

/// Receives are consumed in the order posted, messages arrive in the order sent.
pub fn in_order(bed: &Bed) {
    let (a, b) = bed.pair();
    let dst = b.mr(100 * 8);
    let wrs: Vec<_> = (0..100usize)
        .map(|i| RecvWr::new(i as u64).sge(dst.sge(i * 8, 8)))
        .collect();
    b.qp.post_recv(&wrs).unwrap();
    let wrs: Vec<_> = (0..100u64)
        .map(|i| SendWr::send(i).inline(&i.to_ne_bytes()))
        .collect();
    a.qp.post_send(&wrs).unwrap();
    for (i, wc) in take(&b.rcq, 100).iter().enumerate() {
        assert_ok(wc, i as u64, WcOpcode::Recv, 8);
        assert_eq!(dst.load_u64(i * 8).unwrap(), i as u64);
    }
}

/// Unsignaled requests make no completion; a signaled one completes all before it, and frees their places.
pub fn unsignaled(bed: &Bed) {
    let half = Half {
        max_send_wr: 16,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&half, &Half::default());
    let dst = b.mr(8);
    for round in 0..20u64 {
        for i in 0..16u64 {
            b.post_recv(RecvWr::new(i).sge(dst.whole()));
            let wr = SendWr::send(round * 16 + i).inline(&[1; 8]);
            // All places are free again, as the signaled completion of the last round showed.
            a.post(if i == 15 { wr.signaled() } else { wr });
        }
        assert_ok(&a.sent(), round * 16 + 15, WcOpcode::Send, 8);
        take(&b.rcq, 16);
    }
    assert_none(&a.scq);
}

/// `sq_sig_all` makes every request signaled.
pub fn all_signaled(bed: &Bed) {
    let half = Half {
        sq_sig_all: true,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&half, &Half::default());
    let mr = b.mr(64);
    for i in 0..10 {
        b.post_recv(RecvWr::new(i));
        a.post(SendWr::send(2 * i));
        a.post(SendWr::write(2 * i + 1, mr.remote(0)).inline(&[1; 9]));
    }
    for (i, wc) in take(&a.scq, 20).iter().enumerate() {
        let (opcode, len) = if i % 2 == 0 {
            (WcOpcode::Send, 0)
        } else {
            (WcOpcode::Write, 9)
        };
        assert_ok(wc, i as u64, opcode, len);
    }
}

/// A message longer than its receive ends the stream: length error here, an error at the peer, and no byte beyond the receive changes.
pub fn message_too_long(bed: &Bed) {
    let (a, b) = bed.pair();
    let dst = b.mr(64);
    dst.fill(0, 64, 0x11).unwrap();
    b.post_recv(RecvWr::new(1).sge(dst.sge(0, 8)));
    b.post_recv(RecvWr::new(2).sge(dst.sge(0, 8)));
    a.post(SendWr::send(1).inline(&[9; 9]).signaled());
    let wcs = take(&b.rcq, 2);
    assert_eq!((wcs[0].wr_id, wcs[0].status), (1, WcStatus::LocLenErr));
    assert_eq!((wcs[1].wr_id, wcs[1].status), (2, WcStatus::WrFlushErr));
    assert_bytes(&dst, 8, &[0x11; 56], "beyond the receive");
    // The transport had the send before the peer's error, or the send was flushed or blamed: one completion in each case.
    assert_eq!(a.sent().wr_id, 1);
    until("the sender's end", || {
        a.qp.state() == weft_verbs::QpState::Error
    });
}

/// A send without a receive ends the stream. Over RoCE it ends the sender, which is told to come again as often as it may; the receiver goes on.
pub fn no_receive(bed: &Bed) {
    let (a, b) = bed.pair();
    a.post(SendWr::send(1).inline(&[1]));
    if bed.is_roce() {
        assert_eq!(a.sent().status, WcStatus::RnrRetryExcErr);
        assert_eq!(b.qp.state(), weft_verbs::QpState::Rts);
        return assert_none(&b.rcq);
    }
    for end in [&a, &b] {
        until("both ends", || end.qp.state() == weft_verbs::QpState::Error);
    }
    assert_none(&b.rcq);
}

/// Every reason to refuse a post. The requests before the refused one are accepted.
pub fn refused_posts(bed: &Bed) {
    let half = Half {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_sge: 2,
        max_inline: 16,
        ..Half::default()
    };
    let (a, b) = bed.pair_with(&half, &half);
    let mr = a.mr(64);
    let remote = b.mr(64).remote(0);
    let sge = mr.sge(0, 1);
    let reason = |wr: SendWr| a.qp.post_send_one(wr).unwrap_err().reason;
    assert_eq!(
        reason(SendWr::send(0).sges(&[sge; 3])),
        PostReason::TooManySges { asked: 3, max: 2 }
    );
    let max = a.max_inline(16);
    let long = vec![0; max as usize + 1];
    assert_eq!(
        reason(SendWr::send(0).inline(&long)),
        PostReason::InlineTooLong {
            asked: max + 1,
            max
        }
    );
    assert_eq!(
        reason(SendWr::send(0).inline(&[0; 4]).sge(sge)),
        PostReason::Inline
    );
    assert_eq!(
        reason(SendWr::read(0, remote).inline(&[0; 4])),
        PostReason::Inline
    );
    assert_eq!(
        reason(SendWr::fetch_add(0, remote, 1).sge(mr.sge(0, 7))),
        PostReason::Length
    );
    assert_eq!(
        reason(SendWr::compare_swap(0, remote, 1, 2)),
        PostReason::Length
    );
    let huge = Sge {
        len: u32::MAX,
        ..sge
    };
    assert_eq!(
        reason(SendWr::send(0).sge(huge).sge(sge)),
        PostReason::Length
    );
    let recv = |wr: RecvWr| a.qp.post_recv(&[wr]).unwrap_err().reason;
    assert_eq!(recv(RecvWr::new(0).sge(huge).sge(huge)), PostReason::Length);
    assert_eq!(
        recv(RecvWr::new(0).sge(sge).sge(sge).sge(sge)),
        PostReason::TooManySges { asked: 3, max: 2 }
    );
    // Two good ones, then a bad one, then a good one that must not be accepted.
    for _ in 0..3 {
        b.post_recv(RecvWr::new(0));
    }
    let error =
        a.qp.post_send(&[
            SendWr::send(1).signaled(),
            SendWr::send(2).signaled(),
            SendWr::send(3).sges(&[sge; 3]),
            SendWr::send(4).signaled(),
        ])
        .unwrap_err();
    assert_eq!(
        (error.index, error.reason),
        (2, PostReason::TooManySges { asked: 3, max: 2 })
    );
    let ids: Vec<_> = take(&a.scq, 2).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [1, 2]);
    take(&b.rcq, 2);
    // Receives: one is left at b.
    for _ in 0..3 {
        b.post_recv(RecvWr::new(9));
    }
    let error = b.qp.post_recv(&[RecvWr::new(9)]).unwrap_err();
    assert_eq!((error.index, error.reason), (0, PostReason::Full));
    // Reads are outstanding until answered, so the send queue of four places fills up.
    let wrs: Vec<_> = (0..5)
        .map(|i| SendWr::read(i, remote).sge(mr.sge(0, 4)).signaled())
        .collect();
    let error = a.qp.post_send(&wrs).unwrap_err();
    assert_eq!((error.index, error.reason), (4, PostReason::Full));
}

/// A Send with immediate data consumes one receive, which gets both; other messages are unaffected.
pub fn with_immediate(bed: &Bed) {
    need!(bed, immediate);
    let (a, b) = bed.talking_pair();
    for (near, far) in [(&a, &b), (&b, &a)] {
        for size in bed.sizes().filter(|size| *size > 0) {
            let data = pattern(size as u64, size);
            let imm = bed.imm(0xfedc_ba98_7654_3210 ^ size as u64);
            let other = bed.imm(!imm);
            let from = near.mr_of(&data);
            let to = far.mr(size + 3);
            for id in 1..=4 {
                far.post_recv(
                    RecvWr::new(id)
                        .sge(to.sge(0, size / 2))
                        .sge(to.sge(size / 2, size - size / 2 + 3)),
                );
            }
            let half = size / 2;
            let wr = SendWr::send_imm(1, imm).sge(from.sge(0, half));
            near.run(wr.sge(from.sge(half, size - half)));
            let wc = far.received();
            assert_ok(&wc, 1, WcOpcode::Recv, size);
            assert_eq!((wc.imm, wc.invalidated), (Some(imm), None));
            assert_bytes(&to, 0, &data, "send with immediate");
            to.fill(0, size, 0).unwrap();
            near.post(SendWr::send_imm(2, other).sge(from.whole()));
            near.post(SendWr::send(3).sge(from.whole()));
            near.run(SendWr::write_imm(4, to.remote(0), imm).sge(from.whole()));
            for (id, opcode, imm) in [
                (2, WcOpcode::Recv, Some(other)),
                (3, WcOpcode::Recv, None),
                (4, WcOpcode::RecvWithImm, Some(imm)),
            ] {
                let wc = far.received();
                assert_eq!((wc.wr_id, wc.status), (id, WcStatus::Success));
                assert_eq!((wc.opcode, wc.imm), (opcode, imm));
            }
            assert_bytes(&to, 0, &data, "all of them");
        }
        // Inline, and without data.
        let to = far.mr(16);
        far.post_recv(RecvWr::new(5).sge(to.whole()));
        far.post_recv(RecvWr::new(6).sge(to.whole()));
        near.run(SendWr::send_imm(5, 7).inline(b"inline"));
        near.run(SendWr::send_imm(6, 8));
        let wc = far.received();
        assert_ok(&wc, 5, WcOpcode::Recv, 6);
        assert_eq!(wc.imm, Some(7));
        assert_bytes(&to, 0, b"inline", "inline data");
        let wc = far.received();
        assert_ok(&wc, 6, WcOpcode::Recv, 0);
        assert_eq!(wc.imm, Some(8));
    }
}

/// A Send with immediate data that is longer than its receive ends the stream.
pub fn too_long_with_immediate(bed: &Bed) {
    need!(bed, immediate);
    let (a, b) = bed.talking_pair();
    b.post_recv(RecvWr::new(1).sge(b.mr(16).sge(0, 4)));
    a.post(SendWr::send_imm(1, 1).inline(b"longer"));
    assert_eq!(b.received().status, WcStatus::LocLenErr);
}
