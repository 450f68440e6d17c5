/* SPDX-License-Identifier: Apache-2.0
 * Device memory: physical memory and mappings, and what the host registers. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

#define PHYSICAL_NAME "fakecuda-physical"

enum { PAGE_NBYTES = 4096 };

static bool inside(const fake_range_t *range, uintptr_t at, size_t nbytes)
{
    return at >= range->at && at - range->at <= range->nbytes &&
           nbytes <= range->nbytes - (at - range->at);
}

static bool overlaps(const fake_range_t *range, uintptr_t at, size_t nbytes)
{
    return at < range->at + range->nbytes && range->at < at + nbytes;
}

/* The range of one of two kinds that holds these bytes. */
static fake_range_t *find(fake_kind_t kind, fake_kind_t other, uintptr_t at, size_t nbytes)
{
    for (fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if ((range->kind == kind || range->kind == other) && inside(range, at, nbytes)) {
            return range;
        }
    }
    return NULL;
}

/* The registration of an address of the host's. */
static fake_range_t *find_host(uintptr_t data, size_t nbytes)
{
    for (fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (range->kind == FAKE_HOST && data < (uintptr_t)range->host + range->nbytes &&
            (uintptr_t)range->host < data + nbytes) {
            return range;
        }
    }
    return NULL;
}

/* The first byte that is not mapped, of some. */
static uintptr_t walk_mapped(uintptr_t at, size_t nbytes)
{
    const uintptr_t end = at + nbytes;
    const fake_range_t *range;

    while (at < end && (range = find(FAKE_MAPPED, FAKE_MAPPED, at, 1)) != NULL) {
        at = range->at + range->nbytes;
    }
    return at;
}

wsync_cu_result_t fake_check_range(const char *call, uintptr_t at, size_t nbytes,
                                   bool by_host)
{
    if (find(FAKE_ALLOCATED, FAKE_ALLOCATED, at, nbytes) != NULL ||
        find(FAKE_OPENED, FAKE_HOST, at, nbytes) != NULL ||
        (nbytes > 0 && walk_mapped(at, nbytes) >= at + nbytes)) {
        return WSYNC_CU_SUCCESS;
    }
    for (const fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (overlaps(range, at, nbytes)) {
            return fake_refuse(WSYNC_CU_ILLEGAL_ADDRESS,
                               "%s: %zu bytes at %#zx that are not mapped, or no more",
                               call, nbytes, (size_t)at);
        }
    }
    return by_host || fake.pageable
               ? WSYNC_CU_SUCCESS
               : fake_refuse(WSYNC_CU_INVALID_VALUE,
                             "%s: %#zx is not of the device, and not registered", call,
                             (size_t)at);
}

uintptr_t fake_reserve(size_t nbytes)
{
    void *base =
        mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return base != MAP_FAILED ? (uintptr_t)base : 0;
}

void *fake_reach(uintptr_t at)
{
    for (const fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (range->host != NULL && at >= range->at && at - range->at < range->nbytes) {
            return range->host + (at - range->at);
        }
    }
    return (void *)at;
}

void *fakecuda_reach(const void *at)
{
    void *host;

    fake_lock();
    host = fake_reach((uintptr_t)at);
    fake_unlock();
    return host;
}

/* Adds a range; NULL without memory. */
static fake_range_t *add_range(fake_kind_t kind, uintptr_t at, size_t nbytes)
{
    fake_range_t *range = calloc(1, sizeof(*range));

    if (range != NULL) {
        range->kind = kind;
        range->buffer = ++fake.next_buffer;
        range->at = at;
        range->nbytes = nbytes;
        range->fd = -1;
        range->next = fake.ranges;
        fake.ranges = range;
    }
    return range;
}

static void remove_range(fake_range_t *range)
{
    for (fake_range_t **at = &fake.ranges; *at != NULL; at = &(*at)->next) {
        if (*at == range) {
            *at = range->next;
            free(range);
            return;
        }
    }
}

/* Where the processor reaches memory at its address, nothing else is put: what uses it
 * later is found out. */
void fake_bury(fake_range_t *range)
{
    const size_t nbytes = (range->nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES * PAGE_NBYTES;

    if ((uintptr_t)range->host != range->at && range->kind != FAKE_MAPPED) {
        (void)munmap(range->host, nbytes);
    } else {
        (void)mmap(range->host, nbytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    range->host = NULL;
}

/* --- physical memory -------------------------------------------------------------------
 */

size_t fake_free_nbytes(int device)
{
    return fake.memory - fake.used[device];
}

void fake_charge(int device, size_t nbytes)
{
    fake.used[device] += nbytes;
}

wsync_cu_result_t fake_mem_get_info(size_t *free_nbytes, size_t *total)
{
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = fake_enter_context("cuMemGetInfo", &context);

    if (code == WSYNC_CU_SUCCESS) {
        *free_nbytes = fake_free_nbytes(context->device);
        *total = fake.memory;
    }
    return code;
}

static bool good_property(const wsync_cu_property_t *property)
{
    return property->type == WSYNC_CU_ALLOCATION_PINNED &&
           property->location.type == WSYNC_CU_LOCATION_DEVICE &&
           property->location.id >= 0 && property->location.id < fake.device_count;
}

wsync_cu_result_t fake_mem_granularity(size_t *nbytes, const wsync_cu_property_t *property,
                                       int option)
{
    const wsync_cu_result_t code = fake_enter("cuMemGetAllocationGranularity");

    *nbytes = FAKE_GRANULARITY;
    return code == WSYNC_CU_SUCCESS &&
                   !(good_property(property) && option == WSYNC_CU_GRANULARITY_MINIMUM)
               ? WSYNC_CU_INVALID_VALUE
               : code;
}

static fake_physical_t *find_physical(wsync_cu_handle_t handle)
{
    for (fake_physical_t *at = fake.physicals; at != NULL; at = at->next) {
        if (at->handle == handle && at->handles > 0) {
            return at;
        }
    }
    return NULL;
}

static wsync_cu_result_t add_physical(const fake_physical_t *physical,
                                      wsync_cu_handle_t *handle)
{
    fake_physical_t *made = malloc(sizeof(*made));

    if (made == NULL) {
        (void)close(physical->fd);
        return WSYNC_CU_OUT_OF_MEMORY;
    }
    *made = *physical;
    made->handles = 1;
    made->handle = fake.next_handle++;
    made->next = fake.physicals;
    fake.physicals = made;
    fake_charge(made->device, made->charged ? made->nbytes : 0);
    *handle = made->handle;
    return WSYNC_CU_SUCCESS;
}

/* Physical memory goes with its last handle and its last mapping. */
static void drop_physical(fake_physical_t *physical)
{
    if (physical->handles > 0 || physical->maps > 0) {
        return;
    }
    for (fake_physical_t **at = &fake.physicals; *at != NULL; at = &(*at)->next) {
        if (*at == physical) {
            *at = physical->next;
            break;
        }
    }
    fake_charge(physical->device, physical->charged ? -physical->nbytes : 0);
    (void)close(physical->fd);
    free(physical);
}

wsync_cu_result_t fake_mem_create(wsync_cu_handle_t *handle, size_t nbytes,
                                  const wsync_cu_property_t *property,
                                  unsigned long long flags)
{
    const int device = property->location.id;
    fake_physical_t made = {.nbytes = nbytes,
                            .device = device,
                            .ordinal = device,
                            .types = property->handle_types,
                            .charged = true};
    char name[64];
    wsync_cu_result_t code = fake_enter("cuMemCreate");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (!good_property(property) || flags != 0 || nbytes == 0 ||
        nbytes % FAKE_GRANULARITY != 0) {
        return WSYNC_CU_INVALID_VALUE;
    }
    fake_lock();
    if (nbytes > fake_free_nbytes(device)) {
        code = WSYNC_CU_OUT_OF_MEMORY;
    } else {
        (void)snprintf(name, sizeof(name), PHYSICAL_NAME "-%d-%d-%d", fake.first + device,
                       device, property->handle_types);
        /* Nobody can take memory of the driver's away from others.  No seals that would
         * make it pass for memory of the host. */
        made.fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        code = made.fd < 0 || ftruncate(made.fd, (off_t)nbytes) != 0 ||
                       fcntl(made.fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0
                   ? WSYNC_CU_OUT_OF_MEMORY
                   : add_physical(&made, handle);
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_mem_release(wsync_cu_handle_t handle)
{
    fake_physical_t *physical;
    wsync_cu_result_t code = fake_enter_return("cuMemRelease", NULL);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    physical = find_physical(handle);
    if (physical == NULL) {
        code = fake_refuse(WSYNC_CU_INVALID_HANDLE, "cuMemRelease: no such handle");
    } else {
        physical->handles--;
        drop_physical(physical);
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_mem_retain(wsync_cu_handle_t *handle, void *at)
{
    const fake_range_t *range;
    wsync_cu_result_t code = fake_enter("cuMemRetainAllocationHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find(FAKE_MAPPED, FAKE_MAPPED, (uintptr_t)at, 1);
    if (range == NULL) {
        code = WSYNC_CU_INVALID_VALUE;
    } else {
        range->physical->handles++;
        *handle = range->physical->handle;
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_mem_properties(wsync_cu_property_t *property,
                                      wsync_cu_handle_t handle)
{
    const fake_physical_t *physical;
    wsync_cu_result_t code = fake_enter("cuMemGetAllocationPropertiesFromHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    physical = find_physical(handle);
    if (physical == NULL) {
        code = WSYNC_CU_INVALID_VALUE;
    } else {
        /* Nobody has said that an exporter's number becomes the importer's. */
        *property = (wsync_cu_property_t){
            .type = WSYNC_CU_ALLOCATION_PINNED,
            .handle_types = WSYNC_CU_HANDLE_FD,
            .location = {WSYNC_CU_LOCATION_DEVICE, physical->ordinal}};
    }
    fake_unlock();
    return code;
}

/* What the memfd's name tells: the device here, its ordinal there, and the handle types. */
static bool read_name(int fd, fake_physical_t *made)
{
    char path[64];
    char target[128];
    ssize_t length;

    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    length = readlink(path, target, sizeof(target) - 1);
    if (length < 0) {
        return false;
    }
    target[length] = '\0';
    if (sscanf(target, "/memfd:" PHYSICAL_NAME "-%d-%d-%d", &made->device, &made->ordinal,
               &made->types) != 3) {
        return false;
    }
    made->device -= fake.first;
    return made->device >= 0 && made->device < fake.device_count;
}

wsync_cu_result_t fake_mem_export(void *shareable, wsync_cu_handle_t handle, int type,
                                  unsigned long long flags)
{
    const fake_physical_t *physical;
    int fd = -1;
    wsync_cu_result_t code = fake_enter("cuMemExportToShareableHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    physical = find_physical(handle);
    if (physical == NULL || flags != 0 || (physical->types & type) == 0) {
        code = WSYNC_CU_INVALID_VALUE; /* not asked for at creation */
    } else {
        fd = fcntl(physical->fd, F_DUPFD_CLOEXEC, 3);
        code = fd < 0 ? WSYNC_CU_OPERATING_SYSTEM : WSYNC_CU_SUCCESS;
    }
    fake_unlock();
    if (code == WSYNC_CU_SUCCESS) {
        *(int *)shareable = fd;
    }
    return code;
}

wsync_cu_result_t fake_mem_import(wsync_cu_handle_t *handle, void *shareable, int type)
{
    const int fd = (int)(intptr_t)shareable;
    fake_physical_t made = {0};
    struct stat info;
    wsync_cu_result_t code = fake_enter("cuMemImportFromShareableHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (type != WSYNC_CU_HANDLE_FD || !read_name(fd, &made) || (made.types & type) == 0 ||
        fstat(fd, &info) != 0) {
        return WSYNC_CU_INVALID_VALUE;
    }
    made.nbytes = (size_t)info.st_size;
    made.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (made.fd < 0) {
        return WSYNC_CU_OPERATING_SYSTEM;
    }
    fake_lock();
    code = add_physical(&made, handle);
    fake_unlock();
    return code;
}

/* --- addresses -------------------------------------------------------------------------
 */

wsync_cu_result_t fake_mem_reserve(wsync_cu_ptr_t *at, size_t nbytes, size_t alignment,
                                   wsync_cu_ptr_t wanted, unsigned long long flags)
{
    fake_range_t *range = NULL;
    uintptr_t base;
    uintptr_t aligned;
    uintptr_t room;
    wsync_cu_result_t code = fake_enter("cuMemAddressReserve");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (nbytes == 0 || nbytes % FAKE_GRANULARITY != 0 || flags != 0 || wanted != 0 ||
        alignment > FAKE_GRANULARITY) {
        return WSYNC_CU_INVALID_VALUE;
    }
    base = fake_reserve(nbytes + FAKE_GRANULARITY);
    aligned = (base + FAKE_GRANULARITY - 1) / FAKE_GRANULARITY * FAKE_GRANULARITY;
    room = base == 0 ? aligned : fake_reserve(nbytes);
    if (base == 0 || room == 0) {
        return WSYNC_CU_OUT_OF_MEMORY;
    }
    fake_lock();
    range = add_range(FAKE_RESERVED, aligned, nbytes);
    if (range != NULL) {
        range->room = (unsigned char *)room;
    }
    fake_unlock();
    *at = aligned;
    return range != NULL ? WSYNC_CU_SUCCESS : WSYNC_CU_OUT_OF_MEMORY;
}

static fake_range_t *find_exact(fake_kind_t kind, uintptr_t at, size_t nbytes)
{
    fake_range_t *range = find(kind, kind, at, nbytes);

    return range != NULL && range->at == at && range->nbytes == nbytes ? range : NULL;
}

static bool is_mapped(uintptr_t at, size_t nbytes)
{
    for (const fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (range->kind == FAKE_MAPPED && overlaps(range, at, nbytes)) {
            return true;
        }
    }
    return false;
}

wsync_cu_result_t fake_mem_unreserve(wsync_cu_ptr_t at, size_t nbytes)
{
    fake_range_t *range;
    wsync_cu_result_t code = fake_enter_return("cuMemAddressFree", NULL);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_exact(FAKE_RESERVED, (uintptr_t)at, nbytes);
    if (range == NULL || is_mapped((uintptr_t)at, nbytes)) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuMemAddressFree: mapped, or unknown");
    } else {
        range->kind = FAKE_GRAVE;
        if ((uintptr_t)range->room != range->at) {
            (void)munmap(range->room, range->nbytes);
        }
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_mem_map(wsync_cu_ptr_t at, size_t nbytes, size_t offset,
                               wsync_cu_handle_t handle, unsigned long long flags)
{
    fake_physical_t *physical;
    const fake_range_t *reserved;
    fake_range_t *range = NULL;
    void *host = NULL;
    wsync_cu_result_t code = fake_enter("cuMemMap");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    physical = find_physical(handle);
    reserved = find(FAKE_RESERVED, FAKE_RESERVED, (uintptr_t)at, nbytes);
    if (physical == NULL || offset != 0 || flags != 0 || nbytes == 0 ||
        nbytes % FAKE_GRANULARITY != 0 || nbytes > physical->nbytes || reserved == NULL ||
        is_mapped((uintptr_t)at, nbytes)) {
        code = WSYNC_CU_INVALID_VALUE;
    } else {
        /* What lies side by side for the device does so for the fake's threads. */
        host = mmap(reserved->room + (at - reserved->at), nbytes, PROT_NONE,
                    MAP_SHARED | MAP_FIXED, physical->fd, 0);
        range = host != MAP_FAILED ? add_range(FAKE_MAPPED, (uintptr_t)at, nbytes) : NULL;
        code = range != NULL ? WSYNC_CU_SUCCESS : WSYNC_CU_MAP_FAILED;
    }
    if (range != NULL) {
        range->host = host;
        range->physical = physical;
        physical->maps++;
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_mem_unmap(wsync_cu_ptr_t at, size_t nbytes)
{
    fake_range_t *range;
    wsync_cu_result_t code = fake_enter_return("cuMemUnmap", NULL);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_exact(FAKE_MAPPED, (uintptr_t)at, nbytes);
    if (range == NULL) {
        code = fake_refuse(WSYNC_CU_INVALID_VALUE, "cuMemUnmap: nothing is mapped there");
    } else if (fake_range_busy((uintptr_t)at, nbytes)) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuMemUnmap while a stream uses it");
    } else {
        fake_bury(range);
        range->physical->maps--;
        drop_physical(range->physical);
        remove_range(range);
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_mem_set_access(wsync_cu_ptr_t at, size_t nbytes,
                                      const wsync_cu_access_t *access, size_t count)
{
    wsync_cu_result_t code = fake_enter("cuMemSetAccess");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    if (count != 1 || walk_mapped((uintptr_t)at, nbytes) != at + nbytes ||
        (access->flags != WSYNC_CU_ACCESS_READ &&
         access->flags != WSYNC_CU_ACCESS_READ_WRITE) ||
        access->location.type != WSYNC_CU_LOCATION_DEVICE || access->location.id < 0 ||
        access->location.id >= fake.device_count) {
        code = WSYNC_CU_INVALID_VALUE;
    }
    for (fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (code != WSYNC_CU_SUCCESS || range->kind != FAKE_MAPPED ||
            !overlaps(range, (uintptr_t)at, nbytes)) {
            continue;
        }
        if (fake.no_peers && access->location.id != range->physical->device) {
            code = FAKE_PEER_UNSUPPORTED;
        } else {
            /* Who writes there all the same ends the process, as a device its context. */
            (void)mprotect(
                range->host, range->nbytes,
                access->flags == WSYNC_CU_ACCESS_READ ? PROT_READ : PROT_READ | PROT_WRITE);
        }
    }
    fake_unlock();
    return code;
}

/* --- the host's memory -----------------------------------------------------------------
 */

wsync_cu_result_t fake_host_register(void *data, size_t nbytes, unsigned flags)
{
    /* As far into a page as the host's. */
    const size_t offset = (uintptr_t)data % PAGE_NBYTES;
    struct wsync_cu_context *context = NULL;
    fake_range_t *range = NULL;
    uintptr_t at;
    wsync_cu_result_t code = fake_enter_context("cuMemHostRegister", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if (data == NULL || nbytes == 0 ||
        (flags & ~(unsigned)(WSYNC_CU_HOST_PORTABLE | WSYNC_CU_HOST_DEVICE_MAP)) != 0) {
        return WSYNC_CU_INVALID_VALUE;
    }
    fake_lock();
    if (find_host((uintptr_t)data, nbytes) != NULL) {
        code = WSYNC_CU_ALREADY_REGISTERED;
    } else {
        at = fake_reserve(offset + nbytes);
        range = at != 0 ? add_range(FAKE_HOST, at + offset, nbytes) : NULL;
        code = range != NULL ? WSYNC_CU_SUCCESS : WSYNC_CU_OUT_OF_MEMORY;
    }
    if (range != NULL) {
        range->host = data;
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_host_unregister(void *data)
{
    fake_range_t *range;
    wsync_cu_result_t code = fake_enter_return("cuMemHostUnregister", NULL);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_host((uintptr_t)data, 1);
    if (range == NULL || range->host != data) {
        code = WSYNC_CU_NOT_REGISTERED;
    } else if (fake_range_busy(range->at, range->nbytes) ||
               fake_range_busy((uintptr_t)data, range->nbytes)) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE,
                           "cuMemHostUnregister while a stream uses it");
    } else {
        range->kind = FAKE_GRAVE;
        range->host = NULL;
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_host_pointer(wsync_cu_ptr_t *at, void *data, unsigned flags)
{
    struct wsync_cu_context *context = NULL;
    const fake_range_t *range;
    wsync_cu_result_t code = fake_enter_context("cuMemHostGetDevicePointer", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_host((uintptr_t)data, 1);
    if (flags != 0 || range == NULL) {
        code = WSYNC_CU_INVALID_VALUE;
    } else {
        *at = range->at + ((uintptr_t)data - (uintptr_t)range->host);
    }
    fake_unlock();
    return code;
}
