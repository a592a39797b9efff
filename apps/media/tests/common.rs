//! What the tests of this crate have in common.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use weft_media::server::Server;
use weft_media::shelf::Shelf;
use weft_media::viewers::{Config, Gate, ViewerListener};
use weft_verbs::{Device, cm};

struct Anybody;

impl Gate for Anybody {
    fn admit(&self, _: &cm::Request) -> Result<(), String> {
        Ok(())
    }
}

/// The same bytes each time.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| byte()).collect()
}

/// A listener that lets everybody in, without TLS.
pub(crate) fn listener(device: &Device) -> ViewerListener {
    let config = Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        tls: None,
        gate: Arc::new(Anybody),
        max_viewers: 100,
    };
    ViewerListener::bind(device, config).unwrap()
}

/// Serves the movies of a folder, with this much memory.
pub(crate) fn serve(dir: &Path, memory: u64) -> (SocketAddr, Arc<Server>) {
    let device = Device::open().unwrap();
    let shelf = Shelf::new(&device, File::open(dir).unwrap().into(), memory);
    let listener = listener(&device);
    let addr = listener.local_addr();
    let server = Server::new(shelf);
    let host = Arc::clone(&server);
    std::thread::spawn(move || listener.run(&host));
    (addr, server)
}
