//! A connection within this process.

use crate::error::{Result, error, failed};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use weft_verbs::cm::{self, ConnParam, Connection, Listener};
use weft_verbs::{Cq, Device, Pd, QpInit};

const PATIENCE: Duration = Duration::from_mins(1);

/// Two connected queue pairs of this process, the near one first, each with its completion queue.
///
/// # Errors
/// The verbs refuse one of the steps, or the connection does not come.
pub fn pair(
    near: (&Device, &Pd),
    far: (&Device, &Pd),
    param: &ConnParam,
) -> Result<[(Connection, Cq); 2]> {
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = Listener::bind(far.0, anywhere, 1, param).map_err(error("listen"))?;
    let addr = listener.local_addr();
    let cq = |device: &Device| device.create_cq(64, None).map_err(error("create a CQ"));
    let (near_cq, far_cq) = (cq(near.0)?, cq(far.0)?);
    let qp = far.1.create_qp(&QpInit::new(&far_cq, &far_cq));
    let qp = qp.map_err(error("create a QP"))?;
    let (accepted, connected) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.next_request(Some(PATIENCE));
            let request = request.ok_or_else(|| failed("accept", "no connection came"))?;
            request.accept(qp, param).map_err(error("accept"))
        });
        let init = QpInit::new(&near_cq, &near_cq);
        let connected = cm::connect(addr, near.1, &init, param).map_err(error("connect"));
        let panicked = |_| Err(failed("accept", "a thread panicked"));
        (accepting.join().unwrap_or_else(panicked), connected)
    });
    Ok([(connected?, near_cq), (accepted?, far_cq)])
}
