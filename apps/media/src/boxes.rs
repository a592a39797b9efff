//! Boxes of the ISO base media file format (ISO/IEC 14496-12), as far as needed to find fragments, their times and key frames.
//!
//! Every byte is hostile: lengths are checked, no allocation depends on one, and recursion goes no deeper than the boxes that are named
//! here.

/// Longest movie box that is parsed, in bytes.
pub const MAX_MOOV: u64 = 16 << 20;
/// Most tracks of a movie.
const MAX_TRACKS: usize = 64;
const NON_SYNC: u32 = 0x0001_0000;

/// The error of a file or stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BoxError {
    /// A box ends before its fields do, or is longer than what holds it.
    #[error("a box is shorter than its content, or longer than what holds it")]
    Short,
    /// A required box is missing.
    #[error("there is no {0} box")]
    Missing(&'static str),
    /// More of something than the limit.
    #[error("too many or too long: {0}")]
    Limit(&'static str),
    /// The movie has no fragments.
    #[error(
        "the movie is not fragmented; ffmpeg makes it so with -movflags frag_keyframe+empty_moov+default_base_moof"
    )]
    NotFragmented,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub kind: [u8; 4],
    /// Bytes of the head itself, 8 or 16.
    pub head: u64,
    /// Bytes of the box with its head; `None`: to the end of the file.
    pub size: Option<u64>,
}

/// Reads the head of a box; `None` when more bytes are needed, at most 16.
///
/// # Errors
/// [`BoxError::Short`] for a box that is shorter than its head.
pub fn head(bytes: &[u8]) -> Result<Option<Head>, BoxError> {
    let Some(first) = bytes.first_chunk::<8>() else {
        return Ok(None);
    };
    let kind = [first[4], first[5], first[6], first[7]];
    let (head, size) = match u32::from_be_bytes([first[0], first[1], first[2], first[3]]) {
        0 => (8, None),
        1 => match bytes.get(8..16).and_then(<[u8]>::first_chunk) {
            Some(large) => (16, Some(u64::from_be_bytes(*large))),
            None => return Ok(None),
        },
        size => (8, Some(size.into())),
    };
    if size.is_some_and(|size| size < head) {
        return Err(BoxError::Short);
    }
    Ok(Some(Head { kind, head, size }))
}

/// The boxes in a body, one after the other.
fn boxes(mut body: &[u8]) -> impl Iterator<Item = Result<([u8; 4], &[u8]), BoxError>> {
    std::iter::from_fn(move || {
        if body.is_empty() {
            return None;
        }
        let found = head(body).and_then(|head| {
            let head = head.ok_or(BoxError::Short)?;
            let size = head.size.map_or(Ok(body.len()), usize::try_from);
            let size = size.map_err(|_| BoxError::Short)?;
            let (this, rest) = body.split_at_checked(size).ok_or(BoxError::Short)?;
            body = rest;
            Ok((head.kind, &this[head.head as usize..]))
        });
        if found.is_err() {
            body = &[];
        }
        Some(found)
    })
}

/// The first box of this kind in a body.
fn find<'a>(body: &'a [u8], kind: &'static str) -> Result<&'a [u8], BoxError> {
    for found in boxes(body) {
        let (this, inner) = found?;
        if this == kind.as_bytes() {
            return Ok(inner);
        }
    }
    Err(BoxError::Missing(kind))
}

/// Fields, one after the other.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BoxError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(BoxError::Short)?;
        self.0 = rest;
        Ok(*first)
    }
    fn u32(&mut self) -> Result<u32, BoxError> {
        self.take().map(u32::from_be_bytes)
    }
    fn u64(&mut self) -> Result<u64, BoxError> {
        self.take().map(u64::from_be_bytes)
    }
    /// Version and flags of a full box.
    fn full(&mut self) -> Result<(u8, u32), BoxError> {
        let word = self.u32()?;
        Ok(((word >> 24) as u8, word & 0x00ff_ffff))
    }
    fn when(&mut self, there: bool) -> Result<Option<u32>, BoxError> {
        there.then(|| self.u32()).transpose()
    }
}

/// The fields of a track that its fragments refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Track {
    id: u32,
    video: bool,
    timescale: u32,
    duration: u32,
    flags: u32,
}

/// The fields of a movie that its fragments refer to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Movie {
    tracks: Vec<Track>,
}

impl Movie {
    /// Reads the body of a `moov` box.
    ///
    /// # Errors
    /// [`BoxError`]; [`BoxError::NotFragmented`] without an `mvex` box.
    pub fn parse(moov: &[u8]) -> Result<Self, BoxError> {
        let mut tracks = Vec::new();
        let mut extends = None;
        for found in boxes(moov) {
            match found? {
                ([b't', b'r', b'a', b'k'], body) if tracks.len() < MAX_TRACKS => {
                    tracks.push(track(body)?);
                }
                ([b't', b'r', b'a', b'k'], _) => return Err(BoxError::Limit("tracks")),
                ([b'm', b'v', b'e', b'x'], body) => extends = Some(body),
                _ => {}
            }
        }
        let extends = extends.ok_or(BoxError::NotFragmented)?;
        for found in boxes(extends) {
            let ([b't', b'r', b'e', b'x'], body) = found? else {
                continue;
            };
            let mut fields = Fields(body);
            fields.full()?;
            let (id, _description) = (fields.u32()?, fields.u32()?);
            let (duration, _size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
            if let Some(track) = tracks.iter_mut().find(|t| t.id == id) {
                (track.duration, track.flags) = (duration, flags);
            }
        }
        if tracks.is_empty() {
            return Err(BoxError::Missing("trak"));
        }
        Ok(Self { tracks })
    }

    /// The track whose times and key frames count: the first video track, else the first track.
    fn reference(&self) -> &Track {
        let video = self.tracks.iter().find(|t| t.video);
        video.unwrap_or(&self.tracks[0])
    }

    /// Reads the body of a `moof` box.
    ///
    /// # Errors
    /// [`BoxError`].
    pub fn fragment(&self, moof: &[u8]) -> Result<Fragment, BoxError> {
        let track = self.reference();
        let mut result = Fragment::default();
        let mut begun = false;
        for found in boxes(moof) {
            let ([b't', b'r', b'a', b'f'], traf) = found? else {
                continue;
            };
            let mut defaults = *track;
            let mut mine = false;
            for found in boxes(traf) {
                match found? {
                    ([b't', b'f', b'h', b'd'], body) => {
                        let mut fields = Fields(body);
                        let (_, flags) = fields.full()?;
                        mine = fields.u32()? == track.id;
                        if flags & 1 != 0 {
                            fields.u64()?;
                        }
                        fields.when(flags & 2 != 0)?;
                        let duration = fields.when(flags & 8 != 0)?;
                        fields.when(flags & 0x10 != 0)?;
                        let sample = fields.when(flags & 0x20 != 0)?;
                        defaults.duration = duration.unwrap_or(defaults.duration);
                        defaults.flags = sample.unwrap_or(defaults.flags);
                    }
                    ([b't', b'f', b'd', b't'], body) if mine => {
                        let mut fields = Fields(body);
                        let time = match fields.full()?.0 {
                            0 => fields.u32()?.into(),
                            _ => fields.u64()?,
                        };
                        result.time = micros(time, track.timescale);
                    }
                    ([b't', b'r', b'u', b'n'], body) if mine => {
                        let (flags, duration) = run(body, &defaults)?;
                        if !begun {
                            result.key = flags & NON_SYNC == 0;
                            begun = true;
                        }
                        let duration = micros(duration, track.timescale);
                        result.duration = result.duration.saturating_add(duration);
                    }
                    _ => {}
                }
            }
        }
        Ok(result)
    }
}

/// A fragment's place in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fragment {
    /// Decode time of its first sample in microseconds.
    pub time: u64,
    /// Its duration in microseconds.
    pub duration: u64,
    /// Whether it begins with a key frame.
    pub key: bool,
}

fn micros(time: u64, timescale: u32) -> u64 {
    let micros = u128::from(time) * 1_000_000 / u128::from(timescale.max(1));
    u64::try_from(micros).unwrap_or(u64::MAX)
}

fn track(trak: &[u8]) -> Result<Track, BoxError> {
    let mut header = Fields(find(trak, "tkhd")?);
    if header.full()?.0 == 0 {
        header.u64()?;
    } else {
        header.take::<16>()?;
    }
    let id = header.u32()?;
    let media = find(trak, "mdia")?;
    let mut header = Fields(find(media, "mdhd")?);
    if header.full()?.0 == 0 {
        header.u64()?;
    } else {
        header.take::<16>()?;
    }
    let timescale = header.u32()?;
    let mut handler = Fields(find(media, "hdlr")?);
    handler.u64()?;
    Ok(Track {
        id,
        video: handler.take()? == *b"vide",
        timescale,
        ..Track::default()
    })
}

/// The first sample's flags and the duration of a `trun` box, in units of the track.
fn run(body: &[u8], defaults: &Track) -> Result<(u32, u64), BoxError> {
    let mut fields = Fields(body);
    let (_, flags) = fields.full()?;
    let count = fields.u32()?;
    fields.when(flags & 1 != 0)?;
    let first = fields.when(flags & 4 != 0)?;
    let mut first_flags = first.unwrap_or(defaults.flags);
    if flags & 0xf00 == 0 {
        return Ok((first_flags, u64::from(count) * u64::from(defaults.duration)));
    }
    // Each sample takes bytes here, so the box bounds their number.
    let mut sum = 0_u64;
    for index in 0..count {
        let duration = fields.when(flags & 0x100 != 0)?;
        sum = sum.saturating_add(duration.unwrap_or(defaults.duration).into());
        fields.when(flags & 0x200 != 0)?;
        let sample = fields.when(flags & 0x400 != 0)?;
        fields.when(flags & 0x800 != 0)?;
        if index == 0 && first.is_none() {
            first_flags = sample.unwrap_or(first_flags);
        }
    }
    Ok((first_flags, sum))
}
