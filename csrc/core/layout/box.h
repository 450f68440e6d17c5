/* SPDX-License-Identifier: Apache-2.0
 * Axis-aligned boxes of a tensor's index space. */
#ifndef WSYNC_CORE_LAYOUT_BOX_H
#define WSYNC_CORE_LAYOUT_BOX_H

#include <stdbool.h>
#include <stdint.h>

enum { WSYNC_MAX_NDIM = 6 };

/* A box of an ndim-dimensional tensor; entries at ndim and beyond are start 0, extent 1,
 * so that every box can be treated as having WSYNC_MAX_NDIM dimensions. */
typedef struct wsync_box {
    int64_t start[WSYNC_MAX_NDIM];
    int64_t extent[WSYNC_MAX_NDIM];
} wsync_box_t;

/* The box that covers a whole tensor. */
wsync_box_t wsync_box_whole(unsigned ndim, const int64_t *shape);

/* Number of elements; 0 if any extent is 0. */
uint64_t wsync_box_count(const wsync_box_t *box);

bool wsync_box_equal(const wsync_box_t *a, const wsync_box_t *b);

/* Writes the common part and returns true, or returns false (and leaves *out alone) if the
 * boxes share no element. */
bool wsync_box_intersect(const wsync_box_t *a, const wsync_box_t *b, wsync_box_t *out);

/* Splits `a` minus `hole` (a sub-box of `a`) into at most 2 * WSYNC_MAX_NDIM disjoint
 * boxes; returns how many were written. */
unsigned wsync_box_subtract(const wsync_box_t *a, const wsync_box_t *hole,
                            wsync_box_t out[2 * WSYNC_MAX_NDIM]);

#endif
