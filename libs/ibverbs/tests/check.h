/* Checks of calls, and a device: for programs that try out libibverbs and return the number of failures. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
/* What goes on, for the messages. */
static const char *running = "";

#define CHECK(what)                                                                                                            \
    do {                                                                                                                       \
        if (!(what)) {                                                                                                         \
            fprintf(stderr, "%s:%d: %s: %s (errno %d, %s)\n", __FILE__, __LINE__, running, #what, errno, strerror(errno));     \
            failures++;                                                                                                        \
        }                                                                                                                      \
    } while (0)
#define MUST(what)                                                                                                             \
    do {                                                                                                                       \
        if (!(what)) {                                                                                                         \
            fprintf(stderr, "%s:%d: %s: %s (errno %d, %s)\n", __FILE__, __LINE__, running, #what, errno, strerror(errno));     \
            exit(100);                                                                                                         \
        }                                                                                                                      \
    } while (0)
/* A call that returns NULL, and sets errno. */
#define NO(call, with) CHECK((errno = 0, (call) == NULL) && errno == (with))

static struct ibv_context *open_named(const char *name) {
    struct ibv_context *context = NULL;
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    MUST(list);
    for (int i = 0; i < count; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) context = ibv_open_device(list[i]);
    ibv_free_device_list(list);
    MUST(context);
    return context;
}
