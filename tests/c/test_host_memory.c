/* SPDX-License-Identifier: Apache-2.0
 * Host memory: what is made, what is imported, what is refused. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/host.h"
#include "harness.h"

enum { NBYTES = 100001 }; /* not a whole number of pages */

static wsync_memory_t *make(void)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(wsync_device_host(), NBYTES, &memory, &err), err);
    return memory;
}

/* The import must fail with this status and leave the output alone. */
static void check_refused(int fd, uint64_t nbytes, wsync_status_t status, const char *part)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_memory_import(wsync_device_host(), fd, nbytes, &memory, &err), status);
    CHECK(memory == NULL);
    CHECK_EQ(err.status, status);
    CHECK_HAS(err.message, part);
}

TEST(create_gives_zeroed_memory)
{
    wsync_memory_t *memory = make();
    const unsigned char *data = memory->data;

    CHECK_EQ(memory->nbytes, NBYTES);
    for (size_t i = 0; i < NBYTES; i++) {
        CHECK_EQ(data[i], 0);
    }
    wsync_memory_destroy(memory);
    wsync_memory_destroy(NULL);
}

TEST(created_memory_keeps_its_size_for_ever)
{
    wsync_memory_t *memory = make();
    const int fd = memory->fd;

    CHECK(ftruncate(fd, 1) != 0 && errno == EPERM);
    CHECK(ftruncate(fd, NBYTES + 1) != 0 && errno == EPERM);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    wsync_memory_destroy(memory);
}

TEST(create_refuses_sizes_that_cannot_be)
{
    const wsync_device_t *device = wsync_device_host();
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_EQ(wsync_memory_create(device, 0, &memory, &err), WSYNC_ERR_INVALID);
    CHECK_EQ(wsync_memory_create(device, 1ULL << 60, &memory, &err), WSYNC_ERR_NO_MEMORY);
    CHECK_HAS(err.message, "1152921504606846976");
    CHECK_EQ(wsync_memory_create(device, UINT64_MAX, &memory, &err), WSYNC_ERR_NO_MEMORY);
    CHECK_HAS(err.message, "18446744073709551615");
    CHECK(memory == NULL);
}

TEST(import_sees_what_the_peer_writes)
{
    const wsync_device_t *device = wsync_device_host();
    wsync_memory_t *memory = make();
    wsync_memory_t *peer = NULL;
    wsync_error_t err = {0};
    unsigned char *data = memory->data;
    unsigned char *seen;

    data[NBYTES - 1] = 42;
    CHECK_OK(wsync_memory_import(device, memory->fd, NBYTES, &peer, &err), err);
    seen = peer->data;
    CHECK(seen != data);
    CHECK_EQ(seen[NBYTES - 1], 42);
    seen[0] = 7;
    CHECK_EQ(data[0], 7);
    wsync_memory_destroy(memory);
    CHECK_EQ(seen[0], 7); /* an import survives the exporter */
    wsync_memory_destroy(peer);
}

TEST(memory_lives_until_the_last_reference)
{
    wsync_memory_t *memory = make();
    unsigned char *data = memory->data;

    wsync_memory_retain(memory);
    wsync_memory_destroy(memory);
    data[0] = 1;
    CHECK_EQ(*(unsigned char *)memory->data, 1);
    wsync_memory_destroy(memory);
}

TEST(import_refuses_what_is_not_a_memfd)
{
    char path[] = "/var/tmp/wsync-test-XXXXXX";
    const int file = mkstemp(path);
    const int null = open("/dev/null", O_RDWR);
    int ends[2];

    CHECK(file >= 0 && null >= 0);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(ftruncate(file, NBYTES), 0);
    CHECK_EQ(pipe(ends), 0);
    check_refused(file, NBYTES, WSYNC_ERR_REFUSED, "descriptor");
    check_refused(null, NBYTES, WSYNC_ERR_REFUSED, "not a memfd");
    check_refused(ends[0], NBYTES, WSYNC_ERR_REFUSED, "not a memfd");
    check_refused(-1, NBYTES, WSYNC_ERR_OS, "descriptor -1");
    (void)close(file);
    (void)close(null);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

/* Else a peer could have us pay for any size that it names. */
TEST(import_refuses_memory_that_is_not_there_yet)
{
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(fd >= 0);
    CHECK_EQ(ftruncate(fd, NBYTES), 0);
    CHECK_EQ(posix_fallocate(fd, 0, 4096), 0);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    check_refused(fd, NBYTES, WSYNC_ERR_REFUSED, "4096 of its 100001 bytes");
    (void)close(fd);
}

/* Writes a file of a system that is played below `root`. */
static void play(const char *root, const char *name, const char *text)
{
    char path[512];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s%s", root, name);
    file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK_EQ(fclose(file), 0);
}

TEST(what_a_control_group_uses_is_not_available)
{
    static const char *const folders[] = {
        "", "/proc", "/sys", "/sys/fs", "/sys/fs/cgroup", "/sys/fs/cgroup/memory"};
    char root[] = "/tmp/wsync-room-XXXXXX";
    char path[512];

    CHECK(mkdtemp(root) != NULL);
    for (size_t i = 1; i < 6; i++) {
        (void)snprintf(path, sizeof(path), "%s%s", root, folders[i]);
        CHECK_EQ(mkdir(path, 0700), 0);
    }
    CHECK_EQ(wsync_host_memory_available(root), INT64_MAX);
    play(root, "/proc/meminfo", "MemFree: 1 kB\nMemAvailable:  8 kB\n");
    CHECK_EQ(wsync_host_memory_available(root), 8192);
    play(root, "/sys/fs/cgroup/memory.max", "max\n");
    play(root, "/sys/fs/cgroup/memory.current", "4000\n");
    CHECK_EQ(wsync_host_memory_available(root), 8192);
    play(root, "/sys/fs/cgroup/memory.max", "5000\n");
    CHECK_EQ(wsync_host_memory_available(root), 1000);
    play(root, "/sys/fs/cgroup/memory.stat", "inactive_anon 7\ninactive_file 500\n");
    CHECK_EQ(wsync_host_memory_available(root), 1500);
    play(root, "/sys/fs/cgroup/memory.current", "6000\n");
    CHECK_EQ(wsync_host_memory_available(root), 0);
    play(root, "/sys/fs/cgroup/memory.current", "100\n"); /* read at another moment */
    CHECK_EQ(wsync_host_memory_available(root), 5000);
    play(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "4000\n");
    play(root, "/sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n");
    play(root, "/sys/fs/cgroup/memory/memory.stat", "cache 1\ntotal_inactive_file 200\n");
    CHECK_EQ(wsync_host_memory_available(root), 1200);
    (void)snprintf(path, sizeof(path), "rm -rf %s", root);
    CHECK_EQ(system(path), 0);
}
