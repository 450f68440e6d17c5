/* SPDX-License-Identifier: Apache-2.0
 * Pinned and pageable sources of GPU streams, on tests/fakecuda: their bytes, and when they
 * are read. */
#include <pthread.h>
#include <unistd.h>

#include "cuda_rig.h"

TEST(every_kind_of_source_gives_the_bytes_of_the_host)
{
    enum { KINDS = 6 };
    const rig_t rig = make_rig(KINDS * SHAPES_NBYTES);
    wsync_memory_t *memory = NULL;
    wsync_span_t sources[KINDS];
    wsync_copy_t copies[KINDS * SHAPES];

    for (uint32_t i = 0; i < KINDS; i++) {
        sources[i] = new_source(NBYTES, i);
    }
    free(sources[0].data);
    memory = make_buffer(rig.base, NBYTES);
    sources[0].data = memory->data;
    fill(reach(sources[0].data), NBYTES, 0);
    pin(&rig, sources[1].data, NBYTES);
    /* 2 is pageable; 3 is pinned in part, 4 in two parts, 5 within a larger range. */
    pin(&rig, sources[3].data, NBYTES / 2);
    pin(&rig, sources[4].data, NBYTES / 2);
    pin(&rig, (char *)sources[4].data + NBYTES / 2, NBYTES / 2);
    pin(&rig, sources[5].data, NBYTES);
    sources[5] = (wsync_span_t){(char *)sources[5].data + 4096, NBYTES - 4096};
    for (size_t k = 0; k < KINDS; k++) {
        check_copies(&rig, shapes, SHAPES, &sources[k], 1);
    }
    for (uint32_t i = 0; i < KINDS * SHAPES; i++) { /* of all kinds, in turns */
        copies[i] = shapes[i / KINDS];
        copies[i].source_buffer = i % KINDS;
        copies[i].destination_offset += (uint64_t)(i % KINDS) * SHAPES_NBYTES;
    }
    check_copies(&rig, copies, KINDS * SHAPES, sources, KINDS);
    unpin(&rig, (char *)sources[5].data - 4096);
    unpin(&rig, (char *)sources[4].data + NBYTES / 2);
    unpin(&rig, sources[4].data);
    unpin(&rig, sources[3].data);
    unpin(&rig, sources[1].data);
    wsync_memory_destroy(memory);
    end_rig(&rig);
    free((char *)sources[5].data - 4096);
    for (int i = 1; i < 5; i++) {
        free(sources[i].data);
    }
}

/* Of each dimension that can be cut. */
TEST(copies_larger_than_the_slot_are_cut)
{
    static const wsync_copy_t large[] = {
        {.row_count = LARGE + SLOT / 2 + 3,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1},
        {.row_count = SLOT / 2,
         .source_item_nbytes = 4,
         .destination_item_nbytes = 2,
         .transform = WSYNC_TRANSFORM_F32_TO_BF16},
        {.row_count = SLOT - 5,
         .source_item_nbytes = 2,
         .destination_item_nbytes = 4,
         .transform = WSYNC_TRANSFORM_BF16_TO_F32},
        {.row_count = 1000,
         .source_item_nbytes = 2,
         .destination_item_nbytes = 2,
         .ndim = 3,
         .extent = {2, 3, 2200},
         .source_stride = {15000000, 5000000, 2048},
         .destination_stride = {13200000, 4400000, 2000}},
        {.row_count = 1,
         .source_item_nbytes = 2,
         .destination_item_nbytes = 2,
         .ndim = 2,
         .extent = {3000, 1600},
         .source_stride = {2, 6000},
         .destination_stride = {3200, 2}},
        {.row_count = SLOT + SLOT / 2,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1,
         .ndim = 2,
         .extent = {1, 2},
         .source_stride = {1, SLOT + SLOT / 2 + 1},
         .destination_stride = {1, SLOT + SLOT / 2}},
        {.row_count = 1000,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1,
         .ndim = 2,
         .extent = {4000, 5},
         .source_stride = {0, 1500},
         .destination_stride = {5000, 1000}},
    };
    const rig_t rig = make_rig(LARGE + SLOT);
    const wsync_span_t source = new_source(LARGE + SLOT, 3);

    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        check_copies(&rig, &large[i], 1, &source, 1);
    }
    end_rig(&rig);
    free(source.data);
}

/* The slot may end between small copies, too. */
TEST(many_small_copies_fill_the_slot_again_and_again)
{
    enum { COUNT = 30000, MOST = 600 };
    const rig_t rig = make_rig(COUNT * MOST);
    const wsync_span_t source = new_source(COUNT * (MOST + 1), 5);
    wsync_copy_t *copies = calloc(COUNT, sizeof(*copies));

    CHECK(copies != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        copies[i] = (wsync_copy_t){.source_offset = i * (MOST + 1),
                                   .destination_offset = (COUNT - 1 - i) * MOST,
                                   .row_count = 1 + i % MOST,
                                   .source_item_nbytes = 1,
                                   .destination_item_nbytes = 1};
    }
    for (size_t i = 0; i < 2; i++) {
        check_copies(&rig, copies, COUNT - i * 1000, &source, 1);
    }
    end_rig(&rig);
    free(copies);
    free(source.data);
}

/* The host fills the slot much faster than this device empties it. */
TEST(a_slow_device_is_not_overtaken)
{
    enum { MUCH = 4 * SLOT };
    static const wsync_copy_t copy = {
        .row_count = MUCH, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    wsync_span_t source;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_DELAY_US", "40000");
    rig = make_rig(MUCH);
    source = new_source(MUCH, 11);
    check_copies(&rig, &copy, 1, &source, 1);
    end_rig(&rig);
    free(source.data);
}

/* --- order ------------------------------------------------------------------------------
 */

enum { WHOLE = 3 * SLOT };

static const wsync_copy_t whole = {
    .row_count = WHOLE, .source_item_nbytes = 1, .destination_item_nbytes = 1};

typedef struct opening {
    wsync_stream_t *stream;
    wsync_event_t ready;
    wsync_span_t source;
} opening_t;

static void *open_later(void *argument)
{
    const opening_t *opening = argument;
    wsync_error_t err = {0};

    (void)usleep(20 * 1000);
    fill(opening->source.data, opening->source.nbytes, 7);
    CHECK_OK(wsync_stream_record(opening->stream, opening->ready, 1, &err), err);
    return NULL;
}

TEST(sources_are_read_when_the_stream_comes_to_them)
{
    const rig_t rig = make_rig(WHOLE);
    opening_t opening = {.ready = {rig.control, 0}, .source = new_source(WHOLE, 6)};
    pthread_t thread;
    wsync_error_t err = {0};

    opening.stream = make_stream(rig.base);
    CHECK_OK(wsync_stream_wait(rig.stream, opening.ready, 1, &err), err);
    CHECK_EQ(pthread_create(&thread, NULL, open_later, &opening), 0);
    enqueue(&rig, &whole, 1, &opening.source, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    synchronize(&rig);
    check_target(&rig, &whole, 1, &opening.source);
    wsync_stream_destroy(opening.stream);
    end_rig(&rig);
    free(opening.source.data);
}

static void *abandon_later(void *stream)
{
    (void)usleep(20 * 1000);
    CHECK(wsync_stream_abandon(stream, PATIENT_MS));
    return NULL;
}

TEST(who_waits_for_the_stream_hears_that_it_was_abandoned)
{
    const rig_t rig = make_rig(WHOLE);
    const wsync_span_t source = new_source(WHOLE, 6);
    pthread_t thread;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_wait(rig.stream, (wsync_event_t){rig.control, 0}, 1, &err), err);
    CHECK_EQ(pthread_create(&thread, NULL, abandon_later, rig.stream), 0);
    CHECK_EQ(
        wsync_stream_copy_list(rig.stream, &whole, 1, &source, 1, &rig.target, 1, &err),
        WSYNC_ERR_STATE);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    check_copies(&rig, &whole, 1, &source, 1);
    end_rig(&rig);
    free(source.data);
}
