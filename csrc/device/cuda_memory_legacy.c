/* SPDX-License-Identifier: Apache-2.0
 * Device memory of GPUs that cannot export it as a descriptor: an allocation whose IPC
 * handle lies in a sealed memfd, which crosses as the descriptor does elsewhere.
 *
 * Such memory may not be freed while another process has it open.  Who has it open holds a
 * shared lock on the memfd, which ends with the process at the latest; who frees it takes
 * the exclusive lock, and keeps the memory until that can be had. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include "device/cuda_handle_memfd.h"
#include "device/cuda_ipc.h"

/* Memory whose last reference is gone while peers have it open; each later making or giving
 * back of such memory looks whether they have closed it. */
static struct {
    pthread_mutex_t mutex;
    wsync_cuda_memory_t *first;
} kept = {.mutex = PTHREAD_MUTEX_INITIALIZER};  // NOLINT(cppcoreguidelines-*)

bool wsync_cuda_legacy_closed(const wsync_cuda_memory_t *memory)
{
    return memory->base.fd < 0 || flock(memory->base.fd, LOCK_EX | LOCK_NB) == 0;
}

/* Gives the memory back, then the lock. */
static void release(wsync_cuda_memory_t *memory)
{
    wsync_cuda_ipc_destroy(memory->ipc);
    memory->ipc = NULL;
    memory->at = 0;
    if (memory->base.fd >= 0) {
        (void)close(memory->base.fd);
        memory->base.fd = -1;
    }
}

static void sweep(void)
{
    wsync_cuda_memory_t **at;

    (void)pthread_mutex_lock(&kept.mutex);
    at = &kept.first;
    while (*at != NULL) {
        wsync_cuda_memory_t *memory = *at;

        if (wsync_cuda_legacy_closed(memory)) {
            *at = memory->next;
            release(memory);
            free(memory);
        } else {
            at = &memory->next;
        }
    }
    (void)pthread_mutex_unlock(&kept.mutex);
}

bool wsync_cuda_legacy_fini(wsync_cuda_memory_t *memory)
{
    if (memory->ipc == NULL) {
        return true;
    }
    /* A fork shares the locks of its parent, whose the memory is. */
    if (wsync_cuda_check_process(wsync_cuda_of(memory->base.device)->driver, NULL) ==
        WSYNC_OK) {
        sweep();
        if (!memory->ipc->opened && !wsync_cuda_legacy_closed(memory)) {
            (void)pthread_mutex_lock(&kept.mutex);
            memory->next = kept.first;
            kept.first = memory;
            (void)pthread_mutex_unlock(&kept.mutex);
            return false;
        }
    }
    release(memory);
    return true;
}

wsync_status_t wsync_cuda_legacy_allocate(wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_cuda_handle_memfd_t note = {.nbytes = memory->base.nbytes,
                                      .uuid = device->info.uuid};
    wsync_status_t status;

    sweep();
    status = wsync_cuda_ipc_create(device, memory->mapped_nbytes, &memory->ipc, err);
    if (status != WSYNC_OK) {
        return status;
    }
    memory->at = memory->ipc->at;
    memory->base.data = (void *)(uintptr_t)memory->at;
    note.handle = memory->ipc->handle;
    return wsync_cuda_handle_memfd_write(&note, NULL, 0, &memory->base.fd, err);
}

wsync_status_t wsync_cuda_legacy_lock(const wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    return flock(memory->base.fd, LOCK_SH | LOCK_NB) == 0
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_CLOSED, errno, "flock",
                            "the GPU memory of descriptor %d has been freed",
                            memory->base.fd);
}

wsync_status_t wsync_cuda_legacy_open(wsync_cuda_memory_t *memory,
                                      const wsync_cuda_handle_memfd_t *note,
                                      wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    wsync_status_t status = wsync_cuda_legacy_lock(memory, err);

    if (status == WSYNC_OK) {
        status = wsync_cuda_ipc_open(device, &note->handle, &memory->ipc, err);
    }
    if (status != WSYNC_OK) {
        return status;
    }
    memory->at = memory->ipc->at;
    memory->base.data = (void *)(uintptr_t)memory->at;
    if (memory->ipc->nbytes < memory->base.nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                          "the descriptor stands for %" PRIu64
                          " bytes of GPU memory, expected %" PRIu64,
                          memory->ipc->nbytes, memory->base.nbytes);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_legacy_adopt(wsync_cuda_memory_t *memory, int fd,
                                       wsync_error_t *err)
{
    wsync_cuda_handle_memfd_t note;
    wsync_status_t status =
        wsync_cuda_handle_memfd_read(fd, &memory->base.fd, &note, NULL, 0, err);

    if (status == WSYNC_OK) {
        status =
            wsync_cuda_handle_memfd_check(&note, wsync_cuda_of(memory->base.device), err);
    }
    if (status == WSYNC_OK && note.nbytes != memory->base.nbytes) {
        status = wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                            "the descriptor holds %" PRIu64
                            " bytes of GPU memory, expected %" PRIu64,
                            note.nbytes, memory->base.nbytes);
    }
    return status == WSYNC_OK ? wsync_cuda_legacy_open(memory, &note, err) : status;
}
