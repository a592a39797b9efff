//! Commands whose source the worker preprocesses too (`--pull`): the options of the preprocessor that are sent, and their form.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::ipc::PullAsk;
use crate::options::{Plan, is_argument};

/// Options of the preprocessor that take a path.
const PATHS: &[&str] = &["-I", "-iquote", "-isystem", "-idirafter", "-include"];
/// Those that take something else.
const VALUES: &[&str] = &["-D", "-U", "-MT", "-MQ"];
/// Options without an argument. The receiver chooses the file that `-Wp,` names.
const FLAGS: &[&str] = &["-MD", "-MMD", "-MP", "-trigraphs", "-Wp,-MD,", "-Wp,-MMD,"];
/// Directories that are no root of a build: too much is below them.
const WIDE: &[&str] = words! {
    "/" "/boot" "/dev" "/etc" "/home" "/media" "/mnt" "/opt" "/proc" "/root" "/run" "/srv" "/sys" "/tmp" "/usr" "/var" "/var/tmp"
};
/// Further roots, with colons between.
const ROOTS: &str = "WEFT_CC_PULL_ROOTS";

/// The preprocessor's options of a command for a worker; `var` is its environment.
///
/// # Errors
/// Why the worker cannot preprocess it.
pub(crate) fn ask(
    plan: &Plan,
    cwd: &Path,
    var: &dyn Fn(&str) -> Option<OsString>,
) -> Result<PullAsk, String> {
    let mut cpp = Vec::new();
    let mut search: Vec<String> = plan
        .job
        .iter()
        .filter(|arg| arg.starts_with("-m"))
        .cloned()
        .collect();
    let mut args = plan.preprocess.iter();
    while let Some(arg) = args.next() {
        let unfit = || {
            format!(
                "an option that pulling workers do not take ({})",
                arg.display()
            )
        };
        let text = arg.to_str().ok_or_else(unfit)?;
        if arg == plan.source.as_os_str()
            || ["-E", "-fdirectives-only"].contains(&text)
            || plan.job.iter().any(|job| job == text)
        {
            continue;
        }
        if text.starts_with("-nostdinc") {
            search.push(text.into());
            continue;
        }
        if FLAGS.contains(&text) {
            cpp.push(text.into());
            continue;
        }
        if ["-x", "-MF"].contains(&text) {
            args.next();
            continue;
        }
        if text.starts_with("-MF") {
            continue;
        }
        if let Some(flag) = ["-Wp,-MD,", "-Wp,-MMD,"]
            .into_iter()
            .find(|flag| text.starts_with(flag) && !text[flag.len()..].contains(','))
        {
            cpp.push(flag.into());
            continue;
        }
        let option = PATHS
            .iter()
            .chain(VALUES)
            .filter(|option| text.starts_with(**option))
            .max_by_key(|option| option.len())
            .ok_or_else(unfit)?;
        let value = match &text[option.len()..] {
            "" => args
                .next()
                .and_then(|value| value.to_str())
                .ok_or_else(unfit)?,
            // `-includes.h` is one, `-include-pch` another option.
            joined => joined,
        };
        if !is_known_missing(plan, cwd, option, value) {
            cpp.push((*option).into());
            cpp.push(value.into());
        }
    }
    read(&cpp)?;
    Ok(PullAsk {
        roots: roots(plan, &cpp, cwd, var),
        cpp,
        search,
    })
}

/// Whether the compiler would skip this directory because it does not exist, which a worker could not detect.
fn is_known_missing(plan: &Plan, cwd: &Path, option: &str, value: &str) -> bool {
    let path = cwd.join(value);
    let warns = |arg: &String| arg.ends_with("missing-include-dirs");
    PATHS.contains(&option)
        && option != "-include"
        && !value.is_empty()
        && !clean(&path).starts_with(cwd)
        && !plan.job.iter().any(warns)
        && path
            .metadata()
            .is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

fn roots(
    plan: &Plan,
    cpp: &[String],
    cwd: &Path,
    var: &dyn Fn(&str) -> Option<OsString>,
) -> Vec<String> {
    let source = cwd.join(&plan.source);
    let mut all = vec![cwd.to_owned(), source.clone()];
    all.extend(source.parent().map(Path::to_owned));
    for pair in cpp.windows(2) {
        if PATHS.contains(&pair[0].as_str()) {
            all.push(cwd.join(&pair[1]));
        }
    }
    let more = var(ROOTS).unwrap_or_default();
    all.extend(std::env::split_paths(&more).filter(|path| path.is_absolute()));
    let home = var("HOME").map(PathBuf::from);
    let real_home = home.as_ref().and_then(|home| home.canonicalize().ok());
    let wide = |path: &PathBuf| {
        WIDE.iter().any(|wide| path == Path::new(wide))
            || ["/proc", "/sys", "/dev", "/etc"]
                .iter()
                .any(|no| path.starts_with(no) && !path.starts_with("/dev/shm"))
            || [&home, &real_home].contains(&&Some(path.clone()))
    };
    let mut good = Vec::new();
    for path in all {
        let Ok(real) = path.canonicalize() else {
            continue;
        };
        if wide(&real) {
            continue;
        }
        // The way there, and where it leads. As text, `..` after a link leads elsewhere.
        for path in [real, clean(&path)] {
            if wide(&path) {
                continue;
            }
            let path = path.to_string_lossy().into_owned();
            if !good.contains(&path) {
                good.push(path);
            }
        }
    }
    good
}

/// Without `.`, and `..` taken as text.
fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            std::path::Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// The preprocessor's options, as a worker needs them.
#[derive(Debug, Default)]
pub(crate) struct Cpp {
    /// Directories for `#include "..."` alone.
    pub(crate) quote: Vec<String>,
    /// `-I`, then `-isystem`.
    pub(crate) dirs: Vec<String>,
    /// `-idirafter`.
    pub(crate) after: Vec<String>,
    /// Files that are read first.
    pub(crate) includes: Vec<String>,
    /// Dependencies are wanted, without those of the system.
    pub(crate) dependencies: Option<bool>,
}

/// Parses the options of a master, which may be hostile.
///
/// # Errors
/// The forbidden option.
pub(crate) fn read(cpp: &[String]) -> Result<Cpp, String> {
    let mut out = Cpp::default();
    let mut system = Vec::new();
    let mut args = cpp.iter();
    while let Some(option) = args.next() {
        match option.as_str() {
            "-MD" | "-Wp,-MD," => out.dependencies = Some(false),
            "-MMD" | "-Wp,-MMD," => out.dependencies = Some(true),
            flag if FLAGS.contains(&flag) => {}
            option => {
                let value = args
                    .next()
                    .ok_or_else(|| format!("{option} without a value"))?;
                match option {
                    "-I" => out.dirs.push(value.clone()),
                    "-isystem" => system.push(value.clone()),
                    "-iquote" => out.quote.push(value.clone()),
                    "-idirafter" => out.after.push(value.clone()),
                    "-include" => out.includes.push(value.clone()),
                    // `#include MACRO` and `__has_include(MACRO)` are not looked into.
                    "-D" if names_absolute(value.as_bytes())
                        || value.contains("../") && value.contains(['"', '<']) =>
                    {
                        return Err(format!(
                            "a macro that may name a header elsewhere ({value})"
                        ));
                    }
                    option if VALUES.contains(&option) => {}
                    other => return Err(format!("{other}: not for a worker that preprocesses")),
                }
                // An option with an empty value would take the next argument. `=` and `$SYSROOT` stand for a directory; `-I-` splits the list.
                if value.is_empty()
                    || !is_argument(value)
                    || PATHS.contains(&option) && value.starts_with(['=', '$', '-'])
                {
                    return Err(format!(
                        "{option} {value}: not for a worker that preprocesses"
                    ));
                }
            }
        }
    }
    out.dirs.append(&mut system);
    Ok(out)
}

/// Whether a text has a name in quotes or angle brackets that begins with a slash.
pub(crate) fn names_absolute(text: &[u8]) -> bool {
    text.windows(2).any(|two| two == b"\"/" || two == b"</")
}

/// The names that a source's text includes, or may include: whether in angle brackets, and the name. And whether one may be absolute.
///
/// This only decides what is fetched before it is asked for, with two exceptions: names that are absolute, and those that lead up.
pub(crate) fn scan(text: &[u8]) -> (Vec<(bool, String)>, bool) {
    let (mut names, mut absolute) = (Vec::new(), false);
    for line in text.split(|&b| b == b'\n') {
        let bare = line.trim_ascii_start();
        let directive = bare.strip_prefix(b"#").map(<[u8]>::trim_ascii_start);
        let includes =
            directive.is_some_and(|d| d.starts_with(b"include") || d.starts_with(b"import"));
        let speaks = includes || line.windows(7).any(|word| word == b"include");
        absolute |= speaks && names_absolute(line);
        if !speaks && (directive.is_none() || !line.windows(3).any(|up| up == b"../")) {
            continue;
        }
        let mut rest = bare;
        while let Some(open) = rest.iter().position(|b| matches!(b, b'"' | b'<')) {
            let angle = rest[open] == b'<';
            rest = &rest[open + 1..];
            let Some(end) = rest
                .iter()
                .position(|&b| b == if angle { b'>' } else { b'"' })
            else {
                break;
            };
            let name = &rest[..end];
            rest = &rest[end + 1..];
            if let Ok(name) = std::str::from_utf8(name)
                && !name.is_empty()
                && (includes || name.contains("../"))
            {
                names.push((angle, name.to_owned()));
            }
            if includes && !name.is_empty() {
                break;
            }
        }
    }
    (names, absolute)
}

/// Names of files that no source includes, and that come and go while a build runs: workers do not learn of them.
pub(crate) fn is_of_no_interest(name: &str) -> bool {
    const ENDS: &[&str] = &[
        "o", "d", "a", "lo", "la", "so", "ko", "cmd", "part", "tmp", "gcno", "gcda", "mod",
    ];
    Path::new(name)
        .extension()
        .and_then(OsStr::to_str)
        .is_some_and(|end| ENDS.contains(&end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn ask_line(line: &str) -> Result<PullAsk, String> {
        let args: Vec<_> = line.split(' ').map(OsString::from).collect();
        ask(
            &crate::options::parse(Path::new(""), &args).unwrap(),
            Path::new("/"),
            &|name| std::env::var_os(name),
        )
    }

    #[test]
    fn options_of_the_preprocessor_go_out_in_one_form() {
        let asked = ask_line("-O2 -m32 -DA=1 -U B -Iinc -isystem sys -iquoteq -nostdinc -MD -include x.h -c a.c -o o/a.o -Wp,-MMD,z.d").unwrap();
        let words =
            "-D A=1 -U B -I inc -isystem sys -iquote q -MD -include x.h -Wp,-MMD, -MQ o/a.o";
        assert_eq!(asked.cpp.join(" "), words);
        assert_eq!(asked.search, ["-m32", "-nostdinc"]);
        let cpp = read(&asked.cpp).unwrap();
        assert_eq!(
            (cpp.dirs, cpp.quote),
            (vec!["inc".into(), "sys".into()], vec!["q".into()])
        );
        assert_eq!(cpp.dependencies, Some(true));
    }

    #[test]
    fn what_pulling_workers_do_not_take() {
        for line in [
            "-c -imacros x a.c",
            "-c --sysroot=/x a.c",
            "-c -I=/x a.c",
            "-c -I- a.c",
            "-c -H a.c",
            "-c -DX=\"/etc/passwd\" a.c",
        ] {
            assert!(ask_line(line).is_err(), "{line}");
        }
        for bad in [
            &["-I"][..],
            &["-fplugin=x"],
            &["-imacros", "x"],
            &["-o", "x"],
            &["-include", "@x"],
            &["-D", "@x"],
            &["-U", "@x"],
            &["-MT", "@x"],
            &["-MQ", "@x"],
            &["-D", ""],
            &["-I", ""],
        ] {
            let bad: Vec<_> = bad.iter().map(|s| (*s).to_owned()).collect();
            read(&bad).unwrap_err();
        }
    }

    #[test]
    fn includes_are_seen() {
        let names = |text: &str| {
            let (names, absolute) = scan(text.as_bytes());
            (
                names
                    .into_iter()
                    .map(|(angle, name)| format!("{}{name}", u8::from(angle)))
                    .collect::<Vec<_>>()
                    .join(" "),
                absolute,
            )
        };
        assert_eq!(
            names("#include \"a.h\" // \"b\"\n # include <c/d>\nx \"e\"\n#include_next <f>").0,
            "0a.h 1c/d 1f"
        );
        assert_eq!(
            names("#if __has_include(\"../x.h\") || __has_include(<y.h>)\n#define P <../z>"),
            ("0../x.h 1../z".into(), false)
        );
        assert!(
            names("#  if __has_include(</etc/x>)").1
                && names("#include \"/x\"").1
                && !names("char *a = \"/x\";").1
        );
    }

    #[test]
    fn a_whole_machine_is_no_root() {
        let asked = ask_line("-I/ -I/etc -I/usr/include -c a.c").unwrap();
        assert_eq!(asked.roots, ["/usr/include"]);
        // Nor where it is only the text of a path.
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let base = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(base.join("a/b/c")).unwrap();
        std::os::unix::fs::symlink("a/b/c", base.join("link")).unwrap();
        let args = ["-Ilink/../..", "-c", "a.c"].map(OsString::from);
        let asked = ask(
            &crate::options::parse(Path::new(""), &args).unwrap(),
            &base,
            &|name| std::env::var_os(name),
        )
        .unwrap();
        let real = ["", "a"].map(|name| {
            base.join(name)
                .components()
                .as_path()
                .to_str()
                .unwrap()
                .to_owned()
        });
        assert_eq!(asked.roots, real);
    }

    #[test]
    fn a_directory_that_is_not_there_is_not_asked_for_beyond_the_working_directory() {
        let dir = tempfile::tempdir().unwrap();
        let of = |line: &str| {
            let args: Vec<_> = line.split(' ').map(OsString::from).collect();
            let plan = crate::options::parse(Path::new(""), &args).unwrap();
            ask(&plan, dir.path(), &|name| std::env::var_os(name))
                .unwrap()
                .cpp
                .join(" ")
        };
        let missing = "-I/no/such/dir -isystem ../no-such-dir -Igen -I/usr/include";
        assert_eq!(of(&format!("{missing} -c a.c")), "-I gen -I /usr/include");
        // A warning is expected for it.
        assert_eq!(
            of(&format!("{missing} -Wmissing-include-dirs -c a.c")),
            "-I /no/such/dir -isystem ../no-such-dir -I gen -I /usr/include"
        );
    }
}
