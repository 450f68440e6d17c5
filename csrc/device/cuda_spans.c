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

/* What the driver says of one address.  It writes what it takes to be large enough: a
 * boolean or bit mask, of whatever size, is read as a number. */
typedef struct answer {
    unsigned type; /* 0: it does not know the address */
    wsync_cu_ptr_t at;
    unsigned long long buffer;
    uint64_t managed;
    uint64_t mapped;
    uint64_t legacy;
    uint64_t handle_types;
} answer_t;

static bool is_device(const answer_t *answer)
{
    return answer->managed != 0 || answer->type == WSYNC_CU_MEMORY_DEVICE;
}

bool wsync_cuda_is_unknown(wsync_cu_result_t code)
{
    return code == WSYNC_CU_INVALID_VALUE || code == WSYNC_CU_NOT_FOUND ||
           code == WSYNC_CU_NOT_SUPPORTED || code == WSYNC_CU_NOT_PERMITTED;
}

/* What lies at an address, of which bytes up to `end` are wanted; *range is empty where a
 * device has no memory there. */
static wsync_status_t ask_pointer(const wsync_cuda_device_t *device, uintptr_t address,
                                  uintptr_t end, answer_t *answer,
                                  wsync_cuda_range_t *range, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const char *call = "cuPointerGetAttributes";
    int attributes[] = {WSYNC_CU_POINTER_TYPE,        WSYNC_CU_POINTER_DEVICE_ADDRESS,
                        WSYNC_CU_POINTER_BUFFER,      WSYNC_CU_POINTER_MANAGED,
                        WSYNC_CU_POINTER_MAPPED,      WSYNC_CU_POINTER_LEGACY_IPC,
                        WSYNC_CU_POINTER_HANDLE_TYPES};
    answer_t made = {0};
    void *fields[] = {&made.type,   &made.at,     &made.buffer,      &made.managed,
                      &made.mapped, &made.legacy, &made.handle_types};
    wsync_cu_ptr_t begin = address;
    /* Nobody takes managed memory away in parts. */
    size_t nbytes = end - address;
    wsync_cu_result_t code = driver->pointer_attributes(
        sizeof(attributes) / sizeof(attributes[0]), attributes, fields, address);

    *answer = wsync_cuda_is_unknown(code) ? (answer_t){0} : made;
    *range = (wsync_cuda_range_t){0};
    if (code == WSYNC_CU_SUCCESS && is_device(&made) && made.mapped != 0) {
        if (made.managed == 0) {
            /* What is called the range in attributes is all that was reserved around a
             * mapping, holes included (cuda.h). */
            call = "cuMemGetAddressRange";
            code = driver->mem_range(&begin, &nbytes, address);
        }
        if (code == WSYNC_CU_SUCCESS) {
            *range = (wsync_cuda_range_t){
                .begin = (uintptr_t)begin,
                .end = (uintptr_t)begin + nbytes,
                .buffer = made.buffer,
                .legacy = made.legacy != 0 && made.managed == 0,
                .exportable = (made.handle_types & WSYNC_CU_HANDLE_FD) != 0};
        }
    }
    return wsync_cuda_is_unknown(code)
               ? WSYNC_OK
               : wsync_cuda_check(driver, code, call, err, "memory at %#" PRIxPTR, address);
}

/* --- ranges of a device --- */

/* The first range that ends beyond an address. */
static size_t range_after(const wsync_cuda_ranges_t *ranges, uintptr_t address)
{
    size_t low = 0;
    size_t count = ranges->count;

    while (low < count) {
        const size_t middle = low + (count - low) / 2;

        if (ranges->items[middle].end > address) {
            count = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* How far memory is known to go on from an address; `end` or more: up to there. */
static uintptr_t known_until(const wsync_cuda_ranges_t *ranges, uintptr_t address,
                             uintptr_t end)
{
    for (size_t i = range_after(ranges, address);
         address < end && i < ranges->count && ranges->items[i].begin <= address; i++) {
        address = ranges->items[i].end;
    }
    return address;
}

static uintptr_t end_of(const wsync_span_t *span)
{
    return (uintptr_t)span->data + span->nbytes;
}

/* Those that overlap it are the same memory, or memory that is there no more. */
static wsync_status_t note_range(wsync_cuda_ranges_t *ranges,
                                 const wsync_cuda_range_t *range, wsync_error_t *err)
{
    const size_t first = range_after(ranges, range->begin);
    size_t last = first;
    wsync_cuda_range_t *items;

    while (last < ranges->count && ranges->items[last].begin < range->end) {
        last++;
    }
    items = wsync_array_reserve(ranges->items, &ranges->capacity, ranges->count + 1,
                                sizeof(*items));
    if (items == NULL) {
        return wsync_no_memory(err, "realloc");
    }
    memmove(items + first + 1, items + last, (ranges->count - last) * sizeof(*items));
    items[first] = *range;
    ranges->items = items;
    ranges->count -= last - first;
    ranges->count++;
    return WSYNC_OK;
}

/* Notes what the bytes of a span lie in.  *at is behind them, or else where the device has
 * no memory, and *answer what there is instead. */
static wsync_status_t walk(const wsync_cuda_device_t *device, const wsync_span_t *span,
                           wsync_cuda_ranges_t *ranges, uintptr_t *at, answer_t *answer,
                           wsync_error_t *err)
{
    const uintptr_t end = end_of(span);
    wsync_status_t status = WSYNC_OK;

    *at = known_until(ranges, (uintptr_t)span->data, end);
    while (*at < end && status == WSYNC_OK) {
        wsync_cuda_range_t range;

        status = ask_pointer(device, *at, end, answer, &range, err);
        if (status != WSYNC_OK || range.end <= *at) {
            return status;
        }
        status = note_range(ranges, &range, err);
        *at = known_until(ranges, range.end, end);
    }
    return status;
}

wsync_status_t wsync_cuda_find_ranges(const wsync_cuda_device_t *device,
                                      const wsync_span_t *spans, size_t count,
                                      wsync_cuda_ranges_t *ranges, size_t *index,
                                      wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    size_t first = count;

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        uintptr_t at;
        answer_t answer;

        status = walk(device, &spans[i], ranges, &at, &answer, err);
        if (at < end_of(&spans[i]) && first == count) {
            first = i;
        }
    }
    if (index != NULL) {
        *index = first;
    }
    return status;
}

/* --- all spans --- */

static wsync_status_t fail_unmapped(const wsync_cuda_device_t *device,
                                    const wsync_span_t *span, uintptr_t at,
                                    wsync_error_t *err)
{
    return wsync_fail(
        err, WSYNC_ERR_STATE, 0, "wsync_stream_copy",
        "%" PRIu64 " bytes at %#" PRIxPTR ": no memory of the GPU lies at %#" PRIxPTR
        " (GPU %d, %s), as when "
        "an allocator has paused and not resumed",
        span->nbytes, (uintptr_t)span->data, at, device->base.ordinal, device->info.name);
}

/* Host memory counts as pinned if one registration holds all of it: what a device reaches
 * without one (HMM) has no buffer. */
static wsync_status_t classify(wsync_cuda_spans_t *spans, const wsync_span_t *span,
                               wsync_cuda_place_t *place, wsync_error_t *err)
{
    const uintptr_t data = (uintptr_t)span->data;
    wsync_cuda_place_t made = {.at = data, .kind = WSYNC_CUDA_PAGEABLE};
    answer_t first = {0};
    answer_t last = {0};
    wsync_cuda_range_t range;
    uintptr_t at;
    wsync_status_t status = walk(spans->device, span, &spans->ranges, &at, &first, err);

    if (status == WSYNC_OK && at >= end_of(span)) {
        made.kind = WSYNC_CUDA_DEVICE;
    } else if (status == WSYNC_OK && (at > data || is_device(&first))) {
        status = fail_unmapped(spans->device, span, at, err);
    } else if (status == WSYNC_OK && first.type == WSYNC_CU_MEMORY_HOST &&
               first.buffer != 0) {
        status = ask_pointer(spans->device, data + span->nbytes - 1, data + span->nbytes,
                             &last, &range, err);
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
        return wsync_no_memory(err, "calloc");
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
    known_t *known;

    if (spans->ranges_age != age) {
        spans->ranges.count = 0;
        spans->ranges_age = age;
    }
    if (known_until(&spans->ranges, (uintptr_t)span->data, end_of(span)) >= end_of(span)) {
        *place = (wsync_cuda_place_t){(uintptr_t)span->data, WSYNC_CUDA_DEVICE};
        return WSYNC_OK;
    }
    status = reserve(spans, err);
    if (status != WSYNC_OK) {
        return status;
    }
    known = seek(spans->known, spans->capacity, span);
    if (is_stale(spans, known, age)) {
        status = classify(spans, span, &made, err);
        if (status != WSYNC_OK) {
            return status;
        }
        if (made.kind == WSYNC_CUDA_DEVICE) {
            *place = made;
            return WSYNC_OK;
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
