//! The life of an open device, and its end: when the device goes away, every object on it is destroyed, whoever holds it.
//!
//! The kernel's removal of a device (`rdma link delete`, a driver that is unloaded) waits until no process has it open. Programs hold objects for as long as
//! they like. So each object of the libraries is in a [`Handle`]: its owner destroys it by dropping the handle, or [`Life::end`] does, and afterwards calls
//! on it say that the device was removed.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;
use weft_cverbs::{
    IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, Zeroed, ibv_async_event, ibv_context,
};
use weft_lock::ShortLock;

use crate::error::{Error, status};
use crate::fork;
use crate::library::Libraries;
use crate::watch::{End, Look, Source, Watched, lock, watch, without_blocking};

/// The kinds of objects, in the order in which they are destroyed: none is needed by a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Qp,
    Srq,
    Cq,
    Channel,
    Ah,
    Mr,
    Pd,
}

type Key = (Kind, u64);

/// What [`Life::end`] destroys.
trait Object: Send + Sync {
    fn destroy(&self) -> Result<(), i32>;
}

/// No object is destroyed by [`Life::end`] while one of these is there.
pub(crate) type Calling<'a> = RwLockReadGuard<'a, ()>;

/// A change of a port (`IBV_EVENT_PORT_ACTIVE`, `IBV_EVENT_PORT_ERR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortChange {
    /// Its number, from 1.
    pub port: u32,
    /// Whether messages can go through it.
    pub is_active: bool,
}

type PortHook = Box<dyn Fn(PortChange) + Send + Sync>;

/// One open device.
pub(crate) struct Life {
    libraries: &'static Libraries,
    context: *mut ibv_context,
    device: String,
    end: OnceLock<End>,
    /// Held by calls that make, use or destroy objects, and alone by [`Life::end`].
    calls: RwLock<()>,
    objects: Mutex<BTreeMap<Key, Weak<dyn Object>>>,
    /// Connections by the addresses of their queue pairs.
    connections: Mutex<HashMap<usize, Weak<Watched>>>,
    port_hook: OnceLock<PortHook>,
    /// Readable for ever once the device is gone.
    gone: OwnedFd,
    /// Tells that the device is being removed.
    monitor: Option<Arc<dyn Source>>,
    /// The watching thread's key, if there is a monitor.
    key: OnceLock<u64>,
}

// SAFETY: contexts may be used by any thread (`ibv_open_device`).
unsafe impl Send for Life {}
// SAFETY: as above.
unsafe impl Sync for Life {}

/// Those of the contexts of librdmacm, of which a process has one for each device.
static LIVES: Mutex<Option<HashMap<usize, Weak<Life>>>> = Mutex::new(None);

impl Life {
    fn new(
        libraries: &'static Libraries,
        context: *mut ibv_context,
        device: &str,
        monitor: Option<Arc<dyn Source>>,
    ) -> Result<Self, Error> {
        let gone = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|e| Error::call(device, "eventfd", e.raw_os_error()))?;
        Ok(Self {
            libraries,
            context,
            device: device.to_owned(),
            end: OnceLock::new(),
            calls: RwLock::default(),
            objects: Mutex::default(),
            connections: Mutex::default(),
            port_hook: OnceLock::new(),
            gone,
            monitor,
            key: OnceLock::new(),
        })
    }

    /// That of a context of our own: nobody reads its events.
    pub(crate) fn of_opened(
        libraries: &'static Libraries,
        context: *mut ibv_context,
        device: &str,
    ) -> Result<Arc<Self>, Error> {
        Self::new(libraries, context, device, None).map(Arc::new)
    }

    /// That of a context of librdmacm, which stays open as long as `monitor`.
    pub(crate) fn of_cm(
        libraries: &'static Libraries,
        context: *mut ibv_context,
        device: &str,
        monitor: impl FnOnce() -> Result<Option<Arc<dyn Source>>, Error>,
    ) -> Result<Arc<Self>, Error> {
        let mut lives = loop {
            let mut lives = lock(&LIVES);
            match lives.get_or_insert_default().get(&context.addr()) {
                None => break lives,
                Some(life) => {
                    if let Some(life) = life.upgrade() {
                        return Ok(life);
                    }
                }
            }
            // It is being dropped, and leaves the watching thread before this list.
            drop(lives);
            std::thread::yield_now();
        };
        let life = Arc::new(Self::new(libraries, context, device, monitor()?)?);
        let list = lives.get_or_insert_default();
        list.insert(context.addr(), Arc::downgrade(&life));
        // The thread may hold it longer than the program has the context, which only a monitor keeps open then.
        let joined = match &life.monitor {
            Some(_) => life.join_watch(),
            None => Ok(()),
        };
        drop(lives);
        joined?;
        Ok(life)
    }

    fn join_watch(self: &Arc<Self>) -> Result<(), Error> {
        without_blocking(self.events()).map_err(|e| self.failed("fcntl", e.raw_os_error()))?;
        let look: Weak<dyn Look> = Arc::downgrade(self) as Weak<dyn Look>;
        let _ = self.key.set(watch()?.join(look, &self.watched())?);
        Ok(())
    }

    /// The descriptor of asynchronous events.
    fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor of a context that is open as long as this lives.
        unsafe { BorrowedFd::borrow_raw((*self.context).async_fd) }
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        let monitor = self.monitor.as_ref().map(|monitor| monitor.fd());
        monitor.into_iter().chain([self.events()]).collect()
    }

    fn failed(&self, call: &str, errno: i32) -> Error {
        Error::call(&self.device, call, errno)
    }

    /// Before a call that makes or uses objects, or asks the device.
    pub(crate) fn enter(&self) -> Result<Calling<'_>, Error> {
        // Who holds the lock may be a thread of the parent.
        if fork::is_child() {
            return Err(fork::error(&self.device));
        }
        let calling = self.calling();
        match self.over() {
            None => Ok(calling),
            Some(error) => Err(error),
        }
    }

    /// As [`Life::enter`], for calls that do nothing once the object is destroyed.
    pub(crate) fn calling(&self) -> Calling<'_> {
        self.calls.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why no call can succeed any more.
    pub(crate) fn over(&self) -> Option<Error> {
        if fork::is_child() {
            return Some(fork::error(&self.device));
        }
        self.end.get().map(|_| Error::removed(&self.device))
    }

    /// Readable for ever once the device is gone.
    pub(crate) fn gone(&self) -> BorrowedFd<'_> {
        self.gone.as_fd()
    }

    /// Readable while this descriptor is, and once the device is gone.
    pub(crate) fn readable_or_gone(&self, fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [fd, self.gone()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&ready, fd, data, epoll::EventFlags::IN)?;
        }
        Ok(ready)
    }

    /// The connection of the queue pair at this address: its program is told of the end, and of what happens to the queue pair.
    pub(crate) fn watch(&self, qp: usize, connection: &Arc<Watched>) {
        let mut connections = lock(&self.connections);
        connections.retain(|_, connection| connection.strong_count() > 0);
        connections.insert(qp, Arc::downgrade(connection));
        drop(connections);
        // It may have ended meanwhile.
        if let Some(end) = self.end.get() {
            connection.ended(*end);
        }
    }

    /// Calls this when a port changes; only the first hook counts.
    pub(crate) fn on_port(&self, hook: PortHook) {
        let _ = self.port_hook.set(hook);
    }

    /// The device is gone: tells the programs, destroys all objects, and closes the device. The first call does it.
    pub(crate) fn end(&self) {
        if self.end.set(End::DeviceRemoved).is_err() {
            return;
        }
        let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        for connection in connections.iter().filter_map(Weak::upgrade) {
            connection.ended(End::DeviceRemoved);
        }
        let _alone = self.calls.write().unwrap_or_else(PoisonError::into_inner);
        let objects = std::mem::take(&mut *lock(&self.objects));
        for object in objects.values().filter_map(Weak::upgrade) {
            let _ = object.destroy();
        }
        self.close();
        let _ = rustix::io::write(&self.gone, &1u64.to_ne_bytes());
    }

    /// Closes the device's files. Their numbers belong to the library's context, which stays for as long as the library likes (librdmacm: for the life of
    /// the process), so the numbers get another file.
    fn close(&self) {
        let Ok(null) = std::fs::File::open("/dev/null") else {
            return;
        };
        // A child of fork may hold the file too, which then stays in the set.
        if let Ok(watch) = watch() {
            watch.ignore(self.events());
        }
        // SAFETY: a context that is open as long as this lives. Nobody uses the files any more: `enter` and `Handle::with` refuse.
        unsafe {
            for file in [(*self.context).async_fd, (*self.context).cmd_fd] {
                libc::dup3(null.as_raw_fd(), file, libc::O_CLOEXEC);
            }
        }
    }

    /// Takes the asynchronous events that are there, on the watching thread.
    pub(crate) fn take_events(&self) {
        // Without a monitor nobody does, and the call would block.
        if self.key.get().is_none() {
            return;
        }
        let calls = &self.libraries.verbs;
        while self.end.get().is_none() {
            let mut event = ibv_async_event::zeroed();
            // SAFETY: an open context, and a place for the answer. Of what the event names only the address is used.
            let (kind, subject, port) = unsafe {
                if (calls.ibv_get_async_event)(self.context, &raw mut event) != 0 {
                    return;
                }
                let element = event.element;
                (event.event_type, element.qp.addr(), element.port_num)
            };
            let end = match kind {
                IBV_EVENT_QP_FATAL => Some(End::Failed),
                IBV_EVENT_QP_REQ_ERR => Some(End::BadRequest),
                IBV_EVENT_QP_ACCESS_ERR => Some(End::BadAccess),
                _ => None,
            };
            // The queue pair is not destroyed before the event is acknowledged. Afterwards another one may have its address.
            let connection = end.and_then(|end| {
                let connection = lock(&self.connections).get(&subject).cloned();
                connection.map(|connection| (connection, end))
            });
            // SAFETY: an event that was taken, once. What hears of it may destroy the object, which waits for this.
            unsafe { (calls.ibv_ack_async_event)(&raw mut event) };
            if let Some((connection, end)) = connection
                && let Some(connection) = connection.upgrade()
            {
                connection.ended(end);
            }
            match kind {
                IBV_EVENT_DEVICE_FATAL => self.end(),
                IBV_EVENT_PORT_ACTIVE | IBV_EVENT_PORT_ERR => {
                    if let Some(hook) = self.port_hook.get() {
                        hook(PortChange {
                            port: port.cast_unsigned(),
                            is_active: kind == IBV_EVENT_PORT_ACTIVE,
                        });
                    }
                }
                _ => {}
            }
        }
    }
}

impl Look for Life {
    fn look(&self) {
        if let Some(monitor) = &self.monitor {
            match monitor.try_end() {
                Ok(Some(End::DeviceRemoved)) => self.end(),
                Ok(_) => {}
                Err(_) => {
                    if let Ok(watch) = watch() {
                        watch.ignore(monitor.fd());
                    }
                }
            }
        }
        self.take_events();
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // In a child of fork, who holds the locks may be a thread of the parent.
        if fork::is_child() {
            return;
        }
        if let (Some(key), Ok(watch)) = (self.key.get(), watch()) {
            watch.leave(*key, &self.watched());
        }
        if let Some(lives) = &mut *lock(&LIVES) {
            let key = self.context.addr();
            if lives
                .get(&key)
                .is_some_and(|life| ptr::eq(life.as_ptr(), self))
            {
                lives.remove(&key);
            }
        }
    }
}

/// An object of the libraries, until it is destroyed: when this is dropped, or with the device.
pub(crate) struct Handle<T: 'static> {
    slot: Arc<Slot<T>>,
    life: Arc<Life>,
    key: Key,
}

struct Slot<T> {
    /// NULL once it is destroyed.
    raw: ShortLock<*mut T>,
    destroy: Box<dyn Fn(*mut T) -> c_int + Send + Sync>,
    result: OnceLock<Result<(), i32>>,
}

// SAFETY: the libraries' objects may be used by any thread.
unsafe impl<T> Send for Slot<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Slot<T> {}

impl<T> Object for Slot<T> {
    fn destroy(&self) -> Result<(), i32> {
        // Calls that use it hold the lock, and later ones find NULL.
        let raw = std::mem::replace(&mut *self.raw.lock(), ptr::null_mut());
        if raw.is_null() {
            return self.result.get().copied().unwrap_or(Ok(()));
        }
        *self
            .result
            .get_or_init(|| match status((self.destroy)(raw)) {
                // The driver lets go of a removed device although programs have it open: the kernel has destroyed all objects then.
                Err(libc::EIO) => Ok(()),
                result => result,
            })
    }
}

impl<T> Handle<T> {
    /// Takes over an object that was made on this device; `destroy` is called once, when nobody uses it.
    pub(crate) fn new(
        life: &Arc<Life>,
        _calling: &Calling<'_>,
        kind: Kind,
        raw: *mut T,
        destroy: impl Fn(*mut T) -> c_int + Send + Sync + 'static,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let slot = Arc::new(Slot {
            raw: ShortLock::new(raw),
            destroy: Box::new(destroy),
            result: OnceLock::new(),
        });
        let key = (kind, NEXT.fetch_add(1, Ordering::Relaxed));
        let object: Weak<dyn Object> = Arc::downgrade(&slot) as Weak<dyn Object>;
        lock(&life.objects).insert(key, object);
        Self {
            slot,
            life: Arc::clone(life),
            key,
        }
    }

    /// Calls this with the object, which is not destroyed meanwhile.
    ///
    /// # Errors
    /// It is destroyed, because the device was removed; or this is a child of `fork`.
    #[inline]
    pub(crate) fn with<R>(&self, call: impl FnOnce(*mut T) -> R) -> Result<R, Error> {
        // In a child, who holds the lock may be a thread of the parent.
        if fork::is_child() {
            return Err(self.over());
        }
        let raw = self.slot.raw.lock();
        if raw.is_null() {
            return Err(self.over());
        }
        Ok(call(*raw))
    }

    #[cold]
    fn over(&self) -> Error {
        let removed = || Error::removed(&self.life.device);
        self.life.over().unwrap_or_else(removed)
    }

    /// The object, for a call under [`Life::enter`].
    pub(crate) fn raw(&self) -> *mut T {
        *self.slot.raw.lock()
    }

    /// Destroys it, once.
    ///
    /// # Errors
    /// The error number of the call.
    pub(crate) fn destroy(&self) -> Result<(), i32> {
        // In a child of fork it is the parent's.
        if fork::is_child() {
            return Err(libc::EPERM);
        }
        let _calling = self.life.calling();
        lock(&self.life.objects).remove(&self.key);
        self.slot.destroy()
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destroyed(answer: c_int) -> Result<(), i32> {
        let slot = Slot {
            raw: ShortLock::new(ptr::dangling_mut::<u8>()),
            destroy: Box::new(move |_| answer),
            result: OnceLock::new(),
        };
        let first = slot.destroy();
        assert_eq!(slot.destroy(), first, "once");
        first
    }

    #[test]
    fn the_objects_of_a_device_that_its_driver_has_let_go_are_destroyed() {
        assert_eq!(destroyed(0), Ok(()));
        assert_eq!(destroyed(libc::EIO), Ok(()));
        assert_eq!(destroyed(libc::EBUSY), Err(libc::EBUSY));
    }
}
