/*
 * One program with libiw and libibverbs: the responder is written for rdma_cm and verbs, in a thread; the initiator uses libiw. And libiw's errors.
 * The exit status is the number of failures.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <iw.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures;

#define CHECK(what)                                                                                                            \
    do {                                                                                                                       \
        if (!(what)) {                                                                                                         \
            fprintf(stderr, "%s:%d: %s (errno %d, %s; %s)\n", __FILE__, __LINE__, #what, errno, strerror(errno), iw_error());  \
            failures++;                                                                                                        \
        }                                                                                                                      \
    } while (0)
#define FAILS(call, with) (errno = 0, (call) == -1 && errno == (with))

static struct rdma_cm_event *next(struct rdma_event_channel *channel, enum rdma_cm_event_type type) {
    struct rdma_cm_event *event;
    if (rdma_get_cm_event(channel, &event) != 0 || event->event != type) {
        perror("rdma_get_cm_event");
        exit(100);
    }
    return event;
}

static char memory[64];
static struct rdma_event_channel *channel;

static void *verbs_responder(void *arg) {
    struct rdma_cm_id *listener = arg;
    struct rdma_cm_event *event = next(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
    struct rdma_cm_id *id = event->id;
    CHECK(rdma_ack_cm_event(event) == 0);
    struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
    struct ibv_cq *cq = ibv_create_cq(id->verbs, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {8, 8, 1, 1, 0}};
    CHECK(pd != NULL && cq != NULL && rdma_create_qp(id, pd, &init) == 0);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    static iw_rmr_t adv;
    struct ibv_mr *adv_mr = ibv_reg_mr(pd, &adv, sizeof adv, 0);
    static char byte;
    struct ibv_mr *byte_mr = ibv_reg_mr(pd, &byte, 1, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr != NULL && adv_mr != NULL && byte_mr != NULL);
    struct ibv_sge to = {(uintptr_t)&byte, 1, byte_mr->lkey}, from = {(uintptr_t)&adv, sizeof adv, adv_mr->lkey};
    for (int i = 0; i < 2; i++) {
        struct ibv_recv_wr recv = {.sg_list = &to, .num_sge = 1}, *bad;
        CHECK(ibv_post_recv(id->qp, &recv, &bad) == 0);
    }
    struct rdma_conn_param param = {.responder_resources = 4, .initiator_depth = 4};
    CHECK(rdma_accept(id, &param) == 0);
    CHECK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ESTABLISHED)) == 0);
    struct ibv_wc wc;
    while (ibv_poll_cq(cq, 1, &wc) == 0)
        usleep(100);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV);
    /* What libiw expects: address, key and size, big-endian. */
    adv = (iw_rmr_t){htobe64((uintptr_t)memory), htobe32(mr->rkey), htobe32(sizeof memory)};
    struct ibv_send_wr send = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
    CHECK(ibv_post_send(id->qp, &send, &bad) == 0);
    for (int n = 0; n < 2; n++) {
        while (ibv_poll_cq(cq, 1, &wc) == 0)
            usleep(100);
        CHECK(wc.status == IBV_WC_SUCCESS);
    }
    CHECK(strcmp(memory, "mixed") == 0);
    CHECK(rdma_disconnect(id) == 0);
    rdma_destroy_qp(id);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(adv_mr) == 0 && ibv_dereg_mr(byte_mr) == 0);
    CHECK(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
    CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(listener) == 0);
    return NULL;
}

static void mixed(void) {
    struct rdma_cm_id *listener;
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    pthread_t thread;
    iw_ctx_t *ctx;
    iw_lmr_t src, dst;
    iw_rmr_t remote;
    iw_wc_t wc;
    channel = rdma_create_event_channel();
    CHECK(channel != NULL && rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (struct sockaddr *)&addr) == 0 && rdma_listen(listener, 1) == 0);
    int port = ntohs(rdma_get_src_port(listener));
    CHECK(pthread_create(&thread, NULL, verbs_responder, listener) == 0);
    CHECK(iw_ctx_alloc("127.0.0.1", (uint16_t)port, &ctx) == 0 && iw_state(ctx) == IW_VALID);
    CHECK(iw_post_recv_adv(ctx) == 0 && iw_connect(ctx) == 0 && iw_state(ctx) == IW_CONNECTED);
    CHECK(iw_lmr_create(16, 0, &src, ctx) == 0 && iw_lmr_create(16, 0, &dst, ctx) == 0);
    memcpy(src.addr, "mixed", 6);
    CHECK(post_send_lmr(&src, 0, 1, 0, ctx) >= 0 && iw_wait_recv_adv(&remote, ctx) == 0 && remote.size == sizeof memory);
    iw_sge_t pieces[2] = {{&src, 0, 3}, {&src, 3, 3}};
    CHECK(post_write_sgl(pieces, 2, &remote, 0, 0, ctx) >= 0);
    int64_t id = post_read_lmr(&dst, 2, &remote, 0, 6, IW_SIGNALED, ctx);
    CHECK(await_completions(IW_SCQ, 1, &wc, ctx) == 0 && wc.wr_id == (uint64_t)id && wc.status == 0 && wc.opcode == IW_WC_READ);
    CHECK(memcmp((char *)dst.addr + 2, "mixed", 6) == 0);
    /* Bad calls change nothing. */
    CHECK(FAILS(post_write_lmr(&src, 0, &remote, 60, 6, 0, ctx), EINVAL)); /* beyond what is advertised */
    CHECK(FAILS(post_write_lmr(&src, 12, &remote, 0, 6, 0, ctx), EINVAL)); /* beyond our own */
    CHECK(FAILS(post_send_lmr(&src, 0, 1, 64, ctx), EINVAL) && FAILS(post_send_lmr(NULL, 0, 1, 0, ctx), EFAULT));
    CHECK(FAILS(post_send_lmr(&src, 0, 1, 0, NULL), EFAULT) && FAILS(post_send_sgl(NULL, 1, 0, ctx), EFAULT));
    CHECK(FAILS(post_send_sgl(pieces, -1, 0, ctx), EINVAL) && FAILS(await_completions(7, 1, &wc, ctx), EINVAL));
    CHECK(FAILS(await_completions(IW_SCQ, 1, NULL, ctx), EFAULT) && FAILS(iw_lmr_create(1, 64, &dst, ctx), EINVAL));
    CHECK(FAILS(iw_lmr_register(NULL, 8, 0, &dst, ctx), EFAULT) && FAILS(iw_lmr_create(1, 0, NULL, ctx), EFAULT));
    CHECK(FAILS(iw_connect(ctx), EINVAL) && strstr(iw_error(), "CONNECTED") != NULL);
    CHECK(post_send_lmr(&src, 0, 1, IW_SIGNALED, ctx) >= 0 && await_completions(IW_SCQ, 1, &wc, ctx) == 0);
    CHECK(iw_await_disconnect(ctx) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(iw_lmr_deregister(&src) == 0 && FAILS(iw_lmr_deregister(&src), EFAULT) && iw_lmr_deregister(&dst) == 0);
    rdma_destroy_event_channel(channel);
}

/* A Write where the peer's rights do not allow it ends the connection with a completion that says so. */
static void *refuses(void *arg) {
    iw_ctx_t *ctx;
    iw_lmr_t readable, ctrl;
    iw_wc_t wc;
    CHECK(iw_listen(arg, &ctx) == 0 && iw_state(ctx) == IW_CONN_REQ);
    CHECK(iw_lmr_create(8, IW_REMOTE_READ, &readable, ctx) == 0 && iw_lmr_create(8, 0, &ctrl, ctx) == 0);
    CHECK(post_recv_lmr(&ctrl, 0, 8, ctx) >= 0 && iw_accept(ctx) == 0);
    CHECK(await_completions(IW_RCQ, 1, &wc, ctx) == 0 && wc.byte_len == 3 && wc.opcode == IW_WC_RECV);
    CHECK(iw_post_send_adv(&readable, ctx) >= 0 && iw_await_disconnect(ctx) == 0);
    CHECK(memcmp(readable.addr, "\0\0\0\0\0\0\0", 8) == 0);
    CHECK(iw_lmr_deregister(&readable) == 0 && iw_lmr_deregister(&ctrl) == 0);
    return NULL;
}

static void refused(void) {
    iw_listener_t *listener;
    iw_ctx_t *ctx;
    iw_lmr_t src;
    iw_rmr_t remote;
    iw_wc_t two[2] = {{0}};
    pthread_t thread;
    CHECK(FAILS(iw_open("no such host", 0, &listener), EINVAL) || errno != 0);
    CHECK(iw_open("127.0.0.1", 0, &listener) == 0 && pthread_create(&thread, NULL, refuses, listener) == 0);
    CHECK(iw_ctx_alloc("127.0.0.1", (uint16_t)iw_port(listener), &ctx) == 0);
    CHECK(FAILS(post_send_lmr(NULL, 0, 0, 0, ctx), EFAULT) && iw_post_recv_adv(ctx) == 0 && iw_connect(ctx) == 0);
    CHECK(iw_lmr_create(8, 0, &src, ctx) == 0);
    memcpy(src.addr, "written", 8);
    CHECK(post_send_lmr(&src, 0, 3, 0, ctx) >= 0 && iw_wait_recv_adv(&remote, ctx) == 0);
    CHECK(post_write_lmr(&src, 0, &remote, 0, 8, IW_SIGNALED, ctx) >= 0);
    CHECK(post_read_lmr(&src, 0, &remote, 0, 8, IW_SIGNALED, ctx) >= 0);
    CHECK(FAILS(await_completions(IW_SCQ, 2, two, ctx), EIO) && iw_error()[0] != 0 && two[1].status != 0);
    two[0].status = 0;
    CHECK((FAILS(await_completions(IW_RCQ, 1, two, ctx), EIO) || errno == ENOTCONN) && two[0].status != 0);
    CHECK(pthread_join(thread, NULL) == 0 && iw_state(ctx) == IW_INVALID);
    CHECK(iw_ctx_free(ctx) == 0 && iw_lmr_deregister(&src) == 0);
    int port = iw_port(listener);
    CHECK(iw_close(listener) == 0);
    CHECK(iw_ctx_alloc("127.0.0.1", (uint16_t)port, &ctx) == 0);
    CHECK(FAILS(iw_connect(ctx), ECONNREFUSED) && iw_state(ctx) == IW_INVALID && iw_ctx_free(ctx) == 0);
    CHECK(FAILS(iw_ctx_alloc(NULL, 1, &ctx), EFAULT) && FAILS(iw_ctx_alloc("127.0.0.1", 1, NULL), EFAULT));
    CHECK(FAILS(iw_disconnect(NULL), EFAULT) && FAILS(iw_close(NULL), EFAULT));
}

int main(void) {
    alarm(60); /* a call that hangs ends the program */
    mixed();
    refused();
    return failures > 99 ? 99 : failures;
}
