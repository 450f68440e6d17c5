/* SPDX-License-Identifier: Apache-2.0
 * Every allocation of the CUDA backend fails in turn, on tests/fakecuda. */
#include "device/cuda_ipc.h"
#include "device/cuda_lend.h"
#include "device_fixture.h"
#include "oom.h"

enum { NBYTES = 4096, PATIENT_MS = 60000 };

static wsync_status_t attempt(void *context, wsync_error_t *err)
{
    static const wsync_copy_t copy = {
        .row_count = 64, .source_item_nbytes = 1, .destination_item_nbytes = 1};
    const wsync_device_t *base = context;
    wsync_memory_t *memory = NULL;
    wsync_memory_t *import = NULL;
    wsync_memory_t *control = NULL;
    wsync_memory_t *peer = NULL;
    wsync_stream_t *stream = NULL;
    wsync_error_t ignored = {0};
    wsync_status_t status = wsync_memory_create(base, NBYTES, &memory, err);

    if (status == WSYNC_OK) {
        status = wsync_memory_import(base, memory->fd, NBYTES, &import, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_control_create(base, NBYTES, &control, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_control_import(base, control->fd, NBYTES, &peer, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_create(base, 1, &stream, err);
    }
    if (status == WSYNC_OK) {
        const wsync_span_t source = {memory->data, NBYTES};
        const wsync_span_t destination = {(char *)import->data + 64, 64};

        memset(reach(source.data), 7, 64);
        memset(reach(destination.data), 0, 64);
        status = wsync_stream_copy_list(stream, &copy, 1, &source, 1, &destination, 1, err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        CHECK_EQ(*(char *)reach(destination.data), status == WSYNC_OK ? 7 : 0);
    }
    if (status == WSYNC_OK) {
        status = wsync_stream_record(stream, (wsync_event_t){control, 8}, 1, err);
    }
    wsync_stream_destroy(stream);
    if (status == WSYNC_OK) {
        status = wsync_memory_park(memory, err);
    }
    if (status == WSYNC_OK) {
        status = wsync_memory_unpark(memory, -1, err);
    }
    CHECK(peer == NULL || status != WSYNC_OK ||
          wsync_event_query((wsync_event_t){peer, 8}) == 1);
    wsync_memory_destroy(memory);
    wsync_memory_destroy(import);
    wsync_memory_destroy(control);
    wsync_memory_destroy(peer);
    return status;
}

/* Only what makes something: no other process is there to open it. */
static wsync_status_t attempt_ipc(void *context, wsync_error_t *err)
{
    wsync_cuda_ipc_t *memory = NULL;
    const wsync_status_t status = wsync_cuda_ipc_create(context, NBYTES, &memory, err);

    CHECK((memory == NULL) == (status != WSYNC_OK));
    wsync_cuda_ipc_destroy(memory);
    return status;
}

TEST(allocations)
{
    const wsync_device_t *base;

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    base = test_device();
    CHECK(oom_run(attempt, (void *)(uintptr_t)base) >= 12);
}

/* Memory of the host that the device does not reach, through the ring, and some that it
 * does; what failed has let go of it. */
static wsync_status_t feed(void *context, wsync_error_t *err)
{
    static const wsync_copy_t copies[2] = {
        {.source_buffer = 1,
         .row_count = 64,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1},
        {.destination_offset = 64,
         .row_count = NBYTES - 64,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1},
    };
    static char pageable[NBYTES];
    const wsync_device_t *base = context;
    wsync_memory_t *memory = NULL;
    wsync_stream_t *stream = NULL;
    wsync_error_t ignored = {0};
    wsync_status_t status = wsync_memory_create(base, 2 * NBYTES, &memory, err);

    if (status == WSYNC_OK) {
        status = wsync_stream_create(base, 1, &stream, err);
    }
    if (status == WSYNC_OK) {
        char *data = memory->data;
        const wsync_span_t sources[2] = {{pageable, NBYTES}, {data + NBYTES, NBYTES}};
        const wsync_span_t destination = {data, NBYTES};

        memset(pageable, 7, NBYTES);
        memset(reach(data + NBYTES), 7, NBYTES);
        status =
            wsync_stream_copy_list(stream, copies, 2, sources, 2, &destination, 1, err);
        if (status != WSYNC_OK) {
            memset(pageable, 8, NBYTES);
        }
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        data = reach(data);
        CHECK(status != WSYNC_OK || (data[0] == 7 && data[NBYTES - 1] == 7));
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
    return status;
}

TEST(allocations_of_copies_from_pageable_memory)
{
    const wsync_device_t *base;

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    base = test_device();
    CHECK(oom_run(feed, (void *)(uintptr_t)base) >= 20);
}

/* Long runs of pinned memory, which go to copy engines, beside a short one. */
typedef struct pinned {
    const wsync_device_t *base;
    char *data;
} pinned_t;

enum { PINNED_NBYTES = 3 * 64 * 1024 };

static wsync_status_t run_pinned(void *context, wsync_error_t *err)
{
    static const wsync_copy_t copies[2] = {
        {.row_count = 64, .source_item_nbytes = 1, .destination_item_nbytes = 1},
        {.source_offset = 64,
         .destination_offset = 64,
         .row_count = PINNED_NBYTES / 2 - 64,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1,
         .ndim = 1,
         .extent = {2},
         .source_stride = {PINNED_NBYTES / 2 - 64},
         .destination_stride = {PINNED_NBYTES / 2 - 64}},
    };
    const pinned_t *pinned = context;
    const wsync_span_t source = {pinned->data, PINNED_NBYTES};
    wsync_memory_t *memory = NULL;
    wsync_stream_t *stream = NULL;
    wsync_error_t ignored = {0};
    wsync_status_t status = wsync_memory_create(pinned->base, PINNED_NBYTES, &memory, err);

    if (status == WSYNC_OK) {
        status = wsync_stream_create(pinned->base, 1, &stream, err);
    }
    if (status == WSYNC_OK) {
        const wsync_span_t destination = {memory->data, PINNED_NBYTES};
        const char *bytes = reach(memory->data);

        memset(pinned->data, 7, PINNED_NBYTES);
        status =
            wsync_stream_copy_list(stream, copies, 2, &source, 1, &destination, 1, err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        CHECK_EQ(bytes[0], status == WSYNC_OK ? 7 : 0);
        CHECK_EQ(bytes[PINNED_NBYTES - 128], status == WSYNC_OK ? 7 : 0);
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
    return status;
}

TEST(allocations_of_copies_from_pinned_memory)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};
    pinned_t pinned;

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    pinned = (pinned_t){test_device(), malloc(PINNED_NBYTES)};
    CHECK(pinned.data != NULL);
    device = wsync_cuda_of(pinned.base);
    CHECK_OK(wsync_cuda_enter(device, &err), err);
    CHECK_OK(wsync_cuda_register(device, pinned.data, PINNED_NBYTES, "a test", &at, &err),
             err);
    CHECK(oom_run(run_pinned, &pinned) >= 16);
    wsync_cuda_unregister(device, pinned.data);
    wsync_cuda_leave(device);
    free(pinned.data);
}

static wsync_status_t quantise(void *context, wsync_error_t *err)
{
    static const wsync_quantise_piece_t piece = {
        .method = {WSYNC_QUANTISE_MXFP8, false, 1, 32},
        .dtype = WSYNC_DTYPE_FLOAT32,
        .source_stride = {128, 4},
        .extent = {1, 32},
        .scales = 32,
        .amaxes = WSYNC_QUANTISE_NONE,
        .overall = WSYNC_QUANTISE_NONE,
        .second = WSYNC_QUANTISE_NONE,
    };
    const wsync_device_t *base = context;
    wsync_memory_t *memory = NULL;
    wsync_stream_t *stream = NULL;
    wsync_error_t ignored = {0};
    wsync_status_t status = wsync_memory_create(base, NBYTES, &memory, err);

    if (status == WSYNC_OK) {
        status = wsync_stream_create(base, 1, &stream, err);
    }
    if (status == WSYNC_OK) {
        unsigned char *data = memory->data;
        const wsync_span_t source = {data, 128};
        const wsync_quantise_batch_t batch = {
            .pieces = &piece,
            .count = 1,
            .sources = &source,
            .source_count = 1,
            .image = {data + 128, 64},
            .pass = WSYNC_QUANTISE_CODES,
        };

        memset(reach(data), 0, 128);
        memset(reach(data + 128), 7, 64);
        status = wsync_stream_quantise(stream, &batch, err);
        CHECK_OK(wsync_stream_synchronize(stream, PATIENT_MS, &ignored), ignored);
        CHECK_EQ(*(char *)reach(data + 128), status == WSYNC_OK ? 0 : 7);
    }
    wsync_stream_destroy(stream);
    wsync_memory_destroy(memory);
    return status;
}

TEST(allocations_of_what_is_quantised)
{
    const wsync_device_t *base;

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    base = test_device();
    CHECK(oom_run(quantise, (void *)(uintptr_t)base) >= 12);
}

TEST(records_of_shared_memory)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(setenv("WSYNC_CUDA_LIB", FAKECUDA_PATH, 1), 0);
    CHECK_OK(wsync_cuda_device(0, &device, &err), err);
    CHECK(oom_run(attempt_ipc, (void *)(uintptr_t)device) >= 1);
}

/* Memory is found, lent, held by a process that lends it on, and borrowed. */
static wsync_status_t attempt_lending(void *context, wsync_error_t *err)
{
    const wsync_memory_t *memory = context;
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->device);
    const wsync_span_t span = {memory->data, memory->nbytes};
    wsync_cuda_allocation_t *items = NULL;
    wsync_memory_t *made[3] = {NULL, NULL, NULL};
    size_t count = 0;
    wsync_error_t ignored = {0};
    wsync_status_t status;

    CHECK_OK(wsync_cuda_enter(device, &ignored), ignored);
    status = wsync_cuda_find_allocations(device, &span, 1, &items, &count, err);
    wsync_cuda_leave(device);
    if (status == WSYNC_OK) {
        status = wsync_cuda_lend(device, items, count, &made[0], err);
    }
    for (int i = 1; i < 3 && status == WSYNC_OK; i++) {
        const int fds[] = {made[i - 1]->fd, made[i - 1]->more[0]};

        CHECK_EQ(made[i - 1]->more_count, 1);
        status = wsync_memory_borrow(i == 1 ? wsync_device_host() : memory->device, fds, 2,
                                     &made[i], err);
    }
    for (int i = 0; i < 3; i++) {
        wsync_memory_destroy(made[i]);
    }
    free(items);
    return status;
}

TEST(records_of_lent_memory)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    CHECK_OK(wsync_memory_create(test_device(), NBYTES, &memory, &err), err);
    CHECK(oom_run(attempt_lending, memory) >= 8);
    wsync_memory_destroy(memory);
}
