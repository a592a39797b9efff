//! One module for each subcommand: its options, and how they become calls of the library.

pub mod advise;
pub mod broker;
pub mod completion;
pub mod cp;
pub mod demo;
pub mod dispatch;
pub mod dissector;
pub mod doctor;
pub mod hello;
pub mod key;
pub mod man;
pub mod mpi;
mod plain;
pub mod run;
mod service;
pub mod stat;
mod users;
pub mod verbs;
mod view;
