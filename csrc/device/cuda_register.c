/* SPDX-License-Identifier: Apache-2.0
 * Memory of the host that a device reaches: its pages stay where they are meanwhile. */
#include <inttypes.h>

#include "device/cuda.h"

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
        if (code != WSYNC_CU_SUCCESS) {
            (void)driver->host_unregister(data);
        }
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, call, err,
                               "GPU %d (%s) is to reach %" PRIu64 " bytes of %s",
                               device->ordinal, device->info.name, nbytes, what);
    }
    *at = found;
    return WSYNC_OK;
}

void wsync_cuda_unregister(const wsync_cuda_device_t *device, void *data)
{
    (void)device->driver->host_unregister(data);
}
