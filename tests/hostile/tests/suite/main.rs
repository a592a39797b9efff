//! Hostile peers against programs on verbs, EXS and rsockets. (`weft cp --listen`, which begins with TLS, meets them in weft/tests.)
//!
//! For each attack: no byte changes but where the victim opened its memory, nothing waits longer than it is documented to, memory and descriptors stay
//! bounded, honest peers of the same victim go on, and the victim lives.
#![forbid(unsafe_code)]

mod stage;
mod victims;
mod witness;

use weft_hostile::local::stops::STEPS;

use stage::{Bearable, Stage, rounds, seed};

/// What a process of this program is when the suite starts it: see [`stage::Actor::role`].
#[test]
#[ignore = "the life of a victim or a witness"]
fn role() {
    let Ok(role) = std::env::var("HOSTILE_ROLE") else {
        return;
    };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["victim", kind] => victims::live(kind),
        ["witness", kind, addr] => witness::live(kind, addr.parse().expect("an address")),
        _ => panic!("no role is called {role}"),
    }
}

/// All that a peer on the network can do to one kind of victim.
fn network(kind: &str) {
    let (seed, rounds) = (seed(), rounds());
    let mut stage = Stage::new(kind);
    stage.attack(
        Bearable::CALM,
        &[
            &["startup", &seed],
            &["headers", &seed, &rounds],
            &["layers", &seed, &rounds],
        ],
    );
}

#[test]
fn network_verbs() {
    network("verbs");
}

#[test]
fn network_exs() {
    network("exs");
}

#[test]
fn network_packets() {
    network("packets");
}

#[test]
fn network_rsockets() {
    network("rsockets");
}

/// All that a peer of the same host can do.
fn same_host(kind: &str) {
    let (seed, rounds) = (seed(), rounds());
    let mut stage = Stage::new(kind);
    stage.attack(
        Bearable::CALM,
        &[
            &["shared", &seed, &rounds],
            &["shared-layers", &seed, &rounds],
            &["forged", &seed],
        ],
    );
    stage.strange();
    stage.stop("kill", &STEPS);
    stage.stop("stop", &STEPS);
}

#[test]
fn same_host_verbs() {
    same_host("verbs");
}

/// A process number that is used again.
#[test]
fn reuse() {
    let mut stage = Stage::new("verbs");
    stage.attack(Bearable::CALM, &[&["reuse"]]);
}

#[test]
fn dialled_verbs() {
    Stage::new("verbs").dial_all(&seed());
}

#[test]
fn dialled_exs() {
    Stage::new("exs").dial_all(&seed());
}

#[test]
fn dialled_rsockets() {
    Stage::new("rsockets").dial_all(&seed());
}

#[test]
fn same_host_exs() {
    same_host("exs");
}

#[test]
fn same_host_packets() {
    same_host("packets");
}

#[test]
fn same_host_rsockets() {
    same_host("rsockets");
}

#[test]
#[ignore = "a hole that is not closed: an ended connection's references are read to their end, which makes the holes of an arena into memory"]
fn holes_verbs() {
    let mut stage = Stage::new("verbs");
    stage.attack(Bearable::CALM, &[&["holes"]]);
}

/// Ten thousand connections that say nothing, from fifty addresses; again and again for some seconds.
fn flood(kind: &str) {
    let mut stage = Stage::new(kind);
    stage.attack(Bearable::FLOOD, &[&["flood", "10000", "nothing", "3"]]);
}

#[test]
fn flood_verbs() {
    flood("verbs");
}

#[test]
fn flood_exs() {
    flood("exs");
}

/// All that hosts on the network can do to a victim that speaks RoCE v2.
#[test]
fn network_roce() {
    let (seed, rounds) = (seed(), rounds());
    let mut stage = Stage::new("roce");
    stage.attack(
        Bearable::CALM,
        &[&["peer", &seed, &rounds], &["forger", &seed, &rounds]],
    );
}

/// Ten thousand hosts that ask for a connection and say nothing more.
#[test]
fn flood_roce() {
    let mut stage = Stage::new("roce");
    stage.attack(Bearable::FLOOD, &[&["strangers", &seed(), "10000"]]);
}

#[test]
fn flood_rsockets() {
    flood("rsockets");
}
