/* SPDX-License-Identifier: Apache-2.0
 * Plain loops over quantise_math.h that compilers turn into vectors.  They are inlined,
 * with all choices constant, into functions for each instruction set. */
#define INLINE static inline __attribute__((always_inline))
#define DEVICE INLINE
#include "device/host_quantise_rows.h"

#include <string.h>

#define LARGEST_LOOP(bits)                                                                \
    INLINE int##bits##_t magnitude_##bits(const unsigned char *row, size_t index)         \
    {                                                                                     \
        int##bits##_t value;                                                              \
                                                                                          \
        memcpy(&value, row + index * sizeof(value), sizeof(value));                       \
        return value & INT##bits##_MAX;                                                   \
    }                                                                                     \
    INLINE void magnitudes_##bits(const unsigned char *row, size_t count, bool first,     \
                                  void *found)                                            \
    {                                                                                     \
        int##bits##_t *restrict most = found;                                             \
                                                                                          \
        for (size_t i = 0; i < count; i++) {                                              \
            const int##bits##_t value = magnitude_##bits(row, i);                         \
                                                                                          \
            most[i] = first || value > most[i] ? value : most[i];                         \
        }                                                                                 \
    }                                                                                     \
    INLINE void block_largest_##bits(const unsigned char *row, size_t count,              \
                                     int32_t *magnitude)                                  \
    {                                                                                     \
        int##bits##_t largest = 0;                                                        \
                                                                                          \
        for (size_t i = 0; i < count; i++) {                                              \
            const int##bits##_t value = magnitude_##bits(row, i);                         \
                                                                                          \
            largest = value > largest ? value : largest;                                  \
        }                                                                                 \
        *magnitude = largest > *magnitude ? largest : *magnitude;                         \
    }                                                                                     \
    /* The larger ones of `count` pairs. */                                               \
    INLINE void pairs_##bits(const unsigned char *row, size_t count,                      \
                             int##bits##_t *restrict larger)                              \
    {                                                                                     \
        for (size_t i = 0; i < count; i++) {                                              \
            const int##bits##_t even = magnitude_##bits(row, 2 * i);                      \
            const int##bits##_t odd = magnitude_##bits(row, 2 * i + 1);                   \
                                                                                          \
            larger[i] = even > odd ? even : odd;                                          \
        }                                                                                 \
    }                                                                                     \
    /* Whole blocks, halved all at once for as long as that goes. */                      \
    INLINE void blocks_largest_##bits(const unsigned char *row, size_t blocks,            \
                                      size_t width, void *room,                           \
                                      int32_t *restrict magnitudes)                       \
    {                                                                                     \
        int##bits##_t *halved[2] = {                                                      \
            room, (int##bits##_t *)room + WSYNC_ROW_NBYTES / sizeof(int##bits##_t) / 2};  \
                                                                                          \
        for (unsigned turn = 0; width % 2 == 0; turn ^= 1U) {                             \
            width /= 2;                                                                   \
            pairs_##bits(row, blocks * width, halved[turn]);                              \
            row = (const unsigned char *)halved[turn];                                    \
        }                                                                                 \
        for (size_t b = 0; width == 1 && b < blocks; b++) {                               \
            const int32_t value = magnitude_##bits(row, b);                               \
                                                                                          \
            magnitudes[b] = value > magnitudes[b] ? value : magnitudes[b];                \
        }                                                                                 \
        for (size_t b = 0; width > 1 && b < blocks; b++) {                                \
            block_largest_##bits(row + b * width * sizeof(int##bits##_t), width,          \
                                 &magnitudes[b]);                                         \
        }                                                                                 \
    }                                                                                     \
    INLINE void largest_##bits(const void *most, size_t count, size_t head, size_t width, \
                               void *room, int32_t *magnitudes)                           \
    {                                                                                     \
        const unsigned char *row = most;                                                  \
                                                                                          \
        if (head < width || head > count) {                                               \
            head = head < count ? head : count;                                           \
            block_largest_##bits(row, head, magnitudes);                                  \
            magnitudes++;                                                                 \
            row += head * sizeof(int##bits##_t);                                          \
            count -= head;                                                                \
        }                                                                                 \
        blocks_largest_##bits(row, count / width, width, room, magnitudes);               \
        if (count % width > 0) {                                                          \
            row += count / width * width * sizeof(int##bits##_t);                         \
            block_largest_##bits(row, count % width, &magnitudes[count / width]);         \
        }                                                                                 \
    }

LARGEST_LOOP(16)
LARGEST_LOOP(32)

INLINE void amaxes_loop(unsigned weight, const int32_t *magnitudes, size_t count,
                        float *restrict amaxes)
{
    for (size_t i = 0; i < count; i++) {
        amaxes[i] = wsync_weight_value(weight, (unsigned)magnitudes[i]);
    }
}

INLINE void all_amaxes(unsigned weight, const int32_t *magnitudes, size_t count,
                       float *amaxes)
{
    switch (weight) {
    case WSYNC_WEIGHT_F32:
        amaxes_loop(WSYNC_WEIGHT_F32, magnitudes, count, amaxes);
        break;
    case WSYNC_WEIGHT_BF16:
        amaxes_loop(WSYNC_WEIGHT_BF16, magnitudes, count, amaxes);
        break;
    default:
        amaxes_loop(WSYNC_WEIGHT_F16, magnitudes, count, amaxes);
        break;
    }
}

INLINE void scales_loop(unsigned kind, unsigned weight, const wsync_row_method_t *method,
                        const float *amaxes, size_t count, unsigned *restrict bits,
                        float *restrict factors)
{
    const unsigned reciprocal = method->reciprocal;
    const wsync_nvfp4_overall_t overall = wsync_nvfp4_overall(method->overall);

    for (size_t i = 0; i < count; i++) {
        const wsync_block_scale_t scale =
            wsync_quantise_block(kind, reciprocal, weight, amaxes[i], &overall);

        bits[i] = scale.bits;
        factors[i] = scale.factor;
    }
}

/* Kinds of small blocks are constant, so that their scales are computed in vectors. */
INLINE void all_scales(const wsync_row_method_t *method, const float *amaxes, size_t count,
                       unsigned *bits, float *factors)
{
    const unsigned weight = method->weight;

    switch (method->kind) {
    case WSYNC_QUANTISER_INT4:
        if (weight == WSYNC_WEIGHT_BF16) {
            scales_loop(WSYNC_QUANTISER_INT4, WSYNC_WEIGHT_BF16, method, amaxes, count,
                        bits, factors);
            break;
        }
        scales_loop(WSYNC_QUANTISER_INT4, weight, method, amaxes, count, bits, factors);
        break;
    case WSYNC_QUANTISER_INT4_SLIME:
        if (weight == WSYNC_WEIGHT_BF16) {
            scales_loop(WSYNC_QUANTISER_INT4_SLIME, WSYNC_WEIGHT_BF16, method, amaxes,
                        count, bits, factors);
            break;
        }
        scales_loop(WSYNC_QUANTISER_INT4_SLIME, weight, method, amaxes, count, bits,
                    factors);
        break;
    case WSYNC_QUANTISER_MXFP8:
        scales_loop(WSYNC_QUANTISER_MXFP8, 0, method, amaxes, count, bits, factors);
        break;
    case WSYNC_QUANTISER_NVFP4:
        scales_loop(WSYNC_QUANTISER_NVFP4, 0, method, amaxes, count, bits, factors);
        break;
    default:
        scales_loop(method->kind, weight, method, amaxes, count, bits, factors);
        break;
    }
}

INLINE void spread_blocks(const float *factors, size_t blocks, size_t width,
                          float *restrict columns)
{
    for (size_t b = 0; b < blocks; b++) {
        for (size_t i = 0; i < width; i++) {
            columns[b * width + i] = factors[b];
        }
    }
}

INLINE void spread_all(const float *factors, size_t count, size_t head, size_t width,
                       float *columns)
{
    size_t blocks;

    if (head < width || head > count) {
        head = head < count ? head : count;
        spread_blocks(factors, 1, head, columns);
        factors++;
        columns += head;
        count -= head;
    }
    blocks = count / width;
    switch (width) {
    case 16:
        spread_blocks(factors, blocks, 16, columns);
        break;
    case 32:
        spread_blocks(factors, blocks, 32, columns);
        break;
    default:
        spread_blocks(factors, blocks, width, columns);
        break;
    }
    spread_blocks(factors + blocks, 1, count % width, columns + blocks * width);
}

INLINE uint32_t weight_bits(unsigned weight, const unsigned char *row, size_t index)
{
    uint16_t half;
    uint32_t bits;

    if (weight == WSYNC_WEIGHT_F32) {
        memcpy(&bits, row + index * sizeof(bits), sizeof(bits));
    } else {
        memcpy(&half, row + index * sizeof(half), sizeof(half));
        bits = half;
    }
    return bits;
}

INLINE void codes_loop(unsigned encoding, unsigned weight, const unsigned char *row,
                       const float *factors, size_t count, unsigned char *restrict codes)
{
    for (size_t i = 0; i < count; i++) {
        codes[i] = (unsigned char)wsync_quantise_element(
            encoding, weight, wsync_weight_value(weight, weight_bits(weight, row, i)),
            factors[i]);
    }
}

INLINE void pack_loop(const unsigned char *codes, size_t nbytes,
                      unsigned char *restrict packed)
{
    for (size_t i = 0; i < nbytes; i++) {
        uint16_t pair;

        memcpy(&pair, codes + 2 * i, sizeof(pair));
        packed[i] = (unsigned char)(pair | pair >> 4);
    }
}

#define CODES_FUNCTION(set, encoding, weight)                                             \
    TARGET_##set static void codes_##encoding##_##weight##_##set(                         \
        const unsigned char *row, const float *factors, size_t count,                     \
        unsigned char *codes)                                                             \
    {                                                                                     \
        codes_loop(WSYNC_ENCODING_##encoding, WSYNC_WEIGHT_##weight, row, factors, count, \
                   codes);                                                                \
    }

#define CODES_FUNCTIONS(set, encoding)  \
    CODES_FUNCTION(set, encoding, F32)  \
    CODES_FUNCTION(set, encoding, BF16) \
    CODES_FUNCTION(set, encoding, F16)

#define CODES_ROW(set, encoding)                                  \
    [WSYNC_ENCODING_##encoding] = {codes_##encoding##_F32_##set,  \
                                   codes_##encoding##_BF16_##set, \
                                   codes_##encoding##_F16_##set}

#define WIDTH_FUNCTIONS(set, bits)                                                         \
    TARGET_##set static void magnitudes_##bits##_##set(                                    \
        const unsigned char *row, size_t count, bool first, void *most)                    \
    {                                                                                      \
        if (first) {                                                                       \
            magnitudes_##bits(row, count, true, most);                                     \
        } else {                                                                           \
            magnitudes_##bits(row, count, false, most);                                    \
        }                                                                                  \
    }                                                                                      \
    TARGET_##set static void largest_##bits##_##set(const void *most, size_t count,        \
                                                    size_t head, size_t width, void *room, \
                                                    int32_t *magnitudes)                   \
    {                                                                                      \
        largest_##bits(most, count, head, width, room, magnitudes);                        \
    }

#define FUNCTIONS(set)                                                                     \
    WIDTH_FUNCTIONS(set, 16)                                                               \
    WIDTH_FUNCTIONS(set, 32)                                                               \
    TARGET_##set static void amaxes_##set(unsigned weight, const int32_t *magnitudes,      \
                                          size_t count, float *amaxes)                     \
    {                                                                                      \
        all_amaxes(weight, magnitudes, count, amaxes);                                     \
    }                                                                                      \
    TARGET_##set static void scales_##set(const wsync_row_method_t *method,                \
                                          const float *amaxes, size_t count,               \
                                          unsigned *bits, float *factors)                  \
    {                                                                                      \
        all_scales(method, amaxes, count, bits, factors);                                  \
    }                                                                                      \
    TARGET_##set static void spread_##set(const float *factors, size_t count, size_t head, \
                                          size_t width, float *columns)                    \
    {                                                                                      \
        spread_all(factors, count, head, width, columns);                                  \
    }                                                                                      \
    TARGET_##set static void pack_##set(const unsigned char *codes, size_t nbytes,         \
                                        unsigned char *packed)                             \
    {                                                                                      \
        pack_loop(codes, nbytes, packed);                                                  \
    }                                                                                      \
    CODES_FUNCTIONS(set, E4M3_MULTIPLY)                                                    \
    CODES_FUNCTIONS(set, E4M3_DIVIDE)                                                      \
    CODES_FUNCTIONS(set, E4M3_DIVIDE_ROUND)                                                \
    CODES_FUNCTIONS(set, INT4_DIVIDE)                                                      \
    CODES_FUNCTIONS(set, INT4_DIVIDE_ROUND)                                                \
    CODES_FUNCTIONS(set, E2M1_MULTIPLY)                                                    \
    static const wsync_row_functions_t functions_##set = {                                 \
                                                                                           \
        .magnitudes = {magnitudes_16_##set, magnitudes_32_##set},                          \
        .largest = {largest_16_##set, largest_32_##set},                                   \
        .codes = {CODES_ROW(set, E4M3_MULTIPLY), CODES_ROW(set, E4M3_DIVIDE),              \
                  CODES_ROW(set, E4M3_DIVIDE_ROUND), CODES_ROW(set, INT4_DIVIDE),          \
                  CODES_ROW(set, INT4_DIVIDE_ROUND), CODES_ROW(set, E2M1_MULTIPLY)},       \
        .amaxes = amaxes_##set,                                                            \
        .scales = scales_##set,                                                            \
        .spread = spread_##set,                                                            \
        .pack = pack_##set,                                                                \
    };

#define TARGET_PLAIN
FUNCTIONS(PLAIN)

#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
FUNCTIONS(AVX2)
FUNCTIONS(AVX512)

const wsync_row_functions_t *wsync_row_functions(unsigned level)
{
    switch (level) {
    case 0:
        return &functions_PLAIN;
    case 1:
        return __builtin_cpu_supports("avx2") ? &functions_AVX2 : NULL;
    case 2:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vl")
                   ? &functions_AVX512
                   : NULL;
    default:
        return NULL;
    }
}
#else
const wsync_row_functions_t *wsync_row_functions(unsigned level)
{
    return level == 0 ? &functions_PLAIN : NULL;
}
#endif

const wsync_row_functions_t *wsync_row_functions_best(void)
{
    unsigned level = 0;

    while (wsync_row_functions(level + 1) != NULL) {
        level++;
    }
    return wsync_row_functions(level);
}
