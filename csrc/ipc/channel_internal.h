/* SPDX-License-Identifier: Apache-2.0
 * What listener.c and channel.c share. */
#ifndef WSYNC_IPC_CHANNEL_INTERNAL_H
#define WSYNC_IPC_CHANNEL_INTERNAL_H

#include <stdbool.h>
#include <sys/types.h>
#include <sys/un.h>

#include "ipc/channel.h"
#include "ipc/private_fd.h"

_Static_assert(sizeof(((struct sockaddr_un *)0)->sun_path) == WSYNC_PATH_NBYTES,
               "sun_path has another size");

struct wsync_channel {
    wsync_private_fd_t socket;
    int peer_pid;
    pid_t owner; /* of this end */
};

/* Wraps a connected, non-blocking socket, which is moved (closed on failure).  REFUSED if
 * the peer's uid is not this process's. */
wsync_status_t wsync_channel_adopt(int fd, wsync_channel_t **channel, wsync_error_t *err);

#endif
