/* SPDX-License-Identifier: Apache-2.0
 * Host memory: a memfd of fixed size, mapped and faulted in. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/host.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum {
    SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW,
    BLOCK_NBYTES = 512, /* of st_blocks */
};

static wsync_status_t fail_call(const char *call, int code, uint64_t nbytes,
                                wsync_error_t *err)
{
    const bool full = code == ENOMEM || code == ENOSPC || code == EFBIG;

    return wsync_fail(err, full ? WSYNC_ERR_NO_MEMORY : WSYNC_ERR_OS, code, call,
                      "shared memory of %" PRIu64 " bytes: %s: %s", nbytes, call,
                      strerror(code));
}

/* The number that follows `key` ("" for a file that is only a number), or `otherwise`. */
static uint64_t read_number(const char *root, const char *name, const char *key,
                            uint64_t unit, uint64_t otherwise)
{
    char line[128];
    char path[512];
    uint64_t number = otherwise;
    const int length = snprintf(path, sizeof(path), "%s%s", root, name);
    FILE *file = length < (int)sizeof(path) ? fopen(path, "re") : NULL;

    if (file == NULL) {
        return otherwise;
    }
    while (fgets(line, (int)sizeof(line), file) != NULL) {
        const char *text = line + strlen(key);
        char *end = line;

        if (strncmp(line, key, strlen(key)) == 0) {
            const unsigned long long value = strtoull(text, &end, 10);

            if (end != text && __builtin_mul_overflow((uint64_t)value, unit, &number)) {
                number = otherwise;
            }
            break;
        }
    }
    (void)fclose(file);
    return number;
}

static uint64_t difference(uint64_t whole, uint64_t part)
{
    return part < whole ? whole - part : 0;
}

/* A control group's limit without what the group uses.  File pages that it has not used of
 * late count as used, but the kernel takes them back. */
static uint64_t group_room(const char *root, const char *limit, const char *used,
                           const char *stat, const char *inactive)
{
    const uint64_t pages = read_number(root, stat, inactive, 1, 0);
    const uint64_t kept = difference(read_number(root, used, "", 1, 0), pages);

    return difference(read_number(root, limit, "", 1, UINT64_MAX), kept);
}

/* fallocate does not fail where memory runs out: the kernel kills processes until the pages
 * are there.  So a size that cannot fit is refused before. */
uint64_t wsync_host_memory_available(const char *root)
{
    const uint64_t limits[] = {
        read_number(root, "/proc/meminfo", "MemAvailable:", 1024, UINT64_MAX),
        group_room(root, "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                   "/sys/fs/cgroup/memory.stat", "inactive_file "),
        group_room(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                   "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                   "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file "),
    };
    uint64_t least = INT64_MAX;

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        if (limits[i] < least) {
            least = limits[i];
        }
    }
    return least;
}

/* Gives every page of the mapping its page table entry, so that no copy takes a fault. */
static int populate(void *data, uint64_t nbytes)
{
    unsigned char *bytes = data;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);

    if (TEMP_FAILURE_RETRY(madvise(data, nbytes, MADV_POPULATE_WRITE)) == 0) {
        return 0;
    }
    if (errno != EINVAL) {
        return errno;
    }
    /* Before Linux 5.14.  An atomic no-op, because a peer may be writing already. */
    for (uint64_t offset = 0; offset < nbytes; offset += page) {
        (void)__atomic_fetch_or((volatile unsigned char *)(bytes + offset),
                                (unsigned char)0, __ATOMIC_RELAXED);
    }
    return 0;
}

static void memory_destroy(wsync_memory_t *memory)
{
    if (memory->data != NULL) {
        (void)munmap(memory->data, memory->nbytes);
    }
    if (memory->fd >= 0) {
        (void)close(memory->fd);
    }
    wsync_memory_close_more(memory);
    free(memory);
}

/* Moves fd into a new memory object, also on failure. */
static wsync_status_t map_fd(const wsync_device_t *self, int fd, uint64_t nbytes,
                             wsync_memory_t **memory, wsync_error_t *err)
{
    wsync_memory_t *made = malloc(sizeof(*made));
    wsync_status_t status;
    void *data;
    int code;

    if (made == NULL) {
        (void)close(fd);
        return wsync_no_memory(err, "malloc");
    }
    wsync_memory_init(made, self, nbytes);
    made->fd = fd;
    data = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        code = errno;
        status = code == EPERM || code == EACCES
                     ? wsync_fail(err, WSYNC_ERR_REFUSED, code, "mmap",
                                  "descriptor %d cannot be mapped for writing: %s", fd,
                                  strerror(code))
                     : fail_call("mmap", code, nbytes, err);
    } else {
        made->data = data;
        made->words = data;
        code = populate(data, nbytes);
        if (code == 0) {
            *memory = made;
            return WSYNC_OK;
        }
        status = fail_call("madvise", code, nbytes, err);
    }
    memory_destroy(made);
    return status;
}

static wsync_status_t create(const wsync_device_t *self, uint64_t nbytes,
                             wsync_memory_t **memory, wsync_error_t *err)
{
    wsync_status_t status = WSYNC_OK;
    const uint64_t available = wsync_host_memory_available("");
    int fd = -1;

    if (nbytes == 0) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_create",
                          "shared memory of 0 bytes");
    }
    if (nbytes > available) {
        return wsync_fail(err, WSYNC_ERR_NO_MEMORY, 0, "wsync_memory_create",
                          "shared memory of %" PRIu64 " bytes: only %" PRIu64
                          " bytes are available",
                          nbytes, available);
    }
    fd = memfd_create("wsync", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return fail_call("memfd_create", errno, nbytes, err);
    }
    if (TEMP_FAILURE_RETRY(ftruncate(fd, (off_t)nbytes)) != 0) {
        status = fail_call("ftruncate", errno, nbytes, err);
        goto cleanup;
    }
    if (TEMP_FAILURE_RETRY(fallocate(fd, 0, 0, (off_t)nbytes)) != 0) {
        status = fail_call("fallocate", errno, nbytes, err);
        goto cleanup;
    }
    /* Nobody else has the descriptor yet, so the size can never have been another one. */
    if (fcntl(fd, F_ADD_SEALS, SIZE_SEALS | F_SEAL_SEAL) != 0) {
        status = fail_call("fcntl", errno, nbytes, err);
        goto cleanup;
    }
    status = map_fd(self, fd, nbytes, memory, err);
    fd = -1; /* moved */

cleanup:
    if (fd >= 0) {
        (void)close(fd);
    }
    return status;
}

/* Here events can be in any memory. */
static wsync_status_t memory_make(const wsync_device_t *self, bool control, int fd,
                                  uint64_t nbytes, wsync_memory_t **memory,
                                  wsync_error_t *err)
{
    struct stat info;
    int seals;
    int own;

    (void)control;
    if (fd < 0) {
        return create(self, nbytes, memory, err);
    }
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0) {
        const int code = errno;

        if (code != EINVAL) {
            return wsync_fail(err, WSYNC_ERR_OS, code, "fcntl",
                              "seals of descriptor %d: fcntl: %s", fd, strerror(code));
        }
        return wsync_fail(err, WSYNC_ERR_REFUSED, code, "fcntl",
                          "descriptor %d is not a memfd, because it cannot have seals", fd);
    }
    if ((seals & SIZE_SEALS) != SIZE_SEALS) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d: seals 0x%x do not fix its size (0x%x needed)", fd,
                          (unsigned)seals, (unsigned)SIZE_SEALS);
    }
    if (fstat(fd, &info) != 0) {
        return fail_call("fstat", errno, nbytes, err);
    }
    if (nbytes == 0 || (uint64_t)info.st_size != nbytes) {
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "wsync_memory_import",
                          "descriptor %d holds %lld bytes, expected %" PRIu64, fd,
                          (long long)info.st_size, nbytes);
    }
    /* Mapping gives every page memory: as much as the peer has paid for already. */
    if ((uint64_t)info.st_blocks < nbytes / BLOCK_NBYTES) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_import",
                          "descriptor %d has memory for %lld of its %" PRIu64 " bytes", fd,
                          (long long)info.st_blocks * BLOCK_NBYTES, nbytes);
    }
    own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0) {
        return fail_call("fcntl", errno, nbytes, err);
    }
    return map_fd(self, own, nbytes, memory, err);
}

/* What a descriptor of shared memory holds now.  Only such files know seals: one on a disk
 * may be cut short by anybody. */
static wsync_status_t lent_nbytes(int fd, uint64_t *nbytes, wsync_error_t *err)
{
    struct stat info;

    if (fstat(fd, &info) != 0) {
        return fail_call("fstat", errno, 0, err);
    }
    if (fcntl(fd, F_GET_SEALS) < 0) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, errno, "wsync_memory_borrow",
                          "descriptor %d, which a peer lends, is not shared memory", fd);
    }
    *nbytes = (uint64_t)info.st_size;
    return WSYNC_OK;
}

static wsync_status_t memory_borrow(const wsync_device_t *self, const int *fds,
                                    size_t count, wsync_memory_t **memory,
                                    wsync_error_t *err)
{
    const int fd = fds[0];
    wsync_memory_t *made;
    uint64_t nbytes = 0;
    wsync_status_t status = lent_nbytes(fd, &nbytes, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (nbytes == 0) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_borrow",
                          "descriptor %d, which a peer lends, holds nothing", fd);
    }
    made = malloc(sizeof(*made));
    if (made == NULL) {
        return wsync_no_memory(err, "malloc");
    }
    wsync_memory_init(made, self, nbytes);
    made->lent = true;
    made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (made->fd < 0) {
        status = fail_call("fcntl", errno, nbytes, err);
    } else {
        void *data = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, made->fd, 0);

        if (data == MAP_FAILED) {
            status = fail_call("mmap", errno, nbytes, err);
        } else {
            made->data = data;
            status = count > 1 ? wsync_memory_keep_more(made, fds, count, err) : WSYNC_OK;
        }
    }
    if (status == WSYNC_OK) {
        *memory = made;
        return WSYNC_OK;
    }
    memory_destroy(made);
    return status;
}

static wsync_status_t memory_check_lent(const wsync_memory_t *memory, wsync_error_t *err)
{
    uint64_t nbytes = 0;
    const wsync_status_t status = lent_nbytes(memory->fd, &nbytes, err);

    if (status == WSYNC_OK && nbytes < memory->nbytes) {
        return wsync_fail(err, WSYNC_ERR_REFUSED, 0, "wsync_memory_check_lent",
                          "lent memory has shrunk from %" PRIu64 " bytes to %" PRIu64,
                          memory->nbytes, nbytes);
    }
    return status;
}

static wsync_status_t memory_park(wsync_memory_t *memory, wsync_error_t *err)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    const wsync_status_t status = wsync_pins_park(&memory->pins, err);

    if (status != WSYNC_OK) {
        return status;
    }
    if (mmap(memory->data, memory->nbytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        const int code = errno;

        wsync_pins_unpark(&memory->pins);
        return fail_call("mmap", code, memory->nbytes, err);
    }
    (void)close(memory->fd);
    memory->fd = -1;
    return WSYNC_OK;
}

static wsync_status_t memory_unpark(wsync_memory_t *memory, int fd, wsync_error_t *err)
{
    wsync_memory_t *made = NULL;
    wsync_status_t status =
        memory_make(memory->device, false, fd, memory->nbytes, &made, err);

    if (made == NULL) {
        return status;
    }
    /* Page tables and all: what was faulted in elsewhere stays so. */
    if (mremap(made->data, memory->nbytes, memory->nbytes, MREMAP_MAYMOVE | MREMAP_FIXED,
               memory->data) == MAP_FAILED) {
        status = fail_call("mremap", errno, memory->nbytes, err);
    } else {
        memory->fd = made->fd;
        made->fd = -1;
        made->data = NULL;
        wsync_pins_unpark(&memory->pins);
    }
    memory_destroy(made);
    return status;
}

const wsync_memory_ops_t wsync_host_memory_ops = {
    .make = memory_make,
    .borrow = memory_borrow,
    .check_lent = memory_check_lent,
    .destroy = memory_destroy,
    .park = memory_park,
    .unpark = memory_unpark,
};
