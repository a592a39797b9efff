//! The messages between a master and a worker: a pure codec, no I/O. `docs/spec/cc.md` draws each.
//!
//! All integers are big-endian. The decoders take arbitrary bytes of a hostile peer: they never panic, and allocate no more than they were given.

use std::fmt;

/// The protocol version that this crate speaks.
pub const VERSION: u16 = 3;
/// What the private data of both MPA start-up frames begins with.
pub const MAGIC: [u8; 8] = *b"weft-cc\0";
/// Length of a [`Hello`] in bytes.
pub const HELLO_LEN: usize = 16;
/// The longest message in bytes.
pub const MAX_MESSAGE: usize = 32 << 10;
/// Bytes of a digest.
pub const DIGEST_LEN: usize = 32;
/// Diagnostics that are delivered, in bytes.
pub const MAX_DIAGNOSTICS: u64 = 256 << 10;
/// The longest text of a reason, in bytes.
pub const MAX_REASON: usize = 512;

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// What a worker answers to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Go on.
    Ok,
    /// This version is not spoken here.
    Version,
    /// As many connections are served as may be.
    Busy,
    /// The master's key is not authorised, and the kernel does not say that it is of the worker's user.
    Stranger,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "go on",
            Self::Version => "it speaks another version of the protocol",
            Self::Busy => "it serves as many connections as it may",
            Self::Stranger => "our key is not authorised there",
        })
    }
}

/// What travels as private data in both MPA start-up frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The sender's protocol version.
    pub version: u16,
    /// The worker's verdict; `Ok` in a master's hello.
    pub status: Status,
    /// Jobs that the worker takes at once; 0 in a master's hello.
    pub slots: u16,
}

impl Hello {
    /// Ours.
    pub fn new(status: Status, slots: u16) -> Self {
        Self {
            version: VERSION,
            status,
            slots,
        }
    }

    /// The bytes of the hello.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_be_bytes());
        out[10..12].copy_from_slice(&(self.status as u16).to_be_bytes());
        out[12..14].copy_from_slice(&self.slots.to_be_bytes());
        out
    }

    /// Reads a hello; what follows it (padding of a kernel's peer) is nobody's.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes.get(..HELLO_LEN).ok_or(Malformed("short hello"))?);
        if r.bytes(8)? != MAGIC {
            return Err(Malformed("another protocol"));
        }
        let version = r.u16()?;
        const ALL: [Status; 4] = [Status::Ok, Status::Version, Status::Busy, Status::Stranger];
        let status = ALL.get(usize::from(r.u16()?)).copied();
        let status = status.ok_or(Malformed("status"))?;
        let slots = r.u16()?;
        if version == VERSION && r.u16()? != 0 {
            return Err(Malformed("reserved"));
        }
        Ok(Self {
            version,
            status,
            slots,
        })
    }
}

/// A range of the master's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Region {
    /// Its `STag`.
    pub rkey: u32,
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length in bytes; 0: there is none.
    pub len: u64,
}

/// What a master asks.
// There is one at a time, and it is taken apart at once.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Compile.
    Job(Job),
    /// The room that was asked for; without bytes, it is refused.
    Room {
        /// Of the job.
        id: u32,
        /// Takes the place of the job's room.
        room: Region,
    },
    /// What the paths of a [`Report::Need`] are, in their order.
    Files {
        /// Of the job.
        id: u32,
        /// Where contents are: to be read.
        region: Region,
        /// One for each path.
        entries: Vec<Entry>,
    },
    /// The compiler that was asked for; without bytes, it is not sent.
    Compiler {
        /// Of the job.
        id: u32,
        /// Where it is, packed: to be read until the worker's next message.
        region: Region,
    },
    /// The nodes of a [`Report::Check`] that are not any more what they were.
    Stale {
        /// Of the job.
        id: u32,
        /// Their numbers.
        nodes: Vec<u32>,
    },
}

/// Paths in one [`Report::Need`].
pub const MAX_NEED: usize = 256;
/// Nodes in one [`Report::Check`].
pub const MAX_CHECK: usize = 4096;

/// What is at a path of the master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Node {
    /// Nothing.
    Absent = 0,
    /// A file; its contents.
    File = 1,
    /// A directory; its names, each ended by a zero byte.
    Directory = 2,
    /// A symbolic link; the absolute path that it leads to in the end.
    Link = 3,
    /// Workers are not given it.
    Refused = 4,
    /// A directory above those that may be read; the names that lead to them.
    Way = 5,
}

/// One path's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub node: Node,
    /// The number by which it is checked.
    pub number: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime: i64,
    /// Where in the region the contents begin.
    pub at: u64,
    /// Their length in bytes.
    pub len: u64,
    /// BLAKE3 of the contents.
    pub digest: [u8; DIGEST_LEN],
}

/// What a worker needs to preprocess.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pull {
    /// Options of the preprocessor, paths as the master has them.
    pub cpp: Vec<String>,
    /// The directories that the master's compiler searches by itself, in order.
    pub system: Vec<String>,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Comes back in all that concerns the job.
    pub id: u32,
    /// C++ rather than C.
    pub cxx: bool,
    /// Where the preprocessed source is: to be read.
    pub source: Region,
    /// Where outputs go: to be written.
    pub room: Region,
    /// Of the master's compiler.
    pub digest: [u8; DIGEST_LEN],
    /// The name of the driver.
    pub driver: String,
    /// The locale of diagnostics.
    pub locale: String,
    /// The master's working directory, for debug information.
    pub cwd: String,
    /// The source as it was named.
    pub name: String,
    /// Options.
    pub args: Vec<String>,
    /// The worker preprocesses too; then there is no source to be read.
    pub pull: Option<Pull>,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Verdict {
    /// The compiler ended with status 0; outputs are in the room.
    Done = 0,
    /// The compiler failed; there are no outputs.
    Failed = 1,
    /// The compiler here is another one.
    Environment = 2,
    /// All slots are taken.
    Busy = 3,
    /// The job asks for what may not be.
    Refused = 4,
    /// It took too long or too much memory.
    Limit = 5,
    /// The worker lacks something.
    Trouble = 6,
}

impl Verdict {
    fn from_u8(v: u8) -> Option<Self> {
        use Verdict::{Busy, Done, Environment, Failed, Limit, Refused, Trouble};
        let all = [Done, Failed, Environment, Busy, Refused, Limit, Trouble];
        all.get(usize::from(v)).copied()
    }
}

/// What an output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Output {
    /// The object, or assembler text.
    Object,
    /// Standard error.
    Diagnostics,
    /// What `-MD` writes, where the worker preprocesses.
    Dependencies,
}

impl Output {
    fn number(self) -> u64 {
        match self {
            Self::Object => 1,
            Self::Diagnostics => 2,
            Self::Dependencies => 3,
        }
    }
}

/// What a worker reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The outputs of the job need so many bytes.
    More {
        /// Of the job.
        id: u32,
        /// In bytes.
        need: u64,
    },
    /// The worker lacks these paths of the master's: absolute, without `.` and `..`.
    Need {
        /// Of the job.
        id: u32,
        /// At most [`MAX_NEED`].
        paths: Vec<String>,
    },
    /// The worker lacks the compiler of the job's digest, and would take it.
    Compiler {
        /// Of the job.
        id: u32,
    },
    /// Are these nodes still what they were?
    Check {
        /// Of the job.
        id: u32,
        /// At most [`MAX_CHECK`].
        nodes: Vec<u32>,
    },
    /// The job has ended.
    End(End),
}

/// The end of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Of the job.
    pub id: u32,
    /// How.
    pub verdict: Verdict,
    /// Pressure on the worker's processors: hundredths of a percent of time that something waited for one (PSI).
    pub pressure: u16,
    /// Jobs that the worker could take now.
    pub free: u16,
    /// Microseconds for reading the source and for compiling; the third is not used, and 0.
    pub times: [u32; 3],
    /// What, where in the room, and how long.
    pub outputs: Vec<(Output, u64, u64)>,
    /// Why not.
    pub reason: String,
}

impl End {
    /// Without outputs.
    pub fn new(id: u32, verdict: Verdict, reason: impl Into<String>) -> Self {
        Self {
            id,
            verdict,
            pressure: 0,
            free: 0,
            times: [0; 3],
            outputs: Vec::new(),
            reason: reason.into(),
        }
    }
}

/// Takes a message apart.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed("short"))?;
        self.0 = rest;
        Ok(head)
    }
    fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.bytes(1)?[0])
    }
    fn u16(&mut self) -> Result<u16, Malformed> {
        let b = self.bytes(2)?;
        Ok(u16::from_be_bytes([b[0], b[1]]))
    }
    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok((u32::from(self.u16()?) << 16) | u32::from(self.u16()?))
    }
    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok((u64::from(self.u32()?) << 32) | u64::from(self.u32()?))
    }
    fn text(&mut self) -> Result<String, Malformed> {
        let len = self.u16()?.into();
        let text = std::str::from_utf8(self.bytes(len)?).map_err(|_| Malformed("text"))?;
        if text.contains('\0') {
            return Err(Malformed("text"));
        }
        Ok(text.into())
    }
    fn texts(&mut self, most: usize) -> Result<Vec<String>, Malformed> {
        let count = usize::from(self.u16()?);
        if count > most {
            return Err(Malformed("too many"));
        }
        (0..count).map(|_| self.text()).collect()
    }
    fn numbers(&mut self) -> Result<Vec<u32>, Malformed> {
        let count = usize::from(self.u16()?);
        if count > MAX_CHECK {
            return Err(Malformed("too many"));
        }
        (0..count).map(|_| self.u32()).collect()
    }
    fn entry(&mut self, within: u64) -> Result<Entry, Malformed> {
        use Node::{Absent, Directory, File, Link, Refused, Way};
        let all = [Absent, File, Directory, Link, Refused, Way];
        let node = all.get(usize::from(self.u8()?)).copied();
        let node = node.ok_or(Malformed("kind of node"))?;
        if (self.u8()?, self.u16()?) != (0, 0) {
            return Err(Malformed("reserved"));
        }
        let (number, mtime) = (self.u32()?, self.u64()?.cast_signed());
        let (at, len) = (self.u64()?, self.u64()?);
        if at.checked_add(len).is_none_or(|end| end > within) {
            return Err(Malformed("contents beyond their region"));
        }
        let mut digest = [0; DIGEST_LEN];
        digest.copy_from_slice(self.bytes(DIGEST_LEN)?);
        Ok(Entry {
            node,
            number,
            mtime,
            at,
            len,
            digest,
        })
    }
    fn region(&mut self) -> Result<Region, Malformed> {
        let region = Region {
            rkey: self.u32()?,
            addr: self.u64()?,
            len: self.u64()?,
        };
        if region.addr.checked_add(region.len).is_none() || region.len > i64::MAX as u64 {
            return Err(Malformed("region"));
        }
        Ok(region)
    }
    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed("trailing bytes"))
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u16).to_be_bytes());
    out.extend(text.as_bytes());
}

fn put_texts(out: &mut Vec<u8>, texts: &[String]) {
    out.extend((texts.len() as u16).to_be_bytes());
    for text in texts {
        put_text(out, text);
    }
}

fn put_numbers(out: &mut Vec<u8>, numbers: &[u32]) {
    out.extend((numbers.len() as u16).to_be_bytes());
    for number in numbers {
        out.extend(number.to_be_bytes());
    }
}

fn put_region(out: &mut Vec<u8>, region: &Region) {
    out.extend(region.rkey.to_be_bytes());
    out.extend(region.addr.to_be_bytes());
    out.extend(region.len.to_be_bytes());
}

impl Request {
    /// Its bytes; `None` when it is longer than a message may be.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(256);
        match self {
            Self::Job(job) => {
                let flags = u8::from(job.cxx) | u8::from(job.pull.is_some()) << 1;
                out.extend([1, flags, 0, 0]);
                out.extend(job.id.to_be_bytes());
                put_region(&mut out, &job.source);
                put_region(&mut out, &job.room);
                out.extend(job.digest);
                let texts = [&job.driver, &job.locale, &job.cwd, &job.name]
                    .into_iter()
                    .chain(&job.args);
                let pull = job.pull.iter().flat_map(|pull| [&pull.cpp, &pull.system]);
                let all = texts.clone().chain(pull.clone().flatten());
                if job.args.len() > u16::MAX.into()
                    || all.map(|t| t.len() + 2).sum::<usize>() > MAX_MESSAGE - 128
                {
                    return None;
                }
                out.extend((job.args.len() as u16).to_be_bytes());
                for text in texts {
                    put_text(&mut out, text);
                }
                for texts in pull {
                    put_texts(&mut out, texts);
                }
            }
            Self::Files {
                id,
                region,
                entries,
            } => {
                out.extend([3, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                put_region(&mut out, region);
                out.extend((entries.len() as u16).to_be_bytes());
                for entry in entries {
                    out.extend([entry.node as u8, 0, 0, 0]);
                    out.extend(entry.number.to_be_bytes());
                    out.extend(entry.mtime.to_be_bytes());
                    out.extend(entry.at.to_be_bytes());
                    out.extend(entry.len.to_be_bytes());
                    out.extend(entry.digest);
                }
            }
            Self::Stale { id, nodes } => {
                out.extend([4, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                put_numbers(&mut out, nodes);
            }
            Self::Room { id, room: region } | Self::Compiler { id, region } => {
                let kind = if matches!(self, Self::Room { .. }) {
                    2
                } else {
                    5
                };
                out.extend([kind, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                put_region(&mut out, region);
            }
        }
        Some(out)
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        let kind = r.u8()?;
        let flags = r.u8()?;
        if r.u16()? != 0 || flags > if kind == 1 { 3 } else { 0 } {
            return Err(Malformed("reserved"));
        }
        let id = r.u32()?;
        let request = match kind {
            1 => {
                let (source, room) = (r.region()?, r.region()?);
                let mut digest = [0; DIGEST_LEN];
                digest.copy_from_slice(r.bytes(DIGEST_LEN)?);
                let count = r.u16()?;
                let (driver, locale, cwd, name) = (r.text()?, r.text()?, r.text()?, r.text()?);
                let args = (0..count).map(|_| r.text()).collect::<Result<_, _>>()?;
                let pull = if flags & 2 == 0 {
                    None
                } else {
                    Some(Pull {
                        cpp: r.texts(usize::MAX)?,
                        system: r.texts(usize::MAX)?,
                    })
                };
                Self::Job(Job {
                    id,
                    cxx: flags & 1 == 1,
                    source,
                    room,
                    digest,
                    driver,
                    locale,
                    cwd,
                    name,
                    args,
                    pull,
                })
            }
            3 => {
                let region = r.region()?;
                let count = usize::from(r.u16()?);
                if count > MAX_NEED {
                    return Err(Malformed("too many"));
                }
                let entries = (0..count)
                    .map(|_| r.entry(region.len))
                    .collect::<Result<_, _>>()?;
                Self::Files {
                    id,
                    region,
                    entries,
                }
            }
            4 => Self::Stale {
                id,
                nodes: r.numbers()?,
            },
            2 => Self::Room {
                id,
                room: r.region()?,
            },
            5 => Self::Compiler {
                id,
                region: r.region()?,
            },
            _ => return Err(Malformed("kind of request")),
        };
        r.end()?;
        Ok(request)
    }
}

impl Report {
    /// Its bytes. A long reason is cut.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        match self {
            Self::More { id, need } => {
                out.extend([0x81, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                out.extend(need.to_be_bytes());
            }
            Self::Need { id, paths } => {
                out.extend([0x83, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                put_texts(&mut out, paths);
            }
            Self::Compiler { id } => {
                out.extend([0x85, 0, 0, 0]);
                out.extend(id.to_be_bytes());
            }
            Self::Check { id, nodes } => {
                out.extend([0x84, 0, 0, 0]);
                out.extend(id.to_be_bytes());
                put_numbers(&mut out, nodes);
            }
            Self::End(end) => {
                out.extend([0x82, end.verdict as u8, 0, end.outputs.len() as u8]);
                out.extend(end.id.to_be_bytes());
                out.extend(end.pressure.to_be_bytes());
                out.extend(end.free.to_be_bytes());
                for time in end.times {
                    out.extend(time.to_be_bytes());
                }
                for (what, at, len) in &end.outputs {
                    out.extend(what.number().to_be_bytes());
                    out.extend(at.to_be_bytes());
                    out.extend(len.to_be_bytes());
                }
                let mut cut = end.reason.len().min(MAX_REASON);
                while !end.reason.is_char_boundary(cut) {
                    cut -= 1;
                }
                put_text(&mut out, &end.reason[..cut].replace('\0', " "));
            }
        }
        out
    }

    /// Reads a report.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        let (kind, verdict, zero, count) = (r.u8()?, r.u8()?, r.u8()?, r.u8()?);
        let id = r.u32()?;
        let report = match kind {
            0x81 if (verdict, zero, count) == (0, 0, 0) => Self::More { id, need: r.u64()? },
            0x83 if (verdict, zero, count) == (0, 0, 0) => Self::Need {
                id,
                paths: r.texts(MAX_NEED)?,
            },
            0x84 if (verdict, zero, count) == (0, 0, 0) => Self::Check {
                id,
                nodes: r.numbers()?,
            },
            0x85 if (verdict, zero, count) == (0, 0, 0) => Self::Compiler { id },
            0x82 if zero == 0 => {
                let verdict = Verdict::from_u8(verdict).ok_or(Malformed("verdict"))?;
                let (pressure, free) = (r.u16()?, r.u16()?);
                let times = [r.u32()?, r.u32()?, r.u32()?];
                let mut outputs = Vec::new();
                for _ in 0..count {
                    let what = match r.u64()? {
                        1 => Output::Object,
                        2 => Output::Diagnostics,
                        3 => Output::Dependencies,
                        _ => return Err(Malformed("kind of output")),
                    };
                    let (at, len) = (r.u64()?, r.u64()?);
                    // Each at most once: nobody is to be told to write an object twice.
                    if at.checked_add(len).is_none()
                        || outputs.iter().any(|&(other, _, _)| other == what)
                    {
                        return Err(Malformed("outputs"));
                    }
                    outputs.push((what, at, len));
                }
                let reason = r.text()?;
                if reason.len() > MAX_REASON {
                    return Err(Malformed("reason"));
                }
                Self::End(End {
                    id,
                    verdict,
                    pressure,
                    free,
                    times,
                    outputs,
                    reason,
                })
            }
            _ => return Err(Malformed("kind of report")),
        };
        r.end()?;
        Ok(report)
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_any(bytes: &[u8]) {
    if let Ok(request) = Request::decode(bytes)
        && let Some(again) = request.encode()
    {
        assert_eq!(again, bytes);
    }
    if let Ok(report) = Report::decode(bytes) {
        assert_eq!(report.encode(), bytes);
    }
    if let Ok(hello) = Hello::decode(bytes)
        && hello.version == VERSION
    {
        assert_eq!(hello.encode(), bytes[..HELLO_LEN]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job() -> Request {
        Request::Job(Job {
            id: 7,
            cxx: true,
            source: Region {
                rkey: 1,
                addr: 2,
                len: 3,
            },
            room: Region {
                rkey: 4,
                addr: 0,
                len: 1 << 30,
            },
            digest: [9; DIGEST_LEN],
            driver: "g++".into(),
            locale: "C.UTF-8".into(),
            cwd: "/home/u".into(),
            name: "a.cc".into(),
            args: vec!["-O2".into(), String::new(), "-c".into()],
            pull: Some(Pull {
                cpp: vec!["-I".into(), "/x".into()],
                system: vec!["/usr/include".into()],
            }),
        })
    }

    fn files() -> Request {
        let entry = |node, at, len| Entry {
            node,
            number: 5,
            mtime: -1,
            at,
            len,
            digest: [3; DIGEST_LEN],
        };
        Request::Files {
            id: 8,
            region: Region {
                rkey: 1,
                addr: 2,
                len: 100,
            },
            entries: vec![
                entry(Node::File, 0, 60),
                entry(Node::Directory, 60, 40),
                entry(Node::Link, 100, 0),
                entry(Node::Absent, 0, 0),
                entry(Node::Refused, 0, 0),
            ],
        }
    }

    fn end() -> Report {
        Report::End(End {
            times: [1, 2, 3],
            outputs: vec![(Output::Object, 0, 99), (Output::Diagnostics, 99, 5)],
            ..End::new(7, Verdict::Done, "")
        })
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for request in [
            job(),
            Request::Room {
                id: 1,
                room: Region::default(),
            },
            Request::Compiler {
                id: 9,
                region: Region {
                    rkey: 1,
                    addr: 2,
                    len: 3,
                },
            },
            Request::Stale {
                id: 1,
                nodes: vec![3, 4],
            },
            files(),
        ] {
            assert_eq!(
                Request::decode(&request.encode().unwrap()).unwrap(),
                request
            );
        }
        for report in [
            end(),
            Report::More {
                id: 1,
                need: u64::MAX,
            },
            Report::End(End::new(1, Verdict::Limit, "out of memory")),
            Report::Need {
                id: 2,
                paths: vec!["/".into(), "/a/b".into()],
            },
            Report::Compiler { id: 3 },
            Report::Check {
                id: 2,
                nodes: vec![1, u32::MAX],
            },
        ] {
            assert_eq!(Report::decode(&report.encode()).unwrap(), report);
        }
        let hello = Hello::new(Status::Stranger, 14);
        assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
    }

    #[test]
    fn contents_lie_in_their_region() {
        let Request::Files {
            id,
            region,
            mut entries,
        } = files()
        else {
            unreachable!()
        };
        entries[1].len = 41;
        let bytes = Request::Files {
            id,
            region,
            entries,
        }
        .encode()
        .unwrap();
        Request::decode(&bytes).unwrap_err();
    }

    #[test]
    fn a_job_that_is_too_long_is_not_sent() {
        let Request::Job(job) = job() else {
            unreachable!()
        };
        let long = Request::Job(Job {
            args: vec!["-O2".into(); 8000],
            ..job
        });
        assert_eq!(long.encode(), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            check_any(&bytes);
        }

        #[test]
        fn damaged_messages_are_refused_or_read_as_what_they_say(at in 0_usize..200, to in any::<u8>()) {
            for mut bytes in [job().encode().unwrap(), files().encode().unwrap(), end().encode()] {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = to;
                }
                check_any(&bytes);
            }
        }
    }
}
