/*
 * Step 2: the memory is registered once, instead of by every call. It lies in one region, and the calls that move data take its
 * handle.
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
        if (n == 0) {
            fprintf(stderr, "the peer has closed the connection\n");
            exit(1);
        }
        at += n;
        len -= (size_t)n;
    }
}

static void print_port(int fd) {
    struct sockaddr_storage name;
    socklen_t len = sizeof name;
    if (exs_sync_getsockname(fd, (struct sockaddr *)&name, &len) < 0)
        fail("getsockname");
    in_port_t port = name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                                : ((struct sockaddr_in *)&name)->sin_port;
    printf("port %d\n", ntohs(port));
    fflush(stdout);
}

static int server(const char *address, const char *port) {
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
    return 0;
}

static int client(const char *address, const char *port) {
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
        if (memcmp(m.message, m.answer, SHORT) != 0) {
            fprintf(stderr, "message %u came back changed\n", i);
            return 1;
        }
    }
    uint32_t sum = 0;
    for (unsigned i = 0; i < BLOCKS; i++) {
        fill(m.block, BLOCK, i);
        sum = checksum(sum, m.block, BLOCK);
        send_all(fd, m.block, BLOCK);
    }
    recv_all(fd, &m.sum, sizeof m.sum);
    if (ntohl(m.sum) != sum) {
        fprintf(stderr, "the checksum is %08x and should be %08x\n", ntohl(m.sum), sum);
        return 1;
    }
    if (exs_sync_close(fd) < 0)
        fail("close");
    printf("%d messages and %d blocks, checksum %08x\n", ROUNDS, BLOCKS, sum);
    return 0;
}

int main(int argc, char **argv) {
    mh = exs_mregister(&m, sizeof m, 0);
    if (mh == EXS_MHANDLE_INVALID)
        fail("exs_mregister");
    if (argc >= 3 && strcmp(argv[1], "server") == 0)
        return server(argv[2], argc > 3 ? argv[3] : "0");
    if (argc == 4 && strcmp(argv[1], "client") == 0)
        return client(argv[2], argv[3]);
    fprintf(stderr, "usage: %s server ADDRESS [PORT]\n       %s client ADDRESS PORT\n", argv[0], argv[0]);
    return 2;
}
