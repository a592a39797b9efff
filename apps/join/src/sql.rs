//! Queries and tables, for both planners: the permitted queries and the files that are read.

use std::path::Path;

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::context::SQLOptions;
use datafusion::prelude::{CsvReadOptions, DataFrame, ParquetReadOptions, SessionContext};
use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};

use crate::talk::Table;

/// Names, words and operators of a query.
const WORDS: usize = 4000;
/// Stack size in bytes of a thread that plans or runs queries, for the deepest permitted query.
pub const STACK: usize = 256 << 20;

/// Checks that a query is not too deep for the planner. Expressions are as deep as they have operators, and each level needs stack.
fn check_depth(sql: &str) -> Result<()> {
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

/// Registers a file as a table. The file must be below `dir`.
pub async fn register(context: &SessionContext, table: &Table, dir: Option<&Path>) -> Result<()> {
    let said = |e: &dyn std::fmt::Display| {
        DataFusionError::Execution(format!("table {}: {}: {e}", table.name, table.file))
    };
    let path = Path::new(&table.file)
        .canonicalize()
        .map_err(|e| said(&e))?;
    if dir.is_some_and(|dir| !path.starts_with(dir)) {
        return Err(said(&"not below the folder of this worker (--dir)"));
    }
    let is_csv = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("csv"));
    let file = path.to_str().ok_or_else(|| said(&"not in UTF-8"))?;
    let registered = if is_csv {
        context
            .register_csv(&table.name, file, CsvReadOptions::new())
            .await
    } else {
        context
            .register_parquet(&table.name, file, ParquetReadOptions::new())
            .await
    };
    registered.map_err(|e| said(&e))
}
