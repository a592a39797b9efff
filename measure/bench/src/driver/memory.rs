//! The upper bounds of a transfer on one host: a copy within one process, and the kernel's copy from one
//! process into another. Both are streams of writes from one buffer into another, as weft's are.

use super::{Initiator, Remote, Responder, Spec, tcp};
use crate::error::{BenchError, Result, failed};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;
use std::hint::black_box;
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// `memcpy` in one process.
pub struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copy {
    pub fn new(spec: &Spec) -> Result<Self> {
        let len = spec.len()?;
        Ok(Self {
            from: vec![1; len],
            to: vec![2; len],
        })
    }

    pub fn drive(&mut self, count: u64) {
        for _ in 0..count {
            // The compiler must not remove the copy or its repetition.
            black_box(&mut self.to[..]).copy_from_slice(black_box(&self.from));
        }
    }
}

/// `process_vm_writev` into the peer; the socket only reports to the peer that all data has arrived.
struct Vm {
    stream: TcpStream,
    buffer: Vec<u8>,
    remote: Option<Remote>,
}

impl Vm {
    fn new(stream: TcpStream, spec: &Spec) -> Result<Self> {
        tcp::prepare_stream(&stream)?;
        Ok(Self {
            stream,
            buffer: vec![1; spec.len()?],
            remote: None,
        })
    }
}

pub(super) fn connect(spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let stream = TcpStream::connect(addr).map_err(BenchError::system("connect"))?;
    Ok(Box::new(Vm::new(stream, spec)?))
}

pub(super) fn accept(listener: &TcpListener, spec: &Spec) -> Result<Box<dyn Responder>> {
    let (stream, _) = listener.accept().map_err(BenchError::system("accept"))?;
    Ok(Box::new(Vm::new(stream, spec)?))
}

impl Initiator for Vm {
    fn set_remote(&mut self, remote: Option<Remote>) {
        self.remote = remote;
    }

    fn drive(&mut self, count: u64, _laps: &mut Vec<f64>) -> Result<()> {
        let what = "process_vm_writev";
        let Some(Remote { addr, rkey }) = self.remote else {
            return Err(BenchError::Usage("no target buffer".to_owned()));
        };
        let far = [RemoteIoVec {
            base: addr as usize,
            len: self.buffer.len(),
        }];
        let near = [IoSlice::new(&self.buffer)];
        let pid = Pid::from_raw(rkey.cast_signed());
        for _ in 0..count {
            let written = process_vm_writev(pid, &near, &far)
                .map_err(|errno| BenchError::system(what)(errno.into()))?;
            if written != self.buffer.len() {
                let why = format!("it wrote {written} of {} bytes", self.buffer.len());
                return Err(failed(what, why));
            }
        }
        self.stream
            .write_all(&[1])
            .map_err(BenchError::system("write to a socket"))
    }
}

impl Responder for Vm {
    /// The buffer's address, and this process's identifier in place of a key.
    fn remote(&self) -> Option<Remote> {
        Some(Remote {
            addr: self.buffer.as_ptr() as u64,
            rkey: std::process::id(),
        })
    }

    fn serve(&mut self, _count: u64) -> Result<()> {
        self.stream
            .read_exact(&mut [0])
            .map_err(BenchError::system("read from a socket"))?;
        black_box(&mut self.buffer);
        Ok(())
    }
}
