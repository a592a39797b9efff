//! Debian's perftest within the guest: on our libraries against itself, beside the kernel's siw on the same address. Speeds are told, not judged: see
//! papers/results/stack.md.

use std::fmt;

use weft_dropin::libraries;

use super::{GUEST, LONG, STEP, Siw, listening, say, siw};

/// Where our libraries are in the guest.
const HOME: &str = "/weft";
/// The first port of a server; each run has its own.
const FIRST_PORT: u16 = 18_600;

/// Runs until one has figures.
const ATTEMPTS: usize = 4;

/// What runs a program: a name, and the kernel driver's parameters or our libraries' environment. Left to itself, siw uses no CRC against siw.
#[derive(Clone, Copy)]
enum Stack {
    Siw(&'static str, &'static [(&'static str, u8)]),
    Weft(&'static str, &'static str),
}

const STACKS: [Stack; 5] = [
    Stack::Siw("siw", &[]),
    Stack::Weft("weft, shared memory", "WEFT_LOCAL=require"),
    Stack::Weft("weft, TCP without CRC", "WEFT_LOCAL=off WEFT_CRC=off"),
    Stack::Weft("weft, TCP with CRC", "WEFT_LOCAL=off WEFT_CRC=on"),
    Stack::Siw("siw with CRC", &[("mpa_crc_required", 1)]),
];

impl Stack {
    fn name(self) -> &'static str {
        let (Stack::Siw(name, _) | Stack::Weft(name, _)) = self;
        name
    }
}

/// A program, its options, and the column of its table that counts.
struct Measure {
    program: &'static str,
    options: &'static str,
    column: usize,
    unit: &'static str,
}

const MEASURES: [Measure; 2] = [
    Measure {
        program: "ib_write_bw",
        options: "-s 1048576 -n 200",
        column: 3,
        unit: "MiB/s",
    },
    Measure {
        program: "ib_send_lat",
        options: "-s 64 -n 1000",
        column: 4,
        unit: "µs",
    },
];

#[derive(Debug, PartialEq)]
enum Run {
    Figure(f64),
    /// The program went well, but could not tell the speed of its clock.
    Clockless,
    /// The server listens anew for its second connection, and the client was there sooner.
    Missed,
}

/// The samples of a stack, in ascending order.
#[derive(Clone, Default)]
struct Samples(Vec<f64>);

impl Samples {
    fn add(&mut self, sample: f64) {
        self.0.push(sample);
        self.0.sort_unstable_by(f64::total_cmp);
    }

    fn median(&self) -> f64 {
        let half = self.0.len() / 2;
        match self.0.get(half) {
            Some(above) if self.0.len().is_multiple_of(2) => {
                f64::midpoint(self.0[half - 1], *above)
            }
            middle => middle.copied().unwrap_or(f64::NAN),
        }
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |sample: Option<&f64>| sample.copied().unwrap_or(f64::NAN);
        let (min, max) = (end(self.0.first()), end(self.0.last()));
        write!(f, "{:.1} ({min:.1} to {max:.1}, ", self.median())?;
        write!(f, "{} runs)", self.0.len())
    }
}

impl Siw {
    /// Put our libraries into the guest.
    fn bring_libraries(&mut self) {
        self.guest.must(&format!("mkdir -p {HOME}"), STEP);
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            self.guest
                .put(&libraries().join(name), &format!("{HOME}/{name}"), LONG);
        }
    }

    /// Run both sides of a program in the guest.
    fn measure(&mut self, measure: &Measure, stack: Stack, port: u16) -> Run {
        let (name, program, limit) = (stack.name(), measure.program, LONG.as_secs());
        let (env, device) = match stack {
            Stack::Siw(_, parameters) => {
                self.driver(parameters);
                (String::new(), "siw0")
            }
            Stack::Weft(_, env) => (format!("LD_LIBRARY_PATH={HOME} {env}"), "weft0"),
        };
        let side = format!(
            "env {env} timeout {limit} {program} -R -F -d {device} -p {port} {}",
            measure.options
        );
        let line = format!(
            "{side} >/tmp/served 2>&1 & server=$!;{}; {side} {GUEST}; status=$?; \
             [ $status = 0 ] || kill $server; wait $server && [ $status = 0 ] || {{ cat /tmp/served; false; }}",
            listening(port)
        );
        let output = self.guest.run(&line, LONG + LONG);
        let text = output.text;
        if text.contains("RDMA_CM_EVENT_REJECTED; error: -111") {
            return Run::Missed;
        }
        assert_eq!(output.status, 0, "{program}, {name}: {text}");
        let mut lines = text.lines().skip_while(|line| !line.starts_with(" #bytes"));
        let row: Vec<f64> = lines
            .nth(1)
            .unwrap_or_else(|| panic!("{program}, {name}: no table in {text}"))
            .split_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let sample = row.get(measure.column).copied();
        let sample = sample.filter(|sample| sample.is_finite() && *sample > 0.0);
        if let Some(figure) = sample {
            return Run::Figure(figure);
        }
        let clockless = text.contains("Correlation coefficient");
        assert!(clockless, "{program}, {name}: {text}");
        Run::Clockless
    }
}

#[test]
fn perftest_on_our_libraries_runs_beside_siw() {
    let rounds = std::env::var("WEFT_ROUNDS").map_or(1, |n| n.parse().expect("a number of rounds"));
    let Some(mut siw) = siw() else { return };
    siw.bring_libraries();
    let mut ports = FIRST_PORT..;
    for measure in &MEASURES {
        let mut all = vec![Samples::default(); STACKS.len()];
        for _ in 0..rounds {
            // They take turns, so that other work on the machine meets all of them.
            for (samples, stack) in all.iter_mut().zip(STACKS) {
                let mut run = Run::Missed;
                for port in ports.by_ref().take(ATTEMPTS) {
                    run = siw.measure(measure, stack, port);
                    if let Run::Figure(figure) = run {
                        samples.add(figure);
                        break;
                    }
                }
                let (program, name) = (measure.program, stack.name());
                assert_ne!(run, Run::Missed, "{program}, {name}: never met");
            }
        }
        let Measure {
            program,
            options,
            unit,
            ..
        } = measure;
        say(&format!("{program} -R {options}, in the guest, {unit}:"));
        for (samples, stack) in all.iter().zip(STACKS) {
            let ratio = samples.median() / all[0].median();
            say(&format!(
                "  {}: {samples}, {ratio:.2} of siw's",
                stack.name()
            ));
        }
    }
}
