/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_spans.h"

#include <inttypes.h>
#include <stdlib.h>

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

/* What the driver says of one address. */
typedef struct answer {
    unsigned type; /* 0: it does not know the address */
    wsync_cu_ptr_t at;
    unsigned long long buffer;
} answer_t;

static wsync_status_t ask(const wsync_cuda_device_t *device, uintptr_t address,
                          answer_t *answer, wsync_error_t *err)
{
    int attributes[] = {WSYNC_CU_POINTER_TYPE, WSYNC_CU_POINTER_DEVICE_ADDRESS,
                        WSYNC_CU_POINTER_BUFFER};
    answer_t made = {0};
    void *fields[] = {&made.type, &made.at, &made.buffer};
    const wsync_cu_result_t code =
        device->driver->pointer_attributes(3, attributes, fields, address);

    if (code == WSYNC_CU_INVALID_VALUE) {
        made = (answer_t){0};
    } else if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(device->driver, code, "cuPointerGetAttributes", err,
                               "memory at %#" PRIxPTR, address);
    }
    *answer = made;
    return WSYNC_OK;
}

/* Host memory counts as pinned if one registration holds all of it. */
static wsync_status_t classify(const wsync_cuda_device_t *device, const wsync_span_t *span,
                               wsync_cuda_place_t *place, wsync_error_t *err)
{
    const uintptr_t data = (uintptr_t)span->data;
    wsync_cuda_place_t made = {.at = data, .kind = WSYNC_CUDA_PAGEABLE};
    answer_t first = {0};
    answer_t last = {0};
    wsync_status_t status = ask(device, data, &first, err);

    if (status == WSYNC_OK && first.type == WSYNC_CU_MEMORY_HOST) {
        status = ask(device, data + span->nbytes - 1, &last, err);
        if (status == WSYNC_OK && last.type == first.type && last.buffer == first.buffer &&
            first.at != 0 && last.at - first.at == span->nbytes - 1) {
            made = (wsync_cuda_place_t){.at = first.at, .kind = WSYNC_CUDA_PINNED};
        }
    } else if (status == WSYNC_OK && first.type != 0) {
        made.kind = WSYNC_CUDA_DEVICE;
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

wsync_status_t wsync_cuda_spans_find(wsync_cuda_spans_t *spans, const wsync_span_t *span,
                                     wsync_cuda_place_t *place, wsync_error_t *err)
{
    const unsigned age = atomic_load(&spans->age);
    wsync_status_t status = reserve(spans, err);
    wsync_cuda_place_t made;
    known_t *known;

    if (status != WSYNC_OK) {
        return status;
    }
    known = seek(spans->known, spans->capacity, span);
    if (known->nbytes == 0 ||
        (known->place.kind != WSYNC_CUDA_DEVICE && known->age != age)) {
        status = classify(spans->device, span, &made, err);
        if (status != WSYNC_OK) {
            return status;
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
}
