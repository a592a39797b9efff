//! Decision pages have one form, and the index in docs/adr/README.md lists them all.

/// The sections that a page may have, in this order. The second one is mandatory.
const SECTIONS: [&str; 6] = [
    "Question",
    "Decision",
    "Measurements",
    "Cost",
    "Limits",
    "Alternatives",
];

/// The errors in the page `name` (`0001-title.md`) with the text `text`, against the text of the index.
pub(crate) fn check(name: &str, text: &str, index: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let number = name.get(..4).unwrap_or_default();
    if !text.starts_with(&format!("# {number}: ")) {
        problems.push(format!("the first line is not '# {number}: TITLE'"));
    }
    if !text.lines().any(|line| line.starts_with("Status: ")) {
        problems.push("no line begins with 'Status: '".into());
    }
    let sections: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("## ")).collect();
    let places: Option<Vec<usize>> = sections
        .iter()
        .map(|section| SECTIONS.iter().position(|known| known == section))
        .collect();
    if !places.is_some_and(|places| places.contains(&1) && places.is_sorted_by(|a, b| a < b)) {
        problems.push(format!(
            "the sections {sections:?} have to be of {SECTIONS:?}, in this order, with 'Decision'"
        ));
    }
    if !index.contains(&format!("({name})")) {
        problems.push("README.md does not list it".into());
    }
    let named = |problem| format!("docs/adr/{name}: {problem}");
    problems.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn the_form_of_a_page() {
        let index = "| [0001](0001-a.md) | why a |";
        let page = "# 0001: A\n\nStatus: accepted.\n\n## Question\n\n## Decision\n\n### Why\n\n## Alternatives\n";
        assert!(check("0001-a.md", page, index).is_empty());
        for (bad, said) in [
            (page.replace("0001:", "1."), "first line"),
            (page.replace("Status: ", ""), "Status"),
            (page.replace("## Question", "## The question"), "sections"),
            (page.replace("Decision", "Cost"), "sections"),
            (page.replace("Question", "Limits"), "sections"),
        ] {
            let problems = check("0001-a.md", &bad, index);
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(said), "{problems:?}");
        }
        let unlisted = check("0001-a.md", page, "");
        assert!(unlisted[0].contains("does not list"), "{unlisted:?}");
    }
}
