/* A C program with <infiniband/weft_dgram.h>: long messages, RDMA Write-Record and the reliable mode between two datagram queue pairs. */
#include <errno.h>
#include <infiniband/weft_dgram.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MUST(what)                                                                                                              \
	do {                                                                                                                   \
		if (!(what)) {                                                                                                 \
			fprintf(stderr, "%s:%d: %s (errno %d, %s)\n", __FILE__, __LINE__, #what, errno, strerror(errno));       \
			exit(1);                                                                                               \
		}                                                                                                              \
	} while (0)

#define SIZE (1 << 20)
#define QKEY 0x11111111

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *buf;
};

static void to(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state, .port_num = 1, .qkey = QKEY};
	int mask = IBV_QP_STATE;

	if (state == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
	if (state == IBV_QPS_RTS)
		mask |= IBV_QP_SQ_PSN;
	MUST(ibv_modify_qp(qp, &attr, mask) == 0);
}

static struct end make(struct ibv_context *context, struct ibv_pd *pd, const struct weft_dgram_reliable *reliable)
{
	struct end end;
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_UD,
					.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2}};
	struct weft_dgram_attr attr = {.max_message = SIZE, .records = 8, .timeout_ms = 500};

	MUST(end.cq = ibv_create_cq(context, 64, NULL, NULL, 0));
	init.send_cq = init.recv_cq = end.cq;
	MUST(end.qp = ibv_create_qp(pd, &init));
	MUST(end.buf = aligned_alloc(4096, SIZE));
	memset(end.buf, 0, SIZE);
	MUST(end.mr = ibv_reg_mr(pd, end.buf, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	attr.records = 64;
	MUST(weft_dgram_setup(end.qp, &attr) == EINVAL); /* no room in the completion queue */
	attr.records = 8;
	MUST(weft_dgram_setup(end.qp, &attr) == 0);
	MUST(weft_dgram_set_reliable(end.qp, reliable) == 0);
	to(end.qp, IBV_QPS_INIT);
	MUST(weft_dgram_setup(end.qp, &attr) == EINVAL);
	MUST(weft_dgram_set_reliable(end.qp, reliable) == EINVAL);
	to(end.qp, IBV_QPS_RTR);
	to(end.qp, IBV_QPS_RTS);
	return end;
}

static void unmake(struct end *end)
{
	MUST(ibv_destroy_qp(end->qp) == 0);
	MUST(ibv_destroy_cq(end->cq) == 0);
	MUST(ibv_dereg_mr(end->mr) == 0);
	free(end->buf);
}

static struct ibv_wc any(struct end *end)
{
	struct ibv_wc wc;
	time_t start = time(NULL);
	int n;

	while ((n = ibv_poll_cq(end->cq, 1, &wc)) == 0)
		MUST(time(NULL) - start < 30);
	MUST(n == 1);
	return wc;
}

static struct ibv_wc next(struct end *end)
{
	struct ibv_wc wc = any(end);

	MUST(wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* A message that cannot be delivered ends traffic to its destination only. */
static void reliable_mode(struct ibv_context *context, struct ibv_pd *pd, struct ibv_ah *ah)
{
	struct weft_dgram_reliable attr = {.give_up_ms = 5000};
	struct end a = make(context, pd, &attr), b = make(context, pd, &attr);
	struct ibv_sge sink = {.addr = (uintptr_t)b.buf, .length = 140, .lkey = b.mr->lkey};
	struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = &sink, .num_sge = 1}, *bad_recv;
	struct ibv_sge from = {.addr = (uintptr_t)a.buf, .length = 100, .lkey = a.mr->lkey};
	struct ibv_send_wr send = {.wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad_send;
	struct ibv_wc wc;

	memset(a.buf, 5, 1000);
	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = b.qp->qp_num;
	send.wr.ud.remote_qkey = QKEY;
	/* No receive yet: it waits for one. */
	MUST(ibv_post_send(a.qp, &send, &bad_send) == 0);
	MUST(ibv_post_recv(b.qp, &recv, &bad_recv) == 0);
	MUST(next(&a).wr_id == 2);
	MUST(next(&b).byte_len == 140 && b.buf[40] == 5 && b.buf[139] == 5);
	MUST(weft_dgram_pair_failed(a.qp, ah, b.qp->qp_num) == 0);
	MUST(weft_dgram_reset_pair(a.qp, ah, b.qp->qp_num) == ENOENT);
	/* Longer than the receive. */
	MUST(ibv_post_recv(b.qp, &recv, &bad_recv) == 0);
	from.length = 1000;
	MUST(ibv_post_send(a.qp, &send, &bad_send) == 0);
	wc = any(&a);
	MUST(wc.wr_id == 2 && wc.status == IBV_WC_REM_INV_REQ_ERR);
	MUST(weft_dgram_pair_failed(a.qp, ah, b.qp->qp_num) == 1);
	from.length = 100;
	MUST(ibv_post_send(a.qp, &send, &bad_send) == 0);
	MUST(any(&a).status == IBV_WC_WR_FLUSH_ERR);
	MUST(weft_dgram_reset_pair(a.qp, ah, b.qp->qp_num) == 0);
	MUST(ibv_post_send(a.qp, &send, &bad_send) == 0);
	MUST(next(&a).wr_id == 2);
	MUST(next(&b).byte_len == 140);
	unmake(&a);
	unmake(&b);
}

/* RoCE's packets have none of it. */
static void on_roce(struct ibv_context *context, struct ibv_pd *pd)
{
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_UD, .cap = {.max_send_wr = 1, .max_recv_wr = 1}};
	struct weft_dgram_attr attr = {.max_message = SIZE};
	struct weft_dgram_reliable reliable = {.give_up_ms = 100};
	struct weft_dgram_write write = {.wr_id = 1};
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	MUST(cq = ibv_create_cq(context, 4, NULL, NULL, 0));
	init.send_cq = init.recv_cq = cq;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(weft_dgram_setup(qp, &attr) == EOPNOTSUPP);
	MUST(weft_dgram_set_reliable(qp, &reliable) == EOPNOTSUPP);
	MUST(weft_dgram_post_write_record(qp, &write) == EOPNOTSUPP);
	MUST(weft_dgram_take_record(qp, 1, NULL, NULL, 0) == -1 && errno == EOPNOTSUPP);
	MUST(weft_dgram_validity_map(qp, 1, NULL, 0, 0) == -1 && errno == EOPNOTSUPP);
	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
}

int main(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context = NULL;

	MUST(list);
	for (int i = 0; i < count; i++)
		if (!strcmp(ibv_get_device_name(list[i]), "weft_ib0"))
			context = ibv_open_device(list[i]);
	MUST(context);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	MUST(pd);
	if (getenv("WEFT_IB_WIRE")) {
		on_roce(context, pd);
		MUST(ibv_dealloc_pd(pd) == 0);
		MUST(ibv_close_device(context) == 0);
		ibv_free_device_list(list);
		return 0;
	}
	struct end a = make(context, pd, NULL), b = make(context, pd, NULL);
	struct ibv_ah_attr way = {.is_global = 1, .port_num = 1};

	MUST(ibv_query_gid(context, 1, 0, &way.grh.dgid) == 0);
	struct ibv_ah *ah = ibv_create_ah(pd, &way);
	MUST(ah);
	for (int i = 0; i < SIZE; i++)
		a.buf[i] = (unsigned char)(i * 7 + i / 251);

	/* A Send of 300,000 bytes, after the forty of the routing header. */
	struct ibv_sge sink = {.addr = (uintptr_t)b.buf, .length = SIZE, .lkey = b.mr->lkey};
	struct ibv_recv_wr recv = {.wr_id = 1, .sg_list = &sink, .num_sge = 1}, *bad_recv;
	struct ibv_sge from = {.addr = (uintptr_t)a.buf, .length = 300000, .lkey = a.mr->lkey};
	struct ibv_send_wr send = {.wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad_send;

	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = b.qp->qp_num;
	send.wr.ud.remote_qkey = QKEY;
	MUST(ibv_post_recv(b.qp, &recv, &bad_recv) == 0);
	MUST(ibv_post_send(a.qp, &send, &bad_send) == 0);
	MUST(next(&a).wr_id == 2);
	struct ibv_wc wc = next(&b);
	MUST(wc.opcode == IBV_WC_RECV && wc.wr_id == 1 && wc.byte_len == 300040);
	MUST(!memcmp(b.buf + 40, a.buf, 300000));

	/* A Write-Record, for which no receive is posted. */
	memset(b.buf, 0, SIZE);
	struct weft_dgram_write write = {.wr_id = 3,
					 .sg_list = &from,
					 .num_sge = 1,
					 .send_flags = IBV_SEND_SIGNALED,
					 .ah = ah,
					 .remote_qpn = b.qp->qp_num,
					 .remote_qkey = QKEY,
					 .remote_addr = (uintptr_t)b.buf + 1000,
					 .rkey = b.mr->rkey,
					 .with_imm = 1,
					 .imm_data = 0x12345678};
	MUST(weft_dgram_post_write_record(a.qp, &write) == 0);
	wc = next(&a);
	MUST(wc.wr_id == 3 && wc.opcode == IBV_WC_RDMA_WRITE);
	wc = next(&b);
	MUST(wc.opcode == WEFT_WC_WRITE_RECORD && wc.byte_len == 300000 && wc.src_qp == a.qp->qp_num);
	MUST((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == 0x12345678);
	MUST(!memcmp(b.buf + 1000, a.buf, 300000) && b.buf[999] == 0 && b.buf[301000] == 0);
	struct weft_dgram_record record;
	struct weft_dgram_range ranges[4];
	uint64_t base = (uintptr_t)b.buf;

	MUST(weft_dgram_take_record(b.qp, wc.wr_id, &record, ranges, 4) == 1);
	MUST(record.addr == base + 1000 && record.length == 300000 && record.valid == 300000);
	MUST(record.rkey == b.mr->rkey && record.src_qp == a.qp->qp_num);
	MUST(ranges[0].start == base + 1000 && ranges[0].end == base + 301000);
	MUST(weft_dgram_take_record(b.qp, wc.wr_id, &record, ranges, 4) == -1 && errno == ENOENT);
	MUST(weft_dgram_validity_map(b.qp, b.mr->rkey, NULL, 0, 0) == 1);
	MUST(weft_dgram_validity_map(b.qp, b.mr->rkey, ranges, 4, 1) == 1);
	MUST(ranges[0].start == base + 1000 && ranges[0].end == base + 301000);
	MUST(weft_dgram_validity_map(b.qp, b.mr->rkey, ranges, 4, 0) == 0);

	/* What is wrong. */
	MUST(weft_dgram_validity_map(b.qp, b.mr->rkey, NULL, 4, 0) == -1 && errno == EINVAL);
	write.num_sge = 99;
	MUST(weft_dgram_post_write_record(a.qp, &write) == EINVAL);
	MUST(weft_dgram_setup(a.qp, NULL) == EINVAL);
	MUST(weft_dgram_post_write_record(a.qp, NULL) == EINVAL);

	MUST(weft_dgram_pair_failed(a.qp, ah, b.qp->qp_num) == 0);
	unmake(&a);
	unmake(&b);
	reliable_mode(context, pd, ah);
	MUST(ibv_destroy_ah(ah) == 0);
	MUST(ibv_dealloc_pd(pd) == 0);
	MUST(ibv_close_device(context) == 0);
	ibv_free_device_list(list);
	return 0;
}
