//! `weft media play` and `weft media list`.

use std::cell::RefCell;
use std::io::{self, IsTerminal};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use indicatif::HumanBytes;
use weft_media::SERVE_PORT;
use weft_media::client::{Piece, Range, ViewError, Viewer};
use weft_media::names::Title;
use weft_media::rtp;
use weft_media::watch::{Event, From, Watch};
use weft_media::wire::{Content, Denial, Request};

use weft_verbs::Device;

use super::keys::Caller;
use super::open_device;
use super::url::Url;
use weft_cli::args::media::{ListArgs, PlayArgs};
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::values::carrier;
use weft_cli::{say, tell};
use weft_service::text::printable;

/// Longest catalogue in bytes.
const MAX_CATALOGUE: u64 = 64 << 20;

/// The catalogue of a server.
pub(super) fn catalogue(viewer: &mut Viewer) -> Result<Vec<Title>, Failure> {
    let broken = |what: &str| {
        Failure::refused(format!("the server's catalogue cannot be used: {what}"))
            .hint("use the same version on both sides")
    };
    let len = viewer.grant().len;
    if viewer.grant().content != Content::Catalogue || len > MAX_CATALOGUE {
        return Err(broken("it is none, or too long"));
    }
    let text = viewer
        .fetch(0, len as usize)
        .map_err(|e| broken(&e.to_string()))?;
    serde_json::from_slice(&text).map_err(|e| broken(&e.to_string()))
}

pub(super) fn list(args: &ListArgs) -> Result<Exit, Failure> {
    let url = Url::parse(&args.server, SERVE_PORT)?;
    let mut viewer = Caller::new(&args.dial, &url)?.open(&open_device()?, &Request::Catalogue)?;
    let titles = catalogue(&mut viewer)?;
    if args.json {
        say(serde_json::json!(titles));
        return Ok(Exit::Ok);
    }
    for title in titles {
        let size = if title.live {
            "live".into()
        } else {
            HumanBytes(title.size).to_string()
        };
        say(format_args!(
            "{size:>12}  {}",
            printable(title.name.as_bytes())
        ));
    }
    Ok(Exit::Ok)
}

/// The destination of the bytes.
enum Sink {
    Stdout(io::Stdout),
    Player(Child, Option<ChildStdin>),
    Rtp(Box<RefCell<rtp::Sender>>),
}

/// The shell command. A bare player name would open the player's window without input.
fn player_command(command: &str) -> String {
    let name = command.trim();
    if name.contains(|c: char| !c.is_ascii_alphanumeric() && !"/._-+".contains(c)) {
        return command.to_owned();
    }
    format!("{name} -")
}

impl Sink {
    fn open(args: &PlayArgs) -> Result<Self, Failure> {
        if let Some(to) = args.rtp {
            return Self::rtp(to).map_err(|e| {
                Failure::failed(format!("cannot send to {to}: {e}"))
                    .hint("--rtp takes an address and a port of UDP")
            });
        }
        let Some(command) = args.player.as_deref() else {
            let stdout = io::stdout();
            if stdout.is_terminal() {
                return Err(Failure::usage("standard output is a terminal")
                    .hint("redirect it, or name a player: --player 'mpv -'"));
            }
            return Ok(Self::Stdout(stdout));
        };
        let mut child = Command::new("/bin/sh")
            .args(["-c", &player_command(command)])
            .stdin(Stdio::piped())
            .spawn()
            .map_err(|e| {
                Failure::failed(format!("cannot start `{command}`: {e}"))
                    .hint("--player takes a command of the shell, for example 'mpv -'")
            })?;
        let stdin = child.stdin.take();
        Ok(Self::Player(child, stdin))
    }

    fn rtp(to: SocketAddr) -> io::Result<Self> {
        let from: SocketAddr = match to {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        };
        let socket = UdpSocket::bind(from)?;
        socket.connect(to)?;
        let mut source = [0; 4];
        getrandom::fill(&mut source).map_err(|e| io::Error::other(e.to_string()))?;
        let sender = rtp::Sender::new(socket, u32::from_be_bytes(source));
        Ok(Self::Rtp(Box::new(RefCell::new(sender))))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Stdout(stdout) => Some(stdout.as_fd()),
            Self::Player(_, stdin) => stdin.as_ref().map(AsFd::as_fd),
            Self::Rtp(_) => None,
        }
    }

    /// Passes a piece of a movie on, from its current position.
    fn piece(&self, range: &Range<'_>, piece: &Piece) -> Result<(), Stop> {
        if let Some(fd) = self.fd() {
            return range.write_to(piece, fd).map_err(|e| Stop::of(&e));
        }
        let mut bytes = Vec::new();
        range
            .append(piece, &mut bytes)
            .map_err(|e| Stop::Failed(view_failure(&e)))?;
        self.write(&bytes)
    }

    /// Passes bytes on.
    fn write(&self, mut bytes: &[u8]) -> Result<(), Stop> {
        if let Self::Rtp(sender) = self {
            return sender.borrow_mut().feed(bytes).map_err(|e| {
                Stop::Failed(Failure::failed(e.to_string()).hint(
                    "--rtp takes MPEG transport streams: ffmpeg -i a.mp4 -c copy a.ts makes one",
                ))
            });
        }
        while let Some(fd) = self.fd().filter(|_| !bytes.is_empty()) {
            match rustix::io::write(fd, bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Stop::of(&e.into())),
            }
        }
        Ok(())
    }

    /// Ends the player's input and waits for it.
    fn finish(self) -> Result<(), Failure> {
        let (mut child, stdin) = match self {
            Self::Stdout(_) => return Ok(()),
            Self::Rtp(sender) => {
                return sender.into_inner().finish().map(drop).map_err(|e| {
                    Failure::failed(e.to_string()).hint("check the address of --rtp")
                });
            }
            Self::Player(child, stdin) => (child, stdin),
        };
        drop(stdin);
        let status = child.wait().map_err(|e| {
            Failure::failed(format!("cannot wait for the player: {e}")).hint("start it by hand")
        })?;
        if status.success() {
            Ok(())
        } else {
            Err(Failure::failed(format!("the player ended with {status}"))
                .hint("see its messages above"))
        }
    }
}

/// The reason why a fetch ended.
enum Stop {
    /// The reader has closed its end.
    Reader,
    Failed(Failure),
}

impl Stop {
    fn of(e: &io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            return Self::Reader;
        }
        Self::Failed(
            Failure::failed(format!("cannot write: {e}")).hint("check where the output goes"),
        )
    }
}

fn view_failure(e: &ViewError) -> Failure {
    match e {
        ViewError::Violation(_) => {
            Failure::refused(e.to_string()).hint("use the same version on both sides")
        }
        ViewError::Local(_) => Failure::failed(e.to_string())
            .hint("`weft doctor` says what this machine does not support"),
        // The bytes before are of the file as it was.
        ViewError::Denied(Denial::Changed) => {
            Failure::peer(e.to_string()).hint("the same command again begins anew")
        }
        _ => Failure::peer(e.to_string())
            .hint("the same command again begins anew; --from BYTES goes on"),
    }
}

pub(super) fn run(args: &PlayArgs, global: Global) -> Result<Exit, Failure> {
    let url = Url::parse(&args.url, SERVE_PORT)?;
    if weft_media::names::check(&url.name).is_err() {
        return Err(Failure::usage(format!("`{}` names no title", args.url))
            .hint(format!("`weft media list {}` lists them", url.server)));
    }
    let mut show = Show {
        caller: Caller::new(&args.dial, &url)?,
        request: Request::Title(url.name),
        device: open_device()?,
        sink: Sink::open(args)?,
        path: "tcp",
        done: 0,
        skipped: 0,
    };
    let began = Instant::now();
    let played = show.play(args);
    let Show {
        sink,
        path,
        done,
        skipped,
        ..
    } = show;
    let ended = sink.finish();
    // An error says all where nothing came.
    if !global.quiet && (done > 0 || played.is_ok()) {
        let lost = match skipped {
            0 => String::new(),
            n => format!(", {n} fragments skipped"),
        };
        tell!(
            "weft: {} in {:.2} s over {}{lost}",
            HumanBytes(done),
            began.elapsed().as_secs_f64(),
            carrier(path)
        );
    }
    match played {
        Err(Stop::Failed(failure)) => Err(failure),
        Ok(()) | Err(Stop::Reader) => ended.map(|()| Exit::Ok),
    }
}

/// A title that is being fetched.
struct Show {
    caller: Caller,
    request: Request,
    device: Device,
    sink: Sink,
    path: &'static str,
    /// Bytes that the sink has taken.
    done: u64,
    /// Fragments of a live stream that were lost.
    skipped: u64,
}

impl Show {
    fn play(&mut self, args: &PlayArgs) -> Result<(), Stop> {
        let patience = Duration::from_secs(args.retry);
        let mut tries = Tries::new(patience);
        loop {
            let outcome = match self.caller.open(&self.device, &self.request) {
                Ok(mut viewer) => {
                    self.path = viewer.transport();
                    match viewer.grant().content {
                        Content::Live(_) => {
                            tries = Tries::new(patience);
                            self.live(args, viewer)
                        }
                        _ => return self.movie(args, &mut viewer),
                    }
                }
                Err(failure) => Err(Stop::Failed(failure)),
            };
            match outcome {
                Err(Stop::Failed(failure)) if failure.exit() == Exit::Peer && tries.again() => {
                    tracing::info!("trying again: {}", failure.what());
                }
                outcome => return outcome,
            }
        }
    }

    fn movie(&mut self, args: &PlayArgs, viewer: &mut Viewer) -> Result<(), Stop> {
        let len = viewer.grant().len;
        if args.from > len {
            let text = format!("the title has {len} bytes: --from is past its end");
            return Err(Stop::Failed(
                Failure::usage(text).hint("choose a smaller --from"),
            ));
        }
        let to = args.length.map_or(len, |n| args.from.saturating_add(n));
        let mut range = viewer.range(args.from, to);
        loop {
            match range.next() {
                Ok(Some(piece)) => {
                    self.sink.piece(&range, &piece)?;
                    self.done += u64::from(piece.len);
                }
                Ok(None) => return Ok(()),
                Err(e) => return Err(Stop::Failed(view_failure(&e))),
            }
        }
    }

    fn live(&mut self, args: &PlayArgs, viewer: Viewer) -> Result<(), Stop> {
        let failed = |e: ViewError| Stop::Failed(view_failure(&e));
        let from = if args.oldest {
            From::Oldest
        } else {
            From::Newest
        };
        let mut watch = Watch::new(viewer, from).map_err(failed)?;
        let init = watch.init().map_err(failed)?;
        self.sink.write(&init)?;
        self.done += init.len() as u64;
        loop {
            match watch.next(Duration::from_secs(1)).map_err(failed)? {
                Some(Event::Fragment { bytes, .. }) => {
                    self.sink.write(&bytes)?;
                    self.done += bytes.len() as u64;
                }
                Some(Event::Skipped { from, to }) => {
                    self.skipped += to - from;
                    tracing::warn!("too slow: {} fragments skipped", to - from);
                }
                Some(Event::End) => return Ok(()),
                None => {}
            }
        }
    }
}

/// The time limit of retries.
struct Tries(Instant);

impl Tries {
    fn new(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    /// Sleeps before the next retry; false if the time is up.
    fn again(&self) -> bool {
        let more = Instant::now() < self.0;
        if more {
            std::thread::sleep(Duration::from_millis(200));
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::player_command;

    #[test]
    fn a_player_that_is_only_named_reads_its_input() {
        for (command, shell) in [
            ("vlc", "vlc -"),
            (" /usr/bin/mpv ", "/usr/bin/mpv -"),
            ("mpv -", "mpv -"),
            ("exit 7", "exit 7"),
            ("ffplay -i - | cat", "ffplay -i - | cat"),
            ("\"my player\"", "\"my player\""),
        ] {
            assert_eq!(player_command(command), shell, "{command}");
        }
    }
}
