//! Lists, sockets and files.

use weft_mem::{Access, Backing, PdId, RecvList, Region, SendList, Span, Table};

const PD: PdId = PdId(1);

fn filled(table: &Table, len: usize) -> Region {
    let bytes = (0..len).map(|i| (i % 251) as u8).collect();
    table
        .register(PD, Backing::Owned(bytes), 0, Access::LOCAL_WRITE)
        .unwrap()
}

fn whole(table: &Table, r: &Region) -> Span {
    table
        .local(PD, r.stag(), 0, r.len() as u32, Access::LOCAL_WRITE)
        .unwrap()
}

#[test]
fn lists_copy_like_the_system_call() {
    let table = Table::new(4);
    let r = filled(&table, 100);
    let span = whole(&table, &r);
    let mut list = SendList::with_capacity(3);
    assert_eq!((list.iovs(), list.len_bytes()), (0, 0));
    list.push_bytes(b"head");
    list.push_bytes(b"");
    list.push_span(&span, 10, 5);
    list.push_span(&span, 100, 0);
    list.push_bytes(b"tail");
    assert_eq!((list.iovs(), list.len_bytes()), (3, 13));
    let mut out = vec![0];
    assert_eq!(list.copy_to(&mut out, 0), 0);
    assert_eq!(list.copy_to(&mut out, 6), 6);
    assert_eq!(out, b"\0head\x0a\x0b");
    out.clear();
    assert_eq!(list.copy_to(&mut out, usize::MAX), 13);
    assert_eq!(out, b"head\x0a\x0b\x0c\x0d\x0etail");

    let mut header = [0; 4];
    let mut list = RecvList::new();
    list.push_buf(&mut header);
    list.push_span(&span, 50, 6);
    list.push_span(&span, 0, 0);
    assert_eq!(list.len_bytes(), 10);
    assert_eq!(list.fill_from(b"HEADbody"), 8);
    assert_eq!(list.fill_from(b"HEADbody++more"), 10);
    assert_eq!(&header, b"HEAD");
    let mut out = Vec::new();
    span.extend(49, 8, &mut out);
    assert_eq!(out, b"\x31body++\x38");
}

#[test]
fn long_lists_know_what_is_registered() {
    let table = Table::new(4);
    let r = filled(&table, 300);
    let span = whole(&table, &r);
    let plain: Vec<u8> = (0..=255).collect();
    let mut list = SendList::new();
    let mut expected = Vec::new();
    for i in 0..300 {
        if i % 3 == 0 {
            list.push_bytes(&plain[i % 256..][..1]);
            expected.push((i % 256) as u8);
        } else {
            list.push_span(&span, i, 1);
            expected.push((i % 251) as u8);
        }
    }
    let mut out = Vec::new();
    assert_eq!(list.copy_to(&mut out, 1000), 300);
    assert_eq!(out, expected);
}

#[test]
#[should_panic(expected = "outside a span")]
fn a_list_stays_inside_its_span() {
    let table = Table::new(4);
    let r = filled(&table, 100);
    let span = whole(&table, &r);
    SendList::new().push_span(&span, 99, 2);
}

#[cfg(not(miri))]
mod system {
    use super::{Access, Backing, PD, RecvList, SendList, Table, filled, whole};
    use std::fs::File;
    use std::io::{ErrorKind, Read, Seek, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use weft_mem::{MemError, RawMemory};

    #[test]
    fn through_a_socket() {
        let table = Table::new(4);
        let (from, to) = (filled(&table, 2000), filled(&table, 2000));
        let (src, dst) = (whole(&table, &from), whole(&table, &to));
        let (near, far) = UnixStream::pair().unwrap();
        let nothing = RecvList::new().recv(far.as_fd());
        assert!(
            matches!(nothing, Ok(0)) || nothing.is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
        );

        // One range, several, and more than one system call takes.
        for pieces in [1, 3, 2000] {
            let each = 2000 / pieces;
            let mut send = SendList::new();
            for i in 0..pieces {
                send.push_span(&src, i * each, each);
            }
            let n = send.send(near.as_fd(), false).unwrap();
            assert_eq!(n, if pieces == 2000 { 1024 } else { each * pieces });
            to.fill(0, 2000, 0).unwrap();
            let mut head = [0; 10];
            let mut recv = RecvList::new();
            recv.push_buf(&mut head);
            recv.push_span(&dst, 10, 1990);
            assert_eq!(recv.recv(far.as_fd()).unwrap(), n);
            let (mut x, mut y) = (vec![0; n], vec![0; n]);
            from.read(0, &mut x).unwrap();
            to.read(0, &mut y).unwrap();
            y[..10].copy_from_slice(&head);
            assert_eq!(x, y);
        }
        let mut one = RecvList::new();
        one.push_span(&dst, 0, 1);
        let e = one.recv(far.as_fd()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::WouldBlock);
        drop(near);
        assert_eq!(one.recv(far.as_fd()).unwrap(), 0, "end of stream");
        let mut send = SendList::new();
        send.push_bytes(b"x");
        let e = send.send(far.as_fd(), false).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::BrokenPipe, "and no signal");
    }

    #[test]
    fn promised_memory_and_regions_through_a_socket() {
        let table = Table::new(4);
        let r = filled(&table, 1000);
        // SAFETY: the region outlives it, and hands out no references.
        let raw = unsafe { RawMemory::new(r.as_ptr(), r.len()) }.unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let far = far.as_fd();
        let fd = near.as_fd();
        assert_eq!(r.send_to_socket(fd, 1, 3, true).unwrap(), 3);
        assert_eq!(raw.send_to_socket(fd, 4, 3, false).unwrap(), 3);
        assert_eq!(raw.recv_from_socket(far, 500, 4).unwrap(), 4);
        assert_eq!(r.recv_from_socket(far, 504, 100).unwrap(), 2);
        let mut six = [0; 6];
        r.read(500, &mut six).unwrap();
        assert_eq!(six, [1, 2, 3, 4, 5, 6]);
        for e in [
            r.recv_from_socket(far, 0, 1).unwrap_err(),
            raw.recv_from_socket(far, 0, 1).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::WouldBlock);
        }
        for e in [
            r.send_to_socket(fd, 999, 2, false).unwrap_err(),
            r.recv_from_socket(far, 1001, 0).unwrap_err(),
            raw.send_to_socket(fd, 999, 2, false).unwrap_err(),
            raw.recv_from_socket(far, 1001, 0).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::InvalidInput);
        }
        drop(near);
        assert_eq!(raw.recv_from_socket(far, 0, 1).unwrap(), 0, "the end");
        for e in [
            r.send_to_socket(far, 0, 1, false).unwrap_err(),
            raw.send_to_socket(far, 0, 1, false).unwrap_err(),
        ] {
            assert_eq!(e.kind(), ErrorKind::BrokenPipe, "and no signal");
        }
    }

    #[test]
    fn through_a_file() {
        let table = Table::new(4);
        let r = filled(&table, 1000);
        let path = std::env::temp_dir().join(format!("weft-mem-{}", std::process::id()));
        let mut file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            r.write_to_file(file.as_fd(), Some(5), 0, 1000).unwrap(),
            1000
        );
        file.write_all(b"start").unwrap();
        let mut all = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut all).unwrap();
        assert_eq!((all.len(), &all[..7]), (1005, &b"start\x00\x01"[..]));

        assert_eq!(r.read_from_file(file.as_fd(), Some(0), 500, 5).unwrap(), 5);
        file.rewind().unwrap();
        assert_eq!(r.read_from_file(file.as_fd(), None, 505, 5).unwrap(), 5);
        let mut ten = [0; 10];
        r.read(500, &mut ten).unwrap();
        assert_eq!(&ten, b"startstart");
        assert_eq!(r.read_from_file(file.as_fd(), Some(1005), 0, 9).unwrap(), 0);
        assert_eq!(r.write_to_file(file.as_fd(), None, 998, 2).unwrap(), 2);
        let e = r.read_from_file(file.as_fd(), None, 999, 2).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        let e = r.write_to_file(file.as_fd(), None, 1001, 0).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn anonymous_pages_are_zero_lazy_and_lockable() {
        let table = Table::new(4);
        let big = table
            .register(PD, Backing::Anonymous(1 << 36), 0, Access::LOCAL_WRITE)
            .unwrap();
        assert!(big.as_ptr().addr().is_multiple_of(4096));
        big.store_u64((1 << 36) - 8, 1).unwrap();
        assert_eq!(big.load_u64(1 << 35), Ok(0));
        assert_eq!(big.deregister().unwrap(), None);
        let absurd = table.register(PD, Backing::Anonymous(1 << 60), 0, Access::empty());
        assert_eq!(absurd.err(), Some(MemError::NoMemory));

        if weft_sys::limits::memlock() >= 1 << 16 {
            let small = table
                .register(PD, Backing::Anonymous(1 << 12), 0, Access::empty())
                .unwrap();
            small.lock_pages().unwrap();
            small.lock_pages().unwrap();
            small.deregister().unwrap();
        }
    }
}
