/* SPDX-License-Identifier: Apache-2.0
 * Ranks of one host.  Nothing is received into staging of its own: a rank maps the send
 * staging of the others, and words in which each says what it has packed and read. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/same_host_internal.h"

enum {
    CONTROL_NBYTES = 4096,
    PAGE_NBYTES = 4096,
    WORD_STRIDE = 64, /* a cache line of its own for each word */
    SEND_MS = 1000,   /* queues hold a few frames: they are never full for long */
    SLICE_MS = 10,
};

static const char name[] = "exchange";

static shared_t *shared_of(wsync_comm_t *comm)
{
    return (shared_t *)(void *)comm;
}

static const shared_t *const_shared_of(const wsync_comm_t *comm)
{
    return (const shared_t *)(const void *)comm;
}

/* --- what the others send --- */

/* Announcements only grow, and nobody can have read what was not posted. */
static wsync_status_t handle_frame(void *owner, wsync_frame_t *frame, wsync_error_t *err)
{
    shared_peer_t *peer = owner;
    const uint64_t value = frame->arguments[0];
    const shared_word_t word =
        frame->kind == SHARED_READY ? SHARED_WORD_READY : SHARED_WORD_RELEASED;

    if (frame->fd_count == 0 && !peer->link.departed) {
        if (frame->kind == SHARED_BYE) {
            peer->link.departed = true;
            return WSYNC_OK;
        }
        if ((frame->kind == SHARED_READY ||
             (frame->kind == SHARED_RELEASED &&
              value <= peer->shared->recorded[SHARED_WORD_READY])) &&
            value > peer->announced[word]) {
            peer->announced[word] = value;
            return WSYNC_OK;
        }
    }
    return wsync_link_unexpected(&peer->link, frame, err);
}

/* Takes what all peers have sent.  CLOSED names a rank that is gone without SHARED_BYE. */
static wsync_status_t look(shared_t *self, int timeout_ms, wsync_awaited_t awaited,
                           wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    int count;

    /* A negative descriptor is skipped: entry i stays rank i's. */
    for (uint32_t i = 0; i < self->base.rank_count; i++) {
        const wsync_channel_t *channel = self->peers[i].link.channel;

        self->polled[i] = (struct pollfd){
            .fd = channel != NULL ? wsync_channel_fd(channel) : -1, .events = POLLIN};
    }
    count = poll(self->polled, self->base.rank_count, timeout_ms);
    if (count < 0 && errno != EINTR) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "poll", "poll: %s", strerror(errno));
    }
    for (uint32_t i = 0; i < self->base.rank_count && status == WSYNC_OK; i++) {
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
    const shared_peer_t *peer = owner;

    return look(peer->shared, 0, awaited, err);
}

/* Waits until a word of a peer has reached `value`, and looks at all peers all the
 * while. */
static wsync_status_t await_word(shared_t *self, uint32_t rank, shared_word_t word,
                                 uint64_t value, int64_t deadline_ms, uint32_t round,
                                 wsync_error_t *err)
{
    shared_peer_t *peer = &self->peers[rank];
    const wsync_awaited_t awaited = {
        word == SHARED_WORD_READY ? "the data of round" : "the release of round", round};

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

static wsync_status_t send_word(shared_peer_t *peer, shared_word_t word, uint64_t value,
                                uint32_t round, wsync_error_t *err)
{
    const wsync_frame_t frame = {
        .kind = word == SHARED_WORD_READY ? SHARED_READY : SHARED_RELEASED,
        .arguments = {value}};
    wsync_status_t status = wsync_link_send(&peer->link, &frame, SEND_MS,
                                            (wsync_awaited_t){"round", round}, err);

    /* A rank that has ended its update and left needs no word that its bytes were read. */
    if (status == WSYNC_ERR_CLOSED && peer->link.departed && word == SHARED_WORD_RELEASED) {
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
static wsync_status_t announce(shared_t *self, shared_word_t word, uint64_t value,
                               wsync_stream_t *stream, uint32_t round, wsync_error_t *err)
{
    const wsync_event_t event = {self->control, (uint64_t)word * WORD_STRIDE};
    wsync_status_t status = WSYNC_OK;

    for (uint32_t i = 0; i < self->base.rank_count && status == WSYNC_OK; i++) {
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

static wsync_status_t allocate(shared_t *self, wsync_error_t *err)
{
    const size_t count = self->base.rank_count;

    self->peers = calloc(count, sizeof(*self->peers));
    self->polled = calloc(count, sizeof(*self->polled));
    if (self->peers == NULL || self->polled == NULL) {
        return wsync_no_memory(err, name);
    }
    for (uint32_t i = 0; i < self->base.rank_count; i++) {
        shared_peer_t *peer = &self->peers[i];

        peer->shared = self;
        peer->link = (wsync_link_t){
            .name = name, .owner = peer, .handle = handle_frame, .look = look_now};
        (void)snprintf(peer->link.peer, sizeof(peer->link.peer), "rank %u", i);
    }
    return WSYNC_OK;
}

/* What has memory, words and a socket. */
static wsync_status_t prepare(shared_t *self, const char *parent, wsync_error_t *err)
{
    const wsync_device_t *device = self->base.device;
    wsync_status_t status = allocate(self, err);

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
    return status;
}

static wsync_frame_t introduce(const shared_t *self, uint32_t kind)
{
    wsync_frame_t frame = {.kind = kind,
                           .arguments = {self->base.rank, self->half_nbytes,
                                         self->base.rank_count, SHARED_PURPOSE}};

    frame.fds[0] = self->staging->fd;
    frame.fds[1] = self->control->fd;
    frame.fd_count = 2;
    return frame;
}

/* Maps what HELLO or SHARED_WELCOME of `rank` carries. */
static wsync_status_t take_memory(shared_t *self, uint32_t rank, const wsync_frame_t *frame,
                                  wsync_error_t *err)
{
    shared_peer_t *peer = &self->peers[rank];
    const uint64_t half_nbytes = frame->arguments[1];
    wsync_status_t status;

    if (frame->fd_count != 2 || frame->arguments[0] != rank ||
        frame->arguments[2] != self->base.rank_count ||
        frame->arguments[3] != SHARED_PURPOSE || half_nbytes > UINT64_MAX / 2) {
        return wsync_fail(
            err, WSYNC_ERR_PROTOCOL, 0, name,
            "expected rank %u of %u to introduce itself with 2 descriptors, "
            "but rank %llu of %llu did, with %u descriptors and %llu bytes of "
            "staging",
            rank, self->base.rank_count, (unsigned long long)frame->arguments[0],
            (unsigned long long)frame->arguments[2], frame->fd_count,
            (unsigned long long)half_nbytes);
    }
    status = wsync_memory_import(self->base.device, frame->fds[0], 2 * half_nbytes,
                                 &peer->staging, err);
    if (status != WSYNC_OK) {
        return status;
    }
    peer->half_nbytes = half_nbytes;
    return wsync_control_import(self->base.device, frame->fds[1], CONTROL_NBYTES,
                                &peer->link.control, err);
}

/* Puts "rank n (pid p)" before a message. */
static wsync_status_t name_rank(const shared_peer_t *peer, wsync_status_t status,
                                wsync_error_t *err)
{
    if (err != NULL && status != WSYNC_OK && status != WSYNC_ERR_TIMEOUT) {
        const wsync_error_t inner = *err;

        (void)wsync_fail(err, status, inner.native, inner.origin, "%s (pid %d): %.700s",
                         peer->link.peer, peer->link.pid, inner.message);
    }
    return status;
}

static wsync_status_t connect_below(shared_t *self, uint32_t rank, const char *address,
                                    int64_t deadline, wsync_error_t *err)
{
    const wsync_frame_t hello = introduce(self, WSYNC_FRAME_HELLO);
    shared_peer_t *peer = &self->peers[rank];
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

static wsync_status_t take_welcome(shared_t *self, uint32_t rank, int timeout_ms,
                                   wsync_error_t *err)
{
    wsync_frame_t frame;
    wsync_status_t status =
        wsync_channel_receive(self->peers[rank].link.channel, &frame, timeout_ms, err);

    if (status == WSYNC_OK) {
        if (frame.kind != SHARED_WELCOME) {
            status = wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                                "frame of kind %u instead of a welcome", frame.kind);
        } else {
            status = take_memory(self, rank, &frame, err);
        }
        wsync_frame_fini(&frame);
    }
    return name_rank(&self->peers[rank], status, err);
}

static wsync_status_t accept_above(shared_t *self, int timeout_ms, wsync_error_t *err)
{
    const wsync_frame_t welcome = introduce(self, SHARED_WELCOME);
    wsync_channel_t *channel = NULL;
    shared_peer_t *peer;
    wsync_frame_t hello;
    uint64_t rank;
    wsync_status_t status = wsync_listener_accept(self->listener, self->token, timeout_ms,
                                                  &channel, &hello, err);

    if (status != WSYNC_OK) {
        return status;
    }
    rank = hello.arguments[0];
    if (rank <= self->base.rank || rank >= self->base.rank_count ||
        self->peers[rank].link.channel != NULL) {
        status = wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                            "process %d says that it is rank %llu of %u, which %s",
                            wsync_channel_peer_pid(channel), (unsigned long long)rank,
                            self->base.rank_count,
                            rank > self->base.rank && rank < self->base.rank_count
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
static uint32_t find_missing(const shared_t *self, uint32_t from)
{
    while (from < self->base.rank_count &&
           (from == self->base.rank || self->peers[from].link.control != NULL)) {
        from++;
    }
    return from;
}

static wsync_status_t fail_missing(const shared_t *self, wsync_error_t *err)
{
    char text[256];
    size_t length = 0;
    uint32_t count = 0;

    text[0] = '\0';
    for (uint32_t i = find_missing(self, 0); i < self->base.rank_count;
         i = find_missing(self, i + 1)) {
        count++;
        if (length < sizeof(text)) {
            const int written = snprintf(text + length, sizeof(text) - length, " %u", i);

            length += written > 0 ? (size_t)written : 0;
        }
    }
    return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                      "deadline passed: rank %u waits for %u of %u ranks to connect:%s",
                      self->base.rank, count, self->base.rank_count, text);
}

/* Everybody first connects downwards, which waits for nobody, then answers those above; so
 * no order of ranks can end in a circle. */
static wsync_status_t await_all_ranks(shared_t *self, int64_t deadline, wsync_error_t *err)
{
    for (;;) {
        const uint32_t above = find_missing(self, self->base.rank + 1);
        int left = wsync_left_ms(deadline, SLICE_MS);
        wsync_status_t status = WSYNC_OK;

        for (uint32_t i = find_missing(self, 0); i < self->base.rank && status == WSYNC_OK;
             i = find_missing(self, i + 1)) {
            /* With nobody above left to accept, the first one below may take the time. */
            status = take_welcome(self, i, above < self->base.rank_count ? 0 : left, err);
            left = 0;
            status = status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
        left = wsync_left_ms(deadline, SLICE_MS);
        if (status == WSYNC_OK && above < self->base.rank_count) {
            status = accept_above(self, left, err);
            status = status == WSYNC_ERR_TIMEOUT ? WSYNC_OK : status;
        }
        if (status != WSYNC_OK) {
            return status;
        }
        if (find_missing(self, 0) == self->base.rank_count) {
            return WSYNC_OK;
        }
        if (left == 0) {
            return fail_missing(self, err);
        }
    }
}

static wsync_status_t shared_connect(wsync_comm_t *comm, const char *const *addresses,
                                     int64_t deadline_ms, wsync_error_t *err)
{
    shared_t *self = shared_of(comm);
    wsync_status_t status = WSYNC_OK;

    for (uint32_t i = 0; i < comm->rank && status == WSYNC_OK; i++) {
        if (self->peers[i].link.channel == NULL) {
            status = connect_below(self, i, addresses[i], deadline_ms, err);
        }
    }
    if (status == WSYNC_OK) {
        status = await_all_ranks(self, deadline_ms, err);
    }
    if (status == WSYNC_OK) {
        wsync_listener_destroy(self->listener);
        self->listener = NULL;
    }
    return status;
}

/* --- rounds --- */

static uint64_t shared_half_nbytes(const wsync_comm_t *comm, uint32_t source)
{
    const shared_t *self = const_shared_of(comm);

    return source == comm->rank ? self->half_nbytes : self->peers[source].half_nbytes;
}

static uint64_t shared_offset(const wsync_comm_t *comm, const wsync_message_t *message)
{
    (void)comm;
    return message->send_offset;
}

static wsync_status_t shared_acquire(wsync_comm_t *comm, uint32_t round,
                                     int64_t deadline_ms, wsync_error_t *err)
{
    shared_t *self = shared_of(comm);
    const size_t half = wsync_comm_sequence(comm, round) & 1;
    wsync_status_t status = look(self, 0, (wsync_awaited_t){"round", round}, err);

    for (uint32_t i = 0; i < comm->rank_count && status == WSYNC_OK; i++) {
        if (self->peers[i].readers[half]) {
            status = await_word(self, i, SHARED_WORD_RELEASED, self->posted[half],
                                deadline_ms, round, err);
        }
    }
    for (uint32_t i = 0; i < comm->rank_count && status == WSYNC_OK; i++) {
        self->peers[i].readers[half] = false;
    }
    return status;
}

static void *shared_place(const wsync_comm_t *comm, uint32_t round,
                          const wsync_message_t *message)
{
    const shared_t *self = const_shared_of(comm);
    const bool mine = message->source == comm->rank;
    const wsync_memory_t *staging =
        mine ? self->staging : self->peers[message->source].staging;
    const uint64_t half = wsync_comm_sequence(comm, round) & 1;

    return (uint8_t *)staging->data + half * shared_half_nbytes(comm, message->source) +
           message->send_offset;
}

/* Marks the peers that have to know that this rank has packed a round (SHARED_READY: those
 * that it sends to), or has read it (SHARED_RELEASED: those that it receives from). */
static void mark_peers(shared_t *self, shared_word_t word, uint32_t round)
{
    size_t count = 0;
    const wsync_message_t *messages = wsync_plan_messages(self->base.plan, round, &count);

    for (uint32_t i = 0; i < self->base.rank_count; i++) {
        self->peers[i].marked = false;
    }
    for (size_t i = 0; i < count; i++) {
        const bool sent = messages[i].source == self->base.rank;

        for (uint32_t j = 0;
             word == SHARED_WORD_READY && sent && j < messages[i].peer_count; j++) {
            self->peers[messages[i].peers[j]].marked = true;
        }
        self->peers[messages[i].source].marked |= word == SHARED_WORD_RELEASED && !sent;
    }
}

static wsync_status_t shared_post(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, wsync_error_t *err)
{
    shared_t *self = shared_of(comm);
    const uint64_t sequence = wsync_comm_sequence(comm, round);
    wsync_status_t status;

    mark_peers(self, SHARED_WORD_READY, round);
    status = announce(self, SHARED_WORD_READY, sequence, stream, round, err);
    if (status == WSYNC_OK) {
        for (uint32_t i = 0; i < comm->rank_count; i++) {
            self->peers[i].readers[sequence & 1] = self->peers[i].marked;
        }
        self->posted[sequence & 1] = sequence;
    }
    return status;
}

/* The host waits, so a stream has nothing to wait for. */
static wsync_status_t shared_wait(wsync_comm_t *comm, uint32_t round,
                                  wsync_stream_t *stream, int64_t deadline_ms,
                                  wsync_error_t *err)
{
    shared_t *self = shared_of(comm);
    size_t count = 0;
    const wsync_message_t *messages = wsync_plan_messages(comm->plan, round, &count);
    wsync_status_t status = look(self, 0, (wsync_awaited_t){"round", round}, err);

    (void)stream;
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        if (messages[i].source != comm->rank) {
            status = await_word(self, messages[i].source, SHARED_WORD_READY,
                                wsync_comm_sequence(comm, round), deadline_ms, round, err);
        }
    }
    return status;
}

static wsync_status_t shared_release(wsync_comm_t *comm, uint32_t round,
                                     wsync_stream_t *stream, wsync_error_t *err)
{
    mark_peers(shared_of(comm), SHARED_WORD_RELEASED, round);
    return announce(shared_of(comm), SHARED_WORD_RELEASED, wsync_comm_sequence(comm, round),
                    stream, round, err);
}

/* --- its life --- */

static void shared_close(wsync_comm_t *comm, bool orderly)
{
    shared_t *self = shared_of(comm);
    const wsync_frame_t bye = {.kind = SHARED_BYE};

    for (uint32_t i = 0; self->peers != NULL && i < comm->rank_count; i++) {
        shared_peer_t *peer = &self->peers[i];

        if (peer->link.channel != NULL && orderly) {
            (void)wsync_channel_send(peer->link.channel, &bye, SLICE_MS, NULL);
        }
        wsync_link_close(&peer->link);
    }
    wsync_listener_destroy(self->listener);
    self->listener = NULL;
}

static void shared_destroy(wsync_comm_t *comm)
{
    shared_t *self = shared_of(comm);

    for (uint32_t i = 0; self->peers != NULL && i < comm->rank_count; i++) {
        wsync_memory_destroy(self->peers[i].staging);
        wsync_memory_destroy(self->peers[i].link.control);
    }
    wsync_memory_destroy(self->staging);
    /* Streams that still have to record retain it. */
    wsync_memory_destroy(self->control);
    free(self->peers);
    free(self->polled);
    free(self);
}

static const wsync_comm_ops_t shared_ops = {
    .connect = shared_connect,
    .half_nbytes = shared_half_nbytes,
    .offset = shared_offset,
    .acquire = shared_acquire,
    .place = shared_place,
    .post = shared_post,
    .wait = shared_wait,
    .release = shared_release,
    .close = shared_close,
    .destroy = shared_destroy,
};

wsync_status_t wsync_comm_create_shared(const wsync_device_t *device, const char *parent,
                                        uint32_t rank, uint32_t rank_count,
                                        uint64_t staging_nbytes, wsync_comm_t **comm,
                                        wsync_error_t *err)
{
    shared_t *self = calloc(1, sizeof(*self));
    wsync_status_t status;

    if (self == NULL) {
        return wsync_no_memory(err, name);
    }
    status = wsync_comm_init(&self->base, &shared_ops, device, rank, rank_count,
                             staging_nbytes, err);
    if (status != WSYNC_OK) {
        free(self);
        return status;
    }
    self->half_nbytes = (staging_nbytes + PAGE_NBYTES - 1) & ~((uint64_t)PAGE_NBYTES - 1);
    if (self->half_nbytes == 0) {
        self->half_nbytes = PAGE_NBYTES; /* memory has at least one byte */
    }
    self->base.nbytes = 2 * self->half_nbytes;
    status = prepare(self, parent, err);
    if (status != WSYNC_OK) {
        wsync_comm_destroy(&self->base);
        return status;
    }
    wsync_address_format(self->token, wsync_listener_path(self->listener),
                         self->base.address);
    *comm = &self->base;
    return WSYNC_OK;
}
