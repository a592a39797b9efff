//! Divides a stream from a pipe into an init segment and fragments.

use crate::boxes::{self, BoxError, Movie};
use crate::ts::{Follower, PACKET};
use crate::wire::{Format, MAX_INIT};

/// A fragment of a transport stream is cut at the next frame once it has so many bytes.
const TS_FRAGMENT: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Neither fragmented MP4 nor MPEG-TS.
    #[error("the input is neither fragmented MP4 nor an MPEG transport stream")]
    Unknown,
    /// MP4 that cannot be cut.
    #[error("MP4: {0}")]
    Mp4(#[from] BoxError),
    /// A packet does not begin where the one before ends.
    #[error("the transport stream has lost its packets' boundaries")]
    Sync,
    /// It does not fit into the ring.
    #[error(
        "a fragment is longer than {0} bytes; make fragments shorter, or the ring larger with --ring"
    )]
    TooLong(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The init segment, which a decoder needs first.
    Init(Format, Vec<u8>),
    /// The next bytes.
    Fragment {
        bytes: Vec<u8>,
        /// Whether a decoder can begin with them.
        key: bool,
        /// Their time in microseconds.
        time: u64,
        /// Their duration in microseconds; 0: not known.
        duration: u64,
    },
}

enum State {
    Unknown,
    Mp4 {
        init: Vec<u8>,
        movie: Option<Movie>,
        /// The boxes of the fragment that is not complete.
        pending: Vec<u8>,
        fragment: Option<boxes::Fragment>,
    },
    Ts {
        follower: Follower,
        begun: bool,
        pending: Vec<u8>,
        key: bool,
        time: u64,
    },
}

/// Cuts a stream; holds at most one fragment.
pub struct Cutter {
    buf: Vec<u8>,
    most: usize,
    state: State,
}

impl Cutter {
    /// Fragments have at most so many bytes.
    pub fn new(most: usize) -> Self {
        Self {
            buf: Vec::new(),
            most,
            state: State::Unknown,
        }
    }

    /// Processes the next bytes; calls `out` with complete parts.
    ///
    /// # Errors
    /// [`CutError`]: the stream cannot be divided any further.
    pub fn feed(&mut self, bytes: &[u8], mut out: impl FnMut(Part)) -> Result<(), CutError> {
        self.buf.extend_from_slice(bytes);
        if matches!(self.state, State::Unknown) {
            let Some(state) = recognise(&self.buf)? else {
                return Ok(());
            };
            self.state = state;
        }
        let used = match self.state {
            State::Mp4 { .. } => self.feed_mp4(&mut out)?,
            _ => self.feed_ts(&mut out)?,
        };
        self.buf.drain(..used);
        Ok(())
    }

    /// The stream has ended: the rest is a fragment too, if it is whole.
    pub fn finish(mut self, mut out: impl FnMut(Part)) {
        if let State::Ts {
            begun,
            pending,
            key,
            time,
            ..
        } = &mut self.state
            && *begun
            && !pending.is_empty()
        {
            out(Part::Fragment {
                bytes: std::mem::take(pending),
                key: *key,
                time: *time,
                duration: 0,
            });
        }
    }

    fn feed_mp4(&mut self, out: &mut impl FnMut(Part)) -> Result<usize, CutError> {
        let State::Mp4 {
            init,
            movie,
            pending,
            fragment,
        } = &mut self.state
        else {
            return Ok(0);
        };
        let mut used = 0;
        loop {
            let rest = &self.buf[used..];
            let Some(head) = boxes::head(rest)? else {
                return Ok(used);
            };
            let size = head.size.ok_or(BoxError::Limit("a box without an end"))?;
            let size = usize::try_from(size).map_err(|_| CutError::TooLong(self.most))?;
            if size > self.most || size + pending.len() > self.most {
                return Err(CutError::TooLong(self.most));
            }
            let Some(whole) = rest.get(..size) else {
                return Ok(used);
            };
            let body = &whole[head.head as usize..];
            used += size;
            match (&head.kind, movie.as_ref()) {
                (b"free" | b"skip" | b"mfra" | b"wide", _) => {}
                (b"moov", None) => {
                    *movie = Some(Movie::parse(body)?);
                    init.extend_from_slice(whole);
                    if init.len() > MAX_INIT as usize {
                        return Err(BoxError::Limit("the init segment").into());
                    }
                    out(Part::Init(Format::Mp4, std::mem::take(init)));
                }
                (b"moov", Some(_)) => return Err(BoxError::Limit("moov boxes").into()),
                (b"moof" | b"mdat", None) => return Err(BoxError::NotFragmented.into()),
                (_, None) => {
                    init.extend_from_slice(whole);
                    if init.len() > MAX_INIT as usize {
                        return Err(BoxError::Limit("the init segment").into());
                    }
                }
                (b"moof", Some(movie)) => {
                    if fragment.is_some() {
                        return Err(BoxError::Missing("mdat").into());
                    }
                    *fragment = Some(movie.fragment(body)?);
                    pending.extend_from_slice(whole);
                }
                (b"mdat", Some(_)) => {
                    let found = fragment.take().ok_or(BoxError::Missing("moof"))?;
                    pending.extend_from_slice(whole);
                    out(Part::Fragment {
                        bytes: std::mem::take(pending),
                        key: found.key,
                        time: found.time,
                        duration: found.duration,
                    });
                }
                (_, Some(_)) => pending.extend_from_slice(whole),
            }
        }
    }

    fn feed_ts(&mut self, out: &mut impl FnMut(Part)) -> Result<usize, CutError> {
        let State::Ts {
            follower,
            begun,
            pending,
            key,
            time,
        } = &mut self.state
        else {
            return Ok(0);
        };
        let (packets, _) = self.buf.as_chunks::<PACKET>();
        for packet in packets {
            let look = follower.look(packet).ok_or(CutError::Sync)?;
            if !*begun {
                if let Some(tables) = follower.tables().filter(|_| look.frame && look.key) {
                    out(Part::Init(Format::Ts, tables));
                    *begun = true;
                    (*key, *time) = (true, look.time.unwrap_or(0));
                } else if pending.len() + PACKET > self.most {
                    // No key frame yet: this cannot be decoded.
                    pending.clear();
                }
            } else if look.frame && (look.key || pending.len() >= TS_FRAGMENT) {
                out(Part::Fragment {
                    bytes: std::mem::take(pending),
                    key: *key,
                    time: *time,
                    duration: 0,
                });
                *key = look.key;
                *time = look.time.unwrap_or(*time);
            }
            if pending.len() + PACKET > self.most {
                return Err(CutError::TooLong(self.most));
            }
            pending.extend_from_slice(packet);
        }
        Ok(packets.len() * PACKET)
    }
}

/// Which format it is; `None` when more bytes are needed.
fn recognise(buf: &[u8]) -> Result<Option<State>, CutError> {
    if buf.first() == Some(&0x47) && buf.get(PACKET).is_none_or(|&b| b == 0x47) {
        if buf.len() <= PACKET {
            return Ok(None);
        }
        return Ok(Some(State::Ts {
            follower: Follower::default(),
            begun: false,
            pending: Vec::new(),
            key: false,
            time: 0,
        }));
    }
    match buf.get(4..8) {
        None => Ok(None),
        Some(b"ftyp" | b"styp" | b"moov" | b"free" | b"skip" | b"wide") => Ok(Some(State::Mp4 {
            init: Vec::new(),
            movie: None,
            pending: Vec::new(),
            fragment: None,
        })),
        Some(_) => Err(CutError::Unknown),
    }
}
