//! ibverbs-utils: programs that exchange GID and queue pair number over a socket, without `rdma_cm`: the persona is for them.

use weft_dropin::{Weft, free_port, have, pair};

use super::carriers;
use super::faults::made;

/// Both sides sleep while they wait: in `ibv_get_cq_event`, or in their own `epoll` on the channel's descriptor.
#[test]
fn programs_that_sleep_are_woken_for_each_message() {
    let Some((_dir, program)) = made("asleep") else {
        return;
    };
    for weft in carriers("weft_ib0") {
        for how in ["event", "epoll", "poll"] {
            let port = free_port();
            let line = |side| format!("{program} {side} {port} {how} 400");
            let (server, client) = pair(&weft, port, &line("server"), &line("client"));
            server.good();
            client.good().says(&format!("{how} 64 B: median"));
        }
    }
}

fn pingpong(program: &str, weft: &Weft, options: &str, rounds: &str) {
    if !have(&[(program, "ibverbs-utils")]) {
        return;
    }
    let port = free_port();
    let line = format!("{program} -d weft_ib0 -g 0 -p {port} {options}");
    let (server, client) = pair(weft, port, &line, &format!("{line} 127.0.0.1"));
    for done in [server, client] {
        done.says(" Mbit/sec")
            .says(&format!("{rounds} iters in"))
            .never_says("invalid data");
    }
}

#[test]
fn ibv_rc_pingpong() {
    for weft in carriers("weft_ib0") {
        pingpong("ibv_rc_pingpong", &weft, "-c", "1000");
        pingpong("ibv_rc_pingpong", &weft, "-c -e -n 300", "300");
    }
}

#[test]
fn ibv_rc_pingpong_beyond_one_segment() {
    for weft in carriers("weft_ib0") {
        pingpong("ibv_rc_pingpong", &weft, "-c -s 1000000 -n 50", "50");
    }
}

/// `ibv_wr_*`, the newer way of posting.
#[test]
fn ibv_rc_pingpong_posts_in_the_new_way() {
    pingpong("ibv_rc_pingpong", &Weft::on("weft_ib0"), "-c -N", "1000");
}

/// `ibv_start_poll`, with time stamps.
#[test]
fn ibv_rc_pingpong_with_time_stamps() {
    pingpong("ibv_rc_pingpong", &Weft::on("weft_ib0"), "-t", "1000");
}

#[test]
fn ibv_srq_pingpong() {
    for weft in carriers("weft_ib0") {
        pingpong("ibv_srq_pingpong", &weft, "-c -n 100", "100");
        pingpong("ibv_srq_pingpong", &weft, "-c -e -q 4 -n 50", "50");
    }
}

/// Datagrams, up to the longest.
#[test]
fn ibv_ud_pingpong() {
    for options in ["-n 500", "-e -n 200", "-s 4096 -n 200"] {
        let rounds = options.rsplit(' ').next().unwrap();
        pingpong("ibv_ud_pingpong", &Weft::on("weft_ib0"), options, rounds);
    }
}

#[test]
fn ibv_uc_pingpong() {
    for weft in carriers("weft_ib0") {
        pingpong("ibv_uc_pingpong", &weft, "-c", "1000");
    }
}

/// iWARP's queue pairs are connected by `rdma_cm`: the log names the remedy.
#[test]
fn ibv_rc_pingpong_is_told_what_to_do_on_iwarp() {
    if !have(&[("ibv_rc_pingpong", "ibverbs-utils")]) {
        return;
    }
    let port = free_port();
    let line = format!("ibv_rc_pingpong -d weft0 -g 0 -p {port}");
    let weft = Weft::on("weft0").env("WEFT_LOG", "warn");
    let server = weft.start(&line).listens(port);
    // It fails too, because there is no answer.
    weft.run(&format!("{line} 127.0.0.1"));
    let server = server.end();
    assert_eq!(server.code(), 1, "{}", server.show());
    server
        .says("`-R` of perftest")
        .says("`-d weft_ib0` of most programs");
}

/// iWARP has no datagram queue pairs: the program reports that and ends.
#[test]
fn ibv_ud_pingpong_is_refused_on_iwarp() {
    if !have(&[("ibv_ud_pingpong", "ibverbs-utils")]) {
        return;
    }
    let done = Weft::on("weft0").run("ibv_ud_pingpong -d weft0");
    assert_eq!(done.code(), 1, "{}", done.show());
    done.says("Couldn't create QP");
}

/// XRC: each message names the shared receive queue that it is for.
#[test]
fn ibv_xsrq_pingpong() {
    if !have(&[("ibv_xsrq_pingpong", "ibverbs-utils")]) {
        return;
    }
    for weft in carriers("weft_ib0") {
        for options in ["-n 300", "-e -n 100", "-s 100000 -n 20"] {
            let port = free_port();
            let line = format!("ibv_xsrq_pingpong -d weft_ib0 -g 0 -p {port} {options}");
            let (server, client) = pair(&weft, port, &line, &format!("{line} 127.0.0.1"));
            server.says("SRQN").says("success");
            client.says("SRQN").says("success");
        }
    }
}

/// One server with a queue pair for each of two clients, which reach the same queue.
#[test]
fn ibv_xsrq_pingpong_with_two_clients() {
    if !have(&[("ibv_xsrq_pingpong", "ibverbs-utils")]) {
        return;
    }
    let weft = Weft::on("weft_ib0");
    let port = free_port();
    let line = format!("ibv_xsrq_pingpong -d weft_ib0 -g 0 -p {port} -n 100 -c 2");
    let server = weft.start(&line).listens(port);
    let clients = [(); 2].map(|()| weft.start(&format!("{line} 127.0.0.1")));
    for client in clients {
        let done = client.end();
        done.good();
        done.says("success");
    }
    let done = server.end();
    done.good();
    done.says("success");
}

#[test]
fn ibv_xsrq_pingpong_is_refused_on_iwarp() {
    if !have(&[("ibv_xsrq_pingpong", "ibverbs-utils")]) {
        return;
    }
    let port = free_port();
    let line = format!("ibv_xsrq_pingpong -d weft0 -g 0 -p {port}");
    let done = Weft::on("weft0").run(&line);
    assert_eq!(done.code(), 1, "{}", done.show());
    done.says("XRC");
}
