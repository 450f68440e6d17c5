/* SPDX-License-Identifier: Apache-2.0
 * GPUs: how they are opened, their contexts, and memory of the host that they reach. */
#include "device/cuda.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/kernel_table.h"
#include "device/quantise_table.h"

/* GPUs that were asked for.  Nothing is released: the driver takes contexts down at the end
 * of the process, in an order that no one knows. */
static struct {
    pthread_mutex_t mutex;
    wsync_cuda_device_t *first;
} opened = {.mutex = PTHREAD_MUTEX_INITIALIZER};  // NOLINT(cppcoreguidelines-*)

/* What the device can do: the first four it must. */
static wsync_status_t read_attributes(wsync_cuda_device_t *device, wsync_error_t *err)
{
    enum {
        REGISTER,
        WORDS,
        VMM,
        EXPORT,
        NEEDED,
        PROCESSORS = NEEDED,
        PAGEABLE,
        IN_PLACE,
        MPS,
        COUNT
    };
    static const int attributes[COUNT] = {
        WSYNC_CU_ATTRIBUTE_HOST_REGISTER, WSYNC_CU_ATTRIBUTE_STREAM_WORDS,
        WSYNC_CU_ATTRIBUTE_VMM,           WSYNC_CU_ATTRIBUTE_HANDLE_FD,
        WSYNC_CU_ATTRIBUTE_PROCESSORS,    WSYNC_CU_ATTRIBUTE_PAGEABLE,
        WSYNC_CU_ATTRIBUTE_HOST_TABLES,   WSYNC_CU_ATTRIBUTE_MPS};
    static const char *const needed[NEEDED] = {
        "registered host memory", "64-bit stream memory operations",
        "virtual memory management", "memory that is exported as descriptors"};
    int values[COUNT] = {0};

    for (int i = 0; i < COUNT; i++) {
        const wsync_cu_result_t code = device->driver->device_get_attribute(
            &values[i], attributes[i], device->base.ordinal);

        if (code != WSYNC_CU_SUCCESS && (i != MPS || code != WSYNC_CU_INVALID_VALUE)) {
            return wsync_cuda_check(device->driver, code, "cuDeviceGetAttribute", err, "%s",
                                    device->label);
        }
        if (i < NEEDED && values[i] == 0) {
            return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_cuda_device",
                              "%s has no %s", device->label, needed[i]);
        }
    }
    device->mps = values[MPS] != 0;
    device->processors = values[PROCESSORS] > 0 ? (unsigned)values[PROCESSORS] : 1;
    /* Without the second one pages move to the device as they are read (HMM), where a
     * backup of the weights has no room. */
    device->pageable = values[PAGEABLE] != 0 && values[IN_PLACE] != 0;
    return WSYNC_OK;
}

static wsync_status_t find_granularity(wsync_cuda_device_t *device, wsync_error_t *err)
{
    const wsync_cu_property_t property = {
        .type = WSYNC_CU_ALLOCATION_PINNED,
        .handle_types = WSYNC_CU_HANDLE_FD,
        .location = {WSYNC_CU_LOCATION_DEVICE, device->base.ordinal}};
    size_t granularity = 0;
    const wsync_cu_result_t code = device->driver->mem_granularity(
        &granularity, &property, WSYNC_CU_GRANULARITY_MINIMUM);

    device->granularity = granularity > 0 ? granularity : 1;
    return wsync_cuda_check(device->driver, code, "cuMemGetAllocationGranularity", err,
                            "%s", device->label);
}

static wsync_status_t open_device(const wsync_cuda_driver_t *driver, int ordinal,
                                  wsync_cuda_device_t *made, wsync_error_t *err)
{
    wsync_status_t status = wsync_cuda_describe(driver, ordinal, &made->info, err);

    made->driver = driver;
    made->base = (wsync_device_t){.memory_ops = &wsync_cuda_memory_ops,
                                  .stream_ops = &wsync_cuda_stream_ops,
                                  .name = "cuda",
                                  .ordinal = ordinal};
    memcpy(made->base.uuid, made->info.uuid.bytes, sizeof(made->base.uuid));
    (void)snprintf(made->label, sizeof(made->label), "GPU %d (%s)", ordinal,
                   made->info.name);
    if (status == WSYNC_OK) {
        status = read_attributes(made, err);
    }
    if (status == WSYNC_OK) {
        status = find_granularity(made, err);
    }
    /* The last step: what was retained is kept. */
    return status == WSYNC_OK
               ? wsync_cuda_check(driver, driver->primary_retain(&made->context, ordinal),
                                  "cuDevicePrimaryCtxRetain", err, "%s", made->label)
               : status;
}

/* With the mutex. */
static wsync_status_t find_or_open(const wsync_cuda_driver_t *driver, int ordinal,
                                   wsync_cuda_device_t **device, wsync_error_t *err)
{
    wsync_cuda_device_t *found = opened.first;
    wsync_status_t status = WSYNC_OK;

    while (found != NULL && found->base.ordinal != ordinal) {
        found = found->next;
    }
    if (found == NULL) {
        found = calloc(1, sizeof(*found));
        if (found == NULL) {
            return wsync_no_memory(err, "calloc");
        }
        status = open_device(driver, ordinal, found, err);
        if (status != WSYNC_OK) {
            free(found);
            return status;
        }
        found->next = opened.first;
        opened.first = found;
    }
    *device = found;
    return WSYNC_OK;
}

static wsync_status_t open_once(int ordinal, wsync_cuda_device_t **device,
                                wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = NULL;
    wsync_status_t status = wsync_cuda_driver(&driver, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (ordinal < 0 || ordinal >= driver->device_count) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_cuda_device",
                          "GPU %d does not exist in this process: it sees %d GPUs, "
                          "numbered from 0",
                          ordinal, driver->device_count);
    }
    (void)pthread_mutex_lock(&opened.mutex);
    status = find_or_open(driver, ordinal, device, err);
    (void)pthread_mutex_unlock(&opened.mutex);
    return status;
}

wsync_status_t wsync_cuda_device(int ordinal, const wsync_cuda_device_t **device,
                                 wsync_error_t *err)
{
    wsync_cuda_device_t *found = NULL;
    const wsync_status_t status = open_once(ordinal, &found, err);

    if (status == WSYNC_OK) {
        *device = found;
    }
    return status;
}

wsync_status_t wsync_cuda_reaches(const wsync_cuda_device_t *device, int ordinal,
                                  bool *reaches, wsync_cu_uuid_t *uuid, wsync_error_t *err)
{
    wsync_cuda_info_t info;
    int can = 0;
    wsync_status_t status = wsync_cuda_describe(device->driver, ordinal, &info, err);

    if (status == WSYNC_OK && ordinal != device->base.ordinal) {
        status = wsync_cuda_check(
            device->driver,
            device->driver->device_can_access(&can, device->base.ordinal, ordinal),
            "cuDeviceCanAccessPeer", err, "%s and GPU %d", device->label, ordinal);
    }
    if (status == WSYNC_OK) {
        *reaches = can != 0;
        *uuid = info.uuid;
    }
    return status;
}

wsync_status_t wsync_cuda_enter(const wsync_cuda_device_t *device, wsync_error_t *err)
{
    const wsync_status_t status = wsync_cuda_check_process(device->driver, err);

    return status != WSYNC_OK
               ? status
               : wsync_cuda_check(
                     device->driver, device->driver->context_push(device->context),
                     "cuCtxPushCurrent", err, "the primary context of %s", device->label);
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

wsync_status_t wsync_cuda_free_nbytes(const wsync_cuda_device_t *device, uint64_t *nbytes,
                                      wsync_error_t *err)
{
    size_t left = 0;
    size_t total = 0;
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status == WSYNC_OK) {
        status =
            wsync_cuda_check(device->driver, device->driver->mem_get_info(&left, &total),
                             "cuMemGetInfo", err, "%s", device->label);
        wsync_cuda_leave(device);
    }
    *nbytes = left;
    return status;
}

/* In the context, with the mutex. */
static wsync_status_t load_kernels(wsync_cuda_device_t *device, const void *image,
                                   wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    wsync_cu_module_t module = NULL;
    wsync_cu_function_t copy = NULL;
    wsync_cu_function_t quantise = NULL;
    const char *call = "cuModuleLoadData";
    wsync_cu_result_t code;

    if (atomic_load(&device->copy_kernel) != NULL) {
        return WSYNC_OK;
    }
    if (image == NULL) {
        return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_device_cuda",
                          "%s has no kernels yet", device->label);
    }
    code = driver->module_load(&module, image);
    if (code == WSYNC_CU_SUCCESS) {
        call = "cuModuleGetFunction";
        code = driver->module_function(&copy, module, WSYNC_KERNEL_NAME);
        if (code == WSYNC_CU_SUCCESS) {
            code = driver->module_function(&quantise, module, WSYNC_QUANTISE_KERNEL_NAME);
        }
        if (code == WSYNC_CU_SUCCESS) {
            atomic_store(&device->quantise_kernel, quantise);
            atomic_store(&device->copy_kernel, copy);
        } else {
            (void)driver->module_unload(module);
        }
    }
    return wsync_cuda_check(driver, code, call, err, "the kernels of %s", device->label);
}

wsync_status_t wsync_device_cuda(const wsync_cu_uuid_t *uuid, const void *image,
                                 const wsync_device_t **device, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = NULL;
    wsync_cuda_device_t *found = NULL;
    wsync_cuda_info_t info;
    int ordinal = -1;
    wsync_status_t status = wsync_cuda_driver(&driver, err);

    if (status == WSYNC_OK) {
        status = wsync_cuda_find(driver, uuid, &ordinal, &info, err);
    }
    if (status == WSYNC_OK) {
        status = open_once(ordinal, &found, err);
    }
    if (found == NULL) {
        return status;
    }
    status = wsync_cuda_enter(found, err);
    if (status != WSYNC_OK) {
        return status;
    }
    (void)pthread_mutex_lock(&opened.mutex);
    status = load_kernels(found, image, err);
    (void)pthread_mutex_unlock(&opened.mutex);
    wsync_cuda_leave(found);
    if (status == WSYNC_OK) {
        *device = &found->base;
    }
    return status;
}

wsync_status_t wsync_cuda_register(const wsync_cuda_device_t *device, void *data,
                                   uint64_t nbytes, const char *what, wsync_cu_ptr_t *at,
                                   wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const char *call = "cuMemHostRegister";
    wsync_cu_ptr_t found = 0;
    wsync_cu_result_t code = driver->host_register(
        data, (size_t)nbytes, WSYNC_CU_HOST_PORTABLE | WSYNC_CU_HOST_DEVICE_MAP);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuMemHostGetDevicePointer";
        code = driver->host_pointer(&found, data, 0);
        if (code == WSYNC_CU_SUCCESS) {
            *at = found;
        } else {
            (void)driver->host_unregister(data);
        }
    }
    return wsync_cuda_check(driver, code, call, err,
                            "giving %s access to %" PRIu64 " bytes of %s", device->label,
                            nbytes, what);
}

void wsync_cuda_unregister(const wsync_cuda_device_t *device, void *data)
{
    (void)device->driver->host_unregister(data);
}
