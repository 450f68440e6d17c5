/* SPDX-License-Identifier: Apache-2.0
 * Plans as C sees them.  tests/test_plan.py plays many more, byte by byte. */
#include "core/plan/plan.h"
#include "layouts.h"

enum { RANKS = 4 };

/* Two matrices of 8 x 32 (512 bytes), each in halves on ranks 0 and 1 and again on 2 and 3;
 * both wanted whole on ranks 0 and 3. */
typedef struct fixture {
    wsync_layout_t *source;
    wsync_layout_t *wanted;
    wsync_destination_t destination;
    wsync_plan_spec_t spec;
} fixture_t;

static const wsync_worker_t workers[] = {{0, 0}, {0, 3}};
static const uint32_t hosts[RANKS] = {0, 0, 1, 1};

static void fixture_init(fixture_t *fixture)
{
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *wanted = new_builder();

    for (uint32_t rank = 0; rank < RANKS; rank++) {
        add_rows(source, matrix("a", 8, 32), rank, 0, 0, rank % 2 == 0 ? 0 : 4, 4);
        add_rows(source, matrix("b", 8, 32), rank, 1, 0, rank % 2 == 0 ? 0 : 4, 4);
    }
    add_rows(wanted, matrix("a", 8, 32), 0, 0, 0, 0, 8);
    add_rows(wanted, matrix("b", 8, 32), 0, 1, 0, 0, 8);
    fixture->source = finish(source);
    fixture->wanted = finish(wanted);
    fixture->destination = (wsync_destination_t){fixture->wanted, true};
    fixture->spec = (wsync_plan_spec_t){.source = fixture->source,
                                        .destinations = &fixture->destination,
                                        .workers = workers,
                                        .hosts = hosts,
                                        .destination_count = 1,
                                        .worker_count = 2,
                                        .rank_count = RANKS};
}

static void fixture_fini(fixture_t *fixture)
{
    wsync_layout_destroy(fixture->source);
    wsync_layout_destroy(fixture->wanted);
}

TEST(every_rank_decides_the_same)
{
    fixture_t fixture;
    wsync_error_t err = {0};
    uint64_t fingerprint = 0;

    fixture_init(&fixture);
    fixture.spec.round_nbytes = 512;
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        wsync_plan_t *plan = NULL;

        fixture.spec.rank = rank;
        CHECK_OK(wsync_plan_create(&fixture.spec, &plan, &err), err);
        CHECK_EQ(wsync_plan_round_count(plan), 2);
        CHECK_EQ(wsync_plan_worker_count(plan), 2);
        CHECK(rank == 0 || wsync_plan_fingerprint(plan) == fingerprint);
        fingerprint = wsync_plan_fingerprint(plan);
        CHECK_EQ(wsync_plan_stats(plan).needed_nbytes, 2048);
        CHECK_EQ(wsync_plan_stats(plan).delivered_nbytes, 2048);
        CHECK_EQ(wsync_plan_stats(plan).message_count, 4);
        wsync_plan_destroy(plan);
    }
    fixture_fini(&fixture);
}

TEST(halves_come_from_here_and_from_the_host)
{
    fixture_t fixture;
    wsync_error_t err = {0};
    wsync_plan_t *plan = NULL;
    const wsync_message_t *messages;
    const wsync_copy_t *copies;
    size_t count;

    fixture_init(&fixture);
    fixture.spec.rank = 3;
    CHECK_OK(wsync_plan_create(&fixture.spec, &plan, &err), err);
    messages = wsync_plan_messages(plan, 0, &count);
    CHECK_EQ(count, 1);
    CHECK_EQ(messages[0].source, 2); /* not 0, which is on the other host */
    CHECK_EQ(messages[0].peer_count, 1);
    CHECK_EQ(messages[0].peers[0], 3);
    CHECK_EQ(messages[0].nbytes, 512);
    CHECK_EQ(wsync_plan_recv_nbytes(plan), 512);
    CHECK_EQ(wsync_plan_send_nbytes(plan), 0);
    (void)wsync_plan_copies(plan, 0, WSYNC_PHASE_PACK, &count);
    CHECK_EQ(count, 0);
    copies = wsync_plan_copies(plan, 0, WSYNC_PHASE_LOCAL, &count);
    CHECK_EQ(count, 2);
    CHECK_EQ(wsync_copies_nbytes(copies, count), 512);
    CHECK_EQ(copies[0].destination_buffer, 1);
    copies = wsync_plan_copies(plan, 0, WSYNC_PHASE_UNPACK, &count);
    CHECK_EQ(count, 2);
    CHECK_EQ(copies[0].source_buffer, 0);
    CHECK_EQ(copies[0].destination_buffer, 1);
    CHECK_EQ(wsync_plan_slot(plan, 1, 0).nbytes, 1024);
    CHECK_EQ(wsync_plan_slot(plan, 1, 0).wait_round, -1);
    CHECK_EQ(wsync_plan_ring_nbytes(plan, 1), 1024);
    wsync_plan_destroy(plan);
    fixture_fini(&fixture);
}

TEST(a_ring_of_one_slot_waits_for_every_round)
{
    fixture_t fixture;
    wsync_error_t err = {0};
    wsync_plan_t *plan = NULL;

    fixture_init(&fixture);
    fixture.spec.ring_nbytes = 512;
    CHECK_OK(wsync_plan_create(&fixture.spec, &plan, &err), err);
    CHECK_EQ(wsync_plan_round_count(plan), 2);
    CHECK_EQ(wsync_plan_ring_nbytes(plan, 0), 512);
    CHECK_EQ(wsync_plan_slot(plan, 0, 1).offset, 0);
    CHECK_EQ(wsync_plan_slot(plan, 0, 1).wait_round, 0);
    wsync_plan_destroy(plan);
    fixture_fini(&fixture);
}

TEST(a_round_budget_may_be_any_number)
{
    const uint64_t budgets[] = {UINT64_C(1) << 62, UINT64_C(1) << 63, UINT64_MAX};
    fixture_t fixture;
    wsync_error_t err = {0};

    fixture_init(&fixture);
    fixture.destination.whole = false;
    fixture.spec.send_nbytes = 128; /* makes several rounds all the same */
    for (size_t i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        wsync_plan_t *plan = NULL;

        fixture.spec.round_nbytes = budgets[i];
        CHECK_OK(wsync_plan_create(&fixture.spec, &plan, &err), err);
        CHECK(wsync_plan_round_count(plan) > 2);
        CHECK_EQ(wsync_plan_ring_nbytes(plan, 0), 1024); /* all that the worker gets */
        wsync_plan_destroy(plan);
    }
    fixture_fini(&fixture);
}

TEST(the_plan_outlives_its_layouts)
{
    fixture_t fixture;
    wsync_error_t err = {0};
    wsync_plan_t *plan = NULL;
    wsync_layout_t *manifest = NULL;
    const wsync_shard_t *shard;
    size_t count;

    fixture_init(&fixture);
    CHECK_OK(wsync_plan_create(&fixture.spec, &plan, &err), err);
    fixture_fini(&fixture);
    CHECK_OK(wsync_plan_manifest(plan, 1, &manifest, &err), err);
    wsync_plan_destroy(plan);
    CHECK_EQ(wsync_layout_tensor_count(manifest), 2);
    shard = wsync_layout_shards(manifest, wsync_layout_find(manifest, "b"), &count);
    CHECK_EQ(count, 1);
    CHECK_EQ(shard->rank, 0);
    CHECK_EQ(shard->buffer, 0);
    CHECK_EQ(shard->stride[0], 64);
    CHECK_EQ(shard->stride[1], 2);
    wsync_layout_destroy(manifest);
    wsync_plan_destroy(NULL);
}

TEST(a_failure_leaves_the_output_alone)
{
    fixture_t fixture;
    wsync_error_t err = {0};
    wsync_plan_t *plan = NULL;

    fixture_init(&fixture);
    fixture.spec.send_nbytes = 192;
    CHECK_EQ(wsync_plan_create(&fixture.spec, &plan, &err), WSYNC_ERR_INVALID);
    CHECK(plan == NULL);
    CHECK_HAS(err.message, "send_nbytes is 192");
    CHECK_HAS(err.message, "256");
    fixture_fini(&fixture);
}
