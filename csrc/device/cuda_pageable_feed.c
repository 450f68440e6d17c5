/* SPDX-License-Identifier: Apache-2.0
 * Two words order a stream of the host and one of the device: the device (or the caller, if
 * it cannot) waits for `filled`, which the host's stream records, and calls a function of
 * the host that counts `reached` up when it begins with a load and when it has emptied a
 * slot. */
#include "device/cuda_pageable_feed.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "core/base/array.h"
#include "device/cuda_events.h"

enum {
    SLOT_ALIGNMENT = 64,
    WORDS_NBYTES = 4096,
    REACHED_OFFSET = 0,
    FILLED_OFFSET = 64,
    FILL_MS = 10 * 60 * 1000, /* for a host that waits: what it followed comes first */
};

struct wsync_cuda_pageable_feed {
    const wsync_cuda_device_t *device;
    wsync_cu_stream_t stream;
    wsync_stream_t *host; /* owned, of the host */
    unsigned char *slots; /* owned; registered at `at`; NULL: none */
    wsync_cu_ptr_t at;
    wsync_memory_t *words; /* owned, control memory of the device */
    unsigned slot_count;
    wsync_span_t spans[WSYNC_CUDA_FEED_SLOTS];
    uint64_t reached;        /* counts that were enqueued */
    uint64_t begun;          /* `reached` of the present load */
    _Atomic uint64_t filled; /* slots that were given to the host */
};

/* Of all feeds of the process. */
static atomic_uint all_slots;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

/* --- loads --- */

void wsync_cuda_load_destroy(wsync_cuda_load_t *load)
{
    if (load != NULL) {
        free(load->to_slot);
        free(load->from_slot);
        free(load->ends);
        free(load);
    }
}

/* What crosses is the smaller side of a cast. */
static uint64_t slot_item_nbytes(const wsync_copy_t *copy)
{
    return copy->destination_item_nbytes < copy->source_item_nbytes
               ? copy->destination_item_nbytes
               : copy->source_item_nbytes;
}

/* Indices of a dimension in a slot: what is repeated lies there once. */
static uint64_t slot_extent(const wsync_copy_t *copy, unsigned dim)
{
    return copy->source_stride[dim] == 0 ? 1 : (uint64_t)copy->extent[dim];
}

/* Bytes in a slot of one index of dimension `dim`; of ndim: of one element. */
static uint64_t unit_nbytes(const wsync_copy_t *copy, unsigned dim)
{
    uint64_t nbytes = slot_item_nbytes(copy);

    if (dim < copy->ndim) {
        nbytes *= copy->row_count;
    }
    for (unsigned d = dim + 1; d < copy->ndim; d++) {
        nbytes *= slot_extent(copy, d);
    }
    return nbytes;
}

/* Splits the first `count` indices of a dimension off; of ndim: elements of the row. */
static wsync_copy_t take(wsync_copy_t *rest, unsigned dim, uint64_t count)
{
    wsync_copy_t piece = *rest;

    if (dim < rest->ndim) {
        piece.extent[dim] = (int64_t)count;
        rest->extent[dim] -= (int64_t)count;
        rest->source_offset += count * (uint64_t)rest->source_stride[dim];
        rest->destination_offset += count * (uint64_t)rest->destination_stride[dim];
    } else {
        piece.row_count = count;
        rest->row_count -= count;
        rest->source_offset += count * rest->source_item_nbytes;
        rest->destination_offset += count * rest->destination_item_nbytes;
    }
    return piece;
}

static wsync_status_t fail_memory(const wsync_cuda_load_t *load, wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "realloc",
                      "no memory for %zu copies of pageable memory", load->count + 1);
}

/* Begins a slot. */
static wsync_status_t add_slot(wsync_cuda_load_t *load, wsync_error_t *err)
{
    size_t *ends = wsync_array_reserve(load->ends, &load->end_capacity, load->end_count + 1,
                                       sizeof(*ends));

    if (ends == NULL) {
        return fail_memory(load, err);
    }
    load->ends = ends;
    ends[load->end_count++] = load->count;
    load->used = 0;
    return WSYNC_OK;
}

/* Adds a piece that fits to the last slot, which is there. */
static wsync_status_t add_piece(wsync_cuda_load_t *load, const wsync_copy_t *piece,
                                wsync_error_t *err)
{
    const uint64_t item_nbytes = slot_item_nbytes(piece);
    const bool narrows = item_nbytes < piece->source_item_nbytes;
    uint64_t stride = item_nbytes * piece->row_count;
    wsync_copy_t to = *piece;
    wsync_copy_t from = *piece;
    wsync_copy_t *plain = narrows ? &from : &to;
    wsync_copy_t *copies = wsync_array_reserve(load->to_slot, &load->to_capacity,
                                               load->count + 1, sizeof(*copies));

    if (copies == NULL) {
        return fail_memory(load, err);
    }
    load->to_slot = copies;
    copies = wsync_array_reserve(load->from_slot, &load->from_capacity, load->count + 1,
                                 sizeof(*copies));
    if (copies == NULL) {
        return fail_memory(load, err);
    }
    load->from_slot = copies;
    to.destination_buffer = 0;
    to.destination_offset = load->used;
    to.destination_item_nbytes = (uint8_t)item_nbytes;
    from.source_buffer = 0;
    from.source_offset = load->used;
    from.source_item_nbytes = (uint8_t)item_nbytes;
    plain->transform = WSYNC_TRANSFORM_NONE;
    plain->affine = (wsync_affine_t){0};
    for (unsigned d = piece->ndim; d-- > 0;) {
        to.extent[d] = (int64_t)slot_extent(piece, d);
        to.destination_stride[d] = (int64_t)stride;
        from.source_stride[d] = piece->source_stride[d] == 0 ? 0 : (int64_t)stride;
        stride *= slot_extent(piece, d);
    }
    load->to_slot[load->count] = to;
    load->from_slot[load->count] = from;
    load->count++;
    load->ends[load->end_count - 1] = load->count;
    load->used =
        (load->used + stride + SLOT_ALIGNMENT - 1) & ~(uint64_t)(SLOT_ALIGNMENT - 1);
    return WSYNC_OK;
}

/* Puts as much of `rest` into slots as goes without cutting across its outermost index:
 * false if one of them is left in `inner` that no slot holds. */
static bool cut_outermost(wsync_cuda_load_t *load, wsync_copy_t *rest, wsync_copy_t *inner,
                          wsync_status_t *status, wsync_error_t *err)
{
    while (*status == WSYNC_OK) {
        const uint64_t room =
            load->end_count > 0 && load->used < WSYNC_CUDA_FEED_SLOT_NBYTES
                ? WSYNC_CUDA_FEED_SLOT_NBYTES - load->used
                : 0;
        unsigned dim = 0;
        uint64_t unit;
        uint64_t count;
        uint64_t left;

        while (dim < rest->ndim && slot_extent(rest, dim) == 1) {
            dim++;
        }
        left = dim < rest->ndim ? (uint64_t)rest->extent[dim] : rest->row_count;
        if (left == 0) {
            return true;
        }
        unit = unit_nbytes(rest, dim);
        count = room / unit < left ? room / unit : left;
        if (count > 0) {
            const wsync_copy_t piece = take(rest, dim, count);

            *status = add_piece(load, &piece, err);
        } else if (unit <= WSYNC_CUDA_FEED_SLOT_NBYTES) {
            *status = add_slot(load, err);
        } else {
            *inner = take(rest, dim, 1);
            return false;
        }
    }
    return true;
}

wsync_status_t wsync_cuda_load_append(wsync_cuda_load_t *load, const wsync_copy_t *copy,
                                      wsync_error_t *err)
{
    /* Each is one index of an outer dimension of the one before. */
    wsync_copy_t rests[WSYNC_COPY_NDIM + 2] = {*copy};
    unsigned depth = 1;
    wsync_status_t status = WSYNC_OK;

    while (depth > 0 && status == WSYNC_OK) {
        if (cut_outermost(load, &rests[depth - 1], &rests[depth], &status, err)) {
            depth--;
        } else {
            depth++;
        }
    }
    return status;
}

/* --- the ring --- */

static wsync_event_t device_word(const wsync_cuda_pageable_feed_t *feed, uint64_t offset)
{
    return (wsync_event_t){.memory = feed->words, .offset = offset};
}

static wsync_event_t host_word(const wsync_cuda_pageable_feed_t *feed, uint64_t offset)
{
    const wsync_cuda_memory_t *words = (const wsync_cuda_memory_t *)(void *)feed->words;

    return (wsync_event_t){.memory = words->host, .offset = offset};
}

static wsync_status_t check(const wsync_cuda_pageable_feed_t *feed, wsync_cu_result_t code,
                            const char *call, wsync_error_t *err)
{
    return wsync_cuda_check(feed->device->driver, code, call, err,
                            "copying pageable memory to %s", feed->device->label);
}

unsigned wsync_cuda_pageable_feed_slots(void)
{
    return atomic_load(&all_slots);
}

/* Counts the slots of one more ring. */
static unsigned claim_slots(void)
{
    unsigned before = atomic_load(&all_slots);
    unsigned count;

    do {
        count = before + WSYNC_CUDA_FEED_SLOTS <= WSYNC_CUDA_FEED_MAX_SLOTS
                    ? WSYNC_CUDA_FEED_SLOTS
                    : WSYNC_CUDA_FEED_LEAST_SLOTS;
    } while (!atomic_compare_exchange_weak(&all_slots, &before, before + count));
    return count;
}

static uint64_t slots_nbytes(const wsync_cuda_pageable_feed_t *feed)
{
    return (uint64_t)feed->slot_count * WSYNC_CUDA_FEED_SLOT_NBYTES;
}

/* The slots, and where the device sees them.  Shared, so that a fork moves none of their
 * pages; they get memory when they are pinned. */
static wsync_status_t make_slots(wsync_cuda_pageable_feed_t *feed, wsync_error_t *err)
{
    const uint64_t nbytes = slots_nbytes(feed);
    void *data = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (data == MAP_FAILED) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, errno, "mmap",
                          "no memory for a ring of %" PRIu64 " bytes for pageable memory",
                          nbytes);
    }
    feed->slots = data;
    for (size_t i = 0; i < feed->slot_count; i++) {
        feed->spans[i] = (wsync_span_t){feed->slots + i * WSYNC_CUDA_FEED_SLOT_NBYTES,
                                        WSYNC_CUDA_FEED_SLOT_NBYTES};
    }
    return wsync_cuda_register(feed->device, data, nbytes, "a ring for pageable memory",
                               &feed->at, err);
}

wsync_status_t wsync_cuda_pageable_feed_create(const wsync_cuda_device_t *device,
                                               wsync_cu_stream_t stream, unsigned threads,
                                               wsync_cuda_pageable_feed_t **feed,
                                               wsync_error_t *err)
{
    wsync_cuda_pageable_feed_t *made = calloc(1, sizeof(*made));
    wsync_status_t status;

    if (made == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "calloc",
                          "no memory for a ring of pinned memory");
    }
    made->device = device;
    made->stream = stream;
    made->slot_count = claim_slots();
    status = wsync_control_create(&device->base, WORDS_NBYTES, &made->words, err);
    if (status == WSYNC_OK) {
        status = make_slots(made, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(wsync_device_host(), threads, &made->host, err);
    }
    if (status != WSYNC_OK) {
        wsync_cuda_pageable_feed_destroy(made);
        return status;
    }
    *feed = made;
    return WSYNC_OK;
}

void wsync_cuda_pageable_feed_destroy(wsync_cuda_pageable_feed_t *feed)
{
    if (feed == NULL) {
        return;
    }
    (void)wsync_stream_destroy(feed->host);
    if (feed->at != 0) {
        wsync_cuda_unregister(feed->device, feed->slots);
    }
    if (feed->slots != NULL) {
        (void)munmap(feed->slots, (size_t)slots_nbytes(feed));
    }
    wsync_memory_destroy(feed->words);
    (void)atomic_fetch_sub(&all_slots, feed->slot_count);
    free(feed);
}

void wsync_cuda_pageable_feed_abandon(wsync_cuda_pageable_feed_t *feed)
{
    (void)wsync_stream_abandon(feed->host, 0);
    wsync_event_set(device_word(feed, FILLED_OFFSET), atomic_load(&feed->filled));
}

/* Runs in the stream's order, on a thread of the driver. */
static void count_up(void *argument)
{
    const wsync_event_t reached = host_word(argument, REACHED_OFFSET);

    wsync_event_set(reached, wsync_event_query(reached) + 1);
}

wsync_status_t wsync_cuda_pageable_feed_drain(wsync_cuda_pageable_feed_t *feed,
                                              wsync_error_t *err)
{
    const wsync_status_t status =
        check(feed, feed->device->driver->launch_host(feed->stream, count_up, feed),
              "cuLaunchHostFunc", err);

    feed->reached += status == WSYNC_OK;
    return status;
}

wsync_status_t wsync_cuda_pageable_feed_begin(wsync_cuda_pageable_feed_t *feed,
                                              wsync_error_t *err)
{
    const wsync_status_t status = wsync_cuda_pageable_feed_drain(feed, err);

    feed->begun = feed->reached;
    return status;
}

wsync_status_t wsync_cuda_pageable_feed_fill(wsync_cuda_pageable_feed_t *feed,
                                             const wsync_cuda_load_t *load, size_t index,
                                             const wsync_span_t *sources,
                                             size_t source_count, wsync_cuda_place_t *place,
                                             wsync_error_t *err)
{
    const uint64_t number = atomic_fetch_add(&feed->filled, 1) + 1;
    const size_t slot = number % feed->slot_count;
    const size_t first = index > 0 ? load->ends[index - 1] : 0;
    /* The slot was emptied before the load began, or by this load. */
    const uint64_t free_at =
        index < feed->slot_count ? feed->begun : feed->begun + index - feed->slot_count + 1;
    wsync_status_t status =
        wsync_stream_wait(feed->host, host_word(feed, REACHED_OFFSET), free_at, err);

    if (status == WSYNC_OK) {
        status = wsync_stream_copy_list(feed->host, load->to_slot + first,
                                        load->ends[index] - first, sources, source_count,
                                        &feed->spans[slot], 1, err);
    }
    if (status == WSYNC_OK) {
        status =
            wsync_stream_record(feed->host, host_word(feed, FILLED_OFFSET), number, err);
    }
    if (status == WSYNC_OK) {
        const wsync_event_t filled = device_word(feed, FILLED_OFFSET);

        status = feed->device->words ? wsync_cuda_events_wait(feed->device, feed->stream,
                                                              filled, number, err)
                                     : wsync_event_wait(filled, number, FILL_MS, err);
    }
    *place = (wsync_cuda_place_t){feed->at + slot * WSYNC_CUDA_FEED_SLOT_NBYTES,
                                  WSYNC_CUDA_PINNED};
    return status;
}
