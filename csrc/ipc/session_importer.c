/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/sealed_blob.h"
#include "ipc/lent.h"
#include "ipc/session_internal.h"

struct wsync_importer {
    wsync_link_t link;
    wsync_ending_t ending;
    uint64_t base; /* rounds of all earlier updates */
    const wsync_device_t *device;
    wsync_memory_t *ring; /* NULL before the first attach */
    uint8_t *manifest;
    size_t manifest_nbytes;
    wsync_lent_t lent;
    uint64_t generation;
    uint64_t update;
    bool updating;
    bool begun;      /* BEGIN has come and its caller has not seen it */
    bool committed;  /* the same of COMMIT */
    bool park_asked; /* by COMMIT */
    bool prepared_sent;
    uint32_t round_count;
    uint32_t announced; /* rounds */
    uint32_t next_take;
    uint32_t next_done;
};

static wsync_status_t take_attach(wsync_importer_t *self, const wsync_frame_t *frame,
                                  wsync_error_t *err)
{
    const bool first = self->link.control == NULL;
    wsync_memory_t *control = NULL;
    wsync_memory_t *ring = NULL;
    uint8_t *manifest = NULL;
    wsync_status_t status;

    /* The control page stays what it was at the first attach: streams may hold it. */
    if (frame->fd_count != (first ? 3U : 2U) ||
        frame->arguments[2] != (first ? SESSION_CONTROL_NBYTES : 0)) {
        return wsync_link_unexpected(&self->link, frame, err);
    }
    status = wsync_blob_read(frame->fds[1], frame->arguments[1], &manifest, err);
    if (status == WSYNC_OK && first) {
        status = wsync_control_import(self->device, frame->fds[2], SESSION_CONTROL_NBYTES,
                                      &control, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_import(self->device, frame->fds[0], frame->arguments[0],
                                     &ring, err);
    }
    if (status != WSYNC_OK) {
        wsync_memory_destroy(control);
        free(manifest);
        return status;
    }
    if (first) {
        self->link.control = control;
    }
    wsync_memory_destroy(self->ring);
    free(self->manifest);
    self->ring = ring;
    self->manifest = manifest;
    self->manifest_nbytes = (size_t)frame->arguments[1];
    wsync_lent_unbind(&self->lent);
    self->generation++;
    return WSYNC_OK;
}

static wsync_status_t take_begin(wsync_importer_t *self, const wsync_frame_t *frame,
                                 wsync_error_t *err)
{
    const bool parked = self->generation > 0 && self->ring->fd < 0;
    wsync_status_t status = WSYNC_OK;

    if (self->updating || self->generation == 0 ||
        frame->arguments[1] > WSYNC_SESSION_MAX_ROUNDS ||
        frame->arguments[2] != self->base || frame->fd_count != (parked ? 1U : 0U)) {
        return wsync_link_unexpected(&self->link, frame, err);
    }
    if (parked) {
        status = wsync_memory_unpark(self->ring, frame->fds[0], err);
    }
    if (status == WSYNC_OK) {
        status = wsync_lent_check(&self->lent, err);
    }
    if (status == WSYNC_OK) {
        self->update = frame->arguments[0];
        self->round_count = (uint32_t)frame->arguments[1];
        self->announced = 0;
        self->next_take = 0;
        self->next_done = 0;
        self->prepared_sent = false;
        self->link.recorded = false;
        self->updating = true;
        self->begun = true;
    }
    return status;
}

static wsync_status_t handle_frame(void *owner, wsync_frame_t *frame, wsync_error_t *err)
{
    wsync_importer_t *self = owner;

    if (frame->kind == SESSION_ATTACH && !self->updating) {
        return take_attach(self, frame, err);
    }
    if (frame->kind == SESSION_BEGIN) {
        return take_begin(self, frame, err);
    }
    if (frame->kind == SESSION_LEND && !self->updating && frame->fd_count > 0) {
        return wsync_lent_add(&self->lent, self->device, frame, err);
    }
    if (frame->kind == SESSION_BIND && !self->updating && frame->fd_count == 1) {
        return wsync_lent_bind(&self->lent, frame->fds[0], frame->arguments[0], err);
    }
    if (frame->fd_count != 0) {
        return wsync_link_unexpected(&self->link, frame, err);
    }
    if (frame->kind == SESSION_ROUND && self->updating &&
        frame->arguments[0] == self->announced && self->announced < self->round_count) {
        self->announced++;
        return WSYNC_OK;
    }
    if (frame->kind == SESSION_COMMIT && self->updating && self->prepared_sent &&
        !self->committed && frame->arguments[0] <= 1) {
        self->committed = true;
        self->park_asked = frame->arguments[0] == 1;
        return WSYNC_OK;
    }
    return wsync_link_unexpected(&self->link, frame, err);
}

/* Frames of the next update wait in the socket until this one's verdict has been seen, and
 * those of an attach until somebody asks for the next update. */
static bool can_accept(const void *owner)
{
    const wsync_importer_t *self = owner;

    return !self->begun && !self->committed;
}

wsync_status_t wsync_importer_create(const wsync_device_t *device, const char *path,
                                     const uint8_t token[WSYNC_TOKEN_NBYTES],
                                     const uint8_t *blob, size_t nbytes, int timeout_ms,
                                     wsync_importer_t **importer, wsync_error_t *err)
{
    wsync_frame_t hello = {.arguments = {nbytes, 0, 0, SESSION_PURPOSE}};
    wsync_importer_t *self = calloc(1, sizeof(*self));
    wsync_channel_t *channel = NULL;
    int fd = -1;
    wsync_status_t status;

    if (self == NULL) {
        return wsync_no_memory(err, "session");
    }
    memcpy(&hello.arguments[1], device->uuid, sizeof(device->uuid));
    self->device = device;
    self->ending.name = "session";
    self->link = (wsync_link_t){.peer = "trainer",
                                .name = "session",
                                .owner = self,
                                .handle = handle_frame,
                                .can_accept = can_accept};
    status = wsync_blob_create(blob, nbytes, &fd, err);
    if (status != WSYNC_OK) {
        goto cleanup;
    }
    hello.fds[0] = fd;
    hello.fd_count = 1;
    status = wsync_channel_connect(path, token, &hello, timeout_ms, &channel, err);
    if (status == WSYNC_OK) {
        wsync_link_open(&self->link, channel);
        *importer = self;
        self = NULL;
    }

cleanup:
    if (fd >= 0) {
        (void)close(fd);
    }
    wsync_importer_destroy(self);
    return status;
}

void wsync_importer_destroy(wsync_importer_t *importer)
{
    if (importer != NULL) {
        wsync_memory_destroy(importer->ring);
        wsync_lent_fini(&importer->lent);
        wsync_link_close(&importer->link);
        wsync_memory_destroy(importer->link.control);
        free(importer->manifest);
        free(importer);
    }
}

wsync_status_t wsync_importer_begin(wsync_importer_t *importer, int timeout_ms,
                                    uint64_t *update, uint32_t *round_count,
                                    wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the next update", -1};
    const wsync_frame_t frame = {.kind = SESSION_BEGUN};
    wsync_status_t status = wsync_ending_check(&importer->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (importer->updating && !importer->begun) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "begin: update %llu has not been committed yet",
                          (unsigned long long)importer->update);
    }
    while (status == WSYNC_OK && !importer->begun) {
        status = wsync_link_pump(&importer->link, deadline, awaited, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_link_send(&importer->link, &frame, wsync_left_ms(deadline, INT_MAX),
                                 awaited, err);
        /* The next call reads why the trainer has left. */
        status = status == WSYNC_ERR_CLOSED ? WSYNC_OK : status;
    }
    if (status == WSYNC_OK) {
        importer->begun = false;
        *update = importer->update;
        *round_count = importer->round_count;
    }
    return wsync_ending_note_failure(&importer->ending, status, err);
}

uint64_t wsync_importer_generation(const wsync_importer_t *importer)
{
    return importer->generation;
}

wsync_memory_t *wsync_importer_ring(const wsync_importer_t *importer)
{
    return importer->ring;
}

const uint8_t *wsync_importer_manifest(const wsync_importer_t *importer, size_t *nbytes)
{
    *nbytes = importer->manifest_nbytes;
    return importer->manifest;
}

wsync_memory_t *const *wsync_importer_segments(const wsync_importer_t *importer,
                                               size_t *count)
{
    *count = importer->lent.segments.count;
    return importer->lent.segments.items;
}

const wsync_span_t *wsync_importer_bound(const wsync_importer_t *importer, size_t *count,
                                         uint64_t *generation)
{
    *count = importer->lent.span_count;
    *generation = importer->lent.spans != NULL ? importer->lent.generation : 0;
    return importer->lent.spans;
}

/* STATE unless an update is under way and `round` is the next to be `call`ed.  INVALID for
 * a stream (NULL: none) of another device. */
static wsync_status_t require_round(const wsync_importer_t *self, const char *call,
                                    uint32_t round, uint32_t next, uint32_t limit,
                                    const wsync_stream_t *stream, wsync_error_t *err)
{
    const wsync_status_t status = wsync_ending_check(&self->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!self->updating) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session", "%s: no update has begun",
                          call);
    }
    if (round != next || round >= limit) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "%s: round %u is out of turn: the next is %u of %u", call,
                          (unsigned)round, (unsigned)next, (unsigned)limit);
    }
    return session_check_stream(&self->link, stream, err);
}

wsync_status_t wsync_importer_take(wsync_importer_t *importer, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_link_t *link = &importer->link;
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"round", round};
    wsync_status_t status = require_round(importer, "take", round, importer->next_take,
                                          importer->round_count, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_link_drain(link, awaited, err);
    while (status == WSYNC_OK && importer->announced <= round) {
        status = wsync_link_pump(link, deadline, awaited, err);
    }
    if (status == WSYNC_OK) {
        status =
            wsync_link_order(link, stream, SESSION_READY_OFFSET,
                             importer->base + (uint64_t)round + 1, deadline, awaited, err);
    }
    if (status == WSYNC_OK) {
        importer->next_take++;
    }
    return wsync_ending_note_failure(&importer->ending, status, err);
}

wsync_status_t wsync_importer_wait(wsync_importer_t *importer, uint32_t round,
                                   int timeout_ms, wsync_error_t *err)
{
    wsync_link_t *link = &importer->link;
    const wsync_awaited_t awaited = {"round", round};
    wsync_status_t status =
        require_round(importer, "wait", round, round, importer->next_take, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_link_drain(link, awaited, err);
    if (status == WSYNC_OK) {
        status = wsync_link_wait_word(link, SESSION_READY_OFFSET,
                                      importer->base + (uint64_t)round + 1,
                                      wsync_deadline_ms(timeout_ms), awaited, err);
    }
    return wsync_ending_note_failure(&importer->ending, status, err);
}

uint32_t wsync_importer_arrived(const wsync_importer_t *importer)
{
    uint64_t word;

    if (!importer->updating || importer->next_take == 0) {
        return 0;
    }
    word = wsync_event_query(wsync_link_event(&importer->link, SESSION_READY_OFFSET));
    if (word >= importer->base + importer->next_take) {
        return importer->next_take;
    }
    return word > importer->base ? (uint32_t)(word - importer->base) : 0;
}

wsync_status_t wsync_importer_done(wsync_importer_t *importer, uint32_t round,
                                   wsync_stream_t *stream, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_link_t *link = &importer->link;
    const wsync_awaited_t awaited = {"room for the end of round", round};
    const wsync_frame_t frame = {.kind = SESSION_DONE,
                                 .arguments = {round, stream == NULL ? 1 : 0}};
    const uint64_t value = importer->base + (uint64_t)round + 1;
    wsync_status_t status = require_round(importer, "done", round, importer->next_done,
                                          importer->next_take, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_link_announce(link, stream, SESSION_DONE_OFFSET, value, &frame,
                                 timeout_ms, awaited, err);
    importer->next_done += status == WSYNC_OK;
    return wsync_ending_note_failure(&importer->ending, status, err);
}

wsync_status_t wsync_importer_prepared(wsync_importer_t *importer,
                                       const wsync_receipt_t *receipt, int timeout_ms,
                                       wsync_error_t *err)
{
    wsync_link_t *link = &importer->link;
    const wsync_awaited_t awaited = {"room for the receipt", -1};
    const wsync_frame_t frame = {
        .kind = SESSION_PREPARED,
        .arguments = {receipt->tensor_count, receipt->nbytes, receipt->audit_ns}};
    wsync_status_t status = wsync_ending_check(&importer->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!importer->updating || importer->prepared_sent ||
        importer->next_done != importer->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "prepared: %s (%u of %u rounds are done)",
                          !importer->updating       ? "no update has begun"
                          : importer->prepared_sent ? "this was said before"
                                                    : "rounds are still to come",
                          (unsigned)importer->next_done, (unsigned)importer->round_count);
    }
    status = wsync_link_announce(link, NULL, 0, 0, &frame, timeout_ms, awaited, err);
    importer->prepared_sent = status == WSYNC_OK;
    return wsync_ending_note_failure(&importer->ending, status, err);
}

/* The update is committed: what goes wrong here is for the next one to find out. */
static void park(wsync_importer_t *self)
{
    const wsync_awaited_t awaited = {"room for the parking", -1};
    wsync_error_t err = {0};
    wsync_frame_t frame = {.kind = SESSION_PARKED, .arguments = {1}};

    if (wsync_lent_release(&self->lent, &err) != WSYNC_OK ||
        wsync_memory_park(self->ring, &err) != WSYNC_OK) {
        frame.arguments[0] = 0;
        wsync_link_write(&frame, err.message);
    }
    if (wsync_link_send(&self->link, &frame, SESSION_PARKED_MS, awaited, &err) !=
        WSYNC_OK) {
        wsync_importer_fail(self, err.message);
    }
}

wsync_status_t wsync_importer_verdict(wsync_importer_t *importer, int timeout_ms,
                                      wsync_error_t *err)
{
    wsync_link_t *link = &importer->link;
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_awaited_t awaited = {"the commit", -1};
    wsync_status_t status = wsync_ending_check(&importer->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!importer->prepared_sent || !importer->updating) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "verdict: this worker has not said that it is prepared");
    }
    while (status == WSYNC_OK && !importer->committed) {
        status = wsync_link_pump(link, deadline, awaited, err);
    }
    if (status == WSYNC_OK) {
        importer->committed = false;
        importer->updating = false;
        importer->base += importer->round_count;
        if (importer->park_asked) {
            park(importer);
        }
    }
    return wsync_ending_note_failure(&importer->ending, status, err);
}

void wsync_importer_fail(wsync_importer_t *importer, const char *text)
{
    wsync_link_close_with(&importer->link, SESSION_FAILED, text);
    wsync_ending_note(&importer->ending, text);
}
