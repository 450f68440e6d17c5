/* SPDX-License-Identifier: Apache-2.0
 * One strided copy between two buffers.  Buffers are indices into tables that are bound
 * when the copy runs, so a copy list stays valid when memory moves. */
#ifndef WSYNC_CORE_COPY_H
#define WSYNC_CORE_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/layout/box.h"
#include "core/layout/dtype.h"

enum { WSYNC_COPY_NDIM = 4 };

/* row_count elements are contiguous on both sides; the outer dimensions (slowest first)
 * repeat the row.  All strides and offsets are bytes.  A fully transposed copy has
 * row_count 1. */
typedef struct wsync_copy {
    uint64_t source_offset;
    uint64_t destination_offset;
    uint32_t source_buffer;
    uint32_t destination_buffer;
    uint64_t row_count; /* elements in a row */
    uint8_t source_item_nbytes;
    uint8_t destination_item_nbytes;
    uint8_t transform; /* wsync_transform_t; with NONE both item sizes are equal */
    uint8_t ndim;      /* outer dimensions, 0..WSYNC_COPY_NDIM */
    int64_t extent[WSYNC_COPY_NDIM];
    int64_t source_stride[WSYNC_COPY_NDIM];
    int64_t destination_stride[WSYNC_COPY_NDIM];
    wsync_affine_t affine; /* with NONE nothing is computed */
} wsync_copy_t;

/* Memory that a buffer index stands for while a copy list runs. */
typedef struct wsync_span {
    void *data;
    uint64_t nbytes;
} wsync_span_t;

/* Growable array of copies: initialise with {0}, release with wsync_copies_fini. */
typedef struct wsync_copies {
    wsync_copy_t *items;
    size_t count;
    size_t capacity;
} wsync_copies_t;

void wsync_copies_fini(wsync_copies_t *copies);

/* One side of a box copy: where the box's first element lies and how to step from it. */
typedef struct wsync_place {
    uint32_t buffer;
    wsync_dtype_t dtype;
    uint64_t offset;
    int64_t stride[WSYNC_MAX_NDIM]; /* bytes */
    wsync_affine_t affine;          /* of a source */
} wsync_place_t;

/* Appends the copies that move `extent` elements from one place to the other, dimensions
 * coalesced; more than WSYNC_COPY_NDIM outer dimensions become several copies.  Appends
 * nothing for an empty extent.  UNSUPPORTED for a dtype pair without a transform. */
wsync_status_t wsync_copies_append(wsync_copies_t *copies,
                                   const int64_t extent[WSYNC_MAX_NDIM],
                                   const wsync_place_t *source,
                                   const wsync_place_t *destination, wsync_error_t *err);

/* Checks that every byte a copy touches lies inside its spans.  INVALID names the copy's
 * index, the buffer and both numbers. */
wsync_status_t wsync_copies_check(const wsync_copy_t *copies, size_t count,
                                  const wsync_span_t *sources, size_t source_count,
                                  const wsync_span_t *destinations,
                                  size_t destination_count, wsync_error_t *err);

/* Bytes written by the copies. */
uint64_t wsync_copies_nbytes(const wsync_copy_t *copies, size_t count);

#endif
