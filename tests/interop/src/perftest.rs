//! A peer for the bandwidth programs of perftest, as their server: `ib_send_bw -R`, `ib_write_bw -R`, `ib_read_bw -R`.
//!
//! With `-R` a program makes two connections to the same port. On the first both sides exchange what they need to know,
//! message for message: the client sends, the server answers with a message of the same length. All of it is
//! symmetric (versions, page and cache line sizes, MTU, counts, reports), so an echo is a good answer; only in the
//! address messages (56 bytes, big-endian: LID, outstanding reads, QPN, PSN, rkey as 4 bytes each, padding, address in
//! 8, GID, SRQN, GID index) the rkey and the address have to be our own. On the second connection is the test itself.
//!
//! The credits that a sender on iWARP wants, the count of its messages that were received, are written into the memory
//! that the client names in its address message.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use weft_verbs::cm::{ConnParam, Listener};
use weft_verbs::{
    Access, ConnCounters, Cq, Device, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, SendWr, Wc, WcStatus,
};

use crate::rping::Error;

/// Length of an address message.
const ADDRESS_LEN: usize = 56;
/// The longest message of the exchange, with room to spare.
const EXCHANGE_MAX: usize = 256;
/// Receives posted for the test's own messages.
const RECVS: u32 = 1024;
/// How long a program may be silent.
const PATIENCE: Duration = Duration::from_mins(1);

/// What a client did.
#[derive(Debug)]
pub struct Served {
    /// Messages of the exchange.
    pub exchanged: u32,
    /// Messages that the test sent.
    pub messages: u32,
    pub bytes: u64,
    /// What went over the test's connection, Reads and Writes too.
    pub counters: ConnCounters,
    /// The memory that the client could read and write, as it left it.
    pub memory: Vec<u8>,
}

struct Side {
    cq: Cq,
    qp: Qp,
    inbox: Mr,
}

impl Side {
    /// Accept the next connection, with `count` receives of `len` bytes, all into the same memory.
    fn accept(
        pd: &Pd,
        listener: &Listener,
        param: &ConnParam,
        count: u32,
        len: usize,
    ) -> Result<Side, Error> {
        let cq = pd.device().create_cq(4 * RECVS, None)?;
        let qp = pd.create_qp(&QpInit {
            max_recv_wr: RECVS,
            max_send_wr: RECVS,
            ..QpInit::new(&cq, &cq)
        })?;
        let inbox = pd.alloc_mr(len, Access::LOCAL_WRITE)?;
        for id in 0..count {
            qp.post_recv(&[RecvWr::new(id.into()).sge(inbox.whole())])?;
        }
        let request = listener
            .next_request(Some(PATIENCE))
            .ok_or(Error::Silent(0))?;
        let qp = request.accept(qp, param)?.qp;
        Ok(Side { cq, qp, inbox })
    }

    /// The next message; its receive is posted again. `None` when the peer has disconnected.
    fn receive(&self, number: u32) -> Result<Option<Wc>, Error> {
        let mut wc = [Wc::default()];
        if self.cq.wait(&mut wc, Some(PATIENCE))? == 0 {
            return Err(Error::Silent(number));
        }
        match wc[0] {
            wc if wc.status == WcStatus::WrFlushErr && wc.vendor_err == 0 => Ok(None),
            wc if wc.status != WcStatus::Success => Err(Error::Completion(wc)),
            wc => Ok(Some(wc)),
        }
    }

    fn repost(&self, wc: &Wc) -> Result<(), Error> {
        let recv = RecvWr::new(wc.wr_id).sge(self.inbox.whole());
        Ok(self.qp.post_recv(&[recv])?)
    }
}

/// Serve one client whose messages have at most `size` bytes; `memory` is what it can read and write.
///
/// # Errors
/// [`Error`].
pub fn serve(
    device: &Device,
    listener: &Listener,
    param: &ConnParam,
    size: usize,
    memory: Vec<u8>,
) -> Result<Served, Error> {
    let pd = device.alloc_pd()?;
    let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let target = pd.reg_mr(memory, all)?;
    let credits = Mutex::new(None);
    let exchange = Side::accept(&pd, listener, param, 1, EXCHANGE_MAX)?;
    thread::scope(|scope| {
        let testing = scope.spawn(|| {
            let test = Side::accept(&pd, listener, param, RECVS, size)?;
            carry_test(&test, &credits)
        });
        let exchanged = answer(&exchange, &target, &credits);
        let tested = testing.join().unwrap_or(Err(Error::Silent(0)));
        let (messages, bytes, counters) = tested?;
        Ok(Served {
            exchanged: exchanged?,
            messages,
            bytes,
            counters,
            memory: target.to_vec(0, target.len())?,
        })
    })
}

type Credits = Mutex<Option<RemoteAddr>>;

fn answer(exchange: &Side, target: &Mr, credits: &Credits) -> Result<u32, Error> {
    let mut exchanged = 0;
    while let Some(wc) = exchange.receive(exchanged)? {
        exchanged += 1;
        let mut message = exchange.inbox.to_vec(0, wc.byte_len as usize)?;
        if message.len() == ADDRESS_LEN {
            let theirs = swap_address(&mut message, target.remote(0));
            *credits.lock().unwrap_or_else(PoisonError::into_inner) = Some(theirs);
        }
        exchange.repost(&wc)?;
        exchange
            .qp
            .post_send_one(SendWr::send(0).inline(&message))?;
    }
    Ok(exchanged)
}

fn carry_test(test: &Side, credits: &Credits) -> Result<(u32, u64, ConnCounters), Error> {
    let (mut messages, mut bytes) = (0u32, 0);
    while let Some(wc) = test.receive(messages)? {
        messages += 1;
        bytes += u64::from(wc.byte_len);
        test.repost(&wc)?;
        let place = *credits.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = place {
            // In the byte order of its machine: that of every machine that siw is on here.
            let count = messages.to_le_bytes();
            test.qp
                .post_send_one(SendWr::write(1, place).inline(&count))?;
        }
    }
    Ok((messages, bytes, test.qp.counters()))
}

/// Put our own memory into an address message; returns what it named.
fn swap_address(message: &mut [u8], ours: RemoteAddr) -> RemoteAddr {
    let number = |bytes: &[u8]| bytes.iter().fold(0u64, |n, &byte| n << 8 | u64::from(byte));
    let theirs = RemoteAddr {
        rkey: number(&message[16..20]) as u32,
        addr: number(&message[24..32]),
    };
    message[16..20].copy_from_slice(&ours.rkey.to_be_bytes());
    message[24..32].copy_from_slice(&ours.addr.to_be_bytes());
    theirs
}
