/* SPDX-License-Identifier: Apache-2.0
 * What streams ask of the driver for sources that are not device memory, what they refuse,
 * and each of those calls failing. */
#include "cuda_rig.h"

/* --- what is asked of the driver --------------------------------------------------------
 */

/* One of the rows is long enough for a copy engine. */
TEST(a_round_from_pinned_memory_is_one_wait_one_launch_one_run_one_record)
{
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const rig_t rig = make_rig(NBYTES);
    const wsync_span_t source = new_source(NBYTES, 11);
    const wsync_event_t ready = {rig.control, 0};
    const wsync_event_t done = {rig.control, 8};
    wsync_stream_t *other = NULL;
    wsync_error_t err = {0};

    pin(&rig, source.data, NBYTES);
    CHECK_OK(wsync_stream_create(rig.base, 1, &other, &err), err);
    for (uint64_t round = 1; round <= 3; round++) {
        const off_t before = lseek(fd, 0, SEEK_END);

        CHECK_OK(wsync_stream_wait(rig.stream, ready, round, &err), err);
        enqueue(&rig, shapes, SHAPES, &source, 1);
        CHECK_OK(wsync_stream_record(rig.stream, done, round, &err), err);
        read_calls(fd, before, text);
        if (round > 1) {
            CHECK_STR(text,
                      "cuStreamWaitValue64 cuLaunchKernel cuMemcpyAsync "
                      "cuStreamWriteValue64 ");
        }
        CHECK_OK(wsync_stream_record(other, ready, round, &err), err);
        CHECK_OK(wsync_event_wait(done, round, PATIENT_MS, &err), err);
    }
    wsync_stream_destroy(other);
    end_rig(&rig);
    unpin(&rig, source.data);
    free(source.data);
}

/* Takes a word out of a text. */
static const char *without(char *text, const char *word)
{
    for (char *at = strstr(text, word); at != NULL; at = strstr(at, word)) {
        memmove(at, at + strlen(word), strlen(at + strlen(word)) + 1);
    }
    return text;
}

/* The device is waited for, and launched once for each filling of the slot. */
TEST(a_second_update_from_pageable_memory_makes_nothing_new)
{
    static const wsync_copy_t rows = {.row_count = 1000,
                                      .source_item_nbytes = 1,
                                      .destination_item_nbytes = 1,
                                      .ndim = 1,
                                      .extent = {12000},
                                      .source_stride = {1001},
                                      .destination_stride = {1000}};
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const rig_t rig = make_rig(12000000);
    const wsync_span_t source = new_source(12012000, 12);
    off_t before;

    for (int i = 0; i < 4; i++) {
        check_copies(&rig, &rows, 1, &source, 1);
    }
    before = lseek(fd, 0, SEEK_END);
    enqueue(&rig, &rows, 1, &source, 1);
    read_calls(fd, before, text);
    CHECK_STR(without(text, "cuStreamQuery "),
              "cuPointerGetAttributes cuPointerGetAttributes cuMemGetAddressRange "
              "cuLaunchKernel cuLaunchKernel ");
    end_rig(&rig);
    free(source.data);
}

/* The same addresses, first pinned and then not: a launch that read them would be an error
 * that takes the whole context with it. */
TEST(memory_that_became_other_memory_is_noticed)
{
    const rig_t rig = make_rig(NBYTES);
    const wsync_span_t source = new_source(NBYTES, 13);

    for (uint32_t i = 0; i < 3; i++) {
        pin(&rig, source.data, NBYTES);
        fill(source.data, NBYTES, 2 * i);
        check_copies(&rig, shapes, SHAPES, &source, 1);
        unpin(&rig, source.data);
        fill(source.data, NBYTES, 2 * i + 1);
        check_copies(&rig, shapes, SHAPES, &source, 1);
    }
    end_rig(&rig);
    free(source.data);
}

/* An allocator that pauses gives the memory back and keeps the addresses, after the stream
 * has read from them as well as before. */
TEST(memory_that_is_gone_from_its_address_is_an_error)
{
    const wsync_copy_t run = {
        .row_count = NBYTES, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    rig_t rig;
    wsync_memory_t *paused;
    wsync_span_t source;
    char place[64];
    wsync_error_t err = {0};

    choose_fake("WSYNC_FAKE_CUDA_RESERVED", "1");
    rig = make_rig(NBYTES);
    paused = make_buffer(rig.base, NBYTES);
    source = span_of(paused);
    (void)snprintf(place, sizeof(place), "%d bytes at %#zx", NBYTES,
                   (size_t)(uintptr_t)source.data);
    for (int i = 0; i < 2; i++) {
        fill(reach(source.data), NBYTES, 19);
        check_copies(&rig, &run, 1, &source, 1);
        CHECK_OK(wsync_memory_park(paused, &err), err);
        CHECK_EQ(
            wsync_stream_copy_list(rig.stream, &run, 1, &source, 1, &rig.target, 1, &err),
            WSYNC_ERR_STATE);
        CHECK_HAS(err.message, place);
        CHECK_HAS(err.message, "no memory of the GPU lies at");
        CHECK_EQ(
            wsync_stream_copy_list(rig.stream, &run, 1, &rig.target, 1, &source, 1, &err),
            WSYNC_ERR_STATE);
        CHECK_OK(wsync_memory_unpark(paused, -1, &err), err);
    }
    wsync_memory_destroy(paused);
    end_rig(&rig);
}

/* The device could read it, but its pages would move there and have no room. */
TEST(pages_that_would_move_to_the_device_are_read_by_the_host)
{
    const wsync_copy_t run = {
        .row_count = 1000, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const wsync_span_t source = new_source(NBYTES, 20);
    rig_t rig;
    off_t before;

    choose_fake("WSYNC_FAKE_CUDA_PAGEABLE", "2");
    rig = make_rig(NBYTES);
    CHECK(!rig.device->pageable);
    before = lseek(fd, 0, SEEK_END);
    check_copies(&rig, &run, 1, &source, 1);
    read_calls(fd, before, text);
    CHECK_HAS(text, "cuMemHostRegister");
    end_rig(&rig);
    free(source.data);
}

/* As where an allocator has given one piece of an expandable segment back. */
TEST(a_hole_between_mappings_is_no_memory)
{
    enum { PIECE = 2 << 20 };
    const rig_t rig = make_rig(3 * PIECE);
    const wsync_cuda_driver_t *cu = enter_device(0);
    const wsync_cu_location_t where = {WSYNC_CU_LOCATION_DEVICE, 0};
    const wsync_cu_property_t property = {.type = WSYNC_CU_ALLOCATION_PINNED,
                                          .location = where};
    const wsync_cu_access_t access = {where, WSYNC_CU_ACCESS_READ_WRITE};
    const wsync_copy_t copy = {
        .row_count = 3 * PIECE, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    wsync_cu_handle_t handle = 0;
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};

    CU(cu->mem_reserve(&at, 3 * PIECE, 0, 0, 0));
    CU(cu->mem_create(&handle, PIECE, &property, 0));
    CU(cu->mem_map(at, PIECE, 0, handle, 0));
    CU(cu->mem_map(at + 2 * PIECE, PIECE, 0, handle, 0));
    CU(cu->mem_release(handle));
    CU(cu->mem_set_access(at, PIECE, &access, 1));
    CU(cu->mem_set_access(at + 2 * PIECE, PIECE, &access, 1));
    for (int known = 0; known < 2; known++) {
        const wsync_span_t span = {(void *)(uintptr_t)at, PIECE};
        const wsync_copy_t first = {
            .row_count = PIECE, .source_item_nbytes = 1, .destination_item_nbytes = 1};

        CHECK_EQ(wsync_stream_copy_list(rig.stream, &copy, 1,
                                        &(wsync_span_t){span.data, 3 * PIECE}, 1,
                                        &rig.target, 1, &err),
                 WSYNC_ERR_STATE);
        CHECK_HAS(err.message, "no memory of the GPU lies");
        enqueue(&rig, &first, 1, &span, 1); /* for the other time */
    }
    synchronize(&rig);
    CU(cu->mem_unmap(at, PIECE));
    CU(cu->mem_unmap(at + 2 * PIECE, PIECE));
    CU(cu->mem_unreserve(at, 3 * PIECE));
    end_rig(&rig);
}

/* A device that reaches all memory takes what malloc gave, on both sides, as it is. */
TEST(a_coherent_device_uses_host_memory_as_its_own)
{
    const wsync_copy_t runs[2] = {
        {.row_count = NBYTES, .source_item_nbytes = 1, .destination_item_nbytes = 1},
        {.source_offset = 1,
         .row_count = 500,
         .source_item_nbytes = 1,
         .destination_offset = NBYTES,
         .destination_item_nbytes = 1},
    };
    char text[CALLS_NBYTES];
    const int fd = open_log();
    rig_t rig;
    wsync_memory_t *memory;
    const wsync_span_t source = new_source(NBYTES, 17);

    choose_fake("WSYNC_FAKE_CUDA_PAGEABLE", "1");
    rig = make_rig(2 * NBYTES);
    CHECK(rig.device->pageable);
    memory = rig.memory;
    rig.target = new_source(2 * NBYTES, 18);
    for (size_t count = 1; count <= 2; count++) {
        const off_t before = lseek(fd, 0, SEEK_END);

        check_copies(&rig, runs, count, &source, 1);
        read_calls(fd, before, text);
        CHECK_HAS(text, "cuLaunchKernel");
        CHECK(strstr(text, "cuLaunchHostFunc") == NULL && strstr(text, "refused") == NULL);
    }
    free(rig.target.data);
    rig.memory = memory;
    end_rig(&rig);
    free(source.data);
}
