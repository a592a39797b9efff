//! `weft-papers link`: a command at the near end of a long link.

use crate::children::Running;
use crate::error::{BenchError, Result, stack};
use clap::Args;
use std::ffi::OsString;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;
use weft_link::{FAR, Link, Shape};

const EXAMPLES: &str = "\
Examples:
  weft-papers link -- ping 198.18.0.2
  weft-papers link --delay 24ms --far 'weft-papers blast --listen=198.18.0.2' \\
    -- weft-papers blast 198.18.0.2 --buffer 128M
  weft-papers link --delay 5ms --jitter 1ms --rate 1G --far 'iperf3 -s' \\
    -- iperf3 -c 198.18.0.2
  # without being root
  unshare -Ur weft-papers link -- ping 198.18.0.2";

/// Options of `weft-papers link`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct LinkArgs {
    /// The link itself.
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Runs this at the far end (198.18.0.2) as long as COMMAND runs; words stand between spaces
    #[arg(long, value_name = "COMMAND")]
    pub far: Option<String>,
    /// Runs at the near end (198.18.0.1)
    #[arg(value_name = "COMMAND", required = true, last = true)]
    pub command: Vec<OsString>,
}

/// What the link is like.
#[derive(Args, Clone, Debug)]
pub struct ShapeArgs {
    /// How long a packet travels, each way: 24ms, 500us, 0.1s
    #[arg(long, value_name = "TIME", default_value = "24ms", value_parser = parse_time)]
    pub delay: Duration,
    /// The delay wanders up and down by at most so much
    #[arg(long, value_name = "TIME", default_value = "0ms", value_parser = parse_time)]
    pub jitter: Duration,
    /// Bits per second, with k, M or G (powers of 1000) [default: what this machine forwards]
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub rate: Option<u64>,
    /// Bytes that may wait for the line where there is a rate
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = crate::size::parse_size)]
    pub queue: u64,
    /// Bytes of the largest packet on the line
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(576..=65_535))]
    pub mtu: u32,
    /// Packets of a hundred that are lost, each way: 1, 0.1
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = parse_loss)]
    pub loss: u32,
    /// Seed of jitter and loss
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub link_seed: u64,
}

impl ShapeArgs {
    /// Makes the link.
    pub(crate) fn link(&self) -> Result<Link> {
        let shape = Shape {
            delay: self.delay,
            jitter: self.jitter,
            rate: self.rate,
            queue: self.queue,
            loss: self.loss,
            seed: self.link_seed,
        };
        Link::new(shape, self.mtu).map_err(stack("make a link"))
    }
}

/// Reads a duration of at most an hour: a number with `us`, `ms` or `s`.
pub(crate) fn parse_time(text: &str) -> std::result::Result<Duration, String> {
    let bad = || format!("'{text}' is not a time: write 24ms, 500us or 0.1s");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[number.len()..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(bad()),
    };
    let value: f64 = number.parse().map_err(|_| bad())?;
    let seconds = value * unit;
    if !(0.0..=3600.0).contains(&seconds) {
        return Err(bad());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Reads a share in percent, as parts of a million.
fn parse_loss(text: &str) -> std::result::Result<u32, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok((percent * 10_000.0).round() as u32),
        _ => Err("a loss is from 0 to 100 percent".to_owned()),
    }
}

/// Reads a rate in bits per second.
pub(crate) fn parse_rate(text: &str) -> std::result::Result<u64, String> {
    let bad =
        || format!("'{text}' is not a rate: write bits per second, or a number with k, M or G");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[number.len()..].to_ascii_lowercase().as_str() {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        _ => return Err(bad()),
    };
    let rate = number.parse::<f64>().map_err(|_| bad())? * unit;
    if !(1000.0..=1e12).contains(&rate) {
        return Err("a rate is from 1k to 1000G".to_owned());
    }
    Ok(rate as u64)
}

/// Runs the command, and then reports the traffic of the link. The exit code is the command's.
pub(crate) fn run(args: &LinkArgs) -> Result<ExitCode> {
    let Some((program, words)) = args.command.split_first() else {
        return Err(BenchError::Usage("there is no command".to_owned()));
    };
    let link = args.shape.link()?;
    let start = |name: &str, spawned: std::io::Result<std::io::Result<Child>>| {
        spawned
            .and_then(|child| child)
            .map_err(|error| BenchError::Usage(format!("cannot run {name}: {error}")))
    };
    let _company = match &args.far {
        None => None,
        Some(line) => {
            let mut words = line.split_whitespace();
            let program = words.next().unwrap_or_default();
            let mut command = Command::new(program);
            command.args(words);
            Some(Running(start(
                program,
                link.far().enter(|| command.spawn()),
            )?))
        }
    };
    let mut command = Command::new(program);
    command.args(words);
    let name = program.to_string_lossy();
    let mut child = start(&name, link.near().enter(|| command.spawn()))?;
    let status = child
        .wait()
        .map_err(BenchError::system("wait for the command"))?;
    let [out, back] = link.traffic();
    for (way, traffic) in [("there", out), ("back", back)] {
        eprintln!(
            "link: {way}: {} packets, {} bytes, {} dropped (far end: {FAR})",
            traffic.packets, traffic.bytes, traffic.dropped
        );
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time("24ms"), Ok(Duration::from_millis(24)));
        assert_eq!(parse_time("0.5s"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_time("500us"), Ok(Duration::from_micros(500)));
        for bad in ["", "24", "ms", "-1ms", "nans", "2h", "3601s"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates() {
        assert_eq!(parse_rate("10G"), Ok(10_000_000_000));
        assert_eq!(parse_rate("1.5M"), Ok(1_500_000));
        assert_eq!(parse_rate("9600"), Ok(9600));
        for bad in ["", "G", "1", "1T", "-5M", "2000G", "nan"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }
}
