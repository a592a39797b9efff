/* SMG: hypre's semicoarsening multigrid, the core of the benchmark SMG2000, for a Laplacian in three dimensions. Many small messages to many ranks. */
#include "kernels.h"
#ifdef WITH_HYPRE
#include <HYPRE_struct_ls.h>
#include <math.h>
#include <stdlib.h>

static const int SIDES[] = {16, 32, 64, 128};

int smg(enum problem problem) {
    int side = SIDES[problem], ranks[3] = {1, 1, 1}, low[3], high[3], count = 1;
    for (int left = size, axis = 2; left > 1; left /= 2, axis = (axis + 2) % 3)
        ranks[axis] *= 2;
    int at[3] = {rank % ranks[0], rank / ranks[0] % ranks[1], rank / (ranks[0] * ranks[1])};
    for (int axis = 0; axis < 3; axis++) {
        if (side % ranks[axis])
            fail("smg: too many ranks for this grid");
        low[axis] = at[axis] * side / ranks[axis];
        high[axis] = low[axis] + side / ranks[axis] - 1;
        count *= side / ranks[axis];
    }
    double *values = zeros(7 * (size_t)count, sizeof(double)), *want = zeros(count, sizeof(double));
    HYPRE_StructGrid grid;
    HYPRE_StructGridCreate(MPI_COMM_WORLD, 3, &grid);
    HYPRE_StructGridSetExtents(grid, low, high);
    HYPRE_StructGridAssemble(grid);
    static int offsets[7][3] = {{0, 0, 0}, {-1, 0, 0}, {1, 0, 0}, {0, -1, 0}, {0, 1, 0}, {0, 0, -1}, {0, 0, 1}};
    HYPRE_StructStencil stencil;
    HYPRE_StructStencilCreate(3, 7, &stencil);
    for (int i = 0; i < 7; i++)
        HYPRE_StructStencilSetElement(stencil, i, offsets[i]);
    HYPRE_StructMatrix matrix;
    HYPRE_StructMatrixCreate(MPI_COMM_WORLD, grid, stencil, &matrix);
    HYPRE_StructMatrixInitialize(matrix);
    int point = 0, entries[7] = {0, 1, 2, 3, 4, 5, 6};
    for (int k = low[2]; k <= high[2]; k++)
        for (int j = low[1]; j <= high[1]; j++)
            for (int i = low[0]; i <= high[0]; i++, point++) {
                int index[3] = {i, j, k};
                values[7 * point] = 6;
                for (int e = 1; e < 7; e++) {
                    int axis = (e - 1) / 2, edge = e % 2 ? 0 : side - 1;
                    values[7 * point + e] = index[axis] == edge ? 0 : -1;
                }
                want[point] = sin(i + 1.0) * cos(j + 2.0) * sin(k + 3.0);
            }
    HYPRE_StructMatrixSetBoxValues(matrix, low, high, 7, entries, values);
    HYPRE_StructMatrixAssemble(matrix);
    /* The right side belongs to a known solution. */
    HYPRE_StructVector x, b;
    HYPRE_StructVectorCreate(MPI_COMM_WORLD, grid, &x);
    HYPRE_StructVectorCreate(MPI_COMM_WORLD, grid, &b);
    HYPRE_StructVectorInitialize(x);
    HYPRE_StructVectorInitialize(b);
    HYPRE_StructVectorSetBoxValues(x, low, high, want);
    HYPRE_StructVectorAssemble(x);
    HYPRE_StructVectorAssemble(b);
    HYPRE_StructMatrixMatvec(1, matrix, x, 0, b);
    HYPRE_StructVectorSetConstantValues(x, 0);

    HYPRE_StructSolver solver;
    clock_start();
    HYPRE_StructSMGCreate(MPI_COMM_WORLD, &solver);
    HYPRE_StructSMGSetTol(solver, 1e-8);
    HYPRE_StructSMGSetMaxIter(solver, 50);
    HYPRE_StructSMGSetup(solver, matrix, b, x);
    HYPRE_StructSMGSolve(solver, matrix, b, x);
    clock_stop();
    HYPRE_StructVectorGetBoxValues(x, low, high, values);
    int right = 1;
    for (int i = 0; i < count; i++)
        right &= fabs(values[i] - want[i]) < 1e-5;
    return right;
}
#endif
