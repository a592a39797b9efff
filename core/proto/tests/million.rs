//! A million sources, each of which is heard once: what is remembered of them has a limit in bytes, an honest peer goes on, and no answer is longer than
//! what it answers. In a file of its own, because the memory that is measured is that of the process.

use std::hash::RandomState;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use weft_proto::dgram::{Admit, Config, Flows, FlowsConfig, Reassembler, Source};
use weft_wire::dgram::{CRC_LEN, Control, Flow, Packet, Segment, Target};

const SOURCES: u32 = 1_000_000;
const VIA: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const HONEST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 9);

fn segment(msn: u32, len: u32) -> Segment {
    Segment {
        dst_qp: 1,
        src_qp: 2,
        qkey: 1,
        incarnation: 3,
        msn,
        len,
        offset: 0,
        target: None,
        imm: None,
        solicited: false,
        reliable: None,
    }
}

/// Kilobytes of this process that are in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.expect("a number of kilobytes")
}

fn from(n: u32) -> SocketAddr {
    SocketAddr::from(((0x0a00_0000 + n / 16).to_be_bytes(), 1 + (n % 16) as u16))
}

#[test]
fn a_million_sources_leave_bounded_state_and_get_no_more_than_they_sent() {
    let config = Config::default();
    let mut machine: Reassembler<()> = Reassembler::new(config);
    let start = Instant::now();
    let (before, mut honest) = (resident(), 0);
    for n in 0..SOURCES {
        let now = start + Duration::from_micros(u64::from(n));
        while machine.expire(now).is_some() {}
        let source = Source {
            addr: from(n),
            qp_num: n % 7,
            incarnation: n,
        };
        // A message that is not whole, one that is, and a Write-Record that is.
        let (mut header, mut payload) = (segment(1, 100), if n % 3 == 0 { 10 } else { 100 });
        if n % 3 == 2 {
            header.target = Some(Target { stag: 1, to: 2 });
        }
        if let Some(whole) = machine.admit_whole(&source, &header, payload) {
            machine.came(whole);
        } else {
            let ticket = machine.admit(&source, &header, payload).expect("new");
            let _ = machine.placed(now, ticket, || ());
        }
        assert!(machine.open() <= config.max_open && machine.sources() <= config.max_sources);
        // An honest peer's messages of two segments, of which the second comes after a hundred strangers.
        let source = Source {
            addr: HONEST,
            qp_num: 2,
            incarnation: 3,
        };
        if n % 100 == 50 || n % 100 == 99 {
            header = segment(n / 100 + 1, 100);
            payload = 50;
            header.offset = if n % 100 == 50 { 0 } else { 50 };
            let ticket = machine.admit(&source, &header, payload).expect("heard");
            honest += u32::from(machine.placed(now, ticket, || ()).0.is_some());
        }
    }
    let grown = resident().saturating_sub(before);
    assert_eq!(honest, SOURCES / 100, "whole messages of the honest peer");
    println!(
        "reassembly: {} sources known, {grown} KiB",
        machine.sources()
    );
    assert!(
        grown < 16 << 10,
        "{grown} KiB for {} sources",
        machine.sources()
    );
    drop(machine);
    reliable();
}

/// The same of the reliable mode: questions, forged cookies, and hosts that have their addresses.
fn reliable() {
    let config = FlowsConfig::default();
    let mut machine: Flows<(), ()> = Flows::new(config, RandomState::new());
    let keep = || -> ((), usize) { panic!("nothing is early") };
    let bytes = |control: &Control| {
        let mut raw = Vec::new();
        control.emit(&mut raw);
        raw.len()
    };
    let flow = Flow {
        dst_qp: 1,
        src_qp: 2,
        incarnation: 3,
    };
    let before = resident();
    let (mut asked, mut answered) = (0, 0);
    let mut begun = false;
    for n in 0..SOURCES {
        let now = Duration::from_mins(1) + Duration::from_micros(u64::from(n));
        let hello = Control::Hello { flow, qkey: 1 };
        let mut segment = segment(1, 0);
        match n % 3 {
            // Nothing is remembered of who asks.
            0 => {
                let welcome = machine.welcome(now, from(n), &flow);
                assert!(bytes(&welcome) <= bytes(&hello));
            }
            // A guess, in the shortest segment that there is.
            1 => {
                let cookie = u64::from(n) << 32 | 0x1234;
                segment.reliable = Some(Packet { psn: 1, cookie });
                asked += segment.header_len() + CRC_LEN;
                let admitted = machine.admit(now, from(n), VIA, &segment, 0, keep);
                assert_eq!(admitted, Admit::Done);
            }
            // One that hears what is sent to its address, from one host: it gets as many flows as a host may have.
            _ => {
                let own = SocketAddr::from(([198, 51, 100, 7], 1 + (n / 3 % 60_000) as u16));
                let Control::Welcome { cookie, .. } = machine.welcome(now, own, &flow) else {
                    panic!("a cookie");
                };
                segment.reliable = Some(Packet { psn: 1, cookie });
                asked += segment.header_len() + CRC_LEN;
                if let Admit::Next(spot) = machine.admit(now, own, VIA, &segment, 0, keep) {
                    let _ = machine.placed(&spot, Some(()));
                }
            }
        }
        assert!(machine.len() <= config.max_flows_per_host + 1 && machine.held() == 0);
        if n % 64 == 63 {
            answered += machine
                .answers()
                .iter()
                .map(|(_, _, control)| bytes(control))
                .sum::<usize>();
            assert!(answered <= asked, "{answered} B for {asked} B");
        }
        // In the middle of it an honest peer begins.
        if n == SOURCES / 2 {
            let Control::Welcome { cookie, .. } = machine.welcome(now, HONEST, &flow) else {
                panic!("a cookie");
            };
            segment.len = 10;
            segment.reliable = Some(Packet { psn: 1, cookie });
            begun = matches!(
                machine.admit(now, HONEST, VIA, &segment, 10, keep),
                Admit::Next(_)
            );
        }
    }
    let grown = resident().saturating_sub(before);
    println!(
        "reliable mode: {} flows known, {grown} KiB; {answered} B answered, {asked} B asked",
        machine.len()
    );
    assert!(begun, "an honest peer begins its flow");
    assert!(grown < 32 << 10, "{grown} KiB for {} flows", machine.len());
}
