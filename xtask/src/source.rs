//! Checks of the source text itself: the crates that may contain `unsafe`, and the length of files.

use std::path::{Path, PathBuf};

use crate::deps::UnsafeCode;

/// The most lines of a file.
pub(crate) const MAX_LINES: usize = 900;
/// The most lines of a function outside tests, signature and braces counted.
const MAX_FUNCTION: usize = 120;

/// All `.rs` files under a folder, except in build output and hidden folders.
pub(crate) fn rust_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            if entry.file_type()?.is_dir() {
                if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// All errors in one file. `is_root`: it is the root of a library or program.
pub(crate) fn check(name: &str, text: &str, unsafe_code: UnsafeCode, is_root: bool) -> Vec<String> {
    let mut problems = Vec::new();
    let lines = text.lines().count();
    if lines > MAX_LINES {
        problems.push(format!(
            "{name} has {lines} lines; split it at or under {MAX_LINES}"
        ));
    }
    if !is_test(name) {
        problems.extend(
            functions(&code_only(text))
                .filter(|(_, _, lines)| *lines > MAX_FUNCTION)
                .map(|(function, number, lines)| {
                    format!("{name}:{number}: {function} has {lines} lines; split it at or under {MAX_FUNCTION}")
                }),
        );
    }
    if unsafe_code != UnsafeCode::Allowed {
        let code = code_only(text);
        if is_root
            && unsafe_code == UnsafeCode::Forbidden
            && !code
                .split_whitespace()
                .collect::<String>()
                .contains("#![forbid(unsafe_code)]")
        {
            problems.push(format!("{name} lacks #![forbid(unsafe_code)]"));
        }
        problems.extend(
            code.lines()
                .zip(1..)
                .filter(|(line, _)| {
                    line.split(|c: char| !c.is_alphanumeric() && c != '_')
                        .any(|word| word == "unsafe")
                })
                .map(|(_, number)| {
                    format!("{name}:{number}: unsafe code in a crate that may not have it")
                }),
        );
    }
    problems
}

/// Tests and benchmarks are lists of steps: they may be long.
fn is_test(name: &str) -> bool {
    let mut parts = Path::new(name).iter();
    parts.any(|part| part == "tests" || part == "benches" || part == "tests.rs")
}

/// The functions of a text as rustfmt leaves it: name, line of the signature, lines.
fn functions(code: &str) -> impl Iterator<Item = (&str, usize, usize)> {
    let lines: Vec<&str> = code.lines().collect();
    (0..lines.len()).filter_map(move |first| {
        let line = lines[first];
        let indent = line.len() - line.trim_start().len();
        let mut words = line.split_whitespace();
        // A name comes after `pub(crate) const unsafe extern "C" fn` and the like, never after other words.
        let mut head = words.by_ref().take_while(|word| *word != "fn");
        let is_head = |word: &str| {
            word.starts_with("pub")
                || ["const", "async", "unsafe", "extern", "default", "in"].contains(&word)
                || word.starts_with('"')
                || word.ends_with(')')
        };
        let name = if head.all(is_head) {
            words.next()?
        } else {
            return None;
        };
        let name = name.split(['(', '<']).next()?;
        if line.ends_with([';', '}']) {
            return None;
        }
        let is_end = |line: &&str| {
            line.len() - line.trim_start().len() == indent
                && (line.trim_start().starts_with('}') || line.ends_with(';'))
        };
        let last = first + 1 + lines[first + 1..].iter().position(is_end)?;
        Some((name, first + 1, last - first + 1))
    })
}

/// The text without comments and without the contents of string and character literals; lines stay where they are.
pub(crate) fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(len) = raw_string(rest, code.chars().next_back()) {
            len
        } else if first == '"' {
            quoted(rest, '"')
        } else if first == '\'' && is_char_literal(rest) {
            quoted(rest, '\'')
        } else {
            0
        };
        if skipped == 0 {
            code.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            code.push(' ');
            code.extend(rest[..skipped].chars().filter(|&c| c == '\n'));
            rest = &rest[skipped..];
        }
    }
    code
}

/// Length of the block comment, which may hold others, at the start of `text`.
fn block_comment(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

/// Length of the raw string literal at the start of `text`, if there is one. `before` is the character before it.
fn raw_string(text: &str, before: Option<char>) -> Option<usize> {
    if before.is_some_and(|c| (c.is_alphanumeric() || c == '_') && !matches!(c, 'b' | 'c')) {
        return None;
    }
    let after_r = text.strip_prefix('r')?;
    let opening = after_r.trim_start_matches('#');
    let hashes = after_r.len() - opening.len();
    let body = opening.strip_prefix('"')?;
    let closing = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len();
    Some(
        body.find(&closing)
            .map_or(text.len(), |end| start + end + closing.len()),
    )
}

/// Length of the literal with escapes that `text` begins with, up to its closing `quote`.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Distinguishes `'a'` and `'\n'` from a lifetime.
fn is_char_literal(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => true,
        (Some(_), Some(second)) => second == '\'',
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use UnsafeCode::{Allowed, Forbidden, InMacros};

    #[test]
    fn functions_are_as_long_as_their_lines() {
        let body = "        step();\n".repeat(MAX_FUNCTION - 1);
        let text = format!(
            "impl X {{\n    pub(crate) unsafe extern \"C\" fn long<T>(\n        x: T,\n    ) {{\n{body}    }}\n\n    fn short() {{\n    }}\n}}\n"
        );
        let found: Vec<_> = functions(&text).collect();
        assert_eq!(found, [("long", 2, MAX_FUNCTION + 3), ("short", 126, 2)]);
        let told = check("crates/x/src/y.rs", &text, UnsafeCode::Allowed, false);
        assert!(
            matches!(&told[..], [one] if one.contains("long")),
            "{told:?}"
        );
        assert!(check("crates/x/tests/y.rs", &text, UnsafeCode::Allowed, false).is_empty());
        assert_eq!(
            functions("// a fn in words {\n}\nlet f = fn_of();\n").count(),
            0
        );
    }

    #[test]
    fn finds_unsafe_code_and_nothing_else() {
        let text = r##"#![forbid(unsafe_code)]
// unsafe in a comment
/* unsafe /* nested unsafe */ unsafe */ fn f<'a>(x: &'a str) -> char { '"' }
const S: &str = "unsafe \" unsafe"; const R: &str = r#"unsafe " unsafe"#; const B: &[u8] = br"unsafe\";
const C: char = '\''; const D: u8 = b'"'; fn unsafe_name() {} fn r#for() {}
fn g() { unsafe { h() } }
unsafe impl Send for X {}
"##;
        let found = check("f.rs", text, Forbidden, true);
        let place = |line: u32| format!("f.rs:{line}: unsafe code in a crate that may not have it");
        assert_eq!(found, [place(6), place(7)]);
        assert_eq!(check("f.rs", text, Allowed, true), [""; 0]);
    }

    #[test]
    fn a_root_must_forbid_unsafe_in_code() {
        let complaint = ["lib.rs lacks #![forbid(unsafe_code)]"];
        assert_eq!(
            check("lib.rs", "// #![forbid(unsafe_code)]\n", Forbidden, true),
            complaint
        );
        assert_eq!(
            check("lib.rs", "#![deny(unsafe_code)]\n", Forbidden, true),
            complaint
        );
        assert_eq!(
            check("lib.rs", "#![forbid( unsafe_code )]\n", Forbidden, true),
            [""; 0]
        );
        assert_eq!(check("m.rs", "", Forbidden, false), [""; 0]);
        assert_eq!(check("lib.rs", "", InMacros, true), [""; 0]);
        assert_eq!(check("lib.rs", "unsafe fn f() {}", InMacros, true).len(), 1);
    }

    #[test]
    fn a_long_file_fails() {
        let text = "\n".repeat(MAX_LINES);
        assert_eq!(check("f.rs", &text, Allowed, false), [""; 0]);
        assert_eq!(check("f.rs", &(text + "\n"), Allowed, false).len(), 1);
    }

    #[test]
    fn unterminated_literals_do_not_hang_or_panic() {
        for text in ["\"abc", "'\\", "r#\"abc", "/* abc", "'", "é'é\"", "r###"] {
            code_only(text);
        }
    }

    #[test]
    fn finds_its_own_file() {
        let files = rust_files(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(files.iter().any(|file| file.ends_with("src/source.rs")));
    }
}
