/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/table.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_SLOT_COUNT = 64 };

static void insert(uint32_t *slots, size_t slot_count, uint64_t key, uint32_t entry)
{
    size_t at = wsync_table_start(key) & (slot_count - 1);

    while (slots[at] != 0) {
        at = (at + 1) & (slot_count - 1);
    }
    slots[at] = entry;
}

static bool grow(wsync_table_t *table)
{
    const size_t count = table->slot_count != 0 ? table->slot_count * 2 : FIRST_SLOT_COUNT;
    uint32_t *slots = calloc(count, sizeof(*slots));

    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->keys.count; i++) {
        insert(slots, count, table->keys.items[i], (uint32_t)i + 1);
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    return true;
}

uint32_t wsync_table_find(const wsync_table_t *table, uint64_t key)
{
    size_t probe = 0;

    return wsync_table_next(table, key, &probe);
}

bool wsync_table_add(wsync_table_t *table, uint64_t key)
{
    if (table->keys.count >= WSYNC_TABLE_NONE - 1 || !WSYNC_ARRAY_RESERVE(table->keys, 1) ||
        (table->keys.count >= table->slot_count / 2 && !grow(table))) {
        return false;
    }
    table->keys.items[table->keys.count++] = key;
    insert(table->slots, table->slot_count, key, (uint32_t)table->keys.count);
    return true;
}

void wsync_table_clear(wsync_table_t *table)
{
    if (table->slot_count != 0) {
        memset(table->slots, 0, table->slot_count * sizeof(*table->slots));
    }
    table->keys.count = 0;
}

void wsync_table_fini(wsync_table_t *table)
{
    free(table->keys.items);
    free(table->slots);
    *table = (wsync_table_t){0};
}
