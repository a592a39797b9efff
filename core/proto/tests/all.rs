//! The tests of this crate but for the one that measures the memory of its process (million.rs) and the simulation (sim).

mod common;

mod datagrams;
mod faults;
mod reliable;
mod requests;
mod roce;
mod roce_acks;
mod roce_cm;
mod roce_responder;
mod roce_rules;
mod roce_sidr;
mod startup;
mod stream;
