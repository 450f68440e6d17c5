/* SPDX-License-Identifier: Apache-2.0
 * What both halves of a session share: the frames and the words in the control page. */
#ifndef WSYNC_IPC_SESSION_INTERNAL_H
#define WSYNC_IPC_SESSION_INTERNAL_H

#include "ipc/link.h"
#include "ipc/session.h"

/* Frames of a session; what is not named is zero. */
enum {
    SESSION_ATTACH = 2,   /* ring, manifest and control sizes (control 0: as before); fds */
    SESSION_BEGIN = 3,    /* update, round_count, base; fd: the ring's, if it is parked */
    SESSION_ROUND = 4,    /* round */
    SESSION_DONE = 5,     /* round, 1 if the slot is free already and no word will follow */
    SESSION_PREPARED = 6, /* tensor_count, nbytes, audit_ns */
    SESSION_COMMIT = 7,   /* 1 to park the ring */
    SESSION_ABORT = WSYNC_LINK_ABORT,   /* payload: text */
    SESSION_FAILED = WSYNC_LINK_FAILED, /* payload: text */
    SESSION_LEND = 11,   /* segment, descriptors of it that follow in other frames; fds */
    SESSION_BIND = 12,   /* size of the wsync_binding_t[]; fd: a blob */
    SESSION_BEGUN = 13,  /* BEGIN has come, and all that was lent before it is mapped */
    SESSION_PARKED = 10, /* 1, or 0 if it cannot be; payload: text that says why */
};

/* HELLO's arguments: blob size, the two halves of the worker's UUID, this word
 * ("session"). */
#define SESSION_PURPOSE UINT64_C(0x6e6f6973736573)

enum {
    SESSION_CONTROL_NBYTES = 4096,
    SESSION_READY_OFFSET = 0, /* written by the exporter's streams */
    SESSION_DONE_OFFSET = 64, /* written by the importer's; a cache line of its own */
    SESSION_PARKED_MS = 100, /* for the last frame of an update, which has been committed */
};

/* INVALID for a stream (NULL: none) of another device than the control memory's. */
static inline wsync_status_t session_check_stream(const wsync_link_t *link,
                                                  const wsync_stream_t *stream,
                                                  wsync_error_t *err)
{
    return stream != NULL
               ? wsync_stream_check(stream, link->control->device, "the session", err)
               : WSYNC_OK;
}

#endif
