/* SPDX-License-Identifier: Apache-2.0
 * Host backend: the ops table. */
#include "device/host.h"

static wsync_device_identity_t identity(void)
{
    return (wsync_device_identity_t){.ordinal = -1};
}

/* Nobody else's work on the host is behind a stream. */
static wsync_status_t order_nothing(wsync_stream_t *stream, void *other, wsync_error_t *err)
{
    (void)stream;
    (void)other;
    (void)err;
    return WSYNC_OK;
}

const wsync_device_ops_t *wsync_device_host(void)
{
    static const wsync_device_ops_t ops = {
        .name = "host",
        .identity = identity,
        .memory_create = wsync_host_memory_create,
        .memory_import = wsync_host_memory_import,
        .control_create = wsync_host_memory_create,
        .control_import = wsync_host_memory_import,
        .memory_retain = wsync_host_memory_retain,
        .memory_destroy = wsync_host_memory_destroy,
        .memory_data = wsync_host_memory_data,
        .memory_nbytes = wsync_host_memory_nbytes,
        .memory_fd = wsync_host_memory_fd,
        .memory_pin = wsync_host_memory_pin,
        .memory_unpin = wsync_host_memory_unpin,
        .memory_park = wsync_host_memory_park,
        .memory_unpark = wsync_host_memory_unpark,
        .stream_create = wsync_host_stream_create,
        .stream_destroy = wsync_host_stream_destroy,
        .stream_copy = wsync_host_stream_copy,
        .stream_record = wsync_host_stream_record,
        .stream_wait = wsync_host_stream_wait,
        .stream_follow = order_nothing,
        .stream_lead = order_nothing,
        .stream_abandon = wsync_host_stream_abandon,
        .stream_ahead = wsync_host_stream_ahead,
        .stream_synchronize = wsync_host_stream_synchronize,
        .stream_trace = wsync_host_stream_trace,
        .event_wait = wsync_host_event_wait,
        .event_query = wsync_host_event_query,
    };

    return &ops;
}
