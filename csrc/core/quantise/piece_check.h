/* SPDX-License-Identifier: Apache-2.0
 * Where the blocks of a piece lie, and whether all that it touches is there. */
#ifndef WSYNC_CORE_QUANTISE_PIECE_CHECK_H
#define WSYNC_CORE_QUANTISE_PIECE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/copy.h"
#include "core/quantise/method.h"

/* Of one dimension of a piece: the tensor's blocks that it meets. */
typedef struct wsync_quantise_blocks {
    uint64_t first;
    uint64_t count;
} wsync_quantise_blocks_t;

wsync_quantise_blocks_t wsync_quantise_rows(const wsync_quantise_piece_t *piece);
wsync_quantise_blocks_t wsync_quantise_cols(const wsync_quantise_piece_t *piece);

/* The piece's scales in the image: `rows` rows of `cols` items.  The first item of a row is
 * number `first` of the tensor's row. */
typedef struct wsync_quantise_scales {
    uint64_t rows;
    uint64_t first;
    uint64_t cols;
} wsync_quantise_scales_t;

wsync_quantise_scales_t wsync_quantise_scales(const wsync_quantise_piece_t *piece);

/* Words of the image in a row of codes; the last one may have codes to spare. */
uint64_t wsync_quantise_words(const wsync_quantise_piece_t *piece);

/* A piece without elements is not looked at further: nothing is done for it. */
bool wsync_quantise_empty(const wsync_quantise_piece_t *piece);

/* Checks that every byte that the pieces touch lies in its span.  INVALID names the tensor.
 * The rest is as wsync_quantiser_create has made it: a piece without entries of amaxes
 * begins where a block does and cuts no word of scales, NVFP4 has an entry of all, and
 * words of several codes hold codes of one block. */
wsync_status_t wsync_quantise_check(const wsync_quantise_piece_t *pieces, size_t count,
                                    const wsync_span_t *sources, size_t source_count,
                                    const wsync_span_t *image, const wsync_span_t *amaxes,
                                    wsync_error_t *err);

#endif
