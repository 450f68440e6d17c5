/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define DRIVER_LIBRARY "libcuda.so.1"

typedef wsync_cu_result_t (*lookup_func_t)(const char *symbol, void **address, int version,
                                           uint64_t flags, int *status);

typedef struct entry {
    const char *symbol;
    size_t offset; /* in the table */
    int version;
    bool later; /* may be missing */
} entry_t;

static const entry_t entries[] = {
#define ENTRY(member, symbol, version, parameters) \
    {#symbol, offsetof(wsync_cuda_driver_t, member), version, false},
    WSYNC_CUDA_MAP(ENTRY)
#undef ENTRY
#define ENTRY(member, symbol, version, parameters) \
    {#symbol, offsetof(wsync_cuda_driver_t, member), version, true},
        WSYNC_CUDA_LATER_MAP(ENTRY)
#undef ENTRY
};

/* Filled once. */
static struct {
    pthread_once_t once;
    wsync_cuda_driver_t driver;
    wsync_error_t reason; /* why there is no driver; status WSYNC_OK if there is one */
} table = {.once = PTHREAD_ONCE_INIT};  // NOLINT(*-avoid-non-const-global-variables)

/* What somebody can do about the failures that machines without a usable GPU give. */
static const char *hint(wsync_cu_result_t code)
{
    switch (code) {
    case WSYNC_CU_NOT_INITIALIZED:
        return "this process was forked after CUDA was initialised; start it with spawn";
    case WSYNC_CU_STUB_LIBRARY:
        return "this is the toolkit's stub library, made to link against; take its folder "
               "off the library path";
    case WSYNC_CU_NO_DEVICE:
        return "no GPU is visible; see CUDA_VISIBLE_DEVICES, and whether the container was "
               "given a GPU";
    case WSYNC_CU_DEVICE_UNAVAILABLE:
        return "another process holds the GPU for itself";
    case WSYNC_CU_SYSTEM_NOT_READY:
        return "the machine's fabric manager is not running";
    case WSYNC_CU_DRIVER_MISMATCH:
        return "the kernel's driver is of another version; reboot, or install the same one";
    case WSYNC_CU_OPERATING_SYSTEM:
    case WSYNC_CU_UNKNOWN:
        return "the kernel's driver does not answer; see /dev/nvidia*, nvidia-smi and "
               "dmesg";
    default:
        return "see nvidia-smi";
    }
}

static wsync_status_t fail_load(wsync_cu_result_t code, const char *call,
                                wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = &table.driver;
    const char *words = NULL;

    if (driver->get_error_string == NULL ||
        driver->get_error_string(code, &words) != WSYNC_CU_SUCCESS || words == NULL) {
        words = "failed";
    }
    return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, code, call, "no GPU: %s: %s (%d): %s",
                      call, words, code, hint(code));
}

/* Fills in the entries whose symbol is `only`, or all (NULL). */
static wsync_status_t look_up(lookup_func_t lookup, const char *only, wsync_error_t *err)
{
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
        const entry_t *entry = &entries[i];
        void *address = NULL;
        int found = 0;
        wsync_cu_result_t code;

        if (only != NULL && strcmp(only, entry->symbol) != 0) {
            continue;
        }
        code = lookup(entry->symbol, &address, entry->version,
                      WSYNC_CU_LOOKUP_LEGACY_STREAM, &found);
        if (code == WSYNC_CU_STUB_LIBRARY) {
            return fail_load(code, "cuGetProcAddress", err);
        }
        if ((code != WSYNC_CU_SUCCESS || address == NULL) && entry->later) {
            continue;
        }
        if (code != WSYNC_CU_SUCCESS || address == NULL) {
            return wsync_fail(
                err, WSYNC_ERR_UNSUPPORTED, code, "cuGetProcAddress",
                "no GPU: the driver (CUDA %d.%d) has no %s, which CUDA %d.%d has",
                table.driver.version / 1000, table.driver.version % 1000 / 10,
                entry->symbol, entry->version / 1000, entry->version % 1000 / 10);
        }
        /* ISO C does not convert the one kind of pointer to the other. */
        memcpy((char *)&table.driver + entry->offset, (const void *)&address,
               sizeof(address));
    }
    return WSYNC_OK;
}

static wsync_status_t open_library(lookup_func_t *lookup, wsync_error_t *err)
{
    const char *name = secure_getenv("WSYNC_CUDA_LIB");
    const char *reason;
    void *library;
    union {
        void *address;
        lookup_func_t function;
    } found;

    if (name == NULL || name[0] == '\0') {
        name = DRIVER_LIBRARY;
    }
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL); /* for ever: threads may be in it */
    if (library == NULL) {
        reason = dlerror();
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dlopen", "no NVIDIA driver: %s",
                          reason != NULL ? reason : name);
    }
    found.address = dlsym(library, "cuGetProcAddress_v2");
    if (found.function == NULL) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "dlsym",
                          dlsym(library, "cuInit") == NULL
                              ? "no NVIDIA driver: %s is another library: it has no cuInit"
                              : "no GPU: the driver %s is older than CUDA 12.0: it has no "
                                "cuGetProcAddress_v2",
                          name);
    }
    *lookup = found.function;
    return WSYNC_OK;
}

static wsync_status_t load(wsync_error_t *err)
{
    wsync_cuda_driver_t *driver = &table.driver;
    lookup_func_t lookup = NULL;
    wsync_cu_result_t code;
    wsync_status_t status = open_library(&lookup, err);

    if (lookup == NULL) {
        return status;
    }
    status = look_up(lookup, "cuGetErrorString", err);
    if (status == WSYNC_OK) {
        status = look_up(lookup, "cuDriverGetVersion", err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    code = driver->driver_get_version(&driver->version);
    if (code != WSYNC_CU_SUCCESS) {
        return fail_load(code, "cuDriverGetVersion", err);
    }
    if (driver->version < WSYNC_CUDA_MIN_VERSION) {
        return wsync_fail(
            err, WSYNC_ERR_UNSUPPORTED, 0, "cuDriverGetVersion",
            "no GPU: the driver speaks CUDA %d.%d, wsync needs %d.%d or later",
            driver->version / 1000, driver->version % 1000 / 10,
            WSYNC_CUDA_MIN_VERSION / 1000, WSYNC_CUDA_MIN_VERSION % 1000 / 10);
    }
    status = look_up(lookup, NULL, err);
    if (status != WSYNC_OK) {
        return status;
    }
    code = driver->init(0);
    if (code != WSYNC_CU_SUCCESS) {
        return fail_load(code, "cuInit", err);
    }
    code = driver->device_get_count(&driver->device_count);
    if (code == WSYNC_CU_SUCCESS && driver->device_count < 1) {
        code = WSYNC_CU_NO_DEVICE;
    }
    if (code != WSYNC_CU_SUCCESS) {
        return fail_load(code, "cuDeviceGetCount", err);
    }
    driver->pid = getpid();
    if (getrandom(driver->process, sizeof(driver->process), 0) !=
        (ssize_t)sizeof(driver->process)) {
        memset(driver->process, 0, sizeof(driver->process));
    }
    return WSYNC_OK;
}

static void load_once(void)
{
    (void)load(&table.reason);
}

wsync_status_t wsync_cuda_driver(const wsync_cuda_driver_t **driver, wsync_error_t *err)
{
    wsync_status_t status;

    (void)pthread_once(&table.once, load_once);
    if (table.reason.status != WSYNC_OK) {
        if (err != NULL) {
            *err = table.reason;
        }
        return table.reason.status;
    }
    status = wsync_cuda_check_process(&table.driver, err);
    if (status == WSYNC_OK) {
        *driver = &table.driver;
    }
    return status;
}

wsync_status_t wsync_cuda_check_process(const wsync_cuda_driver_t *driver,
                                        wsync_error_t *err)
{
    const pid_t pid = getpid();

    if (driver->pid != pid) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_cuda_driver",
                          "no GPU: process %ld initialised CUDA and %ld is its fork; start "
                          "processes that use the GPU with spawn",
                          (long)driver->pid, (long)pid);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_check(const wsync_cuda_driver_t *driver, wsync_cu_result_t code,
                                const char *call, wsync_error_t *err, const char *format,
                                ...)
{
    wsync_status_t status = WSYNC_ERR_DEVICE;
    const char *words = NULL;
    const char *name = NULL;
    char attempt[WSYNC_ERROR_MESSAGE_NBYTES / 2];
    va_list arguments;

    if (code == WSYNC_CU_SUCCESS) {
        return WSYNC_OK;
    }
    if (code == WSYNC_CU_OUT_OF_MEMORY) {
        status = WSYNC_ERR_NO_MEMORY;
    } else if (code == WSYNC_CU_NOT_SUPPORTED || code == WSYNC_CU_NOT_PERMITTED) {
        status = WSYNC_ERR_UNSUPPORTED;
    }
    if (err == NULL) {
        return status;
    }
    if (driver->get_error_string(code, &words) != WSYNC_CU_SUCCESS || words == NULL) {
        words = "unknown error";
    }
    if (driver->get_error_name(code, &name) != WSYNC_CU_SUCCESS || name == NULL) {
        name = "CUDA error";
    }
    va_start(arguments, format);
    (void)vsnprintf(attempt, sizeof(attempt), format, arguments);
    va_end(arguments);
    return wsync_fail(err, status, code, call, "%s: %s: %s (%s, %d)", attempt, call, words,
                      name, code);
}

wsync_status_t wsync_cuda_describe(const wsync_cuda_driver_t *driver, int ordinal,
                                   wsync_cuda_info_t *info, wsync_error_t *err)
{
    wsync_cuda_info_t made = {0};
    wsync_cu_device_t device = 0;
    size_t nbytes = 0;
    const char *call = "cuDeviceGet";
    wsync_cu_result_t code = driver->device_get(&device, ordinal);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuDeviceGetName";
        code = driver->device_get_name(made.name, WSYNC_CUDA_NAME_NBYTES, device);
    }
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuDeviceGetUuid";
        code = driver->device_get_uuid(&made.uuid, device);
    }
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuDeviceTotalMem";
        code = driver->device_total_mem(&nbytes, device);
    }
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuDeviceGetAttribute";
        code = driver->device_get_attribute(&made.major, WSYNC_CU_ATTRIBUTE_MAJOR, device);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = driver->device_get_attribute(&made.minor, WSYNC_CU_ATTRIBUTE_MINOR, device);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_check(driver, code, call, err, "GPU %d of this process", ordinal);
    }
    made.name[WSYNC_CUDA_NAME_NBYTES - 1] = '\0';
    made.nbytes = nbytes;
    *info = made;
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_find(const wsync_cuda_driver_t *driver,
                               const wsync_cu_uuid_t *uuid, int *ordinal,
                               wsync_cuda_info_t *info, wsync_error_t *err)
{
    for (int i = 0; i < driver->device_count; i++) {
        wsync_cuda_info_t found = {0};
        const wsync_status_t status = wsync_cuda_describe(driver, i, &found, err);

        if (status != WSYNC_OK) {
            return status;
        }
        if (memcmp(found.uuid.bytes, uuid->bytes, sizeof(uuid->bytes)) == 0) {
            *ordinal = i;
            *info = found;
            return WSYNC_OK;
        }
    }
    return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_cuda_find",
                      "none of the %d GPUs that this process sees has the UUID that begins "
                      "with %02x%02x%02x%02x",
                      driver->device_count, uuid->bytes[0], uuid->bytes[1], uuid->bytes[2],
                      uuid->bytes[3]);
}
