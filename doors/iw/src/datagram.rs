//! The same library over datagrams: no connection, any number of peers, and RDMA Write-Record.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weft_verbs::{
    Cq, Device, Pd, QpState, RecvWr, SendWr, UdDest, UdInit, UdPort, UdQp, UdReliable, UdSource,
    ValidityMap, Wc, WcOpcode, WcStatus, WriteRecord,
};

use crate::{Access, CqType, Error, Flags, Lmr, Rmr};

/// The address of a datagram context, which peers need to send to it. A peer's number and key travel by other means, or with its first
/// message ([`DatagramContext::source`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramAddr {
    /// Address and UDP port.
    pub addr: SocketAddr,
    /// The queue pair behind that port.
    pub qp_num: u32,
    /// Its `Q_Key`.
    pub qkey: u32,
}

impl DatagramAddr {
    fn dest(&self) -> UdDest {
        UdDest {
            addr: self.addr,
            qp_num: self.qp_num,
            qkey: self.qkey,
            from: None,
            traffic_class: 0,
        }
    }
}

/// The parameters of a datagram context.
#[derive(Clone)]
pub struct DatagramOptions {
    /// The device; contexts of one program can share it.
    pub device: Device,
    /// The `Q_Key`, which peers need. Contexts that exchange messages mostly have the same one.
    pub qkey: u32,
    /// Sends and Write-Records that may be outstanding.
    pub max_send_wr: u32,
    /// Receives that may be outstanding.
    pub max_recv_wr: u32,
    /// Write-Records of peers that may wait to be looked at; 0: none are taken.
    pub max_records: u32,
    /// The longest segment in bytes; see [`UdInit::segment`].
    pub segment: u32,
    /// Time limit of a message without a new segment; see [`UdInit::message_timeout`].
    pub message_timeout: Duration,
    /// The reliable mode, which both ends need; see [`UdInit::reliable`].
    pub reliable: Option<UdReliable>,
}

impl DatagramOptions {
    /// A device of its own, 128 sends, 128 receives, 128 records; for the rest as [`UdInit::new`].
    ///
    /// # Errors
    /// [`Error::Verbs`] when no device can be opened.
    pub fn new(qkey: u32) -> Result<Self, Error> {
        Ok(Self {
            device: Device::open()?,
            qkey,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_records: 128,
            segment: weft_verbs::UD_MAX_SEGMENT,
            message_timeout: Duration::from_millis(100),
            reliable: None,
        })
    }
}

/// A datagram queue pair and everything that belongs to it. Messages may be lost, doubled and overtaken, but in the reliable mode
/// ([`DatagramOptions::reliable`]); none is damaged, and no error of a peer ends the context.
///
/// ```
/// use weft_iw::{Access, CqType, DatagramContext, Flags, Rmr, Wc};
///
/// # fn main() -> Result<(), weft_iw::Error> {
/// let target = DatagramContext::open("127.0.0.1:0", 7)?;
/// let source = DatagramContext::open("127.0.0.1:0", 7)?;
///
/// // The target advertises a region by a message, which carries its address.
/// let inbox = source.lmr_create(16, Access::LOCAL_WRITE)?;
/// source.post_recv_lmr(&inbox, 0, 16)?;
/// let data = target.lmr_create(200_000, Access::REMOTE_WRITE)?;
/// target.post_send_adv(&data, &source.local(), Flags::empty())?;
/// let mut wc = [Wc::default()];
/// source.await_completions(CqType::Recv, &mut wc, None)?;
/// let peer = source.source(&wc[0]).expect("a receive has a source");
/// let mut adv = [0; 16];
/// inbox.read(0, &mut adv)?;
/// let rmr = Rmr::decode(adv);
///
/// // It writes; no receive is posted for that.
/// let src = source.lmr_register(vec![5; 150_000], Access::LOCAL_WRITE)?;
/// source.post_write_record_lmr(&src, 0, &rmr, 1000, 150_000, &peer, Flags::empty())?;
///
/// // The target gets a completion, and knows which bytes are valid.
/// target.await_completions(CqType::Recv, &mut wc, None)?;
/// let record = target.take_record(&wc[0]).expect("a Write-Record");
/// assert!(record.is_complete() && record.addr == 1000);
/// assert!(target.validity_map(&data).contains(&(1000..151_000)));
/// # Ok(())
/// # }
/// ```
pub struct DatagramContext {
    // Dropped first, because it uses the memory.
    qp: UdQp,
    port: UdPort,
    qkey: u32,
    send_cq: Cq,
    recv_cq: Cq,
    pd: Pd,
    next_id: AtomicU64,
}

impl DatagramContext {
    /// Takes a UDP port (0: one that the kernel picks), with default [`DatagramOptions`].
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::Verbs`] past a limit.
    pub fn open(addr: impl ToSocketAddrs + std::fmt::Debug, qkey: u32) -> Result<Self, Error> {
        Self::open_with(addr, &DatagramOptions::new(qkey)?)
    }

    /// Takes a UDP port, with these options.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(
        addr: impl ToSocketAddrs + std::fmt::Debug,
        options: &DatagramOptions,
    ) -> Result<Self, Error> {
        let unusable = |source| Error::Address {
            what: format!("{addr:?}"),
            source,
        };
        let mut found = addr.to_socket_addrs().map_err(unusable)?;
        let none = || unusable(std::io::ErrorKind::NotFound.into());
        let local = found.next().ok_or_else(none)?;
        let device = &options.device;
        let port = device.bind_ud(local).map_err(unusable)?;
        let pd = device.alloc_pd()?;
        let send_cq = device.create_cq(options.max_send_wr.max(1), None)?;
        // Room for what peers write, and one more.
        let depth = options.max_recv_wr.saturating_add(options.max_records) + 1;
        let recv_cq = device.create_cq(depth, None)?;
        let init = UdInit {
            max_send_wr: options.max_send_wr,
            max_recv_wr: options.max_recv_wr,
            record_depth: options.max_records,
            segment: options.segment,
            message_timeout: options.message_timeout,
            reliable: options.reliable,
            ..UdInit::new(&port, options.qkey, &send_cq, &recv_cq)
        };
        Ok(Self {
            qp: pd.create_ud_qp(&init)?,
            port,
            qkey: options.qkey,
            send_cq,
            recv_cq,
            pd,
            next_id: AtomicU64::new(0),
        })
    }

    /// The address for peers. It is the one that was given to `open`: with `0.0.0.0` peers need one of the host's addresses.
    pub fn local(&self) -> DatagramAddr {
        DatagramAddr {
            addr: self.port.local_addr(),
            qp_num: self.qp.num(),
            qkey: self.qkey,
        }
    }

    /// The source of a message, to answer it: with our own `Q_Key`, which both sides have.
    pub fn source(&self, wc: &Wc) -> Option<DatagramAddr> {
        let UdSource { addr, qp_num } = wc.source?;
        Some(DatagramAddr {
            addr,
            qp_num,
            qkey: self.qkey,
        })
    }

    /// The queue pair of the verbs underneath.
    pub fn qp(&self) -> &UdQp {
        &self.qp
    }

    /// A completion queue of the verbs underneath.
    pub fn cq(&self, of: CqType) -> &Cq {
        match of {
            CqType::Send => &self.send_cq,
            CqType::Recv => &self.recv_cq,
        }
    }

    /// As [`Context::lmr_create`](crate::Context::lmr_create).
    ///
    /// # Errors
    /// [`Error::Verbs`] without memory.
    pub fn lmr_create(&self, len: usize, access: Access) -> Result<Lmr, Error> {
        let mr = self.pd.alloc_mr(len, access | Access::LOCAL_WRITE)?;
        Ok(Lmr(mr.into()))
    }

    /// As [`Context::lmr_register`](crate::Context::lmr_register).
    ///
    /// # Errors
    /// [`Error::Verbs`] past the limit of regions.
    pub fn lmr_register(&self, buffer: Vec<u8>, access: Access) -> Result<Lmr, Error> {
        let mr = self.pd.reg_mr(buffer, access | Access::LOCAL_WRITE)?;
        Ok(Lmr(mr.into()))
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn post(&self, wr: SendWr, to: &DatagramAddr, flags: Flags) -> Result<u64, Error> {
        let id = wr.id;
        self.qp.post_send(&flags.on(wr), &to.dest())?;
        Ok(id)
    }

    /// Advertises a region: 16 bytes, which [`Rmr::decode`] reads at the peer.
    ///
    /// # Errors
    /// [`Error::Post`] when the queue is full, [`Error::Range`] for a region of 4 GiB and more.
    pub fn post_send_adv(&self, lmr: &Lmr, to: &DatagramAddr, flags: Flags) -> Result<u64, Error> {
        let wr = SendWr::send(self.id()).inline(&lmr.advertisement()?);
        self.post(wr, to, flags)
    }

    /// Sends `len` bytes of `src` from offset `at`.
    ///
    /// # Errors
    /// [`Error::Post`] when the queue is full, [`Error::Range`].
    pub fn post_send_lmr(
        &self,
        src: &Lmr,
        at: usize,
        len: usize,
        to: &DatagramAddr,
        flags: Flags,
    ) -> Result<u64, Error> {
        let wr = SendWr::send(self.id()).sge(src.sge(at, len)?);
        self.post(wr, to, flags)
    }

    /// Receives one message of up to `len` bytes into `dst` at offset `at`.
    ///
    /// # Errors
    /// [`Error::Post`] when the queue is full, [`Error::Range`].
    pub fn post_recv_lmr(&self, dst: &Lmr, at: usize, len: usize) -> Result<u64, Error> {
        let id = self.id();
        let wr = RecvWr::new(id).sge(dst.sge(at, len)?);
        self.qp.post_recv(&[wr])?;
        Ok(id)
    }

    /// RDMA Write-Record: writes `len` bytes of `src` from offset `at` to offset `to` of `dst`, a region of `peer`. The peer needs no receive, and gets a
    /// completion with [`WcOpcode::WriteRecord`].
    ///
    /// # Errors
    /// [`Error::Post`] when the queue is full, or the context was made without records; [`Error::Range`].
    #[expect(clippy::too_many_arguments, reason = "two ranges, a peer and flags")]
    pub fn post_write_record_lmr(
        &self,
        src: &Lmr,
        at: usize,
        dst: &Rmr,
        to: usize,
        len: usize,
        peer: &DatagramAddr,
        flags: Flags,
    ) -> Result<u64, Error> {
        let wr = SendWr::write(self.id(), dst.at(to, len)?).sge(src.sge(at, len)?);
        self.post(wr, peer, flags)
    }

    /// Waits until `out` is full of completions of one kind, at most for `timeout` (`None`: for ever): how many there are. Datagrams may be
    /// lost, so a wait without a limit may be one without an end.
    ///
    /// # Errors
    /// [`Error::Completion`] with the first work request that failed.
    pub fn await_completions(
        &self,
        of: CqType,
        out: &mut [Wc],
        timeout: Option<Duration>,
    ) -> Result<usize, Error> {
        let start = std::time::Instant::now();
        let mut done = 0;
        while done < out.len() {
            let left = timeout.map(|limit| limit.saturating_sub(start.elapsed()));
            let got = self.cq(of).wait(&mut out[done..], left)?;
            if let Some(failed) = out[done..done + got]
                .iter()
                .find(|wc| wc.status != WcStatus::Success)
            {
                return Err(Error::Completion(*failed));
            }
            if got == 0 {
                break;
            }
            done += got;
        }
        Ok(done)
    }

    /// The record of a completion of [`WcOpcode::WriteRecord`]: the sender, the address, and the bytes that arrived. `None` for other
    /// completions, and if the record was taken already.
    pub fn take_record(&self, wc: &Wc) -> Option<WriteRecord> {
        (wc.opcode == WcOpcode::WriteRecord)
            .then(|| self.qp.take_record(wc.wr_id))
            .flatten()
    }

    /// Reliable mode: whether a message to this peer could not be delivered. Its completion has the reason. Later messages to this peer are flushed until
    /// [`Self::reset_peer`]. Other peers are not affected.
    pub fn has_failed(&self, peer: &DatagramAddr) -> bool {
        self.qp.pair_state(&peer.dest()) == QpState::Error
    }

    /// Ends that: `false` if there was nothing to end.
    pub fn reset_peer(&self, peer: &DatagramAddr) -> bool {
        self.qp.reset_pair(&peer.dest())
    }

    /// Which bytes of a region Write-Records have filled, as its addresses, since [`Self::take_validity_map`].
    pub fn validity_map(&self, lmr: &Lmr) -> ValidityMap {
        self.qp.validity_map(lmr.mr().rkey())
    }

    /// As [`Self::validity_map`], and nothing is valid from now on that is not written again.
    pub fn take_validity_map(&self, lmr: &Lmr) -> ValidityMap {
        self.qp.take_validity_map(lmr.mr().rkey())
    }
}
