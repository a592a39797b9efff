//! The preload library of `weft run`.

use std::fs;
use std::path::Path;

use crate::library::{self, at};

const NAME: &str = "libweft-run.so";

/// Builds it and puts it below `dir`. Returns what it did.
pub(crate) fn lay_out(dir: &Path, release: bool) -> Result<String, String> {
    let (archive, _) = library::build(
        library::root()?,
        "weft-preload",
        "weft_run_preload",
        release,
    )?;
    let built = archive.with_extension("so");
    let lib = dir.join("lib");
    fs::create_dir_all(&lib).map_err(at(&lib))?;
    let file = lib.join(NAME);
    fs::copy(&built, &file).map_err(at(&built))?;
    Ok(file.display().to_string())
}
