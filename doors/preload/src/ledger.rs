//! The process's ledger: plain stores into a file of memory that `weft stat` reads.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

use weft_run::connection::Route;
use weft_run::ledger::{Head, LEN, MAGIC, NAME, ROW_WORDS, ROWS, VERSION, Word, words};
use weft_run::meet::{Ends, Why};
use weft_sys::memfd::{self, Mapping};

use crate::{clock, hidden};

/// The words of the file; null before the first connection that is looked at.
static BASE: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
/// Counted before there is a file too.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// First row to check for a free one.
static HINT: AtomicU32 = AtomicU32::new(0);

fn at(index: usize) -> Option<&'static AtomicU64> {
    let base = BASE.load(Relaxed);
    if base.is_null() || index >= LEN / 8 {
        return None;
    }
    // SAFETY: inside the mapping, which is never unmapped.
    Some(unsafe { &*base.add(index) })
}

fn head(which: Head) -> Option<&'static AtomicU64> {
    at(which as usize)
}

fn add(word: Option<&AtomicU64>, n: u64) {
    if let Some(word) = word {
        // Two threads that add at once may lose one; the numbers are for people.
        word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
    }
}

fn set(word: Option<&AtomicU64>, value: u64) {
    if let Some(word) = word {
        word.store(value, Relaxed);
    }
}

/// A connection more.
pub(crate) fn seen() {
    let n = SEEN.fetch_add(1, Relaxed) + 1;
    set(head(Head::Seen), n);
}

fn ensure() {
    if !BASE.load(Relaxed).is_null() {
        return;
    }
    let Ok(fd) = memfd::create(NAME, LEN as u64) else {
        return;
    };
    let Ok(map) = Mapping::new(fd.as_fd(), 0, LEN, true) else {
        return;
    };
    if hidden::hide(fd).is_none() {
        return;
    }
    let base: *mut AtomicU64 = map.as_ptr().cast();
    // It stays mapped until the process ends.
    std::mem::forget(map);
    BASE.store(base, Release);
    set(head(Head::Magic), MAGIC);
    set(head(Head::Version), VERSION);
    set(head(Head::Pid), u64::from(crate::lock::own()));
    set(head(Head::Seen), SEEN.load(Relaxed));
    set(head(Head::Datagram), DATAGRAM.load(Relaxed));
}

/// Starts a new ledger in a child, without the rows of inherited connections.
pub(crate) fn after_fork() {
    BASE.store(std::ptr::null_mut(), Relaxed);
    SEEN.store(0, Relaxed);
    DATAGRAM.store(0, Relaxed);
    for count in &STAY {
        count.store(0, Relaxed);
    }
}

/// A row for two ends, with some words set; 0: there is none.
fn take_row(fd: i32, ends: &Ends, more: &[(Word, u64)]) -> u32 {
    ensure();
    if BASE.load(Relaxed).is_null() {
        return 0;
    }
    let first = HINT.load(Relaxed) as usize;
    // Free rows first, then those of closed connections.
    let free = (0..2).find_map(|round| {
        (0..ROWS).map(|n| 1 + (first + n) % ROWS).find(|row| {
            let used = at(row * ROW_WORDS).map_or(1, |word| word.load(Relaxed));
            let closed = at(row * ROW_WORDS + Word::Closed as usize);
            used == 0 || (round == 1 && closed.is_some_and(|word| word.load(Relaxed) != 0))
        })
    });
    let Some(row) = free else { return 0 };
    let word = |which: Word| at(row * ROW_WORDS + which as usize);
    HINT.store(row as u32, Relaxed);
    set(word(Word::Use), 1);
    for n in 1..ROW_WORDS {
        set(at(row * ROW_WORDS + n), 0);
    }
    let ((own, own_low), (peer, peer_low)) = (words(ends.own.ip()), words(ends.peer.ip()));
    let ports = u64::from(ends.own.port()) << 16 | u64::from(ends.peer.port());
    for (which, value) in [
        (Word::Fd, fd as u64),
        (Word::Own, own),
        (Word::OwnLow, own_low),
        (Word::Peer, peer),
        (Word::PeerLow, peer_low),
        (Word::Ports, ports),
        (Word::Since, clock::now_ms()),
    ] {
        set(word(which), value);
    }
    for &(which, value) in more {
        set(word(which), value);
    }
    set(word(Word::Use), 2);
    row as u32
}

pub(crate) fn switched() {
    add(head(Head::Switched), 1);
}

pub(crate) fn back() {
    add(head(Head::Back), 1);
}

/// The file's contents; `None` while there is none.
fn read() -> Option<weft_run::ledger::Ledger> {
    let words = (0..LEN / 8).map_while(at);
    let bytes: Vec<u8> = words
        .flat_map(|word| word.load(Relaxed).to_ne_bytes())
        .collect();
    weft_run::ledger::parse(&bytes)
}

/// Prints the text of `--explain`.
pub(crate) fn explain() {
    let mut text = format!("weft run: process {}: ", std::process::id());
    let seen = SEEN.load(Relaxed);
    if seen == 0 {
        return;
    }
    let Some(ledger) = read() else {
        let _ = writeln!(
            text,
            "{seen} TCP connections, all too short to look for their peers"
        );
        say(&text);
        return;
    };
    let [_, switched, back] = ledger.totals;
    let _ = writeln!(
        text,
        "{seen} TCP connections, {switched} went over to shared memory, {back} of them back"
    );
    let tcp = || ledger.rows.iter().filter(|row| !row.udp);
    for row in tcp().take(32) {
        let _ = write!(
            text,
            "  {} -> {}: {}; sent {} B in the ring, {} B over TCP; received {} B, {} B",
            row.own,
            row.peer,
            row.via(),
            row.ring.0,
            row.tcp.0,
            row.ring.1,
            row.tcp.1
        );
        for about in [row.about_user(), row.about_why().map(str::to_owned)]
            .into_iter()
            .flatten()
        {
            let _ = write!(text, " ({about})");
        }
        text += "\n";
        if !row.lent.is_empty() {
            let _ = writeln!(text, "    {}", row.lent.text());
        }
    }
    if tcp().count() > 32 {
        let _ = writeln!(text, "  and {} more", tcp().count() - 32);
    }
    say(&text);
}

/// UDP sockets, counted before there is a file too.
static DATAGRAM: AtomicU64 = AtomicU64::new(0);
/// How many destinations, or sockets, stay with the kernel, by their reasons.
static STAY: [AtomicU32; 32] = [const { AtomicU32::new(0) }; 32];

/// A UDP socket more.
pub(crate) fn datagram_socket() {
    let n = DATAGRAM.fetch_add(1, Relaxed) + 1;
    set(head(Head::Datagram), n);
}

/// Some datagrams stay with the kernel.
pub(crate) fn datagrams_stay(why: Why) {
    if let Some(count) = STAY.get(why as usize) {
        count.fetch_add(1, Relaxed);
    }
}

/// A row of the file, or none.
#[derive(Default)]
pub(crate) struct Row(AtomicU32);

impl Row {
    pub(crate) fn is_none(&self) -> bool {
        self.0.load(Relaxed) == 0
    }

    /// Gets a row for a connection, if it has none.
    pub(crate) fn begin(&self, fd: i32, ends: &Ends) {
        if self.is_none() {
            self.0.store(take_row(fd, ends, &[]), Relaxed);
        }
    }

    /// Lets go of the row, which stays as it is.
    pub(crate) fn forget(&self) {
        self.0.store(0, Relaxed);
    }

    fn word(&self, which: Word) -> Option<&'static AtomicU64> {
        match self.0.load(Relaxed) {
            0 => None,
            row => at(row as usize * ROW_WORDS + which as usize),
        }
    }

    #[inline]
    pub(crate) fn count(&self, which: Word, n: u64) {
        add(self.word(which), n);
    }

    /// Sets a number.
    pub(crate) fn put(&self, which: Word, value: u64) {
        set(self.word(which), value);
    }

    /// Adds bits.
    pub(crate) fn mark(&self, which: Word, bits: u64) {
        if let Some(word) = self.word(which) {
            word.store(word.load(Relaxed) | bits, Relaxed);
        }
    }
}

/// The row of a ring for datagrams.
pub(crate) struct RowOf(Row);

impl RowOf {
    pub(crate) fn begin(fd: i32, own: SocketAddr, peer: SocketAddr, out: bool) -> RowOf {
        let ring = Route::Ring as u64;
        let mode = if out { ring << 8 } else { ring };
        let more = [(Word::Udp, 1), (Word::Mode, mode)];
        let row = take_row(fd, &Ends { own, peer }, &more);
        add(head(Head::Paths), 1);
        RowOf(Row(AtomicU32::new(row)))
    }

    #[inline]
    pub(crate) fn sent(&self, bytes: u64) {
        self.0.count(Word::TxRing, bytes);
        self.0.count(Word::Datagrams, 1);
    }

    #[inline]
    pub(crate) fn received(&self, bytes: u64) {
        self.0.count(Word::RxRing, bytes);
        self.0.count(Word::Datagrams, 1);
    }

    pub(crate) fn dropped(&self) {
        self.0.count(Word::Dropped, 1);
    }

    pub(crate) fn rang(&self) {
        self.0.count(Word::Bells, 1);
    }

    pub(crate) fn why(&self, why: Why) {
        self.0.put(Word::Why, why as u64);
    }
}

impl Drop for RowOf {
    fn drop(&mut self) {
        self.0.count(Word::Closed, 1);
    }
}

/// The part of `--explain` about UDP; `more` is what else there is to say.
pub(crate) fn explain_datagrams(more: &str) {
    let seen = DATAGRAM.load(Relaxed);
    if seen == 0 {
        return;
    }
    let mut text = format!("weft run: process {}: ", std::process::id());
    let rows = read().map(|ledger| (ledger.datagram[1], ledger.rows));
    let (paths, rows) = rows.unwrap_or_default();
    let _ = writeln!(
        text,
        "{seen} UDP sockets, {paths} one-way paths through shared memory"
    );
    let rows: Vec<_> = rows.iter().filter(|row| row.udp).collect();
    for row in rows.iter().take(32) {
        let out = row.tx_mode == Route::Ring;
        let _ = writeln!(
            text,
            "  UDP {} {} {}: {} datagrams, {} B, {} dropped as the receiver was slow",
            row.own,
            if out { "->" } else { "<-" },
            row.peer,
            row.datagrams,
            if out { row.ring.0 } else { row.ring.1 },
            row.dropped
        );
    }
    if rows.len() > 32 {
        let _ = writeln!(text, "  and {} more", rows.len() - 32);
    }
    for (number, count) in STAY.iter().enumerate() {
        let reason = weft_run::dgram::stays(Why::of(number as u32));
        let n = count.load(Relaxed);
        if n > 0 && !reason.is_empty() {
            let _ = writeln!(text, "  stayed plain UDP, {n} times: {reason}");
        }
    }
    text.push_str(more);
    say(&text);
}

pub(crate) fn say(text: &str) {
    // SAFETY: bytes of a string.
    unsafe { crate::next::write(2, text.as_ptr().cast(), text.len()) };
}
