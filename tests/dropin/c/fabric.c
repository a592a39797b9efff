/* Two endpoints of a libfabric provider in one process: the source of each message, counters, a receive of many messages, a descriptor to sleep on, and a
 * queue that threads share.
 * Usage: fabric PROVIDER. Says "all as it should be" or what is not. */
#include <poll.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <stdio.h>
#include <stdlib.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGES = 300, LONGEST = 20000, SHARED = 20000, AT_ONCE = 32 };

#define OK(call)                                                                    \
    do {                                                                            \
        long r_ = (long)(call);                                                     \
        if (r_ < 0) {                                                               \
            fprintf(stderr, "%s: %ld %s\n", #call, r_, fi_strerror((int)-r_));      \
            exit(1);                                                                \
        }                                                                           \
    } while (0)
#define IS(what)                                                \
    do {                                                        \
        if (!(what)) {                                          \
            fprintf(stderr, "line %d: not %s\n", __LINE__, #what); \
            exit(1);                                            \
        }                                                       \
    } while (0)

struct end {
    struct fid_ep *ep;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_cntr *sent, *received;
    int fd;
};

static struct fid_fabric *fabric;

static void open_end(struct fid_domain *domain, struct fi_info *info, struct end *end) {
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_FD};
    struct fi_av_attr av = {.type = FI_AV_TABLE};
    struct fi_cntr_attr counter = {.events = FI_CNTR_EVENTS_COMP};
    OK(fi_endpoint(domain, info, &end->ep, NULL));
    OK(fi_cq_open(domain, &cq, &end->cq, NULL));
    OK(fi_av_open(domain, &av, &end->av, NULL));
    OK(fi_cntr_open(domain, &counter, &end->sent, NULL));
    OK(fi_cntr_open(domain, &counter, &end->received, NULL));
    OK(fi_ep_bind(end->ep, &end->cq->fid, FI_SEND | FI_RECV));
    OK(fi_ep_bind(end->ep, &end->av->fid, 0));
    OK(fi_ep_bind(end->ep, &end->sent->fid, FI_SEND));
    OK(fi_ep_bind(end->ep, &end->received->fid, FI_RECV));
    OK(fi_enable(end->ep));
    OK(fi_control(&end->cq->fid, FI_GETWAIT, &end->fd));
}

/* The next completion. Sleeps on the descriptor, and on nothing else. */
static struct fi_cq_tagged_entry next(struct end *end, fi_addr_t *from) {
    struct fi_cq_tagged_entry entry;
    for (;;) {
        ssize_t n = fi_cq_readfrom(end->cq, &entry, 1, from);
        if (n == 1)
            return entry;
        if (n != -FI_EAGAIN) {
            fprintf(stderr, "fi_cq_readfrom: %zd\n", n);
            exit(1);
        }
        struct fid *fids[] = {&end->cq->fid};
        if (fi_trywait(fabric, fids, 1) != FI_SUCCESS)
            continue;
        struct pollfd fd = {.fd = end->fd, .events = POLLIN};
        IS(poll(&fd, 1, 30000) == 1);
    }
}

static unsigned char at(int i, size_t j) { return (unsigned char)(i * 31 + j * 7); }

static struct end *shared;
static fi_addr_t sender;
static atomic_int taken;

/* One of the threads that take the completions of one queue, each with its source. */
static void *take(void *unused) {
    (void)unused;
    struct fi_cq_tagged_entry entries[4];
    fi_addr_t from[4];
    while (atomic_load(&taken) < SHARED) {
        ssize_t n = fi_cq_readfrom(shared->cq, entries, 4, from);
        IS(n > 0 || n == -FI_EAGAIN);
        for (ssize_t i = 0; i < n; i++)
            IS(from[i] == sender);
        if (n > 0)
            atomic_fetch_add(&taken, (int)n);
    }
    return NULL;
}

static void threads_share(struct end *from, fi_addr_t to, struct end *end, fi_addr_t source) {
    static unsigned char in[8], out[8];
    pthread_t threads[2];
    shared = end;
    sender = source;
    alarm(120);
    for (int i = 0; i < 2; i++)
        IS(pthread_create(&threads[i], NULL, take, NULL) == 0);
    for (int i = 0; i < SHARED; i++) {
        while (i - atomic_load(&taken) >= AT_ONCE)
            fi_cq_read(from->cq, NULL, 0);
        OK(fi_trecv(end->ep, in, sizeof in, NULL, FI_ADDR_UNSPEC, 7, 0, NULL));
        while (fi_tinject(from->ep, out, sizeof out, to, 7) == -FI_EAGAIN)
            fi_cq_read(from->cq, NULL, 0);
    }
    while (atomic_load(&taken) < SHARED)
        fi_cq_read(from->cq, NULL, 0);
    for (int i = 0; i < 2; i++)
        IS(pthread_join(threads[i], NULL) == 0);
    alarm(0);
}

/* A peer is found by the address and the port that its endpoint was opened with; nothing else is exchanged. */
static void found_by_port(struct fi_info *hints) {
    const char *nodes[] = {"127.0.0.1", NULL};
    for (int i = 0; i < 2; i++) {
        struct fi_info *server, *client;
        struct fid_domain *domain;
        struct end a, b;
        fi_addr_t to;
        char service[8];
        snprintf(service, sizeof service, "%d", 20000 + (getpid() + i) % 10000);
        OK(fi_getinfo(FI_VERSION(1, 17), nodes[i], service, FI_SOURCE, hints, &server));
        OK(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", service, 0, hints, &client));
        IS(client->dest_addr && client->src_addr);
        OK(fi_domain(fabric, server, &domain, NULL));
        open_end(domain, server, &b);
        open_end(domain, client, &a);
        IS(fi_av_insert(a.av, client->dest_addr, 1, &to, 0, NULL) == 1);
        char name[64], other[64];
        size_t len = sizeof name, other_len = sizeof other;
        OK(fi_getname(&b.ep->fid, name, &len));
        OK(fi_av_lookup(a.av, to, other, &other_len));
        IS(len == other_len && !memcmp(name, other, len));
        IS(fi_av_insertsvc(a.av, "127.0.0.1", service, &to, 0, NULL) == 1);
        OK(fi_tsend(a.ep, service, 6, NULL, to, 9, &a));
        OK(fi_trecv(b.ep, name, sizeof name, NULL, FI_ADDR_UNSPEC, 9, 0, &b));
        IS(next(&b, NULL).len == 6 && !strcmp(name, service));
        OK(fi_close(&a.ep->fid));
        OK(fi_close(&b.ep->fid));
        /* Nobody answers there now. */
        IS(fi_av_insert(a.av, client->dest_addr, 1, &to, 0, NULL) == 0 && to == FI_ADDR_NOTAVAIL);
    }
}

static void *write_event(void *eq) {
    usleep(20000);
    OK(fi_eq_write(eq, FI_NOTIFY, "hello", 6, 0));
    return NULL;
}

static void event_queue_blocks(void) {
    struct fi_eq_attr attr = {.wait_obj = FI_WAIT_UNSPEC, .flags = FI_WRITE};
    struct fid_eq *eq;
    uint32_t event;
    char text[8];
    pthread_t thread;
    struct timespec begin, end;
    OK(fi_eq_open(fabric, &attr, &eq, NULL));
    clock_gettime(CLOCK_MONOTONIC, &begin);
    IS(fi_eq_sread(eq, &event, text, sizeof text, 50, 0) == -FI_EAGAIN);
    clock_gettime(CLOCK_MONOTONIC, &end);
    IS((end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000 >= 49);
    pthread_create(&thread, NULL, write_event, eq);
    IS(fi_eq_sread(eq, &event, text, sizeof text, -1, FI_PEEK) == 6);
    IS(fi_eq_read(eq, &event, text, 5, 0) == -FI_ETOOSMALL);
    IS(fi_eq_read(eq, &event, text, sizeof text, 0) == 6 && event == FI_NOTIFY && !strcmp(text, "hello"));
    IS(fi_eq_read(eq, &event, text, sizeof text, 0) == -FI_EAGAIN);
    pthread_join(thread, NULL);
    OK(fi_close(&eq->fid));
}

int main(int argc, char **argv) {
    struct fi_info *hints = fi_allocinfo(), *info;
    if (argc != 2 || !hints)
        return 2;
    hints->caps = FI_MSG | FI_TAGGED | FI_SOURCE | FI_MULTI_RECV;
    hints->ep_attr->type = FI_EP_RDM;
    hints->fabric_attr->prov_name = strdup(argv[1]);
    OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &info));
    IS((info->caps & FI_SOURCE) && info->src_addr);
    struct fid_domain *domain;
    OK(fi_fabric(info->fabric_attr, &fabric, NULL));
    OK(fi_domain(fabric, info, &domain, NULL));
    struct end a, b;
    open_end(domain, info, &a);
    open_end(domain, info, &b);
    char names[2][64];
    size_t len = sizeof names[0];
    OK(fi_getname(&a.ep->fid, names[0], &len));
    OK(fi_getname(&b.ep->fid, names[1], &len));
    fi_addr_t to_b, to_a, itself;
    IS(fi_av_insert(a.av, names[1], 1, &to_b, 0, NULL) == 1);
    IS(fi_av_insert(b.av, names[1], 1, &itself, 0, NULL) == 1);
    IS(fi_av_insert(b.av, names[0], 1, &to_a, 0, NULL) == 1);
    IS(to_a != itself);

    /* Messages with tags, one after the other; the receiver sleeps. */
    static unsigned char out[LONGEST], in[LONGEST];
    for (int i = 0; i < MESSAGES; i++) {
        size_t size = (size_t)i * 67 % LONGEST;
        for (size_t j = 0; j < size; j++)
            out[j] = at(i, j);
        OK(fi_trecv(b.ep, in, sizeof in, NULL, FI_ADDR_UNSPEC, (uint64_t)i, 0, &b));
        OK(fi_tsend(a.ep, out, size, NULL, to_b, (uint64_t)i, &a));
        fi_addr_t from = FI_ADDR_UNSPEC;
        struct fi_cq_tagged_entry entry = next(&b, &from);
        IS(entry.op_context == &b && entry.tag == (uint64_t)i && entry.len == size && (entry.flags & FI_RECV));
        IS(from == to_a);
        for (size_t j = 0; j < size; j++)
            IS(in[j] == at(i, j));
        IS(next(&a, NULL).op_context == &a);
    }
    IS(fi_cntr_read(a.sent) == MESSAGES && fi_cntr_read(b.received) == MESSAGES);
    IS(fi_cntr_read(a.received) == 0 && fi_cntr_readerr(a.sent) == 0);

    threads_share(&a, to_b, &b, to_a);

    /* Many into one buffer, until less than 120 bytes are left of 1000. */
    size_t least = 120;
    OK(fi_setopt(&b.ep->fid, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, &least, sizeof least));
    struct iovec iov = {in, 1000};
    struct fi_msg msg = {.msg_iov = &iov, .iov_count = 1, .addr = FI_ADDR_UNSPEC, .context = in};
    OK(fi_recvmsg(b.ep, &msg, FI_MULTI_RECV | FI_COMPLETION));
    int released = 0, count = 0;
    while (!released) {
        memset(out, count + 1, 150);
        OK(fi_inject(a.ep, out, 150, to_b));
        struct fi_cq_tagged_entry entry = next(&b, NULL);
        IS(entry.op_context == in && entry.buf == in + 150 * count && entry.len == 150);
        IS(in[150 * count] == count + 1 && in[150 * count + 149] == count + 1);
        released = (entry.flags & FI_MULTI_RECV) != 0;
        count++;
    }
    IS(count == 6);
    IS(fi_cntr_wait(a.sent, MESSAGES + SHARED + 6, 10000) == 0);
    IS(fi_cntr_wait(b.received, MESSAGES + SHARED + 7, 50) == -FI_ETIMEDOUT);
    IS(fi_cq_read(a.cq, out, 1) == -FI_EAGAIN);
    event_queue_blocks();
    found_by_port(hints);

    OK(fi_close(&a.ep->fid));
    OK(fi_close(&b.ep->fid));
    for (struct end *end = &a; end; end = end == &a ? &b : NULL) {
        OK(fi_close(&end->cq->fid));
        OK(fi_close(&end->av->fid));
        OK(fi_close(&end->sent->fid));
        OK(fi_close(&end->received->fid));
    }
    OK(fi_close(&domain->fid));
    OK(fi_close(&fabric->fid));
    fi_freeinfo(info);
    fi_freeinfo(hints);
    puts("all as it should be");
    return 0;
}
