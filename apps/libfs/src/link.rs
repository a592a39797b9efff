//! Ways to reach a server: by its local server on this host, or by RDMA.

use std::os::fd::OwnedFd;

use libc::c_int;

use weft_fs::name::{Endpoint, Name, RemotePath};
use weft_fs::wire::{Attr, Op, Reply, Request, number_name};
use weft_fs::{Errno, Error, local_server};

use crate::table::table;

/// Asks the server of this host and user, if it is that.
pub(crate) fn here(
    path: &RemotePath,
    request: &Request,
) -> Result<Option<(Reply, Option<OwnedFd>)>, Error> {
    // The meaning of names does not depend on the local server: it is not asked for a name of another host.
    if weft_sys::settings::LOCAL.is("off") == Ok(true) {
        return Ok(None);
    }
    for addr in path.endpoint.resolve().map_err(Error::Resolve)? {
        if let Some((reply, file)) = local_server::ask(addr, request)? {
            return match reply.error {
                Some(errno) => Err(errno.into()),
                None => Ok(Some((reply, file))),
            };
        }
    }
    Ok(None)
}

/// The folder that the servers are in, `/rdma`: programs look for it, open it and move into it on their way to one of them.
pub(crate) fn servers() -> RemotePath {
    let (host, port) = (String::new(), 0);
    RemotePath {
        endpoint: Endpoint { host, port },
        name: Name::default(),
        size: 0,
    }
}

/// Whether it is [`servers`].
pub(crate) fn is_servers(path: &RemotePath) -> bool {
    path.endpoint.host.is_empty()
}

/// The path of the folder of all servers.
const SERVERS: &[u8] = b"/rdma";

/// The path as programs have it.
pub(crate) fn text(path: &RemotePath) -> Vec<u8> {
    if is_servers(path) {
        SERVERS.into()
    } else {
        path.to_bytes()
    }
}

/// The reverse of [`text`].
pub(crate) fn of_text(text: &[u8]) -> Option<RemotePath> {
    if text == SERVERS {
        Some(servers())
    } else {
        RemotePath::parse(text).ok()
    }
}

/// Returns the server's attributes of a path.
pub(crate) fn attr(path: &RemotePath) -> Result<Attr, Error> {
    if is_servers(path) {
        return Ok(Attr {
            dir: true,
            ino: 1,
            mode: 0o755,
            rights: 4,
            ..Attr::default()
        });
    }
    match here(path, &Request::named(Op::Stat, &path.name))? {
        Some((reply, _)) => Ok(reply.attr),
        None => table().client(&path.endpoint)?.stat(&path.name),
    }
}

pub(crate) fn change(path: &RemotePath, op: Op) -> Result<(), Error> {
    if path.name.is_root() {
        // The folder of all servers, or that of one.
        return Err(match op {
            Op::Mkdir => Errno::EXIST,
            Op::Rmdir => Errno::BUSY,
            _ => Errno::ISDIR,
        }
        .into());
    }
    if here(path, &Request::named(op, &path.name))?.is_some() {
        return Ok(());
    }
    let client = table().client(&path.endpoint)?;
    match op {
        Op::Unlink => client.unlink(&path.name),
        Op::Mkdir => client.mkdir(&path.name),
        Op::Rmdir => client.rmdir(&path.name),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Changes the rights of the buffer of a descriptor of this host, under whatever name that is now.
pub(crate) fn chmod_local(fd: c_int, mode: u32) -> Result<(), Error> {
    let (path, ino) = table().local(fd).ok_or(Errno::BADF)?;
    let request = Request {
        size: mode.into(),
        other: number_name(ino),
        ..Request::new(Op::Chmod)
    };
    here(&path, &request)?.ok_or(Errno::STALE)?;
    table().note_mode(&path.endpoint, ino, mode as u16);
    Ok(())
}

/// Changes the rights of a buffer.
pub(crate) fn chmod(path: &RemotePath, mode: u32) -> Result<(), Error> {
    if path.name.is_root() {
        return Ok(());
    }
    let request = Request {
        size: (mode & 0o777).into(),
        ..Request::named(Op::Chmod, &path.name)
    };
    if here(path, &request)?.is_none() {
        return table()
            .client(&path.endpoint)?
            .chmod(&path.name, mode & 0o777);
    }
    let attr = attr(path)?;
    table().note_mode(&path.endpoint, attr.ino, attr.mode);
    Ok(())
}

pub(crate) fn rename(from: &RemotePath, to: &RemotePath) -> Result<(), Error> {
    if is_servers(from) || is_servers(to) {
        return Err(Errno::BUSY.into());
    }
    if from.endpoint != to.endpoint {
        return Err(Errno::XDEV.into());
    }
    let request = Request {
        other: to.name.clone(),
        ..Request::named(Op::Rename, &from.name)
    };
    if here(from, &request)?.is_none() {
        table()
            .client(&from.endpoint)?
            .rename(&from.name, &to.name)?;
    }
    table().renamed(from, &to.name);
    Ok(())
}
