//! The record: a header and a fixed number of slots, one for each process that made socket calls. All are 64-bit words in the machine's byte
//! order, which only ever grow; so one process can write while another reads, and neither waits.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The first word of a record.
pub const MAGIC: u64 = u64::from_le_bytes(*b"wftadv01");
/// The environment variable that names the record's file to the observer.
pub const ENVIRONMENT: &str = "WEFT_ADVISE";
/// Processes that a record has room for; more are counted in [`Header::lost`].
pub const PROCESSES: usize = 256;
/// Size classes: 0, and one for each power of two.
pub const CLASSES: usize = 40;
/// Classes of the time between two uses of a buffer: below 10 µs, 100 µs, 1 ms, 10 ms, and more.
pub const GAPS: usize = 5;
/// Upper ends of all classes except the last, in nanoseconds.
pub const GAP_ENDS: [u64; GAPS - 1] = [10_000, 100_000, 1_000_000, 10_000_000];
/// Words of a process's name.
const NAME_WORDS: usize = 16;

macro_rules! numbered {
    ($(#[$about:meta])* $name:ident, $count:ident: $($(#[$doc:meta])* $item:ident,)*) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum $name { $($(#[$doc])* $item,)* }
        /// How many there are.
        pub const $count: usize = [$($name::$item),*].len();
    };
}

numbered! {
    /// Counters of a process.
    Count, COUNTS:
    /// Number of the process.
    Pid,
    /// Number of its parent.
    Parent,
    /// Monotonic time of its first socket call, ns.
    Started,
    /// Monotonic time of its orderly end, ns; 0 as long as there was none.
    Ended,
    /// Monotonic time of its last recorded call, ns.
    Last,
    /// Processor time of the whole process, ns, as of a late call.
    Cpu,
    /// Threads that made socket calls.
    Threads,
    /// Times that it forked after its first socket call.
    Forks,
    /// TCP sockets seen.
    Streams,
    /// UDP sockets seen.
    Datagrams,
    /// Unix sockets seen.
    Unix,
    /// Other sockets seen.
    Others,
    /// Connections asked for.
    Connects,
    /// Connections accepted.
    Accepts,
    /// Ends of TCP connections whose peer is on this host.
    SameHost,
    /// Ends of TCP connections whose peer is on another host (or in another network namespace).
    OtherHost,
    /// TCP connections whose end was seen.
    Closed,
    /// The time that these were open, ns.
    Lifetime,
    /// Those of them with fewer than four sends and receives and less than 64 KiB.
    ShortLock,
    /// Turns: a send that follows a receive on the same connection.
    Turns,
    /// Calls of poll, select and `epoll_wait`.
    Waits,
    /// Those with a time limit of zero.
    WaitsZero,
    /// Those that found nothing.
    WaitsEmpty,
    /// The time in them, ns.
    WaitNs,
    /// Descriptors that they found ready.
    Ready,
    /// Calls of sendfile and splice that reached a socket.
    FileCalls,
    FileBytes,
    /// The time in them, ns.
    FileNs,
    /// Sends with `MSG_ZEROCOPY`.
    ZeroCopy,
    /// Receives that only looked (`MSG_PEEK`).
    Peeks,
    /// Sends and receives of urgent data.
    Urgent,
    /// Messages that passed descriptors.
    Rights,
    /// `io_uring` set up by `syscall`.
    Uring,
    /// Socket calls made by `syscall`, which are not observed.
    Direct,
    /// Calls whose own cost was measured.
    OwnSampled,
    /// Cost of the sampled calls in processor time, ns.
    OwnNs,
}

numbered! {
    /// Counters of one way: sending or receiving, over TCP unless said.
    Flow, FLOWS:
    Calls,
    /// Bytes that moved.
    Bytes,
    /// Bytes that moved between processes of this host.
    BytesSameHost,
    /// Bytes asked for.
    Asked,
    /// The time in the calls, ns.
    Ns,
    /// Calls that moved less than was asked for.
    Short,
    /// Calls that would have had to wait.
    Again,
    /// Calls that failed in other ways.
    Failed,
    /// Calls with more than one piece of memory.
    Gathers,
    /// Pieces of those calls.
    Pieces,
    /// Calls whose memory begins on a page.
    Aligned,
    /// Calls from (or into) a buffer that begins where one began before.
    Again1,
    /// Bytes of those calls.
    BytesAgain,
    /// Calls whose buffer begins in 64 KiB that were used before.
    AreaAgain,
    /// The time from the end of a call to the next with the same buffer, ns.
    GapNs,
    /// Of that, what a transfer that goes on in the meantime could use: at most the time of the call before, ns.
    OverlapNs,
    /// Calls whose processor time was measured.
    Sampled,
    /// Processor time of the sampled calls, ns.
    SampledCpu,
    /// Pages looked at before a call, of a sample of calls.
    Pages,
    /// Those of them that were resident.
    Resident,
    /// Calls on UDP sockets.
    DatagramCalls,
    /// Bytes of them.
    DatagramBytes,
    /// The time in them, ns.
    DatagramNs,
    /// Calls on Unix sockets.
    UnixCalls,
    /// Bytes of them.
    UnixBytes,
}

/// Sizes of one class.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LiveClass {
    /// Calls.
    pub count: AtomicU64,
    pub bytes: AtomicU64,
    /// The complement of the smallest; 0 when there is none.
    pub not_least: AtomicU64,
    /// The largest.
    pub most: AtomicU64,
}

/// Sending or receiving.
#[derive(Debug)]
#[repr(C)]
pub struct LiveWay {
    /// By [`Flow`].
    pub flows: [AtomicU64; FLOWS],
    /// Uses of a buffer again, by the time since the last, as [`GAP_ENDS`] says.
    pub gaps: [AtomicU64; GAPS],
    /// Sizes: of sends as asked for, of receives as they came.
    pub sizes: [LiveClass; CLASSES],
}

impl LiveWay {
    #[inline]
    pub fn add(&self, flow: Flow, n: u64) {
        self.flows[flow as usize].fetch_add(n, Relaxed);
    }

    #[inline]
    pub fn size(&self, n: u64) {
        let class = &self.sizes[class(n)];
        class.count.fetch_add(1, Relaxed);
        class.bytes.fetch_add(n, Relaxed);
        // Most calls find both as they are, and write nothing.
        if class.not_least.load(Relaxed) < !n {
            class.not_least.fetch_max(!n, Relaxed);
        }
        if class.most.load(Relaxed) < n {
            class.most.fetch_max(n, Relaxed);
        }
    }
}

#[inline]
pub fn class(n: u64) -> usize {
    ((64 - n.leading_zeros()) as usize).min(CLASSES - 1)
}

/// A process as its observer writes it.
#[derive(Debug)]
#[repr(C)]
pub struct LiveProcess {
    /// Its program's file: bytes, then zeros.
    pub name: [AtomicU64; NAME_WORDS],
    /// By [`Count`].
    pub counts: [AtomicU64; COUNTS],
    /// Sending and receiving.
    pub ways: [LiveWay; 2],
}

impl LiveProcess {
    #[inline]
    pub fn add(&self, count: Count, n: u64) {
        self.counts[count as usize].fetch_add(n, Relaxed);
    }

    #[inline]
    pub fn set(&self, count: Count, n: u64) {
        self.counts[count as usize].store(n, Relaxed);
    }

    /// Writes the name; what does not fit is left out at the front.
    pub fn set_name(&self, name: &[u8]) {
        let kept = &name[name.len().saturating_sub(NAME_WORDS * 8)..];
        for (word, bytes) in self.name.iter().zip(kept.chunks(8)) {
            let mut full = [0; 8];
            full[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(full), Relaxed);
        }
    }
}

/// The words before the processes.
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Bytes of a process, so that an observer of another build keeps away.
    pub stride: AtomicU64,
    /// Slots assigned.
    pub given: AtomicU64,
    /// Processes with socket calls for which there was no slot.
    pub lost: AtomicU64,
    /// Programs that began with the observer loaded.
    pub images: AtomicU64,
    pub forks: AtomicU64,
    /// Room.
    pub spare: [AtomicU64; 2],
}

#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// The words before the processes.
    pub header: Header,
    pub processes: [LiveProcess; PROCESSES],
}

/// Bytes of a record.
pub const TABLE_BYTES: usize = size_of::<Table>();
/// Bytes of a process.
pub const PROCESS_BYTES: usize = size_of::<LiveProcess>();
const HEADER_WORDS: usize = size_of::<Header>() / 8;

/// The first bytes of an empty record; the rest are zeros.
pub fn beginning() -> Vec<u8> {
    [MAGIC, PROCESS_BYTES as u64]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect()
}

/// Sizes of one class, read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Class {
    /// Calls.
    pub count: u64,
    pub bytes: u64,
    /// The smallest.
    pub least: u64,
    /// The largest.
    pub most: u64,
}

/// Sending or receiving, read.
#[derive(Clone, Debug)]
pub struct Way {
    flows: [u64; FLOWS],
    /// Uses of a buffer again, by the time since the last.
    pub gaps: [u64; GAPS],
    pub sizes: [Class; CLASSES],
}

impl Way {
    pub fn get(&self, flow: Flow) -> u64 {
        self.flows[flow as usize]
    }

    /// `part` for each `whole`, from 0 to 1; `None` when there is no whole.
    pub fn share(&self, part: Flow, whole: Flow) -> Option<f64> {
        share(self.get(part), self.get(whole))
    }

    /// The time in the calls that was not processor time: waiting for the peer or for a processor, ns. An estimate from a sample of the calls.
    pub fn waited(&self) -> u64 {
        let (calls, sampled) = (self.get(Flow::Calls), self.get(Flow::Sampled));
        if sampled == 0 {
            return 0;
        }
        let cpu = self.get(Flow::SampledCpu) as f64 / sampled as f64 * calls as f64;
        self.get(Flow::Ns).saturating_sub(cpu as u64)
    }

    /// The processor time in the calls, ns; an estimate from a sample of them.
    pub fn worked(&self) -> u64 {
        self.get(Flow::Ns).saturating_sub(self.waited())
    }

    /// The size below which half of the bytes moved: the largest of the class in which the middle byte is.
    pub fn middle_size(&self) -> u64 {
        let all: u64 = self
            .sizes
            .iter()
            .fold(0, |sum, class| sum.saturating_add(class.bytes));
        let mut sum = 0u64;
        for class in self.sizes.iter().filter(|class| class.count > 0) {
            sum = sum.saturating_add(class.bytes);
            if sum >= all / 2 {
                return class.most;
            }
        }
        0
    }

    /// The class with the most calls.
    pub fn usual(&self) -> Option<Class> {
        let classes = self.sizes.iter().filter(|class| class.count > 0);
        classes.max_by_key(|class| class.count).copied()
    }
}

/// `part` of `whole`, at most 1.
pub fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| (part as f64 / whole as f64).min(1.0))
}

#[derive(Clone, Debug)]
pub struct Process {
    /// Its program's file; characters that do not print are replaced.
    pub name: String,
    counts: [u64; COUNTS],
    pub sends: Way,
    pub receives: Way,
}

impl Process {
    pub fn get(&self, count: Count) -> u64 {
        self.counts[count as usize]
    }

    /// From its first socket call to its end, or to the last call, ns.
    pub fn span(&self) -> u64 {
        let end = self.get(Count::Ended).max(self.get(Count::Last));
        end.saturating_sub(self.get(Count::Started))
    }

    /// Calls recorded.
    pub fn calls(&self) -> u64 {
        [&self.sends, &self.receives]
            .into_iter()
            .flat_map(|way| [Flow::Calls, Flow::DatagramCalls, Flow::UnixCalls].map(|f| way.get(f)))
            .chain([self.get(Count::Waits), self.get(Count::FileCalls)])
            .fold(0, u64::saturating_add)
    }

    /// Returns the observer's cost for the process in processor time, ns, estimated from a sample of the calls.
    pub fn own_cost(&self) -> u64 {
        let sampled = self.get(Count::OwnSampled);
        if sampled == 0 {
            return 0;
        }
        (self.get(Count::OwnNs) as f64 / sampled as f64 * self.calls() as f64) as u64
    }
}

#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Those that made socket calls, in the order of their first.
    pub processes: Vec<Process>,
    /// Processes with socket calls for which there was no room.
    pub lost: u64,
    /// Programs that began with the observer loaded.
    pub images: u64,
    pub forks: u64,
}

struct Words<'a>(std::slice::ChunksExact<'a, u8>);

impl Words<'_> {
    fn word(&mut self) -> u64 {
        let bytes = self.0.next().and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    }

    fn words<const N: usize>(&mut self) -> [u64; N] {
        std::array::from_fn(|_| self.word())
    }

    fn way(&mut self) -> Way {
        Way {
            flows: self.words(),
            gaps: self.words(),
            sizes: std::array::from_fn(|_| {
                let [count, bytes, not_least, most] = self.words();
                Class {
                    count,
                    bytes,
                    least: if not_least == 0 { 0 } else { !not_least },
                    most,
                }
            }),
        }
    }
}

/// Reads the bytes of a record; `None` when they are not one of this version.
pub fn read(bytes: &[u8]) -> Option<Record> {
    let mut words = Words(bytes.chunks_exact(8));
    let [magic, stride, given, lost, images, forks, _, _] = words.words::<HEADER_WORDS>();
    if magic != MAGIC || stride != PROCESS_BYTES as u64 {
        return None;
    }
    let count = given.min(PROCESSES as u64) as usize;
    let slots = bytes.get(HEADER_WORDS * 8..)?.chunks_exact(PROCESS_BYTES);
    let processes = slots.take(count).map(|slot| {
        let mut words = Words(slot.chunks_exact(8));
        let name = words.words::<NAME_WORDS>().map(u64::to_ne_bytes);
        let name = name.as_flattened();
        let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
        let name = String::from_utf8_lossy(&name[..end]);
        Process {
            name: name
                .chars()
                .map(|c| if c.is_control() { '\u{fffd}' } else { c })
                .collect(),
            counts: words.words(),
            sends: words.way(),
            receives: words.way(),
        }
    });
    Some(Record {
        // A slot that is assigned and not yet filled has no process number.
        processes: processes.filter(|p| p.get(Count::Pid) != 0).collect(),
        lost,
        images,
        forks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a record with one process, whose words are all `fill` except its number.
    fn bytes(fill: u64, given: u64) -> Vec<u8> {
        let mut words = vec![fill; TABLE_BYTES / 8];
        words[..8].copy_from_slice(&[MAGIC, PROCESS_BYTES as u64, given, 1, 2, 3, 0, 0]);
        words.into_iter().flat_map(u64::to_ne_bytes).collect()
    }

    #[test]
    fn classes_are_powers_of_two() {
        assert_eq!(class(0), 0);
        assert_eq!(class(1), 1);
        assert_eq!((class(1023), class(1024), class(1025)), (10, 11, 11));
        assert_eq!(class(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn what_is_written_is_read() {
        let live: LiveWay = LiveWay {
            flows: [const { AtomicU64::new(0) }; FLOWS],
            gaps: [const { AtomicU64::new(0) }; GAPS],
            sizes: std::array::from_fn(|_| LiveClass::default()),
        };
        for n in [131_072, 131_072, 140_000, 0] {
            live.size(n);
        }
        live.add(Flow::Calls, 4);
        let mut bytes = bytes(0, 1);
        let start = HEADER_WORDS * 8;
        bytes[start..start + 3].copy_from_slice(b"a\nb");
        let pid = start + NAME_WORDS * 8;
        bytes[pid..pid + 8].copy_from_slice(&7u64.to_ne_bytes());
        let way = pid + COUNTS * 8;
        let mut words = Vec::new();
        words.extend(live.flows.iter().map(|w| w.load(Relaxed)));
        words.extend(live.gaps.iter().map(|w| w.load(Relaxed)));
        for class in &live.sizes {
            words.extend(
                [&class.count, &class.bytes, &class.not_least, &class.most]
                    .map(|w| w.load(Relaxed)),
            );
        }
        let words: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        bytes[way..way + words.len()].copy_from_slice(&words);

        let record = read(&bytes).unwrap();
        assert_eq!((record.lost, record.images, record.forks), (1, 2, 3));
        let process = &record.processes[0];
        assert_eq!(process.name, "a\u{fffd}b");
        assert_eq!(process.get(Count::Pid), 7);
        assert_eq!(process.sends.get(Flow::Calls), 4);
        assert_eq!(
            process.sends.usual(),
            Some(Class {
                count: 3,
                bytes: 402_144,
                least: 131_072,
                most: 140_000
            })
        );
        assert_eq!(process.receives.usual(), None);
        assert_eq!(process.sends.sizes[0].count, 1);
        assert_eq!(process.sends.middle_size(), 140_000);
    }

    #[test]
    fn whatever_a_program_writes_is_read() {
        assert!(read(b"").is_none());
        assert!(read(&[0; 4096]).is_none());
        for fill in [0, 1, u64::MAX, u64::MAX / 2] {
            for given in [0, 1, PROCESSES as u64, u64::MAX] {
                let bytes = bytes(fill, given);
                for len in [
                    64,
                    65,
                    64 + PROCESS_BYTES - 1,
                    64 + PROCESS_BYTES,
                    bytes.len(),
                ] {
                    let record = read(&bytes[..len]).unwrap();
                    assert!(record.processes.len() <= PROCESSES);
                    for process in &record.processes {
                        process.span();
                        process.calls();
                        process.own_cost();
                        process.sends.waited();
                        process.sends.worked();
                        process.sends.middle_size();
                        process.sends.usual();
                    }
                }
            }
        }
    }
}
