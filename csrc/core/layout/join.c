/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/join.h"

#include <stdlib.h>
#include <string.h>

#include "core/layout/layout_parts.h"

typedef struct joiner {
    const wsync_layout_t *model;
    const wsync_layout_t *wanted;
    const uint8_t *lent; /* of every buffer by its number; NULL: all are */
    wsync_layout_builder_t *builder;
    uint32_t *first; /* number of every rank's first buffer */
    uint64_t *given; /* bytes that every rank is to give */
    bool *left_out;  /* of the shards of the tensor at hand */
    wsync_error_t *err;
} joiner_t;

/* From the first index that is taken to the last one, whatever lies between. */
static wsync_box_t reach_of(const wsync_shard_t *shard)
{
    wsync_box_t reach = shard->box;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        if (shard->step[i] > 1) {
            reach.extent[i] = (reach.extent[i] - 1) * shard->step[i] + 1;
        }
    }
    return reach;
}

static bool is_wanted(const wsync_shard_t *shard, const wsync_shard_t *wanted, size_t count)
{
    const wsync_box_t mine = reach_of(shard);

    for (size_t i = 0; i < count; i++) {
        const wsync_box_t other = reach_of(&wanted[i]);
        wsync_box_t common;

        if (wsync_box_intersect(&mine, &other, &common)) {
            return true;
        }
    }
    return false;
}

static bool is_replica(const wsync_shard_t *a, const wsync_shard_t *b)
{
    return wsync_box_equal(&a->box, &b->box) &&
           memcmp(a->step, b->step, sizeof(a->step)) == 0;
}

/* Leaves out all replicas of shard number `index` but one, which it returns the number
 * of. */
static size_t choose(joiner_t *self, const wsync_shard_t *shards, size_t count,
                     size_t index)
{
    size_t best = index;

    for (size_t i = index + 1; i < count; i++) {
        if (self->left_out[i] || !is_replica(&shards[index], &shards[i])) {
            continue;
        }
        if (self->given[shards[i].rank] < self->given[shards[best].rank]) {
            self->left_out[best] = true;
            best = i;
        } else {
            self->left_out[i] = true;
        }
    }
    self->left_out[best] = true; /* it is taken now */
    return best;
}

static wsync_status_t add_shard(joiner_t *self, const wsync_shard_t *shard, uint32_t tensor)
{
    const uint64_t itemsize = wsync_dtype_nbytes(self->model->tensors[shard->tensor].dtype);
    wsync_shard_t added = *shard;
    uint32_t origin;
    const wsync_status_t status = wsync_layout_builder_origin(
        self->builder, wsync_layout_origin(self->model, shard->origin), &origin, self->err);

    if (status != WSYNC_OK) {
        return status;
    }
    self->given[shard->rank] += wsync_box_count(&shard->box) * itemsize;
    added.tensor = tensor;
    added.origin = origin;
    added.buffer = self->first[shard->rank] + shard->buffer;
    added.rank = 0;
    return wsync_layout_builder_shard(self->builder, &added, self->err);
}

static bool is_lent(const joiner_t *self, const wsync_shard_t *shard)
{
    return self->lent == NULL || self->lent[self->first[shard->rank] + shard->buffer] != 0;
}

/* Leaves out what is not lent and has a replica that is; false if something is wanted that
 * no rank lends. */
static bool keep_lent(joiner_t *self, const wsync_shard_t *shards, size_t count)
{
    size_t others = 0;

    for (size_t i = 0; i < count; i++) {
        others += !self->left_out[i] && !is_lent(self, &shards[i]);
    }
    for (size_t i = 0; i < count && others > 0; i++) {
        if (self->left_out[i] || !is_lent(self, &shards[i])) {
            continue;
        }
        for (size_t j = 0; j < count; j++) {
            if (!self->left_out[j] && !is_lent(self, &shards[j]) &&
                is_replica(&shards[i], &shards[j])) {
                self->left_out[j] = true;
                others--;
            }
        }
    }
    return others == 0;
}

static wsync_status_t join_tensor(joiner_t *self, size_t index)
{
    const wsync_tensor_t *tensor = wsync_layout_tensor(self->model, index);
    const size_t found =
        self->wanted != NULL ? wsync_layout_find(self->wanted, tensor->name) : SIZE_MAX;
    size_t count;
    size_t wanted_count = 0;
    const wsync_shard_t *shards = wsync_layout_shards(self->model, index, &count);
    const wsync_shard_t *wanted = NULL;
    uint32_t number;
    wsync_status_t status;

    if (self->wanted != NULL) {
        if (found == SIZE_MAX) {
            return WSYNC_OK;
        }
        wanted = wsync_layout_shards(self->wanted, found, &wanted_count);
    }
    for (size_t i = 0; i < count; i++) {
        self->left_out[i] =
            self->wanted != NULL && !is_wanted(&shards[i], wanted, wanted_count);
    }
    if (!keep_lent(self, shards, count)) {
        return WSYNC_OK;
    }
    status = wsync_layout_builder_tensor(self->builder, tensor, &number, self->err);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (!self->left_out[i]) {
            status = add_shard(self, &shards[choose(self, shards, count, i)], number);
        }
    }
    return status;
}

/* Gives every rank's buffers their numbers, where `first` is not NULL; *count is the number
 * of all. */
static wsync_status_t number_buffers(const wsync_layout_t *model, uint32_t *first,
                                     uint32_t *count, wsync_error_t *err)
{
    const uint32_t rank_count = wsync_layout_rank_count(model);
    uint32_t next = 0;

    for (uint32_t i = 0; i < rank_count; i++) {
        if (first != NULL) {
            first[i] = next;
        }
        if (__builtin_add_overflow(next, wsync_layout_buffer_count(model, i), &next)) {
            return wsync_fail(err, WSYNC_ERR_LAYOUT, 0, "layout",
                              "more than 2^32 - 1 buffers on %u ranks", rank_count);
        }
    }
    *count = next;
    return WSYNC_OK;
}

wsync_status_t wsync_layout_count_buffers(const wsync_layout_t *model, uint32_t *count,
                                          wsync_error_t *err)
{
    return number_buffers(model, NULL, count, err);
}

wsync_status_t wsync_layout_join(const wsync_layout_t *model, const wsync_layout_t *wanted,
                                 const uint8_t *lent, wsync_layout_t **joined,
                                 wsync_error_t *err)
{
    const size_t rank_count = wsync_layout_rank_count(model);
    const size_t shard_count = wsync_layout_shard_count(model);
    joiner_t self = {.model = model,
                     .wanted = wanted,
                     .lent = lent,
                     .first = calloc(rank_count + 1, sizeof(*self.first)),
                     .given = calloc(rank_count + 1, sizeof(*self.given)),
                     .left_out = calloc(shard_count + 1, sizeof(*self.left_out)),
                     .err = err};
    uint32_t count;
    wsync_status_t status;

    if (self.first == NULL || self.given == NULL || self.left_out == NULL) {
        status = wsync_no_memory(err, "layout");
        goto cleanup;
    }
    status = number_buffers(model, self.first, &count, err);
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_create(&self.builder, err);
    }
    for (size_t i = 0; i < wsync_layout_tensor_count(model) && status == WSYNC_OK; i++) {
        status = join_tensor(&self, i);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(self.builder, joined, err);
    }

cleanup:
    wsync_layout_builder_destroy(self.builder);
    free(self.first);
    free(self.given);
    free(self.left_out);
    return status;
}

/* Adds the tensors of a layout that `except` (NULL: none) lacks, with buffers from number
 * `first` on. */
static wsync_status_t add_tensors(wsync_layout_builder_t *builder,
                                  const wsync_layout_t *layout,
                                  const wsync_layout_t *except, uint32_t first,
                                  wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < wsync_layout_tensor_count(layout) && status == WSYNC_OK; i++) {
        const wsync_tensor_t *tensor = wsync_layout_tensor(layout, i);
        size_t count;
        const wsync_shard_t *shards = wsync_layout_shards(layout, i, &count);
        uint32_t number;

        if (except != NULL && wsync_layout_find(except, tensor->name) != SIZE_MAX) {
            continue;
        }
        status = wsync_layout_builder_tensor(builder, tensor, &number, err);
        for (size_t j = 0; j < count && status == WSYNC_OK; j++) {
            wsync_shard_t added = shards[j];

            added.tensor = number;
            status = wsync_layout_builder_origin(
                builder, wsync_layout_origin(layout, shards[j].origin), &added.origin, err);
            if (status == WSYNC_OK &&
                __builtin_add_overflow(added.buffer, first, &added.buffer)) {
                status =
                    wsync_fail(err, WSYNC_ERR_LAYOUT, 0, "layout",
                               "buffer %u cannot follow %u others: a rank can have 2^32",
                               shards[j].buffer, first);
            }
            if (status == WSYNC_OK) {
                status = wsync_layout_builder_shard(builder, &added, err);
            }
        }
    }
    return status;
}

wsync_status_t wsync_layout_without(const wsync_layout_t *layout,
                                    const wsync_layout_t *other, wsync_layout_t **rest,
                                    wsync_error_t *err)
{
    wsync_layout_builder_t *builder = NULL;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    if (status == WSYNC_OK) {
        status = add_tensors(builder, layout, other, 0, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, rest, err);
    }
    wsync_layout_builder_destroy(builder);
    return status;
}

wsync_status_t wsync_layout_beside(const wsync_layout_t *layout,
                                   const wsync_layout_t *other, uint32_t first,
                                   wsync_layout_t **both, wsync_error_t *err)
{
    wsync_layout_builder_t *builder = NULL;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    if (status == WSYNC_OK) {
        status = add_tensors(builder, layout, NULL, 0, err);
    }
    if (status == WSYNC_OK) {
        status = add_tensors(builder, other, NULL, first, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, both, err);
    }
    wsync_layout_builder_destroy(builder);
    return status;
}
