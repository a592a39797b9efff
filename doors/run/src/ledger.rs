//! The connection report of a process under `weft run`: a memory file named [`NAME`], which `weft stat` finds among the process's
//! descriptors and reads. It costs the process plain stores; nothing runs for a reader.

use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::connection::{Carrier, Route};
use crate::lend::{Copied, Mode};
use crate::meet::Why;

/// The name of the memory file.
pub const NAME: &str = "weft-run-ledger";
/// The first word of the file.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"weftledg");
/// The version of the layout.
pub const VERSION: u64 = 2;
/// Words in the header and in each row, of 8 bytes in the machine's order.
pub const ROW_WORDS: usize = 32;
/// Rows.
pub const ROWS: usize = 512;
/// Bytes of the file.
pub const LEN: usize = (ROWS + 1) * ROW_WORDS * 8;

/// The header's words.
#[derive(Clone, Copy, Debug)]
pub enum Head {
    /// [`MAGIC`].
    Magic,
    /// [`VERSION`].
    Version,
    /// The process; a child after a fork makes a new file.
    Pid,
    /// TCP connections seen.
    Seen,
    /// Those that went over to the rings, in one direction at least.
    Switched,
    /// Those that went back.
    Back,
    /// UDP sockets seen.
    Datagram,
    /// Rings for datagrams, one way each.
    Paths,
}

/// The words of a row.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// 0: free; odd: being written; else in use.
    Use,
    /// The descriptor.
    Fd,
    /// The two ends: four words of address (IPv4 as mapped), one of the ports (own << 16 | peer).
    Own,
    /// Its second half.
    OwnLow,
    /// The peer's.
    Peer,
    /// Its second half.
    PeerLow,
    /// Ports.
    Ports,
    /// [`Route`] of each direction; sent << 8 | received.
    Mode,
    /// Why it is not on the rings, a [`Why`].
    Why,
    /// Bytes sent through the ring.
    TxRing,
    /// Bytes received through the ring.
    RxRing,
    /// Bytes sent over TCP.
    TxTcp,
    /// Bytes received over TCP.
    RxTcp,
    /// Bells rung.
    Bells,
    /// Waits in the kernel.
    Sleeps,
    /// When it was first looked at: milliseconds of `CLOCK_MONOTONIC`.
    Since,
    /// 1: closed.
    Closed,
    /// Place of the peer: 0, on this host; else on another one, and the carrier to it ([`Carrier`]).
    Carrier,
    /// 1: a ring for datagrams, one way.
    Udp,
    /// Datagrams through the ring.
    Datagrams,
    /// Those dropped because the ring was full.
    Dropped,
    /// How large sends go, a [`Mode`]; none has been from the program's memory as long as [`Word::TxSource`] is 0.
    Lending,
    /// Bytes that the peer has been offered from the program's memory, and bytes fetched from the peer's. Not part of those through the ring.
    TxSource,
    /// The latter.
    RxSource,
    /// Bytes of large sends that went through the ring instead.
    TxCopied,
    /// Why: bits of [`Copied`].
    WhyCopied,
    /// Threads that waited because they wrote to memory under way.
    Faults,
    /// Bytes under way that were copied to let a thread continue, or because the receiver was slow.
    Moved,
    /// One more than the number of the peer's user. 0: it is our user, or not known.
    PeerUser,
}

/// A connection as reported by its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The descriptor.
    pub fd: i32,
    /// The own address.
    pub own: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
    /// Route of sent bytes.
    pub tx_mode: Route,
    /// Route of received bytes.
    pub rx_mode: Route,
    /// Why it is not, or not any more, on the rings.
    pub why: Why,
    /// Bytes sent and received through rings.
    pub ring: (u64, u64),
    /// Bytes sent and received over TCP.
    pub tcp: (u64, u64),
    /// Bells rung.
    pub bells: u64,
    /// Waits in the kernel.
    pub sleeps: u64,
    /// When the connection was first looked at, in milliseconds of `CLOCK_MONOTONIC`.
    pub since: u64,
    /// It is closed; its row waits for another one.
    pub closed: bool,
    /// The carrier behind the rings.
    pub carrier: Carrier,
    /// It is a ring for datagrams, one way: [`Row::ring`] has their bytes.
    pub udp: bool,
    /// Datagrams through it.
    pub datagrams: u64,
    /// Datagrams dropped because it was full.
    pub dropped: u64,
    /// Bytes sent from the program's memory, and fetched from the peer's.
    pub lent: Lent,
    /// The peer's user, if it is another one.
    pub peer_user: Option<u32>,
}

/// The part of a row about sends from the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// How large sends go.
    pub mode: Mode,
    /// Bytes offered to the peer and fetched from it.
    pub bytes: (u64, u64),
    /// Bytes of large sends that went through the ring.
    pub copied: u64,
    /// Why, bits of [`Copied`].
    pub why: u64,
    /// Threads that waited because they wrote to memory under way.
    pub faults: u64,
    /// Bytes under way that were copied after all.
    pub moved: u64,
}

impl Lent {
    /// Returns true if there is nothing to report.
    pub fn is_empty(&self) -> bool {
        self.bytes == (0, 0) && self.copied == 0
    }

    /// Formats the row as one line.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> fmt::Result {
        let (sent, fetched) = self.bytes;
        if sent > 0 || self.copied > 0 {
            let mode = self.mode.name();
            write!(
                text,
                "{mode}: {sent} B sent from the program's memory, {} B copied",
                self.copied
            )?;
            let why: Vec<_> = Copied::of(self.why).map(Copied::text).collect();
            if !why.is_empty() {
                write!(text, " ({})", why.join("; "))?;
            }
            if self.faults > 0 || self.moved > 0 {
                let (faults, moved) = (self.faults, self.moved);
                write!(text, ", {faults} faults, {moved} B moved while under way")?;
            }
        }
        if fetched > 0 {
            let between = if text.is_empty() { "" } else { "; " };
            write!(text, "{between}{fetched} B fetched from the peer's memory")?;
        }
        Ok(())
    }
}

impl Row {
    /// Names the peer's user if it is another one.
    pub fn about_user(&self) -> Option<String> {
        self.peer_user
            .map(|uid| format!("the peer is of user {uid}"))
    }

    /// Why it is not on rings.
    pub fn about_why(&self) -> Option<&'static str> {
        match (self.why, self.peer_user) {
            (Why::None, _) => None,
            (Why::NoPeer | Why::NotYet, Some(_)) => {
                Some("the peer runs without `weft run`, or does not name our user with --with")
            }
            (why, _) => Some(why.text()),
        }
    }

    /// `rings`, `tcp`, `bsdp`, `tcp again`...
    pub fn via(&self) -> &'static str {
        if self.udp {
            return match self.tx_mode {
                Route::Ring => "udp out",
                _ => "udp in",
            };
        }
        let [both, out, inward] = match self.carrier {
            Carrier::Here => ["rings", "ring out", "ring in"],
            Carrier::Bsdp => ["bsdp", "bsdp out", "bsdp in"],
        };
        match (self.tx_mode, self.rx_mode) {
            (Route::Ring, Route::Ring) => both,
            (Route::Ring, _) => out,
            (_, Route::Ring) => inward,
            (Route::After, _) | (_, Route::After) => "tcp again",
            _ => "tcp",
        }
    }
}

/// The parsed report of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// The process.
    pub pid: u32,
    /// Connections seen, switched, and gone back.
    pub totals: [u64; 3],
    /// UDP sockets seen, and rings for datagrams.
    pub datagram: [u64; 2],
    /// Rows in use.
    pub rows: Vec<Row>,
}

fn addr(high: u64, low: u64, port: u16) -> SocketAddr {
    let ip = Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
    SocketAddr::new(IpAddr::V6(ip).to_canonical(), port)
}

/// An address as two words.
pub fn words(ip: IpAddr) -> (u64, u64) {
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let bits = u128::from(ip);
    ((bits >> 64) as u64, bits as u64)
}

/// Parses a file; `None` if it is not a ledger. Its contents are treated as text and numbers only.
pub fn parse(bytes: &[u8]) -> Option<Ledger> {
    let word = |at: usize| {
        let field = bytes.get(at * 8..at * 8 + 8)?;
        Some(u64::from_ne_bytes(field.try_into().ok()?))
    };
    let head = |which: Head| word(which as usize);
    if head(Head::Magic)? != MAGIC || head(Head::Version)? != VERSION {
        return None;
    }
    let mut rows = Vec::new();
    for row in 1..=ROWS {
        let get = |which: Word| word(row * ROW_WORDS + which as usize);
        let Some(using) = get(Word::Use) else { break };
        if using == 0 || using % 2 == 1 {
            continue;
        }
        let ports = get(Word::Ports)?;
        let mode = get(Word::Mode)?;
        rows.push(Row {
            fd: get(Word::Fd)? as i32,
            own: addr(get(Word::Own)?, get(Word::OwnLow)?, (ports >> 16) as u16),
            peer: addr(get(Word::Peer)?, get(Word::PeerLow)?, ports as u16),
            tx_mode: Route::from((mode >> 8) as u32 & 0xff),
            rx_mode: Route::from(mode as u32 & 0xff),
            why: Why::of(get(Word::Why)? as u32),
            ring: (get(Word::TxRing)?, get(Word::RxRing)?),
            tcp: (get(Word::TxTcp)?, get(Word::RxTcp)?),
            bells: get(Word::Bells)?,
            sleeps: get(Word::Sleeps)?,
            since: get(Word::Since)?,
            closed: get(Word::Closed)? != 0,
            carrier: Carrier::of(get(Word::Carrier)?),
            udp: get(Word::Udp)? != 0,
            datagrams: get(Word::Datagrams)?,
            dropped: get(Word::Dropped)?,
            lent: Lent {
                mode: Mode::from_number(get(Word::Lending)?),
                bytes: (get(Word::TxSource)?, get(Word::RxSource)?),
                copied: get(Word::TxCopied)?,
                why: get(Word::WhyCopied)?,
                faults: get(Word::Faults)?,
                moved: get(Word::Moved)?,
            },
            peer_user: u32::try_from(get(Word::PeerUser)?.wrapping_sub(1)).ok(),
        });
    }
    Some(Ledger {
        pid: head(Head::Pid)? as u32,
        totals: [head(Head::Seen)?, head(Head::Switched)?, head(Head::Back)?],
        datagram: [head(Head::Datagram)?, head(Head::Paths)?],
        rows,
    })
}

/// The beginning of a file; nothing of what is no file. A process can give something else the name of a ledger: to open a FIFO would wait.
fn bytes_of(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if fs::metadata(path)?.is_file() {
        let mut options = File::options();
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = options.read(true).custom_flags(nonblock).open(path)?;
        file.take(LEN as u64).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Reads the ledger of one process. `None` if it has none.
///
/// # Errors
/// `NotFound` without the process, `PermissionDenied` for a process of another user.
pub fn of_process(pid: u32) -> io::Result<Option<Ledger>> {
    let wanted = format!("/memfd:{NAME} (deleted)");
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let Ok(entry) = entry else { continue };
        let path = entry.path();
        if fs::read_link(&path).is_ok_and(|to| to.as_os_str() == wanted.as_str()) {
            let bytes = bytes_of(&path)?;
            // A child after a fork has its parent's too, until it makes its own.
            if let Some(ledger) = parse(&bytes).filter(|ledger| ledger.pid == pid) {
                return Ok(Some(ledger));
            }
        }
    }
    Ok(None)
}

/// Reads the ledgers of all processes that this user may inspect.
///
/// # Errors
/// Those of reading `/proc`.
pub fn survey() -> io::Result<Vec<Ledger>> {
    let mut ledgers = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(entry) = entry else { continue };
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if let Ok(Some(ledger)) = of_process(pid) {
            ledgers.push(ledger);
        }
    }
    ledgers.sort_by_key(|ledger| ledger.pid);
    Ok(ledgers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        let mut put = |at: usize, value: u64| {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        };
        put(Head::Magic as usize, MAGIC);
        put(Head::Version as usize, VERSION);
        put(Head::Pid as usize, 42);
        put(Head::Seen as usize, 3);
        let row = 5 * ROW_WORDS;
        let (high, low) = words("127.0.0.1".parse().unwrap());
        put(row, 2);
        put(row + Word::Own as usize, high);
        put(row + Word::OwnLow as usize, low);
        put(row + Word::Peer as usize, high);
        put(row + Word::PeerLow as usize, low);
        put(row + Word::Ports as usize, (80 << 16) + 4711);
        put(row + Word::Mode as usize, 0x101);
        put(row + Word::TxRing as usize, 1000);
        put(row + Word::Lending as usize, Mode::AzCopy as u64);
        put(row + Word::TxSource as usize, 7000);
        put(row + Word::Faults as usize, 2);
        bytes
    }

    #[test]
    fn a_ledger_is_read_back() {
        let ledger = parse(&file()).unwrap();
        assert_eq!(
            (ledger.pid, ledger.totals, ledger.rows.len()),
            (42, [3, 0, 0], 1)
        );
        let row = ledger.rows[0];
        assert_eq!(row.own, "127.0.0.1:80".parse().unwrap());
        assert_eq!(row.peer.port(), 4711);
        assert_eq!((row.via(), row.ring), ("rings", (1000, 0)));
        let lent = row.lent;
        assert_eq!(
            (lent.mode, lent.bytes.0, lent.faults),
            (Mode::AzCopy, 7000, 2)
        );
        assert!(
            lent.text().starts_with("azsdp copy: 7000 B sent"),
            "{}",
            lent.text()
        );
    }

    #[test]
    fn a_pipe_with_the_name_of_a_ledger_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("ledger");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        assert_eq!(bytes_of(&pipe).unwrap(), b"");
    }

    #[test]
    fn damaged_files_are_taken_as_they_are() {
        let whole = file();
        for len in (0..whole.len()).step_by(97) {
            let _ = parse(&whole[..len]);
        }
        for at in 0..ROW_WORDS * 8 * 6 {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            let _ = parse(&damaged);
        }
        assert!(parse(b"").is_none());
    }
}
