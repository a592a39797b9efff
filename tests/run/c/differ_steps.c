/* Steps of `differ` that are one call on one end. */
#include "differ_plan.h"

void step_send(int conn, int end)
{
    struct end *e = &ends[conn][end];
    struct reply reply;
    int slot;
    char what[64];
    if (!may_send(conn, end))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_SEND, conn, end, slot);
    cmd.kind = one_in(3) ? (int)any(SEND_KINDS) : (int)any(6);
    if (is_exotic_send(cmd.kind) && !one_in(6))
        cmd.kind = 1;
    if (driver->without & NO_BYPASS && (cmd.kind == 8 || cmd.kind == 9 || cmd.kind >= 12))
        cmd.kind = cmd.kind % 4;
    cmd.n = one_in(40) && cmd.kind < 4 ? 0 : some_size();
    cmd.m = any(cmd.n + 1);
    cmd.flags = one_in(2) ? MSG_NOSIGNAL : 0;
    cmd.salt = salt_of(conn, end), cmd.pos = e->tx;
    cmd.expect[conn][end] = 0;
    expects(&cmd, conn, end);
    /* Calls that are two sends in one need a byte for each, and a connection that takes both. */
    int two = cmd.kind == 4 || cmd.kind == 6 || cmd.kind == 16;
    if (two && (cmd.n < 2 || !is_heard(conn, end)))
        cmd.kind = 0;
    else if (two)
        cmd.m = 1 + cmd.m % (cmd.n - 1);
    /* A stream of the C library can lose an error. */
    if ((cmd.kind == 9 || cmd.kind == 11) && !is_heard(conn, end))
        cmd.kind = 1;
    snprintf(what, sizeof what, "%s%s %d", send_name(cmd.kind), cmd.flags ? "" : " (signal)", cmd.n);
    if (!ask(proc, &cmd, &reply, what))
        sent(conn, end, reply.moved);
}

void step_recv(int conn, int end)
{
    static const int SIZES[] = {1, 1, 3, 10, 64, 500, 5000, 60000, 60000};
    /* Calls that can be made without waiting on a blocking socket. */
    static const int DONTWAIT[] = {1, 2, 4, 5, 8, 9, 12, 14};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[64];
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_RECV, conn, end, slot);
    cmd.kind = any(RECV_KINDS);
    if (driver->without & NO_BYPASS && (cmd.kind == 6 || (cmd.kind >= 11 && cmd.kind <= 16)))
        cmd.kind = cmd.kind % 5;
    cmd.n = one_in(40) ? 0 : SIZES[any(9)];
    if (cmd.kind == 10 && !one_in(6))
        cmd.kind = 1;
    if ((would_wait(e) || cmd.n == 0) && !e->nonblocking)
        cmd.kind = DONTWAIT[any(driver->without & NO_BYPASS ? 6 : 8)];
    if ((cmd.kind == 5 || cmd.kind == 15) && cmd.n < 2)
        cmd.kind = 1;
    if ((cmd.kind == 7 || cmd.kind == 10) && cmd.n > e->inbox && e->inbox)
        cmd.n = e->inbox;
    cmd.m = any(cmd.n + 1);
    if (cmd.kind == 5 || cmd.kind == 15)
        cmd.m = 1 + cmd.m % (cmd.n - 1);
    cmd.flags = would_wait(e) || cmd.n == 0 || one_in(4) ? MSG_DONTWAIT : 0;
    expects(&cmd, conn, end);
    snprintf(what, sizeof what, "%s%s %d of %d", recv_name(cmd.kind), cmd.flags ? " DONTWAIT" : "", cmd.n, e->inbox);
    if (!ask(proc, &cmd, &reply, what) && cmd.kind != RECV_PEEK && cmd.kind != 17)
        received(conn, end, reply.moved);
}

void step_ready(int conn, int end)
{
    static const short MASKS[] = {POLLIN, POLLOUT, POLLIN | POLLOUT, POLLRDHUP, POLLIN | POLLRDHUP, POLLIN | POLLOUT | POLLRDHUP | POLLPRI, 0,
                                  POLLRDNORM | POLLWRNORM, POLLPRI, POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM | POLLRDHUP | POLLRDBAND};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[160], names[128];
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot), selects = one_in(3);
    struct cmd cmd = call(selects ? OP_SELECT : OP_POLL, conn, end, slot);
    cmd.kind = one_in(3);
    cmd.m = any(4);
    cmd.events = selects ? 1 + (int)any(7) : MASKS[any(10)];
    expects_all(&cmd, proc);
    if (selects)
        snprintf(what, sizeof what, "%s %s%s%s", cmd.kind ? "pselect" : "select", cmd.events & 1 ? "r" : "", cmd.events & 2 ? "w" : "",
                 cmd.events & 4 ? "e" : "");
    else
        snprintf(what, sizeof what, "%s %s", cmd.kind ? "ppoll" : "poll", events_text(cmd.events, names));
    ask(proc, &cmd, &reply, what);
}

void step_ctl(int conn, int end)
{
    static const unsigned EVENTS[] = {EPOLLIN, EPOLLIN | EPOLLOUT, EPOLLOUT, EPOLLIN | EPOLLRDHUP, 0, EPOLLRDHUP, EPOLLIN | EPOLLRDHUP | EPOLLET,
                                      EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT,
                                      EPOLLIN | EPOLLOUT | EPOLLONESHOT, EPOLLIN | EPOLLEXCLUSIVE, EPOLLOUT | EPOLLET, EPOLLPRI};
    static const char *const HOW[] = {"ADD", "MOD", "DEL"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[200], names[128];
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_CTL, conn, end, slot);
    cmd.set = one_in(8) ? 2 : (int)any(2);
    cmd.m = any(2);
    cmd.how = (const int[]){0, 0, 1, 1, 2}[any(5)];
    cmd.events = EVENTS[any(14)];
    if ((cmd.events & EPOLLEXCLUSIVE) && (cmd.how != 0 || cmd.set == 2))
        cmd.events = EPOLLIN;
    if (driver->without & NO_EDGES)
        cmd.events &= ~EPOLLET;
    expects_all(&cmd, proc);
    snprintf(what, sizeof what, "epoll_ctl set %d %s %s %d %s", cmd.set, HOW[cmd.how], cmd.set == 2 ? "set" : "slot", cmd.set == 2 ? cmd.m : slot,
             events_text(cmd.events, names));
    ask(proc, &cmd, &reply, what);
}

void step_epoll(int conn, int end)
{
    static const char *const NAMES[] = {"epoll_wait", "epoll_pwait", "epoll_pwait2"};
    struct reply reply;
    char what[64];
    int slot;
    if (!is_held(&ends[conn][end]))
        return;
    int proc = holder(&ends[conn][end], &slot);
    struct cmd cmd = call(OP_EPOLL, conn, end, slot);
    cmd.set = one_in(5) ? 2 : (int)any(2);
    cmd.kind = any(3);
    cmd.how = 0;
    expects_all(&cmd, proc);
    snprintf(what, sizeof what, "%s set %d", NAMES[cmd.kind], cmd.set);
    ask(proc, &cmd, &reply, what);
}

void step_ask(int conn, int end)
{
    struct end *e = &ends[conn][end];
    struct reply reply;
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_ASK, conn, end, slot);
    cmd.kind = one_in(2) ? 8 + (int)any(2) : (int)any(15);
    /* The queue of unsent bytes is asked for seldom (an acknowledgement can take 40 ms), and only where it can become empty. */
    if (cmd.kind == 13 && (!one_in(20) || ends[conn][!end].closed || e->rst || e->wr_shut))
        cmd.kind = 8;
    if (cmd.kind == 9 && driver->without & NO_BYPASS)
        cmd.kind = 8;
    expects(&cmd, conn, end);
    ask(proc, &cmd, &reply, "asks");
}

void step_set(int conn, int end)
{
    static const char *const NAMES[] = {"O_NONBLOCK", "FIONBIO", "SO_RCVLOWAT", "TCP_INQ", "SO_RCVTIMEO", "SO_SNDTIMEO"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[64];
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_SET, conn, end, slot);
    cmd.kind = one_in(4) ? 2 + (int)any(4) : (int)any(2);
    cmd.n = any(2);
    if (cmd.kind == 2)
        cmd.n = one_in(2) ? 1 : 1 + (int)any(50);
    /* A limit that stays would end waits that are to end by something else. */
    int vain = cmd.kind == 4 && would_wait(e) && e->inbox == 0 && !e->nonblocking;
    if (cmd.kind == 4 || cmd.kind == 5)
        cmd.n = vain ? 5000 : 0;
    expects(&cmd, conn, end);
    snprintf(what, sizeof what, "%s %d", NAMES[cmd.kind], cmd.n);
    if (ask(proc, &cmd, &reply, what))
        return;
    if (cmd.kind < 2)
        e->nonblocking = cmd.n;
    if (cmd.kind == 2)
        e->lowat = cmd.n > 1 ? cmd.n : 0;
    if (vain) {
        struct cmd wait = call(OP_RECV, conn, end, slot);
        wait.kind = any(2), wait.n = 10;
        if (!ask(proc, &wait, &reply, "a receive that waits in vain"))
            cmd.n = 0, ask(proc, &cmd, &reply, "SO_RCVTIMEO 0");
    }
}

void step_dup(int conn, int end)
{
    static const char *const KINDS[] = {"dup", "F_DUPFD", "F_DUPFD_CLOEXEC", "dup2", "dup3", "dup2 over a socket"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[64];
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    if (__builtin_popcount(e->open[proc]) > 1 && one_in(2)) {
        struct cmd cmd = call(OP_CLOSE_SLOT, conn, end, slot);
        snprintf(what, sizeof what, "close slot %d", slot);
        if (!ask(proc, &cmd, &reply, what))
            e->open[proc] &= ~(1 << slot);
        return;
    }
    struct cmd cmd = call(OP_DUP, conn, end, slot);
    cmd.n = any(SLOTS);
    if (cmd.n == slot)
        return;
    cmd.kind = any(6);
    snprintf(what, sizeof what, "%s slot %d to %d", KINDS[cmd.kind], slot, cmd.n);
    if (!ask(proc, &cmd, &reply, what))
        e->open[proc] |= 1 << cmd.n;
}

void step_bad(int conn, int end)
{
    static const char *const HOW[] = {"NULL", "PROT_NONE", "a half bad buffer", "a half bad vector", "a bad vector"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[64];
    int slot, sends = one_in(2);
    if (driver->without & NO_FAULTS)
        return;
    if (sends ? !is_heard(conn, end) : !is_held(e) || e->lowat || e->inbox < 200 || e->pieces > 1)
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(sends ? OP_BAD_SEND : OP_BAD_RECV, conn, end, slot);
    cmd.kind = any(4), cmd.how = any(5), cmd.flags = MSG_NOSIGNAL * sends;
    expects(&cmd, conn, end);
    if (sends)
        cmd.salt = salt_of(conn, end), cmd.pos = e->tx;
    snprintf(what, sizeof what, "%s %s", sends ? "send from" : "recv to", HOW[cmd.how]);
    if (ask(proc, &cmd, &reply, what))
        return;
    if (sends)
        sent(conn, end, reply.moved);
    else
        received(conn, end, reply.moved);
    /* How many bytes were taken may differ, so everything is received now. */
    int to = sends ? !end : end;
    struct end *receiver = &ends[conn][to];
    if (is_held(receiver) && receiver->inbox > 0) {
        proc = holder(receiver, &slot);
        struct cmd all = call(OP_DRAIN, conn, to, slot);
        all.n = receiver->inbox;
        if (!ask(proc, &all, &reply, "drain"))
            received(conn, to, reply.moved);
    }
}

void step_shutdown(int conn, int end)
{
    static const char *const NAMES[] = {"shutdown RD", "shutdown WR", "shutdown RDWR"};
    struct end *e = &ends[conn][end], *peer = &ends[conn][!end];
    struct reply reply;
    int slot;
    if (!is_held(e))
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_SHUTDOWN, conn, end, slot);
    cmd.how = (const int[]){SHUT_WR, SHUT_WR, SHUT_WR, SHUT_RD, SHUT_RDWR}[any(5)];
    expects(&cmd, conn, end);
    if (ask(proc, &cmd, &reply, NAMES[cmd.how]) || e->rst || (e->fin && e->wr_shut))
        return;
    if (cmd.how != SHUT_WR)
        e->rd_shut = 1;
    if (cmd.how != SHUT_RD && !e->wr_shut) {
        e->wr_shut = 1;
        if (!peer->closed)
            peer->fin = 1;
    }
}

void step_close(int conn, int end)
{
    static const char *const NAMES[] = {"close", "close with SO_LINGER 0", "SYS_close"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    int how = one_in(6) ? 1 : one_in(6) ? 2 : 0;
    if (how == 1 && driver->without & NO_RESETS)
        how = 0;
    if (how == 2 && driver->without & NO_BYPASS)
        how = 0;
    if (!is_held(e))
        return;
    calm();
    for (int proc = 0; proc < PROCS && !over; proc++) {
        if (!e->open[proc])
            continue;
        struct cmd cmd = call(OP_CLOSE, conn, end, 0);
        cmd.how = how;
        expects(&cmd, conn, end);
        if (!ask(proc, &cmd, &reply, NAMES[how]))
            e->open[proc] = 0;
    }
    gone(conn, end, how == 1);
}
