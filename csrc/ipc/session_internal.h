/* SPDX-License-Identifier: Apache-2.0
 * The link under both halves of a session: frames that are awaited, words in the control
 * page, and how the other side's end is told. */
#ifndef WSYNC_IPC_SESSION_INTERNAL_H
#define WSYNC_IPC_SESSION_INTERNAL_H

#include <stdbool.h>

#include "device/deadline.h"
#include "ipc/session.h"

/* Frames of a session; what is not named is zero. */
enum {
    SESSION_ATTACH = 2,   /* ring, manifest and control sizes (control 0: as before); fds */
    SESSION_BEGIN = 3,    /* update, round_count, base; fd: the ring's, if it is parked */
    SESSION_ROUND = 4,    /* round */
    SESSION_DONE = 5,     /* round, 1 if the slot is free already and no word will follow */
    SESSION_PREPARED = 6, /* tensor_count, nbytes, checksum */
    SESSION_COMMIT = 7,   /* 1 to park the ring */
    SESSION_ABORT = 8,    /* payload: text */
    SESSION_FAILED = 9,   /* payload: text */
    SESSION_PARKED = 10,  /* 1, or 0 if it cannot be; payload: text that says why */
};

/* HELLO's arguments: blob size, the two halves of the worker's UUID, this word ("session").
 */
#define SESSION_PURPOSE UINT64_C(0x6e6f6973736573)

enum {
    SESSION_CONTROL_NBYTES = 4096,
    SESSION_READY_OFFSET = 0, /* written by the exporter's streams */
    SESSION_DONE_OFFSET = 64, /* written by the importer's; a cache line of its own */
    SESSION_WORD_SLICE_MS = 10,
    SESSION_FAREWELL_MS = 100,
};

/* What a wait is for, for messages: "round 7" or, without a number (-1), "the commit". */
typedef struct wsync_awaited {
    const char *what;
    int64_t number;
} wsync_awaited_t;

typedef struct wsync_link {
    wsync_channel_t *channel; /* NULL before there is a peer and after the end */
    wsync_memory_t *control;
    const char *peer; /* "worker", "trainer" */
    uint64_t base;    /* rounds of all earlier updates */
    bool ended;
    char reason[WSYNC_ERROR_MESSAGE_NBYTES]; /* why, once ended */

    /* handle takes one frame into the owner's state.  hungry is false while that state has
     * no room for another: its caller must first see what came. */
    wsync_status_t (*handle)(void *owner, wsync_frame_t *frame, wsync_error_t *err);
    bool (*hungry)(const void *owner);
    void *owner;
} wsync_link_t;

/* STATE if the session has ended. */
wsync_status_t wsync_link_check(const wsync_link_t *link, wsync_error_t *err);
/* INVALID for a stream (NULL: none) of another device than the session's. */
wsync_status_t wsync_link_check_stream(const wsync_link_t *link,
                                       const wsync_stream_t *stream, wsync_error_t *err);
/* Notes the end unless `status` is OK or TIMEOUT; returns it.  Calls that were refused
 * before they changed anything (STATE, INVALID) do not come here. */
wsync_status_t wsync_link_settle(wsync_link_t *link, wsync_status_t status,
                                 const wsync_error_t *err);
/* Says nothing, closes. */
void wsync_link_end(wsync_link_t *link, const char *reason);
/* Puts text into a frame, as much of it as there is room for. */
void wsync_link_write(wsync_frame_t *frame, const char *text);
/* A peer's words for a message: printable, so that they cannot forge lines of a log. */
void wsync_link_read(const wsync_frame_t *frame, char *text, size_t nbytes);
/* Tells the peer and closes; never fails. */
void wsync_link_farewell(wsync_link_t *link, uint32_t kind, const char *text);
/* Closes and releases the control page. */
void wsync_link_fini(wsync_link_t *link);

wsync_status_t wsync_link_send(wsync_link_t *link, const wsync_frame_t *frame,
                               int timeout_ms, wsync_awaited_t awaited, wsync_error_t *err);
/* Receives one frame and lets the owner handle it. */
wsync_status_t wsync_link_pump(wsync_link_t *link, int timeout_ms, wsync_awaited_t awaited,
                               wsync_error_t *err);
/* Handles what has come already: a failure over there is noticed by the next call here. */
wsync_status_t wsync_link_drain(wsync_link_t *link, wsync_awaited_t awaited,
                                wsync_error_t *err);
/* Waits for a word, looking at the socket all the while. */
wsync_status_t wsync_link_wait_word(wsync_link_t *link, uint64_t offset, uint64_t value,
                                    int64_t deadline_ms, wsync_awaited_t awaited,
                                    wsync_error_t *err);
/* The same on a stream, where there is one: returns when no more than stream_ahead rounds
 * wait there. */
wsync_status_t wsync_link_order(wsync_link_t *link, wsync_stream_t *stream, uint64_t offset,
                                uint64_t value, int64_t deadline_ms,
                                wsync_awaited_t awaited, wsync_error_t *err);
wsync_event_t wsync_link_event(const wsync_link_t *link, uint64_t offset);

/* PROTOCOL: a frame that has no business here. */
wsync_status_t wsync_link_unexpected(const wsync_link_t *link, const wsync_frame_t *frame,
                                     wsync_error_t *err);

#endif
