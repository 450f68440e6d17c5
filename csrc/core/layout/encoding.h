/* SPDX-License-Identifier: Apache-2.0
 * Layouts as bytes.  Whatever the bytes are, decoding stays inside them. */
#ifndef WSYNC_CORE_LAYOUT_ENCODING_H
#define WSYNC_CORE_LAYOUT_ENCODING_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/layout/layout.h"

/* Allocates *data (owned by the caller: free()). */
wsync_status_t wsync_layout_encode(const wsync_layout_t *layout, uint8_t **data,
                                   size_t *nbytes, wsync_error_t *err);

/* PROTOCOL names the byte offset and the value that is wrong.  Allocates at most 100 *
 * nbytes + 512 KiB (a shard may be as short as four bytes).  Bytes after the layout are an
 * error. */
wsync_status_t wsync_layout_decode(const uint8_t *data, size_t nbytes,
                                   wsync_layout_t **layout, wsync_error_t *err);

#endif
