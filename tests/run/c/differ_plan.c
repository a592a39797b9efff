/* The script of `differ`: what comes next, and what TCP makes of it. */
#include "differ_plan.h"

struct end ends[CONNS][2];
int conns, over, step, no_third;
static int is_slow; /* this script's sockets gather small sends */
const struct driver *driver;
static uint64_t random_state;
static uint32_t script_salt;

uint32_t any(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 20) % n;
}

int one_in(uint32_t n) { return any(n) == 0; }

int is_held(const struct end *e) { return e->open[0] | e->open[1] | e->open[2]; }

uint32_t salt_of(int conn, int sender) { return script_salt + conn * 7919 + sender * 104729; }

/* A process that has the end, and a descriptor of it there. */
int holder(const struct end *e, int *slot)
{
    int proc, from = any(PROCS);
    for (int i = 0; i < PROCS; i++) {
        proc = (from + i) % PROCS;
        if (e->open[proc])
            break;
    }
    do
        *slot = any(SLOTS);
    while (!(e->open[proc] >> *slot & 1));
    return proc;
}

static enum state wanted(const struct end *e)
{
    return e->rst || (e->fin && e->wr_shut) ? CLOSED : e->fin ? FINISHED : e->wr_shut ? HALF : ANY;
}

/* A call on one end. It expects nothing yet. */
struct cmd call(int op, int conn, int end, int slot)
{
    static const int DELAYS[] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 50, 50, 1000};
    struct cmd cmd = {.op = op, .conn = conn, .end = end, .slot = slot, .salt = salt_of(conn, !end), .pos = ends[conn][end].rx};
    memset(cmd.expect, -1, sizeof cmd.expect);
    cmd.quiet = one_in(24);
    cmd.delay = DELAYS[any(13)];
    /* Where one process has both ends, nothing happens meanwhile. */
    if (driver->solo || (cmd.delay == 1000 && !one_in(8)))
        cmd.delay = 0;
    return cmd;
}

/* The call waits for what has been sent to this end. */
void expects(struct cmd *cmd, int conn, int end)
{
    cmd->expect[conn][end] = ends[conn][end].inbox;
    cmd->state[conn][end] = wanted(&ends[conn][end]);
}

void expects_all(struct cmd *cmd, int proc)
{
    for (int c = 0; c < conns; c++)
        for (int e = 0; e < 2; e++)
            if (ends[c][e].open[proc])
                expects(cmd, c, e);
}

/* Makes the call and prints it. */
int ask(int proc, struct cmd *cmd, struct reply *reply, const char *what)
{
    over |= do_now(proc, cmd, reply);
    say("%d: %c%d.%d %s: %s\n", step, "abc"[proc], cmd->conn, cmd->end, what, reply->text);
    over |= !strncmp(reply->text, "UNSETTLED", 9);
    return over;
}

/* Without TCP_NODELAY, bytes can still be with the sender. A close that resets would lose them, so they have to be there before. */
void calm(void)
{
    struct reply reply;
    int slot;
    for (int c = 0; c < conns && is_slow; c++)
        for (int e = 0; e < 2 && !over; e++)
            if (is_held(&ends[c][e])) {
                int proc = holder(&ends[c][e], &slot);
                struct cmd cmd = call(OP_SETTLE, c, e, slot);
                expects(&cmd, c, e);
                ask(proc, &cmd, &reply, "settles");
            }
}

/* What a send of so many bytes does. */
void sent(int conn, int end, int64_t n)
{
    struct end *e = &ends[conn][end], *peer = &ends[conn][!end];
    if (n <= 0)
        return;
    e->tx += n;
    if (peer->closed)
        e->rst = 1;
    else if (peer->rd_shut && peer->wr_shut)
        e->rst = peer->rst = 1;
    else if (!e->rst)
        peer->inbox += n, peer->pieces++;
}

void received(int conn, int end, int64_t n)
{
    struct end *e = &ends[conn][end];
    if (n <= 0)
        return;
    e->inbox -= n, e->rx += n;
    if (e->inbox <= 0)
        e->pieces = 0;
}

/* The last descriptor of an end has gone. */
void gone(int conn, int end, int hard)
{
    struct end *e = &ends[conn][end], *peer = &ends[conn][!end];
    if (is_held(e) || e->closed)
        return;
    e->closed = 1;
    if (peer->closed || peer->rst || e->rst || (e->fin && e->wr_shut))
        return;
    if (e->inbox > 0 || hard)
        peer->rst = 1;
    else
        peer->fin = 1;
}

/* Room for a send whose result depends on nothing but its length. */
int may_send(int conn, int end)
{
    struct end *e = &ends[conn][end], *peer = &ends[conn][!end];
    return is_held(e) && !e->silent && peer->inbox < 24000 && peer->pieces < 40;
}

/* The end can still send bytes that arrive. */
int is_heard(int conn, int end)
{
    struct end *e = &ends[conn][end], *peer = &ends[conn][!end];
    return may_send(conn, end) && !e->wr_shut && !e->rst && !peer->closed && !(peer->rd_shut && peer->wr_shut);
}

/* A receive would wait, because nothing is there and nothing has ended. */
int would_wait(const struct end *e)
{
    return e->inbox < (e->lowat ? e->lowat : 1) && !e->fin && !e->rst && !e->rd_shut;
}

int some_size(void)
{
    static const int SIZES[] = {1, 1, 10, 10, 64, 100, 1000, 7000};
    return SIZES[any(8)];
}

/* Traffic before the interesting steps, so that the connection is (or is not yet) on its rings. */
static void warm_up(int conn, int turns)
{
    struct reply reply;
    for (int i = 0; i < turns && !over; i++)
        for (int end = 0; end < 2 && !over; end++) {
            int slot, proc = holder(&ends[conn][end], &slot);
            struct cmd cmd = call(OP_SEND, conn, end, slot);
            cmd.kind = i & 1, cmd.n = 1 + any(64), cmd.flags = MSG_NOSIGNAL, cmd.delay = 0;
            cmd.salt = salt_of(conn, end), cmd.pos = ends[conn][end].tx;
            if (ask(proc, &cmd, &reply, "first send"))
                return;
            sent(conn, end, reply.moved);
            proc = holder(&ends[conn][!end], &slot);
            cmd = call(OP_RECV, conn, !end, slot);
            cmd.kind = i & 1, cmd.n = 4096, cmd.delay = 0, cmd.quiet = 0;
            expects(&cmd, conn, !end);
            if (ask(proc, &cmd, &reply, "first recv"))
                return;
            received(conn, !end, reply.moved);
        }
}

static void connect_all(void)
{
    struct reply reply = {0};
    struct cmd cmd = {.op = OP_LISTEN};
    memset(ends, 0, sizeof ends);
    memset(cmd.expect, -1, sizeof cmd.expect);
    over |= do_now(0, &cmd, &reply);
    int port = (int)reply.moved;
    for (int conn = 0; conn < conns && !over; conn++) {
        int nonblocking = one_in(2);
        cmd = (struct cmd){.op = OP_CONNECT, .conn = conn, .end = 1, .n = port, .kind = nonblocking, .flags = !is_slow};
        memset(cmd.expect, -1, sizeof cmd.expect);
        cmd.how = conn == 0 && !driver->solo;
        for (int e = 1; e >= 0 && !over; e--) {
            cmd.op = e ? OP_CONNECT : OP_ACCEPT, cmd.end = e;
            over |= do_now(e, &cmd, &reply);
            if (*reply.text)
                say("%s\n", reply.text), over = 1;
        }
        for (int e = 0; e < 2; e++)
            ends[conn][e].open[driver->solo ? 0 : e] = 1, ends[conn][e].nonblocking = nonblocking;
    }
}

static void random_step(int left)
{
    int conn = any(conns), end = any(2);
    uint32_t x = any(1000);
    if (x < 270) step_send(conn, end);
    else if (x < 500) step_recv(conn, end);
    else if (x < 620) step_ready(conn, end);
    else if (x < 700) step_ctl(conn, end);
    else if (x < 830) step_epoll(conn, end);
    else if (x < 890) step_ask(conn, end);
    else if (x < 915) step_set(conn, end);
    else if (x < 940) step_dup(conn, end);
    else if (x < 952) step_bad(conn, end);
    else if (x < 962) step_shutdown(conn, end);
    else if (x < 966) step_fork(conn, end);
    else if (x < 968) step_stdin(conn, end);
    else if (x < 970) step_hand_over(conn, end);
    else if (x == 970) step_spawn(conn, end);
    else if (x < 992) step_wait(conn, end);
    else if (x < 996) step_stream(conn, end);
    else if (x == 996) step_fill(conn, end);
    else if (left < 30) step_close(conn, end);
}

/* What is still under way arrives, in order. */
static void finish(void)
{
    struct reply reply;
    int slot;
    for (int c = 0; c < conns && !over; c++)
        for (int k = 0; k < 2 && !over; k++) {
            struct end *e = &ends[c][k];
            if (!is_held(e))
                continue;
            int proc = holder(e, &slot);
            struct cmd cmd = call(OP_DRAIN, c, k, slot);
            cmd.n = e->inbox;
            if (cmd.n && !ask(proc, &cmd, &reply, "drain at the end"))
                received(c, k, reply.moved);
        }
}

static void end_script(void)
{
    struct cmd cmd = {.op = OP_LISTEN};
    struct reply reply;
    memset(cmd.expect, -1, sizeof cmd.expect);
    if (shared->pid[2] > 0) {
        kill(shared->pid[2], SIGKILL);
        end_third();
    }
    if (driver->solo)
        do_now(0, &cmd, &reply);
    for (int proc = 0; proc < 2 && !driver->solo && over; proc++)
        end_side(proc, SIGKILL);
}

void run_script(const struct driver *with, uint64_t seed)
{
    static const int TURNS[] = {0, 1, 2, 3, 4, 6, 8, 10, 12, 12, 12, 12};
    driver = with;
    random_state = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    for (int i = 0; i < 8; i++)
        any(2);
    script_salt = any(1 << 30);
    over = step = no_third = 0;
    conns = one_in(4) ? 2 : 1;
    say("script %llu%s\n", (unsigned long long)seed, driver->solo ? "" : ", two processes");
    ensure_sides(driver->solo);
    is_slow = one_in(40);
    connect_all();
    for (int conn = 0; conn < conns && !over; conn++)
        warm_up(conn, TURNS[any(12)]);
    int steps = 20 + any(100), ends_at = one_in(2) ? 5 + (int)any(40) : -1;
    for (step = 1; step <= steps && !over && (!driver->steps || step <= driver->steps); step++) {
        if (step == steps - ends_at) {
            int conn = any(conns), end = any(2);
            if (!driver->solo && one_in(2))
                step_exit(any(2));
            else
                step_close(conn, end);
        } else {
            random_step(steps - step);
        }
        shared->progress++;
    }
    if (!over)
        finish();
    end_script();
}
