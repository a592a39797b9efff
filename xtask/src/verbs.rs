//! libibverbs and librdmacm for unmodified programs. All state of both is in libibverbs; librdmacm's names jump to it.

use std::fs;
use std::path::Path;

use crate::library::{self, Library, Symbol, at, read, symlink, write};

const VERBS: &str = "libibverbs.so.1";
const RDMACM: &str = "librdmacm.so.1";
/// The version of what librdmacm jumps to.
const BETWEEN: &str = "WEFT_PRIVATE_1";
/// What programs that ask pkg-config are told: the libraries that these stand in for.
const STANDS_FOR: [(&str, &str, &str); 2] = [
    ("ibverbs", "1.14.44.0", "RDMA verbs (weft's, in user space)"),
    (
        "rdmacm",
        "1.3.44.0",
        "RDMA connection manager (weft's, in user space)",
    ),
];

/// Builds both libraries and puts everything below `dir`. Returns what it did.
pub(crate) fn lay_out(dir: &Path, release: bool) -> Result<String, String> {
    let root = library::root()?;
    let symbols = |of: &str| {
        let path = root.join("libs/ibverbs/symbols").join(of);
        library::parse(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))
    };
    let (mut verbs, mut rdmacm) = (symbols("ibverbs")?, symbols("rdmacm")?);
    let public = verbs.len();
    for symbol in &mut rdmacm {
        let function = format!("weft_cm_{}", symbol.name);
        verbs.push(Symbol {
            version: BETWEEN.into(),
            name: function.clone(),
            hidden: false,
            function: None,
        });
        symbol.function = Some(function);
    }

    let (archive, version) = library::build(root, "weft-libibverbs", "ibverbs", release)?;
    let lib = dir.join("lib");
    fs::create_dir_all(lib.join("pkgconfig")).map_err(at(&lib))?;
    let full = |soname: &str| format!("{soname}.{version}");
    let (verbs_file, rdmacm_file) = (lib.join(full(VERBS)), lib.join(full(RDMACM)));
    let inputs = [
        &archive.display().to_string(),
        "-lgcc_s",
        "-lpthread",
        "-lm",
        "-ldl",
        "-lc",
    ];
    Library {
        path: &verbs_file,
        soname: VERBS,
        symbols: &verbs,
        forwards: false,
        inputs: &inputs.map(String::from),
        strip: release,
    }
    .link()?;
    let inputs = [
        "-nostdlib",
        &verbs_file.display().to_string(),
        "-Wl,--enable-new-dtags",
        "-Wl,-rpath,$ORIGIN",
    ];
    Library {
        path: &rdmacm_file,
        soname: RDMACM,
        symbols: &rdmacm,
        forwards: true,
        inputs: &inputs.map(String::from),
        strip: release,
    }
    .link()?;
    for (soname, (name, version, description)) in [VERBS, RDMACM].into_iter().zip(STANDS_FOR) {
        symlink(&full(soname), &lib.join(soname))?;
        symlink(soname, &lib.join(format!("lib{name}.so")))?;
        let text = pkg_config(name, version, description);
        write(&lib.join(format!("pkgconfig/lib{name}.pc")), &text)?;
    }
    Ok(format!(
        "{}: {public} names\n{}: {} names",
        verbs_file.display(),
        rdmacm_file.display(),
        rdmacm.len()
    ))
}

/// The headers are the distribution's, where the compiler looks anyway.
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
