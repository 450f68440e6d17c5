/* SPDX-License-Identifier: Apache-2.0
 * Groups of transfers between two ranks, in order and with one mistake each: what is wrong
 * is seen, and ends with the communicator. */
#include "comm/nccl_communicator.h"
#include "nccl_ranks.h"

enum { LONG_MS = 60000, SHORT_MS = 500, SMALL = 3000, LARGE = 200000, NBYTES = 1 << 20 };

typedef enum mistake {
    NO_MISTAKE,
    NO_WAIT, /* a group does not wait for what fills its memory */
    SWAPPED, /* one rank receives in another order than the other sends in */
    SHORT,   /* a receive is a byte short */
} mistake_t;

typedef struct end {
    wsync_nccl_communicator_t *communicator;
    wsync_memory_t *memory;
    wsync_memory_t *words;
    uint8_t *data; /* of the memory: the fake's addresses are the process's */
} end_t;

static wsync_event_t word(const end_t *end, uint64_t index)
{
    return (wsync_event_t){end->words, 64 * index};
}

static end_t open_end(rank_t *rank, int timeout_ms)
{
    const wsync_nccl_library_t *library = NULL;
    wsync_nccl_id_t id;
    wsync_error_t err = {0};
    end_t end = {0};

    rank->device = own_gpu(rank->rank);
    CHECK_OK(wsync_nccl_library(NULL, 0, &library, &err), err);
    if (rank->rank == 0) {
        CHECK_EQ(library->get_unique_id(&id), WSYNC_NCCL_SUCCESS);
        memcpy(rank->shared->addresses[0], &id, sizeof(id));
    }
    meet(rank);
    memcpy(&id, rank->shared->addresses[0], sizeof(id));
    CHECK_OK(wsync_memory_create(rank->device, NBYTES, &end.memory, &err), err);
    CHECK_OK(wsync_control_create(rank->device, 4096, &end.words, &err), err);
    end.data = reach(end.memory->data);
    CHECK_OK(wsync_nccl_communicator_create(library, rank->device, &id, rank->rank,
                                            rank->rank_count, timeout_ms, &end.communicator,
                                            &err),
             err);
    CHECK_OK(
        wsync_nccl_communicator_meet(end.communicator, wsync_deadline_ms(PATIENT_MS), &err),
        err);
    return end;
}

static void close_end(rank_t *rank, end_t *end)
{
    meet(rank);
    CHECK(wsync_nccl_communicator_destroy(end->communicator));
    CHECK_EQ(nccl_census().communicators, 0);
    CHECK_EQ(nccl_census().works, 0);
    wsync_memory_destroy(end->memory);
    wsync_memory_destroy(end->words);
}

/* Two messages from rank 0 to rank 1, which may begin when word 0 is 1. */
static void submit(const rank_t *rank, const end_t *end, mistake_t mistake)
{
    const bool sends = rank->rank == 0;
    wsync_nccl_transfer_t transfers[2] = {
        {.data = end->memory->data, .nbytes = LARGE},
        {.data = (char *)end->memory->data + LARGE, .nbytes = SMALL},
    };
    wsync_nccl_group_t group = {
        .transfers = transfers, .count = 2, .end = {word(end, 1), 1}, .round = 7};
    wsync_error_t err = {0};

    for (int i = 0; i < 2; i++) {
        transfers[i].way = sends ? WSYNC_NCCL_SEND : WSYNC_NCCL_RECEIVE;
        transfers[i].peer = 1 - rank->rank;
    }
    if (mistake == SWAPPED && !sends) {
        const wsync_nccl_transfer_t first = transfers[0];

        transfers[0] = transfers[1];
        transfers[1] = first;
    }
    transfers[1].nbytes -= mistake == SHORT && !sends;
    if (mistake != NO_WAIT) {
        group.begins[0] = (wsync_nccl_point_t){word(end, 0), 1};
    }
    CHECK_OK(wsync_nccl_communicator_submit(end->communicator, &group, &err), err);
    memset(transfers, 0xff, sizeof(transfers)); /* the list was copied */
}

/* Rank 0 fills its memory only when both groups are under way; what rank 1 gets. */
static void fill_late(rank_t *rank, mistake_t mistake)
{
    end_t end = open_end(rank, LONG_MS);
    wsync_error_t err = {0};

    memset(end.data, rank->rank == 1 ? 0xee : 1, NBYTES);
    submit(rank, &end, mistake);
    CHECK_OK(wsync_nccl_communicator_begun(end.communicator, 7,
                                           wsync_deadline_ms(PATIENT_MS), &err),
             err);
    if (rank->rank == 1) {
        wsync_event_set(word(&end, 0), 1);
    }
    if (mistake == NO_WAIT) { /* all of it moves before anything is filled */
        CHECK_OK(wsync_event_wait(word(&end, 1), 1, PATIENT_MS, &err), err);
    }
    meet(rank);
    if (rank->rank == 0) {
        CHECK_EQ(wsync_event_query(word(&end, 1)), mistake == NO_WAIT);
        memset(end.data, 2, NBYTES);
        wsync_event_set(word(&end, 0), 1);
    }
    CHECK_OK(wsync_event_wait(word(&end, 1), 1, PATIENT_MS, &err), err);
    CHECK_OK(wsync_nccl_communicator_check(end.communicator, &err), err);
    if (rank->rank == 1) {
        const int wanted = mistake == NO_WAIT ? 1 : 2;

        CHECK_EQ(nccl_census().received, 2);
        for (int i = 0; i < LARGE + SMALL; i++) {
            CHECK_EQ(end.data[i], wanted);
        }
        CHECK_EQ(end.data[LARGE + SMALL], 0xee);
    }
    close_end(rank, &end);
}

static void wait_rightly(rank_t *rank)
{
    fill_late(rank, NO_MISTAKE);
}

TEST(a_group_waits_for_what_fills_its_memory)
{
    run_ranks(2, -1, wait_rightly);
}

/* Both ranks end with an error, and the fake has said why. */
static void mistake(rank_t *rank, mistake_t mistake, const char *words)
{
    const int64_t deadline = wsync_deadline_ms(PATIENT_MS);
    end_t end = open_end(rank, SHORT_MS);
    wsync_status_t status = WSYNC_OK;
    wsync_error_t err = {0};

    submit(rank, &end, mistake);
    wsync_event_set(word(&end, 0), 1);
    while (status == WSYNC_OK && wsync_clock_ms() < deadline) {
        status = wsync_nccl_communicator_check(end.communicator, &err);
        (void)usleep(1000);
    }
    CHECK_EQ(status, WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, rank->rank == 0 ? "round 7: rank 0 of 2 has not moved"
                                           : "round 7: rank 1 of 2 has not moved");
    CHECK_EQ(wsync_nccl_communicator_begun(end.communicator, 7, deadline, &err),
             WSYNC_ERR_CLOSED);
    meet(rank);
    if (rank->rank == 0) {
        forget_misuse(words);
    }
    close_end(rank, &end);
}

static void shorten(rank_t *rank)
{
    mistake(rank, SHORT, "rank 1 waits for 2999 bytes from rank 0");
}

TEST(a_receive_that_is_short_ends_the_communicator)
{
    run_ranks(2, -1, shorten);
}

/* --- its limits -------------------------------------------------------------------------
 */

static void submit_many(rank_t *rank)
{
    end_t end = open_end(rank, LONG_MS);
    wsync_nccl_transfer_t transfer = {.way = WSYNC_NCCL_BROADCAST,
                                      .data = end.memory->data};
    wsync_nccl_group_t group = {.transfers = &transfer, .count = 1};
    wsync_error_t err = {0};

    transfer.nbytes = SMALL;
    group.begins[0] = (wsync_nccl_point_t){word(&end, 0), 1};
    for (uint32_t i = 0; i < WSYNC_NCCL_MAX_GROUPS; i++) {
        group.round = i;
        group.end = (wsync_nccl_point_t){word(&end, 1), i + 1};
        CHECK_OK(wsync_nccl_communicator_submit(end.communicator, &group, &err), err);
    }
    CHECK_EQ(wsync_nccl_communicator_submit(end.communicator, &group, &err),
             WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "round 15: the bytes of 16 earlier groups");
    wsync_event_set(word(&end, 0), 1);
    CHECK_OK(wsync_event_wait(word(&end, 1), WSYNC_NCCL_MAX_GROUPS, PATIENT_MS, &err), err);
    group.end.value = WSYNC_NCCL_MAX_GROUPS + 1;
    CHECK_OK(wsync_nccl_communicator_submit(end.communicator, &group, &err), err);
    CHECK_OK(wsync_event_wait(word(&end, 1), group.end.value, PATIENT_MS, &err), err);
    close_end(rank, &end);
}

TEST(as_many_groups_as_there_may_be_are_under_way)
{
    run_ranks(2, -1, submit_many);
}
