//! CSV files in pieces that begin and end where rows do. A line break in a quoted value ends no row, so no part of a file shows where its rows
//! end: each file is searched for quotes from its beginning.

use std::io::Read;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::Session;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileGroup, FileScanConfig, FileScanConfigBuilder};
use datafusion::datasource::source::DataSourceExec;
use datafusion::datasource::{TableProvider, TableType};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{Expr, TableProviderFilterPushDown};
use datafusion::object_store::{GetResultPayload, ObjectStore, ObjectStoreExt};
use datafusion::physical_plan::{ExecutionPlan, Partitioning};
use memchr::memchr;

/// A table of CSV files whose scans consist of pieces.
#[derive(Debug)]
pub struct CsvTable {
    files: Arc<dyn TableProvider>,
    pieces: usize,
}

impl CsvTable {
    /// A table of `files`, in about as many pieces.
    pub fn new(files: Arc<dyn TableProvider>, pieces: usize) -> Self {
        Self { files, pieces }
    }
}

#[async_trait]
impl TableProvider for CsvTable {
    fn schema(&self) -> SchemaRef {
        self.files.schema()
    }

    fn table_type(&self) -> TableType {
        self.files.table_type()
    }

    fn supports_filters_pushdown(
        &self,
        filters: &[&Expr],
    ) -> Result<Vec<TableProviderFilterPushDown>> {
        self.files.supports_filters_pushdown(filters)
    }

    async fn scan(
        &self,
        session: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let plan = self.files.scan(session, projection, filters, limit).await?;
        let source = plan.downcast_ref::<DataSourceExec>();
        let Some(scan) = source.and_then(|s| s.data_source().downcast_ref::<FileScanConfig>())
        else {
            return Ok(plan);
        };
        let store = session.runtime_env().object_store(&scan.object_store_url)?;
        let whole: Vec<&PartitionedFile> = scan.file_groups.iter().flat_map(|g| g.iter()).collect();
        let bytes: u64 = whole.iter().map(|file| file.object_meta.size).sum();
        let size = bytes.div_ceil(self.pieces.max(1) as u64).max(1);
        let mut pieces = Vec::new();
        for file in whole {
            pieces.extend(cut(store.as_ref(), file, size).await?);
        }
        let count = pieces
            .len()
            .min(session.config().target_partitions())
            .max(1);
        let mut groups = vec![Vec::new(); count];
        for (i, piece) in pieces.into_iter().enumerate() {
            groups[i % count].push(piece);
        }
        // A scan whose partitioning is given is not cut again by DataFusion, which would count bytes.
        let cut = FileScanConfigBuilder::from(scan.clone())
            .with_output_partitioning(Some(Partitioning::UnknownPartitioning(count)))
            .with_file_groups(groups.into_iter().map(FileGroup::new).collect())
            .build();
        Ok(DataSourceExec::from_data_source(cut))
    }
}

/// The file in pieces of about `size` bytes.
async fn cut(
    store: &dyn ObjectStore,
    file: &PartitionedFile,
    size: u64,
) -> Result<Vec<PartitionedFile>> {
    let whole = vec![file.clone()];
    let len = file.object_meta.size;
    if len <= size {
        return Ok(whole);
    }
    let GetResultPayload::File(content, _) = store.get(&file.object_meta.location).await?.payload
    else {
        return Ok(whole);
    };
    let targets: Vec<u64> = (1..len.div_ceil(size)).map(|i| i * size).collect();
    let found = tokio::task::spawn_blocking(move || row_starts(content, &targets)).await;
    let mut bounds = found.map_err(|e| DataFusionError::External(Box::new(e)))??;
    bounds.retain(|&at| at < len);
    if bounds.is_empty() {
        return Ok(whole);
    }
    bounds.insert(0, 0);
    bounds.push(len);
    let piece = |bound: &[u64]| {
        file.clone()
            .with_range(bound[0].cast_signed(), bound[1].cast_signed())
    };
    Ok(bounds.windows(2).map(piece).collect())
}

/// Where a search stands in a file.
enum At {
    /// Outside quotes, behind this byte. A quote that follows opens a quoted value if that byte ends a value; otherwise it is a character
    /// of the value.
    Outside(u8),
    Quoted,
    /// Behind a quote in a quoted value: it ends the value, unless another quote follows.
    BehindQuote,
}

/// The first beginning of a row at or behind each target. The targets ascend.
fn row_starts(mut file: impl Read, targets: &[u64]) -> std::io::Result<Vec<u64>> {
    const BOM: [u8; 3] = [0xef, 0xbb, 0xbf];
    let mut starts: Vec<u64> = Vec::new();
    let mut targets = targets.iter().copied().peekable();
    let mut buffer = vec![0; 1 << 16];
    let mut before = 0;
    let mut at = At::Outside(b'\n');
    while targets.peek().is_some() {
        let mut len = 0;
        while len < buffer.len() {
            match file.read(&mut buffer[len..]) {
                Ok(0) => break,
                Ok(n) => len += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if len == 0 {
            break;
        }
        let bytes = &buffer[..len];
        let mut i = if before == 0 && bytes.starts_with(&BOM) {
            BOM.len()
        } else {
            0
        };
        while i < len {
            match at {
                At::Quoted => match memchr(b'"', &bytes[i..]) {
                    Some(quote) => {
                        i += quote + 1;
                        at = At::BehindQuote;
                    }
                    None => i = len,
                },
                At::BehindQuote if bytes[i] == b'"' => {
                    i += 1;
                    at = At::Quoted;
                }
                At::BehindQuote => at = At::Outside(b'"'),
                At::Outside(behind) => {
                    let quote = memchr(b'"', &bytes[i..]).map_or(len, |n| i + n);
                    // A row that begins at a target has its line break before it.
                    while let Some(&target) = targets.peek()
                        && target <= before + quote as u64
                    {
                        let from = target.saturating_sub(1 + before).max(i as u64) as usize;
                        let Some(end) = bytes.get(from..quote).and_then(|b| memchr(b'\n', b))
                        else {
                            break;
                        };
                        let start = before + (from + end + 1) as u64;
                        while targets.next_if(|&target| target <= start).is_some() {}
                        starts.push(start);
                    }
                    let behind = if quote > i { bytes[quote - 1] } else { behind };
                    if quote == len {
                        at = At::Outside(behind);
                        i = len;
                    } else {
                        i = quote + 1;
                        at = if matches!(behind, b',' | b'\n' | b'\r') {
                            At::Quoted
                        } else {
                            At::Outside(b'"')
                        };
                    }
                }
            }
        }
        before += len as u64;
    }
    Ok(starts)
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Array, AsArray};
    use datafusion::arrow::csv::ReaderBuilder;
    use datafusion::arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    /// Gives one byte at a time more often than not.
    struct Slowly<'a>(&'a [u8], usize);

    impl Read for Slowly<'_> {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            self.1 += 1;
            let n = to.len().min(self.0.len()).min(1 + self.1 % 3);
            to[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    fn starts(text: &str) -> Vec<u64> {
        let targets: Vec<u64> = (1..=text.len() as u64).collect();
        row_starts(Slowly(text.as_bytes(), 0), &targets).unwrap()
    }

    #[test]
    fn rows_begin_behind_line_breaks_outside_quotes() {
        assert_eq!(starts("a,b\n1,2\n3,4"), [4, 8]);
        assert_eq!(starts("a\n\"1\n2\"\n3\n"), [2, 8, 10]);
        assert_eq!(starts("a\r\n\"1\r\n\"\"2\"\r\n3"), [3, 13]);
        assert_eq!(
            starts("\u{feff}\"a\nb\"\n1\n"),
            [9, 11],
            "a byte order mark"
        );
        assert_eq!(
            starts("a,b\n5\",6\n7,8\"\n"),
            [4, 9, 14],
            "quotes in values"
        );
        assert_eq!(
            starts("a\n\"1\"x\"\n2\n"),
            [2, 8, 10],
            "text behind a quote"
        );
        assert_eq!(starts("a\n\"1\n2\n"), [2], "a quote that stays open");
        assert_eq!(starts("a\n\"\"\n\"\n\"\n"), [2, 5, 9]);
        assert_eq!(starts(""), [0; 0]);
    }

    /// The rows of a text, as the reader of scans finds them; `None` if it refuses the text.
    fn rows(text: &[u8]) -> Option<Vec<String>> {
        let fields = (0..20).map(|i| Field::new(format!("c{i}"), DataType::Utf8, true));
        let reader = ReaderBuilder::new(Arc::new(Schema::new(fields.collect::<Vec<_>>())))
            .with_truncated_rows(true)
            .with_batch_size(32)
            .build(text)
            .unwrap();
        let mut rows = Vec::new();
        for batch in reader {
            let batch = batch.ok()?;
            for row in 0..batch.num_rows() {
                let cells = batch.columns().iter().map(|column| {
                    let column = column.as_string::<i32>();
                    column.is_valid(row).then(|| column.value(row).to_string())
                });
                rows.push(format!("{:?}", cells.collect::<Vec<_>>()));
            }
        }
        Some(rows)
    }

    #[test]
    fn pieces_of_ten_thousand_random_texts_have_the_rows_of_the_whole() {
        const TOKENS: [&str; 12] = [
            "a", "bc", " ", "\"", "\"", "\"\"", ",", ",", "\n", "\n", "\r\n", "\r",
        ];
        let mut seed = 0x5eed_u64;
        let mut below = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let (mut texts, mut cuts) = (0, 0);
        for _ in 0..10_000 {
            let mut text = String::new();
            if below(8) == 0 {
                text.push('\u{feff}');
            }
            for _ in 0..below(60) {
                text.push_str(TOKENS[below(12) as usize]);
            }
            let Some(whole) = rows(text.as_bytes()) else {
                continue;
            };
            let mut bounds = starts(&text);
            cuts += bounds.len();
            texts += 1;
            bounds.insert(0, 0);
            bounds.push(text.len() as u64);
            let pieces = bounds
                .windows(2)
                .map(|b| &text.as_bytes()[b[0] as usize..b[1] as usize]);
            let parts: Vec<String> = pieces.flat_map(|piece| rows(piece).unwrap()).collect();
            assert_eq!(parts, whole, "{text:?} in pieces at {bounds:?}");
        }
        assert!(texts > 9_000 && cuts > 20_000, "{texts} texts, {cuts} cuts");
    }
}
