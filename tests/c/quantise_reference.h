/* SPDX-License-Identifier: Apache-2.0
 * Quantising one element at a time, by search and in double precision, which holds products
 * of floats exactly and whose quotients round to the same float. */
#ifndef WSYNC_TESTS_QUANTISE_REFERENCE_H
#define WSYNC_TESTS_QUANTISE_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/quantise/method.h"

static inline float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* The value of a code of `exponents` and `mantissas` bits without infinities. */
static inline double small_value(unsigned code, int mantissas, int bias)
{
    const unsigned mantissa = code & ((1U << mantissas) - 1);
    const int exponent = (int)(code >> mantissas);

    return exponent == 0
               ? ldexp(mantissa, 1 - bias - mantissas)
               : ldexp(mantissa + (double)(1U << mantissas), exponent - bias - mantissas);
}

/* The whole number nearest to a magnitude below 2^53, of two the even one. */
static inline double round_even(double magnitude)
{
    const uint64_t whole = (uint64_t)magnitude;
    const double rest = magnitude - (double)whole;

    return (double)(whole + (rest > 0.5 || (rest == 0.5 && whole % 2 == 1)));
}

/* The code below `count` whose value is nearest to a magnitude, of two the even one; the
 * last one for what lies beyond. */
static inline unsigned nearest(double magnitude, const double *values, unsigned count)
{
    unsigned code = 0;

    while (code + 1 < count && values[code + 1] <= magnitude) {
        code++;
    }
    if (code + 1 < count) {
        const double below = magnitude - values[code];
        const double above = values[code + 1] - magnitude;

        code += above < below || (above == below && (code & 1) == 1);
    }
    return code;
}

static inline unsigned reference_e4m3(double value)
{
    static double values[0x7f];
    const unsigned sign = signbit(value) != 0 ? 0x80 : 0;

    for (unsigned code = 0; values[0x7e] == 0 && code < 0x7f; code++) {
        values[code] = small_value(code, 3, 7);
    }

    return isnan(value)   ? 0x7f
           : isinf(value) ? (sign | 0x7e)
                          : (sign | nearest(fabs(value), values, 0x7f));
}

static inline unsigned reference_e2m1(double value)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const unsigned sign = signbit(value) != 0 ? 8 : 0;

    return isnan(value)   ? 7
           : isinf(value) ? (sign | 7)
                          : (sign | nearest(fabs(value), values, 8));
}

/* Nearest to a number of `bits` mantissa bits and exponents from `low` on, by remainders.
 */
static inline double round_mantissa(double value, int bits, int low)
{
    int exponent;

    if (value == 0 || isinf(value) || isnan(value)) {
        return value;
    }
    (void)frexp(value, &exponent);
    exponent = (exponent - 1 < low ? low : exponent - 1) - bits;
    return copysign(ldexp(round_even(ldexp(fabs(value), -exponent)), exponent), value);
}

static inline float round_weight(wsync_dtype_t dtype, float value)
{
    double rounded = (double)value;

    if (dtype == WSYNC_DTYPE_BFLOAT16) {
        return (float)round_mantissa(rounded, 7, -126);
    }
    if (dtype == WSYNC_DTYPE_FLOAT16) {
        rounded = round_mantissa(rounded, 10, -14);
        return fabs(rounded) > 65504 && !isnan(rounded)
                   ? copysignf(INFINITY, (float)rounded)
                   : (float)rounded;
    }
    return value;
}

/* The bits of a value that a weight can have; NaNs are the plain one. */
static inline uint32_t weight_bits(wsync_dtype_t dtype, float value)
{
    int exponent;
    uint32_t sign;
    double magnitude;

    if (isnan(value)) {
        return dtype == WSYNC_DTYPE_BFLOAT16  ? 0x7fc0
               : dtype == WSYNC_DTYPE_FLOAT16 ? 0x7e00
                                              : 0x7fc00000;
    }
    if (dtype == WSYNC_DTYPE_BFLOAT16) {
        return bits_of(value) >> 16;
    }
    if (dtype == WSYNC_DTYPE_FLOAT32) {
        return bits_of(value);
    }
    sign = signbit(value) != 0 ? 0x8000 : 0;
    magnitude = fabs((double)value);
    if (isinf(magnitude)) {
        return sign | 0x7c00;
    }
    if (magnitude < ldexp(1, -14)) {
        return sign | (uint32_t)ldexp(magnitude, 24);
    }
    (void)frexp(magnitude, &exponent);
    return sign | ((uint32_t)(exponent + 14) << 10 |
                   ((uint32_t)ldexp(magnitude, 11 - exponent) & 0x3ff));
}

/* The scale of a block and how its elements are encoded. */
typedef struct reference_scale {
    uint32_t bits;
    float scale;  /* NaN: so is all of the block */
    float factor; /* what elements are multiplied by, where they are */
} reference_scale_t;

static inline float quotient(float a, float b)
{
    return (float)((double)a / (double)b);
}

static inline float product(float a, float b)
{
    return (float)((double)a * (double)b);
}

/* The smallest power of two from 2^low to 2^127 that is not below a value. */
static inline int power_above(float value, int low)
{
    int power = low;

    while (power < 127 && ldexp(1, power) < (double)value) {
        power++;
    }
    return power;
}

static inline float reference_encode(float overall)
{
    const float most = float_of(0x7f7fffff);
    const double wide = 2688.0 / (double)overall;

    if (overall == 0 || isinf(overall)) {
        return 1;
    }
    return wide > (double)most ? most : (float)wide;
}

/* The bits of NVFP4's second scale. */
static inline uint32_t reference_second(float overall)
{
    return isnan(overall) ? 0x7fc00000 : bits_of(quotient(1, reference_encode(overall)));
}

static inline reference_scale_t reference_nvfp4(float amax, float overall)
{
    reference_scale_t result = {0x7f, NAN, NAN};
    float encode;
    float second;

    if (isnan(amax) || isnan(overall)) {
        return result;
    }
    encode = reference_encode(overall);
    second = quotient(1, encode);
    result.bits = reference_e4m3((double)product(amax, product(encode, 1.0F / 6)));
    result.scale = (float)small_value(result.bits, 3, 7);
    result.factor = quotient(1, product(result.scale, second));
    result.factor = isinf(result.factor) ? float_of(0x7f7fffff) : result.factor;
    return result;
}

static inline float epsilon(wsync_dtype_t dtype)
{
    return (float)ldexp(1, dtype == WSYNC_DTYPE_BFLOAT16  ? -7
                           : dtype == WSYNC_DTYPE_FLOAT16 ? -10
                                                          : -23);
}

static inline unsigned reference_int4(float value)
{
    const int whole = isnan(value) ? 0 : (int)round_even(fabs((double)value));

    return (unsigned)(8 + (value < 0 ? -whole : whole));
}

static inline float cut_int4(float value)
{
    return value < -8 ? -8 : value > 7 ? 7 : value;
}

static inline reference_scale_t reference_block(const wsync_quantise_method_t *method,
                                                wsync_dtype_t dtype, float amax,
                                                float overall)
{
    reference_scale_t result = {0, NAN, 0};
    float floor;

    switch (method->kind) {
    case WSYNC_QUANTISE_FP8_BLOCK:
        result.scale = quotient(amax < 1e-10F ? 1e-10F : amax, 448);
        result.factor = method->reciprocal ? quotient(1, result.scale) : 0;
        /* infinite scales: every product is 0 or NaN, like the quotient */
        break;
    case WSYNC_QUANTISE_FP8_UE8M0:
    case WSYNC_QUANTISE_FP8_PACKED:
        amax = amax < 1e-4F ? 1e-4F : amax;
        if (!isnan(amax)) {
            result.scale = (float)ldexp(1, power_above(quotient(amax, 448), -126));
        }
        break;
    case WSYNC_QUANTISE_FP8_TENSOR:
        floor = round_weight(dtype, 1e-12F);
        floor = floor > 0 ? floor : 1e-12F;
        result.scale = quotient(amax < floor ? floor : amax, 448);
        break;
    case WSYNC_QUANTISE_INT4:
        result.scale = round_weight(dtype, quotient(amax, 7.5F));
        if (result.scale == 0) {
            result.scale = epsilon(dtype);
        }
        result.bits = weight_bits(dtype, result.scale);
        return result;
    case WSYNC_QUANTISE_INT4_SLIME:
        result.scale = product(amax, 1.0F / 7);
        result.scale = result.scale < 1e-5F ? 1e-5F : result.scale;
        result.bits = weight_bits(dtype, round_weight(dtype, result.scale));
        return result;
    case WSYNC_QUANTISE_MXFP8:
        result.bits = 0xff;
        if (!isnan(amax)) {
            result.bits = (uint32_t)(127 + power_above(product(amax, 1.0F / 448), -127));
            /* no block of finite weights has 2^127, whose bits an infinity takes */
            result.bits = result.bits > 254 ? 254 : result.bits;
            /* with an exponent of 0 its kernel takes weights as they are */
            result.scale = result.bits == 0 ? 1 : (float)ldexp(1, (int)result.bits - 127);
        }
        return result;
    default:
        return reference_nvfp4(amax, overall);
    }
    result.bits = isnan(result.scale) ? 0x7fc00000 : bits_of(result.scale);
    if (method->kind == WSYNC_QUANTISE_FP8_PACKED) {
        result.bits >>= 23; /* the exponent */
    }
    return result;
}

static inline unsigned reference_code(const wsync_quantise_method_t *method,
                                      wsync_dtype_t dtype, const reference_scale_t *scale,
                                      float x)
{
    const float divided = quotient(x, scale->scale);
    const float rounded = round_weight(dtype, divided);
    float value;

    switch (method->kind) {
    case WSYNC_QUANTISE_FP8_BLOCK:
        if (method->reciprocal) {
            return reference_e4m3((double)product(x, scale->factor));
        }
        return reference_e4m3((double)divided);
    case WSYNC_QUANTISE_FP8_TENSOR:
        return reference_e4m3((double)rounded);
    case WSYNC_QUANTISE_INT4:
        return reference_int4(cut_int4(rounded));
    case WSYNC_QUANTISE_INT4_SLIME:
        value = divided < -7 ? -7 : divided > 7 ? 7 : divided;
        return reference_int4(value);
    case WSYNC_QUANTISE_NVFP4:
        return reference_e2m1((double)product(x, scale->factor));
    default: /* exact: powers of two */
        return reference_e4m3((double)x / (double)scale->scale);
    }
}

#endif
