//! Events of one answer of `epoll_wait` that are of the same registration.

/// Of `n` events, those that belong to an earlier one with the same `data`, as pairs of both places: all later ones, or (`from` above 0) those from `from` on
/// that belong to one before `from`.
pub fn same(n: usize, from: usize, data: impl Fn(usize) -> u64) -> Vec<(usize, usize)> {
    let mut order: Vec<(u64, usize)> = (0..n).map(|at| (data(at), at)).collect();
    order.sort_unstable();
    let groups = order.chunk_by(|one, next| one.0 == next.0);
    let pairs = groups.flat_map(|group| {
        let first = group[0].1;
        let belongs = move |at: usize| at >= from && (from == 0 || first < from);
        let later = group[1..].iter().map(|&(_, at)| at);
        later
            .filter(move |&at| belongs(at))
            .map(move |at| (at, first))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As [`same`] says, pair by pair.
    fn slowly(data: &[u64], from: usize) -> Vec<(usize, usize)> {
        let before = |at: usize| if from == 0 { at } else { from };
        let first = |at: usize| data[..before(at)].iter().position(|it| *it == data[at]);
        let later = from..data.len();
        let mut pairs: Vec<_> = later.filter_map(|at| Some((at, first(at)?))).collect();
        pairs.sort_unstable();
        pairs
    }

    #[test]
    fn each_later_one_belongs_to_the_first() {
        let mut seed = 1_u64;
        for n in 0..200 {
            let data: Vec<u64> = (0..n)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) % (n / 2 + 1)
                })
                .collect();
            for from in [0, data.len() / 3, data.len()] {
                let mut pairs = same(data.len(), from, |at| data[at]);
                pairs.sort_unstable();
                assert_eq!(pairs, slowly(&data, from), "{from} {data:?}");
            }
        }
    }
}
