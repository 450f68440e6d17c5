/* SPDX-License-Identifier: Apache-2.0
 * GPU streams on tests/fakecuda: what they ask of the driver, against the host backend, and
 * with every call failing. */
#include <pthread.h>

#include "cuda_rig.h"
#include "device/deadline.h"

TEST(copies_are_those_of_the_host)
{
    const wsync_device_t *device = gpu();
    const wsync_device_t *host = wsync_device_host();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_memory_t *expected = make_buffer(host, NBYTES);
    wsync_stream_t *stream = make_stream(device);
    wsync_stream_t *reference = make_stream(host);
    const wsync_span_t source = span_of(from);
    const wsync_span_t same = {reach(source.data), NBYTES};
    const wsync_span_t destination = span_of(to);
    const wsync_span_t wanted = span_of(expected);
    wsync_error_t err = {0};

    fill(same.data, NBYTES, 1);
    for (int count = 1; count <= SHAPES; count++) {
        memset(reach(destination.data), 0, NBYTES);
        memset(wanted.data, 0, NBYTES);
        CHECK_OK(wsync_stream_copy_list(stream, shapes, (size_t)count, &source, 1,
                                        &destination, 1, &err),
                 err);
        CHECK_OK(wsync_stream_copy_list(reference, shapes, (size_t)count, &same, 1, &wanted,
                                        1, &err),
                 err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_stream_synchronize(reference, PATIENT_MS, &err), err);
        CHECK(memcmp(reach(destination.data), wanted.data, NBYTES) == 0);
    }
    wsync_stream_destroy(stream);
    wsync_stream_destroy(reference);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
    wsync_memory_destroy(expected);
}

/* --- what is asked of the driver
 * ---------------------------------------------------------- */

TEST(a_round_is_one_wait_one_launch_one_record)
{
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    const wsync_device_t *device = gpu();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_memory_t *control = make_control(device);
    wsync_stream_t *peer = make_stream(device);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t source = span_of(from);
    const wsync_span_t destination = span_of(to);
    const wsync_event_t ready = {control, 0};
    const wsync_event_t done = {control, 64};
    wsync_error_t err = {0};

    for (uint64_t round = 1; round <= 3; round++) {
        const off_t before = lseek(fd, 0, SEEK_END);

        CHECK_OK(wsync_stream_wait(stream, ready, round, &err), err);
        CHECK_OK(wsync_stream_copy_list(stream, shapes, SHAPES, &source, 1, &destination, 1,
                                        &err),
                 err);
        CHECK_OK(wsync_stream_record(stream, done, round, &err), err);
        read_calls(fd, before, text);
        if (round ==
            1) { /* the tables of the plan, and the addresses: both sides' differ */
            CHECK_HAS(text, "cuMemcpyHtoDAsync");
        } else {
            CHECK_STR(text, "cuStreamWaitValue64 cuLaunchKernel cuStreamWriteValue64 ");
        }
        CHECK_OK(wsync_stream_record(peer, ready, round, &err), err);
        CHECK_OK(wsync_event_wait(done, round, PATIENT_MS, &err), err);
    }
    wsync_stream_destroy(stream);
    wsync_stream_destroy(peer);
    wsync_memory_destroy(control);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
    (void)unlink(path);
    (void)close(fd);
}

static bool becomes_idle(const wsync_cuda_driver_t *driver, wsync_cu_stream_t stream)
{
    const uint64_t deadline = wsync_deadline_ns(PATIENT_MS);

    while (driver->stream_query(stream) == WSYNC_CU_NOT_READY &&
           wsync_clock_ns() < deadline) {
        (void)usleep(1000);
    }
    return driver->stream_query(stream) == WSYNC_CU_SUCCESS;
}

/* Where streams share one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1, those of torch and
 * NCCL go on while wsync's waits for another process, and so do uploads. */
TEST(a_stream_that_waits_keeps_no_others)
{
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    const wsync_cuda_driver_t *driver;
    wsync_cu_stream_t other = NULL;
    wsync_stream_t *uploader;
    wsync_error_t err = {0};
    off_t before;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_CONNECTIONS", "1");
    driver = enter_device(0);
    CU(driver->stream_create(&other, WSYNC_CU_STREAM_NON_BLOCKING));
    rig = make_rig(NBYTES);
    before = lseek(fd, 0, SEEK_END);
    uploader = make_stream(rig.base);
    read_calls(fd, before, text);
    CHECK_STR(text, "cuStreamCreateWithPriority cuStreamCreate ");
    CHECK_OK(wsync_stream_wait(rig.stream, (wsync_event_t){rig.control, 0}, 1, &err), err);
    CU(driver->memset_async((uintptr_t)rig.target.data, 1, 64, other));
    CHECK(becomes_idle(driver, other));
    /* Its tables are on the device when this returns. */
    CHECK_OK(wsync_stream_copy_list(uploader, shapes, SHAPES, &rig.target, 1, &rig.target,
                                    1, &err),
             err);
    CHECK_EQ(wsync_stream_synchronize(rig.stream, 0, &err), WSYNC_ERR_TIMEOUT);
    wsync_event_set((wsync_event_t){rig.control, 0}, 1);
    CU(driver->stream_destroy(other));
    wsync_stream_destroy(uploader);
    end_rig(&rig);
    (void)unlink(path);
    (void)close(fd);
}

/* To compare what waits cost, the host can be told to wait where the GPU could. */
TEST(the_environment_says_who_waits)
{
    static const struct {
        const char *text;
        unsigned ahead;
    } choices[] = {{"host", 0}, {"gpu", WSYNC_STREAM_AHEAD}, {"", WSYNC_STREAM_AHEAD}};
    rig_t rig = make_rig(NBYTES);
    wsync_stream_t *stream = rig.stream;
    wsync_error_t err = {0};

    for (size_t i = 0; i < sizeof(choices) / sizeof(choices[0]); i++) {
        CHECK_EQ(setenv("WSYNC_GPU_WAITS", choices[i].text, 1), 0);
        rig.stream = make_stream(rig.base);
        for (int batch = 0; batch < 2; batch++) { /* the second one uploads nothing */
            enqueue(&rig, shapes, 1, &rig.target, 1);
        }
        CHECK_EQ(wsync_stream_ahead(rig.stream), choices[i].ahead);
        wsync_stream_destroy(rig.stream);
    }
    CHECK_EQ(setenv("WSYNC_GPU_WAITS", "nobody", 1), 0);
    CHECK_EQ(wsync_stream_create(rig.base, 1, &rig.stream, &err), WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "WSYNC_GPU_WAITS='nobody' is neither gpu nor host");
    rig.stream = stream;
    end_rig(&rig);
}

static void *abandon_late(void *stream)
{
    (void)usleep(20000);
    CHECK(wsync_stream_abandon(stream, PATIENT_MS));
    return NULL;
}

/* On a device without memory operations for it. */
TEST(words_may_be_the_host_s_to_wait_for_and_to_set)
{
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    pthread_t thread;
    wsync_event_t ready;
    wsync_event_t done;
    wsync_error_t err = {0};
    off_t before;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_LACKS", "122");
    rig = make_rig(NBYTES);
    ready = (wsync_event_t){rig.control, 0};
    done = (wsync_event_t){rig.control, 8};
    for (uint64_t round = 1; round <= 3; round++) {
        before = lseek(fd, 0, SEEK_END);
        wsync_event_set(ready, round);
        CHECK_OK(wsync_stream_wait(rig.stream, ready, round, &err), err);
        enqueue(&rig, shapes, 2, &rig.target, 1);
        CHECK_OK(wsync_stream_record(rig.stream, done, round, &err), err);
        read_calls(fd, before, text);
        CHECK_EQ(wsync_stream_ahead(rig.stream), 0);
        CHECK_OK(wsync_event_wait(done, round, PATIENT_MS, &err), err);
    }
    CHECK_STR(text, "cuLaunchKernel cuLaunchHostFunc ");
    /* A wait for who is gone ends with the stream's. */
    CHECK_EQ(pthread_create(&thread, NULL, abandon_late, rig.stream), 0);
    CHECK_OK(wsync_stream_wait(rig.stream, ready, 5, &err), err);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(wsync_event_query(ready), 5);
    end_rig(&rig);
    (void)unlink(path);
    (void)close(fd);
}

/* Buffers that moved cost an upload of addresses, not of the plan. */
TEST(moved_buffers_are_bound_anew)
{
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    const wsync_device_t *device = gpu();
    wsync_memory_t *buffers[3] = {make_buffer(device, NBYTES), make_buffer(device, NBYTES),
                                  make_buffer(device, NBYTES)};
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t source = span_of(buffers[0]);
    off_t before;
    wsync_error_t err = {0};

    fill(reach(source.data), NBYTES, 1);
    for (int i = 1; i < 3; i++) {
        const wsync_span_t destination = span_of(buffers[i]);

        before = lseek(fd, 0, SEEK_END);
        CHECK_OK(wsync_stream_copy_list(stream, shapes, SHAPES, &source, 1, &destination, 1,
                                        &err),
                 err);
    }
    read_calls(fd, before, text);
    CHECK_STR(text,
              "cuPointerGetAttributes cuMemGetAddressRange cuMemcpyHtoDAsync "
              "cuStreamSynchronize cuLaunchKernel ");
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(bytes_of(buffers[1]), bytes_of(buffers[2]), NBYTES) == 0);
    wsync_stream_destroy(stream);
    for (int i = 0; i < 3; i++) {
        wsync_memory_destroy(buffers[i]);
    }
    (void)unlink(path);
    (void)close(fd);
}

/* As in updates whose weights move every time; most of their tables are asked for once. */
TEST(addresses_of_buffers_that_move_for_ever_are_not_kept)
{
    enum { BUFFERS = 1 << 16, UPDATES = 100 };
    const wsync_device_t *device = gpu();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t destination = span_of(to);
    wsync_span_t *sources = calloc(BUFFERS, sizeof(*sources));
    wsync_error_t err = {0};

    CHECK(sources != NULL);
    fill(bytes_of(from), NBYTES, 1);
    sources[0] = span_of(from);
    for (uintptr_t i = 0; i < UPDATES; i++) {
        sources[1].data = (void *)(i + 1); /* no copy names it */
        CHECK_OK(wsync_stream_copy_list(stream, shapes, SHAPES, sources, BUFFERS,
                                        &destination, 1, &err),
                 err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
        CHECK(fake_census().allocated < 16); /* each holds some updates' addresses */
    }
    wsync_stream_destroy(stream);
    CHECK_EQ(fake_census().allocated, 0);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
    free(sources);
}

/* Copy engines are not trusted with it. */
TEST(a_long_run_between_memory_of_devices_is_a_launch)
{
    const wsync_copy_t run = {
        .row_count = NBYTES, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    char path[] = "/var/tmp/wsync-calls-XXXXXX";
    char text[CALLS_NBYTES];
    const int fd = open_log(path);
    const wsync_device_t *device = gpu();
    wsync_memory_t *from = make_buffer(device, NBYTES);
    wsync_memory_t *to = make_buffer(device, NBYTES);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t source = span_of(from);
    const wsync_span_t destination = span_of(to);
    const off_t before = lseek(fd, 0, SEEK_END);
    wsync_error_t err = {0};

    fill(reach(source.data), NBYTES, 1);
    CHECK_OK(wsync_stream_copy_list(stream, &run, 1, &source, 1, &destination, 1, &err),
             err);
    read_calls(fd, before, text);
    CHECK_HAS(text, "cuLaunchKernel");
    CHECK(strstr(text, "cuMemcpyAsync") == NULL);
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(reach(source.data), reach(destination.data), NBYTES) == 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
    (void)unlink(path);
    (void)close(fd);
}

TEST(a_gpu_without_kernels_or_of_another_uuid_is_no_backend)
{
    const wsync_device_t *device = NULL;
    wsync_cu_uuid_t uuid = {{0xde, 0xad, 0xbe, 0xef}};
    wsync_error_t err = {0};

    choose_fake(NULL, NULL);
    CHECK_EQ(wsync_device_cuda(&uuid, "kernels", &device, &err), WSYNC_ERR_UNSUPPORTED);
    CHECK_HAS(err.message, "none of the 1 GPUs");
    CHECK_HAS(err.message, "deadbeef");
    memset(uuid.bytes, 0xfa, sizeof(uuid.bytes));
    uuid.bytes[15] = 0;
    CHECK_EQ(wsync_device_cuda(&uuid, NULL, &device, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "no kernels yet");
    CHECK(device == NULL);
    CHECK_OK(wsync_device_cuda(&uuid, "kernels", &device, &err), err);
    CHECK_OK(wsync_device_cuda(&uuid, NULL, &device, &err), err);
    CHECK_STR(device->name, "cuda");
}

TEST(a_fork_has_the_identity_of_its_gpu_and_no_use_of_it)
{
    const wsync_device_t *device = gpu();
    const int ordinal = device->ordinal;
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        wsync_memory_t *memory = NULL;
        wsync_stream_t *stream = NULL;
        wsync_error_t err = {0};

        CHECK_EQ(device->ordinal, ordinal);
        CHECK_EQ(wsync_memory_create(device, NBYTES, &memory, &err), WSYNC_ERR_STATE);
        CHECK_EQ(wsync_memory_import(device, 0, NBYTES, &memory, &err), WSYNC_ERR_STATE);
        CHECK_EQ(wsync_control_create(device, NBYTES, &memory, &err), WSYNC_ERR_STATE);
        CHECK_EQ(wsync_control_import(device, 0, NBYTES, &memory, &err), WSYNC_ERR_STATE);
        CHECK_EQ(wsync_stream_create(device, 1, &stream, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "fork");
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* --- two processes
 * ------------------------------------------------------------------------ */

enum { ROUNDS = 40 };

/* Doubles as both sides: `mine` is recorded when the other's word has the round before. */
static void play(int socket, bool first)
{
    const wsync_device_t *device = gpu();
    wsync_memory_t *control = NULL;
    wsync_memory_t *buffer = NULL;
    wsync_stream_t *stream = make_stream(device);
    wsync_error_t err = {0};

    if (first) {
        control = make_control(device);
        buffer = make_buffer(device, NBYTES);
        fill(bytes_of(buffer), NBYTES, 1);
        say_fd(socket, control->fd);
        say_fd(socket, buffer->fd);
    } else {
        const int words = hear_fd(socket);
        const int fd = hear_fd(socket);

        CHECK_OK(wsync_control_import(device, words, 4096, &control, &err), err);
        CHECK_OK(wsync_memory_import(device, fd, NBYTES, &buffer, &err), err);
        (void)close(words);
        (void)close(fd);
    }
    /* The row moves on by one place a round, in turns. */
    for (uint64_t round = first ? 1 : 2; round <= ROUNDS; round += 2) {
        const wsync_copy_t copy = {.source_offset = (round - 1) * 4096,
                                   .destination_offset = round * 4096,
                                   .row_count = 4096,
                                   .source_item_nbytes = 1,
                                   .destination_item_nbytes = 1};
        const wsync_span_t span = span_of(buffer);

        CHECK_OK(wsync_stream_wait(stream, (wsync_event_t){control, first ? 64 : 0},
                                   round - 1, &err),
                 err);
        CHECK_OK(wsync_stream_copy_list(stream, &copy, 1, &span, 1, &span, 1, &err), err);
        CHECK_OK(wsync_stream_record(stream, (wsync_event_t){control, first ? 0 : 64},
                                     round, &err),
                 err);
    }
    CHECK_OK(wsync_event_wait((wsync_event_t){control, 64}, ROUNDS, PATIENT_MS, &err), err);
    CHECK(memcmp(bytes_of(buffer) + ROUNDS * 4096, bytes_of(buffer), 4096) == 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(buffer);
    wsync_memory_destroy(control);
}

static void second_main(int socket)
{
    play(socket, false);
}

TEST(streams_of_two_processes_take_turns_without_the_host)
{
    const peer_t peer = peer_start(second_main);

    play(peer.socket, true);
    peer_end(peer);
}

/* A chain over a stream of the driver's user that nobody names: behind what that one has
 * been given before, and ahead of what it is given afterwards. */
TEST(streams_of_others_are_followed_and_led)
{
    const wsync_device_t *device = gpu();
    const wsync_cuda_driver_t *driver = enter_device(0);
    wsync_memory_t *buffer = make_buffer(device, NBYTES);
    wsync_memory_t *control = make_control(device);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t span = span_of(buffer);
    const uintptr_t at = (uintptr_t)span.data;
    const wsync_copy_t copy = {.source_offset = 4096,
                               .destination_offset = 8192,
                               .row_count = 4096,
                               .source_item_nbytes = 1,
                               .destination_item_nbytes = 1};
    const wsync_event_t gate = {control, 0};
    wsync_cu_stream_t other = NULL;
    wsync_error_t err = {0};

    fill(reach(span.data), NBYTES, 1);
    CU(driver->stream_create(&other, WSYNC_CU_STREAM_NON_BLOCKING));
    /* Nothing moves before the gate opens, so that only the order can make it right. */
    CU(driver->stream_wait_value(other, wsync_cuda_event_address(gate), 1,
                                 WSYNC_CU_WAIT_GEQ));
    CU(driver->memcpy_async(at + 4096, at, 4096, other));
    CHECK_OK(wsync_stream_follow(stream, &err), err);
    CHECK_OK(wsync_stream_copy_list(stream, &copy, 1, &span, 1, &span, 1, &err), err);
    CHECK_OK(wsync_stream_lead(stream, other, &err), err);
    CU(driver->memcpy_async(at + 12288, at + 8192, 4096, other));
    CHECK_EQ(driver->stream_query(other), WSYNC_CU_NOT_READY);
    CHECK_EQ(wsync_stream_synchronize(stream, 50, &err), WSYNC_ERR_TIMEOUT);
    wsync_event_set(gate, 1);
    CU(driver->stream_synchronize(other));
    CHECK(memcmp(bytes_of(buffer), bytes_of(buffer) + 12288, 4096) == 0);
    CU(driver->stream_destroy(other));
    wsync_stream_destroy(stream);
    wsync_memory_destroy(buffer);
    wsync_memory_destroy(control);
}

/* What a stream that does not run dry uses is used yet: somebody else's stream keeps it.
 * One that was given nothing itself is not waited for, but is not freed either. */
TEST(a_stream_that_does_not_run_dry_says_so)
{
    static wsync_stream_t *idle; /* never freed, and not lost to who looks for leaks */
    const wsync_device_t *device = gpu();
    const wsync_cuda_driver_t *driver = enter_device(0);
    wsync_memory_t *buffer = make_buffer(device, NBYTES);
    wsync_memory_t *control = make_control(device);
    wsync_stream_t *stream = make_stream(device);
    const wsync_span_t span = span_of(buffer);
    const wsync_copy_t copy = {.destination_offset = 8192,
                               .row_count = 4096,
                               .source_item_nbytes = 1,
                               .destination_item_nbytes = 1};
    const wsync_event_t gate = {control, 0};
    wsync_cu_stream_t other = NULL;
    wsync_error_t err = {0};
    uint64_t begin;

    idle = make_stream(device);
    fill(reach(span.data), NBYTES, 1);
    CU(driver->stream_create(&other, WSYNC_CU_STREAM_NON_BLOCKING));
    CU(driver->stream_wait_value(other, wsync_cuda_event_address(gate), 1,
                                 WSYNC_CU_WAIT_GEQ));
    CHECK_OK(wsync_stream_follow(stream, &err), err);
    CHECK_OK(wsync_stream_follow(idle, &err), err);
    CHECK_OK(wsync_stream_copy_list(stream, &copy, 1, &span, 1, &span, 1, &err), err);
    CHECK(!wsync_stream_abandon(stream, 20));
    begin = wsync_clock_ns();
    CHECK_EQ(wsync_stream_synchronize(idle, 0, &err), WSYNC_ERR_TIMEOUT);
    CHECK(strstr(err.message, "has not done what it was given on other streams") != NULL);
    CHECK(wsync_stream_abandon(idle, PATIENT_MS));
    CHECK(!wsync_stream_destroy(idle));
    CHECK(wsync_clock_ns() - begin < UINT64_C(20) * 1000 * 1000 * 1000);
    wsync_event_set(gate, 1);
    CU(driver->stream_synchronize(other));
    CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    CHECK(memcmp(bytes_of(buffer), bytes_of(buffer) + 8192, 4096) == 0);
    CHECK(wsync_stream_abandon(stream, 0));
    CU(driver->stream_destroy(other));
    CHECK(wsync_stream_destroy(stream));
    wsync_memory_destroy(buffer);
    wsync_memory_destroy(control);
}

static void vanish_main(int socket)
{
    const wsync_device_t *device = gpu();
    wsync_memory_t *control = make_control(device);

    say_fd(socket, control->fd);
    await_nudge(socket);
}

/* Who waits for a process that died can be told to go on. */
TEST(a_wait_for_a_dead_process_ends_with_the_stream)
{
    const peer_t peer = peer_start(vanish_main);
    const wsync_device_t *device = gpu();
    const int fd = hear_fd(peer.socket);
    wsync_memory_t *control = NULL;
    wsync_stream_t *stream = make_stream(device);
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_import(device, fd, 4096, &control, &err), err);
    (void)close(fd);
    CHECK_OK(wsync_stream_wait(stream, (wsync_event_t){control, 0}, 1, &err), err);
    wsync_memory_destroy(control);
    nudge(peer.socket);
    peer_end(peer);
    CHECK_EQ(wsync_stream_synchronize(stream, 20, &err), WSYNC_ERR_TIMEOUT);
    wsync_stream_destroy(stream);
}
