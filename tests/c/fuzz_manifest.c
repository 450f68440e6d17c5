/* SPDX-License-Identifier: Apache-2.0
 * A manifest from any bytes, up to the copies that an engine makes of it: into tensors of
 * the same names and shapes, and into a worker's fused parameter.  Copies that pass the
 * checks stay inside ring and tensors, and fill every byte of these. */
#include <stdlib.h>
#include <string.h>

#include "core/copy.h"
#include "core/layout/encoding.h"
#include "core/route.h"
#include "device/host_copy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes);

enum {
    RING_NBYTES = 1024,
    MAX_ROUNDS = 64,
    MAX_BUFFERS = 16,
    MAX_NBYTES = 1 << 16, /* of all tensors that are filled */
    IN_RING = 0x55,
    BEFORE = 0xaa,
};

typedef struct target {
    wsync_layout_builder_t *builder;
    wsync_span_t spans[MAX_BUFFERS];
    size_t count;
    uint64_t nbytes;
} target_t;

static void must(bool held)
{
    if (!held) {
        __builtin_trap();
    }
}

/* Adds one box of a tensor, at `offset` of the last buffer, in row-major order. */
static void add_box(target_t *target, const wsync_tensor_t *tensor, wsync_box_t box,
                    uint64_t offset)
{
    wsync_shard_t shard = {
        .buffer = (uint32_t)target->count - 1, .offset = offset, .box = box};
    int64_t step = (int64_t)wsync_dtype_nbytes(tensor->dtype);
    wsync_error_t err;

    for (uint32_t i = tensor->ndim; i-- > 0;) {
        shard.stride[i] = step;
        step *= box.extent[i];
    }
    must(wsync_layout_builder_tensor(target->builder, tensor, &shard.tensor, &err) ==
         WSYNC_OK);
    must(wsync_layout_builder_origin(target->builder, "", &shard.origin, &err) == WSYNC_OK);
    must(wsync_layout_builder_shard(target->builder, &shard, &err) == WSYNC_OK);
}

static void add_buffer(target_t *target, uint64_t nbytes)
{
    wsync_span_t *span = &target->spans[target->count++];

    span->data = malloc(nbytes);
    span->nbytes = nbytes;
    must(span->data != NULL);
    memset(span->data, BEFORE, nbytes);
    target->nbytes += nbytes;
}

/* Bytes of a tensor, or MAX_NBYTES + 1 where that is less. */
static uint64_t tensor_nbytes(const wsync_tensor_t *tensor)
{
    uint64_t nbytes = wsync_dtype_nbytes(tensor->dtype);

    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) {
            return 0;
        }
        if ((uint64_t)tensor->shape[i] > MAX_NBYTES || nbytes > MAX_NBYTES) {
            nbytes = MAX_NBYTES + 1;
        } else {
            nbytes *= (uint64_t)tensor->shape[i];
        }
    }
    return nbytes > MAX_NBYTES ? MAX_NBYTES + 1 : nbytes;
}

/* A module that has just the tensors that the manifest speaks of. */
static bool mirror(const wsync_layout_t *manifest, target_t *target)
{
    for (size_t i = 0; i < wsync_layout_tensor_count(manifest); i++) {
        const wsync_tensor_t *tensor = wsync_layout_tensor(manifest, i);
        const uint64_t nbytes = tensor_nbytes(tensor);

        if (nbytes == 0) {
            continue;
        }
        if (target->count == MAX_BUFFERS || target->nbytes + nbytes > MAX_NBYTES) {
            return false;
        }
        add_buffer(target, nbytes);
        add_box(target, tensor, wsync_box_whole(tensor->ndim, tensor->shape), 0);
    }
    return true;
}

/* One tensor-parallel rank's rows of q and k, fused; the corpus has manifests for it. */
static bool fuse(target_t *target)
{
    static const wsync_tensor_t q = {
        .name = "q", .dtype = WSYNC_DTYPE_FLOAT32, .ndim = 2, .shape = {8, 4}};
    static const wsync_tensor_t k = {
        .name = "k", .dtype = WSYNC_DTYPE_FLOAT32, .ndim = 2, .shape = {4, 4}};
    wsync_box_t rows = wsync_box_whole(2, q.shape);

    add_buffer(target, 96);
    rows.start[0] = 4;
    rows.extent[0] = 4;
    add_box(target, &q, rows, 0);
    rows.start[0] = 2;
    rows.extent[0] = 2;
    add_box(target, &k, rows, 64);
    return true;
}

/* Runs all rounds; false if one was refused. */
static bool run(const wsync_route_t *route, const target_t *target)
{
    const uint32_t rounds = wsync_route_buffer_count(route);
    wsync_span_t sources[MAX_ROUNDS];
    uint8_t *ring = malloc(RING_NBYTES);
    bool ran = rounds <= MAX_ROUNDS; /* a receiver refuses what was not announced */
    wsync_error_t err;

    must(ring != NULL);
    memset(ring, IN_RING, RING_NBYTES);
    for (uint32_t round = 0; round < rounds && ran; round++) {
        sources[round] = (wsync_span_t){ring, RING_NBYTES};
    }
    for (uint32_t round = 0; round < rounds && ran; round++) {
        size_t count = 0;
        const wsync_copy_t *copies = wsync_route_copies(route, round, &count);

        ran = wsync_copies_check(copies, count, sources, rounds, target->spans,
                                 target->count, &err) == WSYNC_OK;
        if (ran) {
            wsync_host_copy_run(copies, count, sources, target->spans);
        }
    }
    free(ring);
    return ran;
}

/* Whether something else than the ring's bytes is written. */
static bool computes(const wsync_layout_t *manifest)
{
    for (size_t i = 0; i < wsync_layout_tensor_count(manifest); i++) {
        size_t count;
        const wsync_shard_t *shards = wsync_layout_shards(manifest, i, &count);

        for (size_t j = 0; j < count; j++) {
            if (shards[j].affine.scale != 0) {
                return true;
            }
        }
    }
    return false;
}

static void check_filled(const target_t *target)
{
    for (size_t i = 0; i < target->count; i++) {
        const uint8_t *bytes = target->spans[i].data;

        for (uint64_t j = 0; j < target->spans[i].nbytes; j++) {
            must(bytes[j] == IN_RING);
        }
    }
}

static void deliver(const wsync_layout_t *manifest, bool mirrored)
{
    target_t target = {0};
    wsync_layout_t *wanted = NULL;
    wsync_route_t *route = NULL;
    wsync_error_t err = {0};

    must(wsync_layout_builder_create(&target.builder, &err) == WSYNC_OK);
    if (mirrored ? mirror(manifest, &target) : fuse(&target)) {
        must(wsync_layout_builder_finish(target.builder, &wanted, &err) == WSYNC_OK);
        if (wsync_route_create(manifest, wanted, &route, &err) != WSYNC_OK) {
            must(route == NULL && err.message[0] != '\0');
        } else if (run(route, &target) && mirrored && !computes(manifest)) {
            check_filled(&target);
        }
    }
    wsync_route_destroy(route);
    wsync_layout_destroy(wanted);
    wsync_layout_builder_destroy(target.builder);
    for (size_t i = 0; i < target.count; i++) {
        free(target.spans[i].data);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes)
{
    wsync_layout_t *manifest = NULL;
    wsync_error_t err;

    if (wsync_layout_decode(data, nbytes, &manifest, &err) == WSYNC_OK) {
        deliver(manifest, true);
        deliver(manifest, false);
        wsync_layout_destroy(manifest);
    }
    return 0;
}
