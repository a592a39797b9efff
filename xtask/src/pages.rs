//! Pages of Markdown name files that exist: relative links, and the files that the maps of ARCHITECTURE.md name.

use std::path::Path;
use std::process::Command;

/// The errors of all pages below `root`.
pub(crate) fn check(root: &Path) -> Result<Vec<String>, String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("git ls-files: {e}"))?;
    let listed = String::from_utf8_lossy(&output.stdout);
    let files: Vec<&str> = listed.lines().collect();
    let mut problems = Vec::new();
    for page in files.iter().filter(|file| ends_as(file, "md")) {
        // One that was removed and is not committed yet.
        let Ok(text) = std::fs::read_to_string(root.join(page)) else {
            continue;
        };
        let folder = Path::new(page).parent().unwrap_or(Path::new(""));
        for target in links(&text) {
            if !root.join(folder).join(target).exists() {
                problems.push(format!("{page}: the link to {target} leads nowhere"));
            }
        }
        if *page == "ARCHITECTURE.md" {
            problems.extend(unknown(&text, &files));
        }
    }
    Ok(problems)
}

fn ends_as(file: &str, extension: &str) -> bool {
    Path::new(file)
        .extension()
        .is_some_and(|found| found == extension)
}

/// The files to which the links of a page lead, without anchors; not what stands in blocks of code.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        if in_code {
            continue;
        }
        for piece in line.split("](").skip(1) {
            let target = piece.split([')', ' ', '#']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains(':') {
                found.push(target);
            }
        }
    }
    found
}

/// The names of sources in tables that no file's path ends with.
fn unknown(text: &str, files: &[&str]) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let rows = text.lines().filter(|line| line.starts_with('|'));
    let names = rows
        .flat_map(|row| row.split(|c| !is_part(c)))
        .filter(|name| ends_as(name, "rs"));
    let known = |name: &str| {
        files.iter().any(|file| {
            file.strip_suffix(name)
                .is_some_and(|above| above.is_empty() || above.ends_with('/'))
        })
    };
    names
        .filter(|name| !known(name))
        .map(|name| format!("ARCHITECTURE.md: there is no file {name}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_names_of_files() {
        let text =
            "[a](b.md#c) and [d](../e.md), [f](https://example.org)\n```\n[g](h.md)\n```\n[i](#j)";
        assert_eq!(links(text), ["b.md", "../e.md"]);
        let files = ["core/rnic/src/qp/end.rs"];
        let map = "| ends | rnic/src/qp/end.rs, end.rs, qp/close.rs |\nclose.rs";
        let problems = unknown(map, &files);
        assert_eq!(problems, ["ARCHITECTURE.md: there is no file qp/close.rs"]);
    }
}
