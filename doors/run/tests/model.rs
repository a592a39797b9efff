//! Exhaustive search over small bounds for what a connection of `weft run` owes to its programs: the bytes that were sent are received once, in order and all of
//! them; readiness promises and hides nothing; no thread waits for what nobody will do. It searches the production decisions of [`weft_run::connection`].
//!
//! Each rule of the protocol has a test that leaves it out and finds out why it is there.

#[path = "model/back.rs"]
mod back;
#[path = "model/steps.rs"]
mod steps;
#[path = "model/world.rs"]
mod world;

use std::fmt::Write;
use std::time::Instant;

use stateright::{Checker, Model, Property};
use world::{At, BOTH_WAIT, Fault, LOST, NO_CAUSE, ORDER, Op, PROMISE, Reason, Rule, World};

/// The processes' sides (the first two have the socket from the beginning), and what threads may do, in every order.
#[derive(Clone, Debug)]
struct Bounds {
    sides: &'static [usize],
    threads: Vec<(usize, &'static [Op])>,
    on_rings: bool,
    without: Option<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    world: World,
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Begin(usize, Op),
    Step(usize),
    TimeOut(usize),
}

impl Bounds {
    fn threads(threads: &[(usize, &'static [Op])]) -> Bounds {
        Bounds {
            sides: &[0, 1],
            threads: threads.to_vec(),
            on_rings: false,
            without: None,
        }
    }

    /// The connection is on its rings at the beginning, which saves the search the way there.
    fn on_rings(self) -> Bounds {
        Bounds {
            on_rings: true,
            ..self
        }
    }

    /// A process more, which begins as the child of a fork.
    fn with_child_of(self, side: usize) -> Bounds {
        let sides: &[usize] = if side == 0 { &[0, 1, 0] } else { &[0, 1, 1] };
        Bounds { sides, ..self }
    }

    fn without(self, rule: Rule) -> Bounds {
        let without = Some(rule);
        Bounds { without, ..self }
    }

    fn act(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let world = &mut state.world;
        let moved = match action {
            Action::Begin(t, op) => world.begin(t, op),
            Action::Step(t) => world.step(t, self.without),
            Action::TimeOut(t) => Ok(world.time_out(t)),
        };
        match moved {
            Ok(false) => return None,
            Ok(true) => {}
            Err(fault) => state.fault = Some(fault),
        }
        if state.fault.is_none() {
            state.fault = state.world.changed(&last.world);
        }
        if state.fault.is_none() && self.is_stuck(&state) {
            state.fault = state.world.stuck();
        }
        Some(state)
    }

    /// What may happen next, some of which is not possible.
    fn choices(state: &State) -> Vec<Action> {
        let mut choices = Vec::new();
        for (t, thread) in state.world.threads.iter().enumerate() {
            if thread.at != At::Idle {
                choices.extend([Action::Step(t), Action::TimeOut(t)]);
                continue;
            }
            let op = thread.left.first().copied();
            let op = op.filter(|op| state.world.may_begin(t, *op));
            choices.extend(op.map(|op| Action::Begin(t, op)));
        }
        choices
    }

    fn is_stuck(&self, state: &State) -> bool {
        !Self::choices(state).iter().any(|action| match *action {
            Action::Begin(..) => true,
            Action::Step(t) => state.world.clone().step(t, self.without) != Ok(false),
            Action::TimeOut(t) => state.world.clone().time_out(t),
        })
    }

    /// Searches every state, and fails with the shortest path to a fault.
    fn holds(self, name: &str) {
        let start = Instant::now();
        let bounds = self.clone();
        let checker = self.checker().threads(2).spawn_bfs().join();
        println!(
            "{name}: {} states, depth {}, {:.1} s",
            checker.unique_state_count(),
            checker.max_depth(),
            start.elapsed().as_secs_f32()
        );
        if let Some(path) = checker.discovery("owes") {
            panic!("{name}: {}", bounds.tell(path.into_actions()));
        }
        assert!(checker.is_done() && checker.unique_state_count() > 100);
    }

    /// Finds the shortest path to a fault without a rule; fails if there is none, or another one.
    fn fails(self, rule: Rule, fault: Fault) {
        let bounds = self.without(rule);
        let checker = bounds.clone().checker().threads(2).spawn_bfs().join();
        let path = checker.discovery("owes");
        let path = path.unwrap_or_else(|| panic!("{rule:?} is not needed"));
        let found = path.last_state().fault;
        let told = bounds.tell(path.into_actions());
        println!("without {rule:?}: {told}");
        assert_eq!(found, Some(fault), "without {rule:?}: {told}");
    }

    /// The steps of each thread.
    fn tell(&self, actions: Vec<Action>) -> String {
        let mut state = self.init_states().remove(0);
        let mut text = String::new();
        for action in actions {
            let at = |t: usize| state.world.threads[t].at;
            match action {
                Action::Begin(t, op) => writeln!(text, "  {t} calls {op:?}"),
                Action::Step(t) => writeln!(text, "  {t} at {:?}", at(t)),
                Action::TimeOut(t) => writeln!(text, "  {t} at {:?}: too late", at(t)),
            }
            .expect("memory");
            state = self.act(&state, action).expect("a step");
        }
        format!("{text}  => {:?}\n{:#?}", state.fault, state.world.lanes)
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut world = World::new(self.sides, &self.threads);
        if self.on_rings {
            world.put_on_rings();
        }
        vec![State { world, fault: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.fault.is_none() {
            actions.append(&mut Self::choices(state));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        self.act(last, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("owes", |_, state: &State| {
            state.fault.is_none()
        })]
    }
}

use Op::{Back, ReceiveUnseen, Send, SendUnseen};
use Op::{Close, Exit, Fork, Kill, Poll, PollNow, Receive, ReceiveNow, SendNow, ShutWrite};

#[test]
fn two_threads_send_and_two_receive() {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1)]),
        (0, &[Send(1)]),
        (1, &[Receive]),
        (1, &[Receive]),
    ]);
    bounds.holds("two threads and two");
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1)]),
        (0, &[Send(1)]),
        (1, &[Receive, Receive]),
        (1, &[Receive]),
    ]);
    bounds.on_rings().holds("two threads and two, on rings");
}

#[test]
fn both_directions() {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Receive, Send(1), Receive]),
        (1, &[Poll, Receive, Send(1), Poll, Receive, Send(1)]),
    ]);
    bounds.holds("both directions");
}

#[test]
fn a_full_ring() {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(4), SendNow(2)]),
        (1, &[Receive, Receive, Receive, ReceiveNow]),
    ]);
    bounds.holds("a full ring");
}

#[test]
fn a_sender_ends() {
    let ends: [&[Op]; 4] = [
        &[Send(1), Send(1), ShutWrite],
        &[Send(1), Send(1), Close],
        &[Send(1), Send(1), Exit],
        &[Send(1), Send(1), Kill],
    ];
    for end in ends {
        let bounds = Bounds::threads(&[(0, end), (1, &[Receive, Receive, ReceiveNow, Receive])]);
        bounds.holds(&format!("the sender's {:?}", end[2]));
    }
}

#[test]
fn another_thread_ends_the_sending() {
    for end in [&[ShutWrite], &[Exit], &[Kill]] {
        another_ends(end).holds(&format!("{end:?} by another thread"));
    }
}

fn another_ends(end: &'static [Op]) -> Bounds {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1)]),
        (0, end),
        (1, &[Receive, Receive, Receive]),
    ]);
    bounds.on_rings()
}

#[test]
fn a_receiver_ends() {
    let ends: [&[Op]; 3] = [
        &[Receive, Receive, Close],
        &[Receive, Receive, Exit],
        &[Receive, Receive, Kill],
    ];
    for end in ends {
        let bounds = Bounds::threads(&[(0, &[Send(1), Send(2), Send(1)]), (1, end)]);
        bounds.holds(&format!("the receiver's {:?}", end[2]));
    }
}

#[test]
fn readiness() {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1), Send(1), ShutWrite]),
        (1, &[Poll, Receive, PollNow, ReceiveNow, Poll, Receive]),
    ]);
    bounds.holds("readiness");
}

fn polled(why: &'static [Op]) -> Bounds {
    Bounds::threads(&[(0, why), (1, &[Poll, Receive, PollNow, Poll, Receive])]).on_rings()
}

#[test]
fn readiness_of_one_that_goes_back() {
    polled(&[Send(1), Back(Reason::Option), Send(1)]).holds("readiness, back");
    polled(&[Send(1), Back(Reason::Stdio), Send(1)]).holds("readiness, out of sight");
}

fn child_sends(child: &'static [Op]) -> Bounds {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Fork, Send(1)]),
        (1, &[Receive, Receive, Receive]),
        (2, child),
    ]);
    bounds.with_child_of(0)
}

#[test]
fn a_forked_child_sends() {
    child_sends(&[Send(1), Close]).holds("a child that sends and closes");
    child_sends(&[Send(1), Exit]).holds("a child that sends and exits");
    child_sends(&[Send(1), Kill]).holds("a child that sends and is killed");
    child_sends(&[Back(Reason::Exec), Send(1), Exit]).holds("a child that executes");
}

fn child_receives(child: &'static [Op]) -> Bounds {
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1), Send(1)]),
        (1, &[Receive, Fork, Receive]),
        (2, child),
    ]);
    bounds.with_child_of(1)
}

#[test]
fn a_forked_child_receives() {
    child_receives(&[Receive, Close]).holds("a child that receives and closes");
    child_receives(&[Receive, Exit]).holds("a child that receives and exits");
    child_receives(&[Receive, Kill]).holds("a child that receives and is killed");
    child_receives(&[Back(Reason::Exec), Receive, Exit]).holds("a child that executes");
}

const BACK: [Reason; 3] = [Reason::Passed, Reason::ShutRead, Reason::Option];

fn sender_goes_back(why: Reason) -> Bounds {
    let ops: &'static [Op] = match why {
        Reason::ShutRead => &[Send(1), Back(Reason::ShutRead), Send(1)],
        Reason::Option => &[Send(1), Back(Reason::Option), Send(1)],
        _ => &[Send(1), Back(Reason::Passed), Send(1)],
    };
    Bounds::threads(&[(0, ops), (0, &[Send(1)]), (1, &[Receive, Receive, Receive])])
}

#[test]
fn a_sender_goes_back() {
    for why in BACK {
        let bounds = sender_goes_back(why);
        bounds
            .clone()
            .on_rings()
            .holds(&format!("a sender goes back, {why:?}"));
    }
    sender_goes_back(Reason::Passed).holds("a sender goes back, not over yet");
}

fn receiver_goes_back(why: Reason) -> Bounds {
    let ops: &'static [Op] = match why {
        Reason::ShutRead => &[Receive, Back(Reason::ShutRead), Receive],
        Reason::Option => &[Receive, Back(Reason::Option), Receive],
        _ => &[Receive, Back(Reason::Passed), Receive],
    };
    Bounds::threads(&[(0, &[Send(1), Send(2)]), (1, ops), (1, &[Receive])])
}

#[test]
fn a_receiver_goes_back() {
    for why in BACK {
        let bounds = receiver_goes_back(why);
        bounds
            .clone()
            .on_rings()
            .holds(&format!("a receiver goes back, {why:?}"));
    }
    receiver_goes_back(Reason::Passed).holds("a receiver goes back, not over yet");
}

/// As many bytes are read as the sender has counted, and not the same ones.
fn unseen_between() -> Bounds {
    Bounds::threads(&[
        (0, &[Send(1), SendUnseen, Send(1), Send(1)]),
        (1, &[Receive, Receive, Receive, Receive]),
    ])
}

fn unseen_send() -> Bounds {
    Bounds::threads(&[
        (0, &[Send(1), SendUnseen]),
        (0, &[Send(1)]),
        (1, &[Receive, Receive, Receive]),
    ])
}

#[test]
fn calls_that_are_not_seen() {
    unseen_send().holds("an unseen send");
    unseen_between().holds("an unseen send between others");
    let bounds = Bounds::threads(&[
        (0, &[Send(1), Send(1), Send(1)]),
        (1, &[Receive, Receive]),
        (1, &[ReceiveUnseen]),
    ]);
    bounds.holds("an unseen receive");
}

fn simple() -> Bounds {
    Bounds::threads(&[
        (0, &[Send(1), Send(1), Send(1)]),
        (1, &[Receive, Receive, Receive]),
        (1, &[Receive]),
    ])
}

#[test]
fn each_rule_is_needed() {
    let passes_on = receiver_goes_back(Reason::Passed).on_rings();
    let both_go_back = Bounds::threads(&[
        (0, &[Send(1), Back(Reason::ShutRead), Send(1)]),
        (1, &[Back(Reason::Passed)]),
        (1, &[Receive, Receive]),
    ]);
    let closes_before = Bounds::threads(&[
        (0, &[Send(1), Send(1), Close]),
        (1, &[Back(Reason::Passed), Receive, Receive, Receive]),
    ]);
    let goes_back = Bounds::threads(&[
        (0, &[Back(Reason::ShutRead), Send(1)]),
        (1, &[Receive, Receive]),
    ]);
    let out_of_sight = Bounds::threads(&[
        (0, &[Back(Reason::Passed), Send(1)]),
        (1, &[Receive, Receive]),
    ]);
    let at_the_end = Bounds::threads(&[(0, &[Send(1), ShutWrite]), (1, &[ReceiveNow, ReceiveNow])]);
    let cases = [
        (Rule::MarkFirst, simple(), BOTH_WAIT),
        (Rule::NobodyWaits, simple(), BOTH_WAIT),
        (Rule::LookAfterAsking, simple(), BOTH_WAIT),
        (Rule::ReceiversCount, unseen_between(), ORDER),
        (Rule::IsAlone, child_receives(&[Receive]), BOTH_WAIT),
        (Rule::Hold, passes_on.clone(), ORDER),
        (Rule::Quiet, passes_on, ORDER),
        (Rule::ReceiversWaitForGiver, both_go_back.on_rings(), ORDER),
        (Rule::ResetUnread, closes_before.on_rings(), LOST),
        (Rule::RingAtClose, out_of_sight.on_rings(), BOTH_WAIT),
        (Rule::RingAfterSend, goes_back.clone().on_rings(), BOTH_WAIT),
        (Rule::CloseBeforeTcp, goes_back.on_rings(), NO_CAUSE),
        (Rule::ShutUnderLock, another_ends(&[ShutWrite]), LOST),
        (Rule::LookAfterEnd, at_the_end.on_rings(), LOST),
        (
            Rule::PollLeavesClosedRing,
            polled(&[Back(Reason::Passed), Send(1)]),
            PROMISE,
        ),
    ];
    for (rule, bounds, fault) in cases {
        bounds.fails(rule, fault);
    }
}
