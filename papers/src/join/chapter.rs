//! The figures of the chapter as tables and plots, and its conclusions: whether each holds here, with the
//! number.

use super::node::{Carrier, How, Work};
use super::{Bench, MIB, Point, Sum};
use crate::conclusions::{Conclusions, claims};
use crate::error::Result;
use crate::output::KEPT;
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::usage;

/// The measurements so far.
#[derive(Default)]
pub(super) struct Chapter {
    pub(super) sections: Vec<Section>,
    pub(super) conclusions: Conclusions,
}

/// A measure of the nodes of a point together.
type Measure = fn(&Sum) -> f64;

const SETUP: Measure = |sum| sum.setup_cpu;
const JOIN: Measure = |sum| sum.turn_cpu;

fn line(label: &str, stroke: Stroke, points: &[(f64, f64)]) -> Series {
    Series::new(label, stroke, points.to_vec())
}

/// A plot of the CPU seconds of the busiest node.
fn busiest(title: &str, x: &str) -> Plot {
    Plot::new(
        title,
        Axis::linear(x),
        Axis::linear("s of CPU of the busiest node"),
    )
}

/// A measure for each number of nodes.
fn over(sums: &[(usize, Sum)], of: Measure) -> Vec<(f64, f64)> {
    let points = sums.iter().map(|(nodes, sum)| (*nodes as f64, of(sum)));
    points.collect()
}

/// The first over the last.
fn times(sums: &[(usize, Sum)], of: Measure) -> f64 {
    match (sums.first(), sums.last()) {
        (Some((_, first)), Some((_, last))) => of(first) / of(last),
        _ => f64::NAN,
    }
}

impl Bench<'_> {
    pub(super) fn chapter(&mut self) -> Result<Report> {
        let mut chapter = Chapter::default();
        let began = usage::load_average();
        let figures = &self.args.figure;
        let wants = |figure: &str| figures.is_empty() || figures.iter().any(|f| f == figure);
        if wants("7.7") {
            self.link(&mut chapter)?;
        }
        if wants("7.1") {
            self.loop_delay(&mut chapter)?;
        }
        if wants("7.9") || wants("7.14") {
            let hash = self.hash_over_nodes(&mut chapter)?;
            if wants("7.14") {
                self.merge_over_nodes(&mut chapter, &hash)?;
            }
        }
        if wants("7.10") {
            self.skew(&mut chapter)?;
        }
        if wants("7.11") {
            self.nested(&mut chapter)?;
        }
        if wants("7.12") {
            self.volume(&mut chapter)?;
        }
        if wants("7.15") {
            self.threads(&mut chapter)?;
        }
        self.engines(&mut chapter)?;
        let mut report = Report::new("weft-papers join: chapter 7 of the thesis");
        let how = if self.args.from.is_empty() {
            format!(
                ", medians of {} runs. Load: {began} at the start, {} at the end.",
                self.args.repetitions,
                usage::load_average()
            )
        } else {
            ".".to_owned()
        };
        report.intro = vec![
            if self.args.from.is_empty() {
                machine()
            } else {
                KEPT.to_owned()
            },
            format!(
                "Nodes are processes on this host, which share its cores: CPU is that of the busiest node, which stands for a machine of its own. {} thousand rows of 16 bytes in each \
                 relation{how}",
                self.args.rows
            ),
        ];
        let found = chapter
            .conclusions
            .section("What the chapter concludes", "thesis");
        report.sections.extend(found);
        report.sections.append(&mut chapter.sections);
        Ok(report)
    }

    fn nodes(&self) -> usize {
        self.args.nodes as usize
    }

    fn link(&mut self, chapter: &mut Chapter) -> Result<()> {
        let bytes = self.args.volume as usize * MIB;
        let gigabytes = bytes as f64 / 1e9;
        let mut sizes = Vec::new();
        for element in [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB] {
            let point = |work| Point {
                carrier: Carrier::Rdma,
                nodes: 2,
                element,
                work,
            };
            let sums = self.points(&[point(Work::Link { bytes }), point(Work::Raw { bytes })])?;
            let [ring, raw] = [sums[0], sums[1]].map(|sum| gigabytes / sum.wall);
            sizes.push((element as u64, ring, raw, sums[0].turn_cpu / gigabytes));
        }
        let table = Table::of(
            &sizes,
            &[
                ("element", &|at| human(at.0)),
                ("ring GB/s", &|at| number(at.1)),
                ("raw Send GB/s", &|at| number(at.2)),
                ("ratio", &|at| number(at.1 / at.2)),
                ("ring CPU s/GB", &|at| number(at.3)),
            ],
        );
        let title = "Figure 7.7: one link, by size of the elements";
        let points = |of: fn(&(u64, f64, f64, f64)) -> f64| -> Vec<(f64, f64)> {
            sizes.iter().map(|at| (at.0 as f64, of(at))).collect()
        };
        let plot = Plot::new(title, Axis::bytes(), Axis::linear("GB/s"))
            .series(line("ring", Stroke::Weft, &points(|at| at.1)))
            .series(line("raw Send", Stroke::Tcp, &points(|at| at.2)));
        let section = Section::new(title)
            .text("The link is what raw Sends of the same size reach into receives that are posted beforehand.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        let least = sizes.iter().find(|at| at.1 / at.2 >= 0.9);
        let least = least.map_or("no size".into(), |at| human(at.0));
        let (small, large) = (sizes[0], sizes[3]);
        let at_4 = large.1 / large.2;
        claims! { chapter.conclusions;
            "7.7", "elements of 4 MB use more than 90 % of the link" =>
                Some((at_4 >= 0.9, format!("{} of raw Sends; 0.9 from {least} on", number(at_4))));
            "7.7", "small elements waste CPU: 64 KB cost more for a byte than 4 MB" =>
                Some((small.3 > large.3, format!("{} and {} s of CPU for a GB", number(small.3), number(large.3))));
        }
        Ok(())
    }

    fn loop_delay(&mut self, chapter: &mut Chapter) -> Result<()> {
        let sizes = [1, 16, 64];
        let mut table = Table::new(&["nodes", "1 MiB", "16 MiB", "64 MiB"]);
        let mut cpu = vec![Vec::new(); sizes.len()];
        for nodes in 2..=self.nodes() {
            let mut cells = vec![nodes.to_string()];
            for (i, size) in sizes.iter().enumerate() {
                let bytes = size * MIB;
                // A size has one number of elements on every ring, so that they are cut alike.
                let point = Point {
                    carrier: Carrier::Rdma,
                    nodes,
                    element: (4 * MIB).min(bytes),
                    work: Work::Loop { bytes },
                };
                let sum = self.points(&[point])?.remove(0);
                cells.push(format!("{:.1} ({:.1})", sum.wall * 1e3, sum.turn_cpu * 1e3));
                cpu[i].push((nodes as f64, sum.turn_cpu * 1e3));
            }
            table.push(cells);
        }
        let fits: Vec<f64> = cpu.iter().map(|points| r_squared(points)).collect();
        let title = "Table 7.1: loop delay, by bytes of each node";
        let y = Axis::linear("ms of CPU of the busiest node");
        let plot = Plot::new(title, Axis::linear("nodes"), y)
            .series(line("64 MiB", Stroke::Weft, &cpu[2]))
            .series(line("16 MiB", Stroke::WeftCrc, &cpu[1]))
            .series(line("1 MiB", Stroke::WeftOther, &cpu[0]));
        let section = Section::new(title)
            .text("Milliseconds, and in brackets those of CPU of the busiest node. All nodes copy on the same cores, so wall time grows with the square of the nodes here.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        let growth = cpu[2].iter().zip(&cpu[1]);
        let growth =
            growth.map(|(large, small)| large.1 / small.1).sum::<f64>() / cpu[1].len() as f64;
        let words = format!(
            "CPU is a line with R² {:.3} (64 MiB), {:.3} (16 MiB), {:.3} (1 MiB: a millisecond)",
            fits[2], fits[1], fits[0]
        );
        claims! { chapter.conclusions;
            "table 7.1", "the delay is proportional to the nodes" => Some((fits[1..].iter().all(|fit| *fit >= 0.99), words));
            "table 7.1", "and to the data" =>
                Some(((3.0..5.0).contains(&growth), format!("64 MiB take {} times the CPU of 16", number(growth))));
        }
        Ok(())
    }

    /// A join of the same rows on rings of 1 node to all, shown under a title with these lines.
    fn scaling(
        &mut self,
        chapter: &mut Chapter,
        how: How,
        title: &str,
        lines: &[(&str, Stroke, Measure)],
    ) -> Result<Vec<(usize, Sum)>> {
        let nodes = 1..=self.nodes();
        let points: Vec<Point> = nodes
            .map(|nodes| self.joining(Carrier::Rdma, nodes, how, 0.0, 1))
            .collect();
        let sums: Vec<_> = (1..).zip(self.points(&points)?).collect();
        let table = Table::of(
            &sums,
            &[
                ("nodes", &|(nodes, _)| nodes.to_string()),
                ("set-up CPU s", &|(_, sum)| number(sum.setup_cpu)),
                ("join CPU s", &|(_, sum)| number(sum.turn_cpu)),
                ("join wall s", &|(_, sum)| number(sum.wall)),
                ("waited s", &|(_, sum)| number(sum.waited)),
                ("matches", &|(_, sum)| sum.matches.to_string()),
            ],
        );
        let plot = busiest(title, "nodes");
        let plot = lines.iter().fold(plot, |plot, (label, stroke, of)| {
            plot.series(line(label, *stroke, &over(&sums, *of)))
        });
        let section = Section::new(title).table(table).plot(plot);
        chapter.sections.push(section);
        Ok(sums)
    }

    fn hash_over_nodes(&mut self, chapter: &mut Chapter) -> Result<Vec<(usize, Sum)>> {
        let title = "Figure 7.9: hash join of the same rows over nodes";
        let lines = [("set-up", Stroke::Tcp, SETUP), ("join", Stroke::Weft, JOIN)];
        let sums = self.scaling(chapter, How::Hash, title, &lines)?;
        let (nodes, setup) = (self.nodes() as f64, times(&sums, SETUP));
        let join = 1.0 / times(&sums, JOIN);
        claims! { chapter.conclusions;
            "7.9", "the set-up's cost falls as nodes are added" =>
                Some((setup >= 0.8 * nodes, format!("{} times less on {nodes} nodes", number(setup))));
            "7.9", "the join phase takes as long on any number (within a third)" =>
                Some(((0.67..1.34).contains(&join), format!("on {nodes} nodes {} of one node's CPU", number(join))));
        }
        Ok(sums)
    }

    fn skew(&mut self, chapter: &mut Chapter) -> Result<()> {
        let nodes = self.nodes();
        let mut all = Vec::new();
        for skew in [0.0, 0.3, 0.6, 0.9] {
            let points = [1, nodes].map(|n| self.joining(Carrier::Rdma, n, How::Hash, skew, 1));
            let sums = self.points(&points)?;
            all.push((skew, sums[0], sums[1]));
        }
        let join = |(_, one, all): &(f64, Sum, Sum)| one.turn_cpu / all.turn_cpu;
        let whole = |(_, one, all): &(f64, Sum, Sum)| one.cpu() / all.cpu();
        let table = Table::of(
            &all,
            &[
                ("factor", &|at| at.0.to_string()),
                ("1 node, join", &|at| number(at.1.turn_cpu)),
                ("all nodes, join", &|at| number(at.2.turn_cpu)),
                ("times", &|at| number(join(at))),
                ("with set-up", &|at| number(whole(at))),
                ("matches", &|at| at.2.matches.to_string()),
            ],
        );
        let title = "Figure 7.10: hash join of skewed rows";
        let one: Vec<_> = all.iter().map(|at| (at.0, at.1.turn_cpu)).collect();
        let rest: Vec<_> = all.iter().map(|at| (at.0, at.2.turn_cpu)).collect();
        let plot = busiest(title, "Zipf factor")
            .series(line("1 node", Stroke::Tcp, &one))
            .series(line(&format!("{nodes} nodes"), Stroke::Weft, &rest));
        let section = Section::new(title)
            .text("Seconds of CPU of the busiest node.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        let worst = all.last().map(|at| (join(at), whole(at)));
        claims! { chapter.conclusions;
            "7.10", "at a factor of 0.9 the ring is five times ahead (aim: 4)" => worst.map(|(join, whole)| {
                let [join_times, whole] = [join, whole].map(number);
                (join >= 4.0, format!("the worst node joins with {join_times} times less CPU; {whole} with the set-up"))
            });
        }
        Ok(())
    }

    fn nested(&mut self, chapter: &mut Chapter) -> Result<()> {
        let title = "Figure 7.11: nested loops over nodes";
        let lines = [("join", Stroke::Weft, JOIN)];
        let sums = self.scaling(chapter, How::Nested, title, &lines)?;
        let cores =
            [(1, 2), (2, 1)].map(|(n, t)| self.joining(Carrier::Rdma, n, How::Nested, 0.0, t));
        let cores = self.points(&cores)?;
        let (nodes, join) = (self.nodes() as f64, times(&sums, JOIN));
        let apart = cores[1].wall / cores[0].wall;
        claims! { chapter.conclusions;
            "7.11", "the time falls as cores are added" =>
                Some((join >= 0.8 * nodes, format!("{} times less CPU on {nodes} nodes", number(join))));
            "7.11", "cores of one node or of two are the same (within a fifth)" =>
                Some(((0.8..1.2).contains(&apart), format!("2 nodes of a thread take {} of a node of 2", number(apart))));
        }
        Ok(())
    }

    fn merge_over_nodes(&mut self, chapter: &mut Chapter, hash: &[(usize, Sum)]) -> Result<()> {
        let title = "Figure 7.13: sort-merge join of the same rows over nodes";
        let lines = [("set-up", Stroke::Tcp, SETUP), ("join", Stroke::Weft, JOIN)];
        let sums = self.scaling(chapter, How::Merge, title, &lines)?;
        let dearer = sums[0].1.setup_cpu / hash[0].1.setup_cpu;
        let (nodes, falls) = (self.nodes() as f64, times(&sums, SETUP));
        claims! { chapter.conclusions;
            "7.13", "sorting costs more than hash tables" =>
                Some((dearer > 1.0, format!("{} times the CPU on one node", number(dearer))));
            "7.13", "and its cost falls with the nodes too" =>
                Some((falls >= 0.8 * nodes, format!("{} times less on {nodes} nodes", number(falls))));
        }
        Ok(())
    }

    /// The same rows on every node, by hash and by merge.
    fn volume(&mut self, chapter: &mut Chapter) -> Result<()> {
        let each = self.rows() / self.nodes();
        let point = |nodes: usize, how| Point {
            carrier: Carrier::Rdma,
            nodes,
            element: 4 * MIB,
            work: Work::Join {
                how,
                rows: each * nodes,
                skew: 0.0,
                threads: 1,
            },
        };
        let gigabytes = |nodes: usize| (2 * 16 * each * nodes) as f64 / 1e9;
        let (mut hash, mut merge) = (Vec::new(), Vec::new());
        for nodes in 1..=self.nodes() {
            let sums = self.points(&[point(nodes, How::Hash), point(nodes, How::Merge)])?;
            hash.push((nodes, sums[0]));
            merge.push((nodes, sums[1]));
        }
        let table = Table::of(
            hash.iter().zip(&merge),
            &[
                ("nodes", &|((nodes, _), _)| nodes.to_string()),
                ("GB in all", &|((nodes, _), _)| number(gigabytes(*nodes))),
                ("hash: set-up", &|((_, hash), _)| number(hash.setup_cpu)),
                ("join", &|((_, hash), _)| number(hash.turn_cpu)),
                ("GB/s", &|((nodes, hash), _)| {
                    number(gigabytes(*nodes) / hash.cpu())
                }),
                ("merge: set-up", &|(_, (_, merge))| number(merge.setup_cpu)),
                ("join", &|(_, (_, merge))| number(merge.turn_cpu)),
                ("waited", &|(_, (_, merge))| number(merge.waited)),
            ],
        );
        let title = "Figures 7.12 and 7.14: the same rows on every node";
        let plot = busiest(title, "nodes")
            .series(line("hash, set-up", Stroke::Tcp, &over(&hash, SETUP)))
            .series(line("hash, join", Stroke::Weft, &over(&hash, JOIN)))
            .series(line("merge, set-up", Stroke::Other, &over(&merge, SETUP)))
            .series(line("merge, join", Stroke::WeftCrc, &over(&merge, JOIN)));
        let section = Section::new(title)
            .text("Seconds of CPU of the busiest node; GB/s of that time; seconds that the query thread waited for the ring.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        self.volume_says(chapter, &hash, &merge);
        Ok(())
    }

    fn volume_says(&self, chapter: &mut Chapter, hash: &[(usize, Sum)], merge: &[(usize, Sum)]) {
        let nodes = self.nodes() as f64;
        let fit = r_squared(&over(hash, JOIN));
        let setup = times(hash, SETUP);
        let gain = nodes * times(hash, Sum::cpu);
        let (Some((_, h)), Some((_, m))) = (hash.last(), merge.last()) else {
            return;
        };
        let ratio = m.turn_cpu / h.turn_cpu;
        // Both join phases grow with the nodes, the set-ups do not.
        let ahead = (h.turn_cpu - m.turn_cpu) / nodes;
        let crossing = (m.setup_cpu - h.setup_cpu) / ahead;
        claims! { chapter.conclusions;
            "7.12", "the join phase is linear in the size of R" => Some((fit >= 0.98, format!("R² = {fit:.3}")));
            "7.12", "the set-up stays as it is (within a fifth)" =>
                Some(((0.8..1.25).contains(&setup), format!("on one node {} of that on {nodes}", number(setup))));
            "7.12", "six nodes have 2.7 times the throughput of one" =>
                Some((gain >= 2.7, format!("{nodes} nodes have {} times", number(gain))));
            "7.14", "merging is faster than probing hash tables" =>
                Some((ratio < 1.0, format!("{} of its CPU on {nodes} nodes", number(ratio))));
            "7.14", "merging has to wait for the ring" =>
                Some((m.waited > 0.1 * m.turn_cpu, format!("{} s beside {} s of CPU", number(m.waited), number(m.turn_cpu))));
            "7.14", "from about 30 nodes on sort-merge is faster in all" => Some(if ahead > 0.0 {
                (crossing <= 60.0, format!("from {crossing:.0} nodes on, if the lines go on"))
            } else {
                (false, "never".into())
            });
        }
    }

    fn threads(&mut self, chapter: &mut Chapter) -> Result<()> {
        let both = [Carrier::Rdma, Carrier::Tcp];
        let mut ways = Vec::new();
        for threads in [1, 2] {
            let points = both.map(|carrier| self.joining(carrier, 2, How::Hash, 0.0, threads));
            let sums = self.points(&points)?;
            ways.push((threads.to_string(), sums[0], sums[1]));
        }
        // Transport alone, where it is not hidden behind the join.
        let bytes = self.args.volume as usize * MIB / 2;
        let sums = self.points(&both.map(|carrier| Point {
            carrier,
            nodes: 2,
            element: 4 * MIB,
            work: Work::Loop { bytes },
        }))?;
        ways.push(("no join".to_owned(), sums[0], sums[1]));
        let table = Table::of(
            &ways,
            &[
                ("threads", &|(way, ..)| way.clone()),
                ("RDMA s", &|(_, rdma, _)| number(rdma.wall)),
                ("TCP s", &|(.., tcp)| number(tcp.wall)),
                ("times", &|(_, rdma, tcp)| number(tcp.wall / rdma.wall)),
                ("RDMA CPU s", &|(_, rdma, _)| number(rdma.turn_cpu)),
                ("TCP CPU s", &|(.., tcp)| number(tcp.turn_cpu)),
            ],
        );
        let section = Section::new("Figure 7.15, tables 7.2 and 7.3: RDMA against its TCP twin")
            .text("Wall time of a hash join's join phase on two nodes, by threads of each node, and of the elements going round without a join.")
            .table(table);
        chapter.sections.push(section);
        // With one thread, with two, and without a join.
        let [wall, cpu] = [|sum: &Sum| sum.wall, JOIN].map(|of| -> Vec<f64> {
            ways.iter()
                .map(|(_, rdma, tcp)| of(tcp) / of(rdma))
                .collect()
        });
        let words = |gains: &[f64]| gains.iter().map(|gain| number(*gain)).collect::<Vec<_>>();
        let (w, c) = (words(&wall), words(&cpu));
        let all = |gains: &[f64]| gains[..2].iter().all(|gain| *gain > 1.0);
        claims! { chapter.conclusions;
            "7.15", "RDMA is faster than TCP at any number of threads" =>
                Some((all(&wall), format!("{} times with one thread, {} with two; {} without a join", w[0], w[1], w[2])));
            "7.15", "aim: 1.3 times its twin on one host, two threads" => Some((wall[1] >= 1.3, format!("{} times", w[1])));
            "table 7.3", "TCP takes more CPU for the same join" =>
                Some((all(&cpu), format!("{} and {} times; {} without a join", c[0], c[1], c[2])));
        }
        Ok(())
    }
}

/// The coefficient of determination of a linear fit.
fn r_squared(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| f(p.0 - mx, p.1 - my)).sum::<f64>();
    let (xy, xx, yy) = (sum(&|x, y| x * y), sum(&|x, _| x * x), sum(&|_, y| y * y));
    if xx * yy == 0.0 {
        1.0
    } else {
        xy * xy / (xx * yy)
    }
}

#[cfg(test)]
mod tests {
    use super::r_squared;

    #[test]
    fn lines_fit_and_others_do_not() {
        assert!((r_squared(&[(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]) - 1.0).abs() < 1e-12);
        assert!(r_squared(&[(1.0, 1.0), (2.0, 9.0), (3.0, 1.0)]) < 0.1);
    }
}
