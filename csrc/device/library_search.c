/* SPDX-License-Identifier: Apache-2.0 */
#include "device/library_search.h"

#include <dlfcn.h>
#include <stdio.h>

void *wsync_library_try(wsync_library_search_t *search, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *reason = library == NULL ? dlerror() : NULL;
    const size_t room = sizeof(search->tried) - search->used;
    int length;

    if (library == NULL) {
        length = snprintf(search->tried + search->used, room, "%s%s",
                          search->used > 0 ? "; " : "", reason != NULL ? reason : path);
        search->used +=
            length < 0 ? 0 : ((size_t)length < room ? (size_t)length : room - 1);
    }
    return library;
}
