/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/sealed_blob.h"
#include "ipc/session_internal.h"

typedef enum exporter_state {
    EXPORTER_LISTENING,
    EXPORTER_ACCEPTED, /* a worker, but no ring yet */
    EXPORTER_ATTACHED, /* between updates */
    EXPORTER_UPDATING,
    EXPORTER_PARKING, /* asked the worker to park the ring */
    EXPORTER_PARKED,  /* between updates; the worker has no memory for the ring */
} exporter_state_t;

struct wsync_exporter {
    wsync_link_t link;
    wsync_ending_t ending;
    uint64_t base; /* rounds of all earlier updates */
    wsync_listener_t *listener;
    wsync_memory_t *ring; /* counted; NULL before the first attach */
    exporter_state_t state;
    bool control_sent;
    bool begun; /* the worker, too */
    bool prepared;
    uint32_t round_count;
    uint32_t next_post;
    uint32_t done_count; /* rounds whose DONE has come */
    uint64_t lent_count; /* segments */
    size_t lent_fds;     /* descriptors of the next one that have been sent */
    uint64_t done_value; /* what the done word must reach before they are over */
    wsync_receipt_t receipt;
    uint8_t worker_uuid[WSYNC_DEVICE_UUID_NBYTES];
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    char refusal[WSYNC_LINK_TEXT_NBYTES]; /* why the worker has not parked */
};

static const char *state_text(const wsync_exporter_t *self)
{
    switch (self->state) {
    case EXPORTER_LISTENING:
        return "no worker has connected";
    case EXPORTER_ACCEPTED:
        return "no ring is attached";
    case EXPORTER_ATTACHED:
        return "no update has begun";
    case EXPORTER_UPDATING:
        return "an update is under way";
    case EXPORTER_PARKING:
        return "the worker has not parked the ring yet";
    case EXPORTER_PARKED:
        return "the ring is parked";
    }
    return "unknown";
}

/* STATE unless `call` may come now.  INVALID for a stream (NULL: none) of another
 * device. */
static wsync_status_t require(const wsync_exporter_t *self, const char *call,
                              exporter_state_t state, const wsync_stream_t *stream,
                              wsync_error_t *err)
{
    const wsync_status_t status = wsync_ending_check(&self->ending, err);

    if (status == WSYNC_OK && self->state != state) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session", "%s: %s", call,
                          state_text(self));
    }
    return status == WSYNC_OK ? session_check_stream(&self->link, stream, err) : status;
}

/* STATE unless an update may begin now. */
static wsync_status_t require_between(const wsync_exporter_t *self, const char *call,
                                      wsync_error_t *err)
{
    const bool parked = self->state == EXPORTER_PARKED;

    return require(self, call, parked ? EXPORTER_PARKED : EXPORTER_ATTACHED, NULL, err);
}

static wsync_status_t handle_frame(void *owner, wsync_frame_t *frame, wsync_error_t *err)
{
    wsync_exporter_t *self = owner;

    if (self->state == EXPORTER_UPDATING && frame->fd_count == 0) {
        if (frame->kind == SESSION_BEGUN && !self->begun) {
            self->begun = true;
            return WSYNC_OK;
        }
        if (frame->kind == SESSION_DONE && frame->arguments[0] == self->done_count &&
            self->done_count < self->next_post && frame->arguments[1] <= 1) {
            self->done_count++;
            if (frame->arguments[1] == 0) {
                self->done_value = self->base + self->done_count;
            }
            return WSYNC_OK;
        }
        if (frame->kind == SESSION_PREPARED && !self->prepared &&
            self->done_count == self->round_count) {
            self->prepared = true;
            self->receipt = (wsync_receipt_t){.tensor_count = frame->arguments[0],
                                              .nbytes = frame->arguments[1],
                                              .audit_ns = frame->arguments[2]};
            return WSYNC_OK;
        }
    }
    if (self->state == EXPORTER_PARKING && frame->fd_count == 0 &&
        frame->kind == SESSION_PARKED && frame->arguments[0] <= 1) {
        self->state = frame->arguments[0] == 1 ? EXPORTER_PARKED : EXPORTER_ATTACHED;
        wsync_link_read(frame, self->refusal);
        return WSYNC_OK;
    }
    return wsync_link_unexpected(&self->link, frame, err);
}

wsync_status_t wsync_exporter_create(const char *parent, wsync_exporter_t **exporter,
                                     wsync_error_t *err)
{
    wsync_exporter_t *self = calloc(1, sizeof(*self));
    wsync_status_t status;

    if (self == NULL) {
        return wsync_no_memory(err, "session");
    }
    self->ending.name = "session";
    self->link = (wsync_link_t){
        .peer = "worker", .name = "session", .owner = self, .handle = handle_frame};
    self->state = EXPORTER_LISTENING;
    status = wsync_token_create(self->token, err);
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    status = wsync_listener_create(parent, &self->listener, err);
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    memcpy(self->path, wsync_listener_path(self->listener),
           strlen(wsync_listener_path(self->listener)) + 1);
    *exporter = self;
    self = NULL;

cleanup:
    wsync_exporter_destroy(self);
    return status;
}

void wsync_exporter_destroy(wsync_exporter_t *exporter)
{
    if (exporter != NULL) {
        wsync_listener_destroy(exporter->listener);
        wsync_memory_destroy(exporter->ring);
        wsync_link_close(&exporter->link);
        wsync_memory_destroy(exporter->link.control);
        free(exporter);
    }
}

const char *wsync_exporter_path(const wsync_exporter_t *exporter)
{
    return exporter->path;
}

const uint8_t *wsync_exporter_token(const wsync_exporter_t *exporter)
{
    return exporter->token;
}

const uint8_t *wsync_exporter_worker_uuid(const wsync_exporter_t *exporter)
{
    return exporter->worker_uuid;
}

wsync_status_t wsync_exporter_accept(wsync_exporter_t *exporter, int timeout_ms,
                                     uint8_t **blob, size_t *nbytes, wsync_error_t *err)
{
    wsync_channel_t *channel = NULL;
    wsync_frame_t hello;
    uint8_t *data = NULL;
    wsync_status_t status = require(exporter, "accept", EXPORTER_LISTENING, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_listener_accept(exporter->listener, exporter->token, timeout_ms,
                                   &channel, &hello, err);
    if (status != WSYNC_OK) {
        return status;
    }
    wsync_link_open(&exporter->link, channel);
    if (hello.arguments[3] != SESSION_PURPOSE || hello.fd_count != 1) {
        status = wsync_link_unexpected(&exporter->link, &hello, err);
    } else {
        status = wsync_blob_read(hello.fds[0], hello.arguments[0], &data, err);
    }
    if (status == WSYNC_OK) {
        memcpy(exporter->worker_uuid, &hello.arguments[1], sizeof(exporter->worker_uuid));
        *nbytes = (size_t)hello.arguments[0];
        *blob = data;
        exporter->state = EXPORTER_ACCEPTED;
        /* One worker a session: nothing is left lying around should this process be
         * killed. */
        wsync_listener_destroy(exporter->listener);
        exporter->listener = NULL;
    } else {
        (void)wsync_ending_note_failure(&exporter->ending, status, err);
    }
    wsync_frame_fini(&hello);
    return status;
}

/* The control memory is of the ring's device, which has to be the worker's. */
static wsync_status_t settle_device(wsync_exporter_t *self, const wsync_device_t *device,
                                    wsync_error_t *err)
{
    char text[WSYNC_DEVICE_TEXT_NBYTES];

    if (memcmp(device->uuid, self->worker_uuid, sizeof(device->uuid)) != 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "session",
                          "attach: a ring on %s, but the worker is on another device",
                          wsync_device_text(device, text));
    }
    return self->link.control != NULL ? WSYNC_OK
                                      : wsync_control_create(device, SESSION_CONTROL_NBYTES,
                                                             &self->link.control, err);
}

wsync_status_t wsync_exporter_attach(wsync_exporter_t *exporter, wsync_memory_t *ring,
                                     const uint8_t *manifest, size_t nbytes, int timeout_ms,
                                     wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"room for the attach", -1};
    wsync_frame_t frame = {.kind = SESSION_ATTACH};
    int fd = -1;
    wsync_status_t status = wsync_ending_check(&exporter->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (exporter->state != EXPORTER_ACCEPTED && exporter->state != EXPORTER_ATTACHED &&
        exporter->state != EXPORTER_PARKED) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session", "attach: %s",
                          state_text(exporter));
    }
    if (ring->fd < 0) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session", "attach: the ring is parked");
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    if (status != WSYNC_OK) {
        return wsync_ending_note_failure(&exporter->ending, status, err);
    }
    status = settle_device(exporter, ring->device, err);
    if (status == WSYNC_OK) {
        status = wsync_blob_create(manifest, nbytes, &fd, err);
    }
    if (status != WSYNC_OK) {
        return status; /* nothing was sent: the session is as it was */
    }
    frame.arguments[0] = ring->nbytes;
    frame.arguments[1] = nbytes;
    frame.fds[0] = ring->fd;
    frame.fds[1] = fd;
    frame.fd_count = 2;
    if (!exporter->control_sent) {
        frame.arguments[2] = SESSION_CONTROL_NBYTES;
        frame.fds[2] = exporter->link.control->fd;
        frame.fd_count = 3;
    }
    status = wsync_link_send(&exporter->link, &frame, timeout_ms, awaited, err);
    (void)close(fd);
    if (status == WSYNC_OK) {
        exporter->control_sent = true;
        exporter->state = EXPORTER_ATTACHED;
        wsync_memory_retain(ring);
        wsync_memory_destroy(exporter->ring);
        exporter->ring = ring;
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

/* As many of a segment as go into a frame. */
static wsync_frame_t next_descriptors(const wsync_exporter_t *self,
                                      const wsync_memory_t *memory)
{
    const size_t count = memory->more_count + 1;
    wsync_frame_t frame = {.kind = SESSION_LEND};
    size_t at = self->lent_fds;

    while (at < count && frame.fd_count < WSYNC_FRAME_FDS) {
        frame.fds[frame.fd_count++] = at == 0 ? memory->fd : memory->more[at - 1];
        at++;
    }
    frame.arguments[0] = self->lent_count;
    frame.arguments[1] = count - at;
    return frame;
}

wsync_status_t wsync_exporter_lend(wsync_exporter_t *exporter, const wsync_memory_t *memory,
                                   int timeout_ms, uint64_t *segment, wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"room for a segment", -1};
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    wsync_status_t status = require_between(exporter, "lend", err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (memory->fd < 0) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session", "lend: the memory is parked");
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    /* After TIMEOUT a call with the same memory goes on where this one has ended. */
    while (status == WSYNC_OK && exporter->lent_fds <= memory->more_count) {
        const wsync_frame_t frame = next_descriptors(exporter, memory);

        status = wsync_link_send(&exporter->link, &frame, wsync_left_ms(deadline, INT_MAX),
                                 awaited, err);
        exporter->lent_fds += status == WSYNC_OK ? frame.fd_count : 0;
    }
    if (status == WSYNC_OK) {
        exporter->lent_fds = 0;
        *segment = exporter->lent_count++;
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_bind(wsync_exporter_t *exporter,
                                   const wsync_binding_t *bindings, size_t count,
                                   int timeout_ms, wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"room for the bindings", -1};
    const size_t nbytes = count * sizeof(*bindings);
    wsync_frame_t frame = {.kind = SESSION_BIND, .arguments = {nbytes}, .fd_count = 1};
    wsync_status_t status = require_between(exporter, "bind", err);

    if (status == WSYNC_OK) {
        status = wsync_blob_create((const uint8_t *)bindings, nbytes, &frame.fds[0], err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    if (status == WSYNC_OK) {
        status = wsync_link_send(&exporter->link, &frame, timeout_ms, awaited, err);
    }
    (void)close(frame.fds[0]);
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_begin(wsync_exporter_t *exporter, uint64_t update,
                                    uint32_t round_count, int timeout_ms,
                                    wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"room for the begin", -1};
    const bool parked = exporter->state == EXPORTER_PARKED;
    wsync_frame_t frame = {.kind = SESSION_BEGIN,
                           .arguments = {update, round_count, exporter->base}};
    wsync_status_t status = require_between(exporter, "begin", err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (round_count > WSYNC_SESSION_MAX_ROUNDS) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "session",
                          "begin: update %llu of %u rounds, a session takes at most %d",
                          (unsigned long long)update, (unsigned)round_count,
                          WSYNC_SESSION_MAX_ROUNDS);
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    if (status == WSYNC_OK && parked) {
        /* Not parked here: it was tried in vain, or this is the second try of a send. */
        const wsync_status_t unparked = exporter->ring->fd >= 0
                                            ? WSYNC_OK
                                            : wsync_memory_unpark(exporter->ring, -1, err);

        if (unparked != WSYNC_OK) {
            return unparked;
        }
        frame.fds[0] = exporter->ring->fd;
        frame.fd_count = 1;
    }
    if (status == WSYNC_OK) {
        status = wsync_link_send(&exporter->link, &frame, timeout_ms, awaited, err);
    }
    if (status == WSYNC_OK) {
        exporter->state = EXPORTER_UPDATING;
        exporter->round_count = round_count;
        exporter->next_post = 0;
        exporter->done_count = 0;
        exporter->link.recorded = false;
        exporter->begun = false;
        exporter->prepared = false;
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_begun(wsync_exporter_t *exporter, int timeout_ms,
                                    wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the begin of the update", -1};
    wsync_status_t status = require(exporter, "begun", EXPORTER_UPDATING, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    while (status == WSYNC_OK && !exporter->begun) {
        status = wsync_link_pump(&exporter->link, deadline, awaited, err);
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

static wsync_status_t await_done(wsync_exporter_t *self, int64_t wait_round,
                                 wsync_stream_t *stream, int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the end of round", wait_round};
    wsync_status_t status = wsync_link_drain(&self->link, awaited, err);

    while (status == WSYNC_OK && (int64_t)self->done_count <= wait_round) {
        status = wsync_link_pump(&self->link, deadline, awaited, err);
    }
    if (status == WSYNC_OK && wait_round >= 0) {
        /* done_value may belong to a later round: rounds end in order, so that is only
         * later, never wrong. */
        const uint64_t value = self->base + (uint64_t)wait_round + 1;

        status = wsync_link_order(&self->link, stream, SESSION_DONE_OFFSET,
                                  self->done_value < value ? self->done_value : value,
                                  deadline, awaited, err);
    }
    return status;
}

wsync_status_t wsync_exporter_acquire(wsync_exporter_t *exporter, int64_t wait_round,
                                      wsync_stream_t *stream, int timeout_ms,
                                      wsync_error_t *err)
{
    wsync_status_t status = require(exporter, "acquire", EXPORTER_UPDATING, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (wait_round < -1 || wait_round >= (int64_t)exporter->next_post) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "acquire: round %lld has not been posted, the next is %u",
                          (long long)wait_round, (unsigned)exporter->next_post);
    }
    status = await_done(exporter, wait_round, stream, timeout_ms, err);
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_look(wsync_exporter_t *exporter, wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"another process", -1};
    wsync_status_t status = wsync_ending_check(&exporter->ending, err);

    if (status != WSYNC_OK || exporter->state == EXPORTER_LISTENING) {
        return status;
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

uint32_t wsync_exporter_loaded(const wsync_exporter_t *exporter)
{
    uint64_t word;

    if (exporter->done_count == 0) {
        return 0;
    }
    word = wsync_event_query(wsync_link_event(&exporter->link, SESSION_DONE_OFFSET));
    if (word >= exporter->done_value) {
        return exporter->done_count;
    }
    return word > exporter->base ? (uint32_t)(word - exporter->base) : 0;
}

wsync_status_t wsync_exporter_post(wsync_exporter_t *exporter, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_link_t *link = &exporter->link;
    const wsync_awaited_t awaited = {"room for round", round};
    const wsync_frame_t frame = {.kind = SESSION_ROUND, .arguments = {round}};
    const uint64_t value = exporter->base + (uint64_t)round + 1;
    wsync_status_t status = require(exporter, "post", EXPORTER_UPDATING, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (round != exporter->next_post || round >= exporter->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "post: round %u is out of turn: the next is %u of %u",
                          (unsigned)round, (unsigned)exporter->next_post,
                          (unsigned)exporter->round_count);
    }
    status = wsync_link_announce(link, stream, SESSION_READY_OFFSET, value, &frame,
                                 timeout_ms, awaited, err);
    exporter->next_post += status == WSYNC_OK;
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_prepared(wsync_exporter_t *exporter, int timeout_ms,
                                       wsync_receipt_t *receipt, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the receipt", -1};
    wsync_status_t status = require(exporter, "prepared", EXPORTER_UPDATING, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (exporter->next_post != exporter->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "prepared: only %u of %u rounds have been posted",
                          (unsigned)exporter->next_post, (unsigned)exporter->round_count);
    }
    status = wsync_link_drain(&exporter->link, awaited, err);
    while (status == WSYNC_OK && !exporter->prepared) {
        status = wsync_link_pump(&exporter->link, deadline, awaited, err);
    }
    if (status == WSYNC_OK) {
        status = await_done(exporter, (int64_t)exporter->round_count - 1, NULL,
                            wsync_left_ms(deadline, INT_MAX), err);
    }
    if (status == WSYNC_OK) {
        *receipt = exporter->receipt;
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_commit(wsync_exporter_t *exporter, bool park, int timeout_ms,
                                     wsync_error_t *err)
{
    const wsync_awaited_t awaited = {"room for the commit", -1};
    const wsync_frame_t frame = {.kind = SESSION_COMMIT, .arguments = {park ? 1 : 0}};
    wsync_status_t status = require(exporter, "commit", EXPORTER_UPDATING, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!exporter->prepared) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "commit: the worker has not said that it is prepared");
    }
    status =
        wsync_link_announce(&exporter->link, NULL, 0, 0, &frame, timeout_ms, awaited, err);
    if (status == WSYNC_OK) {
        exporter->base += exporter->round_count;
        exporter->state = park ? EXPORTER_PARKING : EXPORTER_ATTACHED;
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

wsync_status_t wsync_exporter_park(wsync_exporter_t *exporter, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_link_t *link = &exporter->link;
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the parking of the ring", -1};
    wsync_error_t reason = {0};
    wsync_status_t status = require(exporter, "park", EXPORTER_PARKING, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    while (status == WSYNC_OK && exporter->state == EXPORTER_PARKING) {
        status = wsync_link_pump(link, deadline, awaited, err);
    }
    if (status == WSYNC_ERR_TIMEOUT) {
        return status;
    }
    if (status == WSYNC_OK && exporter->state == EXPORTER_ATTACHED) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "session",
                          "the worker keeps the ring: %s", exporter->refusal);
    }
    if (wsync_memory_park(exporter->ring, &reason) != WSYNC_OK && status == WSYNC_OK) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, reason.native, "session",
                          "the trainer keeps its side of the ring: %s", reason.message);
    }
    return wsync_ending_note_failure(&exporter->ending, status, err);
}

void wsync_exporter_abort(wsync_exporter_t *exporter, const char *text)
{
    wsync_link_close_with(&exporter->link, SESSION_ABORT, text);
    wsync_ending_note(&exporter->ending, text);
    wsync_listener_destroy(exporter->listener);
    exporter->listener = NULL;
}
