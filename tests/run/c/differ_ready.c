/* The calls of `differ` that ask whether an end is ready, that wait, and the streams that do both. */
#include "differ.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

const char *events_text(unsigned events, char *to)
{
    static const struct { unsigned bit; const char *name; } NAMES[] = {
        {EPOLLIN, "IN"}, {EPOLLPRI, "PRI"}, {EPOLLOUT, "OUT"}, {EPOLLERR, "ERR"}, {EPOLLHUP, "HUP"}, {EPOLLRDNORM, "RDNORM"},
        {EPOLLRDBAND, "RDBAND"}, {EPOLLWRNORM, "WRNORM"}, {EPOLLWRBAND, "WRBAND"}, {EPOLLRDHUP, "RDHUP"}, {EPOLLET, "ET"},
        {EPOLLONESHOT, "ONESHOT"}, {EPOLLEXCLUSIVE, "EXCLUSIVE"}, {POLLNVAL, "NVAL"},
    };
    *to = 0;
    for (unsigned i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (events & NAMES[i].bit)
            strcat(strcat(to, *to ? "|" : ""), NAMES[i].name);
    if (!*to)
        strcpy(to, "0");
    return to;
}

/* The first descriptor of an end that this process has, -1 if it has none. */
static int first_fd(int conn, int end)
{
    for (int slot = 0; slot < SLOTS; slot++)
        if (fds[conn][end][slot] >= 0)
            return fds[conn][end][slot];
    return -1;
}

/* Every open end of this process, a descriptor that is closed and one that is negative. */
void do_poll(const struct cmd *cmd, struct reply *reply)
{
    struct pollfd list[CONNS * 2 + 2];
    struct timespec none = {0, 0};
    char names[128];
    int n = 0;
    for (int conn = 0; conn < CONNS; conn++)
        for (int end = 0; end < 2; end++) {
            int fd = first_fd(conn, end);
            if (fd >= 0 && (conn == cmd->conn ? end == cmd->end || cmd->m : cmd->m))
                list[n++] = (struct pollfd){fd, cmd->events, -1};
        }
    if (cmd->m & 2) {
        list[n++] = (struct pollfd){-1, cmd->events, -1};
        list[n++] = (struct pollfd){CLOSED_FD, cmd->events, -1};
    }
    int r = cmd->kind ? ppoll(list, n, &none, 0) : poll(list, n, 0);
    add_result(reply, "->", r);
    for (int i = 0; i < n; i++)
        add(reply, " %s", events_text((unsigned short)list[i].revents, names));
}

void do_select(const struct cmd *cmd, struct reply *reply)
{
    fd_set in, out, except;
    struct timeval none = {0, 0};
    struct timespec no_time = {0, 0};
    int most = -1;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&except);
    for (int conn = 0; conn < CONNS; conn++)
        for (int end = 0; end < 2; end++) {
            int fd = first_fd(conn, end);
            if (fd < 0 || (conn != cmd->conn && !cmd->m))
                continue;
            if (cmd->events & 1)
                FD_SET(fd, &in);
            if (cmd->events & 2)
                FD_SET(fd, &out);
            if (cmd->events & 4)
                FD_SET(fd, &except);
            most = fd > most ? fd : most;
        }
    fd_set *i = cmd->events & 1 ? &in : 0, *o = cmd->events & 2 ? &out : 0, *e = cmd->events & 4 ? &except : 0;
    int r = cmd->kind ? pselect(most + 1, i, o, e, &no_time, 0) : select(most + 1, i, o, e, &none);
    add_result(reply, "->", r);
    for (int conn = 0; conn < CONNS; conn++)
        for (int end = 0; end < 2; end++) {
            int fd = first_fd(conn, end);
            if (fd >= 0 && r >= 0)
                add(reply, " %s%s%s.", i && FD_ISSET(fd, i) ? "r" : "", o && FD_ISSET(fd, o) ? "w" : "", e && FD_ISSET(fd, e) ? "e" : "");
        }
}

/* Sets 0 and 1 have sockets; set 2 has the other two. */
void do_ctl(const struct cmd *cmd, struct reply *reply)
{
    static const int CALLS[] = {EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL};
    struct epoll_event event = {.events = cmd->events, .data.u32 = cmd->conn * 100 + cmd->end * 10 + cmd->slot};
    for (int n = 0; n < SETS; n++)
        if (sets[n] < 0)
            sets[n] = n & 1 ? epoll_create(1) : epoll_create1(EPOLL_CLOEXEC);
    int fd = fds[cmd->conn][cmd->end][cmd->slot];
    if (cmd->set == 2) {
        event.data.u32 = 900 + cmd->m;
        fd = sets[cmd->m];
    }
    add_result(reply, "->", epoll_ctl(sets[cmd->set], CALLS[cmd->how], fd, &event));
}

static int by_data(const void *one, const void *other)
{
    const struct epoll_event *a = one, *b = other;
    return a->data.u32 < b->data.u32 ? -1 : a->data.u32 > b->data.u32;
}

void do_epoll(const struct cmd *cmd, struct reply *reply)
{
    struct epoll_event list[16];
    struct timespec none = {0, 0};
    char names[128];
    if (sets[cmd->set] < 0) {
        add(reply, "no set");
        return;
    }
    int r = cmd->kind == 0 ? epoll_wait(sets[cmd->set], list, 16, 0)
          : cmd->kind == 1 ? epoll_pwait(sets[cmd->set], list, 16, 0, 0)
                           : epoll_pwait2(sets[cmd->set], list, 16, &none, 0);
    add_result(reply, "->", r);
    if (r > 1)
        qsort(list, r, sizeof *list, by_data);
    for (int i = 0; i < r; i++)
        add(reply, " %u:%s", list[i].data.u32, events_text(list[i].events, names));
}

static void hear(int signal)
{
    (void)signal;
}

static void wait_epoll(const struct cmd *cmd, struct reply *reply, int fd)
{
    struct epoll_event event = {.events = cmd->events & ~(EPOLLET | EPOLLONESHOT), .data.u32 = 7}, got = {0};
    int set = epoll_create1(EPOLL_CLOEXEC), outer = -1;
    char names[128];
    if (cmd->kind == 9)
        event.events |= EPOLLET;
    if (cmd->kind == 10)
        event.events |= EPOLLONESHOT;
    epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
    if (cmd->kind == 11) {
        outer = epoll_create1(EPOLL_CLOEXEC);
        event.events = EPOLLIN;
        epoll_ctl(outer, EPOLL_CTL_ADD, set, &event);
    }
    errno = 0;
    int r = epoll_wait(outer >= 0 ? outer : set, &got, 1, PATIENCE_MS);
    add_result(reply, "->", r);
    if (r > 0)
        add(reply, " %s", events_text(got.events, names));
    if (outer >= 0 && r > 0) {
        r = epoll_wait(set, &got, 1, 0);
        add_result(reply, ", inner ->", r);
        add(reply, " %s", events_text(got.events, names));
    }
    close(set);
    if (outer >= 0)
        close(outer);
}

/* Waits for what another thread or process does. `how` 1: a signal interrupts it. */
void do_wait(const struct cmd *cmd, struct reply *reply)
{
    static char to[2][8192];
    char *into = to[thread_index], names[128];
    int fd = fds[cmd->conn][cmd->end][cmd->slot], r;
    struct sigaction action = {.sa_handler = hear, .sa_flags = cmd->how == 1 ? 0 : SA_RESTART};
    struct timespec limit = {PATIENCE_MS / 1000, 0};
    struct timeval time = {PATIENCE_MS / 1000, 0};
    struct pollfd list = {fd, cmd->events, 0};
    fd_set in;
    FD_ZERO(&in);
    FD_SET(fd, &in);
    sigaction(SIGUSR1, &action, 0);
    errno = 0;
    switch (cmd->kind) {
    case 0: case 1: case 2: case 3: {
        struct cmd call = *cmd;
        call.kind = (const int[]){1, 0, 7, 4}[cmd->kind];
        call.flags = 0;
        reply->moved = recv_as(fd, &call, into, cmd->n, reply);
        add_result(reply, "->", reply->moved);
        add_bytes(reply, into, reply->moved, cmd);
        return;
    }
    case 4: case 5:
        r = cmd->kind == 4 ? poll(&list, 1, PATIENCE_MS) : ppoll(&list, 1, &limit, 0);
        add_result(reply, "->", r);
        if (r >= 0)
            add(reply, " %s", events_text((unsigned short)list.revents, names));
        return;
    case 6: case 7:
        r = cmd->kind == 6 ? select(fd + 1, &in, 0, 0, &time) : pselect(fd + 1, &in, 0, 0, &limit, 0);
        add_result(reply, "->", r);
        return;
    default:
        return wait_epoll(cmd, reply, fd);
    }
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Sends n bytes in pieces, with pauses. */
void do_stream_out(const struct cmd *cmd, struct reply *reply)
{
    int fd = fds[cmd->conn][cmd->end][cmd->slot], at = 0, eagain = 0;
    uint32_t random = cmd->m;
    char *data = malloc(16384);
    double begun = now();
    while (at < cmd->n && now() - begun < PATIENCE_MS / 1e3) {
        int piece = 1 + next_random(&random) % (cmd->how ? 9000 : 600);
        if (piece > cmd->n - at)
            piece = cmd->n - at;
        fill_bytes(data, piece, cmd->salt, cmd->pos + at);
        ssize_t k = send(fd, data, piece, MSG_NOSIGNAL);
        if (k < 0 && errno == EAGAIN) {
            struct pollfd list = {fd, POLLOUT, 0};
            /* What poll promises, the next send keeps. */
            if (eagain++ && !poll(&list, 1, PATIENCE_MS))
                break;
            if (eagain > 3 && list.revents & POLLOUT) {
                add(reply, "POLLOUT, but EAGAIN; ");
                break;
            }
            poll(&list, 1, PATIENCE_MS);
            continue;
        }
        eagain = 0;
        if (k <= 0) {
            add_result(reply, "send", k);
            break;
        }
        at += k;
        if (next_random(&random) % 4 == 0)
            sleep_us(next_random(&random) % 200);
    }
    free(data);
    reply->moved = at;
    add(reply, at == cmd->n ? "-> all sent" : "-> NOT ALL SENT");
}

struct intake { int fd, got, waits; const struct cmd *cmd; struct reply *reply; char bytes[16384]; };

/* Receives at most `most` bytes and compares them. */
static ssize_t take(struct intake *in, int most)
{
    int left = in->cmd->n - in->got;
    ssize_t k = recv(in->fd, in->bytes, most < left ? most : left, 0);
    if (k > 0) {
        struct cmd at = *in->cmd;
        at.pos += in->got;
        if (wrong_at(in->bytes, k, at.salt, at.pos) >= 0 && strlen(in->reply->text) < 100)
            add_bytes(in->reply, in->bytes, k, &at);
        in->got += k;
    }
    return k;
}

/* The rule of a proxy: stop without EAGAIN after a short read, or when a read returned more than the last FIONREAD had said, because bytes that came
 * since then make another edge. */
static void take_as_proxy(struct intake *in)
{
    int available = -1;
    for (;;) {
        ssize_t k = take(in, 4096);
        if (k <= 0)
            return;
        if (available >= 0) {
            available -= k;
            if (available < 0)
                return;
        } else if (k == 4096) {
            ioctl(in->fd, FIONREAD, &available);
        }
        if (k < 4096)
            return;
    }
}

/* Receives n bytes by one of several rules. A wait that ends without an event while bytes are missing is a stall. */
void do_stream_in(const struct cmd *cmd, struct reply *reply)
{
    struct intake *in = calloc(1, sizeof *in);
    *in = (struct intake){.fd = fds[cmd->conn][cmd->end][cmd->slot], .cmd = cmd, .reply = reply};
    int old = fcntl(in->fd, F_GETFL), set = epoll_create1(EPOLL_CLOEXEC), stalls = 0;
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP};
    fcntl(in->fd, F_SETFL, cmd->kind == 0 ? old & ~O_NONBLOCK : old | O_NONBLOCK);
    if (cmd->kind == 2 || cmd->kind == 3 || cmd->kind == 7)
        event.events |= EPOLLET;
    if (cmd->kind == 2)
        event.events |= EPOLLOUT;
    if (cmd->kind == 4)
        event.events |= EPOLLONESHOT;
    if (cmd->kind != 0)
        epoll_ctl(set, EPOLL_CTL_ADD, in->fd, &event);
    double begun = now();
    while (in->got < cmd->n && stalls < 2 && now() - begun < PATIENCE_MS / 1e3) {
        struct pollfd list = {in->fd, POLLIN, 0};
        fd_set ready;
        int r = 1, wait = 1500;
        if (cmd->kind == 5) {
            r = poll(&list, 1, wait);
        } else if (cmd->kind == 6) {
            struct timeval time = {1, 500000};
            FD_ZERO(&ready);
            FD_SET(in->fd, &ready);
            r = select(in->fd + 1, &ready, 0, 0, &time);
        } else if (cmd->kind != 0) {
            r = epoll_wait(set, &event, 1, wait);
        }
        if (r == 0) {
            int unread = 0;
            ioctl(in->fd, FIONREAD, &unread);
            stalls++;
            if (unread)
                add(reply, "STALL: no event with %d bytes unread; ", unread);
            continue;
        }
        if (r < 0 || (cmd->kind && cmd->kind < 5 && !(event.events & EPOLLIN)))
            continue;
        int before = in->got;
        if (cmd->kind == 2)
            take_as_proxy(in);
        else if (cmd->kind == 3 || cmd->kind == 7)
            while (take(in, cmd->kind == 3 ? 3000 : 16384) > 0) {
            }
        else if (take(in, cmd->kind == 0 ? 5000 : 1000) < 0 && errno == EAGAIN && cmd->kind != 0)
            add(reply, "READY, but EAGAIN; ");
        if (cmd->kind == 4) {
            event.events = EPOLLIN | EPOLLONESHOT;
            epoll_ctl(set, EPOLL_CTL_MOD, in->fd, &event);
        }
        if (cmd->kind == 0 && in->got == before)
            break;
    }
    fcntl(in->fd, F_SETFL, old);
    close(set);
    reply->moved = in->got;
    add(reply, in->got == cmd->n ? "-> all, right" : "-> NOT ALL CAME");
    free(in);
}

/* Sends until nothing fits any longer, also after a pause. */
void do_fill(const struct cmd *cmd, struct reply *reply)
{
    int fd = fds[cmd->conn][cmd->end][cmd->slot], quiet = 0;
    char *data = malloc(32768);
    double begun = now();
    while (quiet < 3 && now() - begun < 3) {
        int piece = cmd->n;
        fill_bytes(data, piece, cmd->salt, cmd->pos + reply->moved);
        ssize_t k = send(fd, data, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k > 0) {
            reply->moved += k;
            quiet = 0;
            continue;
        }
        if (errno != EAGAIN) {
            add_result(reply, "->", k);
            break;
        }
        sleep_us(1000);
        /* A full direction is not writable; if it became so meanwhile, a byte fits. */
        struct pollfd list = {fd, POLLOUT, 0};
        if (poll(&list, 1, 0) == 1) {
            fill_bytes(data, 1, cmd->salt, cmd->pos + reply->moved);
            k = send(fd, data, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (k != 1) {
                add(reply, "POLLOUT, but ");
                add_result(reply, "send", k);
                break;
            }
            reply->moved += 1;
            quiet = 0;
        } else {
            quiet++;
        }
    }
    add(reply, quiet == 3 ? "-> full" : "-> NEVER FULL");
    free(data);
}

/* Waits until a full direction has room, and uses it. */
void do_wait_out(const struct cmd *cmd, struct reply *reply)
{
    int fd = fds[cmd->conn][cmd->end][cmd->slot], r = 0;
    struct pollfd list = {fd, POLLOUT, 0};
    struct epoll_event event = {.events = EPOLLOUT | (cmd->kind == 1 ? EPOLLET : cmd->kind == 2 ? EPOLLONESHOT : 0)};
    struct timeval time = {PATIENCE_MS / 1000, 0};
    fd_set out;
    char byte;
    FD_ZERO(&out);
    FD_SET(fd, &out);
    if (cmd->kind < 3) {
        int set = epoll_create1(EPOLL_CLOEXEC);
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
        event.events = 0;
        r = epoll_wait(set, &event, 1, PATIENCE_MS);
        r = r == 1 && event.events == EPOLLOUT ? 1 : -2;
        close(set);
    } else if (cmd->kind == 3) {
        r = poll(&list, 1, PATIENCE_MS);
    } else {
        r = select(fd + 1, 0, &out, 0, &time);
    }
    fill_bytes(&byte, 1, cmd->salt, cmd->pos);
    add(reply, "-> %d, ", r);
    r = send(fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    reply->moved = r > 0 ? r : 0;
    add_result(reply, "send", r);
}
