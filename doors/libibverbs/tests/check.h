/* Checks of calls, and a device: for programs that try out libibverbs and return the number of failures. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
/* The current step, for the messages. */
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

/* A case of a program, by the name that chooses it on the command line. */
struct named_case {
    const char *name;
    void (*run)(void);
};

/* Runs the cases that are named, or all of them; how many checks failed, as a status of exit: 99 stands for more, and 100 is that of MUST. */
static inline int run_cases(const struct named_case *cases, size_t n, int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < n; i++) {
        int wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted |= !strcmp(argv[k], cases[i].name);
        if (!wanted) continue;
        running = cases[i].name;
        int before = failures;
        cases[i].run();
        printf("%s: %s\n", running, failures == before ? "ok" : "FAILED");
    }
    return failures > 99 ? 99 : failures;
}
