//! Other libraries' own benchmarks, as child processes: `ucx_perftest` of UCX and `fi_pingpong` of libfabric; and perftest and
//! rstream, unmodified, on weft's own libibverbs and librdmacm.
//!
//! Each run is a server and a client on this machine. They find each other over loopback TCP, then use the transport in the
//! stack's name. The programs measure the time themselves, without their start. Neither their processes nor ours are pinned.

use super::{Kind, Op, Spec, Stack, device};
use crate::children::{Running, find, free_port, listening, weft};
use crate::error::{BenchError, Result};
use crate::patience::PATIENCE;
use std::io::Read;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The output of one run of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Said {
    /// Microseconds for an operation: for a ping-pong one way, for a stream the whole time divided by the number of
    /// operations.
    pub mean_us: f64,
    /// The median of a ping-pong, one way, if the program reports it.
    pub median_us: Option<f64>,
}

/// A program that measures another library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Ucx,
    Fabric,
    /// perftest (`ib_write_bw` and the others), started by `weft verbs`.
    Perftest,
    /// The same on the machine's own libraries and RNIC.
    OnDevice,
    /// rstream of rdma-core, started in the same way.
    Rstream,
}

impl Program {
    /// The program that measures `stack`, and what makes it use that transport.
    fn of(stack: Stack) -> Option<(Self, &'static str)> {
        Some(match stack {
            Stack::UcxPosix => (Self::Ucx, "posix,self"),
            Stack::UcxCma => (Self::Ucx, "posix,cma,self"),
            Stack::UcxTcp => (Self::Ucx, "tcp"),
            Stack::FiShm => (Self::Fabric, "shm"),
            Stack::FiTcp => (Self::Fabric, "tcp;ofi_rxm"),
            Stack::PerftestLocal => (Self::Perftest, "require"),
            Stack::PerftestTcp => (Self::Perftest, "off"),
            Stack::PerftestDevice => (Self::OnDevice, ""),
            Stack::RstreamLocal => (Self::Rstream, "require"),
            Stack::RstreamTcp => (Self::Rstream, "off"),
            _ => return None,
        })
    }

    fn file(self) -> &'static str {
        match self {
            Self::Ucx => "ucx_perftest",
            Self::Fabric => "fi_pingpong",
            Self::Perftest | Self::OnDevice => "ib_write_bw",
            Self::Rstream => "rstream",
        }
    }

    /// Debian's package.
    fn package(self) -> &'static str {
        match self {
            Self::Ucx => "ucx-utils",
            Self::Fabric => "libfabric-bin",
            Self::Perftest | Self::OnDevice => "perftest",
            Self::Rstream => "rdmacm-utils",
        }
    }

    /// The version that the program's library reports.
    fn version(self) -> Option<String> {
        let (file, argument, prefix) = match self {
            Self::Ucx => ("ucx_info", "-v", "# Version "),
            Self::Fabric => ("fi_info", "--version", "libfabric: "),
            Self::Perftest | Self::OnDevice => ("ib_write_bw", "--version", "Version: "),
            Self::Rstream => return None,
        };
        let output = Command::new(file).arg(argument).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find_map(|line| line.strip_prefix(prefix))?;
        Some(line.trim().to_owned())
    }
}

/// Whether another library's program measures the stack.
pub fn has(stack: Stack) -> bool {
    Program::of(stack).is_some()
}

/// Whether another library's program can measure this. UCX and libfabric have no sleeping mode.
pub fn measures(spec: &Spec) -> bool {
    let spins = spec.kind == Kind::Stream || spec.busy;
    match (Program::of(spec.stack), spec.op, spec.kind) {
        (Some((Program::OnDevice, _)), Op::Send | Op::Write | Op::Read, _)
        | (Some((Program::Ucx | Program::Perftest, _)), Op::Send | Op::Write, _)
        | (Some((Program::Fabric, _)), Op::Send, Kind::PingPong)
            if spins =>
        {
            true
        }
        (Some((Program::Perftest | Program::Rstream, _)), Op::Send, Kind::PingPong) => true,
        _ => false,
    }
}

/// The stacks whose programs are not installed, and a note for each missing program and for the version of each other one.
pub fn inventory(stacks: &[Stack]) -> (Vec<Stack>, Vec<String>) {
    let mut missing = Vec::new();
    let mut notes = Vec::new();
    for program in [
        Program::Ucx,
        Program::Fabric,
        Program::Perftest,
        Program::OnDevice,
        Program::Rstream,
    ] {
        let of_program = |stack: &Stack| Program::of(*stack).is_some_and(|(of, _)| of == program);
        let wanted: Vec<Stack> = stacks.iter().copied().filter(of_program).collect();
        if wanted.is_empty() {
            continue;
        }
        if find(program.file()).is_some() {
            let version = program.version().unwrap_or_else(|| "unknown".to_owned());
            notes.push(format!("{}: version {version}.", program.file()));
        } else {
            notes.push(format!(
                "{} is not installed, so its columns are missing; on Debian and Ubuntu: apt-get install {}.",
                program.file(),
                program.package()
            ));
            missing.extend(wanted);
        }
    }
    (missing, notes)
}

/// A child with all that it prints.
struct Printing {
    child: Running,
    output: Receiver<String>,
}

impl Printing {
    fn start(mut command: Command) -> Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = Running::start(&mut command, "start another library's program")?;
        let (send, output) = channel();
        let pipes: [Option<Box<dyn Read + Send>>; 2] = [
            child.0.stdout.take().map(|pipe| Box::new(pipe) as _),
            child.0.stderr.take().map(|pipe| Box::new(pipe) as _),
        ];
        for mut pipe in pipes.into_iter().flatten() {
            let send = send.clone();
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = pipe.read_to_end(&mut bytes);
                let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
            });
        }
        Ok(Self { child, output })
    }

    /// The whole output of the program, after it has ended.
    fn finish(&mut self, file: &'static str) -> Result<String> {
        let until = Instant::now() + PATIENCE;
        let mut text = String::new();
        for _ in 0..2 {
            let left = until.saturating_duration_since(Instant::now());
            text += &self
                .output
                .recv_timeout(left)
                .map_err(|_| BenchError::Stuck(PATIENCE.as_secs(), file))?;
        }
        let status = self.child.0.wait().map_err(BenchError::system("wait"))?;
        if status.success() {
            Ok(text)
        } else {
            Err(nonsense(file, &text))
        }
    }
}

fn nonsense(what: &'static str, text: &str) -> BenchError {
    let mut why: String = text.trim().chars().take(400).collect();
    if why.is_empty() {
        "it said nothing".clone_into(&mut why);
    }
    BenchError::Stack { what, why }
}

/// How often a program is started that cannot tell the speed of its clock.
const TRIES: u32 = 20;

/// Runs `count` operations of `spec` between a server and a client of the other library.
pub fn run(spec: &Spec, count: u64) -> Result<Said> {
    for _ in 0..TRIES {
        if let Some(said) = run_once(spec, count)? {
            return Ok(said);
        }
    }
    let why = "it could not tell the speed of its clock".to_owned();
    Err(BenchError::Stack {
        what: "perftest",
        why,
    })
}

/// `None`: perftest compares clocks at its start, and gives no figures when an emulated processor has slowed one.
fn run_once(spec: &Spec, count: u64) -> Result<Option<Said>> {
    let (program, transport) = Program::of(spec.stack)
        .ok_or_else(|| BenchError::Usage("not another library".to_owned()))?;
    let port = free_port()?;
    let mut server = Printing::start(command(program, transport, spec, count, port, false)?)?;
    let started = Instant::now();
    if program != Program::OnDevice {
        await_listener(&mut server, program, port)?;
    }
    let text = loop {
        let client = command(program, transport, spec, count, port, true)?;
        let said = Printing::start(client)?.finish(program.file());
        // Whether a device's connection manager listens cannot be seen: until it does, clients are refused.
        let early = program == Program::OnDevice && started.elapsed() < PATIENCE;
        if said.is_ok() || !early || !matches!(server.child.0.try_wait(), Ok(None)) {
            break said?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    server.finish(program.file())?;
    let said = match program {
        Program::Ucx => parse_ucx(&text),
        Program::Fabric => parse_fabric(&text, spec.bytes),
        Program::Perftest | Program::OnDevice => parse_perftest(&text),
        Program::Rstream => parse_rstream(&text),
    };
    if said.is_none() && !text.contains("Correlation coefficient") {
        return Err(nonsense(program.file(), &text));
    }
    Ok(said)
}

/// The program of perftest that measures this.
fn perftest(spec: &Spec) -> &'static str {
    match (spec.op, spec.kind) {
        (Op::Write, Kind::Stream) => "ib_write_bw",
        (Op::Write, Kind::PingPong) => "ib_write_lat",
        (Op::Read, Kind::Stream) => "ib_read_bw",
        (Op::Read, Kind::PingPong) => "ib_read_lat",
        (_, Kind::Stream) => "ib_send_bw",
        (_, Kind::PingPong) => "ib_send_lat",
    }
}

/// The command of either end.
fn command(
    program: Program,
    transport: &str,
    spec: &Spec,
    count: u64,
    port: u16,
    client: bool,
) -> Result<Command> {
    let mut command = match program {
        Program::Ucx | Program::Fabric => Command::new(program.file()),
        // `weft verbs` finds the libraries.
        Program::Perftest | Program::Rstream => Command::new(weft()?),
        Program::OnDevice => Command::new(perftest(spec)),
    };
    let mut arguments: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    match program {
        Program::Ucx => {
            let test = match (spec.op, spec.kind) {
                (Op::Write, Kind::Stream) => "ucp_put_bw",
                (Op::Write, Kind::PingPong) => "ucp_put_lat",
                (_, Kind::Stream) => "tag_bw",
                (_, Kind::PingPong) => "tag_lat",
            };
            option("-t", test.to_owned());
            option("-s", spec.bytes.to_string());
            option("-n", count.to_string());
            option("-w", (count / 10).clamp(2, 10_000).to_string());
            option("-p", port.to_string());
            // Comma separated, and only the last numbers.
            arguments.extend(["-v".to_owned(), "-f".to_owned()]);
            command
                .env("UCX_TLS", transport)
                .env(
                    "UCX_NET_DEVICES",
                    if transport == "tcp" { "lo" } else { "all" },
                )
                .env("UCX_WARN_UNUSED_ENV_VARS", "n");
        }
        Program::Fabric => {
            option("-p", transport.to_owned());
            option("-e", "rdm".to_owned());
            option("-I", count.to_string());
            option("-S", spec.bytes.to_string());
            option(if client { "-P" } else { "-B" }, port.to_string());
            command.env("FI_TCP_IFACE", "lo");
        }
        Program::Perftest | Program::OnDevice => {
            if program == Program::Perftest {
                option("verbs", "--local".to_owned());
                option(transport, "--".to_owned());
                option(perftest(spec), "-R".to_owned());
                option("-d", "weft0".to_owned());
            } else {
                option("-R", "-d".to_owned());
                arguments.push(device::name()?);
                // The libraries that weft takes for the machine's.
                if let Some(folder) = std::env::var_os("WEFT_NIC_LIB") {
                    command.env("LD_LIBRARY_PATH", folder);
                }
            }
            let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
            option("-s", spec.bytes.to_string());
            // It wants some.
            option("-n", count.max(10).to_string());
            option("-p", port.to_string());
            // The clock's frequency may change.
            arguments.push("-F".to_owned());
            if spec.kind == Kind::PingPong && !spec.busy {
                arguments.push("-e".to_owned());
            }
            command.env("WEFT_CRC", if spec.crc { "on" } else { "off" });
        }
        Program::Rstream => {
            option("verbs", "--local".to_owned());
            option(transport, "--".to_owned());
            option("rstream", "-S".to_owned());
            arguments.push(spec.bytes.to_string());
            let mut option = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
            // Each iteration is a message there and one back.
            option("-C", "1".to_owned());
            option("-I", count.to_string());
            option("-p", port.to_string());
            if !spec.busy {
                option("-T", "blocking".to_owned());
            }
            if client {
                arguments.push("-s".to_owned());
            }
            command.env("WEFT_CRC", if spec.crc { "on" } else { "off" });
        }
    }
    if client {
        let server = match program {
            Program::OnDevice => device::address()?.1.ip(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        arguments.push(server.to_string());
    }
    command.args(arguments);
    Ok(command)
}

/// Waits until the server listens. The server serves the first connection, so an attempt to connect would spoil the run.
fn await_listener(server: &mut Printing, program: Program, port: u16) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        if listening(port) {
            return Ok(());
        }
        if !matches!(server.child.0.try_wait(), Ok(None)) {
            let text = server.finish(program.file())?;
            return Err(nonsense(program.file(), &text));
        }
        if Instant::now() > until {
            return Err(BenchError::Stuck(PATIENCE.as_secs(), "a listening server"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The line of numbers under the line of names that `ucx_perftest -v -f` prints.
fn parse_ucx(text: &str) -> Option<Said> {
    let mut lines = text.lines();
    let names = lines.find(|line| line.trim_start().starts_with("iterations,"))?;
    let numbers = lines.find(|line| line.contains(','))?;
    let column = |name: &str| -> Option<f64> {
        let index = names.split(',').position(|word| word.trim() == name)?;
        let value = numbers.split(',').nth(index)?.trim().parse::<f64>().ok()?;
        (value > 0.0).then_some(value)
    };
    // Times have three decimals, rates none: each is exact where the other is not.
    let time = column("overall_lat");
    let mean_us = match (time, column("overall_mr")) {
        (Some(time), Some(rate)) if time < 100.0 => 1e6 / rate,
        (Some(time), _) => time,
        (None, rate) => 1e6 / rate?,
    };
    Some(Said {
        mean_us,
        median_us: column("50.0_percentile_lat"),
    })
}

/// The line of numbers under the line of names that `fi_pingpong` prints. A transfer is one way.
fn parse_fabric(text: &str, bytes: u64) -> Option<Said> {
    let mut lines = text.lines();
    let names = lines.find(|line| line.contains("usec/xfer"))?;
    let numbers = lines.find(|line| !line.trim().is_empty())?;
    let column = |name: &str| -> Option<f64> {
        let index = names.split_whitespace().position(|word| word == name)?;
        let word = numbers.split_whitespace().nth(index)?;
        word.parse::<f64>().ok().filter(|value| *value > 0.0)
    };
    // Both have two decimals: the larger one is the more exact.
    let time = column("usec/xfer")?;
    let mean_us = match column("MB/sec") {
        Some(speed) if speed > time => bytes as f64 / speed,
        _ => time,
    };
    Some(Said {
        mean_us,
        median_us: None,
    })
}

/// The line of numbers under the line of names that perftest prints. Latencies are one way.
fn parse_perftest(text: &str) -> Option<Said> {
    let mut lines = text.lines();
    let names = lines.find(|line| line.trim_start().starts_with("#bytes"))?;
    let numbers: Vec<f64> = lines
        .next()?
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    let (mean_us, median_us) = if names.contains("t_typical") {
        // bytes, iterations, least, most, median, mean
        (*numbers.get(5)?, numbers.get(4).copied())
    } else {
        // bytes, iterations, peak MiB/s, mean MiB/s, millions of messages a second
        let (bytes, mean, rate) = (numbers.first()?, *numbers.get(3)?, *numbers.get(4)?);
        // The rate has six decimals, the throughput two.
        let time = if rate >= 0.1 {
            1.0 / rate
        } else {
            bytes / (mean * 1.048_576)
        };
        (time, None)
    };
    (mean_us.is_finite() && mean_us > 0.0).then_some(Said { mean_us, median_us })
}

/// The line of numbers under the line of names that rstream prints. A transfer is one way.
fn parse_rstream(text: &str) -> Option<Said> {
    let mut lines = text.lines();
    let names = lines.find(|line| line.contains("usec/xfer"))?;
    let numbers = lines.find(|line| !line.trim().is_empty())?;
    let at = names
        .split_whitespace()
        .position(|name| name == "usec/xfer")?;
    let mean_us: f64 = numbers.split_whitespace().nth(at)?.parse().ok()?;
    (mean_us > 0.0).then_some(Said {
        mean_us,
        median_us: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(left: f64, right: f64) {
        assert!((left / right - 1.0).abs() < 1e-6, "{left} is not {right}");
    }

    #[test]
    fn ucx_is_read() {
        let names = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr";
        let small = format!(
            "[a warning, with a comma]\n{names}\n10000,0.155,0.154,0.154,396.22,396.22,6491726,6491726\n"
        );
        let said = parse_ucx(&small).unwrap();
        close(said.mean_us, 1e6 / 6_491_726.0);
        assert_eq!(said.median_us, Some(0.155));
        let large = format!("{names}\n  20,702.469,755.405,755.405,21180.68,21180.68,1324,1324\n");
        close(parse_ucx(&large).unwrap().mean_us, 755.405);
        for bad in [
            "",
            names,
            &format!("{names}\n20,a,b,c,d,e,f,g\n"),
            "20,1,1,1,1,1,1,1",
        ] {
            assert_eq!(parse_ucx(bad), None, "{bad}");
        }
    }

    #[test]
    fn libfabric_is_read() {
        let names =
            "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec";
        let line = |numbers: &str| format!("{names}\n{numbers}\n");
        let small =
            line("64      1k      =1k      125k        0.00s    103.98       0.62       1.62");
        close(parse_fabric(&small, 64).unwrap().mean_us, 64.0 / 103.98);
        let slow =
            line("64      1k      =1k      125k        0.06s      2.32      27.55       0.04");
        close(parse_fabric(&slow, 64).unwrap().mean_us, 27.55);
        let large =
            line("16m     100     =100     3.1g        0.56s   6033.10    2780.86       0.00");
        close(
            parse_fabric(&large, 16 << 20).unwrap().mean_us,
            16_777_216.0 / 6033.1,
        );
        for bad in ["", names, &line("fi_getinfo(): no data available")] {
            assert_eq!(parse_fabric(bad, 64), None, "{bad}");
        }
    }

    #[test]
    fn perftest_is_read() {
        let bw = |numbers: &str| {
            format!(
                " MR allocation type\n #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n {numbers}\n---\n"
            )
        };
        let large = bw("1048576    2000             12758.76            1697.33\t\t   0.001697");
        close(
            parse_perftest(&large).unwrap().mean_us,
            1_048_576.0 / (1697.33 * 1.048_576),
        );
        let small = bw("64    2000             128.76            61.04\t\t   1.000000");
        close(parse_perftest(&small).unwrap().mean_us, 1.0);
        let latency = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\n \
                       64      10000          0.49           6801.45      0.62     \t       6.04  141.37\n";
        let said = parse_perftest(latency).unwrap();
        close(said.mean_us, 6.04);
        assert_eq!(said.median_us, Some(0.62));
        for bad in [
            "",
            "#bytes",
            "#bytes\n no",
            &bw("64 100 0.00 0.00 0.000000"),
        ] {
            assert_eq!(parse_perftest(bad), None, "{bad}");
        }
    }

    #[test]
    fn rstream_is_read() {
        let names = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer";
        let row = "custom    64      1       10k     1.2m        0.03s      0.36       1.42";
        let said = parse_rstream(&format!("{names}\n{row}\n")).unwrap();
        assert_eq!((said.mean_us, said.median_us), (1.42, None));
        for bad in ["", names, "rconnect: Connection refused"] {
            assert_eq!(parse_rstream(bad), None, "{bad}");
        }
    }

    #[test]
    fn nothing_else_is_measured() {
        let spec = |stack, op, kind, busy| Spec {
            stack,
            op,
            kind,
            busy,
            ..Spec::BASE
        };
        for (stack, op, kind) in [
            (Stack::UcxCma, Op::Write, Kind::Stream),
            (Stack::UcxTcp, Op::Send, Kind::PingPong),
            (Stack::FiShm, Op::Send, Kind::PingPong),
        ] {
            assert!(measures(&spec(stack, op, kind, true)), "{stack:?} {op:?}");
        }
        for (stack, op, kind, busy) in [
            (Stack::FiShm, Op::Send, Kind::Stream, true),
            (Stack::FiTcp, Op::Write, Kind::PingPong, true),
            (Stack::UcxTcp, Op::WriteImm, Kind::PingPong, true),
            (Stack::UcxCma, Op::Send, Kind::PingPong, false),
            (Stack::Weft, Op::Send, Kind::Stream, false),
        ] {
            assert!(!measures(&spec(stack, op, kind, busy)), "{stack:?} {op:?}");
        }
    }
}
