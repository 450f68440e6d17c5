/* SPDX-License-Identifier: Apache-2.0 */
#include "core/table.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_SLOT_COUNT = 64 };

/* The slot where a search for `key` starts.  Keys may be small numbers: the product's upper
 * half depends on all of their bits. */
static size_t first_slot(uint64_t key)
{
    return (size_t)(key * 0x9e3779b97f4a7c15U >> 32);
}

static void insert(wsync_table_slot_t *slots, size_t slot_count, uint64_t key,
                   uint32_t entry)
{
    size_t at = first_slot(key) & (slot_count - 1);

    while (slots[at].entry != 0) {
        at = (at + 1) & (slot_count - 1);
    }
    slots[at] = (wsync_table_slot_t){key, entry};
}

static bool grow(wsync_table_t *table)
{
    const size_t count = table->slot_count != 0 ? table->slot_count * 2 : FIRST_SLOT_COUNT;
    wsync_table_slot_t *slots = calloc(count, sizeof(*slots));

    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->slot_count; i++) {
        if (table->slots[i].entry != 0) {
            insert(slots, count, table->slots[i].key, table->slots[i].entry);
        }
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    return true;
}

uint32_t wsync_table_next(const wsync_table_t *table, uint64_t key, size_t *probe)
{
    const size_t first = first_slot(key);

    while (table->slot_count != 0) {
        const wsync_table_slot_t *slot =
            &table->slots[(first + (*probe)++) & (table->slot_count - 1)];

        if (slot->entry == 0) {
            break;
        }
        if (slot->key == key) {
            return slot->entry - 1;
        }
    }
    return WSYNC_TABLE_NONE;
}

uint32_t wsync_table_find(const wsync_table_t *table, uint64_t key)
{
    size_t probe = 0;

    return wsync_table_next(table, key, &probe);
}

bool wsync_table_add(wsync_table_t *table, uint64_t key)
{
    if (table->count >= WSYNC_TABLE_NONE - 1 ||
        (table->count >= table->slot_count / 2 && !grow(table))) {
        return false;
    }
    insert(table->slots, table->slot_count, key, ++table->count);
    return true;
}

void wsync_table_clear(wsync_table_t *table)
{
    if (table->slot_count != 0) {
        memset(table->slots, 0, table->slot_count * sizeof(*table->slots));
    }
    table->count = 0;
}

void wsync_table_fini(wsync_table_t *table)
{
    free(table->slots);
    *table = (wsync_table_t){0};
}
