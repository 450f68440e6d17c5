/* SPDX-License-Identifier: Apache-2.0
 * Runs of bytes for the GPU's copy engines: between host memory that is pinned and the
 * device they are as fast as the link, which kernels are not, and leave the multiprocessors
 * to others. */
#ifndef WSYNC_DEVICE_CUDA_RUNS_H
#define WSYNC_DEVICE_CUDA_RUNS_H

#include "device/cuda_spans.h"

/* Begins as {0}. */
typedef struct wsync_cuda_runs {
    wsync_cu_ptr_t *destinations; /* owned */
    wsync_cu_ptr_t *sources;      /* owned */
    size_t *sizes;                /* owned */
    size_t count;
} wsync_cuda_runs_t;

/* How many runs a copy between such memory is; 0: it is for a kernel. */
size_t wsync_cuda_runs_of(const wsync_copy_t *copy, wsync_cuda_kind_t source,
                          wsync_cuda_kind_t destination);

/* Room for `capacity` runs. */
wsync_status_t wsync_cuda_runs_init(wsync_cuda_runs_t *runs, size_t capacity,
                                    wsync_error_t *err);
void wsync_cuda_runs_fini(wsync_cuda_runs_t *runs);
/* Adds those of a copy, for which there is room, from and to buffers at these addresses. */
void wsync_cuda_runs_add(wsync_cuda_runs_t *runs, const wsync_copy_t *copy,
                         wsync_cu_ptr_t source, wsync_cu_ptr_t destination);

/* Enqueues the runs, in no order among themselves; in the context.  They are free to go
 * when this returns.  After an error some of them may be enqueued. */
wsync_status_t wsync_cuda_runs_enqueue(const wsync_cuda_runs_t *runs,
                                       const wsync_cuda_device_t *device,
                                       wsync_cu_stream_t stream, wsync_error_t *err);

#endif
