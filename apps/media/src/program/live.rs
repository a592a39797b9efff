//! `weft media live`.

use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use weft_media::LIVE_PORT;
use weft_media::cut::{Cutter, Part};
use weft_media::live::Live;

use super::{open, open_device};
use weft_cli::args::media::LiveArgs;
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::say;

/// Bytes that are read from the pipe at a time.
const PIECE: usize = 256 << 10;

fn too_long(name: &str) -> Failure {
    Failure::failed(format!("a fragment of {name} does not fit into the ring"))
        .hint("make fragments shorter, or the ring larger with --ring")
}

pub(super) fn run(args: &LiveArgs, global: Global) -> Result<Exit, Failure> {
    if weft_media::names::check(&args.name).is_err() {
        return Err(
            Failure::usage(format!("`{}` cannot be the name of a stream", args.name))
                .hint(weft_media::names::BadName.to_string()),
        );
    }
    if !(1 << 16..=u64::from(u32::MAX)).contains(&args.ring) {
        return Err(
            Failure::usage("--ring has to be from 64K to 4095M").hint("leave it away for 64M")
        );
    }
    let bind = args.bind.unwrap_or((Ipv4Addr::LOCALHOST, LIVE_PORT).into());
    let device = open_device()?;
    let listener = open(
        &args.listen,
        &device,
        bind,
        &format!("the stream is {}", args.name),
        global,
    )?;
    let stream = Live::new(&device, &args.name, args.ring, &listener.cq()).map_err(|e| {
        Failure::failed(format!("cannot make the ring: {e}")).hint("choose a smaller --ring")
    })?;
    let host = Arc::clone(&stream);
    std::thread::Builder::new()
        .name("weft-media-accept".into())
        .spawn(move || listener.run(&host))
        .map_err(|e| {
            Failure::failed(format!("cannot start a thread: {e}"))
                .hint("raise the limit of threads (`ulimit -u`)")
        })?;
    let (fragments, bytes) = feed(args, &stream)?;
    if fragments == 0 {
        return Err(Failure::failed("the input ended before a whole fragment").hint(EXAMPLE));
    }
    stream.end(Duration::from_secs(args.linger));
    if !global.quiet {
        say(format_args!(
            "the input has ended: {fragments} fragments, {}",
            indicatif::HumanBytes(bytes)
        ));
    }
    Ok(Exit::Ok)
}

const EXAMPLE: &str = "for example: ffmpeg ... -f mp4 -movflags frag_keyframe+empty_moov+default_base_moof - | weft media live NAME";

/// Reads the input to its end; fragments and their bytes.
fn feed(args: &LiveArgs, stream: &Live) -> Result<(u64, u64), Failure> {
    // A quarter of the ring: viewers need time for the fragments before.
    let mut cutter = Cutter::new((args.ring / 4) as usize);
    let mut input = io::stdin().lock();
    let mut buf = vec![0; PIECE];
    let (mut fragments, mut total) = (0, 0);
    let mut put = |part: Part| match part {
        Part::Init(format, init) => stream.begin(format, &init),
        Part::Fragment {
            bytes,
            key,
            time,
            duration,
        } => {
            fragments += 1;
            total += bytes.len() as u64;
            stream.push(&bytes, key, time, duration)
        }
    };
    let mut outcome = Ok(());
    loop {
        let n = match input.read(&mut buf) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => {
                return Err(Failure::failed(format!("cannot read the input: {e}"))
                    .hint("give the stream on standard input"));
            }
        };
        let fed = cutter.feed(&buf[..n], |part| {
            if outcome.is_ok() {
                outcome = put(part);
            }
        });
        fed.map_err(|e| Failure::failed(format!("the input cannot be served: {e}")).hint(EXAMPLE))?;
        if outcome.is_err() {
            return Err(too_long(&args.name));
        }
    }
    cutter.finish(|part| {
        if outcome.is_ok() {
            outcome = put(part);
        }
    });
    outcome.map_err(|_| too_long(&args.name))?;
    Ok((fragments, total))
}
