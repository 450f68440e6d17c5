/* SPDX-License-Identifier: Apache-2.0 */
#include "core/layout/box.h"

wsync_box_t wsync_box_whole(unsigned ndim, const int64_t *shape)
{
    wsync_box_t box;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        box.start[i] = 0;
        box.extent[i] = i < ndim ? shape[i] : 1;
    }
    return box;
}

uint64_t wsync_box_count(const wsync_box_t *box)
{
    uint64_t count = 1;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        if (box->extent[i] <= 0) {
            return 0;
        }
        count *= (uint64_t)box->extent[i];
    }
    return count;
}

bool wsync_box_equal(const wsync_box_t *a, const wsync_box_t *b)
{
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        if (a->start[i] != b->start[i] || a->extent[i] != b->extent[i]) {
            return false;
        }
    }
    return true;
}

bool wsync_box_intersect(const wsync_box_t *a, const wsync_box_t *b, wsync_box_t *out)
{
    wsync_box_t common;

    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        const int64_t a_end = a->start[i] + a->extent[i];
        const int64_t b_end = b->start[i] + b->extent[i];
        const int64_t start = a->start[i] > b->start[i] ? a->start[i] : b->start[i];
        const int64_t end = a_end < b_end ? a_end : b_end;

        if (start >= end) {
            return false;
        }
        common.start[i] = start;
        common.extent[i] = end - start;
    }
    *out = common;
    return true;
}

unsigned wsync_box_subtract(const wsync_box_t *a, const wsync_box_t *hole,
                            wsync_box_t out[2 * WSYNC_MAX_NDIM])
{
    wsync_box_t rest = *a;
    unsigned count = 0;

    /* Cut off what lies before and after the hole along one axis, then go on with the slab
     * between the cuts: the pieces are disjoint and the last slab is the hole itself. */
    for (unsigned i = 0; i < WSYNC_MAX_NDIM; i++) {
        const int64_t before = hole->start[i] - rest.start[i];
        const int64_t after = rest.extent[i] - before - hole->extent[i];

        if (before > 0) {
            out[count] = rest;
            out[count].extent[i] = before;
            count++;
        }
        if (after > 0) {
            out[count] = rest;
            out[count].start[i] = hole->start[i] + hole->extent[i];
            out[count].extent[i] = after;
            count++;
        }
        rest.start[i] = hole->start[i];
        rest.extent[i] = hole->extent[i];
    }
    return count;
}
