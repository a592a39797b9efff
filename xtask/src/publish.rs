//! The crates that are ready for a registry: those without `publish = false`.

use serde_json::Value;

/// The names of the crates, each after its dependencies. Missing fields that a registry or its readers need are
/// errors.
pub(crate) fn order(metadata: &Value) -> Result<Vec<String>, Vec<String>> {
    let packages: Vec<&Value> = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|package| package["publish"].is_null())
        .collect();
    let names: Vec<&str> = packages.iter().map(|package| name(package)).collect();
    let mut problems = Vec::new();
    for package in &packages {
        problems.extend(lacks(package).map(|what| format!("{}: {what}", name(package))));
        for dependency in own(package) {
            if !names.contains(&name(dependency)) {
                problems.push(format!(
                    "{} needs {}, which is not published",
                    name(package),
                    name(dependency)
                ));
            }
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let mut order: Vec<String> = Vec::new();
    while order.len() < packages.len() {
        let before = order.len();
        for package in &packages {
            let ready = own(package).all(|d| order.iter().any(|done| done == name(d)));
            if ready && !order.iter().any(|done| done == name(package)) {
                order.push(name(package).to_owned());
            }
        }
        if order.len() == before {
            return Err(vec!["the crates need each other in a circle".into()]);
        }
    }
    Ok(order)
}

fn name(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}

/// Its dependencies in this tree, including build and development dependencies.
fn own(package: &Value) -> impl Iterator<Item = &Value> {
    let all = package["dependencies"].as_array();
    all.into_iter().flatten().filter(|d| !d["path"].is_null())
}

fn lacks(package: &Value) -> impl Iterator<Item = String> {
    let text = ["description", "license", "repository", "readme"];
    let lists = ["keywords", "categories"];
    let texts = text
        .iter()
        .filter(|field| package[**field].as_str().is_none_or(str::is_empty))
        .map(|field| format!("has no {field}"));
    let lists = lists.iter().filter_map(|field| {
        // a registry accepts at most five of each
        let count = package[*field].as_array().map_or(0, Vec::len);
        (count == 0 || count > 5).then(|| format!("has {count} {field}"))
    });
    let version = package["version"].as_str().unwrap_or_default();
    let versions = own(package).filter_map(move |dependency| {
        let wanted = dependency["req"].as_str().unwrap_or_default();
        (wanted != format!("^{version}")).then(|| {
            format!(
                "asks for {} of version {wanted}, and this tree has {version}",
                name(dependency)
            )
        })
    });
    let found: Vec<String> = texts.chain(lists).chain(versions).collect();
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, needs: &[(&str, &str)]) -> Value {
        let dependencies: Vec<Value> = needs
            .iter()
            .map(|(name, req)| json!({ "name": name, "req": req, "path": "/x" }))
            .collect();
        json!({
            "name": name, "version": "1.0.0", "description": "d", "license": "MIT", "repository": "r", "readme": "README.md",
            "keywords": ["k"], "categories": ["c"], "publish": null, "dependencies": dependencies,
        })
    }

    #[test]
    fn what_others_need_comes_first() {
        let tree = json!({ "packages": [package("b", &[("a", "^1.0.0")]), package("a", &[])] });
        assert_eq!(order(&tree).unwrap(), ["a", "b"]);
    }

    #[test]
    fn what_a_registry_would_miss_is_told() {
        let mut bare = package("a", &[("b", "^0.9.0"), ("private", "^1.0.0")]);
        bare["description"] = Value::Null;
        bare["keywords"] = json!([]);
        let mut private = package("private", &[]);
        private["publish"] = json!([]);
        let tree = json!({ "packages": [bare, package("b", &[]), private] });
        let problems = order(&tree).unwrap_err().join("\n");
        for expected in [
            "a: has no description",
            "a: has 0 keywords",
            "b of version ^0.9.0",
            "needs private, which is not published",
        ] {
            assert!(problems.contains(expected), "{expected}: {problems}");
        }
    }

    #[test]
    fn this_trees_crates_are_ready() {
        let root = crate::library::root().unwrap();
        let order = order(&crate::metadata(&root.join("Cargo.toml")).unwrap()).unwrap();
        for door in ["weft-verbs", "weft-iw", "weft-exs"] {
            assert!(order.iter().any(|name| name == door), "{door}: {order:?}");
        }
        for name in &order {
            let folder = ["core", "doors", "servers"]
                .map(|wing| root.join(wing).join(name.trim_start_matches("weft-")))
                .into_iter()
                .find(|folder| folder.exists())
                .unwrap_or_else(|| panic!("the folder of {name}"));
            for file in ["LICENSE-MIT", "LICENSE-APACHE"] {
                assert!(folder.join(file).exists(), "{}", folder.display());
            }
        }
    }
}
