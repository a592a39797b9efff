/* The paper's experiments on a plain TCP connection between two processes (figures 6 to 8): a sender that computes between sends, and writes to its buffer after
 * each window of sends. `overlap SIZE SECONDS COMPUTE_US WINDOW BUFFERS` prints the throughput; WINDOW 0: never writes; SIZE with a `p` behind it: ping-pong,
 * half a round trip; `malloc` behind it all: the buffers are of malloc(3) and not mapped. Behind it the processor time of both processes for each MiB, which other work on the machine changes least. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }
static void whole(int fd, char *b, size_t n, int out) {
    while (n > 0) { ssize_t k = out ? send(fd, b, n, MSG_NOSIGNAL) : recv(fd, b, n, MSG_WAITALL); if (k <= 0) _exit(0); b += k; n -= k; }
}
static double cpu(int who) { struct rusage u; getrusage(who, &u); return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6; }
static char *pages(size_t n) { char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); memset(p, 1, n); return p; }

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    size_t size = strtoul(argv[1], 0, 10);
    int pingpong = strchr(argv[1], 'p') != 0, window = atoi(argv[4]), buffers = atoi(argv[5]), ports[2], one = 1;
    double seconds = atof(argv[2]), compute = atof(argv[3]) / 1e6;
    if (size == 0 || buffers < 1 || pipe(ports) != 0) return 2;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    if (fork() == 0) {
        int l = socket(AF_INET, SOCK_STREAM, 0);
        bind(l, (void *)&a, len); listen(l, 1); getsockname(l, (void *)&a, &len);
        if (write(ports[1], &a.sin_port, 2) != 2) return 1;
        int fd = accept(l, 0, 0);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        char *b = pages(size);
        char small[100];
        for (int i = 0; i < 10; i++) { whole(fd, small, 100, 0); whole(fd, small, 100, 1); }
        for (;;) { whole(fd, b, size, 0); if (pingpong) whole(fd, b, size, 1); }
    }
    if (read(ports[0], &a.sin_port, 2) != 2) return 1;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (void *)&a, sizeof a) != 0) return 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char small[100];
    for (int i = 0; i < 10; i++) { whole(fd, small, 100, 1); whole(fd, small, 100, 0); }
    char *b[64];
    for (int i = 0; i < buffers && i < 64; i++) b[i] = argc > 6 ? memset(malloc(size), 1, size) : pages(size);
    long n = 0;
    double begun = 0, end = 1e18, before = 0;
    for (long i = -20; i < 0 || now() < end; i++) {
        if (i == 0) { begun = now(); end = begun + seconds; n = 0; before = cpu(RUSAGE_SELF); }
        char *at = b[(i + 20) % buffers];
        whole(fd, at, size, 1);
        if (pingpong) whole(fd, at, size, 0);
        if (compute > 0) for (double t = now() + compute; now() < t;) {}
        if (window > 0 && (i + 20) % window == window - 1) memset(b[(i + 21) % buffers], (int)i, size);
        n++;
    }
    double t = now() - begun, own = cpu(RUSAGE_SELF) - before - n * compute, mib = n * (double)size / (1 << 20) * (1 + pingpong);
    close(fd);
    wait(0);
    if (pingpong) printf("%.1f us", t / n / 2 * 1e6); else printf("%.2f Gb/s", n * (double)size * 8 / t / 1e9);
    printf(" (%.0f us/MiB)\n", (own + cpu(RUSAGE_CHILDREN)) / mib * 1e6);
    return 0;
}
