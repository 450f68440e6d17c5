/* SPDX-License-Identifier: Apache-2.0
 * Sessions whose k-th allocation fails, for all k. */
#include "ipc/session.h"
#include "oom.h"

enum { PATIENT_MS = 10000 };

typedef struct attempt {
    wsync_exporter_t *exporter;
    wsync_importer_t *importer;
    wsync_memory_t *ring;
    wsync_stream_t *stream;
    uint8_t *blob;
} attempt_t;

static wsync_status_t meet(attempt_t *a, wsync_error_t *err)
{
    const wsync_device_ops_t *ops = wsync_device_host();
    size_t nbytes = 0;
    wsync_status_t status = ops->memory_create(4096, &a->ring, err);

    if (status == WSYNC_OK) {
        status = ops->stream_create(1, &a->stream, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_create(ops, NULL, &a->exporter, err);
        CHECK((status == WSYNC_OK) == (a->exporter != NULL));
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_create(
            ops, wsync_exporter_path(a->exporter), wsync_exporter_token(a->exporter),
            (const uint8_t *)"blob", 4, PATIENT_MS, &a->importer, err);
        CHECK((status == WSYNC_OK) == (a->importer != NULL));
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_accept(a->exporter, PATIENT_MS, &a->blob, &nbytes, err);
        CHECK((status == WSYNC_OK) == (a->blob != NULL));
    }
    return status;
}

static wsync_status_t update(attempt_t *a, wsync_error_t *err)
{
    wsync_receipt_t receipt = {0};
    uint64_t number = 0;
    uint32_t count = 0;
    wsync_status_t status = wsync_exporter_attach(
        a->exporter, a->ring, (const uint8_t *)"manifest", 8, PATIENT_MS, err);

    if (status == WSYNC_OK) {
        status = wsync_exporter_begin(a->exporter, 1, 1, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_begin(a->importer, PATIENT_MS, &number, &count, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_post(a->exporter, 0, a->stream, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_take(a->importer, 0, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_done(a->importer, 0, a->stream, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_prepared(a->importer, &receipt, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_prepared(a->exporter, PATIENT_MS, &receipt, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_commit(a->exporter, PATIENT_MS, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_verdict(a->importer, PATIENT_MS, err);
    }
    return status;
}

static wsync_status_t attempt_session(void *context, wsync_error_t *err)
{
    attempt_t a = {0};
    wsync_status_t status = meet(&a, err);

    (void)context;
    if (status == WSYNC_OK) {
        status = update(&a, err);
    }
    wsync_importer_destroy(a.importer);
    wsync_exporter_destroy(a.exporter);
    wsync_device_host()->stream_destroy(a.stream);
    wsync_device_host()->memory_destroy(a.ring);
    free(a.blob);
    return status;
}

TEST(session)
{
    CHECK(oom_run(attempt_session, NULL) >= 8);
}
