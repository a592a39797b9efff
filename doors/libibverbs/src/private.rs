//! The functions that libibverbs exports for its drivers; doors/libibverbs/symbols lists the names that jump to them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use weft_abi::verbs::types::{ibv_context, ibv_wr_opcode};
use weft_abi::verbs::{self, private, strings, tree};

exports! { "", private:
    weft_ignored();
    weft_unsupported() -> c_int;
    weft_unsupported_pointer() -> *mut c_void;
    weft_failed() -> c_int;
}

exports! { "", verbs:
    ibv_query_gid_type(context: *mut ibv_context, port_num: u8, index: c_uint, kind: *mut c_uint) -> c_int;
}

exports! { "", strings:
    ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char;
}

exports! { "", tree:
    weft_sysfs_tree(dir: *const c_char) -> c_int;
}
