//! Servers that fork, execute themselves again, keep many threads or have a language run time; both ends under `weft run`.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_run_tests::{
    PYTHON, Weft, free_port, have, is_root, pattern, plain, python, say, switched, weft,
};

fn helper(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("peers")
        .join(file);
    path.display().to_string()
}

/// Runs a script of the shell.
fn sh(weft: &Weft, script: &str) -> weft_run_tests::Done {
    weft.start_words(&["sh", "-c", script]).end()
}

/// A folder that other users can go through.
fn open_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// Postgres' newest programs of Debian.
fn postgres_bin() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let bins = versions.map(|version| version.path().join("bin"));
    bins.filter(|bin| bin.join("initdb").exists()).max()
}

#[test]
fn postgres_forks_for_each_client_with_and_without_tls() {
    if !have(&[
        ("pgbench", "postgresql"),
        ("openssl", "openssl"),
        ("setpriv", "util-linux"),
    ]) {
        return;
    }
    let Some(bin) = postgres_bin() else {
        return say("postgres skipped: there is no initdb (apt-get install postgresql)");
    };
    let dir = open_dir();
    let home = dir.path().join("pg");
    fs::create_dir(&home).unwrap();
    // It does not run as root.
    let mut user = String::new();
    if is_root() {
        let Ok(owner) = fs::metadata("/var/lib/postgresql") else {
            return say("postgres skipped: there is no user postgres");
        };
        chown(&home, Some(owner.uid()), Some(owner.gid())).unwrap();
        user = format!(
            "setpriv --reuid={} --regid={} --clear-groups env HOME={} ",
            owner.uid(),
            owner.gid(),
            home.display()
        );
    }
    let port = free_port();
    let (bin, shown) = (bin.display(), home.display());
    sh(
        &plain(),
        &format!(
            "set -e; {user}{bin}/initdb -A trust -U bench --no-sync -D {shown}/data >/dev/null
             {user}openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout {shown}/data/server.key -out {shown}/data/server.crt 2>/dev/null
             chmod 600 {shown}/data/server.key
             printf \"listen_addresses = '127.0.0.1'\\nport = {port}\\nunix_socket_directories = '{shown}'\\nfsync = off\\nssl = on\\n\" >> {shown}/data/postgresql.conf"
        ),
    )
    .good();
    let server = weft()
        .start(&format!("{user}{bin}/postgres -D {shown}/data"))
        .listens(port);
    let url = |tls: &str| format!("postgresql://bench@127.0.0.1:{port}/postgres?sslmode={tls}");
    let done = sh(
        &plain(),
        &format!(
            "for n in $(seq 100); do {user}pgbench -i -q -s 1 '{}' && exit 0; sleep 0.1; done; exit 1",
            url("disable")
        ),
    );
    done.good();
    let mut went_over = 0;
    for (tls, over) in [
        ("disable", weft()),
        ("require", weft()),
        ("disable", plain()),
    ] {
        let line = format!("{user}pgbench -n -c 4 -j 2 -t 50 {}", url(tls));
        let done = over.run(&line);
        done.good()
            .says("number of transactions actually processed: 200/200")
            .says("number of failed transactions: 0");
        went_over += switched(&done.text);
        let line = format!("{user}pgbench -n -S -M prepared -c 3 -t 200 {}", url(tls));
        over.run(&line)
            .good()
            .says("number of transactions actually processed: 600/600");
    }
    // The invariant of TPC-B: the branches have the sum of all transactions.
    let ask = "select (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history), \
               (select count(*) from pgbench_history), (select ssl from pg_stat_ssl where pid = pg_backend_pid())";
    let done = weft().start_words(&[
        "sh",
        "-c",
        &format!("{user}psql -At '{}' -c \"{ask}\"", url("require")),
    ]);
    done.end().good().says("t|600|t");
    let served = server.interrupt();
    assert!(!served.text.contains("panicked"), "{}", served.show());
    // The clients' connections go through the rings, with or without TLS; the server's processes end silently.
    assert!(went_over >= 6, "{went_over}");
}

#[test]
fn redis_replicates_and_saves_meanwhile() {
    if !have(&[
        ("redis-server", "redis-server"),
        ("redis-benchmark", "redis-tools"),
    ]) {
        return;
    }
    let dir = open_dir();
    let (one, other) = (free_port(), free_port());
    let start = |port: u16, more: &str| {
        let home = dir.path().join(port.to_string());
        fs::create_dir(&home).unwrap();
        let line = format!(
            "redis-server --port {port} --bind 127.0.0.1 --enable-debug-command local --dir {} {more}",
            home.display()
        );
        weft().start(&line).listens(port)
    };
    let master = start(one, "--repl-diskless-sync-delay 0");
    sh(
        &weft(),
        &format!("redis-benchmark -p {one} -c 10 -n 3000 -r 2000 -d 300 -t set,lpush --csv"),
    )
    .good();
    let replica = start(other, &format!("--replicaof 127.0.0.1 {one}"));
    let done = sh(
        &weft(),
        &format!(
            "set -e
             for n in $(seq 200); do redis-cli -p {other} info replication | grep -q master_link_status:up && break; sleep 0.1; done
             redis-cli -p {one} bgsave
             redis-benchmark -p {one} -c 10 -n 5000 -r 2000 -d 300 -t set,incr,lpush --csv
             head -c 2000000 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {0}/big; redis-cli -p {one} -x set big < {0}/big
             (echo set last 1; echo wait 1 30000) | redis-cli -p {one}
             a=$(redis-cli -p {one} debug digest); b=$(redis-cli -p {other} debug digest); test ${{#a}} = 40; test $a = $b
             redis-cli -p {other} get big | tr -d '\\n' | cmp - {0}/big && echo both the same",
            dir.path().display()
        ),
    );
    done.good()
        .says("Background saving started")
        .says("both the same");
    let (first, second) = (master.interrupt(), replica.interrupt());
    assert!(switched(&second.text) > 0, "{}", second.show());
    assert!(switched(&first.text) > 0, "{}", first.show());
}

#[test]
fn three_redis_servers_are_a_cluster() {
    if !have(&[
        ("redis-server", "redis-server"),
        ("redis-cli", "redis-tools"),
    ]) {
        return;
    }
    let dir = open_dir();
    let ports = [free_port(), free_port(), free_port()];
    let servers: Vec<_> = ports
        .iter()
        .map(|port| {
            let home = dir.path().join(port.to_string());
            fs::create_dir(&home).unwrap();
            let bus = free_port();
            let line = format!(
                "redis-server --port {port} --bind 127.0.0.1 --cluster-enabled yes --cluster-port {bus} --save {{}} --dir {}",
                home.display()
            );
            let words: Vec<&str> = line.split_whitespace().map(|word| if word == "{}" { "" } else { word }).collect();
            weft().start_words(&words).listens(*port)
        })
        .collect();
    let all = ports.map(|port| format!("127.0.0.1:{port}")).join(" ");
    let first = ports[0];
    let done = sh(
        &weft().limit(Duration::from_mins(3)),
        &format!(
            "set -e; redis-cli --cluster create {all} --cluster-yes
             for n in $(seq 300); do ok=0; for p in {}; do redis-cli -p $p cluster info | grep -q cluster_state:ok && ok=$((ok+1)); done; test $ok = 3 && break; sleep 0.1; done
             for n in $(seq 120); do echo set key$n value$n; done | redis-cli -c -p {first} | grep -c OK
             for n in $(seq 120); do echo get key$n; done | redis-cli -c -p {first} | grep -c '^value'
             redis-cli --cluster check 127.0.0.1:{first}",
            ports.map(|port| port.to_string()).join(" ")
        ),
    );
    done.good()
        .says("All 16384 slots covered")
        .says("[OK] All nodes agree about slots configuration.");
    assert_eq!(
        done.text.lines().filter(|line| *line == "120").count(),
        2,
        "{}",
        done.show()
    );
    let over: u32 = servers
        .into_iter()
        .map(|server| switched(&server.interrupt().text))
        .sum();
    // The servers' own bus goes over, too.
    assert!(over > 0);
}

/// A server and a client of one run time, which check all bytes.
fn server_and_client(command: &[&str], says: &str, both: bool) {
    let port = free_port().to_string();
    let with = |role: &'static str| {
        let mut words = command.to_vec();
        words.extend([role, &port]);
        words
            .iter()
            .map(|&word| word.to_owned())
            .collect::<Vec<_>>()
    };
    let start = |weft: &Weft, words: &[String]| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        weft.start_words(&words)
    };
    let limit = Duration::from_mins(3);
    let server = start(&weft().limit(limit), &with("server")).listens(port.parse().unwrap());
    let mut over = 0;
    for client in [weft().limit(limit), plain().limit(limit)] {
        let done = start(&client, &with("client")).end();
        done.good().says(says);
        over += switched(&done.text);
    }
    let served = server.interrupt();
    assert!(!served.text.contains("panicked"), "{}", served.show());
    assert!(over > 0 || !both, "{}", served.show());
}

#[test]
fn node_serves_http_to_node() {
    if have(&[("node", "nodejs")]) {
        server_and_client(&["node", &helper("http.js")], "node: 300 answers", true);
    }
}

#[test]
fn java_serves_http_and_catches_null_pointers_meanwhile() {
    if have(&[
        ("javac", "default-jdk-headless"),
        ("java", "default-jre-headless"),
    ]) {
        let dir = tempfile::tempdir().unwrap();
        let shown = dir.path().display().to_string();
        plain()
            .run(&format!("javac -d {shown} {}", helper("Http.java")))
            .good();
        let words = ["java", "-XX:TieredStopAtLevel=4", "-cp", &shown, "Http"];
        server_and_client(&words, "java: 200 answers, 300000 null pointers", true);
    }
}

#[test]
fn scp_copies_a_file_from_sshd() {
    if !have(&[
        ("/usr/sbin/sshd", "openssh-server"),
        ("scp", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
    ]) {
        return;
    }
    // Privilege separation wants its folder, which Debian's service makes.
    if is_root() && fs::create_dir_all("/run/sshd").is_err() {
        return say("scp skipped: there is no /run/sshd");
    }
    let dir = tempfile::tempdir().unwrap();
    let shown = dir.path().display().to_string();
    let bytes = pattern(5_000_000);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let port = free_port();
    sh(
        &plain(),
        &format!(
            "set -e; cd {shown}; ssh-keygen -q -t ed25519 -N '' -f host; ssh-keygen -q -t ed25519 -N '' -f key; cp key.pub authorized
             printf 'Port {port}\\nListenAddress 127.0.0.1\\nHostKey {shown}/host\\nAuthorizedKeysFile {shown}/authorized\\nStrictModes no\\nUsePAM no\\nPermitRootLogin yes\\nPidFile none\\nSubsystem sftp internal-sftp\\n' > conf"
        ),
    )
    .good();
    let server = weft()
        .start(&format!("/usr/sbin/sshd -D -e -f {shown}/conf"))
        .listens(port);
    let options = format!(
        "-P {port} -i {shown}/key -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes"
    );
    for client in [weft(), plain()] {
        let done = sh(
            &client.limit(Duration::from_secs(90)),
            &format!(
                "scp {options} {shown}/file $(id -un)@127.0.0.1:{shown}/there && scp {options} $(id -un)@127.0.0.1:{shown}/there {shown}/back"
            ),
        );
        done.good();
        for name in ["there", "back"] {
            let path = dir.path().join(name);
            assert!(fs::read(&path).unwrap() == bytes, "{name}");
            fs::remove_file(path).unwrap();
        }
    }
    server.interrupt();
}

#[test]
fn git_clones_from_its_daemon() {
    if !have(&[("git", "git"), ("/usr/lib/git-core/git-daemon", "git")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let shown = dir.path().display().to_string();
    let quiet = "GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null";
    sh(
        &plain(),
        &format!(
            "set -e; export {quiet}; cd {shown}; git init -q repo; cd repo; git config user.name a; git config user.email a@b
             for n in $(seq 30); do head -c 60000 /dev/urandom > f$n; git add f$n; git commit -qm $n; done"
        ),
    )
    .good();
    let port = free_port();
    let server = weft()
        .start(&format!(
            "env {quiet} git daemon --export-all --reuseaddr --listen=127.0.0.1 --port={port} --base-path={shown} {shown}"
        ))
        .listens(port);
    for client in [weft(), plain()] {
        let done = sh(
            &client,
            &format!(
                "set -e; export {quiet}; cd {shown}; rm -rf copy; git clone -q git://127.0.0.1:{port}/repo copy
                 git -C copy fsck --full; test $(git -C copy rev-parse HEAD) = $(git -C repo rev-parse HEAD); diff -r -x .git repo copy; echo same tree"
            ),
        );
        done.good().says("same tree");
    }
    server.interrupt();
}

#[test]
fn bash_talks_by_a_descriptor_of_its_own() {
    if !have(&[("bash", "bash"), PYTHON]) {
        return;
    }
    let port = free_port();
    let server = weft()
        .start(&format!("{} server {port}", python("echo.py")))
        .listens(port);
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{port} || exit 1
         for n in $(seq 40); do echo \"line $n\" >&3; read -r -u 3 got; test \"$got\" = \"line $n\" || exit 2; done
         (echo from a child >&3); read -r -u 3 got; test \"$got\" = 'from a child' || exit 3
         cat <&3 & echo last >&3; sleep 0.2; kill $!; exec 3>&-; echo; echo all lines came back"
    );
    for client in [weft(), plain()] {
        let done = client.start_words(&["bash", "-c", &script]).end();
        done.good().says("all lines came back").says("last");
    }
    server.interrupt();
}

#[test]
fn nginx_reloads_under_load() {
    if !have(&[("/usr/sbin/nginx", "nginx-light"), ("curl", "curl")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (shown, port) = (dir.path().display().to_string(), free_port());
    let user = if is_root() { "user root;" } else { "" };
    fs::write(
        dir.path().join("conf"),
        format!(
            "{user} daemon off; worker_processes 2; pid {shown}/pid; error_log {shown}/error;
             events {{ worker_connections 128; }}
             http {{ access_log off; client_body_temp_path {shown}/b; proxy_temp_path {shown}/p; fastcgi_temp_path {shown}/f;
               uwsgi_temp_path {shown}/u; scgi_temp_path {shown}/s; sendfile on; server {{ listen 127.0.0.1:{port}; root {shown}/www; }} }}"
        ),
    )
    .unwrap();
    fs::create_dir(dir.path().join("www")).unwrap();
    let bytes = pattern(600_000);
    fs::write(dir.path().join("www/file"), &bytes).unwrap();
    let look = |weft: Weft| weft.env("WEFT_RUN_LOOK", "1");
    let nginx = format!("/usr/sbin/nginx -c {shown}/conf -p {shown}");
    let server = look(weft()).start(&nginx).listens(port);
    let url = format!("http://127.0.0.1:{port}/file");
    // Four files by each connection, over again while workers come and go.
    let script = format!(
        "for n in $(seq 25); do curl -sSf {url} {url} {url} {url} -o {shown}/o1 -o {shown}/o2 -o {shown}/o3 -o {shown}/o4 || exit 1
           for o in 1 2 3 4; do cmp {shown}/o$o {shown}/www/file || exit 2; done; done; echo all files came"
    );
    let load = look(weft())
        .limit(Duration::from_mins(2))
        .start_words(&["sh", "-c", &script]);
    for _ in 0..4 {
        plain().run(&format!("{nginx} -s reload")).good();
        std::thread::sleep(Duration::from_millis(150));
    }
    let done = load.end();
    done.good().says("all files came");
    assert!(switched(&done.text) > 0, "{}", done.show());
    server.interrupt();
}

#[test]
fn threads_share_a_set_whose_registrations_fire_once_or_exclusively() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = python("once.py");
    for how in ["oneshot", "exclusive"] {
        let port = free_port();
        let server = weft()
            .start(&format!("{script} server {port} {how}"))
            .listens(port);
        let mut over = 0_u64;
        for client in [weft(), plain()] {
            let done = client.run(&format!("{script} client {port}"));
            done.good().says("once: all bytes came back");
            // Most of the bytes, not only the first.
            let sent = done.text.lines().filter_map(|line| {
                let (before, _) = line.split_once(" B in the ring")?;
                before.rsplit(' ').next()?.parse::<u64>().ok()
            });
            over = over.max(sent.sum());
        }
        assert!(over > 8_000_000, "{how}: {over} bytes in rings");
        let served = server.interrupt();
        served.never_says("two threads have one connection");
        assert!(switched(&served.text) >= 4, "{how}: {}", served.show());
    }
}

#[test]
fn a_signal_handler_uses_the_connection_that_it_interrupts() {
    if !have(&[("cc", "gcc")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("handler");
    let program = program.display();
    plain()
        .run(&format!(
            "cc -O2 -pthread -o {program} {}",
            helper("handler.c")
        ))
        .good();
    for how in ["stream", "datagram"] {
        let done = weft()
            .limit(Duration::from_mins(2))
            .run(&format!("{program} {how}"));
        done.good()
            .says("handler: 40000 rounds, interrupted, 0 other errors");
        assert!(
            switched(&done.text) + weft_run_tests::paths(&done.text) >= 2,
            "{}",
            done.show()
        );
    }
}
