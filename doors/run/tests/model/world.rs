//! Two sides of a connection, with a model of TCP (two streams with the kernel's counts), of the rings' words, and of the bells. A thread makes a step at a time:
//! one access to shared memory, or one system call. All decisions are those of [`weft_run::connection`].
//!
//! Left out: how a full ring makes its bell unwritable, loans, epoll sets, and the gate's own steps, which loom checks.

use weft_run::connection::over::{self, Answer};
use weft_run::connection::receive::{Empty, Kernel};
use weft_run::connection::{Route, back};
use weft_run::meet::Why;

/// Bytes that a ring holds.
pub(crate) const RING: usize = 2;

pub(crate) type Fault = &'static str;

pub(crate) const TWICE: Fault = "a byte is received twice";
pub(crate) const ORDER: Fault = "bytes are out of order";
pub(crate) const LOST: Fault = "bytes are missing at the end of the stream";
pub(crate) const BEHIND: Fault = "a byte is sent behind the end that the receiver has seen";
pub(crate) const BOTH_WAIT: Fault = "a receiver waits, and nobody will wake it";
pub(crate) const PROMISE: Fault = "readiness promises what a receive does not give";
pub(crate) const HIDES: Fault = "readiness hides what a receive would give";
pub(crate) const NO_CAUSE: Fault = "an honest connection is reset";

pub(crate) const ROUTE: Fault = "a direction changes in a way that it may not";

/// The rules of the protocol; a test leaves one out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    MarkFirst,
    NobodyWaits,
    IsAlone,
    ReceiversCount,
    LookAfterAsking,
    LookAfterEnd,
    CloseBeforeTcp,
    Hold,
    Quiet,
    ReceiversWaitForGiver,
    ResetUnread,
    RingAtClose,
    RingAfterSend,
    ShutUnderLock,
    PollLeavesClosedRing,
}

/// One direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    // TCP.
    pub(crate) wire: Vec<u8>,
    pub(crate) fin: bool,
    pub(crate) tcp_sent: u8,
    // The segment.
    pub(crate) ring: Vec<u8>,
    pub(crate) head: u8,
    pub(crate) is_closed: bool,
    pub(crate) is_held: bool,
    pub(crate) wish: Option<u8>,
    pub(crate) rung: u8,
    pub(crate) has_joined: bool,
    pub(crate) has_switched: bool,
    pub(crate) busy: u8,
    pub(crate) count: u8,
    pub(crate) has_finished: bool,
    // The receiver's bell.
    pub(crate) bell: u8,
    pub(crate) bell_ended: bool,
    pub(crate) bell_shut: bool,
    // What the processes of a side share.
    pub(crate) out: Route,
    pub(crate) into: Route,
    pub(crate) tx_lock: Option<usize>,
    pub(crate) rx_lock: Option<usize>,
    pub(crate) giver: Option<usize>,
    pub(crate) owed: u8,
    // What is true of the stream, as sets of bytes.
    pub(crate) accepted: u16,
    pub(crate) returned: u16,
    pub(crate) received: u16,
    pub(crate) has_eof: bool,
}

impl Lane {
    pub(crate) fn ready(&self) -> (usize, bool) {
        (self.ring.len(), self.is_closed)
    }

    pub(crate) fn position(&self) -> u8 {
        self.head + self.ring.len() as u8
    }

    /// As `Stream::may_switch`.
    pub(crate) fn may_switch(&self, count: u8) -> bool {
        self.has_joined && !self.has_switched && self.busy == 0 && self.count == count
    }

    /// As `Stream::publish` after its swap: whether the bell has to be rung.
    pub(crate) fn takes_wish(&mut self, to: u8) -> bool {
        let rings = self.wish.is_some_and(|at| at != to);
        if rings {
            self.take_wish();
        }
        rings
    }

    pub(crate) fn take_wish(&mut self) {
        self.wish = None;
        self.rung += 1;
    }

    pub(crate) fn absorb(&mut self) {
        self.owed += std::mem::take(&mut self.rung);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) side: usize,
    /// It has a descriptor of the socket.
    pub(crate) is_open: bool,
    pub(crate) has_begun: bool,
    pub(crate) big: Option<usize>,
    pub(crate) is_joined: bool,
    pub(crate) inside: u8,
    pub(crate) sent: u8,
    pub(crate) received: u8,
    pub(crate) in_rx: u8,
}

/// Where a call is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum At {
    #[default]
    Idle,
    // Sending.
    Send,
    Gate,
    GateSend,
    GateLeave(u8),
    Begin,
    CountedSend,
    EndTcp(u8),
    InRing,
    Publish,
    Published,
    RingBell,
    Full,
    TxAfter,
    BeginAfter,
    MayAfter,
    AfterSend,
    EndAfter(u8),
    RingForTcp,
    RingTheBell,
    // Receiving.
    Receive,
    Over(over::Step),
    Enter,
    Look,
    Kernel,
    Count(u8),
    FromRing,
    Ask,
    LookAgain,
    Collect,
    AskKernel,
    Readable,
    Sleep,
    EndOfRing(bool),
    AfterTcp,
    // Readiness.
    Poll,
    PollMark,
    PollMode,
    PollAsk,
    PollWatch,
    PollWait(bool, bool),
    // Going back, and ends.
    Close,
    CloseRing,
    CloseBell,
    CloseState,
    Back(Option<back::Step>),
    Give(back::Give),
    DrainTcp,
    Put,
    ShutTcp,
    ShutState,
    ShutBell,
    LeaveKernel,
    LeaveBell,
}

/// What a thread may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Op {
    Send(u8),
    SendNow(u8),
    Receive,
    ReceiveNow,
    Poll,
    PollNow,
    ShutWrite,
    Close,
    Exit,
    Kill,
    Fork,
    Back(Reason),
    /// By a call that the library does not see.
    SendUnseen,
    ReceiveUnseen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reason {
    Stdio,
    Passed,
    Exec,
    ShutRead,
    Option,
    SlowReader,
}

impl Reason {
    pub(crate) fn why(self) -> Why {
        match self {
            Reason::Stdio => Why::Stdio,
            Reason::Passed => Why::Passed,
            Reason::Exec => Why::Exec,
            Reason::ShutRead => Why::ShutRead,
            Reason::Option => Why::Option,
            Reason::SlowReader => Why::SlowReader,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Thread {
    pub(crate) process: usize,
    pub(crate) at: At,
    /// The calls that it may still make, in any order.
    pub(crate) left: Vec<Op>,
    /// The bytes of its send that are not sent yet, and those that are.
    pub(crate) bytes: Vec<u8>,
    pub(crate) sent: u16,
    pub(crate) empty: Empty,
    pub(crate) may_wait: bool,
    pub(crate) is_poll: bool,
    /// The bytes that were there when its call began.
    pub(crate) there: u16,
    pub(crate) holds_rx: bool,
    pub(crate) stood: bool,
    pub(crate) is_end: bool,
    pub(crate) is_empty: bool,
    pub(crate) why: Option<Reason>,
    pub(crate) has_received: bool,
    /// Its calls are not seen any more: another program's.
    pub(crate) is_unseen: bool,
    pub(crate) is_gone: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) lanes: [Lane; 2],
    pub(crate) processes: Vec<Process>,
    pub(crate) threads: Vec<Thread>,
    pub(crate) holders: [u8; 2],
    /// Of each byte: those that have to be received before it.
    pub(crate) before: Vec<u16>,
    /// Bytes of calls that are not seen, and those of them that others have overtaken: nobody may receive them any more.
    pub(crate) unseen: u16,
    pub(crate) overtaken: u16,
    pub(crate) reset: Option<u32>,
    /// Something has happened that may end a connection: unseen bytes, a death.
    pub(crate) has_cause: bool,
}

impl World {
    /// Threads by process and what they may do; the processes' sides.
    pub(crate) fn new(sides: &[usize], threads: &[(usize, &[Op])]) -> World {
        let processes = sides.iter().enumerate().map(|(at, &side)| Process {
            side,
            is_open: at < 2,
            has_begun: at < 2,
            ..Process::default()
        });
        let threads = threads.iter().map(|(process, ops)| Thread {
            process: *process,
            left: ops.to_vec(),
            ..Thread::default()
        });
        World {
            lanes: Default::default(),
            processes: processes.collect(),
            threads: threads.collect(),
            holders: [1; 2],
            before: Vec::new(),
            unseen: 0,
            overtaken: 0,
            reset: None,
            has_cause: false,
        }
    }

    /// Both directions have gone over, without a byte.
    pub(crate) fn put_on_rings(&mut self) {
        for lane in &mut self.lanes {
            (lane.has_joined, lane.has_switched) = (true, true);
            (lane.out, lane.into) = (Route::Ring, Route::Ring);
            lane.wish = Some(0);
        }
        for process in &mut self.processes {
            process.is_joined = true;
        }
    }

    pub(crate) fn side(&self, t: usize) -> usize {
        self.processes[self.threads[t].process].side
    }

    /// The outgoing direction of a thread's side.
    pub(crate) fn out(&mut self, t: usize) -> &mut Lane {
        let side = self.side(t);
        &mut self.lanes[side]
    }

    pub(crate) fn into(&mut self, t: usize) -> &mut Lane {
        let side = self.side(t);
        &mut self.lanes[1 - side]
    }

    pub(crate) fn process(&mut self, t: usize) -> &mut Process {
        let process = self.threads[t].process;
        &mut self.processes[process]
    }

    pub(crate) fn has_side(&self, side: usize) -> bool {
        self.processes
            .iter()
            .any(|it| it.side == side && it.is_open)
    }

    /// A send begins: its bytes come after those of all sends that have returned.
    pub(crate) fn begin_send(&mut self, t: usize, n: u8) {
        let returned = self.out(t).returned;
        let mut bytes = Vec::new();
        let mut before = returned;
        for _ in 0..n {
            let id = self.before.len() as u8;
            self.before.push(before);
            before |= 1 << id;
            bytes.push(id);
        }
        self.threads[t].bytes = bytes;
        self.threads[t].sent = 0;
    }

    /// The next bytes of a send are in TCP or in the ring.
    pub(crate) fn accept(&mut self, t: usize, n: usize) -> Result<Vec<u8>, Fault> {
        let bytes: Vec<u8> = self.threads[t].bytes.drain(..n).collect();
        let set = bytes.iter().fold(0, |set, id| set | 1 << id);
        self.threads[t].sent |= set;
        let side = self.side(t);
        let lane = self.out(t);
        lane.accepted |= set;
        if lane.has_eof && self.has_side(1 - side) && self.reset.is_none() {
            return Err(BEHIND);
        }
        Ok(bytes)
    }

    /// TCP takes the bytes of a send. Returns how many; none after an end.
    pub(crate) fn tcp_send(&mut self, t: usize) -> Result<u8, Fault> {
        let side = self.side(t);
        if self.lanes[side].fin || self.reset.is_some() || !self.has_side(1 - side) {
            self.threads[t].bytes.clear();
            return Ok(0);
        }
        let n = self.threads[t].bytes.len();
        let bytes = self.accept(t, n)?;
        let lane = self.out(t);
        lane.wire.extend(bytes);
        lane.tcp_sent += n as u8;
        Ok(n as u8)
    }

    /// A byte is received by the program, or by the one that has the socket now.
    fn receive(&mut self, side: usize, id: u8) -> Result<(), Fault> {
        let lane = &mut self.lanes[1 - side];
        if lane.received & 1 << id != 0 {
            return Err(TWICE);
        }
        let missing = self.before[id as usize] & !lane.received;
        if missing & !self.unseen != 0 || self.overtaken & 1 << id != 0 {
            return Err(ORDER);
        }
        self.overtaken |= missing;
        lane.received |= 1 << id;
        Ok(())
    }

    /// A receive from TCP. `None`: it would wait. 0: the end.
    pub(crate) fn tcp_receive(&mut self, t: usize) -> Result<Option<u8>, Fault> {
        let side = self.side(t);
        if self.reset.is_some() {
            return Ok(Some(0));
        }
        let lane = &mut self.lanes[1 - side];
        if lane.wire.is_empty() {
            if !lane.fin {
                return Ok(None);
            }
            lane.has_eof = true;
            if lane.accepted & !lane.received != 0 {
                return Err(LOST);
            }
            return Ok(Some(0));
        }
        let id = lane.wire.remove(0);
        self.receive(side, id)?;
        Ok(Some(1))
    }

    pub(crate) fn ring_receive(&mut self, t: usize) -> Result<(), Fault> {
        let side = self.side(t);
        let lane = &mut self.lanes[1 - side];
        let id = lane.ring.remove(0);
        lane.head += 1;
        self.receive(side, id)
    }

    /// What the kernel says of the socket of a side.
    pub(crate) fn kernel(&self, side: usize) -> (Kernel, bool) {
        let lane = &self.lanes[1 - side];
        if lane.fin || self.reset.is_some() {
            (Kernel::End, true)
        } else if lane.wire.is_empty() {
            (Kernel::Quiet, false)
        } else {
            (Kernel::Stray, false)
        }
    }

    /// Whether a receive that begins now returns at once: with bytes, the end, or an error.
    pub(crate) fn gives(&self, side: usize) -> bool {
        let lane = &self.lanes[1 - side];
        self.reset.is_some()
            || !lane.wire.is_empty()
            || lane.fin
            || lane.into == Route::Ring && !lane.ring.is_empty()
    }

    /// The end of a process's last descriptor, for the kernel.
    pub(crate) fn kernel_close(&mut self, process: usize) {
        let side = self.processes[process].side;
        self.processes[process].is_open = false;
        if !self.has_side(side) {
            let lane = &mut self.lanes[1 - side];
            if !lane.wire.is_empty() {
                self.has_cause = true;
                self.reset = Some(Why::None as u32);
            }
            self.lanes[side].fin = true;
        }
    }

    pub(crate) fn bell_close(&mut self, process: usize) {
        let side = self.processes[process].side;
        if !self.has_side(side) {
            self.lanes[side].bell_ended = true;
        }
    }

    /// The connection is reset by the library.
    pub(crate) fn reset(&mut self, why: Why) -> Result<(), Fault> {
        if !self.has_cause {
            return Err(NO_CAUSE);
        }
        self.reset = Some(why as u32);
        for lane in &mut self.lanes {
            lane.bell_ended = true;
        }
        Ok(())
    }

    /// Compares a process's count of the outgoing direction with the kernel's.
    pub(crate) fn compare_sent(&mut self, t: usize) -> Answer {
        let kernel = self.out(t).tcp_sent;
        let has_ended = self.out(t).fin;
        let ours = self.process(t).sent;
        over::compare(ours.into(), (!has_ended).then_some(kernel.into()))
    }

    /// The same of the incoming one.
    pub(crate) fn compare_received(&mut self, t: usize) -> Answer {
        let kernel = self.into(t).tcp_sent;
        let has_ended = self.into(t).fin;
        let ours = self.process(t).received;
        over::compare(ours.into(), (!has_ended).then_some(kernel.into()))
    }
}

impl World {
    /// Whether a direction has changed in a way that it may not.
    pub(crate) fn changed(&self, before: &World) -> Option<Fault> {
        let mut lanes = self.lanes.iter().zip(&before.lanes);
        let may = |(now, was): (&Lane, &Lane)| {
            was.out.may_become(now.out) && was.into.may_become(now.into)
        };
        (!lanes.all(may)).then_some(ROUTE)
    }

    /// Nothing can happen any more. Returns what is wrong with that.
    pub(crate) fn stuck(&self) -> Option<Fault> {
        self.threads.iter().find_map(|thread| {
            let side = self.processes[thread.process].side;
            let lane = &self.lanes[1 - side];
            let left = lane.accepted & !lane.received;
            // A receiver that waits for its ring learns of a call that is not seen at its next look.
            let sees_all = !matches!(thread.at, At::Sleep | At::PollWait(false, _));
            let is_left = left != 0 && (sees_all || left & self.unseen == 0);
            let has_ended = lane.fin || self.reset.is_some() || !self.has_side(1 - side);
            let waits_for_bytes = match thread.at {
                At::Idle => return None,
                At::Kernel | At::AfterTcp | At::Sleep | At::PollWait(..) => true,
                // A call that waits for anything else than bytes.
                _ => return Some(BOTH_WAIT),
            };
            (waits_for_bytes && (is_left || has_ended)).then_some(BOTH_WAIT)
        })
    }
}
