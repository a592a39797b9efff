//! `weft key`: key pairs and the keys of peers, as files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{Output, weft};

fn key(config: &Path, args: &[&str]) -> Output {
    Output::of(weft().env("XDG_CONFIG_HOME", config).arg("key").args(args))
}

#[test]
fn a_key_pair_is_made_shown_and_not_lost() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config");
    let out = key(&config, &["--show"]);
    assert_eq!(out.code, 1);
    assert!(out.stderr.contains("`weft key` makes one"), "{out:?}");

    let made = key(&config, &[]);
    made.ok();
    let lines: Vec<_> = made.stdout.lines().collect();
    assert!(lines[0].starts_with("weft-ed25519 "), "{made:?}");
    assert!(
        lines[1].starts_with("SHA256:") && lines[1].len() == 50,
        "{made:?}"
    );
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&config.join("weft/key")), 0o600);
    assert_eq!(mode(&config.join("weft")), 0o700);
    assert_eq!(key(&config, &["--show"]).stdout, made.stdout);

    // Again: the one that is there.
    let again = key(&config, &[]);
    again.ok();
    assert_eq!((&again.stdout, &*again.stderr), (&made.stdout, ""));
    let forced = key(&config, &["--force"]);
    forced.ok();
    assert_ne!(forced.stdout, made.stdout);
    let elsewhere = dir.path().join("mine");
    key(&config, &["--file", elsewhere.to_str().unwrap()]).ok();
    assert_eq!(mode(&elsewhere), 0o600);

    fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o640)).unwrap();
    let out = key(&config, &["--show", "--file", elsewhere.to_str().unwrap()]);
    assert_eq!(out.code, 2);
    assert!(out.stderr.contains("chmod 600"), "{out:?}");
    // OpenSSL writes and reads the same file, where it is there to ask.
    let openssl = std::process::Command::new("openssl")
        .args(["pkey", "-noout", "-text", "-in"])
        .arg(config.join("weft/key"))
        .output();
    match openssl {
        Ok(out) => assert!(
            String::from_utf8_lossy(&out.stdout).contains("ED25519"),
            "{out:?}"
        ),
        Err(e) => println!("skipped: no openssl: {e}"),
    }
}

#[test]
fn a_peer_is_forgotten_by_host_and_by_port() {
    let config = tempfile::tempdir().unwrap();
    let made = key(config.path(), &[]).stdout;
    let public = made.lines().next().unwrap();
    let known = config.path().join("weft/known_peers");
    let out = key(config.path(), &["forget", "host"]);
    assert_eq!(out.code, 1, "{out:?}");
    let all = format!("host:1 {public}\nhost:2 {public}\n[::1]:1 {public}\nother:1 {public}\n");
    fs::write(&known, all).unwrap();
    fs::set_permissions(&known, fs::Permissions::from_mode(0o644)).unwrap();
    let left = || {
        let text = fs::read_to_string(&known).unwrap();
        let names = text.lines().map(|line| line.split(' ').next().unwrap());
        names.collect::<Vec<_>>().join(" ")
    };
    key(config.path(), &["forget", "host:2"]).ok();
    assert_eq!(left(), "host:1 [::1]:1 other:1");
    key(config.path(), &["forget", "::1"]).ok();
    assert_eq!(left(), "host:1 other:1");
    key(config.path(), &["forget", "HOST"]).ok();
    assert_eq!(left(), "other:1");
}
