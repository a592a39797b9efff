/*
 * Step 3: asynchronous. Calls start operations and return; each operation ends with an event in a queue. Several blocks are in flight
 * at a time, so sender, receiver and network work at once. The calls and the wait for their events are in events.h.
 *
 *     3-async server ADDRESS [PORT]     prints the port that it listens on, and serves one client
 *     3-async client ADDRESS PORT
 */
#include "events.h"

static void server(const char *address, const char *port) {
    struct addrinfo *to = resolve(address, port);
    int listener = exs_socket(to->ai_family, SOCK_STREAM, 0);
    if (listener < 0)
        fail("socket");
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
        start_recv(fd, m.message, SHORT);
        start_send(fd, received(SHORT), SHORT);
        sent();
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
    if (exs_connect(fd, to->ai_addr, to->ai_addrlen, 0, queue, NULL) < 0)
        fail("exs_connect");
    next_event(EXS_EVT_CONNECT, "exs_connect");
    freeaddrinfo(to);

    for (unsigned i = 0; i < ROUNDS; i++) {
        fill(m.message, SHORT, i);
        start_send(fd, m.message, SHORT);
        sent();
        start_recv(fd, m.answer, SHORT);
        check_message(i, m.message, received(SHORT));
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
    printf("%d messages and %d blocks, checksum %08x\n", ROUNDS, BLOCKS, sum);
}

int main(int argc, char **argv) {
    begin();
    return run(argc, argv, server, client);
}
