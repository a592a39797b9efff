/* IS, integer sort (report, section 2.6): ranks of keys, ten times, with all-to-all exchanges of all keys. */
#include "kernels.h"
#include <stdlib.h>
#include <string.h>

enum { TURNS = 10, BUCKETS = 1024, PROBES = 5 };

static const struct {
    int log_keys, log_most;
    long index[PROBES], rank[PROBES];
    /* Each turn changes two keys. In turn i the first `rising` ranks are the published ones plus i + up, the others minus i + down. */
    int rising, up, down;
} PROBLEMS[] = {
    {16, 11, {48427, 17148, 23627, 62548, 4431}, {0, 18, 346, 64917, 65463}, 3, 0, 0},
    {20, 16, {357773, 934767, 875723, 898999, 404505}, {1249, 11698, 1039987, 1043896, 1048018}, 2, -2, 0},
    {23, 19, {2112377, 662041, 5336171, 3642833, 4250760}, {104, 17523, 123928, 8288932, 8388264}, 3, -1, -1},
    {25, 21, {812306, 5102857, 26860214, 41869, 18232239}, {10244, 59149, 99, 33422937, 33135281}, 3, 0, 0},
};

static int keys, most, shift;
static int *key, *sorted, *got, *below;
static int counts[BUCKETS], totals[BUCKETS];
static int *sends, *receives, *from, *to, *first_bucket;
/* Keys of this rank after the exchange, the least possible one, and the number of keys below that. */
static int mine, lowest;
static long lesser;

/* Assigns buckets to each rank in order, until it has its part of the keys. */
static void share_buckets(void) {
    long sum = 0;
    int owner = 0;
    first_bucket[0] = 0;
    for (int b = 0; b < BUCKETS; b++) {
        sum += totals[b];
        while (owner + 1 < size && sum >= (long)keys * (owner + 1))
            first_bucket[++owner] = b + 1;
    }
    while (owner < size)
        first_bucket[++owner] = BUCKETS;
}

static void exchange(void) {
    int at[BUCKETS], sum = 0;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < keys; i++)
        counts[key[i] >> shift]++;
    for (int b = 0; b < BUCKETS; b++) {
        at[b] = sum;
        sum += counts[b];
    }
    for (int i = 0; i < keys; i++)
        sorted[at[key[i] >> shift]++] = key[i];
    MPI_Allreduce(counts, totals, BUCKETS, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    share_buckets();
    for (int r = 0, b = 0, sent = 0; r < size; r++) {
        to[r] = sent;
        for (; b < first_bucket[r + 1]; b++)
            sent += counts[b];
        sends[r] = sent - to[r];
    }
    MPI_Alltoall(sends, 1, MPI_INT, receives, 1, MPI_INT, MPI_COMM_WORLD);
    mine = 0;
    for (int r = 0; r < size; r++) {
        from[r] = mine;
        mine += receives[r];
    }
    got = realloc(got, sizeof(int) * (mine + 1));
    if (!got)
        fail("there is not enough memory");
    MPI_Alltoallv(sorted, sends, to, MPI_INT, got, receives, from, MPI_INT, MPI_COMM_WORLD);
}

/* below[k]: the number of keys of this rank below lowest + k. */
static void count_keys(void) {
    int range = (first_bucket[rank + 1] - first_bucket[rank]) << shift;
    lowest = first_bucket[rank] << shift;
    lesser = 0;
    for (int b = 0; b < first_bucket[rank]; b++)
        lesser += totals[b];
    memset(below, 0, sizeof(int) * (range + 1));
    for (int i = 0; i < mine; i++)
        below[got[i] - lowest + 1]++;
    for (int k = 0; k < range; k++)
        below[k + 1] += below[k];
}

/* Keys that change with each turn, and the ranks of five of them. */
static int turn(int number, enum problem problem) {
    int probes[PROBES] = {0}, wrong = 0;
    if (rank == 0) {
        key[number] = number;
        key[number + TURNS] = most - number;
    }
    for (int p = 0; p < PROBES; p++)
        if (PROBLEMS[problem].index[p] / keys == rank)
            probes[p] = key[PROBLEMS[problem].index[p] % keys];
    MPI_Allreduce(MPI_IN_PLACE, probes, PROBES, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    exchange();
    count_keys();
    int end = first_bucket[rank + 1] << shift;
    for (int p = 0; p < PROBES; p++) {
        if (probes[p] < lowest || probes[p] >= end)
            continue;
        long want = PROBLEMS[problem].rank[p];
        want += p < PROBLEMS[problem].rising ? number + PROBLEMS[problem].up : -(number + PROBLEMS[problem].down);
        wrong += want != lesser + below[probes[p] - lowest];
    }
    return wrong;
}

/* Whether all keys, in the order of their ranks, ascend: within this rank, and to the next. */
static int in_order(void) {
    int *order = zeros(mine, sizeof(int)), wrong = 0;
    for (int i = 0; i < mine; i++)
        order[below[got[i] - lowest]++] = got[i];
    for (int i = 1; i < mine; i++)
        wrong += order[i] < order[i - 1];
    wrong += mine > 0 && (order[0] < lowest || order[mine - 1] >= first_bucket[rank + 1] << shift);
    long count = mine, all;
    MPI_Allreduce(&count, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    free(order);
    return wrong == 0 && all == (long)keys * size;
}

int is(enum problem problem) {
    keys = (1 << PROBLEMS[problem].log_keys) / size;
    most = 1 << PROBLEMS[problem].log_most;
    shift = PROBLEMS[problem].log_most - 10;
    key = zeros(keys, sizeof(int));
    sorted = zeros(keys, sizeof(int));
    below = zeros(most + 1, sizeof(int));
    sends = zeros(size, sizeof(int));
    receives = zeros(size, sizeof(int));
    from = zeros(size, sizeof(int));
    to = zeros(size, sizeof(int));
    first_bucket = zeros(size + 1, sizeof(int));
    uint64_t seed = skip_random(314159265, 4ull * keys * rank);
    for (int i = 0; i < keys; i++) {
        double sum = 0;
        for (int j = 0; j < 4; j++)
            sum += next_random(&seed);
        key[i] = (int)(most / 4 * sum);
    }
    turn(1, problem);
    int wrong = 0;
    clock_start();
    for (int i = 1; i <= TURNS; i++)
        wrong += turn(i, problem);
    clock_stop();
    return in_order() && wrong == 0;
}
