/* SPDX-License-Identifier: Apache-2.0
 * Host streams, where they do more than every device does. */
#include "device/device.h"
#include "harness.h"

enum { NBYTES = 4096, DEADLINE_MS = 60000 };

static wsync_memory_t *make_memory(void)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_create(wsync_device_host(), NBYTES, &memory, &err), err);
    return memory;
}

static wsync_stream_t *make_stream(unsigned threads)
{
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_create(wsync_device_host(), threads, &stream, &err), err);
    return stream;
}

TEST(events_wake_another_process)
{
    wsync_memory_t *memory = make_memory();
    const wsync_event_t there = {memory, 0};
    const wsync_event_t here = {memory, 64};
    wsync_error_t err = {0};
    wsync_stream_t *stream;
    int status = 0;
    const pid_t child = fork();

    stream = make_stream(1); /* after the fork: one in each process */
    for (uint64_t i = 1; i <= 100; i++) {
        const wsync_event_t mine = child == 0 ? there : here;
        const wsync_event_t other = child == 0 ? here : there;

        CHECK_OK(wsync_stream_record(stream, mine, i, &err), err);
        CHECK_OK(wsync_event_wait(other, i, DEADLINE_MS, &err), err);
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
    if (child != 0) {
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}
