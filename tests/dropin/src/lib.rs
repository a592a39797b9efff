//! Runs unmodified verbs programs on the drop-in libraries.
#![forbid(unsafe_code)]
