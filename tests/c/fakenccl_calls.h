/* SPDX-License-Identifier: Apache-2.0
 * What a test asks of the tests/fakenccl that its process takes for NCCL. */
#ifndef WSYNC_TESTS_FAKENCCL_CALLS_H
#define WSYNC_TESTS_FAKENCCL_CALLS_H

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "../fakenccl/fakenccl.h"
#include "harness.h"

static inline void *fakenccl_symbol(const char *name)
{
    const char *path = getenv("WSYNC_NCCL_LIB");
    void *library = dlopen(path != NULL ? path : FAKENCCL_PATH, RTLD_NOW);
    void *address = library != NULL ? dlsym(library, name) : NULL;

    CHECK(address != NULL);
    return address; /* the library stays */
}

static inline void inject(const char *what, long k, long value)
{
    fakenccl_inject_func_t function;
    void *address = fakenccl_symbol(FAKENCCL_INJECT);

    memcpy(&function, &address, sizeof(function));
    function(what, k, value);
}

static inline fakenccl_census_t nccl_census(void)
{
    fakenccl_census_func_t function;
    fakenccl_census_t found;
    void *address = fakenccl_symbol(FAKENCCL_CENSUS);

    memcpy(&function, &address, sizeof(function));
    function(&found);
    return found;
}

#endif
