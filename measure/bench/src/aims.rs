//! Targets of numbers: the aims of weft and the claims of the papers, in one type for every suite.

use std::fmt;

use serde_json::{Value, json};

use crate::report::{Section, Table};

/// A number's target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    AtLeast(f64),
    AtMost(f64),
    Above(f64),
    Below(f64),
    Within(f64, f64),
    /// No target: the number is only shown.
    None,
}

impl Limit {
    /// Whether the number is within the limit; `None`: there is no limit.
    pub fn holds(self, number: f64) -> Option<bool> {
        match self {
            Limit::AtLeast(least) => Some(number >= least),
            Limit::AtMost(most) => Some(number <= most),
            Limit::Above(least) => Some(number > least),
            Limit::Below(most) => Some(number < most),
            Limit::Within(least, most) => Some((least..=most).contains(&number)),
            Limit::None => None,
        }
    }

    /// The number itself, where there is one.
    pub fn bound(self) -> Option<f64> {
        match self {
            Limit::AtLeast(bound)
            | Limit::AtMost(bound)
            | Limit::Above(bound)
            | Limit::Below(bound) => Some(bound),
            Limit::Within(..) | Limit::None => None,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::AtLeast(least) => write!(f, "at least {least}"),
            Limit::AtMost(most) => write!(f, "at most {most}"),
            Limit::Above(least) => write!(f, "more than {least}"),
            Limit::Below(most) => write!(f, "less than {most}"),
            Limit::Within(least, most) => write!(f, "{least} to {most}"),
            Limit::None => Ok(()),
        }
    }
}

/// A number that was measured, and its target. Not a number: it could not be measured.
#[derive(Clone, Debug)]
pub struct Aim {
    pub what: String,
    pub limit: Limit,
    pub measured: f64,
}

impl Aim {
    pub fn new(what: impl Into<String>, limit: Limit, measured: f64) -> Self {
        Self {
            what: what.into(),
            limit,
            measured,
        }
    }

    /// An aim with a number; `None` where it was not measured.
    pub fn of(what: impl Into<String>, limit: Limit, measured: Option<f64>) -> Option<Self> {
        measured.map(|measured| Self::new(what, limit, measured))
    }

    /// Whether it reaches its target; `None`: it has no target, or was not measured.
    pub fn holds(&self) -> Option<bool> {
        let holds = self.limit.holds(self.measured);
        holds.filter(|_| !self.measured.is_nan())
    }

    pub fn json(&self, bench: &str) -> Value {
        let Aim {
            what,
            limit,
            measured,
        } = self;
        json!({
            "bench": bench, "verdict": what, "target": limit.to_string(), "measured": measured, "holds": self.holds(),
        })
    }
}

/// A table of aims: what each is about, its target, and its number, if it was measured.
#[macro_export]
macro_rules! aims {
    ($($what:expr, $limit:expr => $measured:expr;)*) => {{
        let all = [$($crate::aims::Aim::of($what, $limit, $measured)),*];
        all.into_iter().flatten().collect::<Vec<_>>()
    }};
}
pub use aims;

/// The verdict as text; empty if there is no target.
pub fn verdict(holds: Option<bool>) -> &'static str {
    match holds {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    }
}

/// The aims as a table; `None` if nothing was measured.
pub fn section(title: &str, aims: &[Aim]) -> Option<Section> {
    let measured = |aim: &Aim| match aim.measured {
        none if none.is_nan() => "not measured".to_owned(),
        some => format!("{some:.3}"),
    };
    let table = Table::of(
        aims,
        &[
            ("what", &|aim| aim.what.clone()),
            ("measured", &|aim| measured(aim)),
            ("to reach", &|aim| aim.limit.to_string()),
            ("holds", &|aim| verdict(aim.holds()).to_owned()),
        ],
    );
    (!table.is_empty()).then(|| Section::new(title).table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_say_what_they_are() {
        for (limit, number, holds, text) in [
            (Limit::AtLeast(2.5), 2.5, Some(true), "at least 2.5"),
            (Limit::AtLeast(2.5), 2.4, Some(false), "at least 2.5"),
            (Limit::AtMost(0.5), 0.6, Some(false), "at most 0.5"),
            (Limit::Within(0.9, 1.1), 1.0, Some(true), "0.9 to 1.1"),
            (Limit::None, 7.0, None, ""),
        ] {
            assert_eq!(limit.holds(number), holds, "{limit:?}");
            assert_eq!(limit.to_string(), text);
        }
        assert_eq!(Limit::AtLeast(1.0).holds(f64::NAN), Some(false));
        assert!(section("nothing", &[]).is_none());
        let aims = [Aim::new("seen only", Limit::None, 1.5)];
        let section = section("Aims", &aims).unwrap();
        assert_eq!(section.blocks.len(), 1);
        assert_eq!(aims[0].json("x")["holds"], Value::Null);
    }
}
