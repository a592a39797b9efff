/*
 * Two processes of one user: one gives the other its cmd_fd (SCM_RIGHTS) and handles; the other imports the domain, regions and device memory, and has a
 * queue pair in them that the first writes to and receives from. The exit status is the number of failures.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define ALL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define PAGE 4096
#define SIZE (4 * PAGE)

/* What the exporter tells. Regions are named by their handles; 0: the open file, 1: a file of no descriptor and no name, 2: its own memory. */
struct told {
    uint32_t pd, other_pd, mr[3], dm, dm_mr, null, qpn;
    uint64_t addr[3];
};

static void say(int to, const void *bytes, size_t len, int fd) {
    struct iovec part = {(void *)bytes, len};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
    }
    MUST(sendmsg(to, &message, 0) == (ssize_t)len);
}

static int hear(int from, void *bytes, size_t len) {
    struct iovec part = {bytes, len};
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    MUST(recvmsg(from, &message, 0) == (ssize_t)len);
    int fd = -1;
    if (message.msg_controllen) memcpy(&fd, CMSG_DATA(&control.head), sizeof fd);
    return fd;
}

static struct ibv_qp *queue_pair(struct ibv_pd *pd, struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {16, 16, 1, 1, 0}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    MUST(qp);
    return qp;
}

static void join(struct ibv_qp *qp, uint32_t peer) {
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL};
    MUST(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 4, .min_rnr_timer = 12};
    rtr.ah_attr.is_global = rtr.ah_attr.port_num = rtr.ah_attr.grh.hop_limit = 1;
    MUST(ibv_query_gid(qp->context, 1, 0, &rtr.ah_attr.grh.dgid) == 0);
    MUST(ibv_modify_qp(qp, &rtr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    MUST(ibv_modify_qp(qp, &rts,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static enum ibv_wc_status completion(struct ibv_cq *cq) {
    struct ibv_wc wc;
    time_t end = time(NULL) + 60;
    for (int n; (n = ibv_poll_cq(cq, 1, &wc)) != 1;) MUST(n == 0 && time(NULL) < end);
    return wc.status;
}

static enum ibv_wc_status carry_out(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint64_t addr, uint32_t lkey, uint64_t to,
                                    uint32_t rkey) {
    struct ibv_sge sge = {addr, 64, lkey};
    struct ibv_send_wr wr = {.opcode = opcode, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = to;
    wr.wr.rdma.rkey = rkey;
    MUST(ibv_post_send(qp, &wr, &bad) == 0);
    return completion(qp->send_cq);
}

static int importer(int line, const char *nameless) {
    running = "importer";
    struct told told;
    int fd = hear(line, &told, sizeof told), late = dup(fd);
    MUST(fd >= 0);
    struct ibv_context *own = open_named("weft_ib0");
    struct ibv_context *context = ibv_import_device(fd);
    MUST(context);
    CHECK(context->cmd_fd == fd && !strcmp(ibv_get_device_name(context->device), "weft_ib0"));
    /* Domains, of the other process and of this one. */
    NO(ibv_import_pd(own, told.pd), ENOENT);
    NO(ibv_import_pd(context, told.pd + 1000), ENOENT);
    struct ibv_pd *pd = ibv_import_pd(context, told.pd), *again = ibv_import_pd(context, told.pd);
    struct ibv_pd *foreign = ibv_import_pd(context, told.other_pd), *mine = ibv_alloc_pd(own), *here = ibv_alloc_pd(context);
    MUST(pd && again && foreign && mine && here);
    CHECK(pd->handle == told.pd && here->handle != told.pd && here->handle != told.other_pd);
    /* Regions: of the domain that they were made in, with the keys that they have there. */
    NO(ibv_import_mr(foreign, told.mr[0]), ENOENT);
    NO(ibv_import_mr(mine, told.mr[0]), ENOENT);
    NO(ibv_import_mr(here, told.mr[0]), ENOENT);
    NO(ibv_import_mr(pd, told.mr[0] ^ 1), ENOENT);
    struct ibv_mr *mr[2];
    for (int i = 0; i < 2; i++) {
        MUST(mr[i] = ibv_import_mr(pd, told.mr[i]));
        CHECK(mr[i]->lkey == told.mr[i] && mr[i]->rkey == told.mr[i] && !mr[i]->addr);
    }
    /* Memory that the other process shares with no other cannot be imported, nor can null regions. */
    NO(ibv_import_mr(pd, told.mr[2]), EOPNOTSUPP);
    NO(ibv_import_mr(pd, told.null), ENOENT);
    /* A second handle, and the first ends. */
    struct ibv_mr *second = ibv_import_mr(again, told.mr[0]);
    MUST(second);
    ibv_unimport_mr(mr[0]);
    CHECK(ibv_dereg_mr(second) == EINVAL);
    struct ibv_mr *dm_mr = ibv_import_mr(pd, told.dm_mr);
    struct ibv_dm *dm = ibv_import_dm(context, told.dm);
    MUST(dm && dm_mr);
    char seen[64] = "";
    CHECK(ibv_memcpy_from_dm(seen, dm, 64, 64) == 0 && !strcmp(seen, "in device memory"));

    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    MUST(cq);
    struct ibv_qp *qp = queue_pair(pd, cq);
    say(line, &qp->qp_num, sizeof qp->qp_num, -1);
    join(qp, told.qpn);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
    struct ibv_mw_bind bind = {.bind_info = {mr[1], told.addr[1], 64, IBV_ACCESS_REMOTE_WRITE}};
    MUST(mw);
    CHECK(ibv_bind_mw(qp, mw, &bind) == EINVAL && ibv_dealloc_mw(mw) == 0);
    /* The exporter writes to each region, and reads device memory, by this queue pair and its own keys. */
    char done;
    hear(line, &done, 1);
    CHECK(!strcmp(nameless + 100, "written to 1"));
    /* Sends out of the regions, at the exporter's addresses. */
    for (int i = 0; i < 2; i++)
        CHECK(carry_out(qp, IBV_WR_SEND, told.addr[i] + 100, told.mr[i], 0, 0) == IBV_WC_SUCCESS);
    hear(line, &done, 1);
    /* It has closed all. What is here stays until it is given back; nothing more comes. */
    CHECK(carry_out(qp, IBV_WR_SEND, told.addr[0], told.mr[0], 0, 0) != IBV_WC_SUCCESS);
    CHECK(!strcmp(nameless + 100, "written to 1"));
    NO(ibv_import_mr(pd, told.mr[2]), ENOENT);
    NO(ibv_import_dm(context, told.dm + 1), ENOENT);
    NO(ibv_import_device(late), EOPNOTSUPP);
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    ibv_unimport_mr(second);
    ibv_unimport_mr(mr[1]);
    ibv_unimport_mr(dm_mr);
    ibv_unimport_dm(dm);
    ibv_unimport_pd(again);
    ibv_unimport_pd(pd);
    ibv_unimport_pd(foreign);
    CHECK(ibv_dealloc_pd(mine) == 0 && ibv_dealloc_pd(here) == 0);
    CHECK(ibv_close_device(context) == 0 && ibv_close_device(own) == 0);
    return failures;
}

int main(void) {
    running = "exporter";
    alarm(240);
    int line[2];
    MUST(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, line) == 0);
    /* The importer has inherited this; /proc leads to no file. */
    char *nameless = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(nameless != MAP_FAILED);
    pid_t child = fork();
    if (!child) {
        close(line[0]);
        return importer(line[1], nameless);
    }
    close(line[1]);
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_pd *pd = ibv_alloc_pd(context), *other = ibv_alloc_pd(context);
    MUST(pd && other);
    int file = memfd_create("shared", 0);
    MUST(ftruncate(file, 8 * PAGE) == 0);
    char *mapped = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 2 * PAGE);
    static char private[SIZE];
    MUST(mapped != MAP_FAILED);
    /* Regions need not begin with a page. */
    char *memory[] = {mapped + 50, nameless, private};
    struct told told = {.pd = pd->handle, .other_pd = other->handle};
    struct ibv_mr *mr[3];
    for (int i = 0; i < 3; i++) {
        MUST(mr[i] = ibv_reg_mr(pd, memory[i], SIZE - 50, ALL));
        told.mr[i] = mr[i]->handle;
        told.addr[i] = (uintptr_t)memory[i];
    }
    struct ibv_alloc_dm_attr wanted = {.length = 3 * PAGE};
    struct ibv_dm *unused = ibv_alloc_dm(context, &wanted), *dm = ibv_alloc_dm(context, &wanted);
    char text[64] = "in device memory";
    MUST(unused && dm && ibv_memcpy_to_dm(dm, 64, text, 64) == 0);
    struct ibv_mr *dm_mr = ibv_reg_dm_mr(pd, dm, 60, 2 * PAGE, IBV_ACCESS_ZERO_BASED | ALL);
    MUST(dm_mr);
    told.dm = dm->handle;
    told.dm_mr = dm_mr->handle;
    struct ibv_mr *null = ibv_alloc_null_mr(pd);
    MUST(null);
    told.null = null->handle;
    struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    struct ibv_qp *qp = queue_pair(other, cq);
    told.qpn = qp->qp_num;
    static char near[4][64] = {"written to 0", "written to 1", "", ""};
    struct ibv_mr *mine = ibv_reg_mr(other, near, sizeof near, ALL);
    MUST(mine);
    say(line[0], &told, sizeof told, context->cmd_fd);
    uint32_t peer;
    hear(line[0], &peer, sizeof peer);
    join(qp, peer);
    for (int i = 0; i < 2; i++) {
        enum ibv_wc_status status =
            carry_out(qp, IBV_WR_RDMA_WRITE, (uintptr_t)near[i], mine->lkey, told.addr[i] + 100, told.mr[i]);
        CHECK(status == IBV_WC_SUCCESS);
        /* The importer's region is this memory. */
        CHECK(!strcmp(memory[i] + 100, near[i]));
    }
    CHECK(carry_out(qp, IBV_WR_RDMA_READ, (uintptr_t)near[2], mine->lkey, 4, dm_mr->rkey) == IBV_WC_SUCCESS);
    CHECK(!strcmp(near[2], "in device memory"));
    struct ibv_recv_wr *bad;
    for (int i = 2; i < 4; i++) {
        struct ibv_sge sge = {(uintptr_t)near[i], 64, mine->lkey};
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1};
        MUST(ibv_post_recv(qp, &wr, &bad) == 0);
    }
    char done = 1;
    say(line[0], &done, 1, -1);
    CHECK(completion(cq) == IBV_WC_SUCCESS && completion(cq) == IBV_WC_SUCCESS);
    CHECK(!strcmp(near[2], "written to 0") && !strcmp(near[3], "written to 1"));
    CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
    for (int i = 0; i < 3; i++) CHECK(ibv_dereg_mr(mr[i]) == 0);
    CHECK(ibv_dereg_mr(null) == 0 && ibv_dereg_mr(mine) == 0 && ibv_dereg_mr(dm_mr) == 0 && ibv_free_dm(dm) == 0 && ibv_free_dm(unused) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_dealloc_pd(other) == 0 && ibv_close_device(context) == 0);
    say(line[0], &done, 1, -1);
    int status;
    MUST(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return failures;
}
