/*
 * Step 4: small packets. Short messages travel within the announcement that they would otherwise need, and the receiver reads them
 * where they arrived, without a copy, and gives that place back (EXS interface 5.1 and 5.2).
 *
 *     4-small-packets server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     4-small-packets client ADDRESS PORT
 */
#include <errno.h>
#include <sys/exs.h>

#include "common.h"

/* Blocks on their way at a time. */
enum { UNDER_WAY = 8 };

static struct memory {
    unsigned char message[SHORT], answer[SHORT], block[UNDER_WAY][BLOCK];
    uint32_t sum;
} m;
static exs_mhandle_t mh;
static exs_qhandle_t queue;
static int left_in_place;

/* The next event, which must be of this type. */
static exs_event_t next_event(int type, const char *what) {
    exs_event_t event;
    if (exs_qdequeue(queue, &event, 1, NULL) != 1)
        fail("exs_qdequeue");
    if (event.exs_evt_errno != 0) {
        errno = event.exs_evt_errno;
        fail(what);
    }
    if (event.exs_evt_type != type) {
        fprintf(stderr, "an event of type %d instead of %d\n", event.exs_evt_type, type);
        exit(1);
    }
    return event;
}

static void start_send(int fd, const void *data, size_t len) {
    if (exs_send(fd, data, len, 0, queue, NULL, mh) < 0)
        fail("exs_send");
}

static void start_recv(int fd, void *data, size_t len) {
    if (exs_recv(fd, data, len, MSG_WAITALL, queue, NULL, mh) < 0)
        fail("exs_recv");
}

/* Where the data of the oldest receive is. It has all of it, or the peer has gone. */
static const unsigned char *received(size_t len) {
    exs_event_t event = next_event(EXS_EVT_RECV, "exs_recv");
    if (event.exs_evt_union.exs_evt_xfer.exs_evt_length != len) {
        fprintf(stderr, "the peer has closed the connection\n");
        exit(1);
    }
    return event.exs_evt_union.exs_evt_xfer.exs_evt_buffer;
}

/* A short message, wherever it may arrive. */
static void start_recv_short(int fd) {
    if (exs_recv(fd, m.answer, SHORT, MSG_WAITALL | EXS_IN_PLACE, queue, NULL, mh) < 0)
        fail("exs_recv");
}

/* The next short message, to be read where it is, and then to be given back. */
static exs_event_t short_message(void) {
    exs_event_t event = next_event(EXS_EVT_RECV, "exs_recv");
    if (event.exs_evt_union.exs_evt_xfer.exs_evt_length != SHORT) {
        fprintf(stderr, "the peer has closed the connection\n");
        exit(1);
    }
    return event;
}

static void give_back(int fd, const exs_event_t *event) {
    if (!(event->exs_evt_flags & EXS_EVF_IN_PLACE)) {
        fprintf(stderr, "a short message was copied\n");
        exit(1);
    }
    left_in_place++;
    if (exs_recycle_recv_buffer(fd, event->exs_evt_union.exs_evt_xfer.exs_evt_buffer) < 0)
        fail("exs_recycle_recv_buffer");
}

/* Before it connects or listens, a socket says how long a message it takes as a small packet. */
static void take_small_packets(int fd) {
    if (exs_fcntl(fd, EXS_F_SETSMALLPACKET, SHORT) < 0)
        fail("exs_fcntl");
}

static void sent(void) {
    next_event(EXS_EVT_SEND, "exs_send");
}

static void close_and_wait(int fd) {
    if (exs_close(fd, 0, queue, NULL) < 0)
        fail("exs_close");
    next_event(EXS_EVT_CLOSE, "exs_close");
}

static void print_port(int fd) {
    struct sockaddr_storage name;
    socklen_t len = sizeof name;
    if (exs_getsockname(fd, (struct sockaddr *)&name, &len) < 0)
        fail("getsockname");
    in_port_t port = name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                                : ((struct sockaddr_in *)&name)->sin_port;
    printf("port %d\n", ntohs(port));
    fflush(stdout);
}

static int server(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int listener = exs_socket(to->ai_family, SOCK_STREAM, 0);
    if (listener < 0)
        fail("socket");
    take_small_packets(listener);
    if (exs_bind(listener, to->ai_addr, to->ai_addrlen) < 0)
        fail("bind");
    if (exs_listen(listener, 1) < 0)
        fail("listen");
    freeaddrinfo(to);
    print_port(listener);
    if (exs_accept(listener, NULL, 0, queue, NULL) < 0)
        fail("exs_accept");
    int fd = next_event(EXS_EVT_ACCEPT, "exs_accept").exs_evt_union.exs_evt_accept.exs_evt_new_socket;

    for (int i = 0; i < ROUNDS; i++) {
        start_recv_short(fd);
        exs_event_t event = short_message();
        /* Short messages are copied into their packet anyway, so they need no registration. */
        if (exs_send(fd, event.exs_evt_union.exs_evt_xfer.exs_evt_buffer, SHORT, 0, queue, NULL,
                     EXS_MHANDLE_UNREGISTERED) < 0)
            fail("exs_send");
        sent();
        give_back(fd, &event);
    }
    uint32_t sum = 0;
    int started = 0;
    for (; started < UNDER_WAY; started++)
        start_recv(fd, m.block[started], BLOCK);
    for (int done = 0; done < BLOCKS; done++) {
        const unsigned char *block = received(BLOCK);
        sum = checksum(sum, block, BLOCK);
        if (started < BLOCKS)
            start_recv(fd, m.block[started++ % UNDER_WAY], BLOCK);
    }
    m.sum = htonl(sum);
    start_send(fd, &m.sum, sizeof m.sum);
    sent();

    close_and_wait(fd);
    close_and_wait(listener);
    return 0;
}

static int client(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int fd = exs_socket(to->ai_family, SOCK_STREAM, 0);
    if (fd < 0)
        fail("socket");
    take_small_packets(fd);
    if (exs_connect(fd, to->ai_addr, to->ai_addrlen, 0, queue, NULL) < 0)
        fail("exs_connect");
    next_event(EXS_EVT_CONNECT, "exs_connect");
    freeaddrinfo(to);

    for (unsigned i = 0; i < ROUNDS; i++) {
        fill(m.message, SHORT, i);
        start_send(fd, m.message, SHORT);
        sent();
        start_recv_short(fd);
        exs_event_t event = short_message();
        if (memcmp(m.message, event.exs_evt_union.exs_evt_xfer.exs_evt_buffer, SHORT) != 0) {
            fprintf(stderr, "message %u came back changed\n", i);
            return 1;
        }
        give_back(fd, &event);
    }
    uint32_t sum = 0;
    for (unsigned i = 0; i < BLOCKS; i++) {
        unsigned char *block = m.block[i % UNDER_WAY];
        if (i >= UNDER_WAY)
            sent(); /* the oldest: its block is free again */
        fill(block, BLOCK, i);
        sum = checksum(sum, block, BLOCK);
        start_send(fd, block, BLOCK);
    }
    for (int i = 0; i < UNDER_WAY; i++)
        sent();
    start_recv(fd, &m.sum, sizeof m.sum);
    received(sizeof m.sum);
    if (ntohl(m.sum) != sum) {
        fprintf(stderr, "the checksum is %08x and should be %08x\n", ntohl(m.sum), sum);
        return 1;
    }
    close_and_wait(fd);
    printf("%d messages and %d blocks, checksum %08x, %d left in place\n", ROUNDS, BLOCKS, sum, left_in_place);
    return 0;
}

int main(int argc, char **argv) {
    if (exs_init(EXS_VERSION) < 0)
        fail("exs_init");
    queue = exs_qcreate(2 * UNDER_WAY);
    if (queue == EXS_QHANDLE_INVALID)
        fail("exs_qcreate");
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
