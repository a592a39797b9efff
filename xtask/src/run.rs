//! The preload libraries of `weft run`, `weft advise` and `weft fs run`.

use std::fs;
use std::path::Path;

use crate::library::{self, at};

/// Builds the preload libraries of `weft run` and writes them below `dir`. Returns a summary.
pub(crate) fn lay_out(dir: &Path, profile: library::Profile) -> Result<String, String> {
    let crate_name = "weft_malloc_preload";
    put(
        dir,
        profile,
        "weft-libmalloc",
        crate_name,
        "libweft-malloc.so",
    )?;
    put(
        dir,
        profile,
        "weft-preload",
        "weft_run_preload",
        "libweft-run.so",
    )
}

/// The same for `weft advise`.
pub(crate) fn lay_out_advise(dir: &Path, profile: library::Profile) -> Result<String, String> {
    let crate_name = "weft_advise_preload";
    put(
        dir,
        profile,
        "weft-libadvise",
        crate_name,
        "libweft-advise.so",
    )
}

/// The same for `weft fs run`.
pub(crate) fn lay_out_fs(dir: &Path, profile: library::Profile) -> Result<String, String> {
    put(
        dir,
        profile,
        "weft-libfs",
        "weft_fs_preload",
        "libweft-fs.so",
    )
}

fn put(
    dir: &Path,
    profile: library::Profile,
    package: &str,
    crate_name: &str,
    name: &str,
) -> Result<String, String> {
    let (archive, _) = library::build(library::root()?, package, crate_name, profile)?;
    let built = archive.with_extension("so");
    let lib = dir.join("lib");
    fs::create_dir_all(&lib).map_err(at(&lib))?;
    let file = lib.join(name);
    library::copy(&built, &file)?;
    Ok(file.display().to_string())
}
