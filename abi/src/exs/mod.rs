//! Extended sockets for C: what `<sys/exs.h>` declares, without the names' `exs_`.

mod handles;
pub mod types;
