//! libexs for C programs: the library, with its headers, manual pages and pkg-config file.

use std::fs;
use std::path::Path;

use crate::library::{self, Library, Symbol, at, read, symlink, write};

/// The part of the version that programs are linked to.
const SONAME: &str = "libexs.so.0";
/// The version of each exported name.
const SYMBOL_VERSION: &str = "EXS_1.0";

/// Builds the library and writes all files below `dir`. Returns a summary.
pub(crate) fn lay_out(dir: &Path, profile: library::Profile) -> Result<String, String> {
    let root = library::root()?;
    let header = read(&root.join("include/sys/exs.h"))?;
    let symbols: Vec<Symbol> = calls(&header).into_iter().map(symbol).collect();
    let (archive, version) = library::build(root, "weft-libexs", "exs", profile)?;
    let full = format!("libexs.so.{version}");
    let lib = dir.join("lib");
    fs::create_dir_all(lib.join("pkgconfig")).map_err(at(&lib))?;
    let inputs = library::inputs(&archive);
    Library {
        path: &lib.join(&full),
        soname: SONAME,
        symbols: &symbols,
        forwards: false,
        inputs: &inputs,
        strip: profile.strips(),
    }
    .link()?;
    symlink(&full, &lib.join(SONAME))?;
    symlink(SONAME, &lib.join("libexs.so"))?;
    for name in ["exs.h", "sys/exs.h"] {
        let to = dir.join("include").join(name);
        fs::create_dir_all(dir.join("include/sys")).map_err(at(&to))?;
        library::copy(&root.join("include").join(name), &to)?;
    }
    let examples = dir.join("share/doc/exs/examples");
    fs::create_dir_all(&examples).map_err(at(&examples))?;
    for entry in fs::read_dir(root.join("examples/exs")).map_err(at(&examples))? {
        let from = entry.map_err(at(&examples))?.path();
        if let Some(name) = from.file_name() {
            library::copy(&from, &examples.join(name))?;
        }
    }
    write(&lib.join("pkgconfig/exs.pc"), &pkg_config(&version))?;
    let pages = manual(&root.join("doors/libexs/man"), &dir.join("share/man"))?;
    Ok(format!(
        "{}: {} calls, {pages} manual pages",
        lib.join(full).display(),
        symbols.len()
    ))
}

fn symbol(name: &str) -> Symbol {
    Symbol {
        version: SYMBOL_VERSION.into(),
        name: name.into(),
        hidden: false,
        function: None,
    }
}

/// The calls that the header declares.
fn calls(header: &str) -> Vec<&str> {
    header
        .lines()
        .filter(|line| line.ends_with(");") && !line.starts_with([' ', '/', '#']))
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .collect()
}

fn pkg_config(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\nincludedir=${{prefix}}/include\nlibdir=${{prefix}}/lib\n\n\
         Name: exs\nDescription: Extended sockets: asynchronous, zero-copy streams and messages over RDMA\n\
         Version: {version}\nCflags: -I${{includedir}}\nLibs: -L${{libdir}} -lexs\n"
    )
}

/// Copies the pages to their sections, with a link for every further name of a page. Returns the number of names.
fn manual(from: &Path, to: &Path) -> Result<usize, String> {
    let mut count = 0;
    for entry in fs::read_dir(from).map_err(at(from))? {
        let page = entry.map_err(at(from))?.path();
        let (Some(file), Some(section)) = (
            page.file_name().and_then(|name| name.to_str()),
            page.extension().and_then(|section| section.to_str()),
        ) else {
            continue;
        };
        let folder = to.join(format!("man{section}"));
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        let text = read(&page)?;
        write(&folder.join(file), &text)?;
        count += 1;
        for name in page_names(&text) {
            let link = format!("{name}.{section}");
            if link != file {
                write(&folder.join(&link), &format!(".so man{section}/{file}\n"))?;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// The names in a page's section NAME.
fn page_names(page: &str) -> impl Iterator<Item = &str> {
    page.lines()
        .skip_while(|line| *line != ".Sh NAME")
        .skip(1)
        .take_while(|line| !line.starts_with(".Sh"))
        .filter_map(|line| line.strip_prefix(".Nm "))
        .map(|name| name.trim_end_matches([' ', ',']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_a_header_and_nothing_else() {
        let header = "/* int exs_no(void); */\n#define X(a) f(a);\nint exs_a(int fd);\n    int exs_b(int);\n\
                      const char *exs_c(void);\ntypedef int exs_t;\n";
        assert_eq!(calls(header), ["exs_a", "exs_c"]);
    }

    #[test]
    fn names_of_a_page() {
        let page = ".Dd x\n.Sh NAME\n.Nm exs_a ,\n.Nm exs_b\n.Nd two\n.Sh SYNOPSIS\n.Nm exs_c\n";
        assert_eq!(page_names(page).collect::<Vec<_>>(), ["exs_a", "exs_b"]);
    }
}
