/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/comm_internal.h"

static const char name[] = "exchange";

wsync_status_t wsync_comm_init(wsync_comm_t *comm, const wsync_comm_ops_t *ops,
                               const wsync_device_t *device, uint32_t rank,
                               uint32_t rank_count, uint64_t staging_nbytes,
                               wsync_error_t *err)
{
    if (rank >= rank_count || staging_nbytes > UINT64_MAX / 4) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "rank %u must be below the number of ranks, %u, and staging of "
                          "%llu bytes below 2^62",
                          rank, rank_count, (unsigned long long)staging_nbytes);
    }
    comm->ops = ops;
    comm->device = device;
    comm->ending.name = name;
    comm->rank = rank;
    comm->rank_count = rank_count;
    return WSYNC_OK;
}

const char *wsync_comm_address(const wsync_comm_t *comm)
{
    return comm->address;
}

uint64_t wsync_comm_nbytes(const wsync_comm_t *comm)
{
    return comm->nbytes;
}

wsync_status_t wsync_comm_connect(wsync_comm_t *comm, const char *const *addresses,
                                  int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (comm->connected) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "connect: the exchange is connected already");
    }
    status = comm->ops->connect(comm, addresses, deadline, err);
    comm->connected = status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

/* stream NULL: the call has none. */
static wsync_status_t require_round(const wsync_comm_t *comm, const char *call,
                                    uint32_t round, uint32_t next, uint32_t limit,
                                    const wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status == WSYNC_OK && stream != NULL) {
        status = wsync_stream_check(stream, comm->device, "the exchange", err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (round != next || round >= limit) {
        return wsync_fail(
            err, WSYNC_ERR_STATE, 0, name,
            "%s: round %u is out of turn: the next is %u, and %u of %u rounds "
            "are possible now",
            call, round, next, limit, comm->round_count);
    }
    return WSYNC_OK;
}

static wsync_status_t check_message(const wsync_comm_t *comm, uint32_t round,
                                    const wsync_message_t *message, wsync_error_t *err)
{
    uint32_t last = message->source;
    uint64_t half_nbytes;
    uint64_t end;

    for (uint32_t i = 0; i < message->peer_count; i++) {
        last = message->peers[i] > last ? message->peers[i] : last;
    }
    if (last >= comm->rank_count) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, name,
            "round %u: a message names rank %u, but the exchange has %u ranks", round, last,
            comm->rank_count);
    }
    half_nbytes = comm->ops->half_nbytes(comm, message->source);
    end = comm->ops->offset(comm, message) + message->nbytes;
    return end <= half_nbytes
               ? WSYNC_OK
               : wsync_fail(
                     err, WSYNC_ERR_INVALID, 0, name,
                     "round %u: messages need %llu bytes, but the staging of rank %u "
                     "has %llu",
                     round, (unsigned long long)end, message->source,
                     (unsigned long long)half_nbytes);
}

/* Whether a plan can be exchanged now. */
static wsync_status_t check_begin(const wsync_comm_t *comm, const wsync_plan_t *plan,
                                  wsync_error_t *err)
{
    const uint64_t send_nbytes = comm->ops->half_nbytes(comm, comm->rank);
    wsync_status_t status = WSYNC_OK;

    if (!comm->connected || comm->next_release != comm->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "begin: %s (%u of %u rounds are released)",
                          comm->connected ? "the last update has not ended"
                                          : "the exchange is not connected",
                          comm->next_release, comm->round_count);
    }
    if (wsync_plan_send_nbytes(plan) > send_nbytes) {
        return wsync_fail(
            err, WSYNC_ERR_INVALID, 0, name,
            "the plan needs %llu bytes of send staging a round, but rank %u's "
            "exchange has %llu",
            (unsigned long long)wsync_plan_send_nbytes(plan), comm->rank,
            (unsigned long long)send_nbytes);
    }
    for (uint32_t round = 0; round < wsync_plan_round_count(plan); round++) {
        size_t count = 0;
        const wsync_message_t *messages = wsync_plan_messages(plan, round, &count);

        for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
            status = check_message(comm, round, &messages[i], err);
        }
    }
    return status;
}

wsync_status_t wsync_comm_begin(wsync_comm_t *comm, const wsync_plan_t *plan,
                                wsync_error_t *err)
{
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status == WSYNC_OK) {
        status = check_begin(comm, plan, err);
    }
    if (status == WSYNC_OK && comm->parked) {
        status = comm->ops->unpark(comm, err);
        comm->parked = status != WSYNC_OK;
    }
    if (status != WSYNC_OK) {
        return status;
    }
    comm->base += comm->round_count;
    comm->plan = plan;
    comm->round_count = wsync_plan_round_count(plan);
    comm->next_acquire = 0;
    comm->next_post = 0;
    comm->next_wait = 0;
    comm->next_release = 0;
    return WSYNC_OK;
}

wsync_status_t wsync_comm_acquire(wsync_comm_t *comm, uint32_t round, int timeout_ms,
                                  wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    /* Two rounds ahead of this rank's own release, all ranks would wait for each other. */
    const uint32_t limit = comm->round_count - comm->next_release > 2
                               ? comm->next_release + 2
                               : comm->round_count;
    wsync_status_t status =
        require_round(comm, "acquire", round, comm->next_acquire, limit, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = comm->ops->acquire(comm, round, deadline, err);
    comm->next_acquire += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_spans(wsync_comm_t *comm, uint32_t round, wsync_span_t *spans,
                                size_t count, wsync_error_t *err)
{
    const wsync_message_t *messages;
    size_t message_count = 0;
    const wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (round >= comm->next_acquire || (uint64_t)round + 2 < comm->next_acquire) {
        return wsync_fail(
            err, WSYNC_ERR_STATE, 0, name,
            "spans: round %u is not one of the last two of the %u rounds that "
            "were acquired",
            round, comm->next_acquire);
    }
    messages = wsync_plan_messages(comm->plan, round, &message_count);
    if (count != message_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "spans: there is room for %zu messages, but round %u has %zu",
                          count, round, message_count);
    }
    for (size_t i = 0; i < count; i++) {
        spans[i].data = comm->ops->place(comm, round, &messages[i]);
        spans[i].nbytes = messages[i].nbytes;
    }
    return WSYNC_OK;
}

wsync_status_t wsync_comm_post(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                               wsync_error_t *err)
{
    wsync_status_t status = require_round(comm, "post", round, comm->next_post,
                                          comm->next_acquire, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = comm->ops->post(comm, round, stream, err);
    comm->next_post += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_wait(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                               int timeout_ms, wsync_error_t *err)
{
    const int64_t deadline = wsync_deadline_ms(timeout_ms);
    wsync_status_t status =
        require_round(comm, "wait", round, comm->next_wait, comm->next_post, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = comm->ops->wait(comm, round, stream, deadline, err);
    comm->next_wait += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_release(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = require_round(comm, "release", round, comm->next_release,
                                          comm->next_wait, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = comm->ops->release(comm, round, stream, err);
    comm->next_release += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_check(wsync_comm_t *comm, wsync_error_t *err)
{
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status == WSYNC_OK && comm->ops->check != NULL) {
        status = comm->ops->check(comm, err);
    }
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_park(wsync_comm_t *comm, wsync_error_t *err)
{
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status != WSYNC_OK || comm->parked || comm->ops->park == NULL) {
        return status;
    }
    if (comm->next_release != comm->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "park: only %u of %u rounds are released", comm->next_release,
                          comm->round_count);
    }
    status = comm->ops->park(comm, err);
    comm->parked = status == WSYNC_OK;
    return status;
}

void wsync_comm_close(wsync_comm_t *comm)
{
    const bool orderly =
        comm->connected && !comm->ending.ended && comm->next_release == comm->round_count;

    comm->ops->close(comm, orderly);
    comm->plan = NULL;
    wsync_ending_note(&comm->ending, "it was closed here");
}

void wsync_comm_destroy(wsync_comm_t *comm)
{
    if (comm != NULL) {
        wsync_comm_close(comm);
        comm->ops->destroy(comm);
    }
}
