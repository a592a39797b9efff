//! `weft cp`.

use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use weft_cli::args::ViaArgs;
use weft_session::Via;
use weft_verbs::tls::{Fingerprint, Identity};

use crate::cp::auth::Key;
use crate::cp::link::LinkError;
use crate::cp::listener::{Config, Events, Listener};
use crate::cp::protocol::{About, Fetch, FileFlags, RelPath, RingAdvert};
use crate::cp::receiver::{self, Totals, Watch};
use crate::cp::sender::{self, Progress, Report};
use crate::cp::session::{self, Wire};
use crate::cp::store::{Policy, Store, StoreError};
use crate::cp::target::Target;
use crate::cp::walk::{Plan, What};
use crate::cp::{DEFAULT_PORT, DEFAULT_SLOT_LEN, DEFAULT_SLOTS, cpu_time};
use weft_cli::failure::{Exit, Failure, without_numbers};
use weft_cli::global::Global;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::credentials::Credentials;
use weft_cli::identity::keypair;
use weft_cli::say;
use weft_cli::values::carrier;
use weft_service::endpoint::parse_bind;
use weft_service::text::printable;

pub(crate) const LONG: &str = "\
Copy files to another machine with one-sided RDMA Writes, receive them, or fetch them from a machine that serves them.

A file gets its final name only when it is complete and its checksum is right; an existing file is \
replaced at that moment, as a whole. An interrupted transfer leaves a hidden .NAME.weft-XXXX.part and its journal: \
the same command resumes it. Nothing is ever written outside the listener's directory.

TLS 1.3 encrypts and authenticates what leaves the machine. As with SSH, a sender recognises a receiver by its key, which is stored at the first \
use, and a receiver accepts files from the owners of the public keys that it knows. Between processes of one user on one machine, the kernel identifies the user, and \
shared memory carries the files.";

const EXAMPLES: &str = "\
Examples:
  # receive on this machine's loopback address, and send to it
  weft cp --listen /srv/in
  weft cp data.bin localhost:

  # between machines: make a key pair here, put the printed line into
  # the receiver's ~/.config/weft/authorized_keys, and receive on all addresses
  weft key
  weft cp --listen /srv/in --bind 0.0.0.0
  weft cp -r photos music host:backup/today
  # fetch what a listener with --serve gives
  weft cp --listen /srv/in --serve /srv/out
  weft cp -r host:photos .
  # in a script: the fingerprint that the listener prints
  weft cp --peer SHA256:... data.bin host:

  # a shared key instead, copied to the other machine
  weft cp --gen-key ~/weft.key
  weft cp --key ~/weft.key data.bin host:
  # IPv6 addresses need brackets
  weft cp big.iso [2001:db8::7]:7471:";

/// Options of `weft cp`.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = EXAMPLES,
    // `requires` alone is not asked where the required option conflicts with what is there.
    group(clap::ArgGroup::new("receiver")
        .args(["bind", "open", "serve", "any_links", "attributes", "once", "max_senders", "authorized", "slots", "slot_len"])
        .multiple(true)
        .conflicts_with("paths")),
    override_usage = "weft cp [OPTIONS] FILE... HOST[:PORT]:DIR\n       weft cp [OPTIONS] HOST[:PORT]:FILE... DIR\n       weft cp [OPTIONS] --listen DIR [--bind ADDR[:PORT]]\n       weft cp --gen-key FILE"
)]
pub struct Args {
    /// Files to send; the last argument is the destination, DIR is below the listener's directory and created if missing. Or files to fetch
    /// from a listener with --serve, and a directory for them
    #[arg(value_name = "FILE... HOST[:PORT]:DIR", required_unless_present_any = ["listen", "gen_key"])]
    paths: Vec<PathBuf>,

    /// Receive files into DIR
    #[arg(long, value_name = "DIR", conflicts_with_all = ["paths", "gen_key"], help_heading = "Receiving")]
    listen: Option<PathBuf>,
    /// Listen on this address. Beyond the loopback address senders need an authorized key, except with --open [default: 127.0.0.1:7471]
    #[arg(long, value_name = "ADDR[:PORT]", requires = "listen", value_parser = |text: &str| parse_bind(text, DEFAULT_PORT), help_heading = "Receiving")]
    bind: Option<SocketAddr>,
    /// Accept files from everybody who can reach the address
    #[arg(
        long,
        requires = "listen",
        conflicts_with = "key",
        help_heading = "Receiving"
    )]
    open: bool,
    /// Let those who may send also fetch the files below DIR, which follow no symbolic link
    #[arg(
        long,
        value_name = "DIR",
        requires = "listen",
        help_heading = "Receiving"
    )]
    serve: Option<PathBuf>,
    /// Create symbolic links that lead out of DIR too: absolute ones, and those with too many `..`
    #[arg(long, requires = "listen", help_heading = "Receiving")]
    any_links: bool,
    /// Give files the owners, special mode bits, ACLs and extended attributes that senders with --archive name. A sender can then leave
    /// programs here that run as others, as far as the listener's rights go
    #[arg(long, requires = "listen", help_heading = "Receiving")]
    attributes: bool,
    /// Stop after the first sender, with its result as exit status
    #[arg(long, requires = "listen", help_heading = "Receiving")]
    once: bool,
    /// Senders served at the same time
    #[arg(
        long,
        value_name = "N",
        requires = "listen",
        default_value_t = 32,
        value_parser = weft_cli::values::at_least_one(),
        help_heading = "Receiving"
    )]
    max_senders: usize,

    /// A key pair of `weft key` [default: ~/.config/weft/key, which a listener creates if missing]
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "key",
        help_heading = "Keys"
    )]
    identity: Option<PathBuf>,
    /// Accept only a receiver key with this fingerprint, and ask nothing (can be given several times)
    #[arg(long = "peer", value_name = "FINGERPRINT", conflicts_with_all = ["key", "listen", "plain"], help_heading = "Keys")]
    peers: Vec<Fingerprint>,
    /// Accept files from the owners of the public keys in FILE, one a line [default: `~/.config/weft/authorized_keys`]
    #[arg(long, value_name = "FILE", requires = "listen", conflicts_with_all = ["key", "open", "plain"], help_heading = "Keys")]
    authorized: Option<PathBuf>,
    /// Use a shared key instead of key pairs; both sides prove it and never send it
    #[arg(long, value_name = "FILE", help_heading = "Keys")]
    key: Option<PathBuf>,
    /// Make a new shared key in FILE, readable only by its owner
    #[arg(long, value_name = "FILE", exclusive = true, help_heading = "Keys")]
    gen_key: Option<PathBuf>,

    /// Send directories recursively
    #[arg(short, long, conflicts_with = "listen", help_heading = "Sending")]
    recursive: bool,
    /// Copy symbolic links found in directories as links, instead of skipping them
    #[arg(long, conflicts_with = "listen", help_heading = "Sending")]
    links: bool,
    /// As --recursive --links, and keep owners, special mode bits, ACLs, extended attributes (if the listener has --attributes) and hard
    /// links. Permission bits and modification times are always kept
    #[arg(short, long, conflicts_with = "listen", help_heading = "Sending")]
    archive: bool,
    /// Replace files without write permission too
    #[arg(short, long, conflicts_with_all = ["listen", "no_clobber"], help_heading = "Sending")]
    force: bool,
    /// No progress bar
    #[arg(long, conflicts_with = "listen", help_heading = "Sending")]
    no_progress: bool,

    /// Skip files that the receiver has with the same size and modification time
    #[arg(short, long, conflicts_with_all = ["listen", "no_clobber"], help_heading = "Sending")]
    update: bool,
    /// Show what would be sent, replaced and left alone, and send nothing
    #[arg(long, conflicts_with = "listen", help_heading = "Sending")]
    dry_run: bool,
    /// Send at most this many bytes of content a second; K, M and G are powers of 1024
    #[arg(long, value_name = "RATE", value_parser = weft_cli::values::size, conflicts_with_all = ["listen", "plain_tcp"], help_heading = "Sending")]
    limit_rate: Option<u64>,
    /// Print the summary as a JSON object: `dry_run`, files, bytes, kept, partial, `left_out`, held, holes, seconds, `cpu_s`, `peer_cpu_s`, transport, cipher, reason
    #[arg(long, conflicts_with = "listen", help_heading = "Sending")]
    json: bool,

    /// Skip files that exist at the receiver (either side can ask for it)
    #[arg(short, long)]
    no_clobber: bool,
    /// Write each file to the disk before it gets its name (either side can ask for it). Without it the file system may fail to write a file
    /// later (NFS, quotas), and nobody is told
    #[arg(long)]
    fsync: bool,
    /// Give up after this many seconds of silence of the peer
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,

    #[command(flatten)]
    via: ViaArgs,

    /// Use the same pipeline over plain TCP, for comparison; give it on both sides
    #[arg(long, hide = true, conflicts_with = "plain")]
    plain_tcp: bool,
    /// Slots in each sender's ring
    #[arg(long, hide = true, requires = "listen", default_value_t = DEFAULT_SLOTS, value_parser = clap::value_parser!(u16).range(1..=64))]
    slots: u16,
    /// Length of a slot in bytes
    #[arg(long, hide = true, requires = "listen", default_value_t = DEFAULT_SLOT_LEN, value_parser = clap::value_parser!(u32).range(4096..=16 << 20))]
    slot_len: u32,
}

/// Sends, receives or makes a key.
pub fn run(args: &Args, global: Global) -> Result<Exit, Failure> {
    if let Some(path) = &args.gen_key {
        Key::generate(path)?;
        if !global.quiet {
            say(format_args!(
                "{}: a new key; copy it to the other machine over a channel that you trust",
                path.display()
            ));
        }
        return Ok(Exit::Ok);
    }
    let key = args.key.as_deref().map(Key::read).transpose()?;
    if let Some(dir) = &args.listen {
        return listen(args, dir, key, global);
    }
    match args.paths.split_last() {
        Some((to, from))
            if !from.is_empty() && !is_remote(to) && from.iter().all(|path| is_remote(path)) =>
        {
            fetch(args, from, to, key, global)
        }
        _ => send(args, key, global),
    }
}

/// Whether this names a host, as scp decides it: a colon comes before any slash.
fn is_remote(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    let is_end = |b: &&u8| **b == b':' || **b == b'/';
    bytes.first() == Some(&b'[') && bytes.contains(&b':')
        || bytes.iter().find(is_end) == Some(&b':')
}

impl Args {
    fn what(&self) -> What {
        What {
            recursive: self.recursive || self.archive,
            links: self.links || self.archive,
            attributes: self.archive,
        }
    }

    fn flags(&self) -> FileFlags {
        FileFlags {
            no_wait: false,
            no_clobber: self.no_clobber,
            force: self.force,
            sync: self.fsync,
        }
    }

    /// The options of a connection, and of what is sent on it.
    fn sending(&self, key: Option<Key>) -> sender::Options {
        sender::Options {
            key,
            flags: self.flags(),
            update: self.update,
            archive: self.archive,
            dry_run: self.dry_run,
            limit_rate: self.limit_rate,
            patience: Duration::from_secs(self.timeout),
        }
    }

    fn receiving(&self, key: Option<Key>) -> receiver::Options {
        receiver::Options {
            key,
            slots: self.slots,
            slot_len: self.slot_len,
            serve: self.serve.clone(),
            patience: Duration::from_secs(self.timeout),
        }
    }

    fn policy(&self, attributes: bool) -> Policy {
        Policy {
            no_clobber: self.no_clobber,
            sync: self.fsync,
            any_links: self.any_links,
            attributes,
        }
    }

    fn wire(&self) -> Wire {
        if self.plain_tcp {
            Wire::PlainTcp
        } else {
            Wire::Rdma
        }
    }

    /// The sender's key, and the known keys of the listener at `target`.
    fn credentials(&self, target: &Target) -> Result<Credentials, Failure> {
        let name = target.server.to_string();
        match self.key {
            Some(_) => Credentials::shared(name),
            None => Credentials::new(name, self.identity.as_deref(), self.peers.clone()),
        }
    }

    /// The key pair of a listener, and its file if it was just created.
    fn listener_identity(&self) -> Result<(Identity, Option<PathBuf>), Failure> {
        if self.key.is_some() || self.via.plain || self.plain_tcp {
            return Ok((keypair::generate()?, None));
        }
        let path = keypair::file_of(self.identity.as_deref())?;
        let (identity, made) = keypair::read_or_make(&path)?;
        Ok((identity, made.then_some(path)))
    }
}

fn listen(args: &Args, dir: &Path, key: Option<Key>, global: Global) -> Result<Exit, Failure> {
    weft_cli::values::raise_nofile();
    let (identity, made) = args.listener_identity()?;
    let fingerprint = identity.public_key().fingerprint();
    let shows_key = key.is_none() && !args.plain_tcp;
    let authorized = Authorized::named_or_usual(args.authorized.as_deref());
    let listener = Listener::bind(Config {
        dir: dir.into(),
        bind: args
            .bind
            .unwrap_or((Ipv4Addr::LOCALHOST, DEFAULT_PORT).into()),
        wire: args.wire(),
        via: Via::from(&args.via),
        policy: args.policy(args.attributes),
        serve: args.receiving(key),
        identity,
        authorized: authorized.filter(|_| shows_key && !args.open),
        open: args.open,
        once: args.once,
        max_senders: args.max_senders,
    })?;
    if !global.quiet {
        say(format_args!(
            "listening on {}, files go to {}",
            listener.local_addr(),
            dir.display()
        ));
        if let Some(dir) = &args.serve {
            say(format_args!("files below {} can be fetched", dir.display()));
        }
        if let Some(path) = made {
            say(format_args!("made a key pair in {}", path.display()));
        }
        if shows_key && !args.via.plain {
            say(format_args!(
                "the key of this listener is {fingerprint}; senders elsewhere are asked to compare it"
            ));
        }
    }
    let events: Arc<dyn Events> = Arc::new(Lines {
        quiet: global.quiet,
    });
    listener.run(events).map(|()| Exit::Ok)
}

/// The output of a listener.
struct Lines {
    quiet: bool,
}

impl Events for Lines {
    fn connected(&self, peer: SocketAddr) {
        tracing::info!("{peer}: connected");
    }

    fn entry_failed(&self, peer: SocketAddr, path: &str, error: &StoreError) {
        weft_cli::tell!("weft: {peer}: {path}: {error}");
    }

    fn finished(
        &self,
        peer: SocketAddr,
        totals: Totals,
        took: Duration,
        end: Result<(), LinkError>,
    ) {
        if let Err(e) = &end {
            let resumes = totals.started && matches!(e, LinkError::Gone(_));
            let hint = if resumes {
                "; what had begun goes on when it is sent again"
            } else {
                ""
            };
            weft_cli::tell!("weft: {peer}: {e}{hint}");
        }
        if !self.quiet && totals.started {
            let fetched = if totals.fetched { "fetched " } else { "" };
            let failed = match totals.failed {
                0 => String::new(),
                n => format!("; {n} failed"),
            };
            say(format_args!(
                "{peer}: {fetched}{}{failed}",
                speed(totals.files, totals.bytes, took)
            ));
        }
    }
}

fn speed(files: u64, bytes: u64, took: Duration) -> String {
    let seconds = took.as_secs_f64().max(1e-6);
    let count = sender::files(files);
    let rate = match bytes as f64 / seconds {
        // The rate of so few bytes is that of the start.
        _ if bytes < 1 << 20 => String::new(),
        fast if fast >= 1e8 => format!(", {:.2} GB/s", fast / 1e9),
        slow => format!(", {:.1} MB/s", slow / 1e6),
    };
    format!("{count}, {} in {seconds:.2} s{rate}", HumanBytes(bytes))
}

fn send(args: &Args, key: Option<Key>, global: Global) -> Result<Exit, Failure> {
    let Some((target, sources)) = args
        .paths
        .split_last()
        .filter(|(_, sources)| !sources.is_empty())
    else {
        return Err(
            Failure::usage("one argument is not enough: name a file and where it goes")
                .hint("weft cp FILE... HOST[:PORT]:DIR, for example `weft cp data.bin localhost:`"),
        );
    };
    let target = target.to_str().ok_or_else(|| {
        Failure::usage("the target is not valid UTF-8").hint("write HOST[:PORT]:DIR")
    })?;
    let target = Target::parse(target)?;
    let plan = Plan::new(sources, target.dir.as_ref(), args.what())?;
    let mut failed = 0;
    for skipped in &plan.skipped {
        failed += u64::from(skipped.error);
        if skipped.error || !global.quiet {
            let source = printable(skipped.source.as_os_str().as_bytes());
            weft_cli::tell!("weft: {source}: {}", without_numbers(&skipped.why));
        }
    }
    if plan.entries.is_empty() {
        return Err(
            Failure::failed("nothing was sent: no source can be used").hint("see the lines above")
        );
    }
    let options = args.sending(key);
    let receiver = session::connect(
        &target,
        args.wire(),
        &Via::from(&args.via),
        &options,
        args.credentials(&target)?,
    )?;
    let began = Instant::now();
    let silent = global.quiet || args.no_progress || args.dry_run;
    let mut show = Show::new(plan.bytes, silent);
    show.says_plan = !global.quiet && !args.json;
    let sent = receiver.send(&plan, &options, &mut show);
    show.finish();
    let report = sent?;
    let took = began.elapsed();
    if args.json {
        say(serde_json::json!({
            "dry_run": args.dry_run,
            "files": report.written,
            "bytes": report.bytes,
            "kept": report.kept,
            "partial": report.partial,
            "left_out": plan.left_out(),
            "held": report.held,
            "holes": report.holes,
            "seconds": took.as_secs_f64(),
            "cpu_s": cpu_time().as_secs_f64(),
            "peer_cpu_s": report.peer_cpu.as_secs_f64(),
            "transport": report.path.as_ref().map(|path| path.transport),
            "cipher": report.cipher,
            "reason": report.path.as_ref().and_then(|path| path.reason.as_deref()),
        }));
    } else if !global.quiet {
        say(if args.dry_run {
            report.planned()
        } else {
            summary(&report, plan.left_out(), took)
        });
    }
    // Unreadable files are not part of the plan.
    let all = plan.files + failed;
    failed += report.failed;
    if failed > 0 {
        return Err(
            Failure::failed(format!("{failed} of {} could not be sent", all.max(failed)))
                .hint("see the lines above; the same command again sends what is missing"),
        );
    }
    Ok(Exit::Ok)
}

/// Says what is not fetched.
struct Fetching {
    quiet: bool,
}

impl Watch for Fetching {
    fn proved(&self) -> Result<(), &'static str> {
        Ok(())
    }

    fn entry_failed(&self, path: &str, error: &StoreError) {
        weft_cli::tell!("weft: {path}: {error}");
    }

    fn notice(&self, about: About, text: &str) {
        match about {
            About::Plan if !self.quiet => say(text),
            About::LeftOut if !self.quiet => weft_cli::tell!("weft: {}", without_numbers(text)),
            About::Error => weft_cli::tell!("weft: {}", without_numbers(text)),
            About::Plan | About::LeftOut => {}
        }
    }
}

fn fetch(
    args: &Args,
    from: &[PathBuf],
    to: &Path,
    key: Option<Key>,
    global: Global,
) -> Result<Exit, Failure> {
    if args.dry_run && args.json {
        return Err(
            Failure::usage("--dry-run of files to fetch has no form in JSON")
                .hint("leave --json away"),
        );
    }
    let mut targets = Vec::new();
    for path in from {
        let text = path.to_str().ok_or_else(|| {
            Failure::usage("a source is not valid UTF-8").hint("fetch the directory that it is in")
        })?;
        targets.push(Target::parse(text)?);
    }
    let first = &targets[0];
    if let Some(other) = targets.iter().find(|other| other.server != first.server) {
        return Err(Failure::usage(format!(
            "files of {} and of {} cannot be fetched together",
            first.server.host, other.server.host
        ))
        .hint("run one command for each host"));
    }
    let request = Fetch {
        flags: args.flags(),
        update: args.update,
        dry_run: args.dry_run,
        what: args.what(),
        ring: RingAdvert::default(),
        limit_rate: args.limit_rate.unwrap_or(0),
        paths: targets.iter().map(|target| target.dir.clone()).collect(),
    };
    if !request.fits() {
        return Err(Failure::usage("too many names to fetch in one command")
            .hint("fetch the directory that they are in, with -r"));
    }
    let mut store = Store::open(to, args.policy(args.archive)).map_err(|e| {
        Failure::failed(format!("cannot receive into {}: {e}", to.display()))
            .hint("the last argument is a directory that exists and that you can write to")
    })?;
    // The other side decides what it sends, and not where it goes.
    let named = |path: &Option<RelPath>| path.as_ref().map(|path| path.split().1.to_vec());
    if let Some(names) = request.paths.iter().map(named).collect() {
        store.only(names);
    }
    let options = args.sending(key.clone());
    let peer = session::connect(
        first,
        args.wire(),
        &Via::from(&args.via),
        &options,
        args.credentials(first)?,
    )?;
    let began = Instant::now();
    let watch = Fetching {
        quiet: global.quiet,
    };
    let totals = peer.fetch(request, store, &args.receiving(key), &watch)?;
    let took = began.elapsed();
    let path = peer.path();
    if args.json {
        say(serde_json::json!({
            "files": totals.files,
            "bytes": totals.bytes,
            "partial": totals.partial,
            "left_out": totals.left_out,
            "seconds": took.as_secs_f64(),
            "cpu_s": cpu_time().as_secs_f64(),
            "transport": path.transport,
            "reason": path.reason,
        }));
    } else if !global.quiet && !args.dry_run {
        let via = carrier(path.transport);
        let rate = speed(totals.files, totals.bytes, took);
        let missing = missing(totals.partial, totals.left_out);
        say(format_args!("{rate} over {via}{missing}"));
    }
    let whole_trees = args.recursive || args.archive;
    match totals.failed {
        // What was named is left out; in a directory, others may be there.
        0 if !whole_trees && !args.dry_run && totals.files == 0 && totals.left_out > 0 => {
            Err(Failure::failed("nothing was fetched").hint("see the lines above"))
        }
        0 => Ok(Exit::Ok),
        failed => Err(Failure::failed(format!("{failed} could not be fetched"))
            .hint("see the lines above; the same command again fetches what is missing")),
    }
}

fn summary(report: &Report, left_out: u64, took: Duration) -> String {
    let via = report.path.as_ref().map_or(String::new(), |path| {
        let cipher = report.cipher.map_or(String::new(), |c| format!(" ({c})"));
        format!(" over {}{cipher}", carrier(path.transport))
    });
    let mut line = format!(
        "{}{via}, CPU {:.2} s here and {:.2} s there",
        speed(report.written, report.bytes, took),
        cpu_time().as_secs_f64(),
        report.peer_cpu.as_secs_f64()
    );
    // Writing to a string cannot fail.
    if report.held > 0 {
        let _ = write!(line, "; {} were there already", HumanBytes(report.held));
    }
    if report.holes > 0 {
        let _ = write!(line, "; {} are holes", HumanBytes(report.holes));
    }
    if report.kept > 0 {
        let _ = write!(line, "; {} left alone", report.kept);
    }
    line + &missing(report.partial, left_out)
}

/// The end of a summary: what a copy does not have.
fn missing(partial: u64, left_out: u64) -> String {
    let count = |count, what| match count {
        0 => String::new(),
        count => format!("; {count} {what}"),
    };
    count(partial, "without all attributes") + &count(left_out, "left out")
}

/// A bar on a terminal, a line every few seconds elsewhere.
struct Show {
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    began: Instant,
    told: Instant,
    plain: bool,
    /// Whether what would be done is said.
    says_plan: bool,
}

impl Show {
    fn new(total: u64, silent: bool) -> Self {
        let terminal = weft_report::terminal::redraws(&std::io::stderr());
        let bar = (terminal && !silent).then(|| {
            let style =
                "{wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
            let bar = ProgressBar::new(total);
            bar.set_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar
        });
        let now = Instant::now();
        Self {
            bar,
            total,
            done: 0,
            began: now,
            told: now,
            plain: !terminal && !silent,
            says_plan: false,
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Show {
    fn advance(&mut self, bytes: u64, held: bool) {
        self.done += bytes;
        match &self.bar {
            Some(bar) if held => {
                bar.inc(bytes);
                bar.reset_eta();
            }
            Some(bar) => bar.inc(bytes),
            None if self.plain && self.told.elapsed() >= Duration::from_secs(5) => {
                self.told = Instant::now();
                let percent = self.done * 100 / self.total.max(1);
                let seconds = self.began.elapsed().as_secs();
                weft_cli::tell!(
                    "{percent} % of {} after {seconds} s",
                    HumanBytes(self.total)
                );
            }
            None => {}
        }
    }

    fn would(&mut self, what: &str, path: &RelPath) {
        if self.says_plan {
            say(format_args!("{what}: {path}"));
        }
    }

    fn planned(&mut self, _report: &Report) {}

    fn note(&mut self, line: &str) {
        let line = without_numbers(line);
        match &self.bar {
            Some(bar) => bar.suspend(|| weft_cli::tell!("weft: {line}")),
            None => weft_cli::tell!("weft: {line}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Args;

    #[derive(Debug, Parser)]
    struct Cp {
        #[command(flatten)]
        args: Args,
    }

    fn parse(args: &str) -> Result<Cp, clap::Error> {
        Cp::try_parse_from(["cp"].into_iter().chain(args.split_whitespace()))
    }

    #[test]
    fn options_of_a_receiver_are_refused_to_a_sender() {
        for option in [
            "--bind 127.0.0.1",
            "--open",
            "--serve /srv",
            "--any-links",
            "--attributes",
            "--once",
            "--max-senders 3",
            "--authorized keys",
            "--slots 4",
            "--slot-len 4096",
        ] {
            assert!(
                parse(&format!("--listen /tmp {option}")).is_ok(),
                "{option}"
            );
            let error = parse(&format!("{option} file host:")).expect_err(option);
            assert_eq!(error.exit_code(), 2, "{option}: {error}");
        }
    }
}
