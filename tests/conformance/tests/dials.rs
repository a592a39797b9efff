//! Failed dials release all their resources. In a process of its own, because it counts all of that.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use weft_conformance::bed::{Bed, Half, Memory, Setup, until};
use weft_conformance::waits::alone;
use weft_verbs::cm::{ConnectError, Listener};
use weft_verbs::{Device, Limits, LocalMode};

/// Threads of this process. Only engines start and end here, and they have their name only once they run.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    tasks.flatten().count()
}

/// Dials with a new device.
fn dial(bed: &Bed, addr: SocketAddr) -> ConnectError {
    let device = bed.device(Limits::default());
    let end = bed.end(&device, &Half::default());
    let outcome = bed.dial(addr, end, &bed.param());
    outcome.err().expect("nobody there to connect to")
}

#[test]
fn a_failed_dial_leaves_nothing() {
    if !alone("dials::a_failed_dial_leaves_nothing") {
        return;
    }
    // Connected, but without the required shared memory.
    let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
    let doorless = Device::builder().local(LocalMode::Off).open();
    let doorless = doorless.expect("a device");
    let listener = Listener::bind(&doorless, bed.any_addr(), 4, &bed.param()).expect("a listener");
    let before = threads();
    for _ in 0..3 {
        let error = dial(&bed, listener.local_addr());
        assert!(matches!(error, ConnectError::NotLocal(_)), "{error}");
    }
    until("the engines of doorless dials stop", || threads() <= before);

    // Reset at once: often before the request is sent.
    let bed = Bed::new(Setup::tcp()).expect("a bed");
    let server = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = server.local_addr().expect("an address");
    let before = threads();
    std::thread::scope(|scope| {
        const DIALS: usize = 300;
        scope.spawn(|| {
            for _ in 0..DIALS {
                let (socket, _) = server.accept().expect("a connection");
                rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))
                    .expect("any socket takes it");
            }
        });
        for _ in 0..DIALS {
            dial(&bed, addr);
        }
    });
    until("the engines of reset dials stop", || threads() <= before);
}
