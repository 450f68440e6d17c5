/* SPDX-License-Identifier: Apache-2.0 */
#include "core/idsets.h"

#include <stdlib.h>
#include <string.h>

#include "core/array.h"

enum { FIRST_SLOT_COUNT = 64 };

static uint32_t hash_ids(const uint32_t *ids, size_t count)
{
    uint64_t hash = 0x9e3779b97f4a7c15U + count;

    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ ids[i]) * 0xff51afd7ed558ccdU;
        hash ^= hash >> 32;
    }
    return (uint32_t)hash;
}

/* The slot that holds the list, or the free one where it belongs. */
static size_t find_slot(const wsync_idsets_t *sets, const uint32_t *ids, size_t count,
                        uint32_t hash)
{
    size_t at = hash & (sets->slot_count - 1);

    while (sets->slots[at] != 0) {
        const wsync_idset_t *item = &sets->items[sets->slots[at] - 1];

        if (item->hash == hash && item->count == count &&
            (count == 0 ||
             memcmp(sets->ids + item->first, ids, count * sizeof(*ids)) == 0)) {
            break;
        }
        at = (at + 1) & (sets->slot_count - 1);
    }
    return at;
}

static bool grow_slots(wsync_idsets_t *sets)
{
    const size_t count = sets->slot_count != 0 ? sets->slot_count * 2 : FIRST_SLOT_COUNT;
    uint32_t *slots = calloc(count, sizeof(*slots));

    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < sets->count; i++) {
        size_t at = sets->items[i].hash & (count - 1);

        while (slots[at] != 0) {
            at = (at + 1) & (count - 1);
        }
        slots[at] = (uint32_t)i + 1;
    }
    free(sets->slots);
    sets->slots = slots;
    sets->slot_count = count;
    return true;
}

static bool reserve(wsync_idsets_t *sets, size_t count)
{
    wsync_idset_t *items =
        wsync_array_reserve(sets->items, &sets->capacity, sets->count + 1, sizeof(*items));
    uint32_t *ids;

    if (items == NULL) {
        return false;
    }
    sets->items = items;
    ids = wsync_array_reserve(sets->ids, &sets->id_capacity, sets->id_count + count,
                              sizeof(*ids));
    if (ids == NULL) {
        return false;
    }
    sets->ids = ids;
    return (sets->count + 1) * 2 <= sets->slot_count || grow_slots(sets);
}

wsync_status_t wsync_idsets_add(wsync_idsets_t *sets, const uint32_t *ids, size_t count,
                                uint32_t *index, wsync_error_t *err)
{
    const uint32_t hash = hash_ids(ids, count);
    size_t at;

    if (sets->slot_count != 0) {
        at = find_slot(sets, ids, count, hash);
        if (sets->slots[at] != 0) {
            *index = sets->slots[at] - 1;
            return WSYNC_OK;
        }
    }
    if (sets->count >= UINT32_MAX - 1 || !reserve(sets, count)) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "plan",
                          "no memory for %zu lists of ranks", sets->count + 1);
    }
    at = find_slot(sets, ids, count, hash);
    sets->items[sets->count] = (wsync_idset_t){sets->id_count, (uint32_t)count, hash};
    if (count != 0) {
        memcpy(sets->ids + sets->id_count, ids, count * sizeof(*ids));
    }
    sets->id_count += count;
    sets->count++;
    sets->slots[at] = (uint32_t)sets->count;
    *index = (uint32_t)sets->count - 1;
    return WSYNC_OK;
}

const uint32_t *wsync_idsets_get(const wsync_idsets_t *sets, uint32_t index, size_t *count)
{
    *count = sets->items[index].count;
    return sets->ids + sets->items[index].first;
}

bool wsync_idsets_contains(const wsync_idsets_t *sets, uint32_t index, uint32_t id)
{
    const uint32_t *ids = sets->ids + sets->items[index].first;
    size_t low = 0;
    size_t high = sets->items[index].count;

    while (low < high) {
        const size_t middle = low + (high - low) / 2;

        if (ids[middle] == id) {
            return true;
        }
        if (ids[middle] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return false;
}

void wsync_idsets_fini(wsync_idsets_t *sets)
{
    free(sets->items);
    free(sets->ids);
    free(sets->slots);
    *sets = (wsync_idsets_t){0};
}
