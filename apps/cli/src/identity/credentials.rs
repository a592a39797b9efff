//! A client's key pair, and the connection with a question about the listener's key.

use std::path::Path;

use weft_verbs::tls::{Fingerprint, Identity, PublicKey, Tls};

use super::known::Known;
use super::trust::{Trust, Verdict};
use super::{Folder, keypair};
use crate::failure::Failure;

/// What a client shows to one listener, and which keys of the listener it accepts.
#[derive(Debug, Clone)]
pub struct Credentials {
    listener: String,
    identity: Identity,
    /// Whether the key pair is the user's, and not made for this connection.
    lasting: bool,
    /// `None`: any listener, which proves itself by other means.
    trust: Option<Trust>,
}

impl Credentials {
    /// The user's key pair (in the file `identity`, if it is named), or one for this connection. `listener`: an endpoint as text. With fingerprints in `peers`, no
    /// other key is accepted.
    pub fn new(
        listener: String,
        identity: Option<&Path>,
        peers: Vec<Fingerprint>,
    ) -> Result<Self, Failure> {
        let own = keypair::own(identity)?;
        let known = Folder::of_user().map(|folder| Known::at(&folder.known_peers()));
        Ok(Self {
            lasting: own.is_some(),
            identity: own.map_or_else(keypair::generate, Ok)?,
            trust: Some(Trust::new(listener.clone(), known.ok(), peers)),
            listener,
        })
    }

    /// For a connection on which both sides prove a shared key: a key pair for this connection, and any listener.
    pub fn shared(listener: String) -> Result<Self, Failure> {
        Ok(Self {
            lasting: false,
            identity: keypair::generate()?,
            trust: None,
            listener,
        })
    }

    /// The same client's, for another listener.
    #[must_use]
    pub fn to(&self, listener: String) -> Self {
        Self {
            trust: self.trust.as_ref().map(|trust| trust.of(listener.clone())),
            listener,
            ..self.clone()
        }
    }

    /// What TLS does with them.
    pub fn tls(&self) -> Result<Tls, Failure> {
        let own = self.lasting.then_some(&self.identity);
        let good = self
            .trust
            .as_ref()
            .map(|trust| trust.good(own))
            .transpose()?;
        Tls::new(self.identity.clone())
            .and_then(|tls| match good {
                Some(good) => tls.allow(move |key| good.contains(&key.fingerprint())),
                None => Ok(tls),
            })
            .map_err(|e| keypair::unusable(&e))
    }

    /// Connects, once it is clear that it is the listener that is meant: its key is known, or our own, or the user says so. `connect` makes a connection with
    /// [`Credentials::tls`]; it returns the key that TLS refused, if that is why there is none (nothing was sent then).
    pub fn connect<T, E: From<Failure>>(
        &self,
        mut connect: impl FnMut() -> Result<Result<T, PublicKey>, E>,
    ) -> Result<T, E> {
        // The second time the key is known.
        for _ in 0..2 {
            let key = match connect()? {
                Ok(connected) => return Ok(connected),
                Err(key) => key,
            };
            let Some(trust) = &self.trust else { continue };
            match trust.judge(&key)? {
                Verdict::Known => {}
                Verdict::Unknown => trust.ask(&key)?,
                Verdict::Wrong(failure) => return Err(failure.into()),
            }
        }
        let failure = format!(
            "what listens on {} shows another key each time",
            self.listener
        );
        Err(Failure::refused(failure)
            .hint("ask on that machine for `weft key --show`, and compare")
            .into())
    }

    /// A failure because the listener does not know our key, with what to do.
    pub fn unknown_there(&self, failure: Failure) -> Failure {
        if self.lasting {
            failure.hint(format!(
                "add this line to ~/.config/weft/authorized_keys there:\n  {}",
                keypair::line(&self.identity.public_key())
            ))
        } else {
            failure.hint(
                "make a key pair here with `weft key`, and add the line that it prints to ~/.config/weft/authorized_keys there",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_has_two_rounds() {
        let keys = [(), ()].map(|()| keypair::generate().unwrap().public_key());
        let listener = "host:1".to_owned();
        let credentials = Credentials {
            trust: Some(Trust::new(
                listener.clone(),
                None,
                vec![keys[0].fingerprint()],
            )),
            listener,
            identity: keypair::generate().unwrap(),
            lasting: false,
        };
        let refused = |shown: &[&PublicKey]| {
            let mut shown = shown.iter();
            let connected = credentials.connect::<_, Failure>(|| {
                Ok(shown.next().map_or(Ok(()), |key| Err((*key).clone())))
            });
            connected.err().map(|failure| failure.to_string())
        };
        assert_eq!(refused(&[]), None);
        assert_eq!(refused(&[&keys[0]]), None);
        let why = refused(&[&keys[1]]).unwrap();
        assert!(why.contains("not the one given with --peer"), "{why}");
        let why = refused(&[&keys[0], &keys[0]]).unwrap();
        assert!(why.contains("another key each time"), "{why}");
    }
}
