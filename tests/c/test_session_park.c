/* SPDX-License-Identifier: Apache-2.0
 * Sessions whose ring is parked between updates. */
#include <sys/mman.h>

#include "session_fixture.h"
#include "starve.h"

/* One round, whose bytes are all `value`. */
static void move(session_t *s, uint64_t update, int value)
{
    wsync_memory_t *taken;
    const unsigned char *bytes;
    wsync_receipt_t receipt = {0};
    wsync_error_t err = {0};

    begin_session(s, update, 1);
    memset(reach(s->ring->data), value, RING_NBYTES);
    CHECK_OK(wsync_exporter_post(s->exporter, 0, s->stream, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_take(s->importer, 0, NULL, PATIENT_MS, &err), err);
    taken = wsync_importer_ring(s->importer);
    bytes = reach(taken->data);
    for (size_t i = 0; i < RING_NBYTES; i++) {
        CHECK_EQ(bytes[i], value);
    }
    CHECK_OK(wsync_importer_done(s->importer, 0, NULL, PATIENT_MS, &err), err);
    CHECK_OK(wsync_importer_prepared(s->importer, &receipt, PATIENT_MS, &err), err);
    CHECK_OK(wsync_exporter_prepared(s->exporter, PATIENT_MS, &receipt, &err), err);
    CHECK_OK(wsync_stream_synchronize(s->stream, PATIENT_MS, &err), err);
}

static void commit(session_t *s)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_exporter_commit(s->exporter, true, PATIENT_MS, &err), err);
}

static void park(session_t *s)
{
    wsync_error_t err = {0};

    commit(s);
    CHECK_OK(wsync_importer_verdict(s->importer, PATIENT_MS, &err), err);
    CHECK_OK(wsync_exporter_park(s->exporter, PATIENT_MS, &err), err);
    CHECK_EQ(s->ring->fd, -1);
    CHECK_EQ(wsync_importer_ring(s->importer)->fd, -1);
}

static session_t attached_session(void)
{
    session_t s = open_session();

    connect_session(&s);
    attach_session(&s);
    return s;
}

static session_t parked_session(void)
{
    session_t s = attached_session();

    move(&s, 1, 1);
    park(&s);
    return s;
}

TEST(a_new_ring_takes_the_place_of_a_parked_one)
{
    session_t s = parked_session();
    wsync_error_t err = {0};

    CHECK_EQ(wsync_exporter_attach(s.exporter, s.ring, NULL, 0, PATIENT_MS, &err),
             WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "the ring is parked");
    wsync_memory_destroy(s.ring);
    CHECK_OK(wsync_memory_create(device(), RING_NBYTES, &s.ring, &err), err);
    attach_session(&s);
    move(&s, 2, 2);
    park(&s);
    move(&s, 3, 3);
    close_session(&s);
}

/* A worker whose loader keeps views. */
TEST(a_ring_that_is_looked_at_stays_on_both_sides)
{
    session_t s = attached_session();
    wsync_memory_t *theirs;
    wsync_error_t err = {0};

    move(&s, 1, 1);
    theirs = wsync_importer_ring(s.importer);
    CHECK_OK(wsync_memory_pin(theirs, &err), err);
    commit(&s);
    CHECK_OK(wsync_importer_verdict(s.importer, PATIENT_MS, &err), err);
    CHECK_EQ(wsync_exporter_park(s.exporter, PATIENT_MS, &err), WSYNC_ERR_REFUSED);
    CHECK_HAS(err.message,
              "the worker keeps the ring: the memory cannot be parked: 1 view");
    CHECK(s.ring->fd >= 0 && theirs->fd >= 0);
    CHECK_EQ(*(unsigned char *)reach(theirs->data), 1);
    move(&s, 2, 2);
    wsync_memory_unpin(theirs);
    park(&s);
    move(&s, 3, 3);
    close_session(&s);
}

/* Where the worker is when it dies. */
enum { BEFORE_VERDICT, AFTER_VERDICT, WHILE_PARKED, AFTER_BEGIN, WORKER_PLACES };

TEST(a_worker_that_dies_takes_nothing_of_the_update_with_it)
{
    for (int place = 0; place < WORKER_PLACES; place++) {
        session_t s = attached_session();
        wsync_error_t err = {0};

        move(&s, 1, 1);
        commit(&s);
        if (place >= AFTER_VERDICT) {
            CHECK_OK(wsync_importer_verdict(s.importer, PATIENT_MS, &err), err);
        }
        if (place >= WHILE_PARKED) {
            CHECK_OK(wsync_exporter_park(s.exporter, PATIENT_MS, &err), err);
        }
        if (place == AFTER_BEGIN) {
            CHECK_OK(wsync_exporter_begin(s.exporter, 2, 1, PATIENT_MS, &err), err);
        }
        wsync_importer_destroy(s.importer);
        s.importer = NULL;
        if (place == BEFORE_VERDICT) {
            CHECK_EQ(wsync_exporter_park(s.exporter, PATIENT_MS, &err), WSYNC_ERR_CLOSED);
        } else if (place == AFTER_VERDICT) {
            CHECK_OK(wsync_exporter_park(s.exporter, PATIENT_MS, &err), err);
        }
        CHECK_EQ(s.ring->fd < 0, place < AFTER_BEGIN);
        if (place == BEFORE_VERDICT) {
            CHECK_EQ(wsync_exporter_begin(s.exporter, 2, 1, SOON_MS, &err),
                     WSYNC_ERR_STATE);
        } else if (place < AFTER_BEGIN) {
            CHECK_EQ(wsync_exporter_begin(s.exporter, 2, 1, PATIENT_MS, &err),
                     WSYNC_ERR_CLOSED);
        } else {
            CHECK_EQ(wsync_exporter_acquire(s.exporter, -1, NULL, PATIENT_MS, &err),
                     WSYNC_ERR_CLOSED);
        }
        wsync_exporter_abort(s.exporter, "over");
        close_session(&s);
    }
}
