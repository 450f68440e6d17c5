/* SPDX-License-Identifier: Apache-2.0 */
#include "core/route.h"
#include "core/base/counting_sort.h"

#include <stdlib.h>

#include "core/base/array.h"
#include "core/box_cover.h"
#include "core/layout/layout_parts.h"
#include "core/layout/split_steps.h"
#include "core/write_overlap.h"

/* A peer chooses the source's boxes.  Boxes that lie across each other cut what is missing
 * into a number of parts that grows with a power of theirs; boxes that tile a tensor, as a
 * planner makes them, leave few. */
enum { MAX_MISSING = 1 << 14, MAX_PARTS_A_BOX = 4 };

struct wsync_route {
    wsync_copies_t copies; /* by source buffer */
    uint32_t buffer_count;
};

typedef struct route_builder {
    const wsync_layout_t *source;
    const wsync_layout_t *destination;
    wsync_copies_t copies;
    WSYNC_ARRAY(uint32_t) tensors; /* destination tensor of every copy */
    wsync_cover_t cover;           /* of the destination shard at hand */
    size_t parts_left;             /* that it may be filled from */
    const wsync_shard_t *from;
    const wsync_shard_t *to;
    wsync_error_t *err;
} route_builder_t;

/* Fills a part of a destination shard from the source shard at hand. */
static wsync_status_t fill_part(void *context, const wsync_box_t *part)
{
    route_builder_t *builder = context;
    const wsync_shard_t *to = builder->to;
    const wsync_place_t source = wsync_layout_place(builder->source, builder->from, part);
    const wsync_place_t destination = wsync_layout_place(builder->destination, to, part);
    wsync_status_t status;

    if (builder->parts_left == 0 || builder->cover.next.count > MAX_MISSING) {
        return wsync_fail(
            builder->err, WSYNC_ERR_LAYOUT, 0, "route",
            "%.256s: the source's boxes overlap and cut it into too many parts "
            "(%zu parts have no source yet)",
            wsync_layout_tensor(builder->destination, to->tensor)->name,
            builder->cover.next.count);
    }
    builder->parts_left--;
    status = wsync_copies_append(&builder->copies, part->extent, &source, &destination,
                                 builder->err);
    if (status != WSYNC_OK) {
        return status;
    }
    if (!WSYNC_ARRAY_RESERVE(builder->tensors,
                             builder->copies.count - builder->tensors.count)) {
        return wsync_no_memory(builder->err, "route");
    }
    while (builder->tensors.count < builder->copies.count) {
        builder->tensors.items[builder->tensors.count++] = to->tensor;
    }
    return WSYNC_OK;
}

static wsync_status_t fail_missing(const route_builder_t *builder,
                                   const wsync_tensor_t *tensor)
{
    const wsync_box_t *box = &builder->cover.missing.items[0];
    char start[WSYNC_SHAPE_TEXT_NBYTES];
    char extent[WSYNC_SHAPE_TEXT_NBYTES];

    return wsync_fail(builder->err, WSYNC_ERR_LAYOUT, 0, "route",
                      "%.256s: no source shard holds the box that starts at %s with extent "
                      "%s",
                      tensor->name, wsync_shape_text(start, tensor->ndim, box->start),
                      wsync_shape_text(extent, tensor->ndim, box->extent));
}

static wsync_status_t fill_tensor(route_builder_t *builder, size_t tensor)
{
    const wsync_tensor_t *to = wsync_layout_tensor(builder->destination, tensor);
    const size_t found = wsync_layout_find(builder->source, to->name);
    size_t to_count;
    size_t from_count;
    const wsync_shard_t *to_shards =
        wsync_layout_shards(builder->destination, tensor, &to_count);
    const wsync_shard_t *from_shards;
    wsync_status_t status;

    if (to_count == 0) {
        return WSYNC_OK;
    }
    if (found == SIZE_MAX) {
        return wsync_fail(builder->err, WSYNC_ERR_LAYOUT, 0, "route",
                          "%.256s: the source has no such tensor", to->name);
    }
    status = wsync_tensor_check_copy(wsync_layout_tensor(builder->source, found), to,
                                     "route", builder->err);
    from_shards = wsync_layout_shards(builder->source, found, &from_count);
    for (size_t i = 0; i < to_count && status == WSYNC_OK; i++) {
        builder->to = &to_shards[i];
        builder->parts_left = MAX_MISSING + MAX_PARTS_A_BOX * from_count;
        status = wsync_cover_start(&builder->cover, &to_shards[i].box, builder->err);
        for (size_t j = 0;
             j < from_count && builder->cover.missing.count > 0 && status == WSYNC_OK;
             j++) {
            builder->from = &from_shards[j];
            status = wsync_cover_offer(&builder->cover, &from_shards[j].box, fill_part,
                                       builder, builder->err);
        }
        if (status == WSYNC_OK && builder->cover.missing.count > 0) {
            status = fail_missing(builder, to);
        }
    }
    return status;
}

static wsync_status_t check_once(const route_builder_t *builder)
{
    wsync_overlap_t overlap = {0};
    const wsync_status_t status = wsync_copies_find_overlap(
        builder->copies.items, builder->copies.count, &overlap, builder->err);

    if (status != WSYNC_OK || !overlap.found || builder->tensors.items == NULL) {
        return status;
    }
    return wsync_fail(
        builder->err, WSYNC_ERR_LAYOUT, 0, "route",
        "%.256s and %.256s both write byte %llu of destination buffer %u",
        wsync_layout_tensor(builder->destination, builder->tensors.items[overlap.first])
            ->name,
        wsync_layout_tensor(builder->destination, builder->tensors.items[overlap.second])
            ->name,
        (unsigned long long)overlap.offset, overlap.buffer);
}

/* Buffer indices of several ranks would mean different memory. */
static wsync_status_t check_rank(const wsync_layout_t *layout, const char *side,
                                 uint32_t *buffer_count, wsync_error_t *err)
{
    const uint32_t rank_count = wsync_layout_rank_count(layout);
    uint32_t owner = rank_count;

    *buffer_count = 0;
    for (uint32_t i = 0; i < rank_count; i++) {
        const uint32_t count = wsync_layout_buffer_count(layout, i);

        if (count != 0 && owner != rank_count) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "route",
                              "the %s has shards on ranks %u and %u, but a route stays "
                              "inside one process",
                              side, owner, i);
        }
        if (count != 0) {
            owner = i;
            *buffer_count = count;
        }
    }
    return WSYNC_OK;
}

typedef struct sort_key {
    uint32_t buffer;
    size_t index; /* the order of addition holds within a buffer */
} sort_key_t;

static int compare_keys(const void *left, const void *right)
{
    const sort_key_t *a = left;
    const sort_key_t *b = right;
    const int buffers = WSYNC_COMPARE(a->buffer, b->buffer);

    return buffers != 0 ? buffers : WSYNC_COMPARE(a->index, b->index);
}

static wsync_status_t sort_copies(wsync_copies_t *copies, wsync_error_t *err)
{
    sort_key_t *keys = malloc((copies->count + 1) * sizeof(*keys));
    wsync_copy_t *sorted = malloc((copies->count + 1) * sizeof(*sorted));
    wsync_status_t status = WSYNC_OK;

    if (keys == NULL || sorted == NULL) {
        status = wsync_no_memory(err, "route");
        goto cleanup;
    }
    for (size_t i = 0; i < copies->count; i++) {
        keys[i] = (sort_key_t){copies->items[i].source_buffer, i};
    }
    qsort(keys, copies->count, sizeof(*keys), compare_keys);
    for (size_t i = 0; i < copies->count; i++) {
        sorted[i] = copies->items[keys[i].index];
    }
    free(copies->items);
    copies->items = sorted;
    copies->capacity = copies->count + 1;
    sorted = NULL;

cleanup:
    free(keys);
    free(sorted);
    return status;
}

wsync_status_t wsync_route_create(const wsync_layout_t *source,
                                  const wsync_layout_t *destination, wsync_route_t **route,
                                  wsync_error_t *err)
{
    const wsync_layout_t *const given[] = {source, destination};
    route_builder_t builder = {.source = source, .destination = destination, .err = err};
    wsync_split_t split = {0};
    wsync_route_t *made = NULL;
    uint32_t buffer_count = 0;
    uint32_t unused;
    wsync_status_t status = check_rank(source, "source", &buffer_count, err);

    if (status == WSYNC_OK) {
        status = check_rank(destination, "destination", &unused, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_split_steps(given, 2, &split, err);
    }
    if (status == WSYNC_OK) {
        builder.source = split.layouts[0] != NULL ? split.layouts[0] : source;
        builder.destination = split.layouts[1] != NULL ? split.layouts[1] : destination;
    }
    for (size_t i = 0; i < wsync_layout_tensor_count(destination) && status == WSYNC_OK;
         i++) {
        status = fill_tensor(&builder, i);
    }
    if (status == WSYNC_OK) {
        status = check_once(&builder);
    }
    if (status == WSYNC_OK) {
        status = sort_copies(&builder.copies, err);
    }
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        status = wsync_no_memory(err, "route");
        goto cleanup;
    }
    made->copies = builder.copies;
    made->buffer_count = buffer_count;
    builder.copies = (wsync_copies_t){0};
    *route = made;

cleanup:
    wsync_copies_fini(&builder.copies);
    free(builder.tensors.items);
    wsync_cover_fini(&builder.cover);
    wsync_split_fini(&split);
    return status;
}

void wsync_route_destroy(wsync_route_t *route)
{
    if (route != NULL) {
        wsync_copies_fini(&route->copies);
        free(route);
    }
}

uint32_t wsync_route_buffer_count(const wsync_route_t *route)
{
    return route->buffer_count;
}

/* Position of the first copy from `buffer` or a later one. */
static size_t lower_bound(const wsync_copies_t *copies, uint64_t buffer)
{
    size_t low = 0;
    size_t high = copies->count;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;

        if (copies->items[middle].source_buffer < buffer) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const wsync_copy_t *wsync_route_copies(const wsync_route_t *route, uint32_t buffer,
                                       size_t *count)
{
    const size_t first = lower_bound(&route->copies, buffer);

    *count = lower_bound(&route->copies, (uint64_t)buffer + 1) - first;
    return route->copies.items + first;
}

const wsync_copy_t *wsync_route_copies_below(const wsync_route_t *route, uint64_t end,
                                             size_t *count)
{
    *count = lower_bound(&route->copies, end);
    return route->copies.items;
}
