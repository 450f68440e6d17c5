/* SPDX-License-Identifier: Apache-2.0
 * Interned lists of numbers (ranks, destinations).  Each distinct list is stored once and
 * has an index; indices count up in the order of addition. */
#ifndef WSYNC_CORE_BASE_IDSETS_H
#define WSYNC_CORE_BASE_IDSETS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/array.h"
#include "core/base/status.h"
#include "core/base/table.h"

typedef struct wsync_idset {
    size_t first; /* in ids */
    uint32_t count;
} wsync_idset_t;

/* Initialise with {0}, release with wsync_idsets_fini; may be moved by assignment. */
typedef struct wsync_idsets {
    WSYNC_ARRAY(wsync_idset_t);
    WSYNC_ARRAY(uint32_t) ids;
    wsync_table_t table;
} wsync_idsets_t;

/* Finds or adds (copies) a list, which must not lie in `sets`. */
wsync_status_t wsync_idsets_add(wsync_idsets_t *sets, const uint32_t *ids, size_t count,
                                uint32_t *index, wsync_error_t *err);

/* Borrowed until the next add. */
const uint32_t *wsync_idsets_get(const wsync_idsets_t *sets, uint32_t index, size_t *count);

/* Whether an ascending list contains `id`. */
bool wsync_idsets_contains(const wsync_idsets_t *sets, uint32_t index, uint32_t id);

void wsync_idsets_fini(wsync_idsets_t *sets);

#endif
