/* SPDX-License-Identifier: Apache-2.0
 * GPU memory and events on tests/fakecuda: what is made, shared, refused and given back. */
#include <fcntl.h>
#include <sys/mman.h>

#include "cuda_fixture.h"

enum { NBYTES = 100001, CONTROL_NBYTES = 4096 };

static wsync_memory_t *make_control(const wsync_cuda_device_t *device)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_create(&device->base, CONTROL_NBYTES, &memory, &err), err);
    return memory;
}

TEST(gpus_say_what_they_are)
{
    const wsync_cuda_device_t *device;
    const wsync_cuda_device_t *other = NULL;
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    device = open_device(0);
    CHECK_STR(device->info.name, "Fake GPU 0");
    CHECK(device == open_device(0));
    CHECK(device->granularity > 0 && device->processors > 0);
    CHECK_EQ(open_device(1)->info.uuid.bytes[15], 1);
    CHECK_EQ(wsync_cuda_device(2, &other, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "GPU 2 does not exist in this process: it sees 2 GPUs");
    CHECK_EQ(wsync_cuda_device(-1, &other, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK(other == NULL);
}

TEST(created_memory_is_zeroed_and_has_its_size)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);

    CHECK_EQ(memory->nbytes, NBYTES);
    for (size_t i = 0; i < NBYTES; i++) {
        CHECK_EQ(bytes_of(memory)[i], 0);
    }
    CHECK((fcntl(memory->fd, F_GETFD) & FD_CLOEXEC) != 0);
    wsync_memory_retain(memory);
    wsync_memory_destroy(memory);
    bytes_of(memory)[0] = 1;
    wsync_memory_destroy(memory);
    wsync_memory_destroy(NULL);
    check_clean();
}

TEST(sizes_that_cannot_be_are_refused)
{
    const wsync_cuda_device_t *device;
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_MEMORY", "6291456");
    device = open_device(0);
    CHECK_EQ(wsync_memory_create(&device->base, 0, &memory, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_memory_create(&device->base, UINT64_MAX, &memory, &err),
             WSYNC_ERR_NO_MEMORY);
    CHECK_EQ(wsync_memory_create(&device->base, 7000000, &memory, &err),
             WSYNC_ERR_NO_MEMORY);
    CHECK_HAS(err.message,
              "cannot make GPU memory of 8388608 bytes: 6291456 of 6291456 bytes of GPU 0 "
              "(Fake GPU 0) are free");
    CHECK_EQ(wsync_control_create(&device->base, 0, &memory, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_control_create(&device->base, 1ULL << 40, &memory, &err),
             WSYNC_ERR_INVALID);
    CHECK(memory == NULL);
    check_clean();
}

static void import_main(int socket)
{
    const wsync_cuda_device_t *device = open_device(0);
    const int fd = hear_fd(socket);
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_import(&device->base, fd, NBYTES, &memory, &err), err);
    (void)close(fd);
    CHECK_EQ(bytes_of(memory)[NBYTES - 1], 42);
    bytes_of(memory)[0] = 7;
    nudge(socket);
    await_nudge(socket); /* the exporter has destroyed its own */
    CHECK_EQ(bytes_of(memory)[0], 8);
    wsync_memory_destroy(memory);
    check_clean();
}

TEST(an_import_sees_what_the_peer_writes_and_survives_it)
{
    const peer_t peer = peer_start(import_main);
    const wsync_cuda_device_t *device = open_device(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);

    bytes_of(memory)[NBYTES - 1] = 42;
    say_fd(peer.socket, memory->fd);
    await_nudge(peer.socket);
    CHECK_EQ(bytes_of(memory)[0], 7);
    bytes_of(memory)[0] = 8;
    wsync_memory_destroy(memory);
    check_clean();
    nudge(peer.socket);
    peer_end(peer);
}

TEST(events_are_words_of_control_memory)
{
    const wsync_cuda_device_t *device = open_device(0);
    wsync_memory_t *memory = make_memory(device, NBYTES);
    wsync_memory_t *control = make_control(device);
    const uint64_t offsets[] = {4, CONTROL_NBYTES - 4, CONTROL_NBYTES, UINT64_MAX - 7};
    const wsync_event_t event = {control, 128};
    wsync_error_t err = {0};

    CHECK_EQ(wsync_event_check((wsync_event_t){memory, 0}, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "events are words of control memory");
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        CHECK_EQ(wsync_event_wait((wsync_event_t){control, offsets[i]}, 1, 0, &err),
                 WSYNC_ERR_INVALID);
        CHECK_HAS(err.message, "4096 bytes");
    }
    CHECK_EQ(wsync_memory_park(control, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_EQ(wsync_event_query(event), 0);
    CHECK_EQ(wsync_event_wait(event, 1, 10, &err), WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "offset 128 is 0; the wait was for 1");
    wsync_event_set(event, 3);
    wsync_event_set(event, 2);
    CHECK_OK(wsync_event_wait(event, 3, 0, &err), err);
    wsync_memory_destroy(control);
    wsync_memory_destroy(memory);
    check_clean();
}

TEST(a_gpu_that_lacks_what_wsync_needs_is_named)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_LACKS", "100,103");
    CHECK_EQ(wsync_cuda_device(0, &device, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message,
              "GPU 0 (Fake GPU 0) has no memory that is exported as descriptors");
}

TEST(a_gpu_that_does_not_open_may_be_asked_again)
{
    const wsync_cuda_device_t *device = NULL;
    const wsync_cuda_driver_t *cu = load_driver();
    long k = 0;

    (void)cu;
    for (;; k++) {
        wsync_error_t err = {0};
        wsync_status_t status;

        fake_fail("*", k, WSYNC_CU_UNKNOWN);
        status = wsync_cuda_device(0, &device, &err);
        if (fake_failed() == NULL) {
            CHECK_OK(status, err);
            break;
        }
        CHECK_EQ(status, WSYNC_ERR_DEVICE);
        CHECK(device == NULL);
        CHECK_STR(err.origin, fake_failed());
    }
    CHECK(k > 8);
    fake_fail("*", -1, 0);
}
