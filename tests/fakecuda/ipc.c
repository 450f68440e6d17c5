/* SPDX-License-Identifier: Apache-2.0
 * cuMemAlloc and the handles by which other processes open it.  An allocation is a memfd.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

#define ALLOCATION_NAME "fakecuda-allocation"

enum { HANDLE_MAGIC = 0x6d656d31, PAGE_NBYTES = 4096 };

typedef struct handle {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    int32_t device; /* the same number in all processes */
    uint64_t nbytes;
    uint64_t buffer;
    uint64_t mps; /* whether its owner is a client */
} handle_t;

_Static_assert(sizeof(handle_t) <= sizeof(wsync_cu_ipc_t), "handles are 64 bytes");

static size_t pages(size_t nbytes)
{
    return (nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES * PAGE_NBYTES;
}

/* Maps an allocation's memfd; moves the descriptor into the range. */
static fake_range_t *map_allocation(int fd, size_t nbytes, fake_kind_t kind)
{
    fake_range_t *range = calloc(1, sizeof(*range));
    void *data = mmap(NULL, pages(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const uintptr_t at = fake_reserve(pages(nbytes));

    if (range != NULL && data != MAP_FAILED && at != 0) {
        *range = (fake_range_t){.kind = kind,
                                .buffer = ++fake.next_buffer,
                                .at = at,
                                .host = data,
                                .nbytes = nbytes,
                                .opens = 1,
                                .fd = fd,
                                .next = fake.ranges};
        fake.ranges = range;
        return range;
    }
    free(range);
    (void)close(fd);
    return NULL;
}

static void unmap_allocation(fake_range_t *range)
{
    fake_bury(range);
    (void)close(range->fd);
    range->fd = -1;
    range->kind = FAKE_GRAVE;
}

static fake_range_t *find_base(fake_kind_t kind, wsync_cu_ptr_t at)
{
    for (fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (range->kind == kind && range->at == at) {
            return range;
        }
    }
    return NULL;
}

wsync_cu_result_t fake_mem_alloc(wsync_cu_ptr_t *at, size_t nbytes)
{
    struct wsync_cu_context *context = NULL;
    fake_range_t *range = NULL;
    int fd;
    wsync_cu_result_t code = fake_enter_context("cuMemAlloc", &context);

    if (code != WSYNC_CU_SUCCESS || nbytes == 0) {
        return code != WSYNC_CU_SUCCESS ? code : WSYNC_CU_INVALID_VALUE;
    }
    fake_lock();
    fd = nbytes > fake_free_nbytes(context->device)
             ? -1
             : memfd_create(ALLOCATION_NAME, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)pages(nbytes)) == 0) {
        range = map_allocation(fd, nbytes, FAKE_ALLOCATED);
    }
    if (range != NULL) {
        range->context = context;
        fake_charge(context->device, nbytes);
        *at = range->at;
    }
    fake_unlock();
    return range != NULL ? WSYNC_CU_SUCCESS : WSYNC_CU_OUT_OF_MEMORY;
}

wsync_cu_result_t fake_mem_free(wsync_cu_ptr_t at)
{
    struct wsync_cu_context *context = NULL;
    fake_range_t *range;
    wsync_cu_result_t code = fake_enter_return("cuMemFree", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_base(FAKE_ALLOCATED, at);
    if (range == NULL) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuMemFree: nothing is allocated there");
    } else if (fake_range_busy(range->at, range->nbytes)) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuMemFree while a stream uses it");
    } else {
        fake_charge(range->context->device, -range->nbytes);
        unmap_allocation(range);
    }
    fake_unlock();
    return fake_leave(code);
}

void fakecuda_replace(const void *at)
{
    const int fd = memfd_create(ALLOCATION_NAME, MFD_CLOEXEC);
    fake_range_t *old;
    fake_range_t *made = NULL;

    fake_lock();
    old = find_base(FAKE_ALLOCATED, (uintptr_t)at);
    if (old != NULL && ftruncate(fd, (off_t)pages(old->nbytes)) == 0) {
        made = map_allocation(fd, old->nbytes, FAKE_ALLOCATED);
    }
    if (made != NULL) {
        made->context = old->context;
        old->at = made->at;
        made->at = (uintptr_t)at;
        unmap_allocation(old);
    }
    fake_unlock();
}

wsync_cu_result_t fake_mem_range(wsync_cu_ptr_t *base, size_t *nbytes, wsync_cu_ptr_t at)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuMemGetAddressRange", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    code = WSYNC_CU_NOT_FOUND;
    fake_lock();
    for (const fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if ((range->kind == FAKE_ALLOCATED || range->kind == FAKE_OPENED ||
             range->kind == FAKE_MAPPED) &&
            at >= range->at && at - range->at < range->nbytes) {
            *base = range->at;
            *nbytes = range->nbytes;
            code = WSYNC_CU_SUCCESS;
        }
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_ipc_get_memory(wsync_cu_ipc_t *handle, wsync_cu_ptr_t at)
{
    const fake_range_t *range;
    handle_t made = {.magic = HANDLE_MAGIC, .pid = (int32_t)getpid()};
    wsync_cu_result_t code = fake_enter("cuIpcGetMemHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_base(FAKE_ALLOCATED, at);
    if (range == NULL) {
        code = WSYNC_CU_INVALID_VALUE;
    } else if (range->nbytes % FAKE_GRANULARITY != 0) {
        /* The real one gives away the block of memory that it is a part of, with all else
         * that lies there. */
        code =
            fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuIpcGetMemHandle: of a part of a block");
    } else {
        made.fd = range->fd;
        made.device = fake.first + range->context->device;
        made.nbytes = range->nbytes;
        made.buffer = range->buffer;
        made.mps = fake.mps;
        memset(handle, 0, sizeof(*handle));
        memcpy(handle, &made, sizeof(made));
    }
    fake_unlock();
    return code;
}

/* The same handle again, in the context that has it open. */
static wsync_cu_result_t open_again(fake_range_t *range,
                                    const struct wsync_cu_context *context,
                                    wsync_cu_ptr_t *at)
{
    if (range->context != context) {
        return WSYNC_CU_INVALID_CONTEXT;
    }
    range->opens++;
    *at = range->at;
    return WSYNC_CU_SUCCESS;
}

static wsync_cu_result_t open_new(const handle_t *handle, struct wsync_cu_context *context,
                                  wsync_cu_ptr_t *at)
{
    fake_range_t *range = NULL;
    char path[64];
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle->pid, handle->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || lseek(fd, 0, SEEK_END) != (off_t)pages((size_t)handle->nbytes)) {
        return WSYNC_CU_INVALID_VALUE; /* it was freed */
    }
    range = map_allocation(fd, (size_t)handle->nbytes, FAKE_OPENED);
    if (range == NULL) {
        return WSYNC_CU_MAP_FAILED;
    }
    range->context = context;
    range->owner = handle->pid;
    range->owner_buffer = handle->buffer;
    *at = range->at;
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_ipc_open_memory(wsync_cu_ptr_t *at, wsync_cu_ipc_t handle,
                                       unsigned flags)
{
    struct wsync_cu_context *context = NULL;
    fake_range_t *range;
    handle_t wanted;
    wsync_cu_result_t code = fake_enter_context("cuIpcOpenMemHandle", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    memcpy(&wanted, &handle, sizeof(wanted));
    if (wanted.magic != HANDLE_MAGIC || flags != WSYNC_CU_IPC_LAZY_PEER_ACCESS ||
        (wanted.mps != 0) != fake.mps) {
        return WSYNC_CU_INVALID_VALUE;
    }
    if (wanted.pid == (int32_t)getpid()) {
        return WSYNC_CU_INVALID_CONTEXT;
    }
    if (fake.no_peers && wanted.device != fake.first + context->device) {
        return FAKE_PEER_UNSUPPORTED;
    }
    fake_lock();
    for (range = fake.ranges; range != NULL; range = range->next) {
        if (range->kind == FAKE_OPENED && range->owner == wanted.pid &&
            range->owner_buffer == wanted.buffer) {
            break;
        }
    }
    code = range != NULL ? open_again(range, context, at) : open_new(&wanted, context, at);
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_ipc_close_memory(wsync_cu_ptr_t at)
{
    struct wsync_cu_context *context = NULL;
    fake_range_t *range;
    wsync_cu_result_t code = fake_enter_return("cuIpcCloseMemHandle", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_base(FAKE_OPENED, at);
    if (range == NULL || range->context != context) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuIpcCloseMemHandle: not open here");
    } else if (range->opens == 1 && fake_range_busy(range->at, range->nbytes)) {
        code = fake_refuse(WSYNC_CU_ILLEGAL_STATE,
                           "cuIpcCloseMemHandle while a stream uses it");
    } else if (--range->opens == 0) {
        unmap_allocation(range);
    }
    fake_unlock();
    return fake_leave(code);
}
