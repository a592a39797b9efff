/*
 * Two processes that joined their queue pairs; the second one comes to something, and the first one says what it sees.
 *   killed          the second is killed while the first waits for a receive
 *   dies FAULTS     the second's connection breaks under this script, which it alone has
 *   port FAULTS     the second's port goes down for 300 ms under this script, and the first writes and sends to it
 */
#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define DOWN_MS 300

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

struct side {
    struct ibv_context *ctx;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_qp *qp;
    char *memory;
    int in, out;
};

/* The data that the sides exchange. */
struct name {
    uint32_t qp, rkey;
    uint64_t addr;
};

static void receive(struct side *side) {
    struct ibv_sge sge = {(uintptr_t)side->memory, 64, side->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    must(ibv_post_recv(side->qp, &wr, &bad) == 0, "ibv_post_recv");
}

/* Connected, with one receive posted. */
static struct name join(struct side *side) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    must(list && list[0], "ibv_get_device_list");
    must((side->ctx = ibv_open_device(list[0])) != NULL, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(side->ctx);
    side->channel = ibv_create_comp_channel(side->ctx);
    side->cq = ibv_create_cq(side->ctx, 64, NULL, side->channel, 0);
    side->memory = calloc(1, 4096);
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    side->mr = ibv_reg_mr(pd, side->memory, 4096, access);
    must(pd && side->cq && side->mr, "pd, cq, mr");
    struct ibv_qp_init_attr init = {.send_cq = side->cq, .recv_cq = side->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
        .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1}};
    must((side->qp = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
    struct name ours = {side->qp->qp_num, side->mr->rkey, (uintptr_t)side->memory}, theirs;
    must(write(side->out, &ours, sizeof ours) == sizeof ours && read(side->in, &theirs, sizeof theirs) == sizeof theirs, "a pipe");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access};
    must(ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "INIT");
    receive(side);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = theirs.qp,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12, .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 1}}};
    must(ibv_query_gid(side->ctx, 1, 0, &attr.ah_attr.grh.dgid) == 0, "ibv_query_gid");
    must(ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0, "RTR");
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    must(ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC) == 0, "RTS");
    return theirs;
}

static void post(struct side *side, enum ibv_wr_opcode opcode, const struct name *to) {
    struct ibv_sge sge = {(uintptr_t)side->memory + 1024, 64, side->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    if (to) wr.wr.rdma.remote_addr = to->addr + 2048, wr.wr.rdma.rkey = to->rkey;
    must(ibv_post_send(side->qp, &wr, &bad) == 0, "ibv_post_send");
}

/* The next completion, waited for on the channel. */
static struct ibv_wc completion(struct side *side) {
    struct ibv_wc wc;
    int got;
    while ((got = ibv_poll_cq(side->cq, 1, &wc)) == 0) {
        struct ibv_cq *cq;
        void *context;
        must(ibv_req_notify_cq(side->cq, 0) == 0, "ibv_req_notify_cq");
        if ((got = ibv_poll_cq(side->cq, 1, &wc)) != 0) break;
        struct pollfd fd = {.fd = side->channel->fd, .events = POLLIN};
        must(poll(&fd, 1, 60000) == 1, "nothing within a minute");
        must(ibv_get_cq_event(side->channel, &cq, &context) == 0, "ibv_get_cq_event");
        ibv_ack_cq_events(cq, 1);
    }
    must(got == 1, "ibv_poll_cq");
    return wc;
}

static void good(struct side *side) { must(completion(side).status == IBV_WC_SUCCESS, "a good completion"); }

static void second(struct side *side, const char *what, double *down) {
    char byte = 0;
    join(side);
    post(side, IBV_WR_SEND, NULL);
    good(side);
    if (!strcmp(what, "killed")) pause();
    if (!strcmp(what, "dies")) {
        post(side, IBV_WR_SEND, NULL);
        /* Until the first has seen enough. */
        must(read(side->in, &byte, 1) == 0, "the first to leave");
        return;
    }
    good(side);
    *down = now();
    receive(side);
    must(write(side->out, &byte, 1) == 1, "a pipe");
    good(side);
}

static void first(struct side *side, const char *what, pid_t child, const double *down) {
    char byte;
    struct name peer = join(side);
    good(side);
    if (strcmp(what, "port")) {
        receive(side);
        if (!strcmp(what, "killed")) must(kill(child, SIGKILL) == 0, "kill");
        struct ibv_wc wc = completion(side);
        struct ibv_qp_attr attr;
        struct ibv_qp_init_attr init;
        must(ibv_query_qp(side->qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp");
        printf("%s: %s, state %d\n", what, ibv_wc_status_str(wc.status), attr.qp_state);
        return;
    }
    post(side, IBV_WR_SEND, NULL);
    good(side);
    must(read(side->in, &byte, 1) == 1, "a pipe");
    post(side, IBV_WR_RDMA_WRITE, &peer);
    post(side, IBV_WR_SEND, NULL);
    for (int i = 0; i < 2; i++) {
        good(side);
        printf("%s: %s\n", i ? "send" : "write", now() - *down >= DOWN_MS ? "after the port was up" : "while the port was down");
    }
}

int main(int argc, char **argv) {
    int there[2], back[2];
    must(argc > 1 && pipe(there) == 0 && pipe(back) == 0, "pipe");
    double *down = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(down != MAP_FAILED, "mmap");
    pid_t child = fork();
    struct side side = {.in = child ? back[0] : there[0], .out = child ? there[1] : back[1]};
    close(child ? back[1] : there[1]);
    close(child ? there[0] : back[0]);
    if (child == 0) {
        if (argc > 2) setenv("WEFT_FAULTS", argv[2], 1);
        second(&side, argv[1], down);
        return 0;
    }
    first(&side, argv[1], child, down);
    close(side.out);
    int status;
    must(waitpid(child, &status, 0) == child, "waitpid");
    must(!strcmp(argv[1], "killed") || status == 0, "the second process");
    return 0;
}
