/* SPDX-License-Identifier: Apache-2.0
 * A hash table that finds items by a 64-bit key.  It numbers its entries 0, 1, 2, ... in
 * the order in which they are added; the items themselves lie in an array of the caller,
 * where the number is the index.
 *
 * A key may be all there is to compare (a pair of 32-bit numbers), or the hash of something
 * larger: then several entries can have one key, and the caller compares their items. */
#ifndef WSYNC_CORE_TABLE_H
#define WSYNC_CORE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WSYNC_TABLE_NONE UINT32_MAX

typedef struct wsync_table_slot {
    uint64_t key;
    uint32_t entry; /* number + 1; 0: the slot is free */
} wsync_table_slot_t;

/* Initialise with {0}, release with wsync_table_fini; may be moved by assignment. */
typedef struct wsync_table {
    wsync_table_slot_t *slots; /* open addressing, at most half full */
    size_t slot_count;         /* a power of two, or 0 */
    uint32_t count;
} wsync_table_t;

/* Number of the next entry that has `key`, or WSYNC_TABLE_NONE.  *probe is 0 for the first
 * call of a search, and is moved on by each. */
uint32_t wsync_table_next(const wsync_table_t *table, uint64_t key, size_t *probe);

/* Number of the first entry that has `key`, or WSYNC_TABLE_NONE. */
uint32_t wsync_table_find(const wsync_table_t *table, uint64_t key);

/* Adds an entry with the number table->count.  Returns false if there is no memory, or no
 * number; the table is then as it was. */
bool wsync_table_add(wsync_table_t *table, uint64_t key);

/* Removes all entries and keeps the memory. */
void wsync_table_clear(wsync_table_t *table);

void wsync_table_fini(wsync_table_t *table);

#endif
