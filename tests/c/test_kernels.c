/* SPDX-License-Identifier: Apache-2.0
 * The copy kernel, run on the host, against the host backend: whatever both are given,
 * every byte of the destinations must be the same, those that no copy writes included. */
#include <pthread.h>
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, nbytes) ((void)(memory), (void)(nbytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, nbytes) ((void)(memory), (void)(nbytes))
#endif

#include "device/host_copy.h"
#include "device/kernel_segments.h"
#include "draw.h"
#include "harness.h"
#include "kernel_host.h"

enum { BUFFERS = 2, MAX_COPIES = 6, SPAN_NBYTES = 1024 * 1024, GUARD_NBYTES = 64 };

/* What a test draws: the copies, and where in each buffer the next one may begin. */
typedef struct scene {
    random_state_t random;
    wsync_copy_t copies[MAX_COPIES];
    size_t count;
    uint64_t source_used[BUFFERS];
    uint64_t destination_used[BUFFERS];
    uint64_t grain; /* offsets, steps and rows are multiples of it, more or less */
    uint64_t nbytes;
    uint64_t lead; /* of the sources; 0: any */
    bool casts;
    bool fills;
} scene_t;

/* Mostly the grain's multiple; now and then not, as a shard of odd size would have it. */
static uint64_t round_to_grain(scene_t *scene, uint64_t value)
{
    return draw(&scene->random, 12) == 0
               ? value
               : (value + scene->grain - 1) / scene->grain * scene->grain;
}

/* Bytes of an element on both sides of every transform. */
static const uint8_t transform_nbytes[][2] = {{0, 0}, {4, 2}, {4, 2}, {2, 4},
                                              {4, 4}, {2, 2}, {2, 2}};

static void draw_types(scene_t *scene, wsync_copy_t *copy)
{
    copy->transform = WSYNC_TRANSFORM_NONE;
    if (scene->casts) {
        copy->transform = (uint8_t)(1 + draw(&scene->random, WSYNC_TRANSFORM_F16));
        if (copy->transform > WSYNC_TRANSFORM_BF16_TO_F32 || draw(&scene->random, 3) == 0) {
            copy->affine = (wsync_affine_t){draw(&scene->random, 2) == 0 ? 1.0F : -0.3F,
                                            (float)draw(&scene->random, 2)};
        }
    }
    copy->source_item_nbytes = transform_nbytes[copy->transform][0];
    copy->destination_item_nbytes = transform_nbytes[copy->transform][1];
    if (copy->transform == WSYNC_TRANSFORM_NONE) {
        copy->source_item_nbytes = (uint8_t)DRAW_OF(&scene->random, 1, 2, 4, 8, 16);
        copy->destination_item_nbytes = copy->source_item_nbytes;
    }
}

/* Bytes of a row: one element, a few, and what lies at the borders of tiles and of runs. */
static uint64_t draw_row(scene_t *scene)
{
    random_state_t *random = &scene->random;
    const uint64_t near = draw(random, 33);

    switch (draw(random, scene->nbytes > WSYNC_TILE_NBYTES ? 6 : 3)) {
    case 0:
        return 0;
    case 1:
        return draw(random, 100);
    case 2:
        return draw(random, 2048);
    case 3:
        return 1024 + near - 16;
    case 4:
        return DRAW_OF(random, 1, 2, 3, 7) * WSYNC_TILE_NBYTES + near - 16;
    default:
        return draw(random, scene->nbytes);
    }
}

/* Strides in a random order of the dimensions, with gaps, some backwards; returns the bytes
 * spanned and moves *offset, where the copy begins, by what is stepped backwards. */
static uint64_t draw_strides(scene_t *scene, const wsync_copy_t *copy, uint64_t item_nbytes,
                             int64_t *stride, uint64_t *offset)
{
    random_state_t *random = &scene->random;
    uint64_t span = copy->row_count * item_nbytes;
    unsigned order[WSYNC_COPY_NDIM] = {0};

    for (unsigned d = 0; d < copy->ndim; d++) {
        const unsigned at = (unsigned)draw(random, d + 1);

        order[d] = order[at];
        order[at] = d;
    }
    for (unsigned i = 0; i < copy->ndim; i++) {
        const unsigned d = order[i];
        const uint64_t gap = draw(random, 3) == 0 ? draw(random, 40) : 0;
        const uint64_t step = gap == 0 ? span : round_to_grain(scene, span + gap);

        stride[d] = (int64_t)step;
        if (draw(random, 8) == 0) {
            stride[d] = -stride[d];
            *offset += step * ((uint64_t)copy->extent[d] - 1);
        }
        span += step * ((uint64_t)copy->extent[d] - 1);
    }
    return span;
}

/* Draws one more copy behind the others; leaves it out if it does not fit. */
static void draw_copy(scene_t *scene)
{
    random_state_t *random = &scene->random;
    wsync_copy_t copy = {.row_count = 1};
    uint64_t *from_used;
    uint64_t *to_used;
    uint64_t from;
    uint64_t to;
    uint64_t left = 1 + scene->nbytes;

    copy.source_buffer = (uint32_t)draw(random, BUFFERS);
    copy.destination_buffer = (uint32_t)draw(random, BUFFERS);
    from_used = &scene->source_used[copy.source_buffer];
    to_used = &scene->destination_used[copy.destination_buffer];
    draw_types(scene, &copy);
    if (!scene->fills) {
        copy.row_count =
            1 + round_to_grain(scene, draw_row(scene)) / copy.source_item_nbytes;
        copy.row_count -= copy.row_count > 1 ? 1 : 0;
        left = left / (copy.row_count * copy.source_item_nbytes) + 1;
    }
    copy.ndim = (uint8_t)draw(random, WSYNC_COPY_NDIM + 1);
    for (unsigned d = 0; d < copy.ndim; d++) {
        copy.extent[d] = (int64_t)(1 + draw(random, left < 90 || scene->fills ? left : 90));
        left = left / (uint64_t)copy.extent[d] + 1;
    }
    copy.source_offset = round_to_grain(scene, *from_used + draw(random, 40));
    copy.destination_offset = round_to_grain(scene, *to_used + draw(random, 40));
    from = copy.source_offset;
    to = copy.destination_offset;
    from += draw_strides(scene, &copy, copy.source_item_nbytes, copy.source_stride,
                         &copy.source_offset);
    to += draw_strides(scene, &copy, copy.destination_item_nbytes, copy.destination_stride,
                       &copy.destination_offset);
    if (scene->fills || draw(random, 16) == 0) {
        for (unsigned d = 0; d < copy.ndim; d++) {
            copy.source_stride[d] = draw(random, 9) == 0 ? copy.source_stride[d] : 0;
        }
    }
    if (from <= SPAN_NBYTES && to <= SPAN_NBYTES) {
        *from_used = from;
        *to_used = to;
        scene->copies[scene->count++] = copy;
    }
}

static void draw_scene(scene_t *scene)
{
    const size_t wanted = 1 + draw(&scene->random, MAX_COPIES);

    scene->grain = DRAW_OF(&scene->random, 1, 2, 4, 8, 16, 16);
    scene->count = 0;
    memset(scene->source_used, 0, sizeof(scene->source_used));
    memset(scene->destination_used, 0, sizeof(scene->destination_used));
    for (size_t i = 0; i < wanted; i++) {
        draw_copy(scene);
    }
}

/* Memory `lead` bytes behind an aligned address.  A sanitizer sees one byte too many behind
 * it, and eight before it. */
typedef struct block {
    unsigned char *memory;
    uint64_t lead;
    wsync_span_t span;
} block_t;

static block_t block_make(uint64_t lead, uint64_t nbytes)
{
    block_t block = {.memory = malloc(lead + nbytes > 0 ? lead + nbytes : 1), .lead = lead};

    CHECK(block.memory != NULL);
    block.span = (wsync_span_t){block.memory + lead, nbytes};
    ASAN_POISON_MEMORY_REGION(block.memory, lead / 8 * 8);
    return block;
}

static void block_free(const block_t *block)
{
    ASAN_UNPOISON_MEMORY_REGION(block->memory, block->lead);
    free(block->memory);
}

static void launch(const wsync_segments_t *segments, const wsync_segment_list_t *list,
                   const wsync_span_t *sources, const wsync_span_t *destinations,
                   unsigned grid, unsigned block)
{
    unsigned long long from[BUFFERS];
    unsigned long long to[BUFFERS];
    wsync_kernel_args_t args = {
        .segments = (uintptr_t)segments->items,
        .tile_starts = (uintptr_t)segments->tile_starts,
        .tile_index = (uintptr_t)segments->tile_index,
        .sources = (uintptr_t)from,
        .destinations = (uintptr_t)to,
        .first = list->first,
        .count = list->count,
    };
    void *params[] = {&args};

    for (int i = 0; i < BUFFERS; i++) {
        from[i] = (uintptr_t)sources[i].data;
        to[i] = (uintptr_t)destinations[i].data;
    }
    CHECK_EQ(wsync_host_kernel_launch(WSYNC_KERNEL_NAME, grid, block, params), 0);
}

static void compare(const scene_t *scene, const wsync_span_t *found,
                    const wsync_span_t *expected, int round)
{
    for (int b = 0; b < BUFFERS; b++) {
        const unsigned char *a = found[b].data;
        const unsigned char *e = expected[b].data;

        if (memcmp(a, e, expected[b].nbytes) == 0) {
            continue;
        }
        for (uint64_t i = 0; i < expected[b].nbytes; i++) {
            if (a[i] != e[i]) {
                FAIL("round %d: %zu copies, buffer %d: byte %" PRIu64 " of %" PRIu64
                     " is %02x, the host backend's %02x",
                     round, scene->count, b, i, expected[b].nbytes, a[i], e[i]);
            }
        }
    }
}

/* Runs the scene's copies both ways.  Guard bytes lie before and behind the destinations.
 */
static uint64_t run_scene(scene_t *scene, int round)
{
    random_state_t *random = &scene->random;
    block_t sources[BUFFERS];
    block_t found[BUFFERS];
    block_t expected[BUFFERS];
    wsync_span_t from[BUFFERS];
    wsync_span_t to[BUFFERS];
    wsync_span_t host[BUFFERS];
    wsync_segments_t segments = {0};
    wsync_segment_list_t list;
    wsync_error_t err;

    for (int b = 0; b < BUFFERS; b++) {
        const uint64_t lead = draw(random, 3) == 0 ? draw(random, 16) : 0;
        const uint64_t nbytes = scene->destination_used[b];

        sources[b] =
            block_make(scene->lead > 0 ? scene->lead : lead, scene->source_used[b]);
        found[b] = block_make(lead, nbytes + 2 * GUARD_NBYTES);
        expected[b] = block_make(0, nbytes + 2 * GUARD_NBYTES);
        memset(found[b].span.data, 0x5a, found[b].span.nbytes);
        memset(expected[b].span.data, 0x5a, expected[b].span.nbytes);
        for (uint64_t i = 0; i < scene->source_used[b]; i++) {
            ((unsigned char *)sources[b].span.data)[i] = (unsigned char)draw(random, 256);
        }
        from[b] = sources[b].span;
        to[b] = (wsync_span_t){(unsigned char *)found[b].span.data + GUARD_NBYTES, nbytes};
        host[b] =
            (wsync_span_t){(unsigned char *)expected[b].span.data + GUARD_NBYTES, nbytes};
    }
    CHECK_OK(
        wsync_copies_check(scene->copies, scene->count, from, BUFFERS, to, BUFFERS, &err),
        err);
    CHECK_OK(wsync_segments_append(&segments, scene->copies, scene->count, &list, &err),
             err);
    wsync_host_copy_run(scene->copies, scene->count, from, host);
    if (list.count > 0) {
        launch(&segments, &list, from, to, 1 + (unsigned)draw(random, 3),
               32U * (1 + (unsigned)draw(random, 4)));
    }
    for (int b = 0; b < BUFFERS; b++) {
        from[b] = found[b].span;
        host[b] = expected[b].span;
    }
    compare(scene, from, host, round);
    for (int b = 0; b < BUFFERS; b++) {
        block_free(&sources[b]);
        block_free(&found[b]);
        block_free(&expected[b]);
    }
    wsync_segments_fini(&segments);
    return wsync_copies_nbytes(scene->copies, scene->count);
}

static void run_rounds(scene_t *scene, int rounds)
{
    uint64_t nbytes = 0;
    uint64_t copies = 0;

    for (int round = 0; round < rounds; round++) {
        draw_scene(scene);
        nbytes += run_scene(scene, round);
        copies += scene->count;
    }
    (void)printf("%" PRIu64 " copies, %" PRIu64 " bytes compared\n", copies, nbytes);
}

TEST(small_copies_match_the_host_backend)
{
    scene_t scene = {.random = {1}, .nbytes = 3000};

    run_rounds(&scene, 1500);
}

TEST(copies_of_several_tiles_match_the_host_backend)
{
    scene_t scene = {.random = {2}, .nbytes = 60000};

    run_rounds(&scene, 200);
}

TEST(small_casts_match_the_host_backend)
{
    scene_t scene = {.random = {3}, .nbytes = 3000, .casts = true};

    run_rounds(&scene, 600);
}

TEST(casts_of_several_tiles_match_the_host_backend)
{
    scene_t scene = {.random = {4}, .nbytes = 60000, .casts = true};

    run_rounds(&scene, 120);
}

TEST(fills_match_the_host_backend)
{
    scene_t scene = {.random = {5}, .nbytes = 2500, .fills = true};

    run_rounds(&scene, 600);
    scene.nbytes = 40000;
    run_rounds(&scene, 60);
}

/* Rows one byte around every border that the kernel knows, at all pairs of alignments.  The
 * last piece of the longest is 17 bytes. */
TEST(transposed_copies_match_the_host_backend)
{
    for (uint64_t nbytes = 1; nbytes <= 16; nbytes *= 2) {
        scene_t scene = {.random = {(uint32_t)nbytes}, .count = 1};
        wsync_copy_t *copy = &scene.copies[0];
        const int64_t item = (int64_t)nbytes;

        *copy = (wsync_copy_t){.row_count = 1,
                               .source_item_nbytes = (uint8_t)nbytes,
                               .destination_item_nbytes = (uint8_t)nbytes,
                               .ndim = 3,
                               .extent = {37, 2, 600 / item},
                               .source_stride = {item, 600 * 38, 38 * item},
                               .destination_stride = {2400, 1200, 2 * item}};
        scene.source_used[0] = 2 * 600 * 38;
        scene.destination_used[0] = 37 * 2400;
        CHECK_EQ(run_scene(&scene, (int)nbytes), 37 * 2 * (600 / nbytes) * nbytes);
    }
}

TEST(every_alignment_at_every_border)
{
    static const uint32_t sizes[] = {1,    15,   16,   17,   63,   64,    65,    1023,
                                     1024, 1025, 8191, 8192, 8193, 16384, 24577, 262161};
    scene_t scene = {.random = {6}, .count = 1};
    int round = 0;

    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (uint64_t from = 0; from < 16; from++) {
            for (uint64_t to = 0; to < 16; to += sizes[s] > 8000 ? 5 : 1) {
                scene.lead = from;
                scene.copies[0] = (wsync_copy_t){.destination_offset = to,
                                                 .row_count = sizes[s],
                                                 .source_item_nbytes = 1,
                                                 .destination_item_nbytes = 1};
                scene.source_used[0] = sizes[s];
                scene.destination_used[0] = to + sizes[s];
                (void)run_scene(&scene, round++);
            }
        }
    }
    (void)printf("%d pairs of addresses\n", round);
}

/* Every sign, exponent and leading mantissa with what decides how the rest rounds; NaNs. */
TEST(every_cast_rounds_as_the_host_backend)
{
    static const uint16_t rests[] = {0,      1,      0x0fff, 0x1000, 0x1001,
                                     0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000,
                                     0x8001, 0xe000, 0xefff, 0xf000, 0xffff};
    enum { RESTS = sizeof(rests) / sizeof(rests[0]), COUNT = 65536 * RESTS };
    uint32_t *values = malloc(COUNT * sizeof(*values));
    unsigned char *found = malloc(COUNT * 4);
    unsigned char *expected = malloc(COUNT * 4);

    CHECK(values != NULL && found != NULL && expected != NULL);
    for (uint32_t i = 0; i < COUNT; i++) {
        values[i] = i / RESTS << 16 | rests[i % RESTS];
    }
    /* Aligned rows are converted four at a time, those one element further one by one. */
    for (int kind = 0; kind < 6 + WSYNC_TRANSFORM_F16; kind++) {
        const int transform = kind < 6 ? kind % 3 + 1 : kind - 5;
        const int further = kind < 6 ? kind / 3 : 0;
        const wsync_copy_t copy = {
            .destination_offset = (uint64_t)further * transform_nbytes[transform][1],
            .row_count = (uint64_t)(COUNT - further),
            .source_item_nbytes = transform_nbytes[transform][0],
            .destination_item_nbytes = transform_nbytes[transform][1],
            .transform = (uint8_t)transform,
            .affine = {kind < 6 ? 0.0F : 1.25F, kind < 6 ? 0.0F : 1.0F}};
        const wsync_span_t from[BUFFERS] = {{values, COUNT * 4}};
        const wsync_span_t to[BUFFERS] = {{found, COUNT * 4}};
        const wsync_span_t host = {expected, COUNT * 4};
        wsync_segments_t segments = {0};
        wsync_segment_list_t list;
        wsync_error_t err;

        memset(found, 0x5a, COUNT * 4);
        memset(expected, 0x5a, COUNT * 4);
        CHECK_OK(wsync_segments_append(&segments, &copy, 1, &list, &err), err);
        launch(&segments, &list, from, to, 1, 32);
        wsync_host_copy_run(&copy, 1, from, &host);
        CHECK_EQ(memcmp(found, expected, COUNT * 4), 0);
        wsync_segments_fini(&segments);
    }
    free(values);
    free(found);
    free(expected);
}

static void *run_small_rounds(void *argument)
{
    scene_t scene = {.random = {(uint64_t)(uintptr_t)argument}, .nbytes = 3000};

    run_rounds(&scene, 200);
    return NULL;
}

/* As the stand-in of the driver does, whose streams are threads. */
TEST(threads_launch_at_once)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];

    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, run_small_rounds, (void *)(i + 10)), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
}
