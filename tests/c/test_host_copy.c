/* SPDX-License-Identifier: Apache-2.0
 * Copies of all kinds against an element-by-element reference. */
#include "core/copy.h"
#include "device/device.h"
#include "device/host_copy.h"
#include "device/host_copy_rows.h"
#include "draw.h"
#include "harness.h"
#include "quantise_reference.h"

static uint16_t reference_bf16(uint32_t bits)
{
    const float value = float_of(bits);

    return (uint16_t)(isnan(value)
                          ? bits >> 16 | 0x40U
                          : weight_bits(WSYNC_DTYPE_BFLOAT16,
                                        round_weight(WSYNC_DTYPE_BFLOAT16, value)));
}

static uint16_t reference_f16(uint32_t bits)
{
    const float value = float_of(bits);

    return (uint16_t)(isnan(value)
                          ? (bits >> 16 & 0x8000U) | 0x7e00U | (bits >> 13 & 0x3ffU)
                          : weight_bits(WSYNC_DTYPE_FLOAT16,
                                        round_weight(WSYNC_DTYPE_FLOAT16, value)));
}

/* Multiplied and added in double precision, which loses nothing, and rounded after each. */
static uint32_t reference_affine(const wsync_copy_t *copy, uint32_t bits)
{
    float value = float_of(bits);

    if (copy->affine.scale == 0 || isnan(value)) {
        return bits;
    }
    value = product(value, copy->affine.scale);
    if (copy->affine.offset != 0) {
        value = (float)((double)value + (double)copy->affine.offset);
    }
    return bits_of(value);
}

static uint32_t f32_of_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;

    return sign |
           ((half & 0x7c00) == 0x7c00 ? 0x7f800000U | (uint32_t)(half & 0x3ff) << 13
                                      : bits_of((float)small_value(half & 0x7fff, 10, 15)));
}

static void reference_element(const wsync_copy_t *copy, unsigned char *to,
                              const unsigned char *from)
{
    uint32_t wide;
    uint16_t narrow;

    switch ((wsync_transform_t)copy->transform) {
    case WSYNC_TRANSFORM_NONE:
        memcpy(to, from, copy->source_item_nbytes);
        break;
    case WSYNC_TRANSFORM_F32_TO_BF16:
        memcpy(&wide, from, sizeof(wide));
        narrow = reference_bf16(reference_affine(copy, wide));
        memcpy(to, &narrow, sizeof(narrow));
        break;
    case WSYNC_TRANSFORM_F32_TO_F16:
        memcpy(&wide, from, sizeof(wide));
        narrow = reference_f16(reference_affine(copy, wide));
        memcpy(to, &narrow, sizeof(narrow));
        break;
    case WSYNC_TRANSFORM_BF16_TO_F32:
        memcpy(&narrow, from, sizeof(narrow));
        if (copy->affine.scale != 0) { /* computed as a bfloat16 */
            narrow = reference_bf16(reference_affine(copy, (uint32_t)narrow << 16));
        }
        wide = (uint32_t)narrow << 16;
        memcpy(to, &wide, sizeof(wide));
        break;
    case WSYNC_TRANSFORM_F32:
        memcpy(&wide, from, sizeof(wide));
        wide = reference_affine(copy, wide);
        memcpy(to, &wide, sizeof(wide));
        break;
    case WSYNC_TRANSFORM_BF16:
        memcpy(&narrow, from, sizeof(narrow));
        narrow = reference_bf16(reference_affine(copy, (uint32_t)narrow << 16));
        memcpy(to, &narrow, sizeof(narrow));
        break;
    case WSYNC_TRANSFORM_F16:
        memcpy(&narrow, from, sizeof(narrow));
        narrow = reference_f16(reference_affine(copy, f32_of_half(narrow)));
        memcpy(to, &narrow, sizeof(narrow));
        break;
    }
}

static void reference_copy(const wsync_copy_t *copy, const wsync_span_t *sources,
                           const wsync_span_t *destinations)
{
    int64_t extent[WSYNC_COPY_NDIM] = {1, 1, 1, 1};
    const unsigned char *from =
        (const unsigned char *)sources[copy->source_buffer].data + copy->source_offset;
    unsigned char *to = (unsigned char *)destinations[copy->destination_buffer].data +
                        copy->destination_offset;

    for (unsigned d = 0; d < copy->ndim; d++) {
        extent[d] = copy->extent[d];
    }
    for (int64_t a = 0; a < extent[0]; a++) {
        for (int64_t b = 0; b < extent[1]; b++) {
            for (int64_t c = 0; c < extent[2]; c++) {
                for (int64_t d = 0; d < extent[3]; d++) {
                    const int64_t index[WSYNC_COPY_NDIM] = {a, b, c, d};
                    int64_t source = 0;
                    int64_t destination = 0;

                    for (unsigned i = 0; i < copy->ndim; i++) {
                        source += index[i] * copy->source_stride[i];
                        destination += index[i] * copy->destination_stride[i];
                    }
                    for (uint64_t e = 0; e < copy->row_count; e++) {
                        reference_element(
                            copy,
                            to + destination + (int64_t)e * copy->destination_item_nbytes,
                            from + source + (int64_t)e * copy->source_item_nbytes);
                    }
                }
            }
        }
    }
}

/* Steps for a random order of the dimensions, with gaps; returns the bytes spanned. */
static uint64_t draw_strides(random_state_t *random, const wsync_copy_t *copy,
                             uint64_t item_nbytes, int64_t *stride)
{
    uint64_t span = copy->row_count * item_nbytes;
    bool used[WSYNC_COPY_NDIM] = {false};

    for (unsigned i = 0; i < copy->ndim; i++) {
        unsigned d = (unsigned)draw(random, copy->ndim);

        while (used[d]) {
            d = (d + 1) % copy->ndim;
        }
        used[d] = true;
        stride[d] = (int64_t)(span + draw(random, 3) * draw(random, 9));
        span = (uint64_t)stride[d] * (uint64_t)copy->extent[d];
    }
    return span;
}

static void draw_transform(random_state_t *random, wsync_copy_t *copy)
{
    static const uint8_t sizes[] = {1, 2, 4, 8, 16};
    static const wsync_affine_t affines[] = {
        {1, 1}, {-0.37F, 0}, {3, -0.7F}, {1e30F, 1e9F}};

    copy->transform = (uint8_t)(draw(random, 2) * draw(random, WSYNC_TRANSFORM_F16 + 1));
    if (copy->transform > WSYNC_TRANSFORM_BF16_TO_F32 ||
        (copy->transform != WSYNC_TRANSFORM_NONE && draw(random, 2) == 0)) {
        copy->affine = affines[draw(random, 4)];
    }
    switch ((wsync_transform_t)copy->transform) {
    case WSYNC_TRANSFORM_NONE:
        copy->source_item_nbytes = sizes[draw(random, 5)];
        copy->destination_item_nbytes = copy->source_item_nbytes;
        break;
    case WSYNC_TRANSFORM_BF16_TO_F32:
        copy->source_item_nbytes = 2;
        copy->destination_item_nbytes = 4;
        break;
    case WSYNC_TRANSFORM_F32:
        copy->source_item_nbytes = 4;
        copy->destination_item_nbytes = 4;
        break;
    case WSYNC_TRANSFORM_BF16:
    case WSYNC_TRANSFORM_F16:
        copy->source_item_nbytes = 2;
        copy->destination_item_nbytes = 2;
        break;
    default:
        copy->source_item_nbytes = 4;
        copy->destination_item_nbytes = 2;
        break;
    }
}

enum { MAX_SPAN = 12 * 1024 * 1024, MAX_COPIES = 12 };

/* A copy of at most about `bytes` bytes: `kind` 0 one row, 1 single elements, 2 anything.
 */
static wsync_copy_t draw_copy(random_state_t *random, unsigned kind, uint64_t nbytes,
                              uint64_t *source_used, uint64_t *destination_used)
{
    wsync_copy_t copy = {.row_count = 1};
    uint64_t left;

    draw_transform(random, &copy);
    left = nbytes / copy.source_item_nbytes + 1;
    if (kind != 0) {
        copy.ndim = (uint8_t)(1 + draw(random, WSYNC_COPY_NDIM));
    }
    if (kind != 1) {
        copy.row_count = 1 + draw(random, kind == 0 ? left : (left < 200 ? left : 200));
        left = left / copy.row_count + 1;
    }
    for (unsigned d = 0; d < copy.ndim; d++) {
        copy.extent[d] = (int64_t)(1 + draw(random, left < 70 ? left : 70));
        left = left / (uint64_t)copy.extent[d] + 1;
    }
    copy.source_offset = *source_used + draw(random, 70);
    copy.destination_offset = *destination_used + draw(random, 70);
    *source_used = copy.source_offset +
                   draw_strides(random, &copy, copy.source_item_nbytes, copy.source_stride);
    *destination_used =
        copy.destination_offset +
        draw_strides(random, &copy, copy.destination_item_nbytes, copy.destination_stride);
    return copy;
}

typedef struct fixture {
    wsync_copy_t copies[MAX_COPIES];
    size_t count;
    wsync_span_t source;
    wsync_span_t destination;
    wsync_span_t expected;
} fixture_t;

static void fixture_init(fixture_t *fixture)
{
    random_state_t random = {7};

    *fixture = (fixture_t){.count = 0};
    fixture->source = (wsync_span_t){malloc(MAX_SPAN), MAX_SPAN};
    fixture->destination = (wsync_span_t){malloc(MAX_SPAN), MAX_SPAN};
    fixture->expected = (wsync_span_t){malloc(MAX_SPAN), MAX_SPAN};
    for (size_t i = 0; i < MAX_SPAN / sizeof(uint32_t); i++) {
        ((uint32_t *)fixture->source.data)[i] =
            (uint32_t)draw(&random, 65536) << 16 | (uint32_t)draw(&random, 65536);
    }
}

/* Draws a list that stays inside the spans and what it must do. */
static void fixture_draw(fixture_t *fixture, random_state_t *random)
{
    const size_t count = 1 + draw(random, MAX_COPIES);
    const uint64_t nbytes = draw(random, 4) == 0 ? 400 * 1024 : 20 * 1024;
    uint64_t source_used = 0;
    uint64_t destination_used = 0;

    fixture->count = 0;
    while (fixture->count < count) {
        const uint64_t source = source_used;
        const uint64_t destination = destination_used;
        const wsync_copy_t copy = draw_copy(random, (unsigned)draw(random, 3), nbytes,
                                            &source_used, &destination_used);

        if (source_used > MAX_SPAN || destination_used > MAX_SPAN) {
            source_used = source;
            destination_used = destination;
            break;
        }
        fixture->copies[fixture->count++] = copy;
    }
    fixture->destination.nbytes = destination_used;
    fixture->expected.nbytes = destination_used;
    memset(fixture->destination.data, 0x5a, destination_used);
    memset(fixture->expected.data, 0x5a, destination_used);
    for (size_t i = 0; i < fixture->count; i++) {
        reference_copy(&fixture->copies[i], &fixture->source, &fixture->expected);
    }
}

static void fixture_compare(const fixture_t *fixture, int round)
{
    if (memcmp(fixture->destination.data, fixture->expected.data,
               fixture->expected.nbytes) != 0) {
        FAIL("round %d: %zu copies wrote other bytes than the reference", round,
             fixture->count);
    }
}

static void fixture_fini(fixture_t *fixture)
{
    free(fixture->source.data);
    free(fixture->destination.data);
    free(fixture->expected.data);
}

TEST(run_matches_reference)
{
    random_state_t random = {1};
    fixture_t fixture;
    uint64_t nbytes = 0;
    wsync_error_t err;

    fixture_init(&fixture);
    for (int round = 0; round < 200; round++) {
        fixture_draw(&fixture, &random);
        CHECK_OK(wsync_copies_check(fixture.copies, fixture.count, &fixture.source, 1,
                                    &fixture.destination, 1, &err),
                 err);
        wsync_host_copy_run(fixture.copies, fixture.count, &fixture.source,
                            &fixture.destination);
        fixture_compare(&fixture, round);
        nbytes += wsync_copies_nbytes(fixture.copies, fixture.count);
    }
    (void)printf("%" PRIu64 " bytes compared\n", nbytes);
    fixture_fini(&fixture);
}

/* Any partition into parts, handed to any number of cursors, runs everything once. */
TEST(parts_run_everything_once)
{
    random_state_t random = {2};
    fixture_t fixture;

    fixture_init(&fixture);
    for (int round = 0; round < 60; round++) {
        wsync_host_cursor_t cursors[3] = {{0}};
        wsync_host_list_t list;
        uint64_t begin = 0;

        fixture_draw(&fixture, &random);
        list = wsync_host_list(fixture.copies, fixture.count, &fixture.source,
                               &fixture.destination);
        while (begin < list.work) {
            const uint64_t end = begin + 1 + draw(&random, 1 + list.work / 8);

            wsync_host_list_run(&list, begin, end, &cursors[draw(&random, 3)]);
            begin = end;
        }
        fixture_compare(&fixture, round);
    }
    fixture_fini(&fixture);
}

/* Rows longer than a chunk, lists large enough to stream, odd sizes and alignments. */
TEST(long_rows_match_reference)
{
    static const struct {
        wsync_transform_t transform;
        uint8_t source;
        uint8_t destination;
    } kinds[] = {
        {WSYNC_TRANSFORM_NONE, 1, 1},
        {WSYNC_TRANSFORM_F32_TO_BF16, 4, 2},
        {WSYNC_TRANSFORM_F32_TO_F16, 4, 2},
        {WSYNC_TRANSFORM_BF16_TO_F32, 2, 4},
    };
    fixture_t fixture;

    fixture_init(&fixture);
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        const uint64_t count = (uint64_t)(3 * 1024 * 1024 - 77) / kinds[k].destination;
        wsync_copy_t *copy = &fixture.copies[0];

        *copy = (wsync_copy_t){
            .source_offset = 3,
            .destination_offset = 13,
            .row_count = count,
            .source_item_nbytes = kinds[k].source,
            .destination_item_nbytes = kinds[k].destination,
            .transform = (uint8_t)kinds[k].transform,
            .ndim = 1,
            .extent = {2},
            .source_stride = {(int64_t)count * kinds[k].source + 5},
            .destination_stride = {(int64_t)count * kinds[k].destination + 1}};
        fixture.count = 1;
        memset(fixture.destination.data, 0, MAX_SPAN);
        memset(fixture.expected.data, 0, MAX_SPAN);
        reference_copy(copy, &fixture.source, &fixture.expected);
        wsync_host_copy_run(copy, 1, &fixture.source, &fixture.destination);
        fixture_compare(&fixture, (int)k);
    }
    fixture_fini(&fixture);
}

/* Streamed rows of about so many pages, between any two places in a line. */
TEST(streamed_rows_write_their_bytes_only)
{
    static const size_t pages[] = {1, 4, 8, 21};
    enum { MARGIN = 127 };
    random_state_t random = {3};
    fixture_t fixture;

    fixture_init(&fixture);
    for (int round = 0; round < 1000; round++) {
        const size_t nbytes =
            pages[round % 4] * 4096 - MARGIN + (size_t)draw(&random, 2 * MARGIN + 1);
        const size_t at = (size_t)draw(&random, 64);
        const unsigned char *from =
            (unsigned char *)fixture.source.data + draw(&random, 4096);

        fixture.expected.nbytes = at + nbytes + 64;
        memset(fixture.destination.data, 0x5a, fixture.expected.nbytes);
        memset(fixture.expected.data, 0x5a, fixture.expected.nbytes);
        memcpy((unsigned char *)fixture.expected.data + at, from, nbytes);
        wsync_host_row_copy((unsigned char *)fixture.destination.data + at, from, nbytes,
                            true);
        wsync_host_row_fence();
        fixture_compare(&fixture, round);
    }
    fixture_fini(&fixture);
}

TEST(empty_copies_touch_nothing)
{
    unsigned char from[4] = {1, 2, 3, 4};
    unsigned char to[4] = {9, 9, 9, 9};
    const wsync_span_t source = {from, sizeof(from)};
    const wsync_span_t destination = {to, sizeof(to)};
    const wsync_copy_t copies[] = {
        {.row_count = 0, .source_item_nbytes = 1, .destination_item_nbytes = 1},
        {.row_count = 1,
         .source_item_nbytes = 1,
         .destination_item_nbytes = 1,
         .ndim = 2,
         .extent = {3, 0}},
    };

    wsync_host_copy_run(copies, 2, &source, &destination);
    wsync_host_copy_run(NULL, 0, NULL, NULL);
    for (size_t i = 0; i < sizeof(to); i++) {
        CHECK_EQ(to[i], 9);
    }
}

static void check_stream(unsigned threads)
{
    const wsync_device_t *device = wsync_device_host();
    random_state_t random = {threads};
    wsync_stream_t *stream = NULL;
    fixture_t fixture;
    wsync_error_t err;

    fixture_init(&fixture);
    CHECK_OK(wsync_stream_create(device, threads, &stream, &err), err);
    for (int round = 0; round < 40; round++) {
        fixture_draw(&fixture, &random);
        CHECK_OK(wsync_stream_copy_list(stream, fixture.copies, fixture.count,
                                        &fixture.source, 1, &fixture.destination, 1, &err),
                 err);
        CHECK_OK(wsync_stream_synchronize(stream, 60000, &err), err);
        fixture_compare(&fixture, round);
    }
    wsync_stream_destroy(stream);
    fixture_fini(&fixture);
}

TEST(stream_of_one_thread_matches_reference)
{
    check_stream(1);
}

TEST(stream_of_four_threads_matches_reference)
{
    check_stream(4);
}
