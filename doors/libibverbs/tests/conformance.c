/*
 * What rdma-core's manual pages promise of libibverbs, tried out through Debian's own header: calls, completions, events, errors.
 * Arguments: names of cases to run; none: all. The exit status is the number of failures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

/* A call that returns -1, and sets errno. */
#define MINUS(call, with) CHECK((errno = 0, (call) == -1) && errno == (with))

#define ALL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define SIZE 65536

/* One side of a connection with its own objects. */
struct half {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *scq, *rcq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char *buf;
};

static struct ibv_qp_init_attr attributes(struct half *h) {
    struct ibv_qp_init_attr init;
    memset(&init, 0, sizeof init);
    init.send_cq = h->scq;
    init.recv_cq = h->rcq;
    init.srq = h->srq;
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = init.cap.max_recv_wr = 16;
    init.cap.max_send_sge = init.cap.max_recv_sge = 4;
    init.cap.max_inline_data = 128;
    return init;
}

static void half_open(struct half *h, const char *device, int shared) {
    memset(h, 0, sizeof *h);
    h->context = open_named(device);
    MUST(h->pd = ibv_alloc_pd(h->context));
    MUST(h->channel = ibv_create_comp_channel(h->context));
    MUST(h->scq = ibv_create_cq(h->context, 64, h, h->channel, 0));
    MUST(h->rcq = ibv_create_cq(h->context, 64, h, h->channel, 0));
    if (shared) {
        struct ibv_srq_init_attr srq = {.attr = {.max_wr = 16, .max_sge = 2}};
        MUST(h->srq = ibv_create_srq(h->pd, &srq));
    }
    MUST(h->buf = aligned_alloc(4096, SIZE));
    memset(h->buf, 0, SIZE);
    MUST(h->mr = ibv_reg_mr(h->pd, h->buf, SIZE, ALL | IBV_ACCESS_MW_BIND));
    struct ibv_qp_init_attr init = attributes(h);
    MUST(h->qp = ibv_create_qp(h->pd, &init));
}

static void half_close(struct half *h) {
    CHECK(ibv_destroy_qp(h->qp) == 0);
    if (h->srq) CHECK(ibv_destroy_srq(h->srq) == 0);
    CHECK(ibv_destroy_cq(h->scq) == 0);
    CHECK(ibv_destroy_cq(h->rcq) == 0);
    CHECK(ibv_destroy_comp_channel(h->channel) == 0);
    CHECK(ibv_dereg_mr(h->mr) == 0);
    CHECK(ibv_dealloc_pd(h->pd) == 0);
    CHECK(ibv_close_device(h->context) == 0);
    free(h->buf);
}

static int to_init(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

#define RTR_MASK (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define RC_RTR_MASK (RTR_MASK | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)

static struct ibv_qp_attr rtr_attr(struct ibv_context *context, uint32_t peer) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = IBV_MTU_1024,
                               .dest_qp_num = peer,
                               .max_dest_rd_atomic = 4,
                               .min_rnr_timer = 12};
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.hop_limit = 1;
    MUST(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
    return attr;
}

static int to_rtr(struct ibv_qp *qp, uint32_t peer) {
    struct ibv_qp_attr attr = rtr_attr(qp->context, peer);
    return ibv_modify_qp(qp, &attr, qp->qp_type == IBV_QPT_UC ? RTR_MASK : RC_RTR_MASK);
}

#define RTS_MASK (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

static int to_rts(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4};
    return ibv_modify_qp(qp, &attr, qp->qp_type == IBV_QPT_UC ? IBV_QP_STATE | IBV_QP_SQ_PSN : RTS_MASK);
}

static int to_state(struct ibv_qp *qp, enum ibv_qp_state state) {
    struct ibv_qp_attr attr = {.qp_state = state};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

static enum ibv_qp_state state_of(struct ibv_qp *qp) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    MUST(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
    CHECK(qp->state == attr.qp_state);
    return attr.qp_state;
}

static void join(struct half *a, struct half *b) {
    MUST(to_init(a->qp) == 0 && to_init(b->qp) == 0);
    MUST(to_rtr(a->qp, b->qp->qp_num) == 0 && to_rtr(b->qp, a->qp->qp_num) == 0);
    MUST(to_rts(a->qp) == 0 && to_rts(b->qp) == 0);
}

static void pair_open(struct half *a, struct half *b) {
    half_open(a, "weft_ib0", 0);
    half_open(b, "weft_ib0", 0);
    join(a, b);
}

static void pair_close(struct half *a, struct half *b) {
    half_close(a);
    half_close(b);
}

static struct ibv_wc completion(struct ibv_cq *cq) {
    struct ibv_wc wc;
    time_t end = time(NULL) + 20;
    for (;;) {
        int n = ibv_poll_cq(cq, 1, &wc);
        if (n == 1) return wc;
        if (n < 0 || time(NULL) > end) {
            fprintf(stderr, "%s: no completion: %d\n", running, n);
            exit(100);
        }
    }
}

static struct ibv_sge part(struct half *h, size_t off, uint32_t len) {
    struct ibv_sge sge = {(uintptr_t)h->buf + off, len, h->mr->lkey};
    return sge;
}

static struct ibv_send_wr request(uint64_t id, enum ibv_wr_opcode opcode, struct ibv_sge *sge, int num) {
    struct ibv_send_wr wr;
    memset(&wr, 0, sizeof wr);
    wr.wr_id = id;
    wr.opcode = opcode;
    wr.sg_list = sge;
    wr.num_sge = num;
    wr.send_flags = IBV_SEND_SIGNALED;
    return wr;
}

static int post(struct half *h, struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad = NULL;
    int result = ibv_post_send(h->qp, wr, &bad);
    if (result) CHECK(bad == wr);
    return result;
}

static void receive(struct half *h, uint64_t id, size_t off, uint32_t len) {
    struct ibv_sge sge = part(h, off, len);
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = len ? 1 : 0}, *bad;
    if (h->srq)
        MUST(ibv_post_srq_recv(h->srq, &wr, &bad) == 0);
    else
        MUST(ibv_post_recv(h->qp, &wr, &bad) == 0);
}

static void aim(struct ibv_send_wr *wr, struct half *peer, size_t off) {
    wr->wr.rdma.remote_addr = (uintptr_t)peer->buf + off;
    wr->wr.rdma.rkey = peer->mr->rkey;
}

#include "counters.h"

#include "implicit.h"

static void devices(void) {
    int count = -1;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    CHECK(count == 2 && !list[2]);
    CHECK(!strcmp(ibv_get_device_name(list[0]), "weft0"));
    CHECK(list[0]->node_type == IBV_NODE_RNIC && list[0]->transport_type == IBV_TRANSPORT_IWARP);
    CHECK(!strcmp(ibv_get_device_name(list[1]), "weft_ib0"));
    CHECK(list[1]->node_type == IBV_NODE_CA && list[1]->transport_type == IBV_TRANSPORT_IB);
    CHECK(ibv_get_device_guid(list[0]) != 0 && ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]));
    CHECK(ibv_get_device_index(list[0]) != ibv_get_device_index(list[1]));
    struct ibv_device *device = list[1];
    ibv_free_device_list(list);
    struct ibv_context *context = ibv_open_device(device);
    MUST(context);
    CHECK(context->device == device && context->async_fd >= 0 && context->num_comp_vectors > 0);
    CHECK(ibv_close_device(context) == 0);
    CHECK(ibv_close_device(context) == EINVAL);
    CHECK(ibv_close_device(NULL) == EINVAL);
    struct ibv_device none;
    memset(&none, 0, sizeof none);
    NO(ibv_open_device(&none), EINVAL);
    NO(ibv_open_device(NULL), EINVAL);
    NO(ibv_get_device_name(&none), EINVAL);
    CHECK(ibv_get_device_guid(NULL) == 0);
    ibv_free_device_list(NULL);
    CHECK(ibv_fork_init() == 0);
    CHECK(ibv_is_fork_initialized() == IBV_FORK_UNNEEDED);
    NO(ibv_import_device(-1), EBADF);
    int other[2];
    MUST(pipe(other) == 0);
    NO(ibv_import_device(other[0]), EOPNOTSUPP);
    close(other[0]);
    close(other[1]);
}

/* A context that was imported has further handles of what the other has made, and of nothing else. */
static void imports(void) {
    struct ibv_context *own = open_named("weft_ib0"), *foreign = open_named("weft_ib0");
    struct ibv_pd *pd = ibv_alloc_pd(own);
    static char memory[4096];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_alloc_dm_attr wanted = {.length = 64};
    struct ibv_dm *dm = ibv_alloc_dm(own, &wanted);
    MUST(pd && mr && dm);
    struct ibv_context *context = ibv_import_device(dup(own->cmd_fd));
    MUST(context && context != own && context->device == own->device);
    NO(ibv_import_pd(foreign, pd->handle), ENOENT);
    NO(ibv_import_pd(context, pd->handle + 1000), ENOENT);
    NO(ibv_import_dm(foreign, dm->handle), ENOENT);
    struct ibv_pd *second = ibv_import_pd(context, pd->handle);
    MUST(second && second != pd && second->handle == pd->handle && second->context == context);
    struct ibv_pd *other = ibv_alloc_pd(context);
    NO(ibv_import_mr(other, mr->handle), ENOENT);
    struct ibv_mr *keys = ibv_import_mr(second, mr->handle);
    MUST(keys && keys != mr);
    CHECK(keys->lkey == mr->lkey && keys->rkey == mr->rkey && !keys->addr && !keys->length);
    /* It is not this handle's to end. */
    CHECK(ibv_dereg_mr(keys) == EINVAL);
    struct ibv_dm *same = ibv_import_dm(context, dm->handle);
    MUST(same && same != dm);
    char there[8] = "written", back[8] = "";
    CHECK(ibv_memcpy_to_dm(dm, 8, there, sizeof there) == 0);
    CHECK(ibv_memcpy_from_dm(back, same, 8, sizeof back) == 0 && !strcmp(there, back));
    ibv_unimport_dm(same);
    ibv_unimport_mr(mr); /* not imported: it stays */
    ibv_unimport_mr(keys);
    ibv_unimport_pd(second);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_free_dm(dm) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_dealloc_pd(other) == 0);
    CHECK(ibv_close_device(context) == 0 && ibv_close_device(foreign) == 0);
    /* A closed context cannot be imported, not even by an open descriptor. */
    int fd = dup(own->cmd_fd);
    CHECK(ibv_close_device(own) == 0);
    NO(ibv_import_device(fd), EOPNOTSUPP);
    close(fd);
}

static void attrs(void) {
    for (int which = 0; which < 2; which++) {
        struct ibv_context *context = open_named(which ? "weft_ib0" : "weft0");
        struct ibv_device_attr attr;
        CHECK(ibv_query_device(context, &attr) == 0);
        CHECK(attr.max_qp > 1000 && attr.max_sge == 32 && attr.max_qp_rd_atom == 128 && attr.phys_port_cnt == 1);
        CHECK(attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B);
        CHECK(attr.node_guid == ibv_get_device_guid(context->device));
        CHECK(ibv_query_device(context, NULL) == EINVAL);
        struct ibv_device_attr_ex ex;
        CHECK(ibv_query_device_ex(context, NULL, &ex) == 0);
        CHECK(ex.orig_attr.max_qp == attr.max_qp && ex.completion_timestamp_mask != 0 && ex.phys_port_cnt_ex == 1);
        struct ibv_query_device_ex_input input = {.comp_mask = 1};
        CHECK(ibv_query_device_ex(context, &input, &ex) == EINVAL);
        struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
        CHECK(ibv_query_rt_values_ex(context, &values) == 0);
        CHECK(values.raw_clock.tv_sec > 0 || values.raw_clock.tv_nsec > 0);

        struct ibv_port_attr port;
        CHECK(ibv_query_port(context, 1, &port) == 0);
        CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET && port.gid_tbl_len >= 1);
        CHECK(ibv_query_port(context, 0, &port) == EINVAL && ibv_query_port(context, 2, &port) == EINVAL);
        /* The call of programs from before the header's inline function: it must not write past what they have. */
        struct {
            struct ibv_port_attr attr;
        } old;
        memset(&old, 0x5a, sizeof old);
        CHECK((ibv_query_port)(context, 1, (struct _compat_ibv_port_attr *)&old.attr) == 0);
        CHECK(old.attr.state == IBV_PORT_ACTIVE && old.attr.port_cap_flags2 == 0x5a5a);

        union ibv_gid gid;
        CHECK(ibv_query_gid(context, 1, 0, &gid) == 0);
        MINUS(ibv_query_gid(context, 1, 10000, &gid), EINVAL);
        MINUS(ibv_query_gid(context, 1, -1, &gid), EINVAL);
        MINUS(ibv_query_gid(context, 2, 0, &gid), EINVAL);
        struct ibv_gid_entry entry, *table = calloc(port.gid_tbl_len, sizeof *table);
        CHECK(ibv_query_gid_ex(context, 1, 0, &entry, 0) == 0);
        CHECK(!memcmp(&entry.gid, &gid, sizeof gid) && entry.port_num == 1 && entry.gid_index == 0);
        char name[IF_NAMESIZE];
        CHECK(if_indextoname(entry.ndev_ifindex, name) != NULL);
        CHECK(ibv_query_gid_ex(context, 1, 10000, &entry, 0) == ENODATA);
        CHECK(ibv_query_gid_ex(context, 1, 0, &entry, 1) == EINVAL);
        int used = ibv_query_gid_table(context, table, port.gid_tbl_len, 0);
        MUST(used >= 1 && used <= port.gid_tbl_len);
        CHECK(table[used - 1].gid_index == (uint32_t)used - 1);
        if (which) {
            /* There is room, and nothing there. */
            static const union ibv_gid none;
            CHECK(used < port.gid_tbl_len);
            CHECK(ibv_query_gid(context, 1, used, &gid) == 0 && !memcmp(&gid, &none, sizeof gid));
            CHECK(ibv_query_gid_ex(context, 1, used, &entry, 0) == ENODATA);
        }
        CHECK(ibv_query_gid_table(context, table, 0, 0) == -EINVAL);
        free(table);
        __be16 pkey = 0;
        CHECK(ibv_query_pkey(context, 1, 0, &pkey) == 0 && pkey == 0xffff);
        MINUS(ibv_query_pkey(context, 1, 1, &pkey), EINVAL);
        CHECK(ibv_get_pkey_index(context, 1, 0xffff) == 0);
        CHECK(ibv_get_pkey_index(context, 1, 0x1234) == -1);
        CHECK(ibv_close_device(context) == 0);
        CHECK(ibv_query_device(context, &attr) == EINVAL);
        CHECK(ibv_query_port(context, 1, &port) == EINVAL);
    }
}

static void domains(void) {
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    MUST(pd);
    CHECK(pd->context == context);
    char byte;
    struct ibv_mr *mr = ibv_reg_mr(pd, &byte, 1, 0);
    MUST(mr);
    CHECK(ibv_dealloc_pd(pd) == EBUSY);
    CHECK(ibv_dereg_mr(mr) == 0);
    struct ibv_td_init_attr td_attr = {0};
    struct ibv_td *td = ibv_alloc_td(context, &td_attr);
    MUST(td);
    struct ibv_parent_domain_init_attr attr = {.pd = pd, .td = td};
    struct ibv_pd *parent = ibv_alloc_parent_domain(context, &attr);
    MUST(parent);
    CHECK(ibv_dealloc_pd(pd) == EBUSY && ibv_dealloc_td(td) == EBUSY);
    attr.pd = parent;
    NO(ibv_alloc_parent_domain(context, &attr), EINVAL);
    attr.pd = NULL;
    NO(ibv_alloc_parent_domain(context, &attr), EINVAL);
    mr = ibv_reg_mr(parent, &byte, 1, 0);
    MUST(mr);
    CHECK(ibv_dealloc_pd(parent) == EBUSY);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(parent) == 0 && ibv_dealloc_td(td) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_dealloc_pd(pd) == EINVAL);
    NO(ibv_reg_mr(pd, &byte, 1, 0), EINVAL);
    NO(ibv_alloc_pd(NULL), EINVAL);
    CHECK(ibv_close_device(context) == 0);
    NO(ibv_alloc_pd(context), EINVAL);
}

static void memory(void) {
    struct ibv_context *context = open_named("weft0");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    static char bytes[8192];
    struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, ALL);
    MUST(mr);
    CHECK(mr->addr == bytes && mr->length == sizeof bytes && mr->pd == pd && mr->context == context && mr->lkey && mr->rkey);
    uint32_t key = mr->rkey;
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, bytes + 4096, 100, 0) == 0);
    CHECK(mr->addr == bytes + 4096 && mr->length == 100 && mr->rkey == key);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == 0);
    struct ibv_pd *other = ibv_alloc_pd(context);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0) == 0);
    CHECK(mr->pd == other && ibv_dealloc_pd(other) == EBUSY);
    CHECK(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(ibv_rereg_mr(mr, 8, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 100, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(ibv_dereg_mr(mr) == EINVAL && ibv_dereg_mr(NULL) == EINVAL);
    CHECK(ibv_dealloc_pd(other) == 0);

    /* Rights. */
    NO(ibv_reg_mr(pd, bytes, 10, IBV_ACCESS_REMOTE_WRITE), EINVAL);
    NO(ibv_reg_mr(pd, bytes, 10, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
    NO(ibv_reg_mr(pd, bytes, 10, 1 << 12), EINVAL);
    int accepted[] = {0, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_ON_DEMAND, IBV_ACCESS_HUGETLB, IBV_ACCESS_RELAXED_ORDERING,
                      IBV_ACCESS_OPTIONAL_RANGE, IBV_ACCESS_ZERO_BASED};
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        volatile int access = accepted[i];
        mr = ibv_reg_mr(pd, bytes, 10, access);
        MUST(mr);
        CHECK(ibv_dereg_mr(mr) == 0);
    }
    mr = ibv_reg_mr_iova(pd, bytes, 10, 0x1234, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr && ibv_dereg_mr(mr) == 0);
    NO(ibv_reg_mr_iova(pd, bytes, 10, UINT64_MAX - 3, IBV_ACCESS_LOCAL_WRITE), EINVAL);
    /* Empty regions. */
    mr = ibv_reg_mr(pd, bytes, 0, 0);
    CHECK(mr && ibv_dereg_mr(mr) == 0);
    mr = ibv_reg_mr(pd, NULL, 0, 0);
    CHECK(mr && ibv_dereg_mr(mr) == 0);

    /* Memory of all kinds. */
    long page = sysconf(_SC_PAGESIZE);
    char *map = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(map != MAP_FAILED);
    munmap(map + 2 * page, page);
    NO(ibv_reg_mr(pd, map, 4 * page, ALL), EFAULT);
    NO(ibv_reg_mr(pd, map + 2 * page, 1, 0), EFAULT);
    NO(ibv_reg_mr(pd, NULL, 1, 0), EFAULT);
    NO(ibv_reg_mr(pd, (void *)-4096, 8192, 0), EFAULT);
    mr = ibv_reg_mr(pd, map, 2 * page, ALL);
    CHECK(mr && ibv_dereg_mr(mr) == 0);
    mprotect(map, page, PROT_READ);
    NO(ibv_reg_mr(pd, map, page, IBV_ACCESS_LOCAL_WRITE), EFAULT);
    mr = ibv_reg_mr(pd, map, page, IBV_ACCESS_REMOTE_READ);
    CHECK(mr && ibv_dereg_mr(mr) == 0);
    mprotect(map, page, PROT_NONE);
    NO(ibv_reg_mr(pd, map, page, 0), EFAULT);
    munmap(map, 4 * page);
    int exe = open("/proc/self/exe", O_RDONLY);
    char *file = mmap(NULL, page, PROT_READ, MAP_SHARED, exe, 0);
    MUST(file != MAP_FAILED);
    mr = ibv_reg_mr(pd, file, page, IBV_ACCESS_REMOTE_READ);
    CHECK(mr && ibv_dereg_mr(mr) == 0);
    NO(ibv_reg_mr(pd, file, page, IBV_ACCESS_LOCAL_WRITE), EFAULT);
    munmap(file, page);
    close(exe);

    struct ibv_sge sge = {(uintptr_t)bytes, 10, 0};
    CHECK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == ENOENT);
    CHECK(ibv_advise_mr(pd, 77, 0, &sge, 1) == EINVAL);
    NO(ibv_reg_dmabuf_mr(pd, 0, 10, 0, 3, 0), EOPNOTSUPP);
    CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}

static void queues(void) {
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    MUST(channel);
    CHECK(channel->context == context && channel->fd >= 0);
    NO(ibv_create_comp_channel(NULL), EINVAL);
    struct ibv_cq *cq = ibv_create_cq(context, 10, &cq, channel, 0);
    MUST(cq);
    CHECK(cq->context == context && cq->channel == channel && cq->cq_context == &cq && cq->cqe >= 10);
    CHECK(ibv_destroy_comp_channel(channel) == EBUSY);
    NO(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
    NO(ibv_create_cq(context, -1, NULL, NULL, 0), EINVAL);
    NO(ibv_create_cq(context, 1 << 30, NULL, NULL, 0), EINVAL);
    NO(ibv_create_cq(context, 10, NULL, NULL, 1000), EINVAL);
    NO(ibv_create_cq(context, 10, NULL, NULL, -1), EINVAL);
    struct ibv_comp_channel none = {.context = context};
    NO(ibv_create_cq(context, 10, NULL, &none, 0), EINVAL);
    CHECK(ibv_resize_cq(cq, 100) == 0 && cq->cqe >= 100);
    CHECK(ibv_resize_cq(cq, 0) == EINVAL && ibv_resize_cq(cq, -5) == EINVAL);
    struct ibv_modify_cq_attr modify = {.attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {5, 5}};
    CHECK(ibv_modify_cq(cq, &modify) == 0);
    modify.attr_mask = 1 << 9;
    CHECK(ibv_modify_cq(cq, &modify) == EINVAL);
    struct ibv_wc wc[3];
    CHECK(ibv_poll_cq(cq, 3, wc) == 0 && ibv_poll_cq(cq, 0, NULL) == 0);
    CHECK(ibv_poll_cq(cq, -1, wc) < 0);
    CHECK(ibv_req_notify_cq(cq, 0) == 0);
    CHECK(ibv_destroy_cq(cq) == 0);
    CHECK(ibv_destroy_cq(cq) == EINVAL);
    /* A freed queue: its memory is there still. */
    CHECK(ibv_poll_cq(cq, 1, wc) < 0 && ibv_req_notify_cq(cq, 0) == EINVAL);
    ibv_ack_cq_events(cq, 1);
    CHECK(ibv_destroy_comp_channel(channel) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == EINVAL);
    CHECK(ibv_close_device(context) == 0);
}

/* Completion queues take no descriptors. */
static void many_queues(void) {
    enum { QUEUES = 4000 };
    static struct ibv_cq *cqs[QUEUES];
    struct rlimit before, usual;
    MUST(getrlimit(RLIMIT_NOFILE, &before) == 0);
    usual = before;
    usual.rlim_cur = 1024;
    MUST(setrlimit(RLIMIT_NOFILE, &usual) == 0);
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_comp_channel *channel;
    MUST(channel = ibv_create_comp_channel(context));
    struct ibv_wc wc;
    for (int i = 0; i < QUEUES; i++) {
        MUST(cqs[i] = ibv_create_cq(context, 4, NULL, i % 2 ? channel : NULL, 0));
        CHECK(ibv_req_notify_cq(cqs[i], 0) == 0 && ibv_poll_cq(cqs[i], 1, &wc) == 0);
    }
    for (int i = 0; i < QUEUES; i++) CHECK(ibv_destroy_cq(cqs[i]) == 0);
    CHECK(ibv_destroy_comp_channel(channel) == 0 && ibv_close_device(context) == 0);
    MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

/* Descriptors of this process. */
static int descriptors(void) {
    int count = 0;
    for (int fd = 0; fd < 4096; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* A connected queue pair takes one descriptor, in shared memory and over TCP. (Protection domains have further ones.) */
static void many_pairs(void) {
    /* A queue gets one for its sleeper at the first sleep, which may be after the first message. */
    enum { PAIRS = 8, SLEEPERS = 2 };
    struct half a, b, as[PAIRS + 1], bs[PAIRS + 1];
    int before = 0, after;
    pair_open(&a, &b);
    for (int i = 0; i <= PAIRS; i++) {
        as[i] = a, bs[i] = b;
        if (i > 0) {
            struct ibv_qp_init_attr init = attributes(&a);
            MUST(as[i].qp = ibv_create_qp(a.pd, &init));
            init = attributes(&b);
            MUST(bs[i].qp = ibv_create_qp(b.pd, &init));
            join(&as[i], &bs[i]);
        }
        receive(&bs[i], 1, 0, 0);
        struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
        CHECK(post(&as[i], &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
        CHECK(completion(b.rcq).status == IBV_WC_SUCCESS);
        if (i == 0) before = descriptors();
    }
    /* The last of the start-up is closed a little later. */
    for (time_t end = time(NULL) + 20; (after = descriptors()) > before + 2 * PAIRS + SLEEPERS && time(NULL) < end;) usleep(1000);
    CHECK(after <= before + 2 * PAIRS + SLEEPERS);
    for (int i = 1; i <= PAIRS; i++) CHECK(ibv_destroy_qp(as[i].qp) == 0 && ibv_destroy_qp(bs[i].qp) == 0);
    pair_close(&a, &b);
}

/* Uses up all descriptors; returns the previous limit. */
static struct rlimit exhaust(void) {
    struct rlimit before, none;
    MUST(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = before;
    none.rlim_cur = 0;
    MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
    return before;
}

/* The addresses of this host stay known when there are no descriptors to ask for them. */
static void addresses(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    union ibv_gid known, gid;
    struct ibv_gid_entry entry;
    struct ibv_port_attr port, then;
    MUST(ibv_query_gid(h.context, 1, 0, &known) == 0 && ibv_query_port(h.context, 1, &port) == 0);
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    struct rlimit before = exhaust();
    CHECK(ibv_query_gid(h.context, 1, 0, &gid) == 0 && !memcmp(&gid, &known, sizeof gid));
    CHECK(ibv_query_gid_ex(h.context, 1, 0, &entry, 0) == 0 && !memcmp(&entry.gid, &known, sizeof known));
    CHECK(ibv_query_port(h.context, 1, &then) == 0 && then.gid_tbl_len == port.gid_tbl_len);
    struct ibv_ah *ah = ibv_create_ah(h.pd, &way);
    CHECK(ah);
    MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
    if (ah) CHECK(ibv_destroy_ah(ah) == 0);
    half_close(&h);
}

/* An interface of a network of our own, with an address that comes and goes. */
static void address_is(const char *text, int there) {
    char command[128];
    snprintf(command, sizeof command, "ip address %s %s/32 dev lo", there ? "add" : "delete", text);
    MUST(system(command) == 0);
}

static int gid_of_address(struct ibv_context *context, const char *text) {
    union ibv_gid gid, wanted = {.raw = {[10] = 0xff, [11] = 0xff}};
    MUST(inet_pton(AF_INET, text, wanted.raw + 12) == 1);
    struct ibv_port_attr port;
    MUST(ibv_query_port(context, 1, &port) == 0);
    for (int i = 0; i < port.gid_tbl_len; i++)
        if (ibv_query_gid(context, 1, i, &gid) == 0 && !memcmp(&gid, &wanted, sizeof gid)) return i;
    return -1;
}

/* An address is a GID as long as the system has it. */
static void comes_and_goes(void) {
    static const char one[] = "192.0.2.7", other[] = "192.0.2.8";
    struct ibv_context *context = open_named("weft_ib0");
    CHECK(gid_of_address(context, one) == -1);
    for (int i = 0; i < 20; i++) {
        address_is(one, 1);
        int index = gid_of_address(context, one);
        CHECK(index > 0);
        address_is(other, 1);
        CHECK(gid_of_address(context, one) == index && gid_of_address(context, other) > 0);
        address_is(one, 0);
        CHECK(gid_of_address(context, one) == -1);
        address_is(other, 0);
        CHECK(gid_of_address(context, other) == -1);
    }
    CHECK(ibv_close_device(context) == 0);
}

#define QKEY 0x11111111

/* A datagram queue pair that sends to itself. */
static void datagrams(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    CHECK(ibv_destroy_qp(h.qp) == 0);
    struct ibv_qp_init_attr_ex ex = {.send_cq = h.scq, .recv_cq = h.rcq, .qp_type = IBV_QPT_UD, .pd = h.pd};
    ex.cap = attributes(&h).cap;
    ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    ex.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE;
    NO(ibv_create_qp_ex(h.context, &ex), EOPNOTSUPP);
    ex.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    MUST(h.qp = ibv_create_qp_ex(h.context, &ex));
    CHECK(h.qp->qp_num && h.qp->qp_num < 1 << 24);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    const int first = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    CHECK(to_init(h.qp) == EINVAL && ibv_modify_qp(h.qp, &attr, first) == EINVAL);
    CHECK(ibv_modify_qp(h.qp, &attr, first | IBV_QP_QKEY) == 0);
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    struct ibv_ah *ah, *back;
    MUST(ah = ibv_create_ah(h.pd, &way));
    CHECK(ibv_dealloc_pd(h.pd) == EBUSY);
    struct ibv_sge sge = part(&h, 0, 100);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND_WITH_IMM, &sge, 1);
    wr.imm_data = htonl(0x1234);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = h.qp->qp_num;
    wr.wr.ud.remote_qkey = QKEY;
    CHECK(post(&h, &wr) == EINVAL);
    CHECK(to_state(h.qp, IBV_QPS_RTR) == 0 && post(&h, &wr) == EINVAL);
    attr.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(h.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0 && state_of(h.qp) == IBV_QPS_RTS);
    memset(h.buf, 7, 100);
    /* With a wrong key it is lost, and sent all the same. */
    wr.wr.ud.remote_qkey = 5;
    CHECK(post(&h, &wr) == 0 && completion(h.scq).status == IBV_WC_SUCCESS);
    wr.wr.ud.remote_qkey = QKEY;
    sge.length = 4097;
    CHECK(post(&h, &wr) == EINVAL);
    sge.length = 100;
    wr.opcode = IBV_WR_RDMA_WRITE;
    CHECK(post(&h, &wr) == EINVAL);
    wr.opcode = IBV_WR_SEND_WITH_IMM;
    wr.wr.ud.ah = NULL;
    CHECK(post(&h, &wr) == EINVAL);
    wr.wr.ud.ah = ah;
    receive(&h, 2, 4096, 140);
    CHECK(post(&h, &wr) == 0);
    struct ibv_wc wc = completion(h.rcq);
    CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == 140);
    CHECK(wc.src_qp == h.qp->qp_num && wc.qp_num == h.qp->qp_num && ntohl(wc.imm_data) == 0x1234);
    CHECK(wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && !memcmp(h.buf + 4136, h.buf, 100));
    struct ibv_ah_attr found;
    struct ibv_grh *grh = (struct ibv_grh *)(h.buf + 4096);
    CHECK(ibv_init_ah_from_wc(h.context, 1, &wc, grh, &found) == 0 && found.is_global);
    CHECK(!memcmp(&found.grh.dgid, &way.grh.dgid, 16) && found.grh.sgid_index == 0);
    MUST(back = ibv_create_ah_from_wc(h.pd, &wc, grh, 1));
    wc.wc_flags = 0;
    CHECK(ibv_init_ah_from_wc(h.context, 1, &wc, grh, &found) == -1);
    /* The way back, in the newer way of posting. */
    receive(&h, 3, 4096, 4136);
    struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(h.qp);
    MUST(qpx);
    ibv_wr_start(qpx);
    qpx->wr_flags = 0;
    ibv_wr_send(qpx);
    ibv_wr_set_ud_addr(qpx, back, wc.src_qp, QKEY);
    ibv_wr_set_sge(qpx, h.mr->lkey, (uintptr_t)h.buf, 4096);
    CHECK(ibv_wr_complete(qpx) == 0);
    wc = completion(h.rcq);
    CHECK(wc.wr_id == 3 && wc.byte_len == 4136 && wc.wc_flags == IBV_WC_GRH);
    ibv_wr_start(qpx);
    ibv_wr_send(qpx);
    CHECK(ibv_wr_complete(qpx) == EINVAL);
    receive(&h, 4, 0, 64);
    CHECK(to_state(h.qp, IBV_QPS_ERR) == 0 && completion(h.rcq).status == IBV_WC_WR_FLUSH_ERR);
    CHECK(to_state(h.qp, IBV_QPS_RESET) == 0 && state_of(h.qp) == IBV_QPS_RESET);
    CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_ah(ah) == EINVAL && ibv_destroy_ah(back) == 0);
    way.is_global = 0;
    NO(ibv_create_ah(h.pd, &way), EINVAL);
    half_close(&h);
    half_open(&h, "weft0", 0);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_UD;
    NO(ibv_create_qp(h.pd, &init), EOPNOTSUPP);
    way.is_global = 1;
    NO(ibv_create_ah(h.pd, &way), EOPNOTSUPP);
    half_close(&h);
}

/* A new network with the loopback interface alone. */
static int alone(void) {
    if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET)) return 0;
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM, 0), done = ioctl(fd, SIOCSIFFLAGS, &lo);
    close(fd);
    return done == 0;
}

/* A datagram queue pair that is a member of a group and sends to it. */
static void member(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [13] = 87, [14] = 3, [15] = 1}};
    CHECK(ibv_attach_mcast(h.qp, &gid, 0) == EINVAL && ibv_destroy_qp(h.qp) == 0);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_UD;
    MUST(h.qp = ibv_create_qp(h.pd, &init));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    const int first = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    union ibv_gid mapped = gid, nobody = way.grh.dgid;
    mapped.raw[0] = 0xff;
    mapped.raw[1] = 0x0e;
    CHECK(ibv_attach_mcast(NULL, &gid, 0) == EINVAL && ibv_attach_mcast(h.qp, NULL, 0) == EINVAL);
    CHECK(ibv_attach_mcast(h.qp, &nobody, 0) == EINVAL && ibv_detach_mcast(h.qp, &gid, 0) == EINVAL);
    CHECK(ibv_attach_mcast(h.qp, &gid, 0xc001) == 0 && ibv_attach_mcast(h.qp, &gid, 0) == 0);
    /* The same in the older form of RoCE. */
    CHECK(ibv_attach_mcast(h.qp, &mapped, 0) == 0 && ibv_destroy_qp(h.qp) == EBUSY);
    struct ibv_ah *ah;
    way.grh.dgid = gid;
    way.grh.sgid_index = 255;
    NO(ibv_create_ah(h.pd, &way), EINVAL);
    way.grh.sgid_index = 0;
    MUST(ah = ibv_create_ah(h.pd, &way));
    struct ibv_sge sge = part(&h, 0, 100);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = 0xffffff;
    wr.wr.ud.remote_qkey = QKEY;
    memset(h.buf, 7, 100);
    /* It stays a member when it is reset. */
    for (int i = 0; i < 2; i++) {
        CHECK(to_state(h.qp, IBV_QPS_RESET) == 0 && ibv_modify_qp(h.qp, &attr, first) == 0);
        CHECK(to_state(h.qp, IBV_QPS_RTR) == 0);
        struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS};
        CHECK(ibv_modify_qp(h.qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
        memset(h.buf + 4096, 0, 140);
        receive(&h, 7, 4096, 140);
        receive(&h, 8, 8192 - 140, 140);
        CHECK(post(&h, &wr) == 0);
        struct ibv_wc wc = completion(h.rcq);
        CHECK(wc.wr_id == 7 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 140 && wc.src_qp == h.qp->qp_num);
        CHECK(!memcmp(h.buf + 4136, h.buf, 100) && !memcmp(h.buf + 4096 + 36, gid.raw + 12, 4));
        CHECK(completion(h.scq).status == IBV_WC_SUCCESS && ibv_poll_cq(h.rcq, 1, &wc) == 0);
    }
    CHECK(ibv_detach_mcast(h.qp, &mapped, 0) == 0 && ibv_detach_mcast(h.qp, &gid, 0) == EINVAL);
    /* Where it cannot be a member again, the reset makes it no member. */
    struct rlimit files, none;
    MUST(getrlimit(RLIMIT_NOFILE, &files) == 0);
    none = files;
    none.rlim_cur = 0;
    CHECK(ibv_attach_mcast(h.qp, &gid, 0) == 0);
    MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(to_state(h.qp, IBV_QPS_RESET) == 0 && ibv_modify_qp(h.qp, &attr, first) == 0);
    CHECK(ibv_detach_mcast(h.qp, &gid, 0) == EINVAL);
    MUST(setrlimit(RLIMIT_NOFILE, &files) == 0);
    CHECK(ibv_attach_mcast(h.qp, &gid, 0) == 0 && ibv_detach_mcast(h.qp, &gid, 0) == 0);
    /* A group of a link, where there is IPv6. */
    union ibv_gid linked = {.raw = {0xff, 0x12, [15] = 7}};
    int here = ibv_attach_mcast(h.qp, &linked, 0);
    CHECK(here == ENODEV || (here == 0 && ibv_attach_mcast(h.qp, &linked, 0) == 0));
    CHECK(ibv_detach_mcast(h.qp, &linked, 0) == (here ? EINVAL : 0) && ibv_detach_mcast(h.qp, &linked, 0) == EINVAL);
    /* As many as the device says, no more; a skipped check where there are too few descriptors. */
    struct ibv_device_attr limits;
    MUST(ibv_query_device(h.context, &limits) == 0);
    none.rlim_cur = files.rlim_max;
    if (files.rlim_max > (rlim_t)limits.max_total_mcast_qp_attach + 100 && setrlimit(RLIMIT_NOFILE, &none) == 0) {
        int joined = 0, result = 0;
        for (; joined <= limits.max_total_mcast_qp_attach; joined++) {
            gid.raw[14] = joined / 256;
            gid.raw[15] = joined % 256;
            if ((result = ibv_attach_mcast(h.qp, &gid, 0))) break;
        }
        CHECK(joined == limits.max_total_mcast_qp_attach && result == ENOMEM);
        for (int i = 0; i < joined; i++) {
            gid.raw[14] = i / 256;
            gid.raw[15] = i % 256;
            CHECK(ibv_detach_mcast(h.qp, &gid, 0) == 0);
        }
        CHECK(ibv_attach_mcast(h.qp, &gid, 0) == 0 && ibv_detach_mcast(h.qp, &gid, 0) == 0);
    }
    CHECK(ibv_destroy_ah(ah) == 0);
    half_close(&h);
}

/* A datagram queue pair that hears and sends broadcasts, of the loopback interface's subnet. */
static void broadcast(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    MUST(ibv_destroy_qp(h.qp) == 0);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_UD;
    MUST(h.qp = ibv_create_qp(h.pd, &init));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    MUST(ibv_modify_qp(h.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
    MUST(to_state(h.qp, IBV_QPS_RTR) == 0);
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS};
    MUST(ibv_modify_qp(h.qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [13] = 255, [14] = 255, [15] = 255}};
    CHECK(ibv_attach_mcast(h.qp, &gid, 0) == 0);
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    way.grh.dgid = gid;
    struct ibv_ah *ah;
    MUST(ah = ibv_create_ah(h.pd, &way));
    struct ibv_sge sge = part(&h, 0, 100);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = 0xffffff;
    wr.wr.ud.remote_qkey = QKEY;
    memset(h.buf, 7, 100);
    receive(&h, 7, 4096, 140);
    CHECK(post(&h, &wr) == 0);
    struct ibv_wc wc = completion(h.rcq);
    CHECK(wc.wr_id == 7 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 140 && wc.src_qp == h.qp->qp_num);
    CHECK(!memcmp(h.buf + 4136, h.buf, 100) && !memcmp(h.buf + 4096 + 36, gid.raw + 12, 4));
    CHECK(ibv_detach_mcast(h.qp, &gid, 0) == 0 && ibv_destroy_ah(ah) == 0);
    half_close(&h);
}

/* A datagram queue pair that does not receive its own messages, and one that does, in one group. */
static void deaf(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    MUST(ibv_destroy_qp(h.qp) == 0);
    union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [13] = 87, [14] = 4, [15] = 2}};
    struct ibv_qp_init_attr_ex ex = {.send_cq = h.scq, .recv_cq = h.rcq, .qp_type = IBV_QPT_RC, .pd = h.pd};
    ex.cap = attributes(&h).cap;
    ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
    ex.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    NO(ibv_create_qp_ex(h.context, &ex), EOPNOTSUPP);
    ex.qp_type = IBV_QPT_UD;
    ex.create_flags |= IBV_QP_CREATE_CVLAN_STRIPPING;
    NO(ibv_create_qp_ex(h.context, &ex), EOPNOTSUPP);
    struct ibv_qp *of[2];
    for (int i = 0; i < 2; i++) {
        ex.create_flags = i ? 0 : IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
        MUST(h.qp = of[i] = ibv_create_qp_ex(h.context, &ex));
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
        MUST(ibv_modify_qp(h.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
        MUST(to_state(h.qp, IBV_QPS_RTR) == 0);
        struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS};
        MUST(ibv_modify_qp(h.qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0 && ibv_attach_mcast(h.qp, &gid, 0) == 0);
        for (int n = 0; n < 4; n++) receive(&h, i, 4096, 140);
    }
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    struct ibv_ah *to_group, *to_self;
    MUST(to_self = ibv_create_ah(h.pd, &way));
    way.grh.dgid = gid;
    MUST(to_group = ibv_create_ah(h.pd, &way));
    struct ibv_sge sge = part(&h, 0, 100);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.wr.ud.remote_qkey = QKEY;
    /* Sent by the deaf one twice: the other one hears both. Then what it sends to itself alone, which it does hear. */
    int heard[2] = {0, 0};
    h.qp = of[0];
    for (int n = 0; n < 3; n++) {
        wr.wr.ud.ah = n < 2 ? to_group : to_self;
        wr.wr.ud.remote_qpn = n < 2 ? 0xffffff : of[0]->qp_num;
        CHECK(post(&h, &wr) == 0);
        struct ibv_wc wc = completion(h.rcq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.src_qp == of[0]->qp_num);
        heard[wc.qp_num == of[1]->qp_num]++;
    }
    CHECK(heard[0] == 1 && heard[1] == 2);
    /* Sent by the other one: both hear it. */
    h.qp = of[1];
    wr.wr.ud.ah = to_group;
    wr.wr.ud.remote_qpn = 0xffffff;
    CHECK(post(&h, &wr) == 0);
    for (int n = 0; n < 2; n++) heard[completion(h.rcq).qp_num == of[1]->qp_num]++;
    CHECK(heard[0] == 2 && heard[1] == 3);
    for (int i = 0; i < 2; i++) CHECK(ibv_detach_mcast(of[i], &gid, 0) == 0);
    CHECK(ibv_destroy_ah(to_group) == 0 && ibv_destroy_ah(to_self) == 0 && ibv_destroy_qp(of[0]) == 0);
    half_close(&h);
}

/* In a separate network. */
static void elsewhere(void (*body)(void)) {
    enum { ELSEWHERE = 77 };
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        if (!alone()) _exit(ELSEWHERE);
        body();
        _exit(failures != 0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == ELSEWHERE)
        printf("%s: skipped, no network namespaces here\n", running);
    else
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void groups(void) {
    elsewhere(member);
    elsewhere(broadcast);
    elsewhere(deaf);
}

static void new_addresses(void) {
    if (system("ip -V >/dev/null 2>&1"))
        printf("%s: skipped, there is no ip(8)\n", running);
    else
        elsewhere(comes_and_goes);
}

/* A datagram queue pair that is ready, with these receives. */
static void datagram_half(struct half *h) {
    half_open(h, "weft_ib0", 0);
    CHECK(ibv_destroy_qp(h->qp) == 0);
    struct ibv_qp_init_attr init = attributes(h);
    init.qp_type = IBV_QPT_UD;
    MUST(h->qp = ibv_create_qp(h->pd, &init));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    MUST(ibv_modify_qp(h->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
    attr.qp_state = IBV_QPS_RTS;
    MUST(to_state(h->qp, IBV_QPS_RTR) == 0 && ibv_modify_qp(h->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
}

/* A message that is longer than its receive is lost, and the receive is there for the next one. */
static void long_datagrams(void) {
    struct half h;
    datagram_half(&h);
    struct ibv_ah_attr way = rtr_attr(h.context, 1).ah_attr;
    struct ibv_ah *ah;
    MUST(ah = ibv_create_ah(h.pd, &way));
    struct ibv_sge sge = part(&h, 0, 101);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = h.qp->qp_num;
    wr.wr.ud.remote_qkey = QKEY;
    receive(&h, 2, 4096, 140);
    CHECK(post(&h, &wr) == 0 && completion(h.scq).status == IBV_WC_SUCCESS);
    sge.length = 100;
    memset(h.buf, 7, 100);
    CHECK(post(&h, &wr) == 0 && completion(h.scq).status == IBV_WC_SUCCESS);
    struct ibv_wc wc = completion(h.rcq);
    CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.byte_len == 140 && !memcmp(h.buf + 4136, h.buf, 100));
    CHECK(ibv_poll_cq(h.rcq, 1, &wc) == 0);
    CHECK(ibv_destroy_ah(ah) == 0);
    half_close(&h);
}

/* The traffic class of an address handle is in the received routing header, and leads back. */
static void traffic_classes(void) {
    struct half h;
    datagram_half(&h);
    struct ibv_port_attr port;
    MUST(ibv_query_port(h.context, 1, &port) == 0);
    int families = 0;
    for (int i = 0; i < port.gid_tbl_len; i++) {
        union ibv_gid gid;
        struct ibv_ah_attr way = {.is_global = 1, .port_num = 1}, back;
        MUST(ibv_query_gid(h.context, 1, i, &gid) == 0);
        if (!gid.global.interface_id) continue;
        int v4 = gid.raw[10] == 0xff && gid.raw[11] == 0xff && !gid.raw[0];
        if (families & (1 << v4)) continue;
        families |= 1 << v4;
        way.grh.dgid = gid;
        way.grh.sgid_index = i;
        for (int class = 0; class < 2; class++) {
            way.grh.traffic_class = class ? 0x68 : 0;
            struct ibv_ah *ah;
            MUST(ah = ibv_create_ah(h.pd, &way));
            struct ibv_sge sge = part(&h, 0, 100);
            struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
            wr.wr.ud.ah = ah;
            wr.wr.ud.remote_qpn = h.qp->qp_num;
            wr.wr.ud.remote_qkey = QKEY;
            receive(&h, 2, 4096, 140);
            CHECK(post(&h, &wr) == 0 && completion(h.scq).status == IBV_WC_SUCCESS);
            struct ibv_wc wc = completion(h.rcq);
            unsigned char *grh = (unsigned char *)h.buf + 4096;
            CHECK((v4 ? grh[21] : (grh[0] << 4 | grh[1] >> 4) & 0xff) == way.grh.traffic_class);
            CHECK(ibv_init_ah_from_wc(h.context, 1, &wc, (struct ibv_grh *)grh, &back) == 0);
            CHECK(back.grh.traffic_class == way.grh.traffic_class);
            CHECK(ibv_destroy_ah(ah) == 0);
        }
    }
    CHECK(families & 2);
    half_close(&h);
}

/* As many address handles and protection domains as the device says, no more. */
static void limits(void) {
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_device_attr attr;
    MUST(ibv_query_device(context, &attr) == 0);
    struct ibv_pd *pd;
    MUST(pd = ibv_alloc_pd(context));
    struct ibv_ah_attr way = rtr_attr(context, 1).ah_attr;
    CHECK(attr.max_ah > 0 && attr.max_ah <= 1 << 20 && attr.max_pd > 0 && attr.max_pd <= 1 << 20);
    struct ibv_ah **ahs = calloc(attr.max_ah + 1, sizeof *ahs);
    struct ibv_pd **pds = calloc(attr.max_pd + 1, sizeof *pds);
    int count = 0;
    while (count <= attr.max_ah && (ahs[count] = ibv_create_ah(pd, &way))) count++;
    CHECK(count == attr.max_ah && errno == ENOMEM);
    while (count > 0) CHECK(ibv_destroy_ah(ahs[--count]) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0);
    while (count <= attr.max_pd && (pds[count] = ibv_alloc_pd(context))) count++;
    CHECK(count == attr.max_pd && errno == ENOMEM);
    while (count > 0) CHECK(ibv_dealloc_pd(pds[--count]) == 0);
    free(ahs);
    free(pds);
    CHECK(ibv_close_device(context) == 0);
}

/* Calls that return an errno value set errno to it too. */
#define SAYS(call, with) CHECK((errno = 0, (call) == (with)) && errno == (with))

static void errnos(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    struct ibv_sge sge = part(&h, 0, 8);
    struct ibv_send_wr send = request(1, IBV_WR_SEND, &sge, 1), *bad_send;
    struct ibv_recv_wr recv = {.num_sge = 33}, *bad_recv;
    struct ibv_ece ece;
    SAYS(ibv_post_send(h.qp, &send, &bad_send), EINVAL);
    SAYS(ibv_post_recv(h.qp, &recv, &bad_recv), EINVAL);
    SAYS(to_state(h.qp, IBV_QPS_RTS), EINVAL);
    SAYS(ibv_dealloc_pd(h.pd), EBUSY);
    SAYS(ibv_destroy_cq(h.scq), EBUSY);
    SAYS(ibv_resize_cq(h.scq, 0), EINVAL);
    SAYS(ibv_query_device(h.context, NULL), EINVAL);
    struct ibv_port_attr port;
    SAYS(ibv_query_port(h.context, 9, &port), EINVAL);
    SAYS(ibv_dereg_mr(NULL), EINVAL);
    SAYS(ibv_destroy_srq(NULL), EINVAL);
    SAYS(ibv_destroy_ah(NULL), EINVAL);
    SAYS(ibv_set_ece(h.qp, &ece), EOPNOTSUPP);
    SAYS(ibv_query_ece(h.qp, &ece), EOPNOTSUPP);
    half_close(&h);
}

static void pairs(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    CHECK(h.qp->qp_num && h.qp->qp_num < 1 << 24 && h.qp->state == IBV_QPS_RESET && h.qp->send_cq == h.scq);
    CHECK(ibv_destroy_cq(h.scq) == EBUSY && ibv_dealloc_pd(h.pd) == EBUSY);
    struct ibv_qp_init_attr init = attributes(&h);
    enum ibv_qp_type types[] = {IBV_QPT_RAW_PACKET, IBV_QPT_DRIVER};
    for (int i = 0; i < 2; i++) {
        init.qp_type = types[i];
        NO(ibv_create_qp(h.pd, &init), EOPNOTSUPP);
    }
    init.qp_type = 77;
    NO(ibv_create_qp(h.pd, &init), EINVAL);
    init = attributes(&h);
    init.cap.max_send_sge = 33;
    NO(ibv_create_qp(h.pd, &init), EINVAL);
    init = attributes(&h);
    init.cap.max_send_wr = UINT32_MAX;
    NO(ibv_create_qp(h.pd, &init), EINVAL);
    init = attributes(&h);
    init.send_cq = NULL;
    NO(ibv_create_qp(h.pd, &init), EINVAL);
    init = attributes(&h);
    NO(ibv_create_qp(NULL, &init), EINVAL);
    NO(ibv_create_qp(h.pd, NULL), EINVAL);
    CHECK(ibv_qp_to_qp_ex(h.qp) == NULL);
    struct ibv_ece ece = {0};
    CHECK(ibv_set_ece(h.qp, &ece) == EOPNOTSUPP);
    CHECK(ibv_query_qp_data_in_order(h.qp, IBV_WR_SEND, 0) == 0);
    union ibv_gid gid;
    memset(&gid, 0, sizeof gid);
    CHECK(ibv_attach_mcast(h.qp, &gid, 0) == EINVAL && ibv_detach_mcast(h.qp, &gid, 0) == EINVAL);
    struct ibv_ah_attr ah = {0};
    NO(ibv_create_ah(h.pd, &ah), EINVAL);
    init = attributes(&h);
    init.qp_type = IBV_QPT_XRC_RECV;
    NO(ibv_create_qp(h.pd, &init), EINVAL);
    struct ibv_xrcd_init_attr xrcd = {0};
    NO(ibv_open_xrcd(h.context, &xrcd), EINVAL);
    struct ibv_flow_attr flow = {0};
    NO(ibv_create_flow(h.qp, &flow), EOPNOTSUPP);
    half_close(&h);
    CHECK(ibv_destroy_qp(h.qp) == EINVAL && ibv_destroy_qp(NULL) == EINVAL);
    struct ibv_qp_attr attr;
    CHECK(ibv_query_qp(h.qp, &attr, 0, &init) == EINVAL && to_init(h.qp) == EINVAL);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0), *bad = NULL;
    CHECK(ibv_post_send(h.qp, &wr, &bad) == EINVAL && bad == &wr);
    struct ibv_recv_wr rwr = {.wr_id = 1}, *bad_recv = NULL;
    CHECK(ibv_post_recv(h.qp, &rwr, &bad_recv) == EINVAL && bad_recv == &rwr);
}

static void transitions(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    struct ibv_qp *qp = h.qp;
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0), *bad;
    struct ibv_recv_wr rwr = {.wr_id = 1}, *bad_recv;
    CHECK(ibv_post_recv(qp, &rwr, &bad_recv) == EINVAL);
    CHECK(to_rts(qp) == EINVAL && to_rtr(qp, 0x10000) == EINVAL && state_of(qp) == IBV_QPS_RESET);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    CHECK(ibv_modify_qp(qp, &attr, mask & ~IBV_QP_PORT) == EINVAL);
    CHECK(ibv_modify_qp(qp, &attr, mask | IBV_QP_TIMEOUT) == EINVAL);
    attr.port_num = 2;
    CHECK(ibv_modify_qp(qp, &attr, mask) == EINVAL);
    attr.port_num = 1;
    attr.pkey_index = 3;
    CHECK(ibv_modify_qp(qp, &attr, mask) == EINVAL);
    CHECK(ibv_modify_qp(qp, NULL, mask) == EINVAL);
    CHECK(to_init(qp) == 0 && state_of(qp) == IBV_QPS_INIT && to_init(qp) == 0);
    attr = (struct ibv_qp_attr){.cur_qp_state = IBV_QPS_RTS, .qp_state = IBV_QPS_ERR};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) == EINVAL);
    CHECK(ibv_post_send(qp, &wr, &bad) == EINVAL);
    CHECK(ibv_post_recv(qp, &rwr, &bad_recv) == 0);
    attr = rtr_attr(h.context, qp->qp_num + 1);
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK & ~IBV_QP_AV) == EINVAL);
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK | IBV_QP_SQ_PSN) == EINVAL);
    attr.path_mtu = 9;
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK) == EINVAL);
    attr.path_mtu = IBV_MTU_1024;
    attr.ah_attr.is_global = 0;
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK) == EINVAL);
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.sgid_index = 200;
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK) == EINVAL);
    attr.ah_attr.grh.sgid_index = 0;
    attr.max_dest_rd_atomic = 200;
    CHECK(ibv_modify_qp(qp, &attr, RC_RTR_MASK) == EINVAL);
    CHECK(state_of(qp) == IBV_QPS_INIT);
    /* Nobody is there with that number; that shows only when something is sent. */
    CHECK(to_rtr(qp, qp->qp_num + 1) == 0 && state_of(qp) == IBV_QPS_RTR);
    CHECK(ibv_post_send(qp, &wr, &bad) == EINVAL);
    CHECK(to_rts(qp) == 0 && state_of(qp) == IBV_QPS_RTS);
    struct ibv_qp_init_attr init;
    CHECK(ibv_query_qp(qp, &attr, 0, &init) == 0);
    CHECK(attr.dest_qp_num == qp->qp_num + 1 && attr.timeout == 14 && attr.retry_cnt == 7 && attr.max_rd_atomic == 4);
    CHECK(attr.path_mtu == IBV_MTU_1024 && init.send_cq == h.scq && init.cap.max_send_wr == 16 && attr.cap.max_inline_data >= 128);
    CHECK(to_state(qp, IBV_QPS_SQD) == 0 && state_of(qp) == IBV_QPS_SQD);
    CHECK(to_state(qp, IBV_QPS_RTS) == 0);
    CHECK(to_state(qp, IBV_QPS_INIT) == EINVAL);
    CHECK(to_state(qp, IBV_QPS_ERR) == 0 && state_of(qp) == IBV_QPS_ERR);
    struct ibv_wc wc = completion(h.rcq);
    CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 1 && wc.qp_num == qp->qp_num);
    CHECK(ibv_post_send(qp, &wr, &bad) == 0);
    wc = completion(h.scq);
    CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 1);
    uint32_t num = qp->qp_num;
    CHECK(to_state(qp, IBV_QPS_RESET) == 0 && state_of(qp) == IBV_QPS_RESET && qp->qp_num == num);
    CHECK(to_init(qp) == 0);
    half_close(&h);

    /* iWARP: the connection manager connects. */
    half_open(&h, "weft0", 0);
    CHECK(h.qp->state == IBV_QPS_RESET && state_of(h.qp) == IBV_QPS_INIT);
    CHECK(to_init(h.qp) == 0 && state_of(h.qp) == IBV_QPS_INIT);
    CHECK(to_rtr(h.qp, 5) == EINVAL && to_rts(h.qp) == EINVAL);
    CHECK(ibv_post_recv(h.qp, &rwr, &bad_recv) == 0);
    CHECK(ibv_post_send(h.qp, &wr, &bad) == EINVAL);
    CHECK(to_state(h.qp, IBV_QPS_ERR) == 0 && completion(h.rcq).status == IBV_WC_WR_FLUSH_ERR);
    CHECK(to_state(h.qp, IBV_QPS_RESET) == 0 && to_init(h.qp) == 0);
    init = attributes(&h);
    init.qp_type = IBV_QPT_UC;
    NO(ibv_create_qp(h.pd, &init), EOPNOTSUPP);
    half_close(&h);
}

static void transfers(void) {
    struct half a, b;
    pair_open(&a, &b);
    strcpy(a.buf, "hello");
    receive(&b, 7, 100, 100);
    struct ibv_sge sge = part(&a, 0, 6);
    struct ibv_send_wr wr = request(8, IBV_WR_SEND, &sge, 1);
    CHECK(post(&a, &wr) == 0);
    struct ibv_wc wc = completion(b.rcq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wr_id == 7 && wc.byte_len == 6);
    CHECK(wc.qp_num == b.qp->qp_num && !strcmp(b.buf + 100, "hello") && wc.wc_flags == 0);
    wc = completion(a.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND && wc.wr_id == 8 && wc.qp_num == a.qp->qp_num);

    /* Several elements, inline, the buffer changed at once, and an empty one with a key that is none. */
    struct ibv_sge list[4] = {part(&a, 0, 2), part(&a, 2, 0), part(&a, 2, 3), part(&a, 5, 1)};
    list[1].lkey = 0xdead;
    for (int inlined = 0; inlined < 2; inlined++) {
        memcpy(a.buf, "inline", 6);
        receive(&b, 1, 200, 100);
        wr = request(2, IBV_WR_SEND, list, 4);
        if (inlined) {
            wr.send_flags |= IBV_SEND_INLINE;
            list[0].lkey = list[2].lkey = list[3].lkey = 0;
        }
        CHECK(post(&a, &wr) == 0);
        if (inlined) memset(a.buf, 'x', 6);
        wc = completion(b.rcq);
        CHECK(wc.byte_len == 6 && !memcmp(b.buf + 200, "inline", 6));
        CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
    }

    /* One-sided. */
    memset(a.buf, 'w', 5000);
    sge = part(&a, 0, 5000);
    wr = request(3, IBV_WR_RDMA_WRITE, &sge, 1);
    aim(&wr, &b, 1000);
    CHECK(post(&a, &wr) == 0);
    wc = completion(a.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_WRITE);
    sge = part(&a, 10000, 5000);
    wr = request(4, IBV_WR_RDMA_READ, &sge, 1);
    aim(&wr, &b, 1000);
    CHECK(post(&a, &wr) == 0);
    wc = completion(a.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RDMA_READ && !memcmp(a.buf, a.buf + 10000, 5000));
    CHECK(!memcmp(b.buf + 1000, a.buf, 5000) && b.buf[6000] == 0);

    uint64_t *word = (uint64_t *)(b.buf + 8192), *old = (uint64_t *)(a.buf + 8192);
    *word = 40;
    sge = part(&a, 8192, 8);
    wr = request(5, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
    wr.wr.atomic.remote_addr = (uintptr_t)word;
    wr.wr.atomic.rkey = b.mr->rkey;
    wr.wr.atomic.compare_add = 2;
    CHECK(post(&a, &wr) == 0);
    wc = completion(a.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_FETCH_ADD && *old == 40 && *word == 42);
    wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
    wr.wr.atomic.compare_add = 42;
    wr.wr.atomic.swap = 7;
    CHECK(post(&a, &wr) == 0);
    wc = completion(a.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_COMP_SWAP && *old == 42 && *word == 7);

    /* Immediate data. */
    receive(&b, 9, 0, 0);
    sge = part(&a, 0, 100);
    wr = request(6, IBV_WR_RDMA_WRITE_WITH_IMM, &sge, 1);
    wr.imm_data = htobe32(0x01020304);
    aim(&wr, &b, 300);
    CHECK(post(&a, &wr) == 0);
    wc = completion(b.rcq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wc_flags & IBV_WC_WITH_IMM);
    CHECK(wc.imm_data == htobe32(0x01020304) && wc.wr_id == 9);
    CHECK(completion(a.scq).opcode == IBV_WC_RDMA_WRITE);
    receive(&b, 10, 400, 100);
    wr = request(7, IBV_WR_SEND_WITH_IMM, &sge, 1);
    wr.imm_data = htobe32(0xfffefdfc);
    CHECK(post(&a, &wr) == 0);
    wc = completion(b.rcq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.wc_flags & IBV_WC_WITH_IMM);
    CHECK(wc.imm_data == htobe32(0xfffefdfc) && wc.byte_len == 100 && !memcmp(b.buf + 400, a.buf, 100));
    CHECK(completion(a.scq).status == IBV_WC_SUCCESS);

    /* Unsignaled ones make no completion; what follows does. */
    receive(&b, 1, 0, 0);
    receive(&b, 2, 0, 0);
    wr = request(1, IBV_WR_SEND, NULL, 0);
    wr.send_flags = 0;
    CHECK(post(&a, &wr) == 0);
    wr.wr_id = 2;
    wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(a.scq).wr_id == 2 && completion(b.rcq).wr_id == 1 && completion(b.rcq).wr_id == 2);

    /* The other way, and to a receive that is posted late. */
    sge = part(&b, 1000, 50);
    wr = request(11, IBV_WR_SEND, &sge, 1);
    CHECK(post(&b, &wr) == 0);
    usleep(20000);
    receive(&a, 12, 0, 50);
    CHECK(completion(a.rcq).wr_id == 12 && completion(b.scq).wr_id == 11);

    /* Null regions: zeros to read, and a place for unwanted data. */
    struct ibv_mr *null_a = ibv_alloc_null_mr(a.pd), *null_b = ibv_alloc_null_mr(b.pd);
    MUST(null_a && null_b);
    memset(b.buf, 'z', 200);
    struct ibv_sge mixed[3] = {part(&a, 0, 10), {0x7777000, 20, null_a->lkey}, part(&a, 0, 10)};
    wr = request(14, IBV_WR_RDMA_WRITE, mixed, 3);
    aim(&wr, &b, 0);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    struct ibv_sge thrown[2] = {{0, 15, null_b->lkey}, part(&b, 100, 25)};
    struct ibv_recv_wr rwr = {.wr_id = 15, .sg_list = thrown, .num_sge = 2}, *bad_recv;
    CHECK(ibv_post_recv(b.qp, &rwr, &bad_recv) == 0);
    wr = request(15, IBV_WR_SEND, mixed, 3);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    wc = completion(b.rcq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == 40);
    char zeros[20] = {0};
    CHECK(!memcmp(b.buf, a.buf, 10) && !memcmp(b.buf + 10, zeros, 20) && !memcmp(b.buf + 30, a.buf, 10));
    CHECK(!memcmp(b.buf + 100, zeros, 15) && !memcmp(b.buf + 115, a.buf, 10));
    mixed[0].addr = 0;
    mixed[0].length = 200;
    mixed[0].lkey = null_a->lkey;
    wr = request(16, IBV_WR_RDMA_READ, mixed, 1);
    aim(&wr, &b, 0);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    CHECK(ibv_rereg_mr(null_a, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    CHECK(ibv_dereg_mr(null_a) == 0 && ibv_dereg_mr(null_b) == 0);

    /* A send queue that rests. */
    CHECK(to_state(a.qp, IBV_QPS_SQD) == 0);
    receive(&b, 13, 0, 0);
    wr = request(13, IBV_WR_SEND, NULL, 0);
    CHECK(post(&a, &wr) == 0);
    sge = part(&a, 0, 16);
    struct ibv_send_wr never = request(14, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
    CHECK(post(&a, &never) == EINVAL);
    never = request(14, IBV_WR_RDMA_READ, &sge, 1);
    never.send_flags |= IBV_SEND_INLINE;
    CHECK(post(&a, &never) == EINVAL);
    usleep(20000);
    CHECK(ibv_poll_cq(b.rcq, 1, &wc) == 0);
    CHECK(to_state(a.qp, IBV_QPS_RTS) == 0);
    CHECK(completion(b.rcq).wr_id == 13 && completion(a.scq).wr_id == 13);
    pair_close(&a, &b);
}

static void unreliable(void) {
    struct half a, b;
    struct half *both[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        half_open(both[i], "weft_ib0", 0);
        MUST(ibv_destroy_qp(both[i]->qp) == 0);
        struct ibv_qp_init_attr init = attributes(both[i]);
        init.qp_type = IBV_QPT_UC;
        init.sq_sig_all = 1;
        MUST(both[i]->qp = ibv_create_qp(both[i]->pd, &init));
    }
    CHECK(to_init(a.qp) == 0);
    struct ibv_qp_attr attr = rtr_attr(a.context, b.qp->qp_num);
    CHECK(ibv_modify_qp(a.qp, &attr, RC_RTR_MASK) == EINVAL);
    join(&a, &b);
    receive(&b, 1, 0, 100);
    struct ibv_sge sge = part(&a, 0, 100);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.send_flags = 0;
    CHECK(post(&a, &wr) == 0 && completion(b.rcq).byte_len == 100 && completion(a.scq).status == IBV_WC_SUCCESS);
    wr = request(1, IBV_WR_RDMA_READ, &sge, 1);
    aim(&wr, &b, 0);
    CHECK(post(&a, &wr) == EINVAL);
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    CHECK(post(&a, &wr) == EINVAL);
    pair_close(&a, &b);
}

static void refusals(void) {
    struct half a, b;
    pair_open(&a, &b);
    struct ibv_sge sges[5];
    for (int i = 0; i < 5; i++) sges[i] = part(&a, 0, 8);
    struct ibv_send_wr wrs[3], *bad = NULL;
    struct ibv_wc wc;
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, sges, 5);
    CHECK(post(&a, &wr) == EINVAL);
    wr.num_sge = -1;
    CHECK(post(&a, &wr) == EINVAL);
    wr.num_sge = 1;
    wr.sg_list = NULL;
    CHECK(post(&a, &wr) == EINVAL);
    wr = request(1, 77, sges, 1);
    CHECK(post(&a, &wr) == EINVAL);
    wr = request(1, IBV_WR_TSO, sges, 1);
    CHECK(post(&a, &wr) == EINVAL);
    wr = request(1, IBV_WR_SEND, sges, 1);
    wr.send_flags |= IBV_SEND_INLINE;
    sges[0].length = 4097;
    CHECK(post(&a, &wr) == EINVAL);
    sges[0].length = 8;
    wr = request(1, IBV_WR_ATOMIC_FETCH_AND_ADD, sges, 1);
    sges[0].length = 7;
    CHECK(post(&a, &wr) == EINVAL);
    sges[0].length = 8;
    wr = request(1, IBV_WR_BIND_MW, NULL, 0);
    CHECK(post(&a, &wr) == EINVAL);
    struct ibv_recv_wr rwr = {.sg_list = sges, .num_sge = 5}, *bad_recv = NULL;
    CHECK(ibv_post_recv(a.qp, &rwr, &bad_recv) == EINVAL && bad_recv == &rwr);
    CHECK(ibv_post_send(a.qp, NULL, &bad) == 0 && ibv_post_recv(a.qp, NULL, &bad_recv) == 0);

    /* A list is taken up to the one that is wrong. */
    receive(&b, 1, 0, 8);
    for (int i = 0; i < 3; i++) {
        wrs[i] = request(i, IBV_WR_SEND, sges, i == 1 ? 5 : 1);
        wrs[i].next = i < 2 ? &wrs[i + 1] : NULL;
    }
    CHECK(ibv_post_send(a.qp, wrs, &bad) == EINVAL && bad == &wrs[1]);
    CHECK(completion(a.scq).wr_id == 0 && completion(b.rcq).status == IBV_WC_SUCCESS);
    usleep(10000);
    CHECK(ibv_poll_cq(a.scq, 1, &wc) == 0);

    /* Full queues: the peer has posted nothing, or the sends are not polled. */
    struct ibv_recv_wr recvs[17];
    memset(recvs, 0, sizeof recvs);
    for (int i = 0; i < 17; i++) recvs[i].next = i < 16 ? &recvs[i + 1] : NULL;
    CHECK(ibv_post_recv(a.qp, recvs, &bad_recv) == ENOMEM && bad_recv == &recvs[16]);
    struct ibv_srq_init_attr small = {.attr = {.max_wr = 2, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(a.pd, &small);
    MUST(srq);
    CHECK(ibv_post_srq_recv(srq, recvs, &bad_recv) == ENOMEM && bad_recv == &recvs[2]);
    rwr = (struct ibv_recv_wr){.sg_list = sges, .num_sge = 2};
    CHECK(ibv_post_srq_recv(srq, &rwr, &bad_recv) == EINVAL);
    CHECK(ibv_destroy_srq(srq) == 0);
    CHECK(ibv_post_srq_recv(srq, &rwr, &bad_recv) == EINVAL && bad_recv == &rwr);
    pair_close(&a, &b);
}

static void faults(void) {
    struct half a, b;
    /* Memory that is not ours. */
    pair_open(&a, &b);
    struct ibv_sge sge = part(&a, 0, 8);
    sge.lkey ^= 0x5500;
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    receive(&a, 2, 0, 8);
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(a.scq).status == IBV_WC_LOC_PROT_ERR);
    CHECK(completion(a.rcq).status == IBV_WC_WR_FLUSH_ERR && state_of(a.qp) == IBV_QPS_ERR);
    pair_close(&a, &b);
    /* Memory that is not the peer's. */
    pair_open(&a, &b);
    sge = part(&a, 0, 8);
    wr = request(1, IBV_WR_RDMA_WRITE, &sge, 1);
    aim(&wr, &b, SIZE);
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(a.scq).status == IBV_WC_REM_ACCESS_ERR);
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(b.context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == b.qp);
    ibv_ack_async_event(&event);
    CHECK(state_of(b.qp) == IBV_QPS_ERR);
    pair_close(&a, &b);
    /* A message that is too long. */
    pair_open(&a, &b);
    receive(&b, 1, 0, 4);
    sge = part(&a, 0, 8);
    wr = request(1, IBV_WR_SEND, &sge, 1);
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(b.rcq).status == IBV_WC_LOC_LEN_ERR);
    pair_close(&a, &b);
    /* A peer that is gone. */
    pair_open(&a, &b);
    receive(&b, 1, 0, 8);
    wr = request(1, IBV_WR_SEND, &sge, 1);
    sge = part(&a, 0, 8);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && completion(b.rcq).wr_id == 1);
    half_close(&b);
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(a.scq).status == IBV_WC_RETRY_EXC_ERR && state_of(a.qp) == IBV_QPS_ERR);
    half_close(&a);
}

static void shared_receives(void) {
    struct half a, b;
    /* A queue pair's limits for receives have no effect with a shared queue. */
    half_open(&a, "weft_ib0", 1);
    struct ibv_qp_init_attr large = attributes(&a);
    large.cap.max_recv_wr = large.cap.max_recv_sge = ~0u;
    struct ibv_qp *qp = ibv_create_qp(a.pd, &large);
    CHECK(qp && ibv_destroy_qp(qp) == 0);
    large = attributes(&a);
    large.srq = NULL;
    large.cap.max_recv_wr = ~0u;
    NO(ibv_create_qp(a.pd, &large), EINVAL);
    half_close(&a);
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 1);
    struct ibv_srq_attr attr;
    CHECK(ibv_query_srq(b.srq, &attr) == 0 && attr.max_wr >= 16 && attr.max_sge >= 2 && attr.srq_limit == 0);
    CHECK(ibv_destroy_srq(b.srq) == EBUSY);
    uint32_t num;
    CHECK(ibv_get_srq_num(b.srq, &num) == 0);
    struct ibv_recv_wr rwr = {.wr_id = 1}, *bad_recv;
    CHECK(to_init(b.qp) == 0 && ibv_post_recv(b.qp, &rwr, &bad_recv) == EINVAL);
    join(&a, &b);
    for (int i = 0; i < 4; i++) receive(&b, 20 + i, 0, 16);
    attr.srq_limit = 17;
    CHECK(ibv_modify_srq(b.srq, &attr, IBV_SRQ_LIMIT) == EINVAL);
    attr.srq_limit = 3;
    CHECK(ibv_modify_srq(b.srq, &attr, IBV_SRQ_LIMIT) == 0);
    CHECK(ibv_query_srq(b.srq, &attr) == 0 && attr.srq_limit == 3);
    CHECK(ibv_modify_srq(b.srq, &attr, 1 << 7) == EINVAL && ibv_modify_srq(b.srq, NULL, IBV_SRQ_LIMIT) == EINVAL);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
    for (int i = 0; i < 2; i++) {
        CHECK(post(&a, &wr) == 0);
        CHECK(completion(b.rcq).wr_id == 20u + i && completion(a.scq).status == IBV_WC_SUCCESS);
    }
    struct ibv_async_event event;
    CHECK(ibv_get_async_event(b.context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == b.srq);
    ibv_ack_async_event(&event);
    attr.max_wr = 32;
    CHECK(ibv_modify_srq(b.srq, &attr, IBV_SRQ_MAX_WR) == 0 && ibv_query_srq(b.srq, &attr) == 0 && attr.max_wr >= 32);
    attr.max_wr = 1;
    CHECK(ibv_modify_srq(b.srq, &attr, IBV_SRQ_MAX_WR) == EINVAL);
    CHECK(to_state(b.qp, IBV_QPS_ERR) == 0);
    CHECK(ibv_get_async_event(b.context, &event) == 0 && event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED);
    ibv_ack_async_event(&event);
    struct ibv_srq_init_attr_ex ex = {.attr = {.max_wr = 4, .max_sge = 1},
                                      .comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE,
                                      .srq_type = IBV_SRQT_XRC,
                                      .pd = a.pd};
    NO(ibv_create_srq_ex(a.context, &ex), EINVAL);
    ex.srq_type = IBV_SRQT_TM;
    NO(ibv_create_srq_ex(a.context, &ex), EOPNOTSUPP);
    ex.srq_type = IBV_SRQT_BASIC;
    struct ibv_srq *srq = ibv_create_srq_ex(a.context, &ex);
    CHECK(srq && ibv_destroy_srq(srq) == 0);
    struct ibv_srq_init_attr none = {.attr = {.max_wr = 0}};
    NO(ibv_create_srq(a.pd, &none), EINVAL);
    pair_close(&a, &b);
}

static void windows(void) {
    struct half a, b;
    pair_open(&a, &b);
    struct ibv_mw *mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
    MUST(mw);
    CHECK(mw->pd == b.pd && mw->context == b.context && mw->type == IBV_MW_TYPE_2);
    NO(ibv_alloc_mw(b.pd, 3), EINVAL);
    uint32_t rkey = ibv_inc_rkey(mw->rkey);
    struct ibv_send_wr wr = request(1, IBV_WR_BIND_MW, NULL, 0);
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){b.mr, (uintptr_t)b.buf + 64, 64, IBV_ACCESS_REMOTE_WRITE};
    CHECK(post(&b, &wr) == 0);
    struct ibv_wc wc = completion(b.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && mw->rkey == rkey);
    /* A program chooses the low 8 bits of a key only. */
    struct ibv_mw *next = ibv_alloc_mw(b.pd, IBV_MW_TYPE_2);
    MUST(next);
    uint32_t bound = (next->rkey & ~0xffu) | 0x17;
    wr.bind_mw.mw = next;
    wr.bind_mw.rkey = 0x400 + 0x17;
    CHECK(post(&b, &wr) == 0);
    wc = completion(b.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && next->rkey == bound);
    wr = request(1, IBV_WR_LOCAL_INV, NULL, 0);
    wr.invalidate_rkey = next->rkey;
    CHECK(post(&b, &wr) == 0 && completion(b.scq).status == IBV_WC_SUCCESS);
    CHECK(ibv_dealloc_mw(next) == 0);
    CHECK(ibv_dereg_mr(b.mr) == EBUSY);
    memcpy(a.buf, "window", 6);
    struct ibv_sge sge = part(&a, 0, 6);
    wr = request(2, IBV_WR_RDMA_WRITE, &sge, 1);
    wr.wr.rdma.remote_addr = (uintptr_t)b.buf + 64;
    wr.wr.rdma.rkey = rkey;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && !memcmp(b.buf + 64, "window", 6));
    /* The peer invalidates it with what it sends. */
    receive(&b, 3, 200, 10);
    wr = request(3, IBV_WR_SEND_WITH_INV, &sge, 1);
    wr.invalidate_rkey = rkey;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    wc = completion(b.rcq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == rkey);
    CHECK(ibv_dealloc_mw(mw) == 0);
    CHECK(ibv_dealloc_mw(mw) == EINVAL);

    /* Type 1: bound by a separate call, any number of times. */
    mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_1);
    MUST(mw);
    struct ibv_mw_bind bind = {.wr_id = 4,
                               .send_flags = IBV_SEND_SIGNALED,
                               .bind_info = {b.mr, (uintptr_t)b.buf, 64, IBV_ACCESS_REMOTE_WRITE}};
    for (int round = 0; round < 2; round++) {
        uint32_t before = mw->rkey;
        CHECK(ibv_bind_mw(b.qp, mw, &bind) == 0 && mw->rkey != before);
        wc = completion(b.scq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == 4);
        wr = request(5, IBV_WR_RDMA_WRITE, &sge, 1);
        wr.wr.rdma.remote_addr = (uintptr_t)b.buf;
        wr.wr.rdma.rkey = mw->rkey;
        CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    }
    bind.bind_info = (struct ibv_mw_bind_info){NULL, 0, 0, 0};
    CHECK(ibv_bind_mw(b.qp, mw, &bind) == 0 && completion(b.scq).status == IBV_WC_SUCCESS);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_mw(mw) == 0);
    pair_close(&a, &b);
}

static struct ibv_wc put(struct half *h, uint64_t addr, uint32_t rkey) {
    struct ibv_sge sge = part(h, 0, 6);
    struct ibv_send_wr wr = request(1, IBV_WR_RDMA_WRITE, &sge, 1);
    wr.wr.rdma.remote_addr = addr;
    wr.wr.rdma.rkey = rkey;
    CHECK(post(h, &wr) == 0);
    return completion(h->scq);
}

/* Windows of type 1 belong to their domain: each queue pair of it binds them, anew too, and its peer uses them. */
static void windows_of_a_domain(void) {
    struct half a, b, c, d;
    pair_open(&a, &b);
    half_open(&c, "weft_ib0", 0);
    d = b;
    struct ibv_qp_init_attr init = attributes(&b);
    MUST(d.qp = ibv_create_qp(b.pd, &init));
    join(&c, &d);
    struct ibv_mw *mw = ibv_alloc_mw(b.pd, IBV_MW_TYPE_1);
    MUST(mw);
    struct ibv_qp *by[] = {b.qp, d.qp, d.qp, b.qp};
    struct ibv_mw_bind bind = {.send_flags = IBV_SEND_SIGNALED};
    struct ibv_wc wc;
    uint32_t old = 0;
    memcpy(a.buf, "by a..", 6);
    memcpy(c.buf, "by c..", 6);
    for (int round = 0; round < 4; round++) {
        uint64_t at = (uintptr_t)b.buf + 100 * round;
        old = mw->rkey;
        bind.wr_id = round;
        bind.bind_info = (struct ibv_mw_bind_info){b.mr, at, 6, IBV_ACCESS_REMOTE_WRITE};
        CHECK(ibv_bind_mw(by[round], mw, &bind) == 0 && mw->rkey != old);
        wc = completion(b.scq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW && wc.wr_id == (uint64_t)round);
        CHECK(wc.qp_num == by[round]->qp_num);
        for (int n = 0; n < 2; n++) {
            CHECK(put(n ? &c : &a, at, mw->rkey).status == IBV_WC_SUCCESS);
            CHECK(!memcmp((char *)at, n ? "by c.." : "by a..", 6));
        }
    }
    /* Two at once: the later one holds. */
    for (int n = 0; n < 2; n++) {
        bind.bind_info.addr = (uintptr_t)b.buf + 1000 + 1000 * n;
        CHECK(ibv_bind_mw(b.qp, mw, &bind) == 0);
    }
    CHECK(completion(b.scq).status == IBV_WC_SUCCESS && completion(b.scq).status == IBV_WC_SUCCESS);
    CHECK(put(&c, (uintptr_t)b.buf + 2000, mw->rkey).status == IBV_WC_SUCCESS);
    CHECK(ibv_dereg_mr(b.mr) == EBUSY);
    /* A peer does not take it away. */
    struct ibv_send_wr wr = request(1, IBV_WR_SEND_WITH_INV, NULL, 0);
    wr.invalidate_rkey = mw->rkey;
    receive(&b, 1, 0, 0);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_REM_INV_REQ_ERR);
    CHECK(put(&c, (uintptr_t)b.buf + 2000, mw->rkey).status == IBV_WC_SUCCESS);
    /* A bind of length 0 is an ordinary bind, with a key that opens nothing; so is the next one. */
    old = mw->rkey;
    bind.bind_info = (struct ibv_mw_bind_info){NULL, 0, 0, 0};
    CHECK(ibv_bind_mw(d.qp, mw, &bind) == 0 && mw->rkey != old);
    wc = completion(d.scq);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
    bind.bind_info = (struct ibv_mw_bind_info){b.mr, (uintptr_t)b.buf, 6, IBV_ACCESS_REMOTE_WRITE};
    CHECK(ibv_bind_mw(d.qp, mw, &bind) == 0 && completion(d.scq).status == IBV_WC_SUCCESS);
    CHECK(put(&c, (uintptr_t)b.buf, mw->rkey).status == IBV_WC_SUCCESS);
    CHECK(put(&c, (uintptr_t)b.buf + 2000, old).status == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_mw(mw) == 0 && ibv_destroy_qp(d.qp) == 0);
    half_close(&c);
    pair_close(&a, &b);
}

/* The sender's status of requests that its peer finds invalid; earlier requests are executed. */
static void invalid_requests(void) {
    struct half a, b;
    /* A message that is longer than its receive. */
    for (int size = 0; size < 2; size++) {
        const uint32_t len = size ? 20000 : 8;
        pair_open(&a, &b);
        for (int i = 1; i <= 3; i++) receive(&b, i, 0, len - i / 3);
        struct ibv_sge sge = part(&a, 0, len);
        struct ibv_send_wr wr[3] = {request(1, IBV_WR_SEND, &sge, 1), request(2, IBV_WR_SEND, &sge, 1), request(3, IBV_WR_SEND, &sge, 1)};
        wr[0].next = &wr[1];
        wr[1].next = &wr[2];
        CHECK(post(&a, wr) == 0);
        for (uint64_t i = 1; i <= 3; i++) {
            struct ibv_wc wc = completion(a.scq);
            CHECK(wc.wr_id == i && wc.status == (i == 3 ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_SUCCESS));
            CHECK(completion(b.rcq).status == (i == 3 ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS));
        }
        pair_close(&a, &b);
    }
    /* An atomic on no multiple of 8, whatever its key. */
    for (int wrong_key = 0; wrong_key < 2; wrong_key++) {
        pair_open(&a, &b);
        struct ibv_sge sge = part(&a, 0, 8);
        struct ibv_send_wr wr = request(1, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
        wr.wr.atomic.remote_addr = (uintptr_t)b.buf + 4;
        wr.wr.atomic.rkey = b.mr->rkey ^ wrong_key;
        wr.wr.atomic.compare_add = 1;
        CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_REM_INV_REQ_ERR);
        CHECK(((uint64_t *)b.buf)[0] == 0 && ((uint64_t *)b.buf)[1] == 0);
        pair_close(&a, &b);
    }
}

/* Receives of a shared queue lie in the queue's domain, whatever domain the queue pair has. */
static void domain_of_shared_receives(void) {
    struct half a, b;
    for (int own = 0; own < 2; own++) {
        half_open(&a, "weft_ib0", 0);
        half_open(&b, "weft_ib0", 1);
        struct ibv_pd *other = ibv_alloc_pd(b.context);
        struct ibv_qp_init_attr init = attributes(&b);
        MUST(other && ibv_destroy_qp(b.qp) == 0);
        MUST(b.qp = ibv_create_qp(other, &init));
        struct ibv_mr *mr = ibv_reg_mr(own ? b.pd : other, b.buf, SIZE, ALL);
        MUST(mr);
        join(&a, &b);
        for (int i = 0; i < 2; i++) {
            const uint32_t len = i ? 20000 : 100;
            struct ibv_sge to = {(uintptr_t)b.buf, len, mr->lkey}, sge = part(&a, 0, len);
            struct ibv_recv_wr rwr = {.wr_id = 1, .sg_list = &to, .num_sge = 1}, *bad;
            struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
            CHECK(ibv_post_srq_recv(b.srq, &rwr, &bad) == 0 && post(&a, &wr) == 0);
            CHECK(completion(b.rcq).status == (own ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR));
            CHECK(completion(a.scq).status == (own ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR));
            if (!own) break;
        }
        CHECK(ibv_destroy_qp(b.qp) == 0 && ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(other) == 0);
        init.srq = NULL;
        MUST(b.qp = ibv_create_qp(b.pd, &init));
        pair_close(&a, &b);
    }
}

/* The completion of a received Write with immediate data says how much was written. */
static void written_lengths(void) {
    struct half a, b;
    pair_open(&a, &b);
    const uint32_t lengths[] = {0, 1, 4, 100, 4096, 20000, SIZE};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        /* Writes and Sends before it do not count. */
        for (int before = 0; before < 3; before++) {
            struct ibv_sge sge = part(&a, 0, 300), whole = part(&a, 0, lengths[i]);
            struct ibv_send_wr other = request(1, before == 1 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND_WITH_IMM, &sge, before == 1);
            struct ibv_send_wr wr = request(2, IBV_WR_RDMA_WRITE_WITH_IMM, &whole, 1);
            aim(&other, &b, 0);
            aim(&wr, &b, 0);
            other.next = &wr;
            wr.imm_data = htobe32(i);
            if (before == 2) receive(&b, 1, 0, 0);
            receive(&b, 2, 0, 0);
            CHECK(post(&a, before ? &other : &wr) == 0);
            struct ibv_wc wc;
            if (before == 2) {
                wc = completion(b.rcq);
                CHECK(wc.wr_id == 1 && wc.byte_len == 0 && wc.opcode == IBV_WC_RECV);
            }
            wc = completion(b.rcq);
            CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wr_id == 2);
            CHECK(wc.byte_len == lengths[i] && wc.imm_data == htobe32(i));
            for (int n = before ? 2 : 1; n > 0; n--) CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
        }
    }
    /* An empty Send with immediate data has written nothing, whatever was written before. */
    struct ibv_sge sge = part(&a, 0, 300);
    struct ibv_send_wr wr[2] = {request(1, IBV_WR_RDMA_WRITE, &sge, 1), request(2, IBV_WR_SEND_WITH_IMM, NULL, 0)};
    aim(&wr[0], &b, 0);
    wr[0].next = &wr[1];
    receive(&b, 3, 0, 0);
    CHECK(post(&a, wr) == 0);
    CHECK(completion(b.rcq).byte_len == 0);
    pair_close(&a, &b);
}

static double seconds(void) {
    struct timespec now;
    MUST(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* Joins a sender that tries so often to a receiver with this timer (as the specification encodes it). */
static void join_rnr(struct half *from, struct half *to, int rnr_retry, int min_rnr_timer) {
    half_open(from, "weft_ib0", 0);
    half_open(to, "weft_ib0", 0);
    MUST(to_init(from->qp) == 0 && to_init(to->qp) == 0 && to_rtr(from->qp, to->qp->qp_num) == 0);
    struct ibv_qp_attr attr = rtr_attr(to->context, from->qp->qp_num);
    attr.min_rnr_timer = min_rnr_timer;
    MUST(ibv_modify_qp(to->qp, &attr, RC_RTR_MASK) == 0 && to_rts(to->qp) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = rnr_retry, .max_rd_atomic = 4};
    MUST(ibv_modify_qp(from->qp, &attr, RTS_MASK) == 0);
}

/* A message that finds no receive is given up after rnr_retry times more than the receiver's timer. */
static void receiver_not_ready(void) {
    struct half a, b;
    struct ibv_wc wc;
    const struct {
        int rnr_retry, min_rnr_timer;
        double limit;
    } limits[] = {{0, 28, 0.16384}, {2, 26, 3 * 0.08192}, {1, 1, 2 * 0.00001}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        join_rnr(&a, &b, limits[i].rnr_retry, limits[i].min_rnr_timer);
        receive(&b, 1, 0, 64);
        receive(&a, 9, 0, 64);
        struct ibv_sge sge = part(&a, 0, i == 1 ? 20000 : 64);
        struct ibv_sge first = part(&a, 0, 64);
        struct ibv_send_wr wr[3] = {request(1, IBV_WR_SEND, &first, 1), request(2, IBV_WR_SEND, &sge, 1), request(3, IBV_WR_SEND, &sge, 1)};
        wr[0].next = &wr[1];
        wr[1].next = &wr[2];
        double start = seconds();
        CHECK(post(&a, wr) == 0);
        wc = completion(a.scq);
        CHECK(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
        wc = completion(a.scq);
        CHECK(wc.wr_id == 2 && wc.status == IBV_WC_RNR_RETRY_EXC_ERR && seconds() - start >= limits[i].limit);
        wc = completion(a.scq);
        CHECK(wc.wr_id == 3 && wc.status == IBV_WC_WR_FLUSH_ERR && state_of(a.qp) == IBV_QPS_ERR);
        CHECK(completion(a.rcq).status == IBV_WC_WR_FLUSH_ERR);
        /* The receiver hears nothing of it. */
        CHECK(completion(b.rcq).wr_id == 1);
        receive(&b, 2, 0, 64);
        CHECK(ibv_poll_cq(b.rcq, 1, &wc) == 0 && state_of(b.qp) == IBV_QPS_RTS);
        pair_close(&a, &b);
    }
    /* Each message has the whole time, and one that has its receive continues. */
    join_rnr(&a, &b, 1, 0);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
    for (int i = 0; i < 3; i++) CHECK(post(&a, &wr) == 0);
    int in_time = 1;
    for (int i = 0; i < 3; i++) {
        double before = seconds();
        usleep(700000);
        receive(&b, i, 0, 0);
        in_time &= seconds() - before < 1.2;
        if (in_time) CHECK(completion(b.rcq).wr_id == (uint64_t)i);
    }
    for (int i = 0; i < 3 && in_time; i++) CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
    if (!in_time) printf("receiver_not_ready: skipped in part, the machine is too busy\n");
    pair_close(&a, &b);
    /* For ever. */
    join_rnr(&a, &b, 7, 1);
    CHECK(post(&a, &wr) == 0);
    usleep(100000);
    CHECK(ibv_poll_cq(a.scq, 1, &wc) == 0);
    receive(&b, 1, 0, 0);
    CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
    pair_close(&a, &b);
}

/* Every request that takes a receive waits for it as often as its sender says, of any length, and also if it is posted before the connection is there. */
static void every_kind_waits_for_its_receive(void) {
    const struct {
        enum ibv_wr_opcode opcode;
        uint32_t len;
    } kinds[] = {
        {IBV_WR_SEND, 0}, {IBV_WR_SEND, 8}, {IBV_WR_SEND, 20000}, {IBV_WR_SEND_WITH_IMM, 8}, {IBV_WR_SEND_WITH_IMM, 20000},
        {IBV_WR_RDMA_WRITE_WITH_IMM, 0}, {IBV_WR_RDMA_WRITE_WITH_IMM, 8}, {IBV_WR_RDMA_WRITE_WITH_IMM, 1024}, {IBV_WR_RDMA_WRITE_WITH_IMM, 20000},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (int rnr_retry = 1; rnr_retry <= 7; rnr_retry += 6) {
            struct half a, b;
            struct ibv_wc wc;
            join_rnr(&a, &b, rnr_retry, 1);
            struct ibv_sge sge = part(&a, 0, kinds[i].len);
            struct ibv_send_wr wr = request(1, kinds[i].opcode, &sge, 1);
            wr.wr.rdma.remote_addr = (uintptr_t)b.buf + 32768;
            wr.wr.rdma.rkey = b.mr->rkey;
            CHECK(post(&a, &wr) == 0);
            if (rnr_retry < 7) {
                CHECK(completion(a.scq).status == IBV_WC_RNR_RETRY_EXC_ERR);
            } else {
                usleep(20000);
                CHECK(ibv_poll_cq(a.scq, 1, &wc) == 0);
                receive(&b, 2, 0, 32768);
                CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
                wc = completion(b.rcq);
                CHECK(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && wc.byte_len == kinds[i].len);
            }
            pair_close(&a, &b);
        }
    }
}

static int readable(int fd, int timeout) {
    struct pollfd p = {fd, POLLIN, 0};
    return poll(&p, 1, timeout) == 1;
}

static void *destroy_late(void *cq) {
    return (void *)(intptr_t)ibv_destroy_cq(cq);
}

static void completion_events(void) {
    struct half a, b;
    pair_open(&a, &b);
    int fd = b.channel->fd, ep = epoll_create1(0);
    struct epoll_event ready = {.events = EPOLLIN | EPOLLET};
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ready) == 0);
    CHECK(!readable(fd, 0));
    MUST(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0);
    struct ibv_cq *cq = NULL;
    void *context = NULL;
    MINUS(ibv_get_cq_event(b.channel, &cq, &context), EAGAIN);
    MUST(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) == 0);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
    for (int round = 0; round < 3; round++) {
        CHECK(ibv_req_notify_cq(b.rcq, 0) == 0);
        receive(&b, round, 0, 0);
        CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
        CHECK(epoll_wait(ep, &ready, 1, 10000) == 1);
        CHECK(ibv_get_cq_event(b.channel, &cq, &context) == 0 && cq == b.rcq && context == &b);
        CHECK(completion(b.rcq).wr_id == (uint64_t)round && !readable(fd, 0));
    }
    ibv_ack_cq_events(b.rcq, 3);
    /* Only what the peer marks. */
    CHECK(ibv_req_notify_cq(b.rcq, 1) == 0);
    receive(&b, 1, 0, 0);
    receive(&b, 2, 0, 0);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && completion(b.rcq).wr_id == 1);
    CHECK(!readable(fd, 50));
    wr.send_flags |= IBV_SEND_SOLICITED;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    CHECK(ibv_get_cq_event(b.channel, &cq, &context) == 0 && cq == b.rcq);
    CHECK(completion(b.rcq).wr_id == 2);
    /* A queue waits for its fetched events, and takes back the others. */
    CHECK(ibv_req_notify_cq(b.scq, 0) == 0);
    CHECK(to_state(b.qp, IBV_QPS_ERR) == 0);
    CHECK(ibv_destroy_qp(b.qp) == 0);
    pthread_t thread;
    void *result = (void *)77;
    MUST(pthread_create(&thread, NULL, destroy_late, b.rcq) == 0);
    usleep(50000);
    CHECK(pthread_tryjoin_np(thread, &result) == EBUSY);
    ibv_ack_cq_events(b.rcq, 1);
    CHECK(pthread_join(thread, &result) == 0 && result == NULL);
    CHECK(ibv_destroy_cq(b.scq) == 0);
    CHECK(!readable(fd, 0));
    CHECK(ibv_destroy_comp_channel(b.channel) == 0);
    MINUS(ibv_get_cq_event(b.channel, &cq, &context), EINVAL);
    CHECK(ibv_dereg_mr(b.mr) == 0 && ibv_dealloc_pd(b.pd) == 0 && ibv_close_device(b.context) == 0);
    free(b.buf);
    close(ep);
    half_close(&a);
}

static void *hear(void *channel) {
    struct ibv_cq *cq;
    void *context;
    ibv_get_cq_event(channel, &cq, &context);
    return NULL;
}

static void *listen_on(void *context) {
    struct ibv_async_event event;
    ibv_get_async_event(context, &event);
    return NULL;
}

static void *open_cancelled(void *context) {
    struct ibv_port_attr port;
    /* Calls that do not wait are carried out whole. */
    pthread_cancel(pthread_self());
    *(struct ibv_context **)context = open_named("weft_ib0");
    CHECK(ibv_query_port(*(struct ibv_context **)context, 1, &port) == 0);
    pthread_testcancel();
    return NULL;
}

/* Threads for events are cancelled, commonly, while they wait. */
static void cancelled(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    struct ibv_context *opened = NULL;
    struct {
        void *(*run)(void *);
        void *arg;
    } threads[] = {{hear, h.channel}, {listen_on, h.context}, {open_cancelled, &opened}};
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        void *result = NULL;
        struct timespec end;
        MUST(pthread_create(&thread, NULL, threads[i].run, threads[i].arg) == 0);
        if (i < 2) {
            usleep(50000);
            MUST(pthread_cancel(thread) == 0);
        }
        MUST(clock_gettime(CLOCK_REALTIME, &end) == 0);
        end.tv_sec += 20;
        CHECK(pthread_timedjoin_np(thread, &result, &end) == 0 && result == PTHREAD_CANCELED);
    }
    CHECK(opened && ibv_close_device(opened) == 0);
    half_close(&h);
}

static struct ibv_xrcd *domain_of(struct ibv_context *context, int fd, int oflags) {
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = oflags};
    return ibv_open_xrcd(context, &attr);
}

static struct ibv_srq *xrc_queue(struct half *h, struct ibv_xrcd *xrcd) {
    struct ibv_srq_init_attr_ex ex = {
        .attr = {.max_wr = 16, .max_sge = 2},
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = h->pd,
        .xrcd = xrcd,
        .cq = h->rcq};
    return ibv_create_srq_ex(h->context, &ex);
}

static void domains_by_file(void) {
    struct ibv_context *context = open_named("weft_ib0"), *iwarp = open_named("weft0");
    char name[] = "/tmp/weft-xrcXXXXXX";
    int fd = mkstemp(name);
    MUST(fd >= 0);
    NO(domain_of(iwarp, -1, O_CREAT), EOPNOTSUPP);
    NO(domain_of(context, 12345, O_CREAT), EBADF);
    NO(domain_of(context, fd, 0), EAGAIN);
    struct ibv_xrcd *first = domain_of(context, fd, O_CREAT | O_EXCL), *second = domain_of(context, fd, 0);
    CHECK(first && second && first != second);
    NO(domain_of(context, fd, O_CREAT | O_EXCL), EINVAL);
    CHECK(ibv_close_xrcd(first) == 0 && ibv_close_xrcd(second) == 0 && ibv_close_xrcd(second) == EINVAL);
    NO(domain_of(context, fd, 0), EAGAIN);
    close(fd);
    unlink(name);
    CHECK(ibv_close_device(context) == 0 && ibv_close_device(iwarp) == 0);
}

/* With RoCE alone the device does not say that it has XRC, and every call for it says so. */
static void xrc_as_told(void) {
    const char *wire = getenv("WEFT_IB_WIRE");
    const int has = !wire || strcmp(wire, "roce");
    struct half h;
    half_open(&h, "weft_ib0", 0);
    struct ibv_device_attr_ex told;
    MUST(ibv_query_device_ex(h.context, NULL, &told) == 0);
    CHECK(!(told.orig_attr.device_cap_flags & IBV_DEVICE_XRC) == !has);
    CHECK(!(told.device_cap_flags_ex & IBV_DEVICE_XRC) == !has && !told.xrc_odp_caps == !has);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_XRC_SEND;
    init.recv_cq = NULL;
    if (has) {
        struct ibv_xrcd *xrcd = domain_of(h.context, -1, O_CREAT);
        struct ibv_qp *qp = ibv_create_qp(h.pd, &init);
        CHECK(xrcd && ibv_close_xrcd(xrcd) == 0 && qp && ibv_destroy_qp(qp) == 0);
    } else {
        NO(domain_of(h.context, -1, O_CREAT), EOPNOTSUPP);
        NO(ibv_create_qp(h.pd, &init), EOPNOTSUPP);
    }
    half_close(&h);
}

/* Two queues in two protection domains for one target queue pair: each message reaches the queue that it names. */
static void xrc(void) {
    struct half a, b, c;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    half_open(&c, "weft_ib0", 0);
    struct ibv_xrcd *xrcd = domain_of(b.context, -1, O_CREAT);
    MUST(xrcd && (b.srq = xrc_queue(&b, xrcd)) && (c.srq = xrc_queue(&c, xrcd)));
    uint32_t numbers[2];
    CHECK(ibv_get_srq_num(b.srq, &numbers[0]) == 0 && ibv_get_srq_num(c.srq, &numbers[1]) == 0);
    CHECK(numbers[0] != numbers[1]);
    CHECK(ibv_close_xrcd(xrcd) == EBUSY && ibv_destroy_cq(c.rcq) == EBUSY);

    struct ibv_qp_init_attr_ex ex = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    struct ibv_qp *target = ibv_create_qp_ex(b.context, &ex), *own = a.qp;
    struct ibv_qp_init_attr init = attributes(&a);
    init.qp_type = IBV_QPT_XRC_SEND;
    init.recv_cq = NULL;
    MUST(target && (a.qp = ibv_create_qp(a.pd, &init)));
    MUST(to_init(a.qp) == 0 && to_init(target) == 0);
    MUST(to_rtr(a.qp, target->qp_num) == 0 && to_rtr(target, a.qp->qp_num) == 0);
    MUST(to_rts(a.qp) == 0 && to_rts(target) == 0);

    struct half *to[] = {&b, &c};
    for (int i = 0; i < 6; i++) {
        struct half *h = to[i / 2 % 2];
        receive(h, 100 + i, 0, 64);
        sprintf(a.buf, "message %d", i);
        struct ibv_sge sge = part(&a, 0, 64);
        struct ibv_send_wr wr = request(i, i % 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, &sge, 1);
        wr.imm_data = htonl(i);
        wr.qp_type.xrc.remote_srqn = numbers[i / 2 % 2];
        CHECK(post(&a, &wr) == 0);
        struct ibv_wc wc = completion(h->rcq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 100u + i && wc.byte_len == 64 && wc.qp_num == target->qp_num);
        CHECK(!(i % 2) || wc.imm_data == htonl(i));
        CHECK(!strcmp(h->buf, a.buf));
        wc = completion(a.scq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (unsigned)i);
        CHECK(ibv_poll_cq(to[1 - i / 2 % 2]->rcq, 1, &wc) == 0);
    }
    /* A message waits for a receive of its own queue, whatever the other queue has. */
    receive(&b, 1, 0, 64);
    struct ibv_sge sge = part(&a, 0, 8);
    struct ibv_send_wr wr = request(9, IBV_WR_SEND, &sge, 1);
    wr.qp_type.xrc.remote_srqn = numbers[1];
    CHECK(post(&a, &wr) == 0);
    struct ibv_wc wc;
    usleep(20000);
    CHECK(ibv_poll_cq(b.rcq, 1, &wc) == 0 && ibv_poll_cq(a.scq, 1, &wc) == 0);
    receive(&c, 2, 0, 64);
    CHECK(completion(c.rcq).wr_id == 2 && completion(a.scq).wr_id == 9);
    /* The memory of both queues' domains is accessible, and no other. */
    for (int i = 0; i < 2; i++) {
        memcpy(a.buf, "written", 8);
        sge = part(&a, 0, 8);
        wr = request(20, IBV_WR_RDMA_WRITE, &sge, 1);
        aim(&wr, to[i], 512);
        CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && !strcmp(to[i]->buf + 512, "written"));
        sge = part(&a, 1024, 8);
        wr = request(21, IBV_WR_RDMA_READ, &sge, 1);
        aim(&wr, to[i], 512);
        CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && !strcmp(a.buf + 1024, "written"));
        memset(a.buf + 1024, 0, 8);
    }
    /* No such queue. */
    sge = part(&a, 0, 8);
    wr = request(30, IBV_WR_SEND, &sge, 1);
    wr.qp_type.xrc.remote_srqn = numbers[1] + 1000;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_REM_INV_REQ_ERR);
    CHECK(ibv_destroy_qp(a.qp) == 0 && ibv_destroy_qp(target) == 0);
    a.qp = own;
    half_close(&a);
    CHECK(ibv_destroy_srq(b.srq) == 0 && ibv_destroy_srq(c.srq) == 0 && ibv_close_xrcd(xrcd) == 0);
    b.srq = c.srq = NULL;
    half_close(&b);
    half_close(&c);
}

/* Any holder of the domain can open a target, which lives as long as one of its handles, in any order of their ends. */
static void opened(void) {
    struct half a, b;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    struct ibv_context *other = open_named("weft_ib0"), *iwarp = open_named("weft0");
    char name[] = "/tmp/weft-xrcXXXXXX";
    int fd = mkstemp(name);
    MUST(fd >= 0);
    struct ibv_xrcd *xrcd = domain_of(b.context, fd, O_CREAT), *same = domain_of(other, fd, 0);
    struct ibv_xrcd *strange = domain_of(other, -1, O_CREAT);
    MUST(xrcd && same && strange && (b.srq = xrc_queue(&b, xrcd)));
    struct ibv_qp_init_attr_ex ex = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    struct ibv_qp *target = ibv_create_qp_ex(b.context, &ex), *own = a.qp;
    struct ibv_qp_init_attr init = attributes(&a);
    init.qp_type = IBV_QPT_XRC_SEND;
    init.recv_cq = NULL;
    MUST(target && (a.qp = ibv_create_qp(a.pd, &init)));

    int mark;
    struct ibv_qp_open_attr attr = {
        .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_CONTEXT,
        .qp_num = target->qp_num,
        .xrcd = same,
        .qp_context = &mark,
        .qp_type = IBV_QPT_XRC_RECV};
    NO(ibv_open_qp(other, &attr), EINVAL);
    attr.comp_mask |= IBV_QP_OPEN_ATTR_TYPE;
    NO(ibv_open_qp(iwarp, &attr), EOPNOTSUPP);
    NO(ibv_open_qp(other, NULL), EINVAL);
    attr.xrcd = strange;
    NO(ibv_open_qp(other, &attr), EINVAL);
    attr.xrcd = same;
    attr.qp_num = a.qp->qp_num;
    NO(ibv_open_qp(other, &attr), EINVAL);
    attr.qp_num = target->qp_num;
    attr.qp_type = IBV_QPT_RC;
    NO(ibv_open_qp(other, &attr), EINVAL);
    attr.qp_type = IBV_QPT_XRC_RECV;
    attr.comp_mask |= IBV_QP_OPEN_ATTR_RESERVED;
    NO(ibv_open_qp(other, &attr), EOPNOTSUPP);
    attr.comp_mask &= ~IBV_QP_OPEN_ATTR_RESERVED;
    struct ibv_qp *second = ibv_open_qp(other, &attr);
    MUST(second && second != target && second->qp_num == target->qp_num && second->qp_context == &mark && second->context == other);
    struct ibv_qp *third = ibv_open_qp(b.context, &attr);
    MUST(third && third != second);
    CHECK(ibv_close_xrcd(same) == EBUSY);

    /* It is one queue pair: each handle moves it, and says where it is. */
    MUST(to_init(a.qp) == 0 && to_init(second) == 0 && state_of(target) == IBV_QPS_INIT);
    MUST(to_rtr(a.qp, second->qp_num) == 0 && to_rtr(target, a.qp->qp_num) == 0 && state_of(second) == IBV_QPS_RTR);
    MUST(to_rts(a.qp) == 0 && to_rts(third) == 0 && state_of(target) == IBV_QPS_RTS);
    CHECK(to_rts(third) == EINVAL);
    struct ibv_qp_attr said;
    struct ibv_qp_init_attr as;
    CHECK(ibv_query_qp(second, &said, IBV_QP_DEST_QPN, &as) == 0 && said.dest_qp_num == a.qp->qp_num);
    CHECK(as.qp_context == &mark && as.qp_type == IBV_QPT_XRC_RECV && !as.send_cq && !as.recv_cq);
    struct ibv_send_wr nothing = request(1, IBV_WR_SEND, NULL, 0), *bad;
    CHECK(ibv_post_send(second, &nothing, &bad) != 0);

    uint32_t number;
    CHECK(ibv_get_srq_num(b.srq, &number) == 0);
    struct ibv_qp *gone[] = {target, second, third};
    for (int i = 0; i < 3; i++) {
        receive(&b, 100 + i, 0, 64);
        struct ibv_sge sge = part(&a, 0, 8);
        struct ibv_send_wr wr = request(i, IBV_WR_SEND, &sge, 1);
        wr.qp_type.xrc.remote_srqn = number;
        CHECK(post(&a, &wr) == 0);
        struct ibv_wc wc = completion(b.rcq);
        CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == 100u + i && wc.qp_num == attr.qp_num);
        CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
        if (i < 2) {
            CHECK(ibv_destroy_qp(gone[i]) == 0 && ibv_destroy_qp(gone[i]) == EINVAL);
            CHECK(ibv_query_qp(gone[i], &said, IBV_QP_STATE, &as) == EINVAL && state_of(third) == IBV_QPS_RTS);
        }
    }
    CHECK(ibv_close_xrcd(same) == EBUSY); /* what the last handle was opened with */
    /* An event goes to the remaining handle. */
    CHECK(to_state(third, IBV_QPS_ERR) == 0);
    struct ibv_async_event event;
    MUST(readable(b.context->async_fd, 10000) && ibv_get_async_event(b.context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == third);
    ibv_ack_async_event(&event);
    CHECK(ibv_destroy_qp(third) == 0);
    NO(ibv_open_qp(other, &attr), EINVAL);
    CHECK(ibv_destroy_qp(a.qp) == 0);
    a.qp = own;
    half_close(&a);
    CHECK(ibv_destroy_srq(b.srq) == 0 && ibv_close_xrcd(xrcd) == 0 && ibv_close_xrcd(same) == 0 && ibv_close_xrcd(strange) == 0);
    b.srq = NULL;
    half_close(&b);
    CHECK(ibv_close_device(other) == 0 && ibv_close_device(iwarp) == 0);
    close(fd);
    unlink(name);
}

static void device_memory(void) {
    struct half a, b;
    pair_open(&a, &b);
    struct ibv_device_attr_ex attr;
    CHECK(ibv_query_device_ex(b.context, NULL, &attr) == 0 && attr.max_dm_size > 0);
    struct ibv_alloc_dm_attr wanted = {.length = 4096, .log_align_req = 6};
    struct ibv_dm *dm = ibv_alloc_dm(b.context, &wanted);
    MUST(dm);
    wanted.length = attr.max_dm_size + 1;
    NO(ibv_alloc_dm(b.context, &wanted), ENOMEM);
    wanted.length = 0;
    NO(ibv_alloc_dm(b.context, &wanted), EINVAL);
    NO(ibv_reg_dm_mr(b.pd, dm, 0, 4096, IBV_ACCESS_LOCAL_WRITE), EINVAL);
    NO(ibv_reg_dm_mr(b.pd, dm, 4096, 4, ALL | IBV_ACCESS_ZERO_BASED), EINVAL);
    struct ibv_mr *mr = ibv_reg_dm_mr(b.pd, dm, 64, 256, ALL | IBV_ACCESS_ZERO_BASED);
    MUST(mr);
    CHECK(ibv_free_dm(dm) == EBUSY);
    /* A Write to address 0 of the region, and an atomic after it. */
    memcpy(a.buf, "device!", 8);
    struct ibv_sge sge = part(&a, 0, 8);
    struct ibv_send_wr wr = request(1, IBV_WR_RDMA_WRITE, &sge, 1);
    wr.wr.rdma.rkey = mr->rkey;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    char copy[8];
    CHECK(ibv_memcpy_from_dm(copy, dm, 64, 8) == 0 && !memcmp(copy, "device!", 8));
    uint64_t forty = 40;
    CHECK(ibv_memcpy_to_dm(dm, 64 + 8, &forty, 8) == 0);
    wr = request(2, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
    wr.wr.atomic.rkey = mr->rkey;
    wr.wr.atomic.remote_addr = 8;
    wr.wr.atomic.compare_add = 2;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS && *(uint64_t *)a.buf == 40);
    CHECK(ibv_memcpy_from_dm(&forty, dm, 72, 8) == 0 && forty == 42);
    CHECK(ibv_memcpy_from_dm(copy, dm, 1, 4) == EINVAL && ibv_memcpy_from_dm(copy, dm, 4096, 4) == EINVAL);
    CHECK(ibv_memcpy_to_dm(dm, 4092, copy, 8) == EINVAL && ibv_memcpy_to_dm(dm, UINT64_MAX - 3, copy, 4) == EINVAL);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_free_dm(dm) == 0 && ibv_free_dm(dm) == EINVAL);
    pair_close(&a, &b);
}

static void overrun(void) {
    struct half a, b;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    MUST(ibv_destroy_qp(b.qp) == 0 && ibv_destroy_cq(b.rcq) == 0);
    MUST(b.rcq = ibv_create_cq(b.context, 2, &b, b.channel, 0));
    struct ibv_qp_init_attr init = attributes(&b);
    MUST(b.qp = ibv_create_qp(b.pd, &init));
    join(&a, &b);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
    for (int i = 0; i < 4; i++) receive(&b, i, 0, 0);
    for (int i = 0; i < 4; i++) CHECK(post(&a, &wr) == 0);
    struct ibv_async_event event;
    MUST(readable(b.context->async_fd, 10000));
    CHECK(ibv_get_async_event(b.context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == b.rcq);
    /* Completions that had room are still returned. */
    struct ibv_wc wc[8];
    CHECK(completion(b.rcq).wr_id == 0 && completion(b.rcq).wr_id == 1);
    time_t end = time(NULL) + 20;
    int n;
    while ((n = ibv_poll_cq(b.rcq, 8, wc)) == 0) MUST(time(NULL) < end);
    CHECK(n < 0);
    ibv_ack_async_event(&event);
    pair_close(&a, &b);
}

/* A place in a queue is free when the completion has been polled: posting until ENOMEM does not overrun a completion queue of the same size. */
static void places(void) {
    struct half a, b;
    struct ibv_wc wc[16];
    for (int kind = 0; kind < 3; kind++) {
        half_open(&a, "weft_ib0", 0);
        half_open(&b, "weft_ib0", 0);
        MUST(ibv_destroy_qp(a.qp) == 0 && ibv_destroy_cq(a.scq) == 0 && ibv_destroy_cq(a.rcq) == 0);
        MUST(a.scq = ibv_create_cq(a.context, 16, &a, a.channel, 0));
        MUST(a.rcq = ibv_create_cq(a.context, 16, &a, a.channel, 0));
        struct ibv_qp_init_attr init = attributes(&a);
        MUST(a.qp = ibv_create_qp(a.pd, &init));
        join(&a, &b);
        struct ibv_sge sge = part(&a, 0, 64);
        struct ibv_send_wr wr = request(1, kind == 0 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND, &sge, 1), *bad;
        aim(&wr, &b, 0);
        int posted = 0, result = 0;
        time_t end = time(NULL) + 20;
        for (int round = 0; round < 3; round++) {
            /* The first two kinds wait until what was posted is done; each fourth of the last kind has a completion. */
            for (posted = 0; posted < 100; posted++) {
                if (kind == 1 && posted < 16) receive(&b, posted, 0, 64);
                if (kind == 2) {
                    receive(&b, posted, 0, 64);
                    wr.send_flags = posted % 4 == 3 ? IBV_SEND_SIGNALED : 0;
                }
                if ((result = ibv_post_send(a.qp, &wr, &bad))) break;
                if (kind != 0) completion(b.rcq);
                usleep(1000);
            }
            CHECK(posted == 16 && result == ENOMEM);
            if (kind == 2) {
                /* The fourth one's completion frees four. */
                CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
                wr.send_flags = IBV_SEND_SIGNALED;
                for (int i = 0; i < 4; i++) {
                    if (i) receive(&b, i, 0, 64);
                    CHECK(ibv_post_send(a.qp, &wr, &bad) == 0);
                    completion(b.rcq);
                }
                CHECK(ibv_post_send(a.qp, &wr, &bad) == ENOMEM);
            }
            for (int got = 0; got < (kind == 2 ? 7 : 16);) {
                int n = ibv_poll_cq(a.scq, 5, wc);
                MUST(n >= 0 && time(NULL) < end);
                for (int i = 0; i < n; i++) CHECK(wc[i].status == IBV_WC_SUCCESS);
                got += n;
            }
            CHECK(ibv_poll_cq(a.scq, 16, wc) == 0);
            if (kind == 2) break;
        }
        /* The same for receives. */
        while (ibv_poll_cq(b.rcq, 16, wc) > 0) continue;
        struct ibv_sge into = part(&a, 64, 64);
        struct ibv_recv_wr rwr = {.wr_id = 1, .sg_list = &into, .num_sge = 1}, *bad_recv;
        for (posted = 0; posted < 100; posted++) {
            if ((result = ibv_post_recv(a.qp, &rwr, &bad_recv))) break;
            struct ibv_sge from = part(&b, 0, 64);
            struct ibv_send_wr back = request(1, IBV_WR_SEND, &from, 1);
            CHECK(post(&b, &back) == 0 && completion(b.scq).status == IBV_WC_SUCCESS);
        }
        CHECK(posted == 16 && result == ENOMEM);
        for (int got = 0; got < 16; got++) CHECK(completion(a.rcq).status == IBV_WC_SUCCESS);
        CHECK(ibv_post_recv(a.qp, &rwr, &bad_recv) == 0);
        /* A queue pair that is reset has all its places. */
        CHECK(to_state(a.qp, IBV_QPS_RESET) == 0 && to_init(a.qp) == 0);
        for (posted = 0; posted < 16; posted++) CHECK(ibv_post_recv(a.qp, &rwr, &bad_recv) == 0);
        CHECK(ibv_post_recv(a.qp, &rwr, &bad_recv) == ENOMEM);
        pair_close(&a, &b);
    }
}

static int set_access(struct ibv_qp *qp, unsigned flags) {
    struct ibv_qp_attr attr = {.qp_access_flags = flags};
    return ibv_modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS);
}

/* The status of a remote operation when the peer's queue pair has these rights, and its region all of them. */
static enum ibv_wc_status attempt(unsigned flags, unsigned later, enum ibv_wr_opcode opcode) {
    struct half a, b;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = flags};
    CHECK(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    MUST(to_init(a.qp) == 0);
    MUST(to_rtr(a.qp, b.qp->qp_num) == 0 && to_rtr(b.qp, a.qp->qp_num) == 0);
    MUST(to_rts(a.qp) == 0 && to_rts(b.qp) == 0);
    receive(&b, 1, 0, 8);
    struct ibv_sge sge = part(&a, 8, 8);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
    if (later != flags) CHECK(set_access(b.qp, later) == 0);
    wr = request(2, opcode, &sge, 1);
    aim(&wr, &b, 64);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)b.buf + 64;
        wr.wr.atomic.rkey = b.mr->rkey;
        wr.wr.atomic.compare_add = 1;
    }
    CHECK(post(&a, &wr) == 0);
    enum ibv_wc_status status = completion(a.scq).status;
    pair_close(&a, &b);
    return status;
}

static void rights(void) {
    static const struct {
        enum ibv_wr_opcode opcode;
        unsigned flag;
    } kinds[] = {{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
                 {IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ},
                 {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC}};
    for (int i = 0; i < 3; i++) {
        CHECK(attempt(ALL, ALL, kinds[i].opcode) == IBV_WC_SUCCESS);
        CHECK(attempt(0, 0, kinds[i].opcode) == IBV_WC_REM_ACCESS_ERR);
        CHECK(attempt(IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE, kinds[i].opcode) == IBV_WC_REM_ACCESS_ERR);
        CHECK(attempt(ALL, IBV_ACCESS_LOCAL_WRITE, kinds[i].opcode) == IBV_WC_REM_ACCESS_ERR);
        CHECK(attempt(0, kinds[i].flag, kinds[i].opcode) == IBV_WC_SUCCESS);
    }
    /* One kind and not the others, also taken away later: in shared memory and where the device carries it out. */
    for (int over_tcp = 0; over_tcp < 2; over_tcp++) {
        pid_t child = fork();
        if (child == 0) {
            failures = 0;
            if (over_tcp) setenv("WEFT_LOCAL", "off", 1);
            for (int i = 0; i < 3; i++) {
                unsigned rest = ALL & ~kinds[i].flag;
                CHECK(attempt(kinds[i].flag, kinds[i].flag, kinds[i].opcode) == IBV_WC_SUCCESS);
                CHECK(attempt(rest, rest, kinds[i].opcode) == IBV_WC_REM_ACCESS_ERR);
                CHECK(attempt(ALL, rest, kinds[i].opcode) == IBV_WC_REM_ACCESS_ERR);
                CHECK(attempt(rest, ALL, kinds[i].opcode) == IBV_WC_SUCCESS);
            }
            _exit(failures);
        }
        int status = -1;
        MUST(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

#define RESTS 1000

struct sender {
    struct half *h;
    struct ibv_ah *ah;
    pthread_barrier_t turn;
};

static void *post_datagrams(void *arg) {
    struct sender *s = arg;
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0), *bad;
    wr.wr.ud.ah = s->ah;
    wr.wr.ud.remote_qpn = 0xfffffe;
    for (int i = 0; i < RESTS; i++) {
        pthread_barrier_wait(&s->turn);
        for (int k = 0; k < 16; k++) CHECK(ibv_post_send(s->h->qp, &wr, &bad) == 0);
        pthread_barrier_wait(&s->turn);
        for (int k = 0; k < 16; k++) CHECK(completion(s->h->scq).status == IBV_WC_SUCCESS);
    }
    return NULL;
}

/* Datagrams that are posted while the send queue is drained and resumes do not stay in it. */
static void resting(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    MUST(ibv_destroy_qp(h.qp) == 0);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_UD;
    MUST(h.qp = ibv_create_qp(h.pd, &init));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
    MUST(ibv_modify_qp(h.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
    MUST(to_state(h.qp, IBV_QPS_RTR) == 0);
    attr.qp_state = IBV_QPS_RTS;
    MUST(ibv_modify_qp(h.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
    struct ibv_ah_attr way = rtr_attr(h.context, 0).ah_attr;
    struct sender sender = {.h = &h, .ah = ibv_create_ah(h.pd, &way)};
    MUST(sender.ah);
    pthread_t thread;
    MUST(pthread_barrier_init(&sender.turn, NULL, 2) == 0);
    MUST(pthread_create(&thread, NULL, post_datagrams, &sender) == 0);
    for (int i = 0; i < RESTS; i++) {
        pthread_barrier_wait(&sender.turn);
        for (int k = 0; k <= i % 16; k++) CHECK(to_state(h.qp, IBV_QPS_SQD) == 0 && to_state(h.qp, IBV_QPS_RTS) == 0);
        pthread_barrier_wait(&sender.turn);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    /* A request that can never be sent is refused at once, and takes no place. */
    MUST(to_state(h.qp, IBV_QPS_SQD) == 0);
    struct ibv_sge sge = part(&h, 0, 4097);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    wr.wr.ud.ah = sender.ah;
    wr.wr.ud.remote_qpn = 0xfffffe;
    for (int i = 0; i < 40; i++) {
        wr.opcode = i % 2 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
        CHECK(post(&h, &wr) == EINVAL);
    }
    wr.opcode = IBV_WR_SEND;
    sge.length = 4096;
    CHECK(post(&h, &wr) == 0 && to_state(h.qp, IBV_QPS_RTS) == 0 && completion(h.scq).status == IBV_WC_SUCCESS);
    /* A program that polls and posts a burst is told that its queue is drained. */
    sge.length = 64;
    for (int i = 0; i < 200; i++) {
        struct ibv_wc wc;
        for (int k = 0; k < 4; k++) CHECK(ibv_poll_cq(h.scq, 1, &wc) == 0);
        for (int k = 0; k < 8; k++) CHECK(post(&h, &wr) == 0);
        struct ibv_qp_attr rest = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
        MUST(ibv_modify_qp(h.qp, &rest, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
        struct pollfd told = {.fd = h.context->async_fd, .events = POLLIN};
        MUST(poll(&told, 1, 5000) == 1);
        struct ibv_async_event event;
        MUST(ibv_get_async_event(h.context, &event) == 0);
        CHECK(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == h.qp);
        ibv_ack_async_event(&event);
        for (int k = 0; k < 8; k++) CHECK(completion(h.scq).status == IBV_WC_SUCCESS);
        CHECK(to_state(h.qp, IBV_QPS_RTS) == 0);
    }
    CHECK(ibv_destroy_ah(sender.ah) == 0);
    half_close(&h);
}

/* The remaining completions of a destroyed queue pair are discarded, and those of others stay. */
static void cleaned(void) {
    struct half a;
    half_open(&a, "weft_ib0", 0);
    struct ibv_qp_init_attr init = attributes(&a);
    init.recv_cq = a.scq;
    struct ibv_qp *other = ibv_create_qp(a.pd, &init);
    MUST(other && to_init(a.qp) == 0 && to_init(other) == 0);
    struct ibv_recv_wr rwr = {.wr_id = 0}, *bad;
    struct ibv_wc wc[16];
    for (int destroy = 0; destroy < 2; destroy++) {
        CHECK(ibv_destroy_qp(a.qp) == 0);
        MUST(a.qp = ibv_create_qp(a.pd, &init));
        CHECK(to_init(a.qp) == 0);
        for (int i = 0; i < 8; i++) {
            rwr.wr_id = i;
            CHECK(ibv_post_recv(i % 2 ? other : a.qp, &rwr, &bad) == 0);
        }
        CHECK(to_state(a.qp, IBV_QPS_ERR) == 0 && to_state(other, IBV_QPS_ERR) == 0);
        if (destroy) {
            CHECK(ibv_destroy_qp(a.qp) == 0);
        } else {
            CHECK(to_state(a.qp, IBV_QPS_RESET) == 0);
        }
        CHECK(ibv_poll_cq(a.scq, 3, wc) == 3 && wc[0].wr_id == 1 && wc[1].wr_id == 3 && wc[2].wr_id == 5);
        CHECK(wc[0].qp_num == other->qp_num && wc[0].status == IBV_WC_WR_FLUSH_ERR);
        CHECK(ibv_poll_cq(a.scq, 1, wc) == 1 && wc[0].wr_id == 7 && ibv_poll_cq(a.scq, 1, wc) == 0);
        CHECK(to_state(other, IBV_QPS_RESET) == 0 && to_init(other) == 0);
        if (destroy) MUST(a.qp = ibv_create_qp(a.pd, &init));
    }
    /* So the queue is never full of the dead. */
    for (int i = 0; i < 20; i++) {
        struct ibv_qp *qp = ibv_create_qp(a.pd, &init);
        MUST(qp && to_init(qp) == 0);
        for (int k = 0; k < 16; k++) CHECK(ibv_post_recv(qp, &rwr, &bad) == 0);
        CHECK(to_state(qp, IBV_QPS_ERR) == 0 && ibv_destroy_qp(qp) == 0);
    }
    CHECK(ibv_poll_cq(a.scq, 16, wc) == 0);
    CHECK(ibv_destroy_qp(other) == 0);
    half_close(&a);
}

static void extended_queues(void) {
    struct half a, b;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    MUST(ibv_destroy_qp(b.qp) == 0 && ibv_destroy_cq(b.rcq) == 0);
    struct ibv_cq_init_attr_ex attr = {.cqe = 32,
                                       .cq_context = &b,
                                       .channel = b.channel,
                                       .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                                                   IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
    struct ibv_cq_ex *cq = ibv_create_cq_ex(b.context, &attr);
    MUST(cq);
    attr.wc_flags = IBV_WC_EX_WITH_CVLAN;
    NO(ibv_create_cq_ex(b.context, &attr), EOPNOTSUPP);
    attr.wc_flags = 0;
    attr.comp_mask = 1 << 12;
    NO(ibv_create_cq_ex(b.context, &attr), EOPNOTSUPP);
    b.rcq = ibv_cq_ex_to_cq(cq);
    struct ibv_qp_init_attr init = attributes(&b);
    MUST(b.qp = ibv_create_qp(b.pd, &init));
    join(&a, &b);
    struct ibv_poll_cq_attr poll_attr = {0};
    CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);
    receive(&b, 31, 0, 64);
    receive(&b, 32, 0, 64);
    struct ibv_sge sge = part(&a, 0, 32);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, &sge, 1);
    CHECK(post(&a, &wr) == 0);
    wr = request(2, IBV_WR_RDMA_WRITE_WITH_IMM, &sge, 1);
    wr.imm_data = 0x11223344;
    aim(&wr, &b, 0);
    CHECK(post(&a, &wr) == 0);
    CHECK(completion(a.scq).status == IBV_WC_SUCCESS && completion(a.scq).status == IBV_WC_SUCCESS);
    time_t end = time(NULL) + 20;
    while (ibv_start_poll(cq, &poll_attr) == ENOENT) MUST(time(NULL) < end);
    CHECK(cq->wr_id == 31 && cq->status == IBV_WC_SUCCESS && ibv_wc_read_opcode(cq) == IBV_WC_RECV);
    CHECK(ibv_wc_read_byte_len(cq) == 32 && ibv_wc_read_qp_num(cq) == b.qp->qp_num && ibv_wc_read_wc_flags(cq) == 0);
    CHECK(ibv_wc_read_vendor_err(cq) == 0 && ibv_wc_read_slid(cq) == 0 && ibv_wc_read_sl(cq) == 0);
    uint64_t first = ibv_wc_read_completion_ts(cq);
    CHECK(first > 0 && ibv_wc_read_completion_wallclock_ns(cq) / 1000000000 + 100 > (uint64_t)time(NULL));
    int next;
    while ((next = ibv_next_poll(cq)) == ENOENT) MUST(time(NULL) < end);
    CHECK(next == 0 && cq->wr_id == 32 && ibv_wc_read_opcode(cq) == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM && ibv_wc_read_imm_data(cq) == 0x11223344);
    CHECK(ibv_wc_read_completion_ts(cq) >= first);
    CHECK(ibv_next_poll(cq) == ENOENT);
    ibv_end_poll(cq);
    poll_attr.comp_mask = 1;
    CHECK(ibv_start_poll(cq, &poll_attr) == EINVAL);
    /* The plain call works on it too. */
    struct ibv_wc wc;
    CHECK(ibv_poll_cq(b.rcq, 1, &wc) == 0);
    pair_close(&a, &b);
    poll_attr.comp_mask = 0;
    CHECK(ibv_start_poll(cq, &poll_attr) == EINVAL);
}

static struct ibv_qp *extended_pair(struct half *h, uint64_t ops) {
    struct ibv_qp_init_attr_ex ex;
    memset(&ex, 0, sizeof ex);
    struct ibv_qp_init_attr init = attributes(h);
    memcpy(&ex, &init, offsetof(struct ibv_qp_init_attr, sq_sig_all) + sizeof(int));
    ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    ex.pd = h->pd;
    ex.send_ops_flags = ops;
    return ibv_create_qp_ex(h->context, &ex);
}

static void extended_pairs(void) {
    struct half a, b;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    NO(extended_pair(&a, IBV_QP_EX_WITH_TSO), EOPNOTSUPP);
    MUST(ibv_destroy_qp(a.qp) == 0);
    MUST(a.qp = extended_pair(&a, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
                                      IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_IMM));
    struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(a.qp);
    MUST(qpx);
    CHECK(qpx->wr_atomic_cmp_swp == NULL);
    join(&a, &b);
    memcpy(a.buf, "extended", 8);
    receive(&b, 1, 100, 16);
    ibv_wr_start(qpx);
    qpx->wr_id = 5;
    qpx->wr_flags = 0;
    ibv_wr_rdma_write(qpx, b.mr->rkey, (uintptr_t)b.buf);
    ibv_wr_set_sge(qpx, a.mr->lkey, (uintptr_t)a.buf, 8);
    qpx->wr_id = 6;
    qpx->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_send(qpx);
    ibv_wr_set_inline_data(qpx, "data", 4);
    CHECK(ibv_wr_complete(qpx) == 0);
    struct ibv_wc wc = completion(b.rcq);
    CHECK(wc.byte_len == 4 && !memcmp(b.buf + 100, "data", 4) && !memcmp(b.buf, "extended", 8));
    CHECK(completion(a.scq).wr_id == 6);
    /* An aborted list is not sent, and neither is a list with an error. */
    ibv_wr_start(qpx);
    ibv_wr_send(qpx);
    ibv_wr_abort(qpx);
    ibv_wr_start(qpx);
    ibv_wr_send(qpx);
    char big[5000] = {0};
    ibv_wr_set_inline_data(qpx, big, sizeof big);
    CHECK(ibv_wr_complete(qpx) == EINVAL);
    ibv_wr_start(qpx);
    for (int i = 0; i < 17; i++) ibv_wr_send(qpx);
    CHECK(ibv_wr_complete(qpx) == ENOMEM);
    usleep(10000);
    CHECK(ibv_poll_cq(a.scq, 1, &wc) == 0);
    *(uint64_t *)(b.buf + 8) = 5;
    ibv_wr_start(qpx);
    qpx->wr_id = 7;
    ibv_wr_atomic_fetch_add(qpx, b.mr->rkey, (uintptr_t)b.buf + 8, 3);
    struct ibv_sge sge = part(&a, 64, 8);
    ibv_wr_set_sge_list(qpx, 1, &sge);
    qpx->wr_id = 8;
    ibv_wr_rdma_read(qpx, b.mr->rkey, (uintptr_t)b.buf + 8);
    ibv_wr_set_sge(qpx, a.mr->lkey, (uintptr_t)a.buf + 72, 8);
    CHECK(ibv_wr_complete(qpx) == 0);
    CHECK(completion(a.scq).wr_id == 7 && completion(a.scq).wr_id == 8);
    CHECK(*(uint64_t *)(a.buf + 64) == 5 && *(uint64_t *)(a.buf + 72) == 8);
    receive(&b, 2, 100, 16);
    ibv_wr_start(qpx);
    ibv_wr_send_imm(qpx, 0x55667788);
    struct ibv_data_buf bufs[2] = {{"ab", 2}, {"cd", 2}};
    ibv_wr_set_inline_data_list(qpx, 2, bufs);
    CHECK(ibv_wr_complete(qpx) == 0);
    wc = completion(b.rcq);
    CHECK(wc.byte_len == 4 && wc.imm_data == 0x55667788 && !memcmp(b.buf + 100, "abcd", 4));
    CHECK(completion(a.scq).status == IBV_WC_SUCCESS);
    pair_close(&a, &b);
    ibv_wr_start(qpx);
    ibv_wr_send(qpx);
    CHECK(ibv_wr_complete(qpx) == EINVAL);
}

/* Objects of one kind in the place of another one, and addresses of nothing. */
static void strangers(void) {
    struct half h;
    half_open(&h, "weft_ib0", 1);
    void *wrong[] = {NULL, (void *)8, (void *)-16, &h, h.context, h.pd, h.channel, h.scq, h.srq, h.qp, h.mr, (char *)h.qp + 1};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init = attributes(&h);
    struct ibv_srq_attr srq_attr;
    struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 1}};
    struct ibv_cq *cq;
    struct ibv_async_event event;
    void *context;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        void *it = wrong[i];
        if (it != h.qp) {
            CHECK(ibv_destroy_qp(it) == EINVAL && ibv_modify_qp(it, &attr, 0) == EINVAL && ibv_query_qp(it, &attr, 0, &init) == EINVAL);
            CHECK(ibv_qp_to_qp_ex(it) == NULL);
        }
        if (it != h.scq) CHECK(ibv_destroy_cq(it) == EINVAL && ibv_resize_cq(it, 10) == EINVAL);
        if (it != h.srq) CHECK(ibv_destroy_srq(it) == EINVAL && ibv_query_srq(it, &srq_attr) == EINVAL);
        if (it != h.mr) CHECK(ibv_dereg_mr(it) == EINVAL && ibv_rereg_mr(it, 1, NULL, &h, 1, 0) == -1);
        if (it != h.pd) {
            CHECK(ibv_dealloc_pd(it) == EINVAL);
            NO(ibv_reg_mr(it, &h, 1, 0), EINVAL);
            NO(ibv_create_qp(it, &init), EINVAL);
            NO(ibv_create_srq(it, &srq_init), EINVAL);
        }
        if (it != h.channel) {
            CHECK(ibv_destroy_comp_channel(it) == EINVAL);
            MINUS(ibv_get_cq_event(it, &cq, &context), EINVAL);
        }
        if (it != h.context) {
            CHECK(ibv_close_device(it) == EINVAL && ibv_query_device(it, NULL) == EINVAL);
            NO(ibv_alloc_pd(it), EINVAL);
            NO(ibv_create_cq(it, 1, NULL, NULL, 0), EINVAL);
            NO(ibv_create_comp_channel(it), EINVAL);
            MINUS(ibv_get_async_event(it, &event), EINVAL);
        }
        ibv_ack_cq_events(it == h.scq ? NULL : it, 1);
        event.event_type = IBV_EVENT_QP_FATAL;
        event.element.qp = it == h.qp ? NULL : it;
        ibv_ack_async_event(&event);
    }
    half_close(&h);
}

static void many(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    enum { COUNT = 600 };
    static struct ibv_qp *qps[COUNT];
    static struct ibv_mr *mrs[COUNT];
    struct ibv_qp_init_attr init = attributes(&h);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) {
            MUST(qps[i] = ibv_create_qp(h.pd, &init));
            MUST(mrs[i] = ibv_reg_mr(h.pd, h.buf + i, 1, 0));
        }
        for (int i = 0; i < COUNT; i++) {
            for (int k = i + 1; k < i + 5 && k < COUNT; k++) CHECK(qps[i]->qp_num != qps[k]->qp_num);
            CHECK(ibv_destroy_qp(qps[i]) == 0 && ibv_dereg_mr(mrs[i]) == 0);
        }
    }
    half_close(&h);
}

static void forks(void) {
    struct half a, b;
    pair_open(&a, &b);
    pid_t child = fork();
    if (child == 0) {
        /* The parent's objects are not the child's, and the child makes its own. */
        failures = 0;
        struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0), *bad;
        struct ibv_wc wc;
        CHECK(ibv_post_send(a.qp, &wr, &bad) == EINVAL && ibv_poll_cq(a.scq, 1, &wc) < 0);
        CHECK(ibv_destroy_qp(a.qp) == EINVAL && ibv_dereg_mr(a.mr) == EINVAL && ibv_close_device(a.context) == EINVAL);
        struct half c, d;
        pair_open(&c, &d);
        receive(&d, 1, 0, 0);
        CHECK(post(&c, &wr) == 0 && completion(d.rcq).wr_id == 1 && completion(c.scq).wr_id == 1);
        pair_close(&c, &d);
        _exit(failures);
    }
    int status = -1;
    MUST(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    receive(&b, 1, 0, 0);
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
    CHECK(post(&a, &wr) == 0 && completion(b.rcq).wr_id == 1 && completion(a.scq).wr_id == 1);
    pair_close(&a, &b);
}

/* membarrier(2) fails from now on. */
static void filter_barriers(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* An object that other threads may be in is not freed without the barrier: the process ends, and says why. */
static void filtered(void) {
    int ends[2], status = -1;
    char text[512] = "";
    fflush(NULL);
    MUST(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        struct half a, b;
        pair_open(&a, &b);
        struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0);
        MUST(post(&a, &wr) == 0);
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        dup2(ends[1], 2);
        filter_barriers();
        ibv_destroy_qp(a.qp);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got, at = 0; (got = read(ends[0], text + at, sizeof text - 1 - at)) > 0;) at += got;
    close(ends[0]);
    MUST(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(strstr(text, "weft: ") && strstr(text, "membarrier"));
}

struct racer {
    struct half *h;
    int stop;
};

static void *poster(void *arg) {
    struct racer *racer = arg;
    struct ibv_send_wr wr = request(1, IBV_WR_SEND, NULL, 0), *bad;
    struct ibv_wc wc;
    while (!__atomic_load_n(&racer->stop, __ATOMIC_RELAXED)) {
        ibv_post_send(racer->h->qp, &wr, &bad);
        ibv_poll_cq(racer->h->scq, 1, &wc);
    }
    return NULL;
}

/* A thread that continues to use objects that another thread resets and destroys. */
/* Posts receives while another thread moves the queue pair on from INIT. */
enum { EARLY = 12 };

static void *early_receiver(void *arg) {
    for (int i = 0; i < EARLY; i++) {
        receive(arg, i, i * 64, 64);
        if (i % 4 == 3) usleep(200);
    }
    return NULL;
}

/* Receives that are posted in INIT are taken in their order, whichever side moves first, again after RESET, and are flushed in their order. */
static void early_receives(void) {
    unsigned seed = (unsigned)getpid();
    for (int round = 0; round < 24; round++) {
        struct half a, b;
        half_open(&a, "weft_ib0", 0);
        half_open(&b, "weft_ib0", round % 3 == 2);
        for (int again = 0; again < 2; again++) {
            CHECK(to_init(a.qp) == 0 && to_init(b.qp) == 0);
            pthread_t thread;
            MUST(pthread_create(&thread, NULL, early_receiver, &b) == 0);
            usleep(rand_r(&seed) % 400);
            struct half *first = rand_r(&seed) % 2 ? &a : &b, *second = first == &a ? &b : &a;
            CHECK(to_rtr(first->qp, second->qp->qp_num) == 0);
            if (rand_r(&seed) % 2) CHECK(to_rts(first->qp) == 0);
            CHECK(to_rtr(second->qp, first->qp->qp_num) == 0);
            CHECK(to_rts(second->qp) == 0);
            if (state_of(first->qp) == IBV_QPS_RTR) CHECK(to_rts(first->qp) == 0);
            MUST(pthread_join(thread, NULL) == 0);
            for (int i = 0; i < EARLY; i++) {
                memset(a.buf, i + 1, 64);
                struct ibv_sge sge = part(&a, 0, 64);
                struct ibv_send_wr wr = request(i, IBV_WR_SEND, &sge, 1);
                CHECK(post(&a, &wr) == 0 && completion(a.scq).status == IBV_WC_SUCCESS);
                struct ibv_wc wc = completion(b.rcq);
                CHECK(wc.status == IBV_WC_SUCCESS && wc.wr_id == (uint64_t)i && wc.byte_len == 64 && wc.qp_num == b.qp->qp_num);
                CHECK(b.buf[i * 64] == i + 1 && b.buf[i * 64 + 63] == i + 1);
            }
            if (again == 0) CHECK(to_state(a.qp, IBV_QPS_RESET) == 0 && to_state(b.qp, IBV_QPS_RESET) == 0);
        }
        if (!b.srq) {
            for (int i = 0; i < 3; i++) receive(&b, 100 + i, 0, 64);
            CHECK(to_state(b.qp, IBV_QPS_ERR) == 0);
            for (int i = 0; i < 3; i++) {
                struct ibv_wc wc = completion(b.rcq);
                CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 100u + i);
            }
        }
        half_close(&a);
        half_close(&b);
    }
}

static void races(void) {
    struct half a, b;
    pair_open(&a, &b);
    struct racer racer = {&a, 0};
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, poster, &racer) == 0);
    for (int i = 0; i < 20; i++) {
        CHECK(to_state(a.qp, IBV_QPS_ERR) == 0 && to_state(a.qp, IBV_QPS_RESET) == 0);
        CHECK(to_init(a.qp) == 0 && to_rtr(a.qp, b.qp->qp_num) == 0 && to_rts(a.qp) == 0);
    }
    CHECK(ibv_destroy_qp(a.qp) == 0 && ibv_destroy_cq(a.scq) == 0);
    usleep(10000);
    __atomic_store_n(&racer.stop, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(ibv_destroy_cq(a.rcq) == 0 && ibv_destroy_comp_channel(a.channel) == 0 && ibv_dereg_mr(a.mr) == 0);
    CHECK(ibv_dealloc_pd(a.pd) == 0 && ibv_close_device(a.context) == 0);
    free(a.buf);
    half_close(&b);
}

/* Newer programs set these two on each queue pair (IBV_ACCESS_FLUSH_GLOBAL, IBV_ACCESS_FLUSH_PERSISTENT). */
static void flush_rights(void) {
    const unsigned flags = ALL | 1 << 8 | 1 << 9;
    for (int which = 0; which < 2; which++) {
        struct half h;
        half_open(&h, which ? "weft_ib0" : "weft0", 0);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = flags};
        const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        CHECK(ibv_modify_qp(h.qp, &attr, mask) == 0);
        struct ibv_qp_init_attr init;
        CHECK(ibv_query_qp(h.qp, &attr, IBV_QP_ACCESS_FLAGS, &init) == 0 && attr.qp_access_flags == flags);
        half_close(&h);
    }
}

static const struct named_case cases[] = {{"devices", devices},
             {"attrs", attrs},
             {"domains", domains},
             {"memory", memory},
             {"implicit", implicit},
             {"queues", queues},
             {"addresses", addresses},
             {"new_addresses", new_addresses},
             {"many_queues", many_queues},
             {"many_pairs", many_pairs},
             {"errnos", errnos},
             {"limits", limits},
             {"pairs", pairs},
             {"datagrams", datagrams},
             {"long_datagrams", long_datagrams},
             {"traffic_classes", traffic_classes},
             {"groups", groups},
             {"transitions", transitions},
             {"transfers", transfers},
             {"unreliable", unreliable},
             {"refusals", refusals},
             {"faults", faults},
             {"shared_receives", shared_receives},
             {"windows", windows},
             {"windows_of_a_domain", windows_of_a_domain},
             {"invalid_requests", invalid_requests},
             {"domain_of_shared_receives", domain_of_shared_receives},
             {"written_lengths", written_lengths},
             {"receiver_not_ready", receiver_not_ready},
             {"every_kind_waits_for_its_receive", every_kind_waits_for_its_receive},
             {"completion_events", completion_events},
             {"cancelled", cancelled},
             {"domains_by_file", domains_by_file},
             {"xrc_as_told", xrc_as_told},
             {"xrc", xrc},
             {"opened", opened},
             {"counter_values", counter_values},
             {"counted", counted},
             {"counted_datagrams", counted_datagrams},
             {"imports", imports},
             {"device_memory", device_memory},
             {"overrun", overrun},
             {"places", places},
             {"cleaned", cleaned},
             {"rights", rights},
             {"flush_rights", flush_rights},
             {"resting", resting},
             {"extended_queues", extended_queues},
             {"extended_pairs", extended_pairs},
             {"strangers", strangers},
             {"many", many},
             {"forks", forks},
             {"filtered", filtered},
             {"early_receives", early_receives}, {"races", races}};

int main(int argc, char **argv) {
    return run_cases(cases, sizeof cases / sizeof *cases, argc, argv);
}
