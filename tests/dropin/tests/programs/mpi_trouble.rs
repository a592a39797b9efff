//! MPI on weft's provider under failures: of the network, of a rank, and at the limits of the host. The kernels of `./x papers mpi` compare their results with
//! the published ones.

use std::collections::BTreeSet;
use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use weft_dropin::{Weft, have};

use super::fabric::provider;
use super::mpi::{OPEN_MPI, compile, open_mpi};

const MPIRUN: &str = "mpirun.openmpi --oversubscribe --mca pml cm --mca mtl ofi \
                      --mca mtl_ofi_provider_include weft --mca btl ^openib,ofi";

/// The NAS kernels and the radix sort.
fn kernels(dir: &Path) -> String {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../papers/src/mpi/programs");
    let program = dir.join("kernels");
    let names = ["main", "ep", "is", "cg", "mg", "lu", "radix"];
    let output = Command::new("mpicc.openmpi")
        .args(["-O2", "-o"])
        .arg(&program)
        .args(names.map(|name| sources.join(name).with_extension("c")))
        .arg("-lm")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    program.display().to_string()
}

fn datagrams() -> Weft {
    open_mpi(provider())
        .env("WEFT_LOCAL", "off")
        .limit(Duration::from_mins(3))
}

fn verifies(weft: &Weft, ranks: u32, program: &str, kernel: &str) {
    let done = weft.run(&format!("{MPIRUN} -np {ranks} {program} {kernel} S"));
    done.good()
        .says(&format!("kernel {kernel} S {ranks} "))
        .says("verified")
        .never_says("WRONG");
}

/// Packets and parts of messages are lost, duplicated, and delayed. Messages of more than 512 bytes use RDMA Write-Record.
#[test]
fn kernels_verify_on_a_bad_network() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = kernels(dir.path());
    let weft = |lost: &str| {
        datagrams()
            .env("WEFT_FI_DROP", lost)
            .env("WEFT_FI_TWICE", "3")
            .env("WEFT_FI_LATE", "3")
    };
    for kernel in ["is", "radix", "mg"] {
        verifies(&weft("1"), 4, &program, kernel);
    }
    let large = weft("0.1").env("WEFT_FI_RENDEZVOUS", "512");
    verifies(&large, 2, &program, "is");
    verifies(&weft("5"), 2, &program, "radix");
}

/// The other ranks do not wait for it.
#[test]
fn a_rank_that_is_killed_ends_the_job() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "trouble.c", dir.path());
    for weft in [datagrams(), datagrams().env("WEFT_FI_RC", "4")] {
        let done = weft.run(&format!("{MPIRUN} -np 3 {program} kill"));
        assert!(!done.is_good(), "{}", done.show());
        // The status of timeout(1). (mpirun ends with 137 itself, for the rank.)
        assert!(done.code() != 124, "{}", done.show());
        done.says("signal 9").never_says("all data as sent");
    }
}

#[test]
fn ranks_may_fork() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = compile("mpicc.openmpi", "trouble.c", dir.path());
    for weft in [open_mpi(provider()), datagrams()] {
        let done = weft.run(&format!("{MPIRUN} -np 3 {program} fork"));
        done.good().says("all data as sent: 3 ranks");
    }
}

/// Few descriptors, so that connections fail; and no locked memory.
#[test]
fn low_limits_leave_the_datagrams() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = kernels(dir.path());
    let script = dir.path().join("limited");
    let text = format!("#!/bin/sh\nulimit -n 40 && ulimit -l 0 && exec {program} \"$@\"\n");
    fs::write(&script, text).unwrap();
    let mut mode = fs::metadata(&script).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    fs::set_permissions(&script, mode).unwrap();
    let script = script.display().to_string();
    verifies(&datagrams().env("WEFT_FI_RC", "8"), 4, &script, "is");
    verifies(&open_mpi(provider()), 4, &script, "radix");
}

/// The UDP ports of the processes that run a program.
fn ports_of(program: &str) -> BTreeSet<u16> {
    let mut inodes = BTreeSet::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let path = process.path();
        let runs =
            fs::read(path.join("cmdline")).is_ok_and(|line| line.starts_with(program.as_bytes()));
        let Some(files) = runs.then(|| fs::read_dir(path.join("fd")).ok()).flatten() else {
            continue;
        };
        for file in files.flatten() {
            let link = fs::read_link(file.path())
                .unwrap_or_default()
                .display()
                .to_string();
            let inode = link
                .strip_prefix("socket:[")
                .and_then(|rest| rest.strip_suffix(']'));
            inodes.extend(inode.map(str::to_owned));
        }
    }
    let table = fs::read_to_string("/proc/net/udp").unwrap();
    let sockets = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = words.get(1)?.split_once(':')?;
        inodes
            .contains(*words.get(9)?)
            .then(|| u16::from_str_radix(port, 16).ok())?
    });
    sockets.collect()
}

/// A process that can send to the ports cannot disturb the job: random bytes of all lengths, and valid packets with guessed keys.
#[test]
fn datagrams_of_strangers_change_nothing() {
    if !have(OPEN_MPI) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = kernels(dir.path());
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let mut random = 88_172_645_463_325_252u64;
            while !stop.load(Ordering::Relaxed) {
                for port in ports_of(&program) {
                    for _ in 0..50 {
                        let mut bytes = vec![0; (random % 1400) as usize];
                        for byte in &mut bytes {
                            random ^= random << 13;
                            random ^= random >> 7;
                            random ^= random << 17;
                            *byte = random as u8;
                        }
                        // Every other packet begins as weft's datagrams do.
                        if random & 1 == 0 {
                            let head = [b'W', if random & 2 == 0 { 0x10 } else { 0x20 }];
                            bytes
                                .iter_mut()
                                .zip(head)
                                .for_each(|(byte, head)| *byte = head);
                        }
                        random = random.wrapping_add(0x9e37_79b9) | 1;
                        sent.fetch_add(
                            u64::from(socket.send_to(&bytes, ("127.0.0.1", port)).is_ok()),
                            Ordering::Relaxed,
                        );
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let result = std::panic::catch_unwind(|| verifies(&datagrams(), 2, &program, "ep"));
        let other = std::panic::catch_unwind(|| verifies(&datagrams(), 4, &program, "is"));
        stop.store(true, Ordering::Relaxed);
        for result in [result, other] {
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    assert!(sent.load(Ordering::Relaxed) > 1000, "nothing was sent");
}
