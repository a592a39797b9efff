/*
 * Measures a poll server: the server waits for its clients in poll(), and one client blocks; 64 B each way. The same source is built
 * twice: with -DPLAIN on plain sockets, otherwise on EXS. Only the names of the calls differ (papers/results/floor.md).
 *
 *     poll_server [ROUNDS] [IDLE]     prints the median round trip in microseconds; IDLE more clients stay silent
 */
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef PLAIN
#define CALL(name) name
#else
#include <sys/exs.h>
#define CALL(name) exs_sync_##name
#endif

enum { SIZE = 64, MOST = 1000 };

static void must(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void serve(int listener) {
    static struct pollfd fds[MOST + 1];
    nfds_t n = 1;
    char message[SIZE];
    fds[0].fd = listener;
    fds[0].events = POLLIN;
    for (;;) {
        must(CALL(poll)(fds, n, -1) > 0, "poll");
        if (fds[0].revents && n <= MOST) {
            fds[n].fd = CALL(accept)(listener, NULL, NULL);
            must(fds[n].fd >= 0, "accept");
            fds[n++].events = POLLIN;
        }
        for (nfds_t i = 1; i < n; i++) {
            if (!fds[i].revents)
                continue;
            ssize_t got = CALL(recv)(fds[i].fd, message, SIZE, 0);
            if (got <= 0)
                return;
            must(CALL(send)(fds[i].fd, message, (size_t)got, 0) == got, "send");
        }
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 20000, idle = argc > 2 ? atoi(argv[2]) : 0, told[2];
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    must(rounds > 0 && idle >= 0 && idle < MOST, "ROUNDS and IDLE");
    must(pipe(told) == 0, "pipe");
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0) {
        int listener = CALL(socket)(AF_INET, SOCK_STREAM, 0);
        must(listener >= 0 && CALL(bind)(listener, (struct sockaddr *)&addr, len) == 0 && CALL(listen)(listener, 64) == 0, "listen");
        must(CALL(getsockname)(listener, (struct sockaddr *)&addr, &len) == 0, "getsockname");
        must(write(told[1], &addr, sizeof addr) == sizeof addr, "write");
        serve(listener);
        _exit(0);
    }
    must(read(told[0], &addr, sizeof addr) == sizeof addr, "read");
    int fd = -1;
    for (int i = 0; i <= idle; i++) {
        fd = CALL(socket)(AF_INET, SOCK_STREAM, 0);
        must(fd >= 0 && CALL(connect)(fd, (struct sockaddr *)&addr, len) == 0, "connect");
    }
    double *took = calloc((size_t)rounds, sizeof *took);
    must(took != NULL, "calloc");
    char message[SIZE] = "";
    for (int i = 0; i < rounds; i++) {
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        must(CALL(send)(fd, message, SIZE, 0) == SIZE, "send");
        for (ssize_t n, got = 0; got < SIZE; got += n)
            must((n = CALL(recv)(fd, message, (size_t)(SIZE - got), 0)) > 0, "recv");
        clock_gettime(CLOCK_MONOTONIC, &to);
        took[i] = (double)(to.tv_sec - from.tv_sec) * 1e6 + (double)(to.tv_nsec - from.tv_nsec) / 1e3;
    }
    qsort(took, (size_t)rounds, sizeof *took, by_size);
    printf("%.2f\n", took[rounds / 2]);
    CALL(close)(fd);
    waitpid(child, NULL, 0);
    return 0;
}
