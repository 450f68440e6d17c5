/* SPDX-License-Identifier: Apache-2.0
 * Copies from memory that the device cannot read: threads of the host gather it in a slot
 * of pinned memory, from which the stream copies it on.  There is one slot, so that the
 * caller waits for the device before each but the first. */
#ifndef WSYNC_DEVICE_CUDA_PAGEABLE_FEED_H
#define WSYNC_DEVICE_CUDA_PAGEABLE_FEED_H

#include "device/cuda_spans.h"

enum { WSYNC_CUDA_FEED_SLOT_NBYTES = 8 * 1024 * 1024 };

/* A list of copies, cut into what the slot holds after the other.  Begins as {0}; index i
 * of both lists is the same box, whose elements lie together in the slot. */
typedef struct wsync_cuda_load {
    wsync_copy_t *to_slot;   /* buffers: those of the sources, and 0 */
    wsync_copy_t *from_slot; /* buffers: 0, and those of the destinations */
    size_t count;
    size_t to_capacity;
    size_t from_capacity;
    size_t *ends; /* of each filling: its copies are those before and behind the last end */
    size_t end_count;
    size_t end_capacity;
    uint64_t used; /* bytes of the last filling */
} wsync_cuda_load_t;

void wsync_cuda_load_fini(wsync_cuda_load_t *load);
wsync_status_t wsync_cuda_load_append(wsync_cuda_load_t *load, const wsync_copy_t *copy,
                                      wsync_error_t *err);

/* The slot of one stream.  Calls are made in the context and one at a time. */
typedef struct wsync_cuda_pageable_feed wsync_cuda_pageable_feed_t;

/* `threads` fill the slot. */
wsync_status_t wsync_cuda_pageable_feed_create(const wsync_cuda_device_t *device,
                                               unsigned threads,
                                               wsync_cuda_pageable_feed_t **feed,
                                               wsync_error_t *err);
/* Call when no device reads the slot any more.  NULL: a no-op. */
void wsync_cuda_pageable_feed_destroy(wsync_cuda_pageable_feed_t *feed);

/* Runs copies to the slot, which no device may still read, and says where the device reads
 * it.  When it returns, no thread reads the sources. */
wsync_status_t wsync_cuda_pageable_feed_fill(wsync_cuda_pageable_feed_t *feed,
                                             const wsync_copy_t *copies, size_t count,
                                             const wsync_span_t *sources,
                                             size_t source_count, wsync_cuda_place_t *place,
                                             wsync_error_t *err);

#endif
