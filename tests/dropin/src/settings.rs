//! Checks that the table of settings in docs/verbs.md names the options of `weft verbs`, with their values, and the variables that the libraries read.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The text of the Rust files of a folder.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of the tree") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|end| end == "rs") {
            text.push_str(&fs::read_to_string(path).expect("a source"));
        }
    }
}

/// The words in `text` between these quotes that consist of such letters.
fn between(text: &str, quote: char, is: impl Fn(&str) -> bool) -> BTreeSet<&str> {
    let words = text.lines().flat_map(|line| line.split(quote).skip(1));
    words.filter(|word| is(word)).collect()
}

fn variable(word: &str) -> bool {
    let letters = |c: char| c.is_ascii_uppercase() || c == '_';
    word.starts_with("WEFT_") && word.chars().all(letters)
}

/// The options of `weft verbs` that its help shows, each with its values, if they are listed.
fn options(source: &str) -> Vec<(String, Vec<&str>)> {
    let (_, fields) = source.split_once("pub struct Args {").expect("the options");
    let (fields, _) = fields.split_once("\n}\n").expect("their end");
    let attributes = fields.split("#[arg(").skip(1);
    let shown = attributes.filter(|arg| arg.starts_with("long") && !arg.contains("hide = true"));
    shown
        .filter_map(|arg| {
            let (attribute, field) = arg.split_once(")]")?;
            let field = field.trim_start().trim_start_matches("pub ");
            let (name, _) = field.split_once(':')?;
            let values = attribute.split_once("value_parser = [");
            let values = values.and_then(|(_, rest)| rest.split_once(']'));
            let values = values.map_or(Vec::new(), |(list, _)| list.split(", ").collect());
            let values = values.into_iter().map(|value| value.trim_matches('"'));
            Some((format!("--{}", name.replace('_', "-")), values.collect()))
        })
        .collect()
}

#[test]
fn the_page_has_the_settings_that_there_are() {
    let page = fs::read_to_string(tree().join("docs/verbs.md")).expect("the page");
    let (_, table) = page.split_once("\n## Settings\n").expect("the settings");
    let (table, _) = table.split_once("\n## ").expect("their end");
    let verbs = fs::read_to_string(tree().join("weft/src/cmd/verbs.rs"));
    let verbs = verbs.expect("the command");

    let options = options(&verbs);
    assert!(options.len() > 4, "{options:?}");
    for (option, values) in &options {
        let row = table.lines().find(|line| {
            line.contains(&format!("`{option} "))
                || line.contains(&format!("`weft verbs {option}`"))
        });
        let row = row.unwrap_or_else(|| panic!("{option} is not on the page"));
        for value in values {
            assert!(row.contains(value), "{option} takes {value:?}: {row}");
        }
    }
    for named in between(table, '`', |word| word.starts_with("--")) {
        let name = named.split(' ').next().unwrap_or_default();
        assert!(
            options.iter().any(|(option, _)| option == name),
            "no option {name}"
        );
    }

    let (mut libraries, mut all) = (verbs, String::new());
    sources(&tree().join("doors/abi/src/verbs"), &mut libraries);
    sources(&tree().join("doors/libsysfs/src"), &mut libraries);
    for folder in ["core", "doors", "servers", "apps", "weft"] {
        sources(&tree().join(folder), &mut all);
    }
    let named = between(table, '`', variable);
    for read in between(&libraries, '"', variable) {
        assert!(named.contains(read), "{read} is not on the page");
    }
    let read = between(&all, '"', variable);
    for named in named {
        assert!(read.contains(named), "nothing reads {named}");
    }
}
