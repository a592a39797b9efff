/*
 * An echo server in the usual form of epoll(7), and its client, for plain sockets. The test builds it as it is, and a second time with `exs_sync_`
 * before the name of every sockets call, and no other change.
 *
 *     epoll_server server [edge]     prints its port; ends when its standard input does
 *     epoll_server client PORT N     sends N blocks of growing length and checks their echo
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_EVENTS 16
#define CHUNK 4096

struct client {
    int fd;
    size_t len, off; /* what is read and not written yet */
    char buffer[CHUNK];
};

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint32_t trigger;

static void watch(int epfd, int op, struct client *client, uint32_t events) {
    struct epoll_event ev = {.events = events | trigger, .data.ptr = client};
    if (epoll_ctl(epfd, op, client->fd, &ev) == -1)
        die("epoll_ctl");
}

static void accept_all(int epfd, int listener) {
    for (;;) {
        struct sockaddr_in addr;
        socklen_t len = sizeof addr;
        int fd = accept4(listener, (struct sockaddr *)&addr, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd == -1) {
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                return;
            die("accept4");
        }
        int on = 1;
        if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == -1)
            die("setsockopt");
        struct client *client = calloc(1, sizeof *client);
        if (client == NULL)
            die("calloc");
        client->fd = fd;
        watch(epfd, EPOLL_CTL_ADD, client, EPOLLIN);
    }
}

static void drop(int epfd, struct client *client) {
    if (epoll_ctl(epfd, EPOLL_CTL_DEL, client->fd, NULL) == -1)
        die("EPOLL_CTL_DEL");
    if (close(client->fd) == -1)
        die("close");
    free(client);
}

/* Reads and writes until one of them would block. */
static void serve(int epfd, struct client *client) {
    for (;;) {
        while (client->off < client->len) {
            ssize_t n = write(client->fd, client->buffer + client->off, client->len - client->off);
            if (n == -1 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                watch(epfd, EPOLL_CTL_MOD, client, EPOLLOUT);
                return;
            }
            if (n == -1) {
                drop(epfd, client);
                return;
            }
            client->off += (size_t)n;
        }
        ssize_t n = read(client->fd, client->buffer, sizeof client->buffer);
        if (n == -1 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            watch(epfd, EPOLL_CTL_MOD, client, EPOLLIN);
            return;
        }
        if (n <= 0) {
            drop(epfd, client);
            return;
        }
        client->len = (size_t)n;
        client->off = 0;
    }
}

static int server(void) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0), epfd = epoll_create1(EPOLL_CLOEXEC);
    if (listener == -1 || epfd == -1)
        die("socket");
    if (setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == -1 || ioctl(listener, FIONBIO, &on) == -1 ||
        bind(listener, (struct sockaddr *)&addr, len) == -1 || listen(listener, SOMAXCONN) == -1 ||
        getsockname(listener, (struct sockaddr *)&addr, &len) == -1)
        die("listen");
    struct epoll_event ev = {.events = EPOLLIN | trigger, .data.ptr = NULL}, events[MAX_EVENTS];
    static struct client input; /* standard input */
    if (epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &ev) == -1)
        die("epoll_ctl");
    ev.data.ptr = &input;
    if (epoll_ctl(epfd, EPOLL_CTL_ADD, 0, &ev) == -1)
        die("epoll_ctl");
    printf("port %d\n", ntohs(addr.sin_port));
    fflush(stdout);
    for (;;) {
        int n = epoll_wait(epfd, events, MAX_EVENTS, -1);
        if (n == -1 && errno != EINTR)
            die("epoll_wait");
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == NULL)
                accept_all(epfd, listener);
            else if (events[i].data.ptr == &input)
                return close(listener) == -1 || close(epfd) == -1;
            else
                serve(epfd, events[i].data.ptr);
        }
    }
}

static int client(int port, int rounds) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd == -1 || connect(fd, (struct sockaddr *)&addr, sizeof addr) == -1)
        die("connect");
    static char out[1 << 16], in[1 << 16];
    for (int i = 0; i < rounds; i++) {
        size_t len = (size_t)(i * 997 % (int)sizeof out) + 1;
        memset(out, i, len);
        struct iovec iov[2] = {{out, len / 2}, {out + len / 2, len - len / 2}};
        if (writev(fd, iov, 2) != (ssize_t)len || recv(fd, in, len, MSG_WAITALL) != (ssize_t)len)
            die("transfer");
        if (memcmp(in, out, len) != 0) {
            fprintf(stderr, "round %d: another answer\n", i);
            return 1;
        }
    }
    char byte;
    if (shutdown(fd, SHUT_WR) == -1 || recv(fd, &byte, 1, 0) != 0 || close(fd) == -1)
        die("end");
    printf("%d answers\n", rounds);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 3 && strcmp(argv[1], "client") == 0)
        return client(atoi(argv[2]), atoi(argv[3]));
    trigger = argc > 2 && strcmp(argv[2], "edge") == 0 ? EPOLLET : 0;
    return server();
}
