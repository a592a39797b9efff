//! What of a systemd service's sandbox is in the way of `weft run`: a function of the text of `systemctl show`, or of the unit's files.

use std::collections::BTreeMap;
use std::path::Path;

/// The settings of a unit: each name with its lines, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit(BTreeMap<String, Vec<String>>);

/// A line of a unit that concerns `weft run`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The line.
    pub line: String,
    /// What it does.
    pub effect: &'static str,
    /// No connection of the service leaves TCP as long as it is there.
    pub blocks: bool,
}

/// Calls that the library makes, and the groups of calls of systemd that have them.
const CALLS: [(&str, &[&str]); 7] = [
    ("memfd_create", &["@ipc", "@system-service"]),
    ("fallocate", &["@file-system", "@system-service"]),
    ("ftruncate", &["@file-system", "@system-service"]),
    ("fcntl", &["@file-system", "@system-service"]),
    ("socketpair", &["@network-io", "@system-service"]),
    ("sendmsg", &["@network-io", "@system-service"]),
    ("recvmsg", &["@network-io", "@system-service"]),
];

impl Unit {
    /// Adds the text of a file of the unit, or of `systemctl show`: a later line adds to a list, and an empty one empties it.
    pub fn add(&mut self, text: &str) {
        let joined = text.replace("\\\n", " ");
        for line in joined.lines().map(str::trim) {
            let Some((name, value)) = line.split_once('=') else {
                continue;
            };
            let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric());
            if name.is_empty() || !is_name(name) {
                continue;
            }
            let values = self.0.entry(name.to_owned()).or_default();
            if value.is_empty() {
                values.clear();
            } else {
                values.push(value.to_owned());
            }
        }
    }

    /// The lines of a setting.
    pub fn all(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// The last line of a setting.
    pub fn last(&self, name: &str) -> Option<&str> {
        self.all(name).last().map(String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        let on = ["yes", "true", "on", "1"];
        self.last(name).is_some_and(|value| on.contains(&value))
    }

    /// The value of a variable of the service's environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let words = self.all("Environment").iter().rev();
        let mut words = words.flat_map(|line| line.split_whitespace().rev());
        words.find_map(|word| {
            let (key, value) = word.trim_matches('"').split_once('=')?;
            (key == name).then_some(value)
        })
    }

    /// The program of the service.
    pub fn program(&self) -> Option<&str> {
        let line = self.last("ExecStart")?;
        // `systemctl show` has `{ path=/usr/bin/x ; argv[]=... }`.
        let path = match line.split_once("path=") {
            Some((_, rest)) => rest,
            None => line.trim_start_matches(['-', '@', ':', '+', '!', '|']),
        };
        path.split_whitespace().next()
    }

    /// The lines that concern `weft run`, for a library at this place.
    pub fn findings(&self, library: &str) -> Vec<Finding> {
        let mut found = Vec::new();
        self.check_calls(&mut found);
        self.check_families(&mut found);
        let mut say = |name: &str, blocks, effect| {
            let value = self.last(name).unwrap_or_default();
            found.push(Finding {
                line: format!("{name}={value}"),
                effect,
                blocks,
            });
        };
        if self.is_on("PrivateNetwork") {
            say(
                "PrivateNetwork",
                true,
                "the service has a network of its own, in which only its own processes are",
            );
        }
        if self.last("NetworkNamespacePath").is_some() {
            say(
                "NetworkNamespacePath",
                true,
                "the service is in another network namespace: peers outside of it are met through WEFT_LOCAL_DIR only",
            );
        }
        if ["RootDirectory", "RootImage"]
            .iter()
            .any(|name| self.last(name).is_some())
        {
            let name = match self.last("RootImage") {
                Some(_) => "RootImage",
                None => "RootDirectory",
            };
            say(
                name,
                true,
                "the service has another root folder: the library has to be there, at the same path",
            );
        }
        let is_home = ["/home/", "/root/", "/run/user/"]
            .iter()
            .any(|home| library.starts_with(home));
        let hides = ["yes", "true", "on", "1", "tmpfs"];
        if is_home
            && self
                .last("ProtectHome")
                .is_some_and(|value| hides.contains(&value))
        {
            say(
                "ProtectHome",
                true,
                "the service cannot load the library, which is below a home folder",
            );
        }
        if self.forbids_code(library) {
            say(
                "NoExecPaths",
                true,
                "the service cannot load the library: add its folder to `ExecPaths=`",
            );
        }
        if self.is_on("PrivateUsers") {
            say(
                "PrivateUsers",
                false,
                "the service sees the numbers of root and of its own user only: programs of other users are not met",
            );
        }
        if self.is_on("DynamicUser") {
            say(
                "DynamicUser",
                false,
                "the service's user exists while it runs: peers that name it have to be started after it, or use `--with any`",
            );
        }
        let hides = ["invisible", "noaccess", "ptraceable"];
        if self
            .last("ProtectProc")
            .is_some_and(|value| hides.contains(&value))
        {
            say(
                "ProtectProc",
                false,
                "large sends go through the ring, and the end of a killed peer may be noticed later",
            );
        }
        if self.is_on("PrivateTmp") && self.variable("WEFT_LOCAL_DIR").is_some_and(is_below_tmp) {
            say(
                "PrivateTmp",
                true,
                "the folder in WEFT_LOCAL_DIR is not the one of others",
            );
        }
        found
    }

    /// Whether files at this place may not be executed or loaded: the longest path that leads to it decides.
    fn forbids_code(&self, library: &str) -> bool {
        let longest = |name: &str| {
            let paths = self
                .all(name)
                .iter()
                .flat_map(|line| line.split_whitespace());
            let paths = paths.map(|path| Path::new(path.trim_start_matches(['-', '+'])));
            let leading = paths.filter(|path| Path::new(library).starts_with(path));
            leading
                .map(|path| 1 + path.components().count())
                .max()
                .unwrap_or(0)
        };
        longest("NoExecPaths") > longest("ExecPaths")
    }

    fn check_calls(&self, found: &mut Vec<Finding>) {
        let lines = self.all("SystemCallFilter");
        let Some(first) = lines.first() else { return };
        let is_allowed = !first.starts_with('~');
        let mut calls = CALLS.map(|call| (call, !is_allowed, first));
        for line in lines {
            let allows = !line.starts_with('~');
            let words: Vec<_> = line.trim_start_matches('~').split_whitespace().collect();
            // A word may name the error that the call gets.
            let has = |name: &str| {
                words
                    .iter()
                    .any(|word| word.split(':').next() == Some(name))
            };
            for ((name, groups), may, by) in &mut calls {
                if has(name) || groups.iter().any(|group| has(group)) {
                    (*may, *by) = (allows, line);
                }
            }
        }
        let Some((_, _, line)) = calls.iter().find(|(_, may, _)| !may) else {
            return;
        };
        found.push(Finding {
            line: format!("SystemCallFilter={line}"),
            effect: "the service may not make system calls that shared memory needs, such as memfd_create: add `SystemCallFilter=@system-service`",
            blocks: true,
        });
    }

    fn check_families(&self, found: &mut Vec<Finding>) {
        let lines = self.all("RestrictAddressFamilies");
        let Some(first) = lines.first() else { return };
        let mut may = [first.starts_with('~'); 2];
        for line in lines {
            let allows = !line.starts_with('~');
            let words: Vec<_> = line.trim_start_matches('~').split_whitespace().collect();
            for (name, may) in ["AF_UNIX", "AF_NETLINK"].iter().zip(&mut may) {
                if words.contains(name) {
                    *may = allows;
                }
            }
        }
        if may != [true; 2] {
            found.push(Finding {
                line: format!("RestrictAddressFamilies={}", lines.join(" ")),
                effect: "the two ends meet on a Unix socket, and ask the kernel for each other's user by netlink: add `RestrictAddressFamilies=AF_UNIX AF_NETLINK`",
                blocks: true,
            });
        }
    }
}

fn is_below_tmp(folder: &str) -> bool {
    ["/tmp", "/var/tmp"]
        .iter()
        .any(|tmp| folder.starts_with(tmp))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(text: &str) -> Unit {
        let mut unit = Unit::default();
        unit.add(text);
        unit
    }

    /// The names of the lines that are found, with `!` if they block.
    fn found(text: &str) -> String {
        let found = unit(text).findings("/usr/lib/weft/libweft-run.so");
        let names = found.iter().map(|one| {
            let name = one.line.split('=').next().unwrap();
            format!("{name}{}", if one.blocks { "!" } else { "" })
        });
        names.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn lines_that_are_in_the_way_are_named() {
        for (text, names) in [
            ("", ""),
            // As Debian's units of redis and postgres have them.
            (
                "[Service]\nPrivateTmp=yes\nNoNewPrivileges=true\nMemoryDenyWriteExecute=true\nPrivateDevices=yes\nProtectHome=yes",
                "",
            ),
            (
                "RestrictAddressFamilies=AF_INET AF_INET6",
                "RestrictAddressFamilies!",
            ),
            (
                "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
                "RestrictAddressFamilies!",
            ),
            (
                "RestrictAddressFamilies=AF_INET AF_UNIX\nRestrictAddressFamilies=AF_NETLINK",
                "",
            ),
            ("RestrictAddressFamilies=~AF_PACKET", ""),
            (
                "RestrictAddressFamilies=~AF_NETLINK AF_PACKET",
                "RestrictAddressFamilies!",
            ),
            ("RestrictAddressFamilies=none", "RestrictAddressFamilies!"),
            ("SystemCallFilter=@system-service", ""),
            (
                "SystemCallFilter=@system-service\nSystemCallFilter=~@privileged @resources",
                "",
            ),
            (
                "SystemCallFilter=@system-service\nSystemCallFilter=~@ipc",
                "SystemCallFilter!",
            ),
            (
                "SystemCallFilter=@basic-io @network-io @file-system",
                "SystemCallFilter!",
            ),
            (
                "SystemCallFilter=@basic-io @network-io @file-system memfd_create",
                "",
            ),
            ("SystemCallFilter=~@clock @module", ""),
            ("SystemCallFilter=~memfd_create:EPERM", "SystemCallFilter!"),
            ("SystemCallFilter=@basic-io\nSystemCallFilter=", ""),
            (
                "SystemCallFilter=fallocate fcntl ftruncate \\\n memfd_create socketpair sendmsg recvmsg",
                "",
            ),
            ("PrivateNetwork=yes", "PrivateNetwork!"),
            (
                "PrivateNetwork=no\nDynamicUser=no\nPrivateUsers=no\nProtectProc=default",
                "",
            ),
            ("NetworkNamespacePath=/run/netns/x", "NetworkNamespacePath!"),
            ("RootDirectory=/srv/x", "RootDirectory!"),
            ("RootImage=/srv/x.raw", "RootImage!"),
            (
                "DynamicUser=yes\nPrivateUsers=yes\nProtectProc=invisible",
                "PrivateUsers DynamicUser ProtectProc",
            ),
            (
                "PrivateTmp=yes\nEnvironment=A=b WEFT_LOCAL_DIR=/tmp/weft",
                "PrivateTmp!",
            ),
            ("PrivateTmp=yes\nEnvironment=WEFT_LOCAL_DIR=/run/weft", ""),
        ] {
            assert_eq!(found(text), names, "{text}");
        }
        for (paths, is_in_the_way) in [
            ("NoExecPaths=/", true),
            ("NoExecPaths=/\nExecPaths=/usr/bin/x /usr/lib", false),
            ("NoExecPaths=/ -/usr/lib/weft\nExecPaths=/usr/lib", true),
            ("NoExecPaths=/usr/li /srv", false),
        ] {
            let found = unit(paths).findings("/usr/lib/weft/libweft-run.so");
            assert_eq!(!found.is_empty(), is_in_the_way, "{paths}");
        }
        let home = unit("ProtectHome=yes").findings("/home/joe/libweft-run.so");
        assert_eq!(home[0].line, "ProtectHome=yes");
    }

    #[test]
    fn programs_and_variables_are_read_from_files_and_from_what_systemctl_shows() {
        let shown = "ExecStart={ path=/usr/bin/redis-server ; argv[]=/usr/bin/redis-server /etc/redis.conf ; ignore_errors=no }\nEnvironment=LD_PRELOAD=/a.so X=1";
        let file = "[Service]\nEnvironment=\"X=0\"\nEnvironment=X=1 LD_PRELOAD=/a.so\nExecStart=\nExecStart=-/usr/bin/redis-server /etc/redis.conf";
        for text in [shown, file] {
            let unit = unit(text);
            assert_eq!(unit.program(), Some("/usr/bin/redis-server"), "{text}");
            assert_eq!(unit.variable("LD_PRELOAD"), Some("/a.so"));
            assert_eq!(unit.variable("X"), Some("1"));
            assert_eq!(unit.variable("Y"), None);
        }
    }
}
