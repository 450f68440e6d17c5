/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_handle_memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/io.h"

enum {
    SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE,
    MAGIC = 0x69707732, /* changes with the note */
};

static wsync_status_t fail_call(const char *call, wsync_error_t *err)
{
    const int code = errno;

    return wsync_fail(err, WSYNC_ERR_OS, code, call,
                      "the handle of GPU memory in a memfd: %s: %s", call, strerror(code));
}

wsync_status_t wsync_cuda_handle_memfd_write(const wsync_cuda_handle_memfd_t *note,
                                             const uint64_t *sizes, size_t count, int *fd,
                                             wsync_error_t *err)
{
    const int made = memfd_create("wsync-handle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    wsync_cuda_handle_memfd_t filled = *note;
    wsync_status_t status = WSYNC_OK;

    filled.magic = MAGIC;
    if (made < 0) {
        return fail_call("memfd_create", err);
    }
    if (!wsync_write_all(made, &filled, sizeof(filled)) ||
        (count > 0 && !wsync_write_all(made, sizes, count * sizeof(*sizes)))) {
        status = fail_call("write", err);
    } else if (fcntl(made, F_ADD_SEALS, SEALS | F_SEAL_SEAL) != 0) {
        status = fail_call("fcntl", err);
    }
    if (status != WSYNC_OK) {
        (void)close(made);
        return status;
    }
    *fd = made;
    return WSYNC_OK;
}

static wsync_status_t check_file(int fd, size_t nbytes, wsync_error_t *err)
{
    struct stat info;
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
    if (info.st_size != (off_t)nbytes) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d holds %lld bytes, a handle of GPU memory has %zu",
                          fd, (long long)info.st_size, nbytes);
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_handle_memfd_read(int fd, int *own,
                                            wsync_cuda_handle_memfd_t *note,
                                            uint64_t *sizes, size_t count,
                                            wsync_error_t *err)
{
    const size_t more = count * sizeof(*sizes);
    char path[64];
    const wsync_status_t status = check_file(fd, sizeof(*note) + more, err);

    if (status != WSYNC_OK) {
        return status;
    }
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    *own = open(path, O_RDONLY | O_CLOEXEC);
    if (*own < 0) {
        return fail_call("open", err);
    }
    if (pread(*own, note, sizeof(*note), 0) != (ssize_t)sizeof(*note) ||
        (count > 0 && pread(*own, sizes, more, sizeof(*note)) != (ssize_t)more)) {
        return fail_call("pread", err);
    }
    if (note->magic != MAGIC) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "the descriptor holds no handle of GPU memory");
    }
    return WSYNC_OK;
}

wsync_status_t wsync_cuda_handle_memfd_check(const wsync_cuda_handle_memfd_t *note,
                                             const wsync_cuda_device_t *device,
                                             wsync_error_t *err)
{
    return memcmp(&note->uuid, &device->info.uuid, sizeof(note->uuid)) == 0
               ? WSYNC_OK
               : wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                            "the descriptor holds memory of another GPU than %s",
                            device->label);
}
