//! The figures of the chapter as tables and plots, and its conclusions: whether they hold here, with the number.

use super::node::{Carrier, How, Work};
use super::{Bench, MIB, Point, Sum};
use crate::conclusions::Conclusions;
use crate::error::Result;
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::usage;

/// What has been measured so far.
#[derive(Default)]
pub(super) struct Chapter {
    pub(super) sections: Vec<Section>,
    pub(super) conclusions: Conclusions,
}

impl Chapter {
    pub(super) fn says(
        &mut self,
        source: &'static str,
        claim: &'static str,
        holds: bool,
        here: String,
    ) {
        self.conclusions.add(source, claim, Some((holds, here)));
    }
}

fn line(label: &str, stroke: Stroke, points: &[(f64, f64)]) -> Series {
    Series::new(label, stroke, points.to_vec())
}

fn linear(title: &str, x: &str, y: &str) -> Plot {
    Plot::new(title, Axis::linear(x), Axis::linear(y))
}

/// Nodes and a measure of them.
fn over(sums: &[(usize, Sum)], of: impl Fn(&Sum) -> f64) -> Vec<(f64, f64)> {
    sums.iter()
        .map(|(nodes, sum)| (*nodes as f64, of(sum)))
        .collect()
}

/// The first over the last.
fn times(sums: &[(usize, Sum)], of: impl Fn(&Sum) -> f64) -> f64 {
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
        let mut report = Report::new("weft bench join: chapter 7 of the thesis");
        report.intro = vec![
            machine(),
            format!(
                "Nodes are processes on this host, which share its cores: CPU is that of the busiest node, which stands for a machine of its own. {} thousand rows of 16 bytes in each \
                 relation, medians of {} runs. Load: {began} at the start, {} at the end.",
                self.args.rows,
                self.args.repetitions,
                usage::load_average()
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
        let headers = [
            "element",
            "ring GB/s",
            "raw Send GB/s",
            "ratio",
            "ring CPU s/GB",
        ];
        let mut table = Table::new(&headers);
        let (mut ring_line, mut raw_line) = (Vec::new(), Vec::new());
        let (mut at_4, mut least, mut cpu) = (0.0, None, Vec::new());
        for element in [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB] {
            let point = |work| Point {
                carrier: Carrier::Rdma,
                nodes: 2,
                element,
                work,
            };
            let sums = self.points(&[point(Work::Link { bytes }), point(Work::Raw { bytes })])?;
            let rate = |sum: &Sum| bytes as f64 / sum.wall / 1e9;
            let (ring, raw) = (rate(&sums[0]), rate(&sums[1]));
            let cost = sums[0].turn_cpu / (bytes as f64 / 1e9);
            table.push([
                human(element as u64),
                number(ring),
                number(raw),
                number(ring / raw),
                number(cost),
            ]);
            ring_line.push((element as f64, ring));
            raw_line.push((element as f64, raw));
            cpu.push(cost);
            if element == 4 * MIB {
                at_4 = ring / raw;
            }
            if ring / raw >= 0.9 {
                least.get_or_insert(element);
            }
        }
        let title = "Figure 7.7: one link, by size of the elements";
        let plot = Plot::new(title, Axis::bytes(), Axis::linear("GB/s"))
            .series(line("ring", Stroke::Weft, &ring_line))
            .series(line("raw Send", Stroke::Tcp, &raw_line));
        let section = Section::new(title)
            .text("The link is what raw Sends of the same size reach into receives that are posted beforehand.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        let least = least.map_or("no size".into(), |size| human(size as u64));
        chapter.says(
            "7.7",
            "elements of 4 MB use more than 90 % of the link",
            at_4 >= 0.9,
            format!("{} of raw Sends; 0.9 from {least} on", number(at_4)),
        );
        chapter.says(
            "7.7",
            "small elements waste CPU: 64 KB cost more for a byte than 4 MB",
            cpu[0] > cpu[3],
            format!(
                "{} and {} s of CPU for a GB",
                number(cpu[0]),
                number(cpu[3])
            ),
        );
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
                let element = (4 * MIB).min(bytes);
                let sum = self.point(Carrier::Rdma, nodes, element, Work::Loop { bytes })?;
                cells.push(format!("{:.1} ({:.1})", sum.wall * 1e3, sum.turn_cpu * 1e3));
                cpu[i].push((nodes as f64, sum.turn_cpu * 1e3));
            }
            table.push(cells);
        }
        let fits: Vec<f64> = cpu.iter().map(|points| r_squared(points)).collect();
        let title = "Table 7.1: loop delay, by bytes of each node";
        let plot = linear(title, "nodes", "ms of CPU of the busiest node")
            .series(line("64 MiB", Stroke::Weft, &cpu[2]))
            .series(line("16 MiB", Stroke::WeftCrc, &cpu[1]))
            .series(line("1 MiB", Stroke::WeftOther, &cpu[0]));
        let section = Section::new(title)
            .text("Milliseconds, and in brackets those of CPU of the busiest node. All nodes copy on the same cores, so wall time grows with the square of the nodes here.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        chapter.says(
            "table 7.1",
            "the delay is proportional to the nodes",
            fits[1..].iter().all(|fit| *fit >= 0.99),
            format!(
                "CPU is a line with R² {:.3} (64 MiB), {:.3} (16 MiB), {:.3} (1 MiB: a millisecond)",
                fits[2], fits[1], fits[0]
            ),
        );
        let growth = cpu[2]
            .iter()
            .zip(&cpu[1])
            .map(|(large, small)| large.1 / small.1)
            .sum::<f64>()
            / cpu[1].len() as f64;
        chapter.says(
            "table 7.1",
            "and to the data",
            (3.0..5.0).contains(&growth),
            format!("64 MiB take {} times the CPU of 16", number(growth)),
        );
        Ok(())
    }

    /// A join of the same rows on rings of 1 node to all.
    fn scaling(&mut self, how: How) -> Result<(Vec<(usize, Sum)>, Table)> {
        let headers = [
            "nodes",
            "set-up CPU s",
            "join CPU s",
            "join wall s",
            "waited s",
            "matches",
        ];
        let mut table = Table::new(&headers);
        let points: Vec<Point> = (1..=self.nodes())
            .map(|nodes| self.joining(Carrier::Rdma, nodes, how, 0.0, 1))
            .collect();
        let sums: Vec<_> = (1..).zip(self.points(&points)?).collect();
        for (nodes, sum) in &sums {
            table.push([
                nodes.to_string(),
                number(sum.setup_cpu),
                number(sum.turn_cpu),
                number(sum.wall),
                number(sum.waited),
                sum.matches.to_string(),
            ]);
        }
        Ok((sums, table))
    }

    fn hash_over_nodes(&mut self, chapter: &mut Chapter) -> Result<Vec<(usize, Sum)>> {
        let (sums, table) = self.scaling(How::Hash)?;
        let title = "Figure 7.9: hash join of the same rows over nodes";
        let plot = linear(title, "nodes", "s of CPU of the busiest node")
            .series(line("set-up", Stroke::Tcp, &over(&sums, |s| s.setup_cpu)))
            .series(line("join", Stroke::Weft, &over(&sums, |s| s.turn_cpu)));
        chapter
            .sections
            .push(Section::new(title).table(table).plot(plot));
        let (nodes, setup) = (self.nodes() as f64, times(&sums, |s| s.setup_cpu));
        chapter.says(
            "7.9",
            "the set-up's cost falls as nodes are added",
            setup >= 0.8 * nodes,
            format!("{} times less on {nodes} nodes", number(setup)),
        );
        let join = 1.0 / times(&sums, |s| s.turn_cpu);
        chapter.says(
            "7.9",
            "the join phase takes as long on any number (within a third)",
            (0.67..1.34).contains(&join),
            format!("on {nodes} nodes {} of one node's CPU", number(join)),
        );
        Ok(sums)
    }

    fn skew(&mut self, chapter: &mut Chapter) -> Result<()> {
        let nodes = self.nodes();
        let mut table = Table::new(&[
            "factor",
            "1 node, join",
            "all nodes, join",
            "times",
            "with set-up",
            "matches",
        ]);
        let mut lines = (Vec::new(), Vec::new());
        let mut worst = (f64::NAN, f64::NAN);
        for skew in [0.0, 0.3, 0.6, 0.9] {
            let points = [1, nodes].map(|n| self.joining(Carrier::Rdma, n, How::Hash, skew, 1));
            let sums = self.points(&points)?;
            let (one, all) = (sums[0], sums[1]);
            worst = (one.turn_cpu / all.turn_cpu, one.cpu() / all.cpu());
            table.push([
                format!("{skew}"),
                number(one.turn_cpu),
                number(all.turn_cpu),
                number(worst.0),
                number(worst.1),
                all.matches.to_string(),
            ]);
            lines.0.push((skew, one.turn_cpu));
            lines.1.push((skew, all.turn_cpu));
        }
        let title = "Figure 7.10: hash join of skewed rows";
        let plot = linear(title, "Zipf factor", "s of CPU of the busiest node")
            .series(line("1 node", Stroke::Tcp, &lines.0))
            .series(line(&format!("{nodes} nodes"), Stroke::Weft, &lines.1));
        let section = Section::new(title)
            .text("Seconds of CPU of the busiest node.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        chapter.says(
            "7.10",
            "at a factor of 0.9 the ring is five times ahead (aim: 4)",
            worst.0 >= 4.0,
            format!(
                "the worst node joins with {} times less CPU; {} with the set-up",
                number(worst.0),
                number(worst.1)
            ),
        );
        Ok(())
    }

    fn nested(&mut self, chapter: &mut Chapter) -> Result<()> {
        let (sums, table) = self.scaling(How::Nested)?;
        let cores =
            [(1, 2), (2, 1)].map(|(n, t)| self.joining(Carrier::Rdma, n, How::Nested, 0.0, t));
        let cores = self.points(&cores)?;
        let title = "Figure 7.11: nested loops over nodes";
        let plot = linear(title, "nodes", "s of CPU of the busiest node").series(line(
            "join",
            Stroke::Weft,
            &over(&sums, |s| s.turn_cpu),
        ));
        chapter
            .sections
            .push(Section::new(title).table(table).plot(plot));
        let (nodes, join) = (self.nodes() as f64, times(&sums, |s| s.turn_cpu));
        chapter.says(
            "7.11",
            "the time falls as cores are added",
            join >= 0.8 * nodes,
            format!("{} times less CPU on {nodes} nodes", number(join)),
        );
        let apart = cores[1].wall / cores[0].wall;
        chapter.says(
            "7.11",
            "cores of one node or of two are the same (within a fifth)",
            (0.8..1.2).contains(&apart),
            format!("2 nodes of a thread take {} of a node of 2", number(apart)),
        );
        Ok(())
    }

    fn merge_over_nodes(&mut self, chapter: &mut Chapter, hash: &[(usize, Sum)]) -> Result<()> {
        let (sums, table) = self.scaling(How::Merge)?;
        let title = "Figure 7.13: sort-merge join of the same rows over nodes";
        let plot = linear(title, "nodes", "s of CPU of the busiest node")
            .series(line("set-up", Stroke::Tcp, &over(&sums, |s| s.setup_cpu)))
            .series(line("join", Stroke::Weft, &over(&sums, |s| s.turn_cpu)));
        chapter
            .sections
            .push(Section::new(title).table(table).plot(plot));
        let dearer = sums[0].1.setup_cpu / hash[0].1.setup_cpu;
        chapter.says(
            "7.13",
            "sorting costs more than hash tables",
            dearer > 1.0,
            format!("{} times the CPU on one node", number(dearer)),
        );
        let (nodes, falls) = (self.nodes() as f64, times(&sums, |s| s.setup_cpu));
        chapter.says(
            "7.13",
            "and its cost falls with the nodes too",
            falls >= 0.8 * nodes,
            format!("{} times less on {nodes} nodes", number(falls)),
        );
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
        let mut all = Vec::new();
        let mut table = Table::new(&[
            "nodes",
            "GB in all",
            "hash: set-up",
            "join",
            "GB/s",
            "merge: set-up",
            "join",
            "waited",
        ]);
        for nodes in 1..=self.nodes() {
            let sums = self.points(&[point(nodes, How::Hash), point(nodes, How::Merge)])?;
            table.push([
                nodes.to_string(),
                number(gigabytes(nodes)),
                number(sums[0].setup_cpu),
                number(sums[0].turn_cpu),
                number(gigabytes(nodes) / sums[0].cpu()),
                number(sums[1].setup_cpu),
                number(sums[1].turn_cpu),
                number(sums[1].waited),
            ]);
            all.push((nodes, sums[0], sums[1]));
        }
        let hash: Vec<_> = all.iter().map(|(n, hash, _)| (*n, *hash)).collect();
        let merge: Vec<_> = all.iter().map(|(n, _, merge)| (*n, *merge)).collect();
        let join = over(&hash, |s| s.turn_cpu);
        let title = "Figures 7.12 and 7.14: the same rows on every node";
        let plot = linear(title, "nodes", "s of CPU of the busiest node")
            .series(line(
                "hash, set-up",
                Stroke::Tcp,
                &over(&hash, |s| s.setup_cpu),
            ))
            .series(line("hash, join", Stroke::Weft, &join))
            .series(line(
                "merge, set-up",
                Stroke::Other,
                &over(&merge, |s| s.setup_cpu),
            ))
            .series(line(
                "merge, join",
                Stroke::WeftCrc,
                &over(&merge, |s| s.turn_cpu),
            ));
        let section = Section::new(title)
            .text("Seconds of CPU of the busiest node; GB/s of that time; seconds that the query thread waited for the ring.")
            .table(table)
            .plot(plot);
        chapter.sections.push(section);
        self.volume_says(chapter, &hash, &merge, &join);
        Ok(())
    }

    fn volume_says(
        &self,
        chapter: &mut Chapter,
        hash: &[(usize, Sum)],
        merge: &[(usize, Sum)],
        join: &[(f64, f64)],
    ) {
        let nodes = self.nodes() as f64;
        let fit = r_squared(join);
        chapter.says(
            "7.12",
            "the join phase is linear in the size of R",
            fit >= 0.98,
            format!("R² = {fit:.3}"),
        );
        let setup = times(hash, |s| s.setup_cpu);
        chapter.says(
            "7.12",
            "the set-up stays as it is (within a fifth)",
            (0.8..1.25).contains(&setup),
            format!("on one node {} of that on {nodes}", number(setup)),
        );
        let gain = nodes * times(hash, Sum::cpu);
        chapter.says(
            "7.12",
            "six nodes have 2.7 times the throughput of one",
            gain >= 2.7,
            format!("{nodes} nodes have {} times", number(gain)),
        );
        let (Some((_, h)), Some((_, m))) = (hash.last(), merge.last()) else {
            return;
        };
        let ratio = m.turn_cpu / h.turn_cpu;
        chapter.says(
            "7.14",
            "merging is faster than probing hash tables",
            ratio < 1.0,
            format!("{} of its CPU on {nodes} nodes", number(ratio)),
        );
        chapter.says(
            "7.14",
            "merging has to wait for the ring",
            m.waited > 0.1 * m.turn_cpu,
            format!(
                "{} s beside {} s of CPU",
                number(m.waited),
                number(m.turn_cpu)
            ),
        );
        // Both join phases grow with the nodes, the set-ups do not.
        let gain = (h.turn_cpu - m.turn_cpu) / nodes;
        let crossing = (m.setup_cpu - h.setup_cpu) / gain;
        chapter.says(
            "7.14",
            "from about 30 nodes on sort-merge is faster in all",
            gain > 0.0 && crossing <= 60.0,
            if gain > 0.0 {
                format!("from {crossing:.0} nodes on, if the lines go on")
            } else {
                "never".into()
            },
        );
    }

    fn threads(&mut self, chapter: &mut Chapter) -> Result<()> {
        let headers = [
            "threads",
            "RDMA s",
            "TCP s",
            "times",
            "RDMA CPU s",
            "TCP CPU s",
        ];
        let mut table = Table::new(&headers);
        let mut gains = Vec::new();
        for threads in [1, 2] {
            let points = [Carrier::Rdma, Carrier::Tcp]
                .map(|carrier| self.joining(carrier, 2, How::Hash, 0.0, threads));
            let sums = self.points(&points)?;
            let (rdma, tcp) = (sums[0], sums[1]);
            table.push([
                threads.to_string(),
                number(rdma.wall),
                number(tcp.wall),
                number(tcp.wall / rdma.wall),
                number(rdma.turn_cpu),
                number(tcp.turn_cpu),
            ]);
            gains.push((tcp.wall / rdma.wall, tcp.turn_cpu / rdma.turn_cpu));
        }
        // Transport alone, where it is not hidden behind the join.
        let bytes = self.args.volume as usize * MIB / 2;
        let points = [Carrier::Rdma, Carrier::Tcp].map(|carrier| Point {
            carrier,
            nodes: 2,
            element: 4 * MIB,
            work: Work::Loop { bytes },
        });
        let sums = self.points(&points)?;
        let alone = (
            sums[1].wall / sums[0].wall,
            sums[1].turn_cpu / sums[0].turn_cpu,
        );
        table.push([
            "no join".to_owned(),
            number(sums[0].wall),
            number(sums[1].wall),
            number(alone.0),
            number(sums[0].turn_cpu),
            number(sums[1].turn_cpu),
        ]);
        let section = Section::new("Figure 7.15, tables 7.2 and 7.3: RDMA against its TCP twin")
            .text("Wall time of a hash join's join phase on two nodes, by threads of each node, and of the elements going round without a join.")
            .table(table);
        chapter.sections.push(section);
        chapter.says(
            "7.15",
            "RDMA is faster than TCP at any number of threads",
            gains.iter().all(|gain| gain.0 > 1.0),
            format!(
                "{} times with one thread, {} with two; {} without a join",
                number(gains[0].0),
                number(gains[1].0),
                number(alone.0)
            ),
        );
        chapter.says(
            "7.15",
            "aim: 1.3 times its twin on one host, two threads",
            gains[1].0 >= 1.3,
            format!("{} times", number(gains[1].0)),
        );
        chapter.says(
            "table 7.3",
            "TCP takes more CPU for the same join",
            gains.iter().all(|gain| gain.1 > 1.0),
            format!(
                "{} and {} times; {} without a join",
                number(gains[0].1),
                number(gains[1].1),
                number(alone.1)
            ),
        );
        Ok(())
    }
}

/// How well a straight line fits.
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
