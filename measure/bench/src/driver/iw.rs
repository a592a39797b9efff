//! weft's small iWARP library, at the initiator of a stream of writes. The far end uses the verbs,
//! so that the library is the only difference (thesis fig. 3.21).

use super::weft::{Context, NOTE_END, param};
use super::{Initiator, Remote, Spec};
use crate::error::{BenchError, Result, stack};
use std::net::SocketAddr;
use weft_iw::{CqType, Flags, Lmr, Options, Rmr};
use weft_verbs::{Access, RemoteAddr, Wc};

pub(super) fn connect(
    context: &mut Context,
    spec: &Spec,
    addr: SocketAddr,
) -> Result<Box<dyn Initiator>> {
    let (device, _) = context.device(spec.transport)?;
    let options = Options {
        device: device.clone().into(),
        param: param(spec.crc),
        max_send_wr: spec.window + 64,
        max_recv_wr: 16,
        max_sge: 1,
    };
    let mut library =
        weft_iw::Context::alloc_with(addr, options).map_err(stack("make a context"))?;
    let len = spec.len()?.max(NOTE_END);
    let source = library
        .lmr_create(len, Access::LOCAL_WRITE)
        .map_err(stack("make a region"))?;
    source
        .mr()
        .fill(0, len, 0)
        .map_err(stack("fill a memory region"))?;
    library.connect().map_err(stack("connect"))?;
    Ok(Box::new(End {
        library,
        source,
        spec: *spec,
        remote: None,
    }))
}

struct End {
    library: weft_iw::Context,
    source: Lmr,
    spec: Spec,
    remote: Option<Rmr>,
}

impl End {
    fn await_one(&self, of: CqType) -> Result<()> {
        self.library
            .await_completions(of, &mut [Wc::default()])
            .map_err(stack("wait for completions"))
    }
}

impl Initiator for End {
    fn set_remote(&mut self, remote: Option<Remote>) {
        self.remote = remote.map(|Remote { addr, rkey }| {
            Rmr::new(RemoteAddr { addr, rkey }, self.spec.bytes as u32)
        });
    }

    fn drive(&mut self, count: u64, _laps: &mut Vec<f64>) -> Result<()> {
        let remote = self
            .remote
            .as_ref()
            .ok_or_else(|| BenchError::Usage("no target buffer".to_owned()))?;
        let len = self.spec.len()?;
        let window = u64::from(self.spec.window);
        let batch = (window / 4).max(1);
        let (mut posted, mut done) = (0, 0);
        while done < count {
            loop {
                let signaled = batch.min(count - posted);
                if signaled == 0 || posted - done + signaled > window {
                    break;
                }
                for index in 1..=signaled {
                    let flags = if index == signaled {
                        Flags::SIGNALED
                    } else {
                        Flags::empty()
                    };
                    self.library
                        .post_write_lmr(&self.source, 0, remote, 0, len, flags)
                        .map_err(stack("post operations"))?;
                }
                posted += signaled;
            }
            self.await_one(CqType::Send)?;
            done += batch.min(count - done);
        }
        self.library
            .post_recv_lmr(&self.source, 0, NOTE_END)
            .map_err(stack("post receives"))?;
        self.library
            .post_send_lmr(&self.source, 0, NOTE_END, Flags::SIGNALED)
            .map_err(stack("post operations"))?;
        self.await_one(CqType::Send)?;
        self.await_one(CqType::Recv)
    }
}
