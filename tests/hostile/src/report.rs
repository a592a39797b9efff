//! What an attacker found, for the test that started it.

use std::any::Any;
use std::fmt::Display;
use std::io::Read;

/// What came of a campaign.
#[derive(Debug, Default)]
pub struct Report {
    cases: u32,
    faults: Vec<String>,
    kept: Vec<Box<dyn Any>>,
}

impl Report {
    /// One more case; `fault` says what the victim did that it must not, if it did.
    pub fn case(&mut self, name: impl Display, outcome: Result<(), String>) {
        self.cases += 1;
        if let Err(fault) = outcome {
            self.faults.push(format!("{name}: {fault}"));
        }
    }

    /// Keeps something (a connection, say) while the test judges the victim.
    pub fn keep(&mut self, thing: impl Any) {
        self.kept.push(Box::new(thing));
    }

    /// What the victim did that it must not, in so many cases.
    pub fn outcome(&self) -> (u32, &[String]) {
        (self.cases, &self.faults)
    }

    /// Tells the test, and stays as long as it likes if something is to be kept.
    pub fn finish(self) {
        for fault in &self.faults {
            println!("fault {fault}");
        }
        println!("cases {}", self.cases);
        if !self.kept.is_empty() {
            let _ = std::io::stdin().read(&mut [0]);
        }
    }
}
