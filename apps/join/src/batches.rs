//! Record batches as the data of elements: Arrow's IPC stream format, cut where an element ends.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::arrow::ipc::writer::StreamWriter;
use datafusion::error::{DataFusionError, Result};
use weft_roundabout::{Element, Room};

/// Flag of an element: the stream continues in the next element of its origin.
const MORE: u8 = 1;
/// The longest stream that is joined: a row of this size at most.
const LONGEST: usize = 1 << 30;

/// An error of another crate.
pub(crate) fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// Decodes bytes of a peer: Arrow's decoder panics at some schemas that make no sense.
pub(crate) fn guarded<T>(decode: impl FnOnce() -> Result<T>) -> Result<T> {
    let wrong = || DataFusionError::Execution("a peer's bytes make no sense".into());
    catch_unwind(AssertUnwindSafe(decode)).unwrap_or_else(|_| Err(wrong()))
}

/// Bytes of any length, in one piece or several, cut where an element ends.
pub struct Cut {
    pieces: VecDeque<Vec<u8>>,
    /// Bytes of the first piece that have been given already.
    at: usize,
    user: [u64; 4],
}

impl Cut {
    /// With these user words in each element.
    pub fn new(bytes: Vec<u8>, user: [u64; 4]) -> Self {
        let pieces = VecDeque::from([bytes]);
        Self {
            pieces,
            at: 0,
            user,
        }
    }

    /// Further bytes, right behind the last ones.
    pub fn add(&mut self, bytes: Vec<u8>) {
        self.pieces.push_back(bytes);
    }

    /// Bytes that have not been given yet.
    pub fn left(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum::<usize>() - self.at
    }

    /// Fills an element; returns true if there is more.
    pub fn fill(&mut self, mut room: Room) -> Result<bool, weft_roundabout::Error> {
        let mut len = 0;
        while let Some(piece) = self.pieces.front() {
            let now = (piece.len() - self.at).min(room.capacity() - len);
            room.write(len, &piece[self.at..self.at + now])?;
            (len, self.at) = (len + now, self.at + now);
            if self.at < piece.len() {
                break;
            }
            self.pieces.pop_front();
            self.at = 0;
        }
        let more = !self.pieces.is_empty();
        drop(room.commit(len, u8::from(more), self.user)?);
        Ok(more)
    }
}

/// An estimate of the bytes of a batch in Arrow's IPC format. If it is too small, the buffer grows while the batch is written.
pub(crate) fn encoded_len(batch: &RecordBatch) -> usize {
    let column = |column: &ArrayRef| column.to_data().get_slice_memory_size().unwrap_or(0) + 256;
    batch.columns().iter().map(column).sum::<usize>() + 1024
}

/// Joins elements of one origin.
pub struct Whole {
    bytes: Vec<u8>,
    limit: usize,
}

impl Default for Whole {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Whole {
    /// With a limit of this many bytes.
    pub fn up_to(limit: usize) -> Self {
        let bytes = Vec::new();
        Self { bytes, limit }
    }

    /// The bytes that an element completes.
    pub fn take(&mut self, element: &Element) -> Result<Option<Vec<u8>>> {
        let had = self.bytes.len();
        if had + element.len() > self.limit {
            let limit = self.limit >> 20;
            return Err(DataFusionError::ResourcesExhausted(format!(
                "a row of more than {limit} MiB on the ring"
            )));
        }
        self.bytes.resize(had + element.len(), 0);
        element.read(0, &mut self.bytes[had..]).map_err(external)?;
        let more = element.flags() & MORE != 0;
        Ok((!more).then(|| std::mem::take(&mut self.bytes)))
    }
}

/// Batches that travel together, and their bytes.
pub struct Part {
    /// The batches themselves, for the node's own use.
    pub batches: Vec<RecordBatch>,
    bytes: Cut,
}

impl Part {
    /// Encodes the batches.
    pub fn new(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Self> {
        Self::with_user(schema, batches, [0; 4])
    }

    /// Encodes the batches, for elements with these user words.
    pub fn with_user(
        schema: &SchemaRef,
        batches: Vec<RecordBatch>,
        user: [u64; 4],
    ) -> Result<Self> {
        let len = batches.iter().map(encoded_len).sum::<usize>() + 4096;
        let mut writer = StreamWriter::try_new(Vec::with_capacity(len), schema)?;
        for batch in &batches {
            writer.write(batch)?;
        }
        Ok(Self {
            bytes: Cut::new(writer.into_inner()?, user),
            batches,
        })
    }

    /// Fills an element; returns true if there is more.
    pub fn fill(&mut self, room: Room) -> Result<bool, weft_roundabout::Error> {
        self.bytes.fill(room)
    }
}

/// Puts streams together again, for each origin.
pub struct Assembly {
    schema: SchemaRef,
    partial: Vec<Whole>,
}

impl Assembly {
    /// For a ring of this many nodes.
    pub fn new(schema: SchemaRef, nodes: usize) -> Self {
        Self::up_to(schema, nodes, LONGEST)
    }

    /// With a limit of this many bytes for a stream.
    pub fn up_to(schema: SchemaRef, nodes: usize, limit: usize) -> Self {
        Self {
            schema,
            partial: (0..nodes).map(|_| Whole::up_to(limit)).collect(),
        }
    }

    /// The batches that an element completes. Their arrays use the one copy of the element.
    pub fn take(&mut self, element: &Element) -> Result<Vec<RecordBatch>> {
        match self.partial[element.origin()].take(element)? {
            Some(bytes) => guarded(|| decode(&self.schema, bytes)),
            None => Ok(Vec::new()),
        }
    }
}

/// Decodes a stream from a peer: its bytes are checked, and its schema must be the expected one.
fn decode(schema: &SchemaRef, bytes: Vec<u8>) -> Result<Vec<RecordBatch>> {
    let mut buffer = Buffer::from_vec(bytes);
    let mut decoder = StreamDecoder::new();
    let mut batches = Vec::new();
    while let Some(batch) = decoder.decode(&mut buffer)? {
        let theirs = batch.schema();
        let same = theirs.fields().iter().map(|f| f.data_type());
        if !same.eq(schema.fields().iter().map(|f| f.data_type())) {
            return Err(DataFusionError::Execution(
                "a node sent rows of another type".into(),
            ));
        }
        batches.push(batch.with_schema(schema.clone())?);
    }
    decoder.finish()?;
    Ok(batches)
}
