//! `weft hello`: the thesis's first program (fig. 3.17) on the `iw` crate.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc;

use weft_iw::{Access, Context, CqType, Error, Flags, Listener, Options, Wc};
use weft_service::endpoint::parse_bind;
use weft_verbs::Device;
use weft_verbs::any::Choice;
use weft_verbs::cm::ConnectError;

use weft_cli::address::resolve_peer;
use weft_cli::failure::{Exit, Failure};
use weft_cli::say;
use weft_cli::values::carrier;

pub use weft_service::endpoint::port::HELLO as DEFAULT_PORT;
const TEXT: &[u8] = b"Hello iWARP!";
/// Length of the buffer that the responder advertises.
const BUFFER: usize = 4096;

pub(crate) const LONG: &str = "\
The first program of the thesis \"iWARP Applicability\" (fig. 3.17): the responder advertises a buffer (it sends its address and key), the initiator writes to it with an RDMA \
Write, reads it back with an RDMA Read, compares, and says goodbye with a Send.

Beyond this host the connection uses TLS with temporary keys, unless WEFT_TLS says otherwise on both sides. On an RNIC of the machine (--device) it is not encrypted.

Without arguments both run in this process. The example hello_iwarp of the crate weft-iw is the same program in fewer than 60 lines.";

/// Options of `weft hello`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Be the responder, here or on another address [default: 127.0.0.1:7472]
    #[arg(long, value_name = "ADDR[:PORT]", num_args = 0..=1, default_missing_value = "127.0.0.1:7472", conflicts_with = "peer", value_parser = |text: &str| parse_bind(text, DEFAULT_PORT))]
    listen: Option<SocketAddr>,
    /// Be the initiator: the responder's HOST[:PORT], IPv6 addresses in brackets
    #[arg(value_name = "HOST[:PORT]")]
    peer: Option<String>,
    /// The device: `soft`, the name of an RDMA device, or `auto` for the one that the route to the peer uses
    #[arg(
        long,
        value_name = "DEVICE",
        env = "WEFT_DEVICE",
        default_value = "soft"
    )]
    device: Choice,
}

/// Runs one role, or both.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let device = &args.device;
    if let Some(listen) = args.listen {
        let listener = open(device, listen)?;
        say(format_args!(
            "responder: listening on {}",
            listener.local_addr()
        ));
        responder(&listener).map_err(|e| failed("the responder", &e))?;
    } else if let Some(peer) = &args.peer {
        initiator(device, resolve_peer(peer, DEFAULT_PORT)?)
            .map_err(|e| failed(&format!("the initiator, with {peer}"), &e))?;
    } else {
        let listener = open(device, (here(device), 0).into())?;
        let addr = listener.local_addr();
        let (ended, end) = mpsc::channel();
        // The thread is not joined: it waits for a request for ever if the initiator could not send one.
        std::thread::spawn(move || ended.send(responder(&listener)));
        initiator(device, addr).map_err(|e| failed("the initiator", &e))?;
        end.recv()
            .map_err(|_| Failure::failed("the responder's thread panicked"))?
            .map_err(|e| failed("the responder", &e))?;
    }
    Ok(Exit::Ok)
}

/// An address of this machine for both roles: an RNIC needs one of its own.
fn here(device: &Choice) -> IpAddr {
    let local = IpAddr::from(Ipv4Addr::LOCALHOST);
    let Choice::Named(name) = device else {
        return local;
    };
    let devices = weft_nic::devices().unwrap_or_default();
    let device = devices.iter().find(|device| device.name() == name);
    let ports = device.and_then(|device| device.info().ok());
    let ports = ports.map(|info| info.ports).unwrap_or_default();
    let netdevs = ports.iter().flat_map(weft_nic::Port::netdevs);
    let mut addresses = netdevs.flat_map(|netdev| weft_nic::addresses_of(Some(netdev)));
    addresses.next().unwrap_or(local)
}

/// Options for an address and its RNIC. Beyond this host the soft RNIC uses TLS.
fn options(rnic: Option<weft_verbs::any::Device>, addr: IpAddr) -> Result<Options, Error> {
    let soft = || Ok::<_, Error>(Device::builder().tls_beyond_host(addr)?.open()?.into());
    Ok(Options::with(rnic.map_or_else(soft, Ok)?))
}

fn open(device: &Choice, addr: SocketAddr) -> Result<Listener, Failure> {
    let opened = device
        .rnic_at(addr)
        .map_err(Error::from)
        .and_then(|rnic| Listener::open_with(addr, options(rnic, addr.ip())?));
    opened.map_err(|e| match e {
        Error::Address { source, .. } => Failure::listen(
            &addr,
            &source,
            "--listen=ADDR:PORT chooses, port 0 takes a free one",
        ),
        e => Failure::failed(e.to_string())
            .hint("`weft doctor` says what this machine does not support"),
    })
}

fn failed(who: &str, e: &Error) -> Failure {
    match e {
        Error::Connect(ConnectError::Protocol(_) | ConnectError::Tls(_)) => Failure::refused(
            format!("{who}: {e}"),
        )
        .hint(
            "check the port, which `weft hello --listen` prints; both sides need the same WEFT_TLS",
        ),
        Error::Connect(_) | Error::Address { .. } => Failure::peer(format!("{who}: {e}"))
            .hint("check the address, and that `weft hello --listen` runs there"),
        Error::Completion(_) | Error::Ended => {
            Failure::peer(format!("{who}: {e}")).hint("the peer went away; see what it says")
        }
        _ => Failure::failed(format!("{who}: {e}"))
            .hint("`weft doctor` says what this machine does not support"),
    }
}

fn say_path(who: &str, ctx: &Context) {
    if let Some(path) = ctx.qp().and_then(weft_verbs::any::Qp::path) {
        let over = carrier(path.transport);
        let why = path.reason.map_or(String::new(), |why| format!(" ({why})"));
        say(format_args!("{who}: connected over {over}{why}"));
    }
}

fn responder(listener: &Listener) -> Result<(), Error> {
    let mut ctx = listener.listen()?;
    let data = ctx.lmr_create(BUFFER, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    let ctrl = ctx.lmr_create(1, Access::LOCAL_WRITE)?;
    // The initiator's first and last Send need receives, before it can know that it is connected.
    ctx.post_recv_lmr(&ctrl, 0, 1)?;
    ctx.post_recv_lmr(&ctrl, 0, 1)?;
    ctx.accept()?;
    say_path("responder", &ctx);
    // MPA lets the initiator speak first; `siw` gives up a connection where the responder does.
    ctx.await_completions(CqType::Recv, &mut [Wc::default()])?;
    ctx.post_send_adv(&data)?;
    say(format_args!(
        "responder: advertised {BUFFER} bytes to the initiator"
    ));
    // Write and Read are one-sided; only the last Send shows that they are done.
    ctx.await_completions(CqType::Recv, &mut [Wc::default()])?;
    let text = data.to_vec(0, TEXT.len())?;
    say(format_args!(
        "responder: the buffer holds {:?}",
        String::from_utf8_lossy(&text)
    ));
    ctx.disconnect()
}

fn initiator(device: &Choice, addr: SocketAddr) -> Result<(), Error> {
    let rnic = device.rnic_to(addr)?;
    let mut ctx = Context::alloc_with(addr, options(rnic, addr.ip())?)?;
    ctx.post_recv_adv()?;
    ctx.connect()?;
    say_path("initiator", &ctx);
    let src = ctx.lmr_register(TEXT.to_vec(), Access::LOCAL_WRITE)?;
    let dst = ctx.lmr_create(TEXT.len(), Access::LOCAL_WRITE)?;
    ctx.post_send_lmr(&src, 0, 1, Flags::empty())?;
    let rmr = ctx.wait_recv_adv()?;
    // The Read does not overtake the Write: only the Read has to be waited for.
    ctx.post_write_lmr(&src, 0, &rmr, 0, TEXT.len(), Flags::empty())?;
    ctx.post_read_lmr(&dst, 0, &rmr, 0, TEXT.len(), Flags::SIGNALED)?;
    ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
    let back = dst.to_vec(0, TEXT.len())?;
    let verdict = if back == TEXT {
        "as written"
    } else {
        "NOT what was written"
    };
    say(format_args!(
        "initiator: read back {:?}, {verdict}",
        String::from_utf8_lossy(&back)
    ));
    ctx.post_send_lmr(&src, 0, 1, Flags::SIGNALED)?;
    ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
    ctx.await_disconnect().map(drop)
}
