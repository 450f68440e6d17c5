/* SPDX-License-Identifier: Apache-2.0
 * The driver's functions by name and version. */
#include <string.h>

#include "fake.h"

EXPORT int cuGetProcAddress_v2(const char *symbol, void **address, int version,
                               uint64_t flags, int *status);

int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags,
                        int *status)
{
    static const struct {
        const char *symbol;
        int version;
        void *address;
    } table[] = {
#define ENTRY(member, symbol, version, parameters) \
    {#symbol, version, (void *)fake_##member},
        WSYNC_CUDA_MAP(ENTRY) WSYNC_CUDA_LATER_MAP(ENTRY) FAKE_TESTS_MAP(ENTRY)
#undef ENTRY
    };

    *address = NULL;
    *status = 1;
    (void)flags;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (strcmp(symbol, table[i].symbol) != 0 || version < table[i].version ||
            fake_version() < table[i].version) {
            continue;
        }
        *address = table[i].address;
        *status = 0;
        return WSYNC_CU_SUCCESS;
    }
    return WSYNC_CU_NOT_FOUND;
}
