/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/array.h"

#include <stdint.h>
#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

void *wsync_array_reserve(void *items, size_t *capacity, size_t count, size_t item_nbytes)
{
    const size_t limit = PTRDIFF_MAX / item_nbytes;
    size_t wanted = *capacity > FIRST_CAPACITY ? *capacity : FIRST_CAPACITY;
    void *grown;

    if (items != NULL && count <= *capacity) {
        return items;
    }
    if (count > limit) {
        return NULL;
    }
    while (wanted < count) {
        wanted = wanted > limit / 2 ? limit : wanted * 2;
    }
    grown = realloc(items, wanted * item_nbytes);
    if (grown != NULL) {
        *capacity = wanted;
    }
    return grown;
}
