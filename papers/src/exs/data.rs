//! The measurements of the suite, and the queries of its report.

use super::blast::Run;
use super::experiment::Experiment;
use super::plan::Plan;
use super::summary::{self, Figure, GIGABITS};
use crate::driver::Transport;
use crate::record::Record;
use crate::stats::{Mean, Summary, paired_ratio};
use serde::Serialize;

/// The names of the targets in the results.
pub(super) const STREAM: &str = "exs-stream";
pub(super) const PING_PONG: &str = "exs-ping-pong";
pub(super) const SYNC_STREAM: &str = "exs-sync-stream";
pub(super) const SYNC_PING_PONG: &str = "exs-sync-ping-pong";

/// One line of a figure at one place: all its runs.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) experiment: Experiment,
    pub(super) transport: Transport,
    pub(super) variant: String,
    /// Outstanding sends, or bytes of a message.
    pub(super) x: u64,
    pub(super) plan: Plan,
    pub(super) runs: Vec<Run>,
}

/// A figure of a cell as a line of JSON.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    bench: &'static str,
    experiment: Experiment,
    transport: Transport,
    variant: &'a str,
    x: u64,
    metric: &'static str,
    #[serde(flatten)]
    summary: Summary,
    mean: f64,
    ci95: Option<f64>,
    plan: &'a Plan,
}

impl Cell {
    /// A figure of each run.
    pub(super) fn read(&self, figure: &summary::Figure) -> Vec<f64> {
        self.runs.iter().map(figure.read).collect()
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        summary::FIGURES.iter().filter_map(|figure| {
            let samples = self.read(figure);
            let Mean { mean, ci95, .. } = Mean::of(&samples)?;
            Some(Line {
                bench: "exs",
                experiment: self.experiment,
                transport: self.transport,
                variant: &self.variant,
                x: self.x,
                metric: figure.name,
                summary: Summary::of(&samples)?,
                mean,
                ci95,
                plan: &self.plan,
            })
        })
    }
}

/// Everything that was measured.
pub(super) struct Results {
    pub(super) cells: Vec<Cell>,
    pub(super) targets: Vec<Record>,
    pub(super) notes: Vec<String>,
    pub(super) load: String,
}

/// The measurements, for queries.
pub(super) struct Data<'a> {
    pub(super) cells: &'a [Cell],
    pub(super) targets: &'a [Record],
}

impl<'a> Data<'a> {
    /// One line of a figure.
    pub(super) fn line(
        &self,
        experiment: Experiment,
        transport: Transport,
        variant: &str,
    ) -> impl Iterator<Item = &'a Cell> {
        self.cells.iter().filter(move |cell| {
            (cell.experiment, cell.transport) == (experiment, transport) && cell.variant == variant
        })
    }

    pub(super) fn cell(&self, beside: &Cell, variant: &str) -> Option<&'a Cell> {
        let mut line = self.line(beside.experiment, beside.transport, variant);
        line.find(|cell| cell.x == beside.x)
    }

    /// Medians along a line.
    pub(super) fn medians(
        &self,
        experiment: Experiment,
        transport: Transport,
        variant: &str,
        figure: &Figure,
    ) -> impl Iterator<Item = (u64, f64)> {
        self.line(experiment, transport, variant)
            .filter_map(|cell| Some((cell.x, Summary::of(&cell.read(figure))?.median)))
    }

    /// Medians of one variant over another, repetition by repetition.
    pub(super) fn ratios(
        &self,
        experiment: Experiment,
        transport: Transport,
        figure: &Figure,
        over: &str,
        under: &str,
    ) -> impl Iterator<Item = (u64, f64)> {
        self.line(experiment, transport, over).filter_map(|cell| {
            let other = self.cell(cell, under)?;
            let ratio = paired_ratio(&cell.read(figure), &other.read(figure))?;
            Some((cell.x, ratio.median))
        })
    }

    /// The dynamic mode's throughput over that of the better of direct and indirect, at each place.
    pub(super) fn of_the_best(
        &self,
        experiment: Experiment,
        transport: Transport,
    ) -> impl Iterator<Item = (u64, f64)> {
        self.line(experiment, transport, "dynamic")
            .filter_map(|cell| Some((cell.x, self.best_ratio(cell)?.median)))
    }

    pub(super) fn best_ratio(&self, beside: &Cell) -> Option<Summary> {
        let others = ["direct", "indirect"].map(|variant| {
            let samples = self.cell(beside, variant)?.read(&GIGABITS);
            Some((Summary::of(&samples)?.median, samples))
        });
        let best = others
            .into_iter()
            .flatten()
            .max_by(|left, right| left.0.total_cmp(&right.0))?;
        paired_ratio(&beside.read(&GIGABITS), &best.1)
    }

    /// The places of a figure, and the names of its lines.
    pub(super) fn axes(
        &self,
        experiment: Experiment,
        transport: Transport,
    ) -> (Vec<u64>, Vec<String>) {
        let (mut places, mut variants) = (Vec::new(), Vec::new());
        for cell in self.cells {
            if (cell.experiment, cell.transport) != (experiment, transport) {
                continue;
            }
            if !places.contains(&cell.x) {
                places.push(cell.x);
            }
            if !variants.contains(&cell.variant) {
                variants.push(cell.variant.clone());
            }
        }
        (places, variants)
    }
}
