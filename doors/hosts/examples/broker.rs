//! A broker for `weft run --hosts` in a few lines, without TLS: `cargo run -p weft-hosts --example broker -- [ADDR:PORT]...`
//!
//! With `WEFT_RUN_HOSTS=auto` and the preload library, it carries connections of this user's programs to hosts that run it too. `weft broker` has keys.

use std::error::Error;
use std::net::SocketAddr;

use weft_hosts::{Broker, Config};
use weft_run::hosts::PORT;
use weft_verbs::{Device, LocalMode};

fn main() -> Result<(), Box<dyn Error>> {
    let mut bind: Vec<SocketAddr> = Vec::new();
    for arg in std::env::args().skip(1) {
        bind.push(arg.parse()?);
    }
    if bind.is_empty() {
        bind = vec![
            format!("[::]:{PORT}").parse()?,
            format!("0.0.0.0:{PORT}").parse()?,
        ];
    }
    let broker = Broker::start(Config {
        device: Device::builder().local(LocalMode::Off).open()?,
        bind,
        port: PORT,
        nat: false,
        idle: None,
    })?;
    for addr in broker.local_addrs() {
        println!("broker on {addr}");
    }
    Ok(broker.run()?)
}
