//! The exported calls have the prototypes of Debian's headers, and of our own: a C compiler that gets both reports no error.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::Command;

use weft_abi::verbs::{cm, types};

const SOURCES: [&str; 4] = [
    include_str!("../src/verbs.rs"),
    include_str!("../src/cm.rs"),
    include_str!("../src/rsock.rs"),
    include_str!("../src/dgram.rs"),
];

/// Cases in which C's type does not follow from Rust's: (call, parameter or "" for the result, C's type).
const SPECIAL: &[(&str, &str, &str)] = &[
    ("ibv_get_device_guid", "", "__be64"),
    (
        "ibv_query_port",
        "port_attr",
        "struct _compat_ibv_port_attr *",
    ),
    ("rfcntl", "arg", "..."),
];

/// In the libraries' lists, but in no header, or in that of a later rdma-core than Debian 12's.
const UNDECLARED: &[&str] = &[
    "_ibv_query_comp_cntr_caps",
    "ibv_create_comp_cntr",
    "ibv_destroy_comp_cntr",
    "ibv_inc_comp_cntr",
    "ibv_inc_err_comp_cntr",
    "ibv_qp_attach_comp_cntr",
    "ibv_read_comp_cntr",
    "ibv_read_err_comp_cntr",
    "ibv_set_comp_cntr",
    "ibv_set_err_comp_cntr",
    "ibv_alloc_buf",
    "ibv_export_buf_dmabuf_fd",
    "ibv_free_buf",
    "ibv_query_port_speed",
    "ibv_reg_buf_mr",
    "ibv_reg_mr_ex",
    "rdma_query_addrinfo",
    "rdma_resolve_addrinfo",
    "rdma_write_cm_event",
    "repoll_create",
    "repoll_ctl",
    "repoll_wait",
    "ibv_dontfork_range",
    "ibv_dofork_range",
    "ibv_get_sysfs_path",
    "ibv_read_sysfs_file",
];

fn c_type(rust: &str) -> String {
    if let Some(of) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(of));
    }
    if let Some(of) = rust.strip_prefix("*const ") {
        // the pointers to pointers are all `*mut *mut`
        return format!("const {} *", c_type(of));
    }
    let plain = match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_char" => "char",
        "c_void" => "void",
        "u8" => "uint8_t",
        "u16" => "uint16_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "ssize_t" | "off_t" | "socklen_t" | "nfds_t" | "fd_set" => rust,
        _ => "",
    };
    if !plain.is_empty() {
        return plain.to_owned();
    }
    let mut enums = types::ENUMERATIONS.iter().chain(cm::types::ENUMERATIONS);
    let kind = if enums.any(|e| e.name == Some(rust)) {
        "enum"
    } else if rust == "ibv_gid" {
        "union"
    } else {
        "struct"
    };
    format!("{kind} {rust}")
}

/// Converts `name(parameter: type, …) -> type = value;`, a line of the lists of exports, to C's prototype and the name.
fn prototype(line: &str) -> Option<(&str, String)> {
    let (name, rest) = line
        .strip_prefix("    ")?
        .strip_suffix(';')?
        .split_once('(')?;
    if !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let rest = rest.split(" = ").next()?;
    let (parameters, result) = rest.rsplit_once(')')?;
    let special = |parameter: &str| {
        let found = SPECIAL.iter().find(|s| (s.0, s.1) == (name, parameter));
        found.map(|s| s.2.to_owned())
    };
    let result = match result.strip_prefix(" -> ") {
        None => "void".to_owned(),
        Some(result) => special("").unwrap_or_else(|| c_type(result)),
    };
    let parameters: Vec<String> = parameters
        .split(", ")
        .filter_map(|parameter| parameter.split_once(": "))
        .map(|(name, of)| special(name).unwrap_or_else(|| c_type(of)))
        .collect();
    let parameters = if parameters.is_empty() {
        "void".to_owned()
    } else {
        parameters.join(", ")
    };
    Some((name, format!("{result} {name}({parameters});")))
}

#[test]
fn the_calls_have_the_prototypes_of_the_headers() {
    const HEAD: &str = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <rdma/rdma_verbs.h>\n\
                        #include <rdma/rsocket.h>\n#include <infiniband/weft_dgram.h>\n\
                        #undef ibv_query_port\n#undef ibv_reg_mr\n#undef ibv_reg_mr_iova\n";
    let mut prototypes = String::new();
    let mut names = BTreeSet::new();
    // a call that a header does not declare would be declared here, and prove nothing
    let mut used = String::from("void *all[] = {\n");
    for line in SOURCES.iter().flat_map(|source| source.lines()) {
        if let Some((name, prototype)) = prototype(line)
            && !UNDECLARED.contains(&name)
        {
            writeln!(prototypes, "{prototype}").unwrap();
            writeln!(used, "  (void *){name},").unwrap();
            names.insert(name);
        }
    }
    let listed: BTreeSet<&str> = [
        include_str!("../symbols/ibverbs"),
        include_str!("../symbols/rdmacm"),
    ]
    .iter()
    .flat_map(|list| list.lines())
    .filter(|line| !line.contains(['#', '=']) && !line.contains("PRIVATE"))
    .filter_map(|line| line.split_once(' ').map(|(_, name)| name))
    .filter(|name| !UNDECLARED.contains(name))
    .collect();
    assert_eq!(names, listed);

    compiles(&format!("{HEAD}{used}}};\n"));
    compiles(&format!("{HEAD}{prototypes}"));
}

fn compiles(text: &str) {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("prototypes.c");
    std::fs::write(&source, text).unwrap();
    let output = Command::new("cc")
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-array-parameter",
            "-fsyntax-only",
            "-I",
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../include"),
        ])
        .arg(&source)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
