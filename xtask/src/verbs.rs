//! libibverbs and librdmacm for unmodified programs. All state of both is in libibverbs; librdmacm's names jump to it.

use std::fs;
use std::path::Path;

use crate::library::{self, Library, Symbol, at, read, symlink, write};

const VERBS: &str = "libibverbs.so.1";
const RDMACM: &str = "librdmacm.so.1";
/// For `LD_PRELOAD`: the devices in `/sys` and `/dev`.
const SYSFS: &str = "libweft-sysfs.so";
/// The symbol that the libibverbs entry point calls.
const TREE: &str = "weft_sysfs_tree";
/// A provider of libfabric, found through `FI_PROVIDER_PATH`.
const FI: &str = "libweft-fi.so";
/// The version of what the others jump to or call.
const BETWEEN: &str = "WEFT_PRIVATE_1";
/// The libraries that pkg-config reports, and the ones that these replace.
const STANDS_FOR: [(&str, &str, &str); 2] = [
    ("ibverbs", "1.14.44.0", "RDMA verbs (weft's, in user space)"),
    (
        "rdmacm",
        "1.3.44.0",
        "RDMA connection manager (weft's, in user space)",
    ),
];

/// Builds the libraries and writes all files below `dir`. Returns a summary.
pub(crate) fn lay_out(dir: &Path, profile: library::Profile) -> Result<String, String> {
    let root = library::root()?;
    let symbols = |of: &str| {
        let path = root.join("doors/libibverbs/symbols").join(of);
        library::parse(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))
    };
    let mut verbs = symbols("ibverbs")?;
    let public = verbs.len();
    let mut rdmacm = symbols("rdmacm")?;
    jump(&mut rdmacm, "weft_cm_", &mut verbs);
    verbs.push(between(TREE.into()));

    let (archive, version) = library::build(root, "weft-libibverbs", "ibverbs", profile)?;
    let lib = dir.join("lib");
    fs::create_dir_all(lib.join("pkgconfig")).map_err(at(&lib))?;
    let full = |soname: &str| format!("{soname}.{version}");
    let verbs_file = lib.join(full(VERBS));
    let inputs = library::inputs(&archive);
    Library {
        path: &verbs_file,
        soname: VERBS,
        symbols: &verbs,
        forwards: false,
        inputs: &inputs,
        strip: profile.strips(),
    }
    .link()?;
    let inputs = [
        "-nostdlib",
        &verbs_file.display().to_string(),
        "-Wl,--enable-new-dtags",
        "-Wl,-rpath,$ORIGIN",
    ];
    Library {
        path: &lib.join(full(RDMACM)),
        soname: RDMACM,
        symbols: &rdmacm,
        forwards: true,
        inputs: &inputs.map(String::from),
        strip: profile.strips(),
    }
    .link()?;
    for (package, library, name) in [
        ("weft-libsysfs", "weft_sysfs_preload", SYSFS),
        ("weft-libfi", "weft_fi_provider", FI),
    ] {
        let (archive, _) = library::build(root, package, library, profile)?;
        let built = archive.with_extension("so");
        library::copy(&built, &lib.join(name))?;
    }
    let include = dir.join("include/infiniband");
    fs::create_dir_all(&include).map_err(at(&include))?;
    let header = root.join("include/infiniband/weft_dgram.h");
    library::copy(&header, &include.join("weft_dgram.h"))?;
    for (soname, (name, version, description)) in [VERBS, RDMACM].into_iter().zip(STANDS_FOR) {
        symlink(&full(soname), &lib.join(soname))?;
        symlink(soname, &lib.join(format!("lib{name}.so")))?;
        let text = pkg_config(name, version, description);
        write(&lib.join(format!("pkgconfig/lib{name}.pc")), &text)?;
    }
    Ok(format!(
        "{}: {public} names; {RDMACM}: {} names; {SYSFS}; {FI}",
        verbs_file.display(),
        rdmacm.len()
    ))
}

/// Makes each name of a library jump to its twin in libibverbs, whose name begins with `prefix`.
fn jump(symbols: &mut [Symbol], prefix: &str, verbs: &mut Vec<Symbol>) {
    for symbol in symbols {
        let function = format!("{prefix}{}", symbol.name);
        verbs.push(between(function.clone()));
        symbol.function = Some(function);
    }
}

/// A function of libibverbs for our other libraries only.
fn between(name: String) -> Symbol {
    Symbol {
        version: BETWEEN.into(),
        name,
        hidden: false,
        function: None,
    }
}

/// The headers are the distribution's, in the compiler's default search path.
fn pkg_config(name: &str, version: &str, description: &str) -> String {
    let requires = if name == "rdmacm" {
        "Requires: libibverbs\n"
    } else {
        ""
    };
    format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\n\nName: lib{name}\nDescription: {description}\n\
         Version: {version}\n{requires}Libs: -L${{libdir}} -l{name}\n"
    )
}
