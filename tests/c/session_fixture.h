/* SPDX-License-Identifier: Apache-2.0
 * Both halves of a session, opened step by step. */
#ifndef WSYNC_TESTS_SESSION_FIXTURE_H
#define WSYNC_TESTS_SESSION_FIXTURE_H

#include "device_fixture.h"
#include "ipc/session_internal.h"

enum { SOON_MS = 20, PATIENT_MS = 20000, RING_NBYTES = 1 << 16 };

typedef struct session {
    wsync_exporter_t *exporter;
    wsync_importer_t *importer;
    wsync_memory_t *ring;
    wsync_stream_t *stream;
} session_t;

static inline const wsync_device_t *device(void)
{
    return test_device();
}

static inline session_t open_session(void)
{
    session_t s = {0};
    wsync_error_t err = {0};

    CHECK_OK(wsync_exporter_create(NULL, &s.exporter, &err), err);
    CHECK_OK(wsync_memory_create(device(), RING_NBYTES, &s.ring, &err), err);
    CHECK_OK(wsync_stream_create(device(), 1, &s.stream, &err), err);
    return s;
}

static inline void connect_session(session_t *s)
{
    uint8_t *blob = NULL;
    size_t nbytes = 0;
    wsync_error_t err = {0};

    CHECK_OK(
        wsync_importer_create(device(), wsync_exporter_path(s->exporter),
                              wsync_exporter_token(s->exporter), (const uint8_t *)"layout",
                              6, PATIENT_MS, &s->importer, &err),
        err);
    CHECK_OK(wsync_exporter_accept(s->exporter, PATIENT_MS, &blob, &nbytes, &err), err);
    CHECK_EQ(nbytes, 6);
    CHECK(memcmp(blob, "layout", 6) == 0);
    free(blob);
}

static inline void attach_session(session_t *s)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_exporter_attach(s->exporter, s->ring, (const uint8_t *)"manifest", 8,
                                   PATIENT_MS, &err),
             err);
}

static inline void begin_session(session_t *s, uint64_t update, uint32_t round_count)
{
    uint64_t seen_update = 0;
    uint32_t seen_count = 0;
    wsync_error_t err = {0};

    CHECK_OK(wsync_exporter_begin(s->exporter, update, round_count, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_begin(s->importer, PATIENT_MS, &seen_update, &seen_count, &err),
             err);
    CHECK_EQ(seen_update, update);
    CHECK_EQ(seen_count, round_count);
}

static inline session_t updating_session(uint32_t round_count)
{
    session_t s = open_session();

    connect_session(&s);
    attach_session(&s);
    begin_session(&s, 1, round_count);
    return s;
}

static inline void close_session(session_t *s)
{
    wsync_importer_destroy(s->importer);
    wsync_exporter_destroy(s->exporter);
    wsync_stream_destroy(s->stream);
    wsync_memory_destroy(s->ring);
}

#endif
