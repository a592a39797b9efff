//! That any interleaving delivers the bytes of the time of the send, and that nothing hangs, by exhaustive search over small bounds. The code that is
//! searched is the code that ships: `World` holds two `Endpoint`s.
//!
//! `WEFT_MODEL_DEEP=1` searches further.

mod world;

use std::time::Instant;

use stateright::{Checker, Model, Property};
use world::{Call, Fault, Settings, World};

/// What the programs of both ends may do, in every order.
#[derive(Clone, Debug)]
struct Bounds {
    settings: Settings,
    /// For each end: the calls, and how often.
    calls: [&'static [(Call, u8)]; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    world: World,
    left: [Vec<u8>; 2],
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Call(usize, usize),
    Deliver(usize),
    Transmitted(usize),
    Lock(usize),
    Poll(usize),
}

impl Model for Bounds {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let left = self
            .calls
            .map(|calls| calls.iter().map(|(_, n)| *n).collect());
        vec![State {
            world: World::new(&self.settings),
            left,
            fault: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.fault.is_some() {
            return;
        }
        let world = &state.world;
        for at in 0..2 {
            // What a driver does at once is one step of each end.
            if world.ends[at].machine.clone().poll().is_some() {
                steps.push(Step::Poll(at));
            }
            if !world.wires[at].is_empty() {
                steps.push(Step::Deliver(at));
            }
            if world.is_transmitting(at) {
                steps.push(Step::Transmitted(at));
            }
            if world.is_locking(at) {
                steps.push(Step::Lock(at));
            }
            for (which, (call, _)) in self.calls[at].iter().enumerate() {
                // A fetch that was begun comes to its end.
                let fetching = matches!(call, Call::Recv(_)) && world.ends[at].fetch.is_some();
                if (state.left[at][which] > 0 || fetching) && world.may(at, *call) {
                    steps.push(Step::Call(at, which));
                }
            }
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let verdict = match step {
            Step::Call(at, which) => {
                if state.world.ends[at].fetch.is_none() {
                    state.left[at][which] -= 1;
                }
                state.world.call(at, self.calls[at][which].0)
            }
            Step::Deliver(at) => state.world.deliver(at),
            Step::Transmitted(at) => {
                state.world.transmitted(at);
                Ok(())
            }
            Step::Lock(at) => {
                state.world.lock(at);
                Ok(())
            }
            Step::Poll(at) => state.world.poll(at).map(drop),
        };
        let hangs = || {
            if !state.world.is_quiet() {
                return None;
            }
            let mut rest = state.world.clone();
            state.world.stuck().or_else(|| rest.drain().err())
        };
        let fault = verdict.err().or_else(hangs);
        state.fault = fault;
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(
            "exactly the bytes sent",
            |_, state: &State| state.fault.is_none(),
        )]
    }
}

impl Bounds {
    fn holds(self, name: &str) {
        let start = Instant::now();
        let bounds = self.clone();
        let checker = self.checker().threads(2).spawn_bfs().join();
        println!(
            "{name}: {} states ({} generated), depth {}, {:.1} s",
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            start.elapsed().as_secs_f32()
        );
        if let Some(path) = checker.discovery("exactly the bytes sent") {
            let steps = path.into_actions();
            panic!("{name}: {:?}: {steps:#?}", bounds.run(&steps));
        }
        assert!(checker.is_done() && checker.unique_state_count() > 100);
    }

    /// Finds a fault; that there is none is the failure.
    fn fails(self, name: &str) -> Fault {
        let bounds = self.clone();
        let checker = self.checker().spawn_bfs().join();
        let path = checker.discovery("exactly the bytes sent");
        let path = path.unwrap_or_else(|| panic!("{name}: no counterexample"));
        bounds
            .run(&path.into_actions())
            .expect("the fault comes again")
    }

    fn run(&self, steps: &[Step]) -> Option<Fault> {
        let mut state = self.init_states().remove(0);
        for step in steps {
            state = self.next_state(&state, *step)?;
        }
        state.fault
    }
}

fn deep() -> bool {
    std::env::var_os("WEFT_MODEL_DEEP").is_some()
}

#[test]
fn messages_and_sources_in_one_direction() {
    let calls: &[(Call, u8)] = if deep() {
        &[
            (Call::Send(3), 2),
            (Call::Source(2), 2),
            (Call::Shutdown, 1),
        ]
    } else {
        &[
            (Call::Send(3), 1),
            (Call::Source(2), 1),
            (Call::Shutdown, 1),
        ]
    };
    let bounds = Bounds {
        settings: Settings::default(),
        calls: [calls, &[(Call::Recv(1), 2), (Call::Recv(4), 2)]],
    };
    bounds.holds("one direction");
}

#[test]
fn a_source_that_is_overwritten_in_flight() {
    let sources = if deep() { 3 } else { 2 };
    let calls: &[(Call, u8)] = if deep() {
        &[(Call::Source(2), 3), (Call::Overwrite, 2)]
    } else {
        &[(Call::Source(2), 2), (Call::Overwrite, 2)]
    };
    let bounds = Bounds {
        settings: Settings {
            sources,
            ..Settings::default()
        },
        calls: [calls, &[(Call::Recv(1), 1), (Call::Recv(4), 2)]],
    };
    bounds.holds("copy on write");
}

#[test]
fn sinks_and_what_crosses_them() {
    let sinks: &[(Call, u8)] = if deep() {
        &[
            (Call::OfferSink(2), 2),
            (Call::CancelSink, 1),
            (Call::Recv(4), 2),
        ]
    } else {
        &[
            (Call::OfferSink(2), 1),
            (Call::CancelSink, 1),
            (Call::Recv(4), 2),
        ]
    };
    let bounds = Bounds {
        settings: Settings::default(),
        calls: [
            &[
                (Call::Source(3), 1),
                (Call::SendNow(1), 1),
                (Call::Overwrite, 1),
            ],
            sinks,
        ],
    };
    bounds.holds("sinks");
}

#[test]
fn both_directions_share_the_credits() {
    let bounds = Bounds {
        settings: Settings {
            payload: 1,
            ..Settings::default()
        },
        calls: if deep() {
            [
                &[(Call::Send(2), 1), (Call::Source(1), 1), (Call::Recv(2), 2)],
                &[(Call::Send(2), 1), (Call::Recv(2), 2)],
            ]
        } else {
            [
                &[(Call::Send(2), 1), (Call::Recv(2), 1)],
                &[
                    (Call::SendNow(1), 1),
                    (Call::Source(1), 1),
                    (Call::Recv(2), 1),
                ],
            ]
        },
    };
    bounds.holds("both directions");
}

#[test]
fn without_the_lock_other_bytes_arrive() {
    let bounds = Bounds {
        settings: Settings {
            locked: false,
            ..Settings::default()
        },
        calls: [
            &[(Call::Source(2), 1), (Call::Overwrite, 1)],
            &[(Call::Recv(4), 2)],
        ],
    };
    assert_eq!(bounds.fails("no lock"), "other bytes than were sent");
}

#[test]
fn without_the_unlock_a_source_is_never_fetched() {
    let bounds = Bounds {
        settings: Settings {
            updates_unlock: false,
            ..Settings::default()
        },
        calls: [
            &[(Call::Source(2), 1), (Call::Overwrite, 1)],
            &[(Call::Recv(4), 1)],
        ],
    };
    assert_eq!(bounds.fails("no unlock"), "bytes that never arrive");
}
