//! Whether a listener is the one that is meant: its key is one that the user names, or known, or the user says so.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use weft_verbs::tls::{Fingerprint, Identity, PublicKey};

use super::known::{Entry, Known};
use crate::failure::Failure;

/// Longest answer of a user, in bytes.
const LONGEST_ANSWER: u64 = 1024;
/// How often the user is asked.
const QUESTIONS: usize = 3;

/// What is known of one listener.
#[derive(Debug, Clone)]
pub struct Trust {
    name: String,
    known: Option<Known>,
    only: Vec<Fingerprint>,
}

/// What becomes of a key.
#[derive(Debug)]
pub enum Verdict {
    /// It is the listener's.
    Known,
    /// Nobody knows it yet.
    Unknown,
    /// It is not.
    Wrong(Failure),
}

impl Trust {
    /// In the listener of this name (an endpoint as text). With fingerprints in `only`, no other key will do, and what is known does not
    /// count. Without a file of known peers nothing is remembered.
    pub fn new(name: String, known: Option<Known>, only: Vec<Fingerprint>) -> Self {
        Self { name, known, only }
    }

    /// The same, of another listener.
    #[must_use]
    pub fn of(&self, name: String) -> Self {
        Self {
            name,
            ..self.clone()
        }
    }

    /// Whether the user has named the keys that will do.
    pub fn is_told(&self) -> bool {
        !self.only.is_empty()
    }

    /// The fingerprints of the keys that will do. `own`: our key pair, if it lasts: a listener of this user has the same key pair, and no other user has
    /// it. It does not count where the user has named the keys.
    pub fn good(&self, own: Option<&Identity>) -> Result<Vec<Fingerprint>, Failure> {
        if self.is_told() {
            return Ok(self.only.clone());
        }
        let known = self.known.as_ref().map(|known| known.keys(&self.name));
        let known = known.transpose()?.unwrap_or_default();
        let known = known.into_iter().map(|(_, key)| key);
        let own = own.map(Identity::public_key);
        Ok(known.chain(own).map(|key| key.fingerprint()).collect())
    }

    /// Whether this key will do.
    pub fn judge(&self, key: &PublicKey) -> Result<Verdict, Failure> {
        let (name, shown) = (&self.name, key.fingerprint());
        if self.is_told() {
            return Ok(if self.only.contains(&shown) {
                Verdict::Known
            } else {
                let failure = Failure::refused(format!(
                    "the key of {name} is {shown}, not the one given with --peer"
                ));
                Verdict::Wrong(
                    failure.hint("compare with what `weft key --show` prints on that machine"),
                )
            });
        }
        let Some(known) = &self.known else {
            return Ok(Verdict::Unknown);
        };
        Ok(match known.look_up(name, key)? {
            Entry::Same => Verdict::Known,
            Entry::Unknown => Verdict::Unknown,
            Entry::Other(line) => Verdict::Wrong(self.changed(known, key, line)),
        })
    }

    fn changed(&self, known: &Known, key: &PublicKey, line: usize) -> Failure {
        let name = &self.name;
        Failure::refused(format!(
            "THE KEY OF {name} HAS CHANGED. Somebody may be between you and {name}, or it has a new key.\n  \
             It shows {}; another one is known: {}, line {line}. Nothing was sent",
            key.fingerprint(),
            known.path().display()
        ))
        .hint(format!(
            "ask on that machine for `weft key --show`; if the new key is right, run `weft key forget {name}`, then this again"
        ))
    }

    /// Asks the user, on the terminal, whether this key is the listener's, and remembers it.
    pub fn ask(&self, key: &PublicKey) -> Result<(), Failure> {
        let terminal = Path::new("/dev/tty");
        let opened = File::open(terminal)
            .and_then(|from| Ok((from, OpenOptions::new().write(true).open(terminal)?)));
        let Ok((from, mut to)) = opened else {
            return Err(Failure::refused(format!(
                "the key of {} is not known yet, and there is no terminal to ask on; it is {}",
                self.name,
                key.fingerprint()
            ))
            .hint(format!(
                "if that is what the listener printed: --peer {}; if the listener was started with --key FILE, pass that key here too",
                key.fingerprint()
            )));
        };
        self.ask_on(key, BufReader::new(from), &mut to)
    }

    fn ask_on(
        &self,
        key: &PublicKey,
        mut from: impl BufRead,
        to: &mut dyn Write,
    ) -> Result<(), Failure> {
        let (name, fingerprint) = (&self.name, key.fingerprint());
        let no_terminal = |e: io::Error| {
            Failure::failed(format!("the terminal: {e}")).hint("use --peer FINGERPRINT")
        };
        let mut question = format!(
            "Nothing was ever sent to {name} from here, so its key is not known yet.\n\
             The key that it shows has the fingerprint {fingerprint}.\n\
             Compare that with what the listener printed. Is it the same (yes, no, or the fingerprint)? "
        );
        for _ in 0..QUESTIONS {
            write!(to, "{question}")
                .and_then(|()| to.flush())
                .map_err(no_terminal)?;
            let mut answer = String::new();
            let read = (&mut from)
                .take(LONGEST_ANSWER)
                .read_line(&mut answer)
                .map_err(no_terminal)?;
            let answer = answer.trim();
            if answer == "yes" || answer.parse() == Ok(fingerprint) {
                return self.remember(key);
            }
            if read == 0 || answer == "no" || answer.parse::<Fingerprint>().is_ok() {
                break;
            }
            question = "Write yes, no, or the fingerprint: ".into();
        }
        Err(Failure::refused(format!(
            "the key of {name} was not accepted; nothing was sent"
        ))
        .hint("ask on that machine for `weft key --show`, and compare"))
    }

    fn remember(&self, key: &PublicKey) -> Result<(), Failure> {
        let known = self.known.as_ref().ok_or_else(|| {
            Failure::failed("there is no home directory to remember keys in")
                .hint(format!("--peer {}", key.fingerprint()))
        })?;
        match known.add(&self.name, key)? {
            Entry::Unknown | Entry::Same => Ok(()),
            Entry::Other(line) => Err(self.changed(known, key, line)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::keypair;

    #[test]
    fn the_user_decides_about_a_key_once() {
        let dir = tempfile::tempdir().unwrap();
        let known = Known::at(&dir.path().join("known_peers"));
        let keys = [(), ()].map(|()| keypair::generate().unwrap().public_key());
        let trust = |only| Trust::new("host:7471".into(), Some(known.clone()), only);
        let anybody = trust(Vec::new());
        let ask = |answer: String| {
            let mut said = Vec::new();
            let outcome = anybody.ask_on(&keys[0], answer.as_bytes(), &mut said);
            (outcome, String::from_utf8(said).unwrap())
        };
        assert!(matches!(anybody.judge(&keys[0]), Ok(Verdict::Unknown)));
        let wrong = keys[1].fingerprint().to_string();
        for answer in ["", "no\n", &wrong, "y\n\nwhat?\nyes\n", &"yes".repeat(1000)] {
            let (outcome, said) = ask(answer.into());
            assert!(outcome.is_err(), "{answer}");
            assert!(said.contains(&keys[0].fingerprint().to_string()));
        }
        assert!(matches!(anybody.judge(&keys[0]), Ok(Verdict::Unknown)));
        ask("maybe\nyes\n".into()).0.unwrap();
        assert!(matches!(anybody.judge(&keys[0]), Ok(Verdict::Known)));
        assert_eq!(anybody.good(None).unwrap(), [keys[0].fingerprint()]);

        // Another key now is no reason to ask.
        let Ok(Verdict::Wrong(failure)) = anybody.judge(&keys[1]) else {
            panic!("it is another key");
        };
        let text = failure.to_string();
        for part in [
            "HAS CHANGED",
            "known_peers, line 1",
            "weft key forget host:7471",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(anybody.remember(&keys[1]).is_err());

        // What is told counts, not what is known.
        let told = trust(vec![keys[1].fingerprint()]);
        assert!(matches!(told.judge(&keys[1]), Ok(Verdict::Known)));
        assert!(matches!(told.judge(&keys[0]), Ok(Verdict::Wrong(_))));
        ask(format!("{}\n", keys[0].fingerprint())).0.unwrap();
    }
}
