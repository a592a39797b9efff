//! Commands of clang: the rule for make, which the master writes itself, and what keeps a command here.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::{Language, Reading, stays};

/// The rule for make that clang is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub file: PathBuf,
    /// The targets, with quotes where they have to have some.
    pub targets: Vec<String>,
    /// The system's headers too.
    pub system: bool,
    /// A rule for each header.
    pub phony: bool,
}

/// Columns of a line, with the backslash at its end.
const COLUMNS: usize = 75;

impl Rule {
    /// Its text, as clang breaks its lines; the first name is that of the source. The names need no quotes. Some versions write an empty line
    /// before each rule of a header.
    pub(crate) fn text(&self, names: &[&str], spaced: bool) -> String {
        let mut text = String::new();
        let mut column = 0;
        for target in &self.targets {
            if column > 0 && column + target.len() + 2 > COLUMNS {
                text.push_str(" \\\n  ");
                column = 2;
            } else if column > 0 {
                text.push(' ');
                column += 1;
            }
            text.push_str(target);
            column += target.len();
        }
        text.push(':');
        column += 1;
        for name in names {
            if column + name.len() + 3 > COLUMNS {
                text.push_str(" \\\n ");
                column = 2;
            }
            text.push(' ');
            text.push_str(name);
            column += name.len() + 1;
        }
        text.push('\n');
        for name in names.iter().skip(1).filter(|_| self.phony) {
            text.push_str(if spaced { "\n" } else { "" });
            text.push_str(name);
            text.push_str(":\n");
        }
        text
    }
}

/// What a command says about dependencies.
#[derive(Default)]
pub(super) struct Requested {
    /// They are; for clang, whether with the system's headers.
    pub(super) made: Option<bool>,
    pub(super) file: Option<PathBuf>,
    pub(super) has_file: bool,
    pub(super) targets: Vec<String>,
    pub(super) has_target: bool,
    pub(super) phony: bool,
    /// Both `-MD` and `-MMD`.
    mixed: bool,
}

impl Requested {
    /// With the system's headers, or without.
    pub(super) fn make(&mut self, system: bool) {
        self.mixed |= self.made.is_some_and(|before| before != system);
        self.made = Some(system);
    }

    /// Whether anything is said about a rule.
    fn asks(&self) -> bool {
        self.file.is_some() || !self.targets.is_empty() || self.phony
    }
}

/// A target as a rule for make has it.
pub(super) fn quoted(target: &str) -> String {
    let mut out = String::new();
    for c in target.chars() {
        match c {
            ' ' | '\t' => {
                // Backslashes before a blank would protect each other.
                let before = out.len() - out.trim_end_matches('\\').len();
                out.extend(std::iter::repeat_n('\\', before + 1));
            }
            '$' => out.push('$'),
            '#' => out.push('\\'),
            _ => {}
        }
        out.push(c);
    }
    out
}

impl Reading {
    /// Whether this is an option about dependencies, of clang; the master writes their rule.
    pub(super) fn asks_clang_for_a_rule(
        &mut self,
        text: &str,
        args: &mut impl Iterator<Item = OsString>,
    ) -> bool {
        let rule = &mut self.rule;
        match text {
            "-MD" => rule.make(true),
            "-MMD" => rule.make(false),
            "-MP" => rule.phony = true,
            "-MV" => self.stay("dependencies for another make (-MV)"),
            _ => {
                for (system, begin) in [(true, "-Wp,-MD,"), (false, "-Wp,-MMD,")] {
                    if let Some(file) = text.strip_prefix(begin).filter(|f| !f.contains(',')) {
                        rule.make(system);
                        rule.file = Some(file.into());
                        return true;
                    }
                }
                let Some(option) = ["-MF", "-MT", "-MQ"]
                    .into_iter()
                    .find(|option| text.starts_with(option))
                else {
                    return false;
                };
                let value = match &text[option.len()..] {
                    "" => args.next(),
                    joined => Some(joined.into()),
                };
                let value = value.and_then(|value| value.into_string().ok());
                match (option, value) {
                    ("-MF", Some(file)) => rule.file = Some(file.into()),
                    ("-MT", Some(target)) => rule.targets.push(target),
                    (_, Some(target)) => rule.targets.push(quoted(&target)),
                    (_, None) => {
                        self.stay("dependencies with a name that is not UTF-8, or without one");
                    }
                }
            }
        }
        true
    }

    /// What keeps a command of either compiler here.
    pub(super) fn any_stays(&self) -> Option<&'static str> {
        if self.rule.mixed {
            return Some("-MD and -MMD together");
        }
        let mut before: &OsStr = OsStr::new("");
        self.preprocess.iter().find_map(|arg| {
            // Its text is in no file that is looked at.
            let defines = before == "-D"
                || [&b"-D"[..], b"-Wp,-D"]
                    .iter()
                    .any(|begin| arg.as_bytes().starts_with(begin));
            before = arg;
            stays(arg.as_bytes()).filter(|_| defines)
        })
    }

    /// What else keeps a command of clang here.
    pub(super) fn clang_stays(&self, dir: &Path, language: Language) -> Option<&'static str> {
        let stdlib = |arg: &OsString| arg.as_bytes().starts_with(b"-stdlib=");
        let compiled = |header: &OsString| {
            [".pch", ".gch"].iter().any(|end| {
                let mut name = header.clone();
                name.push(end);
                dir.join(name).exists()
            })
        };
        let mut pairs = self.preprocess.windows(2);
        if language == Language::C && self.preprocess.iter().any(stdlib) {
            Some("-stdlib= for C, of which clang warns")
        } else if pairs.any(|pair| pair[0] == "-include" && compiled(&pair[1])) {
            Some("a precompiled header")
        } else if self.rule.made.is_none() && self.rule.asks() {
            Some("-MF, -MT, -MQ or -MP without -MD")
        } else {
            None
        }
    }
}

/// Whether a rule would go to standard output, or into something that a renamed file must not replace.
pub(super) fn is_special(dir: &Path, file: &Path) -> bool {
    let about = dir.join(file).symlink_metadata();
    file == Path::new("-") || about.is_ok_and(|about| !about.is_file())
}

/// The file into which the preprocessor writes dependencies.
pub(crate) fn dependencies(preprocess: &[OsString]) -> Option<PathBuf> {
    let mut found = None;
    let mut args = preprocess.iter();
    while let Some(arg) = args.next() {
        let arg = arg.as_bytes();
        let joined = [&b"-Wp,-MD,"[..], b"-Wp,-MMD,", b"-MF"]
            .iter()
            .find_map(|prefix| arg.strip_prefix(*prefix));
        match joined {
            Some(b"") => found = args.next().map(PathBuf::from),
            Some(name) => found = Some(OsStr::from_bytes(name).into()),
            None => {}
        }
    }
    found
}

/// The definition that is passed to the preprocessor alone.
pub(super) fn preprocessors(text: &str) -> Option<&str> {
    let option = text.strip_prefix("-Wp,")?;
    let one = (option.starts_with("-D") || option.starts_with("-U")) && option.len() > 2;
    (one && !option.contains(',')).then_some(option)
}
