/* SPDX-License-Identifier: Apache-2.0
 * What kernels read besides the data: segments, pieces and addresses, in device memory.
 * Tables are found again by their content, so that an update whose plan and buffers are
 * those of the one before uploads nothing. */
#ifndef WSYNC_DEVICE_CUDA_TABLES_H
#define WSYNC_DEVICE_CUDA_TABLES_H

#include "device/cuda_spans.h"
#include "device/kernel_quantise.h"
#include "device/kernel_segments.h"

typedef struct wsync_cuda_table {
    struct wsync_cuda_table *next; /* of the same bucket */
    void *key;                     /* owned: what the table was made of */
    size_t key_nbytes;
    uint64_t hash;
    wsync_cu_ptr_t at;
    uint64_t
        starts_offset; /* where tile_starts of segments lie, or thread_starts of pieces */
    uint64_t index_offset; /* and tile_index of segments */
    wsync_segment_list_t list;
    uint64_t scratch_offset;      /* of pieces: amaxes of their blocks, for one stream */
    wsync_quantise_lists_t lists; /* of pieces */
} wsync_cuda_table_t;

typedef struct wsync_cuda_slab {
    struct wsync_cuda_slab *next;
    wsync_cu_ptr_t at;
    uint64_t nbytes;
    uint64_t used;
} wsync_cuda_slab_t;

enum { WSYNC_CUDA_TABLE_BUCKETS = 1024 };

/* A list of copies that is known without a look at it. */
typedef struct wsync_cuda_list {
    uint64_t id; /* 0: none */
    const wsync_copy_t *copies;
    size_t count;
    const wsync_cuda_table_t *table;
} wsync_cuda_list_t;

/* Begins with a device and a stream for uploads, all else 0; calls are made in the context
 * and one at a time. */
typedef struct wsync_cuda_tables {
    const wsync_cuda_device_t *device;
    wsync_cu_stream_t uploads;
    wsync_cuda_slab_t *slabs;
    uint64_t nbytes;   /* of all slabs */
    uint64_t uploaded; /* tables so far */
    wsync_cuda_table_t *buckets[WSYNC_CUDA_TABLE_BUCKETS];
    wsync_cuda_list_t lists[WSYNC_CUDA_TABLE_BUCKETS]; /* the last ones, by address */
} wsync_cuda_tables_t;

/* Forgets all tables.  No kernel that reads them may be under way. */
void wsync_cuda_tables_clear(wsync_cuda_tables_t *tables);

/* The table of a list of copies, which are as wsync_copies_check wants them; id: the
 * list's, or 0 (wsync_batch_t).  Returns when it lies in device memory; borrowed until the
 * next clear. */
wsync_status_t wsync_cuda_tables_segments(wsync_cuda_tables_t *tables, uint64_t id,
                                          const wsync_copy_t *copies, size_t count,
                                          const wsync_cuda_table_t **table,
                                          wsync_error_t *err);
/* The same of pieces, which are as wsync_quantise_check wants them; `at` is 0 if none has
 * an element. */
wsync_status_t wsync_cuda_tables_pieces(wsync_cuda_tables_t *tables,
                                        const wsync_quantise_piece_t *pieces, size_t count,
                                        const wsync_cuda_table_t **table,
                                        wsync_error_t *err);
/* The same of addresses. */
wsync_status_t wsync_cuda_tables_addresses(wsync_cuda_tables_t *tables,
                                           const wsync_cuda_place_t *places, size_t count,
                                           const wsync_cuda_table_t **table,
                                           wsync_error_t *err);

#endif
