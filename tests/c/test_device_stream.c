/* SPDX-License-Identifier: Apache-2.0
 * Streams and events of every device: order, bounds, deadlines, ends. */
#include <pthread.h>

#include "device_fixture.h"

enum { NBYTES = 4096, DEADLINE_MS = 60000 };

static wsync_memory_t *make_memory(void)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_create(test_device(), NBYTES, &memory, &err), err);
    return memory;
}

/* What copies read and write. */
static wsync_memory_t *make_buffer(uint64_t nbytes)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(test_device(), nbytes, &memory, &err), err);
    return memory;
}

static wsync_span_t span_of(wsync_memory_t *memory)
{
    return (wsync_span_t){memory->data, memory->nbytes};
}

static wsync_stream_t *make_stream(unsigned threads)
{
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_create(test_device(), threads, &stream, &err), err);
    return stream;
}

/* Copies the same row on itself again and again: much work without much memory. */
static wsync_copy_t slow_copy(int64_t times)
{
    return (wsync_copy_t){.row_count = 1024,
                          .source_item_nbytes = 1,
                          .destination_item_nbytes = 1,
                          .ndim = 1,
                          .extent = {times}};
}

TEST(events_wait_until_their_value)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(1);
    const wsync_event_t event = {memory, 128};
    wsync_error_t err = {0};

    CHECK_EQ(wsync_event_query(event), 0);
    CHECK_OK(wsync_event_wait(event, 0, 0, &err), err);
    CHECK_EQ(wsync_event_wait(event, 1, 0, &err), WSYNC_ERR_TIMEOUT);
    CHECK_EQ(wsync_event_wait(event, 1, 20, &err), WSYNC_ERR_TIMEOUT);
    CHECK_EQ(wsync_event_wait(event, 1, -5, &err), WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "offset 128 is 0; the wait was for 1");
    CHECK_OK(wsync_stream_record(stream, event, 3, &err), err);
    CHECK_OK(wsync_event_wait(event, 3, DEADLINE_MS, &err), err);
    CHECK_OK(wsync_event_wait(event, 2, 0, &err), err);
    CHECK_EQ(wsync_event_wait(event, 4, 0, &err), WSYNC_ERR_TIMEOUT);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
}

TEST(events_only_grow)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    const wsync_event_t event = {memory, 0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_record(stream, event, 9, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 4, &err), err);
    CHECK_OK(wsync_stream_synchronize(stream, DEADLINE_MS, &err), err);
    CHECK_EQ(wsync_event_query(event), 9);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
}

typedef struct waiter {
    wsync_event_t event;
    uint64_t value;
    wsync_status_t status;
} waiter_t;

static void *wait_main(void *argument)
{
    waiter_t *waiter = argument;

    waiter->status = wsync_event_wait(waiter->event, waiter->value, DEADLINE_MS, NULL);
    return NULL;
}

/* The futex sees 32 bits: values whose low halves are equal must work as well. */
TEST(waiters_wake_for_values_beyond_32_bits)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(1);
    wsync_error_t err = {0};

    for (uint64_t i = 0; i < 8; i++) {
        const wsync_event_t event = {memory, 8 * i};
        waiter_t waiters[3];
        pthread_t threads[3];

        for (int t = 0; t < 3; t++) {
            waiters[t] = (waiter_t){event, (i + 1) << 32, WSYNC_ERR_STATE};
            CHECK_EQ(pthread_create(&threads[t], NULL, wait_main, &waiters[t]), 0);
        }
        CHECK_OK(wsync_stream_record(stream, event, (i + 1) << 32, &err), err);
        for (int t = 0; t < 3; t++) {
            CHECK_EQ(pthread_join(threads[t], NULL), 0);
            CHECK_EQ(waiters[t].status, WSYNC_OK);
        }
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
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

TEST(synchronize_ends_at_its_deadline)
{
    wsync_stream_t *stream = make_stream(1);
    wsync_memory_t *from = make_buffer(1024);
    wsync_memory_t *to = make_buffer(1024);
    const wsync_span_t source = span_of(from);
    const wsync_span_t destination = span_of(to);
    wsync_copy_t copy = slow_copy(250000);
    wsync_status_t status;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_synchronize(stream, 0, &err), err);
    /* More and more work, until it is more than this thread's pause before the call. */
    do {
        CHECK(copy.extent[0] < INT64_C(1) << 32);
        copy.extent[0] *= 2;
        CHECK_OK(
            wsync_stream_copy_list(stream, &copy, 1, &source, 1, &destination, 1, &err),
            err);
        status = wsync_stream_synchronize(stream, 1, &err);
    } while (status == WSYNC_OK);
    CHECK_EQ(status, WSYNC_ERR_TIMEOUT);
    CHECK_HAS(err.message, "1 entries");
    CHECK_OK(wsync_stream_synchronize(stream, DEADLINE_MS, &err), err);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
}

/* Entry i adds to what entry i - 1 left: any other order gives another result. */
static void check_order(unsigned threads)
{
    enum { ROUNDS = 300, LENGTH = 8192 };
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(threads);
    wsync_memory_t *buffer = make_buffer((ROUNDS + 1) * LENGTH * sizeof(uint64_t));
    const wsync_span_t span = span_of(buffer);
    uint64_t *cells = reach(span.data);
    wsync_copy_t *copies = calloc(ROUNDS, sizeof(*copies));
    wsync_error_t err = {0};

    for (size_t i = 0; i < LENGTH; i++) {
        cells[i] = i + 1;
    }
    for (size_t i = 0; i < ROUNDS; i++) {
        const uint64_t nbytes = LENGTH * sizeof(*cells);

        copies[i] = (wsync_copy_t){.source_offset = i * nbytes,
                                   .destination_offset = (i + 1) * nbytes,
                                   .row_count = nbytes,
                                   .source_item_nbytes = 1,
                                   .destination_item_nbytes = 1};
        CHECK_OK(wsync_stream_copy_list(stream, &copies[i], 1, &span, 1, &span, 1, &err),
                 err);
        CHECK_OK(wsync_stream_record(stream, (wsync_event_t){memory, 0}, i + 1, &err), err);
    }
    CHECK_OK(wsync_event_wait((wsync_event_t){memory, 0}, ROUNDS, DEADLINE_MS, &err), err);
    for (size_t i = 0; i < LENGTH; i++) {
        CHECK_EQ(cells[(size_t)ROUNDS * LENGTH + i], i + 1);
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
    wsync_memory_destroy(buffer);
    free(copies);
}

TEST(one_thread_runs_in_order)
{
    check_order(1);
}

TEST(four_threads_run_in_order)
{
    check_order(4);
}

static void check_destroy(unsigned threads)
{
    enum { ENTRIES = 20, LENGTH = 3 * 1024 * 1024 };
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(threads);
    wsync_memory_t *from = make_buffer(LENGTH);
    wsync_memory_t *to = make_buffer(LENGTH);
    const wsync_span_t source = span_of(from);
    const wsync_span_t destination = span_of(to);
    const wsync_copy_t copy = {
        .row_count = LENGTH, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    wsync_error_t err = {0};

    memset(reach(source.data), 3, LENGTH);
    for (uint64_t i = 0; i < ENTRIES; i++) {
        CHECK_OK(
            wsync_stream_copy_list(stream, &copy, 1, &source, 1, &destination, 1, &err),
            err);
        CHECK_OK(wsync_stream_record(stream, (wsync_event_t){memory, 8 * i}, 1, &err), err);
    }
    wsync_stream_destroy(stream);
    for (uint64_t i = 0; i < ENTRIES; i++) {
        CHECK_EQ(wsync_event_query((wsync_event_t){memory, 8 * i}), 1);
    }
    CHECK(memcmp(reach(source.data), reach(destination.data), LENGTH) == 0);
    wsync_memory_destroy(memory);
    wsync_memory_destroy(from);
    wsync_memory_destroy(to);
}

TEST(destroy_finishes_what_is_queued)
{
    check_destroy(1);
    check_destroy(4);
}

TEST(idle_streams_end)
{
    for (int i = 0; i < 50; i++) {
        wsync_stream_destroy(make_stream(1 + (unsigned)i % 4));
    }
}

/* What is queued behind a wait starts with its event, whoever sets that. */
TEST(streams_wait_for_events)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *first = make_stream(1);
    wsync_stream_t *second = make_stream(3);
    const wsync_event_t ready = {memory, 0};
    const wsync_event_t done = {memory, 64};
    const wsync_event_t outside = {memory, NBYTES};
    wsync_error_t err = {0};

    CHECK_EQ(wsync_stream_wait(second, outside, 1, &err), WSYNC_ERR_INVALID);
    CHECK_OK(wsync_stream_wait(second, ready, 2, &err), err);
    CHECK_OK(wsync_stream_record(second, done, 1, &err), err);
    CHECK_EQ(wsync_stream_synchronize(second, 20, &err), WSYNC_ERR_TIMEOUT);
    CHECK_OK(wsync_stream_record(first, ready, 1, &err), err);
    CHECK_OK(wsync_stream_synchronize(first, DEADLINE_MS, &err), err);
    CHECK_EQ(wsync_event_wait(done, 1, 20, &err), WSYNC_ERR_TIMEOUT);
    CHECK_OK(wsync_stream_record(first, ready, 2, &err), err);
    CHECK_OK(wsync_event_wait(done, 1, DEADLINE_MS, &err), err);
    wsync_stream_destroy(first);
    wsync_stream_destroy(second);
    wsync_memory_destroy(memory);
}

/* An abandoned wait is over, and the stream goes on with what comes later.  The event's
 * memory is kept for as long as the stream looks at it. */
TEST(abandoned_streams_give_up_their_waits)
{
    wsync_memory_t *gone = make_memory();
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    const wsync_event_t event = {memory, 0};
    wsync_error_t err = {0};

    CHECK(wsync_stream_abandon(stream, DEADLINE_MS));
    CHECK_OK(wsync_stream_wait(stream, (wsync_event_t){gone, 0}, 1, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 7, &err), err);
    wsync_memory_destroy(gone);
    CHECK(wsync_stream_abandon(stream, DEADLINE_MS));
    CHECK_OK(wsync_stream_synchronize(stream, 0, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 8, &err), err);
    CHECK_OK(wsync_event_wait(event, 8, DEADLINE_MS, &err), err);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
}

TEST(destroying_a_stream_gives_up_its_waits)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    const wsync_event_t event = {memory, 0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_record(stream, event, 1, &err), err);
    CHECK_OK(wsync_stream_wait(stream, event, 5, &err), err);
    CHECK_OK(wsync_stream_record(stream, event, 9, &err), err);
    wsync_stream_destroy(stream);
    CHECK(wsync_event_query(event) >= 1);
    wsync_memory_destroy(memory);
}

/* A fork inherits the object but not the threads: calls say so, destroy does not hang. */
TEST(streams_do_not_run_in_a_fork)
{
    wsync_memory_t *memory = make_memory();
    wsync_stream_t *stream = make_stream(2);
    int status = 0;
    const pid_t child = fork();

    if (child == 0) {
        wsync_error_t err = {0};

        CHECK_EQ(wsync_stream_record(stream, (wsync_event_t){memory, 0}, 1, &err),
                 WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "fork");
        CHECK_EQ(wsync_stream_copy_list(stream, NULL, 0, NULL, 0, NULL, 0, &err),
                 WSYNC_ERR_STATE);
        CHECK_EQ(wsync_stream_synchronize(stream, DEADLINE_MS, &err), WSYNC_ERR_STATE);
        wsync_stream_destroy(stream);
        _exit(0);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
}
