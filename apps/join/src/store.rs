//! The parts of loaded tables that a worker keeps between queries, within the memory that it was given for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::buffer::Buffer;
use datafusion::arrow::datatypes::{Schema, SchemaRef};
use datafusion::arrow::ipc::reader::StreamDecoder;
use datafusion::arrow::ipc::writer::StreamWriter;
use datafusion::error::{DataFusionError, Result};

use crate::batches::guarded;
use crate::exec::lock;
use crate::index::Index;
use crate::space::{Ledger, Space};
use crate::talk::{Load, LoadId, Loaded, Part, Report, STALE};

/// Tables of a worker, at most.
const TABLES: usize = 1024;

fn refuse<T>(why: String) -> Result<T> {
    Err(DataFusionError::Execution(why))
}

/// A part of a table in this worker's memory. It takes its space until the last query that reads it has ended.
#[derive(Debug)]
pub struct TablePart {
    /// The table's name.
    pub name: String,
    /// The load that made it.
    pub load: LoadId,
    /// Its number.
    pub part: u32,
    /// Parts of the table.
    pub parts: u32,
    /// The column whose hash says in which part a row is.
    pub by: Option<String>,
    /// Its columns.
    pub schema: SchemaRef,
    /// Its rows.
    pub batches: Vec<RecordBatch>,
    /// When it was loaded.
    pub at: Instant,
    /// Its memory.
    pub space: Space,
    /// The indexes that joins have made.
    indexes: Mutex<Vec<Arc<Index>>>,
}

impl TablePart {
    /// An index over these columns. It is kept with the part if there is space for it; `None` if not.
    ///
    /// # Errors
    /// If it cannot be made of such columns.
    pub fn index(&self, keys: &[usize]) -> Result<Option<Arc<Index>>> {
        // Joins that want the same index wait for the first one.
        let mut indexes = lock(&self.indexes);
        if let Some(index) = indexes.iter().find(|index| index.keys == keys) {
            return Ok(Some(Arc::clone(index)));
        }
        match Index::new(&self.batches, keys, self.space.another()) {
            Ok(Some(index)) => {
                let index = Arc::new(index);
                indexes.push(Arc::clone(&index));
                Ok(Some(index))
            }
            Ok(None) | Err(DataFusionError::ResourcesExhausted(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What is said about it. The schema is left out unless it is wanted.
    ///
    /// # Errors
    /// If the schema cannot be encoded.
    pub fn report(&self, with_schema: bool) -> Result<Part> {
        let rows = self.batches.iter().map(|batch| batch.num_rows() as u64);
        let indexes: usize = lock(&self.indexes)
            .iter()
            .map(|index| index.space.bytes())
            .sum();
        Ok(Part {
            name: self.name.clone(),
            load: self.load,
            part: self.part,
            parts: self.parts,
            by: self.by.clone(),
            rows: rows.sum(),
            bytes: (self.space.bytes() + indexes) as u64,
            age: self.at.elapsed().as_secs(),
            schema: with_schema.then(|| schema_text(&self.schema)).transpose()?,
        })
    }
}

#[derive(Default)]
struct Tables {
    parts: BTreeMap<String, Arc<TablePart>>,
    /// The names of tables that are being loaded.
    loading: BTreeSet<String>,
}

/// The loaded tables of a worker.
pub struct Store {
    ledger: Arc<Ledger>,
    tables: Mutex<Tables>,
}

/// The right to load a table of this name, which one load has at a time.
pub struct Loading<'a> {
    store: &'a Store,
    name: String,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        lock(&self.store.tables).loading.remove(&self.name);
    }
}

impl Store {
    /// With this many bytes for tables.
    pub fn new(limit: usize) -> Self {
        Self {
            ledger: Ledger::new(limit),
            tables: Mutex::default(),
        }
    }

    /// Bytes for tables.
    pub fn limit(&self) -> usize {
        self.ledger.limit
    }

    /// No memory yet, for a table to be loaded.
    pub fn space(&self) -> Space {
        Space::new(&self.ledger)
    }

    /// Begins a load.
    ///
    /// # Errors
    /// If the worker has no memory for tables, has too many, or is loading one of this name.
    pub fn begin(&self, name: &str) -> Result<Loading<'_>> {
        if self.ledger.limit == 0 {
            return refuse(format!(
                "table {name}: this worker was given no memory for tables: start it with `weft join worker --tables MIB`"
            ));
        }
        let mut tables = lock(&self.tables);
        if !tables.parts.contains_key(name) && tables.parts.len() + tables.loading.len() >= TABLES {
            return refuse(format!(
                "table {name}: a worker has {TABLES} tables at most"
            ));
        }
        if !tables.loading.insert(name.into()) {
            return refuse(format!(
                "table {name}: another load of a table with this name is under way"
            ));
        }
        let name = name.into();
        Ok(Loading { store: self, name })
    }

    /// Keeps a part, in place of an earlier one of the same name. Queries that read that one go on.
    pub fn keep(&self, loading: Loading<'_>, part: Arc<TablePart>) {
        let name = loading.name.clone();
        let before = lock(&self.tables).parts.insert(name, part);
        drop((loading, before));
    }

    /// Forgets a part: of any load, or of this one.
    pub fn forget(&self, name: &str, load: Option<LoadId>) -> Option<Arc<TablePart>> {
        let mut tables = lock(&self.tables);
        let part = tables.parts.get(name)?;
        if load.is_some_and(|load| load != part.load) {
            return None;
        }
        tables.parts.remove(name)
    }

    /// All parts, or those with these names: each once, however often it is named.
    pub fn parts(&self, names: Option<&[String]>) -> Vec<Arc<TablePart>> {
        let tables = lock(&self.tables);
        let Some(names) = names else {
            return tables.parts.values().cloned().collect();
        };
        let names: BTreeSet<&String> = names.iter().collect();
        let parts = names.into_iter().filter_map(|name| tables.parts.get(name));
        parts.cloned().collect()
    }

    /// The part that a question expects at this position of the ring; `None` where it expects none.
    ///
    /// # Errors
    /// If the question makes no sense, or this worker does not have that part.
    pub fn expected(
        &self,
        table: &Loaded,
        me: usize,
        nodes: usize,
    ) -> Result<Option<Arc<TablePart>>> {
        let name = &table.name;
        let mut there: Vec<u32> = table.layout.iter().copied().flatten().collect();
        there.sort_unstable();
        let whole = there.iter().copied().eq(0..there.len() as u32);
        if !whole || there.is_empty() || table.layout.len() != nodes {
            return refuse(format!("table {name}: a layout that cannot be"));
        }
        let Some(number) = table.layout.get(me).copied().flatten() else {
            return Ok(None);
        };
        let held = lock(&self.tables).parts.get(name).cloned();
        let is_it = |part: &Arc<TablePart>| {
            let (load, number_of) = (part.load, (part.part, part.parts as usize));
            load == table.load && number_of == (number, there.len()) && part.by == table.by
        };
        match held.filter(is_it) {
            Some(part) => Ok(Some(part)),
            None => refuse(format!(
                "table {name}: this worker has not the part of it that the query was made for, for it was {STALE}; run the query again"
            )),
        }
    }

    /// What is said about these parts and the memory.
    ///
    /// # Errors
    /// If a schema cannot be encoded.
    pub fn report(&self, parts: &[Arc<TablePart>], with_schema: bool) -> Result<Report> {
        let parts = parts.iter().map(|part| part.report(with_schema));
        Ok(Report {
            parts: parts.collect::<Result<_>>()?,
            used: self.ledger.used() as u64,
            limit: self.ledger.limit as u64,
        })
    }
}

/// A part that is ready to be kept.
pub fn part_of(
    order: &Load,
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
    space: Space,
) -> TablePart {
    TablePart {
        name: order.table.name.clone(),
        load: order.id,
        part: order.me as u32,
        parts: order.nodes.len() as u32,
        by: order.by.clone(),
        schema,
        batches,
        at: Instant::now(),
        space,
        indexes: Mutex::default(),
    }
}

/// A schema in Arrow's IPC format, in hexadecimal digits.
fn schema_text(schema: &Schema) -> Result<String> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bytes = StreamWriter::try_new(Vec::new(), schema)?.into_inner()?;
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    Ok(digits
        .map(|digit| char::from(DIGITS[usize::from(digit)]))
        .collect())
}

/// The schema that a peer has sent.
///
/// # Errors
/// If there is none in the text.
pub fn schema_from(text: &str) -> Result<SchemaRef> {
    let wrong = || DataFusionError::Execution("a schema that makes no sense".into());
    let digits = text
        .chars()
        .map(|c| c.to_digit(16).map(|digit| digit as u8));
    let digits = digits.collect::<Option<Vec<u8>>>().ok_or_else(wrong)?;
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(wrong());
    }
    let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
    guarded(|| {
        let mut decoder = StreamDecoder::new();
        decoder.decode(&mut Buffer::from_vec(bytes))?;
        decoder.schema().ok_or_else(wrong)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::talk::Table;
    use datafusion::arrow::datatypes::{DataType, Field};

    #[test]
    fn schemas_come_back_and_damaged_ones_are_refused() {
        let fields = vec![
            Field::new("id", DataType::Int64, false),
            Field::new("text", DataType::Utf8, true),
        ];
        let schema = Schema::new(fields);
        let text = schema_text(&schema).unwrap();
        assert_eq!(*schema_from(&text).unwrap(), schema);
        for len in (0..text.len()).step_by(3) {
            if let Ok(got) = schema_from(&text[..len]) {
                assert_eq!(*got, schema, "{len}");
            }
        }
        for at in 0..text.len() {
            for digit in ["0", "f", "g", "\u{fe}"] {
                // An error or another schema; nothing else happens.
                let _ = schema_from(&format!("{}{digit}{}", &text[..at], &text[at + 1..]));
            }
        }
    }

    #[test]
    fn memory_that_is_given_back_can_be_taken_again() {
        let store = Store::new(100);
        let mut first = store.space();
        first.grow(60).unwrap();
        let mut second = store.space();
        let why = second.grow(41).unwrap_err().to_string();
        assert!(why.contains("--tables"), "{why}");
        assert!(second.grow(usize::MAX).is_err());
        second.grow(40).unwrap();
        first.shrink(10);
        second.grow(10).unwrap();
        drop((first, second));
        store.space().grow(100).unwrap();
        assert_eq!(store.report(&[], false).unwrap().used, 0);
    }

    #[test]
    fn a_part_is_reported_once_however_often_it_is_named() {
        let store = Store::new(1);
        let order = Load {
            id: [1; 16],
            nodes: vec!["127.0.0.1:1".parse().unwrap()],
            me: 0,
            element: 4096,
            table: Table {
                name: "t".into(),
                file: String::new(),
            },
            by: None,
        };
        let part = part_of(&order, Schema::empty().into(), Vec::new(), store.space());
        store.keep(store.begin("t").unwrap(), Arc::new(part));
        let names = ["t", "u", "t"].map(String::from);
        assert_eq!(store.parts(Some(&names)).len(), 1);
        assert_eq!(store.parts(None).len(), 1);
        assert!(store.parts(Some(&[])).is_empty());
    }

    #[test]
    fn one_load_of_a_name_at_a_time() {
        let store = Store::new(1);
        let first = store.begin("t").unwrap();
        assert!(store.begin("t").is_err());
        let other = store.begin("u").unwrap();
        drop((first, other));
        assert!(store.begin("t").is_ok());
        assert!(Store::new(0).begin("t").is_err());
    }
}
