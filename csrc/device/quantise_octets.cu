/* SPDX-License-Identifier: Apache-2.0
 * Weights of bfloat16, eight at a time: their magnitudes and their codes, of blocks that are
 * not out of the ordinary.  A part of kernels.cu, of which it has all words.
 *
 * The codes are those of quantise_math.h with fewer instructions, and with those that a GPU
 * has for two numbers at a time. */
#include "device/quantise_math.h"
#include "device/quantise_table.h"

enum { OCTET = WSYNC_QUANTISE_OCTET, BATCH = WSYNC_QUANTISE_BATCH };

/* What a block's elements are encoded with. */
typedef struct factor {
    float value;
    float reciprocal; /* of the value; 0: it or the weights are out of the ordinary */
} factor_t;

/* The codes of eight columns: bytes of two words, or four bits of one. */
typedef struct codes {
    unsigned low;
    unsigned high;
} codes_t;

/* Eight weights, two in a word. */
typedef struct octet {
    unsigned word[OCTET / 2];
} octet_t;

DEVICE octet_t octet_of(vec16_t raw)
{
    octet_t octet = {{raw.x, raw.y, raw.z, raw.w}};

    return octet;
}

DEVICE unsigned lesser(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

/* The larger one; a NaN is above all. */
DEVICE float larger(float a, float b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float value;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
#else
    return b > a || wsync_is_nan(b) ? b : a;
#endif
}

/* Two values of bfloat16 in a word. */
DEVICE float even_of(unsigned pair)
{
    return wsync_float(pair << 16);
}

DEVICE float odd_of(unsigned pair)
{
    return wsync_float(pair & 0xffff0000U);
}

DEVICE unsigned pair_of(float even, float odd)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(odd), "f"(even));
    return pair;
#else
    return wsync_bf16_from_f32(wsync_bits(even)) | wsync_bf16_from_f32(wsync_bits(odd))
                                                       << 16;
#endif
}

/* As `larger`. */
DEVICE unsigned larger_pair(unsigned a, unsigned b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    return pair_of(larger(even_of(a), even_of(b)), larger(odd_of(a), odd_of(b)));
#endif
}

DEVICE unsigned smaller_pair(unsigned a, unsigned b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
#else
    return larger_pair(a ^ 0x80008000U, b ^ 0x80008000U) ^ 0x80008000U;
#endif
}

/* The sums, rounded to bfloat16.  They are rounded once: in float32 they are exact, or next
 * to a number of bfloat16, where one is a whole number and the other at most 16. */
DEVICE unsigned add_pair(unsigned a, unsigned b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(0x3f803f80U), "r"(b));
    return a;
#else
    return pair_of(WSYNC_ADD(even_of(a), even_of(b)), WSYNC_ADD(odd_of(a), odd_of(b)));
#endif
}

/* The largest magnitude of the octets from `begin` to `end`, and of what was found. */
DEVICE float raise_batch(const vec16_t *raw, unsigned begin, unsigned end, float found)
{
    unsigned most = 0;

    UNROLL for (unsigned i = begin; i < end; i++)
    {
        const octet_t octet = octet_of(raw[i]);

        UNROLL for (unsigned k = 0; k < OCTET / 2; k++)
        {
            most = larger_pair(most, octet.word[k] & 0x7fff7fffU);
        }
    }
    return larger(found, larger(even_of(most), odd_of(most)));
}

/* Codes of two elements, the second one's above. */
DEVICE unsigned e4m3_pair(float even, float odd)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(odd), "f"(even));
    return pair;
#else
    return wsync_e4m3_from_f32(even) | wsync_e4m3_from_f32(odd) << 8;
#endif
}

DEVICE codes_t e4m3_octet(const float *value)
{
    codes_t codes;

    codes.low = e4m3_pair(value[0], value[1]) | e4m3_pair(value[2], value[3]) << 16;
    codes.high = e4m3_pair(value[4], value[5]) | e4m3_pair(value[6], value[7]) << 16;
    return codes;
}

/* The last four bits of floats from 2^23 to 2^24, one after another.  Their sum has the
 * exponents as well, which are known. */
DEVICE codes_t join_octet(const unsigned *bits)
{
    codes_t codes = {0U - 0x3f400000U, 0};

    UNROLL for (unsigned i = 0; i < OCTET; i++)
    {
        codes.low += bits[i] << (4 * i);
    }
    return codes;
}

/* As wsync_int4_from_f32, of values from -7 to 7. */
DEVICE codes_t int4_octet(const float *value)
{
    unsigned code[OCTET];

    UNROLL for (unsigned i = 0; i < OCTET; i++)
    {
        code[i] = wsync_bits(WSYNC_ADD(value[i], 12582920.0F));
    }
    return join_octet(code);
}

/* The same of values of bfloat16, which are cut to [-8, 7].  From 128 on bfloat16 is whole:
 * 200, or 0x4348, is for 0. */
DEVICE codes_t int4_pairs(const unsigned *pair)
{
    codes_t codes = {0, 0};

    UNROLL for (unsigned i = 0; i < OCTET / 2; i++)
    {
        const unsigned sum = add_pair(pair[i], 0x43484348U);
        const unsigned whole = smaller_pair(larger_pair(sum, 0x43404340U), 0x434f434fU);

        codes.low |= ((whole & 0xfU) | ((whole >> 12) & 0xf0U)) << (8 * i);
    }
    return codes;
}

/* As wsync_e2m1_from_f32.  Codes stand for steps of 0.5 up to 2, of 1 up to 4, of 2 from
 * there: the number of steps is the least of three lines, each rounded for itself. */
DEVICE codes_t e2m1_octet(const float *value, const octet_t *raw)
{
    const unsigned *word = raw->word;
    unsigned code[OCTET];
    codes_t codes;

    UNROLL for (unsigned i = 0; i < OCTET; i++)
    {
        const float size = wsync_float(wsync_bits(value[i]) & 0x7fffffffU);
        const unsigned small = wsync_bits(WSYNC_FMA(size, 2.0F, 12582912.0F));
        const unsigned middle = wsync_bits(WSYNC_ADD(size, 12582914.0F));
        const unsigned large = wsync_bits(WSYNC_FMA(size, 0.5F, 12582916.0F));

        code[i] = lesser(lesser(small, middle), lesser(large, 0x4b400007U));
    }
    codes = join_octet(code);
    /* Signs are those of the weights. */
    codes.low |= ((word[0] >> 12) & 0x8U) | ((word[1] >> 4) & 0x800U) |
                 ((word[2] << 4) & 0x80000U) | ((word[3] << 12) & 0x8000000U);
    codes.low |= ((word[0] >> 24) & 0x80U) | ((word[1] >> 16) & 0x8000U) |
                 ((word[2] >> 8) & 0x800000U) | (word[3] & 0x80000000U);
    return codes;
}

/* Multiplied or divided as wsync_quantise_element does it.  What is divided by a scale of
 * bfloat16 and rounded to it may as well be multiplied: a quotient of two numbers of 8 bits
 * is never so near the middle between two others that it matters. */
DEVICE void scale_octet(unsigned encoding, factor_t factor, float *value)
{
    UNROLL for (unsigned i = 0; i < OCTET; i++)
    {
        if (encoding == WSYNC_ENCODING_E4M3_MULTIPLY ||
            encoding == WSYNC_ENCODING_E2M1_MULTIPLY) {
            value[i] = WSYNC_MULTIPLY(value[i], factor.value);
        } else if (encoding == WSYNC_ENCODING_INT4_DIVIDE_ROUND) {
            value[i] = WSYNC_MULTIPLY(value[i], factor.reciprocal);
        } else {
            value[i] = wsync_quotient(value[i], factor.value, factor.reciprocal);
        }
    }
}

DEVICE codes_t encode_whole(unsigned encoding, vec16_t raw, factor_t factor)
{
    const octet_t octet = octet_of(raw);
    unsigned pair[OCTET / 2];
    float value[OCTET];

    UNROLL for (unsigned i = 0; i < OCTET; i += 2)
    {
        value[i] = even_of(octet.word[i / 2]);
        value[i + 1] = odd_of(octet.word[i / 2]);
    }
    scale_octet(encoding, factor, value);
    UNROLL for (unsigned i = 0; i < OCTET / 2; i++)
    {
        pair[i] = pair_of(value[2 * i], value[2 * i + 1]);
        if (encoding == WSYNC_ENCODING_E4M3_DIVIDE_ROUND) {
            value[2 * i] = even_of(pair[i]);
            value[2 * i + 1] = odd_of(pair[i]);
        }
    }
    switch (encoding) {
    case WSYNC_ENCODING_INT4_DIVIDE_ROUND:
        return int4_pairs(pair);
    case WSYNC_ENCODING_INT4_DIVIDE:
        return int4_octet(value);
    case WSYNC_ENCODING_E2M1_MULTIPLY:
        return e2m1_octet(value, &octet);
    default:
        return e4m3_octet(value);
    }
}

/* Encodes a batch, of which the first half has one factor and the second another. */
#define BATCH_CASE(encoding)                                                    \
    case encoding:                                                              \
        UNROLL for (unsigned i = 0; i < BATCH; i++)                             \
        {                                                                       \
            codes[i] = encode_whole(encoding, raw[i], factor[i / (BATCH / 2)]); \
        }                                                                       \
        break

DEVICE void encode_batch(unsigned encoding, const vec16_t *raw, const factor_t *factor,
                         codes_t *codes)
{
    switch (encoding) {
        BATCH_CASE(WSYNC_ENCODING_E4M3_MULTIPLY);
        BATCH_CASE(WSYNC_ENCODING_E4M3_DIVIDE);
        BATCH_CASE(WSYNC_ENCODING_E4M3_DIVIDE_ROUND);
        BATCH_CASE(WSYNC_ENCODING_INT4_DIVIDE);
        BATCH_CASE(WSYNC_ENCODING_INT4_DIVIDE_ROUND);
        BATCH_CASE(WSYNC_ENCODING_E2M1_MULTIPLY);
    default:
        break;
    }
}
