/* SPDX-License-Identifier: Apache-2.0
 * What the host and the kernel that quantises agree on: pieces as the kernel walks them,
 * how they are cut into units, and the arguments of a launch.  Read by C and NVRTC,
 * which has no headers: fundamental types alone. */
#ifndef WSYNC_DEVICE_QUANTISE_TABLE_H
#define WSYNC_DEVICE_QUANTISE_TABLE_H

#include "device/kernel_table.h"

/* void wsync_quantise(wsync_quantise_args_t): the only parameter is the structure, by
 * value.
 */
#define WSYNC_QUANTISE_KERNEL_NAME "wsync_quantise"

#define WSYNC_QUANTISE_NOWHERE 0xffffffffffffffffULL /* WSYNC_QUANTISE_NONE */

enum {
    /* Threads of a block; two blocks are resident on a multiprocessor, for what is computed
     * takes more registers than to copy does. */
    WSYNC_QUANTISE_BLOCK = 320,
    WSYNC_QUANTISE_BLOCKS_PER_SM = 2,
    /* Columns that a thread takes at a time. */
    WSYNC_QUANTISE_OCTET = 8,
    /* Octets that a thread has under way. */
    WSYNC_QUANTISE_BATCH = 4,
    /* A unit is what one thread does of a piece, an octet of so many rows; or, where rows
     * of blocks are blocks, what up to so many threads do of some rows of a block's
     * columns, a batch each of every row. */
    WSYNC_QUANTISE_UNIT_ROWS = 32,
    WSYNC_QUANTISE_LANES = 8,
    WSYNC_QUANTISE_LOCAL_ROWS = 8,
    WSYNC_QUANTISE_LOCAL_COLS = WSYNC_QUANTISE_LANES * WSYNC_QUANTISE_BATCH *
        WSYNC_QUANTISE_OCTET,
};

/* Where the amaxes of a piece's blocks are. */
typedef enum wsync_quantise_entries {
    /* Nowhere: its blocks have one row each and at most WSYNC_QUANTISE_LOCAL_COLS columns,
     * and whoever writes a block's codes finds its amaxes first. */
    WSYNC_QUANTISE_ENTRIES_LOCAL,
    WSYNC_QUANTISE_ENTRIES_TABLE,   /* in the caller's table */
    WSYNC_QUANTISE_ENTRIES_SCRATCH, /* in the stream's own */
} wsync_quantise_entries_t;

/* What a launch does. */
typedef enum wsync_quantise_mode {
    WSYNC_QUANTISE_MODE_CODES,   /* scales and codes of all pieces */
    WSYNC_QUANTISE_MODE_TABLE,   /* raises entries of the caller's table */
    WSYNC_QUANTISE_MODE_SCRATCH, /* raises entries of the stream's own */
    WSYNC_QUANTISE_MODE_COUNT,
} wsync_quantise_mode_t;

/* One dimension of a piece in strips, which do not cross blocks; all numbers are below
 * 2^30.
 */
typedef struct wsync_quantise_cut {
    unsigned extent;
    unsigned block;
    unsigned offset;        /* of the piece in the first block that it meets */
    unsigned width;         /* of a strip */
    wsync_divisor_t strips; /* of a block */
} wsync_quantise_cut_t;

/* A piece.  Blocks are counted from the first that it meets.  Unit number u is strip number
 * u / columns of the rows and u % columns of the columns; it has at most an octet of
 * columns, or rows that are blocks, or nothing. */
typedef struct wsync_quantise_task {
    unsigned long long source_offset; /* offsets are those of the piece */
    unsigned long long codes;
    unsigned long long scales;
    unsigned long long scales_stride;
    unsigned long long entry; /* of the first block */
    unsigned long long entry_stride;
    unsigned long long overall;
    unsigned long long second;
    int source_stride[2];
    unsigned codes_stride;
    unsigned source_buffer;
    wsync_divisor_t columns; /* strips in all columns */
    wsync_quantise_cut_t dims[2];
    /* Where blocks of a row share words: */
    unsigned phase;           /* of the first block in its word */
    unsigned grid;            /* blocks in the tensor, from the start of that word */
    unsigned char kind;       /* wsync_quantiser_t */
    unsigned char reciprocal; /* 0 or 1 */
    unsigned char weight;     /* wsync_weight_t */
    unsigned char entries;    /* wsync_quantise_entries_t */
    unsigned char item_nbytes;
    unsigned char scale_nbytes;
    unsigned char code_bits;
    unsigned char word_nbytes; /* of what codes are packed into */
    unsigned char in_word;     /* blocks that share one */
    unsigned char lanes;       /* threads of a unit, a power of two */
    unsigned char lane_bits;   /* of it */
    unsigned char halves;      /* 1: a batch has two blocks, and a strip of columns */
    unsigned char padding[8];
} wsync_quantise_task_t;

/* One launch runs `count` tasks from `first` on.  Task i has the threads
 * [thread_starts[i], thread_starts[i + 1]), multiples of a warp: those of a unit are in
 * one. */
typedef struct wsync_quantise_args {
    unsigned long long tasks;         /* wsync_quantise_task_t[], in device memory */
    unsigned long long thread_starts; /* unsigned[], in device memory, one more */
    unsigned long long sources;       /* unsigned long long[], in device memory */
    unsigned long long image;
    unsigned long long table;   /* float[] */
    unsigned long long scratch; /* float[], 0 before it is raised */
    unsigned first;
    unsigned count;
    unsigned mode; /* wsync_quantise_mode_t */
    unsigned padding;
} wsync_quantise_args_t;

#endif
