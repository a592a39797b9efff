//! libexs for C programs: the shared library out of cargo's static one, with headers, manual pages and a pkg-config file beside it.
//!
//! The linker is told each name to export with a version, and throws away what none of them needs. cargo's own shared
//! libraries cannot have a version script.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// The part of the version that programs are linked to.
const SONAME: &str = "libexs.so.0";
/// The version of each exported name.
const SYMBOL_VERSION: &str = "EXS_1.0";

/// Builds the library and puts everything below `dir`. Returns what it did.
pub(crate) fn lay_out(dir: &Path, release: bool) -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .ok_or("xtask is a folder of the workspace")?;
    let header = read(&root.join("include/sys/exs.h"))?;
    let names = calls(&header);
    let (archive, version) = build(root, release)?;
    let full = format!("libexs.so.{version}");
    let lib = dir.join("lib");
    fs::create_dir_all(lib.join("pkgconfig")).map_err(at(&lib))?;
    link(&archive, &lib.join(&full), &names, release)?;
    symlink(&full, &lib.join(SONAME))?;
    symlink(SONAME, &lib.join("libexs.so"))?;
    for name in ["exs.h", "sys/exs.h"] {
        let to = dir.join("include").join(name);
        fs::create_dir_all(dir.join("include/sys")).map_err(at(&to))?;
        fs::copy(root.join("include").join(name), &to).map_err(at(&to))?;
    }
    write(&lib.join("pkgconfig/exs.pc"), &pkg_config(&version))?;
    let pages = manual(&root.join("libs/exs/man"), &dir.join("share/man"))?;
    Ok(format!(
        "{}: {} calls, {pages} manual pages",
        lib.join(full).display(),
        names.len()
    ))
}

fn at(path: &Path) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(at(path))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(at(path))
}

fn symlink(to: &str, path: &Path) -> Result<(), String> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(path)(error)),
        _ => {}
    }
    std::os::unix::fs::symlink(to, path).map_err(at(path))
}

/// The calls that the header declares.
fn calls(header: &str) -> Vec<&str> {
    header
        .lines()
        .filter(|line| line.ends_with(");") && !line.starts_with([' ', '/', '#']))
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .collect()
}

/// Has cargo build the static library. Where it is, and its version.
fn build(root: &Path, release: bool) -> Result<(PathBuf, String), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(&cargo);
    command
        .current_dir(root)
        .args(["build", "--quiet", "--locked", "-p", "weft-libexs"]);
    if release {
        command.arg("--release");
    }
    run(&mut command)?;
    let metadata = Command::new(&cargo)
        .current_dir(root)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).map_err(|error| error.to_string())?;
    let package = metadata["packages"]
        .as_array()
        .and_then(|all| all.iter().find(|p| p["name"] == "weft-libexs"))
        .ok_or("there is no weft-libexs")?;
    let (Some(target), Some(version)) = (
        metadata["target_directory"].as_str(),
        package["version"].as_str(),
    ) else {
        return Err("cargo metadata has an unexpected form".into());
    };
    let profile = if release { "release" } else { "debug" };
    let archive = Path::new(target).join(profile).join("libexs.a");
    Ok((archive, version.to_owned()))
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().display().to_string();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name}: {status}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

fn link(archive: &Path, library: &Path, names: &[&str], strip: bool) -> Result<(), String> {
    let script = library.with_extension("map");
    let mut text = format!("{SYMBOL_VERSION} {{\n  global:\n");
    for name in names {
        let _ = writeln!(text, "    {name};");
    }
    text.push_str("  local: *;\n};\n");
    write(&script, &text)?;
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.arg("-shared").arg("-o").arg(library);
    cc.arg(format!("-Wl,-soname,{SONAME}"));
    cc.arg(format!("-Wl,--version-script={}", script.display()));
    cc.args([
        "-Wl,--gc-sections",
        "-Wl,-z,defs",
        "-Wl,-z,relro",
        "-Wl,-z,now",
    ]);
    if strip {
        cc.arg("-Wl,--strip-all");
    }
    cc.args(names.iter().map(|name| format!("-Wl,-u,{name}")));
    cc.arg(archive);
    cc.args(["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"]);
    let linked = run(&mut cc);
    fs::remove_file(&script).map_err(at(&script))?;
    linked
}

fn pkg_config(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\nincludedir=${{prefix}}/include\nlibdir=${{prefix}}/lib\n\n\
         Name: exs\nDescription: Extended sockets: asynchronous, zero-copy streams and messages over RDMA\n\
         Version: {version}\nCflags: -I${{includedir}}\nLibs: -L${{libdir}} -lexs\n"
    )
}

/// Copies the pages to their sections, with a link for every name that a page has beside its own. How many names there are.
fn manual(from: &Path, to: &Path) -> Result<usize, String> {
    let mut count = 0;
    for entry in fs::read_dir(from).map_err(at(from))? {
        let page = entry.map_err(at(from))?.path();
        let (Some(file), Some(section)) = (
            page.file_name().and_then(|name| name.to_str()),
            page.extension().and_then(|section| section.to_str()),
        ) else {
            continue;
        };
        let folder = to.join(format!("man{section}"));
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        let text = read(&page)?;
        write(&folder.join(file), &text)?;
        count += 1;
        for name in page_names(&text) {
            let link = format!("{name}.{section}");
            if link != file {
                write(&folder.join(&link), &format!(".so man{section}/{file}\n"))?;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// The names in a page's section NAME.
fn page_names(page: &str) -> impl Iterator<Item = &str> {
    page.lines()
        .skip_while(|line| *line != ".Sh NAME")
        .skip(1)
        .take_while(|line| !line.starts_with(".Sh"))
        .filter_map(|line| line.strip_prefix(".Nm "))
        .map(|name| name.trim_end_matches([' ', ',']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_a_header_and_nothing_else() {
        let header = "/* int exs_no(void); */\n#define X(a) f(a);\nint exs_a(int fd);\n    int exs_b(int);\n\
                      const char *exs_c(void);\ntypedef int exs_t;\n";
        assert_eq!(calls(header), ["exs_a", "exs_c"]);
    }

    #[test]
    fn names_of_a_page() {
        let page = ".Dd x\n.Sh NAME\n.Nm exs_a ,\n.Nm exs_b\n.Nd two\n.Sh SYNOPSIS\n.Nm exs_c\n";
        assert_eq!(page_names(page).collect::<Vec<_>>(), ["exs_a", "exs_b"]);
    }
}
