/* SPDX-License-Identifier: Apache-2.0
 * Streams of the CUDA backend; contracts are those of device.h.  Sources may be any memory:
 * what the device does not reach is gathered by threads of the host.  Host memory is taken
 * for what it was (pinned or not) until the stream is seen idle: synchronise or abandon
 * before it becomes other memory. */
#ifndef WSYNC_DEVICE_CUDA_STREAM_H
#define WSYNC_DEVICE_CUDA_STREAM_H

#include "device/cuda.h"

wsync_status_t wsync_cuda_stream_create(const wsync_cuda_device_t *device, unsigned threads,
                                        wsync_stream_t **stream, wsync_error_t *err);
bool wsync_cuda_stream_destroy(wsync_stream_t *stream);
wsync_status_t wsync_cuda_stream_copy(wsync_stream_t *stream, const wsync_copy_t *copies,
                                      size_t count, const wsync_span_t *sources,
                                      size_t source_count, const wsync_span_t *destinations,
                                      size_t destination_count, wsync_error_t *err);
wsync_status_t wsync_cuda_stream_record(wsync_stream_t *stream, wsync_event_t event,
                                        uint64_t value, wsync_error_t *err);
wsync_status_t wsync_cuda_stream_wait(wsync_stream_t *stream, wsync_event_t event,
                                      uint64_t value, wsync_error_t *err);
unsigned wsync_cuda_stream_ahead(wsync_stream_t *stream);
bool wsync_cuda_stream_abandon(wsync_stream_t *stream, int timeout_ms);
wsync_status_t wsync_cuda_stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                             wsync_error_t *err);
void wsync_cuda_stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next,
                             size_t capacity, wsync_stream_span_t **spans, size_t *count);

wsync_status_t wsync_cuda_stream_follow(wsync_stream_t *stream, void *other,
                                        wsync_error_t *err);
wsync_status_t wsync_cuda_stream_lead(wsync_stream_t *stream, void *other,
                                      wsync_error_t *err);

const wsync_cuda_device_t *wsync_cuda_stream_device(wsync_stream_t *stream);
wsync_cu_stream_t wsync_cuda_stream_handle(wsync_stream_t *stream);

#endif
