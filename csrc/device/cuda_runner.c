/* SPDX-License-Identifier: Apache-2.0
 * Copies from memory that the device reaches are one launch, and runs for copy engines; the
 * others go through the feed. */
#include "device/cuda_runner.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cuda_runs.h"
#include "device/deadline.h"

enum {
    /* Runs of a batch that leave room in a queue of the device for those of all rounds that
     * the host may be ahead. */
    STEADY_RUNS = 8,
    /* Of the tables that are kept while they may be asked for again: those of plans are as
     * many as plans, those of addresses come with every update whose weights have moved. */
    SEGMENTS_MAX_NBYTES = 256 * 1024 * 1024,
    ADDRESSES_MAX_NBYTES = 16 * 1024 * 1024,
    /* Of a stream that comes to what is to be fed. */
    FEED_MS = 60 * 1000,
    FEED_POLL_NS = 20 * 1000,
};

/* Copies that the device runs by itself. */
typedef struct part {
    uint64_t id; /* of the list of copies, or 0 */
    const wsync_copy_t *copies;
    size_t count;
    wsync_cuda_buffers_t *sources;
    wsync_cuda_buffers_t *destinations;
} part_t;

/* A batch whose memory is known: what the device reads, and what must be fed. */
typedef struct sorted {
    wsync_copy_t *copies; /* owned: those of `direct`; NULL: they are all, nothing is fed */
    wsync_cuda_load_t load;
    part_t direct;
} sorted_t;

/* Of the two streams only the one that may wait for another process has a priority: the
 * greatest, which torch and NCCL do not ask for.  Streams of one priority share queues of
 * the device, and behind a wait nothing of such a queue runs. */
static wsync_status_t make_streams(wsync_cuda_runner_t *self, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = self->device->driver;
    const char *call = "cuCtxGetStreamPriorityRange";
    int least = 0;
    int greatest = 0;
    wsync_cu_result_t code = driver->context_priorities(&least, &greatest);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuStreamCreateWithPriority";
        code = driver->stream_create_with_priority(&self->stream,
                                                   WSYNC_CU_STREAM_NON_BLOCKING, greatest);
    }
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuStreamCreate";
        code = driver->stream_create(&self->uploads, WSYNC_CU_STREAM_NON_BLOCKING);
    }
    return wsync_cuda_check(driver, code, call, err, "a stream of %s", self->device->label);
}

wsync_status_t wsync_cuda_runner_init(wsync_cuda_runner_t *runner,
                                      const wsync_cuda_device_t *device, unsigned threads,
                                      wsync_error_t *err)
{
    wsync_status_t status;

    runner->device = device;
    runner->threads = threads;
    runner->spans.device = device;
    status = make_streams(runner, err);
    runner->segments = (wsync_cuda_tables_t){.device = device, .uploads = runner->uploads};
    runner->pieces = (wsync_cuda_tables_t){.device = device, .uploads = runner->uploads};
    runner->addresses = (wsync_cuda_tables_t){.device = device, .uploads = runner->uploads};
    return status;
}

void wsync_cuda_runner_fini(wsync_cuda_runner_t *runner)
{
    const wsync_cuda_driver_t *driver = runner->device->driver;

    wsync_cuda_pageable_feed_destroy(runner->feed);
    wsync_cuda_spans_fini(&runner->spans);
    free(runner->sources.places);
    free(runner->destinations.places);
    wsync_cuda_tables_clear(&runner->segments);
    wsync_cuda_tables_clear(&runner->pieces);
    wsync_cuda_tables_clear(&runner->addresses);
    if (runner->uploads != NULL) {
        (void)driver->stream_destroy(runner->uploads);
    }
    if (runner->stream != NULL) {
        (void)driver->stream_destroy(runner->stream);
    }
}

bool wsync_cuda_runner_full(const wsync_cuda_runner_t *runner)
{
    return runner->segments.nbytes > SEGMENTS_MAX_NBYTES ||
           runner->pieces.nbytes > SEGMENTS_MAX_NBYTES ||
           runner->addresses.nbytes > ADDRESSES_MAX_NBYTES;
}

void wsync_cuda_runner_trim(wsync_cuda_runner_t *runner)
{
    if (runner->segments.nbytes > SEGMENTS_MAX_NBYTES) {
        wsync_cuda_tables_clear(&runner->segments);
    }
    if (runner->pieces.nbytes > SEGMENTS_MAX_NBYTES) {
        wsync_cuda_tables_clear(&runner->pieces);
    }
    if (runner->addresses.nbytes > ADDRESSES_MAX_NBYTES) {
        wsync_cuda_tables_clear(&runner->addresses);
        runner->sources.table = NULL;
        runner->destinations.table = NULL;
    }
}

void wsync_cuda_runner_settle(wsync_cuda_runner_t *runner)
{
    wsync_cuda_spans_age(&runner->spans);
}

void wsync_cuda_runner_abandon(wsync_cuda_runner_t *runner)
{
    (void)atomic_fetch_add(&runner->abandoned, 1);
}

static wsync_status_t check_call(const wsync_cuda_runner_t *self, wsync_cu_result_t code,
                                 const char *call, wsync_error_t *err)
{
    return wsync_cuda_check(self->device->driver, code, call, err, "copies on %s",
                            self->device->label);
}

/* --- what the device runs --- */

/* The table of the buffers' addresses. */
static wsync_status_t need_addresses(wsync_cuda_runner_t *self,
                                     wsync_cuda_buffers_t *buffers, wsync_error_t *err)
{
    return buffers->table != NULL
               ? WSYNC_OK
               : wsync_cuda_tables_addresses(&self->addresses, buffers->places,
                                             buffers->count, &buffers->table, err);
}

static wsync_status_t launch(wsync_cuda_runner_t *self, const part_t *part,
                             wsync_error_t *err)
{
    const wsync_cuda_table_t *segments = NULL;
    wsync_cu_result_t code;
    wsync_kernel_args_t args;
    void *parameters[] = {&args};
    uint32_t grid;
    wsync_status_t status = wsync_cuda_tables_segments(
        &self->segments, part->id, part->copies, part->count, &segments, err);

    if (status == WSYNC_OK) {
        status = need_addresses(self, part->sources, err);
    }
    if (status == WSYNC_OK) {
        status = need_addresses(self, part->destinations, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    args = (wsync_kernel_args_t){.segments = segments->at,
                                 .tile_starts = segments->at + segments->starts_offset,
                                 .tile_index = segments->at + segments->index_offset,
                                 .sources = part->sources->table->at,
                                 .destinations = part->destinations->table->at,
                                 .first = segments->list.first,
                                 .count = segments->list.count};
    grid = wsync_segments_grid(&segments->list, self->device->processors);
    code = self->device->driver->launch_kernel(atomic_load(&self->device->copy_kernel),
                                               grid, 1, 1, WSYNC_KERNEL_BLOCK, 1, 1, 0,
                                               self->stream, parameters, NULL);
    return check_call(self, code, "cuLaunchKernel", err);
}

static const wsync_cuda_place_t *source_of(const part_t *part, const wsync_copy_t *copy)
{
    return &part->sources->places[copy->source_buffer];
}

static const wsync_cuda_place_t *destination_of(const part_t *part,
                                                const wsync_copy_t *copy)
{
    return &part->destinations->places[copy->destination_buffer];
}

static size_t runs_of(const part_t *part, const wsync_copy_t *copy)
{
    return wsync_cuda_runs_of(copy, source_of(part, copy)->kind,
                              destination_of(part, copy)->kind);
}

/* Launches `kernel_count` of a part's copies, for which there is room in `copies`, and
 * gives the others to the copy engines.  */
static wsync_status_t run_both(wsync_cuda_runner_t *self, const part_t *part,
                               wsync_copy_t *copies, size_t kernel_count,
                               wsync_cuda_runs_t *runs, bool *begun, wsync_error_t *err)
{
    part_t rest = *part;
    wsync_status_t status = WSYNC_OK;

    rest.id = 0;
    rest.copies = copies;
    rest.count = 0;
    for (size_t i = 0; i < part->count; i++) {
        const wsync_copy_t *copy = &part->copies[i];

        if (runs_of(part, copy) == 0) {
            copies[rest.count++] = *copy;
        } else {
            wsync_cuda_runs_add(runs, copy, source_of(part, copy)->at,
                                destination_of(part, copy)->at);
        }
    }
    if (kernel_count > 0) {
        status = launch(self, &rest, err);
    }
    if (status == WSYNC_OK) {
        *begun = true;
        self->runs += runs->count;
        status = wsync_cuda_runs_enqueue(runs, self->device, self->stream, err);
    }
    return status;
}

/* *begun is set as soon as something is enqueued. */
static wsync_status_t run_part(wsync_cuda_runner_t *self, const part_t *part, bool *begun,
                               wsync_error_t *err)
{
    wsync_cuda_runs_t runs = {0};
    wsync_copy_t *copies;
    size_t run_count = 0;
    size_t kernel_count = 0;
    wsync_status_t status;

    if (part->count == 0) {
        return WSYNC_OK;
    }
    for (size_t i = 0; i < part->count; i++) {
        const size_t count = runs_of(part, &part->copies[i]);

        run_count += count;
        kernel_count += count == 0;
    }
    if (run_count == 0) {
        status = launch(self, part, err);
        *begun |= status == WSYNC_OK;
        return status;
    }
    copies = malloc((kernel_count + 1) * sizeof(*copies));
    if (copies == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    status = wsync_cuda_runs_init(&runs, run_count, err);
    if (status == WSYNC_OK) {
        status = run_both(self, part, copies, kernel_count, &runs, begun, err);
    }
    wsync_cuda_runs_fini(&runs);
    free(copies);
    return status;
}

/* --- whose memory it is --- */

/* A list of spans of a batch. */
typedef struct list {
    uint64_t id;
    bool resident;
    const wsync_span_t *spans;
    size_t count;
} list_t;

/* Begins to name the buffers of a batch: what is known of them holds until the stream was
 * seen idle, and longer for what the device need not be asked about. */
static wsync_status_t name_buffers(const wsync_cuda_runner_t *self, const list_t *list,
                                   wsync_cuda_buffers_t *buffers, wsync_error_t *err)
{
    const unsigned age = atomic_load(&self->spans.age);
    const wsync_cuda_kind_t kind = list->resident ? WSYNC_CUDA_DEVICE : WSYNC_CUDA_UNKNOWN;
    wsync_cuda_place_t *places;

    if (list->id != 0 && buffers->id == list->id &&
        (buffers->age == age || list->resident) && buffers->count == list->count) {
        return WSYNC_OK;
    }
    buffers->id = 0;
    places =
        realloc(buffers->places, (list->count > 0 ? list->count : 1) * sizeof(*places));
    if (places == NULL) {
        return wsync_no_memory(err, "realloc");
    }
    /* Those that no copy names are part of the tables all the same. */
    for (size_t i = 0; i < list->count; i++) {
        places[i] = (wsync_cuda_place_t){(uintptr_t)list->spans[i].data, kind};
    }
    *buffers = (wsync_cuda_buffers_t){list->id, age, places, list->count, NULL};
    return WSYNC_OK;
}

/* Asks for a place that is not known yet. */
static wsync_status_t resolve(wsync_cuda_runner_t *self, const wsync_span_t *span,
                              wsync_cuda_buffers_t *buffers, uint32_t index,
                              wsync_error_t *err)
{
    wsync_cuda_place_t *place = &buffers->places[index];
    const wsync_cu_ptr_t before = place->at;
    wsync_status_t status = WSYNC_OK;

    if (place->kind == WSYNC_CUDA_UNKNOWN) {
        status = wsync_cuda_spans_find(&self->spans, span, place, err);
    }
    if (place->at != before) {
        buffers->table = NULL;
    }
    return status;
}

/* The answer is not kept: the caller may register that memory now. */
static wsync_status_t fail_destination(wsync_cuda_runner_t *self, const wsync_span_t *span,
                                       uint32_t buffer, wsync_error_t *err)
{
    wsync_cuda_spans_age(&self->spans);
    return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_stream_copy",
                      "destination buffer %" PRIu32 ", %" PRIu64 " bytes at %#" PRIxPTR
                      ", is pageable memory of the host, which %s cannot access",
                      buffer, span->nbytes, (uintptr_t)span->data, self->device->label);
}

/* Begins to tell direct copies from others: those before copy `index` are direct. */
static wsync_status_t split(const wsync_batch_t *batch, size_t index, sorted_t *sorted,
                            wsync_error_t *err)
{
    wsync_copy_t *copies = malloc(batch->count * sizeof(*copies));

    if (copies == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    memcpy(copies, batch->copies, index * sizeof(*copies));
    sorted->copies = copies;
    sorted->direct.id = 0;
    sorted->direct.copies = copies;
    sorted->direct.count = index;
    return WSYNC_OK;
}

static wsync_status_t sort_copy(wsync_cuda_runner_t *self, const wsync_batch_t *batch,
                                size_t index, sorted_t *sorted, wsync_error_t *err)
{
    const wsync_copy_t *copy = &batch->copies[index];
    const wsync_cuda_place_t *source = &self->sources.places[copy->source_buffer];
    const wsync_cuda_place_t *destination =
        &self->destinations.places[copy->destination_buffer];
    wsync_status_t status;

    status = resolve(self, &batch->sources[copy->source_buffer], &self->sources,
                     copy->source_buffer, err);
    if (status == WSYNC_OK) {
        status = resolve(self, &batch->destinations[copy->destination_buffer],
                         &self->destinations, copy->destination_buffer, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (destination->kind == WSYNC_CUDA_PAGEABLE && !self->device->pageable) {
        return fail_destination(self, &batch->destinations[copy->destination_buffer],
                                copy->destination_buffer, err);
    }
    if (source->kind == WSYNC_CUDA_PAGEABLE && !self->device->pageable) {
        if (sorted->copies == NULL) {
            status = split(batch, index, sorted, err);
        }
        return status == WSYNC_OK ? wsync_cuda_load_append(&sorted->load, copy, err)
                                  : status;
    }
    if (sorted->copies != NULL) {
        sorted->copies[sorted->direct.count++] = *copy;
    }
    return WSYNC_OK;
}

static wsync_status_t sort(wsync_cuda_runner_t *self, const wsync_batch_t *batch,
                           sorted_t *sorted, wsync_error_t *err)
{
    const list_t sources = {batch->sources_id, batch->sources_resident, batch->sources,
                            batch->source_count};
    const list_t destinations = {batch->destinations_id, batch->destinations_resident,
                                 batch->destinations, batch->destination_count};
    wsync_status_t status = name_buffers(self, &sources, &self->sources, err);

    if (status == WSYNC_OK) {
        status = name_buffers(self, &destinations, &self->destinations, err);
    }
    sorted->direct = (part_t){batch->copies_id, batch->copies, batch->count, &self->sources,
                              &self->destinations};
    if (batch->sources_resident && batch->destinations_resident) {
        return status;
    }
    for (size_t i = 0; i < batch->count && status == WSYNC_OK; i++) {
        status = sort_copy(self, batch, i, sorted, err);
    }
    return status;
}

/* --- what is fed --- */

/* Waits until the device has done what the stream was given: until then it may read the
 * slot, and the sources are not to be read. */
static wsync_status_t await_stream(const wsync_cuda_runner_t *self, unsigned abandoned,
                                   wsync_error_t *err)
{
    const uint64_t deadline = wsync_deadline_ns(FEED_MS);
    const struct timespec pause = {.tv_nsec = FEED_POLL_NS};
    wsync_cu_result_t code = self->device->driver->stream_query(self->stream);

    while (code == WSYNC_CU_NOT_READY && wsync_clock_ns() < deadline) {
        (void)nanosleep(&pause, NULL);
        code = self->device->driver->stream_query(self->stream);
    }
    if (atomic_load(&self->abandoned) != abandoned) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_stream_copy",
                          "the stream was abandoned while it was given copies");
    }
    return code == WSYNC_CU_NOT_READY
               ? wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "wsync_stream_copy",
                            "%s has not reached copies of pageable memory in %d s",
                            self->device->label, FEED_MS / 1000)
               : check_call(self, code, "cuStreamQuery", err);
}

static wsync_status_t run_load(wsync_cuda_runner_t *self, const wsync_batch_t *batch,
                               const sorted_t *sorted, unsigned abandoned, bool *begun,
                               wsync_error_t *err)
{
    const wsync_cuda_load_t *load = &sorted->load;
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < load->end_count && status == WSYNC_OK; i++) {
        const size_t first = i > 0 ? load->ends[i - 1] : 0;
        wsync_cuda_place_t slot;
        wsync_cuda_buffers_t slots = {.places = &slot, .count = 1};
        part_t part = sorted->direct;

        part.id = 0;
        part.copies = load->from_slot + first;
        part.count = load->ends[i] - first;
        part.sources = &slots;
        status = await_stream(self, abandoned, err);
        if (status == WSYNC_OK) {
            status = wsync_cuda_pageable_feed_fill(self->feed, load->to_slot + first,
                                                   part.count, batch->sources,
                                                   batch->source_count, &slot, err);
        }
        if (status == WSYNC_OK) {
            status = run_part(self, &part, begun, err);
        }
    }
    return status;
}

wsync_status_t wsync_cuda_runner_run(wsync_cuda_runner_t *runner,
                                     const wsync_batch_t *batch, bool *begun,
                                     wsync_error_t *err)
{
    sorted_t sorted = {0};
    const unsigned abandoned = atomic_load(&runner->abandoned);
    const uint64_t uploaded = runner->segments.uploaded + runner->addresses.uploaded;
    wsync_status_t status = sort(runner, batch, &sorted, err);

    *begun = false;
    runner->runs = 0;
    if (status == WSYNC_OK && sorted.copies != NULL && runner->feed == NULL) {
        status = wsync_cuda_pageable_feed_create(runner->device, runner->threads,
                                                 &runner->feed, err);
    }
    if (status == WSYNC_OK) {
        status = run_part(runner, &sorted.direct, begun, err);
    }
    if (status == WSYNC_OK) {
        status = run_load(runner, batch, &sorted, abandoned, begun, err);
    }
    /* Uploads may share the device's queues with what waits in the stream, many runs fill
     * them, and a stream that has been fed is waited for: all may keep the host until those
     * waits are over. */
    atomic_store(&runner->steady,
                 runner->feed == NULL && runner->runs <= STEADY_RUNS &&
                     runner->segments.uploaded + runner->addresses.uploaded == uploaded);
    wsync_cuda_load_fini(&sorted.load);
    free(sorted.copies);
    return status;
}
