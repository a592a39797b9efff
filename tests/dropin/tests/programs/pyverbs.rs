//! pyverbs: the tests of rdma-core.
