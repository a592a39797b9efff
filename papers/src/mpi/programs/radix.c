/* Radix sort of 32-bit keys, by digits of eight bits from the least on. Each pass exchanges histograms, then all keys. */
#include "kernels.h"
#include <stdlib.h>
#include <string.h>

enum { DIGITS = 256, PASSES = 4 };

static const int LOG_KEYS[] = {16, 20, 23, 25};

static int keys;
static int *counts, *histograms;
static long *starts;
static int *sends, *receives, *to, *from;

/* Keys that go from one rank to another in a pass, in the order of digits: those of `source` between the places of `target`. For each digit the callback's
 * part: where they stand among the target's places, and how many they are. */
static long part(int source, int digit, int target, long *place) {
    long start = starts[(size_t)source * DIGITS + digit], end = start + histograms[(size_t)source * DIGITS + digit];
    long first = (long)target * keys, last = first + keys;
    *place = start > first ? start : first;
    long stop = end < last ? end : last;
    return stop > *place ? stop - *place : 0;
}

static void pass(uint32_t *key, uint32_t *scratch, int shift) {
    int at[DIGITS], sum = 0;
    memset(counts, 0, sizeof(int) * DIGITS);
    for (int i = 0; i < keys; i++)
        counts[key[i] >> shift & 255]++;
    for (int d = 0; d < DIGITS; d++) {
        at[d] = sum;
        sum += counts[d];
    }
    for (int i = 0; i < keys; i++)
        scratch[at[key[i] >> shift & 255]++] = key[i];
    MPI_Allgather(counts, DIGITS, MPI_INT, histograms, DIGITS, MPI_INT, MPI_COMM_WORLD);
    long place = 0;
    for (int d = 0; d < DIGITS; d++)
        for (int r = 0; r < size; r++) {
            starts[(size_t)r * DIGITS + d] = place;
            place += histograms[(size_t)r * DIGITS + d];
        }
    int sent = 0, got = 0;
    for (int r = 0; r < size; r++) {
        to[r] = sent;
        from[r] = got;
        for (int d = 0; d < DIGITS; d++) {
            sent += (int)part(rank, d, r, &place);
            got += (int)part(r, d, rank, &place);
        }
        sends[r] = sent - to[r];
        receives[r] = got - from[r];
    }
    uint32_t *arrived = zeros(keys, sizeof *arrived);
    MPI_Alltoallv(scratch, sends, to, MPI_UINT32_T, arrived, receives, from, MPI_UINT32_T, MPI_COMM_WORLD);
    for (int r = 0; r < size; r++) {
        const uint32_t *next = arrived + from[r];
        for (int d = 0; d < DIGITS; d++) {
            long count = part(r, d, rank, &place);
            memcpy(key + (place - (long)rank * keys), next, sizeof *key * count);
            next += count;
        }
    }
    free(arrived);
}

/* Sums that are invariant under permutation. */
static void sums(const uint32_t *key, uint64_t *all) {
    uint64_t mine[2] = {0};
    for (int i = 0; i < keys; i++) {
        mine[0] += key[i];
        mine[1] += (key[i] ^ 0x9e3779b9ull) * (key[i] | 1ull);
    }
    MPI_Allreduce(mine, all, 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
}

int radix(enum problem problem) {
    keys = (1 << LOG_KEYS[problem]) / size;
    uint32_t *key = zeros(keys, sizeof *key), *scratch = zeros(keys, sizeof *scratch);
    counts = zeros(DIGITS, sizeof(int));
    histograms = zeros((size_t)size * DIGITS, sizeof(int));
    starts = zeros((size_t)size * DIGITS, sizeof(long));
    sends = zeros(size, sizeof(int));
    receives = zeros(size, sizeof(int));
    to = zeros(size, sizeof(int));
    from = zeros(size, sizeof(int));
    uint64_t seed = skip_random(314159265, (uint64_t)keys * rank), before[2], after[2];
    for (int i = 0; i < keys; i++)
        key[i] = (uint32_t)(next_random(&seed) * 4294967296.0);
    sums(key, before);
    clock_start();
    for (int p = 0; p < PASSES; p++)
        pass(key, scratch, 8 * p);
    clock_stop();
    sums(key, after);
    uint32_t *ends = zeros(2 * (size_t)size, sizeof *ends), mine[2] = {key[0], key[keys - 1]};
    MPI_Allgather(mine, 2, MPI_UINT32_T, ends, 2, MPI_UINT32_T, MPI_COMM_WORLD);
    int wrong = before[0] != after[0] || before[1] != after[1];
    for (int i = 1; i < keys; i++)
        wrong += key[i] < key[i - 1];
    for (int r = 1; r < size; r++)
        wrong += ends[2 * r] < ends[2 * r - 1];
    return wrong == 0;
}
