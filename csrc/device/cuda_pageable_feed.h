/* SPDX-License-Identifier: Apache-2.0
 * Copies from memory that the device cannot read: worker threads of the host gather it into
 * slots of pinned memory, in the stream's order, and the stream copies it on from there. */
#ifndef WSYNC_DEVICE_CUDA_PAGEABLE_FEED_H
#define WSYNC_DEVICE_CUDA_PAGEABLE_FEED_H

#include "device/cuda_spans.h"

enum {
    WSYNC_CUDA_FEED_SLOT_NBYTES = 8 * 1024 * 1024,
    /* Of the ring of one stream, in slots. */
    WSYNC_CUDA_FEED_SLOTS = 8,
    WSYNC_CUDA_FEED_LEAST_SLOTS = 2,
    /* Of the rings of all streams of the process: further ones have the least number. */
    WSYNC_CUDA_FEED_MAX_SLOTS = 64,
};

/* A list of copies, cut into what one slot holds after the other.  Begins as {0}; index i
 * of both lists is the same box, whose elements lie together in the slot. */
typedef struct wsync_cuda_load {
    wsync_copy_t *to_slot;   /* buffers: those of the sources, and 0 */
    wsync_copy_t *from_slot; /* buffers: 0, and those of the destinations */
    size_t count;
    size_t to_capacity;
    size_t from_capacity;
    size_t *ends; /* of each slot: its copies are those before and behind the last end */
    size_t end_count;
    size_t end_capacity;
    uint64_t used; /* bytes of the last slot */
} wsync_cuda_load_t;

/* Frees what the load holds, and the load. */
void wsync_cuda_load_destroy(wsync_cuda_load_t *load);
wsync_status_t wsync_cuda_load_append(wsync_cuda_load_t *load, const wsync_copy_t *copy,
                                      wsync_error_t *err);

/* The ring of one stream.  Calls are made in the context and one at a time, but for
 * abandon. */
typedef struct wsync_cuda_pageable_feed wsync_cuda_pageable_feed_t;

/* `threads` fill the slots of a stream. */
wsync_status_t wsync_cuda_pageable_feed_create(const wsync_cuda_device_t *device,
                                               wsync_cu_stream_t stream, unsigned threads,
                                               wsync_cuda_pageable_feed_t **feed,
                                               wsync_error_t *err);
/* Slots of all rings of the process: so much memory is pinned for them. */
unsigned wsync_cuda_pageable_feed_slots(void);
/* Call when the stream has passed all that was enqueued, or never will.  NULL: a no-op. */
void wsync_cuda_pageable_feed_destroy(wsync_cuda_pageable_feed_t *feed);

/* Enqueues, for every load: begin, and for each of its slots fill, what reads the slot at
 * *place, and drain.  The threads read the sources when the stream has come to begin. After
 * an error the stream must be abandoned: part of it is enqueued. */
wsync_status_t wsync_cuda_pageable_feed_begin(wsync_cuda_pageable_feed_t *feed,
                                              wsync_error_t *err);
wsync_status_t wsync_cuda_pageable_feed_fill(wsync_cuda_pageable_feed_t *feed,
                                             const wsync_cuda_load_t *load, size_t index,
                                             const wsync_span_t *sources,
                                             size_t source_count, wsync_cuda_place_t *place,
                                             wsync_error_t *err);
wsync_status_t wsync_cuda_pageable_feed_drain(wsync_cuda_pageable_feed_t *feed,
                                              wsync_error_t *err);

/* Fills nothing more of what was enqueued, and lets the stream go on without.  When it
 * returns no thread reads a source or a load.  From any thread. */
void wsync_cuda_pageable_feed_abandon(wsync_cuda_pageable_feed_t *feed);

#endif
