/* SPDX-License-Identifier: Apache-2.0
 * Shared-memory exchange: the rounds.  Round k of an update has the sequence number
 * base + k + 1, which all ranks count alike; its parity picks the half of the staging. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/shared_internal.h"

static uint64_t sequence_of(const wsync_comm_t *self, uint32_t round)
{
    return self->base + (uint64_t)round + 1;
}

/* stream NULL: the call has none. */
static wsync_status_t require_round(const wsync_comm_t *self, const char *call,
                                    uint32_t round, uint32_t next, uint32_t limit,
                                    const wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = wsync_shared_check(self, err);

    if (status == WSYNC_OK && stream != NULL) {
        status = wsync_stream_check(stream, self->device, "the exchange", err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (round != next || round >= limit) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "shared",
                          "%s: round %u, the next is %u and the limit now %u of %u", call,
                          (unsigned)round, (unsigned)next, (unsigned)limit,
                          (unsigned)self->round_count);
    }
    return WSYNC_OK;
}

static wsync_status_t check_message(const wsync_comm_t *self, uint32_t round,
                                    const wsync_message_t *message, wsync_error_t *err)
{
    uint64_t half_nbytes = self->half_nbytes;
    uint64_t end = 0;

    for (uint32_t i = 0; i < message->peer_count; i++) {
        if (message->peers[i] >= self->rank_count || message->peers[i] == message->source) {
            return wsync_fail(
                err, WSYNC_ERR_INVALID, 0, "shared",
                "round %u: message from rank %u to rank %u, the exchange has %u",
                (unsigned)round, (unsigned)message->source, (unsigned)message->peers[i],
                (unsigned)self->rank_count);
        }
    }
    if (message->source >= self->rank_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "shared",
                          "round %u: message from rank %u, the exchange has %u",
                          (unsigned)round, (unsigned)message->source,
                          (unsigned)self->rank_count);
    }
    if (message->source != self->rank) {
        half_nbytes = self->peers[message->source].half_nbytes;
    }
    if (__builtin_add_overflow(message->send_offset, message->nbytes, &end) ||
        end > half_nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "shared",
                          "round %u: message of %llu bytes at %llu, the staging of rank %u "
                          "has %llu",
                          (unsigned)round, (unsigned long long)message->nbytes,
                          (unsigned long long)message->send_offset,
                          (unsigned)message->source, (unsigned long long)half_nbytes);
    }
    return WSYNC_OK;
}

static wsync_status_t shared_begin(wsync_comm_t *comm, const wsync_plan_t *plan,
                                   wsync_error_t *err)
{
    const uint32_t round_count = wsync_plan_round_count(plan);
    wsync_status_t status = wsync_shared_check(comm, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!comm->connected || comm->next_release != comm->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "shared",
                          "begin: %s, %u of %u rounds are released",
                          comm->connected ? "the last update has not ended"
                                          : "the exchange is not connected",
                          (unsigned)comm->next_release, (unsigned)comm->round_count);
    }
    if (wsync_plan_send_nbytes(plan) > comm->half_nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "shared",
                          "the plan needs %llu bytes of send staging a round, rank %u's "
                          "exchange has %llu",
                          (unsigned long long)wsync_plan_send_nbytes(plan),
                          (unsigned)comm->rank, (unsigned long long)comm->half_nbytes);
    }
    for (uint32_t round = 0; round < round_count; round++) {
        size_t count = 0;
        const wsync_message_t *messages = wsync_plan_messages(plan, round, &count);

        for (size_t i = 0; i < count; i++) {
            status = check_message(comm, round, &messages[i], err);
            if (status != WSYNC_OK) {
                return status;
            }
        }
    }
    comm->base += comm->round_count;
    comm->plan = plan;
    comm->round_count = round_count;
    comm->next_acquire = 0;
    comm->next_post = 0;
    comm->next_wait = 0;
    comm->next_release = 0;
    return WSYNC_OK;
}

static wsync_status_t shared_acquire(wsync_comm_t *comm, uint32_t round, int timeout_ms,
                                     wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const size_t half = sequence_of(comm, round) & 1;
    /* Two rounds ahead of this rank's own release, all ranks would wait for each other. */
    const uint32_t limit = comm->round_count - comm->next_release > 2
                               ? comm->next_release + 2
                               : comm->round_count;
    wsync_status_t status =
        require_round(comm, "acquire", round, comm->next_acquire, limit, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_shared_poll(comm, 0, round, err);
    for (uint32_t i = 0; i < comm->rank_count && status == WSYNC_OK; i++) {
        if (comm->readers[half][i]) {
            status = wsync_shared_await(comm, i, SHARED_WORD_RELEASED, comm->posted[half],
                                        deadline, round, err);
        }
    }
    if (status == WSYNC_OK) {
        memset(comm->readers[half], 0, comm->rank_count * sizeof(bool));
        comm->next_acquire++;
    }
    return wsync_shared_settle(comm, status, err);
}

static wsync_status_t shared_spans(wsync_comm_t *comm, uint32_t round, wsync_span_t *spans,
                                   size_t count, wsync_error_t *err)
{
    const uint64_t half = sequence_of(comm, round) & 1;
    const wsync_message_t *messages;
    size_t message_count = 0;
    const wsync_status_t status = wsync_shared_check(comm, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (round >= comm->next_acquire || (uint64_t)round + 2 < comm->next_acquire) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "shared",
                          "spans: round %u, %u rounds are acquired", (unsigned)round,
                          (unsigned)comm->next_acquire);
    }
    messages = wsync_plan_messages(comm->plan, round, &message_count);
    if (count != message_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "shared",
                          "spans: room for %zu, round %u has %zu messages", count,
                          (unsigned)round, message_count);
    }
    for (size_t i = 0; i < count; i++) {
        const wsync_message_t *message = &messages[i];
        const bool mine = message->source == comm->rank;
        const shared_peer_t *peer = &comm->peers[message->source];
        const wsync_memory_t *staging = mine ? comm->staging : peer->staging;
        const uint64_t half_nbytes = mine ? comm->half_nbytes : peer->half_nbytes;

        spans[i].data =
            (uint8_t *)staging->data + half * half_nbytes + message->send_offset;
        spans[i].nbytes = message->nbytes;
    }
    return WSYNC_OK;
}

static wsync_status_t shared_post(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err)
{
    const uint64_t sequence = sequence_of(comm, round);
    const wsync_message_t *messages;
    size_t count = 0;
    wsync_status_t status = require_round(comm, "post", round, comm->next_post,
                                          comm->next_acquire, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    messages = wsync_plan_messages(comm->plan, round, &count);
    memset(comm->marked, 0, comm->rank_count * sizeof(bool));
    for (size_t i = 0; i < count; i++) {
        for (uint32_t k = 0; messages[i].source == comm->rank && k < messages[i].peer_count;
             k++) {
            comm->marked[messages[i].peers[k]] = true;
        }
    }
    status = wsync_shared_announce(comm, SHARED_WORD_READY, sequence, stream, round, err);
    if (status == WSYNC_OK) {
        memcpy(comm->readers[sequence & 1], comm->marked, comm->rank_count * sizeof(bool));
        comm->posted[sequence & 1] = sequence;
        comm->next_post++;
    }
    return wsync_shared_settle(comm, status, err);
}

static wsync_status_t shared_wait(wsync_comm_t *comm, uint32_t round, int timeout_ms,
                                  wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    const wsync_message_t *messages;
    size_t count = 0;
    wsync_status_t status =
        require_round(comm, "wait", round, comm->next_wait, comm->next_post, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    messages = wsync_plan_messages(comm->plan, round, &count);
    status = wsync_shared_poll(comm, 0, round, err);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (messages[i].source != comm->rank) {
            status = wsync_shared_await(comm, messages[i].source, SHARED_WORD_READY,
                                        sequence_of(comm, round), deadline, round, err);
        }
    }
    if (status == WSYNC_OK) {
        comm->next_wait++;
    }
    return wsync_shared_settle(comm, status, err);
}

static wsync_status_t shared_release(wsync_comm_t *comm, uint32_t round,
                                     wsync_stream_t *stream, wsync_error_t *err)
{
    const wsync_message_t *messages;
    size_t count = 0;
    wsync_status_t status = require_round(comm, "release", round, comm->next_release,
                                          comm->next_wait, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    messages = wsync_plan_messages(comm->plan, round, &count);
    memset(comm->marked, 0, comm->rank_count * sizeof(bool));
    for (size_t i = 0; i < count; i++) {
        if (messages[i].source != comm->rank) {
            comm->marked[messages[i].source] = true;
        }
    }
    status = wsync_shared_announce(comm, SHARED_WORD_RELEASED, sequence_of(comm, round),
                                   stream, round, err);
    if (status == WSYNC_OK) {
        comm->next_release++;
    }
    return wsync_shared_settle(comm, status, err);
}

static void shared_close(wsync_comm_t *comm)
{
    const bool orderly =
        comm->connected && !comm->ended && comm->next_release == comm->round_count;
    const wsync_frame_t bye = {.kind = SHARED_BYE};

    for (uint32_t i = 0; comm->peers != NULL && i < comm->rank_count; i++) {
        shared_peer_t *peer = &comm->peers[i];

        if (peer->channel != NULL && orderly) {
            (void)wsync_channel_send(peer->channel, &bye, SHARED_SLICE_MS, NULL);
        }
        wsync_channel_destroy(peer->channel);
        peer->channel = NULL;
    }
    wsync_listener_destroy(comm->listener);
    comm->listener = NULL;
    comm->plan = NULL;
    if (!comm->ended) {
        comm->ended = true;
        (void)snprintf(comm->reason, sizeof(comm->reason), "it was closed here");
    }
}

static void shared_destroy(wsync_comm_t *comm)
{
    if (comm == NULL) {
        return;
    }
    shared_close(comm);
    for (uint32_t i = 0; comm->peers != NULL && i < comm->rank_count; i++) {
        wsync_memory_destroy(comm->peers[i].staging);
        wsync_memory_destroy(comm->peers[i].control);
    }
    wsync_memory_destroy(comm->staging);
    /* Streams that still have to record retain it. */
    wsync_memory_destroy(comm->control);
    free(comm->peers);
    free(comm->polled);
    free(comm->marked);
    free(comm->readers[0]);
    free(comm->readers[1]);
    free(comm);
}

const wsync_comm_ops_t *wsync_shared_comm_ops(void)
{
    static const wsync_comm_ops_t ops = {
        .name = "shared",
        .begin = shared_begin,
        .acquire = shared_acquire,
        .spans = shared_spans,
        .post = shared_post,
        .wait = shared_wait,
        .release = shared_release,
        .close = shared_close,
        .destroy = shared_destroy,
    };

    return &ops;
}
