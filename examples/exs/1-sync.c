/*
 * Step 1: the same program over RDMA. Every sockets call has the prefix "exs_sync_"; nothing else differs from step 0
 * (EXS interface 5.3). Without close(2), unistd.h is not needed either.
 *
 *     1-sync server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     1-sync client ADDRESS PORT
 *
 * Its peer may be any of the later steps.
 */
#include <sys/exs.h>

#include "common.h"

static unsigned char message[SHORT], answer[SHORT], block[BLOCK];

static void send_all(int fd, const void *data, size_t len) {
    const char *at = data;
    while (len > 0) {
        ssize_t n = exs_sync_send(fd, at, len, MSG_NOSIGNAL);
        if (n < 0)
            fail("send");
        at += n;
        len -= (size_t)n;
    }
}

static void recv_all(int fd, void *data, size_t len) {
    char *at = data;
    while (len > 0) {
        ssize_t n = exs_sync_recv(fd, at, len, MSG_WAITALL);
        if (n < 0)
            fail("recv");
        if (n == 0)
            closed_by_peer();
        at += n;
        len -= (size_t)n;
    }
}

static void print_port(int fd) {
    struct sockaddr_storage name;
    socklen_t len = sizeof name;
    if (exs_sync_getsockname(fd, (struct sockaddr *)&name, &len) < 0)
        fail("getsockname");
    say_port(&name);
}

static void server(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int listener = exs_sync_socket(to->ai_family, SOCK_STREAM, 0);
    if (listener < 0)
        fail("socket");
    if (exs_sync_bind(listener, to->ai_addr, to->ai_addrlen) < 0)
        fail("bind");
    if (exs_sync_listen(listener, 1) < 0)
        fail("listen");
    freeaddrinfo(to);
    print_port(listener);
    int fd = exs_sync_accept(listener, NULL, NULL);
    if (fd < 0)
        fail("accept");

    for (int i = 0; i < ROUNDS; i++) {
        recv_all(fd, message, SHORT);
        send_all(fd, message, SHORT);
    }
    uint32_t sum = 0;
    for (int i = 0; i < BLOCKS; i++) {
        recv_all(fd, block, BLOCK);
        sum = checksum(sum, block, BLOCK);
    }
    sum = htonl(sum);
    send_all(fd, &sum, sizeof sum);

    if (exs_sync_close(fd) < 0 || exs_sync_close(listener) < 0)
        fail("close");
}

static void client(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int fd = exs_sync_socket(to->ai_family, SOCK_STREAM, 0);
    if (fd < 0)
        fail("socket");
    if (exs_sync_connect(fd, to->ai_addr, to->ai_addrlen) < 0)
        fail("connect");
    freeaddrinfo(to);

    for (unsigned i = 0; i < ROUNDS; i++) {
        fill(message, SHORT, i);
        send_all(fd, message, SHORT);
        recv_all(fd, answer, SHORT);
        check_message(i, message, answer);
    }
    uint32_t sum = 0, theirs;
    for (unsigned i = 0; i < BLOCKS; i++) {
        fill(block, BLOCK, i);
        sum = checksum(sum, block, BLOCK);
        send_all(fd, block, BLOCK);
    }
    recv_all(fd, &theirs, sizeof theirs);
    check_sum(theirs, sum);
    if (exs_sync_close(fd) < 0)
        fail("close");
    printf("%d messages and %d blocks, checksum %08x\n", ROUNDS, BLOCKS, sum);
}

int main(int argc, char **argv) {
    return run(argc, argv, server, client);
}
