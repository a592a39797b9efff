/*
 * RDMA Write-Record, long messages and the reliable mode on the datagram queue pairs (IBV_QPT_UD) of weft's libibverbs: docs/spec/dgram.md.
 *
 * The calls have the version WEFT_DGRAM_1 in libibverbs.so.1. Other libraries lack them: a program that is to run there too looks
 * for them with dlvsym(RTLD_DEFAULT, "weft_dgram_setup", "WEFT_DGRAM_1").
 *
 * All calls return 0, or a number, on success; a call that fails returns an errno value, or -1 where it returns a number, and sets errno.
 * On queue pairs that speak RoCE v2 (`weft verbs --wire roce`) they fail with EOPNOTSUPP.
 */
#ifndef INFINIBAND_WEFT_DGRAM_H
#define INFINIBAND_WEFT_DGRAM_H

#include <infiniband/verbs.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The opcode of a completion that a peer's Write-Record makes in the receive queue. Its wr_id names the record, its byte_len is the number of
 * bytes that are valid, src_qp and imm_data (with IBV_WC_WITH_IMM) are as for a receive. No receive is taken. */
#define WEFT_WC_WRITE_RECORD ((enum ibv_wc_opcode)240)

struct weft_dgram_attr {
	uint32_t max_message;	/* the longest message that may be posted, in bytes; 0: 4096 */
	uint32_t segment;	/* the longest payload of a datagram, in bytes; 0: 65408 */
	uint32_t timeout_ms;	/* how long a message may go without a segment; 0: 100 */
	uint32_t records;	/* Write-Records that may wait for the program; 0: none are sent or taken. The completion queue of
				 * receives needs room for more than these. */
	uint32_t whole_only;	/* not 0: a Write-Record of which some did not come makes no completion */
};

/* Says how a queue pair carries messages. In the state RESET only. EINVAL: another kind or state of queue pair, or no room in the
 * completion queue. */
int weft_dgram_setup(struct ibv_qp *qp, const struct weft_dgram_attr *attr);

struct weft_dgram_write {
	uint64_t wr_id;
	struct ibv_sge *sg_list;
	int num_sge;
	unsigned int send_flags;	/* IBV_SEND_SIGNALED, IBV_SEND_SOLICITED */
	struct ibv_ah *ah;
	uint32_t remote_qpn;
	uint32_t remote_qkey;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t with_imm;		/* not 0: imm_data goes with it */
	__be32 imm_data;
	uint32_t reserved;		/* 0 */
};

/* Posts an RDMA Write-Record. It is complete (IBV_WC_RDMA_WRITE) when its datagrams are sent. ENOMEM: the queue is full. */
int weft_dgram_post_write_record(struct ibv_qp *qp, const struct weft_dgram_write *wr);

/* From `start` up to, and not with, `end`. */
struct weft_dgram_range {
	uint64_t start;
	uint64_t end;
};

struct weft_dgram_record {
	uint64_t addr;		/* of the message's first byte */
	uint32_t rkey;		/* the region or window that was written to */
	uint32_t length;	/* of the whole message, in bytes */
	uint32_t valid;		/* bytes of it that have come */
	uint32_t src_qp;
	uint32_t msn;		/* the source's number for it */
	uint32_t reserved;
};

/* Takes the record of a completion with WEFT_WC_WRITE_RECORD, and writes up to `count` of its valid ranges, as addresses of the region.
 * Returns how many there are, which may be more. -1 with ENOENT: there is no such record, or it was taken. */
int weft_dgram_take_record(struct ibv_qp *qp, uint64_t wr_id, struct weft_dgram_record *record,
			   struct weft_dgram_range *ranges, int count);

/* The validity map: which bytes of the region with this key Write-Records have filled. Writes up to `count` ranges in order, and returns how
 * many there are. With `clear` nothing is valid from now on that is not written again. */
int weft_dgram_validity_map(struct ibv_qp *qp, uint32_t rkey, struct weft_dgram_range *ranges, int count, int clear);

struct weft_dgram_reliable {
	uint32_t give_up_ms;	/* how long a receiver that does not answer is tried; 0: 10000 */
	uint32_t not_ready_ms;	/* how long one is tried that answers, and has no receive; 0: as long as it answers */
};

/* Makes a queue pair reliable: each message is delivered once, and in the order of its pair of queue pairs; a send is complete when its receiver has
 * it. Both ends have to be so. With NULL it is unreliable again. In the state RESET only (EINVAL). */
int weft_dgram_set_reliable(struct ibv_qp *qp, const struct weft_dgram_reliable *attr);

/* Whether a message to that queue pair could not be delivered: 1 or 0. The first one has completed with an error; what was behind it, and what is posted for
 * there from then on, is flushed. Other destinations have nothing to do with it. */
int weft_dgram_pair_failed(struct ibv_qp *qp, struct ibv_ah *ah, uint32_t remote_qpn);

/* Ends that. ENOENT: there was nothing to end. */
int weft_dgram_reset_pair(struct ibv_qp *qp, struct ibv_ah *ah, uint32_t remote_qpn);

#ifdef __cplusplus
}
#endif

#endif
