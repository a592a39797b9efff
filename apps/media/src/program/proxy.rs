//! `weft media proxy`.

use std::net::Ipv4Addr;

use weft_media::client::{OpenError, Viewer};
use weft_media::http::{Config, Proxy, Server};
use weft_media::wire::Request;
use weft_media::{HTTP_PORT, SERVE_PORT};
use weft_verbs::Device;
use weft_verbs::cm::ConnectError;

use super::keys::Caller;
use super::open_device;
use super::url::Url;
use weft_cli::address::resolve;
use weft_cli::args::media::ProxyArgs;
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::say;

pub(super) fn run(args: &ProxyArgs, global: Global) -> Result<Exit, Failure> {
    let http = args.http.unwrap_or((Ipv4Addr::LOCALHOST, HTTP_PORT).into());
    if !weft_cli::identity::reach::is_of_this_machine(http) && !args.open {
        return Err(Failure::usage(format!(
            "{http} can be reached from other machines, and HTTP neither encrypts nor asks who is there"
        ))
        .hint("run the proxy beside the player, or say --open"));
    }
    weft_cli::values::raise_nofile();
    let device = open_device()?;
    let servers = args
        .servers
        .iter()
        .map(|server| behind(args, server, &device))
        .collect::<Result<_, _>>()?;
    let config = Config {
        http,
        open: args.open,
        servers,
    };
    let failed = |e: std::io::Error| {
        Failure::listen(
            &http,
            &e,
            "--http ADDR:PORT chooses, port 0 takes a free one",
        )
    };
    let proxy = Proxy::bind(config).map_err(failed)?;
    let addr = proxy.local_addr().map_err(failed)?;
    if !global.quiet {
        say(format_args!("the page is on http://{addr}/"));
    }
    proxy.run().map(|()| Exit::Ok).map_err(failed)
}

/// A server. Its key is known, or asked for now, because a request later has no terminal to ask.
fn behind(args: &ProxyArgs, server: &str, device: &Device) -> Result<Server, Failure> {
    let url = Url::parse(server, SERVE_PORT)?;
    if !url.name.is_empty() {
        return Err(
            Failure::usage(format!("`{server}` names a title, not a server"))
                .hint(format!("write {}", url.server)),
        );
    }
    let caller = Caller::new(&args.dial, &url)?;
    let label = url.server.to_string();
    if let Err(failure) = caller.open(device, &Request::Catalogue) {
        // A server that is not there may come; one that is not trusted may not.
        if failure.exit() != weft_cli::failure::Exit::Peer {
            return Err(failure);
        }
        tracing::warn!("{label}: {}", failure.what());
    }
    let device = device.clone();
    let open = move |request: &Request| {
        let local = |e: &Failure| OpenError::Local(e.what().into());
        let mut last = OpenError::Connect(ConnectError::Unreachable);
        for addr in resolve(&url.server).map_err(|e| local(&e))? {
            let dial = caller.dial(addr).map_err(|e| local(&e))?;
            match Viewer::open(&device, &dial, request) {
                Err(e @ OpenError::Connect(_)) => last = e,
                // One address has refused, or has answered.
                decided => return decided,
            }
        }
        Err(last)
    };
    Ok(Server {
        label,
        open: Box::new(open),
    })
}
