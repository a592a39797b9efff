//! Containers of one host: network namespaces on a bridge, with a folder that both have, and processes of one network namespace in other PID namespaces.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use weft_run_tests::{
    Done, PYTHON, Weft, free_port, have, is_root, plain, python, say, switched, weft,
};

use crate::users::{USERS, by, with};

fn ip(words: &str) -> bool {
    let done = Command::new("ip").args(words.split(' ')).output();
    done.is_ok_and(|done| done.status.success())
}

/// Two containers on a bridge, and the host's side of it: addresses 10.78.N.2 and .3, and .1.
struct Net {
    name: String,
    number: u32,
    /// The address of the server's container.
    server: String,
}

impl Net {
    /// `None`, and it says so, where that cannot be made.
    fn new() -> Option<Net> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        if !is_root() || !have(&[PYTHON, ("ip", "iproute2"), ("iptables", "iptables")]) {
            return None;
        }
        let number = NUMBER.fetch_add(1, Relaxed);
        let net = Net {
            name: format!("weft{}n{number}", std::process::id()),
            number,
            server: format!("10.78.{number}.3"),
        };
        let [host, a, b] = [net.host(), net.a(), net.b()];
        let is_made = [&host, &a, &b]
            .iter()
            .all(|name| ip(&format!("netns add {name}")))
            && ip(&format!("-n {host} link add br0 type bridge"))
            && ip(&format!("-n {host} addr add {}/24 dev br0", net.addr(1)))
            && ip(&format!("-n {host} link set br0 up"))
            && ip(&format!("-n {host} link set lo up"))
            && [(&a, 2), (&b, 3)].iter().all(|(inner, last)| {
                ip(&format!(
                    "-n {host} link add v{last} type veth peer name eth0 netns {inner}"
                )) && ip(&format!("-n {host} link set v{last} master br0 up"))
                    && ip(&format!(
                        "-n {inner} addr add {}/24 dev eth0",
                        net.addr(*last)
                    ))
                    && ip(&format!("-n {inner} link set eth0 up"))
                    && ip(&format!("-n {inner} link set lo up"))
                    && ip(&format!("-n {inner} route add default via {}", net.addr(1)))
            });
        if !is_made {
            say("skipped: no bridge between network namespaces can be made here");
            return None;
        }
        Some(net)
    }

    /// Gives the server's container a network of its own, so that all between the two goes by the host.
    fn set_apart(&mut self) {
        let [host, b, number] = [self.host(), self.b(), self.number.to_string()];
        self.server = format!("10.79.{number}.3");
        for words in [
            format!("-n {host} link set v3 nomaster"),
            format!("-n {host} addr add 10.79.{number}.1/24 dev v3"),
            format!("-n {b} addr flush dev eth0"),
            format!("-n {b} addr add 10.79.{number}.3/24 dev eth0"),
            format!("-n {b} route add default via 10.79.{number}.1"),
        ] {
            assert!(ip(&words), "{words}");
        }
    }

    fn addr(&self, last: u32) -> String {
        format!("10.78.{}.{last}", self.number)
    }

    fn host(&self) -> String {
        format!("{}h", self.name)
    }

    fn a(&self) -> String {
        format!("{}a", self.name)
    }

    fn b(&self) -> String {
        format!("{}b", self.name)
    }

    /// The host translates addresses. `false`: it cannot.
    fn translate(&self, rule: &str) -> bool {
        let words = format!("netns exec {} iptables -t nat {rule}", self.host());
        let forwards = format!(
            "netns exec {} sysctl -qw net.ipv4.ip_forward=1",
            self.host()
        );
        let can = ip(&forwards) && ip(&words);
        if !can {
            say("skipped: addresses cannot be translated here");
        }
        can
    }

    /// A server in one container and a client in the other, which calls this address. What both say.
    fn echo(
        &self,
        [server, client]: [&Weft; 2],
        called: (&str, u16),
        kind: &str,
        users: [u32; 2],
    ) -> [Done; 2] {
        const PORT: u16 = 8000;
        let script = python("containers.py");
        let line = format!("{script} server {} {PORT} 6", self.server);
        let serving = server.start(&format!(
            "ip netns exec {} {}",
            self.b(),
            by(users[0], &line)
        ));
        let line = format!("{script} client {} {} {kind} 6", called.0, called.1);
        let done = client.run(&format!(
            "ip netns exec {} {}",
            self.a(),
            by(users[1], &line)
        ));
        done.good().says("all bytes came back");
        let served = serving.end();
        served.good();
        [served, done]
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for name in [self.host(), self.a(), self.b()] {
            ip(&format!("netns del {name}"));
        }
    }
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    dir
}

fn through(weft: Weft, folder: &Path) -> Weft {
    weft.env("WEFT_LOCAL_DIR", folder)
}

/// All connections of both sides are on rings, and nothing is left in the folder.
fn all_on_rings(sides: &[Done; 2], folder: &Path) {
    for side in sides {
        assert_eq!(switched(&side.text), 6, "{}", side.show());
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
}

#[test]
fn two_containers_with_a_folder_share_rings() {
    let Some(net) = Net::new() else { return };
    let folder = folder();
    let side = through(weft(), folder.path());
    let called = net.addr(3);
    let sides = net.echo([&side, &side], (&called, 8000), "plain", [0, 0]);
    all_on_rings(&sides, folder.path());
    // Two users do not meet by a folder, also if they name each other.
    let [one, other] = USERS;
    let (server, client) = (
        through(with(other), folder.path()),
        through(with(one), folder.path()),
    );
    let sides = net.echo([&server, &client], (&called, 8000), "plain", [one, other]);
    assert_eq!(sides.map(|side| switched(&side.text)), [0, 0]);
    // One side without the folder, or without weft.
    for server in [weft(), plain()] {
        let sides = net.echo([&server, &side], (&called, 8000), "plain", [0, 0]);
        assert_eq!(sides.map(|side| switched(&side.text)), [0, 0]);
    }
}

#[test]
fn a_published_port_is_followed_if_the_stream_begins_as_tls_does() {
    let Some(mut net) = Net::new() else { return };
    let folder = folder();
    let side = through(weft(), folder.path());
    net.set_apart();
    let (gate, inner) = (net.addr(1), net.server.clone());
    let publish = format!("-A PREROUTING -d {gate} -p tcp --dport 9000 -j DNAT --to {inner}:8000");
    if !net.translate(&publish) {
        return;
    }
    let sides = net.echo([&side, &side], (&gate, 9000), "tls", [0, 0]);
    all_on_rings(&sides, folder.path());
    let sides = net.echo([&side, &side], (&gate, 9000), "plain", [0, 0]);
    assert_eq!(sides.map(|side| switched(&side.text)), [0, 0]);
}

#[test]
fn masqueraded_connections_are_followed_if_they_begin_as_tls_does() {
    let Some(net) = Net::new() else { return };
    let folder = folder();
    let side = through(weft(), folder.path());
    let (gate, inner) = (net.addr(1), net.addr(3));
    let publish = format!("-A PREROUTING -d {gate} -p tcp --dport 9000 -j DNAT --to {inner}:8000");
    let masquerade = format!("-A POSTROUTING -d {inner} -p tcp --dport 8000 -j MASQUERADE");
    if !net.translate(&publish) || !net.translate(&masquerade) {
        return;
    }
    let sides = net.echo([&side, &side], (&gate, 9000), "tls", [0, 0]);
    all_on_rings(&sides, folder.path());
    let sides = net.echo([&side, &side], (&gate, 9000), "plain", [0, 0]);
    assert_eq!(sides.map(|side| switched(&side.text)), [0, 0]);
}

#[test]
fn connections_that_could_be_one_another_stay_on_tcp() {
    let Some(mut net) = Net::new() else { return };
    let folder = folder();
    let side = through(weft(), folder.path());
    net.set_apart();
    let (gate, inner) = (net.addr(1), net.server.clone());
    let publish = format!("-A PREROUTING -d {gate} -p tcp --dport 9000 -j DNAT --to {inner}:8000");
    if !net.translate(&publish) {
        return;
    }
    let [server, client] = ["containers.py", "twins.py"].map(python);
    // The peer of the first connection is not there to be found, and that of the second one has its name.
    let servers = [(8000, plain()), (8001, through(weft(), folder.path()))].map(|(port, side)| {
        let line = format!("ip netns exec {} {server} server {inner} {port} 1", net.b());
        side.start(&line)
    });
    let line = format!("{client} {gate} 9000 {inner} 8001");
    let done = side.run(&format!("ip netns exec {} {line}", net.a()));
    done.good().says("all bytes came back");
    assert_eq!(switched(&done.text), 1, "{}", done.show());
    for server in servers {
        server.end().good();
    }
}

/// As in one network namespace: TCP's end has come before what follows from the peer's death.
#[test]
fn ends_that_have_begun_to_close_do_not_meet() {
    let Some(net) = Net::new() else { return };
    let folder = folder();
    let second = net.addr(4);
    assert!(ip(&format!("-n {} addr add {second}/24 dev eth0", net.a())));
    let line = python(&format!("half_end.py {second} {}", net.addr(2)));
    for side in [plain(), through(weft(), folder.path())] {
        let done = side.run(&format!("ip netns exec {} {line}", net.a()));
        done.good().says("then b''");
    }
}

#[test]
fn processes_of_one_pod_need_no_folder() {
    if !is_root() || !have(&[PYTHON, ("unshare", "util-linux")]) {
        return;
    }
    for spaces in [
        "--pid --fork --mount-proc",
        "--pid --fork --user --map-root-user",
    ] {
        let port = free_port();
        let line = |side: &str| format!("unshare {spaces} {} {side} {port}", python("echo.py"));
        // In another user namespace it is as another user, if the kernel shows it.
        let side = weft().env("WEFT_RUN_WITH", "any");
        let serving = side.start(&line("server")).listens(port);
        let done = side.run(&line("client"));
        done.good().says("all bytes came back");
        let served = serving.interrupt();
        assert_eq!(switched(&done.text), 8, "{}{}", done.show(), served.show());
    }
}
