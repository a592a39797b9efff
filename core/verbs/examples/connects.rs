//! How long a connection between two processes of one host takes to make (papers/results/floor.md): with a device and a protection domain of
//! its own each time, or with those of the connections before it.
//!
//! `connects fresh|kept [COUNT]`: prints the medians, in microseconds, of opening the objects and of connecting.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Instant;

use weft_verbs::{Device, LocalMode, Pd, QpInit, cm};

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn open() -> Fallible<(Device, Pd)> {
    let device = Device::builder().local(LocalMode::Require).open()?;
    let pd = device.alloc_pd()?;
    Ok((device, pd))
}

/// Accept until the other process closes our input.
fn serve(param: &cm::ConnParam) -> Fallible<()> {
    let (device, pd) = open()?;
    let listener = cm::Listener::bind(&device, "127.0.0.1:0".parse()?, 16, param)?;
    println!("{}", listener.local_addr());
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    loop {
        let cq = device.create_cq(4, None)?;
        let qp = pd.create_qp(&QpInit::new(&cq, &cq))?;
        let connection = listener
            .next_request(None)
            .ok_or("the listener has ended")?
            .accept(qp, param)?;
        // Until the other end has gone.
        while connection.qp.state() == weft_verbs::QpState::Rts {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
}

fn main() -> Fallible<()> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_else(|| "kept".to_owned());
    let mut param = cm::ConnParam::default();
    param.options.peer_to_peer = false;
    if what == "serve" {
        return serve(&param);
    }
    let count: usize = args.next().map_or(Ok(200), |count| count.parse())?;
    let mut server = Command::new(std::env::current_exe()?)
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let addr = line.trim().parse()?;
    let (mut objects, mut connects) = (Vec::new(), Vec::new());
    let mut kept = open()?;
    for n in 0..=count {
        std::thread::sleep(std::time::Duration::from_millis(2));
        let begun = Instant::now();
        if what == "fresh" {
            kept = open()?;
        }
        let cq = kept.0.create_cq(4, None)?;
        let opened = Instant::now();
        let connection = cm::connect(addr, &kept.1, &QpInit::new(&cq, &cq), &param)?;
        let connected = opened.elapsed();
        if n > 0 {
            objects.push(opened - begun);
            connects.push(connected);
        }
        connection.qp.disconnect();
    }
    drop(server.stdin.take());
    server.wait()?;
    let median = |times: &mut Vec<std::time::Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    let (objects, connects) = (median(&mut objects), median(&mut connects));
    println!("{what}: objects {objects:.0} us, connecting {connects:.0} us");
    Ok(())
}
