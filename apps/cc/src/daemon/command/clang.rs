//! A command of clang: the files that it reads go to a worker, and clang there has to have read the same.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use weft_sys::memfd;

use super::{Part, Running, Stop, here};
use crate::daemon::history::CompileRecord;
use crate::daemon::{job, tree};
use crate::ipc::JobAsk;
use crate::options::{CLANG_ENVIRONMENT, Language, Plan, SEARCH_ENVIRONMENT};
use crate::wire;

/// The files that clang has read here.
pub(super) struct Listed {
    names: Vec<String>,
    /// The directories of the system's headers.
    system: Vec<String>,
    /// How it writes rules.
    spaced: bool,
}

impl Running<'_> {
    /// By a worker that gets the files that clang finds here; their names.
    pub(super) fn of_tree(
        &mut self,
        plan: &Plan,
        mut job: JobAsk,
        trail: &mut CompileRecord<'_>,
    ) -> Result<(job::Outcome, Listed), Stop> {
        let shared = self.shared;
        let var = |name: &&&str| self.launch.var(name).is_some();
        if let Some(name) = SEARCH_ENVIRONMENT.iter().chain(CLANG_ENVIRONMENT).find(var) {
            return Err(here(format!("{name} is set")));
        }
        let ask = tree::ask(plan).map_err(here)?;
        let options: Vec<_> = plan.job.iter().chain(&ask.search).cloned().collect();
        let searched = shared
            .searches
            .of(&job.driver, job.language, &options, &job.path);
        let searched = searched.map_err(here)?;
        let leave = shared.leave(self.line).ok_or(Stop::Gone)?;
        trail.preprocesses();
        let rule = self.output_of(&plan.preprocess)?.0;
        let mut text = String::new();
        let read = (&rule).read_to_string(&mut text);
        read.map_err(|e| here(format!("cannot preprocess: {e}")))?;
        let names = crate::tree::names(&text);
        let names = names.ok_or_else(|| here("a name of a header that has a blank, $ or #"))?;
        let failed = |e: io::Error| here(format!("no memory for the source: {e}"));
        let file = File::from(memfd::create_growing("weft-cc-source").map_err(failed)?);
        let at = (&*self.launch.dir, Path::new(&job.cwd));
        let cxx = plan.language == Language::Cxx;
        job.len = tree::pack(&file, at, &names, &ask, &searched, cxx).map_err(here)?;
        drop(leave);
        trail.left();
        let system = tree::system(&ask, &searched);
        job.tree = Some(wire::Tree {
            cpp: ask.cpp,
            searched,
            system: plan.rule.as_ref().is_none_or(|rule| rule.system),
        });
        let file = OwnedFd::from(file);
        let listed = Listed {
            names,
            system,
            spaced: text.contains("\n\n"),
        };
        Ok((shared.job(&job, Some(&file), self.line, trail), listed))
    }
}

/// The rule of a command of clang, if it asks for one. The worker's compiler has to have read the same files.
pub(super) fn rule(
    plan: &Plan,
    from: &Listed,
    there: Option<Part>,
) -> Result<Option<String>, Stop> {
    let system = plan.rule.as_ref().is_none_or(|rule| rule.system);
    let text = there.and_then(|part| part.read().ok());
    let text = String::from_utf8(text.unwrap_or_default()).unwrap_or_default();
    let there: Vec<_> = text.lines().collect();
    let missing: &[String] = if system { &[] } else { &from.system };
    if !tree::agree(&from.names, &there, missing) {
        return Err(here(
            "a worker's compiler has read other files than the one here",
        ));
    }
    Ok(plan
        .rule
        .as_ref()
        .map(|rule| rule.text(&there, from.spaced)))
}
