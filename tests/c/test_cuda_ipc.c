/* SPDX-License-Identifier: Apache-2.0
 * Memory for engines without wsync, on tests/fakecuda: what is allocated, opened by another
 * process, refused and given back. */
#include "cuda_fixture.h"
#include "device/cuda_ipc.h"

enum { NBYTES = 100001, GRAIN = 2 << 20 };

static wsync_cuda_ipc_t *make(const wsync_cuda_device_t *device)
{
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_ipc_create(device, NBYTES, &memory, &err), err);
    CHECK_EQ(memory->nbytes, GRAIN);
    return memory;
}

static unsigned char *data_of(const wsync_cuda_ipc_t *memory)
{
    return reach((const void *)(uintptr_t)memory->at);
}

static void check_refused(const wsync_cuda_device_t *device, const wsync_cu_ipc_t *handle,
                          wsync_status_t status, const char *part)
{
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_cuda_ipc_open(device, handle, &memory, &err), status);
    CHECK_EQ(wsync_cuda_ipc_open(device, handle, &memory, NULL), status);
    CHECK(memory == NULL);
    CHECK_HAS(err.message, part);
}

TEST(sizes_that_cannot_be_are_refused)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_cuda_ipc_create(device, 0, &memory, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_cuda_ipc_create(device, UINT64_MAX, &memory, &err), WSYNC_ERR_NO_MEMORY);
    CHECK_EQ(wsync_cuda_ipc_create(device, 1ULL << 40, &memory, &err), WSYNC_ERR_NO_MEMORY);
    CHECK_HAS(err.message, "1099511627776 bytes of GPU 0 (Fake GPU 0)");
    CHECK(memory == NULL);
    wsync_cuda_ipc_destroy(NULL);
    check_clean();
}

static void reader_main(int socket)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cu_ipc_t handle;
    wsync_cuda_ipc_t *memory = NULL;
    wsync_cuda_ipc_t *again = NULL;
    wsync_error_t err = {0};

    hear(socket, &handle, sizeof(handle));
    CHECK_OK(wsync_cuda_ipc_open(device, &handle, &memory, &err), err);
    CHECK_OK(wsync_cuda_ipc_open(device, &handle, &again, &err), err);
    CHECK_EQ(memory->at, again->at); /* mapped once */
    CHECK_EQ(memory->nbytes, GRAIN);
    CHECK_EQ(data_of(memory)[NBYTES - 1], 42);
    wsync_cuda_ipc_destroy(memory);
    CHECK_EQ(data_of(again)[NBYTES - 1], 42);
    nudge(socket);
    await_nudge(socket);
    wsync_cuda_ipc_destroy(again);
    check_clean();
    nudge(socket);
    await_nudge(socket); /* it has been freed */
    check_refused(device, &handle, WSYNC_ERR_CLOSED, "its owner has ended, has freed it");
    memset(&handle, 0x5a, sizeof(handle));
    check_refused(device, &handle, WSYNC_ERR_CLOSED,
                  "no such memory on GPU 0 (Fake GPU 0)");
    check_clean();
}

TEST(another_process_opens_a_handle)
{
    const peer_t peer = peer_start(reader_main);
    wsync_cuda_ipc_t *memory = make(open_device(0));

    data_of(memory)[NBYTES - 1] = 42;
    say(peer.socket, &memory->handle, sizeof(memory->handle));
    await_nudge(peer.socket);
    nudge(peer.socket);
    await_nudge(peer.socket);
    wsync_cuda_ipc_destroy(memory);
    check_clean();
    nudge(peer.socket);
    peer_end(peer);
}

static void owner_main(int socket)
{
    const wsync_cuda_ipc_t *memory = make(open_device(0));

    data_of(memory)[7] = 9;
    say(socket, &memory->handle, sizeof(memory->handle));
    await_nudge(socket); /* and ends with it */
}

TEST(an_owner_that_ends_leaves_its_reader_able_to_close)
{
    const peer_t peer = peer_start(owner_main);
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cu_ipc_t handle;
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};

    hear(peer.socket, &handle, sizeof(handle));
    CHECK_OK(wsync_cuda_ipc_open(device, &handle, &memory, &err), err);
    CHECK_EQ(data_of(memory)[7], 9);
    nudge(peer.socket);
    peer_end(peer);
    wsync_cuda_ipc_destroy(memory);
    check_clean();
    check_refused(device, &handle, WSYNC_ERR_CLOSED, "its owner has ended");
}

static void keeper_main(int socket)
{
    wsync_cu_ipc_t handle;
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};

    hear(socket, &handle, sizeof(handle));
    CHECK_OK(wsync_cuda_ipc_open(open_device(0), &handle, &memory, &err), err);
    nudge(socket);
    await_nudge(socket); /* it is killed before */
}

/* Its parent may be another process, and slow. */
TEST(a_reader_that_was_killed_and_not_waited_for_has_nothing_open)
{
    const peer_t peer = peer_start(keeper_main);
    wsync_cuda_ipc_t *memory = make(open_device(0));
    siginfo_t info;

    say(peer.socket, &memory->handle, sizeof(memory->handle));
    await_nudge(peer.socket);
    CHECK_EQ(kill(peer.pid, SIGKILL), 0);
    CHECK_EQ(waitid(P_PID, (id_t)peer.pid, &info, WEXITED | WNOWAIT), 0);
    wsync_cuda_ipc_destroy(memory);
    check_clean();
    CHECK_EQ(waitpid(peer.pid, NULL, 0), peer.pid);
    (void)close(peer.socket);
}

TEST(the_owner_cannot_open_its_own)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cuda_ipc_t *memory = make(device);

    check_refused(device, &memory->handle, WSYNC_ERR_STATE, "this process has made it");
    wsync_cuda_ipc_destroy(memory);
    check_clean();
}

TEST(a_fork_takes_nothing_away)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_cuda_ipc_t *memory = make(device);
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        wsync_cuda_ipc_t *mine = NULL;
        wsync_error_t err = {0};

        CHECK_EQ(wsync_cuda_ipc_create(device, NBYTES, &mine, &err), WSYNC_ERR_STATE);
        CHECK_EQ(wsync_cuda_ipc_open(device, &memory->handle, &mine, &err),
                 WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "fork");
        wsync_cuda_ipc_destroy(memory);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    data_of(memory)[0] = 1;
    wsync_cuda_ipc_destroy(memory);
    check_clean();
}
