/* SPDX-License-Identifier: Apache-2.0
 * Both halves of a session, from first to last, with every allocation and every system call
 * failing in turn. */
#include "faults.h"
#include "ipc/session.h"

enum { PATIENT_MS = 10000, ROUNDS = 3, RING_NBYTES = 8192 };

typedef struct attempt {
    wsync_exporter_t *exporter;
    wsync_importer_t *importer;
    wsync_memory_t *rings[2];
    wsync_stream_t *stream;
    uint8_t *blob;
} attempt_t;

static wsync_status_t meet(attempt_t *a, wsync_error_t *err)
{
    const wsync_device_t *device = wsync_device_host();
    const char *parent = fault.directory[0] != '\0' ? fault.directory : NULL;
    size_t nbytes = 0;
    wsync_status_t status = wsync_memory_create(device, RING_NBYTES, &a->rings[0], err);

    if (status == WSYNC_OK) {
        status = wsync_memory_create(device, 2 * RING_NBYTES, &a->rings[1], err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(device, 1, &a->stream, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_create(parent, &a->exporter, err);
        CHECK((status == WSYNC_OK) == (a->exporter != NULL));
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_create(
            device, wsync_exporter_path(a->exporter), wsync_exporter_token(a->exporter),
            (const uint8_t *)"blob", 4, PATIENT_MS, &a->importer, err);
        CHECK((status == WSYNC_OK) == (a->importer != NULL));
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_accept(a->exporter, PATIENT_MS, &a->blob, &nbytes, err);
        CHECK((status == WSYNC_OK) == (a->blob != NULL));
    }
    return status;
}

static wsync_status_t begin(attempt_t *a, int update, wsync_error_t *err)
{
    uint64_t number = 0;
    uint32_t count = 0;
    wsync_status_t status = WSYNC_OK;

    if (update != 1) {
        status = wsync_exporter_attach(a->exporter, a->rings[update / 2],
                                       (const uint8_t *)"manifest", 8, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status =
            wsync_exporter_begin(a->exporter, (uint64_t)update, ROUNDS, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_begin(a->importer, PATIENT_MS, &number, &count, err);
        CHECK(status != WSYNC_OK || (number == (uint64_t)update && count == ROUNDS));
    }
    return status;
}

/* A ring of one slot: each round waits for the end of the one before, here or on the
 * stream. */
static wsync_status_t pass(attempt_t *a, uint32_t round, wsync_error_t *err)
{
    wsync_stream_t *waiting = round % 2 == 0 ? a->stream : NULL;
    wsync_status_t status =
        wsync_exporter_acquire(a->exporter, (int64_t)round - 1, waiting, PATIENT_MS, err);

    if (status == WSYNC_OK) {
        status = wsync_exporter_post(a->exporter, round, a->stream, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_take(a->importer, round, waiting, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_done(a->importer, round, round == 1 ? NULL : a->stream,
                                     PATIENT_MS, err);
    }
    return status;
}

/* What keeps the ring from being parked is told, and is no failure of the update. */
static wsync_status_t park(attempt_t *a, bool *over, wsync_error_t *err)
{
    const wsync_status_t status = wsync_exporter_park(a->exporter, PATIENT_MS, err);
    const bool gone = status == WSYNC_ERR_REMOTE || status == WSYNC_ERR_CLOSED;

    *over = gone;
    if (fault.code == EINTR || (status != WSYNC_ERR_REFUSED && !gone)) {
        return status;
    }
    CHECK(err->message[0] != '\0');
    fault.forgiven = true;
    return WSYNC_OK;
}

static wsync_status_t commit(attempt_t *a, bool parked, wsync_error_t *err)
{
    wsync_receipt_t receipt = {.tensor_count = 5};
    wsync_status_t status = wsync_importer_prepared(a->importer, &receipt, PATIENT_MS, err);

    receipt.tensor_count = 0;
    if (status == WSYNC_OK) {
        status = wsync_exporter_prepared(a->exporter, PATIENT_MS, &receipt, err);
        CHECK_EQ(receipt.tensor_count, status == WSYNC_OK ? 5 : 0);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_commit(a->exporter, parked, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_verdict(a->importer, PATIENT_MS, err);
    }
    return status;
}

/* Whatever has failed, each side can be told, and both can be destroyed. */
static void close_both(attempt_t *a, bool aborted)
{
    if (a->stream != NULL) {
        (void)wsync_stream_abandon(a->stream, PATIENT_MS);
    }
    if (aborted && a->exporter != NULL) {
        wsync_exporter_abort(a->exporter, "given up");
    }
    if (aborted && a->importer != NULL) {
        wsync_importer_fail(a->importer, "given up as well");
    }
    wsync_importer_destroy(a->importer);
    wsync_exporter_destroy(a->exporter);
    wsync_stream_destroy(a->stream);
    wsync_memory_destroy(a->rings[0]);
    wsync_memory_destroy(a->rings[1]);
    free(a->blob);
}

/* Two updates with one ring, which is parked after each, and one with another. */
static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    attempt_t a = {0};
    bool over = false;
    wsync_status_t status = meet(&a, err);

    (void)context;
    for (int update = 0; update < 3 && status == WSYNC_OK && !over; update++) {
        status = begin(&a, update, err);
        for (uint32_t round = 0; round < ROUNDS && status == WSYNC_OK; round++) {
            status = pass(&a, round, err);
        }
        if (status == WSYNC_OK) {
            status = commit(&a, update < 2, err);
        }
        if (status == WSYNC_OK && update < 2) {
            status = park(&a, &over, err);
        }
    }
    fault.closing = true;
    close_both(&a, status != WSYNC_OK);
    return status;
}

/* An update that is given up half way. */
static wsync_status_t attempt_abort(void *context, wsync_error_t *err)
{
    attempt_t a = {0};
    wsync_status_t status = meet(&a, err);

    (void)context;
    if (status == WSYNC_OK) {
        status = begin(&a, 0, err);
    }
    if (status == WSYNC_OK) {
        status = pass(&a, 0, err);
    }
    fault.closing = true;
    close_both(&a, true);
    return status;
}

TEST(allocations)
{
    CHECK(oom_run(attempt, NULL) >= 16);
    CHECK(oom_run(attempt_abort, NULL) >= 15);
}

TEST(calls)
{
    CHECK(fault_run(attempt, NULL, EMFILE) >= 80);
    CHECK(fault_run(attempt, NULL, ENOMEM) >= 80);
    CHECK(fault_run(attempt_abort, NULL, EMFILE) >= 50);
}

TEST(interruptions)
{
    CHECK(fault_run(attempt, NULL, EINTR) >= 40);
    CHECK(fault_run(attempt_abort, NULL, EINTR) >= 20);
}
