//! One operation of shared memory, or of TCP, again and again, both ends in this thread: for counting what it costs in instructions, which does not
//! depend on what else the machine does (papers/results/floor.md says how).
//!
//! `fast_paths write|one|list|send|empty COUNT [REPEAT [tcp]]` (`one`: an unsignaled Write; `list`: 16 Writes posted at once): the operations are between two calls of `getppid`.

use std::time::{Duration, Instant};

use weft_verbs::{Access, Device, LocalMode, Qp, QpInit, RecvWr, SendWr, Wc, cm};

const WARM: u32 = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let what = args.next().unwrap_or_else(|| "write".to_owned());
    let count: u32 = args.next().map_or(Ok(100), |count| count.parse())?;
    let repeat: u32 = args.next().map_or(Ok(20_000), |count| count.parse())?;
    let local = match args.next().as_deref() {
        Some("tcp") => LocalMode::Off,
        _ => LocalMode::Require,
    };
    let device = Device::builder().local(local).open()?;
    let pd = device.alloc_pd()?;
    let mut param = cm::ConnParam::default();
    param.options.peer_to_peer = false;
    let listener = cm::Listener::bind(&device, "127.0.0.1:0".parse()?, 1, &param)?;
    let addr = listener.local_addr();
    let (near_cq, far_cq) = (device.create_cq(256, None)?, device.create_cq(256, None)?);
    let far = std::thread::spawn({
        let (pd, cq, param) = (pd.clone(), far_cq.clone(), param.clone());
        move || -> Option<cm::Connection> {
            let request = listener.next_request(None)?;
            let qp: Qp = pd.create_qp(&QpInit::new(&cq, &cq)).ok()?;
            request.accept(qp, &param).ok()
        }
    });
    let near = cm::connect(addr, &pd, &QpInit::new(&near_cq, &near_cq), &param)?;
    let far = far.join().ok().flatten().ok_or("no connection")?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let (from, to) = (pd.alloc_mr(4096, access)?, pd.alloc_mr(4096, access)?);

    let mut list = vec![SendWr::write(1, to.remote(0)).sge(from.sge(0, 8)); 16];
    let mut wc = [Wc::default(); 4];
    let done = |cq: &weft_verbs::Cq, wc: &mut [Wc]| -> Result<(), Box<dyn std::error::Error>> {
        let begun = Instant::now();
        while cq.poll(wc)? == 0 {
            if begun.elapsed() > Duration::from_secs(30) {
                return Err("no completion".into());
            }
        }
        Ok(())
    };
    let mut run = |times: u32, wc: &mut [Wc]| -> Result<(), Box<dyn std::error::Error>> {
        for _ in 0..times {
            match what.as_str() {
                "write" => {
                    let wr = SendWr::write(1, to.remote(0)).sge(from.sge(0, 64));
                    near.qp.post_send_one(wr.signaled())?;
                    done(&near_cq, wc)?;
                }
                "one" => {
                    let wr = SendWr::write(1, to.remote(0)).sge(from.sge(0, 64));
                    near.qp.post_send_one(wr)?;
                }
                "list" => {
                    list[15].signaled = true;
                    near.qp.post_send(&list)?;
                    done(&near_cq, wc)?;
                }
                "send" => {
                    far.qp.post_recv(&[RecvWr::new(1).sge(to.sge(0, 64))])?;
                    let wr = SendWr::send(1).sge(from.sge(0, 64));
                    near.qp.post_send_one(wr.signaled())?;
                    done(&near_cq, wc)?;
                    done(&far_cq, wc)?;
                }
                "empty" => {
                    far_cq.poll(wc)?;
                }
                _ => return Err("write, one, list, send or empty".into()),
            }
        }
        Ok(())
    };
    run(WARM, &mut wc)?;
    let begin = std::os::unix::process::parent_id();
    run(count, &mut wc)?;
    let end = std::os::unix::process::parent_id();
    assert_eq!(begin, end);
    let begun = Instant::now();
    run(repeat, &mut wc)?;
    println!("{what}: {:?} each", begun.elapsed() / repeat);
    Ok(())
}
