/* SPDX-License-Identifier: Apache-2.0
 * Frames and descriptors between two processes of one user on one host: a SEQPACKET unix
 * socket in a 0700 directory.  A peer must have the same uid (SO_PEERCRED); what it sends
 * is parsed as hostile. */
#ifndef WSYNC_IPC_CHANNEL_H
#define WSYNC_IPC_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/status.h"

enum {
    WSYNC_FRAME_PAYLOAD_NBYTES = 4096,
    WSYNC_FRAME_FDS = 4,
    WSYNC_TOKEN_NBYTES = 16,
    WSYNC_FRAME_HELLO = 1, /* the first frame of a connection; other kinds are the users' */
    WSYNC_PATH_NBYTES = 108, /* of sun_path, with the final NUL */
    WSYNC_ADDRESS_NBYTES = 2 * WSYNC_TOKEN_NBYTES + 1 + WSYNC_PATH_NBYTES,
};

/* What a peer needs to connect: "<token in hex>@<socket path>". */
void wsync_address_format(const uint8_t token[WSYNC_TOKEN_NBYTES], const char *path,
                          char address[WSYNC_ADDRESS_NBYTES]);
/* INVALID says what is wrong with the text. */
wsync_status_t wsync_address_parse(const char *address, uint8_t token[WSYNC_TOKEN_NBYTES],
                                   char path[WSYNC_PATH_NBYTES], wsync_error_t *err);
/* Fresh random bytes from the kernel. */
wsync_status_t wsync_token_create(uint8_t token[WSYNC_TOKEN_NBYTES], wsync_error_t *err);

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

/* Makes a private directory (under `parent`, or TMPDIR if it is short enough, or /tmp) and
 * listens in it.  INVALID if the path under `parent` would not fit sun_path. */
wsync_status_t wsync_listener_create(const char *parent, wsync_listener_t **listener,
                                     wsync_error_t *err);
/* Removes socket and directory (in the process that made them, not in its forks). */
void wsync_listener_destroy(wsync_listener_t *listener);
const char *wsync_listener_path(const wsync_listener_t *listener);

/* Waits for a peer that sends `token` in its first frame (kind HELLO), which is moved to
 * *hello without the token.  Connections are heard one after another; those of strangers
 * (other uid, wrong token, malformed first frame, none within two seconds) are closed, and
 * do not end the wait.  TIMEOUT after timeout_ms; a connection without a first frame so far
 * is kept for the next call. */
wsync_status_t wsync_listener_accept(wsync_listener_t *listener,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     int timeout_ms, wsync_channel_t **channel,
                                     wsync_frame_t *hello, wsync_error_t *err);

/* Connects and sends `hello`, as kind HELLO and with the token put before its payload.
 * CLOSED if nobody listens at `path`, REFUSED if another user does, TIMEOUT if the
 * listener's queue stays full. */
wsync_status_t wsync_channel_connect(const char *path,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     const wsync_frame_t *hello, int timeout_ms,
                                     wsync_channel_t **channel, wsync_error_t *err);
/* Channels belong to the process that made them: in a fork destroy only closes its copy of
 * the socket, and send and receive return STATE. */
void wsync_channel_destroy(wsync_channel_t *channel);

/* CLOSED if the peer is gone, TIMEOUT if its queue stays full: nothing was sent then. */
wsync_status_t wsync_channel_send(wsync_channel_t *channel, const wsync_frame_t *frame,
                                  int timeout_ms, wsync_error_t *err);
/* *frame is overwritten (not released) on success and untouched on failure.  TIMEOUT: no
 * frame yet, the channel can still be used; *err has no message if timeout_ms is not
 * positive, because sessions poll at every step.  CLOSED: the peer is gone and everything
 * it sent has been received.  PROTOCOL: malformed, or descriptors were lost; the channel is
 * unusable. */
wsync_status_t wsync_channel_receive(wsync_channel_t *channel, wsync_frame_t *frame,
                                     int timeout_ms, wsync_error_t *err);
/* Pid the peer had when it connected. */
int wsync_channel_peer_pid(const wsync_channel_t *channel);
int wsync_channel_fd(const wsync_channel_t *channel);

#endif
