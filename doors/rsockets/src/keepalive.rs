//! Signs of life on connections that ask for them: one thread for all of a process, started by the first.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

/// An object that can show its peer that it is alive.
pub(crate) trait Alive: Send + Sync {
    fn keep_alive(&self);
}

struct Client {
    socket: Weak<dyn Alive>,
    every: Duration,
    next: Instant,
}

#[derive(Default)]
struct Pulse {
    clients: Mutex<Vec<Client>>,
    changed: Condvar,
}

/// Send a sign of life so far apart, or no more.
pub(crate) fn set(socket: &Arc<dyn Alive>, every: Option<Duration>) -> Result<(), Errno> {
    static PULSE: PerProcess<Pulse> = PerProcess::new();
    let pulse = PULSE.get(|| {
        let pulse = Arc::new(Pulse::default());
        let run = Arc::clone(&pulse);
        std::thread::Builder::new()
            .name("rsockets-pulse".to_owned())
            .spawn(move || run.run())
            .map_err(|_| Errno::AGAIN)?;
        Ok::<_, Errno>(pulse)
    })?;
    let mut clients = lock(&pulse.clients);
    clients.retain(|client| !std::ptr::addr_eq(client.socket.as_ptr(), Arc::as_ptr(socket)));
    if let Some(every) = every {
        clients.push(Client {
            socket: Arc::downgrade(socket),
            every,
            next: Instant::now() + every,
        });
    }
    pulse.changed.notify_one();
    Ok(())
}

impl Pulse {
    fn run(&self) {
        let mut clients = lock(&self.clients);
        loop {
            let now = Instant::now();
            let mut due = Vec::new();
            clients.retain_mut(|client| {
                if client.next <= now {
                    client.next = now + client.every;
                    due.extend(client.socket.upgrade());
                }
                client.socket.strong_count() > 0
            });
            let next = clients.iter().map(|client| client.next).min();
            if !due.is_empty() {
                drop(clients);
                for socket in due {
                    socket.keep_alive();
                }
                clients = lock(&self.clients);
                continue;
            }
            clients = match next {
                Some(next) => {
                    let left = next.saturating_duration_since(now);
                    let woken = self.changed.wait_timeout(clients, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self
                    .changed
                    .wait(clients)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}
