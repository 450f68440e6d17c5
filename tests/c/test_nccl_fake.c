/* SPDX-License-Identifier: Apache-2.0
 * The stand-in for NCCL: what it does, that it refuses what the real one leaves undefined,
 * and what can be injected.  A test that passes on it means something only because of
 * these. */
#include <pthread.h>

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

static void exchange_at_once(nccl_rank_t *rank)
{
    rank_open(rank);
    inject("polls", 0, 0);
    rank_join(rank);
    NCCL(settle(rank));
    NCCL(rank->nccl->group_start());
    rank_send(rank, 0, SMALL, 1 - rank->rank);
    rank_recv(rank, FAR, SMALL, 1 - rank->rank);
    NCCL(rank->nccl->group_end());
    drain(rank);
    NCCL(rank->nccl->comm_destroy(rank->comm));
    CHECK_EQ(nccl_census().communicators, 0);
}

TEST(a_communicator_need_not_be_in_progress)
{
    run_ranks(2, exchange_at_once);
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

static void call_in_progress(nccl_rank_t *rank)
{
    static const char words[] = "the communicator is in progress";
    const wsync_nccl_library_t *nccl;

    rank_open(rank);
    inject("never", 0, 0);
    rank_join(rank);
    nccl = rank->nccl;
    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclSend: the communicator is in progress");
    CHECK_HAS(nccl->get_last_error(NULL), words);
    CHECK_EQ(nccl->comm_destroy(rank->comm), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclCommDestroy: the communicator is in progress");
    CHECK_EQ(nccl->comm_finalize(rank->comm), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse(words);
    NCCL(nccl->group_start());
    CHECK_EQ(begin_recv(rank, 0, 1, 0), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclRecv: the communicator is in progress");
    CHECK_EQ(nccl->group_end(), WSYNC_NCCL_INVALID_ARGUMENT);
    rank_close(rank);
}

TEST(a_communicator_in_progress_is_only_asked_and_aborted)
{
    run_ranks(1, call_in_progress);
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

/* --- who calls --------------------------------------------------------------------------
 */

static void *send_from_thread(void *argument)
{
    nccl_rank_t *rank = argument;
    int result = 0;

    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclSend: a second thread, while the first is in ncclRecv");
    CHECK_EQ(rank->nccl->comm_abort(rank->comm), WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclCommAbort: a second thread");
    CHECK_EQ(rank->nccl->comm_get_async_error(rank->comm, &result),
             WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclCommGetAsyncError: a second thread");
    return NULL;
}

static void call_from_threads(nccl_rank_t *rank)
{
    pthread_t thread;

    rank_start(rank);
    NCCL(rank->nccl->group_start());
    rank_recv(rank, 0, 1, 0);
    CHECK_EQ(pthread_create(&thread, NULL, send_from_thread, rank), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    rank_send(rank, FAR, 1, 0);
    end_group(rank);
    drain(rank);
    rank_close(rank);
}

TEST(a_second_thread_is_refused_while_a_group_is_open)
{
    run_ranks(1, call_from_threads);
}

static void *ask_from_thread(void *argument)
{
    const nccl_rank_t *rank = argument;
    int result = 0;

    NCCL(rank->nccl->comm_get_async_error(rank->comm, &result));
    inject("owner", 0, 0);
    CHECK_EQ(rank->nccl->comm_get_async_error(rank->comm, &result),
             WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclCommGetAsyncError: not the thread that has made the communicator");
    return NULL;
}

static void own(nccl_rank_t *rank)
{
    pthread_t thread;

    rank_start(rank);
    CHECK_EQ(pthread_create(&thread, NULL, ask_from_thread, rank), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    rank_close(rank);
}

TEST(a_communicator_can_be_one_thread_s)
{
    run_ranks(1, own);
}

static void call_after_abort(nccl_rank_t *rank)
{
    int result = 0;

    rank_start(rank);
    NCCL(rank->nccl->comm_abort(rank->comm));
    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclSend: no communicator, or one that was freed");
    CHECK_EQ(rank->nccl->comm_get_async_error(rank->comm, &result),
             WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclCommGetAsyncError: no communicator");
    CHECK_EQ(rank->nccl->comm_abort(rank->comm), WSYNC_NCCL_INVALID_ARGUMENT);
    check_misuse("ncclCommAbort: no communicator");
}

TEST(a_communicator_that_was_freed_is_refused)
{
    run_ranks(1, call_after_abort);
}

static void misuse_groups(nccl_rank_t *rank)
{
    const wsync_nccl_library_t *nccl;
    wsync_nccl_comm_t second = NULL;
    wsync_cu_stream_t other = NULL;

    rank_start(rank);
    nccl = rank->nccl;
    CHECK_EQ(nccl->group_end(), WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclGroupEnd without ncclGroupStart");
    CU(rank->cu->stream_create(&other, WSYNC_CU_STREAM_NON_BLOCKING));
    NCCL(nccl->group_start());
    rank_send(rank, 0, 1, 0);
    CHECK_EQ(nccl->recv(rank->memory, 1, WSYNC_NCCL_UINT8, 0, rank->comm, other),
             WSYNC_NCCL_INVALID_USAGE);
    check_misuse("a group on two streams");
    CHECK_EQ(nccl->comm_abort(rank->comm), WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclCommAbort in a group");
    CHECK_EQ(nccl->comm_init(&second, 1, rank->shared->id, 0, NULL),
             WSYNC_NCCL_INVALID_USAGE);
    check_misuse("ncclCommInitRankConfig in a group");
    CHECK_EQ(nccl->group_end(), WSYNC_NCCL_INVALID_USAGE); /* nothing of it is done */
    CHECK_EQ(nccl_census().works, 0);
    CHECK_EQ(begin_send(rank, 0, 1, 1), WSYNC_NCCL_INVALID_ARGUMENT); /* no such rank */
    CHECK_EQ(begin_send(rank, 0, 1, -1), WSYNC_NCCL_INVALID_ARGUMENT);
    CU(rank->cu->stream_destroy(other));
    rank_close(rank);
}

TEST(groups_nest_and_have_one_stream)
{
    run_ranks(1, misuse_groups);
}

static void free_in_use(nccl_rank_t *rank)
{
    unsigned char *foreign = malloc(SMALL);

    rank_start(rank);
    (void)begin_recv(rank, FAR, SMALL, 0);
    NCCL(settle(rank));
    CHECK(rank->cu->mem_free((wsync_cu_ptr_t)(uintptr_t)rank->memory) != 0);
    check_misuse("cuMemFree");
    (void)rank->nccl->send(foreign, SMALL, WSYNC_NCCL_UINT8, 0, rank->comm, rank->stream);
    CHECK_EQ(settle(rank), WSYNC_NCCL_CUDA_ERROR);
    check_misuse("a group that the driver refuses");
    CHECK_EQ(truncate(getenv("WSYNC_FAKE_CUDA_MISUSE"), 0), 0);
    rank_close(rank);
    free(foreign);
}

TEST(memory_of_a_group_is_the_device_s_and_in_use)
{
    run_ranks(1, free_in_use);
}

static void send_from_host(nccl_rank_t *rank)
{
    unsigned char *data = malloc(SMALL);

    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_PAGEABLE", "1", 1), 0);
    rank_start(rank);
    CHECK(data != NULL);
    memset(data, 4 + rank->rank, SMALL);
    NCCL(rank->nccl->broadcast(data, data, SMALL, WSYNC_NCCL_UINT8, 1, rank->comm,
                               rank->stream) == WSYNC_NCCL_IN_PROGRESS
             ? settle(rank)
             : WSYNC_NCCL_INTERNAL_ERROR);
    CU(rank->cu->stream_synchronize(rank->stream));
    CHECK_EQ(data[0], 5);
    CHECK_EQ(data[SMALL - 1], 5);
    rank_close(rank);
    free(data);
}

TEST(a_gpu_that_reaches_the_host_s_memory_sends_it)
{
    run_ranks(2, send_from_host);
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

static void init_wrongly(nccl_rank_t *rank)
{
    wsync_nccl_config_t config = WSYNC_NCCL_CONFIG_INIT;
    wsync_nccl_id_t none = {{0}};
    wsync_nccl_comm_t comm = NULL;
    wsync_cu_context_t context = NULL;

    rank_start(rank);
    CHECK_EQ(rank->nccl->comm_init(&comm, 1, rank->shared->id, 1, &config),
             WSYNC_NCCL_INVALID_ARGUMENT);
    CHECK_EQ(rank->nccl->comm_init(&comm, 1, none, 0, &config), WSYNC_NCCL_REMOTE_ERROR);
    config.magic = 1;
    CHECK_EQ(rank->nccl->comm_init(&comm, 1, rank->shared->id, 0, &config),
             WSYNC_NCCL_INVALID_ARGUMENT);
    config.magic = WSYNC_NCCL_CONFIG_MAGIC;
    config.min_ctas = 9;
    config.max_ctas = 8;
    CHECK_EQ(rank->nccl->comm_init(&comm, 1, rank->shared->id, 0, &config),
             WSYNC_NCCL_INVALID_ARGUMENT);
    CU(rank->cu->context_pop(&context));
    CHECK_EQ(rank->nccl->comm_init(&comm, 1, rank->shared->id, 0, NULL),
             WSYNC_NCCL_CUDA_ERROR);
    check_misuse("no device's context is current");
    CU(rank->cu->context_push(context));
    CHECK(comm == NULL);
    rank_close(rank);
}

TEST(an_init_that_cannot_be_is_refused)
{
    run_ranks(1, init_wrongly);
}

/* --- what is injected -------------------------------------------------------------------
 */

static void exchange_two_messages(const nccl_rank_t *rank)
{
    const int peer = 1 - rank->rank;

    NCCL(rank->nccl->group_start());
    for (size_t i = 0; i < 2; i++) {
        rank_send(rank, i * SMALL, SMALL, peer);
        rank_recv(rank, FAR + i * SMALL, SMALL, peer);
    }
    end_group(rank);
}

static void hang_at_second_send(nccl_rank_t *rank)
{
    rank_start(rank);
    fill(rank, 0, SMALL * (size_t)2, 1);
    if (rank->rank == 0) {
        inject("hang", 2, 0);
    }
    exchange_two_messages(rank);
    AWAIT(nccl_census().received == 2 - rank->rank);
    CHECK(holds(rank, FAR, SMALL * (size_t)(2 - rank->rank), 1));
    CHECK(rank->rank == 0 || holds(rank, FAR + SMALL, SMALL, 0xee));
    check_stuck(rank);
}

TEST(an_operation_hangs)
{
    run_ranks(2, hang_at_second_send);
}

static void fail_at_second_send(nccl_rank_t *rank)
{
    rank_start(rank);
    if (rank->rank == 1) {
        inject("error", 2, WSYNC_NCCL_REMOTE_ERROR);
    }
    exchange_two_messages(rank);
    if (rank->rank == 1) {
        int result = 0;

        AWAIT(rank->nccl->comm_get_async_error(rank->comm, &result) == 0 && result != 0);
        CHECK_EQ(result, WSYNC_NCCL_REMOTE_ERROR);
        CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_REMOTE_ERROR);
    }
    check_stuck(rank);
}

TEST(an_operation_fails_asynchronously)
{
    run_ranks(2, fail_at_second_send);
}

static void die_at_second_send(nccl_rank_t *rank)
{
    rank_start(rank);
    if (rank->rank == 1) {
        inject("die", 2, 0);
    }
    fill(rank, 0, SMALL * (size_t)2, 1);
    exchange_two_messages(rank);
    AWAIT(rank->rank == 0 && nccl_census().received == 1);
    CHECK(holds(rank, FAR, SMALL, 1));
    CHECK(holds(rank, FAR + SMALL, SMALL, 0xee));
    CHECK_EQ(rank->cu->stream_query(rank->stream), WSYNC_CU_NOT_READY);
    rank_close(rank);
}

TEST(a_rank_dies)
{
    run_ranks_but(2, 1, die_at_second_send);
}

static void die_unheard(nccl_rank_t *rank)
{
    int result = 0;

    rank_start(rank);
    inject(rank->rank == 1 ? "die" : "notice", 0, 0);
    exchange_two_messages(rank);
    AWAIT(rank->rank == 0 &&
          rank->nccl->comm_get_async_error(rank->comm, &result) == WSYNC_NCCL_SUCCESS &&
          result == WSYNC_NCCL_REMOTE_ERROR);
    rank_close(rank);
}

TEST(the_end_of_a_rank_is_noticed)
{
    run_ranks_but(2, 1, die_unheard);
}

static void never_join(nccl_rank_t *rank)
{
    int result = 0;

    rank_open(rank);
    inject("polls", 0, 0);
    if (rank->rank == 0) {
        inject("never", 0, 0);
    }
    rank_join(rank);
    if (rank->rank == 1) {
        NCCL(settle(rank));
    }
    meet(rank);
    NCCL(rank->nccl->comm_get_async_error(rank->comm, &result));
    CHECK_EQ(result, rank->rank == 0 ? WSYNC_NCCL_IN_PROGRESS : WSYNC_NCCL_SUCCESS);
    meet(rank);
    rank_close(rank);
}

TEST(an_init_never_completes)
{
    run_ranks(2, never_join);
}

/* A rank that is slow has all others wait; the abort of a slow one does not. */
static void wait_for_slow_rank(nccl_rank_t *rank)
{
    const uint64_t begin = wsync_clock_ns();

    rank_start(rank);
    if (rank->rank == 1) {
        inject("slow", 0, 50000);
    }
    exchange_two_messages(rank);
    CU(rank->cu->stream_synchronize(rank->stream));
    CHECK(wsync_clock_ns() - begin >= UINT64_C(50000000));
    meet(rank);
    if (rank->rank == 1) {
        inject("slow", 0, 1000L * 1000 * 3600);
    }
    exchange_two_messages(rank);
    check_stuck(rank);
}

TEST(a_rank_is_slow)
{
    run_ranks(2, wait_for_slow_rank);
}

/* Each call fails in turn; what was made is given back all the same. */
static int live_once(nccl_rank_t *rank)
{
    const wsync_nccl_library_t *nccl = rank->nccl;
    wsync_nccl_config_t config = WSYNC_NCCL_CONFIG_INIT;
    wsync_nccl_id_t id;
    int result = nccl->get_unique_id(&id);

    if (result == WSYNC_NCCL_SUCCESS) {
        result = nccl->comm_init(&rank->comm, 1, id, 0, &config);
    }
    if (result != WSYNC_NCCL_IN_PROGRESS) {
        return result;
    }
    while (result == WSYNC_NCCL_IN_PROGRESS) {
        int state = WSYNC_NCCL_SUCCESS;

        result = nccl->comm_get_async_error(rank->comm, &state);
        result = result == WSYNC_NCCL_SUCCESS ? state : result;
    }
    if (result == WSYNC_NCCL_SUCCESS) {
        result = nccl->group_start();
    }
    if (result == WSYNC_NCCL_SUCCESS) {
        const int sent = begin_send(rank, 0, SMALL, 0);
        const int received = begin_recv(rank, FAR, SMALL, 0);
        const int ended = nccl->group_end();

        CHECK(ended == WSYNC_NCCL_SYSTEM_ERROR ||
              (ended == WSYNC_NCCL_IN_PROGRESS && sent == 0 && received == 0));
        result = ended;
    }
    if (result == WSYNC_NCCL_IN_PROGRESS) {
        result = settle(rank);
        drain(rank);
    }
    return nccl->comm_abort(rank->comm) == WSYNC_NCCL_SUCCESS ? result
                                                              : WSYNC_NCCL_SYSTEM_ERROR;
}

static void fail_each_call(nccl_rank_t *rank)
{
    int failures = 0;

    rank_open(rank);
    for (long k = 0;; k++) {
        int result;

        fail_nccl("*", k, WSYNC_NCCL_SYSTEM_ERROR);
        result = live_once(rank);
        AWAIT(nccl_census().works == 0);
        CHECK_EQ(nccl_census().communicators, 0);
        if (failed_nccl() == NULL) {
            CHECK_EQ(result, WSYNC_NCCL_SUCCESS);
            break;
        }
        CHECK_EQ(result, WSYNC_NCCL_SYSTEM_ERROR);
        failures++;
    }
    CHECK(failures >= 10);
}

TEST(each_call_fails_in_turn)
{
    run_ranks(1, fail_each_call);
}

/* --- the rest ---------------------------------------------------------------------------
 */

static void end_in_order(nccl_rank_t *rank)
{
    rank_start(rank);
    exchange_two_messages(rank);
    CHECK_EQ(rank->nccl->comm_finalize(rank->comm), WSYNC_NCCL_IN_PROGRESS);
    NCCL(settle(rank));
    CHECK_EQ(rank->cu->stream_query(rank->stream), WSYNC_CU_SUCCESS);
    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_INVALID_USAGE);
    NCCL(rank->nccl->comm_destroy(rank->comm));
    CHECK_EQ(nccl_census().communicators, 0);
}

TEST(what_was_sent_arrives_before_the_end)
{
    run_ranks(2, end_in_order);
}

static void destroy_early(nccl_rank_t *rank)
{
    rank_start(rank);
    fill(rank, 0, SMALL * (size_t)2, 1);
    inject("slow", 0, 20000);
    exchange_two_messages(rank);
    NCCL(rank->nccl->comm_destroy(rank->comm));
    CHECK_EQ(nccl_census().received, 2);
    CHECK(holds(rank, FAR, SMALL * (size_t)2, 1));
}

TEST(a_communicator_is_destroyed_when_its_work_is_done)
{
    run_ranks(2, destroy_early);
}

/* What came first holds up what came later, on another stream. */
static void use_two_streams(nccl_rank_t *rank)
{
    wsync_cu_stream_t first = NULL;
    wsync_cu_event_t event = NULL;

    rank_start(rank);
    CU(rank->cu->event_create(&event, WSYNC_CU_EVENT_DISABLE_TIMING));
    (void)begin_recv(rank, FAR, 1, 1 - rank->rank);
    NCCL(settle(rank));
    first = rank->stream;
    CU(rank->cu->stream_create(&rank->stream, WSYNC_CU_STREAM_NON_BLOCKING));
    CU(rank->cu->event_record(event, rank->stream));
    NCCL(rank->nccl->group_start());
    rank_send(rank, 0, SMALL, rank->rank);
    rank_recv(rank, FAR, SMALL, rank->rank);
    end_group(rank);
    AWAIT(rank->cu->event_query(event) == WSYNC_CU_SUCCESS);
    (void)usleep(2000); /* in which one that does not wait would get far */
    CHECK_EQ(nccl_census().received, 0);
    CU(rank->cu->event_destroy(event));
    check_stuck(rank);
    CU(rank->cu->stream_destroy(first));
}

TEST(groups_of_two_streams_keep_their_order)
{
    run_ranks(2, use_two_streams);
}

static void lose_device(nccl_rank_t *rank)
{
    rank_start(rank);
    (void)begin_recv(rank, FAR, SMALL, 0);
    NCCL(settle(rank));
    fake_lose("cuStreamQuery", 0, WSYNC_CU_LAUNCH_FAILED);
    CHECK_EQ(rank->cu->stream_query(rank->stream), WSYNC_CU_LAUNCH_FAILED);
    AWAIT(nccl_census().works == 0);
    NCCL(rank->nccl->comm_abort(rank->comm));
    CHECK_EQ(nccl_census().communicators, 0);
}

TEST(work_ends_with_the_device)
{
    run_ranks(1, lose_device);
}

/* One thread drives two GPUs of its process: both ends of a group. */
static void drive_two(nccl_rank_t *rank)
{
    nccl_rank_t other = {.rank = 1};
    wsync_cu_context_t first = NULL;

    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_DEVICES", "2", 1), 0);
    rank_open(rank);
    rank->rank_count = 2;
    rank_join(rank);
    CU(rank->cu->context_pop(&first));
    other.shared = rank->shared;
    other.rank_count = 2;
    other.nccl = rank->nccl;
    other.cu = enter_device(1);
    CU(other.cu->stream_create(&other.stream, WSYNC_CU_STREAM_NON_BLOCKING));
    rank_join(&other);
    CU(other.cu->context_pop(&first));
    NCCL(settle(rank));
    NCCL(settle(&other));
    other.memory = rank->memory + FAR;
    fill(rank, 0, LARGE, 9);
    NCCL(rank->nccl->group_start());
    rank_send(rank, 0, LARGE, 1);
    rank_recv(&other, 0, LARGE, 0);
    end_group(rank);
    NCCL(settle(&other));
    AWAIT(nccl_census().received == 1);
    CHECK(holds(rank, FAR, LARGE, 9));
    NCCL(rank->nccl->comm_abort(rank->comm));
    NCCL(rank->nccl->comm_abort(other.comm));
    CHECK_EQ(nccl_census().communicators, 0);
}

TEST(a_process_can_have_two_ranks)
{
    run_ranks(1, drive_two);
}

static void leave_everything(nccl_rank_t *rank)
{
    wsync_nccl_config_t config = WSYNC_NCCL_CONFIG_INIT;
    wsync_nccl_id_t id;
    int result = 0;

    CHECK_EQ(setenv("WSYNC_FAKE_NCCL_FAIL", "ncclGetUniqueId:1:3", 1), 0);
    CHECK_EQ(setenv("WSYNC_FAKE_NCCL_INJECT", "hang:0:0", 1), 0);
    CHECK_EQ(setenv("WSYNC_FAKE_NCCL_POLLS", "1", 1), 0);
    rank_open(rank);
    NCCL(rank->nccl->get_unique_id(&id));
    CHECK_EQ(rank->nccl->get_unique_id(&rank->shared->id), WSYNC_NCCL_INTERNAL_ERROR);
    config.min_ctas = 1;
    config.max_ctas = 8;
    CHECK_EQ(rank->nccl->comm_init(&rank->comm, 1, id, 0, &config), WSYNC_NCCL_IN_PROGRESS);
    NCCL(rank->nccl->comm_get_async_error(rank->comm, &result));
    CHECK_EQ(result, WSYNC_NCCL_IN_PROGRESS);
    NCCL(rank->nccl->comm_get_async_error(rank->comm, &result));
    CHECK_EQ(result, WSYNC_NCCL_SUCCESS);
    CHECK_EQ(begin_send(rank, 0, 1, 0), WSYNC_NCCL_IN_PROGRESS);
    NCCL(settle(rank));
    exit(0);
}

TEST(the_environment_is_read_and_the_end_is_counted)
{
    char path[] = "/tmp/wsync-nccl-log.XXXXXX";
    char text[MISUSE_NBYTES] = "";
    const int fd = mkstemp(path);

    CHECK(fd >= 0);
    CHECK_EQ(setenv("WSYNC_FAKE_NCCL_LOG", path, 1), 0);
    run_ranks(1, leave_everything);
    CHECK(read(fd, text, sizeof(text) - 1) > 0);
    CHECK_HAS(text, " ncclGetVersion\n");
    CHECK_HAS(text, " config 0 1 8\n");
    CHECK_HAS(text, " ncclSend\n");
    CHECK_HAS(text, " census 1 1 0\n");
    CHECK_EQ(unlink(path), 0);
    (void)close(fd);
}
