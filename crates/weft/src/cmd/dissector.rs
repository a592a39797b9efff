//! `weft dissector`.

use crate::failure::{Exit, Failure};

/// What `weft dissector --help` says.
pub const LONG: &str = "\
Print a dissector for Wireshark and tshark.

It knows what the standard dissectors do not: weft's datagrams with RDMA Write-Record and control datagrams, and the requests for a
datagram queue pair (docs/spec/dgram.md), on any UDP port. It checks the CRC of each. And the greetings and messages of EXS
(docs/spec/exs.md) and SDP (docs/spec/sdp.md) inside iWARP over TCP, of connections whose start-up was captured.

  weft dissector > weft.lua
  tshark -X lua_script:weft.lua -r capture.pcap
  tshark -X lua_script:weft.lua -i lo -Y 'weft.opcode == 0'     RDMA Write-Record alone
  tshark -X lua_script:weft.lua -o tcp.try_heuristic_first:TRUE -r capture.pcap -Y 'weft_exs || weft_sdp'

Other dissectors of payload in iWARP may call it malformed: --disable-protocol rpcordma --disable-protocol smb_direct.

Wireshark loads the file from the folder for personal Lua plugins that it names in Help, About Wireshark, Folders.";

const SCRIPT: &str = include_str!("../dissector/weft.lua");

/// Options of `weft dissector`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints the dissector.
pub fn run(_args: &Args) -> Result<Exit, Failure> {
    let _ = std::io::Write::write_all(&mut std::io::stdout(), SCRIPT.as_bytes());
    Ok(Exit::Ok)
}
