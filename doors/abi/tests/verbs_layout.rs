//! The headers of libibverbs and librdmacm and the Rust types agree, as a C and a C++ compiler see them: sizes, alignments, offsets, constants. Neither side
//! has a declaration that the other does not have.
#![cfg(feature = "verbs")]

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use weft_abi::verbs::cm::types as cm;
use weft_abi::verbs::types::{self as verbs, Enumeration, Layout};

const HEADERS: &str = "#include <infiniband/verbs.h>\n#include <infiniband/sa.h>\n#include <infiniband/tm_types.h>\n\
                       #include <rdma/rdma_cma.h>\n#include <rdma/rsocket.h>\n";
/// The headers whose declarations are compared.
const COMPARED: &[&str] = &[
    "infiniband/verbs.h",
    "infiniband/verbs_api.h",
    "infiniband/sa.h",
    "infiniband/tm_types.h",
    "rdma/rdma_cma.h",
    "rdma/rsocket.h",
];
/// Of this header, only the names for which `verbs_api.h` has one of verbs.
const KERNEL: &str = "infiniband/ib_user_ioctl_verbs.h";
/// Members without a name in C.
const NAMELESS: &[(&str, &str)] = &[
    ("ibv_send_wr", "op"),
    ("rdma_addr", "src"),
    ("rdma_addr", "dst"),
];
/// Fields that share their place with one of the same type; in Rust that one field represents both.
const SHARED: &[(&str, &str, &str)] = &[
    ("ibv_wc", "imm_data", "invalidated_rkey"),
    ("ibv_send_wr", "imm_data", "invalidate_rkey"),
    ("ibv_flow_action_esp_encap", "val_ptr", "val_ptr_data_u64"),
    ("ibv_flow_action_esp_encap", "next_ptr", "next_ptr_data_u64"),
];

fn layouts() -> impl Iterator<Item = &'static Layout> {
    verbs::LAYOUTS.iter().chain(cm::LAYOUTS)
}

fn enumerations() -> impl Iterator<Item = &'static Enumeration> {
    verbs::ENUMERATIONS.iter().chain(cm::ENUMERATIONS)
}

fn constants() -> impl Iterator<Item = &'static (&'static str, i128)> {
    let values = enumerations().flat_map(|e| e.values);
    values.chain(verbs::MACROS).chain(cm::MACROS)
}

// ---- the headers' declarations ----------------------------------------------------------------------------------

#[derive(Default)]
struct Declared {
    /// Structs and unions: `struct` or `union`, and the paths of their fields (`wr.rdma.rkey`).
    types: BTreeMap<String, (String, BTreeSet<String>)>,
    enums: BTreeSet<String>,
    /// Of enumerations, and macros.
    constants: BTreeSet<String>,
}

struct Tokens<'a>(std::iter::Peekable<std::vec::IntoIter<&'a str>>);

impl<'a> Tokens<'a> {
    fn new(text: &'a str) -> Self {
        let mut tokens = Vec::new();
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_alphanumeric() || c == '_';
            let len = if word(first) {
                rest.find(|c| !word(c)).unwrap_or(rest.len())
            } else {
                first.len_utf8()
            };
            tokens.push(&rest[..len]);
            rest = rest[len..].trim_start();
        }
        Self(tokens.into_iter().peekable())
    }

    fn next(&mut self) -> &'a str {
        self.0.next().expect("the header goes on")
    }

    fn next_if(&mut self, token: &str) -> bool {
        self.0.next_if_eq(&token).is_some()
    }

    /// All tokens up to one outside of brackets, which is consumed too.
    fn up_to(&mut self, ends: &[&str]) -> (Vec<&'a str>, &'a str) {
        let (mut tokens, mut depth) = (Vec::new(), 0);
        loop {
            let token = self.next();
            if depth == 0 && ends.contains(&token) {
                return (tokens, token);
            }
            match token {
                "(" | "{" | "[" => depth += 1,
                ")" | "}" | "]" => depth -= 1,
                _ => {}
            }
            tokens.push(token);
        }
    }

    /// The members of a struct or union after its `{`: the paths of the fields.
    fn members(&mut self) -> BTreeSet<String> {
        let mut paths = BTreeSet::new();
        while !self.next_if("}") {
            let mut declaration = Vec::new();
            if self.next_if("struct") || self.next_if("union") {
                if self.next_if("{") {
                    let inner = self.members();
                    let (name, _) = self.up_to(&[";"]);
                    if let [name] = name[..] {
                        paths.insert(name.to_owned());
                        paths.extend(inner.iter().map(|path| format!("{name}.{path}")));
                    } else {
                        assert!(name.is_empty(), "{name:?}");
                        paths.extend(inner);
                    }
                    continue;
                }
                declaration.push("struct");
            }
            declaration.extend(self.up_to(&[";"]).0);
            // `ret (*name)(...)`, `type name[n]`, `type name`
            let pointer = declaration.windows(2).position(|two| two == ["(", "*"]);
            let name = match pointer {
                Some(at) => declaration[at + 2],
                None => declaration
                    .split(|token| *token == "[")
                    .next()
                    .and_then(|before| before.last().copied())
                    .unwrap(),
            };
            paths.insert(name.to_owned());
        }
        paths
    }
}

impl Declared {
    fn read(text: &str) -> Self {
        let mut declared = Self::default();
        let mut tokens = Tokens::new(text);
        while let Some(token) = tokens.0.next() {
            if !matches!(token, "struct" | "union" | "enum") {
                // a function with a body has no `;` behind it
                if token == "{" {
                    tokens.up_to(&["}"]);
                }
                continue;
            }
            let named = tokens.0.next_if(|token| *token != "{");
            if !tokens.next_if("{") {
                continue; // a declaration, or the type of something else
            }
            if token != "enum" {
                let name = named.expect("no struct without a name").to_owned();
                let members = tokens.members();
                declared.types.insert(name, (token.to_owned(), members));
                continue;
            }
            declared.enums.extend(named.map(str::to_owned));
            loop {
                let (value, end) = tokens.up_to(&[",", "}"]);
                declared
                    .constants
                    .extend(value.first().map(|name| (*name).to_owned()));
                if end == "}" {
                    break;
                }
            }
        }
        declared
    }

    /// The kernel header's names, replaced by those of verbs.
    fn renamed(mut self, names: &BTreeMap<String, String>) -> Self {
        self.types = std::mem::take(&mut self.types)
            .into_iter()
            .filter_map(|(name, declared)| Some((names.get(&name)?.clone(), declared)))
            .collect();
        let rename =
            |set: BTreeSet<String>| set.iter().filter_map(|n| names.get(n)).cloned().collect();
        self.enums = rename(self.enums);
        self.constants = rename(self.constants);
        self
    }
}

/// The text of one header and no other, without comments and conditions.
fn preprocessed() -> impl Fn(&str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("headers.c");
    std::fs::write(&file, HEADERS).unwrap();
    let output = Command::new("cc").arg("-E").arg(&file).output().unwrap();
    assert!(
        output.status.success(),
        "libibverbs-dev and librdmacm-dev are needed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    move |header| {
        let mut inside = false;
        let mut found = String::new();
        for line in text.lines() {
            if line.starts_with("# ") {
                inside = line
                    .split('"')
                    .nth(1)
                    .unwrap()
                    .ends_with(&format!("/{header}"));
            } else if inside {
                found.push_str(line);
                found.push('\n');
            }
        }
        assert!(
            !found.trim().is_empty() || header.ends_with("_api.h"),
            "{header} is empty"
        );
        found
    }
}

/// `#define NAME VALUE` of the compared headers, on one line each.
fn macros() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for header in COMPARED {
        let text = std::fs::read_to_string(format!("/usr/include/{header}")).unwrap();
        for line in text.lines().filter_map(|line| line.strip_prefix("#define")) {
            let line = line.split("/*").next().unwrap().trim();
            if let Some((name, value)) = line.split_once(char::is_whitespace)
                && !name.contains('(')
            {
                found.push((name.to_owned(), value.trim().to_owned()));
            }
        }
    }
    found
}

fn declared() -> Declared {
    let text_of = preprocessed();
    let macros = macros();
    let names = macros
        .iter()
        .map(|(name, value)| (value.clone(), name.clone()));
    let names: BTreeMap<_, _> = names
        .filter(|(value, _)| value.to_lowercase().starts_with("ib_uverbs"))
        .collect();
    let mut all = Declared::read(&text_of(KERNEL)).renamed(&names);
    for header in COMPARED {
        let one = Declared::read(&text_of(header));
        all.types.extend(one.types);
        all.enums.extend(one.enums);
        all.constants.extend(one.constants);
    }
    let values = macros.into_iter().map(|(name, _)| name);
    let values = values.filter(|name| !all.types.contains_key(name) && !all.enums.contains(name));
    all.constants.extend(values);
    all
}

// ---- the declarations in Rust -----------------------------------------------------------------------------------

/// The fields of a type and of its nameless members, by their paths in C: (offset, size).
fn fields(layout: &Layout, declared: &Declared) -> BTreeMap<String, (usize, usize)> {
    let mut found = BTreeMap::new();
    for field in layout.fields {
        let name = field.name.trim_start_matches("r#");
        let nameless = NAMELESS.contains(&(layout.name, name));
        if !nameless {
            found.insert(name.to_owned(), (field.offset, field.size));
        }
        for (_, _, other) in SHARED.iter().filter(|s| (s.0, s.1) == (layout.name, name)) {
            found.insert((*other).to_owned(), (field.offset, field.size));
        }
        let of = layouts().find(|inner| inner.name == field.of);
        if let Some(inner) = of.filter(|inner| !declared.types.contains_key(inner.name)) {
            for (path, (offset, size)) in fields(inner, declared) {
                let path = if nameless {
                    path
                } else {
                    format!("{name}.{path}")
                };
                found.insert(path, (field.offset + offset, size));
            }
        }
    }
    found
}

fn figures(declared: &Declared) -> Vec<common::Figure> {
    let mut figures = Vec::new();
    let mut push =
        |name: String, expression: String, value: i128| figures.push((name, expression, value));
    for layout in layouts() {
        let Some((kind, _)) = declared.types.get(layout.name) else {
            continue; // a part of a type
        };
        let c = format!("{kind} {}", layout.name);
        push(c.clone(), format!("sizeof({c})"), layout.size as i128);
        push(
            format!("align of {c}"),
            format!("ALIGNOF({c})"),
            layout.align as i128,
        );
        for (path, (offset, size)) in fields(layout, declared) {
            push(
                format!("{c}.{path}"),
                format!("offsetof({c}, {path})"),
                offset as i128,
            );
            push(
                format!("size of {c}.{path}"),
                format!("sizeof((({c} *)0)->{path})"),
                size as i128,
            );
        }
    }
    for enumeration in enumerations() {
        if let Some(name) = enumeration.name {
            push(
                format!("enum {name}"),
                format!("sizeof(enum {name})"),
                enumeration.size as i128,
            );
        }
    }
    for (name, value) in constants() {
        // as C shows them: `long long`
        push(
            (*name).to_owned(),
            (*name).to_owned(),
            i128::from(*value as i64),
        );
    }
    figures
}

#[test]
fn c_and_cplusplus_see_what_rust_sees() {
    let figures = figures(&declared());
    let expected = common::expected(&figures);
    assert!(expected.len() > 2000, "{}", expected.len());
    assert_eq!(expected.len(), figures.len());
    for (compiler, extension) in [(["cc", "-std=gnu11"], "c"), (["c++", "-std=gnu++11"], "cc")] {
        let seen = common::seen_by(&compiler, extension, HEADERS, &figures);
        for (name, value) in &expected {
            assert_eq!(seen.get(name), Some(value), "{compiler:?} on {name}");
        }
    }
}

#[test]
fn neither_side_has_a_type_or_field_that_the_other_has_not() {
    let declared = declared();
    let mut parts: BTreeSet<&str> = BTreeSet::new();
    for layout in layouts() {
        let Some((_, members)) = declared.types.get(layout.name) else {
            parts.insert(layout.name);
            continue;
        };
        let ours: BTreeSet<String> = fields(layout, &declared).into_keys().collect();
        assert_eq!(&ours, members, "{}", layout.name);
    }
    let ours: BTreeSet<&str> = layouts().map(|layout| layout.name).collect();
    for name in declared.types.keys() {
        assert!(ours.contains(name.as_str()), "Rust lacks {name}");
    }
    let used: BTreeSet<&str> = layouts()
        .flat_map(|l| l.fields)
        .map(|field| field.of)
        .collect();
    for part in parts {
        assert!(
            used.contains(part),
            "{part} is in no header, and no part of a type that is"
        );
    }
}

#[test]
fn neither_side_has_a_constant_that_the_other_has_not() {
    let declared = declared();
    let ours: BTreeSet<String> = constants().map(|(name, _)| (*name).to_owned()).collect();
    let difference: Vec<_> = declared.constants.symmetric_difference(&ours).collect();
    assert!(difference.is_empty(), "on one side only: {difference:?}");
    let ours: BTreeSet<String> = enumerations()
        .filter_map(|e| e.name)
        .map(str::to_owned)
        .collect();
    assert_eq!(declared.enums, ours);
}
