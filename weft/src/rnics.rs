//! The machine's own RDMA devices, for `weft doctor` and `weft stat`.

use std::fmt::Write as _;
use std::net::Ipv6Addr;

use comfy_table::{ContentArrangement, Table, presets};
use weft_nic::{Device, Error, GidKind, Info, Link, Port, Transport};

/// A device, and what it says of itself or why it cannot be used.
#[derive(Debug)]
pub struct Rnic {
    /// The device.
    pub device: Device,
    /// What it says.
    pub info: Result<Info, Error>,
}

/// Every device of the machine.
///
/// # Errors
/// libibverbs cannot be loaded.
pub fn all() -> Result<Vec<Rnic>, Error> {
    let devices = weft_nic::devices()?;
    let ask = |device: Device| Rnic {
        info: device.info(),
        device,
    };
    Ok(devices.into_iter().map(ask).collect())
}

/// An error, and what to do about it.
pub fn with_remedy(error: &Error) -> String {
    match error.hint() {
        Some(hint) => format!("{error}: {hint}"),
        None => error.to_string(),
    }
}

/// The transport's name; on Ethernet that of InfiniBand is `RoCE`.
pub fn transport(transport: Transport, link: Link) -> &'static str {
    match (transport, link) {
        (Transport::Iwarp, _) => "iWARP",
        (Transport::Ib, Link::Ethernet) => "RoCE",
        (Transport::Ib, _) => "InfiniBand",
        (Transport::Other, _) => "another transport",
    }
}

/// The name of what a port is connected to.
pub fn link(link: Link) -> &'static str {
    match link {
        Link::InfiniBand => "InfiniBand",
        Link::Ethernet => "Ethernet",
        Link::Unspecified => "unspecified",
    }
}

fn kind(kind: GidKind) -> &'static str {
    match kind {
        GidKind::Ib => "",
        GidKind::RoceV1 => " (v1)",
        GidKind::RoceV2 => " (v2)",
    }
}

/// Why nothing can go through a port; `None` if it can.
pub fn hindrance(port: &Port) -> Option<String> {
    if !port.is_active() {
        let names = port.netdevs().join(", ");
        let cable = if names.is_empty() {
            "look at its cable and at the subnet manager".to_owned()
        } else {
            format!("`ip link set {names} up`, and look at its cable")
        };
        return Some(format!("port {} is {}: {cable}", port.number, port.state()));
    }
    port.gids.is_empty().then(|| {
        let number = port.number;
        format!("port {number} has no GID: give its network interface an address (`ip addr add`)")
    })
}

impl Rnic {
    /// Why it cannot be used; `None` if one of its ports can.
    pub fn hindrance(&self) -> Option<String> {
        match &self.info {
            Err(error) => Some(with_remedy(error)),
            Ok(info) => {
                let hindrances: Vec<_> = info.ports.iter().map(hindrance).collect();
                if info.ports.is_empty() {
                    return Some("it has no port".to_owned());
                }
                let all: Option<Vec<_>> = hindrances.into_iter().collect();
                all.map(|all| all.join("; "))
            }
        }
    }

    /// It and its ports, in one line for each port.
    pub fn lines(&self) -> Vec<String> {
        let name = self.device.name();
        let Ok(info) = &self.info else {
            return vec![name.to_owned()];
        };
        let line = |port: &Port| {
            let mut line = format!(
                "{name}: {}, port {} {}, {}",
                transport(info.transport, port.link),
                port.number,
                port.state(),
                link(port.link)
            );
            if !port.netdevs().is_empty() {
                let _ = write!(line, " {}", port.netdevs().join(" "));
            }
            let _ = write!(
                line,
                ", MTU {}, GIDs {}",
                port.mtu,
                gids(info, port).join(" ")
            );
            line
        };
        info.ports.iter().map(line).collect()
    }

    /// A JSON object for each port; one for a device that cannot be opened.
    pub fn json(&self) -> Vec<serde_json::Value> {
        let device = self.device.name();
        let Ok(info) = &self.info else {
            return vec![serde_json::json!({ "rnic": device, "unusable": self.hindrance() })];
        };
        let object = |port: &Port| {
            serde_json::json!({
                "rnic": device,
                "transport": transport(info.transport, port.link),
                "port": port.number,
                "state": port.state(),
                "link": link(port.link),
                "netdevs": port.netdevs(),
                "mtu": port.mtu,
                "gids": gids(info, port),
                "unusable": hindrance(port),
            })
        };
        info.ports.iter().map(object).collect()
    }
}

/// The GIDs as texts: an IP address with `RoCE`, else in the form of an IPv6 address, as rdma-core's programs show them.
pub fn gids(info: &Info, port: &Port) -> Vec<String> {
    let text = |gid: &weft_nic::Gid| {
        let roce = info.transport == Transport::Ib && port.link == Link::Ethernet;
        let text = if roce {
            gid.ip().to_string()
        } else {
            Ipv6Addr::from(gid.raw).to_string()
        };
        text + kind(gid.kind)
    };
    port.gids.iter().map(text).collect()
}

/// A table for humans, with the soft RNIC as its first row; one line if there is no other.
pub fn table(found: &Result<Vec<Rnic>, Error>, width: Option<u16>) -> String {
    let rnics = match found {
        Ok(rnics) if rnics.is_empty() => {
            return "no RNICs but weft's own, in software\n".to_owned();
        }
        Ok(rnics) => rnics,
        Err(_) => {
            return "no RNICs but weft's own, in software: libibverbs cannot be used here\n"
                .to_owned();
        }
    };
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(["RNIC", "transport", "port", "link", "GIDs"]);
    if let Some(width) = width {
        table.set_width(width);
    }
    table.add_row(["weft's own", "iWARP", "", "all interfaces", ""]);
    for rnic in rnics {
        let name = rnic.device.name();
        let Ok(info) = &rnic.info else {
            let why = rnic.hindrance().unwrap_or_default();
            table.add_row([name, "", "", "unusable", &why]);
            continue;
        };
        for port in &info.ports {
            table.add_row([
                name,
                transport(info.transport, port.link),
                &format!("{} {}", port.number, port.state()),
                format!("{} {}", link(port.link), port.netdevs().join(" ")).trim_end(),
                &gids(info, port).join("\n"),
            ]);
        }
    }
    weft_report::terminal::in_locale(&table.to_string()).into_owned() + "\n"
}
