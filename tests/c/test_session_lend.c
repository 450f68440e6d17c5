/* SPDX-License-Identifier: Apache-2.0
 * Lent memory between the halves of a session; an announced round that does not come. */
#include <fcntl.h>
#include <sys/mman.h>

#include "device/sealed_blob.h"
#include "ipc/lent.h"
#include "session_fixture.h"

static void raw_send(wsync_channel_t *channel, wsync_frame_t frame)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_channel_send(channel, &frame, PATIENT_MS, &err), err);
}

/* A trainer that is only a channel. */
typedef struct raw_trainer {
    wsync_listener_t *listener;
    wsync_channel_t *channel;
    wsync_importer_t *importer;
    wsync_memory_t *ring;
    wsync_memory_t *control;
    int manifest;
} raw_trainer_t;

static raw_trainer_t open_trainer(void)
{
    static const uint8_t token[WSYNC_TOKEN_NBYTES] = {7};
    raw_trainer_t t = {0};
    wsync_frame_t hello;
    wsync_error_t err = {0};

    CHECK_OK(wsync_listener_create(NULL, &t.listener, &err), err);
    CHECK_OK(wsync_importer_create(device(), wsync_listener_path(t.listener), token, NULL,
                                   0, PATIENT_MS, &t.importer, &err),
             err);
    CHECK_OK(wsync_listener_accept(t.listener, token, PATIENT_MS, &t.channel, &hello, &err),
             err);
    wsync_frame_fini(&hello);
    CHECK_OK(wsync_memory_create(device(), RING_NBYTES, &t.ring, &err), err);
    CHECK_OK(wsync_control_create(device(), SESSION_CONTROL_NBYTES, &t.control, &err), err);
    CHECK_OK(wsync_blob_create((const uint8_t *)"abc", 3, &t.manifest, &err), err);
    return t;
}

static wsync_frame_t attach_frame(const raw_trainer_t *t)
{
    return (wsync_frame_t){.kind = SESSION_ATTACH,
                           .arguments = {RING_NBYTES, 3, SESSION_CONTROL_NBYTES},
                           .fds = {t->ring->fd, t->manifest, t->control->fd},
                           .fd_count = 3};
}

static void close_trainer(raw_trainer_t *t)
{
    wsync_importer_destroy(t->importer);
    wsync_channel_destroy(t->channel);
    wsync_listener_destroy(t->listener);
    wsync_memory_destroy(t->ring);
    wsync_memory_destroy(t->control);
    (void)close(t->manifest);
}

/* The frame came, the word does not: the socket must still be watched. */
TEST(an_announced_round_that_never_comes_ends_with_the_deadline_or_the_peer)
{
    raw_trainer_t t = open_trainer();
    uint64_t update = 0;
    uint32_t count = 0;
    wsync_error_t err = {0};

    raw_send(t.channel, attach_frame(&t));
    raw_send(t.channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {1, 1, 0}});
    raw_send(t.channel, (wsync_frame_t){.kind = SESSION_ROUND});
    CHECK_OK(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err), err);
    CHECK_EQ(wsync_importer_take(t.importer, 0, NULL, SOON_MS, &err), WSYNC_ERR_TIMEOUT);
    wsync_channel_destroy(t.channel);
    t.channel = NULL;
    CHECK_EQ(wsync_importer_take(t.importer, 0, NULL, PATIENT_MS, &err), WSYNC_ERR_CLOSED);
    CHECK_HAS(err.message, "while round 0 was awaited");
    close_trainer(&t);
}

enum { LENT_NBYTES = 4096 };

/* Sends what a trainer lends; `segment` is its number there. */
static void raw_lend(const raw_trainer_t *t, uint64_t segment, int fd)
{
    raw_send(t->channel,
             (wsync_frame_t){
                 .kind = SESSION_LEND, .arguments = {segment}, .fds = {fd}, .fd_count = 1});
}

/* Sends bindings, and that they have `nbytes`. */
static void raw_bind(const raw_trainer_t *t, const wsync_binding_t *bindings, size_t count,
                     uint64_t nbytes)
{
    wsync_frame_t frame = {.kind = SESSION_BIND, .arguments = {nbytes}, .fd_count = 1};
    wsync_error_t err = {0};

    CHECK_OK(wsync_blob_create((const uint8_t *)bindings, count * sizeof(*bindings),
                               &frame.fds[0], &err),
             err);
    raw_send(t->channel, frame);
    wsync_frame_fini(&frame);
}

static int shared_file(uint64_t nbytes)
{
    const int fd = memfd_create("lent", MFD_CLOEXEC);

    CHECK_EQ(ftruncate(fd, (off_t)nbytes), 0);
    return fd;
}

TEST(a_trainer_that_goes_while_it_lends_ends_the_session)
{
    const wsync_binding_t bindings[1] = {{0, 0, 8}};
    const int fd = shared_file(LENT_NBYTES);

    for (int i = 0; i < 3; i++) {
        raw_trainer_t t = open_trainer();
        uint64_t update = 0;
        uint32_t rounds = 0;
        wsync_error_t err = {0};

        raw_send(t.channel, attach_frame(&t));
        if (i > 0) {
            raw_lend(&t, 0, fd);
        }
        if (i > 1) {
            raw_bind(&t, bindings, 1, sizeof(bindings));
        }
        wsync_channel_destroy(t.channel);
        t.channel = NULL;
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &rounds, &err),
                 WSYNC_ERR_CLOSED);
        CHECK_HAS(err.message, "while the next update was awaited");
        close_trainer(&t);
    }
    (void)close(fd);
}

/* Lends until the worker's queue is full, or so often; how often that was. */
static int lend_at_once(const session_t *s, const wsync_memory_t *lent, int most)
{
    uint64_t segment = 0;
    wsync_error_t err = {0};
    int count = 0;

    while (count < most &&
           wsync_exporter_lend(s->exporter, lent, 0, &segment, &err) == WSYNC_OK) {
        count++;
    }
    return count;
}

/* Handles all that has come. */
static void take_what_was_lent(const session_t *s)
{
    uint64_t update = 0;
    uint32_t rounds = 0;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_importer_begin(s->importer, SOON_MS, &update, &rounds, &err),
             WSYNC_ERR_TIMEOUT);
}

/* A queue has room for some of them: who times out goes on where it was. */
TEST(a_segment_of_many_descriptors_crosses_in_parts)
{
    enum { MANY = 100, MOST = 5000 };
    session_t s = open_session();
    const int fd = shared_file(LENT_NBYTES);
    int fds[MANY];
    wsync_memory_t *single = NULL;
    wsync_memory_t *many = NULL;
    uint64_t segment = UINT64_MAX;
    size_t count = 0;
    wsync_error_t err = {0};
    int room;

    for (int i = 0; i < MANY; i++) {
        fds[i] = fd;
    }
    CHECK_OK(wsync_memory_borrow(device(), fds, 1, &single, &err), err);
    CHECK_OK(wsync_memory_borrow(device(), fds, MANY, &many, &err), err);
    CHECK_EQ(many->more_count, MANY - 1);
    connect_session(&s);
    attach_session(&s);
    take_what_was_lent(&s);
    room = lend_at_once(&s, single, MOST);
    CHECK(room > 10 && room < MOST);
    take_what_was_lent(&s);
    CHECK_EQ(lend_at_once(&s, single, room - 10), room - 10);
    CHECK_EQ(wsync_exporter_lend(s.exporter, many, 0, &segment, &err), WSYNC_ERR_TIMEOUT);
    take_what_was_lent(&s);
    CHECK_OK(wsync_exporter_lend(s.exporter, many, PATIENT_MS, &segment, &err), err);
    begin_session(&s, 1, 1);
    CHECK(wsync_importer_segments(s.importer, &count) != NULL);
    CHECK_EQ(count, 2 * room - 10 + 1);
    CHECK_EQ(segment, count - 1);
    CHECK_EQ(wsync_importer_segments(s.importer, &count)[segment]->more_count, MANY - 1);
    wsync_memory_destroy(single);
    wsync_memory_destroy(many);
    (void)close(fd);
    close_session(&s);
}
