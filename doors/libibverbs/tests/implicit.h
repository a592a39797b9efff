/* Implicit regions: all memory that the process has or will have (part of conformance.c). */

static struct ibv_mr *everything(struct half *h) {
    struct ibv_mr *mr = ibv_reg_mr(h->pd, NULL, SIZE_MAX, ALL | IBV_ACCESS_ON_DEMAND);
    MUST(mr);
    CHECK(mr->addr == NULL && mr->length == SIZE_MAX);
    return mr;
}

static char *pages(size_t len, int protection) {
    char *map = mmap(NULL, len, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(map != MAP_FAILED);
    return map;
}

/* One request by `a` on `at` in both: its status. */
static enum ibv_wc_status reach(enum ibv_wr_opcode opcode, char *from, char *to, uint32_t len) {
    struct half a, b;
    pair_open(&a, &b);
    struct ibv_mr *mine = everything(&a), *theirs = everything(&b);
    struct ibv_sge sge = {(uintptr_t)from, len, mine->lkey};
    struct ibv_send_wr wr = request(1, opcode, &sge, 1);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = (uintptr_t)to;
        wr.wr.atomic.rkey = theirs->rkey;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)to;
        wr.wr.rdma.rkey = theirs->rkey;
    }
    if (opcode == IBV_WR_SEND) {
        struct ibv_sge into = {(uintptr_t)to, len, theirs->lkey};
        struct ibv_recv_wr rwr = {.wr_id = 2, .sg_list = &into, .num_sge = 1}, *bad;
        MUST(ibv_post_recv(b.qp, &rwr, &bad) == 0);
    }
    CHECK(post(&a, &wr) == 0);
    enum ibv_wc_status status = completion(a.scq).status;
    /* A sender that cannot read its own message sends nothing. */
    if (opcode == IBV_WR_SEND && status != IBV_WC_LOC_PROT_ERR)
        CHECK(completion(b.rcq).status == (status == IBV_WC_SUCCESS ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR));
    CHECK(ibv_dereg_mr(mine) == 0 && ibv_dereg_mr(theirs) == 0);
    pair_close(&a, &b);
    return status;
}

static void implicit(void) {
    struct half a;
    half_open(&a, "weft_ib0", 0);
    struct ibv_device_attr_ex attr;
    CHECK(ibv_query_device_ex(a.context, NULL, &attr) == 0 && attr.odp_caps.general_caps & IBV_ODP_SUPPORT);
    if (!(attr.odp_caps.general_caps & IBV_ODP_SUPPORT_IMPLICIT)) {
        NO(ibv_reg_mr(a.pd, NULL, SIZE_MAX, ALL | IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
        half_close(&a);
        printf("implicit: not on this system\n");
        return;
    }
    NO(ibv_reg_mr(a.pd, NULL, SIZE_MAX, ALL), EINVAL);
    struct ibv_mr *mr = everything(&a);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
    /* Advice: of a region that is implicit, and of one that is not. */
    char *map = pages(8192, PROT_READ);
    munmap(map + 4096, 4096);
    struct ibv_mr *some = ibv_reg_mr(a.pd, map, 4096, IBV_ACCESS_ON_DEMAND);
    MUST(some);
    for (int i = 0; i < 2; i++) {
        struct ibv_sge sge = {(uintptr_t)map, 4096, i ? some->lkey : mr->lkey};
        CHECK(ibv_advise_mr(a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == 0);
        CHECK(ibv_advise_mr(a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == (i ? EPERM : EFAULT));
        sge.length++;
        CHECK(ibv_advise_mr(a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1) == EFAULT);
        CHECK(ibv_advise_mr(a.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, 0, &sge, 1) == (i ? EFAULT : 0));
    }
    CHECK(ibv_dereg_mr(some) == 0 && ibv_dereg_mr(mr) == 0);
    half_close(&a);

    /* Memory that was mapped later, in all ways that bytes move. */
    static const enum ibv_wr_opcode kinds[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    for (size_t kind = 0; kind < 3; kind++) {
        for (uint32_t len = 8; len <= 1 << 20; len = len == 8 ? 5000 : len * 209) {
            if (len > 1 << 20) break;
            char *one = pages(1 << 21, PROT_READ | PROT_WRITE), *two = pages(1 << 21, PROT_READ | PROT_WRITE);
            int reads = kinds[kind] == IBV_WR_RDMA_READ;
            for (uint32_t i = 0; i < len; i++) (reads ? two : one)[i] = (char)(i * 7 + len);
            CHECK(reach(kinds[kind], one, two, len) == IBV_WC_SUCCESS);
            CHECK(!memcmp(one, two, len));
            munmap(one, 1 << 21);
            munmap(two, 1 << 21);
        }
    }
    /* Memory that is not there, or not for this. */
    char *there = pages(65536, PROT_READ | PROT_WRITE), *constant = pages(65536, PROT_READ);
    /* (What one unmaps the library may map in its turn. Nobody gets the first pages.) */
    char *closed = pages(65536, PROT_NONE), *gone = (char *)4096;
    for (uint32_t len = 8; len <= 40000; len *= 5000) {
        CHECK(reach(IBV_WR_RDMA_WRITE, there, gone, len) == IBV_WC_REM_ACCESS_ERR);
        CHECK(reach(IBV_WR_RDMA_READ, there, gone, len) == IBV_WC_REM_ACCESS_ERR);
        CHECK(reach(IBV_WR_RDMA_WRITE, there, closed, len) == IBV_WC_REM_ACCESS_ERR);
        CHECK(reach(IBV_WR_RDMA_READ, there, closed, len) == IBV_WC_REM_ACCESS_ERR);
        CHECK(reach(IBV_WR_SEND, closed, there, len) == IBV_WC_LOC_PROT_ERR);
        CHECK(reach(IBV_WR_RDMA_WRITE, there, constant, len) == IBV_WC_REM_ACCESS_ERR);
        CHECK(reach(IBV_WR_RDMA_READ, there, constant, len) == IBV_WC_SUCCESS);
        CHECK(reach(IBV_WR_RDMA_WRITE, gone, there, len) == IBV_WC_LOC_PROT_ERR);
        CHECK(reach(IBV_WR_RDMA_READ, constant, there, len) == IBV_WC_LOC_PROT_ERR);
        CHECK(reach(IBV_WR_SEND, gone, there, len) == IBV_WC_LOC_PROT_ERR);
        CHECK(reach(IBV_WR_SEND, there, gone, len) == IBV_WC_REM_OP_ERR);
    }
    CHECK(reach(IBV_WR_RDMA_WRITE, there, NULL, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(reach(IBV_WR_RDMA_WRITE, there, (char *)-4096, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(reach(IBV_WR_ATOMIC_FETCH_AND_ADD, there, there + 64, 8) == IBV_WC_REM_ACCESS_ERR);
    munmap(there, 65536);
    munmap(constant, 65536);
    munmap(closed, 65536);
}
