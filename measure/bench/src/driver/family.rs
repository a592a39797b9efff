//! The objects that an end of a connection is made of: those of the soft RNIC, or those of any device.

use super::roce::Pair;
use std::time::Duration;
use weft_verbs::{
    Access, CqOverrun, Error, MemError, PostError, RecvWr, RemoteAddr, SendWr, Sge, Wc, any,
};

type Result<T, E = Error> = std::result::Result<T, E>;

pub(super) trait Family {
    type Pd: Clone;
    type Cq: Queue;
    type Mr: Region;
    type Qp: Posts;

    fn alloc(pd: &Self::Pd, len: usize, access: Access) -> Result<Self::Mr>;
    fn register(pd: &Self::Pd, buffer: Vec<u8>, access: Access) -> Result<Self::Mr>;
}

pub(super) trait Queue {
    fn poll(&self, out: &mut [Wc]) -> Result<usize, CqOverrun>;
    fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun>;
}

pub(super) trait Posts {
    fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError>;
    fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError>;
}

pub(super) trait Region: Sized {
    fn sge(&self, off: usize, len: usize) -> Sge;
    fn remote(&self, off: usize) -> RemoteAddr;
    fn fill(&self, off: usize, len: usize, byte: u8) -> Result<(), MemError>;
    fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError>;
    fn load_u8(&self, off: usize) -> Result<u8, MemError>;
    fn deregister(self) -> Result<Option<Vec<u8>>>;
}

/// The methods of both families have the same names.
macro_rules! family {
    ($family:ident, $pd:ty, $cq:ty, $mr:ty, $qp:ty, $error:expr) => {
        impl Family for $family {
            type Pd = $pd;
            type Cq = $cq;
            type Mr = $mr;
            type Qp = $qp;

            fn alloc(pd: &$pd, len: usize, access: Access) -> Result<$mr> {
                pd.alloc_mr(len, access).map_err(Into::into)
            }
            fn register(pd: &$pd, buffer: Vec<u8>, access: Access) -> Result<$mr> {
                pd.reg_mr(buffer, access).map_err(Into::into)
            }
        }

        impl Queue for $cq {
            fn poll(&self, out: &mut [Wc]) -> Result<usize, CqOverrun> {
                <$cq>::poll(self, out)
            }
            fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, CqOverrun> {
                <$cq>::wait(self, out, timeout)
            }
        }

        impl Posts for $qp {
            fn post_send(&self, wrs: &[SendWr]) -> Result<(), PostError> {
                <$qp>::post_send(self, wrs)
            }
            fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), PostError> {
                <$qp>::post_recv(self, wrs)
            }
        }

        impl Region for $mr {
            fn sge(&self, off: usize, len: usize) -> Sge {
                <$mr>::sge(self, off, len)
            }
            fn remote(&self, off: usize) -> RemoteAddr {
                <$mr>::remote(self, off)
            }
            fn fill(&self, off: usize, len: usize, byte: u8) -> Result<(), MemError> {
                <$mr>::fill(self, off, len, byte)
            }
            fn write(&self, off: usize, src: &[u8]) -> Result<(), MemError> {
                <$mr>::write(self, off, src)
            }
            fn load_u8(&self, off: usize) -> Result<u8, MemError> {
                <$mr>::load_u8(self, off)
            }
            fn deregister(self) -> Result<Option<Vec<u8>>> {
                <$mr>::deregister(self).map_err($error)
            }
        }
    };
}

/// The soft RNIC.
pub(super) struct Soft;
family!(
    Soft,
    weft_verbs::Pd,
    weft_verbs::Cq,
    weft_verbs::Mr,
    Pair,
    |(_, error)| Error::from(error)
);

/// Any device.
pub(super) struct Any;
family!(Any, any::Pd, any::Cq, any::Mr, any::Qp, Error::from);
