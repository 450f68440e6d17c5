/* SPDX-License-Identifier: Apache-2.0
 * Ranks in processes of their own, with a GPU each of tests/fakecuda, that exchange rounds
 * by tests/fakenccl. */
#ifndef WSYNC_TESTS_NCCL_RANKS_H
#define WSYNC_TESTS_NCCL_RANKS_H

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "comm/nccl_library.h"
#include "comm_update.h"
#include "fakenccl_calls.h"

/* What the ranks of a test share. */
typedef struct shared_ranks {
    atomic_int arrived;
    char addresses[MAX_RANKS][WSYNC_COMM_ADDRESS_NBYTES];
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
static inline void meet(rank_t *rank)
{
    const int64_t deadline = wsync_deadline_ms(PATIENT_MS);

    rank->meetings++;
    atomic_fetch_add(&rank->shared->arrived, 1);
    while (atomic_load(&rank->shared->arrived) < rank->meetings * (int)rank->rank_count) {
        CHECK(wsync_clock_ms() < deadline);
        (void)usleep(100);
    }
}

/* The GPU that is the fake's number `rank`, which this process alone sees. */
static inline const wsync_device_t *own_gpu(uint32_t number)
{
    const wsync_device_t *device = NULL;
    wsync_cu_uuid_t uuid;
    wsync_error_t err = {0};
    char text[16];

    (void)snprintf(text, sizeof(text), "%u", number);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_FIRST", text, 1), 0);
    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    CHECK_EQ(setenv("WSYNC_NCCL_LIB", FAKENCCL_PATH, 0), 0);
    memset(uuid.bytes, 0xfa, sizeof(uuid.bytes));
    uuid.bytes[15] = (uint8_t)number;
    CHECK_OK(wsync_device_cuda(&uuid, "kernels", &device, &err), err);
    return device;
}

static inline void open_rank(rank_t *rank, uint32_t gpu, const wsync_plan_t *plan,
                             int timeout_ms)
{
    const wsync_nccl_library_t *library = NULL;
    char address[WSYNC_COMM_ADDRESS_NBYTES];
    wsync_error_t err = {0};

    rank->device = own_gpu(gpu);
    CHECK_OK(wsync_nccl_library(NULL, 0, &library, &err), err);
    CHECK_OK(wsync_comm_create_nccl(library, rank->device, rank->rank, rank->rank_count,
                                    plan != NULL ? wsync_plan_send_nbytes(plan) : 0,
                                    plan != NULL ? wsync_plan_recv_nbytes(plan) : 0,
                                    timeout_ms, &rank->comm, &err),
             err);
    (void)snprintf(rank->shared->addresses[rank->rank], WSYNC_COMM_ADDRESS_NBYTES, "%s",
                   wsync_comm_address(rank->comm));
    wsync_comm_nccl_address(library, rank->device, address);
    CHECK((strcmp(address, wsync_comm_address(rank->comm)) == 0) == (rank->rank != 0));
    for (uint32_t i = 0; i < rank->rank_count; i++) {
        rank->addresses[i] = rank->shared->addresses[i];
    }
    meet(rank);
}

/* What the fakes refuse is written to a file, which has to stay empty. */
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
    static char text[4096];
    FILE *file = fopen(getenv("WSYNC_FAKE_CUDA_MISUSE"), "rb");
    size_t nbytes;

    CHECK(file != NULL);
    nbytes = fread(text, 1, sizeof(text) - 1, file);
    text[nbytes] = '\0';
    (void)fclose(file);
    return text;
}

/* The file says this, which is then forgotten. */
static inline void forget_misuse(const char *words)
{
    CHECK_HAS(read_misuse(), words);
    CHECK_EQ(truncate(getenv("WSYNC_FAKE_CUDA_MISUSE"), 0), 0);
}

static inline void check_misuse(void)
{
    CHECK_STR(read_misuse(), "");
    CHECK_EQ(unlink(getenv("WSYNC_FAKE_CUDA_MISUSE")), 0);
}

/* Runs a function as every rank; `killed` (-1: none) dies of SIGKILL. */
static inline void run_ranks(uint32_t rank_count, int killed, rank_func_t main_func)
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

#endif
