/* What the parts of `differ` share. differ.c says what the program does. */
#ifndef DIFFER_H
#define DIFFER_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum { CONNS = 2, SLOTS = 4, SETS = 3, PROCS = 3, THREADS = 2, TEXT = 640, LOG = 1 << 20 };
/* Descriptors with fixed numbers, above those that the scripts get. */
enum { CONTROL_FD = 180, PASS_FD = 181, PASSED_FD = 182, CLOSED_FD = 190 };
/* The longest wait for something that has to come. A wait that takes longer is a finding. */
enum { PATIENCE_MS = 4000 };

/* The second side is in another network namespace than the first one. */
struct apart {
    const char *path;           /* 0: it is not */
    const char *address[2];
    int is_there;               /* this process is there */
};
extern struct apart apart;

enum op {
    OP_LISTEN, OP_CONNECT, OP_ACCEPT, OP_SEND, OP_RECV, OP_BAD_SEND, OP_BAD_RECV, OP_DRAIN, OP_POLL, OP_SELECT, OP_CTL, OP_EPOLL, OP_ASK,
    OP_SET, OP_DUP, OP_CLOSE_SLOT, OP_CLOSE, OP_SHUTDOWN, OP_FORK, OP_FORK_SIDE, OP_SPAWN, OP_PASS, OP_TAKE, OP_WAIT, OP_SIGNALS,
    OP_STREAM_OUT, OP_STREAM_IN, OP_FILL, OP_WAIT_OUT, OP_BIG_SEND, OP_EXIT, OP_RESET, OP_SETTLE, OP_STDIN, OP_AFTER_EXEC,
};

/* What a connection's end is expected to have got, before a call is made that shows it: nothing, the acknowledgement of its own end (the kernel makes
 * an edge of it), the peer's end, or both. */
enum state { ANY, HALF, FINISHED, CLOSED };

struct cmd {
    int op, conn, end, slot;
    int kind, flags, n, m, events, set, how;
    uint64_t pos;               /* where in the stream the first byte sent or received is */
    uint32_t salt;
    int expect[CONNS][2];       /* bytes that have to be there first, -1: do not ask */
    int state[CONNS][2];
    int quiet;                  /* settle without the library's help */
    int delay;                  /* microseconds before the call */
};

struct reply {
    int64_t moved;
    char text[TEXT];
};

struct box {
    atomic_int state;           /* 0 idle, 1 asked, 2 answered */
    struct cmd cmd;
    struct reply reply;
};

struct shared {
    struct box box[PROCS][THREADS];
    atomic_int pid[PROCS];
    atomic_int progress;
    atomic_ullong script;
    atomic_ullong operations;
    atomic_int sigpipes;
    struct cmd child;           /* what the child of a fork does, and what it says */
    struct reply child_reply;
    char log[LOG];
    atomic_int log_len;
};

extern struct shared *shared;
extern int under_weft;          /* decides only how to wait for the kernel, never what is asked */
extern int verbose;
extern char self[];             /* the program's own file */
extern int fds[CONNS][2][SLOTS];
extern int sets[SETS];
extern _Thread_local int thread_index;

/* differ.c */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void side_loop(int proc, int thread) __attribute__((noreturn));
void forget_sockets(void);

/* differ_calls.c */
void execute(const struct cmd *cmd, struct reply *reply);
void settle(const struct cmd *cmd, struct reply *reply);
void settle_one(const struct cmd *cmd, int conn, int end, struct reply *reply);
void add(struct reply *reply, const char *format, ...) __attribute__((format(printf, 2, 3)));
void add_result(struct reply *reply, const char *what, int64_t result);
void fill_bytes(char *to, int n, uint32_t salt, uint64_t pos);
int wrong_at(const char *got, int n, uint32_t salt, uint64_t pos);
void add_bytes(struct reply *reply, const char *got, int64_t n, const struct cmd *cmd);
int is_exotic_send(int kind);
const char *send_name(int kind);
const char *recv_name(int kind);
int64_t send_as(int fd, const struct cmd *cmd, char *data, int n);
int64_t recv_as(int fd, const struct cmd *cmd, char *to, int n, struct reply *reply);
void sleep_us(long us);
double now(void);
enum { SEND_KINDS = 20, RECV_KINDS = 18 };
enum { RECV_PEEK = 8, RECV_TRUNC = 9 };

/* differ_ready.c */
void do_poll(const struct cmd *cmd, struct reply *reply);
void do_select(const struct cmd *cmd, struct reply *reply);
void do_ctl(const struct cmd *cmd, struct reply *reply);
void do_epoll(const struct cmd *cmd, struct reply *reply);
void do_wait(const struct cmd *cmd, struct reply *reply);
void do_stream_out(const struct cmd *cmd, struct reply *reply);
void do_stream_in(const struct cmd *cmd, struct reply *reply);
void do_fill(const struct cmd *cmd, struct reply *reply);
void do_wait_out(const struct cmd *cmd, struct reply *reply);
const char *events_text(unsigned events, char *to);

/* differ_procs.c */
void do_fork(const struct cmd *cmd, struct reply *reply);
void do_fork_side(const struct cmd *cmd, struct reply *reply);
void do_spawn(const struct cmd *cmd, struct reply *reply);
void do_pass(const struct cmd *cmd, struct reply *reply);
void do_take(const struct cmd *cmd, struct reply *reply);
void do_stdin(const struct cmd *cmd, struct reply *reply);
void do_after_exec(const struct cmd *cmd, struct reply *reply);
int helper(char **words);

/* differ_plan.c */
enum { NO_BYPASS = 1, NO_FAULTS = 2, NO_EDGES = 4, NO_HANDING = 8, NO_FORKS = 16, NO_RESETS = 32 };
struct driver {
    int solo;                   /* both ends in the process that also decides */
    int limits;                 /* also what docs/run.md names as a limit */
    int without;                /* groups of calls that are left out, to look at the others */
    int steps;                  /* stop after so many, 0: never */
};
void run_script(const struct driver *driver, uint64_t seed);

/* differ.c: carrying out commands */
int do_now(int proc, struct cmd *cmd, struct reply *reply);
void post(int proc, int thread, struct cmd *cmd);
int collect(int proc, int thread, struct reply *reply, void (*meanwhile)(int proc));
int is_done(int proc, int thread);
int ensure_sides(int solo);
void end_side(int proc, int signal);
int start_third(void);
void end_third(void);
#endif
