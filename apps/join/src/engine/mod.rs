//! Queries that `datafusion-distributed` plans and runs, with its batches on weft: the shell is its coordinator, and workers carry
//! out its tasks.
//!
//! The engine defines the messages between processes (`WorkerChannel`) and leaves the transport open. Here each call is a turn of a
//! ring of two, which the caller forms by a visit ([`weft_roundabout::RingListener::visit`]). So a call has the flow control, the checks and
//! the security of rings: shared memory within a host and user, else TCP, with TLS where there are keys.

mod answer;
mod call;
mod coordinate;
mod files;
mod said;

pub use answer::Tasks;
pub use call::{Channels, url_of};
pub use coordinate::{Asked, context, stream};
pub(crate) use said::is_call;
