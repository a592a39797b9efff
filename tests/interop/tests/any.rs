//! The objects of any device: on the soft RNIC, and on weft's own drop-in libraries as the machine's RNIC. With `WEFT_TEST_RNIC=DEVICE@ADDRESS` on that device
//! of the machine instead.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use weft_verbs::any::{Choice, Cq, Device, Mr, Qp, QpInit, cm};
use weft_verbs::cm::{ConnParam, ConnectError};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Access, EndReason, PostReason, RecvWr, SendWr, Wc, WcStatus};

const PATIENCE: Duration = Duration::from_secs(10);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The name of the RNIC, and its address.
fn tested() -> (String, IpAddr) {
    let Ok(text) = std::env::var("WEFT_TEST_RNIC") else {
        weft_nic::Libraries::of(Some(weft_dropin::libraries())).unwrap();
        // Both devices have every address, and rdma_cm takes the first.
        return ("weft0".into(), LOCALHOST);
    };
    let (name, ip) = text.split_once('@').expect("DEVICE@ADDRESS");
    (name.to_owned(), ip.parse().expect("an address"))
}

fn rnic() -> Device {
    let (name, _) = tested();
    let found = Choice::Named(name).rnic_at(any_port(None)).unwrap();
    found.expect("an RNIC")
}

/// An address of the device, to listen on.
fn any_port(soft: Option<&weft_verbs::Device>) -> SocketAddr {
    let ip = soft.map_or_else(|| tested().1, |_| LOCALHOST);
    SocketAddr::new(ip, 0)
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
        let cq = device.create_cq(64).unwrap();
        Self::with(device, way, words, cq)
    }

    fn with(device: &Device, way: Way, words: &[u8], cq: Cq) -> Self {
        let pd = device.alloc_pd().unwrap();
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

fn next_request(listener: &cm::Listener) -> cm::Request {
    let request = listener.next_request(Some(PATIENCE)).unwrap();
    request.expect("a request")
}

/// The initiator and the responder.
fn pair(device: &Device) -> (Side, Side) {
    pair_with(device, Side::new)
}

/// As [`pair`], with a responder that is made by this.
fn pair_with<R: Send>(
    device: &Device,
    respond: impl FnOnce(&Device, Way, &[u8]) -> R + Send,
) -> (Side, R) {
    let at = any_port(device.soft());
    let listener = cm::Listener::bind(device, at, 4, &ConnParam::default()).unwrap();
    let peer = listener.local_addr();
    std::thread::scope(|scope| {
        let responder = scope.spawn(|| {
            let request = next_request(&listener);
            assert!(request.private_data().starts_with(b"a request"));
            assert_eq!(request.peer_addr().ip(), at.ip());
            respond(&request.device(), Way::In(request), b"a reply")
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
        let peer = a.qp.peer_addr().map(|addr| addr.ip());
        assert_eq!(peer, Some(any_port(device.soft()).ip()));
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
fn a_list_of_requests_is_posted_up_to_the_one_that_is_refused() {
    /// More than are posted to an RNIC at once.
    const MANY: usize = 40;
    both(|device| {
        let (a, b) = pair(&device);
        let write = |at: usize| {
            a.mr.write(at, &[at as u8 + 1]).unwrap();
            SendWr::write(at as u64, b.mr.remote(at)).sge(a.mr.sge(at, 1))
        };
        let mut list: Vec<_> = (0..MANY).map(write).collect();
        list.push(SendWr::send(7).inline(b"the last").signaled());
        list.push(SendWr::send(8).inline(&[0; 5000]));
        list.push(SendWr::send(9).inline(b"never sent").signaled());
        let refused = a.qp.post_send(&list).unwrap_err();
        assert_eq!(refused.index, MANY + 1);
        assert!(matches!(refused.reason, PostReason::InlineTooLong { .. }));
        assert_eq!(a.completion().wr_id, 7);
        assert_eq!(b.completion().byte_len, 8);
        let wanted: Vec<_> = (1..=MANY as u8).collect();
        assert_eq!(b.mr.to_vec(0, MANY).unwrap(), wanted);
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
        let (tell, ended) = mpsc::channel();
        b.qp.on_end(move |reason| tell.send(reason).unwrap());
        a.qp.post_send_one(SendWr::read(1, wrong).sge(a.mr.sge(0, 8)).signaled())
            .unwrap();
        // On one host the request itself fails, over a wire the connection.
        assert_ne!(a.completion().status, WcStatus::Success);
        // With rxe the responder learns nothing until the initiator disconnects.
        if device.rnic().is_some_and(|name| !name.starts_with("rxe")) {
            ended.recv_timeout(PATIENCE).expect("a reason");
        }
    });
}

#[test]
fn a_rejection_has_private_data() {
    both(|device| {
        let at = any_port(device.soft());
        let listener = cm::Listener::bind(&device, at, 4, &ConnParam::default()).unwrap();
        let dial = cm::Dial::new(&device, listener.local_addr(), PATIENCE).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(4).unwrap());
        let qp = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let request = next_request(&listener);
                request.reject(b"not you").unwrap();
            });
            match dial.connect(qp, &ConnParam::default()) {
                Err(ConnectError::Rejected { private_data }) => {
                    assert!(private_data.starts_with(b"not you"));
                }
                other => panic!("{:?}", other.err()),
            }
        });
        let none = listener.next_request(Some(Duration::ZERO)).unwrap();
        assert!(none.is_none());
    });
}

#[test]
fn where_nobody_listens_a_connection_is_refused() {
    both(|device| {
        let at = any_port(device.soft());
        let gone = cm::Listener::bind(&device, at, 4, &ConnParam::default()).unwrap();
        let peer = gone.local_addr();
        drop(gone);
        let dial = cm::Dial::new(&device, peer, PATIENCE).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(4).unwrap());
        let qp = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).unwrap();
        let refused = dial.connect(qp, &ConnParam::default()).err().unwrap();
        assert!(matches!(refused, ConnectError::Refused), "{refused}");
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

fn is_siw(device: &Device) -> bool {
    device.rnic().is_some_and(|name| name.starts_with("siw"))
}

/// Whether a descriptor can be read, now.
fn readable(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn a_channel_tells_which_queue_has_a_completion() {
    both(|device| {
        let channel = device.create_comp_channel().unwrap();
        let other = device.create_cq_on(4, &channel).unwrap();
        let queue = device.create_cq_on(64, &channel).unwrap();
        let (a, b) = pair_with(&device, |device, way, words| {
            Side::with(device, way, words, queue.clone())
        });
        assert_ne!(other.num(), queue.num());
        other.req_notify(false).unwrap();
        queue.req_notify(false).unwrap();
        assert!(!readable(&channel));
        assert_eq!(channel.get_event(Some(Duration::ZERO)).unwrap(), None);
        a.qp.post_send_one(SendWr::send(1).inline(b"event"))
            .unwrap();
        let event = channel.get_event(Some(PATIENCE)).unwrap();
        assert_eq!(event, Some(queue.num()));
        assert!(!readable(&channel));
        assert_eq!(b.completion().wr_id, 100);
        // Nobody has asked for another one.
        a.qp.post_send_one(SendWr::send(2).inline(b"quiet"))
            .unwrap();
        assert_eq!(b.completion().wr_id, 101);
        assert!(!readable(&channel));
        if is_siw(&device) {
            // It makes no events of marked messages.
            return;
        }
        // The next one is for a message that is marked, and the descriptor alone tells of it.
        queue.req_notify(true).unwrap();
        for (id, wr) in [(102, SendWr::send(3)), (103, SendWr::send(4).solicited())] {
            assert!(!readable(&channel));
            a.qp.post_send_one(wr.inline(b"marked")).unwrap();
            assert_eq!(b.completion().wr_id, id);
        }
        let mut fds = [PollFd::new(&channel, PollFlags::IN)];
        let patience = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(poll(&mut fds, Some(&patience)).unwrap(), 1);
        let event = channel.get_event(Some(Duration::ZERO)).unwrap();
        assert_eq!(event, Some(queue.num()));
    });
}

#[test]
fn connections_share_their_receives() {
    both(|device| {
        assert!(device.attr().srq);
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let srq = pd.create_srq(8, 2).unwrap();
        let mr = pd.alloc_mr(4096, Access::LOCAL_WRITE).unwrap();
        let init = QpInit {
            srq: Some(srq.clone()),
            ..QpInit::new(&cq, &cq)
        };
        let respond = |_: &Device, way: Way, words: &[u8]| {
            let Way::In(request) = way else {
                unreachable!("a responder")
            };
            let qp = request.create_qp(&pd, &init).unwrap();
            request.accept(qp, &said(words)).unwrap().qp
        };
        let (a, to_a) = pair_with(&device, respond);
        let (b, to_b) = pair_with(&device, respond);
        // In two pieces.
        for id in 0..2 {
            let at = id as usize * 1024;
            let receive = RecvWr::new(id)
                .sge(mr.sge(at, 4))
                .sge(mr.sge(at + 512, 512));
            srq.post_recv_one(receive).unwrap();
        }
        for (at, (side, taker)) in [(&b, &to_b), (&a, &to_a)].into_iter().enumerate() {
            side.qp
                .post_send_one(SendWr::send(9).inline(b"for both"))
                .unwrap();
            let mut wc = [Wc::default()];
            assert_eq!(cq.wait(&mut wc, Some(PATIENCE)).unwrap(), 1);
            let [wc] = wc;
            assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 8));
            assert_eq!((wc.wr_id, wc.qp_num), (at as u64, taker.num()));
            assert_eq!(mr.to_vec(at * 1024, 4).unwrap(), b"for ");
            assert_eq!(mr.to_vec(at * 1024 + 512, 4).unwrap(), b"both");
        }
    });
}

#[test]
fn objects_of_two_devices_are_refused() {
    let soft: Device = weft_verbs::Device::open().unwrap().into();
    let rnic = rnic();
    let (pd, cq) = (soft.alloc_pd().unwrap(), rnic.create_cq(4).unwrap());
    let dial = cm::Dial::new(&soft, (LOCALHOST, 0).into(), PATIENCE).unwrap();
    let refused = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).err().unwrap();
    assert!(refused.to_string().contains("two devices"), "{refused}");
    let pd = rnic.alloc_pd().unwrap();
    let refused = dial.create_qp(&pd, &QpInit::new(&cq, &cq)).err().unwrap();
    assert!(
        refused.to_string().contains("not of the connection"),
        "{refused}"
    );
    assert!(pd.soft().is_none() && cq.soft().is_none());
    let channel = soft.create_comp_channel().unwrap();
    let refused = rnic.create_cq_on(4, &channel).err().unwrap();
    assert!(refused.to_string().contains("two devices"), "{refused}");
}

#[test]
#[ignore = "removes the device, in the guest"]
fn a_device_that_is_removed_takes_the_objects_along_that_a_program_holds() {
    let (name, ip) = tested();
    let device = rnic();
    let channel = device.create_comp_channel().unwrap();
    let queue = device.create_cq_on(4, &channel).unwrap();
    let listener = cm::Listener::bind(&device, (ip, 0).into(), 4, &ConnParam::default()).unwrap();
    let (a, b) = pair(&device);
    let (tell, ended) = mpsc::channel();
    a.qp.on_end(move |reason| tell.send(reason).unwrap());
    let mut rdma = std::process::Command::new("rdma");
    let mut rdma = rdma.args(["link", "delete", &name]).spawn().unwrap();
    std::thread::scope(|scope| {
        // Who sleeps is woken, and does not keep the device.
        let waits = scope.spawn(|| b.cq.wait(&mut [Wc::default()], None));
        let sleeps = scope.spawn(|| channel.get_event(None));
        let listens = scope.spawn(|| listener.next_request(None).map(drop));
        let reason = ended.recv_timeout(PATIENCE).unwrap();
        assert!(
            matches!(
                reason,
                EndReason::DeviceRemoved | EndReason::Disconnected | EndReason::Lost
            ),
            "{reason}"
        );
        // The first completions may be flushed receives.
        let mut woken = waits.join().unwrap();
        while woken.is_ok() {
            woken = b.cq.wait(&mut [Wc::default()], None);
        }
        let errors = [sleeps.join().unwrap().err(), listens.join().unwrap().err()];
        for error in errors {
            let error = error.expect("an error").to_string();
            assert!(
                error.contains(&name) && error.contains("removed"),
                "{error}"
            );
        }
    });
    let begun = std::time::Instant::now();
    while rdma.try_wait().unwrap().is_none() {
        assert!(
            begun.elapsed() < PATIENCE,
            "objects are held, and the removal waits"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(rdma.wait().unwrap().success());
    // They are still here, and all calls fail.
    assert!(a.qp.is_gone() && b.qp.is_gone());
    assert!(a.qp.post_send_one(SendWr::send(1)).is_err());
    assert!(b.qp.post_recv_one(RecvWr::new(1)).is_err());
    assert!(queue.poll(&mut [Wc::default()]).is_err());
    let error = device.alloc_pd().err().expect("an error").to_string();
    assert!(
        error.contains(&name) && error.contains("removed"),
        "{error}"
    );
    assert_eq!(a.mr.to_vec(0, 1).unwrap().len(), 1);
    drop((a, b, listener, queue, channel, device));
}

#[test]
fn an_rnic_carries_no_tls() {
    let rnic = rnic();
    let param = ConnParam {
        tls: Some(Tls::new(Identity::generate().unwrap()).unwrap()),
        ..ConnParam::default()
    };
    let refused = cm::Listener::bind(&rnic, any_port(None), 4, &param)
        .err()
        .unwrap()
        .to_string();
    let words = format!("the RNIC {} cannot carry TLS", tested().0);
    assert!(refused.contains(&words), "{refused}");
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_names_the_others() {
    rnic();
    let choice: Choice = "mlx5_9".parse().unwrap();
    let here = SocketAddr::new(LOCALHOST, 0);
    let error = choice.rnic_to(here).err().unwrap().to_string();
    assert!(error.contains("no RDMA device mlx5_9"), "{error}");
    assert!(error.contains(&tested().0), "{error}");
    assert_eq!("".parse(), Ok(Choice::Soft));
    assert_eq!("soft".parse(), Ok(Choice::Soft));
    assert!(Choice::Soft.rnic_to(here).unwrap().is_none());
    assert!(Choice::Auto.rnic_to(here).unwrap().is_none());
}
