//! Both halves of a stream: figures 2 to 5 of the stream paper. Fields are annotated with the names in its table I.

mod receiver;
mod sender;

pub(super) use receiver::Receiver;
pub(super) use sender::Sender;

/// Direct phases are even, indirect ones odd.
const fn is_direct(phase: u64) -> bool {
    phase.is_multiple_of(2)
}
