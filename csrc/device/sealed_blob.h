/* SPDX-License-Identifier: Apache-2.0
 * Bytes too large for a frame, passed as a sealed memfd, which no process can change. */
#ifndef WSYNC_DEVICE_SEALED_BLOB_H
#define WSYNC_DEVICE_SEALED_BLOB_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"

#define WSYNC_BLOB_MAX_NBYTES (UINT64_C(1) << 30)

/* *fd (owned by the caller) is a memfd with a copy of the bytes, sealed against shrinking,
 * growth and writing.  INVALID above WSYNC_BLOB_MAX_NBYTES. */
wsync_status_t wsync_blob_create(const uint8_t *data, size_t nbytes, int *fd,
                                 wsync_error_t *err);
/* Copies a peer's blob out.  fd is borrowed, *data owned by the caller: free().  REFUSED if
 * a seal is missing, PROTOCOL if the size is not nbytes or above the limit. */
wsync_status_t wsync_blob_read(int fd, uint64_t nbytes, uint8_t **data, wsync_error_t *err);

#endif
