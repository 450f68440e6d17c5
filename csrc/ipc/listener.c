/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device/deadline.h"
#include "ipc/channel_internal.h"
#include "ipc/private_fd.h"

enum {
    LISTEN_BACKLOG = 128,
    SILENCE_MS = 2000,
};

static const char directory_suffix[] = "/wsync-XXXXXX";
static const char socket_suffix[] = "/s";

struct wsync_listener {
    wsync_private_fd_t socket;
    pid_t owner; /* forks must not remove the files */
    bool bound;
    char directory[WSYNC_PATH_NBYTES]; /* empty until it exists */
    char path[WSYNC_PATH_NBYTES];
    wsync_channel_t *pending; /* has not shown its token yet */
    int64_t pending_until_ms;
};

static bool path_fits(const char *parent)
{
    return strlen(parent) + sizeof(directory_suffix) - 1 + sizeof(socket_suffix) <=
           WSYNC_PATH_NBYTES;
}

static wsync_status_t make_directory(wsync_listener_t *self, const char *parent,
                                     wsync_error_t *err)
{
    char name[WSYNC_PATH_NBYTES];

    if (parent == NULL) {
        parent = getenv("TMPDIR");
        if (parent == NULL || parent[0] != '/' || !path_fits(parent)) {
            parent = "/tmp";
        }
    }
    if (!path_fits(parent)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "listener",
                          "%s: socket path would have %zu bytes, the limit is %d", parent,
                          strlen(parent) + strlen(directory_suffix) + strlen(socket_suffix),
                          WSYNC_PATH_NBYTES - 1);
    }
    (void)snprintf(name, sizeof(name), "%s%s", parent, directory_suffix);
    if (mkdtemp(name) == NULL) { /* mode 0700 */
        return wsync_fail(err, WSYNC_ERR_OS, errno, "mkdtemp", "mkdtemp: %s: %s", name,
                          strerror(errno));
    }
    memcpy(self->directory, name, sizeof(name));
    (void)snprintf(self->path, sizeof(self->path), "%.*s%s",
                   (int)(sizeof(self->path) - sizeof(socket_suffix)), name, socket_suffix);
    return WSYNC_OK;
}

wsync_status_t wsync_listener_create(const char *parent, wsync_listener_t **listener,
                                     wsync_error_t *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    wsync_listener_t *self = calloc(1, sizeof(*self));
    wsync_status_t status;
    int fd;

    if (self == NULL) {
        return wsync_no_memory(err, "listener");
    }
    self->socket.fd = -1;
    self->owner = getpid();
    status = make_directory(self, parent, err);
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        status =
            wsync_fail(err, WSYNC_ERR_OS, errno, "socket", "socket: %s", strerror(errno));
        goto cleanup;
    }
    memcpy(address.sun_path, self->path, sizeof(self->path));
    wsync_private_fd_take(&self->socket, fd);
    if (bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "bind", "bind: %s: %s", self->path,
                            strerror(errno));
        goto cleanup;
    }
    self->bound = true;
    if (listen(fd, LISTEN_BACKLOG) < 0) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "listen", "listen: %s: %s",
                            self->path, strerror(errno));
        goto cleanup;
    }
    *listener = self;
    self = NULL;

cleanup:
    wsync_listener_destroy(self);
    return status;
}

void wsync_listener_destroy(wsync_listener_t *listener)
{
    if (listener == NULL) {
        return;
    }
    wsync_channel_destroy(listener->pending);
    wsync_private_fd_close(&listener->socket);
    if (listener->owner == getpid()) {
        if (listener->bound) {
            (void)unlink(listener->path);
        }
        if (listener->directory[0] != '\0') {
            (void)rmdir(listener->directory);
        }
    }
    free(listener);
}

const char *wsync_listener_path(const wsync_listener_t *listener)
{
    return listener->path;
}

static void drop_pending(wsync_listener_t *self)
{
    wsync_channel_destroy(self->pending);
    self->pending = NULL;
}

/* Takes the next connection, if there is one. */
static wsync_status_t take_connection(wsync_listener_t *self, wsync_error_t *err)
{
    const int fd = accept4(self->socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    wsync_status_t status;

    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN)) {
        return WSYNC_OK;
    }
    if (fd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "accept4", "accept4: %s: %s",
                          self->path, strerror(errno));
    }
    status = wsync_channel_adopt(fd, &self->pending, err);
    self->pending_until_ms = wsync_deadline_ms(SILENCE_MS);
    return status == WSYNC_ERR_REFUSED ? WSYNC_OK : status;
}

/* Looks whether a connection has said hello.  TIMEOUT: not yet, or it was a stranger. */
static wsync_status_t try_pending(wsync_listener_t *self,
                                  const uint8_t token[WSYNC_TOKEN_NBYTES],
                                  wsync_frame_t *hello, wsync_error_t *err)
{
    wsync_frame_t frame;
    const wsync_status_t status = wsync_channel_receive(self->pending, &frame, 0, err);

    if (status == WSYNC_ERR_TIMEOUT && wsync_left_ms(self->pending_until_ms, 1) > 0) {
        return WSYNC_ERR_TIMEOUT;
    }
    if (status != WSYNC_OK) {
        drop_pending(self);
        /* this process's trouble: no stranger brings it about */
        return status == WSYNC_ERR_OS ? status : WSYNC_ERR_TIMEOUT;
    }
    if (frame.kind != WSYNC_FRAME_HELLO || frame.payload_nbytes < WSYNC_TOKEN_NBYTES ||
        memcmp(frame.payload, token, WSYNC_TOKEN_NBYTES) != 0) {
        wsync_frame_fini(&frame);
        drop_pending(self);
        return WSYNC_ERR_TIMEOUT;
    }
    frame.payload_nbytes -= WSYNC_TOKEN_NBYTES;
    memmove(frame.payload, frame.payload + WSYNC_TOKEN_NBYTES, frame.payload_nbytes);
    *hello = frame;
    return WSYNC_OK;
}

static wsync_status_t wait_activity(const wsync_listener_t *self, int64_t deadline,
                                    wsync_error_t *err)
{
    struct pollfd entry = {.fd = self->socket.fd, .events = POLLIN};
    int left = wsync_left_ms(deadline, INT_MAX);

    if (left == 0) {
        return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "listener",
                          "deadline passed: nobody with the right token connected to %s",
                          self->path);
    }
    if (self->pending != NULL) {
        entry.fd = wsync_channel_fd(self->pending);
        left = wsync_left_ms(self->pending_until_ms, left);
    }
    if (poll(&entry, 1, left) < 0 && errno != EINTR) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "poll", "poll: %s", strerror(errno));
    }
    return WSYNC_OK;
}

wsync_status_t wsync_listener_accept(wsync_listener_t *listener,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     int timeout_ms, wsync_channel_t **channel,
                                     wsync_frame_t *hello, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);

    for (;;) {
        wsync_status_t status =
            listener->pending == NULL ? take_connection(listener, err) : WSYNC_OK;

        if (status == WSYNC_OK && listener->pending != NULL) {
            status = try_pending(listener, token, hello, err);
            if (status == WSYNC_OK) {
                *channel = listener->pending;
                listener->pending = NULL;
                return WSYNC_OK;
            }
        }
        if (status == WSYNC_OK || status == WSYNC_ERR_TIMEOUT) {
            status = wait_activity(listener, deadline, err);
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
}
