/* SPDX-License-Identifier: Apache-2.0
 * What a round by NCCL asks of the process once nothing is new any more, and that an
 * exchange leaves nothing behind whichever of its allocations or calls fails. */
#include "nccl_ranks.h"
#include "oom.h"

enum { ROUND_MS = 60000, LOG_NBYTES = 1 << 20, STEADY_RANKS = 4, STEADY_WORKERS = 3 };

/* --- a steady round ---------------------------------------------------------------------
 */

/* Has the fakes write their calls to files, which are read from where they end now. */
typedef struct logs {
    char cuda[32];
    char nccl[32];
    long cuda_start;
    long nccl_start;
} logs_t;

static void make_log(const char *variable, char path[32])
{
    int fd;

    (void)snprintf(path, 32, "/tmp/wsync-calls.XXXXXX");
    fd = mkstemp(path);
    CHECK(fd >= 0);
    (void)close(fd);
    CHECK_EQ(setenv(variable, path, 1), 0);
}

static void make_logs(logs_t *logs)
{
    make_log("WSYNC_FAKE_CUDA_LOG", logs->cuda);
    make_log("WSYNC_FAKE_NCCL_LOG", logs->nccl);
}

static long size_of(const char *path)
{
    FILE *file = fopen(path, "rb");
    long size;

    CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0);
    size = ftell(file);
    (void)fclose(file);
    return size;
}

static char *read_log(const char *path, long start)
{
    static char text[LOG_NBYTES];
    FILE *file = fopen(path, "rb");
    size_t nbytes;

    CHECK(file != NULL && fseek(file, start, SEEK_SET) == 0);
    nbytes = fread(text, 1, sizeof(text) - 1, file);
    CHECK(nbytes + 1 < sizeof(text));
    (void)fclose(file);
    text[nbytes] = '\0';
    return text;
}

/* Lines that end with the name of a call. */
static size_t count_calls(const char *text, const char *call)
{
    size_t count = 0;
    char line[64];

    (void)snprintf(line, sizeof(line), " %s\n", call);
    for (const char *at = strstr(text, line); at != NULL; at = strstr(at + 1, line)) {
        count++;
    }
    return count;
}

static size_t count_lines(const char *text)
{
    size_t count = 0;

    for (; *text != '\0'; text++) {
        count += *text == '\n';
    }
    return count;
}

/* What a rank's rounds have to be: sends, receives and broadcasts of its messages. */
typedef struct expected {
    size_t groups;
    size_t sends;
    size_t receives;
    size_t broadcasts;
    size_t repeats; /* sends of bytes that another peer gets, too */
    size_t copies;  /* phases of rounds in which something is copied */
} expected_t;

static expected_t expect(const wsync_plan_t *plan, uint32_t rank)
{
    expected_t found = {0};

    for (uint32_t round = 0; round < wsync_plan_round_count(plan); round++) {
        size_t count = 0;
        const wsync_message_t *messages = wsync_plan_messages(plan, round, &count);

        found.groups += count > 0;
        for (size_t i = 0; i < count; i++) {
            const uint32_t peers = messages[i].peer_count;

            if (peers + 1 == STEADY_RANKS) {
                found.broadcasts++;
            } else if (messages[i].source == rank) {
                found.sends += peers;
                found.repeats += peers - 1;
            } else {
                found.receives++;
            }
        }
        for (int phase = 0; phase < WSYNC_PHASE_COUNT; phase++) {
            (void)wsync_plan_copies(plan, round, (wsync_phase_t)phase, &count);
            found.copies += count > 0;
        }
    }
    return found;
}

static void check_nccl_calls(const char *text, const expected_t *expected)
{
    const size_t asked = count_calls(text, "ncclCommGetAsyncError");

    CHECK_EQ(count_calls(text, "ncclGroupStart"), expected->groups);
    CHECK_EQ(count_calls(text, "ncclGroupEnd"), expected->groups);
    CHECK_EQ(count_calls(text, "ncclSend"), expected->sends);
    CHECK_EQ(count_calls(text, "ncclRecv"), expected->receives);
    CHECK_EQ(count_calls(text, "ncclBroadcast"), expected->broadcasts);
    CHECK_EQ(count_lines(text), asked + 2 * expected->groups + expected->sends +
                                    expected->receives + expected->broadcasts);
}

/* Launches that pack and unpack, words, and looks at the streams: no memory, no copy of
 * staging, and no call that waits. */
static void check_cuda_calls(const char *text, const expected_t *expected)
{
    static const char *const others[] = {
        "cuCtxPushCurrent",     "cuCtxPopCurrent", "cuPointerGetAttributes",
        "cuMemGetAddressRange", "cuStreamQuery",
    };
    const size_t launches = count_calls(text, "cuLaunchKernel");
    const size_t writes = count_calls(text, "cuStreamWriteValue64");
    const size_t waits = count_calls(text, "cuStreamWaitValue64");
    size_t known = launches + writes + waits;

    CHECK_EQ(launches, expected->copies);
    CHECK(writes <= 3 * expected->groups);
    CHECK(waits > 0 && waits <= 3 * expected->groups);
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        known += count_calls(text, others[i]);
    }
    if (known != count_lines(text)) {
        FAIL("%zu calls are known of:\n%s", known, text);
    }
}

static wsync_plan_t *steady_plan(uint32_t rank)
{
    return make_plan(rank, STEADY_RANKS, STEADY_WORKERS, 2ULL * 2 * PART * STEADY_RANKS);
}

/* Copies a phase; allocations that this takes are none of the exchange's. */
static long copy(member_t *member, const wsync_plan_t *plan, uint32_t round,
                 wsync_phase_t phase)
{
    const long before = oom_own;

    enqueue(member, plan, round, phase);
    return oom_own - before;
}

/* Rank 0 gets through all rounds before another begins: the host waits for nobody.  How
 * many allocations copies have made. */
static long go_ahead(rank_t *rank, member_t *member, const wsync_plan_t *plan)
{
    wsync_error_t err = {0};
    long made = 0;

    CHECK_OK(wsync_comm_begin(rank->comm, plan, &err), err);
    if (rank->rank != 0) {
        meet(rank);
    }
    for (uint32_t round = 0; round < wsync_plan_round_count(plan); round++) {
        size_t count = 0;

        (void)wsync_plan_messages(plan, round, &count);
        CHECK_OK(wsync_comm_acquire(rank->comm, round, PATIENT_MS, &err), err);
        CHECK_OK(wsync_comm_spans(rank->comm, round, member->spans[round], count, &err),
                 err);
        made += copy(member, plan, round, WSYNC_PHASE_PACK);
        CHECK_OK(wsync_comm_post(rank->comm, round, member->stream, &err), err);
        made += copy(member, plan, round, WSYNC_PHASE_LOCAL);
        CHECK_OK(wsync_comm_wait(rank->comm, round, member->stream, PATIENT_MS, &err), err);
        made += copy(member, plan, round, WSYNC_PHASE_UNPACK);
        CHECK_OK(wsync_comm_release(rank->comm, round, member->stream, &err), err);
    }
    if (rank->rank == 0) {
        meet(rank);
    }
    return made;
}

static void run_steadily(rank_t *rank)
{
    static member_t member;
    wsync_plan_t *plan = steady_plan(rank->rank);
    const expected_t expected = expect(plan, rank->rank);
    wsync_error_t err = {0};
    logs_t logs;
    long blocks;

    make_logs(&logs);
    CHECK(wsync_plan_round_count(plan) >= 6);
    CHECK(wsync_plan_round_count(plan) <= MAX_ROUNDS);
    /* what rank 3 sends goes to all others */
    CHECK((expected.repeats > 0) == (rank->rank < STEADY_WORKERS));
    open_rank(rank, rank->rank, plan, ROUND_MS);
    member = (member_t){.device = rank->device,
                        .rank = rank->rank,
                        .rank_count = STEADY_RANKS,
                        .worker_count = STEADY_WORKERS};
    open_member(&member);
    CHECK_OK(wsync_comm_connect(rank->comm, rank->addresses, PATIENT_MS, &err), err);
    for (uint64_t update = 0; update < 2; update++) {
        update_rank(&member, rank->comm, plan, update);
    }
    for (int update = 0; update < 4; update++) {
        meet(rank);
        logs.cuda_start = size_of(logs.cuda);
        logs.nccl_start = size_of(logs.nccl);
        blocks = atomic_load(&oom_made);
        blocks += go_ahead(rank, &member, plan);
        CHECK_OK(wsync_stream_synchronize(member.stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_comm_check(rank->comm, &err), err);
    }
    /* two streams may keep more entries than ever before, as they are slow */
    CHECK(atomic_load(&oom_made) <= blocks + 2);
    check_nccl_calls(read_log(logs.nccl, logs.nccl_start), &expected);
    check_cuda_calls(read_log(logs.cuda, logs.cuda_start), &expected);
    if (rank->rank < STEADY_WORKERS) {
        check_ring(plan, rank->rank, STEADY_RANKS, 1, reach(member.ring->data));
    }
    meet(rank);
    wsync_comm_destroy(rank->comm);
    close_member(&member);
    wsync_plan_destroy(plan);
    CHECK_EQ(unlink(logs.cuda) + unlink(logs.nccl), 0);
}

TEST(a_steady_round_is_one_group_without_memory_waits_or_repeats)
{
    run_ranks(STEADY_RANKS, -1, run_steadily);
}

/* --- whatever fails ---------------------------------------------------------------------
 */

/* Two ranks in one thread, with a GPU each. */
typedef struct pair {
    const wsync_device_t *devices[2];
    wsync_plan_t *plans[2];
    wsync_comm_t *comms[2];
    wsync_stream_t *streams[2];
} pair_t;

static void find_gpu(uint8_t number, const wsync_device_t **device)
{
    wsync_cu_uuid_t uuid;
    wsync_error_t err = {0};

    memset(uuid.bytes, 0xfa, sizeof(uuid.bytes));
    uuid.bytes[15] = number;
    CHECK_OK(wsync_device_cuda(&uuid, "kernels", device, &err), err);
}

static wsync_status_t make_pair(pair_t *pair, wsync_error_t *err)
{
    const wsync_nccl_library_t *library = NULL;
    wsync_status_t status = wsync_nccl_library(NULL, 0, &library, err);

    for (uint32_t r = 0; r < 2 && status == WSYNC_OK; r++) {
        const wsync_plan_t *plan = pair->plans[r];

        status = wsync_stream_create(pair->devices[r], 1, &pair->streams[r], err);
        if (status == WSYNC_OK) {
            status = wsync_comm_create_nccl(
                library, pair->devices[r], r, 2, wsync_plan_send_nbytes(plan),
                wsync_plan_recv_nbytes(plan), ROUND_MS, &pair->comms[r], err);
        }
    }
    return status;
}

/* A call of one rank; while that takes its time, the other may have failed. */
typedef wsync_status_t (*step_func_t)(pair_t *pair, uint32_t rank, uint32_t round,
                                      wsync_error_t *err);

static wsync_status_t both(pair_t *pair, uint32_t round, step_func_t step,
                           wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(PATIENT_MS);
    wsync_status_t status[2] = {WSYNC_ERR_TIMEOUT, WSYNC_ERR_TIMEOUT};

    while (status[0] == WSYNC_ERR_TIMEOUT || status[1] == WSYNC_ERR_TIMEOUT) {
        CHECK(wsync_clock_ms() < deadline);
        for (uint32_t r = 0; r < 2; r++) {
            if (status[r] == WSYNC_ERR_TIMEOUT) {
                status[r] = step(pair, r, round, err);
            }
            if (status[r] != WSYNC_OK && status[r] != WSYNC_ERR_TIMEOUT) {
                return status[r];
            }
        }
    }
    return WSYNC_OK;
}

static wsync_status_t step_connect(pair_t *pair, uint32_t rank, uint32_t round,
                                   wsync_error_t *err)
{
    const char *addresses[2] = {wsync_comm_address(pair->comms[0]),
                                wsync_comm_address(pair->comms[1])};

    (void)round;
    return wsync_comm_connect(pair->comms[rank], addresses, SOON_MS, err);
}

static wsync_status_t step_post(pair_t *pair, uint32_t rank, uint32_t round,
                                wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_comm_acquire(pair->comms[rank], round, SOON_MS, err);

    return status == WSYNC_OK
               ? wsync_comm_post(pair->comms[rank], round, pair->streams[rank], err)
               : status;
}

static wsync_status_t step_wait(pair_t *pair, uint32_t rank, uint32_t round,
                                wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_comm_wait(pair->comms[rank], round, pair->streams[rank], SOON_MS, err);

    return status == WSYNC_OK
               ? wsync_comm_release(pair->comms[rank], round, pair->streams[rank], err)
               : status;
}

static wsync_status_t step_park(pair_t *pair, uint32_t rank, uint32_t round,
                                wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_stream_synchronize(pair->streams[rank], PATIENT_MS, err);

    (void)round;
    return status == WSYNC_OK ? wsync_comm_park(pair->comms[rank], err) : status;
}

static wsync_status_t step_begin(pair_t *pair, uint32_t rank, uint32_t round,
                                 wsync_error_t *err)
{
    (void)round;
    return wsync_comm_begin(pair->comms[rank], pair->plans[rank], err);
}

/* Two updates, with the memory given back in between. */
static wsync_status_t update_pair(pair_t *pair, wsync_error_t *err)
{
    wsync_status_t status = both(pair, 0, step_connect, err);

    for (int update = 0; update < 2 && status == WSYNC_OK; update++) {
        status = both(pair, 0, step_begin, err);
        for (uint32_t round = 0;
             round < wsync_plan_round_count(pair->plans[0]) && status == WSYNC_OK;
             round++) {
            status = both(pair, round, step_post, err);
            if (status == WSYNC_OK) {
                status = both(pair, round, step_wait, err);
            }
        }
        if (status == WSYNC_OK && update == 0) {
            status = both(pair, 0, step_park, err);
        }
    }
    for (uint32_t r = 0; r < 2 && status == WSYNC_OK; r++) {
        status = wsync_stream_synchronize(pair->streams[r], PATIENT_MS, err);
    }
    for (uint32_t r = 0; r < 2 && status == WSYNC_OK; r++) {
        status = wsync_comm_check(pair->comms[r], err);
    }
    return status;
}

static wsync_status_t live_once(void *context, wsync_error_t *err)
{
    pair_t *pair = context;
    wsync_status_t status = make_pair(pair, err);

    if (status == WSYNC_OK) {
        status = update_pair(pair, err);
    }
    for (uint32_t r = 0; r < 2; r++) {
        if (pair->comms[r] != NULL) {
            wsync_comm_close(pair->comms[r]);
        }
    }
    for (uint32_t r = 0; r < 2; r++) {
        if (pair->streams[r] != NULL) {
            CHECK(wsync_stream_abandon(pair->streams[r], PATIENT_MS));
            wsync_stream_destroy(pair->streams[r]);
        }
        wsync_comm_destroy(pair->comms[r]);
        pair->comms[r] = NULL;
        pair->streams[r] = NULL;
    }
    CHECK_EQ(nccl_census().communicators, 0);
    CHECK_EQ(nccl_census().works, 0);
    return status;
}

static void open_pair(pair_t *pair)
{
    wsync_error_t err = {0};

    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_DEVICES", "2", 1), 0);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_DELAY_US", "0", 1), 0);
    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    CHECK_EQ(setenv("WSYNC_NCCL_LIB", FAKENCCL_PATH, 1), 0);
    make_misuse();
    for (uint8_t r = 0; r < 2; r++) {
        find_gpu(r, &pair->devices[r]);
        pair->plans[r] = make_plan(r, 2, 2, 2ULL * 6 * PART * 2);
    }
    CHECK_OK(live_once(pair, &err), err); /* what is made once is there */
}

static void close_pair(pair_t *pair)
{
    for (int r = 0; r < 2; r++) {
        wsync_plan_destroy(pair->plans[r]);
    }
    check_misuse();
}

TEST(each_call_fails_in_turn)
{
    pair_t pair = {0};
    const char *call = "";
    long k = 0;

    open_pair(&pair);
    for (; call != NULL; k++) {
        const long live = atomic_load(&oom_live);
        wsync_error_t err = {0};
        wsync_status_t status;

        fail_nccl("*", k, WSYNC_NCCL_SYSTEM_ERROR);
        status = live_once(&pair, &err);
        call = failed_nccl();
        fail_nccl("*", -1, WSYNC_NCCL_SYSTEM_ERROR);
        CHECK_EQ(atomic_load(&oom_live), live);
        if (call == NULL || strcmp(call, "ncclCommAbort") == 0) {
            CHECK_OK(status, err);
        } else if (status != WSYNC_ERR_CLOSED && /* what the other rank sees of it */
                   (status != WSYNC_ERR_DEVICE || strstr(err.message, call) == NULL)) {
            FAIL("%s failing: status %d: %s", call, (int)status, err.message);
        }
    }
    CHECK(k > 30);
    (void)printf("%ld calls failed in turn\n", k - 1);
    close_pair(&pair);
}
