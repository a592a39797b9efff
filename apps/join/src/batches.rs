//! Record batches as the data of elements: Arrow's IPC stream format, cut where an element ends.

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::arrow::ipc::writer::StreamWriter;
use datafusion::error::{DataFusionError, Result};
use weft_roundabout::{Element, Room};

/// Flag of an element: the stream goes on in the next one of its origin.
const MORE: u8 = 1;
/// Longest stream that is put together: a row of this size at most.
const LONGEST: usize = 1 << 30;

fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// Batches that travel together, and their bytes.
pub struct Part {
    /// The batches themselves, for the node's own use.
    pub batches: Vec<RecordBatch>,
    bytes: Vec<u8>,
    at: usize,
}

impl Part {
    /// Encodes them.
    pub fn new(schema: &SchemaRef, batches: Vec<RecordBatch>) -> Result<Self> {
        let mut writer = StreamWriter::try_new(Vec::new(), schema)?;
        for batch in &batches {
            writer.write(batch)?;
        }
        Ok(Self {
            bytes: writer.into_inner()?,
            batches,
            at: 0,
        })
    }

    /// Fills an element; true when there is more.
    pub fn fill(&mut self, mut room: Room) -> Result<bool, weft_roundabout::Error> {
        let len = (self.bytes.len() - self.at).min(room.capacity());
        room.write(0, &self.bytes[self.at..self.at + len])?;
        self.at += len;
        let more = self.at < self.bytes.len();
        drop(room.commit(len, u8::from(more), [0; 4])?);
        Ok(more)
    }
}

/// Puts streams together again, for each origin.
pub struct Assembly {
    schema: SchemaRef,
    partial: Vec<Vec<u8>>,
}

impl Assembly {
    /// For a ring of so many nodes.
    pub fn new(schema: SchemaRef, nodes: usize) -> Self {
        Self {
            schema,
            partial: vec![Vec::new(); nodes],
        }
    }

    /// The batches that an element completes. Their arrays lie in the one copy that is made of it.
    pub fn take(&mut self, element: &Element) -> Result<Vec<RecordBatch>> {
        let partial = &mut self.partial[element.origin()];
        let had = partial.len();
        if had + element.len() > LONGEST {
            return Err(DataFusionError::ResourcesExhausted(
                "a row of more than 1 GiB on the ring".into(),
            ));
        }
        partial.resize(had + element.len(), 0);
        element.read(0, &mut partial[had..]).map_err(external)?;
        if element.flags() & MORE != 0 {
            return Ok(Vec::new());
        }
        decode(&self.schema, std::mem::take(partial))
    }
}

/// A stream from a peer: its bytes are checked, and its schema has to be the one that is expected.
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
