//! The suite of verbs semantics on an RNIC of the machine, which is weft's own drop-in libraries, or with `WEFT_TEST_RNIC=DEVICE@ADDRESS` that device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use weft_conformance::any::bed::{Bed, Wire};
use weft_verbs::any::Choice;

/// The bed on the device.
fn bed() -> Bed {
    let (name, ip, largest) = if let Ok(text) = std::env::var("WEFT_TEST_RNIC") {
        let (name, ip) = text.split_once('@').expect("DEVICE@ADDRESS");
        // The guest is emulated.
        (name.to_owned(), ip.parse().expect("an address"), 70_000)
    } else {
        weft_nic::Libraries::of(Some(weft_dropin::libraries())).expect("libraries");
        let localhost: IpAddr = Ipv4Addr::LOCALHOST.into();
        ("weft0".to_owned(), localhost, 3 << 20)
    };
    let infos = weft_nic::devices().expect("devices");
    let found = infos.iter().find(|device| device.name() == name);
    let info = found.expect("the device").info().expect("what it is");
    let wire = match info.transport {
        weft_nic::Transport::Iwarp => Wire::Iwarp,
        _ => Wire::Roce,
    };
    let device = Choice::Named(name).rnic_at(SocketAddr::new(ip, 0));
    let device = device.expect("an RNIC").expect("an RNIC");
    let mut bed = Bed::new(&device, ip, wire);
    bed.setup.largest = largest;
    bed
}

macro_rules! suite {
    ($($topic:ident: $($scenario:ident),+ $(,)?;)+) => {
        $(mod $topic {
            $(#[test]
            fn $scenario() {
                weft_conformance::any::$topic::$scenario(&crate::bed());
            })+
        })+
    };
}

mod on_an_rnic {
    // What becomes of a message without a receive is left out: iWARP's RNICs end the connection, and others try again.
    suite! {
        send_recv: with_immediate, too_long_with_immediate, every_size, both_ways, scatter_gather, receive_longer_than_message, inline_is_taken_at_once, in_order,
            unsignaled, message_too_long, refused_posts;
        write_read: write_every_size, read_every_size, responder_reads_and_writes, read_and_write_lists,
            write_with_immediate, write_then_read, fence, read_depth_of_one, read_depths_differ, mixed_order,
            target_is_asleep, target_watches_memory, refused_access, zero_length_needs_no_key, bad_local_list;
        atomics: each_operation, concurrent, refused;
        srq: shared_by_several, shared_concurrently, refused_posts;
        threads: stream_to_a_sleeper, much_posted_beside_a_sleeper, two_post_to_one, ended_while_in_use, stress;
    }
}
