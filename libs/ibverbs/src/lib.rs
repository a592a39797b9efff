//! libibverbs and librdmacm: their calls under their names. What they do is in `weft_abi::verbs`.
