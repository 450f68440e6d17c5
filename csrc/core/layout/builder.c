/* SPDX-License-Identifier: Apache-2.0
 * Making layouts: everything that enters one is checked here, so that arithmetic on a
 * finished layout cannot overflow. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/counting_sort.h"
#include "core/layout/layout.h"
#include "core/layout/layout_parts.h"

struct wsync_layout_builder {
    wsync_names_t names;
    wsync_names_t origins;
    WSYNC_ARRAY(wsync_tensor_t) tensors;
    WSYNC_ARRAY(wsync_shard_t) shards; /* in the order of addition */
    bool unsorted;                     /* some shard came after one of a later tensor */
    uint64_t nbytes;
};

wsync_status_t wsync_layout_builder_create(wsync_layout_builder_t **builder,
                                           wsync_error_t *err)
{
    wsync_layout_builder_t *made = calloc(1, sizeof(*made));

    if (made == NULL) {
        return wsync_no_memory(err, "layout");
    }
    *builder = made;
    return WSYNC_OK;
}

static void clear(wsync_layout_builder_t *builder)
{
    wsync_names_fini(&builder->names);
    wsync_names_fini(&builder->origins);
    free(builder->tensors.items);
    free(builder->shards.items);
    *builder = (wsync_layout_builder_t){0};
}

void wsync_layout_builder_destroy(wsync_layout_builder_t *builder)
{
    if (builder != NULL) {
        clear(builder);
        free(builder);
    }
}

/* Computes a tensor's bytes.  INVALID if it has no name, dtype or dimensions that can be,
 * or 2^63 bytes or more, where dimensions of 0 do not excuse the others. */
static wsync_status_t check_tensor(const wsync_tensor_t *tensor, uint64_t *nbytes,
                                   wsync_error_t *err)
{
    char shape[WSYNC_SHAPE_TEXT_NBYTES];
    int64_t bound;
    bool empty = false;

    if (tensor->name == NULL || tensor->name[0] == '\0') {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout", "a tensor has no name");
    }
    if ((unsigned)tensor->dtype >= WSYNC_DTYPE_COUNT) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: no dtype has number %d", tensor->name,
                          (int)tensor->dtype);
    }
    if (tensor->ndim > WSYNC_MAX_NDIM) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: %u dimensions, at most %d are supported", tensor->name,
                          tensor->ndim, WSYNC_MAX_NDIM);
    }
    bound = (int64_t)wsync_dtype_nbytes(tensor->dtype);
    for (unsigned i = 0; i < tensor->ndim; i++) {
        const int64_t extent = tensor->shape[i];

        empty = empty || extent == 0;
        if (extent < 0 || __builtin_mul_overflow(bound, extent > 0 ? extent : 1, &bound)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: %s is not a possible shape for %s", tensor->name,
                              wsync_shape_text(shape, tensor->ndim, tensor->shape),
                              wsync_dtype_name(tensor->dtype));
        }
    }
    *nbytes = empty ? 0 : (uint64_t)bound;
    return WSYNC_OK;
}

wsync_status_t wsync_layout_builder_tensor(wsync_layout_builder_t *builder,
                                           const wsync_tensor_t *tensor, uint32_t *index,
                                           wsync_error_t *err)
{
    uint64_t nbytes = 0;
    uint64_t total;
    uint32_t found;
    bool added;
    wsync_tensor_t *known;
    wsync_status_t status = check_tensor(tensor, &nbytes, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!WSYNC_ARRAY_RESERVE(builder->tensors, 1)) {
        return wsync_no_memory(err, "layout");
    }
    if (__builtin_add_overflow(builder->nbytes, nbytes, &total)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: the sizes of the tensors do not fit in 64 bits",
                          tensor->name);
    }
    status = wsync_names_add(&builder->names, tensor->name, &found, &added, err);
    if (status != WSYNC_OK) {
        return status;
    }
    known = &builder->tensors.items[found];
    if (added) {
        builder->tensors.count++;
        *known = *tensor;
        known->name = builder->names.items[found];
        for (unsigned i = tensor->ndim; i < WSYNC_MAX_NDIM; i++) {
            known->shape[i] = 1;
        }
        builder->nbytes = total;
    } else if (!wsync_tensor_equal(known, tensor)) {
        return wsync_tensor_differ(known, "one part", tensor, "another", err);
    }
    *index = found;
    return WSYNC_OK;
}

const wsync_tensor_t *wsync_layout_builder_peek(const wsync_layout_builder_t *builder,
                                                uint32_t index)
{
    return &builder->tensors.items[index];
}

wsync_status_t wsync_layout_builder_origin(wsync_layout_builder_t *builder,
                                           const char *name, uint32_t *index,
                                           wsync_error_t *err)
{
    bool added;

    return wsync_names_add(&builder->origins, name, index, &added, err);
}

/* Checks that the bytes of a box have addresses: no sum of offsets leaves [0, 2**63). */
static wsync_status_t check_memory(const char *name, const wsync_shard_t *shard,
                                   size_t item_nbytes, wsync_error_t *err)
{
    int64_t low;
    int64_t high;
    bool bad = __builtin_add_overflow(shard->offset, 0, &low) ||
               __builtin_add_overflow(low, (int64_t)item_nbytes, &high);

    for (unsigned i = 0; i < WSYNC_MAX_NDIM && !bad; i++) {
        int64_t *const end = shard->stride[i] < 0 ? &low : &high;
        int64_t reach;

        bad = __builtin_mul_overflow(shard->box.extent[i] - 1, shard->stride[i], &reach) ||
              __builtin_add_overflow(*end, reach, end);
    }
    if (bad || low < 0) {
        char extent[WSYNC_SHAPE_TEXT_NBYTES];
        char stride[WSYNC_SHAPE_TEXT_NBYTES];

        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: rank %u buffer %u: offset %llu with strides %s and "
                          "extents %s leaves the address range",
                          name, shard->rank, shard->buffer,
                          (unsigned long long)shard->offset,
                          wsync_shape_text(stride, WSYNC_MAX_NDIM, shard->stride),
                          wsync_shape_text(extent, WSYNC_MAX_NDIM, shard->box.extent));
    }
    return WSYNC_OK;
}

static wsync_status_t check_box(const wsync_tensor_t *tensor, const wsync_box_t *box,
                                const uint32_t *step, wsync_error_t *err)
{
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        /* shape is 1 beyond ndim; an empty box may start at the end */
        const int64_t last = tensor->shape[i] - (box->extent[i] > 0);

        if (box->start[i] < 0 || box->extent[i] < 0 || box->start[i] > last ||
            box->extent[i] - 1 > (last - box->start[i]) / (step[i] != 0 ? step[i] : 1)) {
            char shape[WSYNC_SHAPE_TEXT_NBYTES];
            char steps[32] = "";

            if (step[i] > 1) {
                (void)snprintf(steps, sizeof(steps), " in steps of %u", step[i]);
            }
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: dim %u: start %lld with extent %lld%s is not inside "
                              "shape %s",
                              tensor->name, i, (long long)box->start[i],
                              (long long)box->extent[i], steps,
                              wsync_shape_text(shape, tensor->ndim, tensor->shape));
        }
    }
    return WSYNC_OK;
}

/* Checks what a shard and a region have in common. */
static wsync_status_t check_owner(const wsync_layout_builder_t *builder,
                                  const wsync_shard_t *shard, wsync_error_t *err)
{
    if (shard->tensor >= builder->names.count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "a shard belongs to tensor %u, but the layout has %zu tensors",
                          shard->tensor, builder->names.count);
    }
    if (shard->origin >= builder->origins.count) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, "layout",
            "%.256s: there is no origin (trainer parameter) %u; the layout has "
            "%zu",
            builder->tensors.items[shard->tensor].name, shard->origin,
            builder->origins.count);
    }
    if (shard->rank >= WSYNC_MAX_RANKS || shard->buffer == UINT32_MAX) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: rank %u must be below %d, and buffer %u below %u",
                          builder->tensors.items[shard->tensor].name, shard->rank,
                          WSYNC_MAX_RANKS, shard->buffer, UINT32_MAX);
    }
    return WSYNC_OK;
}

static wsync_status_t check_affine(const wsync_tensor_t *tensor,
                                   const wsync_affine_t *affine, wsync_error_t *err)
{
    wsync_transform_t transform;

    if (!__builtin_isfinite(affine->scale) || !__builtin_isfinite(affine->offset) ||
        (affine->scale == 0 && affine->offset != 0)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: scale %g and offset %g must be finite, and a scale of 0 "
                          "needs the offset 0",
                          tensor->name, (double)affine->scale, (double)affine->offset);
    }
    return wsync_dtype_transform(tensor->dtype, tensor->dtype, affine->scale != 0,
                                 &transform, err);
}

wsync_status_t wsync_layout_builder_shard(wsync_layout_builder_t *builder,
                                          const wsync_shard_t *shard, wsync_error_t *err)
{
    const wsync_tensor_t *tensor;
    wsync_shard_t *added;
    wsync_status_t status = check_owner(builder, shard, err);

    if (status != WSYNC_OK) {
        return status;
    }
    tensor = &builder->tensors.items[shard->tensor];
    status = check_box(tensor, &shard->box, shard->step, err);
    if (status != WSYNC_OK || wsync_box_count(&shard->box) == 0) {
        return status;
    }
    status = check_memory(tensor->name, shard, wsync_dtype_nbytes(tensor->dtype), err);
    if (status == WSYNC_OK) {
        status = check_affine(tensor, &shard->affine, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (!WSYNC_ARRAY_RESERVE(builder->shards, 1)) {
        return wsync_no_memory(err, "layout");
    }
    added = &builder->shards.items[builder->shards.count];
    if (builder->shards.count++ > 0 && added[-1].tensor > shard->tensor) {
        builder->unsorted = true;
    }
    *added = *shard;
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        added->step[i] =
            shard->box.extent[i] > 1 && shard->step[i] > 1 ? shard->step[i] : 1;
        added->stride[i] = i < tensor->ndim ? shard->stride[i] : 0;
    }
    return WSYNC_OK;
}

/* Checks that a map is an injection into its tensor. */
static wsync_status_t check_map(const wsync_tensor_t *tensor, const wsync_map_t *map,
                                wsync_error_t *err)
{
    unsigned used = 0; /* bit set of source axes */

    if (map->target_ndim != tensor->ndim || map->source_ndim > WSYNC_MAX_NDIM) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                          "%.256s: a map from %u to %u dimensions cannot fill a tensor of "
                          "%u",
                          tensor->name, map->source_ndim, map->target_ndim, tensor->ndim);
    }
    for (unsigned i = 0; i < map->target_ndim; i++) {
        const int axis = map->axis[i];
        int64_t end;

        if (axis == -1 && map->target.extent[i] <= 1) {
            continue;
        }
        if (axis < 0 || axis >= map->source_ndim || (used & (1U << axis)) != 0) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: dim %u with extent %lld cannot come from axis %d of "
                              "a parameter with %u dimensions",
                              tensor->name, i, (long long)map->target.extent[i], axis,
                              map->source_ndim);
        }
        used |= 1U << axis;
        if (map->source_start[axis] < 0 ||
            __builtin_add_overflow(map->source_start[axis], map->target.extent[i], &end)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: dim %u: source start %lld with extent %lld is not a "
                              "range of indices",
                              tensor->name, i, (long long)map->source_start[axis],
                              (long long)map->target.extent[i]);
        }
    }
    for (unsigned i = 0; i < map->source_ndim; i++) {
        /* also of an axis that no dimension comes from, where the map reads one index */
        if (map->source_start[i] < 0 || map->source_start[i] == INT64_MAX) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: axis %u: source start %lld is not an index",
                              tensor->name, i, (long long)map->source_start[i]);
        }
    }
    return check_box(tensor, &map->target, map->step, err);
}

static wsync_status_t check_region(const char *name, const wsync_shard_t *region,
                                   wsync_error_t *err)
{
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        int64_t end;

        if (region->box.start[i] < 0 || region->box.extent[i] < 0 ||
            __builtin_add_overflow(region->box.start[i], region->box.extent[i], &end)) {
            return wsync_fail(err, WSYNC_ERR_INVALID, 0, "layout",
                              "%.256s: axis %u of the parameter: start %lld with extent "
                              "%lld is not a range of indices",
                              name, i, (long long)region->box.start[i],
                              (long long)region->box.extent[i]);
        }
    }
    return WSYNC_OK;
}

/* The part of the source parameter that a map reads. */
static wsync_box_t source_box(const wsync_map_t *map)
{
    wsync_box_t box = wsync_box_whole(0, NULL);

    for (unsigned i = 0; i < map->source_ndim; i++) {
        box.start[i] = map->source_start[i];
    }
    for (unsigned i = 0; i < map->target_ndim; i++) {
        if (map->axis[i] >= 0) {
            box.extent[map->axis[i]] = map->target.extent[i];
        }
    }
    return box;
}

wsync_status_t wsync_layout_builder_compose(wsync_layout_builder_t *builder,
                                            const wsync_shard_t *region,
                                            const wsync_map_t *map, uint64_t *added,
                                            wsync_error_t *err)
{
    const wsync_tensor_t *tensor;
    wsync_box_t source;
    wsync_box_t common;
    wsync_shard_t shard = *region;
    uint64_t count = 0;
    wsync_status_t status = check_owner(builder, region, err);

    if (status != WSYNC_OK) {
        return status;
    }
    tensor = &builder->tensors.items[region->tensor];
    status = check_map(tensor, map, err);
    if (status == WSYNC_OK) {
        status = check_region(tensor->name, region, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    source = source_box(map);
    if (wsync_box_intersect(&source, &region->box, &common)) {
        status = check_memory(tensor->name, region, wsync_dtype_nbytes(tensor->dtype), err);
        if (status != WSYNC_OK) {
            return status;
        }
        shard.box = map->target;
        shard.affine = map->affine;
        memcpy(shard.step, map->step, sizeof(shard.step));
        memset(shard.stride, 0, sizeof(shard.stride));
        for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
            shard.offset +=
                (uint64_t)((common.start[i] - region->box.start[i]) * region->stride[i]);
        }
        for (unsigned i = 0; i < map->target_ndim; i++) {
            const int axis = map->axis[i];

            if (axis >= 0) {
                shard.box.start[i] += (common.start[axis] - source.start[axis]) *
                                      (map->step[i] != 0 ? map->step[i] : 1);
                shard.box.extent[i] = common.extent[axis];
                shard.stride[i] = region->stride[axis];
            }
        }
        count = wsync_box_count(&shard.box);
        status = wsync_layout_builder_shard(builder, &shard, err);
    }
    if (status == WSYNC_OK && added != NULL) {
        *added = count;
    }
    return status;
}

/* Orders the shards by tensor; those of one tensor keep the order of addition. */
static bool sort_shards(wsync_layout_builder_t *builder, wsync_layout_t *layout)
{
    const wsync_keyed_t keyed = {builder->shards.items, builder->shards.count,
                                 sizeof(*layout->shards), offsetof(wsync_shard_t, tensor),
                                 builder->names.count};

    if (builder->unsorted) {
        layout->shards = wsync_sort_by_key(&keyed, &layout->first);
        return layout->shards != NULL;
    }
    /* As decoded layouts are: no second copy of the shards. */
    layout->first = wsync_count_keys(&keyed);
    if (layout->first != NULL) {
        layout->shards = builder->shards.items;
        builder->shards.items = NULL;
    }
    return layout->first != NULL;
}

static bool count_buffers(const wsync_layout_builder_t *builder, wsync_layout_t *layout)
{
    const wsync_shard_t *shards = builder->shards.items;

    for (size_t i = 0; i < builder->shards.count; i++) {
        if (shards[i].rank >= layout->rank_count) {
            layout->rank_count = shards[i].rank + 1;
        }
    }
    layout->buffer_counts =
        calloc((size_t)layout->rank_count + 1, sizeof(*layout->buffer_counts));
    if (layout->buffer_counts == NULL) {
        return false;
    }
    for (size_t i = 0; i < builder->shards.count; i++) {
        uint32_t *count = &layout->buffer_counts[shards[i].rank];

        if (shards[i].buffer >= *count) {
            *count = shards[i].buffer + 1;
        }
    }
    return true;
}

wsync_status_t wsync_layout_builder_finish(wsync_layout_builder_t *builder,
                                           wsync_layout_t **layout, wsync_error_t *err)
{
    wsync_layout_t *made = calloc(1, sizeof(*made));
    wsync_status_t status = WSYNC_OK;

    if (made == NULL || !count_buffers(builder, made) || !sort_shards(builder, made)) {
        status = wsync_no_memory(err, "layout");
        goto cleanup;
    }
    made->nbytes = builder->nbytes;
    made->names = builder->names;
    made->origins = builder->origins;
    made->tensors = builder->tensors.items;
    builder->names = (wsync_names_t){0};
    builder->origins = (wsync_names_t){0};
    builder->tensors.items = NULL;
    *layout = made;
    made = NULL;

cleanup:
    clear(builder);
    wsync_layout_destroy(made);
    return status;
}
