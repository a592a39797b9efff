//! librdmacm: the connection manager for C programs.
//!
//! On `weft0` connections are iWARP, wire-compatible with the kernel's. When the persona is the first device, the same connections have InfiniBand's terms, and
//! one more way joins queue pairs that programs move themselves (`exchange`).

pub use weft_cverbs::cm as types;

mod addrinfo;
mod auto;
mod channel;
mod connect;
mod datagram;
mod device;
mod ep;
mod exchange;
mod groups;
mod id;
mod life;
mod link;
mod multicast;
mod news;
mod option;
mod patience;
mod port;
mod private_data;
mod qp;
mod request;
mod resolve;
mod roce;
mod roce_datagram;
mod roce_link;
mod roce_name;
mod stages;
mod terms;

pub use addrinfo::{rdma_freeaddrinfo, rdma_getaddrinfo};
pub use channel::{
    rdma_ack_cm_event, rdma_create_event_channel, rdma_destroy_event_channel, rdma_get_cm_event,
    rdma_write_cm_event,
};
pub use connect::{
    rdma_accept, rdma_connect, rdma_disconnect, rdma_establish, rdma_listen, rdma_notify,
    rdma_reject, rdma_reject_ece,
};
pub use device::{rdma_free_devices, rdma_get_devices};
pub use ep::{rdma_create_ep, rdma_destroy_ep, rdma_get_request};
pub use life::{rdma_create_id, rdma_destroy_id, rdma_migrate_id};
pub use multicast::{rdma_join_multicast, rdma_join_multicast_ex, rdma_leave_multicast};
pub use option::{rdma_get_remote_ece, rdma_set_local_ece, rdma_set_option};
pub use qp::{
    rdma_create_qp, rdma_create_qp_ex, rdma_create_srq, rdma_create_srq_ex, rdma_destroy_qp,
    rdma_destroy_srq, rdma_init_qp_attr,
};
pub use resolve::{
    rdma_bind_addr, rdma_get_dst_port, rdma_get_src_port, rdma_query_addrinfo, rdma_resolve_addr,
    rdma_resolve_addrinfo, rdma_resolve_route,
};
