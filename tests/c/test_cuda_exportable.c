/* SPDX-License-Identifier: Apache-2.0
 * GPU memory without a record on tests/fakecuda: what torch's allocator is given. */
#include <dirent.h>
#include <pthread.h>

#include "cuda_fixture.h"

enum { GRANULE = 2 << 20, NBYTES = GRANULE + 1, BUSY_MS = 30 };

static wsync_cu_ptr_t take(const wsync_cuda_device_t *device, uint64_t nbytes)
{
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_take(device, nbytes, &at, &err), err);
    CHECK(at != 0 && at % device->granularity == 0);
    return at;
}

static unsigned char *bytes_at(wsync_cu_ptr_t at)
{
    return reach((void *)(uintptr_t)at);
}

/* How many descriptors this process has, and *physical: the one that the driver keeps for
 * the only memory there is, which stands for it in every process. */
static long count_fds(int *physical)
{
    DIR *folder = opendir("/proc/self/fd");
    long count = 0;

    CHECK(folder != NULL);
    *physical = -1;
    for (const struct dirent *entry = readdir(folder); entry != NULL;
         entry = readdir(folder)) {
        char target[128] = "";

        (void)readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
        if (strncmp(target, "/memfd:fakecuda-physical", 24) == 0) {
            CHECK_EQ(*physical, -1);
            *physical = (int)strtol(entry->d_name, NULL, 10);
        }
        count++;
    }
    (void)closedir(folder);
    return count;
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
    nudge(socket);
    await_nudge(socket); /* it has been given back there */
    CHECK_EQ(bytes_of(memory)[NBYTES - 1], 43);
    wsync_memory_destroy(memory);
    check_clean();
}

TEST(another_process_maps_it_and_keeps_it)
{
    const peer_t peer = peer_start(import_main);
    const wsync_cuda_device_t *device = open_device(0);
    const wsync_cu_ptr_t at = take(device, NBYTES);
    int physical;

    (void)count_fds(&physical);
    bytes_at(at)[NBYTES - 1] = 42;
    say_fd(peer.socket, physical);
    await_nudge(peer.socket);
    bytes_at(at)[NBYTES - 1] = 43;
    wsync_cuda_give(device, at, NBYTES, NULL);
    check_clean();
    nudge(peer.socket);
    peer_end(peer);
}

/* Nobody has asked for it yet, and a model has many pieces of memory. */
TEST(it_takes_no_descriptor_but_the_driver_s)
{
    const wsync_cuda_device_t *device = open_device(0);
    int physical;
    const long before = count_fds(&physical);
    const wsync_cu_ptr_t at = take(device, NBYTES);

    CHECK_EQ(count_fds(&physical), before + 1);
    CHECK(physical >= 0);
    wsync_cuda_give(device, at, NBYTES, NULL);
    CHECK_EQ(count_fds(&physical), before);
}

static void pause_stream(void *argument)
{
    (void)argument;
    (void)usleep(BUSY_MS * 1000);
}

/* What the stream was given before the memory was let go of runs while it is mapped. */
static void give_while_busy(bool by_default)
{
    const wsync_cuda_device_t *device = open_device(0);
    const wsync_cuda_driver_t *cu = enter_device(0);
    const wsync_cu_ptr_t at = take(device, NBYTES);
    wsync_cu_context_t context = NULL;
    wsync_cu_stream_t stream = NULL;

    CU(cu->stream_create(&stream, by_default ? 0 : WSYNC_CU_STREAM_NON_BLOCKING));
    CU(cu->launch_host(stream, pause_stream, NULL));
    CU(cu->memset_async(at, 7, NBYTES, stream));
    wsync_cuda_give(device, at, NBYTES, by_default ? NULL : stream);
    CU(cu->stream_query(stream));
    CU(cu->stream_destroy(stream));
    CU(cu->context_pop(&context));
    check_clean();
}

TEST(it_is_given_back_when_its_stream_is_done)
{
    give_while_busy(false);
}

TEST(the_default_stream_is_done_with_all_that_it_waits_for)
{
    give_while_busy(true);
}

TEST(sizes_and_devices_that_cannot_be_are_refused)
{
    const wsync_cuda_device_t *device;
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_MEMORY", "6291456");
    device = open_device(0);
    CHECK_OK(wsync_cuda_can_take(device, &err), err);
    CHECK_EQ(wsync_cuda_take(device, 0, &at, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_cuda_take(device, UINT64_MAX, &at, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "18446744073709551615 bytes");
    CHECK_EQ(wsync_cuda_take(device, 7000000, &at, &err), WSYNC_ERR_NO_MEMORY);
    CHECK_HAS(err.message,
              "GPU memory of 8388608 bytes: 6291456 of 6291456 bytes of GPU 0 "
              "(Fake GPU 0) are free");
    CHECK_EQ(at, 0);
    check_clean();
}

TEST(a_gpu_without_descriptors_is_named)
{
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_NO_VMM", "1");
    CHECK_EQ(wsync_cuda_can_take(open_device(0), &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "GPU 0 (Fake GPU 0) exports no memory as descriptors");
    CHECK_EQ(wsync_cuda_take(open_device(0), NBYTES, &at, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_EQ(at, 0);
}

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = context;
    wsync_cu_ptr_t at = 0;
    const wsync_status_t status = wsync_cuda_take(device, NBYTES, &at, err);

    CHECK_EQ(at != 0, status == WSYNC_OK);
    if (status == WSYNC_OK) {
        wsync_cuda_give(device, at, NBYTES, NULL);
    }
    return status;
}

TEST(each_call_fails_in_turn)
{
    void *device = (void *)(uintptr_t)open_device(0);

    CHECK(fail_in_turn(attempt, device, WSYNC_CU_LAUNCH_FAILED, 0) >= 5);
    CHECK(fail_in_turn(attempt, device, WSYNC_CU_OUT_OF_MEMORY, 0) >= 5);
    check_clean();
}

TEST(of_a_lost_gpu_nothing_is_given_back)
{
    const wsync_cuda_device_t *device = open_device(0);
    const wsync_cu_ptr_t at = take(device, NBYTES);
    wsync_cu_ptr_t other = 0;
    wsync_error_t err = {0};

    fake_lose("*", 0, WSYNC_CU_LAUNCH_FAILED);
    wsync_cuda_give(device, at, NBYTES, NULL);
    CHECK_EQ(wsync_cuda_take(device, NBYTES, &other, &err), WSYNC_ERR_DEVICE);
    CHECK_EQ(other, 0);
}

TEST(a_fork_has_none_and_takes_nothing_away)
{
    const wsync_cuda_device_t *device = open_device(0);
    const wsync_cu_ptr_t at = take(device, NBYTES);
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        wsync_cu_ptr_t mine = 0;
        wsync_error_t err = {0};

        CHECK_EQ(wsync_cuda_take(device, NBYTES, &mine, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "fork");
        wsync_cuda_give(device, at, NBYTES, NULL);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    bytes_at(at)[0] = 1;
    wsync_cuda_give(device, at, NBYTES, NULL);
    check_clean();
}

static void *many(void *argument)
{
    const wsync_cuda_device_t *device = open_device(*(const int *)argument);

    for (int i = 0; i < 50; i++) {
        const wsync_cu_ptr_t first = take(device, NBYTES);
        const wsync_cu_ptr_t second = take(device, GRANULE);

        bytes_at(first)[0] = 1;
        wsync_cuda_give(device, first, NBYTES, NULL);
        bytes_at(second)[GRANULE - 1] = 2;
        wsync_cuda_give(device, second, GRANULE, NULL);
    }
    return NULL;
}

TEST(threads_take_and_give_back_at_once)
{
    static const int ordinals[4] = {0, 1, 0, 1};
    pthread_t threads[4];

    choose_fake("WSYNC_FAKE_CUDA_DEVICES", "2");
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, many, (void *)(uintptr_t)&ordinals[i]),
                 0);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    check_clean();
}
