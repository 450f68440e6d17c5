/* SPDX-License-Identifier: Apache-2.0
 * A batch of copies, given to a stream of the driver; cuda_quantise.h has those of pieces.
 */
#ifndef WSYNC_DEVICE_CUDA_RUNNER_H
#define WSYNC_DEVICE_CUDA_RUNNER_H

#include "device/cuda_pageable_feed.h"
#include "device/cuda_tables.h"

/* What is known of a list of spans, as long as batches name the same one. */
typedef struct wsync_cuda_buffers {
    uint64_t id;                     /* of the list; 0: it is asked for each time */
    unsigned age;                    /* of the spans, when it was asked for */
    wsync_cuda_place_t *places;      /* owned */
    size_t count;                    /* of places */
    const wsync_cuda_table_t *table; /* of their addresses; NULL: it has to be found */
} wsync_cuda_buffers_t;

/* What batches of one stream need and leave behind.  Calls are made in the context and one
 * at a time, but for settle and abandon. */
typedef struct wsync_cuda_runner {
    const wsync_cuda_device_t *device;
    wsync_cu_stream_t stream;  /* owned; of the greatest priority */
    unsigned threads;          /* of the host, to read memory that the device cannot */
    atomic_uint abandoned;     /* how often the stream was */
    wsync_cu_stream_t uploads; /* owned */
    wsync_cuda_tables_t segments;
    wsync_cuda_tables_t pieces;
    wsync_cuda_tables_t addresses; /* anew whenever a buffer has moved */
    wsync_cuda_spans_t spans;
    wsync_cuda_buffers_t sources;
    wsync_cuda_buffers_t destinations;
    size_t runs;        /* of the last batch, for copy engines */
    atomic_bool steady; /* it was neither fed nor long, nor in need of new tables */
    wsync_cuda_pageable_feed_t *feed; /* owned; NULL until it is needed */
} wsync_cuda_runner_t;

wsync_status_t wsync_cuda_runner_init(wsync_cuda_runner_t *runner,
                                      const wsync_cuda_device_t *device, unsigned threads,
                                      wsync_error_t *err);
/* Call when the device uses none of it any more.  Allowed after an init that failed. */
void wsync_cuda_runner_fini(wsync_cuda_runner_t *runner);

/* Enqueues a batch that has passed wsync_copies_check; returns without waiting for its
 * data, unless some of it has to be fed: for that the stream comes to this point first.
 * UNSUPPORTED for destinations that the device does not reach.  If *begun after an error,
 * part of the batch may be enqueued, and the stream must be abandoned. */
wsync_status_t wsync_cuda_runner_run(wsync_cuda_runner_t *runner,
                                     const wsync_batch_t *batch, bool *begun,
                                     wsync_error_t *err);

/* Whether more is kept than should be; trim gives that back, when no batch is under way. */
bool wsync_cuda_runner_full(const wsync_cuda_runner_t *runner);
void wsync_cuda_runner_trim(wsync_cuda_runner_t *runner);
/* The stream was seen idle: memory it was lent may have gone back.  From any thread. */
void wsync_cuda_runner_settle(wsync_cuda_runner_t *runner);
/* Nothing more of a batch that is being fed is enqueued.  From any thread. */
void wsync_cuda_runner_abandon(wsync_cuda_runner_t *runner);

#endif
