//! The steps of the calls, each with one access to what others see.
#![expect(
    clippy::unnecessary_wraps,
    reason = "every step has the same kind of result"
)]

use weft_run::connection::over::{self, Answer, Next};
use weft_run::connection::receive::{self, Asked, Empty, First, Kernel};
use weft_run::connection::send::{self, NoRoom};
use weft_run::connection::{Carrier, Route, without_one};
use weft_run::meet::Why;

use super::world::{At, Fault, Op, RING, Reason, Rule, World};

/// Whether the step was possible.
pub(crate) type Moved = Result<bool, Fault>;

impl World {
    pub(crate) fn go(&mut self, t: usize, at: At) -> Moved {
        self.threads[t].at = at;
        Ok(true)
    }

    /// The call returns.
    pub(crate) fn finish(&mut self, t: usize) -> Moved {
        let sent = self.threads[t].sent;
        self.out(t).returned |= sent;
        let thread = &mut self.threads[t];
        thread.bytes.clear();
        thread.sent = 0;
        thread.why = None;
        thread.there = 0;
        (thread.empty, thread.has_received) = (Empty::default(), false);
        self.go(t, At::Idle)
    }

    /// Whether a call can begin.
    pub(crate) fn may_begin(&self, t: usize, op: Op) -> bool {
        let thread = &self.threads[t];
        let process = &self.processes[thread.process];
        let others = |at: &dyn Fn(At) -> bool| {
            let mut of = self.threads.iter().enumerate();
            of.all(|(at_t, it)| at_t == t || it.process != thread.process || at(it.at))
        };
        process.is_open
            && !thread.is_gone
            && thread.at == At::Idle
            && match op {
                // A close beside calls of the same process is theirs to order.
                Op::Close => others(&|at| at == At::Idle),
                Op::Fork => process.big.is_none() && self.processes.iter().any(|it| !it.has_begun),
                // The library cannot order such a call among those on the ring.
                Op::SendUnseen => self.lanes[process.side].out != Route::Ring,
                Op::ReceiveUnseen => self.lanes[1 - process.side].into != Route::Ring,
                _ => true,
            }
    }

    pub(crate) fn begin(&mut self, t: usize, op: Op) -> Moved {
        self.threads[t].left.remove(0);
        if self.threads[t].is_unseen {
            return self.begin_unseen(t, op);
        }
        let there = self.into(t).returned;
        let thread = &mut self.threads[t];
        thread.there = there;
        thread.may_wait = matches!(op, Op::Send(_) | Op::Receive | Op::Poll);
        thread.is_poll = matches!(op, Op::Poll | Op::PollNow);
        thread.empty = Empty {
            may_wait: thread.may_wait,
            ..Empty::default()
        };
        match op {
            Op::Send(n) | Op::SendNow(n) => {
                self.begin_send(t, n);
                self.go(t, At::Send)
            }
            Op::Receive | Op::ReceiveNow => self.go(t, At::Receive),
            Op::Poll | Op::PollNow => self.go(t, At::Poll),
            Op::ShutWrite => self.go(t, At::ShutTcp),
            Op::Close => self.leave(t).and_then(|_| self.go(t, At::LeaveKernel)),
            Op::Exit => self.leave(t).and_then(|_| self.end(t)),
            Op::Kill => {
                self.has_cause = true;
                self.end(t)
            }
            Op::Fork => self.fork(t),
            Op::Back(why) => {
                self.threads[t].why = Some(why);
                self.go(t, At::Back(None))
            }
            Op::SendUnseen | Op::ReceiveUnseen => self.begin_unseen(t, op),
        }
    }

    /// A call by which the library is passed.
    fn begin_unseen(&mut self, t: usize, op: Op) -> Moved {
        match op {
            Op::Send(n) => self.begin_send(t, n),
            Op::SendUnseen => {
                self.has_cause = true;
                self.begin_send(t, 1);
                self.unseen |= 1 << self.threads[t].bytes[0];
            }
            // As in a receive that is on TCP for good.
            Op::Receive => {
                self.threads[t].may_wait = true;
                return self.go(t, At::AfterTcp);
            }
            Op::ReceiveUnseen => {
                self.has_cause = true;
                self.tcp_receive(t)?;
                return Ok(true);
            }
            _ => return Ok(true),
        }
        self.tcp_send(t)?;
        self.finish(t)
    }

    fn fork(&mut self, t: usize) -> Moved {
        let parent = self.process(t).clone();
        let child = self.processes.iter().position(|it| !it.has_begun);
        self.processes[child.expect("a free one")] = super::world::Process {
            in_rx: 0,
            inside: 0,
            has_begun: true,
            ..parent
        };
        self.holders[parent.side] += 1;
        Ok(true)
    }

    /// The process is counted out, before its last descriptor is closed.
    fn leave(&mut self, t: usize) -> Moved {
        let side = self.side(t);
        let left = without_one(self.holders[side].into(), false);
        self.holders[side] = left.unwrap_or(0) as u8;
        if left == Some(0) {
            if self.into(t).into == Route::Ring && !self.into(t).ring.is_empty() {
                self.has_cause = true;
                self.reset(Why::None)?;
            }
            self.out(t).has_finished = true;
        }
        Ok(true)
    }

    /// The process ends.
    fn end(&mut self, t: usize) -> Moved {
        let process = self.threads[t].process;
        for at in 0..self.threads.len() {
            if self.threads[at].process != process {
                continue;
            }
            self.threads[at].is_gone = true;
            self.threads[at].at = At::Idle;
            for lane in &mut self.lanes {
                for holder in [&mut lane.tx_lock, &mut lane.rx_lock, &mut lane.giver] {
                    holder.take_if(|it| *it == at);
                }
            }
        }
        self.kernel_close(process);
        self.bell_close(process);
        Ok(true)
    }

    /// One step of a call. `without`: a rule that is not kept.
    pub(crate) fn step(&mut self, t: usize, without: Option<Rule>) -> Moved {
        let keeps = |rule| without != Some(rule);
        let side = self.side(t);
        let at = self.threads[t].at;
        match at {
            At::Idle => Ok(false),
            At::Send
            | At::Gate
            | At::GateSend
            | At::GateLeave(_)
            | At::Begin
            | At::CountedSend
            | At::EndTcp(_) => self.step_send(t, side),
            At::InRing
            | At::Publish
            | At::Published
            | At::RingBell
            | At::Full
            | At::TxAfter
            | At::BeginAfter
            | At::MayAfter
            | At::AfterSend
            | At::EndAfter(_)
            | At::RingForTcp
            | At::RingTheBell => self.step_ring(t, side, &keeps),
            At::Receive
            | At::Over(_)
            | At::Enter
            | At::Look
            | At::Kernel
            | At::Count(_)
            | At::AfterTcp => self.step_receive(t, &keeps),
            At::FromRing
            | At::Ask
            | At::LookAgain
            | At::Collect
            | At::AskKernel
            | At::Readable
            | At::Sleep
            | At::EndOfRing(_) => self.step_from_ring(t, side, &keeps),
            At::Poll
            | At::PollMark
            | At::PollMode
            | At::PollAsk
            | At::PollWatch
            | At::PollWait(..) => self.step_poll(t, side, &keeps),
            _ => self.step_back(t, side, &keeps),
        }
    }

    /// A wait ends by its time limit.
    pub(crate) fn time_out(&mut self, t: usize) -> bool {
        if self.threads[t].at != At::Full {
            return false;
        }
        self.threads[t].why = Some(Reason::SlowReader);
        self.threads[t].at = At::Close;
        true
    }

    fn step_send(&mut self, t: usize, side: usize) -> Moved {
        let out = self.out(t).out;
        let at = self.threads[t].at;
        match at {
            At::Send if !self.has_side(1 - side) || self.reset.is_some() => self.finish(t),
            At::Send => match out {
                Route::Tcp if self.process(t).is_joined => self.go(t, At::Begin),
                Route::Tcp => self.join(t, side),
                Route::Ring => self.go(t, At::InRing),
                Route::After | Route::Both => self.go(t, At::BeginAfter),
            },
            At::Gate if self.process(t).is_joined => self.go(t, At::Send),
            At::Gate => {
                self.process(t).inside += 1;
                self.go(t, At::GateSend)
            }
            At::GateSend => {
                let n = self.tcp_send(t)?;
                self.go(t, At::GateLeave(n))
            }
            At::GateLeave(n) => {
                self.process(t).inside -= 1;
                self.process(t).sent += n;
                self.finish(t)
            }
            At::Begin => {
                let lane = self.out(t);
                if lane.has_switched {
                    if lane.out == Route::Tcp {
                        lane.out = Route::Ring;
                    }
                    return self.go(t, At::Send);
                }
                lane.busy += 1;
                self.go(t, At::CountedSend)
            }
            At::CountedSend => {
                let n = self.tcp_send(t)?;
                self.go(t, At::EndTcp(n))
            }
            At::EndTcp(n) => {
                self.process(t).sent += n;
                let lane = self.out(t);
                lane.busy -= 1;
                lane.count += n;
                self.finish(t)
            }
            at => unreachable!("{at:?}"),
        }
    }

    fn join(&mut self, t: usize, side: usize) -> Moved {
        if self.process(t).big.is_some() {
            return Ok(false);
        }
        let holders = self.holders[side];
        let may = over::may_join(holders.into(), self.out(t).out);
        if !may || self.process(t).inside != 0 {
            return self.go(t, At::Gate);
        }
        let agrees = self.compare_sent(t);
        if agrees == Answer::Yes {
            let sent = self.process(t).sent;
            self.process(t).is_joined = true;
            let lane = self.out(t);
            lane.has_joined = true;
            lane.count += sent;
            return Ok(true);
        }
        let lane = self.out(t);
        if lane.is_held {
            return Ok(false);
        }
        lane.is_closed = true;
        if lane.wish.is_some() && send::rings_at_close(Why::Unseen, Carrier::Here) {
            lane.take_wish();
            lane.bell += 1;
        }
        lane.out = Route::After;
        Ok(true)
    }

    fn step_ring(&mut self, t: usize, side: usize, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let (has_more, has_spun) = {
            let thread = &self.threads[t];
            (!thread.bytes.is_empty(), thread.empty.has_spun)
        };
        let may_wait = self.threads[t].may_wait;
        let is_deserted = !self.has_side(1 - side) || self.reset.is_some();
        let at = self.threads[t].at;
        let lane = self.out(t);
        match at {
            At::InRing => {
                if lane.tx_lock.is_some() {
                    return Ok(false);
                }
                if lane.out != Route::Ring || is_deserted {
                    return self.go(t, At::Send);
                }
                if lane.ring.len() < RING {
                    lane.tx_lock = Some(t);
                    return self.go(t, At::Publish);
                }
                match send::on_full(lane.is_closed, has_spun) {
                    NoRoom::GoBack => self.go(t, At::TxAfter),
                    NoRoom::Spin => {
                        self.threads[t].empty.has_spun = true;
                        Ok(true)
                    }
                    NoRoom::Ask => self.go(t, At::Full),
                }
            }
            At::Publish => {
                if lane.is_closed {
                    lane.tx_lock = None;
                    return self.go(t, At::TxAfter);
                }
                let room = RING - lane.ring.len();
                let n = room.min(self.threads[t].bytes.len());
                let bytes = self.accept(t, n)?;
                self.out(t).ring.extend(bytes);
                self.go(t, At::Published)
            }
            At::Published => {
                lane.tx_lock = None;
                let to = lane.position();
                match lane.takes_wish(to) {
                    true => self.go(t, At::RingBell),
                    false if has_more => self.go(t, At::InRing),
                    false => self.finish(t),
                }
            }
            At::RingBell => {
                lane.bell += 1;
                if has_more {
                    self.go(t, At::InRing)
                } else {
                    self.finish(t)
                }
            }
            At::Full => match send::asked(may_wait, || false) {
                send::Asked::Return => self.finish(t),
                send::Asked::Close => self.go(t, At::Close),
                send::Asked::Sleep => {
                    let wakes = lane.ring.len() < RING || lane.is_closed || is_deserted;
                    if wakes {
                        self.go(t, At::InRing)
                    } else {
                        Ok(false)
                    }
                }
            },
            At::TxAfter => {
                if lane.is_held {
                    return Ok(false);
                }
                lane.out = Route::After;
                self.go(t, At::Send)
            }
            At::BeginAfter if lane.is_held => Ok(false),
            At::BeginAfter => {
                lane.busy += 1;
                self.go(t, At::MayAfter)
            }
            At::MayAfter if lane.is_held => {
                lane.busy -= 1;
                self.go(t, At::BeginAfter)
            }
            At::MayAfter => self.go(t, At::AfterSend),
            At::AfterSend => {
                let n = self.tcp_send(t)?;
                self.go(t, At::EndAfter(n))
            }
            At::EndAfter(n) => {
                lane.busy -= 1;
                self.process(t).sent += n;
                if n > 0 && keeps(Rule::RingAfterSend) {
                    self.go(t, At::RingForTcp)
                } else {
                    self.finish(t)
                }
            }
            At::RingForTcp => {
                if lane.wish.is_some() {
                    lane.take_wish();
                    return self.go(t, At::RingTheBell);
                }
                self.finish(t)
            }
            At::RingTheBell => {
                lane.bell += 1;
                self.finish(t)
            }
            at => unreachable!("{at:?}"),
        }
    }

    fn step_receive(&mut self, t: usize, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let received = self.process(t).received;
        let may_wait = self.threads[t].may_wait;
        let into = self.into(t).into;
        let at = self.threads[t].at;
        match at {
            At::Receive => match into {
                Route::Tcp if self.into(t).may_switch(received) => self.begin_over(t),
                Route::Tcp => self.go(t, At::Enter),
                Route::Ring | Route::Both => self.go(t, At::FromRing),
                Route::After if self.is_given(t, keeps) => Ok(false),
                Route::After => self.go(t, At::AfterTcp),
            },
            At::Over(step) => self.step_over(t, step, keeps),
            At::Enter => {
                self.process(t).in_rx += 1;
                self.go(t, At::Look)
            }
            At::Look if self.into(t).into != Route::Tcp => {
                self.process(t).in_rx -= 1;
                self.go(t, At::Receive)
            }
            At::Look => self.go(t, At::Kernel),
            At::Kernel => match self.tcp_receive(t)? {
                None if may_wait => Ok(false),
                None | Some(0) => {
                    self.process(t).in_rx -= 1;
                    self.finish(t)
                }
                Some(n) => self.go(t, At::Count(n)),
            },
            At::Count(n) => {
                self.process(t).received += n;
                self.process(t).in_rx -= 1;
                self.threads[t].has_received = true;
                if self.into(t).may_switch(received + n) {
                    self.begin_over(t)
                } else {
                    self.finish(t)
                }
            }
            At::AfterTcp => {
                let is_rest = self.threads[t].has_received;
                match self.tcp_receive(t)? {
                    None if may_wait && !is_rest => Ok(false),
                    None => self.finish(t),
                    Some(n) => {
                        self.process(t).received += n;
                        self.finish(t)
                    }
                }
            }
            at => unreachable!("{at:?}"),
        }
    }

    /// Waits for the lock that is held over a switch.
    fn begin_over(&mut self, t: usize) -> Moved {
        if self.process(t).big.is_some() {
            // A receive that has bytes may wait for it as well.
            return if self.threads[t].has_received {
                self.finish(t)
            } else {
                Ok(false)
            };
        }
        self.process(t).big = Some(t);
        self.go(t, At::Over(over::Step::FIRST))
    }

    fn step_over(&mut self, t: usize, step: over::Step, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let side = self.side(t);
        let holders = self.holders[side];
        let (in_rx, received) = (self.process(t).in_rx, self.process(t).received);
        let count = self.compare_received(t);
        let marks_first = keeps(Rule::MarkFirst);
        let lane = self.into(t);
        let answer: Answer = match step {
            over::Step::IsOpen => (!lane.is_closed).into(),
            over::Step::IsAlone => (holders == 1 || !keeps(Rule::IsAlone)).into(),
            over::Step::IsOnTcp if lane.rx_lock.is_some() => return Ok(false),
            over::Step::IsOnTcp => {
                lane.rx_lock = Some(t);
                (lane.into == Route::Tcp).into()
            }
            over::Step::Mark => {
                if marks_first {
                    lane.into = over::marked(Carrier::Here);
                }
                Answer::Yes
            }
            over::Step::NobodyWaits => (in_rx == 0 || !keeps(Rule::NobodyWaits)).into(),
            over::Step::Count if keeps(Rule::ReceiversCount) => count,
            over::Step::Count | over::Step::CanMove | over::Step::IsCarried => Answer::Yes,
            over::Step::Arm => {
                lane.absorb();
                lane.wish = Some(lane.head);
                Answer::Yes
            }
            over::Step::Tell => {
                let may = lane.may_switch(received);
                if may {
                    lane.has_switched = true;
                    lane.into = Route::Ring;
                }
                may.into()
            }
        };
        let end = match step.next(answer) {
            Next::Do(next) => return self.go(t, At::Over(next)),
            end => end,
        };
        if let Next::Not { unmark: true, .. } | Next::Never { unmark: true, .. } = end {
            lane.into = Route::Tcp;
        }
        lane.rx_lock.take_if(|holder| *holder == t);
        if let Next::Never { .. } = end {
            lane.is_closed = true;
            lane.into = Route::After;
        }
        self.process(t).big = None;
        match end {
            _ if self.threads[t].has_received => self.finish(t),
            Next::Not { .. } => self.go(t, At::Enter),
            _ => self.go(t, At::Receive),
        }
    }

    pub(crate) fn is_given(&mut self, t: usize, keeps: &dyn Fn(Rule) -> bool) -> bool {
        keeps(Rule::ReceiversWaitForGiver) && self.into(t).giver.is_some_and(|giver| giver != t)
    }

    fn step_from_ring(&mut self, t: usize, side: usize, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let empty = self.threads[t].empty;
        let at = self.threads[t].at;
        match at {
            At::FromRing => self.look_at_ring(t, keeps),
            At::Ask => {
                let lane = self.into(t);
                lane.absorb();
                let stood = lane.wish.replace(lane.head).is_some();
                self.threads[t].stood = stood;
                self.go(t, At::LookAgain)
            }
            At::LookAgain => {
                let stood = self.threads[t].stood;
                let is_poll = self.threads[t].is_poll;
                let lane = self.into(t);
                let has_come = !stood && lane.ready() != (0, false);
                if !has_come || !keeps(Rule::LookAfterAsking) {
                    return self.go(t, At::Collect);
                }
                if lane.owed > 0 {
                    lane.wish = None;
                    lane.absorb();
                    let taken = (lane.owed - 1).min(lane.bell);
                    lane.bell -= taken;
                    lane.owed -= taken;
                }
                lane.rx_lock = None;
                self.go(t, if is_poll { At::PollWatch } else { At::FromRing })
            }
            At::Collect => {
                // It waits for a byte that is on the way.
                let rings = |at| matches!(at, At::RingBell | At::RingTheBell | At::CloseBell);
                let comes = (0..self.threads.len())
                    .any(|it| self.side(it) != side && rings(self.threads[it].at));
                let is_poll = self.threads[t].is_poll;
                let lane = self.into(t);
                if lane.bell < lane.owed && comes {
                    return Ok(false);
                }
                let taken = lane.owed.min(lane.bell);
                lane.bell -= taken;
                lane.owed = 0;
                lane.rx_lock = None;
                self.go(
                    t,
                    if is_poll {
                        At::PollWatch
                    } else {
                        At::AskKernel
                    },
                )
            }
            At::AskKernel => {
                let (says, is_end) = self.kernel(side);
                self.threads[t].is_end = is_end;
                if says != Kernel::Quiet && !empty.has_ended {
                    return self.go(t, At::Readable);
                }
                let lane = self.into(t);
                let has_ended = lane.has_finished && lane.bell_ended && !empty.may_wait;
                let says = if has_ended {
                    Kernel::End
                } else {
                    Kernel::Quiet
                };
                self.asked(t, says, keeps)
            }
            At::Readable => {
                let is_end = self.threads[t].is_end;
                let lane = self.into(t);
                let is_closed = lane.is_closed && keeps(Rule::CloseBeforeTcp);
                let says = receive::readable(is_end, || is_closed, || !lane.wire.is_empty());
                self.asked(t, says, keeps)
            }
            At::Sleep => {
                let lane = self.into(t);
                let is_end = lane.bell == 0 && (lane.bell_ended || lane.bell_shut);
                if lane.bell == 0 && !is_end {
                    return Ok(false);
                }
                self.threads[t].empty.has_ended = is_end;
                self.threads[t].empty.has_spun = false;
                self.go(t, At::FromRing)
            }
            At::EndOfRing(is_closed) => {
                let lane = self.into(t);
                if !is_closed {
                    if !lane.fin && !lane.is_closed && lane.into == Route::Ring {
                        return if self.reset.is_some() {
                            self.finish(t)
                        } else {
                            Ok(false)
                        };
                    }
                    if !lane.wire.is_empty() && !lane.is_closed {
                        self.reset(Why::Unseen)?;
                        return self.finish(t);
                    }
                }
                self.into(t).into = Route::After;
                let is_rest = self.threads[t].has_received;
                self.go(t, if is_rest { At::AfterTcp } else { At::Receive })
            }
            at => unreachable!("{at:?}"),
        }
    }

    fn look_at_ring(&mut self, t: usize, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        if self.into(t).rx_lock.is_some() {
            return Ok(false);
        }
        let has_received = self.threads[t].has_received;
        if self.is_given(t, keeps) {
            return if has_received {
                self.finish(t)
            } else {
                Ok(false)
            };
        }
        if self.into(t).into != Route::Ring {
            return self.go(
                t,
                if has_received {
                    At::AfterTcp
                } else {
                    At::Receive
                },
            );
        }
        let (ready, is_closed) = self.into(t).ready();
        if ready > 0 {
            if has_received {
                return self.finish(t);
            }
            self.ring_receive(t)?;
            self.threads[t].has_received = true;
            if receive::goes_on(false, ready == 1, is_closed, Carrier::Here) {
                return Ok(true);
            }
            return self.finish(t);
        }
        let empty = &mut self.threads[t].empty;
        empty.is_closed = is_closed;
        match receive::on_empty(*empty) {
            First::GoOn => self.go(t, At::EndOfRing(true)),
            First::Return => self.finish(t),
            First::Spin => {
                empty.has_spun = true;
                Ok(true)
            }
            First::Ask => {
                self.into(t).rx_lock = Some(t);
                self.go(t, At::Ask)
            }
        }
    }

    fn asked(&mut self, t: usize, says: Kernel, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        match receive::asked(self.threads[t].empty, || says) {
            Asked::GoOn => self.go(t, At::EndOfRing(false)),
            Asked::Return => self.finish(t),
            Asked::Ended if !keeps(Rule::LookAfterEnd) => self.go(t, At::EndOfRing(false)),
            Asked::Ended => {
                self.threads[t].empty.has_ended = true;
                self.go(t, At::FromRing)
            }
            Asked::Reset => {
                self.reset(Why::Unseen)?;
                self.finish(t)
            }
            Asked::Sleep => self.go(t, At::Sleep),
        }
    }
}
