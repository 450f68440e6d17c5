/* SPDX-License-Identifier: Apache-2.0
 * Operations, groups of them, and what a group does on its stream. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"

/* Of a thread: the group that it has open. */
static _Thread_local struct {
    bool open;
    int error;
    struct wsync_nccl_comm *comm;
} group;

static atomic_long operations;
static atomic_long received;

long fake_operations(void)
{
    return atomic_load(&operations);
}

long fake_received(void)
{
    return atomic_load(&received);
}

EXPORT int ncclGroupStart(void);
EXPORT int ncclGroupEnd(void);
EXPORT int ncclSend(const void *data, size_t count, int type, int peer,
                    wsync_nccl_comm_t comm, wsync_cu_stream_t stream);
EXPORT int ncclRecv(void *data, size_t count, int type, int peer, wsync_nccl_comm_t comm,
                    wsync_cu_stream_t stream);
EXPORT int ncclBroadcast(const void *source, void *destination, size_t count, int type,
                         int root, wsync_nccl_comm_t comm, wsync_cu_stream_t stream);

/* --- on the stream ----------------------------------------------------------------------
 */

/* Whether a part may begin: some are injected. */
static bool may_begin(const fake_work_t *work, const fake_part_t *part)
{
    if (part->operation == atomic_load(&fake_settings.fails)) {
        atomic_store(&work->comm->error, atomic_load(&fake_settings.error));
        return false;
    }
    return part->operation != atomic_load(&fake_settings.hang);
}

static bool step_send(fake_channel_t *channel, fake_part_t *part)
{
    const uint64_t offered = atomic_load(&channel->offered);
    uint64_t written = atomic_load(&channel->written);

    if (!part->begun) {
        if (offered != atomic_load(&channel->taken) ||
            written != atomic_load(&channel->read)) {
            return false;
        }
        channel->offer = part->offer;
        atomic_store(&channel->offered, offered + 1);
        part->begun = true;
        return false;
    }
    if (offered != atomic_load(&channel->taken)) {
        return false;
    }
    while (part->done < part->offer.nbytes && written == atomic_load(&channel->read)) {
        const uint64_t left = part->offer.nbytes - part->done;

        channel->piece_nbytes =
            (uint32_t)(left < FAKE_CHUNK_NBYTES ? left : FAKE_CHUNK_NBYTES);
        memcpy(channel->piece, part->data + part->done, channel->piece_nbytes);
        part->done += channel->piece_nbytes;
        atomic_store(&channel->written, ++written);
    }
    return part->done == part->offer.nbytes && written == atomic_load(&channel->read);
}

/* The two sides must mean the same message. */
static bool fits(const fake_channel_t *channel, const fake_work_t *work,
                 const fake_part_t *part)
{
    const fake_offer_t *offer = &channel->offer;

    if (offer->kind == part->offer.kind && offer->nbytes == part->offer.nbytes &&
        offer->collective == part->offer.collective) {
        return true;
    }
    (void)fake_misuse(
        WSYNC_NCCL_SUCCESS,
        "rank %d waits for %llu bytes from rank %d (kind %d, collective %llu), which sends "
        "%llu (kind %d, collective %llu)",
        work->comm->rank, (unsigned long long)part->offer.nbytes, part->peer,
        part->offer.kind, (unsigned long long)part->offer.collective,
        (unsigned long long)offer->nbytes, offer->kind,
        (unsigned long long)offer->collective);
    return false;
}

static bool step_receive(fake_channel_t *channel, const fake_work_t *work,
                         fake_part_t *part)
{
    uint64_t read = atomic_load(&channel->read);

    if (!part->begun) {
        const uint64_t offered = atomic_load(&channel->offered);

        if (offered == atomic_load(&channel->taken) || part->stuck) {
            return false;
        }
        part->stuck = !fits(channel, work, part);
        if (part->stuck) {
            return false;
        }
        part->begun = true;
        atomic_store(&channel->taken, offered);
    }
    while (part->done < part->offer.nbytes && atomic_load(&channel->written) > read) {
        memcpy(part->data + part->done, channel->piece, channel->piece_nbytes);
        part->done += channel->piece_nbytes;
        atomic_store(&channel->read, ++read);
    }
    return part->done == part->offer.nbytes;
}

static bool step_part(const fake_work_t *work, fake_part_t *part)
{
    const int self = work->comm->rank;
    fake_world_t *world = work->comm->world;

    if (!part->begun && !may_begin(work, part)) {
        return false;
    }
    return part->sends ? step_send(&world->channels[self][part->peer], part)
                       : step_receive(&world->channels[part->peer][self], work, part);
}

/* All parts go on at the same time, but for those with one peer in one direction, which do
 * so in their order. */
static bool step_work(void *argument)
{
    fake_work_t *work = argument;
    struct wsync_nccl_comm *comm = work->comm;
    bool taken[2][FAKE_MAX_RANKS] = {{false}};
    bool all = true;

    if (!work->begun) {
        work->begun = true;
        atomic_fetch_add(&comm->begun, 1);
    }
    if (atomic_load(&comm->stop)) {
        return true;
    }
    if (atomic_load(&comm->ended) != work->number) {
        return false; /* another stream's, and it came first */
    }
    for (size_t i = 0; i < work->part_count; i++) {
        fake_part_t *part = &work->parts[i];

        if (part->over || taken[part->sends][part->peer]) {
            continue;
        }
        part->over = step_part(work, part);
        atomic_fetch_add(&received, part->over && !part->sends);
        taken[part->sends][part->peer] = !part->over;
        all = all && part->over;
    }
    for (size_t i = 0; i < work->part_count && all; i++) {
        all = work->parts[i].over;
    }
    return all;
}

void fake_work_free(fake_work_t *work)
{
    if (work != NULL) {
        free(work->parts);
        free(work->spans);
        free(work);
    }
}

static void end_work(void *argument)
{
    fake_work_t *work = argument;
    struct wsync_nccl_comm *comm = work->comm;

    if (!work->begun) {
        atomic_fetch_add(&comm->begun, 1);
    }
    fake_work_free(work);
    atomic_fetch_add(&comm->ended, 1);
    fake_drop(comm);
}

int fake_launch(struct wsync_nccl_comm *comm)
{
    fake_work_t *work = comm->group;
    static void *address; /* a look-up costs more than a launch */
    fakecuda_enqueue_func_t enqueue;
    const fakecuda_work_t given = {.step = step_work,
                                   .end = end_work,
                                   .argument = work,
                                   .spans = work->spans,
                                   .span_count = work->span_count};
    wsync_cu_result_t code;

    address = address == NULL ? fake_driver_symbol(FAKECUDA_ENQUEUE) : address;
    memcpy(&enqueue, (const void *)&address, sizeof(enqueue));
    comm->group = NULL;
    work->number = comm->submitted++;
    atomic_fetch_add(&comm->users, 1);
    code = address == NULL ? WSYNC_CU_NOT_INITIALIZED : enqueue(work->stream, &given);
    if (code == WSYNC_CU_SUCCESS) {
        return WSYNC_NCCL_SUCCESS;
    }
    comm->submitted--;
    atomic_fetch_sub(&comm->users, 1);
    fake_work_free(work);
    atomic_store(&comm->error, WSYNC_NCCL_CUDA_ERROR);
    return fake_misuse(WSYNC_NCCL_CUDA_ERROR, "a group that the driver refuses (%d)", code);
}

/* --- groups -----------------------------------------------------------------------------
 */

/* The communicator's part of the thread's group, which begins with its first operation. */
static int join_group(struct wsync_nccl_comm *comm, wsync_cu_stream_t stream)
{
    if (!group.open || (group.comm != NULL && group.comm != comm)) {
        return fake_misuse(WSYNC_NCCL_INVALID_USAGE, "no group, or another's");
    }
    if (comm->group == NULL) {
        comm->group = calloc(1, sizeof(*comm->group));
        if (comm->group == NULL) {
            fake_let_go(comm);
            return WSYNC_NCCL_SYSTEM_ERROR;
        }
        comm->group->comm = comm;
        comm->group->stream = stream;
        group.comm = comm;
    }
    if (comm->group->stream != stream) {
        return fake_misuse(WSYNC_NCCL_INVALID_USAGE, "a group on two streams");
    }
    comm->group->operation = atomic_fetch_add(&operations, 1);
    return WSYNC_NCCL_SUCCESS;
}

/* What the group's end does to one of its communicators; locked. */
static int close_group(struct wsync_nccl_comm *comm)
{
    fake_let_go(comm);
    if (group.error != WSYNC_NCCL_SUCCESS) {
        fake_work_free(comm->group);
        comm->group = NULL;
        return group.error;
    }
    return fake_set_busy(comm);
}

int ncclGroupStart(void)
{
    group.open = true;
    return WSYNC_NCCL_SUCCESS;
}

int ncclGroupEnd(void)
{
    int result = group.error;

    fake_lock();
    if (group.comm != NULL) {
        result = close_group(group.comm);
    }
    fake_unlock();
    memset(&group, 0, sizeof(group));
    return result;
}

/* --- operations -------------------------------------------------------------------------
 */

static int grow(fake_work_t *work)
{
    const size_t capacity = work->capacity == 0 ? 16 : 2 * work->capacity;
    fake_part_t *parts = realloc(work->parts, capacity * sizeof(*parts));
    fakecuda_span_t *spans;

    if (parts == NULL) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    work->parts = parts;
    spans = realloc(work->spans, capacity * sizeof(*spans));
    if (spans == NULL) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    work->spans = spans;
    work->capacity = capacity;
    return WSYNC_NCCL_SUCCESS;
}

/* Where the processor reaches what a stream's device has. */
static unsigned char *reach(const void *data)
{
    static void *address; /* a look-up costs more than the rest of a round */
    fakecuda_reach_func_t function;

    address = address == NULL ? fake_driver_symbol(FAKECUDA_REACH) : address;
    memcpy(&function, (const void *)&address, sizeof(function));
    return address != NULL ? function(data) : NULL;
}

/* Adds one side of a message to the operation. */
static int add(struct wsync_nccl_comm *comm, bool sends, int peer, const void *data,
               const fake_offer_t *offer)
{
    fake_work_t *work = comm->group;

    if (peer < 0 || peer >= comm->rank_count) {
        return WSYNC_NCCL_INVALID_ARGUMENT;
    }
    if (work->part_count == work->capacity && grow(work) != WSYNC_NCCL_SUCCESS) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    work->parts[work->part_count++] = (fake_part_t){
        .sends = sends,
        .peer = peer,
        .data = reach(data),
        .offer = *offer,
        .operation = work->operation,
    };
    if (offer->nbytes > 0) {
        work->spans[work->span_count++] = (fakecuda_span_t){(uintptr_t)data, offer->nbytes};
    }
    return WSYNC_NCCL_SUCCESS;
}

/* Every operation is between these two; locked in between. */
static int begin(const char *call, int type, struct wsync_nccl_comm *comm,
                 wsync_cu_stream_t stream)
{
    int result;

    fake_lock();
    result = fake_hold(comm, call, FAKE_COMMUNICATE);
    if (result == WSYNC_NCCL_SUCCESS) {
        result = join_group(comm, stream);
    }
    return result == WSYNC_NCCL_SUCCESS && type != WSYNC_NCCL_UINT8
               ? WSYNC_NCCL_INVALID_ARGUMENT
               : result;
}

static int end(int result)
{
    fake_unlock();
    if (result != WSYNC_NCCL_SUCCESS) {
        group.error = result;
    }
    return result;
}

static int point_to_point(const char *call, bool sends, const void *data, size_t count,
                          int type, int peer, struct wsync_nccl_comm *comm,
                          wsync_cu_stream_t stream)
{
    const fake_offer_t offer = {.kind = FAKE_POINT_TO_POINT, .nbytes = count};
    const int result = begin(call, type, comm, stream);

    return end(result == WSYNC_NCCL_SUCCESS ? add(comm, sends, peer, data, &offer)
                                            : result);
}

int ncclSend(const void *data, size_t count, int type, int peer, wsync_nccl_comm_t comm,
             wsync_cu_stream_t stream)
{
    return point_to_point("ncclSend", true, data, count, type, peer, comm, stream);
}

int ncclRecv(void *data, size_t count, int type, int peer, wsync_nccl_comm_t comm,
             wsync_cu_stream_t stream)
{
    return point_to_point("ncclRecv", false, data, count, type, peer, comm, stream);
}

/* In place. */
int ncclBroadcast(const void *source, void *destination, size_t count, int type, int root,
                  wsync_nccl_comm_t comm, wsync_cu_stream_t stream)
{
    fake_offer_t offer = {.kind = FAKE_BROADCAST, .nbytes = count};
    int result = begin("ncclBroadcast", type, comm, stream);

    if (result == WSYNC_NCCL_SUCCESS && source != destination) {
        result = WSYNC_NCCL_INVALID_ARGUMENT;
    }
    if (result == WSYNC_NCCL_SUCCESS) {
        offer.collective = ++comm->collectives;
        result = comm->rank != root ? add(comm, false, root, destination, &offer) : result;
    }
    for (int i = 0; i < comm->rank_count && result == WSYNC_NCCL_SUCCESS; i++) {
        if (comm->rank == root && i != root) {
            result = add(comm, true, i, source, &offer);
        }
    }
    return end(result);
}
