//! The server of files: it answers requests, and does nothing afterwards, except for movies in blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::desk::Desk;
use crate::shelf::{Movie, Shelf};
use crate::viewers::{Caller, Host};
use crate::wire::{Refusal, Request};
use weft_service::lock;

/// Files that are read into memory at the same time.
const LOADERS: usize = 2;
/// Viewers that may wait for files to be read.
const WAITING: usize = 4096;

/// Answers requests for the titles of a shelf.
pub struct Server {
    shelf: Shelf,
    desk: Desk,
    loading: Mutex<Loading>,
}

#[derive(Default)]
struct Loading {
    /// Waiting viewers, by title.
    waiting: HashMap<String, Vec<Caller>>,
    /// Titles that no loader has begun.
    queue: VecDeque<String>,
    loaders: usize,
}

impl Server {
    pub fn new(shelf: Shelf) -> Arc<Self> {
        Arc::new(Self {
            desk: Desk::new(shelf.device()),
            shelf,
            loading: Mutex::default(),
        })
    }

    /// Bytes of memory that movies take.
    pub fn memory_used(&self) -> u64 {
        self.shelf.used()
    }

    fn reply(&self, caller: Caller, movie: &Result<Arc<Movie>, Refusal>) {
        match movie {
            Ok(movie) if movie.film().is_none() => {
                drop(caller.grant(movie.pd(), &movie.grant(), Arc::clone(movie) as Arc<_>));
            }
            Ok(movie) if caller.takes_blocks() => self.desk.seat(caller, movie),
            Ok(_) => caller.refuse(Refusal::NoRoom),
            Err(why) => caller.refuse(*why),
        }
    }

    fn load(self: Arc<Self>, name: String, caller: Caller) {
        let mut loading = lock(&self.loading);
        if loading.waiting.values().map(Vec::len).sum::<usize>() >= WAITING {
            drop(loading);
            caller.refuse(Refusal::Full);
            return;
        }
        if let Some(others) = loading.waiting.get_mut(&name) {
            others.push(caller);
            return;
        }
        loading.waiting.insert(name.clone(), vec![caller]);
        loading.queue.push_back(name);
        if loading.loaders == LOADERS {
            return;
        }
        loading.loaders += 1;
        drop(loading);
        let this = Arc::clone(&self);
        let spawned = std::thread::Builder::new()
            .name("weft-media-load".into())
            .spawn(move || this.load_all());
        if let Err(e) = spawned {
            tracing::warn!("cannot start a thread: {e}");
            self.load_all();
        }
    }

    /// Reads files until none is asked for.
    fn load_all(&self) {
        loop {
            let name = {
                let mut loading = lock(&self.loading);
                let Some(name) = loading.queue.pop_front() else {
                    loading.loaders -= 1;
                    return;
                };
                name
            };
            let movie = match self.shelf.find(&name) {
                Ok(Some(movie)) => Ok(movie),
                Ok(None) => self.shelf.load(&name),
                Err(why) => Err(why),
            };
            let callers = lock(&self.loading).waiting.remove(&name);
            for caller in callers.into_iter().flatten() {
                self.reply(caller, &movie);
            }
        }
    }
}

impl Host for Server {
    fn answer(self: Arc<Self>, caller: Caller, request: Request) {
        match request {
            Request::Catalogue => self.reply(caller, &self.shelf.catalogue()),
            Request::Title(name) => match self.shelf.find(&name) {
                Ok(Some(movie)) => self.reply(caller, &Ok(movie)),
                Ok(None) => self.load(name, caller),
                Err(why) => caller.refuse(why),
            },
        }
    }
}
