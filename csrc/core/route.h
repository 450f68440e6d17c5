/* SPDX-License-Identifier: Apache-2.0
 * A route: the copies that fill one layout from another inside one process, grouped by the
 * source's buffer index (for an engine: by round). */
#ifndef WSYNC_CORE_ROUTE_H
#define WSYNC_CORE_ROUTE_H

#include "core/copy.h"
#include "core/layout/layout.h"

typedef struct wsync_route wsync_route_t;

/* Intersects the boxes of both layouts, tensor by tensor.  Tensors are matched by name and
 * must agree in shape; dtypes may differ where a transform exists.  Every destination byte
 * must be written exactly once (LAYOUT names tensor and box otherwise); where several
 * source shards hold an element the first one serves.  Source tensors unknown to the
 * destination are ignored.  LAYOUT also if overlapping source shards would cut a
 * destination box into tens of thousands of parts. */
wsync_status_t wsync_route_create(const wsync_layout_t *source,
                                  const wsync_layout_t *destination, wsync_route_t **route,
                                  wsync_error_t *err);
void wsync_route_destroy(wsync_route_t *route);

/* Number of source buffers, and the copies that read one of them (borrowed). */
uint32_t wsync_route_buffer_count(const wsync_route_t *route);
const wsync_copy_t *wsync_route_copies(const wsync_route_t *route, uint32_t buffer,
                                       size_t *count);
/* The copies of all buffers below number `end`, one buffer after another (borrowed). */
const wsync_copy_t *wsync_route_copies_below(const wsync_route_t *route, uint64_t end,
                                             size_t *count);

#endif
