/* SPDX-License-Identifier: Apache-2.0
 * Memory of a GPU that tests/fakecuda plays, as the processor reaches it: at the device's
 * addresses there is nothing for it. */
#ifndef WSYNC_TESTS_FAKE_REACH_H
#define WSYNC_TESTS_FAKE_REACH_H

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "../fakecuda/fakecuda.h"

/* Where the bytes of an address are read and written; the same for the host's own.  Tests
 * come here for each byte: the library is looked for until it is there, and then stays. */
static inline void *reach(const void *at)
{
    static _Atomic(void *) known;
    void *address = atomic_load(&known);
    fakecuda_reach_func_t function;

    if (address == NULL) {
        void *library = dlopen(FAKECUDA_PATH, RTLD_NOW | RTLD_NOLOAD);

        address = library != NULL ? dlsym(library, FAKECUDA_REACH) : NULL;
        if (address == NULL) {
            return (void *)(uintptr_t)at;
        }
        (void)dlclose(library);
        atomic_store(&known, address);
    }
    memcpy(&function, &address, sizeof(function));
    return function(at);
}

#endif
