//! Queries and tables, for both planners: the permitted queries and the files that are read.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::csv::reader::Format;
use datafusion::arrow::datatypes::Schema;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::context::SQLOptions;
use datafusion::prelude::{CsvReadOptions, DataFrame, ParquetReadOptions, SessionContext};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use crate::csv::CsvTable;
use crate::talk::Table;

/// Names, words and operators of a query.
const WORDS: usize = 4000;
/// Stack size in bytes of a thread that plans or runs queries, for the deepest permitted query.
pub const STACK: usize = 256 << 20;

/// Rows from which the types of a CSV file's columns are inferred, as in DataFusion.
const INFERRED: usize = 1000;

/// Checks that a query is not too deep for the planner. Expressions are as deep as they have operators, and each level needs stack.
pub fn check_depth(sql: &str) -> Result<()> {
    let tokens = Tokenizer::new(&GenericDialect {}, sql)
        .tokenize()
        .map_err(|e| DataFusionError::External(Box::new(e)))?;
    let flat = |token: &&Token| {
        matches!(
            token,
            Token::Whitespace(_)
                | Token::Comma
                | Token::Period
                | Token::Number(..)
                | Token::SingleQuotedString(_)
        )
    };
    let count = tokens.iter().filter(|token| !flat(token)).count();
    if count > WORDS {
        return Err(DataFusionError::Plan(format!(
            "a query has {WORDS} names, words and operators at most, and this one {count}"
        )));
    }
    Ok(())
}

/// A query that reads only: no query of a peer writes files or changes settings.
pub async fn query(context: &SessionContext, sql: &str) -> Result<DataFrame> {
    check_depth(sql)?;
    let reading = SQLOptions::new()
        .with_allow_ddl(false)
        .with_allow_dml(false)
        .with_allow_statements(false);
    context.sql_with_options(sql, reading).await
}

/// Registers a file as a table. The file must be below `dir`. A CSV file is read in about `pieces` pieces.
pub async fn register(
    context: &SessionContext,
    table: &Table,
    dir: Option<&Path>,
    pieces: usize,
) -> Result<()> {
    let said = |e: &dyn std::fmt::Display| {
        DataFusionError::Execution(format!("table {}: {}: {e}", table.name, table.file))
    };
    let path = Path::new(&table.file)
        .canonicalize()
        .map_err(|e| said(&e))?;
    if dir.is_some_and(|dir| !path.starts_with(dir)) {
        return Err(said(&"not below the folder of this worker (--dir)"));
    }
    // A FIFO, for example, is never open.
    let about = path.metadata().map_err(|e| said(&e))?;
    if !about.is_file() && !about.is_dir() {
        return Err(said(&"neither a file nor a folder"));
    }
    let is_csv = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    let file = path.to_str().ok_or_else(|| said(&"not in UTF-8"))?;
    if !is_csv {
        let options = ParquetReadOptions::new();
        let registered = context.register_parquet(&table.name, file, options).await;
        return registered.map_err(|e| said(&e));
    }
    let schema = csv_schema(&path);
    let mut options = CsvReadOptions::new();
    options.schema = schema.as_ref();
    let files = context.register_csv(&table.name, file, options).await;
    files.map_err(|e| said(&e))?;
    if let Some(files) = context.deregister_table(&table.name)? {
        let cut = CsvTable::new(files, pieces);
        context.register_table(&table.name, Arc::new(cut))?;
    }
    Ok(())
}

/// The schema of a file from its first rows. DataFusion takes the first line break of a piece of 8 KiB for the end of a row, and refuses files
/// whose values have line breaks. `None` leaves a folder, or a file that cannot be read, to DataFusion.
pub fn csv_schema(path: &Path) -> Option<Schema> {
    let file = File::open(path).ok()?;
    let format = Format::default().with_header(true);
    let (schema, _) = format.infer_schema(file, Some(INFERRED)).ok()?;
    Some(schema)
}
