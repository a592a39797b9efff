//! Both sides of rping's protocol against each other, in one process.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use weft_interop::rping::{self, Error, Options, Report};
use weft_verbs::cm::{ConnParam, LinkOptions, Listener};
use weft_verbs::{Device, WcStatus};

const WAIT: Option<Duration> = Some(Duration::from_secs(30));

/// One ping session: what the client and the server report.
fn session(client: &Options, server: &Options) -> (Result<Report, Error>, Result<Report, Error>) {
    let device = Device::open().unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(&device, any, 4, &server.param).unwrap();
    let addr = listener.local_addr();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let request = listener.next_request(WAIT).expect("a request");
            rping::serve(&device, request, server)
        });
        let pinged = rping::client(&Device::open().unwrap(), addr, client);
        (pinged, serving.join().unwrap())
    })
}

fn options(size: usize, count: u32, link: LinkOptions) -> Options {
    let base = Options::default();
    Options {
        size,
        count: Some(count),
        verify: true,
        param: ConnParam {
            options: link,
            ..base.param
        },
        ..base
    }
}

#[test]
fn a_thousand_verified_rounds() {
    for size in [rping::MIN_SIZE, 64, 1460, 4096, rping::MAX_SIZE, 1 << 20] {
        let count = if size > rping::MAX_SIZE { 20 } else { 1000 };
        let opts = options(size, count, LinkOptions::default());
        let (client, server) = session(&opts, &opts);
        let (client, server) = (client.unwrap(), server.unwrap());
        println!("{size} B: {client}");
        assert_eq!((client.rounds, client.verified), (count, count));
        assert_eq!((server.rounds, server.verified), (count, count));
        assert_eq!(server.bytes, size as u64 * u64::from(count));
    }
}

#[test]
fn every_start_up() {
    for revision in [1, 2] {
        for crc in [false, true] {
            for peer_to_peer in [false, true] {
                for recv_markers in [false, true] {
                    let link = LinkOptions {
                        crc,
                        revision,
                        peer_to_peer,
                        recv_markers,
                        ..LinkOptions::default()
                    };
                    let opts = options(3000, 20, link);
                    let (client, server) = session(&opts, &opts);
                    assert_eq!(client.unwrap().verified, 20, "{link:?}");
                    assert_eq!(server.unwrap().verified, 20, "{link:?}");
                }
            }
        }
    }
}

#[test]
fn a_client_with_longer_pings_than_the_server_takes_is_told() {
    let link = LinkOptions::default();
    let (client, server) = session(&options(5000, 1, link), &options(4999, 1, link));
    assert!(matches!(server, Err(Error::Protocol(_))), "{server:?}");
    assert!(
        matches!(client, Err(Error::Disconnected(0)))
            || matches!(client, Err(Error::Completion(wc)) if wc.status == WcStatus::WrFlushErr),
        "{client:?}"
    );
}

#[test]
fn the_pattern_is_the_one_of_rping() {
    assert_eq!(pattern_text(0, 30), "rdma-ping-0: ABCDEFGHIJKLMNOP");
    assert_eq!(pattern_text(57, 30), "rdma-ping-57: zABCDEFGHIJKLMN");
    assert_eq!(pattern_text(58, 30), "rdma-ping-58: ABCDEFGHIJKLMNO");
}

fn pattern_text(round: u32, size: usize) -> String {
    let mut data = rping::pattern(round, size);
    assert_eq!(data.pop(), Some(0));
    String::from_utf8(data).unwrap()
}
