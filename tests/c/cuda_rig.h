/* SPDX-License-Identifier: Apache-2.0
 * GPU streams on tests/fakecuda: what they are made of, and what they are given. */
#ifndef WSYNC_TESTS_CUDA_RIG_H
#define WSYNC_TESTS_CUDA_RIG_H

#include "cuda_fixture.h"
#include "device/cuda_pageable_feed.h"
#include "device/host_copy.h"
#include "device_fixture.h"

enum {
    NBYTES = 1 << 20,
    SLOT = WSYNC_CUDA_FEED_SLOT_NBYTES,
    LARGE = 8 * SLOT,
};

static inline const wsync_device_t *gpu(void)
{
    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    return test_device();
}

static inline wsync_memory_t *make_buffer(const wsync_device_t *base, uint64_t nbytes)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(base, nbytes, &memory, &err), err);
    return memory;
}

static inline wsync_memory_t *make_control(const wsync_device_t *base)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_control_create(base, 4096, &memory, &err), err);
    return memory;
}

static inline wsync_stream_t *make_stream(const wsync_device_t *base)
{
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_create(base, 2, &stream, &err), err);
    return stream;
}

static inline wsync_span_t span_of(wsync_memory_t *memory)
{
    return (wsync_span_t){memory->data, memory->nbytes};
}

/* A GPU, a stream of it, and memory on it that copies write to. */
typedef struct rig {
    const wsync_device_t *base;
    const wsync_cuda_device_t *device;
    wsync_stream_t *stream;
    wsync_memory_t *control;
    wsync_memory_t *memory;
    wsync_span_t target;
} rig_t;

static inline rig_t make_rig(uint64_t nbytes)
{
    rig_t rig = {0};
    wsync_error_t err = {0};

    rig.base = gpu();
    CHECK_OK(wsync_cuda_device(0, &rig.device, &err), err);
    rig.stream = make_stream(rig.base);
    rig.control = make_control(rig.base);
    rig.memory = make_buffer(rig.base, nbytes);
    rig.target = span_of(rig.memory);
    return rig;
}

static inline void end_rig(const rig_t *rig)
{
    wsync_stream_destroy(rig->stream);
    wsync_memory_destroy(rig->control);
    wsync_memory_destroy(rig->memory);
}

static inline void pin(const rig_t *rig, void *data, size_t nbytes)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_enter(rig->device, &err), err);
    CU(rig->device->driver->host_register(
        data, nbytes, WSYNC_CU_HOST_PORTABLE | WSYNC_CU_HOST_DEVICE_MAP));
    wsync_cuda_leave(rig->device);
}

static inline void unpin(const rig_t *rig, void *data)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_cuda_enter(rig->device, &err), err);
    CU(rig->device->driver->host_unregister(data));
    wsync_cuda_leave(rig->device);
}

/* Finite numbers, whatever they are read as. */
static inline void fill(void *data, uint64_t nbytes, uint32_t seed)
{
    for (uint64_t i = 0; i < nbytes; i++) {
        seed = seed * 1664525 + 1013904223;
        ((unsigned char *)data)[i] = (unsigned char)((seed >> 24) & 0x3f);
    }
}

static inline wsync_span_t new_source(uint64_t nbytes, uint32_t seed)
{
    void *data = malloc(nbytes);

    CHECK(data != NULL);
    fill(data, nbytes, seed);
    return (wsync_span_t){data, nbytes};
}

static inline void enqueue(const rig_t *rig, const wsync_copy_t *copies, size_t count,
                           const wsync_span_t *sources, size_t source_count)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_copy_list(rig->stream, copies, count, sources, source_count,
                                    &rig->target, 1, &err),
             err);
}

static inline void synchronize(const rig_t *rig)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_stream_synchronize(rig->stream, PATIENT_MS, &err), err);
}

/* Whether the target holds what the processor makes of the same copies. */
static inline void check_target(const rig_t *rig, const wsync_copy_t *copies, size_t count,
                                const wsync_span_t *sources)
{
    const wsync_span_t wanted = {calloc(1, rig->target.nbytes), rig->target.nbytes};

    CHECK(wanted.data != NULL);
    for (size_t i = 0; i < count; i++) {
        const wsync_span_t *span = &sources[copies[i].source_buffer];
        const wsync_span_t source = {reach(span->data), span->nbytes};
        wsync_copy_t copy = copies[i];

        copy.source_buffer = 0;
        wsync_host_copy_run(&copy, 1, &source, &wanted);
    }
    CHECK(memcmp(reach(rig->target.data), wanted.data, wanted.nbytes) == 0);
    free(wanted.data);
}

static inline void check_copies(const rig_t *rig, const wsync_copy_t *copies, size_t count,
                                const wsync_span_t *sources, size_t source_count)
{
    memset(reach(rig->target.data), 0, rig->target.nbytes);
    enqueue(rig, copies, count, sources, source_count);
    synchronize(rig);
    check_target(rig, copies, count, sources);
}

/* What a plan is made of: one long row, a transposed tensor of rows and one of elements,
 * one element repeated, casts both ways, a row at odd addresses, what is computed with each
 * kind of cast; of one MiB, side by side. */
static const wsync_copy_t shapes[] = {
    {.row_count = 100003, .source_item_nbytes = 1, .destination_item_nbytes = 1},
    {.source_offset = 200000,
     .destination_offset = 110000,
     .row_count = 192,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1,
     .ndim = 2,
     .extent = {10, 50},
     .source_stride = {9600, 192},
     .destination_stride = {400, 4000}},
    {.source_offset = 500000,
     .destination_offset = 310000,
     .row_count = 1,
     .source_item_nbytes = 2,
     .destination_item_nbytes = 2,
     .ndim = 2,
     .extent = {64, 48},
     .source_stride = {2, 128},
     .destination_stride = {96, 2}},
    {.source_offset = 600001,
     .destination_offset = 320003,
     .row_count = 1,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1,
     .ndim = 1,
     .extent = {4099},
     .source_stride = {0},
     .destination_stride = {1}},
    {.source_offset = 700000,
     .destination_offset = 330000,
     .row_count = 1000,
     .source_item_nbytes = 4,
     .destination_item_nbytes = 2,
     .transform = WSYNC_TRANSFORM_F32_TO_BF16},
    {.source_offset = 800002,
     .destination_offset = 340000 + 29 * 400, /* the last one first */
     .row_count = 100,
     .source_item_nbytes = 2,
     .destination_item_nbytes = 4,
     .transform = WSYNC_TRANSFORM_BF16_TO_F32,
     .ndim = 1,
     .extent = {30},
     .source_stride = {200},
     .destination_stride = {-400}},
    {.source_offset = 900001,
     .destination_offset = 352003,
     .row_count = 4099,
     .source_item_nbytes = 1,
     .destination_item_nbytes = 1},
    {.source_offset = 910000,
     .destination_offset = 356400,
     .row_count = 300,
     .source_item_nbytes = 4,
     .destination_item_nbytes = 2,
     .transform = WSYNC_TRANSFORM_F32_TO_F16,
     .affine = {1, 1}},
    {.source_offset = 920000,
     .destination_offset = 357000,
     .row_count = 300,
     .source_item_nbytes = 2,
     .destination_item_nbytes = 2,
     .transform = WSYNC_TRANSFORM_BF16,
     .affine = {-3, 0.5F}},
    {.source_offset = 930000,
     .destination_offset = 357600,
     .row_count = 300,
     .source_item_nbytes = 2,
     .destination_item_nbytes = 4,
     .transform = WSYNC_TRANSFORM_BF16_TO_F32,
     .affine = {2, 7}},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]), SHAPES_NBYTES = 360000 };

#endif
