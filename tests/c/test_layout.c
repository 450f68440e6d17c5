/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/layout.h"
#include "layouts.h"

TEST(shards_come_sorted_by_tensor)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *layout;
    const wsync_shard_t *shards;
    size_t count;

    add_rows(builder, matrix("a", 4, 3), 2, 5, 0, 0, 2);
    add_rows(builder, matrix("b", 1, 3), 0, 1, 0, 0, 1);
    add_rows(builder, matrix("a", 4, 3), 0, 0, 8, 2, 2);
    layout = finish(builder);
    CHECK_EQ(wsync_layout_tensor_count(layout), 2);
    CHECK_EQ(wsync_layout_shard_count(layout), 3);
    CHECK_EQ(wsync_layout_origin_count(layout), 2);
    CHECK_EQ(wsync_layout_rank_count(layout), 3);
    CHECK_EQ(wsync_layout_buffer_count(layout, 0), 2);
    CHECK_EQ(wsync_layout_buffer_count(layout, 1), 0);
    CHECK_EQ(wsync_layout_buffer_count(layout, 2), 6);
    CHECK_EQ(wsync_layout_buffer_count(layout, 3), 0);
    CHECK_EQ(wsync_layout_nbytes(layout), 2 * (12 + 3));
    shards = wsync_layout_shards(layout, wsync_layout_find(layout, "a"), &count);
    CHECK_EQ(count, 2);
    CHECK_EQ(shards[0].rank, 2);
    CHECK_EQ(shards[1].offset, 8);
    CHECK_STR(wsync_layout_origin(layout, shards[1].origin), "a");
    shards = wsync_layout_shards(layout, wsync_layout_find(layout, "b"), &count);
    CHECK_EQ(count, 1);
    CHECK_EQ(shards[0].buffer, 1);
    CHECK(wsync_layout_find(layout, "c") == SIZE_MAX);
    wsync_layout_destroy(layout);
}

TEST(an_empty_layout_is_a_layout)
{
    wsync_layout_t *layout = finish(new_builder());

    CHECK_EQ(wsync_layout_tensor_count(layout), 0);
    CHECK_EQ(wsync_layout_shard_count(layout), 0);
    CHECK_EQ(wsync_layout_rank_count(layout), 0);
    CHECK(wsync_layout_find(layout, "a") == SIZE_MAX);
    wsync_layout_destroy(layout);
    wsync_layout_destroy(NULL);
    wsync_layout_builder_destroy(NULL);
}

TEST(a_builder_is_empty_after_finish)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};

    add_rows(builder, matrix("a", 4, 3), 0, 0, 0, 0, 4);
    CHECK_OK(wsync_layout_builder_finish(builder, &layout, &err), err);
    wsync_layout_destroy(layout);
    add_rows(builder, matrix("a", 9, 9), 0, 0, 0, 0, 9); /* another shape: forgotten */
    wsync_layout_builder_destroy(builder);
}

TEST(many_names_are_all_found)
{
    enum { COUNT = 50000 };
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *layout;
    char name[64];

    for (int i = 0; i < COUNT; i++) {
        (void)snprintf(name, sizeof(name), "model.layers.%d.weight", i);
        add_rows(builder, matrix(name, 1, 1), 0, 0, 0, 0, 1);
    }
    layout = finish(builder);
    for (int i = 0; i < COUNT; i++) {
        (void)snprintf(name, sizeof(name), "model.layers.%d.weight", i);
        CHECK_EQ(wsync_layout_find(layout, name), i);
        CHECK_STR(wsync_layout_tensor(layout, (size_t)i)->name, name);
    }
    wsync_layout_destroy(layout);
}

TEST(one_name_has_one_description)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_tensor_t tensor = matrix("a.weight", 4, 3);
    wsync_error_t err = {0};
    uint32_t index = 99;

    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &index, &err), err);
    CHECK_EQ(index, 0);
    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &index, &err), err);
    tensor.shape[0] = 5;
    index = 99;
    CHECK_EQ(wsync_layout_builder_tensor(builder, &tensor, &index, &err), WSYNC_ERR_LAYOUT);
    CHECK_EQ(index, 99);
    CHECK_HAS(err.message, "a.weight");
    CHECK_HAS(err.message, "[4, 3]");
    CHECK_HAS(err.message, "[5, 3]");
    tensor = matrix("a.weight", 4, 3);
    tensor.dtype = WSYNC_DTYPE_FLOAT32;
    CHECK_EQ(wsync_layout_builder_tensor(builder, &tensor, &index, &err), WSYNC_ERR_LAYOUT);
    CHECK_HAS(err.message, "float32");
    tensor = matrix("a.weight", 4, 3);
    tensor.group = 7;
    CHECK_EQ(wsync_layout_builder_tensor(builder, &tensor, &index, &err), WSYNC_ERR_LAYOUT);
    CHECK_HAS(err.message, "group 7");
    wsync_layout_builder_destroy(builder);
}

static void refuse_tensor(wsync_tensor_t tensor, const char *part)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_error_t err = {0};
    uint32_t index;

    CHECK_EQ(wsync_layout_builder_tensor(builder, &tensor, &index, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, part);
    wsync_layout_builder_destroy(builder);
}

TEST(impossible_tensors_are_refused)
{
    wsync_tensor_t tensor = matrix("a", 4, -1);

    refuse_tensor(tensor, "[4, -1]");
    refuse_tensor(matrix("", 4, 4), "no name");
    refuse_tensor(matrix("a", INT64_MAX / 2, 2), "[4611686018427387903, 2]");
    refuse_tensor(matrix("a", 0, INT64_MAX), "[0, 9223372036854775807]");
    tensor = matrix("a", 4, 4);
    tensor.ndim = WSYNC_MAX_NDIM + 1;
    refuse_tensor(tensor, "7 dimensions");
    tensor.ndim = 2;
    tensor.dtype = WSYNC_DTYPE_COUNT;
    refuse_tensor(tensor, "dtype");
}

static void refuse_shard(wsync_shard_t shard, const char *part)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *layout;
    wsync_error_t err = {0};
    wsync_tensor_t tensor = matrix("a.weight", 4, 3);
    uint32_t index;

    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &index, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "", &index, &err), err);
    CHECK_EQ(wsync_layout_builder_shard(builder, &shard, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, part);
    layout = finish(builder);
    CHECK_EQ(wsync_layout_shard_count(layout), 0);
    wsync_layout_destroy(layout);
}

TEST(impossible_shards_are_refused)
{
    const int64_t shape[2] = {4, 3};
    const wsync_shard_t good = {.box = wsync_box_whole(2, shape), .stride = {6, 2}};
    wsync_shard_t shard = good;

    shard.tensor = 1;
    refuse_shard(shard, "tensor 1");
    shard = good;
    shard.origin = 1;
    refuse_shard(shard, "a.weight: origin 1");
    shard = good;
    shard.rank = WSYNC_MAX_RANKS;
    refuse_shard(shard, "rank 65536");
    shard = good;
    shard.box.start[1] = 1;
    refuse_shard(shard,
                 "a.weight: dim 1: start 1 with extent 3 is not inside shape [4, 3]");
    shard = good;
    shard.box.start[0] = INT64_MAX;
    refuse_shard(shard, "dim 0");
    shard = good;
    shard.box.extent[2] = 2;
    refuse_shard(shard, "dim 2");
    shard = good;
    shard.offset = UINT64_MAX;
    refuse_shard(shard, "a.weight");
    shard = good;
    shard.stride[0] = INT64_MAX;
    refuse_shard(shard, "address range");
    shard = good;
    shard.stride[0] = -2;
    refuse_shard(shard, "address range");
}

TEST(empty_boxes_are_dropped)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *layout;
    size_t count = 9;

    add_rows(builder, matrix("a", 4, 3), 0, 0, 0, 4, 0);
    add_rows(builder, matrix("b", 0, 3), 0, 1, 0, 0, 0);
    layout = finish(builder);
    CHECK_EQ(wsync_layout_tensor_count(layout), 2);
    CHECK_EQ(wsync_layout_shard_count(layout), 0);
    CHECK_EQ(wsync_layout_nbytes(layout), 24);
    CHECK(wsync_layout_shards(layout, 1, &count) == NULL);
    CHECK_EQ(count, 0);
    wsync_layout_destroy(layout);
}

/* The region is rows 2..5 of a [6, 8] parameter; the map takes rows 1..4, columns 4..6, and
 * transposes them into a [2, 8] tensor from its column 3 on. */
TEST(composition_places_the_common_part)
{
    wsync_layout_builder_t *builder = new_builder();
    const wsync_tensor_t tensor = matrix("t", 2, 8);
    wsync_map_t map = {.target = wsync_box_whole(0, NULL),
                       .source_start = {1, 4},
                       .axis = {1, 0},
                       .target_ndim = 2,
                       .source_ndim = 2};
    wsync_shard_t region = {.rank = 1,
                            .buffer = 9,
                            .offset = 100,
                            .box = wsync_box_whole(0, NULL),
                            .stride = {16, 2}};
    wsync_error_t err = {0};
    wsync_layout_t *layout;
    const wsync_shard_t *shards;
    uint64_t added = 0;
    size_t count;

    map.target.start[1] = 3;
    map.target.extent[0] = 2;
    map.target.extent[1] = 3;
    region.box.start[0] = 2;
    region.box.extent[0] = 3;
    region.box.extent[1] = 8;
    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &region.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "p", &region.origin, &err), err);
    CHECK_OK(wsync_layout_builder_compose(builder, &region, &map, &added, &err), err);
    CHECK_EQ(added, 4);
    region.box.start[0] = 4; /* rows 4..7: beyond the map */
    CHECK_OK(wsync_layout_builder_compose(builder, &region, &map, &added, &err), err);
    CHECK_EQ(added, 0);
    layout = finish(builder);
    shards = wsync_layout_shards(layout, 0, &count);
    CHECK_EQ(count, 1);
    CHECK_EQ(shards[0].offset, 100 + 4 * 2);
    CHECK_EQ(shards[0].box.start[0], 0);
    CHECK_EQ(shards[0].box.start[1], 4);
    CHECK_EQ(shards[0].box.extent[0], 2);
    CHECK_EQ(shards[0].box.extent[1], 2);
    CHECK_EQ(shards[0].stride[0], 2);
    CHECK_EQ(shards[0].stride[1], 16);
    CHECK_EQ(shards[0].buffer, 9);
    wsync_layout_destroy(layout);
}

static void refuse_map(wsync_map_t map, const char *part)
{
    wsync_layout_builder_t *builder = new_builder();
    const wsync_tensor_t tensor = matrix("t.weight", 2, 8);
    const wsync_shard_t region = {.box = wsync_box_whole(2, tensor.shape),
                                  .stride = {16, 2}};
    wsync_error_t err = {0};
    uint32_t index;

    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &index, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "p", &index, &err), err);
    CHECK_EQ(wsync_layout_builder_compose(builder, &region, &map, NULL, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "t.weight: ");
    CHECK_HAS(err.message, part);
    wsync_layout_builder_destroy(builder);
}

TEST(maps_that_are_no_injection_are_refused)
{
    const int64_t shape[2] = {2, 8};
    const wsync_map_t good = {.target = wsync_box_whole(2, shape),
                              .axis = {0, 1},
                              .target_ndim = 2,
                              .source_ndim = 2};
    wsync_map_t map = good;

    map.axis[1] = 0;
    refuse_map(map, "dim 1 with extent 8 cannot come from axis 0");
    map = good;
    map.axis[1] = 2;
    refuse_map(map, "axis 2");
    map = good;
    map.axis[1] = -1;
    refuse_map(map, "axis -1");
    map = good;
    map.target_ndim = 3;
    refuse_map(map, "from 2 to 3 dimensions");
    map = good;
    map.source_start[0] = -1;
    refuse_map(map, "source start -1");
    map = good;
    map.source_start[1] = INT64_MAX - 7;
    refuse_map(map, "source start 9223372036854775800 with extent 8 is no range");
    map = good; /* of an axis that no dimension comes from */
    map.source_ndim = 3;
    map.source_start[2] = INT64_MAX;
    refuse_map(map, "axis 2: source start 9223372036854775807 is no index");
    map.source_start[2] = -1;
    refuse_map(map, "axis 2: source start -1 is no index");
    map = good;
    map.target.start[1] = 1;
    refuse_map(map, "dim 1: start 1 with extent 8");
}

TEST(merging_unites_tensors_shards_and_origins)
{
    wsync_layout_builder_t *builder = new_builder();
    wsync_layout_t *parts[2];
    wsync_layout_t *merged = NULL;
    wsync_error_t err = {0};
    const wsync_shard_t *shards;
    size_t count;

    add_rows(builder, matrix("a", 4, 3), 0, 0, 0, 0, 2);
    parts[0] = finish(builder);
    builder = new_builder();
    add_rows(builder, matrix("b", 4, 3), 1, 0, 0, 0, 4);
    add_rows(builder, matrix("a", 4, 3), 1, 1, 0, 2, 2);
    parts[1] = finish(builder);
    CHECK_OK(wsync_layout_merge((const wsync_layout_t *const *)parts, 2, &merged, &err),
             err);
    CHECK_EQ(wsync_layout_tensor_count(merged), 2);
    CHECK_STR(wsync_layout_tensor(merged, 0)->name, "a");
    shards = wsync_layout_shards(merged, 0, &count);
    CHECK_EQ(count, 2);
    CHECK_EQ(shards[1].rank, 1);
    CHECK_EQ(shards[1].buffer, 1);
    CHECK_STR(wsync_layout_origin(merged, shards[1].origin), "a");
    CHECK_EQ(wsync_layout_nbytes(merged), 48);
    wsync_layout_destroy(merged);
    wsync_layout_destroy(parts[0]);
    wsync_layout_destroy(parts[1]);
}

TEST(merging_names_the_ranks_that_disagree)
{
    wsync_layout_t *parts[3];
    wsync_layout_t *merged = NULL;
    wsync_error_t err = {0};

    for (uint32_t i = 0; i < 3; i++) {
        wsync_layout_builder_t *builder = new_builder();

        add_rows(builder, matrix("up_proj.weight", i == 2 ? 5 : 4, 3), 10 + i, 0, 0, 0, 4);
        parts[i] = finish(builder);
    }
    CHECK_EQ(wsync_layout_merge((const wsync_layout_t *const *)parts, 3, &merged, &err),
             WSYNC_ERR_LAYOUT);
    CHECK(merged == NULL);
    CHECK_HAS(err.message, "up_proj.weight: rank 10 has bfloat16 [4, 3]");
    CHECK_HAS(err.message, "rank 12 has bfloat16 [5, 3]");
    for (int i = 0; i < 3; i++) {
        wsync_layout_destroy(parts[i]);
    }
}
