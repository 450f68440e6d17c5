/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/channel.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device/deadline.h"
#include "ipc/channel_internal.h"
#include "ipc/frame.h"

enum { CONNECT_RETRY_MS = 5 };

/* Room for one SCM_RIGHTS message, aligned as the kernel wants it. */
typedef union control_buffer {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * WSYNC_FRAME_FDS)];
} control_buffer_t;

wsync_status_t wsync_channel_adopt(int fd, wsync_channel_t **channel, wsync_error_t *err)
{
    struct ucred credentials = {0};
    socklen_t nbytes = sizeof(credentials);
    wsync_channel_t *self;
    wsync_status_t status;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &nbytes) < 0) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "getsockopt",
                            "getsockopt(SO_PEERCRED): %s", strerror(errno));
        goto fail;
    }
    if (credentials.uid != geteuid()) {
        status = wsync_fail(err, WSYNC_ERR_REFUSED, 0, "channel",
                            "process %d runs as user %u, but this process as user %u",
                            (int)credentials.pid, (unsigned)credentials.uid,
                            (unsigned)geteuid());
        goto fail;
    }
    self = malloc(sizeof(*self));
    if (self == NULL) {
        status = wsync_no_memory(err, "channel");
        goto fail;
    }
    wsync_private_fd_take(&self->socket, fd);
    self->peer_pid = (int)credentials.pid;
    self->owner = getpid();
    *channel = self;
    return WSYNC_OK;

fail:
    (void)close(fd);
    return status;
}

/* Like the listener's queue being full, an interrupted connect is worth another try. */
static wsync_status_t connect_socket(int fd, const struct sockaddr_un *address,
                                     int64_t deadline, wsync_error_t *err)
{
    for (;;) {
        if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 ||
            errno == EISCONN) {
            return WSYNC_OK;
        }
        if (errno == ENOENT || errno == ECONNREFUSED) {
            return wsync_fail(err, WSYNC_ERR_CLOSED, errno, "connect",
                              "nobody listens at %s: %s", address->sun_path,
                              strerror(errno));
        }
        if (errno != EAGAIN && errno != EINTR) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "connect", "connect to %s: %s",
                              address->sun_path, strerror(errno));
        }
        if (wsync_left_ms(deadline, 1) == 0) {
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "connect",
                              "deadline passed: %s takes no connection", address->sun_path);
        }
        (void)poll(NULL, 0, CONNECT_RETRY_MS);
    }
}

wsync_status_t wsync_channel_connect(const char *path,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     const wsync_frame_t *hello, int timeout_ms,
                                     wsync_channel_t **channel, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const size_t length = strlen(path);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    wsync_channel_t *self = NULL;
    wsync_frame_t first = *hello;
    wsync_status_t status;
    int fd;

    if (length == 0 || length >= sizeof(address.sun_path) ||
        hello->payload_nbytes > WSYNC_FRAME_PAYLOAD_NBYTES - WSYNC_TOKEN_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "channel",
                          "socket path of %zu bytes (1 to %d) and hello of %u (at most %d)",
                          length, WSYNC_PATH_NBYTES - 1, (unsigned)hello->payload_nbytes,
                          WSYNC_FRAME_PAYLOAD_NBYTES - WSYNC_TOKEN_NBYTES);
    }
    memcpy(address.sun_path, path, length + 1);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "socket", "socket: %s",
                          strerror(errno));
    }
    status = connect_socket(fd, &address, deadline, err);
    if (status != WSYNC_OK) {
        (void)close(fd);
        return status;
    }
    status = wsync_channel_adopt(fd, &self, err);
    if (self == NULL) {
        return status;
    }
    first.kind = WSYNC_FRAME_HELLO;
    first.payload_nbytes = hello->payload_nbytes + WSYNC_TOKEN_NBYTES;
    memcpy(first.payload, token, WSYNC_TOKEN_NBYTES);
    memcpy(first.payload + WSYNC_TOKEN_NBYTES, hello->payload, hello->payload_nbytes);
    status = wsync_channel_send(self, &first, wsync_left_ms(deadline, INT_MAX), err);
    if (status != WSYNC_OK) {
        wsync_channel_destroy(self);
        return status;
    }
    *channel = self;
    return WSYNC_OK;
}

void wsync_channel_destroy(wsync_channel_t *channel)
{
    if (channel != NULL) {
        wsync_private_fd_close(&channel->socket);
        free(channel);
    }
}

/* Waits for `events` or the end of the connection; TIMEOUT carries no message. */
static wsync_status_t wait_socket(const wsync_channel_t *channel, short events,
                                  int64_t deadline, wsync_error_t *err)
{
    for (;;) {
        struct pollfd entry = {.fd = channel->socket.fd, .events = events};
        const int left = wsync_left_ms(deadline, INT_MAX);
        const int count = left == 0 ? 0 : poll(&entry, 1, left);

        if (count > 0) {
            return WSYNC_OK;
        }
        if (count < 0 && errno != EINTR) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "poll", "poll: %s",
                              strerror(errno));
        }
        if (left == 0) {
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "channel",
                              "deadline passed: process %d is %s", channel->peer_pid,
                              events == POLLIN ? "silent" : "not reading");
        }
    }
}

/* A fork shares the socket: a frame that it sent or took would break its parent's turn. */
static wsync_status_t require_owner(const wsync_channel_t *channel, wsync_error_t *err)
{
    if (channel->owner == getpid()) {
        return WSYNC_OK;
    }
    return wsync_fail(err, WSYNC_ERR_STATE, 0, "channel",
                      "the connection to process %d was made in process %ld and cannot be "
                      "used in its fork %ld",
                      channel->peer_pid, (long)channel->owner, (long)getpid());
}

static bool is_disconnect(int code)
{
    return code == EPIPE || code == ECONNRESET || code == ENOTCONN;
}

wsync_status_t wsync_channel_send(wsync_channel_t *channel, const wsync_frame_t *frame,
                                  int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    uint8_t data[WSYNC_FRAME_WIRE_NBYTES];
    control_buffer_t control = {0};
    struct iovec part = {.iov_base = data};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    wsync_status_t status = require_owner(channel, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (frame->payload_nbytes > WSYNC_FRAME_PAYLOAD_NBYTES ||
        frame->fd_count > WSYNC_FRAME_FDS) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, "channel",
            "frame with %u payload bytes (at most %d), %u descriptors (at most "
            "%d)",
            (unsigned)frame->payload_nbytes, WSYNC_FRAME_PAYLOAD_NBYTES,
            (unsigned)frame->fd_count, WSYNC_FRAME_FDS);
    }
    wsync_frame_encode_header(frame, data);
    memcpy(data + WSYNC_FRAME_HEADER_NBYTES, frame->payload, frame->payload_nbytes);
    part.iov_len = WSYNC_FRAME_HEADER_NBYTES + (size_t)frame->payload_nbytes;
    if (frame->fd_count > 0) {
        const size_t fds_nbytes = sizeof(int) * frame->fd_count;

        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(fds_nbytes);
        memcpy(CMSG_DATA(&control.header), frame->fds, fds_nbytes);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fds_nbytes);
    }
    for (;;) {
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
        if (sendmsg(channel->socket.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
            return WSYNC_OK;
        }
        if (errno == EINTR) {
            continue;
        }
        if (is_disconnect(errno)) {
            return wsync_fail(err, WSYNC_ERR_CLOSED, errno, "sendmsg",
                              "process %d closed the connection", channel->peer_pid);
        }
        /* ETOOMANYREFS: this user has too many descriptors under way. */
        if (errno != EAGAIN) {
            return wsync_fail(err, WSYNC_ERR_OS, errno, "sendmsg",
                              "sendmsg to process %d: %s", channel->peer_pid,
                              strerror(errno));
        }
        status = wait_socket(channel, POLLOUT, deadline, err);
        if (status != WSYNC_OK) {
            return status;
        }
    }
}

/* Takes the descriptors of a message, all of them even if there are more than allowed. */
static uint32_t collect_fds(struct msghdr *message, int fds[WSYNC_FRAME_FDS])
{
    uint32_t count = 0;

    for (struct cmsghdr *entry = CMSG_FIRSTHDR(message); entry != NULL;
         entry = CMSG_NXTHDR(message, entry)) {
        size_t carried;

        if (entry->cmsg_level != SOL_SOCKET || entry->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        carried = (entry->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < carried; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(entry) + i * sizeof(int), sizeof(fd));
            if (count < WSYNC_FRAME_FDS) {
                fds[count++] = fd;
            } else {
                (void)close(fd);
            }
        }
    }
    return count;
}

/* One recvmsg.  TIMEOUT: nothing there. */
static wsync_status_t receive_once(wsync_channel_t *channel, wsync_frame_t *frame,
                                   wsync_error_t *err)
{
    uint8_t data[WSYNC_FRAME_WIRE_NBYTES];
    control_buffer_t control;
    struct iovec part = {.iov_base = data, .iov_len = sizeof(data)};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
    wsync_frame_t carried = {.fds = {-1, -1, -1, -1}};
    wsync_status_t status;
    ssize_t nbytes;
    int resets = 0;

    /* A peer that closed with unread frames in its queue makes one recvmsg report
     * ECONNRESET before what it had sent, which may say why it left, can be read. */
    do {
        nbytes = recvmsg(channel->socket.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (nbytes < 0 && (errno == EINTR || (errno == ECONNRESET && resets++ == 0)));
    if (nbytes < 0 && errno == EAGAIN) {
        return WSYNC_ERR_TIMEOUT;
    }
    if (nbytes < 0 && !is_disconnect(errno)) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "recvmsg",
                          "recvmsg from process %d: %s", channel->peer_pid,
                          strerror(errno));
    }
    if (nbytes >= 0) {
        carried.fd_count = collect_fds(&message, carried.fds);
    }
    if (nbytes <= 0) {
        wsync_frame_fini(&carried);
        return wsync_fail(err, WSYNC_ERR_CLOSED, nbytes < 0 ? errno : 0, "recvmsg",
                          "process %d closed the connection", channel->peer_pid);
    }
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        wsync_frame_fini(&carried);
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "channel",
                          "frame of process %d was truncated: %s", channel->peer_pid,
                          message.msg_flags & MSG_TRUNC
                              ? "it is larger than a frame may be"
                              : "more descriptors than a frame may carry, or than this "
                                "process may open");
    }
    status = wsync_frame_parse(data, (size_t)nbytes, &carried, err);
    if (status != WSYNC_OK) {
        wsync_frame_fini(&carried);
        return status;
    }
    *frame = carried;
    return WSYNC_OK;
}

wsync_status_t wsync_channel_receive(wsync_channel_t *channel, wsync_frame_t *frame,
                                     int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    wsync_status_t status = require_owner(channel, err);

    while (status == WSYNC_OK) {
        status = receive_once(channel, frame, err);
        if (status != WSYNC_ERR_TIMEOUT) {
            return status;
        }
        if (timeout_ms <= 0) {
            return status; /* polled at every step: no time to write a message */
        }
        status = wait_socket(channel, POLLIN, deadline, err);
    }
    return status;
}

int wsync_channel_peer_pid(const wsync_channel_t *channel)
{
    return channel->peer_pid;
}

int wsync_channel_fd(const wsync_channel_t *channel)
{
    return channel->socket.fd;
}
