/*
 * Step 0: a program with ordinary sockets. The next steps bring it to extended ones.
 *
 *     0-plain-sockets server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     0-plain-sockets client ADDRESS PORT
 *
 * The client sends short messages that the server returns, then many blocks of which the server returns a checksum.
 */
#include <unistd.h>

#include "common.h"

static unsigned char message[SHORT], answer[SHORT], block[BLOCK];

static void send_all(int fd, const void *data, size_t len) {
    const char *at = data;
    while (len > 0) {
        ssize_t n = send(fd, at, len, MSG_NOSIGNAL);
        if (n < 0)
            fail("send");
        at += n;
        len -= (size_t)n;
    }
}

static void recv_all(int fd, void *data, size_t len) {
    char *at = data;
    while (len > 0) {
        ssize_t n = recv(fd, at, len, MSG_WAITALL);
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
    if (getsockname(fd, (struct sockaddr *)&name, &len) < 0)
        fail("getsockname");
    say_port(&name);
}

static void server(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int listener = socket(to->ai_family, SOCK_STREAM, 0);
    if (listener < 0)
        fail("socket");
    /* Without it the port stays taken for a minute after the last connection. EXS does it itself. */
    int reuse = 1;
    if (setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) < 0)
        fail("setsockopt");
    if (bind(listener, to->ai_addr, to->ai_addrlen) < 0)
        fail("bind");
    if (listen(listener, 1) < 0)
        fail("listen");
    freeaddrinfo(to);
    print_port(listener);
    int fd = accept(listener, NULL, NULL);
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

    if (close(fd) < 0 || close(listener) < 0)
        fail("close");
}

static void client(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int fd = socket(to->ai_family, SOCK_STREAM, 0);
    if (fd < 0)
        fail("socket");
    if (connect(fd, to->ai_addr, to->ai_addrlen) < 0)
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
    if (close(fd) < 0)
        fail("close");
    printf("%d messages and %d blocks, checksum %08x\n", ROUNDS, BLOCKS, sum);
}

int main(int argc, char **argv) {
    return run(argc, argv, server, client);
}
