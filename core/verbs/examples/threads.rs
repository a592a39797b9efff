//! Signaled 64 B Writes over shared memory by several threads, both ends in this process (papers/results/floor.md): each thread with a queue
//! pair and a completion queue of its own, or all of them on one queue pair.
//!
//! `threads own|shared THREADS [SECONDS]`: prints million Writes a second.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_verbs::{Access, Cq, Device, LocalMode, Mr, Pd, Qp, QpInit, SendWr, Wc, WcStatus, cm};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a queue pair of this process writes to, and the far end, which does nothing.
struct Pair {
    near: Qp,
    cq: Cq,
    from: Mr,
    to: Mr,
    _far: (Qp, Cq),
}

fn pair(device: &Device, pd: &Pd, depth: u32) -> Fallible<Pair> {
    let mut param = cm::ConnParam::default();
    param.options.peer_to_peer = false;
    let listener = cm::Listener::bind(device, "127.0.0.1:0".parse()?, 1, &param)?;
    let (cq, far_cq) = (device.create_cq(depth, None)?, device.create_cq(4, None)?);
    let init = QpInit {
        max_send_wr: depth,
        ..QpInit::new(&cq, &cq)
    };
    let addr = listener.local_addr();
    let (near, far) = std::thread::scope(|scope| -> Fallible<(Qp, Qp)> {
        let far = scope.spawn(|| -> Fallible<Qp> {
            let qp = pd.create_qp(&QpInit::new(&far_cq, &far_cq))?;
            Ok(listener
                .next_request(None)
                .ok_or("the listener has ended")?
                .accept(qp, &param)?
                .qp)
        });
        let near = cm::connect(addr, pd, &init, &param)?.qp;
        Ok((near, far.join().map_err(|_| "the far end")??))
    })?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    Ok(Pair {
        near,
        cq,
        from: pd.alloc_mr(4096, access)?,
        to: pd.alloc_mr(4096, access)?,
        _far: (far, far_cq),
    })
}

/// Write and poll until it is time to stop. With one queue for all, a thread may take another's completion: as many come as go.
fn write_on(pair: &Pair, stop: &AtomicBool) -> Fallible<u64> {
    let wr = SendWr::write(1, pair.to.remote(0))
        .sge(pair.from.sge(0, 64))
        .signaled();
    let mut wc = [Wc::default(); 1];
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        pair.near.post_send_one(wr.clone())?;
        while pair.cq.poll(&mut wc)? == 0 {
            std::hint::spin_loop();
        }
        if wc[0].status != WcStatus::Success {
            return Err(format!("{:?}", wc[0].status).into());
        }
        done += 1;
    }
    Ok(done)
}

fn main() -> Fallible<()> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_else(|| "own".to_owned());
    let threads: usize = args.next().map_or(Ok(1), |count| count.parse())?;
    let seconds: f64 = args.next().map_or(Ok(1.0), |count| count.parse())?;
    let device = Device::builder().local(LocalMode::Require).open()?;
    let pd = device.alloc_pd()?;
    let pairs = match what.as_str() {
        "own" => threads,
        "shared" => 1,
        _ => return Err("own or shared".into()),
    };
    let pairs = (0..pairs)
        .map(|_| pair(&device, &pd, 64))
        .collect::<Fallible<Vec<_>>>()?;
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let begun = Instant::now();
    std::thread::scope(|scope| -> Fallible<()> {
        let writers: Vec<_> = (0..threads)
            .map(|n| {
                let pair = &pairs[n % pairs.len()];
                let (stop, done) = (&stop, &done);
                scope.spawn(move || -> Fallible<()> {
                    done.fetch_add(write_on(pair, stop)?, Ordering::Relaxed);
                    Ok(())
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs_f64(seconds));
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().map_err(|_| "a writer")??;
        }
        Ok(())
    })?;
    let rate = done.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64() / 1e6;
    println!("{what}, {threads} threads: {rate:.2} M/s");
    Ok(())
}
