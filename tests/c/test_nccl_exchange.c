/* SPDX-License-Identifier: Apache-2.0
 * Ranks in processes of their own, with a GPU each of tests/fakecuda, that exchange rounds
 * by tests/fakenccl. */
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "../fakenccl/fakenccl.h"
#include "comm/nccl_library.h"
#include "comm_update.h"

enum { ROUND_MS = 60000, HURRY_MS = 500 };

/* What the ranks of a test share. */
typedef struct shared_ranks {
    atomic_int arrived;
    char addresses[MAX_RANKS][COMM_ADDRESS_NBYTES];
} shared_ranks_t;

typedef struct rank {
    shared_ranks_t *shared;
    const wsync_device_t *device;
    wsync_comm_t *comm;
    const char *addresses[MAX_RANKS];
    uint32_t rank;
    uint32_t rank_count;
    int meetings;
} rank_t;

typedef void (*rank_func_t)(rank_t *rank);

/* All ranks get here before any goes on. */
static void meet(rank_t *rank)
{
    const int64_t deadline = wsync_deadline_ms(PATIENT_MS);

    rank->meetings++;
    atomic_fetch_add(&rank->shared->arrived, 1);
    while (atomic_load(&rank->shared->arrived) < rank->meetings * (int)rank->rank_count) {
        CHECK(wsync_clock_ms() < deadline);
        (void)usleep(100);
    }
}

static void *symbol(const char *name)
{
    void *address = dlsym(dlopen(FAKENCCL_PATH, RTLD_NOW), name);

    CHECK(address != NULL);
    return address;
}

static void inject(const char *what, long k, long value)
{
    fakenccl_inject_func_t function;
    void *address = symbol(FAKENCCL_INJECT);

    memcpy(&function, &address, sizeof(function));
    function(what, k, value);
}

static fakenccl_census_t census(void)
{
    fakenccl_census_func_t function;
    fakenccl_census_t found;
    void *address = symbol(FAKENCCL_CENSUS);

    memcpy(&function, &address, sizeof(function));
    function(&found);
    return found;
}

/* The GPU that is the fake's number `rank`, which this process alone sees. */
static const wsync_device_t *own_gpu(uint32_t number)
{
    const wsync_device_t *device = NULL;
    wsync_cu_uuid_t uuid;
    wsync_error_t err = {0};
    char text[16];

    (void)snprintf(text, sizeof(text), "%u", number);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_FIRST", text, 1), 0);
    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    CHECK_EQ(setenv("WSYNC_NCCL_LIB", FAKENCCL_PATH, 1), 0);
    memset(uuid.bytes, 0xfa, sizeof(uuid.bytes));
    uuid.bytes[15] = (uint8_t)number;
    CHECK_OK(wsync_device_cuda(&uuid, "kernels", &device, &err), err);
    return device;
}

static void open_rank(rank_t *rank, uint32_t gpu, const wsync_plan_t *plan, int timeout_ms)
{
    const wsync_nccl_library_t *library = NULL;
    wsync_error_t err = {0};

    rank->device = own_gpu(gpu);
    CHECK_OK(wsync_nccl_library(NULL, 0, &library, &err), err);
    CHECK_OK(wsync_comm_create_nccl(library, rank->device, rank->rank, rank->rank_count,
                                    plan != NULL ? wsync_plan_send_nbytes(plan) : 0,
                                    plan != NULL ? wsync_plan_recv_nbytes(plan) : 0,
                                    timeout_ms, &rank->comm, &err),
             err);
    (void)snprintf(rank->shared->addresses[rank->rank], COMM_ADDRESS_NBYTES, "%s",
                   wsync_comm_address(rank->comm));
    for (uint32_t i = 0; i < rank->rank_count; i++) {
        rank->addresses[i] = rank->shared->addresses[i];
    }
    meet(rank);
}

/* What the fakes refuse is written to a file, which has to stay empty. */
static void make_misuse(void)
{
    char path[] = "/tmp/wsync-nccl.XXXXXX";
    const int fd = mkstemp(path);

    CHECK(fd >= 0);
    (void)close(fd);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_MISUSE", path, 1), 0);
}

static void check_misuse(void)
{
    const char *path = getenv("WSYNC_FAKE_CUDA_MISUSE");
    char text[512];
    FILE *file = fopen(path, "rb");
    size_t nbytes;

    CHECK(file != NULL);
    nbytes = fread(text, 1, sizeof(text) - 1, file);
    text[nbytes] = '\0';
    (void)fclose(file);
    CHECK_STR(text, "");
    CHECK_EQ(unlink(path), 0);
}

/* Runs a function as every rank; `killed` (-1: none) dies of SIGKILL. */
static void run_ranks(uint32_t rank_count, int killed, rank_func_t main_func)
{
    pid_t pids[MAX_RANKS];
    shared_ranks_t *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(shared != MAP_FAILED);
    make_misuse();
    for (uint32_t i = 0; i < rank_count; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            rank_t rank = {.shared = shared, .rank = i, .rank_count = rank_count};

            main_func(&rank);
            _exit(0);
        }
    }
    for (uint32_t i = 0; i < rank_count; i++) {
        int status = 0;

        CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
        if ((int)i == killed) {
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            FAIL("rank %u ended with %#x", i, (unsigned)status);
        }
    }
    check_misuse();
    (void)munmap(shared, sizeof(*shared));
}

/* --- updates ----------------------------------------------------------------------------
 */

static void update(rank_t *rank, uint32_t worker_count)
{
    static member_t member;
    const uint64_t round_nbytes = 2ULL * 2 * PART * rank->rank_count;
    wsync_plan_t *plan =
        make_plan(rank->rank, rank->rank_count, worker_count, round_nbytes);

    open_rank(rank, rank->rank, plan, ROUND_MS);
    wsync_plan_destroy(plan);
    member = (member_t){.device = rank->device,
                        .rank = rank->rank,
                        .rank_count = rank->rank_count,
                        .worker_count = worker_count,
                        .round_nbytes = round_nbytes};
    run_updates(&member, rank->comm, rank->addresses);
    CHECK_EQ(census().communicators, 0);
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
    run_ranks(3, -1, serve_all);
}

TEST(two_ranks_serve_a_worker_each)
{
    run_ranks(2, -1, serve_all);
}

TEST(some_ranks_only_send)
{
    run_ranks(3, -1, serve_one);
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
    CHECK_EQ(census().communicators, 0);
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
    CHECK_EQ(census().communicators, 0);
    CHECK_EQ(census().works, 0);
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
    CHECK_HAS(err.message, rank->rank == 0 ? " 1 " : " 0 ");
    wsync_plan_destroy(plan);
}

TEST(a_round_that_does_not_move_names_the_ranks)
{
    run_ranks(2, -1, hang);
}

static void fail(rank_t *rank)
{
    wsync_error_t err = {0};
    wsync_plan_t *plan = connect_rank(rank, HURRY_MS);

    if (rank->rank == 1) {
        inject("error", 3, WSYNC_NCCL_REMOTE_ERROR);
    }
    CHECK_EQ(run_until_failure(rank, plan, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "round ");
    wsync_plan_destroy(plan);
}

TEST(an_asynchronous_error_ends_the_exchange)
{
    run_ranks(2, -1, fail);
}

static void die(rank_t *rank)
{
    wsync_error_t err = {0};
    wsync_plan_t *plan = connect_rank(rank, HURRY_MS);

    if (rank->rank == 1) {
        inject("die", 3, 0);
    }
    CHECK_EQ(run_until_failure(rank, plan, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "round ");
    wsync_plan_destroy(plan);
}

TEST(a_rank_that_dies_ends_the_exchange)
{
    run_ranks(2, 1, die);
}
