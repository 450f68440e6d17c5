/* SPDX-License-Identifier: Apache-2.0
 * The layout of all ranks as one process sees it that reads the memory of each of them. */
#ifndef WSYNC_CORE_LAYOUT_JOIN_H
#define WSYNC_CORE_LAYOUT_JOIN_H

#include "core/layout/layout.h"

/* The tensors of `model` that `wanted` has, too (by name; NULL: all), with their shards on
 * one rank, 0: buffer b of rank r has become number b + the buffers of the ranks before r.
 * Shards that share no element with `wanted` are left out.  Of equal boxes one stays, that
 * of the rank which has the fewest bytes to give by then, so that the ranks share the work;
 * a box that some rank holds apart from that may overlap it, and comes after it. */
wsync_status_t wsync_layout_join(const wsync_layout_t *model, const wsync_layout_t *wanted,
                                 wsync_layout_t **joined, wsync_error_t *err);

#endif
