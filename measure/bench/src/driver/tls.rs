//! rustls over a TCP socket: the same operations as plain TCP's, with rustls' own records.

use super::{Initiator, Responder, Spec, tcp};
use crate::error::{BenchError, Result, stack};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::net::{SocketAddr, TcpListener};
use weft_verbs::tls::Tls;

pub(super) fn connect(tls: &Tls, spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let mut stream = tcp::open(addr)?;
    // A raw public key has no name.
    let nobody = ServerName::try_from("weft").map_err(stack("name the server"))?;
    let mut connection =
        ClientConnection::new(tls.rustls().0, nobody).map_err(stack("start TLS"))?;
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).map_err(handshake)?;
    }
    tcp::set_mode(&stream, spec)?;
    Ok(Box::new(tcp::End::new(
        StreamOwned::new(connection, stream),
        spec,
    )?))
}

pub(super) fn accept(tls: &Tls, listener: &TcpListener, spec: &Spec) -> Result<Box<dyn Responder>> {
    let mut stream = tcp::take(listener)?;
    let mut connection = ServerConnection::new(tls.rustls().1).map_err(stack("start TLS"))?;
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).map_err(handshake)?;
    }
    tcp::set_mode(&stream, spec)?;
    Ok(Box::new(tcp::End::new(
        StreamOwned::new(connection, stream),
        spec,
    )?))
}

fn handshake(error: std::io::Error) -> BenchError {
    BenchError::system("make a TLS handshake")(error)
}
