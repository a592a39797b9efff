//! Settings of the environment: one reader for each kind of value. A variable that is not set or empty leaves the default.

use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::interfaces::{Network, far_address};

/// A variable, and the values that it accepts.
#[derive(Debug)]
pub struct Setting {
    /// Its name.
    pub name: &'static str,
    accepts: Accepts,
}

#[derive(Debug)]
enum Accepts {
    One(&'static [&'static str]),
    List(&'static [&'static str]),
    Number(RangeInclusive<u64>),
    Percent(u8),
    Network,
    Users,
}

const fn setting(name: &'static str, accepts: Accepts) -> Setting {
    Setting { name, accepts }
}

/// Use of shared memory with peers on the same host.
pub const LOCAL: Setting = setting("WEFT_LOCAL", Accepts::One(&["off", "auto", "require"]));
/// Connections by TLS.
pub const TLS: Setting = setting("WEFT_TLS", Accepts::One(&["on", "off"]));
/// Whether `weft stat` sees the process.
pub const STAT: Setting = setting("WEFT_STAT", Accepts::One(&["on", "off"]));
/// The level of the log.
pub const LOG: Setting = setting(
    "WEFT_LOG",
    Accepts::One(&["off", "error", "warn", "info", "debug", "trace"]),
);
/// The devices of the drop-in libraries.
pub const DEVICES: Setting = setting("WEFT_DEVICES", Accepts::List(&["weft0", "weft_ib0"]));
/// CRC over what goes through TCP.
pub const CRC: Setting = setting("WEFT_CRC", Accepts::One(&["on", "off"]));
/// Whether the end of a peer's connection flushes a queue pair of `weft_ib0`.
pub const PEER_DEATH: Setting = setting("WEFT_PEER_DEATH", Accepts::One(&["silent", "flush"]));
/// What queue pairs of `weft_ib0` put on the wire.
pub const IB_WIRE: Setting = setting("WEFT_IB_WIRE", Accepts::One(&["weft", "roce", "auto"]));
/// MPI's provider: the connections to busy peers.
pub const FI_RC: Setting = setting("WEFT_FI_RC", Accepts::Number(0..=64));
/// MPI's provider: messages that are longer go by RDMA Write.
pub const FI_RENDEZVOUS: Setting = setting("WEFT_FI_RENDEZVOUS", Accepts::Number(64..=1 << 20));
/// MPI: the address of a process, or a network that has it.
pub const FI_ADDR: Setting = setting("WEFT_FI_ADDR", Accepts::Network);
/// MPI's provider: packets to drop, to send twice, and to delay.
pub const FI_DROP: Setting = setting("WEFT_FI_DROP", Accepts::Percent(50));
#[expect(missing_docs, reason = "see above")]
pub const FI_TWICE: Setting = setting("WEFT_FI_TWICE", Accepts::Percent(50));
#[expect(missing_docs, reason = "see above")]
pub const FI_LATE: Setting = setting("WEFT_FI_LATE", Accepts::Percent(50));
/// `weft run`: the mode; `off` leaves the program's sockets to the kernel.
pub const RUN: Setting = setting(
    "WEFT_RUN",
    Accepts::One(&["off", "auto", "bsdp", "zsdp", "azsdp"]),
);
/// `weft run`: what a write to memory under way does.
pub const RUN_AZSDP: Setting = setting("WEFT_RUN_AZSDP", Accepts::One(&["block", "copy"]));
/// `weft run`: whether memory that other processes can map is sent from its place.
pub const RUN_SHARED: Setting = setting("WEFT_RUN_SHARED", Accepts::One(&["trust"]));
/// `weft run`: the least bytes of a send from the program's memory.
pub const RUN_FROM: Setting = setting("WEFT_RUN_FROM", Accepts::Number(0..=u64::MAX));
/// `weft run`: after how many sends and receives a socket looks for its peer.
pub const RUN_LOOK: Setting = setting("WEFT_RUN_LOOK", Accepts::Number(0..=u64::MAX));
/// `weft run`: connections to other hosts.
pub const RUN_HOSTS: Setting = setting("WEFT_RUN_HOSTS", Accepts::One(&["auto", "bsdp", "off"]));
/// `weft run`: whether datagrams to other hosts go by datagram-iWARP.
pub const RUN_DATAGRAMS: Setting = setting("WEFT_RUN_DATAGRAMS", Accepts::One(&["on", "off"]));
/// `weft run`: the other users whose processes may be peers.
pub const RUN_WITH: Setting = setting("WEFT_RUN_WITH", Accepts::Users);
/// `weft run`: whether to report at the end.
pub const RUN_EXPLAIN: Setting = setting("WEFT_RUN_EXPLAIN", Accepts::One(&["0", "1"]));

/// A variable that names a file or a folder.
#[derive(Debug)]
pub struct FileSetting(pub &'static str);

impl FileSetting {
    /// The file.
    pub fn path(&self) -> Option<PathBuf> {
        let value = std::env::var_os(self.0)?;
        (!value.is_empty()).then(|| value.into())
    }
}

/// The folder in which containers of one host find each other.
pub const LOCAL_DIR: FileSetting = FileSetting("WEFT_LOCAL_DIR");
/// Our private key.
pub const TLS_KEY: FileSetting = FileSetting("WEFT_TLS_KEY");
/// The keys of the peers that are accepted.
pub const TLS_PEERS: FileSetting = FileSetting("WEFT_TLS_PEERS");
/// A script of faults.
pub const FAULTS: FileSetting = FileSetting("WEFT_FAULTS");

/// Files of programs on weft.
pub const FILES: [&FileSetting; 4] = [&LOCAL_DIR, &TLS_KEY, &TLS_PEERS, &FAULTS];
/// Those of programs on the drop-in libraries.
pub const OF_VERBS: [&Setting; 9] = [
    &LOCAL,
    &TLS,
    &STAT,
    &LOG,
    &DEVICES,
    &CRC,
    &PEER_DEATH,
    &IB_WIRE,
    &FI_ADDR,
];
/// Those of MPI's provider.
pub const OF_FI: [&Setting; 10] = [
    &LOCAL,
    &TLS,
    &STAT,
    &LOG,
    &FI_RC,
    &FI_RENDEZVOUS,
    &FI_ADDR,
    &FI_DROP,
    &FI_TWICE,
    &FI_LATE,
];

/// Those of `weft run`'s library.
pub const OF_RUN: [&Setting; 9] = [
    &RUN,
    &RUN_AZSDP,
    &RUN_SHARED,
    &RUN_FROM,
    &RUN_LOOK,
    &RUN_HOSTS,
    &RUN_DATAGRAMS,
    &RUN_WITH,
    &RUN_EXPLAIN,
];

/// A value that its variable does not accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    name: &'static str,
    value: OsString,
    accepted: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wrong {
            name,
            value,
            accepted,
        } = self;
        write!(f, "{name}={}: it has to be {accepted}", value.display())
    }
}

impl std::error::Error for Wrong {}

impl Setting {
    /// The value; `None`: the default.
    ///
    /// # Errors
    /// A value that is not accepted.
    pub fn read(&self) -> Result<Option<String>, Wrong> {
        self.of(std::env::var_os(self.name))
    }

    /// As [`Setting::read`], parsed. The values that are accepted have to be `T`'s.
    ///
    /// # Errors
    /// As `read`.
    pub fn parse<T: std::str::FromStr>(&self) -> Result<Option<T>, Wrong> {
        Ok(self.read()?.and_then(|text| text.parse().ok()))
    }

    /// Whether it has this value.
    ///
    /// # Errors
    /// As `read`.
    pub fn is(&self, value: &str) -> Result<bool, Wrong> {
        Ok(self.read()?.is_some_and(|text| text == value))
    }

    fn of(&self, value: Option<OsString>) -> Result<Option<String>, Wrong> {
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        match value.to_str().filter(|text| self.accepts(text)) {
            Some(text) => Ok(Some(text.to_owned())),
            None => Err(Wrong {
                name: self.name,
                accepted: self.accepted(),
                value,
            }),
        }
    }

    fn accepts(&self, text: &str) -> bool {
        match &self.accepts {
            Accepts::One(values) => values.contains(&text),
            Accepts::List(values) => text.split(',').all(|one| values.contains(&one.trim())),
            Accepts::Number(range) => text.parse().is_ok_and(|number| range.contains(&number)),
            Accepts::Percent(most) => text
                .parse::<f64>()
                .is_ok_and(|percent| (0.0..=f64::from(*most)).contains(&percent)),
            Accepts::Network => text.parse::<Network>().is_ok(),
            Accepts::Users => users(text).is_some(),
        }
    }

    fn accepted(&self) -> String {
        match &self.accepts {
            Accepts::One(values) => match values.split_last() {
                Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
                None => String::new(),
            },
            Accepts::List(values) => {
                format!("a list, with commas, of {}", values.join(" and "))
            }
            Accepts::Number(range) => {
                format!("a whole number from {} to {}", range.start(), range.end())
            }
            Accepts::Percent(most) => format!("a number from 0 to {most}"),
            Accepts::Network => "an IP address, or a network such as 10.0.0.0/8".to_owned(),
            Accepts::Users => "numbers of users with commas, or any".to_owned(),
        }
    }
}

/// Other users that a process deals with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Users {
    /// Every user.
    Any,
    /// Those of these numbers.
    These(Vec<u32>),
}

/// Parses the value of [`RUN_WITH`].
pub fn users(text: &str) -> Option<Users> {
    if text == "any" {
        return Some(Users::Any);
    }
    let numbers = text.split(',').map(str::parse);
    numbers.collect::<Result<_, _>>().ok().map(Users::These)
}

/// The address that [`FI_ADDR`] says, or the usual one for other hosts, or that of the loopback interface.
///
/// # Errors
/// A value that is not accepted, or a network in which this host has no address.
pub fn mpi_address() -> Result<IpAddr, Wrong> {
    let within = FI_ADDR.parse()?;
    match (far_address(within), FI_ADDR.read()?) {
        (Some(ip), _) => Ok(ip),
        (None, None) => Ok(Ipv4Addr::LOCALHOST.into()),
        (None, Some(value)) => Err(Wrong {
            name: FI_ADDR.name,
            value: value.into(),
            accepted: "a network in which this host has an address".to_owned(),
        }),
    }
}

/// The variables of these with a value that is not accepted.
pub fn wrong(settings: &[&Setting]) -> Vec<Wrong> {
    settings
        .iter()
        .filter_map(|setting| setting.read().err())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_every_setting_of_verbs_and_mpi() {
        let page = |name: &str| {
            let file = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(file).unwrap()
        };
        let rows = [page("verbs.md"), page("mpi.md"), page("tls.md")].concat();
        let rows: Vec<_> = rows.lines().filter(|line| line.starts_with('|')).collect();
        let settings = OF_VERBS.iter().chain(&OF_FI).map(|setting| setting.name);
        for name in settings.chain(FILES.map(|file| file.0)) {
            let name = format!("`{name}`");
            assert!(rows.iter().any(|row| row.contains(&name)), "{name}");
        }
    }

    #[test]
    fn an_error_names_the_variable_its_value_and_the_accepted_ones() {
        let of = |setting: &Setting, value: &str| match setting.of(Some(value.into())) {
            Ok(text) => text.unwrap_or_default(),
            Err(wrong) => wrong.to_string(),
        };
        for (setting, value, said) in [
            (&LOCAL, "off", "off"),
            (&LOCAL, "", ""),
            (
                &LOCAL,
                "foo",
                "WEFT_LOCAL=foo: it has to be off, auto or require",
            ),
            (&CRC, "maybe", "WEFT_CRC=maybe: it has to be on or off"),
            (&DEVICES, "weft_ib0, weft0", "weft_ib0, weft0"),
            (
                &DEVICES,
                "weft0,foo",
                "WEFT_DEVICES=weft0,foo: it has to be a list, with commas, of weft0 and weft_ib0",
            ),
            (&FI_RC, "64", "64"),
            (
                &FI_RC,
                "-1",
                "WEFT_FI_RC=-1: it has to be a whole number from 0 to 64",
            ),
            (&FI_DROP, "0.5", "0.5"),
            (
                &FI_DROP,
                "51",
                "WEFT_FI_DROP=51: it has to be a number from 0 to 50",
            ),
            (&FI_ADDR, "::1", "::1"),
            (&FI_ADDR, "10.0.0.0/8", "10.0.0.0/8"),
            (
                &FI_ADDR,
                "x",
                "WEFT_FI_ADDR=x: it has to be an IP address, or a network such as 10.0.0.0/8",
            ),
        ] {
            assert_eq!(of(setting, value), said);
        }
        assert_eq!(LOCAL.of(None), Ok(None));
    }
}
