/* SPDX-License-Identifier: Apache-2.0
 * What the host and the copy kernel agree on: segments, how they are cut into tiles, and
 * the arguments of a launch.  Read by C and NVRTC, which has no headers: fundamental
 * types alone.  Device addresses are unsigned long long (CUdeviceptr). */
#ifndef WSYNC_DEVICE_KERNEL_TABLE_H
#define WSYNC_DEVICE_KERNEL_TABLE_H

/* void wsync_copy(wsync_kernel_args_t): the only parameter is the structure, by value. */
#define WSYNC_KERNEL_NAME "wsync_copy"

enum {
    WSYNC_KERNEL_WARP = 32,
    /* Threads of a block; two blocks are resident on a multiprocessor. */
    WSYNC_KERNEL_BLOCK = 512,
    WSYNC_KERNEL_BLOCKS_PER_SM = 2,
    WSYNC_KERNEL_NDIM = 4,
    /* A tile is what one warp moves at a time: about 8 KiB of the wider side. */
    WSYNC_TILE_NBYTES = 8192,
    /* Rows of a tile at most: rows of a few bytes cost more than their bytes. */
    WSYNC_TILE_ROWS = 1024,
    /* Long rows are cut at multiples of this many items, so that a cut row keeps its
     * alignment and the period of a fill. */
    WSYNC_TILE_GRAIN = 256,
    /* Tiles from one entry of the index to the next: a tile's segment is found in six
     * steps at most, whatever the number of segments. */
    WSYNC_TILE_GROUP = 32,
};

/* What a segment does, numbered as wsync_transform_t.  An item is a byte, or an element of
 * a cast. */
typedef enum wsync_segment_kind {
    WSYNC_SEGMENT_COPY,
    WSYNC_SEGMENT_F32_TO_BF16,
    WSYNC_SEGMENT_F32_TO_F16,
    WSYNC_SEGMENT_BF16_TO_F32,
    WSYNC_SEGMENT_F32, /* computed, without a cast */
    WSYNC_SEGMENT_BF16,
    WSYNC_SEGMENT_F16,
    WSYNC_SEGMENT_FILL, /* rows repeat the source_item_nbytes (1..16) bytes at the source */
} wsync_segment_kind_t;

/* Division of n < 2^31 by value: (high 32 bits of n * magic + n) >> shift. */
typedef struct wsync_divisor {
    unsigned value;
    unsigned magic;
    unsigned shift;
} wsync_divisor_t;

/* A copy as the kernel walks it.  Rows of row_count items lie together on both sides, and
 * ndim dimensions, the fastest first, repeat them.  Row r is the one whose indices are the
 * digits of r.  If chunks.value is 1 a tile is rows_per_tile rows and row.value is
 * row_count; else it is one of chunks.value pieces of chunk_count items of one row, and row
 * is 0. */
typedef struct wsync_segment {
    unsigned long long source_offset;
    unsigned long long destination_offset;
    long long source_stride[WSYNC_KERNEL_NDIM];
    long long destination_stride[WSYNC_KERNEL_NDIM];
    unsigned long long row_count;
    unsigned source_buffer;
    unsigned destination_buffer;
    unsigned row_total; /* rows, < 2^31 */
    unsigned rows_per_tile;
    unsigned chunk_count;
    wsync_divisor_t chunks;
    wsync_divisor_t row;
    wsync_divisor_t extent[WSYNC_KERNEL_NDIM - 1]; /* the slowest needs none */
    unsigned char kind;                            /* wsync_segment_kind_t */
    unsigned char source_item_nbytes;
    unsigned char destination_item_nbytes;
    unsigned char ndim;
    float scale; /* of wsync_affine_t; 0: nothing is computed */
    float offset;
    unsigned padding;
} wsync_segment_t;

/* One launch runs `count` segments from `first` on.  Segment i has the tiles
 * [tile_starts[i], tile_starts[i + 1]).  The tiles of a group, those from
 * WSYNC_TILE_GROUP * g on, are of the segments from tile_index[g] to tile_index[g + 1].
 * Buffers are indices into the two tables of addresses. */
typedef struct wsync_kernel_args {
    unsigned long long segments;    /* wsync_segment_t[], in device memory */
    unsigned long long tile_starts; /* unsigned[], in device memory, one more */
    unsigned long long tile_index;  /* unsigned[], in device memory, one more than groups */
    unsigned long long sources;     /* unsigned long long[], in device memory */
    unsigned long long destinations; /* unsigned long long[], in device memory */
    unsigned first;
    unsigned count;
} wsync_kernel_args_t;

/* What casts and computes an element, for those who say what a DEVICE function is. */
#ifdef DEVICE

/* Rounded, each by itself: C11 contracts none of two statements. */
#ifdef __CUDACC__
#define WSYNC_MULTIPLY(a, b) __fmul_rn(a, b)
#define WSYNC_ADD(a, b) __fadd_rn(a, b)
#else
#define WSYNC_MULTIPLY(a, b) ((a) * (b))
#define WSYNC_ADD(a, b) ((a) + (b))
#endif

typedef union wsync_float_bits {
    float value;
    unsigned bits;
} wsync_float_bits_t;

/* Nearest, ties to even.  A NaN stays one: its top bits, made quiet. */
DEVICE unsigned wsync_bf16_from_f32(unsigned bits)
{
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return (bits >> 16) | 0x40U;
    }
    return (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
}

/* Nearest, ties to even, with subnormal results. */
DEVICE unsigned wsync_f16_from_f32(unsigned bits)
{
    const unsigned sign = (bits >> 16) & 0x8000U;
    const unsigned magnitude = bits & 0x7fffffffU;
    const unsigned exponent = magnitude >> 23;

    if (magnitude > 0x7f800000U) {
        return sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    }
    if (magnitude >= 0x477ff000U) { /* 65520 and more round to infinity */
        return sign | 0x7c00U;
    }
    if (magnitude >= 0x38800000U) { /* 2^-14 and more: normal */
        const unsigned rebiased = magnitude - (112U << 23);

        return sign | ((rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13);
    }
    if (exponent >= 102) { /* 2^-25 and more */
        const unsigned mantissa = (magnitude & 0x7fffffU) | 0x800000U;
        const unsigned shift = 126 - exponent; /* 14..24, to units of 2^-24 */
        const unsigned half = (1U << (shift - 1)) - 1;

        return sign | ((mantissa + half + ((mantissa >> shift) & 1U)) >> shift);
    }
    return sign;
}

DEVICE unsigned wsync_f32_from_f16(unsigned bits)
{
    wsync_float_bits_t number;

    number.bits = (bits & 0x7fffU) << 13;
    if (number.bits >= 0x0f800000U) { /* infinite or NaN */
        number.bits |= 0x7f800000U;
    } else {
        number.value *= 5192296858534827628530496329220096.0F; /* 2^112 */
    }
    return number.bits | (bits & 0x8000U) << 16;
}

/* The bits of one element; scale and offset as wsync_affine_t has them. */
DEVICE unsigned wsync_convert(unsigned kind, unsigned bits, float scale, float offset)
{
    wsync_float_bits_t number;

    number.bits = bits;
    if (kind == WSYNC_SEGMENT_BF16_TO_F32 || kind == WSYNC_SEGMENT_BF16) {
        number.bits = bits << 16;
    } else if (kind == WSYNC_SEGMENT_F16) {
        number.bits = wsync_f32_from_f16(bits);
    }
    if (scale != 0.0F && (number.bits & 0x7fffffffU) <= 0x7f800000U) {
        number.value = WSYNC_MULTIPLY(number.value, scale);
        /* -0 + 0 would lose its sign */
        number.value = offset != 0.0F ? WSYNC_ADD(number.value, offset) : number.value;
    }
    if (scale != 0.0F && kind == WSYNC_SEGMENT_BF16_TO_F32) {
        return wsync_bf16_from_f32(number.bits) << 16;
    }
    if (kind == WSYNC_SEGMENT_F32_TO_BF16 || kind == WSYNC_SEGMENT_BF16) {
        return wsync_bf16_from_f32(number.bits);
    }
    return kind == WSYNC_SEGMENT_F32_TO_F16 || kind == WSYNC_SEGMENT_F16
               ? wsync_f16_from_f32(number.bits)
               : number.bits;
}

#endif

#endif
