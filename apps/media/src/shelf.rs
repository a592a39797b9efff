//! Movies in registered memory, in a protection domain of its own each (docs/adr/0014): a copy of the file, or, where there is no room for
//! that, slots for its blocks (docs/adr/0093).
//!
//! A viewer's queue pair is in the domain of its movie, so the `STag` of another movie is useless to it. If a file is truncated or
//! replaced, the viewers of a copy are not affected: they continue with it, and later viewers get the new file.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use weft_service::lock;
use weft_verbs::{Access, Device, Mr, Pd};

use crate::blocks::{self, Film};
use crate::names;
use crate::stamp::Stamp;
use crate::wire::{Content, Grant, Refusal};

/// How often a file that changes during reading is read again.
const TRIES: u32 = 3;

/// A region that viewers may read, in its own domain.
pub struct Movie {
    /// Dropped before the domain.
    mr: Mr,
    pd: Pd,
    len: u64,
    version: [u8; 16],
    content: Content,
    used: Mutex<Instant>,
    /// Of a movie in blocks.
    film: Option<Film>,
    _room: Room,
}

impl Movie {
    /// The file, if the movie is in blocks.
    pub fn film(&self) -> Option<&Film> {
        self.film.as_ref()
    }

    pub fn mr(&self) -> &Mr {
        &self.mr
    }

    /// The domain for queue pairs of its viewers.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    pub fn grant(&self) -> Grant {
        *lock(&self.used) = Instant::now();
        Grant {
            content: self.content,
            at: self.mr.remote(0),
            len: self.len,
            version: self.version,
        }
    }

    /// A region with these bytes.
    ///
    /// # Errors
    /// [`weft_verbs::Error`] without memory.
    pub fn of_bytes(
        device: &Device,
        content: Content,
        bytes: &[u8],
    ) -> Result<Self, weft_verbs::Error> {
        let pd = device.alloc_pd()?;
        let mr = pd.alloc_mr(bytes.len().max(1), Access::REMOTE_READ)?;
        mr.write(0, bytes)?;
        Ok(Self {
            mr,
            pd,
            len: bytes.len() as u64,
            version: [0; 16],
            content,
            used: Mutex::new(Instant::now()),
            film: None,
            _room: Room {
                len: 0,
                used: Arc::default(),
            },
        })
    }
}

/// A part of the memory that movies may take. Dropping it gives it back.
struct Room {
    len: u64,
    used: Arc<AtomicU64>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.used.fetch_sub(self.len, Ordering::AcqRel);
    }
}

/// The movies of a directory that are in memory.
pub struct Shelf {
    device: Device,
    dir: OwnedFd,
    limit: u64,
    used: Arc<AtomicU64>,
    movies: Mutex<HashMap<String, Arc<Movie>>>,
    catalogue: Mutex<Option<(Vec<u8>, Arc<Movie>)>>,
}

impl Shelf {
    /// For the files below `dir`, in at most `limit` bytes of memory.
    pub fn new(device: &Device, dir: OwnedFd, limit: u64) -> Self {
        Self {
            device: device.clone(),
            dir,
            limit,
            used: Arc::default(),
            movies: Mutex::default(),
            catalogue: Mutex::default(),
        }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of memory that movies take.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The catalogue as it is now.
    ///
    /// # Errors
    /// [`Refusal::Unreadable`], [`Refusal::NoRoom`].
    pub fn catalogue(&self) -> Result<Arc<Movie>, Refusal> {
        let titles = names::list(self.dir.as_fd()).map_err(|e| {
            tracing::warn!("cannot list the directory: {e}");
            Refusal::Unreadable
        })?;
        let text = serde_json::to_vec(&titles).map_err(|_| Refusal::Unreadable)?;
        let mut kept = lock(&self.catalogue);
        if let Some((of, movie)) = &*kept
            && *of == text
        {
            return Ok(Arc::clone(movie));
        }
        let movie = Movie::of_bytes(&self.device, Content::Catalogue, &text);
        let movie = Arc::new(movie.map_err(|_| Refusal::NoRoom)?);
        *kept = Some((text, Arc::clone(&movie)));
        Ok(movie)
    }

    /// The movie of a name, if it is in memory as its file is now; else the file has to be read, which takes long.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn find(&self, name: &str) -> Result<Option<Arc<Movie>>, Refusal> {
        let (_, stamp) = self.open(name)?;
        let movies = lock(&self.movies);
        let found = movies.get(name).filter(|m| m.version == stamp.version());
        // One in blocks that nobody watches is read whole, if it can be by now.
        let stays =
            |m: &&Arc<Movie>| m.film.is_none() || m.len > self.limit || Arc::strong_count(m) > 1;
        // A file that has changed may be again as it was, or have another name or mode only.
        let is_open =
            |m: &&Arc<Movie>| !m.film.as_ref().is_some_and(|f| lock(&f.cache).is_closed());
        Ok(found.filter(stays).filter(is_open).cloned())
    }

    fn open(&self, name: &str) -> Result<(File, Stamp), Refusal> {
        if names::media_type(name).is_none() {
            return Err(Refusal::NoSuchTitle);
        }
        let unreadable = |e: io::Error| match e.kind() {
            io::ErrorKind::PermissionDenied => Refusal::Unreadable,
            _ => Refusal::NoSuchTitle,
        };
        let file = names::open_below(self.dir.as_fd(), name).map_err(unreadable)?;
        let stamp = Stamp::of(&file).map_err(unreadable)?;
        Ok((file, stamp))
    }

    /// Reads the file of a name into memory; or serves it in blocks, if there is no room for it.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn load(&self, name: &str) -> Result<Arc<Movie>, Refusal> {
        for _ in 0..TRIES {
            let (file, stamp) = self.open(name)?;
            let len = stamp.length();
            let Some(room) = self.make_room(len) else {
                return self.in_blocks(name, file, stamp);
            };
            let (pd, mr) = self.allocate(name, len)?;
            let whole = blocks::read(&mr, &file, (0, len), 0).map_err(|e| {
                tracing::warn!("{name}: {e}");
                Refusal::Unreadable
            })?;
            // Otherwise the file has changed meanwhile.
            if whole && Stamp::of(&file).is_ok_and(|now| now == stamp) {
                // Viewers by TCP in the clear then get the pages themselves.
                mr.freeze().map_err(|_| Refusal::NoRoom)?;
                return Ok(self.keep(
                    name,
                    Movie {
                        mr,
                        pd,
                        len,
                        version: stamp.version(),
                        content: Content::Movie,
                        used: Mutex::new(Instant::now()),
                        film: None,
                        _room: room,
                    },
                ));
            }
        }
        tracing::warn!("{name}: somebody is writing it");
        Err(Refusal::Unreadable)
    }

    /// Serves a file from slots in half of the memory, or in as much less as can be had.
    fn in_blocks(&self, name: &str, file: File, stamp: Stamp) -> Result<Arc<Movie>, Refusal> {
        let len = stamp.length();
        let mut memory = self.limit / 2;
        while memory >= blocks::LEAST {
            let layout = blocks::layout(memory);
            let taken = layout.region_len();
            // With slots for all of it, there would be room for the movie itself.
            if taken < len
                && let Some(room) = self.make_room(taken)
            {
                let (pd, mr) = self.allocate(name, taken)?;
                return Ok(self.keep(
                    name,
                    Movie {
                        mr,
                        pd,
                        len,
                        version: stamp.version(),
                        content: Content::Blocks(layout),
                        used: Mutex::new(Instant::now()),
                        film: Some(Film::new(file, stamp, len, layout)),
                        _room: room,
                    },
                ));
            }
            memory /= 2;
        }
        tracing::warn!(
            "{name}: no room for its {len} bytes, nor for blocks of it: {} of {} are taken",
            self.used(),
            self.limit
        );
        Err(Refusal::NoRoom)
    }

    fn keep(&self, name: &str, movie: Movie) -> Arc<Movie> {
        let movie = Arc::new(movie);
        let old = lock(&self.movies).insert(name.into(), Arc::clone(&movie));
        drop(old);
        movie
    }

    fn allocate(&self, name: &str, len: u64) -> Result<(Pd, Mr), Refusal> {
        let allocate = || {
            let len = usize::try_from(len).map_err(|_| weft_verbs::Error::Invalid("length"))?;
            let pd = self.device.alloc_pd()?;
            let mr = pd.alloc_mr(len.max(1), Access::REMOTE_READ)?;
            Ok((pd, mr))
        };
        allocate().map_err(|e: weft_verbs::Error| {
            tracing::warn!("{name}: {e}");
            Refusal::NoRoom
        })
    }

    /// Reserves `len` bytes of the memory for movies; movies without viewers are dropped, the least recently used first.
    fn make_room(&self, len: u64) -> Option<Room> {
        if len > self.limit {
            return None;
        }
        loop {
            let taken = self
                .used
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                    used.checked_add(len).filter(|&sum| sum <= self.limit)
                });
            if taken.is_ok() {
                return Some(Room {
                    len,
                    used: Arc::clone(&self.used),
                });
            }
            let mut movies = lock(&self.movies);
            let unused = movies.iter().filter(|(_, m)| Arc::strong_count(m) == 1);
            let oldest = unused.min_by_key(|(_, m)| *lock(&m.used));
            let oldest = oldest.map(|(name, _)| name.clone())?;
            let gone = movies.remove(&oldest);
            drop(movies);
            drop(gone);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shelf(dir: &std::path::Path, limit: u64) -> Shelf {
        let device = Device::open().unwrap();
        Shelf::new(&device, File::open(dir).unwrap().into(), limit)
    }

    fn bytes(movie: &Movie) -> Vec<u8> {
        movie.mr.to_vec(0, movie.len as usize).unwrap()
    }

    #[test]
    fn a_file_that_changes_is_another_movie_and_viewers_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.mp4");
        std::fs::write(&path, [1; 5000]).unwrap();
        let shelf = shelf(dir.path(), 1 << 20);
        assert!(shelf.find("a.mp4").unwrap().is_none());
        let first = shelf.load("a.mp4").unwrap();
        assert!(Arc::ptr_eq(&first, &shelf.find("a.mp4").unwrap().unwrap()));
        std::fs::write(&path, [2; 100]).unwrap();
        assert!(shelf.find("a.mp4").unwrap().is_none(), "truncated");
        let second = shelf.load("a.mp4").unwrap();
        assert_eq!(
            (bytes(&first), bytes(&second)),
            (vec![1; 5000], vec![2; 100])
        );
        assert_ne!(first.grant().version, second.grant().version);
        assert_eq!(shelf.used(), 5100);
        drop(first);
        assert_eq!(shelf.used(), 100, "nobody watches it any more");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(shelf.find("a.mp4").err(), Some(Refusal::NoSuchTitle));
        assert_eq!(shelf.load("notes.txt").err(), Some(Refusal::NoSuchTitle));
    }

    #[test]
    fn what_nobody_watches_makes_room() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.mp4", "b.mp4", "c.mp4", "d.mp4"] {
            std::fs::write(dir.path().join(name), [7; 4000]).unwrap();
        }
        std::fs::write(dir.path().join("empty.mp4"), []).unwrap();
        let shelf = shelf(dir.path(), 10_000);
        let a = shelf.load("a.mp4").unwrap();
        drop(shelf.load("b.mp4").unwrap());
        let c = shelf.load("c.mp4").unwrap();
        assert!(shelf.find("b.mp4").unwrap().is_none(), "it made room");
        assert_eq!(shelf.load("d.mp4").err(), Some(Refusal::NoRoom));
        drop(a);
        let d = shelf.load("d.mp4").unwrap();
        assert_eq!(bytes(&c), bytes(&d));
        assert_eq!(shelf.load("empty.mp4").unwrap().grant().len, 0);
    }

    #[test]
    fn what_does_not_fit_is_served_in_blocks_within_the_memory() {
        let dir = tempfile::tempdir().unwrap();
        for (name, len) in [("a.mp4", 5 << 20), ("b.mp4", 3 << 20), ("c.mp4", 5 << 20)] {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_len(len).unwrap();
        }
        let limit = 4 << 20;
        let shelf = shelf(dir.path(), limit);
        let a = shelf.load("a.mp4").unwrap();
        assert_eq!(a.len, 5 << 20);
        assert!(a.film().is_some() && a.mr().len() as u64 == shelf.used());
        assert!((1 << 20..=2 << 20).contains(&shelf.used()));
        assert!(Arc::ptr_eq(&a, &shelf.find("a.mp4").unwrap().unwrap()));
        // It would fit, were it alone.
        let b = shelf.load("b.mp4").unwrap();
        assert!(b.film().is_some() && shelf.used() <= limit);
        // The memory that is left is too little for blocks of the third.
        assert_eq!(shelf.load("c.mp4").err(), Some(Refusal::NoRoom));
        // The file of the first was written to, and is again as it was.
        let place = crate::wire::Place {
            slot: 0,
            generation: 1,
        };
        let changed = Err(crate::wire::Denial::Changed);
        lock(&a.film().unwrap().cache).filled(Instant::now(), place, changed);
        assert!(shelf.find("a.mp4").unwrap().is_none(), "it gives no blocks");
        drop((a, b));
        assert!(shelf.find("b.mp4").unwrap().is_none(), "it fits now");
        let b = shelf.load("b.mp4").unwrap();
        assert!(b.film().is_none() && shelf.used() <= limit);
    }

    #[test]
    fn the_catalogue_is_made_anew_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.mp4"), "a").unwrap();
        let shelf = shelf(dir.path(), 1 << 20);
        let first = shelf.catalogue().unwrap();
        assert!(Arc::ptr_eq(&first, &shelf.catalogue().unwrap()));
        std::fs::write(dir.path().join("b.mp4"), "b").unwrap();
        let text = bytes(&shelf.catalogue().unwrap());
        let titles: Vec<names::Title> = serde_json::from_slice(&text).unwrap();
        assert_eq!(titles.len(), 2);
    }
}
