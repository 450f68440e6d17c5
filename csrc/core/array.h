/* SPDX-License-Identifier: Apache-2.0
 * Growth of arrays, in one place so that its arithmetic is checked once. */
#ifndef WSYNC_CORE_ARRAY_H
#define WSYNC_CORE_ARRAY_H

#include <stddef.h>

/* Makes room for `count` items of `item_nbytes` each and returns the array, moved if need
 * be; updates *capacity.  NULL on failure: the array is then as it was. */
void *wsync_array_reserve(void *items, size_t *capacity, size_t count, size_t item_nbytes);

#endif
