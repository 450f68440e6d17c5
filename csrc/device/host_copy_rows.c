/* SPDX-License-Identifier: Apache-2.0 */
#include "device/host_copy_rows.h"

#include <string.h>

#define DEVICE static inline
#include "device/kernel_table.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#else
#define HAVE_X86 0
#endif

enum {
    LINE_NBYTES = 64,
    /* Below this the ragged ends of a row outweigh what streaming saves. */
    STREAMING_MIN_NBYTES = 512,
    /* Two lines at a time: 5 to 10 % faster than one. */
    STEP_NBYTES = 2 * LINE_NBYTES,
    /* From here on the quarters of a row are a page or more apart. */
    QUARTERS_MIN_NBYTES = 4 * 4096,
    /* Elements converted at a time: source and result stay in the first-level cache. */
    CAST_CHUNK = 2048,
    /* Elements a side of a block of single elements. */
    BLOCK = 32,
    /* Bytes a side of a block that is turned in a buffer. */
    TURN_NBYTES = 128,
};

#if HAVE_X86
__attribute__((target("avx2"))) static inline void stream_step(unsigned char *destination,
                                                               const unsigned char *source)
{
    const __m256i *from = (const __m256i *)(const void *)source;
    __m256i *to = (__m256i *)(void *)destination;
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i c = _mm256_loadu_si256(from + 2);
    const __m256i d = _mm256_loadu_si256(from + 3);

    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
    _mm256_stream_si256(to + 2, c);
    _mm256_stream_si256(to + 3, d);
}

/* Copies whole steps to an aligned destination and returns how many bytes it left.  The
 * quarters of a long row take turns: a processor fetches ahead inside a page, and while it
 * begins one in one quarter, the others go on. */
__attribute__((target("avx2"))) static size_t stream_steps(unsigned char *destination,
                                                           const unsigned char *source,
                                                           size_t nbytes)
{
    if (nbytes >= QUARTERS_MIN_NBYTES) {
        const size_t quarter = nbytes / 4 / STEP_NBYTES * STEP_NBYTES;

        for (size_t at = 0; at < quarter; at += STEP_NBYTES) {
            stream_step(destination + at, source + at);
            stream_step(destination + quarter + at, source + quarter + at);
            stream_step(destination + 2 * quarter + at, source + 2 * quarter + at);
            stream_step(destination + 3 * quarter + at, source + 3 * quarter + at);
        }
        destination += 4 * quarter;
        source += 4 * quarter;
        nbytes -= 4 * quarter;
    }
    for (; nbytes >= STEP_NBYTES; nbytes -= STEP_NBYTES) {
        stream_step(destination, source);
        source += STEP_NBYTES;
        destination += STEP_NBYTES;
    }
    return nbytes;
}
#endif

static void copy_streaming(unsigned char *destination, const unsigned char *source,
                           size_t nbytes)
{
#if HAVE_X86
    if (__builtin_cpu_supports("avx2")) {
        const size_t head = (size_t)(-(uintptr_t)destination & (LINE_NBYTES - 1));
        size_t left;

        memcpy(destination, source, head);
        left = stream_steps(destination + head, source + head, nbytes - head);
        destination += nbytes - left;
        source += nbytes - left;
        nbytes = left;
    }
#endif
    memcpy(destination, source, nbytes);
}

void wsync_host_row_copy(unsigned char *destination, const unsigned char *source,
                         size_t nbytes, bool streaming)
{
    if (streaming && nbytes >= STREAMING_MIN_NBYTES) {
        copy_streaming(destination, source, nbytes);
    } else {
        memcpy(destination, source, nbytes);
    }
}

void wsync_host_row_fence(void)
{
#if HAVE_X86
    _mm_sfence();
#endif
}

static inline uint32_t f32_from_bf16(uint16_t bits)
{
    return (uint32_t)bits << 16;
}

/* One function per element type: a tile of single elements, `convert` on their way. */
#define TILE_FUNCTION(name, source_t, destination_t, convert)                             \
    static void name(unsigned char *destination, const unsigned char *source,             \
                     const wsync_host_tile_t *tile)                                       \
    {                                                                                     \
        for (uint64_t j = 0; j < tile->outer_count; j++) {                                \
            const int64_t row = (int64_t)j;                                               \
            const unsigned char *from = source + row * tile->outer_source_stride;         \
            unsigned char *to = destination + row * tile->outer_destination_stride;       \
                                                                                          \
            for (uint64_t i = 0; i < tile->inner_count; i++) {                            \
                const int64_t column = (int64_t)i;                                        \
                source_t value;                                                           \
                destination_t result;                                                     \
                                                                                          \
                memcpy(&value, from + column * tile->inner_source_stride, sizeof(value)); \
                result = convert(value);                                                  \
                memcpy(to + column * tile->inner_destination_stride, &result,             \
                       sizeof(result));                                                   \
            }                                                                             \
        }                                                                                 \
    }

typedef struct pair64 {
    uint64_t low;
    uint64_t high;
} pair64_t;

#define SAME(value) (value)
TILE_FUNCTION(tile_1, uint8_t, uint8_t, SAME)
TILE_FUNCTION(tile_2, uint16_t, uint16_t, SAME)
TILE_FUNCTION(tile_4, uint32_t, uint32_t, SAME)
TILE_FUNCTION(tile_8, uint64_t, uint64_t, SAME)
TILE_FUNCTION(tile_16, pair64_t, pair64_t, SAME)
TILE_FUNCTION(tile_f32_to_bf16, uint32_t, uint16_t, (uint16_t)wsync_bf16_from_f32)
TILE_FUNCTION(tile_f32_to_f16, uint32_t, uint16_t, (uint16_t)wsync_f16_from_f32)
TILE_FUNCTION(tile_bf16_to_f32, uint16_t, uint32_t, f32_from_bf16)
#define COMPUTED(value) \
    wsync_convert(tile->transform, value, tile->affine.scale, tile->affine.offset)
TILE_FUNCTION(compute_4_to_4, uint32_t, uint32_t, COMPUTED)
TILE_FUNCTION(compute_4_to_2, uint32_t, uint16_t, (uint16_t)COMPUTED)
TILE_FUNCTION(compute_2_to_4, uint16_t, uint32_t, COMPUTED)
TILE_FUNCTION(compute_2_to_2, uint16_t, uint16_t, (uint16_t)COMPUTED)
#undef COMPUTED
#undef SAME

/* The same for a true transpose, whose source steps by one element along the outer and
 * whose destination along the inner dimension: through a small buffer, so that a line is
 * used up when it is touched.  Without it strides of a power of two, which share few cache
 * sets, are three times slower. */
#define TURN_FUNCTION(name, type)                                                        \
    static void name(unsigned char *destination, const unsigned char *source,            \
                     const wsync_host_tile_t *tile)                                      \
    {                                                                                    \
        enum { EDGE = TURN_NBYTES / sizeof(type) };                                      \
        type turned[EDGE][EDGE];                                                         \
                                                                                         \
        for (uint64_t i = 0; i < tile->inner_count; i++) {                               \
            const unsigned char *from = source + (int64_t)i * tile->inner_source_stride; \
            type row[EDGE];                                                              \
                                                                                         \
            memcpy(row, from, tile->outer_count * sizeof(type));                         \
            for (uint64_t j = 0; j < tile->outer_count; j++) {                           \
                turned[j][i] = row[j];                                                   \
            }                                                                            \
        }                                                                                \
        for (uint64_t j = 0; j < tile->outer_count; j++) {                               \
            memcpy(destination + (int64_t)j * tile->outer_destination_stride, turned[j], \
                   tile->inner_count * sizeof(type));                                    \
        }                                                                                \
    }

TURN_FUNCTION(turn_1, uint8_t)
TURN_FUNCTION(turn_2, uint16_t)
TURN_FUNCTION(turn_4, uint32_t)
TURN_FUNCTION(turn_8, uint64_t)
TURN_FUNCTION(turn_16, pair64_t)

typedef void (*tile_func_t)(unsigned char *, const unsigned char *,
                            const wsync_host_tile_t *);

typedef struct item_functions {
    uint64_t item_nbytes;
    tile_func_t tile;
    tile_func_t turn;
} item_functions_t;

/* Those for elements of one size; NULL for a size that has none. */
static const item_functions_t *item_functions(uint64_t item_nbytes)
{
    static const item_functions_t known[] = {
        {1, tile_1, turn_1}, {2, tile_2, turn_2},    {4, tile_4, turn_4},
        {8, tile_8, turn_8}, {16, tile_16, turn_16},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].item_nbytes == item_nbytes) {
            return &known[i];
        }
    }
    return NULL;
}

/* Those that cast, and those that compute. */
static const tile_func_t transform_functions[][2] = {
    [WSYNC_TRANSFORM_F32_TO_BF16] = {tile_f32_to_bf16, compute_4_to_2},
    [WSYNC_TRANSFORM_F32_TO_F16] = {tile_f32_to_f16, compute_4_to_2},
    [WSYNC_TRANSFORM_BF16_TO_F32] = {tile_bf16_to_f32, compute_2_to_4},
    [WSYNC_TRANSFORM_F32] = {NULL, compute_4_to_4},
    [WSYNC_TRANSFORM_BF16] = {NULL, compute_2_to_2},
    [WSYNC_TRANSFORM_F16] = {NULL, compute_2_to_2},
};

bool wsync_host_tile_fits(uint64_t item_nbytes)
{
    return item_functions(item_nbytes) != NULL;
}

/* Runs a tile in blocks of at most edge x edge elements. */
static void run_blocks(unsigned char *destination, const unsigned char *source,
                       const wsync_host_tile_t *tile, tile_func_t run, uint64_t edge)
{
    for (uint64_t j = 0; j < tile->outer_count; j += edge) {
        const int64_t row = (int64_t)j;
        const unsigned char *from = source + row * tile->outer_source_stride;
        unsigned char *to = destination + row * tile->outer_destination_stride;
        wsync_host_tile_t block = *tile;

        block.outer_count = tile->outer_count - j < edge ? tile->outer_count - j : edge;
        for (uint64_t i = 0; i < tile->inner_count; i += edge) {
            const int64_t column = (int64_t)i;

            block.inner_count = tile->inner_count - i < edge ? tile->inner_count - i : edge;
            run(to + column * tile->inner_destination_stride,
                from + column * tile->inner_source_stride, &block);
        }
    }
}

void wsync_host_tile_copy(unsigned char *destination, const unsigned char *source,
                          const wsync_host_tile_t *tile, uint64_t item_nbytes)
{
    const item_functions_t *plain =
        tile->transform == WSYNC_TRANSFORM_NONE ? item_functions(item_nbytes) : NULL;
    const tile_func_t run =
        plain != NULL ? plain->tile
                      : transform_functions[tile->transform][tile->affine.scale != 0];
    const int64_t item = (int64_t)item_nbytes;

    if (tile->outer_count == 1) {
        run(destination, source, tile);
    } else if (plain != NULL && tile->inner_destination_stride == item &&
               tile->outer_source_stride == item) {
        run_blocks(destination, source, tile, plain->turn, TURN_NBYTES / item_nbytes);
    } else {
        run_blocks(destination, source, tile, run, BLOCK);
    }
}

#if HAVE_X86
/* These convert as many whole vectors as count holds and return that number. */
__attribute__((target("avx2"))) static size_t cast_f32_to_bf16_avx2(
    unsigned char *destination, const unsigned char *source, size_t count)
{
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i half = _mm256_set1_epi32(0x7fff);
    const __m256i quiet = _mm256_set1_epi32(0x40);
    size_t i;

    for (i = 0; i + 16 <= count; i += 16) {
        __m256i part[2];

        for (int k = 0; k < 2; k++) {
            const __m256i bits = _mm256_loadu_si256(
                (const __m256i *)(const void *)(source + 4 * i + 32 * (size_t)k));
            const __m256 value = _mm256_castsi256_ps(bits);
            const __m256i top = _mm256_srli_epi32(bits, 16);
            const __m256i even = _mm256_and_si256(top, one);
            const __m256i rounded =
                _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(half, even)), 16);
            const __m256i nan =
                _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));

            part[k] = _mm256_blendv_epi8(rounded, _mm256_or_si256(top, quiet), nan);
        }
        /* packus works inside 128-bit lanes: 0xd8 puts the quarters back in order. */
        _mm256_storeu_si256(
            (__m256i *)(void *)(destination + 2 * i),
            _mm256_permute4x64_epi64(_mm256_packus_epi32(part[0], part[1]), 0xd8));
    }
    return i;
}

__attribute__((target("avx2,f16c"))) static size_t cast_f32_to_f16_avx2(
    unsigned char *destination, const unsigned char *source, size_t count)
{
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) {
        const __m256 value = _mm256_castsi256_ps(
            _mm256_loadu_si256((const __m256i *)(const void *)(source + 4 * i)));

        _mm_storeu_si128((__m128i *)(void *)(destination + 2 * i),
                         _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

__attribute__((target("avx2"))) static size_t cast_bf16_to_f32_avx2(
    unsigned char *destination, const unsigned char *source, size_t count)
{
    size_t i;

    for (i = 0; i + 8 <= count; i += 8) {
        const __m128i bits =
            _mm_loadu_si128((const __m128i *)(const void *)(source + 2 * i));

        _mm256_storeu_si256((__m256i *)(void *)(destination + 4 * i),
                            _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    return i;
}
#endif

static size_t cast_vectors(unsigned char *destination, const unsigned char *source,
                           size_t count, wsync_transform_t transform)
{
#if HAVE_X86
    /* Every processor with AVX2 has F16C too. */
    if (__builtin_cpu_supports("avx2")) {
        switch (transform) {
        case WSYNC_TRANSFORM_F32_TO_BF16:
            return cast_f32_to_bf16_avx2(destination, source, count);
        case WSYNC_TRANSFORM_F32_TO_F16:
            return cast_f32_to_f16_avx2(destination, source, count);
        case WSYNC_TRANSFORM_BF16_TO_F32:
            return cast_bf16_to_f32_avx2(destination, source, count);
        default:
            break;
        }
    }
#else
    (void)destination;
    (void)source;
    (void)count;
    (void)transform;
#endif
    return 0;
}

static void cast_chunk(unsigned char *destination, const unsigned char *source,
                       size_t count, wsync_transform_t transform)
{
    const size_t done = cast_vectors(destination, source, count, transform);
    const size_t from = transform == WSYNC_TRANSFORM_BF16_TO_F32 ? 2 : 4;
    const wsync_host_tile_t rest = {
        .inner_count = count - done,
        .outer_count = 1,
        .inner_source_stride = (int64_t)from,
        .inner_destination_stride = 6 - (int64_t)from,
    };

    transform_functions[transform][0](destination + done * (6 - from), source + done * from,
                                      &rest);
}

void wsync_host_row_cast(unsigned char *destination, const unsigned char *source,
                         size_t count, wsync_transform_t transform, bool streaming)
{
    /* Casts are between elements of 2 and of 4 bytes. */
    const size_t from = transform == WSYNC_TRANSFORM_BF16_TO_F32 ? 2 : 4;
    const size_t to = 6 - from;
    unsigned char chunk[CAST_CHUNK * 4];

    if (!streaming || count * to < STREAMING_MIN_NBYTES) {
        cast_chunk(destination, source, count, transform);
        return;
    }
    while (count > 0) {
        const size_t part = count < CAST_CHUNK ? count : CAST_CHUNK;

        cast_chunk(chunk, source, part, transform);
        wsync_host_row_copy(destination, chunk, part * to, true);
        destination += part * to;
        source += part * from;
        count -= part;
    }
}
