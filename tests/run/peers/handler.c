// A program whose signal handler uses the connections that it interrupts: `handler stream|datagram`. Both ends are in one process, with an echo thread.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static int near_end, far_end;
static volatile long handled, again, other;

static void use(int fd) {
    char byte;
    // The calls consume and send nothing: the stream stays as it is.
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN) other++;
    n = send(fd, &byte, 0, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) again++;
    else if (n < 0) other++;
}

static void handler(int signal) {
    int kept = errno;
    (void)signal;
    handled++;
    use(near_end);
    errno = kept;
}

static void check(int good, const char *what) {
    if (!good) { perror(what); exit(1); }
}

static void *echo(void *is_stream) {
    char bytes[4096];
    for (;;) {
        ssize_t n = recv(far_end, bytes, sizeof bytes, 0);
        if (n == 0 && is_stream) return NULL;
        if (n < 0) { perror("echo"); exit(1); }
        if (n > 0 && send(far_end, bytes, n, 0) != n) { perror("echo back"); exit(1); }
    }
}

int main(int argc, char **argv) {
    int is_stream = argc > 1 && !strcmp(argv[1], "stream");
    struct sockaddr_in at = {.sin_family = AF_INET}, to;
    socklen_t len = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (is_stream) {
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        check(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 1) == 0, "listen");
        check(getsockname(listener, (void *)&at, &len) == 0, "getsockname");
        near_end = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(near_end, (void *)&at, sizeof at) == 0, "connect");
        far_end = accept(listener, NULL, NULL);
        check(far_end >= 0, "accept");
    } else {
        near_end = socket(AF_INET, SOCK_DGRAM, 0);
        far_end = socket(AF_INET, SOCK_DGRAM, 0);
        check(bind(near_end, (void *)&at, sizeof at) == 0 && bind(far_end, (void *)&at, sizeof at) == 0, "bind");
        check(getsockname(far_end, (void *)&to, &len) == 0 && connect(near_end, (void *)&to, sizeof to) == 0, "connect");
        check(getsockname(near_end, (void *)&to, &len) == 0 && connect(far_end, (void *)&to, sizeof to) == 0, "connect");
    }
    pthread_t thread;
    sigset_t alarm, before;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, &before);
    check(pthread_create(&thread, NULL, echo, is_stream ? &thread : NULL) == 0, "pthread_create");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 100}, {0, 100}};
    setitimer(ITIMER_REAL, &often, NULL);
    char out[1000], in[1000];
    for (int n = 0; n < 40000; n++) {
        memset(out, n, sizeof out);
        ssize_t sent = send(near_end, out, sizeof out, 0);
        check(sent == sizeof out, "send");
        // A datagram of no bytes, which the handler has sent, comes back as nothing.
        for (ssize_t got = 0; got < (ssize_t)sizeof in;) {
            ssize_t part = recv(near_end, in + got, sizeof in - got, 0);
            check(part >= 0, "recv");
            got += part;
        }
        if (memcmp(in, out, sizeof in)) { printf("round %d differs\n", n); return 1; }
    }
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
    printf("handler: 40000 rounds, %s, %ld other errors\n", handled > 50 ? "interrupted" : "hardly interrupted", other);
    return other != 0;
}
