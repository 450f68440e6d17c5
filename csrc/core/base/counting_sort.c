/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/counting_sort.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint32_t key_of(const wsync_keyed_t *keyed, size_t index)
{
    uint32_t key;

    memcpy(&key,
           (const char *)keyed->items + index * keyed->item_nbytes + keyed->key_offset,
           sizeof(key));
    return key;
}

size_t *wsync_count_keys(const wsync_keyed_t *keyed)
{
    size_t *first = calloc(keyed->key_count + 1, sizeof(*first));

    if (first == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < keyed->count; i++) {
        first[key_of(keyed, i) + 1]++;
    }
    for (size_t i = 1; i <= keyed->key_count; i++) {
        first[i] += first[i - 1];
    }
    return first;
}

void *wsync_sort_by_key(const wsync_keyed_t *keyed, size_t **first)
{
    const size_t nbytes = keyed->item_nbytes;
    size_t *next = wsync_count_keys(keyed);
    char *sorted = next != NULL ? malloc((keyed->count + 1) * nbytes) : NULL;

    if (sorted == NULL) {
        free(next);
        return NULL;
    }
    for (size_t i = 0; i < keyed->count; i++) {
        memcpy(sorted + next[key_of(keyed, i)]++ * nbytes,
               (const char *)keyed->items + i * nbytes, nbytes);
    }
    /* Filling has moved each key's start to its end, which is the start of the next one. */
    memmove(next + 1, next, keyed->key_count * sizeof(*next));
    next[0] = 0;
    *first = next;
    return sorted;
}
