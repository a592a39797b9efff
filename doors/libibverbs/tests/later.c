/* A C program of rdma-core 65, built with the headers of Debian 12 and what they lack: buffers of the library, regions by
 * struct, the speed of a port, names that are looked up, events of the program's own, and sets of rsockets. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define MUST(what)                                                                                                              \
	do {                                                                                                                   \
		if (!(what)) {                                                                                                 \
			fprintf(stderr, "%s:%d: %s (errno %d, %s)\n", __FILE__, __LINE__, #what, errno, strerror(errno));       \
			exit(1);                                                                                               \
		}                                                                                                              \
	} while (0)

struct ibv_buf;
struct later_mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask;
	uint64_t iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	struct ibv_buf *buf;
};
enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_DMAH = 16, MASK_BUF = 32 };

struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct later_mr_init_attr *attr);
void *ibv_alloc_buf(struct ibv_pd *pd, size_t size, struct ibv_buf **buf);
void ibv_free_buf(struct ibv_buf *buf);
int ibv_export_buf_dmabuf_fd(struct ibv_buf *buf);
struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, struct ibv_buf *buf, void *addr, size_t length, int access);
int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed);
int rdma_resolve_addrinfo(struct rdma_cm_id *id, const char *node, const char *service, const struct rdma_addrinfo *hints);
int rdma_query_addrinfo(struct rdma_cm_id *id, struct rdma_addrinfo **info);
int rdma_write_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type event, int status, uint64_t arg);
int repoll_create(int flags);
int repoll_ctl(int epfd, int op, int fd, struct epoll_event *event);
int repoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout);

static void regions(struct ibv_context *context)
{
	struct ibv_pd *pd, *other;
	struct ibv_buf *buf;
	struct ibv_mr *mr;
	uint64_t speed = 0;
	char *bytes;
	struct later_mr_init_attr attr = {.length = 4096, .access = IBV_ACCESS_LOCAL_WRITE, .comp_mask = MASK_ADDR};

	MUST(ibv_query_port_speed(context, 1, &speed) == 0 && speed == 1000);
	MUST(ibv_query_port_speed(context, 2, &speed) == EINVAL);
	MUST(pd = ibv_alloc_pd(context));
	MUST(other = ibv_alloc_pd(context));
	MUST(bytes = ibv_alloc_buf(pd, 10000, &buf));
	memset(bytes, 1, 10000);
	MUST(ibv_dealloc_pd(pd) == EBUSY);
	MUST(mr = ibv_reg_buf_mr(pd, buf, bytes + 1000, 9000, IBV_ACCESS_LOCAL_WRITE));
	MUST(mr->addr == bytes + 1000 && mr->length == 9000);
	MUST(ibv_dereg_mr(mr) == 0);
	MUST(!ibv_reg_buf_mr(pd, buf, bytes + 1000, 9001, 0) && errno == EINVAL);
	MUST(!ibv_reg_buf_mr(pd, buf, bytes - 1, 1, 0) && errno == EINVAL);
	MUST(!ibv_reg_buf_mr(other, buf, bytes, 1, 0) && errno == EINVAL);
	/* Ordinary memory. */
	MUST(ibv_export_buf_dmabuf_fd(buf) == -1 && errno == ENODATA);

	attr.addr = bytes;
	MUST(mr = ibv_reg_mr_ex(pd, &attr));
	MUST(ibv_dereg_mr(mr) == 0);
	attr.comp_mask = MASK_ADDR | MASK_BUF | MASK_IOVA;
	attr.buf = buf;
	attr.iova = 0x1000000;
	MUST(mr = ibv_reg_mr_ex(pd, &attr));
	MUST(ibv_dereg_mr(mr) == 0);
	attr.length = 10001;
	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.length = 4096;
	attr.comp_mask = MASK_ADDR | MASK_FD;
	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.comp_mask = 0;
	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.comp_mask = MASK_ADDR | MASK_DMAH;
	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EOPNOTSUPP);
	attr.comp_mask = MASK_ADDR | 1ull << 40;
	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EOPNOTSUPP);

	ibv_free_buf(buf);
	MUST(!ibv_reg_buf_mr(pd, buf, bytes, 1, 0));
	MUST(ibv_dealloc_pd(pd) == 0 && ibv_dealloc_pd(other) == 0);
}

/* Queues may be in memory that is not protected: IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC. */
static void domains(struct ibv_context *context)
{
	struct ibv_parent_domain_init_attr attr = {.comp_mask = 1 << 2};
	struct ibv_pd *pd, *parent;

	MUST(pd = ibv_alloc_pd(context));
	attr.pd = pd;
	MUST(parent = ibv_alloc_parent_domain(context, &attr));
	MUST(ibv_dealloc_pd(parent) == 0);
	attr.comp_mask = 1 << 3;
	MUST(!ibv_alloc_parent_domain(context, &attr) && errno == EINVAL);
	MUST(ibv_dealloc_pd(pd) == 0);
}

/* A port that is taken: rdma_cm's error depends on whether the address is a wildcard. */
static void taken_ports(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET}, local;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *first, *second;

	MUST(channel = rdma_create_event_channel());
	MUST(rdma_create_id(channel, &first, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_create_id(channel, &second, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(first, (struct sockaddr *)&addr) == 0);
	addr.sin_port = rdma_get_src_port(first);
	MUST(rdma_bind_addr(second, (struct sockaddr *)&addr) == -1 && errno == EADDRNOTAVAIL);
	MUST(rdma_destroy_id(first) == 0);

	local = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	MUST(rdma_create_id(channel, &first, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(first, (struct sockaddr *)&local) == 0);
	local.sin_port = rdma_get_src_port(first);
	MUST(rdma_bind_addr(second, (struct sockaddr *)&local) == -1 && errno == EADDRINUSE);
	MUST(rdma_destroy_id(first) == 0 && rdma_destroy_id(second) == 0);
	rdma_destroy_event_channel(channel);
}

/* The length of a name alone, as librspreload asks for it before it falls back to TCP. */
static void name_lengths(void)
{
	socklen_t len = 0;
	char start[4];
	int s;

	MUST((s = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	MUST(rgetsockname(s, NULL, &len) == 0 && len == sizeof(struct sockaddr_in));
	MUST(rgetsockname(s, NULL, &len) == -1 && errno == EFAULT);
	len = sizeof(start);
	MUST(rgetsockname(s, (struct sockaddr *)start, &len) == 0 && len == sizeof(struct sockaddr_in));
	MUST(rclose(s) == 0);
}

static void names(void)
{
	struct rdma_addrinfo hints = {.ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP}, *info;
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	MUST(channel = rdma_create_event_channel());
	MUST(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_query_addrinfo(id, &info) == -1 && errno == EINVAL);
	MUST(rdma_resolve_addrinfo(id, "127.0.0.1", "4711", &hints) == 0);
	MUST(rdma_get_cm_event(channel, &event) == 0);
	MUST(event->event == 16 && event->status == 0 && event->id == id);
	MUST(rdma_ack_cm_event(event) == 0);
	MUST(rdma_query_addrinfo(id, &info) == 0);
	MUST(((struct sockaddr_in *)info->ai_dst_addr)->sin_port == htons(4711));
	rdma_freeaddrinfo(info);
	MUST(rdma_resolve_addrinfo(id, "no number", NULL, &hints) == 0);
	MUST(rdma_get_cm_event(channel, &event) == 0);
	MUST(event->event == 17 && event->status < 0);
	MUST(rdma_ack_cm_event(event) == 0);
	hints.ai_flags = 16; /* RAI_SA */
	MUST(rdma_resolve_addrinfo(id, NULL, "1", &hints) == -1 && errno == EOPNOTSUPP);

	MUST(rdma_write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0) == -1 && errno == EINVAL);
	MUST(rdma_write_cm_event(id, 18, 7, 0x123456789abcdefull) == 0);
	MUST(rdma_get_cm_event(channel, &event) == 0);
	MUST(event->event == 18 && event->status == 7 && event->id == id);
	MUST(*(uint64_t *)&event->param == 0x123456789abcdefull);
	MUST(rdma_ack_cm_event(event) == 0);
	MUST(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
}

static void sets(void)
{
	struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(addr);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 1}, got[4];
	int set, listener, near, far, fds[2];

	MUST(repoll_create(12345) == -1 && errno == EINVAL);
	MUST((set = repoll_create(EPOLL_CLOEXEC)) >= 0);
	MUST((listener = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	MUST(rbind(listener, (struct sockaddr *)&addr, len) == 0 && rlisten(listener, 4) == 0);
	MUST(rgetsockname(listener, (struct sockaddr *)&addr, &len) == 0);
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == 0);
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, listener, &event) == -1 && errno == EEXIST);
	MUST(repoll_wait(set, got, 4, 0) == 0);
	MUST((near = rsocket(AF_INET, SOCK_STREAM, 0)) >= 0);
	MUST(rfcntl(near, F_SETFL, O_NONBLOCK) == 0);
	MUST(rconnect(near, (struct sockaddr *)&addr, len) == 0 || errno == EINPROGRESS);
	MUST(repoll_wait(set, got, 4, -1) == 1 && got[0].data.u64 == 1 && got[0].events & EPOLLIN);
	MUST((far = raccept(listener, NULL, NULL)) >= 0);
	event.data.u64 = 2;
	event.events = EPOLLOUT | EPOLLONESHOT;
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, near, &event) == 0);
	MUST(repoll_wait(set, got, 4, -1) == 1 && got[0].data.u64 == 2 && got[0].events & EPOLLOUT);
	MUST(repoll_wait(set, got, 4, 50) == 0); /* once */
	event.data.u64 = 3;
	event.events = EPOLLIN;
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, far, &event) == 0);
	MUST(pipe(fds) == 0);
	event.data.u64 = 4;
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, fds[0], &event) == 0);
	MUST(rwrite(near, "hello", 5) == 5 && write(fds[1], "x", 1) == 1);
	while (repoll_wait(set, got, 4, -1) != 2)
		;
	MUST(got[0].data.u64 + got[1].data.u64 == 7);
	MUST(repoll_wait(set, got, 1, -1) == 1);
	MUST(repoll_ctl(set, EPOLL_CTL_DEL, fds[0], NULL) == 0);
	MUST(repoll_ctl(set, EPOLL_CTL_MOD, fds[0], &event) == -1 && errno == ENOENT);
	MUST(repoll_wait(set, got, 4, -1) == 1 && got[0].data.u64 == 3);
	rclose(far);
	MUST(repoll_wait(set, got, 4, 50) == 0); /* a closed member is no more */
	MUST(repoll_ctl(set, EPOLL_CTL_DEL, far, NULL) == -1 && errno == ENOENT);
	MUST(repoll_wait(set, got, 0, 0) == -1 && errno == EINVAL);
	MUST(repoll_wait(fds[0], got, 4, 0) == -1 && errno == EBADF);
	rclose(near);
	rclose(listener);
	close(set);
}

int main(void)
{
	struct ibv_device **list;
	struct ibv_context *context;

	MUST(list = ibv_get_device_list(NULL));
	MUST(context = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	regions(context);
	domains(context);
	MUST(ibv_close_device(context) == 0);
	names();
	taken_ports();
	name_lengths();
	sets();
	return 0;
}
