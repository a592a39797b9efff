//! The objects of any device: on the soft RNIC, and on weft's own drop-in libraries as the machine's RNIC.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::time::Duration;

use weft_verbs::any::{Choice, Cq, Device, Mr, Qp, QpInit, cm};
use weft_verbs::cm::{ConnParam, ConnectError};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Access, EndReason, PostReason, RecvWr, SendWr, Wc, WcStatus};

const PATIENCE: Duration = Duration::from_secs(10);
const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn rnic() -> Device {
    weft_nic::Libraries::of(Some(weft_dropin::libraries())).unwrap();
    // Both devices have every address, and rdma_cm takes the first.
    let choice = Choice::Named("weft0".into());
    choice.rnic_at(ANY_PORT).unwrap().expect("an RNIC")
}

fn both(test: impl Fn(Device)) {
    test(weft_verbs::Device::open().unwrap().into());
    test(rnic());
}

/// The request or the dial that a queue pair is made for.
enum Way {
    Out(cm::Dial),
    In(cm::Request),
}

struct Side {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    private_data: Vec<u8>,
}

impl Side {
    fn new(device: &Device, way: Way, words: &[u8]) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = pd.alloc_mr(8192, rights).unwrap();
        let init = QpInit::new(&cq, &cq);
        let qp = match &way {
            Way::Out(dial) => dial.create_qp(&pd, &init),
            Way::In(request) => request.create_qp(&pd, &init),
        };
        let qp = qp.unwrap();
        for id in 100..104 {
            let receive = RecvWr::new(id).sge(mr.sge(4096, 4096));
            qp.post_recv_one(receive).unwrap();
        }
        let early = qp.post_send_one(SendWr::send(1)).unwrap_err();
        assert_eq!(early.reason, PostReason::State);
        let connection = match way {
            Way::Out(dial) => dial.connect(qp, &said(words)),
            Way::In(request) => request.accept(qp, &said(words)),
        };
        let cm::Connection { qp, private_data } = connection.unwrap();
        Self {
            qp,
            cq,
            mr,
            private_data,
        }
    }

    #[track_caller]
    fn completion(&self) -> Wc {
        let mut wc = [Wc::default()];
        assert_eq!(self.cq.wait(&mut wc, Some(PATIENCE)).unwrap(), 1);
        wc[0]
    }
}

fn said(words: &[u8]) -> ConnParam {
    ConnParam {
        private_data: words.to_vec(),
        ..ConnParam::default()
    }
}

/// The initiator and the responder.
fn pair(device: &Device) -> (Side, Side) {
    let listener = cm::Listener::bind(device, ANY_PORT, 4, &ConnParam::default()).unwrap();
    let peer = listener.local_addr();
    std::thread::scope(|scope| {
        let responder = scope.spawn(|| {
            let request = listener.next_request(Some(PATIENCE)).expect("a request");
            assert!(request.private_data().starts_with(b"a request"));
            assert!(request.peer_addr().ip().is_loopback());
            Side::new(&request.device(), Way::In(request), b"a reply")
        });
        let dial = cm::Dial::new(device, peer, PATIENCE).unwrap();
        let initiator = Side::new(device, Way::Out(dial), b"a request");
        (initiator, responder.join().unwrap())
    })
}

#[test]
fn messages_and_one_sided_requests_arrive() {
    both(|device| {
        let (a, b) = pair(&device);
        assert!(a.private_data.starts_with(b"a reply"));
        assert_eq!(a.qp.peer_addr().map(|addr| addr.ip()), Some(ANY_PORT.ip()));
        a.mr.write(0, b"by Write").unwrap();
        let write = SendWr::write(1, b.mr.remote(64)).sge(a.mr.sge(0, 8));
        let read = SendWr::read(2, b.mr.remote(64)).sge(a.mr.sge(128, 8));
        a.qp.post_send(&[write, read.signaled()]).unwrap();
        let wc = a.completion();
        assert_eq!((wc.wr_id, wc.status), (2, WcStatus::Success));
        assert_eq!(a.mr.to_vec(128, 8).unwrap(), b"by Write");
        assert_eq!(b.mr.to_vec(64, 8).unwrap(), b"by Write");

        let inline = SendWr::send(3).inline(b"inline").signaled();
        a.qp.post_send_one(inline).unwrap();
        assert_eq!(a.completion().wr_id, 3);
        let wc = b.completion();
        assert_eq!(
            (wc.wr_id, wc.byte_len, wc.status),
            (100, 6, WcStatus::Success)
        );
        assert_eq!(b.mr.to_vec(4096, 6).unwrap(), b"inline");

        let long = SendWr::send(4).inline(&[0; 5000]);
        let refused = a.qp.post_send_one(long).unwrap_err();
        assert!(matches!(refused.reason, PostReason::InlineTooLong { .. }));
    });
}

#[test]
fn the_end_is_told_once_and_flushes() {
    both(|device| {
        let (a, b) = pair(&device);
        let (tell, ended) = mpsc::channel();
        b.qp.on_end(move |reason| tell.send(reason).unwrap());
        drop(a.qp);
        assert_eq!(
            ended.recv_timeout(PATIENCE).unwrap(),
            EndReason::Disconnected
        );
        assert_eq!(b.completion().status, WcStatus::WrFlushErr);
        // The first hook is gone with its channel.
        assert!(ended.recv().is_err());
        let (tell, late) = mpsc::channel();
        b.qp.on_end(move |reason| tell.send(reason).unwrap());
        assert_eq!(late.try_recv(), Ok(EndReason::Disconnected));
    });
}

#[test]
fn a_wrong_key_is_refused() {
    both(|device| {
        let (a, b) = pair(&device);
        let mut wrong = b.mr.remote(0);
        wrong.rkey ^= 0xffff_ff00;
        a.qp.post_send_one(SendWr::read(1, wrong).sge(a.mr.sge(0, 8)).signaled())
            .unwrap();
        // On one host the request itself fails, over a wire the connection.
        assert_ne!(a.completion().status, WcStatus::Success);
    });
}

#[test]
fn a_rejection_has_private_data() {
    both(|device| {
        let listener = cm::Listener::bind(&device, ANY_PORT, 4, &ConnParam::default()).unwrap();
        let dial = cm::Dial::new(&device, listener.local_addr(), PATIENCE).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(4).unwrap());
        let qp = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let request = listener.next_request(Some(PATIENCE)).expect("a request");
                request.reject(b"not you").unwrap();
            });
            match dial.connect(qp, &ConnParam::default()) {
                Err(ConnectError::Rejected { private_data }) => {
                    assert!(private_data.starts_with(b"not you"));
                }
                other => panic!("{:?}", other.err()),
            }
        });
        assert!(listener.next_request(Some(Duration::ZERO)).is_none());
    });
}

#[test]
fn nobody_who_waits_for_completions_is_left_asleep() {
    const THREADS: usize = 3;
    both(|device| {
        let (a, b) = pair(&device);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| assert_eq!(b.completion().status, WcStatus::Success));
            }
            for id in 0..THREADS as u64 {
                a.qp.post_send_one(SendWr::send(id)).unwrap();
            }
        });
    });
}

#[test]
fn objects_of_two_devices_are_refused() {
    let soft: Device = weft_verbs::Device::open().unwrap().into();
    let rnic = rnic();
    let (pd, cq) = (soft.alloc_pd().unwrap(), rnic.create_cq(4).unwrap());
    let dial = cm::Dial::new(&soft, ANY_PORT, PATIENCE).unwrap();
    let refused = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).err().unwrap();
    assert!(refused.to_string().contains("two devices"), "{refused}");
    let pd = rnic.alloc_pd().unwrap();
    let refused = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).err().unwrap();
    assert!(
        refused.to_string().contains("not of the connection"),
        "{refused}"
    );
    assert!(pd.soft().is_none() && cq.soft().is_none());
}

#[test]
fn an_rnic_carries_no_tls() {
    let rnic = rnic();
    let param = ConnParam {
        tls: Some(Tls::new(Identity::generate().unwrap()).unwrap()),
        ..ConnParam::default()
    };
    let refused = cm::Listener::bind(&rnic, ANY_PORT, 4, &param)
        .err()
        .unwrap();
    assert!(
        refused
            .to_string()
            .contains("the RNIC weft0 cannot carry TLS"),
        "{refused}"
    );
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_the_others() {
    rnic();
    let choice: Choice = "mlx5_9".parse().unwrap();
    let error = choice.rnic_to(ANY_PORT).err().unwrap().to_string();
    assert!(error.contains("no RDMA device mlx5_9"), "{error}");
    assert!(error.contains("weft0"), "{error}");
    assert_eq!("".parse(), Ok(Choice::Soft));
    assert_eq!("soft".parse(), Ok(Choice::Soft));
    assert!(Choice::Soft.rnic_to(ANY_PORT).unwrap().is_none());
    assert!(Choice::Auto.rnic_to(ANY_PORT).unwrap().is_none());
}
