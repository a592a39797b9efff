//! Record batches as the data of elements: Arrow's IPC stream format, cut where an element ends.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use datafusion::arrow::array::{ArrayRef, RecordBatch};
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::arrow::ipc::root_as_message;
use datafusion::arrow::ipc::writer::StreamWriter;
use datafusion::error::{DataFusionError, Result};
use weft_roundabout::{Element, Room};

use crate::space::Space;

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
    /// Where the bytes are counted, if anywhere.
    space: Option<Space>,
}

impl Default for Whole {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Whole {
    /// With a limit of this many bytes.
    pub fn up_to(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            space: None,
        }
    }

    /// Its bytes are counted in this space before there is memory for them, until the last one has come.
    fn within(mut self, space: Space) -> Self {
        self.space = Some(space);
        self
    }

    /// Makes room for further bytes.
    fn reserve(&mut self, bytes: usize) -> Result<()> {
        let (had, capacity) = (self.bytes.len(), self.bytes.capacity());
        if let Some(space) = &mut self.space
            && had + bytes > capacity
        {
            let wanted = (had + bytes).max((capacity + capacity / 2).min(self.limit));
            space.grow(wanted - capacity)?;
            self.bytes.reserve_exact(wanted - had);
        }
        Ok(())
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
        self.reserve(element.len())?;
        self.bytes.resize(had + element.len(), 0);
        element.read(0, &mut self.bytes[had..]).map_err(external)?;
        let more = element.flags() & MORE != 0;
        if more {
            return Ok(None);
        }
        if let Some(space) = &mut self.space {
            space.shrink(space.bytes());
        }
        Ok(Some(std::mem::take(&mut self.bytes)))
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
    fn up_to(schema: SchemaRef, nodes: usize, limit: usize) -> Self {
        let partial = (0..nodes).map(|_| Whole::up_to(limit)).collect();
        Self { schema, partial }
    }

    /// With a limit of this many bytes for a stream. Streams that are not complete take space like this.
    pub fn within(schema: SchemaRef, nodes: usize, limit: usize, space: &Space) -> Self {
        let partial = (0..nodes).map(|_| Whole::up_to(limit).within(space.another()));
        Self {
            schema,
            partial: partial.collect(),
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

/// An error if a batch of the stream is compressed: nodes compress none, and a short one could become long.
fn refuse_compression(bytes: &[u8]) -> Result<()> {
    let wrong = || DataFusionError::Execution("a peer's bytes make no sense".into());
    let word = |at: usize| {
        let word = bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(word.try_into().ok()?))
    };
    let mut at = 0;
    while at < bytes.len() {
        let mut len = word(at).ok_or_else(wrong)?;
        at += 4;
        if len == u32::MAX {
            len = word(at).ok_or_else(wrong)?;
            at += 4;
        }
        if len == 0 {
            break;
        }
        let end = at.checked_add(len as usize).ok_or_else(wrong)?;
        let message = bytes.get(at..end).ok_or_else(wrong)?;
        let message = root_as_message(message).map_err(|_| wrong())?;
        let dictionary = message.header_as_dictionary_batch();
        let rows = message
            .header_as_record_batch()
            .or_else(|| dictionary.and_then(|batch| batch.data()));
        if rows.is_some_and(|rows| rows.compression().is_some()) {
            return Err(DataFusionError::Execution(
                "a node sent compressed rows".into(),
            ));
        }
        let body = usize::try_from(message.bodyLength()).map_err(|_| wrong())?;
        at = end.checked_add(body).ok_or_else(wrong)?;
    }
    Ok(())
}

/// Decodes a stream from a peer: its bytes are checked, and its schema must be the expected one.
pub(crate) fn decode(schema: &SchemaRef, bytes: Vec<u8>) -> Result<Vec<RecordBatch>> {
    refuse_compression(&bytes)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::array::Int64Array;
    use datafusion::arrow::ipc::CompressionType;
    use datafusion::arrow::ipc::writer::IpcWriteOptions;
    use std::sync::Arc;

    #[test]
    fn compressed_and_cut_streams_are_refused() {
        let ids: ArrayRef = Arc::new(Int64Array::from(vec![7; 100_000]));
        let batch = RecordBatch::try_from_iter([("id", ids)]).unwrap();
        for compression in [None, Some(CompressionType::LZ4_FRAME)] {
            let options = IpcWriteOptions::default()
                .try_with_compression(compression)
                .unwrap();
            let schema = batch.schema();
            let mut writer =
                StreamWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
            writer.write(&batch).unwrap();
            let bytes = writer.into_inner().unwrap();
            assert!(decode(&schema, bytes[..bytes.len() / 2].to_vec()).is_err());
            match (compression, decode(&schema, bytes)) {
                (None, Ok(batches)) => assert_eq!(batches, std::slice::from_ref(&batch)),
                (Some(_), Err(why)) => assert!(why.to_string().contains("compressed"), "{why}"),
                (compression, other) => panic!("{compression:?}: {other:?}"),
            }
        }
    }
}
