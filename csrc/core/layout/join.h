/* SPDX-License-Identifier: Apache-2.0
 * The layout of all ranks as one process sees it that reads the memory of each of them. */
#ifndef WSYNC_CORE_LAYOUT_JOIN_H
#define WSYNC_CORE_LAYOUT_JOIN_H

#include "core/layout/layout.h"

/* The tensors of `model` that `wanted` has, too (by name; NULL: all), with their shards on
 * one rank, 0: buffer b of rank r has become number b + the buffers of the ranks before r.
 * Shards that share no element with `wanted` are left out.  Of equal boxes one stays, that
 * of the rank which has the fewest bytes to give by then, so that the ranks share the work;
 * a box that some rank holds apart from that may overlap it, and comes after it.
 *
 * lent: whether a buffer can be read, by its number; NULL: all can.  A tensor of which some
 * box lies only in others is left out. */
wsync_status_t wsync_layout_join(const wsync_layout_t *model, const wsync_layout_t *wanted,
                                 const uint8_t *lent, wsync_layout_t **joined,
                                 wsync_error_t *err);
/* How many numbers the buffers of all ranks take.  LAYOUT if these are 2^32 or more. */
wsync_status_t wsync_layout_count_buffers(const wsync_layout_t *model, uint32_t *count,
                                          wsync_error_t *err);

/* The tensors of a layout that `other` lacks. */
wsync_status_t wsync_layout_without(const wsync_layout_t *layout,
                                    const wsync_layout_t *other, wsync_layout_t **rest,
                                    wsync_error_t *err);
/* Both layouts in one, where buffer b of `other` has become first + b.  LAYOUT where they
 * disagree about a tensor, or a number would be 2^32 or more. */
wsync_status_t wsync_layout_beside(const wsync_layout_t *layout,
                                   const wsync_layout_t *other, uint32_t first,
                                   wsync_layout_t **both, wsync_error_t *err);

#endif
