/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_runs.h"

#include <stdlib.h>

enum {
    /* Shorter ones are slower by a copy engine than by a kernel. */
    PINNED_MIN_NBYTES = 64 * 1024,
};

/* The same of runs from one device memory to another.  Some drivers are reported to copy
 * them at half the speed of a kernel: until `python -m benchmarks gpu` has said otherwise,
 * none is long enough. */
static const uint64_t between_devices_min_nbytes = UINT64_MAX;

static bool is_reached(wsync_cuda_kind_t kind)
{
    return kind == WSYNC_CUDA_DEVICE || kind == WSYNC_CUDA_PINNED;
}

static size_t rows_of(const wsync_copy_t *copy)
{
    size_t count = 1;

    for (unsigned d = 0; d < copy->ndim; d++) {
        count *= (size_t)copy->extent[d];
    }
    return count;
}

/* (Pageable memory an engine would copy only while the host waits.) */
size_t wsync_cuda_runs_of(const wsync_copy_t *copy, wsync_cuda_kind_t source,
                          wsync_cuda_kind_t destination)
{
    const bool pinned = source == WSYNC_CUDA_PINNED || destination == WSYNC_CUDA_PINNED;
    const uint64_t least = pinned ? PINNED_MIN_NBYTES : between_devices_min_nbytes;

    if (copy->transform != WSYNC_TRANSFORM_NONE ||
        copy->row_count * copy->source_item_nbytes < least || !is_reached(source) ||
        !is_reached(destination)) {
        return 0;
    }
    return rows_of(copy);
}

wsync_status_t wsync_cuda_runs_init(wsync_cuda_runs_t *runs, size_t capacity,
                                    wsync_error_t *err)
{
    runs->count = 0;
    runs->destinations = calloc(capacity, sizeof(*runs->destinations));
    runs->sources = calloc(capacity, sizeof(*runs->sources));
    runs->sizes = calloc(capacity, sizeof(*runs->sizes));
    if (runs->destinations == NULL || runs->sources == NULL || runs->sizes == NULL) {
        wsync_cuda_runs_fini(runs);
        return wsync_no_memory(err, "calloc");
    }
    return WSYNC_OK;
}

void wsync_cuda_runs_fini(wsync_cuda_runs_t *runs)
{
    free(runs->destinations);
    free(runs->sources);
    free(runs->sizes);
    *runs = (wsync_cuda_runs_t){0};
}

void wsync_cuda_runs_add(wsync_cuda_runs_t *runs, const wsync_copy_t *copy,
                         wsync_cu_ptr_t source, wsync_cu_ptr_t destination)
{
    const size_t count = rows_of(copy);

    for (size_t i = 0; i < count; i++) {
        wsync_cu_ptr_t from = source + copy->source_offset;
        wsync_cu_ptr_t to = destination + copy->destination_offset;
        size_t rest = i;

        for (unsigned d = copy->ndim; d-- > 0;) {
            const wsync_cu_ptr_t index = rest % (size_t)copy->extent[d];

            rest /= (size_t)copy->extent[d];
            from += index * (wsync_cu_ptr_t)copy->source_stride[d];
            to += index * (wsync_cu_ptr_t)copy->destination_stride[d];
        }
        runs->sources[runs->count] = from;
        runs->destinations[runs->count] = to;
        runs->sizes[runs->count] = (size_t)(copy->row_count * copy->source_item_nbytes);
        runs->count++;
    }
}

/* Sources are read in the stream's order: it may wait until they are there. */
static wsync_cu_result_t enqueue_batch(const wsync_cuda_runs_t *runs,
                                       const wsync_cuda_driver_t *driver,
                                       wsync_cu_stream_t stream)
{
    wsync_cu_copy_attributes_t attributes = {.source_order = WSYNC_CU_COPY_ORDER_STREAM,
                                             .flags = WSYNC_CU_COPY_BESIDE_KERNELS};
    size_t start = 0;
    size_t failed = 0;

    return driver->memcpy_batch_async(runs->destinations, runs->sources, runs->sizes,
                                      runs->count, &attributes, &start, 1, &failed, stream);
}

wsync_status_t wsync_cuda_runs_enqueue(const wsync_cuda_runs_t *runs,
                                       const wsync_cuda_device_t *device,
                                       wsync_cu_stream_t stream, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const bool batch = runs->count > 1 && driver->memcpy_batch_async != NULL;
    wsync_cu_result_t code = batch ? enqueue_batch(runs, driver, stream) : WSYNC_CU_SUCCESS;

    for (size_t i = 0; i < runs->count && !batch && code == WSYNC_CU_SUCCESS; i++) {
        code = driver->memcpy_async(runs->destinations[i], runs->sources[i], runs->sizes[i],
                                    stream);
    }
    return wsync_cuda_check(driver, code, batch ? "cuMemcpyBatchAsync" : "cuMemcpyAsync",
                            err, "%zu runs of copies on %s", runs->count, device->label);
}
