//! libibverbs and librdmacm on the soft RNIC.
#![allow(clippy::wildcard_imports)] // C's names, which there are hundreds of

pub mod cm;
pub mod dgram;
pub mod private;
pub mod rsock;
pub mod strings;
pub mod sysfs;
pub mod tree;
pub use weft_cverbs as types;

mod access;
mod ah;
mod asynchronous;
mod batch;
mod buf;
mod channel;
mod cntr;
mod context;
mod cq;
mod create;
mod device;
mod dm;
mod errors;
mod event_router;
mod events;
mod ex;
mod export;
mod faults;
mod foreign;
mod gid;
mod group;
mod import;
mod limit;
mod mcast;
mod modify;
mod mr;
mod mw;
mod native;
mod null;
pub(crate) mod object;
mod open;
mod params;
mod pd;
mod persona;
mod places;
mod port;
mod post;
mod qp;
mod roce;
mod settings;
mod shared;
mod srq;
mod transitions;
mod ud;
mod users;
mod visit;
mod which;
mod wire;
mod work;
mod xrc;

pub use ah::{
    ibv_create_ah, ibv_create_ah_from_wc, ibv_destroy_ah, ibv_init_ah_from_wc,
    ibv_resolve_eth_l2_from_gid,
};
pub use asynchronous::{ibv_ack_async_event, ibv_get_async_event};
pub use buf::{
    ibv_alloc_buf, ibv_buf, ibv_export_buf_dmabuf_fd, ibv_free_buf, ibv_mr_init_attr,
    ibv_reg_buf_mr, ibv_reg_mr_ex,
};
pub use channel::{ibv_create_comp_channel, ibv_destroy_comp_channel, ibv_get_cq_event};
pub use cntr::{
    _ibv_query_comp_cntr_caps, ibv_comp_cntr, ibv_comp_cntr_caps, ibv_comp_cntr_init_attr,
    ibv_create_comp_cntr, ibv_destroy_comp_cntr, ibv_inc_comp_cntr, ibv_inc_err_comp_cntr,
    ibv_qp_attach_comp_cntr, ibv_qp_attach_comp_cntr_attr, ibv_read_comp_cntr,
    ibv_read_err_comp_cntr, ibv_set_comp_cntr, ibv_set_err_comp_cntr,
};
pub use cq::{ibv_ack_cq_events, ibv_create_cq, ibv_destroy_cq, ibv_resize_cq};
pub use create::ibv_create_qp;
pub use device::{
    _ibv_query_gid_ex, _ibv_query_gid_table, ibv_dofork_range, ibv_dontfork_range, ibv_fork_init,
    ibv_free_device_list, ibv_get_device_guid, ibv_get_device_index, ibv_get_device_list,
    ibv_get_device_name, ibv_get_pkey_index, ibv_is_fork_initialized, ibv_query_device,
    ibv_query_gid, ibv_query_gid_type, ibv_query_pkey, ibv_query_port, ibv_query_port_speed,
};
pub(crate) use errors::{errno, last_errno, os_errno, refused};
pub use import::{
    ibv_import_device, ibv_import_dm, ibv_import_mr, ibv_import_pd, ibv_unimport_dm,
    ibv_unimport_mr, ibv_unimport_pd,
};
pub use mcast::{ibv_attach_mcast, ibv_detach_mcast};
pub use modify::{ibv_destroy_qp, ibv_modify_qp, ibv_query_qp};
pub use mr::{
    ibv_dereg_mr, ibv_reg_dmabuf_mr, ibv_reg_mr, ibv_reg_mr_iova, ibv_reg_mr_iova2, ibv_rereg_mr,
};
pub use open::{ibv_close_device, ibv_open_device};
pub use pd::{ibv_alloc_pd, ibv_dealloc_pd};
pub use qp::{ibv_qp_to_qp_ex, ibv_query_ece, ibv_query_qp_data_in_order, ibv_set_ece};
pub use srq::{ibv_create_srq, ibv_destroy_srq, ibv_modify_srq, ibv_query_srq};
