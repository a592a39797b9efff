/*
 * Step 2: the memory is registered once, instead of by every call. It is in one region, and the calls that move data take the handle
 * of that region.
 *
 *     2-registered server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     2-registered client ADDRESS PORT
 */
#include <sys/exs.h>

#include "common.h"

static struct memory {
    unsigned char message[SHORT], answer[SHORT], block[BLOCK];
    uint32_t sum;
} m;
static exs_mhandle_t mh;

static void send_all(int fd, const void *data, size_t len) {
    const char *at = data;
    while (len > 0) {
        ssize_t n = exs_sync_send_mh(fd, at, len, MSG_NOSIGNAL, mh);
        if (n < 0)
            fail("send");
        at += n;
        len -= (size_t)n;
    }
}

static void recv_all(int fd, void *data, size_t len) {
    char *at = data;
    while (len > 0) {
        ssize_t n = exs_sync_recv_mh(fd, at, len, MSG_WAITALL, mh);
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
        recv_all(fd, m.message, SHORT);
        send_all(fd, m.message, SHORT);
    }
    uint32_t sum = 0;
    for (int i = 0; i < BLOCKS; i++) {
        recv_all(fd, m.block, BLOCK);
        sum = checksum(sum, m.block, BLOCK);
    }
    m.sum = htonl(sum);
    send_all(fd, &m.sum, sizeof m.sum);

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
        fill(m.message, SHORT, i);
        send_all(fd, m.message, SHORT);
        recv_all(fd, m.answer, SHORT);
        check_message(i, m.message, m.answer);
    }
    uint32_t sum = 0;
    for (unsigned i = 0; i < BLOCKS; i++) {
        fill(m.block, BLOCK, i);
        sum = checksum(sum, m.block, BLOCK);
        send_all(fd, m.block, BLOCK);
    }
    recv_all(fd, &m.sum, sizeof m.sum);
    check_sum(m.sum, sum);
    if (exs_sync_close(fd) < 0)
        fail("close");
    printf("%d messages and %d blocks, checksum %08x\n", ROUNDS, BLOCKS, sum);
}

int main(int argc, char **argv) {
    mh = exs_mregister(&m, sizeof m, 0);
    if (mh == EXS_MHANDLE_INVALID)
        fail("exs_mregister");
    return run(argc, argv, server, client);
}
