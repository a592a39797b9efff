/* Messages that are received after a matched probe (MPI_Mprobe, MPI_Mrecv), as mpi4py's comm.recv does. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    static const int lengths[] = {1000, 16000, 17000, 65536, 131072, 131073, 1000000};
    int rank, wrong = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char *bytes = malloc(lengths[i]);
        if (rank == 0) {
            memset(bytes, 'a' + i, lengths[i]);
            MPI_Send(bytes, lengths[i], MPI_BYTE, 1, 7, MPI_COMM_WORLD);
        } else {
            MPI_Message message;
            MPI_Status status;
            int len;
            MPI_Mprobe(0, 7, MPI_COMM_WORLD, &message, &status);
            MPI_Get_count(&status, MPI_BYTE, &len);
            wrong |= len != lengths[i];
            MPI_Mrecv(bytes, lengths[i], MPI_BYTE, &message, &status);
            for (int k = 0; k < lengths[i]; k++)
                wrong |= bytes[k] != (char)('a' + i);
        }
        free(bytes);
    }
    if (rank == 1)
        printf("probed: %s\n", wrong ? "wrong" : "all data as sent");
    MPI_Finalize();
    return wrong;
}
