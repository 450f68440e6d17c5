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

/* A device has been given what is enqueued; a host stream has not, and drops it. */
TEST(abandoned_streams_drop_what_has_not_begun)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    const wsync_event_t event = {memory, 0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_wait(stream, (wsync_event_t){memory, 64}, 1, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 7, &err), err);
    CHECK(wsync_stream_abandon(stream, DEADLINE_MS));
    CHECK_OK(wsync_stream_synchronize(stream, 0, &err), err);
    CHECK_EQ(wsync_event_query(event), 0);
    CHECK_EQ(wsync_event_query((wsync_event_t){memory, 64}), 0);
    CHECK_OK(wsync_stream_record(stream, event, 3, &err), err);
    CHECK_OK(wsync_event_wait(event, 3, DEADLINE_MS, &err), err);
    CHECK_OK(wsync_stream_wait(stream, event, 5, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 9, &err), err);
    wsync_stream_destroy(stream);
    CHECK_EQ(wsync_event_query(event), 3);
    wsync_memory_destroy(memory);
}

TEST(abandoned_copies_end_with_the_piece_they_are_at)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    const wsync_event_t event = {memory, NBYTES - 8};
    const wsync_copy_t copy = {.row_count = 1024,
                               .source_item_nbytes = 1,
                               .destination_item_nbytes = 1,
                               .ndim = 1,
                               .extent = {INT64_C(1) << 40}}; /* hours */
    const wsync_span_t span = {memory->data, 1024};
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_copy_list(stream, &copy, 1, &span, 1, &span, 1, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 1, &err), err);
    CHECK_EQ(wsync_stream_synchronize(stream, 20, &err), WSYNC_ERR_TIMEOUT);
    CHECK(wsync_stream_abandon(stream, DEADLINE_MS));
    CHECK_OK(wsync_stream_synchronize(stream, 0, &err), err);
    CHECK_EQ(wsync_event_query(event), 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
}
