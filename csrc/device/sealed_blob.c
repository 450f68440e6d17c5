/* SPDX-License-Identifier: Apache-2.0 */
#include "device/sealed_blob.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/io.h"

enum { BLOB_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE };

wsync_status_t wsync_blob_create(const uint8_t *data, size_t nbytes, int *fd,
                                 wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    int memfd;

    if (nbytes > WSYNC_BLOB_MAX_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "blob",
                          "%zu bytes are more than the %llu that one blob may have", nbytes,
                          (unsigned long long)WSYNC_BLOB_MAX_NBYTES);
    }
    memfd = memfd_create("wsync-blob", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memfd < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "memfd_create", "memfd_create: %s",
                          strerror(errno));
    }
    if (!wsync_write_all(memfd, data, nbytes)) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "write",
                            "memfd of %zu bytes: write: %s", nbytes, strerror(errno));
    } else if (fcntl(memfd, F_ADD_SEALS, BLOB_SEALS | F_SEAL_SEAL) < 0) {
        status = wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "fcntl: sealing a memfd: %s",
                            strerror(errno));
    }
    if (status != WSYNC_OK) {
        (void)close(memfd);
        return status;
    }
    *fd = memfd;
    return WSYNC_OK;
}

wsync_status_t wsync_blob_read(int fd, uint64_t nbytes, uint8_t **data, wsync_error_t *err)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    struct stat info;
    uint8_t *copy;

    if (seals < 0 && errno != EINVAL) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "fcntl", "fcntl: seals of a blob: %s",
                          strerror(errno));
    }
    if (seals < 0 || (seals & BLOB_SEALS) != BLOB_SEALS) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, seals < 0 ? errno : 0, "blob",
                          "peer's descriptor has seals 0x%x, not all of 0x%x",
                          seals < 0 ? 0U : (unsigned)seals, (unsigned)BLOB_SEALS);
    }
    if (fstat(fd, &info) < 0) {
        return wsync_fail(err, WSYNC_ERR_OS, errno, "fstat", "fstat of a blob: %s",
                          strerror(errno));
    }
    if (nbytes > WSYNC_BLOB_MAX_NBYTES || (uint64_t)info.st_size != nbytes) {
        return wsync_fail(
            err, WSYNC_ERR_PROTOCOL, 0, "blob",
            "peer's blob has %llu bytes and is said to have %llu (at most %llu)",
            (unsigned long long)info.st_size, (unsigned long long)nbytes,
            (unsigned long long)WSYNC_BLOB_MAX_NBYTES);
    }
    copy = malloc(nbytes > 0 ? (size_t)nbytes : 1);
    if (copy == NULL) {
        return wsync_no_memory(err, "blob");
    }
    if (!wsync_read_all(fd, copy, (size_t)nbytes, 0)) {
        free(copy);
        return wsync_fail(err, WSYNC_ERR_OS, errno, "pread",
                          "blob of %llu bytes: pread: %s", (unsigned long long)nbytes,
                          strerror(errno));
    }
    *data = copy;
    return WSYNC_OK;
}
