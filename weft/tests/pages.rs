//! The commands of the README and of the docs, run as they are typed there.
//!
//! A block after the line `<!-- run -->` is run by a shell, in a directory and in namespaces (network, processes) of its own. `<!-- run: A B -->` names the
//! programs and libraries that the block needs beside weft; without them it is skipped. `<!-- run as root: ... -->` keeps the users of the machine, and is skipped
//! without root. Where lines begin with `$ `, these are the commands, and the others
//! their output. After a command in the background the next one waits until something listens on a port.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The part of a script before the commands.
const BEGIN: &str = r#"set -eu
ip link set lo up
listeners() { cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == "0A" { print $10 }'; }
# Until the command in the background, which was started when there were the listeners $@, listens too. Others may end meanwhile.
listens() {
  for _ in $(seq 3000); do
    for one in $(listeners); do
      case " $* " in *" $one "*) ;; *) return ;; esac
    done
    kill -0 $! || return 1
    sleep 0.01
  done
  return 1
}
"#;

struct Block {
    place: String,
    needs: Vec<String>,
    commands: Vec<String>,
    /// It needs other users.
    as_root: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The blocks of a page that are marked.
fn blocks(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(root().join(page)).expect(page);
    let mut lines = text.lines().enumerate();
    let mut found = Vec::new();
    while let Some((number, line)) = lines.next() {
        let Some(needs) = line
            .strip_prefix("<!-- run")
            .and_then(|l| l.strip_suffix(" -->"))
        else {
            continue;
        };
        let place = format!("{page}:{}", number + 1);
        let root = needs.strip_prefix(" as root");
        let fence = lines.next().map(|(_, line)| line);
        assert!(
            fence.is_some_and(|l| l.starts_with("```")),
            "{place}: a block follows"
        );
        let block: Vec<&str> = lines
            .by_ref()
            .map(|(_, l)| l)
            .take_while(|l| *l != "```")
            .collect();
        let typed: Vec<&str> = block.iter().filter_map(|l| l.strip_prefix("$ ")).collect();
        let commands = if typed.is_empty() { block } else { typed };
        found.push(Block {
            place,
            as_root: root.is_some(),
            needs: root
                .unwrap_or(needs)
                .trim_start_matches(':')
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            commands: commands.into_iter().map(str::to_owned).collect(),
        });
    }
    found
}

/// The script of a block.
fn script(block: &Block) -> String {
    let mut script = BEGIN.to_owned();
    for command in &block.commands {
        let typed = command.split(" #").next().unwrap_or_default().trim_end();
        if typed.ends_with(" &") {
            let _ = writeln!(script, "before=$(listeners)\n{command}\nlistens $before");
        } else {
            let _ = writeln!(script, "{command}");
        }
    }
    script
}

/// What a block needs and is not there.
fn missing(needs: &[String], weft: &Path, path: &str, preload: &Path) -> Option<String> {
    let beside = weft.parent()?;
    let libraries = beside.parent()?.join("dist/lib");
    let is_there = |need: &String| {
        if need.starts_with("lib") {
            // As cargo leaves the preload libraries.
            let built = need.replace('-', "_").replace(".so", "_preload.so");
            preload.join(need).exists()
                || libraries.join(need).exists()
                || beside.join(built).exists()
                || weft_dropin::libraries().join(need).exists()
        } else {
            path.split(':')
                .any(|folder| Path::new(folder).join(need).exists())
        }
    };
    needs.iter().find(|need| !is_there(need)).cloned()
}

/// A shell in namespaces of its own.
fn shell(as_root: bool) -> Command {
    let mut command = Command::new("timeout");
    command.args(["120", "unshare"]);
    if !as_root {
        command.arg("--map-root-user");
    }
    command.args(["--net", "--pid", "--fork"]);
    command.args(["--kill-child", "--mount-proc", "bash"]);
    command.stdin(Stdio::null());
    command
}

#[test]
fn commands_of_the_pages_run_as_they_are_typed() {
    let can = shell(false).args(["-c", "ip link set lo up"]).output();
    if !can.is_ok_and(|out| out.status.success()) {
        println!("skipped: needs unshare, ip and namespaces");
        return;
    }
    let weft = Path::new(env!("CARGO_BIN_EXE_weft"));
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", weft.parent().expect("a folder").display());
    // What an older build has left beside weft would be taken else.
    let preload = weft_dropin::built("run", "run");
    let mut pages = vec!["README.md".to_owned()];
    for entry in fs::read_dir(root().join("docs")).expect("docs") {
        let name = entry
            .expect("docs")
            .file_name()
            .into_string()
            .expect("a name");
        if Path::new(&name).extension() == Some(OsStr::new("md")) {
            pages.push(format!("docs/{name}"));
        }
    }
    let blocks: Vec<Block> = pages.iter().flat_map(|page| blocks(page)).collect();
    assert!(blocks.len() > 10, "the pages have marked blocks");
    let mut failed = String::new();
    for (i, block) in blocks.iter().enumerate() {
        if let Some(need) = missing(&block.needs, weft, &path, &preload) {
            println!("{}: skipped, no {need}", block.place);
            continue;
        }
        if block.as_root && !rustix::process::geteuid().is_root() {
            println!("{}: skipped, it needs root", block.place);
            continue;
        }
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pages-{i}"));
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).expect("a directory");
        let out = shell(block.as_root)
            .args(["-c", &script(block)])
            .current_dir(&home)
            .env("PATH", &path)
            .env("WEFT_VERBS_LIB", weft_dropin::libraries())
            .env("WEFT_RUN_LIB", &preload)
            .envs(["HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"].map(|name| (name, &home)))
            .output()
            .expect("a shell");
        if !out.status.success() {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (said, errors) = (text(&out.stdout), text(&out.stderr));
            let _ = writeln!(failed, "{}: {}\n{said}{errors}", block.place, out.status);
        }
        let _ = fs::remove_dir_all(&home);
    }
    assert!(failed.is_empty(), "{failed}");
}
