//! The suite `weft bench verbs`: thesis figs. 3.19-3.22 and 4.3-4.11, table 4.1.

mod figures;
mod goals;
pub mod memory;
mod peers;
pub(crate) mod register;
mod rnic;
pub(crate) mod setup;
mod view;

use crate::args::{CommonArgs, Figure, Poll, Switch, VerbsArgs, VerbsOp};
use crate::children::Load;
use crate::driver::{
    Context, Kind, Memory, Op, Scheme, Spec, Stack, Transport, choose_device, device_environment,
    outside,
};
use crate::error::{BenchError, Result};
use crate::output::{KEPT, cannot_write};
use crate::process::Peer;
use crate::progress::Progress;
use crate::record::Record;
use crate::report::Section;
use crate::scenario::{Contender, Effort, Group, run_alone, run_group, window};
use crate::size::{Sizes, sizes};
use crate::usage;
use clap::ValueEnum;
use std::process::ExitCode;
use std::time::Duration;

const SIZES: &str = "1..64M*4";
const QUICK_SIZES: &str = "64,4K,64K,1M,16M";
/// Latency matters for small messages; larger ones are measured on request only.
const LATENCY_SIZES: &str = "1..64K*4";
const QUICK_LATENCY_SIZES: &str = "64,4K";
const BUFFER_SIZES: &str = "4K..64M*4";
const QUICK_BUFFER_SIZES: &str = "4K,64K,1M";
/// The sizes for the comparison with other libraries.
const PEER_SIZES: &str = "8,64,512,4K,64K,256K,1M,4M,16M";
/// The message rate's size and how many are in flight.
const RATE_BYTES: u64 = 64;
const RATE_WINDOW: u32 = 128;

/// Runs the suite: prints tables, and writes what the options ask for.
pub fn run(args: &VerbsArgs) -> Result<ExitCode> {
    let mut args = with_device(with_tls(with_peers(args)));
    let (missing, mut notes) = outside::inventory(args.common.stacks());
    args.common.stack = args.common.stacks().to_vec();
    args.common.stack.retain(|stack| !missing.contains(stack));
    let args = &args;
    let common = &args.common;
    let mut records: Vec<Record> = crate::output::read(&args.from)?;
    let ops = if args.op.is_empty() && !records.is_empty() {
        Vec::new()
    } else {
        chosen(&args.op)
    };
    let mut output = common.output.open()?;
    output.lines(&records)?;
    if let Some(directory) = &common.svg {
        std::fs::create_dir_all(directory).map_err(|source| cannot_write(directory, source))?;
    }
    let effort = effort(common);
    let groups = groups(&ops, args);
    let extras: Vec<VerbsOp> = ops
        .iter()
        .copied()
        .filter(|op| matches!(op, VerbsOp::Register | VerbsOp::Setup | VerbsOp::Memory))
        .collect();
    if groups.is_empty() && extras.is_empty() && records.is_empty() {
        return Err(BenchError::Usage(
            "nothing to measure: the options leave no point".to_owned(),
        ));
    }
    let load = Load::start(args.load.loops, args.load.loops_nice)?;
    let earlier = !records.is_empty();
    let mut progress = Progress::new((groups.len() + extras.len()) as u64);
    let mut context = Context::default();
    let (name, device) = device_environment();
    let environment = [(name, device.as_str())];
    let mut peer = None;
    for group in &groups {
        let what = group.describe();
        progress.at(&what);
        let mut process = match peer.take() {
            Some(process) => process,
            None => Peer::spawn(&environment)?,
        };
        let result = run_group(&mut context, &mut process, group, &effort);
        // After a failure the states of the two sides may differ.
        if result.is_ok() {
            peer = Some(process);
        }
        let result = result.map(|outcome| {
            notes.extend(outcome.notes);
            outcome.records
        });
        records.extend(output.keep(&what, result)?);
        progress.step();
    }
    drop(peer);
    for op in extras {
        let what = match op {
            VerbsOp::Register => "registration",
            VerbsOp::Setup => "set-up",
            _ => "memory",
        };
        progress.at(what);
        let result = match op {
            VerbsOp::Register => register::measure(common),
            VerbsOp::Setup => setup::measure(&mut context, common),
            _ => memory::measure(common),
        };
        records.extend(output.keep(what, result)?);
        progress.step();
    }
    drop(progress);
    let origin = if earlier {
        KEPT.to_owned()
    } else {
        figures::origin(common, &load.text)
    };
    let report = figures::report(&records, origin, &notes);
    if let Some(directory) = &common.svg {
        for (name, plot) in report.plots() {
            let path = directory.join(format!("{name}.svg"));
            std::fs::write(&path, plot.to_svg()).map_err(|source| cannot_write(&path, source))?;
        }
    }
    output.finish(&report)
}

fn effort(common: &CommonArgs) -> Effort {
    Effort {
        runs: common.effort.runs(),
        target: Duration::from_secs_f64(common.effort.seconds()),
        bytes: common.bytes,
    }
}

/// Measures transfers and set-up for another suite, without output.
pub fn measured(args: &VerbsArgs) -> Result<(Vec<Record>, Vec<Section>)> {
    let common = &args.common;
    let effort = effort(common);
    let mut records = Vec::new();
    let mut notes = Vec::new();
    let mut context = Context::default();
    for group in groups(&args.op, args) {
        let outcome = run_alone(&mut context, &group, &effort)?;
        records.extend(outcome.records);
        notes.extend(outcome.notes);
    }
    if args.op.contains(&VerbsOp::Setup) {
        records.extend(setup::measure(&mut context, common)?);
    }
    let origin = figures::origin(common, &usage::load_average());
    let report = figures::report(&records, origin, &notes);
    Ok((records, report.sections))
}

fn chosen(ops: &[VerbsOp]) -> Vec<VerbsOp> {
    if ops.is_empty() {
        return vec![VerbsOp::Send, VerbsOp::Write, VerbsOp::Read, VerbsOp::Rate];
    }
    if ops.contains(&VerbsOp::All) {
        let all = VerbsOp::value_variants().iter().copied();
        return all.filter(|op| *op != VerbsOp::All).collect();
    }
    let mut unique = Vec::new();
    for op in ops {
        if !unique.contains(op) {
            unique.push(*op);
        }
    }
    unique
}

/// The options that `--peers` implies, where the given options do not differ.
fn with_peers(args: &VerbsArgs) -> VerbsArgs {
    let mut args = args.clone();
    if !args.peers {
        return args;
    }
    if args.op.is_empty() && args.from.is_empty() {
        args.op = vec![
            VerbsOp::Send,
            VerbsOp::Write,
            VerbsOp::WriteImm,
            VerbsOp::Rate,
        ];
    }
    let common = &mut args.common;
    if common.stack.is_empty() {
        common.stack = vec![
            Stack::Weft,
            Stack::Tcp,
            Stack::Memcpy,
            Stack::Vm,
            Stack::UcxPosix,
            Stack::UcxCma,
            Stack::UcxTcp,
            Stack::FiShm,
            Stack::FiTcp,
        ];
    }
    if common.effort.size.is_none() {
        common.effort.size = Some(Sizes(sizes(PEER_SIZES)));
    }
    if common.crc == Switch::Both {
        common.crc = Switch::Off;
    }
    if common.poll == Poll::Both {
        common.poll = Poll::Busy;
    }
    args
}

/// The options that `--tls` implies.
fn with_tls(mut args: VerbsArgs) -> VerbsArgs {
    if args.tls {
        let mut stacks = args.common.stacks().to_vec();
        for stack in [Stack::WeftTls, Stack::TcpTls] {
            if !stacks.contains(&stack) {
                stacks.push(stack);
            }
        }
        args.common.stack = stacks;
    }
    args
}

/// The options that `--device` implies, where the given options do not differ.
fn with_device(mut args: VerbsArgs) -> VerbsArgs {
    let Some(device) = &args.device else {
        return args;
    };
    choose_device(device.clone());
    if args.op.is_empty() && args.from.is_empty() {
        args.op = vec![VerbsOp::Send, VerbsOp::Write, VerbsOp::Read];
    }
    let common = &mut args.common;
    if common.stack.is_empty() {
        common.stack = vec![Stack::Device, Stack::PerftestDevice];
    }
    if common.crc == Switch::Both {
        common.crc = Switch::Off;
    }
    if common.poll == Poll::Both {
        common.poll = Poll::Busy;
    }
    args
}

/// All points that are streams or ping-pongs.
fn groups(ops: &[VerbsOp], args: &VerbsArgs) -> Vec<Group> {
    let (figures, common) = (&args.figure[..], &args.common);
    let mut groups = Vec::new();
    for op in ops {
        match op {
            VerbsOp::Send => transfer(&mut groups, Op::Send, figures, common),
            VerbsOp::Write => transfer(&mut groups, Op::Write, figures, common),
            // No other library has it: one point for itself.
            VerbsOp::WriteImm if args.peers => {
                ping_pong(&mut groups, Op::WriteImm, RATE_BYTES, common);
            }
            VerbsOp::WriteImm => transfer(&mut groups, Op::WriteImm, figures, common),
            VerbsOp::Read => transfer(&mut groups, Op::Read, figures, common),
            VerbsOp::FetchAdd => atomic(&mut groups, Op::FetchAdd, figures, common),
            VerbsOp::CompareSwap => atomic(&mut groups, Op::CompareSwap, figures, common),
            VerbsOp::Swap => atomic(&mut groups, Op::Swap, figures, common),
            VerbsOp::Rate => groups.push(Group {
                op: "rate",
                contenders: contenders(common, |mut spec| {
                    spec.op = Op::Send;
                    spec.bytes = RATE_BYTES;
                    spec.window = RATE_WINDOW;
                    spec
                }),
            }),
            VerbsOp::Iw => iw(&mut groups, common),
            VerbsOp::Buffers => buffers(&mut groups, common),
            VerbsOp::Register | VerbsOp::Setup | VerbsOp::Memory | VerbsOp::All => {}
        }
    }
    groups.retain(|group| !group.contenders.is_empty());
    groups
}

/// The chosen stacks with their variants, each made by `spec` from one with stack, transport and CRC set.
fn contenders(common: &CommonArgs, spec: impl Fn(Spec) -> Spec) -> Vec<Contender> {
    let mut contenders = Vec::new();
    let mut add = |base: Spec| {
        let spec = spec(base);
        // Ordinary memory differs from the library's own memory only if bytes are put straight into it.
        let chosen = spec.memory == Memory::Allocated
            || !common.memory.is_empty()
            || (spec.op == Op::Write && spec.kind == Kind::Stream);
        if chosen && spec.is_possible() {
            let ordinary = spec.memory == Memory::Ordinary;
            contenders.push(Contender {
                spec,
                case: ordinary.then_some(Memory::Ordinary.name()),
            });
        }
    };
    for &stack in common.stacks() {
        let base = Spec {
            stack,
            ..Spec::BASE
        };
        if !stack.is_weft() {
            add(base);
            continue;
        }
        for &transport in &common.transport {
            let local = transport == Transport::Local;
            let memory: &[Memory] = match (common.memory.as_slice(), local) {
                ([], true) => &[Memory::Allocated, Memory::Ordinary],
                ([], false) => &[Memory::Allocated],
                (chosen, _) => chosen,
            };
            // Shared memory has no FPDUs that a CRC could protect.
            let crc = if local { &[false] } else { common.crc.values() };
            for &memory in memory {
                for &crc in crc {
                    add(Spec {
                        transport,
                        memory,
                        crc,
                        ..base
                    });
                }
            }
        }
    }
    contenders
}

fn transfer(groups: &mut Vec<Group>, op: Op, figures: &[Figure], common: &CommonArgs) {
    if figures.contains(&Figure::Bandwidth) {
        for bytes in common.effort.sizes(SIZES, QUICK_SIZES) {
            stream(groups, op, bytes, common);
        }
    }
    if figures.contains(&Figure::Latency) {
        for bytes in common.effort.sizes(LATENCY_SIZES, QUICK_LATENCY_SIZES) {
            ping_pong(groups, op, bytes, common);
        }
    }
}

fn atomic(groups: &mut Vec<Group>, op: Op, figures: &[Figure], common: &CommonArgs) {
    if figures.contains(&Figure::Bandwidth) {
        stream(groups, op, 8, common);
    }
    if figures.contains(&Figure::Latency) {
        ping_pong(groups, op, 8, common);
    }
}

fn stream(groups: &mut Vec<Group>, op: Op, bytes: u64, common: &CommonArgs) {
    groups.push(Group {
        op: op.name(),
        contenders: contenders(common, |spec| Spec {
            op,
            bytes,
            window: window(op, bytes),
            ..spec
        }),
    });
}

fn ping_pong(groups: &mut Vec<Group>, op: Op, bytes: u64, common: &CommonArgs) {
    for &busy in common.poll.values() {
        // The target of a plain write is not woken, so there is no sleeping ping-pong of writes.
        if op == Op::Write && !busy {
            continue;
        }
        groups.push(Group {
            op: op.name(),
            contenders: contenders(common, |spec| Spec {
                op,
                kind: Kind::PingPong,
                bytes,
                busy,
                ..spec
            }),
        });
    }
}

/// Writes through the library and through the verbs below it.
fn iw(groups: &mut Vec<Group>, common: &CommonArgs) {
    for bytes in common.effort.sizes(SIZES, QUICK_SIZES) {
        let mut contenders = Vec::new();
        for &transport in &common.transport {
            for stack in [Stack::WeftIw, Stack::Weft] {
                let spec = Spec {
                    stack,
                    transport,
                    op: Op::Write,
                    bytes,
                    window: window(Op::Write, bytes),
                    one_by_one: true,
                    ..Spec::BASE
                };
                contenders.push(Contender { spec, case: None });
            }
        }
        groups.push(Group {
            op: "iw",
            contenders,
        });
    }
}

fn buffers(groups: &mut Vec<Group>, common: &CommonArgs) {
    for bytes in common.effort.sizes(BUFFER_SIZES, QUICK_BUFFER_SIZES) {
        let contender = |scheme: Scheme| Contender {
            spec: Spec {
                op: Op::Write,
                bytes,
                window: window(Op::Write, bytes).min(16),
                scheme,
                ..Spec::BASE
            },
            case: Some(scheme.name()),
        };
        groups.push(Group {
            op: "buffers",
            contenders: [Scheme::Reuse, Scheme::Reregister, Scheme::Copy]
                .map(contender)
                .into(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sizes_are_those_of_the_thesis() {
        let all = sizes(SIZES);
        assert_eq!((all.len(), all.last()), (14, Some(&(64 << 20))));
        assert_eq!(sizes(LATENCY_SIZES)[..], all[..9]);
        assert_eq!(sizes(BUFFER_SIZES)[..], all[6..]);
        for some in [QUICK_SIZES, QUICK_LATENCY_SIZES, QUICK_BUFFER_SIZES] {
            assert!(sizes(some).iter().all(|size| all.contains(size)));
        }
        assert_eq!(sizes(PEER_SIZES).len(), 9);
    }
}
