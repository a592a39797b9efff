//! Ratios as horizontal bars, with the spread of the runs and the target of each.

use super::{html::escape, number};
use crate::stats::Summary;
use std::fmt::Write;

const WIDTH: f64 = 896.0;
/// Where the bars begin, and where they end.
const LEFT: f64 = 330.0;
const RIGHT: f64 = 840.0;
const ROW: f64 = 26.0;
const TOP: f64 = 34.0;

#[derive(Clone, Debug)]
pub struct Mark {
    /// The name of the ratio.
    pub label: String,
    /// Median ratio, above 0.
    pub ratio: f64,
    /// Smallest and largest ratio.
    pub spread: (f64, f64),
    /// The target, a lower or an upper bound; `None`: the ratio is shown for comparison only.
    pub aim: Option<f64>,
    /// Whether the target is reached.
    pub reached: bool,
}

/// Bars under a title, on an axis of powers of two around 1.
#[derive(Clone, Debug)]
pub struct Bars {
    title: String,
    marks: Vec<Mark>,
}

impl Bars {
    /// Leaves out marks whose numbers are not positive and finite.
    pub fn new(title: &str, marks: Vec<Mark>) -> Self {
        let good = |value: &f64| value.is_finite() && *value > 0.0;
        let fits = |mark: &Mark| {
            let mut all = [mark.ratio, mark.spread.0, mark.spread.1].into_iter();
            all.all(|value| good(&value)) && mark.aim.is_none_or(|aim| good(&aim))
        };
        Self {
            title: title.to_owned(),
            marks: marks.into_iter().filter(fits).collect(),
        }
    }

    /// Ratios to the same reference, of which a larger one is better: blue from 1 on, red below, and a stroke at 1. Each row has its label and its
    /// ratios.
    pub fn gains(title: &str, rows: impl IntoIterator<Item = (String, Summary)>) -> Self {
        let marks = rows.into_iter().map(|(label, ratio)| Mark {
            label,
            ratio: ratio.median,
            spread: (ratio.min, ratio.max),
            aim: Some(1.0),
            reached: ratio.median >= 1.0,
        });
        Self::new(title, marks.collect())
    }

    /// The largest gain, and the ratios below 1, in words.
    pub fn words(&self) -> String {
        let most = self.marks.iter();
        let Some(most) = most.max_by(|a, b| a.ratio.total_cmp(&b.ratio)) else {
            return "Nothing was compared.".to_owned();
        };
        let lost = self.marks.iter().filter(|mark| mark.ratio < 1.0);
        let lost: Vec<String> = lost
            .map(|mark| format!("{} ({})", mark.label, number(mark.ratio)))
            .collect();
        let lost = if lost.is_empty() {
            "none".to_owned()
        } else {
            lost.join("; ")
        };
        let (ratio, label) = (number(most.ratio), &most.label);
        format!("Largest gain: {label}, {ratio} times. Not better: {lost}.")
    }

    /// The powers of two at the ends of the axis.
    fn ends(&self) -> (f64, f64) {
        let all = self.marks.iter().flat_map(|mark| {
            let aim = mark.aim.unwrap_or(mark.ratio);
            [mark.spread.0, mark.spread.1, mark.ratio, aim]
        });
        let (low, high) = all.fold((1.0_f64, 1.0_f64), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        let low = low.log2().floor().clamp(-6.0, -1.0);
        (low, high.log2().ceil().clamp(low + 1.0, 8.0).max(1.0))
    }

    pub(super) fn to_inline_svg(&self) -> String {
        let (low, high) = self.ends();
        let x = |value: f64| {
            let place = (value.log2().clamp(low, high) - low) / (high - low);
            LEFT + place * (RIGHT - LEFT)
        };
        let height = TOP + ROW * self.marks.len() as f64 + 30.0;
        let title = escape(&self.title);
        let mut svg = format!(
            "<svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {height}\" xmlns=\"http://www.w3.org/2000/svg\" font-size=\"13\">\
             <text x=\"{WIDTH}\" y=\"16\" text-anchor=\"end\">{title}</text>"
        );
        let bottom = height - 24.0;
        for power in low as i32..=high as i32 {
            let value = 2f64.powi(power);
            let (at, wide) = (x(value), if power == 0 { 2 } else { 1 });
            let _ = write!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#808080\" stroke-opacity=\".6\" stroke-width=\"{wide}\"/>\
                 <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{value}</text>",
                bottom + 16.0
            );
        }
        for (row, mark) in self.marks.iter().enumerate() {
            let y = TOP + ROW * row as f64;
            let (from, to) = (x(1.0).min(x(mark.ratio)), x(1.0).max(x(mark.ratio)));
            let colour = match (mark.aim, mark.reached) {
                (None, _) => "#e67e22",
                (_, true) => "#2f7ed8",
                (_, false) => "#d64541",
            };
            let middle = y + ROW / 2.0;
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
                 <rect x=\"{from:.1}\" y=\"{}\" width=\"{:.1}\" height=\"14\" fill=\"{colour}\"/>\
                 <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"currentColor\"/>",
                LEFT - 8.0,
                middle + 4.0,
                escape(&mark.label),
                y + 6.0,
                (to - from).max(1.0),
                x(mark.spread.0),
                x(mark.spread.1),
            );
            if let Some(aim) = mark.aim {
                let _ = write!(
                    svg,
                    "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{1}\" y2=\"{2}\" stroke=\"currentColor\" stroke-width=\"3\"/>",
                    x(aim),
                    y + 2.0,
                    y + ROW - 2.0
                );
            }
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{}\">{:.2}</text>",
                RIGHT + 8.0,
                middle + 4.0,
                mark.ratio
            );
        }
        svg.push_str("</svg>");
        svg
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(label: &str, ratio: f64, aim: Option<f64>) -> Mark {
        Mark {
            label: label.to_owned(),
            ratio,
            spread: (ratio * 0.9, ratio * 1.1),
            aim,
            reached: aim.is_some_and(|aim| ratio >= aim),
        }
    }

    #[test]
    fn each_row_has_its_bar_and_its_aim() {
        let bars = Bars::new(
            "ratios",
            vec![mark("a <b>", 3.0, Some(2.5)), mark("c", 0.5, None)],
        );
        let svg = bars.to_inline_svg();
        assert_eq!(svg.matches("<rect").count(), 2);
        assert_eq!(svg.matches("stroke-width=\"3\"").count(), 1);
        assert!(
            svg.contains("a &lt;b&gt;") && svg.contains(">3.00<"),
            "{svg}"
        );
        assert!(svg.contains("#2f7ed8") && svg.contains("#e67e22"), "{svg}");
    }

    #[test]
    fn gains_and_losses_are_told_apart() {
        let ratio = |value: f64| Summary::of(&[value]).unwrap();
        let rows = [
            ("write".to_owned(), ratio(8.0)),
            ("send".to_owned(), ratio(0.5)),
        ];
        let bars = Bars::gains("times", rows);
        assert_eq!(
            bars.words(),
            "Largest gain: write, 8.00 times. Not better: send (0.50)."
        );
        let svg = bars.to_inline_svg();
        assert!(svg.contains("#2f7ed8") && svg.contains("#d64541"), "{svg}");
        let none = Bars::gains("times", []).words();
        assert_eq!(none, "Nothing was compared.");
    }

    #[test]
    fn what_has_no_place_on_the_axis_is_left_out() {
        let bars = Bars::new(
            "r",
            vec![mark("nan", f64::NAN, None), mark("none", 0.0, Some(1.0))],
        );
        assert_eq!(bars.to_inline_svg().matches("<rect").count(), 0);
    }
}
