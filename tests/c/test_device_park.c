/* SPDX-License-Identifier: Apache-2.0
 * Memory that is parked: its bytes go, its addresses stay. */
#include <fcntl.h>
#include <sys/mman.h>

#include "starve.h"

enum { NBYTES = 100001 };

static const wsync_device_ops_t *ops(void)
{
    return test_device();
}

static wsync_memory_t *make(void)
{
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};

    CHECK_OK(ops()->memory_create(NBYTES, &memory, &err), err);
    return memory;
}

static unsigned char *bytes_of(const wsync_memory_t *memory)
{
    return ops()->memory_data(memory);
}

static void park(wsync_memory_t *memory)
{
    wsync_error_t err = {0};

    CHECK_OK(ops()->memory_park(memory, &err), err);
    CHECK_EQ(ops()->memory_fd(memory), -1);
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
    unsigned char *data = bytes_of(memory);
    const long mappings = count_mappings();
    const int fd = ops()->memory_fd(memory);
    wsync_error_t err = {0};

    for (int i = 0; i < 3; i++) {
        park(memory);
        CHECK_EQ(count_mappings(), mappings - 1);
        CHECK_EQ(fcntl(fd, F_GETFD), -1);
        CHECK(bytes_of(memory) == data);
        CHECK_EQ(ops()->memory_nbytes(memory), NBYTES);
        /* the range is taken: nobody else is given it */
        CHECK(mmap(data, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                   -1, 0) == MAP_FAILED);
        CHECK_OK(ops()->memory_unpark(memory, -1, &err), err);
        CHECK_EQ(count_mappings(), mappings);
        CHECK(bytes_of(memory) == data);
        CHECK((fcntl(ops()->memory_fd(memory), F_GETFD) & FD_CLOEXEC) != 0);
        memset(data, 7, NBYTES);
    }
    ops()->memory_destroy(memory);
    CHECK_EQ(count_mappings(), mappings - 1);
}

TEST(both_sides_get_the_new_bytes_where_the_old_ones_were)
{
    wsync_memory_t *memory = make();
    wsync_memory_t *peer = NULL;
    wsync_error_t err = {0};
    unsigned char *data = bytes_of(memory);
    unsigned char *seen;

    CHECK_OK(ops()->memory_import(ops()->memory_fd(memory), NBYTES, &peer, &err), err);
    seen = bytes_of(peer);
    park(peer);
    data[0] = 1; /* one side's parking is its own */
    park(memory);
    CHECK_OK(ops()->memory_unpark(memory, -1, &err), err);
    CHECK_OK(ops()->memory_unpark(peer, ops()->memory_fd(memory), &err), err);
    CHECK(bytes_of(memory) == data && bytes_of(peer) == seen);
    data[NBYTES - 1] = 42;
    CHECK_EQ(seen[NBYTES - 1], 42);
    park(memory);
    CHECK_EQ(seen[NBYTES - 1], 42); /* an import needs its exporter no more */
    ops()->memory_destroy(memory);
    ops()->memory_destroy(peer);
}

TEST(memory_is_not_parked_under_who_looks_at_it)
{
    wsync_memory_t *memory = make();
    wsync_error_t err = {0};

    CHECK_OK(ops()->memory_pin(memory, &err), err);
    CHECK_OK(ops()->memory_pin(memory, &err), err);
    CHECK_EQ(ops()->memory_park(memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "2 views");
    ops()->memory_unpin(memory);
    CHECK_EQ(ops()->memory_park(memory, &err), WSYNC_ERR_STATE);
    bytes_of(memory)[0] = 1;
    CHECK(ops()->memory_fd(memory) >= 0);
    ops()->memory_unpin(memory);
    park(memory);
    CHECK_EQ(ops()->memory_pin(memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "parked");
    CHECK_OK(ops()->memory_unpark(memory, -1, &err), err);
    CHECK_OK(ops()->memory_pin(memory, &err), err);
    ops()->memory_unpin(memory);
    ops()->memory_destroy(memory);
}

TEST(parking_out_of_order_changes_nothing)
{
    wsync_memory_t *memory = make();
    wsync_memory_t *none = NULL;
    const int fd = ops()->memory_fd(memory);
    wsync_error_t err = {0};

    CHECK_EQ(ops()->memory_unpark(memory, -1, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "not parked");
    CHECK_EQ(ops()->memory_fd(memory), fd);
    ops()->memory_retain(memory);
    park(memory);
    CHECK_EQ(ops()->memory_park(memory, &err), WSYNC_ERR_STATE);
    CHECK_HAS(err.message, "parked already");
    CHECK_EQ(ops()->memory_import(ops()->memory_fd(memory), NBYTES, &none, &err),
             WSYNC_ERR_OS);
    ops()->memory_destroy(memory);
    CHECK_OK(ops()->memory_unpark(memory, -1, &err), err);
    bytes_of(memory)[0] = 1;
    park(memory);
    ops()->memory_destroy(memory); /* parked as it is */
}

TEST(descriptors_are_checked_as_those_of_an_import)
{
    wsync_memory_t *memory = make();
    wsync_memory_t *other = NULL;
    wsync_memory_t *peer = NULL;
    const int loose = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const int next = dup(loose);
    wsync_error_t err = {0};

    CHECK_EQ(ftruncate(loose, NBYTES), 0);
    CHECK_OK(ops()->memory_create(1, &other, &err), err);
    CHECK_OK(ops()->memory_import(ops()->memory_fd(memory), NBYTES, &peer, &err), err);
    park(peer);
    CHECK_EQ(ops()->memory_unpark(peer, loose, &err), WSYNC_ERR_REFUSED);
    CHECK_EQ(ops()->memory_unpark(peer, next + 100, &err), WSYNC_ERR_OS);
    if (on_host()) { /* the GPU's granule is larger */
        CHECK_EQ(ops()->memory_unpark(peer, ops()->memory_fd(other), &err),
                 WSYNC_ERR_INVALID);
        CHECK_HAS(err.message, "holds 1 bytes, expected 100001");
    }
    CHECK_EQ(ops()->memory_fd(peer), -1);
    CHECK_OK(ops()->memory_unpark(peer, ops()->memory_fd(memory), &err), err);
    bytes_of(memory)[9] = 9;
    CHECK_EQ(bytes_of(peer)[9], 9);
    (void)close(loose);
    (void)close(next);
    ops()->memory_destroy(memory);
    ops()->memory_destroy(other);
    ops()->memory_destroy(peer);
}

TEST(memory_that_runs_out_leaves_it_parked_and_may_come_back)
{
    wsync_memory_t *memory;
    unsigned char *data;
    wsync_error_t err = {0};

    starve_prepare();
    memory = make();
    data = bytes_of(memory);
    park(memory);
    starve();
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ops()->memory_unpark(memory, -1, &err), WSYNC_ERR_NO_MEMORY);
        CHECK_EQ(ops()->memory_fd(memory), -1);
    }
    starve_no_more();
    CHECK_OK(ops()->memory_unpark(memory, -1, &err), err);
    CHECK(bytes_of(memory) == data);
    data[NBYTES - 1] = 1;
    ops()->memory_destroy(memory);
}
