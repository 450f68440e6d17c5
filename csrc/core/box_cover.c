/* SPDX-License-Identifier: Apache-2.0 */
#include "core/box_cover.h"

#include <stdlib.h>
#include <string.h>

static wsync_status_t add(wsync_boxes_t *boxes, const wsync_box_t *added, unsigned count,
                          wsync_error_t *err)
{
    if (!WSYNC_ARRAY_RESERVE(*boxes, count)) {
        return wsync_no_memory(err, "cover");
    }
    memcpy(boxes->items + boxes->count, added, count * sizeof(*added));
    boxes->count += count;
    return WSYNC_OK;
}

wsync_status_t wsync_cover_start(wsync_cover_t *cover, const wsync_box_t *box,
                                 wsync_error_t *err)
{
    cover->missing.count = 0;
    return add(&cover->missing, box, 1, err);
}

wsync_status_t wsync_cover_offer(wsync_cover_t *cover, const wsync_box_t *offered,
                                 wsync_cover_func_t serve, void *context,
                                 wsync_error_t *err)
{
    const wsync_boxes_t left = cover->missing;
    wsync_status_t status = WSYNC_OK;

    cover->next.count = 0;
    for (size_t i = 0; i < left.count && status == WSYNC_OK; i++) {
        wsync_box_t rest[2 * WSYNC_MAX_NDIM];
        wsync_box_t common;
        unsigned count = 1;

        rest[0] = left.items[i];
        if (wsync_box_intersect(&left.items[i], offered, &common)) {
            status = serve(context, &common);
            count = wsync_box_subtract(&left.items[i], &common, rest);
        }
        if (status == WSYNC_OK) {
            status = add(&cover->next, rest, count, err);
        }
    }
    cover->missing = cover->next;
    cover->next = left;
    return status;
}

void wsync_cover_fini(wsync_cover_t *cover)
{
    free(cover->missing.items);
    free(cover->next.items);
    *cover = (wsync_cover_t){0};
}
