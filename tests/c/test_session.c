/* SPDX-License-Identifier: Apache-2.0
 * Both halves of a session in one thread (what is sent waits in the socket), in two threads
 * and in two processes. */
#include <pthread.h>
#include <signal.h>

#include "session_fixture.h"

enum { UPDATES = 5, ROUNDS = 40, SLOTS = 3, SLOT_WORDS = RING_NBYTES / 8 / SLOTS };

static uint64_t value_of(uint64_t update, uint32_t round, size_t word)
{
    return update * 1000003 + (uint64_t)round * 1009 + word;
}

static void *work(void *context)
{
    session_t *s = context;
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_create(device(), 1, &stream, &err), err);
    for (uint64_t i = 0; i < UPDATES; i++) {
        const uint64_t *ring;
        uint64_t update = 0;
        uint32_t count = 0;
        size_t nbytes = 0;

        CHECK_OK(wsync_importer_begin(s->importer, PATIENT_MS, &update, &count, &err), err);
        CHECK_EQ(update, i + 7);
        CHECK_EQ(count, ROUNDS + i);
        CHECK_EQ(wsync_importer_generation(s->importer), 1 + i / 2);
        CHECK(memcmp(wsync_importer_manifest(s->importer, &nbytes), "manifest", 8) == 0);
        CHECK_EQ(nbytes, 8);
        ring = reach(wsync_importer_ring(s->importer)->data);
        for (uint32_t round = 0; round < count; round++) {
            CHECK_OK(wsync_importer_take(s->importer, round, NULL, PATIENT_MS, &err), err);
            for (size_t word = 0; word < SLOT_WORDS; word++) {
                CHECK_EQ(ring[round % SLOTS * SLOT_WORDS + word],
                         value_of(update, round, word));
            }
            CHECK_OK(wsync_importer_done(s->importer, round, round % 3 ? stream : NULL,
                                         PATIENT_MS, &err),
                     err);
        }
        CHECK_OK(wsync_importer_prepared(s->importer,
                                         &(wsync_receipt_t){11, 22 + update, UINT64_MAX},
                                         PATIENT_MS, &err),
                 err);
        CHECK_OK(wsync_importer_verdict(s->importer, PATIENT_MS, &err), err);
    }
    wsync_stream_destroy(stream);
    return NULL;
}

TEST(every_round_of_every_update_arrives)
{
    session_t s = open_session();
    wsync_memory_t *buffer = NULL;
    uint64_t *values;
    wsync_error_t err = {0};
    pthread_t worker;

    CHECK_OK(wsync_memory_create(device(), RING_NBYTES, &buffer, &err), err);
    values = reach(buffer->data);
    connect_session(&s);
    CHECK_EQ(pthread_create(&worker, NULL, work, &s), 0);
    for (uint64_t i = 0; i < UPDATES; i++) {
        const uint64_t update = i + 7;
        const uint32_t count = (uint32_t)(ROUNDS + i);
        wsync_receipt_t receipt = {0};

        if (i % 2 == 0) {
            wsync_memory_destroy(s.ring);
            CHECK_OK(wsync_memory_create(device(), RING_NBYTES, &s.ring, &err), err);
            attach_session(&s);
        }
        CHECK_OK(wsync_exporter_begin(s.exporter, update, count, PATIENT_MS, &err), err);
        for (uint32_t round = 0; round < count; round++) {
            const wsync_copy_t copy = {
                .source_offset = round % SLOTS * SLOT_WORDS * 8ULL,
                .destination_offset = round % SLOTS * SLOT_WORDS * 8ULL,
                .row_count = SLOT_WORDS,
                .source_item_nbytes = 8,
                .destination_item_nbytes = 8};
            const wsync_span_t from = {buffer->data, RING_NBYTES};
            const wsync_span_t to = {s.ring->data, RING_NBYTES};

            CHECK_OK(
                wsync_exporter_acquire(
                    s.exporter, (int64_t)round - SLOTS < 0 ? -1 : (int64_t)round - SLOTS,
                    NULL, PATIENT_MS, &err),
                err);
            for (size_t word = 0; word < SLOT_WORDS; word++) {
                values[round % SLOTS * SLOT_WORDS + word] = value_of(update, round, word);
            }
            CHECK_OK(wsync_stream_copy_list(s.stream, &copy, 1, &from, 1, &to, 1, &err),
                     err);
            CHECK_OK(wsync_exporter_post(s.exporter, round, s.stream, PATIENT_MS, &err),
                     err);
            CHECK_OK(wsync_stream_synchronize(s.stream, PATIENT_MS, &err), err);
        }
        CHECK_OK(wsync_exporter_prepared(s.exporter, PATIENT_MS, &receipt, &err), err);
        CHECK_EQ(receipt.tensor_count, 11);
        CHECK_EQ(receipt.nbytes, 22 + update);
        CHECK(receipt.audit_ns == UINT64_MAX);
        CHECK_OK(wsync_exporter_commit(s.exporter, false, PATIENT_MS, &err), err);
    }
    CHECK_EQ(pthread_join(worker, NULL), 0);
    wsync_memory_destroy(buffer);
    close_session(&s);
}

TEST(timeouts_name_what_was_awaited_and_leave_the_session_good)
{
    session_t s = open_session();
    wsync_receipt_t receipt = {0};
    wsync_error_t err = {0};
    uint8_t *blob = NULL;
    size_t nbytes = 0;
    uint64_t update = 0;
    uint32_t count = 0;

#define LATE(call, text)                   \
    do {                                   \
        CHECK_EQ(call, WSYNC_ERR_TIMEOUT); \
        CHECK_HAS(err.message, text);      \
    } while (0)

    LATE(wsync_exporter_accept(s.exporter, SOON_MS, &blob, &nbytes, &err),
         wsync_exporter_path(s.exporter));
    connect_session(&s);
    LATE(wsync_importer_begin(s.importer, SOON_MS, &update, &count, &err), "next update");
    attach_session(&s);
    LATE(wsync_importer_begin(s.importer, SOON_MS, &update, &count, &err), "trainer (pid ");
    CHECK_EQ(wsync_importer_generation(s.importer), 1);
    CHECK_OK(wsync_exporter_begin(s.exporter, 1, 1, PATIENT_MS, &err), err);
    LATE(wsync_exporter_begun(s.exporter, SOON_MS, &err), "the begin of the update");
    CHECK_OK(wsync_importer_begin(s.importer, PATIENT_MS, &update, &count, &err), err);
    CHECK_OK(wsync_exporter_begun(s.exporter, PATIENT_MS, &err), err);
    LATE(wsync_importer_take(s.importer, 0, NULL, SOON_MS, &err), "round 0");
    CHECK_OK(wsync_exporter_post(s.exporter, 0, s.stream, PATIENT_MS, &err), err);
    LATE(wsync_exporter_acquire(s.exporter, 0, NULL, SOON_MS, &err), "the end of round 0");
    LATE(wsync_exporter_acquire(s.exporter, 0, NULL, 0, &err), "worker (pid ");
    CHECK_OK(wsync_importer_take(s.importer, 0, NULL, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_done(s.importer, 0, s.stream, PATIENT_MS, &err), err);
    CHECK_OK(wsync_exporter_acquire(s.exporter, 0, NULL, PATIENT_MS, &err), err);
    LATE(wsync_exporter_prepared(s.exporter, SOON_MS, &receipt, &err), "the receipt");
    CHECK_OK(wsync_importer_prepared(s.importer, &receipt, PATIENT_MS, &err), err);
    LATE(wsync_importer_verdict(s.importer, SOON_MS, &err), "the commit");
    CHECK_OK(wsync_exporter_prepared(s.exporter, PATIENT_MS, &receipt, &err), err);
    CHECK_OK(wsync_exporter_commit(s.exporter, false, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_verdict(s.importer, PATIENT_MS, &err), err);
#undef LATE
    close_session(&s);
}

/* Brings a session to one of the exporter's waits. */
enum { AT_ATTACH, AT_BEGIN, AT_ACQUIRE, AT_POST, AT_PREPARED, AT_COMMIT, EXPORTER_PLACES };

static session_t session_at(int place)
{
    session_t s = open_session();
    wsync_receipt_t receipt = {0};
    wsync_error_t err = {0};

    connect_session(&s);
    if (place >= AT_BEGIN) {
        attach_session(&s);
    }
    if (place >= AT_ACQUIRE) {
        begin_session(&s, 1, 1);
    }
    if (place == AT_ACQUIRE || place >= AT_PREPARED) {
        CHECK_OK(wsync_exporter_post(s.exporter, 0, s.stream, PATIENT_MS, &err), err);
    }
    if (place >= AT_PREPARED) {
        CHECK_OK(wsync_importer_take(s.importer, 0, NULL, PATIENT_MS, &err), err);
        CHECK_OK(wsync_importer_done(s.importer, 0, NULL, PATIENT_MS, &err), err);
    }
    if (place >= AT_COMMIT) {
        CHECK_OK(wsync_importer_prepared(s.importer, &receipt, PATIENT_MS, &err), err);
        CHECK_OK(wsync_exporter_prepared(s.exporter, PATIENT_MS, &receipt, &err), err);
    }
    return s;
}

static wsync_status_t call_at(session_t *s, int place, wsync_error_t *err)
{
    wsync_receipt_t receipt = {0};

    switch (place) {
    case AT_ATTACH:
        return wsync_exporter_attach(s->exporter, s->ring, NULL, 0, PATIENT_MS, err);
    case AT_BEGIN:
        return wsync_exporter_begin(s->exporter, 1, 1, PATIENT_MS, err);
    case AT_ACQUIRE:
        return wsync_exporter_acquire(s->exporter, 0, NULL, PATIENT_MS, err);
    case AT_POST:
        return wsync_exporter_post(s->exporter, 0, s->stream, PATIENT_MS, err);
    case AT_PREPARED:
        return wsync_exporter_prepared(s->exporter, PATIENT_MS, &receipt, err);
    default:
        return wsync_exporter_commit(s->exporter, false, PATIENT_MS, err);
    }
}

TEST(exporter_sees_the_worker_leave_in_every_state)
{
    for (int place = 0; place < EXPORTER_PLACES; place++) {
        session_t s = session_at(place);
        wsync_error_t err = {0};
        char text[64];

        wsync_importer_destroy(s.importer);
        s.importer = NULL;
        CHECK_EQ(call_at(&s, place, &err), WSYNC_ERR_CLOSED);
        (void)snprintf(text, sizeof(text), "worker (pid %d) closed the connection while",
                       (int)getpid());
        CHECK_HAS(err.message, text);
        if (place == AT_ACQUIRE) {
            CHECK_HAS(err.message, "while the end of round 0 was awaited");
        }
        CHECK_EQ(call_at(&s, place, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "closed the connection");
        wsync_exporter_abort(s.exporter, "over");
        close_session(&s);
    }
}

/* With streams on both sides the calls run ahead of the data by the slots of the ring. */
/* A stream whose batches need no new tables, as in an update that is not the first. */
static wsync_stream_t *steady_stream(wsync_memory_t *memory)
{
    const wsync_copy_t copy = {.row_count = 64,
                               .source_item_nbytes = 1,
                               .destination_offset = 64,
                               .destination_item_nbytes = 1};
    const wsync_span_t span = {memory->data, memory->nbytes};
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_create(device(), 1, &stream, &err), err);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(wsync_stream_copy_list(stream, &copy, 1, &span, 1, &span, 1, &err), err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &err), err);
    }
    return stream;
}

/* A queue of a device has room for so much. */
TEST(hosts_run_ahead_by_so_many_rounds_and_no_more)
{
    enum { AHEAD = 64, COUNT = AHEAD + 2 };

    session_t s = updating_session(COUNT);
    wsync_stream_t *loading = steady_stream(s.ring);
    wsync_stream_t *keeper = NULL;
    wsync_memory_t *gate = NULL;
    wsync_error_t err = {0};

    wsync_stream_destroy(s.stream);
    s.stream = steady_stream(s.ring);
    CHECK_OK(wsync_stream_create(device(), 1, &keeper, &err), err);
    CHECK_OK(wsync_control_create(device(), 64, &gate, &err), err);
    CHECK_OK(wsync_stream_wait(s.stream, (wsync_event_t){gate, 0}, 1, &err), err);
    for (uint32_t round = 0; round < AHEAD; round++) {
        CHECK_OK(wsync_exporter_post(s.exporter, round, s.stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_importer_take(s.importer, round, loading, PATIENT_MS, &err), err);
        CHECK_OK(wsync_importer_done(s.importer, round, loading, PATIENT_MS, &err), err);
    }
    CHECK_OK(wsync_exporter_acquire(s.exporter, AHEAD - 1, s.stream, PATIENT_MS, &err),
             err);
    CHECK_OK(wsync_exporter_post(s.exporter, AHEAD, s.stream, PATIENT_MS, &err), err);
    CHECK_EQ(wsync_importer_take(s.importer, AHEAD, loading, SOON_MS, &err),
             WSYNC_ERR_TIMEOUT);
    CHECK_OK(wsync_stream_record(keeper, (wsync_event_t){gate, 0}, 1, &err), err);
    /* The trainer's stream now waits for the end of a round that has come. */
    CHECK_OK(wsync_importer_take(s.importer, AHEAD, loading, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_done(s.importer, AHEAD, loading, PATIENT_MS, &err), err);
    CHECK_OK(wsync_exporter_acquire(s.exporter, AHEAD, NULL, PATIENT_MS, &err), err);
    wsync_stream_destroy(loading);
    wsync_stream_destroy(keeper);
    wsync_memory_destroy(gate);
    close_session(&s);
}

TEST(exporter_hears_why_the_worker_failed_in_every_state)
{
    for (int place = 0; place < EXPORTER_PLACES; place++) {
        session_t s = session_at(place);
        wsync_error_t err = {0};

        wsync_importer_fail(s.importer, "lm_head.weight:\x1b no such parameter");
        CHECK_EQ(call_at(&s, place, &err), WSYNC_ERR_REMOTE);
        CHECK_HAS(err.message, "failed: lm_head.weight:? no such parameter");
        CHECK_EQ(wsync_importer_take(s.importer, 0, NULL, SOON_MS, &err), WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "no such parameter");
        close_session(&s);
    }
}

/* The importer's waits: begin, take (before and after the announcement), done, prepared,
 * verdict. */
enum { IN_BEGIN, IN_TAKE, IN_DONE, IN_PREPARED, IN_VERDICT, IMPORTER_PLACES };

static session_t session_in(int place)
{
    session_t s = open_session();
    wsync_receipt_t receipt = {0};
    wsync_error_t err = {0};

    connect_session(&s);
    attach_session(&s);
    if (place >= IN_TAKE) {
        begin_session(&s, 1, 1);
    }
    if (place >= IN_DONE) {
        CHECK_OK(wsync_exporter_post(s.exporter, 0, s.stream, PATIENT_MS, &err), err);
        CHECK_OK(wsync_importer_take(s.importer, 0, NULL, PATIENT_MS, &err), err);
    }
    if (place >= IN_PREPARED) {
        CHECK_OK(wsync_importer_done(s.importer, 0, NULL, PATIENT_MS, &err), err);
    }
    if (place >= IN_VERDICT) {
        CHECK_OK(wsync_importer_prepared(s.importer, &receipt, PATIENT_MS, &err), err);
    }
    return s;
}

static wsync_status_t call_in(session_t *s, int place, wsync_error_t *err)
{
    wsync_receipt_t receipt = {0};
    uint64_t update = 0;
    uint32_t count = 0;

    switch (place) {
    case IN_BEGIN:
        return wsync_importer_begin(s->importer, PATIENT_MS, &update, &count, err);
    case IN_TAKE:
        return wsync_importer_take(s->importer, 0, NULL, PATIENT_MS, err);
    case IN_DONE:
        return wsync_importer_done(s->importer, 0, s->stream, PATIENT_MS, err);
    case IN_PREPARED:
        return wsync_importer_prepared(s->importer, &receipt, PATIENT_MS, err);
    default:
        return wsync_importer_verdict(s->importer, PATIENT_MS, err);
    }
}

TEST(importer_sees_the_trainer_leave_or_abort_in_every_state)
{
    for (int place = 0; place < IMPORTER_PLACES; place++) {
        session_t s = session_in(place);
        wsync_error_t err = {0};

        wsync_exporter_destroy(s.exporter);
        s.exporter = NULL;
        CHECK_EQ(call_in(&s, place, &err), WSYNC_ERR_CLOSED);
        CHECK_HAS(err.message, "trainer (pid ");
        close_session(&s);

        s = session_in(place);
        wsync_exporter_abort(s.exporter, "rank 3: out of patience");
        CHECK_EQ(call_in(&s, place, &err), WSYNC_ERR_REMOTE);
        CHECK_HAS(err.message, "aborted: rank 3: out of patience");
        CHECK_EQ(call_in(&s, place, &err), WSYNC_ERR_STATE);
        close_session(&s);
    }
}
