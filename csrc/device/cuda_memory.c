/* SPDX-License-Identifier: Apache-2.0
 * Device memory: physical memory that a descriptor stands for, mapped at an address of its
 * own.  A mapping holds the memory by itself, so an import survives its exporter.
 *
 * Control memory: host memory that every process maps and registers with its device.
 * Streams write its words and wait for them with stream memory operations, and the host
 * reads them.  Interprocess events of the driver would need one PID namespace, know no
 * numbers, and a stream that waits for a process that died could not be told to go on: a
 * word is set by whoever gives up. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/divide.h"

#include "device/cuda.h"

enum { CONTROL_MAX_NBYTES = 1 << 20 };

static wsync_cuda_memory_t *cuda_memory_of(wsync_memory_t *memory)
{
    return (wsync_cuda_memory_t *)(void *)memory;
}

static const wsync_cuda_device_t *device_of(const wsync_cuda_memory_t *memory)
{
    return wsync_cuda_of(memory->base.device);
}

static wsync_cu_property_t exportable(const wsync_cuda_device_t *device)
{
    return (wsync_cu_property_t){
        .type = WSYNC_CU_ALLOCATION_PINNED,
        .handle_types = WSYNC_CU_HANDLE_FD,
        .location = {WSYNC_CU_LOCATION_DEVICE, device->base.ordinal}};
}

/* A record without a mapping; INVALID for a size that cannot be. */
static wsync_status_t make_record(const wsync_cuda_device_t *device, uint64_t nbytes,
                                  wsync_cuda_memory_t **memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *made;

    if (nbytes == 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_create",
                          "cannot make GPU memory of 0 bytes");
    }
    if (nbytes > INT64_MAX) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "wsync_memory_create",
                          "cannot make GPU memory of %" PRIu64 " bytes", nbytes);
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    wsync_memory_init(&made->base, &device->base, nbytes);
    made->mapped_nbytes = wsync_round_up(nbytes, device->granularity);
    *memory = made;
    return WSYNC_OK;
}

/* Maps `handle` at the memory's addresses, which are found first if it has none; in the
 * context. */
static wsync_status_t map_handle(wsync_cuda_memory_t *memory, wsync_cu_handle_t handle,
                                 wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device_of(memory)->driver;
    const wsync_cu_access_t access = {
        .location = {WSYNC_CU_LOCATION_DEVICE, memory->base.device->ordinal},
        .flags = WSYNC_CU_ACCESS_READ_WRITE};
    const size_t nbytes = (size_t)memory->mapped_nbytes;
    const char *call = "cuMemAddressReserve";
    wsync_cu_ptr_t at = memory->at;
    wsync_cu_result_t code =
        at != 0 ? WSYNC_CU_SUCCESS : driver->mem_reserve(&at, nbytes, 0, 0, 0);

    if (code == WSYNC_CU_SUCCESS) {
        memory->at = at;
        memory->base.data = (void *)(uintptr_t)at;
        call = "cuMemMap";
        code = driver->mem_map(at, nbytes, 0, handle, 0);
        memory->mapped = code == WSYNC_CU_SUCCESS;
    }
    if (memory->mapped) {
        call = "cuMemSetAccess";
        code = driver->mem_set_access(at, nbytes, &access, 1);
    }
    return wsync_cuda_check(driver, code, call, err,
                            "mapping %" PRIu64 " bytes of GPU memory",
                            memory->mapped_nbytes);
}

wsync_cu_result_t wsync_cuda_unmap(const wsync_cuda_driver_t *driver, wsync_cu_ptr_t at,
                                   uint64_t nbytes)
{
    const wsync_cu_result_t code = driver->mem_unmap(at, (size_t)nbytes);
    wsync_cu_result_t again;

    if (code == WSYNC_CU_SUCCESS) {
        return code;
    }
    /* An error of earlier work may come with what has been done all the same: then nothing
     * is left to be unmapped. */
    again = driver->mem_unmap(at, (size_t)nbytes);
    return again == WSYNC_CU_INVALID_VALUE ? WSYNC_CU_SUCCESS : again;
}

/* In the context. */
static wsync_cu_result_t unmap(wsync_cuda_memory_t *memory)
{
    const wsync_cu_result_t code =
        memory->mapped
            ? wsync_cuda_unmap(device_of(memory)->driver, memory->at, memory->mapped_nbytes)
            : WSYNC_CU_SUCCESS;

    memory->mapped = code != WSYNC_CU_SUCCESS;
    return code;
}

/* In the context.  What the driver keeps mapped keeps its addresses. */
static void release(wsync_cuda_memory_t *memory)
{
    (void)unmap(memory);
    (void)device_of(memory)->driver->mem_unreserve(memory->at,
                                                   (size_t)memory->mapped_nbytes);
}

/* In the context; a stream of its own waits for nobody else's work. */
static wsync_status_t zero(const wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device_of(memory)->driver;
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
    return wsync_cuda_check(driver, code, call, err, "clearing %" PRIu64 " bytes",
                            memory->base.nbytes);
}

static wsync_status_t fail_create(const wsync_cuda_memory_t *memory, wsync_cu_result_t code,
                                  const char *call, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = device_of(memory);
    size_t left = 0;
    size_t total = 0;

    if (code == WSYNC_CU_OUT_OF_MEMORY &&
        device->driver->mem_get_info(&left, &total) == WSYNC_CU_SUCCESS) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, code, call,
                          "cannot make GPU memory of %" PRIu64
                          " bytes: %zu of %zu bytes of %s are free",
                          memory->mapped_nbytes, left, total, device->label);
    }
    return wsync_cuda_check(device->driver, code, call, err,
                            "cannot make GPU memory of %" PRIu64 " bytes",
                            memory->mapped_nbytes);
}

/* Physical memory; in the context. */
static wsync_status_t create(const wsync_cuda_memory_t *memory, wsync_cu_handle_t *handle,
                             wsync_error_t *err)
{
    const wsync_cu_property_t property = exportable(device_of(memory));
    const wsync_cu_result_t code = device_of(memory)->driver->mem_create(
        handle, (size_t)memory->mapped_nbytes, &property, 0);

    return code == WSYNC_CU_SUCCESS ? WSYNC_OK
                                    : fail_create(memory, code, "cuMemCreate", err);
}

/* Physical memory, its descriptor and its mapping; in the context. */
static wsync_status_t allocate(wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device_of(memory)->driver;
    wsync_cu_handle_t handle = 0;
    wsync_status_t status = create(memory, &handle, err);
    wsync_cu_result_t code;

    if (status != WSYNC_OK) {
        return status;
    }
    code = driver->mem_export(&memory->base.fd, handle, WSYNC_CU_HANDLE_FD, 0);
    if (code != WSYNC_CU_SUCCESS) {
        memory->base.fd = -1;
        status = fail_create(memory, code, "cuMemExportToShareableHandle", err);
    } else {
        (void)fcntl(memory->base.fd, F_SETFD, FD_CLOEXEC);
        status = map_handle(memory, handle, err);
    }
    /* The mapping holds the memory from here on. */
    (void)driver->mem_release(handle);
    return status;
}

static void close_fd(wsync_cuda_memory_t *memory)
{
    if (memory->base.fd >= 0) {
        (void)close(memory->base.fd);
        memory->base.fd = -1;
    }
}

static void memory_destroy(wsync_memory_t *memory)
{
    wsync_cuda_memory_t *self = cuda_memory_of(memory);
    const wsync_cuda_device_t *device = device_of(self);

    if (self->foreign || memory->lent) {
        wsync_cuda_lent_destroy(self);
        return;
    }
    if (self->at != 0 && wsync_cuda_enter_to_free(device)) {
        if (self->host != NULL) {
            wsync_cuda_unregister(device, self->host->data);
        } else {
            release(self);
        }
        wsync_cuda_leave(device);
    }
    if (self->host == NULL) {
        close_fd(self);
    }
    wsync_memory_destroy(self->host);
    free(self->recorded);
    free(self);
}

/* Which GPU it is of was settled by UUIDs before: the driver's number of it may be that of
 * the process that made it, which sees other GPUs. */
static wsync_status_t check_place(const wsync_cuda_device_t *device,
                                  wsync_cu_handle_t handle, int fd, wsync_error_t *err)
{
    wsync_cu_property_t property = {0};
    const wsync_status_t status = wsync_cuda_check(
        device->driver, device->driver->mem_properties(&property, handle),
        "cuMemGetAllocationPropertiesFromHandle", err, "descriptor %d", fd);

    if (status != WSYNC_OK) {
        return status;
    }
    if (property.location.type != WSYNC_CU_LOCATION_DEVICE) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d holds memory of no GPU (location type %d), not of "
                          "%s",
                          fd, property.location.type, device->label);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_import_handle(const wsync_cuda_device_t *device, int fd,
                                        wsync_cu_handle_t *handle, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const wsync_cu_result_t code =
        driver->mem_import(handle, (void *)(intptr_t)fd, WSYNC_CU_HANDLE_FD);
    wsync_status_t status;

    if (code == WSYNC_CU_INVALID_VALUE || code == WSYNC_CU_INVALID_HANDLE) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, code, "cuMemImportFromShareableHandle",
                          "descriptor %d holds no GPU memory", fd);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_check(driver, code, "cuMemImportFromShareableHandle", err,
                                "descriptor %d of GPU memory", fd);
    }
    status = check_place(device, *handle, fd, err);
    if (status != WSYNC_OK) {
        (void)driver->mem_release(*handle);
    }
    return status;
}

/* Maps what a copy of the descriptor stands for; in the context; err is not NULL. */
static wsync_status_t adopt(wsync_cuda_memory_t *memory, int borrowed, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device_of(memory)->driver;
    const int fd = fcntl(borrowed, F_DUPFD_CLOEXEC, 3);
    wsync_cu_handle_t handle = 0;
    wsync_status_t status;

    if (fd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "descriptor %d: fcntl: %s",
                          borrowed, strerror(errno));
    }
    memory->base.fd = fd;
    status = wsync_cuda_import_handle(device_of(memory), borrowed, &handle, err);
    if (status != WSYNC_OK) {
        return status;
    }
    status = map_handle(memory, handle, err);
    /* What the driver says of a descriptor that holds less. */
    if (status == WSYNC_ERR_DEVICE && err->native == WSYNC_CU_INVALID_VALUE &&
        strcmp(err->origin, "cuMemMap") == 0) {
        status = wsync_fail(err, WSYNC_ERR_INVALID, WSYNC_CU_INVALID_VALUE, "cuMemMap",
                            "descriptor %d does not hold %" PRIu64 " bytes of GPU memory",
                            borrowed, memory->base.nbytes);
    }
    (void)driver->mem_release(handle);
    return status;
}

static wsync_status_t memory_park(wsync_memory_t *memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *self = cuda_memory_of(memory);
    const wsync_cuda_device_t *device = device_of(self);
    wsync_status_t status;

    if (memory->lent) {
        return wsync_cuda_lent_park(self, err);
    }
    if (self->host != NULL) {
        return wsync_fail(err, WSYNC_ERR_UNSUPPORTED, 0, "wsync_memory_park",
                          "control memory cannot be parked");
    }
    status = wsync_cuda_enter(device, err);
    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_pins_park(&memory->pins, err);
    if (status == WSYNC_OK) {
        status =
            wsync_cuda_check(device->driver, unmap(self), "cuMemUnmap", err,
                             "parking %" PRIu64 " bytes of GPU memory", memory->nbytes);
        if (status != WSYNC_OK) {
            wsync_pins_unpark(&memory->pins);
        }
    }
    if (status == WSYNC_OK) {
        close_fd(self);
    }
    wsync_cuda_leave(device_of(self));
    return status;
}

static wsync_status_t memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err)
{
    wsync_cuda_memory_t *self = cuda_memory_of(memory);
    wsync_error_t reason = {0};
    wsync_status_t status = wsync_cuda_enter(device_of(self), err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = fd < 0 ? allocate(self, &reason) : adopt(self, fd, &reason);
    if (status == WSYNC_OK) {
        wsync_pins_unpark(&memory->pins);
    } else {
        (void)unmap(self);
        close_fd(self);
        if (err != NULL) {
            *err = reason;
        }
    }
    wsync_cuda_leave(device_of(self));
    return status;
}

/* A record of host memory that the device reaches.  In the context. */
static wsync_status_t make_control(const wsync_cuda_device_t *device, int fd,
                                   uint64_t nbytes, wsync_cuda_memory_t **memory,
                                   wsync_error_t *err)
{
    const wsync_device_t *host = wsync_device_host();
    wsync_cuda_memory_t *made = NULL;
    wsync_memory_t *words;
    wsync_status_t status;

    if (nbytes > CONTROL_MAX_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_control_create",
                          "%" PRIu64 " bytes of events; at most %d are possible", nbytes,
                          (int)CONTROL_MAX_NBYTES);
    }
    status = make_record(device, nbytes, &made, err);
    if (made == NULL) {
        return status;
    }
    *memory = made;
    status = host->memory_ops->make(host, true, fd, nbytes, &made->host, err);
    if (status != WSYNC_OK) {
        return status;
    }
    words = made->host;
    made->base.words = words->words;
    made->base.fd = words->fd;
    made->recorded = calloc(nbytes / sizeof(uint64_t) + 1, sizeof(*made->recorded));
    if (made->recorded == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    status = wsync_cuda_register(device, words->data, nbytes, "events", &made->at, err);
    made->base.data = (void *)(uintptr_t)made->at;
    return status;
}

/* In the context; err is not NULL. */
static wsync_status_t make_device(const wsync_cuda_device_t *device, int fd,
                                  uint64_t nbytes, wsync_cuda_memory_t **memory,
                                  wsync_error_t *err)
{
    wsync_status_t status;

    if (fd >= 0 && nbytes > INT64_MAX) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                          "descriptor %d does not hold %" PRIu64 " bytes", fd, nbytes);
    }
    status = make_record(device, nbytes, memory, err);
    if (*memory == NULL) {
        return status;
    }
    if (fd >= 0) {
        return adopt(*memory, fd, err);
    }
    status = allocate(*memory, err);
    return status == WSYNC_OK ? zero(*memory, err) : status;
}

static wsync_status_t memory_make(const wsync_device_t *self, bool control, int fd,
                                  uint64_t nbytes, wsync_memory_t **memory,
                                  wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(self);
    wsync_cuda_memory_t *made = NULL;
    wsync_error_t reason = {0};
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = (control ? make_control : make_device)(device, fd, nbytes, &made, &reason);
    wsync_cuda_leave(device);
    if (status == WSYNC_OK) {
        *memory = &made->base;
        return WSYNC_OK;
    }
    if (made != NULL) {
        memory_destroy(&made->base);
    }
    if (err != NULL) {
        *err = reason;
    }
    return status;
}

wsync_cu_ptr_t wsync_cuda_event_address(wsync_event_t event)
{
    return cuda_memory_of(event.memory)->at + event.offset;
}

_Atomic uint64_t *wsync_cuda_event_recorded(wsync_event_t event)
{
    return &cuda_memory_of(event.memory)->recorded[event.offset / sizeof(uint64_t)];
}

/* --- memory without a record ------------------------------------------------------------
 */

static wsync_cuda_memory_t record_of(const wsync_cuda_device_t *device, uint64_t nbytes)
{
    return (wsync_cuda_memory_t){
        .base = {.device = &device->base, .nbytes = nbytes},
        .mapped_nbytes = wsync_round_up(nbytes, device->granularity)};
}

wsync_status_t wsync_cuda_take(const wsync_cuda_device_t *device, uint64_t nbytes,
                               wsync_cu_ptr_t *at, wsync_error_t *err)
{
    wsync_cuda_memory_t memory = record_of(device, nbytes);
    wsync_cu_handle_t handle = 0;
    wsync_status_t status;

    if (nbytes == 0 || nbytes > INT64_MAX) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_cuda_take",
                          "cannot make GPU memory of %" PRIu64 " bytes", nbytes);
    }
    status = wsync_cuda_enter(device, err);
    if (status != WSYNC_OK) {
        return status;
    }
    status = create(&memory, &handle, err);
    if (status == WSYNC_OK) {
        status = map_handle(&memory, handle, err);
        (void)device->driver->mem_release(handle);
        if (status == WSYNC_OK) {
            *at = memory.at;
        } else if (memory.at != 0) {
            release(&memory);
        }
    }
    wsync_cuda_leave(device);
    return status;
}

void wsync_cuda_give(const wsync_cuda_device_t *device, wsync_cu_ptr_t at, uint64_t nbytes,
                     wsync_cu_stream_t stream)
{
    wsync_cuda_memory_t memory = record_of(device, nbytes);

    if (!wsync_cuda_enter_to_free(device)) {
        return;
    }
    memory.at = at;
    memory.mapped = true;
    /* Unmapping is not said to wait for the device, as freeing is.  The second time: an
     * error of other work must not leave the stream using the memory. */
    if (device->driver->stream_synchronize(stream) != WSYNC_CU_SUCCESS) {
        (void)device->driver->stream_synchronize(stream);
    }
    release(&memory);
    wsync_cuda_leave(device);
}

const wsync_memory_ops_t wsync_cuda_memory_ops = {
    .make = memory_make,
    .borrow = wsync_cuda_borrow,
    .destroy = memory_destroy,
    .park = memory_park,
    .unpark = memory_unpark,
};
