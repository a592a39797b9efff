//! What a paper concludes, and what is to be reached: whether it holds here, with the number.

use crate::driver::Transport;
use crate::report::{Section, Table};

/// Whether something holds, and the number that says so; `None` where it was not measured.
pub(crate) type Verdict = Option<(bool, String)>;

/// One of them.
pub(crate) struct Conclusion {
    /// Where it comes from.
    source: &'static str,
    pub(crate) claim: &'static str,
    over: Option<Transport>,
    pub(crate) holds: bool,
    pub(crate) number: String,
}

/// All that can be said of what was measured.
#[derive(Default)]
pub(crate) struct Conclusions {
    pub(crate) list: Vec<Conclusion>,
    over: Option<Transport>,
}

impl Conclusions {
    /// What is added from now on is of this transport.
    pub(crate) fn over(&mut self, transport: Transport) {
        self.over = Some(transport);
    }

    /// Adds what can be said, if it can.
    pub(crate) fn add(&mut self, source: &'static str, claim: &'static str, verdict: Verdict) {
        self.list.extend(verdict.map(|(holds, number)| Conclusion {
            source,
            claim,
            over: self.over,
            holds,
            number,
        }));
    }

    /// As a table; `whose` conclusions they are stands in its header.
    pub(crate) fn section(&self, title: &str, whose: &str) -> Option<Section> {
        let over = self.over.map(|_| "over");
        let claim = format!("conclusion of the {whose}");
        let header = ["from", &claim].into_iter().chain(over);
        let mut table = Table::new(&header.chain(["", "number"]).collect::<Vec<_>>());
        for each in &self.list {
            let verdict = if each.holds { "holds" } else { "does not hold" };
            let row = [each.source, each.claim].into_iter();
            let row = row.chain(each.over.map(Transport::name));
            table.push(row.chain([verdict, &each.number]));
        }
        (!table.is_empty()).then(|| Section::new(title).table(table))
    }
}
