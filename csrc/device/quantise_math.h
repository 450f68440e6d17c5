/* SPDX-License-Identifier: Apache-2.0
 * What a block's scale is and what an element's code, bit for bit, for the host and for
 * kernels.  Read by C and NVRTC, which has no headers: fundamental types alone.  Who
 * includes it says what a DEVICE function is.
 *
 * The sources of the rules, and what each does where weights are out of the ordinary:
 *
 * fp8_block    slime's Triton kernel.  a = max(amax, 1e-10), scale a / 448; x * (1 / scale)
 *              with `reciprocal`, else x / scale.
 * fp8_ue8m0    DeepGEMM's, as in SGLang.  a = max(amax, 1e-4); the scale is a / 448 rounded
 *              up to a power of two from 2^-126 to 2^127.
 * fp8_packed   The same; of its scales the exponents are stored, those of four blocks of a
 *              row of blocks in a word, for each row of weights: DeepGEMM's
 *              get_mn_major_tma_aligned_packed_ue8m0_tensor, row by row.
 * fp8_tensor   slime's torch code, as torch runs it on a processor.  a = max(amax, 1e-12
 *              in the weights' dtype), scale a / 448; x / scale is rounded to the weights'
 *              dtype before it is cast.  On a GPU torch makes of the same code a scale of
 *              a * fl(1 / 448), because that divisor is a number of the host, and divides
 *              by the scale rounded to the weights' dtype, because it has no dimension:
 *              half of all scales differ in the last bit, and 1 % of bfloat16's codes by
 *              one.
 * int4         compressed-tensors' torch code: every step is rounded to the weights' dtype.
 *              Scale amax / 7.5, or the dtype's epsilon where that is 0; codes are x by
 *              the rounded scale, cut to [-8, 7] and rounded.  (Its Triton code does not
 *              round the quotient to the dtype.)
 * int4_slime   slime's CUDA kernel.  Scale max(amax * fl(1 / 7), 1e-5) in float32, stored
 *              in the weights' dtype; codes are x divided by the float32 scale, rounded.
 * mxfp8        Transformer Engine's: amax * fl(1 / 448) rounded up to a power of two, of
 *              which the exponent is stored.
 * nvfp4        Transformer Engine's: with e = 2688 / (amax of all), at most FLT_MAX, and 1
 *              where that amax is 0 or infinite, the second scale is 1 / e, a block's is
 *              e4m3(amax * (e * fl(1 / 6))), and elements are multiplied by
 *              1 / (scale * second), at most FLT_MAX.
 *
 * Rounding is to nearest, ties to even.  Casts to e4m3 and e2m1 saturate and keep the sign
 * of a zero.  Subnormal weights, scales and codes count as what they are.  A block of zeros
 * has the scale that the rule gives for amax 0 (nvfp4: 0, mxfp8: 2^-127) and codes of 0.
 *
 * A NaN makes its whole block NaN: the scale is NaN (an exponent: 255), and so are e4m3
 * codes; codes of int4 are then 0 and of e2m1 6, which the scale makes NaN too.  In nvfp4
 * it makes the second scale NaN and with it all that shares it; in fp8_tensor, the whole
 * tensor.  This is stricter than the kernels, which drop a NaN in fmaxf.  With an infinity
 * fp8_block, fp8_tensor, int4 and int4_slime have an infinite scale, and codes of 0 but for
 * the infinity's own (e4m3: NaN), so that the block is read as NaN.  In the others, which
 * have no infinite scale, it saturates. */
#ifndef WSYNC_DEVICE_QUANTISE_MATH_H
#define WSYNC_DEVICE_QUANTISE_MATH_H

#include "device/kernel_table.h"

/* Division, rounded by itself; no compiler's option makes it another.  And a * b + c,
 * rounded once. */
#ifdef __CUDACC__
#define WSYNC_DIVIDE(a, b) __fdiv_rn(a, b)
#define WSYNC_FMA(a, b, c) __fmaf_rn(a, b, c)
#else
#define WSYNC_DIVIDE(a, b) ((a) / (b))
#define WSYNC_FMA(a, b, c) __builtin_fmaf(a, b, c)
#endif

/* What wsync_quotient divides by: 2^-64 to 2^64. */
#define WSYNC_QUOTIENT_MIN 5.42101086242752217e-20F
#define WSYNC_QUOTIENT_MAX 1.8446744073709551616e+19F

/* Numbered as wsync_quantise_kind_t. */
typedef enum wsync_quantiser {
    WSYNC_QUANTISER_FP8_BLOCK,
    WSYNC_QUANTISER_FP8_UE8M0,
    WSYNC_QUANTISER_FP8_TENSOR,
    WSYNC_QUANTISER_INT4,
    WSYNC_QUANTISER_INT4_SLIME,
    WSYNC_QUANTISER_MXFP8,
    WSYNC_QUANTISER_NVFP4,
    WSYNC_QUANTISER_FP8_PACKED,
} wsync_quantiser_t;

/* The dtype of weights. */
typedef enum wsync_weight {
    WSYNC_WEIGHT_F32,
    WSYNC_WEIGHT_BF16,
    WSYNC_WEIGHT_F16,
} wsync_weight_t;

/* How an element's code comes from the element and the block's factor. */
typedef enum wsync_encoding {
    WSYNC_ENCODING_E4M3_MULTIPLY,     /* e4m3(x * factor) */
    WSYNC_ENCODING_E4M3_DIVIDE,       /* e4m3(x / factor) */
    WSYNC_ENCODING_E4M3_DIVIDE_ROUND, /* the same, the quotient in the weights' dtype */
    WSYNC_ENCODING_INT4_DIVIDE,       /* x / factor in [-7, 7], + 8 */
    WSYNC_ENCODING_INT4_DIVIDE_ROUND, /* the quotient in the weights' dtype, in [-8, 7] */
    WSYNC_ENCODING_E2M1_MULTIPLY,
    WSYNC_ENCODING_COUNT,
} wsync_encoding_t;

/* The scale of a block: the bits that are stored, and with what elements are encoded. */
typedef struct wsync_block_scale {
    unsigned bits;
    float factor;
} wsync_block_scale_t;

/* Of NVFP4: a sixth of e, which scales are made with, and the second scale. */
typedef struct wsync_nvfp4_overall {
    float sixth;
    float second;
} wsync_nvfp4_overall_t;

#ifdef DEVICE

#define WSYNC_NAN_BITS 0x7fc00000U
#define WSYNC_INFINITY_BITS 0x7f800000U

DEVICE float wsync_float(unsigned bits)
{
    wsync_float_bits_t number;

    number.bits = bits;
    return number.value;
}

DEVICE unsigned wsync_bits(float value)
{
    wsync_float_bits_t number;

    number.value = value;
    return number.bits;
}

/* a / b as division rounds it, without dividing: `reciprocal` is 1 / b, rounded.  Two steps
 * of Newton's, each with the exact remainder; the second one rounds (Markstein,
 * "Computation of elementary functions on the IBM RISC System/6000 processor", 1990,
 * theorem 7).  a is finite and the quotient too.  Where a is below 2^-103 the remainder is
 * not exact, nor is the quotient: it is below 2^-38, which all codes have as 0.  The sign
 * is that of a. */
DEVICE float wsync_quotient(float a, float b, float reciprocal)
{
    const float first = WSYNC_MULTIPLY(a, reciprocal);
    const float second = WSYNC_FMA(WSYNC_FMA(-first, b, a), reciprocal, first);
    const float third = WSYNC_FMA(WSYNC_FMA(-second, b, a), reciprocal, second);

    return wsync_float((wsync_bits(third) & 0x7fffffffU) | (wsync_bits(a) & 0x80000000U));
}

DEVICE unsigned wsync_is_nan(float value)
{
    return (wsync_bits(value) & 0x7fffffffU) > WSYNC_INFINITY_BITS;
}

/* The value of a weight's bits. */
DEVICE float wsync_weight_value(unsigned weight, unsigned bits)
{
    if (weight == WSYNC_WEIGHT_BF16) {
        return wsync_float(bits << 16);
    }
    return wsync_float(weight == WSYNC_WEIGHT_F16 ? wsync_f32_from_f16(bits) : bits);
}

/* The bits that a value has as a weight. */
DEVICE unsigned wsync_weight_bits(unsigned weight, float value)
{
    const unsigned bits = wsync_bits(value);

    if (weight == WSYNC_WEIGHT_BF16) {
        return wsync_bf16_from_f32(bits);
    }
    return weight == WSYNC_WEIGHT_F16 ? wsync_f16_from_f32(bits) : bits;
}

/* The nearest value that a weight can have.  Without branches: hosts do it in vectors. */
DEVICE float wsync_weight_round(unsigned weight, float value)
{
    const unsigned bits = wsync_bits(value);
    const unsigned magnitude = bits & 0x7fffffffU;
    const unsigned upper = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
    const unsigned normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U)) & 0xffffe000U;
    const unsigned capped = normal < 0x47800000U ? normal : WSYNC_INFINITY_BITS;
    /* Below 2^-14 float16 has multiples of 2^-24, the last place of floats from 0.5 on. */
    const float shifted = WSYNC_ADD(wsync_float(magnitude), 0.5F);
    const unsigned small = wsync_bits(WSYNC_ADD(shifted, -0.5F));
    const unsigned half = magnitude < 0x38800000U ? small : capped;
    const unsigned rounded =
        weight == WSYNC_WEIGHT_BF16 ? upper : half | (bits & 0x80000000U);

    if (weight == WSYNC_WEIGHT_F32) {
        return value;
    }
    return wsync_float(magnitude > WSYNC_INFINITY_BITS ? WSYNC_NAN_BITS : rounded);
}

/* Saturates at 448; a NaN of either sign is 0x7f. */
DEVICE unsigned wsync_e4m3_from_f32(float value)
{
    const unsigned bits = wsync_bits(value);
    const unsigned magnitude = bits & 0x7fffffffU;
    const unsigned capped = magnitude < 0x43e00000U ? magnitude : 0x43e00000U;
    /* 2^20 times the power of two below the value, or times 2^-6 below that, has codes as
     * its last places.  The sum counts them from that power on, and its exponent, eight
     * codes each, those below: 0x98 takes away where both begin. */
    const unsigned power = capped & 0x7f800000U;
    const unsigned unit = (power > 0x3c800000U ? power : 0x3c800000U) + 0x0a000098U;
    const unsigned sum = wsync_bits(WSYNC_ADD(wsync_float(capped), wsync_float(unit)));
    const unsigned code = (sum + (sum >> 20)) & 0x7fU;

    return magnitude > WSYNC_INFINITY_BITS ? 0x7fU : code | ((bits >> 24) & 0x80U);
}

DEVICE float wsync_f32_from_e4m3(unsigned code)
{
    const unsigned magnitude = code & 0x7fU;
    const float small = WSYNC_MULTIPLY((float)magnitude, 0.001953125F); /* 2^-9 */
    const float value =
        magnitude < 8 ? small : wsync_float((magnitude << 20) + (120U << 23));

    return magnitude == 0x7fU    ? wsync_float(WSYNC_NAN_BITS)
           : (code & 0x80U) != 0 ? -value
                                 : value;
}

/* 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; saturates.  A NaN is 6. */
DEVICE unsigned wsync_e2m1_from_f32(float value)
{
    const unsigned bits = wsync_bits(value);
    const unsigned magnitude = bits & 0x7fffffffU;
    unsigned code = magnitude > 0x3e800000U; /* 0.25 */

    code += magnitude >= 0x3f400000U; /* 0.75 */
    code += magnitude > 0x3fa00000U;  /* 1.25 */
    code += magnitude >= 0x3fe00000U; /* 1.75 */
    code += magnitude > 0x40200000U;  /* 2.5 */
    code += magnitude >= 0x40600000U; /* 3.5 */
    code += magnitude > 0x40a00000U;  /* 5 */
    return magnitude > WSYNC_INFINITY_BITS ? 7U : code | ((bits >> 28) & 8U);
}

/* Rounded, cut to [low, 7], plus 8; a NaN is 0 plus 8. */
DEVICE unsigned wsync_int4_from_f32(float value, int low)
{
    /* From 12582912 on floats are whole, and neighbours in their bits; what is too large or
     * negative has bits beyond, as signed numbers. */
    const int zero = 0x4b400000;
    const int whole = (int)wsync_bits(WSYNC_ADD(value, 12582912.0F));
    const int above = whole > zero + low ? whole : zero + low;
    const int within = above < zero + 7 ? above : zero + 7;

    return wsync_is_nan(value) ? 8U : (unsigned)(within - zero + 8);
}

/* The exponent of the smallest power of two that is not below a value of at least 0. */
DEVICE unsigned wsync_e8m0_from_f32(float value)
{
    const unsigned bits = wsync_bits(value);
    const unsigned exponent = bits >> 23;
    const unsigned mantissa = bits & 0x7fffffU;
    const unsigned up = exponent == 0 ? mantissa > 0x400000U : mantissa > 0;

    if (bits > WSYNC_INFINITY_BITS) {
        return 0xffU;
    }
    return exponent >= 0xfeU ? 0xfeU : exponent + up;
}

DEVICE unsigned wsync_encoding_of(unsigned kind, unsigned reciprocal)
{
    switch (kind) {
    case WSYNC_QUANTISER_FP8_BLOCK:
        return reciprocal != 0 ? WSYNC_ENCODING_E4M3_MULTIPLY : WSYNC_ENCODING_E4M3_DIVIDE;
    case WSYNC_QUANTISER_FP8_TENSOR:
        return WSYNC_ENCODING_E4M3_DIVIDE_ROUND;
    case WSYNC_QUANTISER_INT4:
        return WSYNC_ENCODING_INT4_DIVIDE_ROUND;
    case WSYNC_QUANTISER_INT4_SLIME:
        return WSYNC_ENCODING_INT4_DIVIDE;
    case WSYNC_QUANTISER_NVFP4:
        return WSYNC_ENCODING_E2M1_MULTIPLY;
    default: /* powers of two: the same either way */
        return WSYNC_ENCODING_E4M3_MULTIPLY;
    }
}

/* e of the rules above, whose reciprocal is the second scale. */
DEVICE float wsync_nvfp4_encode(float overall)
{
    const float quotient = WSYNC_DIVIDE(2688.0F, overall);
    const float most = wsync_float(0x7f7fffffU);
    const float capped = quotient > most ? most : quotient;

    return overall == 0.0F || quotient == 0.0F ? 1.0F : capped;
}

/* What all blocks share that have this amax in all; a NaN makes all of them NaN. */
DEVICE wsync_nvfp4_overall_t wsync_nvfp4_overall(float amax)
{
    const float encode = wsync_nvfp4_encode(amax);
    wsync_nvfp4_overall_t overall;

    overall.sixth = WSYNC_MULTIPLY(encode, 1.0F / 6.0F);
    overall.second = WSYNC_DIVIDE(1.0F, encode);
    if (wsync_is_nan(amax)) {
        overall.sixth = overall.second = wsync_float(WSYNC_NAN_BITS);
    }
    return overall;
}

DEVICE wsync_block_scale_t wsync_nvfp4_scale(float amax,
                                             const wsync_nvfp4_overall_t *overall)
{
    const float most = wsync_float(0x7f7fffffU);
    wsync_block_scale_t scale;
    float whole;

    scale.bits = wsync_e4m3_from_f32(WSYNC_MULTIPLY(amax, overall->sixth));
    whole = WSYNC_MULTIPLY(wsync_f32_from_e4m3(scale.bits), overall->second);
    scale.factor = WSYNC_DIVIDE(1.0F, whole);
    scale.factor = scale.factor > most ? most : scale.factor;
    return scale;
}

/* A power of two from 2^-126 on that is not below the value. */
DEVICE float wsync_ue8m0_round(float value)
{
    const unsigned bits = wsync_bits(value);
    const unsigned exponent = (bits + 0x7fffffU) >> 23;

    return wsync_float((exponent < 1 ? 1U : exponent > 254 ? 254U : exponent) << 23);
}

DEVICE wsync_block_scale_t wsync_e4m3_scale(unsigned kind, unsigned reciprocal,
                                            unsigned weight, float amax)
{
    const unsigned packed = kind == WSYNC_QUANTISER_FP8_PACKED;
    const unsigned power = kind == WSYNC_QUANTISER_FP8_UE8M0 || packed != 0;
    float floor = power != 0 ? 1e-4F : 1e-10F;
    wsync_block_scale_t scale;
    float value;

    if (kind == WSYNC_QUANTISER_FP8_TENSOR) {
        /* 1e-12 is 0 in float16, which would divide by 0 */
        floor = weight == WSYNC_WEIGHT_BF16 ? wsync_weight_round(weight, 1e-12F) : 1e-12F;
    }
    value = WSYNC_DIVIDE(amax > floor ? amax : floor, 448.0F);
    if (power != 0) {
        value = wsync_ue8m0_round(value);
    }
    scale.bits = wsync_bits(value) >> (packed != 0 ? 23 : 0);
    scale.factor = wsync_encoding_of(kind, reciprocal) == WSYNC_ENCODING_E4M3_MULTIPLY
                       ? WSYNC_DIVIDE(1.0F, value)
                       : value;
    return scale;
}

/* The epsilon of the weights' dtype. */
DEVICE float wsync_weight_epsilon(unsigned weight)
{
    return weight == WSYNC_WEIGHT_BF16  ? 0.0078125F
           : weight == WSYNC_WEIGHT_F16 ? 0.0009765625F
                                        : 1.1920928955078125e-07F;
}

DEVICE wsync_block_scale_t wsync_int4_scale(unsigned kind, unsigned weight, float amax)
{
    const float seventh = WSYNC_MULTIPLY(amax, 1.0F / 7.0F);
    wsync_block_scale_t scale;

    if (kind == WSYNC_QUANTISER_INT4_SLIME) {
        scale.factor = seventh > 1e-5F ? seventh : 1e-5F;
        scale.bits = wsync_weight_bits(weight, scale.factor);
        return scale;
    }
    scale.factor = wsync_weight_round(weight, WSYNC_DIVIDE(amax, 7.5F));
    if (scale.factor == 0.0F) {
        scale.factor = wsync_weight_epsilon(weight);
    }
    scale.bits = wsync_weight_bits(weight, scale.factor);
    return scale;
}

DEVICE wsync_block_scale_t wsync_mxfp8_scale(float amax)
{
    wsync_block_scale_t scale;

    scale.bits = wsync_e8m0_from_f32(WSYNC_MULTIPLY(amax, 1.0F / 448.0F));
    /* 2^(127 - exponent), of which 2^-127 is subnormal.  Weights with the exponent 0 are
     * below 2^-118: Transformer Engine's kernel takes these as they are, so that codes are
     * 0. */
    if (scale.bits == 0) {
        scale.factor = 1.0F;
    } else {
        scale.factor =
            wsync_float(scale.bits == 0xfeU ? 0x400000U : (0xfeU - scale.bits) << 23);
    }
    return scale;
}

/* The scale of a block of weights.  `overall` is NVFP4's alone. */
DEVICE wsync_block_scale_t wsync_quantise_block(unsigned kind, unsigned reciprocal,
                                                unsigned weight, float amax,
                                                const wsync_nvfp4_overall_t *overall)
{
    wsync_block_scale_t scale;

    if (wsync_is_nan(amax) && kind != WSYNC_QUANTISER_NVFP4) {
        scale.factor = wsync_float(WSYNC_NAN_BITS);
        scale.bits = WSYNC_NAN_BITS;
        if (kind == WSYNC_QUANTISER_INT4 || kind == WSYNC_QUANTISER_INT4_SLIME) {
            scale.bits = wsync_weight_bits(weight, scale.factor);
        } else if (kind == WSYNC_QUANTISER_MXFP8 || kind == WSYNC_QUANTISER_FP8_PACKED) {
            scale.bits = 0xffU;
        }
        return scale;
    }
    switch (kind) {
    case WSYNC_QUANTISER_INT4:
    case WSYNC_QUANTISER_INT4_SLIME:
        return wsync_int4_scale(kind, weight, amax);
    case WSYNC_QUANTISER_MXFP8:
        return wsync_mxfp8_scale(amax);
    case WSYNC_QUANTISER_NVFP4:
        return wsync_nvfp4_scale(amax, overall);
    default:
        return wsync_e4m3_scale(kind, reciprocal, weight, amax);
    }
}

/* The code of an element: a byte of e4m3, else 4 bits. */
DEVICE unsigned wsync_quantise_element(unsigned encoding, unsigned weight, float value,
                                       float factor)
{
    switch (encoding) {
    case WSYNC_ENCODING_E4M3_MULTIPLY:
        return wsync_e4m3_from_f32(WSYNC_MULTIPLY(value, factor));
    case WSYNC_ENCODING_E4M3_DIVIDE:
        return wsync_e4m3_from_f32(WSYNC_DIVIDE(value, factor));
    case WSYNC_ENCODING_E4M3_DIVIDE_ROUND:
        return wsync_e4m3_from_f32(wsync_weight_round(weight, WSYNC_DIVIDE(value, factor)));
    case WSYNC_ENCODING_INT4_DIVIDE:
        return wsync_int4_from_f32(WSYNC_DIVIDE(value, factor), -7);
    case WSYNC_ENCODING_INT4_DIVIDE_ROUND:
        return wsync_int4_from_f32(wsync_weight_round(weight, WSYNC_DIVIDE(value, factor)),
                                   -8);
    default:
        return wsync_e2m1_from_f32(WSYNC_MULTIPLY(value, factor));
    }
}

#endif

#endif
