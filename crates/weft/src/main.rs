//! weft.
fn main() {}
