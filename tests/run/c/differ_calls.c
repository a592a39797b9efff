/* The calls of `differ` that send, receive, ask and set. */
#include "differ.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <linux/sockios.h>
#include <time.h>
#include <unistd.h>

int fds[CONNS][2][SLOTS];
int sets[SETS];
static int listener = -1;
static char buffer[1 << 18];
static char second_buffer[1 << 18]; /* of the second thread */

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

void sleep_us(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    if (us > 0)
        nanosleep(&t, 0);
}

void add(struct reply *reply, const char *format, ...)
{
    va_list list;
    size_t at = strlen(reply->text);
    va_start(list, format);
    vsnprintf(reply->text + at, TEXT - at, format, list);
    va_end(list);
}

static const char *errno_name(int error)
{
    static _Thread_local char number[16];
    switch (error) {
#define NAME(x) case x: return #x
        NAME(EAGAIN); NAME(EPIPE); NAME(ECONNRESET); NAME(EFAULT); NAME(ENOTCONN); NAME(EINTR); NAME(EBADF); NAME(EINVAL); NAME(EEXIST);
        NAME(ENOENT); NAME(ESPIPE); NAME(EIO); NAME(ELOOP); NAME(EPERM); NAME(ECHILD); NAME(ETIMEDOUT); NAME(EOPNOTSUPP); NAME(EMSGSIZE);
        NAME(ENOBUFS); NAME(ENOMEM); NAME(EMFILE); NAME(ENOTSOCK); NAME(ENOPROTOOPT); NAME(EISCONN); NAME(ECONNREFUSED); NAME(ENOSYS);
#undef NAME
    }
    snprintf(number, sizeof number, "errno %d", error);
    return number;
}

/* What a call returned, and the errno that it left. */
void add_result(struct reply *reply, const char *what, int64_t result)
{
    int error = errno;
    if (result < 0)
        add(reply, "%s -1 %s", what, errno_name(error));
    else
        add(reply, "%s %lld", what, (long long)result);
    errno = error;
}

/* The stream: a printable byte for each position, so that dprintf can send it. */
static inline char byte_at(uint32_t salt, uint64_t pos)
{
    uint32_t x = ((uint32_t)pos + salt) * 2654435761u;
    return 33 + (x >> 16) % 90;
}

void fill_bytes(char *to, int n, uint32_t salt, uint64_t pos)
{
    for (int i = 0; i < n; i++)
        to[i] = byte_at(salt, pos + i);
}

int wrong_at(const char *got, int n, uint32_t salt, uint64_t pos)
{
    for (int i = 0; i < n; i++)
        if (got[i] != byte_at(salt, pos + i))
            return i;
    return -1;
}

void add_bytes(struct reply *reply, const char *got, int64_t n, const struct cmd *cmd)
{
    if (n <= 0)
        return;
    int at = wrong_at(got, n, cmd->salt, cmd->pos);
    if (at < 0)
        return add(reply, " right");
    for (int ahead = -70000; ahead < 70000; ahead++)
        if (n - at >= 8 && ahead && wrong_at(got + at, 8, cmd->salt, cmd->pos + at + ahead) < 0)
            return add(reply, " WRONG AT %d: the bytes %d further on", at, ahead);
    add(reply, " WRONG AT %d", at);
}

/* What the kernel itself says about a socket, past every library. */
static long kernel(long n, long a, long b, long c, long d, long e)
{
#ifdef __x86_64__
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
#else
    return syscall(n, a, b, c, d, e);
#endif
}

static int tcp_state(int fd)
{
    struct tcp_info info;
    socklen_t len = sizeof info;
    return kernel(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, (long)&info, (long)&len) < 0 ? -1 : info.tcpi_state;
}

static int is_in_state(int fd, int state)
{
    int tcp = tcp_state(fd);
    if (state == CLOSED)
        return tcp == TCP_CLOSE || tcp < 0;
    if (state == HALF)
        return tcp != TCP_FIN_WAIT1;
    return state == ANY || (tcp != TCP_ESTABLISHED && tcp != TCP_FIN_WAIT1 && tcp != TCP_FIN_WAIT2);
}

/* Waits until an end has everything that was sent to it. Under weft, what the kernel shows is no measure of the bytes: there a quiet wait is a pause,
 * and the other waits ask the library. */
void settle_one(const struct cmd *cmd, int conn, int end, struct reply *reply)
{
    int fd = -1, there = 0, expect = cmd->expect[conn][end], state = cmd->state[conn][end];
    for (int slot = 0; slot < SLOTS && fd < 0; slot++)
        fd = fds[conn][end][slot];
    if (fd < 0 || expect < 0)
        return;
    double begun = now(), patience = under_weft ? 0.05 : 20;
    int turns = 0;
    while (!is_in_state(fd, state) && now() - begun < patience)
        sleep_us(turns++ < 20 ? 20 : 500);
    if (under_weft && cmd->quiet) {
        sleep_us(expect || state != ANY ? 300 : 0);
        return;
    }
    begun = now();
    for (turns = 0;; turns++) {
        int r = under_weft ? ioctl(fd, FIONREAD, &there) : (int)kernel(SYS_ioctl, fd, FIONREAD, (long)&there, 0, 0);
        if (r < 0 || there >= expect)
            return;
        /* Where the kernel's own thread that delivers packets waits for a processor, this takes long. */
        if (now() - begun > (under_weft ? 1.5 : 20))
            break;
        sleep_us(turns < 20 ? 20 : 500);
    }
    if (strlen(reply->text) < 200)
        add(reply, "UNSETTLED (%d bytes of %d at %d.%d) ", there, expect, conn, end);
}

void settle(const struct cmd *cmd, struct reply *reply)
{
    for (int conn = 0; conn < CONNS; conn++)
        for (int end = 0; end < 2; end++)
            settle_one(cmd, conn, end, reply);
}

static const char *const SEND_NAMES[SEND_KINDS] = {
    "send", "write", "writev", "sendmsg", "sendmmsg", "sendto", "MSG_MORE", "sendfile", "pwritev2", "dprintf", "splice", "fwrite", "SYS_write",
    "SYS_sendto", "SYS_writev", "SYS_sendmsg", "SYS_sendmmsg", "SYS_sendfile", "SYS_pwritev2", "SYS_splice",
};

const char *send_name(int kind) { return SEND_NAMES[kind]; }

/* Kinds after which the library is known to put the connection back on TCP, so that a script uses them less. */
int is_exotic_send(int kind) { return kind == 10 || kind == 11 || kind == 19; }

static int64_t send_file(int fd, char *data, int n, int raw)
{
    off_t at = 0;
    int file = memfd_create("part", MFD_CLOEXEC);
    if (file < 0 || write(file, data, n) != n)
        return -2;
    int64_t r = raw ? syscall(SYS_sendfile, fd, file, &at, n) : sendfile(fd, file, &at, n);
    int error = errno;
    close(file);
    errno = error;
    return r;
}

static int64_t splice_out(int fd, char *data, int n, int raw)
{
    int ends[2];
    int64_t sum = 0, r = 0;
    if (pipe(ends) || write(ends[1], data, n) != n)
        return -2;
    while (sum < n) {
        r = raw ? syscall(SYS_splice, ends[0], 0, fd, 0, n - sum, 0) : splice(ends[0], 0, fd, 0, n - sum, 0);
        if (r <= 0)
            break;
        sum += r;
    }
    int error = errno;
    close(ends[0]), close(ends[1]);
    errno = error;
    return sum ? sum : r;
}

int64_t send_as(int fd, const struct cmd *cmd, char *data, int n)
{
    int cut = n ? cmd->m % (n + 1) : 0, flags = cmd->flags;
    struct iovec parts[3] = {{data, cut}, {data, 0}, {data + cut, n - cut}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct mmsghdr two[2] = {{.msg_hdr = {.msg_iov = parts, .msg_iovlen = 2}}, {.msg_hdr = {.msg_iov = parts + 2, .msg_iovlen = 1}}};
    int64_t r;
    switch (cmd->kind) {
    case 0: return send(fd, data, n, flags);
    case 1: return write(fd, data, n);
    case 2: return writev(fd, parts, 3);
    case 3: return sendmsg(fd, &message, flags);
    case 4: r = sendmmsg(fd, two, 2, flags); return r < 0 ? r : (int64_t)two[0].msg_len + (r > 1 ? two[1].msg_len : 0);
    case 5: return sendto(fd, data, n, flags, 0, 0);
    case 6:
        r = send(fd, data, cut, flags | MSG_MORE);
        if (r < 0)
            return r;
        return r + send(fd, data + cut, n - cut, flags);
    case 7: return send_file(fd, data, n, 0);
    case 8: return pwritev2(fd, parts, 3, -1, 0);
    case 9: return dprintf(fd, "%.*s", n, data);
    case 10: return splice_out(fd, data, n, 0);
    case 11: {
        int copy = dup(fd);
        FILE *stream = fdopen(copy, "w");
        r = fwrite(data, 1, n, stream);
        if (fflush(stream))
            r = -1;
        int error = errno;
        fclose(stream);
        errno = error;
        return r;
    }
    case 12: return syscall(SYS_write, fd, data, n);
    case 13: return syscall(SYS_sendto, fd, data, n, flags, 0, 0);
    case 14: return syscall(SYS_writev, fd, parts, 3);
    case 15: return syscall(SYS_sendmsg, fd, &message, flags);
    case 16: r = syscall(SYS_sendmmsg, fd, two, 2, flags); return r < 0 ? r : (int64_t)two[0].msg_len + (r > 1 ? two[1].msg_len : 0);
    case 17: return send_file(fd, data, n, 1);
    case 18: return syscall(SYS_pwritev2, fd, parts, 3, -1L, -1L, 0);
    default: return splice_out(fd, data, n, 1);
    }
}

static const char *const RECV_NAMES[RECV_KINDS] = {
    "read", "recv", "recvfrom", "readv", "recvmsg", "recvmmsg", "preadv2", "WAITALL", "PEEK", "TRUNC", "splice", "SYS_read", "SYS_recvfrom",
    "SYS_readv", "SYS_recvmsg", "SYS_recvmmsg", "SYS_preadv2", "PEEK|DONTWAIT",
};

const char *recv_name(int kind) { return RECV_NAMES[kind]; }

static int64_t splice_in(int fd, char *to, int n)
{
    int ends[2];
    int64_t sum = 0, r = 0;
    if (pipe(ends))
        return -2;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    while (sum < n) {
        r = splice(fd, 0, ends[1], 0, n - sum, SPLICE_F_NONBLOCK);
        if (r <= 0)
            break;
        for (int64_t left = r; left > 0;) {
            int64_t k = read(ends[0], to + sum, left);
            if (k <= 0)
                break;
            sum += k, left -= k;
        }
    }
    int error = errno;
    close(ends[0]), close(ends[1]);
    errno = error;
    return sum ? sum : r;
}

static void show_inq(struct msghdr *message, int64_t r, struct reply *reply)
{
    if (r < 0)
        return;
    add(reply, "flags 0x%x ", message->msg_flags & ~MSG_CMSG_CLOEXEC);
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == IPPROTO_TCP && c->cmsg_type == TCP_CM_INQ)
            add(reply, "inq %d ", *(int *)CMSG_DATA(c));
        else
            add(reply, "control %d/%d ", c->cmsg_level, c->cmsg_type);
}

int64_t recv_as(int fd, const struct cmd *cmd, char *to, int n, struct reply *reply)
{
    int cut = n ? cmd->m % (n + 1) : 0, flags = cmd->flags;
    struct iovec parts[3] = {{to, cut}, {to, 0}, {to + cut, n - cut}};
    char control[128];
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3, .msg_control = control, .msg_controllen = sizeof control};
    struct mmsghdr two[2] = {{.msg_hdr = {.msg_iov = parts, .msg_iovlen = 2}}, {.msg_hdr = {.msg_iov = parts + 2, .msg_iovlen = 1}}};
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    int64_t r;
    switch (cmd->kind) {
    case 0: return read(fd, to, n);
    case 1: return recv(fd, to, n, flags);
    case 2:
        r = recvfrom(fd, to, n, flags, (struct sockaddr *)&from, &len);
        if (r > 0)
            add(reply, "from %d ", (int)len);
        return r;
    case 3: return readv(fd, parts, 3);
    case 4:
        r = recvmsg(fd, &message, flags);
        show_inq(&message, r, reply);
        return r;
    case 5:
        r = recvmmsg(fd, two, 2, flags | MSG_DONTWAIT, 0);
        return r < 0 ? r : (int64_t)two[0].msg_len + (r > 1 ? two[1].msg_len : 0);
    case 6: return preadv2(fd, parts, 3, -1, 0);
    case 7: return recv(fd, to, n, flags | MSG_WAITALL);
    case 8: return recv(fd, to, n, flags | MSG_PEEK);
    case 9: return recv(fd, to, n, flags | MSG_TRUNC);
    case 10: return splice_in(fd, to, n);
    case 11: return syscall(SYS_read, fd, to, n);
    case 12: return syscall(SYS_recvfrom, fd, to, n, flags, 0, 0);
    case 13: return syscall(SYS_readv, fd, parts, 3);
    case 14:
        r = syscall(SYS_recvmsg, fd, &message, flags);
        show_inq(&message, r, reply);
        return r;
    case 15:
        r = syscall(SYS_recvmmsg, fd, two, 2, flags | MSG_DONTWAIT, 0);
        return r < 0 ? r : (int64_t)two[0].msg_len + (r > 1 ? two[1].msg_len : 0);
    case 16: return syscall(SYS_preadv2, fd, parts, 3, -1L, -1L, 0);
    default: return recv(fd, to, n, flags | MSG_PEEK | MSG_DONTWAIT);
    }
}

static char *own_buffer(void) { return thread_index ? second_buffer : buffer; }

static int fd_of(const struct cmd *cmd) { return fds[cmd->conn][cmd->end][cmd->slot]; }

static void do_send(const struct cmd *cmd, struct reply *reply)
{
    char *data = own_buffer();
    fill_bytes(data, cmd->n, cmd->salt, cmd->pos);
    int pipes = shared->sigpipes;
    errno = 0;
    reply->moved = send_as(fd_of(cmd), cmd, data, cmd->n);
    add_result(reply, "->", reply->moved);
    if (shared->sigpipes != pipes)
        add(reply, " SIGPIPE %d", shared->sigpipes - pipes);
}

static void do_recv(const struct cmd *cmd, struct reply *reply)
{
    char *to = own_buffer();
    memset(to, 0, cmd->n < 65536 ? cmd->n : 65536);
    errno = 0;
    int64_t r = recv_as(fd_of(cmd), cmd, to, cmd->n, reply);
    add_result(reply, "->", r);
    if (cmd->kind != RECV_TRUNC)
        add_bytes(reply, to, r, cmd);
    reply->moved = r;
}

/* Memory of two pages, of which the second cannot be touched. */
static char *half_bad(void)
{
    static char *pages;
    if (!pages) {
        pages = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(pages + 4096, 4096, PROT_NONE);
    }
    return pages;
}

/* A call whose bytes are in memory that cannot be read (or written). `how`: nothing is there, a page without rights, the end of a buffer, the
 * second part of a vector, the vector itself. The kernel may take the bytes before the bad ones, so the line shows only EFAULT or "some". */
static void do_bad(const struct cmd *cmd, struct reply *reply, int sends)
{
    int fd = fd_of(cmd), good = 0;
    char *pages = half_bad();
    struct iovec parts[2] = {{pages, 100}, {pages + 4096, 100}};
    struct cmd call = *cmd;
    static const int SEND_LIKE[] = {0, 1, 5, 12}, RECV_LIKE[] = {0, 1, 2, 11};
    int64_t r = -1;
    errno = 0;
    call.kind = (sends ? SEND_LIKE : RECV_LIKE)[cmd->kind % 4];
    if (cmd->how <= 1) {
        char *bad = cmd->how ? pages + 4096 : 0;
        r = sends ? send_as(fd, &call, bad, 10) : recv_as(fd, &call, bad, 10, reply);
    } else if (cmd->how == 2) {
        good = 50;
        if (sends)
            fill_bytes(pages + 4046, 50, cmd->salt, cmd->pos);
        r = sends ? send_as(fd, &call, pages + 4046, 100) : recv_as(fd, &call, pages + 4046, 100, reply);
    } else if (cmd->how == 3) {
        good = 100;
        if (sends)
            fill_bytes(pages, 100, cmd->salt, cmd->pos);
        r = sends ? writev(fd, parts, 2) : readv(fd, parts, 2);
    } else {
        struct msghdr message = {.msg_iov = (void *)(pages + 4096), .msg_iovlen = 2};
        r = sends ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, MSG_DONTWAIT);
    }
    reply->moved = r > 0 ? r : 0;
    if (r > 0 && r <= good) {
        add(reply, "-> fault");
        if (!sends && wrong_at(cmd->how == 2 ? pages + 4046 : pages, r, cmd->salt, cmd->pos) >= 0)
            add(reply, " WRONG BYTES");
    } else if (r < 0 && errno == EFAULT)
        add(reply, "-> fault");
    else
        add_result(reply, "->", r);
}

/* Receives everything that is expected. */
static void do_drain(const struct cmd *cmd, struct reply *reply)
{
    int fd = fd_of(cmd);
    char *to = own_buffer();
    struct cmd part = *cmd;
    double begun = now();
    while (reply->moved < cmd->n && now() - begun < PATIENCE_MS / 1e3) {
        int64_t want = cmd->n - reply->moved, r = recv(fd, to, want < 100000 ? want : 100000, MSG_DONTWAIT);
        if (r < 0 && errno == EAGAIN) {
            sleep_us(50);
            continue;
        }
        if (r <= 0) {
            add_result(reply, "ended early", r);
            return;
        }
        part.pos = cmd->pos + reply->moved;
        int bad = wrong_at(to, r, cmd->salt, part.pos);
        reply->moved += r;
        if (bad >= 0) {
            add_bytes(reply, to, r, &part);
            return;
        }
    }
    add(reply, reply->moved == cmd->n ? "-> all, right" : "-> BYTES ARE MISSING");
}

static void do_ask(const struct cmd *cmd, struct reply *reply)
{
    static const struct { const char *name; int level, option; } OPTIONS[] = {
        {"SO_ERROR", SOL_SOCKET, SO_ERROR}, {"SO_TYPE", SOL_SOCKET, SO_TYPE}, {"SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN},
        {"SO_RCVLOWAT", SOL_SOCKET, SO_RCVLOWAT}, {"TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY}, {"SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE},
        {"SO_DOMAIN", SOL_SOCKET, SO_DOMAIN}, {"SO_PROTOCOL", SOL_SOCKET, SO_PROTOCOL},
    };
    int fd = fd_of(cmd), value = -1, r;
    socklen_t len = sizeof value;
    struct sockaddr_in name;
    socklen_t name_len = sizeof name;
    if (cmd->kind < 8) {
        r = getsockopt(fd, OPTIONS[cmd->kind].level, OPTIONS[cmd->kind].option, &value, &len);
        add(reply, "%s ", OPTIONS[cmd->kind].name);
        add_result(reply, "->", r);
        add(reply, " value %d length %d", value, (int)len);
    } else if (cmd->kind < 10) {
        r = cmd->kind == 8 ? ioctl(fd, FIONREAD, &value) : (int)syscall(SYS_ioctl, fd, FIONREAD, &value);
        add_result(reply, cmd->kind == 8 ? "FIONREAD ->" : "SYS_ioctl FIONREAD ->", r);
        add(reply, " %d", value);
    } else if (cmd->kind == 10) {
        add_result(reply, "getpeername ->", getpeername(fd, (struct sockaddr *)&name, &name_len));
    } else if (cmd->kind == 11) {
        add_result(reply, "getsockname ->", getsockname(fd, (struct sockaddr *)&name, &name_len));
    } else if (cmd->kind == 12) {
        add(reply, "F_GETFL 0x%x", fcntl(fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE | O_APPEND));
    } else if (cmd->kind == 13) {
        double begun = now();
        do
            r = ioctl(fd, SIOCOUTQ, &value);
        while (r == 0 && value && now() - begun < 1 && (sleep_us(500), 1));
        add_result(reply, "SIOCOUTQ ->", r);
        add(reply, " %s", value ? "bytes" : "none");
    } else {
        r = (int)lseek(fd, 0, SEEK_CUR);
        add_result(reply, "lseek ->", r);
    }
}

static void do_set(const struct cmd *cmd, struct reply *reply)
{
    int fd = fd_of(cmd), value = cmd->n, r = 0;
    struct timeval limit = {0, cmd->n};
    switch (cmd->kind) {
    case 0: r = fcntl(fd, F_SETFL, (fcntl(fd, F_GETFL) & ~O_NONBLOCK) | (value ? O_NONBLOCK : 0)); break;
    case 1: r = ioctl(fd, FIONBIO, &value); break;
    case 2: r = setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value); break;
    case 3: r = setsockopt(fd, IPPROTO_TCP, TCP_INQ, &value, sizeof value); break;
    case 4: r = setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit); break;
    case 5: r = setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit); break;
    case 6: r = setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value); break;
    case 7: r = setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof value); break;
    case 8: r = setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, sizeof value); break;
    case 9: r = setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value); break;
    default: r = setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value); break;
    }
    add_result(reply, "->", r);
}

static void do_dup(const struct cmd *cmd, struct reply *reply)
{
    int from = fd_of(cmd), *to = &fds[cmd->conn][cmd->end][cmd->n], spare, r;
    switch (cmd->kind) {
    case 0: r = dup(from); break;
    case 1: r = fcntl(from, F_DUPFD, 20); break;
    case 2: r = fcntl(from, F_DUPFD_CLOEXEC, 3); break;
    /* Onto another descriptor of the same connection, or a number that nothing else uses. */
    case 3: r = dup2(from, *to >= 0 ? *to : 60 + cmd->conn * 8 + cmd->end * 4 + cmd->n); break;
    case 4: spare = memfd_create("spare", 0); r = dup3(from, spare, 0); break;
    default: spare = socket(AF_INET, SOCK_STREAM, 0); r = dup2(from, spare); break;
    }
    if (*to >= 0 && *to != r)
        close(*to);
    *to = r;
    add_result(reply, "->", r < 0 ? -1 : 0);
}

static void do_close(const struct cmd *cmd, struct reply *reply)
{
    struct linger hard = {1, 0};
    int n = 0;
    for (int slot = 0; slot < SLOTS; slot++) {
        int *fd = &fds[cmd->conn][cmd->end][slot];
        if (*fd < 0)
            continue;
        if (cmd->how == 1 && !n++)
            setsockopt(*fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
        int r = cmd->how == 2 ? (int)syscall(SYS_close, *fd) : close(*fd);
        add_result(reply, "->", r);
        *fd = -1;
    }
}

void forget_sockets(void)
{
    for (int *fd = &fds[0][0][0]; fd < &fds[0][0][0] + CONNS * 2 * SLOTS; fd++)
        if (*fd >= 0)
            close(*fd), *fd = -1;
    for (int n = 0; n < SETS; n++)
        if (sets[n] >= 0)
            close(sets[n]), sets[n] = -1;
}

static void do_connect(const struct cmd *cmd, struct reply *reply)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(cmd->n)};
    socklen_t len = sizeof name;
    int one = 1, r, fd;
    if (apart.path)
        inet_pton(AF_INET, apart.address[apart.is_there ^ (cmd->op == OP_CONNECT)], &name.sin_addr);
    if (cmd->op == OP_LISTEN) {
        forget_sockets();
        if (listener < 0) {
            listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
            name.sin_port = 0;
            if (bind(listener, (struct sockaddr *)&name, sizeof name) || listen(listener, 64))
                add_result(reply, "listen", -1);
        }
        getsockname(listener, (struct sockaddr *)&name, &len);
        reply->moved = ntohs(name.sin_port);
        return;
    }
    if (cmd->op == OP_CONNECT) {
        if (cmd->how)
            forget_sockets();
        fd = socket(AF_INET, SOCK_STREAM, 0);
        r = connect(fd, (struct sockaddr *)&name, sizeof name);
        if (r)
            add_result(reply, "connect", r);
    } else {
        fd = accept(listener, 0, 0);
        if (fd < 0)
            add_result(reply, "accept", fd);
    }
    if (cmd->flags)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (cmd->kind)
        fcntl(fd, F_SETFL, O_NONBLOCK);
    fds[cmd->conn][cmd->end][0] = fd;
}

static void do_big_send(const struct cmd *cmd, struct reply *reply)
{
    char *data = malloc(cmd->n);
    fill_bytes(data, cmd->n, cmd->salt, cmd->pos);
    errno = 0;
    reply->moved = cmd->kind ? write(fd_of(cmd), data, cmd->n) : send(fd_of(cmd), data, cmd->n, MSG_NOSIGNAL);
    add_result(reply, "->", reply->moved);
    free(data);
}

void execute(const struct cmd *cmd, struct reply *reply)
{
    if (cmd->delay)
        sleep_us(cmd->delay);
    settle(cmd, reply);
    switch (cmd->op) {
    case OP_LISTEN: case OP_CONNECT: case OP_ACCEPT: return do_connect(cmd, reply);
    case OP_SEND: return do_send(cmd, reply);
    case OP_RECV: return do_recv(cmd, reply);
    case OP_BAD_SEND: return do_bad(cmd, reply, 1);
    case OP_BAD_RECV: return do_bad(cmd, reply, 0);
    case OP_DRAIN: return do_drain(cmd, reply);
    case OP_POLL: return do_poll(cmd, reply);
    case OP_SELECT: return do_select(cmd, reply);
    case OP_CTL: return do_ctl(cmd, reply);
    case OP_EPOLL: return do_epoll(cmd, reply);
    case OP_ASK: return do_ask(cmd, reply);
    case OP_SET: return do_set(cmd, reply);
    case OP_DUP: return do_dup(cmd, reply);
    case OP_CLOSE_SLOT: {
        int *fd = &fds[cmd->conn][cmd->end][cmd->slot];
        add_result(reply, "->", close(*fd));
        *fd = -1;
        return;
    }
    case OP_CLOSE: return do_close(cmd, reply);
    case OP_SHUTDOWN: add_result(reply, "->", shutdown(fd_of(cmd), cmd->how)); return;
    case OP_FORK: return do_fork(cmd, reply);
    case OP_FORK_SIDE: return do_fork_side(cmd, reply);
    case OP_SPAWN: return do_spawn(cmd, reply);
    case OP_PASS: return do_pass(cmd, reply);
    case OP_TAKE: return do_take(cmd, reply);
    case OP_WAIT: return do_wait(cmd, reply);
    case OP_STREAM_OUT: return do_stream_out(cmd, reply);
    case OP_STREAM_IN: return do_stream_in(cmd, reply);
    case OP_FILL: return do_fill(cmd, reply);
    case OP_WAIT_OUT: return do_wait_out(cmd, reply);
    case OP_BIG_SEND: return do_big_send(cmd, reply);
    case OP_STDIN: return do_stdin(cmd, reply);
    case OP_AFTER_EXEC: return do_after_exec(cmd, reply);
    case OP_EXIT:
        if (cmd->how == 0)
            exit(0);
        _exit(0);
    case OP_SETTLE: return;
    }
    add(reply, "op %d?", cmd->op);
}
