/* SPDX-License-Identifier: Apache-2.0
 * Host backend: the functions behind wsync_device_host(); contracts are those of device.h.
 */
#ifndef WSYNC_DEVICE_HOST_H
#define WSYNC_DEVICE_HOST_H

#include "device/device.h"

wsync_status_t wsync_host_memory_create(uint64_t nbytes, wsync_memory_t **memory,
                                        wsync_error_t *err);
wsync_status_t wsync_host_memory_import(int fd, uint64_t nbytes, wsync_memory_t **memory,
                                        wsync_error_t *err);
void wsync_host_memory_retain(wsync_memory_t *memory);
void wsync_host_memory_destroy(wsync_memory_t *memory);
void *wsync_host_memory_data(const wsync_memory_t *memory);
uint64_t wsync_host_memory_nbytes(const wsync_memory_t *memory);
int wsync_host_memory_fd(const wsync_memory_t *memory);
wsync_status_t wsync_host_memory_pin(wsync_memory_t *memory, wsync_error_t *err);
void wsync_host_memory_unpin(wsync_memory_t *memory);
wsync_status_t wsync_host_memory_park(wsync_memory_t *memory, wsync_error_t *err);
wsync_status_t wsync_host_memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err);

/* Bytes that may still be allocated: the machine's, or what this process's control group
 * (version 1 or 2) leaves of its limit.  `root` stands before the system's paths: "". */
uint64_t wsync_host_memory_available(const char *root);

/* INVALID unless the event is an aligned word inside its memory. */
wsync_status_t wsync_host_event_check(wsync_event_t event, wsync_error_t *err);
/* Everything this thread wrote before is visible to whoever sees the value.  A value below
 * the present one changes nothing. */
void wsync_host_event_set(wsync_event_t event, uint64_t value);
wsync_status_t wsync_host_event_wait(wsync_event_t event, uint64_t value, int timeout_ms,
                                     wsync_error_t *err);
uint64_t wsync_host_event_query(wsync_event_t event);

wsync_status_t wsync_host_stream_create(unsigned threads, wsync_stream_t **stream,
                                        wsync_error_t *err);
bool wsync_host_stream_destroy(wsync_stream_t *stream);
wsync_status_t wsync_host_stream_copy(wsync_stream_t *stream, const wsync_copy_t *copies,
                                      size_t count, const wsync_span_t *sources,
                                      size_t source_count, const wsync_span_t *destinations,
                                      size_t destination_count, wsync_error_t *err);
wsync_status_t wsync_host_stream_record(wsync_stream_t *stream, wsync_event_t event,
                                        uint64_t value, wsync_error_t *err);
wsync_status_t wsync_host_stream_wait(wsync_stream_t *stream, wsync_event_t event,
                                      uint64_t value, wsync_error_t *err);
unsigned wsync_host_stream_ahead(wsync_stream_t *stream);
bool wsync_host_stream_abandon(wsync_stream_t *stream, int timeout_ms);
wsync_status_t wsync_host_stream_synchronize(wsync_stream_t *stream, int timeout_ms,
                                             wsync_error_t *err);

void wsync_host_stream_trace(wsync_stream_t *stream, wsync_stream_span_t *next,
                             size_t capacity, wsync_stream_span_t **spans, size_t *count);

/* Now plus timeout_ms (below 0 counts as 0) on CLOCK_MONOTONIC, in nanoseconds. */
uint64_t wsync_host_deadline(int timeout_ms);

#endif
