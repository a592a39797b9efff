//! Checks of the tree that no compiler makes, and shared libraries for C. Run as `cargo xtask`.
#![forbid(unsafe_code)]

mod decisions;
mod deps;
mod inventory;
mod libexs;
mod library;
mod licences;
mod modules;
mod pages;
mod publish;
mod run;
mod source;
mod verbs;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const HELP: &str = "\
cargo xtask deps    check the crates against the table in ARCHITECTURE.md: every dependency edge is allowed there,
                    unsafe code stays in the crates that may have it, no source file or function is too
                    long, modules of a crate do not import each other in a circle; decision pages have one form
                    and are all listed
cargo xtask libexs DIR [--release|--debug]
                    the C library of extended sockets below DIR: lib/, include/, share/man/, lib/pkgconfig/
cargo xtask libiw DIR [--release|--debug]
                    the small iWARP library for C, in the same way
cargo xtask verbs DIR [--release|--debug]
                    libibverbs and librdmacm below DIR: lib/, lib/pkgconfig/
cargo xtask run DIR [--release|--debug]
                    the preload library of `weft run` below DIR: lib/
cargo xtask advise DIR [--release|--debug]
                    the preload library of `weft advise` below DIR: lib/
cargo xtask fs DIR [--release|--debug]
                    the preload library of `weft fs run` below DIR: lib/
                    Without an option they are as packages hold them; --release is for a first look, --debug for tests.
cargo xtask inventory DIR PACKAGE [CRATE...]
                    what is linked into a package that is made of these crates: DIR/sbom.cdx.json and DIR/copyright
cargo xtask publish the crates that are ready for a registry, one a line, each after those that it needs";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["deps"] => match check_deps() {
            Ok(summary) => {
                println!("{summary}");
                ExitCode::SUCCESS
            }
            Err(problems) => {
                for problem in problems {
                    eprintln!("xtask deps: {problem}");
                }
                ExitCode::FAILURE
            }
        },
        [
            what @ ("libexs" | "libiw" | "verbs" | "run" | "advise" | "fs"),
            dir,
            ref options @ ..,
        ] if let Some(profile) = library::Profile::of(options) => {
            let lay_out = match what {
                "libiw" => libexs::lay_out_iw,
                "verbs" => verbs::lay_out,
                "run" => run::lay_out,
                "advise" => run::lay_out_advise,
                "fs" => run::lay_out_fs,
                _ => libexs::lay_out,
            };
            match lay_out(Path::new(dir), profile) {
                Ok(summary) => {
                    println!("{summary}");
                    ExitCode::SUCCESS
                }
                Err(problem) => {
                    eprintln!("xtask {what}: {problem}");
                    ExitCode::FAILURE
                }
            }
        }
        ["publish"] => match metadata(&root().join("Cargo.toml"))
            .map_err(|problem| vec![problem])
            .and_then(|tree| publish::order(&tree))
        {
            Ok(order) => {
                println!("{}", order.join("\n"));
                ExitCode::SUCCESS
            }
            Err(problems) => {
                for problem in problems {
                    eprintln!("xtask publish: {problem}");
                }
                ExitCode::FAILURE
            }
        },
        ["inventory", dir, package, ref crates @ ..] => {
            match inventory::lay_out(Path::new(dir), package, crates) {
                Ok(summary) => {
                    println!("{summary}");
                    ExitCode::SUCCESS
                }
                Err(problem) => {
                    eprintln!("xtask inventory: {problem}");
                    ExitCode::FAILURE
                }
            }
        }
        ["help" | "-h" | "--help"] => {
            println!("{HELP}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{HELP}");
            ExitCode::from(2)
        }
    }
}

fn root() -> &'static Path {
    library::root().expect("xtask is a folder of the workspace")
}

/// Everything that `cargo xtask deps` checks: a summary, or all the problems found.
fn check_deps() -> Result<String, Vec<String>> {
    let root = root();
    let fatal = |problem: String| vec![problem];

    let document = root.join("ARCHITECTURE.md");
    let text = std::fs::read_to_string(&document)
        .map_err(|e| fatal(format!("{}: {e}", document.display())))?;
    let table = deps::parse_table(&text).map_err(fatal)?;

    let mut packages =
        deps::parse_metadata(&metadata(&root.join("Cargo.toml")).map_err(fatal)?, root)
            .map_err(fatal)?;
    // These are workspaces by themselves, and the table covers them too.
    for workspace in ["fuzz", "papers", "apps/join"] {
        let manifest = root.join(workspace).join("Cargo.toml");
        let more = metadata(&manifest).and_then(|tree| deps::parse_metadata(&tree, root));
        packages.extend(more.map_err(fatal)?);
    }

    let mut problems = deps::check(&table, &packages);
    let mut files = 0;
    for package in &packages {
        let row = table.iter().find(|row| row.package == package.name);
        let src = root.join(&package.folder).join("src");
        let mut modules = Vec::new();
        let unsafe_code = row.map_or(deps::UnsafeCode::Forbidden, |row| row.unsafe_code);
        for file in
            source::rust_files(&root.join(&package.folder)).map_err(|e| fatal(e.to_string()))?
        {
            let text = std::fs::read_to_string(&file)
                .map_err(|e| fatal(format!("{}: {e}", file.display())))?;
            let is_root = package.roots.contains(&file);
            let shown = file
                .strip_prefix(root)
                .unwrap_or(&file)
                .display()
                .to_string();
            problems.extend(source::check(&shown, &text, unsafe_code, is_root));
            files += 1;
            if let Ok(path) = file.strip_prefix(&src) {
                modules.push((path.to_owned(), text));
            }
        }
        problems.extend(modules::check(&package.name, &modules));
    }
    let pages = root.join("docs/adr");
    let unreadable = |e: std::io::Error| fatal(format!("{}: {e}", pages.display()));
    let index = std::fs::read_to_string(pages.join("README.md")).map_err(unreadable)?;
    for entry in std::fs::read_dir(&pages).map_err(unreadable)? {
        let page = entry.map_err(unreadable)?;
        let name = page.file_name().to_string_lossy().into_owned();
        if name != "README.md" {
            let body = std::fs::read_to_string(page.path()).map_err(unreadable)?;
            problems.extend(decisions::check(&name, &body, &index));
        }
    }
    problems.extend(pages::check(root).map_err(fatal)?);
    if problems.is_empty() {
        let edges: usize = packages.iter().map(|p| p.uses.len()).sum();
        Ok(format!(
            "{} packages, {edges} edges, {files} source files: as ARCHITECTURE.md says",
            packages.len()
        ))
    } else {
        Err(problems)
    }
}

/// The output of `cargo metadata` for the packages of one workspace; needs no network.
fn metadata(manifest: &PathBuf) -> Result<serde_json::Value, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--format-version=1",
            "--no-deps",
            "--manifest-path",
        ])
        .arg(manifest)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))
}
