//! Unmodified programs, with both ends or one under `weft run`: they accept the data received, and the process reports that it went through the rings.

use std::fmt::Write as _;
use std::fs;

use weft_run_tests::{
    Done, PYTHON, free_port, have, iperf3, is_root, pattern, plain, python, same_lines, say,
    switched, weft,
};

/// A client of a server that runs until it is interrupted: with both, and with either, on the rings.
fn with_and_without(server: &str, client: &str, check: impl Fn(&Done)) {
    let start = |side: &weft_run_tests::Weft, port: u16| {
        let line = server.replace("PORT", &port.to_string());
        side.start(&line).listens(port)
    };
    let end = |server: weft_run_tests::Running| server.interrupt();
    weft_run_tests::with_and_without(start, client, end, switched, check);
}

#[test]
fn calls_of_all_shapes_are_as_on_tcp() {
    if !have(&[PYTHON]) {
        return;
    }
    let line = python("shapes.py");
    let expected = plain().run(&line);
    expected.good().says("shapes: ");
    let done = weft().run(&line);
    done.good();
    let checks = |done: &Done| {
        let line = done.text.lines().find(|line| line.starts_with("shapes: "));
        line.map(str::to_owned)
    };
    assert_eq!(checks(&done), checks(&expected));
    assert!(switched(&done.text) > 20, "{}", done.show());
}

#[test]
fn a_setting_that_is_not_accepted_is_named_and_leaves_plain_tcp() {
    if !have(&[PYTHON]) {
        return;
    }
    for (name, value) in [("WEFT_RUN", "foo"), ("WEFT_RUN_LOOK", "soon")] {
        let done = weft().env(name, value).run(&python("shapes.py"));
        done.good()
            .says("shapes: ")
            .says(&format!("{name}={value}: it has to be"));
        assert_eq!(switched(&done.text), 0, "{}", done.show());
    }
}

#[test]
fn asyncio_echoes_each_byte() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = python("echo.py");
    let line = |role| format!("{script} {role} PORT");
    with_and_without(&line("server"), &line("client"), |done| {
        done.says("all bytes came back");
    });
}

#[test]
fn iperf3_moves_data_both_ways() {
    if !have(&[("iperf3", "iperf3")]) {
        return;
    }
    let client = "iperf3 -c 127.0.0.1 -p PORT -n 40M -l 128K --forceflush";
    let mut went_over = 0;
    for options in ["", " -R", " -P 3", " --bidir -n 10M"] {
        let (server, port) = iperf3(&weft());
        let client = client.replace("PORT", &port.to_string()) + options;
        let done = weft().run(&client);
        done.good().says("iperf Done.");
        went_over += switched(&done.text);
        server.end().good();
    }
    // A sender that never stops is followed when there is a moment between two sends; on a busy machine not each time.
    assert!(went_over > 0);
    for (server_side, client_side) in [(plain(), weft()), (weft(), plain())] {
        let (server, port) = iperf3(&server_side);
        let done = client_side.run(&client.replace("PORT", &port.to_string()));
        done.good().says("iperf Done.");
        assert_eq!(switched(&done.text) + switched(&server.end().text), 0);
    }
}

#[test]
fn redis_answers_the_benchmark_and_saves_in_a_child() {
    if !have(&[
        ("redis-server", "redis-server"),
        ("redis-benchmark", "redis-tools"),
    ]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let server = format!(
        "redis-server --port PORT --dir {} --save ",
        dir.path().display()
    ) + "3600 1";
    with_and_without(
        &server,
        "redis-benchmark -p PORT -n 1500 -c 20 -t set,get,lpush,lrange_100,mset --csv",
        |done| {
            let rows = done
                .text
                .lines()
                .filter(|l| l.starts_with('"') && !l.contains("test"));
            assert!(rows.count() >= 5, "{}", done.show());
            done.never_says("ERR");
        },
    );
    // A value larger than a ring, read back; a save in a forked child while the connection is on the rings.
    let port = free_port();
    let line = server.replace("PORT", &port.to_string());
    let running = weft().dir(dir.path()).start(&line).listens(port);
    let script = dir.path().join("commands.sh");
    fs::write(
        &script,
        format!(
            "set -e; head -c 3000000 /dev/zero | tr '\\0' v > big
             (echo \"SET small 1\"; for n in 1 2 3 4 5 6 7 8; do echo \"INCR counter\"; done; echo BGSAVE; \
              for n in 1 2 3 4; do echo \"INCR counter\"; done; echo \"GET counter\") | redis-cli -p {port}
             redis-cli -p {port} -x SET big < big
             redis-cli -p {port} GET big | tr -d '\\n' | cmp - big && echo same
             redis-cli -p {port} INCR counter"
        ),
    )
    .unwrap();
    let done = weft()
        .dir(dir.path())
        .run(&format!("sh {}", script.display()));
    done.good()
        .says("Background saving started")
        .says("same")
        .says("12")
        .says("13");
    running.interrupt();
    assert!(dir.path().join("dump.rdb").exists());
}

#[test]
fn memcached_keeps_values() {
    if !have(&[("memcached", "memcached"), PYTHON]) {
        return;
    }
    let client = format!("{} PORT", python("memcached.py"));
    with_and_without(
        "memcached -u root -l 127.0.0.1 -p PORT -t 2",
        &client,
        |done| {
            done.says("memcached: 400 values");
        },
    );
}

#[test]
fn socat_pipes_files_through() {
    if !have(&[("socat", "socat")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let bytes = pattern(8_000_000);
    fs::write(&from, &bytes).unwrap();
    let port = free_port();
    let server = weft()
        .start(&format!(
            "socat -u TCP-LISTEN:{port},reuseaddr CREATE:{}",
            to.display()
        ))
        .listens(port);
    weft()
        .run(&format!(
            "socat -u OPEN:{} TCP:127.0.0.1:{port}",
            from.display()
        ))
        .good();
    server.end().good();
    assert!(fs::read(&to).unwrap() == bytes, "the file is another one");
}

#[test]
fn rsync_copies_a_tree_from_its_daemon() {
    if !have(&[("rsync", "rsync")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    fs::create_dir(&from).unwrap();
    let big = pattern(4_000_000);
    fs::write(from.join("big"), &big).unwrap();
    for n in 0..50 {
        fs::write(from.join(n.to_string()), n.to_string()).unwrap();
    }
    let config = dir.path().join("conf");
    let mut text = format!(
        "use chroot = no\npid file = {}\n",
        dir.path().join("pid").display()
    );
    if is_root() {
        text += "uid = root\ngid = root\n";
    }
    writeln!(text, "[m]\npath = {}", from.display()).unwrap();
    fs::write(&config, text).unwrap();
    let port = free_port();
    let line = format!(
        "rsync --daemon --no-detach --address 127.0.0.1 --port {port} --config {}",
        config.display()
    );
    let running = weft().start(&line).listens(port);
    let done = weft().run(&format!(
        "rsync -r rsync://127.0.0.1:{port}/m/ {}",
        to.display()
    ));
    // Its client forks early, and two processes share the socket: whether the ends have met before is a matter of time.
    done.good();
    assert!(fs::read(to.join("big")).unwrap() == big);
    assert_eq!(fs::read(to.join("49")).unwrap(), b"49");
    running.interrupt();
}

#[test]
fn the_ledger_of_a_running_process_is_read() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = "import socket, sys, time
l = socket.create_server(('127.0.0.1', 0)); a = socket.create_connection(l.getsockname()); b, _ = l.accept()
for n in range(20):
    a.sendall(b'ping'); b.recv(4); b.sendall(b'pong'); a.recv(4)
print('ready', __import__('os').getpid(), flush=True)
time.sleep(60)";
    let running = weft().start_words(&[PYTHON.0, "-c", script]);
    let begun = std::time::Instant::now();
    let pid = loop {
        let text = running.text();
        let said = text
            .strip_prefix("ready ")
            .and_then(|rest| rest.strip_suffix('\n'));
        if let Some(pid) = said {
            break pid.parse().unwrap();
        }
        assert!(begun.elapsed().as_secs() < 30, "{text}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let ledger = weft_run::ledger::of_process(pid).unwrap().unwrap();
    assert_eq!(
        (ledger.pid, ledger.totals[0], ledger.rows.len()),
        (pid, 2, 2)
    );
    for row in &ledger.rows {
        assert_eq!(
            (row.via(), row.ring.0 + row.tcp.0),
            ("rings", 80),
            "{row:?}"
        );
        assert!(row.ring.0 > 40 && !row.closed, "{row:?}");
    }
    running.kill();
}

#[test]
fn http_server_sends_files_to_curl() {
    if !have(&[("curl", "curl"), PYTHON]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(3_000_000);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let port = free_port();
    let line = format!(
        "{} -m http.server -b 127.0.0.1 -d {} {port}",
        PYTHON.0,
        dir.path().display()
    );
    let running = weft().start(&line).listens(port);
    for n in 0..5 {
        let out = dir.path().join(format!("out{n}"));
        let client = format!(
            "curl -sSf -o {} http://127.0.0.1:{port}/file",
            out.display()
        );
        (if n == 3 { plain() } else { weft() }).run(&client).good();
        assert!(fs::read(out).unwrap() == bytes);
    }
    running.interrupt();
}

const NGINX: &str = "daemon off; worker_processes 2; pid DIR/pid; error_log DIR/error;
events { worker_connections 256; }
http { access_log off; client_body_temp_path DIR/b; proxy_temp_path DIR/p; fastcgi_temp_path DIR/f; uwsgi_temp_path DIR/u; scgi_temp_path DIR/s;
  sendfile on; keepalive_requests 100000;
  server { listen 127.0.0.1:PORT reuseport; root DIR/www; } }";

#[test]
fn nginx_serves_files_with_keep_alive_and_survives_a_reload() {
    if !have(&[
        ("/usr/sbin/nginx", "nginx-light"),
        ("curl", "curl"),
        ("wrk", "wrk"),
    ]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // nginx's workers are another user, when it runs as root; then they do not meet root's curl, and the files have to be theirs to read.
    let port = free_port();
    let shown = dir.path().display().to_string();
    let mut config = NGINX
        .replace("DIR", &shown)
        .replace("PORT", &port.to_string());
    if is_root() {
        config = format!("user root; {config}");
    }
    let www = dir.path().join("www");
    fs::create_dir(&www).unwrap();
    fs::write(www.join("small"), vec![b's'; 612]).unwrap();
    let big = pattern(2_500_000);
    fs::write(www.join("big"), &big).unwrap();
    fs::write(dir.path().join("conf"), config).unwrap();
    let line = format!("/usr/sbin/nginx -c {shown}/conf -p {shown}");
    let running = weft().start(&line).listens(port);
    let url = format!("http://127.0.0.1:{port}");
    let many = vec![format!("{url}/big"); 8].join(" ");
    let done = weft().run(&format!("curl -sSf {many}"));
    assert!(done.good().text.len() > 100);
    let out = dir.path().join("out");
    for client in [weft(), plain()] {
        client
            .run(&format!("curl -sSf -o {} {url}/big", out.display()))
            .good();
        assert!(fs::read(&out).unwrap() == big);
    }
    let wrk = weft().run(&format!("wrk -t 1 -c 16 -d 3 {url}/small"));
    wrk.good()
        .says("requests in")
        .never_says("Socket errors")
        .never_says("Non-2xx");
    assert!(switched(&wrk.text) > 0, "{}", wrk.show());
    plain()
        .run(&format!(
            "/usr/sbin/nginx -c {shown}/conf -p {shown} -s reload"
        ))
        .good();
    let wrk = weft().run(&format!("wrk -t 1 -c 8 -d 1 {url}/big"));
    wrk.good().says("requests in").never_says("Non-2xx");
    running.interrupt();
}

const HAPROXY: &str = "global
  maxconn 200
defaults
  mode http
  timeout connect 20s
  timeout client 20s
  timeout server 20s
frontend f
  bind 127.0.0.1:PORT
  default_backend b
backend b
  server one 127.0.0.1:BACK
";

#[test]
fn haproxy_stands_between_accelerated_and_plain_ends() {
    if !have(&[
        ("/usr/sbin/haproxy", "haproxy"),
        ("wrk", "wrk"),
        PYTHON,
        ("curl", "curl"),
    ]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bytes = pattern(1_000_000);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let (port, back) = (free_port(), free_port());
    let config = dir.path().join("conf");
    let text = HAPROXY
        .replace("PORT", &port.to_string())
        .replace("BACK", &back.to_string());
    fs::write(&config, text).unwrap();
    let line = format!(
        "{} -m http.server -b 127.0.0.1 -d {} {back}",
        PYTHON.0,
        dir.path().display()
    );
    let server = plain().start(&line).listens(back);
    let proxy = weft()
        .start(&format!("/usr/sbin/haproxy -db -f {}", config.display()))
        .listens(port);
    for client in [weft(), plain(), weft()] {
        let out = dir.path().join("out");
        let line = format!(
            "curl -sSf -o {} http://127.0.0.1:{port}/file",
            out.display()
        );
        client.run(&line).good();
        assert!(fs::read(&out).unwrap() == bytes);
    }
    let wrk = weft().run(&format!("wrk -t 1 -c 4 -d 1 http://127.0.0.1:{port}/file"));
    wrk.good().says("requests in").never_says("Non-2xx");
    proxy.interrupt();
    server.interrupt();
}

/// A FIN that the kernel has to send again, as it does on one host where TCP's memory is short.
#[test]
fn an_end_that_comes_late_is_an_end() {
    if !have(&[PYTHON, ("unshare", "util-linux"), ("ip", "iproute2")]) {
        return;
    }
    let line = format!("unshare --net {}", python("late_end.py"));
    let expected = plain().run(&line);
    if !expected.is_good() {
        return say("skipped: no network namespaces");
    }
    expected.says("end: b''");
    weft().run(&line).good().says("end: b''");
}

#[test]
fn a_connection_that_the_kernel_ends_is_at_its_end() {
    if !have(&[PYTHON, ("ss", "iproute2")]) || !is_root() {
        return;
    }
    let line = python("aborted.py");
    let expected = plain().run(&line);
    if expected.text.contains("cannot be ended") {
        say("skipped: the kernel cannot end a connection (SOCK_DESTROY)");
        return;
    }
    expected.good().never_says("hangs");
    let done = weft().run(&line);
    same_lines(&expected.text, &done.good().text, "aborted.py");
    assert_eq!(switched(&done.text), 12, "{}", done.show());
}

/// The bytes left in the ring go back to TCP, in front of later ones.
#[test]
fn a_program_that_is_executed_with_unread_bytes_gets_them() {
    if !have(&[PYTHON]) {
        return;
    }
    let line = python("unread.py");
    plain().run(&line).good().says("unread: 990 bytes");
    weft().run(&line).good().says("unread: 990 bytes");
}
