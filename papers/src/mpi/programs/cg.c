/* CG, conjugate gradient (report, section 2.4): the smallest eigenvalue of a sparse matrix by inverse iteration. The matrix is distributed over a grid of ranks; vectors are
 * divided over its columns, and each product is summed along a row and exchanged with one partner. */
#include "kernels.h"
#include <math.h>
#include <stdlib.h>

enum { STEPS = 25 };

static const struct {
    int order, nonzeros, turns;
    double shift, zeta;
} PROBLEMS[] = {
    {1400, 7, 15, 10, 8.5971775078648},
    {7000, 8, 15, 12, 10.362595087124},
    {14000, 11, 15, 20, 17.130235054029},
    {75000, 13, 75, 60, 22.712745482631},
};

static int order, rows, columns, row, column;
/* The local rows and columns of the matrix. */
static int row_count, column_count;
static int *row_start, *index_of;
static double *value;
static double *x, *z, *p, *q, *r, *w, *scratch;

struct element {
    int row, column;
    double value;
};

static int by_place(const void *a, const void *b) {
    const struct element *left = a, *right = b;
    return left->row != right->row ? left->row - right->row : left->column - right->column;
}

/* A sparse vector of random places and values, with 1/2 at one place. Returns the number of its elements. */
static int sparse(int nonzeros, int at, int *places, double *values, char *taken, uint64_t *seed) {
    int power = 1, count = 0;
    while (power < order)
        power *= 2;
    while (count < nonzeros) {
        double number = next_random(seed);
        int place = (int)(next_random(seed) * power);
        if (place >= order || taken[place])
            continue;
        taken[place] = 1;
        places[count] = place;
        values[count++] = number;
    }
    for (int i = 0; i < count; i++)
        taken[places[i]] = 0;
    for (int i = 0; i < count; i++)
        if (places[i] == at) {
            values[i] = 0.5;
            return count;
        }
    places[count] = at;
    values[count] = 0.5;
    return count + 1;
}

/* Makes rows of sorted elements; adds elements at the same place. */
static void compress(struct element *elements, size_t count) {
    qsort(elements, count, sizeof *elements, by_place);
    row_start = zeros(row_count + 1, sizeof(int));
    index_of = zeros(count, sizeof(int));
    value = zeros(count, sizeof(double));
    int at = -1, last_row = -1, last_column = -1;
    for (size_t i = 0; i < count; i++) {
        struct element *e = &elements[i];
        if (e->row != last_row || e->column != last_column) {
            at++;
            index_of[at] = e->column;
            row_start[e->row + 1] = at + 1;
        }
        value[at] += e->value;
        last_row = e->row;
        last_column = e->column;
    }
    for (int i = 0; i < row_count; i++)
        if (row_start[i + 1] < row_start[i])
            row_start[i + 1] = row_start[i];
}

/* A weighted sum of outer products of random sparse vectors, so that the spread of its eigenvalues is known, minus the shift on the diagonal. */
static void make_matrix(enum problem problem) {
    int nonzeros = PROBLEMS[problem].nonzeros;
    int *places = zeros(nonzeros + 1, sizeof(int));
    double *values = zeros(nonzeros + 1, sizeof(double)), weight = 1, ratio = pow(0.1, 1.0 / order);
    char *taken = zeros(order, 1);
    size_t room = (size_t)order * (nonzeros + 1) * (nonzeros + 1) / size * 2 + 4096, count = 0;
    struct element *elements = zeros(room, sizeof *elements);
    uint64_t seed = 314159265;
    next_random(&seed);
    int first_row = row * row_count, first_column = column * column_count;
    for (int outer = 0; outer < order; outer++) {
        int many = sparse(nonzeros, outer, places, values, taken, &seed);
        for (int i = 0; i < many; i++)
            for (int j = 0; j < many; j++) {
                int here = places[j] - first_row, there = places[i] - first_column;
                if (here < 0 || here >= row_count || there < 0 || there >= column_count)
                    continue;
                if (count == room)
                    fail("the matrix is less even than expected");
                double add = values[j] * (values[i] * weight);
                if (places[i] == places[j] && places[i] == outer)
                    add += 0.1 - PROBLEMS[problem].shift;
                elements[count++] = (struct element){here, there, add};
            }
        weight *= ratio;
    }
    compress(elements, count);
    free(elements);
    free(taken);
    free(values);
    free(places);
}

/* The sum over all ranks of a row, and so over all columns. */
static double dot(const double *a, const double *b) {
    double sum = 0, other;
    for (int i = 0; i < column_count; i++)
        sum += a[i] * b[i];
    butterfly(&sum, &other, 1, 1, columns);
    return sum;
}

/* out = A in. Each row of ranks has the sum for its rows of the matrix; the partner has our columns of it. */
static void multiply(const double *in, double *out) {
    for (int i = 0; i < row_count; i++) {
        double sum = 0;
        for (int k = row_start[i]; k < row_start[i + 1]; k++)
            sum += value[k] * in[index_of[k]];
        w[i] = sum;
    }
    butterfly(w, scratch, row_count, 1, columns);
    int wide = columns / rows;
    int partner = column / wide * columns + row * wide + column % wide;
    const double *part = w + column % wide * column_count;
    MPI_Sendrecv(part, column_count, MPI_DOUBLE, partner, 2, out, column_count, MPI_DOUBLE, partner, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* z: a solution of A z = x after 25 steps. */
static void solve(void) {
    for (int i = 0; i < column_count; i++) {
        z[i] = 0;
        r[i] = p[i] = x[i];
    }
    double rho = dot(r, r);
    for (int step = 0; step < STEPS; step++) {
        multiply(p, q);
        double alpha = rho / dot(p, q);
        for (int i = 0; i < column_count; i++) {
            z[i] += alpha * p[i];
            r[i] -= alpha * q[i];
        }
        double before = rho;
        rho = dot(r, r);
        for (int i = 0; i < column_count; i++)
            p[i] = r[i] + rho / before * p[i];
    }
}

int cg(enum problem problem) {
    order = PROBLEMS[problem].order;
    for (rows = 1; rows * rows * 4 <= size; rows *= 2)
        ;
    columns = size / rows;
    if (order % columns)
        fail("cg: the order of the matrix is not a multiple of the columns of ranks");
    row = rank / columns;
    column = rank % columns;
    row_count = order / rows;
    column_count = order / columns;
    make_matrix(problem);
    double **vectors[] = {&x, &z, &p, &q, &r};
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++)
        *vectors[i] = zeros(column_count, sizeof(double));
    w = zeros(row_count, sizeof(double));
    scratch = zeros(row_count, sizeof(double));
    for (int i = 0; i < column_count; i++)
        x[i] = 1;
    double zeta = 0;
    clock_start();
    for (int turn = 0; turn < PROBLEMS[problem].turns; turn++) {
        solve();
        double along = dot(x, z), norm = 1 / sqrt(dot(z, z));
        zeta = PROBLEMS[problem].shift + 1 / along;
        for (int i = 0; i < column_count; i++)
            x[i] = norm * z[i];
    }
    clock_stop();
    return fabs(zeta - PROBLEMS[problem].zeta) <= 1e-10;
}
