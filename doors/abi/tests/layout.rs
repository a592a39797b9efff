//! `<sys/exs.h>` and the Rust types agree, as a C and a C++ compiler see them: sizes, alignments, offsets, constants. Neither side has a declaration that the
//! other does not have.
#![cfg(feature = "exs")]

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use weft_abi::exs::types::{self, CONSTANTS};

struct Figures(Vec<common::Figure>);

macro_rules! layout {
    ($figures:ident, $($c:literal = $rust:ident { $($field:ident),* $(,)? })*) => {$(
        $figures.push($c, format!("sizeof({})", $c), size_of::<types::$rust>());
        $figures.push(&format!("align of {}", $c), format!("ALIGNOF({})", $c), align_of::<types::$rust>());
        $(
            let name = concat!($c, ".", stringify!($field));
            $figures.push(name, format!("offsetof({}, {})", $c, stringify!($field)), std::mem::offset_of!(types::$rust, $field));
        )*
    )*};
}

impl Figures {
    fn push(&mut self, name: &str, expression: String, value: usize) {
        self.0.push((name.into(), expression, value as i128));
    }
}

fn figures() -> Figures {
    let mut figures = Figures(Vec::new());
    layout! { figures,
        "exs_iovec_t" = IoVec { iov_base, iov_len, iov_mhandle }
        "exs_fdvec_t" = FdVec { fdv_fd, fdv_offset, fdv_len }
        "exs_msghdr_t" = MsgHdr { msg_name, msg_namelen, msg_iovlen, msg_iov, msg_flags }
        "exs_xferfile_t" = XferFile { xf_type, xf_vec }
        "exs_acceptaddr_t" = AcceptAddr { aa_addr, aa_addrlen }
        "exs_pollfd_t" = PollFd { pfd_fd, pfd_events }
        "exs_evt_accept_t" = EvtAccept { exs_evt_new_socket, exs_evt_addr }
        "exs_evt_poll_t" = EvtPoll { exs_evt_events }
        "exs_evt_xfer_t" = EvtXfer { exs_evt_buffer, exs_evt_length, exs_evt_mhandle }
        "exs_evt_xfermsg_t" = EvtXferMsg { exs_evt_msg, exs_evt_length }
        "exs_evt_xferfile_t" = EvtXferFile { exs_evt_vec, exs_evt_veclen, exs_evt_length }
        "exs_event_t" = Event { exs_evt_type, exs_evt_errno, exs_evt_socket, exs_evt_flags, exs_evt_ahandle, exs_evt_union }
        "exs_signal_t" = Signal { sig_action, sig_fd }
        "exs_timeout_t" = Timeout { to_time, to_flags }
        "exs_stats_t" = Stats {
            st_direct_sent, st_direct_bytes_sent, st_indirect_sent, st_indirect_bytes_sent, st_small_sent, st_small_bytes_sent, st_direct_received, st_direct_bytes_received, st_indirect_received, st_indirect_bytes_received, st_small_received, st_small_bytes_received, st_mode_switches, st_adverts_sent, st_adverts_received, st_adverts_dropped, st_credit_stalls, st_ring_stalls, st_retracts, st_acks, st_credit_messages,
        }
    }
    for (name, size) in [
        ("exs_version_t", size_of::<types::Version>()),
        ("exs_qhandle_t", size_of::<types::QHandle>()),
        ("exs_mhandle_t", size_of::<types::MHandle>()),
        ("exs_ahandle_t", size_of::<types::AHandle>()),
    ] {
        figures.push(name, format!("sizeof({name})"), size);
    }
    for (name, value) in CONSTANTS {
        let expression = format!("(long long)({name})");
        figures
            .0
            .push(((*name).into(), expression, (*value).into()));
    }
    figures
}

fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../include")
}

fn header() -> String {
    std::fs::read_to_string(include().join("sys/exs.h")).unwrap()
}

fn seen_by(compiler: &str, standard: &str, extension: &str) -> BTreeMap<String, i128> {
    let include = format!("-I{}", include().display());
    common::seen_by(
        &[compiler, standard, &include],
        extension,
        "#include <exs.h>\n",
        &figures().0,
    )
}

#[test]
fn c_and_cplusplus_see_what_rust_sees() {
    let expected = common::expected(&figures().0);
    assert!(expected.len() > 100);
    assert_eq!(seen_by("cc", "-std=c11", "c"), expected);
    assert_eq!(seen_by("c++", "-std=c++11", "cc"), expected);
}

/// Names that the header defines; `pick` gets one line.
fn defined(pick: impl Fn(&str) -> Option<String>) -> BTreeSet<String> {
    header().lines().filter_map(pick).collect()
}

#[test]
fn the_header_has_no_constant_or_type_that_rust_does_not_know() {
    let constants = defined(|line| {
        let mut words = line.strip_prefix("#define ")?.split_whitespace();
        let name = words.next()?;
        words.next().map(|_| name.to_owned()) // the guard has no value
    });
    let ours: BTreeSet<String> = CONSTANTS
        .iter()
        .map(|(name, _)| (*name).to_owned())
        .collect();
    assert_eq!(constants, ours);

    let types = defined(|line| {
        let line = line.split("/*").next()?.trim_end();
        let line = line
            .strip_prefix("} ")
            .or_else(|| line.strip_prefix("typedef "))?;
        let name = line.strip_suffix(';')?.rsplit([' ', '*']).next()?;
        name.starts_with("exs_").then(|| name.to_owned())
    });
    let known: BTreeSet<String> = figures()
        .0
        .iter()
        .map(|(name, ..)| name.clone())
        .filter(|name| name.ends_with("_t") && !name.contains([' ', '.']))
        .collect();
    assert_eq!(types, known);
}

#[test]
fn every_field_of_the_header_is_compared() {
    let known: BTreeSet<String> = figures()
        .0
        .iter()
        .filter_map(|(name, ..)| name.split_once('.').map(|(_, field)| field.to_owned()))
        .collect();
    let mut inside = false;
    let mut fields = BTreeSet::new();
    for line in header().lines() {
        let code = line.split("/*").next().unwrap().trim();
        if line.starts_with("typedef struct") {
            inside = true;
        } else if line.starts_with('}') {
            inside = false;
        } else if inside && let Some(code) = code.strip_suffix(';') {
            let field = code.rsplit([' ', '*', '}']).next().unwrap();
            fields.insert(field.to_owned());
        }
    }
    // the parts of the unions lie at their beginning
    let of_unions = [
        "xf_iovec",
        "xf_fdvec",
        "exs_evt_accept",
        "exs_evt_poll",
        "exs_evt_xfer",
        "exs_evt_xfermsg",
        "exs_evt_xferfile",
    ];
    for part in of_unions {
        assert!(fields.remove(part), "{part}");
    }
    assert_eq!(fields, known);
}
