//! Finished compilations, for a summary after a build.

use std::collections::VecDeque;

use super::Shared;
use crate::Endpoint;
use crate::ipc::{MAX_PAST, Past};
use crate::lock;
use crate::wire::End;

/// Compilations that are remembered.
const MOST: usize = 50_000;
/// Bytes of a name or reason that are kept.
const MAX_TEXT: usize = 300;

/// The last ones.
#[derive(Default)]
pub(super) struct List {
    first: u64,
    all: VecDeque<Past>,
}

fn short(text: &str) -> String {
    let mut cut = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    text[..cut].replace(char::is_control, " ")
}

impl List {
    fn push(&mut self, past: Past) {
        if self.all.len() == MOST {
            self.all.pop_front();
            self.first += 1;
        }
        self.all.push_back(past);
    }

    /// As many as a message has room for, and the number of the first.
    pub(super) fn page(&self, from: u64) -> (u64, Vec<Past>) {
        let from = from.max(self.first);
        let skipped = usize::try_from(from - self.first).unwrap_or(usize::MAX);
        let page = self.all.iter().skip(skipped).take(MAX_PAST);
        (from, page.cloned().collect())
    }
}

/// The record of one connection of a compilation.
pub(super) struct CompileRecord<'a> {
    shared: &'a Shared,
    /// Since when it preprocesses.
    preprocesses: Option<f64>,
    preprocessed: Option<(f64, f64)>,
    here: Option<Past>,
}

impl<'a> CompileRecord<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            preprocesses: None,
            preprocessed: None,
            here: None,
        }
    }

    /// It has leave to preprocess.
    pub(super) fn preprocesses(&mut self) {
        self.preprocesses = Some(self.shared.now());
    }

    /// It has leave to compile here, for which it had asked at that time.
    pub(super) fn runs_here(&mut self, source: &str, reason: &str, asked: f64) {
        self.here = Some(Past {
            source: short(source),
            preprocessed: self.preprocessed.take(),
            asked,
            began: self.shared.now(),
            reason: short(reason),
            ..Past::default()
        });
    }

    /// It has left the processor: it sends a message, or has ended.
    pub(super) fn left(&mut self) {
        let now = self.shared.now();
        if let Some(began) = self.preprocesses.take() {
            self.preprocessed = Some((began, now));
        }
        if let Some(here) = self.here.take() {
            lock(&self.shared.state)
                .history
                .push(Past { ended: now, ..here });
        }
    }

    /// A worker did it: asked for, begun.
    pub(super) fn done(
        &mut self,
        source: &str,
        worker: &Endpoint,
        (asked, began): (f64, f64),
        end: &End,
        len: u64,
    ) {
        let seconds = |micros: u32| f64::from(micros) / 1e6;
        let past = Past {
            source: short(source),
            worker: Some(worker.clone()),
            preprocessed: self.preprocessed.take(),
            asked,
            began,
            ended: self.shared.now(),
            worker_times: (seconds(end.times[0]), seconds(end.times[1])),
            bytes: (len, end.outputs.iter().map(|output| output.2).sum()),
            reason: String::new(),
        };
        lock(&self.shared.state).history.push(past);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_told_page_by_page() {
        let mut list = List::default();
        for n in 0..MOST + 100 {
            list.push(Past {
                asked: n as f64,
                ..Past::default()
            });
        }
        let (mut next, mut seen) = (0, 0);
        loop {
            let (from, page) = list.page(next);
            let Some(first) = page.first() else { break };
            assert!((first.asked - from as f64).abs() < 0.5);
            seen += page.len();
            next = from + page.len() as u64;
        }
        assert_eq!(seen, MOST);
        assert!(list.page(u64::MAX).1.is_empty());
        // The longest ones fit into a message.
        let long = Past {
            source: short(&"\"".repeat(1000)),
            reason: short(&"\u{1}".repeat(1000)),
            ..Past::default()
        };
        let bytes = serde_json::to_vec(&vec![long; MAX_PAST]).unwrap().len();
        assert!(bytes < 110 << 10, "{bytes}");
    }
}
