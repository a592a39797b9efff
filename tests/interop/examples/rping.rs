//! Ping an RNIC, or be pinged by one: rdma-core's `rping` over weft.
//!
//! ```text
//!   server:  cargo run -p weft-interop --example rping -- -s -a 192.0.2.1 -V
//!   client:  rping -c -a 192.0.2.1 -C 10 -V            (rdma-core's, on the machine with the RNIC)
//! ```
//!
//! And the other way round. The options are those of `rping`, except that the server serves one client after another
//! until it is stopped, and that it listens on the loopback unless told.

use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;

use clap::Parser;
use weft_interop::rping::{self, Error, Options, Report};
use weft_verbs::Device;
use weft_verbs::cm::{ConnParam, LinkOptions, Listener};

/// rping's protocol over weft: pings with RDMA Reads and Writes, both sides.
#[derive(Parser)]
#[command(group(clap::ArgGroup::new("side").required(true)))]
struct Args {
    /// Serve.
    #[arg(short, group = "side")]
    server: bool,
    /// Ping a server.
    #[arg(short, group = "side")]
    client: bool,
    /// Address of the server.
    #[arg(short, default_value = "127.0.0.1")]
    address: String,
    /// Its port.
    #[arg(short, default_value_t = rping::PORT)]
    port: u16,
    /// Pings; without it, until interrupted.
    #[arg(short = 'C')]
    count: Option<u32>,
    /// Bytes a ping. The server takes pings of up to this size, 64 KiB unless told.
    #[arg(short = 'S')]
    size: Option<usize>,
    /// Check the data.
    #[arg(short = 'V')]
    verify: bool,
    /// Print the data.
    #[arg(short)]
    verbose: bool,
    /// Do not ask for CRCs.
    #[arg(long)]
    no_crc: bool,
    /// MPA revision: 1 or 2.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    revision: u8,
}

fn serve(device: &Device, addr: SocketAddr, options: &Options) -> Result<Report, Error> {
    let listener = Listener::bind(device, addr, 16, &options.param)
        .map_err(|error| Error::Connect(error.into()))?;
    println!("listening on {}", listener.local_addr());
    loop {
        let Some(request) = listener.next_request(None) else {
            continue;
        };
        let peer = request.peer_addr();
        match rping::serve(device, request, options) {
            Ok(report) => println!("{peer}: {report}"),
            Err(error) => eprintln!("{peer}: {error}"),
        }
    }
}

fn run(args: &Args) -> Result<Report, Error> {
    let device = Device::open()?;
    let unknown = |why: String| Error::Protocol(format!("{}: {why}", args.address));
    let addr = (args.address.as_str(), args.port)
        .to_socket_addrs()
        .map_err(|error| unknown(error.to_string()))?
        .next()
        .ok_or_else(|| unknown("no address".into()))?;
    let base = Options::default();
    let options = Options {
        size: args.size.unwrap_or(if args.server { 64 << 10 } else { 64 }),
        count: args.count,
        verify: args.verify,
        verbose: args.verbose,
        param: ConnParam {
            options: LinkOptions {
                crc: !args.no_crc,
                revision: args.revision,
                ..LinkOptions::default()
            },
            ..base.param
        },
    };
    if options.size < rping::MIN_SIZE {
        let why = format!("pings have at least {} bytes", rping::MIN_SIZE);
        return Err(Error::Protocol(why));
    }
    if args.client {
        rping::client(&device, addr, &options)
    } else {
        serve(&device, addr, &options)
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rping: {error}");
            ExitCode::FAILURE
        }
    }
}
