//! libexs and libiw for C programs: the library, with its headers, manual pages, examples and pkg-config file.

use std::fs;
use std::path::Path;

use crate::library::{self, Library, Symbol, at, read, symlink, write};

/// A library of calls that a header declares.
struct CLibrary {
    package: &'static str,
    /// The name for the linker, and for pkg-config.
    name: &'static str,
    description: &'static str,
    /// The version of each exported name.
    symbol_version: &'static str,
    /// Below `include`; the first one declares the calls.
    headers: &'static [&'static str],
}

const EXS: CLibrary = CLibrary {
    package: "weft-libexs",
    name: "exs",
    description: "Extended sockets: asynchronous, zero-copy streams and messages over RDMA",
    symbol_version: "EXS_1.0",
    headers: &["sys/exs.h", "exs.h"],
};

const IW: CLibrary = CLibrary {
    package: "weft-libiw",
    name: "iw",
    description: "The small iWARP library: RDMA in a dozen calls",
    symbol_version: "IW_1.0",
    headers: &["iw.h"],
};

/// Builds libexs and writes all files below `dir`. Returns a summary.
pub(crate) fn lay_out(dir: &Path, profile: library::Profile) -> Result<String, String> {
    EXS.lay_out(dir, profile)
}

/// As [`lay_out`], for libiw.
pub(crate) fn lay_out_iw(dir: &Path, profile: library::Profile) -> Result<String, String> {
    IW.lay_out(dir, profile)
}

impl CLibrary {
    fn lay_out(&self, dir: &Path, profile: library::Profile) -> Result<String, String> {
        let name = self.name;
        let root = library::root()?;
        let include = root.join("include");
        let header = read(&include.join(self.headers[0]))?;
        let symbols: Vec<Symbol> = calls(&header).into_iter().map(|c| self.symbol(c)).collect();
        let (archive, version) = library::build(root, self.package, name, profile)?;
        // The part of the version that programs are linked to.
        let soname = format!("lib{name}.so.0");
        let full = format!("lib{name}.so.{version}");
        let lib = dir.join("lib");
        fs::create_dir_all(lib.join("pkgconfig")).map_err(at(&lib))?;
        let inputs = library::inputs(&archive);
        Library {
            path: &lib.join(&full),
            soname: &soname,
            symbols: &symbols,
            forwards: false,
            inputs: &inputs,
            strip: profile.strips(),
        }
        .link()?;
        symlink(&full, &lib.join(&soname))?;
        symlink(&soname, &lib.join(format!("lib{name}.so")))?;
        for name in self.headers {
            let to = dir.join("include").join(name);
            fs::create_dir_all(dir.join("include/sys")).map_err(at(&to))?;
            library::copy(&include.join(name), &to)?;
        }
        let examples = dir.join(format!("share/doc/{name}/examples"));
        fs::create_dir_all(&examples).map_err(at(&examples))?;
        for entry in fs::read_dir(root.join("examples").join(name)).map_err(at(&examples))? {
            let from = entry.map_err(at(&examples))?.path();
            if let Some(name) = from.file_name() {
                library::copy(&from, &examples.join(name))?;
            }
        }
        let pc = lib.join(format!("pkgconfig/{name}.pc"));
        write(&pc, &self.pkg_config(&version))?;
        let pages = root.join(format!("doors/lib{name}/man"));
        let pages = manual(&pages, &dir.join("share/man"))?;
        Ok(format!(
            "{}: {} calls, {pages} manual pages",
            lib.join(full).display(),
            symbols.len()
        ))
    }

    fn symbol(&self, name: &str) -> Symbol {
        Symbol {
            version: self.symbol_version.into(),
            name: name.into(),
            hidden: false,
            function: None,
        }
    }

    fn pkg_config(&self, version: &str) -> String {
        let (name, description) = (self.name, self.description);
        format!(
            "prefix=${{pcfiledir}}/../..\nincludedir=${{prefix}}/include\nlibdir=${{prefix}}/lib\n\n\
             Name: {name}\nDescription: {description}\n\
             Version: {version}\nCflags: -I${{includedir}}\nLibs: -L${{libdir}} -l{name}\n"
        )
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
