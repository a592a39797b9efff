//! `weft join` on rings of workers in threads and processes. One program, because each links DataFusion.

mod bad;
mod band;
mod csv;
mod damaged;
mod distributed;
mod help;
mod joins;
mod lies;
mod loaded;
mod random;
mod tpch;
