/* SPDX-License-Identifier: Apache-2.0
 * Plans for exchanges, and two ranks that take turns in one thread. */
#ifndef WSYNC_TESTS_COMM_FIXTURE_H
#define WSYNC_TESTS_COMM_FIXTURE_H

#include "comm/same_host_internal.h"
#include "device_fixture.h"
#include "layouts.h"

enum {
    SOON_MS = 20,
    PATIENT_MS = 20000,
    MAX_RANKS = 4,
    TENSORS = 12,
    ROWS = 8, /* of one rank */
    COLUMNS = 96,
    PART = ROWS * COLUMNS, /* elements of one rank's part of one tensor */
    UPDATES = 3,
    MAX_ROUNDS = 32,
};

static inline const wsync_device_t *device(void)
{
    return test_device();
}

static inline void tensor_name(uint32_t tensor, char name[16])
{
    (void)snprintf(name, 16, "t%u", tensor);
}

/* Rank r holds rows [r * ROWS, (r + 1) * ROWS) of every tensor in buffer 0; every rank
 * below worker_count serves a worker that wants everything. */
static inline wsync_plan_t *make_plan(uint32_t rank, uint32_t rank_count,
                                      uint32_t worker_count, uint64_t round_nbytes)
{
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *wanted = new_builder();
    wsync_destination_t destination = {.whole = true};
    wsync_worker_t workers[MAX_RANKS] = {0};
    const uint32_t hosts[MAX_RANKS] = {0};
    wsync_plan_spec_t spec = {.destinations = &destination,
                              .workers = workers,
                              .hosts = hosts,
                              .destination_count = 1,
                              .worker_count = worker_count,
                              .rank_count = rank_count,
                              .rank = rank,
                              .round_nbytes = round_nbytes,
                              .ring_nbytes = 1 << 20};
    wsync_layout_t *source_layout;
    wsync_layout_t *wanted_layout;
    wsync_plan_t *plan = NULL;
    wsync_error_t err = {0};

    for (uint32_t t = 0; t < TENSORS; t++) {
        char name[16];
        wsync_tensor_t tensor;

        tensor_name(t, name);
        tensor = matrix(name, (int64_t)rank_count * ROWS, COLUMNS);
        for (uint32_t r = 0; r < rank_count; r++) {
            add_rows(source, tensor, r, 0, 2ULL * t * PART, (int64_t)r * ROWS, ROWS);
        }
        add_rows(wanted, tensor, 0, t, 0, 0, (int64_t)rank_count * ROWS);
    }
    for (uint32_t w = 0; w < worker_count; w++) {
        workers[w].home = w;
    }
    source_layout = finish(source);
    wanted_layout = finish(wanted);
    spec.source = source_layout;
    destination.layout = wanted_layout;
    CHECK_OK(wsync_plan_create(&spec, &plan, &err), err);
    wsync_layout_destroy(source_layout);
    wsync_layout_destroy(wanted_layout);
    return plan;
}

/* --- two ranks in one thread -----------------------------------------------------------
 */

typedef struct duo {
    wsync_comm_t *comms[2];
    wsync_plan_t *plans[2];
    wsync_stream_t *stream;
} duo_t;

static inline void make_duo(duo_t *duo, uint64_t staging_nbytes)
{
    wsync_error_t err = {0};

    for (uint32_t r = 0; r < 2; r++) {
        duo->plans[r] = make_plan(r, 2, 2, 4096);
        CHECK(wsync_plan_round_count(duo->plans[r]) > 4);
        CHECK_OK(
            wsync_comm_create_shared(
                device(), NULL, r, 2,
                staging_nbytes ? staging_nbytes : wsync_plan_send_nbytes(duo->plans[r]),
                &duo->comms[r], &err),
            err);
    }
    CHECK_OK(wsync_stream_create(device(), 1, &duo->stream, &err), err);
}

static inline void connect_duo(duo_t *duo)
{
    const char *addresses[2] = {wsync_comm_address(duo->comms[0]),
                                wsync_comm_address(duo->comms[1])};
    wsync_status_t status[2] = {WSYNC_ERR_TIMEOUT, WSYNC_ERR_TIMEOUT};
    wsync_error_t err = {0};

    for (int i = 0; status[0] != WSYNC_OK || status[1] != WSYNC_OK; i++) {
        const int r = i & 1;

        CHECK(i < 1000);
        if (status[r] == WSYNC_ERR_TIMEOUT) {
            status[r] = wsync_comm_connect(duo->comms[r], addresses, SOON_MS, &err);
        }
        if (status[r] != WSYNC_OK && status[r] != WSYNC_ERR_TIMEOUT) {
            FAIL("rank %d: %s", r, err.message);
        }
    }
}

static inline duo_t open_duo(void)
{
    duo_t duo = {0};
    wsync_error_t err = {0};

    make_duo(&duo, 0);
    connect_duo(&duo);
    for (int r = 0; r < 2; r++) {
        CHECK_OK(wsync_comm_begin(duo.comms[r], duo.plans[r], &err), err);
    }
    return duo;
}

static inline void close_duo(duo_t *duo)
{
    for (int r = 0; r < 2; r++) {
        wsync_comm_destroy(duo->comms[r]);
        wsync_plan_destroy(duo->plans[r]);
    }
    wsync_stream_destroy(duo->stream);
}

static inline void send_of(duo_t *duo, int r, uint32_t round)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_comm_acquire(duo->comms[r], round, PATIENT_MS, &err), err);
    CHECK_OK(wsync_comm_post(duo->comms[r], round, duo->stream, &err), err);
}

static inline void receive_of(duo_t *duo, int r, uint32_t round)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_comm_wait(duo->comms[r], round, duo->stream, PATIENT_MS, &err), err);
    CHECK_OK(wsync_comm_release(duo->comms[r], round, duo->stream, &err), err);
}

#endif
