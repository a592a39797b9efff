/* Exchanges between all ranks, and says whether every byte came as it was sent: ping-pong between neighbours, broadcast, all-reduce, all-to-all and
 * messages whose order matters. Usage: verify [LARGEST [ROUNDS [named]]]. With "named" nothing is received from MPI_ANY_SOURCE. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ORDERED = 200 };

static int rank, size;
static long wrong;

static unsigned char at(unsigned seed, size_t i) {
    return (unsigned char)(seed * 131 + i * 7 + (i >> 8) * 13);
}

static void fill(unsigned char *data, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++)
        data[i] = at(seed, i);
}

static void check(const unsigned char *data, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++)
        wrong += data[i] != at(seed, i);
}

static unsigned char *memory(size_t len) {
    unsigned char *data = malloc(len ? len : 1);
    if (!data) {
        fprintf(stderr, "no memory for %zu bytes\n", len);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return data;
}

/* Each rank with the next one, both ways at once. */
static void neighbours(size_t len, int round) {
    unsigned char *out = memory(len), *in = memory(len);
    int next = (rank + 1) % size, last = (rank + size - 1) % size;
    fill(out, len, (unsigned)(rank + round));
    memset(in, 0, len);
    MPI_Status status;
    MPI_Sendrecv(out, (int)len, MPI_BYTE, next, 1, in, (int)len, MPI_BYTE, last, 1, MPI_COMM_WORLD, &status);
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    wrong += (size_t)count != len || status.MPI_SOURCE != last;
    check(in, len, (unsigned)(last + round));
    free(out);
    free(in);
}

static void all_to_all(size_t len, int round) {
    unsigned char *out = memory(len * size), *in = memory(len * size);
    for (int to = 0; to < size; to++)
        fill(out + len * to, len, (unsigned)(rank * 64 + to + round));
    memset(in, 0, len * size);
    MPI_Alltoall(out, (int)len, MPI_BYTE, in, (int)len, MPI_BYTE, MPI_COMM_WORLD);
    for (int from = 0; from < size; from++)
        check(in + len * from, len, (unsigned)(from * 64 + rank + round));
    free(out);
    free(in);
}

static void collectives(size_t len, int round) {
    int count = (int)(len / sizeof(long)) + 1;
    long *mine = (long *)memory(count * sizeof(long)), *sum = (long *)memory(count * sizeof(long));
    for (int i = 0; i < count; i++)
        mine[i] = (long)i * (rank + 1) + round;
    MPI_Allreduce(mine, sum, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < count; i++)
        wrong += sum[i] != (long)i * size * (size + 1) / 2 + (long)round * size;
    int root = round % size;
    if (rank == root)
        for (int i = 0; i < count; i++)
            mine[i] = (long)i * 3 + round;
    MPI_Bcast(mine, count, MPI_LONG, root, MPI_COMM_WORLD);
    for (int i = 0; i < count; i++)
        wrong += mine[i] != (long)i * 3 + round;
    free(mine);
    free(sum);
}

/* All to rank 0 with one tag: messages of a sender do not overtake each other. */
static void ordered(int named) {
    if (rank > 0) {
        for (int i = 0; i < ORDERED; i++)
            MPI_Send(&i, 1, MPI_INT, 0, 7, MPI_COMM_WORLD);
        return;
    }
    int *next = calloc(size, sizeof(int));
    for (int i = 0; i < ORDERED * (size - 1); i++) {
        int value = -1;
        MPI_Status status;
        int source = named ? 1 + i % (size - 1) : MPI_ANY_SOURCE;
        MPI_Recv(&value, 1, MPI_INT, source, 7, MPI_COMM_WORLD, &status);
        wrong += value != next[status.MPI_SOURCE]++;
    }
    free(next);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    size_t most = argc > 1 ? strtoul(argv[1], NULL, 10) : 262144;
    int rounds = argc > 2 ? atoi(argv[2]) : 3;
    int named = argc > 3 && strcmp(argv[3], "named") == 0;
    double begun = MPI_Wtime();
    for (int round = 0; round < rounds; round++) {
        for (size_t len = 0; len <= most; len = len ? len * 8 : 1) {
            neighbours(len, round);
            all_to_all(len / 4, round);
            collectives(len, round);
        }
        neighbours(most, round);
        ordered(named);
    }
    long all = -1;
    MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%s: %d ranks, %.3f s\n", all == 0 ? "all data as sent" : "DATA DIFFERS", size, MPI_Wtime() - begun);
    MPI_Finalize();
    return rank == 0 && all != 0;
}
