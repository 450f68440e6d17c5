/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/split_steps.h"

#include <stdlib.h>
#include <string.h>

#include "core/layout/layout_parts.h"

static const wsync_split_tensor_t *find_split_tensor(const wsync_split_t *split,
                                                     const char *name)
{
    const size_t index = wsync_names_find(&split->names, name);

    return index != SIZE_MAX ? &split->tensors.items[index] : NULL;
}

/* --- which dimensions ----------------------------------------------------------------- */

static wsync_status_t add_unit(const wsync_tensor_t *tensor, unsigned dim, uint32_t step,
                               wsync_split_tensor_t *known, wsync_error_t *err)
{
    uint32_t ndim = known->ndim;

    if (known->unit[dim] == step) {
        return WSYNC_OK;
    }
    if (known->unit[dim] != 1 || known->shape[dim] % step != 0) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "layout",
                          "%.256s: dim %u: steps of %u cannot be combined with steps of %u "
                          "along %lld elements",
                          tensor->name, dim, step, known->unit[dim],
                          (long long)known->shape[dim]);
    }
    known->unit[dim] = step;
    for (unsigned i = 0; i < known->ndim; i++) {
        ndim += known->unit[i] != 1;
    }
    return ndim <= WSYNC_MAX_NDIM
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "layout",
                            "%.256s: too many of its %u dimensions have steps",
                            tensor->name, known->ndim);
}

static wsync_status_t add_steps(wsync_split_t *split, const wsync_tensor_t *tensor,
                                const wsync_shard_t *shard, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (unsigned i = 0; i < tensor->ndim && status == WSYNC_OK; i++) {
        wsync_split_tensor_t known = {.ndim = tensor->ndim, .unit = {1, 1, 1, 1, 1, 1}};
        uint32_t index;
        bool added;

        if (shard->step[i] == 1) {
            continue;
        }
        if (!WSYNC_ARRAY_RESERVE(split->tensors, 1)) {
            return wsync_no_memory(err, "layout");
        }
        status = wsync_names_add(&split->names, tensor->name, &index, &added, err);
        if (status == WSYNC_OK && added) {
            memcpy(known.shape, tensor->shape, sizeof(known.shape));
            split->tensors.items[split->tensors.count++] = known;
        }
        if (status == WSYNC_OK) {
            status = add_unit(tensor, i, shard->step[i], &split->tensors.items[index], err);
        }
    }
    return status;
}

static wsync_status_t collect(wsync_split_t *split, const wsync_layout_t *layout,
                              wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < wsync_layout_shard_count(layout) && status == WSYNC_OK; i++) {
        const wsync_shard_t *shard = &layout->shards[i];

        status = add_steps(split, &layout->tensors[shard->tensor], shard, err);
    }
    return status;
}

/* --- there ---------------------------------------------------------------------------- */

/* Adds what a shard is in the split tensor.  `part` is that for the dimensions before
 * `dim`, which have become `at`. */
static wsync_status_t add_parts(const wsync_split_tensor_t *tensor,
                                const wsync_shard_t *shard, unsigned dim, unsigned at,
                                wsync_shard_t part, wsync_layout_builder_t *builder,
                                wsync_error_t *err)
{
    int64_t unit;
    int64_t stride;
    int64_t start;
    int64_t left;
    wsync_status_t status = WSYNC_OK;

    if (dim == tensor->ndim) {
        return wsync_layout_builder_shard(builder, &part, err);
    }
    unit = tensor->unit[dim];
    stride = shard->stride[dim];
    start = shard->box.start[dim];
    left = shard->box.extent[dim];
    if (unit == 1) {
        part.box.start[at] = start;
        part.box.extent[at] = left;
        part.stride[at] = stride;
        return add_parts(tensor, shard, dim + 1, at + 1, part, builder, err);
    }
    while (left > 0 && status == WSYNC_OK) {
        const int64_t inside = start % unit;
        int64_t outer = 1;
        int64_t inner = left < unit - inside ? left : unit - inside;

        if (shard->step[dim] > 1) {
            outer = left;
            inner = 1;
        } else if (inner == unit) {
            outer = left / unit;
        }
        part.box.start[at] = start / unit;
        part.box.extent[at] = outer;
        part.stride[at] = outer == 1 ? 0 : stride * (inner == 1 ? 1 : unit);
        part.box.start[at + 1] = inside;
        part.box.extent[at + 1] = inner;
        part.stride[at + 1] = stride;
        status = add_parts(tensor, shard, dim + 1, at + 2, part, builder, err);
        start += outer * inner;
        left -= outer * inner;
        part.offset += (uint64_t)(outer * inner) * (uint64_t)stride;
    }
    return status;
}

static wsync_status_t split_tensor(const wsync_split_tensor_t *known,
                                   const wsync_layout_t *layout, size_t index,
                                   wsync_layout_builder_t *builder, wsync_error_t *err)
{
    wsync_tensor_t tensor = layout->tensors[index];
    /* Where shapes differ whoever compares them says so. */
    const bool is_split = known != NULL && known->ndim == tensor.ndim &&
                          memcmp(known->shape, tensor.shape, sizeof(tensor.shape)) == 0;
    uint32_t number;
    wsync_status_t status;

    for (unsigned i = 0, at = 0; is_split && i < known->ndim; i++) {
        tensor.shape[at++] = known->shape[i] / known->unit[i];
        if (known->unit[i] != 1) {
            tensor.shape[at++] = known->unit[i];
        }
        tensor.ndim = at;
    }
    status = wsync_layout_builder_tensor(builder, &tensor, &number, err);
    for (size_t i = layout->first[index];
         i < layout->first[index + 1] && status == WSYNC_OK; i++) {
        wsync_shard_t part = layout->shards[i];

        if (is_split) {
            part.box = wsync_box_whole(0, NULL);
            memset(part.step, 0, sizeof(part.step));
            status = add_parts(known, &layout->shards[i], 0, 0, part, builder, err);
        } else {
            status = wsync_layout_builder_shard(builder, &part, err);
        }
    }
    return status;
}

static wsync_status_t split_layout(const wsync_split_t *split, const wsync_layout_t *layout,
                                   wsync_layout_t **made, wsync_error_t *err)
{
    wsync_layout_builder_t *builder = NULL;
    uint32_t index;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    for (size_t i = 0; i < layout->origins.count && status == WSYNC_OK; i++) {
        status =
            wsync_layout_builder_origin(builder, layout->origins.items[i], &index, err);
    }
    for (size_t i = 0; i < layout->names.count && status == WSYNC_OK; i++) {
        status = split_tensor(find_split_tensor(split, layout->tensors[i].name), layout, i,
                              builder, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, made, err);
    }
    wsync_layout_builder_destroy(builder);
    return status;
}

static bool is_touched(const wsync_split_t *split, const wsync_layout_t *layout)
{
    for (size_t i = 0; i < split->names.count; i++) {
        if (wsync_layout_find(layout, split->names.items[i]) != SIZE_MAX) {
            return true;
        }
    }
    return false;
}

wsync_status_t wsync_split_steps(const wsync_layout_t *const *layouts, size_t count,
                                 wsync_split_t *split, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    split->layouts = (wsync_layout_t **)calloc(count + 1, sizeof(split->layouts[0]));
    if (split->layouts == NULL) {
        return wsync_no_memory(err, "layout");
    }
    split->count = count;
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = collect(split, layouts[i], err);
    }
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (is_touched(split, layouts[i])) {
            status = split_layout(split, layouts[i], &split->layouts[i], err);
        }
    }
    return status;
}

/* --- and back ------------------------------------------------------------------------- */

/* Adds what a shard of the split tensor is in the one before it.  `part` is that for the
 * dimensions before `dim`, which were `at`. */
static wsync_status_t join_parts(const wsync_split_tensor_t *tensor,
                                 const wsync_shard_t *shard, unsigned dim, unsigned at,
                                 wsync_shard_t part, wsync_layout_builder_t *builder,
                                 wsync_error_t *err)
{
    int64_t unit;
    int64_t outer;
    int64_t inner;
    wsync_status_t status = WSYNC_OK;

    if (dim == tensor->ndim) {
        return wsync_layout_builder_shard(builder, &part, err);
    }
    unit = tensor->unit[dim];
    outer = shard->box.extent[at];
    part.box.start[dim] = shard->box.start[at];
    part.box.extent[dim] = outer;
    part.stride[dim] = shard->stride[at];
    if (unit == 1) {
        return join_parts(tensor, shard, dim + 1, at + 1, part, builder, err);
    }
    inner = shard->box.extent[at + 1];
    part.box.start[dim] = shard->box.start[at] * unit + shard->box.start[at + 1];
    part.step[dim] = (uint32_t)unit;
    if (outer == 1 ||
        (inner == unit && shard->stride[at] == unit * shard->stride[at + 1])) {
        part.box.extent[dim] = outer * inner;
        part.stride[dim] = shard->stride[at + 1];
        part.step[dim] = 1;
        inner = 1;
    }
    for (int64_t i = 0; i < inner && status == WSYNC_OK; i++) {
        status = join_parts(tensor, shard, dim + 1, at + 2, part, builder, err);
        part.box.start[dim]++;
        part.offset += (uint64_t)shard->stride[at + 1];
    }
    return status;
}

wsync_status_t wsync_split_restore(const wsync_split_t *split, const wsync_tensor_t *tensor,
                                   const wsync_shard_t *shard,
                                   wsync_layout_builder_t *builder, wsync_error_t *err)
{
    const wsync_split_tensor_t *known = find_split_tensor(split, tensor->name);
    wsync_tensor_t before = *tensor;
    wsync_shard_t part = {0};
    uint32_t number;
    wsync_status_t status;

    if (known != NULL) {
        before.ndim = known->ndim;
        memcpy(before.shape, known->shape, sizeof(before.shape));
    }
    status = wsync_layout_builder_tensor(builder, &before, &number, err);
    if (status != WSYNC_OK || shard == NULL) {
        return status;
    }
    part = *shard;
    part.tensor = number;
    if (known == NULL) {
        return wsync_layout_builder_shard(builder, &part, err);
    }
    part.box = wsync_box_whole(0, NULL);
    return join_parts(known, shard, 0, 0, part, builder, err);
}

void wsync_split_drop(wsync_split_t *split)
{
    for (size_t i = 0; i < split->count; i++) {
        wsync_layout_destroy(split->layouts[i]);
    }
    free((void *)split->layouts);
    split->layouts = NULL;
    split->count = 0;
}

void wsync_split_fini(wsync_split_t *split)
{
    wsync_split_drop(split);
    wsync_names_fini(&split->names);
    free(split->tensors.items);
    *split = (wsync_split_t){0};
}
