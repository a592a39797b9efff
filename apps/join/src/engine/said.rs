//! The messages of the two ends of a call: a [`Call`] first, then frames of rows, news and an outcome.

use std::sync::Arc;

use datafusion::arrow::array::{Array, RecordBatch, RecordBatchOptions};
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::arrow::ipc::writer::StreamWriter;
use datafusion::common::cast::{as_binary_view_array, as_string_view_array};
use datafusion::error::{DataFusionError, Result};
use datafusion_distributed::{LoadInfo, TaskKey};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::batches::encoded_len;

/// The first user word of a call's element. The second is the length of its JSON, which the engine's encoding follows.
pub(super) const CALL: u64 = 3;
/// Rows: [`Frames`].
pub(super) const ROWS: u64 = 4;
/// JSON of a [`News`].
pub(super) const NEWS: u64 = 5;
/// The coordinator has sent its last message.
pub(super) const OVER: u64 = 6;
/// Version of these messages.
pub(super) const VERSION: u32 = 1;
/// A frame begins with its partition and its length, and is padded to a multiple of this, so that Arrow's arrays are aligned for use in place.
const FRAME: usize = 64;

/// Whether the first user word of an element is that of a request to the engine.
pub(crate) fn is_call(word: u64) -> bool {
    word == CALL
}

/// A request to a worker.
#[derive(Serialize, Deserialize)]
pub(super) struct Call {
    pub(super) version: u32,
    /// Settings of the query, in the engine's text form.
    pub(super) headers: Vec<(String, Vec<u8>)>,
    pub(super) what: What,
}

#[derive(Serialize, Deserialize)]
pub(super) enum What {
    /// Keep a part of the plan, which follows, and report its progress.
    Plan {
        key: Key,
        tasks: usize,
        /// The worker's own name.
        url: String,
        /// When the query began, ns since 1970.
        began: usize,
    },
    /// Give the rows of these partitions.
    Task {
        key: Key,
        first: usize,
        end: usize,
        head: Head,
        /// The caller does not need the rows any more, but the task's own requests to other tasks must end.
        dropped: bool,
    },
    /// Report the worker's version.
    Version,
}

/// The operator on top of a task's plan.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum Head {
    None,
    Broadcast(usize),
    /// The partitioning follows.
    Repartition,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct Key {
    query: [u8; 16],
    stage: usize,
    task: usize,
}

impl From<TaskKey> for Key {
    fn from(key: TaskKey) -> Self {
        Self {
            query: *key.query_id.as_bytes(),
            stage: key.stage_id,
            task: key.task_number,
        }
    }
}

impl From<Key> for TaskKey {
    fn from(key: Key) -> Self {
        Self {
            query_id: Uuid::from_bytes(key.query),
            stage_id: key.stage,
            task_number: key.task,
        }
    }
}

/// A report of a worker about a running task.
#[derive(Serialize, Deserialize)]
pub(super) enum News {
    Load(Load),
    NoMoreLoad,
    Version(String),
}

#[derive(Serialize, Deserialize)]
pub(super) struct Load {
    partition: usize,
    rows: usize,
    bytes: Vec<usize>,
    distinct: Vec<f32>,
    nulls: Vec<f32>,
    pulled: usize,
    ended: bool,
}

impl From<LoadInfo> for Load {
    fn from(info: LoadInfo) -> Self {
        Self {
            partition: info.partition,
            rows: info.rows_ready,
            bytes: info.per_column_bytes_ready,
            distinct: info.per_column_ndv_percentage,
            nulls: info.per_column_null_percentage,
            pulled: info.rows_pulled_from_leaf,
            ended: info.reached_eos,
        }
    }
}

impl From<Load> for LoadInfo {
    fn from(load: Load) -> Self {
        Self {
            partition: load.partition,
            rows_ready: load.rows,
            per_column_bytes_ready: load.bytes,
            per_column_ndv_percentage: load.distinct,
            per_column_null_percentage: load.nulls,
            rows_pulled_from_leaf: load.pulled,
            reached_eos: load.ended,
        }
    }
}

/// The frames of an element: partition and bytes.
pub(super) fn frames(bytes: Vec<u8>) -> Result<Vec<(usize, Buffer)>> {
    let wrong = || DataFusionError::Execution("a worker sent rows that make no sense".into());
    let bytes = Buffer::from_vec(bytes);
    let (mut at, mut frames) = (0, Vec::new());
    while at < bytes.len() {
        let header = bytes[at..].first_chunk::<FRAME>().ok_or_else(wrong)?;
        let word = |n: usize| {
            let word = header[n * 8..].first_chunk().copied().unwrap_or_default();
            usize::try_from(u64::from_le_bytes(word)).map_err(|_| wrong())
        };
        let (partition, len) = (word(0)?, word(1)?);
        at += FRAME;
        if len > bytes.len() - at {
            return Err(wrong());
        }
        frames.push((partition, bytes.slice_with_length(at, len)));
        at = (at + len.next_multiple_of(FRAME)).min(bytes.len());
    }
    Ok(frames)
}

/// Batches of one partition become frames: the schema once, then each batch.
pub(super) struct Encoder {
    partition: usize,
    writer: StreamWriter<Vec<u8>>,
}

impl Encoder {
    pub(super) fn new(partition: usize, schema: &SchemaRef) -> Result<Self> {
        let writer = StreamWriter::try_new(Vec::new(), schema)?;
        Ok(Self { partition, writer })
    }

    pub(super) fn encode(&mut self, batch: RecordBatch) -> Result<Vec<u8>> {
        // The schema precedes the first batch.
        let schema = std::mem::take(self.writer.get_mut());
        let batch = compact(batch)?;
        let place = self.writer.get_mut();
        place.reserve(FRAME + schema.len() + encoded_len(&batch));
        place.resize(FRAME, 0);
        place.extend(schema);
        self.writer.write(&batch)?;
        Ok(frame(self.partition, std::mem::take(self.writer.get_mut())))
    }
}

/// Fills in the header of a frame, in the space reserved for it, and pads the end.
fn frame(partition: usize, mut bytes: Vec<u8>) -> Vec<u8> {
    let len = bytes.len() - FRAME;
    bytes[..8].copy_from_slice(&(partition as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(len as u64).to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(FRAME), 0);
    bytes
}

/// Views refer to whole buffers of other rows; only the bytes in use are sent.
fn compact(batch: RecordBatch) -> Result<RecordBatch> {
    let views = |kind: &DataType| matches!(kind, DataType::Utf8View | DataType::BinaryView);
    let schema = batch.schema();
    if !schema.fields().iter().any(|field| views(field.data_type())) {
        return Ok(batch);
    }
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns = batch.columns().iter().map(|column| {
        Ok(match column.data_type() {
            DataType::Utf8View => Arc::new(as_string_view_array(column)?.gc()) as Arc<dyn Array>,
            DataType::BinaryView => Arc::new(as_binary_view_array(column)?.gc()),
            _ => Arc::clone(column),
        })
    });
    let columns = columns.collect::<Result<_>>()?;
    Ok(RecordBatch::try_new_with_options(schema, columns, &rows)?)
}

/// The bytes of one partition become batches again. They are checked; arrays lie in the bytes.
#[derive(Default)]
pub(super) struct Decoder(StreamDecoder);

impl Decoder {
    pub(super) fn decode(&mut self, mut bytes: Buffer) -> Result<Vec<RecordBatch>> {
        let mut batches = Vec::new();
        while let Some(batch) = self.0.decode(&mut bytes)? {
            batches.push(batch);
        }
        Ok(batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_damaged_ones_are_refused() {
        let of = |partition: usize, text: &[u8]| frame(partition, [&[0; FRAME], text].concat());
        let sent = [of(3, b"rows"), of(0, &[7; 200])].concat();
        let got = frames(sent.clone()).unwrap();
        let got: Vec<_> = got.iter().map(|(p, b)| (*p, b.as_slice())).collect();
        assert_eq!(got, [(3, &b"rows"[..]), (0, &[7; 200][..])]);
        for len in 1..sent.len() {
            // Shorter ones lose whole frames, or are refused; none is read past its end.
            if let Ok(got) = frames(sent[..len].to_vec()) {
                assert!(got.len() < 2 || len >= 3 * FRAME + 200, "{len}");
            }
        }
        let mut long = sent.clone();
        long[8..16].fill(0xff);
        assert!(frames(long).is_err());
    }

    #[test]
    fn batches_come_back_by_partition() {
        use datafusion::arrow::array::{Int64Array, StringViewArray};
        let text: Vec<String> = (0..50)
            .map(|n| format!("a text of some length {n}"))
            .collect();
        let all = RecordBatch::try_from_iter([
            (
                "n",
                Arc::new(Int64Array::from_iter_values(0..50)) as Arc<dyn Array>,
            ),
            ("t", Arc::new(StringViewArray::from_iter_values(&text))),
        ])
        .unwrap();
        let mut encoder = Encoder::new(7, &all.schema()).unwrap();
        let (a, b) = (all.slice(0, 20), all.slice(20, 30));
        let sent = [a.clone(), b.clone()].map(|batch| encoder.encode(batch).unwrap());
        let mut decoder = Decoder::default();
        let mut got = Vec::new();
        for (partition, bytes) in frames(sent.concat()).unwrap() {
            assert_eq!(partition, 7);
            got.extend(decoder.decode(bytes).unwrap());
        }
        assert_eq!(got, [a, b]);
    }
}
