/* Latency and bandwidth between two ranks. Prints bytes, microseconds one way, MB/s for each size, and says at the end whether
 * all data came as it was sent. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 16, PING = 1, STREAM = 2, ACK = 3 };

static void fill(unsigned char *data, size_t len, unsigned seed) {
    for (size_t i = 0; i < len; i++)
        data[i] = (unsigned char)(seed + i * 7 + (i >> 8));
}

/* How many of the bytes differ from what fill() wrote. */
static long wrong(const unsigned char *data, size_t len, unsigned seed) {
    long count = 0;
    for (size_t i = 0; i < len; i++)
        count += data[i] != (unsigned char)(seed + i * 7 + (i >> 8));
    return count;
}

int main(int argc, char **argv) {
    const size_t most = 1 << 20;
    int rank, size;
    long bad = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != 2) {
        fprintf(stderr, "two ranks, please\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    unsigned char *out = malloc(most), *in = malloc(most * WINDOW);
    MPI_Request requests[WINDOW];
    if (!out || !in)
        MPI_Abort(MPI_COMM_WORLD, 2);

    for (size_t len = 1; len <= most; len *= 4) {
        int rounds = len < 65536 ? 100 : 20;
        fill(out, len, (unsigned)len);

        MPI_Barrier(MPI_COMM_WORLD);
        double begun = MPI_Wtime();
        for (int i = 0; i < rounds; i++) {
            if (rank == 0) {
                MPI_Send(out, (int)len, MPI_BYTE, 1, PING, MPI_COMM_WORLD);
                MPI_Recv(in, (int)len, MPI_BYTE, 1, PING, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            } else {
                MPI_Recv(in, (int)len, MPI_BYTE, 0, PING, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Send(in, (int)len, MPI_BYTE, 0, PING, MPI_COMM_WORLD);
            }
        }
        double one_way = (MPI_Wtime() - begun) / rounds / 2;
        bad += wrong(in, len, (unsigned)len);

        memset(in, 0, len * WINDOW);
        MPI_Barrier(MPI_COMM_WORLD);
        begun = MPI_Wtime();
        for (int i = 0; i < WINDOW; i++) {
            if (rank == 0)
                MPI_Isend(out, (int)len, MPI_BYTE, 1, STREAM, MPI_COMM_WORLD, &requests[i]);
            else
                MPI_Irecv(in + i * len, (int)len, MPI_BYTE, 0, STREAM, MPI_COMM_WORLD, &requests[i]);
        }
        MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
        char ack = 0;
        if (rank == 0)
            MPI_Recv(&ack, 1, MPI_BYTE, 1, ACK, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(&ack, 1, MPI_BYTE, 0, ACK, MPI_COMM_WORLD);
        double took = MPI_Wtime() - begun;
        if (rank == 1)
            for (int i = 0; i < WINDOW; i++)
                bad += wrong(in + i * len, len, (unsigned)len);
        else
            printf("%zu %.3f %.5f\n", len, one_way * 1e6, (double)len * WINDOW / took / 1e6);
    }

    long all = -1;
    MPI_Reduce(&bad, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf(all == 0 ? "all data as sent\n" : "DATA DIFFERS\n");
    free(out);
    free(in);
    MPI_Finalize();
    return rank == 0 && all != 0;
}
