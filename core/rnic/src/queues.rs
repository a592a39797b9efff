//! Where a queue pair reports what is complete: two completion queues, which may be one, and counters. Queue pairs over TCP have a way of their own, which
//! gathers completions ([`crate::qp`]).

use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::comp_counters::CompCounters;
use crate::cq::{Cq, CqInner};
use crate::engine::{guarded, on_engine};
use crate::types::{Wc, WcOpcode, WcStatus};

pub(crate) struct Queues {
    pub(crate) send: Arc<CqInner>,
    pub(crate) recv: Arc<CqInner>,
    /// Those that the program has attached.
    counters: Option<Arc<CompCounters>>,
}

impl Queues {
    pub(crate) fn new(send: &Cq, recv: &Cq, counters: Option<Arc<CompCounters>>) -> Self {
        Queues {
            send: Arc::clone(&send.0),
            recv: Arc::clone(&recv.0),
            counters,
        }
    }

    /// Each once.
    pub(crate) fn each(&self) -> SmallVec<[&Arc<CqInner>; 2]> {
        let mut queues = SmallVec::from_iter([&self.send]);
        if !Arc::ptr_eq(&self.send, &self.recv) {
            queues.push(&self.recv);
        }
        queues
    }

    /// The caller must hold no lock: the layers above may do anything with the queue pair.
    pub(crate) fn call_hooks(&self) {
        if on_engine() {
            for cq in self.each() {
                guarded(|| cq.call_hook());
            }
        }
    }

    /// Changes with each poll that takes completions.
    pub(crate) fn taken(&self) -> u32 {
        let taken = |cq: &CqInner| cq.taken.load(Ordering::Relaxed);
        taken(&self.send).wrapping_add(taken(&self.recv))
    }

    /// The next poll sends what was put off.
    pub(crate) fn defer(&self) {
        for cq in self.each() {
            cq.deferred.store(true, Ordering::Relaxed);
        }
    }

    /// Counts completed work.
    pub(crate) fn note(&self, opcode: WcOpcode, status: WcStatus, len: u32) {
        if let Some(counters) = &self.counters {
            counters.note(opcode, status, len);
        }
    }

    /// A send is over. It makes a completion if that is `wanted`, or if it failed; otherwise it adds to `silent`, the sends that the next completion covers.
    /// False: the completion queue has overrun.
    pub(crate) fn sent(&self, silent: &mut u32, wanted: bool, wc: Wc) -> bool {
        self.note(wc.opcode, wc.status, wc.byte_len);
        let failed = wc.status != WcStatus::Success;
        if failed || wanted {
            let wc = Wc {
                byte_len: if failed { 0 } else { wc.byte_len },
                wqes_retired: 1 + take(silent),
                ..wc
            };
            self.send.push(&[wc], failed)
        } else {
            CompCounters::done_silently(self.counters.as_ref(), wc.opcode, silent);
            true
        }
    }

    /// A receive of this queue pair has failed, or was flushed.
    pub(crate) fn receive_failed(&self, qp_num: u32, wr_id: u64, status: WcStatus) {
        self.note(WcOpcode::Recv, status, 0);
        let wc = Wc {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qp_num,
            wqes_retired: 1,
            ..Wc::default()
        };
        self.recv.push(&[wc], true);
    }
}
