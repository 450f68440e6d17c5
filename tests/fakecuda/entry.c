/* SPDX-License-Identifier: Apache-2.0
 * The driver's functions by name and version. */
#include <string.h>

#include "fake.h"

EXPORT int cuGetProcAddress_v2(const char *symbol, void **address, int version,
                               uint64_t flags, int *status);

enum { FLAG_OWN_STREAMS = 2 /* a default stream for each thread */ };

/* Where NVIDIA gave a name to a function of other parameters (cudaTypedefs.h of 13.0): the
 * version from which on the name means what is played here, and from which on it means
 * something else, or 0.  All others mean the same since they exist. */
static const struct {
    const char *symbol;
    int from;
    int until;
} changes[] = {
    {"cuCtxPopCurrent", 4000, 0},
    {"cuCtxPushCurrent", 4000, 0},
    {"cuDeviceGetUuid", 11040, 0}, /* before, of a whole GPU for all its slices */
    {"cuDevicePrimaryCtxRelease", 11000, 0},
    {"cuDeviceTotalMem", 3020, 0},
    {"cuEventDestroy", 4000, 0},
    {"cuEventElapsedTime", 2000, 12080},
    {"cuIpcOpenMemHandle", 11000, 0},
    {"cuMemAlloc", 3020, 0},
    {"cuMemFree", 3020, 0},
    {"cuMemGetAddressRange", 3020, 0},
    {"cuMemGetInfo", 3020, 0},
    {"cuMemHostGetDevicePointer", 3020, 0},
    {"cuMemHostRegister", 6050, 0},
    {"cuMemcpyBatchAsync", 12080, 13000},
    {"cuMemcpyDtoHAsync", 3020, 0},
    {"cuMemcpyHtoDAsync", 3020, 0},
    {"cuStreamDestroy", 4000, 0},
    {"cuStreamWaitValue64", 11070, 0},
    {"cuStreamWriteValue64", 11070, 0},
};

static bool is_played(const char *symbol, int version)
{
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        if (strcmp(symbol, changes[i].symbol) == 0) {
            return version >= changes[i].from &&
                   (changes[i].until == 0 || version < changes[i].until);
        }
    }
    return true;
}

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
    if ((flags & FLAG_OWN_STREAMS) != 0) {
        return fake_refuse(WSYNC_CU_NOT_FOUND, "%s with default streams of threads",
                           symbol);
    }
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (strcmp(symbol, table[i].symbol) != 0 || version < table[i].version ||
            fake_version() < table[i].version) {
            continue;
        }
        if (!is_played(symbol, version)) {
            return fake_refuse(WSYNC_CU_NOT_FOUND, "%s of version %d has other parameters",
                               symbol, version);
        }
        *address = table[i].address;
        *status = 0;
        return WSYNC_CU_SUCCESS;
    }
    return WSYNC_CU_NOT_FOUND;
}
