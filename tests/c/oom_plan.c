/* SPDX-License-Identifier: Apache-2.0
 * Every allocation of the planner fails once. */
#include "core/plan/plan.h"
#include "layouts.h"
#include "oom.h"

enum { RANKS = 40, TENSORS = 70 };

typedef struct world {
    wsync_layout_t *source;
    wsync_layout_t *layouts[2];
    wsync_destination_t destinations[2];
    wsync_worker_t workers[RANKS];
    uint32_t hosts[RANKS];
    wsync_plan_spec_t spec;
} world_t;

/* Halves of a tensor whose columns alternate, on two ranks. */
static void add_columns(wsync_layout_builder_t *builder, wsync_tensor_t tensor)
{
    wsync_error_t err = {0};
    wsync_shard_t shard = {
        .box = wsync_box_whole(2, tensor.shape), .stride = {64, 4}, .step = {1, 2}};

    CHECK_OK(wsync_layout_builder_tensor(builder, &tensor, &shard.tensor, &err), err);
    CHECK_OK(wsync_layout_builder_origin(builder, "columns", &shard.origin, &err), err);
    shard.box.extent[1] /= 2;
    for (uint32_t i = 0; i < 2; i++) {
        shard.rank = i;
        shard.box.start[1] = i;
        CHECK_OK(wsync_layout_builder_shard(builder, &shard, &err), err);
    }
}

/* Rows on changing pairs of ranks, some of them in boxes that overlap, or every other
 * column, wanted whole and in rows, on rounds that most tensors do not fit into: every path
 * and table grows. */
static void world_init(world_t *world)
{
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *whole = new_builder();
    wsync_layout_builder_t *parts = new_builder();

    for (uint32_t i = 0; i < TENSORS; i++) {
        char name[8];
        wsync_tensor_t tensor = matrix(name, 8, 32);

        (void)snprintf(name, sizeof(name), "w%u", i);
        tensor.group = i % 9 == 0 ? 1 + i / 20 : 0;
        if (i % 12 == 11) {
            add_columns(source, tensor);
            add_rows(parts, tensor, 0, 0, 0, 1, 6);
            continue;
        }
        add_rows(source, tensor, i % RANKS, i, 0, 0, 5);
        add_rows(source, tensor, (i + 7) % RANKS, i, 0, 0, 5);
        add_rows(source, tensor, (i + 1) % RANKS, i, 0, i % 5 == 0 ? 3 : 5,
                 i % 5 == 0 ? 5 : 3);
        if (i % 2 == 0) {
            add_rows(whole, tensor, 0, 0, 0, 0, 8);
        }
        tensor.group = 0;
        for (int64_t j = 0; j < 2; j++) {
            add_rows(parts, tensor, 0, 0, 0, 4 * j, i % 3 == 0 ? 4 : 3);
        }
    }
    world->source = finish(source);
    world->layouts[0] = finish(whole);
    world->layouts[1] = finish(parts);
    for (uint32_t i = 0; i < 2; i++) {
        world->destinations[i] = (wsync_destination_t){world->layouts[i], i == 0};
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        world->workers[i] = (wsync_worker_t){i % 2, i};
        world->hosts[i] = i / 8;
    }
    world->spec = (wsync_plan_spec_t){.source = world->source,
                                      .destinations = world->destinations,
                                      .workers = world->workers,
                                      .hosts = world->hosts,
                                      .destination_count = 2,
                                      .worker_count = RANKS,
                                      .rank_count = RANKS,
                                      .rank = 3,
                                      .ring_nbytes = 4096};
}

static void world_fini(world_t *world)
{
    wsync_layout_destroy(world->source);
    wsync_layout_destroy(world->layouts[0]);
    wsync_layout_destroy(world->layouts[1]);
}

static wsync_status_t create(void *context, wsync_error_t *err)
{
    const world_t *world = context;
    wsync_plan_t *plan = NULL;
    const wsync_status_t status = wsync_plan_create(&world->spec, &plan, err);

    CHECK_EQ(status == WSYNC_OK, plan != NULL);
    wsync_plan_destroy(plan);
    return status;
}

TEST(creating)
{
    world_t world;

    world_init(&world);
    CHECK(oom_run(create, &world) > 100);
    world_fini(&world);
}

static wsync_status_t manifest(void *context, wsync_error_t *err)
{
    wsync_layout_t *layout = NULL;
    const wsync_status_t status = wsync_plan_manifest(context, 1, &layout, err);

    CHECK_EQ(status == WSYNC_OK, layout != NULL);
    wsync_layout_destroy(layout);
    return status;
}

TEST(manifests)
{
    world_t world;
    wsync_plan_t *plan = NULL;
    wsync_error_t err = {0};

    world_init(&world);
    CHECK_OK(wsync_plan_create(&world.spec, &plan, &err), err);
    CHECK(oom_run(manifest, plan) > 5);
    wsync_plan_destroy(plan);
    world_fini(&world);
}
