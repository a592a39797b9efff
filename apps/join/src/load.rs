//! Loading a table: each worker reads its part of the files, and each row goes to the worker of its part, by the hash of a column or in turn.
//!
//! Rows for another worker travel on the ring in elements with its position in the first user word; those in between forward them unread.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, UInt32Array,
};
use datafusion::arrow::compute::{BatchCoalescer, take_record_batch};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::hash_utils::{RandomState, create_hashes};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use weft_roundabout::Element;

use crate::batches::{Assembly, Part, encoded_len};
use crate::exec::Query;
use crate::pull::{Outlet, Side};
use crate::space::Space;

/// The hash of keys, the same on all workers and for all tables.
const HASH: RandomState = RandomState::with_seed(0x7765_6674);
/// Rows of a batch that is kept.
const ROWS: usize = 8192;
/// Bytes of rows that wait to become a batch.
const PENDING: usize = 4 << 20;
/// Bytes of a row on the ring beyond those of the memory for tables.
const SLACK: usize = 1 << 20;

/// The number of each row's part.
struct Split {
    parts: u32,
    /// The column whose hash counts.
    by: Option<usize>,
    /// Without one: the part of the next row.
    next: u32,
}

impl Split {
    fn of(&mut self, batch: &RecordBatch) -> Result<Vec<u32>> {
        let rows = batch.num_rows();
        let Some(column) = self.by else {
            let first = self.next;
            self.next = ((u64::from(first) + rows as u64) % u64::from(self.parts)) as u32;
            let numbers = (0..self.parts).cycle().skip(first as usize);
            return Ok(numbers.take(rows).collect());
        };
        let mut hashes = vec![0; rows];
        create_hashes([batch.column(column)], &HASH, &mut hashes)?;
        let parts = u64::from(self.parts);
        Ok(hashes.iter().map(|hash| (hash % parts) as u32).collect())
    }
}

/// Rows that this worker keeps. They are copied: a small batch must not hold the memory of a large one.
struct Kept {
    coalescer: BatchCoalescer,
    batches: Vec<RecordBatch>,
    space: Space,
    /// An estimate of the bytes in the coalescer, which the space has too.
    pending: usize,
}

impl Kept {
    fn new(schema: SchemaRef, space: Space) -> Self {
        Self {
            coalescer: BatchCoalescer::new(schema, ROWS),
            batches: Vec::new(),
            space,
            pending: 0,
        }
    }

    fn push(&mut self, batch: RecordBatch) -> Result<()> {
        let (rows, bytes) = (batch.num_rows(), encoded_len(&batch));
        if rows == 0 {
            return Ok(());
        }
        self.space.grow(bytes)?;
        self.pending += bytes;
        // A peer can give few rows in a large stream, and the coalescer can hold on to them.
        let batch = if batch.get_array_memory_size() > 2 * bytes {
            copied(&batch)?
        } else {
            batch
        };
        self.coalescer.push_batch(batch)?;
        if self.pending >= PENDING {
            self.coalescer.finish_buffered_batch()?;
        }
        if self.coalescer.has_completed_batch() {
            // What still waits is an end of this batch.
            let left = (bytes / rows + 1) * self.coalescer.get_buffered_rows();
            self.complete(left.min(self.pending))?;
        }
        Ok(())
    }

    fn complete(&mut self, left: usize) -> Result<()> {
        self.space.shrink(self.pending - left);
        self.pending = left;
        while let Some(batch) = self.coalescer.next_completed_batch() {
            // The coalescer takes memory for full batches, or passes a slice on that holds the whole of a peer's bytes.
            let batch = copied(&batch)?;
            self.space.grow(batch.get_array_memory_size())?;
            self.batches.push(batch);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(Vec<RecordBatch>, Space)> {
        self.coalescer.finish_buffered_batch()?;
        self.complete(0)?;
        Ok((self.batches, self.space))
    }
}

/// The batch in memory of its own.
fn copied(batch: &RecordBatch) -> Result<RecordBatch> {
    let every = UInt32Array::from_iter_values(0..batch.num_rows() as u32);
    let (schema, mut columns, rows) = take_record_batch(batch, &every)?.into_parts();
    for column in &mut columns {
        let gathered: Option<ArrayRef> = match column.data_type() {
            DataType::Utf8View => Some(Arc::new(column.as_string_view().gc())),
            DataType::BinaryView => Some(Arc::new(column.as_binary_view().gc())),
            _ => None,
        };
        *column = gathered.unwrap_or_else(|| Arc::clone(column));
        column.shrink_to_fit();
    }
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    Ok(RecordBatch::try_new_with_options(
        schema, columns, &options,
    )?)
}

/// Rows that this worker has read.
enum Piece {
    Ours(RecordBatch),
    Theirs(Part),
}

/// Splits what is read, and collects the rows for each worker to about an element.
struct Reader {
    split: Split,
    me: u32,
    schema: SchemaRef,
    waiting: Vec<(Vec<RecordBatch>, usize)>,
    element: usize,
}

impl Reader {
    /// Sends all pieces of the input, or the first error.
    async fn read(mut self, mut input: SendableRecordBatchStream, pieces: Outlet<Piece>) {
        while let Some(batch) = input.next().await {
            let made = batch.and_then(|batch| self.take(&batch));
            let failed = made.is_err();
            for piece in made.unwrap_or_else(|error| vec![Err(error)]) {
                if !pieces.send(piece).await {
                    return;
                }
            }
            if failed {
                return;
            }
        }
        for part in 0..self.waiting.len() {
            if let Some(piece) = self.flush(part)
                && !pieces.send(piece).await
            {
                return;
            }
        }
        pieces.end().await;
    }

    fn take(&mut self, batch: &RecordBatch) -> Result<Vec<Result<Piece>>> {
        let mut rows = vec![Vec::new(); self.waiting.len()];
        for (row, part) in (0u32..).zip(self.split.of(batch)?) {
            rows[part as usize].push(row);
        }
        let mut made = Vec::new();
        for (part, rows) in rows.into_iter().enumerate() {
            if rows.is_empty() {
                continue;
            }
            let rows = take_record_batch(batch, &UInt32Array::from(rows))?;
            if part == self.me as usize {
                made.push(Ok(Piece::Ours(rows)));
                continue;
            }
            let waiting = &mut self.waiting[part];
            waiting.1 += encoded_len(&rows);
            waiting.0.push(rows);
        }
        let all: usize = self.waiting.iter().map(|(_, bytes)| bytes).sum();
        for part in 0..self.waiting.len() {
            if all >= 4 * self.element || self.waiting[part].1 >= self.element * 3 / 4 {
                made.extend(self.flush(part));
            }
        }
        Ok(made)
    }

    fn flush(&mut self, part: usize) -> Option<Result<Piece>> {
        let (batches, _) = std::mem::take(&mut self.waiting[part]);
        if batches.is_empty() {
            return None;
        }
        let user = [part as u64, 0, 0, 0];
        Some(Part::with_user(&self.schema, batches, user).map(Piece::Theirs))
    }
}

/// What a load needs on one worker.
pub struct Loader {
    /// The query that reads the files, and its ring.
    pub query: Arc<Query>,
    /// The column whose hash says in which part a row is.
    pub by: Option<usize>,
    /// Bytes that all loaded tables may have.
    pub limit: usize,
    /// The files.
    pub what: String,
}

impl Loader {
    /// Reads the input, and returns this worker's rows of all inputs.
    ///
    /// # Errors
    /// If a file cannot be read, a worker fails, or the rows do not fit into the space.
    pub fn load(
        &self,
        input: SendableRecordBatchStream,
        space: Space,
        runtime: &tokio::runtime::Handle,
    ) -> Result<(Vec<RecordBatch>, Space)> {
        let ring = &self.query.ring;
        let schema = input.schema();
        let split = Split {
            parts: ring.nodes.len() as u32,
            by: self.by,
            next: ring.me as u32,
        };
        let reader = Reader {
            split,
            me: ring.me as u32,
            schema: Arc::clone(&schema),
            waiting: vec![(Vec::new(), 0); ring.nodes.len()],
            element: ring.element,
        };
        let longest = self.limit.saturating_add(SLACK);
        let mut loading = Loading {
            loader: self,
            assembly: Assembly::within(Arc::clone(&schema), ring.nodes.len(), longest, &space),
            kept: Kept::new(schema, space),
        };
        let read = |pieces| reader.read(input, pieces);
        self.query
            .exchange(0, self.what.clone(), runtime, read, &mut loading)?;
        loading.kept.finish()
    }

    /// A row in another part than its hash says would be missing in joins.
    fn check(&self, batch: &RecordBatch) -> Result<()> {
        let ring = &self.query.ring;
        let mut split = Split {
            parts: ring.nodes.len() as u32,
            by: self.by,
            next: 0,
        };
        if self.by.is_some()
            && split
                .of(batch)?
                .iter()
                .any(|&part| part as usize != ring.me)
        {
            return Err(DataFusionError::Execution(
                "a worker sent rows of another part: do all workers run the same version?".into(),
            ));
        }
        Ok(())
    }
}

/// The rows of this worker's part, as they come.
struct Loading<'a> {
    loader: &'a Loader,
    assembly: Assembly,
    kept: Kept,
}

impl Side<Piece> for Loading<'_> {
    fn own(&mut self, piece: Piece) -> Result<Option<Part>> {
        match piece {
            Piece::Ours(rows) => self.kept.push(rows).map(|()| None),
            Piece::Theirs(rows) => Ok(Some(rows)),
        }
    }

    fn other(&mut self, element: Element) -> Result<()> {
        let me = self.loader.query.ring.me;
        if element.user()[0] != me as u64 || element.origin() == me {
            return Ok(());
        }
        let batches = self.assembly.take(&element)?;
        drop(element);
        for batch in batches {
            self.loader.check(&batch)?;
            self.kept.push(batch)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::decode;
    use crate::store::Store;
    use datafusion::arrow::array::{ArrayRef, Int64Array, StringArray};
    use datafusion::arrow::ipc::writer::StreamWriter;
    use std::ops::Range;

    fn batch(ids: Range<i64>, width: usize) -> RecordBatch {
        let text = StringArray::from_iter_values(ids.clone().map(|_| "x".repeat(width)));
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(ids));
        RecordBatch::try_from_iter([("id", ids), ("text", Arc::new(text) as ArrayRef)]).unwrap()
    }

    #[test]
    fn equal_keys_have_one_part_and_rows_without_a_key_take_turns() {
        let rows = batch(0..1000, 1);
        let mut by = Split {
            parts: 3,
            by: Some(0),
            next: 0,
        };
        let parts = by.of(&rows).unwrap();
        assert_eq!(by.of(&rows.slice(100, 50)).unwrap(), parts[100..150]);
        for part in 0..3 {
            let count = parts.iter().filter(|&&p| p == part).count();
            assert!((200..500).contains(&count), "{part}: {count}");
        }
        let mut turns = Split {
            parts: 3,
            by: None,
            next: 2,
        };
        assert_eq!(turns.of(&rows.slice(0, 4)).unwrap(), [2, 0, 1, 2]);
        assert_eq!(turns.of(&rows.slice(0, 2)).unwrap(), [0, 1]);
    }

    #[test]
    fn the_space_of_kept_rows_is_that_of_their_memory() {
        let store = Store::new(64 << 20);
        let mut kept = Kept::new(batch(0..0, 1).schema(), store.space());
        // Slices of one large batch, and rows of all sizes.
        let large = batch(0..20_000, 10);
        for at in (0..20_000).step_by(50) {
            kept.push(large.slice(at, 50)).unwrap();
        }
        for width in [0, 1, 100_000] {
            kept.push(batch(0..100, width)).unwrap();
        }
        let (batches, space) = kept.finish().unwrap();
        assert_eq!(
            batches.iter().map(RecordBatch::num_rows).sum::<usize>(),
            20_300
        );
        let memory = batches
            .iter()
            .map(RecordBatch::get_array_memory_size)
            .sum::<usize>();
        assert_eq!(space.bytes(), memory);
        assert!((10_400_000..16_000_000).contains(&memory), "{memory}");
        drop(space);
        assert_eq!(store.report(&[], false).unwrap().used, 0);
    }

    #[test]
    fn rows_beyond_the_space_are_refused_before_they_are_kept() {
        let store = Store::new(1 << 20);
        let mut kept = Kept::new(batch(0..0, 1).schema(), store.space());
        let why = (0..100).find_map(|_| kept.push(batch(0..1000, 100)).err());
        assert!(why.unwrap().to_string().contains("does not fit"));
        let memory = kept.batches.iter().map(RecordBatch::get_array_memory_size);
        let (memory, pending) = (memory.sum::<usize>(), kept.pending);
        assert!(
            (1 << 18..=1 << 20).contains(&(memory + pending)),
            "{memory} + {pending}"
        );
    }

    #[test]
    fn rows_of_a_peer_hold_no_bytes_of_its_streams() {
        let store = Store::new(64 << 20);
        let empty = batch(0..0, 1).schema();
        let mut kept = Kept::new(empty.clone(), store.space());
        let stream = |batches: &[RecordBatch]| {
            let mut writer = StreamWriter::try_new(Vec::new(), &empty).unwrap();
            batches
                .iter()
                .for_each(|batch| writer.write(batch).unwrap());
            decode(&empty, writer.into_inner().unwrap()).unwrap()
        };
        // Many batches of a stream, and few rows beside a large text.
        let many: Vec<_> = (0..100)
            .map(|at| batch(at * 100..at * 100 + 100, 20))
            .collect();
        for batch in stream(&many) {
            kept.push(batch).unwrap();
        }
        for _ in 0..20 {
            let of_stream = stream(&[batch(0..1, 1 << 20), batch(1..3, 10)]);
            kept.push(of_stream[1].clone()).unwrap();
        }
        let (batches, space) = kept.finish().unwrap();
        let rows = batches.iter().map(RecordBatch::num_rows).sum::<usize>();
        assert_eq!(rows, 10_040);
        assert!(
            (300_000..600_000).contains(&space.bytes()),
            "{}",
            space.bytes()
        );
    }
}
