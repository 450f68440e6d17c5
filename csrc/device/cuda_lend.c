/* SPDX-License-Identifier: Apache-2.0
 * What crosses is a note, and the descriptors of pieces with it.  An allocation of
 * cuMemAlloc crosses as its IPC handle, for which there are two limits: it is not freed
 * later because somebody has it open, and it opens all of the block that it was cut from.
 */
#include "device/cuda_lend.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "device/cuda_ipc.h"
#include "device/sealed_blob.h"

/* The driver cuts small allocations from blocks of this size, and the handle of one opens
 * its block. */
enum { BLOCK_NBYTES = 2 << 20 };

/* What crosses for memory that has no descriptor of its own, or more than one: a sealed
 * blob, which is copied as it is. */
typedef struct note {
    uint64_t nbytes;
    wsync_cu_uuid_t uuid;
    wsync_cu_ipc_t handle; /* without pieces; else all 0 */
    uint64_t process[2];   /* whose it is, where that is to know its own */
    wsync_cu_ptr_t at;     /* in that process */
    uint64_t sizes[];      /* of the pieces whose descriptors go with it */
} note_t;

static size_t note_nbytes(size_t pieces)
{
    return sizeof(note_t) + pieces * sizeof(uint64_t);
}

/* --- what lies where --------------------------------------------------------------------
 */

/* The number of the physical memory that is mapped there.  cuda.h says of
 * cuMemRetainAllocationHandle that it gives "the same handle value used to map the memory";
 * and as long as the memory is lent, its handle is retained, so that no other has that
 * value.  It does not say whether BUFFER_ID is of a mapping or of what is mapped. */
static wsync_status_t identify_piece(const wsync_cuda_device_t *device,
                                     wsync_cuda_allocation_t *found, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = device->driver;
    const char *call = "cuMemRetainAllocationHandle";
    wsync_cu_handle_t handle = 0;
    wsync_cu_result_t code = driver->mem_retain(&handle, (void *)(uintptr_t)found->at);

    if (code == WSYNC_CU_SUCCESS) {
        call = "cuMemRelease";
        code = driver->mem_release(handle);
        found->identity = handle;
        found->piece = true;
    } else if (wsync_cuda_is_unknown(code)) {
        return WSYNC_OK;
    }
    return wsync_cuda_check(driver, code, call, err, "memory at %#llx of %s", found->at,
                            device->label);
}

static wsync_status_t identify(const wsync_cuda_device_t *device,
                               const wsync_cuda_range_t *range,
                               wsync_cuda_allocation_t *found, wsync_error_t *err)
{
    *found =
        (wsync_cuda_allocation_t){.at = range->begin, .nbytes = range->end - range->begin};
    if (range->exportable) {
        return identify_piece(device, found, err);
    }
    if (range->legacy && found->at % BLOCK_NBYTES == 0 &&
        found->nbytes % BLOCK_NBYTES == 0) {
        /* "Subsequent allocations do not reuse IDs from previous freed allocations"
         * (cuda.h). */
        found->identity = range->buffer;
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_identify(const wsync_cuda_device_t *device,
                                   const wsync_cuda_ranges_t *ranges,
                                   wsync_cuda_allocation_t **items, wsync_error_t *err)
{
    wsync_cuda_allocation_t *found = calloc(ranges->count + 1, sizeof(*found));
    wsync_status_t status = WSYNC_OK;

    *items = found;
    if (found == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    for (size_t i = 0; i < ranges->count && status == WSYNC_OK; i++) {
        status = identify(device, &ranges->items[i], &found[i], err);
    }
    return status;
}

/* --- the lender -------------------------------------------------------------------------
 */

/* A record that has room for so many pieces. */
static wsync_status_t make_record(const wsync_cuda_device_t *device, size_t count,
                                  wsync_cuda_memory_t **memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *made = calloc(1, sizeof(*made));

    if (made == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    wsync_memory_init(&made->base, &device->base, 0);
    made->pieces = calloc(count + 1, sizeof(*made->pieces));
    if (made->pieces == NULL) {
        free(made);
        return wsync_no_memory(err, "calloc");
    }
    *memory = made;
    return WSYNC_OK;
}

/* In the context. */
static wsync_status_t lend_piece(wsync_cuda_memory_t *memory,
                                 const wsync_cuda_allocation_t *item, wsync_error_t *err)
{
    const wsync_cuda_driver_t *driver = wsync_cuda_of(memory->base.device)->driver;
    const char *call = "cuMemRetainAllocationHandle";
    wsync_cuda_piece_t *piece = &memory->pieces[memory->piece_count];
    int *fd = &memory->base.more[memory->base.more_count];
    wsync_cu_result_t code =
        driver->mem_retain(&piece->handle, (void *)(uintptr_t)item->at);

    if (code == WSYNC_CU_SUCCESS) {
        piece->nbytes = item->nbytes;
        memory->piece_count++;
        if (piece->handle != item->identity) {
            return wsync_fail(err, WSYNC_ERR_STATE, 0, "wsync_cuda_lend",
                              "%" PRIu64 " bytes at %#llx of a GPU have been replaced",
                              item->nbytes, item->at);
        }
        call = "cuMemExportToShareableHandle";
        code = driver->mem_export(fd, piece->handle, WSYNC_CU_HANDLE_FD, 0);
    }
    if (code != WSYNC_CU_SUCCESS) {
        return wsync_cuda_check(driver, code, call, err,
                                "lending %" PRIu64 " bytes at %#llx of a GPU", item->nbytes,
                                item->at);
    }
    memory->base.more_count++;
    (void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
    return WSYNC_OK;
}

/* In the context. */
static wsync_status_t lend_pieces(wsync_cuda_memory_t *memory,
                                  const wsync_cuda_allocation_t *items, size_t count,
                                  note_t *note, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;

    memory->base.more = calloc(count, sizeof(*memory->base.more));
    if (memory->base.more == NULL) {
        return wsync_no_memory(err, "calloc");
    }
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        note->sizes[i] = items[i].nbytes;
        note->nbytes += items[i].nbytes;
        status = lend_piece(memory, &items[i], err);
    }
    return status;
}

/* In the context. */
static wsync_status_t lend_whole(const wsync_cuda_memory_t *memory,
                                 const wsync_cuda_allocation_t *item, note_t *note,
                                 wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);

    note->nbytes = item->nbytes;
    note->at = item->at;
    return wsync_cuda_check(
        device->driver, device->driver->ipc_get_memory(&note->handle, item->at),
        "cuIpcGetMemHandle", err, "lending %" PRIu64 " bytes at %#llx of %s", item->nbytes,
        item->at, device->label);
}

static bool can_be_lent(const wsync_cuda_allocation_t *items, size_t count)
{
    bool good = count > 0 && (count == 1 || items[0].piece);

    for (size_t i = 0; i < count && good; i++) {
        good = items[i].identity != 0 && items[i].nbytes > 0 &&
               items[i].piece == items[0].piece &&
               (i == 0 || items[i].at == items[i - 1].at + items[i - 1].nbytes);
    }
    return good;
}

/* Fills a record and its note. */
static wsync_status_t lend(wsync_cuda_memory_t *memory,
                           const wsync_cuda_allocation_t *items, size_t pieces,
                           note_t *note, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status == WSYNC_OK) {
        status = pieces > 0 ? lend_pieces(memory, items, pieces, note, err)
                            : lend_whole(memory, items, note, err);
        wsync_cuda_leave(device);
    }
    memory->base.nbytes = note->nbytes;
    return status == WSYNC_OK
               ? wsync_blob_create((const uint8_t *)note, note_nbytes(pieces),
                                   &memory->base.fd, err)
               : status;
}

wsync_status_t wsync_cuda_lend(const wsync_cuda_device_t *device,
                               const wsync_cuda_allocation_t *items, size_t count,
                               wsync_memory_t **memory, wsync_error_t *err)
{
    wsync_cuda_memory_t *made = NULL;
    wsync_status_t status;
    note_t *note;
    size_t pieces;

    if (!can_be_lent(items, count)) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_cuda_lend",
                          "%zu allocations of %s that cannot be lent side by side", count,
                          device->label);
    }
    pieces = items[0].piece ? count : 0;
    note = calloc(1, note_nbytes(pieces));
    status = note != NULL ? make_record(device, pieces, &made, err)
                          : wsync_no_memory(err, "calloc");
    if (made != NULL) {
        note->uuid = device->info.uuid;
        memcpy(note->process, device->driver->process, sizeof(note->process));
        made->foreign = true;
        made->at = items[0].at;
        made->base.data = (void *)(uintptr_t)made->at;
        status = lend(made, items, pieces, note, err);
    }
    free(note);
    if (status != WSYNC_OK) {
        wsync_cuda_lent_destroy(made);
        return status;
    }
    *memory = &made->base;
    return WSYNC_OK;
}

/* False while a peer has the memory open; after that nobody opens it any more. */
static bool is_closed(const wsync_cuda_memory_t *memory)
{
    return memory->base.fd < 0 || flock(memory->base.fd, LOCK_EX | LOCK_NB) == 0;
}

bool wsync_cuda_retire(const wsync_memory_t *memory)
{
    const wsync_cuda_memory_t *self = (const wsync_cuda_memory_t *)(const void *)memory;

    return memory->device->ordinal < 0 || !self->foreign || memory->more_count > 0 ||
           is_closed(self);
}

/* --- the borrower -----------------------------------------------------------------------
 */

/* In the context. */
static wsync_status_t map_piece(wsync_cuda_memory_t *memory, wsync_cu_ptr_t at, int fd,
                                uint64_t nbytes, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_cu_handle_t handle = 0;
    wsync_cu_result_t code;
    wsync_status_t status = wsync_cuda_import_handle(device, fd, &handle, err);

    if (status != WSYNC_OK) {
        return status;
    }
    code = device->driver->mem_map(at, (size_t)nbytes, 0, handle, 0);
    if (code == WSYNC_CU_SUCCESS) {
        memory->pieces[memory->piece_count++] = (wsync_cuda_piece_t){.nbytes = nbytes};
    } else {
        /* What the driver says of a descriptor that holds less. */
        status =
            code == WSYNC_CU_INVALID_VALUE
                ? wsync_fail(err, WSYNC_ERR_REFUSED, code, "cuMemMap",
                             "descriptor %d does not hold %" PRIu64 " bytes of GPU memory",
                             fd, nbytes)
                : wsync_cuda_check(device->driver, code, "cuMemMap", err,
                                   "mapping %" PRIu64 " bytes that a peer lends", nbytes);
    }
    /* The mapping holds the memory from here on. */
    (void)device->driver->mem_release(handle);
    return status;
}

/* For reading; or also for writing, where the driver knows no memory that is only read.  In
 * the context. */
static wsync_status_t open_to_read(const wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_cu_access_t access = {
        .location = {WSYNC_CU_LOCATION_DEVICE, device->base.ordinal},
        .flags = WSYNC_CU_ACCESS_READ};
    const size_t nbytes = (size_t)memory->mapped_nbytes;
    wsync_cu_result_t code = device->driver->mem_set_access(memory->at, nbytes, &access, 1);

    if (code == WSYNC_CU_NOT_SUPPORTED || code == WSYNC_CU_INVALID_VALUE) {
        access.flags = WSYNC_CU_ACCESS_READ_WRITE;
        code = device->driver->mem_set_access(memory->at, nbytes, &access, 1);
    }
    return wsync_cuda_check(device->driver, code, "cuMemSetAccess", err,
                            "reading %zu bytes that a peer lends on %s", nbytes,
                            device->label);
}

/* In the context. */
static wsync_status_t map_pieces(wsync_cuda_memory_t *memory, const int *fds,
                                 const uint64_t *sizes, size_t count, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    const uint64_t nbytes = memory->base.nbytes;
    wsync_cu_ptr_t at = 0;
    wsync_status_t status;

    status = wsync_cuda_check(device->driver,
                              device->driver->mem_reserve(&at, (size_t)nbytes, 0, 0, 0),
                              "cuMemAddressReserve", err,
                              "addresses for %" PRIu64 " bytes that a peer lends", nbytes);
    if (status != WSYNC_OK) {
        return status;
    }
    memory->at = at;
    memory->mapped_nbytes = nbytes;
    memory->base.data = (void *)(uintptr_t)at;
    for (size_t i = 0; i < count && status == WSYNC_OK; i++) {
        status = map_piece(memory, at, fds[i], sizes[i], err);
        at += sizes[i];
    }
    return status == WSYNC_OK ? open_to_read(memory, err) : status;
}

static wsync_status_t check_sizes(const note_t *note, size_t pieces, wsync_error_t *err)
{
    uint64_t sum = pieces > 0 ? 0 : note->nbytes;

    for (size_t i = 0; i < pieces; i++) {
        if (note->sizes[i] == 0 || __builtin_add_overflow(sum, note->sizes[i], &sum)) {
            sum = UINT64_MAX;
            break;
        }
    }
    return note->nbytes > 0 && note->nbytes <= INT64_MAX && sum == note->nbytes
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_borrow",
                            "a peer lends %" PRIu64
                            " bytes of GPU memory in %zu pieces of "
                            "other sizes",
                            note->nbytes, pieces);
}

static bool is_of(const note_t *note, const wsync_cu_uuid_t *uuid)
{
    return memcmp(uuid, &note->uuid, sizeof(*uuid)) == 0;
}

/* REFUSED for memory of a GPU that this one does not reach. */
static wsync_status_t check_reach(const note_t *note, const wsync_cuda_device_t *device,
                                  wsync_error_t *err)
{
    bool reaches = is_of(note, &device->info.uuid);

    for (int i = 0; i < device->driver->device_count && !reaches; i++) {
        wsync_cu_uuid_t uuid;
        const wsync_status_t status = wsync_cuda_reaches(device, i, &reaches, &uuid, err);

        if (status != WSYNC_OK) {
            return status;
        }
        reaches = reaches && is_of(note, &uuid);
    }
    return reaches ? WSYNC_OK
                   : wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                                "the descriptor holds memory of another GPU than %s",
                                device->label);
}

/* An engine may be in the trainer's own process, where the driver opens no handle of its
 * own: the memory is there already.  PIDs would not tell, which namespaces share. */
static bool is_own(const note_t *note, const wsync_cuda_device_t *device)
{
    const uint64_t *process = device->driver->process;

    return (process[0] | process[1]) != 0 &&
           memcmp(note->process, process, sizeof(note->process)) == 0 &&
           is_of(note, &device->info.uuid);
}

/* Marks the memory as open, for is_closed of its owner; in the context. */
static wsync_status_t open_whole(wsync_cuda_memory_t *memory, const note_t *note,
                                 wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_status_t status = WSYNC_OK;

    if (flock(memory->base.fd, LOCK_SH | LOCK_NB) != 0) {
        return wsync_fail(err, WSYNC_ERR_CLOSED, errno, "flock",
                          "the GPU memory of descriptor %d has been freed",
                          memory->base.fd);
    }
    if (is_own(note, device)) {
        memory->base.data = (void *)(uintptr_t)note->at;
        return WSYNC_OK;
    }
    status = wsync_cuda_ipc_open(device, &note->handle, &memory->ipc, err);
    if (status != WSYNC_OK) {
        return status;
    }
    memory->base.data = (void *)(uintptr_t)memory->ipc->at;
    return memory->ipc->nbytes >= note->nbytes
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                            "the descriptor stands for %" PRIu64
                            " bytes of GPU memory, expected %" PRIu64,
                            memory->ipc->nbytes, note->nbytes);
}

/* Reads a note by a description of the file's own, whose locks are no other's. */
static wsync_status_t read_note(wsync_cuda_memory_t *memory, int fd, size_t pieces,
                                note_t **note, wsync_error_t *err)
{
    char path[64];
    uint8_t *data = NULL;
    wsync_status_t status;

    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    memory->base.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (memory->base.fd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "open", "descriptor %d: open: %s", fd,
                          strerror(errno));
    }
    status = wsync_blob_read(memory->base.fd, note_nbytes(pieces), &data, err);
    *note = (note_t *)(void *)data;
    return status;
}

/* Fills a record from what a peer has sent. */
static wsync_status_t map_lent(wsync_cuda_memory_t *memory, const int *fds, size_t pieces,
                               const note_t *note, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_status_t status = check_reach(note, device, err);

    if (status == WSYNC_OK) {
        status = check_sizes(note, pieces, err);
    }
    if (status == WSYNC_OK) {
        memory->base.nbytes = note->nbytes;
        status = wsync_cuda_enter(device, err);
    }
    if (status == WSYNC_OK) {
        status = pieces > 0 ? map_pieces(memory, fds + 1, note->sizes, pieces, err)
                            : open_whole(memory, note, err);
        wsync_cuda_leave(device);
    }
    return status;
}

wsync_status_t wsync_cuda_borrow(const wsync_device_t *self, const int *fds, size_t count,
                                 wsync_memory_t **memory, wsync_error_t *err)
{
    const size_t pieces = count - 1;
    wsync_cuda_memory_t *made = NULL;
    note_t *note = NULL;
    wsync_status_t status = make_record(wsync_cuda_of(self), pieces, &made, err);

    if (made == NULL) {
        return status;
    }
    made->base.lent = true;
    status = read_note(made, fds[0], pieces, &note, err);
    if (note != NULL) {
        status = map_lent(made, fds, pieces, note, err);
    }
    free(note);
    if (status != WSYNC_OK) {
        wsync_cuda_lent_destroy(made);
        return status;
    }
    *memory = &made->base;
    return WSYNC_OK;
}

/* --- the end ----------------------------------------------------------------------------
 */

/* Unmaps pieces that were borrowed, from the last on.  In the context. */
static wsync_cu_result_t unmap_pieces(wsync_cuda_memory_t *memory)
{
    const wsync_cuda_driver_t *driver = wsync_cuda_of(memory->base.device)->driver;
    wsync_cu_ptr_t end = memory->at;
    wsync_cu_result_t code = WSYNC_CU_SUCCESS;

    for (size_t i = 0; i < memory->piece_count; i++) {
        end += memory->pieces[i].nbytes;
    }
    while (memory->piece_count > 0) {
        end -= memory->pieces[memory->piece_count - 1].nbytes;
        code =
            wsync_cuda_unmap(driver, end, memory->pieces[memory->piece_count - 1].nbytes);
        if (code != WSYNC_CU_SUCCESS) {
            return code;
        }
        memory->piece_count--;
    }
    return code;
}

wsync_status_t wsync_cuda_lent_park(wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    const size_t count = memory->piece_count;
    wsync_cu_result_t code;
    wsync_status_t status = wsync_cuda_enter(device, err);

    if (status != WSYNC_OK) {
        return status;
    }
    status = wsync_pins_park(&memory->base.pins, err);
    if (status == WSYNC_OK && memory->ipc != NULL) {
        wsync_cuda_ipc_destroy(memory->ipc);
        memory->ipc = NULL;
    } else if (status == WSYNC_OK) {
        code = unmap_pieces(memory);
        status = wsync_cuda_check(device->driver, code, "cuMemUnmap", err,
                                  "unmapping %" PRIu64 " bytes that a peer lends",
                                  memory->base.nbytes);
        if (status != WSYNC_OK && memory->piece_count == count) {
            wsync_pins_unpark(&memory->base.pins); /* it is whole yet */
        }
    }
    if (status == WSYNC_OK && memory->base.fd >= 0) {
        (void)close(memory->base.fd); /* and with it the lock */
        memory->base.fd = -1;
    }
    wsync_cuda_leave(device);
    return status;
}

void wsync_cuda_lent_destroy(wsync_cuda_memory_t *memory)
{
    const wsync_cuda_device_t *device;

    if (memory == NULL) {
        return;
    }
    device = wsync_cuda_of(memory->base.device);
    wsync_cuda_ipc_destroy(memory->ipc);
    if ((memory->at != 0 || memory->piece_count > 0) && wsync_cuda_enter_to_free(device)) {
        if (memory->foreign) {
            for (size_t i = 0; i < memory->piece_count; i++) {
                (void)device->driver->mem_release(memory->pieces[i].handle);
            }
        } else {
            (void)unmap_pieces(memory);
            (void)device->driver->mem_unreserve(memory->at, (size_t)memory->mapped_nbytes);
        }
        wsync_cuda_leave(device);
    }
    if (memory->base.fd >= 0) {
        (void)close(memory->base.fd);
    }
    wsync_memory_close_more(&memory->base);
    free(memory->pieces);
    free(memory);
}
