/* SPDX-License-Identifier: Apache-2.0
 * Every allocation and every system call of the host backend fails in turn. */
#include "device/device.h"
#include "faults.h"

enum { WAIT_MS = 2, PATIENT_MS = 60000 };

typedef struct buffers {
    unsigned char from[64];
    unsigned char to[64];
} buffers_t;

/* Nobody sets the word: the wait sleeps and its deadline passes. */
static wsync_status_t wait_in_vain(wsync_memory_t *memory, wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_event_wait((wsync_event_t){memory, 16}, 1, WAIT_MS, err);

    CHECK(status != WSYNC_OK);
    return status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
}

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    static const wsync_copy_t copy = {
        .row_count = 64, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    const wsync_device_t *device = wsync_device_host();
    buffers_t *buffers = context;
    const wsync_span_t source = {buffers->from, sizeof(buffers->from)};
    const wsync_span_t destination = {buffers->to, sizeof(buffers->to)};
    wsync_memory_t *memory = NULL;
    wsync_memory_t *peer = NULL;
    wsync_stream_t *stream = NULL;
    wsync_status_t status = wsync_memory_create(device, 4096, &memory, err);
    wsync_error_t ignored;

    memset(buffers->from, 1, sizeof(buffers->from));
    memset(buffers->to, 0, sizeof(buffers->to));
    if (status == WSYNC_OK) {
        status = wsync_memory_import(device, memory->fd, 4096, &peer, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(device, 3, &stream, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_copy_list(stream, &copy, 1, &source, 1, &destination, 1, err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        CHECK_EQ(buffers->to[0], status == WSYNC_OK);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_record(stream, (wsync_event_t){memory, 8}, 1, err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        CHECK_EQ(wsync_event_query((wsync_event_t){peer, 8}), status == WSYNC_OK);
    }
    if (status == WSYNC_OK) {
        status = wait_in_vain(peer, err);
    }
    fault.closing = true;
    wsync_stream_destroy(stream);
    wsync_memory_destroy(peer);
    wsync_memory_destroy(memory);
    return status;
}

TEST(allocations)
{
    buffers_t buffers;

    CHECK(oom_run(attempt, &buffers) >= 5);
}

TEST(calls)
{
    buffers_t buffers;

    CHECK(fault_run(attempt, &buffers, EMFILE) >= 12);
    CHECK(fault_run(attempt, &buffers, ENOMEM) >= 12);
}

TEST(interruptions)
{
    buffers_t buffers;

    CHECK(fault_run(attempt, &buffers, EINTR) >= 4);
}
