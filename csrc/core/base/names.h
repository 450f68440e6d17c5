/* SPDX-License-Identifier: Apache-2.0
 * Interned strings.  Each distinct string is stored once and has an index; indices count up
 * in the order of addition. */
#ifndef WSYNC_CORE_BASE_NAMES_H
#define WSYNC_CORE_BASE_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/array.h"
#include "core/base/status.h"
#include "core/base/table.h"

/* Initialise with {0}, release with wsync_names_fini; may be moved by assignment.  The
 * texts (items) belong to the set and do not move. */
typedef struct wsync_names {
    WSYNC_ARRAY(const char *);
    wsync_table_t table;
    uint64_t seed; /* of the hash */
    struct wsync_names_chunk *chunks;
} wsync_names_t;

/* Finds or adds (copies) a text. */
wsync_status_t wsync_names_add(wsync_names_t *names, const char *text, uint32_t *index,
                               bool *added, wsync_error_t *err);

/* Index of a text, or SIZE_MAX. */
size_t wsync_names_find(const wsync_names_t *names, const char *text);

void wsync_names_fini(wsync_names_t *names);

#endif
