/* SPDX-License-Identifier: Apache-2.0
 * cuMemAlloc and cuIpcMemHandle. */
#include "device/cuda_ipc.h"

#include <inttypes.h>
#include <stdlib.h>

#include "core/base/divide.h"

/* In the context. */
static wsync_status_t allocate(wsync_cuda_ipc_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const char *call = "cuMemAlloc";
    wsync_cu_result_t code = driver->mem_alloc(&memory->at, (size_t)memory->nbytes);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuIpcGetMemHandle";
        code = driver->ipc_get_memory(&memory->handle, memory->at);
    } else {
        memory->at = 0;
    }
    return wsync_cuda_check(driver, code, call, err,
                            "%" PRIu64 " bytes of %s for other processes", memory->nbytes,
                            memory->device->label);
}

static wsync_status_t fail_open(const wsync_cuda_ipc_t *memory, wsync_cu_result_t code,
                                wsync_error_t *err)
{
    static const char call[] = "cuIpcOpenMemHandle";

    switch (code) {
    case WSYNC_CU_INVALID_CONTEXT:
        return wsync_fail(err, WSYNC_ERR_STATE, code, call,
                          "GPU memory of another process: this process has made it, or one "
                          "that has the same PID in another container (both need the same "
                          "PID namespace)");
    case WSYNC_CU_INVALID_VALUE:
    case WSYNC_CU_INVALID_HANDLE:
    case WSYNC_CU_MAP_FAILED:
        return wsync_fail(err, WSYNC_ERR_CLOSED, code, call,
                          "GPU memory of another process: no such memory on %s: "
                          "its owner has ended, has freed it, made it on another GPU, or "
                          "is in another PID namespace",
                          memory->device->label);
    default:
        return wsync_cuda_check(memory->device->driver, code, call, err,
                                "GPU memory of another process, on %s",
                                memory->device->label);
    }
}

/* In the context. */
static wsync_status_t open_handle(wsync_cuda_ipc_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    wsync_cu_ptr_t base = 0;
    size_t nbytes = 0;
    wsync_cu_result_t code =
        driver->ipc_open_memory(&memory->at, memory->handle, WSYNC_CU_IPC_LAZY_PEER_ACCESS);

    if (code != WSYNC_CU_SUCCESS) {
        memory->at = 0;
        return fail_open(memory, code, err);
    }
    code = driver->mem_range(&base, &nbytes, memory->at);
    memory->nbytes = nbytes - (size_t)(memory->at - base);
    return wsync_cuda_check(driver, code, "cuMemGetAddressRange", err,
                            "the size of another process's memory on %s",
                            memory->device->label);
}

/* Makes the record and has `fill` complete it in the context. */
static wsync_status_t make_filled(const wsync_cuda_ipc_t *wanted,
                                  wsync_status_t (*fill)(wsync_cuda_ipc_t *,
                                                         wsync_error_t *),
                                  wsync_cuda_ipc_t **memory, wsync_error_t *err)
{
    wsync_cuda_ipc_t *made = calloc(1, sizeof(*made));
    wsync_status_t status;

    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    *made = *wanted;
    status = wsync_cuda_enter(made->device, err);
    if (status == WSYNC_OK) {
        status = fill(made, err);
        wsync_cuda_leave(made->device);
    }
    if (status != WSYNC_OK) {
        wsync_cuda_ipc_destroy(made);
        return status;
    }
    *memory = made;
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_ipc_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                     wsync_cuda_ipc_t **memory, wsync_error_t *err)
{
    if (nbytes == 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_cuda_ipc_create",
                          "cannot make GPU memory of 0 bytes");
    }
    if (nbytes > INT64_MAX) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "wsync_cuda_ipc_create",
                          "cannot make GPU memory of %" PRIu64 " bytes", nbytes);
    }
    return make_filled(
        &(wsync_cuda_ipc_t){.device = device,
                            .nbytes = wsync_round_up(nbytes, device->granularity)},
        allocate, memory, err);
}

wsync_status_t wsync_cuda_ipc_open(const wsync_cuda_device_t *device,
                                   const wsync_cu_ipc_t *handle, wsync_cuda_ipc_t **memory,
                                   wsync_error_t *err)
{
    return make_filled(
        &(wsync_cuda_ipc_t){.device = device, .handle = *handle, .opened = true},
        open_handle, memory, err);
}

void wsync_cuda_ipc_destroy(wsync_cuda_ipc_t *memory)
{
    if (memory == NULL) {
        return;
    }
    if (memory->at != 0 && wsync_cuda_enter_to_free(memory->device)) {
        const wsync_cuda_driver_t *driver = memory->device->driver;

        (void)(memory->opened ? driver->ipc_close_memory(memory->at)
                              : driver->mem_free(memory->at));
        wsync_cuda_leave(memory->device);
    }
    free(memory);
}
