/* What the devices can do and cannot: for each call a line `CALL | weft0 | weft_ib0` of docs/verbs-reference.md, with the errno or "yes". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct on {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
};

/* Of later headers than Debian 12's. */
struct ibv_comp_cntr_init_attr {
    uint32_t comp_mask, type, flags;
};
struct ibv_comp_cntr;
struct ibv_buf;
struct ibv_comp_cntr *ibv_create_comp_cntr(struct ibv_context *, struct ibv_comp_cntr_init_attr *);
int ibv_query_port_speed(struct ibv_context *, uint32_t, uint64_t *);
void *ibv_alloc_buf(struct ibv_pd *, size_t, struct ibv_buf **);
int ibv_export_buf_dmabuf_fd(struct ibv_buf *);
int ibv_dm_export_dmabuf_fd(struct ibv_dm *);
void *ibv_alloc_dmah(struct ibv_context *, void *);

#define GOT(pointer) ((pointer) ? 0 : errno)

static int queue_pair(struct on *on, enum ibv_qp_type type, uint32_t flags) {
    struct ibv_qp_init_attr_ex ex = {
        .send_cq = on->cq, .recv_cq = on->cq, .qp_type = type, .pd = on->pd, .comp_mask = IBV_QP_INIT_ATTR_PD};
    if (flags) {
        ex.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
        ex.create_flags = flags;
    }
    return GOT(ibv_create_qp_ex(on->context, &ex));
}

static int rc(struct on *on) { return queue_pair(on, IBV_QPT_RC, 0); }
static int uc(struct on *on) { return queue_pair(on, IBV_QPT_UC, 0); }
static int ud(struct on *on) { return queue_pair(on, IBV_QPT_UD, 0); }
static int deaf(struct on *on) { return queue_pair(on, IBV_QPT_UD, IBV_QP_CREATE_BLOCK_SELF_MCAST_LB); }
static int xrc_send(struct on *on) { return queue_pair(on, IBV_QPT_XRC_SEND, 0); }
static int raw(struct on *on) { return queue_pair(on, IBV_QPT_RAW_PACKET, 0); }
static int driver(struct on *on) { return queue_pair(on, IBV_QPT_DRIVER, 0); }

static struct ibv_xrcd *domain(struct on *on) {
    struct ibv_xrcd_init_attr attr = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
    return ibv_open_xrcd(on->context, &attr);
}

static int xrcd(struct on *on) { return GOT(domain(on)); }

static int open_qp(struct on *on) {
    struct ibv_xrcd *xrcd = domain(on);
    struct ibv_qp_init_attr_ex ex = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
    struct ibv_qp *target = xrcd ? ibv_create_qp_ex(on->context, &ex) : NULL;
    struct ibv_qp_open_attr attr = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                                    .qp_num = target ? target->qp_num : 2,
                                    .xrcd = xrcd,
                                    .qp_type = IBV_QPT_XRC_RECV};
    return GOT(ibv_open_qp(on->context, &attr));
}

static int srq(struct on *on) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 1, .max_sge = 1}};
    return GOT(ibv_create_srq(on->pd, &attr));
}

static int tags(struct on *on) {
    struct ibv_srq_init_attr_ex ex = {.attr = {.max_wr = 1, .max_sge = 1},
                                      .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ,
                                      .srq_type = IBV_SRQT_TM,
                                      .pd = on->pd,
                                      .cq = on->cq};
    return GOT(ibv_create_srq_ex(on->context, &ex));
}

static int modify(struct on *on) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    if (ibv_modify_qp(on->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return errno;
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = on->qp->qp_num,
                              .max_dest_rd_atomic = 1};
    rtr.ah_attr.is_global = 1;
    rtr.ah_attr.port_num = 1;
    ibv_query_gid(on->context, 1, 0, &rtr.ah_attr.grh.dgid);
    return ibv_modify_qp(on->qp, &rtr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int window(struct on *on) { return GOT(ibv_alloc_mw(on->pd, IBV_MW_TYPE_2)); }

static int null_mr(struct on *on) { return GOT(ibv_alloc_null_mr(on->pd)); }

static int device_memory(struct on *on) {
    struct ibv_alloc_dm_attr attr = {.length = 64};
    return GOT(ibv_alloc_dm(on->context, &attr));
}

static int export_dm(struct on *on) {
    struct ibv_alloc_dm_attr attr = {.length = 64};
    struct ibv_dm *dm = ibv_alloc_dm(on->context, &attr);
    return dm && ibv_dm_export_dmabuf_fd(dm) >= 0 ? 0 : errno;
}

static int dmabuf(struct on *on) { return GOT(ibv_reg_dmabuf_mr(on->pd, 0, 4096, 0, memfd_create("none", 0), 0)); }

static int buffer(struct on *on) {
    struct ibv_buf *buf;
    return GOT(ibv_alloc_buf(on->pd, 4096, &buf));
}

static int export_buffer(struct on *on) {
    struct ibv_buf *buf;
    return ibv_alloc_buf(on->pd, 4096, &buf) && ibv_export_buf_dmabuf_fd(buf) >= 0 ? 0 : errno;
}

static int dmah(struct on *on) { return GOT(ibv_alloc_dmah(on->context, NULL)); }

static int comp_cntr(struct on *on) {
    struct ibv_comp_cntr_init_attr attr = {0};
    return GOT(ibv_create_comp_cntr(on->context, &attr));
}

static int port_speed(struct on *on) {
    uint64_t speed;
    return ibv_query_port_speed(on->context, 1, &speed);
}

static int thread_domain(struct on *on) {
    struct ibv_td_init_attr attr = {0};
    return GOT(ibv_alloc_td(on->context, &attr));
}

static int parent_domain(struct on *on) {
    struct ibv_parent_domain_init_attr attr = {.pd = on->pd};
    return GOT(ibv_alloc_parent_domain(on->context, &attr));
}

static int imported(struct on *on) { return GOT(ibv_import_device(dup(on->context->cmd_fd))); }

static int imported_from_elsewhere(struct on *on) {
    (void)on;
    return GOT(ibv_import_device(memfd_create("nothing", 0)));
}

static int group(struct on *on) {
    union ibv_gid gid = {.raw = {0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3}};
    struct ibv_qp_init_attr_ex ex = {
        .send_cq = on->cq, .recv_cq = on->cq, .qp_type = IBV_QPT_UD, .pd = on->pd, .comp_mask = IBV_QP_INIT_ATTR_PD};
    struct ibv_qp *qp = ibv_create_qp_ex(on->context, &ex);
    return ibv_attach_mcast(qp ? qp : on->qp, &gid, 0);
}

static int flow(struct on *on) {
    struct ibv_flow_attr attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof attr, .port = 1};
    return GOT(ibv_create_flow(on->qp, &attr));
}

static int counters(struct on *on) {
    struct ibv_counters_init_attr attr = {0};
    return GOT(ibv_create_counters(on->context, &attr));
}

static int work_queue(struct on *on) {
    struct ibv_wq_init_attr attr = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = on->pd, .cq = on->cq};
    return GOT(ibv_create_wq(on->context, &attr));
}

static int pacing(struct on *on) {
    struct ibv_qp_rate_limit_attr attr = {.rate_limit = 1};
    return ibv_modify_qp_rate_limit(on->qp, &attr);
}

static int ece(struct on *on) {
    struct ibv_ece ece;
    return ibv_query_ece(on->qp, &ece);
}

static const struct {
    const char *call;
    int (*attempt)(struct on *);
} CALLS[] = {
    {"`ibv_create_qp`: RC", rc},
    {"UC", uc},
    {"UD", ud},
    {"UD with `IBV_QP_CREATE_BLOCK_SELF_MCAST_LB`", deaf},
    {"XRC", xrc_send},
    {"raw packets", raw},
    {"`IBV_QPT_DRIVER`", driver},
    {"`ibv_modify_qp` to RTR: queue pairs that are joined by number", modify},
    {"`ibv_create_srq`", srq},
    {"`ibv_create_srq_ex` with tag matching", tags},
    {"`ibv_open_xrcd`", xrcd},
    {"`ibv_open_qp`", open_qp},
    {"`ibv_attach_mcast`", group},
    {"`ibv_alloc_mw`", window},
    {"`ibv_alloc_null_mr`", null_mr},
    {"`ibv_alloc_td`", thread_domain},
    {"`ibv_alloc_parent_domain`", parent_domain},
    {"`ibv_alloc_dm`", device_memory},
    {"`ibv_dm_export_dmabuf_fd`", export_dm},
    {"`ibv_alloc_buf`", buffer},
    {"`ibv_export_buf_dmabuf_fd`", export_buffer},
    {"`ibv_reg_dmabuf_mr`", dmabuf},
    {"`ibv_alloc_dmah`", dmah},
    {"`ibv_create_comp_cntr`", comp_cntr},
    {"`ibv_query_port_speed`", port_speed},
    {"`ibv_import_device`", imported},
    {"`ibv_import_device` with a descriptor that is not a context's", imported_from_elsewhere},
    {"`ibv_create_flow`", flow},
    {"`ibv_create_counters`", counters},
    {"`ibv_create_wq`", work_queue},
    {"`ibv_modify_qp_rate_limit`", pacing},
    {"`ibv_query_ece`", ece},
};

static struct on open_on(const char *name) {
    struct on on = {0};
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int i = 0; list && list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) on.context = ibv_open_device(list[i]);
    if (on.context) on.pd = ibv_alloc_pd(on.context);
    if (on.pd) on.cq = ibv_create_cq(on.context, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {.send_cq = on.cq, .recv_cq = on.cq, .qp_type = IBV_QPT_RC};
    if (on.cq) on.qp = ibv_create_qp(on.pd, &init);
    if (!on.qp) exit(1);
    ibv_free_device_list(list);
    return on;
}

static const char *outcome(int error) {
    static char named[64];
    if (!error) return "yes";
    snprintf(named, sizeof named, "`%s`", strerrorname_np(error));
    /* One number, two names. */
    return error == EOPNOTSUPP ? "`EOPNOTSUPP`" : named;
}

int main(void) {
    struct on on[] = {open_on("weft0"), open_on("weft_ib0")};
    for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
        printf("| %s |", CALLS[i].call);
        for (int k = 0; k < 2; k++) {
            errno = 0;
            printf(" %s |", outcome(CALLS[i].attempt(&on[k])));
        }
        printf("\n");
    }
    return 0;
}
