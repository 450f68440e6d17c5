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

TEST(created_memory_is_zeroed_and_cannot_be_parked)
{
    const wsync_cuda_device_t *device = open_legacy(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);
    wsync_error_t err = {0};

    CHECK_EQ(memory->nbytes, NBYTES);
    for (size_t i = 0; i < NBYTES; i++) {
        CHECK_EQ(bytes_of(memory)[i], 0);
    }
    CHECK((fcntl(memory->fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQ(wsync_memory_park(memory, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "Fake GPU 0) cannot be parked: it has no virtual memory");
    bytes_of(memory)[0] = 1;
    CHECK_EQ(wsync_memory_unpark(memory, -1, &err), WSYNC_ERR_STATE);
    CHECK(memory->fd >= 0);
    wsync_memory_destroy(memory);
    check_clean();
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

static void die_main(int socket)
{
    (void)hear_memory(socket);
    nudge(socket);
    (void)pause();
}

TEST(an_importer_that_is_killed_holds_nothing)
{
    const peer_t peer = peer_start(die_main);
    const wsync_cuda_device_t *device = open_legacy(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);

    say_fd(peer.socket, memory->fd);
    await_nudge(peer.socket);
    CHECK_EQ(kill(peer.pid, SIGKILL), 0);
    CHECK_EQ(waitpid(peer.pid, NULL, 0), peer.pid);
    wsync_memory_destroy(memory);
    check_clean();
}

/* --- sessions ---------------------------------------------------------------------------
 */

static const wsync_device_t *open_ops(void)
{
    const wsync_device_t *base = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_device_cuda(&open_legacy(0)->info.uuid, "kernels", &base, &err), err);
    return base;
}

static void work_main(int socket)
{
    const wsync_device_t *base = open_ops();
    const wsync_receipt_t receipt = {0};
    char path[WSYNC_PATH_NBYTES];
    uint8_t token[WSYNC_TOKEN_NBYTES];
    wsync_importer_t *importer = NULL;
    wsync_error_t err = {0};

    hear(socket, path, sizeof(path));
    hear(socket, token, sizeof(token));
    CHECK_OK(wsync_importer_create(base, path, token, NULL, 0, PATIENT_MS, &importer, &err),
             err);
    for (int i = 0; i < UPDATES; i++) {
        uint64_t update = 0;
        uint32_t count = 0;

        CHECK_OK(wsync_importer_begin(importer, PATIENT_MS, &update, &count, &err), err);
        for (uint32_t round = 0; round < count; round++) {
            const unsigned char *ring;

            CHECK_OK(wsync_importer_take(importer, round, NULL, PATIENT_MS, &err), err);
            ring = bytes_of(wsync_importer_ring(importer));
            CHECK_EQ(ring[NBYTES - 1], update * 16 + round);
            CHECK_OK(wsync_importer_done(importer, round, NULL, PATIENT_MS, &err), err);
        }
        CHECK_OK(wsync_importer_prepared(importer, &receipt, PATIENT_MS, &err), err);
        CHECK_OK(wsync_importer_verdict(importer, PATIENT_MS, &err), err);
    }
    wsync_importer_destroy(importer);
    check_clean();
}

TEST(sessions_keep_a_ring_that_cannot_be_parked)
{
    const peer_t peer = peer_start(work_main);
    const wsync_device_t *base = open_ops();
    wsync_exporter_t *exporter = NULL;
    wsync_memory_t *ring = NULL;
    wsync_stream_t *stream = NULL;
    wsync_receipt_t receipt;
    wsync_error_t err = {0};
    uint8_t *blob = NULL;
    size_t nbytes = 0;
    char path[WSYNC_PATH_NBYTES] = "";

    CHECK_OK(wsync_exporter_create(NULL, &exporter, &err), err);
    CHECK_OK(wsync_memory_create(base, NBYTES, &ring, &err), err);
    CHECK_OK(wsync_stream_create(base, 1, &stream, &err), err);
    (void)snprintf(path, sizeof(path), "%s", wsync_exporter_path(exporter));
    say(peer.socket, path, sizeof(path));
    say(peer.socket, wsync_exporter_token(exporter), WSYNC_TOKEN_NBYTES);
    CHECK_OK(wsync_exporter_accept(exporter, PATIENT_MS, &blob, &nbytes, &err), err);
    free(blob);
    CHECK_OK(wsync_exporter_attach(exporter, ring, NULL, 0, PATIENT_MS, &err), err);
    for (uint64_t update = 0; update < UPDATES; update++) {
        CHECK_OK(wsync_exporter_begin(exporter, update, ROUNDS, PATIENT_MS, &err), err);
        for (uint32_t round = 0; round < ROUNDS; round++) {
            CHECK_OK(wsync_exporter_acquire(exporter, (int64_t)round - 1, NULL, PATIENT_MS,
                                            &err),
                     err);
            bytes_of(ring)[NBYTES - 1] = (unsigned char)(update * 16 + round);
            CHECK_OK(wsync_exporter_post(exporter, round, stream, PATIENT_MS, &err), err);
        }
        CHECK_OK(wsync_exporter_prepared(exporter, PATIENT_MS, &receipt, &err), err);
        CHECK_OK(wsync_exporter_commit(exporter, true, PATIENT_MS, &err), err);
        CHECK_EQ(wsync_exporter_park(exporter, PATIENT_MS, &err), WSYNC_ERR_REFUSED);
        CHECK_HAS(err.message,
                  "the worker keeps the ring: memory of GPU 0 (Fake GPU 0) "
                  "cannot be parked");
    }
    wsync_exporter_destroy(exporter);
    wsync_stream_destroy(stream);
    peer_end(peer);
    wsync_memory_destroy(ring);
    check_clean();
}
