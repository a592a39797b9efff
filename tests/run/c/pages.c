/* Allocations of all kinds, with or without a library that puts large ones on separate pages. `pages own`: the library is loaded. Prints "ok". */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%d: %s\n", __LINE__, #what); _exit(1); } } while (0)
#define LARGE 32768
#define SLOTS 64

static int own;

/* How an allocation is filled: its slot, and how often it was made. */
struct slot { unsigned char *at; size_t n; unsigned char mark; };

static void fill(struct slot *s) { memset(s->at, s->mark, s->n); }
static void check(const struct slot *s) { for (size_t i = 0; i < s->n; i++) CHECK(s->at[i] == s->mark); }

static void placed(const void *at, size_t n) {
    CHECK(at && malloc_usable_size((void *)at) >= n);
    if (own && n >= LARGE) CHECK((uintptr_t)at % 4096 == 0);
}

/* No two of them have a page in common, where one is large. */
static void alone(const struct slot *all) {
    for (int i = 0; own && i < SLOTS; i++) {
        if (!all[i].at || all[i].n < LARGE) continue;
        uintptr_t from = (uintptr_t)all[i].at / 4096, to = ((uintptr_t)all[i].at + all[i].n - 1) / 4096;
        for (int k = 0; k < SLOTS; k++) {
            if (k == i || !all[k].at) continue;
            uintptr_t a = (uintptr_t)all[k].at / 4096, z = ((uintptr_t)all[k].at + all[k].n - 1) / 4096;
            CHECK(z < from || a > to);
        }
    }
}

static void *work(void *seed) {
    unsigned rng = (unsigned)(uintptr_t)seed;
    struct slot all[SLOTS] = {{0}};
    for (int step = 0; step < 4000; step++) {
        rng ^= rng << 13; rng ^= rng >> 17; rng ^= rng << 5;
        struct slot *s = &all[rng % SLOTS];
        size_t n = 1 + (rng >> 8) % ((rng >> 6) % 3 ? 3000 : 200000);
        unsigned char before = s->mark;
        size_t kept = s->at ? s->n < n ? s->n : n : 0;
        unsigned way = s->at ? (rng >> 28) % 2 : 2 + (rng >> 28) % 6;
        switch (way) {
        case 0: check(s); free(s->at); s->at = 0; continue;
        case 1: check(s); s->at = (rng >> 27) % 2 ? realloc(s->at, n) : reallocarray(s->at, n, 1); break;
        case 2: s->at = malloc(n); break;
        case 3: s->at = calloc(n, 1); for (size_t i = 0; i < n; i++) CHECK(s->at[i] == 0); break;
        case 4: s->at = memalign(64, n); CHECK((uintptr_t)s->at % 64 == 0); break;
        case 5: CHECK(posix_memalign((void **)&s->at, 16384, n) == 0 && (uintptr_t)s->at % 16384 == 0); break;
        case 6: s->at = aligned_alloc(128, n / 128 * 128 + 128); CHECK((uintptr_t)s->at % 128 == 0); break;
        default: s->at = realloc(0, n); break;
        }
        placed(s->at, n);
        if (way == 1) for (size_t i = 0; i < kept; i++) CHECK(s->at[i] == before);
        s->n = n; s->mark = (unsigned char)step;
        fill(s);
        alone(all);
    }
    for (int i = 0; i < SLOTS; i++) if (all[i].at) { check(&all[i]); free(all[i].at); }
    return 0;
}

int main(int argc, char **argv) {
    own = argc > 1 && !strcmp(argv[1], "own");
    work((void *)1);
    pthread_t t[4];
    for (long i = 0; i < 4; i++) CHECK(pthread_create(&t[i], 0, work, (void *)(i + 2)) == 0);
    for (int i = 0; i < 3; i++) {
        char *mine = malloc(100000);
        memset(mine, 7, 100000);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) { CHECK(mine[99999] == 7); free(mine); work((void *)99); _exit(0); }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        free(mine);
    }
    for (int i = 0; i < 4; i++) pthread_join(t[i], 0);
    /* The program frees memory that the C library has allocated itself. */
    char *line = 0, *text = 0;
    size_t size = 0;
    FILE *f = fmemopen("word\n", 5, "r");
    CHECK(getline(&line, &size, f) == 5 && asprintf(&text, "%s%50000d", line, 1) == 50005);
    free(line); free(text); fclose(f);
    /* Impossible allocations. */
    volatile size_t most = SIZE_MAX;
    void *at = (void *)1;
    errno = 0; CHECK(malloc(most) == 0 && errno == ENOMEM);
    errno = 0; CHECK(malloc(most - 4000) == 0 && errno == ENOMEM);
    errno = 0; CHECK(calloc(most / 2, 3) == 0 && errno == ENOMEM);
    errno = 0; CHECK(reallocarray(0, most / 2, 3) == 0 && errno == ENOMEM);
    CHECK(posix_memalign(&at, 4, 100000) == EINVAL && posix_memalign(&at, 48, 100000) == EINVAL && at == (void *)1);
    /* An untouched gigabyte uses no memory. */
    char *sparse = calloc(1 << 30, 1);
    CHECK(sparse && sparse[500 << 20] == 0);
    free(sparse);
    puts("ok");
    return 0;
}
