/*
 * The small iWARP library (P. Frey, Zero-Copy Network Communication: An Applicability Study of iWARP beyond Micro Benchmarks, section 3.3.3): RDMA in a
 * dozen calls. A context holds what belongs to one connection. Local memory is an iw_lmr, the peer's an iw_rmr, which the peer advertises on the
 * connection itself. iw(7) is the manual.
 *
 * Calls return -1 and set errno when they fail; iw_error() has the reason as text. Calls that post return the id of their work request, 0 or more.
 * Calls on one context may be made by several threads, except that iw_connect, iw_accept, iw_reject, iw_disconnect, iw_await_disconnect and iw_ctx_free
 * exclude all others. The last four free the context, whatever they return.
 */
#ifndef IW_H
#define IW_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct iw_ctx iw_ctx_t;
typedef struct iw_listener iw_listener_t;

/* The states of a context (fig. 3.14). */
#define IW_INVALID 0   /* it is not connected any more */
#define IW_VALID 1     /* ready for iw_connect */
#define IW_CONN_REQ 2  /* ready for iw_accept or iw_reject */
#define IW_CONNECTED 3

/* Memory of this process, registered with the context's protection domain. The calls fill it in; its members may be read. */
typedef struct iw_lmr {
    void *addr;
    size_t size;
    void *region; /* the library's */
} iw_lmr_t;

/* Memory of the peer. An advertisement is these members in this order, big-endian: 16 bytes. */
typedef struct iw_rmr {
    uint64_t addr;
    uint32_t rkey;
    uint32_t size;
} iw_rmr_t;

/* A piece of local memory. */
typedef struct iw_sge {
    const iw_lmr_t *lmr;
    size_t offset;
    size_t length;
} iw_sge_t;

/* A work completion. */
typedef struct iw_wc {
    uint64_t wr_id;
    uint32_t status;   /* 0: success */
    uint32_t opcode;   /* IW_WC_* */
    uint32_t byte_len; /* of a receive */
} iw_wc_t;

#define IW_WC_SEND 0
#define IW_WC_WRITE 1
#define IW_WC_READ 2
#define IW_WC_RECV 128

/* access_rights: those of enum ibv_access_flags */
#define IW_LOCAL_WRITE 1 /* local memory always has it */
#define IW_REMOTE_WRITE 2
#define IW_REMOTE_READ 4

/* send_flags: those of enum ibv_send_flags */
#define IW_FENCE 1     /* only after earlier Reads */
#define IW_SIGNALED 2  /* makes a completion; the others are silent */
#define IW_SOLICITED 4

/* cq_type */
#define IW_SCQ 0 /* what this side has sent, written and read */
#define IW_RCQ 1 /* what it has received */

/* ---- calls ------------------------------------------------------------------------------------------------------------------- */

int iw_ctx_alloc(const char *host, uint16_t port, iw_ctx_t **ctx_out);
int iw_connect(iw_ctx_t *iw_ctx);
int iw_open(const char *host, uint16_t port, iw_listener_t **listener_out);
int iw_port(const iw_listener_t *listener);
int iw_listen(iw_listener_t *listener, iw_ctx_t **ctx_out);
int iw_close(iw_listener_t *listener);
int iw_accept(iw_ctx_t *iw_ctx);
int iw_reject(iw_ctx_t *iw_ctx);
int iw_state(const iw_ctx_t *iw_ctx);
int iw_disconnect(iw_ctx_t *iw_ctx);
int iw_await_disconnect(iw_ctx_t *iw_ctx);
int iw_ctx_free(iw_ctx_t *iw_ctx);

int iw_lmr_create(size_t size, int access_rights, iw_lmr_t *lmr_out, iw_ctx_t *iw_ctx);
int iw_lmr_register(void *buf_addr, size_t size, int access_rights, iw_lmr_t *lmr_out, iw_ctx_t *iw_ctx);
int iw_lmr_deregister(iw_lmr_t *lmr);

int64_t iw_post_send_adv(const iw_lmr_t *lmr, iw_ctx_t *iw_ctx);
int iw_post_recv_adv(iw_ctx_t *iw_ctx);
int iw_wait_recv_adv(iw_rmr_t *rmr_out, iw_ctx_t *iw_ctx);

int64_t post_send_lmr(const iw_lmr_t *lmr_src, size_t offset_src, size_t length, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_write_lmr(const iw_lmr_t *lmr_src, size_t offset_src, const iw_rmr_t *rmr_dst, size_t offset_dst, size_t length, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_read_lmr(const iw_lmr_t *lmr_dst, size_t offset_dst, const iw_rmr_t *rmr_src, size_t offset_src, size_t length, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_recv_lmr(const iw_lmr_t *lmr_dst, size_t offset_dst, size_t length, iw_ctx_t *iw_ctx);
int64_t post_send_sgl(const iw_sge_t *sgl, int n, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_write_sgl(const iw_sge_t *sgl, int n, const iw_rmr_t *rmr_dst, size_t offset_dst, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_read_sgl(const iw_sge_t *sgl, int n, const iw_rmr_t *rmr_src, size_t offset_src, int send_flags, iw_ctx_t *iw_ctx);
int64_t post_recv_sgl(const iw_sge_t *sgl, int n, iw_ctx_t *iw_ctx);

int await_completions(int cq_type, int num_wcs, iw_wc_t *wc_list, iw_ctx_t *iw_ctx);

const char *iw_error(void);

#ifdef __cplusplus
}
#endif

#endif
