//! The steps of a poll, of the way back to TCP, and of ends.

use weft_run::connection::back::{self, Give, Going};
use weft_run::connection::{Carrier, Route, ready, send};
use weft_run::meet::Why;

use super::steps::Moved;
use super::world::{At, HIDES, PROMISE, Reason, Rule, World};

impl World {
    pub(crate) fn step_poll(
        &mut self,
        t: usize,
        side: usize,
        keeps: &dyn Fn(Rule) -> bool,
    ) -> Moved {
        let may_wait = self.threads[t].may_wait;
        let at = self.threads[t].at;
        match at {
            At::Poll => {
                let lane = self.into(t);
                let rings = ready::Rings {
                    out: Route::Ring,
                    into: lane.into,
                    has_finished: lane.has_finished,
                    ready: Some(lane.ready()),
                };
                let is_told = ready::is_told_by_rings(rings, (true, false));
                if is_told && lane.ready().0 > 0 {
                    return self.told(t, side, true);
                }
                self.go(t, At::PollMark)
            }
            At::PollMark => {
                self.process(t).in_rx += 1;
                self.threads[t].holds_rx = true;
                self.go(t, At::PollMode)
            }
            At::PollMode => {
                let lane = self.into(t);
                if lane.rx_lock.is_some() {
                    return Ok(false);
                }
                if ready::is_over(lane.into, Some(lane.ready())) {
                    lane.into = Route::After;
                }
                self.go(t, At::PollAsk)
            }
            At::PollAsk => {
                let lane = self.into(t);
                if lane.into == Route::Ring && lane.rx_lock.is_some() {
                    return Ok(false);
                }
                if lane.into == Route::Ring && lane.ready() == (0, false) {
                    lane.rx_lock = Some(t);
                    return self.go(t, At::Ask);
                }
                self.go(t, At::PollWatch)
            }
            At::PollWatch => {
                let is_cut = !self.has_side(1 - side);
                let lane = self.into(t);
                let has_ended = is_cut && lane.bell_ended && lane.ring.is_empty();
                let watch = ready::input(lane.into, has_ended, false);
                if !ready::keeps_tcp(lane.into) {
                    self.release_rx(t);
                }
                self.go(t, At::PollWait(watch.tcp, watch.bell))
            }
            At::PollWait(tcp, bell) => {
                let is_reset = self.reset.is_some();
                let lane = self.into(t);
                let by_tcp = !lane.wire.is_empty() || lane.fin || is_reset;
                let is_end = lane.bell_ended || lane.bell_shut;
                let by_bell = bell && (lane.bell > 0 || is_end);
                let is_over = ready::is_over(lane.into, Some(lane.ready()));
                if !(by_bell || tcp && by_tcp) {
                    return if may_wait {
                        Ok(false)
                    } else {
                        self.told(t, side, false)
                    };
                }
                let mut says = tcp && by_tcp || bell && lane.bell > 0;
                if by_bell && is_end || is_over && keeps(Rule::PollLeavesClosedRing) {
                    says = by_tcp || !lane.ring.is_empty();
                }
                if !says && may_wait {
                    self.release_rx(t);
                    return self.go(t, At::PollMark);
                }
                self.told(t, side, says)
            }
            at => unreachable!("{at:?}"),
        }
    }

    fn release_rx(&mut self, t: usize) {
        if std::mem::take(&mut self.threads[t].holds_rx) {
            self.process(t).in_rx -= 1;
        }
    }

    /// Readiness is told.
    fn told(&mut self, t: usize, side: usize, is_ready: bool) -> Moved {
        self.release_rx(t);
        let lane = &self.lanes[1 - side];
        let is_there = self.threads[t].there & !lane.received != 0;
        if is_ready && !self.gives(side) {
            return Err(PROMISE);
        }
        if !is_ready && is_there && self.reset.is_none() {
            return Err(HIDES);
        }
        self.finish(t)
    }

    pub(crate) fn step_back(
        &mut self,
        t: usize,
        side: usize,
        keeps: &dyn Fn(Rule) -> bool,
    ) -> Moved {
        let reason = self.threads[t].why;
        let why = reason.map_or(Why::None, Reason::why);
        let at = self.threads[t].at;
        match at {
            At::Close => {
                let lane = self.out(t);
                if lane.tx_lock.is_some() {
                    return Ok(false);
                }
                lane.is_closed = true;
                self.go(t, At::CloseRing)
            }
            At::CloseRing => {
                let rings = send::rings_at_close(why, Carrier::Here) && keeps(Rule::RingAtClose);
                let lane = self.out(t);
                if rings && lane.wish.is_some() {
                    lane.take_wish();
                    return self.go(t, At::CloseBell);
                }
                self.go(t, At::CloseState)
            }
            At::CloseBell => {
                self.out(t).bell += 1;
                self.go(t, At::CloseState)
            }
            At::CloseState => {
                let lane = self.out(t);
                if lane.out == Route::Ring {
                    if lane.is_held {
                        return Ok(false);
                    }
                    lane.out = Route::After;
                }
                if self.threads[t].bytes.is_empty() {
                    return self.go(t, At::Back(Some(back::Step::CloseOut)));
                }
                self.threads[t].why = None;
                self.go(t, At::Send)
            }
            At::Back(last) => {
                let going = Going {
                    why,
                    carrier: Carrier::Here,
                    into: self.into(t).into,
                    is_empty: self.threads[t].is_empty,
                };
                self.go_back(t, going.next(last), keeps)
            }
            At::Give(give) => self.give(t, side, give, keeps),
            At::DrainTcp => {
                let lane = self.into(t);
                let mut bytes = std::mem::take(&mut lane.wire);
                self.threads[t].bytes.append(&mut bytes);
                self.go(t, At::Put)
            }
            At::Put => {
                let bytes = std::mem::take(&mut self.threads[t].bytes);
                let has_peer = self.has_side(1 - side);
                let lane = self.into(t);
                lane.giver = None;
                if !bytes.is_empty() && (lane.fin || !has_peer) {
                    self.has_cause = true;
                    self.reset(Why::Unread)?;
                } else {
                    lane.tcp_sent += bytes.len() as u8;
                    lane.wire.extend(bytes);
                }
                self.go(t, At::Back(Some(back::Step::GiveBack)))
            }
            At::ShutTcp => {
                let lane = self.out(t);
                if keeps(Rule::ShutUnderLock) {
                    if lane.tx_lock.is_some() {
                        return Ok(false);
                    }
                    lane.tx_lock = Some(t);
                }
                lane.fin = true;
                self.go(t, At::ShutState)
            }
            At::ShutState => {
                let lane = self.out(t);
                lane.out = Route::After;
                lane.tx_lock.take_if(|holder| *holder == t);
                lane.has_finished = true;
                self.go(t, At::ShutBell)
            }
            At::ShutBell => {
                self.out(t).bell_ended = true;
                self.finish(t)
            }
            At::LeaveKernel => {
                let process = self.threads[t].process;
                self.kernel_close(process);
                self.go(t, At::LeaveBell)
            }
            At::LeaveBell => {
                let process = self.threads[t].process;
                self.bell_close(process);
                self.finish(t)
            }
            at => unreachable!("{at:?}"),
        }
    }

    fn go_back(
        &mut self,
        t: usize,
        step: Option<back::Step>,
        keeps: &dyn Fn(Rule) -> bool,
    ) -> Moved {
        let lane = self.into(t);
        let Some(step) = step else {
            return self.after_back(t, keeps);
        };
        match step {
            back::Step::CloseOut => return self.go(t, At::Close),
            back::Step::AskHost => unreachable!("both are here"),
            back::Step::Hold => {
                if keeps(Rule::Hold) {
                    (lane.is_closed, lane.is_held) = (true, true);
                }
            }
            back::Step::CloseIn => {
                if lane.rx_lock.is_some() {
                    return Ok(false);
                }
                lane.is_closed = true;
                self.threads[t].is_empty = self.into(t).ring.is_empty();
            }
            back::Step::ReadTcp => {
                if self.process(t).big.is_some() {
                    return Ok(false);
                }
                self.into(t).into = Route::After;
            }
            back::Step::GiveBack => return self.go(t, At::Give(Give::FIRST)),
            back::Step::Wake => lane.bell_shut = true,
            back::Step::Release => lane.is_held = false,
        }
        self.go(t, At::Back(Some(step)))
    }

    /// The connection is on TCP, or its ring is read to its end by this library.
    fn after_back(&mut self, t: usize, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let why = self.threads[t].why.map_or(Why::None, Reason::why);
        let lane = self.into(t);
        let is_left = lane.into == Route::Ring && !lane.ring.is_empty();
        let is_out_of_sight = back::is_out_of_sight(why);
        if is_left && is_out_of_sight && keeps(Rule::ResetUnread) {
            self.reset(Why::Unread)?;
        }
        self.threads[t].is_unseen = is_out_of_sight;
        self.finish(t)
    }

    fn give(&mut self, t: usize, side: usize, give: Give, keeps: &dyn Fn(Rule) -> bool) -> Moved {
        let goes_on = match give {
            Give::PeersSocket => {
                let has_peer = self.has_side(1 - side);
                self.has_cause |= !has_peer;
                has_peer
            }
            Give::Quiet if self.into(t).busy == 0 || !keeps(Rule::Quiet) => true,
            Give::Quiet => {
                // A sender that was killed within a send never ends it.
                if !self.has_cause {
                    return Ok(false);
                }
                false
            }
            Give::Begin => {
                let lane = self.into(t);
                if lane.rx_lock.is_some() {
                    return Ok(false);
                }
                let is_free = lane.giver.is_none();
                if is_free {
                    lane.giver = Some(t);
                }
                is_free
            }
            Give::Move => {
                let lane = self.into(t);
                if lane.rx_lock.is_some() {
                    return Ok(false);
                }
                let bytes = std::mem::take(&mut lane.ring);
                lane.head += bytes.len() as u8;
                lane.into = Route::After;
                self.threads[t].bytes = bytes;
                return self.go(t, At::DrainTcp);
            }
        };
        let next = give.next().filter(|_| goes_on);
        self.go(
            t,
            next.map_or(At::Back(Some(back::Step::GiveBack)), At::Give),
        )
    }
}
