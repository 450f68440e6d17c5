/* SPDX-License-Identifier: Apache-2.0
 * The link to one peer process: a channel whose frames are handled as they come, and words
 * in control memory that both map.  A session has one, an exchange has one for each other
 * rank. */
#ifndef WSYNC_IPC_LINK_H
#define WSYNC_IPC_LINK_H

#include <stdbool.h>

#include "device/deadline.h"
#include "device/device.h"
#include "ipc/channel.h"

/* Frames that any peer may send at any time; the payload is text. */
enum {
    WSYNC_LINK_ABORT = 8,
    WSYNC_LINK_FAILED = 9,
};

/* Whether a session or an exchange has ended, and why.  Begins with its name, all else
 * 0. */
typedef struct wsync_ending {
    const char *name; /* "session" */
    bool ended;
    char reason[WSYNC_ERROR_MESSAGE_NBYTES];
} wsync_ending_t;

/* STATE if it has ended. */
wsync_status_t wsync_ending_check(const wsync_ending_t *ending, wsync_error_t *err);
/* Notes the end.  The first reason stays. */
void wsync_ending_note(wsync_ending_t *ending, const char *reason);
/* Notes the end unless `status` is OK or TIMEOUT; returns it.  Calls that were refused
 * before they changed anything (STATE, INVALID) do not come here. */
wsync_status_t wsync_ending_note_failure(wsync_ending_t *ending, wsync_status_t status,
                                         const wsync_error_t *err);

/* What a call waits for, for error messages: "round 7" or, without a number (-1), "the
 * commit". */
typedef struct wsync_awaited {
    const char *what;
    int64_t number;
} wsync_awaited_t;

enum { WSYNC_LINK_PEER_NBYTES = 24, WSYNC_LINK_TEXT_NBYTES = 600 };

/* Begins with the peer, name, owner and functions, all else 0. */
typedef struct wsync_link {
    char peer[WSYNC_LINK_PEER_NBYTES]; /* "worker", "rank 3" */
    const char *name;                  /* of what the link is part of: "session" */
    wsync_channel_t *channel;          /* owned; NULL: there is no peer yet, or no longer */
    wsync_memory_t *control;           /* owned; the words that the peer writes */
    int pid;                           /* of the peer */
    bool departed; /* the peer has said that it leaves: then its end is no failure */
    bool recorded; /* the next announcement's record is enqueued, its frame not sent */

    void *owner;
    /* Takes one frame into the owner's state.  PROTOCOL: wsync_link_unexpected. */
    wsync_status_t (*handle)(void *owner, wsync_frame_t *frame, wsync_error_t *err);
    /* False while no further frame may be read, because the owner's caller has not taken
     * the result of the last one yet.  NULL: always true. */
    bool (*can_accept)(const void *owner);
    /* Called while a wait goes on: handles the frames that have come, also those of other
     * links.  NULL: wsync_link_drain of this link. */
    wsync_status_t (*look)(void *owner, wsync_awaited_t awaited, wsync_error_t *err);
} wsync_link_t;

/* The peer has connected; moves the channel. */
void wsync_link_open(wsync_link_t *link, wsync_channel_t *channel);
/* Closes the channel and sends nothing. */
void wsync_link_close(wsync_link_t *link);
/* Sends text, unless the peer's queue is full, and closes; never fails. */
void wsync_link_close_with(wsync_link_t *link, uint32_t kind, const char *text);

/* Puts text into a frame, as much of it as there is room for. */
void wsync_link_write(wsync_frame_t *frame, const char *text);
/* A peer's text for a message: printable, so that it cannot forge lines of a log. */
void wsync_link_read(const wsync_frame_t *frame, char text[WSYNC_LINK_TEXT_NBYTES]);

/* CLOSED if the peer is gone; what it sent before says why, if it sent anything. */
wsync_status_t wsync_link_send(wsync_link_t *link, const wsync_frame_t *frame,
                               int timeout_ms, wsync_awaited_t awaited, wsync_error_t *err);
/* Has the stream record `value` in the word at `offset`, then sends the frame that
 * announces it; without a stream (NULL) only sends.  Handles first what has come.  After
 * TIMEOUT a call with the same arguments sends the frame, and does not record again. */
wsync_status_t wsync_link_announce(wsync_link_t *link, wsync_stream_t *stream,
                                   uint64_t offset, uint64_t value,
                                   const wsync_frame_t *frame, int timeout_ms,
                                   wsync_awaited_t awaited, wsync_error_t *err);
/* Receives one frame and lets the owner handle it. */
wsync_status_t wsync_link_pump(wsync_link_t *link, int64_t deadline_ms,
                               wsync_awaited_t awaited, wsync_error_t *err);
/* Handles all frames that have come, without waiting: so the next call here reports a
 * failure of the peer. */
wsync_status_t wsync_link_drain(wsync_link_t *link, wsync_awaited_t awaited,
                                wsync_error_t *err);
/* Waits until a word has reached `value`, and handles frames meanwhile. */
wsync_status_t wsync_link_wait_word(wsync_link_t *link, uint64_t offset, uint64_t value,
                                    int64_t deadline_ms, wsync_awaited_t awaited,
                                    wsync_error_t *err);
/* Has a stream wait until a word has reached `value`.  Returns when the word lacks at most
 * wsync_stream_ahead of it.  Without a stream (NULL): wsync_link_wait_word. */
wsync_status_t wsync_link_order(wsync_link_t *link, wsync_stream_t *stream, uint64_t offset,
                                uint64_t value, int64_t deadline_ms,
                                wsync_awaited_t awaited, wsync_error_t *err);
wsync_event_t wsync_link_event(const wsync_link_t *link, uint64_t offset);

/* CLOSED, TIMEOUT and PROTOCOL with the peer's name. */
wsync_status_t wsync_link_fail_closed(const wsync_link_t *link, int native,
                                      wsync_awaited_t awaited, wsync_error_t *err);
wsync_status_t wsync_link_fail_timeout(const wsync_link_t *link, wsync_awaited_t awaited,
                                       wsync_error_t *err);
wsync_status_t wsync_link_unexpected(const wsync_link_t *link, const wsync_frame_t *frame,
                                     wsync_error_t *err);

#endif
