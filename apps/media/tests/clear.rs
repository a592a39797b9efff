//! Movies over TCP in the clear, where the socket takes the pages of frozen memory, beside those by shared memory.

use crate::common::{noise, serve};
use weft_media::client::{Dial, Viewer};
use weft_media::wire::Request;
use weft_verbs::{Device, LocalMode};

fn open(device: &Device, dial: &Dial) -> Viewer {
    Viewer::open(device, dial, &Request::Title("a.mp4".into())).unwrap()
}

#[test]
fn movies_come_whole_in_the_clear_also_beside_viewers_that_vanish() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(9_000_001);
    std::fs::write(dir.path().join("a.mp4"), &bytes).unwrap();
    let addr = serve(dir.path(), 1 << 30).0;
    for (mode, name) in [(LocalMode::Off, "tcp"), (LocalMode::Auto, "local")] {
        let device = Device::builder().local(mode).open().unwrap();
        // FPDUs begin and end anywhere in a page.
        for (from, read, depth) in [
            (0, 128 << 10, 8),
            (12_345, 8192, 16),
            (4_093, 4 << 20, 2),
            (1, 65_000, 1),
        ] {
            let dial = Dial {
                read,
                depth,
                ..Dial::new(addr, None)
            };
            let mut viewer = open(&device, &dial);
            assert_eq!(viewer.transport(), name);
            let got = viewer.fetch(from, bytes.len() - from as usize).unwrap();
            assert!(got == bytes[from as usize..], "{name} {from} {read}");
        }
    }
    let device = Device::builder().local(LocalMode::Off).open().unwrap();
    std::thread::scope(|scope| {
        for index in 0..8 {
            let (device, bytes) = (&device, &bytes);
            scope.spawn(move || {
                let mut viewer = open(device, &Dial::new(addr, None));
                if index % 2 == 0 {
                    // It goes while Reads are on their way.
                    viewer.range(0, u64::MAX).next().unwrap();
                } else {
                    assert!(viewer.fetch(0, bytes.len()).unwrap() == *bytes);
                }
            });
        }
    });
}
