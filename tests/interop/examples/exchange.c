/* Two ranks exchange messages of many lengths, and check each byte. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
	static unsigned char ours[1 << 20], theirs[1 << 20];
	int rank, ranks, round, i;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2)
		MPI_Abort(MPI_COMM_WORLD, 2);
	for (round = 0; round < 63; round++) {
		int len = (1 << round % 21) - round / 21 % 2;

		memset(ours, 2 * round + rank, len);
		MPI_Sendrecv(ours, len, MPI_BYTE, 1 - rank, 1, theirs, len, MPI_BYTE, 1 - rank, 1,
			     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		for (i = 0; i < len; i++) {
			if (theirs[i] != (unsigned char)(2 * round + 1 - rank)) {
				fprintf(stderr, "round %d: byte %d is %d\n", round, i, theirs[i]);
				MPI_Abort(MPI_COMM_WORLD, 1);
			}
		}
	}
	printf("rank %d has what it was sent\n", rank);
	MPI_Finalize();
	return 0;
}
