/* SPDX-License-Identifier: Apache-2.0
 * Runs of bytes between pinned memory of the host and a GPU, which copy engines move, on
 * tests/fakecuda. */
#include "cuda_rig.h"

enum {
    LEAST = 64 * 1024, /* of a run for a copy engine */
    ROWS = 6,
    TINY = 3 * LEAST + 17,
    ROWS_AT = 4 * LEAST,
    SHORT_AT = ROWS_AT + ROWS * (LEAST + 3),
    EXTENT = SHORT_AT + LEAST,
};

/* A run at odd addresses, one of a byte, long rows apart from each other and in other
 * order, one that is a byte too short, one that is cast. */
static const wsync_copy_t mixed[] = {
    {.source_offset = 1,
     .destination_offset = 3,
     .row_count = 3 * LEAST + 1,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1},
    {.source_offset = 5,
     .destination_offset = TINY,
     .row_count = 1,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1},
    {.source_offset = 7,
     .destination_offset = ROWS_AT + (ROWS - 1) * (LEAST + 3),
     .row_count = LEAST / 2 + 1,
     .source_item_nbytes = 2,
     .destination_item_nbytes = 2,
     .ndim = 2,
     .extent = {2, ROWS / 2},
     .source_stride = {LEAST + 40, 2 * (LEAST + 40)},
     .destination_stride = {-(LEAST + 3) * ROWS / 2, -(LEAST + 3)}},
    {.destination_offset = SHORT_AT,
     .row_count = LEAST - 1,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1},
    {.source_offset = 1024,
     .destination_offset = TINY + 3,
     .row_count = LEAST / 4 - 16,
     .source_item_nbytes = 4,
     .destination_item_nbytes = 2,
     .transform = WSYNC_TRANSFORM_F32_TO_BF16},
};
enum { MIXED = sizeof(mixed) / sizeof(mixed[0]), RUNS = 1 + ROWS };

TEST(long_runs_from_pinned_memory_are_one_batch)
{
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const rig_t rig = make_rig(EXTENT);
    const wsync_span_t source = new_source(EXTENT, 1);
    off_t before;

    pin(&rig, source.data, EXTENT);
    check_copies(&rig, mixed, MIXED, &source, 1);
    before = lseek(fd, 0, SEEK_END);
    enqueue(&rig, mixed, MIXED, &source, 1);
    read_calls(fd, before, text);
    CHECK_STR(text,
              "cuPointerGetAttributes cuPointerGetAttributes cuPointerGetAttributes "
              "cuMemGetAddressRange cuLaunchKernel cuMemcpyBatchAsync ");
    synchronize(&rig);
    check_target(&rig, mixed, MIXED, &source);
    end_rig(&rig);
    unpin(&rig, source.data);
    free(source.data);
}

TEST(a_driver_without_batches_is_given_runs_one_by_one)
{
    char text[CALLS_NBYTES];
    const int fd = open_log();
    const wsync_span_t source = new_source(EXTENT, 2);
    const char *call = text;
    int count = 0;
    off_t before;
    rig_t rig;

    choose_fake("WSYNC_FAKE_CUDA_VERSION", "12040");
    rig = make_rig(EXTENT);
    pin(&rig, source.data, EXTENT);
    before = lseek(fd, 0, SEEK_END);
    check_copies(&rig, mixed, MIXED, &source, 1);
    read_calls(fd, before, text);
    while ((call = strstr(call, "cuMemcpyAsync ")) != NULL) {
        call++;
        count++;
    }
    CHECK_EQ(count, RUNS);
    end_rig(&rig);
    unpin(&rig, source.data);
    free(source.data);
}

/* The ring of an engine without wsync, say. */
TEST(long_runs_to_pinned_memory_are_one_batch)
{
    rig_t rig = make_rig(EXTENT);
    wsync_memory_t *memory = rig.memory;
    wsync_memory_t *device = make_buffer(rig.base, EXTENT);
    const wsync_span_t source = span_of(device);

    fill(reach(source.data), EXTENT, 3);
    rig.target = new_source(EXTENT, 4);
    pin(&rig, rig.target.data, EXTENT);
    check_copies(&rig, mixed, MIXED, &source, 1);
    unpin(&rig, rig.target.data);
    free(rig.target.data);
    rig.memory = memory;
    wsync_memory_destroy(device);
    end_rig(&rig);
}

/* A list with sources of all kinds: by a kernel, by copy engines and by the feed. */
TEST(one_list_may_read_all_kinds_of_memory)
{
    enum { KINDS = 3 };
    const rig_t rig = make_rig(KINDS * EXTENT);
    wsync_memory_t *device = make_buffer(rig.base, EXTENT);
    const wsync_span_t sources[KINDS] = {new_source(EXTENT, 5), span_of(device),
                                         new_source(EXTENT, 7)};
    wsync_copy_t copies[KINDS * MIXED];

    fill(reach(sources[1].data), EXTENT, 6);
    pin(&rig, sources[0].data, EXTENT);
    for (uint32_t i = 0; i < KINDS * MIXED; i++) {
        copies[i] = mixed[i / KINDS];
        copies[i].source_buffer = i % KINDS;
        copies[i].destination_offset += (uint64_t)(i % KINDS) * EXTENT;
    }
    for (size_t i = 0; i < 3; i++) {
        check_copies(&rig, copies + i, KINDS * MIXED - i, sources, KINDS);
    }
    unpin(&rig, sources[0].data);
    wsync_memory_destroy(device);
    end_rig(&rig);
    free(sources[0].data);
    free(sources[2].data);
}

/* What lies ahead of a stream that waits must not fill its queue: that would keep whoever
 * has to end the wait. */
TEST(after_many_runs_the_host_waits)
{
    const rig_t rig = make_rig(EXTENT);
    const wsync_span_t source = new_source(EXTENT, 8);
    const wsync_copy_t many = {.row_count = LEAST,
                               .source_item_nbytes = 1,
                               .destination_item_nbytes = 1,
                               .ndim = 1,
                               .extent = {9},
                               .source_stride = {1},
                               .destination_stride = {LEAST}};

    pin(&rig, source.data, EXTENT);
    check_copies(&rig, mixed, MIXED, &source, 1);
    CHECK_EQ(wsync_stream_ahead(rig.stream), 0); /* tables were uploaded */
    check_copies(&rig, mixed, MIXED, &source, 1);
    CHECK_EQ(wsync_stream_ahead(rig.stream), WSYNC_STREAM_AHEAD);
    enqueue(&rig, &many, 1, &source, 1);
    CHECK_EQ(wsync_stream_ahead(rig.stream), 0);
    synchronize(&rig);
    check_copies(&rig, mixed, MIXED, &source, 1);
    CHECK_EQ(wsync_stream_ahead(rig.stream), WSYNC_STREAM_AHEAD);
    unpin(&rig, source.data);
    end_rig(&rig);
    free(source.data);
}
