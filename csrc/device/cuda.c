/* SPDX-License-Identifier: Apache-2.0
 * GPUs and their ops tables. */
#include "device/cuda.h"

#include <pthread.h>
#include <string.h>

#include "device/kernel_table.h"

/* Of memory where the driver does not say: what its allocations are pieces of. */
enum { LEGACY_GRANULARITY = 2 << 20 };

/* Filled when a GPU is first asked for.  Nothing is released: the driver takes contexts
 * down at the end of the process, in an order that no one knows. */
static struct {
    pthread_mutex_t mutex;
    bool opened[WSYNC_CUDA_MAX_DEVICES];
    wsync_cuda_device_t devices[WSYNC_CUDA_MAX_DEVICES];
    _Atomic(wsync_cu_function_t) copy_kernels[WSYNC_CUDA_MAX_DEVICES];
} table = {.mutex = PTHREAD_MUTEX_INITIALIZER};  // NOLINT(cppcoreguidelines-*)

static wsync_status_t read_attribute(const wsync_cuda_device_t *device, int attribute,
                                     int *value, wsync_error_t *err)
{
    const wsync_cu_result_t code =
        device->driver->device_get_attribute(value, attribute, device->ordinal);

    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(device->driver, code, "cuDeviceGetAttribute", err,
                               "GPU %d (%s)", device->ordinal, device->info.name);
    }
    return WSYNC_OK;
}

static wsync_status_t check_attributes(const wsync_cuda_device_t *device,
                                       wsync_error_t *err)
{
    static const struct {
        int attribute;
        const char *what;
    } needs[] = {
        {WSYNC_CU_ATTRIBUTE_HOST_REGISTER, "registered host memory"},
        {WSYNC_CU_ATTRIBUTE_STREAM_WORDS, "64-bit stream memory operations"},
    };

    for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++) {
        int value = 0;
        const wsync_status_t status =
            read_attribute(device, needs[i].attribute, &value, err);

        if (status != WSYNC_OK) {
            return status;
        }
        if (value == 0) {
            return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_cuda_device",
                              "GPU %d (%s) has no %s", device->ordinal, device->info.name,
                              needs[i].what);
        }
    }
    return WSYNC_OK;
}

/* Whether memory can be mapped by wsync and exported as a descriptor, and its granularity.
 */
static wsync_status_t find_memory_kind(wsync_cuda_device_t *device, wsync_error_t *err)
{
    const wsync_cu_property_t property = {
        .type = WSYNC_CU_ALLOCATION_PINNED,
        .handle_types = WSYNC_CU_HANDLE_FD,
        .location = {WSYNC_CU_LOCATION_DEVICE, device->ordinal}};
    size_t granularity = LEGACY_GRANULARITY;
    int mapped = 0;
    int exported = 0;
    wsync_cu_result_t code = WSYNC_CU_SUCCESS;
    wsync_status_t status = read_attribute(device, WSYNC_CU_ATTRIBUTE_VMM, &mapped, err);

    if (status == WSYNC_OK) {
        status = read_attribute(device, WSYNC_CU_ATTRIBUTE_HANDLE_FD, &exported, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    device->vmm = mapped != 0 && exported != 0;
    if (device->vmm) {
        code = device->driver->mem_granularity(&granularity, &property,
                                               WSYNC_CU_GRANULARITY_MINIMUM);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(device->driver, code, "cuMemGetAllocationGranularity", err,
                               "GPU %d (%s)", device->ordinal, device->info.name);
    }
    device->granularity = granularity > 0 ? granularity : 1;
    return WSYNC_OK;
}

/* The last step of opening: what was retained is kept. */
static wsync_status_t retain_context(wsync_cuda_device_t *device, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const wsync_cu_result_t code =
        driver->primary_retain(&device->context, device->ordinal);

    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, "cuDevicePrimaryCtxRetain", err, "GPU %d (%s)",
                               device->ordinal, device->info.name);
    }
    return WSYNC_OK;
}

static wsync_status_t open_device(const wsync_cuda_driver_t *driver, int ordinal,
                                  wsync_cuda_device_t *device, wsync_error_t *err)
{
    wsync_cuda_device_t made = {.driver = driver, .ordinal = ordinal};
    int processors = 0;
    int pageable = 0;
    int in_place = 0;
    wsync_status_t status = wsync_cuda_describe(driver, ordinal, &made.info, err);

    if (status == WSYNC_OK) {
        status = check_attributes(&made, err);
    }
    if (status == WSYNC_OK) {
        status = find_memory_kind(&made, err);
    }
    if (status == WSYNC_OK) {
        status = read_attribute(&made, WSYNC_CU_ATTRIBUTE_PROCESSORS, &processors, err);
    }
    if (status == WSYNC_OK) {
        status = read_attribute(&made, WSYNC_CU_ATTRIBUTE_PAGEABLE, &pageable, err);
    }
    if (status == WSYNC_OK) {
        status = read_attribute(&made, WSYNC_CU_ATTRIBUTE_HOST_TABLES, &in_place, err);
    }
    if (status == WSYNC_OK) {
        made.processors = processors > 0 ? (unsigned)processors : 1;
        /* Without the second one pages move to the device as they are read (HMM), where a
         * backup of the weights has no room. */
        made.pageable = pageable != 0 && in_place != 0;
        status = retain_context(&made, err);
    }
    if (status == WSYNC_OK) {
        *device = made;
    }
    return status;
}

wsync_status_t wsync_cuda_device(int ordinal, const wsync_cuda_device_t **device,
                                 wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = NULL;
    wsync_status_t status = wsync_cuda_driver(&driver, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (ordinal < 0 || ordinal >= driver->device_count ||
        ordinal >= WSYNC_CUDA_MAX_DEVICES) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_cuda_device",
                          "GPU %d: this process sees %d, and wsync uses at most %d",
                          ordinal, driver->device_count, WSYNC_CUDA_MAX_DEVICES);
    }
    (void)pthread_mutex_lock(&table.mutex);
    if (!table.opened[ordinal]) {
        status = open_device(driver, ordinal, &table.devices[ordinal], err);
        table.opened[ordinal] = status == WSYNC_OK;
    }
    (void)pthread_mutex_unlock(&table.mutex);
    if (status == WSYNC_OK) {
        *device = &table.devices[ordinal];
    }
    return status;
}

const wsync_cuda_device_t *wsync_cuda_opened(int ordinal)
{
    return &table.devices[ordinal];
}

wsync_status_t wsync_cuda_enter(const wsync_cuda_device_t *device, wsync_error_t *err)
{
    wsync_cu_result_t code;
    const wsync_status_t status = wsync_cuda_check_process(device->driver, err);

    if (status != WSYNC_OK) {
        return status;
    }
    code = device->driver->context_push(device->context);
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(device->driver, code, "cuCtxPushCurrent", err,
                               "the primary context of GPU %d (%s)", device->ordinal,
                               device->info.name);
    }
    return WSYNC_OK;
}

bool wsync_cuda_enter_to_free(const wsync_cuda_device_t *device)
{
    /* Twice: an error that comes once would leak for ever. */
    if (wsync_cuda_enter(device, NULL) == WSYNC_OK) {
        return true;
    }
    return wsync_cuda_enter(device, NULL) == WSYNC_OK;
}

void wsync_cuda_leave(const wsync_cuda_device_t *device)
{
    wsync_cu_context_t popped = NULL;

    (void)device->driver->context_pop(&popped);
}

/* In the context. */
static wsync_status_t load_module(const wsync_cuda_device_t *device, const void *image,
                                  wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    wsync_cu_module_t module = NULL;
    wsync_cu_function_t function = NULL;
    const char *call = "cuModuleLoadData";
    wsync_cu_result_t code = driver->module_load(&module, image);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuModuleGetFunction";
        code = driver->module_function(&function, module, WSYNC_KERNEL_NAME);
        if (code != WSYNC_CU_SUCCESS) {
            (void)driver->module_unload(module);
        }
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, call, err, "the kernels of GPU %d (%s)",
                               device->ordinal, device->info.name);
    }
    atomic_store(&table.copy_kernels[device->ordinal], function);
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_load_kernels(const wsync_cuda_device_t *device, const void *image,
                                       wsync_error_t *err)
{
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&table.mutex);
    if (wsync_cuda_copy_kernel(device) == NULL) {
        status = image != NULL ? load_module(device, image, err)
                               : wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_device_cuda",
                                            "GPU %d (%s) has no kernels yet",
                                            device->ordinal, device->info.name);
    }
    (void)pthread_mutex_unlock(&table.mutex);
    wsync_cuda_leave(device);
    return status;
}

wsync_cu_function_t wsync_cuda_copy_kernel(const wsync_cuda_device_t *device)
{
    return atomic_load(&table.copy_kernels[device->ordinal]);
}
