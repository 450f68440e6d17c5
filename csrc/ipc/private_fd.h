/* SPDX-License-Identifier: Apache-2.0
 * Descriptors that processes forked from this one do not keep.  A socket whose other end is
 * to hear when this process ends must not stay open in one that goes on. */
#ifndef WSYNC_IPC_PRIVATE_FD_H
#define WSYNC_IPC_PRIVATE_FD_H

/* One descriptor; -1: none, as in a process that was forked since. */
typedef struct wsync_private_fd {
    int fd;
    struct wsync_private_fd *next;
    struct wsync_private_fd *previous;
} wsync_private_fd_t;

/* Takes a descriptor; `self` may not move until it is closed. */
void wsync_private_fd_take(wsync_private_fd_t *self, int fd);

/* Closes it, if there is one. */
void wsync_private_fd_close(wsync_private_fd_t *self);

#endif
