//! The requests in a compiler's command line, and whether it can be sent to a worker.
//!
//! With an unknown option the command runs here. A worker checks the options of each job by the same table ([`check_job`]), because its master may be hostile.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use aho_corasick::packed::Searcher;

use crate::wire::Output;

mod clang;
mod rule;

pub(crate) use clang::mapped;
pub use rule::Rule;
pub(crate) use rule::dependencies;
use rule::{Requested, preprocessors, quoted};

/// A command file (`@file`) and those that it names, in bytes.
const MAX_RESPONSE: u64 = 1 << 20;
/// The maximum nesting of command files.
const MAX_DEPTH: u32 = 8;

/// A language that workers compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Language {
    C,
    Cxx,
}

impl Language {
    /// The argument of `-x`.
    pub fn name(self) -> &'static str {
        match self {
            Self::C => "c",
            Self::Cxx => "c++",
        }
    }

    /// The compiler proper.
    pub fn program(self) -> &'static str {
        match self {
            Self::C => "cc1",
            Self::Cxx => "cc1plus",
        }
    }

    fn of_extension(extension: &OsStr) -> Option<Self> {
        Some(match extension.as_bytes() {
            b"c" => Self::C,
            b"cc" | b"cp" | b"cxx" | b"cpp" | b"CPP" | b"c++" | b"C" => Self::Cxx,
            _ => return None,
        })
    }

    fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"c" => Self::C,
            b"c++" => Self::Cxx,
            _ => return None,
        })
    }
}

/// The compilers that workers run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Gcc,
    Clang,
}

/// A command that can go to a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub family: Family,
    /// Arguments of the preprocessor's run here; its output is standard output. That of clang lists the files that it reads.
    pub preprocess: Vec<OsString>,
    /// What clang's dependencies are written as; gcc writes them here.
    pub rule: Option<Rule>,
    /// Options of the worker's compiler, without sources and outputs.
    pub job: Vec<String>,
    /// The source as it was named.
    pub source: PathBuf,
    /// The object, or the assembler text after `-S`.
    pub output: PathBuf,
    pub language: Language,
    /// Whether `-x` names it; else the extension does, of which C++'s drivers think otherwise.
    pub explicit: bool,
    /// The prefix of the names of further outputs, which the object contains; empty without any.
    pub beside: String,
}

/// The further output that an option asks for.
pub(crate) fn further(arg: &str) -> Option<Output> {
    match arg {
        "-gsplit-dwarf" => Some(Output::Split),
        "--coverage" | "-ftest-coverage" => Some(Output::Notes),
        _ => None,
    }
}

/// Why a command runs here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Here {
    pub reason: String,
    /// Whether it compiles (rather than links, or prints something).
    pub compiles: bool,
}

enum Kind {
    /// For the preprocessor and the worker.
    Both,
    /// The preprocessor's alone.
    Cpp,
    /// Of no meaning without linking.
    Link,
    /// The command runs here.
    Here(&'static str),
}

/// Environment variables that change what a preprocessor reads or writes.
pub(crate) const SEARCH_ENVIRONMENT: &[&str] = words! {
    "CPATH" "C_INCLUDE_PATH" "CPLUS_INCLUDE_PATH" "DEPENDENCIES_OUTPUT" "SUNPRO_DEPENDENCIES"
};
/// Environment variables that change the identity of a compiler.
pub(crate) const ENVIRONMENT: &[&str] = &["GCC_EXEC_PREFIX", "COMPILER_PATH", "GCC_COMPARE_DEBUG"];
/// Environment variables that change what clang does.
pub(crate) const CLANG_ENVIRONMENT: &[&str] = words! {
    "CCC_OVERRIDE_OPTIONS" "CC_PRINT_HEADERS" "CC_PRINT_OPTIONS" "CC_LOG_DIAGNOSTICS" "MACOSX_DEPLOYMENT_TARGET" "IPHONEOS_DEPLOYMENT_TARGET"
    "TVOS_DEPLOYMENT_TARGET" "WATCHOS_DEPLOYMENT_TARGET" "SDKROOT"
};

/// Options whose value is the next argument, for the preprocessor.
const CPP_VALUE: &[&str] = words! {
    "-D" "-U" "-I" "-include" "-imacros" "-isystem" "-iquote" "-idirafter" "-iprefix" "-iwithprefix" "-iwithprefixbefore" "-isysroot" "-imultilib"
    "-imultiarch" "-MF" "-MT" "-MQ" "--sysroot"
};
/// The same for the linker.
const LINK_VALUE: &[&str] = &["-L", "-l", "-T", "-u", "-z", "-e"];
/// The same, and the command runs here.
const HERE_VALUE: &[&str] = words! {
    "-Xpreprocessor" "-Xassembler" "-Xlinker" "-B" "-specs" "-aux-info" "-wrapper" "-dumpbase" "-dumpdir" "-dumpbase-ext"
};

/// The beginnings of options that name files, or make the compiler write some.
const NAME_FILES: &[&str] = words! {
    "-fdump" "-fstack-usage" "-fcallgraph-info" "-fsave-optimization-record" "-fopt-info" "-fpch" "-fmodule" "-fcompare-debug" "-fdbg" "-fdebug-cpp"
    "-fdirectives-only" "-fpreprocessed" "-fada" "-fself-test" "-foffload" "-ftime-report" "-fmem-report" "-fpre-ipa" "-fpost-ipa" "-flto-" "-fwpa"
    "-fltrans" "-fresolution" "-freport" "-fdisable" "-fenable" "-fuse-ld" "-fdiagnostics-format" "-fdeps" "-femit-struct" "-fmap" "-fsanitize-"
};

/// The beginnings of options that count executions, or read such counts.
const COUNTED: &[&str] = words! {
    "-fprofile" "-ftest-coverage" "-fbranch-probabilities" "-fauto-profile" "-fcondition-coverage" "-fpath-coverage"
};
/// The beginnings of options that change the output, and name no file unless they contain a slash.
const PLAIN: &[&str] = words! {
    "-O" "-W" "-std=" "--std=" "--param=" "-f" "-m" "-gdwarf" "-gz" "-gno-" "-gstrict" "-ggdb" "-gcolumn" "-gas-" "-gstatement" "-gvariable"
    "-ginline" "-gpubnames" "-gtype"
};

/// The kind of the options after `-Wa,`.
fn for_assembler(list: &str) -> Kind {
    // Options that list, read or write files are not for a worker.
    const GOOD: &[&str] = words! {
        "--noexecstack" "--execstack" "-mrelax-relocations=no" "-mrelax-relocations=yes" "--fatal-warnings" "-W" "--no-warn"
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-=+._".contains(c);
    let good = |part: &str| {
        // Which processor it is for, and which debug information: it takes no file by these.
        GOOD.contains(&part)
            || (["-m", "--gdwarf-"]
                .iter()
                .any(|begin| part.starts_with(begin))
                && part.chars().all(plain))
    };
    if list.split(',').all(good) {
        Kind::Both
    } else {
        Kind::Here("options for the assembler")
    }
}

/// The kind of an option of gcc without an argument.
fn kind(arg: &str) -> Kind {
    const PLUGIN: &str = "a plugin";
    const FILES: &str = "an option that names files";
    const PROFILE: &str = "profiling or coverage, whose files are named in the object";
    const UNKNOWN: &str = "an option that weft cc does not know";
    let begins = |prefixes: &[&str]| prefixes.iter().any(|p| arg.starts_with(p));
    match arg {
        "-c" | "-S" | "-pipe" | "-pthread" | "-ansi" | "-pedantic" | "-w" | "-g" | "-ggdb"
        | "-shared" | "-static" | "-pie" | "-no-pie" | "-static-pie" | "-nostdlib" | "-p"
        | "-rdynamic" | "-s" => Kind::Both,
        "-nostdinc" | "-nostdinc++" | "-trigraphs" | "-MD" | "-MMD" | "-MP" | "-H" => Kind::Cpp,
        "-E" | "-M" | "-MM" | "-MG" => Kind::Here("only preprocessing"),
        _ if further(arg).is_some() => Kind::Both,
        "-fprofile-arcs" => Kind::Both,
        "-pg" => Kind::Here(PROFILE),
        "-g3" | "-ggdb3" => Kind::Here("macros in the debug information"),
        "-undef" => Kind::Here("-undef, without which workers compile"),
        "-pedantic-errors" => Kind::Here("-pedantic-errors, which takes no line markers"),
        "-Werror=pedantic" => Kind::Here("-Werror=pedantic, of which workers do not warn"),
        "-fverbose-asm" => Kind::Here("-fverbose-asm, which records the command"),
        "-frecord-gcc-switches" => Kind::Here("-frecord-gcc-switches, which records the command"),
        "-nodefaultlibs" | "-nostartfiles" | "-nolibc" => Kind::Link,
        _ if begins(&["-march=native", "-mtune=native", "-mcpu=native"]) => {
            Kind::Here("=native, which means this machine")
        }
        // The worker's compiler would convert the text a second time.
        _ if begins(&["-finput-charset"]) => Kind::Here("-finput-charset"),
        _ if begins(&["-fplugin"]) => Kind::Here(PLUGIN),
        _ if begins(COUNTED) => Kind::Here(PROFILE),
        _ if begins(NAME_FILES) => Kind::Here(FILES),
        _ if begins(&["-Wp,"]) => {
            if arg[4..].starts_with("-MD,")
                || arg[4..].starts_with("-MMD,")
                || begins(&["-Wp,-D", "-Wp,-U", "-Wp,-MT,", "-Wp,-MQ,", "-Wp,-MP"])
            {
                Kind::Cpp
            } else {
                Kind::Here(UNKNOWN)
            }
        }
        _ if begins(&["-Wa,"]) => for_assembler(&arg[4..]),
        _ if begins(&["-Wl,"]) => Kind::Link,
        _ if begins(&["-D", "-U", "-I", "-i", "--sysroot="]) => Kind::Cpp,
        _ if begins(&["-MF", "-MT", "-MQ"]) => Kind::Cpp,
        _ if begins(&["-L", "-l"]) => Kind::Link,
        _ if begins(PLAIN) || matches!(arg, "-g0" | "-g1" | "-g2") => {
            // Prefixes of paths are text here: no file is opened. Anything else with a path is.
            let maps = begins(&[
                "-fdebug-prefix-map=",
                "-ffile-prefix-map=",
                "-fmacro-prefix-map=",
            ]);
            if arg.contains('/') && !maps || !arg.split(['=', ',']).all(is_argument) {
                Kind::Here(FILES)
            } else {
                Kind::Both
            }
        }
        _ => Kind::Here(UNKNOWN),
    }
}

/// Whether a driver of this name takes C for C++.
pub(crate) fn is_cxx(name: &str) -> bool {
    name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.')
        .trim_end_matches('-')
        .ends_with("++")
}

/// Whether weft cc knows a compiler by its name.
pub fn is_driver(name: &str) -> bool {
    Family::of(name).is_some()
}

impl Family {
    /// Of a compiler's name: `gcc`, `g++`, `cc`, `c++`, with a target before and a version after; `clang`, `clang++` with a version after. A target
    /// before clang's name has a file of options, which workers do not have.
    pub fn of(name: &str) -> Option<Self> {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
        if name.len() > 64 || !name.chars().all(good) || name.starts_with(['-', '.']) {
            return None;
        }
        let base = name
            .trim_end_matches(|c: char| c.is_ascii_digit() || c == '.')
            .trim_end_matches('-');
        if ["clang", "clang++"].contains(&base) {
            return Some(Self::Clang);
        }
        let gcc = ["gcc", "g++", "cc", "c++"].iter().any(|known| {
            base.strip_suffix(known)
                .is_some_and(|target| target.is_empty() || target.ends_with('-'))
        });
        gcc.then_some(Self::Gcc)
    }

    fn kind(self, arg: &str) -> Kind {
        match self {
            Self::Gcc => kind(arg),
            Self::Clang => clang::kind(arg),
        }
    }
}

/// Whether a text of a master can be an argument of a compiler, or the value of an option. gcc reads further arguments, which nobody has checked, from a file
/// whose name comes after `@`. Its driver hands values on as arguments of their own, also those that are joined to their options.
pub(crate) fn is_argument(text: &str) -> bool {
    !text.starts_with('@')
}

/// Whether a source's name can be an argument of a compiler. One that begins with `-` is an option.
pub fn is_source_name(name: &str) -> bool {
    name.split('/')
        .all(|part| is_argument(part) && !part.starts_with('-'))
}

/// The folder, with its slash, and the last part of a prefix of the names of further outputs.
pub(crate) fn split_beside(beside: &str) -> (&str, &str) {
    beside.split_at(beside.rfind('/').map_or(0, |n| n + 1))
}

/// Checks the options of a job that a master sends.
///
/// # Errors
/// The option that may not be, and why.
pub fn check_job(family: Family, args: &[String]) -> Result<(), String> {
    let mut phases = 0;
    for arg in args {
        match family.kind(arg) {
            Kind::Both => phases += u32::from(arg == "-c" || arg == "-S"),
            Kind::Here(why) => return Err(format!("{arg}: {why}")),
            Kind::Cpp | Kind::Link => return Err(format!("{arg}: not for a worker")),
        }
    }
    if phases == 1 {
        Ok(())
    } else {
        Err("neither -c nor -S".into())
    }
}

/// Splits the contents of a command file, as gcc does: blanks separate, quotes and backslashes protect.
fn split_response(text: &[u8]) -> Vec<OsString> {
    let mut all = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(b) = bytes.next() {
        match (b, quote) {
            (b'\\', _) => word.get_or_insert_default().extend(bytes.next()),
            (_, Some(q)) if q == b => quote = None,
            (b'"' | b'\'', None) => {
                quote = Some(b);
                word.get_or_insert_default();
            }
            (b, None) if b.is_ascii_whitespace() => {
                all.extend(word.take().map(OsString::from_vec));
            }
            _ => word.get_or_insert_default().push(b),
        }
    }
    all.extend(word.map(OsString::from_vec));
    all
}

/// Puts the contents of command files in their place. One that cannot be read stays as it is, as gcc has it.
fn expand(dir: &Path, args: &[OsString], depth: u32) -> Result<Vec<OsString>, &'static str> {
    let mut all = Vec::with_capacity(args.len());
    for arg in args {
        let Some(path) = arg.as_bytes().strip_prefix(b"@") else {
            all.push(arg.clone());
            continue;
        };
        let path = &dir.join(OsStr::from_bytes(path));
        match std::fs::metadata(path) {
            Ok(about) if about.is_file() && about.len() <= MAX_RESPONSE && depth > 0 => {
                let text = std::fs::read(path).map_err(|_| "a command file that cannot be read")?;
                all.extend(expand(dir, &split_response(&text), depth - 1)?);
            }
            Ok(_) => return Err("a command file that is too long, too deep or no file"),
            Err(_) => all.push(arg.clone()),
        }
    }
    Ok(all)
}

struct Reading {
    family: Family,
    preprocess: Vec<OsString>,
    job: Vec<String>,
    /// With their languages, and whether `-x` named them.
    sources: Vec<(PathBuf, Option<Language>, bool)>,
    output: Option<PathBuf>,
    phases: Vec<&'static str>,
    /// Of `-Wp,`: clang's driver puts them after all others.
    late: Vec<OsString>,
    explicit: Option<Language>,
    rule: Requested,
    /// The first reason to stay, in the order of the arguments.
    here: Option<String>,
}

impl Reading {
    fn new(family: Family) -> Self {
        Self {
            family,
            preprocess: Vec::new(),
            job: Vec::new(),
            sources: Vec::new(),
            output: None,
            phases: Vec::new(),
            late: Vec::new(),
            explicit: None,
            rule: Requested::default(),
            here: None,
        }
    }

    fn stay(&mut self, reason: impl Into<String>) {
        self.here.get_or_insert_with(|| reason.into());
    }

    fn source(&mut self, path: PathBuf, again: OsString) {
        let language = self
            .explicit
            .or_else(|| path.extension().and_then(Language::of_extension));
        self.preprocess.push(again);
        self.sources.push((path, language, self.explicit.is_some()));
    }

    fn option(&mut self, text: &str, arg: &OsString) {
        match text {
            "-c" => return self.phases.push("-c"),
            "-S" => return self.phases.push("-S"),
            // It changes nothing in the output, and the worker decides where intermediate text is.
            "-pipe" => return,
            "-MD" | "-MMD" => self.rule.make(text == "-MD"),
            _ => {}
        }
        self.rule.has_file |= text.starts_with("-MF");
        self.rule.has_target |= text.starts_with("-MT") || text.starts_with("-MQ");
        match self.family.kind(text) {
            Kind::Both => {
                self.preprocess.push(arg.clone());
                self.job.push(text.into());
            }
            Kind::Cpp => self.preprocess.push(arg.clone()),
            // clang warns of what it does not need.
            Kind::Link if self.family == Family::Clang => {
                self.stay(format!("an option for linking ({text})"));
            }
            Kind::Link => {}
            Kind::Here(why) => self.stay(format!("{why} ({text})")),
        }
    }

    fn read(&mut self, args: Vec<OsString>) {
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let Some(text) = arg.to_str() else {
                // Only names of files may be other than UTF-8.
                if arg.as_bytes().starts_with(b"-") {
                    self.stay("an option that is not UTF-8");
                } else {
                    self.source(PathBuf::from(&arg), arg);
                }
                continue;
            };
            let clang = self.family == Family::Clang;
            if text == "-" {
                self.stay("standard input as the source");
            } else if !text.starts_with('-') {
                self.source(PathBuf::from(&arg), arg.clone());
            } else if clang && self.asks_clang_for_a_rule(text, &mut args) {
            } else if CPP_VALUE.contains(&text) {
                self.rule.has_file |= text == "-MF";
                self.rule.has_target |= text == "-MT" || text == "-MQ";
                self.preprocess.push(arg.clone());
                self.preprocess.extend(args.next());
            } else if LINK_VALUE.contains(&text) {
                args.next();
                if clang {
                    self.stay(format!("an option for linking ({text})"));
                }
            } else if HERE_VALUE.contains(&text) {
                self.stay(format!("an option that weft cc does not know ({text})"));
                args.next();
            } else if text == "--param" && !clang {
                match args.next().as_deref().and_then(OsStr::to_str) {
                    Some(value) => self.option(
                        &format!("--param={value}"),
                        &format!("--param={value}").into(),
                    ),
                    None => self.stay("--param without a value"),
                }
            } else if text == "-target" && clang {
                match args.next().as_deref().and_then(OsStr::to_str) {
                    Some(value) => {
                        let joined = format!("--target={value}");
                        self.option(&joined, &OsString::from(&joined));
                    }
                    None => self.stay("-target without a value"),
                }
            } else if let Some(defines) = preprocessors(text).filter(|_| clang) {
                self.late.push(defines.into());
            } else if let Some(joined) = text.strip_prefix("-o") {
                self.output = if joined.is_empty() {
                    args.next().map(PathBuf::from)
                } else {
                    Some(joined.into())
                };
            } else if let Some(joined) = text.strip_prefix("-x") {
                let name = if joined.is_empty() {
                    args.next()
                } else {
                    Some(joined.into())
                };
                self.explicit = name
                    .as_deref()
                    .and_then(|name| Language::named(name.as_bytes()));
                if self.explicit.is_none() {
                    self.stay("a language that workers do not compile (-x)");
                }
                self.preprocess.push("-x".into());
                self.preprocess.extend(name);
            } else {
                self.option(text, &arg);
            }
        }
        self.preprocess.append(&mut self.late);
    }

    /// Arguments of the preprocessor, and clang's rule.
    fn preprocessor(&mut self, output: &Path, named: bool) -> (Vec<OsString>, Option<Rule>) {
        let mut preprocess = std::mem::take(&mut self.preprocess);
        let rule = std::mem::take(&mut self.rule);
        if self.family == Family::Clang {
            // Names of files, in the order in which they are read.
            let target = if named {
                output.into()
            } else {
                output.with_extension("o")
            };
            preprocess.extend(["-M", "-MQ", "x"].map(OsString::from));
            preprocess.extend(rule.phony.then(|| "-MP".into()));
            let rule = rule.made.map(|system| Rule {
                file: rule.file.unwrap_or_else(|| output.with_extension("d")),
                targets: if rule.targets.is_empty() {
                    vec![quoted(&target.to_string_lossy())]
                } else {
                    rule.targets
                },
                system,
                phony: rule.phony,
            });
            return (preprocess, rule);
        }
        preprocess.extend(["-E", "-fdirectives-only"].map(OsString::from));
        if rule.made.is_some() {
            // With -E the driver would name both after other things.
            if !rule.has_file {
                preprocess.extend(["-MF".into(), output.with_extension("d").into_os_string()]);
            }
            if !rule.has_target {
                preprocess.extend(["-MQ".into(), output.into()]);
            }
        }
        (preprocess, None)
    }
}

/// Reads the arguments of gcc (without its name) that runs in this directory.
///
/// # Errors
/// [`Here`]: the command runs here.
pub fn parse(dir: &Path, args: &[OsString]) -> Result<Plan, Here> {
    parse_as(Family::Gcc, dir, args)
}

/// Reads the arguments of a compiler of this family (without its name) that runs in this directory.
///
/// # Errors
/// [`Here`]: the command runs here.
pub fn parse_as(family: Family, dir: &Path, args: &[OsString]) -> Result<Plan, Here> {
    let mut reading = Reading::new(family);
    let expanded = expand(dir, args, MAX_DEPTH);
    let compiles = |args: &[OsString]| args.iter().any(|arg| arg == "-c" || arg == "-S");
    let here = |reason: &str, compiles| Here {
        reason: reason.into(),
        compiles,
    };
    let args = expanded.map_err(|why| here(why, compiles(args)))?;
    let compiles = compiles(&args);
    reading.read(args);
    let stay = |reason: &str| Err(here(reason, compiles));
    let [phase] = reading.phases[..] else {
        return stay(if reading.phases.is_empty() {
            "linking, or several steps at once"
        } else {
            "-c and -S together"
        });
    };
    if let Some(reason) = &reading.here {
        return stay(reason);
    }
    let asks = |options: &[&str]| {
        reading
            .job
            .iter()
            .any(|arg| options.contains(&arg.as_str()))
    };
    if family == Family::Gcc && asks(&["-pedantic", "-Wpedantic"]) && asks(&["-Werror"]) {
        return stay("-pedantic with -Werror, of which workers do not warn");
    }
    let [(source, language, explicit)] = &reading.sources[..] else {
        return stay(if reading.sources.is_empty() {
            "no source"
        } else {
            "several sources"
        });
    };
    let (Some(language), explicit) = (*language, *explicit) else {
        return stay(
            "a source that workers do not compile (assembler, preprocessed, a header, or another language)",
        );
    };
    if source.file_stem() == Some(OsStr::new("conftest")) {
        return stay("a test of configure");
    }
    if let Some(reason) = reading.any_stays() {
        return stay(reason);
    }
    if family == Family::Clang
        && let Some(reason) = reading.clang_stays(dir, language)
    {
        return stay(reason);
    }
    let source = source.clone();
    let extension = if phase == "-c" { "o" } else { "s" };
    let named = reading.output.is_some();
    let output = match reading.output.take() {
        Some(output) => output,
        None => Path::new(source.file_name().unwrap_or_default()).with_extension(extension),
    };
    if output == Path::new("-")
        || dir
            .join(&output)
            .metadata()
            .is_ok_and(|about| !about.is_file())
    {
        return stay("an output that is no regular file");
    }
    let beside = match name_beside(&reading.job, phase, &output) {
        Ok(beside) => beside,
        Err(why) => return stay(why),
    };
    let (preprocess, rule) = reading.preprocessor(&output, named);
    let told = rule.as_ref().map(|rule| rule.file.clone());
    if told
        .or_else(|| dependencies(&preprocess))
        .is_some_and(|told| rule::is_special(dir, &told))
    {
        return stay("dependencies in what is no regular file");
    }
    let mut job = reading.job;
    job.push(phase.into());
    Ok(Plan {
        family,
        preprocess,
        rule,
        job,
        source,
        output,
        language,
        explicit,
        beside,
    })
}

/// The prefix of the names of further outputs. Separate debug information has to be below the working directory of a worker, too.
fn name_beside(job: &[String], phase: &str, output: &Path) -> Result<String, &'static str> {
    if !names_further(job) {
        return Ok(String::new());
    }
    let counts = job.iter().any(|arg| counts(arg));
    let stem = output.to_str().and_then(|output| output.strip_suffix(".o"));
    match stem {
        // They have a worker's options in them, one of which names its file.
        _ if counts && job.iter().any(|arg| arg.starts_with("-g") && arg != "-g0") => {
            Err("debug information with coverage")
        }
        Some(stem) if !is_beside(stem) => Err("an object whose name begins with @"),
        Some(stem) if phase == "-c" && !stem.is_empty() => {
            let below = Path::new(stem)
                .components()
                .all(|part| matches!(part, Component::Normal(_)));
            if counts || below && !stem.starts_with("./") {
                Ok(stem.into())
            } else {
                Err("-gsplit-dwarf, and an object that is not below the working directory")
            }
        }
        _ => Err("further outputs of something else than an object (.o)"),
    }
}

/// Whether both parts of a prefix of names can be arguments.
pub(crate) fn is_beside(beside: &str) -> bool {
    let (dir, name) = split_beside(beside);
    is_argument(dir) && is_argument(name)
}

fn counts(arg: &str) -> bool {
    arg == "-fprofile-arcs" || further(arg) == Some(Output::Notes)
}

/// Whether an object of these options contains the names of further outputs.
pub(crate) fn names_further(job: &[String]) -> bool {
    asks_for(job, Output::Split) || job.iter().any(|arg| counts(arg))
}

/// Whether these options ask for a further output.
pub(crate) fn asks_for(args: &[String], what: Output) -> bool {
    args.iter().any(|arg| further(arg) == Some(what))
}

/// Words in a preprocessed text that keep it here, and why.
const STAYS: &[(&[u8], &str)] = &[
    (b".incbin", ".incbin, which reads a file"),
    (b".include", ".include of the assembler, which reads a file"),
    (b"pch_preprocess", "a precompiled header"),
    (b"__TIME__", "__TIME__, which is this machine's"),
    (b"__DATE__", "__DATE__, which is this machine's"),
    (b"__TIMESTAMP__", "__TIMESTAMP__, which is of a file here"),
    (b"#embed", "#embed, which reads a file"),
    (
        b"GCC dependency",
        "#pragma GCC dependency, which compares times of files",
    ),
];
/// Words of a C++ text that ask for the name of a function, in which clang names the file of a lambda or of another type without a name.
const FUNCTION_NAMES: &[&[u8]] = &[b"__PRETTY_FUNCTION__", b"__FUNCSIG__", b"__builtin_FUNCSIG"];

/// Whether a text has one of them.
pub(crate) fn names_functions(source: &[u8]) -> bool {
    let is_there = |word: &&[u8]| memchr::memmem::find(source, word).is_some();
    FUNCTION_NAMES.iter().any(is_there)
}

/// Bytes that parts of a text must share for [`stays`] to see all that is in the whole.
pub(crate) const STAYS_OVERLAP: usize = 13;

/// Why preprocessed text cannot go to a worker.
pub fn stays(source: &[u8]) -> Option<&'static str> {
    // All words at once, where the processor can; the texts have a megabyte.
    static ALL: LazyLock<Option<Searcher>> =
        LazyLock::new(|| Searcher::new(STAYS.iter().map(|(word, _)| word)));
    if ALL.as_ref().is_some_and(|all| all.find(source).is_none()) {
        return None;
    }
    let is_there = |word: &[u8]| memchr::memmem::find(source, word).is_some();
    let found = STAYS.iter().find(|(word, _)| is_there(word));
    found.map(|&(_, why)| why)
}

/// The same text with blanks instead of comments; `None` if the comments cannot be determined safely (raw strings, quotes that do not close on their line).
fn without_comments(source: &[u8]) -> Option<Vec<u8>> {
    let mut out = source.to_vec();
    let mut at = 0;
    while at < source.len() {
        let rest = &source[at..];
        let len = match rest {
            [b'/', b'*', inside @ ..] => {
                let len = 4 + memchr::memmem::find(inside, b"*/")?;
                out[at..at + len].fill(b' ');
                len
            }
            [b'/', b'/', ..] => {
                let ends = |&n: &usize| !source[..at + n].ends_with(b"\\");
                let len = memchr::memchr_iter(b'\n', rest).find(ends)?;
                out[at..at + len].fill(b' ');
                len
            }
            [b'"', ..] if source[..at].ends_with(b"R") => return None,
            [quote @ (b'"' | b'\''), ..] => {
                let mut len = 1;
                loop {
                    match rest.get(len)? {
                        b'\n' => return None,
                        b'\\' => len += 2,
                        b if b == quote => break len + 1,
                        _ => len += 1,
                    }
                }
            }
            _ => 1,
        };
        at += len;
    }
    Some(out)
}

/// [`stays`] of a whole text without its comments, because headers mention these words in comments.
pub fn stays_in_code(source: &[u8]) -> Option<&'static str> {
    let found = stays(source)?;
    without_comments(source).map_or(Some(found), |code| stays(&code))
}

/// The part of a preprocessed text that a worker's compiler has already: the definitions that are built in. It would warn of each.
pub fn built_in(source: &[u8]) -> std::ops::Range<usize> {
    const MARK: &[u8] = b" \"<built-in>\"";
    let marker = |line: &[u8]| line.starts_with(b"# ") && line.ends_with(MARK);
    let mut begin = None;
    let mut at = 0;
    // It comes first, after the names of the source and of the directory.
    for (n, line) in source.split_inclusive(|&b| b == b'\n').enumerate() {
        let bare = line.strip_suffix(b"\n").unwrap_or(line);
        match begin {
            None if marker(bare) => begin = Some(at),
            None if n > 4 => break,
            Some(begin) if bare.starts_with(b"# ") && !marker(bare) => return begin..at,
            // Another line: this is not the expected prologue.
            Some(_) if !(marker(bare) || bare.is_empty() || bare.starts_with(b"#define ")) => break,
            _ => {}
        }
        at += line.len();
    }
    0..0
}

/// Whether each compilation gives the same object. With `-flto` it contains the directory and options of the worker, and random numbers in its names; with coverage, the time.
pub fn is_repeatable(args: &[String]) -> bool {
    let begins = |prefix| args.iter().any(|arg| arg.starts_with(prefix));
    !begins("-flto") && (!asks_for(args, Output::Notes) || begins("-frandom-seed="))
}

/// Applies `-f*-prefix-map` options to a path: the last matching option counts.
pub fn map_path(args: &[String], path: &str) -> String {
    let maps = args.iter().rev().filter_map(|arg| {
        let map = arg
            .strip_prefix("-fdebug-prefix-map=")
            .or_else(|| arg.strip_prefix("-ffile-prefix-map="))?;
        map.rsplit_once('=')
    });
    for (old, new) in maps {
        if let Some(rest) = path.strip_prefix(old) {
            return format!("{new}{rest}");
        }
    }
    path.into()
}

#[cfg(test)]
mod tests;
