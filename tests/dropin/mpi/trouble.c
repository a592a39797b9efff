/* What goes wrong within a job. `trouble fork`: each rank has children while it exchanges messages, one that uses memory and one that becomes another program.
 * `trouble kill`: rank 1 is killed amidst the exchange; the job must end. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LENGTH = 100000, ROUNDS = 30 };

static int rank, size;
static long wrong;

static void exchange(char *out, char *in, int round) {
    for (int to = 0; to < size; to++)
        memset(out + to * LENGTH, rank * 5 + to * 3 + round, LENGTH);
    MPI_Alltoall(out, LENGTH, MPI_BYTE, in, LENGTH, MPI_BYTE, MPI_COMM_WORLD);
    for (int from = 0; from < size; from++)
        for (int i = 0; i < LENGTH; i++)
            wrong += in[from * LENGTH + i] != (char)(from * 5 + rank * 3 + round);
}

static void child(char *memory, int becomes) {
    pid_t pid = fork();
    if (pid == 0) {
        /* Of the parent's buffers it has copies. */
        memset(memory, 99, (size_t)LENGTH * size);
        if (becomes)
            execl("/bin/true", "true", (char *)NULL);
        _exit(becomes);
    }
    int status = -1;
    wrong += pid < 0 || waitpid(pid, &status, 0) != pid || status != 0;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int kill_one = argc == 2 && strcmp(argv[1], "kill") == 0;
    char *out = malloc((size_t)LENGTH * size), *in = malloc((size_t)LENGTH * size);
    if (!out || !in)
        MPI_Abort(MPI_COMM_WORLD, 2);
    for (int round = 0; round < ROUNDS; round++) {
        exchange(out, in, round);
        if (kill_one && rank == 1 && round == ROUNDS / 2)
            raise(SIGKILL);
        if (!kill_one && round % 10 == 5) {
            child(out, 0);
            child(in, 1);
        }
    }
    long all = -1;
    MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0)
        printf(all == 0 ? "all data as sent: %d ranks\n" : "DATA DIFFERS: %d ranks\n", size);
    MPI_Finalize();
    return rank == 0 && all != 0;
}
