//! Line plots as SVG.

use crate::size::human;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH: i32 = 896;
const HEIGHT: i32 = 400;
/// Width of the column on the right that holds the legend.
const LEGEND: i32 = 254;
/// The grey of grids and frames, legible on light and dark.
const GRID: RGBColor = RGBColor(128, 128, 128);
/// A colour that is replaced with the page's own text colour.
const INK: RGBColor = RGBColor(0, 0, 1);
/// An opacity that marks dashed lines: plotters would draw an element for every dash.
const DASHED: f64 = 0.99;

/// One axis: its label and its scale.
#[derive(Clone, Debug)]
pub struct Axis {
    label: String,
    scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// Message sizes on a scale of powers of two.
    Bytes,
    /// Powers of ten.
    Log,
    /// From zero.
    Linear,
}

impl Axis {
    fn new(label: &str, scale: Scale) -> Self {
        let label = label.to_owned();
        Self { label, scale }
    }

    /// Message sizes, on powers of two.
    pub fn bytes() -> Self {
        Self::new("size", Scale::Bytes)
    }

    /// Values on powers of ten, labelled with their unit.
    pub fn log(label: &str) -> Self {
        Self::new(label, Scale::Log)
    }

    /// Values from zero upwards, labelled with their unit.
    pub fn linear(label: &str) -> Self {
        Self::new(label, Scale::Linear)
    }

    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Bytes => value.log2(),
            Scale::Log => value.log10(),
            Scale::Linear => value,
        }
    }

    /// The ends of the axis and its ticks, in places, for values from `low` to `high`.
    fn ticks(&self, low: f64, high: f64) -> (f64, f64, Vec<(f64, String)>) {
        match self.scale {
            Scale::Bytes => {
                let (first, last) = (low.log2().floor() as i32, high.log2().ceil() as i32);
                let last = last.max(first + 1);
                let step = (last - first) / 14 + 1;
                let ticks = (first..=last)
                    .step_by(step as usize)
                    .map(|power| (f64::from(power), human(1 << power.clamp(0, 62))))
                    .collect();
                (f64::from(first), f64::from(last), ticks)
            }
            Scale::Log => {
                let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
                let last = last.max(first + 1);
                let ticks = (first..=last)
                    .map(|power| (f64::from(power), plain(10f64.powi(power))))
                    .collect();
                (f64::from(first), f64::from(last), ticks)
            }
            Scale::Linear => {
                let high = if high > 0.0 { high } else { 1.0 };
                let rough = high / 5.0;
                let unit = 10f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 2.5, 5.0, 10.0]
                    .map(|factor| factor * unit)
                    .into_iter()
                    .find(|step| *step >= rough)
                    .unwrap_or(rough);
                let count = (high / step * 1.02).ceil() as usize;
                let ticks = (0..=count)
                    .map(|index| {
                        let value = index as f64 * step;
                        (value, plain(value))
                    })
                    .collect();
                (0.0, count as f64 * step, ticks)
            }
        }
    }
}

/// A tick's number without needless zeros.
fn plain(value: f64) -> String {
    if value >= 1e9 {
        return format!("{} G", value / 1e9);
    }
    if value >= 1e6 {
        return format!("{} M", value / 1e6);
    }
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The form of a line. A stack has the same colour in every plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stroke {
    /// weft, blue.
    Weft,
    /// weft with CRC or another second variant, teal.
    WeftCrc,
    /// A third variant of weft, violet.
    WeftOther,
    /// Plain TCP or the baseline, orange.
    Tcp,
    /// A second baseline, red.
    Other,
}

impl Stroke {
    fn colour(self) -> RGBColor {
        match self {
            Self::Weft => RGBColor(47, 126, 216),
            Self::WeftCrc => RGBColor(22, 160, 133),
            Self::WeftOther => RGBColor(155, 89, 182),
            Self::Tcp => RGBColor(230, 126, 34),
            Self::Other => RGBColor(214, 69, 65),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Series {
    label: String,
    stroke: Stroke,
    dashed: bool,
    points: Vec<(f64, f64)>,
    /// Smallest and largest run at each point.
    spread: Vec<(f64, f64, f64)>,
}

impl Series {
    /// A line through `points` (x, y).
    pub fn new(label: impl Into<String>, stroke: Stroke, points: Vec<(f64, f64)>) -> Self {
        Self {
            label: label.into(),
            stroke,
            dashed: false,
            points,
            spread: Vec::new(),
        }
    }

    /// Draws the line dashed.
    #[must_use]
    pub fn dashed(mut self) -> Self {
        self.dashed = true;
        self
    }

    /// Shades the spread of the runs: (x, min, max).
    #[must_use]
    pub fn spread(mut self, spread: Vec<(f64, f64, f64)>) -> Self {
        self.spread = spread;
        self
    }
}

/// A plot of some lines.
#[derive(Clone, Debug)]
pub struct Plot {
    title: String,
    x: Axis,
    y: Axis,
    series: Vec<Series>,
}

impl Plot {
    /// A plot without lines.
    pub fn new(title: impl Into<String>, x: Axis, y: Axis) -> Self {
        Self {
            title: title.into(),
            x,
            y,
            series: Vec::new(),
        }
    }

    /// Adds a line; one without points is left out.
    #[must_use]
    pub fn series(mut self, series: Series) -> Self {
        if !series.points.is_empty() {
            self.series.push(series);
        }
        self
    }

    pub fn title(&self) -> &str {
        &self.title
    }

    /// Whether there are points to draw.
    pub fn has_points(&self) -> bool {
        !self.series.is_empty()
    }

    /// The plot as a separate file, on white.
    pub fn to_svg(&self) -> String {
        self.draw().replace(
            "<svg ",
            "<svg style=\"background:#fff\" font-family=\"sans-serif\" ",
        )
    }

    /// The plot for a page: its text and frame take the page's colour.
    pub(super) fn to_inline_svg(&self) -> String {
        // Attributes that the page's style or SVG's defaults set anyway are removed from every element: a third of
        // the bytes.
        let mut svg = self.draw();
        for needless in [
            " opacity=\"1\"",
            " font-family=\"sans-serif\"",
            " stroke-width=\"1\"",
            " stroke=\"none\"",
        ] {
            svg = svg.replace(needless, "");
        }
        let svg = svg.replace(" \"/>\n", "\"/>").replace("/>\n", "/>");
        let ink = format!("#{:02X}{:02X}{:02X}", INK.0, INK.1, INK.2);
        svg.replace(&ink, "currentColor").replacen(
            "<svg ",
            &format!(
                "<svg role=\"img\" aria-label=\"{}\" ",
                super::html::escape(&self.title)
            ),
            1,
        )
    }

    fn draw(&self) -> String {
        let mut svg = String::new();
        let root =
            SVGBackend::with_string(&mut svg, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
        // A backend that writes to a string does not fail; if it did, the page would be without a plot.
        if let Err(error) = self.draw_on(&root) {
            eprintln!("plot '{}': {error}", self.title);
        }
        drop(root);
        svg.replace(&format!("opacity=\"{DASHED}\""), "stroke-dasharray=\"6 4\"")
    }

    /// The values inside the plot's range.
    fn range(&self, of: impl Fn(&Series) -> Vec<f64>, axis: &Axis) -> (f64, f64) {
        let usable =
            |value: &f64| value.is_finite() && (axis.scale == Scale::Linear || *value > 0.0);
        let values: Vec<f64> = self.series.iter().flat_map(of).filter(usable).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if low > high { (1.0, 10.0) } else { (low, high) }
    }

    fn draw_on(
        &self,
        root: &DrawingArea<SVGBackend<'_>, Shift>,
    ) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let (left, top, right, bottom) = (64_i32, 40_i32, WIDTH - LEGEND, HEIGHT - 62);
        let (x_low, x_high) = self.range(
            |line| line.points.iter().map(|point| point.0).collect(),
            &self.x,
        );
        // The axis follows the medians: one disturbed run must not flatten the lines; spreads are clipped.
        let (y_low, y_high) = self.range(
            |line| line.points.iter().map(|point| point.1).collect(),
            &self.y,
        );
        let (x_first, x_last, x_ticks) = self.x.ticks(x_low, x_high);
        let (y_first, y_last, y_ticks) = self.y.ticks(y_low, y_high);
        let x_at = |place: f64| {
            let share = (place - x_first) / (x_last - x_first);
            left + (share * f64::from(right - left)).round() as i32
        };
        let y_at = |place: f64| {
            let share = (place - y_first) / (y_last - y_first);
            bottom - (share.clamp(0.0, 1.0) * f64::from(bottom - top)).round() as i32
        };
        let to_x = |value: f64| x_at(self.x.place(value));
        let to_y = |value: f64| y_at(self.y.place(value));
        let style = |size: u32, h: HPos, v: VPos| {
            TextStyle::from(("sans-serif", size).into_font())
                .color(&INK)
                .pos(Pos::new(h, v))
        };
        let text = |text: &str, at: (i32, i32), style: TextStyle<'_>| {
            root.draw(&Text::new(text.to_owned(), at, style))
        };
        let path = |points: Vec<(i32, i32)>, style: ShapeStyle| {
            root.draw(&PathElement::new(points, style))
        };
        text(&self.title, (left, 10), style(17, HPos::Left, VPos::Top))?;
        let grid = GRID.mix(0.3).stroke_width(1);
        for (place, label) in &y_ticks {
            let y = y_at(*place);
            path(vec![(left, y), (right, y)], grid)?;
            text(label, (left - 7, y), style(13, HPos::Right, VPos::Center))?;
        }
        let size = if x_ticks.len() > 8 { 11 } else { 13 };
        for (place, label) in &x_ticks {
            let x = x_at(*place);
            path(vec![(x, top), (x, bottom)], grid)?;
            text(label, (x, bottom + 7), style(size, HPos::Center, VPos::Top))?;
        }
        let frame = vec![(left, top), (left, bottom), (right, bottom)];
        path(frame, INK.mix(0.6).stroke_width(1))?;
        let under = style(13, HPos::Center, VPos::Top);
        let middle = (i32::midpoint(left, right), bottom + 30);
        text(&self.x.label, middle, under.clone())?;
        let upright = under.transform(FontTransform::Rotate270);
        text(&self.y.label, (16, i32::midpoint(top, bottom)), upright)?;
        for (row, line) in (0_i32..).zip(&self.series) {
            let colour = line.stroke.colour();
            let spread = line.spread.iter();
            let low = spread.clone().map(|(x, low, _)| (to_x(*x), to_y(*low)));
            let high = spread.rev().map(|(x, _, high)| (to_x(*x), to_y(*high)));
            let band: Vec<(i32, i32)> = low.chain(high).collect();
            if band.len() > 3 {
                root.draw(&Polygon::new(band, colour.mix(0.15)))?;
            }
            let points = line.points.iter().map(|(x, y)| (to_x(*x), to_y(*y)));
            let opacity = if line.dashed { DASHED } else { 1.0 };
            let stroke = colour.mix(opacity).stroke_width(2);
            path(points.clone().collect(), stroke)?;
            for point in points {
                root.draw(&Circle::new(point, 3, colour.filled()))?;
            }
            let y = top + 8 + 21 * row;
            path(vec![(right + 14, y), (right + 38, y)], stroke)?;
            text(
                &line.label,
                (right + 44, y),
                style(13, HPos::Left, VPos::Center),
            )?;
        }
        root.present()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes() {
        let (first, last, ticks) = Axis::bytes().ticks(1.0, f64::from(64 << 20));
        assert!((first, last) == (0.0, 26.0));
        assert_eq!(ticks.first().unwrap().1, "1 B");
        assert_eq!(ticks.last().unwrap().1, "64 MiB");
        let (first, last, ticks) = Axis::linear("GB/s").ticks(0.4, 4.6);
        assert!((first, last) == (0.0, 5.0), "{first} {last}");
        assert_eq!(ticks[1].1, "1");
        let (first, last, ticks) = Axis::log("us").ticks(0.7, 300.0);
        assert!((first, last) == (-1.0, 3.0));
        assert_eq!(ticks[0].1, "0.1");
    }

    #[test]
    fn a_plot_names_its_lines_and_colours() {
        let plot = Plot::new("Write", Axis::bytes(), Axis::linear("GB/s"))
            .series(
                Series::new("weft", Stroke::Weft, vec![(64.0, 1.0), (128.0, 2.0)])
                    .spread(vec![(64.0, 0.5, 1.5), (128.0, 1.5, 2.5)]),
            )
            .series(Series::new("tcp", Stroke::Tcp, vec![(64.0, 1.0)]).dashed())
            .series(Series::new("none", Stroke::Other, Vec::new()));
        let inline = plot.to_inline_svg();
        for text in [
            "Write",
            "weft",
            "tcp",
            "GB/s",
            "64 B",
            "currentColor",
            "#2F7ED8",
            "#E67E22",
        ] {
            assert!(inline.contains(text), "{text} is missing");
        }
        assert!(!inline.contains("none<"));
        assert_eq!(
            inline.matches("stroke-dasharray").count(),
            2,
            "a dashed line and its key"
        );
        assert!(plot.to_svg().starts_with("<svg style=\"background:#fff\""));
        assert_eq!(plot.title(), "Write");
    }

    #[test]
    fn values_off_a_logarithm_do_not_break_the_plot() {
        let plot = Plot::new("odd", Axis::bytes(), Axis::log("us")).series(Series::new(
            "x",
            Stroke::Weft,
            vec![(1.0, 0.0), (2.0, f64::NAN), (4.0, 3.0)],
        ));
        assert!(plot.to_svg().contains("</svg>"));
    }
}
