/* A ping-pong of two processes that sleep while they wait, by five ways: asleep server|client PORT tcp|tcp-epoll|event|epoll|poll ROUNDS [BYTES].
 * tcp: blocking sockets. tcp-epoll: epoll_wait, then read. event: ibv_get_cq_event. epoll: an epoll of the program's own on the channel's
 * descriptor. poll: ibv_poll_cq alone, which does not sleep. The client prints microseconds one way: median and the 99th of a hundred. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int order(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return (d > 0) - (d < 0);
}

static char memory[1 << 20];
static size_t bytes = 64;
static int sock, waits = -1;
static const char *mode;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;

static void all(ssize_t (*move)(int, void *, size_t), void *buf, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = move(sock, (char *)buf + done, len - done);
        must(n > 0, "the other end");
        done += n;
    }
}

static ssize_t out(int fd, void *buf, size_t len) {
    return write(fd, buf, len);
}

static void sleep_on(int fd) {
    if (waits < 0) {
        struct epoll_event event = {.events = EPOLLIN};
        waits = epoll_create1(0);
        must(epoll_ctl(waits, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    }
    struct epoll_event event;
    must(epoll_wait(waits, &event, 1, 30000) == 1, "epoll_wait");
}

static void post_recv(void) {
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = bytes, .lkey = mr->lkey};
    struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;
    must(ibv_post_recv(qp, &recv, &bad) == 0, "ibv_post_recv");
}

static void say(void) {
    if (!mr) {
        all(out, memory, bytes);
        return;
    }
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = bytes, .lkey = mr->lkey};
    static unsigned sent;
    struct ibv_send_wr send = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
        .send_flags = ++sent % 16 ? 0 : IBV_SEND_SIGNALED}, *bad;
    must(ibv_post_send(qp, &send, &bad) == 0, "ibv_post_send");
}

/* As programs do it: sleep, acknowledge, ask for the next event, then take what is there. */
static void hear(void) {
    if (!mr) {
        if (!strcmp(mode, "tcp-epoll")) sleep_on(sock);
        all(read, memory, bytes);
        return;
    }
    for (;;) {
        struct ibv_wc wc;
        int got = ibv_poll_cq(cq, 1, &wc);
        must(got >= 0 && (got == 0 || wc.status == IBV_WC_SUCCESS), "a completion");
        if (got && wc.wr_id == 1) break;
        if (got) continue;
        if (!strcmp(mode, "poll")) continue;
        if (!strcmp(mode, "epoll")) sleep_on(channel->fd);
        struct ibv_cq *of;
        void *context;
        must(ibv_get_cq_event(channel, &of, &context) == 0, "ibv_get_cq_event");
        ibv_ack_cq_events(of, 1);
        must(ibv_req_notify_cq(of, 0) == 0, "ibv_req_notify_cq");
    }
    post_recv();
}

static void connect_pair(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    must(list && list[0], "ibv_get_device_list");
    struct ibv_context *ctx = ibv_open_device(list[0]);
    must(ctx != NULL, "ibv_open_device");
    struct ibv_pd *pd = ibv_alloc_pd(ctx);
    channel = ibv_create_comp_channel(ctx);
    cq = ibv_create_cq(ctx, 64, NULL, channel, 0);
    mr = pd ? ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE) : NULL;
    must(channel && cq && mr, "channel, cq, mr");
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    qp = ibv_create_qp(pd, &init);
    must(qp != NULL, "ibv_create_qp");
    must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "INIT");
    post_recv();
    struct {
        union ibv_gid gid;
        uint32_t qp;
    } own = {.qp = qp->qp_num}, far;
    must(ibv_query_gid(ctx, 1, 0, &own.gid) == 0, "ibv_query_gid");
    all(out, &own, sizeof own);
    all(read, &far, sizeof far);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = far.qp, .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12, .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = far.gid, .hop_limit = 1}}};
    must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0, "RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    attr.max_rd_atomic = 1;
    must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC) == 0, "RTS");
    must(ibv_req_notify_cq(cq, 0) == 0, "ibv_req_notify_cq");
    char ready = 0;
    all(out, &ready, 1);
    all(read, &ready, 1);
}

int main(int argc, char **argv) {
    must(argc >= 5, "asleep server|client PORT MODE ROUNDS [BYTES]");
    int server = !strcmp(argv[1], "server"), rounds = atoi(argv[4]), on = 1;
    if (argc > 5) bytes = strtoul(argv[5], NULL, 0);
    must(rounds > 0 && bytes > 0 && bytes <= sizeof memory, "rounds and bytes");
    mode = argv[3];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    sock = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (server) {
        must(bind(sock, (struct sockaddr *)&at, sizeof at) == 0 && listen(sock, 1) == 0, "listen");
        sock = accept(sock, NULL, NULL);
        must(sock >= 0, "accept");
    } else {
        for (int tries = 0; connect(sock, (struct sockaddr *)&at, sizeof at); tries++) {
            must(tries < 500, "connect");
            usleep(10000);
        }
    }
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (strncmp(mode, "tcp", 3)) connect_pair();
    double *took = calloc(rounds, sizeof *took);
    for (int n = 0; n < rounds; n++) {
        double begun = now();
        if (server) {
            hear();
            say();
        } else {
            say();
            hear();
        }
        took[n] = (now() - begun) / 2;
    }
    if (!server) {
        qsort(took, rounds, sizeof *took, order);
        printf("%s %zu B: median %.2f, 99 %% %.2f us one way\n", mode, bytes, took[rounds / 2], took[rounds * 99 / 100]);
    }
    /* The other one's last answer may not have been taken yet. */
    char done = 0;
    all(out, &done, 1);
    all(read, &done, 1);
    return 0;
}
