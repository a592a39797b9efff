//! The tests of the program, but for the flood of connections, which takes all descriptors of its process (`hostile_peers.rs`), and the one that wants
//! its process to have one device (`stat_many.rs`).

mod common;

mod advise;
mod cc;
mod containers;
mod cp;
mod cp_archive;
mod cp_fetch;
mod cp_packs;
mod cp_update;
mod fs;
mod hostile;
mod key;
mod media;
mod media_http;
mod media_live;
mod media_players;
mod mitm;
mod mpi;
mod mpi_hosts;
mod pages;
mod program;
mod rnic;
mod run;
mod stat;
mod verbs;
