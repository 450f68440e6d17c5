/* SPDX-License-Identifier: Apache-2.0
 * Every allocation of the core fails once. */
#include "core/layout/encoding.h"
#include "core/layout/join.h"
#include "core/route.h"
#include "core/write_overlap.h"
#include "layouts.h"
#include "oom.h"

enum { TENSOR_COUNT = 70 }; /* beyond the first size of every table */

static wsync_status_t fill(wsync_layout_builder_t *builder, wsync_error_t *err)
{
    const wsync_map_t map = {.target = wsync_box_whole(2, (const int64_t[]){4, 3}),
                             .axis = {1, 0},
                             .target_ndim = 2,
                             .source_ndim = 2};
    wsync_status_t status = WSYNC_OK;

    for (int i = 0; i < TENSOR_COUNT && status == WSYNC_OK; i++) {
        char name[1 << 9];
        wsync_tensor_t tensor = matrix(name, 4, 3);
        wsync_shard_t shard = {.tensor = UINT32_MAX,
                               .origin = UINT32_MAX,
                               .rank = (uint32_t)i % 2,
                               .buffer = (uint32_t)i,
                               .box = wsync_box_whole(2, (const int64_t[]){3, 4}),
                               .stride = {8, 2}};
        uint64_t added = 77;

        (void)snprintf(name, sizeof(name), "%0500d", i);
        status = wsync_layout_builder_tensor(builder, &tensor, &shard.tensor, err);
        CHECK(status == WSYNC_OK || shard.tensor == UINT32_MAX);
        if (status == WSYNC_OK) {
            status = wsync_layout_builder_origin(builder, name, &shard.origin, err);
            CHECK(status == WSYNC_OK || shard.origin == UINT32_MAX);
        }
        if (status == WSYNC_OK) {
            status = wsync_layout_builder_compose(builder, &shard, &map, &added, err);
            CHECK_EQ(added, status == WSYNC_OK ? 12 : 77);
        }
        shard.tensor = 0; /* out of order, so that finish has to sort */
        shard.box = wsync_box_whole(2, (const int64_t[]){4, 3});
        if (status == WSYNC_OK) {
            status = wsync_layout_builder_shard(builder, &shard, err);
        }
    }
    return status;
}

static wsync_status_t build(void *context, wsync_error_t *err)
{
    wsync_layout_t **output = context;
    wsync_layout_builder_t *builder = NULL;
    wsync_layout_t *layout = NULL;
    wsync_status_t status = wsync_layout_builder_create(&builder, err);

    CHECK_EQ(status == WSYNC_OK, builder != NULL);
    if (status == WSYNC_OK) {
        status = fill(builder, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_builder_finish(builder, &layout, err);
        CHECK_EQ(status == WSYNC_OK, layout != NULL);
    }
    wsync_layout_builder_destroy(builder);
    if (output != NULL) {
        *output = layout;
    } else {
        wsync_layout_destroy(layout);
    }
    return status;
}

static wsync_layout_t *sample(void)
{
    wsync_layout_t *layout = NULL;
    wsync_error_t err = {0};

    CHECK_OK(build(&layout, &err), err);
    return layout;
}

TEST(builder)
{
    CHECK(oom_run(build, NULL) > 10);
}

static wsync_status_t merge(void *context, wsync_error_t *err)
{
    const wsync_layout_t *layouts[2] = {context, context};
    wsync_layout_t *merged = NULL;
    const wsync_status_t status = wsync_layout_merge(layouts, 2, &merged, err);

    CHECK_EQ(status == WSYNC_OK, merged != NULL);
    wsync_layout_destroy(merged);
    return status;
}

TEST(merging)
{
    wsync_layout_t *layout = sample();

    CHECK(oom_run(merge, layout) > 10);
    wsync_layout_destroy(layout);
}

/* What a worker reads of ranks' memory, what is left, and both in one layout. */
static wsync_status_t join(void *context, wsync_error_t *err)
{
    const wsync_layout_t *model = context;
    uint8_t lent[2 * TENSOR_COUNT] = {1, 1, 1};
    wsync_layout_t *joined = NULL;
    wsync_layout_t *rest = NULL;
    wsync_layout_t *both = NULL;
    wsync_status_t status = wsync_layout_join(model, model, lent, &joined, err);

    CHECK_EQ(status == WSYNC_OK, joined != NULL);
    if (status == WSYNC_OK) {
        status = wsync_layout_without(model, joined, &rest, err);
        CHECK_EQ(status == WSYNC_OK, rest != NULL);
    }
    if (status == WSYNC_OK) {
        status = wsync_layout_beside(joined, joined, 2 * TENSOR_COUNT, &both, err);
        CHECK_EQ(status == WSYNC_OK, both != NULL);
    }
    wsync_layout_destroy(joined);
    wsync_layout_destroy(rest);
    wsync_layout_destroy(both);
    return status;
}

TEST(joining)
{
    wsync_layout_t *layout = sample();

    CHECK(oom_run(join, layout) > 10);
    wsync_layout_destroy(layout);
}

static wsync_status_t round_trip(void *context, wsync_error_t *err)
{
    uint8_t *data = NULL;
    size_t nbytes = 77;
    wsync_layout_t *layout = NULL;
    wsync_status_t status = wsync_layout_encode(context, &data, &nbytes, err);

    CHECK_EQ(status == WSYNC_OK, data != NULL);
    CHECK_EQ(status == WSYNC_OK, nbytes != 77);
    if (status == WSYNC_OK) {
        status = wsync_layout_decode(data, nbytes, &layout, err);
        CHECK_EQ(status == WSYNC_OK, layout != NULL);
    }
    wsync_layout_destroy(layout);
    free(data);
    return status;
}

TEST(wire)
{
    wsync_layout_t *layout = sample();

    CHECK(oom_run(round_trip, layout) > 10);
    wsync_layout_destroy(layout);
}

typedef struct pair {
    wsync_layout_t *source;
    wsync_layout_t *destination;
} pair_t;

static wsync_status_t route(void *context, wsync_error_t *err)
{
    const pair_t *pair = context;
    wsync_route_t *made = NULL;
    const wsync_status_t status =
        wsync_route_create(pair->source, pair->destination, &made, err);

    CHECK_EQ(status == WSYNC_OK, made != NULL);
    wsync_route_destroy(made);
    return status;
}

/* Column `i` of three, in rows of six bytes. */
static void add_column(wsync_layout_builder_t *builder, uint32_t i, uint32_t buffer,
                       uint64_t offset)
{
    const wsync_tensor_t tensor = matrix("a", 64, 3);
    wsync_shard_t shard = {.buffer = buffer,
                           .offset = offset,
                           .box = wsync_box_whole(2, tensor.shape),
                           .stride = {6, 2}};
    wsync_error_t err = {0};

    shard.box.start[1] = i;
    shard.box.extent[1] = 1;
    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &shard.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "", &shard.origin, &err), err);
    CHECK_OK(wsync_layout_builder_shard(builder, &shard, &err), err);
}

TEST(routes)
{
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *destination = new_builder();
    pair_t pair;

    /* Odd rows, then all of them: the boxes that are missing multiply.  Two columns that
     * lie side by side in memory are checked bit by bit. */
    for (uint32_t i = 1; i < 64; i += 2) {
        add_rows(source, matrix("a", 64, 3), 0, i, 0, i, 1);
    }
    add_rows(source, matrix("a", 64, 3), 0, 0, 0, 0, 64);
    for (uint32_t i = 0; i < 3; i++) {
        add_column(destination, i, 0, 2 * (uint64_t)i);
    }
    pair.source = finish(source);
    pair.destination = finish(destination);
    CHECK(oom_run(route, &pair) > 5);
    wsync_layout_destroy(pair.source);
    wsync_layout_destroy(pair.destination);
}

static wsync_status_t append(void *context, wsync_error_t *err)
{
    const int64_t extent[WSYNC_MAX_NDIM] = {5, 5, 2, 2, 2, 2};
    const wsync_place_t source = {.dtype = WSYNC_DTYPE_INT8,
                                  .stride = {100000, 10000, 1000, 100, 10, 2}};
    wsync_copies_t copies = {0};
    wsync_status_t status = WSYNC_OK;

    (void)context;
    for (size_t i = 0; i < 10 && status == WSYNC_OK; i++) {
        status = wsync_copies_append(&copies, extent, &source, &source, err);
        CHECK_EQ(copies.count, (status == WSYNC_OK ? i + 1 : i) * 4);
    }
    wsync_copies_fini(&copies);
    return status;
}

TEST(copies)
{
    CHECK(oom_run(append, NULL) >= 2);
}

typedef struct kept {
    wsync_layout_t *layout;
    wsync_span_t spans[3];
} kept_t;

static wsync_status_t check_apart(void *context, wsync_error_t *err)
{
    const kept_t *kept = context;

    return wsync_layout_check_apart(kept->layout, kept->spans, 3, err);
}

TEST(buffers_that_share_memory)
{
    wsync_layout_builder_t *builder = new_builder();
    uint8_t memory[64 * 6];
    kept_t kept = {.layout = NULL};
    wsync_error_t err = {0};

    for (uint32_t i = 0; i < 3; i++) {
        add_column(builder, i, i, 0);
        kept.spans[i] = (wsync_span_t){memory + (size_t)2 * i, sizeof(memory) - 4};
    }
    kept.layout = finish(builder);
    CHECK(oom_run(check_apart, &kept) > 3);
    kept.spans[2].data = memory + 3;
    CHECK_EQ(check_apart(&kept, &err), WSYNC_ERR_LAYOUT);
    kept.spans[0].data = memory + 1; /* spans that only touch are not looked into */
    kept.spans[0].nbytes = kept.spans[1].nbytes = 1;
    CHECK_OK(check_apart(&kept, &err), err);
    wsync_layout_destroy(kept.layout);
}
