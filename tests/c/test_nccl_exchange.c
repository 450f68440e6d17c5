/* SPDX-License-Identifier: Apache-2.0
 * Rounds of a plan that NCCL moves between ranks, and what ends them. */
#include "nccl_ranks.h"

enum { ROUND_MS = 60000, HURRY_MS = 500 };

/* --- updates ----------------------------------------------------------------------------
 */

static void update(rank_t *rank, uint32_t worker_count)
{
    static member_t member;
    const uint64_t round_nbytes = 2ULL * 2 * PART * rank->rank_count;
    wsync_plan_t *plan =
        make_plan(rank->rank, rank->rank_count, worker_count, round_nbytes);

    open_rank(rank, rank->rank, plan, ROUND_MS);
    inject("owner", 0, 0); /* one thread alone makes all calls */
    wsync_plan_destroy(plan);
    member = (member_t){.device = rank->device,
                        .rank = rank->rank,
                        .rank_count = rank->rank_count,
                        .worker_count = worker_count,
                        .round_nbytes = round_nbytes};
    run_updates(&member, rank->comm, rank->addresses);
    CHECK_EQ(nccl_census().communicators, 0);
}

/* Every message goes to all others: broadcasts. */
static void serve_all(rank_t *rank)
{
    update(rank, rank->rank_count);
}

static void serve_one(rank_t *rank)
{
    update(rank, 1);
}

TEST(every_rank_serves_a_worker)
{
    run_ranks(4, -1, serve_all);
}

/* As with CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron's users set. */
TEST(streams_may_share_a_queue)
{
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_CONNECTIONS", "1", 1), 0);
    run_ranks(3, -1, serve_one);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_PRIORITIES", "1", 1), 0);
    run_ranks(3, -1, serve_all);
}

TEST(some_ranks_only_send)
{
    run_ranks(3, -1, serve_one);
}

/* --- between updates --------------------------------------------------------------------
 */

typedef struct parking {
    member_t member;
    wsync_plan_t *plan;
} parking_t;

static void open_parking(rank_t *rank, parking_t *parking, uint32_t tensors, int timeout_ms)
{
    const uint64_t round_nbytes = 2ULL * tensors * PART * rank->rank_count;
    wsync_error_t err = {0};

    parking->plan = make_plan(rank->rank, rank->rank_count, 1, round_nbytes);
    open_rank(rank, rank->rank, parking->plan, timeout_ms);
    parking->member = (member_t){.device = rank->device,
                                 .rank = rank->rank,
                                 .rank_count = rank->rank_count,
                                 .worker_count = 1};
    open_member(&parking->member);
    CHECK_OK(wsync_comm_connect(rank->comm, rank->addresses, PATIENT_MS, &err), err);
    update_rank(&parking->member, rank->comm, parking->plan, 0);
}

static void close_parking(rank_t *rank, parking_t *parking)
{
    wsync_comm_close(rank->comm);
    CHECK(wsync_stream_abandon(parking->member.stream, PATIENT_MS));
    wsync_comm_destroy(rank->comm);
    close_member(&parking->member);
    wsync_plan_destroy(parking->plan);
    CHECK_EQ(nccl_census().communicators, 0);
}

/* Updates with the exchange parked in between. */
static void park(rank_t *rank)
{
    static parking_t parking;
    wsync_error_t err = {0};

    open_parking(rank, &parking, 2, ROUND_MS);
    for (uint64_t update = 1; update < 4; update++) {
        CHECK_OK(wsync_comm_park(rank->comm, &err), err);
        CHECK_OK(wsync_comm_park(rank->comm, &err), err); /* it is parked */
        update_rank(&parking.member, rank->comm, parking.plan, update);
        CHECK_OK(wsync_comm_check(rank->comm, &err), err);
        meet(rank);
    }
    close_parking(rank, &parking);
}

TEST(staging_is_parked_between_updates)
{
    run_ranks(3, -1, park);
}

/* Rank 0 gets eight rounds ahead of rank 1, and no further. */
static void run_ahead(rank_t *rank)
{
    static parking_t parking;
    member_t *member = &parking.member;
    wsync_error_t err = {0};

    open_parking(rank, &parking, 1, ROUND_MS);
    CHECK_EQ(wsync_plan_round_count(parking.plan), TENSORS);
    update_rank(member, rank->comm, parking.plan, 1);
    CHECK_OK(wsync_comm_begin(rank->comm, parking.plan, &err), err);
    if (rank->rank == 1) {
        meet(rank);
    }
    for (uint32_t round = 0; round < TENSORS; round++) {
        if (rank->rank == 0 && round == 8) {
            CHECK_EQ(wsync_comm_acquire(rank->comm, round, SOON_MS, &err),
                     WSYNC_ERR_TIMEOUT);
            CHECK_HAS(err.message, "rank 0 waits for 4 rounds to move before round 8");
            meet(rank);
        }
        send_round(member, rank->comm, parking.plan, round);
        CHECK_OK(wsync_comm_wait(rank->comm, round, member->stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_comm_release(rank->comm, round, member->stream, &err), err);
    }
    CHECK_OK(wsync_stream_synchronize(member->stream, PATIENT_MS, &err), err);
    CHECK_OK(wsync_comm_check(rank->comm, &err), err);
    meet(rank);
    close_parking(rank, &parking);
}

TEST(the_host_is_eight_rounds_ahead_at_most)
{
    run_ranks(2, -1, run_ahead);
}

/* --- who cannot meet --------------------------------------------------------------------
 */

static void share_a_gpu(rank_t *rank)
{
    wsync_error_t err = {0};

    open_rank(rank, 3, NULL, ROUND_MS);
    CHECK_EQ(wsync_comm_connect(rank->comm, rank->addresses, PATIENT_MS, &err),
             WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "ranks 0 and 1 share the GPU fafa");
    wsync_comm_destroy(rank->comm);
}

TEST(ranks_that_share_a_gpu_are_named)
{
    run_ranks(2, -1, share_a_gpu);
}

static void differ(rank_t *rank)
{
    wsync_error_t err = {0};

    if (rank->rank == 1) {
        CHECK_EQ(setenv("WSYNC_FAKE_NCCL_VERSION", "22000", 1), 0);
    }
    open_rank(rank, rank->rank, NULL, ROUND_MS);
    CHECK_EQ(wsync_comm_connect(rank->comm, rank->addresses, PATIENT_MS, &err),
             WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "22000");
    wsync_comm_destroy(rank->comm);
}

TEST(ranks_with_other_versions_are_named)
{
    run_ranks(2, -1, differ);
}

static void wait_for_nobody(rank_t *rank)
{
    wsync_error_t err = {0};

    open_rank(rank, rank->rank, NULL, ROUND_MS);
    if (rank->rank == 0) {
        CHECK_EQ(wsync_comm_connect(rank->comm, rank->addresses, SOON_MS, &err),
                 WSYNC_ERR_TIMEOUT);
        CHECK_HAS(err.message, "rank 0 waits for the others of 2 ranks");
    }
    wsync_comm_destroy(rank->comm); /* while it may still be in progress */
    CHECK_EQ(nccl_census().communicators, 0);
}

TEST(a_rank_that_does_not_come_ends_with_the_deadline)
{
    run_ranks(2, -1, wait_for_nobody);
}

/* --- failures in an update --------------------------------------------------------------
 */

/* Runs rounds until something fails; the error. */
static wsync_status_t run_until_failure(rank_t *rank, const wsync_plan_t *plan,
                                        wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(PATIENT_MS);
    wsync_stream_t *stream = NULL;
    wsync_status_t status = WSYNC_OK;

    CHECK_OK(wsync_stream_create(rank->device, 1, &stream, err), *err);
    CHECK_OK(wsync_comm_begin(rank->comm, plan, err), *err);
    for (uint32_t round = 0; round < wsync_plan_round_count(plan) && status == WSYNC_OK;
         round++) {
        status = wsync_comm_acquire(rank->comm, round, PATIENT_MS, err);
        if (status == WSYNC_OK) {
            status = wsync_comm_post(rank->comm, round, stream, err);
        }
        if (status == WSYNC_OK) {
            status = wsync_comm_wait(rank->comm, round, stream, PATIENT_MS, err);
        }
        if (status == WSYNC_OK) {
            status = wsync_comm_release(rank->comm, round, stream, err);
        }
    }
    while (status == WSYNC_OK && wsync_clock_ms() < deadline) {
        status = wsync_comm_check(rank->comm, err);
        (void)usleep(1000);
    }
    wsync_comm_close(rank->comm);
    CHECK(wsync_stream_abandon(stream, PATIENT_MS));
    wsync_stream_destroy(stream);
    wsync_comm_destroy(rank->comm);
    CHECK_EQ(nccl_census().communicators, 0);
    CHECK_EQ(nccl_census().works, 0);
    return status;
}

static wsync_plan_t *connect_rank(rank_t *rank, int timeout_ms)
{
    wsync_error_t err = {0};
    wsync_plan_t *plan = make_plan(rank->rank, rank->rank_count, rank->rank_count, 4096);

    open_rank(rank, rank->rank, plan, timeout_ms);
    CHECK_OK(wsync_comm_connect(rank->comm, rank->addresses, PATIENT_MS, &err), err);
    meet(rank);
    return plan;
}

static void hang(rank_t *rank)
{
    wsync_error_t err = {0};
    wsync_plan_t *plan = connect_rank(rank, HURRY_MS);

    if (rank->rank == 1) {
        inject("hang", 3, 0);
    }
    CHECK_EQ(run_until_failure(rank, plan, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "round ");
    CHECK_HAS(err.message, rank->rank == 0 ? "rank 0 of 2" : "rank 1 of 2");
    wsync_plan_destroy(plan);
}

TEST(a_round_that_does_not_move_names_the_rank)
{
    run_ranks(2, -1, hang);
}
