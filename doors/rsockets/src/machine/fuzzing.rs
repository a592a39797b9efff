//! The body of the fuzz target `rsockets_machine`, and the replay of its corpus by plain `cargo test`.

use super::{Config, Endpoint};
use crate::wire::{Buffer, GREETING_LEN, Greeting};

/// A peer says anything, from its greeting on, while our program reads and writes: no panic, and the books stay right.
pub fn rsockets_machine(data: &[u8]) {
    let Some((greeting, mut rest)) = data.split_at_checked(GREETING_LEN) else {
        return;
    };
    let Ok(greeting) = Greeting::parse(greeting) else {
        return;
    };
    assert_eq!(Greeting::parse(&greeting.emit()), Ok(greeting));
    let config = Config {
        credits: 16,
        half: 64,
        maps: 2,
    };
    let mut machine = Endpoint::new(config, greeting);
    while let Some((&[what, a, b, c, d], tail)) = rest.split_first_chunk::<5>() {
        rest = tail;
        let word = u32::from_be_bytes([a, b, c, d]);
        match what % 8 {
            0 | 1 => {
                if machine.heard(word).is_err() {
                    return;
                }
            }
            2 => {
                let before = machine.readable();
                machine.consumed(word as usize);
                assert_eq!(machine.readable(), before.saturating_sub(word as usize));
            }
            3 => {
                if let Some(write) = machine.write(word) {
                    assert!(write.len > 0 && write.len <= word);
                }
            }
            4 => {
                if machine.entry_wanted().is_some_and(|slot| slot < 2) {
                    machine.entry(Buffer {
                        addr: u64::MAX - u64::from(word),
                        key: word,
                        len: word,
                    });
                }
            }
            5 => {
                if let Some(entry) = machine.grant().and_then(|grant| grant.entry) {
                    assert!(entry.off == 0 || entry.off == config.half);
                    assert_eq!(entry.len, config.half);
                }
            }
            6 => {
                if let Some(place) = machine.map(word as u16) {
                    assert!((word as u16) < greeting.maps && place.len == 24);
                }
            }
            _ => {
                if word.is_multiple_of(2) {
                    machine.shut_down();
                } else {
                    machine.leave();
                }
            }
        }
        let size = config.half as usize * 2;
        let (at, run) = machine.next_run(0);
        assert!(machine.readable() <= size && at + run <= size);
        let (again, more) = machine.next_run(run);
        assert_eq!(run + more, machine.readable());
        assert!(more == 0 || again == 0);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_is_replayed() {
        let dir = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/corpus/rsockets_machine"
        );
        let mut inputs = 0;
        for file in std::fs::read_dir(dir).expect("the corpus") {
            let bytes = std::fs::read(file.expect("a file").path()).expect("its bytes");
            super::rsockets_machine(&bytes);
            inputs += 1;
        }
        assert!(inputs > 0);
    }
}
