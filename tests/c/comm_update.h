/* SPDX-License-Identifier: Apache-2.0
 * One rank of an exchange, which updates the ring of its worker and looks at every byte. */
#ifndef WSYNC_TESTS_COMM_UPDATE_H
#define WSYNC_TESTS_COMM_UPDATE_H

#include "comm_fixture.h"

static inline uint16_t value_of(uint64_t update, uint32_t rank, uint32_t tensor,
                                uint32_t element)
{
    return (uint16_t)(update * 7919 + rank * 104729 + tensor * 1299709 + element);
}

/* The ring of this rank's worker must hold every tensor of the update. */
static inline void check_ring(const wsync_plan_t *plan, uint32_t worker,
                              uint32_t rank_count, uint64_t update, const uint8_t *ring)
{
    wsync_layout_t *manifest = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_plan_manifest(plan, worker, &manifest, &err), err);
    CHECK_EQ(wsync_layout_tensor_count(manifest), TENSORS);
    for (uint32_t t = 0; t < TENSORS; t++) {
        const wsync_shard_t *shards;
        const uint16_t *values;
        size_t count = 0;
        char name[16];

        tensor_name(t, name);
        shards = wsync_layout_shards(manifest, wsync_layout_find(manifest, name), &count);
        CHECK_EQ(count, 1);
        values = (const uint16_t *)(const void *)(ring + shards[0].offset);
        for (uint32_t r = 0; r < rank_count; r++) {
            for (uint32_t i = 0; i < PART; i++) {
                CHECK_EQ(values[r * PART + i], value_of(update, r, t, i));
            }
        }
    }
    wsync_layout_destroy(manifest);
}

typedef struct member {
    const wsync_device_t *device;
    uint32_t rank;
    uint32_t rank_count;
    uint32_t worker_count;
    uint64_t round_nbytes;
    wsync_memory_t *parameters;
    wsync_memory_t *ring;
    wsync_stream_t *stream;
    wsync_span_t spans[MAX_ROUNDS][64]; /* streams read them until the update has ended */
    wsync_span_t rings[MAX_RANKS];
    wsync_span_t buffer;
} member_t;

static inline void enqueue(member_t *m, const wsync_plan_t *plan, uint32_t round,
                           wsync_phase_t phase)
{
    const wsync_span_t *messages = m->spans[round];
    const uint32_t workers = m->worker_count;
    wsync_error_t err = {0};
    size_t count = 0;
    const wsync_copy_t *copies = wsync_plan_copies(plan, round, phase, &count);
    const wsync_span_t *sources = phase == WSYNC_PHASE_UNPACK ? messages : &m->buffer;
    const wsync_span_t *destinations = phase == WSYNC_PHASE_PACK ? messages : m->rings;

    CHECK_OK(wsync_stream_copy_list(m->stream, copies, count, sources,
                                    phase == WSYNC_PHASE_UNPACK ? 64 : 1, destinations,
                                    phase == WSYNC_PHASE_PACK ? 64 : workers, &err),
             err);
}

/* Acquires, packs and posts a round. */
static inline void send_round(member_t *m, wsync_comm_t *comm, const wsync_plan_t *plan,
                              uint32_t round)
{
    wsync_error_t err = {0};
    size_t count = 0;

    CHECK_OK(wsync_comm_acquire(comm, round, PATIENT_MS, &err), err);
    (void)wsync_plan_messages(plan, round, &count);
    CHECK(count <= 64);
    CHECK_OK(wsync_comm_spans(comm, round, m->spans[round], count, &err), err);
    enqueue(m, plan, round, WSYNC_PHASE_PACK);
    CHECK_OK(wsync_comm_post(comm, round, m->stream, &err), err);
}

static inline void update_rank(member_t *m, wsync_comm_t *comm, const wsync_plan_t *plan,
                               uint64_t update)
{
    uint16_t *values = reach(m->parameters->data);
    const uint32_t rounds = wsync_plan_round_count(plan);
    wsync_error_t err = {0};

    CHECK(rounds <= MAX_ROUNDS);
    for (uint32_t t = 0; t < TENSORS; t++) {
        for (uint32_t i = 0; i < PART; i++) {
            values[t * PART + i] = value_of(update, m->rank, t, i);
        }
    }
    CHECK_OK(wsync_comm_begin(comm, plan, &err), err);
    for (uint32_t round = 0; round < rounds; round++) {
        if (round == 0) {
            send_round(m, comm, plan, 0);
        }
        if (round + 1 < rounds) {
            send_round(m, comm, plan, round + 1); /* ahead of what is received */
        }
        enqueue(m, plan, round, WSYNC_PHASE_LOCAL);
        CHECK_OK(wsync_comm_wait(comm, round, m->stream, PATIENT_MS, &err), err);
        enqueue(m, plan, round, WSYNC_PHASE_UNPACK);
        CHECK_OK(wsync_comm_release(comm, round, m->stream, &err), err);
    }
    CHECK_OK(wsync_stream_synchronize(m->stream, PATIENT_MS, &err), err);
    if (m->rank < m->worker_count) {
        check_ring(plan, m->rank, m->rank_count, update, reach(m->ring->data));
    }
}

/* Makes what a rank has. */
static inline void open_member(member_t *m)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(m->device, 2ULL * TENSORS * PART, &m->parameters, &err),
             err);
    CHECK_OK(wsync_memory_create(m->device, 1 << 20, &m->ring, &err), err);
    CHECK_OK(wsync_stream_create(m->device, 1, &m->stream, &err), err);
    m->buffer = (wsync_span_t){m->parameters->data, 2ULL * TENSORS * PART};
    m->rings[m->rank] = (wsync_span_t){m->ring->data, 1 << 20};
}

static inline void close_member(member_t *m)
{
    wsync_stream_destroy(m->stream);
    wsync_memory_destroy(m->parameters);
    wsync_memory_destroy(m->ring);
}

/* Runs a rank's updates.  The exchange is new, and destroyed. */
static inline void run_updates(member_t *m, wsync_comm_t *comm,
                               const char *const *addresses)
{
    wsync_plan_t *plan =
        make_plan(m->rank, m->rank_count, m->worker_count, m->round_nbytes);
    wsync_plan_t *finer =
        make_plan(m->rank, m->rank_count, m->worker_count, m->round_nbytes * 3 / 4);
    wsync_error_t err = {0};

    open_member(m);
    CHECK_OK(wsync_comm_connect(comm, addresses, PATIENT_MS, &err), err);
    for (uint64_t update = 0; update < UPDATES; update++) {
        update_rank(m, comm, update % 2 ? finer : plan, update);
    }
    wsync_comm_destroy(comm); /* others may still be reading their last round */
    close_member(m);
    wsync_plan_destroy(plan);
    wsync_plan_destroy(finer);
}

#endif
