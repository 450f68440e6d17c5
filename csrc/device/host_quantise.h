/* SPDX-License-Identifier: Apache-2.0
 * Quantising by the processor.  Callers have checked the bounds (wsync_quantise_check); the
 * image and the table of amaxes overlap nothing that is read. */
#ifndef WSYNC_DEVICE_HOST_QUANTISE_H
#define WSYNC_DEVICE_HOST_QUANTISE_H

#include <stdint.h>

#include "device/device.h"
#include "device/host_copy.h"

/* A batch as several threads share it, like wsync_host_list_t: its work is about the bytes
 * it reads, and any partition of [0, work) into parts does everything exactly once. */
typedef struct wsync_host_quantise {
    wsync_quantise_batch_t batch;
    uint64_t work;
} wsync_host_quantise_t;

wsync_host_quantise_t wsync_host_quantise(const wsync_quantise_batch_t *batch);

/* Runs the part [begin, end) of the work. */
void wsync_host_quantise_run(const wsync_host_quantise_t *list, uint64_t begin,
                             uint64_t end, wsync_host_cursor_t *cursor);

#endif
