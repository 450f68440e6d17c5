/* SPDX-License-Identifier: Apache-2.0
 * One tensor: its distinct boxes on both sides, and which source box serves what. */
#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"
#include "core/layout/layout_parts.h"
#include "core/plan/planner.h"

static int compare_boxes(const wsync_box_t *a, const wsync_box_t *b)
{
    int order = 0;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM && order == 0; i++) {
        order = WSYNC_COMPARE(a->start[i], b->start[i]);
    }
    for (unsigned i = 0; i < WSYNC_MAX_NDIM && order == 0; i++) {
        order = WSYNC_COMPARE(a->extent[i], b->extent[i]);
    }
    return order;
}

/* --- pairs of boxes that overlap ------------------------------------------------------ */

/* A box on its way through the sweep. */
typedef struct mark {
    int64_t start;
    int64_t end;
    const wsync_box_t *box;
    size_t index;
} mark_t;

/* Box number `index` of what is swept. */
typedef const wsync_box_t *(*box_func_t)(const wsync_planner_t *planner, size_t index);

/* Called for every pair that overlaps, first < second. */
typedef wsync_status_t (*pair_func_t)(wsync_planner_t *planner, uint32_t tensor,
                                      size_t first, size_t second);

static int compare_marks(const void *left, const void *right)
{
    const mark_t *a = left;
    const mark_t *b = right;
    const int starts = WSYNC_COMPARE(a->start, b->start);

    return starts != 0 ? starts : WSYNC_COMPARE(a->index, b->index);
}

/* The axis along which boxes are shortest on average: sorted along it, few boxes have to be
 * compared with each other. */
static unsigned sweep_axis(const wsync_tensor_t *tensor, const mark_t *marks, size_t count)
{
    unsigned best = 0;
    double least = 0.0;

    for (unsigned i = 0; i < tensor->ndim; i++) {
        double sum = 0.0;

        for (size_t j = 0; j < count; j++) {
            sum += (double)marks[j].box->extent[i];
        }
        sum /= (double)tensor->shape[i];
        if (i == 0 || sum < least) {
            best = i;
            least = sum;
        }
    }
    return best;
}

static wsync_status_t sweep_marks(wsync_planner_t *planner, uint32_t tensor,
                                  const mark_t *marks, size_t count, pair_func_t found)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = i + 1; j < count && marks[j].start < marks[i].end; j++) {
            wsync_box_t common;

            if (wsync_box_intersect(marks[i].box, marks[j].box, &common)) {
                const bool swap = marks[j].index < marks[i].index;
                const wsync_status_t status = found(
                    planner, tensor, marks[swap ? j : i].index, marks[swap ? i : j].index);

                if (status != WSYNC_OK) {
                    return status;
                }
            }
        }
    }
    return WSYNC_OK;
}

/* Calls `found` for all pairs of `count` boxes that overlap. */
static wsync_status_t sweep(wsync_planner_t *planner, uint32_t tensor, box_func_t box,
                            size_t count, pair_func_t found)
{
    mark_t *marks;
    wsync_status_t status;
    unsigned axis;

    marks = calloc(count, sizeof(*marks));
    if (marks == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < count; i++) {
        marks[i].box = box(planner, i);
        marks[i].index = i;
    }
    axis = sweep_axis(wsync_layout_tensor(planner->spec->source, tensor), marks, count);
    for (size_t i = 0; i < count; i++) {
        marks[i].start = marks[i].box->start[axis];
        marks[i].end = marks[i].start + marks[i].box->extent[axis];
    }
    qsort(marks, count, sizeof(*marks), compare_marks);
    status = sweep_marks(planner, tensor, marks, count, found);
    free(marks);
    return status;
}

/* --- source boxes --------------------------------------------------------------------- */

typedef struct shard_key {
    const wsync_shard_t *shard;
    uint32_t index; /* among the tensor's shards */
} shard_key_t;

static int compare_shards(const void *left, const void *right)
{
    const shard_key_t *a = left;
    const shard_key_t *b = right;
    int order = compare_boxes(&a->shard->box, &b->shard->box);

    order = order != 0 ? order : WSYNC_COMPARE(a->shard->origin, b->shard->origin);
    order = order != 0 ? order : WSYNC_COMPARE(a->shard->rank, b->shard->rank);
    return order != 0 ? order : WSYNC_COMPARE(a->index, b->index);
}

/* Makes one source of shards that are copies of each other, ranks ascending. */
static wsync_status_t add_source(wsync_planner_t *planner, const shard_key_t *keys,
                                 size_t count)
{
    wsync_plan_source_t source = {.box = keys[0].shard->box,
                                  .shard = WSYNC_PLAN_NONE,
                                  .origin = keys[0].shard->origin};
    const wsync_tensor_t *what =
        wsync_layout_tensor(planner->spec->source, keys[0].shard->tensor);
    wsync_status_t status;

    planner->ids.count = 0;
    if (!WSYNC_ARRAY_RESERVE(planner->ids, count) ||
        !WSYNC_ARRAY_RESERVE(planner->sources, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < count; i++) {
        const uint32_t rank = keys[i].shard->rank;

        if (keys[i].shard->affine.scale != keys[0].shard->affine.scale ||
            keys[i].shard->affine.offset != keys[0].shard->affine.offset) {
            return wsync_fail(planner->err, WSYNC_ERR_LAYOUT, 0, "plan",
                              "%.256s: ranks %u and %u compute it differently from %.256s",
                              what->name, keys[0].shard->rank, rank,
                              wsync_layout_origin(planner->spec->source, source.origin));
        }
        if (i > 0 && rank == keys[i - 1].shard->rank) {
            continue; /* twice on one rank: the first serves */
        }
        planner->ids.items[planner->ids.count++] = rank;
        if (rank == planner->spec->rank) {
            source.shard = keys[i].index;
        }
    }
    status = wsync_idsets_add(&planner->ranks, planner->ids.items, planner->ids.count,
                              &source.holders, planner->err);
    if (status == WSYNC_OK) {
        planner->sources.items[planner->sources.count++] = source;
    }
    return status;
}

static wsync_status_t check_origins(wsync_planner_t *planner, uint32_t tensor, size_t first,
                                    size_t second)
{
    const wsync_layout_t *layout = planner->spec->source;
    const wsync_plan_source_t *a = &planner->sources.items[first];
    const wsync_plan_source_t *b = &planner->sources.items[second];
    const wsync_tensor_t *what = wsync_layout_tensor(layout, tensor);
    char start[WSYNC_SHAPE_TEXT_NBYTES];
    wsync_box_t common = a->box;

    planner->sources_overlap = true;
    if (a->origin == b->origin) {
        return WSYNC_OK;
    }
    (void)wsync_box_intersect(&a->box, &b->box, &common);
    return wsync_fail(planner->err, WSYNC_ERR_LAYOUT, 0, "plan",
                      "%.256s: %.128s (rank %u) and %.128s (rank %u) both hold the element "
                      "at %s",
                      what->name, wsync_layout_origin(layout, a->origin),
                      planner->ranks.ids.items[planner->ranks.items[a->holders].first],
                      wsync_layout_origin(layout, b->origin),
                      planner->ranks.ids.items[planner->ranks.items[b->holders].first],
                      wsync_shape_text(start, what->ndim, common.start));
}

static const wsync_box_t *source_box(const wsync_planner_t *planner, size_t index)
{
    return &planner->sources.items[index].box;
}

static wsync_status_t load_sources(wsync_planner_t *planner, uint32_t tensor)
{
    size_t count;
    const wsync_shard_t *shards =
        wsync_layout_shards(planner->spec->source, tensor, &count);
    shard_key_t *keys = malloc((count + 1) * sizeof(*keys));
    wsync_status_t status = WSYNC_OK;
    size_t end;

    planner->sources.count = 0;
    planner->sources_overlap = false;
    if (keys == NULL) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < count; i++) {
        keys[i] = (shard_key_t){&shards[i], (uint32_t)i};
    }
    qsort(keys, count, sizeof(*keys), compare_shards);
    for (size_t i = 0; i < count && status == WSYNC_OK; i = end) {
        end = i + 1;
        while (end < count && keys[end].shard->origin == keys[i].shard->origin &&
               wsync_box_equal(&keys[end].shard->box, &keys[i].shard->box)) {
            end++;
        }
        status = add_source(planner, keys + i, end - i);
    }
    free(keys);
    if (status == WSYNC_OK && planner->sources.count > 1) {
        status = sweep(planner, tensor, source_box, planner->sources.count, check_origins);
    }
    return status;
}

/* --- wanted boxes --------------------------------------------------------------------- */

typedef struct demand_key {
    const wsync_box_t *box;
    wsync_dtype_t dtype;
    uint32_t destination;
    wsync_plan_order_t order;
} demand_key_t;

typedef WSYNC_ARRAY(demand_key_t) demand_keys_t;

static int compare_demands(const void *left, const void *right)
{
    const demand_key_t *a = left;
    const demand_key_t *b = right;
    int order = compare_boxes(a->box, b->box);

    order = order != 0 ? order : WSYNC_COMPARE(a->dtype, b->dtype);
    return order != 0 ? order : WSYNC_COMPARE(a->destination, b->destination);
}

/* The dtype that travels: narrowing is done at the source, widening by the engine. */
static wsync_dtype_t delivered_dtype(const wsync_tensor_t *source,
                                     const wsync_tensor_t *destination)
{
    return wsync_dtype_nbytes(source->dtype) < wsync_dtype_nbytes(destination->dtype)
               ? source->dtype
               : destination->dtype;
}

static wsync_status_t fail_twice(const wsync_planner_t *planner, uint32_t tensor,
                                 uint32_t destination, const wsync_box_t *a,
                                 const wsync_box_t *b)
{
    const wsync_tensor_t *what = wsync_layout_tensor(planner->spec->source, tensor);
    char start[WSYNC_SHAPE_TEXT_NBYTES];
    wsync_box_t common = *a;

    (void)wsync_box_intersect(a, b, &common);
    return wsync_fail(planner->err, WSYNC_ERR_LAYOUT, 0, "plan",
                      "%.256s: worker %u asks twice for the element at %s", what->name,
                      wsync_planner_first_worker(planner, destination),
                      wsync_shape_text(start, what->ndim, common.start));
}

static wsync_status_t check_demands(wsync_planner_t *planner, uint32_t tensor, size_t first,
                                    size_t second)
{
    const wsync_plan_demand_t *a = &planner->demands.items[first];
    const wsync_plan_demand_t *b = &planner->demands.items[second];
    size_t count;
    const uint32_t *ids = wsync_idsets_get(&planner->audiences, a->audience, &count);

    for (size_t i = 0; i < count; i++) {
        if (wsync_idsets_contains(&planner->audiences, b->audience, ids[i])) {
            return fail_twice(planner, tensor, ids[i], &a->box, &b->box);
        }
    }
    return WSYNC_OK;
}

static const wsync_plan_order_t row_major = {{0, 1, 2, 3, 4, 5}};

/* The order in which the dimensions of a shard lie: what it gets can be copied in long runs
 * if that lies in the same one.  A shard that lies nowhere has strides of 0. */
static wsync_plan_order_t order_of(const wsync_shard_t *shard)
{
    wsync_plan_order_t order = row_major;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        unsigned at = i;

        /* Dimensions of one element stay where they are. */
        for (unsigned j = i; shard->box.extent[i] > 1 && j-- > 0;) {
            const uint8_t before = order.dims[j];

            if (shard->box.extent[j] > 1 && shard->stride[before] < shard->stride[i]) {
                order.dims[at] = before;
                at = j;
            }
        }
        order.dims[at] = (uint8_t)i;
    }
    return order;
}

/* Makes one demand of equal boxes, destinations ascending. */
static wsync_status_t add_demand(wsync_planner_t *planner, uint32_t tensor,
                                 const demand_key_t *keys, size_t count)
{
    wsync_plan_demand_t demand = {
        .box = *keys[0].box, .dtype = keys[0].dtype, .order = keys[0].order};
    wsync_status_t status;

    planner->ids.count = 0;
    if (!WSYNC_ARRAY_RESERVE(planner->ids, count) ||
        !WSYNC_ARRAY_RESERVE(planner->demands, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && keys[i].destination == keys[i - 1].destination) {
            return fail_twice(planner, tensor, keys[i].destination, keys[i].box,
                              keys[i].box);
        }
        planner->ids.items[planner->ids.count++] = keys[i].destination;
        if (memcmp(&keys[i].order, &demand.order, sizeof(demand.order)) != 0) {
            demand.order = row_major;
        }
    }
    status = wsync_plan_audience(planner, planner->ids.items, planner->ids.count,
                                 &demand.audience);
    if (status == WSYNC_OK) {
        planner->demands.items[planner->demands.count++] = demand;
    }
    return status;
}

/* Collects what the destinations want of a tensor. */
static wsync_status_t collect_demands(const wsync_planner_t *planner, uint32_t tensor,
                                      const wsync_box_t *whole, demand_keys_t *keys)
{
    const wsync_tensor_t *source = wsync_layout_tensor(planner->spec->source, tensor);

    for (size_t i = planner->first_ref[tensor]; i < planner->first_ref[tensor + 1]; i++) {
        const wsync_plan_ref_t *ref = &planner->refs[i];
        const wsync_destination_t *destination =
            &planner->spec->destinations[ref->destination];
        demand_key_t key = {
            .box = whole, .destination = ref->destination, .order = row_major};
        size_t count;
        const wsync_shard_t *shards =
            wsync_layout_shards(destination->layout, ref->tensor, &count);

        key.dtype =
            delivered_dtype(source, wsync_layout_tensor(destination->layout, ref->tensor));
        if (!WSYNC_ARRAY_RESERVE(*keys, count + 1)) {
            return wsync_no_memory(planner->err, "plan");
        }
        if (destination->whole && count == 0) {
            keys->items[keys->count++] = key;
        }
        for (size_t j = 0; j < count; j++) {
            key.box = &shards[j].box;
            key.order = destination->whole ? row_major : order_of(&shards[j]);
            keys->items[keys->count++] = key;
        }
    }
    return WSYNC_OK;
}

static const wsync_box_t *demand_box(const wsync_planner_t *planner, size_t index)
{
    return &planner->demands.items[index].box;
}

static wsync_status_t load_demands(wsync_planner_t *planner, uint32_t tensor)
{
    const wsync_tensor_t *source = wsync_layout_tensor(planner->spec->source, tensor);
    const wsync_box_t whole = wsync_box_whole(source->ndim, source->shape);
    demand_keys_t keys = {0};
    size_t end;
    wsync_status_t status = collect_demands(planner, tensor, &whole, &keys);

    planner->demands.count = 0;
    if (status == WSYNC_OK) {
        qsort(keys.items, keys.count, sizeof(*keys.items), compare_demands);
    }
    for (size_t i = 0; i < keys.count && status == WSYNC_OK; i = end) {
        end = i + 1;
        while (end < keys.count && keys.items[end].dtype == keys.items[i].dtype &&
               wsync_box_equal(keys.items[end].box, keys.items[i].box)) {
            end++;
        }
        status = add_demand(planner, tensor, keys.items + i, end - i);
    }
    free(keys.items);
    if (status == WSYNC_OK && planner->demands.count > 1) {
        status = sweep(planner, tensor, demand_box, planner->demands.count, check_demands);
    }
    return status;
}

wsync_status_t wsync_plan_load_tensor(wsync_planner_t *planner, uint32_t tensor)
{
    const wsync_status_t status = load_sources(planner, tensor);

    return status == WSYNC_OK ? load_demands(planner, tensor) : status;
}

/* --- pieces --------------------------------------------------------------------------- */

static wsync_status_t add_piece(wsync_planner_t *planner, wsync_plan_want_t *want,
                                const wsync_plan_source_t *source, const wsync_box_t *box)
{
    wsync_plan_piece_t piece = {.box = *box, .shard = source->shard};
    wsync_status_t status;

    if (!WSYNC_ARRAY_RESERVE(planner->pieces, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    piece.nbytes = wsync_box_count(box) * wsync_dtype_nbytes(want->dtype);
    status = wsync_plan_choose(planner, want->audience, source->holders, &piece);
    if (status == WSYNC_OK) {
        planner->pieces.items[planner->pieces.count++] = piece;
        want->piece_count++;
    }
    return status;
}

/* What a part of the want at hand is served from. */
typedef struct server {
    wsync_planner_t *planner;
    wsync_plan_want_t *want;
    const wsync_plan_source_t *source;
} server_t;

static wsync_status_t serve(void *context, const wsync_box_t *part)
{
    const server_t *server = context;

    return add_piece(server->planner, server->want, server->source, part);
}

static wsync_status_t fail_missing(const wsync_planner_t *planner, uint32_t tensor)
{
    const wsync_tensor_t *what = wsync_layout_tensor(planner->spec->source, tensor);
    const wsync_box_t *box = &planner->cover.missing.items[0];
    char start[WSYNC_SHAPE_TEXT_NBYTES];
    char extent[WSYNC_SHAPE_TEXT_NBYTES];

    return wsync_fail(planner->err, WSYNC_ERR_LAYOUT, 0, "plan",
                      "%.256s: no rank holds the box that starts at %s with extent %s",
                      what->name, wsync_shape_text(start, what->ndim, box->start),
                      wsync_shape_text(extent, what->ndim, box->extent));
}

/* Covers a want where source boxes overlap or leave something out. */
static wsync_status_t cover(wsync_planner_t *planner, wsync_plan_want_t *want)
{
    const wsync_boxes_t *missing = &planner->cover.missing;
    server_t server = {planner, want, NULL};
    wsync_status_t status = wsync_cover_start(&planner->cover, &want->box, planner->err);

    for (size_t i = 0;
         i < planner->sources.count && missing->count > 0 && status == WSYNC_OK; i++) {
        server.source = &planner->sources.items[i];
        status = wsync_cover_offer(&planner->cover, &server.source->box, serve, &server,
                                   planner->err);
    }
    if (status == WSYNC_OK && missing->count > 0) {
        status = fail_missing(planner, want->tensor);
    }
    return status;
}

wsync_status_t wsync_plan_add_want(wsync_planner_t *planner, uint32_t tensor,
                                   const wsync_plan_demand_t *demand)
{
    const uint64_t count = wsync_box_count(&demand->box);
    wsync_plan_want_t want = {.box = demand->box,
                              .nbytes = count * wsync_dtype_nbytes(demand->dtype),
                              .first_piece = planner->pieces.count,
                              .tensor = tensor,
                              .audience = demand->audience,
                              .dtype = demand->dtype,
                              .order = demand->order};
    uint64_t covered = 0;
    wsync_status_t status = WSYNC_OK;

    if (!WSYNC_ARRAY_RESERVE(planner->wants, 1)) {
        return wsync_no_memory(planner->err, "plan");
    }
    for (size_t i = 0; i < planner->sources.count; i++) {
        wsync_box_t common;

        if (wsync_box_intersect(&want.box, &planner->sources.items[i].box, &common)) {
            covered += wsync_box_count(&common);
        }
    }
    if (planner->sources_overlap || covered != count) {
        status = cover(planner, &want);
    } else {
        /* Disjoint and complete: the intersections are the pieces. */
        for (size_t i = 0; i < planner->sources.count && status == WSYNC_OK; i++) {
            const wsync_plan_source_t *source = &planner->sources.items[i];
            wsync_box_t common;

            if (wsync_box_intersect(&want.box, &source->box, &common)) {
                status = add_piece(planner, &want, source, &common);
            }
        }
    }
    if (status == WSYNC_OK) {
        planner->wants.items[planner->wants.count++] = want;
    }
    return status;
}
