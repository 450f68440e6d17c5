/* SPDX-License-Identifier: Apache-2.0
 * The innermost loops of host copies: rows, and elements that lie apart. */
#ifndef WSYNC_DEVICE_HOST_COPY_ROWS_H
#define WSYNC_DEVICE_HOST_COPY_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/layout/dtype.h"

/* Two dimensions of single elements, or of the pair's inner one alone (outer_count 1). */
typedef struct wsync_host_tile {
    uint64_t inner_count;
    uint64_t outer_count;
    int64_t inner_source_stride;
    int64_t inner_destination_stride;
    int64_t outer_source_stride;
    int64_t outer_destination_stride;
    wsync_transform_t transform;
    wsync_affine_t affine;
} wsync_host_tile_t;

/* Copies bytes.  With `streaming`, long rows bypass the caches: finish with
 * wsync_host_row_fence before telling anyone. */
void wsync_host_row_copy(unsigned char *destination, const unsigned char *source,
                         size_t nbytes, bool streaming);

/* Casts count elements that lie together on both sides; what is computed is a tile. */
void wsync_host_row_cast(unsigned char *destination, const unsigned char *source,
                         size_t count, wsync_transform_t transform, bool streaming);

/* Whether wsync_host_tile_copy moves elements of this size untransformed. */
bool wsync_host_tile_fits(uint64_t item_nbytes);

/* Moves elements one by one, in blocks, so that both sides use whole cache lines. */
void wsync_host_tile_copy(unsigned char *destination, const unsigned char *source,
                          const wsync_host_tile_t *tile, uint64_t item_nbytes);

/* Orders streaming stores before all later stores. */
void wsync_host_row_fence(void);

#endif
