/* SPDX-License-Identifier: Apache-2.0
 * What the host and the copy kernel agree on: segments, how they are cut into tiles, and
 * the arguments of a launch.  Read by C, nvcc and NVRTC, which has no headers: fundamental
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
};

/* What a segment does.  An item is a byte, or an element of a cast. */
typedef enum wsync_segment_kind {
    WSYNC_SEGMENT_COPY,
    WSYNC_SEGMENT_FILL, /* rows repeat the source_item_nbytes (1..16) bytes at the source */
    WSYNC_SEGMENT_F32_TO_BF16,
    WSYNC_SEGMENT_F32_TO_F16,
    WSYNC_SEGMENT_BF16_TO_F32,
} wsync_segment_kind_t;

/* Division of n < 2^31 by value: (high 32 bits of n * magic + n) >> shift. */
typedef struct wsync_divisor {
    unsigned value;
    unsigned magic;
    unsigned shift;
} wsync_divisor_t;

/* A copy as the kernel walks it.  Rows of row_count items lie together on both sides, and
 * ndim dimensions, the fastest first, repeat them.  Row r is the one whose indices are the
 * digits of r.  If row_chunks is 1 a tile is rows_per_tile rows and row.value is row_count;
 * else it is one of row_chunks pieces of chunk_count items of one row. */
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
    unsigned row_chunks;
    unsigned chunk_count;
    wsync_divisor_t row;
    wsync_divisor_t extent[WSYNC_KERNEL_NDIM - 1]; /* the slowest needs none */
    unsigned char kind;                            /* wsync_segment_kind_t */
    unsigned char source_item_nbytes;
    unsigned char destination_item_nbytes;
    unsigned char ndim;
    unsigned padding;
} wsync_segment_t;

/* One launch runs `count` segments from `first` on.  Segment i has the tiles
 * [tile_starts[i], tile_starts[i + 1]).  Buffers are indices into the two tables of
 * addresses. */
typedef struct wsync_kernel_args {
    unsigned long long segments;     /* wsync_segment_t[], in device memory */
    unsigned long long tile_starts;  /* unsigned[], in device memory, one more */
    unsigned long long sources;      /* unsigned long long[], in device memory */
    unsigned long long destinations; /* unsigned long long[], in device memory */
    unsigned first;
    unsigned count;
} wsync_kernel_args_t;

#endif
