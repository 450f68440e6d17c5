/* SPDX-License-Identifier: Apache-2.0
 * Layouts: the shards of all tensors on a set of ranks, and where their bytes lie.
 * Immutable once built. */
#ifndef WSYNC_CORE_LAYOUT_LAYOUT_H
#define WSYNC_CORE_LAYOUT_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/copy.h"
#include "core/layout/box.h"
#include "core/layout/dtype.h"

/* Ranks are below this: tables of ranks stay small, whatever a peer sends. */
enum { WSYNC_MAX_RANKS = 1 << 16 };

/* A weight under its Hugging Face checkpoint name. */
typedef struct wsync_tensor {
    const char *name;
    wsync_dtype_t dtype;
    uint32_t ndim;  /* 0..WSYNC_MAX_NDIM; 0 is a scalar of one element */
    uint32_t group; /* tensors of one group are delivered in one round; 0: none */
    int64_t shape[WSYNC_MAX_NDIM]; /* a layout's tensors have 1 at ndim and beyond */
} wsync_tensor_t;

/* A box of a tensor and where its elements lie.  `origin` indexes the layout's origin
 * names: the trainer parameter that the box is part of (copies of one origin are replicas;
 * overlapping boxes of different origins are an error).  Along an axis the box may take
 * every step-th index of the tensor alone: start, start + step, ... */
typedef struct wsync_shard {
    uint32_t tensor;
    uint32_t rank;
    uint32_t buffer;
    uint32_t origin;
    uint64_t offset; /* bytes from the start of the buffer to the box's first element */
    wsync_box_t box;
    uint32_t step[WSYNC_MAX_NDIM];  /* 0 is taken as 1 */
    int64_t stride[WSYNC_MAX_NDIM]; /* bytes; 0 at ndim and beyond */
    wsync_affine_t affine;          /* what the tensor's elements are computed with */
} wsync_shard_t;

/* An injection from a box of one tensor (the unsharded trainer parameter) into another
 * (the Hugging Face tensor), axis by axis: target index start[i] + j * step[i] comes from
 * source index source_start[axis[i]] + j.  Source axes that no target axis names are fixed
 * at source_start; a target axis with axis[i] == -1 has extent 1. */
typedef struct wsync_map {
    wsync_box_t target;
    int64_t source_start[WSYNC_MAX_NDIM];
    uint32_t step[WSYNC_MAX_NDIM]; /* 0 is taken as 1 */
    int8_t axis[WSYNC_MAX_NDIM];
    uint8_t target_ndim;
    uint8_t source_ndim;
    wsync_affine_t affine;
} wsync_map_t;

typedef struct wsync_layout wsync_layout_t;
typedef struct wsync_layout_builder wsync_layout_builder_t;

wsync_status_t wsync_layout_builder_create(wsync_layout_builder_t **builder,
                                           wsync_error_t *err);
void wsync_layout_builder_destroy(wsync_layout_builder_t *builder);

/* Finds or adds a tensor (the name is copied).  LAYOUT if it is known with another dtype,
 * shape or group: the message names it and both values. */
wsync_status_t wsync_layout_builder_tensor(wsync_layout_builder_t *builder,
                                           const wsync_tensor_t *tensor, uint32_t *index,
                                           wsync_error_t *err);

/* Finds or adds an origin name (copied). */
wsync_status_t wsync_layout_builder_origin(wsync_layout_builder_t *builder,
                                           const char *name, uint32_t *index,
                                           wsync_error_t *err);

/* Adds a shard (copied).  INVALID if its tensor or origin is unknown, its rank is not below
 * WSYNC_MAX_RANKS, its box is not inside the tensor, its bytes reach beyond 2**63 or what
 * it computes is not finite; UNSUPPORTED if nothing is computed in its dtype.  Empty boxes
 * are dropped. */
wsync_status_t wsync_layout_builder_shard(wsync_layout_builder_t *builder,
                                          const wsync_shard_t *shard, wsync_error_t *err);

/* Composes: `region` is a box of the source parameter (in full, unsharded coordinates)
 * whose first element lies at region->offset with region->stride; adds the shard of `map`'s
 * target that this region holds, if they meet.  region->tensor is the map's target tensor.
 * *added (NULL allowed) tells how many elements were added. */
wsync_status_t wsync_layout_builder_compose(wsync_layout_builder_t *builder,
                                            const wsync_shard_t *region,
                                            const wsync_map_t *map, uint64_t *added,
                                            wsync_error_t *err);

/* Moves the builder's content into an immutable layout, shards sorted by tensor (order of
 * addition otherwise).  The builder is empty afterwards, also on failure. */
wsync_status_t wsync_layout_builder_finish(wsync_layout_builder_t *builder,
                                           wsync_layout_t **layout, wsync_error_t *err);

/* Union of layouts (borrowed), tensors in the order of first appearance.  LAYOUT where two
 * disagree about a tensor; the message names the tensor and the two ranks. */
wsync_status_t wsync_layout_merge(const wsync_layout_t *const *layouts, size_t count,
                                  wsync_layout_t **merged, wsync_error_t *err);

void wsync_layout_destroy(wsync_layout_t *layout);

/* Everything below is borrowed from the layout and lives as long as it does. */
size_t wsync_layout_tensor_count(const wsync_layout_t *layout);
const wsync_tensor_t *wsync_layout_tensor(const wsync_layout_t *layout, size_t index);
/* Index of a name, or SIZE_MAX. */
size_t wsync_layout_find(const wsync_layout_t *layout, const char *name);
/* Where a part of a shard of the layout lies. */
wsync_place_t wsync_layout_place(const wsync_layout_t *layout, const wsync_shard_t *shard,
                                 const wsync_box_t *part);
/* All shards of one tensor, contiguous; NULL where there are none. */
const wsync_shard_t *wsync_layout_shards(const wsync_layout_t *layout, size_t tensor,
                                         size_t *count);
size_t wsync_layout_shard_count(const wsync_layout_t *layout);
const char *wsync_layout_origin(const wsync_layout_t *layout, uint32_t origin);
size_t wsync_layout_origin_count(const wsync_layout_t *layout);
/* One more than the largest rank of a shard. */
uint32_t wsync_layout_rank_count(const wsync_layout_t *layout);
/* One more than the largest buffer index that `rank` uses. */
uint32_t wsync_layout_buffer_count(const wsync_layout_t *layout, uint32_t rank);
/* Bytes of all tensors, each counted once and whole. */
uint64_t wsync_layout_nbytes(const wsync_layout_t *layout);
/* Bytes of all shards, replicas counted each time; UINT64_MAX if they are more. */
uint64_t wsync_layout_shard_nbytes(const wsync_layout_t *layout);

#endif
