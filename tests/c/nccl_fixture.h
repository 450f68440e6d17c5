/* SPDX-License-Identifier: Apache-2.0
 * Ranks in processes of their own, on tests/fakenccl and GPUs of tests/fakecuda. */
#ifndef WSYNC_TESTS_NCCL_FIXTURE_H
#define WSYNC_TESTS_NCCL_FIXTURE_H

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "comm/nccl_library.h"
#include "cuda_fixture.h"
#include "device/deadline.h"
#include "fakenccl_calls.h"

enum { MAX_TEST_RANKS = 4, NCCL_MEMORY_NBYTES = 1 << 20, MISUSE_NBYTES = 8192 };

/* What the processes of a test share. */
typedef struct nccl_shared {
    atomic_bool identified;
    wsync_nccl_id_t id;
    atomic_int arrived;
} nccl_shared_t;

typedef struct nccl_rank {
    const wsync_cuda_driver_t *cu;
    const wsync_nccl_library_t *nccl;
    nccl_shared_t *shared;
    int rank;
    int rank_count;
    int meetings;
    wsync_nccl_comm_t comm;
    wsync_cu_stream_t stream;
    unsigned char *memory; /* of the device */
} nccl_rank_t;

typedef void (*nccl_rank_func_t)(nccl_rank_t *rank);

#define NCCL(call) CHECK_EQ(call, WSYNC_NCCL_SUCCESS)

/* Waits for a condition, which must come true. */
#define AWAIT(condition)                                          \
    do {                                                          \
        const uint64_t deadline_ = wsync_deadline_ns(PATIENT_MS); \
        while (!(condition)) {                                    \
            if (wsync_clock_ns() > deadline_) {                   \
                FAIL("AWAIT(%s): it does not come", #condition);  \
            }                                                     \
            (void)usleep(100);                                    \
        }                                                         \
    } while (0)

/* All ranks get here before any goes on. */
static inline void meet(nccl_rank_t *rank)
{
    rank->meetings++;
    atomic_fetch_add(&rank->shared->arrived, 1);
    AWAIT(atomic_load(&rank->shared->arrived) >= rank->meetings * rank->rank_count);
}

/* A GPU of its own for this process, unless the test has said which. */
static inline const wsync_nccl_library_t *load_nccl(int number)
{
    const wsync_nccl_library_t *nccl = NULL;
    wsync_error_t err = {0};
    char text[16];

    (void)snprintf(text, sizeof(text), "%d", number);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_FIRST", text, 0), 0);
    CHECK_EQ(setenv("WSYNC_NCCL_LIB", FAKENCCL_PATH, 0), 0);
    CHECK_OK(wsync_nccl_library(NULL, 0, &nccl, &err), err);
    return nccl;
}

static inline void rank_open(nccl_rank_t *rank)
{
    wsync_cu_ptr_t at = 0;

    rank->nccl = load_nccl(rank->rank);
    rank->cu = enter_device(0);
    CU(rank->cu->stream_create(&rank->stream, WSYNC_CU_STREAM_NON_BLOCKING));
    CU(rank->cu->mem_alloc(&at, NCCL_MEMORY_NBYTES));
    rank->memory = (unsigned char *)(uintptr_t)at;
    memset(reach(rank->memory), 0xee, NCCL_MEMORY_NBYTES);
}

/* The result that a communicator settles on, or that of a call which fails. */
static inline int settle(const nccl_rank_t *rank)
{
    int failed = WSYNC_NCCL_SUCCESS;
    int result = WSYNC_NCCL_IN_PROGRESS;

    AWAIT((failed = rank->nccl->comm_get_async_error(rank->comm, &result)) !=
              WSYNC_NCCL_SUCCESS ||
          result != WSYNC_NCCL_IN_PROGRESS);
    return failed != WSYNC_NCCL_SUCCESS ? failed : result;
}

/* Begins to join; rank 0 makes the id. */
static inline void rank_join(nccl_rank_t *rank)
{
    wsync_nccl_config_t config = WSYNC_NCCL_CONFIG_INIT;

    if (rank->rank == 0) {
        NCCL(rank->nccl->get_unique_id(&rank->shared->id));
        atomic_store(&rank->shared->identified, true);
    }
    AWAIT(atomic_load(&rank->shared->identified));
    CHECK_EQ(rank->nccl->comm_init(&rank->comm, rank->rank_count, rank->shared->id,
                                   rank->rank, &config),
             WSYNC_NCCL_IN_PROGRESS);
}

/* Ends a group of a communicator that does not block. */
static inline void end_group(const nccl_rank_t *rank)
{
    const int result = rank->nccl->group_end();

    CHECK(result == WSYNC_NCCL_SUCCESS || result == WSYNC_NCCL_IN_PROGRESS);
    NCCL(settle(rank));
}

static inline int begin_send(const nccl_rank_t *rank, size_t offset, size_t nbytes,
                             int peer)
{
    return rank->nccl->send(rank->memory + offset, nbytes, WSYNC_NCCL_UINT8, peer,
                            rank->comm, rank->stream);
}

static inline int begin_recv(const nccl_rank_t *rank, size_t offset, size_t nbytes,
                             int peer)
{
    return rank->nccl->recv(rank->memory + offset, nbytes, WSYNC_NCCL_UINT8, peer,
                            rank->comm, rank->stream);
}

static inline void rank_send(const nccl_rank_t *rank, size_t offset, size_t nbytes,
                             int peer)
{
    NCCL(begin_send(rank, offset, nbytes, peer));
}

static inline void rank_recv(const nccl_rank_t *rank, size_t offset, size_t nbytes,
                             int peer)
{
    NCCL(begin_recv(rank, offset, nbytes, peer));
}

static inline void drain(const nccl_rank_t *rank)
{
    AWAIT(rank->cu->stream_query(rank->stream) == WSYNC_CU_SUCCESS);
}

/* Aborts, and looks that nothing is left. */
static inline void rank_close(nccl_rank_t *rank)
{
    fakenccl_census_t census;

    NCCL(rank->nccl->comm_abort(rank->comm));
    drain(rank);
    AWAIT(nccl_census().works == 0);
    census = nccl_census();
    CHECK_EQ(census.communicators, 0);
    CU(rank->cu->stream_destroy(rank->stream));
    CU(rank->cu->mem_free((wsync_cu_ptr_t)(uintptr_t)rank->memory));
}

/* --- the log of misuse ------------------------------------------------------------------
 */

static inline void make_misuse(void)
{
    char path[] = "/tmp/wsync-nccl.XXXXXX";
    const int fd = mkstemp(path);

    CHECK(fd >= 0);
    (void)close(fd);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_MISUSE", path, 1), 0);
}

static inline const char *read_misuse(void)
{
    static char text[MISUSE_NBYTES];
    FILE *file = fopen(getenv("WSYNC_FAKE_CUDA_MISUSE"), "rb");
    size_t nbytes;

    CHECK(file != NULL);
    nbytes = fread(text, 1, sizeof(text) - 1, file);
    (void)fclose(file);
    text[nbytes] = '\0';
    return text;
}

/* The log says this, which is then forgotten. */
static inline void check_misuse(const char *words)
{
    AWAIT(strstr(read_misuse(), words) != NULL);
    CHECK_EQ(truncate(getenv("WSYNC_FAKE_CUDA_MISUSE"), 0), 0);
}

/* Runs a function as every rank. */
static inline void run_ranks(int rank_count, nccl_rank_func_t main_func)
{
    pid_t pids[MAX_TEST_RANKS];
    nccl_shared_t *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(shared != MAP_FAILED);
    make_misuse();
    for (int i = 0; i < rank_count; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            nccl_rank_t rank = {.shared = shared, .rank = i, .rank_count = rank_count};

            CHECK_EQ(prctl(PR_SET_PDEATHSIG, SIGKILL), 0); /* one may hang */
            main_func(&rank);
            _exit(0);
        }
    }
    for (int i = 0; i < rank_count; i++) {
        int status = 0;

        CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            FAIL("rank %d ended with %#x; misuse:\n%s", i, (unsigned)status, read_misuse());
        }
    }
    CHECK_STR(read_misuse(), "");
    CHECK_EQ(unlink(getenv("WSYNC_FAKE_CUDA_MISUSE")), 0);
    (void)munmap(shared, sizeof(*shared));
}

/* With a communicator that is ready. */
static inline void rank_start(nccl_rank_t *rank)
{
    rank_open(rank);
    rank_join(rank);
    NCCL(settle(rank));
}

#endif
