/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/link.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum {
    WORD_SLICE_MS = 10,
    CLOSE_MS = 100,
};

wsync_status_t wsync_ending_check(const wsync_ending_t *ending, wsync_error_t *err)
{
    return !ending->ended
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_STATE, 0, ending->name,
                            "the %s has ended: %.600s", ending->name, ending->reason);
}

void wsync_ending_note(wsync_ending_t *ending, const char *reason)
{
    if (!ending->ended) {
        ending->ended = true;
        (void)snprintf(ending->reason, sizeof(ending->reason), "%s", reason);
    }
}

wsync_status_t wsync_ending_note_failure(wsync_ending_t *ending, wsync_status_t status,
                                         const wsync_error_t *err)
{
    if (status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT) {
        wsync_ending_note(ending, err != NULL ? err->message : wsync_status_text(status));
    }
    return status;
}

void wsync_link_open(wsync_link_t *link, wsync_channel_t *channel)
{
    link->channel = channel;
    link->pid = wsync_channel_peer_pid(channel);
}

void wsync_link_close(wsync_link_t *link)
{
    wsync_channel_destroy(link->channel);
    link->channel = NULL;
}

void wsync_link_close_with(wsync_link_t *link, uint32_t kind, const char *text)
{
    wsync_frame_t frame = {.kind = kind};

    if (link->channel != NULL) {
        wsync_link_write(&frame, text);
        (void)wsync_channel_send(link->channel, &frame, CLOSE_MS, NULL);
        wsync_link_close(link);
    }
}

void wsync_link_write(wsync_frame_t *frame, const char *text)
{
    frame->payload_nbytes = (uint32_t)strnlen(text, WSYNC_FRAME_PAYLOAD_NBYTES);
    memcpy(frame->payload, text, frame->payload_nbytes);
}

void wsync_link_read(const wsync_frame_t *frame, char text[WSYNC_LINK_TEXT_NBYTES])
{
    uint32_t length = 0;

    while (length < frame->payload_nbytes && length < WSYNC_LINK_TEXT_NBYTES - 1) {
        const uint8_t byte = frame->payload[length];

        text[length++] = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f
                             ? '?'
                             : (char)byte;
    }
    text[length] = '\0';
}

/* "round 7" */
static const char *awaited_text(wsync_awaited_t awaited, char text[64])
{
    if (awaited.number < 0) {
        return awaited.what;
    }
    (void)snprintf(text, 64, "%s %" PRId64, awaited.what, awaited.number);
    return text;
}

wsync_status_t wsync_link_fail_closed(const wsync_link_t *link, int native,
                                      wsync_awaited_t awaited, wsync_error_t *err)
{
    char text[64];

    return wsync_fail(err, WSYNC_ERR_CLOSED, native, link->name,
                      "%s (pid %d) %s%s while %s was awaited", link->peer, link->pid,
                      link->departed ? "had left the " : "closed the connection",
                      link->departed ? link->name : "", awaited_text(awaited, text));
}

wsync_status_t wsync_link_fail_timeout(const wsync_link_t *link, wsync_awaited_t awaited,
                                       wsync_error_t *err)
{
    char text[64];

    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, link->name,
                      "deadline passed while %s of %s (pid %d) was awaited",
                      awaited_text(awaited, text), link->peer, link->pid);
}

wsync_status_t wsync_link_unexpected(const wsync_link_t *link, const wsync_frame_t *frame,
                                     wsync_error_t *err)
{
    return wsync_fail(
        err, WSYNC_ERR_PROTOCOL, 0, link->name,
        "%s (pid %d) sent a frame of kind %u (%" PRIu64 ", %" PRIu64 ", %" PRIu64
        "; %u descriptors) that does not fit the state of the "
        "%s",
        link->peer, link->pid, frame->kind, frame->arguments[0], frame->arguments[1],
        frame->arguments[2], frame->fd_count, link->name);
}

/* Receives and handles one frame; TIMEOUT carries no message. */
static wsync_status_t take_frame(wsync_link_t *link, int timeout_ms,
                                 wsync_awaited_t awaited, wsync_error_t *err)
{
    char text[WSYNC_LINK_TEXT_NBYTES];
    wsync_frame_t frame;
    wsync_status_t status = WSYNC_ERR_CLOSED;
    int native = 0;

    if (link->channel != NULL) {
        status = wsync_channel_receive(link->channel, &frame, timeout_ms, err);
        native = status == WSYNC_ERR_CLOSED && err != NULL ? err->native : 0;
    }
    if (status == WSYNC_ERR_CLOSED) {
        wsync_link_close(link);
        return wsync_link_fail_closed(link, native, awaited, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (frame.kind == WSYNC_LINK_FAILED || frame.kind == WSYNC_LINK_ABORT) {
        wsync_link_read(&frame, text);
        status = wsync_fail(err, WSYNC_ERR_REMOTE, 0, link->name, "%s (pid %d) %s: %s",
                            link->peer, link->pid,
                            frame.kind == WSYNC_LINK_ABORT ? "aborted" : "failed", text);
    } else {
        status = link->handle(link->owner, &frame, err);
    }
    wsync_frame_fini(&frame);
    return status;
}

wsync_status_t wsync_link_pump(wsync_link_t *link, int64_t deadline_ms,
                               wsync_awaited_t awaited, wsync_error_t *err)
{
    const wsync_status_t status =
        take_frame(link, wsync_left_ms(deadline_ms, INT_MAX), awaited, err);

    return status == WSYNC_ERR_TIMEOUT ? wsync_link_fail_timeout(link, awaited, err)
                                       : status;
}

wsync_status_t wsync_link_drain(wsync_link_t *link, wsync_awaited_t awaited,
                                wsync_error_t *err)
{
    while (link->can_accept == NULL || link->can_accept(link->owner)) {
        const wsync_status_t status = take_frame(link, 0, awaited, err);

        if (status == WSYNC_ERR_TIMEOUT || (status == WSYNC_ERR_CLOSED && link->departed)) {
            return WSYNC_OK;
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

wsync_status_t wsync_link_send(wsync_link_t *link, const wsync_frame_t *frame,
                               int timeout_ms, wsync_awaited_t awaited, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_ERR_CLOSED;
    int native = 0;

    if (link->channel != NULL) {
        status = wsync_channel_send(link->channel, frame, timeout_ms, err);
        native = status == WSYNC_ERR_CLOSED && err != NULL ? err->native : 0;
    }
    if (status == WSYNC_ERR_CLOSED) {
        /* What the peer said before it left is the better error. */
        status = wsync_link_drain(link, awaited, err);
        return status != WSYNC_OK ? status
                                  : wsync_link_fail_closed(link, native, awaited, err);
    }
    return status == WSYNC_ERR_TIMEOUT ? wsync_link_fail_timeout(link, awaited, err)
                                       : status;
}

wsync_event_t wsync_link_event(const wsync_link_t *link, uint64_t offset)
{
    return (wsync_event_t){.memory = link->control, .offset = offset};
}

wsync_status_t wsync_link_announce(wsync_link_t *link, wsync_stream_t *stream,
                                   uint64_t offset, uint64_t value,
                                   const wsync_frame_t *frame, int timeout_ms,
                                   wsync_awaited_t awaited, wsync_error_t *err)
{
    wsync_status_t status = wsync_link_drain(link, awaited, err);

    /* Recorded first: the frame must not announce a word that nobody will write. */
    if (status == WSYNC_OK && stream != NULL && !link->recorded) {
        status = wsync_stream_record(stream, wsync_link_event(link, offset), value, err);
        link->recorded = status == WSYNC_OK;
    }
    if (status == WSYNC_OK) {
        status = wsync_link_send(link, frame, timeout_ms, awaited, err);
    }
    link->recorded = link->recorded && status != WSYNC_OK;
    return status;
}

wsync_status_t wsync_link_wait_word(wsync_link_t *link, uint64_t offset, uint64_t value,
                                    int64_t deadline_ms, wsync_awaited_t awaited,
                                    wsync_error_t *err)
{
    const wsync_event_t event = wsync_link_event(link, offset);

    while (wsync_event_query(event) < value) {
        const int slice = wsync_left_ms(deadline_ms, WORD_SLICE_MS);
        wsync_status_t status = wsync_event_wait(event, value, slice, err);

        if (status != WSYNC_ERR_TIMEOUT) {
            return status;
        }
        status = link->look != NULL ? link->look(link->owner, awaited, err)
                                    : wsync_link_drain(link, awaited, err);
        if (link->channel == NULL && (status == WSYNC_OK || status == WSYNC_ERR_CLOSED)) {
            /* The word may be the last thing that the peer did. */
            return wsync_event_query(event) >= value
                       ? WSYNC_OK
                       : wsync_link_fail_closed(link, 0, awaited, err);
        }
        if (status == WSYNC_OK && slice == 0) {
            status = wsync_link_fail_timeout(link, awaited, err);
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

wsync_status_t wsync_link_order(wsync_link_t *link, wsync_stream_t *stream, uint64_t offset,
                                uint64_t value, int64_t deadline_ms,
                                wsync_awaited_t awaited, wsync_error_t *err)
{
    const wsync_event_t event = wsync_link_event(link, offset);
    const unsigned ahead = stream != NULL ? wsync_stream_ahead(stream) : 0;
    const wsync_status_t status =
        value > ahead
            ? wsync_link_wait_word(link, offset, value - ahead, deadline_ms, awaited, err)
            : WSYNC_OK;

    return status == WSYNC_OK && wsync_event_query(event) < value
               ? wsync_stream_wait(stream, event, value, err)
               : status;
}
