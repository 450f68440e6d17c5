/* SPDX-License-Identifier: Apache-2.0
 * The innermost loops of quantising on the host: rows of weights that lie together.  The
 * same loops are compiled for several instruction sets; all give the same bits. */
#ifndef WSYNC_DEVICE_HOST_QUANTISE_ROWS_H
#define WSYNC_DEVICE_HOST_QUANTISE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/quantise_math.h"

enum {
    WSYNC_WEIGHT_COUNT = WSYNC_WEIGHT_F16 + 1,
    /* What of a row is given to a function at a time, at most. */
    WSYNC_ROW_NBYTES = 4096,
};

/* What scales depend on beside their blocks. */
typedef struct wsync_row_method {
    unsigned kind;
    unsigned reciprocal;
    unsigned weight;
    float overall; /* NVFP4's */
} wsync_row_method_t;

/* The functions of one instruction set.  Weights of 2 bytes take the first of two, those of
 * 4 the second; `most` has elements as wide as weights.  Magnitudes are weights' bits
 * without the sign. */
typedef struct wsync_row_functions {
    /* Takes a row's weights into the magnitudes of its columns; `first`: begins them. */
    void (*magnitudes[2])(const unsigned char *row, size_t count, bool first, void *most);
    /* Takes the magnitudes of columns into those of their blocks: the first block has
     * `head` columns, the others `width`, the last what is left.  `most` may be a row
     * itself; `room` is WSYNC_ROW_NBYTES to work in. */
    void (*largest[2])(const void *most, size_t count, size_t head, size_t width,
                       void *room, int32_t *magnitudes);
    /* The values of magnitudes. */
    void (*amaxes)(unsigned weight, const int32_t *magnitudes, size_t count, float *amaxes);
    /* The scale of each block. */
    void (*scales)(const wsync_row_method_t *method, const float *amaxes, size_t count,
                   unsigned *bits, float *factors);
    /* Each column's factor: that of its block, which are as in `largest`. */
    void (*spread)(const float *factors, size_t count, size_t head, size_t width,
                   float *columns);
    /* One code for each of a row's weights, each with a factor of its own. */
    void (*codes[WSYNC_ENCODING_COUNT][WSYNC_WEIGHT_COUNT])(const unsigned char *row,
                                                            const float *factors,
                                                            size_t count,
                                                            unsigned char *codes);
    /* Puts two codes of 4 bits into each of `nbytes` bytes, the low half first. */
    void (*pack)(const unsigned char *codes, size_t nbytes, unsigned char *packed);
} wsync_row_functions_t;

/* What an index into the first two is. */
static inline unsigned wsync_row_width(unsigned weight)
{
    return weight == WSYNC_WEIGHT_F32;
}

/* Those of an instruction set, from plain C (0) up; NULL where this processor or build has
 * none, and from the last level on. */
const wsync_row_functions_t *wsync_row_functions(unsigned level);
/* The fastest ones. */
const wsync_row_functions_t *wsync_row_functions_best(void);

#endif
