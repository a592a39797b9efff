//! `weft fs`: remote memory as files.
#![forbid(unsafe_code)]

mod keys;
mod mount;

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::{HumanDuration, ProgressBar, ProgressFinish, ProgressStyle};
use nix::sys::signal::{SigSet, Signal};
use weft_cli::args::fs::{
    Args, Command, Common, GetArgs, LONG, MountArgs, PutArgs, RunArgs, ServeArgs,
};
use weft_cli::failure::{Exit, Failure};
use weft_cli::global::Global;
use weft_cli::start::{EXIT_OWN, fail, refuse};
use weft_cli::values::raise_nofile;
use weft_cli::{places, say, tell, tidy_up};
use weft_fs::name::RemotePath;
use weft_fs::wire::{Attr, Flags};
use weft_fs::{Client, Errno, Error, File, OpenOptions};
use weft_report::programs::find;
use weft_service::text::printable;
use weft_sys::elf::{self, Kind};

use keys::{connect, explain};

fn main() -> ExitCode {
    weft_cli::program::application("fs", LONG, run)
}

/// Runs the subcommand.
fn run(args: &Args, global: Global) -> Result<ExitCode, Failure> {
    match &args.command {
        Command::Serve(args) => serve(args, global),
        Command::Run(args) => return Ok(start(args)),
        Command::Mount(args) => mount(args, global),
        Command::Ls(args) => each(&args.below_rdma(), &args.common, |client, path| {
            list(client, path, args.json)
        }),
        Command::Stat(args) => each(&args.below_rdma(), &args.common, |client, path| {
            let attr = client.stat(&path.name).map_err(|e| explain(path, &e))?;
            show(&path.to_bytes(), &attr, args.json);
            Ok(())
        }),
        Command::Cat(args) => each(&args.paths, &args.common, |client, path| {
            let file = client
                .open(&path.name, OpenOptions::read())
                .map_err(|e| explain(path, &e))?;
            let mut out = io::stdout().lock();
            download(path, &file, &mut out, &ProgressBar::hidden())
        }),
        Command::Rm(args) => each(&args.paths, &args.common, |client, path| {
            let gone = match client.unlink(&path.name) {
                Err(Error::Errno(Errno::ISDIR)) => client.rmdir(&path.name),
                other => other,
            };
            gone.map_err(|e| explain(path, &e))
        }),
        Command::Mkdir(args) => each(&args.paths, &args.common, |client, path| {
            client.mkdir(&path.name).map_err(|e| explain(path, &e))
        }),
        Command::Chmod(args) => each(&args.paths, &args.common, |client, path| {
            // A key that is forgotten makes room for one that is named.
            let keys = [(&args.forgotten, false), (&args.named, true)];
            let mut keys = keys
                .iter()
                .flat_map(|(keys, adds)| keys.iter().map(move |k| (k, *adds)));
            keys.try_for_each(|(key, adds)| client.share(&path.name, key, adds))
                .and_then(|()| client.chmod(&path.name, args.mode))
                .map_err(|e| explain(path, &e))
        }),
        Command::Put(args) => put(args, global),
        Command::Get(args) => get(args, global),
    }
    .map(Into::into)
}

/// Applies an operation to each path; a failure does not stop the others.
fn each(
    paths: &[PathBuf],
    common: &Common,
    act: impl Fn(&Client, &RemotePath) -> Result<(), Failure>,
) -> Result<Exit, Failure> {
    let mut parsed = Vec::new();
    for path in paths {
        parsed.push(keys::parse(path)?);
    }
    let mut clients: Vec<Client> = Vec::new();
    let mut failed = None;
    for path in &parsed {
        let known = clients.iter().find(|c| c.endpoint() == &path.endpoint);
        let client = if let Some(client) = known {
            client.clone()
        } else {
            let client = connect_as(common, path)?;
            clients.push(client.clone());
            client
        };
        if let Err(failure) = act(&client, path)
            && let Some(earlier) = failed.replace(failure)
        {
            tell!("weft: {earlier}");
        }
    }
    failed.map_or(Ok(Exit::Ok), Err)
}

fn connect_as(common: &Common, path: &RemotePath) -> Result<Client, Failure> {
    connect(&path.endpoint, common)
}

fn list(client: &Client, path: &RemotePath, json: bool) -> Result<(), Failure> {
    let told = |e: Error| explain(path, &e);
    match client.list(&path.name) {
        Ok(entries) => {
            for entry in entries {
                show(&entry.name, &entry.attr, json);
            }
            Ok(())
        }
        Err(Error::Errno(Errno::NOTDIR)) => {
            let attr = client.stat(&path.name).map_err(told)?;
            show(path.name.as_bytes(), &attr, json);
            Ok(())
        }
        Err(e) => match client.stat(&path.name) {
            Ok(attr) if !attr.dir => {
                show(path.name.as_bytes(), &attr, json);
                Ok(())
            }
            _ => Err(told(e)),
        },
    }
}

fn show(name: &[u8], attr: &Attr, json: bool) {
    let kind = match (attr.dir, attr.writable) {
        (true, _) => "folder",
        (false, true) => "buffer",
        (false, false) => "file",
    };
    if json {
        say(serde_json::json!({
            // JSON has escapes of its own.
            "name": String::from_utf8_lossy(name),
            "kind": kind,
            "size": attr.size,
            "mtime": attr.mtime as f64 / 1e9,
            "writable": attr.writable,
            "mode": format!("{:03o}", attr.mode),
        }));
        return;
    }
    let name = printable(name);
    let slash = if attr.dir && !name.ends_with('/') {
        "/"
    } else {
        ""
    };
    let age = (UNIX_EPOCH + Duration::from_nanos(attr.mtime)).elapsed();
    let age = HumanDuration(age.unwrap_or_default());
    say(format_args!(
        "{kind:6} {:03o} {:>14} {:>10} {name}{slash}",
        attr.mode,
        attr.size,
        if attr.mtime == 0 {
            "-".into()
        } else {
            format!("{age:#} ago")
        }
    ));
}

fn serve(args: &ServeArgs, global: Global) -> Result<Exit, Failure> {
    raise_nofile();
    let serving = keys::serve(args)?;
    if !global.quiet {
        let addr = serving.server.local_addr();
        // All addresses are no name for others.
        let name = if addr.ip().is_unspecified() {
            format!("HOST:{}", addr.port())
        } else {
            addr.to_string()
        };
        say(format_args!("serving on {addr}, as /rdma/{name}/NAME"));
        if let Some(path) = &serving.made {
            say(format_args!("made a key pair in {}", path.display()));
        }
        if let Some(fingerprint) = &serving.fingerprint {
            say(format_args!(
                "the key of this server is {fingerprint}; clients elsewhere are asked to compare it"
            ));
        }
    }
    serving.server.wait();
    Err(Failure::failed("the serving threads have ended"))
}

/// Mounts, and serves the kernel until it is unmounted or a signal arrives.
fn mount(args: &MountArgs, global: Global) -> Result<Exit, Failure> {
    let path = keys::parse(&args.source)?;
    if !path.name.is_root() {
        return Err(Failure::usage(format!(
            "{} names a buffer, and a whole server is mounted",
            args.source.display()
        ))
        .hint(format!("/rdma/{}", path.endpoint)));
    }
    // The kernel would lay the server over a file too.
    if std::fs::metadata(&args.dir).is_ok_and(|about| !about.is_dir()) {
        return Err(
            Failure::usage(format!("{} is no directory", args.dir.display()))
                .hint("name an empty directory"),
        );
    }
    // Before there are threads, so that none of them takes one.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    let unable = |what: &str| Failure::failed(format!("{}: {what}", args.dir.display()));
    signals.thread_block().map_err(|e| unable(&e.to_string()))?;
    let client = connect_as(&args.common, &path)?;
    let mounted = mount::mount(client, &args.dir, args.others).map_err(|e| {
        unable(&format!("cannot mount: {e}")).hint(
            "name an empty directory; /dev/fuse has to be there, and you have to be root or have fusermount3 (Debian's package fuse3)",
        )
    })?;
    if !global.quiet {
        say(format_args!(
            "mounted /rdma/{} on {}; `umount {}` or Ctrl-C ends it",
            path.endpoint,
            args.dir.display(),
            args.dir.display()
        ));
    }
    let (run, mut unmounter) = mounted.split();
    let dir = args.dir.clone();
    std::thread::Builder::new()
        .name("weft-fs-signal".into())
        .spawn(move || {
            mount::tune(&dir);
            if signals.wait().is_ok() && unmounter.unmount().is_err() {
                // A file is open: its name is removed at once, and the rest when it is closed.
                if let Err(e) = mount::detach(&dir) {
                    tell!("weft: cannot unmount {}: {e}", dir.display());
                }
            }
        })
        .map_err(|e| unable(&format!("cannot start a thread: {e}")))?;
    run().map(|()| Exit::Ok).map_err(|e| unable(&e.to_string()))
}

/// Executes the program, with the preload library.
fn start(args: &RunArgs) -> ExitCode {
    let Some((name, rest)) = args.command.split_first() else {
        return fail(EXIT_OWN, &Failure::usage("no program is named"));
    };
    let program = match find(name) {
        Ok(program) => program,
        Err(e) => return refuse(name, &e),
    };
    let prepared = library(args.lib.as_deref())
        .and_then(|library| Ok((library, keys::environment(&args.keys)?)));
    let (library, settings) = match prepared {
        Ok(prepared) => prepared,
        Err(failure) => return fail(EXIT_OWN, &failure),
    };
    let kind = std::fs::File::open(&program).and_then(|file| elf::kind(&file));
    if let Ok(Kind::Static) = kind {
        tell!(
            "weft: warning: {}: it is linked statically, so no library of ours is loaded; use `weft fs mount`",
            program.display()
        );
    }
    let mut preload = library.into_os_string();
    if let Some(rest) = std::env::var_os("LD_PRELOAD").filter(|rest| !rest.is_empty()) {
        preload.push(":");
        preload.push(rest);
    }
    // Only a failure comes back.
    let error = std::process::Command::new(&program)
        .arg0(name)
        .args(rest)
        .envs(settings)
        .env("LD_PRELOAD", preload)
        .exec();
    refuse(name, &error)
}

/// The preload library.
fn library(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let missing = |what: String| {
        Failure::failed(what)
            .hint("the package libweft-preload has it, `./x dist` builds it into target/dist/lib; --lib FILE or WEFT_FS_LIB names it")
    };
    let found = if let Some(path) = named {
        path.canonicalize()
            .map_err(|e| missing(format!("{}: {e}", path.display())))?
    } else {
        let places = places::preload_libraries()?;
        let names = ["libweft-fs.so", "libweft_fs_preload.so"];
        let files = places
            .iter()
            .flat_map(|dir| names.map(|name| dir.join(name)));
        files
            .into_iter()
            .find_map(|file| file.canonicalize().ok())
            .ok_or_else(|| {
                missing(format!(
                    "libweft-fs.so is in none of {}",
                    places::named(&places)
                ))
            })?
    };
    places::preloadable(found)
}

fn bar(len: Option<u64>, hidden: bool) -> ProgressBar {
    if hidden || !weft_report::terminal::redraws(&io::stderr()) {
        return ProgressBar::hidden();
    }
    let (bar, form) = match len {
        Some(len) => (
            ProgressBar::new(len),
            "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ),
        None => (ProgressBar::new_spinner(), "{bytes} {bytes_per_sec}"),
    };
    // Also where an error ends it: the message begins a line of its own.
    let bar = bar.with_finish(ProgressFinish::AndClear);
    match ProgressStyle::with_template(form) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn put(args: &PutArgs, global: Global) -> Result<Exit, Failure> {
    let path = keys::parse(&args.target)?;
    // Before connecting, because a misspelt name is a local error.
    for source in args.sources.iter().filter(|s| *s != Path::new("-")) {
        let about = std::fs::metadata(source).map_err(|e| {
            Failure::failed(format!("cannot read {}: {e}", source.display()))
                .hint("check its name and its permissions")
        })?;
        if about.is_dir() {
            return Err(
                Failure::usage(format!("{} is a directory", source.display()))
                    .hint("name files; `weft fs mkdir` makes folders of a server"),
            );
        }
    }
    let client = connect_as(&args.common, &path)?;
    // Each would take the place of the one before.
    if args.sources.len() > 1 && !keys::is_dir(&client, &path) {
        return Err(Failure::usage(format!(
            "{} is no folder, and several files are to go there",
            args.target.display()
        ))
        .hint("name a folder of the server, or make one with `weft fs mkdir`"));
    }
    for source in &args.sources {
        let stdin = source == Path::new("-");
        if stdin && path.name.is_root() {
            return Err(Failure::usage("standard input needs a name on the server")
                .hint(format!("write /rdma/{}/NAME", path.endpoint)));
        }
        let name = if stdin {
            path.name.clone()
        } else {
            keys::target(&client, &path, source)?
        };
        let path = RemotePath {
            name,
            ..path.clone()
        };
        if !client.server_keeps().map_err(|e| explain(&path, &e))?
            && client.stat(&path.name).is_err()
        {
            return Err(Failure::failed(format!(
                "the server at {} frees a buffer when its last user closes it, which this program does at its end",
                path.endpoint
            ))
            .hint("start it with `weft fs serve --keep`, or have the buffer opened by its reader first"));
        }
        let unreadable = |e: io::Error| Failure::failed(format!("{}: {e}", source.display()));
        let (mut from, len): (Box<dyn Read>, _) = if stdin {
            (Box::new(io::stdin().lock()), None)
        } else {
            let file = std::fs::File::open(source).map_err(unreadable)?;
            let about = file.metadata().map_err(unreadable)?;
            (Box::new(file), about.is_file().then_some(about.len()))
        };
        let told = |e: Error| explain(&path, &e);
        let flags = if args.append {
            Flags::APPEND
        } else {
            Flags::TRUNCATE
        };
        let options = OpenOptions {
            flags: Flags::WRITE.with(Flags::CREATE).with(flags),
            size: path.size,
        };
        let file = client.open(&path.name, options).map_err(told)?;
        let bar = bar(len, global.quiet || args.no_progress);
        let done = upload(&mut from, &file, args.append, &bar)
            .and_then(|()| file.close().map_err(Trouble::There));
        if let Err(trouble) = done {
            // Readers find the whole contents, or nothing.
            if !args.append {
                let _ = client.unlink(&path.name);
            }
            return Err(match trouble {
                Trouble::Here(e) => unreadable(e),
                Trouble::There(e) => told(e),
            });
        }
    }
    Ok(Exit::Ok)
}

/// Where a copy failed.
enum Trouble {
    Here(io::Error),
    There(Error),
}

fn upload(
    from: &mut dyn Read,
    file: &File,
    append: bool,
    bar: &ProgressBar,
) -> Result<(), Trouble> {
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let n = match from.read(&mut bytes) {
            Ok(0) => return file.sync().map_err(Trouble::There),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(Trouble::Here(e)),
        };
        let done = if append {
            file.append(&bytes[..n])
        } else {
            file.pwrite(&bytes[..n], at)
        };
        at += done.map_err(Trouble::There)? as u64;
        bar.set_position(at);
    }
}

fn download(
    path: &RemotePath,
    file: &File,
    to: &mut dyn Write,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let n = file.pread(&mut bytes, at).map_err(|e| explain(path, &e))?;
        let written = match n {
            0 => to.flush(),
            _ => to.write_all(&bytes[..n]),
        };
        match written {
            Ok(()) => {}
            // A closed pipe is not an error.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(e) => {
                return Err(Failure::failed(format!("cannot write: {e}"))
                    .hint("check where the output goes"));
            }
        }
        if n == 0 {
            return Ok(());
        }
        at += n as u64;
        bar.set_position(at);
    }
}

fn get(args: &GetArgs, global: Global) -> Result<Exit, Failure> {
    use std::os::unix::ffi::OsStrExt;
    let path = keys::parse(&args.source)?;
    let to_stdout = args.target == Path::new("-");
    let target = if args.target.is_dir() {
        args.target
            .join(std::ffi::OsStr::from_bytes(path.name.last()))
    } else {
        args.target.clone()
    };
    // A device or a pipe takes the bytes as they come.
    let is_stream = std::fs::metadata(&target).is_ok_and(|about| !about.is_file());
    // Nothing half-done is left under the final name.
    let part = target.with_file_name(format!(".weft-{}.part", std::process::id()));
    let unfinished = (!to_stdout && !is_stream).then(|| part.clone());
    tidy_up(move || {
        unfinished.map(std::fs::remove_file);
    });
    let client = connect_as(&args.common, &path)?;
    let told = |e: Error| explain(&path, &e);
    let file = client.open(&path.name, OpenOptions::read()).map_err(told)?;
    let attr = file.stat().map_err(told)?;
    let bar = bar(Some(attr.size), global.quiet || args.no_progress);
    if to_stdout {
        download(&path, &file, &mut io::stdout().lock(), &bar)?;
        return Ok(Exit::Ok);
    }
    let failed = |e: io::Error| Failure::write(&target, &e);
    if is_stream {
        let mut to = std::fs::File::options()
            .write(true)
            .open(&target)
            .map_err(failed)?;
        download(&path, &file, &mut to, &bar)?;
        return Ok(Exit::Ok);
    }
    let mut to = std::fs::File::options()
        .write(true)
        .create_new(true)
        .open(&part)
        .map_err(failed)?;
    let done = download(&path, &file, &mut to, &bar).and_then(|()| {
        let mtime = SystemTime::UNIX_EPOCH + Duration::from_nanos(attr.mtime);
        let _ = to.set_modified(mtime);
        std::fs::rename(&part, &target).map_err(failed)
    });
    if done.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    done.map(|()| Exit::Ok)
}
