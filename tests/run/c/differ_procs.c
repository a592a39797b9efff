/* The calls of `differ` that make processes, hand descriptors to them, or put a descriptor where another was. */
#include "differ.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { FORK, UNDERSCORE_FORK, SYS_FORK_CALL, SYS_CLONE_CALL, VFORK };

static pid_t fork_as(int kind)
{
    switch (kind) {
    case UNDERSCORE_FORK: return _Fork();
#ifdef SYS_fork
    case SYS_FORK_CALL: return syscall(SYS_fork);
#endif
    case SYS_CLONE_CALL: return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    default: return fork();
    }
}

static void say_ended(struct reply *reply, pid_t pid)
{
    int status = 0;
    if (pid < 0) {
        add_result(reply, "fork", pid);
        return;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (status)
        add(reply, " CHILD ENDED WITH 0x%x", status);
}

/* The words of the helper: what it does, with which descriptor, and where it says so. */
static void words_of(const struct cmd *cmd, char text[5][24], char **words)
{
    static const char *const WHAT[] = {"nothing", "write", "read"};
    snprintf(text[0], 24, "%d", fds[cmd->conn][cmd->end][cmd->slot]);
    snprintf(text[1], 24, "%d", cmd->n);
    snprintf(text[2], 24, "%llu", (unsigned long long)cmd->pos);
    snprintf(text[3], 24, "%u", cmd->salt);
    char *all[] = {self, "--helper", (char *)WHAT[cmd->m], text[0], text[1], text[2], text[3], 0};
    memcpy(words, all, sizeof all);
}

/* A child that makes one call (or none) and ends, while the parent waits for it. `how`: it ends by _exit, after a close, by executing the helper. */
void do_fork(const struct cmd *cmd, struct reply *reply)
{
    char text[5][24], *words[8];
    struct cmd child = shared->child;
    pid_t pid;
    memset(&shared->child_reply, 0, sizeof shared->child_reply);
    words_of(cmd, text, words);
    if (cmd->kind == VFORK) {
        pid = vfork();
        if (pid == 0) {
            if (cmd->how == 2)
                execve(self, words, environ);
            _exit(cmd->how == 2 ? 9 : 0);
        }
    } else {
        pid = fork_as(cmd->kind);
        if (pid == 0) {
            if (cmd->how != 2 && child.op != OP_SETTLE)
                execute(&child, &shared->child_reply);
            if (cmd->how == 1)
                close(fds[cmd->conn][cmd->end][cmd->slot]);
            if (cmd->how == 2)
                execve(self, words, environ);
            _exit(cmd->how == 2 ? 9 : 0);
        }
    }
    say_ended(reply, pid);
    add(reply, " child: %s", shared->child_reply.text);
    reply->moved = shared->child_reply.moved;
}

/* A child that stays, as process 2, with all descriptors. */
void do_fork_side(const struct cmd *cmd, struct reply *reply)
{
    pid_t pid = fork_as(cmd->kind);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        side_loop(2, 0);
    }
    shared->pid[2] = pid > 0 ? pid : 0;
    add(reply, pid > 0 ? "-> 0" : "-> fork failed");
}

/* Another program gets the descriptor, in ways other than fork and exec. */
void do_spawn(const struct cmd *cmd, struct reply *reply)
{
    char text[5][24], *words[8], line[5000];
    pid_t pid;
    int r = 0;
    memset(&shared->child_reply, 0, sizeof shared->child_reply);
    words_of(cmd, text, words);
    snprintf(line, sizeof line, "exec '%s' --helper %s %s %s %s %s", self, words[2], text[0], text[1], text[2], text[3]);
    if (cmd->kind == 0) {
        r = posix_spawn(&pid, self, 0, 0, words, environ);
        if (r == 0)
            say_ended(reply, pid);
    } else if (cmd->kind == 1) {
        r = system(line);
    } else {
        FILE *stream = popen(line, "r");
        r = stream ? pclose(stream) : -1;
    }
    add_result(reply, "->", r);
    add(reply, " child: %s", shared->child_reply.text);
    reply->moved = shared->child_reply.moved;
}

/* The program that is executed: it reads or writes on a descriptor that it has inherited. */
int helper(char **words)
{
    struct cmd cmd = {.slot = 0, .n = atoi(words[2]), .pos = strtoull(words[3], 0, 10), .salt = strtoul(words[4], 0, 10)};
    int fd = atoi(words[1]);
    static char bytes[65536];
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, CONTROL_FD, 0);
    if (shared == MAP_FAILED)
        return 8;
    struct reply *reply = &shared->child_reply;
    memset(reply, 0, sizeof *reply);
    if (!strcmp(words[0], "write")) {
        fill_bytes(bytes, cmd.n, cmd.salt, cmd.pos);
        reply->moved = write(fd, bytes, cmd.n);
        add_result(reply, "helper writes ->", reply->moved);
    } else if (!strcmp(words[0], "read")) {
        struct timeval limit = {2, 0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        reply->moved = recv(fd, bytes, cmd.n, MSG_WAITALL);
        add_result(reply, "helper reads ->", reply->moved);
        add_bytes(reply, bytes, reply->moved, &cmd);
        limit.tv_sec = 0;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    return 0;
}

/* Sends the descriptor to process 2, over a socket that is no part of the test. */
void do_pass(const struct cmd *cmd, struct reply *reply)
{
    char byte = 'x', control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    memset(control, 0, sizeof control);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fds[cmd->conn][cmd->end][cmd->slot], sizeof(int));
    add_result(reply, "->", sendmsg(PASS_FD, &message, 0));
}

void do_take(const struct cmd *cmd, struct reply *reply)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (cmd->how)
        forget_sockets();
    ssize_t r = recvmsg(PASSED_FD, &message, 0);
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    add_result(reply, "->", r);
    if (r == 1 && head)
        memcpy(&fds[cmd->conn][cmd->end][0], CMSG_DATA(head), sizeof(int));
}

/* Reads all that is there through a stream of the C library or through descriptor 0. */
void do_stdin(const struct cmd *cmd, struct reply *reply)
{
    static char bytes[65536];
    int fd = fds[cmd->conn][cmd->end][cmd->slot], saved = -1;
    errno = 0;
    if (cmd->kind == 0) {
        FILE *stream = fdopen(dup(fd), "r");
        reply->moved = fread(bytes, 1, cmd->n, stream);
        fclose(stream);
    } else if (cmd->kind == 1) {
        saved = dup(0);
        dup2(fd, 0);
        reply->moved = read(0, bytes, cmd->n);
    } else {
        saved = dup(0);
        dup2(fd, 0);
        setvbuf(stdin, 0, _IONBF, 0);
        clearerr(stdin);
        reply->moved = fread(bytes, 1, cmd->n, stdin);
    }
    if (saved >= 0) {
        dup2(saved, 0);
        close(saved);
    }
    add_result(reply, "->", reply->moved);
    add_bytes(reply, bytes, reply->moved, cmd);
}

/* A program is executed that reads what is sent only later. */
void do_after_exec(const struct cmd *cmd, struct reply *reply)
{
    char text[5][24], *words[8];
    words_of(cmd, text, words);
    memset(&shared->child_reply, 0, sizeof shared->child_reply);
    pid_t pid = fork();
    if (pid == 0) {
        execve(self, words, environ);
        _exit(9);
    }
    say_ended(reply, pid);
    add(reply, " child: %s", shared->child_reply.text);
    reply->moved = shared->child_reply.moved;
}
