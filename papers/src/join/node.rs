//! A node of `weft-papers join`: a process that reads plans from its standard input and reports each outcome.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_roundabout::joins::{HashJoin, Partitioned, Sorted, nested_loops, radix_bits, zipf};
use weft_roundabout::{ELEMENTS, Element, Next, Node, Ring, RingListener, Security};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::{Access, Device, QpInit, RecvWr, SendWr, Wc, WcStatus};
use zerocopy::IntoBytes;

use crate::children::{read_line, write_line};
use crate::error::{BenchError, Result, failed, stack};
use crate::usage;

/// The transport of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Carrier {
    Rdma,
    Tcp,
}

/// The work of the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    /// This many bytes of each node go round and come home.
    Loop { bytes: usize },
    /// This many bytes go from node 0 to node 1.
    Link { bytes: usize },
    /// The same by plain Sends, without a ring.
    Raw { bytes: usize },
    /// A join of two relations with this many rows in all nodes together, by threads.
    Join {
        how: How,
        rows: usize,
        skew: f64,
        threads: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum How {
    Hash,
    Merge,
    Nested,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) carrier: Carrier,
    pub(super) nodes: Vec<SocketAddr>,
    pub(super) raw: SocketAddr,
    pub(super) me: usize,
    pub(super) id: [u8; 16],
    pub(super) element: usize,
    pub(super) work: Work,
}

/// The report of one node.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) setup: f64,
    pub(super) setup_cpu: f64,
    pub(super) turn: f64,
    pub(super) turn_cpu: f64,
    pub(super) waited: f64,
    pub(super) matches: u64,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Addresses {
    pub(super) rdma: SocketAddr,
    pub(super) tcp: SocketAddr,
    pub(super) raw: SocketAddr,
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` wants it
fn ring_error(error: weft_roundabout::Error) -> BenchError {
    failed("the ring", error)
}

pub(super) fn serve() -> Result<()> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let rdma = RingListener::open(any, Security::SameUser, None).map_err(ring_error)?;
    let tcp = RingListener::open_tcp(any).map_err(ring_error)?;
    let device = Device::open().map_err(stack("a device"))?;
    let bare = cm::Listener::bind(&device, any, 4, &ConnParam::default())
        .map_err(|e| BenchError::system("listening")(e.into()))?;
    let listeners = Addresses {
        rdma: rdma.local_addr(),
        tcp: tcp.local_addr(),
        raw: bare.local_addr(),
    };
    let (mut from, mut to) = (std::io::stdin().lock(), std::io::stdout().lock());
    write_line(&mut to, &listeners)?;
    while let Some(plan) = read_line::<Plan>(&mut from)? {
        let listener = if plan.carrier == Carrier::Rdma {
            &rdma
        } else {
            &tcp
        };
        let outcome = match plan.work {
            Work::Raw { bytes } => raw(&plan, bytes, &device, &bare)?,
            _ => node(&plan, listener)?,
        };
        write_line(&mut to, &outcome)?;
    }
    Ok(())
}

fn clocks() -> (Instant, f64) {
    (Instant::now(), usage::cpu_seconds())
}

fn join(plan: &Plan, listener: &RingListener, home: bool) -> Result<Node> {
    let ring = Ring {
        element: plan.element,
        elements: ELEMENTS,
        home,
        ..Ring::new(plan.id, plan.nodes.clone(), plan.me)
    };
    listener.join(&ring).map_err(ring_error)
}

fn node(plan: &Plan, listener: &RingListener) -> Result<Outcome> {
    match plan.work {
        Work::Loop { bytes } => transport(join(plan, listener, true)?, bytes),
        Work::Link { bytes } => {
            let ours = if plan.me == 0 { bytes } else { 0 };
            transport(join(plan, listener, false)?, ours)
        }
        Work::Join {
            how,
            rows,
            skew,
            threads,
        } => relations(plan, listener, how, rows, skew, threads),
        Work::Raw { .. } => Err(failed("a plan", "no ring")),
    }
}

/// Sends this many bytes and forwards the other nodes' bytes.
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
    run().map_err(stack("raw RDMA"))
}

/// The data that rotates: blocks of a partition number, a count, keys, rows.
struct Rotating {
    keys: Vec<u64>,
    rows: Vec<u64>,
    /// Ends of partitions; one partition when R is not partitioned.
    starts: Vec<usize>,
    part: usize,
    at: usize,
}

impl Rotating {
    fn new(keys: Vec<u64>, rows: Vec<u64>, starts: Vec<usize>) -> Self {
        Self {
            keys,
            rows,
            starts,
            part: 0,
            at: 0,
        }
    }

    fn is_empty(&mut self) -> bool {
        while self.part + 1 < self.starts.len() && self.at == self.starts[self.part + 1] {
            self.part += 1;
        }
        self.part + 1 >= self.starts.len()
    }

    /// Fills `out` with at most `words` words.
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
    listener: &RingListener,
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
            (stays, Rotating::new(r.keys, r.rows, r.starts))
        }
        How::Merge => {
            let r = Sorted::new(&r_keys, &numbers);
            let stays = Stays::Sorted(Sorted::new(&s_keys, &numbers));
            (stays, Rotating::new(r.keys, r.rows, vec![0, mine]))
        }
        How::Nested => (
            Stays::Plain(s_keys, numbers.clone()),
            Rotating::new(r_keys, numbers, vec![0, mine]),
        ),
    };
    let mut outcome = Outcome {
        setup: began.elapsed().as_secs_f64(),
        setup_cpu: usage::cpu_seconds() - cpu,
        ..Outcome::default()
    };
    let mut node = join(plan, listener, false)?;
    let (began, cpu) = clocks();
    let mut words = Vec::new();
    loop {
        let more = !rotating.is_empty();
        match node.next(more).map_err(ring_error)? {
            Next::Room(mut room) => {
                rotating.fill(room.capacity() / 8, &mut words);
                room.write(0, words.as_bytes()).map_err(ring_error)?;
                let len = size_of_val(words.as_slice());
                drop(room.commit(len, 0, [0; 4]).map_err(ring_error)?);
                outcome.matches += blocks(&Words::Here(&words), &stays, threads)?;
            }
            Next::Element(element) => {
                let words = match element.in_place() {
                    Some(words) => Words::Here(words),
                    None => Words::Registered(&element),
                };
                outcome.matches += blocks(&words, &stays, threads)?;
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

/// The words of an element.
enum Words<'a> {
    Here(&'a [u64]),
    /// Registered memory is never borrowed (ADR 1). It is copied piece by piece; each piece is still in the first-level cache when it is
    /// processed.
    Registered(&'a Element),
}

/// Rows of a piece: 16 KiB of keys and row numbers.
const PIECE: usize = 1024;

impl Words<'_> {
    fn len(&self) -> usize {
        match self {
            Words::Here(words) => words.len(),
            Words::Registered(element) => element.len() / 8,
        }
    }

    /// `len` existing words from `at` on.
    fn get<'b>(&'b self, at: usize, len: usize, copy: &'b mut [u64]) -> Result<&'b [u64]> {
        match self {
            Words::Here(words) => Ok(&words[at..at + len]),
            Words::Registered(element) => {
                let copy = &mut copy[..len];
                element.read_words(at, copy).map_err(ring_error)?;
                Ok(copy)
            }
        }
    }
}

/// Rows of one partition: where their keys and their row numbers are in the element.
struct Block {
    part: usize,
    keys: usize,
    rows: usize,
    count: usize,
}

impl Block {
    /// The number of matches.
    fn count(&self, words: &Words<'_>, stays: &Stays) -> Result<u64> {
        let (mut keys, mut rows) = ([0; PIECE], [0; PIECE]);
        let mut matches = 0;
        for at in (0..self.count).step_by(PIECE) {
            let len = PIECE.min(self.count - at);
            let keys = words.get(self.keys + at, len, &mut keys)?;
            let rows = words.get(self.rows + at, len, &mut rows)?;
            matches += stays.count(self.part, keys, rows);
        }
        Ok(matches)
    }
}

/// The blocks of an element. Long ones are split, so that all threads have work.
fn cut(words: &Words<'_>, stays: &Stays, threads: usize) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let partitions = match stays {
        Stays::Hash(hash) => 1 << hash.bits(),
        _ => 1,
    };
    let mut at = 0;
    while at + 2 <= words.len() {
        let mut copy = [0; 2];
        let head = words.get(at, 2, &mut copy)?;
        let (part, count) = (head[0] as usize, head[1] as usize);
        let keys = at + 2;
        // A node of our own benchmark wrote this, but it is checked all the same.
        if (words.len() - keys) / 2 < count || part >= partitions {
            return Err(failed("an element", "a block that is none"));
        }
        let share = count.div_ceil(threads).max(1);
        blocks.extend((0..count).step_by(share).map(|from| Block {
            part,
            keys: keys + from,
            rows: keys + count + from,
            count: share.min(count - from),
        }));
        at = keys + 2 * count;
    }
    Ok(blocks)
}

/// Joins the blocks of an element, each by one of the threads.
fn blocks(words: &Words<'_>, stays: &Stays, threads: usize) -> Result<u64> {
    let blocks = cut(words, stays, threads)?;
    let sum = |step: usize| {
        let mine = blocks.iter().skip(step).step_by(threads);
        mine.map(|block| block.count(words, stays)).sum()
    };
    if threads == 1 {
        return sum(0);
    }
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|step| scope.spawn(move || sum(step)))
            .collect();
        let ended = running.into_iter().map(thread::ScopedJoinHandle::join);
        ended
            .map(|sum| sum.unwrap_or_else(|_| Err(failed("a thread", "it panicked"))))
            .sum()
    })
}
