/* SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_compile_cache.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/checksum.h"
#include "device/io.h"

/* Compiled kernels are some 100 KiB: what is larger is none. */
enum { MAX_NBYTES = 64 * 1024 * 1024 };

/* Before the content: tells a file that was cut off or damaged. */
typedef struct cache_header {
    char magic[8];
    uint64_t nbytes;
    uint64_t checksum;
} cache_header_t;

static const char cache_magic[8] = "wsynckc1";

/* Whoever can write what is loaded into the GPU can run code there as this user. */
static bool is_ours(const struct stat *status)
{
    return status->st_uid == geteuid() && (status->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/* The folder's descriptor, or -1. */
static int open_folder(const char *folder)
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct stat status;

    if (fd >= 0 && (fstat(fd, &status) != 0 || !is_ours(&status))) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* Makes the folder and those above it; whether that worked shows when it is opened. */
static void make_folder(const char *folder)
{
    char path[PATH_MAX];
    const size_t length = strlen(folder);

    if (length >= sizeof(path)) {
        return;
    }
    memcpy(path, folder, length + 1);
    for (size_t i = 1; i < length; i++) {
        if (path[i] == '/') {
            path[i] = '\0';
            (void)mkdir(path, S_IRWXU);
            path[i] = '/';
        }
    }
    (void)mkdir(path, S_IRWXU);
}

static bool read_content(int fd, void **data, size_t *nbytes)
{
    cache_header_t header;
    struct stat status;
    void *content;

    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || !is_ours(&status) ||
        !wsync_read_all(fd, &header, sizeof(header), 0) ||
        memcmp(header.magic, cache_magic, sizeof(cache_magic)) != 0 || header.nbytes == 0 ||
        header.nbytes > MAX_NBYTES ||
        (uint64_t)status.st_size != sizeof(header) + header.nbytes) {
        return false;
    }
    content = malloc(header.nbytes);
    if (content == NULL) {
        return false;
    }
    if (!wsync_read_all(fd, content, header.nbytes, sizeof(header)) ||
        wsync_checksum(content, header.nbytes) != header.checksum) {
        free(content);
        return false;
    }
    *data = content;
    *nbytes = header.nbytes;
    return true;
}

bool wsync_cache_load(const char *folder, const char *name, void **data, size_t *nbytes)
{
    const int folder_fd = open_folder(folder);
    bool loaded = false;
    int fd;

    if (folder_fd < 0) {
        return false;
    }
    fd = openat(folder_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0) {
        loaded = read_content(fd, data, nbytes);
        (void)close(fd);
    }
    (void)close(folder_fd);
    return loaded;
}

/* Writes the file under a name of its own and moves it into place once it is on the disk.
 */
static bool write_file(int folder_fd, const char *name, const void *data, size_t nbytes)
{
    cache_header_t header = {.nbytes = nbytes, .checksum = wsync_checksum(data, nbytes)};
    char temporary[NAME_MAX + 1];
    uint64_t random;
    bool written;
    int fd;

    memcpy(header.magic, cache_magic, sizeof(cache_magic));
    if (getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random) ||
        snprintf(temporary, sizeof(temporary), "%s.%016" PRIx64, name, random) >=
            (int)sizeof(temporary)) {
        return false;
    }
    fd = openat(folder_fd, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                S_IRUSR | S_IWUSR);
    if (fd < 0) {
        return false;
    }
    written = wsync_write_all(fd, &header, sizeof(header)) &&
              wsync_write_all(fd, data, nbytes) && fsync(fd) == 0;
    written = close(fd) == 0 && written;
    written = written && renameat(folder_fd, temporary, folder_fd, name) == 0;
    if (!written) {
        (void)unlinkat(folder_fd, temporary, 0);
    }
    return written;
}

bool wsync_cache_store(const char *folder, const char *name, const void *data,
                       size_t nbytes)
{
    bool stored;
    int fd;

    make_folder(folder);
    fd = open_folder(folder);
    if (fd < 0) {
        return false;
    }
    stored = write_file(fd, name, data, nbytes);
    (void)close(fd);
    return stored;
}
