//! The files about the devices as a tree in a folder, for programs that read `/sys/class/infiniband` and `/dev/infiniband` themselves. The
//! layout is the kernel's for a PCI device: the folders below `/sys/class` hold links to the device's folder below its parent.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use super::os_errno;
use super::sysfs::{About, all_about, interface, text};

/// The folder of the parents below `sys/devices`. No PCI domain of a machine has this number.
const ROOT: &str = "pci7766:00";
/// The interface of libibverbs to the kernel's driver that rdma-core since version 17 asks for.
const UVERBS_ABI: &str = "6";
/// The first device number of the kernel's `uverbs` files.
const UVERBS_DEV: (u32, u32) = (231, 192);

/// What a file leads to that the kernel shows, and whose reading fails with `EINVAL`: this one can be opened and not read.
const UNREADABLE: &str = "/proc/self/ns/uts";

/// Makes the missing folders of a path. All users may read them and only their owner may change them, whatever the umask is.
fn make_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_folders(parent)?;
    }
    fs::create_dir(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

/// A file or a link.
#[derive(Debug, PartialEq, Eq)]
enum Node {
    File(String),
    Link(String),
}

/// Files and links by their paths below the folder, which begin with `sys/` or `dev/`.
struct Tree(Vec<(String, Node)>);

impl Tree {
    fn of(devices: &[About]) -> Tree {
        let mut tree = Tree(Vec::new());
        tree.file("sys/class/infiniband_verbs/abi_version", UVERBS_ABI);
        tree.link("dev/infiniband/rdma_cm", "/dev/null");
        for (index, about) in devices.iter().enumerate() {
            tree.device(index as u32, about);
        }
        tree
    }

    fn file(&mut self, path: impl Into<String>, text: impl AsRef<str>) {
        let text = format!("{}\n", text.as_ref());
        self.0.push((path.into(), Node::File(text)));
    }

    fn link(&mut self, path: impl Into<String>, to: impl Into<String>) {
        self.0.push((path.into(), Node::Link(to.into())));
    }

    fn device(&mut self, index: u32, about: &About) {
        let part = about.attr.vendor_part_id;
        let address = format!("7766:00:{part:02x}.0");
        let parent = format!("sys/devices/{ROOT}/{address}");
        self.parent(&parent, about);

        let name = text(&about.device.name);
        let own = format!("{parent}/infiniband/{name}");
        for file in about.files() {
            let path = format!("{own}/{file}");
            match about.file(&file) {
                Some(text) => self.file(path, text),
                None => self.link(path, UNREADABLE),
            }
        }
        let uverbs = text(&about.device.dev_name);
        let verbs = format!("{parent}/infiniband_verbs/{uverbs}");
        self.file(format!("{verbs}/ibdev"), &name);
        self.file(format!("{verbs}/abi_version"), "1");
        let (major, minor) = UVERBS_DEV;
        self.file(format!("{verbs}/dev"), format!("{major}:{}", minor + index));
        for (class, folder, member) in [
            ("infiniband", &own, &name),
            ("infiniband_verbs", &verbs, &uverbs),
        ] {
            self.link(format!("{folder}/device"), format!("../../../{address}"));
            self.link(
                format!("{folder}/subsystem"),
                format!("../../../../../class/{class}"),
            );
            self.link(
                format!("sys/class/{class}/{member}"),
                format!("../../devices/{ROOT}/{address}/{class}/{member}"),
            );
        }
        // Programs require that it exists, is a character device, and can be opened.
        self.link(format!("dev/infiniband/{uverbs}"), "/dev/null");
    }

    fn parent(&mut self, parent: &str, about: &About) {
        let (vendor, part) = (about.attr.vendor_id >> 8, about.attr.vendor_part_id);
        self.file(format!("{parent}/vendor"), format!("{vendor:#06x}"));
        self.file(format!("{parent}/device"), format!("{part:#06x}"));
        // An Ethernet controller.
        self.file(format!("{parent}/class"), "0x020000");
        let modalias = format!("pci:v{vendor:08X}d{part:08X}sv00000000sd00000000bc02sc00i00");
        self.file(format!("{parent}/modalias"), modalias);
        self.file(format!("{parent}/numa_node"), numa_node().to_string());
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let cpus = cpus(online.trim());
        self.file(format!("{parent}/local_cpulist"), online.trim());
        self.file(format!("{parent}/local_cpus"), mask(&cpus));
        // Absolute, because these are the machine's.
        self.link(format!("{parent}/subsystem"), "/sys/bus/pci");
        let first = about.gids.iter().find(|gid| gid.ndev_ifindex != 0);
        if let Some(name) = first.and_then(|gid| interface(gid.ndev_ifindex)) {
            self.link(
                format!("{parent}/net/{name}"),
                format!("/sys/class/net/{name}"),
            );
        }
    }

    fn write(&self, dir: &Path) -> io::Result<()> {
        for (path, node) in &self.0 {
            let path = dir.join(path);
            make_folders(path.parent().unwrap_or(dir))?;
            match node {
                Node::File(text) => {
                    let mut how = OpenOptions::new();
                    let mut file = how.write(true).create_new(true).mode(0o444).open(&path)?;
                    file.write_all(text.as_bytes())?;
                }
                Node::Link(to) => symlink(to, &path)?,
            }
        }
        Ok(())
    }
}

/// A machine with one node has all memory near; on other machines no node is nearer than another.
fn numa_node() -> i32 {
    let several = fs::read_to_string("/sys/devices/system/node/online")
        .is_ok_and(|nodes| nodes.trim() != "0");
    if several { -1 } else { 0 }
}

/// The numbers of a list as `0-3,8`.
fn cpus(list: &str) -> Vec<usize> {
    /// More than the kernel supports.
    const MANY: usize = 1 << 16;
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse::<usize>().ok()?.min(MANY))
    });
    ranges.flatten().collect()
}

/// As the kernel shows masks: words of 32 bits with commas between them, the highest first.
fn mask(cpus: &[usize]) -> String {
    let mut words = vec![0_u32; cpus.iter().max().map_or(1, |last| last / 32 + 1)];
    for cpu in cpus {
        words[cpu / 32] |= 1 << (cpu % 32);
    }
    let words: Vec<String> = words.iter().rev().map(|w| format!("{w:08x}")).collect();
    words.join(",")
}

/// Writes the tree of this process' devices, `sys/` and `dev/`, into an existing folder. Returns 0 or an error number.
///
/// # Safety
/// `dir` is a string.
pub unsafe fn weft_sysfs_tree(dir: *const c_char) -> c_int {
    if dir.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the caller's promise.
    let dir = PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(dir) }.to_bytes()));
    let devices: Vec<About> = all_about().collect();
    match Tree::of(&devices).write(&dir) {
        Ok(()) => 0,
        Err(error) => os_errno(&error).raw_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_written_as_the_kernel_does() {
        assert_eq!(cpus("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(cpus(""), []);
        assert_eq!(mask(&cpus("0-3,33")), "00000002,0000000f");
        assert_eq!(mask(&[]), "00000000");
    }

    #[test]
    fn a_device_is_found_from_its_class_and_has_its_parent_above_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = std::ffi::CString::new(dir.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: a string.
        assert_eq!(unsafe { weft_sysfs_tree(path.as_ptr()) }, 0);
        let about: Vec<About> = all_about().collect();
        assert!(!about.is_empty());
        for about in about {
            let name = text(&about.device.name);
            let class = dir.path().join("sys/class/infiniband").join(&name);
            let folder = class.canonicalize().unwrap();
            for file in about.files() {
                let shown = fs::read_to_string(folder.join(&file));
                let said = about.file(&file).map(|text| text + "\n");
                match shown {
                    Ok(shown) => assert_eq!(Some(shown), said, "{name} {file}"),
                    Err(error) => {
                        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{name} {file}");
                        assert_eq!(said, None, "{name} {file}");
                    }
                }
            }
            let parent = class.join("../..").canonicalize().unwrap();
            assert_eq!(class.join("device").canonicalize().unwrap(), parent);
            assert_eq!(folder, parent.join("infiniband").join(&name));
            assert!(parent.join("local_cpulist").exists());
            let uverbs = text(&about.device.dev_name);
            let verbs = dir.path().join("sys/class/infiniband_verbs").join(&uverbs);
            let ibdev = fs::read_to_string(verbs.join("ibdev")).unwrap();
            assert_eq!(ibdev.trim(), name);
            assert!(dir.path().join("dev/infiniband").join(uverbs).exists());
        }
        // A second time something is in the way.
        // SAFETY: a string.
        assert_eq!(unsafe { weft_sysfs_tree(path.as_ptr()) }, libc::EEXIST);
    }
}
