//! Options of the applications that are programs of their own.
#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "comments are the help on a terminal"
)]

pub mod cc;
pub mod fs;
pub mod media;
