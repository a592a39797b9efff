//! `weft bench fs`: remote memory as files, compared with the layers below it, in one run.
//!
//! Each figure is a pair measured in turn: ours and a reference. The server is in this process. With its memory, the engine of its device carries out a
//! client's operations, as for raw RDMA.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use weft_fs::name::{Endpoint, Name};
use weft_fs::server::{Config, Server};
use weft_fs::wire::{Flags, Op, Request};
use weft_fs::{Client, OpenOptions, Settings, local_server};
use weft_verbs::cm::ConnParam;
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{Access, Cq, Device, LocalMode, Mr, RawMemory, RemoteAddr, SendWr, Wc, WcStatus};

use crate::aims::Limit::{self, AtLeast, AtMost};
use crate::aims::verdict;
use crate::children::{Running, this_program, weft};
use crate::error::{BenchError, Result, failed, stack};
use crate::output::{self, KEPT, OutputArgs};
use crate::report::{Report, Section, Table, machine};
use crate::sshfs::Mount;
use crate::stats::{Summary, paired_ratio};

/// The buffer that is read and written.
const LEN: usize = 64 << 20;
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// Options of `weft bench fs`.
#[derive(Args, Clone, Debug)]
pub struct FsArgs {
    /// Turns of each pair
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Bytes of each turn with long operations, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    volume: u32,
    /// The preload library, for ordinary files under it
    #[arg(long, value_name = "FILE", env = "WEFT_FS_LIB")]
    lib: Option<PathBuf>,
    /// Results of an earlier run (of --json), which the table is to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    from: Vec<PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    output: OutputArgs,
    /// Read this file in pages and say how long one takes; started by the benchmark itself
    #[arg(long, value_name = "FILE", hide = true)]
    child: Option<PathBuf>,
}

/// `map_err` for any error that can be displayed.
macro_rules! ok {
    ($what:literal, $done:expr) => {
        $done.map_err(stack($what))?
    };
}

/// The two compared cases, the unit, and the ratio's target.
type Figure = (&'static str, &'static str, Limit);

const HERE_WRITE: Figure = ("same host, write 1 MiB (tmpfs)", "GB/s", AtLeast(0.95));
const HERE_READ: Figure = ("same host, read 1 MiB (tmpfs)", "GB/s", AtLeast(0.95));
const WRITE: Figure = (
    "remote, write 1 MiB (raw RDMA Write)",
    "GB/s",
    AtLeast(0.85),
);
const READ: Figure = ("remote, read 1 MiB (raw RDMA Read)", "GB/s", AtLeast(0.85));
const PAGES: Figure = (
    "remote, read 4 KiB anywhere (raw RDMA Read)",
    "us",
    AtMost(1.3),
);
const FUSE: Figure = ("FUSE, read 1 MiB (preload's way)", "GB/s", AtLeast(0.5));
const SSHFS: Figure = ("remote, read 1 MiB (sshfs)", "GB/s", AtLeast(2.0));
const PRELOAD: Figure = (
    "ordinary file under preload, read 4 KiB (without)",
    "ns",
    AtMost(1.05),
);
const FIGURES: [Figure; 8] = [
    HERE_WRITE, HERE_READ, WRITE, READ, PAGES, FUSE, SSHFS, PRELOAD,
];

/// The outcome of one pair: for each turn our value and the reference's.
struct Row(Figure, Vec<f64>, Vec<f64>);

/// The state that both sides of the comparisons need.
struct World {
    server: Server,
    fingerprint: String,
    tls: Tls,
    scratch: PathBuf,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

pub(crate) fn run(args: &FsArgs) -> Result<ExitCode> {
    if let Some(file) = &args.child {
        println!("{}", pages_of(file)?);
        return Ok(ExitCode::SUCCESS);
    }
    let kept: Vec<Value> = output::read(&args.from)?;
    let mut rows: Vec<Row> = kept.iter().filter_map(Row::parse).collect();
    let mut output = args.output.open()?;
    if args.from.is_empty() {
        let world = World::new()?;
        same_host(args, &world, &mut rows)?;
        remote(args, &world, &mut rows)?;
        for (what, done) in [
            ("FUSE", mounted(args, &world, &mut rows)),
            ("sshfs", beside_sshfs(args, &world, &mut rows)),
            ("ordinary files", ordinary(args, &world, &mut rows)),
        ] {
            if let Err(e) = done {
                eprintln!("weft: {what}: not measured: {e}");
            }
        }
    }
    output.lines(rows.iter().map(Row::json))?;
    let source = if args.from.is_empty() {
        format!("{}.", machine())
    } else {
        KEPT.to_owned()
    };
    output.finish(&report(&rows, &source))
}

impl World {
    fn new() -> Result<Self> {
        let identity = ok!("a key pair", Identity::generate());
        let fingerprint = identity.public_key().fingerprint().to_string();
        let tls = ok!("TLS", Tls::new(identity));
        let config = Config {
            bind: ([127, 0, 0, 1], 0).into(),
            dir: None,
            quota: 1 << 32,
            keeps: true,
            max_clients: 16,
            tls: tls.clone(),
            admit: Arc::new(|_| false),
            open: true,
            via: weft_fs::Via::default(),
        };
        let server = Server::start(config).map_err(stack("a server"))?;
        let scratch = PathBuf::from(format!("/dev/shm/weft-bench-fs-{}", std::process::id()));
        fs::create_dir_all(&scratch).map_err(BenchError::system("a folder in /dev/shm"))?;
        Ok(Self {
            server,
            fingerprint,
            tls,
            scratch,
        })
    }

    fn client(&self) -> Result<Client> {
        let device = ok!("a device", Device::builder().local(LocalMode::Off).open());
        let settings = Settings {
            device: Some(device),
            ..Settings::new(Arc::new(self.tls.clone()))
        };
        let endpoint = Endpoint {
            host: "127.0.0.1".into(),
            port: self.server.local_addr().port(),
        };
        Ok(ok!("connecting", Client::connect(&endpoint, settings)))
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap_or_default()
}

/// Turns of a pair: seconds of each.
fn pair(
    turns: u32,
    mut ours: impl FnMut() -> Result<()>,
    mut yardstick: impl FnMut() -> Result<()>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    ours()?;
    yardstick()?;
    for _ in 0..turns {
        let began = Instant::now();
        ours()?;
        a.push(began.elapsed().as_secs_f64());
        let began = Instant::now();
        yardstick()?;
        b.push(began.elapsed().as_secs_f64());
    }
    Ok((a, b))
}

/// A figure in GB/s, out of seconds.
fn rates(figure: Figure, (ours, yardstick): (Vec<f64>, Vec<f64>), bytes: usize) -> Row {
    let rate = |times: Vec<f64>| times.iter().map(|t| bytes as f64 / t / 1e9).collect();
    Row(figure, rate(ours), rate(yardstick))
}

/// Two files of this host, made anew for each turn, each one first in turn: the pages that a file gets matter more than its file system.
fn same_host(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let passes = (args.volume as usize).div_ceil(LEN / MIB);
    let mut part = vec![7; MIB];
    let mut pass = |file: &File, writes: bool, passes: usize| {
        let began = Instant::now();
        for at in (0..passes).flat_map(|_| (0..LEN as u64).step_by(MIB)) {
            let done = if writes {
                file.write_all_at(&part, at)
            } else {
                file.read_exact_at(&mut part, at)
            };
            done.map_err(BenchError::system("a file of this host"))?;
        }
        Ok((passes * LEN) as f64 / began.elapsed().as_secs_f64() / 1e9)
    };
    // By operation: ours, and the reference's.
    let mut rates: [[Vec<f64>; 2]; 2] = Default::default();
    for turn in 0..args.repetitions {
        let request = Request {
            flags: Flags::READ.with(Flags::WRITE).with(Flags::CREATE),
            ..Request::named(Op::Open, &name(&format!("here{turn}")))
        };
        let opened = ok!(
            "the server's local_server",
            local_server::ask(world.server.local_addr(), &request)
        );
        let Some((_, Some(fd))) = opened else {
            return Err(failed("the server's local_server", "it is closed"));
        };
        let tmpfs = tempfile::tempfile_in(&world.scratch)
            .map_err(BenchError::system("a file in /dev/shm"))?;
        let files = [File::from(fd), tmpfs];
        let order = [turn as usize % 2, 1 - turn as usize % 2];
        for side in order {
            pass(&files[side], true, 1)?;
        }
        for (what, writes) in [true, false].into_iter().enumerate() {
            for side in order {
                rates[what][side].push(pass(&files[side], writes, passes)?);
            }
        }
    }
    for (figure, [ours, yardstick]) in [HERE_WRITE, HERE_READ].into_iter().zip(rates) {
        rows.push(Row(figure, ours, yardstick));
    }
    Ok(())
}

/// Raw RDMA over the same kind of connection.
struct Raw {
    // Dropped first: the memory must outlive the connection.
    qp: weft_verbs::Qp,
    cq: Cq,
    mr: Mr,
    remote: RemoteAddr,
    _far: (weft_verbs::Qp, Mr),
    over: Arc<AtomicBool>,
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

impl Raw {
    fn new(world: &World) -> Result<Self> {
        let device = || Device::builder().local(LocalMode::Off).open();
        let (near, far) = (ok!("a device", device()), ok!("a device", device()));
        let near_pd = ok!("a domain", near.alloc_pd());
        let far_pd = ok!("a domain", far.alloc_pd());
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let far_mr = ok!("memory", far_pd.alloc_mr(LEN, access));
        ok!("memory", far_mr.fill(0, LEN, 7));
        let mr = ok!("memory", near_pd.alloc_mr(MIB, Access::LOCAL_WRITE));
        let param = ConnParam {
            tls: Some(world.tls.clone()),
            ..ConnParam::default()
        };
        let ends = weft_costs::pair((&near, &near_pd), (&far, &far_pd), &param)
            .map_err(stack("connect two queue pairs"))?;
        let [(conn, cq), (far, far_cq)] = ends;
        // The far side waits for messages, as a server does: its thread carries the connection.
        let over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&over);
        std::thread::spawn(move || {
            let mut wcs = [Wc::default(); 1];
            while !seen.load(Ordering::SeqCst) {
                if far_cq
                    .wait(&mut wcs, Some(Duration::from_millis(100)))
                    .is_err()
                {
                    break;
                }
            }
        });
        Ok(Self {
            over,
            qp: conn.qp,
            cq,
            mr,
            remote: far_mr.remote(0),
            _far: (far.qp, far_mr),
        })
    }

    fn wait(&self) -> Result<()> {
        let mut wcs = [Wc::default(); 1];
        let got = ok!(
            "a completion",
            self.cq.wait(&mut wcs, Some(Duration::from_secs(30)))
        );
        if got == 1 && wcs[0].status == WcStatus::Success {
            Ok(())
        } else {
            Err(failed("a completion", wcs[0].status))
        }
    }

    fn at(&self, off: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.remote.addr + off as u64,
            ..self.remote
        }
    }

    fn read(&self, off: usize, len: usize) -> Result<()> {
        let wr = SendWr::read(1, self.at(off)).sge(self.mr.sge(0, len));
        ok!("posting", self.qp.post_send_one(wr.signaled()));
        self.wait()
    }

    fn write(&self, off: usize, len: usize) -> Result<()> {
        let wr = SendWr::write(1, self.at(off)).sge(self.mr.sge(0, len));
        ok!("posting", self.qp.post_send_one(wr.signaled()));
        self.wait()
    }
}

fn remote(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let raw = Raw::new(world)?;
    let client = world.client()?;
    let flags = OpenOptions::read().with(Flags::WRITE).with(Flags::CREATE);
    let file = ok!("opening", client.open(&name("there"), flags));
    let memory = RawMemory::leak(vec![7; MIB]);
    let passes = (args.volume as usize).div_ceil(LEN / MIB);
    let steps = || (0..passes).flat_map(|_| (0..LEN).step_by(MIB));
    let ours_write = || {
        for at in steps() {
            ok!("writing", file.pwrite_raw(&memory, at as u64));
        }
        Ok(ok!("writing", file.sync()))
    };
    let raw_write = || steps().try_for_each(|at| raw.write(at, MIB));
    // An empty Read behind the Writes: what the sync is.
    let raw_write = || raw_write().and_then(|()| raw.read(0, 8));
    let turns = pair(args.repetitions, ours_write, raw_write)?;
    rows.push(rates(WRITE, turns, passes * LEN));
    let ours_read = || (0..passes).try_for_each(|_| read(&file, &memory));
    let turns = pair(args.repetitions, ours_read, || {
        steps().try_for_each(|at| raw.read(at, MIB))
    })?;
    rows.push(rates(READ, turns, passes * LEN));
    // Pages that do not follow one another.
    const COUNT: usize = 2000;
    let places = || (0..COUNT).map(|i| i * 7_919 * PAGE % (LEN - PAGE));
    let page = RawMemory::leak(vec![0; PAGE]);
    let (a, b) = pair(
        args.repetitions,
        || {
            for at in places() {
                ok!("reading", file.pread_raw(&page, at as u64));
            }
            Ok(())
        },
        || places().try_for_each(|at| raw.read(at, PAGE)),
    )?;
    let each = |times: Vec<f64>| times.iter().map(|t| t / COUNT as f64 * 1e6).collect();
    rows.push(Row(PAGES, each(a), each(b)));
    Ok(())
}

/// The whole file, of the remote memory.
fn read(file: &weft_fs::File, memory: &RawMemory) -> Result<()> {
    for at in (0..LEN).step_by(MIB) {
        ok!("reading", file.pread_raw(memory, at as u64));
    }
    Ok(())
}

/// The whole file, of a file system.
fn read_file(file: &File, part: &mut [u8]) -> Result<()> {
    let mut places = (0..LEN as u64).step_by(MIB);
    places
        .try_for_each(|at| file.read_exact_at(part, at))
        .map_err(BenchError::system("reading"))
}

fn mounted(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let dir = world.scratch.join("mnt");
    fs::create_dir_all(&dir).map_err(BenchError::system("a folder"))?;
    let mut command = Command::new(weft()?);
    command
        .args(["fs", "mount", "--peer", &world.fingerprint])
        .arg(format!("/rdma/{}", world.server.local_addr()))
        .arg(&dir)
        .env("WEFT_LOCAL", "off")
        .stdout(Stdio::piped());
    let mut child = Running::start(&mut command, "weft fs mount")?;
    let line = child.first_line();
    let _mount = Mount {
        at: dir.clone(),
        _child: child,
    };
    if !line.starts_with("mounted") {
        return Err(failed("weft fs mount", "see above"));
    }
    let client = world.client()?;
    let file = ok!("opening", client.open(&name("there"), OpenOptions::read()));
    let memory = RawMemory::leak(vec![0; MIB]);
    let path = dir.join("there");
    let mut part = vec![0; MIB];
    let turns = pair(
        args.repetitions,
        || {
            // Opened anew, so that no cached page of the last run is used.
            let file = File::open(&path).map_err(BenchError::system("opening"))?;
            read_file(&file, &mut part)
        },
        || read(&file, &memory),
    )?;
    rows.push(rates(FUSE, turns, LEN));
    Ok(())
}

/// Reads of the preload library's kind, and of a file of the same length through sshfs.
fn beside_sshfs(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let mounted = crate::sshfs::Mounted::new(&world.scratch.join("sshfs"), LEN)?;
    let client = world.client()?;
    let file = ok!("opening", client.open(&name("there"), OpenOptions::read()));
    let memory = RawMemory::leak(vec![0; MIB]);
    let mut part = vec![0; MIB];
    let turns = pair(
        args.repetitions,
        || read(&file, &memory),
        || read_file(&mounted.open()?, &mut part),
    )?;
    rows.push(rates(SSHFS, turns, LEN));
    Ok(())
}

/// Nanoseconds of a read of a page of an ordinary file.
fn pages_of(path: &Path) -> Result<f64> {
    let file = File::open(path).map_err(BenchError::system("opening"))?;
    let mut part = [0; PAGE];
    const COUNT: usize = 400_000;
    let began = Instant::now();
    for i in 0..COUNT {
        let at = (i * PAGE % MIB) as u64;
        file.read_exact_at(&mut part, at)
            .map_err(BenchError::system("reading"))?;
    }
    Ok(began.elapsed().as_secs_f64() / COUNT as f64 * 1e9)
}

fn ordinary(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let program = this_program()?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    let places = ["../lib/libweft-fs.so", "libweft_fs_preload.so"];
    let found = places.iter().map(|place| beside.join(place));
    let library = args
        .lib
        .clone()
        .or_else(|| found.into_iter().find(|path| path.exists()))
        .ok_or_else(|| BenchError::Usage("there is no libweft-fs.so; name it with --lib".into()))?;
    let path = world.scratch.join("ordinary");
    fs::write(&path, vec![1; MIB]).map_err(BenchError::system("a file"))?;
    let one = |preload: bool| -> Result<f64> {
        let mut command = Command::new(&program);
        command.args(["fs", "--child"]).arg(&path);
        if preload {
            command.env("LD_PRELOAD", &library);
        }
        let out = command.output().map_err(BenchError::system("a child"))?;
        let text = String::from_utf8_lossy(&out.stdout);
        text.trim()
            .parse()
            .map_err(|_| failed("a child", String::from_utf8_lossy(&out.stderr)))
    };
    let (mut ours, mut yardstick) = (Vec::new(), Vec::new());
    for _ in 0..args.repetitions {
        ours.push(one(true)?);
        yardstick.push(one(false)?);
    }
    rows.push(Row(PRELOAD, ours, yardstick));
    Ok(())
}

impl Row {
    /// The median of the ratios of turns.
    fn ratio(&self) -> f64 {
        paired_ratio(&self.1, &self.2).map_or(f64::NAN, |s| s.median)
    }

    fn json(&self) -> Value {
        let Self((figure, unit, limit), ours, beside) = self;
        let ratio = self.ratio();
        json!({
            "figure": figure, "unit": unit, "ours": ours, "beside": beside, "ratio": ratio,
            "aim": limit.to_string(), "holds": limit.holds(ratio),
        })
    }

    /// Parses the output of [`Row::json`].
    fn parse(line: &Value) -> Option<Self> {
        let figure = FIGURES
            .into_iter()
            .find(|figure| line["figure"] == figure.0)?;
        let values = |name: &str| serde_json::from_value(line[name].clone()).ok();
        Some(Self(figure, values("ours")?, values("beside")?))
    }
}

fn report(rows: &[Row], source: &str) -> Report {
    let mut report = Report::new("weft bench fs");
    report.intro = vec![format!(
        "{source} Medians; ratios are of turns beside each other."
    )];
    let three = |number: f64| format!("{number:.3}");
    let median = |samples: &[f64]| three(Summary::of(samples).map_or(f64::NAN, |s| s.median));
    let table = Table::of(
        rows,
        &[
            ("what (beside)", &|row| row.0.0.to_owned()),
            ("unit", &|row| row.0.1.to_owned()),
            ("weft", &|row| median(&row.1)),
            ("beside", &|row| median(&row.2)),
            ("ratio", &|row| three(row.ratio())),
            ("to reach", &|row| row.0.2.to_string()),
            ("holds", &|row| {
                verdict(row.0.2.holds(row.ratio())).to_owned()
            }),
        ],
    );
    report
        .sections
        .push(Section::new("Remote memory as files").table(table));
    report
}
