/* What the parts of `differ` that decide share: the model, and the steps. */
#ifndef DIFFER_PLAN_H
#define DIFFER_PLAN_H
#include "differ.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* One end of a connection, as the model sees it. */
struct end {
    int open[PROCS];        /* a bit for each slot that the process has */
    int inbox, pieces;      /* bytes and sends that have come and are unread */
    uint64_t tx, rx;        /* positions in the two streams */
    int nonblocking, wr_shut, rd_shut, fin, rst, closed, lowat;
    int silent;             /* its peer was killed: sends are left out */
};

extern struct end ends[CONNS][2];
extern int conns, over, step, no_third;
extern const struct driver *driver;

uint32_t any(uint32_t n);
int one_in(uint32_t n);
int is_held(const struct end *e);
uint32_t salt_of(int conn, int sender);
int holder(const struct end *e, int *slot);
struct cmd call(int op, int conn, int end, int slot);
void expects(struct cmd *cmd, int conn, int end);
void expects_all(struct cmd *cmd, int proc);
int ask(int proc, struct cmd *cmd, struct reply *reply, const char *what);
void calm(void);
void sent(int conn, int end, int64_t n);
void received(int conn, int end, int64_t n);
void gone(int conn, int end, int hard);
int may_send(int conn, int end);
int is_heard(int conn, int end);
int would_wait(const struct end *e);
int some_size(void);

/* differ_steps.c */
void step_send(int conn, int end);
void step_recv(int conn, int end);
void step_ready(int conn, int end);
void step_ctl(int conn, int end);
void step_epoll(int conn, int end);
void step_ask(int conn, int end);
void step_set(int conn, int end);
void step_dup(int conn, int end);
void step_bad(int conn, int end);
void step_shutdown(int conn, int end);
void step_close(int conn, int end);

/* differ_many.c */
void step_exit(int proc);
void step_fork(int conn, int end);
void step_spawn(int conn, int end);
void step_hand_over(int conn, int end);
void step_stdin(int conn, int end);
void step_wait(int conn, int end);
void step_stream(int conn, int end);
void step_fill(int conn, int end);
#endif
