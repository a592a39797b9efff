//! Our own processes in the comparison: workers, and the daemon of a master.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use weft_cc::daemon;
use weft_cc::worker::{Config, Worker};
use weft_verbs::tls::{Identity, Tls};

use crate::error::{BenchError, Result, stack};

/// Options of `weft-papers cc-part`.
#[derive(Args, Clone, Debug)]
pub struct CcPartArgs {
    #[command(subcommand)]
    part: Part,
}

#[derive(Subcommand, Clone, Debug)]
enum Part {
    /// So many workers with one slot each, until standard input ends; prints their ports
    Workers {
        #[arg(long)]
        count: u16,
        /// What they run in place of compilers
        #[arg(long)]
        stand_in: Option<PathBuf>,
    },
    /// The daemon, until it is told to stop
    Daemon {
        #[arg(long)]
        socket: PathBuf,
    },
}

fn tls() -> Result<Tls> {
    let made = Identity::generate().and_then(Tls::new);
    made.map_err(stack("a key pair"))
}

/// Is that part.
pub(crate) fn part(args: &CcPartArgs) -> Result<()> {
    match &args.part {
        Part::Workers { count, stand_in } => {
            let mut workers = Vec::new();
            for _ in 0..*count {
                let config = Config {
                    slots: 1,
                    open: true,
                    stand_in: stand_in.clone(),
                    ..Config::new(([127, 0, 0, 1], 0).into(), tls()?)
                };
                let worker = Worker::start(config);
                workers.push(worker.map_err(BenchError::system("start a worker"))?);
            }
            let ports = workers
                .iter()
                .map(|worker| worker.local_addr().port().to_string());
            println!("{}", ports.collect::<Vec<_>>().join(" "));
            let _ = std::io::stdin().read(&mut [0]);
            Ok(())
        }
        Part::Daemon { socket } => {
            let config = daemon::Config::new(socket.clone(), Arc::new(tls()?));
            daemon::run(config).map_err(BenchError::system("run the daemon"))
        }
    }
}
