//! The terms of a connection, which InfiniBand's requests and replies have fields for, and iWARP's have not: the persona's connection managers send them behind
//! the program's private data (docs/spec/persona.md).

use super::private_data::delivered;

const LEN: usize = 12;

/// The fields of a request or reply, as its sender's program set them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    /// Reads and atomics: how many the sender accepts, and how many it has outstanding.
    pub(super) depths: (u8, u8),
    pub(super) retries: Retries,
}

/// How often messages are sent again: without an answer, and without a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Retries {
    pub(super) count: u8,
    pub(super) rnr: u8,
}

impl Terms {
    /// The private data of start-up. The program's is padded to `ib` bytes, as InfiniBand's, so that a peer that does not know terms shows it as before.
    pub(super) fn append(self, data: Vec<u8>, ib: usize) -> Vec<u8> {
        let len = u8::try_from(data.len()).unwrap_or(u8::MAX);
        let (accepts, has) = self.depths;
        let Retries { count, rnr } = self.retries;
        let mut said = delivered(data, true, ib);
        said.extend_from_slice(b"WCT1");
        said.extend_from_slice(&[count, rnr, accepts, has, len, 0, 0, 0]);
        said
    }

    /// The terms, and the program's data; no terms from a peer that sends none.
    pub(super) fn split(said: &[u8], ib: usize) -> (Option<Terms>, &[u8]) {
        let found = said
            .split_last_chunk::<LEN>()
            .filter(|(data, _)| data.len() == ib);
        let Some((data, &[b'W', b'C', b'T', b'1', count, rnr, accepts, has, len, ..])) = found
        else {
            return (None, said);
        };
        let terms = Terms {
            depths: (accepts, has),
            retries: Retries {
                count: count.min(7),
                rnr: rnr.min(7),
            },
        };
        (Some(terms), data.get(..len.into()).unwrap_or(data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_told_from_the_data_of_a_program() {
        let terms = Terms {
            depths: (5, 4),
            retries: Retries { count: 7, rnr: 3 },
        };
        let said = terms.append(b"hello".to_vec(), 56);
        // Where an older peer finds the data, and zeros after it.
        assert_eq!(&said[..8], b"hello\0\0\0");
        assert_eq!(Terms::split(&said, 56), (Some(terms), &b"hello"[..]));
        for other in [&said[..56], &said[1..], &[0; 68], b""] {
            assert_eq!(Terms::split(other, 56), (None, other));
        }
        let mut wrong = said.clone();
        (wrong[60], wrong[64]) = (255, 255);
        let (found, data) = Terms::split(&wrong, 56);
        assert_eq!((found.unwrap().retries.count, data.len()), (7, 56));
    }
}
