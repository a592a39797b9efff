//! `weft mpi` between hosts, which are network namespaces with host names of their own: Debian's Open MPI and MPICH, started over an agent in place of ssh, and
//! over a real sshd.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use weft_dropin::{Done, Weft, have, libraries, say};

const TOOLS: [(&str, &str); 3] = [
    ("ip", "iproute2"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
];
const OPEN_MPI: (&str, [(&str, &str); 2]) = (
    "openmpi",
    [
        ("mpirun.openmpi", "openmpi-bin"),
        ("mpicc.openmpi", "libopenmpi-dev"),
    ],
);
const MPICH: (&str, [(&str, &str); 2]) = (
    "mpich",
    [("mpirun.mpich", "mpich"), ("mpicc.mpich", "libmpich-dev")],
);

/// A program for one of the MPIs, and what surrounds it.
struct Job {
    /// With the program in it.
    folder: tempfile::TempDir,
    mpi: &'static str,
}

impl Job {
    /// `None`, and it is said why, where something is missing.
    fn new((mpi, needed): (&'static str, [(&str, &str); 2])) -> Option<Job> {
        if !have(&[&TOOLS[..], &needed[..]].concat()) {
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/dropin/mpi/verify.c");
        let output = Command::new(format!("mpicc.{mpi}"))
            .args(["-O2", "-o"])
            .args([&folder.path().join("verify"), &source])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        Some(Job { folder, mpi })
    }

    /// Runs a script in the first of so many hosts. `None` where there are no namespaces.
    fn run(&self, hosts: u32, script: &str) -> Option<Done> {
        let done = self.weft().start_words(&words(hosts, script)).end();
        let none = done.code() == 77 || done.text.contains("unshare failed");
        if none {
            say(&format!("skipped: no namespaces here: {}", done.show()));
        }
        (!none).then_some(done)
    }

    fn weft(&self) -> Weft {
        let weft = PathBuf::from(env!("CARGO_BIN_EXE_weft"));
        Weft::bare()
            .limit(Duration::from_mins(2))
            .env("WEFT", weft)
            .env("WEFT_VERBS_LIB", libraries())
            .env("MPIRUN", format!("mpirun.{}", self.mpi))
            .env("VERIFY", self.folder.path().join("verify"))
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
    }
}

fn words(hosts: u32, script: &str) -> Vec<&str> {
    const NUMBERS: [&str; 5] = ["0", "1", "2", "3", "4"];
    let mut words = vec!["unshare"];
    if !rustix::process::geteuid().is_root() {
        words.extend(["--user", "--map-root-user"]);
    }
    words.extend([
        "--net",
        "--uts",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "bash",
    ]);
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi_hosts.sh");
    words.extend([file, NUMBERS[hosts as usize], script]);
    words
}

/// All ranks had all data, and each host had one of them.
fn verified(done: &Done, hosts: u32, ranks: u32) {
    done.good()
        .says(&format!("all data as sent: {ranks} ranks"))
        .never_says("DATA DIFFERS");
    for host in 1..=hosts {
        done.says(&format!("a rank on node{host}\n"));
    }
}

/// The ranks' program says its host first.
const RANK: &str = r#"sh -c 'echo "a rank on $(uname -n)"; exec "$0" "$@"' $VERIFY"#;

#[test]
fn open_mpi_runs_over_all_transports() {
    let Some(job) = Job::new(OPEN_MPI) else {
        return;
    };
    for (transport, hosts, ranks) in [
        ("weft", 2, 4),
        ("rc", 2, 4),
        ("ud", 2, 2),
        ("tcp", 2, 2),
        ("weft", 4, 8),
        ("rc", 4, 4),
    ] {
        let script = format!(
            "$WEFT mpi --transport {transport} --hosts $HOSTS -- $MPIRUN --map-by node -np {ranks} {RANK} 65536 1"
        );
        let Some(done) = job.run(hosts, &script) else {
            return;
        };
        verified(&done, hosts, ranks);
    }
}

#[test]
fn mpich_runs_over_all_transports() {
    let Some(job) = Job::new(MPICH) else { return };
    for (transport, hosts, ranks) in [("rc", 2, 4), ("ud", 2, 2), ("tcp", 2, 2), ("rc", 4, 4)] {
        let script = format!(
            "$WEFT mpi --transport {transport} --hosts $HOSTS -- $MPIRUN -np {ranks} {RANK} 65536 1"
        );
        let Some(done) = job.run(hosts, &script) else {
            return;
        };
        verified(&done, hosts, ranks);
    }
    // MPICH passes nothing then, and weft its own.
    let script = format!(
        "$WEFT mpi --transport ud --hosts $HOSTS -- $MPIRUN -genvnone -genv VERIFY $VERIFY -np 2 {RANK} 4096 1"
    );
    if let Some(done) = job.run(2, &script) {
        verified(&done, 2, 2);
    }
}

/// Hosts with several addresses: the ranks take those of the network that is named, of IPv6 too (but for `rc`: libfabric's verbs provider).
#[test]
fn ranks_take_the_addresses_of_the_network_that_is_named() {
    let Some(job) = Job::new(OPEN_MPI) else {
        return;
    };
    // As the kernel's tables have the second host's address.
    for (transport, network, address) in [
        ("weft", "fd00:77::/64", "770000FD000000000000000002000000"),
        ("weft", "10.66.0.0/16", "0200420A"),
        ("rc", "10.66.0.0/16", "0200420A"),
    ] {
        let script = format!(
            "for i in 1 2; do on $i ip addr add 10.66.0.$i/24 dev eth0; done
            WEFT_FI_ADDR={network} $WEFT mpi --transport {transport} -- $MPIRUN --host $HOSTS -np 2 {RANK} 65536 5 &
            job=$!
            until on 2 cat /proc/net/udp /proc/net/tcp /proc/net/udp6 | grep -q ' {address}:'; do kill -0 $job && sleep 0.02; done
            echo the second rank has that address
            wait $job"
        );
        let Some(done) = job.run(2, &script) else {
            return;
        };
        verified(&done, 2, 2);
        done.says("the second rank has that address");
    }
}

#[test]
fn what_a_host_lacks_is_said_before_the_job_begins() {
    let Some(job) = Job::new(OPEN_MPI) else {
        return;
    };
    let begin = "$WEFT mpi --transport weft --hosts $HOSTS -- $MPIRUN -np 2 $VERIFY 4096 1 && exit 1; [[ $? == 125 ]]";
    for (lack, told) in [
        // The folders of weft and of its libraries are empty there.
        (
            "on 2 mount -t tmpfs none $(dirname $WEFT)",
            "there is no `weft`, neither in",
        ),
        (
            "on 2 mount -t tmpfs none $WEFT_VERBS_LIB",
            "there is no libibverbs.so.1 of weft in",
        ),
        (
            "printf '#!/bin/sh\\necho \"error: unexpected argument --there\" >&2; exit 2' >$DIR/old; chmod +x $DIR/old; on 2 mount --bind $DIR/old $WEFT",
            "its weft is another version than",
        ),
        (
            "rm $DIR/10.77.0.2",
            "cannot log in there: no host 10.77.0.2",
        ),
        (
            "on 2 ip rule add ipproto udp blackhole pref 1",
            "UDP does not reach 10.77.0.2, whose",
        ),
        (
            "on 2 ip rule add ipproto tcp blackhole pref 1",
            "TCP does not reach 10.77.0.2, whose",
        ),
        (
            "for i in 1 2; do on $i ip addr flush dev eth0; on $i ip addr add 10.66.0.9/24 dev eth0; done",
            "and so is that of 10.77.0.1",
        ),
        (
            "export WEFT_FI_ADDR=10.77.0.1",
            "WEFT_FI_ADDR=10.77.0.1 is the address of one host",
        ),
        (
            "export WEFT_FI_ADDR=10.1.0.0/16",
            "it has to be a network in which this host has an address",
        ),
    ] {
        let Some(done) = job.run(2, &format!("{lack}; {begin}")) else {
            return;
        };
        done.good().says(told).never_says("all data as sent");
    }
}

/// Without the check of `--hosts` it is the ranks that tell of a firewall.
#[test]
fn a_rank_tells_of_a_peer_that_never_answers() {
    let Some(job) = Job::new(OPEN_MPI) else {
        return;
    };
    let script = "on 2 ip rule add ipproto udp blackhole pref 1
        $WEFT mpi --transport weft -- $MPIRUN --host $HOSTS -np 2 $VERIFY 4096 1 2>&1 &
        wait";
    let mut running = job.weft().start_words(&words(2, script));
    while running.is_running()
        && !running
            .text()
            .contains("no packet has come from 10.77.0.2:")
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    let done = running.kill();
    if done.code() == 77 || done.text.contains("unshare failed") {
        say("skipped: no namespaces here");
        return;
    }
    done.says("no packet has come from 10.77.0.2:")
        .says("firewall");
}

/// Ctrl-C at mpirun ends the ranks of all hosts.
#[test]
fn an_interrupt_ends_the_ranks_of_all_hosts() {
    for mpi in [OPEN_MPI, MPICH] {
        let Some(job) = Job::new(mpi) else { return };
        let script = format!(
            "ranks() {{ for exe in /proc/[0-9]*/exe; do [[ $(readlink $exe) != $VERIFY ]] || echo rank; done; }}
            trap : INT
            bash -c 'trap - INT; exec \"$@\"' - $WEFT mpi --transport rc --hosts $HOSTS -- $MPIRUN -np 4 {RANK} 4096 1000000 &
            job=$!
            until [[ $(ranks | wc -l) == 4 ]]; do sleep 0.05; done
            echo all run
            kill -INT $job
            wait $job && exit 1
            while [[ -n $(ranks) ]]; do sleep 0.05; done
            echo no rank is left"
        );
        let Some(done) = job.run(2, &script) else {
            return;
        };
        done.good()
            .says("all run")
            .says("no rank is left")
            .never_says("all data as sent");
    }
}

/// A login by ssh has another environment than the user's shell.
#[test]
fn a_job_over_a_real_sshd() {
    if !rustix::process::geteuid().is_root() {
        say("skipped: an sshd of our own needs root");
        return;
    }
    if !have(&[
        ("/usr/sbin/sshd", "openssh-server"),
        ("ssh", "openssh-client"),
    ]) {
        return;
    }
    for mpi in [OPEN_MPI, MPICH] {
        let Some(job) = Job::new(mpi) else { return };
        let script = format!(
            r#"mkdir -p /run/sshd
            for key in host user; do ssh-keygen -q -t ed25519 -N '' -f $DIR/$key; done
            cp $DIR/user.pub $DIR/authorized; chmod 700 $DIR
            printf '%s\n' "HostKey $DIR/host" "AuthorizedKeysFile $DIR/authorized" 'PidFile none' 'StrictModes no' 'UsePAM no' 'PermitRootLogin prohibit-password' >$DIR/sshd
            on 2 /usr/sbin/sshd -D -e -f $DIR/sshd 2>$DIR/log &
            until grep -qs listening $DIR/log; do sleep 0.02; done
            printf '#!/bin/sh\nexec ssh -F none -i %s -o BatchMode=yes -o UserKnownHostsFile=%s -o StrictHostKeyChecking=accept-new "$@"\n' $DIR/user $DIR/known >$DIR/ssh
            chmod +x $DIR/ssh
            export OMPI_MCA_plm_rsh_agent=$DIR/ssh HYDRA_LAUNCHER_EXEC=$DIR/ssh WEFT_FI_RC=2 WEFT_LOG=error
            $WEFT mpi --transport rc --hosts $HOSTS -- $MPIRUN -np 2 {RANK} 65536 1
            grep 'Accepted publickey' $DIR/log"#
        );
        let Some(done) = job.run(2, &script) else {
            return;
        };
        verified(&done, 2, 2);
    }
}
