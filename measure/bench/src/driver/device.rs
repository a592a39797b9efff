//! The machine's RNIC: the verbs of `weft_verbs::any` on it.

use super::family::Any;
use super::weft::{End, RECVS, Role, SPARE};
use super::{Initiator, Responder, Spec};
use crate::error::{BenchError, Result, stack};
use crate::patience::PATIENCE;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use weft_verbs::any::cm::{Dial, Listener};
use weft_verbs::any::{Choice, Cq, Device, Pd, QpInit};
use weft_verbs::cm::ConnParam;

static CHOSEN: OnceLock<Choice> = OnceLock::new();

/// Takes this device for the stacks of the machine's RNIC. Without it they take what `WEFT_DEVICE` says.
pub fn choose(choice: Choice) {
    let _ = CHOSEN.set(choice);
}

fn choice() -> &'static Choice {
    CHOSEN.get_or_init(Choice::from_env)
}

/// The environment that a peer chooses the same device by.
pub fn environment() -> (&'static str, String) {
    ("WEFT_DEVICE", choice().to_string())
}

/// The RNIC of the machine, opened once, and the address that connections are made to: its own.
pub(super) fn address() -> Result<&'static (Device, SocketAddr)> {
    static OPEN: OnceLock<(Device, SocketAddr)> = OnceLock::new();
    match OPEN.get() {
        Some(open) => Ok(open),
        None => open().map(|found| OPEN.get_or_init(|| found)),
    }
}

fn open() -> Result<(Device, SocketAddr)> {
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let device = choice().rnic_at(any).map_err(stack("open the device"))?;
    let device = device.ok_or_else(|| {
        BenchError::Usage(
            "no RNIC is chosen: name one with --device (`weft doctor` lists them)".to_owned(),
        )
    })?;
    let ip = device.address().unwrap_or(Ipv4Addr::LOCALHOST.into());
    Ok((device, SocketAddr::new(ip, 0)))
}

/// The device's name, for other programs.
pub(super) fn name() -> Result<String> {
    Ok(address()?.0.rnic().unwrap_or_default().to_owned())
}

pub struct Listening {
    device: &'static Device,
    listener: Listener,
}

pub(super) fn listen() -> Result<Listening> {
    let (device, addr) = address()?;
    let listener = Listener::bind(device, *addr, 16, &ConnParam::default());
    Ok(Listening {
        listener: listener.map_err(stack("listen"))?,
        device,
    })
}

/// Queues as deep as `spec` needs.
fn queues(device: &Device, spec: &Spec) -> Result<(Pd, Cq, QpInit)> {
    let (max_send_wr, max_recv_wr) = (spec.window + 64, RECVS + SPARE);
    let cq = device.create_cq(max_send_wr + max_recv_wr);
    let cq = cq.map_err(stack("create a CQ"))?;
    let init = QpInit {
        max_send_wr,
        max_recv_wr,
        max_sge: 1,
        max_inline: 0,
        ..QpInit::new(&cq, &cq)
    };
    let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
    Ok((pd, cq, init))
}

impl Listening {
    pub(super) fn addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    pub(super) fn accept(&self, spec: &Spec) -> Result<Box<dyn Responder>> {
        let (pd, cq, init) = queues(self.device, spec)?;
        let request = self.listener.next_request(Some(PATIENCE));
        let request = request.map_err(stack("wait for a connection"))?;
        let request = request.ok_or(BenchError::Stuck(PATIENCE.as_secs(), "a connection"))?;
        let qp = request.create_qp(&pd, &init);
        let qp = qp.map_err(stack("create a queue pair"))?;
        // Its receives are there before the peer can send.
        let end = End::<Any>::new(&pd, cq, qp, spec, Role::Peer)?;
        request
            .accept_with(end.qp(), &ConnParam::default())
            .map_err(stack("accept"))?;
        Ok(Box::new(end))
    }
}

pub(super) fn connect(spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let (device, _) = address()?;
    let (pd, cq, init) = queues(device, spec)?;
    let dial = Dial::new(device, addr, PATIENCE).map_err(stack("find a route"))?;
    let qp = dial
        .create_qp(&pd, &init)
        .map_err(stack("create a queue pair"))?;
    let end = End::<Any>::new(&pd, cq, qp, spec, Role::Initiator)?;
    dial.connect_with(end.qp(), &ConnParam::default())
        .map_err(stack("connect"))?;
    Ok(Box::new(end))
}
