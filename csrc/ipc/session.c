/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/session.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "ipc/session_internal.h"

static int peer_pid(const wsync_link_t *link)
{
    return link->channel != NULL ? wsync_channel_peer_pid(link->channel) : 0;
}

/* "round 7" */
static const char *awaited_text(wsync_awaited_t awaited, char *text, size_t nbytes)
{
    if (awaited.number < 0) {
        return awaited.what;
    }
    (void)snprintf(text, nbytes, "%s %lld", awaited.what, (long long)awaited.number);
    return text;
}

wsync_status_t wsync_link_check(const wsync_link_t *link, wsync_error_t *err)
{
    if (link->ended) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "session",
                          "the session has ended: %.600s", link->reason);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_link_check_stream(const wsync_link_t *link,
                                       const wsync_stream_t *stream, wsync_error_t *err)
{
    return stream == NULL
               ? WSYNC_OK
               : wsync_stream_check(stream, link->control->device, "the session", err);
}

void wsync_link_end(wsync_link_t *link, const char *reason)
{
    if (!link->ended) {
        link->ended = true;
        (void)snprintf(link->reason, sizeof(link->reason), "%s", reason);
    }
}

wsync_status_t wsync_link_settle(wsync_link_t *link, wsync_status_t status,
                                 const wsync_error_t *err)
{
    if (status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT) {
        wsync_link_end(link, err != NULL ? err->message : wsync_status_text(status));
    }
    return status;
}

void wsync_link_write(wsync_frame_t *frame, const char *text)
{
    const size_t length = strlen(text);

    frame->payload_nbytes =
        (uint32_t)(length < WSYNC_FRAME_PAYLOAD_NBYTES ? length
                                                       : WSYNC_FRAME_PAYLOAD_NBYTES);
    memcpy(frame->payload, text, frame->payload_nbytes);
}

void wsync_link_read(const wsync_frame_t *frame, char *text, size_t nbytes)
{
    size_t length = frame->payload_nbytes < nbytes ? frame->payload_nbytes : nbytes - 1;

    for (size_t i = 0; i < length; i++) {
        const uint8_t byte = frame->payload[i];

        text[i] = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f
                      ? '?'
                      : (char)byte;
    }
    text[length] = '\0';
}

static wsync_status_t fail_remote(const wsync_link_t *link, const wsync_frame_t *frame,
                                  wsync_error_t *err)
{
    char text[600];

    wsync_link_read(frame, text, sizeof(text));
    return wsync_fail(err, WSYNC_ERR_REMOTE, 0, "session", "%s (pid %d) %s: %s", link->peer,
                      peer_pid(link), frame->kind == SESSION_ABORT ? "aborted" : "failed",
                      text);
}

static wsync_status_t fail_closed(const wsync_link_t *link, int native,
                                  wsync_awaited_t awaited, wsync_error_t *err)
{
    char text[64];

    return wsync_fail(err, WSYNC_ERR_CLOSED, native, "session",
                      "%s (pid %d) closed the connection while %s was awaited", link->peer,
                      peer_pid(link), awaited_text(awaited, text, sizeof(text)));
}

static wsync_status_t fail_timeout(const wsync_link_t *link, wsync_awaited_t awaited,
                                   wsync_error_t *err)
{
    char text[64];

    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, "session",
                      "deadline passed while %s of %s (pid %d) was awaited",
                      awaited_text(awaited, text, sizeof(text)), link->peer,
                      peer_pid(link));
}

wsync_status_t wsync_link_unexpected(const wsync_link_t *link, const wsync_frame_t *frame,
                                     wsync_error_t *err)
{
    return wsync_fail(
        err, WSYNC_ERR_PROTOCOL, 0, "session",
        "%s (pid %d) sent a frame of kind %u (%llu, %llu, %llu; %u descriptors) "
        "that does not fit the state of the session",
        link->peer, peer_pid(link), (unsigned)frame->kind,
        (unsigned long long)frame->arguments[0], (unsigned long long)frame->arguments[1],
        (unsigned long long)frame->arguments[2], (unsigned)frame->fd_count);
}

/* Receives and handles one frame; TIMEOUT carries no message. */
static wsync_status_t take_frame(wsync_link_t *link, int timeout_ms,
                                 wsync_awaited_t awaited, wsync_error_t *err)
{
    wsync_frame_t frame;
    wsync_status_t status = wsync_channel_receive(link->channel, &frame, timeout_ms, err);

    if (status == WSYNC_ERR_CLOSED) {
        return fail_closed(link, err != NULL ? err->native : 0, awaited, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (frame.kind == SESSION_FAILED || frame.kind == SESSION_ABORT) {
        status = fail_remote(link, &frame, err);
    } else {
        status = link->handle(link->owner, &frame, err);
    }
    wsync_frame_fini(&frame);
    return status;
}

wsync_status_t wsync_link_pump(wsync_link_t *link, int timeout_ms, wsync_awaited_t awaited,
                               wsync_error_t *err)
{
    const wsync_status_t status = take_frame(link, timeout_ms, awaited, err);

    return status == WSYNC_ERR_TIMEOUT ? fail_timeout(link, awaited, err) : status;
}

wsync_status_t wsync_link_drain(wsync_link_t *link, wsync_awaited_t awaited,
                                wsync_error_t *err)
{
    while (link->hungry(link->owner)) {
        const wsync_status_t status = take_frame(link, 0, awaited, err);

        if (status != WSYNC_OK) {
            return status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
    }
    return WSYNC_OK;
}

wsync_status_t wsync_link_send(wsync_link_t *link, const wsync_frame_t *frame,
                               int timeout_ms, wsync_awaited_t awaited, wsync_error_t *err)
{
    const wsync_status_t status = wsync_channel_send(link->channel, frame, timeout_ms, err);

    if (status == WSYNC_ERR_CLOSED) {
        /* What the peer said before it left is the better error. */
        const int native = err != NULL ? err->native : 0;
        const wsync_status_t last = wsync_link_drain(link, awaited, err);

        return last != WSYNC_OK ? last : fail_closed(link, native, awaited, err);
    }
    return status == WSYNC_ERR_TIMEOUT ? fail_timeout(link, awaited, err) : status;
}

wsync_event_t wsync_link_event(const wsync_link_t *link, uint64_t offset)
{
    return (wsync_event_t){.memory = link->control, .offset = offset};
}

wsync_status_t wsync_link_wait_word(wsync_link_t *link, uint64_t offset, uint64_t value,
                                    int64_t deadline_ms, wsync_awaited_t awaited,
                                    wsync_error_t *err)
{
    const wsync_event_t event = wsync_link_event(link, offset);

    while (wsync_event_query(event) < value) {
        const int slice = wsync_left_ms(deadline_ms, SESSION_WORD_SLICE_MS);
        wsync_status_t status = wsync_event_wait(event, value, slice, err);

        if (status != WSYNC_ERR_TIMEOUT) {
            return status;
        }
        status = wsync_link_drain(link, awaited, err);
        if (status == WSYNC_ERR_CLOSED && wsync_event_query(event) >= value) {
            return WSYNC_OK; /* the last thing the peer did */
        }
        if (status != WSYNC_OK) {
            return status;
        }
        if (slice == 0) {
            return fail_timeout(link, awaited, err);
        }
    }
    return WSYNC_OK;
}

wsync_status_t wsync_link_order(wsync_link_t *link, wsync_stream_t *stream, uint64_t offset,
                                uint64_t value, int64_t deadline_ms,
                                wsync_awaited_t awaited, wsync_error_t *err)
{
    unsigned ahead;

    if (stream == NULL) {
        return wsync_link_wait_word(link, offset, value, deadline_ms, awaited, err);
    }
    if (wsync_event_query(wsync_link_event(link, offset)) >= value) {
        return WSYNC_OK;
    }
    ahead = wsync_stream_ahead(stream);
    if (value > ahead) {
        const wsync_status_t status =
            wsync_link_wait_word(link, offset, value - ahead, deadline_ms, awaited, err);

        if (status != WSYNC_OK) {
            return status;
        }
    }
    return wsync_stream_wait(stream, wsync_link_event(link, offset), value, err);
}

void wsync_link_farewell(wsync_link_t *link, uint32_t kind, const char *text)
{
    if (link->channel != NULL) {
        wsync_frame_t frame = {.kind = kind};

        wsync_link_write(&frame, text);
        (void)wsync_channel_send(link->channel, &frame, SESSION_FAREWELL_MS, NULL);
        wsync_channel_destroy(link->channel);
        link->channel = NULL;
    }
    wsync_link_end(link, text);
}

void wsync_link_fini(wsync_link_t *link)
{
    wsync_channel_destroy(link->channel);
    link->channel = NULL;
    wsync_memory_destroy(link->control);
    link->control = NULL;
}
