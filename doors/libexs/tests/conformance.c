/*
 * Tests the statements of the manual pages: calls, events, errors. Each case runs over IPv4 and IPv6.
 * Arguments: names of cases to run; none: all. The exit status is the number of failures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <exs.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;
static const char *running;
static int family;

#define CHECK(what)                                                                                                            \
    do {                                                                                                                       \
        if (!(what)) {                                                                                                         \
            fprintf(stderr, "%s:%d: %s (IPv%d): %s (errno %d, %s)\n", __FILE__, __LINE__, running, family == AF_INET ? 4 : 6,  \
                    #what, errno, strerror(errno));                                                                            \
            failures++;                                                                                                        \
        }                                                                                                                      \
    } while (0)
#define FAILS(call, with) (errno = 0, (call) == -1 && errno == (with))

static struct sockaddr_storage loopback(socklen_t *len) {
    struct sockaddr_storage addr;
    memset(&addr, 0, sizeof addr);
    addr.ss_family = (sa_family_t)family;
    if (family == AF_INET) {
        ((struct sockaddr_in *)&addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        *len = sizeof(struct sockaddr_in);
    } else {
        ((struct sockaddr_in6 *)&addr)->sin6_addr = in6addr_loopback;
        *len = sizeof(struct sockaddr_in6);
    }
    return addr;
}

static exs_event_t next_event(exs_qhandle_t q) {
    exs_event_t event;
    struct timeval limit = {20, 0};
    memset(&event, 0, sizeof event);
    int n = exs_qdequeue(q, &event, 1, &limit);
    if (n != 1) {
        fprintf(stderr, "%s: no event: %d, %s\n", running, n, strerror(errno));
        exit(100);
    }
    return event;
}

static int listening(int type, struct sockaddr_storage *addr, socklen_t *len) {
    int fd = exs_socket(family, type, 0);
    CHECK(fd >= 0);
    *addr = loopback(len);
    CHECK(exs_bind(fd, (struct sockaddr *)addr, *len) == 0);
    CHECK(exs_listen(fd, 8) == 0);
    *len = sizeof *addr;
    CHECK(exs_getsockname(fd, (struct sockaddr *)addr, len) == 0);
    return fd;
}

/* Two connected sockets. */
static void pair_of(int type, exs_qhandle_t q, int fd[2]) {
    struct sockaddr_storage addr, peer;
    socklen_t len;
    int listener = listening(type, &addr, &len);
    exs_acceptaddr_t from = {(struct sockaddr *)&peer, sizeof peer};
    fd[0] = exs_socket(family, type, 0);
    CHECK(exs_accept(listener, &from, 0, q, (exs_ahandle_t)1) == 0);
    CHECK(exs_connect(fd[0], (struct sockaddr *)&addr, len, 0, q, (exs_ahandle_t)2) == 0);
    fd[1] = -1;
    for (int i = 0; i < 2; i++) {
        exs_event_t event = next_event(q);
        CHECK(event.exs_evt_errno == 0);
        if (event.exs_evt_type == EXS_EVT_ACCEPT) {
            CHECK(event.exs_evt_socket == listener && event.exs_evt_ahandle == (exs_ahandle_t)1);
            CHECK(event.exs_evt_union.exs_evt_accept.exs_evt_addr == &from);
            CHECK(from.aa_addrlen == len && peer.ss_family == family);
            fd[1] = event.exs_evt_union.exs_evt_accept.exs_evt_new_socket;
        } else {
            CHECK(event.exs_evt_type == EXS_EVT_CONNECT && event.exs_evt_socket == fd[0]);
            CHECK(event.exs_evt_ahandle == (exs_ahandle_t)2);
        }
    }
    CHECK(fd[1] >= 0 && fd[1] != fd[0]);
    struct sockaddr_storage ours;
    socklen_t ours_len = sizeof ours;
    CHECK(exs_getsockname(fd[0], (struct sockaddr *)&ours, &ours_len) == 0);
    CHECK(ours_len == len && memcmp(&ours, &peer, len) == 0);
    CHECK(exs_close(listener, 0, EXS_QHANDLE_INVALID, NULL) == 0);
}

/* Two connected kernel sockets. */
static void plain_pair(int fd[2]) {
    socklen_t len;
    struct sockaddr_storage addr = loopback(&len);
    int listener = socket(family, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&addr, len) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&addr, &len) == 0);
    fd[0] = socket(family, SOCK_STREAM, 0);
    CHECK(connect(fd[0], (struct sockaddr *)&addr, len) == 0);
    fd[1] = accept(listener, NULL, NULL);
    CHECK(fd[1] >= 0);
    close(listener);
}

static void close_both(int fd[2]) {
    CHECK(exs_sync_close(fd[0]) == 0);
    CHECK(exs_sync_close(fd[1]) == 0);
}

/* ---- cases --------------------------------------------------------------------------------------------------------------- */

static void stream(exs_qhandle_t q) {
    int fd[2];
    char from[] = "hello, world", to[32] = "";
    pair_of(SOCK_STREAM, q, fd);
    CHECK(exs_recv(fd[1], to, sizeof to, 0, q, to, EXS_MHANDLE_UNREGISTERED) == 0);
    CHECK(exs_send(fd[0], from, sizeof from, MSG_NOSIGNAL, q, from, EXS_MHANDLE_UNREGISTERED) == 0);
    for (int i = 0; i < 2; i++) {
        exs_event_t event = next_event(q);
        exs_evt_xfer_t *xfer = &event.exs_evt_union.exs_evt_xfer;
        CHECK(event.exs_evt_errno == 0 && event.exs_evt_flags == 0 && xfer->exs_evt_length == sizeof from);
        CHECK(xfer->exs_evt_mhandle == EXS_MHANDLE_UNREGISTERED && xfer->exs_evt_buffer == event.exs_evt_ahandle);
        if (event.exs_evt_type == EXS_EVT_SEND)
            CHECK(event.exs_evt_socket == fd[0] && xfer->exs_evt_buffer == from);
        else
            CHECK(event.exs_evt_type == EXS_EVT_RECV && event.exs_evt_socket == fd[1] && xfer->exs_evt_buffer == to);
    }
    CHECK(strcmp(from, to) == 0);

    /* half close: the peer sees the end, and can still send */
    CHECK(exs_shutdown(fd[0], EXS_SHUT_WR, 0, q, NULL) == 0);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_SHUTDOWN && event.exs_evt_errno == 0);
    CHECK(exs_recv(fd[1], to, sizeof to, 0, q, NULL, 0) == 0);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_RECV && event.exs_evt_errno == 0);
    CHECK(event.exs_evt_union.exs_evt_xfer.exs_evt_length == 0);
    CHECK(FAILS(exs_send(fd[0], from, 1, 0, q, NULL, 0), EPIPE)); /* without SIGPIPE */
    CHECK(exs_sync_send(fd[1], from, 5, 0) == 5);
    CHECK(exs_sync_recv(fd[0], to, sizeof to, 0) == 5);

    CHECK(exs_close(fd[0], 0, q, (exs_ahandle_t)7) == 0);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_CLOSE && event.exs_evt_errno == 0 && event.exs_evt_ahandle == (exs_ahandle_t)7);
    CHECK(FAILS(exs_send(fd[0], from, 1, 0, q, NULL, 0), EBADF));
    CHECK(FAILS(exs_close(fd[0], 0, EXS_QHANDLE_INVALID, NULL), EBADF));
    CHECK(exs_sync_close(fd[1]) == 0);
}

static void seqpacket(exs_qhandle_t q) {
    for (int design = EXS_DESIGN_ADVERT; design <= EXS_DESIGN_SOURCE; design++) {
        struct sockaddr_storage addr;
        socklen_t len;
        int listener = exs_socket(family, SOCK_SEQPACKET, 0), fd[2];
        addr = loopback(&len);
        CHECK(exs_fcntl(listener, EXS_F_SETDESIGN, design) == 0 && exs_fcntl(listener, EXS_F_GETDESIGN) == design);
        CHECK(exs_bind(listener, (struct sockaddr *)&addr, len) == 0 && exs_listen(listener, 1) == 0);
        CHECK(exs_getsockname(listener, (struct sockaddr *)&addr, &len) == 0);
        CHECK(exs_accept(listener, NULL, 0, q, NULL) == 0);
        fd[0] = exs_sync_socket(family, SOCK_SEQPACKET, 0);
        CHECK(exs_fcntl(fd[0], EXS_F_SETDESIGN, design) == 0);
        CHECK(exs_sync_connect(fd[0], (struct sockaddr *)&addr, len) == 0);
        fd[1] = next_event(q).exs_evt_union.exs_evt_accept.exs_evt_new_socket;

        static char big[100000], to[100000], cut[11];
        memset(big, 'b', sizeof big);
        CHECK(exs_recv(fd[1], to, sizeof to, 0, q, NULL, 0) == 0);
        CHECK(exs_recv(fd[1], cut, 10, 0, q, NULL, 0) == 0);
        CHECK(exs_send(fd[0], big, sizeof big, 0, q, NULL, 0) == 0);
        CHECK(exs_send(fd[0], "a longer message", 16, 0, q, NULL, 0) == 0);
        size_t got[2] = {0, 0};
        int flags[2] = {0, 0}, n = 0;
        for (int i = 0; i < 4; i++) {
            exs_event_t event = next_event(q);
            CHECK(event.exs_evt_errno == 0);
            if (event.exs_evt_type == EXS_EVT_RECV) {
                got[n] = event.exs_evt_union.exs_evt_xfer.exs_evt_length;
                flags[n++] = event.exs_evt_flags;
            }
        }
        CHECK(n == 2 && got[0] == sizeof big && flags[0] == 0);
        CHECK(got[1] == 10 && flags[1] == EXS_EVF_TRUNC && strcmp(cut, "a longer m") == 0);

        struct iovec iov[2] = {{to, 4}, {to + 100, 4}};
        struct msghdr msg;
        memset(&msg, 0, sizeof msg);
        msg.msg_iov = iov;
        msg.msg_iovlen = 2;
        CHECK(exs_sync_send(fd[0], "0123456789", 10, MSG_DONTWAIT) == 10);
        CHECK(exs_sync_recvmsg(fd[1], &msg, 0) == 8 && msg.msg_flags == MSG_TRUNC);
        CHECK(memcmp(to, "0123", 4) == 0 && memcmp(to + 100, "4567", 4) == 0);
        int type = 0;
        socklen_t size = sizeof type;
        CHECK(exs_getsockopt(fd[0], SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET);
        close_both(fd);
        CHECK(exs_sync_close(listener) == 0);
    }
}

static void registered(exs_qhandle_t q) {
    int fd[2];
    size_t len = 1 << 20;
    char *memory = mmap(NULL, 2 * len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    exs_mhandle_t mh = exs_mregister(memory, 2 * len, EXS_MRF_SHARED);
    CHECK(mh != EXS_MHANDLE_INVALID && mh != EXS_MHANDLE_UNREGISTERED);
    pair_of(SOCK_STREAM, q, fd);
    for (size_t i = 0; i < len; i++)
        memory[i] = (char)(i * 7);
    CHECK(exs_recv(fd[1], memory + len, len, MSG_WAITALL, q, NULL, mh) == 0);
    CHECK(FAILS(exs_mderegister(mh), EBUSY));
    CHECK(FAILS(exs_mmodify(mh, memory, len, 0), EBUSY));
    CHECK(exs_send(fd[0], memory, len, 0, q, NULL, mh) == 0);
    for (int i = 0; i < 2; i++) {
        exs_event_t event = next_event(q);
        CHECK(event.exs_evt_errno == 0 && event.exs_evt_union.exs_evt_xfer.exs_evt_length == len);
        CHECK(event.exs_evt_union.exs_evt_xfer.exs_evt_mhandle == mh);
    }
    CHECK(memcmp(memory, memory + len, len) == 0);
    CHECK(FAILS(exs_send(fd[0], memory + 1, 2 * len, 0, q, NULL, mh), EFAULT));
    CHECK(FAILS(exs_send(fd[0], memory - 1, 2, 0, q, NULL, mh), EFAULT));
    CHECK(FAILS(exs_recv(fd[0], &mh, 1, 0, q, NULL, mh), EFAULT));
    CHECK(exs_mmodify(mh, memory, len, 0) == 0);
    CHECK(FAILS(exs_send(fd[0], memory + len, 1, 0, q, NULL, mh), EFAULT));

    CHECK(exs_sync_send_mh(fd[0], memory, 100, 0, mh) == 100);
    CHECK(exs_sync_recv_mh(fd[1], memory + 1000, 100, MSG_WAITALL, mh) == 100);
    CHECK(exs_sync_write_mh(fd[0], memory, 100, mh) == 100 && exs_sync_read_mh(fd[1], memory, 100, mh) == 100);
    exs_iovec_t iov[2] = {{memory, 10, mh}, {memory + 20, 10, EXS_MHANDLE_UNREGISTERED}};
    exs_msghdr_t msg = {NULL, 0, 2, iov, 0};
    CHECK(exs_sync_writev_mh(fd[0], iov, 2) == 20 && exs_sync_readv_mh(fd[1], iov, 2) == 20);
    CHECK(exs_sync_sendmsg_mh(fd[0], &msg, 0) == 20 && exs_sync_recvmsg_mh(fd[1], &msg, 0) == 20);

    CHECK(exs_mderegister(mh) == 0);
    CHECK(FAILS(exs_mderegister(mh), EBADF));
    CHECK(FAILS(exs_send(fd[0], memory, 1, 0, q, NULL, mh), EBADF));
    CHECK(FAILS(exs_sync_send_mh(fd[0], memory, 1, 0, mh), EBADF));
    munmap(memory, 2 * len);
    CHECK(FAILS(exs_mregister(memory, len, 0), EFAULT));
    close_both(fd);
}

static void vectors(exs_qhandle_t q) {
    int fd[2];
    char a[4] = "abc", b[6] = "defgh", c[6] = "", d[5] = "";
    struct sockaddr_storage peer;
    pair_of(SOCK_STREAM, q, fd);
    exs_iovec_t out[2] = {{a, 3, 0}, {b, 5, 0}}, in[2] = {{c, 5, 0}, {d, 3, 0}};
    exs_msghdr_t send = {NULL, 0, 2, out, 0}, recv = {&peer, sizeof peer, 2, in, 99};
    CHECK(exs_recvmsg(fd[1], &recv, MSG_WAITALL, q, &recv) == 0);
    CHECK(exs_sendmsg(fd[0], &send, 0, q, &send) == 0);
    for (int i = 0; i < 2; i++) {
        exs_event_t event = next_event(q);
        exs_evt_xfermsg_t *xfer = &event.exs_evt_union.exs_evt_xfermsg;
        CHECK(event.exs_evt_errno == 0 && xfer->exs_evt_length == 8 && xfer->exs_evt_msg == event.exs_evt_ahandle);
        CHECK(event.exs_evt_type == (xfer->exs_evt_msg == &send ? EXS_EVT_SENDMSG : EXS_EVT_RECVMSG));
    }
    CHECK(strcmp(c, "abcde") == 0 && memcmp(d, "fgh", 3) == 0);
    CHECK(recv.msg_flags == 0 && recv.msg_namelen > 0 && peer.ss_family == family);

    struct iovec iov[2] = {{a, 3}, {b, 5}};
    CHECK(exs_sync_writev(fd[0], iov, 2) == 8);
    iov[0].iov_base = c;
    iov[1].iov_base = d;
    CHECK(exs_sync_readv(fd[1], iov, 2) == 8 && memcmp(c, "abc", 3) == 0 && memcmp(d, "defgh", 5) == 0);
    CHECK(FAILS(exs_sync_writev(fd[0], iov, -1), EINVAL));
    CHECK(FAILS(exs_sync_writev(fd[0], iov, IOV_MAX + 1), EINVAL));
    CHECK(FAILS(exs_sync_writev(fd[0], NULL, 1), EFAULT));
    out[0].iov_len = out[1].iov_len = SIZE_MAX / 2;
    CHECK(FAILS(exs_sendmsg(fd[0], &send, 0, q, NULL), EINVAL));
    send.msg_name = &peer;
    CHECK(FAILS(exs_sendmsg(fd[0], &send, 0, q, NULL), EISCONN));
    CHECK(FAILS(exs_sendmsg(fd[0], NULL, 0, q, NULL), EFAULT));
    close_both(fd);
}

static int temporary_file(const char *text) {
    char name[] = "/tmp/exs-conformance-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
    unlink(name);
    return file;
}

static void files(exs_qhandle_t q) {
    for (int plain = 0; plain < 2; plain++) {
        int fd[2], file = temporary_file("0123456789");
        char to[32] = "";
        if (plain)
            plain_pair(fd);
        else
            pair_of(SOCK_STREAM, q, fd);
        exs_xferfile_t vec[3];
        memset(vec, 0, sizeof vec);
        vec[0].xf_type = vec[2].xf_type = EXS_IOVEC;
        vec[0].xf_vec.xf_iovec.iov_base = "head ";
        vec[0].xf_vec.xf_iovec.iov_len = 5;
        vec[1].xf_type = EXS_FDVEC;
        vec[1].xf_vec.xf_fdvec.fdv_fd = file;
        vec[1].xf_vec.xf_fdvec.fdv_offset = 2;
        vec[1].xf_vec.xf_fdvec.fdv_len = EXS_FDV_TO_END;
        vec[2].xf_vec.xf_iovec.iov_base = " tail";
        vec[2].xf_vec.xf_iovec.iov_len = 5;
        CHECK(exs_sendfile(fd[0], vec, 3, 0, q, vec) == 0);
        CHECK(exs_sync_recv(fd[1], to, 18, MSG_WAITALL) == 18 && strcmp(to, "head 23456789 tail") == 0);
        exs_event_t event = next_event(q);
        CHECK(event.exs_evt_type == EXS_EVT_SENDFILE && event.exs_evt_errno == 0 && event.exs_evt_ahandle == vec);
        CHECK(event.exs_evt_union.exs_evt_xferfile.exs_evt_length == 18);
        CHECK(event.exs_evt_union.exs_evt_xferfile.exs_evt_vec == vec);
        CHECK(event.exs_evt_union.exs_evt_xferfile.exs_evt_veclen == 3);
        vec[1].xf_vec.xf_fdvec.fdv_fd = -1;
        CHECK(FAILS(exs_sendfile(fd[0], vec, 3, 0, q, NULL), EBADF));
        vec[1].xf_type = 3;
        CHECK(FAILS(exs_sendfile(fd[0], vec, 3, 0, q, NULL), EINVAL));

        off_t offset = 3;
        CHECK(exs_sync_sendfile(fd[0], file, &offset, 4) == 4 && offset == 7);
        CHECK(exs_sync_recv(fd[1], to, 4, MSG_WAITALL) == 4 && memcmp(to, "3456", 4) == 0);
        CHECK(lseek(file, 8, SEEK_SET) == 8);
        CHECK(exs_sync_sendfile(fd[0], file, NULL, 100) == 2 && lseek(file, 0, SEEK_CUR) == 10);
        CHECK(exs_sync_recv(fd[1], to, 2, MSG_WAITALL) == 2 && memcmp(to, "89", 2) == 0);
        close(file);
        close_both(fd);
    }
}

static void queues(exs_qhandle_t unused) {
    (void)unused;
    int fd[2], value, n;
    struct timeval never = {0, 0}, soon = {0, 20000};
    exs_event_t events[8];
    char to[8];
    exs_qhandle_t q = exs_qcreate(4);
    CHECK(q != EXS_QHANDLE_INVALID);
    pair_of(SOCK_STREAM, q, fd);
    CHECK(exs_qdequeue(q, events, 8, &never) == 0);
    CHECK(exs_qdequeue(q, events, -1, &soon) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(exs_recv(fd[1], to + i, 1, 0, q, (exs_ahandle_t)(intptr_t)i, 0) == 0);
    CHECK(FAILS(exs_recv(fd[1], to, 1, 0, q, NULL, 0), EAGAIN));
    value = 3;
    CHECK(FAILS(exs_qmodify(q, EXS_QATTR_DEPTH, &value, sizeof value), EBUSY));
    CHECK(exs_sync_send(fd[0], "wxyz", 4, 0) == 4);
    CHECK(exs_qdequeue(q, events, -3, NULL) == 3); /* waits for three, and has no room for more */
    for (int i = 0; i < 3; i++)
        CHECK(events[i].exs_evt_ahandle == (exs_ahandle_t)(intptr_t)i);
    CHECK(exs_qdequeue(q, events, 8, NULL) == 1 && memcmp(to, "wxyz", 4) == 0);

    value = 16;
    CHECK(exs_qmodify(q, EXS_QATTR_DEPTH, &value, sizeof value) == 0);
    CHECK(exs_qstatus(q, EXS_QATTR_DEPTH, &n, sizeof n) == 0 && n == 16);
    for (value = EXS_WAIT_ADAPTIVE; value <= EXS_WAIT_BUSY_POLL; value++) {
        CHECK(exs_qmodify(q, EXS_QATTR_WAIT, &value, sizeof value) == 0);
        CHECK(exs_qstatus(q, EXS_QATTR_WAIT, &n, sizeof n) == 0 && n == value);
        CHECK(exs_recv(fd[1], to, 1, 0, q, NULL, 0) == 0 && exs_send(fd[0], "m", 1, 0, q, NULL, 0) == 0);
        CHECK(exs_qdequeue(q, events, -2, NULL) == 2);
    }

    exs_signal_t signal = {EXS_SIG_ENABLE, -1};
    CHECK(exs_qmodify(q, EXS_QATTR_SIGNAL, &signal, sizeof signal) == 0);
    signal.sig_action = 0;
    CHECK(exs_qstatus(q, EXS_QATTR_SIGNAL, &signal, sizeof signal) == 0);
    CHECK(signal.sig_action == EXS_SIG_ENABLE && signal.sig_fd >= 0);
    int epoll = epoll_create1(0);
    struct epoll_event ready, wanted = {EPOLLIN, {NULL}};
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, signal.sig_fd, &wanted) == 0);
    CHECK(epoll_wait(epoll, &ready, 1, 0) == 0);
    CHECK(exs_recv(fd[1], to, 1, 0, q, NULL, 0) == 0);
    CHECK(exs_sync_send(fd[0], "e", 1, 0) == 1);
    CHECK(epoll_wait(epoll, &ready, 1, 20000) == 1);
    CHECK(exs_qstatus(q, EXS_QATTR_EVENTS, &n, sizeof n) == 0 && n == 1);
    CHECK(exs_qdequeue(q, events, 1, NULL) == 1);
    CHECK(epoll_wait(epoll, &ready, 1, 0) == 0);
    close(epoll);

    CHECK(FAILS(exs_qdequeue(q, events, 0, &never), EINVAL));
    CHECK(FAILS(exs_qdequeue(q, events, EXS_EVTVEC_MAX + 1, &never), EINVAL));
    CHECK(FAILS(exs_qdequeue(q, events, INT_MIN, &never), EINVAL));
    CHECK(FAILS(exs_qdequeue(q, NULL, 1, &never), EFAULT));
    struct timeval wrong = {0, 1000000}, before = {-1, 0};
    CHECK(FAILS(exs_qdequeue(q, events, 1, &wrong), EINVAL));
    CHECK(FAILS(exs_qdequeue(q, events, 1, &before), EINVAL));
    CHECK(FAILS(exs_qmodify(q, EXS_QATTR_EVENTS, &value, sizeof value), EINVAL));
    CHECK(FAILS(exs_qmodify(q, EXS_QATTR_WAIT, &value, 1), EINVAL));
    CHECK(FAILS(exs_qmodify(q, EXS_QATTR_WAIT, NULL, sizeof value), EFAULT));
    value = 9;
    CHECK(FAILS(exs_qmodify(q, EXS_QATTR_WAIT, &value, sizeof value), EINVAL));
    CHECK(FAILS(exs_qstatus(q, 99, &value, sizeof value), EINVAL));
    CHECK(FAILS(exs_qcreate(0), EINVAL));
    CHECK(FAILS(exs_qcreate(-1), EINVAL));

    /* deleted with an operation outstanding */
    CHECK(exs_recv(fd[1], to, 1, 0, q, NULL, 0) == 0);
    CHECK(exs_qdelete(q) == 0);
    CHECK(FAILS(exs_qdelete(q), EBADF));
    CHECK(FAILS(exs_qdequeue(q, events, 1, &never), EBADF));
    CHECK(FAILS(exs_recv(fd[1], to, 1, 0, q, NULL, 0), EBADF));
    close_both(fd);
}

static void cancel(exs_qhandle_t q) {
    int fd[2];
    char to[8];
    pair_of(SOCK_STREAM, q, fd);
    for (intptr_t i = 1; i <= 3; i++)
        CHECK(exs_recv(fd[1], to, 1, 0, q, (exs_ahandle_t)i, 0) == 0);
    CHECK(exs_cancel(fd[1], EXS_CAF_FILDES | EXS_CAF_AHANDLE, (exs_ahandle_t)2) == 1);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_errno == ECANCELED && event.exs_evt_ahandle == (exs_ahandle_t)2);
    CHECK(exs_cancel(fd[0], EXS_CAF_FILDES | EXS_CAF_AHANDLE, (exs_ahandle_t)1) == 0);
    CHECK(exs_cancel(-1, EXS_CAF_AHANDLE, (exs_ahandle_t)1) == 1);
    CHECK(next_event(q).exs_evt_ahandle == (exs_ahandle_t)1);
    CHECK(exs_cancel(fd[1], EXS_CAF_FILDES, NULL) == 1);
    CHECK(next_event(q).exs_evt_ahandle == (exs_ahandle_t)3);
    CHECK(FAILS(exs_cancel(fd[1], 0, NULL), EINVAL));
    CHECK(FAILS(exs_cancel(fd[1], 4, NULL), EINVAL));
    CHECK(FAILS(exs_cancel(9999, EXS_CAF_FILDES, NULL), EBADF));
    CHECK(exs_sync_send(fd[0], "q", 1, 0) == 1 && exs_sync_recv(fd[1], to, 8, 0) == 1 && to[0] == 'q');

    /* a close ends all outstanding operations, each with one event, before its own event */
    CHECK(exs_recv(fd[1], to, 1, 0, q, (exs_ahandle_t)4, 0) == 0);
    CHECK(exs_close(fd[1], 0, q, (exs_ahandle_t)5) == 0);
    event = next_event(q);
    CHECK(event.exs_evt_ahandle == (exs_ahandle_t)4 && event.exs_evt_errno == ECANCELED);
    CHECK(next_event(q).exs_evt_ahandle == (exs_ahandle_t)5);

    /* accepts of a listener */
    struct sockaddr_storage addr;
    socklen_t len;
    int listener = listening(SOCK_STREAM, &addr, &len);
    CHECK(exs_accept(listener, NULL, 0, q, NULL) == 0 && exs_accept(listener, NULL, 0, q, NULL) == 0);
    CHECK(exs_cancel(listener, EXS_CAF_FILDES, NULL) == 2);
    for (int i = 0; i < 2; i++) {
        event = next_event(q);
        CHECK(event.exs_evt_type == EXS_EVT_ACCEPT && event.exs_evt_errno == ECANCELED);
        CHECK(event.exs_evt_union.exs_evt_accept.exs_evt_new_socket == -1);
    }
    CHECK(exs_sync_close(listener) == 0 && exs_sync_close(fd[0]) == 0);
}

static void limits(exs_qhandle_t q) {
    int fd[2];
    char to[8];
    struct timeval limit = {0, 30000}, got;
    socklen_t len = sizeof got;
    pair_of(SOCK_STREAM, q, fd);
    CHECK(exs_setsockopt(fd[1], SOL_SOCKET, SO_ASYNC_RECV_TIMEOUT, &limit, sizeof limit) == 0);
    CHECK(exs_getsockopt(fd[1], SOL_SOCKET, SO_RCVTIMEO, &got, &len) == 0 && got.tv_usec == 30000 && len == sizeof got);
    CHECK(exs_recv(fd[1], to, 8, 0, q, to, 0) == 0);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_RECVTIMEOUT && event.exs_evt_errno == ETIMEDOUT && event.exs_evt_ahandle == to);
    CHECK(FAILS(exs_sync_recv(fd[1], to, 8, 0), EAGAIN));
    exs_timeout_t once = {{0, 10000}, EXS_TIMEOUT_ONCE}, back;
    CHECK(exs_setsockopt(fd[1], SOL_SOCKET, SO_ASYNC_RECV_TIMEOUT, &once, sizeof once) == 0);
    len = sizeof back;
    CHECK(exs_getsockopt(fd[1], SOL_SOCKET, SO_ASYNC_RECV_TIMEOUT, &back, &len) == 0 && back.to_flags == EXS_TIMEOUT_ONCE);
    CHECK(exs_recv(fd[1], to, 8, 0, q, to, 0) == 0);
    CHECK(next_event(q).exs_evt_type == EXS_EVT_RECVTIMEOUT);
    CHECK(exs_getsockopt(fd[1], SOL_SOCKET, SO_ASYNC_RECV_TIMEOUT, &back, &len) == 0);
    CHECK(back.to_time.tv_usec == 0 && back.to_flags == 0);
    CHECK(exs_sync_send(fd[0], "late", 4, 0) == 4 && exs_sync_recv(fd[1], to, 4, MSG_WAITALL) == 4);
    limit.tv_usec = -1;
    CHECK(FAILS(exs_setsockopt(fd[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), EINVAL));
    close_both(fd);
}

static void options(exs_qhandle_t q) {
    int fd[2], value, raw = exs_socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
    socklen_t len = sizeof value;
    exs_stats_t stats;
    CHECK(raw >= 0 && exs_sync_fcntl(raw, F_GETFL) == (O_RDWR | O_NONBLOCK));
    CHECK(exs_fcntl(raw, EXS_F_SETCREDITS, 64) == 0 && exs_fcntl(raw, EXS_F_GETCREDITS) == 64);
    CHECK(exs_fcntl(raw, EXS_F_SETSMALLPACKET, 1000) == 0 && exs_fcntl(raw, EXS_F_GETSMALLPACKET) == 1000);
    CHECK(exs_fcntl(raw, EXS_F_SETBUFFER, 65536) == 0 && exs_fcntl(raw, EXS_F_GETBUFFER) == 65536);
    for (int mode = EXS_MODE_DYNAMIC; mode <= EXS_MODE_PUBLISHED; mode++)
        CHECK(exs_fcntl(raw, EXS_F_SETMODE, mode) == 0 && exs_fcntl(raw, EXS_F_GETMODE) == mode);
    CHECK(FAILS(exs_fcntl(raw, EXS_F_SETMODE, EXS_MODE_PUBLISHED + 1), EINVAL));
    CHECK(exs_fcntl(raw, EXS_F_SETCRC, 0) == 0 && exs_fcntl(raw, EXS_F_GETCRC) == 0);
    CHECK(FAILS(exs_fcntl(raw, EXS_F_SETCREDITS, 3), EINVAL));
    CHECK(FAILS(exs_fcntl(raw, EXS_F_SETCREDITS, 65536), EINVAL));
    CHECK(FAILS(exs_fcntl(raw, EXS_F_SETSMALLPACKET, (1 << 24) + 1), EINVAL));
    CHECK(exs_fcntl(raw, EXS_F_SETSMALLPACKET, 1 << 24) == 0 && exs_fcntl(raw, EXS_F_GETSMALLPACKET) == 1 << 24);
    CHECK(FAILS(exs_fcntl(raw, EXS_F_SETSMALLPACKET, -1), EINVAL));
    CHECK(FAILS(exs_fcntl(raw, 0x9999), EINVAL));
    CHECK(exs_fcntl(raw, EXS_F_GETCREDITS) == 64); /* a refused value changes nothing */
    value = 8192;
    CHECK(exs_setsockopt(raw, SOL_SOCKET, SO_RCVBUF, &value, sizeof value) == 0);
    CHECK(exs_getsockopt(raw, SOL_SOCKET, SO_RCVBUF, &value, &len) == 0 && value == 8192 && len == sizeof value);
    CHECK(exs_getsockopt(raw, SOL_SOCKET, SO_DOMAIN, &value, &len) == 0 && value == family);
    CHECK(exs_getsockopt(raw, SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0);
    value = 1;
    CHECK(exs_setsockopt(raw, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value) == 0);
    CHECK(exs_setsockopt(raw, SOL_SOCKET, SO_REUSEADDR, &value, sizeof value) == 0);
    CHECK(FAILS(exs_setsockopt(raw, SOL_SOCKET, 12345, &value, sizeof value), ENOPROTOOPT));
    CHECK(FAILS(exs_getsockopt(raw, 999, 1, &value, &len), ENOPROTOOPT));
    CHECK(FAILS(exs_setsockopt(raw, SOL_SOCKET, SO_RCVBUF, &value, 1), EINVAL));
    CHECK(FAILS(exs_setsockopt(raw, SOL_SOCKET, SO_RCVBUF, NULL, sizeof value), EFAULT));
    CHECK(exs_sync_close(raw) == 0);

    pair_of(SOCK_STREAM, q, fd);
    CHECK(FAILS(exs_fcntl(fd[0], EXS_F_SETCREDITS, 128), EISCONN));
    CHECK(exs_sync_send(fd[0], "s", 1, 0) == 1 && exs_sync_recv(fd[1], &value, 1, 0) == 1);
    CHECK(exs_fcntl(fd[0], EXS_F_GETSTATS, &stats) == 0);
    CHECK(stats.st_small_sent + stats.st_direct_sent + stats.st_indirect_sent == 1);
    CHECK(stats.st_small_bytes_sent + stats.st_direct_bytes_sent + stats.st_indirect_bytes_sent == 1);
    CHECK(FAILS(exs_fcntl(fd[0], EXS_F_GETSTATS, NULL), EFAULT));
    close_both(fd);
}

static void small_packets(exs_qhandle_t q) {
    int fd[2];
    char to[64] = "";
    int before = failures;
    pair_of(SOCK_STREAM, q, fd);
    for (int i = 0; i < 1000; i++) { /* more messages than credits: each place is recycled */
        char text[16];
        int len = snprintf(text, sizeof text, "message %d", i) + 1;
        CHECK(exs_sync_send(fd[0], text, (size_t)len, 0) == len);
        CHECK(exs_recv(fd[1], to, sizeof to, EXS_IN_PLACE, q, NULL, 0) == 0);
        exs_event_t event = next_event(q);
        CHECK(event.exs_evt_errno == 0 && event.exs_evt_union.exs_evt_xfer.exs_evt_length == (size_t)len);
        char *at = event.exs_evt_union.exs_evt_xfer.exs_evt_buffer;
        CHECK(strcmp(at, text) == 0);
        if (event.exs_evt_flags & EXS_EVF_IN_PLACE) {
            CHECK(at != NULL && at != to && to[0] == 0); /* in place, not copied */
            CHECK(exs_recycle_recv_buffer(fd[1], at) == 0);
            CHECK(FAILS(exs_recycle_recv_buffer(fd[1], at), EINVAL));
        } else {
            CHECK(i >= 100 && at == to); /* the sender had used up its 256 credits */
            to[0] = 0;
        }
        if (failures > before)
            break;
    }
    CHECK(FAILS(exs_recycle_recv_buffer(fd[1], to), EINVAL));
    CHECK(FAILS(exs_recycle_recv_buffer(9999, to), EBADF));
    CHECK(FAILS(exs_recv(fd[1], to, 1, MSG_PEEK, q, NULL, 0), EOPNOTSUPP));
    CHECK(FAILS(exs_send(fd[1], to, 1, MSG_OOB, q, NULL, 0), EOPNOTSUPP));
    CHECK(FAILS(exs_sync_recv(fd[1], to, 1, MSG_PEEK), EOPNOTSUPP));
    close_both(fd);
}

static void readiness(exs_qhandle_t q) {
    int fd[2], pipes[2];
    char to[8];
    pair_of(SOCK_STREAM, q, fd);
    exs_pollfd_t want[2] = {{fd[0], EXS_POLLOUT}, {fd[1], EXS_POLLIN}};
    CHECK(exs_poll(want, 2, 0, q, want) == 0);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_POLL && event.exs_evt_socket == fd[0]);
    CHECK(event.exs_evt_union.exs_evt_poll.exs_evt_events == EXS_POLLOUT);
    CHECK(exs_sync_send(fd[0], "x", 1, 0) == 1);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_POLL && event.exs_evt_socket == fd[1]);
    CHECK(event.exs_evt_union.exs_evt_poll.exs_evt_events == EXS_POLLIN);
    /* the close of its socket also ends an outstanding poll */
    int other[2];
    pair_of(SOCK_STREAM, q, other);
    exs_pollfd_t idle = {other[1], EXS_POLLIN};
    CHECK(exs_poll(&idle, 1, 0, q, &idle) == 0);
    CHECK(exs_sync_close(other[1]) == 0 && exs_sync_close(other[0]) == 0);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_POLL && event.exs_evt_ahandle == &idle);
    CHECK(FAILS(exs_poll(want, 0, 0, q, NULL), EINVAL));
    want[0].pfd_events = 0x100;
    CHECK(FAILS(exs_poll(want, 1, 0, q, NULL), EINVAL));

    CHECK(pipe(pipes) == 0);
    struct pollfd fds[4] = {{fd[1], POLLIN, 0}, {pipes[0], POLLIN, 0}, {fd[0], POLLIN, 0}, {-1, POLLIN, 0}};
    CHECK(exs_sync_poll(fds, 4, -1) == 1 && fds[0].revents == POLLIN && fds[1].revents == 0 && fds[2].revents == 0);
    CHECK(exs_sync_recv(fd[1], to, 8, 0) == 1);
    CHECK(exs_sync_poll(fds, 4, 10) == 0 && fds[0].revents == 0);
    CHECK(write(pipes[1], "p", 1) == 1);
    CHECK(exs_sync_poll(fds, 4, -1) == 1 && fds[1].revents == POLLIN);
    fd_set read_set, write_set;
    struct timeval limit = {5, 0};
    FD_ZERO(&read_set);
    FD_ZERO(&write_set);
    FD_SET(fd[1], &read_set);
    FD_SET(pipes[0], &read_set);
    FD_SET(fd[0], &write_set);
    CHECK(exs_sync_select(FD_SETSIZE, &read_set, &write_set, NULL, &limit) == 2);
    CHECK(!FD_ISSET(fd[1], &read_set) && FD_ISSET(pipes[0], &read_set) && FD_ISSET(fd[0], &write_set));
    CHECK(exs_sync_read(pipes[0], to, 1) == 1); /* calls on other descriptors go to the kernel */
    limit.tv_sec = 0;
    FD_SET(fd[1], &read_set);
    FD_CLR(pipes[0], &read_set);
    CHECK(exs_sync_select(fd[1] + 1, &read_set, NULL, NULL, &limit) == 0 && !FD_ISSET(fd[1], &read_set));
    FD_SET(1000, &read_set);
    CHECK(FAILS(exs_sync_select(FD_SETSIZE, &read_set, NULL, NULL, NULL), EBADF));
    CHECK(FAILS(exs_sync_select(-1, NULL, NULL, NULL, NULL), EINVAL));

    /* the descriptor itself is readable as well */
    struct pollfd own = {fd[1], POLLIN, 0};
    CHECK(poll(&own, 1, 0) == 0);
    CHECK(exs_sync_send(fd[0], "y", 1, 0) == 1);
    CHECK(poll(&own, 1, 20000) == 1);
    CHECK(exs_sync_recv(fd[1], to, 8, 0) == 1);
    CHECK(exs_sync_close(fd[0]) == 0);
    fds[0].events = POLLIN;
    CHECK(exs_sync_poll(fds, 1, 20000) == 1 && (fds[0].revents & POLLIN));
    CHECK(exs_sync_recv(fd[1], to, 8, 0) == 0);
    CHECK(exs_sync_close(fd[1]) == 0);
    close(pipes[0]);
    close(pipes[1]);
}

static void without_waiting(exs_qhandle_t q) {
    struct sockaddr_storage addr;
    socklen_t len;
    static char data[4 << 20], to[4 << 20];
    int listener = listening(SOCK_STREAM, &addr, &len), value, fd[2];
    int before = failures;
    (void)q;
    CHECK(exs_sync_fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
    CHECK(FAILS(exs_sync_accept(listener, NULL, NULL), EAGAIN));
    fd[0] = exs_sync_socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(FAILS(exs_sync_connect(fd[0], (struct sockaddr *)&addr, len), EINPROGRESS));
    struct pollfd wait[2] = {{fd[0], POLLOUT, 0}, {listener, POLLIN, 0}};
    CHECK(exs_sync_poll(wait + 1, 1, 20000) == 1 && wait[1].revents == POLLIN);
    fd[1] = exs_sync_accept(listener, NULL, NULL);
    CHECK(fd[1] >= 0);
    CHECK(exs_sync_poll(wait, 1, 20000) == 1 && wait[0].revents == POLLOUT);
    len = sizeof value;
    CHECK(exs_sync_getsockopt(fd[0], SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0);
    CHECK(FAILS(exs_sync_recv(fd[0], to, 1, 0), EAGAIN));

    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i >> 4);
    size_t sent = 0, received = 0;
    ssize_t n;
    /* more than the buffers hold: the sends block before the end */
    wait[0].events = POLLOUT;
    do {
        while (sent < sizeof data && (n = exs_sync_send(fd[0], data + sent, sizeof data - sent, 0)) > 0)
            sent += (size_t)n;
        CHECK(n == -1 && errno == EAGAIN && sent > 0 && sent < sizeof data);
    } while (exs_sync_poll(wait, 1, 50) == 1 && sent < sizeof data);
    CHECK(exs_sync_poll(wait, 1, 0) == 0);
    while (received < sizeof data) {
        if (sent < sizeof data) {
            n = exs_sync_send(fd[0], data + sent, sizeof data - sent, 0);
            if (n > 0)
                sent += (size_t)n;
            else
                CHECK(n == -1 && errno == EAGAIN);
        }
        n = exs_sync_recv(fd[1], to + received, 5000, MSG_DONTWAIT);
        if (n > 0)
            received += (size_t)n;
        else
            CHECK(n < 0 && errno == EAGAIN);
        if (failures > before)
            break;
    }
    CHECK(memcmp(data, to, sizeof data) == 0);
    CHECK(exs_sync_poll(wait, 1, 20000) == 1 && wait[0].revents == POLLOUT);
    close_both(fd);

    /* nobody there */
    CHECK(exs_sync_close(listener) == 0);
    fd[0] = exs_sync_socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    CHECK(FAILS(exs_sync_connect(fd[0], (struct sockaddr *)&addr, len), EINPROGRESS));
    wait[0].fd = fd[0];
    CHECK(exs_sync_poll(wait, 1, 20000) == 1 && (wait[0].revents & (POLLERR | POLLHUP)));
    len = sizeof value;
    CHECK(exs_sync_getsockopt(fd[0], SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == ECONNREFUSED);
    CHECK(exs_sync_close(fd[0]) == 0);
}

static void plain_sockets(exs_qhandle_t q) {
    /* connected by the program, to a plain peer */
    int fd[2];
    char to[32] = "";
    plain_pair(fd);
    CHECK(exs_recv(fd[0], to, 5, MSG_WAITALL, q, to, 0) == 0);
    CHECK(exs_send(fd[0], "out", 3, 0, q, NULL, 0) == 0);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_SEND && event.exs_evt_socket == fd[0] && event.exs_evt_errno == 0);
    char in[8] = "";
    CHECK(recv(fd[1], in, 8, 0) == 3 && memcmp(in, "out", 3) == 0);
    CHECK(send(fd[1], "in in", 5, 0) == 5);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_RECV && event.exs_evt_socket == fd[0] && event.exs_evt_ahandle == to);
    CHECK(event.exs_evt_union.exs_evt_xfer.exs_evt_length == 5 && strcmp(to, "in in") == 0);
    CHECK((fcntl(fd[0], F_GETFL) & O_NONBLOCK) == 0);
    exs_pollfd_t want = {fd[0], EXS_POLLIN};
    CHECK(exs_poll(&want, 1, 0, q, NULL) == 0);
    CHECK(exs_cancel(fd[0], EXS_CAF_FILDES, NULL) == 1 && next_event(q).exs_evt_errno == ECANCELED);
    /* the program's own calls still work, and its close is the end */
    CHECK(send(fd[0], "z", 1, 0) == 1 && recv(fd[1], in, 8, 0) == 1);
    close(fd[0]);
    CHECK(recv(fd[1], in, 8, 0) == 0);
    CHECK(FAILS(exs_send(fd[0], "z", 1, 0, q, NULL, 0), EBADF));
    close(fd[1]);

    /* connected and accepted by the library */
    socklen_t len;
    struct sockaddr_storage addr = loopback(&len), peer;
    int listener = socket(family, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&addr, len) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&addr, &len) == 0);
    exs_acceptaddr_t from = {(struct sockaddr *)&peer, sizeof peer};
    fd[0] = socket(family, SOCK_STREAM, 0);
    CHECK(exs_accept(listener, &from, 0, q, (exs_ahandle_t)1) == 0);
    CHECK(exs_accept(listener, NULL, 0, q, (exs_ahandle_t)3) == 0);
    CHECK(exs_connect(fd[0], (struct sockaddr *)&addr, len, 0, q, (exs_ahandle_t)2) == 0);
    fd[1] = -1;
    intptr_t accepted = 0;
    for (int i = 0; i < 2; i++) {
        event = next_event(q);
        CHECK(event.exs_evt_errno == 0);
        if (event.exs_evt_type == EXS_EVT_ACCEPT) {
            accepted = (intptr_t)event.exs_evt_ahandle;
            fd[1] = event.exs_evt_union.exs_evt_accept.exs_evt_new_socket;
        } else {
            CHECK(event.exs_evt_type == EXS_EVT_CONNECT && event.exs_evt_socket == fd[0]);
        }
    }
    CHECK(accepted == 1 || accepted == 3);
    if (accepted == 1)
        CHECK(from.aa_addrlen == len && peer.ss_family == family);
    CHECK((fcntl(fd[0], F_GETFL) & O_NONBLOCK) == 0);
    CHECK(FAILS(exs_connect(fd[0], (struct sockaddr *)&addr, len, 0, q, NULL), EISCONN));
    CHECK(exs_cancel(listener, EXS_CAF_FILDES, NULL) == 1);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_ACCEPT && event.exs_evt_errno == ECANCELED);
    CHECK(exs_send(fd[0], "1", 1, 0, q, NULL, 0) == 0 && exs_recv(fd[1], to, 1, 0, q, NULL, 0) == 0);
    CHECK(next_event(q).exs_evt_errno == 0 && next_event(q).exs_evt_errno == 0 && to[0] == '1');
    /* closed with an event, after the sent data */
    CHECK(exs_send(fd[0], "2", 1, 0, q, NULL, 0) == 0 && exs_close(fd[0], 0, q, (exs_ahandle_t)9) == 0);
    CHECK(next_event(q).exs_evt_type == EXS_EVT_SEND);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_CLOSE && event.exs_evt_ahandle == (exs_ahandle_t)9);
    CHECK(recv(fd[1], to, 8, 0) == 1 && recv(fd[1], to, 8, 0) == 0);
    close(fd[1]);
    close(listener);

    /* a full queue refuses, and nothing is left behind */
    fd[0] = socket(family, SOCK_STREAM, 0);
    exs_qhandle_t full = exs_qcreate(1);
    listener = socket(family, SOCK_STREAM, 0);
    CHECK(listen(listener, 1) == 0);
    CHECK(exs_accept(listener, NULL, 0, full, NULL) == 0);
    CHECK(FAILS(exs_accept(listener, NULL, 0, full, NULL), EAGAIN));
    CHECK(FAILS(exs_connect(fd[0], (struct sockaddr *)&addr, len, 0, full, NULL), EAGAIN));
    CHECK(exs_qdelete(full) == 0);
    close(listener);

    /* refused */
    CHECK(exs_connect(fd[0], (struct sockaddr *)&addr, len, 0, q, NULL) == 0);
    event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_CONNECT && event.exs_evt_errno == ECONNREFUSED);
    CHECK(FAILS(exs_accept(fd[0], NULL, 0, q, NULL), EINVAL));
    close(fd[0]);
}

static void wrong(exs_qhandle_t q) {
    socklen_t len;
    char byte;
    struct sockaddr_storage addr = loopback(&len);
    int file = temporary_file("x"), udp = socket(family, SOCK_DGRAM, 0), fd = exs_socket(family, SOCK_STREAM, 0);
    int unconnected = socket(family, SOCK_STREAM, 0);
    CHECK(FAILS(exs_init(99), EINVAL));
    CHECK(exs_init(EXS_VERSION) == 0);
    CHECK(FAILS(exs_socket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT));
    CHECK(FAILS(exs_socket(family, SOCK_DGRAM, 0), ESOCKTNOSUPPORT));
    CHECK(FAILS(exs_socket(family, SOCK_STREAM, IPPROTO_UDP), EPROTONOSUPPORT));
    CHECK(FAILS(exs_socket(family, 77, 0), EINVAL));
    CHECK(FAILS(exs_send(-1, &byte, 1, 0, q, NULL, 0), EBADF));
    CHECK(FAILS(exs_send(9999, &byte, 1, 0, q, NULL, 0), EBADF));
    CHECK(FAILS(exs_send(file, &byte, 1, 0, q, NULL, 0), ENOTSOCK));
    CHECK(FAILS(exs_send(udp, &byte, 1, 0, q, NULL, 0), EOPNOTSUPP));
    CHECK(FAILS(exs_send(unconnected, &byte, 1, 0, q, NULL, 0), ENOTCONN));
    CHECK(FAILS(exs_send(fd, &byte, 1, 0, q, NULL, 0), ENOTCONN));
    CHECK(FAILS(exs_recv(fd, &byte, 1, 0, q, NULL, 0), ENOTCONN));
    CHECK(FAILS(exs_sync_recv(fd, &byte, 1, 0), ENOTCONN));
    CHECK(FAILS(exs_getpeername(fd, (struct sockaddr *)&addr, &len), ENOTCONN));
    CHECK(FAILS(exs_shutdown(fd, EXS_SHUT_WR, 0, EXS_QHANDLE_INVALID, NULL), ENOTCONN));
    CHECK(FAILS(exs_sync_shutdown(fd, 9), EINVAL));
    CHECK(FAILS(exs_accept(fd, NULL, 0, q, NULL), EINVAL));
    CHECK(FAILS(exs_accept(file, NULL, 0, q, NULL), ENOTSOCK));
    CHECK(FAILS(exs_connect(-1, (struct sockaddr *)&addr, len, 0, q, NULL), EBADF));
    CHECK(FAILS(exs_connect(fd, NULL, len, 0, q, NULL), EFAULT));
    CHECK(FAILS(exs_connect(fd, (struct sockaddr *)&addr, 3, 0, q, NULL), EINVAL));
    CHECK(FAILS(exs_connect(fd, (struct sockaddr *)&addr, len, 1, q, NULL), EOPNOTSUPP));
    addr.ss_family = AF_UNIX;
    CHECK(FAILS(exs_connect(fd, (struct sockaddr *)&addr, len, 0, q, NULL), EAFNOSUPPORT));
    addr = loopback(&len);
    for (int bad = 0; bad < 3; bad++) {
        exs_qhandle_t none = bad == 0 ? EXS_QHANDLE_INVALID : bad == 1 ? 0 : q + (1 << 16);
        CHECK(FAILS(exs_connect(fd, (struct sockaddr *)&addr, len, 0, none, NULL), EBADF));
    }
    CHECK(FAILS(exs_bind(fd, NULL, len), EFAULT));
    CHECK(exs_bind(fd, (struct sockaddr *)&addr, len) == 0);
    CHECK(FAILS(exs_bind(fd, (struct sockaddr *)&addr, len), EINVAL));
    CHECK(exs_listen(fd, 1) == 0);
    CHECK(FAILS(exs_connect(fd, (struct sockaddr *)&addr, len, 0, q, NULL), EINVAL));
    CHECK(FAILS(exs_getsockname(fd, NULL, &len), EFAULT));
    CHECK(FAILS(exs_mregister(NULL, 1, 0), EFAULT));
    CHECK(FAILS(exs_mregister(&byte, 0, 0), EINVAL));
    CHECK(FAILS(exs_mregister(&byte, 1, 8), EINVAL));
    CHECK(FAILS(exs_mregister(&byte, SIZE_MAX, 0), EFAULT));
    CHECK(FAILS(exs_mderegister(EXS_MHANDLE_UNREGISTERED), EBADF));
    CHECK(FAILS(exs_mderegister(EXS_MHANDLE_INVALID), EBADF));
    CHECK(FAILS(exs_close(file + 1000, 0, EXS_QHANDLE_INVALID, NULL), EBADF));
    CHECK(exs_close(fd, 0, EXS_QHANDLE_INVALID, NULL) == 0);

    /* nobody there */
    int nobody = exs_socket(family, SOCK_STREAM, 0);
    len = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    CHECK(getsockname(unconnected, (struct sockaddr *)&addr, &len) == 0);
    addr = loopback(&len);
    CHECK(bind(unconnected, (struct sockaddr *)&addr, len) == 0);
    CHECK(getsockname(unconnected, (struct sockaddr *)&addr, &len) == 0);
    CHECK(exs_connect(nobody, (struct sockaddr *)&addr, len, 0, q, NULL) == 0);
    exs_event_t event = next_event(q);
    CHECK(event.exs_evt_type == EXS_EVT_CONNECT && event.exs_evt_errno == ECONNREFUSED);
    CHECK(FAILS(exs_sync_connect(nobody, (struct sockaddr *)&addr, len), ECONNREFUSED));
    int pair[2];
    pair_of(SOCK_STREAM, q, pair);
    CHECK(FAILS(exs_send(pair[0], NULL, 1, 0, q, NULL, 0), EFAULT));
    CHECK(FAILS(exs_send(pair[0], &byte, SIZE_MAX, 0, q, NULL, 0), EFAULT));
    CHECK(FAILS(exs_send(pair[0], &byte, 1, 0, q, NULL, 12345), EBADF));
    CHECK(FAILS(exs_send(pair[0], &byte, 1, 0, q, NULL, EXS_MHANDLE_INVALID), EBADF));
    CHECK(FAILS(exs_sync_sendto(pair[0], &byte, 1, 0, (struct sockaddr *)&addr, len), EISCONN));
    CHECK(FAILS(exs_connect(pair[0], (struct sockaddr *)&addr, len, 0, q, NULL), EISCONN));
    CHECK(FAILS(exs_sync_accept(pair[0], NULL, NULL), EINVAL));
    close_both(pair);
    CHECK(exs_sync_close(nobody) == 0);
    close(file);
    close(udp);
    close(unconnected);
}

/* A child sees nothing of its parent's sockets, can make its own, and does not disturb the parent. */
static void forked(exs_qhandle_t q) {
    int fd[2], status;
    char to[8] = "";
    pair_of(SOCK_STREAM, q, fd);
    exs_mhandle_t mh = exs_mregister(to, sizeof to, 0);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        alarm(60);
        CHECK(FAILS(exs_send(fd[0], "c", 1, 0, q, NULL, 0), ENOTCONN));
        CHECK(FAILS(exs_sync_send(fd[0], "c", 1, 0), ENOTCONN));
        CHECK(FAILS(exs_qdequeue(q, NULL, 1, NULL), EBADF));
        CHECK(FAILS(exs_mderegister(mh), EBADF));
        CHECK(exs_sync_close(fd[0]) == 0 && exs_sync_close(fd[1]) == 0);
        exs_qhandle_t own = exs_qcreate(16);
        CHECK(own != EXS_QHANDLE_INVALID);
        int pair[2];
        pair_of(SOCK_STREAM, own, pair);
        CHECK(exs_sync_send(pair[0], "child", 5, 0) == 5 && exs_sync_recv(pair[1], to, 5, MSG_WAITALL) == 5);
        close_both(pair);
        exit(failures);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(exs_sync_send(fd[0], "parent", 6, 0) == 6 && exs_sync_recv(fd[1], to, 8, 0) == 6);
    CHECK(exs_mderegister(mh) == 0);
    close_both(fd);
}

static void *exits(void *fd) {
    (void)fd;
    return NULL;
}

/* Sent data is delivered although the program ends without closing anything. */
static void ended(exs_qhandle_t q) {
    struct sockaddr_storage addr;
    socklen_t len;
    static char data[3 << 20], to[3 << 20];
    int status, listener = listening(SOCK_STREAM, &addr, &len);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i * 31 >> 3);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        int fd = exs_sync_socket(family, SOCK_STREAM, 0);
        exs_qhandle_t own = exs_qcreate(4);
        CHECK(exs_sync_connect(fd, (struct sockaddr *)&addr, len) == 0);
        CHECK(exs_send(fd, data, sizeof data, 0, own, NULL, 0) == 0);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, exits, NULL) == 0 && pthread_join(thread, NULL) == 0);
        exit(failures);
    }
    int fd = exs_sync_accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    CHECK(exs_sync_recv(fd, to, sizeof to, MSG_WAITALL) == sizeof to && memcmp(data, to, sizeof to) == 0);
    CHECK(exs_sync_recv(fd, to, 1, 0) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(exs_sync_close(fd) == 0 && exs_sync_close(listener) == 0);
    (void)q;
}

/* The peer dies: every outstanding operation ends, each with one event. */
static void killed(exs_qhandle_t q) {
    struct sockaddr_storage addr;
    socklen_t len;
    static char data[4 << 20];
    int ready[2], status, listener = listening(SOCK_STREAM, &addr, &len);
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        int fd = exs_sync_socket(family, SOCK_STREAM, 0);
        if (exs_sync_connect(fd, (struct sockaddr *)&addr, len) == 0 && write(ready[1], "r", 1) == 1)
            pause();
        _exit(1);
    }
    int fd = exs_sync_accept(listener, NULL, NULL);
    char byte;
    CHECK(fd >= 0 && read(ready[0], &byte, 1) == 1);
    for (int i = 0; i < 3; i++) {
        CHECK(exs_recv(fd, data, 100, 0, q, NULL, 0) == 0);
        CHECK(exs_send(fd, data, sizeof data, 0, q, NULL, 0) == 0);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
    int ended = 0;
    for (int i = 0; i < 6; i++) {
        exs_event_t event = next_event(q);
        if (event.exs_evt_errno == ECONNRESET || event.exs_evt_errno == EPIPE)
            ended++;
        else /* at most the data that fitted the buffers, and the end */
            CHECK(event.exs_evt_errno == 0);
    }
    CHECK(ended >= 2);
    exs_event_t event;
    struct timeval never = {0, 0};
    CHECK(exs_qdequeue(q, &event, 1, &never) == 0);
    ssize_t n = exs_sync_send(fd, data, 10, 0);
    CHECK(n == -1 && (errno == EPIPE || errno == ECONNRESET));
    CHECK(exs_sync_close(fd) == 0 && exs_sync_close(listener) == 0);
    close(ready[0]);
    close(ready[1]);
}

/* Four threads share a queue, and each takes any event. */
enum { THREADS = 4, MESSAGES = 2000 };
static struct {
    exs_qhandle_t q;
    int fd;
    pthread_mutex_t lock;
    long events, wrong;
    int stop;
} shared;

static void *takes(void *unused) {
    exs_event_t events[7];
    struct timeval limit = {0, 100000};
    for (int stop = 0; !stop;) {
        int n = exs_qdequeue(shared.q, events, 7, &limit);
        if (n < 0)
            return unused;
        pthread_mutex_lock(&shared.lock);
        stop = shared.stop;
        for (int i = 0; i < n; i++)
            shared.wrong += events[i].exs_evt_errno != 0 || events[i].exs_evt_union.exs_evt_xfer.exs_evt_length != 8;
        shared.events += n;
        pthread_mutex_unlock(&shared.lock);
    }
    return NULL;
}

static void *takes_from_deleted(void *unused) {
    exs_event_t event;
    (void)unused;
    return exs_qdequeue(shared.q, &event, 1, NULL) == -1 && errno == EBADF ? NULL : &shared;
}

static void *sends(void *unused) {
    static const char message[8] = "message";
    for (int i = 0; i < MESSAGES; i++) {
        while (exs_send(shared.fd, message, 8, 0, shared.q, NULL, 0) < 0) {
            if (errno != EAGAIN)
                return unused;
            sched_yield();
        }
    }
    return NULL;
}

static void threads(exs_qhandle_t unused) {
    int fd[2];
    static char to[8];
    pthread_t takers[THREADS], senders[THREADS];
    memset(&shared, 0, sizeof shared);
    pthread_mutex_init(&shared.lock, NULL);
    shared.q = exs_qcreate(64);
    pair_of(SOCK_STREAM, shared.q, fd);
    shared.fd = fd[0];
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&takers[i], NULL, takes, &shared) == 0);
        CHECK(pthread_create(&senders[i], NULL, sends, &shared) == 0);
    }
    for (int i = 0; i < THREADS * MESSAGES; i++)
        CHECK(exs_sync_recv(fd[1], to, 8, MSG_WAITALL) == 8 && memcmp(to, "message", 8) == 0);
    for (int i = 0; i < THREADS; i++) {
        void *failed;
        CHECK(pthread_join(senders[i], &failed) == 0 && failed == NULL);
    }
    for (long events = 0; events < (long)THREADS * MESSAGES;) { /* each send produces an event; alarm() limits the time */
        pthread_mutex_lock(&shared.lock);
        events = shared.events;
        pthread_mutex_unlock(&shared.lock);
        sched_yield();
    }
    CHECK(shared.events == (long)THREADS * MESSAGES && shared.wrong == 0);
    pthread_mutex_lock(&shared.lock);
    shared.stop = 1;
    pthread_mutex_unlock(&shared.lock);
    void *failed;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(takers[i], &failed) == 0 && failed == NULL);
    /* threads that wait on a deleted queue, or start to, get an error */
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&takers[i], NULL, takes_from_deleted, NULL) == 0);
    CHECK(exs_qdelete(shared.q) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(takers[i], &failed) == 0 && failed == NULL);
    close_both(fd);
    (void)unused;
}

static void *reads(void *fd) {
    char to[8];
    return exs_sync_recv(*(int *)fd, to, sizeof to, MSG_WAITALL) == 0 ? NULL : &shared;
}

/* A reader that waits when the reading side is shut down gets the end of the stream, and so does a later one. */
static void reader(exs_qhandle_t q) {
    for (int i = 0; i < 40; i++) {
        int fd[2];
        pthread_t thread;
        void *failed;
        pair_of(i & 1 ? SOCK_SEQPACKET : SOCK_STREAM, q, fd);
        CHECK(pthread_create(&thread, NULL, reads, &fd[1]) == 0);
        for (int j = 0; j < i / 4; j++) /* before it waits, or while it does */
            sched_yield();
        CHECK(exs_sync_shutdown(fd[1], SHUT_RD) == 0);
        CHECK(pthread_join(thread, &failed) == 0 && failed == NULL);
        CHECK(exs_sync_send(fd[1], "x", 1, 0) == 1); /* the other direction still works */
        char byte;
        CHECK(exs_sync_recv(fd[0], &byte, 1, 0) == 1 && byte == 'x');
        close_both(fd);
    }
}

/* Handles and descriptors are reused: none is leaked. */
static void many(exs_qhandle_t q) {
    int fd[2], first[2];
    char byte;
    pair_of(SOCK_STREAM, q, first);
    close_both(first);
    for (int i = 0; i < 50; i++) {
        pair_of(i & 1 ? SOCK_SEQPACKET : SOCK_STREAM, q, fd);
        exs_mhandle_t mh = exs_mregister(&byte, 1, 0);
        CHECK(exs_sync_send_mh(fd[0], &byte, 1, 0, mh) == 1 && exs_sync_recv_mh(fd[1], &byte, 1, 0, mh) == 1);
        CHECK(exs_mderegister(mh) == 0);
        close_both(fd);
    }
    int last = open("/dev/null", O_RDONLY);
    CHECK(last < first[1] + 20);
    close(last);
}

static const struct {
    const char *name;
    void (*run)(exs_qhandle_t);
} cases[] = {
    {"stream", stream},           {"seqpacket", seqpacket}, {"registered", registered},
    {"vectors", vectors},         {"files", files},         {"queues", queues},
    {"cancel", cancel},           {"limits", limits},       {"options", options},
    {"small_packets", small_packets}, {"readiness", readiness}, {"without_waiting", without_waiting},
    {"plain_sockets", plain_sockets}, {"wrong", wrong},     {"forked", forked},
    {"ended", ended},             {"killed", killed},       {"threads", threads}, {"reader", reader},
    {"many", many},
};

static void hangs(int signal) {
    (void)signal;
    if (write(2, running, strlen(running)) > 0 && write(2, family == AF_INET ? " hangs (IPv4)\n" : " hangs (IPv6)\n", 14) > 0)
        abort();
    _exit(101);
}

int main(int argc, char **argv) {
    signal(SIGALRM, hangs);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int wanted = argc == 1;
        for (int a = 1; a < argc; a++)
            wanted |= strcmp(argv[a], cases[i].name) == 0;
        for (int v6 = 0; wanted && v6 < 2; v6++) {
            family = v6 ? AF_INET6 : AF_INET;
            running = cases[i].name;
            exs_qhandle_t q = exs_qcreate(64);
            CHECK(q != EXS_QHANDLE_INVALID);
            alarm(60); /* a case that hangs fails */
            cases[i].run(q);
            struct timeval never = {0, 0};
            exs_event_t event;
            CHECK(exs_qdequeue(q, &event, 1, &never) == 0); /* no more events than operations */
            CHECK(exs_qdelete(q) == 0);
        }
    }
    return failures > 99 ? 99 : failures;
}
