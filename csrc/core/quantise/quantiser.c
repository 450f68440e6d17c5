/* SPDX-License-Identifier: Apache-2.0 */
#include "core/quantise/quantiser.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/array.h"
#include "core/base/divide.h"
#include "core/base/names.h"
#include "core/box_cover.h"

enum {
    /* Where a piece's codes and scales begin: as wide as a device's widest loads. */
    ALIGNMENT = 128,
    /* The image is cut into buffers of about this size, because writers to a disk take a
     * buffer at a time. */
    BUFFER_NBYTES = 32 << 20,
    ROW = 0,
    COL = 1,
};

struct wsync_quantiser {
    wsync_layout_t *layout;
    WSYNC_ARRAY(wsync_quantise_piece_t) pieces;
    wsync_names_t names; /* of the pieces' tensors */
    WSYNC_ARRAY(int64_t) constants;
    WSYNC_ARRAY(uint64_t) starts; /* in the image, of its buffers */
    uint64_t image_nbytes;
    uint64_t amax_count;
    wsync_quantiser_stats_t stats;
};

/* One tensor that is quantised, seen as matrices. */
typedef struct matrices {
    const wsync_quantise_rule_t *rule;
    wsync_quantise_method_t method; /* with the block that is meant */
    const wsync_tensor_t *tensor;
    unsigned leading;   /* dimensions before the last two */
    uint64_t size[2];   /* rows and columns */
    uint64_t blocks[2]; /* rows and columns of blocks */
    uint64_t amaxes;    /* its first entry; NONE: all boxes hold whole blocks */
    uint64_t overall;
} matrices_t;

/* What making a quantiser needs. */
typedef struct maker {
    const wsync_layout_t *layout;
    uint32_t rank;
    uint32_t image; /* its first buffer */
    uint64_t constants_nbytes;
    wsync_quantiser_t *made;
    wsync_layout_builder_t *builder;
    wsync_cover_t cover;          /* of the tensor at hand, by the boxes of all ranks */
    matrices_t *tensors;          /* by the layout's; without a rule it stays as it is */
    WSYNC_ARRAY(uint64_t) shared; /* entry of every share number, or NONE */
} maker_t;

/* Takes bytes of the image, in a new buffer where the last one has enough. */
static wsync_status_t take_image(maker_t *maker, uint64_t nbytes, uint64_t *offset,
                                 wsync_error_t *err)
{
    wsync_quantiser_t *made = maker->made;
    const size_t count = made->starts.count;

    *offset = wsync_round_up(made->image_nbytes, ALIGNMENT);
    if (count == 0 || *offset - made->starts.items[count - 1] >= BUFFER_NBYTES) {
        if (!WSYNC_ARRAY_RESERVE(made->starts, 1)) {
            return wsync_no_memory(err, "quantise");
        }
        made->starts.items[made->starts.count++] = count == 0 ? 0 : *offset;
    }
    made->image_nbytes = *offset + nbytes;
    return WSYNC_OK;
}

/* --- rules ---------------------------------------------------------------------------- */

static wsync_status_t check_tensor(const wsync_tensor_t *tensor, wsync_error_t *err)
{
    const wsync_dtype_t dtype = tensor->dtype;

    if (tensor->ndim < 2) {
        return wsync_fail(
            err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
            "%.256s: it has %u dimensions, but only matrices can be quantised",
            tensor->name, tensor->ndim);
    }
    if (dtype != WSYNC_DTYPE_FLOAT32 && dtype != WSYNC_DTYPE_BFLOAT16 &&
        dtype != WSYNC_DTYPE_FLOAT16) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
                          "%.256s: its dtype is %s, but only float32, bfloat16 and float16 "
                          "can be quantised",
                          tensor->name, wsync_dtype_name(dtype));
    }
    return WSYNC_OK;
}

static wsync_status_t add_rule(maker_t *maker, const wsync_quantise_rule_t *rule,
                               wsync_error_t *err)
{
    const size_t index = wsync_layout_find(maker->layout, rule->tensor);
    matrices_t *found;
    wsync_status_t status;

    if (index == SIZE_MAX) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "quantise",
                          "%.256s is to be quantised, but no rank has it", rule->tensor);
    }
    found = &maker->tensors[index];
    found->tensor = wsync_layout_tensor(maker->layout, index);
    status = check_tensor(found->tensor, err);
    if (status != WSYNC_OK) {
        return status;
    }
    if (rule->method.block_cols % wsync_quantise_codes(rule->method.kind) != 0) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
                          "%.256s: blocks of %u columns are not whole words of %u codes",
                          rule->tensor, rule->method.block_cols,
                          wsync_quantise_codes(rule->method.kind));
    }
    found->rule = rule;
    found->method = rule->method;
    found->leading = found->tensor->ndim - 2;
    found->size[ROW] = (uint64_t)found->tensor->shape[found->leading];
    found->size[COL] = (uint64_t)found->tensor->shape[found->leading + 1];
    if (found->size[ROW] > UINT32_MAX || found->size[COL] > UINT32_MAX) {
        return wsync_fail(
            err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
            "%.256s: a matrix of 2^32 rows or columns or more is not quantised",
            rule->tensor);
    }
    if (found->method.block_rows == 0) {
        found->method.block_rows = (uint32_t)(found->size[ROW] > 0 ? found->size[ROW] : 1);
    }
    if (found->method.block_cols == 0) {
        found->method.block_cols = (uint32_t)(found->size[COL] > 0 ? found->size[COL] : 1);
    }
    found->blocks[ROW] = wsync_ceil_divide(found->size[ROW], found->method.block_rows);
    found->blocks[COL] = wsync_ceil_divide(found->size[COL], found->method.block_cols);
    return WSYNC_OK;
}

/* Whether a box's range of rows or columns begins and ends where blocks do, and words of
 * their scales. */
static bool whole_blocks(const matrices_t *matrices, unsigned axis, const wsync_box_t *box)
{
    const wsync_quantise_method_t *method = &matrices->method;
    const uint64_t block =
        axis == ROW
            ? method->block_rows
            : (uint64_t)wsync_quantise_scales_in_word(method->kind) * method->block_cols;
    const unsigned dim = matrices->leading + axis;
    const uint64_t start = (uint64_t)box->start[dim];
    const uint64_t end = start + (uint64_t)box->extent[dim];

    return start % block == 0 && (end % block == 0 || end == matrices->size[axis]);
}

static wsync_status_t check_shard(const matrices_t *matrices, const wsync_shard_t *shard,
                                  wsync_error_t *err)
{
    const char *name = matrices->tensor->name;
    const unsigned codes = wsync_quantise_codes(matrices->method.kind);
    const unsigned dim = matrices->leading + COL;
    const uint64_t start = (uint64_t)shard->box.start[dim];
    const uint64_t end = start + (uint64_t)shard->box.extent[dim];

    if (shard->affine.scale != 0) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
                          "%.256s: elements that are computed from the trainer's are not "
                          "quantised",
                          name);
    }
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        if (shard->step[i] > 1) {
            return wsync_fail(
                err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
                "%.256s: rank %u has every %u-th index of dim %u, and only whole "
                "ranges are quantised",
                name, shard->rank, shard->step[i], i);
        }
    }
    if (start % codes != 0 || (end % codes != 0 && end != matrices->size[COL])) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
                          "%.256s: rank %u has columns %llu to %llu of %llu, which cuts a "
                          "word of %u %s codes",
                          name, shard->rank, (unsigned long long)start,
                          (unsigned long long)end, (unsigned long long)matrices->size[COL],
                          codes, wsync_quantise_kind_name(matrices->method.kind));
    }
    return WSYNC_OK;
}

/* The entry that tensors with a second scale of their own or with one number share. */
static bool find_overall(maker_t *maker, matrices_t *matrices)
{
    const size_t share = matrices->rule->share;
    wsync_quantiser_t *made = maker->made;

    matrices->overall = WSYNC_QUANTISE_NONE;
    if (matrices->method.kind != WSYNC_QUANTISE_NVFP4) {
        return true;
    }
    if (share == 0) {
        matrices->overall = made->amax_count++;
        return true;
    }
    if (share >= maker->shared.count) {
        const size_t more = share + 1 - maker->shared.count;

        if (!WSYNC_ARRAY_RESERVE(maker->shared, more)) {
            return false;
        }
        while (maker->shared.count <= share) {
            maker->shared.items[maker->shared.count++] = WSYNC_QUANTISE_NONE;
        }
    }
    if (maker->shared.items[share] == WSYNC_QUANTISE_NONE) {
        maker->shared.items[share] = made->amax_count++;
    }
    matrices->overall = maker->shared.items[share];
    return true;
}

/* Decides, from the boxes of all ranks, where a tensor's scales come from. */
static wsync_status_t choose_amaxes(maker_t *maker, size_t index, wsync_error_t *err)
{
    matrices_t *matrices = &maker->tensors[index];
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(maker->layout, index, &count);
    /* a block that is the tensor has no parts that threads could share */
    bool whole =
        matrices->rule->method.block_rows != 0 || matrices->rule->method.block_cols != 0;
    uint64_t entries = matrices->blocks[ROW] * matrices->blocks[COL];

    for (size_t i = 0; i < count; i++) {
        wsync_status_t status = check_shard(matrices, &shards[i], err);

        if (status != WSYNC_OK) {
            return status;
        }
        whole = whole && whole_blocks(matrices, ROW, &shards[i].box) &&
                whole_blocks(matrices, COL, &shards[i].box);
    }
    for (unsigned i = 0; i < matrices->leading; i++) {
        entries *= (uint64_t)matrices->tensor->shape[i];
    }
    matrices->amaxes = WSYNC_QUANTISE_NONE;
    if (!whole) {
        matrices->amaxes = maker->made->amax_count;
        maker->made->amax_count += entries;
    }
    return find_overall(maker, matrices) ? WSYNC_OK : wsync_no_memory(err, "quantise");
}

/* Adds a part of a box to a count of elements. */
static wsync_status_t add_elements(void *context, const wsync_box_t *part)
{
    *(uint64_t *)context += wsync_box_count(part);
    return WSYNC_OK;
}

/* Counts what all ranks quantise of a tensor, and what of it is done again. */
static wsync_status_t count_weights(maker_t *maker, size_t index, wsync_error_t *err)
{
    const wsync_tensor_t *tensor = maker->tensors[index].tensor;
    const wsync_box_t whole = wsync_box_whole(tensor->ndim, tensor->shape);
    const uint64_t item = wsync_dtype_nbytes(tensor->dtype);
    wsync_quantiser_stats_t *stats = &maker->made->stats;
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(maker->layout, index, &count);
    uint64_t all = 0;
    uint64_t different = 0;
    wsync_status_t status = wsync_cover_start(&maker->cover, &whole, err);

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        all += wsync_box_count(&shards[i].box);
        status =
            wsync_cover_offer(&maker->cover, &shards[i].box, add_elements, &different, err);
    }
    stats->quantised_nbytes += all * item;
    stats->repeated_nbytes += (all - different) * item;
    return status;
}

/* --- what comes of a tensor ------------------------------------------------------------
 */

/* Adds a shard that lies in the image, row by row from `offset` on: among the constants, or
 * in the last buffer. */
static wsync_status_t add_shard(maker_t *maker, const wsync_tensor_t *tensor,
                                const wsync_box_t *box, uint64_t offset, const char *origin,
                                wsync_error_t *err)
{
    const wsync_quantiser_t *made = maker->made;
    const size_t buffer = offset < maker->constants_nbytes ? 0 : made->starts.count - 1;
    const uint64_t start = buffer == 0 ? 0 : made->starts.items[buffer];
    wsync_shard_t shard = {.rank = maker->rank,
                           .buffer = maker->image + (uint32_t)buffer,
                           .offset = offset - start,
                           .box = *box};
    int64_t stride = (int64_t)wsync_dtype_nbytes(tensor->dtype);
    wsync_status_t status;

    for (unsigned i = tensor->ndim; i-- > 0;) {
        shard.stride[i] = stride;
        stride *= box->extent[i];
    }
    status = wsync_layout_builder_tensor(maker->builder, tensor, &shard.tensor, err);
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_origin(maker->builder, origin, &shard.origin, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_shard(maker->builder, &shard, err);
    }
    return status;
}

/* The tensor of codes or of scales, `unit` elements or blocks of the matrix for one of its
 * rows and columns; writes the part of it that comes of `box`. */
static wsync_tensor_t derive(const matrices_t *matrices, const char *name,
                             wsync_dtype_t dtype, const uint64_t unit[2], wsync_box_t *box)
{
    wsync_tensor_t tensor = *matrices->tensor;

    tensor.name = name;
    tensor.dtype = dtype;
    tensor.group = matrices->rule->group;
    for (unsigned axis = ROW; axis <= COL; axis++) {
        const unsigned dim = matrices->leading + axis;
        const uint64_t start = (uint64_t)box->start[dim];
        const uint64_t end = start + (uint64_t)box->extent[dim];

        tensor.shape[dim] = (int64_t)wsync_ceil_divide(matrices->size[axis], unit[axis]);
        box->start[dim] = (int64_t)(start / unit[axis]);
        box->extent[dim] =
            (int64_t)(wsync_ceil_divide(end, unit[axis]) - start / unit[axis]);
    }
    return tensor;
}

/* Where a shard's codes and scales go. */
typedef struct target {
    uint64_t codes;
    uint64_t codes_stride;
    uint64_t scales;
    uint64_t scales_stride;
    uint64_t scale_rows;
    uint64_t second;
} target_t;

static wsync_status_t place_codes(maker_t *maker, const matrices_t *matrices,
                                  const wsync_shard_t *shard, target_t *target,
                                  wsync_error_t *err)
{
    const wsync_quantise_kind_t kind = matrices->method.kind;
    const uint64_t unit[2] = {1, wsync_quantise_codes(kind)};
    wsync_box_t box = shard->box;
    const wsync_tensor_t tensor =
        derive(matrices, matrices->rule->codes, wsync_quantise_word(kind), unit, &box);
    const uint64_t word = wsync_dtype_nbytes(tensor.dtype);

    wsync_status_t status =
        take_image(maker, wsync_box_count(&box) * word, &target->codes, err);

    if (status != WSYNC_OK) {
        return status;
    }
    target->codes_stride = (uint64_t)box.extent[matrices->leading + COL] * word;
    return add_shard(maker, &tensor, &box, target->codes,
                     wsync_layout_origin(maker->layout, shard->origin), err);
}

static wsync_status_t place_scales(maker_t *maker, const matrices_t *matrices,
                                   const wsync_shard_t *shard, target_t *target,
                                   wsync_error_t *err)
{
    const wsync_quantise_rule_t *rule = matrices->rule;
    const uint64_t in_word = wsync_quantise_scales_in_word(matrices->method.kind);
    const uint64_t unit[2] = {in_word > 1 ? 1 : matrices->method.block_rows,
                              in_word * matrices->method.block_cols};
    wsync_box_t box = shard->box;
    wsync_tensor_t tensor = derive(
        matrices, rule->scales,
        wsync_quantise_scale(matrices->method.kind, matrices->tensor->dtype), unit, &box);
    const uint64_t item = wsync_dtype_nbytes(tensor.dtype);
    wsync_status_t status =
        take_image(maker, wsync_box_count(&box) * item, &target->scales, err);

    if (status != WSYNC_OK) {
        return status;
    }
    target->scale_rows = (uint64_t)box.extent[matrices->leading];
    target->scales_stride = (uint64_t)box.extent[matrices->leading + COL] * item;
    if (matrices->method.kind == WSYNC_QUANTISE_FP8_TENSOR) {
        /* one number for a matrix has no rows */
        tensor.ndim = matrices->leading > 0 ? matrices->leading : 1;
        tensor.shape[tensor.ndim] = 1;
        tensor.shape[tensor.ndim + 1] = 1;
    }
    return add_shard(maker, &tensor, &box, target->scales, rule->scales, err);
}

static wsync_status_t place_second_scale(maker_t *maker, const matrices_t *matrices,
                                         target_t *target, wsync_error_t *err)
{
    const wsync_tensor_t tensor = {.name = matrices->rule->second,
                                   .dtype = WSYNC_DTYPE_FLOAT32,
                                   .group = matrices->rule->group};
    const wsync_box_t box = wsync_box_whole(0, NULL);
    wsync_status_t status;

    target->second = WSYNC_QUANTISE_NONE;
    if (tensor.name == NULL) {
        return WSYNC_OK;
    }
    if (matrices->leading > 0) {
        return wsync_fail(
            err, WSYNC_ERR_UNSUPPORTED, 0, "quantise",
            "%.256s: several matrices in one tensor cannot have second scales",
            matrices->tensor->name);
    }
    status = take_image(maker, sizeof(float), &target->second, err);
    return status == WSYNC_OK
               ? add_shard(maker, &tensor, &box, target->second, tensor.name, err)
               : status;
}

/* The rows and columns of a matrix, among the constants, which lie at the image's start. */
static wsync_status_t place_shape(maker_t *maker, const matrices_t *matrices,
                                  wsync_error_t *err)
{
    const int64_t *shape = &matrices->tensor->shape[matrices->leading];
    const wsync_tensor_t tensor = {.name = matrices->rule->shape,
                                   .dtype = WSYNC_DTYPE_INT64,
                                   .group = matrices->rule->group,
                                   .ndim = 1,
                                   .shape = {2, 1, 1, 1, 1, 1}};
    const wsync_box_t box = wsync_box_whole(1, tensor.shape);
    wsync_quantiser_t *made = maker->made;
    const uint64_t offset = made->constants.count * sizeof(int64_t);

    if (tensor.name == NULL) {
        return WSYNC_OK;
    }
    if (!WSYNC_ARRAY_RESERVE(made->constants, 2)) {
        return wsync_no_memory(err, "quantise");
    }
    made->constants.items[made->constants.count++] = shape[ROW];
    made->constants.items[made->constants.count++] = shape[COL];
    return add_shard(maker, &tensor, &box, offset, tensor.name, err);
}

/* One piece for every matrix of a shard's box. */
static wsync_status_t add_pieces(maker_t *maker, const matrices_t *matrices,
                                 const wsync_shard_t *shard, const target_t *target,
                                 wsync_error_t *err)
{
    const wsync_box_t *box = &shard->box;
    const unsigned dim = matrices->leading;
    const uint64_t rows = (uint64_t)box->extent[dim];
    const uint64_t count = wsync_box_count(box) / rows / (uint64_t)box->extent[dim + COL];
    wsync_quantise_piece_t piece = {
        .method = matrices->rule->method,
        .dtype = matrices->tensor->dtype,
        .source_buffer = shard->buffer,
        .source_stride = {shard->stride[dim], shard->stride[dim + COL]},
        .start = {(uint64_t)box->start[dim], (uint64_t)box->start[dim + COL]},
        .extent = {rows, (uint64_t)box->extent[dim + COL]},
        .codes_stride = target->codes_stride,
        .scales_stride = target->scales_stride,
        .amaxes = WSYNC_QUANTISE_NONE,
        .amax_stride = matrices->blocks[COL],
        .grid = {matrices->blocks[ROW], matrices->blocks[COL]},
        .overall = matrices->overall,
        .second = target->second};

    uint32_t name;
    bool added;
    const wsync_status_t status =
        wsync_names_add(&maker->made->names, matrices->tensor->name, &name, &added, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!WSYNC_ARRAY_RESERVE(maker->made->pieces, count)) {
        return wsync_no_memory(err, "quantise");
    }
    piece.tensor = maker->made->names.items[name];
    for (uint64_t number = 0; number < count; number++) {
        uint64_t rest = number;
        uint64_t matrix = 0; /* among all of the tensor */
        uint64_t factor = 1;

        piece.source_offset = shard->offset;
        for (unsigned i = dim; i-- > 0;) {
            const uint64_t index = rest % (uint64_t)box->extent[i];

            rest /= (uint64_t)box->extent[i];
            piece.source_offset += (uint64_t)((int64_t)index * shard->stride[i]);
            matrix += factor * ((uint64_t)box->start[i] + index);
            factor *= (uint64_t)matrices->tensor->shape[i];
        }
        piece.codes = target->codes + number * rows * target->codes_stride;
        piece.scales = target->scales + number * target->scale_rows * target->scales_stride;
        if (matrices->amaxes != WSYNC_QUANTISE_NONE) {
            piece.amaxes =
                matrices->amaxes + matrix * matrices->blocks[ROW] * matrices->blocks[COL];
        }
        maker->made->pieces.items[maker->made->pieces.count++] = piece;
    }
    return WSYNC_OK;
}

static wsync_status_t quantise_shard(maker_t *maker, const matrices_t *matrices,
                                     const wsync_shard_t *shard, wsync_error_t *err)
{
    target_t target = {0};
    wsync_status_t status = place_codes(maker, matrices, shard, &target, err);

    if (status == WSYNC_OK) {
        status = place_scales(maker, matrices, shard, &target, err);
    }
    if (status == WSYNC_OK) {
        status = place_second_scale(maker, matrices, &target, err);
    }
    if (status == WSYNC_OK) {
        status = add_pieces(maker, matrices, shard, &target, err);
    }
    return status;
}

/* A shard that is not quantised, as the layout has it. */
static wsync_status_t keep_shard(maker_t *maker, const wsync_shard_t *shard,
                                 wsync_error_t *err)
{
    wsync_shard_t kept = *shard;
    wsync_status_t status = wsync_layout_builder_tensor(
        maker->builder, wsync_layout_tensor(maker->layout, shard->tensor), &kept.tensor,
        err);

    if (status == WSYNC_OK) {
        status = wsync_layout_builder_origin(
            maker->builder, wsync_layout_origin(maker->layout, shard->origin), &kept.origin,
            err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_shard(maker->builder, &kept, err);
    }
    return status;
}

static wsync_status_t add_tensor(maker_t *maker, size_t index, wsync_error_t *err)
{
    const matrices_t *matrices = &maker->tensors[index];
    size_t count;
    const wsync_shard_t *shards = wsync_layout_shards(maker->layout, index, &count);
    bool found = false;
    wsync_status_t status = WSYNC_OK;

    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (shards[i].rank != maker->rank) {
            continue;
        }
        status = matrices->rule != NULL ? quantise_shard(maker, matrices, &shards[i], err)
                                        : keep_shard(maker, &shards[i], err);
        found = true;
    }
    if (status == WSYNC_OK && found && matrices->rule != NULL) {
        status = place_shape(maker, matrices, err);
    }
    return status;
}

/* --- the quantiser ----------------------------------------------------------------------
 */

/* Bytes that constants will take at the start of the image. */
static uint64_t constants_nbytes(const wsync_quantise_rule_t *rules, size_t count)
{
    uint64_t nbytes = 0;

    for (size_t i = 0; i < count; i++) {
        nbytes += rules[i].shape != NULL ? 2 * sizeof(int64_t) : 0;
    }
    return nbytes;
}

static wsync_status_t make_quantiser(maker_t *maker, const wsync_quantise_rule_t *rules,
                                     size_t count, wsync_error_t *err)
{
    const size_t tensors = wsync_layout_tensor_count(maker->layout);
    wsync_status_t status = wsync_layout_builder_create(&maker->builder, err);

    maker->constants_nbytes = constants_nbytes(rules, count);
    maker->made->image_nbytes = maker->constants_nbytes;
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = add_rule(maker, &rules[i], err);
    }
    for (size_t i = 0; i < tensors && status == WSYNC_OK; i++) {
        if (maker->tensors[i].rule != NULL) {
            status = choose_amaxes(maker, i, err);
            if (status == WSYNC_OK) {
                status = count_weights(maker, i, err);
            }
        }
    }
    for (size_t i = 0; i < tensors && status == WSYNC_OK; i++) {
        status = add_tensor(maker, i, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(maker->builder, &maker->made->layout, err);
    }
    return status;
}

wsync_status_t wsync_quantiser_create(const wsync_layout_t *layout, uint32_t rank,
                                      uint32_t buffers, const wsync_quantise_rule_t *rules,
                                      size_t count, wsync_quantiser_t **quantiser,
                                      wsync_error_t *err)
{
    maker_t maker = {.layout = layout, .rank = rank, .image = buffers};
    wsync_status_t status;

    if (rank < wsync_layout_rank_count(layout) &&
        wsync_layout_buffer_count(layout, rank) > buffers) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, "quantise",
            "rank %u: codes and scales begin at buffer %u, but its tensors have "
            "%u buffers",
            rank, buffers, wsync_layout_buffer_count(layout, rank));
    }
    maker.made = calloc(1, sizeof(*maker.made));
    maker.tensors = calloc(wsync_layout_tensor_count(layout) + 1, sizeof(*maker.tensors));
    status = maker.made != NULL && maker.tensors != NULL
                 ? make_quantiser(&maker, rules, count, err)
                 : wsync_no_memory(err, "quantise");
    wsync_layout_builder_destroy(maker.builder);
    wsync_cover_fini(&maker.cover);
    free(maker.tensors);
    free(maker.shared.items);
    if (status == WSYNC_OK) {
        *quantiser = maker.made;
    } else {
        wsync_quantiser_destroy(maker.made);
    }
    return status;
}

void wsync_quantiser_destroy(wsync_quantiser_t *quantiser)
{
    if (quantiser != NULL) {
        wsync_layout_destroy(quantiser->layout);
        free(quantiser->pieces.items);
        wsync_names_fini(&quantiser->names);
        free(quantiser->constants.items);
        free(quantiser->starts.items);
        free(quantiser);
    }
}

wsync_layout_t *wsync_quantiser_take_layout(wsync_quantiser_t *quantiser)
{
    wsync_layout_t *layout = quantiser->layout;

    quantiser->layout = NULL;
    return layout;
}

const wsync_quantise_piece_t *wsync_quantiser_pieces(const wsync_quantiser_t *quantiser,
                                                     size_t *count)
{
    *count = quantiser->pieces.count;
    return quantiser->pieces.items;
}

uint64_t wsync_quantiser_image_nbytes(const wsync_quantiser_t *quantiser)
{
    return quantiser->image_nbytes;
}

const uint64_t *wsync_quantiser_starts(const wsync_quantiser_t *quantiser, size_t *count)
{
    *count = quantiser->starts.count;
    return quantiser->starts.items;
}

const void *wsync_quantiser_constants(const wsync_quantiser_t *quantiser, size_t *nbytes)
{
    *nbytes = quantiser->constants.count * sizeof(int64_t);
    return quantiser->constants.items;
}

uint64_t wsync_quantiser_amax_count(const wsync_quantiser_t *quantiser)
{
    return quantiser->amax_count;
}

wsync_quantiser_stats_t wsync_quantiser_stats(const wsync_quantiser_t *quantiser)
{
    return quantiser->stats;
}
