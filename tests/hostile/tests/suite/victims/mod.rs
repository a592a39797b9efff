//! The programs under attack. Each listens on loopback, serves whoever comes, keeps canaries, and obeys the suite on its standard input:
//! `check` asks for the canaries, `dial ADDR` has it connect somewhere, `leave PORT,PORT...` end its connections with these peers, `quit` or the end of the input ends it.

mod exs;
mod roce;
mod rsockets;
mod verbs;

use std::io::BufRead;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_verbs::{Mr, RawMemory};

/// What the suite can ask of each of them.
trait Victim: Send + Sync {
    /// Where it listens.
    fn addr(&self) -> SocketAddr;
    /// What is not as it was left; nothing if all is well.
    fn broken(&self) -> Vec<String>;
    /// Connects to a listener, and tells how that went.
    fn dial(&self, addr: SocketAddr) -> String;
    /// Ends the connections with peers at these ports, takes back all memory that they could use, and tells how long the longest of that took.
    fn leave(&self, ports: &[u16]) -> Duration;
}

/// One's life.
pub(crate) fn live(kind: &str) {
    let victim: Arc<dyn Victim> = match kind {
        "verbs" => verbs::start(),
        "exs" => exs::start(weft_exs::Kind::Stream),
        "packets" => exs::start(weft_exs::Kind::SeqPacket),
        "roce" => roce::start(),
        "rsockets" => rsockets::start(),
        other => panic!("no victim is called {other}"),
    };
    say(&format!("listening {}", victim.addr()));
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a pipe");
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("check"), _) => {
                let broken = victim.broken();
                if broken.is_empty() {
                    say("intact");
                } else {
                    say(&format!("broken {}", broken.join("; ")));
                }
            }
            (Some("dial"), Some(addr)) => {
                let (victim, addr) = (victim.clone(), addr.to_owned());
                std::thread::spawn(move || {
                    let start = Instant::now();
                    let how = victim.dial(addr.parse().expect("an address"));
                    say(&format!(
                        "dialled {addr} {} {how}",
                        start.elapsed().as_millis()
                    ));
                });
            }
            (Some("leave"), Some(ports)) => {
                let ports: Vec<u16> = ports.split(',').filter_map(|p| p.parse().ok()).collect();
                let longest = victim.leave(&ports);
                say(&format!("left {}", longest.as_millis()));
            }
            (Some("quit"), _) => break,
            other => panic!("what is {other:?}?"),
        }
    }
    // Without destructors: a victim may be in the middle of anything.
    std::process::exit(0);
}

/// A line for the suite; what the test harness prints is on the same stream.
pub(crate) fn say(line: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(format!("\n>> {line}\n").as_bytes());
}

/// How long something may take that has no limit of its own, before the victim takes it for a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// The byte at a place of a canary.
fn canary(at: usize) -> u8 {
    0xa5 ^ (at as u8).wrapping_mul(31)
}

/// So many bytes of canary, from `at` on.
fn canaries(at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(canary).collect()
}

/// Fills a region with canaries.
fn fill(mr: &Mr) {
    mr.write(0, &canaries(0, mr.len())).expect("in bounds");
}

/// What is wrong with a region whose bytes are canaries but for these ranges.
fn changed(name: &str, mr: &Mr, but: &[(usize, usize)]) -> Option<String> {
    let now = mr.to_vec(0, mr.len()).expect("in bounds");
    changed_bytes(name, &now, but)
}

fn changed_bytes(name: &str, now: &[u8], but: &[(usize, usize)]) -> Option<String> {
    let open = |at: usize| but.iter().any(|(from, to)| (*from..*to).contains(&at));
    let first = (0..now.len()).find(|at| now[*at] != canary(*at) && !open(*at))?;
    Some(format!("{name}: byte {first} is {:#x}", now[first]))
}

/// Memory that is never freed and used again: so that a victim's own buffers are no growth.
#[derive(Debug, Default)]
struct Pool(std::sync::Mutex<Vec<RawMemory>>);

impl Pool {
    /// `len` bytes of canary.
    fn take(&self, len: usize) -> RawMemory {
        let mut free = self.0.lock().expect("no panic under it");
        let memory = match free.iter().position(|m| m.len() == len) {
            Some(at) => free.swap_remove(at),
            None => RawMemory::leak(vec![0; len]),
        };
        memory.write(0, &canaries(0, len)).expect("in bounds");
        memory
    }

    fn give(&self, memory: RawMemory) {
        self.0.lock().expect("no panic under it").push(memory);
    }
}
