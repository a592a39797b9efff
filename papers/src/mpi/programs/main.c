/* `kernels NAME CLASS`: runs a kernel, and prints on rank 0
 *     kernel NAME CLASS RANKS SECONDS SECONDS-IN-MPI KIB-OF-A-RANK verified|WRONG */
#include "kernels.h"
#include "memory.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int rank, size;
static double begun, took, inside, inside_took;

double next_random(uint64_t *x) {
    *x = *x * MULTIPLIER & ((1ull << 46) - 1);
    return ldexp((double)*x, -46);
}

uint64_t skip_random(uint64_t seed, uint64_t count) {
    for (uint64_t power = MULTIPLIER; count; count >>= 1, power *= power)
        if (count & 1)
            seed *= power;
    return seed & ((1ull << 46) - 1);
}

void *zeros(size_t count, size_t each) {
    void *data = calloc(count ? count : 1, each);
    if (!data)
        fail("there is not enough memory");
    return data;
}

void fail(const char *why) {
    fprintf(stderr, "kernels: %s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 2);
    abort();
}

void clock_start(void) {
    MPI_Barrier(MPI_COMM_WORLD);
    inside = 0;
    begun = MPI_Wtime();
}

void clock_stop(void) {
    took = MPI_Wtime() - begun;
    inside_took = inside;
}

void butterfly(double *sum, double *scratch, int count, int stride, int members) {
    for (int step = 1; step < members; step *= 2) {
        int partner = rank ^ step * stride;
        MPI_Sendrecv(sum, count, MPI_DOUBLE, partner, 1, scratch, count, MPI_DOUBLE, partner, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < count; i++)
            sum[i] += scratch[i];
    }
}

static const struct {
    const char *name;
    int (*run)(enum problem);
} KERNELS[] = {{"ep", ep}, {"is", is}, {"cg", cg}, {"mg", mg}, {"lu", lu}, {"radix", radix},
#ifdef WITH_HYPRE
               {"smg", smg},
#endif
};

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int (*run)(enum problem) = NULL;
    static const char classes[] = "SWAB";
    const char *class = argc == 3 && strlen(argv[2]) == 1 ? strchr(classes, argv[2][0]) : NULL;
    for (size_t i = 0; class && i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (strcmp(argv[1], KERNELS[i].name) == 0)
            run = KERNELS[i].run;
    if (!run)
        fail("usage: kernels ep|is|cg|mg|lu|radix|smg S|W|A|B");
    if (size & (size - 1))
        fail("the number of ranks must be a power of two");
    int right = run((enum problem)(class - classes));

    double mine[3] = {took, inside_took, own_memory()}, most[3], sum[3];
    int all = 0;
    MPI_Reduce(mine, most, 3, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    MPI_Reduce(mine, sum, 3, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Allreduce(&right, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (rank == 0)
        printf("kernel %s %s %d %.6f %.6f %.1f %s\n", argv[1], argv[2], size, most[0], sum[1] / size, sum[2] / size, all ? "verified" : "WRONG");
    MPI_Finalize();
    return !all;
}

/* MPI's profiling interface: the time that a rank spends in the calls that the kernels make. */
#define TIMED(call, parameters, arguments) \
    int MPI_##call parameters { \
        double from = PMPI_Wtime(); \
        int result = PMPI_##call arguments; \
        inside += PMPI_Wtime() - from; \
        return result; \
    }

TIMED(Send, (const void *b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c), (b, n, t, to, tag, c))
TIMED(Recv, (void *b, int n, MPI_Datatype t, int from_, int tag, MPI_Comm c, MPI_Status *s), (b, n, t, from_, tag, c, s))
TIMED(Isend, (const void *b, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request *r), (b, n, t, to, tag, c, r))
TIMED(Irecv, (void *b, int n, MPI_Datatype t, int from_, int tag, MPI_Comm c, MPI_Request *r), (b, n, t, from_, tag, c, r))
TIMED(Wait, (MPI_Request * r, MPI_Status *s), (r, s))
TIMED(Waitall, (int n, MPI_Request *r, MPI_Status *s), (n, r, s))
TIMED(Sendrecv,
      (const void *b, int n, MPI_Datatype t, int to, int tag, void *b2, int n2, MPI_Datatype t2, int from_, int tag2, MPI_Comm c, MPI_Status *s),
      (b, n, t, to, tag, b2, n2, t2, from_, tag2, c, s))
TIMED(Sendrecv_replace, (void *b, int n, MPI_Datatype t, int to, int tag, int from_, int tag2, MPI_Comm c, MPI_Status *s), (b, n, t, to, tag, from_, tag2, c, s))
TIMED(Allreduce, (const void *b, void *b2, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c), (b, b2, n, t, o, c))
TIMED(Allgather, (const void *b, int n, MPI_Datatype t, void *b2, int n2, MPI_Datatype t2, MPI_Comm c), (b, n, t, b2, n2, t2, c))
TIMED(Alltoall, (const void *b, int n, MPI_Datatype t, void *b2, int n2, MPI_Datatype t2, MPI_Comm c), (b, n, t, b2, n2, t2, c))
TIMED(Alltoallv,
      (const void *b, const int *n, const int *d, MPI_Datatype t, void *b2, const int *n2, const int *d2, MPI_Datatype t2, MPI_Comm c),
      (b, n, d, t, b2, n2, d2, t2, c))
