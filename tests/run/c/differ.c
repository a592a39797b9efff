/* differ: random calls on TCP connections, whose results the kernel's TCP determines whatever the scheduling.
 *
 * `differ --seed N --scripts M` runs the scripts N to N + M - 1. Each prints the line `script N`, and one line for each step: the call, what it
 * returned, the errno, the events, and whether the bytes are those of the stream. The same scripts have to print the same lines on plain TCP and under
 * `weft run`; `--seed N --steps K --verbose` plays the beginning of one script again.
 *
 * A script is a sequence of steps. The process that decides (the *worker*) keeps a model of the connections: which bytes are under way, who has shut
 * down, closed or died. It asks a *side* (one of up to three processes with up to two threads each) for one call at a time, over shared memory and
 * a futex. So the steps are ordered without help of the sockets. Before a call that shows what has arrived, the side waits until everything that
 * the model expects is there. In many scripts the worker has both ends itself and makes the calls itself, which takes less time.
 *
 * `--user N`: of two sides one becomes this user. `--apart FILE ADDRESS ADDRESS`: it goes to the network namespace of this file; the addresses are those of
 * the two sides. With `--solo 0` all scripts have sides.
 *
 * Where the kernel's answer depends on time (how much fits into a full buffer, the count of a partial send), the line says only what does not, and the
 * run checks properties: every byte is a function of its position in the stream, so lost, repeated and moved bytes are seen; a call that readiness has
 * promised is not refused; nothing readable stays unannounced.
 *
 * Left out, because docs/run.md names it as a limit (`--limits` adds what is marked with a star):
 * - bytes unread in the process that executes another program, or starts one that reads them *
 * - sends to a receiver that was killed by a signal
 * - signal handlers that use the interrupted socket, io_uring, calls inside the C library on streams that fdopen did not make
 * - connections between hosts, UDP
 * Not covered either: urgent data, SO_TIMESTAMPING, SO_PEEK_OFF, MSG_ZEROCOPY, kernel TLS, close() by another thread than the one that waits. */
#include "differ.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct shared *shared;
int under_weft, verbose;
_Thread_local int thread_index;
char self[4096];
static int is_solo, scripts_of_sides;
/* The user of the second side; 0: ours. */
static uid_t other_user;
struct apart apart;

/* A system call that no library sees: the driver's own waiting must not change what is tested. */
static long raw(long n, long a, long b, long c, long d)
{
#ifdef __x86_64__
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
#else
    return syscall(n, a, b, c, d, 0, 0);
#endif
}

static void futex_wait(atomic_int *word, int value, long ms)
{
    struct timespec limit = {ms / 1000, ms % 1000 * 1000000};
    raw(SYS_futex, (long)word, FUTEX_WAIT, value, (long)&limit);
}

static void futex_wake(atomic_int *word)
{
    raw(SYS_futex, (long)word, FUTEX_WAKE, 1, 0);
}

void say(const char *format, ...)
{
    va_list list;
    int at = shared->log_len;
    va_start(list, format);
    int n = vsnprintf(shared->log + at, LOG - at, format, list);
    va_end(list);
    if (n > 0 && at + n < LOG)
        shared->log_len = at + n;
    if (verbose)
        fprintf(stderr, "%.*s", n, shared->log + at);
}

static void flush_log(void)
{
    int at = 0, n = shared->log_len;
    while (at < n) {
        long k = raw(SYS_write, 1, (long)shared->log + at, n - at, 0);
        if (k <= 0)
            exit(4);
        at += k;
    }
    shared->log_len = 0;
}

/* The loop of a side's thread. */
void side_loop(int proc, int thread)
{
    struct box *box = &shared->box[proc][thread];
    thread_index = thread;
    for (;;) {
        while (box->state != 1)
            futex_wait(&box->state, box->state == 2 ? 2 : 0, 1000);
        struct cmd cmd = box->cmd;
        memset(&box->reply, 0, sizeof box->reply);
        execute(&cmd, &box->reply);
        box->state = 2;
        futex_wake(&box->state);
    }
}

struct place { int proc, thread; };

static void *second_thread(void *arg)
{
    struct place *place = arg;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &set, 0);
    side_loop(place->proc, place->thread);
}

static void start_side(int proc)
{
    for (int t = 0; t < THREADS; t++)
        shared->box[proc][t].state = 0;
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        exit(5);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(0);
        if (proc == 1 && apart.path) {
            int there = open(apart.path, O_RDONLY | O_CLOEXEC);
            if (raw(SYS_setns, there, CLONE_NEWNET, 0, 0))
                _exit(5);
            close(there);
            apart.is_there = 1;
        }
        if (proc == 1 && other_user && setresuid(other_user, other_user, other_user))
            _exit(5);
        pthread_t thread;
        static struct place place;
        place = (struct place){proc, 1};
        if (pthread_create(&thread, 0, second_thread, &place))
            _exit(5);
        side_loop(proc, 0);
    }
    shared->pid[proc] = pid;
}

void end_side(int proc, int signal)
{
    int pid = shared->pid[proc], status;
    if (pid <= 0)
        return;
    if (signal)
        kill(pid, signal);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    shared->pid[proc] = 0;
}

/* A third process that a side has forked: the side is its parent until it ends. */
void end_third(void)
{
    int pid = shared->pid[2];
    if (waitpid(pid, 0, 0) != pid)
        for (int i = 0; i < 200 && kill(pid, 0) == 0; i++) {
            char name[40], text[256] = "";
            snprintf(name, sizeof name, "/proc/%d/stat", pid);
            FILE *file = fopen(name, "r");
            char *at = file && fgets(text, sizeof text, file) ? strrchr(text, ')') : 0;
            if (file)
                fclose(file);
            if (at && at[2] == 'Z')
                break;
            sleep_us(500);
        }
    shared->pid[2] = 0;
}

int start_third(void)
{
    if (shared->pid[2] == 0)
        start_side(2);
    return 0;
}

int ensure_sides(int solo)
{
    is_solo = solo;
    /* Children of sides that have ended, and sides that have died since. */
    for (int pid; (pid = waitpid(-1, 0, WNOHANG)) > 0;)
        for (int proc = 0; proc < PROCS; proc++)
            if (shared->pid[proc] == pid)
                shared->pid[proc] = 0;
    if (solo)
        return 0;
    if (++scripts_of_sides % 16 == 0)
        for (int proc = 0; proc < PROCS; proc++)
            end_side(proc, SIGKILL);
    for (int proc = 0; proc < 2; proc++)
        if (shared->pid[proc] == 0)
            start_side(proc);
    return 0;
}

void post(int proc, int thread, struct cmd *cmd)
{
    struct box *box = &shared->box[proc][thread];
    box->cmd = *cmd;
    box->state = 1;
    futex_wake(&box->state);
}

int is_done(int proc, int thread)
{
    return shared->box[proc][thread].state == 2;
}

/* Waits for the answer of a side. Returns nonzero if the side died or is stuck: then the script ends. */
int collect(int proc, int thread, struct reply *reply, void (*meanwhile)(int proc))
{
    struct box *box = &shared->box[proc][thread];
    double begun = now();
    int status;
    while (box->state != 2) {
        futex_wait(&box->state, 1, meanwhile ? 1 : 50);
        if (box->state == 2)
            break;
        if (meanwhile)
            meanwhile(proc);
        if (waitpid(shared->pid[proc], &status, WNOHANG) == shared->pid[proc]) {
            shared->pid[proc] = 0;
            memset(reply, 0, sizeof *reply);
            add(reply, "THE PROCESS DIED, status 0x%x", status);
            return 1;
        }
        if (now() - begun > (under_weft ? PATIENCE_MS + 3000 : 40000) / 1e3) {
            memset(reply, 0, sizeof *reply);
            add(reply, "STUCK");
            return 1;
        }
        shared->progress++;
    }
    *reply = box->reply;
    box->state = 0;
    return 0;
}

int do_now(int proc, struct cmd *cmd, struct reply *reply)
{
    shared->operations++;
    shared->progress++;
    if (is_solo && proc < 2) {
        memset(reply, 0, sizeof *reply);
        execute(cmd, reply);
        return 0;
    }
    post(proc, 0, cmd);
    return collect(proc, 0, reply, 0);
}

static void count_sigpipe(int signal)
{
    (void)signal;
    shared->sigpipes++;
}

static void hear_usr1(int signal)
{
    (void)signal;
}

static void handlers(void)
{
    struct sigaction action = {.sa_handler = count_sigpipe, .sa_flags = SA_RESTART};
    sigaction(SIGPIPE, &action, 0);
    action.sa_handler = hear_usr1;
    sigaction(SIGUSR1, &action, 0);
}

static void worker(const struct driver *driver, uint64_t from, uint64_t until, int solos)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    handlers();
    memset(fds, -1, sizeof fds);
    memset(sets, -1, sizeof sets);
    for (uint64_t seed = from; seed < until; seed++) {
        struct driver one = *driver;
        one.solo = solos == 1 || (solos < 0 && seed % 10 != 0);
        shared->script = seed;
        run_script(&one, seed);
        flush_log();
    }
    for (int proc = 0; proc < PROCS; proc++)
        end_side(proc, SIGKILL);
    exit(0);
}

/* Runs the worker; if it dies or is stuck, says so and goes on with the next script. */
static void supervise(const struct driver *driver, uint64_t from, uint64_t until, int solos)
{
    while (from < until) {
        shared->script = from;
        pid_t pid = fork();
        if (pid < 0)
            exit(5);
        if (pid == 0)
            worker(driver, from, until, solos);
        int status = 0, last = -1, same = 0, stuck = 0;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            sleep_us(20000);
            same = shared->progress == last ? same + 1 : 0;
            last = shared->progress;
            if (same * 20 > (under_weft ? PATIENCE_MS + 4000 : 60000) && !stuck) {
                stuck = 1;
                kill(pid, SIGKILL);
            }
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
            return;
        say("%s (status 0x%x)\n", stuck ? "STUCK: the process does not come back" : "THE PROCESS DIED", status);
        flush_log();
        for (int proc = 0; proc < PROCS; proc++)
            shared->pid[proc] = 0;
        from = shared->script + 1;
    }
}

/* Groups of calls that can be left out: a script ends with its first difference, so those that fail often hide the others. */
static int groups(const char *list)
{
    static const char *const NAMES[] = {"bypass", "faults", "edges", "handing", "forks", "resets"};
    int bits = 0;
    for (int i = 0; i < 6; i++)
        if (strstr(list, NAMES[i]))
            bits |= 1 << i;
    return bits;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "--helper"))
        return helper(argv + 2);
    uint64_t seed = 1, scripts = 1;
    int solos = -1;
    struct driver driver = {0};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--seed"))
            seed = strtoull(value, 0, 10), i++;
        else if (!strcmp(argv[i], "--scripts"))
            scripts = strtoull(value, 0, 10), i++;
        else if (!strcmp(argv[i], "--steps"))
            driver.steps = atoi(value), i++;
        else if (!strcmp(argv[i], "--solo"))
            solos = atoi(value), i++;
        else if (!strcmp(argv[i], "--user"))
            other_user = atoi(value), i++;
        else if (!strcmp(argv[i], "--apart") && i + 3 < argc)
            apart = (struct apart){argv[i + 1], {argv[i + 2], argv[i + 3]}, 0}, i += 3;
        else if (!strcmp(argv[i], "--limits"))
            driver.limits = 1;
        else if (!strcmp(argv[i], "--without"))
            driver.without = groups(value), i++;
        else if (!strcmp(argv[i], "--verbose"))
            verbose = 1;
        else
            return fprintf(stderr, "differ: %s?\n", argv[i]), 2;
    }
    const char *preload = getenv("LD_PRELOAD");
    under_weft = preload && strstr(preload, "weft");
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0)
        return 2;
    int memory = memfd_create("differ", 0), pass[2];
    if (memory < 0 || ftruncate(memory, sizeof *shared) || dup2(memory, CONTROL_FD) < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, pass))
        return 2;
    close(memory);
    dup2(pass[0], PASS_FD), dup2(pass[1], PASSED_FD);
    close(pass[0]), close(pass[1]);
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, CONTROL_FD, 0);
    if (shared == MAP_FAILED)
        return 2;
    supervise(&driver, seed, seed + scripts, solos);
    say("differ: %llu operations\n", (unsigned long long)shared->operations);
    flush_log();
    return 0;
}
