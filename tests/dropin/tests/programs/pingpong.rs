//! ibverbs-utils: programs that exchange GID and queue pair number over a socket of their own. They know nothing of `rdma_cm`: the persona is for them.

use weft_dropin::{Weft, free_port, have, pair};

use super::carriers;

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

/// iWARP's queue pairs are connected by `rdma_cm`: the log says what to do.
#[test]
fn ibv_rc_pingpong_is_told_what_to_do_on_iwarp() {
    if !have(&[("ibv_rc_pingpong", "ibverbs-utils")]) {
        return;
    }
    let port = free_port();
    let line = format!("ibv_rc_pingpong -d weft0 -g 0 -p {port}");
    let weft = Weft::on("weft0").env("WEFT_LOG", "warn");
    let server = weft.start(&line).listens(port);
    // It fails too, for want of an answer.
    weft.run(&format!("{line} 127.0.0.1"));
    let server = server.end();
    assert_eq!(server.code(), 1, "{}", server.show());
    server.says("connect it with rdma_cm").says("weft_ib0");
}

/// iWARP has no datagram queue pairs: the program says so and goes.
#[test]
fn ibv_ud_pingpong_is_refused_on_iwarp() {
    if !have(&[("ibv_ud_pingpong", "ibverbs-utils")]) {
        return;
    }
    let done = Weft::on("weft0").run("ibv_ud_pingpong -d weft0");
    assert_eq!(done.code(), 1, "{}", done.show());
    done.says("Couldn't create QP");
}
