//! Rows on the way from the task that reads them to the thread of a node. The thread waits for the ring and for the task alike.

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::datasource::physical_plan::FileScanConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::ExecutionPlan;
use futures::StreamExt;
use tokio::sync::mpsc;
use weft_roundabout::{Element, Next, Node, Own, Waker};

use crate::batches::{Part, external};

/// Pieces that wait for the node.
const PIECES: usize = 2;
/// The files that an error names.
const FILES: usize = 3;

/// Wakes the node when the task ends, also by a panic.
pub(crate) struct WakeAtEnd(pub Waker);

impl Drop for WakeAtEnd {
    fn drop(&mut self) {
        self.0.wake();
    }
}

/// The task's end.
pub(crate) struct Outlet<T> {
    // It has to be gone when the node wakes, and fields are dropped in their order.
    pieces: mpsc::Sender<Result<Option<T>>>,
    at_end: WakeAtEnd,
}

/// The node's end.
pub(crate) struct Inlet<T> {
    pieces: mpsc::Receiver<Result<Option<T>>>,
    ended: bool,
    /// What is read.
    what: String,
}

/// What a task has sent.
pub(crate) enum Pulled<T> {
    Piece(T),
    /// Nothing yet.
    Nothing,
    /// All has been read.
    End,
}

/// Both ends. An error of the task names `what`.
pub(crate) fn channel<T>(waker: Waker, what: String) -> (Outlet<T>, Inlet<T>) {
    let (sender, pieces) = mpsc::channel(PIECES);
    let outlet = Outlet {
        pieces: sender,
        at_end: WakeAtEnd(waker),
    };
    let inlet = Inlet {
        pieces,
        ended: false,
        what,
    };
    (outlet, inlet)
}

impl<T> Outlet<T> {
    /// Sends a piece, or the error that ends the task. Returns false if the node wants no more.
    pub async fn send(&self, piece: Result<T>) -> bool {
        let sent = self.pieces.send(piece.map(Some)).await.is_ok();
        self.at_end.0.wake();
        sent
    }

    /// Says that this was all. Without it some rows are missing, whatever ended the task.
    pub async fn end(self) {
        let _ = self.pieces.send(Ok(None)).await;
    }
}

impl<T> Inlet<T> {
    /// The next piece, if there is one.
    ///
    /// # Errors
    /// That of the task, or if it ended without a word.
    pub fn next(&mut self) -> Result<Pulled<T>> {
        if self.ended {
            return Ok(Pulled::End);
        }
        match self.pieces.try_recv() {
            Ok(Ok(Some(piece))) => Ok(Pulled::Piece(piece)),
            Ok(Ok(None)) => {
                self.ended = true;
                Ok(Pulled::End)
            }
            Ok(Err(error)) => Err(error),
            Err(mpsc::error::TryRecvError::Empty) => Ok(Pulled::Nothing),
            Err(mpsc::error::TryRecvError::Disconnected) => {
                Err(DataFusionError::Execution(format!(
                    "a panic while rows of {} were read: is a file damaged? The worker's standard error has more",
                    self.what
                )))
            }
        }
    }
}

/// What a node does with the pieces of its own task and with the ring's elements.
pub(crate) trait Side<T> {
    /// The rows of a piece that travel, if some do.
    fn own(&mut self, piece: T) -> Result<Option<Part>>;
    /// An element of the ring, which is dropped before the rows are looked at, because the ring continues meanwhile.
    fn other(&mut self, element: Element) -> Result<()>;
}

/// One turn of the ring, to its end.
pub(crate) fn turn<T>(node: &mut Node, own: &mut Inlet<T>, side: &mut impl Side<T>) -> Result<()> {
    let mut part: Option<Part> = None;
    let mut ended = false;
    loop {
        while part.is_none() && !ended {
            match own.next()? {
                Pulled::Piece(piece) => part = side.own(piece)?,
                Pulled::Nothing => break,
                Pulled::End => ended = true,
            }
        }
        let own = match (&part, ended) {
            (Some(_), _) => Own::Now,
            (None, false) => Own::Later,
            (None, true) => Own::Never,
        };
        match node.next_with(own).map_err(external)? {
            Next::End => return Ok(()),
            Next::Woken => {}
            Next::Room(room) => {
                if let Some(filling) = &mut part
                    && !filling.fill(room).map_err(external)?
                {
                    part = None;
                }
            }
            Next::Element(element) => side.other(element)?,
        }
    }
}

/// Collects the batches of the input into parts of about an element.
pub(crate) async fn pull(
    mut input: SendableRecordBatchStream,
    element: usize,
    parts: Outlet<Part>,
) {
    let schema = input.schema();
    let (mut batches, mut bytes) = (Vec::new(), 0);
    loop {
        let next = input.next().await;
        let last = next.is_none();
        match next {
            Some(Ok(batch)) if batch.num_rows() > 0 => {
                bytes += batch.get_array_memory_size();
                batches.push(batch);
            }
            Some(Err(error)) => {
                parts.send(Err(error)).await;
                return;
            }
            _ => {}
        }
        if !batches.is_empty() && (last || bytes >= element * 3 / 4) {
            let part = Part::new(&schema, std::mem::take(&mut batches));
            bytes = 0;
            if !parts.send(part).await {
                return;
            }
        }
        if last {
            return parts.end().await;
        }
    }
}

/// The files that a plan reads, or some of them. Those behind an exchange are its own.
pub(crate) fn sources(plan: &Arc<dyn ExecutionPlan>) -> String {
    let mut files = BTreeSet::new();
    // The function returns no error.
    let _ = plan.apply(|node| {
        if node.name() == "RoundaboutExec" {
            return Ok(TreeNodeRecursion::Jump);
        }
        let source = node.downcast_ref::<DataSourceExec>();
        if let Some(scan) = source.and_then(|s| s.data_source().downcast_ref::<FileScanConfig>()) {
            let all = scan.file_groups.iter().flat_map(|group| group.iter());
            files.extend(all.map(|file| format!("/{}", file.object_meta.location)));
        }
        Ok(TreeNodeRecursion::Continue)
    });
    let named: Vec<_> = files.iter().take(FILES).map(String::as_str).collect();
    match (named.as_slice(), files.len()) {
        ([], _) => "no file".into(),
        (named, count) if count > FILES => {
            format!("{} and {} more files", named.join(", "), count - FILES)
        }
        (named, _) => named.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch};
    use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
    use weft_roundabout::{Next, Own, Ring, RingListener, Security};

    #[test]
    fn a_panic_is_an_error_and_wakes_the_node() {
        let address = "127.0.0.1:0".parse().unwrap();
        let listener = RingListener::open(address, Security::SameUser, None).unwrap();
        let ring = Ring::new([1; 16], vec![listener.local_addr()], 0);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        for panics in [false, true] {
            let mut node = listener.join(&ring).unwrap();
            let (parts, mut inlet) = channel(node.waker(), "/a.parquet".into());
            let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..10));
            let batch = RecordBatch::try_from_iter([("id", ids)]).unwrap();
            let schema = batch.schema();
            let batches = futures::stream::iter(0..3).map(move |at| {
                assert!(!panics || at < 2, "a reader that panics, for a test");
                Ok(batch.clone())
            });
            let input = Box::pin(RecordBatchStreamAdapter::new(schema, batches));
            runtime.spawn(pull(input, 1, parts));
            let mut rows = 0;
            let end = loop {
                match inlet.next() {
                    Ok(Pulled::Piece(part)) => {
                        rows += part
                            .batches
                            .iter()
                            .map(RecordBatch::num_rows)
                            .sum::<usize>();
                    }
                    Ok(Pulled::Nothing) => {
                        assert!(matches!(node.next_with(Own::Later), Ok(Next::Woken)));
                    }
                    Ok(Pulled::End) => break Ok(()),
                    Err(error) => break Err(error.to_string()),
                }
            };
            match end {
                Ok(()) => assert!(!panics && rows == 30, "{rows}"),
                Err(why) => assert!(panics && why.contains("/a.parquet"), "{why}"),
            }
        }
    }
}
