//! A probe: a datagram to the own address that tells which of the sockets there the kernel means by an index.

/// The first byte of a probe: no opcode of RoCE has it.
pub(super) const DIRECT: u8 = 0xff;
pub(super) const PROBE_LEN: usize = 16;

/// A probe that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::roce) struct Probe {
    pub(super) slot: u8,
    pub(super) index: u8,
    pub(super) epoch: u32,
    pub(super) secret: u64,
}

impl Probe {
    pub(in crate::roce) fn parse(packet: &[u8]) -> Option<Probe> {
        let packet: &[u8; PROBE_LEN] = packet.try_into().ok()?;
        let [direct, index, slot, _, a, b, c, d, secret @ ..] = *packet;
        (direct == DIRECT).then_some(Probe {
            slot,
            index,
            epoch: u32::from_be_bytes([a, b, c, d]),
            secret: u64::from_be_bytes(secret),
        })
    }

    pub(super) fn emit(&self) -> [u8; PROBE_LEN] {
        let mut out = [0; PROBE_LEN];
        out[..3].copy_from_slice(&[DIRECT, self.index, self.slot]);
        out[4..8].copy_from_slice(&self.epoch.to_be_bytes());
        out[8..].copy_from_slice(&self.secret.to_be_bytes());
        out
    }
}
