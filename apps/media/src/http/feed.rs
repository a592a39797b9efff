//! HLS (RFC 8216): playlists of fragmented files, and live streams as segments that begin with key frames.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::pool::Pool;
use crate::boxes::{self, BoxError, MAX_MOOV, Movie};
use crate::client::{OpenError, ViewError, Viewer};
use crate::live;
use crate::watch::{Event, From, Watch};
use crate::wire::{Format, Refusal, Slot};
use weft_service::lock;

/// A segment lasts so long at least, in microseconds, unless key frames are further apart.
const SEGMENT: u64 = 1_000_000;
/// How far before the newest fragment a feed begins, in microseconds, so that players need not wait for segments.
const BEHIND: u64 = 6_000_000;
/// Segments of a live playlist, and their bytes together.
const WINDOW: usize = 20;
const WINDOW_BYTES: usize = 128 << 20;
/// A feed without requests ends after this time.
const IDLE: Duration = Duration::from_secs(30);
/// How often an unreachable server is dialled.
const AGAIN: Duration = Duration::from_millis(500);
/// Fragments of a file, and length of a `moof` box.
const MOST_FRAGMENTS: usize = 200_000;
const MAX_MOOF: u64 = 4 << 20;

/// A segment of a live stream.
struct Segment {
    number: u64,
    epoch: u64,
    bytes: Bytes,
    /// Microseconds.
    duration: u64,
    /// It does not go on where the one before ended.
    broken: bool,
}

#[derive(Default)]
struct State {
    format: Option<Format>,
    /// Init segments, by the connection that they came by.
    inits: VecDeque<(u64, Bytes)>,
    segments: VecDeque<Segment>,
    next: u64,
    breaks: u64,
    longest: u64,
    ended: bool,
    trouble: Option<String>,
}

/// A live stream, followed for HTTP clients.
pub(super) struct Feed {
    state: Mutex<State>,
    changed: tokio::sync::Notify,
    used: Mutex<Instant>,
    /// Fragments lost because the server overtook this proxy.
    pub(super) skipped: AtomicU64,
    /// Microseconds from the server's notice to the last fragment's arrival.
    pub(super) delay: AtomicU64,
}

/// An entry of a playlist.
pub(super) enum Item {
    Playlist(String),
    Segment(Bytes, &'static str),
}

impl Feed {
    /// Follows a stream in a thread of its own, as long as there are requests.
    pub(super) fn start(pool: Arc<Pool>, name: String, viewer: Viewer) -> Arc<Self> {
        let feed = Arc::new(Self {
            state: Mutex::default(),
            changed: tokio::sync::Notify::new(),
            used: Mutex::new(Instant::now()),
            skipped: AtomicU64::new(0),
            delay: AtomicU64::new(0),
        });
        let this = Arc::clone(&feed);
        tokio::task::spawn_blocking(move || this.run(&pool, &name, viewer));
        feed
    }

    /// Whether there was no request for so long that its thread has ended, or is about to.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.used).elapsed() >= IDLE
    }

    fn run(&self, pool: &Pool, name: &str, first: Viewer) {
        let mut viewer = Some(first);
        let mut epoch = 0;
        while !self.is_over() {
            let opened = match viewer.take() {
                Some(viewer) => Ok(viewer),
                None => pool.open(name),
            };
            let trouble = match opened {
                Ok(viewer) => {
                    epoch += 1;
                    match self.follow(pool, viewer, epoch) {
                        Ok(()) => {
                            lock(&self.state).ended = true;
                            "the stream has ended".into()
                        }
                        Err(e) => e.to_string(),
                    }
                }
                Err(OpenError::Refused(Refusal::NotYet)) => Refusal::NotYet.text().into(),
                Err(e) => e.to_string(),
            };
            lock(&self.state).trouble = Some(trouble);
            self.changed.notify_waiters();
            std::thread::sleep(AGAIN);
        }
    }

    /// Follows one connection to its end.
    fn follow(&self, pool: &Pool, viewer: Viewer, epoch: u64) -> Result<(), ViewError> {
        let mut watch = Watch::new(viewer, From::Behind(BEHIND))?;
        let init = Bytes::from(watch.init()?);
        {
            let mut state = lock(&self.state);
            state.format = Some(watch.layout().format);
            state.inits.push_back((epoch, init));
            (state.ended, state.trouble) = (false, None);
        }
        let mut current = Current::new(epoch);
        while !self.is_over() {
            match watch.next(Duration::from_secs(1))? {
                Some(Event::Fragment { slot, bytes, told }) => {
                    pool.count(bytes.len() as u64);
                    if let Some(at) = told {
                        let delay = live::now().saturating_sub(at);
                        self.delay.store(delay, Ordering::Relaxed);
                    }
                    if let Some(done) = current.add(&slot, &bytes) {
                        self.publish(done);
                    }
                }
                Some(Event::Skipped { from, to }) => {
                    self.skipped.fetch_add(to - from, Ordering::Relaxed);
                    current = Current::new(epoch);
                }
                Some(Event::End) => {
                    if let Some(done) = current.finish(None) {
                        self.publish(done);
                    }
                    return Ok(());
                }
                None => {}
            }
        }
        Ok(())
    }

    fn publish(&self, mut segment: Segment) {
        let mut state = lock(&self.state);
        segment.number = state.next;
        state.next += 1;
        state.longest = state.longest.max(segment.duration);
        state.segments.push_back(segment);
        let mut bytes: usize = state.segments.iter().map(|s| s.bytes.len()).sum();
        while state.segments.len() > WINDOW || bytes > WINDOW_BYTES && state.segments.len() > 1 {
            let Some(gone) = state.segments.pop_front() else {
                break;
            };
            bytes -= gone.bytes.len();
            state.breaks += u64::from(gone.broken);
        }
        let oldest = state.segments.front().map_or(0, |s| s.epoch);
        state.inits.retain(|(epoch, _)| *epoch >= oldest);
        drop(state);
        self.changed.notify_waiters();
    }

    /// An item of the stream by its name; waits for the first segment.
    pub(super) async fn item(&self, item: &str, patience: Duration) -> Result<Item, String> {
        *lock(&self.used) = Instant::now();
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let changed = self.changed.notified();
            if let Some(found) = self.find(item) {
                return Ok(found);
            }
            if item != "index.m3u8" {
                return Err("there is no such segment any more, or yet".into());
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                let trouble = lock(&self.state).trouble.clone();
                return Err(trouble.unwrap_or_else(|| "no segment in time".into()));
            }
        }
    }

    fn find(&self, item: &str) -> Option<Item> {
        let state = lock(&self.state);
        let format = state.format?;
        if item == "index.m3u8" {
            return (!state.segments.is_empty()).then(|| Item::Playlist(playlist(&state, format)));
        }
        let (stem, _) = item.rsplit_once('.')?;
        if let Some(epoch) = stem.strip_prefix("init-") {
            let epoch: u64 = epoch.parse().ok()?;
            let (_, bytes) = state.inits.iter().find(|(e, _)| *e == epoch)?;
            return Some(Item::Segment(bytes.clone(), media_type(format)));
        }
        let number: u64 = stem.parse().ok()?;
        let segment = state.segments.iter().find(|s| s.number == number)?;
        Some(Item::Segment(segment.bytes.clone(), media_type(format)))
    }
}

fn media_type(format: Format) -> &'static str {
    match format {
        Format::Mp4 => "video/mp4",
        Format::Ts => "video/mp2t",
    }
}

/// Whole seconds, rounded according to RFC 8216 4.3.3.1.
fn target(longest: u64) -> u64 {
    longest.saturating_add(500_000) / 1_000_000
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

fn playlist(state: &State, format: Format) -> String {
    let first = state.segments.front().map_or(0, |s| s.number);
    let mut text = format!(
        "#EXTM3U\n#EXT-X-VERSION:7\n#EXT-X-TARGETDURATION:{}\n#EXT-X-MEDIA-SEQUENCE:{first}\n#EXT-X-DISCONTINUITY-SEQUENCE:{}\n",
        target(state.longest).max(1),
        state.breaks
    );
    let ending = match format {
        Format::Mp4 => "m4s",
        Format::Ts => "ts",
    };
    let mut epoch = None;
    // Writing to a string cannot fail.
    for segment in &state.segments {
        if segment.broken {
            text.push_str("#EXT-X-DISCONTINUITY\n");
        }
        if epoch != Some(segment.epoch) && format == Format::Mp4 {
            let _ = writeln!(text, "#EXT-X-MAP:URI=\"init-{}.mp4\"", segment.epoch);
        }
        epoch = Some(segment.epoch);
        let _ = writeln!(
            text,
            "#EXTINF:{:.6},\n{}.{ending}",
            seconds(segment.duration),
            segment.number
        );
    }
    if state.ended {
        text.push_str("#EXT-X-ENDLIST\n");
    }
    text
}

/// A segment that is being put together.
struct Current {
    epoch: u64,
    bytes: Vec<u8>,
    begun: Option<u64>,
    /// Sum of the fragments' own durations.
    sum: u64,
    last: u64,
    broken: bool,
}

impl Current {
    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            bytes: Vec::new(),
            begun: None,
            sum: 0,
            last: SEGMENT,
            broken: true,
        }
    }

    /// Adds a fragment; the segment that was complete before it.
    fn add(&mut self, slot: &Slot, bytes: &[u8]) -> Option<Segment> {
        if self.begun.is_none() && !slot.key {
            return None;
        }
        let long = self.begun.is_some_and(|begun| {
            let since = slot.time.saturating_sub(begun);
            since.max(self.sum) >= SEGMENT
        });
        let done = (slot.key && long)
            .then(|| self.finish(Some(slot.time)))
            .flatten();
        if self.bytes.len() + bytes.len() > WINDOW_BYTES {
            // There may be no further key frame: the segment is given up, and the next one begins with the next key frame.
            *self = Self {
                last: self.last,
                ..Self::new(self.epoch)
            };
            return done;
        }
        self.begun.get_or_insert(slot.time);
        self.sum += u64::from(slot.duration);
        self.bytes.extend_from_slice(bytes);
        done
    }

    fn finish(&mut self, next: Option<u64>) -> Option<Segment> {
        let begun = self.begun.take()?;
        let by_clock = next.and_then(|next| next.checked_sub(begun));
        let sane = by_clock.filter(|d| (1..60_000_000).contains(d));
        let duration = sane.unwrap_or(if self.sum > 0 { self.sum } else { self.last });
        (self.sum, self.last) = (0, duration);
        Some(Segment {
            number: 0,
            epoch: self.epoch,
            bytes: Bytes::from(std::mem::take(&mut self.bytes)),
            duration,
            broken: std::mem::take(&mut self.broken),
        })
    }
}

/// Why a file has no playlist.
#[derive(Debug, thiserror::Error)]
pub(super) enum IndexError {
    #[error(transparent)]
    Boxes(#[from] BoxError),
    #[error(transparent)]
    View(#[from] ViewError),
}

/// The playlist of a fragmented file: byte ranges of it, each beginning with a key frame. Blocks.
pub(super) fn file_playlist(viewer: &mut Viewer, uri: &str) -> Result<String, IndexError> {
    if !viewer.grant().content.is_movie() {
        return Err(ViewError::Violation("this is no movie").into());
    }
    let len = viewer.grant().len;
    let (mut at, mut movie, mut init) = (0, None::<Movie>, 0);
    // The start of a fragment, its end, its duration, and whether it begins with a key frame.
    let mut parts: Vec<(u64, u64, u64, bool)> = Vec::new();
    let mut open: Option<(u64, boxes::Fragment)> = None;
    while at < len {
        let some = viewer.fetch(at, 8192.min(len - at) as usize)?;
        let head = boxes::head(&some)?.ok_or(BoxError::Short)?;
        let size = head.size.unwrap_or(len - at);
        let end = at
            .checked_add(size)
            .filter(|&end| end <= len)
            .ok_or(BoxError::Short)?;
        let body = |viewer: &mut Viewer, most: u64, what| {
            if size > most {
                return Err(IndexError::Boxes(BoxError::Limit(what)));
            }
            Ok(match some.get(head.head as usize..size as usize) {
                Some(body) => body.to_vec(),
                None => viewer.fetch(at + head.head, (size - head.head) as usize)?,
            })
        };
        match &head.kind {
            b"moov" if movie.is_none() => {
                movie = Some(Movie::parse(&body(viewer, MAX_MOOV, "the moov box")?)?);
                init = end;
            }
            b"moof" => {
                let movie = movie.as_ref().ok_or(BoxError::Missing("moov"))?;
                let body = body(viewer, MAX_MOOF, "a moof box")?;
                open = Some((at, movie.fragment(&body)?));
            }
            b"mdat" => {
                let (from, found) = open.take().ok_or(BoxError::NotFragmented)?;
                match parts.last_mut() {
                    // Players need segments that begin with key frames.
                    Some(last) if !found.key || last.2 < SEGMENT => {
                        (last.1, last.2) = (end, last.2.saturating_add(found.duration));
                    }
                    _ => parts.push((from, end, found.duration, found.key)),
                }
                if parts.len() > MOST_FRAGMENTS {
                    return Err(BoxError::Limit("fragments").into());
                }
            }
            _ => {}
        }
        at = end;
    }
    if parts.is_empty() {
        return Err(BoxError::NotFragmented.into());
    }
    let longest = parts.iter().map(|p| p.2).max().unwrap_or(0);
    let mut text = format!(
        "#EXTM3U\n#EXT-X-VERSION:7\n#EXT-X-PLAYLIST-TYPE:VOD\n#EXT-X-TARGETDURATION:{}\n#EXT-X-MAP:URI=\"{uri}\",BYTERANGE=\"{init}@0\"\n",
        target(longest).max(1)
    );
    for (from, end, duration, _) in parts {
        let _ = write!(
            text,
            "#EXTINF:{:.6},\n#EXT-X-BYTERANGE:{}@{from}\n{uri}\n",
            seconds(duration),
            end - from
        );
    }
    text.push_str("#EXT-X-ENDLIST\n");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_without_key_frames_has_a_bound() {
        let slot = |key, time| Slot {
            generation: 1,
            offset: 0,
            len: 0,
            key,
            time,
            duration: 0,
        };
        let mut current = Current::new(1);
        let piece = vec![0; WINDOW_BYTES / 4];
        for time in 0..9 {
            assert!(current.add(&slot(time == 0, time), &piece).is_none());
            assert!(current.bytes.len() <= WINDOW_BYTES);
        }
        // It goes on with the next key frame.
        assert!(current.add(&slot(true, 10), b"key").is_none());
        let done = current.add(&slot(true, 10 + SEGMENT), b"next").unwrap();
        assert_eq!((&done.bytes[..], done.broken), (&b"key"[..], true));
    }
}
