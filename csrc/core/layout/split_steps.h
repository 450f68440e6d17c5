/* SPDX-License-Identifier: Apache-2.0
 * Layouts with steps as layouts of boxes alone, for those who intersect boxes.  A dimension
 * in which some shard goes in steps of u becomes two in all of them, of size / u and of u:
 * every other column of [4, 6] is a box of [4, 3, 2]. */
#ifndef WSYNC_CORE_LAYOUT_SPLIT_STEPS_H
#define WSYNC_CORE_LAYOUT_SPLIT_STEPS_H

#include "core/base/names.h"
#include "core/layout/layout.h"

/* A tensor with such dimensions. */
typedef struct wsync_split_tensor {
    int64_t shape[WSYNC_MAX_NDIM];
    uint32_t ndim;
    uint32_t unit[WSYNC_MAX_NDIM]; /* u, or 1 */
} wsync_split_tensor_t;

/* Initialise with {0}, release with wsync_split_fini. */
typedef struct wsync_split {
    wsync_names_t names; /* index = tensor */
    WSYNC_ARRAY(wsync_split_tensor_t) tensors;
    wsync_layout_t **layouts; /* NULL where it is the one that was given */
    size_t count;
} wsync_split_t;

/* Splits the steps of layouts (borrowed) together.  Tensors keep their numbers.
 * UNSUPPORTED where shards go along a dimension in different steps, or in one that is no
 * divisor of its size, or where a tensor comes to have too many dimensions; the message
 * names them. */
wsync_status_t wsync_split_steps(const wsync_layout_t *const *layouts, size_t count,
                                 wsync_split_t *split, wsync_error_t *err);

/* Adds a tensor of a split layout to a builder as it was before, and its shard there: in
 * steps again.  NULL: it has none. */
wsync_status_t wsync_split_restore(const wsync_split_t *split, const wsync_tensor_t *tensor,
                                   const wsync_shard_t *shard,
                                   wsync_layout_builder_t *builder, wsync_error_t *err);

/* Destroys the layouts and keeps what restores. */
void wsync_split_drop(wsync_split_t *split);
void wsync_split_fini(wsync_split_t *split);

#endif
