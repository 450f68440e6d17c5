/* SPDX-License-Identifier: Apache-2.0
 * Shared-memory exchange: how ranks find each other and map each other's staging. */
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/shared_internal.h"

static wsync_status_t allocate(wsync_comm_t *self, wsync_error_t *err)
{
    const size_t count = self->rank_count;

    self->peers = calloc(count, sizeof(*self->peers));
    self->polled = calloc(count, sizeof(*self->polled));
    self->marked = calloc(count, sizeof(*self->marked));
    self->readers[0] = calloc(count, sizeof(*self->readers[0]));
    self->readers[1] = calloc(count, sizeof(*self->readers[1]));
    if (self->peers == NULL || self->polled == NULL || self->marked == NULL ||
        self->readers[0] == NULL || self->readers[1] == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "shared",
                          "no memory for an exchange of %u ranks",
                          (unsigned)self->rank_count);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_shared_comm_create(const wsync_device_t *device, const char *parent,
                                        uint32_t rank, uint32_t rank_count,
                                        uint64_t staging_nbytes, wsync_comm_t **comm,
                                        wsync_error_t *err)
{
    wsync_comm_t *self;
    wsync_status_t status;

    if (rank >= rank_count || staging_nbytes > UINT64_MAX / 4) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "shared",
                          "rank %u of %u with %llu bytes of staging", (unsigned)rank,
                          (unsigned)rank_count, (unsigned long long)staging_nbytes);
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "shared",
                          "no memory for an exchange");
    }
    self->device = device;
    self->rank = rank;
    self->rank_count = rank_count;
    self->half_nbytes =
        (staging_nbytes + SHARED_PAGE_NBYTES - 1) & ~((uint64_t)SHARED_PAGE_NBYTES - 1);
    if (self->half_nbytes == 0) {
        self->half_nbytes = SHARED_PAGE_NBYTES; /* memory has at least one byte */
    }
    status = allocate(self, err);
    if (status == WSYNC_OK) {
        status = wsync_token_create(self->token, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_create(device, 2 * self->half_nbytes, &self->staging, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_control_create(device, SHARED_CONTROL_NBYTES, &self->control, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_listener_create(parent, &self->listener, err);
    }
    if (status != WSYNC_OK) {
        wsync_shared_comm_ops()->destroy(self);
        return status;
    }
    wsync_address_format(self->token, wsync_listener_path(self->listener), self->address);
    *comm = self;
    return WSYNC_OK;
}

const char *wsync_shared_comm_address(const wsync_comm_t *comm)
{
    return comm->address;
}

uint64_t wsync_shared_comm_nbytes(const wsync_comm_t *comm)
{
    return 2 * comm->half_nbytes;
}

static wsync_frame_t introduce(const wsync_comm_t *self, uint32_t kind)
{
    wsync_frame_t frame = {
        .kind = kind,
        .arguments = {self->rank, self->half_nbytes, self->rank_count, SHARED_PURPOSE}};

    frame.fds[0] = self->staging->fd;
    frame.fds[1] = self->control->fd;
    frame.fd_count = 2;
    return frame;
}

/* Maps what HELLO or WELCOME of `rank` carries. */
static wsync_status_t take_memory(wsync_comm_t *self, uint32_t rank,
                                  const wsync_frame_t *frame, wsync_error_t *err)
{
    shared_peer_t *peer = &self->peers[rank];
    const uint64_t half_nbytes = frame->arguments[1];
    wsync_status_t status;

    if (frame->fd_count != 2 || frame->arguments[0] != rank ||
        frame->arguments[2] != self->rank_count || frame->arguments[3] != SHARED_PURPOSE ||
        half_nbytes > UINT64_MAX / 2) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "shared",
                          "introduction of rank %llu of %llu with %u descriptors and %llu "
                          "bytes of staging, not of rank %u of %u",
                          (unsigned long long)frame->arguments[0],
                          (unsigned long long)frame->arguments[2],
                          (unsigned)frame->fd_count, (unsigned long long)half_nbytes,
                          (unsigned)rank, (unsigned)self->rank_count);
    }
    status = wsync_memory_import(self->device, frame->fds[0], 2 * half_nbytes,
                                 &peer->staging, err);
    if (status != WSYNC_OK) {
        return status;
    }
    peer->half_nbytes = half_nbytes;
    return wsync_control_import(self->device, frame->fds[1], SHARED_CONTROL_NBYTES,
                                &peer->control, err);
}

static wsync_status_t connect_below(wsync_comm_t *self, uint32_t rank, const char *address,
                                    int64_t deadline, wsync_error_t *err)
{
    const wsync_frame_t hello = introduce(self, WSYNC_FRAME_HELLO);
    shared_peer_t *peer = &self->peers[rank];
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    wsync_status_t status = wsync_address_parse(address, token, path, err);

    if (status == WSYNC_OK) {
        status = wsync_channel_connect(
            path, token, &hello, wsync_left_ms(deadline, INT_MAX), &peer->channel, err);
    }
    if (status != WSYNC_OK) {
        return wsync_shared_name_rank(self, rank, status, err);
    }
    peer->pid = wsync_channel_peer_pid(peer->channel);
    return WSYNC_OK;
}

static wsync_status_t take_welcome(wsync_comm_t *self, uint32_t rank, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_frame_t frame;
    wsync_status_t status =
        wsync_channel_receive(self->peers[rank].channel, &frame, timeout_ms, err);

    if (status == WSYNC_ERR_TIMEOUT) {
        return status;
    }
    if (status == WSYNC_OK) {
        if (frame.kind != SHARED_WELCOME) {
            status =
                wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "shared",
                           "frame of kind %u instead of a welcome", (unsigned)frame.kind);
        } else {
            status = take_memory(self, rank, &frame, err);
        }
        wsync_frame_fini(&frame);
    }
    return status == WSYNC_OK ? status : wsync_shared_name_rank(self, rank, status, err);
}

static wsync_status_t accept_above(wsync_comm_t *self, int timeout_ms, wsync_error_t *err)
{
    const wsync_frame_t welcome = introduce(self, SHARED_WELCOME);
    wsync_channel_t *channel = NULL;
    shared_peer_t *peer;
    wsync_frame_t hello;
    uint64_t rank;
    wsync_status_t status = wsync_listener_accept(self->listener, self->token, timeout_ms,
                                                  &channel, &hello, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    rank = hello.arguments[0];
    if (rank <= self->rank || rank >= self->rank_count ||
        self->peers[rank].channel != NULL) {
        status = wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, "shared",
                            "process %d says that it is rank %llu of %u, which %s",
                            wsync_channel_peer_pid(channel), (unsigned long long)rank,
                            (unsigned)self->rank_count,
                            rank > self->rank && rank < self->rank_count
                                ? "is connected already"
                                : "should not connect to this rank");
        wsync_channel_destroy(channel);
        wsync_frame_fini(&hello);
        return status;
    }
    peer = &self->peers[rank];
    peer->channel = channel;
    peer->pid = wsync_channel_peer_pid(channel);
    status = take_memory(self, (uint32_t)rank, &hello, err);
    wsync_frame_fini(&hello);
    if (status == WSYNC_OK) {
        status = wsync_channel_send(channel, &welcome, SHARED_SEND_MS, err);
        /* A fresh queue is not full: silence here is not a state to come back to. */
        status = status == WSYNC_ERR_TIMEOUT ? WSYNC_ERR_CLOSED : status;
    }
    return status == WSYNC_OK ? status
                              : wsync_shared_name_rank(self, (uint32_t)rank, status, err);
}

/* First rank at or after `from` whose memory is not mapped yet; rank_count if none. */
static uint32_t find_missing(const wsync_comm_t *self, uint32_t from)
{
    while (from < self->rank_count &&
           (from == self->rank || self->peers[from].control != NULL)) {
        from++;
    }
    return from;
}

static wsync_status_t fail_missing(const wsync_comm_t *self, wsync_error_t *err)
{
    char text[256];
    size_t length = 0;
    uint32_t count = 0;

    text[0] = '\0';
    for (uint32_t i = find_missing(self, 0); i < self->rank_count;
         i = find_missing(self, i + 1)) {
        count++;
        if (length < sizeof(text)) {
            const int written =
                snprintf(text + length, sizeof(text) - length, " %u", (unsigned)i);

            length += written > 0 ? (size_t)written : 0;
        }
    }
    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "shared",
                      "deadline passed: rank %u waits for %u of %u ranks to connect:%s",
                      (unsigned)self->rank, (unsigned)count, (unsigned)self->rank_count,
                      text);
}

/* Everybody first connects downwards, which waits for nobody, then answers those above; so
 * no order of ranks can end in a circle. */
static wsync_status_t meet(wsync_comm_t *self, int64_t deadline, wsync_error_t *err)
{
    for (;;) {
        const uint32_t above = find_missing(self, self->rank + 1);
        int left = wsync_left_ms(deadline, SHARED_SLICE_MS);
        wsync_status_t status = WSYNC_OK;

        for (uint32_t i = find_missing(self, 0); i < self->rank && status == WSYNC_OK;
             i = find_missing(self, i + 1)) {
            /* With nobody above left to accept, the first one below may take the time. */
            status = take_welcome(self, i, above < self->rank_count ? 0 : left, err);
            left = 0;
            status = status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
        left = wsync_left_ms(deadline, SHARED_SLICE_MS);
        if (status == WSYNC_OK && above < self->rank_count) {
            status = accept_above(self, left, err);
            status = status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
        if (status != WSYNC_OK) {
            return status;
        }
        if (find_missing(self, 0) == self->rank_count) {
            return WSYNC_OK;
        }
        if (left == 0) {
            return fail_missing(self, err);
        }
    }
}

wsync_status_t wsync_shared_comm_connect(wsync_comm_t *comm, const char *const *addresses,
                                         int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    wsync_status_t status = wsync_shared_check(comm, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (comm->connected) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "shared",
                          "connect: the exchange is connected already");
    }
    for (uint32_t i = 0; i < comm->rank && status == WSYNC_OK; i++) {
        if (comm->peers[i].channel == NULL) {
            status = connect_below(comm, i, addresses[i], deadline, err);
        }
    }
    if (status == WSYNC_OK) {
        status = meet(comm, deadline, err);
    }
    if (status == WSYNC_OK) {
        comm->connected = true;
        wsync_listener_destroy(comm->listener);
        comm->listener = NULL;
    }
    return wsync_shared_settle(comm, status, err);
}
