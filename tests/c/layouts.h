/* SPDX-License-Identifier: Apache-2.0
 * Short ways to build layouts in tests. */
#ifndef WSYNC_TESTS_LAYOUTS_H
#define WSYNC_TESTS_LAYOUTS_H

#include "core/layout/layout.h"
#include "harness.h"

static inline wsync_layout_builder_t *new_builder(void)
{
    wsync_layout_builder_t *builder = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_layout_builder_create(&builder, &err), err);
    return builder;
}

static inline wsync_tensor_t matrix(const char *name, int64_t rows, int64_t columns)
{
    const wsync_tensor_t tensor = {
        .name = name, .dtype = WSYNC_DTYPE_BFLOAT16, .ndim = 2, .shape = {rows, columns}};

    return tensor;
}

/* Rows [first, first + count) of a bfloat16 matrix, contiguous at `offset` of `buffer`. */
static inline void add_rows(wsync_layout_builder_t *builder, wsync_tensor_t tensor,
                            uint32_t rank, uint32_t buffer, uint64_t offset, int64_t first,
                            int64_t count)
{
    wsync_shard_t shard = {.rank = rank,
                           .buffer = buffer,
                           .offset = offset,
                           .box = wsync_box_whole(2, tensor.shape),
                           .stride = {2 * tensor.shape[1], 2}};
    wsync_error_t err = {0};

    shard.box.start[0] = first;
    shard.box.extent[0] = count;
    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &shard.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, tensor.name, &shard.origin, &err), err);
    CHECK_OK(wsync_layout_builder_shard(builder, &shard, &err), err);
}

/* Finishes and destroys the builder. */
static inline wsync_layout_t *finish(wsync_layout_builder_t *builder)
{
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_layout_builder_finish(builder, &layout, &err), err);
    wsync_layout_builder_destroy(builder);
    return layout;
}

#endif
