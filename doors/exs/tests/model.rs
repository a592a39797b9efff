//! Exhaustive search over small bounds for the safety theorem of the stream paper, and for progress. It searches the
//! production code: `World` holds two `Endpoint`s.
//!
//! `WEFT_MODEL_DEEP=1` searches further.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Instant;

use crate::world::{Call, Fault, Settings, World};
use stateright::{Checker, Model, Property};
use weft_exs::machine::{Design, Kind, Mode, OpId, RecvFlags, Rules};

/// The actions that the programs of both ends may take, in every order.
#[derive(Clone, Debug)]
struct Bounds {
    settings: Settings,
    /// Number of sends, receives, cancellations and shutdowns of each end.
    sends: [u8; 2],
    recvs: [u8; 2],
    cancels: [u8; 2],
    shutdowns: [u8; 2],
    send_lens: &'static [u64],
    recv_lens: &'static [u64],
    waitall: &'static [bool],
    in_place: bool,
    /// An idle pair must return to direct transfers.
    direct_when_idle: bool,
    /// The policy may also make sends wait instead of going indirect, at any time.
    policy: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    world: World,
    sends: [u8; 2],
    recvs: [u8; 2],
    cancels: [u8; 2],
    shutdowns: [u8; 2],
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Call(usize, Call),
    Deliver(usize),
    /// By the shortcut.
    Take(usize),
    Transferred(usize),
    /// With or without permission to go indirect.
    Poll(usize, bool),
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            settings: Settings::default(),
            sends: [2, 0],
            recvs: [0, 2],
            cancels: [0, 0],
            shutdowns: [0, 0],
            send_lens: &[1, 2],
            recv_lens: &[1, 2],
            waitall: &[false, true],
            in_place: false,
            direct_when_idle: true,
            policy: false,
        }
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            world: World::new(&self.settings),
            sends: self.sends,
            recvs: self.recvs,
            cancels: self.cancels,
            shutdowns: self.shutdowns,
            fault: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        if state.fault.is_some() {
            return;
        }
        for at in 0..2 {
            let end = &state.world.ends[at];
            if !state.world.wires[at].is_empty() {
                steps.push(Step::Deliver(at));
                // A fault of `taken_now` is reported when the step is made.
                if !matches!(state.world.taken_now(at), Ok(None)) {
                    steps.push(Step::Take(at));
                }
            }
            if !end.local.is_empty() {
                steps.push(Step::Transferred(at));
            }
            if end.machine.clone().poll(true).is_some() {
                steps.push(Step::Poll(at, true));
            }
            if self.policy
                && end.machine.wants_indirect().is_some()
                && end.machine.clone().poll(false).is_some()
            {
                steps.push(Step::Poll(at, false));
            }
            if !end.held.is_empty() {
                steps.push(Step::Call(at, Call::Recycle));
            }
            if state.sends[at] > 0 && !end.shut {
                for &len in self.send_lens {
                    steps.push(Step::Call(at, Call::Send(len)));
                    if end.machine.clone().send_now(len).is_some() {
                        steps.push(Step::Call(at, Call::SendNow(len)));
                    }
                }
            }
            if state.recvs[at] > 0 {
                for &len in self.recv_lens {
                    for &waitall in self.waitall {
                        let in_place = self.in_place;
                        if waitall && len == 1 && self.waitall.len() > 1 {
                            continue;
                        }
                        steps.push(Step::Call(
                            at,
                            Call::Recv(len, RecvFlags { waitall, in_place }),
                        ));
                    }
                }
            }
            if state.cancels[at] > 0 {
                let ops: BTreeSet<OpId> = end
                    .sends
                    .iter()
                    .map(|s| s.op)
                    .chain(end.recvs.iter().map(|r| r.op))
                    .collect();
                steps.extend(ops.into_iter().map(|op| Step::Call(at, Call::Cancel(op))));
            }
            if state.shutdowns[at] > 0 {
                steps.push(Step::Call(at, Call::Shutdown));
            }
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        let verdict = match step {
            Step::Deliver(at) => state.world.deliver(at),
            Step::Take(at) => state.world.take(at),
            Step::Transferred(at) => state.world.transferred(at),
            Step::Poll(at, may) => state.world.poll(at, may).map(drop),
            Step::Call(at, call) => {
                match call {
                    Call::Send(_) | Call::SendNow(_) => state.sends[at] -= 1,
                    Call::Recv(..) => state.recvs[at] -= 1,
                    Call::Cancel(_) => state.cancels[at] -= 1,
                    Call::Shutdown => state.shutdowns[at] -= 1,
                    Call::Recycle => {}
                }
                state.world.call(at, call)
            }
        };
        state.fault = verdict.err().or_else(|| self.judge(&state.world));
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("theorem", |_, state: &State| {
            state.fault.is_none()
        })]
    }
}

impl Bounds {
    /// The conditions in a state where nothing moves without the programs.
    fn judge(&self, world: &World) -> Option<Fault> {
        let advertised = self.policy
            && self.settings.small == [0; 2]
            && self.settings.mode != Mode::Indirect
            && self.settings.kind == Kind::Stream;
        if advertised && world.waits_in_vain() {
            return Some("a send that may not go indirect waits for an advert in vain");
        }
        if !world.knows_when_still() {
            return Some("an end says that it has nothing to do, and has");
        }
        if !world.is_quiet() {
            return None;
        }
        if let Some(fault) = world.stuck() {
            return Some(fault);
        }
        if self.direct_when_idle && world.is_idle() {
            let len = u64::from(self.settings.small[0]) + 1;
            return world
                .returns_to_direct(0, len)
                .and(world.returns_to_direct(1, len))
                .err();
        }
        None
    }

    /// Searches every state, and fails with the shortest path to a fault.
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
        if let Some(path) = checker.discovery("theorem") {
            panic!("{name}: {}", bounds.tell(path.into_actions()));
        }
        assert!(checker.is_done() && checker.unique_state_count() > 100);
    }

    /// Finds the shortest path to a fault; fails if there is none.
    fn fails(self, name: &str) -> Fault {
        let bounds = self.clone();
        let checker = self.checker().spawn_bfs().join();
        let path = checker.discovery("theorem");
        let path = path.unwrap_or_else(|| {
            panic!(
                "{name}: {} states and no counterexample",
                checker.unique_state_count()
            )
        });
        let steps = path.into_actions();
        let fault = bounds.run(&steps);
        println!(
            "{name}: {fault}, after {} steps\n{}",
            steps.len(),
            bounds.tell(steps)
        );
        fault
    }

    fn run(&self, steps: &[Step]) -> Fault {
        let mut state = self.init_states().remove(0);
        for &step in steps {
            state = self.next_state(&state, step).expect("a step");
        }
        state.fault.expect("a fault")
    }

    /// The steps, with the effect of each.
    fn tell(&self, steps: Vec<Step>) -> String {
        let mut state = self.init_states().remove(0);
        let mut text = String::new();
        for step in steps {
            let before = state.clone();
            state = self.next_state(&state, step).expect("a step");
            let what = match step {
                Step::Call(at, call) => format!("{} calls {call:?}", ["A", "B"][at]),
                Step::Deliver(at) => {
                    format!("{} gets {:?}", ["A", "B"][at], before.world.wires[at][0])
                }
                Step::Take(at) => {
                    format!("{} takes {:?}", ["A", "B"][at], before.world.wires[at][0])
                }
                Step::Transferred(at) => format!("{} sees a completion", ["A", "B"][at]),
                Step::Poll(at, may) => {
                    let action = before.world.ends[at].machine.clone().poll(may);
                    format!("{} does {action:?}", ["A", "B"][at])
                }
            };
            writeln!(text, "  {what}").expect("memory");
        }
        text + &format!("  => {:?}", state.fault)
    }
}

fn deep() -> bool {
    std::env::var_os("WEFT_MODEL_DEEP").is_some()
}

const STREAM: &str = "stream";

fn settings(credits: u32, small: u32, ring: u32) -> Settings {
    Settings {
        credits: [credits; 2],
        small: [small; 2],
        ring: [ring; 2],
        ..Settings::default()
    }
}

#[test]
fn a_stream_one_way() {
    let mut choices = vec![(3, 0, 1), (3, 0, 2), (4, 1, 2), (4, 0, 3), (5, 1, 0)];
    if deep() {
        choices = vec![];
        for credits in 3..=6 {
            for small in 0..=2 {
                choices.extend((0..=4).map(|ring| (credits, small, ring)));
            }
        }
    }
    for (credits, small, ring) in choices {
        let bounds = Bounds {
            settings: settings(credits, small, ring),
            ..Bounds::default()
        };
        bounds.holds(&format!(
            "{STREAM}, {credits} credits, small {small}, ring {ring}"
        ));
    }
}

#[test]
fn more_receives_than_sends_and_more_sends_than_receives() {
    for (sends, recvs) in [(1, 3), (3, 1), (2, 3)] {
        let bounds = Bounds {
            settings: settings(4, 0, 3),
            sends: [sends, 0],
            recvs: [0, recvs],
            waitall: &[false],
            ..Bounds::default()
        };
        bounds.holds(&format!("{STREAM}, {sends} sends, {recvs} receives"));
    }
    if deep() {
        for (sends, recvs, waitall) in [
            (3, 3, &[false, true][..]),
            (2, 4, &[false]),
            (4, 3, &[false]),
            (3, 4, &[false]),
        ] {
            let bounds = Bounds {
                settings: settings(4, 0, 3),
                sends: [sends, 0],
                recvs: [0, recvs],
                waitall,
                ..Bounds::default()
            };
            bounds.holds(&format!(
                "{STREAM}, {sends} sends, {recvs} receives, waitall {waitall:?}"
            ));
        }
    }
}

#[test]
fn a_stream_both_ways() {
    let bounds = Bounds {
        settings: settings(3, 1, 2),
        sends: [1, 1],
        recvs: [1, 1],
        ..Bounds::default()
    };
    bounds.holds("stream, both ways, 3 credits");
    if deep() {
        for credits in [3, 4] {
            let bounds = Bounds {
                settings: settings(credits, 1, 2),
                sends: [2, 1],
                recvs: [1, 2],
                waitall: &[false],
                ..Bounds::default()
            };
            bounds.holds(&format!(
                "stream, 2 sends and 1 the other way, {credits} credits"
            ));
        }
    }
}

#[test]
fn a_sender_that_waits_gets_an_advert() {
    let bounds = Bounds {
        settings: settings(3, 0, 2),
        policy: true,
        ..Bounds::default()
    };
    bounds.holds("stream, leave to go indirect now and then");
    let bounds = Bounds {
        settings: settings(3, 0, 2),
        policy: true,
        sends: [1, 1],
        recvs: [1, 1],
        waitall: &[false],
        ..Bounds::default()
    };
    bounds.holds("stream, both ways, leave to go indirect now and then");
}

#[test]
fn a_stream_with_cancellations_and_the_end() {
    let mut all = vec![
        ([2, 0], [0, 2], [0, 1], [0, 0]),
        ([1, 0], [0, 2], [0, 1], [1, 0]),
        ([2, 0], [0, 1], [1, 1], [0, 0]),
        ([2, 0], [0, 1], [1, 0], [1, 0]),
    ];
    if deep() {
        all.push(([2, 0], [0, 2], [1, 1], [1, 0]));
        all.push(([1, 0], [0, 3], [0, 2], [1, 0]));
        all.push(([1, 1], [1, 1], [1, 1], [1, 1]));
    }
    for (sends, recvs, cancels, shutdowns) in all {
        let bounds = Bounds {
            settings: settings(3, 0, 2),
            sends,
            recvs,
            cancels,
            shutdowns,
            ..Bounds::default()
        };
        bounds.holds(&format!("stream, {sends:?} sends, {recvs:?} receives, {cancels:?} cancellations, {shutdowns:?} shutdowns"));
    }
}

#[test]
fn only_direct_and_only_indirect() {
    for mode in [Mode::Direct, Mode::Indirect] {
        for small in [0, 1] {
            let bounds = Bounds {
                settings: Settings {
                    mode,
                    ..settings(4, small, 2)
                },
                cancels: [0, 1],
                waitall: &[false],
                direct_when_idle: mode == Mode::Direct,
                ..Bounds::default()
            };
            bounds.holds(&format!("stream, {mode:?} only, small {small}"));
        }
    }
}

/// The policy of the paper under our rules.
#[test]
fn the_published_policy() {
    let published = |credits, small, ring| Settings {
        mode: Mode::Published,
        ..settings(credits, small, ring)
    };
    let one_way = [(3, 0, 1), (3, 0, 2), (4, 1, 2), (5, 1, 0)];
    let mut all: Vec<Bounds> = one_way
        .map(|(credits, small, ring)| Bounds {
            settings: published(credits, small, ring),
            ..Bounds::default()
        })
        .into();
    for (sends, recvs, cancels) in [
        ([2, 0], [0, 3], [0, 0]),
        ([1, 1], [1, 1], [0, 0]),
        ([2, 0], [0, 2], [0, 1]),
    ] {
        all.push(Bounds {
            settings: published(4, 0, 3),
            sends,
            recvs,
            cancels,
            waitall: &[false],
            ..Bounds::default()
        });
    }
    for bounds in all {
        let Settings {
            credits,
            small,
            ring,
            ..
        } = bounds.settings;
        let (sends, recvs) = (bounds.sends, bounds.recvs);
        bounds.holds(&format!(
            "published, {credits:?} credits, small {small:?}, ring {ring:?}, {sends:?} sends, {recvs:?} receives"
        ));
    }
}

#[test]
fn the_published_policy_waits_for_no_advert_and_adverts_each_receive() {
    let flags = RecvFlags {
        waitall: false,
        in_place: false,
    };
    for (mode, goes, adverts) in [(Mode::Published, true, 4), (Mode::Dynamic, false, 2)] {
        let mut world = World::new(&Settings {
            mode,
            ..settings(64, 1, 8)
        });
        // Two receives are advertised, and the sender is ahead of the adverts.
        for _ in 0..2 {
            world.call(1, Call::Recv(2, flags)).unwrap();
            assert!(world.poll(1, true).unwrap().is_some());
        }
        world.call(0, Call::Send(4)).unwrap();
        let mut sender = world.ends[0].machine.clone();
        assert_eq!(sender.poll(false).is_some(), goes, "{mode:?}");
        world.poll(0, true).unwrap();
        world.settle().unwrap();
        // No advert of that phase was used.
        let before = world.ends[1].machine.stats().adverts_sent;
        for _ in 0..3 {
            world.call(1, Call::Recv(2, flags)).unwrap();
        }
        world.call(1, Call::Recv(1, flags)).unwrap();
        world.settle().unwrap();
        let sent = world.ends[1].machine.stats().adverts_sent - before;
        assert_eq!(sent, adverts, "{mode:?}");
    }
}

#[test]
fn data_left_in_messages() {
    let bounds = Bounds {
        settings: settings(5, 2, 2),
        in_place: true,
        recv_lens: &[1, 2, 3],
        waitall: &[false],
        ..Bounds::default()
    };
    bounds.holds("stream, in place");
}

fn packets(design: Design) {
    let mut all = vec![
        (settings(4, 0, 0), [0, 0], [0, 0], false),
        (settings(5, 1, 0), [0, 0], [0, 0], true),
        (settings(4, 1, 0), [1, 1], [1, 0], false),
    ];
    if deep() {
        all.push((settings(6, 1, 0), [1, 1], [1, 0], true));
    }
    for (settings, cancels, shutdowns, in_place) in all {
        for (sends, recvs) in [([2, 0], [0, 2]), ([1, 1], [1, 1])] {
            if cancels != [0, 0] && sends == [1, 1] && (in_place || !deep()) {
                continue;
            }
            // Empty messages are not combined with cancellations.
            let lens: &[u64] = if cancels == [0, 0] || deep() {
                &[0, 1, 2]
            } else {
                &[1, 2]
            };
            let bounds = Bounds {
                settings: Settings {
                    kind: Kind::SeqPacket(design),
                    ..settings
                },
                sends,
                recvs,
                cancels,
                shutdowns,
                in_place,
                send_lens: lens,
                recv_lens: lens,
                waitall: &[false],
                direct_when_idle: true,
                policy: false,
            };
            bounds.holds(&format!(
                "{design:?} packets, {} credits, small {}, {sends:?} sends, {recvs:?} receives, {cancels:?} cancellations, {shutdowns:?} shutdowns",
                settings.credits[0], settings.small[0]
            ));
        }
    }
}

#[test]
fn messages_by_adverts() {
    packets(Design::Advert);
}

#[test]
fn messages_by_sources() {
    packets(Design::Source);
}

/// The stream with one rule changed, with bounds sufficient to show the purpose of that rule.
fn without(rules: Rules, small: u32, sends: u8, recvs: u8) -> Bounds {
    Bounds {
        settings: Settings {
            rules,
            ..settings(4, small, 3)
        },
        sends: [sends, 0],
        recvs: [0, recvs],
        waitall: &[false],
        ..Bounds::default()
    }
}

const MISPLACED: Fault = "an honest peer taken for a hostile one";
const NEVER_DIRECT: Fault = "an idle pair does not return to direct transfers";

#[test]
fn without_the_check_on_k_a_data_goes_to_the_wrong_receive() {
    let rules = Rules {
        check_k_a: false,
        ..Rules::default()
    };
    let bounds = Bounds {
        send_lens: &[1],
        recv_lens: &[1],
        ..without(rules, 0, 2, 3)
    };
    assert_eq!(bounds.fails("no k_a"), MISPLACED);
}

#[test]
fn without_the_check_on_k_b_data_goes_to_the_wrong_receive() {
    let rules = Rules {
        check_k_b: false,
        ..Rules::default()
    };
    assert_eq!(without(rules, 1, 2, 2).fails("no k_b"), MISPLACED);
}

#[test]
fn without_the_advance_of_the_phase_data_goes_to_the_wrong_receive() {
    let rules = Rules {
        advance_phase: false,
        ..Rules::default()
    };
    assert_eq!(without(rules, 0, 2, 3).fails("no advance"), MISPLACED);
}

#[test]
fn as_published_an_idle_pair_stays_indirect() {
    let rules = Rules {
        exact_match: false,
        resync_seq: false,
        retry: false,
        ..Rules::default()
    };
    assert_eq!(without(rules, 0, 2, 2).fails("as published"), NEVER_DIRECT);
    let rules = Rules {
        resync_seq: false,
        ..Rules::default()
    };
    assert_eq!(without(rules, 0, 2, 2).fails("no resync"), NEVER_DIRECT);
}

#[test]
fn without_a_look_at_what_is_before_them_the_short_ways_overtake() {
    let rules = Rules {
        send_in_turn: false,
        ..Rules::default()
    };
    let bounds = without(rules, 1, 2, 2);
    assert_eq!(bounds.fails("sends out of turn"), "sends out of order");
    let rules = Rules {
        take_in_turn: false,
        ..Rules::default()
    };
    let bounds = Bounds {
        settings: Settings {
            rules,
            ..settings(6, 1, 3)
        },
        ..without(rules, 1, 2, 2)
    };
    let fault = "bytes lost, doubled or out of order";
    assert_eq!(bounds.fails("messages out of turn"), fault);
}

/// The published rules can fail to return to direct transfers, but they lose no data.
#[test]
fn as_published_it_is_safe() {
    let published = Rules {
        exact_match: false,
        resync_seq: false,
        retry: false,
        ..Rules::default()
    };
    let bounds = Bounds {
        direct_when_idle: false,
        waitall: &[false, true],
        ..without(published, 0, 2, 2)
    };
    bounds.holds("as published");
    let resynchronised = Rules {
        resync_seq: true,
        ..published
    };
    let bounds = Bounds {
        waitall: &[false, true],
        ..without(resynchronised, 0, 2, 2)
    };
    bounds.holds("as published, but for S'_r");
}

#[test]
fn without_a_second_advert_a_sender_waits_in_vain() {
    let rules = Rules {
        retry: false,
        ..Rules::default()
    };
    let bounds = Bounds {
        policy: true,
        ..without(rules, 0, 2, 2)
    };
    assert_eq!(
        bounds.fails("no retry"),
        "a send that may not go indirect waits for an advert in vain"
    );
}

/// Line 3 of fig. 2 and the prose are equivalent: with the other rules in place no state distinguishes them.
#[test]
fn line_3_and_the_prose_say_the_same() {
    let rules = Rules {
        exact_match: false,
        ..Rules::default()
    };
    without(rules, 0, 2, 3).holds("line 3");
    let bounds = Bounds {
        cancels: [0, 1],
        waitall: if deep() { &[false, true] } else { &[false] },
        ..without(rules, 0, 2, 2)
    };
    bounds.holds("line 3, with a cancellation");
}
