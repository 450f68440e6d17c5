/* SPDX-License-Identifier: Apache-2.0
 * Counting sort.  The key of an item is a uint32_t inside it; items of one key keep their
 * order. */
#ifndef WSYNC_CORE_BASE_COUNTING_SORT_H
#define WSYNC_CORE_BASE_COUNTING_SORT_H

#include <stddef.h>

/* -1, 0 or 1: a comes before b, they are equal, or it comes after.  For qsort. */
#define WSYNC_COMPARE(a, b) (((a) > (b)) - ((a) < (b)))

/* What is sorted: `count` items of `item_nbytes`, whose key lies `key_offset` bytes from
 * the item's start and is below `key_count`. */
typedef struct wsync_keyed {
    const void *items; /* borrowed */
    size_t count;
    size_t item_nbytes;
    size_t key_offset;
    size_t key_count;
} wsync_keyed_t;

/* Returns a new array of key_count + 1 entries: in sorted order the items of key k are
 * those from [k] to [k + 1].  NULL if there is no memory.  The caller frees it. */
size_t *wsync_count_keys(const wsync_keyed_t *keyed);

/* Returns a new array with the items in sorted order, and in *first what wsync_count_keys
 * returns.  NULL, and nothing in *first, if there is no memory.  The caller frees both. */
void *wsync_sort_by_key(const wsync_keyed_t *keyed, size_t **first);

#endif
