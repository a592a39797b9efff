//! `weft bench join`: the figures of chapter 7 of the thesis, on rings of processes.
//!
//! Each node is a process of its own on this host, so a ring of six shares the cores of one machine. Wall time says little then. The CPU time of the
//! busiest node stands for the time that a machine of its own would need, and the output says which is which.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use weft_roundabout::joins::{HashJoin, Partitioned, Sorted, nested_loops, radix_bits, zipf};
use weft_roundabout::{Door, ELEMENTS, Next, Node, Ring, Security};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::{Access, Device, QpInit, RecvWr, SendWr, Wc, WcStatus};

use crate::error::{BenchError, Result};
use crate::report::Table;
use crate::usage;

const MIB: usize = 1 << 20;

/// Options of `weft bench join`.
#[derive(Args, Clone, Debug)]
pub struct JoinArgs {
    /// Rows of each relation in the joins, in thousands (16 bytes a row)
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rows: u32,
    /// Nodes of the largest ring
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(2..=16))]
    nodes: u32,
    /// Bytes that pass a link when transport alone is measured, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    volume: u32,
    /// Runs of each point; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    /// Write the points as JSON, one a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Be a node; started by the benchmark itself
    #[arg(long, hide = true)]
    node: bool,
}

/// How elements travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Carrier {
    Rdma,
    Tcp,
}

/// What the nodes do.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Work {
    /// So many bytes of each node go round and come home.
    Loop { bytes: usize },
    /// So many bytes go from node 0 to node 1.
    Link { bytes: usize },
    /// The same by plain Sends, without a ring.
    Raw { bytes: usize },
    /// A join of two relations with so many rows in all nodes together, by threads.
    Join {
        how: How,
        rows: usize,
        skew: f64,
        threads: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum How {
    Hash,
    Merge,
    Nested,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Plan {
    carrier: Carrier,
    nodes: Vec<SocketAddr>,
    raw: SocketAddr,
    me: usize,
    id: [u8; 16],
    element: usize,
    work: Work,
}

/// What one node reports.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Outcome {
    setup: f64,
    setup_cpu: f64,
    turn: f64,
    turn_cpu: f64,
    waited: f64,
    matches: u64,
}

#[derive(Serialize, Deserialize)]
struct Doors {
    rdma: SocketAddr,
    tcp: SocketAddr,
    raw: SocketAddr,
}

fn failed(what: &'static str) -> impl FnOnce(&dyn std::fmt::Display) -> BenchError {
    move |why| BenchError::Stack {
        what,
        why: why.to_string(),
    }
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` wants it
fn ring_error(error: weft_roundabout::Error) -> BenchError {
    failed("the ring")(&error)
}

pub(crate) fn run(args: &JoinArgs) -> Result<ExitCode> {
    if args.node {
        return serve().map(|()| ExitCode::SUCCESS);
    }
    let mut bench = Bench::start(args)?;
    println!(
        "Nodes are processes on this host; CPU is that of the busiest node, which stands for a machine of its own. Load: {}.\n",
        usage::load_average()
    );
    bench.link()?;
    bench.loop_delay()?;
    bench.scaling(How::Hash, "Figure 7.9: hash join over nodes")?;
    bench.skew()?;
    bench.scaling(How::Nested, "Figure 7.11: nested loops over nodes")?;
    bench.volume()?;
    bench.hash_and_merge()?;
    bench.threads()?;
    if let Some(path) = &args.json {
        std::fs::write(path, bench.json.as_bytes()).map_err(|source| BenchError::Output {
            path: path.display().to_string(),
            source,
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

// ---- the node's side ------------------------------------------------------------------------------------------

fn serve() -> Result<()> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let rdma = Door::open(any, Security::SameUser, None).map_err(ring_error)?;
    let tcp = Door::open_tcp(any).map_err(ring_error)?;
    let device = Device::open().map_err(|e| failed("a device")(&e))?;
    let listener = cm::Listener::bind(&device, any, 4, &ConnParam::default())
        .map_err(BenchError::system("listening"))?;
    let doors = Doors {
        rdma: rdma.local_addr(),
        tcp: tcp.local_addr(),
        raw: listener.local_addr(),
    };
    say(&doors)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(BenchError::system("standard input"))?;
        let plan: Plan = serde_json::from_str(&line).map_err(|e| failed("a plan")(&e))?;
        let door = if plan.carrier == Carrier::Rdma {
            &rdma
        } else {
            &tcp
        };
        let outcome = match plan.work {
            Work::Raw { bytes } => raw(&plan, bytes, &device, &listener)?,
            _ => node(&plan, door)?,
        };
        say(&outcome)?;
    }
    Ok(())
}

fn say(what: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(what).map_err(|e| failed("a line")(&e))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(BenchError::system("standard output"))
}

fn clocks() -> (Instant, f64) {
    (Instant::now(), usage::cpu_seconds())
}

fn join(plan: &Plan, door: &Door, home: bool) -> Result<Node> {
    let ring = Ring {
        element: plan.element,
        elements: ELEMENTS,
        home,
        ..Ring::new(plan.id, plan.nodes.clone(), plan.me)
    };
    door.join(&ring).map_err(ring_error)
}

fn node(plan: &Plan, door: &Door) -> Result<Outcome> {
    match plan.work {
        Work::Loop { bytes } => transport(join(plan, door, true)?, bytes),
        Work::Link { bytes } => {
            let ours = if plan.me == 0 { bytes } else { 0 };
            transport(join(plan, door, false)?, ours)
        }
        Work::Join {
            how,
            rows,
            skew,
            threads,
        } => relations(plan, door, how, rows, skew, threads),
        Work::Raw { .. } => Err(failed("a plan")(&"no ring")),
    }
}

/// Gives so many bytes and passes on the others'.
fn transport(mut node: Node, mut left: usize) -> Result<Outcome> {
    let (began, cpu) = clocks();
    loop {
        match node.next(left > 0).map_err(ring_error)? {
            Next::Room(room) => {
                let len = left.min(room.capacity());
                left -= len;
                drop(room.commit(len, 0, [0; 4]).map_err(ring_error)?);
            }
            Next::End => break,
            Next::Element(_) | Next::Woken => {}
        }
    }
    node.finish().map_err(ring_error)?;
    Ok(Outcome {
        turn: began.elapsed().as_secs_f64(),
        turn_cpu: usage::cpu_seconds() - cpu,
        ..Outcome::default()
    })
}

/// The same transfer by Sends into receives that are posted beforehand.
fn raw(plan: &Plan, bytes: usize, device: &Device, listener: &cm::Listener) -> Result<Outcome> {
    const DEPTH: usize = 4;
    let said = failed("raw RDMA");
    let run = || -> std::result::Result<Outcome, Box<dyn std::error::Error>> {
        let (len, count) = (plan.element, bytes / plan.element);
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(64, None)?;
        let mr = pd.alloc_mr(len * DEPTH, Access::LOCAL_WRITE)?;
        let receive = |i: usize| RecvWr::new(i as u64).sge(mr.sge(i % DEPTH * len, len));
        let send = |i: usize| SendWr::send(i as u64).sge(mr.sge(i % DEPTH * len, len));
        let mut wcs = [Wc::default(); 1];
        let mut done = || -> std::result::Result<(), Box<dyn std::error::Error>> {
            let got = cq.wait(&mut wcs, Some(Duration::from_secs(30)))?;
            if got == 1 && wcs[0].status == WcStatus::Success {
                return Ok(());
            }
            Err(wcs[0].status.to_string().into())
        };
        let init = QpInit {
            rnr: weft_verbs::Rnr::Wait,
            ..QpInit::new(&cq, &cq)
        };
        let conn = if plan.me == 0 {
            cm::connect(plan.raw, &pd, &init, &ConnParam::default())?
        } else {
            let qp = pd.create_qp(&init)?;
            for i in 0..DEPTH {
                qp.post_recv(&[receive(i)])?;
            }
            let request = listener.next_request(Some(Duration::from_secs(30)));
            request
                .ok_or("nobody came")?
                .accept(qp, &ConnParam::default())?
        };
        let (began, cpu) = clocks();
        if plan.me == 0 {
            for i in 0..count {
                conn.qp.post_send_one(send(i).signaled())?;
                if i + 1 >= DEPTH {
                    done()?;
                }
            }
            for _ in 0..count.min(DEPTH - 1) {
                done()?;
            }
            conn.qp.post_recv(&[receive(0)])?;
        } else {
            for i in 0..count {
                done()?;
                conn.qp.post_recv(&[receive(i)])?;
            }
            conn.qp
                .post_send_one(SendWr::send(0).inline(b"!").signaled())?;
        }
        done()?;
        Ok(Outcome {
            turn: began.elapsed().as_secs_f64(),
            turn_cpu: usage::cpu_seconds() - cpu,
            ..Outcome::default()
        })
    };
    run().map_err(|e| said(&e))
}

/// What travels: blocks of a partition number, a count, keys, rows.
struct Rotating {
    keys: Vec<u64>,
    rows: Vec<u64>,
    /// Ends of partitions; one partition when R is not partitioned.
    starts: Vec<usize>,
    part: usize,
    at: usize,
}

impl Rotating {
    fn is_empty(&mut self) -> bool {
        while self.part + 1 < self.starts.len() && self.at == self.starts[self.part + 1] {
            self.part += 1;
        }
        self.part + 1 >= self.starts.len()
    }

    /// As many words as an element takes.
    fn fill(&mut self, words: usize, out: &mut Vec<u64>) {
        out.clear();
        while out.len() + 4 <= words && !self.is_empty() {
            let room = (words - out.len() - 2) / 2;
            let count = room.min(self.starts[self.part + 1] - self.at);
            let range = self.at..self.at + count;
            out.extend([self.part as u64, count as u64]);
            out.extend(&self.keys[range.clone()]);
            out.extend(&self.rows[range]);
            self.at += count;
        }
    }
}

enum Stays {
    Hash(HashJoin),
    Sorted(Sorted),
    Plain(Vec<u64>, Vec<u64>),
}

impl Stays {
    /// Matches of a block; they are counted, as in the thesis.
    fn count(&self, part: usize, keys: &[u64], rows: &[u64]) -> u64 {
        let mut matches = 0;
        let mut pair = |_, _| matches += 1;
        match self {
            Stays::Hash(hash) => hash.probe(part, keys, rows, &mut pair),
            Stays::Sorted(sorted) => sorted.merge(keys, rows, &mut pair),
            Stays::Plain(s_keys, s_rows) => {
                nested_loops((keys, rows), (s_keys, s_rows), |r, s| r == s, &mut pair);
            }
        }
        matches
    }
}

fn relations(
    plan: &Plan,
    door: &Door,
    how: How,
    rows: usize,
    skew: f64,
    threads: usize,
) -> Result<Outcome> {
    let nodes = plan.nodes.len();
    let mine = rows / nodes + usize::from(plan.me < rows % nodes);
    let distinct = rows as u64;
    let r_keys = zipf(mine, distinct, skew, 2 * plan.me as u64 + 1);
    let s_keys = zipf(mine, distinct, skew, 1000 + 2 * plan.me as u64);
    let numbers: Vec<u64> = (0..mine as u64).collect();

    let (began, cpu) = clocks();
    let (stays, mut rotating) = match how {
        How::Hash => {
            let bits = radix_bits(rows / nodes);
            let r = Partitioned::new(&r_keys, &numbers, bits);
            let stays = Stays::Hash(HashJoin::build(&s_keys, &numbers, bits));
            (stays, (r.keys, r.rows, r.starts))
        }
        How::Merge => {
            let r = Sorted::new(&r_keys, &numbers);
            let stays = Stays::Sorted(Sorted::new(&s_keys, &numbers));
            (stays, (r.keys, r.rows, vec![0, mine]))
        }
        How::Nested => (
            Stays::Plain(s_keys, numbers.clone()),
            (r_keys, numbers, vec![0, mine]),
        ),
    };
    let mut outcome = Outcome {
        setup: began.elapsed().as_secs_f64(),
        setup_cpu: usage::cpu_seconds() - cpu,
        ..Outcome::default()
    };
    let mut rotating = {
        let (keys, rows, starts) = std::mem::take(&mut rotating);
        Rotating {
            keys,
            rows,
            starts,
            part: 0,
            at: 0,
        }
    };

    let mut node = join(plan, door, false)?;
    let (began, cpu) = clocks();
    let (mut words, mut scratch) = (Vec::new(), Vec::new());
    loop {
        let more = !rotating.is_empty();
        match node.next(more).map_err(ring_error)? {
            Next::Room(mut room) => {
                rotating.fill(room.capacity() / 8, &mut words);
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
                room.write(0, &bytes).map_err(ring_error)?;
                drop(room.commit(bytes.len(), 0, [0; 4]).map_err(ring_error)?);
                outcome.matches += blocks(&words, &stays, threads)?;
            }
            Next::Element(element) => {
                let words = element.words(&mut scratch).map_err(ring_error)?;
                outcome.matches += blocks(words, &stays, threads)?;
            }
            Next::End => break,
            Next::Woken => {}
        }
    }
    let load = node.finish().map_err(ring_error)?;
    outcome.turn = began.elapsed().as_secs_f64();
    outcome.turn_cpu = usage::cpu_seconds() - cpu;
    outcome.waited = load.waited.as_secs_f64();
    Ok(outcome)
}

/// Joins the blocks of an element, each by one of the threads.
fn blocks(mut words: &[u64], stays: &Stays, threads: usize) -> Result<u64> {
    let mut blocks = Vec::new();
    while let [part, count, rest @ ..] = words {
        let count = *count as usize;
        let partitions = match stays {
            Stays::Hash(hash) => 1 << hash.bits(),
            _ => 1,
        };
        // Written by a node of our own benchmark, and looked at all the same.
        if rest.len() / 2 < count || *part as usize >= partitions {
            return Err(failed("an element")(&"a block that is none"));
        }
        let (keys, after) = rest.split_at(count);
        let (rows, after) = after.split_at(count);
        // Long blocks are cut, so that all threads have something to do.
        let cut = count.div_ceil(threads).max(1);
        for (keys, rows) in keys.chunks(cut).zip(rows.chunks(cut)) {
            blocks.push((*part as usize, keys, rows));
        }
        words = after;
    }
    let sum = |step: usize| {
        let mine = blocks.iter().skip(step).step_by(threads);
        mine.map(|(part, keys, rows)| stays.count(*part, keys, rows))
            .sum::<u64>()
    };
    if threads == 1 {
        return Ok(sum(0));
    }
    Ok(std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|step| scope.spawn(move || sum(step)))
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or(0))
            .sum()
    }))
}

// ---- the side that asks ---------------------------------------------------------------------------------------

struct Process {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    doors: Doors,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.to = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start() -> Result<Self> {
        let program = std::env::current_exe().map_err(BenchError::system("this program"))?;
        let mut child = Command::new(program)
            .args(["bench", "join", "--node"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::system("starting a node"))?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let from = from.ok_or_else(|| BenchError::PeerGone("no pipes".into()))?;
        let mut from = BufReader::new(from);
        let doors = hear(&mut from)?;
        Ok(Self {
            child,
            to,
            from,
            doors,
        })
    }
}

fn hear<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    let read = from.read_line(&mut line);
    match read.map_err(|e| BenchError::PeerGone(e.to_string()))? {
        0 => Err(BenchError::PeerGone("a node ended".into())),
        _ => serde_json::from_str(&line).map_err(|e| BenchError::PeerGone(e.to_string())),
    }
}

struct Bench<'a> {
    args: &'a JoinArgs,
    processes: Vec<Process>,
    turns: u64,
    json: String,
}

/// The nodes of one turn together.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    wall: f64,
    setup: f64,
    setup_cpu: f64,
    turn_cpu: f64,
    waited: f64,
    matches: u64,
}

impl<'a> Bench<'a> {
    fn start(args: &'a JoinArgs) -> Result<Self> {
        let processes = (0..args.nodes).map(|_| Process::start());
        Ok(Self {
            args,
            processes: processes.collect::<Result<_>>()?,
            turns: 0,
            json: String::new(),
        })
    }

    /// The median of the repetitions, by wall time.
    fn point(&mut self, carrier: Carrier, nodes: usize, element: usize, work: Work) -> Result<Sum> {
        let mut sums = Vec::new();
        for _ in 0..self.args.repetitions {
            sums.push(self.turn(carrier, nodes, element, work)?);
        }
        sums.sort_by(|a, b| a.wall.total_cmp(&b.wall));
        let sum = sums[sums.len() / 2];
        let line = serde_json::json!({
            "carrier": carrier, "nodes": nodes, "element": element, "work": work, "wall": sum.wall, "setup": sum.setup,
            "setup_cpu": sum.setup_cpu, "turn_cpu": sum.turn_cpu, "waited": sum.waited, "matches": sum.matches,
        });
        self.json.push_str(&line.to_string());
        self.json.push('\n');
        Ok(sum)
    }

    fn turn(&mut self, carrier: Carrier, nodes: usize, element: usize, work: Work) -> Result<Sum> {
        self.turns += 1;
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.turns.to_be_bytes());
        let address = |process: &Process| match carrier {
            Carrier::Rdma => process.doors.rdma,
            Carrier::Tcp => process.doors.tcp,
        };
        let addresses: Vec<_> = self.processes[..nodes].iter().map(address).collect();
        let raw = self.processes[1].doors.raw;
        for me in 0..nodes {
            let plan = Plan {
                carrier,
                nodes: addresses.clone(),
                raw,
                me,
                id,
                element,
                work,
            };
            let text = serde_json::to_string(&plan).map_err(|e| failed("a plan")(&e))?;
            let to = self.processes[me].to.as_mut();
            let to = to.ok_or_else(|| BenchError::PeerGone("closed".into()))?;
            writeln!(to, "{text}")
                .and_then(|()| to.flush())
                .map_err(|e| BenchError::PeerGone(e.to_string()))?;
        }
        let mut sum = Sum::default();
        for process in &mut self.processes[..nodes] {
            let outcome: Outcome = hear(&mut process.from)?;
            sum.wall = sum.wall.max(outcome.turn);
            sum.setup = sum.setup.max(outcome.setup);
            sum.setup_cpu = sum.setup_cpu.max(outcome.setup_cpu);
            sum.turn_cpu = sum.turn_cpu.max(outcome.turn_cpu);
            sum.waited = sum.waited.max(outcome.waited);
            sum.matches += outcome.matches;
        }
        Ok(sum)
    }

    fn rows(&self) -> usize {
        self.args.rows as usize * 1000
    }

    fn join(
        &mut self,
        carrier: Carrier,
        nodes: usize,
        how: How,
        skew: f64,
        threads: usize,
    ) -> Result<Sum> {
        let rows = match how {
            // Its work grows with the square.
            How::Nested => self.rows() / 40,
            _ => self.rows(),
        };
        let work = Work::Join {
            how,
            rows,
            skew,
            threads,
        };
        self.point(carrier, nodes, 4 * MIB, work)
    }

    fn link(&mut self) -> Result<()> {
        println!("Figure 7.7: one link, by size of the elements");
        let bytes = self.args.volume as usize * MIB;
        let mut table = Table::new(&[
            "element",
            "ring GB/s",
            "raw Send GB/s",
            "ratio",
            "ring CPU s/GB",
        ]);
        for element in [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB] {
            let ring = self.point(Carrier::Rdma, 2, element, Work::Link { bytes })?;
            let raw = self.point(Carrier::Rdma, 2, element, Work::Raw { bytes })?;
            let rate = |sum: Sum| bytes as f64 / sum.wall / 1e9;
            table.push([
                crate::size::human(element as u64),
                format!("{:.2}", rate(ring)),
                format!("{:.2}", rate(raw)),
                format!("{:.2}", rate(ring) / rate(raw)),
                format!("{:.3}", ring.turn_cpu / (bytes as f64 / 1e9)),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }

    fn loop_delay(&mut self) -> Result<()> {
        println!(
            "Table 7.1: loop delay in ms (CPU of the busiest node in ms), by bytes of each node"
        );
        let sizes = [1, 16, 64];
        let mut table = Table::new(&["nodes", "1 MiB", "16 MiB", "64 MiB"]);
        let mut cpu = vec![Vec::new(); sizes.len()];
        for nodes in 2..=self.args.nodes as usize {
            let mut cells = vec![nodes.to_string()];
            for (i, size) in sizes.iter().enumerate() {
                let bytes = size * MIB;
                let element = (4 * MIB).min(bytes);
                let sum = self.point(Carrier::Rdma, nodes, element, Work::Loop { bytes })?;
                cells.push(format!("{:.1} ({:.1})", sum.wall * 1e3, sum.turn_cpu * 1e3));
                cpu[i].push((nodes as f64, sum.turn_cpu));
            }
            table.push(cells);
        }
        println!("{}", table.to_text(None));
        let r2: Vec<_> = cpu
            .iter()
            .map(|points| format!("{:.3}", r_squared(points)))
            .collect();
        println!("CPU over nodes is linear with R² = {}\n", r2.join(", "));
        Ok(())
    }

    fn scaling(&mut self, how: How, title: &str) -> Result<()> {
        println!("{title}: seconds of CPU of the busiest node");
        let mut table = Table::new(&["nodes", "set-up CPU", "join CPU", "join wall", "matches"]);
        for nodes in 1..=self.args.nodes as usize {
            let sum = self.join(Carrier::Rdma, nodes, how, 0.0, 1)?;
            table.push([
                nodes.to_string(),
                format!("{:.3}", sum.setup_cpu),
                format!("{:.3}", sum.turn_cpu),
                format!("{:.3}", sum.wall),
                sum.matches.to_string(),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }

    fn skew(&mut self) -> Result<()> {
        let nodes = self.args.nodes as usize;
        println!(
            "Figure 7.10: hash join with Zipf keys: set-up and join CPU of the busiest node in s"
        );
        let largest = format!("{nodes} nodes");
        let mut table = Table::new(&["factor", "1 node", &largest, "times", "matches"]);
        for skew in [0.0, 0.3, 0.6, 0.9] {
            let one = self.join(Carrier::Rdma, 1, How::Hash, skew, 1)?;
            let all = self.join(Carrier::Rdma, nodes, How::Hash, skew, 1)?;
            let cpu = |sum: Sum| sum.setup_cpu + sum.turn_cpu;
            table.push([
                format!("{skew}"),
                format!("{:.3}", cpu(one)),
                format!("{:.3}", cpu(all)),
                format!("{:.2}", cpu(one) / cpu(all)),
                all.matches.to_string(),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }

    fn volume(&mut self) -> Result<()> {
        println!("Figure 7.12: hash join, the same rows on every node");
        let mut table = Table::new(&[
            "nodes",
            "GB in all",
            "CPU s of the busiest",
            "GB/s of CPU time",
        ]);
        let each = self.rows() / self.args.nodes as usize;
        for nodes in 1..=self.args.nodes as usize {
            let work = Work::Join {
                how: How::Hash,
                rows: each * nodes,
                skew: 0.0,
                threads: 1,
            };
            let sum = self.point(Carrier::Rdma, nodes, 4 * MIB, work)?;
            let gigabytes = (2 * 16 * each * nodes) as f64 / 1e9;
            let cpu = sum.setup_cpu + sum.turn_cpu;
            table.push([
                nodes.to_string(),
                format!("{gigabytes:.3}"),
                format!("{cpu:.3}"),
                format!("{:.2}", gigabytes / cpu),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }

    fn hash_and_merge(&mut self) -> Result<()> {
        let nodes = self.args.nodes as usize;
        println!("Figure 7.14: hash against merge on {nodes} nodes: seconds of the busiest node");
        let mut table = Table::new(&["join", "set-up CPU", "join CPU", "waited for the ring"]);
        for (name, how) in [("hash", How::Hash), ("merge", How::Merge)] {
            let sum = self.join(Carrier::Rdma, nodes, how, 0.0, 1)?;
            table.push([
                name.to_owned(),
                format!("{:.3}", sum.setup_cpu),
                format!("{:.3}", sum.turn_cpu),
                format!("{:.3}", sum.waited),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }

    fn threads(&mut self) -> Result<()> {
        println!("RDMA against its TCP twin: hash join on 2 nodes, wall time of the join");
        let mut table = Table::new(&[
            "threads",
            "RDMA s",
            "TCP s",
            "times",
            "RDMA CPU s",
            "TCP CPU s",
        ]);
        for threads in [1, 2] {
            let rdma = self.join(Carrier::Rdma, 2, How::Hash, 0.0, threads)?;
            let tcp = self.join(Carrier::Tcp, 2, How::Hash, 0.0, threads)?;
            table.push([
                threads.to_string(),
                format!("{:.3}", rdma.wall),
                format!("{:.3}", tcp.wall),
                format!("{:.2}", tcp.wall / rdma.wall),
                format!("{:.3}", rdma.turn_cpu),
                format!("{:.3}", tcp.turn_cpu),
            ]);
        }
        println!("{}", table.to_text(None));
        Ok(())
    }
}

/// How well a straight line fits.
fn r_squared(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| f(p.0 - mx, p.1 - my)).sum::<f64>();
    let (xy, xx, yy) = (sum(&|x, y| x * y), sum(&|x, _| x * x), sum(&|_, y| y * y));
    if xx * yy == 0.0 {
        1.0
    } else {
        xy * xy / (xx * yy)
    }
}

#[cfg(test)]
mod tests {
    use super::r_squared;

    #[test]
    fn lines_fit_and_others_do_not() {
        assert!((r_squared(&[(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]) - 1.0).abs() < 1e-12);
        assert!(r_squared(&[(1.0, 1.0), (2.0, 9.0), (3.0, 1.0)]) < 0.1);
    }
}
