//! Where a variable lies in a kernel module: as much of ELF as that takes.

/// Offset in the file of the initial value of the global variable `name`; `None` when the file has none of that name, or
/// is no 64-bit little-endian ELF file.
pub(crate) fn offset_of(file: &[u8], name: &str) -> Option<usize> {
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let sections = long(file, 0x28)?;
    let section = |index: usize| sections + index * 64;
    for index in 0..short(file, 0x3c)? {
        let header = section(index);
        const SYMBOLS: usize = 2;
        if word(file, header + 4)? != SYMBOLS {
            continue;
        }
        let (start, len) = (long(file, header + 24)?, long(file, header + 32)?);
        let names = long(file, section(word(file, header + 40)?) + 24)?;
        for symbol in (start..start + len).step_by(24) {
            let text = file.get(names + word(file, symbol)?..)?;
            if text
                .strip_prefix(name.as_bytes())
                .is_some_and(|rest| rest.starts_with(&[0]))
            {
                let home = section(short(file, symbol + 6)?);
                return Some(long(file, home + 24)? + long(file, symbol + 8)?);
            }
        }
    }
    None
}

fn short(file: &[u8], at: usize) -> Option<usize> {
    let bytes = file.get(at..)?.first_chunk()?;
    Some(u16::from_le_bytes(*bytes).into())
}

fn word(file: &[u8], at: usize) -> Option<usize> {
    let bytes = file.get(at..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

fn long(file: &[u8], at: usize) -> Option<usize> {
    let bytes = file.get(at..)?.first_chunk()?;
    usize::try_from(u64::from_le_bytes(*bytes)).ok()
}
