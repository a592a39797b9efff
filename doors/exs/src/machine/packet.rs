//! `SOCK_SEQPACKET`: message *i* goes to receive *i*, in either of the two published designs.

mod receiver;
mod sender;

pub(super) use receiver::Receiver;
pub(super) use sender::Sender;
