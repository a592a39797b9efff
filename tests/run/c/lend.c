/* Traps for a library that sends from the program's own memory. Each scenario is a plain TCP program: it has to behave the same with or without the
 * library. `lend SCENARIO...` runs each of them in a pair of processes, checks every byte, and prints "ok SCENARIO". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BIG (1 << 20)

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s:%d: %s (errno %d)\n", scenario, __LINE__, #what, errno); _exit(1); } } while (0)

static const char *scenario;
static uint64_t tx, rx; /* positions of the stream, each direction of this process */
static uint32_t rng = 1;

static uint32_t rnd(void) { rng ^= rng << 13; rng ^= rng >> 17; rng ^= rng << 5; return rng; }
static uint8_t at(uint64_t i) { return (uint8_t)(i * 31 + (i >> 8) * 17 + (i >> 20) * 7); }
static void fill(void *p, size_t n) { uint8_t *b = p; for (size_t i = 0; i < n; i++) b[i] = at(tx + i); }
static void nap(int ms) { struct timespec t = {ms / 1000, ms % 1000 * 1000000L}; while (nanosleep(&t, &t) < 0 && errno == EINTR) {} }

static void check(const void *p, size_t n) {
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++)
        if (b[i] != at(rx + i)) { fprintf(stderr, "%s: byte %llu is %u and not %u\n", scenario, (unsigned long long)(rx + i), b[i], at(rx + i)); _exit(1); }
    rx += n;
}

/* Sends the buffer's contents, which are part of the stream. */
static void put(int fd, const void *p, size_t n) {
    const char *b = p;
    while (n > 0) {
        ssize_t k = send(fd, b, n, MSG_NOSIGNAL);
        if (k < 0 && errno == EINTR) continue;
        CHECK(k > 0);
        b += k; n -= k; tx += k;
    }
}
static void fill_put(int fd, void *p, size_t n) { fill(p, n); put(fd, p, n); }

/* Receives and checks n bytes. */
static void get(int fd, size_t n) {
    static uint8_t *to;
    if (!to) to = malloc(4 * BIG);
    while (n > 0) {
        ssize_t k = recv(fd, to, n < 4 * BIG ? n : 4 * BIG, 0);
        if (k < 0 && errno == EINTR) continue;
        CHECK(k > 0);
        check(to, k); n -= k;
    }
}
static void get_end(int fd) { char c; CHECK(recv(fd, &c, 1, 0) == 0); }
static void mark(int fd) { uint8_t b = at(tx); CHECK(send(fd, &b, 1, 0) == 1); tx++; }

/* Small messages to and fro, so that the ends meet, and large ones, so that they learn that they can lend. */
static void meet(int fd, int first) {
    char *b = malloc(200000);
    for (int i = 0; i < 12; i++) {
        size_t n = i < 8 ? 100 : 200000;
        if (first) { fill_put(fd, b, n); get(fd, n); } else { get(fd, n); fill_put(fd, b, n); }
    }
    free(b);
}

static void *pages(size_t n) {
    void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

/* The sender and the receiver of each scenario. */
static void stream_tx(int fd) {
    char *b = malloc(2 * BIG);
    for (int i = 0; i < 300; i++) {
        size_t n = 1 + rnd() % (i % 3 ? 300000 : BIG), off = rnd() % 5000;
        fill_put(fd, b + off, n);
        if (i % 2) memset(b, 0xee, 2 * BIG);
    }
    free(b);
}
static void stream_rx(int fd) {
    uint8_t *b = malloc(2 * BIG);
    for (;;) {
        size_t n = 1 + rnd() % (rnd() % 2 ? 5000 : BIG), off = rnd() % 5000;
        int way = rnd() % 5;
        if (way == 0) {
            ssize_t k = recv(fd, b + off, n, MSG_PEEK);
            CHECK(k >= 0);
            if (k > 0) { check(b + off, k); rx -= k; }
            continue;
        }
        if (way == 1) {
            int there = 0;
            CHECK(ioctl(fd, FIONREAD, &there) == 0 && there >= 0);
            if (there > 0) {
                if (there > BIG) there = BIG;
                ssize_t k = recv(fd, b + off, there, MSG_DONTWAIT);
                if (k != there) fprintf(stderr, "received %zd of %d bytes\n", k, there);
                CHECK(k == there);
                check(b + off, there);
            }
            continue;
        }
        if (way == 2) {
            struct iovec v[40];
            size_t done = 0;
            for (int i = 0; i < 40; i++) { size_t m = rnd() % 9000; v[i] = (struct iovec){b + done, m}; done += m; }
            ssize_t k = readv(fd, v, 40);
            CHECK(k >= 0);
            if (k == 0) break;
            check(b, k);
            continue;
        }
        ssize_t k = recv(fd, b + off, n, way == 3 ? MSG_WAITALL : 0);
        CHECK(k >= 0);
        if (k == 0) break;
        check(b + off, k);
        if (rnd() % 20 == 0) nap(3);
    }
    CHECK(rx > 300000);
    free(b);
}

static void again_tx(int fd) { /* the same bytes, untouched: positions are those of a stream that repeats them */
    char *b = pages(65536);
    for (int i = 0; i < 400; i++) { memset(b, 7, i % 50 ? 0 : 65536); size_t n = 65536; char *p = b; while (n) { ssize_t k = send(fd, p, n, 0); CHECK(k > 0); p += k; n -= k; } }
}
static void again_rx(int fd) {
    static char b[65536];
    for (long left = 400L * 65536; left > 0;) { ssize_t k = recv(fd, b, sizeof b, 0); CHECK(k > 0); for (ssize_t i = 0; i < k; i++) CHECK(b[i] == 7); left -= k; }
    get_end(fd);
}

static void whole_rx(int fd) { static char b[65536]; for (int i = 0; i < 200; i++) { CHECK(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b && b[0] == 7 && b[65535] == 7); } get_end(fd); }

static void overwrite_tx(int fd) {
    char *b = pages(BIG);
    for (int i = 0; i < 40; i++) { fill_put(fd, b, BIG); memset(b + rnd() % BIG, 0xee, 1); b[0] ^= 1; }
}
static void late_rx(int fd) { for (;;) { static uint8_t b[BIG]; if (rnd() % 4 == 0) nap(2); ssize_t k = recv(fd, b, 1 + rnd() % BIG, 0); CHECK(k >= 0); if (!k) return; check(b, k); } }

static void both_side(int fd) {
    char *b = malloc(BIG);
    for (int i = 0; i < 5; i++) { fill_put(fd, b, BIG); get(fd, BIG); }
}

static volatile int alarms;
static void on_alarm(int s) { (void)s; alarms++; }
static void alarm_tx(int fd) {
    struct sigaction sa = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &sa, 0);
    timer_t t;
    struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
    CHECK(timer_create(CLOCK_MONOTONIC, &e, &t) == 0);
    struct itimerspec it = {{0, 7000000}, {0, 7000000}};
    timer_settime(t, 0, &it, 0);
    char *b = malloc(BIG);
    for (int i = 0; i < 60; i++) {
        fill(b, BIG);
        size_t off = 0;
        while (off < BIG) {
            ssize_t k = send(fd, b + off, BIG - off, 0);
            if (k < 0) { CHECK(errno == EINTR); continue; }
            off += k; tx += k;
        }
        memset(b, 0xee, BIG);
    }
    CHECK(alarms > 0);
    timer_delete(t);
}
static void slow_rx(int fd) { static uint8_t b[300000]; for (;;) { nap(1); ssize_t k = recv(fd, b, sizeof b, 0); CHECK(k >= 0); if (!k) return; check(b, k); } }

static void killed_tx(int fd) { char *b = pages(4 * BIG); alarm(1); signal(SIGALRM, SIG_DFL); for (;;) { fill(b, 4 * BIG); size_t n = 4 * BIG; char *p = b; while (n) { ssize_t k = send(fd, p, n, 0); CHECK(k > 0); p += k; n -= k; tx += k; } } }
static void killed_rx(int fd) { static uint8_t b[BIG]; for (;;) { ssize_t k = recv(fd, b, sizeof b, 0); if (k <= 0) { CHECK(k == 0 || errno == ECONNRESET); return; } check(b, k); if (rnd() % 8 == 0) nap(5); } }

static void unmap_tx(int fd) {
    for (int i = 0; i < 30; i++) {
        char *b = pages(BIG);
        fill_put(fd, b, BIG);
        if (i % 3 == 0) { munmap(b, BIG); memset(pages(BIG), 0xee, BIG); }
        else if (i % 3 == 1) { char *c = mremap(b, BIG, 2 * BIG, MREMAP_MAYMOVE); CHECK(c != MAP_FAILED); memset(c, 0xee, 2 * BIG); munmap(c, 2 * BIG); }
        else { CHECK(mmap(b, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == b); memset(b, 0xee, BIG); munmap(b, BIG); }
    }
}
static void advise_tx(int fd) {
    char *b = pages(BIG);
    for (int i = 0; i < 30; i++) {
        fill_put(fd, b, BIG);
        if (i % 3 == 0) { CHECK(madvise(b, BIG, MADV_DONTNEED) == 0); CHECK(b[5] == 0 && b[BIG - 1] == 0); }
        else if (i % 3 == 1) { CHECK(mprotect(b, BIG, PROT_NONE) == 0); nap(2); CHECK(mprotect(b, BIG, PROT_READ | PROT_WRITE) == 0); }
        else { CHECK(mprotect(b, BIG / 2, PROT_READ | PROT_WRITE) == 0); memset(b, 0xee, BIG); }
    }
}
static void free_tx(int fd) {
    for (int i = 0; i < 60; i++) {
        size_t n = 40000 + rnd() % (2 * BIG);
        char *b = malloc(n);
        fill_put(fd, b, n);
        if (i % 3 == 0) { b = realloc(b, n * 2); memset(b, 0xee, n * 2); }
        free(b);
        b = malloc(n); memset(b, 0xee, n); free(b);
        b = calloc(1, n); for (size_t k = 0; k < n; k += 4096) CHECK(b[k] == 0); free(b);
    }
}
static void whole_tx(int fd) { char *b[4]; for (int i = 0; i < 4; i++) b[i] = malloc(65536); for (int i = 0; i < 200; i++) { if (i < 4) memset(b[i], 7, 65536); put(fd, b[i % 4], 65536); } for (int i = 0; i < 4; i++) free(b[i]); }
static void trim_tx(int fd) {
    for (int i = 0; i < 20; i++) {
        char *b = malloc(2 * BIG), *top = malloc(100);
        fill_put(fd, b, 2 * BIG);
        free(b);
        malloc_trim(0);
        free(top);
    }
}
static void fork_tx(int fd) {
    char *b = pages(BIG);
    for (int i = 0; i < 10; i++) {
        fill_put(fd, b, BIG);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            int z = open("/dev/zero", O_RDONLY);
            CHECK(read(z, b, BIG) == BIG && b[0] == 0);
            memset(b, 1, BIG);
            _exit(0);
        }
        memset(b, 0xee, BIG);
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
}
static void exec_tx(int fd) { char *b = pages(BIG); fcntl(fd, F_SETFD, FD_CLOEXEC); fill_put(fd, b, BIG); fill_put(fd, b, 300000); execl("/bin/true", "true", (char *)0); _exit(1); }
static void spawn_tx(int fd) { char *b = pages(BIG); for (int i = 0; i < 5; i++) { fill_put(fd, b, BIG); CHECK(system("true") == 0); b[3] = 9; } }
static void exit_tx(int fd) { char *b = pages(BIG); fill_put(fd, b, BIG); exit(0); }
static void qexit_tx(int fd) { char *b = pages(BIG); fill_put(fd, b, BIG); _exit(0); }
static void wait_rx(int fd) { nap(150); late_rx(fd); }
static void close_tx(int fd) { char *b = pages(BIG); for (int i = 0; i < 3; i++) { fill_put(fd, b, BIG); } close(fd); memset(b, 0xee, BIG); nap(20); memset(b, 0xdd, BIG); }
static void slow_close_rx(int fd) { nap(900); late_rx(fd); }
static void shut_tx(int fd) { char *b = pages(BIG); for (int i = 0; i < 3; i++) fill_put(fd, b, BIG); CHECK(shutdown(fd, SHUT_WR) == 0); memset(b, 0xee, BIG); get(fd, 1); get_end(fd); }
static void shut_rx(int fd) { late_rx(fd); mark(fd); }
/* Both directions have ended before the sender closes its socket, with bytes unread by the other end. */
static void ended_tx(int fd) { char *b = pages(3 * BIG); for (int i = 0; i < 3; i++) fill_put(fd, b + i * BIG, BIG); CHECK(shutdown(fd, SHUT_WR) == 0); get_end(fd); close(fd); }
static void ended_rx(int fd) { CHECK(shutdown(fd, SHUT_WR) == 0); wait_rx(fd); }

static sigjmp_buf back;
static volatile int segvs;
static void on_segv(int s, siginfo_t *i, void *c) { (void)s; (void)c; CHECK(i->si_addr == (void *)16); segvs++; siglongjmp(back, 1); }
static void on_old(int s) { (void)s; segvs += 100; }
static void segv_tx(int fd) {
    struct sigaction sa = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO}, old;
    char *b = pages(BIG);
    fill_put(fd, b, BIG);
    b[7] = 1;
    sigemptyset(&sa.sa_mask);
    CHECK(sigaction(SIGSEGV, &sa, &old) == 0 && old.sa_handler == SIG_DFL);
    CHECK(sigaction(SIGSEGV, 0, &old) == 0 && old.sa_sigaction == on_segv);
    for (int i = 0; i < 20; i++) {
        fill_put(fd, b, BIG);
        if (!sigsetjmp(back, 1)) *(volatile char *)16 = 1;
        memset(b, 0xee, BIG);
    }
    CHECK(segvs == 20);
    CHECK(signal(SIGSEGV, on_old) == (void *)on_segv);
    CHECK(signal(SIGSEGV, SIG_DFL) == on_old);
    fill_put(fd, b, BIG);
    memset(b, 0xee, BIG);
    sigset_t all;
    sigfillset(&all);
    CHECK(sigprocmask(SIG_BLOCK, &all, 0) == 0);
    fill_put(fd, b, BIG);
    memset(b, 0xee, BIG);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, 0) == 0);
    fill_put(fd, b, BIG);
    memset(b, 0xee, BIG);
}

static char *shared_buf;
static void *scribble(void *arg) { long k = (long)arg; memset(shared_buf + k * (BIG / 4), 0xee, BIG / 4); return 0; }
static void threads_tx(int fd) {
    shared_buf = pages(BIG);
    for (int i = 0; i < 20; i++) {
        pthread_t t[4];
        fill_put(fd, shared_buf, BIG);
        for (long k = 0; k < 4; k++) CHECK(pthread_create(&t[k], 0, scribble, (void *)k) == 0);
        for (int k = 0; k < 4; k++) pthread_join(t[k], 0);
    }
}
static void calls_tx(int fd) {
    char *b = pages(BIG);
    int z = open("/dev/zero", O_RDONLY), p[2], u[2];
    FILE *f = fopen("/dev/zero", "r");
    setvbuf(f, 0, _IONBF, 0);
    CHECK(pipe(p) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, u) == 0);
    int m = memfd_create("x", 0);
    CHECK(ftruncate(m, BIG) == 0);
    for (int i = 0; i < 16; i++) {
        fill_put(fd, b, BIG);
        struct iovec v[2] = {{b, BIG / 2}, {b + BIG / 2, BIG / 2}};
        struct msghdr msg = {.msg_iov = v, .msg_iovlen = 2};
        CHECK(send(u[0], "abcdefgh", 8, 0) == 8);
        switch (i % 8) {
        case 0: CHECK(read(z, b, BIG) == BIG && b[9] == 0); break;
        case 1: CHECK(fread(b, 1, BIG, f) == BIG && b[BIG - 1] == 0); break;
        case 2: CHECK(pread(m, b, BIG, 0) == BIG && b[9] == 0); break;
        case 3: CHECK(readv(z, v, 2) == BIG && b[BIG - 1] == 0); break;
        case 4: CHECK(recv(u[1], b + 5, 8, 0) == 8 && b[5] == 'a'); break;
        case 5: CHECK(recvmsg(u[1], &msg, 0) >= 8 && b[0] == 'a'); break;
        case 6: CHECK(preadv(m, v, 2, 0) == BIG && b[9] == 0); break;
        case 7: CHECK(write(p[1], "xyz", 3) == 3 && read(p[0], b + 4097, 3) == 3 && b[4097] == 'x'); break;
        }
    }
    /* And from the peer itself, into the bytes under way to it. */
    fill_put(fd, b, BIG);
    size_t n = 0;
    while (n < 300000) { ssize_t k = recv(fd, b + n, 300000 - n, 0); CHECK(k > 0); n += k; }
    check(b, 300000);
}
static void calls_rx(int fd) { char *b = malloc(300000); get(fd, 16 * BIG); fill_put(fd, b, 300000); get(fd, BIG); get_end(fd); }

static const char constant[200000] = {1, 2, 3};
static void kinds_tx(int fd) {
    char stack[200000];
    char *shared = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int m = memfd_create("x", 0);
    CHECK(ftruncate(m, BIG) == 0);
    char *one = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, m, 0), *two = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, m, 0);
    char *file = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE, m, 0);
    for (int i = 0; i < 10; i++) {
        fill_put(fd, stack, sizeof stack); memset(stack, 0xee, sizeof stack);
        fill_put(fd, shared, BIG); memset(shared, 0xee, BIG);
        fill_put(fd, one, BIG); memset(two, 0xee, BIG);
        fill_put(fd, file, BIG); memset(file, 0xee, BIG);
        CHECK(send(fd, constant, sizeof constant, 0) == sizeof constant);
    }
}
static void kinds_rx(int fd) {
    static char b[200000];
    for (int i = 0; i < 10; i++) { get(fd, 200000); get(fd, BIG); get(fd, BIG); get(fd, BIG); CHECK(recv(fd, b, sizeof b, MSG_WAITALL) == sizeof b && b[0] == 1 && b[2] == 3 && b[199999] == 0); }
    get_end(fd);
}

/* Shared memory: it is written to by another name of it, by a name that it gets while it is under way, and by a child. */
static char *shared_pages(size_t n) {
    char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}
static char *alias(char *p, size_t n) {
    char *q = mremap(p, 0, n, MREMAP_MAYMOVE);
    CHECK(q != MAP_FAILED && q != p);
    return q;
}
static void anon_tx(int fd) {
    char *b = shared_pages(BIG);
    for (int i = 0; i < 20; i++) { fill_put(fd, b, BIG); if (i % 2) memset(b, 0xee, BIG); else b[rnd() % BIG] ^= 1; }
    CHECK(munmap(b, BIG) == 0);
}
static void names_tx(int fd) {
    char *b = shared_pages(2 * BIG), *c = alias(b, BIG), *d = alias(b + BIG / 2, BIG);
    int z = open("/dev/zero", O_RDONLY);
    for (int i = 0; i < 24; i++) {
        size_t off = rnd() % (BIG / 4) & -(i & 1);
        fill_put(fd, b + off, BIG - off);
        switch (i % 8) {
        case 0: memset(c, 0xee, BIG); break;
        case 1: memset(d, 0xee, BIG); break;
        case 2: c[BIG - 1] ^= 1; CHECK(b[BIG - 1] == c[BIG - 1]); break;
        case 3: CHECK(read(z, d, BIG) == BIG && b[BIG - 1] == 0); break;
        case 4: fill_put(fd, c, BIG); memset(b, 0xee, BIG); break;
        case 5: munmap(c, BIG); memset(pages(BIG), 0xee, BIG); b[off + 70000] ^= 1; c = alias(b, BIG); break;
        case 6: CHECK(mmap(c, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == c); memset(c, 0xee, BIG); munmap(c, BIG); c = alias(b, BIG); break;
        case 7: c = mremap(c, BIG, 2 * BIG, MREMAP_MAYMOVE); CHECK(c != MAP_FAILED); memset(c, 0xee, BIG); munmap(c + BIG, BIG); break;
        }
    }
    CHECK(shmdt(b + 8) == -1 && errno == EINVAL);
}
static void renamed_tx(int fd) {
    char *b = shared_pages(BIG), *c = alias(b, BIG);
    for (int i = 0; i < 15; i++) {
        if (i % 3 == 1) CHECK(mprotect(c, BIG, PROT_READ) == 0);
        fill_put(fd, b, BIG);
        if (i % 3 == 0) { char *d = alias(b, BIG); memset(d, 0xee, BIG); munmap(d, BIG); }
        else if (i % 3 == 1) { CHECK(c[7] == b[7] && mprotect(c, BIG, PROT_READ | PROT_WRITE) == 0); memset(c, 0xee, BIG); }
        else { char *d[6]; for (int k = 0; k < 6; k++) d[k] = alias(b, BIG); memset(d[5], 0xee, BIG); fill_put(fd, d[2], BIG); memset(d[4], 0xee, BIG); for (int k = 0; k < 6; k++) munmap(d[k], BIG); }
    }
}
static pid_t plain_fork(void) { return fork(); }
static pid_t bare_fork(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }
static void heirs_tx(int fd) {
    char *b = 0;
    for (int i = 0; i < 8; i++) {
        if (i % 4 == 0) b = shared_pages(BIG);
        fill_put(fd, b, BIG);
        pid_t pid = i % 2 ? bare_fork() : plain_fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            if (i % 2 == 0) close(fd);
            memset(b, 0xee, BIG);
            /* Memory sent after the fork is shared with the parent, too. */
            for (int k = 0; k < 30; k++) { nap(1); memset(b, 0xdd, 10); memset(b + BIG / 2, 0xdd, BIG / 2); }
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0 && b[BIG - 1] == (char)0xdd);
        char *own = shared_pages(BIG);
        fill_put(fd, own, BIG);
        memset(own, 0xee, BIG);
        munmap(own, BIG);
    }
}
/* Memory that others have: a child that was there before writes to it as soon as it has been sent, also by its name. */
static void others_tx(int fd) {
    char name[64];
    snprintf(name, sizeof name, "/weft-lend-%d", getpid());
    int s = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600), m = memfd_create("x", 0), id = shmget(IPC_PRIVATE, BIG, 0600);
    CHECK(s >= 0 && ftruncate(s, BIG) == 0 && ftruncate(m, BIG) == 0 && id >= 0);
    int go[2], done[2];
    CHECK(pipe(go) == 0 && pipe(done) == 0);
    char *here[4] = {mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, s, 0), mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, m, 0), shmat(id, 0, 0), shared_pages(BIG)};
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(go[1]); close(fd);
        int again = shm_open(name, O_RDWR, 0);
        char *there[4] = {mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, m, 0), shmat(id, 0, 0), here[3]};
        for (char k; read(go[0], &k, 1) == 1;) { memset(there[(int)k], 0xee, BIG); CHECK(write(done[1], "", 1) == 1); }
        _exit(0);
    }
    close(go[0]);
    for (char k = 0, c; k < 12; k++) {
        char which = k % 4;
        fill_put(fd, here[(int)which], BIG);
        CHECK(write(go[1], &which, 1) == 1 && read(done[0], &c, 1) == 1 && here[(int)which][9] == (char)0xee);
    }
    close(go[1]);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    /* A segment in the place of memory that is under way. */
    char *b = pages(BIG);
    fill_put(fd, b, BIG);
    CHECK(shmat(id, b, SHM_REMAP) == b);
    memset(b, 0xee, BIG);
    CHECK(shmdt(b) == 0);
    shm_unlink(name);
    shmctl(id, IPC_RMID, 0);
}
/* The same kinds, which no other process writes to: two names of each in this process. */
static void twins_tx(int fd) {
    char name[64];
    snprintf(name, sizeof name, "/weft-lend-%d", getpid());
    int s = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600), m = memfd_create("x", 0), id = shmget(IPC_PRIVATE, BIG, 0600);
    CHECK(s >= 0 && ftruncate(s, BIG) == 0 && ftruncate(m, BIG) == 0 && id >= 0);
    shm_unlink(name);
    char *one[3], *two[3];
    for (int k = 0; k < 2; k++) {
        char **to = k ? two : one;
        to[0] = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, s, 0);
        to[1] = mmap(0, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, m, 0);
        to[2] = shmat(id, 0, 0);
        for (int i = 0; i < 3; i++) CHECK(to[i] != MAP_FAILED);
    }
    shmctl(id, IPC_RMID, 0);
    close(s);
    for (int i = 0; i < 18; i++) {
        fill_put(fd, one[i % 3], BIG);
        memset(two[i % 3], 0xee, BIG);
        CHECK(one[i % 3][BIG - 1] == (char)0xee);
    }
    fill_put(fd, one[2], BIG);
    CHECK(shmdt(two[2]) == 0);
    one[2][5] ^= 1;
    fill_put(fd, one[2], BIG);
    CHECK(shmdt(one[2]) == 0);
}

static void nonblock_tx(int fd) {
    char *b = pages(BIG);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 30; i++) {
        fill(b, BIG);
        size_t off = 0;
        while (off < BIG) {
            ssize_t k = send(fd, b + off, BIG - off, 0);
            if (k < 0) { CHECK(errno == EAGAIN); struct pollfd p = {fd, POLLOUT, 0}; CHECK(poll(&p, 1, 10000) == 1); continue; }
            off += k; tx += k;
        }
        memset(b, 0xee, BIG);
    }
}
static void epoll_rx(int fd) {
    static uint8_t b[100000];
    fcntl(fd, F_SETFL, O_NONBLOCK);
    int e = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET}, out;
    CHECK(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev) == 0);
    for (;;) {
        CHECK(epoll_wait(e, &out, 1, 20000) == 1);
        for (;;) {
            ssize_t k = recv(fd, b, 1 + rnd() % sizeof b, 0);
            if (k == 0) return;
            if (k < 0) { CHECK(errno == EAGAIN); break; }
            check(b, k);
        }
    }
}
static void vector_tx(int fd) {
    char *b = malloc(2 * BIG);
    for (int i = 0; i < 40; i++) {
        struct iovec v[30];
        size_t done = 0;
        for (int k = 0; k < 30; k++) { size_t m = rnd() % 3 ? rnd() % 200 : rnd() % 120000; if (done + m > 2 * BIG) m = 0; v[k] = (struct iovec){b + done, m}; done += m; }
        fill(b, done);
        struct msghdr msg = {.msg_iov = v, .msg_iovlen = 30};
        ssize_t n = sendmsg(fd, &msg, 0);
        CHECK(n > 0 || done == 0);
        tx += n;
        if ((size_t)n < done) put(fd, b + n, done - n);
        memset(b, 0xee, done);
    }
}

static pid_t receiver;
static void stopped_tx(int fd) {
    char *b = pages(BIG);
    nap(50);
    kill(receiver, SIGSTOP);
    struct timespec a, z;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 3; i++) { fill_put(fd, b, BIG / 2); memset(b, 0xee, BIG); }
    clock_gettime(CLOCK_MONOTONIC, &z);
    CHECK(z.tv_sec - a.tv_sec < 20);
    kill(receiver, SIGCONT);
    for (int i = 0; i < 3; i++) { fill_put(fd, b, BIG); memset(b, 0xee, BIG); }
}
/* A command runs while the peer reads nothing: the command does not wait for it. */
static void command_tx(int fd) {
    char *b = pages(BIG);
    nap(50);
    kill(receiver, SIGSTOP);
    fill_put(fd, b, BIG / 2);
    struct timespec a, z;
    clock_gettime(CLOCK_MONOTONIC, &a);
    CHECK(system("true") == 0);
    FILE *f = popen("true", "r");
    CHECK(f && pclose(f) == 0);
    clock_gettime(CLOCK_MONOTONIC, &z);
    kill(receiver, SIGCONT);
    CHECK(z.tv_sec - a.tv_sec < 7);
}
/* The process ends while another thread of it sends on and on. */
static void *send_on(void *fd) { char *b = pages(BIG); for (;;) fill_put((int)(long)fd, b, BIG); return 0; }
static void busy_tx(int fd) {
    pthread_t t;
    alarm(30);
    fill_put(fd, pages(BIG), BIG);
    CHECK(pthread_create(&t, 0, send_on, (void *)(long)fd) == 0);
    nap(100);
    exit(0);
}
/* One side drops its rights, if it has any, with bytes under way. */
static void drop_rights(void) { if (getuid() == 0) CHECK(setgid(65534) == 0 && setuid(65534) == 0); }
static void drop_rx(int fd) { nap(20); get(fd, 5000); nap(100); drop_rights(); late_rx(fd); }
static void drop_tx(int fd) { char *b = pages(BIG); fill_put(fd, b, BIG); drop_rights(); for (int i = 0; i < 3; i++) { fill_put(fd, b, BIG); memset(b, 0xee, BIG); } }
static void splice_rx(int fd) {
    int p[2];
    static uint8_t b[BIG];
    CHECK(pipe(p) == 0);
    get(fd, 3);
    for (;;) {
        ssize_t k = splice(fd, 0, p[1], 0, 65536, 0);
        CHECK(k >= 0);
        if (k == 0) return;
        for (ssize_t n = 0; n < k;) { ssize_t m = read(p[0], b, k - n); CHECK(m > 0); check(b, m); n += m; }
    }
}
static void badbuf_rx(int fd) { /* a buffer that is not there: EFAULT, or a short count, and nothing is lost */
    char *b = pages(2 * BIG);
    CHECK(mprotect(b + 65536, 65536, PROT_NONE) == 0);
    get(fd, BIG);
    struct pollfd p = {fd, POLLIN, 0};
    for (int i = 0; i < 3; i++) {
        CHECK(poll(&p, 1, 10000) == 1);
        ssize_t k = recv(fd, b + 65536, 65536, 0);
        CHECK(k == -1 && errno == EFAULT);
    }
    late_rx(fd);
}
static void badbuf_tx(int fd) { /* a buffer that is not there, or a part of it: the same */
    char *b = pages(2 * BIG);
    CHECK(mprotect(b + BIG, BIG, PROT_NONE) == 0);
    for (int i = 0; i < 6; i++) {
        fill_put(fd, b, BIG);
        ssize_t k = send(fd, b + BIG, BIG, 0);
        CHECK(k == -1 && errno == EFAULT);
        fill(b, BIG);
        k = send(fd, b, 2 * BIG, 0);
        CHECK((k == -1 && errno == EFAULT) || (k > 0 && k <= BIG));
        tx += k > 0 ? k : 0;
    }
}
static void faulty_tx(int fd) { char *b = pages(65536); for (int i = 0; i < 120; i++) { fill_put(fd, b, 65536); b[i] ^= 1; } }
static void crawl_rx(int fd) { static uint8_t b[60000]; for (;;) { nap(1); ssize_t k = recv(fd, b, sizeof b, 0); CHECK(k >= 0); if (!k) return; check(b, k); } }
static void plain_tx(int fd) { char *b = pages(BIG); for (int i = 0; i < 20; i++) { fill_put(fd, b, BIG); b[1] = 1; } }

static const struct { const char *name; void (*tx)(int), (*rx)(int); } all[] = {
    {"stream", stream_tx, stream_rx}, {"again", again_tx, again_rx}, {"overwrite", overwrite_tx, late_rx}, {"both", both_side, both_side},
    {"alarm", alarm_tx, slow_rx}, {"killed", killed_tx, killed_rx}, {"unmap", unmap_tx, late_rx}, {"advise", advise_tx, late_rx},
    {"free", free_tx, late_rx}, {"fork", fork_tx, late_rx}, {"exec", exec_tx, wait_rx}, {"spawn", spawn_tx, late_rx}, {"exit", exit_tx, wait_rx},
    {"_exit", qexit_tx, wait_rx}, {"close", close_tx, late_rx}, {"slowclose", close_tx, slow_close_rx}, {"shutdown", shut_tx, shut_rx}, {"ended", ended_tx, ended_rx},
    {"segv", segv_tx, late_rx}, {"threads", threads_tx, late_rx}, {"calls", calls_tx, calls_rx}, {"kinds", kinds_tx, kinds_rx},
    {"nonblock", nonblock_tx, epoll_rx}, {"epoll", plain_tx, epoll_rx}, {"vector", vector_tx, late_rx}, {"stopped", stopped_tx, late_rx},
    {"faulty", faulty_tx, crawl_rx}, {"splice", plain_tx, splice_rx}, {"command", command_tx, late_rx}, {"busy", busy_tx, late_rx}, {"trim", trim_tx, late_rx},
    {"droprx", plain_tx, drop_rx}, {"droptx", drop_tx, wait_rx}, {"badbuf", plain_tx, badbuf_rx}, {"nobuf", badbuf_tx, late_rx},
    {"anon", anon_tx, late_rx}, {"names", names_tx, late_rx}, {"renamed", renamed_tx, late_rx}, {"heirs", heirs_tx, late_rx}, {"others", others_tx, late_rx},
    {"twins", twins_tx, late_rx}, {"whole", whole_tx, whole_rx},
};

static void one(unsigned which) {
    int ports[2];
    scenario = all[which].name;
    tx = rx = 0;
    CHECK(pipe(ports) == 0);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        rng = 77 + which;
        int l = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t len = sizeof a;
        CHECK(bind(l, (void *)&a, len) == 0 && listen(l, 1) == 0 && getsockname(l, (void *)&a, &len) == 0);
        CHECK(write(ports[1], &a.sin_port, 2) == 2);
        int fd = accept(l, 0, 0);
        CHECK(fd >= 0);
        close(l);
        meet(fd, 0);
        all[which].rx(fd);
        close(fd);
        exit(0);
    }
    pid_t sender = fork();
    CHECK(sender >= 0);
    if (sender == 0) {
        rng = 1234 + which;
        receiver = child;
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        CHECK(read(ports[0], &a.sin_port, 2) == 2);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(fd, (void *)&a, sizeof a) == 0);
        meet(fd, 1);
        all[which].tx(fd);
        close(fd);
        exit(0);
    }
    close(ports[0]); close(ports[1]);
    int s1, s2;
    CHECK(waitpid(sender, &s1, 0) == sender);
    CHECK(waitpid(child, &s2, 0) == child);
    int wanted = strcmp(scenario, "killed") ? 0 : SIGALRM;
    if (s1 != wanted || s2 != 0) { printf("FAILED %s: sender %#x, receiver %#x\n", scenario, s1, s2); exit(1); }
    printf("ok %s\n", scenario);
}

int main(int argc, char **argv) {
    unsigned n = sizeof all / sizeof *all;
    for (unsigned i = 0; i < n; i++) {
        int wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted |= !strcmp(argv[k], all[i].name);
        if (wanted) one(i);
    }
    return 0;
}
