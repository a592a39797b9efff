//! Films: how many bytes each frame has. What the bytes are does not matter to servers, so all films have the same.

use crate::named::named;

/// Frames of a second.
pub(super) const FPS: u64 = 24;
/// Frames from one intra-coded frame to the next at most.
const GROUP: u64 = 2 * FPS;
/// Each this many frames one is predicted from earlier ones alone; those between are predicted from both sides.
const P_EVERY: u64 = 3;
/// Sizes of frames in one scene: intra-coded, predicted, predicted from both sides.
const SIZES: [f64; 3] = [8.0, 3.0, 1.0];
/// Frames of a scene: at least and at most.
const SCENE: [u64; 2] = [FPS, 10 * FPS];
/// A scene has up to so many times the bytes of the mean one, or so many times less.
const BUSY: f64 = 2.5;
/// A frame has up to this share more or less than its kind.
const SPREAD: f64 = 0.3;

named! {
    /// How the bytes of a film are spread over its time.
    pub enum Films {
        /// Variable bit rate: groups of pictures with large first frames, and scenes that need more or less
        Variable = "variable",
        /// As many bytes in each frame
        Constant = "constant",
    }
}

/// Random numbers (xorshift).
pub(super) fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

/// One in `from..to`.
fn within(random: &mut u64, from: f64, to: f64) -> f64 {
    from + (to - from) * (next(random) % 1_000_003) as f64 / 1_000_003.0
}

/// A film of a given length and mean rate.
pub(super) struct Film {
    /// Where each frame begins, and the end of the last.
    at: Vec<u64>,
}

impl Film {
    /// Of `len` bytes at `rate` Mb/s in the mean, the same for the same seed.
    pub(super) fn new(films: Films, len: u64, rate: f64, seed: u64) -> Self {
        let frames = (len as f64 * 8.0 / (rate * 1e6) * FPS as f64).round();
        let frames = (frames as usize).max(1);
        let sizes = match films {
            Films::Constant => vec![1.0; frames],
            Films::Variable => variable(frames, seed),
        };
        let all: f64 = sizes.iter().sum();
        let mut sum = 0.0;
        let mut at = vec![0];
        at.extend(sizes.iter().map(|size| {
            sum += size;
            // The sum of floats at the end may not be `all`.
            ((sum / all * len as f64) as u64).min(len)
        }));
        at[frames] = len;
        Self { at }
    }

    pub(super) fn frames(&self) -> u64 {
        self.at.len() as u64 - 1
    }

    /// Where a frame begins; past the last one, the end.
    pub(super) fn at(&self, frame: u64) -> u64 {
        let last = self.at.len() - 1;
        self.at[usize::try_from(frame).map_or(last, |frame| frame.min(last))]
    }

    /// Bytes of so many frames from one on.
    pub(super) fn len(&self, frame: u64, count: u64) -> u64 {
        self.at(frame + count) - self.at(frame)
    }

    /// The most bytes of so many frames.
    pub(super) fn most(&self, count: u64) -> u64 {
        let all = (0..self.frames()).map(|frame| self.len(frame, count));
        all.max().unwrap_or(0)
    }
}

/// The frames' sizes in relation to each other.
fn variable(frames: usize, seed: u64) -> Vec<f64> {
    // No seed is the zero that would stay one.
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut sizes = Vec::with_capacity(frames);
    while sizes.len() < frames {
        let long = SCENE[0] + next(&mut random) % (SCENE[1] - SCENE[0]);
        let log = BUSY.ln();
        let busy = within(&mut random, -log, log).exp();
        // A scene begins with an intra-coded frame, because nothing before it is like it.
        for frame in 0..long {
            let [intra, predicted, both] = SIZES;
            let kind = match frame % GROUP {
                0 => intra,
                n if n % P_EVERY == 0 => predicted,
                _ => both,
            };
            let spread = within(&mut random, 1.0 - SPREAD, 1.0 + SPREAD);
            sizes.push(kind * busy * spread);
        }
    }
    sizes.truncate(frames);
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 128 << 20;

    #[test]
    fn the_mean_rate_is_as_said_and_the_rate_varies() {
        for rate in [1.0, 2.5, 5.3, 8.7] {
            for seed in 0..20 {
                let film = Film::new(Films::Variable, LEN, rate, seed);
                assert_eq!(film.len(0, film.frames()), LEN);
                let seconds = film.frames() as f64 / FPS as f64;
                let mean = LEN as f64 * 8.0 / seconds / 1e6;
                assert!((mean / rate - 1.0).abs() < 1e-3, "{mean} {rate}");
                let second = rate * 1e6 / 8.0;
                let most = film.most(FPS) as f64 / second;
                let each = (0..film.frames() / FPS).map(|s| film.len(s * FPS, FPS));
                let least = each.min().unwrap() as f64 / second;
                assert!((1.5..5.0).contains(&most), "{most}");
                assert!((0.1..0.7).contains(&least), "{least}");
                // Large frames, and many small ones.
                let largest = film.most(1) as f64 / (second / FPS as f64);
                assert!((5.0..20.0).contains(&largest), "{largest}");
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_film_again_and_another_one_another() {
        let film = |seed| Film::new(Films::Variable, LEN, 5.3, seed).at;
        assert_eq!(film(7), film(7));
        assert_ne!(film(7), film(8));
        assert!(film(0).is_sorted());
    }

    #[test]
    fn a_constant_film_has_equal_frames() {
        let film = Film::new(Films::Constant, LEN, 5.3, 1);
        let mean = LEN / film.frames();
        for frame in 0..film.frames() {
            assert!(film.len(frame, 1).abs_diff(mean) <= 1);
        }
        assert_eq!(film.at(u64::MAX), LEN);
    }
}
