/* SPDX-License-Identifier: Apache-2.0
 * Memory of a GPU that others than wsync have allocated in this process, lent to another
 * one, which maps it for reading. */
#ifndef WSYNC_DEVICE_CUDA_LEND_H
#define WSYNC_DEVICE_CUDA_LEND_H

#include "device/cuda_spans.h"

/* One allocation, or one mapping of physical memory. */
typedef struct wsync_cuda_allocation {
    wsync_cu_ptr_t at;
    uint64_t nbytes;
    /* While it is lent, no other memory at these addresses has it.  0: no other process can
     * map it. */
    uint64_t identity;
    bool piece; /* lent by a descriptor, and beside its neighbours; else by an IPC handle */
} wsync_cuda_allocation_t;

/* The allocations of these ranges, which have just been found, in their order.  In the
 * context; *items is for free(), also after an error. */
wsync_status_t wsync_cuda_identify(const wsync_cuda_device_t *device,
                                   const wsync_cuda_ranges_t *ranges,
                                   wsync_cuda_allocation_t **items, wsync_error_t *err);

/* A record of these allocations to be lent: pieces side by side, or one that is none.  It
 * keeps the memory of pieces from being given back, but not that of an allocation that is
 * none.  STATE if one has been replaced since it was found. */
wsync_status_t wsync_cuda_lend(const wsync_cuda_device_t *device,
                               const wsync_cuda_allocation_t *items, size_t count,
                               wsync_memory_t **memory, wsync_error_t *err);

/* Whether what was lent may be given back: nobody has it open who would then see what the
 * driver leaves undefined, and nobody opens it any more.  Pieces always may. */
bool wsync_cuda_retire(const wsync_memory_t *memory);

#endif
