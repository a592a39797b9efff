//! Calls that wait until locks are released.

/// A call to be made when all locks are released.
pub(crate) struct Late(Box<dyn FnOnce() + Send>);

impl Late {
    pub(crate) fn new(f: impl FnOnce() + Send + 'static) -> Late {
        Late(Box::new(f))
    }
    pub(crate) fn run(self) {
        (self.0)();
    }
}
