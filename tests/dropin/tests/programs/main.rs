//! Debian's programs, one test each.

mod container;
mod devices;
mod fabric;
mod faults;
mod limits;
mod matrix;
mod mooncake;
mod mpi;
mod mpi_trouble;
mod mpi_wheels;
mod nixl;
mod perftest;
mod pingpong;
mod pyverbs;
mod qperf;
mod rdmacm;
mod rsockets;
mod seccomp;
mod storage;
mod sysfs;
mod tls;
mod ucx;

use weft_dropin::Weft;

/// In shared memory, and over TCP.
fn carriers(devices: &str) -> [Weft; 2] {
    [Weft::on(devices), Weft::on(devices).over_tcp()]
}
