//! Damaged files: some make the reader panic. The rows are all there, or there is an error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::basic::Compression;
use datafusion::parquet::file::properties::WriterProperties;
use weft_join::shell::{Trouble, ask};
use weft_join::tables;
use weft_join::talk::Table;

use crate::help::{Workers, rows, run_alone};
use crate::loaded::{nothing_is_left, wanted};

/// A Parquet file of these rows, without compression.
fn parquet(path: &Path, ids: std::ops::Range<i64>) -> Vec<u8> {
    let text = StringArray::from_iter_values(ids.clone().map(|id| format!("row {id}")));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(ids));
    let batch = RecordBatch::try_from_iter([("id", ids), ("text", Arc::new(text))]).unwrap();
    let settings = WriterProperties::builder()
        .set_compression(Compression::UNCOMPRESSED)
        .set_dictionary_enabled(false)
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(settings)).unwrap();
    writer.write(&batch).unwrap();
    let bytes = writer.into_inner().unwrap();
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn a_panic_of_a_reader_is_an_error_of_the_query_and_of_the_load() {
    let folder = tempfile::tempdir().unwrap();
    let table = Table {
        name: "t".into(),
        file: folder.path().to_str().unwrap().into(),
    };
    for at in 0..2 {
        parquet(
            &folder.path().join(format!("{at}.parquet")),
            at * 60..at * 60 + 60,
        );
    }
    let victim = folder.path().join("2.parquet");
    let whole = parquet(&victim, 120..180);
    let workers = Workers::start(2);
    let queries = [
        "SELECT * FROM t",
        "SELECT a.id FROM t a CROSS JOIN t b WHERE b.id = 3",
    ];
    let mut panicked = 0;
    for at in (4..whole.len()).step_by(3) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x41;
        std::fs::write(&victim, &bytes).unwrap();
        let tables = [table.clone()];
        if catch_unwind(AssertUnwindSafe(|| run_alone(&tables, queries[0]))).is_ok() {
            continue;
        }
        for sql in queries {
            match ask(&workers.question(&tables, sql), |_| ()) {
                Err(Trouble::Query(why) | Trouble::Peer(why)) => {
                    assert!(
                        !why.contains("a panic") || why.contains("2.parquet"),
                        "{why}"
                    );
                }
                Ok(answer) => panic!("{at}: {sql}: {} rows", rows(&answer.batches).len()),
            }
        }
        match tables::load(&wanted(&workers.addresses, &table, Some("id")), |_, _| ()) {
            Err(Trouble::Query(why) | Trouble::Peer(why)) => {
                assert!(
                    why.contains("table t") || why.contains("127.0.0.1"),
                    "{why}"
                );
            }
            Ok(parts) => panic!("{at}: {parts:?}"),
        }
        panicked += 1;
        if panicked == 8 {
            break;
        }
    }
    // If no damage makes the reader panic any more, this test needs another one.
    assert!(panicked > 0);
    nothing_is_left(&workers.addresses);
}
