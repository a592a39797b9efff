/* Completion counters, as rdma-core 65 declares them: part of conformance.c, which is built with the headers of Debian 12. */

struct ibv_comp_cntr {
    struct ibv_context *context;
    uint32_t handle;
};
struct ibv_comp_cntr_init_attr {
    uint32_t comp_mask;
    int type; /* 0: requests, 1: bytes */
    uint32_t flags;
};
struct ibv_qp_attach_comp_cntr_attr {
    uint32_t comp_mask, op_mask;
};
struct ibv_comp_cntr_caps {
    uint64_t max_value;
    uint32_t max_counters, supported_qp_attach_ops;
};
enum { OF_SEND = 1, OF_RECV = 2, OF_READ = 4, OF_REMOTE_READ = 8, OF_WRITE = 16, OF_REMOTE_WRITE = 32 };

int _ibv_query_comp_cntr_caps(struct ibv_context *, struct ibv_comp_cntr_caps *, size_t);
struct ibv_comp_cntr *ibv_create_comp_cntr(struct ibv_context *, struct ibv_comp_cntr_init_attr *);
int ibv_destroy_comp_cntr(struct ibv_comp_cntr *);
int ibv_set_comp_cntr(struct ibv_comp_cntr *, uint64_t);
int ibv_set_err_comp_cntr(struct ibv_comp_cntr *, uint64_t);
int ibv_inc_comp_cntr(struct ibv_comp_cntr *, uint64_t);
int ibv_inc_err_comp_cntr(struct ibv_comp_cntr *, uint64_t);
int ibv_read_comp_cntr(struct ibv_comp_cntr *, uint64_t *);
int ibv_read_err_comp_cntr(struct ibv_comp_cntr *, uint64_t *);
int ibv_qp_attach_comp_cntr(struct ibv_qp *, struct ibv_comp_cntr *, struct ibv_qp_attach_comp_cntr_attr *);

static struct ibv_comp_cntr *counter(struct ibv_context *context, int bytes) {
    struct ibv_comp_cntr_init_attr attr = {.type = bytes};
    struct ibv_comp_cntr *made = ibv_create_comp_cntr(context, &attr);
    MUST(made && made->context == context);
    return made;
}

static int attach(struct ibv_qp *qp, struct ibv_comp_cntr *counter, uint32_t ops) {
    struct ibv_qp_attach_comp_cntr_attr attr = {.op_mask = ops};
    return ibv_qp_attach_comp_cntr(qp, counter, &attr);
}

/* No thread polls: a thread that reads the counter drives the work. */
static int reaches(struct ibv_comp_cntr *counter, int errors, uint64_t value) {
    time_t end = time(NULL) + 20;
    uint64_t now = 0;
    do {
        MUST((errors ? ibv_read_err_comp_cntr : ibv_read_comp_cntr)(counter, &now) == 0);
    } while (now < value && time(NULL) < end);
    if (now != value) fprintf(stderr, "%s: %llu in place of %llu\n", running, (unsigned long long)now, (unsigned long long)value);
    return now == value;
}

static void counter_values(void) {
    struct ibv_context *context = open_named("weft_ib0");
    struct ibv_comp_cntr_init_attr attr = {0};
    struct { struct ibv_comp_cntr_caps caps; uint64_t later; } caps = {.later = 7};
    CHECK(_ibv_query_comp_cntr_caps(context, &caps.caps, 15) == EINVAL);
    CHECK(_ibv_query_comp_cntr_caps(NULL, &caps.caps, 16) == EINVAL);
    CHECK(_ibv_query_comp_cntr_caps(context, &caps.caps, sizeof caps) == 0 && caps.later == 0);
    CHECK(caps.caps.max_value == UINT64_MAX && caps.caps.max_counters >= 1024);
    CHECK(caps.caps.supported_qp_attach_ops == (OF_SEND | OF_RECV | OF_READ | OF_WRITE));
    NO(ibv_create_comp_cntr(context, NULL), EINVAL);
    NO(ibv_create_comp_cntr(NULL, &attr), EINVAL);
    attr.comp_mask = 1;
    NO(ibv_create_comp_cntr(context, &attr), EINVAL);
    attr.comp_mask = 0, attr.flags = 1;
    NO(ibv_create_comp_cntr(context, &attr), EINVAL);
    attr.flags = 0, attr.type = 2;
    NO(ibv_create_comp_cntr(context, &attr), EOPNOTSUPP);

    struct ibv_comp_cntr *one = counter(context, 0);
    uint64_t value = 9;
    CHECK(ibv_read_comp_cntr(one, &value) == 0 && value == 0);
    CHECK(ibv_set_comp_cntr(one, 5) == 0 && ibv_inc_comp_cntr(one, 3) == 0 && ibv_inc_err_comp_cntr(one, 2) == 0);
    CHECK(ibv_read_comp_cntr(one, &value) == 0 && value == 8);
    CHECK(ibv_read_err_comp_cntr(one, &value) == 0 && value == 2);
    CHECK(ibv_set_err_comp_cntr(one, UINT64_MAX) == 0 && ibv_inc_err_comp_cntr(one, 1) == 0);
    CHECK(ibv_read_err_comp_cntr(one, &value) == 0 && value == 0);
    CHECK(ibv_read_comp_cntr(one, NULL) == EINVAL && ibv_read_comp_cntr(NULL, &value) == EINVAL);
    CHECK(ibv_destroy_comp_cntr(one) == 0 && ibv_destroy_comp_cntr(one) == EINVAL && ibv_inc_comp_cntr(one, 1) == EINVAL);
    CHECK(ibv_close_device(context) == 0);
}

static int quietly(struct half *from, struct half *to, enum ibv_wr_opcode opcode, uint32_t length) {
    struct ibv_sge sge = part(from, 4096, length);
    struct ibv_send_wr wr = request(0, opcode, &sge, 1);
    wr.send_flags = 0;
    aim(&wr, to, 8192);
    return post(from, &wr);
}

/* Requests without completions, more of them than the queue has places; receives by their bytes; what fails. */
static void counted(void) {
    struct half a, b;
    struct ibv_wc wc;
    half_open(&a, "weft_ib0", 0);
    half_open(&b, "weft_ib0", 0);
    struct ibv_context *iwarp = open_named("weft0");
    struct ibv_comp_cntr *sent = counter(a.context, 0), *read = counter(a.context, 1), *received = counter(b.context, 1);
    struct ibv_comp_cntr *foreign = counter(iwarp, 0);
    struct ibv_qp_attach_comp_cntr_attr attr = {.comp_mask = 1, .op_mask = OF_SEND};
    CHECK(ibv_qp_attach_comp_cntr(a.qp, sent, NULL) == EINVAL && ibv_qp_attach_comp_cntr(a.qp, sent, &attr) == EINVAL);
    CHECK(attach(a.qp, sent, 0) == EINVAL && attach(NULL, sent, OF_SEND) == EINVAL && attach(a.qp, NULL, OF_SEND) == EINVAL);
    CHECK(attach(a.qp, sent, OF_REMOTE_WRITE) == EOPNOTSUPP && attach(a.qp, sent, OF_SEND | OF_REMOTE_READ) == EOPNOTSUPP);
    CHECK(attach(a.qp, foreign, OF_SEND) == EINVAL && ibv_destroy_comp_cntr(foreign) == 0);
    CHECK(attach(a.qp, sent, OF_SEND | OF_WRITE) == 0);
    /* All or nothing: no counter is attached for the Reads. */
    CHECK(attach(a.qp, read, OF_WRITE | OF_READ) == EBUSY && attach(a.qp, read, OF_READ) == 0);
    CHECK(to_init(b.qp) == 0 && attach(b.qp, received, OF_RECV) == 0);
    CHECK(ibv_destroy_comp_cntr(sent) == EBUSY);
    MUST(to_init(a.qp) == 0 && to_rtr(a.qp, b.qp->qp_num) == 0 && to_rtr(b.qp, a.qp->qp_num) == 0);
    MUST(to_rts(a.qp) == 0 && to_rts(b.qp) == 0);
    CHECK(attach(a.qp, sent, OF_RECV) == EINVAL);

    for (int i = 1; i <= 40; i++) {
        receive(&b, i, 0, 4096);
        CHECK(quietly(&a, &b, IBV_WR_SEND, 100) == 0 && reaches(sent, 0, i));
        /* Those of receives come in any case. */
        CHECK(completion(b.rcq).wr_id == (unsigned)i);
    }
    CHECK(reaches(received, 0, 4000));
    for (int i = 41; i <= 80; i++) {
        while (quietly(&a, &b, IBV_WR_RDMA_WRITE, 2000) == ENOMEM) {
            uint64_t value;
            MUST(ibv_read_comp_cntr(sent, &value) == 0);
        }
    }
    CHECK(reaches(sent, 0, 80));
    for (int i = 0; i < 5; i++) CHECK(quietly(&a, &b, IBV_WR_RDMA_READ, 1000) == 0);
    CHECK(reaches(read, 0, 5000));
    CHECK(ibv_poll_cq(a.scq, 1, &wc) == 0);
    /* One with a completion is counted as well; atomics are not. */
    struct ibv_sge sge = part(&a, 0, 10);
    struct ibv_send_wr wr = request(7, IBV_WR_SEND, &sge, 1);
    receive(&b, 41, 0, 4096);
    CHECK(post(&a, &wr) == 0 && completion(a.scq).wr_id == 7 && reaches(sent, 0, 81) && reaches(received, 0, 4010));
    sge = part(&a, 0, 8);
    wr = request(8, IBV_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);
    wr.wr.atomic.remote_addr = (uintptr_t)b.buf + 8192;
    wr.wr.atomic.rkey = b.mr->rkey;
    CHECK(post(&a, &wr) == 0 && completion(a.scq).wr_id == 8 && reaches(sent, 0, 81) && reaches(read, 0, 5000));

    /* Failed and flushed requests. */
    receive(&b, 42, 0, 4096);
    receive(&b, 43, 0, 4096);
    CHECK(to_state(b.qp, IBV_QPS_ERR) == 0 && reaches(received, 1, 2) && reaches(received, 0, 4010));
    CHECK(to_state(a.qp, IBV_QPS_ERR) == 0);
    for (int i = 0; i < 3; i++) CHECK(quietly(&a, &b, IBV_WR_SEND, 100) == 0);
    CHECK(reaches(sent, 1, 3) && reaches(sent, 0, 81));

    /* Begun anew they are still counted. */
    MUST(to_state(a.qp, IBV_QPS_RESET) == 0 && to_state(b.qp, IBV_QPS_RESET) == 0);
    join(&a, &b);
    receive(&b, 1, 0, 4096);
    CHECK(quietly(&a, &b, IBV_WR_SEND, 5) == 0 && reaches(sent, 0, 82) && reaches(received, 0, 4015));
    /* A destroyed queue pair makes no completions: its receives are not flushed. */
    receive(&b, 2, 0, 4096);
    pair_close(&a, &b);
    CHECK(reaches(received, 1, 2));
    CHECK(ibv_destroy_comp_cntr(sent) == 0 && ibv_destroy_comp_cntr(read) == 0 && ibv_destroy_comp_cntr(received) == 0);
    CHECK(ibv_close_device(iwarp) == 0);
}

/* Two datagram queue pairs, one counter. */
static void counted_datagrams(void) {
    struct half h;
    half_open(&h, "weft_ib0", 0);
    struct ibv_comp_cntr *both = counter(h.context, 0);
    struct ibv_qp_init_attr init = attributes(&h);
    init.qp_type = IBV_QPT_UD;
    struct ibv_qp *own = h.qp, *pair[2];
    for (int i = 0; i < 2; i++) {
        MUST(pair[i] = ibv_create_qp(h.pd, &init));
        CHECK(attach(pair[i], both, OF_SEND | OF_RECV) == 0);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
        MUST(ibv_modify_qp(pair[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
        MUST(to_state(pair[i], IBV_QPS_RTR) == 0);
        attr.qp_state = IBV_QPS_RTS;
        MUST(ibv_modify_qp(pair[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
    }
    struct ibv_ah_attr way = rtr_attr(h.context, 0).ah_attr;
    struct ibv_ah *ah = ibv_create_ah(h.pd, &way);
    MUST(ah);
    for (int i = 1; i <= 60; i++) {
        h.qp = pair[1];
        receive(&h, i, 0, 4096);
        h.qp = pair[0];
        struct ibv_sge sge = part(&h, 8192, 64);
        struct ibv_send_wr wr = request(0, IBV_WR_SEND, &sge, 1);
        wr.send_flags = 0;
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = pair[1]->qp_num;
        wr.wr.ud.remote_qkey = 7;
        CHECK(post(&h, &wr) == 0 && reaches(both, 0, 2 * i));
        struct ibv_wc wc;
        CHECK(completion(h.rcq).wr_id == (unsigned)i && ibv_poll_cq(h.scq, 1, &wc) == 0);
    }
    h.qp = own;
    CHECK(ibv_destroy_ah(ah) == 0 && ibv_destroy_qp(pair[0]) == 0);
    CHECK(ibv_destroy_comp_cntr(both) == EBUSY);
    CHECK(ibv_destroy_qp(pair[1]) == 0 && ibv_destroy_comp_cntr(both) == 0);
    half_close(&h);
}
