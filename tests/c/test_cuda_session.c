/* SPDX-License-Identifier: Apache-2.0
 * A whole update through GPU memory, on tests/fakecuda, with every driver call of both
 * sides failing in turn. */
#include "cuda_fixture.h"
#include "device_fixture.h"
#include "ipc/session.h"

enum { RING_NBYTES = 1 << 16, SLOT = 4096, SLOTS = 2, ROUNDS = 5 };

/* Of every wait of an update. */
static int patience_ms = PATIENT_MS;

typedef struct update {
    const wsync_device_t *device;
    wsync_memory_t *weights; /* kept from attempt to attempt */
    wsync_memory_t *parameters;
    wsync_exporter_t *exporter;
    wsync_importer_t *importer;
    wsync_memory_t *ring;
    wsync_stream_t *packing;
    wsync_stream_t *loading;
} update_t;

static wsync_copy_t slot_copy(uint32_t from, uint32_t to)
{
    return (wsync_copy_t){.source_offset = (uint64_t)from * SLOT,
                          .destination_offset = (uint64_t)to * SLOT,
                          .row_count = SLOT,
                          .source_item_nbytes = 1,
                          .destination_item_nbytes = 1};
}

static wsync_span_t span_of(wsync_memory_t *memory)
{
    return (wsync_span_t){memory->data, memory->nbytes};
}

static wsync_status_t open_both(update_t *u, wsync_error_t *err)
{
    uint8_t *blob = NULL;
    size_t nbytes = 0;
    wsync_status_t status = wsync_exporter_create(NULL, &u->exporter, err);

    if (status == WSYNC_OK) {
        status = wsync_memory_create(u->device, RING_NBYTES, &u->ring, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(u->device, 1, &u->packing, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(u->device, 1, &u->loading, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_create(
            u->device, wsync_exporter_path(u->exporter), wsync_exporter_token(u->exporter),
            (const uint8_t *)"layout", 6, patience_ms, &u->importer, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_accept(u->exporter, patience_ms, &blob, &nbytes, err);
        free(blob);
    }
    return status;
}

static wsync_status_t begin_both(update_t *u, uint64_t number, wsync_error_t *err)
{
    uint64_t update = 0;
    uint32_t count = 0;
    wsync_status_t status = number > 1 ? WSYNC_OK
                                       : wsync_exporter_attach(u->exporter, u->ring,
                                                               (const uint8_t *)"manifest",
                                                               8, patience_ms, err);

    if (status == WSYNC_OK) {
        status = wsync_exporter_begin(u->exporter, number, ROUNDS, patience_ms, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_begin(u->importer, patience_ms, &update, &count, err);
    }
    return status;
}

static wsync_status_t run_round(update_t *u, uint32_t round, wsync_error_t *err)
{
    /* Borrowed by the streams until they have run dry, which is before these change. */
    static wsync_copy_t packs[ROUNDS];
    static wsync_copy_t loads[ROUNDS];
    const wsync_span_t weights = span_of(u->weights);
    const wsync_span_t parameters = span_of(u->parameters);
    const wsync_span_t sent = span_of(u->ring);
    wsync_span_t taken;
    wsync_status_t status =
        wsync_exporter_acquire(u->exporter, round < SLOTS ? -1 : (int64_t)round - SLOTS,
                               u->packing, patience_ms, err);

    packs[round] = slot_copy(round, round % SLOTS);
    loads[round] = slot_copy(round % SLOTS, round);
    if (status == WSYNC_OK) {
        status = wsync_stream_copy_list(u->packing, &packs[round], 1, &weights, 1, &sent, 1,
                                        err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_post(u->exporter, round, u->packing, patience_ms, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_take(u->importer, round, u->loading, patience_ms, err);
    }
    if (status == WSYNC_OK) {
        taken = span_of(wsync_importer_ring(u->importer));
        status = wsync_stream_copy_list(u->loading, &loads[round], 1, &taken, 1,
                                        &parameters, 1, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_done(u->importer, round, u->loading, patience_ms, err);
    }
    return status;
}

static wsync_status_t commit_both(update_t *u, wsync_error_t *err)
{
    const wsync_receipt_t receipt = {1, ROUNDS * SLOT, 0};
    wsync_receipt_t received = {0};
    wsync_status_t status =
        wsync_importer_prepared(u->importer, &receipt, patience_ms, err);

    if (status == WSYNC_OK) {
        status = wsync_exporter_prepared(u->exporter, patience_ms, &received, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_commit(u->exporter, true, patience_ms, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_importer_verdict(u->importer, patience_ms, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_exporter_park(u->exporter, patience_ms, err);
        /* The driver's fault, but not the update's. */
        status = status == WSYNC_ERR_REFUSED ? WSYNC_OK : status;
    }
    return status;
}

static void close_both(update_t *u)
{
    if (u->packing != NULL) {
        (void)wsync_stream_abandon(u->packing, PATIENT_MS);
    }
    if (u->loading != NULL) {
        (void)wsync_stream_abandon(u->loading, PATIENT_MS);
    }
    wsync_importer_destroy(u->importer);
    wsync_exporter_destroy(u->exporter);
    wsync_stream_destroy(u->packing);
    wsync_stream_destroy(u->loading);
    wsync_memory_destroy(u->ring);
    u->importer = NULL;
    u->exporter = NULL;
    u->packing = NULL;
    u->loading = NULL;
    u->ring = NULL;
}

static wsync_status_t run_update(update_t *u, uint64_t number, wsync_error_t *err)
{
    wsync_status_t status;

    memset(bytes_of(u->parameters), 0, ROUNDS * SLOT);
    status = begin_both(u, number, err);
    for (uint32_t round = 0; status == WSYNC_OK && round < ROUNDS; round++) {
        status = run_round(u, round, err);
    }
    if (status == WSYNC_OK) {
        status = commit_both(u, err);
    }
    /* The words have said so already, but through two mappings of one page, which no
     * sanitizer knows to be one. */
    if (status == WSYNC_OK) {
        status = wsync_stream_synchronize(u->loading, patience_ms, err);
    }
    /* What was committed is there. */
    CHECK(status != WSYNC_OK || memcmp(bytes_of(u->parameters), bytes_of(u->weights),
                                       (size_t)ROUNDS * SLOT) == 0);
    return status;
}

/* Two updates; the ring is parked after each. */
static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    update_t *u = context;
    wsync_status_t status = open_both(u, err);

    for (uint64_t number = 1; status == WSYNC_OK && number <= 2; number++) {
        status = run_update(u, number, err);
    }
    close_both(u);
    return status;
}

static void make_weights(update_t *u)
{
    unsigned char *data;
    wsync_error_t err = {0};

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_DELAY_US", "20", 1), 0);
    u->device = test_device();
    CHECK_OK(wsync_memory_create(u->device, ROUNDS * SLOT, &u->weights, &err), err);
    CHECK_OK(wsync_memory_create(u->device, ROUNDS * SLOT, &u->parameters, &err), err);
    data = bytes_of(u->weights);
    for (size_t i = 0; i < ROUNDS * SLOT; i++) {
        data[i] = (unsigned char)(i * 7 >> 3);
    }
}

TEST(an_update_survives_no_failing_call_and_leaves_nothing)
{
    update_t u = {0};

    make_weights(&u);
    CHECK(fail_in_turn(attempt, &u, WSYNC_CU_LAUNCH_FAILED, 0) > 40);
    wsync_memory_destroy(u.weights);
    wsync_memory_destroy(u.parameters);
}

/* Without memory operations of streams the host waits, and its functions set words. */
TEST(an_update_without_words_of_streams_survives_no_failing_call)
{
    update_t u = {0};

    choose_fake("WSYNC_FAKE_CUDA_LACKS", "122");
    make_weights(&u);
    CHECK(!wsync_cuda_of(u.device)->words);
    CHECK(fail_in_turn(attempt, &u, WSYNC_CU_LAUNCH_FAILED, 0) > 40);
    wsync_memory_destroy(u.weights);
    wsync_memory_destroy(u.parameters);
}

/* An update in a process of its own, whose GPU is lost at a call; says which. */
static void lose_main(int socket)
{
    update_t u = {0};
    wsync_error_t err = {0};
    wsync_status_t status;
    long k;
    char found = 'o';

    hear(socket, &k, sizeof(k));
    (void)alarm(60);
    /* Nobody waits in the driver for what the device was to write. */
    patience_ms = 500;
    make_weights(&u);
    fake_lose("*", k, WSYNC_CU_LAUNCH_FAILED);
    status = attempt(&u, &err);
    if (fake_failed() == NULL) {
        CHECK_OK(status, err);
        found = 'n';
    } else if (status != WSYNC_OK) {
        CHECK(status == WSYNC_ERR_TIMEOUT || err.native == WSYNC_CU_LAUNCH_FAILED);
        found = 'r';
    }
    wsync_memory_destroy(u.weights);
    wsync_memory_destroy(u.parameters);
    say(socket, &found, 1);
}

TEST(a_gpu_that_is_lost_is_an_error_and_holds_nobody_up)
{
    char found = 'r';
    long reported = 0;

    for (long k = 0; found != 'n'; k += 3) {
        const peer_t peer = peer_start(lose_main);

        say(peer.socket, &k, sizeof(k));
        hear(peer.socket, &found, 1);
        peer_end(peer);
        reported += found == 'r';
    }
    CHECK(reported > 40);
}

TEST(a_ring_on_another_device_than_the_worker_s_is_refused)
{
    const wsync_device_t *host = wsync_device_host();
    wsync_memory_t *ring = NULL;
    update_t u = {0};
    wsync_error_t err = {0};

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    u.device = test_device();
    CHECK_OK(open_both(&u, &err), err);
    CHECK(memcmp(wsync_exporter_worker_uuid(u.exporter), u.device->uuid,
                 WSYNC_DEVICE_UUID_NBYTES) == 0);
    CHECK_OK(wsync_memory_create(host, RING_NBYTES, &ring, &err), err);
    CHECK_EQ(wsync_exporter_attach(u.exporter, ring, NULL, 0, PATIENT_MS, &err),
             WSYNC_ERR_INVALID);
    CHECK_HAS(err.message, "a ring on the host, but the worker is on the GPU with a UUID");
    /* Nothing was sent: the right ring can still be attached. */
    CHECK_OK(begin_both(&u, 1, &err), err);
    close_both(&u);
    wsync_memory_destroy(ring);
}
