/* SPDX-License-Identifier: Apache-2.0
 * Copy lists run by the processor.  Callers have checked the bounds (wsync_copies_check);
 * sources and destinations do not overlap. */
#ifndef WSYNC_DEVICE_HOST_COPY_H
#define WSYNC_DEVICE_HOST_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "core/copy.h"

/* Runs the copies in the calling thread.  The spans are indexed by the copies' buffers. */
void wsync_host_copy_run(const wsync_copy_t *copies, size_t count,
                         const wsync_span_t *sources, const wsync_span_t *destinations);

/* A list as several threads share it.  Its work is a number, about the bytes it writes; any
 * partition of [0, work) into parts runs every element exactly once. */
typedef struct wsync_host_list {
    const wsync_copy_t *copies;
    const wsync_span_t *sources;
    const wsync_span_t *destinations;
    size_t count;
    uint64_t work;
} wsync_host_list_t;

/* Where a thread is in a list; begins as {0} and serves parts in ascending order. */
typedef struct wsync_host_cursor {
    size_t index;
    uint64_t start;
} wsync_host_cursor_t;

wsync_host_list_t wsync_host_list(const wsync_copy_t *copies, size_t count,
                                  const wsync_span_t *sources,
                                  const wsync_span_t *destinations);

/* Runs the part [begin, end) of the list's work. */
void wsync_host_list_run(const wsync_host_list_t *list, uint64_t begin, uint64_t end,
                         wsync_host_cursor_t *cursor);

#endif
