/*
 * Step 4: small packets. A short message travels inside its announcement. The receiver reads it where it arrived, without a copy,
 * and then returns the buffer (EXS interface 5.1 and 5.2).
 *
 *     4-small-packets server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     4-small-packets client ADDRESS PORT
 */
#include "events.h"

static int left_in_place;

/* A short message at any address. */
static void start_recv_short(int fd) {
    if (exs_recv(fd, m.answer, SHORT, MSG_WAITALL | EXS_IN_PLACE, queue, NULL, mh) < 0)
        fail("exs_recv");
}

/* The next short message. The caller reads it in place, and must recycle it. */
static exs_event_t short_message(void) {
    exs_event_t event = next_event(EXS_EVT_RECV, "exs_recv");
    if (event.exs_evt_union.exs_evt_xfer.exs_evt_length != SHORT)
        closed_by_peer();
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

/* The longest small packet that a socket accepts must be set before it connects or listens. */
static void take_small_packets(int fd) {
    if (exs_fcntl(fd, EXS_F_SETSMALLPACKET, SHORT) < 0)
        fail("exs_fcntl");
}

static void server(const char *address, const char *port) {
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
        /* Short messages are copied into their packet, so they need no registration. */
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
}

static void client(const char *address, const char *port) {
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
        check_message(i, m.message, event.exs_evt_union.exs_evt_xfer.exs_evt_buffer);
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
    check_sum(m.sum, sum);
    close_and_wait(fd);
    printf("%d messages and %d blocks, checksum %08x, %d left in place\n", ROUNDS, BLOCKS, sum, left_in_place);
}

int main(int argc, char **argv) {
    begin();
    return run(argc, argv, server, client);
}
