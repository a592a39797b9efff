//! "Hello iWARP", the first program of the thesis (fig. 3.17): `serve`, `connect ADDR`, or both in one process.
use std::{env, net::SocketAddr, thread};
use weft_iw::{Access, Context, CqType, Error, Flags, Listener, Wc};

fn responder(listener: &Listener) -> Result<(), Error> {
    let mut ctx = listener.listen()?;
    let data = ctx.lmr_create(4096, Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    let ctrl = ctx.lmr_create(1, Access::LOCAL_WRITE)?;
    // The initiator's first and last Send need receives: post them before it can know that it is connected.
    ctx.post_recv_lmr(&ctrl, 0, 1)?;
    ctx.post_recv_lmr(&ctrl, 0, 1)?;
    ctx.accept()?;
    // With iWARP the initiator has to speak first.
    ctx.await_completions(CqType::Recv, &mut [Wc::default()])?;
    ctx.post_send_adv(&data)?;
    // Write and Read are one-sided; only the last Send tells that they are over.
    ctx.await_completions(CqType::Recv, &mut [Wc::default()])?;
    println!(
        "responder: the buffer holds {:?}",
        String::from_utf8_lossy(&data.to_vec(0, 12)?)
    );
    ctx.disconnect()
}

fn initiator(addr: SocketAddr) -> Result<(), Error> {
    let mut ctx = Context::alloc(addr)?;
    ctx.post_recv_adv()?;
    ctx.connect()?;
    let src = ctx.lmr_register(b"Hello iWARP!".to_vec(), Access::LOCAL_WRITE)?;
    let dst = ctx.lmr_create(12, Access::LOCAL_WRITE)?;
    ctx.post_send_lmr(&src, 0, 1, Flags::empty())?;
    let rmr = ctx.wait_recv_adv()?;
    // The Read does not overtake the Write: only the Read has to be waited for.
    ctx.post_write_lmr(&src, 0, &rmr, 0, 12, Flags::empty())?;
    ctx.post_read_lmr(&dst, 0, &rmr, 0, 12, Flags::SIGNALED)?;
    ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
    let back = dst.to_vec(0, 12)?;
    println!("initiator: read back {:?}", String::from_utf8_lossy(&back));
    assert_eq!(back, b"Hello iWARP!");
    ctx.post_send_lmr(&src, 0, 1, Flags::SIGNALED)?;
    ctx.await_completions(CqType::Send, &mut [Wc::default()])?;
    ctx.await_disconnect().map(drop)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => responder(&Listener::open("127.0.0.1:7472")?)?,
        ["connect", addr] => initiator(addr.parse()?)?,
        _ => {
            let listener = Listener::open("127.0.0.1:0")?;
            let addr = listener.local_addr();
            let serving = thread::spawn(move || responder(&listener));
            initiator(addr)?;
            serving.join().expect("the responder's thread")?;
        }
    }
    Ok(())
}
