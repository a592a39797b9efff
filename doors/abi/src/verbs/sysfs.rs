//! Files about devices, as the kernel shows them below `/sys/class/infiniband` (its Documentation/ABI/stable/sysfs-class-infiniband). weft's files are made in
//! memory for programs that read them through libibverbs; [`super::tree`] writes them for other programs.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fmt::Write as _;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::io::Errno;

use super::device::{self, speed};
use super::os_errno;
use super::types::{
    IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_NODE_RNIC, IBV_PORT_ACTIVE, ibv_device,
    ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use crate::call;
use crate::once::ForkOnce;

/// A device, as its files describe it.
pub(crate) struct About {
    pub(crate) device: ibv_device,
    pub(crate) attr: ibv_device_attr,
    pub(crate) port: ibv_port_attr,
    pub(crate) gids: Vec<ibv_gid_entry>,
}

impl About {
    /// The names of the files below the device's folder. Those about an empty entry of the table of GIDs cannot be read, but for its GID, which is zero.
    pub(crate) fn files(&self) -> Vec<String> {
        const OF_DEVICE: [&str; 7] = [
            "node_type",
            "node_guid",
            "sys_image_guid",
            "node_desc",
            "hca_type",
            "hw_rev",
            "fw_ver",
        ];
        const OF_PORT: [&str; 10] = [
            "state",
            "phys_state",
            "link_layer",
            "rate",
            "lid",
            "lid_mask_count",
            "sm_lid",
            "sm_sl",
            "cap_mask",
            "pkeys/0",
        ];
        let of_gid = |index| {
            ["gids", "gid_attrs/types", "gid_attrs/ndevs"]
                .map(|folder| format!("ports/1/{folder}/{index}"))
        };
        let own = OF_DEVICE.iter().map(|&name| name.to_owned());
        own.chain(OF_PORT.iter().map(|name| format!("ports/1/{name}")))
            .chain((0..self.gids_len()).flat_map(of_gid))
            .collect()
    }

    /// The entries of the table of GIDs, empty ones too.
    fn gids_len(&self) -> usize {
        usize::try_from(self.port.gid_tbl_len).unwrap_or(0)
    }

    /// The text of a file below the device's folder, if there is such a file and it can be read.
    pub(crate) fn file(&self, path: &str) -> Option<String> {
        let device = &self.device;
        if let Some(port) = path.strip_prefix("ports/1/") {
            return self.file_of_port(port);
        }
        let text = match path {
            "node_type" => match device.node_type {
                IBV_NODE_RNIC => "4: RNIC".to_owned(),
                _ => "1: CA".to_owned(),
            },
            "node_guid" => groups(&self.attr.node_guid.to_ne_bytes()),
            "sys_image_guid" => groups(&self.attr.sys_image_guid.to_ne_bytes()),
            "node_desc" => format!("weft {}", text(&device.name)),
            "hca_type" => "weft".to_owned(),
            "hw_rev" => format!("{:x}", self.attr.hw_ver),
            "fw_ver" => text(&self.attr.fw_ver),
            _ => return None,
        };
        Some(text)
    }

    fn file_of_port(&self, path: &str) -> Option<String> {
        let port = &self.port;
        let index = |text: &str| {
            let index = text.parse::<usize>().ok()?;
            (index < self.gids_len()).then_some(index)
        };
        // SAFETY: any bytes are a GID.
        let raw = |gid: &ibv_gid_entry| unsafe { gid.gid.raw };
        let gid = |text| {
            let gid = self.gids.get(index(text)?)?;
            (raw(gid) != [0; 16]).then_some(gid)
        };
        let text = match path.rsplit_once('/') {
            None => match path {
                "state" => match port.state {
                    IBV_PORT_ACTIVE => "4: ACTIVE".to_owned(),
                    _ => "1: DOWN".to_owned(),
                },
                "phys_state" => match port.phys_state {
                    5 => "5: LinkUp".to_owned(),
                    _ => "3: Disabled".to_owned(),
                },
                "link_layer" => match port.link_layer.into() {
                    IBV_LINK_LAYER_ETHERNET => "Ethernet".to_owned(),
                    _ => "InfiniBand".to_owned(),
                },
                "rate" => rate(port),
                "lid" => format!("{:#x}", port.lid),
                "lid_mask_count" => port.lmc.to_string(),
                "sm_lid" => format!("{:#x}", port.sm_lid),
                "sm_sl" => port.sm_sl.to_string(),
                "cap_mask" => format!("{:#010x}", port.port_cap_flags),
                _ => return None,
            },
            Some(("gids", text)) => {
                let gid = self.gids.get(index(text)?);
                groups(&gid.map_or([0; 16], raw))
            }
            Some(("gid_attrs/types", index)) => match gid(index)?.gid_type {
                IBV_GID_TYPE_ROCE_V2 => "RoCE v2".to_owned(),
                _ => "IB/RoCE v1".to_owned(),
            },
            Some(("gid_attrs/ndevs", index)) => interface(gid(index)?.ndev_ifindex)?,
            Some(("pkeys", "0")) => "0xffff".to_owned(),
            Some(_) => return None,
        };
        Some(text)
    }
}

/// Bytes in the kernel's format of GUIDs and GIDs.
fn groups(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (i, byte) in bytes.iter().enumerate() {
        let between = if i > 0 && i % 2 == 0 { ":" } else { "" };
        let _ = write!(text, "{between}{byte:02x}");
    }
    text
}

/// The text of a C array, up to its NUL.
pub(super) fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars
        .iter()
        .map(|c| *c as u8)
        .take_while(|c| *c != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `100 Gb/sec (4X EDR)`.
fn rate(port: &ibv_port_attr) -> String {
    let (all, lanes, name) = speed(port);
    let tenths = if all % 10 == 0 {
        String::new()
    } else {
        format!(".{}", all % 10)
    };
    format!("{}{tenths} Gb/sec ({lanes}X{name})", all / 10)
}

pub(super) fn interface(index: u32) -> Option<String> {
    let mut name: [c_char; libc::IF_NAMESIZE] = [0; libc::IF_NAMESIZE];
    // SAFETY: there is room for a name.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    (!found.is_null()).then(|| text(&name))
}

pub(super) fn all_about() -> impl Iterator<Item = About> {
    device::each().filter_map(|(device, which)| {
        Some(About {
            device,
            attr: device::identity(which),
            port: device::port(which),
            gids: device::gids(which).ok()?,
        })
    })
}

/// The text of a file of one of the devices here; `EINVAL` for a file that cannot be read.
fn of_ours(path: &Path) -> Option<Result<String, Errno>> {
    let path = path.to_str()?;
    all_about().find_map(|about| {
        let below = |folder: &[c_char]| path.strip_prefix(&text(folder))?.strip_prefix('/');
        if let Some(file) = below(&about.device.ibdev_path) {
            let unreadable = || about.files().iter().any(|name| name == file);
            let text = about.file(file).map(Ok);
            return text.or_else(|| unreadable().then_some(Err(Errno::INVAL)));
        }
        match below(&about.device.dev_path)? {
            "ibdev" => Some(Ok(text(&about.device.name))),
            "abi_version" => Some(Ok("1".to_owned())),
            _ => None,
        }
    })
}

/// The mount point of the kernel's sysfs: `SYSFS_PATH`, else `/sys`.
pub fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: ForkOnce<CString> = ForkOnce::new();
    let path = PATH.get_or_init(|| {
        let path = std::env::var_os("SYSFS_PATH").unwrap_or_default();
        let path = path.as_bytes().trim_ascii_end();
        let end = path
            .iter()
            .rposition(|byte| *byte != b'/')
            .map_or(0, |last| last + 1);
        match CString::new(&path[..end]) {
            Ok(path) if !path.is_empty() => path,
            _ => c"/sys".to_owned(),
        }
    });
    path.as_ptr()
}

/// Reads a file into `buf` with a NUL at the end and without a final newline. Returns the length, or -1, also where the file is longer than `buf`.
///
/// # Safety
/// `dir` and `file` are strings, `buf` is good for `size` bytes.
pub unsafe fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    call::run(|| {
        if dir.is_null() || file.is_null() || buf.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
        let path =
            Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
        let mut text = match of_ours(&path) {
            Some(text) => text?.into_bytes(),
            None => of_the_system(&path, size).map_err(|error| os_errno(&error))?,
        };
        if text.last() == Some(&b'\n') {
            text.pop();
        }
        if text.len() >= size {
            return Err(Errno::OVERFLOW);
        }
        text.push(0);
        // SAFETY: the caller's promise; there are at most `size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, text.len()) };
        c_int::try_from(text.len() - 1).map_err(|_| Errno::OVERFLOW)
    })
}

fn of_the_system(path: &Path, most: usize) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?
        .take(most as u64)
        .read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::types::ibv_gid;

    fn read(dir: &CStr, file: &CStr, room: usize) -> Result<Vec<u8>, i32> {
        let mut buf = vec![0xEE_u8; room];
        // SAFETY: strings, and a buffer of that size.
        let len = unsafe {
            ibv_read_sysfs_file(dir.as_ptr(), file.as_ptr(), buf.as_mut_ptr().cast(), room)
        };
        let Ok(len) = usize::try_from(len) else {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap());
        };
        assert_eq!(buf[len], 0);
        buf.truncate(len);
        Ok(buf)
    }

    #[test]
    fn a_file_is_read_without_its_newline_and_never_past_the_buffer() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("node_type"), "4: RNIC\n").unwrap();
        let dir = CString::new(dir.path().as_os_str().as_bytes()).unwrap();
        assert_eq!(read(&dir, c"node_type", 64).unwrap(), b"4: RNIC");
        assert_eq!(read(&dir, c"node_type", 8).unwrap(), b"4: RNIC");
        assert_eq!(read(&dir, c"node_type", 7).unwrap_err(), libc::EOVERFLOW);
        assert_eq!(read(&dir, c"none", 64).unwrap_err(), libc::ENOENT);
    }

    #[test]
    fn the_files_of_a_device_say_what_its_attributes_say() {
        // SAFETY: all zeros is a value of each of these types.
        let (mut device, mut attr, mut port): (ibv_device, ibv_device_attr, ibv_port_attr) =
            unsafe { std::mem::zeroed() };
        (device.node_type, attr.hw_ver) = (IBV_NODE_RNIC, 1);
        attr.node_guid = u64::from_be_bytes([2, 0, 0, 0xFF, 0xFE, 0, 0, 9]).to_be();
        (port.state, port.phys_state, port.link_layer) = (IBV_PORT_ACTIVE, 5, 2);
        (port.active_width, port.active_speed) = (2, 32);
        port.gid_tbl_len = 3;
        let mut raw = [0; 16];
        raw[10..].copy_from_slice(&[0xFF, 0xFF, 127, 0, 0, 1]);
        let gid = ibv_gid_entry {
            gid: ibv_gid { raw },
            gid_index: 0,
            port_num: 1,
            gid_type: IBV_GID_TYPE_ROCE_V2,
            ndev_ifindex: 1,
        };
        let about = About {
            device,
            attr,
            port,
            gids: vec![gid],
        };
        for (path, text) in [
            ("node_type", "4: RNIC"),
            ("node_guid", "0200:00ff:fe00:0009"),
            ("hw_rev", "1"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/phys_state", "5: LinkUp"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/rate", "100 Gb/sec (4X EDR)"),
            ("ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:7f00:0001"),
            ("ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"),
            ("ports/1/gid_attrs/types/0", "RoCE v2"),
            ("ports/1/gid_attrs/ndevs/0", "lo"),
            ("ports/1/pkeys/0", "0xffff"),
        ] {
            assert_eq!(about.file(path).as_deref(), Some(text), "{path}");
        }
        for path in [
            "",
            "board_id",
            "ports/2/state",
            "ports/1/gids/3",
            "ports/1/gids/x",
            "ports/1/gid_attrs/types/2",
            "ports/1/gid_attrs/ndevs/2",
            "ports/1/pkeys/1",
        ] {
            assert_eq!(about.file(path), None, "{path}");
        }
        port.active_speed = 1;
        assert_eq!(rate(&port), "10 Gb/sec (4X)");
        port.active_width = 1;
        assert_eq!(rate(&port), "2.5 Gb/sec (1X)");
    }
}
