/* LU (report, section 3): symmetric successive over-relaxation of the Navier-Stokes equations in three dimensions. Columns of the grid are distributed over a rectangle of
 * ranks; sweeps go through them as a wave, plane by plane, with many small messages to two neighbours. */
#include "kernels.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { V = 5, GHOSTS = 2 };

static const struct {
    int side, turns;
    double step, residual[V], error[V], integral;
} PROBLEMS[] = {
    {12, 50, 0.5,
     {1.6196343210976702e-02, 2.1976745164821318e-03, 1.5179927653399185e-03, 1.5029584435994323e-03, 3.4264073155896461e-02},
     {6.4223319957960924e-04, 8.4144342047347926e-05, 5.8588269616485186e-05, 5.8474222595157350e-05, 1.3103347914111294e-03},
     7.8418928865937083},
    {33, 300, 1.5e-3,
     {0.1236511638192e+02, 0.1317228477799e+01, 0.2550120713095e+01, 0.2326187750252e+01, 0.2826799444189e+02},
     {0.4867877144216e+00, 0.5064652880982e-01, 0.9281818101960e-01, 0.8570126542733e-01, 0.1084277417792e+01},
     0.1161399311023e+02},
    {64, 250, 2.0,
     {0.7790210760669e+03, 0.6340276525969e+02, 0.1949924972729e+03, 0.1784530116042e+03, 0.1838476034946e+04},
     {0.2996408568547e+02, 0.2819457636500e+01, 0.7347341269877e+01, 0.6713922568778e+01, 0.7071531568839e+02},
     0.2603092560489e+02},
    {102, 250, 2.0,
     {3.5532672969982736e+03, 2.6214750795310692e+02, 8.8333721850952190e+02, 7.7812774739425265e+02, 7.3087969592545314e+03},
     {1.1401176380212709e+02, 8.1098963655421574e+00, 2.8480597317698308e+01, 2.5905394567832939e+01, 2.6054907504857413e+02},
     4.7887162703308227e+01},
};

static const double C1 = 1.4, C2 = 0.4, C34 = 0.1, C1345 = 1.4 * 0.1 * 1.4, OMEGA = 1.2, DISSIPATION = 0.25;
/* Second-order dissipation by axis. */
static const double D[3] = {0.75, 0.75, 1.0};
/* The exact solution is a polynomial. */
static const double EXACT[V][13] = {
    {2, 0, 0, 4, 5, 3, 0.5, 0.02, 0.01, 0.03, 0.5, 0.4, 0.3},
    {1, 0, 0, 0, 1, 2, 3, 0.01, 0.03, 0.02, 0.4, 0.3, 0.5},
    {2, 2, 0, 0, 0, 2, 3, 0.04, 0.03, 0.05, 0.3, 0.5, 0.4},
    {2, 2, 0, 0, 0, 2, 3, 0.03, 0.05, 0.04, 0.2, 0.1, 0.3},
    {5, 4, 3, 2, 0.1, 0.4, 0.3, 0.05, 0.04, 0.03, 0.1, 0.3, 0.2},
};

static int side, ranks[2], at[2];
/* The number of local points, their start in the whole grid, and the distance in memory along each axis. */
static int n[3], first[3];
static long stride[3];
static double step, t1, t2, t3;
static double *u, *rsd, *force, *buffer;

static long place(int i, int j, int k) {
    return (i + GHOSTS) * stride[0] + (j + GHOSTS) * stride[1] + k * stride[2];
}

/* The local part of the whole grid's interior. */
static int low(int axis) {
    return first[axis] == 0 ? 1 : 0;
}

static int high(int axis) {
    return first[axis] + n[axis] == side ? n[axis] - 1 : n[axis];
}

#define INTERIOR(i, j, k) \
    for (int k = low(2); k < high(2); k++) \
        for (int j = low(1); j < high(1); j++) \
            for (int i = low(0); i < high(0); i++)

static void exact(int i, int j, int k, double *out) {
    double x[3] = {i / (side - 1.0), j / (side - 1.0), k / (side - 1.0)};
    for (int m = 0; m < V; m++) {
        const double *c = EXACT[m];
        out[m] = c[0];
        for (int d = 0; d < 3; d++)
            out[m] += (c[1 + d] + (c[4 + d] + (c[7 + d] + c[10 + d] * x[d]) * x[d]) * x[d]) * x[d];
    }
}

/* Interpolates along each axis between faces with the exact solution. */
static void set_start(void) {
    for (int k = 0; k < n[2]; k++)
        for (int j = 0; j < n[1]; j++)
            for (int i = 0; i < n[0]; i++) {
                int g[3] = {first[0] + i, first[1] + j, first[2] + k}, boundary = 0;
                double *point = u + place(i, j, k), p[3][V], ends[2][V];
                for (int d = 0; d < 3; d++) {
                    int end[3] = {g[0], g[1], g[2]};
                    boundary |= g[d] == 0 || g[d] == side - 1;
                    for (int e = 0; e < 2; e++) {
                        end[d] = e * (side - 1);
                        exact(end[0], end[1], end[2], ends[e]);
                    }
                    double x = g[d] / (side - 1.0);
                    for (int m = 0; m < V; m++)
                        p[d][m] = (1 - x) * ends[0][m] + x * ends[1][m];
                }
                for (int m = 0; m < V; m++)
                    point[m] = p[0][m] + p[1][m] + p[2][m] - p[0][m] * p[1][m] - p[1][m] * p[2][m] - p[2][m] * p[0][m] + p[0][m] * p[1][m] * p[2][m];
                if (boundary)
                    exact(g[0], g[1], g[2], point);
            }
}

static int rank_at(int x, int y) {
    return x < 0 || y < 0 || x >= ranks[0] || y >= ranks[1] ? MPI_PROC_NULL : y * ranks[0] + x;
}

/* Copies a box of points to the buffer or from it. Returns the count of numbers. */
static int box(double *grid, const int *from, const int *to, int store) {
    int count = 0;
    for (int k = from[2]; k < to[2]; k++)
        for (int j = from[1]; j < to[1]; j++)
            for (int i = from[0]; i < to[0]; i++, count += V) {
                double *point = grid + place(i, j, k);
                memcpy(store ? point : buffer + count, store ? buffer + count : point, sizeof(double) * V);
            }
    return count;
}

/* Fills the ghosts of both axes of ranks. */
static void exchange(double *grid) {
    for (int axis = 0; axis < 2; axis++)
        for (int up = 0; up < 2; up++) {
            int from[3] = {0}, to[3] = {n[0], n[1], n[2]}, move = up ? 1 : -1;
            int next = rank_at(at[0] + (axis == 0) * move, at[1] + (axis == 1) * move);
            int before = rank_at(at[0] - (axis == 0) * move, at[1] - (axis == 1) * move);
            from[axis] = up ? n[axis] - GHOSTS : 0;
            to[axis] = from[axis] + GHOSTS;
            int count = box(grid, from, to, 0);
            MPI_Sendrecv_replace(buffer, count, MPI_DOUBLE, next, 3, before, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            from[axis] = up ? -GHOSTS : n[axis];
            to[axis] = from[axis] + GHOSTS;
            if (before != MPI_PROC_NULL)
                box(grid, from, to, 1);
        }
}

static double square(const double *p) {
    return p[1] * p[1] + p[2] * p[2] + p[3] * p[3];
}

/* The inviscid flux along an axis. */
static void flow(const double *p, int axis, double *out) {
    double speed = p[1 + axis] / p[0], q = 0.5 * square(p) / p[0];
    out[0] = p[1 + axis];
    for (int m = 1; m < 4; m++)
        out[m] = p[m] * speed;
    out[1 + axis] += C2 * (p[4] - q);
    out[4] = (C1 * p[4] - C2 * q) * speed;
}

/* The viscous flux between a point and the next one along an axis. */
static void friction(const double *a, const double *b, int axis, double *out) {
    double squares = 0;
    for (int m = 1; m < 4; m++) {
        double x = a[m] / a[0], y = b[m] / b[0];
        out[m] = t3 * (y - x) * (m == 1 + axis ? 4.0 / 3 : 1);
        squares += y * y - x * x;
        if (m == 1 + axis)
            out[4] = 1.0 / 6 * t3 * (y * y - x * x);
    }
    out[4] += 0.5 * (1 - C1 * 1.4) * t3 * squares + C1 * 1.4 * t3 * (b[4] / b[0] - a[4] / a[0]);
}

/* Adds the change of a point due to its neighbours along one axis. */
static void change(const double *p, int axis, int where, double *out) {
    const double *a = p - stride[axis], *b = p + stride[axis];
    double flow_a[V], flow_b[V], friction_a[V] = {0}, friction_b[V] = {0};
    flow(a, axis, flow_a);
    flow(b, axis, flow_b);
    friction(a, p, axis, friction_a);
    friction(p, b, axis, friction_b);
    for (int m = 0; m < V; m++) {
        double fourth = 6 * p[m];
        if (where == 1 || where == side - 2)
            fourth = 5 * p[m];
        if (where > 1)
            fourth -= 4 * a[m];
        if (where < side - 2)
            fourth -= 4 * b[m];
        if (where > 2)
            fourth += p[m - 2 * stride[axis]];
        if (where < side - 3)
            fourth += p[m + 2 * stride[axis]];
        out[m] += -t2 * (flow_b[m] - flow_a[m]) + D[axis] * t1 * (a[m] - 2 * p[m] + b[m]) + t3 * C34 * (friction_b[m] - friction_a[m]) -
                  DISSIPATION * fourth;
    }
}

/* out = change of a grid - base */
static void right_side(double *grid, const double *base, double *out) {
    exchange(grid);
    INTERIOR(i, j, k) {
        long p = place(i, j, k);
        double sum[V] = {0};
        change(grid + p, 0, first[0] + i, sum);
        change(grid + p, 1, first[1] + j, sum);
        change(grid + p, 2, first[2] + k, sum);
        for (int m = 0; m < V; m++)
            out[p + m] = sum[m] - (base ? base[p + m] : 0);
    }
}

/* Adds factor * (the Jacobian of friction along an axis). */
static void friction_jacobian(const double *p, int axis, double factor, double block[V][V]) {
    double r = 1 / p[0], energy = -C1345 * r * r * p[4];
    for (int m = 1; m < 4; m++) {
        double c = C34 * (m == 1 + axis ? 4.0 / 3 : 1);
        block[m][0] -= factor * c * r * r * p[m];
        block[m][m] += factor * c * r;
        block[4][m] += factor * (c - C1345) * r * r * p[m];
        energy -= (c - C1345) * r * r * r * p[m] * p[m];
    }
    block[4][0] += factor * energy;
    block[4][4] += factor * C1345 * r;
}

/* Adds factor * (the Jacobian of the flow along an axis). */
static void flow_jacobian(const double *p, int axis, double factor, double block[V][V]) {
    int d = 1 + axis;
    double r = 1 / p[0], s = square(p);
    block[0][d] += factor;
    for (int m = 1; m < 4; m++) {
        block[m][0] -= factor * p[m] * p[d] * r * r;
        block[m][m] += factor * p[d] * r;
        block[m][d] += factor * p[m] * r;
        block[d][m] -= factor * C2 * p[m] * r;
        block[4][m] -= factor * C2 * p[m] * p[d] * r * r;
    }
    block[d][0] += factor * C2 * 0.5 * s * r * r;
    block[d][4] += factor * C2;
    block[4][0] += factor * (C2 * s * r - C1 * p[4]) * p[d] * r * r;
    block[4][d] += factor * (C1 * p[4] * r - C2 * 0.5 * s * r * r);
    block[4][4] += factor * C1 * p[d] * r;
}

/* Solves the block of a point for a vector. */
static void solve(const double *p, double *x) {
    double block[V][V] = {{0}};
    for (int axis = 0; axis < 3; axis++)
        friction_jacobian(p, axis, 2 * step * t1, block);
    for (int m = 0; m < V; m++)
        block[m][m] += 1 + 2 * step * t1 * (D[0] + D[1] + D[2]);
    for (int a = 0; a < V; a++)
        for (int b = a + 1; b < V; b++) {
            double factor = block[b][a] / block[a][a];
            for (int c = a + 1; c < V; c++)
                block[b][c] -= factor * block[a][c];
            x[b] -= factor * x[a];
        }
    for (int a = V - 1; a >= 0; a--) {
        for (int b = a + 1; b < V; b++)
            x[a] -= block[a][b] * x[b];
        x[a] /= block[a][a];
    }
}

/* Adds the contributions of the neighbours before (or behind) a point. */
static void neighbours(long p, int side_of, double *sum) {
    for (int axis = 0; axis < 3; axis++) {
        long q = p + side_of * stride[axis];
        double block[V][V] = {{0}};
        flow_jacobian(u + q, axis, side_of * step * t2, block);
        friction_jacobian(u + q, axis, -step * t1, block);
        for (int m = 0; m < V; m++) {
            block[m][m] -= step * t1 * D[axis];
            for (int l = 0; l < V; l++)
                sum[m] += OMEGA * block[m][l] * rsd[q + l];
        }
    }
}

/* Receives the edge of a plane from the previous ranks of the wave, or sends it to the next ones. */
static void edge(int k, int axis, int move, int receive) {
    int from[3] = {0, 0, k}, to[3] = {n[0], n[1], k + 1}, other = receive ? -move : move;
    int peer = rank_at(at[0] + (axis == 0) * other, at[1] + (axis == 1) * other);
    if (peer == MPI_PROC_NULL)
        return;
    int forward = move > 0;
    from[axis] = receive ? (forward ? -1 : n[axis]) : (forward ? n[axis] - 1 : 0);
    to[axis] = from[axis] + 1;
    int count = V * n[1 - axis];
    if (receive) {
        MPI_Recv(buffer, count, MPI_DOUBLE, peer, 4 + axis, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        box(rsd, from, to, 1);
    } else {
        box(rsd, from, to, 0);
        MPI_Send(buffer, count, MPI_DOUBLE, peer, 4 + axis, MPI_COMM_WORLD);
    }
}

/* The lower triangle from the first point to the last (move = 1), or the upper one from the last to the first (-1). */
static void sweep(int move) {
    for (int kk = low(2); kk < high(2); kk++) {
        int k = move > 0 ? kk : side - 1 - kk;
        edge(k, 0, move, 1);
        edge(k, 1, move, 1);
        for (int jj = low(1); jj < high(1); jj++)
            for (int ii = low(0); ii < high(0); ii++) {
                int i = move > 0 ? ii : low(0) + high(0) - 1 - ii, j = move > 0 ? jj : low(1) + high(1) - 1 - jj;
                long p = place(i, j, k);
                double x[V] = {0};
                neighbours(p, -move, x);
                for (int m = 0; m < V && move > 0; m++)
                    x[m] = rsd[p + m] - x[m];
                solve(u + p, x);
                for (int m = 0; m < V; m++)
                    rsd[p + m] = move > 0 ? x[m] : rsd[p + m] - x[m];
            }
        edge(k, 0, move, 0);
        edge(k, 1, move, 0);
    }
}

/* Whether the norms of a vector of the interior equal the published ones. */
static int norms_are(const double *sum, const double *want) {
    double all[V];
    MPI_Allreduce(sum, all, V, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    int right = 1;
    for (int m = 0; m < V; m++)
        right &= fabs(sqrt(all[m] / pow(side - 2, 3)) - want[m]) <= 1e-8 * want[m];
    return right;
}

/* The integral of the pressure over the surface of a box: by the trapezoidal rule, so points at edges of a face count half of those inside. */
static double surface(void) {
    static const int BEGIN[3] = {1, 1, 2};
    int end[3] = {side - 2, side - 3, side - 2};
    double sum = 0, all;
    for (int k = 0; k < n[2]; k++)
        for (int j = 0; j < n[1]; j++)
            for (int i = 0; i < n[0]; i++) {
                int g[3] = {first[0] + i, first[1] + j, first[2] + k}, inside = 1;
                for (int d = 0; d < 3; d++)
                    inside &= g[d] >= BEGIN[d] && g[d] <= end[d];
                const double *p = u + place(i, j, k);
                for (int d = 0; inside && d < 3; d++) {
                    if (g[d] != BEGIN[d] && g[d] != end[d])
                        continue;
                    double weight = 4;
                    for (int e = 0; e < 3; e++)
                        if (e != d && (g[e] == BEGIN[e] || g[e] == end[e]))
                            weight /= 2;
                    sum += weight * C2 * (p[4] - 0.5 * square(p) / p[0]);
                }
            }
    MPI_Allreduce(&sum, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return 0.25 * all / pow(side - 1, 2);
}

static int verify(enum problem problem) {
    double residual[V] = {0}, error[V] = {0}, point[V];
    INTERIOR(i, j, k) {
        long p = place(i, j, k);
        exact(first[0] + i, first[1] + j, first[2] + k, point);
        for (int m = 0; m < V; m++) {
            residual[m] += rsd[p + m] * rsd[p + m];
            error[m] += (point[m] - u[p + m]) * (point[m] - u[p + m]);
        }
    }
    int right = norms_are(residual, PROBLEMS[problem].residual) & norms_are(error, PROBLEMS[problem].error);
    return right && fabs(surface() - PROBLEMS[problem].integral) <= 1e-8 * PROBLEMS[problem].integral;
}

int lu(enum problem problem) {
    side = PROBLEMS[problem].side;
    step = PROBLEMS[problem].step;
    t3 = side - 1;
    t1 = t3 * t3;
    t2 = t3 / 2;
    for (ranks[1] = 1; ranks[1] * ranks[1] * 4 <= size; ranks[1] *= 2)
        ;
    ranks[0] = size / ranks[1];
    if (side / ranks[0] < GHOSTS)
        fail("lu: too many ranks for this grid");
    at[0] = rank % ranks[0];
    at[1] = rank / ranks[0];
    for (int axis = 0; axis < 2; axis++) {
        first[axis] = side * at[axis] / ranks[axis];
        n[axis] = side * (at[axis] + 1) / ranks[axis] - first[axis];
    }
    n[2] = side;
    stride[0] = V;
    stride[1] = stride[0] * (n[0] + 2 * GHOSTS);
    stride[2] = stride[1] * (n[1] + 2 * GHOSTS);
    u = zeros(stride[2] * side, sizeof(double));
    rsd = zeros(stride[2] * side, sizeof(double));
    force = zeros(stride[2] * side, sizeof(double));
    buffer = zeros((size_t)V * GHOSTS * side * (n[0] > n[1] ? n[0] : n[1]), sizeof(double));
    /* The force is such that the exact solution does not change. */
    for (int k = 0; k < n[2]; k++)
        for (int j = 0; j < n[1]; j++)
            for (int i = 0; i < n[0]; i++)
                exact(first[0] + i, first[1] + j, first[2] + k, rsd + place(i, j, k));
    right_side(rsd, NULL, force);
    memset(rsd, 0, sizeof(double) * stride[2] * side);
    set_start();
    right_side(u, force, rsd);
    clock_start();
    for (int turn = 0; turn < PROBLEMS[problem].turns; turn++) {
        INTERIOR(i, j, k)
            for (int m = 0; m < V; m++)
                rsd[place(i, j, k) + m] *= step;
        sweep(1);
        sweep(-1);
        INTERIOR(i, j, k)
            for (int m = 0; m < V; m++)
                u[place(i, j, k) + m] += rsd[place(i, j, k) + m] / (OMEGA * (2 - OMEGA));
        right_side(u, force, rsd);
    }
    clock_stop();
    return verify(problem);
}
