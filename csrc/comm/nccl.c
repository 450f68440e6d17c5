/* SPDX-License-Identifier: Apache-2.0
 * Ranks with a GPU each.  Three words order their streams: what this rank has packed, what
 * NCCL has moved, and what this rank has read.  A round's group begins when its messages
 * are packed and the half that it receives into has been read; the streams that read wait
 * for the word of what has moved. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/comm_internal.h"
#include "comm/nccl_communicator.h"
#include "core/base/array.h"
#include "core/base/hex.h"

enum {
    CONTROL_NBYTES = 4096,
    WORD_STRIDE = 64, /* a cache line of its own for each word */
    HALF_ALIGNMENT = 128,
    /* Rounds that may be under way: the host is behind none, and asks rarely. */
    AHEAD = WSYNC_NCCL_MAX_GROUPS / 2,
    ROOM_PAUSE_NS = 200 * 1000,
    HEX_NBYTES = 2 * sizeof(wsync_nccl_id_t) + 1,
};

/* Words of the control page: sequence numbers of rounds. */
typedef enum word {
    WORD_PACKED,
    WORD_MOVED,
    WORD_READ,
} word_t;

/* The rounds of one parity, by their sequence numbers; 0: none. */
typedef struct half {
    uint64_t moving;   /* the last that had messages */
    uint64_t received; /* the last that received */
    /* The stream that waits for `moving` to move, so that all it is given later does. */
    const wsync_stream_t *waiter;
} half_t;

typedef struct nccl {
    wsync_comm_t base;
    const wsync_nccl_library_t *library;
    wsync_nccl_communicator_t *communicator; /* NULL before connect */
    wsync_memory_t *staging;                 /* two halves to send, two to receive */
    wsync_memory_t *control;
    uint64_t send_nbytes; /* of a half */
    uint64_t recv_nbytes;
    int timeout_ms;
    half_t halves[2];
    const wsync_stream_t *poster; /* the stream that rounds of this update are posted on */
    wsync_nccl_transfer_t *transfers; /* of the round that is posted */
    size_t capacity;
    uint64_t posted[WSYNC_NCCL_MAX_GROUPS]; /* the last rounds with messages */
    uint64_t posted_count;                  /* of all of them */
} nccl_t;

static const char name[] = "exchange";

static nccl_t *nccl_of(wsync_comm_t *comm)
{
    return (nccl_t *)(void *)comm;
}

static const nccl_t *const_nccl_of(const wsync_comm_t *comm)
{
    return (const nccl_t *)(const void *)comm;
}

static wsync_event_t event_of(const nccl_t *self, word_t word)
{
    return (wsync_event_t){self->control, (uint64_t)word * WORD_STRIDE};
}

/* --- how ranks meet ------------------------------------------------------------------- */

/* What a rank tells the others: "nccl VERSION UUID ID", the ID from rank 0 alone. */
typedef struct introduction {
    char version[12];
    char uuid[2 * WSYNC_DEVICE_UUID_NBYTES + 1];
    char id[HEX_NBYTES];
} introduction_t;

static bool read_hex(const char *text, char *bytes, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++) {
        const int value = wsync_hex_byte(text + 2 * i);

        if (value < 0) {
            return false;
        }
        bytes[i] = (char)value;
    }
    return text[2 * nbytes] == '\0';
}

static void write_introduction(const wsync_nccl_library_t *library,
                               const wsync_device_t *device, const char *id,
                               char address[WSYNC_COMM_ADDRESS_NBYTES])
{
    char uuid[2 * WSYNC_DEVICE_UUID_NBYTES + 1];

    wsync_hex_write(device->uuid, WSYNC_DEVICE_UUID_NBYTES, uuid);
    (void)snprintf(address, WSYNC_COMM_ADDRESS_NBYTES, "nccl %d %s %s", library->version,
                   uuid, id);
}

void wsync_comm_nccl_address(const wsync_nccl_library_t *library,
                             const wsync_device_t *device,
                             char address[WSYNC_COMM_ADDRESS_NBYTES])
{
    write_introduction(library, device, "-", address);
}

static wsync_status_t introduce(nccl_t *self, wsync_error_t *err)
{
    char text[HEX_NBYTES];
    wsync_nccl_id_t id;
    wsync_status_t status;

    if (self->base.rank != 0) {
        wsync_comm_nccl_address(self->library, self->base.device, self->base.address);
        return WSYNC_OK;
    }
    status = wsync_nccl_check(self->library, self->library->get_unique_id(&id),
                              "ncclGetUniqueId", err, "rank 0");
    if (status == WSYNC_OK) {
        wsync_hex_write(&id, sizeof(id), text);
        write_introduction(self->library, self->base.device, text, self->base.address);
    }
    return status;
}

static wsync_status_t read_introduction(const char *address, uint32_t rank,
                                        introduction_t *said, wsync_error_t *err)
{
    /* as many characters as the fields have room for */
    if (sscanf(address, "nccl %11[0-9] %32[0-9a-f] %256[0-9a-f-]", said->version,
               said->uuid, said->id) != 3) {
        return wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                          "rank %u does not use NCCL: it introduces itself with %.100s",
                          rank, address);
    }
    return WSYNC_OK;
}

/* Whether a communicator can be made of all ranks, before NCCL is asked to: it would hang,
 * or say so in words that name nobody. */
static wsync_status_t check_ranks(const nccl_t *self, const char *const *addresses,
                                  wsync_nccl_id_t *id, wsync_error_t *err)
{
    introduction_t said;
    introduction_t other;
    char own_version[12];

    (void)snprintf(own_version, sizeof(own_version), "%d", self->library->version);
    for (uint32_t i = 0; i < self->base.rank_count; i++) {
        wsync_status_t status = read_introduction(addresses[i], i, &said, err);

        if (status == WSYNC_OK && i == 0 &&
            !read_hex(said.id, id->bytes, sizeof(id->bytes))) {
            status =
                wsync_fail(err, WSYNC_ERR_PROTOCOL, 0, name,
                           "rank 0 gives no id of a communicator: %.100s", addresses[0]);
        }
        if (status == WSYNC_OK && strcmp(said.version, own_version) != 0) {
            status = wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, name,
                                "rank %u has NCCL %s and rank %u NCCL %s: all ranks need "
                                "the same version",
                                i, said.version, self->base.rank, own_version);
        }
        for (uint32_t j = 0; j < i && status == WSYNC_OK; j++) {
            status = read_introduction(addresses[j], j, &other, err);
            if (status == WSYNC_OK && strcmp(said.uuid, other.uuid) == 0) {
                status = wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, name,
                                    "ranks %u and %u share the GPU %s, and NCCL needs one "
                                    "for each rank",
                                    j, i, said.uuid);
            }
        }
        if (status != WSYNC_OK) {
            return status;
        }
    }
    return WSYNC_OK;
}

static wsync_status_t nccl_connect(wsync_comm_t *comm, const char *const *addresses,
                                   int64_t deadline_ms, wsync_error_t *err)
{
    nccl_t *self = nccl_of(comm);
    wsync_status_t status = WSYNC_OK;

    if (self->communicator == NULL) {
        wsync_nccl_id_t id;

        status = check_ranks(self, addresses, &id, err);
        if (status == WSYNC_OK) {
            status = wsync_nccl_communicator_create(
                self->library, comm->device, &id, comm->rank, comm->rank_count,
                self->timeout_ms, &self->communicator, err);
        }
    }
    return status == WSYNC_OK
               ? wsync_nccl_communicator_meet(self->communicator, deadline_ms, err)
               : status;
}

/* --- rounds --------------------------------------------------------------------------- */

static uint64_t nccl_half_nbytes(const wsync_comm_t *comm, uint32_t source)
{
    const nccl_t *self = const_nccl_of(comm);

    return source == comm->rank ? self->send_nbytes : self->recv_nbytes;
}

static uint64_t nccl_offset(const wsync_comm_t *comm, const wsync_message_t *message)
{
    return message->source == comm->rank ? message->send_offset : message->recv_offset;
}

static void *nccl_place(const wsync_comm_t *comm, uint32_t round,
                        const wsync_message_t *message)
{
    const nccl_t *self = const_nccl_of(comm);
    const uint64_t half = wsync_comm_sequence(comm, round) & 1;
    const uint64_t start = message->source == comm->rank
                               ? half * self->send_nbytes
                               : 2 * self->send_nbytes + half * self->recv_nbytes;

    return (uint8_t *)self->staging->data + start + nccl_offset(comm, message);
}

/* Waits on the host until a round has moved. */
static wsync_status_t await_moved(nccl_t *self, uint32_t round, uint64_t sequence,
                                  int64_t deadline_ms, wsync_error_t *err)
{
    wsync_status_t status;

    for (;;) {
        const int left = wsync_left_ms(deadline_ms, 50);

        status = wsync_nccl_communicator_check(self->communicator, err);
        if (status != WSYNC_OK) {
            return status;
        }
        status = wsync_event_wait(event_of(self, WORD_MOVED), sequence, left, err);
        if (status == WSYNC_OK) { /* an abort lets the event come, too */
            return wsync_nccl_communicator_check(self->communicator, err);
        }
        if (status != WSYNC_ERR_TIMEOUT) {
            return status;
        }
        if (left == 0) {
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                              "deadline passed: rank %u waits for round %" PRIu64
                              " to move before round %u",
                              self->base.rank, sequence - self->base.base - 1, round);
        }
    }
}

/* Whether the stream that packs the next round of this half waits for the last one itself.
 */
static bool is_ordered(const nccl_t *self, const half_t *half)
{
    return half->moving > self->base.base && half->waiter != NULL &&
           half->waiter == self->poster;
}

/* Keeps the host less than AHEAD groups ahead.  It waits for half of them, and looks
 * rarely: the others keep NCCL busy meanwhile. */
static wsync_status_t await_room(nccl_t *self, uint32_t round, int64_t deadline_ms,
                                 wsync_error_t *err)
{
    const struct timespec pause = {.tv_nsec = ROOM_PAUSE_NS};
    const wsync_event_t moved = event_of(self, WORD_MOVED);
    const uint64_t count = self->posted_count;
    const uint64_t *posted = self->posted;
    wsync_status_t status = wsync_nccl_communicator_check(self->communicator, err);

    if (status != WSYNC_OK || count < AHEAD ||
        wsync_event_query(moved) >= posted[(count - AHEAD) % WSYNC_NCCL_MAX_GROUPS]) {
        return status;
    }
    while (status == WSYNC_OK &&
           wsync_event_query(moved) < posted[(count - AHEAD / 2) % WSYNC_NCCL_MAX_GROUPS]) {
        if (wsync_left_ms(deadline_ms, 1) == 0) {
            return wsync_fail(err, WSYNC_ERR_TIMEOUT, 0, name,
                              "deadline passed: rank %u waits for %d rounds to move before "
                              "round %u",
                              self->base.rank, (int)AHEAD / 2, round);
        }
        (void)nanosleep(&pause, NULL);
        status = wsync_nccl_communicator_check(self->communicator, err);
    }
    return status;
}

static wsync_status_t nccl_acquire(wsync_comm_t *comm, uint32_t round, int64_t deadline_ms,
                                   wsync_error_t *err)
{
    nccl_t *self = nccl_of(comm);
    half_t *half = &self->halves[wsync_comm_sequence(comm, round) & 1];
    wsync_status_t status;

    if (half->moving == 0 || is_ordered(self, half)) {
        return await_room(self, round, deadline_ms, err);
    }
    status = await_moved(self, round, half->moving, deadline_ms, err);
    half->moving = status == WSYNC_OK ? 0 : half->moving;
    return status;
}

/* Whether a message goes from one rank to all others, as a broadcast. */
static bool goes_to_all(const nccl_t *self, const wsync_message_t *message)
{
    return message->peer_count > 1 && message->peer_count + 1 == self->base.rank_count;
}

/* The transfers of a round, in the order of its messages, which all ranks have. */
static size_t list_transfers(const nccl_t *self, uint32_t round,
                             wsync_nccl_transfer_t *transfers)
{
    size_t message_count = 0;
    size_t count = 0;
    const wsync_message_t *messages =
        wsync_plan_messages(self->base.plan, round, &message_count);

    for (size_t i = 0; i < message_count; i++) {
        const wsync_message_t *message = &messages[i];
        const bool mine = message->source == self->base.rank;
        wsync_nccl_transfer_t transfer = {.way = WSYNC_NCCL_RECEIVE,
                                          .peer = message->source,
                                          .data = nccl_place(&self->base, round, message),
                                          .nbytes = message->nbytes};

        if (goes_to_all(self, message)) {
            transfer.way = WSYNC_NCCL_BROADCAST;
        } else if (mine) {
            transfer.way = WSYNC_NCCL_SEND;
            for (uint32_t j = 0; j < message->peer_count; j++) {
                transfer.peer = message->peers[j];
                transfers[count++] = transfer;
            }
            continue;
        }
        transfers[count++] = transfer;
    }
    return count;
}

static size_t transfer_limit(const nccl_t *self, uint32_t round, bool *sends,
                             bool *receives)
{
    size_t count = 0;
    size_t limit = 0;
    const wsync_message_t *messages = wsync_plan_messages(self->base.plan, round, &count);

    *sends = false;
    *receives = false;
    for (size_t i = 0; i < count; i++) {
        const bool mine = messages[i].source == self->base.rank;

        *sends |= mine;
        *receives |= !mine;
        limit += mine ? messages[i].peer_count : 1;
    }
    return limit;
}

static wsync_status_t nccl_post(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                                wsync_error_t *err)
{
    nccl_t *self = nccl_of(comm);
    const uint64_t sequence = wsync_comm_sequence(comm, round);
    half_t *half = &self->halves[sequence & 1];
    wsync_nccl_group_t group = {.end = {event_of(self, WORD_MOVED), sequence},
                                .round = round};
    wsync_nccl_transfer_t *transfers;
    wsync_status_t status = WSYNC_OK;
    bool sends;
    bool receives;
    const size_t limit = transfer_limit(self, round, &sends, &receives);

    self->poster = stream;
    if (limit == 0) {
        return wsync_nccl_communicator_check(self->communicator, err);
    }
    transfers =
        wsync_array_reserve(self->transfers, &self->capacity, limit, sizeof(*transfers));
    if (transfers == NULL) {
        return wsync_no_memory(err, name);
    }
    self->transfers = transfers;
    group.transfers = transfers;
    group.count = list_transfers(self, round, transfers);
    if (sends) {
        group.begins[0] = (wsync_nccl_point_t){event_of(self, WORD_PACKED), sequence};
        status = wsync_stream_record(stream, group.begins[0].event, sequence, err);
    }
    if (receives && half->received != 0) {
        group.begins[1] = (wsync_nccl_point_t){event_of(self, WORD_READ), half->received};
    }
    if (status == WSYNC_OK) {
        status = wsync_nccl_communicator_submit(self->communicator, &group, err);
    }
    half->moving = sequence;
    half->received = receives ? sequence : half->received;
    half->waiter = NULL;
    self->posted[self->posted_count++ % WSYNC_NCCL_MAX_GROUPS] = sequence;
    return status;
}

static wsync_status_t nccl_wait(wsync_comm_t *comm, uint32_t round, wsync_stream_t *stream,
                                int64_t deadline_ms, wsync_error_t *err)
{
    nccl_t *self = nccl_of(comm);
    const uint64_t sequence = wsync_comm_sequence(comm, round);
    half_t *half = &self->halves[sequence & 1];
    wsync_status_t status = wsync_nccl_communicator_check(self->communicator, err);

    /* What was sent is waited for as well: who has synchronised the stream may give staging
     * back, and what it packs two rounds later does not meet what is still sent. */
    if (status != WSYNC_OK || half->moving != sequence) {
        return status;
    }
    if (wsync_stream_ahead(stream) == 0) {
        return await_moved(self, round, sequence, deadline_ms, err);
    }
    status = wsync_nccl_communicator_begun(self->communicator, round, deadline_ms, err);
    if (status == WSYNC_OK) {
        status = wsync_stream_wait(stream, event_of(self, WORD_MOVED), sequence, err);
    }
    half->waiter = status == WSYNC_OK ? stream : NULL;
    return status;
}

static wsync_status_t nccl_release(wsync_comm_t *comm, uint32_t round,
                                   wsync_stream_t *stream, wsync_error_t *err)
{
    const nccl_t *self = const_nccl_of(comm);
    const uint64_t sequence = wsync_comm_sequence(comm, round);

    return self->halves[sequence & 1].received == sequence
               ? wsync_stream_record(stream, event_of(self, WORD_READ), sequence, err)
               : WSYNC_OK;
}

static wsync_status_t nccl_check(wsync_comm_t *comm, wsync_error_t *err)
{
    const nccl_t *self = const_nccl_of(comm);

    return self->communicator != NULL
               ? wsync_nccl_communicator_check(self->communicator, err)
               : WSYNC_OK;
}

/* --- its life ------------------------------------------------------------------------- */

/* NCCL's own memory stays. */
static wsync_status_t nccl_park(wsync_comm_t *comm, wsync_error_t *err)
{
    return wsync_memory_park(nccl_of(comm)->staging, err);
}

static wsync_status_t nccl_unpark(wsync_comm_t *comm, wsync_error_t *err)
{
    return wsync_memory_unpark(nccl_of(comm)->staging, -1, err);
}

static void nccl_close(wsync_comm_t *comm, bool orderly)
{
    (void)orderly; /* nothing is under way then, and an abort only frees */
    if (nccl_of(comm)->communicator != NULL) {
        wsync_nccl_communicator_close(nccl_of(comm)->communicator);
    }
}

static void nccl_destroy(wsync_comm_t *comm)
{
    nccl_t *self = nccl_of(comm);

    if (!wsync_nccl_communicator_destroy(self->communicator)) {
        return; /* what hangs may still use all of it */
    }
    wsync_memory_destroy(self->staging);
    /* Streams that still have to record retain it. */
    wsync_memory_destroy(self->control);
    free(self->transfers);
    free(self);
}

static const wsync_comm_ops_t nccl_ops = {
    .connect = nccl_connect,
    .half_nbytes = nccl_half_nbytes,
    .offset = nccl_offset,
    .acquire = nccl_acquire,
    .place = nccl_place,
    .post = nccl_post,
    .wait = nccl_wait,
    .release = nccl_release,
    .check = nccl_check,
    .park = nccl_park,
    .unpark = nccl_unpark,
    .close = nccl_close,
    .destroy = nccl_destroy,
};

wsync_status_t wsync_comm_create_nccl(const wsync_nccl_library_t *library,
                                      const wsync_device_t *device, uint32_t rank,
                                      uint32_t rank_count, uint64_t send_nbytes,
                                      uint64_t recv_nbytes, int timeout_ms,
                                      wsync_comm_t **comm, wsync_error_t *err)
{
    const uint64_t mask = HALF_ALIGNMENT - 1;
    nccl_t *self;
    wsync_status_t status;

    if (device->ordinal < 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, name, "NCCL cannot move host memory");
    }
    self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return wsync_no_memory(err, name);
    }
    status = wsync_comm_init(&self->base, &nccl_ops, device, rank, rank_count,
                             send_nbytes > recv_nbytes ? send_nbytes : recv_nbytes, err);
    if (status != WSYNC_OK) {
        free(self);
        return status;
    }
    self->library = library;
    self->timeout_ms = timeout_ms;
    self->send_nbytes = (send_nbytes + mask) & ~mask;
    self->recv_nbytes = (recv_nbytes + mask) & ~mask;
    self->base.nbytes = 2 * (self->send_nbytes + self->recv_nbytes);
    status = wsync_memory_create(device, self->base.nbytes > 0 ? self->base.nbytes : 1,
                                 &self->staging, err);
    if (status == WSYNC_OK) {
        status = wsync_control_create(device, CONTROL_NBYTES, &self->control, err);
    }
    if (status == WSYNC_OK) {
        status = introduce(self, err);
    }
    if (status != WSYNC_OK) {
        wsync_comm_destroy(&self->base);
        return status;
    }
    *comm = &self->base;
    return WSYNC_OK;
}
