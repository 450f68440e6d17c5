/* SPDX-License-Identifier: Apache-2.0
 * Memory and sessions on GPUs that cannot export memory as descriptors, on tests/fakecuda.
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "cuda_fixture.h"
#include "device/cuda_handle_memfd.h"
#include "ipc/session.h"

enum { NBYTES = 100001, ROUNDS = 3, UPDATES = 3 };

static const wsync_cuda_device_t *open_legacy(int ordinal)
{
    const wsync_cuda_device_t *device;

    choose_fake("WSYNC_FAKE_CUDA_NO_VMM", "1");
    device = open_device(ordinal);
    CHECK(!device->vmm);
    return device;
}

static wsync_memory_t *hear_memory(int socket)
{
    const int fd = hear_fd(socket);
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_import(&open_legacy(0)->base, fd, NBYTES, &memory, &err), err);
    (void)close(fd);
    return memory;
}

static void import_main(int socket)
{
    wsync_memory_t *memory = hear_memory(socket);

    CHECK_EQ(bytes_of(memory)[NBYTES - 1], 42);
    bytes_of(memory)[0] = 7;
    nudge(socket);
    await_nudge(socket); /* the exporter has let go of its own */
    CHECK_EQ(bytes_of(memory)[0], 8);
    wsync_memory_destroy(memory);
    check_clean();
    nudge(socket);
    await_nudge(socket);
}

/* The driver leaves undefined what a peer sees of memory that is freed under it. */
TEST(memory_is_freed_when_no_peer_has_it_open)
{
    const peer_t peer = peer_start(import_main);
    const wsync_cuda_device_t *device = open_legacy(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);

    bytes_of(memory)[NBYTES - 1] = 42;
    say_fd(peer.socket, memory->fd);
    await_nudge(peer.socket);
    CHECK_EQ(bytes_of(memory)[0], 7);
    bytes_of(memory)[0] = 8;
    wsync_memory_destroy(memory);
    CHECK_EQ(fake_census().allocated, 1);
    memory = make_memory(device, NBYTES);
    CHECK_EQ(fake_census().allocated, 2);
    nudge(peer.socket);
    await_nudge(peer.socket); /* it has closed it */
    wsync_memory_destroy(memory);
    check_clean();
    nudge(peer.socket);
    peer_end(peer);
}

static void export_main(int socket)
{
    wsync_memory_t *memory = make_memory(open_legacy(0), NBYTES);

    bytes_of(memory)[1] = 9;
    say_fd(socket, memory->fd);
    (void)pause();
}

TEST(an_exporter_that_is_killed_leaves_what_can_be_closed)
{
    const peer_t peer = peer_start(export_main);
    wsync_memory_t *memory = hear_memory(peer.socket);

    CHECK_EQ(bytes_of(memory)[1], 9);
    CHECK_EQ(kill(peer.pid, SIGKILL), 0);
    CHECK_EQ(waitpid(peer.pid, NULL, 0), peer.pid);
    wsync_memory_destroy(memory);
    check_clean();
}

/* --- sessions ---------------------------------------------------------------------------
 */
