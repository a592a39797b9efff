//! The program: `hostile ATTACK KIND ADDR [WORD...]`, see [`weft_hostile`].
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use weft_hostile::dialled;
use weft_hostile::local::{forged, lies, reuse, stops, stranger};
use weft_hostile::network::connections::Say;
use weft_hostile::network::{self, connections, headers, layers, startup};
use weft_hostile::report::Report;
use weft_hostile::roce;
use weft_hostile::target::{Kind, Target};

const USAGE: &str = "\
usage: hostile ATTACK KIND ADDR [WORD...]
ATTACK  headers | layers | startup   [SEED [ROUNDS]]
        flood                        [COUNT [nothing|half [SECONDS]]]
        shared | shared-layers       [SEED [ROUNDS]]    in shared memory
        stop                         STEP               stops there, or ends with HOSTILE_SIGNAL=kill
        forged                       [SEED]             meetings that are not as they should be
        stranger                     PROCESS            another user; the victim's process number
        reuse                                           ends, and another process gets its number
        dialled                      [SEED]             listens (ADDR means nothing), and lies to who dials
        squat                                           the same as another user, with a socket
        holes                                           shared memory that is not there
KIND    verbs | exs | packets | rsockets
        roce, with ATTACK
        peer | forger                [SEED [ROUNDS]]    on a connection of its own; of another host's
        strangers                    [SEED [COUNT]]     without a connection
HOSTILE_ONLY=TEXT in the environment: only the cases with TEXT in their names";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words == ["reuse-bystander"] {
        return status(reuse::bystander());
    }
    if let Some(report) = attack(&words) {
        report.finish();
        ExitCode::SUCCESS
    } else {
        eprintln!("{USAGE}");
        ExitCode::from(2)
    }
}

fn status(outcome: std::io::Result<()>) -> ExitCode {
    if let Err(e) = outcome {
        eprintln!("hostile: {e}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// What came of it; `None`: the words mean nothing.
fn attack(words: &[String]) -> Option<Report> {
    let [attack, kind, addr, rest @ ..] = words else {
        return None;
    };
    let addr = addr.parse().ok()?;
    if kind == "roce" {
        return roce::attack(attack, addr, rest);
    }
    let kind = Kind::parse(kind)?;
    let target = Target {
        kind,
        addr,
        shared: false,
    };
    let number = |at: usize, or: u64| rest.get(at).map_or(Some(or), |word| word.parse().ok());
    let mut report = Report::default();
    match attack.as_str() {
        "headers" => {
            let cases = headers::cases(kind, number(0, 1)?, number(1, 40)? as usize);
            network::run(&target, &cases, &mut report);
        }
        "layers" => {
            let cases = layers::cases(kind, number(0, 1)?, number(1, 40)? as usize);
            network::run(&target, &cases, &mut report);
        }
        "startup" => startup::run(&target, number(0, 1)?, &mut report),
        "flood" => {
            let say = match rest.get(1).map_or("nothing", String::as_str) {
                "nothing" => Say::Nothing,
                "half" => Say::Half,
                _ => return None,
            };
            let refill = Duration::from_secs(number(2, 0)?);
            connections::flood(addr, number(0, 10_000)? as usize, say, refill, &mut report);
        }
        "shared" => {
            let target = Target {
                shared: true,
                ..target
            };
            let cases = lies::cases(kind, number(0, 1)?, number(1, 40)? as usize);
            network::run(&target, &cases, &mut report);
        }
        "shared-layers" => {
            let target = Target {
                shared: true,
                ..target
            };
            let cases = layers::cases(kind, number(0, 1)?, number(1, 40)? as usize);
            network::run(&target, &cases, &mut report);
        }
        "holes" => {
            let target = Target {
                shared: true,
                ..target
            };
            network::run(&target, &lies::holes(), &mut report);
        }
        "reuse-peer" => report.case("peer", reuse::peer(&target).map_err(|e| e.to_string())),
        "stop" => {
            let reached = stops::reach(&target, rest.first()?);
            report.case(rest.first()?, reached.map(drop).map_err(|e| e.to_string()));
        }
        "stranger" => stranger::run(&target, number(0, 0)? as u32, &mut report),
        "dialled" => dialled::run(kind, number(0, 1)?, &mut report),
        "squat" => dialled::squat(kind, &mut report),
        "reuse" => reuse::run(&target, &mut report),
        "forged" => forged::run(&target, number(0, 1)?, &mut report),
        _ => return None,
    }
    Some(report)
}
