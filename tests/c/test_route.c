/* SPDX-License-Identifier: Apache-2.0 */
#include "core/route.h"
#include "core/write_overlap.h"
#include "layouts.h"

/* Makes a route and destroys the layouts. */
static wsync_status_t make(wsync_layout_t *source, wsync_layout_t *destination,
                           wsync_route_t **route, wsync_error_t *err)
{
    const wsync_status_t status = wsync_route_create(source, destination, route, err);

    wsync_layout_destroy(source);
    wsync_layout_destroy(destination);
    return status;
}

static void refuse(wsync_layout_t *source, wsync_layout_t *destination,
                   wsync_status_t expected, const char *part)
{
    wsync_route_t *route = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(make(source, destination, &route, &err), expected);
    CHECK(route == NULL);
    CHECK_HAS(err.message, part);
}

static wsync_copy_t strided(uint64_t offset, uint64_t row, int64_t extent, int64_t stride)
{
    const wsync_copy_t copy = {.destination_offset = offset,
                               .row_count = row,
                               .source_item_nbytes = 1,
                               .destination_item_nbytes = 1,
                               .ndim = 1,
                               .extent = {extent},
                               .source_stride = {stride},
                               .destination_stride = {stride}};

    return copy;
}

static wsync_overlap_t find_overlap(const wsync_copy_t *copies, size_t count)
{
    wsync_overlap_t overlap = {0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_copies_find_overlap(copies, count, &overlap, &err), err);
    return overlap;
}

TEST(interleaved_columns_do_not_overlap)
{
    wsync_copy_t copies[3] = {strided(0, 4, 8, 12), strided(8, 4, 8, 12),
                              strided(4, 4, 8, 12)};
    wsync_overlap_t overlap = find_overlap(copies, 3);

    CHECK(!overlap.found);
    copies[2].row_count = 5;
    overlap = find_overlap(copies, 3);
    CHECK(overlap.found);
    CHECK_EQ(overlap.first + overlap.second, 1 + 2);
    CHECK_EQ(overlap.offset, 8);
    copies[2].destination_buffer = 1;
    CHECK(!find_overlap(copies, 3).found);
}

TEST(a_long_copy_reaches_past_a_short_one)
{
    const wsync_copy_t copies[3] = {strided(0, 4, 8, 12), strided(4, 4, 1, 4),
                                    strided(48, 4, 1, 4)};
    const wsync_overlap_t overlap = find_overlap(copies, 3);

    CHECK(!find_overlap(copies, 2).found);
    CHECK(overlap.found);
    CHECK_EQ(overlap.first, 0);
    CHECK_EQ(overlap.second, 2);
    CHECK_EQ(overlap.offset, 48);
}

TEST(a_copy_may_overlap_itself)
{
    const wsync_copy_t same = strided(10, 4, 2, 0);
    const wsync_copy_t close = strided(10, 4, 3, 3);
    const wsync_copy_t backwards = strided(10, 4, 3, -4);
    wsync_overlap_t overlap = find_overlap(&same, 1);

    CHECK(overlap.found);
    CHECK_EQ(overlap.first, overlap.second);
    CHECK_EQ(overlap.offset, 10);
    overlap = find_overlap(&close, 1);
    CHECK(overlap.found);
    CHECK_EQ(overlap.offset, 13);
    CHECK(!find_overlap(&backwards, 1).found);
}

/* Box `extent` at `start` of a tensor of bytes that is laid out whole, row-major. */
static void add_bytes(wsync_layout_builder_t *builder, wsync_tensor_t tensor,
                      const int64_t *start, const int64_t *extent)
{
    wsync_shard_t shard = {.box = wsync_box_whole(tensor.ndim, tensor.shape)};
    wsync_error_t err = {0};
    int64_t step = 1;

    for (uint32_t i = tensor.ndim; i-- > 0;) {
        shard.box.start[i] = start[i];
        shard.box.extent[i] = extent[i];
        shard.stride[i] = step;
        shard.offset += (uint64_t)(start[i] * step);
        step *= tensor.shape[i];
    }
    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &shard.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "o", &shard.origin, &err), err);
    CHECK_OK(wsync_layout_builder_shard(builder, &shard, &err), err);
}

/* Sheets across all axes: 225 boxes leave 76 * 76 * 76 holes. */
TEST(boxes_across_each_other_are_refused_before_they_cost_memory)
{
    enum { SIDE = 228, GAP = 3 };
    const wsync_tensor_t tensor = {
        .name = "w", .dtype = WSYNC_DTYPE_UINT8, .ndim = 3, .shape = {SIDE, SIDE, SIDE}};
    const int64_t origin[3] = {0};
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *wanted = new_builder();

    for (int64_t at = GAP; at < SIDE; at += GAP) {
        for (int axis = 0; axis < 3; axis++) {
            int64_t start[3] = {0};
            int64_t extent[3] = {SIDE, SIDE, SIDE};

            start[axis] = at;
            extent[axis] = 1;
            add_bytes(source, tensor, start, extent);
        }
    }
    add_bytes(wanted, tensor, origin, tensor.shape);
    refuse(finish(source), finish(wanted), WSYNC_ERR_LAYOUT,
           "w: the source's boxes overlap");
}

TEST(tiles_may_come_in_any_order)
{
    enum { SIDE = 64, STEP = 2731 }; /* no common divisor with the number of tiles */
    const wsync_tensor_t tensor = {
        .name = "w", .dtype = WSYNC_DTYPE_UINT8, .ndim = 2, .shape = {2 * SIDE, 2 * SIDE}};
    const int64_t origin[2] = {0};
    const int64_t extent[2] = {2, 2};
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *wanted = new_builder();
    wsync_route_t *route = NULL;
    wsync_error_t err = {0};
    size_t count = 0;

    for (int64_t i = 0; i < SIDE * SIDE; i++) {
        const int64_t tile = i * STEP % (SIDE * SIDE);
        const int64_t start[2] = {tile / SIDE * 2, tile % SIDE * 2};

        add_bytes(source, tensor, start, extent);
    }
    add_bytes(wanted, tensor, origin, tensor.shape);
    CHECK_OK(make(finish(source), finish(wanted), &route, &err), err);
    (void)wsync_route_copies(route, 0, &count);
    CHECK_EQ(count, SIDE * SIDE);
    wsync_route_destroy(route);
}
