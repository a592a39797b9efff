/* Each rank sends to the next one and receives from the one before, messages of 1 byte to 1 MiB. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST = 1 << 20, ROUNDS = 10 };

static char out[LONGEST], in[LONGEST];

int main(int argc, char **argv)
{
	int rank, ranks, sum = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
	for (int len = 1; len <= LONGEST; len *= 4) {
		for (int round = 0; round < ROUNDS; round++) {
			memset(out, rank + round, len);
			MPI_Sendrecv(out, len, MPI_CHAR, next, 0, in, len, MPI_CHAR, before, 0,
				     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			for (int i = 0; i < len; i++)
				if (in[i] != (char)(before + round))
					MPI_Abort(MPI_COMM_WORLD, 1);
		}
	}
	MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (rank == 0 && sum == ranks * (ranks - 1) / 2)
		printf("%d ranks, all bytes right\n", ranks);
	MPI_Finalize();
	return 0;
}
