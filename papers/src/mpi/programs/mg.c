/* MG, multigrid (report, section 2.3): V-cycles for a Poisson problem with periodic boundaries. Grids are distributed over a box of ranks, and each layer of ghost points is
 * exchanged with neighbours. Grids too coarse to be divided are whole on every rank. */
#include "kernels.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHARGES = 10, MOST_LEVELS = 9 };

static const struct {
    int log_side, cycles;
    double norm;
    /* The smoother's weights, as those below. */
    double smooth[4];
} PROBLEMS[] = {
    {5, 4, 0.5307707005734e-04, {-3.0 / 8, 1.0 / 32, -1.0 / 64, 0}},
    {7, 4, 0.6467329375339e-05, {-3.0 / 8, 1.0 / 32, -1.0 / 64, 0}},
    {8, 4, 0.2433365309069e-05, {-3.0 / 8, 1.0 / 32, -1.0 / 64, 0}},
    {8, 20, 0.1800564401355e-05, {-3.0 / 17, 1.0 / 33, -1.0 / 61, 0}},
};

/* Weights of a point, those that share a face, an edge, a corner with it. */
static const double LAPLACE[] = {-8.0 / 3, 0, 1.0 / 6, 1.0 / 12};
static const double *smoothing;

/* A grid's part: n[] points, and a layer of ghosts around them. */
struct level {
    int n[3];
    int whole;
    double *u, *r;
};

static struct level levels[MOST_LEVELS];
static int ranks[3] = {1, 1, 1}, at[3];
static double *face_out, *face_in;

static size_t points(const struct level *l) {
    return (size_t)(l->n[0] + 2) * (l->n[1] + 2) * (l->n[2] + 2);
}

static size_t place(const struct level *l, int i, int j, int k) {
    return ((size_t)k * (l->n[1] + 2) + j) * (l->n[0] + 2) + i;
}

static int rank_at(int i, int j, int k) {
    return (k * ranks[1] + j) * ranks[0] + i;
}

/* Copies a layer across an axis, ghosts of the other axes included, to a buffer or from it. Returns the number of points. */
static int layer(const struct level *l, double *grid, int axis, int depth, double *buffer, int store) {
    int side = axis == 0, up = axis == 2 ? 1 : 2, count = 0;
    for (int b = 0; b < l->n[up] + 2; b++)
        for (int a = 0; a < l->n[side] + 2; a++) {
            int index[3];
            index[axis] = depth;
            index[side] = a;
            index[up] = b;
            double *point = &grid[place(l, index[0], index[1], index[2])];
            if (store)
                *point = buffer[count++];
            else
                buffer[count++] = *point;
        }
    return count;
}

/* Fills the ghosts. */
static void exchange(const struct level *l, double *grid) {
    for (int axis = 0; axis < 3; axis++)
        for (int up = 0; up < 2; up++) {
            int last = l->n[axis], count = layer(l, grid, axis, up ? last : 1, face_out, 0);
            double *come = face_out;
            if (!l->whole && ranks[axis] > 1) {
                int next[3] = {at[0], at[1], at[2]}, before[3] = {at[0], at[1], at[2]}, step = up ? 1 : ranks[axis] - 1;
                next[axis] = (at[axis] + step) % ranks[axis];
                before[axis] = (at[axis] + ranks[axis] - step) % ranks[axis];
                MPI_Request request;
                MPI_Irecv(face_in, count, MPI_DOUBLE, rank_at(before[0], before[1], before[2]), 2 * axis + up, MPI_COMM_WORLD, &request);
                MPI_Send(face_out, count, MPI_DOUBLE, rank_at(next[0], next[1], next[2]), 2 * axis + up, MPI_COMM_WORLD);
                MPI_Wait(&request, MPI_STATUS_IGNORE);
                come = face_in;
            }
            layer(l, grid, axis, up ? 0 : last + 1, come, 1);
        }
}

/* out = base + sign * (weights applied to in). */
static void stencil(const struct level *l, const double *in, const double *base, double *out, const double *weight, double sign) {
    size_t row = l->n[0] + 2, slab = row * (l->n[1] + 2);
    for (int k = 1; k <= l->n[2]; k++)
        for (int j = 1; j <= l->n[1]; j++) {
            /* Sums over the four neighbours in the other axes, and over the four across their corner. */
            const double *c = in + k * slab + j * row;
            double near[3], far[3];
            for (int i = 0; i < 2; i++) {
                near[i] = c[i - row] + c[i + row] + c[i - slab] + c[i + slab];
                far[i] = c[i - row - slab] + c[i + row - slab] + c[i - row + slab] + c[i + row + slab];
            }
            for (int i = 1; i <= l->n[0]; i++) {
                size_t n = i + 1;
                near[2] = c[n - row] + c[n + row] + c[n - slab] + c[n + slab];
                far[2] = c[n - row - slab] + c[n + row - slab] + c[n - row + slab] + c[n + row + slab];
                double sum = weight[0] * c[i] + weight[1] * (c[i - 1] + c[i + 1] + near[1]) + weight[2] * (far[1] + near[0] + near[2]) +
                             weight[3] * (far[0] + far[2]);
                size_t here = c - in + i;
                out[here] = base[here] + sign * sum;
                near[0] = near[1];
                near[1] = near[2];
                far[0] = far[1];
                far[1] = far[2];
            }
        }
}

/* r = v - A u */
static void residual(const struct level *l, const double *v) {
    stencil(l, l->u, v, l->r, LAPLACE, -1);
    exchange(l, l->r);
}

/* u = u + S r */
static void smooth(const struct level *l) {
    stencil(l, l->r, l->u, l->u, smoothing, 1);
    exchange(l, l->u);
}

/* Makes a whole grid of the parts of all ranks. */
static void gather(const struct level *l, const int *n, const double *part) {
    size_t count = (size_t)n[0] * n[1] * n[2];
    double *all = zeros(count * size, sizeof(double));
    MPI_Allgather(part, (int)count, MPI_DOUBLE, all, (int)count, MPI_DOUBLE, MPI_COMM_WORLD);
    const double *next = all;
    for (int from = 0; from < size; from++) {
        int x = from % ranks[0] * n[0], y = from / ranks[0] % ranks[1] * n[1], z = from / (ranks[0] * ranks[1]) * n[2];
        for (int k = 1; k <= n[2]; k++)
            for (int j = 1; j <= n[1]; j++, next += n[0])
                memcpy(&l->r[place(l, x + 1, y + j, z + k)], next, sizeof(double) * n[0]);
    }
    free(all);
}

/* The residual of the coarser grid: each of its points is the weighted sum about the fine point at twice its place. */
static void restrict_to(const struct level *coarse, const struct level *fine) {
    int n[3] = {fine->n[0] / 2, fine->n[1] / 2, fine->n[2] / 2}, gathered = coarse->whole && !fine->whole;
    double *part = zeros((size_t)n[0] * n[1] * n[2], sizeof(double)), *next = part;
    static const double WEIGHT[] = {0.5, 0.25, 0.125, 0.0625};
    for (int k = 1; k <= n[2]; k++)
        for (int j = 1; j <= n[1]; j++)
            for (int i = 1; i <= n[0]; i++) {
                double sum = 0;
                for (int c = -1; c <= 1; c++)
                    for (int b = -1; b <= 1; b++)
                        for (int a = -1; a <= 1; a++)
                            sum += WEIGHT[abs(a) + abs(b) + abs(c)] * fine->r[place(fine, 2 * i + a, 2 * j + b, 2 * k + c)];
                *next++ = sum;
            }
    if (gathered)
        gather(coarse, n, part);
    else
        for (int k = 1, line = 0; k <= n[2]; k++)
            for (int j = 1; j <= n[1]; j++, line += n[0])
                memcpy(&coarse->r[place(coarse, 1, j, k)], part + line, sizeof(double) * n[0]);
    free(part);
    exchange(coarse, coarse->r);
}

/* Adds the coarser grid's solution, interpolated, ghosts included. */
static void interpolate(const struct level *fine, const struct level *coarse) {
    int first[3];
    for (int axis = 0; axis < 3; axis++)
        first[axis] = coarse->whole && !fine->whole ? at[axis] * fine->n[axis] / 2 : 0;
    for (int k = 0; k < fine->n[2] + 2; k++)
        for (int j = 0; j < fine->n[1] + 2; j++)
            for (int i = 0; i < fine->n[0] + 2; i++) {
                double sum = 0;
                /* An odd place is between two: the sum over both in each axis, of which two are one at an even place. */
                for (int c = 0; c < 2; c++)
                    for (int b = 0; b < 2; b++)
                        for (int a = 0; a < 2; a++)
                            sum += coarse->u[place(coarse, first[0] + (i + a) / 2, first[1] + (j + b) / 2, first[2] + (k + c) / 2)];
                fine->u[place(fine, i, j, k)] += sum / 8;
            }
}

static void cycle(int top, const double *v) {
    for (int k = top; k > 1; k--)
        restrict_to(&levels[k - 1], &levels[k]);
    memset(levels[1].u, 0, sizeof(double) * points(&levels[1]));
    smooth(&levels[1]);
    for (int k = 2; k <= top; k++) {
        if (k < top)
            memset(levels[k].u, 0, sizeof(double) * points(&levels[k]));
        interpolate(&levels[k], &levels[k - 1]);
        /* Below the top the right side is the residual itself. */
        residual(&levels[k], k == top ? v : levels[k].r);
        smooth(&levels[k]);
    }
    residual(&levels[top], v);
}

struct charge {
    double value;
    long where;
};

/* Inserts one into the sorted list of the greatest. */
static void rank_charge(struct charge *list, struct charge new) {
    int i = CHARGES;
    while (i > 0 && list[i - 1].value < new.value)
        i--;
    if (i == CHARGES)
        return;
    memmove(list + i + 1, list + i, sizeof *list * (CHARGES - 1 - i));
    list[i] = new;
}

/* Each point gets a random number; the charges are at the greatest and the least ones. */
static void place_charges(const struct level *l, double *v, int side) {
    struct charge list[2][CHARGES], *all = zeros((size_t)size * 2 * CHARGES, sizeof *all);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < CHARGES; i++)
            list[s][i] = (struct charge){-2, -1};
    int first[3] = {at[0] * l->n[0], at[1] * l->n[1], at[2] * l->n[2]};
    for (int k = 0; k < l->n[2]; k++)
        for (int j = 0; j < l->n[1]; j++) {
            long where = ((long)(first[2] + k) * side + first[1] + j) * side + first[0];
            uint64_t seed = skip_random(314159265, (uint64_t)where);
            for (int i = 0; i < l->n[0]; i++, where++) {
                double number = next_random(&seed);
                rank_charge(list[0], (struct charge){number, where});
                rank_charge(list[1], (struct charge){-number, where});
            }
        }
    MPI_Allgather(list, sizeof list, MPI_BYTE, all, sizeof list, MPI_BYTE, MPI_COMM_WORLD);
    for (int i = 0; i < size * 2 * CHARGES; i++)
        if (i / (2 * CHARGES) != rank)
            rank_charge(list[i / CHARGES % 2], all[i]);
    for (int s = 0; s < 2; s++)
        for (int i = 0; i < CHARGES; i++) {
            long where = list[s][i].where;
            long x = where % side - first[0], y = where / side % side - first[1], z = where / side / side - first[2];
            if (x >= 0 && x < l->n[0] && y >= 0 && y < l->n[1] && z >= 0 && z < l->n[2])
                v[place(l, (int)x + 1, (int)y + 1, (int)z + 1)] = s ? -1 : 1;
        }
    free(all);
    exchange(l, v);
}

static double norm(const struct level *l, double count) {
    double sum = 0, all;
    for (int k = 1; k <= l->n[2]; k++)
        for (int j = 1; j <= l->n[1]; j++)
            for (int i = 1; i <= l->n[0]; i++) {
                double value = l->r[place(l, i, j, k)];
                sum += value * value;
            }
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return sqrt(all / count);
}

int mg(enum problem problem) {
    int top = PROBLEMS[problem].log_side, side = 1 << top, left = size, most = 1;
    for (int axis = 2; left > 1; left /= 2, axis = (axis + 2) % 3)
        ranks[axis] *= 2;
    at[0] = rank % ranks[0];
    at[1] = rank / ranks[0] % ranks[1];
    at[2] = rank / (ranks[0] * ranks[1]);
    for (int axis = 0; axis < 3; axis++)
        most = ranks[axis] > most ? ranks[axis] : most;
    if (side < 2 * most)
        fail("mg: too many ranks for this grid");
    for (int k = 1; k <= top; k++) {
        struct level *l = &levels[k];
        l->whole = 1 << k < 2 * most;
        for (int axis = 0; axis < 3; axis++)
            l->n[axis] = (1 << k) / (l->whole ? 1 : ranks[axis]);
        l->u = zeros(points(l), sizeof(double));
        l->r = zeros(points(l), sizeof(double));
    }
    struct level *l = &levels[top];
    double *v = zeros(points(l), sizeof(double));
    size_t face = (size_t)(side + 2) * (side + 2);
    face_out = zeros(face, sizeof(double));
    face_in = zeros(face, sizeof(double));
    place_charges(l, v, side);
    smoothing = PROBLEMS[problem].smooth;
    clock_start();
    residual(l, v);
    for (int i = 0; i < PROBLEMS[problem].cycles; i++)
        cycle(top, v);
    double result = norm(l, pow(side, 3));
    clock_stop();
    return fabs(result - PROBLEMS[problem].norm) <= 1e-8 * PROBLEMS[problem].norm;
}
