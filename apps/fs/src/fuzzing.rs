//! The functions that the fuzz targets call.

use crate::name::{Name, RemotePath};
use crate::wire::{MAX_MESSAGE, PROTOCOL, Reply, Request};

/// Arbitrary bytes as each message of the protocol, and as the paths that programs open.
pub fn fs_wire(data: &[u8]) {
    if let Ok((id, Ok(request))) = Request::decode(data) {
        assert_eq!(Request::decode(&request.encode()), Ok((id, Ok(request))));
    }
    // What is received is no longer than a message.
    let data = &data[..data.len().min(MAX_MESSAGE)];
    if let Ok(reply) = Reply::decode(data) {
        assert!(
            reply
                .entries
                .iter()
                .all(|entry| Name::new(&entry.name).is_ok())
        );
        assert_eq!(Reply::decode(&reply.clone().encode()), Ok(reply));
    }
    if let Ok(hello) = PROTOCOL.read_hello(data)
        && hello.version == PROTOCOL.version
    {
        let again = PROTOCOL.hello(hello.status, hello.value);
        assert_eq!(PROTOCOL.read_hello(&again), Ok(hello));
    }
    if let Ok(path) = RemotePath::parse(data) {
        // No name leads out of its server.
        let name = path.name.as_bytes();
        assert_eq!(Name::new(name), Ok(path.name.clone()));
        assert!(
            name.split(|&b| b == b'/')
                .all(|part| part != b".." && part != b".")
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn corpus() -> Vec<Vec<u8>> {
        let dir =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/fs_wire");
        let files = std::fs::read_dir(dir).expect("a corpus");
        let mut all: Vec<_> = files
            .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
            .collect();
        all.sort();
        all
    }

    proptest! {
        #[test]
        fn damaged_messages_hold(
            which in 0_usize..100,
            damage in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
        ) {
            let all = corpus();
            let mut bytes = all[which % all.len()].clone();
            for &(at, value) in &damage {
                let at = usize::from(at) % bytes.len();
                bytes[at] = value;
            }
            super::fs_wire(&bytes);
        }
    }
}
