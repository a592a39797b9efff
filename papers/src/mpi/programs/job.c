/* The program of `weft-papers mpi`. `job pair ROUNDS BYTES...` with two ranks: time one way and bidirectional bandwidth. `job memory` with any number: each rank
 * exchanges messages with each other one, then reports its private memory. Received data that differs from the sent data is an error. */
#include "memory.h"
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 16, STREAM = 100 };

static int rank, size;
static long wrong;

static unsigned char at(unsigned seed, size_t i) {
    return (unsigned char)(seed * 131 + i * 7 + (i >> 8) * 13);
}

static void *memory(size_t len) {
    void *data = malloc(len ? len : 1);
    if (!data) {
        fprintf(stderr, "no memory for %zu bytes\n", len);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return data;
}

static void pair(size_t len, int rounds) {
    int peer = 1 - rank;
    unsigned char *out = memory(len), *in = memory(len * WINDOW);
    MPI_Request requests[2 * WINDOW];
    for (size_t i = 0; i < len; i++)
        out[i] = at(rank, i);
    double begun = 0;
    for (int i = -2; i < rounds; i++) {
        if (i == 0) {
            MPI_Barrier(MPI_COMM_WORLD);
            begun = MPI_Wtime();
        }
        if (rank == 0) {
            MPI_Send(out, (int)len, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
            MPI_Recv(in, (int)len, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(in, (int)len, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(out, (int)len, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        }
    }
    double one_way = (MPI_Wtime() - begun) / rounds / 2;
    for (size_t i = 0; i < len; i++)
        wrong += in[i] != at(peer, i);

    int windows = rounds / WINDOW + 1;
    memset(in, 0, len * WINDOW);
    MPI_Barrier(MPI_COMM_WORLD);
    begun = MPI_Wtime();
    for (int w = 0; w < windows; w++) {
        for (int i = 0; i < WINDOW; i++) {
            MPI_Irecv(in + i * len, (int)len, MPI_BYTE, peer, STREAM + i, MPI_COMM_WORLD, &requests[i]);
            MPI_Isend(out, (int)len, MPI_BYTE, peer, STREAM + i, MPI_COMM_WORLD, &requests[WINDOW + i]);
        }
        MPI_Waitall(2 * WINDOW, requests, MPI_STATUSES_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double took = MPI_Wtime() - begun;
    for (int w = 0; w < WINDOW; w++)
        for (size_t i = 0; i < len; i++)
            wrong += in[w * len + i] != at(peer, i);
    if (rank == 0)
        printf("pair %zu %.4f %.6f\n", len, one_way * 1e6, 2.0 * len * WINDOW * windows / took / 1e6);
    free(out);
    free(in);
}

static void all_to_all(void) {
    const int len = 8192;
    unsigned char *out = memory(len * size), *in = memory(len * size);
    for (int round = 0; round < 4; round++) {
        for (int to = 0; to < size; to++)
            memset(out + to * len, rank + to * 3 + round, len);
        MPI_Alltoall(out, len, MPI_BYTE, in, len, MPI_BYTE, MPI_COMM_WORLD);
        for (int from = 0; from < size; from++)
            for (int i = 0; i < len; i++)
                wrong += in[from * len + i] != (unsigned char)(from + rank * 3 + round);
    }
    double mine = own_memory(), sum = 0;
    MPI_Reduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("memory %d %.1f\n", size, sum / size);
    free(out);
    free(in);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc > 3 && strcmp(argv[1], "pair") == 0 && size == 2) {
        for (int i = 3; i < argc; i++)
            pair(strtoul(argv[i], NULL, 10), atoi(argv[2]));
    } else if (argc == 2 && strcmp(argv[1], "memory") == 0) {
        all_to_all();
    } else {
        fprintf(stderr, "usage: job pair ROUNDS BYTES... | job memory\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    long all = -1;
    MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf(all == 0 ? "all data as sent\n" : "DATA DIFFERS\n");
    MPI_Finalize();
    return rank == 0 && all != 0;
}
