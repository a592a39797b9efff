//! The table of programs in docs/verbs-reference.md, which the tests write. A program that a test has seen do its work must have a mark there for the device and the
//! carrier, or the test fails. With `WEFT_BLESS=1` the tests set the marks instead. To make the table anew, remove the marks first.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- programs: begin -->\n";
const END: &str = "<!-- programs: end -->";
const HEAD: &str = "| package | program | with | `weft0` | `weft_ib0` |\n|---|---|---|---|---|\n";
const DEVICES: [&str; 2] = ["weft0", "weft_ib0"];

/// A program, its package, and the tested work.
struct Program {
    package: &'static str,
    name: &'static str,
    with: &'static str,
    /// Set for a program that only reads devices, namely these, and uses no carrier.
    looks: Option<&'static [&'static str]>,
}

const fn talks(package: &'static str, name: &'static str, with: &'static str) -> Program {
    Program {
        package,
        name,
        with,
        looks: None,
    }
}

const fn looks(package: &'static str, name: &'static str, with: &'static str) -> Program {
    Program {
        package,
        name,
        with,
        looks: Some(&DEVICES),
    }
}

const PERFTEST: &str = "`-R` on `weft0`; `-a`, `-b`, `-q`, `-e`, `-I`, `-l`, `--use-srq`, `-c UC`, `-c UD`, `-c XRC`, `-z`";

#[rustfmt::skip]
const PROGRAMS: &[Program] = &[
    looks("ibverbs-utils", "ibv_devices", ""),
    looks("ibverbs-utils", "ibv_devinfo", "`-v`"),
    talks("ibverbs-utils", "ibv_rc_pingpong", "polling, events, `ibv_wr_*`, time stamps, long messages"),
    talks("ibverbs-utils", "ibv_srq_pingpong", "polling, events"),
    talks("ibverbs-utils", "ibv_xsrq_pingpong", "polling, events, two clients"),
    talks("ibverbs-utils", "ibv_uc_pingpong", ""),
    talks("ibverbs-utils", "ibv_ud_pingpong", "polling, events, the longest datagrams"),
    talks("rdmacm-utils", "rping", "both roles, IPv6, a persistent server; `-q` on `weft_ib0`"),
    talks("rdmacm-utils", "ucmatose", "also `-m`"),
    talks("rdmacm-utils", "rdma_client", "and `rdma_server`"),
    talks("rdmacm-utils", "rdma_xclient", "and `rdma_xserver`; `-c x` (XRC) on `weft_ib0`"),
    talks("rdmacm-utils", "cmtime", ""),
    talks("rdmacm-utils", "udaddy", ""),
    talks("rdmacm-utils", "mckey", "`-l`, `-M`; between two network namespaces, over IPv6 there"),
    talks("rdmacm-utils", "rcopy", "rsockets"),
    talks("rdmacm-utils", "rstream", "rsockets, blocking or not, IPv6"),
    talks("rdmacm-utils", "riostream", "rsockets with `riowrite`"),
    talks("rdmacm-utils", "udpong", "datagram rsockets, IPv6"),
    talks("perftest", "ib_send_bw", PERFTEST),
    talks("perftest", "ib_send_lat", "the same"),
    talks("perftest", "ib_write_bw", "the same"),
    talks("perftest", "ib_write_lat", "the same"),
    talks("perftest", "ib_read_bw", "the same"),
    talks("perftest", "ib_read_lat", "the same"),
    talks("perftest", "ib_atomic_bw", "the same"),
    talks("perftest", "ib_atomic_lat", "the same"),
    talks("qperf", "qperf", "`-cm 1`, without which it joins queue pairs by LID, which RoCE devices do not have: `rc_*`, `ver_rc_*`"),
    looks("libfabric-bin", "fi_info", ""),
    talks("libfabric-bin", "fi_pingpong", "`-p verbs -e msg`"),
    talks("openmpi-bin", "mpirun.openmpi", "over libfabric: `verbs;ofi_rxm` on `weft0`; `verbs;ofi_rxd`, datagrams alone, on `weft_ib0`; over UCX on `weft_ib0` with `--wire roce`"),
    talks("mpich", "mpirun.mpich", "over UCX: `rc_verbs,ud_verbs`; `ud_verbs`, datagrams alone"),
    talks("ucx-utils", "ucx_perftest", "tags, streams, active messages, put, get, atomics over `rc_verbs,ud_verbs`; either alone"),
    talks("fio", "fio", "engine `rdma`: write, read; send on `weft_ib0`"),
    looks("nvme-cli", "nvme", "`connect -t rdma` says that there is no driver of the kernel"),
    looks("open-iscsi", "iscsiadm", "`-I iser` says that there is no driver of the kernel"),
    Program { looks: Some(&["weft_ib0"]), ..looks("infiniband-diags", "ibstat", "leaves iWARP out") },
    looks("infiniband-diags", "ibstatus", ""),
    looks("busybox-static", "busybox", "`ls`, `cat`, `readlink` with `--sysfs=namespace`"),
];

/// The places where a program did its work: each device without a network, and over one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Marks([[bool; 2]; 2]);

impl Marks {
    fn join(&mut self, other: Marks) {
        for (ours, others) in self.0.iter_mut().zip(other.0) {
            ours[0] |= others[0];
            ours[1] |= others[1];
        }
    }

    fn cell(device: [bool; 2], looks: bool) -> &'static str {
        match device {
            [false, false] => "",
            _ if looks => "yes",
            [true, false] => "shared memory",
            [false, true] => "network",
            [true, true] => "both",
        }
    }

    fn read(cell: &str) -> [bool; 2] {
        match cell.trim() {
            "yes" | "shared memory" => [true, false],
            "network" => [false, true],
            "both" => [true, true],
            _ => [false; 2],
        }
    }
}

/// A program in the table, and the place of this run.
#[derive(Clone, Debug)]
pub(crate) struct Ran {
    program: usize,
    marks: Marks,
}

impl Ran {
    /// The program of a command line, if it is in the table and the device is certain.
    pub(crate) fn of(words: &[&str], env: &dyn Fn(&str) -> Option<String>) -> Option<Ran> {
        let base = |word: &str| word.rsplit('/').next().unwrap_or(word).to_owned();
        let program = words
            .iter()
            .find_map(|word| PROGRAMS.iter().position(|p| p.name == base(word)))?;
        let listed = env("WEFT_DEVICES").unwrap_or_else(|| DEVICES.join(","));
        let listed: Vec<&str> = listed.split(',').collect();
        let ucx = env("UCX_NET_DEVICES").unwrap_or_default();
        let named = |device: &str| {
            let is = |word: &str| word == device || word.strip_prefix(device) == Some(":1");
            is(&ucx) || words.iter().any(|word| is(word))
        };
        let used: Vec<&str> = match listed.iter().filter(|d| named(d)).collect::<Vec<_>>()[..] {
            [one] => vec![*one],
            _ => match PROGRAMS[program].looks {
                Some(devices) => devices.to_vec(),
                None if listed.len() == 1 => listed.clone(),
                None => return None,
            },
        };
        let set = |name: &str, value: &str| env(name).is_some_and(|is| is == value);
        let network = set("WEFT_LOCAL", "off") || set("WEFT_IB_WIRE", "roce");
        let mut marks = Marks::default();
        for (at, device) in DEVICES.iter().enumerate() {
            if used.contains(device) && listed.contains(device) {
                let carrier = usize::from(network && PROGRAMS[program].looks.is_none());
                marks.0[at][carrier] = true;
            }
        }
        Some(Ran { program, marks })
    }

    /// Checks that the table marks the program's work as done, or sets the mark.
    ///
    /// # Panics
    /// When the mark is missing.
    #[track_caller]
    pub(crate) fn note(&self) {
        let table = Table::read();
        let mut now = table.marks[self.program];
        now.join(self.marks);
        if now == table.marks[self.program] {
            return;
        }
        let name = PROGRAMS[self.program].name;
        assert!(
            blesses(),
            "docs/verbs-reference.md does not say that {name} works on {:?} (WEFT_BLESS=1 writes it)",
            self.marks
        );
        let _lock = lock();
        let mut table = Table::read();
        table.marks[self.program].join(self.marks);
        table.write();
    }
}

fn blesses() -> bool {
    std::env::var_os("WEFT_BLESS").is_some()
}

fn document() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verbs-reference.md")
}

/// Tests run side by side, also in several processes: only one writes at a time.
fn lock() -> File {
    let folder = document();
    let file = File::open(folder.parent().expect("docs")).expect("docs");
    file.lock().expect("a file system with locks");
    file
}

struct Table {
    before: String,
    marks: Vec<Marks>,
    after: String,
    /// The table as generated, for the test that it was not edited by hand.
    #[cfg(test)]
    text: String,
}

impl Table {
    fn read() -> Table {
        let text = fs::read_to_string(document()).expect("docs/verbs-reference.md");
        let (before, rest) = text.split_once(BEGIN).expect("the table of programs");
        let (old, after) = rest.split_once(END).expect("its end");
        let marks = |program: &Program| {
            let start = format!("| {} | `{}` |", program.package, program.name);
            let row = old.lines().find(|line| line.starts_with(&start));
            let cells: Vec<&str> = row.unwrap_or_default().split('|').collect();
            match cells[..] {
                [.., one, two, _] if cells.len() == 7 => {
                    Marks([Marks::read(one), Marks::read(two)])
                }
                _ => Marks::default(),
            }
        };
        Table {
            marks: PROGRAMS.iter().map(marks).collect(),
            before: before.to_owned(),
            after: after.to_owned(),
            #[cfg(test)]
            text: old.to_owned(),
        }
    }

    fn show(&self) -> String {
        let mut text = HEAD.to_owned();
        for (program, marks) in PROGRAMS.iter().zip(&self.marks) {
            let Program {
                package,
                name,
                with,
                looks,
            } = program;
            let cells = marks.0.map(|device| Marks::cell(device, looks.is_some()));
            let row = format!("| {package} | `{name}` | {with} | {} |", cells.join(" | "));
            let _ = writeln!(text, "{}", row.replace("  ", " "));
        }
        text
    }

    fn write(&self) {
        let text = format!("{}{BEGIN}{}{END}{}", self.before, self.show(), self.after);
        // In one rename: other tests read it without the lock.
        let new = document().with_extension("new");
        fs::write(&new, text).expect("docs can be written to");
        fs::rename(new, document()).expect("docs can be written to");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_line_runs_is_known() {
        let none = |_: &str| None;
        let on = |devices: &'static str, local: Option<&'static str>| {
            move |name: &str| match name {
                "WEFT_DEVICES" => Some(devices.to_owned()),
                "WEFT_LOCAL" => local.map(str::to_owned),
                _ => None,
            }
        };
        let marks = |line: &str, env: &dyn Fn(&str) -> Option<String>| {
            let words: Vec<&str> = line.split(' ').collect();
            Ran::of(&words, env).map(|ran| ran.marks.0)
        };
        let (no, memory, network) = ([false; 2], [true, false], [false, true]);
        assert_eq!(marks("cat /etc/passwd", &none), None);
        assert_eq!(marks("rping -s", &none), None);
        assert_eq!(marks("rping -s", &on("weft0", None)), Some([memory, no]));
        assert_eq!(
            marks("/usr/bin/rping -s", &on("weft_ib0", Some("off"))),
            Some([no, network])
        );
        assert_eq!(
            marks("ucx_perftest -d weft_ib0:1", &none),
            Some([no, memory])
        );
        assert_eq!(
            marks("weft verbs -- busybox ls", &none),
            Some([memory, memory])
        );
        assert_eq!(marks("ibstat", &none), Some([no, memory]));
        assert_eq!(marks("ibstatus", &on("weft0", None)), Some([memory, no]));
    }

    #[test]
    fn the_table_has_each_program_with_a_mark() {
        let _lock = blesses().then(lock);
        let table = Table::read();
        if blesses() {
            table.write();
            return;
        }
        assert_eq!(
            table.show(),
            table.text,
            "docs/verbs-reference.md: WEFT_BLESS=1 writes it"
        );
        let never: Vec<&str> = PROGRAMS
            .iter()
            .zip(&table.marks)
            .filter(|(_, marks)| **marks == Marks::default())
            .map(|(program, _)| program.name)
            .collect();
        assert!(never.is_empty(), "no test has seen these work: {never:?}");
    }
}
