/* SPDX-License-Identifier: Apache-2.0
 * Ways to quantise, and the pieces of a rank's tensors that are quantised: plain data, for
 * the host and for kernels. */
#ifndef WSYNC_CORE_QUANTISE_METHOD_H
#define WSYNC_CORE_QUANTISE_METHOD_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/status.h"
#include "core/layout/dtype.h"

/* C name, text, codes in a word, dtype of a word and of a scale (COUNT: the weights') */
#define WSYNC_QUANTISE_MAP(X)                              \
    X(FP8_BLOCK, "fp8_block", 1, FLOAT8_E4M3FN, FLOAT32)   \
    X(FP8_UE8M0, "fp8_ue8m0", 1, FLOAT8_E4M3FN, FLOAT32)   \
    X(FP8_TENSOR, "fp8_tensor", 1, FLOAT8_E4M3FN, FLOAT32) \
    X(INT4, "int4", 8, INT32, COUNT)                       \
    X(INT4_SLIME, "int4_slime", 8, INT32, COUNT)           \
    X(MXFP8, "mxfp8", 1, FLOAT8_E4M3FN, UINT8)             \
    X(NVFP4, "nvfp4", 2, UINT8, FLOAT8_E4M3FN)             \
    X(FP8_PACKED, "fp8_packed", 1, FLOAT8_E4M3FN, INT32)

typedef enum wsync_quantise_kind {
#define WSYNC_QUANTISE_ENUM(name, text, codes, word, scale) WSYNC_QUANTISE_##name,
    WSYNC_QUANTISE_MAP(WSYNC_QUANTISE_ENUM)
#undef WSYNC_QUANTISE_ENUM
        WSYNC_QUANTISE_COUNT,
} wsync_quantise_kind_t;

/* How a tensor is quantised.  Elements of a block share a scale; blocks begin at the
 * tensor's first row and column, and its last ones may be smaller. */
typedef struct wsync_quantise_method {
    wsync_quantise_kind_t kind;
    bool reciprocal; /* elements are multiplied by 1 / scale, else divided by scale */
    uint32_t block_rows;
    uint32_t block_cols;
} wsync_quantise_method_t;

#define WSYNC_QUANTISE_NONE UINT64_MAX

/* A box of a matrix, and where its codes and scales go.  Source strides are bytes, and
 * may be negative or 0.  Codes lie in an image of the rank, row by row; so do scales, one
 * for each block that the piece meets.  With `amaxes` entries of a table say what a block
 * holds, and not the piece's own elements, because its other elements lie elsewhere: a
 * float each, the largest magnitude, 0 of nothing and NaN where the block has one; entry
 * amaxes + block_row * amax_stride + block_col, with rows and columns of blocks counted
 * from the tensor's first.
 *
 * FP8_PACKED's scales are exponents.  A word has those of several blocks of one row of
 * blocks, and each row of the piece has words of its own.  All of a word is stored: what
 * the piece does not hold of it is in the table. */
typedef struct wsync_quantise_piece {
    const char *tensor; /* its name, for errors */
    wsync_quantise_method_t method;
    wsync_dtype_t dtype; /* of the elements: FLOAT32, BFLOAT16, FLOAT16 */
    uint32_t source_buffer;
    uint64_t source_offset; /* bytes, of the piece's first element */
    int64_t source_stride[2];
    uint64_t start[2];  /* row and column of its first element in the tensor */
    uint64_t extent[2]; /* rows and columns */
    uint64_t codes;     /* offset in the image of its first word */
    uint64_t codes_stride;
    uint64_t scales; /* offset in the image of its first block's scale */
    uint64_t scales_stride;
    uint64_t amaxes; /* NONE: every block that the piece meets is whole in it */
    uint64_t amax_stride;
    uint64_t grid[2]; /* where blocks share words: rows and columns of them in the tensor */
    uint64_t overall; /* NVFP4: the entry of all that share the second scale; NONE */
    uint64_t second;  /* NVFP4: offset in the image of that scale, a float; NONE */
} wsync_quantise_piece_t;

/* The kind of a text ("fp8_block"); INVALID names the text and the known ones. */
wsync_status_t wsync_quantise_kind_from_name(const char *name, wsync_quantise_kind_t *kind,
                                             wsync_error_t *err);
const char *wsync_quantise_kind_name(wsync_quantise_kind_t kind);
/* Codes in a word of the image, and the dtype of words. */
unsigned wsync_quantise_codes(wsync_quantise_kind_t kind);
wsync_dtype_t wsync_quantise_word(wsync_quantise_kind_t kind);
/* The dtype of scales of weights of a dtype. */
wsync_dtype_t wsync_quantise_scale(wsync_quantise_kind_t kind, wsync_dtype_t weights);
/* Columns of blocks whose scales are in one item of that dtype. */
unsigned wsync_quantise_scales_in_word(wsync_quantise_kind_t kind);

#endif
