/* SPDX-License-Identifier: Apache-2.0
 * The stand-in for NCCL does what NVIDIA documents, where wsync's exchange depends on it:
 * what does not fit together hangs, so that a test of an exchange that passes means
 * something. */
#include "nccl_fixture.h"

enum { LARGE = 200000, SMALL = 3000, FAR = 500000 };

static void fill(const nccl_rank_t *rank, size_t offset, size_t nbytes, int value)
{
    memset(reach(rank->memory + offset), value, nbytes);
}

static bool holds(const nccl_rank_t *rank, size_t offset, size_t nbytes, int value)
{
    const unsigned char *bytes = reach(rank->memory + offset);

    for (size_t i = 0; i < nbytes; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* --- what it does -----------------------------------------------------------------------
 */

/* Two messages each way and one to itself, in one group; twice. */
static void exchange(nccl_rank_t *rank)
{
    const int peer = 1 - rank->rank;

    rank_start(rank);
    for (int turn = 0; turn < 2; turn++) {
        const int value = 10 * turn + 1;

        fill(rank, 0, LARGE, value + rank->rank);
        fill(rank, LARGE, SMALL, value + 2 + rank->rank);
        NCCL(rank->nccl->group_start());
        rank_send(rank, 0, LARGE, peer);
        rank_recv(rank, FAR, LARGE, peer);
        rank_send(rank, LARGE, SMALL, peer);
        rank_send(rank, LARGE, 0, peer);
        NCCL(rank->nccl->group_start());
        rank_recv(rank, FAR + LARGE, SMALL, peer);
        rank_recv(rank, FAR, 0, peer);
        NCCL(rank->nccl->group_end());
        rank_send(rank, LARGE, SMALL, rank->rank);
        rank_recv(rank, FAR + LARGE + SMALL, SMALL, rank->rank);
        end_group(rank);
        CU(rank->cu->stream_synchronize(rank->stream));
        CHECK(holds(rank, FAR, LARGE, value + peer));
        CHECK(holds(rank, FAR + LARGE, SMALL, value + 2 + peer));
        CHECK(holds(rank, FAR + LARGE + SMALL, SMALL, value + 2 + rank->rank));
        CHECK(holds(rank, FAR + LARGE + 2 * SMALL, 1, 0xee));
    }
    rank_close(rank);
}

TEST(grouped_sends_and_receives_arrive)
{
    run_ranks(2, exchange);
}

/* Every rank is the root of one broadcast of a group; rank 2 from other memory. */
static void broadcast(nccl_rank_t *rank)
{
    const wsync_nccl_library_t *nccl = rank->nccl;

    rank_start(rank);
    nccl = rank->nccl;
    fill(rank, FAR, SMALL, 7);
    fill(rank, (size_t)rank->rank * SMALL, SMALL, rank->rank == 2 ? 0 : 5 + rank->rank);
    NCCL(nccl->group_start());
    for (int root = 0; root < 3; root++) {
        unsigned char *data = rank->memory + (size_t)root * SMALL;

        NCCL(nccl->broadcast(root == 2 ? rank->memory + FAR : data, data, SMALL / 4,
                             3 /* uint32 */, root, rank->comm, rank->stream));
    }
    end_group(rank);
    CU(rank->cu->stream_synchronize(rank->stream));
    for (int root = 0; root < 3; root++) {
        CHECK(holds(rank, (size_t)root * SMALL, SMALL, 5 + root));
    }
    CHECK(holds(rank, (size_t)3 * SMALL, 1, 0xee));
    meet(rank);
    rank_close(rank);
}

TEST(grouped_broadcasts_arrive)
{
    run_ranks(3, broadcast);
}

/* Work on a stream comes after what the stream has, and before what it gets. */
static void follow(nccl_rank_t *rank)
{
    const int peer = 1 - rank->rank;
    wsync_cu_ptr_t at;

    rank_start(rank);
    at = (wsync_cu_ptr_t)(uintptr_t)rank->memory;
    CU(rank->cu->memset_async(at, (unsigned char)(3 + rank->rank), LARGE, rank->stream));
    NCCL(rank->nccl->group_start());
    rank_send(rank, 0, LARGE, peer);
    rank_recv(rank, FAR, LARGE, peer);
    end_group(rank);
    CU(rank->cu->memcpy_async(at, at + FAR, LARGE, rank->stream));
    CU(rank->cu->stream_synchronize(rank->stream));
    CHECK(holds(rank, 0, LARGE, 3 + peer));
    rank_close(rank);
}

TEST(work_keeps_its_place_on_the_stream)
{
    run_ranks(2, follow);
}

/* --- what is in progress ----------------------------------------------------------------
 */

/* Who records an event too early has recorded nothing. */
static void record_early(nccl_rank_t *rank)
{
    wsync_cu_event_t event = NULL;
    int result = 0;

    rank_open(rank);
    inject("polls", 0, 3);
    rank_join(rank);
    NCCL(settle(rank));
    CU(rank->cu->event_create(&event, WSYNC_CU_EVENT_DISABLE_TIMING));
    NCCL(rank->nccl->group_start());
    rank_send(rank, 0, SMALL, rank->rank);
    rank_recv(rank, FAR, SMALL, rank->rank);
    CHECK_EQ(rank->nccl->group_end(), WSYNC_NCCL_IN_PROGRESS);
    CU(rank->cu->event_record(event, rank->stream));
    AWAIT(rank->cu->event_query(event) == WSYNC_CU_SUCCESS);
    CHECK(holds(rank, FAR, SMALL, 0xee));
    for (int poll = 0; poll < 4; poll++) {
        NCCL(rank->nccl->comm_get_async_error(rank->comm, &result));
        CHECK_EQ(result, poll < 3 ? WSYNC_NCCL_IN_PROGRESS : WSYNC_NCCL_SUCCESS);
    }
    drain(rank);
    CHECK_EQ(memcmp(reach(rank->memory), reach(rank->memory + FAR), SMALL), 0);
    CU(rank->cu->event_destroy(event));
    rank_close(rank);
}

TEST(nothing_is_on_the_stream_while_a_group_is_in_progress)
{
    run_ranks(1, record_early);
}

/* --- messages that do not fit together --------------------------------------------------
 */

/* The stream must be stuck, and abort must free it. */
static void check_stuck(nccl_rank_t *rank)
{
    meet(rank);
    CHECK_EQ(rank->cu->stream_query(rank->stream), WSYNC_CU_NOT_READY);
    meet(rank);
    rank_close(rank);
}

static void receive_too_little(nccl_rank_t *rank)
{
    rank_start(rank);
    NCCL(rank->nccl->group_start());
    if (rank->rank == 0) {
        rank_send(rank, 0, SMALL, 1);
    } else {
        rank_recv(rank, FAR, SMALL - 1, 0);
    }
    end_group(rank);
    if (rank->rank == 0) {
        check_misuse(
            "rank 1 waits for 2999 bytes from rank 0 (kind 0, collective 0), which "
            "sends 3000");
    }
    CHECK(holds(rank, FAR, SMALL, 0xee));
    check_stuck(rank);
}

TEST(a_receive_of_another_size_hangs_until_the_abort)
{
    run_ranks(2, receive_too_little);
}

static void swap_order(nccl_rank_t *rank)
{
    rank_start(rank);
    NCCL(rank->nccl->group_start());
    if (rank->rank == 0) {
        rank_send(rank, 0, SMALL, 1);
        rank_send(rank, 0, LARGE, 1);
    } else {
        rank_recv(rank, FAR, LARGE, 0);
        rank_recv(rank, FAR, SMALL, 0);
    }
    end_group(rank);
    if (rank->rank == 0) {
        check_misuse("rank 1 waits for 200000 bytes from rank 0");
    }
    check_stuck(rank);
}

TEST(messages_in_another_order_hang_until_the_abort)
{
    run_ranks(2, swap_order);
}

static void swap_roots(nccl_rank_t *rank)
{
    rank_start(rank);
    NCCL(rank->nccl->group_start());
    for (int i = 0; i < 2; i++) {
        NCCL(rank->nccl->broadcast(rank->memory, rank->memory, SMALL, WSYNC_NCCL_UINT8,
                                   i ^ rank->rank, rank->comm, rank->stream));
    }
    end_group(rank);
    if (rank->rank == 0) {
        check_misuse(
            "rank 0 waits for 3000 bytes from rank 1 (kind 1, collective 2), which "
            "sends 3000 (kind 1, collective 1)");
    }
    check_stuck(rank);
    CHECK_EQ(truncate(getenv("WSYNC_FAKE_CUDA_MISUSE"), 0), 0);
}

TEST(broadcasts_in_another_order_hang_until_the_abort)
{
    run_ranks(2, swap_roots);
}

/* Both send first and receive in a second group: nobody takes what is sent. */
static void send_first(nccl_rank_t *rank)
{
    rank_start(rank);
    (void)begin_send(rank, 0, 0, 1 - rank->rank);
    NCCL(settle(rank));
    (void)begin_recv(rank, FAR, 0, 1 - rank->rank);
    NCCL(settle(rank));
    check_stuck(rank);
}

TEST(sends_that_wait_for_each_other_hang_until_the_abort)
{
    run_ranks(2, send_first);
}

/* --- ranks that do not fit together -----------------------------------------------------
 */

static void refuse_join(nccl_rank_t *rank, const char *words)
{
    rank_open(rank);
    rank_join(rank);
    CHECK_EQ(settle(rank), WSYNC_NCCL_INVALID_USAGE);
    CHECK_HAS(rank->nccl->get_last_error(rank->comm), words);
    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_INVALID_USAGE);
    meet(rank);
    rank_close(rank);
}

static void join_on_one_gpu(nccl_rank_t *rank)
{
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_FIRST", "5", 1), 0);
    refuse_join(rank, "Duplicate GPU detected");
}

TEST(two_ranks_on_one_gpu_are_refused)
{
    run_ranks(2, join_on_one_gpu);
}

static void join_with_versions(nccl_rank_t *rank)
{
    CHECK_EQ(setenv("WSYNC_FAKE_NCCL_VERSION", rank->rank == 0 ? "22705" : "22809", 1), 0);
    refuse_join(rank, "Mismatched NCCL version detected");
}

TEST(two_versions_are_refused)
{
    run_ranks(2, join_with_versions);
}
