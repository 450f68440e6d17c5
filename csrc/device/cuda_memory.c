/* SPDX-License-Identifier: Apache-2.0
 * Device memory: physical memory that a descriptor stands for, mapped at an address of its
 * own.  A mapping holds the memory by itself, so an import survives its exporter. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cuda.h"
#include "device/host.h"

static wsync_cuda_memory_t *own(wsync_memory_t *memory)
{
    return (wsync_cuda_memory_t *)(void *)memory;
}

static const wsync_cuda_memory_t *own_const(const wsync_memory_t *memory)
{
    return (const wsync_cuda_memory_t *)(const void *)memory;
}

static wsync_cu_property_t exportable(const wsync_cuda_device_t *device)
{
    return (wsync_cu_property_t){.type = WSYNC_CU_ALLOCATION_PINNED,
                                 .handle_types = WSYNC_CU_HANDLE_FD,
                                 .location = {WSYNC_CU_LOCATION_DEVICE, device->ordinal}};
}

/* A record without a mapping; INVALID for a size that cannot be. */
static wsync_status_t make_record(const wsync_cuda_device_t *device, uint64_t nbytes,
                                  wsync_cuda_memory_t **memory, wsync_error_t *err)
{
    const uint64_t grain = device->granularity;
    wsync_cuda_memory_t *made;

    if (nbytes == 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_create",
                          "GPU memory of 0 bytes");
    }
    if (nbytes > INT64_MAX) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "wsync_memory_create",
                          "GPU memory of %" PRIu64 " bytes", nbytes);
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "calloc",
                          "GPU memory of %" PRIu64 " bytes: no memory for its record",
                          nbytes);
    }
    atomic_init(&made->references, 1);
    atomic_init(&made->pins, 0);
    made->device = device;
    made->nbytes = nbytes;
    made->mapped_nbytes = (nbytes + grain - 1) / grain * grain;
    made->fd = -1;
    *memory = made;
    return WSYNC_OK;
}

/* Maps `handle` at the memory's addresses, which are found first if it has none; in the
 * context. */
static wsync_status_t map_handle(wsync_cuda_memory_t *memory, wsync_cu_handle_t handle,
                                 wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const wsync_cu_access_t access = {
        .location = {WSYNC_CU_LOCATION_DEVICE, memory->device->ordinal},
        .flags = WSYNC_CU_ACCESS_READ_WRITE};
    const size_t nbytes = (size_t)memory->mapped_nbytes;
    const char *call = "cuMemAddressReserve";
    wsync_cu_ptr_t at = memory->at;
    wsync_cu_result_t code =
        at != 0 ? WSYNC_CU_SUCCESS : driver->mem_reserve(&at, nbytes, 0, 0, 0);

    if (code == WSYNC_CU_SUCCESS) {
        memory->at = at;
        call = "cuMemMap";
        code = driver->mem_map(at, nbytes, 0, handle, 0);
        memory->mapped = code == WSYNC_CU_SUCCESS;
    }
    if (memory->mapped) {
        call = "cuMemSetAccess";
        code = driver->mem_set_access(at, nbytes, &access, 1);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, call, err,
                               "mapping %" PRIu64 " bytes of GPU memory",
                               memory->mapped_nbytes);
    }
    return WSYNC_OK;
}

/* In the context.  False if the bytes are still mapped, with the reason in *code. */
static bool unmap(wsync_cuda_memory_t *memory, wsync_cu_result_t *code)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const size_t nbytes = (size_t)memory->mapped_nbytes;

    *code = memory->mapped ? driver->mem_unmap(memory->at, nbytes) : WSYNC_CU_SUCCESS;
    if (*code != WSYNC_CU_SUCCESS) {
        /* An error of earlier work may come with what has been done all the same: then
         * nothing is left to be unmapped. */
        const wsync_cu_result_t again = driver->mem_unmap(memory->at, nbytes);

        memory->mapped = again != WSYNC_CU_SUCCESS && again != WSYNC_CU_INVALID_VALUE;
    } else {
        memory->mapped = false;
    }
    return !memory->mapped;
}

/* In the context; a stream of its own waits for nobody else's work. */
static wsync_status_t zero(const wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const char *call = "cuStreamCreate";
    wsync_cu_stream_t stream = NULL;
    wsync_cu_result_t code = driver->stream_create(&stream, WSYNC_CU_STREAM_NON_BLOCKING);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuMemsetD8Async";
        code = driver->memset_async(memory->at, 0, (size_t)memory->mapped_nbytes, stream);
        if (code == WSYNC_CU_SUCCESS) {
            call = "cuStreamSynchronize";
            code = driver->stream_synchronize(stream);
            if (code != WSYNC_CU_SUCCESS) {
                /* The memory is given back next.  An error that stays has ended all work;
                 * one that does not must not leave the device writing. */
                (void)driver->stream_synchronize(stream);
            }
        }
        (void)driver->stream_destroy(stream);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, call, err, "clearing %" PRIu64 " bytes",
                               memory->nbytes);
    }
    return WSYNC_OK;
}

static wsync_status_t fail_create(const wsync_cuda_memory_t *memory, wsync_cu_result_t code,
                                  const char *call, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = memory->device;
    size_t left = 0;
    size_t total = 0;

    if (code == WSYNC_CU_OUT_OF_MEMORY &&
        device->driver->mem_get_info(&left, &total) == WSYNC_CU_SUCCESS) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, code, call,
                          "GPU memory of %" PRIu64
                          " bytes: %zu of %zu bytes of GPU %d "
                          "(%s) are free",
                          memory->mapped_nbytes, left, total, device->ordinal,
                          device->info.name);
    }
    return wsync_cuda_fail(device->driver, code, call, err,
                           "GPU memory of %" PRIu64 " bytes", memory->mapped_nbytes);
}

/* Physical memory, its descriptor and its mapping; in the context. */
static wsync_status_t fill(wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const wsync_cu_property_t property = exportable(memory->device);
    wsync_cu_handle_t handle = 0;
    wsync_status_t status;
    wsync_cu_result_t code =
        driver->mem_create(&handle, (size_t)memory->mapped_nbytes, &property, 0);

    if (code != WSYNC_CU_SUCCESS) {
        return fail_create(memory, code, "cuMemCreate", err);
    }
    code = driver->mem_export(&memory->fd, handle, WSYNC_CU_HANDLE_FD, 0);
    if (code != WSYNC_CU_SUCCESS) {
        memory->fd = -1;
        status = fail_create(memory, code, "cuMemExportToShareableHandle", err);
    } else if (fcntl(memory->fd, F_SETFD, FD_CLOEXEC) != 0) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl",
                            "descriptor %d of GPU memory: fcntl: %s", memory->fd,
                            strerror(errno));
    } else {
        status = map_handle(memory, handle, err);
    }
    /* The mapping holds the memory from here on. */
    (void)driver->mem_release(handle);
    return status;
}

wsync_status_t wsync_cuda_memory_create(const wsync_cuda_device_t *device, uint64_t nbytes,
                                        wsync_memory_t **memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *made = NULL;
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = make_record(device, nbytes, &made, err);
    if (made != NULL) {
        status = device->vmm ? fill(made, err) : wsync_cuda_legacy_fill(made, err);
    }
    if (made != NULL && status == WSYNC_OK) {
        status = zero(made, err);
    }
    wsync_cuda_leave(device);
    if (status != WSYNC_OK) {
        wsync_cuda_memory_destroy((wsync_memory_t *)(void *)made);
        return status;
    }
    *memory = (wsync_memory_t *)(void *)made;
    return WSYNC_OK;
}

/* Which GPU it is of was settled by UUIDs before: the driver's number of it may be that of
 * the process that made it, which sees other GPUs. */
static wsync_status_t check_place(const wsync_cuda_device_t *device,
                                  wsync_cu_handle_t handle, int fd, wsync_error_t *err)
{
    wsync_cu_property_t property = {0};
    const wsync_cu_result_t code = device->driver->mem_properties(&property, handle);

    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(device->driver, code,
                               "cuMemGetAllocationPropertiesFromHandle", err,
                               "descriptor %d", fd);
    }
    if (property.location.type != WSYNC_CU_LOCATION_DEVICE) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d holds memory of no GPU (location type %d), not of "
                          "GPU %d (%s)",
                          fd, property.location.type, device->ordinal, device->info.name);
    }
    return WSYNC_OK;
}

/* Maps what a copy of the descriptor stands for; in the context; err is not NULL. */
static wsync_status_t adopt(wsync_cuda_memory_t *memory, int borrowed, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = memory->device->driver;
    const int fd = fcntl(borrowed, F_DUPFD_CLOEXEC, 3);
    wsync_cu_handle_t handle = 0;
    wsync_cu_result_t code;
    wsync_status_t status;

    if (fd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "descriptor %d: fcntl: %s",
                          borrowed, strerror(errno));
    }
    memory->fd = fd;
    code = driver->mem_import(&handle, (void *)(intptr_t)fd, WSYNC_CU_HANDLE_FD);
    if (code == WSYNC_CU_INVALID_VALUE || code == WSYNC_CU_INVALID_HANDLE) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, code, "cuMemImportFromShareableHandle",
                          "descriptor %d holds no GPU memory", borrowed);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_fail(driver, code, "cuMemImportFromShareableHandle", err,
                               "importing %" PRIu64 " bytes of GPU memory", memory->nbytes);
    }
    status = check_place(memory->device, handle, borrowed, err);
    if (status == WSYNC_OK) {
        status = map_handle(memory, handle, err);
        /* What the driver says of a descriptor that holds less. */
        if (status == WSYNC_ERR_DEVICE && err->native == WSYNC_CU_INVALID_VALUE &&
            strcmp(err->origin, "cuMemMap") == 0) {
            status =
                wsync_fail(err, WSYNC_ERR_INVALID, WSYNC_CU_INVALID_VALUE, "cuMemMap",
                           "descriptor %d does not hold %" PRIu64 " bytes of GPU memory",
                           borrowed, memory->nbytes);
        }
    }
    (void)driver->mem_release(handle);
    return status;
}

wsync_status_t wsync_cuda_memory_import(const wsync_cuda_device_t *device, int fd,
                                        uint64_t nbytes, wsync_memory_t **memory,
                                        wsync_error_t *err)
{
    wsync_cuda_memory_t *made = NULL;
    wsync_error_t reason = {0};
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = nbytes <= INT64_MAX
                 ? make_record(device, nbytes, &made, &reason)
                 : wsync_fail(&reason, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                              "descriptor %d does not hold %" PRIu64 " bytes", fd, nbytes);
    if (made != NULL) {
        status = device->vmm ? adopt(made, fd, &reason)
                             : wsync_cuda_legacy_adopt(made, fd, &reason);
    }
    wsync_cuda_leave(device);
    if (status != WSYNC_OK) {
        if (err != NULL) {
            *err = reason;
        }
        wsync_cuda_memory_destroy((wsync_memory_t *)(void *)made);
        return status;
    }
    *memory = (wsync_memory_t *)(void *)made;
    return WSYNC_OK;
}

static void close_fd(wsync_cuda_memory_t *memory)
{
    if (memory->fd >= 0) {
        (void)close(memory->fd);
        memory->fd = -1;
    }
}

wsync_status_t wsync_cuda_memory_pin(wsync_memory_t *memory, wsync_error_t *err)
{
    return wsync_pins_add(&own(memory)->pins, err);
}

void wsync_cuda_memory_unpin(wsync_memory_t *memory)
{
    wsync_pins_drop(&own(memory)->pins);
}

wsync_status_t wsync_cuda_memory_park(wsync_memory_t *memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *self = own(memory);
    wsync_cu_result_t code = WSYNC_CU_SUCCESS;
    wsync_status_t status;

    if (self->host != NULL) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_memory_park",
                          "control memory cannot be parked");
    }
    if (!self->device->vmm) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_memory_park",
                          "memory of GPU %d (%s) cannot be parked: it has no virtual "
                          "memory management",
                          self->device->ordinal, self->device->info.name);
    }
    status = wsync_cuda_enter(self->device, err);
    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_pins_park(&self->pins, err);
    if (status == WSYNC_OK && !unmap(self, &code)) {
        wsync_pins_unpark(&self->pins);
        status = wsync_cuda_fail(self->device->driver, code, "cuMemUnmap", err,
                                 "parking %" PRIu64 " bytes of GPU memory", self->nbytes);
    }
    if (status == WSYNC_OK) {
        close_fd(self);
    }
    wsync_cuda_leave(self->device);
    return status;
}

wsync_status_t wsync_cuda_memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err)
{
    wsync_cuda_memory_t *self = own(memory);
    wsync_error_t reason = {0};
    wsync_cu_result_t code;
    wsync_status_t status = wsync_pins_check_parked(&self->pins, err);

    if (status == WSYNC_OK) {
        status = wsync_cuda_enter(self->device, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    status = fd < 0 ? fill(self, &reason) : adopt(self, fd, &reason);
    if (status == WSYNC_OK) {
        wsync_pins_unpark(&self->pins);
    } else {
        (void)unmap(self, &code);
        close_fd(self);
        if (err != NULL) {
            *err = reason;
        }
    }
    wsync_cuda_leave(self->device);
    return status;
}

void wsync_cuda_memory_retain(wsync_memory_t *memory)
{
    (void)atomic_fetch_add_explicit(&own(memory)->references, 1, memory_order_relaxed);
}

void wsync_cuda_memory_destroy(wsync_memory_t *memory)
{
    wsync_cuda_memory_t *self = memory != NULL ? own(memory) : NULL;

    if (self == NULL ||
        atomic_fetch_sub_explicit(&self->references, 1, memory_order_acq_rel) != 1 ||
        !wsync_cuda_legacy_fini(self)) {
        return;
    }
    if (wsync_cuda_enter_to_free(self->device)) {
        wsync_cuda_control_fini(self);
        if (self->host == NULL && self->at != 0) {
            wsync_cu_result_t code;

            (void)unmap(self, &code);
            (void)self->device->driver->mem_unreserve(self->at,
                                                      (size_t)self->mapped_nbytes);
        }
        wsync_cuda_leave(self->device);
    }
    close_fd(self);
    wsync_host_memory_destroy(self->host);
    free(self->recorded);
    free(self);
}

void *wsync_cuda_memory_data(const wsync_memory_t *memory)
{
    return (void *)(uintptr_t)own_const(memory)->at;
}

uint64_t wsync_cuda_memory_nbytes(const wsync_memory_t *memory)
{
    return own_const(memory)->nbytes;
}

int wsync_cuda_memory_fd(const wsync_memory_t *memory)
{
    const wsync_cuda_memory_t *self = own_const(memory);

    return self->host != NULL ? wsync_host_memory_fd(self->host) : self->fd;
}
