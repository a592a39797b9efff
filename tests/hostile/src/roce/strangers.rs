//! Hosts without a connection: what they get for what they send.

use std::net::Ipv4Addr;
use std::time::Duration;

use super::packet::{BITS, Packet, SEND_ONLY, Wire};
use super::session::{DREP, DREQ, MRA, Mad, REJ, REP, REQ, RTU, Target, req};
use super::{PORT, own_address};
use crate::report::Report;
use crate::rng::Rng;

/// Nothing comes any more.
const SILENCE: Duration = Duration::from_millis(200);
/// Sockets at once.
const AT_ONCE: usize = 200;

pub fn run(target: Target, seed: u64, count: usize, report: &mut Report) {
    let mut rng = Rng::new(seed);
    let noise = noise(target, &mut rng);
    report.case("noise", noise);
    let requests = requests(target, count, &mut rng);
    report.case(format!("{count} strangers"), requests);
}

/// One host, and everything that a manager may be told.
fn noise(target: Target, rng: &mut Rng) -> Result<(), String> {
    let text = |e: std::io::Error| e.to_string();
    let ip = own_address(65);
    let mut wire = Wire::new(ip, PORT, target.ip).map_err(text)?;
    for n in 0..2000_u32 {
        let random = rng.next() as u32;
        let packet = match n % 6 {
            // A request that does not fit: one byte is another one.
            0 => {
                let mut mad = req(target, ip, n, rng.next(), random & BITS, random & BITS);
                let at = [8, 9, 10, 11, 12, 50, 56, 71, 72, 87, 140, 141, 159, 175][rng.below(14)];
                mad.body[at] ^= 0x80;
                mad.packet()
            }
            1 => {
                let attribute = [REP, RTU, REJ, MRA, DREQ, DREP][rng.below(6)];
                let mad = Mad::new(attribute, rng.next()).ids(random, rng.next() as u32);
                mad.packet()
            }
            // Another class, version, method or attribute.
            2 => {
                let mut packet = Mad::new(REQ, rng.next()).packet();
                packet.rest[8 + rng.below(18)] ^= 1 << rng.below(8);
                packet
            }
            // Another key of the queue.
            3 => {
                let mut packet = req(target, ip, n, 1, 0x11, 5).packet();
                packet.rest[0] ^= 1;
                packet
            }
            4 => Packet::new(SEND_ONLY, random.max(2), random).payload(&rng.bytes(32)),
            _ => {
                let mut packet = Packet::new(rng.next() as u8, random, random);
                let len = rng.below(300);
                packet.rest = rng.bytes(len);
                packet
            }
        };
        wire.send(&packet).map_err(text)?;
        if n % 64 == 0 {
            while wire.recv(Duration::from_millis(1)).map_err(text)?.is_some() {}
        }
    }
    while wire.recv(SILENCE).map_err(text)?.is_some() {}
    if wire.received > wire.sent {
        return Err(format!("{} bytes for {}", wire.received, wire.sent));
    }
    Ok(())
}

/// So many hosts ask for a connection each, and say nothing more.
fn requests(target: Target, count: usize, rng: &mut Rng) -> Result<(), String> {
    let text = |e: std::io::Error| e.to_string();
    let (mut refused, mut accepted, mut unheard) = (0, 0, 0);
    for batch in 0..count.div_ceil(AT_ONCE) {
        let mut wires = Vec::new();
        for n in 0..AT_ONCE.min(count - batch * AT_ONCE) {
            let at = (batch * AT_ONCE + n) as u16;
            let [high, low] = at.to_be_bytes();
            let ip = Ipv4Addr::new(127, 100 + (at % 50) as u8, high, low);
            let Ok(mut wire) = Wire::new(ip, PORT, target.ip) else {
                continue;
            };
            let id = rng.next() as u32;
            let mad = req(target, ip, id, rng.next(), 0x1234, id & BITS);
            wire.send(&mad.packet()).map_err(text)?;
            wires.push(wire);
        }
        for wire in &mut wires {
            let first = wire.recv(SILENCE).map_err(text)?;
            let first = first.and_then(|bytes| Mad::parse(&Packet::parse(&bytes)?));
            match first.map(|mad| mad.attribute) {
                Some(REP) => accepted += 1,
                Some(REJ) => refused += 1,
                None => unheard += 1,
                Some(other) => return Err(format!("attribute {other:#x}")),
            }
            if wire.received > wire.sent {
                return Err(format!("{} bytes for {}", wire.received, wire.sent));
            }
        }
    }
    println!("note {accepted} accepted, {refused} refused, {unheard} not answered");
    if accepted + refused == 0 {
        return Err("nobody was answered".into());
    }
    Ok(())
}
