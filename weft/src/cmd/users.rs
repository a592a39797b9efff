//! Users and groups by name, as the system's databases have them.

use std::process::Command;

use weft_cli::failure::Failure;
use weft_sys::unix::OVERFLOW_UID;

/// The numbers of users (`NAME`, a number, `@GROUP`) for the preload library, or `any`.
///
/// # Errors
/// A name that the system does not know.
pub(crate) fn numbers(names: &[String]) -> Result<String, Failure> {
    if names.iter().any(|name| name == "any") {
        return Ok("any".to_owned());
    }
    let mut numbers = Vec::new();
    for name in names {
        match name.strip_prefix('@') {
            Some(group) => numbers.extend(members(group)?),
            None => numbers.push(one(name)?),
        }
    }
    numbers.retain(|&number| number != OVERFLOW_UID);
    numbers.sort_unstable();
    numbers.dedup();
    let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
    Ok(numbers.join(","))
}

/// The lines of a database, as fields: all that it lists, or that of one key. The C library's own modules answer, so users of a directory service count.
fn lines(database: &str, key: Option<&str>) -> Result<Vec<Vec<String>>, Failure> {
    let found = Command::new("getent").arg(database).args(key).output();
    let found = found.map_err(|e| Failure::failed(format!("getent: {e}")))?;
    let text = String::from_utf8_lossy(&found.stdout);
    let fields = |line: &str| line.split(':').map(str::to_owned).collect();
    Ok(text.lines().map(fields).collect())
}

fn number(line: &[String], at: usize) -> Option<u32> {
    line.get(at)?.parse().ok()
}

/// A user that can be met.
fn one(name: &str) -> Result<u32, Failure> {
    match user(name)? {
        OVERFLOW_UID => Err(Failure::usage(format!(
            "{name}: the number {OVERFLOW_UID} stands for all users that a namespace does not know, and is not met"
        ))),
        number => Ok(number),
    }
}

fn user(name: &str) -> Result<u32, Failure> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let found = lines("passwd", Some(name))?;
    let number = found.first().and_then(|line| number(line, 2));
    number.ok_or_else(|| Failure::usage(format!("there is no user {name}")))
}

/// The numbers of a user, and of a group or else its first one. `None`: the system does not know them.
pub(crate) fn ids(name: &str, group: Option<&str>) -> Option<(u32, u32)> {
    // Fields 2 and 3 of a user's line are its numbers, and field 2 of a group's line is its number.
    let find = |database, name| lines(database, Some(name)).ok()?.into_iter().next();
    let user = find("passwd", name);
    let known = |at| user.as_ref().and_then(|line| number(line, at));
    let gid = match group {
        Some(group) => group
            .parse()
            .ok()
            .or_else(|| number(&find("group", group)?, 2)),
        None => known(3),
    };
    Some((known(2).or_else(|| name.parse().ok())?, gid?))
}

/// The users of a group: those that it lists, and those whose first group it is.
fn members(group: &str) -> Result<Vec<u32>, Failure> {
    let found = lines("group", Some(group))?;
    let unknown = || Failure::usage(format!("there is no group {group}"));
    let line = found.first().ok_or_else(unknown)?;
    let gid = number(line, 2).ok_or_else(unknown)?;
    let listed = line.get(3).into_iter().flat_map(|names| names.split(','));
    let mut users = Vec::new();
    for name in listed.filter(|name| !name.is_empty()) {
        users.push(user(name)?);
    }
    let all = lines("passwd", None)?;
    let first = all.iter().filter(|line| number(line, 3) == Some(gid));
    users.extend(first.filter_map(|line| number(line, 2)));
    if users.is_empty() {
        return Err(Failure::usage(format!("the group {group} has no users")));
    }
    Ok(users)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> Result<String, Failure> {
        let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
        numbers(&names)
    }

    #[test]
    fn names_numbers_and_groups_are_numbers() {
        assert_eq!(of(&["root", "12345", "0"]).unwrap(), "0,12345");
        assert_eq!(of(&["@root"]).unwrap().split(',').next(), Some("0"));
        assert_eq!(of(&["12345", "any"]).unwrap(), "any");
        for wrong in [
            "no-such-user-here",
            "@no-such-group-here",
            "@",
            "-1",
            "65534",
        ] {
            assert!(of(&[wrong]).is_err(), "{wrong}");
        }
    }
}
