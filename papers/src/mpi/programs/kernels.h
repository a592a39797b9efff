/* The common part of the kernels of `weft-papers mpi`. They are written from the specification of the NAS Parallel Benchmarks (report RNR-94-007) and verify against its
 * published values. */
#ifndef KERNELS_H
#define KERNELS_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

enum problem { S, W, A, B };

extern int rank, size;

/* The report's generator: x' = 5^13 x modulo 2^46. */
#define MULTIPLIER 1220703125ull

/* The next number, between 0 and 1. */
double next_random(uint64_t *x);
/* The seed after `count` numbers. */
uint64_t skip_random(uint64_t seed, uint64_t count);

/* Zeroed memory; ends the job if there is none. */
void *zeros(size_t count, size_t each);
/* Ends the job. */
void fail(const char *why);

/* A barrier, then the clock of the kernel and of communication begin at 0. */
void clock_start(void);
/* Ends the timing of the kernel; verification is not timed. */
void clock_stop(void);

/* Adds vectors of all ranks of a group of 2^k, `rank ^ stride * 1, 2, 4...`: each with its partner in turn. */
void butterfly(double *sum, double *scratch, int count, int stride, int members);

/* The kernels. Each returns whether its result verifies, on every rank. */
int ep(enum problem problem);
int is(enum problem problem);
int cg(enum problem problem);
int mg(enum problem problem);
int lu(enum problem problem);
int radix(enum problem problem);
int smg(enum problem problem);

#endif
