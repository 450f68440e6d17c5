/* SPDX-License-Identifier: Apache-2.0
 * One launch for either pass; where blocks are larger than what a thread looks at, one more
 * that finds their amaxes, in memory of the stream's own. */
#include "device/cuda_quantise.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/quantise/piece_check.h"

enum { WHAT_NBYTES = 288 };

/* What a batch names, as the device sees it. */
typedef struct places {
    wsync_cuda_place_t *sources; /* owned */
    wsync_cuda_place_t image;
    wsync_cuda_place_t amaxes;
} places_t;

static wsync_status_t check_call(const wsync_cuda_runner_t *self, wsync_cu_result_t code,
                                 const char *call, wsync_error_t *err)
{
    return wsync_cuda_check(self->device->driver, code, call, err, "quantising on %s",
                            self->device->label);
}

/* Finds where a span lies; one that is empty lies anywhere. */
static wsync_status_t find_place(wsync_cuda_runner_t *self, const wsync_span_t *span,
                                 const char *what, wsync_cuda_place_t *place,
                                 wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    *place = (wsync_cuda_place_t){(uintptr_t)span->data, WSYNC_CUDA_DEVICE};
    if (span->nbytes > 0) {
        status = wsync_cuda_spans_find(&self->spans, span, place, err);
    }
    if (status == WSYNC_OK && place->kind == WSYNC_CUDA_PAGEABLE &&
        !self->device->pageable) {
        /* The answer is not kept: the caller may register that memory now. */
        wsync_cuda_spans_age(&self->spans);
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_stream_quantise",
                          "%s, %" PRIu64 " bytes at %#" PRIxPTR
                          ", is pageable memory of the host, which %s cannot access",
                          what, span->nbytes, (uintptr_t)span->data, self->device->label);
    }
    return status;
}

static wsync_status_t find_sources(wsync_cuda_runner_t *self,
                                   const wsync_quantise_batch_t *batch,
                                   wsync_cuda_place_t *places, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    /* Those that no piece names are part of the table all the same. */
    for (size_t i = 0; i < batch->source_count; i++) {
        places[i] =
            (wsync_cuda_place_t){(uintptr_t)batch->sources[i].data, WSYNC_CUDA_UNKNOWN};
    }
    for (size_t i = 0; i < batch->count && status == WSYNC_OK; i++) {
        const uint32_t buffer = batch->pieces[i].source_buffer;
        char what[WHAT_NBYTES];

        if (!wsync_quantise_empty(&batch->pieces[i]) &&
            places[buffer].kind == WSYNC_CUDA_UNKNOWN) {
            (void)snprintf(what, sizeof(what), "%.256s: buffer %" PRIu32,
                           batch->pieces[i].tensor, buffer);
            status = find_place(self, &batch->sources[buffer], what, &places[buffer], err);
        }
    }
    return status;
}

static wsync_status_t find_places(wsync_cuda_runner_t *self,
                                  const wsync_quantise_batch_t *batch, places_t *places,
                                  wsync_error_t *err)
{
    const size_t count = batch->source_count > 0 ? batch->source_count : 1;
    wsync_status_t status;

    places->sources = calloc(count, sizeof(*places->sources));
    if (places->sources == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    status = find_sources(self, batch, places->sources, err);
    if (status == WSYNC_OK) {
        status = find_place(self, &batch->image, "the image", &places->image, err);
    }
    if (status == WSYNC_OK) {
        status =
            find_place(self, &batch->amaxes, "the table of amaxes", &places->amaxes, err);
    }
    return status;
}

static wsync_status_t launch(wsync_cuda_runner_t *self, const wsync_cuda_table_t *table,
                             const wsync_quantise_args_t *args, bool *begun,
                             wsync_error_t *err)
{
    const wsync_cuda_device_t *device = self->device;
    const wsync_quantise_list_t *list = &table->lists.of[args->mode];
    wsync_quantise_args_t own = *args;
    void *parameters[] = {&own};
    wsync_cu_result_t code;

    if (list->thread_count == 0) {
        return WSYNC_OK;
    }
    own.first = list->first;
    own.count = list->count;
    code = device->driver->launch_kernel(
        atomic_load(&device->quantise_kernel), wsync_quantise_grid(list), 1, 1,
        WSYNC_QUANTISE_BLOCK, 1, 1, 0, self->stream, parameters, NULL);
    *begun |= code == WSYNC_CU_SUCCESS;
    return check_call(self, code, "cuLaunchKernel", err);
}

/* Amaxes of blocks that the caller's table does not have. */
static wsync_status_t launch_scratch(wsync_cuda_runner_t *self,
                                     const wsync_cuda_table_t *table,
                                     const wsync_quantise_args_t *args, bool *begun,
                                     wsync_error_t *err)
{
    const uint64_t nbytes = table->lists.scratch_count * sizeof(float);
    wsync_quantise_args_t own = *args;
    wsync_cu_result_t code;

    if (nbytes == 0) {
        return WSYNC_OK;
    }
    code =
        self->device->driver->memset_async(args->scratch, 0, (size_t)nbytes, self->stream);
    if (code != WSYNC_CU_SUCCESS) {
        return check_call(self, code, "cuMemsetD8Async", err);
    }
    *begun = true;
    own.mode = WSYNC_QUANTISE_MODE_SCRATCH;
    return launch(self, table, &own, begun, err);
}

static wsync_status_t run(wsync_cuda_runner_t *self, const wsync_quantise_batch_t *batch,
                          const places_t *places, bool *begun, wsync_error_t *err)
{
    const bool codes = batch->pass == WSYNC_QUANTISE_CODES;
    const wsync_cuda_table_t *sources = NULL;
    const wsync_cuda_table_t *table = NULL;
    wsync_quantise_args_t args;
    wsync_status_t status =
        wsync_cuda_tables_pieces(&self->pieces, batch->pieces, batch->count, &table, err);

    if (status != WSYNC_OK || table->at == 0) {
        return status; /* nothing to do: there are no elements */
    }
    status = wsync_cuda_tables_addresses(&self->addresses, places->sources,
                                         batch->source_count, &sources, err);
    if (status != WSYNC_OK) {
        return status;
    }
    args = (wsync_quantise_args_t){
        .tasks = table->at,
        .thread_starts = table->at + table->starts_offset,
        .sources = sources->at,
        .image = places->image.at,
        .table = places->amaxes.at,
        .scratch = table->at + table->scratch_offset,
        .mode = codes ? WSYNC_QUANTISE_MODE_CODES : WSYNC_QUANTISE_MODE_TABLE};
    if (codes) {
        status = launch_scratch(self, table, &args, begun, err);
    }
    return status == WSYNC_OK ? launch(self, table, &args, begun, err) : status;
}

wsync_status_t wsync_cuda_quantise(wsync_cuda_runner_t *runner,
                                   const wsync_quantise_batch_t *batch, bool *begun,
                                   wsync_error_t *err)
{
    const uint64_t uploaded = runner->pieces.uploaded + runner->addresses.uploaded;
    places_t places = {0};
    wsync_status_t status;

    *begun = false;
    if (batch->count == 0) {
        return WSYNC_OK;
    }
    status = find_places(runner, batch, &places, err);
    if (status == WSYNC_OK) {
        status = run(runner, batch, &places, begun, err);
    }
    atomic_store(&runner->steady,
                 runner->pieces.uploaded + runner->addresses.uploaded == uploaded);
    free(places.sources);
    return status;
}
