//! A Debian copyright file for a package that is linked statically: the notices of every crate in it, and the text of every licence.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A crate, or another part of the package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub name: String,
    pub version: String,
    /// The SPDX expression.
    pub license: String,
    pub authors: Vec<String>,
    /// Where its source is on this machine, for the texts of its licences.
    pub folder: Option<PathBuf>,
    /// SHA-256 of the archive in the registry.
    pub checksum: Option<String>,
    /// Whether it belongs to this project.
    pub own: bool,
}

const FORMAT: &str = "https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/";
/// Licences that every Debian system has; they need not be repeated.
const COMMON: [(&str, &str); 2] = [
    ("Apache-2.0", "Apache License, Version 2.0"),
    ("CC0-1.0", "Creative Commons CC0 1.0 Universal"),
];

/// The licence that each phrase identifies, the more exact phrases first.
const PHRASES: [(&str, &str); 10] = [
    ("Neither the name", "BSD-3-Clause"),
    (
        "Redistribution and use in source and binary forms",
        "BSD-2-Clause",
    ),
    (
        "The above copyright notice and this permission notice",
        "MIT",
    ),
    ("Permission is hereby granted, free of charge", "MIT-0"),
    (
        "Permission to use, copy, modify, and/or distribute this software",
        "ISC",
    ),
    (
        "Permission to use, copy, modify, and distribute this software",
        "ISC",
    ),
    ("This is free and unencumbered software", "Unlicense"),
    ("CC0 1.0 Universal", "CC0-1.0"),
    ("Altered source versions must be plainly marked", "Zlib"),
    (
        "LLVM Exceptions to the Apache 2.0 License",
        "LLVM exception",
    ),
];

/// The text of a licence, and the crates that have it.
struct Text {
    name: String,
    body: String,
    crates: Vec<String>,
}

/// The file. `own`: the project's own MIT licence.
pub(crate) fn copyright(own: &str, parts: &[&Part]) -> io::Result<String> {
    let mut out = format!(
        "Format: {FORMAT}\nUpstream-Name: weft\nComment:\n Programs in Rust are linked statically. Beside the project's own \
         files this package therefore has parts\n of the crates that are named here as Files, by name and version.\n\n\
         Files: *\n"
    );
    field(&mut out, "Copyright", &notices(own));
    out.push_str("License: MIT or Apache-2.0\n");

    let mut texts: BTreeMap<String, Text> = BTreeMap::new();
    let mut common = BTreeSet::from(["Apache-2.0"]);
    keep(&mut texts, own, "weft", &mut common);
    for part in parts {
        let name = format!("{}-{}", part.name, part.version);
        let mut holders = Vec::new();
        for file in part
            .folder
            .as_deref()
            .map(files)
            .transpose()?
            .unwrap_or_default()
        {
            let text = String::from_utf8_lossy(&fs::read(&file)?).into_owned();
            for notice in notices(&text) {
                if !holders.contains(&notice) {
                    holders.push(notice);
                }
            }
            keep(&mut texts, &text, &name, &mut common);
        }
        if holders.is_empty() {
            holders.clone_from(&part.authors);
        }
        if holders.is_empty() {
            holders.push(format!("the authors of {}", part.name));
        }
        let _ = write!(out, "\nFiles: {name}/*\n");
        field(&mut out, "Copyright", &holders);
        let _ = writeln!(out, "License: {}", debian(&part.license));
        if part.license.contains("CC0-1.0") {
            common.insert("CC0-1.0");
        }
    }
    for (name, title) in COMMON.iter().filter(|(name, _)| common.contains(name)) {
        let _ = write!(
            out,
            "\nLicense: {name}\n {title}. On Debian systems its full text is in\n /usr/share/common-licenses/{name}\n"
        );
    }
    // the most used text of a licence has its plain name
    let mut texts: Vec<Text> = texts.into_values().collect();
    texts.sort_by(|a, b| {
        (&a.name, b.crates.len(), &a.crates).cmp(&(&b.name, a.crates.len(), &b.crates))
    });
    let mut last = String::new();
    for text in &texts {
        let _ = match &*text.name {
            name if name == last => write!(out, "\nLicense: {name}, as in {}\n", text.crates[0]),
            name => write!(out, "\nLicense: {name}\n"),
        };
        last.clone_from(&text.name);
        for line in text.body.lines() {
            let _ = match line.trim_end() {
                "" => writeln!(out, " ."),
                line => writeln!(out, " {line}"),
            };
        }
    }
    Ok(out)
}

/// A field with several lines.
fn field(out: &mut String, name: &str, lines: &[String]) {
    let _ = writeln!(
        out,
        "{name}: {}",
        lines.join(&format!("\n{:1$}", "", name.len() + 2))
    );
}

/// The files of a crate that are about rights.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_ascii_uppercase();
        let about = [
            "LICENSE",
            "LICENCE",
            "COPYING",
            "COPYRIGHT",
            "NOTICE",
            "UNLICENSE",
        ];
        let code = [".RS", ".TOML", ".HTML"]
            .iter()
            .any(|end| name.ends_with(end));
        if entry.file_type()?.is_file() && !code && about.iter().any(|word| name.starts_with(word))
        {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// The copyright lines of a text, without the word itself and without the templates in the Apache licence.
fn notices(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if !is_notice(line) {
            continue;
        }
        let mut rest = line[COPYRIGHT.len()..].trim_start();
        for mark in ["(c)", "(C)", "©"] {
            rest = rest.trim_start_matches(mark).trim_start();
        }
        let rest = rest.replace('\t', " ");
        if !rest.is_empty() && !found.contains(&rest) {
            found.push(rest);
        }
    }
    found
}

const COPYRIGHT: &str = "Copyright";

fn is_notice(line: &str) -> bool {
    let Some(rest) = line.strip_prefix(COPYRIGHT) else {
        return false;
    };
    let model = ["[yyyy]", "{yyyy}", "<year>", "[year]"];
    let dated =
        rest.contains(|c: char| c.is_ascii_digit()) || rest.contains("(c)") || rest.contains("(C)");
    let by = rest.trim_start().starts_with("The ") || rest.trim_start().starts_with("by ");
    (dated || by) && !model.iter().any(|mark| rest.contains(mark))
}

/// Keeps a text unless every Debian system has it or another crate has the same one.
fn keep(
    texts: &mut BTreeMap<String, Text>,
    text: &str,
    of: &str,
    common: &mut BTreeSet<&'static str>,
) {
    let body = without_apache(text);
    if body.len() < text.len() {
        common.insert("Apache-2.0");
    }
    let lines: Vec<&str> = body
        .lines()
        .filter(|line| !is_notice(line.trim()))
        .collect();
    let body = lines.join("\n");
    // copies of one text differ in spaces, in quotes and in the name of the holder in disclaimers
    let same: String = body
        .chars()
        .filter(|c| c.is_alphanumeric())
        .flat_map(char::to_lowercase)
        .collect();
    let phrase = |phrase: &str| {
        body.split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .contains(phrase)
    };
    let known = PHRASES.iter().find(|(words, _)| phrase(words));
    match known {
        Some((_, name)) if COMMON.iter().any(|(common, _)| common == name) => return,
        // a pointer to other files, not a text
        None if same.len() < 400 => return,
        _ => {}
    }
    let name = known.map_or("other", |(_, name)| name).to_owned();
    let entry = texts.entry(same).or_insert_with(|| Text {
        name,
        body: body.trim_matches('\n').to_owned(),
        crates: Vec::new(),
    });
    if !entry.crates.iter().any(|name| name == of) {
        entry.crates.push(of.to_owned());
    }
}

/// Leaves the Apache licence out of a text.
fn without_apache(text: &str) -> String {
    const BEGIN: &str = "Version 2.0, January 2004";
    const ENDS: [&str; 2] = [
        "limitations under the License.",
        "END OF TERMS AND CONDITIONS",
    ];
    let (Some(version), Some(_)) = (text.find(BEGIN), text.find("TERMS AND CONDITIONS FOR USE"))
    else {
        return text.to_owned();
    };
    // from the title in the line before
    let begin = text[..version].rfind("Apache License").unwrap_or(version);
    let begin = text[..begin].rfind('\n').map_or(0, |at| at + 1);
    let end = ENDS
        .iter()
        .filter_map(|end| text.rfind(end).map(|at| at + end.len()))
        .filter(|end| *end > version)
        .max()
        .unwrap_or(text.len());
    format!("{}{}", &text[..begin], &text[end..])
}

/// An SPDX expression as DEP-5 writes it.
fn debian(license: &str) -> String {
    license
        .replace('/', " or ")
        .replace(" OR ", " or ")
        .replace(" AND ", " and ")
        .replace(" WITH LLVM-exception", " with LLVM exception")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIT: &str = "MIT License\n\nCopyright (c) 2020 Somebody\n\nPermission is hereby granted, free of charge, to any person\n\
                       The above copyright notice and this permission notice shall be included\nWITHOUT WARRANTY\n";
    const APACHE: &str = "                              Apache License\n                        Version 2.0, January 2004\n\
                          TERMS AND CONDITIONS FOR USE, REPRODUCTION\n   Copyright [yyyy] [name of copyright owner]\n\
                          limitations under the License.\n";

    fn part(name: &str, folder: &Path) -> Part {
        Part {
            name: name.into(),
            version: "1.0.0".into(),
            license: "MIT OR Apache-2.0".into(),
            authors: vec!["An Author <a@example.org>".into()],
            folder: Some(folder.to_owned()),
            checksum: None,
            own: false,
        }
    }

    #[test]
    fn each_crate_has_its_notices_and_each_text_stands_once() {
        let dir = tempfile::tempdir().unwrap();
        let texts = [
            ("a", MIT.to_owned()),
            ("b", MIT.replace("2020 Somebody", "2021 Another")),
        ];
        for (name, text) in texts {
            let folder = dir.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("LICENSE-MIT"), text).unwrap();
            fs::write(folder.join("LICENSE-APACHE"), APACHE).unwrap();
            fs::write(folder.join("license.rs"), "Copyright 1999 not a text").unwrap();
        }
        fs::create_dir(dir.path().join("c")).unwrap();
        let all = ["a", "b", "c"].map(|name| part(name, &dir.path().join(name)));
        let text = copyright(MIT, &all.iter().collect::<Vec<_>>()).unwrap();
        assert!(
            text.contains(
                "Files: a-1.0.0/*\nCopyright: 2020 Somebody\nLicense: MIT or Apache-2.0\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("Files: b-1.0.0/*\nCopyright: 2021 Another\n"),
            "{text}"
        );
        assert!(
            text.contains("Files: c-1.0.0/*\nCopyright: An Author <a@example.org>\n"),
            "{text}"
        );
        assert_eq!(
            text.matches("Permission is hereby granted").count(),
            1,
            "{text}"
        );
        assert!(
            text.contains("/usr/share/common-licenses/Apache-2.0"),
            "{text}"
        );
        assert!(
            !text.contains("TERMS AND CONDITIONS FOR USE") && !text.contains("1999"),
            "{text}"
        );
    }

    #[test]
    fn a_file_of_several_licences_keeps_all_but_apaches() {
        let body = without_apache(&format!("first\n{APACHE}\nlast\n"));
        assert_eq!(body, "first\n\n\nlast\n");
        assert_eq!(without_apache(MIT), MIT);
    }

    #[test]
    fn notices_are_lines_that_name_somebody() {
        let found = notices(
            "Copyright (c) 2019 A\nCopyright 2020, B\nCopyright © C 2021\ncopyright holders of\nCopyright [yyyy] X\n",
        );
        assert_eq!(found, ["2019 A", "2020, B", "C 2021"]);
        assert_eq!(
            notices("Copyright The Rust Project\n"),
            ["The Rust Project"]
        );
    }
}
