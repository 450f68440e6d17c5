/* SPDX-License-Identifier: Apache-2.0
 * One half of a session against a peer that sends what it should not, or not at all. */
#include <fcntl.h>
#include <sys/mman.h>

#include "ipc/lent.h"
#include "ipc/sealed_blob.h"
#include "session_fixture.h"

static wsync_channel_t *raw_worker(session_t *s)
{
    wsync_channel_t *channel = NULL;
    wsync_frame_t hello = {.arguments = {3, 0, 0, SESSION_PURPOSE}, .fd_count = 1};
    wsync_error_t err = {0};
    uint8_t *blob = NULL;
    size_t nbytes = 0;

    memcpy(&hello.arguments[1], device()->uuid, WSYNC_DEVICE_UUID_NBYTES);
    CHECK_OK(wsync_blob_create((const uint8_t *)"abc", 3, &hello.fds[0], &err), err);
    CHECK_OK(wsync_channel_connect(wsync_exporter_path(s->exporter),
                                   wsync_exporter_token(s->exporter), &hello, PATIENT_MS,
                                   &channel, &err),
             err);
    wsync_frame_fini(&hello);
    CHECK_OK(wsync_exporter_accept(s->exporter, PATIENT_MS, &blob, &nbytes, &err), err);
    free(blob);
    return channel;
}

static void raw_send(wsync_channel_t *channel, wsync_frame_t frame)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_channel_send(channel, &frame, PATIENT_MS, &err), err);
}

TEST(frames_of_a_hostile_worker_are_refused)
{
    const wsync_frame_t bad[] = {
        {.kind = 0},
        {.kind = 99},
        {.kind = WSYNC_FRAME_HELLO},
        {.kind = SESSION_ATTACH},
        {.kind = SESSION_COMMIT},
        {.kind = SESSION_DONE, .arguments = {1}},
        {.kind = SESSION_DONE, .arguments = {UINT64_MAX}},
        {.kind = SESSION_DONE, .arguments = {0, 2}},
        {.kind = SESSION_DONE, .fds = {0}, .fd_count = 1},
        {.kind = SESSION_PREPARED},
        {.kind = SESSION_PARKED, .arguments = {1}},
        {.kind = SESSION_LEND, .fds = {0}, .fd_count = 1},
        {.kind = SESSION_BIND, .fds = {0}, .fd_count = 1},
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        session_t s = open_session();
        wsync_channel_t *worker = raw_worker(&s);
        wsync_error_t err = {0};

        attach_session(&s);
        CHECK_OK(wsync_exporter_begin(s.exporter, 1, 1, PATIENT_MS, &err), err);
        CHECK_OK(wsync_exporter_post(s.exporter, 0, s.stream, PATIENT_MS, &err), err);
        raw_send(worker, bad[i]);
        CHECK_EQ(wsync_exporter_acquire(s.exporter, 0, NULL, PATIENT_MS, &err),
                 WSYNC_ERR_PROTOCOL);
        CHECK_HAS(err.message, "worker (pid ");
        CHECK_EQ(wsync_exporter_acquire(s.exporter, 0, NULL, SOON_MS, &err),
                 WSYNC_ERR_STATE);
        wsync_channel_destroy(worker);
        close_session(&s);
    }
}

/* An update of no rounds, committed with the wish to park. */
static wsync_channel_t *parking_worker(session_t *s)
{
    wsync_channel_t *worker = raw_worker(s);
    wsync_receipt_t receipt;
    wsync_error_t err = {0};

    attach_session(s);
    CHECK_OK(wsync_exporter_begin(s->exporter, 1, 0, PATIENT_MS, &err), err);
    raw_send(worker, (wsync_frame_t){.kind = SESSION_PREPARED});
    CHECK_OK(wsync_exporter_prepared(s->exporter, PATIENT_MS, &receipt, &err), err);
    CHECK_OK(wsync_exporter_commit(s->exporter, true, PATIENT_MS, &err), err);
    return worker;
}

TEST(a_hostile_worker_parks_nothing)
{
    const wsync_frame_t bad[] = {
        {.kind = SESSION_PARKED, .arguments = {2}},
        {.kind = SESSION_PARKED, .arguments = {1}, .fds = {0}, .fd_count = 1},
        {.kind = SESSION_DONE},
        {.kind = SESSION_PREPARED},
        {.kind = SESSION_COMMIT},
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        session_t s = open_session();
        wsync_channel_t *worker = parking_worker(&s);
        wsync_error_t err = {0};

        raw_send(worker, bad[i]);
        CHECK_EQ(wsync_exporter_park(s.exporter, PATIENT_MS, &err), WSYNC_ERR_PROTOCOL);
        CHECK_EQ(wsync_exporter_begin(s.exporter, 2, 0, SOON_MS, &err), WSYNC_ERR_STATE);
        wsync_channel_destroy(worker);
        close_session(&s);
    }
    for (uint64_t parked = 0; parked < 2; parked++) { /* says it twice */
        session_t s = open_session();
        wsync_channel_t *worker = parking_worker(&s);
        wsync_error_t err = {0};

        raw_send(worker, (wsync_frame_t){.kind = SESSION_PARKED,
                                         .arguments = {parked},
                                         .payload_nbytes = 3,
                                         .payload = "no\x1b"});
        raw_send(worker, (wsync_frame_t){.kind = SESSION_PARKED, .arguments = {1}});
        CHECK_EQ(wsync_exporter_park(s.exporter, PATIENT_MS, &err),
                 parked ? WSYNC_OK : WSYNC_ERR_REFUSED);
        CHECK(parked || strstr(err.message, "keeps the ring: no?") != NULL);
        CHECK_EQ(wsync_exporter_begin(s.exporter, 2, 0, PATIENT_MS, &err),
                 WSYNC_ERR_PROTOCOL);
        wsync_channel_destroy(worker);
        close_session(&s);
    }
}

TEST(hellos_that_are_no_workers_are_refused)
{
    for (int i = 0; i < 3; i++) {
        session_t s = open_session();
        wsync_channel_t *channel = NULL;
        wsync_frame_t hello = {.arguments = {3, 0, 0, SESSION_PURPOSE}, .fd_count = 1};
        wsync_error_t err = {0};
        uint8_t *blob = NULL;
        size_t nbytes = 0;

        hello.fds[0] = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK_EQ(write(hello.fds[0], "abc", 3), 3);
        hello.arguments[3] = i == 0 ? SESSION_PURPOSE : 1;
        hello.fd_count = i < 2;
        CHECK_OK(wsync_channel_connect(wsync_exporter_path(s.exporter),
                                       wsync_exporter_token(s.exporter), &hello, PATIENT_MS,
                                       &channel, &err),
                 err);
        CHECK_EQ(wsync_exporter_accept(s.exporter, PATIENT_MS, &blob, &nbytes, &err),
                 i == 0 ? WSYNC_ERR_REFUSED : WSYNC_ERR_PROTOCOL);
        CHECK(blob == NULL);
        (void)close(hello.fds[0]);
        wsync_channel_destroy(channel);
        close_session(&s);
    }
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
    CHECK_OK(wsync_listener_accept(t.listener, token, PATIENT_MS, &t.channel, &hello, NULL,
                                   &err),
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

TEST(attaches_of_a_hostile_trainer_are_refused)
{
    /* More than a GPU rounds up to. */
    enum { CASES = 9, BEYOND_NBYTES = 4 << 20 };

    for (int i = 0; i < CASES; i++) {
        raw_trainer_t t = open_trainer();
        wsync_frame_t frame = attach_frame(&t);
        wsync_status_t expected = WSYNC_ERR_PROTOCOL;
        const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        wsync_error_t err = {0};
        uint64_t update = 0;
        uint32_t count = 0;

        CHECK_EQ(ftruncate(loose, RING_NBYTES), 0);
        switch (i) {
        case 0:
            frame.fd_count = 2;
            break;
        case 1:
            frame.fd_count = 0;
            break;
        case 2:
            frame.arguments[0] = RING_NBYTES + BEYOND_NBYTES;
            expected = WSYNC_ERR_INVALID;
            break;
        case 3:
            frame.arguments[0] = UINT64_MAX;
            expected = WSYNC_ERR_INVALID;
            break;
        case 4:
            frame.arguments[1] = 4;
            break;
        case 5:
            frame.arguments[2] = 0;
            break;
        case 6:
            frame.fds[0] = loose;
            expected = WSYNC_ERR_REFUSED;
            break;
        case 7:
            frame.fds[1] = loose;
            expected = WSYNC_ERR_REFUSED;
            break;
        default:
            frame.fds[2] = frame.fds[0]; /* another size; on a GPU another kind of memory */
            expected = on_host() ? WSYNC_ERR_INVALID : WSYNC_ERR_REFUSED;
            break;
        }
        raw_send(t.channel, frame);
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err),
                 expected);
        CHECK_EQ(wsync_importer_generation(t.importer), 0);
        CHECK_EQ(wsync_importer_begin(t.importer, SOON_MS, &update, &count, &err),
                 WSYNC_ERR_STATE);
        (void)close(loose);
        close_trainer(&t);
    }
}

TEST(frames_of_a_hostile_trainer_are_refused)
{
    const wsync_frame_t early[] = {
        {.kind = SESSION_BEGIN}, {.kind = SESSION_ROUND}, {.kind = SESSION_COMMIT}};
    const wsync_frame_t late[] = {
        {.kind = SESSION_ROUND, .arguments = {1}},
        {.kind = SESSION_COMMIT},
        {.kind = SESSION_BEGIN, .arguments = {2, 1, 0}},
        {.kind = SESSION_ATTACH},
        {.kind = SESSION_DONE},
        {.kind = SESSION_ROUND, .fds = {0}, .fd_count = 1},
        {.kind = SESSION_LEND, .fds = {0}, .fd_count = 1},
        {.kind = SESSION_BIND, .fds = {0}, .fd_count = 1},
    };
    uint64_t update = 0;
    uint32_t count = 0;
    wsync_error_t err = {0};

    for (size_t i = 0; i < sizeof(early) / sizeof(early[0]); i++) {
        raw_trainer_t t = open_trainer();

        raw_send(t.channel, early[i]);
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err),
                 WSYNC_ERR_PROTOCOL);
        close_trainer(&t);
    }
    for (size_t i = 0; i < sizeof(late) / sizeof(late[0]); i++) {
        raw_trainer_t t = open_trainer();

        raw_send(t.channel, attach_frame(&t));
        raw_send(t.channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {1, 1, 0}});
        CHECK_OK(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err), err);
        raw_send(t.channel, late[i]);
        CHECK_EQ(wsync_importer_take(t.importer, 0, NULL, PATIENT_MS, &err),
                 WSYNC_ERR_PROTOCOL);
        close_trainer(&t);
    }
    for (uint64_t i = 0; i < 2; i++) { /* a wrong base, too many rounds */
        raw_trainer_t t = open_trainer();

        raw_send(t.channel, attach_frame(&t));
        raw_send(t.channel,
                 (wsync_frame_t){
                     .kind = SESSION_BEGIN,
                     .arguments = {1, i == 0 ? 1 : WSYNC_SESSION_MAX_ROUNDS + 1, 1 - i}});
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err),
                 WSYNC_ERR_PROTOCOL);
        close_trainer(&t);
    }
}

/* An importer whose ring is parked, or not, and the next BEGIN's frame. */
static wsync_frame_t park_importer(raw_trainer_t *t, uint64_t park)
{
    const wsync_receipt_t receipt = {0};
    uint64_t update = 0;
    uint32_t count = 0;
    wsync_error_t err = {0};

    raw_send(t->channel, attach_frame(t));
    raw_send(t->channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {1, 0, 0}});
    CHECK_OK(wsync_importer_begin(t->importer, PATIENT_MS, &update, &count, &err), err);
    CHECK_OK(wsync_importer_prepared(t->importer, &receipt, PATIENT_MS, &err), err);
    raw_send(t->channel, (wsync_frame_t){.kind = SESSION_COMMIT, .arguments = {park}});
    CHECK_EQ(wsync_importer_verdict(t->importer, PATIENT_MS, &err),
             park > 1 ? WSYNC_ERR_PROTOCOL : WSYNC_OK);
    return (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {2, 0, 0}};
}

TEST(descriptors_of_a_hostile_trainer_are_refused)
{
    enum { CASES = 6 };
    const wsync_status_t expected[CASES] = {WSYNC_ERR_PROTOCOL, WSYNC_ERR_PROTOCOL,
                                            WSYNC_ERR_PROTOCOL, WSYNC_ERR_REFUSED,
                                            WSYNC_OK,           WSYNC_ERR_STATE};

    for (int i = 0; i < CASES; i++) {
        raw_trainer_t t = open_trainer();
        wsync_frame_t frame = park_importer(&t, i == 0 ? 0 : i == CASES - 1 ? 2 : 1);
        const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        uint64_t update = 0;
        uint32_t count = 0;
        wsync_error_t err = {0};

        CHECK_EQ(ftruncate(loose, RING_NBYTES), 0);
        frame.fds[0] = i == 3 ? loose : t.ring->fd;
        frame.fds[1] = loose;
        frame.fd_count = i == 1 ? 0 : i == 2 ? 2 : 1; /* else with, where not parked */
        raw_send(t.channel, frame);
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &count, &err),
                 expected[i]);
        if (i == 4) {
            *(char *)reach(t.ring->data) = 5;
            CHECK_EQ(*(char *)reach(wsync_importer_ring(t.importer)->data), 5);
        }
        (void)close(loose);
        close_trainer(&t);
    }
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

/* What comes before an update is refused: `says` is in the text.  The session has ended,
 * nothing is bound, and `segments` are mapped, until it is destroyed. */
static void check_lending_ends(raw_trainer_t *t, wsync_status_t expected, const char *says,
                               size_t segments)
{
    uint64_t generation = 1;
    uint64_t update = 0;
    uint32_t rounds = 0;
    size_t count = 1;
    wsync_error_t err = {0};

    raw_send(t->channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {1, 1, 0}});
    CHECK_EQ(wsync_importer_begin(t->importer, PATIENT_MS, &update, &rounds, &err),
             expected);
    CHECK_HAS(err.message, says);
    CHECK(wsync_importer_bound(t->importer, &count, &generation) == NULL);
    CHECK_EQ(count, 0);
    CHECK_EQ(generation, 0);
    (void)wsync_importer_segments(t->importer, &count);
    CHECK_EQ(count, segments);
    CHECK_EQ(wsync_importer_begin(t->importer, SOON_MS, &update, &rounds, &err),
             WSYNC_ERR_STATE);
}

TEST(segments_that_are_none_are_refused)
{
    enum { CASES = 8 };

    for (int i = 0; i < CASES; i++) {
        raw_trainer_t t = open_trainer();
        const int fd = shared_file(i == 5 ? 0 : LENT_NBYTES);
        const int no_memory = open("/dev/null", O_RDONLY | O_CLOEXEC);
        const wsync_frame_t bare = {.kind = SESSION_LEND};
        const wsync_frame_t many = {.kind = SESSION_LEND,
                                    .arguments = {0, WSYNC_LENT_MAX_SEGMENTS - 1},
                                    .fds = {fd, fd},
                                    .fd_count = 2};

        raw_send(t.channel, attach_frame(&t));
        switch (i) {
        case 0:
            raw_send(t.channel, bare);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "trainer (pid ", 0);
            break;
        case 1:
            raw_send(t.channel, many);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "has 2 descriptors and 65535 more",
                               0);
            break;
        case 2:
            raw_lend(&t, 1, fd);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL,
                               "segment 1 is lent, where 0 is the next", 0);
            break;
        case 3:
            raw_lend(&t, 0, fd);
            raw_lend(&t, 0, fd);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL,
                               "segment 0 is lent, where 1 is the next", 1);
            break;
        case 4:
            raw_lend(&t, UINT64_MAX, fd);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "segment 18446744073709551615", 0);
            break;
        case 5:
            raw_lend(&t, 0, fd);
            check_lending_ends(&t, WSYNC_ERR_REFUSED, "holds nothing", 0);
            break;
        case 6:
            raw_lend(&t, 0, no_memory);
            check_lending_ends(&t, WSYNC_ERR_REFUSED, "is not of shared memory", 0);
            break;
        default:
            raw_lend(&t, 0, t.ring->fd);
            raw_lend(&t, 2, fd);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL,
                               "segment 2 is lent, where 1 is the next", 1);
            break;
        }
        (void)close(fd);
        (void)close(no_memory);
        close_trainer(&t);
    }
}

TEST(bindings_to_what_is_not_lent_are_refused)
{
    static const struct {
        wsync_binding_t bindings[2];
        uint64_t nbytes; /* as it is said */
        const char *says;
    } cases[] = {
        {{{1, 0, 1}, {0, 0, 1}}, 48, "buffer 0: 1 bytes at 0 of segment 1, which has 0"},
        {{{0, 0, 1}, {0, 4096, 1}}, 48, "buffer 1: 1 bytes at 4096 of segment 0"},
        {{{0, 0, 4097}, {0, 0, 1}}, 48, "buffer 0: 4097 bytes at 0 of segment 0"},
        {{{0, UINT64_MAX, 2}, {0, 0, 1}}, 48, "buffer 0: 2 bytes at 18446744073709551615"},
        {{{0, 2, UINT64_MAX}, {0, 0, 1}}, 48, "buffer 0: 18446744073709551615 bytes at 2"},
        {{{UINT64_MAX - 1, 0, 0}, {0, 0, 1}}, 48, "of segment 18446744073709551614"},
        {{{0, 0, 1}, {0, 0, 1}}, 24, "has 48 bytes and is said to have 24"},
        {{{0, 0, 1}, {0, 0, 1}}, 72, "has 48 bytes and is said to have 72"},
        {{{0, 0, 1}, {0, 0, 1}}, UINT64_MAX, "said to have 18446744073709551615"},
    };
    const wsync_binding_t odd[2] = {{0, 0, 1}, {0, 0, 1}};
    const int fd = shared_file(LENT_NBYTES);
    const size_t count = sizeof(cases) / sizeof(cases[0]);
    wsync_error_t err = {0};

    for (size_t i = 0; i < count + 4; i++) {
        raw_trainer_t t = open_trainer();
        wsync_frame_t frame = {.kind = SESSION_BIND, .arguments = {48}, .fd_count = 1};

        raw_send(t.channel, attach_frame(&t));
        if (i < count) {
            raw_lend(&t, 0, fd);
            raw_bind(&t, cases[i].bindings, 2, cases[i].nbytes);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, cases[i].says, 1);
        } else if (i == count) { /* before anything is lent */
            raw_bind(&t, odd, 2, 48);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "of segment 0, which has 0", 0);
        } else if (i == count + 1) { /* no whole number of bindings */
            CHECK_OK(wsync_blob_create((const uint8_t *)odd, 47, &frame.fds[0], &err), err);
            frame.arguments[0] = 47;
            raw_send(t.channel, frame);
            wsync_frame_fini(&frame);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "47 bytes of bindings, of 24 each",
                               0);
        } else if (i == count + 2) { /* of bytes that the trainer can still change */
            frame.fds[0] = fd;
            frame.arguments[0] = LENT_NBYTES;
            raw_send(t.channel, frame);
            check_lending_ends(&t, WSYNC_ERR_REFUSED, "has seals 0x", 0);
        } else {
            frame.fd_count = 0;
            raw_send(t.channel, frame);
            check_lending_ends(&t, WSYNC_ERR_PROTOCOL, "trainer (pid ", 0);
        }
        close_trainer(&t);
    }
    (void)close(fd);
}

/* What an earlier update has read stays as it was when the next one is refused. */
TEST(what_has_changed_since_an_update_is_refused)
{
    const wsync_receipt_t receipt = {0};
    const wsync_binding_t first[2] = {{0, 0, 8}, {WSYNC_UNBOUND, 0, 0}};
    const wsync_binding_t again[2] = {{1, 0, 8}, {0, 0, 8}};
    static const struct {
        wsync_status_t status;
        const char *says;
    } expected[] = {
        {WSYNC_ERR_PROTOCOL, "of segment 1, which has 0"},
        {WSYNC_ERR_PROTOCOL, "segment 1 is lent, where 2 is the next"},
        {WSYNC_ERR_REFUSED, "shrunk from 4096 bytes to 8"},
    };
    uint64_t update = 0;
    uint64_t generation = 0;
    uint32_t rounds = 0;
    size_t count = 0;
    wsync_error_t err = {0};

    for (int i = 0; i < 3; i++) {
        raw_trainer_t t = open_trainer();
        const int fd = shared_file(LENT_NBYTES);
        const wsync_span_t *bound;

        raw_send(t.channel, attach_frame(&t));
        raw_lend(&t, 0, fd);
        raw_lend(&t, 1, fd);
        raw_bind(&t, first, 2, sizeof(first));
        raw_send(t.channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {1, 0, 0}});
        CHECK_OK(wsync_importer_begin(t.importer, PATIENT_MS, &update, &rounds, &err), err);
        bound = wsync_importer_bound(t.importer, &count, &generation);
        CHECK(bound != NULL && count == 2 && bound[0].nbytes == 8 && bound[1].nbytes == 0);
        (void)wsync_importer_segments(t.importer, &count);
        CHECK_EQ(count, 1);
        CHECK_OK(wsync_importer_prepared(t.importer, &receipt, PATIENT_MS, &err), err);
        raw_send(t.channel, (wsync_frame_t){.kind = SESSION_COMMIT});
        CHECK_OK(wsync_importer_verdict(t.importer, PATIENT_MS, &err), err);
        switch (i) {
        case 0: /* it was let go of */
            raw_bind(&t, again, 2, sizeof(again));
            break;
        case 1: /* numbers are not given twice */
            raw_lend(&t, 1, fd);
            break;
        default:
            CHECK_EQ(ftruncate(fd, 8), 0);
            break;
        }
        raw_send(t.channel, (wsync_frame_t){.kind = SESSION_BEGIN, .arguments = {2, 0, 0}});
        CHECK_EQ(wsync_importer_begin(t.importer, PATIENT_MS, &update, &rounds, &err),
                 expected[i].status);
        CHECK_HAS(err.message, expected[i].says);
        CHECK(wsync_importer_bound(t.importer, &count, &generation) == bound);
        (void)close(fd);
        close_trainer(&t);
    }
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
