/*
 * Tests the sockets calls that newer programs make: epoll, dup, ioctl, accept4, messages by the vector. The exit status is the number of failures.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <exs.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int failures;

#define CHECK(what)                                                                                                            \
    do {                                                                                                                       \
        if (!(what)) {                                                                                                         \
            fprintf(stderr, "%s:%d: %s (errno %d, %s)\n", __FILE__, __LINE__, #what, errno, strerror(errno));                  \
            failures++;                                                                                                        \
        }                                                                                                                      \
    } while (0)
#define FAILS(call, with) (errno = 0, (call) == -1 && errno == (with))

static int listening(int type, struct sockaddr_in *addr) {
    socklen_t len = sizeof *addr;
    int fd = exs_sync_socket(AF_INET, type, 0);
    *addr = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(exs_sync_bind(fd, (struct sockaddr *)addr, len) == 0 && exs_sync_listen(fd, 8) == 0);
    CHECK(exs_sync_getsockname(fd, (struct sockaddr *)addr, &len) == 0);
    return fd;
}

/* Two connected sockets; the second one by accept4 with these flags. */
static void pair_of(int type, int fd[2], int flags) {
    struct sockaddr_in addr, peer;
    socklen_t len = sizeof peer;
    int listener = listening(type, &addr);
    CHECK(FAILS(exs_sync_accept4(listener, NULL, NULL, 0x100), EINVAL));
    fd[0] = exs_sync_socket(AF_INET, type, 0);
    CHECK(exs_sync_connect(fd[0], (struct sockaddr *)&addr, sizeof addr) == 0);
    fd[1] = exs_sync_accept4(listener, (struct sockaddr *)&peer, &len, flags);
    CHECK(fd[1] >= 0 && len == sizeof peer && peer.sin_family == AF_INET);
    CHECK(exs_sync_close(listener) == 0);
}

static void close_both(int fd[2]) { CHECK(exs_sync_close(fd[0]) == 0 && exs_sync_close(fd[1]) == 0); }

/* Waits until this many bytes have arrived. */
static int arrived(int fd, int bytes) {
    struct pollfd one = {.fd = fd, .events = POLLIN};
    for (int n = 0; n < bytes;)
        if (exs_sync_poll(&one, 1, 20000) != 1 || exs_sync_ioctl(fd, FIONREAD, &n) != 0)
            return 0;
    return 1;
}

static void flags_and_counts(void) {
    int fd[2], n = -1, on = 1, off = 0;
    char text[8];
    pair_of(SOCK_STREAM, fd, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(exs_sync_fcntl(fd[1], F_GETFL) == (O_RDWR | O_NONBLOCK));
    CHECK(exs_sync_fcntl(fd[1], F_GETFD) == FD_CLOEXEC);
    CHECK(FAILS(exs_sync_recv(fd[1], text, 1, 0), EAGAIN));
    CHECK(exs_sync_ioctl(fd[1], FIONREAD, &n) == 0 && n == 0);
    CHECK(exs_sync_send(fd[0], "abcde", 5, 0) == 5 && arrived(fd[1], 5));
    CHECK(exs_sync_ioctl(fd[1], FIONREAD, &n) == 0 && n == 5);
    CHECK(exs_sync_recv(fd[1], text, 2, 0) == 2);
    CHECK(exs_sync_ioctl(fd[1], FIONREAD, &n) == 0 && n == 3);
    CHECK(exs_sync_ioctl(fd[0], FIONBIO, &on) == 0 && exs_sync_fcntl(fd[0], F_GETFL) == (O_RDWR | O_NONBLOCK));
    CHECK(FAILS(exs_sync_recv(fd[0], text, 1, 0), EAGAIN));
    CHECK(exs_sync_ioctl(fd[0], FIONBIO, &off) == 0 && exs_sync_fcntl(fd[0], F_GETFL) == O_RDWR);
    CHECK(exs_sync_ioctl(fd[0], FIOCLEX) == 0 && exs_sync_fcntl(fd[0], F_GETFD) == FD_CLOEXEC);
    CHECK(exs_sync_ioctl(fd[0], FIONCLEX) == 0 && exs_sync_fcntl(fd[0], F_GETFD) == 0);
    CHECK(exs_sync_sockatmark(fd[0]) == 0);
    CHECK(FAILS(exs_sync_ioctl(fd[0], 0x12345, &n), ENOTTY));
    CHECK(FAILS(exs_sync_ioctl(fd[0], FIONREAD, NULL), EFAULT));
    CHECK(FAILS(exs_sync_ioctl(-1, FIONREAD, &n), EBADF));
    close_both(fd);
    pair_of(SOCK_SEQPACKET, fd, 0); /* of messages: the first one's length */
    CHECK(exs_sync_send(fd[0], "abc", 3, 0) == 3 && exs_sync_send(fd[0], "d", 1, 0) == 1);
    CHECK(arrived(fd[1], 3) && exs_sync_ioctl(fd[1], FIONREAD, &n) == 0 && n == 3);
    close_both(fd);
    CHECK(exs_sync_socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0); /* the system's */
    CHECK(exs_sync_write(fd[0], "x", 1) == 1 && exs_sync_ioctl(fd[1], FIONREAD, &n) == 0 && n == 1);
    close_both(fd);
}

static void duplicates(void) {
    int fd[2], other[2], again, n;
    char text[4];
    pair_of(SOCK_STREAM, fd, 0);
    again = exs_sync_dup(fd[0]);
    CHECK(again >= 0 && again != fd[0]);
    CHECK(exs_sync_close(fd[0]) == 0); /* the connection stays */
    CHECK(exs_sync_send(again, "1", 1, 0) == 1 && exs_sync_recv(fd[1], text, 1, 0) == 1);
    fd[0] = exs_sync_fcntl(again, F_DUPFD_CLOEXEC, 100);
    CHECK(fd[0] >= 100 && exs_sync_fcntl(fd[0], F_GETFD) == FD_CLOEXEC && exs_sync_fcntl(again, F_GETFD) == 0);
    /* One connection has the flags of all its numbers. */
    CHECK(exs_sync_fcntl(fd[0], F_SETFL, O_NONBLOCK) == 0 && exs_sync_fcntl(fd[0], F_GETFL) == (O_RDWR | O_NONBLOCK));
    CHECK(exs_sync_fcntl(fd[0], F_SETFL, 0) == 0);
    pair_of(SOCK_STREAM, other, 0);
    CHECK(exs_sync_dup2(fd[0], fd[0]) == fd[0]);
    CHECK(FAILS(exs_sync_dup3(fd[0], fd[0], 0), EINVAL));
    CHECK(exs_sync_dup2(fd[0], other[0]) == other[0]); /* closes what was there */
    CHECK(exs_sync_recv(other[1], text, 1, 0) == 0);
    CHECK(exs_sync_send(other[0], "2", 1, 0) == 1 && exs_sync_recv(fd[1], text, 1, 0) == 1 && text[0] == '2');
    n = open("/dev/null", O_RDWR);
    CHECK(exs_sync_dup3(n, other[0], O_CLOEXEC) == other[0]); /* of the system, in the place of ours */
    CHECK(exs_sync_write(other[0], "3", 1) == 1 && fcntl(other[0], F_GETFD) == FD_CLOEXEC);
    CHECK(exs_sync_dup2(fd[0], n) == n && exs_sync_send(n, "4", 1, 0) == 1); /* and the reverse */
    CHECK(exs_sync_recv(fd[1], text, 1, 0) == 1 && text[0] == '4');
    CHECK(FAILS(exs_sync_dup(-1), EBADF) && FAILS(exs_sync_dup2(fd[0], -1), EBADF) && FAILS(exs_sync_dup(9999), EBADF));
    close_both(other);
    CHECK(exs_sync_close(again) == 0 && exs_sync_close(n) == 0);
    CHECK(exs_sync_send(fd[0], "5", 1, 0) == 1 && exs_sync_recv(fd[1], text, 1, 0) == 1);
    CHECK(exs_sync_close(fd[0]) == 0); /* the last number: the connection ends */
    CHECK(exs_sync_recv(fd[1], text, 1, 0) == 0 && exs_sync_close(fd[1]) == 0);
    CHECK(FAILS(exs_sync_close(fd[0]), EBADF));
}

/* An asynchronous close of one of several numbers has no end to report. */
static void close_of_a_duplicate(void) {
    int fd[2], again;
    exs_qhandle_t q = exs_qcreate(4);
    pair_of(SOCK_STREAM, fd, 0);
    again = exs_sync_dup(fd[0]);
    CHECK(FAILS(exs_close(fd[0], 0, q, NULL), EBUSY));
    CHECK(exs_close(fd[0], 0, EXS_QHANDLE_INVALID, NULL) == 0);
    CHECK(exs_close(again, 0, q, NULL) == 0);
    exs_event_t event;
    struct timeval limit = {20, 0};
    CHECK(exs_qdequeue(q, &event, 1, &limit) == 1 && event.exs_evt_type == EXS_EVT_CLOSE && event.exs_evt_socket == again);
    CHECK(exs_sync_close(fd[1]) == 0 && exs_qdelete(q) == 0);
}

static void vectors_of_messages(void) {
    int fd[2];
    char in[3][8];
    struct iovec out_iov[3] = {{"one", 3}, {"", 0}, {"three", 5}}, in_iov[3];
    struct mmsghdr out[3], got[3];
    memset(out, 0, sizeof out);
    memset(got, 0, sizeof got);
    for (int i = 0; i < 3; i++) {
        in_iov[i] = (struct iovec){in[i], sizeof in[i]};
        out[i].msg_hdr = (struct msghdr){.msg_iov = &out_iov[i], .msg_iovlen = 1};
        got[i].msg_hdr = (struct msghdr){.msg_iov = &in_iov[i], .msg_iovlen = 1};
    }
    pair_of(SOCK_SEQPACKET, fd, 0);
    CHECK(FAILS(exs_sync_recvmmsg(fd[1], got, 3, MSG_DONTWAIT, NULL), EAGAIN));
    CHECK(exs_sync_sendmmsg(fd[0], out, 3, 0) == 3 && out[0].msg_len == 3 && out[1].msg_len == 0 && out[2].msg_len == 5);
    CHECK(exs_sync_recvmmsg(fd[1], got, 2, 0, NULL) == 2 && got[0].msg_len == 3 && got[1].msg_len == 0);
    CHECK(exs_sync_recvmmsg(fd[1], got, 3, MSG_WAITFORONE, NULL) == 1 && got[0].msg_len == 5 && memcmp(in[0], "three", 5) == 0);
    struct timespec no_time = {0, 0}, odd = {0, 1000000000};
    CHECK(exs_sync_sendmmsg(fd[0], out, 3, 0) == 3);
    CHECK(exs_sync_recvmmsg(fd[1], got, 3, 0, &no_time) == 1); /* the limit is looked at after each message */
    CHECK(FAILS(exs_sync_recvmmsg(fd[1], got, 3, 0, &odd), EINVAL));
    CHECK(FAILS(exs_sync_sendmmsg(fd[0], NULL, 1, 0), EFAULT));
    out[1].msg_hdr.msg_name = in; /* the second fails: the first one's count */
    CHECK(exs_sync_sendmmsg(fd[0], out, 2, 0) == 1);
    CHECK(FAILS(exs_sync_sendmmsg(fd[0], out + 1, 1, 0), EISCONN));
    close_both(fd);
}

static int ready(int epfd, struct epoll_event *event) {
    memset(event, 0, sizeof *event);
    return exs_sync_epoll_wait(epfd, event, 1, 0);
}

static void *reads(void *arg) {
    char text[8];
    return (void *)(intptr_t)exs_sync_recv(*(int *)arg, text, sizeof text, MSG_DONTWAIT);
}

struct later {
    int epfd, fd, op;
    struct epoll_event event;
};

static void *changes(void *arg) {
    struct later *it = arg;
    return (void *)(intptr_t)exs_sync_epoll_ctl(it->epfd, it->op, it->fd, &it->event);
}

static void epoll_sets(void) {
    int fd[2], bell = eventfd(0, EFD_NONBLOCK), epfd = exs_sync_epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event got[4], in = {.events = EPOLLIN, .data.u64 = 0x123456789abcdefULL}, of_bell = {.events = EPOLLIN, .data.fd = bell};
    char text[8];
    pair_of(SOCK_STREAM, fd, 0);
    CHECK(epfd >= 0 && exs_sync_fcntl(epfd, F_GETFD) == FD_CLOEXEC);
    CHECK(FAILS(exs_sync_epoll_create1(0x77), EINVAL) && FAILS(exs_sync_epoll_create(0), EINVAL));
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_MOD, fd[1], &in), ENOENT));
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_DEL, fd[1], NULL), ENOENT));
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], NULL), EFAULT));
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, 77, fd[1], &in), EINVAL));
    CHECK(FAILS(exs_sync_epoll_ctl(bell, EPOLL_CTL_ADD, fd[1], &in), EINVAL));
    CHECK(FAILS(exs_sync_epoll_ctl(9999, EPOLL_CTL_ADD, fd[1], &in), EBADF));
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, -1, &in), EBADF));
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in), EEXIST));
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, bell, &of_bell) == 0);
    CHECK(FAILS(exs_sync_epoll_wait(epfd, got, 0, 0), EINVAL) && FAILS(exs_sync_epoll_wait(epfd, NULL, 1, 0), EFAULT));
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 0) == 0 && exs_sync_epoll_wait(epfd, got, 4, 5) == 0);
    /* Level: as long as the condition is there. */
    CHECK(exs_sync_send(fd[0], "ab", 2, 0) == 2);
    for (int i = 0; i < 2; i++)
        CHECK(exs_sync_epoll_wait(epfd, got, 4, 20000) == 1 && got[0].events == EPOLLIN && got[0].data.u64 == in.data.u64);
    /* Both kinds together, and a place for each in turn. */
    CHECK(write(bell, &(uint64_t){1}, 8) == 8);
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 20000) == 2);
    int seen = 0;
    for (int i = 0; i < 2; i++)
        seen |= exs_sync_epoll_wait(epfd, got, 1, 20000) != 1 ? 4 : got[0].data.u64 == in.data.u64 ? 1 : 2;
    CHECK(seen == 3);
    CHECK(read(bell, text, 8) == 8 && exs_sync_recv(fd[1], text, 2, 0) == 2 && ready(epfd, got) == 0);
    /* A thread that sleeps hears of a change, and of the end of a socket. */
    pthread_t thread;
    struct later later = {epfd, fd[0], EPOLL_CTL_ADD, {.events = EPOLLOUT, .data.u64 = 7}};
    CHECK(pthread_create(&thread, NULL, changes, &later) == 0);
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 20000) == 1 && got[0].events == EPOLLOUT && got[0].data.u64 == 7);
    CHECK(pthread_join(thread, NULL) == 0);
    later.event.events = 0;
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_MOD, fd[0], &later.event) == 0 && ready(epfd, got) == 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_DEL, fd[0], NULL) == 0);
    CHECK(exs_sync_close(fd[0]) == 0);
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 20000) == 1 && got[0].events & EPOLLIN && exs_sync_recv(fd[1], text, 2, 0) == 0);
    CHECK(exs_sync_close(fd[1]) == 0 && ready(epfd, got) == 0); /* a closed socket leaves the set */
    pair_of(SOCK_STREAM, fd, 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0); /* its number may come again */
    /* Once. */
    in.events = EPOLLIN | EPOLLONESHOT;
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_MOD, fd[1], &in) == 0 && exs_sync_send(fd[0], "c", 1, 0) == 1);
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 20000) == 1 && ready(epfd, got) == 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_MOD, fd[1], &in) == 0 && ready(epfd, got) == 1);
    CHECK(exs_sync_recv(fd[1], text, 1, 0) == 1);
    close_both(fd);
    CHECK(exs_sync_close(epfd) == 0 && FAILS(exs_sync_epoll_wait(epfd, got, 1, 0), EBADF));
    close(bell);
}

/* A set knows a member by its number and its socket, and a set with several numbers is one. */
static void numbers_that_come_again(void) {
    int fd[2], other[2], again, twin, epfd = exs_sync_epoll_create1(0);
    struct epoll_event got[4], in = {.events = EPOLLIN, .data.u64 = 1};
    pair_of(SOCK_STREAM, fd, 0);
    pair_of(SOCK_STREAM, other, 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
    again = exs_sync_dup(fd[1]);
    CHECK(exs_sync_dup2(other[1], fd[1]) == fd[1]);
    in.data.u64 = 2;
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
    CHECK(FAILS(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in), EEXIST));
    CHECK(exs_sync_send(fd[0], "a", 1, 0) == 1 && exs_sync_send(other[0], "b", 1, 0) == 1);
    CHECK(arrived(again, 1) && arrived(other[1], 1));
    twin = exs_sync_fcntl(epfd, F_DUPFD_CLOEXEC, 0);
    CHECK(exs_sync_epoll_wait(twin, got, 4, 0) == 2 && (got[0].data.u64 | got[1].data.u64) == 3);
    CHECK(exs_close(epfd, 0, EXS_QHANDLE_INVALID, NULL) == 0 && exs_sync_epoll_wait(twin, got, 4, 0) == 2);
    int fresh = epoll_create1(0);
    CHECK(fresh == epfd || (dup2(fresh, epfd) == epfd && close(fresh) == 0)); /* the system's own, of the same number */
    CHECK(exs_sync_epoll_wait(epfd, got, 4, 0) == 0);
    CHECK(close(epfd) == 0 && exs_sync_close(twin) == 0 && exs_sync_close(again) == 0);
    close_both(fd);
    close_both(other);
}

static void edges(void) {
    int fd[2], epfd = exs_sync_epoll_create(1);
    struct epoll_event got, both = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = 1};
    char text[8];
    pthread_t thread;
    pair_of(SOCK_STREAM, fd, SOCK_NONBLOCK);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &both) == 0);
    CHECK(ready(epfd, &got) == 1 && got.events == EPOLLOUT && ready(epfd, &got) == 0); /* room, once */
    CHECK(exs_sync_send(fd[0], "ab", 2, 0) == 2);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1 && got.events == EPOLLIN && ready(epfd, &got) == 0);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 10) == 0); /* sleeps beside a condition that it has reported */
    CHECK(exs_sync_recv(fd[1], text, 8, 0) == 2 && FAILS(exs_sync_recv(fd[1], text, 8, 0), EAGAIN));
    CHECK(ready(epfd, &got) == 0 && exs_sync_send(fd[0], "c", 1, 0) == 1);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1 && got.events == EPOLLIN);
    /* Another thread reads while this one sleeps; what comes then is new. */
    CHECK(pthread_create(&thread, NULL, reads, &fd[1]) == 0);
    void *count = NULL;
    CHECK(pthread_join(thread, &count) == 0 && (intptr_t)count == 1);
    CHECK(exs_sync_send(fd[0], "d", 1, 0) == 1);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1 && got.events == EPOLLIN);
    CHECK(exs_sync_recv(fd[1], text, 1, 0) == 1);
    /* The end is reported once too, and so is the end of the connection. */
    int more = 0;
    CHECK(exs_sync_close(fd[0]) == 0);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1 && got.events & EPOLLIN);
    while (more < 5 && exs_sync_epoll_wait(epfd, &got, 1, 10) == 1)
        more++;
    CHECK(more < 5);
    CHECK(exs_sync_close(fd[1]) == 0 && exs_sync_close(epfd) == 0);
}

/* A worker reads while the main thread already sleeps beside the condition that it has reported. */
struct worker {
    int from, to;
    sem_t *go;
};

static void *works(void *arg) {
    struct worker *it = arg;
    char text[8];
    while (sem_wait(it->go) != 0)
        ;
    CHECK(exs_sync_recv(it->from, text, 8, MSG_DONTWAIT) == 1);
    CHECK(FAILS(exs_sync_recv(it->from, text, 8, MSG_DONTWAIT), EAGAIN));
    CHECK(exs_sync_send(it->to, "f", 1, 0) == 1);
    return NULL;
}

static void an_edge_for_a_sleeper(void) {
    int fd[2], epfd = exs_sync_epoll_create1(0);
    struct epoll_event got, in = {.events = EPOLLIN | EPOLLET};
    sem_t go;
    pthread_t thread;
    pair_of(SOCK_STREAM, fd, 0);
    CHECK(sem_init(&go, 0, 0) == 0);
    struct worker worker = {fd[1], fd[0], &go};
    CHECK(pthread_create(&thread, NULL, works, &worker) == 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0 && exs_sync_send(fd[0], "e", 1, 0) == 1);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1);
    CHECK(sem_post(&go) == 0);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 20000) == 1);
    CHECK(pthread_join(thread, NULL) == 0);
    close_both(fd);
    CHECK(exs_sync_close(epfd) == 0 && sem_destroy(&go) == 0);
}

static volatile sig_atomic_t signals;

static void count_signal(int signal) {
    (void)signal;
    signals++;
}

/* A signal that is blocked but for the wait ends the wait. */
static void masks(void) {
    int fd[2], epfd = exs_sync_epoll_create1(0);
    struct epoll_event got, in = {.events = EPOLLIN};
    struct pollfd one;
    sigset_t blocked, none;
    fd_set set;
    pair_of(SOCK_STREAM, fd, 0);
    one = (struct pollfd){.fd = fd[1], .events = POLLIN};
    struct sigaction action = {.sa_handler = count_signal};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &blocked, NULL) == 0);
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
    struct timespec limit = {20, 0}, short_time = {0, 1000000}, no_time = {0, 0}, odd = {-1, 0};
    CHECK(raise(SIGUSR1) == 0 && FAILS(exs_sync_epoll_pwait(epfd, &got, 1, 20000, &none), EINTR) && signals == 1);
    CHECK(raise(SIGUSR1) == 0 && FAILS(exs_sync_epoll_pwait2(epfd, &got, 1, &limit, &none), EINTR) && signals == 2);
    CHECK(raise(SIGUSR1) == 0 && FAILS(exs_sync_ppoll(&one, 1, &limit, &none), EINTR) && signals == 3);
    FD_ZERO(&set);
    FD_SET(fd[1], &set);
    CHECK(raise(SIGUSR1) == 0 && FAILS(exs_sync_pselect(fd[1] + 1, &set, NULL, NULL, &limit, &none), EINTR) && signals == 4);
    CHECK(raise(SIGUSR1) == 0 && exs_sync_ppoll(&one, 1, &short_time, NULL) == 0 && signals == 4);
    CHECK(FAILS(exs_sync_ppoll(&one, 1, &no_time, &none), EINTR) && signals == 5); /* a look lets it in too */
    CHECK(exs_sync_ppoll(&one, 1, &no_time, &none) == 0);
    FD_SET(fd[1], &set);
    CHECK(raise(SIGUSR1) == 0 && FAILS(exs_sync_pselect(fd[1] + 1, &set, NULL, NULL, &no_time, &none), EINTR) && signals == 6);
    CHECK(raise(SIGUSR1) == 0);
    CHECK(FAILS(exs_sync_ppoll(&one, 1, &odd, NULL), EINVAL) && FAILS(exs_sync_epoll_pwait2(epfd, &got, 1, &odd, NULL), EINVAL));
    CHECK(exs_sync_send(fd[0], "a", 1, 0) == 1);
    CHECK(exs_sync_ppoll(&one, 1, NULL, NULL) == 1 && exs_sync_epoll_pwait2(epfd, &got, 1, NULL, NULL) == 1);
    FD_SET(fd[1], &set);
    CHECK(exs_sync_pselect(fd[1] + 1, &set, NULL, NULL, NULL, NULL) == 1 && FD_ISSET(fd[1], &set));
    CHECK(pthread_sigmask(SIG_UNBLOCK, &blocked, NULL) == 0 && signals == 7);
    close_both(fd);
    CHECK(exs_sync_close(epfd) == 0);
}

/* A message that a stream takes only in part is the last one of a call: the rest of it is missing before the next. */
static void part_of_a_message(void) {
    static char data[1 << 20];
    int fd[2];
    struct iovec pieces[2] = {{data, sizeof data / 2}, {data, sizeof data / 2}}, none = {data, 0};
    struct mmsghdr out[2];
    memset(out, 0, sizeof out);
    out[0].msg_hdr = (struct msghdr){.msg_iov = pieces, .msg_iovlen = 2};
    out[1].msg_hdr = (struct msghdr){.msg_iov = &none, .msg_iovlen = 1};
    pair_of(SOCK_STREAM, fd, 0);
    CHECK(exs_sync_sendmmsg(fd[0], out, 2, MSG_DONTWAIT) == 1);
    CHECK(out[0].msg_len > 0 && out[0].msg_len < sizeof data);
    close_both(fd);
}

/* The thread's state as ps shows it: S, while it waits for an event. */
static char state_of(pid_t thread) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)thread);
    FILE *stat = fopen(path, "r");
    if (!stat)
        return 0;
    if (fscanf(stat, "%*d (%*[^)]) %c", &state) != 1)
        state = 0;
    fclose(stat);
    return state;
}

struct sleeper {
    int fd, epfd, count;
    _Atomic pid_t thread;
    struct epoll_event got;
};

static void *sleeps(void *arg) {
    struct sleeper *it = arg;
    struct pollfd one = {.fd = it->fd, .events = POLLIN};
    it->thread = (pid_t)syscall(SYS_gettid);
    it->count = it->epfd < 0 ? exs_sync_poll(&one, 1, 20000) : exs_sync_epoll_wait(it->epfd, &it->got, 1, 20000);
    return NULL;
}

/* Starts a thread that waits, and returns when it does. */
static pthread_t asleep(struct sleeper *it) {
    pthread_t thread;
    it->thread = 0;
    CHECK(pthread_create(&thread, NULL, sleeps, it) == 0);
    while (it->thread == 0 || state_of(it->thread) != 'S')
        sched_yield();
    return thread;
}

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* shutdown(SHUT_RD) ends the waits of other threads. */
static void a_shutdown_wakes(void) {
    int fd[2];
    for (int kind = 0; kind < 3; kind++) {
        struct epoll_event in = {.events = kind == 1 ? EPOLLIN : EPOLLIN | EPOLLET};
        double begun = seconds(CLOCK_MONOTONIC);
        pair_of(SOCK_STREAM, fd, 0);
        struct sleeper sleeper = {.fd = fd[1], .epfd = kind == 0 ? -1 : exs_sync_epoll_create1(0)};
        CHECK(kind == 0 || exs_sync_epoll_ctl(sleeper.epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
        if (kind == 2) { /* the condition has been reported, and the sleeper does not look at it */
            CHECK(exs_sync_send(fd[0], "a", 1, 0) == 1);
            CHECK(exs_sync_epoll_wait(sleeper.epfd, &sleeper.got, 1, 20000) == 1);
        }
        pthread_t thread = asleep(&sleeper);
        CHECK(exs_sync_shutdown(fd[1], SHUT_RD) == 0);
        CHECK(pthread_join(thread, NULL) == 0 && sleeper.count == 1);
        CHECK(seconds(CLOCK_MONOTONIC) - begun < 10);
        CHECK(kind == 0 || exs_sync_close(sleeper.epfd) == 0);
        close_both(fd);
    }
}

/* Waits neither fail nor spin while the process can have no further descriptor. */
static void without_descriptors(void) {
    int fd[2], epfd = exs_sync_epoll_create1(0), extra[64], n = 0;
    struct rlimit before, few;
    struct epoll_event got, in = {.events = EPOLLIN};
    pair_of(SOCK_STREAM, fd, 0);
    struct pollfd end = {.fd = fd[0], .events = 0};
    CHECK(exs_sync_epoll_ctl(epfd, EPOLL_CTL_ADD, fd[1], &in) == 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = (struct rlimit){.rlim_cur = 16, .rlim_max = before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    while (n < 64 && (extra[n] = dup(epfd)) >= 0)
        n++;
    CHECK(n < 64 && errno == EMFILE);
    double begun = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_THREAD_CPUTIME_ID);
    CHECK(exs_sync_epoll_wait(epfd, &got, 1, 200) == 0);
    CHECK(exs_sync_poll(&end, 1, 200) == 0);
    CHECK(seconds(CLOCK_MONOTONIC) - begun > 0.399);
    CHECK(seconds(CLOCK_THREAD_CPUTIME_ID) - used < 0.1);
    struct sleeper sleeper = {.fd = fd[1], .epfd = epfd};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, sleeps, &sleeper) == 0 && exs_sync_send(fd[0], "a", 1, 0) == 1);
    CHECK(pthread_join(thread, NULL) == 0 && sleeper.count == 1);
    while (n > 0)
        close(extra[--n]);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(exs_sync_close(epfd) == 0);
    close_both(fd);
}

int main(void) {
    alarm(120); /* a call that hangs ends the program */
    flags_and_counts();
    duplicates();
    close_of_a_duplicate();
    vectors_of_messages();
    part_of_a_message();
    epoll_sets();
    numbers_that_come_again();
    edges();
    an_edge_for_a_sleeper();
    masks();
    a_shutdown_wakes();
    without_descriptors();
    return failures > 99 ? 99 : failures;
}
