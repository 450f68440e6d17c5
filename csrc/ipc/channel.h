/* SPDX-License-Identifier: Apache-2.0
 * Frames and descriptors between two processes of one user on one host: a SEQPACKET unix
 * socket in a 0700 directory.  A peer must have the same uid (SO_PEERCRED); what it sends is
 * parsed as hostile. */
#ifndef WSYNC_IPC_CHANNEL_H
#define WSYNC_IPC_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

enum {
    WSYNC_FRAME_PAYLOAD_NBYTES = 4096,
    WSYNC_FRAME_FDS = 4,
    WSYNC_TOKEN_NBYTES = 16,
};

/* One message.  Descriptors are owned by whoever holds the frame: a received frame's are
 * closed by wsync_frame_fini unless taken (set to -1); sending borrows them. */
typedef struct wsync_frame {
    uint32_t kind;
    uint32_t payload_nbytes;
    uint64_t arguments[4];
    int fds[WSYNC_FRAME_FDS];
    uint32_t fd_count;
    uint8_t payload[WSYNC_FRAME_PAYLOAD_NBYTES];
} wsync_frame_t;

void wsync_frame_fini(wsync_frame_t *frame);

typedef struct wsync_listener wsync_listener_t;
typedef struct wsync_channel wsync_channel_t;

/* Makes a private directory (under `parent`, or TMPDIR, or /tmp) and listens in it.  INVALID
 * if the path would not fit sun_path. */
wsync_status_t wsync_listener_create(const char *parent, wsync_listener_t **listener,
                                     wsync_error_t *err);
/* Removes socket and directory. */
void wsync_listener_destroy(wsync_listener_t *listener);
const char *wsync_listener_path(const wsync_listener_t *listener);

/* Waits for a peer that shows `token` in its first frame (kind `hello`), which is moved to
 * *hello.  Strangers (other uid, wrong token, malformed first frame, silence for a second)
 * are closed and do not end the wait; *refused (NULL allowed) counts them.  TIMEOUT after
 * timeout_ms. */
wsync_status_t wsync_listener_accept(wsync_listener_t *listener,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     int timeout_ms, wsync_channel_t **channel,
                                     wsync_frame_t *hello, unsigned *refused,
                                     wsync_error_t *err);

/* Connects and sends `hello` with the token put before its payload. */
wsync_status_t wsync_channel_connect(const char *path,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     const wsync_frame_t *hello, int timeout_ms,
                                     wsync_channel_t **channel, wsync_error_t *err);
void wsync_channel_destroy(wsync_channel_t *channel);

/* CLOSED if the peer is gone, TIMEOUT if its queue stays full. */
wsync_status_t wsync_channel_send(wsync_channel_t *channel, const wsync_frame_t *frame,
                                  int timeout_ms, wsync_error_t *err);
/* *frame is overwritten (not released) on success and untouched on failure.  TIMEOUT: no
 * frame yet, the channel is still good.  PROTOCOL: malformed, the channel is unusable. */
wsync_status_t wsync_channel_receive(wsync_channel_t *channel, wsync_frame_t *frame,
                                     int timeout_ms, wsync_error_t *err);
/* Pid the peer had when it connected. */
int wsync_channel_peer_pid(const wsync_channel_t *channel);
int wsync_channel_fd(const wsync_channel_t *channel);

#endif
