/* SPDX-License-Identifier: Apache-2.0
 * Finds copies that write the same byte. */
#ifndef WSYNC_CORE_WRITE_OVERLAP_H
#define WSYNC_CORE_WRITE_OVERLAP_H

#include <stdbool.h>
#include <stddef.h>

#include "core/base/status.h"
#include "core/copy.h"
#include "core/layout/layout.h"

typedef struct wsync_overlap {
    bool found;
    size_t first; /* two copies that write one byte; the same one if it overlaps itself */
    size_t second;
    uint32_t buffer;
    uint64_t offset; /* a byte that both write */
} wsync_overlap_t;

/* Looks for memory that the copies' destinations share.  Exact for any strides.  Allocates
 * a sorted index of the copies, and a bitmap of memory where destinations interleave. */
wsync_status_t wsync_copies_find_overlap(const wsync_copy_t *copies, size_t count,
                                         wsync_overlap_t *overlap, wsync_error_t *err);

/* Checks that the shards lie apart when buffer i lies in span i: spans may share memory.
 * LAYOUT names two tensors that do not; INVALID where there are fewer spans than buffers.
 */
wsync_status_t wsync_layout_check_apart(const wsync_layout_t *layout,
                                        const wsync_span_t *spans, size_t span_count,
                                        wsync_error_t *err);

#endif
