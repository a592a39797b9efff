//! The conclusions of a paper and the targets of weft: whether each holds here, with the number.

use crate::aims::Limit;
use crate::driver::Transport;
use crate::report::{Section, Table, number};

/// Whether a claim holds, and the number for it; `None` where it was not measured.
pub(crate) type Verdict = Option<(bool, String)>;

/// A table of claims: the source and the text of each, and a check of whether it holds.
macro_rules! claims {
    ($found:expr; $($source:expr, $claim:expr => $verdict:expr;)*) => {
        $($found.add($source, $claim, $verdict);)*
    };
}
pub(crate) use claims;

/// The smallest and the largest of several numbers, with the place of each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) low: (f64, u64),
    pub(crate) high: (f64, u64),
}

impl Range {
    pub(crate) fn of(values: impl IntoIterator<Item = (u64, f64)>) -> Option<Self> {
        let values = values.into_iter().map(|(place, value)| (value, place));
        values.fold(None, |range, at| {
            let Self { low, high } = range.unwrap_or(Self { low: at, high: at });
            Some(Self {
                low: if at.0 < low.0 { at } else { low },
                high: if at.0 > high.0 { at } else { high },
            })
        })
    }

    pub(crate) fn words(&self) -> String {
        format!("{} to {}", number(self.low.0), number(self.high.0))
    }

    /// Whether the whole range reaches the target; `of` is appended to the text.
    pub(crate) fn all(&self, limit: Limit, of: &str) -> (bool, String) {
        let ends = [self.low.0, self.high.0];
        let holds = ends.iter().all(|end| limit.holds(*end) == Some(true));
        (holds, self.words() + of)
    }

    /// Whether the largest value reaches the target; `of` is appended to the text.
    pub(crate) fn largest(&self, limit: Limit, of: &str) -> (bool, String) {
        (limit.holds(self.high.0) == Some(true), self.words() + of)
    }
}

/// One conclusion.
pub(crate) struct Conclusion {
    /// The source of the claim.
    source: &'static str,
    pub(crate) claim: &'static str,
    over: Option<Transport>,
    pub(crate) holds: bool,
    pub(crate) number: String,
}

/// All conclusions that the measurements allow.
#[derive(Default)]
pub(crate) struct Conclusions {
    pub(crate) list: Vec<Conclusion>,
    over: Option<Transport>,
}

impl Conclusions {
    /// Sets the transport of the conclusions that are added from now on.
    pub(crate) fn over(&mut self, transport: Transport) {
        self.over = Some(transport);
    }

    /// Adds a conclusion if it was measured.
    pub(crate) fn add(&mut self, source: &'static str, claim: &'static str, verdict: Verdict) {
        self.list.extend(verdict.map(|(holds, number)| Conclusion {
            source,
            claim,
            over: self.over,
            holds,
            number,
        }));
    }

    /// The conclusions as a table; `whose` names their source in its header.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_held_against_limits() {
        assert!(Range::of([]).is_none());
        let range = Range::of([(1, 0.9), (2, 0.5), (3, 1.4)]).unwrap();
        assert_eq!((range.low, range.high), ((0.5, 2), (1.4, 3)));
        let words = "0.50 to 1.40 of it".to_owned();
        assert_eq!(range.all(Limit::Above(0.4), " of it"), (true, words));
        assert!(!range.all(Limit::Below(1.0), "").0);
        assert!(!range.all(Limit::Above(1.0), "").0);
        assert!(range.largest(Limit::AtLeast(1.35), "").0);
    }
}
