/* SPDX-License-Identifier: Apache-2.0
 * Memory of a GPU that tests/fakecuda plays, as the processor reaches it: at the device's
 * addresses there is nothing for it. */
#ifndef WSYNC_TESTS_FAKE_REACH_H
#define WSYNC_TESTS_FAKE_REACH_H

#include <dlfcn.h>
#include <string.h>

#include "../fakecuda/fakecuda.h"

/* Where the bytes of an address are read and written; the same for the host's own. */
static inline void *reach(const void *at)
{
    void *library = dlopen(FAKECUDA_PATH, RTLD_NOW | RTLD_NOLOAD);
    void *address = library != NULL ? dlsym(library, FAKECUDA_REACH) : NULL;
    fakecuda_reach_func_t function;
    void *found = (void *)(uintptr_t)at;

    if (address != NULL) {
        memcpy(&function, &address, sizeof(function));
        found = function(at);
        (void)dlclose(library);
    }
    return found;
}

#endif
