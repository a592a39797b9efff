//! Hosts of a job: network namespaces with host names of their own, and a program in place of ssh that goes there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use weft_link::{LinkError, Namespace, Network, Shape, host_address};

/// A program in the namespace of the calling thread: UCX looks for its interfaces in `/sys`, which has those of the namespace in which it was mounted.
pub(super) fn surrounded(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c"]);
    command.args(["mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"", program]);
    command
}

pub(super) struct Hosts {
    network: Network,
    count: u8,
    agent: PathBuf,
}

impl Hosts {
    /// `folder` is for the program.
    pub(super) fn new(shape: Shape, mtu: u32, count: u8, folder: &Path) -> Result<Self, LinkError> {
        let network = Network::new(shape, mtu, count)?;
        let case = |(host, namespace): (u8, &Namespace)| {
            let (ip, net) = (host_address(host), namespace.path());
            format!("{ip}) net={} name=host{host} ;;", net.display())
        };
        let cases: Vec<String> = (0..count).zip(network.hosts()).map(case).collect();
        let text = format!(
            "#!/bin/sh\n\
            # As ssh does it: a shell there, and an environment of a few variables.\n\
            while case $1 in -*) true ;; *) false ;; esac; do shift; done\n\
            case $1 in\n\
            {}\n\
            *) echo \"no host $1\" >&2; exit 255 ;;\n\
            esac\n\
            shift\n\
            exec env -i HOME=\"$HOME\" PATH=/usr/bin:/bin nsenter --net=$net unshare --uts --mount sh -c 'hostname \"$0\" && mount -t sysfs sysfs /sys && eval \"$1\"' $name \"$*\"\n",
            cases.join("\n")
        );
        let agent = folder.join(format!("agent-{count}"));
        let written = fs::write(&agent, text)
            .and_then(|()| fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)));
        written.map_err(|source| LinkError::System {
            what: "write a file",
            source,
        })?;
        Ok(Self {
            network,
            count,
            agent,
        })
    }

    pub(super) fn count(&self) -> u8 {
        self.count
    }

    /// The host on which mpirun runs.
    pub(super) fn first(&self) -> &Namespace {
        &self.network.hosts()[0]
    }

    pub(super) fn agent(&self) -> &Path {
        &self.agent
    }

    /// With commas, and with this behind each.
    pub(super) fn addresses(&self, behind: &str) -> String {
        let all = (0..self.count).map(|host| format!("{}{behind}", host_address(host)));
        all.collect::<Vec<_>>().join(",")
    }
}
