//! The recorded compilations of a real build: options, times and objects; and a program that replays them.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use weft_cc::options;

use crate::error::{BenchError, Result};

/// One compilation of the build.
pub(super) struct Job {
    /// Where it runs, below the tree.
    pub(super) dir: PathBuf,
    /// Options and source, without the output and without what makes dependencies.
    pub(super) args: Vec<OsString>,
    /// The object, in the folder of the stand-in.
    pub(super) object: PathBuf,
    /// Seconds that the compiler took, without the preprocessor.
    pub(super) compile: f64,
}

/// A build as it was recorded.
pub(super) struct Recorded {
    pub(super) jobs: Vec<Job>,
    /// The program that replays compilers.
    pub(super) stand_in: PathBuf,
}

/// Runs as the compiler of a make: notes arguments and time.
const RECORDER: &str = "#!/bin/sh
log=$(mktemp \"${0%/*}/log.XXXXXXXX\") || exit 1
printf '%s\\0' \"$PWD\" \"$@\" > \"$log.args\"
begin=$(date +%s%N)
gcc \"$@\"
status=$?
echo \"$begin $(date +%s%N)\" > \"$log.time\"
exit $status
";

/// Runs in place of a worker's compiler.
const STAND_IN: &str = include_str!("stand-in.c");

/// Compiles the stand-in, with its record in `place`.
fn stand_in(place: &Path) -> Result<PathBuf> {
    let (source, program) = (place.join("stand-in.c"), place.join("gcc"));
    fs::write(&source, STAND_IN).map_err(BenchError::system("write the stand-in"))?;
    let compile = |link: &[&str]| {
        Command::new("gcc")
            .args(["-O1", "-o"])
            .arg(&program)
            .arg(format!("-DHERE=\"{}\"", place.display()))
            .args(link)
            .arg(&source)
            .stderr(Stdio::null())
            .status()
            .map_err(BenchError::system("run gcc"))
    };
    // A static program starts in half the time.
    if !compile(&["-static"])?.success() && !compile(&[])?.success() {
        return Err(BenchError::Usage(
            "gcc cannot compile the program that stands for workers' compilers".into(),
        ));
    }
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        .map_err(BenchError::system("write the stand-in"))?;
    Ok(program)
}

/// A program that everybody can run.
fn script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .map_err(BenchError::system("write a script"))
}

/// Makes in `tree`, and keeps at most `most` of its compilations, their times divided by `pace`.
pub(super) fn record(
    tree: &Path,
    make: &[String],
    folder: &Path,
    most: usize,
    pace: f64,
) -> Result<Recorded> {
    let failed = BenchError::system;
    let (logs, place) = (folder.join("record"), folder.join("stand-in"));
    for dir in [&logs, &place] {
        fs::create_dir(dir).map_err(failed("make a folder"))?;
    }
    script(&logs.join("cc"), RECORDER)?;
    let stand_in = stand_in(&place)?;
    super::make(tree, make, &logs.join("cc").to_string_lossy(), 2, &[])?;
    let mut all = Vec::new();
    for entry in fs::read_dir(&logs).map_err(failed("read the record"))? {
        let path = entry.map_err(failed("read the record"))?.path();
        if path.extension() != Some(OsStr::new("args")) {
            continue;
        }
        let words = fs::read(&path).map_err(failed("read the record"))?;
        let times = fs::read_to_string(path.with_extension("time")).unwrap_or_default();
        let times: Vec<f64> = times
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let &[begin, end] = &times[..] else { continue };
        let mut words = words
            .split(|&b| b == 0)
            .map(|word| OsString::from_vec(word.to_vec()));
        let dir = PathBuf::from(words.next().unwrap_or_default());
        let mut args: Vec<OsString> = words.collect();
        args.pop();
        all.push((begin, (end - begin) / 1e9, dir, args));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut jobs = Vec::new();
    for (_, took, dir, args) in all {
        if jobs.len() == most {
            break;
        }
        jobs.extend(one(tree, &place, &dir, &args, took, pace)?);
    }
    if jobs.is_empty() {
        return Err(BenchError::Usage(
            "the make compiled no C source that could go to a worker".into(),
        ));
    }
    Ok(Recorded { jobs, stand_in })
}

/// The arguments without the output and without the options that make dependencies.
fn without_products(args: &[OsString]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.to_str() {
            Some("-o" | "-MF" | "-MT" | "-MQ") => drop(args.next()),
            Some("-MD" | "-MMD" | "-MP") => {}
            Some(text) if text.starts_with("-Wp,-M") => {}
            _ => kept.push(arg.clone()),
        }
    }
    kept
}

/// One compilation; `None` if no worker could do it, or if there was a source of its name.
fn one(
    tree: &Path,
    place: &Path,
    dir: &Path,
    args: &[OsString],
    took: f64,
    pace: f64,
) -> Result<Option<Job>> {
    let system = BenchError::system;
    let args = without_products(args);
    let Ok(plan) = options::parse(dir, &args) else {
        return Ok(None);
    };
    let plain = |text: &str| {
        text.chars()
            .all(|c| c.is_ascii_alphanumeric() || "/-_.+".contains(c))
    };
    let is_c = plan.source.extension() == Some(OsStr::new("c"));
    let name = plan.source.file_name().and_then(OsStr::to_str);
    let Some(name) = name.filter(|name| is_c && plain(name)) else {
        return Ok(None);
    };
    let object = place.join(format!("{name}.object"));
    let below = dir.strip_prefix(tree).ok();
    let (Some(below), false) = (below, object.exists()) else {
        return Ok(None);
    };
    let began = Instant::now();
    let preprocessed = Command::new("gcc")
        .args(&plan.preprocess)
        .current_dir(dir)
        .stderr(Stdio::null())
        .output()
        .map_err(system("run gcc"))?;
    let preprocess = began.elapsed().as_secs_f64();
    if !preprocessed.status.success() || options::stays(&preprocessed.stdout).is_some() {
        return Ok(None);
    }
    let compiled = Command::new("gcc")
        .args(&args)
        .arg("-o")
        .arg(&object)
        .current_dir(dir)
        .stderr(Stdio::null())
        .status()
        .map_err(system("run gcc"))?;
    let files = files(&String::from_utf8_lossy(&preprocessed.stdout), dir);
    let here = dir.to_string_lossy();
    if !compiled.success() || !files.iter().all(|file| plain(file)) || !plain(&here) {
        let _ = fs::remove_file(&object);
        return Ok(None);
    }
    let compile = (took - preprocess).max(0.01) / pace;
    let preprocess = preprocess / pace;
    let mut job = format!("{here}\n{preprocess:.4}\n{compile:.4}\n");
    for file in files {
        job.push_str(&file);
        job.push('\n');
    }
    fs::write(place.join(format!("{name}.job")), job)
        .and_then(|()| fs::write(place.join(format!("{name}.text")), &preprocessed.stdout))
        .map_err(system("write the record"))?;
    Ok(Some(Job {
        dir: below.to_owned(),
        args,
        object,
        compile,
    }))
}

/// The files that a preprocessed text is from, by the markers in it.
fn files(text: &str, dir: &Path) -> BTreeSet<String> {
    let markers = text.lines().filter_map(|line| {
        let (number, rest) = line.strip_prefix("# ")?.split_once(" \"")?;
        number.parse::<u64>().ok()?;
        rest.rsplit_once('"').map(|(name, _)| name)
    });
    markers
        .filter(|name| !name.starts_with('<') && !name.ends_with("//"))
        .map(|name| dir.join(name).to_string_lossy().into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_name_the_files() {
        let text = "# 0 \"a.c\"\n# 0 \"<built-in>\"\n# 1 \"/usr/include/x.h\" 1 3 4\nint x;\n# 5 \"/w//\"\n# pragma \"p\"\n";
        let found: Vec<_> = files(text, Path::new("/w")).into_iter().collect();
        assert_eq!(found, ["/usr/include/x.h", "/w/a.c"]);
    }

    #[test]
    fn products_are_left_out() {
        let args: Vec<OsString> = "-O2 -MMD -MF a.d -Wp,-MD,x -c a.c -o a.o"
            .split(' ')
            .map(OsString::from)
            .collect();
        let kept: Vec<OsString> = ["-O2", "-c", "a.c"].map(OsString::from).to_vec();
        assert_eq!(without_products(&args), kept);
    }
}
