//! The body of the fuzz target in `fuzz/`, and the replay of its corpus by plain `cargo test`.

use std::sync::OnceLock;

use crate::{Identity, RECORD_PLAIN, Session, Tls};

/// Steps of one input.
const STEPS: usize = 64;

fn tls() -> &'static Tls {
    static TLS: OnceLock<Tls> = OnceLock::new();
    TLS.get_or_init(|| Tls::new(Identity::generate().expect("a key")).expect("settings"))
}

/// One end, its unprocessed bytes, and the bytes that it has received.
struct Side {
    session: Session,
    held: Vec<u8>,
    out: Vec<u8>,
    got: Vec<u8>,
    failed: bool,
}

impl Side {
    fn new(session: Session) -> Self {
        Side {
            session,
            held: Vec::new(),
            out: Vec::new(),
            got: Vec::new(),
            failed: false,
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        if self.failed {
            return;
        }
        let got = &mut self.got;
        let mut take = |plain: &[u8]| {
            got.extend_from_slice(plain);
            true
        };
        match self
            .session
            .receive(&mut self.held, &mut take, &mut self.out)
        {
            Ok(used) => drop(self.held.drain(..used)),
            Err(_) => self.failed = true,
        }
    }
}

/// Bytes of an attacker instead of a start-up, or damage between two honest ends: nothing panics, the received bytes are a prefix of the sent
/// ones, and a failed end stays failed.
pub fn tls_session(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else {
        return;
    };
    let (mut a, mut b) = (
        Side::new(tls().initiator().expect("a session")),
        Side::new(tls().responder().expect("a session")),
    );
    if kind & 1 == 0 {
        // Raw bytes, in two pieces.
        let (first, second) = data.split_at(data.len() / 2);
        for side in [&mut a, &mut b] {
            side.take(&[]);
            side.take(first);
            side.take(second);
            assert!(side.got.is_empty() && side.session.info().is_none());
        }
        return;
    }
    let mut sent = Vec::new();
    a.take(&[]);
    for step in data.chunks(3).take(STEPS) {
        let [what, at, by] = [0, 1, 2].map(|i| step.get(i).copied().unwrap_or(0));
        match what % 8 {
            0 => a.session.close(&mut a.out),
            1 if a.session.info().is_some() => {
                let len = usize::from(at) * usize::from(by) % (RECORD_PLAIN + 1);
                let plain = vec![by; len];
                let sealed = a
                    .session
                    .seal(&mut a.out, |out| out.extend_from_slice(&plain));
                if sealed.is_ok() {
                    sent.extend_from_slice(&plain);
                }
            }
            2 => {
                if let Some(byte) = a.out.get_mut(usize::from(at)) {
                    *byte ^= by;
                }
            }
            3 => {
                a.out.drain(..usize::from(at).min(a.out.len()));
            }
            4 => a.out.extend_from_slice(&[at; 24][..usize::from(by % 24)]),
            5 => {
                let n = usize::from(at).min(a.out.len());
                let bytes: Vec<u8> = a.out.drain(..n).collect();
                b.take(&bytes);
            }
            _ => {
                let bytes = std::mem::take(&mut a.out);
                b.take(&bytes);
                let bytes = std::mem::take(&mut b.out);
                a.take(&bytes);
            }
        }
        assert!(sent.starts_with(&b.got), "bytes that nobody sent");
        assert!(a.got.is_empty());
        assert!(!(b.failed && b.session.info().is_some()));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn tls_session() {
        let dir =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tls_session");
        let mut seeds = 0;
        for entry in std::fs::read_dir(dir).expect("a corpus") {
            let path = entry.expect("a directory entry").path();
            // Shown by the test harness if the body panics.
            println!("{}", path.display());
            super::tls_session(&std::fs::read(&path).expect("a readable seed"));
            seeds += 1;
        }
        assert_ne!(seeds, 0, "no seeds");
    }
}
