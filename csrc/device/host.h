/* SPDX-License-Identifier: Apache-2.0
 * Host backend: memfd memory, worker threads as streams. */
#ifndef WSYNC_DEVICE_HOST_H
#define WSYNC_DEVICE_HOST_H

#include "device/device.h"

extern const wsync_memory_ops_t wsync_host_memory_ops;

/* Bytes that may still be allocated: the machine's, or what this process's control group
 * (version 1 or 2) leaves of its limit.  `root` stands before the system's paths: "". */
uint64_t wsync_host_memory_available(const char *root);

#endif
