//! Shared libraries for C, linked from cargo's static ones. The linker gets each exported name with its version, and discards what none of them
//! needs. cargo's own shared libraries cannot have a version script.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{fs, io};

/// A name that a library exports.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub version: String,
    pub name: String,
    /// For old programs: new ones are linked to another version of the name.
    pub hidden: bool,
    /// The target of the jump; without one, a function of this name is exported.
    pub function: Option<String>,
}

/// Reads lines `VERSION NAME`, `VERSION NAME = FUNCTION`, `VERSION NAME@ = FUNCTION`, `VERSION + OTHER - NAME...`; see doors/libibverbs/symbols/ibverbs.
pub(crate) fn parse(text: &str) -> Result<Vec<Symbol>, String> {
    let mut symbols: Vec<Symbol> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (version, name, function) = match words[..] {
            [] => continue,
            [version, "+", other, "-", ref but @ ..] => {
                let same = as_under(&symbols, version, other, but);
                if same.is_empty() {
                    return Err(format!("'{line}' names a version that has no names so far"));
                }
                symbols.extend(same);
                continue;
            }
            [version, name] => (version, name, None),
            [version, name, "=", function] => (version, name, Some(function.to_owned())),
            _ => return Err(format!("'{line}' is not VERSION NAME [= FUNCTION]")),
        };
        let hidden = name.ends_with('@');
        if hidden && function.is_none() {
            return Err(format!("'{line}' does not say what the name stands for"));
        }
        symbols.push(Symbol {
            version: version.to_owned(),
            name: name.trim_end_matches('@').to_owned(),
            hidden,
            function,
        });
    }
    Ok(symbols)
}

/// The symbols of version `other`, except those in `but`, repeated under `version`.
fn as_under(symbols: &[Symbol], version: &str, other: &str, but: &[&str]) -> Vec<Symbol> {
    let taken = symbols
        .iter()
        .filter(|symbol| symbol.version == other && !but.contains(&symbol.name.as_str()));
    let same = taken.map(|symbol| Symbol {
        version: version.to_owned(),
        name: symbol.name.clone(),
        hidden: true,
        function: Some(symbol.function.as_ref().unwrap_or(&symbol.name).clone()),
    });
    same.collect()
}

pub(crate) struct Library<'a> {
    pub path: &'a Path,
    pub soname: &'a str,
    pub symbols: &'a [Symbol],
    /// The functions that names jump to are in another library.
    pub forwards: bool,
    /// Objects, archives and further arguments for the linker, in order.
    pub inputs: &'a [String],
    pub strip: bool,
}

impl Library<'_> {
    /// Links the library. Names without a definition, and unexpected exports, are errors that list the names.
    pub(crate) fn link(&self) -> Result<(), String> {
        let built = beside(self.path);
        let script = built.with_added_extension("map");
        let jumps = built.with_added_extension("s");
        write(&script, &version_script(self.symbols))?;
        write(
            &jumps,
            &assembly(self.symbols, self.forwards, std::env::consts::ARCH)?,
        )?;
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.arg("-shared").arg("-o").arg(&built);
        cc.arg(format!("-Wl,-soname,{}", self.soname));
        cc.arg(format!("-Wl,--version-script={}", script.display()));
        cc.args([
            "-Wl,--gc-sections",
            "-Wl,-z,defs",
            "-Wl,-z,relro",
            "-Wl,-z,now",
            "-Wl,-z,noexecstack",
        ]);
        if self.strip {
            cc.arg("-Wl,--strip-all");
        }
        let own = self
            .symbols
            .iter()
            .filter(|symbol| symbol.function.is_none());
        cc.args(own.map(|symbol| format!("-Wl,-u,{}", symbol.name)));
        cc.arg(&jumps).args(self.inputs);
        let linked = run(&mut cc);
        for file in [&script, &jumps] {
            fs::remove_file(file).map_err(at(file))?;
        }
        let good = linked.and_then(|()| self.check(&built));
        if good.is_err() {
            // An older one is not to be taken for it.
            for file in [&built, self.path] {
                let _ = fs::remove_file(file);
            }
        }
        good.and_then(|()| take_place(&built, self.path))
    }

    /// Checks that the library exports exactly the expected names.
    fn check(&self, built: &Path) -> Result<(), String> {
        let mut nm = Command::new("nm");
        nm.args(["-D", "--defined-only", "--with-symbol-versions"])
            .arg(built);
        let exported = output(&mut nm)?;
        let exported: BTreeSet<&str> = exported
            .lines()
            .filter_map(
                |line| match line.split_whitespace().collect::<Vec<_>>()[..] {
                    [_, kind, name] if kind != "A" => Some(name), // "A" is the version itself
                    _ => None,
                },
            )
            .collect();
        let expected: BTreeSet<String> = self.symbols.iter().map(Symbol::to_string).collect();
        let missing: Vec<&str> = expected
            .iter()
            .map(String::as_str)
            .filter(|name| !exported.contains(name))
            .collect();
        let others: Vec<&str> = exported
            .into_iter()
            .filter(|name| !expected.contains(*name))
            .collect();
        let mut problems = Vec::new();
        if !missing.is_empty() {
            problems.push(format!("nothing defines {}", missing.join(", ")));
        }
        if !others.is_empty() {
            problems.push(format!("it also exports {}", others.join(", ")));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(format!("{}: {}", self.soname, problems.join("; ")))
    }
}

impl std::fmt::Display for Symbol {
    /// As `nm --with-symbol-versions` shows it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = if self.hidden { "@" } else { "@@" };
        write!(f, "{}{at}{}", self.name, self.version)
    }
}

/// A version script: one node for each version, in order. All other names are local. `local: *` is in the last node, because it would hide the
/// hidden names of its own node.
fn version_script(symbols: &[Symbol]) -> String {
    let mut versions: Vec<&str> = Vec::new();
    for symbol in symbols {
        if !versions.contains(&symbol.version.as_str()) {
            versions.push(&symbol.version);
        }
    }
    let mut text = String::new();
    for (i, version) in versions.iter().enumerate() {
        let _ = writeln!(text, "{version} {{");
        let names: Vec<&str> = symbols
            .iter()
            .filter(|symbol| symbol.version == *version && !symbol.hidden)
            .map(|symbol| symbol.name.as_str())
            .collect();
        if !names.is_empty() {
            let _ = writeln!(text, "  global: {};", names.join("; "));
        }
        if i + 1 == versions.len() {
            text.push_str("  local: *;\n");
        }
        text.push_str("};\n");
    }
    text
}

/// In place of a function: the name is a variable of C's type `bool`, which is false.
const VARIABLE: &str = "false";

/// The names that jump to a function. `forwards`: the functions are in another library.
fn assembly(symbols: &[Symbol], forwards: bool, arch: &str) -> Result<String, String> {
    let mut text = String::from("  .text\n");
    for (i, symbol) in symbols.iter().enumerate() {
        let Some(function) = &symbol.function else {
            continue;
        };
        let name = &symbol.name;
        let label = if symbol.hidden {
            format!("weft_old_{i}")
        } else {
            name.clone()
        };
        if function == VARIABLE {
            let _ = writeln!(
                text,
                "  .bss\n  .globl {label}\n  .type {label}, %object\n{label}:\n  .zero 1\n  .size {label}, 1\n  .text"
            );
            if symbol.hidden {
                let _ = writeln!(text, "  .symver {label}, {name}@{}", symbol.version);
            }
            continue;
        }
        let jump = match (arch, forwards) {
            ("x86_64", false) => format!("endbr64\n  jmp {function}"),
            ("x86_64", true) => format!("endbr64\n  jmp *{function}@GOTPCREL(%rip)"),
            ("aarch64", _) => format!("hint #34\n  b {function}"), // `bti c`
            _ => return Err(format!("no way to jump is known for {arch}")),
        };
        let _ = writeln!(
            text,
            "  .globl {label}\n  .type {label}, %function\n  .p2align 4\n{label}:\n  {jump}\n  .size {label}, .-{label}"
        );
        if symbol.hidden {
            let _ = writeln!(text, "  .symver {label}, {name}@{}", symbol.version);
        }
    }
    text.push_str("  .section .note.GNU-stack,\"\",%progbits\n");
    Ok(text)
}

/// How the code of a library is compiled: a profile of cargo.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// For tests.
    Debug,
    /// For a first look: most of it is compiled for `weft` already.
    Release,
    /// What packages hold.
    Packaged,
}

impl Profile {
    /// The profile that the options of a command line name.
    pub(crate) fn of(options: &[&str]) -> Option<Profile> {
        match options {
            [] => Some(Profile::Packaged),
            ["--release"] => Some(Profile::Release),
            ["--debug"] => Some(Profile::Debug),
            _ => None,
        }
    }

    /// Its name for cargo, and its folder in the target folder.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Profile::Debug => ("dev", "debug"),
            Profile::Release => ("release", "release"),
            Profile::Packaged => ("packaged", "packaged"),
        }
    }

    /// Whether the library goes to users, without what only debuggers read.
    pub(crate) fn strips(self) -> bool {
        self != Profile::Debug
    }
}

/// What `./x dist` builds. Cargo chooses the features of what crates share by all packages of a command line: with the same packages each time, which add
/// none to what `weft` takes, nothing is compiled twice.
const TOGETHER: [&str; 11] = [
    "weft",
    "weft-libadvise",
    "weft-libexs",
    "weft-libfi",
    "weft-libfs",
    "weft-libibverbs",
    "weft-libiw",
    "weft-libmalloc",
    "weft-libsysfs",
    "weft-preload",
    "xtask",
];

/// What `./x test` builds: a test then finds the code of a library compiled.
const AS_TESTED: [&str; 4] = ["--workspace", "--features", "weft-exs/tokio", "--lib"];

/// Builds the static library of a package (`lib{name}.a`) with cargo. Returns its path and its version.
pub(crate) fn build(
    root: &Path,
    package: &str,
    name: &str,
    profile: Profile,
) -> Result<(PathBuf, String), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command
        .current_dir(root)
        .args(["build", "--quiet", "--locked"]);
    match profile {
        Profile::Debug => command.args(AS_TESTED),
        Profile::Release => command.args(TOGETHER.map(|package| format!("-p={package}"))),
        Profile::Packaged => command.args(["-p", package]),
    };
    let (profile, folder) = profile.names();
    command.args(["--profile", profile]);
    run(&mut command)?;
    let metadata = output(Command::new(&cargo).current_dir(root).args([
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
    ]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).map_err(|error| error.to_string())?;
    let found = metadata["packages"]
        .as_array()
        .and_then(|all| all.iter().find(|p| p["name"] == package))
        .ok_or_else(|| format!("there is no {package}"))?;
    let (Some(target), Some(version)) = (
        metadata["target_directory"].as_str(),
        found["version"].as_str(),
    ) else {
        return Err("cargo metadata has an unexpected form".into());
    };
    let archive = Path::new(target).join(folder).join(format!("lib{name}.a"));
    Ok((archive, version.to_owned()))
}

/// The linker's inputs: the archive that cargo made, and the system libraries that Rust's standard library needs.
pub(crate) fn inputs(archive: &Path) -> [String; 6] {
    let archive = &*archive.display().to_string();
    [archive, "-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"].map(String::from)
}

/// The workspace's folder.
pub(crate) fn root() -> Result<&'static Path, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.ok_or_else(|| "xtask is a folder of the workspace".into())
}

pub(crate) fn at(path: &Path) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(at(path))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), String> {
    let file = beside(path);
    fs::write(&file, text).map_err(at(&file))?;
    take_place(&file, path)
}

/// Copies a file to where programs may be using an older one.
pub(crate) fn copy(from: &Path, path: &Path) -> Result<(), String> {
    let file = beside(path);
    fs::copy(from, &file).map_err(at(from))?;
    take_place(&file, path)
}

pub(crate) fn symlink(to: &str, path: &Path) -> Result<(), String> {
    let link = beside(path);
    std::os::unix::fs::symlink(to, &link).map_err(at(&link))?;
    take_place(&link, path)
}

/// A temporary path for a file that replaces another one once it is complete: programs have the old file mapped, and other processes may write it at
/// the same time.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

fn take_place(file: &Path, path: &Path) -> Result<(), String> {
    fs::rename(file, path).map_err(at(path))
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name}: {status}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if !status.success() {
        return Err(format!(
            "{name}: {status}: {}",
            String::from_utf8_lossy(&stderr)
        ));
    }
    String::from_utf8(stdout).map_err(|error| format!("{name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# old first\nV_1 a@ = old\nV_1 b\n\nV_2 a\nPRIVATE c = d\n";

    #[test]
    fn a_list_of_symbols_is_read_and_shown_as_nm_does() {
        let shown: Vec<String> = parse(LIST).unwrap().iter().map(Symbol::to_string).collect();
        assert_eq!(shown, ["a@V_1", "b@@V_1", "a@@V_2", "c@@PRIVATE"]);
        let more = format!("{LIST}V_3 + V_2 -\nV_3 d = e\nV_4 + V_3 - d\n");
        let more = parse(&more).unwrap();
        let shown: Vec<String> = more[4..].iter().map(Symbol::to_string).collect();
        assert_eq!(shown, ["a@V_3", "d@@V_3", "a@V_4"]);
        assert_eq!(more[6].function.as_deref(), Some("a"));
        assert!(parse("V_2 + V_1 - a").is_err());
        assert!(parse("V_1 a@").is_err());
        assert!(parse("V_1").is_err());
    }

    #[test]
    fn each_version_has_its_node_and_the_last_one_hides_the_rest() {
        assert_eq!(
            version_script(&parse(LIST).unwrap()),
            "V_1 {\n  global: b;\n};\nV_2 {\n  global: a;\n};\nPRIVATE {\n  global: c;\n  local: *;\n};\n"
        );
    }

    #[test]
    fn jumps_are_made_for_what_stands_for_something_else_only() {
        let symbols = parse(LIST).unwrap();
        let here = assembly(&symbols, false, "x86_64").unwrap();
        assert!(
            here.contains("weft_old_0:\n  endbr64\n  jmp old\n"),
            "{here}"
        );
        assert!(here.contains(".symver weft_old_0, a@V_1\n"), "{here}");
        assert!(here.contains("c:\n  endbr64\n  jmp d\n"), "{here}");
        assert!(!here.contains("b:\n"), "{here}");
        let there = assembly(&symbols, true, "x86_64").unwrap();
        assert!(there.contains("jmp *d@GOTPCREL(%rip)"), "{there}");
        assert!(
            assembly(&symbols, true, "aarch64")
                .unwrap()
                .contains("  b d\n")
        );
        assert!(assembly(&symbols, true, "z80").is_err());
    }

    #[test]
    fn what_is_generated_can_be_linked_for_both_machines() {
        let symbols = parse(LIST).unwrap();
        for arch in ["x86_64", "aarch64"] {
            let tool = |name: &str| format!("{arch}-linux-gnu-{name}");
            if Command::new(tool("as")).arg("--version").output().is_err() {
                eprintln!(
                    "skipped: no {} (apt-get install binutils-{arch}-linux-gnu)",
                    tool("as")
                );
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            let [script, jumps, object, library] =
                ["a.map", "a.s", "a.o", "a.so"].map(|name| dir.path().join(name));
            write(&script, &version_script(&symbols)).unwrap();
            write(&jumps, &assembly(&symbols, true, arch).unwrap()).unwrap();
            run(Command::new(tool("as")).arg("-o").args([&object, &jumps])).unwrap();
            let mut ld = Command::new(tool("ld"));
            let ld = ld.args(["-shared", "-z", "noexecstack", "--version-script"]);
            run(ld.arg(&script).arg("-o").args([&library, &object])).unwrap();
            let mut nm = Command::new(tool("nm"));
            let names = output(nm.args(["-D", "--with-symbol-versions"]).arg(&library)).unwrap();
            let ends = |end: &str| names.lines().any(|line| line.ends_with(end));
            assert!(ends(" T a@V_1") && ends(" T c@@PRIVATE"), "{arch}: {names}");
            assert!(ends(" U old") && ends(" U d"), "{arch}: {names}");
        }
    }

    #[test]
    fn a_name_that_nothing_defines_fails_the_link_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (source, object) = (dir.path().join("a.c"), dir.path().join("a.o"));
        write(
            &source,
            "int b(void) { return 0; }\nint old(void) { return 1; }\n",
        )
        .unwrap();
        let mut cc = Command::new("cc");
        run(cc.args(["-c", "-fPIC", "-o"]).arg(&object).arg(&source)).unwrap();
        let path = dir.path().join("liba.so.1");
        let inputs = [object.display().to_string()];
        let link = |list: &str| {
            let symbols = parse(list).unwrap();
            let library = Library {
                path: &path,
                soname: "liba.so.1",
                symbols: &symbols,
                forwards: false,
                inputs: &inputs,
                strip: false,
            };
            library.link()
        };
        link("V_1 b@ = old\nV_2 b\n").unwrap();
        let problem = link("V_1 b\nV_1 c\nV_1 d\n").unwrap_err();
        assert_eq!(problem, "liba.so.1: nothing defines c@@V_1, d@@V_1");
        assert!(!path.exists());
        // Only the source and the object are left.
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
