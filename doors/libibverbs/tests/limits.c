/*
 * Rows of docs/verbs-reference.md's table of limits that no other test here meets. Arguments: names of cases to run; none: all. The exit status is the
 * number of failures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/ib.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define ALL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define MINUS(call, with) CHECK((errno = 0, (call) == -1) && errno == (with))

static struct sockaddr_in loopback(uint16_t port) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return addr;
}

/* How a child ends. */
static int status_of(pid_t child) {
    int status;
    MUST(waitpid(child, &status, 0) == child);
    return status;
}

/* Each process has a separate domain for the same file. */
static void xrc_of_another_process(void) {
    char name[] = "/tmp/weft-xrcXXXXXX";
    int file = mkstemp(name), ends[2];
    MUST(file >= 0 && unlink(name) == 0 && pipe(ends) == 0);
    struct ibv_xrcd_init_attr shared = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = file, .oflags = O_CREAT | O_EXCL};
    pid_t child = fork();
    if (!child) {
        uint32_t number = 0;
        MUST(read(ends[0], &number, sizeof number) == sizeof number);
        struct ibv_context *context = open_named("weft_ib0");
        /* It is not there, although the other process has it. */
        struct ibv_xrcd *own = ibv_open_xrcd(context, &shared);
        CHECK(own);
        struct ibv_qp_open_attr attr = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                                        .qp_num = number,
                                        .xrcd = own,
                                        .qp_type = IBV_QPT_XRC_RECV};
        NO(ibv_open_qp(context, &attr), EINVAL);
        _exit(failures);
    }
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &shared);
    MUST(xrcd);
    struct ibv_qp_init_attr_ex ex = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    struct ibv_qp *target = ibv_create_qp_ex(context, &ex);
    MUST(target && write(ends[1], &target->qp_num, sizeof target->qp_num) == sizeof target->qp_num);
    CHECK(status_of(child) == 0);
    CHECK(ibv_destroy_qp(target) == 0 && ibv_close_xrcd(xrcd) == 0 && ibv_close_device(context) == 0);
    close(ends[0]);
    close(ends[1]);
    close(file);
}

/* Groups that only a subnet manager, or InfiniBand, has. */
static void groups(void) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *id;
    struct sockaddr_in from = loopback(0), any = {.sin_family = AF_INET};
    MUST(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_UDP) == 0);
    CHECK(rdma_bind_addr(id, (struct sockaddr *)&from) == 0);
    MINUS(rdma_join_multicast(id, (struct sockaddr *)&any, NULL), EINVAL);
    struct sockaddr_ib ib = {.sib_family = AF_IB};
    ib.sib_addr.sib_raw[0] = 0xff;
    ib.sib_addr.sib_raw[1] = 0x12;
    ib.sib_addr.sib_raw[2] = 0x40;
    MINUS(rdma_join_multicast(id, (struct sockaddr *)&ib, NULL), EINVAL);
    CHECK(rdma_destroy_id(id) == 0);
    rdma_destroy_event_channel(channel);
}

static void datagram_rsockets(void) {
    int one = 1, a = rsocket(AF_INET, SOCK_DGRAM, 0), b = rsocket(AF_INET, SOCK_DGRAM, 0);
    MUST(a >= 0 && b >= 0);
    struct sockaddr_in at = loopback(0);
    socklen_t len = sizeof at;
    struct ip_mreq group = {.imr_multiaddr.s_addr = htonl(0xef010203), .imr_interface.s_addr = htonl(INADDR_LOOPBACK)};
    MINUS(rsetsockopt(a, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group), EOPNOTSUPP);
    MINUS(rsetsockopt(a, SOL_SOCKET, SO_BROADCAST, &one, sizeof one), EOPNOTSUPP);
    CHECK(rsetsockopt(a, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(rsetsockopt(b, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(rbind(a, (struct sockaddr *)&at, sizeof at) == 0 && rgetsockname(a, (struct sockaddr *)&at, &len) == 0);
    MINUS(rbind(b, (struct sockaddr *)&at, sizeof at), EADDRINUSE);
    CHECK(rclose(a) == 0);
    /* There is no receiver now, which a connected socket of the kernel would notice. */
    CHECK(rconnect(b, (struct sockaddr *)&at, sizeof at) == 0);
    char byte = 1;
    for (int i = 0; i < 3; i++) {
        rsend(b, &byte, 1, 0);
        usleep(20000);
    }
    MINUS(rrecv(b, &byte, 1, MSG_DONTWAIT), EAGAIN);
    CHECK(rclose(b) == 0);
}

static void receive_side_scaling(void) {
    for (int which = 0; which < 2; which++) {
        struct ibv_context *context = open_named(which ? "weft_ib0" : "weft0");
        struct ibv_rwq_ind_table_init_attr attr = {0};
        NO(ibv_create_rwq_ind_table(context, &attr), EOPNOTSUPP);
        CHECK(ibv_close_device(context) == 0);
    }
}

static char target[64], source[64] = "written";

/* Connects, writes to the address that it gets; it ends with the peer. */
static void *writer(void *arg) {
    struct rdma_cm_id *listener = arg, *id;
    struct sockaddr_in to = loopback(rdma_get_src_port(listener));
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_RC}, *info;
    char port[16];
    snprintf(port, sizeof port, "%d", ntohs(to.sin_port));
    MUST(rdma_getaddrinfo("127.0.0.1", port, &hints, &info) == 0);
    struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .sq_sig_all = 1};
    MUST(rdma_create_ep(&id, info, NULL, &init) == 0);
    MUST(rdma_connect(id, NULL) == 0);
    struct {
        uint64_t addr;
        uint32_t rkey;
    } *told;
    struct rdma_conn_param param = id->event->param.conn;
    told = (void *)param.private_data;
    struct ibv_mr *mr = rdma_reg_msgs(id, source, sizeof source);
    MUST(told && mr);
    struct ibv_wc wc;
    MUST(rdma_post_write(id, NULL, source, sizeof source, mr, IBV_SEND_SIGNALED, told->addr, told->rkey) == 0);
    CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
    time_t end = time(NULL) + 20;
    while (strcmp(target, "written") && time(NULL) < end) usleep(1000);
    CHECK(!strcmp(target, "written"));
    rdma_disconnect(id);
    rdma_dereg_mr(mr);
    rdma_destroy_ep(id);
    rdma_freeaddrinfo(info);
    return NULL;
}

/* On an RNIC a region's rights say what a peer may do; a queue pair's are taken, and change nothing. */
static void rights_of_weft0(void) {
    struct rdma_addrinfo hints = {.ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_RC}, *info;
    struct rdma_cm_id *listener, *id;
    struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .sq_sig_all = 1};
    MUST(rdma_getaddrinfo("127.0.0.1", "0", &hints, &info) == 0);
    MUST(rdma_create_ep(&listener, info, NULL, &init) == 0 && rdma_listen(listener, 1) == 0);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, writer, listener) == 0);
    MUST(rdma_get_request(listener, &id) == 0);
    CHECK(!strcmp(ibv_get_device_name(id->verbs->device), "weft0"));
    struct ibv_mr *mr = rdma_reg_write(id, target, sizeof target);
    MUST(mr);
    struct {
        uint64_t addr;
        uint32_t rkey;
    } tell = {(uintptr_t)target, mr->rkey};
    struct ibv_qp_attr none = {.qp_access_flags = 0};
    CHECK(ibv_modify_qp(id->qp, &none, IBV_QP_ACCESS_FLAGS) == 0);
    struct rdma_conn_param param = {.private_data = &tell, .private_data_len = sizeof tell, .rnr_retry_count = 7};
    MUST(rdma_accept(id, &param) == 0);
    CHECK(ibv_modify_qp(id->qp, &none, IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    rdma_disconnect(id);
    rdma_dereg_mr(mr);
    rdma_destroy_ep(id);
    rdma_destroy_ep(listener);
    rdma_freeaddrinfo(info);
}

/* The process that unmaps memory which is registered is ended when a request uses it. */
static void unmapped(void) {
    pid_t child = fork();
    if (!child) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        struct ibv_context *context = open_named("weft_ib0");
        struct ibv_pd *pd = ibv_alloc_pd(context);
        struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
        char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        struct ibv_mr *mr = ibv_reg_mr(pd, map, 8192, ALL);
        struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .cap = {4, 4, 1, 1, 0}};
        struct ibv_qp *qp = ibv_create_qp(pd, &init);
        MUST(pd && cq && mr && qp);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
        MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
        attr.qp_state = IBV_QPS_RTR;
        MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
        attr.qp_state = IBV_QPS_RTS;
        MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
        struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh.hop_limit = 1};
        MUST(ibv_query_gid(context, 1, 0, &to.grh.dgid) == 0);
        struct ibv_ah *ah = ibv_create_ah(pd, &to);
        struct ibv_sge into = {(uintptr_t)map, 4096, mr->lkey}, from = {(uintptr_t)map + 4096, 64, mr->lkey};
        struct ibv_recv_wr rwr = {.sg_list = &into, .num_sge = 1}, *bad_recv;
        struct ibv_send_wr wr = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = qp->qp_num;
        wr.wr.ud.remote_qkey = 7;
        MUST(ah && ibv_post_recv(qp, &rwr, &bad_recv) == 0);
        munmap(map, 8192);
        ibv_post_send(qp, &wr, &bad);
        struct ibv_wc wc;
        for (time_t end = time(NULL) + 5; time(NULL) < end;) ibv_poll_cq(cq, 1, &wc);
        _exit(0);
    }
    int status = status_of(child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* Objects of another user's process cannot be imported. */
static void import_by_another_user(void) {
    if (geteuid()) {
        printf("import_by_another_user: skipped, only root can be another user\n");
        return;
    }
    struct ibv_context *context = open_named("weft_ib0");
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        MUST(setgid(4242) == 0 && setuid(4242) == 0);
        NO(ibv_import_device(context->cmd_fd), EACCES);
        _exit(failures);
    }
    CHECK(status_of(child) == 0);
    CHECK(ibv_close_device(context) == 0);
}

static const struct named_case cases[] = {{"xrc_of_another_process", xrc_of_another_process},
             {"unmapped", unmapped},
             {"import_by_another_user", import_by_another_user},
             {"groups", groups},
             {"datagram_rsockets", datagram_rsockets},
             {"receive_side_scaling", receive_side_scaling},
             {"rights_of_weft0", rights_of_weft0}};

int main(int argc, char **argv) {
    return run_cases(cases, sizeof cases / sizeof *cases, argc, argv);
}
