/* SPDX-License-Identifier: Apache-2.0
 * Pinned and pageable sources of GPU streams, on tests/fakecuda: their bytes, and when they
 * are read. */
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

/* Copies that no slot holds, of each dimension that can be cut, and of all slots together.
 */
TEST(copies_larger_than_the_ring_are_cut)
{
    static const wsync_copy_t large[] = {
        {.row_count = RING + SLOT / 2 + 3,
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
    const rig_t rig = make_rig(RING + SLOT);
    const wsync_span_t source = new_source(RING + SLOT, 3);

    for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
        check_copies(&rig, &large[i], 1, &source, 1);
    }
    end_rig(&rig);
    free(source.data);
}

/* Slots end between small copies, too; and a batch goes on where the last one ended. */
TEST(many_small_copies_fill_slot_after_slot)
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

enum { CROWD = WSYNC_CUDA_FEED_MAX_SLOTS / WSYNC_CUDA_FEED_SLOTS };

/* Streams that have all the slots a process may have, so that later rings are small. */
static void make_crowd(const rig_t *rig, wsync_stream_t *crowd[CROWD])
{
    static const wsync_copy_t byte = {
        .row_count = 1, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    char pageable = 1;
    const wsync_span_t source = {&pageable, 1};
    wsync_error_t err = {0};

    for (unsigned i = 0; i < CROWD; i++) {
        CHECK_EQ(wsync_cuda_pageable_feed_slots(), i * WSYNC_CUDA_FEED_SLOTS);
        CHECK_OK(wsync_stream_create(rig->base, 1, &crowd[i], &err), err);
        CHECK_OK(
            wsync_stream_copy_list(crowd[i], &byte, 1, &source, 1, &rig->target, 1, &err),
            err);
        CHECK_OK(wsync_stream_synchronize(crowd[i], PATIENT_MS, &err), err);
    }
}

static void end_crowd(wsync_stream_t *crowd[CROWD])
{
    for (unsigned i = 0; i < CROWD; i++) {
        wsync_stream_destroy(crowd[i]);
    }
}

/* The host fills slots much faster than this device empties them. */
TEST(a_slow_device_is_not_overtaken)
{
    enum { MUCH = LEAST_RING + 2 * SLOT };
    static const wsync_copy_t copy = {
        .row_count = MUCH, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    wsync_stream_t *crowd[CROWD];
    wsync_span_t source;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_DELAY_US", "40000");
    rig = make_rig(MUCH);
    make_crowd(&rig, crowd);
    source = new_source(MUCH, 11);
    check_copies(&rig, &copy, 1, &source, 1);
    end_crowd(crowd);
    end_rig(&rig);
    free(source.data);
}

/* Then the caller waits for each slot. */
TEST(a_device_without_words_for_streams_is_fed)
{
    static const wsync_copy_t copy = {
        .row_count = RING + SLOT, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    const wsync_span_t source = new_source(RING + SLOT, 13);
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_LACKS", "122");
    rig = make_rig(RING + SLOT);
    check_copies(&rig, &copy, 1, &source, 1);
    end_rig(&rig);
    free(source.data);
}

/* --- order ------------------------------------------------------------------------------
 */

enum { WHOLE = LEAST_RING + SLOT };

static const wsync_copy_t whole = {
    .row_count = WHOLE, .source_item_nbytes = 1, .destination_item_nbytes = 1};

TEST(sources_are_read_when_the_stream_comes_to_them)
{
    const rig_t rig = make_rig(WHOLE);
    const wsync_span_t source = new_source(WHOLE, 6);
    wsync_stream_t *crowd[CROWD];
    const wsync_event_t ready = {rig.control, 0};
    const wsync_event_t done = {rig.control, 8};
    wsync_stream_t *other = NULL;
    wsync_error_t err = {0};

    make_crowd(&rig, crowd);
    CHECK_OK(wsync_stream_create(rig.base, 1, &other, &err), err);
    CHECK_OK(wsync_stream_wait(rig.stream, ready, 1, &err), err);
    enqueue(&rig, &whole, 1, &source, 1);
    CHECK_OK(wsync_stream_record(rig.stream, done, 1, &err), err);
    CHECK_EQ(wsync_stream_synchronize(rig.stream, 20, &err), WSYNC_ERR_TIMEOUT);
    fill(source.data, source.nbytes, 7);
    CHECK_OK(wsync_stream_record(other, ready, 1, &err), err);
    CHECK_OK(wsync_event_wait(done, 1, PATIENT_MS, &err), err);
    check_target(&rig, &whole, 1, &source);
    wsync_stream_destroy(other);
    end_crowd(crowd);
    end_rig(&rig);
    free(source.data);
}
