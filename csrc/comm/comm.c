/* SPDX-License-Identifier: Apache-2.0
 * Round k of an update has the sequence number base + k + 1, which all ranks count alike;
 * its parity picks the half of the staging. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm_internal.h"

enum {
    CONTROL_NBYTES = 4096,
    PAGE_NBYTES = 4096,
    WORD_STRIDE = 64, /* a cache line of its own for each word */
    SEND_MS = 1000,   /* queues hold a few frames: they are never full for long */
    SLICE_MS = 10,
};

static const char name[] = "exchange";

/* --- what the others send --- */

/* Announcements only grow, and nobody can have read what was not posted. */
static wsync_status_t handle_frame(void *owner, wsync_frame_t *frame, wsync_error_t *err)
{
    comm_peer_t *peer = owner;
    const uint64_t value = frame->arguments[0];
    const comm_word_t word =
        frame->kind == COMM_READY ? COMM_WORD_READY : COMM_WORD_RELEASED;

    if (frame->fd_count == 0 && !peer->link.departed) {
        if (frame->kind == COMM_BYE) {
            peer->link.departed = true;
            return WSYNC_OK;
        }
        if ((frame->kind == COMM_READY ||
             (frame->kind == COMM_RELEASED &&
              value <= peer->comm->recorded[COMM_WORD_READY])) &&
            value > peer->announced[word]) {
            peer->announced[word] = value;
            return WSYNC_OK;
        }
    }
    return wsync_link_unexpected(&peer->link, frame, err);
}

/* Takes what all peers have sent.  CLOSED names a rank that is gone without BYE. */
static wsync_status_t look(wsync_comm_t *self, int timeout_ms, wsync_awaited_t awaited,
                           wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    int count;

    /* A negative descriptor is skipped: entry i stays rank i's. */
    for (uint32_t i = 0; i < self->rank_count; i++) {
        const wsync_channel_t *channel = self->peers[i].link.channel;

        self->polled[i] = (struct pollfd){
            .fd = channel != NULL ? wsync_channel_fd(channel) : -1, .events = POLLIN};
    }
    count = poll(self->polled, self->rank_count, timeout_ms);
    if (count < 0 && errno != EINTR) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "poll", "poll: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < self->rank_count && status == WSYNC_OK; i++) {
        wsync_link_t *link = &self->peers[i].link;
        /* Seen by a wait that got its last word: the end is still to be reported. */
        const bool gone = link->channel == NULL && link->pid != 0 && !link->departed;

        if (gone || (count > 0 && self->polled[i].revents != 0)) {
            status = wsync_link_drain(link, awaited, err);
        }
    }
    return status;
}

static wsync_status_t look_now(void *owner, wsync_awaited_t awaited, wsync_error_t *err)
{
    const comm_peer_t *peer = owner;

    return look(peer->comm, 0, awaited, err);
}

/* Waits until a word of a peer has reached `value`, and looks at all peers all the
 * while. */
static wsync_status_t await_word(wsync_comm_t *self, uint32_t rank, comm_word_t word,
                                 uint64_t value, int64_t deadline_ms, uint32_t round,
                                 wsync_error_t *err)
{
    comm_peer_t *peer = &self->peers[rank];
    const wsync_awaited_t awaited = {
        word == COMM_WORD_READY ? "the data of round" : "the release of round", round};

    while (peer->announced[word] < value) {
        const int left = wsync_left_ms(deadline_ms, INT_MAX);
        wsync_status_t status = WSYNC_OK;

        if (peer->link.channel == NULL) {
            return wsync_link_fail_closed(&peer->link, 0, awaited, err);
        }
        status = look(self, left, awaited, err);
        if (status != WSYNC_OK) {
            return status;
        }
        if (left == 0 && peer->announced[word] < value) {
            return wsync_link_fail_timeout(&peer->link, awaited, err);
        }
    }
    return wsync_link_wait_word(&peer->link, (uint64_t)word * WORD_STRIDE, value,
                                deadline_ms, awaited, err);
}

static wsync_status_t send_word(comm_peer_t *peer, comm_word_t word, uint64_t value,
                                uint32_t round, wsync_error_t *err)
{
    const wsync_frame_t frame = {
        .kind = word == COMM_WORD_READY ? COMM_READY : COMM_RELEASED, .arguments = {value}};
    wsync_status_t status = wsync_link_send(&peer->link, &frame, SEND_MS,
                                            (wsync_awaited_t){"round", round}, err);

    /* A rank that has ended its update and left needs no word that its bytes were read. */
    if (status == WSYNC_ERR_CLOSED && peer->link.departed && word == COMM_WORD_RELEASED) {
        return WSYNC_OK;
    }
    /* Not a state to come back to: others have been told already. */
    return status != WSYNC_ERR_TIMEOUT
               ? status
               : wsync_fail(err, WSYNC_ERR_CLOSED, 0, name,
                            "%s (pid %d) has not read its messages for %d ms in round %u",
                            peer->link.peer, peer->link.pid, SEND_MS, round);
}

/* Records a word of this rank and announces it to the marked ranks, if there are any. */
static wsync_status_t announce(wsync_comm_t *self, comm_word_t word, uint64_t value,
                               wsync_stream_t *stream, uint32_t round, wsync_error_t *err)
{
    const wsync_event_t event = {self->control, (uint64_t)word * WORD_STRIDE};
    wsync_status_t status = WSYNC_OK;

    for (uint32_t i = 0; i < self->rank_count && status == WSYNC_OK; i++) {
        if (self->peers[i].marked && self->recorded[word] < value) {
            status = wsync_stream_record(stream, event, value, err);
            self->recorded[word] = status == WSYNC_OK ? value : self->recorded[word];
        }
        if (self->peers[i].marked && status == WSYNC_OK) {
            status = send_word(&self->peers[i], word, value, round, err);
        }
    }
    return status;
}

/* --- how ranks find each other and map each other's staging --- */

static wsync_status_t allocate(wsync_comm_t *self, wsync_error_t *err)
{
    const size_t count = self->rank_count;

    self->peers = calloc(count, sizeof(*self->peers));
    self->polled = calloc(count, sizeof(*self->polled));
    if (self->peers == NULL || self->polled == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, name,
                          "no memory for an exchange of %u ranks", self->rank_count);
    }
    for (uint32_t i = 0; i < self->rank_count; i++) {
        comm_peer_t *peer = &self->peers[i];

        peer->comm = self;
        peer->link = (wsync_link_t){
            .name = name, .owner = peer, .handle = handle_frame, .look = look_now};
        (void)snprintf(peer->link.peer, sizeof(peer->link.peer), "rank %u", i);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_comm_create(const wsync_device_t *device, const char *parent,
                                 uint32_t rank, uint32_t rank_count,
                                 uint64_t staging_nbytes, wsync_comm_t **comm,
                                 wsync_error_t *err)
{
    wsync_comm_t *self;
    wsync_status_t status;

    if (rank >= rank_count || staging_nbytes > UINT64_MAX / 4) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "rank %u of %u with %llu bytes of staging", rank, rank_count,
                          (unsigned long long)staging_nbytes);
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, name, "no memory for an exchange");
    }
    self->device = device;
    self->ending.name = name;
    self->rank = rank;
    self->rank_count = rank_count;
    self->half_nbytes = (staging_nbytes + PAGE_NBYTES - 1) & ~((uint64_t)PAGE_NBYTES - 1);
    if (self->half_nbytes == 0) {
        self->half_nbytes = PAGE_NBYTES; /* memory has at least one byte */
    }
    status = allocate(self, err);
    if (status == WSYNC_OK) {
        status = wsync_token_create(self->token, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_create(device, 2 * self->half_nbytes, &self->staging, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_control_create(device, CONTROL_NBYTES, &self->control, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_listener_create(parent, &self->listener, err);
    }
    if (status != WSYNC_OK) {
        wsync_comm_destroy(self);
        return status;
    }
    wsync_address_format(self->token, wsync_listener_path(self->listener), self->address);
    *comm = self;
    return WSYNC_OK;
}

const char *wsync_comm_address(const wsync_comm_t *comm)
{
    return comm->address;
}

uint64_t wsync_comm_nbytes(const wsync_comm_t *comm)
{
    return 2 * comm->half_nbytes;
}

static wsync_frame_t introduce(const wsync_comm_t *self, uint32_t kind)
{
    wsync_frame_t frame = {
        .kind = kind,
        .arguments = {self->rank, self->half_nbytes, self->rank_count, COMM_PURPOSE}};

    frame.fds[0] = self->staging->fd;
    frame.fds[1] = self->control->fd;
    frame.fd_count = 2;
    return frame;
}

/* Maps what HELLO or WELCOME of `rank` carries. */
static wsync_status_t take_memory(wsync_comm_t *self, uint32_t rank,
                                  const wsync_frame_t *frame, wsync_error_t *err)
{
    comm_peer_t *peer = &self->peers[rank];
    const uint64_t half_nbytes = frame->arguments[1];
    wsync_status_t status;

    if (frame->fd_count != 2 || frame->arguments[0] != rank ||
        frame->arguments[2] != self->rank_count || frame->arguments[3] != COMM_PURPOSE ||
        half_nbytes > UINT64_MAX / 2) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                          "introduction of rank %llu of %llu with %u descriptors and %llu "
                          "bytes of staging, not of rank %u of %u",
                          (unsigned long long)frame->arguments[0],
                          (unsigned long long)frame->arguments[2], frame->fd_count,
                          (unsigned long long)half_nbytes, rank, self->rank_count);
    }
    status = wsync_memory_import(self->device, frame->fds[0], 2 * half_nbytes,
                                 &peer->staging, err);
    if (status != WSYNC_OK) {
        return status;
    }
    peer->half_nbytes = half_nbytes;
    return wsync_control_import(self->device, frame->fds[1], CONTROL_NBYTES,
                                &peer->link.control, err);
}

/* Puts "rank n (pid p)" before a message. */
static wsync_status_t name_rank(const comm_peer_t *peer, wsync_status_t status,
                                wsync_error_t *err)
{
    if (err != NULL && status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT) {
        const wsync_error_t inner = *err;

        (void)wsync_fail(err, status, inner.native, inner.origin, "%s (pid %d): %.700s",
                         peer->link.peer, peer->link.pid, inner.message);
    }
    return status;
}

static wsync_status_t connect_below(wsync_comm_t *self, uint32_t rank, const char *address,
                                    int64_t deadline, wsync_error_t *err)
{
    const wsync_frame_t hello = introduce(self, WSYNC_FRAME_HELLO);
    comm_peer_t *peer = &self->peers[rank];
    wsync_channel_t *channel = NULL;
    uint8_t token[WSYNC_TOKEN_NBYTES];
    char path[WSYNC_PATH_NBYTES];
    wsync_status_t status = wsync_address_parse(address, token, path, err);

    if (status == WSYNC_OK) {
        status = wsync_channel_connect(path, token, &hello,
                                       wsync_left_ms(deadline, INT_MAX), &channel, err);
    }
    if (status == WSYNC_OK) {
        wsync_link_open(&peer->link, channel);
    }
    return name_rank(peer, status, err);
}

static wsync_status_t take_welcome(wsync_comm_t *self, uint32_t rank, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_frame_t frame;
    wsync_status_t status =
        wsync_channel_receive(self->peers[rank].link.channel, &frame, timeout_ms, err);

    if (status == WSYNC_OK) {
        if (frame.kind != COMM_WELCOME) {
            status = wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                                "frame of kind %u instead of a welcome", frame.kind);
        } else {
            status = take_memory(self, rank, &frame, err);
        }
        wsync_frame_fini(&frame);
    }
    return name_rank(&self->peers[rank], status, err);
}

static wsync_status_t accept_above(wsync_comm_t *self, int timeout_ms, wsync_error_t *err)
{
    const wsync_frame_t welcome = introduce(self, COMM_WELCOME);
    wsync_channel_t *channel = NULL;
    comm_peer_t *peer;
    wsync_frame_t hello;
    uint64_t rank;
    wsync_status_t status = wsync_listener_accept(self->listener, self->token, timeout_ms,
                                                  &channel, &hello, NULL, err);

    if (status != WSYNC_OK) {
        return status;
    }
    rank = hello.arguments[0];
    if (rank <= self->rank || rank >= self->rank_count ||
        self->peers[rank].link.channel != NULL) {
        status = wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                            "process %d says that it is rank %llu of %u, which %s",
                            wsync_channel_peer_pid(channel), (unsigned long long)rank,
                            self->rank_count,
                            rank > self->rank && rank < self->rank_count
                                ? "is connected already"
                                : "should not connect to this rank");
        wsync_channel_destroy(channel);
        wsync_frame_fini(&hello);
        return status;
    }
    peer = &self->peers[rank];
    wsync_link_open(&peer->link, channel);
    status = take_memory(self, (uint32_t)rank, &hello, err);
    wsync_frame_fini(&hello);
    if (status == WSYNC_OK) {
        status = wsync_channel_send(channel, &welcome, SEND_MS, err);
        /* A fresh queue is not full: silence here is not a state to come back to. */
        status = status == WSYNC_ERR_TIMEOUT ? WSYNC_ERR_CLOSED : status;
    }
    return name_rank(peer, status, err);
}

/* First rank at or after `from` whose memory is not mapped yet; rank_count if none. */
static uint32_t find_missing(const wsync_comm_t *self, uint32_t from)
{
    while (from < self->rank_count &&
           (from == self->rank || self->peers[from].link.control != NULL)) {
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
            const int written = snprintf(text + length, sizeof(text) - length, " %u", i);

            length += written > 0 ? (size_t)written : 0;
        }
    }
    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                      "deadline passed: rank %u waits for %u of %u ranks to connect:%s",
                      self->rank, count, self->rank_count, text);
}

/* Everybody first connects downwards, which waits for nobody, then answers those above; so
 * no order of ranks can end in a circle. */
static wsync_status_t meet(wsync_comm_t *self, int64_t deadline, wsync_error_t *err)
{
    for (;;) {
        const uint32_t above = find_missing(self, self->rank + 1);
        int left = wsync_left_ms(deadline, SLICE_MS);
        wsync_status_t status = WSYNC_OK;

        for (uint32_t i = find_missing(self, 0); i < self->rank && status == WSYNC_OK;
             i = find_missing(self, i + 1)) {
            /* With nobody above left to accept, the first one below may take the time. */
            status = take_welcome(self, i, above < self->rank_count ? 0 : left, err);
            left = 0;
            status = status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
        left = wsync_left_ms(deadline, SLICE_MS);
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
    for (uint32_t i = 0; i < comm->rank && status == WSYNC_OK; i++) {
        if (comm->peers[i].link.channel == NULL) {
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
    return wsync_ending_note_failure(&comm->ending, status, err);
}

/* --- rounds --- */

static uint64_t sequence_of(const wsync_comm_t *self, uint32_t round)
{
    return self->base + (uint64_t)round + 1;
}

/* stream NULL: the call has none. */
static wsync_status_t require_round(const wsync_comm_t *self, const char *call,
                                    uint32_t round, uint32_t next, uint32_t limit,
                                    const wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = wsync_ending_check(&self->ending, err);

    if (status == WSYNC_OK && stream != NULL) {
        status = wsync_stream_check(stream, self->device, "the exchange", err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    if (round != next || round >= limit) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "%s: round %u, the next is %u and the limit now %u of %u", call,
                          round, next, limit, self->round_count);
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
                err, WSYNC_ERR_INVALID, 0, name,
                "round %u: message from rank %u to rank %u, the exchange has %u", round,
                message->source, message->peers[i], self->rank_count);
        }
    }
    if (message->source >= self->rank_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "round %u: message from rank %u, the exchange has %u", round,
                          message->source, self->rank_count);
    }
    if (message->source != self->rank) {
        half_nbytes = self->peers[message->source].half_nbytes;
    }
    if (__builtin_add_overflow(message->send_offset, message->nbytes, &end) ||
        end > half_nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "round %u: message of %llu bytes at %llu, the staging of rank %u "
                          "has %llu",
                          round, (unsigned long long)message->nbytes,
                          (unsigned long long)message->send_offset, message->source,
                          (unsigned long long)half_nbytes);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_comm_begin(wsync_comm_t *comm, const wsync_plan_t *plan,
                                wsync_error_t *err)
{
    const uint32_t round_count = wsync_plan_round_count(plan);
    wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (!comm->connected || comm->next_release != comm->round_count) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "begin: %s, %u of %u rounds are released",
                          comm->connected ? "the last update has not ended"
                                          : "the exchange is not connected",
                          comm->next_release, comm->round_count);
    }
    if (wsync_plan_send_nbytes(plan) > comm->half_nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "the plan needs %llu bytes of send staging a round, rank %u's "
                          "exchange has %llu",
                          (unsigned long long)wsync_plan_send_nbytes(plan), comm->rank,
                          (unsigned long long)comm->half_nbytes);
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

wsync_status_t wsync_comm_acquire(wsync_comm_t *comm, uint32_t round, int timeout_ms,
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
    status = look(comm, 0, (wsync_awaited_t){"round", round}, err);
    for (uint32_t i = 0; i < comm->rank_count && status == WSYNC_OK; i++) {
        if (comm->peers[i].readers[half]) {
            status = await_word(comm, i, COMM_WORD_RELEASED, comm->posted[half], deadline,
                                round, err);
        }
    }
    for (uint32_t i = 0; i < comm->rank_count && status == WSYNC_OK; i++) {
        comm->peers[i].readers[half] = false;
    }
    comm->next_acquire += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_spans(wsync_comm_t *comm, uint32_t round, wsync_span_t *spans,
                                size_t count, wsync_error_t *err)
{
    const uint64_t half = sequence_of(comm, round) & 1;
    const wsync_message_t *messages;
    size_t message_count = 0;
    const wsync_status_t status = wsync_ending_check(&comm->ending, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (round >= comm->next_acquire || (uint64_t)round + 2 < comm->next_acquire) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, name,
                          "spans: round %u, %u rounds are acquired", round,
                          comm->next_acquire);
    }
    messages = wsync_plan_messages(comm->plan, round, &message_count);
    if (count != message_count) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name,
                          "spans: room for %zu, round %u has %zu messages", count, round,
                          message_count);
    }
    for (size_t i = 0; i < count; i++) {
        const wsync_message_t *message = &messages[i];
        const bool mine = message->source == comm->rank;
        const comm_peer_t *peer = &comm->peers[message->source];
        const wsync_memory_t *staging = mine ? comm->staging : peer->staging;
        const uint64_t half_nbytes = mine ? comm->half_nbytes : peer->half_nbytes;

        spans[i].data =
            (uint8_t *)staging->data + half * half_nbytes + message->send_offset;
        spans[i].nbytes = message->nbytes;
    }
    return WSYNC_OK;
}

/* Marks the peers that have to know that this rank has packed a round (READY: those that
 * it sends to), or has read it (RELEASED: those that it receives from). */
static void mark_peers(wsync_comm_t *self, comm_word_t word, uint32_t round)
{
    size_t count = 0;
    const wsync_message_t *messages = wsync_plan_messages(self->plan, round, &count);

    for (uint32_t i = 0; i < self->rank_count; i++) {
        self->peers[i].marked = false;
    }
    for (size_t i = 0; i < count; i++) {
        const bool sent = messages[i].source == self->rank;

        for (uint32_t j = 0; word == COMM_WORD_READY && sent && j < messages[i].peer_count;
             j++) {
            self->peers[messages[i].peers[j]].marked = true;
        }
        self->peers[messages[i].source].marked |= word == COMM_WORD_RELEASED && !sent;
    }
}

/* post and release: records a word for the round, announces it, and moves on *next. */
static wsync_status_t finish_round(wsync_comm_t *self, const char *call, comm_word_t word,
                                   uint32_t round, uint32_t *next, uint32_t limit,
                                   wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = require_round(self, call, round, *next, limit, stream, err);

    if (status != WSYNC_OK) {
        return status;
    }
    mark_peers(self, word, round);
    status = announce(self, word, sequence_of(self, round), stream, round, err);
    *next += status == WSYNC_OK;
    return wsync_ending_note_failure(&self->ending, status, err);
}

wsync_status_t wsync_comm_post(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                               wsync_error_t *err)
{
    const uint64_t sequence = sequence_of(comm, round);
    const wsync_status_t status =
        finish_round(comm, "post", COMM_WORD_READY, round, &comm->next_post,
                     comm->next_acquire, stream, err);

    if (status == WSYNC_OK) {
        for (uint32_t i = 0; i < comm->rank_count; i++) {
            comm->peers[i].readers[sequence & 1] = comm->peers[i].marked;
        }
        comm->posted[sequence & 1] = sequence;
    }
    return status;
}

wsync_status_t wsync_comm_wait(wsync_comm_t *comm, uint32_t round, int timeout_ms,
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
    status = look(comm, 0, (wsync_awaited_t){"round", round}, err);
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (messages[i].source != comm->rank) {
            status = await_word(comm, messages[i].source, COMM_WORD_READY,
                                sequence_of(comm, round), deadline, round, err);
        }
    }
    comm->next_wait += status == WSYNC_OK;
    return wsync_ending_note_failure(&comm->ending, status, err);
}

wsync_status_t wsync_comm_release(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err)
{
    return finish_round(comm, "release", COMM_WORD_RELEASED, round, &comm->next_release,
                        comm->next_wait, stream, err);
}

void wsync_comm_close(wsync_comm_t *comm)
{
    const bool orderly =
        comm->connected && !comm->ending.ended && comm->next_release == comm->round_count;
    const wsync_frame_t bye = {.kind = COMM_BYE};

    for (uint32_t i = 0; comm->peers != NULL && i < comm->rank_count; i++) {
        comm_peer_t *peer = &comm->peers[i];

        if (peer->link.channel != NULL && orderly) {
            (void)wsync_channel_send(peer->link.channel, &bye, SLICE_MS, NULL);
        }
        wsync_link_close(&peer->link);
    }
    wsync_listener_destroy(comm->listener);
    comm->listener = NULL;
    comm->plan = NULL;
    wsync_ending_note(&comm->ending, "it was closed here");
}

void wsync_comm_destroy(wsync_comm_t *comm)
{
    if (comm == NULL) {
        return;
    }
    wsync_comm_close(comm);
    for (uint32_t i = 0; comm->peers != NULL && i < comm->rank_count; i++) {
        wsync_memory_destroy(comm->peers[i].staging);
        wsync_memory_destroy(comm->peers[i].link.control);
    }
    wsync_memory_destroy(comm->staging);
    /* Streams that still have to record retain it. */
    wsync_memory_destroy(comm->control);
    free(comm->peers);
    free(comm->polled);
    free(comm);
}
