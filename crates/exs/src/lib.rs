//! Extended sockets (EXS): asynchronous, zero-copy streams and messages with the manners of sockets, over verbs.
#![forbid(unsafe_code)]

pub mod machine;
