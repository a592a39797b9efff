//! perftest: bandwidth and latency of every operation.

use weft_dropin::{Weft, free_port, have, pair};

use super::carriers;

/// One run on both sides. The client's table has `rows` lines of plausible numbers.
fn perftest(weft: &Weft, program: &str, options: &str, rows: usize) {
    if !have(&[(program, "perftest")]) {
        return;
    }
    let port = free_port();
    let line = format!("{program} -F -p {port} {options}");
    let (_, client) = pair(weft, port, &line, &format!("{line} 127.0.0.1"));
    let table = client.table();
    assert_eq!(table.len(), rows, "{}", client.show());
    for row in table {
        // Bytes, iterations, and the measured values: all positive. Peak bandwidth may be 0 (not measured).
        let measured = &row[2..];
        let good = row.len() >= 4
            && measured.iter().all(|n| n.is_finite() && *n >= 0.0)
            && measured.iter().any(|n| *n > 0.0);
        // On a busy machine it may fail to find the clock's frequency; it then reports that, and has no rates.
        let clockless = client.show().contains("Correlation coefficient");
        assert!(good || clockless, "{}", client.show());
    }
}

/// Connected by `rdma_cm`, on the iWARP device.
fn by_cm(program: &str, options: &str) {
    for weft in carriers("weft0") {
        perftest(&weft, program, &format!("-R -d weft0 {options}"), 1);
    }
}

/// Connected by an exchange over a socket, on the persona.
fn by_hand(program: &str, options: &str) {
    for weft in carriers("weft_ib0") {
        perftest(&weft, program, &format!("-d weft_ib0 {options}"), 1);
    }
}

macro_rules! each {
    ($($name:ident: $options:literal;)*) => {$(
        mod $name {
            #[test]
            fn on_weft0() {
                super::by_cm(stringify!($name), $options);
            }

            #[test]
            fn on_weft_ib0() {
                super::by_hand(stringify!($name), $options);
            }
        }
    )*};
}

each! {
    ib_send_bw: "-n 500 -s 65536";
    ib_send_lat: "-n 500 -s 64";
    ib_write_bw: "-n 500 -s 65536";
    ib_write_lat: "-n 500 -s 64";
    ib_read_bw: "-n 500 -s 65536";
    ib_read_lat: "-n 500 -s 64";
    ib_atomic_bw: "-n 500";
    ib_atomic_lat: "-n 500";
}

/// Every size from 2 to 8 MiB: 23 rows.
#[test]
fn all_sizes() {
    for program in ["ib_send_bw", "ib_write_bw", "ib_read_bw"] {
        perftest(&Weft::on("weft_ib0"), program, "-d weft_ib0 -a -n 10", 23);
    }
    perftest(
        &Weft::on("weft0"),
        "ib_write_bw",
        "-R -d weft0 -a -n 10",
        23,
    );
    let tcp = Weft::on("weft_ib0").over_tcp();
    perftest(&tcp, "ib_send_lat", "-d weft_ib0 -a -n 10", 23);
}

#[test]
fn both_directions() {
    for program in ["ib_send_bw", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"] {
        by_cm(program, "-b -n 200");
        by_hand(program, "-b -n 200");
    }
}

#[test]
fn several_queue_pairs() {
    for program in ["ib_send_bw", "ib_write_bw", "ib_read_bw"] {
        perftest(&Weft::on("weft0"), program, "-R -d weft0 -q 4 -n 200", 1);
        perftest(&Weft::on("weft_ib0"), program, "-d weft_ib0 -q 4 -n 200", 1);
    }
}

/// Sleeping on completion events instead of polling.
#[test]
fn events() {
    for program in ["ib_send_lat", "ib_read_lat", "ib_read_bw"] {
        by_cm(program, "-e -n 200 -s 1024");
        by_hand(program, "-e -n 200 -s 1024");
    }
    // Not on iWARP: there it also waits for credits that the peer writes into its memory. It sleeps for ever when all its sends are complete before a credit
    // arrives.
    by_hand("ib_send_bw", "-e -n 200 -s 1024");
}

#[test]
fn inline() {
    for program in ["ib_send_lat", "ib_write_lat"] {
        perftest(
            &Weft::on("weft0"),
            program,
            "-R -d weft0 -I 64 -s 64 -n 200",
            1,
        );
        perftest(
            &Weft::on("weft_ib0"),
            program,
            "-d weft_ib0 -I 64 -s 64 -n 200",
            1,
        );
    }
}

#[test]
fn a_shared_receive_queue() {
    by_hand("ib_send_bw", "--use-srq -q 2 -n 200 -s 1024");
}

#[test]
fn lists_of_work_requests() {
    perftest(
        &Weft::on("weft_ib0"),
        "ib_write_bw",
        "-d weft_ib0 -l 8 -n 400 -s 1024",
        1,
    );
    perftest(
        &Weft::on("weft_ib0"),
        "ib_write_bw",
        "-d weft_ib0 --use_old_post_send -n 400",
        1,
    );
}

#[test]
fn compare_and_swap() {
    by_hand("ib_atomic_lat", "-A CMP_AND_SWAP -n 200");
}

#[test]
fn unreliable_connections() {
    perftest(
        &Weft::on("weft_ib0"),
        "ib_send_bw",
        "-d weft_ib0 -c UC -n 300",
        1,
    );
    perftest(
        &Weft::on("weft_ib0"),
        "ib_write_bw",
        "-d weft_ib0 -c UC -n 300",
        1,
    );
}

#[test]
fn datagrams() {
    let weft = Weft::on("weft_ib0");
    perftest(&weft, "ib_send_lat", "-d weft_ib0 -c UD -n 200 -s 64", 1);
    perftest(&weft, "ib_send_lat", "-d weft_ib0 -c UD -n 200 -s 64 -e", 1);
    // No more than the receiver has receives for: further datagrams are lost, and perftest counts.
    perftest(&weft, "ib_send_bw", "-d weft_ib0 -c UD -n 200 -s 1024", 1);
    // The address and number from rdma_cm.
    perftest(&weft, "ib_send_lat", "-d weft_ib0 -R -c UD -n 200 -s 64", 1);
}

/// `-z`: the exchange by `rdma_cm`, the queue pairs moved by the program.
#[test]
fn exchange_by_cm() {
    perftest(
        &Weft::on("weft_ib0"),
        "ib_write_bw",
        "-d weft_ib0 -z -n 300",
        1,
    );
}

/// Each side sends from one queue pair and receives on another, into the shared receive queue that the message names.
#[test]
fn extended_reliable_connections() {
    by_hand("ib_send_bw", "-c XRC -n 300 -s 4096");
    by_hand("ib_send_bw", "-c XRC -n 200 -s 4096 -q 4");
    by_hand("ib_send_bw", "-c XRC -n 200 -s 4096 -b");
    by_hand("ib_send_lat", "-c XRC -n 200 -s 64");
    for program in ["ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat"] {
        by_hand(program, "-c XRC -n 200 -s 1024");
    }
    for program in ["ib_atomic_bw", "ib_atomic_lat"] {
        by_hand(program, "-c XRC -n 200");
    }
}

/// More queue pairs than a process may have descriptors by default. perftest's time for the peak (which `-N` omits) grows with the square of the operations.
#[test]
fn many_queue_pairs() {
    let weft = Weft::on("weft_ib0").limit(std::time::Duration::from_mins(5));
    perftest(&weft, "ib_write_bw", "-d weft_ib0 -N -q 512 -n 100", 1);
}

/// perftest's other programs send raw Ethernet frames, for which there are no queue pairs: they report that and end.
#[test]
fn raw_packets_are_refused() {
    if !have(&[("raw_ethernet_bw", "perftest")]) {
        return;
    }
    for device in ["weft0", "weft_ib0"] {
        for (program, side) in [
            ("raw_ethernet_bw", "--client"),
            ("raw_ethernet_lat", "--client"),
            ("raw_ethernet_burst_lat", "--client"),
            ("raw_ethernet_fs_rate", "--server"),
        ] {
            let macs = "-B 00:11:22:33:44:55 -E 00:11:22:33:44:66";
            let line = format!("{program} -F -d {device} {side} {macs} -n 10");
            let done = Weft::on(device).run(&line);
            if program != "raw_ethernet_burst_lat" {
                // This one prints nothing.
                done.says("reate QP");
            }
            assert_eq!(done.code(), 1, "{}", done.show());
        }
    }
}

/// The package's script that starts both sides.
#[test]
fn the_script_for_one_machine() {
    if !have(&[("run_perftest_loopback", "perftest")]) {
        return;
    }
    for weft in carriers("weft_ib0") {
        let port = weft_dropin::free_port();
        let line = format!("run_perftest_loopback 0 0 ib_write_bw -F -n 100 -p {port}");
        let done = weft.run(&line);
        // Both sides print their results.
        assert_eq!(done.good().table().len(), 2, "{}", done.show());
    }
}
