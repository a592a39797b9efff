//! Where the two programs of a case are: beside each other, of two users, or in two network namespaces.

use std::process::Command;

use super::world::World;
use crate::error::{BenchError, Result, failed};

/// What is put before the command lines of server and client, and the server's address.
pub(crate) struct Place {
    pub(crate) server: String,
    pub(crate) client: String,
    pub(crate) address: &'static str,
    #[expect(dead_code, reason = "they end with the place")]
    containers: Option<Containers>,
}

impl Place {
    pub(crate) fn here() -> Self {
        Self {
            server: String::new(),
            client: String::new(),
            address: "127.0.0.1",
            containers: None,
        }
    }

    /// The server is of the first user after root.
    pub(crate) fn of_another_user() -> Self {
        Self {
            server: "env WEFT_RUN_WITH=0 setpriv --reuid=1 --regid=1 --clear-groups ".to_owned(),
            client: "env WEFT_RUN_WITH=1 ".to_owned(),
            // Another one than that of the other cases, as the name of a folder too.
            address: "127.0.0.2",
            containers: None,
        }
    }

    /// The server is in our network namespace, the client in another one, and a bridge in a third.
    pub(crate) fn in_containers(world: &World) -> Result<Self> {
        let containers = Containers::new()?;
        let folder = world.folder("weft")?;
        let shared = format!("env WEFT_LOCAL_DIR={} ", folder.display());
        Ok(Self {
            client: format!("{shared}ip netns exec {} ", containers.client()),
            server: shared,
            address: SERVER,
            containers: Some(containers),
        })
    }
}

const SERVER: &str = "10.77.0.3";

/// A bridge between our network namespace and another one.
struct Containers {
    name: String,
}

impl Containers {
    fn new() -> Result<Self> {
        let name = format!("weft{}", std::process::id());
        let made = Self { name };
        let (host, client, ours) = (made.host(), made.client(), made.link());
        for words in [
            format!("netns add {host}"),
            format!("netns add {client}"),
            format!("-n {host} link add br0 type bridge"),
            format!("-n {host} link set br0 up"),
            format!("-n {host} link add v0 type veth peer name eth0 netns {client}"),
            format!("link add {ours} type veth peer name v1 netns {host}"),
            format!("-n {host} link set v0 master br0 up"),
            format!("-n {host} link set v1 master br0 up"),
            format!("-n {client} addr add 10.77.0.2/24 dev eth0"),
            format!("-n {client} link set eth0 up"),
            format!("-n {client} link set lo up"),
            format!("addr add {SERVER}/24 dev {ours}"),
            format!("link set {ours} up"),
        ] {
            ip(&words)?;
        }
        Ok(made)
    }

    fn host(&self) -> String {
        format!("{}h", self.name)
    }

    fn client(&self) -> String {
        format!("{}c", self.name)
    }

    /// Our end of the bridge.
    fn link(&self) -> String {
        format!("{}v", self.name)
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        // The links end with the namespaces.
        for name in [self.client(), self.host()] {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let done = Command::new("ip").args(words.split(' ')).output();
    let done = done.map_err(BenchError::system("start ip(8)"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(failed(
        "make a network",
        format!("ip {words}: {}", said.trim()),
    ))
}
