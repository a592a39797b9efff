//! What the tests have in common.
#![allow(dead_code, reason = "each test program uses its part")]

use std::time::Duration;

use rustix::io::Errno;
use weft_sdp::{Listener, Options, RecvFlags, Sink, Source, Stream};
use weft_verbs::{Device, LocalMode, RawMemory};

pub(crate) const MODES: [LocalMode; 2] = [LocalMode::Off, LocalMode::Auto];
/// Longer than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn device(local: LocalMode) -> Device {
    Device::builder().local(local).open().unwrap()
}

pub(crate) fn listener(device: &Device, options: Options) -> Listener {
    Listener::bind(device, "127.0.0.1:0".parse().unwrap(), 8, &options).unwrap()
}

/// A connection with these options at both ends, of two devices: as between two processes.
pub(crate) fn pair_with(local: LocalMode, options: Options) -> (Stream, Stream) {
    let listener = listener(&device(local), options);
    let addr = listener.local_addr();
    let client = Stream::connect(&device(local), addr, &options, Some(LONG)).unwrap();
    let server = listener.accept(Some(LONG)).unwrap();
    (client, server)
}

pub(crate) fn pair(local: LocalMode) -> (Stream, Stream) {
    pair_with(local, Options::default())
}

pub(crate) fn send(stream: &Stream, bytes: &[u8]) -> Result<usize, Errno> {
    stream.send(&[Source::Bytes(bytes)], false)
}

pub(crate) fn send_raw(stream: &Stream, memory: &RawMemory) -> Result<usize, Errno> {
    stream.send(&[Source::Raw(memory)], false)
}

pub(crate) fn recv(stream: &Stream, max: usize, flags: RecvFlags) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; max];
    let n = stream.recv(&mut [Sink::Bytes(&mut bytes)], flags)?;
    bytes.truncate(n);
    Ok(bytes)
}

pub(crate) fn exactly(stream: &Stream, len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let more = recv(stream, len - bytes.len(), RecvFlags::WAITALL).unwrap();
        assert!(
            !more.is_empty(),
            "the end after {} of {len} bytes",
            bytes.len()
        );
        bytes.extend(more);
    }
    bytes
}

/// Memory that stays as long as the process.
pub(crate) fn leak(bytes: &[u8]) -> RawMemory {
    RawMemory::leak(bytes.to_vec())
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            let x = (i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (x >> 56) as u8
        })
        .collect()
}
