/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_spans.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"

enum {
    MIN_CAPACITY = 256,
    /* Buffers that move from update to update leave their old answers behind. */
    MAX_COUNT = 1 << 20,
};

typedef struct wsync_cuda_known {
    uintptr_t data;
    uint64_t nbytes; /* 0: nothing is known here */
    wsync_cuda_place_t place;
    unsigned age;
} known_t;

/* Of a device's memory: from where to where, as long as the driver's answer holds. */
typedef struct wsync_cuda_range {
    uintptr_t begin;
    uintptr_t end;
} range_t;

/* What the driver says of one address.  It writes what it takes to be large enough: a
 * boolean, of whatever size, is read as a number. */
typedef struct answer {
    unsigned type; /* 0: it does not know the address */
    wsync_cu_ptr_t at;
    unsigned long long buffer;
    wsync_cu_ptr_t begin; /* of the allocation, or the mapping, that it is in */
    uint64_t nbytes;
    uint64_t managed;
    uint64_t mapped;
} answer_t;

static wsync_status_t ask(const wsync_cuda_device_t *device, uintptr_t address,
                          answer_t *answer, wsync_error_t *err)
{
    int attributes[] = {WSYNC_CU_POINTER_TYPE,         WSYNC_CU_POINTER_DEVICE_ADDRESS,
                        WSYNC_CU_POINTER_BUFFER,       WSYNC_CU_POINTER_RANGE_START,
                        WSYNC_CU_POINTER_RANGE_NBYTES, WSYNC_CU_POINTER_MANAGED,
                        WSYNC_CU_POINTER_MAPPED};
    answer_t made = {0};
    void *fields[] = {&made.type,   &made.at,      &made.buffer, &made.begin,
                      &made.nbytes, &made.managed, &made.mapped};
    const wsync_cu_result_t code = device->driver->pointer_attributes(
        sizeof(attributes) / sizeof(attributes[0]), attributes, fields, address);

    if (code == WSYNC_CU_INVALID_VALUE) {
        made = (answer_t){0};
    } else if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_check(device->driver, code, "cuPointerGetAttributes", err,
                                "memory at %#" PRIxPTR, address);
    }
    *answer = made;
    return WSYNC_OK;
}

static bool is_device(const answer_t *answer)
{
    return answer->managed != 0 ||
           (answer->type != 0 && answer->type != WSYNC_CU_MEMORY_HOST);
}

/* Whether a device has memory at both ends of a span, of which `first` is the answer for
 * the first byte.  *range is all that the driver says it of. */
static wsync_status_t look_at_device(const wsync_cuda_device_t *device,
                                     const wsync_span_t *span, const answer_t *first,
                                     bool *found, range_t *range, wsync_error_t *err)
{
    const uintptr_t data = (uintptr_t)span->data;
    answer_t last = *first;
    range_t made = {data, data + span->nbytes};
    wsync_status_t status = WSYNC_OK;

    if (first->begin <= data && span->nbytes <= first->nbytes &&
        data - first->begin <= first->nbytes - span->nbytes) {
        made = (range_t){first->begin, first->begin + first->nbytes};
    } else {
        status = ask(device, data + span->nbytes - 1, &last, err);
    }
    *found = is_device(first) && is_device(&last) && first->mapped != 0 && last.mapped != 0;
    *range = made;
    return status;
}

static wsync_status_t fail_unmapped(const wsync_cuda_device_t *device,
                                    const wsync_span_t *span, wsync_error_t *err)
{
    return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_stream_copy",
                      "%" PRIu64 " bytes at %#" PRIxPTR
                      ": no memory of the GPU lies there (GPU %d, %s), as when an "
                      "allocator has paused and not resumed",
                      span->nbytes, (uintptr_t)span->data, device->base.ordinal,
                      device->info.name);
}

/* Host memory counts as pinned if one registration holds all of it: what a device reaches
 * without one (HMM) has no buffer. */
static wsync_status_t classify(const wsync_cuda_device_t *device, const wsync_span_t *span,
                               wsync_cuda_place_t *place, range_t *range,
                               wsync_error_t *err)
{
    const uintptr_t data = (uintptr_t)span->data;
    wsync_cuda_place_t made = {.at = data, .kind = WSYNC_CUDA_PAGEABLE};
    answer_t first = {0};
    answer_t last = {0};
    bool found = false;
    wsync_status_t status = ask(device, data, &first, err);

    if (status == WSYNC_OK && is_device(&first)) {
        made.kind = WSYNC_CUDA_DEVICE;
        status = look_at_device(device, span, &first, &found, range, err);
        if (status == WSYNC_OK && !found) {
            status = fail_unmapped(device, span, err);
        }
    } else if (status == WSYNC_OK && first.type == WSYNC_CU_MEMORY_HOST &&
               first.buffer != 0) {
        status = ask(device, data + span->nbytes - 1, &last, err);
        if (status == WSYNC_OK && last.type == first.type && last.buffer == first.buffer &&
            first.at != 0 && last.at - first.at == span->nbytes - 1) {
            made = (wsync_cuda_place_t){.at = first.at, .kind = WSYNC_CUDA_PINNED};
        }
    }
    if (status == WSYNC_OK) {
        *place = made;
    }
    return status;
}

/* --- ranges of a device --- */

/* The first range that ends beyond an address. */
static size_t range_after(const range_t *ranges, size_t count, uintptr_t address)
{
    size_t low = 0;

    while (low < count) {
        const size_t middle = low + (count - low) / 2;

        if (ranges[middle].end > address) {
            count = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static bool in_ranges(const wsync_cuda_ranges_t *ranges, const wsync_span_t *span)
{
    const uintptr_t data = (uintptr_t)span->data;
    const size_t at = range_after(ranges->items, ranges->count, data);

    return at < ranges->count && ranges->items[at].begin <= data &&
           span->nbytes <= ranges->items[at].end - data;
}

/* Those that overlap it are the same memory, or memory that is there no more. */
static wsync_status_t note_range(wsync_cuda_ranges_t *ranges, const range_t *range,
                                 wsync_error_t *err)
{
    const size_t first = range_after(ranges->items, ranges->count, range->begin);
    size_t last = first;
    range_t *items;

    while (last < ranges->count && ranges->items[last].begin < range->end) {
        last++;
    }
    items = wsync_array_reserve(ranges->items, &ranges->capacity, ranges->count + 1,
                                sizeof(*items));
    if (items == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "realloc",
                          "no memory to note %zu ranges of a GPU", ranges->count + 1);
    }
    memmove(items + first + 1, items + last, (ranges->count - last) * sizeof(*items));
    items[first] = *range;
    ranges->items = items;
    ranges->count -= last - first;
    ranges->count++;
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_find_unmapped(const wsync_cuda_device_t *device,
                                        const wsync_span_t *spans, size_t count,
                                        size_t *index, wsync_error_t *err)
{
    wsync_cuda_ranges_t ranges = {0};
    wsync_status_t status = WSYNC_OK;
    bool found = true;
    size_t i = 0;

    while (i < count && found && status == WSYNC_OK) {
        answer_t first = {0};
        range_t range;

        if (spans[i].nbytes > 0 && !in_ranges(&ranges, &spans[i])) {
            status = ask(device, (uintptr_t)spans[i].data, &first, err);
            if (status == WSYNC_OK) {
                status = look_at_device(device, &spans[i], &first, &found, &range, err);
            }
            if (status == WSYNC_OK && found) {
                status = note_range(&ranges, &range, err);
            }
        }
        i += found && status == WSYNC_OK;
    }
    free(ranges.items);
    *index = i;
    return status;
}

/* --- all spans --- */

/* Where the span's answer is, or would be; there is room. */
static known_t *seek(known_t *known, size_t capacity, const wsync_span_t *span)
{
    const uintptr_t data = (uintptr_t)span->data;
    const uint64_t hash = ((uint64_t)data ^ span->nbytes << 7) * 0x9e3779b97f4a7c15U;
    size_t i = (size_t)(hash >> 32) & (capacity - 1);

    while (known[i].nbytes > 0 &&
           (known[i].data != data || known[i].nbytes != span->nbytes)) {
        i = (i + 1) & (capacity - 1);
    }
    return &known[i];
}

/* Room for one more answer. */
static wsync_status_t reserve(wsync_cuda_spans_t *spans, wsync_error_t *err)
{
    size_t capacity;
    known_t *known;

    if (spans->count >= MAX_COUNT) {
        wsync_cuda_spans_fini(spans);
    }
    if (2 * spans->count < spans->capacity) {
        return WSYNC_OK;
    }
    capacity = spans->capacity > 0 ? 2 * spans->capacity : MIN_CAPACITY;
    known = calloc(capacity, sizeof(*known));
    if (known == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "calloc",
                          "no memory to note what %zu buffers are", spans->count + 1);
    }
    for (size_t i = 0; spans->known != NULL && i < spans->capacity; i++) {
        const known_t *old = &spans->known[i];

        if (old->nbytes > 0) {
            *seek(known, capacity, &(wsync_span_t){(void *)old->data, old->nbytes}) = *old;
        }
    }
    free(spans->known);
    spans->known = known;
    spans->capacity = capacity;
    return WSYNC_OK;
}

/* Whether an answer has to be had again.  A device that reads all of the host's memory goes
 * on reading there what it has read, whoever registers it meanwhile. */
static bool is_stale(const wsync_cuda_spans_t *spans, const known_t *known, unsigned age)
{
    const bool stays = known->place.kind == WSYNC_CUDA_PAGEABLE && spans->device->pageable;

    return known->nbytes == 0 || (known->age != age && !stays);
}

wsync_status_t wsync_cuda_spans_find(wsync_cuda_spans_t *spans, const wsync_span_t *span,
                                     wsync_cuda_place_t *place, wsync_error_t *err)
{
    const unsigned age = atomic_load(&spans->age);
    wsync_status_t status;
    wsync_cuda_place_t made;
    range_t range = {0};
    known_t *known;

    if (spans->ranges_age != age) {
        spans->ranges.count = 0;
        spans->ranges_age = age;
    }
    if (in_ranges(&spans->ranges, span)) {
        *place = (wsync_cuda_place_t){(uintptr_t)span->data, WSYNC_CUDA_DEVICE};
        return WSYNC_OK;
    }
    status = reserve(spans, err);
    if (status != WSYNC_OK) {
        return status;
    }
    known = seek(spans->known, spans->capacity, span);
    if (is_stale(spans, known, age)) {
        status = classify(spans->device, span, &made, &range, err);
        if (status != WSYNC_OK) {
            return status;
        }
        if (made.kind == WSYNC_CUDA_DEVICE) {
            *place = made;
            return note_range(&spans->ranges, &range, err);
        }
        spans->count += known->nbytes == 0;
        *known = (known_t){(uintptr_t)span->data, span->nbytes, made, age};
    }
    *place = known->place;
    return WSYNC_OK;
}

void wsync_cuda_spans_age(wsync_cuda_spans_t *spans)
{
    (void)atomic_fetch_add(&spans->age, 1);
}

void wsync_cuda_spans_fini(wsync_cuda_spans_t *spans)
{
    free(spans->known);
    spans->known = NULL;
    spans->count = 0;
    spans->capacity = 0;
    free(spans->ranges.items);
    spans->ranges = (wsync_cuda_ranges_t){0};
}
