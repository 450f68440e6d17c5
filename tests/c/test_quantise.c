/* SPDX-License-Identifier: Apache-2.0
 * Quantising on the host against an element-by-element reference, and the kernel, run on
 * the host, against that. */
#define DEVICE static inline
#include "device/host_quantise.h"

#include "core/quantise/piece_check.h"
#include "device/host_quantise_rows.h"
#include "device/kernel_quantise.h"
#include "device_fixture.h"
#include "draw.h"
#include "harness.h"
#include "kernel_host.h"
#include "quantise_reference.h"

enum {
    MAX_ROWS = 300,
    MAX_COLS = 2600,
    MAX_ELEMENTS = 120 * 1024,
    MAX_PIECES = 6,
    MAX_BLOCKS = 64 * 1024,
    IMAGE_NBYTES = 8 * 1024 * 1024,
    SOURCE_NBYTES = 4 * 1024 * 1024,
    GUARD = 0xa5,
};

static const wsync_dtype_t dtypes[] = {WSYNC_DTYPE_FLOAT32, WSYNC_DTYPE_BFLOAT16,
                                       WSYNC_DTYPE_FLOAT16};

static wsync_dtype_t dtype_of(unsigned weight)
{
    return dtypes[weight];
}

/* A weight's bits: mostly of ordinary size, some zeros, subnormals and borders. */
static uint32_t draw_weight(random_state_t *random, unsigned weight)
{
    const float ordinary = (float)((double)draw(random, 1U << 24) / (1 << 24) - 0.5) * 0.1F;
    const uint32_t any = (uint32_t)draw(random, 1U << 31) * 2 + (uint32_t)draw(random, 2);

    switch (draw(random, 40)) {
    case 0:
        return 0;
    case 1: /* -0 */
        return weight == WSYNC_WEIGHT_F32 ? 0x80000000U : 0x8000U;
    case 2: /* subnormal */
        return any & (weight == WSYNC_WEIGHT_F32    ? 0x807fffffU
                      : weight == WSYNC_WEIGHT_BF16 ? 0x807fU
                                                    : 0x83ffU);
    case 3: /* anything that is small enough to be finite */
        return any & (weight == WSYNC_WEIGHT_F32    ? 0xbfffffffU
                      : weight == WSYNC_WEIGHT_BF16 ? 0xbfffU
                                                    : 0xbbffU);
    default:
        return weight_bits(dtype_of(weight), round_weight(dtype_of(weight), ordinary));
    }
}

/* An infinity or a NaN of either sign. */
static uint32_t odd_weight(random_state_t *random, unsigned weight)
{
    static const uint32_t infinity[] = {0x7f800000U, 0x7f80U, 0x7c00U};
    const uint32_t sign = weight == WSYNC_WEIGHT_F32 ? 0x80000000U : 0x8000U;

    return (infinity[weight] + (uint32_t)draw(random, 3)) |
           (draw(random, 2) == 0 ? sign : 0);
}

static float value_of(unsigned weight, uint32_t bits)
{
    const bool special = (bits & 0x7c00) == 0x7c00;
    const double half = special ? ((bits & 0x3ff) == 0 ? INFINITY : NAN)
                                : small_value(bits & 0x7fff, 10, 15);

    if (weight == WSYNC_WEIGHT_F32) {
        return float_of(bits);
    }
    if (weight == WSYNC_WEIGHT_BF16) {
        return float_of(bits << 16);
    }
    return (float)((bits & 0x8000) != 0 ? -half : half);
}

/* A matrix, cut into pieces, each with its elements in a buffer of its own. */
typedef struct scene {
    random_state_t random;
    unsigned weight;
    uint64_t rows;
    uint64_t cols;
    uint32_t *bits; /* MAX_ELEMENTS */
    wsync_quantise_method_t method;
    wsync_quantise_piece_t pieces[MAX_PIECES];
    size_t count;
    wsync_span_t sources[MAX_PIECES];
    unsigned char *image;
    unsigned char *expected;
    uint64_t used; /* of the image */
    float *amaxes;
    bool tabled; /* amaxes come from the table */
    bool wild;   /* some weights are NaN or infinite */
    bool even;   /* bfloat16, of which eight lie in 16 bytes, as a trainer's do */
} scene_t;

static void *allocate(size_t nbytes)
{
    void *memory = malloc(nbytes);

    CHECK(memory != NULL);
    return memory;
}

static void scene_init(scene_t *scene, uint64_t seed)
{
    *scene = (scene_t){.random = {seed}};
    scene->bits = allocate(MAX_ELEMENTS * sizeof(*scene->bits));
    scene->image = allocate(IMAGE_NBYTES);
    scene->expected = allocate(IMAGE_NBYTES);
    scene->amaxes = allocate(MAX_BLOCKS * sizeof(*scene->amaxes));
    for (int i = 0; i < MAX_PIECES; i++) {
        scene->sources[i] = (wsync_span_t){allocate(SOURCE_NBYTES), SOURCE_NBYTES};
    }
}

static void scene_fini(scene_t *scene)
{
    for (int i = 0; i < MAX_PIECES; i++) {
        free(scene->sources[i].data);
    }
    free(scene->amaxes);
    free(scene->expected);
    free(scene->image);
    free(scene->bits);
}

static void draw_method(scene_t *scene)
{
    random_state_t *random = &scene->random;
    wsync_quantise_method_t *method = &scene->method;

    *method = (wsync_quantise_method_t){
        .kind = (wsync_quantise_kind_t)draw(random, WSYNC_QUANTISE_COUNT),
        .reciprocal = draw(random, 2) == 0,
        .block_rows = 1,
        .block_cols = 32};
    switch (method->kind) {
    case WSYNC_QUANTISE_FP8_BLOCK:
    case WSYNC_QUANTISE_FP8_UE8M0:
    case WSYNC_QUANTISE_FP8_PACKED:
        method->block_rows = (uint32_t)DRAW_OF(random, 128, 128, 64, 7, 1);
        method->block_cols = (uint32_t)DRAW_OF(random, 128, 128, 33, 5, 2500);
        break;
    case WSYNC_QUANTISE_FP8_TENSOR:
        method->block_rows = 0;
        method->block_cols = 0;
        break;
    case WSYNC_QUANTISE_NVFP4:
        method->block_cols = 16;
        break;
    case WSYNC_QUANTISE_MXFP8:
        break;
    default:
        method->block_cols = (uint32_t)DRAW_OF(random, 32, 128, 8);
        break;
    }
}

static float amax_of(const scene_t *scene, const uint64_t begin[2], const uint64_t end[2])
{
    float amax = 0;

    for (uint64_t r = begin[0]; r < end[0] && r < scene->rows; r++) {
        for (uint64_t c = begin[1]; c < end[1] && c < scene->cols; c++) {
            const float value =
                fabsf(value_of(scene->weight, scene->bits[r * scene->cols + c]));

            amax = value > amax || isnan(value) ? value : amax;
            if (isnan(amax)) {
                return amax;
            }
        }
    }
    return amax;
}

static float whole_amax(const scene_t *scene)
{
    return amax_of(scene, (const uint64_t[]){0, 0},
                   (const uint64_t[]){scene->rows, scene->cols});
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t edge(uint32_t block, uint64_t index, uint64_t whole)
{
    return block > 0 ? index * block : index * whole;
}

/* Where the scale and the codes of what a piece holds of one block go. */
static void expect_block(scene_t *scene, const wsync_quantise_piece_t *piece, uint64_t br,
                         uint64_t bc, float overall)
{
    const wsync_quantise_method_t *method = &scene->method;
    const uint64_t begin[2] = {edge(method->block_rows, br, scene->rows),
                               edge(method->block_cols, bc, scene->cols)};
    const uint64_t end[2] = {edge(method->block_rows, br + 1, scene->rows),
                             edge(method->block_cols, bc + 1, scene->cols)};
    const reference_scale_t scale =
        reference_block(method, piece->dtype, amax_of(scene, begin, end), overall);
    const uint64_t nbytes =
        wsync_dtype_nbytes(wsync_quantise_scale(method->kind, piece->dtype));
    const unsigned codes = wsync_quantise_codes(method->kind);

    if (method->kind != WSYNC_QUANTISE_FP8_PACKED) {
        memcpy(scene->expected + piece->scales +
                   (br - wsync_quantise_rows(piece).first) * piece->scales_stride +
                   (bc - wsync_quantise_cols(piece).first) * nbytes,
               &scale.bits, nbytes);
    }
    for (uint64_t row = most(begin[0], piece->start[0]);
         row < end[0] && row < piece->start[0] + piece->extent[0]; row++) {
        unsigned char *to =
            scene->expected + piece->codes + (row - piece->start[0]) * piece->codes_stride;

        for (uint64_t col = most(begin[1], piece->start[1]);
             col < end[1] && col < piece->start[1] + piece->extent[1]; col++) {
            const uint64_t at = col - piece->start[1];
            const float value =
                value_of(scene->weight, scene->bits[row * scene->cols + col]);
            const unsigned code = reference_code(method, piece->dtype, &scale, value);

            if (codes == 1) {
                to[at] = (unsigned char)code;
            } else {
                to[at / 2] |= (unsigned char)(code << (at % 2 * 4));
            }
        }
    }
}

/* For each row of a piece the exponents of all blocks that share a word with its own. */
static void expect_words(scene_t *scene, const wsync_quantise_piece_t *piece)
{
    const wsync_quantise_method_t *method = &scene->method;
    const uint64_t first = piece->start[1] / method->block_cols / 4 * 4;
    const uint64_t last = (piece->start[1] + piece->extent[1] - 1) / method->block_cols;

    for (uint64_t row = 0; row < piece->extent[0]; row++) {
        const uint64_t block = (piece->start[0] + row) / method->block_rows;
        unsigned char *to = scene->expected + piece->scales + row * piece->scales_stride;

        for (uint64_t col = first; col < (last / 4 + 1) * 4; col++) {
            const uint64_t begin[2] = {block * method->block_rows,
                                       col * method->block_cols};
            const uint64_t end[2] = {begin[0] + method->block_rows,
                                     begin[1] + method->block_cols};
            const float amax = amax_of(scene, begin, end);

            to[col - first] = 0;
            if (begin[1] < scene->cols) {
                to[col - first] =
                    (unsigned char)reference_block(method, piece->dtype, amax, 0).bits;
            }
        }
    }
}

static void expect(scene_t *scene)
{
    const float overall = whole_amax(scene);
    const uint32_t second = reference_second(overall);

    memset(scene->expected, GUARD, scene->used + 64);
    for (size_t i = 0; i < scene->count; i++) {
        const wsync_quantise_piece_t *piece = &scene->pieces[i];
        const wsync_quantise_blocks_t rows = wsync_quantise_rows(piece);
        const wsync_quantise_blocks_t cols = wsync_quantise_cols(piece);

        if (wsync_quantise_empty(piece)) {
            continue;
        }
        for (uint64_t r = 0; r < piece->extent[0]; r++) {
            memset(scene->expected + piece->codes + r * piece->codes_stride, 0,
                   wsync_quantise_words(piece) *
                       wsync_dtype_nbytes(wsync_quantise_word(scene->method.kind)));
        }
        for (uint64_t r = rows.first; r < rows.first + rows.count; r++) {
            for (uint64_t c = cols.first; c < cols.first + cols.count; c++) {
                expect_block(scene, piece, r, c, overall);
            }
        }
        if (piece->second != WSYNC_QUANTISE_NONE) {
            memcpy(scene->expected + piece->second, &second, sizeof(second));
        }
        if (scene->method.kind == WSYNC_QUANTISE_FP8_PACKED) {
            expect_words(scene, piece);
        }
    }
}

/* Takes bytes of the image. */
static uint64_t take(scene_t *scene, uint64_t nbytes, uint64_t align)
{
    const uint64_t offset =
        (scene->used + draw(&scene->random, 3) * align + align - 1) / align * align;

    scene->used = offset + nbytes;
    CHECK(scene->used + 64 <= IMAGE_NBYTES);
    return offset;
}

/* Puts the elements of a piece into its buffer, in one of several orders. */
static void place_source(scene_t *scene, wsync_quantise_piece_t *piece)
{
    random_state_t *random = &scene->random;
    const int64_t item = (int64_t)wsync_dtype_nbytes(piece->dtype);
    const int64_t rows = (int64_t)piece->extent[0];
    const int64_t cols = (int64_t)piece->extent[1];
    unsigned char *data = scene->sources[piece->source_buffer].data;
    int64_t offset = scene->even ? 0 : item * (int64_t)draw(random, 9);

    switch (scene->even ? 4 : draw(random, 4)) {
    case 4:
        piece->source_stride[1] = item;
        piece->source_stride[0] = item * ((cols + 7) / 8 + (int64_t)draw(random, 2)) * 8;
        break;
    case 0: /* transposed */
        piece->source_stride[0] = item;
        piece->source_stride[1] = item * (rows + (int64_t)draw(random, 4));
        break;
    case 1: /* backwards */
        piece->source_stride[0] = -item * (cols + 3);
        piece->source_stride[1] = -item;
        offset += item * (cols + 3) * rows + item * cols;
        break;
    case 2: /* apart */
        piece->source_stride[1] = 2 * item;
        piece->source_stride[0] = item * (2 * cols + (int64_t)draw(random, 5));
        break;
    default:
        piece->source_stride[1] = item;
        piece->source_stride[0] = item * (cols + (int64_t)draw(random, 3) * 5);
        break;
    }
    piece->source_offset = (uint64_t)offset;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            const uint32_t *from =
                &scene->bits[(piece->start[0] + (uint64_t)r) * scene->cols +
                             piece->start[1] + (uint64_t)c];
            const int64_t at =
                offset + r * piece->source_stride[0] + c * piece->source_stride[1];

            CHECK(at >= 0 && at + item <= SOURCE_NBYTES);
            memcpy(data + at, from, (size_t)item);
        }
    }
}

/* The piece with these rows and columns of the matrix. */
static void add_piece(scene_t *scene, const uint64_t begin[2], const uint64_t end[2])
{
    wsync_quantise_piece_t *piece = &scene->pieces[scene->count];
    const wsync_quantise_method_t *method = &scene->method;
    const uint64_t word = wsync_dtype_nbytes(wsync_quantise_word(method->kind));
    uint64_t scale;

    *piece = (wsync_quantise_piece_t){
        .method = *method,
        .dtype = dtype_of(scene->weight),
        .source_buffer = (uint32_t)scene->count,
        .start = {begin[0], begin[1]},
        .extent = {end[0] - begin[0], end[1] - begin[1]},
        .amaxes = WSYNC_QUANTISE_NONE,
        .overall = WSYNC_QUANTISE_NONE,
        .second = WSYNC_QUANTISE_NONE,
    };
    scene->count++;
    if (wsync_quantise_empty(piece)) {
        return;
    }
    scale = wsync_dtype_nbytes(wsync_quantise_scale(method->kind, piece->dtype));
    piece->codes_stride =
        (wsync_quantise_words(piece) + draw(&scene->random, 2) * (scene->even ? 4 : 3)) *
        word;
    piece->codes = take(scene, piece->extent[0] * piece->codes_stride,
                        scene->even ? 4 * (1 + draw(&scene->random, 4)) : word);
    if (method->block_cols > 0) {
        piece->grid[0] = (scene->rows - 1) / method->block_rows + 1;
        piece->grid[1] = (scene->cols - 1) / method->block_cols + 1;
    }
    piece->scales_stride =
        (wsync_quantise_scales(piece).cols + draw(&scene->random, 2)) * scale;
    piece->scales =
        take(scene, wsync_quantise_scales(piece).rows * piece->scales_stride, scale);
    if (scene->tabled) {
        piece->amaxes = 2;
        piece->amax_stride = piece->grid[1] + scene->rows % 2;
    }
    if (method->kind == WSYNC_QUANTISE_NVFP4) {
        piece->overall = 1;
        piece->second = take(scene, 4, 4);
    }
    place_source(scene, piece);
}

/* An index to cut at: with a table, anywhere between words. */
static uint64_t draw_cut(scene_t *scene, uint64_t whole, uint32_t block, uint64_t codes)
{
    const uint64_t at = draw(&scene->random, whole + 1);
    const uint64_t grain = scene->tabled ? codes : block;

    return grain > 0 ? at / grain * grain : 0;
}

static void draw_scene(scene_t *scene)
{
    random_state_t *random = &scene->random;
    const bool large = draw(random, 4) == 0;
    uint64_t cut[2];

    draw_method(scene);
    scene->weight =
        scene->even ? WSYNC_WEIGHT_BF16 : (unsigned)draw(random, WSYNC_WEIGHT_COUNT);
    scene->tabled = draw(random, 2) == 0;
    scene->rows = 1 + draw(random, large ? MAX_ROWS : 40);
    scene->cols = 1 + draw(random, large ? MAX_COLS : 400);
    if (scene->even && draw(random, 4) != 0) {
        scene->cols = (scene->cols + 7) / 8 * 8;
    }
    if (scene->rows * scene->cols > MAX_ELEMENTS) {
        scene->rows = MAX_ELEMENTS / scene->cols;
    }
    for (uint64_t i = 0; i < scene->rows * scene->cols; i++) {
        scene->bits[i] = draw_weight(random, scene->weight);
        if (scene->wild && draw(random, 500) == 0) {
            scene->bits[i] = odd_weight(random, scene->weight);
        }
    }
    for (uint64_t i = draw(random, 4) == 0 ? draw(random, 4) : 0; i > 0; i--) {
        scene->bits[draw(random, scene->rows * scene->cols)] =
            odd_weight(random, scene->weight);
    }
    scene->count = 0;
    scene->used = 0;
    cut[0] = draw_cut(scene, scene->rows, scene->method.block_rows, 1);
    cut[1] = draw_cut(
        scene, scene->cols,
        scene->method.block_cols * wsync_quantise_scales_in_word(scene->method.kind),
        scene->even ? 8 : wsync_quantise_codes(scene->method.kind));
    for (int i = 0; i < 4; i++) {
        const uint64_t begin[2] = {i / 2 == 0 ? 0 : cut[0], i % 2 == 0 ? 0 : cut[1]};
        const uint64_t end[2] = {i / 2 == 0 ? cut[0] : scene->rows,
                                 i % 2 == 0 ? cut[1] : scene->cols};

        if (draw(random, 8) != 0 || (begin[0] < end[0] && begin[1] < end[1])) {
            add_piece(scene, begin, end);
        }
    }
}

static void reset(scene_t *scene)
{
    memset(scene->amaxes, 0, MAX_BLOCKS * sizeof(*scene->amaxes));
    memset(scene->image, GUARD, scene->used + 64);
}

static wsync_quantise_batch_t batch_of(const scene_t *scene, wsync_quantise_pass_t pass)
{
    return (wsync_quantise_batch_t){.pieces = scene->pieces,
                                    .count = scene->count,
                                    .sources = scene->sources,
                                    .source_count = MAX_PIECES,
                                    .image = {scene->image, scene->used},
                                    .amaxes = {scene->amaxes, MAX_BLOCKS * sizeof(float)},
                                    .pass = pass};
}

static void compare(const scene_t *scene, int round)
{
    for (uint64_t i = 0; i < scene->used + 64; i++) {
        if (scene->image[i] != scene->expected[i]) {
            FAIL(
                "round %d: %s of dtype %u, blocks %u x %u of %llu x %llu in %zu pieces: "
                "byte %llu is %x, not %x",
                round, wsync_quantise_kind_name(scene->method.kind), scene->weight,
                scene->method.block_rows, scene->method.block_cols,
                (unsigned long long)scene->rows, (unsigned long long)scene->cols,
                scene->count, (unsigned long long)i, scene->image[i], scene->expected[i]);
        }
    }
}

/* Both passes, each in parts drawn at random and taken in order. */
static void run_parts(scene_t *scene)
{
    for (int pass = WSYNC_QUANTISE_AMAXES; pass <= WSYNC_QUANTISE_CODES; pass++) {
        const wsync_quantise_batch_t batch = batch_of(scene, (wsync_quantise_pass_t)pass);
        const wsync_host_quantise_t list = wsync_host_quantise(&batch);
        wsync_host_cursor_t cursors[2] = {{0}, {0}};
        wsync_error_t err = {0};
        uint64_t begin = 0;

        CHECK_OK(
            wsync_quantise_check(batch.pieces, batch.count, batch.sources,
                                 batch.source_count, &batch.image, &batch.amaxes, &err),
            err);
        while (begin < list.work) {
            uint64_t end = begin + 1 + draw(&scene->random, list.work);

            end = end < list.work ? end : list.work;
            wsync_host_quantise_run(&list, begin, end, &cursors[draw(&scene->random, 2)]);
            begin = end;
        }
    }
}

TEST(any_part_of_any_matrix_matches_the_reference)
{
    scene_t scene;

    scene_init(&scene, 1);
    for (int round = 0; round < 150; round++) {
        draw_scene(&scene);
        expect(&scene);
        reset(&scene);
        run_parts(&scene);
        compare(&scene, round);
    }
    scene_fini(&scene);
}

static void check_stream(const wsync_device_t *device, unsigned threads)
{
    wsync_stream_t *stream = NULL;
    wsync_error_t err = {0};
    scene_t scene;

    scene_init(&scene, 10 + threads);
    CHECK_OK(wsync_stream_create(device, threads, &stream, &err), err);
    for (int round = 0; round < 30; round++) {
        wsync_quantise_batch_t first;
        wsync_quantise_batch_t second;

        draw_scene(&scene);
        expect(&scene);
        reset(&scene);
        first = batch_of(&scene, WSYNC_QUANTISE_AMAXES);
        second = batch_of(&scene, WSYNC_QUANTISE_CODES);
        CHECK_OK(wsync_stream_quantise(stream, &first, &err), err);
        CHECK_OK(wsync_stream_quantise(stream, &second, &err), err);
        CHECK_OK(wsync_stream_synchronize(stream, 60000, &err), err);
        compare(&scene, round);
    }
    wsync_stream_destroy(stream);
    scene_fini(&scene);
}

TEST(a_stream_of_one_thread_matches_the_reference)
{
    check_stream(wsync_device_host(), 1);
}

TEST(a_stream_of_four_threads_matches_the_reference)
{
    check_stream(wsync_device_host(), 4);
}

TEST(a_stream_of_a_played_gpu_matches_the_reference)
{
    CHECK_EQ(setenv("WSYNC_TEST_DEVICE", "cuda", 1), 0);
    CHECK_EQ(setenv("WSYNC_FAKE_CUDA_PAGEABLE", "1", 1), 0);
    check_stream(test_device(), 1);
}

/* --- the arithmetic --- */

/* The casts of every float of 20 leading bits, and the neighbours of their borders. */
TEST(casts_match_a_search)
{
    for (uint64_t top = 0; top < 1U << 20; top++) {
        const uint32_t near[] = {(uint32_t)top << 12, (uint32_t)top << 12 | 1,
                                 ((uint32_t)top << 12) - 1};

        for (int i = 0; i < 3; i++) {
            const float value = float_of(near[i]);
            double whole = isnan(value) ? 0 : (double)value;

            CHECK_EQ(wsync_e4m3_from_f32(value), reference_e4m3((double)value));
            CHECK_EQ(wsync_e2m1_from_f32(value), reference_e2m1((double)value));
            whole = whole > 7 ? 7 : whole < -8 ? -8 : whole;
            CHECK_EQ(wsync_int4_from_f32(value, -8),
                     isnan(value) ? 8 : reference_int4((float)whole));
            if (signbit(value) == 0 && !isnan(value)) {
                CHECK_EQ(wsync_e8m0_from_f32(value),
                         isinf(value) ? 254 : 127 + power_above(value, -127));
            }
            for (unsigned weight = 0; weight < WSYNC_WEIGHT_COUNT && !isnan(value);
                 weight++) {
                const float rounded = round_weight(dtype_of(weight), value);

                CHECK_EQ(wsync_bits(wsync_weight_round(weight, value)), bits_of(rounded));
                CHECK_EQ(wsync_weight_bits(weight, value),
                         weight_bits(dtype_of(weight), rounded));
            }
        }
    }
    for (unsigned code = 0; code < 0x100; code++) {
        const float value = wsync_f32_from_e4m3(code);

        CHECK_EQ((code & 0x7f) == 0x7f, isnan(value));
        CHECK(isnan(value) || wsync_e4m3_from_f32(value) == code);
    }
}

/* Every bf16 and every half, and as many floats, by factors of every size: whatever the
 * instruction set, the bits are those of the plain loop. */
TEST(instruction_sets_agree)
{
    enum { COUNT = 65536, EVERY = 1 << 16 };
    random_state_t random = {3};
    unsigned char *rows = allocate(COUNT * 4);
    unsigned char *codes[2] = {allocate(COUNT), allocate(COUNT)};
    float *factors = allocate(COUNT * sizeof(*factors));
    unsigned compared = 0;

    for (unsigned level = 0; wsync_row_functions(level) != NULL; level++) {
        const wsync_row_functions_t *set = wsync_row_functions(level);

        for (uint32_t i = 0; i < COUNT; i++) {
            factors[i] = float_of((uint32_t)draw(&random, 0x7f800001U));
        }
        for (int e = 0; e < WSYNC_ENCODING_COUNT; e++) {
            for (unsigned weight = 0; weight < WSYNC_WEIGHT_COUNT; weight++) {
                for (uint32_t i = 0; i < COUNT; i++) {
                    const uint32_t wide = i << 16 | (uint32_t)draw(&random, EVERY);
                    const uint16_t half = (uint16_t)i;

                    if (weight == WSYNC_WEIGHT_F32) {
                        memcpy(rows + 4 * i, &wide, sizeof(wide));
                    } else {
                        memcpy(rows + 2 * i, &half, sizeof(half));
                    }
                }
                wsync_row_functions(0)->codes[e][weight](rows, factors, COUNT - 3,
                                                         codes[0]);
                set->codes[e][weight](rows, factors, COUNT - 3, codes[1]);
                CHECK(memcmp(codes[0], codes[1], COUNT - 3) == 0);
                compared++;
            }
        }
    }
    (void)printf("compared %u loops\n", compared);
    free(factors);
    free(codes[0]);
    free(codes[1]);
    free(rows);
}

/* The largest magnitude of `count` weights, as bits. */
static int32_t largest_of(const unsigned char *rows, size_t item, size_t count)
{
    int32_t largest = 0;

    for (size_t i = 0; i < count; i++) {
        int32_t value = 0;

        memcpy(&value, rows + i * item, item);
        value &= item == 4 ? INT32_MAX : INT16_MAX;
        largest = value > largest ? value : largest;
    }
    return largest;
}

/* Blocks of a row's weights of any bits, of columns of two rows, and of rows that begin
 * and end inside blocks. */
TEST(largest_magnitudes_are_found)
{
    static const size_t widths[] = {1, 2, 3, 8, 16, 20, 32, 64, 96, 128, 500, 1024, 2048};
    random_state_t random = {7};
    unsigned char rows[2][WSYNC_ROW_NBYTES + 2];
    int32_t most[WSYNC_ROW_NBYTES / sizeof(int32_t)];
    int32_t room[WSYNC_ROW_NBYTES / sizeof(int32_t)];

    for (unsigned level = 0; wsync_row_functions(level) != NULL; level++) {
        const wsync_row_functions_t *set = wsync_row_functions(level);

        for (int run = 0; run < 500; run++) {
            const unsigned wide = run % 2 == 0;
            const size_t item = wide ? 4 : 2;
            const size_t count = 1 + draw(&random, WSYNC_ROW_NBYTES / item);
            const size_t width = widths[draw(&random, sizeof(widths) / sizeof(widths[0]))];
            const size_t head = 1 + draw(&random, width);
            int32_t found[2][WSYNC_ROW_NBYTES];
            size_t begin = 0;

            for (size_t i = 0; i < sizeof(rows[0]); i++) {
                rows[0][i] = (unsigned char)draw(&random, 256);
                rows[1][i] = (unsigned char)draw(&random, 256);
            }
            memset(found, 0, sizeof(found));
            set->largest[wide](rows[0] + 2, count, head, width, room, found[0]);
            set->magnitudes[wide](rows[0] + 2, count, true, most);
            set->magnitudes[wide](rows[1] + 2, count, false, most);
            set->largest[wide](most, count, head, width, room, found[1]);
            for (size_t b = 0; begin < count; b++) {
                const size_t whole = b == 0 ? head : width;
                const size_t part = whole < count - begin ? whole : count - begin;
                const int32_t first = largest_of(rows[0] + 2 + begin * item, item, part);
                const int32_t other = largest_of(rows[1] + 2 + begin * item, item, part);

                CHECK_EQ(found[0][b], first);
                CHECK_EQ(found[1][b], first > other ? first : other);
                begin += part;
            }
        }
    }
}

enum { SCALES = 4099 };

/* The scales of some amaxes, by each instruction set, against the reference. */
static void check_scales(const wsync_quantise_method_t *method, unsigned weight,
                         const float *amaxes, float overall)
{
    const wsync_row_method_t row = {method->kind, method->reciprocal, weight, overall};
    unsigned bits[SCALES];
    float factors[SCALES];

    for (unsigned level = 0; wsync_row_functions(level) != NULL; level++) {
        wsync_row_functions(level)->scales(&row, amaxes, SCALES, bits, factors);
        for (int i = 0; i < SCALES; i++) {
            CHECK_EQ(bits[i],
                     reference_block(method, dtype_of(weight), amaxes[i], overall).bits);
        }
    }
}

TEST(scales_of_all_sizes_match_the_reference)
{
    random_state_t random = {5};
    float amaxes[SCALES] = {0, NAN, INFINITY};

    for (unsigned weight = 0; weight < WSYNC_WEIGHT_COUNT; weight++) {
        for (int kind = 0; kind < WSYNC_QUANTISE_COUNT; kind++) {
            const wsync_quantise_method_t method = {.kind = (wsync_quantise_kind_t)kind,
                                                    .reciprocal = draw(&random, 2) == 0};

            for (int i = 3; i < SCALES; i++) {
                amaxes[i] = round_weight(dtype_of(weight),
                                         float_of((uint32_t)draw(&random, 0x7f800000U)));
            }
            check_scales(&method, weight, amaxes, 0);
            check_scales(&method, weight, amaxes, amaxes[3]);
            check_scales(&method, weight, amaxes, INFINITY);
            check_scales(&method, weight, amaxes, NAN);
        }
    }
}

/* --- the kernel, as C --- */

static void launch(const scene_t *scene, const wsync_quantise_tasks_t *tasks,
                   wsync_quantise_mode_t mode, float *scratch)
{
    const wsync_quantise_list_t *list = &tasks->lists.of[mode];
    unsigned long long sources[MAX_PIECES];
    wsync_quantise_args_t args = {
        .tasks = (uintptr_t)tasks->items,
        .thread_starts = (uintptr_t)tasks->thread_starts,
        .sources = (uintptr_t)sources,
        .image = (uintptr_t)scene->image,
        .table = (uintptr_t)scene->amaxes,
        .scratch = (uintptr_t)scratch,
        .first = list->first,
        .count = list->count,
        .mode = mode,
    };
    void *params[] = {&args};

    for (int i = 0; i < MAX_PIECES; i++) {
        sources[i] = (uintptr_t)scene->sources[i].data;
    }
    if (list->thread_count > 0) {
        CHECK_EQ(
            wsync_host_kernel_launch(WSYNC_QUANTISE_KERNEL_NAME, wsync_quantise_grid(list),
                                     WSYNC_QUANTISE_BLOCK, params),
            0);
    }
}

static void run_kernel(scene_t *scene)
{
    wsync_quantise_tasks_t tasks;
    float *scratch;
    wsync_error_t err = {0};
    size_t nbytes;

    CHECK_OK(wsync_quantise_tasks_init(&tasks, scene->pieces, scene->count, &err), err);
    nbytes = tasks.lists.scratch_count * sizeof(*scratch);
    scratch = allocate(nbytes + 1);
    memset(scratch, 0, nbytes);
    launch(scene, &tasks, WSYNC_QUANTISE_MODE_TABLE, scratch);
    launch(scene, &tasks, WSYNC_QUANTISE_MODE_SCRATCH, scratch);
    launch(scene, &tasks, WSYNC_QUANTISE_MODE_CODES, scratch);
    free(scratch);
    wsync_quantise_tasks_fini(&tasks);
}

static void compare_kernel(uint64_t seed, bool wild, bool even, int rounds)
{
    float *table = allocate(MAX_BLOCKS * sizeof(*table));
    uint64_t nbytes = 0;
    scene_t scene;

    scene_init(&scene, seed);
    scene.wild = wild;
    scene.even = even;
    for (int round = 0; round < rounds; round++) {
        draw_scene(&scene);
        reset(&scene);
        run_parts(&scene);
        memcpy(scene.expected, scene.image, scene.used + 64);
        memcpy(table, scene.amaxes, MAX_BLOCKS * sizeof(*table));
        reset(&scene);
        run_kernel(&scene);
        compare(&scene, round);
        CHECK(memcmp(table, scene.amaxes, MAX_BLOCKS * sizeof(*table)) == 0);
        nbytes += scene.used;
    }
    scene_fini(&scene);
    free(table);
    (void)printf("%llu bytes compared\n", (unsigned long long)nbytes);
}

TEST(the_kernel_gives_the_bytes_of_the_host)
{
    compare_kernel(3, false, false, 150);
    compare_kernel(6, false, true, 200);
}

TEST(the_kernel_gives_the_bytes_of_the_host_whatever_the_weights)
{
    compare_kernel(4, true, false, 150);
    compare_kernel(7, true, true, 100);
}

/* A float of a mantissa and an exponent. */
static float assembled(uint32_t mantissa, int exponent)
{
    return wsync_float((uint32_t)(127 + exponent) << 23 | mantissa);
}

TEST(quotients_by_a_reciprocal_are_those_of_division)
{
    random_state_t random = {5};

    for (int i = 0; i < 2000000; i++) {
        const int exponent = (int)draw(&random, 129) - 64;
        /* every other scale is next to a power of two */
        const uint32_t mantissa = (uint32_t)draw(&random, i % 2 == 0 ? 1 << 23 : 4);
        const float by = assembled(i % 4 == 1 ? 0x7fffffU - mantissa : mantissa,
                                   exponent < 64 ? exponent : 63);
        const uint32_t digits =
            (uint32_t)draw(&random, 1 << 23) & (i % 3 == 0 ? ~0U : ~0xffffU);
        const float size = assembled(digits, exponent - 30 + (int)draw(&random, 40));
        const float value = draw(&random, 2) == 0 ? size : -size;
        const float found = wsync_quotient(value, by, 1.0F / by);

        CHECK_EQ(wsync_bits(found), wsync_bits(value / by));
    }
    CHECK_EQ(wsync_bits(wsync_quotient(-0.0F, 3.0F, 1.0F / 3.0F)), 0x80000000U);
}

/* What the kernel makes use of where scales are of bfloat16. */
TEST(quotients_of_bfloat16_may_be_products_where_they_are_rounded_to_it)
{
    for (uint32_t a = 0; a < 128; a++) {
        for (uint32_t b = 0; b < 128; b++) {
            const float value = assembled(a << 16, 0);
            const float by = assembled(b << 16, 0);

            CHECK_EQ(wsync_bf16_from_f32(wsync_bits(value * (1.0F / by))),
                     wsync_bf16_from_f32(wsync_bits(value / by)));
        }
    }
}
