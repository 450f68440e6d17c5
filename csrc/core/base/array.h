/* SPDX-License-Identifier: Apache-2.0
 * Arrays that grow.  The arithmetic of their sizes is checked in one place. */
#ifndef WSYNC_CORE_BASE_ARRAY_H
#define WSYNC_CORE_BASE_ARRAY_H

#include <stdbool.h>
#include <stddef.h>

/* An array of `type`.  Initialise it with {0} and release it with free(array.items). */
#define WSYNC_ARRAY(type) \
    struct {              \
        union {           \
            type *items;  \
            void *memory; \
        };                \
        size_t count;     \
        size_t capacity;  \
    }

/* Makes room for `more` items after the last one.  Returns false if there is no memory; the
 * array is then as it was. */
#define WSYNC_ARRAY_RESERVE(array, more)                                         \
    wsync_array_grow(&(array).memory, &(array).capacity, (array).count + (more), \
                     sizeof(*(array).items))

/* Makes room for `count` items of `item_nbytes` each and returns the array, moved if need
 * be; updates *capacity.  NULL on failure: the array is then as it was. */
void *wsync_array_reserve(void *items, size_t *capacity, size_t count, size_t item_nbytes);

/* The same for an array at *memory; inline, because there mostly is room. */
static inline bool wsync_array_grow(void **memory, size_t *capacity, size_t count,
                                    size_t item_nbytes)
{
    void *grown;

    if (*memory != NULL && count <= *capacity) {
        return true;
    }
    grown = wsync_array_reserve(*memory, capacity, count, item_nbytes);
    if (grown != NULL) {
        *memory = grown;
    }
    return grown != NULL;
}

#endif
