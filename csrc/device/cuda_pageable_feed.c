/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_pageable_feed.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "core/base/array.h"
#include "core/base/divide.h"

enum {
    SLOT_ALIGNMENT = 64,
    FILL_MS = 10 * 60 * 1000, /* pages may come from a disk */
};

struct wsync_cuda_pageable_feed {
    const wsync_cuda_device_t *device;
    wsync_stream_t *host; /* owned, of the host */
    unsigned char *slot;  /* owned; NULL: none */
    wsync_cu_ptr_t at;    /* where the device sees it; 0: it is not registered */
};

/* --- loads --- */

void wsync_cuda_load_fini(wsync_cuda_load_t *load)
{
    free(load->to_slot);
    free(load->from_slot);
    free(load->ends);
}

/* Indices of a dimension in a slot: what is repeated lies there once. */
static uint64_t slot_extent(const wsync_copy_t *copy, unsigned dim)
{
    return copy->source_stride[dim] == 0 ? 1 : (uint64_t)copy->extent[dim];
}

/* Bytes in a slot of one index of dimension `dim`; of ndim: of one element. */
static uint64_t unit_nbytes(const wsync_copy_t *copy, unsigned dim)
{
    uint64_t nbytes = copy->destination_item_nbytes;

    if (dim < copy->ndim) {
        nbytes *= copy->row_count;
    }
    for (unsigned d = dim + 1; d < copy->ndim; d++) {
        nbytes *= slot_extent(copy, d);
    }
    return nbytes;
}

/* Splits the first `count` indices of a dimension off; of ndim: elements of the row. */
static wsync_copy_t take_part(wsync_copy_t *rest, unsigned dim, uint64_t count)
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

/* Begins a slot. */
static wsync_status_t add_slot(wsync_cuda_load_t *load, wsync_error_t *err)
{
    size_t *ends = wsync_array_reserve(load->ends, &load->end_capacity, load->end_count + 1,
                                       sizeof(*ends));

    if (ends == NULL) {
        return wsync_no_memory(err, "realloc");
    }
    load->ends = ends;
    ends[load->end_count++] = load->count;
    load->used = 0;
    return WSYNC_OK;
}

/* Adds a piece that fits to the last slot, which is there.  The host makes what is written;
 * the device only moves it. */
static wsync_status_t add_piece(wsync_cuda_load_t *load, const wsync_copy_t *piece,
                                wsync_error_t *err)
{
    uint64_t stride = piece->destination_item_nbytes * piece->row_count;
    wsync_copy_t to = *piece;
    wsync_copy_t from = *piece;
    wsync_copy_t *copies = wsync_array_reserve(load->to_slot, &load->to_capacity,
                                               load->count + 1, sizeof(*copies));

    if (copies == NULL) {
        return wsync_no_memory(err, "realloc");
    }
    load->to_slot = copies;
    copies = wsync_array_reserve(load->from_slot, &load->from_capacity, load->count + 1,
                                 sizeof(*copies));
    if (copies == NULL) {
        return wsync_no_memory(err, "realloc");
    }
    load->from_slot = copies;
    to.destination_buffer = 0;
    to.destination_offset = load->used;
    from.source_buffer = 0;
    from.source_offset = load->used;
    from.source_item_nbytes = piece->destination_item_nbytes;
    from.transform = WSYNC_TRANSFORM_NONE;
    from.affine = (wsync_affine_t){0};
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
    load->used = wsync_round_up(load->used + stride, SLOT_ALIGNMENT);
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
            const wsync_copy_t piece = take_part(rest, dim, count);

            *status = add_piece(load, &piece, err);
        } else if (unit <= WSYNC_CUDA_FEED_SLOT_NBYTES) {
            *status = add_slot(load, err);
        } else {
            *inner = take_part(rest, dim, 1);
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

/* --- the slot --- */

/* Shared, so that a fork moves none of its pages; they get memory when they are pinned. */
static wsync_status_t make_slot(wsync_cuda_pageable_feed_t *feed, wsync_error_t *err)
{
    void *data = mmap(NULL, WSYNC_CUDA_FEED_SLOT_NBYTES, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (data == MAP_FAILED) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, errno, "mmap",
                          "no memory for a slot of %d bytes for pageable memory",
                          (int)WSYNC_CUDA_FEED_SLOT_NBYTES);
    }
    feed->slot = data;
    return wsync_cuda_register(feed->device, data, WSYNC_CUDA_FEED_SLOT_NBYTES,
                               "a slot for pageable memory", &feed->at, err);
}

wsync_status_t wsync_cuda_pageable_feed_create(const wsync_cuda_device_t *device,
                                               unsigned threads,
                                               wsync_cuda_pageable_feed_t **feed,
                                               wsync_error_t *err)
{
    wsync_cuda_pageable_feed_t *made = calloc(1, sizeof(*made));
    wsync_status_t status;

    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    made->device = device;
    status = make_slot(made, err);
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
        wsync_cuda_unregister(feed->device, feed->slot);
    }
    if (feed->slot != NULL) {
        (void)munmap(feed->slot, WSYNC_CUDA_FEED_SLOT_NBYTES);
    }
    free(feed);
}

wsync_status_t wsync_cuda_pageable_feed_fill(wsync_cuda_pageable_feed_t *feed,
                                             const wsync_copy_t *copies, size_t count,
                                             const wsync_span_t *sources,
                                             size_t source_count, wsync_cuda_place_t *place,
                                             wsync_error_t *err)
{
    const wsync_span_t slot = {feed->slot, WSYNC_CUDA_FEED_SLOT_NBYTES};
    wsync_status_t status = wsync_stream_copy_list(feed->host, copies, count, sources,
                                                   source_count, &slot, 1, err);

    if (status == WSYNC_OK) {
        status = wsync_stream_synchronize(feed->host, FILL_MS, err);
    }
    if (status != WSYNC_OK) {
        (void)wsync_stream_abandon(feed->host, 0);
    }
    *place = (wsync_cuda_place_t){feed->at, WSYNC_CUDA_PINNED};
    return status;
}
