//! `weft key`.

use std::path::PathBuf;

use weft_service::endpoint::Endpoint;

use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::identity::known::Known;
use weft_cli::identity::{Folder, keypair};
use weft_cli::say;

pub(crate) const LONG: &str = "\
Make the key pair by which peers recognise this user, show it, or forget the key of a peer.

The command prints the public key, which is a line for the authorized_keys file of each receiver or server that should admit this user, and its fingerprint, which \
a sender is asked to compare. The file of the key pair is private: it stays on this machine.

In ~/.config/weft (or $XDG_CONFIG_HOME/weft): `key`, the key pair; `known_peers`, the keys of listeners, stored at the first use; \
`authorized_keys`, the public keys of the users whom `weft cp --listen` and the other servers admit.";

const EXAMPLES: &str = "\
Examples:
  # make a key pair, and print its public key and fingerprint (again)
  weft key
  weft key --show
  # allow this user to send files to a host
  weft key --show | ssh host 'head -n 1 >> ~/.config/weft/authorized_keys'
  # accept that the listener there has a new key
  weft key forget host";

/// Options of `weft key`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// The file of the key pair [default: ~/.config/weft/key]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Replace an existing key pair
    #[arg(long, conflicts_with = "show")]
    force: bool,
    /// Show the existing key pair, create none
    #[arg(long)]
    show: bool,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The same as --show
    #[command(hide = true)]
    Show,
    /// Remove the key of a peer from the known ones
    Forget {
        /// All ports of a host, or one
        #[arg(value_name = "HOST[:PORT]")]
        peer: String,
    },
}

/// Makes a key pair, shows it, or forgets a peer's.
pub fn run(args: &Args, global: Global) -> Result<Exit, Failure> {
    if let Some(What::Forget { peer }) = &args.what {
        return forget(peer, global);
    }
    let path = match &args.file {
        Some(path) => path.clone(),
        None => Folder::of_user()?.key(),
    };
    let identity = if args.show || matches!(args.what, Some(What::Show)) {
        keypair::read(&path)?.ok_or_else(|| {
            let file = args
                .file
                .as_ref()
                .map(|path| format!(" --file {}", path.display()));
            Failure::failed(format!("there is no key pair in {}", path.display()))
                .hint(format!("`weft key{}` makes one", file.unwrap_or_default()))
        })?
    } else {
        let (identity, is_new) = if args.force {
            (keypair::make(&path, true)?, true)
        } else {
            keypair::read_or_make(&path)?
        };
        if is_new && !global.quiet {
            weft_cli::tell!("weft: a new key pair in {}", path.display());
        }
        identity
    };
    let public = identity.public_key();
    say(keypair::line(&public));
    say(public.fingerprint());
    Ok(Exit::Ok)
}

fn forget(peer: &str, global: Global) -> Result<Exit, Failure> {
    let known = Known::at(&Folder::of_user()?.known_peers());
    let wanted = names(peer)?;
    let gone = known.remove(|name| wanted.matches(name))?;
    if gone == 0 {
        return Err(Failure::failed(format!(
            "no key of {peer} is known in {}",
            known.path().display()
        ))
        .hint("write HOST:PORT as the file has it"));
    }
    if !global.quiet {
        say(format_args!(
            "{gone} forgotten: the next `weft cp` to {peer} asks again"
        ));
    }
    Ok(Exit::Ok)
}

/// The entries that a user's argument names.
enum Wanted {
    One(String),
    /// All ports of a host: the part before the port.
    Host(String),
}

impl Wanted {
    fn matches(&self, name: &str) -> bool {
        match self {
            Self::One(one) => name == one,
            Self::Host(host) => name.rsplit_once(':').is_some_and(|(of, _)| of == host),
        }
    }
}

fn names(peer: &str) -> Result<Wanted, Failure> {
    let wrong = || {
        Failure::usage(format!("`{peer}` is not HOST[:PORT]"))
            .hint("IPv6 addresses stand in brackets if a port follows")
    };
    let named = |port| {
        // The port may be left out behind its colon.
        Endpoint::parse(peer, port)
            .or_else(|e| Endpoint::parse(peer.strip_suffix(':').ok_or(e)?, port))
            .map(|endpoint| endpoint.to_string())
            .map_err(|_| wrong())
    };
    let (name, other) = (named(1)?, named(2)?);
    // Of two default ports each shows where the text has none.
    Ok(match name.rsplit_once(':') {
        Some((host, _)) if name != other => Wanted::Host(host.to_owned()),
        _ => Wanted::One(name),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_meant() {
        for (peer, name, meant) in [
            ("host", "host:7471", true),
            ("HOST:", "host:1", true),
            ("host:7471", "host:7471", true),
            ("host:7472", "host:7471", false),
            ("host", "host2:7471", false),
            ("::1", "[::1]:7471", true),
            ("[::1]", "[::1]:7471", true),
            ("[::1]:7471", "[::1]:7471", true),
            ("[::1]:1", "[::1]:7471", false),
        ] {
            assert_eq!(names(peer).unwrap().matches(name), meant, "{peer}");
        }
        for peer in ["", ":", "host:port", "[::1", "[::1]7471"] {
            assert!(names(peer).is_err(), "{peer}");
        }
    }
}
