//! One queue pair that sends to several others, reliably: what comes is once and in order, and a receiver that is gone ends what is sent to it alone.
//!
//! ```text
//! cargo run -p weft-verbs --example reliable_datagrams
//! ```

use std::error::Error;
use std::time::Duration;

use weft_verbs::{
    Access, Device, QpState, RecvWr, SendWr, UdDest, UdInit, UdReliable, Wc, WcStatus,
};

const QKEY: u32 = 0x0123_4567;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open()?;
    let pd = device.alloc_pd()?;
    let send_cq = device.create_cq(64, None)?;
    let recv_cq = device.create_cq(64, None)?;
    let memory = pd.alloc_mr(4096, Access::LOCAL_WRITE)?;
    let reliable = UdReliable {
        give_up: Duration::from_secs(1),
        ..UdReliable::default()
    };
    let make = || -> Result<_, Box<dyn Error>> {
        let port = device.bind_ud("127.0.0.1:0".parse()?)?;
        let init = UdInit {
            reliable: Some(reliable),
            ..UdInit::new(&port, QKEY, &send_cq, &recv_cq)
        };
        Ok(pd.create_ud_qp(&init)?)
    };
    let sender = make()?;
    let receivers = [make()?, make()?, make()?];
    let dests: Vec<UdDest> = receivers
        .iter()
        .map(|qp| UdDest {
            addr: qp.port().local_addr(),
            qp_num: qp.num(),
            qkey: QKEY,
            from: None,
            traffic_class: 0,
        })
        .collect();
    // The last one goes away.
    let [first, second, third] = receivers;
    drop(third);
    for (n, dest) in dests.iter().enumerate() {
        let text = format!("for receiver {n}");
        let wr = SendWr::send(n as u64).inline(text.as_bytes()).signaled();
        sender.post_send(&wr, dest)?;
    }
    // Nobody has a receive yet: the messages wait.
    for qp in [&first, &second] {
        qp.post_recv(&[RecvWr::new(0).sge(memory.sge(0, 64))])?;
        let mut wc = [Wc::default()];
        recv_cq.wait(&mut wc, Some(Duration::from_secs(10)))?;
        let len = wc[0].byte_len as usize;
        let text = memory.to_vec(0, len)?;
        println!("received: {}", String::from_utf8_lossy(&text));
    }
    for _ in &dests {
        let mut wc = [Wc::default()];
        send_cq.wait(&mut wc, Some(Duration::from_secs(10)))?;
        println!("send {}: {}", wc[0].wr_id, wc[0].status);
        let dest = &dests[wc[0].wr_id as usize];
        assert_eq!(
            wc[0].status == WcStatus::Success,
            sender.pair_state(dest) == QpState::Rts
        );
    }
    if let Some(error) = sender.take_error() {
        println!("why: {error:?}");
    }
    // It may be tried again.
    assert!(sender.reset_pair(&dests[2]));
    Ok(())
}
