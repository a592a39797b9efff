//! A live stream whose ring is overwritten all the time: bytes and slot are asked for together, and no viewer gets half a fragment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::listener;
use weft_media::client::{Dial, Viewer};
use weft_media::live::Live;
use weft_media::watch::{Event, From, Watch};
use weft_media::wire::{Format, Request};
use weft_verbs::{Device, LocalMode};

/// Longer than a Read, so that several carry it.
const LEN: usize = 300_000;

#[test]
fn fragments_are_whole_while_the_ring_is_overwritten() {
    let device = Device::open().unwrap();
    let listener = listener(&device);
    let addr = listener.local_addr();
    // Room for three, so that a viewer is overtaken often.
    let live = Live::new(&device, "cam", 4 * LEN as u64 - 1, &listener.cq()).unwrap();
    live.begin(Format::Mp4, b"init").unwrap();
    let host = Arc::clone(&live);
    std::thread::spawn(move || listener.run(&host));
    let put = |n: u64| live.push(&vec![n as u8; LEN], true, n, 1).unwrap();
    put(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = [LocalMode::Auto, LocalMode::Off].map(|mode| {
            scope.spawn(move || {
                let device = Device::builder().local(mode).open().unwrap();
                let request = Request::Title("cam".into());
                let viewer = Viewer::open(&device, &Dial::new(addr, None), &request).unwrap();
                let mut watch = Watch::new(viewer, From::Newest).unwrap();
                assert_eq!(watch.init().unwrap(), b"init");
                let mut whole = 0;
                while whole < 50 {
                    if let Some(Event::Fragment { slot, bytes, .. }) =
                        watch.next(Duration::from_secs(30)).unwrap()
                    {
                        let wanted = slot.sequence() as u8;
                        assert!(bytes.len() == LEN && bytes.iter().all(|b| *b == wanted));
                        whole += 1;
                    }
                }
            })
        });
        scope.spawn(|| {
            for n in 1.. {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                put(n);
                // Now a burst that overtakes viewers, now a rest in which they get on.
                if n % 8 == 0 {
                    std::thread::sleep(Duration::from_millis(3));
                }
            }
        });
        let ends = watching.map(std::thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        ends.into_iter().for_each(Result::unwrap);
    });
}
