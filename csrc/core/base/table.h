/* SPDX-License-Identifier: Apache-2.0
 * A hash table that finds items by a 64-bit key.  It numbers its entries 0, 1, 2, ... in
 * the order in which they are added; the items themselves lie in an array of the caller,
 * where the number is the index.
 *
 * A key may be all there is to compare (a pair of 32-bit numbers), or the hash of something
 * larger: then several entries can have one key, and the caller compares their items. */
#ifndef WSYNC_CORE_BASE_TABLE_H
#define WSYNC_CORE_BASE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/array.h"

#define WSYNC_TABLE_NONE UINT32_MAX

/* Initialise with {0}, release with wsync_table_fini; may be moved by assignment. */
typedef struct wsync_table {
    WSYNC_ARRAY(uint64_t) keys; /* of all entries */
    uint32_t *slots;            /* open addressing: number + 1, 0 is free */
    size_t slot_count;          /* a power of two, or 0; at most half of them are taken */
} wsync_table_t;

/* The slot where a search for `key` starts.  Keys may be small numbers: the product's upper
 * half depends on all of their bits. */
static inline size_t wsync_table_start(uint64_t key)
{
    return (size_t)(key * 0x9e3779b97f4a7c15U >> 32);
}

/* Number of the next entry that has `key`, or WSYNC_TABLE_NONE.  *probe is 0 for the first
 * call of a search, and is moved on by each. */
static inline uint32_t wsync_table_next(const wsync_table_t *table, uint64_t key,
                                        size_t *probe)
{
    const size_t start = wsync_table_start(key);

    while (table->slot_count != 0) {
        const uint32_t entry = table->slots[(start + (*probe)++) & (table->slot_count - 1)];

        if (entry == 0) {
            break;
        }
        if (table->keys.items[entry - 1] == key) {
            return entry - 1;
        }
    }
    return WSYNC_TABLE_NONE;
}

/* Number of the first entry that has `key`, or WSYNC_TABLE_NONE. */
uint32_t wsync_table_find(const wsync_table_t *table, uint64_t key);

/* Adds an entry, whose number is that of the entries before.  Returns false if there is no
 * memory, or no number; the table is then as it was. */
bool wsync_table_add(wsync_table_t *table, uint64_t key);

/* Removes all entries and keeps the memory. */
void wsync_table_clear(wsync_table_t *table);

void wsync_table_fini(wsync_table_t *table);

#endif
