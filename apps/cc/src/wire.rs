//! The messages between a master and a worker: a pure codec, no I/O. `docs/spec/cc.md` draws each.
//!
//! A hello has a fixed form, which every version reads; the later messages are encoded by postcard. The decoders take arbitrary bytes of a hostile peer: they never
//! panic, and the values that they return are valid as documented here.

use serde::{Deserialize, Serialize};
use weft_session::Protocol;
pub use weft_session::{Malformed, Status};

/// The longest message in bytes.
pub const MAX_MESSAGE: usize = 32 << 10;
/// RDMA Reads outstanding at once.
pub(crate) const DEPTH: u16 = 16;

/// The protocol; the value of a worker's hello is the number of jobs that it takes at once. Compilers run long.
pub const PROTOCOL: Protocol = Protocol {
    magic: *b"weft-cc\0",
    version: 5,
    longest: MAX_MESSAGE,
    inline: 0,
    depth: DEPTH,
    is_quiet: true,
};
/// Bytes of a digest.
pub const DIGEST_LEN: usize = 32;
/// Diagnostics that are delivered, in bytes.
pub const MAX_DIAGNOSTICS: u64 = 256 << 10;
/// The longest text of a reason, in bytes.
pub const MAX_REASON: usize = 512;

/// A range of the master's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Region {
    pub rkey: u32,
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length in bytes; 0: there is none.
    pub len: u64,
}

/// The requests of a master.
// There is one at a time, and it is consumed at once.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Job(Job),
    /// The room that was asked for; without bytes, it is refused.
    Room {
        id: u32,
        /// Takes the place of the job's room.
        room: Region,
    },
    /// The contents of the paths of a [`Report::Need`], in their order.
    Files {
        id: u32,
        /// The region of the contents, to be read.
        region: Region,
        /// One for each path.
        entries: Vec<Entry>,
    },
    /// The compiler that was asked for; without bytes, it is not sent.
    Compiler {
        id: u32,
        /// The region of the package, to be read until the worker's next message.
        region: Region,
    },
    /// The nodes of a [`Report::Check`] that have changed.
    Stale {
        id: u32,
        /// Their numbers.
        nodes: Vec<u32>,
    },
}

/// Paths in one [`Report::Need`].
pub const MAX_NEED: usize = 256;
/// Nodes in one [`Report::Check`].
pub const MAX_CHECK: usize = 4096;

/// The kind of a path of the master.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Node {
    Absent,
    /// A file; its contents.
    File,
    /// A directory; its names, each ended by a zero byte.
    Directory,
    /// A symbolic link; the absolute path that it leads to in the end.
    Link,
    /// Workers are not given it.
    Refused,
    /// A directory above those that may be read; the names that lead to them.
    Way,
}

/// One path's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The kind.
    pub node: Node,
    /// The number by which it is checked.
    pub number: u32,
    /// Time of the last change, in nanoseconds since 1970.
    pub mtime: i64,
    /// The offset of the contents in the region.
    pub at: u64,
    /// Their length in bytes.
    pub len: u64,
    /// BLAKE3 of the contents.
    pub digest: [u8; DIGEST_LEN],
}

/// The data that a worker needs to preprocess.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pull {
    /// Options of the preprocessor, paths as the master has them.
    pub cpp: Vec<String>,
    /// The directories that the master's compiler searches by itself, in order.
    pub system: Vec<String>,
}

/// A directory that the master's clang searches by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Searched {
    /// Its headers are of C, also for C++.
    pub c: bool,
    pub dir: String,
}

/// The data that a worker needs to compile by clang from the files themselves.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tree {
    /// Options of the preprocessor, each value apart.
    pub cpp: Vec<String>,
    /// In order.
    pub searched: Vec<Searched>,
    /// The system's headers count among the dependencies.
    pub system: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Comes back in all that concerns the job.
    pub id: u32,
    /// C++ rather than C.
    pub cxx: bool,
    /// The region of the preprocessed source, or of the files with a tree, to be read.
    pub source: Region,
    /// The region for outputs, to be written.
    pub room: Region,
    /// Of the master's compiler.
    pub digest: [u8; DIGEST_LEN],
    pub driver: String,
    /// The locale of diagnostics.
    pub locale: String,
    /// The master's working directory, for debug information.
    pub cwd: String,
    /// The source as it was named.
    pub name: String,
    pub args: Vec<String>,
    /// The prefix of the names of further outputs; empty without any.
    pub beside: String,
    /// The worker preprocesses too; then there is no source to be read.
    pub pull: Option<Pull>,
    /// The source is a tree of files.
    pub tree: Option<Tree>,
}

/// The result of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The compiler ended with status 0; outputs are in the room.
    Done,
    /// The compiler failed; there are no outputs.
    Failed,
    /// The compiler here is another one.
    Environment,
    /// All slots are taken.
    Busy,
    /// The job asks for what may not be.
    Refused,
    /// It took too long or too much memory.
    Limit,
    /// The worker does not have a required resource.
    Trouble,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Output {
    /// The object, or assembler text.
    Object,
    /// Standard error.
    Diagnostics,
    /// The output of `-MD`, if the worker preprocesses. With a tree: the names of the files that it has read, each with the end of a line.
    Dependencies,
    /// With `-gsplit-dwarf`: the debug information (`.dwo`).
    Split,
    /// With `--coverage`: the notes (`.gcno`).
    Notes,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// The outputs of the job need so many bytes.
    More {
        id: u32,
        /// In bytes.
        need: u64,
    },
    /// The worker needs these paths of the master: absolute, without `.` and `..`.
    Need {
        id: u32,
        /// At most [`MAX_NEED`].
        paths: Vec<String>,
    },
    /// The worker does not have the compiler of the job's digest, and would accept it.
    Compiler {
        id: u32,
    },
    /// Asks whether these nodes are unchanged.
    Check {
        id: u32,
        /// At most [`MAX_CHECK`].
        nodes: Vec<u32>,
    },
    End(End),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub id: u32,
    pub verdict: Verdict,
    /// Pressure on the worker's processors: hundredths of a percent of time that something waited for one (PSI).
    pub pressure: u16,
    /// Jobs that the worker could take now.
    pub free: u16,
    /// Microseconds for reading the source and for compiling.
    pub times: [u32; 2],
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
            times: [0; 2],
            outputs: Vec::new(),
            reason: reason.into(),
        }
    }
}

fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    let bytes = postcard::to_allocvec(message).ok();
    bytes.filter(|bytes| bytes.len() <= MAX_MESSAGE)
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Malformed> {
    holds(bytes.len() <= MAX_MESSAGE, "long")?;
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(Malformed("trailing bytes")),
        Err(_) => Err(Malformed("no message of this protocol")),
    }
}

/// Checks a condition of valid messages.
fn holds(good: bool, otherwise: &'static str) -> Result<(), Malformed> {
    good.then_some(()).ok_or(Malformed(otherwise))
}

/// Texts become arguments and names of files.
fn texts<'a>(mut all: impl Iterator<Item = &'a String>) -> Result<(), Malformed> {
    holds(all.all(|text| !text.contains('\0')), "text")
}

impl Region {
    fn check(&self) -> Result<(), Malformed> {
        let ends = self.addr.checked_add(self.len).is_some();
        holds(ends && i64::try_from(self.len).is_ok(), "region")
    }
}

impl Request {
    /// Its bytes; `None` when it is longer than a message may be.
    pub fn encode(&self) -> Option<Vec<u8>> {
        encode(self)
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let request: Self = decode(bytes)?;
        match &request {
            Self::Job(job) => {
                job.source.check()?;
                job.room.check()?;
                let names = [&job.driver, &job.locale, &job.cwd, &job.name, &job.beside];
                let pull = job.pull.iter().flat_map(|p| p.cpp.iter().chain(&p.system));
                let tree = job.tree.iter().flat_map(|tree| {
                    let dirs = tree.searched.iter().map(|searched| &searched.dir);
                    tree.cpp.iter().chain(dirs)
                });
                texts(names.into_iter().chain(&job.args).chain(pull).chain(tree))?;
            }
            Self::Room { room: region, .. } | Self::Compiler { region, .. } => region.check()?,
            Self::Files {
                region, entries, ..
            } => {
                region.check()?;
                holds(entries.len() <= MAX_NEED, "too many")?;
                let within = |entry: &Entry| {
                    let end = entry.at.checked_add(entry.len);
                    end.is_some_and(|end| end <= region.len)
                };
                holds(entries.iter().all(within), "contents beyond their region")?;
            }
            Self::Stale { nodes, .. } => holds(nodes.len() <= MAX_CHECK, "too many")?,
        }
        Ok(request)
    }
}

impl Report {
    /// Its bytes. A long reason is cut; nothing else is longer than a message may be.
    pub fn encode(&self) -> Vec<u8> {
        let Self::End(end) = self else {
            return encode(self).unwrap_or_default();
        };
        let mut end = end.clone();
        let cut = end.reason.floor_char_boundary(MAX_REASON);
        end.reason.truncate(cut);
        end.reason = end.reason.replace('\0', " ");
        encode(&Self::End(end)).unwrap_or_default()
    }

    /// Reads a report.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let report: Self = decode(bytes)?;
        match &report {
            Self::Need { paths, .. } => {
                holds(paths.len() <= MAX_NEED, "too many")?;
                texts(paths.iter())?;
            }
            Self::Check { nodes, .. } => holds(nodes.len() <= MAX_CHECK, "too many")?,
            Self::End(end) => {
                // Each at most once: an object must not be written twice.
                let good = |n: usize| {
                    let (what, at, len) = end.outputs[n];
                    let once = end.outputs[..n].iter().all(|other| other.0 != what);
                    at.checked_add(len).is_some() && once
                };
                holds((0..end.outputs.len()).all(good), "outputs")?;
                holds(end.reason.len() <= MAX_REASON, "reason")?;
                texts([&end.reason].into_iter())?;
            }
            Self::More { .. } | Self::Compiler { .. } => {}
        }
        Ok(report)
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_any(bytes: &[u8]) {
    if let Ok(request) = Request::decode(bytes)
        && let Some(again) = request.encode()
    {
        // A number has more than one form.
        assert_eq!(Request::decode(&again), Ok(request));
    }
    if let Ok(report) = Report::decode(bytes) {
        assert_eq!(Report::decode(&report.encode()), Ok(report));
    }
    if let Ok(hello) = PROTOCOL.read_hello(bytes)
        && hello.version == PROTOCOL.version
    {
        let again = PROTOCOL.hello(hello.status, hello.value);
        assert_eq!(again, bytes[..weft_session::HELLO_LEN]);
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
            beside: "out/a".into(),
            pull: Some(Pull {
                cpp: vec!["-I".into(), "/x".into()],
                system: vec!["/usr/include".into()],
            }),
            tree: Some(Tree {
                cpp: vec!["-D".into(), "X".into()],
                searched: vec![Searched {
                    c: true,
                    dir: "/usr/include".into(),
                }],
                system: true,
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
            times: [1, 2],
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
            args: vec!["-O2".into(); 9000],
            ..job
        });
        assert!(long.encode().is_none());
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
