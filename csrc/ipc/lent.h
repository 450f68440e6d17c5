/* SPDX-License-Identifier: Apache-2.0
 * What a worker has mapped of the memory that a trainer rank lends, and where the buffers
 * of a manifest lie in it. */
#ifndef WSYNC_IPC_LENT_H
#define WSYNC_IPC_LENT_H

#include "core/base/array.h"
#include "ipc/session.h"

/* More than this are a mistake, and each takes a descriptor. */
enum { WSYNC_LENT_MAX_SEGMENTS = 1 << 16 };

/* Begins with all 0. */
typedef struct wsync_lent {
    WSYNC_ARRAY(wsync_memory_t *) segments; /* owned */
    WSYNC_ARRAY(uint64_t) numbers;          /* of these; ascending */
    uint64_t next;                          /* number */
    WSYNC_ARRAY(int) coming;                /* owned descriptors of that one, so far */
    wsync_span_t *spans;                    /* of the buffers; NULL: none are bound */
    size_t span_count;
    uint64_t generation; /* of the spans */
} wsync_lent_t;

void wsync_lent_fini(wsync_lent_t *lent);
/* Maps a segment when all of its descriptors have come, of which `left` are on their way;
 * those of the frame are moved.  PROTOCOL unless `number` is the next one, or with more
 * than WSYNC_LENT_MAX_SEGMENTS. */
wsync_status_t wsync_lent_add(wsync_lent_t *lent, const wsync_device_t *device,
                              wsync_frame_t *frame, wsync_error_t *err);
/* Takes the bindings of a blob, and drops the segments that they do not name.  PROTOCOL,
 * with everything as it was, if one of them is of bytes that no segment has. */
wsync_status_t wsync_lent_bind(wsync_lent_t *lent, int fd, uint64_t nbytes,
                               wsync_error_t *err);
/* Nothing is bound any more. */
void wsync_lent_unbind(wsync_lent_t *lent);
/* Gives the memory of all segments back, whoever still holds one of them, and lets go of
 * all.  STATE where somebody has pinned one, or what wsync_memory_park says: that one keeps
 * its bytes, the others have lost theirs. */
wsync_status_t wsync_lent_release(wsync_lent_t *lent, wsync_error_t *err);
/* REFUSED if a segment has shrunk. */
wsync_status_t wsync_lent_check(const wsync_lent_t *lent, wsync_error_t *err);

#endif
