/* SPDX-License-Identifier: Apache-2.0
 * Covers a box with other boxes and tells which part of it comes from which of them.
 * Candidates are offered one after another; each serves what no earlier one has served. */
#ifndef WSYNC_CORE_BOX_COVER_H
#define WSYNC_CORE_BOX_COVER_H

#include "core/base/array.h"
#include "core/base/status.h"
#include "core/layout/box.h"

typedef WSYNC_ARRAY(wsync_box_t) wsync_boxes_t;

/* Initialise with {0}, release with wsync_cover_fini. */
typedef struct wsync_cover {
    wsync_boxes_t missing; /* disjoint parts of the box that nothing serves yet */
    wsync_boxes_t next;    /* scratch: the missing parts after the present offer */
} wsync_cover_t;

/* Called for each part of the box that the offered one serves.  Another status than
 * WSYNC_OK ends wsync_cover_offer, which returns it. */
typedef wsync_status_t (*wsync_cover_func_t)(void *context, const wsync_box_t *part);

/* Starts with a new box, of which everything is missing. */
wsync_status_t wsync_cover_start(wsync_cover_t *cover, const wsync_box_t *box,
                                 wsync_error_t *err);

wsync_status_t wsync_cover_offer(wsync_cover_t *cover, const wsync_box_t *offered,
                                 wsync_cover_func_t serve, void *context,
                                 wsync_error_t *err);

void wsync_cover_fini(wsync_cover_t *cover);

#endif
