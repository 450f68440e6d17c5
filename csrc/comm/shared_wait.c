/* SPDX-License-Identifier: Apache-2.0
 * Shared-memory exchange: words and the frames that announce them. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "comm/shared_internal.h"

enum { WORD_STRIDE = 64 };

wsync_status_t wsync_shared_check(const wsync_comm_t *comm, wsync_error_t *err)
{
    if (comm->ended) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "shared",
                          "the exchange has ended: %.600s", comm->reason);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_shared_settle(wsync_comm_t *comm, wsync_status_t status,
                                   const wsync_error_t *err)
{
    if (status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT && !comm->ended) {
        comm->ended = true;
        (void)snprintf(comm->reason, sizeof(comm->reason), "%s",
                       err != NULL ? err->message : wsync_status_text(status));
    }
    return status;
}

wsync_status_t wsync_shared_name_rank(const wsync_comm_t *comm, uint32_t rank,
                                      wsync_status_t status, wsync_error_t *err)
{
    if (err != NULL) {
        const wsync_error_t inner = *err;

        (void)wsync_fail(err, status, inner.native, inner.origin,
                         "rank %u (pid %d): %.700s", (unsigned)rank, comm->peers[rank].pid,
                         inner.message);
    }
    return status;
}

wsync_event_t wsync_shared_event(wsync_memory_t *control, shared_word_t word)
{
    return (wsync_event_t){.memory = control, .offset = (uint64_t)word * WORD_STRIDE};
}

/* Takes one frame.  Announcements only grow, and nobody can have read what was not posted.
 */
static wsync_status_t handle_frame(wsync_comm_t *comm, uint32_t rank,
                                   const wsync_frame_t *frame, wsync_error_t *err)
{
    shared_peer_t *peer = &comm->peers[rank];
    const uint64_t value = frame->arguments[0];

    if (frame->fd_count == 0 && !peer->departed) {
        if (frame->kind == SHARED_READY && value > peer->announced[SHARED_WORD_READY]) {
            peer->announced[SHARED_WORD_READY] = value;
            return WSYNC_OK;
        }
        if (frame->kind == SHARED_RELEASED &&
            value > peer->announced[SHARED_WORD_RELEASED] &&
            value <= comm->recorded[SHARED_WORD_READY]) {
            peer->announced[SHARED_WORD_RELEASED] = value;
            return WSYNC_OK;
        }
        if (frame->kind == SHARED_BYE) {
            peer->departed = true;
            return WSYNC_OK;
        }
    }
    return wsync_fail(
        err, WSYNC_ERR_PROTOCOL, 0, "shared",
        "rank %u (pid %d) sent a frame of kind %u (%llu; %u descriptors) that "
        "does not fit the state of the exchange",
        (unsigned)rank, peer->pid, (unsigned)frame->kind, (unsigned long long)value,
        (unsigned)frame->fd_count);
}

static wsync_status_t fail_gone(const wsync_comm_t *comm, uint32_t rank, uint32_t round,
                                wsync_error_t *err)
{
    const shared_peer_t *peer = &comm->peers[rank];

    return wsync_fail(err, WSYNC_ERR_CLOSED, 0, "shared",
                      "rank %u (pid %d) %s while round %u was under way", (unsigned)rank,
                      peer->pid,
                      peer->departed ? "had left the exchange" : "closed the connection",
                      (unsigned)round);
}

/* Takes everything that one peer has sent. */
static wsync_status_t drain_peer(wsync_comm_t *comm, uint32_t rank, uint32_t round,
                                 wsync_error_t *err)
{
    shared_peer_t *peer = &comm->peers[rank];

    while (peer->channel != NULL) {
        wsync_frame_t frame;
        wsync_status_t status = wsync_channel_receive(peer->channel, &frame, 0, err);

        if (status == WSYNC_ERR_TIMEOUT) {
            return WSYNC_OK;
        }
        if (status == WSYNC_OK) {
            status = handle_frame(comm, rank, &frame, err);
            wsync_frame_fini(&frame);
        } else if (status == WSYNC_ERR_CLOSED) {
            wsync_channel_destroy(peer->channel);
            peer->channel = NULL;
            status = peer->departed ? WSYNC_OK : fail_gone(comm, rank, round, err);
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

wsync_status_t wsync_shared_poll(wsync_comm_t *comm, int timeout_ms, uint32_t round,
                                 wsync_error_t *err)
{
    int count;

    /* A negative descriptor is skipped: entry i stays rank i's. */
    for (uint32_t i = 0; i < comm->rank_count; i++) {
        const wsync_channel_t *channel = comm->peers[i].channel;

        comm->polled[i] = (struct pollfd){
            .fd = channel != NULL ? wsync_channel_fd(channel) : -1, .events = POLLIN};
    }
    count = poll(comm->polled, comm->rank_count, timeout_ms);
    if (count < 0 && errno != EINTR) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "poll", "poll: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < comm->rank_count && count > 0; i++) {
        if (comm->polled[i].revents != 0) {
            const wsync_status_t status = drain_peer(comm, i, round, err);

            if (status != WSYNC_OK) {
                return status;
            }
        }
    }
    return WSYNC_OK;
}

static wsync_status_t fail_timeout(const wsync_comm_t *comm, uint32_t rank,
                                   shared_word_t word, uint32_t round, wsync_error_t *err)
{
    return wsync_fail(
        err, WSYNC_ERR_TIMEOUT, 0, "shared",
        "deadline passed in round %u while rank %u (pid %d) was awaited to %s",
        (unsigned)round, (unsigned)rank, comm->peers[rank].pid,
        word == SHARED_WORD_READY ? "send" : "read what it was sent");
}

wsync_status_t wsync_shared_await(wsync_comm_t *comm, uint32_t rank, shared_word_t word,
                                  uint64_t value, int64_t deadline_ms, uint32_t round,
                                  wsync_error_t *err)
{
    const shared_peer_t *peer = &comm->peers[rank];
    const wsync_event_t event = wsync_shared_event(peer->control, word);
    wsync_status_t status;

    while (peer->announced[word] < value) {
        const int left = wsync_left_ms(deadline_ms, INT_MAX);

        if (peer->channel == NULL) {
            return fail_gone(comm, rank, round, err);
        }
        status = wsync_shared_poll(comm, left, round, err);
        if (status != WSYNC_OK) {
            return status;
        }
        if (left == 0 && peer->announced[word] < value) {
            return fail_timeout(comm, rank, word, round, err);
        }
    }
    while (wsync_event_query(event) < value) {
        const int slice = wsync_left_ms(deadline_ms, SHARED_SLICE_MS);

        status = wsync_event_wait(event, value, slice, err);
        if (status == WSYNC_ERR_TIMEOUT) {
            status = wsync_shared_poll(comm, 0, round, err);
            if (status == WSYNC_OK && peer->channel == NULL &&
                wsync_event_query(event) < value) {
                status = fail_gone(comm, rank, round, err);
            } else if (status == WSYNC_OK && slice == 0) {
                status = fail_timeout(comm, rank, word, round, err);
            }
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

static wsync_status_t send_word(wsync_comm_t *comm, uint32_t rank, shared_word_t word,
                                uint64_t value, uint32_t round, wsync_error_t *err)
{
    shared_peer_t *peer = &comm->peers[rank];
    const wsync_frame_t frame = {
        .kind = word == SHARED_WORD_READY ? SHARED_READY : SHARED_RELEASED,
        .arguments = {value}};
    wsync_status_t status = WSYNC_ERR_CLOSED;

    if (peer->channel != NULL) {
        status = wsync_channel_send(peer->channel, &frame, SHARED_SEND_MS, err);
    }
    if (status == WSYNC_ERR_CLOSED) {
        status = drain_peer(comm, rank, round, err);
        /* Who has ended its update and left does not mind that its bytes were read. */
        if (status == WSYNC_OK && !(peer->departed && word == SHARED_WORD_RELEASED)) {
            status = fail_gone(comm, rank, round, err);
        }
    }
    if (status == WSYNC_ERR_TIMEOUT) {
        /* Not a state to come back to: others have been told already. */
        status =
            wsync_fail(err, WSYNC_ERR_CLOSED, 0, "shared",
                       "rank %u (pid %d) has not read its messages for %d ms in round %u",
                       (unsigned)rank, peer->pid, SHARED_SEND_MS, (unsigned)round);
    }
    return status;
}

wsync_status_t wsync_shared_announce(wsync_comm_t *comm, shared_word_t word, uint64_t value,
                                     wsync_stream_t *stream, uint32_t round,
                                     wsync_error_t *err)
{
    bool recorded = false;

    for (uint32_t i = 0; i < comm->rank_count; i++) {
        wsync_status_t status;

        if (!comm->marked[i]) {
            continue;
        }
        if (!recorded) {
            status = wsync_stream_record(stream, wsync_shared_event(comm->control, word),
                                         value, err);
            if (status != WSYNC_OK) {
                return status;
            }
            comm->recorded[word] = value;
            recorded = true;
        }
        status = send_word(comm, i, word, value, round, err);
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}
