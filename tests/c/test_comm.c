/* SPDX-License-Identifier: Apache-2.0
 * Ranks of one host that read each other's staging: as threads, and taking turns in one. */
#include <fcntl.h>
#include <pthread.h>

#include "comm_update.h"

typedef struct world {
    uint64_t round_nbytes;
    const char *addresses[MAX_RANKS];
    wsync_comm_t *comms[MAX_RANKS];
} world_t;

typedef struct thread {
    member_t member;
    world_t *world;
} thread_t;

static void *run_rank(void *context)
{
    thread_t *thread = context;

    run_updates(&thread->member, thread->world->comms[thread->member.rank],
                thread->world->addresses);
    return NULL;
}

static void run_world(uint32_t rank_count, uint32_t worker_count)
{
    world_t world = {.round_nbytes = 2ULL * 2 * PART * rank_count};
    static thread_t ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    wsync_error_t err = {0};

    for (uint32_t r = 0; r < rank_count; r++) {
        wsync_plan_t *plan = make_plan(r, rank_count, worker_count, world.round_nbytes);

        CHECK(wsync_plan_round_count(plan) > 4);
        CHECK_OK(
            wsync_comm_create_shared(device(), NULL, r, rank_count,
                                     wsync_plan_send_nbytes(plan), &world.comms[r], &err),
            err);
        world.addresses[r] = wsync_comm_address(world.comms[r]);
        wsync_plan_destroy(plan);
    }
    for (uint32_t r = 0; r < rank_count; r++) {
        ranks[r].world = &world;
        ranks[r].member = (member_t){.device = device(),
                                     .rank = r,
                                     .rank_count = rank_count,
                                     .worker_count = worker_count,
                                     .round_nbytes = world.round_nbytes};
        CHECK_EQ(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < rank_count; r++) {
        CHECK_EQ(pthread_join(threads[r], NULL), 0);
    }
}

TEST(every_rank_serves_a_worker)
{
    run_world(4, 4);
}

TEST(some_ranks_only_send)
{
    run_world(3, 1);
}

TEST(one_rank_is_alone)
{
    run_world(1, 1);
}

/* --- two ranks in one thread -----------------------------------------------------------
 */

TEST(waits_end_with_the_deadline_and_go_on)
{
    duo_t duo = open_duo();
    wsync_error_t err = {0};

    send_of(&duo, 0, 0);
    CHECK_EQ(wsync_comm_wait(duo.comms[0], 0, duo.stream, SOON_MS, &err),
             WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "the data of round 0 of rank 1 (pid ");
    send_of(&duo, 1, 0);
    send_of(&duo, 0, 1);
    receive_of(&duo, 0, 0);
    /* Rank 1 has not read round 0, whose half round 2 would overwrite. */
    CHECK_EQ(wsync_comm_acquire(duo.comms[0], 2, SOON_MS, &err), WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "the release of round 2 of rank 1 (pid ");
    receive_of(&duo, 1, 0);
    CHECK_OK(wsync_comm_acquire(duo.comms[0], 2, PATIENT_MS, &err), err);
    close_duo(&duo);
}

TEST(halves_are_guarded_from_one_update_to_the_next)
{
    duo_t duo = open_duo();
    const uint32_t last = wsync_plan_round_count(duo.plans[0]) - 1;
    wsync_error_t err = {0};

    for (uint32_t round = 0; round < last; round++) {
        for (int r = 0; r < 2; r++) {
            send_of(&duo, r, round);
        }
        for (int r = 0; r < 2; r++) {
            receive_of(&duo, r, round);
        }
    }
    send_of(&duo, 0, last);
    send_of(&duo, 1, last);
    receive_of(&duo, 0, last);
    /* Rank 0 is through and begins again; rank 1 still reads the last round. */
    CHECK_OK(wsync_comm_begin(duo.comms[0], duo.plans[0], &err), err);
    send_of(&duo, 0, 0);
    CHECK_EQ(wsync_comm_begin(duo.comms[1], duo.plans[1], &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "has not ended");
    CHECK_EQ(wsync_comm_acquire(duo.comms[0], 1, SOON_MS, &err), WSYNC_ERR_TIMEOUT);
    receive_of(&duo, 1, last);
    CHECK_OK(wsync_comm_acquire(duo.comms[0], 1, PATIENT_MS, &err), err);
    close_duo(&duo);
}

TEST(small_staging_is_refused_with_both_sizes)
{
    duo_t duo = {0};
    wsync_plan_t *large = make_plan(0, 2, 2, 1 << 17);
    wsync_plan_t *other = make_plan(1, 2, 2, 1 << 17);
    wsync_error_t err = {0};
    char text[32];

    make_duo(&duo, 0);
    connect_duo(&duo);
    CHECK(wsync_plan_send_nbytes(large) > 4096);
    CHECK_EQ(wsync_comm_begin(duo.comms[0], large, &err), WSYNC_ERR_INVALID);
    (void)snprintf(text, sizeof(text), "needs %llu bytes",
                   (unsigned long long)wsync_plan_send_nbytes(large));
    CHECK_HAS(err.message, text);
    CHECK_HAS(err.message, "has 4096");
    CHECK_OK(wsync_comm_begin(duo.comms[0], duo.plans[0], &err), err);
    close_duo(&duo);

    /* Enough here, too little over there: the reader must not run over its end. */
    memset(&duo, 0, sizeof(duo));
    make_duo(&duo, 0);
    wsync_comm_destroy(duo.comms[0]);
    CHECK_OK(wsync_comm_create_shared(device(), NULL, 0, 2, 1 << 17, &duo.comms[0], &err),
             err);
    connect_duo(&duo);
    CHECK_EQ(wsync_comm_begin(duo.comms[0], large, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "the staging of rank 1 has 4096");
    CHECK_EQ(wsync_comm_begin(duo.comms[1], other, &err), WSYNC_ERR_INVALID);
    close_duo(&duo);
    wsync_plan_destroy(large);
    wsync_plan_destroy(other);
}

TEST(plans_of_more_ranks_are_refused)
{
    duo_t duo = {0};
    wsync_plan_t *plan = make_plan(0, 3, 3, 8192);
    wsync_error_t err = {0};

    make_duo(&duo, 1 << 17);
    connect_duo(&duo);
    CHECK_EQ(wsync_comm_begin(duo.comms[0], plan, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "the exchange has 2");
    wsync_plan_destroy(plan);
    close_duo(&duo);
}

TEST(records_that_a_stream_has_dropped_hold_nothing_up)
{
    duo_t duo = open_duo();
    const int page = ((shared_t *)(void *)duo.comms[0])->control->fd;
    wsync_memory_t *gate = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_create(device(), 64, &gate, &err), err);
    CHECK_OK(wsync_stream_wait(duo.stream, (wsync_event_t){.memory = gate}, 1, &err), err);
    send_of(&duo, 0, 0);
    (void)wsync_stream_abandon(duo.stream, PATIENT_MS);
    close_duo(&duo);
    CHECK_EQ(fcntl(page, F_GETFD), -1);
    wsync_memory_destroy(gate);
}

TEST(missing_ranks_are_named)
{
    wsync_comm_t *comm = NULL;
    const char *addresses[4] = {0};
    wsync_error_t err = {0};

    CHECK_EQ(wsync_comm_create_shared(device(), NULL, 2, 2, 64, &comm, &err),
             WSYNC_ERR_INVALID);
    CHECK_OK(wsync_comm_create_shared(device(), NULL, 0, 4, 64, &comm, &err), err);
    CHECK_EQ(wsync_comm_connect(comm, addresses, SOON_MS, &err), WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "waits for 3 of 4 ranks to connect: 1 2 3");
    wsync_comm_destroy(comm);
    CHECK_OK(wsync_comm_create_shared(device(), NULL, 1, 4, 64, &comm, &err), err);
    addresses[0] = "00000000000000000000000000000000@/tmp/wsync-none/s";
    CHECK_EQ(wsync_comm_connect(comm, addresses, SOON_MS, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "rank 0");
    CHECK_HAS(err.message, "nobody listens");
    wsync_comm_destroy(comm);
}
