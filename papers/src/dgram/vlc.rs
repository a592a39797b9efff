//! The time in which VLC fills its buffer before it plays, by UDP and by HTTP, plain and under `weft run` (the datagram paper's fig. 10).
//!
//! A VLC without a screen plays the live stream of another one. The time is from the start of the player's search for the source to its report that the
//! buffer is full. It includes the detection of the stream's format, but not the start of VLC.

use std::time::{Duration, Instant};

use super::end::Failed;
use crate::children::{find, free_port};
use crate::error::{Result, failed as error};
use crate::media::movie;
use crate::record::{Metric, Record};
use crate::report::{Section, Table};
use weft_bench::run::world::{Stack, User, World, is_root};

/// The transports of the movie: the name in the records, VLC's name of the output, and the end of the player's address.
const WAYS: [(&str, &str, &str); 2] = [("udp", "udp", ""), ("tcp", "http", "/movie")];
const STACKS: [Stack; 2] = [Stack::Plain, Stack::Weft];
/// The rate of the movie, in Mbit/s.
const RATE: f64 = 2.0;
/// The time that the stream runs before the player starts.
const BEFORE: Duration = Duration::from_millis(700);
/// VLC refuses to run as root, so root runs it as nobody.
const NOBODY: User = User {
    uid: 65_534,
    gid: 65_534,
};

/// One player's time, in microseconds.
fn measure(
    world: &World,
    movie: &str,
    stack: Stack,
    (_, output, path): (&str, &str, &str),
) -> Result<f64> {
    let port = free_port()?;
    let user = is_root().then_some(NOBODY);
    let server = format!(
        "vlc -I dummy -q --no-media-library {movie} --sout #std{{access={output},mux=ts,dst=127.0.0.1:{port}{path}}}"
    );
    let _server = world.server(stack, &server, port, user)?;
    std::thread::sleep(BEFORE);
    // With an at sign the address is the receiving one.
    let at = if output == "udp" { "@" } else { "" };
    let player = format!(
        "vlc -I dummy -vv --no-color --no-media-library --vout vdummy --aout adummy --run-time 1 --play-and-exit {output}://{at}127.0.0.1:{port}{path}"
    );
    let (mut looks, mut full) = (None, None);
    world.watch(stack, &player, user, |line| {
        let now = Instant::now();
        if line.contains("creating access: ") {
            looks = Some(now);
        } else if line.contains("Stream buffering done") {
            full = full.or(Some(now));
        }
    })?;
    let took = looks.zip(full).map(|(looks, full)| full - looks);
    let took = took.ok_or_else(|| error("play a movie", "the buffer was never full"))?;
    Ok(took.as_secs_f64() * 1e6)
}

fn every() -> impl Iterator<Item = ((&'static str, &'static str, &'static str), Stack)> {
    WAYS.into_iter()
        .flat_map(|way| STACKS.map(|stack| (way, stack)))
}

/// The figure.
pub(super) fn run(runs: u32, failed: &mut Failed<'_>) -> Vec<Record> {
    let world = || -> Result<(World, String)> {
        if find("vlc").is_none() || find("ffmpeg").is_none() {
            return Err(error(
                "start VLC",
                "vlc or ffmpeg is not installed (Debian: vlc-bin, vlc-plugin-base, ffmpeg)",
            ));
        }
        let world = World::new(None, 0)?;
        let movie = movie(world.dir(), RATE)?;
        Ok((world, movie.display().to_string()))
    };
    let (world, movie) = match world() {
        Ok(ready) => ready,
        Err(error) => {
            failed("VLC", &error);
            return Vec::new();
        }
    };
    let mut samples = vec![Vec::new(); WAYS.len() * STACKS.len()];
    for _ in 0..runs {
        for (i, (way, stack)) in every().enumerate() {
            match measure(&world, &movie, stack, way) {
                Ok(time) => samples[i].push(time),
                Err(error) => failed(&format!("VLC, {}, {}", way.1, stack.short()), &error),
            }
        }
    }
    let points = every().zip(&samples);
    let records = points.filter_map(|((way, stack), samples)| {
        Record::of("vlc", way.0, stack.short(), 0, Metric::time_us, samples)
    });
    records.collect()
}

/// The figure's table.
pub(super) fn section(records: &[Record]) -> Section {
    let by = |record: &Record| {
        let way = WAYS.iter().find(|way| way.0 == record.transport);
        way.map_or("", |way| way.1).to_owned()
    };
    let ms = |us: f64| format!("{:.0}", us / 1e3);
    let table = Table::of(
        records.iter().filter(|record| record.op == "vlc"),
        &[
            ("by", &|record| by(record)),
            ("", &|record| record.stack.clone()),
            ("buffering, ms", &|record| ms(record.summary.median)),
            ("least", &|record| ms(record.summary.min)),
            ("most", &|record| ms(record.summary.max)),
        ],
    );
    Section::new("VLC's buffering time (fig. 10)")
        .text(format!(
            "A movie of {RATE} Mbit/s, sent as it plays to one player, who comes later; VLC's own settings (a second of the movie is buffered)."
        ))
        .table(table)
}

/// UDP's time over HTTP's, both under weft run; and over that of plain UDP.
pub(super) fn ratios(records: &[Record]) -> [Option<f64>; 2] {
    let of = |transport: &str, stack: Stack| {
        let mut found = records.iter().filter(|record| record.op == "vlc");
        let found = found.find(|r| r.transport == transport && r.stack == stack.short())?;
        Some(found.summary.median)
    };
    let ratio = |(a, b): (f64, f64)| a / b;
    let udp = of("udp", Stack::Weft);
    [
        udp.zip(of("tcp", Stack::Weft)).map(ratio),
        udp.zip(of("udp", Stack::Plain)).map(ratio),
    ]
}
