//! A live server with many readers: how long after the server's notice a reader has the fragment.

use std::io::Write;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weft_media::client::{Dial, OpenError, Viewer};
use weft_media::live::now;
use weft_media::watch::{Event, From, Watch};
use weft_media::wire::{Refusal, Request};
use weft_sys::process::end_with_us;
use weft_verbs::Device;

use super::server::listens_at;
use crate::children::{Running, weft};
use crate::error::{BenchError, Result, failed, stack};

/// Fragments: 25 a second of 5.3 Mb/s.
const EACH: Duration = Duration::from_millis(40);
const LEN: usize = 26_500;

fn make(kind: [u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let mut out = (body.len() as u32 + 8).to_be_bytes().to_vec();
    out.extend(kind);
    out.extend(body);
    out
}

fn init() -> Vec<u8> {
    let tkhd = make(*b"tkhd", &[&[0; 12], &1_u32.to_be_bytes(), &[0; 68]]);
    let mdhd = make(*b"mdhd", &[&[0; 12], &1000_u32.to_be_bytes(), &[0; 8]]);
    let hdlr = make(*b"hdlr", &[&[0; 8], b"vide", &[0; 13]]);
    let trak = make(*b"trak", &[&tkhd, &make(*b"mdia", &[&mdhd, &hdlr])]);
    let trex = make(*b"trex", &[&[0; 4], &1_u32.to_be_bytes(), &[0; 16]]);
    let moov = make(*b"moov", &[&trak, &make(*b"mvex", &[&trex])]);
    [make(*b"ftyp", &[b"isom\0\0\0\0"]), moov].concat()
}

fn fragment(n: u32) -> Vec<u8> {
    let tfhd = make(*b"tfhd", &[&[0; 4], &1_u32.to_be_bytes()]);
    let tfdt = make(*b"tfdt", &[&[0; 4], &(n * 40).to_be_bytes()]);
    let trun = make(*b"trun", &[&[0; 4], &1_u32.to_be_bytes()]);
    let moof = make(*b"moof", &[&make(*b"traf", &[&tfhd, &tfdt, &trun])]);
    [moof, make(*b"mdat", &[&vec![n as u8; LEN]])].concat()
}

/// Milliseconds at the median and the 99th percentile, and how many fetches those are of.
pub(super) fn measure(readers: usize, seconds: f64) -> Result<(f64, f64, usize)> {
    let mut command = Command::new(weft()?);
    let options = "media live --plain --open --bind 127.0.0.1:0 --linger 0 bench";
    end_with_us(&mut command)
        .args(options.split(' '))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = Running::start(&mut command, "start the live server")?;
    let stdin = child.0.stdin.take();
    let mut stdin = stdin.ok_or_else(|| BenchError::PeerGone("no pipes".into()))?;
    let addr = listens_at(&child.first_line())?;
    let write = BenchError::system("write to the live server");
    stdin
        .write_all(&[init(), fragment(0)].concat())
        .map_err(write)?;
    let device = Device::open().map_err(stack(WATCH))?;
    let delays = Arc::new(Mutex::new(Vec::new()));
    let mut threads = Vec::new();
    for _ in 0..readers {
        let mut watch = open(&device, addr)?;
        let delays = Arc::clone(&delays);
        threads.push(std::thread::spawn(move || {
            let mut mine = Vec::new();
            // Ends with the server.
            while let Ok(Some(event)) = watch.next(Duration::from_secs(30)) {
                match event {
                    Event::Fragment { told: Some(at), .. } => mine.push(now().saturating_sub(at)),
                    Event::End => break,
                    _ => {}
                }
            }
            let mut all = delays.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(mine);
        }));
    }
    let (began, mut n) = (Instant::now(), 1);
    while began.elapsed().as_secs_f64() < seconds {
        let written = stdin.write_all(&fragment(n));
        written.map_err(BenchError::system("write to the live server"))?;
        n += 1;
        std::thread::sleep((began + EACH * n).saturating_duration_since(Instant::now()));
    }
    drop(stdin);
    for thread in threads {
        let _ = thread.join();
    }
    drop(child);
    let mut all = std::mem::take(&mut *delays.lock().unwrap_or_else(PoisonError::into_inner));
    all.sort_unstable();
    if all.is_empty() {
        return Err(BenchError::PeerGone("no reader has seen a fragment".into()));
    }
    let at = |percent: usize| all[(all.len() * percent / 100).min(all.len() - 1)] as f64 / 1e3;
    Ok((at(50), at(99), all.len()))
}

const WATCH: &str = "watch the live stream";

fn open(device: &Device, addr: SocketAddr) -> Result<Watch> {
    let dial = Dial::new(addr, None);
    let began = Instant::now();
    loop {
        match Viewer::open(device, &dial, &Request::Title("bench".into())) {
            Ok(viewer) => return Watch::new(viewer, From::Newest).map_err(stack(WATCH)),
            Err(OpenError::Refused(Refusal::NotYet))
                if began.elapsed() < Duration::from_secs(20) =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) => return Err(failed(WATCH, e)),
        }
    }
}
