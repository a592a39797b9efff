//! `weft bench fs`: remote memory as files beside what it stands on, in one run.
//!
//! Each figure is a pair that takes turns: ours and a yardstick. The server is in this process; with its memory, a client's operations are carried out by the
//! engine of its device, as those of raw RDMA are.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use weft_fs::name::{Endpoint, Name};
use weft_fs::server::{Config, Server};
use weft_fs::wire::{Flags, Op, Request};
use weft_fs::{Client, OpenOptions, Settings, door};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, QpInit, RawMemory, RemoteAddr, SendWr, Wc, WcStatus,
};

use crate::aims::{Limit, verdict};
use crate::error::{BenchError, Result};
use crate::output::OutputArgs;
use crate::report::{Report, Section, Table, machine};
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
    /// Where the results go.
    #[command(flatten)]
    output: OutputArgs,
    /// Read this file in pages and say how long one takes; started by the benchmark itself
    #[arg(long, value_name = "FILE", hide = true)]
    child: Option<PathBuf>,
}

fn failed(what: &'static str) -> impl FnOnce(&dyn std::fmt::Display) -> BenchError {
    move |why| BenchError::Stack {
        what,
        why: why.to_string(),
    }
}

/// `map_err` for anything that can be shown.
macro_rules! ok {
    ($what:literal, $done:expr) => {
        $done.map_err(|e| failed($what)(&e))?
    };
}

/// One pair's outcome.
struct Row {
    name: &'static str,
    ours: Vec<f64>,
    yardstick: Vec<f64>,
    unit: &'static str,
    limit: Limit,
}

/// What both sides of the comparisons need.
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
    let mut output = args.output.open()?;
    let world = World::new()?;
    let mut rows = Vec::new();
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
    output.lines(rows.iter().map(Row::json))?;
    output.finish(&report(&rows))
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
        };
        let server = Server::start(config, Arc::new(())).map_err(BenchError::system("a server"))?;
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

/// GB/s out of seconds.
fn rates((ours, yardstick): (Vec<f64>, Vec<f64>), bytes: usize) -> (Vec<f64>, Vec<f64>) {
    let rate = |times: Vec<f64>| times.iter().map(|t| bytes as f64 / t / 1e9).collect();
    (rate(ours), rate(yardstick))
}

/// Two files of this host, made anew for each turn, in turn the one before the other: which pages of the memory a file gets makes more of a difference than what
/// it is called.
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
    // By what is done: ours, and the yardstick's.
    let mut rates: [[Vec<f64>; 2]; 2] = Default::default();
    for turn in 0..args.repetitions {
        let request = Request {
            flags: Flags::READ.with(Flags::WRITE).with(Flags::CREATE),
            ..Request::named(Op::Open, &name(&format!("here{turn}")))
        };
        let opened = ok!(
            "the server's door",
            door::ask(world.server.local_addr(), &request)
        );
        let Some((_, Some(fd))) = opened else {
            return Err(failed("the server's door")(&"it is closed"));
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
    let names = [
        "same host, write 1 MiB (tmpfs)",
        "same host, read 1 MiB (tmpfs)",
    ];
    for (name, [ours, yardstick]) in names.into_iter().zip(rates) {
        rows.push(Row {
            name,
            ours,
            yardstick,
            unit: "GB/s",
            limit: Limit::AtLeast(0.95),
        });
    }
    Ok(())
}

/// Raw RDMA over the same kind of connection.
struct Raw {
    // Dropped first: no memory goes away under a connection.
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
        let param = |data: Vec<u8>| ConnParam {
            private_data: data,
            tls: Some(world.tls.clone()),
            ..ConnParam::default()
        };
        let far = ok!("a device", Device::builder().local(LocalMode::Off).open());
        let near = ok!("a device", Device::builder().local(LocalMode::Off).open());
        let any = ([127, 0, 0, 1], 0).into();
        let listener = cm::Listener::bind(&far, any, 1, &param(Vec::new()))
            .map_err(|e| BenchError::system("listening")(e.into()))?;
        let addr = listener.local_addr();
        let pd = ok!("a domain", far.alloc_pd());
        let far_cq = ok!("a queue", far.create_cq(16, None));
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let far_mr = ok!("memory", pd.alloc_mr(LEN, access));
        ok!("memory", far_mr.fill(0, LEN, 7));
        let at = far_mr.remote(0);
        let mut told = at.rkey.to_be_bytes().to_vec();
        told.extend(at.addr.to_be_bytes());
        let far_qp = ok!("a queue pair", pd.create_qp(&QpInit::new(&far_cq, &far_cq)));
        let accept = param(told);
        let accepting = std::thread::spawn(move || {
            let request = listener.next_request(Some(Duration::from_secs(30)))?;
            request.accept(far_qp, &accept).ok().map(|conn| conn.qp)
        });
        let pd = ok!("a domain", near.alloc_pd());
        let cq = ok!("a queue", near.create_cq(64, None));
        let mr = ok!("memory", pd.alloc_mr(MIB, Access::LOCAL_WRITE));
        let init = QpInit::new(&cq, &cq);
        let conn = ok!(
            "connecting",
            cm::connect(addr, &pd, &init, &param(Vec::new()))
        );
        let far_qp = accepting.join().ok().flatten();
        let far_qp = far_qp.ok_or_else(|| failed("accepting")(&"nobody came"))?;
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
            remote: at,
            _far: (far_qp, far_mr),
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
            Err(failed("a completion")(&wcs[0].status))
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
    let (a, b) = rates(turns, passes * LEN);
    rows.push(Row {
        name: "remote, write 1 MiB (raw RDMA Write)",
        ours: a,
        yardstick: b,
        unit: "GB/s",
        limit: Limit::AtLeast(0.85),
    });
    let ours_read = || {
        for at in steps() {
            ok!("reading", file.pread_raw(&memory, at as u64));
        }
        Ok(())
    };
    let turns = pair(args.repetitions, ours_read, || {
        steps().try_for_each(|at| raw.read(at, MIB))
    })?;
    let (a, b) = rates(turns, passes * LEN);
    rows.push(Row {
        name: "remote, read 1 MiB (raw RDMA Read)",
        ours: a,
        yardstick: b,
        unit: "GB/s",
        limit: Limit::AtLeast(0.85),
    });
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
    rows.push(Row {
        name: "remote, read 4 KiB anywhere (raw RDMA Read)",
        ours: each(a),
        yardstick: each(b),
        unit: "us",
        limit: Limit::AtMost(1.3),
    });
    Ok(())
}

/// A child that ends with this.
struct Guard(Child, PathBuf);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.1).output();
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mounted(args: &FsArgs, world: &World, rows: &mut Vec<Row>) -> Result<()> {
    let dir = world.scratch.join("mnt");
    fs::create_dir_all(&dir).map_err(BenchError::system("a folder"))?;
    let program = std::env::current_exe().map_err(BenchError::system("this program"))?;
    let mut child = Command::new(program)
        .args(["fs", "mount", "--peer", &world.fingerprint])
        .arg(format!("/rdma/{}", world.server.local_addr()))
        .arg(&dir)
        .env("WEFT_LOCAL", "off")
        .stdout(Stdio::piped())
        .spawn()
        .map_err(BenchError::system("weft fs mount"))?;
    let out = child.stdout.take();
    let guard = Guard(child, dir.clone());
    let mut line = String::new();
    if let Some(out) = out {
        let _ = BufReader::new(out).read_line(&mut line);
    }
    if !line.starts_with("mounted") {
        return Err(failed("weft fs mount")(&"see above"));
    }
    let client = world.client()?;
    let file = ok!("opening", client.open(&name("there"), OpenOptions::read()));
    let memory = RawMemory::leak(vec![0; MIB]);
    let path = dir.join("there");
    let mut part = vec![0; MIB];
    let turns = pair(
        args.repetitions,
        || {
            // Opened anew, so that no page of the last time is used.
            let file = File::open(&path).map_err(BenchError::system("opening"))?;
            for at in (0..LEN).step_by(MIB) {
                file.read_exact_at(&mut part, at as u64)
                    .map_err(BenchError::system("reading"))?;
            }
            Ok(())
        },
        || {
            for at in (0..LEN).step_by(MIB) {
                ok!("reading", file.pread_raw(&memory, at as u64));
            }
            Ok(())
        },
    )?;
    let (a, b) = rates(turns, LEN);
    rows.push(Row {
        name: "FUSE, read 1 MiB (preload's way)",
        ours: a,
        yardstick: b,
        unit: "GB/s",
        limit: Limit::AtLeast(0.5),
    });
    drop(guard);
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
        || {
            for at in (0..LEN).step_by(MIB) {
                ok!("reading", file.pread_raw(&memory, at as u64));
            }
            Ok(())
        },
        || {
            let file = mounted.open()?;
            for at in (0..LEN).step_by(MIB) {
                file.read_exact_at(&mut part, at as u64)
                    .map_err(BenchError::system("reading"))?;
            }
            Ok(())
        },
    )?;
    let (a, b) = rates(turns, LEN);
    rows.push(Row {
        name: "remote, read 1 MiB (sshfs)",
        ours: a,
        yardstick: b,
        unit: "GB/s",
        limit: Limit::AtLeast(2.0),
    });
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
    let program = std::env::current_exe().map_err(BenchError::system("this program"))?;
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
        command.args(["bench", "fs", "--child"]).arg(&path);
        if preload {
            command.env("LD_PRELOAD", &library);
        }
        let out = command.output().map_err(BenchError::system("a child"))?;
        let text = String::from_utf8_lossy(&out.stdout);
        text.trim()
            .parse()
            .map_err(|_| failed("a child")(&String::from_utf8_lossy(&out.stderr)))
    };
    let (mut ours, mut yardstick) = (Vec::new(), Vec::new());
    for _ in 0..args.repetitions {
        ours.push(one(true)?);
        yardstick.push(one(false)?);
    }
    rows.push(Row {
        name: "ordinary file under preload, read 4 KiB (without)",
        ours,
        yardstick,
        unit: "ns",
        limit: Limit::AtMost(1.05),
    });
    Ok(())
}

impl Row {
    /// The median of the ratios of turns.
    fn ratio(&self) -> f64 {
        paired_ratio(&self.ours, &self.yardstick).map_or(f64::NAN, |s| s.median)
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "figure": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "beside": self.yardstick,
            "ratio": self.ratio(),
            "aim": self.limit.to_string(),
            "holds": self.limit.holds(self.ratio()),
        })
    }
}

fn report(rows: &[Row]) -> Report {
    let mut report = Report::new("weft bench fs");
    report.intro = vec![format!(
        "{}. Medians; ratios are of turns beside each other.",
        machine()
    )];
    let header = [
        "what (beside)",
        "unit",
        "weft",
        "beside",
        "ratio",
        "to reach",
        "holds",
    ];
    let mut table = Table::new(&header);
    let median = |samples: &[f64]| Summary::of(samples).map_or(f64::NAN, |s| s.median);
    for row in rows {
        table.push([
            row.name.to_owned(),
            row.unit.to_owned(),
            format!("{:.3}", median(&row.ours)),
            format!("{:.3}", median(&row.yardstick)),
            format!("{:.3}", row.ratio()),
            row.limit.to_string(),
            verdict(row.limit.holds(row.ratio())).to_owned(),
        ]);
    }
    report
        .sections
        .push(Section::new("Remote memory as files").table(table));
    report
}
