//! The pure protocol of EXS connections.
