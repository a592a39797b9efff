//! Bodies of the fuzz targets: they take any bytes, and check the invariants.

use crate::boxes::{self, Movie};
use crate::cut::{Cutter, Part};
use crate::wire::{self, Answer, Ask, Blocks, Content, Request, WORD_LEN};

/// Boxes of files: heads, movie boxes, fragments.
pub fn media_boxes(data: &[u8]) {
    if let Ok(Some(head)) = boxes::head(data) {
        assert!(head.size.is_none_or(|size| size >= head.head));
    }
    let (first, second) = data.split_at(data.len() / 2);
    if let Ok(movie) = Movie::parse(first) {
        let _ = movie.fragment(second);
    }
    if let Ok(movie) = Movie::parse(data) {
        let _ = movie.fragment(data);
    }
}

/// A stream from a pipe, whole and in pieces: both are cut alike, no fragment is too long, and no byte comes twice.
pub fn media_stream(data: &[u8]) {
    const MOST: usize = 4096;
    let Some((&step, stream)) = data.split_first() else {
        return;
    };
    let cut = |step: usize| {
        let mut parts = Vec::new();
        let mut cutter = Cutter::new(MOST);
        for piece in stream.chunks(step.max(1)) {
            if cutter.feed(piece, |part| parts.push(part)).is_err() {
                return (parts, false);
            }
        }
        cutter.finish(|part| parts.push(part));
        (parts, true)
    };
    let whole = cut(stream.len().max(1));
    let pieces = cut(step.into());
    assert_eq!(whole, pieces);
    let mut sum = 0;
    for part in &whole.0 {
        if let Part::Fragment { bytes, .. } = part {
            assert!(!bytes.is_empty() && bytes.len() <= MOST);
            sum += bytes.len();
        }
    }
    assert!(sum <= stream.len());
}

/// Private data of requests and replies, and messages about blocks.
pub fn media_wire(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        let again = Request::decode(&request.encode());
        assert_eq!(again, Ok(request));
    }
    if let Ok(Ok(grant)) = wire::decode_reply(data) {
        let len = match grant.content {
            Content::Blocks(blocks) => blocks.region_len(),
            _ => grant.len,
        };
        assert!(grant.at.addr.checked_add(len).is_some());
        assert_eq!(wire::decode_reply(&grant.encode()), Ok(Ok(grant)));
    }
    if let Ok(ask) = Ask::decode(data) {
        assert_eq!(Ask::decode(&ask.encode()), Ok(ask));
    }
    let blocks = Blocks {
        block: *wire::BLOCK.start(),
        slots: 5,
        data_at: 5 * WORD_LEN,
    };
    if let Ok(answer) = Answer::decode(data, &blocks) {
        assert!(answer.place.is_err() || answer.place.is_ok_and(|place| place.slot < 5));
        assert_eq!(Answer::decode(&answer.encode(), &blocks), Ok(answer));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/corpus")
            .join(name);
        let files = std::fs::read_dir(dir).expect("a corpus");
        let mut all: Vec<_> = files
            .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
            .collect();
        all.sort();
        all
    }

    const NAMES: [&str; 3] = ["media_boxes", "media_stream", "media_wire"];
    static CORPORA: LazyLock<[Vec<Vec<u8>>; 3]> = LazyLock::new(|| NAMES.map(corpus));

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]
        #[test]
        fn damaged_files_and_streams_hold(
            which in 0_usize..100,
            cut in any::<u16>(),
            damage in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
        ) {
            let bodies: [fn(&[u8]); 3] = [super::media_boxes, super::media_stream, super::media_wire];
            for (all, body) in CORPORA.iter().zip(bodies) {
                let mut bytes = all[which % all.len()].clone();
                for &(at, value) in &damage {
                    let at = usize::from(at) % bytes.len();
                    bytes[at] = value;
                }
                if cut % 3 == 0 {
                    bytes.truncate(usize::from(cut) % (bytes.len() + 1));
                }
                body(&bytes);
            }
        }
    }

    #[test]
    fn the_corpora_hold() {
        for all in CORPORA.iter() {
            assert!(!all.is_empty());
        }
        CORPORA[0]
            .iter()
            .for_each(|bytes| super::media_boxes(bytes));
        CORPORA[1]
            .iter()
            .for_each(|bytes| super::media_stream(bytes));
        CORPORA[2].iter().for_each(|bytes| super::media_wire(bytes));
    }
}
