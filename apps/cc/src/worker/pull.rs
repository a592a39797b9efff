//! Preprocessing for a master (`--pull`): headers are fetched by RDMA Read into a view of its tree, and stay there for the next job.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use weft_verbs::{Access, SendWr};

use super::Environment;
use super::compile::{Ended, JobDir, read_output, read_whole};
use super::sandbox::Files;
use super::session::{Session, Stop, gone, refuse, stop, transfer, trouble};
use super::view::{State, View};
use crate::link::Gone;
use crate::options::{built_in, stays_in_code};
use crate::pull::{Cpp, read};
use crate::wire::{
    Entry, Job, MAX_CHECK, MAX_DIAGNOSTICS, MAX_NEED, Node, Pull, Region, Report, Request, Verdict,
};

/// How often a compilation may request further files, or find changed ones.
const ROUNDS: usize = 200;
/// Contents that one answer may have, in bytes.
const MAX_CONTENTS: u64 = 128 << 20;
/// Contents that all connections keep together, in bytes.
const MAX_STORE: usize = 256 << 20;
/// Columns of a line of dependencies, as gcc has them.
const COLUMNS: usize = 72;

/// Contents by their BLAKE3 digests, which were computed here: what one connection has read another one need not.
#[derive(Default)]
pub(super) struct Store {
    all: HashMap<[u8; 32], Arc<[u8]>>,
    bytes: usize,
}

impl Store {
    fn put(&mut self, digest: [u8; 32], bytes: &Arc<[u8]>) {
        if self.bytes + bytes.len() > MAX_STORE {
            *self = Self::default();
        }
        if self.all.insert(digest, Arc::clone(bytes)).is_none() {
            self.bytes += bytes.len();
        }
    }
}

/// The results of preprocessing, apart from the text.
pub(super) struct Preprocessed {
    /// The output of `-MD`; its length is 0 if it was not requested.
    pub(super) dependencies: Vec<u8>,
    /// The preprocessor's warnings.
    pub(super) diagnostics: Vec<u8>,
}

/// One job's view of things.
struct Task<'a> {
    job: &'a Job,
    pull: &'a Pull,
    cpp: Cpp,
    source: PathBuf,
    began: Instant,
}

impl Task<'_> {
    fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.job.cwd).join(name)
    }

    /// The files that the compiler opens before it reads a line.
    fn first(&self) -> Vec<PathBuf> {
        let cpp = &self.cpp;
        let named = [
            &cpp.quote,
            &cpp.dirs,
            &cpp.after,
            &cpp.includes,
            &self.pull.system,
        ];
        let mut all = vec![PathBuf::from(&self.job.cwd), self.source.clone()];
        all.extend(named.into_iter().flatten().map(|name| self.path(name)));
        all.extend(
            self.pull
                .system
                .iter()
                .map(|dir| Path::new(dir).join(PREDEFINED)),
        );
        all
    }

    /// The directories in which the compiler looks for headers before it has found one.
    fn searched(&self) -> Vec<PathBuf> {
        let cpp = &self.cpp;
        let dirs = [&cpp.quote, &cpp.dirs, &cpp.after, &self.pull.system];
        let files = cpp.includes.iter().map(|name| self.path(name));
        files
            .chain([self.source.clone()])
            .filter_map(|file| file.parent().map(Path::to_owned))
            .chain([PathBuf::from(&self.job.cwd)])
            .chain(dirs.into_iter().flatten().map(|name| self.path(name)))
            .collect()
    }

    /// The search order of headers: the directories in their order, with those for quotes separate.
    fn order(&self) -> Vec<PathBuf> {
        let cpp = &self.cpp;
        let dirs = [&cpp.quote, &cpp.dirs, &self.pull.system, &cpp.after];
        let parts = dirs
            .into_iter()
            .map(|dirs| dirs.iter().map(|dir| self.path(dir)));
        parts
            .flat_map(|dirs| dirs.chain([PathBuf::new()]))
            .collect()
    }

    /// The paths at which the compiler may find a header that this file names.
    fn candidates<'b>(
        &'b self,
        includer: &'b Path,
        angle: bool,
        name: &'b str,
    ) -> impl Iterator<Item = PathBuf> + 'b {
        let own = includer.parent().filter(|_| !angle).map(Path::to_owned);
        let quote = if angle { &[][..] } else { &self.cpp.quote };
        let dirs = quote
            .iter()
            .chain(&self.cpp.dirs)
            .chain(&self.pull.system)
            .chain(&self.cpp.after);
        own.into_iter()
            .chain(dirs.map(|dir| self.path(dir)))
            .map(move |dir| dir.join(name))
    }
}

/// Ends the job here: the master preprocesses.
fn unreadable<T>(path: &Path) -> Result<T, Stop> {
    refuse(format!("{} is not for workers to read", path.display()))
}

/// Why a source stays that may name a header of this machine.
const ABSOLUTE: &str = "a header may be included by its absolute name";
/// The header that gcc includes by itself, from the first directory that has it.
const PREDEFINED: &str = "stdc-predef.h";

impl Session<'_> {
    /// Preprocesses into the workshop's source.
    pub(super) fn preprocess(
        &mut self,
        job: &Job,
        pull: &Pull,
        shop: &JobDir,
        compiler: &Environment,
    ) -> Result<Preprocessed, Stop> {
        if self.shared.level.files == Files::Free {
            return refuse("it preprocesses for nobody without Landlock");
        }
        let cpp = match read(&pull.cpp) {
            Ok(cpp) if pull.system.iter().all(|dir| dir.starts_with('/')) => cpp,
            Ok(_) => {
                return refuse("a directory of the system that cannot be");
            }
            Err(why) => return refuse(why),
        };
        let source = Path::new(&job.cwd).join(&job.name);
        let task = Task {
            job,
            pull,
            cpp,
            source,
            began: Instant::now(),
        };
        let mut view = match self.view.take() {
            Some(view) if !view.is_full() => view,
            _ => View::new(self.shared.folder.path())?,
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
        if !view
            .root()
            .to_str()
            .is_some_and(|root| root.chars().all(plain))
        {
            return refuse("the directory for jobs has a name that cannot be in a view");
        }
        view.begin();
        let done = self.rounds(&task, &mut view, shop, compiler);
        // After a failure it is as good as before: each node is checked before an object is delivered.
        self.view = Some(view);
        done
    }

    /// A master that answers slowly, or never comes to an end, does not keep a slot.
    fn in_time(&self, task: &Task<'_>) -> Result<(), Stop> {
        let most = self.shared.config.time_limit;
        if task.began.elapsed() > most {
            let why = format!("fetching its headers took more than {} s", most.as_secs());
            return stop(Verdict::Limit, why);
        }
        Ok(())
    }

    fn rounds(
        &mut self,
        task: &Task<'_>,
        view: &mut View,
        shop: &JobDir,
        compiler: &Environment,
    ) -> Result<Preprocessed, Stop> {
        let job = task.job;
        for _ in 0..ROUNDS {
            if view.is_full() {
                return stop(Verdict::Limit, "too many headers");
            }
            self.ensure(task, view, task.first())?;
            self.whole(task, view, &task.searched())?;
            let absolute = self.ahead(task, view)?;
            let (how, stderr) = self.run_preprocessor(task, view, shop, compiler)?;
            if !how {
                let missing = missing(task, view, &stderr);
                let refused = missing.iter().find_map(|path| match view.state(path) {
                    State::Refused(path) => Some(path),
                    _ => None,
                });
                if refused.is_none() && !missing.is_empty() {
                    self.ensure(task, view, missing)?;
                    continue;
                }
                // It may have failed because a file has changed.
                let all = view.to_check(&HashSet::new());
                if self.refresh(task, view, &all)? {
                    continue;
                }
                if let Some(path) = refused {
                    return unreadable(&path);
                }
                if absolute {
                    return refuse(ABSOLUTE);
                }
                return stop(Verdict::Failed, "preprocessing failed");
            }
            let mut room = self.shared.room();
            let text = read_whole(&shop.text(), &mut room)?;
            let (text, names) = rewrite(&text, view.root().to_str().unwrap_or_default(), job.cxx);
            let (mut used, mut own) = (HashSet::new(), Vec::new());
            for name in &names {
                let named = task.path(name);
                match view.state(&named) {
                    State::File(path) => {
                        used.insert(path);
                        // Its own directory is searched first for its includes.
                        own.extend(named.parent().map(Path::to_owned));
                    }
                    // With `-g`: the working directory.
                    State::Directory(_) if name.ends_with("//") => {}
                    _ => {
                        return refuse(format!(
                            "a text from {name}, which is not of the master's view"
                        ));
                    }
                }
            }
            if self.whole(task, view, &own)? {
                continue;
            }
            let numbers = view.to_check(&used);
            if self.refresh(task, view, &numbers)? {
                continue;
            }
            if used
                .iter()
                .any(|path| view.facts(path).is_some_and(|facts| facts.absolute))
            {
                return refuse(ABSOLUTE);
            }
            if let Some(why) = stays_in_code(&text) {
                return refuse(why);
            }
            return finish(task, view, shop, &text, &stderr, room);
        }
        stop(Verdict::Trouble, "its headers change all the time")
    }

    /// Runs the preprocessor; returns whether it succeeded, and its messages.
    fn run_preprocessor(
        &mut self,
        task: &Task<'_>,
        view: &View,
        shop: &JobDir,
        compiler: &Environment,
    ) -> Result<(bool, Vec<u8>), Stop> {
        let (job, limits) = (task.job, self.shared.limits(compiler));
        let predefined = task
            .pull
            .system
            .iter()
            .map(|dir| Path::new(dir).join(PREDEFINED))
            .find(|path| matches!(view.state(path), State::File(_)));
        let predefined = predefined.filter(|_| {
            !job.args
                .iter()
                .any(|arg| ["-ffreestanding", "-fno-hosted"].contains(&arg.as_str()))
        });
        let command = shop.preprocess(
            &compiler.command,
            job,
            task.pull,
            view,
            predefined.as_deref(),
            &limits,
        )?;
        let compiler = self.start(compiler.place(shop, Some(view.dir())), command)?;
        let (how, _, killed) = self.wait_for(compiler)?;
        if let Some(why) = killed {
            return stop(Verdict::Limit, why);
        }
        let stderr = read_output(&shop.diagnostics(), MAX_DIAGNOSTICS)?;
        match how {
            Ended::NotStarted(e) => Err(trouble(&format!("cannot start {}: {e}", job.driver))),
            Ended::Status(status) => Ok((status.success(), stderr)),
        }
    }

    /// Until something is known of each of these.
    fn ensure(
        &mut self,
        task: &Task<'_>,
        view: &mut View,
        mut paths: Vec<PathBuf>,
    ) -> Result<(), Stop> {
        for _ in 0..ROUNDS {
            let mut need = Vec::new();
            paths.retain(|path| match view.state(path) {
                State::Unknown(path) => {
                    need.push(path);
                    true
                }
                _ => false,
            });
            if need.is_empty() {
                return Ok(view.point_links()?);
            }
            self.fetch(task, view, need)?;
        }
        stop(Verdict::Trouble, "a path without an end")
    }

    /// Sees to it that all names of these directories are in the view: the compiler takes those that are not for absent. Whether that changed the view.
    ///
    /// # Errors
    /// One of them may not be read.
    fn whole(&mut self, task: &Task<'_>, view: &mut View, dirs: &[PathBuf]) -> Result<bool, Stop> {
        let mut changed = false;
        for _ in 0..ROUNDS {
            let mut old = Vec::new();
            for dir in dirs {
                match view.state(dir) {
                    State::Refused(path) => return unreadable(&path),
                    State::Directory(path) => match view.way(&path) {
                        Some(true) => return unreadable(&path),
                        // An earlier job had other roots.
                        Some(false) => old.push(path),
                        None => {}
                    },
                    State::File(_) | State::Absent | State::Unknown(_) => {}
                }
            }
            if old.is_empty() {
                return Ok(changed);
            }
            changed = true;
            self.fetch(task, view, old)?;
            self.ensure(task, view, dirs.to_vec())?;
        }
        stop(Verdict::Trouble, "its directories change all the time")
    }

    /// Fetches the files that the source will include, as far as they are known without preprocessing. Returns whether a file may be included by an
    /// absolute name.
    fn ahead(&mut self, task: &Task<'_>, view: &mut View) -> Result<bool, Stop> {
        let mut absolute = false;
        for _ in 0..ROUNDS {
            let mut need = Vec::new();
            let mut seen = HashSet::new();
            let mut refused = false;
            let mut todo: Vec<PathBuf> = [task.source.clone()]
                .into_iter()
                .chain(task.cpp.includes.iter().map(|name| task.path(name)))
                .collect();
            // Most headers were scanned for an earlier source, and the tree is unchanged.
            let complete = std::mem::take(view.complete(task.order()));
            while let Some(named) = todo.pop() {
                // A file may have any number of names, and so may what they include.
                self.in_time(task)?;
                let State::File(real) = view.state(&named) else {
                    continue;
                };
                // By its name: that decides which directory is its own.
                if complete.contains(&named) || !seen.insert(named.clone()) {
                    continue;
                }
                let Some(facts) = view.facts(&real) else {
                    continue;
                };
                absolute |= facts.absolute;
                let names = &facts.names;
                for (angle, name) in names {
                    for candidate in task.candidates(&named, *angle, name) {
                        match view.state(&candidate) {
                            State::File(_) => {
                                todo.push(candidate);
                                break;
                            }
                            State::Unknown(path) => {
                                need.push(path);
                                break;
                            }
                            // The compiler would find nothing there, which may not be so.
                            State::Refused(path) if name.contains("../") || !view.has(&path) => {
                                return unreadable(&path);
                            }
                            State::Refused(_) => {
                                refused = true;
                                break;
                            }
                            State::Absent | State::Directory(_) => {}
                        }
                    }
                }
            }
            let all = view.complete(task.order());
            *all = complete;
            if need.is_empty() {
                // Refused and absolute names are checked again for each job.
                if !refused && !absolute {
                    all.extend(seen);
                }
                break;
            }
            self.fetch(task, view, need)?;
        }
        view.point_links()?;
        Ok(absolute)
    }

    /// Checks whether these nodes are unchanged, and fetches changed ones. Returns whether there were any.
    fn refresh(&mut self, task: &Task<'_>, view: &mut View, nodes: &[u32]) -> Result<bool, Stop> {
        let id = task.job.id;
        let mut stale = Vec::new();
        for nodes in nodes.chunks(MAX_CHECK) {
            self.in_time(task)?;
            let nodes = nodes.to_vec();
            match self.ask(&Report::Check { id, nodes })? {
                Request::Stale { id: of, nodes } if of == id => stale.extend(nodes),
                _ => return Err(gone("another message than what is stale").into()),
            }
        }
        let mut paths = view.paths_of(&stale);
        // Directories first: paths below removed ones need not be requested.
        paths.sort();
        for path in &paths {
            // It may have been removed with a directory.
            if path.parent().is_none_or(|parent| {
                parent == path || matches!(view.state(parent), State::Directory(_))
            }) && view.has(path)
            {
                self.fetch(task, view, vec![path.clone()])?;
            }
        }
        Ok(!paths.is_empty())
    }

    /// Requests paths, and installs the answers in the view.
    fn fetch(
        &mut self,
        task: &Task<'_>,
        view: &mut View,
        mut paths: Vec<PathBuf>,
    ) -> Result<(), Stop> {
        let job = task.job;
        paths.sort();
        paths.dedup();
        let mut texts = Vec::with_capacity(paths.len());
        for path in &paths {
            match path.to_str() {
                Some(text) if text.len() < 4096 => texts.push(text.to_owned()),
                _ => return refuse("a path that is too long"),
            }
        }
        // A message has room for so many.
        let most = (24 << 10) / texts.iter().map(|text| text.len() + 2).max().unwrap_or(1);
        for texts in texts.chunks(most.clamp(1, MAX_NEED)) {
            self.in_time(task)?;
            let need = Report::Need {
                id: job.id,
                paths: texts.to_vec(),
            };
            let (region, entries) = match self.ask(&need)? {
                Request::Files {
                    id,
                    region,
                    entries,
                } if id == job.id && entries.len() == texts.len() => (region, entries),
                _ => return Err(gone("another message than files").into()),
            };
            let contents = self.contents(&region, &entries)?;
            for ((path, entry), bytes) in texts.iter().zip(&entries).zip(contents) {
                let path = Path::new(path);
                // Its directory has changed meanwhile.
                if path
                    .parent()
                    .is_some_and(|parent| !matches!(view.state(parent), State::Directory(_)))
                {
                    continue;
                }
                view.install(path, entry, &bytes)
                    .map_err(|e| trouble(&format!("{}: {e}", path.display())))?;
            }
        }
        Ok(())
    }

    /// The contents of an answer, which are read unless all of them are here already.
    fn contents(&mut self, region: &Region, entries: &[Entry]) -> Result<Vec<Arc<[u8]>>, Stop> {
        if region.len > MAX_CONTENTS {
            return stop(Verdict::Limit, "contents that are too long");
        }
        if !fit(entries, region.len) {
            return Err(gone("more contents than their region has").into());
        }
        let empty: Arc<[u8]> = Arc::from([]);
        let known: Option<Vec<_>> = {
            let store = crate::lock(&self.shared.store);
            let one = |entry: &Entry| {
                if has(entry) {
                    store.all.get(&entry.digest).cloned()
                } else {
                    Some(Arc::clone(&empty))
                }
            };
            entries.iter().map(one).collect()
        };
        if let Some(known) = known {
            let same = |(entry, bytes): (&Entry, &Arc<[u8]>)| {
                !has(entry) || bytes.len() as u64 == entry.len
            };
            if !entries.iter().zip(&known).all(same) {
                return Err(gone("contents of another length than they are said to have").into());
            }
            return Ok(known);
        }
        let len = region.len as usize;
        let mr = self.link.pd().alloc_mr(len.max(1), Access::LOCAL_WRITE)?;
        transfer(&mut self.link, &mr, region, region.len, SendWr::read)?;
        let mut all = Vec::with_capacity(entries.len());
        for entry in entries {
            if !has(entry) {
                all.push(Arc::clone(&empty));
                continue;
            }
            let bytes: Arc<[u8]> = mr
                .to_vec(entry.at as usize, entry.len as usize)
                .map_err(Gone::from)?
                .into();
            if *blake3::hash(&bytes).as_bytes() != entry.digest {
                return Err(gone("contents that are not what they are said to be").into());
            }
            crate::lock(&self.shared.store).put(entry.digest, &bytes);
            all.push(bytes);
        }
        Ok(all)
    }
}

/// Whether an answer has contents for this entry.
fn has(entry: &Entry) -> bool {
    !matches!(entry.node, Node::Absent | Node::Refused)
}

/// Whether contents can lie side by side in a region of `len` bytes. If they overlapped, a short region could claim many long files.
fn fit(entries: &[Entry], len: u64) -> bool {
    let mut all = entries.iter().filter(|entry| has(entry));
    all.try_fold(0, |sum: u64, entry| sum.checked_add(entry.len))
        .is_some_and(|sum| sum <= len)
}

/// The source for the compiler, and the other results, for which there is `room`.
fn finish(
    task: &Task<'_>,
    view: &View,
    shop: &JobDir,
    text: &[u8],
    stderr: &[u8],
    mut room: u64,
) -> Result<Preprocessed, Stop> {
    let cut = built_in(text);
    let whole = [&text[..cut.start], &text[cut.end..]].concat();
    std::fs::write(&shop.source, whole)?;
    let root = view.root().to_str().unwrap_or_default();
    let dependencies = match task.cpp.dependencies {
        None => Vec::new(),
        Some(without_system) => {
            let bytes = read_whole(&shop.dependencies(), &mut room)?;
            dependencies(&String::from_utf8_lossy(&bytes), root, without_system)
        }
    };
    let stderr = String::from_utf8_lossy(stderr);
    Ok(Preprocessed {
        dependencies,
        diagnostics: stderr.replace(&format!("{root}/"), "/").into_bytes(),
    })
}

/// The paths in diagnostics that were not fetched: the compiler ended there.
fn missing(task: &Task<'_>, view: &View, stderr: &[u8]) -> Vec<PathBuf> {
    let root = view.root().to_str().unwrap_or_default();
    let text = String::from_utf8_lossy(stderr);
    let words = text.lines().flat_map(|line| line.split(": "));
    words
        .map(|word| task.path(word.strip_prefix(root).unwrap_or(word)))
        .filter(|path| {
            let at = view.at(path);
            // `..` and links are the file system's business.
            matches!(view.state(path), State::Unknown(_) | State::Refused(_))
                && std::fs::metadata(at).is_err_and(|e| e.raw_os_error() == Some(libc::ELOOP))
        })
        .collect()
}

/// The text as the master's preprocessor would have written it, and the names of the files that it is from.
fn rewrite(text: &[u8], root: &str, cxx: bool) -> (Vec<u8>, HashSet<String>) {
    let (mut out, mut names) = (Vec::with_capacity(text.len()), HashSet::new());
    let prefix = format!("\"{root}/");
    for line in text.split_inclusive(|&b| b == b'\n') {
        let marker = line
            .strip_prefix(b"# ")
            .filter(|rest| rest.first().is_some_and(u8::is_ascii_digit));
        let Some(text) = marker.and_then(|_| std::str::from_utf8(line).ok()) else {
            out.extend(line);
            continue;
        };
        let mut text = text.replacen(&prefix, "\"/", 1);
        let name = text
            .split_once('"')
            .and_then(|(_, rest)| rest.rsplit_once('"'))
            .map(|(name, _)| name.to_owned())
            .unwrap_or_default();
        let bare = text.trim_end_matches('\n');
        // Directories of C++ are not taken for C's, and gcc's own header is the system's; options cannot say either.
        if cxx
            && name.contains("/c++/")
            && bare.ends_with("\" 3 4") | bare.ends_with(" 1 3 4") | bare.ends_with(" 2 3 4")
        {
            text = format!("{}\n", &bare[..bare.len() - 2]);
        } else if name.ends_with("/stdc-predef.h") && !bare.ends_with(" 3 4") {
            text = format!("{bare} 3 4\n");
        }
        out.extend(text.as_bytes());
        if !(name.starts_with('<') && name.ends_with('>')) {
            names.insert(name.replace("\\\"", "\"").replace("\\\\", "\\"));
        }
    }
    (out, names)
}

/// Dependencies as the master's compiler would have written them: its paths, its lines.
fn dependencies(text: &str, root: &str, without_system: bool) -> Vec<u8> {
    let joined = text.replace("\\\n", " ");
    let mut out = String::with_capacity(text.len());
    // Of the rules without dependencies, which `-MP` makes.
    let mut has_predefined_rule = without_system;
    for line in joined.split_inclusive('\n') {
        let (mut column, mut predefined) = (0, false);
        let line = line.trim_end_matches('\n');
        // A blank after a backslash is part of a name.
        let mut words: Vec<String> = Vec::new();
        for piece in line.split(' ') {
            match words.last_mut() {
                Some(last) if last.ends_with('\\') => {
                    last.push(' ');
                    last.push_str(piece);
                }
                _ => words.push(piece.into()),
            }
        }
        words.retain(|word| !word.is_empty());
        if let [word] = &words[..]
            && word.ends_with("/stdc-predef.h:")
            && std::mem::replace(&mut has_predefined_rule, true)
        {
            continue;
        }
        for word in &words {
            let word = match word.strip_prefix(root) {
                Some(rest) if rest.starts_with('/') => rest,
                _ => word,
            };
            if word.ends_with("/stdc-predef.h") {
                // Here it was included by its name, and so is not the one that another header includes.
                if without_system || predefined {
                    continue;
                }
                predefined = true;
            }
            if column > 0 {
                if column + word.len() > COLUMNS {
                    out.push_str(" \\\n");
                    column = 0;
                }
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += word.len();
        }
        out.push('\n');
    }
    out.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_do_not_overlap() {
        let entry = |node, len| Entry {
            node,
            number: 0,
            mtime: 0,
            at: 0,
            len,
            digest: [0; 32],
        };
        let file = |len| entry(Node::File, len);
        assert!(fit(&[], 0) && fit(&[file(3), file(0), file(7)], 10));
        assert!(fit(&[entry(Node::Absent, 9), entry(Node::Refused, 9)], 0));
        assert!(!fit(&[file(10), file(1)], 10));
        assert!(!fit(&[file(u64::MAX), file(1)], 10));
    }

    #[test]
    fn markers_have_the_masters_names() {
        let text = b"# 0 \"a.c\"\n# 1 \"/v/r/usr/include/stdc-predef.h\" 1\n# 9 \"/v/r/usr/include/c++/12/x\" 1 3 4\n\"/v/r/x\"\n# 2 \"<built-in>\"\n# 3 \"a\\\"b.h\" 2\n";
        let (out, names) = rewrite(text, "/v/r", true);
        let want = "# 0 \"a.c\"\n# 1 \"/usr/include/stdc-predef.h\" 1 3 4\n# 9 \"/usr/include/c++/12/x\" 1 3\n\"/v/r/x\"\n# 2 \"<built-in>\"\n# 3 \"a\\\"b.h\" 2\n";
        assert_eq!(String::from_utf8(out).unwrap(), want);
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort();
        assert_eq!(
            names,
            [
                "/usr/include/c++/12/x",
                "/usr/include/stdc-predef.h",
                "a\"b.h",
                "a.c"
            ]
        );
    }

    #[test]
    fn dependencies_have_the_masters_lines() {
        let name = "x".repeat(30);
        let text = format!(
            "a.o: a.c \\\n /v/r/{name} \\\n /v/r/usr/include/stdc-predef.h \\\n a\\ b.h /v/r/{name}\n"
        );
        // Rules of -MP.
        let rule = "/v/r/usr/include/stdc-predef.h:\n";
        let text = format!("{text}{rule}a.h:\n{rule}/v/r/b.h:\n");
        let of = |system| String::from_utf8(dependencies(&text, "/v/r", system)).unwrap();
        assert_eq!(
            of(false),
            format!(
                "a.o: a.c /{name} /usr/include/stdc-predef.h \\\n a\\ b.h /{name}\n/usr/include/stdc-predef.h:\na.h:\n/b.h:\n"
            )
        );
        assert_eq!(
            of(true),
            format!("a.o: a.c /{name} a\\ b.h \\\n /{name}\na.h:\n/b.h:\n")
        );
    }
}
