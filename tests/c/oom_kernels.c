/* SPDX-License-Identifier: Apache-2.0
 * The kernels' tables with the k-th allocation failing. */
#include "device/cuda_compile.h"
#include "device/kernel_quantise.h"
#include "device/kernel_segments.h"
#include "oom.h"

enum { COPIES = 100 };

static wsync_status_t append_attempt(void *context, wsync_error_t *err)
{
    const wsync_copy_t *copies = context;
    wsync_segments_t segments = {0};
    wsync_segment_list_t list = {.first = 77};
    wsync_status_t status = wsync_segments_append(&segments, copies, COPIES, &list, err);

    if (status != WSYNC_OK) {
        CHECK_EQ(list.first, 77);
        CHECK_EQ(segments.count, 0);
    }
    wsync_segments_fini(&segments);
    return status;
}

TEST(tables_survive_failing_allocations)
{
    wsync_copy_t copies[COPIES];

    for (int i = 0; i < COPIES; i++) {
        copies[i] = (wsync_copy_t){
            .row_count = 10, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    }
    CHECK(oom_run(append_attempt, copies) >= 4);
}

static wsync_status_t tasks_attempt(void *context, wsync_error_t *err)
{
    wsync_quantise_tasks_t tasks = {.count = 77};
    wsync_status_t status = wsync_quantise_tasks_init(&tasks, context, 1, err);

    CHECK_EQ(tasks.count, status == WSYNC_OK ? 1 : 0);
    wsync_quantise_tasks_fini(&tasks);
    return status;
}

TEST(tasks_survive_failing_allocations)
{
    wsync_quantise_piece_t piece = {
        .method = {WSYNC_QUANTISE_MXFP8, false, 1, 32},
        .dtype = WSYNC_DTYPE_BFLOAT16,
        .source_stride = {64, 2},
        .extent = {4, 32},
        .amaxes = WSYNC_QUANTISE_NONE,
        .overall = WSYNC_QUANTISE_NONE,
        .second = WSYNC_QUANTISE_NONE,
    };

    CHECK(oom_run(tasks_attempt, &piece) >= 2);
}

static wsync_status_t compile_attempt(void *context, wsync_error_t *err)
{
    wsync_kernel_image_t image = {.nbytes = 77};
    wsync_status_t status = wsync_cuda_compile(context, &image, err);

    if (status == WSYNC_OK) {
        wsync_kernel_image_fini(&image);
    }
    CHECK_EQ(image.nbytes, status == WSYNC_OK ? 0 : 77);
    return status;
}

TEST(compiling_survives_failing_allocations)
{
    static const char *const libraries[] = {WSYNC_FAKE_NVRTC};
    wsync_compile_spec_t spec = {
        .libraries = libraries, .library_count = 1, .capability = 90};

    CHECK(oom_run(compile_attempt, &spec) >= 1);
}
