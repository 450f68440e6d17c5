/* SPDX-License-Identifier: Apache-2.0
 * Device memory of GPUs that cannot export it as a descriptor: an allocation whose IPC
 * handle lies in a sealed memfd, which crosses as the descriptor does elsewhere.
 *
 * Such memory may not be freed while another process has it open.  Who has it open holds a
 * shared lock on the memfd, which ends with the process at the latest; who frees it takes
 * the exclusive lock, and keeps the memory until that can be had. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/cuda_ipc.h"
#include "device/io.h"

enum {
    SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE,
    MAGIC = 0x69707731, /* changes with the note */
};

/* What the memfd holds. */
typedef struct note {
    uint64_t magic;
    uint64_t nbytes;
    wsync_cu_uuid_t uuid;
    wsync_cu_ipc_t handle;
} note_t;

/* Memory whose last reference is gone while peers have it open; each later making or giving
 * back of such memory looks whether they have closed it. */
static struct {
    pthread_mutex_t mutex;
    wsync_cuda_memory_t *first;
} kept = {.mutex = PTHREAD_MUTEX_INITIALIZER};  // NOLINT(cppcoreguidelines-*)

/* False while a peer has the memory open. */
static bool is_closed(const wsync_cuda_memory_t *memory)
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

        if (is_closed(memory)) {
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
        if (!memory->ipc->opened && !is_closed(memory)) {
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

static wsync_status_t fail_call(const char *call, wsync_error_t *err)
{
    const int code = errno;

    return wsync_fail(err, WSYNC_ERR_OS, code, call,
                      "the handle of GPU memory in a memfd: %s: %s", call, strerror(code));
}

static wsync_status_t write_note(int fd, const note_t *note, wsync_error_t *err)
{
    if (!wsync_write_all(fd, note, sizeof(*note))) {
        return fail_call("write", err);
    }
    return fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) == 0 ? WSYNC_OK
                                                            : fail_call("fcntl", err);
}

wsync_status_t wsync_cuda_legacy_allocate(wsync_cuda_memory_t *memory, wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);
    note_t note = {
        .magic = MAGIC, .nbytes = memory->base.nbytes, .uuid = device->info.uuid};
    wsync_status_t status;

    sweep();
    status = wsync_cuda_ipc_create(device, memory->mapped_nbytes, &memory->ipc, err);
    if (status != WSYNC_OK) {
        return status;
    }
    memory->at = memory->ipc->at;
    memory->base.data = (void *)(uintptr_t)memory->at;
    note.handle = memory->ipc->handle;
    memory->base.fd = memfd_create("wsync-handle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory->base.fd < 0) {
        return fail_call("memfd_create", err);
    }
    return write_note(memory->base.fd, &note, err);
}

/* The memory's own description of the file: locks are those of a description. */
static wsync_status_t open_note(int fd, int *own, wsync_error_t *err)
{
    struct stat info;
    char path[64];
    const int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 && errno == EBADF) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "descriptor %d: fcntl: %s", fd,
                          strerror(errno));
    }
    if (seals < 0 || (seals & SEALS) != SEALS) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d is not the sealed handle of GPU memory", fd);
    }
    if (fstat(fd, &info) != 0) {
        return fail_call("fstat", err);
    }
    if (info.st_size != (off_t)sizeof(note_t)) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d holds %lld bytes, a handle of GPU memory has %zu",
                          fd, (long long)info.st_size, sizeof(note_t));
    }
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    *own = open(path, O_RDONLY | O_CLOEXEC);
    return *own >= 0 ? WSYNC_OK : fail_call("open", err);
}

static wsync_status_t check_note(const wsync_cuda_memory_t *memory, const note_t *note,
                                 wsync_error_t *err)
{
    const wsync_cuda_device_t *device = wsync_cuda_of(memory->base.device);

    if (note->magic != MAGIC) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "the descriptor holds no handle of GPU memory");
    }
    if (memcmp(&note->uuid, &device->info.uuid, sizeof(note->uuid)) != 0) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "the descriptor holds memory of another GPU than %s",
                          device->label);
    }
    if (note->nbytes != memory->base.nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                          "the descriptor holds %" PRIu64
                          " bytes of GPU memory, expected %" PRIu64,
                          note->nbytes, memory->base.nbytes);
    }
    return WSYNC_OK;
}

static wsync_status_t open_handle(wsync_cuda_memory_t *memory, const wsync_cu_ipc_t *handle,
                                  wsync_error_t *err)
{
    const wsync_status_t status =
        wsync_cuda_ipc_open(wsync_cuda_of(memory->base.device), handle, &memory->ipc, err);

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
    note_t note;
    wsync_status_t status = open_note(fd, &memory->base.fd, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (pread(memory->base.fd, &note, sizeof(note), 0) != (ssize_t)sizeof(note)) {
        return fail_call("pread", err);
    }
    status = check_note(memory, &note, err);
    if (status == WSYNC_OK && flock(memory->base.fd, LOCK_SH | LOCK_NB) != 0) {
        status = wsync_fail(err, WSYNC_ERR_CLOSED, errno, "flock",
                            "the GPU memory of descriptor %d has been freed", fd);
    }
    return status == WSYNC_OK ? open_handle(memory, &note.handle, err) : status;
}
