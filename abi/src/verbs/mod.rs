//! libibverbs and librdmacm on the soft RNIC: what their headers declare.
