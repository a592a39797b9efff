//! MPEG-2 transport streams (ISO/IEC 13818-1): as far as needed to cut one where a decoder can begin.

/// Bytes of a packet.
pub const PACKET: usize = 188;
/// Packets of a program map table that are kept.
const MAX_PMT: usize = 8;
const SYNC: u8 = 0x47;

/// The parts of a packet that the cutter needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Look {
    /// A frame of the reference stream begins in it.
    pub frame: bool,
    /// A decoder can begin with that frame.
    pub key: bool,
    /// The frame's presentation time in microseconds.
    pub time: Option<u64>,
    /// The program clock reference in microseconds, if it carries one.
    pub clock: Option<u64>,
    /// It belongs to a table that every decoder needs first.
    pub table: bool,
}

/// Follows the tables of a stream.
#[derive(Debug, Default)]
pub struct Follower {
    pmt_pid: Option<u16>,
    reference: Option<u16>,
    pat: Vec<u8>,
    pmt: Vec<u8>,
    collecting: bool,
}

impl Follower {
    /// The packets that a decoder needs first: the program association and map tables; `None` before they have come.
    pub fn tables(&self) -> Option<Vec<u8>> {
        self.reference?;
        Some([&self.pat[..], &self.pmt].concat())
    }

    /// Parses a packet; `None` if it is malformed.
    pub fn look(&mut self, packet: &[u8; PACKET]) -> Option<Look> {
        if packet[0] != SYNC {
            return None;
        }
        let pid = u16::from_be_bytes([packet[1], packet[2]]) & 0x1fff;
        let begins = packet[1] & 0x40 != 0;
        let (adaptation, payload) = split(packet);
        let mut look = Look {
            clock: clock(adaptation),
            ..Look::default()
        };
        if pid == 0 {
            look.table = true;
            if begins && let Some(found) = program_map_pid(payload) {
                self.pmt_pid = Some(found);
                self.pat = packet.to_vec();
            }
        } else if Some(pid) == self.pmt_pid {
            look.table = true;
            self.map(packet, payload, begins);
        } else if Some(pid) == self.reference && begins {
            look.frame = true;
            look.key = adaptation.first().is_some_and(|flags| flags & 0x40 != 0);
            look.time = presentation_time(payload);
        }
        Some(look)
    }

    fn map(&mut self, packet: &[u8; PACKET], payload: &[u8], begins: bool) {
        if begins {
            self.pmt.clear();
            self.collecting = true;
            if let Some(found) = reference_pid(payload) {
                self.reference = Some(found);
            }
        }
        if self.collecting && self.pmt.len() < MAX_PMT * PACKET {
            self.pmt.extend_from_slice(packet);
        }
    }
}

/// Adaptation field (without its length) and payload of a packet.
fn split(packet: &[u8; PACKET]) -> (&[u8], &[u8]) {
    let body = &packet[4..];
    let (adaptation, rest) = if packet[3] & 0x20 != 0 {
        let len = usize::from(body[0]);
        match body[1..].split_at_checked(len) {
            Some(parts) => parts,
            None => return (&[], &[]),
        }
    } else {
        (&[][..], body)
    };
    let payload = if packet[3] & 0x10 != 0 { rest } else { &[] };
    (adaptation, payload)
}

fn clock(adaptation: &[u8]) -> Option<u64> {
    let (&flags, rest) = adaptation.split_first()?;
    if flags & 0x10 == 0 {
        return None;
    }
    let b = rest.first_chunk::<6>()?;
    let base = u64::from(u32::from_be_bytes([b[0], b[1], b[2], b[3]])) << 1 | u64::from(b[4] >> 7);
    let extension = u64::from(b[4] & 1) << 8 | u64::from(b[5]);
    Some((base * 300 + extension) / 27)
}

/// A section that begins in this payload, from its table id on.
fn section(payload: &[u8]) -> Option<&[u8]> {
    let (&pointer, rest) = payload.split_first()?;
    let section = rest.get(usize::from(pointer)..)?;
    let head = section.first_chunk::<3>()?;
    let len = usize::from(u16::from_be_bytes([head[1], head[2]]) & 0xfff);
    // A section that continues in the next packet is not read further; the checksum at the end is left out.
    section.get(..(3 + len).saturating_sub(4).min(section.len()))
}

fn program_map_pid(payload: &[u8]) -> Option<u16> {
    let section = section(payload)?;
    if section.first() != Some(&0) {
        return None;
    }
    let (programs, _) = section.get(8..)?.as_chunks::<4>();
    let first = programs.iter().find(|p| (p[0], p[1]) != (0, 0))?;
    Some(u16::from_be_bytes([first[2], first[3]]) & 0x1fff)
}

/// The first video stream of a program, else its first stream.
fn reference_pid(payload: &[u8]) -> Option<u16> {
    let section = section(payload)?;
    if section.first() != Some(&2) {
        return None;
    }
    let skip = usize::from(u16::from_be_bytes([*section.get(10)?, *section.get(11)?]) & 0xfff);
    let mut streams = section.get(12 + skip..)?;
    let mut first = None;
    while let Some((head, rest)) = streams.split_first_chunk::<5>() {
        let pid = u16::from_be_bytes([head[1], head[2]]) & 0x1fff;
        // MPEG-1, MPEG-2, MPEG-4 part 2, H.264, HEVC, VVC.
        if matches!(head[0], 0x01 | 0x02 | 0x10 | 0x1b | 0x24 | 0x33) {
            return Some(pid);
        }
        first = first.or(Some(pid));
        let skip = usize::from(u16::from_be_bytes([head[3], head[4]]) & 0xfff);
        streams = rest.get(skip..).unwrap_or_default();
    }
    first
}

fn presentation_time(payload: &[u8]) -> Option<u64> {
    let b = payload.first_chunk::<14>()?;
    if b[..3] != [0, 0, 1] || b[7] & 0x80 == 0 {
        return None;
    }
    let high = u64::from(b[9] >> 1 & 7) << 30;
    let middle = u64::from(u16::from_be_bytes([b[10], b[11]]) >> 1) << 15;
    let low = u64::from(u16::from_be_bytes([b[12], b[13]]) >> 1);
    Some((high | middle | low) * 100 / 9)
}
