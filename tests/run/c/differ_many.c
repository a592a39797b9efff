/* Steps of `differ` in which several processes or threads act. */
#include "differ_plan.h"

/* A process ends. */
void step_exit(int proc)
{
    static const char *const HOW[] = {"exit", "_exit", "is killed"};
    struct cmd cmd = {.op = OP_EXIT, .how = any(3)};
    struct reply reply;
    int third_has = 0;
    for (int c = 0; c < conns; c++)
        for (int e = 0; e < 2; e++)
            third_has |= ends[c][e].open[2];
    if (driver->solo || third_has)
        return;
    calm();
    memset(cmd.expect, -1, sizeof cmd.expect);
    expects_all(&cmd, proc);
    if (cmd.how < 2) {
        post(proc, 0, &cmd);
        end_side(proc, 0);
    } else {
        cmd.op = OP_SETTLE;
        over |= do_now(proc, &cmd, &reply);
        end_side(proc, SIGKILL);
    }
    say("%d: %c %s\n", step, "abc"[proc], HOW[cmd.how]);
    for (int c = 0; c < conns; c++)
        for (int e = 0; e < 2; e++)
            if (ends[c][e].open[proc]) {
                ends[c][e].open[proc] = 0;
                if (cmd.how == 2)
                    ends[c][!e].silent = 1;
                gone(c, e, 0);
            }
}

/* Another end of this process has unread bytes, and a program that is executed would inherit it. */
static int has_unread(int proc)
{
    for (int c = 0; c < conns; c++)
        for (int k = 0; k < 2; k++)
            if (ends[c][k].open[proc] && ends[c][k].inbox)
                return 1;
    return 0;
}

void step_fork(int conn, int end)
{
    static const char *const KINDS[] = {"fork", "_Fork", "SYS_fork", "SYS_clone", "vfork"};
    static const char *const HOW[] = {"_exit", "close", "exec"};
    static const char *const ACTS[] = {"does nothing", "sends", "reads"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[96];
    int slot;
    if (!is_held(e) || e->lowat || driver->without & NO_FORKS)
        return;
    int proc = holder(e, &slot), act = any(3);
    struct cmd cmd = call(OP_FORK, conn, end, slot), child = call(OP_SETTLE, conn, end, slot);
    cmd.kind = any(5), cmd.how = one_in(8) ? 2 : (int)any(2);
    if (cmd.how == 2 && !driver->limits && has_unread(proc))
        cmd.how = 0;
    if (cmd.kind == 4 && cmd.how != 2)
        act = 0;
    if (act == 1 && is_heard(conn, end)) {
        child.op = OP_SEND, child.kind = any(4), child.n = some_size(), child.m = child.n / 2, child.flags = MSG_NOSIGNAL;
        child.salt = salt_of(conn, end), child.pos = e->tx;
        cmd.m = 1, cmd.n = child.n, cmd.salt = child.salt, cmd.pos = child.pos;
    } else if (act == 2 && e->inbox > 0) {
        child.op = OP_RECV, child.kind = any(5), child.n = 1 + any(e->inbox), child.m = child.n / 2;
        cmd.m = 2, cmd.n = child.n;
    } else {
        act = 0;
    }
    expects(&cmd, conn, end);
    child.delay = 0;
    shared->child = child;
    snprintf(what, sizeof what, "%s, child %s %d, %s", KINDS[cmd.kind], ACTS[cmd.m], cmd.n, HOW[cmd.how]);
    if (ask(proc, &cmd, &reply, what))
        return;
    if (act == 1)
        sent(conn, end, reply.moved);
    if (act == 2)
        received(conn, end, reply.moved);
}

/* A program is executed that reads what is sent only after it has begun. */
static void step_late_reader(int conn, int end)
{
    struct end *e = &ends[conn][end];
    struct reply reply;
    if (driver->solo || !e->open[end] || e->open[!end] || e->open[2] || has_unread(end) || e->fin || e->rst || e->rd_shut || e->lowat
        || !is_heard(conn, !end) || ends[conn][!end].open[2])
        return;
    int slot, sender = holder(&ends[conn][!end], &slot), own = 0;
    struct cmd out = call(OP_SEND, conn, !end, slot);
    while (!(e->open[end] >> own & 1))
        own++;
    struct cmd cmd = call(OP_AFTER_EXEC, conn, end, own);
    cmd.m = 2, cmd.n = some_size(), cmd.delay = 0;
    out.kind = any(4), out.n = cmd.n, out.m = 0, out.flags = MSG_NOSIGNAL, out.salt = salt_of(conn, !end), out.pos = ends[conn][!end].tx;
    out.delay = 20000;
    post(end, 0, &cmd);
    if (!ask(sender, &out, &reply, "sends to the program"))
        sent(conn, !end, reply.moved);
    over |= collect(end, 0, &reply, 0);
    say("%d: executed: %s\n", step, reply.text);
    received(conn, end, reply.moved);
}

void step_spawn(int conn, int end)
{
    static const char *const KINDS[] = {"posix_spawn", "system", "popen"};
    static const char *const ACTS[] = {"does nothing", "writes", "reads"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    char what[96];
    int slot;
    if (!one_in(3) || !is_held(e) || e->lowat || driver->without & NO_FORKS)
        return;
    if (one_in(3))
        return step_late_reader(conn, end);
    int proc = holder(e, &slot);
    if (has_unread(proc) && !driver->limits)
        return;
    struct cmd cmd = call(OP_SPAWN, conn, end, slot);
    cmd.kind = any(3);
    if (one_in(2) && is_heard(conn, end))
        cmd.m = 1, cmd.n = some_size(), cmd.salt = salt_of(conn, end), cmd.pos = e->tx;
    else if (driver->limits && e->inbox)
        cmd.m = 2, cmd.n = e->inbox;
    expects(&cmd, conn, end);
    snprintf(what, sizeof what, "%s of a program that %s", KINDS[cmd.kind], ACTS[cmd.m]);
    if (ask(proc, &cmd, &reply, what))
        return;
    if (cmd.m == 1)
        sent(conn, end, reply.moved);
    if (cmd.m == 2)
        received(conn, end, reply.moved);
}

/* Another process gets the end: by SCM_RIGHTS, or as a child that stays. */
void step_hand_over(int conn, int end)
{
    static const char *const KINDS[] = {"fork for c", "_Fork for c", "SYS_fork for c", "SYS_clone for c"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    int slot;
    if (no_third || !is_held(e) || e->open[2] || driver->without & NO_HANDING)
        return;
    no_third = 1;
    int proc = holder(e, &slot);
    if (driver->solo || one_in(2)) {
        struct cmd cmd = call(OP_FORK_SIDE, conn, end, slot);
        cmd.kind = any(4);
        expects_all(&cmd, proc);
        shared->box[2][0].state = 0;
        if (ask(proc, &cmd, &reply, KINDS[cmd.kind]))
            return;
        for (int c = 0; c < conns; c++)
            for (int k = 0; k < 2; k++)
                ends[c][k].open[2] = ends[c][k].open[proc];
    } else {
        start_third();
        struct cmd cmd = call(OP_PASS, conn, end, slot), taking = call(OP_TAKE, conn, end, 0);
        expects(&cmd, conn, end);
        taking.how = 1;
        if (ask(proc, &cmd, &reply, "passes to c") || ask(2, &taking, &reply, "takes"))
            return;
        e->open[2] = 1;
    }
    if (one_in(2)) {
        struct cmd cmd = call(OP_CLOSE, conn, end, 0);
        if (!ask(proc, &cmd, &reply, "closes its own"))
            e->open[proc] = 0;
    }
}

void step_stdin(int conn, int end)
{
    static const char *const KINDS[] = {"fdopen and fread", "dup2 to 0 and read", "dup2 to 0 and fread"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    int slot;
    if (!is_held(e) || e->inbox == 0 || e->lowat || driver->without & NO_HANDING)
        return;
    int proc = holder(e, &slot);
    struct cmd cmd = call(OP_STDIN, conn, end, slot);
    cmd.kind = any(3), cmd.n = e->inbox;
    expects(&cmd, conn, end);
    if (!ask(proc, &cmd, &reply, KINDS[cmd.kind]))
        received(conn, end, reply.moved);
}

static int signals_left;

static void interrupt(int proc)
{
    if (signals_left-- > 0 && shared->pid[proc] > 0)
        syscall(SYS_tgkill, shared->pid[proc], shared->pid[proc], SIGUSR1);
}

static int pause_us(void)
{
    static const int DELAYS[] = {0, 0, 50, 50, 200, 1000, 1000, 20000};
    return DELAYS[any(8)];
}

/* Each side has its own end, and all is quiet on the connection. */
static int is_plain(int conn)
{
    for (int k = 0; k < 2; k++) {
        struct end *e = &ends[conn][k];
        if (!e->open[k] || e->open[!k] || e->open[2] || e->inbox || e->fin || e->rst || e->rd_shut || e->wr_shut || e->lowat)
            return 0;
    }
    return !driver->solo;
}

static int slot_of(int conn, int end)
{
    int slot = 0;
    while (!(ends[conn][end].open[end] >> slot & 1))
        slot++;
    return slot;
}

enum event { BYTES, PEER_SHUTS, PEER_CLOSES, PEER_DIES, OWN_SHUT_RD, OWN_SHUT_RDWR, SIGNAL, SIGNAL_RESTART, PEER_CLOSES_HARD, EVENTS };

/* Does what ends the wait. */
static void cause(int conn, int end, int event, struct cmd *wait, int proc)
{
    struct reply reply;
    int peer = !end;
    struct cmd cmd = call(OP_SEND, conn, peer, slot_of(conn, peer));
    cmd.delay = 0;
    switch (event) {
    case SIGNAL_RESTART:
    case BYTES:
        cmd.kind = any(4), cmd.n = wait->n, cmd.m = cmd.n / 2, cmd.flags = MSG_NOSIGNAL;
        cmd.salt = salt_of(conn, peer), cmd.pos = ends[conn][peer].tx;
        if (!ask(peer, &cmd, &reply, "sends"))
            sent(conn, peer, reply.moved);
        return;
    case PEER_SHUTS:
        cmd.op = OP_SHUTDOWN, cmd.how = SHUT_WR;
        if (!ask(peer, &cmd, &reply, "shutdown WR"))
            ends[conn][peer].wr_shut = ends[conn][end].fin = 1;
        return;
    case PEER_CLOSES:
    case PEER_CLOSES_HARD:
        cmd.op = OP_CLOSE, cmd.how = event == PEER_CLOSES_HARD;
        if (!ask(peer, &cmd, &reply, "close"))
            ends[conn][peer].open[peer] = 0;
        gone(conn, peer, cmd.how);
        return;
    case PEER_DIES:
        end_side(peer, SIGKILL);
        ends[conn][peer].open[peer] = 0, ends[conn][end].silent = 1;
        gone(conn, peer, 0);
        return;
    case OWN_SHUT_RD:
    case OWN_SHUT_RDWR:
        cmd = call(OP_SHUTDOWN, conn, end, slot_of(conn, end));
        cmd.how = event == OWN_SHUT_RD ? SHUT_RD : SHUT_RDWR, cmd.delay = 0;
        shared->operations++;
        post(proc, 1, &cmd);
        over |= collect(proc, 1, &reply, 0);
        say("%d: the other thread's shutdown: %s\n", step, reply.text);
        ends[conn][end].rd_shut = 1;
        if (event == OWN_SHUT_RDWR)
            ends[conn][end].wr_shut = ends[conn][peer].fin = 1;
        return;
    }
}

/* One thread waits; then something happens that ends the wait. */
void step_wait(int conn, int end)
{
    static const char *const EVENT_NAMES[EVENTS] = {"bytes", "the peer's shutdown WR", "the peer's close", "the peer's death", "its own shutdown RD",
                                                    "its own shutdown RDWR", "signals", "signals that restart and bytes", "the peer's close with SO_LINGER 0"};
    static const char *const WAITS[] = {"recv", "read", "recv WAITALL", "recvmsg", "poll", "ppoll", "select", "pselect", "epoll", "epoll ET",
                                        "epoll ONESHOT", "nested epoll"};
    struct end *e = &ends[conn][end];
    struct reply reply;
    if (!is_plain(conn))
        return;
    int proc = end, event = one_in(2) ? BYTES : (int)any(EVENTS);
    struct cmd wait = call(OP_WAIT, conn, end, slot_of(conn, end));
    wait.kind = e->nonblocking ? 4 + (int)any(8) : (int)any(12);
    wait.n = 1 + any(500), wait.delay = 0;
    wait.events = (const int[]){POLLIN, POLLIN | POLLRDHUP, POLLIN | POLLPRI, POLLIN | POLLRDNORM}[any(4)];
    /* A death ends the other connection too, and a signal an end of which other processes have a part. */
    if (event == PEER_DIES && conns > 1)
        event = BYTES;
    /* A wait for readiness is interrupted by every signal, whatever the handler's flags. */
    if (event == SIGNAL_RESTART && wait.kind >= 4)
        event = SIGNAL;
    wait.how = event == SIGNAL && (wait.kind < 4 || one_in(2));
    shared->operations++;
    post(proc, 0, &wait);
    sleep_us(pause_us());
    if (event == SIGNAL_RESTART)
        for (int i = 0; i < 3; i++) {
            signals_left = 1;
            interrupt(proc);
            sleep_us(100);
        }
    if (event != SIGNAL)
        cause(conn, end, event, &wait, proc);
    signals_left = 4000;
    over |= collect(proc, 0, &reply, event == SIGNAL ? interrupt : 0);
    say("%d: %c%d.%d waits by %s for %s: %s\n", step, "ab"[proc], conn, end, WAITS[wait.kind], EVENT_NAMES[event], reply.text);
    if (!over && wait.kind < 4)
        received(conn, end, reply.moved);
}

/* One side sends many bytes in pieces while the other receives them by a rule; or both do, each with two threads. */
void step_stream(int conn, int end)
{
    static const char *const RULES[] = {"blocking", "epoll", "a proxy's rule on edges", "edges until EAGAIN", "ONESHOT", "poll", "select", "large edges"};
    struct reply reply;
    int both = one_in(3), n = one_in(4) ? 300000 : 30000;
    if (!is_plain(conn))
        return;
    struct cmd in[2], out[2];
    for (int k = 0; k < 2; k++) {
        int to = k ? !end : end;
        in[k] = call(OP_STREAM_IN, conn, to, slot_of(conn, to));
        in[k].kind = any(8), in[k].n = n, in[k].delay = 0;
        /* A mode belongs to the open file: where both threads of a side use it, it stays as it is. */
        if (both)
            in[k].kind = ends[conn][to].nonblocking ? 1 + (int)any(7) : 0;
        out[k] = call(OP_STREAM_OUT, conn, !to, slot_of(conn, !to));
        out[k].how = any(2), out[k].n = n, out[k].m = any(1 << 30), out[k].delay = 0;
        out[k].salt = salt_of(conn, !to), out[k].pos = ends[conn][!to].tx;
    }
    for (int k = 0; k <= both; k++) {
        shared->operations += 20;
        post(out[k].end, k, &out[k]);
        post(in[k].end, k, &in[k]);
    }
    for (int k = 0; k <= both; k++) {
        over |= collect(out[k].end, k, &reply, 0);
        say("%d: stream of %d from %d.%d: %s\n", step, n, conn, out[k].end, reply.text);
        sent(conn, out[k].end, reply.moved);
        over |= collect(in[k].end, k, &reply, 0);
        say("%d: stream received by %s: %s\n", step, RULES[in[k].kind], reply.text);
        received(conn, in[k].end, reply.moved);
    }
}

/* A direction is filled; then the other side reads, and room has to be announced. */
void step_fill(int conn, int end)
{
    static const char *const WAITS[] = {"epoll", "epoll ET", "epoll ONESHOT", "poll", "select"};
    struct reply reply;
    if (!is_plain(conn))
        return;
    struct cmd fill = call(OP_FILL, conn, end, slot_of(conn, end));
    fill.n = one_in(2) ? 32768 : 7000, fill.salt = salt_of(conn, end), fill.pos = ends[conn][end].tx;
    if (ask(end, &fill, &reply, "fill"))
        return;
    sent(conn, end, reply.moved);
    struct cmd wait = call(OP_WAIT_OUT, conn, end, fill.slot), drain = call(OP_DRAIN, conn, !end, slot_of(conn, !end));
    wait.kind = any(5), wait.salt = fill.salt, wait.pos = ends[conn][end].tx, wait.delay = 0;
    drain.n = ends[conn][!end].inbox, drain.delay = pause_us();
    shared->operations += 2;
    post(end, 0, &wait);
    post(!end, 0, &drain);
    over |= collect(end, 0, &reply, 0);
    say("%d: waits for room by %s: %s\n", step, WAITS[wait.kind], reply.text);
    sent(conn, end, reply.moved);
    over |= collect(!end, 0, &reply, 0);
    say("%d: drain: %s\n", step, reply.text);
    received(conn, !end, reply.moved);
}
