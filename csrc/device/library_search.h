/* SPDX-License-Identifier: Apache-2.0
 * Shared libraries that are looked for in several places at run time. */
#ifndef WSYNC_DEVICE_LIBRARY_SEARCH_H
#define WSYNC_DEVICE_LIBRARY_SEARCH_H

#include <stddef.h>

enum { WSYNC_LIBRARY_SEARCH_NBYTES = 512 }; /* of an error message */

/* Where a library was looked for, and why it was not there.  Begins as all 0. */
typedef struct wsync_library_search {
    char tried[WSYNC_LIBRARY_SEARCH_NBYTES];
    size_t used;
} wsync_library_search_t;

/* Opens a library, which stays for ever: it has threads and caches of its own.  NULL, and
 * the loader's reason is noted, where that fails. */
void *wsync_library_try(wsync_library_search_t *search, const char *path);

#endif
