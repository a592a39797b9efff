//! The allowed changes of `ibv_modify_qp` in each state.

use std::ffi::c_uint;

use super::types::*;

/// From one state to another: the attributes that this needs, and those that it may have (InfiniBand 11.2.5.2, and what the kernel makes of it), for
/// reliable connections, for unreliable ones, and for datagrams.
type Transition = (ibv_qp_state, ibv_qp_state, [u32; 3], [u32; 3]);

const PATHS: u32 = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE;
const FIRST: u32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
const PEER: u32 = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
const FIRST_UD: u32 = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
const RUNNING: [u32; 3] = [
    IBV_QP_CUR_STATE | PATHS | IBV_QP_MIN_RNR_TIMER,
    IBV_QP_CUR_STATE | PATHS,
    IBV_QP_CUR_STATE | IBV_QP_QKEY,
];

const FIRSTS: [u32; 3] = [FIRST, FIRST, FIRST_UD];
const TO_RTR: [u32; 3] = [
    PEER | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    PEER,
    0,
];
const WITH_RTR: [u32; 3] = [
    IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
    IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
    IBV_QP_PKEY_INDEX | IBV_QP_QKEY,
];
const PATIENCE: u32 = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY;
const TO_RTS: [u32; 3] = [
    PATIENCE | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_SQ_PSN,
    IBV_QP_SQ_PSN,
];
const RESTING: [u32; 3] = [
    IBV_QP_PORT
        | IBV_QP_AV
        | PATIENCE
        | IBV_QP_MAX_QP_RD_ATOMIC
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_PKEY_INDEX
        | IBV_QP_MIN_RNR_TIMER
        | PATHS,
    IBV_QP_AV | IBV_QP_PKEY_INDEX | PATHS,
    IBV_QP_PKEY_INDEX | IBV_QP_QKEY,
];

const TRANSITIONS: &[Transition] = &[
    (IBV_QPS_RESET, IBV_QPS_INIT, FIRSTS, [0; 3]),
    (IBV_QPS_INIT, IBV_QPS_INIT, [0; 3], FIRSTS),
    (IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR, WITH_RTR),
    (IBV_QPS_RTR, IBV_QPS_RTS, TO_RTS, RUNNING),
    (IBV_QPS_RTS, IBV_QPS_RTS, [0; 3], RUNNING),
    (
        IBV_QPS_RTS,
        IBV_QPS_SQD,
        [0; 3],
        [IBV_QP_EN_SQD_ASYNC_NOTIFY; 3],
    ),
    (IBV_QPS_SQD, IBV_QPS_RTS, [0; 3], RUNNING),
    (IBV_QPS_SQD, IBV_QPS_SQD, [0; 3], RESTING),
];

/// True if a change from one state to another may have these attributes.
pub(super) fn allowed(kind: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state, mask: u32) -> bool {
    let rest = mask & !(IBV_QP_STATE | IBV_QP_CUR_STATE);
    if matches!(to, IBV_QPS_RESET | IBV_QPS_ERR) {
        return rest == 0;
    }
    // Attributes that only the other end of an XRC connection needs.
    let spared = match kind {
        IBV_QPT_XRC_SEND => IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        IBV_QPT_XRC_RECV => IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
        _ => 0,
    };
    let column = match kind {
        IBV_QPT_UD => 2,
        IBV_QPT_UC => 1,
        _ => 0,
    };
    TRANSITIONS
        .iter()
        .find(|t| (t.0, t.1) == (from, to))
        .is_some_and(|(_, _, needs, may)| {
            let (needs, may) = (needs[column], may[column]);
            rest & (needs & !spared) == needs & !spared && rest & !(needs | may) == 0
        })
}

/// `IBV_ACCESS_FLUSH_GLOBAL` and `IBV_ACCESS_FLUSH_PERSISTENT` of newer headers. Programs set them on every queue pair; no peer can flush here.
const FLUSH: c_uint = 1 << 8 | 1 << 9;

/// True if the device supports these values.
pub(super) fn sound(attr: &ibv_qp_attr, mask: u32, max_rd_atomic: u16) -> bool {
    const ACCESS: c_uint = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_MW_BIND
        | IBV_ACCESS_ON_DEMAND
        | IBV_ACCESS_OPTIONAL_RANGE
        | FLUSH;
    let has = |bit| mask & bit != 0;
    let depth = |value: u8| u16::from(value) <= max_rd_atomic;
    let wrong = (has(IBV_QP_PORT) && attr.port_num != 1)
        || (has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0)
        || (has(IBV_QP_ACCESS_FLAGS) && attr.qp_access_flags & !ACCESS != 0)
        || (has(IBV_QP_PATH_MTU) && !(IBV_MTU_256..=IBV_MTU_4096).contains(&attr.path_mtu))
        || (has(IBV_QP_DEST_QPN) && attr.dest_qp_num >> 24 != 0)
        || (has(IBV_QP_AV) && (attr.ah_attr.port_num != 1 || attr.ah_attr.is_global == 0))
        || (has(IBV_QP_MAX_QP_RD_ATOMIC) && !depth(attr.max_rd_atomic))
        || (has(IBV_QP_MAX_DEST_RD_ATOMIC) && !depth(attr.max_dest_rd_atomic))
        || (has(IBV_QP_TIMEOUT) && attr.timeout > 31)
        || (has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7)
        || (has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7)
        || (has(IBV_QP_MIN_RNR_TIMER) && attr.min_rnr_timer > 31)
        // There is one path.
        || has(IBV_QP_ALT_PATH)
        || (has(IBV_QP_PATH_MIG_STATE) && attr.path_mig_state != IBV_MIG_MIGRATED);
    !wrong
}

/// Keeps the attributes that were set.
pub(super) fn remember(kept: &mut ibv_qp_attr, attr: &ibv_qp_attr, mask: u32) {
    macro_rules! keep {
        ($($bit:ident: $field:ident),*) => {$(
            if mask & $bit != 0 {
                kept.$field = attr.$field;
            }
        )*};
    }
    keep!(
        IBV_QP_QKEY: qkey,
        IBV_QP_ACCESS_FLAGS: qp_access_flags,
        IBV_QP_PKEY_INDEX: pkey_index,
        IBV_QP_PORT: port_num,
        IBV_QP_AV: ah_attr,
        IBV_QP_PATH_MTU: path_mtu,
        IBV_QP_TIMEOUT: timeout,
        IBV_QP_RETRY_CNT: retry_cnt,
        IBV_QP_RNR_RETRY: rnr_retry,
        IBV_QP_RQ_PSN: rq_psn,
        IBV_QP_SQ_PSN: sq_psn,
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic,
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic,
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer,
        IBV_QP_PATH_MIG_STATE: path_mig_state,
        IBV_QP_DEST_QPN: dest_qp_num,
        IBV_QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify
    );
}
