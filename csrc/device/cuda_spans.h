/* SPDX-License-Identifier: Apache-2.0
 * Which device's memory a span lies in.  The driver is asked once an update and the answer
 * is kept, so that a round makes no such calls. */
#ifndef WSYNC_DEVICE_CUDA_SPANS_H
#define WSYNC_DEVICE_CUDA_SPANS_H

#include "device/cuda.h"

typedef enum wsync_cuda_kind {
    WSYNC_CUDA_UNKNOWN, /* nobody has asked */
    WSYNC_CUDA_DEVICE,
    WSYNC_CUDA_PINNED,   /* host memory that the device reaches, whoever registered it */
    WSYNC_CUDA_PAGEABLE, /* all else: the processor's alone, unless device->pageable */
} wsync_cuda_kind_t;

typedef struct wsync_cuda_place {
    wsync_cu_ptr_t at; /* for the device; of other memory, the processor's address */
    wsync_cuda_kind_t kind;
} wsync_cuda_place_t;

struct wsync_cuda_known;

/* One allocation of a device, or one mapping of physical memory. */
typedef struct wsync_cuda_range {
    uintptr_t begin;
    uintptr_t end;
    unsigned long long buffer; /* the driver's number of it */
    bool legacy;               /* it has an IPC handle */
    bool exportable;           /* as a descriptor */
} wsync_cuda_range_t;

/* Sorted and apart from each other.  All 0 at first. */
typedef struct wsync_cuda_ranges {
    wsync_cuda_range_t *items; /* owned */
    size_t count;
    size_t capacity;
} wsync_cuda_ranges_t;

/* Begins with a device, all else 0; calls are made in the context and one at a time, but
 * for age. */
typedef struct wsync_cuda_spans {
    const wsync_cuda_device_t *device;
    atomic_uint age;
    struct wsync_cuda_known *known; /* owned; open addressing; of what is the host's */
    size_t count;
    size_t capacity;            /* a power of two, or 0 */
    wsync_cuda_ranges_t ranges; /* of any device, as known at ranges_age */
    unsigned ranges_age;
} wsync_cuda_spans_t;

/* STATE if the addresses are a device's, and no memory lies there (now: an allocator may
 * pause and keep its addresses). */
wsync_status_t wsync_cuda_spans_find(wsync_cuda_spans_t *spans, const wsync_span_t *span,
                                     wsync_cuda_place_t *place, wsync_error_t *err);

/* Whoever lent memory may have given it back by now: the driver is asked anew.  From any
 * thread. */
void wsync_cuda_spans_age(wsync_cuda_spans_t *spans);

void wsync_cuda_spans_fini(wsync_cuda_spans_t *spans);

/* Notes what the spans lie in now.  *index is that of the first one, of those that are not
 * empty, where no memory of a device lies; or count; index may be NULL.  In the context;
 * what has been noted is for free(), also after an error. */
wsync_status_t wsync_cuda_find_ranges(const wsync_cuda_device_t *device,
                                      const wsync_span_t *spans, size_t count,
                                      wsync_cuda_ranges_t *ranges, size_t *index,
                                      wsync_error_t *err);

/* Whether a call's answer is that the driver has nothing of the kind at an address. */
bool wsync_cuda_is_unknown(wsync_cu_result_t code);

#endif
