/* SPDX-License-Identifier: Apache-2.0
 * A set of texts numbered in the order of their arrival. */
#ifndef WSYNC_CORE_NAMES_H
#define WSYNC_CORE_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

typedef struct wsync_name {
    const char *text; /* owned by the table; does not move */
    uint32_t hash;
} wsync_name_t;

/* Initialise with {0}, release with wsync_names_fini; may be moved by assignment. */
typedef struct wsync_names {
    wsync_name_t *items;
    size_t count;
    size_t capacity;
    uint32_t *slots;   /* open addressing: index + 1, 0 is free */
    size_t slot_count; /* a power of two, or 0 */
    uint64_t seed;     /* of the hash */
    struct wsync_names_chunk *chunks;
} wsync_names_t;

/* Finds or adds (copies) a text. */
wsync_status_t wsync_names_add(wsync_names_t *names, const char *text, uint32_t *index,
                               bool *added, wsync_error_t *err);

/* Index of a text, or SIZE_MAX. */
size_t wsync_names_find(const wsync_names_t *names, const char *text);

void wsync_names_fini(wsync_names_t *names);

#endif
