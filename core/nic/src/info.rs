//! What devices say about themselves.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr};

use weft_cverbs::{
    IBV_ATOMIC_NONE, IBV_DEVICE_MEM_WINDOW, IBV_DEVICE_MEM_WINDOW_TYPE_2A,
    IBV_DEVICE_MEM_WINDOW_TYPE_2B, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2,
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_PORT_ACTIVE, IBV_PORT_ARMED,
    IBV_PORT_DOWN, IBV_PORT_INIT, Zeroed, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_port_attr,
    verbs_context,
};

use crate::address;
use crate::context::Context;
use crate::device::{Device, Transport, text};
use crate::error::{Error, status};

/// What the port is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// `InfiniBand`.
    InfiniBand,
    /// Ethernet.
    Ethernet,
    /// The device does not say.
    Unspecified,
}

/// What a GID is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, and iWARP.
    Ib,
    /// `RoCE` in Ethernet frames.
    RoceV1,
    /// `RoCE` in UDP.
    RoceV2,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug)]
pub struct Gid {
    /// Its index.
    pub index: u32,
    /// The GID.
    pub raw: [u8; 16],
    /// What it is for.
    pub kind: GidKind,
    /// The network interface that it belongs to.
    pub netdev: Option<String>,
}

impl Gid {
    /// The IP address that is the GID; on iWARP GIDs are hardware addresses.
    pub fn ip(&self) -> IpAddr {
        let ip = Ipv6Addr::from(self.raw);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    }
}

/// A port of a device.
#[derive(Clone, Debug)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// `IBV_PORT_ACTIVE` and so on.
    state: u32,
    /// What it is connected to.
    pub link: Link,
    /// The greatest payload of a packet that is in use, in bytes.
    pub mtu: u32,
    /// The local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Its GIDs.
    pub gids: Vec<Gid>,
}

impl Port {
    /// True if messages can go through it.
    pub fn is_active(&self) -> bool {
        self.state == IBV_PORT_ACTIVE
    }

    /// Its state, as rdma-core's programs name it.
    pub fn state(&self) -> &'static str {
        match self.state {
            IBV_PORT_DOWN => "DOWN",
            IBV_PORT_INIT => "INIT",
            IBV_PORT_ARMED => "ARMED",
            IBV_PORT_ACTIVE => "ACTIVE",
            _ => "unknown",
        }
    }

    /// The network interfaces of its GIDs.
    pub fn netdevs(&self) -> Vec<&str> {
        let mut names: Vec<_> = self
            .gids
            .iter()
            .filter_map(|g| g.netdev.as_deref())
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The GID by which a queue pair of this host is best reached: `RoCE` v2 and IPv4 before others.
    pub fn best_gid(&self) -> Option<&Gid> {
        self.gids.iter().min_by_key(|gid| {
            let version = match gid.kind {
                GidKind::RoceV2 => 0,
                GidKind::RoceV1 => 1,
                GidKind::Ib => 2,
            };
            (version, gid.ip().is_ipv6(), gid.ip().is_loopback())
        })
    }
}

/// What a device can do.
#[derive(Clone, Debug)]
pub struct Info {
    /// Of the device itself; what carries its messages.
    pub transport: Transport,
    /// The version of its firmware, or of its driver.
    pub firmware: String,
    /// The vendor's number.
    pub vendor: u32,
    /// The vendor's number of the kind of device.
    pub part: u32,
    /// The vendor's number of its version.
    pub revision: u32,
    /// Scatter/gather elements of a work request.
    pub max_sge: u32,
    /// Those of an RDMA Read.
    pub max_sge_rd: u32,
    /// Work requests in a queue.
    pub max_qp_wr: u32,
    /// Reads and atomics that one queue pair may have on their way to it.
    pub max_rd_atomic: u8,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Address handles, which datagrams need.
    pub max_ah: u32,
    /// Memory windows.
    pub windows: bool,
    /// Atomics.
    pub atomics: bool,
    /// Its ports.
    pub ports: Vec<Port>,
}

impl Device {
    /// Opens it and asks it for all of this.
    ///
    /// # Errors
    /// As [`Device::open`], `ibv_query_device` and `ibv_query_port`.
    pub fn info(&self) -> Result<Info, Error> {
        info(&self.open()?, self.transport())
    }
}

fn positive(number: c_int) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

fn info(context: &Context, transport: Transport) -> Result<Info, Error> {
    let calls = &context.libraries().verbs;
    let _calling = context.enter()?;
    let mut attr = ibv_device_attr::zeroed();
    // SAFETY: an open context, and a place for the answer.
    let answer = unsafe { (calls.ibv_query_device)(context.raw(), &raw mut attr) };
    status(answer).map_err(|errno| context.failed("ibv_query_device", errno))?;
    let windows =
        IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    let ports = (1..=attr.phys_port_cnt).map(|number| port(context, number, transport));
    Ok(Info {
        transport,
        firmware: text(&attr.fw_ver),
        vendor: attr.vendor_id,
        part: attr.vendor_part_id,
        revision: attr.hw_ver,
        max_sge: positive(attr.max_sge),
        max_sge_rd: positive(attr.max_sge_rd),
        max_qp_wr: positive(attr.max_qp_wr),
        max_rd_atomic: attr.max_qp_rd_atom.clamp(0, 255) as u8,
        max_srq: positive(attr.max_srq),
        max_ah: positive(attr.max_ah),
        windows: attr.device_cap_flags & windows != 0 && attr.max_mw > 0,
        atomics: attr.atomic_cap != IBV_ATOMIC_NONE,
        ports: ports.collect::<Result<_, _>>()?,
    })
}

/// `ibv_query_port`, as the inline function of the header calls it.
fn query_port(context: &Context, number: u8) -> Result<ibv_port_attr, Error> {
    let mut attr = ibv_port_attr::zeroed();
    let offset = std::mem::offset_of!(verbs_context, query_port);
    // SAFETY: an open context whose table has the entry, or the library's call, which fills the first part of the struct.
    let answer = unsafe {
        match context
            .extended(offset)
            .and_then(|table| (*table).query_port)
        {
            Some(call) => call(context.raw(), number, &raw mut attr, size_of_val(&attr)),
            None => {
                (context.libraries().verbs.ibv_query_port)(context.raw(), number, &raw mut attr)
            }
        }
    };
    status(answer).map_err(|errno| context.failed("ibv_query_port", errno))?;
    Ok(attr)
}

fn port(context: &Context, number: u8, transport: Transport) -> Result<Port, Error> {
    let attr = query_port(context, number)?;
    Ok(Port {
        number,
        state: attr.state,
        link: match u32::from(attr.link_layer) {
            IBV_LINK_LAYER_INFINIBAND => Link::InfiniBand,
            IBV_LINK_LAYER_ETHERNET => Link::Ethernet,
            // RoCE's devices all say Ethernet; what is not said is InfiniBand on them, and nothing on iWARP's.
            _ if transport == Transport::Ib => Link::InfiniBand,
            _ => Link::Unspecified,
        },
        // The numbers of `enum ibv_mtu`: 1 is 256.
        mtu: 128_u32.checked_shl(attr.active_mtu).unwrap_or(0),
        lid: attr.lid,
        gids: gids(context, number, positive(attr.gid_tbl_len), transport),
    })
}

/// The GIDs of a port. Kernels before 5.10 have no call for the table: then each is asked for, and its kind is that of all GIDs of the transport.
fn gids(context: &Context, port: u8, length: u32, transport: Transport) -> Vec<Gid> {
    /// More entries than devices have for their ports together; the kernel takes no room of 64 KiB.
    const ROOM: usize = 2000;
    let calls = &context.libraries().verbs;
    let mut entries = vec![ibv_gid_entry::zeroed(); ROOM];
    // SAFETY: an open context, and room for so many entries of this size.
    let count = unsafe {
        let size = size_of::<ibv_gid_entry>();
        (calls._ibv_query_gid_table)(context.raw(), entries.as_mut_ptr(), ROOM, 0, size)
    };
    let Ok(count) = usize::try_from(count) else {
        return (0..length)
            .filter_map(|index| gid(context, port, index, transport))
            .collect();
    };
    entries.truncate(count);
    let ours = entries
        .iter()
        .filter(|entry| entry.port_num == u32::from(port));
    ours.map(|entry| {
        // SAFETY: a GID is 16 bytes in either form.
        let raw = unsafe { entry.gid.raw };
        let kind = match entry.gid_type {
            IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            _ => GidKind::Ib,
        };
        let netdev = address::name_of(entry.ndev_ifindex).or_else(|| netdev(&raw, transport));
        Gid {
            index: entry.gid_index,
            raw,
            kind,
            netdev,
        }
    })
    .collect()
}

fn gid(context: &Context, port: u8, index: u32, transport: Transport) -> Option<Gid> {
    let mut gid = ibv_gid::zeroed();
    // SAFETY: an open context, and a place for the answer.
    let raw = unsafe {
        let query = context.libraries().verbs.ibv_query_gid;
        if query(context.raw(), port, index as c_int, &raw mut gid) != 0 {
            return None;
        }
        gid.raw
    };
    (raw != [0; 16]).then(|| Gid {
        index,
        raw,
        kind: GidKind::Ib,
        netdev: netdev(&raw, transport),
    })
}

/// The interface of an iWARP device, whose GID begins with the hardware address; the kernel names it since 6.5.
fn netdev(gid: &[u8; 16], transport: Transport) -> Option<String> {
    if transport != Transport::Iwarp {
        return None;
    }
    address::with_hardware_address(*gid.first_chunk()?)
}
