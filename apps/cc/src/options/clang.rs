//! The options of clang. Only those in these tables can be sent: clang has many that read or write further files, and gets more with each version.

use super::{COUNTED, Kind, for_assembler, is_argument};

/// Options that change the output or the messages, and name no file.
const WHOLE: &[&str] = words! {
    "-c" "-S" "-pipe" "-pthread" "-ansi" "-pedantic" "-pedantic-errors" "-w" "-g" "-g0" "-g1" "-g2" "-g3" "-O" "-O0" "-O1" "-O2" "-O3" "-Os" "-Oz" "-Og"
    "-Ofast" "-O4"
};

/// The beginnings of such options, to which something may be joined that is no path.
const JOINED: &[&str] = words! {
    "-W" "-R" "-std=" "--std=" "--target=" "-m" "-ggdb" "-glldb" "-gsce" "-gdwarf" "-gline" "-gmlt" "-gcolumn" "-gno-column-info" "-gno-inline-line-tables"
    "-gz" "-gstrict" "-gno-strict" "-gpubnames" "-gno-pubnames" "-gsrc-hash=" "-gdescribe"
};

/// What may stand after `-f` and `-fno-`, alone or with a value.
const FLAGS: &[&str] = words! {
    "PIC" "pic" "PIE" "pie" "plt" "semantic-interposition" "omit-frame-pointer" "optimize-sibling-calls" "escaping-block-tail-calls" "strict-aliasing"
    "strict-overflow" "strict-enums" "strict-return" "strict-vtable-pointers" "strict-float-cast-overflow" "strict-flex-arrays" "exceptions" "cxx-exceptions"
    "non-call-exceptions" "rtti" "rtti-data" "visibility" "visibility-inlines-hidden" "visibility-inlines-hidden-static-local-var" "visibility-ms-compat"
    "stack-protector" "stack-protector-all" "stack-protector-strong" "stack-clash-protection" "stack-check" "function-sections" "data-sections"
    "unique-section-names" "common" "signed-char" "unsigned-char" "short-enums" "short-wchar" "wchar" "wrapv" "trapv" "fast-math" "math-errno"
    "finite-math-only" "signed-zeros" "reciprocal-math" "associative-math" "unsafe-math-optimizations" "trapping-math" "rounding-math" "approx-func"
    "honor-infinities" "honor-nans" "fp-contract" "fp-model" "fp-exception-behavior" "denormal-fp-math" "protect-parens" "excess-precision" "ident"
    "asynchronous-unwind-tables" "unwind-tables" "merge-all-constants" "merge-constants" "delete-null-pointer-checks" "keep-inline-functions"
    "keep-static-consts" "lto" "unified-lto" "fat-lto-objects" "char8_t" "coroutines" "coroutines-ts" "blocks" "builtin" "inline" "inline-functions"
    "inline-hint-functions" "inline-small-functions" "vectorize" "tree-vectorize" "slp-vectorize" "tree-slp-vectorize" "unroll-loops" "unroll-all-loops"
    "reroll-loops" "finite-loops" "threadsafe-statics" "use-cxa-atexit" "use-init-array" "cf-protection" "zero-call-used-regs" "trivial-auto-var-init"
    "zero-initialized-in-bss" "ms-extensions" "ms-compatibility" "gnu-keywords" "gnu89-inline" "gnu-inline-asm" "freestanding" "hosted" "declspec"
    "dollars-in-identifiers" "digraphs" "asm" "operator-names" "access-control" "elide-constructors" "assume-sane-operator-new" "sized-deallocation"
    "aligned-allocation" "aligned-new" "relaxed-template-template-args" "delayed-template-parsing" "new-infallible" "template-depth" "template-depth-"
    "constexpr-depth" "constexpr-steps" "constexpr-backtrace-limit" "constexpr-loop-limit" "constexpr-cache-depth" "constexpr-ops-limit" "bracket-depth"
    "error-limit" "macro-backtrace-limit" "template-backtrace-limit" "spell-checking" "spell-checking-limit" "show-column" "show-source-location"
    "caret-diagnostics" "caret-diagnostics-max-lines" "color-diagnostics" "ansi-escape-codes" "diagnostics-color" "diagnostics-show-option"
    "diagnostics-show-note-include-stack" "diagnostics-show-category" "diagnostics-show-template-tree" "diagnostics-show-hotness"
    "diagnostics-show-line-numbers" "diagnostics-fixit-info" "diagnostics-print-source-range-info" "diagnostics-parseable-fixits" "elide-type"
    "show-overloads" "debug-types-section" "standalone-debug" "limit-debug-info" "eliminate-unused-debug-types"
    "eliminate-unused-debug-symbols" "debug-info-for-profiling" "debug-macro" "emulated-tls" "tls-model" "addrsig" "jump-tables" "align-functions"
    "align-labels" "align-loops" "align-jumps" "pack-struct" "max-type-align" "split-stack" "split-dwarf-inlining" "split-machine-functions"
    "force-enable-int128" "register-global-dtors-with-atexit" "pch-instantiate-templates" "openmp-simd" "optimize-strlen" "gcse" "ivopts"
    "web" "peel-loops" "rename-registers" "schedule-insns" "schedule-insns2" "tree-vrp" "tree-dce" "tree-ter" "tree-pre" "tree-salias" "ipa-cp"
    "default-inline" "sched-interblock" "var-tracking" "var-tracking-assignments" "conserve-stack" "code-hoisting" "allow-store-data-races"
    "function-attribute-list" "global-isel" "experimental-new-constant-interpreter" "experimental-library" "complete-member-pointers" "double-square-bracket-attributes"
    "matrix-enabled" "verbose-asm" "force-emit-vtables" "virtual-function-elimination" "c++-abi" "c++-static-destructors" "c++-always-destroy" "extend-arguments"
    "patchable-function-entry" "instrument-functions" "instrument-functions-after-inlining" "instrument-function-entry-bare" "pascal-strings"
    "objc-arc" "raw-string-literals" "lax-vector-conversions" "altivec" "zvector" "char-signed" "swift-async-fp" "integrated-as"
};

/// Options that map prefixes of paths: text, for which no file is opened.
const MAPS: &[&str] = &[
    "-fdebug-prefix-map=",
    "-ffile-prefix-map=",
    "-fmacro-prefix-map=",
];

/// The prefix that an option maps.
pub(crate) fn mapped(arg: &str) -> Option<(&'static str, &str)> {
    MAPS.iter()
        .find_map(|map| Some((*map, arg.strip_prefix(map)?)))
}

/// Whether the flag is in the table: `NAME`, `no-NAME`, either with `=VALUE`. `-fno-builtin-NAME` is one too.
fn is_flag(flag: &str) -> bool {
    let (name, value) = flag.split_once('=').unwrap_or((flag, ""));
    let (no, bare) = match name.strip_prefix("no-") {
        Some(bare) => (true, bare),
        None => (false, name),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.,:+=".contains(c);
    // The assembler that is none of clang's files is another program.
    let other_assembler = no && bare == "integrated-as";
    let of_a_function = no && bare.starts_with("builtin-");
    let number = bare.trim_end_matches(|c: char| c.is_ascii_digit());
    let known = FLAGS.contains(&bare) || of_a_function || number == "template-depth-";
    known && !other_assembler && value.chars().all(plain)
}

/// The kind of an option without an argument.
pub(super) fn kind(arg: &str) -> Kind {
    let begins = |prefixes: &[&str]| prefixes.iter().any(|p| arg.starts_with(p));
    match arg {
        _ if WHOLE.contains(&arg) => Kind::Both,
        // Where clang looks for headers is found here.
        "-nostdinc" | "-nostdinc++" | "-nostdlibinc" | "-nobuiltininc" | "-trigraphs"
        | "-stdlib=libc++" | "-stdlib=libstdc++" => Kind::Cpp,
        "-E" | "-M" | "-MM" | "-MG" => Kind::Here("only preprocessing"),
        "-undef" => Kind::Here("-undef, with which no worker compiles"),
        "-pg" => Kind::Here("profiling or coverage, whose files are named in the object"),
        _ if begins(&["-march=native", "-mtune=native", "-mcpu=native"]) => {
            Kind::Here("=native, which means this machine")
        }
        _ if begins(&["-fplugin", "-fpass-plugin"]) => Kind::Here("a plugin"),
        _ if begins(&[
            "-fmodule",
            "-fno-module",
            "-fcxx-modules",
            "-fprebuilt",
            "-fimplicit-module",
        ]) =>
        {
            Kind::Here("modules")
        }
        _ if begins(COUNTED)
            || begins(&[
                "--coverage",
                "-fcs-profile",
                "-fcoverage",
                "-fmemory-profile",
            ]) =>
        {
            Kind::Here("profiling or coverage, whose files are named in the object")
        }
        // A list that stands beside the compiler excepts functions.
        _ if begins(&["-fsanitize", "-fxray"]) => {
            Kind::Here("a sanitizer, which reads lists of exceptions")
        }
        _ if begins(&[
            "-mllvm", "-mmlir", "-mlinker", "-Xclang", "-Xarch", "-Wp,", "-Wl,", "-L", "-l",
        ]) =>
        {
            Kind::Here("an option that weft cc does not know")
        }
        _ if begins(&["-Wa,"]) => for_assembler(&arg[4..]),
        _ if begins(&["-D", "-U", "-I", "-isystem", "-iquote", "-idirafter"]) => Kind::Cpp,
        _ if mapped(arg).is_some() => {
            // An empty prefix fits everything, and the longest one that fits counts.
            if arg.split(['=', ',']).all(is_argument) && !arg.contains("==") {
                Kind::Both
            } else {
                Kind::Here("an option that names files")
            }
        }
        _ if arg.contains('/') || !arg.split(['=', ',']).all(is_argument) => {
            Kind::Here("an option that names files")
        }
        _ if begins(JOINED) || arg.strip_prefix("-f").is_some_and(is_flag) => Kind::Both,
        _ => Kind::Here("an option that weft cc does not know"),
    }
}
