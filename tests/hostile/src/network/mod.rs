//! A hostile peer on the network: whatever TCP can bring.

pub mod connections;
pub mod headers;
pub mod layers;
pub mod startup;

use std::io;
use std::time::Duration;

use crate::peer::{End, Ending, Peer};
use crate::report::Report;
use crate::target::{Session, Target};

/// How long a victim may take to end a connection on which somebody lied. Nothing documents a limit; a victim that does it when it reads the
/// lie takes milliseconds, on a machine that is busy with other tests somewhat more.
pub const REACTION: Duration = Duration::from_secs(5);

/// What an attacker expects of a lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The connection ends.
    Ends,
    /// Whatever the victim likes: only what the suite checks of each victim counts.
    Any,
}

/// What is said on a connection that began well.
pub type Lie = Box<dyn Fn(&mut Session) -> io::Result<()>>;

/// One lie on a connection that began well.
pub struct Case {
    /// What it is.
    pub name: String,
    /// What comes of it.
    pub expect: Expect,
    /// How it is told.
    pub lie: Lie,
}

impl Case {
    /// A lie that ends the connection.
    pub fn ends(
        name: impl Into<String>,
        lie: impl Fn(&mut Session) -> io::Result<()> + 'static,
    ) -> Case {
        Case {
            name: name.into(),
            expect: Expect::Ends,
            lie: Box::new(lie),
        }
    }

    /// One that may.
    pub fn any(
        name: impl Into<String>,
        lie: impl Fn(&mut Session) -> io::Result<()> + 'static,
    ) -> Case {
        Case {
            expect: Expect::Any,
            ..Case::ends(name, lie)
        }
    }
}

/// Tells each lie on a connection of its own. With `HOSTILE_ONLY=TEXT` only those with the text in their names, and says which.
pub fn run(target: &Target, cases: &[Case], report: &mut Report) {
    let only = std::env::var("HOSTILE_ONLY").ok();
    for case in cases {
        if let Some(only) = &only {
            if !case.name.contains(only.as_str()) {
                continue;
            }
            println!("note {}", case.name);
        }
        report.case(&case.name, tell(target, case));
    }
}

fn tell(target: &Target, case: &Case) -> Result<(), String> {
    let mut session = target
        .join()
        .map_err(|e| format!("an honest beginning failed: {e}"))?;
    if let Err(e) = (case.lie)(&mut session) {
        // The victim has ended the connection while we were still talking, or takes no more.
        return match case.expect {
            Expect::Ends | Expect::Any if is_cut(&e) => Ok(()),
            Expect::Any if is_full(&e) => Ok(()),
            _ => Err(format!("cannot be sent: {e}")),
        };
    }
    if case.expect == Expect::Any {
        // What the victim has to say is looked at for a moment, so that it says it.
        session.peer.half_close();
        session.peer.ending(Duration::from_millis(50));
        return Ok(());
    }
    ended(session.peer.ending(REACTION))
}

/// Whether an error says that the victim has gone.
pub fn is_cut(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        e.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}

/// Whether an error says that the victim takes no more at the moment.
fn is_full(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
    )
}

pub fn ended(ending: Ending) -> Result<(), String> {
    match ending.end {
        End::Open => Err(format!("still open after {:?}: {ending:?}", ending.took)),
        End::Closed | End::Reset => Ok(()),
    }
}

/// That a connection ends within its documented limit.
pub fn within(peer: &mut Peer, limit: Duration) -> Result<(), String> {
    ended(peer.ending(limit + SLACK))
}

/// What a busy machine may add to a documented limit.
pub const SLACK: Duration = Duration::from_secs(3);
