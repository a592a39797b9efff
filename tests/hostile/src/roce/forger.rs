//! A host that is not on the way: it forges the address of an honest peer and knows neither its queue pair nor its numbers, or knows all of them and has
//! another address.

use std::io;
use std::time::Duration;

use super::packet::{
    ACK, BITS, CONGESTION, Packet, READ_REQUEST, SEND_ONLY, WRITE_FIRST, WRITE_ONLY, Wire,
};
use super::session::{DREP, DREQ, MRA, Mad, REJ, REP, RTU, Session, Target};
use super::{PORT, own_address};
use crate::report::Report;
use crate::rng::Rng;
use crate::target::Told;

const REACTION: Duration = Duration::from_secs(10);
/// What it writes, and the victim's memory never has.
const MARK: u8 = 0xee;

pub fn run(target: Target, seed: u64, rounds: usize, report: &mut Report) {
    let mut rng = Rng::new(seed);
    let outcome = forge(target, rounds, &mut rng, report);
    report.case("the honest connection", outcome.map_err(|e| e.to_string()));
}

/// A message of the manager with these numbers.
fn word(attribute: u16, rng: &mut Rng, ids: (u32, u32), qp: u32) -> Mad {
    let mad = Mad::new(attribute, rng.next()).ids(ids.0, ids.1);
    match attribute {
        DREQ => mad.put(8, &(qp << 8).to_be_bytes()),
        REJ => mad.put(10, &4_u16.to_be_bytes()),
        MRA => mad.put(8, &[0, 31 << 3]),
        _ => mad,
    }
}

fn forge(target: Target, rounds: usize, rng: &mut Rng, report: &mut Report) -> io::Result<()> {
    const WORDS: [u16; 6] = [REP, RTU, REJ, MRA, DREQ, DREP];
    let wire = Wire::new(own_address(63), PORT, target.ip)?;
    let mut session = Session::join(target, wire, rng)?;
    let alive = |session: &mut Session, what: &str, report: &mut Report| -> io::Result<()> {
        let echo = session.echo(what.as_bytes(), REACTION)?;
        report.case(what, echo.then_some(()).ok_or("it does not go on".into()));
        Ok(())
    };
    alive(&mut session, "before", report)?;
    // The peer's address, and nothing else of it.
    let mut blind = Wire::new(own_address(63), 0, target.ip)?;
    let before = session.wire.received;
    for _ in 0..rounds * 100 {
        let (qp, psn) = (rng.next() as u32 & BITS, rng.next() as u32);
        let opcode = [SEND_ONLY, WRITE_ONLY, READ_REQUEST, ACK, CONGESTION][rng.below(5)];
        let packet = Packet::new(opcode, qp.max(2), psn);
        blind.send(&match opcode {
            ACK => packet.aeth(rng.next() as u8, 0),
            SEND_ONLY => packet.payload(&[MARK; 16]),
            CONGESTION => packet.payload(&[0; 16]),
            _ => packet.reth(rng.next(), rng.next() as u32, 16),
        })?;
        let ids = (rng.next() as u32, rng.next() as u32);
        let forged = word(WORDS[rng.below(6)], rng, ids, qp);
        blind.send(&forged.packet())?;
    }
    alive(&mut session, "blind", report)?;
    // What was for the honest peer's address went there.
    let answers = session.wire.received - before;
    report.case(
        "amplification",
        (answers <= blind.sent)
            .then_some(())
            .ok_or_else(|| format!("{answers} bytes for {}", blind.sent)),
    );
    // It has found out the queue pair, and the numbers of the connection that the peer itself chose.
    for _ in 0..rounds * 100 {
        // Neither what is expected nor what is on its way.
        let far = 512 + rng.below(1 << 22) as u32;
        let psn = match rng.below(2) {
            0 => session.psn.wrapping_add(far),
            _ => session.psn.wrapping_sub(far),
        };
        let packet = Packet::new(SEND_ONLY, session.qp, psn).payload(&[MARK; 16]);
        blind.send(&packet)?;
        let psn = session.expected.wrapping_add(far);
        let syndrome = [0x1f, 0x20, 0x60, 0x61, 0x62, 0x63][rng.below(6)];
        blind.send(&Packet::new(ACK, session.qp, psn).aeth(syndrome, 0))?;
        let ids = (session.ids.0, [0, rng.next() as u32][rng.below(2)]);
        let forged = word(WORDS[rng.below(6)], rng, ids, session.qp);
        blind.send(&forged.packet())?;
    }
    alive(&mut session, "half blind", report)?;
    // It knows all, and has an address of its own.
    let mut other = Wire::new(own_address(64), PORT, target.ip)?;
    let open = session.told[Told::Open as usize];
    for n in 0..rounds as u32 {
        let psn = session.psn.wrapping_add(n);
        let write = Packet::new(WRITE_ONLY, session.qp, psn).reth(open.addr, open.stag, 16);
        other.send(&write.payload(&[MARK; 16]))?;
        let first = Packet::new(WRITE_FIRST, session.qp, psn).reth(open.addr, open.stag, 4096);
        other.send(&first.payload(&[MARK; 1024]))?;
        other.send(&Packet::new(ACK, session.qp, session.expected).aeth(0x62, 0))?;
        other.send(&Packet::new(CONGESTION, session.qp, 0).payload(&[0; 16]))?;
        for attribute in WORDS {
            let forged = word(attribute, rng, session.ids, session.qp);
            other.send(&forged.packet())?;
        }
    }
    alive(&mut session, "another address", report)?;
    let read = session.next(READ_REQUEST).reth(open.addr, open.stag, 16);
    session.say(&read)?;
    // The victim may acknowledge what came before a little later.
    let answer = loop {
        let answer = session.hear(REACTION)?.ok_or(io::ErrorKind::TimedOut)?;
        if answer.opcode != ACK {
            break answer;
        }
    };
    // Behind the acknowledgement's header.
    let there = answer.rest.get(4..20).unwrap_or_default();
    report.case(
        "the open place",
        (there.len() == 16 && !there.contains(&MARK))
            .then_some(())
            .ok_or_else(|| format!("{answer:?}")),
    );
    session.leave().map(drop)
}
