/*
 * Asynchronous calls, for the steps from the third on: each starts an operation, whose end is an event in the queue.
 */
#include <errno.h>
#include <sys/exs.h>

#include "common.h"

/* Blocks in flight at a time. */
enum { UNDER_WAY = 8 };

static struct memory {
    unsigned char message[SHORT], answer[SHORT], block[UNDER_WAY][BLOCK];
    uint32_t sum;
} m;
static exs_mhandle_t mh;
static exs_qhandle_t queue;

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

/* The data of the oldest receive: complete, unless the peer has gone. */
static const unsigned char *received(size_t len) {
    exs_event_t event = next_event(EXS_EVT_RECV, "exs_recv");
    if (event.exs_evt_union.exs_evt_xfer.exs_evt_length != len)
        closed_by_peer();
    return event.exs_evt_union.exs_evt_xfer.exs_evt_buffer;
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
    say_port(&name);
}

static void begin(void) {
    if (exs_init(EXS_VERSION) < 0)
        fail("exs_init");
    queue = exs_qcreate(2 * UNDER_WAY);
    if (queue == EXS_QHANDLE_INVALID)
        fail("exs_qcreate");
    mh = exs_mregister(&m, sizeof m, 0);
    if (mh == EXS_MHANDLE_INVALID)
        fail("exs_mregister");
}
