//! Values of options, and what servers say and need.

pub use weft_service::text::carrier;

/// Parses a number of bytes above 0, the value of an option.
pub fn size(text: &str) -> Result<u64, String> {
    bytes(text).and_then(|size| match size {
        0 => Err("write a number above 0".to_owned()),
        _ => Ok(size),
    })
}

/// Parses a number of bytes, which may be 0.
pub fn bytes(text: &str) -> Result<u64, String> {
    weft_service::size::parse(text).map_err(|e| e.to_string())
}

/// A count of 1 to 65,536.
pub fn at_least_one() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(1..=65_536)
}

/// Raises the limit of open files as far as the system allows: each viewer or connection takes a few.
pub fn raise_nofile() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(e) = setrlimit(Resource::Nofile, raised) {
        tracing::info!("the limit of open files stays at {:?}: {e}", limit.current);
    }
}
