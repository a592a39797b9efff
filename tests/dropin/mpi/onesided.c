/* MPI's one-sided calls between neighbours: put, get, accumulate, fetch-and-op. Says whether all is as it was written. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 100000, OPS = 50 };

int main(int argc, char **argv) {
    int rank, size;
    long wrong = 0, all = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    long *base, *mine = malloc(N * sizeof(long));
    MPI_Win win;
    MPI_Win_allocate(N * sizeof(long), sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &base, &win);
    for (int i = 0; i < N; i++) {
        base[i] = 0;
        mine[i] = rank * 1000000L + i;
    }
    MPI_Win_fence(0, win);
    int next = (rank + 1) % size, last = (rank + size - 1) % size;
    MPI_Put(mine, N, MPI_LONG, next, 0, N, MPI_LONG, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < N; i++)
        wrong += base[i] != last * 1000000L + i;
    MPI_Win_fence(0, win);
    MPI_Get(mine, N, MPI_LONG, next, 0, N, MPI_LONG, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < N; i++)
        wrong += mine[i] != rank * 1000000L + i;
    MPI_Win_fence(0, win);
    MPI_Accumulate(mine, 10, MPI_LONG, next, 0, 10, MPI_LONG, MPI_SUM, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < 10; i++)
        wrong += base[i] != last * 2000000L + 2 * i;
    MPI_Win_lock_all(0, win);
    long one = 1, old = -1;
    for (int i = 0; i < OPS; i++) {
        MPI_Fetch_and_op(&one, &old, MPI_LONG, 0, 20, MPI_SUM, win);
        MPI_Win_flush(0, win);
    }
    MPI_Win_unlock_all(win);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win);
        wrong += base[20] != (size - 1) * 1000000L + 20 + (long)OPS * size;
        MPI_Win_unlock(0, win);
    }
    MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%s: %d ranks\n", all == 0 ? "all data as written" : "DATA DIFFERS", size);
    free(mine);
    MPI_Win_free(&win);
    MPI_Finalize();
    return rank == 0 && all != 0;
}
