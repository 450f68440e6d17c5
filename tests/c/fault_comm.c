/* SPDX-License-Identifier: Apache-2.0
 * Two ranks' exchange with every allocation and every system call failing in turn. */
#include "comm/comm.h"
#include "faults.h"
#include "layouts.h"

enum { PATIENT_MS = 10000 };

/* Rank 0 sends one matrix to the worker of rank 1. */
static wsync_plan_t *make_plan(uint32_t rank)
{
    wsync_layout_builder_t *source = new_builder();
    wsync_layout_builder_t *wanted = new_builder();
    const wsync_tensor_t tensor = matrix("weight", 4, 4);
    wsync_layout_t *layouts[2];
    wsync_destination_t destination = {.whole = true};
    const wsync_worker_t worker = {.home = 1};
    const uint32_t hosts[2] = {0};
    wsync_plan_spec_t spec = {.destinations = &destination,
                              .workers = &worker,
                              .hosts = hosts,
                              .destination_count = 1,
                              .worker_count = 1,
                              .rank_count = 2,
                              .rank = rank};
    wsync_plan_t *plan = NULL;
    wsync_error_t err = {0};

    add_rows(source, tensor, 0, 0, 0, 0, 4);
    add_rows(wanted, tensor, 0, 0, 0, 0, 4);
    layouts[0] = finish(source);
    layouts[1] = finish(wanted);
    spec.source = layouts[0];
    destination.layout = layouts[1];
    CHECK_OK(wsync_plan_create(&spec, &plan, &err), err);
    wsync_layout_destroy(layouts[0]);
    wsync_layout_destroy(layouts[1]);
    return plan;
}

static wsync_status_t meet(wsync_comm_t *comms[2], wsync_error_t *err)
{
    const char *parent = fault.directory[0] != '\0' ? fault.directory : NULL;
    const char *addresses[2] = {NULL, NULL};
    wsync_status_t status[2] = {WSYNC_ERR_TIMEOUT, WSYNC_ERR_TIMEOUT};

    for (uint32_t r = 0; r < 2; r++) {
        const wsync_status_t created =
            wsync_comm_create_shared(wsync_device_host(), parent, r, 2, 64, &comms[r], err);

        CHECK((created == WSYNC_OK) == (comms[r] != NULL));
        if (created != WSYNC_OK) {
            return created;
        }
        addresses[r] = wsync_comm_address(comms[r]);
    }
    for (int i = 1; status[0] != WSYNC_OK || status[1] != WSYNC_OK; i++) {
        if (status[i & 1] == WSYNC_ERR_TIMEOUT) {
            status[i & 1] = wsync_comm_connect(comms[i & 1], addresses, 5, err);
        }
        if (status[i & 1] != WSYNC_OK && status[i & 1] != WSYNC_ERR_TIMEOUT) {
            return status[i & 1];
        }
    }
    return WSYNC_OK;
}

static wsync_status_t exchange(wsync_comm_t *comms[2], wsync_plan_t *const plans[2],
                               wsync_stream_t *stream, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    for (int r = 0; r < 2 && status == WSYNC_OK; r++) {
        status = wsync_comm_begin(comms[r], plans[r], err);
        if (status == WSYNC_OK) {
            status = wsync_comm_acquire(comms[r], 0, PATIENT_MS, err);
        }
        if (status == WSYNC_OK) {
            status = wsync_comm_post(comms[r], 0, stream, err);
        }
    }
    for (int r = 0; r < 2 && status == WSYNC_OK; r++) {
        status = wsync_comm_wait(comms[r], 0, stream, PATIENT_MS, err);
        if (status == WSYNC_OK) {
            status = wsync_comm_release(comms[r], 0, stream, err);
        }
    }
    return status;
}

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    wsync_plan_t *const *plans = context;
    wsync_comm_t *comms[2] = {NULL, NULL};
    wsync_stream_t *stream = NULL;
    wsync_status_t status = wsync_stream_create(wsync_device_host(), 1, &stream, err);

    if (status == WSYNC_OK) {
        status = meet(comms, err);
    }
    if (status == WSYNC_OK) {
        status = exchange(comms, plans, stream, err);
    }
    fault.closing = true;
    if (stream != NULL) {
        wsync_error_t ignored;

        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
    }
    for (int r = 0; r < 2; r++) {
        wsync_comm_destroy(comms[r]);
    }
    wsync_stream_destroy(stream);
    return status;
}

/* code 0: allocations. */
static void check(int code)
{
    wsync_plan_t *plans[2] = {make_plan(0), make_plan(1)};

    if (code == 0) {
        CHECK(oom_run(attempt, plans) >= 16);
    } else {
        CHECK(fault_run(attempt, plans, code) >= 30);
    }
    wsync_plan_destroy(plans[0]);
    wsync_plan_destroy(plans[1]);
}

TEST(allocations)
{
    check(0);
}

TEST(calls)
{
    check(EMFILE);
    check(ENOMEM);
}

TEST(interruptions)
{
    check(EINTR);
}
