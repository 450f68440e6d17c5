/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/idsets.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/counting_sort.h"

static uint64_t hash_ids(const uint32_t *ids, size_t count)
{
    uint64_t hash = 0x9e3779b97f4a7c15U + count;

    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ ids[i]) * 0xff51afd7ed558ccdU;
        hash ^= hash >> 32;
    }
    return hash;
}

static uint32_t find(const wsync_idsets_t *sets, const uint32_t *ids, size_t count,
                     uint64_t hash)
{
    size_t probe = 0;

    for (;;) {
        const uint32_t index = wsync_table_next(&sets->table, hash, &probe);

        if (index == WSYNC_TABLE_NONE ||
            (sets->items[index].count == count &&
             (count == 0 || memcmp(sets->ids.items + sets->items[index].first, ids,
                                   count * sizeof(*ids)) == 0))) {
            return index;
        }
    }
}

wsync_status_t wsync_idsets_add(wsync_idsets_t *sets, const uint32_t *ids, size_t count,
                                uint32_t *index, wsync_error_t *err)
{
    const uint64_t hash = hash_ids(ids, count);

    *index = find(sets, ids, count, hash);
    if (*index != WSYNC_TABLE_NONE) {
        return WSYNC_OK;
    }
    if (!WSYNC_ARRAY_RESERVE(*sets, 1) || !WSYNC_ARRAY_RESERVE(sets->ids, count) ||
        !wsync_table_add(&sets->table, hash)) {
        return wsync_no_memory(err, "plan");
    }
    *index = (uint32_t)sets->count;
    sets->items[sets->count++] = (wsync_idset_t){sets->ids.count, (uint32_t)count};
    if (count != 0) {
        memcpy(sets->ids.items + sets->ids.count, ids, count * sizeof(*ids));
    }
    sets->ids.count += count;
    return WSYNC_OK;
}

const uint32_t *wsync_idsets_get(const wsync_idsets_t *sets, uint32_t index, size_t *count)
{
    *count = sets->items[index].count;
    return sets->ids.items + sets->items[index].first;
}

static int compare_ids(const void *left, const void *right)
{
    const uint32_t *a = left;
    const uint32_t *b = right;

    return WSYNC_COMPARE(*a, *b);
}

bool wsync_idsets_contains(const wsync_idsets_t *sets, uint32_t index, uint32_t id)
{
    size_t count;
    const uint32_t *ids = wsync_idsets_get(sets, index, &count);

    return count > 0 && bsearch(&id, ids, count, sizeof(id), compare_ids) != NULL;
}

void wsync_idsets_fini(wsync_idsets_t *sets)
{
    free(sets->items);
    free(sets->ids.items);
    wsync_table_fini(&sets->table);
    *sets = (wsync_idsets_t){0};
}
