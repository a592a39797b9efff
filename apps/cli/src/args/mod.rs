//! Options of the applications that are programs of their own.
#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "comments are the help on a terminal"
)]

pub mod cc;
pub mod fs;
pub mod media;

use std::path::PathBuf;

use weft_session::Via;
use weft_verbs::any::Choice;
use weft_verbs::tls::Fingerprint;

/// The device of connections. Its command has an option `--identity` too.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ViaArgs {
    /// The device: `soft`, the name of an RDMA device, or `auto` for the one that the route to the peer uses. RNICs need --plain
    #[arg(
        long,
        value_name = "DEVICE",
        env = "WEFT_DEVICE",
        default_value = "soft"
    )]
    pub device: Choice,
    /// Without encryption and keys, which RNICs cannot have. Everybody on the way can read and change what is sent; give it on both sides
    #[arg(long, conflicts_with = "identity")]
    pub plain: bool,
}

impl From<&ViaArgs> for Via {
    fn from(args: &ViaArgs) -> Self {
        Self {
            device: args.device.clone(),
            plain: args.plain,
        }
    }
}

/// Keys of a server. Its command has an option `--open` too.
#[derive(Debug, clap::Args)]
pub struct ServerKeys {
    /// A key pair of `weft key` [default: ~/.config/weft/key, created if missing]
    #[arg(long, value_name = "FILE", help_heading = "Keys")]
    pub identity: Option<PathBuf>,
    /// Admit the owners of the public keys in FILE, one a line [default: `~/.config/weft/authorized_keys`]
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "open",
        help_heading = "Keys"
    )]
    pub authorized: Option<PathBuf>,
}

/// Whom to be and whom to believe: options of every client.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ClientKeys {
    /// A key pair of `weft key` [default: ~/.config/weft/key, if there is one]
    #[arg(long, value_name = "FILE", help_heading = "Keys")]
    pub identity: Option<PathBuf>,
    /// Accept only a server key with this fingerprint, and ask nothing (can be given several times)
    #[arg(long = "peer", value_name = "FINGERPRINT", help_heading = "Keys")]
    pub peers: Vec<Fingerprint>,
}
