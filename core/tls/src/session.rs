//! One end of a TLS connection, without I/O.

use std::ops::Deref;
use std::sync::Arc;

use aws_lc_rs::digest;
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::ServerName;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{
    AlertDescription, CertificateError, CipherSuite, ClientConfig, CommonState,
    ConnectionTrafficSecrets, Error, InvalidMessage, ServerConfig,
};

use crate::record::{Content, Key, record_len};
use crate::{PublicKey, TlsError};

/// An end in its handshake, which rustls makes.
enum End {
    Initiator(Box<UnbufferedClientConnection>),
    Responder(Box<UnbufferedServerConnection>),
}

impl End {
    fn state(&self) -> &CommonState {
        match self {
            End::Initiator(end) => end,
            End::Responder(end) => end,
        }
    }
}

/// The source of the keys after the first ones.
enum Later {
    Initiator(Box<KernelConnection<ClientConnectionData>>),
    Responder(Box<KernelConnection<ServerConnectionData>>),
}

impl Later {
    fn tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Later::Initiator(end) => end.update_tx_secret(),
            Later::Responder(end) => end.update_tx_secret(),
        }
    }

    fn rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Later::Initiator(end) => end.update_rx_secret(),
            Later::Responder(end) => end.update_rx_secret(),
        }
    }
}

/// An end after its handshake.
struct Open {
    tx: Key,
    rx: Key,
    later: Later,
    info: TlsInfo,
    /// The peer asks for a change of our key, which it did not see yet.
    update_wanted: bool,
}

enum State {
    Handshake(End),
    Open(Box<Open>),
    Failed(TlsError),
}

/// The properties of an established TLS connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsInfo {
    /// The cipher, for example `AES-128-GCM`.
    pub cipher: &'static str,
    /// The key that the peer has proved to have.
    pub peer: PublicKey,
    /// A digest of both ends' keys, the same at both. An attacker between the two cannot have one connection with each of them and the same
    /// digest on both. A secret that is mixed with it is a proof for this connection only.
    pub binding: [u8; 32],
}

/// One end of a TLS connection, see the [crate's documentation](crate).
pub struct Session {
    state: State,
    own: PublicKey,
    /// The peer has announced that it sends no more.
    peer_closed: bool,
    /// We have announced that we send no more.
    closed: bool,
}

/// The result of a step of the handshake.
enum Step {
    /// More bytes are needed, or there is nothing to do.
    Rest,
    Closed,
}

/// Key update (RFC 8446 4.6.3): type, length, whether the peer is to change its key too.
const KEY_UPDATE: [u8; 4] = [24, 0, 0, 1];
const CLOSE_NOTIFY: u8 = 0;

impl Session {
    pub(crate) fn initiator(config: Arc<ClientConfig>, own: PublicKey) -> Result<Self, TlsError> {
        let nobody = ServerName::try_from("weft").map_err(|e| TlsError::Protocol(e.to_string()))?;
        let end = UnbufferedClientConnection::new(config, nobody).map_err(refine)?;
        Ok(Self::new(End::Initiator(Box::new(end)), own))
    }

    pub(crate) fn responder(config: Arc<ServerConfig>, own: PublicKey) -> Result<Self, TlsError> {
        let end = UnbufferedServerConnection::new(config).map_err(refine)?;
        Ok(Self::new(End::Responder(Box::new(end)), own))
    }

    fn new(end: End, own: PublicKey) -> Self {
        Session {
            state: State::Handshake(end),
            own,
            peer_closed: false,
            closed: false,
        }
    }

    /// The peer's key and the cipher; `None` before the end of the handshake.
    pub fn info(&self) -> Option<&TlsInfo> {
        match &self.state {
            State::Open(open) => Some(&open.info),
            State::Handshake(_) | State::Failed(_) => None,
        }
    }

    /// The peer has closed its direction in order.
    pub fn peer_closed(&self) -> bool {
        self.peer_closed
    }

    /// Works on the records at the start of `incoming`, which may be empty, and changes them. Plaintext is given to `plain`, record by
    /// record, until that returns `false`; bytes for the peer are appended to `out`. Returns how many bytes of `incoming` are used
    /// up. The rest has to come again, as it is and with more behind it, in the next call.
    ///
    /// # Errors
    /// [`TlsError`]; the connection is unusable then, and `out` has an alert for the peer.
    pub fn receive(
        &mut self,
        incoming: &mut [u8],
        plain: &mut dyn FnMut(&[u8]) -> bool,
        out: &mut Vec<u8>,
    ) -> Result<usize, TlsError> {
        self.try_receive(incoming, plain, out)
            .inspect_err(|error| self.state = State::Failed(error.clone()))
    }

    fn try_receive(
        &mut self,
        incoming: &mut [u8],
        plain: &mut dyn FnMut(&[u8]) -> bool,
        out: &mut Vec<u8>,
    ) -> Result<usize, TlsError> {
        let mut used = 0;
        let mut wanted = true;
        match &mut self.state {
            State::Failed(error) => return Err(error.clone()),
            State::Open(_) => {}
            State::Handshake(end) => {
                let mut early = |bytes: &[u8]| wanted = plain(bytes);
                let (n, step) = match end {
                    End::Initiator(end) => drive(&mut **end, incoming, &mut early, out),
                    End::Responder(end) => drive(&mut **end, incoming, &mut early, out),
                };
                used = n;
                self.peer_closed |= matches!(step.map_err(refine)?, Step::Closed);
                if end.state().is_handshaking() {
                    return Ok(used);
                }
                self.open()?;
            }
        }
        let State::Open(open) = &mut self.state else {
            return Ok(used);
        };
        while wanted && !self.peer_closed {
            let opened = match open.rx.open(&mut incoming[used..]) {
                Ok(Some(opened)) => opened,
                Ok(None) => break,
                Err(error) => {
                    let bad_record_mac = 20;
                    let _ = open.alert(2, bad_record_mac, out);
                    return Err(error);
                }
            };
            used += opened.len;
            match opened.content {
                Content::Data => wanted = plain(opened.plain),
                Content::Alert => self.peer_closed |= closes(opened.plain)?,
                Content::Handshake => open.key_update(opened.plain)?,
            }
        }
        Ok(used)
    }

    /// The handshake is over: takes rustls' keys.
    fn open(&mut self) -> Result<(), TlsError> {
        let between = State::Failed(TlsError::Protocol("the handshake did not end".into()));
        let State::Handshake(end) = std::mem::replace(&mut self.state, between) else {
            return Ok(());
        };
        let info = learn(&end, &self.own)?;
        let (secrets, later) = match end {
            End::Initiator(end) => {
                let (secrets, later) = end.dangerous_into_kernel_connection().map_err(refine)?;
                (secrets, Later::Initiator(Box::new(later)))
            }
            End::Responder(end) => {
                let (secrets, later) = end.dangerous_into_kernel_connection().map_err(refine)?;
                (secrets, Later::Responder(Box::new(later)))
            }
        };
        self.state = State::Open(Box::new(Open {
            tx: Key::new(secrets.tx.0, &secrets.tx.1)?,
            rx: Key::new(secrets.rx.0, &secrets.rx.1)?,
            later,
            info,
            update_wanted: false,
        }));
        Ok(())
    }

    /// Whether the bytes contain a whole record, so that [`Session::receive`] would process it. Only after the handshake.
    pub fn has_record(bytes: &[u8]) -> bool {
        match record_len(bytes) {
            Ok(Some(len)) => bytes.len() >= len,
            Ok(None) => false,
            Err(_) => true,
        }
    }

    /// Appends a record of data to `out`: `fill` appends the plaintext, at most [`RECORD_PLAIN`](crate::RECORD_PLAIN) bytes. Returns how many
    /// bytes of plaintext these were.
    ///
    /// # Errors
    /// [`TlsError`] before the end of the handshake, after [`Session::close`], and on a connection that has failed.
    pub fn seal(
        &mut self,
        out: &mut Vec<u8>,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<usize, TlsError> {
        let open = match &mut self.state {
            State::Open(open) if !self.closed => open,
            State::Failed(error) => return Err(error.clone()),
            _ => return Err(TlsError::Protocol("nothing can be sent now".into())),
        };
        if open.update_wanted || open.tx.worn_out() {
            open.renew(out)?;
        }
        open.tx.seal(Content::Data, out, fill)
    }

    /// Announces that we send no more: appends `close_notify` to `out`, if that is still possible.
    pub fn close(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.closed, true)
            && let State::Open(open) = &mut self.state
        {
            let _ = open.alert(1, CLOSE_NOTIFY, out);
        }
    }
}

impl Open {
    fn alert(&mut self, level: u8, description: u8, out: &mut Vec<u8>) -> Result<usize, TlsError> {
        let bytes = [level, description];
        self.tx
            .seal(Content::Alert, out, |plain| plain.extend_from_slice(&bytes))
    }

    /// Changes our key, and announces that to the peer under the old one.
    fn renew(&mut self, out: &mut Vec<u8>) -> Result<(), TlsError> {
        let [a, b, c, d] = KEY_UPDATE;
        let bytes = [a, b, c, d, 0];
        self.tx.seal(Content::Handshake, out, |plain| {
            plain.extend_from_slice(&bytes);
        })?;
        let (records, secrets) = self.later.tx().map_err(refine)?;
        self.tx = Key::new(records, &secrets)?;
        self.update_wanted = false;
        Ok(())
    }

    /// The peer has changed its key. It is the one message of a handshake that we expect now: we ask for nothing else.
    fn key_update(&mut self, message: &[u8]) -> Result<(), TlsError> {
        let (KEY_UPDATE, [wanted @ (0 | 1)]) = message
            .split_first_chunk::<4>()
            .map(|(first, rest)| (*first, rest))
            .unwrap_or_default()
        else {
            return Err(TlsError::Protocol("an unexpected handshake message".into()));
        };
        let (records, secrets) = self.later.rx().map_err(refine)?;
        self.rx = Key::new(records, &secrets)?;
        // However often it asks: one change answers all that came before it.
        self.update_wanted |= *wanted == 1;
        Ok(())
    }
}

/// Whether an alert is the peer's orderly end.
fn closes(alert: &[u8]) -> Result<bool, TlsError> {
    match alert {
        [_, CLOSE_NOTIFY] => Ok(true),
        [_, description] => Err(refine(Error::AlertReceived(AlertDescription::from(
            *description,
        )))),
        _ => Err(TlsError::Protocol("an alert of the wrong length".into())),
    }
}

/// The identity of the peer.
fn learn(end: &End, own: &PublicKey) -> Result<TlsInfo, TlsError> {
    let state = end.state();
    let key = state.peer_certificates().and_then(<[_]>::first);
    let peer = PublicKey::from_der(key.map_or(&[], |key| key.as_ref()))?;
    let suite = state.negotiated_cipher_suite();
    let cipher = match suite.map(|s| s.suite()) {
        Some(CipherSuite::TLS13_AES_128_GCM_SHA256) => "AES-128-GCM",
        Some(CipherSuite::TLS13_AES_256_GCM_SHA384) => "AES-256-GCM",
        Some(CipherSuite::TLS13_CHACHA20_POLY1305_SHA256) => "ChaCha20-Poly1305",
        _ => return Err(TlsError::Protocol("an unknown cipher".into())),
    };
    let (initiator, responder) = match end {
        End::Initiator(_) => (own, &peer),
        End::Responder(_) => (&peer, own),
    };
    let mut context = digest::Context::new(&digest::SHA256);
    context.update(b"weft TLS binding, version 1\0");
    context.update(initiator.as_der());
    context.update(responder.as_der());
    let mut binding = [0; 32];
    binding.copy_from_slice(context.finish().as_ref());
    Ok(TlsInfo {
        cipher,
        peer,
        binding,
    })
}

/// The calls that rustls' two kinds of ends have in common.
trait Process {
    type Data;
    fn process<'c, 'i>(&'c mut self, bytes: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Process for UnbufferedClientConnection {
    type Data = ClientConnectionData;
    fn process<'c, 'i>(&'c mut self, bytes: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(bytes)
    }
}

impl Process for UnbufferedServerConnection {
    type Data = ServerConnectionData;
    fn process<'c, 'i>(&'c mut self, bytes: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(bytes)
    }
}

/// Continues the handshake until there is nothing more to do. Returns the number of processed bytes, also with an error.
fn drive<T: Process + Deref<Target: Deref<Target = CommonState>>>(
    end: &mut T,
    incoming: &mut [u8],
    plain: &mut dyn FnMut(&[u8]),
    out: &mut Vec<u8>,
) -> (usize, Result<Step, Error>) {
    let mut used = 0;
    loop {
        let UnbufferedStatus { discard, state, .. } = end.process(&mut incoming[used..]);
        let mut more = 0;
        let step = match state {
            // The peer has sent data right behind its handshake.
            Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                while let Some(Ok(record)) = traffic.next_record() {
                    plain(record.payload);
                    more += record.discard;
                }
                None
            }
            Ok(ConnectionState::EncodeTlsData(mut data)) => {
                encode(&mut data, out);
                None
            }
            Ok(ConnectionState::TransmitTlsData(data)) => {
                data.done();
                None
            }
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Some(Ok(Step::Closed)),
            // Nothing else is left to do. (Early data is off.)
            Ok(_) => Some(Ok(Step::Rest)),
            Err(error) => Some(Err(error)),
        };
        used += discard + more;
        match step {
            None => {}
            Some(Ok(step)) => return (used, Ok(step)),
            Some(Err(error)) => {
                // The messages for the peer. rustls returns them before it processes any bytes.
                while end.wants_write() {
                    let UnbufferedStatus { state, .. } = end.process(&mut incoming[used..]);
                    let Ok(ConnectionState::EncodeTlsData(mut data)) = state else {
                        break;
                    };
                    encode(&mut data, out);
                }
                return (used, Err(error));
            }
        }
    }
}

fn encode<Data>(data: &mut EncodeTlsData<'_, Data>, out: &mut Vec<u8>) {
    let start = out.len();
    let Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) =
        data.encode(&mut [])
    else {
        return;
    };
    out.resize(start + required_size, 0);
    let written = data.encode(&mut out[start..]).unwrap_or(0);
    out.truncate(start + written);
}

/// Says in our words what rustls found.
#[allow(clippy::needless_pass_by_value)] // so that `map_err` takes it
fn refine(error: Error) -> TlsError {
    match &error {
        Error::InvalidCertificate(CertificateError::Other(other)) => {
            if let Some(ours) = other.0.downcast_ref::<TlsError>() {
                return ours.clone();
            }
        }
        Error::AlertReceived(
            AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA,
        ) => return TlsError::KeyRefusedByPeer,
        Error::InvalidMessage(
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion,
        ) => return TlsError::NotTls,
        _ => {}
    }
    TlsError::Protocol(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Identity, Tls};

    fn carry(from: &mut Vec<u8>, to: &mut Session, out: &mut Vec<u8>) -> Vec<u8> {
        let mut got = Vec::new();
        let used = to
            .receive(
                from,
                &mut |plain| {
                    got.extend_from_slice(plain);
                    true
                },
                out,
            )
            .unwrap();
        from.drain(..used);
        got
    }

    /// A key that has sealed many records is changed, and so is one for which the peer requests it; data continues.
    #[test]
    fn keys_are_changed() {
        let tls = Tls::new(Identity::generate().unwrap()).unwrap();
        let (mut a, mut b) = (tls.initiator().unwrap(), tls.responder().unwrap());
        let (mut to_a, mut to_b) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            carry(&mut to_a, &mut a, &mut to_b);
            carry(&mut to_b, &mut b, &mut to_a);
        }
        for round in 0..3 {
            let (State::Open(one), State::Open(other)) = (&mut a.state, &mut b.state) else {
                panic!("not open")
            };
            one.tx.wear_out();
            other.rx.wear_out();
            a.seal(&mut to_b, |plain| plain.push(round)).unwrap();
            assert_eq!(carry(&mut to_b, &mut b, &mut to_a), [round]);
            a.seal(&mut to_b, |plain| plain.push(round)).unwrap();
            assert_eq!(carry(&mut to_b, &mut b, &mut to_a), [round]);

            // `update_requested`
            let State::Open(open) = &mut a.state else {
                panic!("not open")
            };
            let mut message = KEY_UPDATE.to_vec();
            message.push(1);
            open.tx
                .seal(Content::Handshake, &mut to_b, |plain| {
                    plain.extend_from_slice(&message);
                })
                .unwrap();
            let (records, secrets) = open.later.tx().unwrap();
            open.tx = Key::new(records, &secrets).unwrap();
            assert!(carry(&mut to_b, &mut b, &mut to_a).is_empty());
            b.seal(&mut to_a, |plain| plain.push(9)).unwrap();
            assert_eq!(carry(&mut to_a, &mut a, &mut to_b), [9]);
        }
        // Nothing else of a handshake is taken, and nothing of unknown content.
        let State::Open(open) = &mut a.state else {
            panic!("not open")
        };
        open.tx
            .seal(Content::Handshake, &mut to_b, |plain| {
                plain.extend_from_slice(&[4, 0, 0, 0]);
            })
            .unwrap();
        assert!(b.receive(&mut to_b, &mut |_| true, &mut to_a).is_err());
        assert!(b.seal(&mut to_a, |_| ()).is_err());
    }
}
