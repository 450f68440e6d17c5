/* SPDX-License-Identifier: Apache-2.0
 * Copies as the copy kernel walks them.  The segments of all lists of a plan make one
 * table, which is uploaded once; a launch names one list of it. */
#ifndef WSYNC_DEVICE_KERNEL_SEGMENTS_H
#define WSYNC_DEVICE_KERNEL_SEGMENTS_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/copy.h"
#include "device/kernel_table.h"

/* Growable: initialise with {0}, release with wsync_segments_fini.  What is uploaded are
 * `count` items and, unless that is 0, count + 1 tile_starts and index_count of tile_index.
 */
typedef struct wsync_segments {
    wsync_segment_t *items;
    uint32_t *tile_starts;
    uint32_t *tile_index;
    size_t count;
    size_t index_count;
    size_t item_capacity;
    size_t start_capacity;
    size_t index_capacity;
} wsync_segments_t;

/* The part of a table that one launch runs. */
typedef struct wsync_segment_list {
    uint32_t first; /* segments */
    uint32_t count;
    uint32_t tile_count;
} wsync_segment_list_t;

void wsync_segments_fini(wsync_segments_t *segments);

/* Appends a list of copies, which are as wsync_copies_check wants them; empty ones and
 * their lists become nothing.  On error the table is as it was.  INVALID for a copy that is
 * none, or a table of 2^31 tiles and more. */
wsync_status_t wsync_segments_append(wsync_segments_t *segments, const wsync_copy_t *copies,
                                     size_t count, wsync_segment_list_t *list,
                                     wsync_error_t *err);

/* What the kernels divide by: 1 and more, below 2^31. */
wsync_divisor_t wsync_divisor(uint32_t value);

/* Blocks of WSYNC_KERNEL_BLOCK threads for a launch of the list: as many as stay resident
 * on the device's multiprocessors, or fewer if there are fewer tiles.  0: nothing to
 * launch. */
uint32_t wsync_segments_grid(const wsync_segment_list_t *list, uint32_t multiprocessors);

#endif
