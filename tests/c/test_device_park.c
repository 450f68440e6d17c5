/* SPDX-License-Identifier: Apache-2.0
 * Memory that is parked: its bytes go, its addresses stay. */
#include <fcntl.h>
#include <sys/mman.h>

#include "starve.h"

enum { NBYTES = 100001 };

static const wsync_device_t *device(void)
{
    return test_device();
}

static wsync_memory_t *make(void)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_create(device(), NBYTES, &memory, &err), err);
    return memory;
}

static unsigned char *bytes_of(const wsync_memory_t *memory)
{
    return reach(memory->data);
}

static void park(wsync_memory_t *memory)
{
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_park(memory, &err), err);
    CHECK_EQ(memory->fd, -1);
}

/* Mappings of this process that a name of shared memory stands behind. */
static long count_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    long count = 0;

    CHECK(maps != NULL);
    while (fgets(line, (int)sizeof(line), maps) != NULL) {
        count += strstr(line, "/memfd:") != NULL;
    }
    (void)fclose(maps);
    return count;
}

TEST(parked_memory_gives_its_bytes_back_and_keeps_its_addresses)
{
    wsync_memory_t *memory = make();
    const unsigned char *data = memory->data;
    const long mappings = count_mappings();
    const int fd = memory->fd;
    wsync_error_t err = {0};

    for (int i = 0; i < 3; i++) {
        park(memory);
        CHECK_EQ(count_mappings(), mappings - 1);
        CHECK_EQ(fcntl(fd, F_GETFD), -1);
        CHECK(memory->data == data);
        CHECK_EQ(memory->nbytes, NBYTES);
        /* the range is taken: nobody else is given it */
        CHECK(mmap(memory->data, 4096, PROT_READ,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED);
        CHECK_OK(wsync_memory_unpark(memory, -1, &err), err);
        CHECK_EQ(count_mappings(), mappings);
        CHECK(memory->data == data);
        CHECK((fcntl(memory->fd, F_GETFD) & FD_CLOEXEC) != 0);
        memset(bytes_of(memory), 7, NBYTES);
    }
    wsync_memory_destroy(memory);
    CHECK_EQ(count_mappings(), mappings - 1);
}

TEST(both_sides_get_the_new_bytes_where_the_old_ones_were)
{
    wsync_memory_t *memory = make();
    wsync_memory_t *peer = NULL;
    wsync_error_t err = {0};
    const unsigned char *data = memory->data;
    const unsigned char *seen;

    CHECK_OK(wsync_memory_import(device(), memory->fd, NBYTES, &peer, &err), err);
    seen = peer->data;
    park(peer);
    bytes_of(memory)[0] = 1; /* one side's parking is its own */
    park(memory);
    CHECK_OK(wsync_memory_unpark(memory, -1, &err), err);
    CHECK_OK(wsync_memory_unpark(peer, memory->fd, &err), err);
    CHECK(memory->data == data && peer->data == seen);
    bytes_of(memory)[NBYTES - 1] = 42;
    CHECK_EQ(bytes_of(peer)[NBYTES - 1], 42);
    park(memory);
    CHECK_EQ(bytes_of(peer)[NBYTES - 1], 42); /* an import needs its exporter no more */
    wsync_memory_destroy(memory);
    wsync_memory_destroy(peer);
}

TEST(memory_is_not_parked_under_who_looks_at_it)
{
    wsync_memory_t *memory = make();
    wsync_error_t err = {0};

    CHECK_OK(wsync_memory_pin(memory, &err), err);
    CHECK_OK(wsync_memory_pin(memory, &err), err);
    CHECK_EQ(wsync_memory_park(memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "2 views");
    wsync_memory_unpin(memory);
    CHECK_EQ(wsync_memory_park(memory, &err), WSYNC_ERR_STATE);
    bytes_of(memory)[0] = 1;
    CHECK(memory->fd >= 0);
    wsync_memory_unpin(memory);
    park(memory);
    CHECK_EQ(wsync_memory_pin(memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "parked");
    CHECK_OK(wsync_memory_unpark(memory, -1, &err), err);
    CHECK_OK(wsync_memory_pin(memory, &err), err);
    wsync_memory_unpin(memory);
    wsync_memory_destroy(memory);
}

TEST(memory_that_runs_out_leaves_it_parked_and_may_come_back)
{
    wsync_memory_t *memory;
    unsigned char *data;
    wsync_error_t err = {0};

    starve_prepare();
    memory = make();
    data = memory->data;
    park(memory);
    starve();
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(wsync_memory_unpark(memory, -1, &err), WSYNC_ERR_NO_MEMORY);
        CHECK_EQ(memory->fd, -1);
    }
    starve_no_more();
    CHECK_OK(wsync_memory_unpark(memory, -1, &err), err);
    CHECK(memory->data == data);
    bytes_of(memory)[NBYTES - 1] = 1;
    wsync_memory_destroy(memory);
}
