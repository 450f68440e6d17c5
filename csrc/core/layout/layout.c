/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/layout/layout_parts.h"

const char *wsync_shape_text(char text[WSYNC_SHAPE_TEXT_NBYTES], unsigned ndim,
                             const int64_t *shape)
{
    size_t used = 0;

    /* 22 characters hold a dimension and its comma, so that nothing is ever cut. */
    text[used++] = '[';
    for (unsigned i = 0; i < ndim && i < WSYNC_MAX_NDIM; i++) {
        used += (size_t)snprintf(text + used, WSYNC_SHAPE_TEXT_NBYTES - used, "%s%lld",
                                 i == 0 ? "" : ", ", (long long)shape[i]);
    }
    (void)snprintf(text + used, WSYNC_SHAPE_TEXT_NBYTES - used, "]");
    return text;
}

bool wsync_tensor_equal(const wsync_tensor_t *a, const wsync_tensor_t *b)
{
    if (a->dtype != b->dtype || a->ndim != b->ndim || a->group != b->group) {
        return false;
    }
    for (unsigned i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i]) {
            return false;
        }
    }
    return true;
}

wsync_status_t wsync_tensor_differ(const wsync_tensor_t *a, const char *a_owner,
                                   const wsync_tensor_t *b, const char *b_owner,
                                   wsync_error_t *err)
{
    char a_shape[WSYNC_SHAPE_TEXT_NBYTES];
    char b_shape[WSYNC_SHAPE_TEXT_NBYTES];

    return wsync_fail(err, WSYNC_ERR_LAYOUT, 0, "layout",
                      "%.256s: %s has %s %s in group %u, %s has %s %s in group %u", a->name,
                      a_owner, wsync_dtype_name(a->dtype),
                      wsync_shape_text(a_shape, a->ndim, a->shape), a->group, b_owner,
                      wsync_dtype_name(b->dtype),
                      wsync_shape_text(b_shape, b->ndim, b->shape), b->group);
}

wsync_status_t wsync_tensor_check_copy(const wsync_tensor_t *from, const wsync_tensor_t *to,
                                       const char *origin, wsync_error_t *err)
{
    wsync_transform_t transform;
    char a[WSYNC_SHAPE_TEXT_NBYTES];
    char b[WSYNC_SHAPE_TEXT_NBYTES];

    if (from->ndim != to->ndim ||
        memcmp(from->shape, to->shape, sizeof(from->shape)) != 0) {
        return wsync_fail(err, WSYNC_ERR_LAYOUT, 0, origin,
                          "%.256s: source shape %s != destination shape %s", to->name,
                          wsync_shape_text(a, from->ndim, from->shape),
                          wsync_shape_text(b, to->ndim, to->shape));
    }
    if (wsync_dtype_transform(from->dtype, to->dtype, false, &transform, NULL) !=
        WSYNC_OK) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, origin,
                          "%.256s: no conversion from %s to %s: wsync converts float32 to "
                          "bfloat16 or float16, and bfloat16 to float32; convert others in "
                          "the trainer",
                          to->name, wsync_dtype_name(from->dtype),
                          wsync_dtype_name(to->dtype));
    }
    return WSYNC_OK;
}

/* The rank that speaks for layout number `index`'s idea of a tensor. */
static uint32_t rank_of(const wsync_layout_t *layout, size_t tensor, size_t index)
{
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(layout, tensor, &count);

    if (count != 0) {
        return shards[0].rank;
    }
    return layout->rank_count != 0 ? layout->shards[0].rank : (uint32_t)index;
}

/* Says that layout number `index` and an earlier one disagree about a tensor. */
static wsync_status_t fail_merge(const wsync_layout_t *const *layouts, size_t index,
                                 size_t tensor, wsync_error_t *err)
{
    const wsync_tensor_t *mine = wsync_layout_tensor(layouts[index], tensor);
    char owner[32];
    char other[32];

    (void)snprintf(owner, sizeof(owner), "rank %u", rank_of(layouts[index], tensor, index));
    for (size_t i = 0; i < index; i++) {
        const size_t found = wsync_layout_find(layouts[i], mine->name);

        if (found != SIZE_MAX) {
            (void)snprintf(other, sizeof(other), "rank %u", rank_of(layouts[i], found, i));
            return wsync_tensor_differ(wsync_layout_tensor(layouts[i], found), other, mine,
                                       owner, err);
        }
    }
    return err != NULL ? err->status : WSYNC_ERR_LAYOUT;
}

static wsync_status_t merge_one(wsync_layout_builder_t *builder,
                                const wsync_layout_t *const *layouts, size_t index,
                                wsync_error_t *err)
{
    const wsync_layout_t *layout = layouts[index];
    const size_t origin_count = layout->origins.count;
    uint32_t *origins = malloc((origin_count + 1) * sizeof(*origins));
    wsync_status_t status = WSYNC_OK;

    if (origins == NULL) {
        return wsync_no_memory(err, "layout");
    }
    for (size_t i = 0; i < origin_count && status == WSYNC_OK; i++) {
        status = wsync_layout_builder_origin(builder, layout->origins.items[i], &origins[i],
                                             err);
    }
    for (size_t i = 0; i < layout->names.count && status == WSYNC_OK; i++) {
        uint32_t tensor;

        status = wsync_layout_builder_tensor(builder, &layout->tensors[i], &tensor, err);
        if (status == WSYNC_ERR_LAYOUT) {
            status = fail_merge(layouts, index, i, err);
        }
        for (size_t j = layout->first[i]; j < layout->first[i + 1] && status == WSYNC_OK;
             j++) {
            wsync_shard_t shard = layout->shards[j];

            shard.tensor = tensor;
            shard.origin = origins[shard.origin];
            status = wsync_layout_builder_shard(builder, &shard, err);
        }
    }
    free(origins);
    return status;
}

wsync_status_t wsync_layout_merge(const wsync_layout_t *const *layouts, size_t count,
                                  wsync_layout_t **merged, wsync_error_t *err)
{
    wsync_layout_builder_t *builder = NULL;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = merge_one(builder, layouts, i, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, merged, err);
    }
    wsync_layout_builder_destroy(builder);
    return status;
}

void wsync_layout_destroy(wsync_layout_t *layout)
{
    if (layout == NULL) {
        return;
    }
    wsync_names_fini(&layout->names);
    wsync_names_fini(&layout->origins);
    free(layout->tensors);
    free(layout->shards);
    free(layout->first);
    free(layout->buffer_counts);
    free(layout);
}

size_t wsync_layout_tensor_count(const wsync_layout_t *layout)
{
    return layout->names.count;
}

const wsync_tensor_t *wsync_layout_tensor(const wsync_layout_t *layout, size_t index)
{
    return &layout->tensors[index];
}

size_t wsync_layout_find(const wsync_layout_t *layout, const char *name)
{
    return wsync_names_find(&layout->names, name);
}

const wsync_shard_t *wsync_layout_shards(const wsync_layout_t *layout, size_t tensor,
                                         size_t *count)
{
    *count = layout->first[tensor + 1] - layout->first[tensor];
    return *count != 0 ? &layout->shards[layout->first[tensor]] : NULL;
}

wsync_place_t wsync_layout_place(const wsync_layout_t *layout, const wsync_shard_t *shard,
                                 const wsync_box_t *part)
{
    wsync_place_t place = {.buffer = shard->buffer,
                           .dtype = layout->tensors[shard->tensor].dtype,
                           .offset = shard->offset,
                           .affine = shard->affine};

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        place.stride[i] = shard->stride[i];
        place.offset +=
            (uint64_t)((part->start[i] - shard->box.start[i]) * shard->stride[i]);
    }
    return place;
}

size_t wsync_layout_shard_count(const wsync_layout_t *layout)
{
    return layout->first[layout->names.count];
}

const char *wsync_layout_origin(const wsync_layout_t *layout, uint32_t origin)
{
    return layout->origins.items[origin];
}

size_t wsync_layout_origin_count(const wsync_layout_t *layout)
{
    return layout->origins.count;
}

uint32_t wsync_layout_rank_count(const wsync_layout_t *layout)
{
    return layout->rank_count;
}

uint32_t wsync_layout_buffer_count(const wsync_layout_t *layout, uint32_t rank)
{
    return rank < layout->rank_count ? layout->buffer_counts[rank] : 0;
}

uint64_t wsync_layout_nbytes(const wsync_layout_t *layout)
{
    return layout->nbytes;
}

uint64_t wsync_layout_shard_nbytes(const wsync_layout_t *layout)
{
    uint64_t total = 0;

    for (size_t i = 0; i < wsync_layout_shard_count(layout); i++) {
        const wsync_shard_t *shard = &layout->shards[i];
        const wsync_tensor_t *tensor = &layout->tensors[shard->tensor];
        const uint64_t items = wsync_box_count(&shard->box);

        /* a box lies inside its tensor, whose bytes were checked: only the sum can be too
         * large */
        if (__builtin_add_overflow(total, items * wsync_dtype_nbytes(tensor->dtype),
                                   &total)) {
            return UINT64_MAX;
        }
    }
    return total;
}
