/* Two queue pairs of one process, twenty Sends, one after the other, and what asynchronous events there are after which of them. */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

/* All events that are there, and at least this many. */
static void events(struct ibv_context *ctx, int sends, int *wanted) {
    struct ibv_async_event event;
    for (;;) {
        fcntl(ctx->async_fd, F_SETFL, sends == 20 && *wanted > 0 ? 0 : O_NONBLOCK);
        if (ibv_get_async_event(ctx, &event)) return;
        printf("after %d sends: %s, port %d\n", sends, ibv_event_type_str(event.event_type), event.element.port_num);
        ibv_ack_async_event(&event);
        --*wanted;
    }
}

int main(void) {
    int wanted = 2;
    struct ibv_device **list = ibv_get_device_list(NULL);
    must(list && list[0], "ibv_get_device_list");
    struct ibv_context *ctx = ibv_open_device(list[0]);
    must(ctx != NULL, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(ctx);
    struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
    static char memory[4096];
    struct ibv_mr *mr = pd ? ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE) : NULL;
    must(pd && cq && mr, "pd, cq, mr");
    union ibv_gid gid;
    must(ibv_query_gid(ctx, 1, 0, &gid) == 0, "ibv_query_gid");

    struct ibv_qp *qp[2];
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
            .cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1}};
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
        qp[i] = ibv_create_qp(pd, &init);
        must(qp[i] != NULL, "ibv_create_qp");
        must(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "INIT");
    }
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp[1 - i]->qp_num,
            .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
            .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
        must(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0, "RTR");
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        must(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
            IBV_QP_MAX_QP_RD_ATOMIC) == 0, "RTS");
    }

    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = 64, .lkey = mr->lkey};
    for (int n = 0; n < 20; n++) {
        struct ibv_recv_wr recv = {.sg_list = &sge, .num_sge = 1}, *bad_recv;
        struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad_send;
        must(ibv_post_recv(qp[1], &recv, &bad_recv) == 0, "ibv_post_recv");
        must(ibv_post_send(qp[0], &send, &bad_send) == 0, "ibv_post_send");
        for (int done = 0; done < 2;) {
            struct ibv_wc wc;
            int got = ibv_poll_cq(cq, 1, &wc);
            must(got >= 0 && (got == 0 || wc.status == IBV_WC_SUCCESS), "a completion");
            done += got;
        }
        events(ctx, n + 1, &wanted);
    }
    return 0;
}
