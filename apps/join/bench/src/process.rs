//! Workers as separate processes of this program.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use clap::Subcommand;
use datafusion::error::Result;
use weft_join::worker::{Settings, Worker};

use crate::external;

/// What a process of the benchmark is. It says its address, and serves until it is killed.
#[derive(Subcommand, Clone, Copy, Debug)]
pub enum Part {
    /// A worker of weft
    #[command(hide = true)]
    Weft,
    /// A worker of datafusion-distributed on its own gRPC
    #[command(hide = true)]
    Grpc,
}

/// Reports an address to the process that started this one.
pub fn say(address: SocketAddr) -> std::io::Result<()> {
    println!("{address}");
    std::io::stdout().flush()
}

impl Part {
    pub fn serve(self) -> Result<()> {
        let bind = SocketAddr::from(([127, 0, 0, 1], 0));
        match self {
            Self::Weft => {
                let (dir, memory) = (None, None);
                let worker = Worker::open(Settings {
                    bind,
                    dir,
                    memory,
                    tables: 0,
                })?;
                say(worker.local_addr())?;
                worker.serve(|| false);
                Ok(())
            }
            Self::Grpc => tokio::runtime::Runtime::new()?.block_on(async {
                let listener = tokio::net::TcpListener::bind(bind).await?;
                say(listener.local_addr()?)?;
                let service = datafusion_distributed::Worker::default().into_worker_server();
                tonic::transport::Server::builder()
                    .add_service(service)
                    .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener))
                    .await
                    .map_err(external)
            }),
        }
    }

    fn args(self) -> Vec<String> {
        match self {
            Self::Weft => vec!["weft".into()],
            Self::Grpc => vec!["grpc".into()],
        }
    }
}

/// A process of the benchmark, which is killed at the end.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
}

impl Process {
    pub fn start(part: Part) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(part.args())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        let address = line.trim().parse().map_err(external)?;
        Ok(Self { child, address })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
