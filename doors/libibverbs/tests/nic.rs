//! Connections with weft's drop-in libraries as the system's: what ends them, and children of fork.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;

use weft_nic::cm::{Connection, Listener, Outgoing, Param};
use weft_nic::{
    Access, Context, Cq, End, Error, Libraries, Mr, Op, Pd, Qp, QpInit, Remote, SendWr, devices,
};

const PATIENCE: Duration = Duration::from_secs(10);

struct Side {
    connection: Connection,
    qp: Qp,
    cq: Cq,
    mr: Mr,
    pd: Pd,
}

fn side(
    context: &Context,
    connect: impl FnOnce(&Pd, &QpInit<'_>) -> Result<(Qp, Connection), Error>,
) -> Side {
    let pd = context.alloc_pd().unwrap();
    let channel = context.create_channel().unwrap();
    let cq = context.create_cq(16, Some(&channel)).unwrap();
    let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
    let (qp, connection) = connect(&pd, &QpInit::new(&cq)).unwrap();
    Side {
        connection,
        qp,
        cq,
        mr,
        pd,
    }
}

/// What a child of fork finds.
fn refused<T>(result: Result<T, Error>) -> bool {
    let error = result.err();
    error.is_some_and(|error| error.to_string().contains("forked") && error.hint().is_some())
}

fn pair() -> (Side, Side, Listener) {
    Libraries::of(Some(weft_dropin::libraries())).unwrap();
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = Listener::bind(at).unwrap();
    let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.port()));
    let (a, b) = std::thread::scope(|scope| {
        let responder = scope.spawn(|| {
            let incoming = listener
                .request(Some(PATIENCE))
                .unwrap()
                .expect("a request");
            side(&incoming.context().unwrap(), |pd, init| {
                let qp = incoming.create_qp(pd, init)?;
                Ok((qp, incoming.accept(&Param::default())?))
            })
        });
        let outgoing = Outgoing::resolve(None, peer, PATIENCE).unwrap();
        let a = side(&outgoing.context().unwrap(), |pd, init| {
            let qp = outgoing.create_qp(pd, init)?;
            let connection = outgoing.connect(&Param::default(), PATIENCE)?;
            Ok((qp, connection))
        });
        (a, responder.join().unwrap())
    });
    (a, b, listener)
}

#[test]
fn an_error_of_the_queue_pair_is_told() {
    let (a, b, _listener) = pair();
    let (tell, told) = mpsc::channel();
    b.connection.on_end(move |end| tell.send(end).unwrap());
    let wrong = Remote {
        addr: b.mr.addr(),
        rkey: b.mr.rkey() ^ 0xffff_ff00,
    };
    let sges = [a.mr.sge(0..8)];
    let read = SendWr::new(1, Op::Read(wrong), &sges);
    a.qp.post_send(&read).unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(End::BadAccess));
    assert_eq!(b.connection.end(), Some(End::BadAccess));
}

#[test]
fn a_child_of_fork_is_refused_and_harms_nobody() {
    let (a, b, listener) = pair();
    // SAFETY: the child calls the library, which must refuse, and ends without running anything of its parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_refused = refused(a.pd.context().alloc_pd())
            && refused(a.cq.poll(&mut [weft_nic::Wc::default()]))
            && refused(a.qp.post_recv(1, &[]))
            && refused(devices())
            && refused(listener.context())
            && refused(listener.request(Some(Duration::ZERO)));
        drop((a, b, listener));
        // SAFETY: it does not return.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    let mut status = 0;
    // SAFETY: our child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's calls are refused");
    b.qp.post_recv(7, &[b.mr.sge(0..64)]).unwrap();
    a.mr.write(0, b"the parent's");
    let sges = [a.mr.sge(0..12)];
    a.qp.post_send(&SendWr::new(1, Op::Send(None), &sges))
        .unwrap();
    let wc = b.cq.wait(PATIENCE).unwrap().expect("a completion");
    assert!(wc.is_success() && wc.id == 7, "{wc:?}");
    assert_eq!(b.mr.read(0..12), b"the parent's");
}
