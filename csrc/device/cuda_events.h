/* SPDX-License-Identifier: Apache-2.0
 * Words of control memory that a stream sets: by a memory operation, or where the device
 * has none of 64 bits by a function of the host. */
#ifndef WSYNC_DEVICE_CUDA_EVENTS_H
#define WSYNC_DEVICE_CUDA_EVENTS_H

#include "device/cuda.h"

/* Enqueues the record of a word; in the context.  *kept is for free() when the stream has
 * passed it, or NULL. */
wsync_status_t wsync_cuda_events_record(const wsync_cuda_device_t *device,
                                        wsync_cu_stream_t stream, wsync_event_t event,
                                        uint64_t value, void **kept, wsync_error_t *err);
/* Enqueues a wait, on a device that has such operations. */
wsync_status_t wsync_cuda_events_wait(const wsync_cuda_device_t *device,
                                      wsync_cu_stream_t stream, wsync_event_t event,
                                      uint64_t value, wsync_error_t *err);

#endif
