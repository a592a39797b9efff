//! `weft dissector`.

use weft_cli::failure::{Exit, Failure};

/// The text of `weft dissector --help`.
pub const LONG: &str = "\
Print a dissector for Wireshark and tshark.

It decodes what the standard dissectors do not: weft's datagrams (RDMA Write-Record, control datagrams, requests for a datagram queue pair; docs/spec/dgram.md) on any UDP port, \
whose CRC it checks, and the greetings and messages of EXS (docs/spec/exs.md) and SDP (docs/spec/sdp.md) inside iWARP over TCP, of connections whose start-up was captured.

Wireshark loads the file from the folder for personal Lua plugins that it names in Help, About Wireshark, Folders. Other dissectors of payload in iWARP may call it malformed: \
--disable-protocol rpcordma --disable-protocol smb_direct.";

const EXAMPLES: &str = "\
Examples:
  weft dissector > weft.lua
  tshark -X lua_script:weft.lua -r capture.pcap
  # RDMA Write-Record alone
  tshark -X lua_script:weft.lua -i lo -Y 'weft.opcode == 0'
  # EXS and SDP
  tshark -X lua_script:weft.lua -o tcp.try_heuristic_first:TRUE \\
    -r capture.pcap -Y 'weft_exs || weft_sdp'";

const SCRIPT: &str = include_str!("../dissector/weft.lua");

/// Options of `weft dissector`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {}

/// Prints the dissector.
pub fn run(_args: &Args) -> Result<Exit, Failure> {
    weft_cli::print(SCRIPT.as_bytes());
    Ok(Exit::Ok)
}
