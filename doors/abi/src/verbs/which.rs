//! The two devices, by their names.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// `weft0`: an RNIC, connected by the connection manager.
    Iwarp,
    /// `weft_ib0`: like a RoCE adapter, with queue pairs that are joined by number.
    Persona,
}

impl Which {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Which::Iwarp => "weft0",
            Which::Persona => "weft_ib0",
        }
    }

    /// A GUID that stays the same on a host and is unique to it.
    pub(super) fn guid(self) -> [u8; 8] {
        let host = std::fs::read("/etc/machine-id")
            .or_else(|_| std::fs::read("/etc/hostname"))
            .unwrap_or_default();
        // FNV-1a.
        let hash = host.iter().chain(self.name().as_bytes());
        let hash = hash.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut guid = hash.to_be_bytes();
        // A locally administered unicast address.
        guid[0] = guid[0] & !1 | 2;
        guid
    }
}
