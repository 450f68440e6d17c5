/* SPDX-License-Identifier: Apache-2.0
 * What a layout is made of, for the files that build one.  Others use layout.h. */
#ifndef WSYNC_CORE_LAYOUT_LAYOUT_PARTS_H
#define WSYNC_CORE_LAYOUT_LAYOUT_PARTS_H

#include <stdbool.h>

#include "core/base/names.h"
#include "core/layout/layout.h"

struct wsync_layout {
    wsync_names_t names; /* index = tensor */
    wsync_names_t origins;
    wsync_tensor_t *tensors;
    wsync_shard_t *shards;   /* by tensor */
    size_t *first;           /* first shard of every tensor, and the end */
    uint32_t *buffer_counts; /* of every rank */
    uint32_t rank_count;
    uint64_t nbytes;
};

/* A tensor that a builder knows; borrowed until the next one is added. */
const wsync_tensor_t *wsync_layout_builder_peek(const wsync_layout_builder_t *builder,
                                                uint32_t index);

enum { WSYNC_SHAPE_TEXT_NBYTES = 24 * WSYNC_MAX_NDIM };

/* "[2, 3]" for messages; returns `text`. */
const char *wsync_shape_text(char text[WSYNC_SHAPE_TEXT_NBYTES], unsigned ndim,
                             const int64_t *shape);

/* Same dtype, shape and group. */
bool wsync_tensor_equal(const wsync_tensor_t *a, const wsync_tensor_t *b);

/* LAYOUT: says how two descriptions of one tensor differ and who gave them. */
wsync_status_t wsync_tensor_differ(const wsync_tensor_t *a, const char *a_owner,
                                   const wsync_tensor_t *b, const char *b_owner,
                                   wsync_error_t *err);

/* Checks that tensors of both descriptions can be copied from one to the other: LAYOUT if
 * their shapes differ, UNSUPPORTED if there is no conversion. */
wsync_status_t wsync_tensor_check_copy(const wsync_tensor_t *from, const wsync_tensor_t *to,
                                       const char *origin, wsync_error_t *err);

#endif
