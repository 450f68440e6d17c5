/* SPDX-License-Identifier: Apache-2.0
 * What one rank of a trainer quantises: the pieces of its tensors, and the layout of codes
 * and scales that come of them.
 *
 * A rank quantises what it holds.  Elements of a block may lie on several ranks: then the
 * ranks merge the amaxes that each has found, and no weight moves. */
#ifndef WSYNC_CORE_QUANTISE_QUANTISER_H
#define WSYNC_CORE_QUANTISE_QUANTISER_H

#include <stddef.h>
#include <stdint.h>

#include "core/layout/layout.h"
#include "core/quantise/method.h"

/* How one tensor is quantised, and the names of what comes of it. */
typedef struct wsync_quantise_rule {
    const char *tensor;
    wsync_quantise_method_t method; /* a block of 0 rows or columns: all of the tensor's */
    const char *codes;
    const char *scales;
    const char *second; /* NVFP4: name of the second scale, a float32 scalar; NULL: none */
    const char *shape;  /* INT4: name of the tensor's rows and columns, int64; NULL: none */
    uint32_t share;     /* NVFP4: tensors of one number share that scale; 0: with none */
    uint32_t group;     /* of all that comes of it, as wsync_tensor_t has it */
} wsync_quantise_rule_t;

/* Of all ranks, in bytes of weights.  Ranks that hold the same elements quantise them each.
 */
typedef struct wsync_quantiser_stats {
    uint64_t quantised_nbytes; /* once for every rank that quantises them */
    uint64_t repeated_nbytes;  /* of those, all but one time for each element */
} wsync_quantiser_stats_t;

typedef struct wsync_quantiser wsync_quantiser_t;

/* `layout` holds the shards of all ranks.  The image, which is the memory for codes and
 * scales of `rank`, is the rank's buffers from number `buffers` on.
 *
 * INVALID: the rank has shards in one of these buffers; or, which names the tensor, a rule
 * for a tensor that the layout lacks, or that another rule has; UNSUPPORTED: no matrices,
 * no floating-point numbers of 32 or 16 bits, elements that are computed or lie in steps, a
 * box that cuts a word of codes. */
wsync_status_t wsync_quantiser_create(const wsync_layout_t *layout, uint32_t rank,
                                      uint32_t buffers, const wsync_quantise_rule_t *rules,
                                      size_t count, wsync_quantiser_t **quantiser,
                                      wsync_error_t *err);
void wsync_quantiser_destroy(wsync_quantiser_t *quantiser);

/* The rank's shards: codes, scales and what is not quantised.  Hands the layout over: the
 * quantiser has none afterwards. */
wsync_layout_t *wsync_quantiser_take_layout(wsync_quantiser_t *quantiser);

/* Everything below is borrowed from the quantiser. */
const wsync_quantise_piece_t *wsync_quantiser_pieces(const wsync_quantiser_t *quantiser,
                                                     size_t *count);
/* Bytes of the image.  It begins with the constants, which never change. */
uint64_t wsync_quantiser_image_nbytes(const wsync_quantiser_t *quantiser);
/* Where its buffers begin; each ends where the next one does. */
const uint64_t *wsync_quantiser_starts(const wsync_quantiser_t *quantiser, size_t *count);
const void *wsync_quantiser_constants(const wsync_quantiser_t *quantiser, size_t *nbytes);
/* Entries of the table of amaxes, which is the same on all ranks. */
uint64_t wsync_quantiser_amax_count(const wsync_quantiser_t *quantiser);
wsync_quantiser_stats_t wsync_quantiser_stats(const wsync_quantiser_t *quantiser);

#endif
