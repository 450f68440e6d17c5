/* SPDX-License-Identifier: Apache-2.0 */
#include "core/copy.h"

#include <stdbool.h>
#include <stdlib.h>

#include "core/base/array.h"

/* One dimension of a copy on its way to being coalesced. */
typedef struct copy_dim {
    int64_t extent;
    int64_t source_stride;
    int64_t destination_stride;
} copy_dim_t;

typedef struct copy_dims {
    copy_dim_t items[WSYNC_MAX_NDIM]; /* slowest first */
    unsigned count;
} copy_dims_t;

void wsync_copies_fini(wsync_copies_t *copies)
{
    free(copies->items);
    *copies = (wsync_copies_t){0};
}

static wsync_status_t reserve(wsync_copies_t *copies, uint64_t more, wsync_error_t *err)
{
    uint64_t count;
    wsync_copy_t *items = NULL;

    if (!__builtin_add_overflow(copies->count, more, &count)) {
        items = wsync_array_reserve(copies->items, &copies->capacity, count,
                                    sizeof(*copies->items));
    }
    if (items == NULL) {
        return wsync_no_memory(err, "copies");
    }
    copies->items = items;
    return WSYNC_OK;
}

/* Dimensions of extent 1 move nothing.  The others may be walked in any order: the order of
 * the destination's strides makes writes sequential and brings together what can merge. */
static copy_dims_t sort_dims(const int64_t extent[WSYNC_MAX_NDIM],
                             const wsync_place_t *source, const wsync_place_t *destination)
{
    copy_dims_t dims = {.count = 0};

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        const copy_dim_t dim = {extent[i], source->stride[i], destination->stride[i]};
        unsigned at = dims.count;

        if (dim.extent == 1) {
            continue;
        }
        while (at > 0 && dims.items[at - 1].destination_stride < dim.destination_stride) {
            dims.items[at] = dims.items[at - 1];
            at--;
        }
        dims.items[at] = dim;
        dims.count++;
    }
    return dims;
}

static bool spans_stride(int64_t inner_stride, int64_t inner_extent, int64_t outer_stride)
{
    int64_t span;

    return !__builtin_mul_overflow(inner_stride, inner_extent, &span) &&
           span == outer_stride;
}

/* Two neighbours are one dimension where the inner one ends exactly where the outer one
 * steps to, on both sides. */
static void merge_dims(copy_dims_t *dims)
{
    unsigned count = 0;

    for (unsigned i = 0; i < dims->count; i++) {
        const copy_dim_t inner = dims->items[i];
        copy_dim_t *outer = count > 0 ? &dims->items[count - 1] : NULL;

        if (outer != NULL &&
            spans_stride(inner.source_stride, inner.extent, outer->source_stride) &&
            spans_stride(inner.destination_stride, inner.extent,
                         outer->destination_stride)) {
            outer->extent *= inner.extent;
            outer->source_stride = inner.source_stride;
            outer->destination_stride = inner.destination_stride;
        } else {
            dims->items[count++] = inner;
        }
    }
    dims->count = count;
}

/* Takes the innermost dimension into the row if it is contiguous on both sides, in the item
 * size of each. */
static uint64_t fold_row(copy_dims_t *dims, size_t source_nbytes, size_t destination_nbytes)
{
    const copy_dim_t *last;

    if (dims->count == 0) {
        return 1;
    }
    last = &dims->items[dims->count - 1];
    if (last->source_stride != (int64_t)source_nbytes ||
        last->destination_stride != (int64_t)destination_nbytes) {
        return 1;
    }
    dims->count--;
    return (uint64_t)last->extent;
}

/* Takes out the dimensions beyond what a copy holds: the shortest, so that the fewest
 * copies stand in for them.  Returns how many copies that is. */
static uint64_t take_excess(copy_dims_t *dims, copy_dims_t *excess)
{
    uint64_t count = 1;

    excess->count = 0;
    while (dims->count > WSYNC_COPY_NDIM) {
        unsigned shortest = 0;

        for (unsigned i = 1; i < dims->count; i++) {
            if (dims->items[i].extent < dims->items[shortest].extent) {
                shortest = i;
            }
        }
        excess->items[excess->count++] = dims->items[shortest];
        count *= (uint64_t)dims->items[shortest].extent;
        dims->count--;
        for (unsigned i = shortest; i < dims->count; i++) {
            dims->items[i] = dims->items[i + 1];
        }
    }
    return count;
}

/* Appends `copy` at step number `index` of the excess dimensions. */
static void append_step(wsync_copies_t *copies, const wsync_copy_t *copy,
                        const copy_dims_t *excess, uint64_t index)
{
    wsync_copy_t *item = &copies->items[copies->count++];

    *item = *copy;
    for (unsigned i = 0; i < excess->count; i++) {
        const copy_dim_t *dim = &excess->items[i];
        const uint64_t step = index % (uint64_t)dim->extent;

        item->source_offset += step * (uint64_t)dim->source_stride;
        item->destination_offset += step * (uint64_t)dim->destination_stride;
        index /= (uint64_t)dim->extent;
    }
}

wsync_status_t wsync_copies_append(wsync_copies_t *copies,
                                   const int64_t extent[WSYNC_MAX_NDIM],
                                   const wsync_place_t *source,
                                   const wsync_place_t *destination, wsync_error_t *err)
{
    const size_t source_nbytes = wsync_dtype_nbytes(source->dtype);
    const size_t destination_nbytes = wsync_dtype_nbytes(destination->dtype);
    wsync_transform_t transform;
    wsync_copy_t copy = {0};
    copy_dims_t dims;
    copy_dims_t excess;
    uint64_t count;
    wsync_status_t status;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        if (extent[i] <= 0) {
            return WSYNC_OK;
        }
    }
    status = wsync_dtype_transform(source->dtype, destination->dtype,
                                   source->affine.scale != 0, &transform, err);
    if (status != WSYNC_OK) {
        return status;
    }
    dims = sort_dims(extent, source, destination);
    merge_dims(&dims);
    copy.row_count = fold_row(&dims, source_nbytes, destination_nbytes);
    count = take_excess(&dims, &excess);
    status = reserve(copies, count, err);
    if (status != WSYNC_OK) {
        return status;
    }
    copy.source_offset = source->offset;
    copy.destination_offset = destination->offset;
    copy.source_buffer = source->buffer;
    copy.destination_buffer = destination->buffer;
    copy.source_item_nbytes = (uint8_t)source_nbytes;
    copy.destination_item_nbytes = (uint8_t)destination_nbytes;
    copy.transform = (uint8_t)transform;
    copy.affine = source->affine;
    copy.ndim = (uint8_t)dims.count;
    for (unsigned i = 0; i < dims.count; i++) {
        copy.extent[i] = dims.items[i].extent;
        copy.source_stride[i] = dims.items[i].source_stride;
        copy.destination_stride[i] = dims.items[i].destination_stride;
    }
    for (uint64_t i = 0; i < count; i++) {
        append_step(copies, &copy, &excess, i);
    }
    return WSYNC_OK;
}

/* What one side of a copy touches. */
typedef struct copy_side {
    const char *name;
    uint32_t buffer;
    uint64_t offset;
    uint64_t row_nbytes;
    const int64_t *stride;
} copy_side_t;

static wsync_status_t check_side(const copy_side_t *side, const wsync_copy_t *copy,
                                 size_t index, const wsync_span_t *spans, size_t count,
                                 wsync_error_t *err)
{
    uint64_t below = 0; /* bytes reached before the offset, by negative strides */
    uint64_t above = side->row_nbytes;
    uint64_t end;

    if (side->buffer >= count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                          "copy %zu: %s buffer %u is not one of the %zu that are bound",
                          index, side->name, side->buffer, count);
    }
    for (unsigned i = 0; i < copy->ndim; i++) {
        const int64_t stride = side->stride[i];
        const uint64_t size = stride < 0 ? -(uint64_t)stride : (uint64_t)stride;
        uint64_t *const reach = stride < 0 ? &below : &above;
        uint64_t steps;

        if (__builtin_mul_overflow((uint64_t)copy->extent[i] - 1, size, &steps) ||
            __builtin_add_overflow(*reach, steps, reach)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                              "copy %zu: %s buffer %u: extent %lld times stride %lld "
                              "exceeds 64 bits",
                              index, side->name, side->buffer, (long long)copy->extent[i],
                              (long long)stride);
        }
    }
    if (below > side->offset || __builtin_add_overflow(side->offset, above, &end) ||
        end > spans[side->buffer].nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                          "copy %zu: %s buffer %u: bytes [%llu - %llu, %llu + %llu) are "
                          "not inside its %llu bytes",
                          index, side->name, side->buffer, (unsigned long long)side->offset,
                          (unsigned long long)below, (unsigned long long)side->offset,
                          (unsigned long long)above,
                          (unsigned long long)spans[side->buffer].nbytes);
    }
    return WSYNC_OK;
}

static bool is_empty(const wsync_copy_t *copy)
{
    for (unsigned i = 0; i < copy->ndim; i++) {
        if (copy->extent[i] <= 0) {
            return true;
        }
    }
    return copy->row_count == 0;
}

wsync_status_t wsync_copies_check(const wsync_copy_t *copies, size_t count,
                                  const wsync_span_t *sources, size_t source_count,
                                  const wsync_span_t *destinations,
                                  size_t destination_count, wsync_error_t *err)
{
    for (size_t i = 0; i < count; i++) {
        const wsync_copy_t *copy = &copies[i];
        copy_side_t source = {"source", copy->source_buffer, copy->source_offset, 0,
                              copy->source_stride};
        copy_side_t destination = {"destination", copy->destination_buffer,
                                   copy->destination_offset, 0, copy->destination_stride};
        wsync_status_t status;

        if (copy->ndim > WSYNC_COPY_NDIM) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                              "copy %zu has %u dimensions, at most %d are possible", i,
                              copy->ndim, WSYNC_COPY_NDIM);
        }
        if (is_empty(copy)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                              "copy %zu has no elements", i);
        }
        if (__builtin_mul_overflow(copy->row_count, copy->source_item_nbytes,
                                   &source.row_nbytes) ||
            __builtin_mul_overflow(copy->row_count, copy->destination_item_nbytes,
                                   &destination.row_nbytes)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "copies",
                              "copy %zu: a row of %llu elements has 2^64 bytes or more", i,
                              (unsigned long long)copy->row_count);
        }
        status = check_side(&source, copy, i, sources, source_count, err);
        if (status == WSYNC_OK) {
            status =
                check_side(&destination, copy, i, destinations, destination_count, err);
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

uint64_t wsync_copies_nbytes(const wsync_copy_t *copies, size_t count)
{
    uint64_t total = 0;

    for (size_t i = 0; i < count; i++) {
        uint64_t nbytes = copies[i].row_count * copies[i].destination_item_nbytes;

        for (unsigned j = 0; j < copies[i].ndim; j++) {
            nbytes *= (uint64_t)copies[i].extent[j];
        }
        total += nbytes;
    }
    return total;
}
